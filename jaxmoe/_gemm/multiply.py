"""The product of rows, quantized or not, as the ops it is made of."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import MASTER, PLAIN, Format, Tokens
from jaxmoe._gemm.op import Product, bias_of_rows, gmm
from jaxmoe._jax.frozen import frozen

_NO_DERIVATIVE = (
    "no derivative is defined with respect to quantized lhs; take jax.lax.stop_gradient of it, or "
    "jaxmoe.dequantize it"
)


def multiply(
    tokens: Tokens,
    w: jax.Array,
    scales: jax.Array | None,
    bias: jax.Array | None,
    starts: jax.Array,
    sizes: jax.Array,
    *,
    format: Format = PLAIN,
    **params: Any,
) -> jax.Array:
    """Multiplies rows [R, K] by weights [E, ...] of their groups, which may be float32 masters."""
    if not format.quantized:
        format = PLAIN if w.dtype == tokens.values.dtype else MASTER
    if format.token_array is not None and format.composed:
        tokens = Tokens(*(frozen(a, "grouped_gemm", "lhs", _NO_DERIVATIVE) for a in tokens))
    f = format.factors(tokens, scales, params.get("dtype", tokens.values.dtype))
    given = Product(f.tokens.values, w, starts, sizes, bias, f.tokens.scales, f.scales)
    a = Product(*(None if a is None else a[None] for a in given))
    if f.of_rows is not None:
        return scaled_by_row(a, f.of_rows[None], f.format, **params)[0]
    (out,) = gmm(*a, format=f.format, **params)
    return out[0]


def scaled_by_row(
    a: Product, of_rows: jax.Array, format: Format, *, out_dtype: Any, **params: Any
) -> jax.Array:
    """The product whose float32 sums are multiplied by [B, T] before the bias."""
    (out,) = gmm(*a._replace(bias=None), format=format, out_dtype=jnp.float32, **params)
    # Rows of no group stay 0, whatever their scale is.
    out = jnp.where(out == 0, 0.0, out * of_rows[:, :, None])
    if a.bias is not None:
        out += bias_of_rows(a.bias, a, dtype=params["dtype"], out_dtype=jnp.float32)
    return out.astype(out_dtype)
