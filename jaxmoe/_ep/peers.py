"""Memory of each GPU that the others of its host reach, which dispatch="direct" sends through."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import targets as _targets

OPEN, BYTES = "expert_parallel.open_peer_memory", "expert_parallel.peer_memory_bytes"
MAX_PEERS = 16
HEADER_BYTES = 4096
_ALIGNMENT = 256
_HANDLE_BYTES = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_open: dict[tuple[str, ...], "PeerMemory"] = {}


@dataclasses.dataclass(frozen=True)
class PeerMemory:
    """Memory that is open for `dispatch="direct"` along a mesh axis; a context manager.

    Attributes:
      axis_name: the axis, or axes, of the mesh.
      num_devices: n, devices along it.
      num_bytes: of memory on each of them.
      on_gpus: whether there is memory; without it XLA's collectives give the same results.
    """

    axis_name: tuple[str, ...]
    num_devices: int
    num_bytes: int
    on_gpus: bool

    @property
    def name(self) -> str:
        """Under which the kernels find it."""
        return ",".join(self.axis_name)

    def close(self) -> None:
        """Frees it, in every process. Programs that use it fail from then on."""
        if _open.get(self.axis_name) is not self:
            return
        del _open[self.axis_name]
        if self.on_gpus:
            _close(self.name)

    def __enter__(self) -> "PeerMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def opened(axis_name: Any, num_devices: int) -> PeerMemory | None:
    """The memory that is open along an axis of so many devices."""
    memory = _open.get(_names(axis_name))
    return memory if memory is not None and memory.num_devices == num_devices else None


def dispatch_bytes(
    num_tokens: int, top_k: int, num_devices: int, token_bytes: int, small: int
) -> int:
    """Bytes of a half that a dispatch takes: slots of all tokens, and what this device's are.

    Args:
      token_bytes: of a token on its way to the experts.
      small: float32 numbers that travel beside it.
    """
    parts = (num_devices * num_tokens * top_k * 4, num_tokens * token_bytes, 4 * num_tokens * small)
    return sum(map(_aligned, parts))


def combine_bytes(num_tokens: int, num_devices: int, row_bytes: int) -> int:
    """Bytes of a half that a combine takes: a row of each token from each device."""
    return _aligned(num_devices * num_tokens * row_bytes)


def total_bytes(half: int) -> int:
    """Bytes of memory whose halves have so many."""
    return HEADER_BYTES + 2 * half


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
      num_tokens: T, tokens of one device.
      hidden: H.
      top_k: K.
      num_devices: n, size of the expert axis.
      itemsize: bytes of an element of x.

    Returns:
      Bytes, about 2 n T H itemsize: two halves, in each of which n devices leave a row a token.

    Raises:
      TypeError, ValueError: a size that is not a positive int.

    Example:
      >>> from jaxmoe import expert_parallel
      >>> expert_parallel.peer_memory_bytes(4096, 7168, 8, 8)
      939528192
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
    # Scales of quantized tokens: at most one for 16 elements, of float32, beside half of the bytes.
    small = 2 * top_k + -(-hidden // 16)
    sent = dispatch_bytes(num_tokens, top_k, num_devices, row, small)
    return total_bytes(max(sent, combine_bytes(num_tokens, num_devices, row)))


def open_peer_memory(
    mesh: jax.sharding.Mesh,
    axis_name: str | tuple[str, ...],
    *,
    num_bytes: int,
    timeout_s: float = 300.0,
) -> PeerMemory:
    """Opens memory that the GPUs along a mesh axis reach over NVLink, for `dispatch="direct"`.

    Call it once, before the functions that use it are traced, in every process of the mesh with the
    same arguments. On other devices than GPUs nothing is allocated, and programs run the same
    exchange by XLA's collectives, to the bit.

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
        open along that axis already.
      NotImplementedError: GPUs along the axis that do not reach each other: another host, too many,
        no peer access; no CUDA extension.
      RuntimeError: CUDA cannot allocate or open the memory.

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
    groups = _groups(mesh, names)
    on_gpus = mesh.devices.flat[0].platform in ("gpu", "cuda")
    if on_gpus:
        _check_gpus(groups)
        _connect(",".join(names), groups, num_bytes, float(timeout_s))
    memory = PeerMemory(names, groups.shape[1], num_bytes, on_gpus)
    _open[names] = memory
    return memory


