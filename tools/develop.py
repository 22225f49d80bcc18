"""Makes `.venv` with the package installed editable, its test and lint tools, and the extension.

The extension is compiled in `build/env`, a separate environment that holds the build requirements
(among them the oldest supported jaxlib, for its headers) and stays, so a rebuild is incremental.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_REQUIREMENTS = "import build_backend as b; print(*b.get_requires_for_build_editable(), sep='\\n')"
_BUILD = "import sys, build_backend as b; print(b.build_editable(sys.argv[1]), file=sys.stderr)"


def project() -> dict[str, Any]:
    """Returns the tables of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def environment(path: Path) -> Path:
    """Returns the Python of the virtual environment at `path`, made if missing."""
    python = path / "bin" / "python"
    if not python.exists():
        print(f"making {path}", flush=True)
        venv.create(path, with_pip=True)
    return python


def pip_install(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def build_editable(directory: Path) -> Path:
    """Returns the editable wheel, built in `build/env`."""
    python = environment(ROOT / "build" / "env")
    pip_install(python, *project()["build-system"]["requires"])
    variables = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "tools"),
    }

    def call(code: str, *arguments: str, output: int | None = None) -> str:
        command = [str(python), "-c", code, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=variables, stdout=output, text=True, check=True
        )
        return done.stdout

    requirements = call(_REQUIREMENTS, output=subprocess.PIPE).split()
    pip_install(python, *requirements)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    call(_BUILD, str(directory))
    return next(directory.glob("*.whl"))


def test_requirements() -> list[str]:
    """Returns what the package, its tests and its benchmarks need."""
    extras = project()["project"]["optional-dependencies"]
    needed = project()["project"]["dependencies"] + extras["test"] + extras["bench"]
    return needed + (extras["cuda"] if Path("/proc/driver/nvidia/version").exists() else [])


def main() -> None:
    if not shutil.which(os.environ.get("CXX", "c++")):
        sys.exit("jaxmoe needs a C++ compiler. Install g++ (Debian, Ubuntu: apt-get install g++)")
    python = environment(ROOT / ".venv")
    print("installing the requirements into .venv", flush=True)
    pip_install(python, *test_requirements(), *project()["dependency-groups"]["lint"])
    print("building the extension (four to five minutes on two cores the first time)", flush=True)
    wheel = build_editable(ROOT / "build" / "editable")
    pip_install(python, "--no-deps", "--force-reinstall", str(wheel))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(error.cmd)}")
