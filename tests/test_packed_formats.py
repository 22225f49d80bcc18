"""Packed weights: their bytes against plain loops, what they stand for, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import dequantize, quantize
from jaxmoe._formats import QUANTIZED
from jaxmoe._formats.codes import pack, unpack
from jaxmoe._testing import PACKED
from tests import packed_oracle as oracle


def test_every_format_has_an_oracle():
    assert set(PACKED) == oracle.FORMATS.keys()


@pytest.fixture(params=PACKED)
def name(request):
    return request.param


E, N = 2, 128


def draw(name, seed=0, num_experts=E, dtype=jnp.bfloat16):
    """Codes and everything else that a format is made of, and how that lies in strips."""
    rng = np.random.default_rng(seed)
    shape = oracle.FORMATS[name]
    k = 256 if shape.blocks != 1 else 192
    codes = rng.integers(0, 1 << shape.bits, (num_experts, N, k), np.uint8)
    groups = (num_experts, N, k // 64 // (shape.blocks or k // 64) * shape.groups)
    if name.startswith("mx"):
        exponents = rng.integers(40, 240, groups, np.uint8)
        strips = exponents - exponents.max(axis=(1, 2), keepdims=True) + np.uint8(253)
        return codes, (exponents,), (strips,)
    if name == "nvfp4":
        scales = rng.integers(1, 127, groups, np.uint8)
        bits = oracle.E4M3[scales].astype(np.float32).view(np.uint32) >> 20
        strips = (bits - 944).astype(np.uint8)
        codes |= 1  # no group of zeros, whose scale is not kept
        return codes, (scales, rng.uniform(0.5, 2, num_experts).astype(np.float32)), (strips,)
    if name == "int8_channel":
        return codes.view(np.int8), (rng.uniform(0.5, 2, (num_experts, N)).astype(np.float32),), ()
    scales = rng.uniform(0.01, 2, groups).astype(jnp.dtype(dtype))
    zeros = (rng.integers(0, 16, groups, np.uint8),) if shape.zeros else ()
    return codes, (scales, *zeros), (scales, *zeros)


def meaning(name, codes, parts):
    """The weights in float64, before the rounding of int4."""
    k = codes.shape[-1]
    if name.startswith("mx"):
        values = oracle.e2m1(codes) if name == "mxfp4" else oracle.E4M3[codes]
        return values * np.ldexp(1.0, oracle.spread(parts[0], k).astype(np.int32) - 127)
    if name == "nvfp4":
        scales, common = oracle.spread(oracle.E4M3[parts[0]], k), parts[1].astype(np.float64)
        return oracle.e2m1(codes) * scales * common[:, None, None]
    if name == "int8_channel":
        return codes * parts[0].astype(np.float64)[..., None]
    zeros = oracle.spread(parts[1], k).astype(np.int32) if len(parts) > 1 else 8
    return (codes.astype(np.int32) - zeros) * oracle.spread(parts[0].astype(np.float64), k)


def test_bytes_are_those_of_plain_loops_and_come_back(name):
    codes, parts, strips = draw(name)
    q = pack(name, codes, *parts, weight_layout="kn")
    want = oracle.values_of(name, codes.view(np.uint8), *strips)
    np.testing.assert_array_equal(np.asarray(q.values), want, strict=True)
    assert q.shape == (E, codes.shape[2], N) and q.dtype == jnp.bfloat16
    for got, given in zip(unpack(q), (codes, *parts), strict=True):
        np.testing.assert_array_equal(np.asarray(got), given, strict=True)
    assert QUANTIZED[name].stored_shape(codes.shape) == q.values.shape
    assert QUANTIZED[name].weight_shape(q.values.shape) == codes.shape


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_what_they_stand_for(name, dtype):
    codes, parts, _ = draw(name, 1, dtype=dtype)
    q = pack(name, codes, *parts, weight_layout="nk", dtype=dtype)
    want = meaning(name, codes, parts)
    if name.startswith("int4"):  # rounded once, to the dtype of the array
        want = want.astype(jnp.dtype(dtype))
    got = jax.jit(lambda q: dequantize(q, dtype=jnp.float32))(q)
    np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32), strict=True)


def nearest_e2m1(x):
    """The nearest e2m1, ties to the even code; in float64."""
    distance = np.abs(np.abs(x)[..., None] - oracle.E2M1)
    closest = distance == distance.min(axis=-1, keepdims=True)
    even = closest & (np.arange(8) % 2 == 0)
    code = np.where(even.any(axis=-1), even.argmax(axis=-1), closest.argmax(axis=-1))
    return np.copysign(oracle.E2M1[code], x)


def expected(name, w, dtype):
    """What is left of w [E, N, K] after quantization, float64, by the formulas of the docs."""
    shape, f32 = oracle.FORMATS[name], np.float32
    k = w.shape[-1]
    count = k // 64 // (shape.blocks or k // 64) * shape.groups
    groups = w.astype(f32).reshape(*w.shape[:2], count, -1)
    most = np.abs(groups).max(axis=-1)
    divided = lambda scale: np.where(scale > 0, groups / np.where(scale > 0, scale, 1), 0)  # noqa: E731
    if name.startswith("mx"):
        top = 2 if name == "mxfp4" else 8
        scale = np.where(most > 0, 2.0 ** (np.floor(np.log2(np.maximum(most, 1e-30))) - top), 1)
        scaled = groups / scale[..., None]
        if name == "mxfp4":
            return (nearest_e2m1(scaled) * scale[..., None]).reshape(w.shape)
        values = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return (values * scale[..., None]).reshape(w.shape)
    if name == "nvfp4":
        common = most.max(axis=(1, 2), keepdims=True) / f32(2688)
        scale = (most / f32(6) / common).astype(ml_dtypes.float8_e4m3fn).astype(f32)
        values = nearest_e2m1(divided((scale * common)[..., None]))
        return (values * scale[..., None] * common[..., None]).astype(f32).reshape(w.shape)
    if name == "int8_channel":
        scale = most[:, :, 0] / f32(127)
        q = np.round(divided(scale[:, :, None, None]))
        return (q.reshape(w.shape) * scale[..., None]).astype(f32)
    low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    scale = (high - low) / f32(15) if shape.zeros else most / f32(7)
    scale = scale.astype(dtype).astype(f32)[..., None]
    zero = np.round(-low[..., None] / np.where(scale > 0, scale, 1)) if shape.zeros else 8
    code = np.clip(np.round(divided(scale)) + zero, 0, 15)
    return ((code - zero) * scale).astype(dtype).reshape(w.shape)


@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_quantize_is_its_formula(name, layout):
    rng = np.random.default_rng(3)
    dtype = jnp.dtype(jnp.bfloat16 if layout == "kn" else jnp.float16)
    w = (rng.standard_normal((2, 64, 256)) * rng.uniform(0.1, 4, (2, 64, 1))).astype(dtype)
    w[0, :, :128] = 0  # groups of zeros
    w[0, 0, 128:] = 0
    given = jnp.asarray(w.swapaxes(1, 2) if layout == "kn" else w)
    q = quantize(given, name, weight_layout=layout)
    jitted = jax.jit(lambda w: quantize(w, name, weight_layout=layout))(given)
    for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert q.shape == given.shape and q.dtype == dtype
    got = np.asarray(dequantize(q, dtype=jnp.float32))
    got = got.swapaxes(1, 2) if layout == "kn" else got
    np.testing.assert_array_equal(got, expected(name, w, dtype).astype(np.float32))


def test_every_exponent_of_mx():
    """Each code with each exponent that is not too far below the largest, and NaN."""
    for name, top in (("mxfp4", 252), ("mxfp8", 140)):
        count = 1 << oracle.FORMATS[name].bits
        exponents = np.arange(256, dtype=np.uint8)
        exponents = np.where(exponents > top, np.where(exponents == 255, 255, top), exponents)
        exponents = exponents.astype(np.uint8)
        codes = np.resize(np.arange(count, dtype=np.uint8), (1, 64, 256 * 32))
        codes[0] = np.roll(np.resize(np.arange(count, dtype=np.uint8), 256 * 32), 1)
        given = np.broadcast_to(exponents, (1, 64, 256))
        q = pack(name, codes, given, weight_layout="nk")
        same_codes, same = map(np.asarray, unpack(q))
        dead = np.repeat(given == 255, 32, axis=-1)
        np.testing.assert_array_equal(same_codes, np.where(dead, 0, codes))
        np.testing.assert_array_equal(same, given)
        want = np.where(dead, np.nan, meaning(name, codes, (given,)))
        got = np.asarray(dequantize(q, dtype=jnp.float32))
        tiny = np.abs(want) < 2.0**-126  # which a device may make zeros
        np.testing.assert_array_equal(np.where(tiny, 0, got), np.where(tiny, 0, want))
        assert (np.abs(got[tiny]) < 2.0**-126).all()


def test_exponents_far_below_the_largest_are_zeros():
    exponents = np.zeros((1, 64, 2), np.uint8)
    exponents[..., 1] = 254
    q = pack("mxfp4", np.full((1, 64, 64), 7, np.uint8), exponents, weight_layout="nk")
    got = np.asarray(dequantize(q, dtype=jnp.float32))[0, 0]
    assert (got[:32] == 0).all() and np.isinf(got[32:]).all()  # 6 * 2^127
    no_scale = pack("mxfp4", np.full((1, 64, 64), 2, np.uint8), exponents * 0, weight_layout="nk")
    assert float(no_scale.scales[0]) == 2.0**-126


def test_every_scale_of_nvfp4():
    """Subnormal numbers, zero and NaN among them; a sign becomes that of the values."""
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8), (1, 64, 256))
    codes = np.resize(np.arange(16, dtype=np.uint8), (1, 64, 256 * 16))
    q = pack("nvfp4", codes, scales, np.float32([1.5]), weight_layout="nk")
    got = np.asarray(dequantize(q, dtype=jnp.float32))
    want = meaning("nvfp4", codes, (scales, np.float32([1.5])))
    np.testing.assert_array_equal(got, want.astype(np.float32))
    again = pack("nvfp4", *unpack(q), weight_layout="nk")
    np.testing.assert_array_equal(np.asarray(again.values), np.asarray(q.values))


def test_nan_and_infinity_stay_in_their_group(name):
    w = np.random.default_rng(0).standard_normal((1, 64, 256)).astype(jnp.bfloat16)
    w[0, 3, 70] = np.nan
    w[0, 5, 70] = np.inf
    got = np.asarray(dequantize(quantize(jnp.asarray(w), name, weight_layout="nk")), np.float32)
    nan = np.isnan(got)
    assert nan[0, 3, 70] and nan.sum() == nan[0, 3].sum()
    assert np.isfinite(got[0, 5]).all() and got[0, 5, 70] > 1
