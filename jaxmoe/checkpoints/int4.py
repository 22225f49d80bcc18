"""What readers of int4 weights share: codes and zero points of words, the array of both."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats.parts import pack
from jaxmoe._jax import checks as _checks
from jaxmoe.quantize import QuantizedArray


def codes_of_words(
    op: str, name: str, words: Any, nibbles: tuple[int, ...] = tuple(range(8))
) -> jax.Array:
    """Codes [.., 8 n] of words [.., n]: code j of a word is in its nibble nibbles[j]."""
    _checks.check_dtype(op, name, words, ("int32",))
    bits = jax.lax.bitcast_convert_type(jnp.asarray(words), jnp.uint32)
    shifts = [jnp.uint32(4 * nibble) for nibble in nibbles]
    codes = jnp.stack([(bits >> shift) & jnp.uint32(15) for shift in shifts], axis=-1)
    return codes.astype(jnp.uint8).reshape(*bits.shape[:-1], 8 * bits.shape[-1])


def zeros_of_words(
    op: str, name: str, words: Any, nibbles: tuple[int, ...] = tuple(range(8))
) -> jax.Array:
    """Zero points [E, N, groups] of words [E, groups, N / 8]."""
    _checks.check_rank(op, name, words, "E,K/g,N/8")
    return jnp.swapaxes(codes_of_words(op, name, words, nibbles), 1, 2)


def in_dtype(scales: jax.Array, dtype: Any) -> jax.Array:
    """Scales in a dtype, NaN where they would be zero or infinite there."""
    held = scales.astype(dtype)
    lost = ((held == 0) & (scales != 0)) | (jnp.isinf(held) & jnp.isfinite(scales))
    return jnp.where(lost, jnp.nan, held)


def int4_array(
    op: str,
    of: tuple[str, Any],
    name: str,
    codes: jax.Array,
    scales: jax.Array,
    zeros: Any,
    dtype: Any,
    group_size: int | None = None,
) -> QuantizedArray:
    """The array of codes [E, N, K] in the format that has their groups.

    of: the argument that codes were read from, `name` that of scales, for messages.
    group_size: what a file says of them. Where a row has one scale, only this tells a group of 64
      or 128 that is all of K from no groups.
    """
    _checks.check_dtype(op, name, scales, ("bfloat16", "float16"))
    k, count = codes.shape[2], scales.shape[2] if scales.ndim == 3 else 0
    group = k // count if count and k % count == 0 else 0
    by = {32: "g32", 64: "g64", 128: "g128"}.get(group)
    if group == k and (by is None or group_size != k):
        by = "channel"
    if by is None or (*codes.shape[:2], count) != scales.shape:
        rule = (
            f"{name} must hold a scale for each 32, 64, 128 or all of K={k} of "
            f"{list(codes.shape[:2])} rows"
        )
        raise ValueError(_checks.message(op, rule, **{name: scales}))
    dtype = scales.dtype if dtype is None else _checks.float_dtype(op, "dtype", dtype)
    parts = (codes, in_dtype(scales, dtype), *(() if zeros is None else (zeros,)))
    suffix = "" if zeros is None else "_zp"
    return pack(f"int4_{by}{suffix}", *parts, weight_layout="nk", dtype=dtype, op=op, of=of)
