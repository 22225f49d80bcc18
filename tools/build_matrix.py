"""Builds the wheel in its three ways, each in a clean environment, and checks what comes out.

nvcc: the compiler on PATH or in CUDA_HOME. wheels: no nvcc in sight, so it comes from wheels.
pure: no CUDA extension and no compiler at all.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from develop import ROOT, environment, pip_install

MAX_BYTES = 20 * 2**20
OLDEST_JAX = "0.10.0"
_CHECK = """
import sys
import jax, jaxmoe
from jaxmoe._jax import targets as _targets
assert "site-packages" in jaxmoe.__file__, jaxmoe.__file__
assert _targets.cuda_available() == (sys.argv[1] == "True"), _targets.why_not()
ids = jax.numpy.array([[1, 0], [1, 2]], dtype=jax.numpy.int32)
offsets = jax.jit(lambda ids: jaxmoe.plan(ids, 3).expert_offsets)(ids)
assert offsets.tolist() == [0, 1, 3, 4], offsets
print("jax", jax.__version__, "runs plan on", jax.default_backend())
"""


def without(tool: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the directories of PATH that have `tool`, and no CUDA_*."""
    path = variables["PATH"].split(os.pathsep)
    kept = [directory for directory in path if not Path(directory, tool).exists()]
    rest = {name: value for name, value in variables.items() if not name.startswith("CUDA")}
    return {**rest, "PATH": os.pathsep.join(kept)}


def build(name: str, variables: Mapping[str, str], with_cuda: bool, work: Path) -> Path:
    """Returns the wheel that pip builds with build isolation from a new environment."""
    python = environment(work / "build-env")
    command = [str(python), "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(work / name)]
    command += ["-C", f"build-dir={work / name / 'build'}"]
    if not with_cuda:
        command += ["-C", "cmake.define.JAXMOE_CUDA=OFF"]
    start = time.monotonic()
    subprocess.run([*command, str(ROOT)], env=variables, check=True)
    wheel = next((work / name).glob("*.whl"))
    megabytes = wheel.stat().st_size / 1e6
    print(f"== {name}: {wheel.name}, {megabytes:.1f} MB, {time.monotonic() - start:.0f} s")
    return wheel


def check(name: str, wheel: Path, with_cuda: bool, work: Path) -> None:
    """Raises unless the wheel has the right tag and size and works on the oldest jax."""
    tag = "cp312-abi3-linux" if with_cuda else "py3-none-any"
    if tag not in wheel.name or wheel.stat().st_size > MAX_BYTES:
        sys.exit(f"{wheel.name}: the tag must be {tag}, the size at most {MAX_BYTES} bytes")
    python = environment(work / name / "env")
    pip_install(python, f"jax=={OLDEST_JAX}", f"jaxlib=={OLDEST_JAX}", str(wheel))
    command = [str(python), "-W", "error", "-c", _CHECK, str(with_cuda)]
    subprocess.run(command, cwd=work, check=True)


def main() -> None:
    hidden = without("nvcc", os.environ)
    builds = {
        "nvcc": (os.environ, True),
        "wheels": (hidden, True),
        "pure": ({**hidden, "PATH": ""}, False),
    }
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        print("== nvcc: not built, there is no nvcc here")
        del builds["nvcc"]
    if not shutil.which("c++", path=hidden["PATH"]):
        sys.exit("the build without nvcc needs a C++ compiler in a directory of PATH without nvcc")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for name, (variables, with_cuda) in builds.items():
            check(name, build(name, variables, with_cuda, work), with_cuda, work)


if __name__ == "__main__":
    main()
