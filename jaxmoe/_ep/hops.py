"""The exchanges of a layer: one over all devices, or one along each axis in turn."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._ep import direct as _direct
from jaxmoe._ep import exchange as _exchange
from jaxmoe._ep import peers as _peers
from jaxmoe._ep.cost import DISPATCHES, capacity_of, choose_dispatch, direct_bytes
from jaxmoe._ep.direct import OP
from jaxmoe._ep.exchange import Arrays, Axis, Exchange
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import told


@dataclasses.dataclass(frozen=True)
class Hop:
    """An exchange along an axis.

    Attributes:
      axis: whose devices exchange.
      dispatch: "all_gather", "all_to_all", "ragged", "direct" or "replicated".
      num_local: experts of all devices with the same place along it.
      capacity: tokens that a device can send to each other one.
      memory: what "direct" sends through, None for other ways.
      chosen: why it is this way.
      sent: of "direct", bytes that a device sends, see `cost.direct_bytes`.
    """

    axis: Axis
    dispatch: str
    num_local: int
    capacity: int
    memory: _peers.PeerMemory | None = None
    chosen: str = ""
    sent: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def says(self, what: str, how: str) -> str:
        """What "direct" through memory of GPUs tells of itself, if it sends `what` of `sent`."""
        axis, sent = self.axis.name, self.sent[what]
        return f"direct along {axis!r}: {sent} bytes that a device sends; {self.chosen}; {how}"

    def exchange(
        self, payload: Arrays, residual: Any, slots: jax.Array, row: int, sums: str
    ) -> Exchange:
        """Sends what there is of tokens.

        Args:
          slots: [T, K], device along the axis * num_local + expert there, -1 for none.
          row: bytes of a sum.
          sums: why it is sums that come back.
        """
        if self.dispatch == "replicated":
            return _exchange.replicated(payload, residual, self.axis, slots)
        where = self.axis, slots, self.num_local
        if self.memory is not None:
            says = self.says("sums", sums_travel(sums))
            return _exchange.direct(payload, residual, *where, self.memory, row, says)
        payload = _exchange.with_slots(payload, slots)
        if self.dispatch == "all_gather":
            out = _exchange.all_gather(payload, residual, self.axis)
        else:
            way = _exchange.ragged if self.dispatch == "ragged" else _exchange.all_to_all
            out = way(payload, residual, *where, self.capacity)
        return _exchange.without_slots(out, slots.shape[1])


def sums_travel(why: str) -> str:
    """How "direct" brings results home where no product does it."""
    return f"sums of devices travel: {why}"


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What the choice of ways depends on.

    Attributes:
      x: the tokens of a device.
      count: T, of them in a chunk.
      top_k: K.
      itemsize: bytes of an element on its way to the experts, None for that of x.
      own_apart: whether those of this device are computed apart, which one way knows alone.
    """

    x: Any
    count: int
    top_k: int
    itemsize: int | None
    own_apart: bool = False


def names_of(
    dispatch: Any, axis_name: Any, tokens: str, own_apart: bool = False
) -> tuple[Any, ...]:
    """Checks `dispatch`, and pairs each of its ways with the axis, or axes, that it is along."""
    choices = ("auto", *DISPATCHES)
    if isinstance(dispatch, list):
        rule = f"dispatch={dispatch!r} must be a name, or a tuple of names"
        raise TypeError(_checks.message(OP, rule))
    if not isinstance(dispatch, tuple):
        _checks.check_choice(OP, "dispatch", dispatch, choices)
        if tokens == "replicated" and dispatch not in ("auto", "all_gather"):
            rule = (
                f"dispatch={dispatch!r} must be 'auto' or 'all_gather' with tokens='replicated', "
                "where every device has every token"
            )
            raise ValueError(_checks.message(OP, rule))
        if tokens == "replicated":
            return (("replicated", axis_name),)
        in_turn = _to_memory(axis_name) if dispatch == "auto" and not own_apart else ()
        return in_turn or ((dispatch, axis_name),)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if len(dispatch) != len(axes):
        rule = f"dispatch={dispatch!r} must have a way for each axis of axis_name={axis_name!r}"
        raise ValueError(_checks.message(OP, rule))
    if tokens == "replicated":
        rule = f"dispatch={dispatch!r} must be 'auto' with tokens='replicated': nothing is sent"
        raise ValueError(_checks.message(OP, rule))
    for way in dispatch:
        _checks.check_choice(OP, "dispatch", way, choices)
    return tuple(zip(dispatch, axes, strict=True))


