"""How the expert layer is divided over the axes of a mesh.

weights split on E      each device runs its experts, and results are added up
... on I                each device has columns of the first weight and rows of w_down, added up
first weight split on H parts of the first product are added up, then the layer goes on
w_down split on H       each device has columns of the result
tokens split            each device runs its tokens; over axes that split weights too, tokens are
                        gathered first and results scattered, or the weights are (_mlp/fetch.py)

Scales lie with their values, and an axis is divided between blocks only. A scale made of numbers
that lie on several devices is the largest of theirs, so that the values are those of one device.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import Tokens
from jaxmoe._gemm.sharding import own_groups
from jaxmoe._jax.collectives import PLAIN as PLAIN_COLLECTIVES
from jaxmoe._jax.collectives import TYPED
from jaxmoe._jax.mesh import Axes, Dims, once, own
from jaxmoe._jax.sharding import Call, Rule, Split, refuse_tokens
from jaxmoe._mlp import fetch
from jaxmoe._mlp.configs import of_shapes
from jaxmoe._mlp.division import Division, dims, divide, places
from jaxmoe._mlp.operands import Layer, Operands, join
from jaxmoe._mlp.own import join_pairs, own_experts, own_map, own_pairs
from jaxmoe._mlp.stages import Exchange, in_parts

LayerOp = Callable[[Operands, Layer], tuple[jax.Array, ...]]

_INDEX = {name: i for i, name in enumerate(Operands._fields)}


def rule(op: LayerOp) -> Rule:
    """The rule of the layer, which `op` binds."""

    def split(call: Call, *, layer: Layer) -> Split:
        call = of_operands(call)
        if not layer.finalize:
            return _split_rows(the_rule, call, layer)
        division = fetch.divided(call, layer)
        ins = fetch.places_of(call, division, layer)
        part = layer_part(call, division, op, layer)
        return Split(ins, ((division.tokens, division.h_out),), part)

    def weights(*, layer: Layer) -> dict[int, str]:
        return {_INDEX[name]: public for name, public in layer.weight_names.items()}

    def units(aval: Any, *, layer: Layer) -> str:
        return layer.format.units(aval.shape)

    def advice(axes: Axes, *, layer: Layer) -> str:
        """All axes of a dimension that only some are gathered of: the last ones alone can be."""
        named = layer.gather or ()
        more = tuple(dict.fromkeys((*axes, *named)))
        if not named or set(more) == set(named):
            return ""
        return f"gather_weights={more!r} gathers all of it"

    # Of the other operands only tokens and choices are ever refused.
    names = "moe_mlp", "x", "routing.expert_ids"
    the_rule = Rule(dims, split, names, weights, units, advice)
    return the_rule


def of_operands(call: Call) -> Call:
    """The call with its operands by name; the backward op has one more, which is left out."""
    count = len(Operands._fields)
    avals, given = Operands(*call.avals[:count]), Operands(*call.given[:count])
    return dataclasses.replace(call, avals=avals, given=given)


def layer_part(call: Call, d: Division, op: LayerOp, layer: Layer) -> Callable[..., Any]:
    """Function of one device: operands split as `places` says -> its y."""
    device = Device.of(call, d, layer)
    local = own_experts(layer, d.e, call.count)
    local = local.replace(config=config_of_part(call, d, local))

    def part(*arrays: Any) -> tuple[jax.Array]:
        whole = Operands(*arrays)
        if whole.residual is not None and not whole.residual.size:  # whole, whatever H of y is
            whole = whole._replace(residual=None)
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


def config_of_part(call: Call, d: Division, layer: Layer) -> tuple[Any, Any] | None:
    """The tiles of a device's products.

    Those of all of a contraction may not fit a part of it, which chooses its own; but k loops that
    are whole, as `batch_invariant` has them, stay so.
    """
    if not (d.i_in or d.h_in) or layer.config is None:
        return layer.config
    if any(config is None or config.split_k > 1 for config in layer.config):
        return None
    a = call.avals
    hidden = a.x.shape[1] // call.count(d.h_in)
    intermediate = layer.intermediate(a.w_down) // call.count(d.i_in)
    chosen = of_shapes(layer, a.expert_ids.size, hidden, intermediate, static=a.h_scale is not None)
    first, second = (dataclasses.replace(config, split_k=1) for config in chosen)
    return first, second


def _split_rows(the_rule: Rule, call: Call, layer: Layer) -> Split:
    """Without finalize: rows in the order of all tokens and experts, of which all make a plan."""
    given = call.given
    for name in ("x", "expert_ids"):
        refuse_tokens(the_rule, call, _INDEX[name], 0)
    given = given._replace(x=((), *given.x[1:]), expert_ids=((), *given.expert_ids[1:]))
    call = dataclasses.replace(call, given=given)
    d = divide(call, layer)
    ins = places(d, call.avals, layer)._replace(h_scale=((),))
    device = Device.of(call, d, layer)
    local = layer.replace(config=config_of_part(call, d, layer))
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
    """Steps of one device on its parts, for a layer with finalize or without.

    Attributes:
      d: how the layer is divided.
      layer: the parameters of the whole layer.
      count: devices along mesh axes.
      collectives: how devices exchange something, with the right derivative.
      num_weights: experts of the whole first weight.
      shared: the axes over which a scale of the activations is one.
      stored: the axes over which weights are gathered, of each dimension, by name.
    """

    d: Division
    layer: Layer
    count: Callable[[Axes], int]
    collectives: Any
    num_weights: int
    shared: Axes
    stored: dict[str, Dims]

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
        stored = fetch.stored(call, d, layer)
        return cls(d, layer, call.count, collectives, num_weights, shared, stored)

    def operands(self, a: Operands, all_experts: bool = False) -> Operands:
        """The operands of this device's layer; with `all_experts` its plan is that of all."""
        d, count = self.d, self.count
        rounded_later = self._rounded_later(a)
        x, x_scales = (a.x, None) if rounded_later else self._tokens(a)
        expert_map = a.expert_map
        if not all_experts:
            expert_map = own_map(a.expert_map, self.num_weights, d.e, count(d.e), self.layer)
        a = self._own_weights(a)
        return a._replace(
            x=x,
            x_scales=x_scales,
            x_scale=a.x_scale if rounded_later else None,  # applied, if there was one
            expert_ids=self._gathered(a.expert_ids, d.gather),
            weights=None if a.weights is None else self._gathered(a.weights, d.added + d.h_out),
            expert_map=expert_map,
        )

    def exchange(self) -> Exchange:
        """Collectives of this device between the stages."""
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

    def _rounded_later(self, a: Operands) -> bool:
        """Whether this device's layer rounds the tokens that are here to numbers, all of each."""
        rounding = self.layer.format.rounding_in_call(a.absent)
        return bool(rounding) and a.x_scales is None and not (self.d.gather or self.d.h_in)

    def _tokens(self, a: Operands) -> tuple[jax.Array, jax.Array | None]:
        """The tokens that this device runs, and their scales if they are quantized."""
        d, count, format = self.d, self.count, self.layer.format
        scales: Any
        if not format.quantizes_tokens:
            cut = d.h_in if set(d.h_in) & set(d.gather) else ()  # else x comes in parts of H
            x = self._gathered(a.x, d.e + d.i + cut)
            return own(x, 1, cut, count(cut)), None
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
        values, scales = self._quantized(self._all_columns(h), self.shared)
        assert scales is not None
        values = own(values, 1, d.i_in, count(d.i_in))
        if scales.ndim == 2:
            scales = own(scales, 1, d.i_in, count(d.i_in))
        return Tokens(values, scales)

    def _own_weights(self, a: Operands) -> Operands:
        """This device's parts of weights, scales and biases: those of its local layer."""
        d, count, layer = self.d, self.count, self.layer
        in_pairs = d.i if d.pairs else ()
        joined_apart = d.i if a.w_up is not None else ()
        pair_bias = in_pairs or (joined_apart if a.b_up is None else ())
        pair_scales = in_pairs or (joined_apart if a.up_scales is None else ())
        differ = {  # axes over which devices have parts of the cotangent
            "w_gate_up": d.kept + in_pairs,
            "w_up": d.kept,
            "w_down": d.kept,
            "b_gate_up": d.kept + pair_bias + d.h_in,
            "b_up": d.kept + d.h_in,
            "b_down": d.kept + d.i_in,
        }
        a = a._replace(**{n: self._fetched(n, getattr(a, n), differ.get(n)) for n in fetch.FETCHED})
        b1 = own_pairs(a.b_gate_up, 1, pair_bias, count)
        columns = 2 if layer.layouts[0] == "kn" else 1
        a = a._replace(
            w_gate_up=own_pairs(a.w_gate_up, columns, in_pairs, count),
            gate_up_scales=self._own_scales(a.gate_up_scales, pair_scales),
            b_gate_up=once(b1, d.h_in),
            b_up=once(a.b_up, d.h_in),
            b_down=once(a.b_down, d.i_in),
        )
        return join(a, layer)

    def _fetched(self, name: str, a: Any, differ: Axes | None) -> Any:
        """A weight, or what belongs to it, with the parts that other devices have."""
        if a is None:
            return None
        parts = self.stored.get(name, ())
        gathered = {axis for axes in parts for axis in axes}
        if differ is not None:
            a = self.collectives.spread(a, tuple(axis for axis in differ if axis not in gathered))
        narrow = self.layer.dtype if self.layer.format.master and differ else None
        return self.collectives.fetch(a, parts, narrow)

    def _own_scales(self, scales: jax.Array | None, axes: Axes) -> jax.Array | None:
        """This device's scales of the first weight; those of a tensor are of all its columns."""
        if scales is None or self.layer.format.weight_scales == "e":
            return scales
        return own_pairs(scales, 1, axes, self.count)

    def _between(self, z: jax.Array) -> jax.Array:
        """Makes of a device's first product all that its activations need."""
        d = self.d
        z = self.collectives.total(z, d.h_in)
        return join_pairs(z, axes=d.i, count=self.count(d.i)) if d.halves else z

    def _after(self, h: jax.Array) -> jax.Array:
        """Makes of a device's columns of the activations those that its rows of w_down contract."""
        d, c, count = self.d, self.collectives, self.count
        if d.i == d.i_in:
            return c.spread(h, d.h_out)
        later = d.h_out + d.i_in  # that devices differ in from here on
        h = c.spread(h, tuple(a for a in later if a not in d.i))
        return own(self._all_columns(h), 1, d.i_in, count(d.i_in))

    def _all_columns(self, h: jax.Array) -> jax.Array:
        """All columns of the activation, where devices have those of their gates."""
        d, c, count = self.d, self.collectives, self.count
        for axis in reversed(d.i):
            if axis in d.h_out + d.i_in:  # which devices differ in from here on
                h = c.gather(h, (axis,), 1)
            else:
                h = c.gather_same(h, (axis,), count((axis,)), 1)
        return h


def _like(d: Division) -> list[Axes]:
    """The axes that tokens are gathered over, neighbours together if they split the same things."""
    kind = lambda a: (a in d.added, a in d.e + d.i + d.h_in)  # noqa: E731
    return [tuple(axes) for _, axes in itertools.groupby(d.gather, kind)]
