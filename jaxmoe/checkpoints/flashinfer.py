"""The quantized arguments of FlashInfer's `cutlass_fused_moe` as experts, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._jax import checks as _checks
from jaxmoe.activation import Activation, resolve
from jaxmoe.checkpoints.flashinfer_packed import GROUPS, is_packed, read, static_scale, write
from jaxmoe.checkpoints.fp8 import check_weights, check_whole_blocks, weights_of
from jaxmoe.checkpoints.joined import joined
from jaxmoe.experts import Experts
from jaxmoe.quantize import QuantizedArray


def from_flashinfer(
    fc1_expert_weights: jax.Array,
    fc2_expert_weights: jax.Array,
    quant_scales: Sequence[jax.Array],
    *,
    activation: str | Activation = "swiglu",
    dtype: Any = "bfloat16",
) -> Experts:
    """Reads the quantized arguments of FlashInfer's `cutlass_fused_moe`.

    Four scales, fp8_tensor: [s_w1 * s_x, 1 / s_h, s_w2 * s_h, s_x]: the second multiplies before
    quantizing, the others after. Two scales, fp8_block (`use_deepseek_fp8_block_scale`): those of
    the weights. s_w1 = scales[0] / s_x, s_h = 1 / scales[1] and s_w2 = scales[2] * scales[1].

    Packed weights, with factors in the tiles of `swizzle_scales`, four a word:
      six, nvfp4: [1 / g_x, factors, g_w1 g_x, 1 / g_h, factors, g_w2 g_h];
      four, mxfp4 or mxfp8 (`use_mxfp8_act_scaling`): [factors, global, factors, global];
      eight, int4_g128 (W4A8, `use_w4_group_scaling`): [scales, scales, act, act, zeros, zeros,
      alpha, alpha], interleaved for Hopper: x is quantized as e4m3(x act), sums are multiplied by
      alpha, so x_scale = 1 / act and the scale of an expert is alpha act.

    Args:
      fc1_expert_weights: [E, 2I, H] float8_e4m3fn, the up half first, or [E, I, H] without gate; of
        4 bits uint8, two a byte, or NumPy's int64.
      fc2_expert_weights: [E, H, I] likewise.
      quant_scales: FP8: float32; four of them [E], [] or [E], [E] and [] (scalars may be [1]), or
        two: [E, ceil(2I / 128), ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)]. Packed:
        factors int32 [E, rows, groups / 4]; g, global and alpha float32 [E], g_x [], or [E] of one
        number, g_h [] or [E]; int4 scales, bits of bfloat16, [E, N / 64, K / 128, 8, 8], act [K] or
        empty, zeros empty.
      activation: that of the experts, see `jaxmoe.Experts`.
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return.

    Returns:
      Experts of layout "nk", the up half first. `x_scale` and `h_scale` are set for fp8_tensor,
      nvfp4 and int4_g128, `token_format` for packed weights. No bias: add it with
      `dataclasses.replace`, in FlashInfer's own order.

    Raises:
      TypeError, ValueError: a wrong dtype, shape or number of scales; or a number that would not
        last: scales of tokens, g, global and alpha that are not positive and finite, and int4
        scales that `dtype` makes zero or infinite. Traced by `jax.jit` numbers are not known, and
        nothing checks them: then the last are NaN, and others give what the formulas do.
      NotImplementedError: act or g_x that is not one number, zeros, or factors with I no multiple
        of 128.

    Numerics: each quotient and product of two scales is one float32 rounding, or two (s_w2 after
      `to_flashinfer`); values, factors and block scales do not change. Tokens are quantized by the
      rules of jaxmoe: FlashInfer's `mxfp8_quantize` may choose another exponent.
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
    _checks.check_type(op, "quant_scales", quant_scales, list | tuple, "a list of arrays")
    scales = [np.asarray(s) if isinstance(s, np.generic) else s for s in quant_scales]
    if len(scales) not in (2, 4, 6, 8):
        rule = (
            "quant_scales must hold 2 arrays (fp8_block), 4 (fp8_tensor, mx), 6 (nvfp4) or 8 "
            f"(int4), not {len(scales)}"
        )
        raise ValueError(_checks.message(op, rule))
    names = [f"quant_scales[{i}]" for i in range(len(scales))]
    for name, scale in zip(names, scales, strict=True):
        _checks.check_array(op, name, scale)
    dtype = _checks.float_dtype(op, "dtype", dtype)
    gated = resolve(activation, op).gated
    order = "up_gate" if gated else "gate_up"
    if is_packed(scales):
        fields = read(op, fc1_expert_weights, fc2_expert_weights, scales, gated, dtype)
        return Experts(**fields, activation=activation, order=order, layout="nk")
    x_scale = h_scale = None
    first, last = 0, 1
    if len(scales) == 4:
        last = 2
        num_experts = _num_experts(op, fc1_expert_weights)
        for i, name in enumerate(names):
            count, of_tokens = 1 if i == 3 else num_experts, i in (1, 3)
            # An expert without weights may have a scale of 0.
            scales[i] = static_scale(op, name, scales[i], count, of_tokens, zero=not of_tokens)
        x_scale, h_scale = scales[3], 1 / scales[1]
        scales[0], scales[2] = scales[0] / x_scale, scales[2] * scales[1]
    format = "fp8_tensor" if len(scales) == 4 else "fp8_block"
    fc1 = ("fc1_expert_weights", fc1_expert_weights, names[first], scales[first])
    fc2 = ("fc2_expert_weights", fc2_expert_weights, names[last], scales[last])
    return Experts(
        gate_up=weights_of(op, *fc1, format, dtype),
        down=weights_of(op, *fc2, format, dtype),
        x_scale=x_scale,
        h_scale=h_scale,
        activation=activation,
        order=order,
        layout="nk",
    )


