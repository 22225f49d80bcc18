"""FlashInfer's lists for packed weights: against plain loops over its layouts, and back."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import checkpoints, dequantize
from jaxmoe._testing import assert_equal
from tests import packed_oracle
from tests.test_token_arrays import GROUPS, swizzled

E, H, I = 2, 256, 128  # noqa: E741
F32, BF16 = np.float32, np.dtype(jnp.bfloat16)


def e2m1_weights(rng, n, k):
    """Bytes [E, n, k / 2], and the numbers they stand for."""
    data = rng.integers(0, 256, (E, n, k // 2), np.uint8)
    return data, packed_oracle.e2m1(np.stack([data & 15, data >> 4], axis=-1).reshape(E, n, k))


def words(factors):
    """Factors [E, n, groups] in tiles, four a word."""
    tiles = np.stack([swizzled(f) for f in factors])
    return np.ascontiguousarray(tiles).view(np.int32)


def mx_or_nvfp4(format):
    """The arguments of a call, and both weights in float64."""
    rng = np.random.default_rng(0)
    weights, lists, numbers = [], [], []
    for n, k in ((2 * I, H), (H, I)):
        if format == "mxfp8":
            bits = rng.integers(0, 126, (E, n, k), np.uint8)
            data, values = jnp.asarray(bits.view(jnp.float8_e4m3fn)), packed_oracle.E4M3[bits]
        else:
            data, values = e2m1_weights(rng, n, k)
        factors = rng.integers(100, 120, (E, n, k // GROUPS[format]), np.uint8)
        scales = packed_oracle.E4M3[factors] if format == "nvfp4" else np.exp2(factors - 127.0)
        total = rng.choice([0.25, 0.5, 1], E).astype(F32)
        weights.append(data)
        lists.append([words(factors), total])
        numbers.append(values * packed_oracle.spread(scales, k) * total[:, None, None])
    return weights, lists, numbers


def plain(q):
    return np.asarray(dequantize(q, dtype=jnp.float32), np.float64)


def check(experts, numbers, weights, lists):
    """The experts are the numbers, and give the arguments back."""
    assert (experts.order, experts.layout) == ("up_gate", "nk")
    for q, want in zip((experts.gate_up, experts.down), numbers, strict=True):
        np.testing.assert_array_equal(plain(q), want)
    *back, out = checkpoints.to_flashinfer(experts)
    for got, given in zip(back, weights, strict=True):
        assert_equal(np.asarray(got).view(np.uint8), np.asarray(given).view(np.uint8))
    for got, given in zip(out, lists, strict=True):
        assert_equal(got, np.asarray(given))


@pytest.mark.parametrize("format", ("mxfp4", "mxfp8"))
def test_mx(format):
    weights, lists, numbers = mx_or_nvfp4(format)
    lists = [a for pair in lists for a in pair]
    given = [w.view(np.int64) if format == "mxfp4" else w for w in weights]
    experts = checkpoints.from_flashinfer(*given, lists)
    assert experts.token_format == "mxfp8" and experts.down.format == format
    # A power of two moves from `global` to the factors: the numbers are the same.
    for q, want in zip((experts.gate_up, experts.down), numbers, strict=True):
        np.testing.assert_array_equal(plain(q), want)
    *back, out = checkpoints.to_flashinfer(experts)
    check(checkpoints.from_flashinfer(*back, out), numbers, weights, out)
    ones = [a if i % 2 == 0 else np.ones(E, F32) for i, a in enumerate(lists)]
    ungated = [n / g[:, None, None] for n, g in zip(numbers, lists[1::2], strict=True)]
    check(checkpoints.from_flashinfer(*weights, ones), ungated, weights, ones)


@pytest.mark.parametrize("of_expert", (False, True))
def test_nvfp4(of_expert):
    weights, lists, numbers = mx_or_nvfp4("nvfp4")
    per_x = F32(8)
    per_h = np.array([4, 16], F32) if of_expert else F32(4)
    (sf1, w1), (sf2, w2) = lists
    scales = [per_x, sf1, w1 / per_x, per_h, sf2, w2 / per_h]
    experts = checkpoints.from_flashinfer(*weights, scales)
    assert experts.token_format == "nvfp4" and float(experts.x_scale) == 0.125
    np.testing.assert_array_equal(experts.h_scale, 1 / per_h)
    check(experts, numbers, weights, scales)


def int4_interleaved(data):
    """`interleave_int4_weights_for_sm90_mixed_gemm_kernel`, thread by thread."""
    count, rows, width = data.shape
    source, out = data.view(np.uint16), np.zeros((count, rows, width // 2), np.uint16)
    for block in range(rows // 2):
        row = block // 8 * 16 + block % 8
        for partition in range(width * 2 // 64):
            for lane in range(16):
                to_row = row + lane % 8 // 4 * 8
                at = partition * 16 + lane // 8 * 8 + lane % 4 * 2
                for h in range(2):
                    out[:, to_row, at + h] = source[:, row + 8 * h, partition * 16 + lane]
    return out.view(np.uint8)


def w4a8():
    rng = np.random.default_rng(1)
    weights, lists, numbers = [], [], []
    for i, (n, k) in enumerate(((2 * I, H), (H, I))):
        data = rng.integers(0, 256, (E, n, k // 2), np.uint8)
        q = np.stack([data & 15, data >> 4], axis=-1).reshape(E, n, k).astype(np.int8)
        q = np.where(q >= 8, q - 16, q)
        scales = rng.uniform(0.01, 0.1, (E, n, k // 128)).astype(BF16)
        folded = np.zeros((E, n // 64, k // 128, 8, 8), BF16)
        for row in range(n):
            folded[:, row // 64, :, row % 8, row % 64 // 8] = scales[:, row]
        act = np.full(k, (4, 8)[i], BF16)
        alpha = rng.choice([0.25, 0.5], E).astype(F32)
        weights.append(int4_interleaved(data))
        lists.append((folded, act, act[:0], alpha))
        exact = (q * packed_oracle.spread(scales.astype(np.float64), k)).astype(BF16)
        numbers.append(exact.astype(np.float64) * (alpha * act[0].astype(F32))[:, None, None])
    return weights, [a for pair in zip(*lists, strict=True) for a in pair], numbers


def test_w4a8():
    weights, scales, numbers = w4a8()
    experts = checkpoints.from_flashinfer(*weights, scales)
    assert (experts.down.format, experts.token_format) == ("int4_g128", "e4m3")
    assert float(experts.x_scale) == 0.25 and float(experts.h_scale) == 0.125
    check(experts, numbers, weights, scales)
    half = [
        a.view(np.float16) if a.dtype == BF16 else a for a in scales
    ]  # as it takes them in fp16
    half[2] = half[3] = np.zeros(0, np.float16)
    experts = checkpoints.from_flashinfer(*weights, half)
    assert float(experts.x_scale) == 1
    np.testing.assert_array_equal(plain(experts.down), numbers[1] / 8)


def test_halves_are_swapped():
    weights, lists, numbers = mx_or_nvfp4("nvfp4")
    (sf1, w1), (sf2, w2) = lists
    experts = checkpoints.from_flashinfer(*weights, [F32(1), sf1, w1, F32(1), sf2, w2])
    gate_first = dataclasses.replace(experts, order="gate_up")
    fc1, *_, scales = checkpoints.to_flashinfer(gate_first)
    swapped = checkpoints.from_flashinfer(fc1, weights[1], scales)
    np.testing.assert_array_equal(plain(swapped.gate_up), np.roll(numbers[0], I, axis=1))


def test_refusals():
    weights, lists, _ = mx_or_nvfp4("nvfp4")
    (sf1, w1), (sf2, w2) = lists
    nvfp4 = [F32(1), sf1, w1, F32(1), sf2, w2]
    int4, int4_scales, _ = w4a8()
    uneven = int4_scales[2].copy()
    uneven[0] = 1
    small = [a.copy() for a in int4_scales]
    small[1][0, 1, 0, 2, 3] = 1e-9
    experts = checkpoints.from_flashinfer(*weights, nvfp4)

    def read(i, a):
        return checkpoints.from_flashinfer(*weights, [*nvfp4[:i], a, *nvfp4[i + 1 :]])

    def read_int4(i, a):
        return checkpoints.from_flashinfer(*int4, [*int4_scales[:i], a, *int4_scales[i + 1 :]])

    def write(**fields):
        return checkpoints.to_flashinfer(dataclasses.replace(experts, **fields))

    fc1, fc2 = weights
    for call, kind, message in (
        (lambda: read(0, np.ones(3, F32)), ValueError,
         "quant_scales[0].shape=[3] must be [2] (num_experts, or one number)"),
        (lambda: read(0, np.array([1, 2], F32)), NotImplementedError,
         "quant_scales[0][1]=2.0 must equal quant_scales[0][0]=1.0: a token is quantized once"),
        (lambda: jax.eval_shape(lambda a: read(0, a).x_scale, np.ones(E, F32)), TypeError,
         "quant_scales[0] of each expert must be known: call without jax.jit, or give one number"),
        (lambda: read(1, sf1[:, :100]), ValueError, "quant_scales[1] must hold 4096 bytes"),
        (lambda: read(1, sf1[:1]), ValueError, "quant_scales[1].shape=[1,256,16] must be [2,"),
        (lambda: read(2, F32(1)), ValueError, "quant_scales[2].shape=[] must be [2]"),
        (lambda: checkpoints.from_flashinfer(fc1[:, :192], fc2, nvfp4), NotImplementedError,
         "fc1_expert_weights must have halves of a multiple of 128 rows, not 96; the nearest legal:"
         " 128."),
        (lambda: checkpoints.from_flashinfer(int4[0][:, :, :96], int4[1], int4_scales), ValueError,
         "fc1_expert_weights must hold a positive multiple of 128 inputs (K) in int4_g128, not 192"
         "; the nearest legal: 128 and 256. Got fc1_expert_weights: u8[2,256,96]."),
        (lambda: checkpoints.from_flashinfer(*int4, [None] * 8), TypeError,
         "quant_scales[0] must be a JAX or NumPy array. Got quant_scales[0]: None."),
        (lambda: read(2, None), TypeError, "quant_scales[2] must be a JAX or NumPy array"),
        (lambda: checkpoints.from_flashinfer(fc1.view(np.int8), fc2, nvfp4), TypeError,
         "fc1_expert_weights.dtype=i8 must be u8"),
        (lambda: read_int4(2, uneven), NotImplementedError, "quant_scales[2] must be one number"),
        (lambda: read_int4(2, uneven[:3]), ValueError, "must have 256 elements, or none, not 3"),
        (lambda: read_int4(4, uneven), NotImplementedError, "quant_scales[4] must be empty"),
        (lambda: read_int4(0, int4_scales[0][:, :1]), ValueError, "quant_scales[0].shape="),
        (lambda: jax.eval_shape(lambda a: read_int4(2, a).x_scale, uneven), TypeError,
         "quant_scales[2] must be known: call without jax.jit"),
        (lambda: write(token_format=None, x_scale=None, h_scale=None), ValueError,
         "token_format=None must be 'nvfp4' with nvfp4 weights"),
        (lambda: write(h_scale=None), ValueError, "h_scale must be given for nvfp4"),
        (lambda: read(0, F32(0)), ValueError, "quant_scales[0]=0.0 must be positive and finite"),
        (lambda: read(3, F32(0)), ValueError, "quant_scales[3]=0.0 must be positive and finite"),
        (lambda: read(2, np.array([1, 0], F32)), ValueError,
         "quant_scales[2][1]=0.0 must be positive and finite"),
        (lambda: read(5, np.array([np.inf, 0], F32)), ValueError,
         "quant_scales[5][0]=inf must be positive and finite"),
        (lambda: checkpoints.from_flashinfer(
            *weights, [F32(2**-70), sf1, w1 * F32(2**-70), F32(1), sf2, w2]), ValueError,
         "quant_scales[2] * quant_scales[0]["),
        (lambda: read_int4(6, np.array([1, np.nan], F32)), ValueError,
         "quant_scales[6][1]=nan must be positive and finite"),
        (lambda: checkpoints.from_flashinfer(*int4, small, dtype="float16"), ValueError,
         "quant_scales[1][0,1,0,2,3]=9.968"),
        (lambda: write(x_scale=F32(0)), ValueError, "x_scale=0.0 must be positive and finite"),
        (lambda: read_int4(2, int4_scales[2] * 0), ValueError,
         "quant_scales[2] must be positive and finite"),
        (lambda: write(order="interleaved"), ValueError, "order='interleaved' must be 'up_gate'"),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(message)):
            call()
    mx, mx_lists, _ = mx_or_nvfp4("mxfp4")
    (sf1, w1), (sf2, w2) = mx_lists
    with pytest.raises(ValueError, match=r"quant_scales\[1\]\[0\]=-.* must be positive and finite"):
        checkpoints.from_flashinfer(*mx, [sf1, -w1, sf2, w2])
    read_mx = lambda w1: checkpoints.from_flashinfer(*mx, [sf1, w1, sf2, w2])  # noqa: E731
    broken = jax.jit(read_mx)(-w1)
    with pytest.raises(ValueError, match=r"gate_up.scales\[0\]=-.* must be positive and finite"):
        checkpoints.to_flashinfer(broken)


def apart(experts):
    """Gate and up, the second half of which is the gate, as two arrays."""
    q = experts.gate_up
    up, gate = (dataclasses.replace(q, values=v) for v in jnp.split(q.values, 2, axis=1))
    return dataclasses.replace(experts, gate_up=None, gate=gate, up=up, order="gate_up")


@pytest.mark.parametrize("format", ("mxfp4", "mxfp8", "nvfp4", "int4"))
def test_gate_and_up_are_joined(format):
    if format == "int4":
        weights, scales, numbers = w4a8()
    else:
        weights, lists, numbers = mx_or_nvfp4(format)
        one = [F32(1)] if format == "nvfp4" else []
        scales = [a for pair in lists for a in (*one, *pair)]
    experts = checkpoints.from_flashinfer(*weights, scales)
    np.testing.assert_array_equal(plain(experts.gate_up), numbers[0])
    two = apart(experts)
    for got, want in zip(
        jax.tree.leaves(checkpoints.to_flashinfer(two)),
        jax.tree.leaves(checkpoints.to_flashinfer(experts)),
        strict=True,
    ):
        assert_equal(got, want)
    other = dataclasses.replace(two, gate=dataclasses.replace(two.gate, scales=two.gate.scales * 3))
    with pytest.raises(
        ValueError, match=r"up.scales\[0\]=.* and gate.scales\[0\]=.* must be the s"
    ):
        checkpoints.to_flashinfer(other)


def test_float16_scales_of_a_trace_are_nan():
    """Nobody knows them there: neither 0 nor infinite numbers, but NaN."""
    weights, scales, _ = w4a8()
    scales[1][0, 1, 0, 2, 3] = 1e-9

    def read(scale):
        e = checkpoints.from_flashinfer(*weights, [scales[0], scale, *scales[2:]], dtype="float16")
        return e.down

    got = plain(jax.jit(read)(scales[1]))
    assert np.isnan(got[0, 64 + 26]).all() and np.isnan(got).sum() == I


def test_one_scale_for_each_expert_of_the_tokens():
    """FlashInfer takes [E] too; a token has one before it has experts."""
    weights, lists, numbers = mx_or_nvfp4("nvfp4")
    (sf1, w1), (sf2, w2) = lists
    scales = [np.full(E, 8, F32), sf1, w1 / 8, F32(4), sf2, w2 / 4]
    read = lambda: checkpoints.from_flashinfer(*weights, scales)  # noqa: E731
    experts = read()
    assert experts.x_scale.shape == () and float(experts.x_scale) == 0.125
    assert float(jax.jit(lambda: read().x_scale)()) == 0.125  # constants are known there too
    check(experts, numbers, weights, [F32(8), *scales[1:]])
