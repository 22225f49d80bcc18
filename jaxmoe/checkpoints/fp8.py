"""FP8 weights of checkpoints and other libraries as quantized arrays or experts, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats.quantization import BLOCK
from jaxmoe._jax import checks as _checks
from jaxmoe.activation import Activation, resolve
from jaxmoe.experts import Experts
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
    return _weights(op, "weight", weight, "weight_scale_inv", weight_scale_inv, "fp8_block", dtype)


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
    _check_weights("checkpoints.to_block", "q", q, ("fp8_block",))
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
    return _weights(op, "weight", weight, "weight_scale", scales, format, dtype)


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
    _check_weights("checkpoints.to_compressed_tensors", "q", q, ("fp8_channel", "fp8_tensor"))
    return q.values, q.scales[..., None]


def join_gate_up(gate: QuantizedArray, up: QuantizedArray) -> QuantizedArray:
    """Joins the gate and up matrices of checkpoints that keep them apart.

    fp8_channel, fp8_block: values and scales one after the other; no number changes.
    fp8_tensor: one scale for both, s = max(s_gate, s_up), and values = fp8(values * (s_gate / s)).

    Args:
      gate: [E, I, H] ("nk") or [E, H, I] ("kn") weights of any format.
      up: the same.

    Returns:
      [E, 2I, H] or [E, H, 2I] with the gate first: `gate_up="gate_up"`. For the other order swap
      the arguments.

    Raises:
      TypeError: one is no `QuantizedArray`.
      ValueError: they differ in format, layout, dtype or shape, or I is no multiple of 128 in
        fp8_block: the block in the middle would need two scales. `jaxmoe.dequantize` both, join
        and quantize again.

    Numerics: in fp8_tensor the matrix with the larger scale keeps its bits, and so does the other
      where the ratio is a power of two and no value gets below 2^-6; otherwise its values are
      rounded once more, by at most 2^-4 of themselves or 2^-10 s (e5m2: 2^-3 or 2^-17 s).
    Source: the common scale is what vLLM's FP8 experts are loaded with.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> gate = jaxmoe.quantize(jnp.ones((1, 1, 4)), "fp8_tensor", weight_layout="nk")
      >>> up = jaxmoe.quantize(jnp.full((1, 1, 4), 2.0), "fp8_tensor", weight_layout="nk")
      >>> w = jaxmoe.checkpoints.join_gate_up(gate, up)
      >>> w.values[0, :, 0].tolist(), jaxmoe.dequantize(w)[0, :, 0].tolist()
      ([224.0, 448.0], [1.0, 2.0])
    """
    op = "checkpoints.join_gate_up"
    for name, q in (("gate", gate), ("up", up)):
        _check_weights(op, name, q, ("fp8_tensor", "fp8_channel", "fp8_block"))
    for field in ("format", "layout", "dtype", "values.dtype", "shape"):
        a, b = (q.values.dtype if "." in field else getattr(q, field) for q in (gate, up))
        if a != b:
            rule = f"up.{field}={b} must equal gate.{field}={a}"
            raise ValueError(_checks.message(op, rule, gate=gate, up=up))
    gate_values, up_values = jnp.asarray(gate.values), jnp.asarray(up.values)
    if gate.format != "fp8_tensor":
        if gate.format == "fp8_block":
            _check_whole_blocks(op, "gate", gate, gate.values.shape[1])
        scales = jnp.concatenate([gate.scales, up.scales], 1)
    else:
        scales = jnp.maximum(gate.scales, up.scales)
        gate_values = _rescale(gate_values, gate.scales, scales)
        up_values = _rescale(up_values, up.scales, scales)
    values = jnp.concatenate([gate_values, up_values], 1)
    return QuantizedArray(values, scales, gate.format, gate.layout, gate.dtype)


def from_flashinfer(
    fc1_expert_weights: jax.Array,
    fc2_expert_weights: jax.Array,
    quant_scales: Sequence[jax.Array],
    *,
    activation: str | Activation = "swiglu",
    dtype: Any = "bfloat16",
) -> Experts:
    """Reads the FP8 arguments of FlashInfer's `cutlass_fused_moe`.

    Four scales, fp8_tensor: [s_w1 * s_x, 1 / s_h, s_w2 * s_h, s_x]: the second multiplies before
    quantizing, the others after. Two scales, fp8_block (`use_deepseek_fp8_block_scale`): those of
    the weights. s_w1 = scales[0] / s_x, s_h = 1 / scales[1] and s_w2 = scales[2] * scales[1].

    Args:
      fc1_expert_weights: [E, 2I, H] float8_e4m3fn, the up half first, or [E, I, H] without gate.
      fc2_expert_weights: [E, H, I] float8_e4m3fn.
      quant_scales: float32; four of them [E], [] or [E], [E] and [] (scalars may be [1]), or two:
        [E, ceil(2I / 128), ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)].
      activation: that of the experts, see `jaxmoe.Experts`.
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return.

    Returns:
      Experts of layout "nk", the up half first, whose `x_scale` and `h_scale` are set for
      fp8_tensor. No bias: add it with `dataclasses.replace`, in FlashInfer's own order.

    Raises:
      TypeError, ValueError: a wrong dtype, shape or number of scales.

    Numerics: each quotient and product of two scales is one float32 rounding, or two (s_w2 after
      `to_flashinfer`); values and block scales do not change.
    Source: https://docs.flashinfer.ai, flashinfer.fused_moe.cutlass_fused_moe.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> fc1, fc2 = (jnp.ones(s, jnp.float8_e4m3fn) for s in ((1, 6, 4), (1, 4, 3)))
      >>> scales = [jnp.array([0.5]), jnp.float32(8), jnp.array([0.25]), jnp.float32(0.25)]
      >>> experts = checkpoints.from_flashinfer(fc1, fc2, scales)
      >>> experts.gate_up.scales.tolist(), experts.down.scales.tolist()
      ([2.0], [2.0])
      >>> float(experts.x_scale), float(experts.h_scale), experts.order
      (0.25, 0.125, 'up_gate')
    """
    op = "checkpoints.from_flashinfer"
    scales = list(quant_scales)
    if len(scales) not in (2, 4):
        rule = f"quant_scales must hold 4 scales (per tensor) or 2 (blocks), not {len(scales)}"
        raise ValueError(_checks.message(op, rule))
    names = [f"quant_scales[{i}]" for i in range(len(scales))]
    x_scale = h_scale = None
    first, last = 0, 1
    if len(scales) == 4:
        last = 2
        num_experts = _num_experts(op, fc1_expert_weights)
        for i, name in enumerate(names):
            scales[i] = _static_scale(
                op, name, scales[i], 1 if i == 3 else num_experts, i in (1, 3)
            )
        x_scale, h_scale = scales[3], 1 / scales[1]
        scales[0], scales[2] = scales[0] / x_scale, scales[2] * scales[1]
    format = "fp8_tensor" if len(scales) == 4 else "fp8_block"
    fc1 = ("fc1_expert_weights", fc1_expert_weights, names[first], scales[first])
    fc2 = ("fc2_expert_weights", fc2_expert_weights, names[last], scales[last])
    return Experts(
        gate_up=_weights(op, *fc1, format, dtype),
        down=_weights(op, *fc2, format, dtype),
        x_scale=x_scale,
        h_scale=h_scale,
        activation=activation,
        order="up_gate" if resolve(activation, op).gated else "gate_up",
        layout="nk",
    )


def to_flashinfer(experts: Experts) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Returns the FP8 arguments of FlashInfer's `cutlass_fused_moe`, see `from_flashinfer`.

    Args:
      experts: fp8_tensor or fp8_block experts without biases, which are arguments of their own
        there. Experts of fp8_tensor have both static scales. A gate half that is not behind the up
        half is copied there.

    Returns:
      (fc1_expert_weights, fc2_expert_weights, quant_scales).

    Raises:
      TypeError, ValueError: a wrong format or dtype, a static scale that is missing or of no use, a
        bias, halves that alternate, or halves to be moved that are no multiple of 128 in fp8_block.

    Numerics: exact, but for the products of scales, and `join_gate_up` of two fp8_tensor arrays.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> w = [jaxmoe.quantize(jnp.ones(s), "fp8_block", weight_layout="kn")
      ...      for s in ((2, 4, 6), (2, 3, 4))]
      >>> experts = jaxmoe.Experts(gate_up=w[0], down=w[1], order="up_gate")
      >>> fc1, fc2, scales = jaxmoe.checkpoints.to_flashinfer(experts)
      >>> fc1.shape, fc2.shape, len(scales)
      ((2, 6, 4), (2, 4, 3), 2)
    """
    op = "checkpoints.to_flashinfer"
    given: Any = experts
    if not isinstance(given, Experts):
        raise TypeError(_checks.message(op, "experts must be a jaxmoe.Experts", experts=experts))
    for name in ("gate_up_bias", "gate_bias", "up_bias", "down_bias"):
        if getattr(experts, name) is not None:
            rule = f"{name} must be None: FlashInfer takes biases apart from the weights"
            raise ValueError(_checks.message(op, rule, **{name: getattr(experts, name)}))
    for name in ("gate_up", "gate", "up", "down"):
        if (q := getattr(experts, name)) is not None:
            _check_weights(op, name, q, ("fp8_tensor", "fp8_block"))
    first, down = _up_first(op, experts), experts.down
    per_tensor = down.format == "fp8_tensor"
    static = {"x_scale": experts.x_scale, "h_scale": experts.h_scale}
    for name, scale in static.items():
        if (scale is not None) != per_tensor:
            rule = f"{name} must be {'given' if per_tensor else 'None'} for {down.format}"
            raise ValueError(_checks.message(op, rule, **{name: scale}))
    scales = [first.scales, down.scales]
    if per_tensor:
        s_x = _static_scale(op, "x_scale", experts.x_scale, 1, True)
        s_h = _static_scale(op, "h_scale", experts.h_scale, experts.num_experts, True)
        scales = [scales[0] * s_x, 1 / s_h, scales[1] * s_h, s_x]
    return first.values, down.values, scales


