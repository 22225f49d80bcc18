"""Where the tensors of a folder lie, by what its files and their index say in JSON."""

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

OP = "load"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16},
    **{"U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64},
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


class Place(NamedTuple):
    """Where a tensor is, its dtype as the file spells it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


@contextlib.contextmanager
def naming(what: str) -> Generator[None]:
    """Puts the name of what is read before errors of functions that know no files."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        why = str(error).removeprefix(f"jaxmoe.{OP}: ")
        raise type(error)(f"jaxmoe.{OP}: {what}: {why}") from error


def other(path: Path) -> str:
    """What is there in the place of a file, if anything is."""
    if path.is_dir():
        return " (a directory of that name)"
    return " (a link to nothing)" if path.is_symlink() and not path.exists() else ""


def mapping(what: str, value: Any) -> dict[str, Any]:
    """Refuses what is no object of JSON."""
    if not isinstance(value, dict):
        raise ValueError(f"jaxmoe.{OP}: {what} must be a JSON object, not {str(value):.80}")
    return value


def parsed(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object that a file, or the head of one, is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"jaxmoe.{OP}: {path} is no JSON: {error}") from error
    return mapping(str(path), value)


def index_of(directory: Path) -> dict[str, str]:
    """The file of each tensor by the index; empty where there is none."""
    path = directory / _INDEX
    if not os.path.lexists(path):
        return {}
    if not path.is_file():
        raise FileNotFoundError(f"jaxmoe.{OP}: {directory} has no {_INDEX}{other(path)}")
    files = mapping(f"weight_map of {path}", parsed(path, path.read_bytes()).get("weight_map"))
    for name, file in files.items():
        if not isinstance(file, str):
            raise ValueError(f"jaxmoe.{OP}: {path} has {file!r} as the file of {name}")
    return files


def places(directory: Path, index: Mapping[str, str]) -> dict[str, Place]:
    """Where each tensor is: in the file that the index names, else in the only one that has it.

    Raises:
      FileNotFoundError: a file that the index, or the name of another one, speaks of is missing.
      ValueError: a file that is broken, or two that have a tensor the index does not know.
    """
    out: dict[str, Place] = {}
    for file in _files(directory, index):
        for name, place in _header(directory / file).items():
            if index.get(name, file) != file:
                continue
            if name in out:
                raise ValueError(f"jaxmoe.{OP}: {name} is in {out[name].path} and in {place.path}")
            out[name] = place
    return out


def _files(directory: Path, index: Mapping[str, str]) -> list[str]:
    if index:
        files = sorted(set(index.values()))
        wanted = files
    elif os.path.lexists(directory / _WHOLE):
        files = wanted = [_WHOLE]  # others beside it are older, or of another format
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
        wanted = [*files, *(file for file in _sets(files) if file not in files)]
    missing = [file + other(path) for file in wanted if not (path := directory / file).is_file()]
    if missing or not files:
        more = f" and {len(missing) - 9} more" if len(missing) > 9 else ""
        what = ", ".join(missing[:9]) + more or "*.safetensors"
        raise FileNotFoundError(f"jaxmoe.{OP}: {directory} has no {what}")
    return files


def _sets(files: Sequence[str]) -> list[str]:
    """All files of the sets `..-00001-of-00003.safetensors` that some of these belong to."""
    parts = [m for f in files if (m := re.fullmatch(r"(.*?)(\d+)(-of-(\d{1,5})\.safetensors)", f))]
    first = min((int(m[2]) for m in parts), default=1)  # some count from 0
    sets = {(m[1], len(m[2]), m[3], int(m[4])) for m in parts}
    return [
        f"{stem}{number:0{width}}{end}"
        for stem, width, end, count in sorted(sets)
        for number in range(min(first, 1), min(first, 1) + count)
    ]


def _header(path: Path) -> dict[str, Place]:
    """The tensors that a file says it has; where their bytes are has been checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"jaxmoe.{OP}: {path} is cut off, or no safetensors file")
        header = parsed(path, file.read(length))
    header.pop("__metadata__", None)
    found = {name: _place(path, name, said, 8 + length, size) for name, said in header.items()}
    _check_apart(found)
    return found


def _check_apart(found: Mapping[str, Place]) -> None:
    """Refuses tensors of one file that share bytes."""
    there = sorted((at.begin, at.end, name) for name, at in found.items() if at.begin < at.end)
    for (_, end, one), (begin, _, name) in itertools.pairwise(there):
        if begin < end:
            path = found[one].path
            raise ValueError(f"jaxmoe.{OP}: {path} has {one} and {name} in the same bytes")


def _place(path: Path, name: str, said: Any, start: int, size: int) -> Place:
    try:
        dtype, (begin, end), shape = said["dtype"], said["data_offsets"], tuple(said["shape"])
        numbers = begin, end - begin, *shape
    except (KeyError, TypeError, ValueError):
        dtype, begin, end, shape, numbers = None, 0, 0, (), (0,)
    if type(dtype) is not str or set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise ValueError(
            f"jaxmoe.{OP}: {name} in {path} must have a dtype, a shape and two data_offsets, not "
            f"{said!s:.80}"
        )
    begin, end = start + begin, start + end
    # A tensor of an unknown dtype may be none that is read.
    wanted = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else end - begin
    if end - begin != wanted or end > size:
        raise ValueError(
            f"jaxmoe.{OP}: {path} has bytes {begin} to {end} of {size} for {name}, "
            f"{dtype} {list(shape)}"
        )
    return Place(path, dtype, shape, begin, end)
