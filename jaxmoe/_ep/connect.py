"""Opens memory between the GPUs of a host, whose processes tell each other where theirs is."""

import contextlib
import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import targets as _targets

OPEN = "expert_parallel.open_peer_memory"
MAX_PEERS = 16
_PLATFORM = "gpu"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# What a process tells of a device: as many bytes of every one.
_ROW = np.dtype([("host", "S64"), ("address", "<u8"), ("handle", "V64"), ("bus", "S32")])

Groups = np.ndarray[Any, Any]  # of devices, [groups, n]


def connect(name: str, groups: Groups, parts: tuple[int, int, int], timeout_s: float) -> None:
    """Allocates the memory of this process's devices, and opens that of their groups.

    `parts`: bytes of a half, of its part for few tokens and of lines in that, for which there is
    use where all links keep them whole.

    Whatever fails here, every process says so in the end: one that left would leave the others
    waiting.
    """
    _agree(OPEN, "open", name, parts, *(device.id for device in groups.flat))
    failure, found = None, np.zeros(groups.size, _ROW)
    try:
        _check(groups)
        _drain()
        _allocate(name, groups, parts[:2], found)
    except Exception as error:
        failure = error
    with contextlib.ExitStack() as undone:
        undone.callback(_free, name)
        everyone = _exchange(groups, found)
        whole = _all_say(failure is None and _keep_lines(groups, everyone))
        if failure is None:
            try:
                _connect_all(name, groups, everyone, parts[2] if whole else 0, timeout_s)
            except Exception as error:
                failure = error
        good = _all_say(failure is None)
        if good:  # nobody starts before all are ready, nor if one is not
            undone.pop_all()
            return
        try:
            _disconnect(name)
        finally:
            _all_say(True)
    if isinstance(failure, RuntimeError) and not isinstance(failure, NotImplementedError):
        raise RuntimeError(f"jaxmoe.{OPEN}: {failure}") from failure
    raise failure or RuntimeError(f"jaxmoe.{OPEN}: another process could not open the memory")


def can_copy(groups: Groups) -> bool:
    """Whether copy engines may reach the memory of the others behind kernels that wait.

    Memory that processes share is CUDA's, of a context each; a copy between two of one process
    would keep its GPUs from launching what others wait for (csrc/peers/mapped.h).
    """
    return all(len(_processes(group)) in (1, group.size) for group in groups)


def close(name: str) -> None:
    """Closes what `connect` opened, when programs that this process has started have ended.

    An error of one of these is raised at the end: the memory goes all the same.
    """
    failure = None
    try:
        _drain()
    except Exception as error:
        failure = error
    _agree(OPEN, "close", name)
    try:
        _disconnect(name)
    finally:
        _all_say(True)  # nobody has it open any more
        _free(name)
    if failure is not None:
        raise failure


def _drain() -> None:
    """Waits for what runs on this process's GPUs.

    CUDA may wait for all of it where memory comes or goes, and what runs on one GPU for what the
    host has not launched on another.
    """
    failure = None
    for device in jax.local_devices(backend=_PLATFORM):
        try:  # in the order of the device: the host may not have launched them yet
            with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("device",))):
                jax.block_until_ready(jax.jit(_next)(jax.device_put(np.int32(0), device)))
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def _next(a: jax.Array) -> jax.Array:
    return a + 1


def _extension() -> Any:
    return _targets.extension()


def _disconnect(name: str) -> None:
    if _extension() is not None:
        _extension().peer_disconnect(name)


def _free(name: str) -> None:
    if _extension() is not None:
        _extension().peer_free(name)


def _processes(group: Groups) -> set[int]:
    """Those whose devices have memory with each other."""
    return {device.process_index for device in group}


