"""The tensors of a folder of safetensors files, mapped into memory."""

import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmoe._jax.checks import FLOATS, dtype_name
from jaxmoe._load.files import DTYPES, OP, Place, index_of, places


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
        self._index = index_of(self.directory)
        self._places = places(self.directory, self._index)
        self._sorted = sorted(self._places.keys() | self._index.keys())
        self._mapped: dict[Path, np.ndarray[Any, Any]] = {}  # not longer: files may be replaced

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors, in order."""
        return self._sorted

    def parts(self, stem: str) -> set[str]:
        """What follows the stem in the names that begin with it: "", or a dot or "_" and more."""
        first = bisect.bisect_left(self._sorted, stem)
        last = bisect.bisect_left(self._sorted, stem + "`", first)  # behind "_" and before "a"
        ends = (name[len(stem) :] for name in self._sorted[first:last])
        return {end for end in ends if end[:1] in ("", ".", "_")}

    def numbers(self, before: str, after: str) -> Iterator[str]:
        """The digits between the two in the names that are no more than that."""
        names = self.names
        for at in range(bisect.bisect_left(names, before), len(names)):
            if not names[at].startswith(before):
                return
            digits = names[at][len(before) :].removesuffix(after)
            if digits.isdecimal() and names[at].endswith(after):
                yield digits

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._index

    def _place(self, name: str) -> Place:
        if name not in self._places:
            where = self.directory / self._index.get(name, "")
            raise LookupError(f"jaxmoe.{OP}: {where} has no tensor {name!r}")
        return self._places[name]

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        place = self._place(name)
        if place.path not in self._mapped:
            self._mapped[place.path] = np.memmap(place.path, np.uint8, "r")
        data = self._mapped[place.path][place.begin : place.end]
        return data.view(self.dtype(name)).reshape(place.shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of a tensor."""
        place = self._place(name)
        if place.dtype not in DTYPES:
            raise ValueError(
                f"jaxmoe.{OP}: {name} in {place.path} has the unknown dtype {place.dtype}"
            )
        return np.dtype(DTYPES[place.dtype])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._place(name).shape

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype, as the file spells it, and the shape of a tensor."""
        place = self._place(name)
        return place.dtype, place.shape

    def check_float(self, name: str, *shape: int) -> None:
        """Refuses a tensor of integers or of 8 bits, or of another shape, of which -1 fits all."""
        got, dtype = self.shape(name), self.dtype(name)
        fits = len(got) == len(shape) and all(w in (-1, n) for w, n in zip(shape, got, strict=True))
        if dtype.name not in FLOATS or (shape and not fits):
            rule = f", {list(shape)}" if shape else ""
            raise ValueError(
                f"jaxmoe.{OP}: {name} must be bf16, f16 or f32{rule}, not {dtype_name(dtype)} "
                f"{list(got)}"
            )

    def stacked(self, names: Sequence[str]) -> Piece:
        """Tensors of one dtype and shape, as one array."""
        found = [self._place(name) for name in names]
        spans = tuple(Span(place.path, place.begin, place.end) for place in found)
        return Piece(self.dtype(names[0]), (len(names), *found[0].shape), spans)

    def part(self, name: str, first: int, last: int) -> Piece:
        """Rows of a tensor."""
        path, _, shape, begin, end = self._place(name)
        row = (end - begin) // max(shape[0], 1)
        span = Span(path, begin + first * row, begin + last * row)
        return Piece(self.dtype(name), (last - first, *shape[1:]), (span,))

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor."""
        return self._place(name).end - self._place(name).begin
