"""How the expert layer is divided over the axes of a mesh; weights stay where they are.

weights split on E      each device runs its experts, and results are added up
... on I                each device has columns of the first weight and rows of w_down, added up
first weight split on H parts of the first product are added up, then the layer goes on
w_down split on H       each device has columns of the result
tokens split            each device runs its tokens; over axes that split weights too, tokens are
                        gathered first and results scattered

Scales lie with their values, and an axis is divided between blocks only. A scale made of numbers
that lie on several devices is the largest of theirs, so that the values are those of one device.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe._collectives import PLAIN as PLAIN_COLLECTIVES
from jaxmoe._collectives import TYPED
from jaxmoe._formats import Tokens
from jaxmoe._gmm_sharding import own_groups, parts_of, token_scale_axes, weight_scale_axes
from jaxmoe._mlp.operands import Layer, Operands, join
from jaxmoe._mlp.stages import Exchange, in_parts
from jaxmoe._sharding import Axes, Call, Rule, Split, index, once, own, refuse_tokens

LayerOp = Callable[[Operands, Layer], tuple[jax.Array, ...]]

# What the public function calls each operand, in their order.
NAMES = tuple(
    {
        "expert_ids": "routing.expert_ids",
        "weights": "routing.weights",
        "x_scales": "x.scales",
        "gate_up_scales": "w_gate_up.scales",
        "up_scales": "w_up.scales",
        "down_scales": "w_down.scales",
    }.get(name, name)
    for name in Operands._fields
)
_WEIGHTS = tuple(Operands._fields.index(name) for name in ("w_gate_up", "w_up", "w_down"))


class Division(NamedTuple):
    """Mesh axes of each dimension of the layer.

    Attributes:
      e: experts.
      i, i_in: intermediate, as the first product computes it and as w_down contracts it. The same
        unless the other axis of one of them is split over what this one is.
      h_in, h_out: H as the first product contracts it, and H of the result.
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


def rule(op: LayerOp) -> Rule:
    """The rule of the layer, which `op` binds."""

    def split(call: Call, *, layer: Layer) -> Split:
        call = of_operands(call)
        if not layer.finalize:
            return _split_rows(the_rule, call, layer)
        division = divide(call, layer)
        ins = places(division, call.avals, layer)
        part = layer_part(call, division, op, layer)
        return Split(ins, ((division.tokens, division.h_out),), part)

    the_rule = Rule(dims, split, ("moe_mlp", *NAMES), weights=_WEIGHTS)
    return the_rule


def of_operands(call: Call) -> Call:
    """The same call, its operands named as those of the layer; the backward op has one more."""
    count = len(Operands._fields)
    avals, given = Operands(*call.avals[:count]), Operands(*call.given[:count])
    return dataclasses.replace(call, avals=avals, given=given)


def dims(avals: Any, *, layer: Layer) -> str:
    """Which dimensions are split alike. H of x is not tied to H of the weights, nor N to I."""
    a = Operands(*avals)
    stored = {"kn": ("h n", "i d"), "nk": ("n h", "d i")}
    first, second = stored[layer.layouts[0]][0], stored[layer.layouts[1]][1]
    same = "e" if a.w_gate_up.shape[0] == a.w_down.shape[0] else "f"
    joined = a.w_up is None  # or what is joined of two arrays has columns of its own
    of_first = layer.format.weight_scales.replace("q", "r")
    # Blocks of the two weights are different ones, and so are the columns of joined scales.
    of_up = of_first if joined or a.up_scales is not None else of_first.replace("n", "w")
    second_scales = (
        layer.format.weight_scales.replace("e", same)
        .replace("n", "d")
        .replace("p", "s")
        .replace("q", "u")
    )
    letters = Operands(
        x="t c",
        expert_ids="t k",
        w_gate_up=f"e {first}",
        w_down=f"{same} {second}",
        x_scales=layer.format.token_scales or "",
        weights="t k",
        gate_up_scales=of_up if a.gate_up_scales is None or a.gate_up_scales.ndim > 1 else "e",
        w_up=f"e {first}",
        up_scales=of_first,
        down_scales=second_scales,
        b_gate_up="e n" if joined or a.b_up is not None else "e w",
        b_up="e n",
        b_down=f"{same} d",
        expert_map="m",
        residual="t d",
        x_scale="v",
        h_scale="z",
    )
    return f"{', '.join(letters)} -> {'t d' if layer.finalize else 'o d, t k'}"


