"""The exchange of dispatch="direct": kernels that reach the memory of the other devices.

`send` brings tokens to the devices of their experts and `bring` their sums home. Each is the
other's transpose. On CUDA they are calls through peer memory, elsewhere collectives.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxmoe._ep.peers import PeerMemory
from jaxmoe._gemm.gate_up import of_moving
from jaxmoe._jax import primitive as _primitive
from jaxmoe.finalize import sum_rows

OP = "expert_parallel.moe_mlp"


class Way(NamedTuple):
    """What a program knows of an exchange; hashable.

    Attributes:
      axis_name: as collectives take it.
      num_devices: n.
      num_local: experts of a device.
      memory: name of the peer memory; "" for none, where collectives do it.
      group_axes: the other axes of its mesh.
      says: what `jaxmoe.explain` tells of a program with a call that brings results home so.
    """

    axis_name: Any
    num_devices: int
    num_local: int
    memory: str
    group_axes: tuple[str, ...] = ()
    says: str = ""


class Sent(NamedTuple):
    """What a dispatch leaves for a call that brings rows home by itself.

    Attributes:
      way: the exchange.
      num_bytes: of its memory.
      slots: [T, K] of this device's tokens.
      all_slots: [n T, K] of all.
      residual: [T, H] or None.
    """

    way: Way
    num_bytes: int
    slots: jax.Array
    all_slots: jax.Array
    residual: jax.Array | None


def refused(axis_name: Any, memory: PeerMemory) -> str | None:
    """Why a program cannot exchange through that memory: its mesh is not the one it is open for."""
    mesh = jax.sharding.get_abstract_mesh()
    others = memory.group_axes
    groups = math.prod(jax.lax.axis_size(a) for a in others if a in mesh.manual_axes)
    if left := [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]:
        return (
            f"dispatch='direct' along {axis_name!r} needs a jax.shard_map over all axes of the "
            f"mesh, and {left[0]!r} is left to XLA"
        )
    if not set(others) <= set(mesh.manual_axes) or groups != memory.num_groups:
        return (
            f"dispatch='direct' along {axis_name!r} needs the mesh that its memory was opened for, "
            f"whose other axes {others} have {memory.num_groups} devices"
        )
    return None


def way_of(axis_name: Any, num_local: int, memory: PeerMemory) -> Way:
    """The exchange through that memory, which is not `refused`; it says nothing."""
    if (why := refused(axis_name, memory)) is not None:
        raise ValueError(f"jaxmoe.{OP}: {why}")
    name = memory.name if memory.on_gpus else ""
    return Way(axis_name, memory.num_devices, num_local, name, memory.group_axes)


def send(
    way: Way, slots: jax.Array, tokens: jax.Array, small: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Brings tokens to the devices of their choices.

    Args:
      way: the exchange.
      slots: [T, K] int32, device * num_local + local id, others go nowhere.
      tokens: [T, H] floats, or e4m3, uint8 or uint32 of quantized ones, which have no tangent;
        rows have whole words.
      small: [T, S] float32 or None.

    Returns:
      (slots [n T, K] of all devices, tokens [n T, H], small [n T, S] if given), rows of token t of
      device s at s T + t; tokens and small are 0 where no choice is on this device.
    """

    def collectives(_place: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        index = jax.lax.axis_index(way.axis_name)
        everything = [_gathered(a, way.axis_name) for a in given]
        comes = _has_choice(everything[0], way, index)[:, None]
        rows = (jnp.where(comes, a, jnp.zeros((), a.dtype)) for a in everything[1:])
        return (everything[0], *rows)

    def kernels(place: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        return peer_dispatch_p(place, *_filled(given, 3), way=way)

    return _on(way, kernels, collectives, [slots, tokens] + ([] if small is None else [small]))


def bring(
    way: Way,
    slots: jax.Array,
    all_slots: jax.Array,
    rows: jax.Array,
    residual: jax.Array | None,
) -> jax.Array:
    """Adds up the rows of each token of this device over the devices of its choices.

    Args:
      way: the exchange.
      slots: [T, K] as in `send`.
      all_slots: [n T, K] as `send` gives them.
      rows: [n T, H] floats.
      residual: [T, H] or None.

    Returns:
      [T, H], sums in float32 in the order of devices, residual last, rounded once.
    """

    def collectives(_place: jax.Array, slots: Any, _all: Any, rows: Any, *more: Any) -> Any:
        count = slots.shape[0]
        device = jnp.arange(way.num_devices, dtype=jnp.int32)
        token = jnp.arange(count, dtype=jnp.int32)[:, None]
        there = jnp.stack([_has_choice(slots, way, d) for d in device], axis=1)
        row = jnp.where(there, device[None, :] * count + token, -1)
        return (sum_rows(jax.lax.all_to_all(rows, way.axis_name, 0, 0, tiled=True), row, *more),)

    def kernels(place: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        return peer_combine_p(place, *_filled(given, 5), way=way)

    given = [slots, all_slots, rows] + ([] if residual is None else [residual])
    return _on(way, kernels, collectives, given)[0]


def by_kernels(kernels: Any, apart: Any) -> Any:
    """A function of arrays that `kernels` compute on CUDA; elsewhere, and for derivatives, `apart`.

    Both give one array.
    """

    @jax.custom_jvp
    def value(*arrays: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(*arrays, cuda=kernels, default=apart)

    def value_and_tangent(primals: Any, tangents: Any) -> Any:
        moving = [None if isinstance(t, SymbolicZero) else t for t in tangents]
        return jax.jvp(*of_moving(apart, primals, moving))

    value.defjvp(value_and_tangent, symbolic_zeros=True)
    return value


def has_tangents(tokens: Any) -> bool:
    """Whether tokens are numbers that can have derivatives, and not quantized ones."""
    return jnp.issubdtype(tokens.dtype, jnp.floating) and tokens.dtype.itemsize > 1


def _gathered(a: jax.Array, axis_name: Any) -> jax.Array:
    """The rows of all devices; e4m3 as bytes, which every collective takes."""
    if a.dtype.itemsize > 1:
        return jax.lax.all_gather(a, axis_name, axis=0, tiled=True)
    a_bytes = jax.lax.bitcast_convert_type(a, jnp.uint8)
    everything = jax.lax.all_gather(a_bytes, axis_name, axis=0, tiled=True)
    return jax.lax.bitcast_convert_type(everything, a.dtype)


def _on(way: Way, kernels: Any, collectives: Any, given: Sequence[jax.Array]) -> Any:
    """Runs the one or the other, whose results vary over the same axes."""
    _, *operands = _primitive.match_varying([jax.lax.axis_index(way.axis_name), *given])
    operands = place_of(way), *operands
    if not way.memory:
        return collectives(*operands)
    return jax.lax.platform_dependent(*operands, cuda=kernels, default=collectives)


def place_of(way: Way) -> jax.Array:
    """This device's place among all of the mesh that the memory was opened for."""
    rank = jax.lax.axis_index(way.axis_name)
    if not way.group_axes:
        return rank
    return rank + way.num_devices * jax.lax.axis_index(way.group_axes)


def _has_choice(slots: jax.Array, way: Way, device: Any) -> jax.Array:
    """Which rows of slots have one on a device."""
    first = device * way.num_local
    return ((slots >= first) & (slots < first + way.num_local)).any(axis=1)


def _filled(given: Sequence[Any], count: int) -> list[Any]:
    return [*given, *[None] * (count - len(given))]


# ---- the calls ----------------------------------------------------------------------------------


def no_xla(*_operands: Any, way: Way, **_params: Any) -> Any:
    """Refuses to be what another platform than CUDA runs."""
    raise NotImplementedError(
        f"jaxmoe.{OP}: dispatch='direct' through the memory {way.memory!r} of GPUs is lowered for "
        "CUDA alone; export a program for one platform"
    )


def one_by_one(op: Any) -> Any:
    """One example after the other: all devices take their steps in one order."""
    return lambda args, dims, **params: _primitive.one_by_one(op(), args, dims, **params)


def peer_attrs(way: Way) -> dict[str, Any]:
    """Attributes by which a call finds its memory."""
    return {"memory": way.memory, "num_devices": way.num_devices, "num_local": way.num_local}


def _attrs(_avals: Any, *, way: Way) -> dict[str, Any]:
    return peer_attrs(way)


def _wide(slots: Any, arrays: Sequence[Any], way: Way) -> list[_primitive.Spec]:
    """Rows for the tokens of all devices."""
    count = way.num_devices * slots.shape[0]
    return [((count, a.shape[1]), a.dtype) for a in arrays if a is not None]


def _no_small(avals: Any, *, way: Way) -> list[_primitive.Spec]:
    """The result without elements that a call has in place of small numbers."""
    del way
    return [((0, 0), jnp.dtype(jnp.float32))] if avals.small is None else []


def _dispatch_out(_place: Any, slots: Any, tokens: Any, small: Any, *, way: Way) -> Any:
    return _wide(slots, (slots, tokens, small), way)


def _dispatch_jvp(primals: Any, tangents: Any, *, way: Way) -> Any:
    outs = peer_dispatch_p(*primals, way=way)
    pairs = (primals.tokens, tangents.tokens), (primals.small, tangents.small)
    given = [(a, t) for a, t in pairs if a is not None]
    movable = [has_tangents(a) for a, _ in given]
    if all(t is None for _, t in given):
        return outs, (None,) * len(outs)
    moved = [_or_zeros(a, t) for (a, t), moves in zip(given, movable, strict=True) if moves]
    where = primals.place, primals.slots, outs[0]
    rest = iter(peer_send_p(*where, *_filled(moved, 2), way=way))
    return outs, (None, *(next(rest) if moves else None for moves in movable))


def _send_out(_place: Any, slots: Any, _all: Any, tokens: Any, small: Any, *, way: Way) -> Any:
    return _wide(slots, (tokens, small), way)


def _send_scratch(avals: Any, *, way: Way) -> list[_primitive.Spec]:
    return _wide(avals.slots, (avals.slots,), way) + _no_small(avals, way=way)


def _send_jvp(primals: Any, tangents: Any, *, way: Way) -> Any:
    where = primals.place, primals.slots, primals.all_slots
    tokens = _or_zeros(primals.tokens, tangents.tokens)
    small = _or_zeros(primals.small, tangents.small)
    return peer_send_p(*primals, way=way), peer_send_p(*where, tokens, small, way=way)


def _send_transpose(cts: Any, args: Any, *, way: Way) -> Any:
    tokens, small = _filled(cts, 2)
    where = args.place, args.slots, args.all_slots
    if tokens is None:
        return None, None, None, None, *peer_combine_p(*where, small, None, None, way=way)
    return None, None, None, *_filled(peer_combine_p(*where, tokens, None, small, way=way), 2)


def _combine_out(
    _place: Any, slots: Any, _all: Any, rows: Any, _residual: Any, small: Any, *, way: Way
) -> list[_primitive.Spec]:
    del way
    return [((slots.shape[0], a.shape[1]), a.dtype) for a in (rows, small) if a is not None]


def _combine_jvp(primals: Any, tangents: Any, *, way: Way) -> Any:
    outs = peer_combine_p(*primals, way=way)
    residual = tangents.residual
    if tangents.rows is None and tangents.small is None:
        return outs, (residual, *[None] * (len(outs) - 1))
    where = primals.place, primals.slots, primals.all_slots
    rows = _or_zeros(primals.rows, tangents.rows)
    small = _or_zeros(primals.small, tangents.small)
    return outs, peer_combine_p(*where, rows, residual, small, way=way)


def _combine_transpose(cts: Any, args: Any, *, way: Way) -> Any:
    y, small = _filled(cts, 2)
    where = args.place, args.slots, args.all_slots
    if y is None:
        return None, None, None, None, None, *peer_send_p(*where, small, None, way=way)
    rows, small = _filled(peer_send_p(*where, y, small, way=way), 2)
    return None, None, None, rows, y if _primitive.is_linear(args.residual) else None, small


def _or_zeros(a: Any, tangent: Any) -> Any:
    """The tangent of an operand; None for one that is absent."""
    return jnp.zeros_like(a) if tangent is None and a is not None else tangent


peer_dispatch_p = _primitive.define(
    "jaxmoe_peer_dispatch",
    out=_dispatch_out,
    xla=no_xla,
    batch=one_by_one(lambda: peer_dispatch_p),
    jvp=_dispatch_jvp,
    operands=_primitive.named_operands(["place", "slots", "tokens", "small"]),
    untyped=("place",),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_dispatch_v1",
        attrs=_attrs,
        scratch=_no_small,
        absent={"small": (2, jnp.float32)},
    ),
)
# The same of numbers alone, whose transpose needs the slots of all devices. Linear in both.
peer_send_p = _primitive.define(
    "jaxmoe_peer_send",
    out=_send_out,
    xla=no_xla,
    batch=one_by_one(lambda: peer_send_p),
    jvp=_send_jvp,
    transpose=_send_transpose,
    operands=_primitive.named_operands(["place", "slots", "all_slots", "tokens", "small"]),
    untyped=("place",),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_dispatch_v1",
        attrs=_attrs,
        scratch=_send_scratch,
        operands=("place", "slots", "tokens", "small"),
        public=lambda **_params: (1, 2),
        absent={"small": (2, jnp.float32)},
    ),
)
# Linear in rows, residual and small.
peer_combine_p = _primitive.define(
    "jaxmoe_peer_combine",
    out=_combine_out,
    xla=no_xla,
    batch=one_by_one(lambda: peer_combine_p),
    jvp=_combine_jvp,
    transpose=_combine_transpose,
    operands=_primitive.named_operands(
        ["place", "slots", "all_slots", "rows", "residual", "small"]
    ),
    untyped=("place",),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_combine_v1",
        attrs=_attrs,
        scratch=_no_small,
        absent={"residual": (2, "rows"), "small": (2, jnp.float32)},
    ),
)
