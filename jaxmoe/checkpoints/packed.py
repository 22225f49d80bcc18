"""Packed weights in the layouts of checkpoints as quantized arrays, which kernels read.

Each reader takes the tensors of all experts, stacked on a new first axis, packs them once and
changes no number. Call it under `jax.jit`, or its temporaries live as long as Python holds them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxmoe._formats.elements import exponent_of, power_of_two
from jaxmoe._formats.parts import pack, unpack
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.fp8 import check_weights
from jaxmoe.checkpoints.int4 import (
    check_order,
    codes_of_words,
    compressed_parts,
    gptq_parts,
    int4_array,
    set_groups,
    with_zeros,
)
from jaxmoe.checkpoints.known import check_factors
from jaxmoe.quantize import QuantizedArray

_MX_GROUP = 32
_NVFP4_GROUP = 16
# AWQ has column j of eight in this nibble of a word.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def from_mxfp4(weight: jax.Array, scale: jax.Array, *, dtype: Any = "bfloat16") -> QuantizedArray:
    """Reads MXFP4 weights: w = e2m1 * 2^(scale - 127), a scale for 32 neighbours of k.

    Args:
      weight: uint8 or int8, two values a byte, the first in the low bits. [E, N, K / 2]
        (compressed-tensors' `weight_packed`, DeepSeek-V4's `weight`), or [E, N, K / 32, 16]
        (gpt-oss' `gate_up_proj_blocks` and `down_proj_blocks`).
      scale: uint8 or float8_e8m0fnu [E, N, K / 32] (`weight_scale`, `scale`, `.._scales`).
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return.

    Returns:
      An mxfp4 array [E, N, K] of layout "nk".

    Raises:
      TypeError, ValueError: a wrong dtype, or shapes that do not go together or into blocks.

    Numerics: exact. Groups 2^252 or more below the largest scale of their expert are zeros.
    Source: OCP Microscaling Formats 1.0; gpt-oss' model card.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import checkpoints
      >>> blocks = jnp.full((1, 64, 2, 16), 0x92, jnp.uint8)  # 1 and -0.5
      >>> q = checkpoints.from_mxfp4(blocks, jnp.full((1, 64, 2), 128, jnp.uint8))
      >>> q.shape, jaxmoe.dequantize(q)[0, 0, :4].tolist()
      ((1, 64, 64), [2.0, -1.0, 2.0, -1.0])
    """
    op = "checkpoints.from_mxfp4"
    _checks.check_dtype(op, "weight", weight, ("uint8", "int8"))
    weight = jnp.asarray(weight)
    if weight.ndim == 4:
        wanted = (*weight.shape[:3], _MX_GROUP // 2)
        _checks.check_shape(op, "weight", weight, wanted, "[E, N, K / 32, 16]")
        weight = weight.reshape(*weight.shape[:2], weight.shape[2] * weight.shape[3])
    codes = _nibbles(op, weight)
    _check_groups(op, "scale", scale, codes, _MX_GROUP, ("uint8", "float8_e8m0fnu"))
    of = "weight", weight
    return pack("mxfp4", codes, _bytes(scale), weight_layout="nk", dtype=dtype, op=op, of=of)


def to_mxfp4(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """The inverse of `from_mxfp4`.

    Args:
      q: mxfp4 weights.

    Returns:
      `weight` [E, N, K / 2] uint8 and `scale` [E, N, K / 32] uint8.

    Raises:
      TypeError, ValueError: no quantized array, one of another format, or a scale of an expert
        (FlashInfer's lists have them) that is no power of two, which no group's scale can hold.
        Where it is not known, traced by `jax.jit`, groups of such an expert are NaN instead.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> q = jaxmoe.quantize(jnp.ones((2, 64, 128)), "mxfp4", weight_layout="nk")
      >>> [a.shape for a in jaxmoe.checkpoints.to_mxfp4(q)]
      [(2, 64, 64), (2, 64, 4)]
    """
    op = "checkpoints.to_mxfp4"
    check_weights(op, "q", q, ("mxfp4",))
    codes, scale = unpack(q)
    power = (power_of_two(exponent_of(q.scales)) == q.scales) & (q.scales > 0)
    power &= jnp.isfinite(q.scales)
    if not isinstance(power, Tracer) and not power.all():
        expert = int(jnp.argmin(power))
        rule = f"q.scales[{expert}]={float(q.scales[expert])} must be a power of two"
        raise ValueError(_checks.message(op, rule, q=q))
    scale = jnp.where(power[:, None, None], scale, jnp.uint8(255))
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


def from_mxfp8(weight: jax.Array, scale: jax.Array, *, dtype: Any = "bfloat16") -> QuantizedArray:
    """Reads MXFP8 weights: w = e4m3 * 2^(scale - 127), a scale for 32 neighbours of k.

    Args:
      weight: float8_e4m3fn [E, N, K].
      scale: uint8 or float8_e8m0fnu [E, N, K / 32] (`weight_scale`).
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return.

    Returns:
      An mxfp8 array [E, N, K] of layout "nk".

    Raises:
      TypeError, ValueError: a wrong dtype, or shapes that do not go together or into blocks.

    Numerics: as `from_mxfp4`. A NaN of e4m3, which no quantizer makes, is 480 to kernels.
    Source: OCP Microscaling Formats 1.0.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> weight = jnp.full((1, 64, 64), 1.5, jnp.float8_e4m3fn)
      >>> q = jaxmoe.checkpoints.from_mxfp8(weight, jnp.full((1, 64, 2), 128, jnp.uint8))
      >>> q.format, float(jaxmoe.dequantize(q)[0, 0, 0])
      ('mxfp8', 3.0)
    """
    op = "checkpoints.from_mxfp8"
    _checks.check_rank(op, "weight", weight, "E,N,K")
    _checks.check_dtype(op, "weight", weight, ("float8_e4m3fn",))
    codes = _bytes(weight)
    _check_groups(op, "scale", scale, codes, _MX_GROUP, ("uint8", "float8_e8m0fnu"))
    of = "weight", weight
    return pack("mxfp8", codes, _bytes(scale), weight_layout="nk", dtype=dtype, op=op, of=of)


def from_nvfp4(
    weight: jax.Array,
    weight_scale: jax.Array,
    *,
    weight_scale_2: jax.Array | None = None,
    weight_global_scale: jax.Array | None = None,
    dtype: Any = "bfloat16",
) -> QuantizedArray:
    """Reads NVFP4 weights: w = e2m1 * weight_scale * global, a scale for 16 neighbours of k.

    Args:
      weight: uint8 [E, N, K / 2], two values a byte, the first in the low bits (ModelOpt's
        `weight`, compressed-tensors' `weight_packed`).
      weight_scale: float8_e4m3fn [E, N, K / 16].
      weight_scale_2: float32 [E] or [E, 1], ModelOpt's multiplier.
      weight_global_scale: float32 [E] or [E, 1], compressed-tensors' divisor, in its place.
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return.

    Returns:
      An nvfp4 array [E, N, K] of layout "nk".

    Raises:
      TypeError, ValueError: a wrong dtype or shape, not one of the two global scales, or one that
        is not positive and finite (outside [2^-126, 2^126]). Traced by `jax.jit` its numbers are
        not known, and nothing checks them: `jaxmoe.load` does.

    Numerics: exact; a divisor is turned into a multiplier with one float32 rounding.
    Source: compressed-tensors' nvfp4-pack-quantized; NVIDIA ModelOpt.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import checkpoints
      >>> weight, scale = jnp.full((1, 64, 32), 0x22, jnp.uint8), jnp.ones((1, 64, 4))
      >>> q = checkpoints.from_nvfp4(
      ...     weight, scale.astype(jnp.float8_e4m3fn), weight_global_scale=jnp.array([4.0]))
      >>> float(jaxmoe.dequantize(q)[0, 0, 0])
      0.25
    """
    op = "checkpoints.from_nvfp4"
    _checks.check_dtype(op, "weight", weight, ("uint8",))
    codes = _nibbles(op, jnp.asarray(weight))
    _check_groups(op, "weight_scale", weight_scale, codes, _NVFP4_GROUP, ("float8_e4m3fn",))
    given = {"weight_scale_2": weight_scale_2, "weight_global_scale": weight_global_scale}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        rule = "weight_scale_2 or weight_global_scale must be given, one of them"
        raise ValueError(_checks.message(op, rule, **given))
    (name,) = names
    scale: Any = given[name]
    _checks.check_dtype(op, name, scale, ("float32",))
    if tuple(scale.shape) not in ((codes.shape[0],), (codes.shape[0], 1)):
        rule = f"{name}.shape={list(scale.shape)} must be [{codes.shape[0]}] (num_experts)"
        raise ValueError(_checks.message(op, rule, **{name: scale}))
    check_factors(op, name, scale)
    scale = jnp.asarray(scale).reshape(-1)
    scale = scale if name == "weight_scale_2" else 1 / scale
    parts = codes, jnp.asarray(weight_scale), scale
    of = "weight", weight
    return pack("nvfp4", *parts, weight_layout="nk", dtype=dtype, op=op, of=of)


def from_int4(
    weight_packed: jax.Array,
    weight_scale: jax.Array,
    g_idx: Any = None,
    *,
    weight_zero_point: jax.Array | None = None,
    group_size: int | None = None,
    dtype: Any = None,
) -> QuantizedArray:
    """Reads compressed-tensors' `pack-quantized` weights of 4 bits: w = (code - zero) * scale.

    Args:
      weight_packed: int32 [E, N, K / 8], eight codes a word, the first in the lowest bits.
      weight_scale: bfloat16 or float16 [E, N, K / g] with g of 32, 64, 128 or K.
      g_idx: `weight_g_idx`, as in `from_gptq`; an expert that has -1 has groups of neighbours.
      weight_zero_point: int32 [E, N / 8, K / g], eight zero points along n a word; None: all are 8.
      group_size: g, which the configuration of the files has. A row with one scale is int4_channel,
        or a group of K if this is K.
      dtype: bfloat16 or float16, that of the array and of its scales; that of `weight_scale`.

    Returns:
      An int4_g32, int4_g64, int4_g128 or int4_channel array [E, N, K] of layout "nk", or one of
      int4_g32_zp and so on.

    Raises:
      TypeError, ValueError: a wrong dtype or shape, or groups that no format has.
      NotImplementedError: `g_idx` of weights whose columns were sorted (`actorder: group`), which
        `dequantize_int4` reads.

    Numerics: codes and scales keep their bits, unless `dtype` is another than the scales', which
      are rounded to it, before the product is; one that would be zero or infinite there is NaN.
    Source: compressed-tensors' pack_quantized (Kimi-K2-Thinking, K2.5), which stores signed codes
      and zero points, both with 8 added.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import checkpoints
      >>> words = jnp.full((1, 64, 8), 0x99999999 - 2**32, jnp.int32)  # all codes 9
      >>> q = checkpoints.from_int4(words, jnp.full((1, 64, 2), 0.5, jnp.bfloat16))
      >>> q.format, float(jaxmoe.dequantize(q)[0, 0, 0])
      ('int4_g32', 0.5)
    """
    op = "checkpoints.from_int4"
    parts = compressed_parts(op, weight_packed, weight_scale, weight_zero_point)
    check_order(op, set_groups(g_idx, parts), parts)
    return int4_array(
        op, ("weight_packed", weight_packed), "weight_scale", parts, dtype, group_size
    )


def from_gptq(
    qweight: jax.Array,
    qzeros: jax.Array,
    scales: jax.Array,
    g_idx: Any = None,
    *,
    checkpoint_format: str = "gptq",
    group_size: int | None = None,
    dtype: Any = None,
) -> QuantizedArray:
    """Reads GPTQ weights of 4 bits: w = (code - (zero + 1) % 16) * scale.

    Args:
      qweight: int32 [E, K / 8, N], eight codes along k a word, the first in the lowest bits.
      qzeros: int32 [E, K / g, N / 8], eight zero points along n a word, each less 1 in 4 bits.
      scales: float16 or bfloat16 [E, K / g, N] with g of 32, 64, 128 or K.
      g_idx: [K] or [E, K], the group of each k; known numbers. Only groups of neighbours.
      checkpoint_format: "gptq", or "gptq_v2": zero points as they are, w = (code - zero) * scale.
      group_size: as in `from_int4`.
      dtype: bfloat16 or float16, that of the array and of its scales; that of `scales`.

    Returns:
      An array in int4_g32_zp, int4_g64_zp, int4_g128_zp or int4_channel_zp, [E, N, K] of layout
      "nk".

    Raises:
      TypeError, ValueError: a wrong dtype or shape, or groups that no format has.
      NotImplementedError: `g_idx` of weights whose columns were sorted (`desc_act`), which
        `dequantize_gptq` reads.

    Numerics: as `from_int4`.
    Source: https://arxiv.org/abs/2210.17323 and AutoGPTQ's files (format "gptq").

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import checkpoints
      >>> words = lambda *shape: jnp.full(shape, 0x77777777, jnp.int32)
      >>> q = checkpoints.from_gptq(
      ...     words(1, 8, 64), words(1, 1, 8), jnp.ones((1, 1, 64), jnp.float16), group_size=64)
      >>> q.format, float(jaxmoe.dequantize(q)[0, 0, 0])
      ('int4_g64_zp', -1.0)
    """
    op = "checkpoints.from_gptq"
    parts = gptq_parts(op, qweight, qzeros, scales, checkpoint_format)
    check_order(op, g_idx, parts)
    return int4_array(op, ("qweight", qweight), "scales", parts, dtype, group_size)


def from_awq(
    qweight: jax.Array,
    qzeros: jax.Array,
    scales: jax.Array,
    *,
    group_size: int | None = None,
    dtype: Any = None,
) -> QuantizedArray:
    """Reads AWQ weights of 4 bits: w = (code - zero) * scale.

    Args:
      qweight: int32 [E, K, N / 8], eight codes along n a word; from the lowest bits on columns 0,
        2, 4, 6, 1, 3, 5, 7.
      qzeros: int32 [E, K / g, N / 8], in the same order.
      scales: float16 or bfloat16 [E, K / g, N] with g of 32, 64, 128 or K.
      group_size: as in `from_int4`.
      dtype: bfloat16 or float16, that of the array and of its scales; that of `scales`.

    Returns:
      An array in int4_g32_zp, int4_g64_zp, int4_g128_zp or int4_channel_zp, [E, N, K] of layout
      "nk".

    Raises:
      TypeError, ValueError: a wrong dtype or shape, or groups that no format has.

    Numerics: as `from_int4`.
    Source: https://arxiv.org/abs/2306.00978 and AutoAWQ's files (version "gemm").

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import checkpoints
      >>> q = checkpoints.from_awq(
      ...     jnp.full((1, 64, 8), 0x33333333, jnp.int32), jnp.zeros((1, 1, 8), jnp.int32),
      ...     jnp.ones((1, 1, 64), jnp.float16))
      >>> float(jaxmoe.dequantize(q)[0, 0, 0])
      3.0
    """
    op = "checkpoints.from_awq"
    _checks.check_rank(op, "qweight", qweight, "E,K,N/8")
    codes = jnp.swapaxes(codes_of_words(op, "qweight", qweight, _AWQ_NIBBLES), 1, 2)
    parts = with_zeros(op, codes, qzeros, scales, _AWQ_NIBBLES)
    return int4_array(op, ("qweight", qweight), "scales", parts, dtype, group_size)


def _nibbles(op: str, weight: jax.Array) -> jax.Array:
    """Codes [E, N, K] of bytes [E, N, K / 2], the first in the low bits."""
    _checks.check_rank(op, "weight", weight, "E,N,K/2")
    data = _bytes(weight)
    pairs = jnp.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:2], 2 * data.shape[2])


def _bytes(a: Any) -> jax.Array:
    a = jnp.asarray(a)
    return a if a.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(a, jnp.uint8)


def _check_groups(
    op: str, name: str, scale: Any, codes: jax.Array, group: int, dtypes: tuple[str, ...]
) -> None:
    _checks.check_dtype(op, name, scale, dtypes)
    wanted = (*codes.shape[:2], codes.shape[2] // group)
    _checks.check_shape(op, name, scale, wanted, f"a scale for {group} of K={codes.shape[2]}")
