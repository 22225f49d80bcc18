"""Memory of each GPU that the others of its host reach, which dispatch="direct" sends through."""

import dataclasses
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxmoe._ep import connect as _connect
from jaxmoe._ep.connect import OPEN
from jaxmoe._jax import checks as _checks

BYTES = "expert_parallel.peer_memory_bytes"
HEADER_BYTES = 8192
# Of half of the part for few tokens, for what travels in pairs, and for rows in lines of 128 bytes
# that have 112 of data (csrc/peers/lines.cuh): 2048 rows of 4 KiB, of 37 lines each.
MOST_PAIR_BYTES, MOST_LINE_BYTES = 6 << 20, 10 << 20
_ALIGNMENT = 256
_LONGEST_S = 1e6

_open: dict[tuple[str, ...], "PeerMemory"] = {}
# What of it is on GPUs, which decides what a program does: part of JAX's trace context, so that a
# function that was traced with other memory is traced again. Memory opened again as it was has the
# programs that it had.
_on_gpus: Any = jax.make_user_context(frozenset())


@dataclasses.dataclass(frozen=True)
class PeerMemory:
    """Memory that is open for `dispatch="direct"` along a mesh axis; a context manager.

    Attributes:
      axis_name: the axis, or axes, of the mesh.
      num_devices: n, devices along it.
      num_bytes: of memory on each of them.
      on_gpus: whether there is memory; without it XLA's collectives give the same results.
      group_axes: the other axes of the mesh, along which devices have memory with others.
      num_groups: devices along these.
      copies: whether copy engines may bring tokens while products run, which they may not between
        GPUs of one process in memory that several processes share.
    """

    axis_name: tuple[str, ...]
    num_devices: int
    num_bytes: int
    on_gpus: bool
    group_axes: tuple[str, ...] = ()
    num_groups: int = 1
    copies: bool = True

    @property
    def name(self) -> str:
        """Under which the kernels find it."""
        return self.axis_name[0] if len(self.axis_name) == 1 else repr(self.axis_name)

    def close(self) -> None:
        """Frees it; in every process, which wait for each other here.

        Programs that this process has started before end first; on GPUs compiled ones that are
        started after fail. Functions with "auto" are traced again and take another way, those with
        "direct" are refused.
        """
        if _open.get(self.axis_name) is not self:
            return
        _set(self.axis_name, None)
        if self.on_gpus:
            _connect.close(self.name)

    def __enter__(self) -> "PeerMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self.on_gpus and jax.process_count() > 1:
            _set(self.axis_name, None)  # the other processes may not come to close it
            return
        self.close()


def _set(names: tuple[str, ...], memory: PeerMemory | None) -> None:
    """Notes which memory is open along axes, in every thread."""
    _open.pop(names, None)
    if memory is not None:
        _open[names] = memory
    # The second is that of JAX 0.10.
    set_global = getattr(_on_gpus, "set_global", None) or _on_gpus._obj.set_global
    set_global(frozenset(m for m in _open.values() if m.on_gpus))


def opened(axis_name: Any, num_devices: int) -> PeerMemory | None:
    """The memory that is open along an axis of so many devices."""
    memory = _open.get(_names(axis_name))
    return memory if memory is not None and memory.num_devices == num_devices else None


def dispatch_bytes(
    num_tokens: int, top_k: int, num_devices: int, token_bytes: int, small: int
) -> int:
    """Bytes of a half that a dispatch takes: slots, tokens and small numbers of all devices.

    Args:
      token_bytes: of a token on its way to the experts.
      small: float32 numbers that travel beside it.
    """
    rows = num_devices * num_tokens
    return sum(map(aligned, (rows * top_k * 4, rows * token_bytes, rows * 4 * small)))


def combine_bytes(num_tokens: int, num_devices: int, row_bytes: int, small: int) -> int:
    """Bytes of a half that a combine takes: a row of each token from each device.

    `small`: float32 numbers that come home beside it.
    """
    rows = num_devices * num_tokens
    return aligned(rows * row_bytes) + aligned(rows * 4 * small)


