"""Reads arrays from files in the order in which they are asked for, some before they are."""

import collections
import concurrent.futures
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from jaxmoe._load.files import OP
from jaxmoe._load.shards import Piece, Shards, Span

_THREADS = 8  # so many reads keep a disk busy, and copy out of the page cache
_READ_BYTES = 1 << 24
_READ_PARTS = 512  # arrays that a read fills; the system allows 1024
_ALIGNMENT = 64
# Of host memory: while less than so much is read ahead, arrays of another batch are begun. So no
# more than both and an array, beside the one that is in use.
_AHEAD_BYTES = 1 << 29
_BATCH_BYTES = 1 << 29


class _Reading(NamedTuple):
    piece: Piece
    data: np.ndarray[Any, Any]
    reads: list[concurrent.futures.Future[None]]


class _Part(NamedTuple):
    """Bytes of a file, where they go, and whose they are."""

    span: Span
    to: memoryview
    reading: _Reading


class Ahead:
    """Arrays of files; those of `pieces` are read by threads before they are taken, in that order.

    NOTE: by reads and not through a mapping, whose pages one thread would wait for one by one.
    Arrays are read some at a time and what is next to each other in a file at once, however small
    its parts: files have experts in order, and of each all its tensors.
    """

    def __init__(self, shards: Shards, pieces: Iterable[Piece] = ()) -> None:
        self.shards = shards
        self._coming: Iterator[Piece] = iter(pieces)
        self._begun: collections.deque[_Reading] = collections.deque()
        self._ahead = 0  # bytes of these
        self._files: dict[Path, int] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "jaxmoe.load")

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)

    def take(self, piece: Piece) -> np.ndarray[Any, Any]:
        """The array, in memory of its own."""
        self._go_on()
        if self._begun and self._begun[0].piece == piece:
            reading = self._begun.popleft()
            self._ahead -= reading.data.nbytes
        else:
            (reading,) = self._begin([piece])
        self._go_on()
        for read in reading.reads:
            read.result()
        return reading.data.view(piece.dtype).reshape(piece.shape)

    def _go_on(self) -> None:
        while self._ahead < _AHEAD_BYTES:
            batch: list[Piece] = []
            size = 0
            while size < _BATCH_BYTES and (piece := next(self._coming, None)) is not None:
                batch.append(piece)
                size += _size(piece)
            if not batch:
                return
            self._begun += self._begin(batch)
            self._ahead += size

    def _begin(self, batch: Sequence[Piece]) -> list[_Reading]:
        readings = [_Reading(piece, _aligned(_size(piece)), []) for piece in batch]
        parts = sorted(itertools.chain(*map(_parts, readings)), key=lambda part: part.span)
        run: list[_Part] = []
        for part in parts:
            if run and not _joins(run, part):
                self._submit(run)
                run = []
            run.append(part)
        if run:
            self._submit(run)
        return readings

    def _submit(self, run: list[_Part]) -> None:
        file = self._file(run[0].span.path)
        read = self._threads.submit(_read, file, run[0].span, [part.to for part in run])
        for part in run:
            part.reading.reads.append(read)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


def _aligned(size: int) -> np.ndarray[Any, Any]:
    """Bytes where JAX takes an array of the host as it is."""
    data = np.empty(size + _ALIGNMENT, np.uint8)
    return data[-data.ctypes.data % _ALIGNMENT :][:size]


def _size(piece: Piece) -> int:
    return sum(span.end - span.begin for span in piece.spans)


def _parts(reading: _Reading) -> Iterator[_Part]:
    """What fills an array, none of it too large for one read."""
    at = 0
    for span in reading.piece.spans:
        for begin in range(span.begin, span.end, _READ_BYTES):
            part = Span(span.path, begin, min(begin + _READ_BYTES, span.end))
            size = part.end - part.begin
            yield _Part(part, memoryview(reading.data)[at : at + size], reading)
            at += size


def _joins(run: list[_Part], part: _Part) -> bool:
    """Whether a part is next to a run in the file, and one read may have both."""
    first, last = run[0].span, run[-1].span
    same = (last.path, last.end) == (part.span.path, part.span.begin)
    return same and part.span.end - first.begin <= _READ_BYTES and len(run) < _READ_PARTS


def _read(file: int, first: Span, to: list[memoryview]) -> None:
    """Fills memory with what is in the file from the first span on."""
    at = first.begin
    if hasattr(os, "posix_fadvise"):  # all of it is asked of the disk at once, not window by window
        os.posix_fadvise(file, at, sum(map(len, to)), os.POSIX_FADV_WILLNEED)
    while to:
        count = os.preadv(file, to, at)
        if count == 0:
            raise ValueError(f"jaxmoe.{OP}: {first.path} was cut off while it was read")
        at += count
        while to and count >= len(to[0]):
            count -= len(to.pop(0))
        if count:
            to[0] = to[0][count:]