def _to_memory(axis_name: Any) -> tuple[Any, ...]:
    """The ways of "auto" along several axes if memory of GPUs is open along the last of these.

    Those before lead to other hosts then, and a row crosses to each of them once.
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for first in range(len(axes)):
        inner = axes[first] if first + 1 == len(axes) else axes[first:]
        memory = _peers.opened(inner, jax.lax.axis_size(inner))
        if memory is not None and memory.on_gpus:
            outer = axes[0] if first == 1 else axes[:first]
            return (("auto", outer), ("auto", inner)) if first else ()
    return ()


def hops_of(
    ways: tuple[Any, ...], tokens: Tokens, num_local: int, capacity_factor: Any, sum_dtype: Any
) -> tuple[Hop, ...]:
    """The exchanges of `names_of`, in order; a capacity factor is the first one's."""
    sizes = [jax.lax.axis_size(axis) for _, axis in ways]
    hops: list[Hop] = []
    for i, (way, axis) in enumerate(ways):
        factor = capacity_factor if i == 0 else None
        capacity = capacity_of(OP, factor, tokens.count, sizes[i], tokens.top_k)
        memory = _peers.opened(axis, sizes[i])
        name, chosen, sent = _chosen(way, axis, sizes[i], tokens, memory, factor)
        hops.append(
            Hop(
                Axis(axis, sizes[i], jax.lax.axis_index(axis), np.dtype(sum_dtype)),
                name,
                num_local * math.prod(sizes[i + 1 :]),
                capacity,
                memory if name == "direct" else None,
                chosen,
                sent,
            )
        )
        # What arrives from each device goes on.
        count = capacity if name in ("all_to_all", "ragged") else tokens.count
        tokens = dataclasses.replace(tokens, count=sizes[i] * count)
    return tuple(hops)


def travel(
    hops: tuple[Hop, ...],
    payload: Arrays,
    residual: jax.Array | None,
    slots: jax.Array,
    row: int,
    *,
    sums: str,
) -> Exchange:
    """Sends what there is of tokens, one exchange after the other.

    Args:
      slots: [T, K] of this device's tokens, counted over all devices, as are those that arrive.
      row: bytes of a sum.
      sums: why it is sums that come back along each axis, where the caller has no other way.
    """
    ways: list[Exchange] = []
    first: Any = 0  # slot of the first expert that this device may still send to
    for i, hop in enumerate(hops):
        if i:
            before = hops[i - 1]
            here = before.axis.index * before.num_local
            slots, first = slots - here, first + here
            slots = jnp.where((slots >= 0) & (slots < before.num_local), slots, -1)
        ways.append(hop.exchange(payload, None if i else residual, slots, row, sums))
        payload, arrived = ways[-1].rows, ways[-1].slots
        assert arrived is not None
        slots = arrived

    def combine(y: jax.Array) -> jax.Array:
        for way in reversed(ways):
            y = way.combine(y)
        return y

    if len(ways) == 1:
        return ways[0]
    return Exchange(payload, combine, ways[0].lost, jnp.where(slots >= 0, slots + first, -1))


def _chosen(
    way: str,
    axis: Any,
    size: int,
    tokens: Tokens,
    memory: _peers.PeerMemory | None,
    capacity_factor: Any,
) -> tuple[str, str, dict[str, int]]:
    """Returns (way, why this one, what "direct" sends); says so, unless the program does."""
    if way == "direct" and memory is None:
        rule = (
            f"dispatch='direct' needs memory along axis_name={axis!r} that its {size} devices "
            "reach: call jaxmoe.expert_parallel.open_peer_memory(mesh, axis_name, num_bytes=...) "
            "first"
        )
        raise ValueError(_checks.message(OP, rule, x=tokens.x))
    if way == "replicated":
        told.tell(
            f"replicated along {axis!r}: every device has every token, sums are added by psum"
        )
        return way, "", {}
    itemsize, hidden = np.dtype(tokens.x.dtype).itemsize, tokens.x.shape[1]
    room = memory is not None and memory.on_gpus and not tokens.own_apart
    if memory is not None and room and tokens.count:
        sizes = tokens.count, max(hidden, 1), tokens.top_k, size
        room = _peers.peer_memory_bytes(*sizes, itemsize=itemsize) <= memory.num_bytes
        room = room and _direct.refused(axis, memory) is None
    sizes = tokens.count, max(hidden, 1), tokens.top_k, size
    choice = choose_dispatch(
        *sizes,
        capacity_factor=capacity_factor,
        itemsize=itemsize,
        dispatch_itemsize=tokens.itemsize,
        direct=room,
    )
    name = choice.name if way == "auto" else way
    why = choice.reason if way == "auto" else "asked for"
    if name == "direct":
        sent = direct_bytes(*sizes, itemsize, tokens.itemsize or itemsize)
        if memory is not None and memory.on_gpus:
            return name, why, sent  # how results come back is not known yet, nor a derivative
        count, why = sent["all"], f"{why}; by XLA's collectives, there is no memory of GPUs"
    else:
        count, sent = choice.sent_bytes[name], {}
    told.tell(f"{name} along {axis!r}: {count} bytes that a device sends; {why}")
    return name, why, sent
