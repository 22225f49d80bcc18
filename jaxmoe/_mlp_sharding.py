"""How the expert layer is divided over the axes of a mesh; weights stay where they are.

weights split on E      each device runs its experts, and results are added up
... on I                each device has columns of w_gate_up and rows of w_down, added up
w_gate_up split on H    parts of the first product are added up, then the layer goes on
w_down split on H       each device has columns of the result
tokens split            each device runs its tokens; over axes that split weights too, tokens are
                        gathered first and results scattered
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe._collectives import PLAIN, TYPED
from jaxmoe._gmm_sharding import own_groups
from jaxmoe._sharding import Axes, Call, Dims, Rule, Split, index, once, own, refuse_tokens

NAMES = (
    "x",
    "routing.expert_ids",
    "routing.weights",
    "w_gate_up",
    "w_down",
    "b_gate_up",
    "b_down",
    "expert_map",
    "residual",
)
WEIGHTS = (3, 4)


class Division(NamedTuple):
    """Mesh axes of each dimension of the layer.

    Attributes:
      e: experts.
      i, i_in: intermediate, as w_gate_up computes it and as w_down contracts it. The same unless
        the other axis of one of them is split over what this one is.
      h_in, h_out: H as w_gate_up contracts it, and H of the result.
      tokens: all axes that tokens are split over.
      gather: those of them that split weights too.
      halves: i splits the columns of w_gate_up as they are stored, gates before ups or the other
        way round, so that the two of a pair are on different devices.
      pairs: w_gate_up is whole, in that order, and each device takes its pairs out of it.
    """

    e: Axes
    i: Axes
    i_in: Axes
    h_in: Axes
    h_out: Axes
    tokens: Axes
    gather: Axes
    halves: bool
    pairs: bool

    @property
    def apart(self) -> bool:
        """Whether the two products are calls of their own, whose devices may exchange something."""
        return bool(self.h_in or self.h_out or self.halves or self.i != self.i_in)

    @property
    def added(self) -> Axes:
        """The axes over which results are added up."""
        return self.e + self.i_in

    @property
    def kept(self) -> Axes:
        """The axes over which tokens stay split."""
        return tuple(a for a in self.tokens if a not in self.gather)


def divide(
    call: Call, *, activation: Any, gate_up: str, weight_layout: str, unit: int = 1
) -> Division:
    """Chooses the axes of each dimension; those of the weights come before those of the tokens.

    The first arguments of `call` are those of NAMES. H and I are divided between `unit` elements.
    """
    x, _, _, w1, w2, *_ = call.avals
    of_x, of_ids, of_weights, of1, of2 = call.given[:5]
    first, second = (1, 2) if weight_layout == "kn" else (2, 1)
    e = call.pick(w1.shape[0], of1[0], of2[0]) if w1.shape[0] == w2.shape[0] else ()
    hidden, inter = (s // unit if s % unit == 0 else 1 for s in (x.shape[1], w2.shape[first]))
    i, i_in = call.pick(inter, of1[second], taken=e), call.pick(inter, of2[first], taken=e)
    h_in = call.pick(hidden, of1[first], taken=e + i)
    h_out = call.pick(hidden, of2[second], taken=e + i_in)
    halves = bool(i)
    i = i or (() if set(i_in) & set(h_in) else i_in)
    i_in = i_in or (() if set(i) & set(h_out) else i)
    tokens = call.pick(x.shape[0], of_x[0], of_ids[0], of_weights[0], taken=h_out)
    gather = tuple(a for a in tokens if a in e + i + i_in + h_in)
    apart = call.count(i) > 1 and activation.gated and gate_up != "interleaved"
    return Division(e, i, i_in, h_in, h_out, tokens, gather, apart and halves, apart and not halves)


def dims(avals: Any, *, weight_layout: str, **_params: Any) -> str:
    """Which dimensions are split alike. H of x is not tied to H of the weights, nor N to I."""
    w1, w2 = ("h n", "i d") if weight_layout == "kn" else ("n h", "d i")
    same = "e" if avals[3].shape[0] == avals[4].shape[0] else "f"
    return f"t c, t k, t k, e {w1}, {same} {w2}, e n, {same} d, m, t d -> t d"


def places(d: Division, avals: Any, weight_layout: str) -> tuple[Dims, ...]:
    """Mesh axes of every argument of `moe_mlp_p`."""
    columns = () if d.pairs else d.i
    w1, w2 = (d.e, d.h_in, columns), (d.e, d.i_in, d.h_out)
    if weight_layout == "nk":
        w1, w2 = (d.e, columns, d.h_in), (d.e, d.h_out, d.i_in)
    x = (d.tokens, () if set(d.h_in) & set(d.gather) else d.h_in)
    per_slot, biases = (d.tokens, ()), ((d.e, columns), (d.e, d.h_out))
    ins = (x, per_slot, per_slot, w1, w2, *biases, ((),), (d.tokens, d.h_out))
    return tuple(p if a.size else ((),) * a.ndim for p, a in zip(ins, avals, strict=True))


def layer_rule(fused: Callable[..., Any], stages: Callable[..., Any]) -> Rule:
    """The rule of `moe_mlp_p`, which is `fused`; `stages` is it in parts, see `layer_part`."""

    def split(call: Call, **params: Any) -> Split:
        d, ins = division(call, params)
        part = layer_part(call, d, fused, stages, params)
        return Split(ins, ((d.tokens, d.h_out),), part)

    return Rule(dims, split, ("moe_mlp", *NAMES), weights=WEIGHTS)


def division(call: Call, params: dict[str, Any]) -> tuple[Division, tuple[Dims, ...]]:
    """Chooses the axes of a layer's dimensions, and of its arguments."""
    keys = ("activation", "gate_up", "weight_layout")
    d = divide(call, **{k: params[k] for k in keys})
    return d, places(d, call.avals, params["weight_layout"])


