"""int4 weights as vLLM's CUTLASS kernel for FP8 tokens holds them in memory."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats.parts import check_steps_of, pack
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.int4 import codes_of_words, in_dtype
from jaxmoe.quantize import QuantizedArray

_GROUP = 128
_TILE = (16, 32)  # rows and elements of k that the lanes of a warp hold together
_TABLE = 8  # multiples of a scale, -8 to -1


def from_vllm_w4a8(
    weight: jax.Array,
    group_scales: jax.Array,
    channel_scales: jax.Array,
    *,
    dtype: Any = "bfloat16",
) -> QuantizedArray:
    """Reads vLLM's W4A8 weights out of a layer in memory: w = (code - 8) * group * channel.

    Args:
      weight: int32 [E, N, K / 8], `w13_weight` (gate, then up) or `w2_weight`: signed numbers of
        four bits, 8 - q in the place of q > 0, in the order of the lanes of a warp.
      group_scales: float8_e4m3fn [E, K / 128, N]; or `w13_weight_scale`, -8 to -1 times each,
        [E, K / 128, N, 8] in any shape.
      channel_scales: float32 [E, N, 1], `w13_weight_chan_scale`.
      dtype: bfloat16 or float16, that of the array and of its scales.

    Returns:
      An int4_g128 array [E, N, K] of layout "nk", for experts with `token_format="e4m3"`.

    Raises:
      TypeError, ValueError: a wrong dtype or shape.

    Numerics: codes keep their values; group * channel is rounded once to `dtype`, NaN if it would
      be zero or infinite there. vLLM's kernel rounds (code - 8) * group to e4m3 instead. Scales of
      the checkpoint were rounded to e4m3 when it was loaded: `from_int4` has them as they were.
    Source: vLLM's `cutlass_encode_and_reorder_int4b_grouped` and `convert_bf16_scales_to_fp8`;
      CUTLASS' `compute_memory_reordering_atom` and `packed_scale_t`.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> weight = jnp.full((1, 64, 16), 0x11111111, jnp.int32)  # 7
      >>> groups = jnp.full((1, 1, 64), 2, jnp.float8_e4m3fn)
      >>> q = jaxmoe.checkpoints.from_vllm_w4a8(weight, groups, jnp.full((1, 64, 1), 0.25))
      >>> q.format, float(jaxmoe.dequantize(q)[0, 0, 0])
      ('int4_g128', 3.5)
    """
    op = "checkpoints.from_vllm_w4a8"
    dtype = _checks.float_dtype(op, "dtype", dtype)
    _checks.check_rank(op, "weight", weight, "E,N,K/8")
    stored = codes_of_words(op, "weight", weight)
    experts, n, k = stored.shape
    check_steps_of(op, "weight", weight, stored.shape, "int4_g128")
    _checks.check_dtype(op, "group_scales", group_scales, ("float8_e4m3fn",))
    _checks.check_dtype(op, "channel_scales", channel_scales, ("float32",))
    _checks.check_shape(op, "channel_scales", channel_scales, (experts, n, 1), "[E, N, 1]")
    scales = jnp.asarray(group_scales).astype(jnp.float32)
    shape = (experts, k // _GROUP, n)
    if scales.size == _TABLE * experts * n * (k // _GROUP):
        scales = -scales.reshape(*shape, _TABLE)[..., -1]
    else:
        meaning = f"[E, K / {_GROUP}, N], or {_TABLE} multiples of each"
        _checks.check_shape(op, "group_scales", group_scales, shape, meaning)
    scales = in_dtype(jnp.swapaxes(scales, 1, 2) * jnp.asarray(channel_scales), dtype)
    codes = jnp.where(stored >= 8, stored - 8, jnp.where(stored == 0, 8, 16 - stored))
    parts = _in_order(codes), scales
    of = "weight", weight
    return pack("int4_g128", *parts, weight_layout="nk", dtype=dtype, op=op, of=of)


def _in_order(codes: jax.Array) -> jax.Array:
    """Codes [E, N, K] out of the order of lanes.

    A tile of 16 rows by 32 of k is 32 lanes of 16 codes, lane 4 i + c with those of

      row = 8 u + i    k = 16 p + 4 c + h    in the order of 8 p + 4 u + h

    with i < 8, c, h < 4 and u, p < 2. Tiles follow one another along rows, then along k.
    """
    experts, n, k = codes.shape
    rows, depth = _TILE
    # [E, tile along k, tile along n, i, c, p, u, h]
    a = codes.reshape(experts, k // depth, n // rows, 8, 4, 2, 2, 4)
    return a.transpose(0, 2, 6, 3, 1, 5, 4, 7).reshape(codes.shape)
