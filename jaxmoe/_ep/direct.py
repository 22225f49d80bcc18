"""The exchange of dispatch="direct": kernels that reach the memory of the other devices.

`send` brings tokens to the devices of their experts and `bring` their sums home. Each is the
other's transpose. On CUDA they are calls through peer memory, elsewhere collectives.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe._ep.peers import PeerMemory
from jaxmoe._jax import primitive as _primitive
from jaxmoe.finalize import sum_rows

_OP = "expert_parallel.moe_mlp"


class Way(NamedTuple):
    """What a program knows of an exchange; hashable.

    Attributes:
      axis_name: as collectives take it.
      num_devices: n.
      num_local: experts of a device.
      memory: name of the peer memory; "" for none, where collectives do it.
      group_axes: the other axes of its mesh.
    """

    axis_name: Any
    num_devices: int
    num_local: int
    memory: str
    group_axes: tuple[str, ...] = ()


def _with_transpose(fn: Callable[..., Any]) -> Any:
    return jax.custom_vjp(fn, nondiff_argnums=(0,))


def way_of(axis_name: Any, num_local: int, memory: PeerMemory) -> Way:
    """The exchange through that memory."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    groups = math.prod(jax.lax.axis_size(a) for a in memory.group_axes if a in manual)
    if not set(memory.group_axes) <= set(manual) or groups != memory.num_groups:
        rule = (
            f"dispatch='direct' along {axis_name!r} needs the mesh that its memory was opened for, "
            f"whose other axes {memory.group_axes} have {memory.num_groups} devices"
        )
        raise ValueError(f"jaxmoe.{_OP}: {rule}")
    name = memory.name if memory.on_gpus else ""
    return Way(axis_name, memory.num_devices, num_local, name, memory.group_axes)


@_with_transpose
def send(way: Way, slots: jax.Array, tokens: jax.Array, small: jax.Array) -> tuple[jax.Array, ...]:
    """Brings tokens to the devices of their choices.

    Args:
      way: the exchange.
      slots: [T, K] int32, device * num_local + local id, others go nowhere.
      tokens: [T, H] floats or uint32.
      small: [T, S] float32.

    Returns:
      (slots [n T, K] of all devices, tokens [n T, H], small [n T, S]), rows of token t of device s
      at s T + t; tokens and small are 0 where no choice is on this device.
    """
    return _send(way, slots, tokens, small)


def _send_fwd(way: Way, slots: jax.Array, tokens: jax.Array, small: jax.Array) -> Any:
    out = _send(way, slots, tokens, small)
    return out, (slots, out[0])


def _send_bwd(way: Way, kept: Any, cts: Any) -> Any:
    slots, all_slots = kept
    _, tokens, small = cts
    if not jnp.issubdtype(tokens.dtype, jnp.floating):  # words, which have no cotangent
        return None, None, _bring(way, slots, all_slots, small, None)[0]
    return None, *_bring(way, slots, all_slots, tokens, None, small)


send.defvjp(_send_fwd, _send_bwd)


@_with_transpose
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
    return _bring(way, slots, all_slots, rows, residual)[0]


def _bring_fwd(way: Way, slots: Any, all_slots: Any, rows: Any, residual: Any) -> Any:
    return _bring(way, slots, all_slots, rows, residual)[0], (slots, residual is not None)


def _bring_bwd(way: Way, kept: Any, ct: jax.Array) -> Any:
    slots, has_residual = kept
    rows = _send(way, slots, ct, None)[1]
    return None, None, rows, ct if has_residual else None


bring.defvjp(_bring_fwd, _bring_bwd)


def _place(way: Way) -> jax.Array:
    """This device's among all of the mesh that the memory was opened for."""
    rank = jax.lax.axis_index(way.axis_name)
    if not way.group_axes:
        return rank
    return rank + way.num_devices * jax.lax.axis_index(way.group_axes)


