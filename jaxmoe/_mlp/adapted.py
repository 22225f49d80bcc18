"""The layer whose weights have adapters of low rank: one CUDA call, or the ops it is made of.

adapted_moe_mlp: `Operands` of a layer with finalize, then gate_up_a [E,H,r1], gate_up_b [E,r1,N],
  down_a [E,I,r2] and down_b [E,r2,H] in the dtype of the layer -> y [T,H]

A weight W is W + scale a b. The call adds (scale x a) b to the sums of x W before they are rounded,
the first factor being rounded; elsewhere, and under derivatives, products are rounded each.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._gemm.gate_up import activate, of_moving
from jaxmoe._gemm.tiles import with_adapters
from jaxmoe._jax import primitive as _primitive
from jaxmoe._mlp import op
from jaxmoe._mlp.configs import configs_of
from jaxmoe._mlp.operands import Layer, Operands, halves
from jaxmoe.activation import resolve
from jaxmoe.experts import Experts
from jaxmoe.finalize import finalize
from jaxmoe.grouped_gemm import grouped_gemm
from jaxmoe.permute import permute
from jaxmoe.plan import Plan, plan
from jaxmoe.quantize import QuantizedArray

_MATRICES = ("gate_up_a", "gate_up_b", "down_a", "down_b")
_RANKS = 8  # what ranks are multiples of in a call


def is_call(a: Operands, layer: Layer, matrices: tuple[jax.Array, ...]) -> bool:
    """Whether one CUDA call computes the layer with these adapters, one for each expert."""
    format = layer.format
    if any(m.ndim != 3 for m in matrices) or layer.dtype != jnp.bfloat16 or format.master:
        return False
    if any(m.shape[axis] % _RANKS for m, axis in zip(matrices, (2, 1, 2, 1), strict=True)):
        return False
    if format.quantized:
        # Sums are scaled behind what is added, so that is divided by the one scale of the expert:
        # a number that has the exponents of float32.
        if not format.packed or format.weight_scales != "e" or a.w_up is not None:
            return False
    a = jax.tree.map(jax.typeof, a)
    return (
        not op.is_composed(absent=a.absent, layer=layer) and op.call_reason(a, layer=layer) is None
    )


def layer_op(a: Operands, layer: Layer, matrices: tuple[jax.Array, ...], scale: float) -> jax.Array:
    """Binds the primitive of a layer that `is_call`."""
    packed = layer.format.packed
    first, second = (with_adapters(config, packed) for config in configs_of(a, layer))
    layer = layer.replace(config=(first, second))
    narrow = (m.astype(layer.dtype) for m in matrices)
    (y,) = adapted_moe_mlp_p(*a, *narrow, layer=layer, scale=float(scale))
    return y


def composed(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    residual: jax.Array | None,
    experts: Experts,
    matrices: tuple[jax.Array, ...],
    scale: float,
    adapter_ids: jax.Array | None = None,
) -> jax.Array:
    """The layer as its ops, with adapters [E, ..], or those of `adapter_ids` [T] of [S, E, ..].

    Experts of several adapters are multiplied once: rows are in the order of experts, and of
    adapters within each.
    """
    gate_up_a, gate_up_b, down_a, down_b = matrices
    num_adapters = down_b.shape[0] if down_b.ndim == 4 else 1
    chosen = jnp.zeros(x.shape[0], jnp.int32) if adapter_ids is None else jnp.asarray(adapter_ids)
    there = (chosen >= 0) & (chosen < num_adapters)
    known = (expert_ids >= 0) & (expert_ids < experts.num_experts)
    slot = expert_ids * num_adapters + jnp.where(there, chosen, 0)[:, None]
    slot = jnp.where(known, slot, -1).astype(jnp.int32)
    order = plan(slot, experts.num_experts * num_adapters)
    of_row = None
    if adapter_ids is not None and x.shape[0]:
        of_row = there[jnp.maximum(order.row_to_token, 0)]

    def product(rows: jax.Array, w: Any, layout: str, bias: Any, a: Any, b: Any) -> jax.Array:
        of_rows = order, experts.num_experts, of_row
        return _product(rows, w, layout, bias, a, b, scale, *of_rows, experts.accum)

    first, second = experts.layouts
    rows = permute(x, order)
    if experts.gate is None:
        joined = experts.gate_up is not None
        bias = experts.gate_up_bias if joined else experts.up_bias
        z = product(rows, experts.first, first, bias, gate_up_a, gate_up_b)
    else:
        halves = jnp.split(gate_up_b, 2, axis=-1)
        arrays = ((experts.gate, experts.gate_bias), (experts.up, experts.up_bias))
        parts = [
            product(rows, w, first, bias, gate_up_a, b)
            for (w, bias), b in zip(arrays, halves, strict=True)
        ]
        z = jnp.concatenate(parts, axis=1)
    act = resolve(experts.activation)
    h = activate(z, act, experts.order).astype(x.dtype)
    if not act.fused:  # which may not be 0 at 0: rows of no expert are in no common scale
        used = jnp.arange(h.shape[0], dtype=jnp.int32) < order.expert_offsets[-1]
        h = jnp.where(used[:, None], h, jnp.zeros((), h.dtype))
    y = product(h, experts.down, second, experts.down_bias, down_a, down_b)
    return finalize(y.astype(x.dtype), order, weights, residual=residual)


def _product(
    rows: jax.Array,
    w: Any,
    layout: str,
    bias: Any,
    a: jax.Array,
    b: jax.Array,
    scale: float,
    order: Plan,
    num_experts: int,
    of_row: jax.Array | None,
    accum: str | None,
) -> jax.Array:
    """Rows times W and, apart, times A and B of their adapter: the sum, float32."""
    dtype, fine = rows.dtype, order.group_sizes
    if not isinstance(w, QuantizedArray):
        w = w.astype(dtype)
        bias = None if bias is None else bias.astype(dtype)
    sizes = fine.reshape(num_experts, -1).sum(axis=1, dtype=jnp.int32)
    frozen = grouped_gemm(rows, w, sizes, bias=bias, weight_layout=layout, accum=accum)
    if a.ndim == 4:  # groups are experts, and adapters within each
        a, b = (m.swapaxes(0, 1).reshape(-1, *m.shape[2:]) for m in (a, b))
    low = grouped_gemm(rows, a.astype(dtype), fine)
    change = grouped_gemm(low, b.astype(dtype), fine).astype(jnp.float32) * scale
    if of_row is not None:
        change = jnp.where(of_row[:, None], change, 0.0)
    return frozen.astype(jnp.float32) + change


def _experts(a: Operands, layer: Layer) -> Experts:
    """The experts that the operands of a call are of."""

    def stored(w: jax.Array, scales: jax.Array | None) -> Any:
        if scales is None:
            return w
        return QuantizedArray(w, scales, layer.format.name, "nk", np.dtype(layer.dtype))

    names = (layer.first,) if a.w_up is None else ("gate", "up")
    given: dict[str, Any] = {}
    for name, (w, scales, bias) in zip(names, halves(a, layer), strict=True):
        given |= {name: stored(w, scales), f"{name}_bias": bias}
    return Experts(
        **given,
        down=stored(a.w_down, a.down_scales),
        down_bias=a.b_down,
        activation=layer.activation,
        order=layer.gate_up,
        layout=layer.layouts,
    )


def _xla(*arrays: Any, layer: Layer, scale: float) -> tuple[jax.Array]:
    a, matrices = _parts(arrays)
    experts = _experts(a, layer)
    return (composed(a.x, a.expert_ids, a.weights, a.residual, experts, matrices, scale),)


def _parts(arrays: Any) -> tuple[Operands, tuple[Any, ...]]:
    count = len(Operands._fields)
    return Operands(*arrays[:count]), tuple(arrays[count:])


def _out(*avals: Any, layer: Layer, scale: float) -> list[_primitive.Spec]:
    del scale
    a, _ = _parts(avals)
    return [(a.x.shape, layer.dtype)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return jax.jvp(*of_moving(functools.partial(_xla, **params), primals, tangents))


def _attrs(avals: Any, *, layer: Layer, scale: float) -> dict[str, Any]:
    a, _ = _parts(avals)
    return {"layer": op.call_attrs(a, layer=layer), "scale": np.float32(scale)}


def _scratch(avals: Any, *, layer: Layer, scale: float) -> list[_primitive.Spec]:
    """Rows of the second product, those of low rank, and what the layer's call has beside them."""
    del scale
    a, matrices = _parts(avals)
    num_rows = a.expert_ids.size
    rank = max(matrices[0].shape[2], matrices[2].shape[2])
    return [
        ((num_rows, a.x.shape[1]), layer.dtype),
        ((num_rows, rank), layer.dtype),
        *op.own_scratch(a, layer=layer),
    ]


adapted_moe_mlp_p = _primitive.define(
    "jaxmoe_adapted_moe_mlp",
    operands=_primitive.named_operands((*Operands._fields, *_MATRICES)),
    out=_out,
    xla=_xla,
    batch=functools.partial(_primitive.as_its_ops, _xla),
    jvp=_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_adapted_moe_mlp_v1",
        attrs=_attrs,
        scratch=_scratch,
        operands=(
            *("x", "x_scales", "expert_ids", "weights", "w_gate_up", "gate_up_scales", "w_up"),
            *("w_down", "down_scales", "b_gate_up", "b_down", "expert_map", "residual"),
            *("x_scale", "h_scale", *_MATRICES),
        ),
        absent=op.ABSENT,
    ),
)