def layer_part(
    call: Call,
    d: Division,
    fused: Callable[..., Any],
    stages: Callable[..., Any],
    params: dict[str, Any],
) -> Callable[..., tuple[jax.Array]]:
    """What a device computes: arguments of `moe_mlp_p`, split as `places` says, -> its y.

    `stages` takes those arguments and two functions: `between` of the first product and `after` of
    the result of the activation.
    """
    c = TYPED if call.explicit else PLAIN
    count, num_weights = call.count, call.avals[3].shape[0]
    local = own_experts(params, d.e, count)
    if d.i_in or d.h_in:  # tiles chosen for all of the contraction may not fit a part
        local = local | {"config": None}

    def gathered(a: jax.Array, parts: Axes) -> jax.Array:
        a = c.spread(a, tuple(axis for axis in parts if axis not in d.gather))
        for axes in reversed(_like(d)):
            a = c.gather(a, axes) if axes[0] in parts else c.gather_same(a, axes, count(axes))
        return a

    def part(*arrays: jax.Array) -> tuple[jax.Array]:
        x, ids, weights, w1, w2, b1, b2, expert_map, residual = arrays
        x = gathered(x, d.e + d.i + tuple(a for a in d.gather if a in d.h_in))
        if set(d.h_in) & set(d.gather):
            x = own(x, 1, d.h_in, count(d.h_in))
        weights = gathered(weights, d.added + d.h_out)
        ids = gathered(ids, d.gather)
        own_w = own_weights(d, c, count, params["weight_layout"], w1, w2, b1, b2)
        expert_map = own_map(expert_map, num_weights, d.e, count(d.e), params)
        # The layer adds the residual itself unless its result is only a part of a sum.
        inside = residual if not (d.added or d.gather) else jnp.zeros((0, 0), x.dtype)
        arrays = (x, ids, weights, *own_w, expert_map, inside)
        if d.apart:
            y = stages(
                *arrays,
                between=functools.partial(between, d, c, count),
                after=functools.partial(after, d, c, count),
                **local,
            )
        else:
            (y,) = fused(*arrays, **local)
        return (finished(y, residual, d, c, count),)

    return part


def finished(
    y: jax.Array, residual: jax.Array, d: Division, c: Any, count: Callable[[Axes], int]
) -> jax.Array:
    """Adds up the results of the devices, each of which keeps those of its tokens.

    Then comes the residual, if there was something to add up or keep.
    """
    if not (d.added or d.gather):
        return y
    for axes in _like(d):
        y = c.scatter(y, axes) if axes[0] in d.added else c.own_same(y, axes, count(axes))
    y = c.total(y, tuple(a for a in d.added if a not in d.gather))
    if not residual.size:
        return y
    return (y.astype(jnp.float32) + residual.astype(jnp.float32)).astype(y.dtype)


def _like(d: Division) -> list[Axes]:
    """The axes that tokens are gathered over, neighbours together if they split the same things."""
    kind = lambda a: (a in d.added, a in d.e + d.i + d.h_in)  # noqa: E731
    return [tuple(axes) for _, axes in itertools.groupby(d.gather, kind)]