def rows_bytes(num_tokens: int, top_k: int, row_bytes: int) -> int:
    """Bytes of a half that rows take which the devices of their experts store: T K of them."""
    return aligned(num_tokens * top_k * row_bytes)


def total_bytes(half: int) -> int:
    """Bytes of memory whose halves have so many.

    Beside each lies a part for few tokens. Of that one is for pairs, in which rows, ids and small
    numbers of all devices take twice their bytes, and one for lines, in which rows take 8/7.
    """
    return HEADER_BYTES + 2 * (half + _pair_bytes(half) + _line_bytes(half))


def parts_of(num_bytes: int) -> tuple[int, int, int]:
    """Bytes of a half, of its part for few tokens and of lines in that: as `total_bytes` adds."""
    both = (num_bytes - HEADER_BYTES) // 2
    least = both - MOST_PAIR_BYTES - MOST_LINE_BYTES, (both - MOST_PAIR_BYTES) // 3, both // 6
    half = max(least) // _ALIGNMENT * _ALIGNMENT
    lines = _line_bytes(half)
    return half, _pair_bytes(half) + lines, lines


def _pair_bytes(half: int) -> int:
    return min(3 * half, MOST_PAIR_BYTES)


def _line_bytes(half: int) -> int:
    return min(2 * half, MOST_LINE_BYTES)


def needed_bytes(
    num_tokens: int,
    top_k: int,
    num_devices: int,
    token_bytes: int,
    small: int,
    row_bytes: int,
    *,
    quantized: bool,
) -> int:
    """Bytes of memory for a layer and its gradient, see `dispatch_bytes`.

    In the backward pass cotangents of sums go out as tokens do, and those of tokens come home as
    sums do, with those of small numbers beside them.

    Args:
      row_bytes: of a sum.
      quantized: tokens are, and have no cotangent.
    """
    halves = [
        dispatch_bytes(num_tokens, top_k, num_devices, token_bytes, small),
        dispatch_bytes(num_tokens, top_k, num_devices, row_bytes, 0),
        combine_bytes(num_tokens, num_devices, row_bytes, 0 if quantized else small),
    ]
    return total_bytes(max(halves))


