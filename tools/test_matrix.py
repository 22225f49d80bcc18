"""Runs the CPU tests on the oldest supported jax and on the newest, each in its own environment."""

import subprocess
import sys

from develop import ROOT, environment, pip_install, requirements

VERSIONS = {"oldest": "==0.10.0", "newest": ">=0.10"}


def run(name: str, specifier: str, arguments: list[str]) -> bool:
    """Returns whether the tests pass with `jax<specifier>`."""
    python = environment(ROOT / "build" / "matrix" / name)
    wheel = next((ROOT / "build" / "editable").glob("*.whl"))
    needed = [item for item in requirements() if not item.startswith("jax")]
    pip_install(python, "--upgrade", *needed, f"jax{specifier}", f"jaxlib{specifier}")
    pip_install(python, "--no-deps", "--force-reinstall", str(wheel))
    print(f"== jax {name} ({specifier})", flush=True)
    command = [
        str(python),
        "-m",
        "pytest",
        "-n",
        "auto",
        "--maxprocesses",
        "4",
        "--dist",
        "worksteal",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> None:
    failed = [
        name for name, specifier in VERSIONS.items() if not run(name, specifier, sys.argv[1:])
    ]
    if failed:
        sys.exit(f"tests failed on jax {' and '.join(failed)}")


if __name__ == "__main__":
    main()
