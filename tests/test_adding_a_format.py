"""A format is added by the steps of docs/adding_a_format.md alone, to a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = "bf16_scaled"


def test_the_steps_of_the_page_add_a_format(tmp_path):
    package = tmp_path / "jaxmoe"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "jaxmoe", package, ignore=ignored)
    page = (ROOT / "docs" / "adding_a_format.md").read_text(encoding="utf-8")
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f'"{NAME}"' in b)
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    # Step 1: the file.
    (package / "_formats" / f"{NAME}.py").write_text(code, encoding="utf-8")
    # Step 2: its row.
    registry = package / "_formats" / "__init__.py"
    registry.write_text(applied(registry.read_text(encoding="utf-8"), diff), encoding="utf-8")
    # Without `site` no hook of an editable installation comes before the copy.
    installed = [path for path in sys.path if path.endswith("site-packages")]
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *installed]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
    }
    program = [sys.executable, "-P", "-S", str(ROOT / "tests" / "toy_format.py"), NAME]
    done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"done {NAME} {package}")


def applied(text: str, diff: str) -> str:
    """The text with the changes of a diff, whose hunks are divided by lines of dots."""
    for hunk in diff.split("...\n"):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in kinds)
            for kinds in (" -", " +")
        )
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
