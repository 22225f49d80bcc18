"""FlashInfer's lists of scales for packed weights, whose layouts are those of its kernels.

The lists are those that `getQuantParams` of its CUTLASS backend checks, the layouts those of its
tests (tests/moe/test_trtllm_cutlass_fused_moe.py).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats.elements import exponent_of, times_power
from jaxmoe._formats.parts import check_steps_of, pack, unpack
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.int4 import in_dtype
from jaxmoe.checkpoints.known import check_factors, check_range, known
from jaxmoe.checkpoints.tokens import swizzle_scales, unswizzled
from jaxmoe.experts import Experts
from jaxmoe.quantize import QuantizedArray

GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "int4_g128": 128}
TOKENS = {"nvfp4": "nvfp4", "mxfp4": "mxfp8", "mxfp8": "mxfp8", "int4_g128": "e4m3"}
_TILE = 128  # rows of a tile of factors
_SCALE_ROWS = 64  # of a block of folded int4 scales


def is_packed(scales: Sequence[Any]) -> bool:
    """Whether a list is one of packed weights: four arrays that begin with words, or more."""
    words = len(scales) == 4 and getattr(scales[0], "dtype", None) == "int32"
    return words or len(scales) in (6, 8)


def read(op: str, fc1: Any, fc2: Any, scales: Sequence[Any], gated: bool, dtype: Any) -> Any:
    """The fields of `jaxmoe.Experts` that the arguments stand for, the up half first."""
    readers = {4: _read_mx, 6: _read_nvfp4, 8: _read_int4}
    return readers[len(scales)](op, (fc1, fc2), scales, gated, dtype)


def write(op: str, first: QuantizedArray, e: Experts, gated: bool) -> Any:
    """fc1_expert_weights, fc2_expert_weights and quant_scales of experts, `first` the up half."""
    format = first.format
    if e.token_format != TOKENS[format]:
        rule = f"token_format={e.token_format!r} must be {TOKENS[format]!r} with {format} weights"
        raise ValueError(_checks.message(op, rule))
    static = {"x_scale": e.x_scale, "h_scale": e.h_scale}
    wanted = not format.startswith("mx")
    for name, scale in static.items():
        if (scale is not None) != wanted:
            rule = f"{name} must be {'given' if wanted else 'None'} for {format}"
            raise ValueError(_checks.message(op, rule, **{name: scale}))
    weights = first, e.down
    if format == "int4_g128":
        return _write_int4(op, weights, e)
    parts = [unpack(q) for q in weights]
    values = [_from_codes(format, codes) for codes, *_ in parts]
    _check_tiles(op, "gate_up" if e.gate is None else "gate", parts[0][0].shape[1], gated)
    factors = [_words(swizzle_scales(factors)) for _, factors, *_ in parts]
    if not wanted:
        for name, q in zip(("gate_up", "down"), weights, strict=True):
            check_factors(op, f"{name}.scales", q.scales)
        totals = [times_power(q.scales, -exponent_of(q.scales)) for q in weights]
        return *values, [factors[0], totals[0], factors[1], totals[1]]
    s_x = static_scale(op, "x_scale", e.x_scale, 1, True)
    s_h = static_scale(op, "h_scale", e.h_scale, e.num_experts, True)
    alphas = first.scales * s_x, e.down.scales * s_h
    return *values, [1 / s_x, factors[0], alphas[0], 1 / s_h, factors[1], alphas[1]]


def static_scale(
    op: str, name: str, scale: Any, num_experts: int, scalar: bool, zero: bool = False
) -> jax.Array:
    """Returns a float32 scale, [E] or, if `scalar` ones are allowed, []; `zero` ones if allowed."""
    scale = np.asarray(scale) if isinstance(scale, np.generic) else scale
    _checks.check_dtype(op, name, scale, ("float32",))
    if not zero:
        check_factors(op, name, scale)
    if scalar and scale.shape in ((), (1,)):
        return jnp.asarray(scale).reshape(())
    meaning = "num_experts, or one number" if scalar else "num_experts"
    if scalar and num_experts == 1:
        meaning = "one number"
    _checks.check_shape(op, name, scale, (num_experts,), meaning)
    return jnp.asarray(scale)


def _read_nvfp4(op: str, weights: Any, scales: Sequence[Any], gated: bool, dtype: Any) -> Any:
    codes = [_codes(op, *w) for w in zip(_NAMES, weights, strict=True)]
    count = codes[0].shape[0]
    per_x = _common_of_experts(op, "quant_scales[0]", scales[0], count)
    per_h = static_scale(op, "quant_scales[3]", scales[3], count, True)
    alphas = [_alpha(op, i, scales[i], count, per, i - 2) for i, per in ((2, per_x), (5, per_h))]
    q = [
        pack(
            "nvfp4",
            *(c, _factors(op, i, scales[i], c, "nvfp4", half), alpha * per),
            **_in(op, dtype, name, w),
        )
        for name, w, c, i, alpha, per, half in zip(
            *(_NAMES, weights, codes, (1, 4), alphas, (per_x, per_h), (gated, False)), strict=True
        )
    ]
    return {
        "gate_up": q[0],
        "down": q[1],
        "x_scale": 1 / per_x,
        "h_scale": 1 / per_h,
        "token_format": TOKENS["nvfp4"],
    }


def _read_mx(op: str, weights: Any, scales: Sequence[Any], gated: bool, dtype: Any) -> Any:
    format = "mxfp8" if getattr(weights[0], "dtype", None) == "float8_e4m3fn" else "mxfp4"
    q: list[QuantizedArray] = []
    for i, (name, w) in enumerate(zip(_NAMES, weights, strict=True)):
        if format == "mxfp8":
            _checks.check_rank(op, name, w, "E,N,K")
            _checks.check_dtype(op, name, w, ("float8_e4m3fn",))
            codes = jax.lax.bitcast_convert_type(jnp.asarray(w), jnp.uint8)
        else:
            codes = _codes(op, name, w)
        factors = _factors(op, 2 * i, scales[2 * i], codes, format, gated and i == 0)
        at = 2 * i + 1
        total = static_scale(op, f"quant_scales[{at}]", scales[at], codes.shape[0], False)
        packed = pack(format, codes, factors, **_in(op, dtype, name, w))
        q.append(_with_scales(packed, packed.scales * total))
    return {"gate_up": q[0], "down": q[1], "token_format": TOKENS[format]}


def _read_int4(op: str, weights: Any, scales: Sequence[Any], gated: bool, dtype: Any) -> Any:
    del gated
    for i in (4, 5):
        if scales[i].size:
            rule = f"quant_scales[{i}] must be empty: zero points are not supported here"
            raise NotImplementedError(_checks.message(op, rule))
    q: list[QuantizedArray] = []
    per_token: list[jax.Array] = []
    for i, (name, w) in enumerate(zip(_NAMES, weights, strict=True)):
        codes = _codes(op, name, w, interleaved=True) ^ jnp.uint8(8)
        count, _, k = codes.shape
        per_token.append(_common(op, f"quant_scales[{2 + i}]", scales[2 + i], k))
        alpha = _alpha(op, 6 + i, scales[6 + i], count, per_token[-1], 2 + i)
        groups = _unfolded(op, f"quant_scales[{i}]", scales[i], codes, dtype)
        packed = pack("int4_g128", codes, groups, **_in(op, dtype, name, w))
        q.append(_with_scales(packed, packed.scales * (alpha * per_token[-1])))
    return {
        "gate_up": q[0],
        "down": q[1],
        "x_scale": 1 / per_token[0],
        "h_scale": 1 / per_token[1],
        "token_format": TOKENS["int4_g128"],
    }


def _write_int4(op: str, weights: tuple[QuantizedArray, ...], e: Experts) -> Any:
    values: list[jax.Array] = []
    lists: list[tuple[jax.Array, ...]] = []
    for name, scale, q in zip(("x_scale", "h_scale"), (e.x_scale, e.h_scale), weights, strict=True):
        codes, groups = unpack(q)
        per = (1 / static_scale(op, name, scale, 1, True).reshape(())).astype(jnp.bfloat16)
        act = jnp.broadcast_to(per, codes.shape[2:])
        values.append(_interleaved(_nibbles_joined(codes ^ jnp.uint8(8))))
        alpha = q.scales / per.astype(jnp.float32)
        lists.append((_folded(groups.astype(jnp.bfloat16)), act, act[:0], alpha))
    return *values, [part for pair in zip(*lists, strict=True) for part in pair]


_NAMES = ("fc1_expert_weights", "fc2_expert_weights")


def _common_of_experts(op: str, name: str, scale: Any, count: int) -> jax.Array:
    """The one number, float32 [], of a scale [], [1], or [E] with the same for all experts."""
    common = static_scale(op, name, scale, count, True)
    if not common.ndim:
        return common
    numbers = known(scale)
    if numbers is None:
        rule = f"{name} of each expert must be known: call without jax.jit, or give one number"
        raise TypeError(_checks.message(op, rule, **{name: scale}))
    if (numbers != numbers[0]).any():
        other = int((numbers != numbers[0]).argmax())
        rule = (
            f"{name}[{other}]={numbers[other]} must equal {name}[0]={numbers[0]}: a token is "
            "quantized once for all of its experts"
        )
        raise NotImplementedError(_checks.message(op, rule, **{name: scale}))
    return common[0]


def _alpha(op: str, i: int, alpha: Any, count: int, per: jax.Array, per_at: int) -> jax.Array:
    """The factors [E] of sums, which are scales of weights if `per` of tokens multiplies them."""
    name = f"quant_scales[{i}]"
    alpha = static_scale(op, name, alpha, count, False)
    check_factors(op, f"{name} * quant_scales[{per_at}]", alpha * per)
    return alpha


def _in(op: str, dtype: Any, name: str, w: Any) -> dict[str, Any]:
    return {"weight_layout": "nk", "dtype": dtype, "op": op, "of": (name, w)}


def _with_scales(q: QuantizedArray, scales: jax.Array) -> QuantizedArray:
    return QuantizedArray(q.values, scales, q.format, q.layout, q.dtype)


def _codes(op: str, name: str, w: Any, interleaved: bool = False) -> jax.Array:
    """Codes [E, N, K] of two a byte, the first in the low bits, or of 16 in a word of NumPy's."""
    if isinstance(w, np.ndarray) and w.dtype == np.int64:
        w = np.ascontiguousarray(w).view(np.uint8)
    _checks.check_rank(op, name, w, "E,N,K/2")
    _checks.check_dtype(op, name, w, ("uint8",))
    data = jnp.asarray(w)
    if interleaved:
        data = _deinterleaved(op, name, data)
    return jnp.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:2], -1)


