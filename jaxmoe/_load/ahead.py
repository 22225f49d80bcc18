"""Reads arrays from files in the order in which they are asked for, some before they are."""

import collections
import concurrent.futures
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from jaxmoe._load.shards import OP, Piece, Shards, Span

_THREADS = 8  # so many reads keep a disk busy, and copy out of the page cache
_READ_BYTES = 1 << 24
_ALIGNMENT = 64
_AHEAD_BYTES = 1 << 30  # of host memory, beside the array that is in use


class _Reading(NamedTuple):
    piece: Piece
    data: np.ndarray[Any, Any]
    parts: list[concurrent.futures.Future[None]]


class Ahead:
    """Arrays of files; those of `pieces` are read by threads before they are taken, in that order.

    NOTE: by reads and not through a mapping, whose pages one thread would wait for one by one.
    """

    def __init__(self, shards: Shards, pieces: Iterable[Piece] = ()) -> None:
        self.shards = shards
        self._coming: Iterator[Piece] = iter(pieces)
        self._begun: collections.deque[_Reading] = collections.deque()
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
        first = bool(self._begun) and self._begun[0].piece == piece
        reading = self._begun.popleft() if first else self._begin(piece)
        self._go_on()
        for part in reading.parts:
            part.result()
        return reading.data.view(piece.dtype).reshape(piece.shape)

    def _go_on(self) -> None:
        while sum(reading.data.nbytes for reading in self._begun) < _AHEAD_BYTES:
            piece = next(self._coming, None)
            if piece is None:
                return
            self._begun.append(self._begin(piece))

    def _begin(self, piece: Piece) -> _Reading:
        data = _aligned(sum(span.end - span.begin for span in piece.spans))
        parts, at = [], 0
        for span in piece.spans:
            for begin in range(span.begin, span.end, _READ_BYTES):
                part = Span(span.path, begin, min(begin + _READ_BYTES, span.end))
                to = memoryview(data)[at : at + part.end - part.begin]
                parts.append(self._threads.submit(_read, self._file(span.path), part, to))
                at += part.end - part.begin
        return _Reading(piece, data, parts)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


def _aligned(size: int) -> np.ndarray[Any, Any]:
    """Bytes where JAX takes an array of the host as it is."""
    data = np.empty(size + _ALIGNMENT, np.uint8)
    return data[-data.ctypes.data % _ALIGNMENT :][:size]


def _read(file: int, span: Span, to: memoryview) -> None:
    done = 0
    while done < len(to):
        count = os.preadv(file, [to[done:]], span.begin + done)
        if count == 0:
            raise ValueError(f"jaxmoe.{OP}: {span.path} was cut off while it was read")
        done += count