def peer_memory_bytes(
    num_tokens: int,
    hidden: int,
    top_k: int,
    num_devices: int,
    *,
    itemsize: int = 2,
) -> int:
    """Returns the bytes that `dispatch="direct"` needs on each GPU, for `open_peer_memory`.

    Layers of a program share them. With `num_chunks` T is that of a chunk.

    Args:
      num_tokens: T, tokens of one device; along the second of two axes T times the devices along
        the first.
      hidden: H.
      top_k: K.
      num_devices: n, size of the expert axis.
      itemsize: bytes of an element of x.

    Returns:
      Bytes, about 2 max(n, K) T H itemsize and 32 MiB: two halves, in each of which n devices leave
      a row a token, or a row for each of its K choices; and for few tokens up to five times as
      much again.

    Raises:
      TypeError, ValueError: a size that is not a positive int.

    Example:
      >>> from jaxmoe import expert_parallel
      >>> expert_parallel.peer_memory_bytes(4096, 7168, 8, 8)
      977281024
    """
    given = {
        "num_tokens": num_tokens,
        "hidden": hidden,
        "top_k": top_k,
        "num_devices": num_devices,
        "itemsize": itemsize,
    }
    for name, value in given.items():
        _checks.check_int(BYTES, name, value, 1)
    row = hidden * itemsize
    # Quantized tokens: a byte an element, whole words, and at most one float32 scale for 16.
    words, small, scales = -(-hidden // 4), top_k, -(-hidden // 16)
    sizes = num_tokens, top_k, num_devices
    return max(
        needed_bytes(*sizes, row, small, row, quantized=False),
        needed_bytes(*sizes, 4 * words, small + scales, row, quantized=True),
        total_bytes(rows_bytes(num_tokens, top_k, row)),
    )


def open_peer_memory(
    mesh: jax.sharding.Mesh,
    axis_name: str | tuple[str, ...],
    *,
    num_bytes: int,
    timeout_s: float = 300.0,
) -> PeerMemory:
    """Opens memory that the GPUs along a mesh axis reach over NVLink, for `dispatch="direct"`.

    Call it once, at the start, in every process of the program with the same arguments: functions
    that were traced before, whatever they compute, are traced and compiled again when they are
    called with GPUs' memory open, and after it is closed those that were traced meanwhile. On other
    devices than GPUs nothing is allocated, and programs run the same exchange by XLA's collectives.

    Args:
      mesh: the mesh of the layers.
      axis_name: the axis, or axes, over which their experts are spread: n devices, at most 16, of
        one host.
      num_bytes: of memory on each GPU, see `peer_memory_bytes`. It is CUDA's, beside what XLA takes
        (three quarters of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).
      timeout_s: how long a GPU waits for another one before its results become NaN and the next
        call fails with the name of the one that did not come. Programs of several processes compile
        unequally long.

    Returns:
      `PeerMemory`, to close.

    Raises:
      TypeError, ValueError: no mesh, an axis that it does not have, sizes out of range; memory is
        open along that axis already; another process opens something else.
      NotImplementedError: GPUs of several hosts along the axis, or too many; no CUDA extension.
      RuntimeError: CUDA cannot allocate or open the memory, or a GPU cannot read another's.

    Example:
      >>> import jax
      >>> from jaxmoe import expert_parallel
      >>> mesh = jax.make_mesh((1,), ("expert",))
      >>> num_bytes = expert_parallel.peer_memory_bytes(4, 8, 1, 1)
      >>> with expert_parallel.open_peer_memory(mesh, "expert", num_bytes=num_bytes) as memory:
      ...     memory.num_devices
      1
    """
    names = _names(axis_name)
    _check_arguments(mesh, names, num_bytes, timeout_s)
    others = tuple(n for n in mesh.axis_names if n not in names and mesh.shape[n] > 1)
    groups = _connect.groups_of(mesh, names, others)
    on_gpus = _is_of_gpus(mesh)
    memory = PeerMemory(
        names,
        groups.shape[1],
        int(num_bytes),
        on_gpus,
        others,
        groups.shape[0],
        _connect.can_copy(groups),
    )
    if on_gpus:
        _connect.connect(memory.name, groups, parts_of(num_bytes), float(timeout_s))
    _set(names, memory)
    return memory


def _is_of_gpus(mesh: jax.sharding.Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def _check_arguments(mesh: Any, names: tuple[str, ...], num_bytes: Any, timeout_s: Any) -> None:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(_checks.message(OPEN, "mesh must be a jax.sharding.Mesh", mesh=mesh))
    for name in names:
        _checks.check_choice(OPEN, "axis_name", name, mesh.axis_names)
    if not names or len(set(names)) < len(names):
        rule = f"axis_name={names!r} must be an axis of the mesh, or several, each once"
        raise ValueError(_checks.message(OPEN, rule))
    _checks.check_int(OPEN, "num_bytes", num_bytes, total_bytes(_ALIGNMENT))
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float | np.number):
        rule = f"timeout_s={timeout_s!r} must be a number of seconds"
        raise TypeError(_checks.message(OPEN, rule))
    if not 0 < timeout_s <= _LONGEST_S:
        rule = f"timeout_s={timeout_s!r} must be in (0, {_LONGEST_S:g}]"
        raise ValueError(_checks.message(OPEN, rule))
    if names in _open:
        axis = names[0] if len(names) == 1 else names
        rule = f"axis_name={axis!r} has open memory already; close it first"
        raise ValueError(_checks.message(OPEN, rule))


def aligned(size: int) -> int:
    """Bytes that an array of so many takes of a half."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _names(axis_name: Any) -> tuple[str, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
