"""The primitive `dequantize`: quantized weights as plain arrays, for products that need them so.

dequantize: w [E,...] and w_scales as `format` stores them -> [E,N,K] in `dtype`

They are written to memory, where a kernel of plain arrays reads them: packed ones in bf16 by a
kernel, others by XLA, which takes 20 times as long for packed ones.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._codes import Choice
from jaxmoe._formats import Format, codes
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import targets as _targets


def dequantized(values: jax.Array, scales: jax.Array, format: Format, dtype: Any) -> jax.Array:
    """Weights [W, E, N, K] of values [W, E, ...] and their scales."""
    lead = values.shape[:2]
    merged = (a.reshape(-1, *a.shape[2:]) for a in (values, scales))
    (w,) = dequantize_p(*merged, format=format, dtype=jnp.dtype(dtype))
    return w.reshape(*lead, *w.shape[1:])


def _out(values: Any, _scales: Any, *, format: Format, dtype: Any) -> list[_primitive.Spec]:
    return [(format.weight_shape(values.shape), dtype)]


def _xla(w: jax.Array, w_scales: jax.Array, *, format: Format, dtype: Any) -> tuple[jax.Array]:
    return (format.decode(w, w_scales, tokens=False).astype(dtype),)


def _fallback(avals: Any, *, format: Format, dtype: Any) -> str | None:
    if format.packed and dtype == jnp.bfloat16 and _targets.device_reason() is None:
        return None
    size = _primitive.scratch_bytes(_out(*avals, format=format, dtype=dtype))
    return f"weights are dequantized by XLA, to {size} bytes of scratch"


def _attrs(_avals: Any, *, format: Format, dtype: Any) -> dict[str, Any]:
    del dtype
    return {"format": Choice(codes()[format.name], format.name)}


dequantize_p = _primitive.define(
    "jaxmoe_dequantize",
    out=_out,
    xla=_xla,
    batch=functools.partial(_primitive.as_its_ops, _xla),
    cuda=_primitive.CudaTarget(
        "jaxmoe_dequantize_v1", attrs=_attrs, fallback=_fallback, result_is_scratch=True
    ),
)