def rows_rule(stages: Callable[..., Any]) -> Rule:
    """The rule of `moe_mlp_rows_p`, `stages` being that op in parts.

    Its rows are in the order of all tokens and all experts, which every device makes a plan of.
    """
    names = ("moe_mlp", *NAMES[:2], *NAMES[3:8])

    def rows_dims(avals: Any, **params: Any) -> str:
        arguments, _ = dims([*avals[:2], avals[1], *avals[2:]], **params).split("->")
        x, ids, _, *others = arguments.split(",")
        return f"{','.join([x, ids, *others[:-1]])} -> r d, t k"

    def split(call: Call, **params: Any) -> Split:
        for i in (0, 1):
            refuse_tokens(rule, call, i, 0)
        x, ids = (((), *axes[1:]) for axes in call.given[:2])
        avals = (*call.avals[:2], call.avals[1], *call.avals[2:], call.avals[0])
        given = (x, ids, ids, *call.given[2:], x)
        d, ins = division(dataclasses.replace(call, avals=avals, given=given), params)
        c = TYPED if call.explicit else PLAIN
        local = params | ({"config": None} if d.i_in or d.h_in else {})

        def part(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, ids, *weights, expert_map = arrays
            weights = own_weights(d, c, call.count, params["weight_layout"], *weights)
            own_weights_count = weights[0].shape[0]
            rows, slot_to_row = stages(
                x,
                ids,
                *weights,
                expert_map,
                between=functools.partial(between, d, c, call.count),
                after=functools.partial(after, d, c, call.count),
                own=lambda a: own_groups(a, own_weights_count, d.e, call.count(d.e)),
                **local,
            )
            return c.total(rows, d.added), slot_to_row

        outs = (((), d.h_out), ((), ()))
        return Split((*ins[:2], *ins[3:8]), outs, part)

    rule = Rule(rows_dims, split, names, weights=(2, 3))
    return rule


def own_weights(
    d: Division,
    c: Any,
    count: Callable[[Axes], int],
    weight_layout: str,
    w1: jax.Array,
    w2: jax.Array,
    b1: jax.Array,
    b2: jax.Array,
) -> tuple[jax.Array, ...]:
    """A device's parts of weights and biases, as `places` says -> those of its local layer."""
    in_pairs = d.i if d.pairs else ()
    w1, b1 = c.spread(w1, d.kept + in_pairs), c.spread(b1, d.kept + in_pairs + d.h_in)
    w2, b2 = c.spread(w2, d.kept), c.spread(b2, d.kept + d.i_in)
    columns = 2 if weight_layout == "kn" else 1
    w1, b1 = own_pairs(w1, columns, in_pairs, count), own_pairs(b1, 1, in_pairs, count)
    return w1, w2, once(b1, d.h_in), once(b2, d.i_in)


def between(d: Division, c: Any, count: Callable[[Axes], int], z: jax.Array) -> jax.Array:
    """Makes of a device's first product all that its activations need."""
    z = c.total(z, d.h_in)
    return _join_pairs(z, axes=d.i, count=count(d.i)) if d.halves else z


def after(d: Division, c: Any, count: Callable[[Axes], int], h: jax.Array) -> jax.Array:
    """Makes of a device's columns of the activations those that its rows of w_down contract."""
    if d.i == d.i_in:
        return c.spread(h, d.h_out)
    later = d.h_out + d.i_in  # that devices differ in from here on
    h = c.spread(h, tuple(a for a in later if a not in d.i))
    for axis in reversed(d.i):
        if axis in later:
            h = c.gather(h, (axis,), 1)
        else:
            h = c.gather_same(h, (axis,), count((axis,)), 1)
    return own(h, 1, d.i_in, count(d.i_in))


def own_experts(params: dict[str, Any], axes: Axes, count: Callable[[Axes], int]) -> dict[str, Any]:
    """The parameters of a device that has its part of the experts along `axes`; see `own_map`."""
    if not axes:
        return params
    local = params["num_local_experts"] // count(axes)
    return params | {"num_local_experts": local, "expert_offset": 0}


def own_map(
    expert_map: jax.Array, num_weights: int, axes: Axes, count: int, params: dict[str, Any]
) -> jax.Array:
    """The map of global experts to those whose weights, one of `count` parts, are on this device.

    Expert g uses weight g mod num_weights, here as everywhere.
    """
    if not axes:
        return expert_map
    ids = jnp.arange(params["num_experts"], dtype=jnp.int32)
    expert = expert_map if expert_map.size else ids - params["expert_offset"]
    exists = (expert >= 0) & (expert < params["num_local_experts"])
    expert = jnp.where(exists, expert, 0)
    own_weights = num_weights // count
    weight = expert % num_weights - index(axes) * own_weights
    here = exists & (weight >= 0) & (weight < own_weights)
    return jnp.where(here, expert // num_weights * own_weights + weight, -1)


def own_pairs(a: jax.Array, dim: int, axes: Axes, count: Callable[[Axes], int]) -> jax.Array:
    """This device's gates and its ups, of all gates before all ups or the other way round."""
    if not axes or not a.size:
        return a
    shape = a.shape
    a = a.reshape(*shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :])
    a = own(a, dim + 1, axes, count(axes))
    return a.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _join_pairs(z: jax.Array, *, axes: Axes, count: int) -> jax.Array:
    """Brings gates and ups together: two blocks of columns as stored -> one of each kind.

    Device s has the blocks 2s and 2s + 1 of 2 * count; device d gets d and d + count. Both of a
    device's blocks move at once, in two permutations of the devices.
    """
    low, high = jnp.split(z, 2, axis=1)
    here = index(axes)
    if count % 2 == 0:
        lower = here < count // 2
        low, high = jnp.where(lower, low, high), jnp.where(lower, high, low)
    sends = [(2 * s + (count % 2 == 0 and 2 * s >= count)) % count for s in range(count)]
    others = [(2 * s + (count % 2 == 1 or 2 * s < count)) % count for s in range(count)]
    low = jax.lax.ppermute(low, axes, list(enumerate(sends)))
    high = jax.lax.ppermute(high, axes, list(enumerate(others)))
    even = here % 2 == 0
    return jnp.concatenate([jnp.where(even, low, high), jnp.where(even, high, low)], axis=1)
