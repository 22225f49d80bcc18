"""Grouped products of float32 factors in TF32, whose kernels take weights [E, N, K] alone.

wgmma multiplies TF32 where both factors lie along k. Weights [E, K, N] would have to be transposed
first, so they are multiplied in bf16 parts, which is more exact: see split.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import Format
from jaxmoe._gemm.precision import is_tf32
from jaxmoe._gemm.split import filled, filled_size

_F32 = jnp.dtype(jnp.float32)


def multiplies(a: Any, *, format: Format, weight_layout: str, precision: Any, **_: Any) -> bool:
    """Whether CUDA multiplies the factors of a `Product` in TF32."""
    plain = not (format.quantized or format.master)
    both = a.x.dtype == a.w.dtype == _F32
    return plain and both and weight_layout == "nk" and is_tf32(precision)


def gmm_of_whole_rows(
    gmm: Callable[..., Any], a: Any, out_dtype: Any
) -> Callable[..., tuple[jax.Array]] | None:
    """Returns the function that fills rows up to what the kernels move, None if they are whole."""
    n, k = a.w.shape[2:]
    if out_dtype == _F32 and filled_size(n) == n and filled_size(k) == k:
        return None

    def of_whole_rows(
        x: jax.Array,
        w: jax.Array,
        starts: jax.Array,
        sizes: jax.Array,
        bias: jax.Array | None,
        *_scales: None,
        out_dtype: Any,
        **params: Any,
    ) -> tuple[jax.Array]:
        bias = None if bias is None else filled(bias, 2)
        factors = filled(x, 2), filled(filled(w, 3), 2)
        (out,) = gmm(*factors, starts, sizes, bias, out_dtype=_F32, **params)
        return (out[..., :n].astype(out_dtype),)

    return of_whole_rows
