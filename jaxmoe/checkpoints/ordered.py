"""int4 weights whose columns a quantizer has sorted, decoded: no format has their groups.

A group of them is any g of the inputs, other ones in each expert. Sorting the inputs of an expert
would need its tokens in that order too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import elements
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.int4 import Parts, compressed_parts, gptq_parts, groups_of, set_groups


def dequantize_gptq(
    qweight: jax.Array,
    qzeros: jax.Array,
    scales: jax.Array,
    g_idx: Any = None,
    *,
    checkpoint_format: str = "gptq",
    dtype: Any = None,
) -> jax.Array:
    """Decodes GPTQ weights of 4 bits with groups of any inputs (`desc_act`).

    w[n, k] = (code[n, k] - (zero[n, g] + 1) % 16) * scale[n, g]    g = g_idx[k]

    Args:
      qweight, qzeros, scales, checkpoint_format: as in `from_gptq`, for groups of any size.
      g_idx: [K] or [E, K] integers, the group of each k; None: neighbours.
      dtype: bfloat16, float16 or float32, that of the result; that of `scales`.

    Returns:
      Plain weights [E, N, K] of layout "nk", four times the bytes of the files.

    Raises:
      TypeError, ValueError: a wrong dtype or shape, a number in `g_idx` that is no group. Traced by
        `jax.jit` these are not known, and the weights of such a k are NaN.

    Numerics: exact in float32, then rounded to `dtype` once.
    Source: https://arxiv.org/abs/2210.17323 and AutoGPTQ's files.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> words = lambda *shape: jnp.full(shape, 0x77777777, jnp.int32)
      >>> scales = jnp.ones((1, 2, 8), jnp.float16).at[:, 1].set(0.5)
      >>> w = checkpoints.dequantize_gptq(
      ...     words(1, 1, 8), words(1, 2, 1), scales, jnp.array([0, 1, 1, 0, 0, 1, 0, 1]))
      >>> w[0, 0].tolist()
      [-1.0, -0.5, -0.5, -1.0, -1.0, -0.5, -1.0, -0.5]
    """
    op = "checkpoints.dequantize_gptq"
    parts = gptq_parts(op, qweight, qzeros, scales, checkpoint_format)
    return _decoded(op, "scales", parts, g_idx, dtype)


def dequantize_int4(
    weight_packed: jax.Array,
    weight_scale: jax.Array,
    g_idx: Any = None,
    *,
    weight_zero_point: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
    """Decodes compressed-tensors' weights of 4 bits with groups of any inputs (`actorder: group`).

    w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]    g = g_idx[k]

    Args:
      weight_packed, weight_scale, weight_zero_point: as in `from_int4`, for groups of any size.
      g_idx: `weight_g_idx`, as in `dequantize_gptq`; an expert with -1 has groups of neighbours.
      dtype: bfloat16, float16 or float32, that of the result; that of `weight_scale`.

    Returns:
      Plain weights [E, N, K] of layout "nk", four times the bytes of the files.

    Raises:
      TypeError, ValueError: as `dequantize_gptq`.

    Numerics: exact in float32, then rounded to `dtype` once.
    Source: compressed-tensors' pack_quantized.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> words = jnp.full((1, 8, 1), 0x99999999 - 2**32, jnp.int32)  # all codes 9
      >>> scale = jnp.ones((1, 8, 2), jnp.bfloat16).at[..., 1].set(0.5)
      >>> w = checkpoints.dequantize_int4(words, scale, jnp.array([0, 1, 1, 0, 0, 1, 0, 1]))
      >>> w[0, 0].tolist()
      [1.0, 0.5, 0.5, 1.0, 1.0, 0.5, 1.0, 0.5]
    """
    op = "checkpoints.dequantize_int4"
    parts = compressed_parts(op, weight_packed, weight_scale, weight_zero_point)
    return _decoded(op, "weight_scale", parts, set_groups(g_idx, parts), dtype)


def _decoded(op: str, name: str, parts: Parts, g_idx: Any, dtype: Any) -> jax.Array:
    codes, scales, zeros = parts
    _checks.check_dtype(op, name, scales, _checks.FLOATS)
    dtype = scales.dtype if dtype is None else _checks.float_dtype(op, "dtype", dtype)
    (*rows, k), count = codes.shape, scales.shape[2]
    if [*rows] != [*scales.shape[:2]] or not count or (g_idx is None and k % count):
        rule = f"{name} must hold groups of K={k} of {rows} rows, of the same size without g_idx"
        raise ValueError(_checks.message(op, rule, **{name: scales}))
    if g_idx is None:
        g_idx = jnp.arange(k) // (k // count)
    else:
        _checks.check_dtype(op, "g_idx", g_idx, ("int32", "int64"))
        groups_of(op, g_idx, parts)
    groups = jnp.asarray(g_idx).astype(jnp.int32).reshape(-1, 1, k)
    there = (groups >= 0) & (groups < count)
    groups = jnp.clip(groups, 0, count - 1)
    step = jnp.take_along_axis(scales.astype(jnp.float32), groups, axis=2)
    zero: Any = 8
    if zeros is not None:
        zero = jnp.take_along_axis(zeros.astype(jnp.int32), groups, axis=2)
    w = (codes.astype(jnp.int32) - zero).astype(jnp.float32) * jnp.where(there, step, jnp.nan)
    return elements.rounded(w, dtype).astype(dtype)