def _check(groups: Groups) -> None:
    count = groups.shape[1]
    if count > MAX_PEERS:
        rule = f"the axis has {count} GPUs, which must be at most {MAX_PEERS}"
        raise NotImplementedError(_checks.message(OPEN, rule))
    why = _targets.why_not() or _targets.device_reason()
    if why is not None:
        raise NotImplementedError(_checks.message(OPEN, f"no kernels here: {why}"))


def _allocate(
    name: str, groups: Groups, parts: tuple[int, int], found: np.ndarray[Any, Any]
) -> None:
    host = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else platform.node()
    for place, device in enumerate(groups.flat):
        if device.process_index == jax.process_index():
            shared = len(_processes(groups[place // groups.shape[1]])) > 1
            ordinal = device.local_hardware_id
            address, handle, bus = _extension().peer_allocate(name, ordinal, *parts, shared)
            found[place] = (host.encode()[:64], address, handle, bus.encode())


def _keep_lines(groups: Groups, everyone: Any) -> bool:
    """Whether links from this process's GPUs are known to keep lines whole: NVLink does."""
    for group, rows in zip(groups, everyone.reshape(groups.shape), strict=True):
        buses = [row["bus"].decode() for row in rows]
        for device in group:
            if device.process_index == jax.process_index():
                if not _extension().peer_has_native_atomics(device.local_hardware_id, buses):
                    return False
    return True


def _connect_all(
    name: str, groups: Groups, everyone: Any, line_bytes: int, timeout_s: float
) -> None:
    here = jax.process_index()
    for number, group in enumerate(groups):
        rows = everyone[number * len(group) : (number + 1) * len(group)]
        if any(row["address"] == 0 for row in rows):
            raise RuntimeError("another process has no memory")
        if (hosts := len({bytes(row["host"]) for row in rows})) > 1:
            rule = f"the axis has GPUs of {hosts} hosts, and memory reaches over one"
            raise NotImplementedError(_checks.message(OPEN, rule))
        addresses = [
            (_ordinal(device, here), int(row["address"]), row["handle"].tobytes())
            for device, row in zip(group, rows, strict=True)
        ]
        for rank, device in enumerate(group):
            if device.process_index == here:
                mine = name, device.local_hardware_id, rank, number, line_bytes
                _extension().peer_connect(*mine, timeout_s, addresses)


def _ordinal(device: Any, here: int) -> int:
    return device.local_hardware_id if device.process_index == here else -1


def _exchange(groups: Groups, found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the processes have found of their devices, [groups * n]."""
    if jax.process_count() == 1:
        return found
    rows = found.view(np.uint8).reshape(groups.size, _ROW.itemsize)
    told = np.asarray(multihost_utils.process_allgather(rows))  # [processes, groups * n, bytes]
    owners = [device.process_index for device in groups.flat]
    chosen = np.ascontiguousarray(told[owners, np.arange(groups.size)])
    return chosen.view(_ROW).reshape(-1)


def _all_say(good: bool) -> bool:
    """Whether all processes say so, which wait for each other here."""
    if jax.process_count() == 1:
        return good
    return bool(np.all(multihost_utils.process_allgather(np.array([good]))))


def _agree(op: str, *what: Any) -> None:
    """Raises in every process if one of them is about to do something else."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(repr(what).encode()).digest()
    told = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest, np.uint8)))
    if (told != told[0]).any():
        rule = f"all processes must {what[0]} the same memory, with the same mesh and sizes"
        raise ValueError(_checks.message(op, rule))


def groups_of(mesh: jax.sharding.Mesh, names: Sequence[str], others: Sequence[str]) -> Groups:
    """The devices along the axes `names`, as `jax.lax.axis_index` counts them: [groups, n]."""
    rest = [name for name in mesh.axis_names if name not in (*names, *others)]  # of one device
    order = [mesh.axis_names.index(name) for name in (*rest, *others, *names)]
    count = int(np.prod([mesh.shape[name] for name in names], dtype=int))
    return np.transpose(mesh.devices, order).reshape(-1, count)
