"""What readers of int4 weights share: codes and zero points of words, the array of both."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats.parts import pack
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.known import known
from jaxmoe.quantize import QuantizedArray


class Parts(NamedTuple):
    """Codes [E, N, K], and scales and zero points [E, N, groups] of them."""

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None


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


def compressed_parts(
    op: str, weight_packed: Any, weight_scale: Any, weight_zero_point: Any
) -> Parts:
    """The parts of tensors of compressed-tensors."""
    _checks.check_rank(op, "weight_packed", weight_packed, "E,N,K/8")
    _checks.check_rank(op, "weight_scale", weight_scale, "E,N,K/g")
    codes = codes_of_words(op, "weight_packed", weight_packed)
    scales = jnp.asarray(weight_scale)
    zeros = None
    if weight_zero_point is not None:
        wanted = (codes.shape[0], codes.shape[1] // 8, scales.shape[2])
        name = "weight_zero_point"
        _checks.check_shape(op, name, weight_zero_point, wanted, "[E, N / 8, K / g]")
        zeros = zeros_of_words(op, name, jnp.swapaxes(jnp.asarray(weight_zero_point), 1, 2))
    return Parts(codes, scales, zeros)


def gptq_parts(op: str, qweight: Any, qzeros: Any, scales: Any, checkpoint_format: str) -> Parts:
    """The parts of tensors of GPTQ."""
    _checks.check_rank(op, "qweight", qweight, "E,K/8,N")
    codes = codes_of_words(op, "qweight", jnp.swapaxes(jnp.asarray(qweight), 1, 2))
    _checks.check_choice(op, "checkpoint_format", checkpoint_format, ("gptq", "gptq_v2"))
    codes, scales, zeros = with_zeros(op, codes, qzeros, scales)
    assert zeros is not None
    zeros = (zeros + jnp.uint8(checkpoint_format == "gptq")) & jnp.uint8(15)
    return Parts(codes, scales, zeros)


def with_zeros(
    op: str,
    codes: jax.Array,
    qzeros: Any,
    scales: Any,
    nibbles: tuple[int, ...] = tuple(range(8)),
) -> Parts:
    """The parts of codes, `qzeros` [E, groups, N / 8] and `scales` [E, groups, N]."""
    _checks.check_rank(op, "scales", scales, "E,K/g,N")
    wanted = (codes.shape[0], scales.shape[1], codes.shape[1] // 8)
    _checks.check_shape(op, "qzeros", qzeros, wanted, "[E, K / g, N / 8], by qweight and scales")
    zeros = zeros_of_words(op, "qzeros", qzeros, nibbles)
    return Parts(codes, jnp.swapaxes(jnp.asarray(scales), 1, 2), zeros)


def groups_of(op: str, g_idx: Any, parts: Parts) -> np.ndarray[Any, Any] | None:
    """The group of each k, [K] or [E, K], if it is known; refuses what are no groups."""
    (experts, _, k), count = parts.codes.shape, parts.scales.shape[2]
    _checks.check_array(op, "g_idx", g_idx)
    if tuple(g_idx.shape) not in ((k,), (experts, k)):
        rule = f"g_idx must be [{k}] or [{experts}, {k}] (K, or E and K)"
        raise ValueError(_checks.message(op, rule, g_idx=g_idx))
    groups = known(g_idx)
    if groups is not None and ((groups < 0) | (groups >= count)).any():
        rule = f"g_idx must hold numbers of {count} groups, those of the scales"
        raise ValueError(_checks.message(op, rule, g_idx=groups))
    return groups


def set_groups(g_idx: Any, parts: Parts) -> Any:
    """`weight_g_idx` with neighbours where an expert has -1, as compressed-tensors reads it."""
    k, count = parts.codes.shape[2], parts.scales.shape[2]
    if g_idx is None or g_idx.shape[-1:] != (k,) or not count or k % count:
        return g_idx
    numbers: Any = np if known(g_idx) is not None else jnp
    unset = (numbers.asarray(g_idx) == -1).any(axis=-1, keepdims=True)
    neighbours = np.arange(k, dtype=np.int32) // (k // count)
    return numbers.where(unset, neighbours.astype(g_idx.dtype), g_idx)


def check_order(op: str, g_idx: Any, parts: Parts) -> None:
    """Refuses groups of others than neighbours along k."""
    if g_idx is None:
        return
    groups = groups_of(op, g_idx, parts)
    if groups is None:
        rule = "g_idx must be known numbers, not traced by jax.jit"
        raise TypeError(_checks.message(op, rule, g_idx=g_idx))
    k, count = parts.codes.shape[2], parts.scales.shape[2]
    if (groups != np.arange(k) // max(k // max(count, 1), 1)).any():
        reader = op.replace("from_", "dequantize_")
        rule = f"g_idx must be k // group: jaxmoe.{reader} reads sorted columns, as plain weights"
        raise NotImplementedError(_checks.message(op, rule))


def in_dtype(scales: jax.Array, dtype: Any) -> jax.Array:
    """Scales in a dtype, NaN where they would be zero or infinite there."""
    held = scales.astype(dtype)
    lost = ((held == 0) & (scales != 0)) | (jnp.isinf(held) & jnp.isfinite(scales))
    return jnp.where(lost, jnp.nan, held)


def int4_array(
    op: str,
    of: tuple[str, Any],
    name: str,
    parts: Parts,
    dtype: Any,
    group_size: int | None = None,
) -> QuantizedArray:
    """The array of codes in the format that has their groups.

    of: the argument that codes were read from, `name` that of scales, for messages.
    group_size: what a file says of them. Where a row has one scale, only this tells a group of 64
      or 128 that is all of K from no groups.
    """
    codes, scales, zeros = parts
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
    given = (codes, in_dtype(scales, dtype), *(() if zeros is None else (zeros,)))
    suffix = "" if zeros is None else "_zp"
    return pack(f"int4_{by}{suffix}", *given, weight_layout="nk", dtype=dtype, op=op, of=of)
