"""Runs the tests against transformers, the newest of PyPI, in an environment of their own."""

import subprocess
import sys

from develop import ROOT, environment, pip_install, project

TESTS = ("pytest", "pytest-xdist")


def requirements() -> list[str]:
    """Returns what those tests need: the package's requirements, the extra and pytest."""
    extras = project()["project"]["optional-dependencies"]
    pytest = [item for item in extras["test"] if item.split(">")[0] in TESTS]
    return [*project()["project"]["dependencies"], *extras["parity"], *pytest]


def main() -> None:
    python = environment(ROOT / "build" / "parity")
    wheel = next((ROOT / "build" / "editable").glob("*.whl"))
    pip_install(python, "--upgrade", *requirements())
    pip_install(python, "--no-deps", "--force-reinstall", str(wheel))
    distributed = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    tests = ["tests/parity", "tests/test_routing_transformers.py"]
    command = [str(python), "-m", "pytest", *distributed, *tests, *sys.argv[1:]]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit("tests failed against transformers")


if __name__ == "__main__":
    main()