def _check_arguments(mesh: Any, names: tuple[str, ...], num_bytes: Any, timeout_s: Any) -> None:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(_checks.message(OPEN, "mesh must be a jax.sharding.Mesh", mesh=mesh))
    for name in names:
        _checks.check_choice(OPEN, "axis_name", name, mesh.axis_names)
    _checks.check_int(OPEN, "num_bytes", num_bytes, total_bytes(_ALIGNMENT))
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        rule = f"timeout_s={timeout_s!r} must be a number of seconds above 0"
        raise ValueError(_checks.message(OPEN, rule))
    if names in _open:
        axis = names[0] if len(names) == 1 else names
        rule = f"axis_name={axis!r} has open memory already; close it first"
        raise ValueError(_checks.message(OPEN, rule))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _names(axis_name: Any) -> tuple[str, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _groups(mesh: jax.sharding.Mesh, names: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """The devices along some axes, as `jax.lax.axis_index` counts them: [groups, n]."""
    others = [name for name in mesh.axis_names if name not in names]
    order = [mesh.axis_names.index(name) for name in (*others, *names)]
    count = math.prod(mesh.shape[name] for name in names)
    return np.transpose(mesh.devices, order).reshape(-1, count)


def _check_gpus(groups: np.ndarray[Any, Any]) -> None:
    count = groups.shape[1]
    if count > MAX_PEERS:
        rule = f"the axis has {count} GPUs, which must be at most {MAX_PEERS}"
        raise NotImplementedError(_checks.message(OPEN, rule))
    why = _targets.why_not() or _targets.device_reason()
    if why is not None:
        raise NotImplementedError(_checks.message(OPEN, f"no kernels here: {why}"))


def _connect(name: str, groups: np.ndarray[Any, Any], num_bytes: int, timeout_s: float) -> None:
    """Allocates the memory of this process's devices, and opens that of their groups."""
    extension = _targets.extension()
    half = (num_bytes - HEADER_BYTES) // (2 * _ALIGNMENT) * _ALIGNMENT
    mine = [d for d in groups.flat if d.process_index == jax.process_index()]
    found: dict[int, tuple[int, bytes]] = {}
    failure: RuntimeError | None = None
    try:
        for device in mine:
            found[device.id] = extension.peer_allocate(name, device.local_hardware_id, half)
    except RuntimeError as error:
        failure = error
    everyone = _exchange(groups, found)  # in any case, or the other processes wait for ever
    try:
        if failure is not None:
            raise failure
        for group in groups:
            _connect_group(extension, name, group, everyone, timeout_s)
    except NotImplementedError as error:
        failure = error
    except RuntimeError as error:
        failure = RuntimeError(f"jaxmoe.{OPEN}: {error}")
    # Nobody starts before all are ready, nor if one is not.
    if not _everyone(failure is None):
        extension.peer_disconnect(name)
        _everyone(True)
        extension.peer_free(name)
        raise failure or RuntimeError(f"jaxmoe.{OPEN}: another process could not open the memory")


def _connect_group(
    extension: Any,
    name: str,
    group: Sequence[Any],
    everyone: dict[int, tuple[str, int, bytes]],
    timeout_s: float,
) -> None:
    here = jax.process_index()
    hosts = {everyone[device.id][0] for device in group}
    if len(hosts) > 1:
        rule = f"the axis has GPUs of {len(hosts)} hosts, and memory reaches over one"
        raise NotImplementedError(_checks.message(OPEN, rule))
    if any(everyone[device.id][1] == 0 for device in group):
        raise RuntimeError("another process has no memory")
    addresses = [
        (d.local_hardware_id if d.process_index == here else -1, *everyone[d.id][1:]) for d in group
    ]
    for rank, device in enumerate(group):
        if device.process_index == here:
            extension.peer_connect(name, device.local_hardware_id, rank, timeout_s, addresses)


def _exchange(
    groups: np.ndarray[Any, Any], found: dict[int, tuple[int, bytes]]
) -> dict[int, tuple[str, int, bytes]]:
    """The host, address and handle of each device, told by the processes to each other."""
    host = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "?"
    if jax.process_count() == 1:
        return {i: (host, address, handle) for i, (address, handle) in found.items()}
    places = {device.id: i for i, device in enumerate(groups.flat)}
    table = np.zeros((len(places), 64 + 8 + _HANDLE_BYTES), np.uint8)
    for device, (address, handle) in found.items():
        row = host.encode("ascii")[:64].ljust(64) + address.to_bytes(8, "little") + handle
        table[places[device]] = np.frombuffer(row, np.uint8)
    told = np.asarray(multihost_utils.process_allgather(table)).max(axis=0)  # others' are zeros
    out = {}
    for device, place in places.items():
        row = told[place].tobytes()
        address = int.from_bytes(row[64:72], "little")
        out[device] = row[:64].decode("ascii").strip("\0 "), address, row[72:]
    return out


def _everyone(good: bool) -> bool:
    """Whether all processes say so, which wait for each other here."""
    if jax.process_count() == 1:
        return good
    return bool(np.all(multihost_utils.process_allgather(np.array([good]))))


def _close(name: str) -> None:
    extension = _targets.extension()
    _everyone(True)  # whoever is still computing
    extension.peer_disconnect(name)
    _everyone(True)
    extension.peer_free(name)
