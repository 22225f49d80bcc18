"""The primitives of the expert layer with FP8 weights: one CUDA call each, or the stages of it.

moe_mlp_fp8_p: x [T,H] in D, or [T,H] float8_e4m3fn with x_scales f32 (else [0]), expert_ids [T,K]
int32, weights [T,K] f32, w_gate_up [E,N,H] and its scales, w_down [E,H,I] and its scales, b_gate_up
[E,N] or [0,0], b_down [E,H] or [0,0], expert_map [num_experts] int32 or [0], residual [T,H] or
[0,0], x_scale f32 [1] or [0], intermediate_scale f32 [1] or [E] or [0] -> y [T,H] in D

moe_mlp_fp8_rows_p: the same without finalize, so without weights and residual -> rows [R,H] in D,
in expert order, exactly 0 where no slot has them, slot_to_row [T,K] int32

D is the dtype of the biases, also of those that are absent. E local experts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import _fp8_sharding, _gmm, _primitive
from jaxmoe._fp8_sharding import without_finalize
from jaxmoe._gmm_fp8 import dtype_reason, gmm_fp8, grouped_products, refuse_derivative
from jaxmoe._heuristics import NOT_PROMOTED, GemmConfig, mlp_configs, mlp_index_size, odd_blocks
from jaxmoe._mlp import merge, unfold_rows
from jaxmoe.activation import GATE_UP_ORDERS, Activation, split_gate_up
from jaxmoe.finalize import finalize, no_residual
from jaxmoe.plan import Plan, plan
from jaxmoe.quantize import BLOCK, FORMATS, quantize_tokens

_OP = "moe_mlp"
_FP8 = jnp.float8_e4m3fn  # of tokens and of the intermediate; weights may be float8_e5m2
_MAX_PARTIALS = 1024  # maxima of parts of an array, from which its one scale is made


def no_scale() -> jax.Array:
    """Returns the empty array that stands for "no scale"."""
    return jnp.zeros((0,), jnp.float32)


def _row_stages(
    x: jax.Array,
    x_scales: jax.Array,
    expert_ids: jax.Array,
    w_gate_up: jax.Array,
    gate_up_scales: jax.Array,
    w_down: jax.Array,
    down_scales: jax.Array,
    b_gate_up: jax.Array,
    b_down: jax.Array,
    expert_map: jax.Array,
    x_scale: jax.Array,
    intermediate_scale: jax.Array,
    *,
    format: str,
    activation: Activation,
    gate_up: str,
    num_experts: int,
    num_local_experts: int,
    expert_offset: int,
    **_params: Any,
) -> tuple[jax.Array, Plan]:
    """The layer up to finalize."""
    order = plan(
        expert_ids,
        num_experts,
        expert_offset=expert_offset,
        num_local_experts=num_local_experts,
        expert_map=expert_map if expert_map.size else None,
    )
    starts, sizes, dtype = order.expert_offsets[:-1], order.group_sizes, b_down.dtype
    if x.dtype != _FP8:
        q = quantize_tokens(x, format, scale=x_scale.reshape(()) if x_scale.size else None)
        x, x_scales = q.values, q.scales
    token = jnp.maximum(order.row_to_token, 0)  # rows of no group are in no product
    z = grouped_products(
        x[token],
        x_scales[token] if x_scales.ndim else x_scales,
        w_gate_up,
        gate_up_scales,
        starts,
        sizes,
        b_gate_up,
        format=format,
        out_dtype=jnp.float32,
    )
    h = activation(*split_gate_up(z, gate_up)) if activation.gated else activation(z)
    h = h.astype(dtype)
    if intermediate_scale.size:
        of_expert = jnp.broadcast_to(intermediate_scale, (num_local_experts,))
        of_row = jnp.repeat(of_expert, sizes, total_repeat_length=h.shape[0])
        h = quantize_tokens(h, "fp8_channel", scale=of_row)  # a scale for each row
    else:
        # z is 0 in rows of no group, and so is every activation of it: they are no maximum.
        h = quantize_tokens(h, format)
    rows = grouped_products(
        h.values,
        h.scales,
        w_down,
        down_scales,
        starts,
        sizes,
        b_down,
        format=format,
        out_dtype=dtype,
    )
    return rows, order


def _row_parts(
    x: jax.Array,
    x_scales: jax.Array,
    expert_ids: jax.Array,
    w_gate_up: jax.Array,
    gate_up_scales: jax.Array,
    w_down: jax.Array,
    down_scales: jax.Array,
    b_gate_up: jax.Array,
    b_down: jax.Array,
    expert_map: jax.Array,
    intermediate_scale: jax.Array,
    *,
    between: Callable[[jax.Array], jax.Array],
    after: Callable[[jax.Array], jax.Array],
    quantized: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    own: Callable[[jax.Array], jax.Array] = jnp.asarray,
    format: str,
    activation: Activation,
    gate_up: str,
    num_experts: int,
    num_local_experts: int,
    expert_offset: int,
    promoted: tuple[bool, bool],
    config: Any,
) -> tuple[jax.Array, Plan]:
    """The layer up to finalize in parts, x quantized, for devices that share its activations.

    `between` is applied to the first product; `quantized` to the activations, or `after` before
    they are quantized with a static scale. `own` takes from [E] the groups of the experts whose
    weights are here, if those are not all.
    """
    order = plan(
        expert_ids,
        num_experts,
        expert_offset=expert_offset,
        num_local_experts=num_local_experts,
        expert_map=expert_map if expert_map.size else None,
    )
    first, second = config or (None, None)
    if first is not None and first.tile in NOT_PROMOTED and not promoted[0]:
        # No kernel of that tile has the float32 output that the parts add up.
        first = GemmConfig(256, 128, raster=first.raster)
    groups, dtype = (own(order.expert_offsets[:-1]), own(order.group_sizes)), b_down.dtype
    token = jnp.maximum(order.row_to_token, 0)  # rows of no group are in no product
    x_scales = x_scales[token] if x_scales.ndim else x_scales
    arrays = (x[token], x_scales, w_gate_up, gate_up_scales, *groups, b_gate_up)
    (z,) = gmm_fp8(
        *arrays, format=format, out_dtype=jnp.dtype("float32"), promoted=promoted[0], config=first
    )
    z = between(z)
    h = activation(*split_gate_up(z, gate_up)) if activation.gated else activation(z)
    h = h.astype(dtype)
    if intermediate_scale.size:
        of_expert = jnp.broadcast_to(intermediate_scale, (num_local_experts,))
        of_row = jnp.repeat(of_expert, order.group_sizes, total_repeat_length=h.shape[0])
        q = quantize_tokens(after(h), "fp8_channel", scale=of_row)  # a scale for each row
        values, scales, format = q.values, q.scales, "fp8_channel"
        down_scales = jnp.broadcast_to(down_scales[:, None], w_down.shape[:2])
    else:
        values, scales = quantized(h)
    arrays = (values, scales, w_down, down_scales, *groups, b_down)
    (rows,) = gmm_fp8(
        *arrays, format=format, out_dtype=jnp.dtype(dtype), promoted=promoted[1], config=second
    )
    return rows, order


def _finish(rows: jax.Array, order: Plan, weights: jax.Array, residual: jax.Array) -> jax.Array:
    return finalize(rows, order, weights, residual=residual if residual.size else None)


def _stages(*arrays: jax.Array, **params: Any) -> tuple[jax.Array]:
    rows, order = _row_stages(*without_finalize(arrays), **params)
    return (_finish(rows, order, arrays[3], arrays[11]),)


def _rows_xla(*arrays: jax.Array, **params: Any) -> tuple[jax.Array, jax.Array]:
    rows, order = _row_stages(*arrays, **params)
    return rows, order.slot_to_row


def _in_parts(*arrays: jax.Array, **params: Any) -> jax.Array:
    """Of the arguments of the layer but x_scale, x being quantized."""
    rows, order = _row_parts(*without_finalize(arrays), **params)
    return _finish(rows, order, arrays[3], arrays[11])


def _rows_in_parts(*arrays: jax.Array, **params: Any) -> tuple[jax.Array, jax.Array]:
    rows, order = _row_parts(*arrays, **params)
    return rows, order.slot_to_row


def _out(*avals: Any, **_params: Any) -> list[_primitive.Spec]:
    return [(avals[0].shape, avals[9].dtype)]


def _rows_out(*avals: Any, **_params: Any) -> list[_primitive.Spec]:
    x, ids, b_down = avals[0], avals[2], avals[8]
    return [((ids.size, x.shape[1]), b_down.dtype), (ids.shape, jnp.int32)]


def _jvp(primals: Any, _tangents: Any, **_params: Any) -> Any:
    refuse_derivative(_OP, primals[0], primals[4])


def _rows_jvp(primals: Any, _tangents: Any, **_params: Any) -> Any:
    refuse_derivative(_OP, primals[0], primals[3])


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    size = _primitive.batch_size(args, dims)
    folded = _fold(without_finalize(args), without_finalize(dims), size, params)
    if folded is None:
        return _primitive.one_by_one(moe_mlp_fp8_p, args, dims, **params)
    weights, residual = merge(args[3], dims[3], size), args[11]
    residual = merge(residual, dims[11], size) if residual.size else no_residual(residual.dtype)
    arrays = _fp8_sharding.with_finalize(folded, weights, residual)
    (y,) = moe_mlp_fp8_p(*arrays, **params)
    return (y.reshape(size, y.shape[0] // size, y.shape[1]),), (0,)


def _rows_batch(args: Any, dims: Any, **params: Any) -> Any:
    size = _primitive.batch_size(args, dims)
    folded = _fold(args, dims, size, params)
    if folded is None:
        return _primitive.one_by_one(moe_mlp_fp8_rows_p, args, dims, **params)
    rows, slot_to_row = moe_mlp_fp8_rows_p(*folded, **params)
    return unfold_rows(rows, slot_to_row, size), (0, 0)


def _fold(args: Any, dims: Any, size: int, params: dict[str, Any]) -> list[jax.Array] | None:
    """Makes one layer of a batch: arguments of `moe_mlp_fp8_rows_p`.

    None where that copied weights, or where a scale is made of all the tokens of an example.
    """
    x, x_scale, intermediate_scale = args[0], args[10], args[11]
    per_token, own_scale = {0, 2}, False  # x and expert_ids; scales of x where tokens have theirs
    if params["format"] == "fp8_tensor":
        own_scale = not intermediate_scale.size or (x.dtype != _FP8 and not x_scale.size)
    else:
        per_token = per_token | {1}
    batched = {i for i, d in enumerate(dims) if d is not None and args[i].size}
    if own_scale or batched - per_token or not x.size:
        return None

    def fold(i: int, a: jax.Array) -> jax.Array:
        if not a.size:
            return a if dims[i] is None else jnp.zeros_like(jnp.moveaxis(a, dims[i], 0)[0])
        return merge(a, dims[i], size) if i in per_token else a

    return [fold(i, a) for i, a in enumerate(args)]


def _configs(avals: Any, params: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the tiles of the two products: the ones asked for, else chosen from the shapes."""
    x, expert_ids, w_down = avals[0], avals[2], avals[5]
    chosen = mlp_configs(
        num_rows=expert_ids.size,
        num_experts=params["num_experts"],
        num_local_experts=params["num_local_experts"],
        hidden=x.shape[1],
        intermediate=w_down.shape[2],
        gated=params["activation"].gated,
        promoted=params["promoted"],
        odd_blocks=odd_blocks(
            params["format"], params["activation"].gated, params["gate_up"], w_down.shape[2]
        ),
    )
    first, second = params["config"] or (None, None)
    return first or chosen[0], second or chosen[1]


