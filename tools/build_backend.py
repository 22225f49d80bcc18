"""Build backend: scikit-build-core, plus the requirements of the CUDA extension when it is built.

`-C cmake.define.JAXMOE_CUDA=OFF` gives a pure-Python wheel and needs no compiler. Otherwise the
`cuda-build` group of pyproject.toml is a build requirement, and the `cuda-compiler` group too when
there is no nvcc on PATH or in CUDA_HOME.
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path

from scikit_build_core import build as _core
from scikit_build_core.build import build_sdist as build_sdist
from scikit_build_core.build import get_requires_for_build_sdist as get_requires_for_build_sdist

Settings = dict[str, list[str] | str] | None
_DEFINE = "cmake.define.JAXMOE_CUDA"
# A wheel without the extension: no CMake, and the tag of a pure-Python package.
_PURE = {"wheel.cmake": "false", "wheel.py-api": "py3", "wheel.platlib": "false"}


def _with_cuda(settings: Settings) -> bool:
    """Decides AUTO by the platform: a wheel for Linux never lacks the kernels silently."""
    value = str((settings or {}).get(_DEFINE, "AUTO")).upper()
    if value not in ("AUTO", "ON", "OFF"):
        raise SystemExit(f"jaxmoe: JAXMOE_CUDA={value} must be AUTO, ON or OFF")
    return sys.platform == "linux" if value == "AUTO" else value == "ON"


def _effective(settings: Settings) -> Settings:
    return {**(settings or {}), **({_DEFINE: "ON"} if _with_cuda(settings) else _PURE)}


def _has_nvcc() -> bool:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)])
    return bool(os.environ.get("CUDACXX") or shutil.which("nvcc", path=path))


def _cuda_requirements(settings: Settings) -> list[str]:
    if not _with_cuda(settings):
        return []
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    groups = tomllib.loads(pyproject.read_text(encoding="utf-8"))["dependency-groups"]
    return groups["cuda-build"] + ([] if _has_nvcc() else groups["cuda-compiler"])


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    core = _core.get_requires_for_build_wheel(_effective(settings))
    return core + _cuda_requirements(settings)


def get_requires_for_build_editable(settings: Settings = None) -> list[str]:
    core = _core.get_requires_for_build_editable(_effective(settings))
    return core + _cuda_requirements(settings)


def prepare_metadata_for_build_wheel(directory: str, settings: Settings = None) -> str:
    return _core.prepare_metadata_for_build_wheel(directory, _effective(settings))


def prepare_metadata_for_build_editable(directory: str, settings: Settings = None) -> str:
    return _core.prepare_metadata_for_build_editable(directory, _effective(settings))


def build_wheel(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    return _core.build_wheel(directory, _effective(settings), metadata)


def build_editable(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    return _core.build_editable(directory, _effective(settings), metadata)