def divide(call: Call, layer: Layer) -> Division:
    """Chooses the axes of each dimension; those of the weights come before those of the tokens.

    H and I are divided between the blocks of the format.
    """
    avals, given, format = call.avals, call.given, layer.format
    w1, w2, of2 = avals.w_gate_up, avals.w_down, given.w_down
    of1 = given.w_gate_up
    if given.w_up is not None:
        of1 = tuple(a or b for a, b in zip(of1, given.w_up, strict=True))
    first, second = (
        (1, 2) if layout == "kn" else (2, 1) for layout in layer.layouts
    )  # the contracted axis of each weight and the other
    e = call.pick(w1.shape[0], of1[0], of2[0]) if w1.shape[0] == w2.shape[0] else ()
    hidden = parts_of(avals.x.shape[1], format)
    inter = parts_of(w2.shape[second[0]], format)
    i = call.pick(inter, of1[first[1]], taken=e)
    i_in = call.pick(inter, of2[second[0]], taken=e)
    h_in = call.pick(hidden, of1[first[0]], taken=e + i)
    h_out = call.pick(hidden, of2[second[1]], taken=e + i_in)
    stored = bool(i)
    i = i or (() if set(i_in) & set(h_in) else i_in)
    i_in = i_in or (() if set(i) & set(h_out) else i)
    of_weights = () if given.weights is None else given.weights[0]
    choices = (given.x[0], given.expert_ids[0], of_weights)
    tokens = call.pick(avals.x.shape[0], *choices, taken=h_out)
    gather = tuple(a for a in tokens if a in e + i + i_in + h_in)
    apart = call.count(i) > 1 and layer.activation.gated and layer.gate_up != "interleaved"
    apart = apart and avals.w_up is None
    halves, pairs = apart and stored, apart and not stored
    return Division(e, i, i_in, h_in, h_out, tokens, gather, halves, pairs)


def places(d: Division, avals: Any, layer: Layer) -> Operands:
    """Mesh axes of every operand."""
    a, format = Operands(*avals), layer.format
    columns = () if d.pairs else d.i
    # What is joined of two arrays is whole, and each device takes its pairs out of it.
    of_bias = columns if a.w_up is None or a.b_up is not None else ()
    of_scales = columns if a.w_up is None or a.up_scales is not None else ()
    w1, w2 = (d.e, d.h_in, columns), (d.e, d.i_in, d.h_out)
    w1 = w1 if layer.layouts[0] == "kn" else (w1[0], w1[2], w1[1])
    w2 = w2 if layer.layouts[1] == "kn" else (w2[0], w2[2], w2[1])
    gathered_h = d.h_in and (format.quantizes_tokens or set(d.h_in) & set(d.gather))
    x = (d.tokens, () if gathered_h else d.h_in)
    per_slot = (d.tokens, ())
    gate_scales = weight_scale_axes(format, d.e, of_scales, d.h_in)
    if a.gate_up_scales is not None and a.gate_up_scales.ndim > len(gate_scales):
        gate_scales = (*gate_scales, ())
    ins = Operands(
        x=x,
        expert_ids=per_slot,
        w_gate_up=w1,
        w_down=w2,
        x_scales=token_scale_axes(format, d.tokens, ()),
        weights=per_slot,
        gate_up_scales=gate_scales,
        w_up=w1,
        up_scales=weight_scale_axes(format, d.e, columns, d.h_in),
        down_scales=weight_scale_axes(format, d.e, d.h_out, d.i_in),
        b_gate_up=(d.e, of_bias),
        b_up=(d.e, columns),
        b_down=(d.e, d.h_out),
        expert_map=((),),
        residual=(d.tokens, d.h_out),
        x_scale=((),),
        h_scale=(d.e,) if a.h_scale is not None and a.h_scale.shape[0] > 1 else ((),),
    )
    # Arrays of no tokens are not divided.
    empty = [v is not None and not v.size for v in a]
    return Operands(*(((),) * v.ndim if e else p for p, v, e in zip(ins, a, empty, strict=True)))