def _up_first(op: str, e: Experts) -> QuantizedArray:
    """The first weight as one array, the up half first."""
    if e.gate is not None:
        return join_gate_up(e.up, e.gate)
    if not resolve(e.activation, op).gated or e.order == "up_gate":
        return e.first
    if e.order == "interleaved":
        rule = "order='interleaved' must be 'up_gate' or 'gate_up': FlashInfer has halves"
        raise ValueError(_checks.message(op, rule, gate_up=e.gate_up))
    return _swap_halves(op, e.gate_up)


def _weights(
    op: str, name: str, values: Any, scale_name: str, scales: Any, format: str, dtype: Any
) -> QuantizedArray:
    _checks.check_rank(op, name, values, "E,N,K")
    _checks.check_dtype(op, name, values, ("float8_e4m3fn",))
    _checks.check_dtype(op, scale_name, scales, _SCALES)
    scales = jnp.asarray(scales).astype(jnp.float32)
    check_scales(op, scale_name, scales, format, "nk", values.shape)
    return QuantizedArray(jnp.asarray(values), scales, format, "nk", dtype)


def _check_weights(op: str, name: str, q: Any, formats: Sequence[str]) -> None:
    check_quantized(op, name, q)
    if q.layout == "tokens" or q.format not in formats:
        rule = (
            f"{name} must be weights in {' or '.join(formats)}, not {q.format} of layout {q.layout}"
        )
        raise ValueError(_checks.message(op, rule, **{name: q}))


