"""The primitive `dequantize`: quantized weights as plain arrays, for products that need them so.

dequantize: values [E,...] and scales as `format` stores them -> [E,N,K] in `dtype`

No kernel does this: XLA writes the weights to memory, where a kernel of plain arrays reads them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import Format
from jaxmoe._jax import primitive as _primitive


def dequantized(values: jax.Array, scales: jax.Array, format: Format, dtype: Any) -> jax.Array:
    """Weights [W, E, N, K] of values [W, E, ...] and their scales."""
    lead = values.shape[:2]
    merged = (a.reshape(-1, *a.shape[2:]) for a in (values, scales))
    (w,) = dequantize_p(*merged, format=format, dtype=jnp.dtype(dtype))
    return w.reshape(*lead, *w.shape[1:])


def _out(values: Any, _scales: Any, *, format: Format, dtype: Any) -> list[_primitive.Spec]:
    return [(format.weight_shape(values.shape), dtype)]


def _xla(values: jax.Array, scales: jax.Array, *, format: Format, dtype: Any) -> tuple[jax.Array]:
    return (format.decode(values, scales, tokens=False).astype(dtype),)


def _fallback(avals: Any, **params: Any) -> str:
    size = _primitive.scratch_bytes(_out(avals.values, avals.scales, **params))
    return f"weights are dequantized by XLA, to {size} bytes of scratch"


dequantize_p = _primitive.define(
    "jaxmoe_dequantize",
    out=_out,
    xla=_xla,
    batch=functools.partial(_primitive.as_its_ops, _xla),
    cuda=_primitive.CudaTarget("", fallback=_fallback),
)
