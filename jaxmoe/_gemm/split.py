"""Grouped products of float32 or integer factors on kernels that multiply bf16.

A float32 number is a sum of bf16 numbers, a = a0 + a1 + .., of which each has the next eight bits.
The products of parts with i + j < count are summed in float32: three for count = 2, with an error
of some 2^-16 |x| |w| each, and six for count = 3, with one of float32's own size.

Integers of eight bits are bf16 numbers. Their products are summed in float32 over so many k that no
sum is beyond 2^24, up to where float32 has every integer, and those sums in int32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import Format
from jaxmoe._gemm.precision import of_precision

BF16 = jnp.dtype(jnp.bfloat16)
# That many k, by factors of at most -128 or 255 in magnitude; int16 holds both kinds.
_EXACT_K = {"int8": 1024, "uint8": 256, "int16": 256}
_COLUMNS = 8  # rows of bf16 are multiples of 16 bytes


def is_split(x: Any, w: Any) -> bool:
    """Whether CUDA multiplies these factors in parts: they are floats, one of them float32."""
    dtypes = {jnp.dtype(a.dtype).name for a in (x, w)}
    return "float32" in dtypes and dtypes <= {"float32", "bfloat16", "float16"}


def parts(a: jax.Array, count: int) -> list[jax.Array]:
    """The bf16 parts of an array, the largest first; one if it is bf16.

    What is not finite, or not in bf16, is the first part alone.
    """
    if a.dtype == BF16:
        return [a]
    rest, found = a.astype(jnp.float32), []
    for _ in range(count):
        # NOTE: not a pair of casts, which XLA takes for nothing.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        found.append(part.astype(BF16))
        rest = jnp.where(jnp.isfinite(part), rest - part, 0.0)
    return found


def pairs(x: jax.Array, w: jax.Array, count: int) -> list[tuple[jax.Array, jax.Array]]:
    """The parts that are multiplied with each other, the smallest products first."""
    xs, ws = parts(x, count), parts(w, count)
    found = [(i, j) for i in range(len(xs)) for j in range(len(ws)) if i + j < count]
    return [(xs[i], ws[j]) for i, j in sorted(found, key=lambda ij: -sum(ij))]


def side_by_side(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, k_axis: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Factors in bf16 whose product is x @ w + bias: parts, one after the other along k.

    Zeros make k and n multiples of 8.

    Args:
      x: [B, T, K].
      w: [W, E, K, N], or [W, E, N, K].
      bias: [W, E, N], whose parts are k of their own beside ones in x, or None.
      k_axis: of w.
      count: of parts.
    """
    chosen = pairs(x, w, count)
    xs, ws = [x for x, _ in chosen], [w for _, w in chosen]
    if bias is not None:
        rows = [jnp.expand_dims(part, k_axis) for part in parts(bias, 3)]
        xs.append(jnp.ones((*x.shape[:2], len(rows)), BF16))
        ws += rows
    whole, n_axis = jnp.concatenate(ws, axis=k_axis), 5 - k_axis
    return filled(jnp.concatenate(xs, axis=2), 2), filled(filled(whole, k_axis), n_axis)


def gmm_of_parts(gmm: Callable[..., Any], x: Any, w: Any, format: Format) -> Any:
    """Returns the function that computes `gmm` of these factors in parts, or None."""
    if format.quantized or format.master:
        return None
    if jnp.dtype(x.dtype).name in _EXACT_K and x.dtype == w.dtype:
        return functools.partial(_gmm_of_integers, gmm)
    if not is_split(x, w):
        return None

    def of_parts(
        x: jax.Array,
        w: jax.Array,
        starts: jax.Array,
        sizes: jax.Array,
        bias: jax.Array | None,
        *_scales: None,
        weight_layout: str,
        out_dtype: Any,
        precision: Any,
        config: Any = None,
        **_of_this: Any,
    ) -> tuple[jax.Array]:
        k_axis, count = 2 if weight_layout == "kn" else 3, of_precision(precision)
        factors = side_by_side(x, w, bias, k_axis=k_axis, count=count)
        params: dict[str, Any] = {"weight_layout": weight_layout, "out_dtype": jnp.float32}
        (out,) = gmm(*factors, starts, sizes, config=config, **params)
        return (out[..., : w.shape[5 - k_axis]].astype(out_dtype),)

    return of_parts


def _gmm_of_integers(
    gmm: Callable[..., Any],
    x: jax.Array,
    w: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    *_none: None,
    weight_layout: str,
    out_dtype: Any,
    **_of_this: Any,
) -> tuple[jax.Array]:
    k_axis, k, step = 2 if weight_layout == "kn" else 3, x.shape[2], _EXACT_K[x.dtype.name]
    total: Any = None
    for first in range(0, max(k, 1), step):
        last = min(first + step, k)
        x_part = jax.lax.slice_in_dim(x, first, last, axis=2).astype(BF16)
        w_part = jax.lax.slice_in_dim(w, first, last, axis=k_axis).astype(BF16)
        w_part = filled(filled(w_part, k_axis), 5 - k_axis)
        (out,) = gmm(
            *(filled(x_part, 2), w_part, starts, sizes),
            weight_layout=weight_layout,
            out_dtype=jnp.dtype("float32"),
        )
        sums = out[..., : w.shape[5 - k_axis]].astype(jnp.int32)
        total = sums if total is None else total + sums
    return (total.astype(out_dtype),)


def tgmm_of_parts(tgmm: Callable[..., Any], x: Any, dy: Any) -> Any:
    """Returns the function that computes `tgmm` of these factors in parts, or None."""
    if not is_split(x, dy):
        return None

    def of_parts(
        x: jax.Array,
        dy: jax.Array,
        starts: jax.Array,
        sizes: jax.Array,
        init: jax.Array | None,
        *,
        weight_shape: tuple[int, int],
        out_dtype: Any,
        precision: Any,
    ) -> tuple[jax.Array]:
        params: dict[str, Any] = {"weight_shape": weight_shape, "precision": None}
        total = None if init is None else filled(filled(init.astype(jnp.float32), -1), -2)
        for factors in pairs(filled(x, -1), filled(dy, -1), of_precision(precision)):
            (total,) = tgmm(
                *factors, starts, sizes, total, out_dtype=jnp.dtype("float32"), **params
            )
        assert total is not None
        return (total[..., : x.shape[-1], : dy.shape[-1]].astype(out_dtype),)

    return of_parts


def filled(a: jax.Array, axis: int) -> jax.Array:
    """The array with zeros behind an axis, so that it has whole 8."""
    missing = filled_size(a.shape[axis]) - a.shape[axis]
    pad = [(0, missing if i == axis % a.ndim else 0) for i in range(a.ndim)]
    return jnp.pad(a, pad) if missing else a


def filled_size(size: int) -> int:
    """The size that such an axis then has."""
    return -(-size // _COLUMNS) * _COLUMNS
