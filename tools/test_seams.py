"""Runs the tests of jaxmoe.seams beside the libraries it is for, in environments of their own.

Each is of one group of pyproject.toml, as libraries ask for different jax; it gets the newest that
its own accept. A test that is skipped there has not found what it needs: that is a failure.
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from develop import ROOT, environment, pip_install, project
from test_parity import TESTS

GROUPS = {
    "seams": ("maxtext", "megablox", "quantized", "tokamax", "transformer_engine"),
    "seams-levanter": ("levanter",),
}
# That a seam imports nothing of its library, which is there to be imported.
ALONE = "tests/test_package.py::test_seams_are_imported_by_name_alone"
# What no environment has. Their tests hold the seam to the contract written out.
NOT_INSTALLED = {
    "transformer-engine-jax 2.20.2": "compiled while it is installed, with the headers of CUDA",
}


def installed(group: str) -> Path:
    """Returns the Python of an environment with a group's libraries and the built package."""
    tables = project()
    pytest = [
        item
        for item in tables["project"]["optional-dependencies"]["test"]
        if item.split(">")[0] in TESTS
    ]
    needed = [*tables["project"]["dependencies"], *tables["dependency-groups"][group], *pytest]
    python = environment(ROOT / "build" / group)
    wheel = next((ROOT / "build" / "editable").glob("*.whl"))
    pip_install(python, "--upgrade", *needed)
    pip_install(python, "--no-deps", "--force-reinstall", str(wheel))
    return python


def skipped(report: Path) -> list[str]:
    """The tests that a JUnit report says were skipped, each with the reason."""
    cases = [(case, case.find("skipped")) for case in ElementTree.parse(report).iter("testcase")]
    return [
        f"{case.get('classname')}.{case.get('name')}: {why.get('message')}"
        for case, why in cases
        if why is not None
    ]


def failure(group: str, arguments: list[str]) -> str:
    """Runs the tests of a group. Returns what is wrong with them, "" if nothing is."""
    try:
        python = installed(group)
    except subprocess.CalledProcessError as error:
        return f"not installed: {' '.join(error.cmd)}"
    version = "import jax; print(jax.__version__)"
    jax = subprocess.run([str(python), "-c", version], capture_output=True, text=True, check=True)
    pinned = [item for item in project()["dependency-groups"][group] if "==" in item]
    print(f"== {', '.join(pinned)} with jax {jax.stdout.strip()}", flush=True)
    report = ROOT / "build" / group / "report.xml"
    report.unlink(missing_ok=True)
    tests = [ALONE, *(f"tests/test_seam_{name}.py" for name in GROUPS[group])]
    distributed = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    command = [str(python), "-m", "pytest", f"--junit-xml={report}", *distributed, *tests]
    done = subprocess.run([*command, *arguments], cwd=ROOT, check=False)
    if done.returncode:
        return f"tests failed: pytest ended with {done.returncode}"
    found = skipped(report)
    return "\n  ".join([f"{len(found)} tests were skipped:", *found]) if found else ""


def main() -> None:
    for name, why in NOT_INSTALLED.items():
        print(f"not tested against {name}: {why}", flush=True)
    found = {group: failure(group, sys.argv[1:]) for group in GROUPS}
    failed = [f"{group}: {text}" for group, text in found.items() if text]
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