def _nibbles_joined(codes: jax.Array) -> jax.Array:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _from_codes(format: str, codes: jax.Array) -> jax.Array:
    if format == "mxfp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return _nibbles_joined(codes)


def _factors(op: str, i: int, scales: Any, codes: jax.Array, format: str, gated: bool) -> jax.Array:
    """Factors [E, N, groups] out of their tiles, which do not lie in both halves of fc1."""
    _, n, k = codes.shape
    _check_tiles(op, "fc1_expert_weights", n, gated)
    factors = unswizzled(op, f"quant_scales[{i}]", scales, n, k // GROUPS[format])
    wanted = (codes.shape[0], n, k // GROUPS[format])
    _checks.check_shape(op, f"quant_scales[{i}]", factors, wanted, "out of its tiles")
    return factors


def _check_tiles(op: str, name: str, rows: int, gated: bool) -> None:
    """Refuses halves that FlashInfer pads to whole tiles, each by itself."""
    if gated and rows % (2 * _TILE):
        rule = f"{name} must have halves of a multiple of {_TILE} rows, not {rows // 2}"
        rule += f"; {_checks.nearest(rows // 2, _TILE)}"
        raise NotImplementedError(_checks.message(op, rule))


def _words(tiles: jax.Array) -> jax.Array:
    data = tiles if tiles.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(tiles, jnp.uint8)
    return jax.lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, 4), jnp.int32)