def _send(way: Way, slots: jax.Array, tokens: jax.Array, small: Any) -> tuple[jax.Array, ...]:
    given = (slots, tokens) if small is None else (slots, tokens, small)

    def collectives(_place: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        index = jax.lax.axis_index(way.axis_name)
        everything = [jax.lax.all_gather(a, way.axis_name, axis=0, tiled=True) for a in given]
        comes = _has_choice(everything[0], way, index)[:, None]
        rows = (jnp.where(comes, a, jnp.zeros((), a.dtype)) for a in everything[1:])
        return (everything[0], *rows)

    def kernels(place: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        operands = (*given, None)[:3]
        return peer_dispatch_p(place, *operands, way=way)[: len(given)]

    return _on(way, kernels, collectives, _place(way), *given)


def _bring(
    way: Way, slots: Any, all_slots: Any, rows: jax.Array, residual: Any, small: Any = None
) -> tuple[jax.Array, ...]:
    """Sums of rows, and of small numbers [n T, S] float32 beside them, if there are."""
    optional = [a for a in (residual, small) if a is not None]

    def named(more: Any) -> tuple[Any, Any]:
        rest = iter(more)
        return tuple(None if a is None else next(rest) for a in (residual, small))  # pyright: ignore[reportReturnType]

    def collectives(_place: jax.Array, slots: Any, _all_slots: Any, rows: Any, *more: Any) -> Any:
        residual, small = named(more)
        count = slots.shape[0]
        device = jnp.arange(way.num_devices, dtype=jnp.int32)
        token = jnp.arange(count, dtype=jnp.int32)[:, None]
        there = jnp.stack([_has_choice(slots, way, d) for d in device], axis=1)
        row = jnp.where(there, device[None, :] * count + token, -1)

        def home(a: jax.Array, residual: Any) -> jax.Array:
            return sum_rows(jax.lax.all_to_all(a, way.axis_name, 0, 0, tiled=True), row, residual)

        return home(rows, residual), *(() if small is None else (home(small, None),))

    def kernels(place: jax.Array, slots: Any, all_slots: Any, rows: Any, *more: Any) -> Any:
        return peer_combine_p(place, slots, all_slots, rows, *named(more), way=way)

    operands = _place(way), slots, all_slots, rows, *optional
    return _on(way, kernels, collectives, *operands)


def _on(way: Way, kernels: Any, collectives: Any, *operands: jax.Array) -> Any:
    if not way.memory:
        return collectives(*operands)
    return jax.lax.platform_dependent(*operands, cuda=kernels, default=collectives)


def _has_choice(slots: jax.Array, way: Way, device: Any) -> jax.Array:
    """Which rows of slots have one on a device."""
    first = device * way.num_local
    return ((slots >= first) & (slots < first + way.num_local)).any(axis=1)


def _no_xla(*_operands: Any, way: Way) -> Any:
    raise NotImplementedError(
        f"jaxmoe.{_OP}: dispatch='direct' along {way.axis_name!r} needs the jax.shard_map around "
        "the call to have all axes of its mesh, and the CUDA kernels of jaxmoe"
    )


def _batch(op: Any) -> Any:
    """One example after the other: all devices take their steps in one order."""
    return lambda args, dims, **params: _primitive.one_by_one(op(), args, dims, **params)


def _attrs(_avals: Any, *, way: Way) -> dict[str, Any]:
    return {"memory": way.memory, "num_devices": way.num_devices, "num_local": way.num_local}


def _dispatch_out(_place: Any, slots: Any, tokens: Any, small: Any, *, way: Way) -> Any:
    count = way.num_devices * slots.shape[0]
    given = [a for a in (slots, tokens, small) if a is not None]
    return [((count, a.shape[1]), a.dtype) for a in given]


def _no_small(avals: Any, *, way: Way) -> list[_primitive.Spec]:
    """The result without elements that a call has in place of small numbers."""
    del way
    return [((0, 0), jnp.dtype(jnp.float32))] if avals.small is None else []


def _combine_out(
    _place: Any, slots: Any, _all: Any, rows: Any, _residual: Any, small: Any, *, way: Way
) -> list[_primitive.Spec]:
    del way
    summed = [a for a in (rows, small) if a is not None]
    return [((slots.shape[0], a.shape[1]), a.dtype) for a in summed]


peer_dispatch_p = _primitive.define(
    "jaxmoe_peer_dispatch",
    out=_dispatch_out,
    xla=_no_xla,
    batch=_batch(lambda: peer_dispatch_p),
    operands=_primitive.named_operands(["place", "slots", "tokens", "small"]),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_dispatch_v1",
        attrs=_attrs,
        scratch=_no_small,
        absent={"small": (2, jnp.float32)},
    ),
)
peer_combine_p = _primitive.define(
    "jaxmoe_peer_combine",
    out=_combine_out,
    xla=_no_xla,
    batch=_batch(lambda: peer_combine_p),
    operands=_primitive.named_operands(
        ["place", "slots", "all_slots", "rows", "residual", "small"]
    ),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_combine_v1",
        attrs=_attrs,
        scratch=_no_small,
        absent={"residual": (2, "rows"), "small": (2, jnp.float32)},
    ),
)