def _rows_attrs(avals: Any, **params: Any) -> dict[str, Any]:
    activation = params["activation"]
    first, second = _configs(avals, params)
    return {
        "num_experts": params["num_experts"],
        "num_local_experts": params["num_local_experts"],
        "expert_offset": params["expert_offset"],
        "gate_up": GATE_UP_ORDERS.index(params["gate_up"]),
        "format": FORMATS.index(params["format"]),
        "promoted1": int(params["promoted"][0]),
        "promoted2": int(params["promoted"][1]),
        "activation": {"gated": int(activation.gated), **activation.kernel_params()},
        "gemm1": first.attrs(),
        "gemm2": {**second.attrs(), "gather": 0},
    }


def _rows_scratch(avals: Any, **params: Any) -> list[_primitive.Spec]:
    x, expert_ids, w_down, dtype = avals[0], avals[2], avals[5], avals[8].dtype
    (num_tokens, hidden), intermediate = x.shape, w_down.shape[2]
    num_rows, format = expert_ids.size, params["format"]
    quantized_rows = num_rows
    if _configs(avals, params)[0].gather:
        quantized_rows = 0 if x.dtype == _FP8 else num_tokens
    floats = _scales(format, num_tokens, hidden) + _scales(format, num_rows, intermediate)
    return [
        ((num_rows, intermediate), dtype),
        ((quantized_rows, hidden), _FP8),
        ((num_rows, intermediate), _FP8),
        ((floats + _MAX_PARTIALS,), jnp.float32),
        ((mlp_index_size(num_rows, params["num_local_experts"]),), jnp.int32),
    ]