def _common(op: str, name: str, scale: Any, k: int) -> jax.Array:
    """The one number, float32 [], of scales [k] of the activations; 1 if there are none."""
    _checks.check_dtype(op, name, scale, ("bfloat16", "float16"))
    if not scale.size:
        return jnp.float32(1)
    if scale.size != k:
        rule = f"{name} must have {k} elements, or none, not {scale.size}"
        raise ValueError(_checks.message(op, rule, **{name: scale}))
    try:
        numbers = np.asarray(scale).reshape(-1)
    except jax.errors.TracerArrayConversionError as error:
        rule = f"{name} must be known: call without jax.jit"
        raise TypeError(_checks.message(op, rule, **{name: scale})) from error
    numbers = numbers.view(jnp.bfloat16) if numbers.dtype == np.float16 else numbers
    if not (np.isfinite(numbers.astype(np.float32)) & (numbers > 0)).all():
        rule = f"{name} must be positive and finite"
        raise ValueError(_checks.message(op, rule, **{name: scale}))
    if (numbers != numbers[0]).any():
        rule = (
            f"{name} must be one number {k} times: the layer has no scale of each input (the "
            "pre-quantization scales of AWQ); multiply them into x, or into the up projection"
        )
        raise NotImplementedError(_checks.message(op, rule))
    return jnp.asarray(numbers[0].astype(np.float32))


