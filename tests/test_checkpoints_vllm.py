"""vLLM's W4A8 weights in memory: made of a checkpoint's as its code makes them, and read."""

import itertools
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import checkpoints
from tests.test_checkpoints_packed import numbers, words

E, N, K = 2, 64, 512
BF16, E4M3, F32 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32


def encoded(q):
    """`unified_encode_int4b`: two's complement, but 8 - q in the place of q > 0."""
    return (8 - q if q > 0 else q) & 15


def reordered(q):
    """Words [N, K / 8] of signed numbers [N, K], lane by lane and value by value.

    A lane has four neighbours of k of each of its two rows, and those 16 further on: the operand
    of an m64n16k32 product.
    """
    out = []
    for tile, row, lane, value in itertools.product(
        range(0, q.shape[1], 32), range(0, q.shape[0], 16), range(32), range(16)
    ):
        n = row + lane // 4 + value // 4 % 2 * 8
        k = tile + lane % 4 * 4 + value % 4 + value // 8 * 16
        out.append(encoded(int(q[n, k])))
    return words(np.array(out).reshape(q.shape))


def split_scales(scales):
    """`convert_bf16_scales_to_fp8`: e4m3 [E, N, groups] and float32 [E, N, 1]."""
    wide = scales.astype(F32)
    channel = np.abs(wide).max(axis=-1, keepdims=True) / F32(448)
    eighth = (wide / channel).astype(E4M3).astype(F32) / F32(8)
    return eighth.astype(E4M3), channel * F32(8)


def table(groups):
    """`cutlass_pack_scale_fp8` of e4m3 [E, groups, N]: -8 to -1 times each, flat."""
    return (groups.astype(F32)[..., None] * np.arange(-8, 0, dtype=F32)).astype(E4M3).reshape(-1)


def layer():
    """Codes and scales of a checkpoint, and what vLLM makes of them."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (E, N, K))
    scales = rng.uniform(0.5, 2, (E, N, K // 128)).astype(BF16)
    groups, channel = split_scales(scales)
    turned = np.ascontiguousarray(groups.swapaxes(1, 2))
    return codes, scales, np.stack([reordered(q) for q in codes - 8]), turned, channel


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_weights_in_memory(dtype):
    codes, scales, weight, groups, channel = layer()
    read = jax.jit(checkpoints.from_vllm_w4a8, static_argnames="dtype")
    q = read(weight, groups, channel, dtype=dtype)
    assert (q.format, q.layout, q.shape, q.dtype) == ("int4_g128", "nk", (E, N, K), dtype)
    step = (groups.swapaxes(1, 2).astype(F32) * channel).astype(q.dtype).astype(F32)
    want = ((codes - 8) * np.repeat(step, 128, -1)).astype(q.dtype).astype(F32)
    np.testing.assert_array_equal(numbers(q), want)
    np.testing.assert_array_equal(numbers(read(weight, table(groups), channel, dtype=dtype)), want)
    # The scales of the checkpoint were rounded twice, to four bits and to those of the dtype.
    of_file = numbers(checkpoints.from_int4(words(codes), scales))
    np.testing.assert_allclose(want, of_file, rtol=2**-4 + 2**-7)


def test_scales_that_a_dtype_cannot_hold_are_nan():
    _, _, weight, groups, channel = layer()
    channel[0, 1], channel[1, 2] = 1e-12, 1e9
    nan = np.isnan(numbers(checkpoints.from_vllm_w4a8(weight, groups, channel, dtype="float16")))
    assert nan[0, 1].all() and nan[1, 2].all() and nan.sum() == 2 * K


def test_refusals():
    _, _, weight, groups, channel = layer()
    for args, kind, message in (
        ((weight.view(np.uint32), groups, channel), TypeError, "weight.dtype=u32 must be i32"),
        ((weight[0], groups, channel), ValueError, "weight must have 3 axes [E,N,K/8], not 2"),
        (
            (weight[:, :40], groups, channel),
            ValueError,
            "weight must hold a positive multiple of 64 outputs (N) in int4_g128, not 40; the near",
        ),
        ((weight, groups.astype(F32), channel), TypeError, "group_scales.dtype=f32 must be f8_e4m"),
        (
            (weight, groups.swapaxes(1, 2), channel),
            ValueError,
            "group_scales.shape=[2,64,4] must be [2,4,64] ([E, K / 128, N], or 8 multiples of each",
        ),
        (
            (weight, groups, channel[..., 0]),
            ValueError,
            "channel_scales.shape=[2,64] must be [2,64",
        ),
        (
            (weight, groups, channel.astype(BF16)),
            TypeError,
            "channel_scales.dtype=bf16 must be f32",
        ),
    ):
        message = f"jaxmoe.checkpoints.from_vllm_w4a8: {message}"
        with pytest.raises(kind, match=re.escape(message)):
            checkpoints.from_vllm_w4a8(*args)
    with pytest.raises(TypeError, match="dtype=float32 must be bf16 or f16 in int4_g128"):
        checkpoints.from_vllm_w4a8(weight, groups, channel, dtype="float32")