def _check_whole_blocks(op: str, name: str, q: QuantizedArray, outputs: int) -> None:
    if outputs % BLOCK:
        rule = (
            f"{name} has halves of {outputs} outputs, no multiple of {BLOCK}: the block between "
            "them needs two scales; jaxmoe.dequantize, join and quantize again"
        )
        raise ValueError(_checks.message(op, rule, **{name: q}))


def _swap_halves(op: str, q: QuantizedArray) -> QuantizedArray:
    half = q.values.shape[1] // 2
    scales = q.scales
    if q.format == "fp8_block":
        _check_whole_blocks(op, "gate_up", q, half)
        scales = jnp.roll(scales, scales.shape[1] // 2, axis=1)
    values = jnp.roll(q.values, half, axis=1)
    return QuantizedArray(values, scales, q.format, q.layout, q.dtype)


def _rescale(values: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Rounds values * (old / new), new >= old, to their own dtype; equal scales change nothing."""
    ratio = jax.lax.optimization_barrier(jnp.where(old == new, 1, old / new))
    return (values.astype(jnp.float32) * ratio[:, None, None]).astype(values.dtype)


def _num_experts(op: str, weights: Any) -> int:
    _checks.check_rank(op, "fc1_expert_weights", weights, "E,N,K")
    return weights.shape[0]


def _static_scale(op: str, name: str, scale: Any, num_experts: int, scalar: bool) -> jax.Array:
    """Returns a float32 scale, [E] or, if `scalar` ones are allowed, []."""
    scale = np.asarray(scale) if isinstance(scale, np.generic) else scale
    _checks.check_dtype(op, name, scale, ("float32",))
    if scalar and scale.shape in ((), (1,)):
        return jnp.asarray(scale).reshape(())
    _checks.check_shape(op, name, scale, (num_experts,), "num_experts")
    return jnp.asarray(scale)