def _scales(format: str, num_rows: int, k: int) -> int:
    """Scales of [num_rows, k] tokens, padded to 16 bytes."""
    if format == "fp8_tensor":
        count = 1
    else:
        count = num_rows * (-(-k // BLOCK) if format == "fp8_block" else 1)
    return -(-count // 4) * 4


def _rows_reason(avals: Any, **_params: Any) -> str | None:
    x, expert_ids, w_gate_up, w_down, b_down = (avals[i] for i in (0, 2, 3, 5, 8))
    return (
        dtype_reason(_OP, b_down.dtype, x=x)
        or _gmm.count_reason(_OP, expert_ids.size, expert_ids=expert_ids)
        or _gmm.row_reason(_OP, "w_gate_up.values", w_gate_up, 2)
        or _gmm.row_reason(_OP, "w_down.values", w_down, 2)
    )


def _attrs(avals: Any, **params: Any) -> dict[str, Any]:
    return _rows_attrs(without_finalize(avals), **params)


def _scratch(avals: Any, **params: Any) -> list[_primitive.Spec]:
    avals = without_finalize(avals)
    return [_rows_out(*avals)[0], *_rows_scratch(avals, **params)]


def _reason(avals: Any, **params: Any) -> str | None:
    return _rows_reason(without_finalize(avals), **params)


moe_mlp_fp8_p = _primitive.define(
    "jaxmoe_moe_mlp_fp8",
    out=_out,
    xla=_stages,
    batch=_batch,
    jvp=_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_moe_mlp_fp8_v1", attrs=_attrs, scratch=_scratch, reason=_reason
    ),
    rule=_fp8_sharding.layer_rule(
        lambda *arrays, **params: moe_mlp_fp8_p(*arrays, **params), _in_parts
    ),
)

moe_mlp_fp8_rows_p = _primitive.define(
    "jaxmoe_moe_mlp_fp8_rows",
    out=_rows_out,
    xla=_rows_xla,
    batch=_rows_batch,
    jvp=_rows_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_moe_mlp_fp8_rows_v1", attrs=_rows_attrs, scratch=_rows_scratch, reason=_rows_reason
    ),
    rule=_fp8_sharding.rows_rule(_rows_in_parts),
)
