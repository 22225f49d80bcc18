"""Runs the CPU tests on the oldest supported jax or on the newest, each in its own environment."""

import argparse
import subprocess
import sys
from pathlib import Path

from develop import ROOT, environment, pip_install, project, test_requirements

NAMES = ("oldest", "newest")


def versions(name: str) -> list[str]:
    """Returns what to install as jax: the oldest is the one whose headers we compile against."""
    if name == "newest":
        return ["jax", "jaxlib"]
    pinned = project()["dependency-groups"]["cuda-build"]
    jaxlib = next(item for item in pinned if item.startswith("jaxlib=="))
    return [jaxlib.replace("jaxlib", "jax"), jaxlib]


def installed(name: str) -> Path:
    """Returns the Python of an environment with that jax, the test tools and the built package."""
    python = environment(ROOT / "build" / "matrix" / name)
    wheel = next((ROOT / "build" / "editable").glob("*.whl"))
    needed = [item for item in test_requirements() if not item.startswith("jax")]
    pip_install(python, "--upgrade", *needed, *versions(name))
    pip_install(python, "--no-deps", "--force-reinstall", str(wheel))
    return python


def passes(name: str, arguments: list[str]) -> bool:
    """Returns whether the tests pass with that jax."""
    python = installed(name)
    print(f"== tests with {' and '.join(versions(name))}", flush=True)
    distributed = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    command = [str(python), "-m", "pytest", *distributed, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other arguments go to pytest.")
    parser.add_argument("--jax", choices=NAMES, help="only this one")
    chosen, arguments = parser.parse_known_args()
    failed = [name for name in NAMES if chosen.jax in (None, name) and not passes(name, arguments)]
    if failed:
        sys.exit(f"tests failed on the {' and the '.join(failed)} jax")


if __name__ == "__main__":
    main()
