"""Loads the CUDA extension and registers its FFI handlers with JAX."""

import contextlib
import importlib
import re
import warnings
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

_NO_EXTENSION = "this build of jaxmoe has no CUDA extension (built with JAXMOE_CUDA=OFF)"

_CAPABILITY = "9.0"  # what csrc is compiled for

# Part of JAX's trace context, so that a function traced outside is traced again inside.
_lowering_forced = jax.make_user_context(False)


def runtime_ffi_api_version(include_dir: str | None = None) -> tuple[int, int] | None:
    """Returns the XLA FFI API version of the installed jaxlib, None if its header is missing."""
    header = Path(include_dir or jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8")
    parts = [re.search(rf"define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(part[1]) if part else None for part in parts)
    return None if major is None or minor is None else (major, minor)


def _refusal(built: tuple[int, int], runtime: tuple[int, int] | None) -> str | None:
    """Returns why handlers built against FFI API `built` cannot be registered, or None."""
    # NOTE: XLA rejects a handler newer than itself while a backend initialises, which takes all
    # of JAX down and not only this package, so such a handler is never registered.
    if runtime is None:
        return "the XLA FFI API version of the installed jaxlib is unknown: it ships no c_api.h"
    if built > runtime:
        return (
            f"its XLA FFI API version {built[0]}.{built[1]} is newer than version "
            f"{runtime[0]}.{runtime[1]} of the installed jaxlib: install a newer jax, or rebuild "
            "jaxmoe against this jaxlib"
        )
    return None


def _load() -> tuple[ModuleType | None, str | None]:
    """Returns the extension with its handlers registered, or None and the reason."""
    try:
        extension = importlib.import_module("jaxmoe._cuda_ffi")
    except ModuleNotFoundError as error:
        if error.name != "jaxmoe._cuda_ffi":
            raise
        return None, _NO_EXTENSION
    except ImportError as error:
        reason = str(error)
    else:
        reason = _refusal(extension.ffi_api_version(), runtime_ffi_api_version())
        if reason is None:
            for name, handler in extension.registrations().items():
                jax.ffi.register_ffi_target(name, handler, platform="CUDA")
            return extension, None
    reason = f"the CUDA extension of jaxmoe cannot be used: {reason}"
    warnings.warn(f"{reason}. GPUs run the pure XLA implementation.", RuntimeWarning, stacklevel=2)
    return None, reason


_extension, _why_not = _load()


def cuda_available() -> bool:
    """Returns whether the CUDA handlers are registered (a GPU need not be present)."""
    return _extension is not None


def extension() -> Any:
    """The extension, for what is no program: None where `cuda_available` says no."""
    return _extension


def why_not() -> str | None:
    """The reason why the CUDA handlers are not registered, None if they are."""
    return _why_not


def device_reason() -> str | None:
    """Returns why a CUDA device of this process cannot run the kernels, None if all can.

    None too where there is no such device: programs may be lowered for another machine.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    for device in devices:
        capability = str(getattr(device, "compute_capability", _CAPABILITY))
        if capability != _CAPABILITY:
            return (
                f"jaxmoe: the CUDA kernels are for compute capability {_CAPABILITY} (Hopper); "
                f"{device.device_kind} has {capability}. Install jaxmoe with JAXMOE_CUDA=OFF to "
                "run the XLA implementation there"
            )
    return None


def execute_count(target: str) -> int:
    """Returns how often the handler of `target` has run or been recorded in this process."""
    if _extension is None:
        raise NotImplementedError(f"jaxmoe: no execution count of {target}: {_why_not}")
    return _extension.execute_count(target)


def tables() -> dict[str, Any]:
    """Returns the extension's tables, empty if it is too old to have any."""
    return getattr(_extension, "tables", dict)()


@contextlib.contextmanager
def force_cuda_lowering() -> Generator[None]:
    """Lowers for CUDA to FFI calls inside, even when the handlers are not registered (tests)."""
    with _lowering_forced(True):
        yield


def cuda_lowering_forced() -> bool:
    """Returns whether this is inside `force_cuda_lowering`."""
    return _lowering_forced.value
