"""How products and the layer with FP8 weights are divided over the axes of a mesh.

As without quantization (_gmm_sharding.py, _mlp_sharding.py), scales with their values. Axes of
"fp8_block" are divided between blocks only. A scale made of numbers that lie on several devices is
the largest of theirs, so that the values are those of one device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import _mlp_sharding
from jaxmoe._collectives import TYPED
from jaxmoe._gmm_sharding import own_groups
from jaxmoe._mlp_sharding import Division, own_map, own_pairs
from jaxmoe._sharding import Axes, Call, Dims, Rule, Split, once, own, refuse_tokens, total
from jaxmoe.quantize import BLOCK, quantize_tokens

_FP8 = jnp.float8_e4m3fn
_ARGUMENTS = (
    "x.values",
    "x.scales",
    "routing.expert_ids",
    "routing.weights",
    "w_gate_up.values",
    "w_gate_up.scales",
    "w_down.values",
    "w_down.scales",
    *_mlp_sharding.NAMES[5:],
    "x_scale",
    "intermediate_scale",
)


def gmm_rule(gmm: Callable[..., Any]) -> Rule:
    """The rule of `gmm_fp8`."""

    def dims(avals: Any, **_params: Any) -> str:
        scales = ("", "t", "t q")[avals[1].ndim], ("", "e", "e n", "e p q")[avals[3].ndim]
        return f"t k, {scales[0]}, e n k, {scales[1]}, g, g, e n -> t n"

    def split(call: Call, *, format: str, **params: Any) -> Split:
        refuse_tokens(rule, call, 0, 0)
        x, _, w = call.avals[:3]
        of_x, _, of_w = call.given[:3]
        unit = _unit(format)
        e = call.pick(w.shape[0], of_w[0])
        n = call.pick(_parts(w.shape[1], unit), of_w[1], taken=e)
        k = call.pick(_parts(x.shape[1], unit), of_w[2], of_x[1], taken=e + n)
        if k:
            params = params | {"config": None}

        def part(x: Any, xs: Any, w: Any, ws: Any, starts: Any, sizes: Any, bias: Any) -> Any:
            groups = (own_groups(a[None], w.shape[0], e, call.count(e))[0] for a in (starts, sizes))
            (out,) = gmm(x, xs, w, ws, *groups, once(bias, k), format=format, **params)
            return (total(out, e + k),)

        bias = (e, n) if call.avals[6].size else ((), ())
        of_x = ((), k), _token_scales(call.avals[1], (), k)
        ins = (*of_x, (e, n, k), _weight_scales(call.avals[3], e, n, k), ((),), ((),), bias)
        return Split(ins, (((), n),), part)

    names = ("grouped_gemm", "lhs", "lhs.scales", "rhs.values", "rhs.scales")
    rule = Rule(dims, split, (*names, "group_sizes", "group_sizes", "bias"), weights=(2,))
    return rule


def without_finalize(values: Sequence[Any]) -> list[Any]:
    """Takes what belongs to `moe_mlp_fp8_rows_p` from what there is of each argument of the layer.

    `moe_mlp_fp8_p` without weights and residual; x_scale and intermediate_scale may be left out.
    """
    return [*values[:3], *values[4:11], *values[12:]]


def with_finalize(values: Sequence[Any], weights: Any, residual: Any) -> list[Any]:
    """The inverse of `without_finalize`."""
    return [*values[:3], weights, *values[3:10], residual, *values[10:]]


def layer_rule(fused: Callable[..., Any], stages: Callable[..., Any]) -> Rule:
    """The rule of `moe_mlp_fp8_p`, which is `fused`; `stages` is the same in parts."""

    def split(call: Call, **params: Any) -> Split:
        d = _division(call, params)
        device = _Device.of(call, d, params)
        part = _layer_part(call, device, fused, stages, params)
        return Split(_places(d, call.avals), ((d.tokens, d.h_out),), part)

    return Rule(_dims, split, ("moe_mlp", *_ARGUMENTS), weights=(4, 6))


def rows_rule(stages: Callable[..., Any]) -> Rule:
    """The rule of `moe_mlp_fp8_rows_p`, `stages` being that op in parts.

    Its rows are in the order of all tokens and all experts, which every device makes a plan of.
    """

    def rows_dims(avals: Any, **params: Any) -> str:
        arguments, _ = _dims(with_finalize(avals, None, None), **params).split("->")
        return f"{','.join(without_finalize(arguments.split(',')))} -> o d, t k"

    def split(call: Call, **params: Any) -> Split:
        for i in (0, 2):
            refuse_tokens(rule, call, i, 0)
        (x, _, ids), avals = call.given[:3], call.avals
        given = (((), *x[1:]), call.given[1], ((), *ids[1:]), *call.given[3:])
        whole = dataclasses.replace(
            call,
            avals=tuple(with_finalize(avals, avals[2], avals[0])),
            given=tuple(with_finalize(given, given[2], given[0])),
        )
        d = _division(whole, params)
        # A scale of every expert, as their rows are: in the order of all.
        ins = (*without_finalize(_places(d, whole.avals))[:-1], ((),))
        part = _rows_part(call, _Device.of(whole, d, params), stages, params)
        return Split(ins, (((), d.h_out), ((), ())), part)

    names = ("moe_mlp", *without_finalize(_ARGUMENTS))
    rule = Rule(rows_dims, split, names, weights=(3, 5))
    return rule


def _dims(avals: Any, **_params: Any) -> str:
    x_scales = "" if avals[1].ndim == 0 else "t" if avals[1].ndim == 1 else "t q"
    first = ("", "e", "e n", "e p r")[avals[5].ndim]
    second = ("", "e", "e d", "e s u")[avals[7].ndim]
    return (
        f"t c, {x_scales}, t k, t k, e n h, {first}, e d i, {second}, e n, e d, m, t d, v, z -> t d"
    )


def _division(call: Call, params: dict[str, Any]) -> Division:
    """Chooses the axes of each dimension from the arguments of `moe_mlp_fp8_p`."""
    arrays = [0, 2, 3, 4, 6]
    plain = dataclasses.replace(
        call,
        avals=tuple(call.avals[i] for i in arrays),
        given=tuple(call.given[i] for i in arrays),
    )
    keys = {k: params[k] for k in ("activation", "gate_up")}
    return _mlp_sharding.divide(plain, **keys, weight_layout="nk", unit=_unit(params["format"]))


def _places(d: Division, avals: Any) -> tuple[Dims, ...]:
    columns = () if d.pairs else d.i
    per_slot = (d.tokens, ())
    own_scale = (d.e,) if avals[13].shape[0] > 1 else ((),)
    ins = (
        (d.tokens, ()),
        _token_scales(avals[1], d.tokens, ()),
        per_slot,
        per_slot,
        (d.e, columns, d.h_in),
        _weight_scales(avals[5], d.e, columns, d.h_in),
        (d.e, d.h_out, d.i_in),
        _weight_scales(avals[7], d.e, d.h_out, d.i_in),
        (d.e, columns),
        (d.e, d.h_out),
        ((),),
        (d.tokens, d.h_out),
        ((),),
        own_scale,
    )
    return tuple(p if a.size else ((),) * a.ndim for p, a in zip(ins, avals, strict=True))


@dataclasses.dataclass(frozen=True)
class _Device:
    """What a device does with its parts, whether it ends in finalize or not.

    Attributes:
      d: how the layer is divided.
      count: devices along mesh axes.
      format: of the weights.
      shared: the axes over which a scale of the activations is one.
    """

    d: Division
    count: Callable[[Axes], int]
    format: str
    shared: Axes

    @classmethod
    def of(cls, call: Call, d: Division, params: dict[str, Any]) -> "_Device":
        """From a call with the arguments of `moe_mlp_fp8_p`."""
        format, shared = params["format"], ()
        if format == "fp8_tensor" and not call.avals[13].size:
            shared = d.e + d.kept + (d.i if d.i == d.i_in else ())
        elif format == "fp8_channel" and d.i == d.i_in:
            shared = d.i
        return cls(d, call.count, format, shared)

    def tokens(self, x: jax.Array, x_scales: jax.Array, x_scale: jax.Array) -> list[jax.Array]:
        """x, quantized, of the tokens that this device runs, and its scales."""
        d, count = self.d, self.count
        if x.dtype != _FP8:
            scale = x_scale.reshape(()) if x_scale.size else None
            axes = d.tokens if self.format == "fp8_tensor" else ()
            x, x_scales = quantized(x, self.format, axes, scale)
        per_token = [x, x_scales] if x_scales.ndim else [x]
        gathered = [TYPED.gather(a, d.gather) for a in per_token]
        x, x_scales = gathered[0], gathered[-1] if x_scales.ndim else x_scales
        x = own(x, 1, d.h_in, count(d.h_in))
        if x_scales.ndim == 2:
            x_scales = own(x_scales, 1, d.h_in, count(d.h_in))
        return [x, x_scales]

    def experts(
        self,
        w1: jax.Array,
        s1: jax.Array,
        w2: jax.Array,
        s2: jax.Array,
        b1: jax.Array,
        b2: jax.Array,
    ) -> list[jax.Array]:
        """Weights, scales and biases of this device's part of the products."""
        pairs, d = self._pairs, self.d
        return [pairs(w1), pairs(s1), w2, s2, once(pairs(b1), d.h_in), once(b2, d.i_in)]

    def exchanges(self) -> dict[str, Callable[..., Any]]:
        """What `stages` do between the products."""
        of_layer = (self.d, TYPED, self.count)
        return {
            "between": functools.partial(_mlp_sharding.between, *of_layer),
            "after": functools.partial(_mlp_sharding.after, *of_layer),
            "quantized": self._activations,
        }

    def _pairs(self, a: jax.Array) -> jax.Array:
        d = self.d
        return own_pairs(a, 1, d.i, self.count) if d.pairs and a.ndim > 1 else a

    def _activations(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        d, count = self.d, self.count
        if d.i == d.i_in:
            return quantized(h, self.format, self.shared)
        values, scales = quantized(TYPED.gather(h, d.i, 1), self.format, self.shared)
        values = own(values, 1, d.i_in, count(d.i_in))
        return values, own(scales, 1, d.i_in, count(d.i_in)) if scales.ndim == 2 else scales


def _layer_part(
    call: Call,
    device: _Device,
    fused: Callable[..., Any],
    stages: Callable[..., Any],
    params: dict[str, Any],
) -> Callable[..., tuple[jax.Array]]:
    d, count, num_weights = device.d, call.count, call.avals[4].shape[0]
    local = _mlp_sharding.own_experts(params, d.e, count)
    if d.i_in or d.h_in:
        local = local | {"config": None}

    def part(*arrays: jax.Array) -> tuple[jax.Array]:
        x, x_scales, ids, weights, *experts, expert_map, residual, x_scale, act_scale = arrays
        expert_map = own_map(expert_map, num_weights, d.e, count(d.e), params)
        slots = [TYPED.gather(a, d.gather) for a in (ids, weights)]
        inside = jnp.zeros((0, 0), residual.dtype) if d.added or d.gather else residual
        arguments = [*device.tokens(x, x_scales, x_scale), *slots, *device.experts(*experts)]
        arguments += [expert_map, inside]
        if d.apart or device.shared:
            y = stages(*arguments, act_scale, **device.exchanges(), **local)
        else:
            (y,) = fused(*arguments, x_scale[:0], act_scale, **local)
        return (_mlp_sharding.finished(y, residual, d, TYPED, count),)

    return part


def _rows_part(
    call: Call, device: _Device, stages: Callable[..., Any], params: dict[str, Any]
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    d, local = device.d, params | ({"config": None} if device.d.i_in or device.d.h_in else {})
    num_weights, count = call.avals[3].shape[0] // call.count(d.e), call.count(d.e)

    def part(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, x_scales, ids, *experts, expert_map, x_scale, act_scale = arrays
        rows, slot_to_row = stages(
            *device.tokens(x, x_scales, x_scale),
            ids,
            *device.experts(*experts),
            expert_map,
            act_scale,
            own=lambda groups: own_groups(groups[None], num_weights, d.e, count)[0],
            **device.exchanges(),
            **local,
        )
        return TYPED.total(rows, d.added), slot_to_row

    return part


def quantized(
    x: jax.Array, format: str, axes: Axes, scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantizes a device's part of x, with scales that are one along `axes`."""
    q = quantize_tokens(x, format, scale=scale)
    if axes and scale is None:
        q = quantize_tokens(x, format, scale=jax.lax.pmax(q.scales, axes))
    return q.values, q.scales


def _unit(format: str) -> int:
    return BLOCK if format == "fp8_block" else 1


def _parts(size: int, unit: int) -> int:
    """Into how many parts an axis can be divided at most."""
    return size // unit if size % unit == 0 else 1


def _token_scales(scales: Any, tokens: Axes, k: Axes) -> Dims:
    return ((), (tokens,), (tokens, k))[scales.ndim] if scales.size else ((),) * scales.ndim


def _weight_scales(scales: Any, e: Axes, n: Axes, k: Axes) -> Dims:
    return (e, n, k)[: scales.ndim]