def layer_part(call: Call, d: Division, op: LayerOp, layer: Layer) -> Callable[..., Any]:
    """What a device computes: operands split as `places` says -> its y."""
    device = Device.of(call, d, layer)
    local = own_experts(layer, d.e, call.count)
    if d.i_in or d.h_in:  # tiles chosen for all of the contraction may not fit a part
        local = local.replace(config=None)

    def part(*arrays: Any) -> tuple[jax.Array]:
        whole = Operands(*arrays)
        a = device.operands(whole)
        # The layer adds the residual itself unless its result is only a part of a sum.
        inside = whole.residual if not (d.added or d.gather) else None
        a = a._replace(residual=inside)
        if d.apart or device.shared:
            (y,) = in_parts(a, local, device.exchange())
        else:
            (y,) = op(a, local)
        return (device.finished(y, whole.residual),)

    return part


def _split_rows(the_rule: Rule, call: Call, layer: Layer) -> Split:
    """Without finalize: rows in the order of all tokens and experts, of which all make a plan."""
    given = call.given
    for name in ("x", "expert_ids"):
        refuse_tokens(the_rule, call, Operands._fields.index(name), 0)
    given = given._replace(x=((), *given.x[1:]), expert_ids=((), *given.expert_ids[1:]))
    call = dataclasses.replace(call, given=given)
    d = divide(call, layer)
    ins = places(d, call.avals, layer)._replace(h_scale=((),))
    device = Device.of(call, d, layer)
    local = layer.replace(config=None) if d.i_in or d.h_in else layer
    count = call.count(d.e)
    num_weights = call.avals.w_gate_up.shape[0] // count

    def own_of(groups: jax.Array) -> jax.Array:
        return own_groups(groups[None], num_weights, d.e, count)[0]

    def part(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        a = device.operands(Operands(*arrays), all_experts=True)
        exchange = dataclasses.replace(device.exchange(), own=own_of)
        rows, slot_to_row = in_parts(a, local, exchange)
        return device.collectives.total(rows, d.added), slot_to_row

    return Split(ins, (((), d.h_out), ((), ())), part)


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device does with its parts, whether it ends in finalize or not.

    Attributes:
      d: how the layer is divided.
      layer: the parameters of the whole layer.
      count: devices along mesh axes.
      collectives: how devices exchange something, with the right derivative.
      num_weights: experts of the whole first weight.
      shared: the axes over which a scale of the activations is one.
    """

    d: Division
    layer: Layer
    count: Callable[[Axes], int]
    collectives: Any
    num_weights: int
    shared: Axes

    @classmethod
    def of(cls, call: Call, d: Division, layer: Layer) -> "Device":
        """From the call of a layer."""
        format, same_i = layer.format, d.i == d.i_in
        shared: Axes = ()
        if call.avals.h_scale is None and format.shared_over(k=False, rows=True):
            shared = d.e + d.kept
        if call.avals.h_scale is None and format.shared_over(k=True, rows=False) and same_i:
            shared += d.i
        collectives = TYPED if call.explicit else PLAIN_COLLECTIVES
        num_weights = call.avals.w_gate_up.shape[0]
        return cls(d, layer, call.count, collectives, num_weights, shared)

    def operands(self, a: Operands, all_experts: bool = False) -> Operands:
        """The operands of this device's layer; with `all_experts` its plan is that of all."""
        d, count = self.d, self.count
        x, x_scales = self._tokens(a)
        expert_map = a.expert_map
        if not all_experts:
            expert_map = own_map(a.expert_map, self.num_weights, d.e, count(d.e), self.layer)
        a = self._own_weights(a)
        return a._replace(
            x=x,
            x_scales=x_scales,
            x_scale=None,  # applied, if there was one
            expert_ids=self._gathered(a.expert_ids, d.gather),
            weights=None if a.weights is None else self._gathered(a.weights, d.added + d.h_out),
            expert_map=expert_map,
        )

    def exchange(self) -> Exchange:
        """What this device does between the stages."""
        return Exchange(self._between, self._after, self._quantized_activations)

    def finished(self, y: jax.Array, residual: jax.Array | None) -> jax.Array:
        """Adds up the results of the devices, each of which keeps those of its tokens.

        Then comes the residual, if there was something to add up or keep.
        """
        d, c, count = self.d, self.collectives, self.count
        if not (d.added or d.gather):
            return y
        for axes in _like(d):
            y = c.scatter(y, axes) if axes[0] in d.added else c.own_same(y, axes, count(axes))
        y = c.total(y, tuple(a for a in d.added if a not in d.gather))
        if residual is None:
            return y
        return (y.astype(jnp.float32) + residual.astype(jnp.float32)).astype(y.dtype)

    def _gathered(self, a: jax.Array, parts: Axes) -> jax.Array:
        """All of what tokens have; over `parts` devices have parts of its cotangent."""
        d, c = self.d, self.collectives
        a = c.spread(a, tuple(axis for axis in parts if axis not in d.gather))
        for axes in reversed(_like(d)):
            a = c.gather(a, axes) if axes[0] in parts else c.gather_same(a, axes, self.count(axes))
        return a

    def _tokens(self, a: Operands) -> tuple[jax.Array, jax.Array | None]:
        """The tokens that this device runs, and their scales if they are quantized."""
        d, count, format = self.d, self.count, self.layer.format
        if not format.quantizes_tokens:
            x = self._gathered(a.x, d.e + d.i + tuple(g for g in d.gather if g in d.h_in))
            if set(d.h_in) & set(d.gather):
                x = own(x, 1, d.h_in, count(d.h_in))
            return x, None
        x, scales = a.x, a.x_scales
        if scales is None:
            axes = d.tokens if format.one_token_scale else ()
            scale = None if a.x_scale is None else a.x_scale.reshape(())
            x, scales = self._quantized(x, axes, scale)
        x = own(TYPED.gather(x, d.gather), 1, d.h_in, count(d.h_in))
        if scales.ndim:
            scales = TYPED.gather(scales, d.gather)
        if scales.ndim == 2:
            scales = own(scales, 1, d.h_in, count(d.h_in))
        return x, scales

    def _quantized(self, x: jax.Array, axes: Axes, scale: jax.Array | None = None) -> Tokens:
        """Quantizes a device's part of x, with scales that are one along `axes`."""
        tokens = self.layer.format.tokens(x, scale)
        if axes and scale is None:
            tokens = self.layer.format.tokens(x, jax.lax.pmax(tokens.scales, axes))
        return tokens

    def _quantized_activations(self, h: jax.Array) -> Tokens:
        d, count = self.d, self.count
        if d.i == d.i_in:
            return self._quantized(h, self.shared)
        values, scales = self._quantized(TYPED.gather(h, d.i, 1), self.shared)
        assert scales is not None
        values = own(values, 1, d.i_in, count(d.i_in))
        if scales.ndim == 2:
            scales = own(scales, 1, d.i_in, count(d.i_in))
        return Tokens(values, scales)

    def _own_weights(self, a: Operands) -> Operands:
        """This device's parts of weights, scales and biases: those of its local layer."""
        d, c, count, layer = self.d, self.collectives, self.count, self.layer
        in_pairs = d.i if d.pairs else ()
        joined_apart = d.i if a.w_up is not None else ()
        pair_bias = in_pairs or (joined_apart if a.b_up is None else ())
        pair_scales = in_pairs or (joined_apart if a.up_scales is None else ())
        spread = lambda w, axes: None if w is None else c.spread(w, axes)  # noqa: E731
        w1, w_up = spread(a.w_gate_up, d.kept + in_pairs), spread(a.w_up, d.kept)
        w2 = spread(a.w_down, d.kept)
        b1 = spread(a.b_gate_up, d.kept + pair_bias + d.h_in)
        b_up = spread(a.b_up, d.kept + d.h_in)
        b2 = spread(a.b_down, d.kept + d.i_in)
        columns = 2 if layer.layouts[0] == "kn" else 1
        a = a._replace(
            w_gate_up=own_pairs(w1, columns, in_pairs, count),
            w_up=w_up,
            w_down=w2,
            gate_up_scales=self._own_scales(a.gate_up_scales, pair_scales),
            b_gate_up=once(own_pairs(b1, 1, pair_bias, count), d.h_in),
            b_up=once(b_up, d.h_in),
            b_down=once(b2, d.i_in),
        )
        return join(a, layer)

    def _own_scales(self, scales: jax.Array | None, axes: Axes) -> jax.Array | None:
        """This device's scales of the first weight; those of a tensor are of all its columns."""
        if scales is None or self.layer.format.weight_scales == "e":
            return scales
        return own_pairs(scales, 1, axes, self.count)

    def _between(self, z: jax.Array) -> jax.Array:
        """Makes of a device's first product all that its activations need."""
        d = self.d
        z = self.collectives.total(z, d.h_in)
        return _join_pairs(z, axes=d.i, count=self.count(d.i)) if d.halves else z

    def _after(self, h: jax.Array) -> jax.Array:
        """Makes of a device's columns of the activations those that its rows of w_down contract."""
        d, c, count = self.d, self.collectives, self.count
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


def _like(d: Division) -> list[Axes]:
    """The axes that tokens are gathered over, neighbours together if they split the same things."""
    kind = lambda a: (a in d.added, a in d.e + d.i + d.h_in)  # noqa: E731
    return [tuple(axes) for _, axes in itertools.groupby(d.gather, kind)]


def own_experts(layer: Layer, axes: Axes, count: Callable[[Axes], int]) -> Layer:
    """The parameters of a device that has its part of the experts along `axes`; see `own_map`."""
    if not axes:
        return layer
    local = layer.num_local_experts // count(axes)
    return layer.replace(num_local_experts=local, expert_offset=0)


def own_map(
    expert_map: jax.Array | None, num_weights: int, axes: Axes, count: int, layer: Layer
) -> jax.Array | None:
    """The map of global experts to those whose weights, one of `count` parts, are on this device.

    Expert g uses weight g mod num_weights, here as everywhere.
    """
    if not axes:
        return expert_map
    ids = jnp.arange(layer.num_experts, dtype=jnp.int32)
    expert = ids - layer.expert_offset if expert_map is None else expert_map
    exists = (expert >= 0) & (expert < layer.num_local_experts)
    expert = jnp.where(exists, expert, 0)
    own_weights = num_weights // count
    weight = expert % num_weights - index(axes) * own_weights
    here = exists & (weight >= 0) & (weight < own_weights)
    return jnp.where(here, expert // num_weights * own_weights + weight, -1)


def own_pairs(a: Any, dim: int, axes: Axes, count: Callable[[Axes], int]) -> Any:
    """This device's gates and its ups, of all gates before all ups or the other way round."""
    if not axes or a is None:
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