# The bytes of rows r and r + 8 of each 16 lie side by side, 4 elements of k of each: the axes are
# [E, N / 16, 2, 8, K / 64, 2, 2, 4, 2 bytes] in order, and interleaved with axes 2 and 6 as below.
def _interleaved(data: jax.Array) -> jax.Array:
    """Puts int4 weights, two a byte, in the order of FlashInfer's kernel for Hopper."""
    count, n, width = data.shape
    a = data.reshape(count, n // 16, 2, 8, width // 32, 2, 2, 4, 2)
    return a.transpose(0, 1, 6, 3, 4, 5, 7, 2, 8).reshape(data.shape)


def _deinterleaved(op: str, name: str, data: jax.Array) -> jax.Array:
    """The inverse of `_interleaved`."""
    count, n, width = data.shape
    check_steps_of(op, name, data, (count, n, 2 * width), "int4_g128")
    a = data.reshape(count, n // 16, 2, 8, width // 32, 2, 4, 2, 2)
    return a.transpose(0, 1, 7, 3, 4, 5, 2, 6, 8).reshape(data.shape)


def _folded(scales: jax.Array) -> jax.Array:
    """Scales [E, N, K / 128] in blocks of 64 rows: [E, N / 64, K / 128, 8, 8]."""
    count, n, groups = scales.shape
    return scales.reshape(count, n // _SCALE_ROWS, 8, 8, groups).transpose(0, 1, 4, 3, 2)


def _unfolded(op: str, name: str, scales: Any, codes: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_folded`, in `dtype`; bits of bf16, which float16 arrays hold too."""
    _checks.check_dtype(op, name, scales, ("bfloat16", "float16"))
    scales = jnp.asarray(scales)
    if scales.dtype == jnp.float16:
        scales = jax.lax.bitcast_convert_type(scales, jnp.bfloat16)
    count, n, k = codes.shape
    wanted = (count, n // _SCALE_ROWS, k // GROUPS["int4_g128"], 8, 8)
    _checks.check_shape(op, name, scales, wanted, "[E, N / 64, K / 128, 8, 8], folded")
    check_range(op, name, scales, dtype)
    return in_dtype(scales.transpose(0, 1, 4, 3, 2).reshape(count, n, -1), dtype)
