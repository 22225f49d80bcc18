"""How products and the layer with FP8 weights are divided over the axes of a mesh.

As without quantization (_gmm_sharding.py, _mlp_sharding.py), scales with their values. Axes of
"fp8_block" are divided between blocks only. A scale made of numbers that lie on several devices is
the largest of theirs, so that the values are those of one device.
"""

import dataclasses
import functools
from collections.abc import Callable
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


def layer_rule(fused: Callable[..., Any], stages: Callable[..., Any]) -> Rule:
    """The rule of `moe_mlp_fp8_p`, which is `fused`; `stages` is the same in parts."""

    def dims(avals: Any, **_params: Any) -> str:
        x_scales = "" if avals[1].ndim == 0 else "t" if avals[1].ndim == 1 else "t q"
        first = ("", "e", "e n", "e p r")[avals[5].ndim]
        second = ("", "e", "e d", "e s u")[avals[7].ndim]
        return (
            f"t c, {x_scales}, t k, t k, e n h, {first}, e d i, {second}, e n, e d, m, t d, v, z "
            "-> t d"
        )

    def split(call: Call, *, format: str, activation: Any, gate_up: str, **params: Any) -> Split:
        arrays = [0, 2, 3, 4, 6]
        plain = dataclasses.replace(
            call,
            avals=tuple(call.avals[i] for i in arrays),
            given=tuple(call.given[i] for i in arrays),
        )
        d = _mlp_sharding.divide(
            plain, activation=activation, gate_up=gate_up, weight_layout="nk", unit=_unit(format)
        )
        params = params | {"format": format, "activation": activation, "gate_up": gate_up}
        part = _layer_part(call, d, fused, stages, params)
        return Split(_places(d, call.avals), ((d.tokens, d.h_out),), part)

    return Rule(dims, split, ("moe_mlp", *_ARGUMENTS), weights=(4, 6))


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


def _layer_part(
    call: Call,
    d: Division,
    fused: Callable[..., Any],
    stages: Callable[..., Any],
    params: dict[str, Any],
) -> Callable[..., tuple[jax.Array]]:
    c, count, format = TYPED, call.count, params["format"]
    num_weights, static = call.avals[4].shape[0], bool(call.avals[13].size)
    local = _mlp_sharding.own_experts(params, d.e, count)
    if d.i_in or d.h_in:
        local = local | {"config": None}
    # The axes over which a scale of the activations is one.
    shared: Axes = ()
    if not static and format == "fp8_tensor":
        shared = d.e + d.kept + (d.i if d.i == d.i_in else ())
    elif format == "fp8_channel" and d.i == d.i_in:
        shared = d.i

    def tokens(x: jax.Array, x_scales: jax.Array, x_scale: jax.Array) -> list[jax.Array]:
        if x.dtype != _FP8:
            scale = x_scale.reshape(()) if x_scale.size else None
            x, x_scales = quantized(x, format, d.tokens if format == "fp8_tensor" else (), scale)
        per_token = [x, x_scales] if x_scales.ndim else [x]
        gathered = [c.gather(a, d.gather) for a in per_token]
        x, x_scales = gathered[0], gathered[-1] if x_scales.ndim else x_scales
        x = own(x, 1, d.h_in, count(d.h_in))
        if x_scales.ndim == 2:
            x_scales = own(x_scales, 1, d.h_in, count(d.h_in))
        return [x, x_scales]

    def pairs(a: jax.Array) -> jax.Array:
        return own_pairs(a, 1, d.i, count) if d.pairs and a.ndim > 1 else a

    def activations(h: jax.Array) -> tuple[jax.Array, jax.Array]:
        if d.i == d.i_in:
            return quantized(h, format, shared)
        values, scales = quantized(c.gather(h, d.i, 1), format, shared)
        values = own(values, 1, d.i_in, count(d.i_in))
        return values, own(scales, 1, d.i_in, count(d.i_in)) if scales.ndim == 2 else scales

    def part(*arrays: jax.Array) -> tuple[jax.Array]:
        x, x_scales, ids, weights, w1, s1, w2, s2, b1, b2, expert_map, residual, *scales = arrays
        experts = [pairs(w1), pairs(s1), w2, s2, once(pairs(b1), d.h_in), once(b2, d.i_in)]
        expert_map = own_map(expert_map, num_weights, d.e, count(d.e), params)
        slots = [c.gather(a, d.gather) for a in (ids, weights)]
        inside = residual if not (d.added or d.gather) else jnp.zeros((0, 0), b2.dtype)
        arguments = [*tokens(x, x_scales, scales[0]), *slots, *experts, expert_map, inside]
        if d.apart or shared:
            y = stages(
                *arguments,
                scales[1],
                between=lambda z: _mlp_sharding.between(d, c, count, z),
                after=functools.partial(_mlp_sharding.after, d, c, count),
                quantized=activations,
                **local,
            )
        else:
            (y,) = fused(*arguments, scales[0][:0], scales[1], **local)
        return (_mlp_sharding.finished(y, residual, d, c, count),)

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
