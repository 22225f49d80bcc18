"""The primitive `gmm_fp8`: grouped products by quantized weights, scales applied.

x [R,K] and x_scales as the format quantizes tokens, else in `dtype` and None; w [E,N,K] and
w_scales as it quantizes weights; starts and sizes [G] int32, bias [E,N] in `dtype` or None -> [R,N]

  out[r,n] = sum over k of x[r,k] * w[e,n,k] * scales + bias[e,n],  e = g mod E
  for starts[g] <= r < starts[g] + sizes[g]; 0 for the rows of no group
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import _checks, _gmm, _gmm_sharding, _primitive
from jaxmoe._formats import Format
from jaxmoe._gmm_xla import for_each_block, with_a_block
from jaxmoe._heuristics import gmm_config


def grouped_products(
    x: jax.Array,
    x_scales: jax.Array | None,
    w: jax.Array,
    w_scales: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None,
    *,
    format: Format,
    out_dtype: Any,
) -> jax.Array:
    """Computes `gmm_fp8` in plain jnp."""
    num_rows, n = x.shape[0], w.shape[1]
    out = jnp.zeros((num_rows, n), out_dtype)
    if not out.size:
        return out
    by_row = x_scales is not None and "t" in format.scales_of(tokens=True)

    def step(out: jax.Array, first: jax.Array, mask: jax.Array, group: jax.Array) -> jax.Array:
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, first, mask.shape[0])  # noqa: E731
        weight, scale = (
            jax.lax.dynamic_index_in_dim(a, group % w.shape[0], keepdims=False)
            for a in (w, w_scales)
        )
        old = part(out)
        y = format.multiply(part(x), part(x_scales) if by_row else x_scales, weight, scale)
        if bias is not None:
            of_weight = jax.lax.dynamic_slice_in_dim(bias, group % bias.shape[0], 1)
            y += of_weight.astype(jnp.float32)
        new = jnp.where(mask[:, None], y.astype(out_dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(out, new, first, 0)

    x, out = with_a_block(x), with_a_block(out)
    if by_row:
        x_scales = with_a_block(x_scales)
    return for_each_block(num_rows, starts[None], sizes[None], step, out)[:num_rows]


def _xla(
    x: jax.Array,
    x_scales: jax.Array | None,
    w: jax.Array,
    w_scales: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None,
    *,
    format: Format,
    out_dtype: Any,
    **_params: Any,
) -> tuple[jax.Array]:
    arrays = (x, x_scales, w, w_scales, starts, sizes, bias)
    return (grouped_products(*arrays, format=format, out_dtype=out_dtype),)


def _out(x: Any, _x_scales: Any, w: Any, *_: Any, out_dtype: Any, **_params: Any) -> Any:
    return [((x.shape[0], w.shape[1]), out_dtype)]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return _primitive.one_by_one(gmm_fp8, args, dims, **params)


def refuse_derivative(op: str, format: Format, x: Any, w: Any) -> Any:
    """Raises: products in this format have no derivative."""
    raise NotImplementedError(_checks.message(op, format.gradient.refused or "", x=x, w=w))


def _jvp(primals: Any, _tangents: Any, *, format: Format, **_params: Any) -> Any:
    refuse_derivative("grouped_gemm", format, primals.x, primals.w)


def _attrs(
    avals: Any, *, format: Format, promoted: bool, out_dtype: Any, config: Any, **_params: Any
) -> Any:
    x, w, starts = avals.x, avals.w, avals.starts
    if config is None:
        config = gmm_config(
            *(x.shape[0], starts.size, x.shape[1], w.shape[1]),
            promoted=promoted,
            float_out=out_dtype == jnp.float32,
        )
    return _gmm.cuda_attrs(config, layout="nk", format=format, promoted=promoted)


def _reason(
    avals: Any, *, format: Format, dtype: Any, out_dtype: Any, **_params: Any
) -> str | None:
    op = "grouped_gemm"
    x, w = avals.x, avals.w
    reason = kernel_reason(op, format, dtype, lhs=x)
    if reason is None and out_dtype not in (dtype, jnp.float32):
        rule = (
            f"preferred_element_type={_checks.dtype_name(out_dtype)} must be "
            f"{_checks.dtype_name(dtype)} or f32 on CUDA"
        )
        reason = _checks.message(op, rule, lhs=x)
    return (
        reason
        or _gmm.count_reason(op, x.shape[0], lhs=x)
        or _gmm.row_reason(op, "rhs.values", w, 2)
        or _gmm.row_reason(op, "rhs.values", w, 1, itemsize=jnp.dtype(dtype).itemsize)
    )


def kernel_reason(op: str, format: Format, dtype: Any, **arrays: Any) -> str | None:
    """Why no kernel has this format and rounds to `dtype`, that of the one array given."""
    if format.code < 0:
        return _checks.message(op, f"{format.name} has no CUDA kernel", **arrays)
    if jnp.dtype(dtype).name in ("bfloat16", "float16"):
        return None
    (name,) = arrays
    rule = f"{name}.dtype={_checks.dtype_name(dtype)} must be bf16 or f16 on CUDA"
    return _checks.message(op, rule, **arrays)


gmm_fp8 = _primitive.define(
    "jaxmoe_gmm_fp8",
    out=_out,
    xla=_xla,
    batch=_batch,
    jvp=_jvp,
    cuda=_gmm.cuda_target(
        "row_index",
        "dtype",
        attrs=_attrs,
        scratch=lambda _avals, *, dtype, **_: _gmm.cuda_scratch(dtype),
        reason=_reason,
    ),
    rule=_gmm_sharding.quantized_rule(lambda *arrays, **params: gmm_fp8(*arrays, **params)),
)
