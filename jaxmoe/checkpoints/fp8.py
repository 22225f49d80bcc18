"""FP8 weights of checkpoints and other libraries as quantized arrays or experts, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats.quantization import BLOCK
from jaxmoe._jax import checks as _checks
from jaxmoe.quantize import QuantizedArray, check_quantized, check_scales

_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


def from_block(
    weight: jax.Array, weight_scale_inv: jax.Array, *, dtype: Any = "bfloat16"
) -> QuantizedArray:
    """Reads DeepSeek's FP8 blocks of 128 by 128, as Hugging Face stores them.

    w = weight * weight_scale_inv, each scale spread over its block; the "inv" in its name says that
    it is a dequantization multiplier already.

    Args:
      weight: [E, N, K] float8_e4m3fn, the `weight` of each expert stacked.
      weight_scale_inv: [E, ceil(N / 128), ceil(K / 128)] float32, bfloat16, float16 or
        float8_e8m0fnu, or the bytes of the last as uint8, stacked likewise.
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return.

    Returns:
      `QuantizedArray` fp8_block with layout "nk". No number changes.

    Raises:
      TypeError, ValueError: a wrong dtype or shape.

    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> weight = jnp.ones((2, 192, 256), jnp.float8_e4m3fn)
      >>> checkpoints.from_block(weight, jnp.full((2, 2, 2), 0.5)).shape
      (2, 192, 256)
    """
    op = "checkpoints.from_block"
    if getattr(weight_scale_inv, "dtype", None) == jnp.uint8:
        weight_scale_inv = jax.lax.bitcast_convert_type(weight_scale_inv, jnp.float8_e8m0fnu)
    scales = ("weight_scale_inv", weight_scale_inv)
    return weights_of(op, "weight", weight, *scales, "fp8_block", dtype)


def to_block(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Returns what `from_block` takes: weight [E, N, K] and weight_scale_inv, float32.

    Args:
      q: fp8_block weights; those with layout "kn" come out as [E, N, K] too.

    Returns:
      (weight, weight_scale_inv).

    Raises:
      TypeError, ValueError: `q` is something else.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> q = jaxmoe.quantize(jnp.ones((2, 256, 192)), "fp8_block", weight_layout="kn")
      >>> [a.shape for a in jaxmoe.checkpoints.to_block(q)]
      [(2, 192, 256), (2, 2, 2)]
    """
    check_weights("checkpoints.to_block", "q", q, ("fp8_block",))
    return q.values, q.scales


def from_compressed_tensors(
    weight: jax.Array, weight_scale: jax.Array, *, dtype: Any = "bfloat16"
) -> QuantizedArray:
    """Reads FP8 weights of compressed-tensors, per channel or per tensor.

    w = weight * weight_scale

    Args:
      weight: [E, N, K] float8_e4m3fn, the `weight` of each expert stacked.
      weight_scale: float32, bfloat16 or float16; [E, N, 1] per channel, [E, 1] or [E] per tensor.
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return.

    Returns:
      `QuantizedArray` fp8_channel or fp8_tensor with layout "nk". No number changes.

    Raises:
      TypeError, ValueError: a wrong dtype or shape.

    Source: https://github.com/vllm-project/compressed-tensors.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> weight = jnp.ones((2, 3, 4), jnp.float8_e4m3fn)
      >>> checkpoints.from_compressed_tensors(weight, jnp.ones((2, 3, 1), jnp.bfloat16)).format
      'fp8_channel'
    """
    op = "checkpoints.from_compressed_tensors"
    _checks.check_rank(op, "weight", weight, "E,N,K")
    _checks.check_array(op, "weight_scale", weight_scale)
    num_experts, n, _ = weight.shape
    if weight_scale.shape == (num_experts, n, 1):
        format = "fp8_channel"
    elif weight_scale.shape in ((num_experts, 1), (num_experts,)):
        format = "fp8_tensor"
    else:
        rule = (
            f"weight_scale.shape=[{','.join(map(str, weight_scale.shape))}] must be "
            f"[{num_experts},{n},1] (per channel) or [{num_experts},1] or [{num_experts}] "
            "(per tensor)"
        )
        raise ValueError(_checks.message(op, rule, weight=weight, weight_scale=weight_scale))
    scales = weight_scale.reshape(weight.shape[: 2 if format == "fp8_channel" else 1])
    return weights_of(op, "weight", weight, "weight_scale", scales, format, dtype)


def to_compressed_tensors(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Returns what `from_compressed_tensors` takes: weight and weight_scale, float32.

    Args:
      q: fp8_channel or fp8_tensor weights.

    Returns:
      weight [E, N, K] and weight_scale, [E, N, 1] or [E, 1].

    Raises:
      TypeError, ValueError: `q` is something else.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> q = jaxmoe.quantize(jnp.ones((2, 4, 3)), "fp8_channel", weight_layout="kn")
      >>> [a.shape for a in jaxmoe.checkpoints.to_compressed_tensors(q)]
      [(2, 3, 4), (2, 3, 1)]
    """
    check_weights("checkpoints.to_compressed_tensors", "q", q, ("fp8_channel", "fp8_tensor"))
    return q.values, q.scales[..., None]


def weights_of(
    op: str, name: str, values: Any, scale_name: str, scales: Any, format: str, dtype: Any
) -> QuantizedArray:
    """Weights of layout "nk" from e4m3 values and scales of any floating type."""
    _checks.check_rank(op, name, values, "E,N,K")
    _checks.check_dtype(op, name, values, ("float8_e4m3fn",))
    _checks.check_dtype(op, scale_name, scales, _SCALES)
    scales = jnp.asarray(scales).astype(jnp.float32)
    check_scales(op, scale_name, scales, format, "nk", values.shape)
    return QuantizedArray(jnp.asarray(values), scales, format, "nk", dtype)


def check_weights(op: str, name: str, q: Any, formats: Sequence[str]) -> None:
    """Refuses anything but weights in one of some formats."""
    check_quantized(op, name, q)
    if q.layout == "tokens" or q.format not in formats:
        rule = (
            f"{name} must be weights in {' or '.join(formats)}, not {q.format} of layout {q.layout}"
        )
        raise ValueError(_checks.message(op, rule, **{name: q}))


def check_whole_blocks(op: str, name: str, q: QuantizedArray, outputs: int) -> None:
    """Refuses halves of so many outputs that a block of scales lies in both."""
    if outputs % BLOCK:
        rule = (
            f"{name} has halves of {outputs} outputs, no multiple of {BLOCK}: the block between "
            "them needs two scales; jaxmoe.dequantize, join and quantize again"
        )
        raise ValueError(_checks.message(op, rule, **{name: q}))