def to_flashinfer(experts: Experts) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Returns the quantized arguments of FlashInfer's `cutlass_fused_moe`, see `from_flashinfer`.

    Args:
      experts: fp8_tensor or fp8_block experts without biases, which are arguments of their own
        there; or nvfp4, mxfp4, mxfp8 or int4_g128 with the `token_format` that `from_flashinfer`
        sets. Experts of fp8_tensor, nvfp4 and int4_g128 have both static scales. A gate half that
        is not behind the up half is copied there, and one that is an array of its own is joined as
        by `join_gate_up`.

    Returns:
      (fc1_expert_weights, fc2_expert_weights, quant_scales).

    Raises:
      TypeError, ValueError: a wrong format or dtype, a static scale that is missing, of no use, or
        known and not positive and finite; a bias, halves that alternate or that `join_gate_up`
        refuses, or halves to be moved that are no multiple of 128 in fp8_block.
      NotImplementedError: packed weights with I no multiple of 128.

    Numerics: exact, but for the products of scales, and `join_gate_up` of two arrays. In
      int4_g128 1 / x_scale, 1 / h_scale and scales of float16 are rounded to bfloat16.

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
            check_weights(op, name, q, ("fp8_tensor", "fp8_block", *GROUPS))
    first, down = _up_first(op, experts), experts.down
    if down.format in GROUPS:
        return write(op, first, experts, resolve(experts.activation, op).gated)
    per_tensor = down.format == "fp8_tensor"
    static = {"x_scale": experts.x_scale, "h_scale": experts.h_scale}
    for name, scale in static.items():
        if (scale is not None) != per_tensor:
            rule = f"{name} must be {'given' if per_tensor else 'None'} for {down.format}"
            raise ValueError(_checks.message(op, rule, **{name: scale}))
    scales = [first.scales, down.scales]
    if per_tensor:
        s_x = static_scale(op, "x_scale", experts.x_scale, 1, True)
        s_h = static_scale(op, "h_scale", experts.h_scale, experts.num_experts, True)
        scales = [scales[0] * s_x, 1 / s_h, scales[1] * s_h, s_x]
    return first.values, down.values, scales


def _up_first(op: str, e: Experts) -> QuantizedArray:
    """The first weight as one array, the up half first."""
    if e.gate is not None:
        return joined(op, up=e.up, gate=e.gate)
    if not resolve(e.activation, op).gated or e.order == "up_gate":
        return e.first
    if e.order == "interleaved":
        rule = "order='interleaved' must be 'up_gate' or 'gate_up': FlashInfer has halves"
        raise ValueError(_checks.message(op, rule, gate_up=e.gate_up))
    return _swap_halves(op, e.gate_up)


def _swap_halves(op: str, q: QuantizedArray) -> QuantizedArray:
    half = q.values.shape[1] // 2
    scales = q.scales
    if q.format == "fp8_block":
        check_whole_blocks(op, "gate_up", q, half)
        scales = jnp.roll(scales, scales.shape[1] // 2, axis=1)
    values = jnp.roll(q.values, half, axis=1)
    return QuantizedArray(values, scales, q.format, q.layout, q.dtype)


def _num_experts(op: str, weights: Any) -> int:
    _checks.check_rank(op, "fc1_expert_weights", weights, "E,N,K")
    return weights.shape[0]
