"""The tensors of a folder of safetensors files, mapped into memory."""

import bisect
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

OP = "load"
_INDEX = "model.safetensors.index.json"
_DTYPES: dict[str, Any] = {
    **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16},
    **{"U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64},
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


@dataclasses.dataclass(frozen=True)
class _Place:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


class Span(NamedTuple):
    """Bytes of a file."""

    path: Path
    begin: int
    end: int


class Piece(NamedTuple):
    """An array whose bytes are those of the spans, one after the other."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    spans: tuple[Span, ...]


class Shards:
    """Tensors by name. Bytes are read when they are used, and belong to the page cache."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._places: dict[str, _Place] = {}
        self._sorted: list[str] = []
        self._mapped: dict[Path, np.ndarray[Any, Any]] = {}  # not longer: files may be replaced
        for path in self._files():
            self._places.update(_header(path))

    def _files(self) -> list[Path]:
        index = self.directory / _INDEX
        if index.exists():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [self.directory / name for name in sorted(set(named))]
        else:
            files = sorted(self.directory.glob("*.safetensors"))
        missing = [path.name for path in files if not path.exists()]
        if missing or not files:
            what = ", ".join(missing) or "*.safetensors"
            raise FileNotFoundError(f"jaxmoe.{OP}: {self.directory} has no {what}")
        return files

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._places)

    def beginning(self, start: str) -> list[str]:
        """The names that begin so."""
        if not self._sorted:
            self._sorted = sorted(self._places)
        first = bisect.bisect_left(self._sorted, start)
        return self._sorted[first : bisect.bisect_left(self._sorted, start + "\U0010ffff")]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise LookupError(f"jaxmoe.{OP}: {self.directory} has no tensor {name!r}")
        return self._places[name]

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        place = self._place(name)
        if place.path not in self._mapped:
            self._mapped[place.path] = np.memmap(place.path, np.uint8, "r")
        data = self._mapped[place.path][place.begin : place.end]
        return data.view(_DTYPES[place.dtype]).reshape(place.shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of a tensor."""
        return np.dtype(_DTYPES[self._place(name).dtype])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._place(name).shape

    def stacked(self, names: Sequence[str]) -> Piece:
        """Tensors of one dtype and shape, as one array."""
        places = [self._place(name) for name in names]
        spans = tuple(Span(place.path, place.begin, place.end) for place in places)
        return Piece(self.dtype(names[0]), (len(names), *places[0].shape), spans)

    def part(self, name: str, first: int, last: int) -> Piece:
        """Rows of a tensor."""
        path, _, shape, begin, end = dataclasses.astuple(self._place(name))
        row = (end - begin) // max(shape[0], 1)
        span = Span(path, begin + first * row, begin + last * row)
        return Piece(self.dtype(name), (last - first, *shape[1:]), (span,))

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor."""
        return self._place(name).end - self._place(name).begin


def _header(path: Path) -> dict[str, _Place]:
    """The tensors that a file says it has; where their bytes are has been checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"jaxmoe.{OP}: {path} is cut off, or no safetensors file")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, tensor in header.items():
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        dtype, shape = tensor["dtype"], tuple(tensor["shape"])
        if dtype not in _DTYPES:
            raise ValueError(f"jaxmoe.{OP}: {name} in {path} has the unknown dtype {dtype}")
        if end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize or end > size:
            raise ValueError(
                f"jaxmoe.{OP}: {path} has bytes {begin} to {end} of {size} for {name}, "
                f"{dtype} {list(shape)}"
            )
        places[name] = _Place(path, dtype, shape, begin, end)
    return places
