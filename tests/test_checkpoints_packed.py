"""Readers of 4-bit checkpoints against the numbers that their files stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import Experts, Routing, checkpoints, dequantize, moe_mlp
from jaxmoe._testing import assert_equal

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E, N, K = 2, 128, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble, from the lowest bits on


def rng():
    return np.random.default_rng(0)


def numbers(q):
    return np.asarray(dequantize(q, dtype=jnp.float32))


def words(codes, order=tuple(range(8))):
    """Eight codes of the last axis a word, that of order[i] in nibble i."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    word = sum(parts[..., column] << np.uint32(4 * i) for i, column in enumerate(order))
    return word.astype(np.uint32).view(np.int32)


def mxfp4():
    """Bytes, exponents, and the weights."""
    codes = rng().integers(0, 16, (E, N, K), np.uint8)
    scale = rng().integers(100, 140, (E, N, K // 32), np.uint8)
    weight = codes[..., 0::2] | codes[..., 1::2] << 4
    return weight, scale, E2M1[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, -1)


@pytest.mark.parametrize("kind", ("gpt-oss", "compressed-tensors", "DeepSeek-V4"))
def test_mxfp4(kind):
    weight, scale, want = mxfp4()
    given = {
        "gpt-oss": (weight.reshape(E, N, K // 32, 16), scale),
        "compressed-tensors": (weight, scale),
        "DeepSeek-V4": (weight.view(np.int8), scale.view(ml_dtypes.float8_e8m0fnu)),
    }[kind]
    q = jax.jit(checkpoints.from_mxfp4)(*map(jnp.asarray, given))
    assert (q.format, q.layout, q.shape) == ("mxfp4", "nk", (E, N, K))
    np.testing.assert_array_equal(numbers(q), want)
    for back, was in zip(checkpoints.to_mxfp4(q), (weight, scale), strict=True):
        assert_equal(back, was)


@pytest.mark.parametrize("dtype", (np.uint8, ml_dtypes.float8_e8m0fnu))
def test_mxfp8(dtype):
    codes = rng().integers(0, 126, (E, N, K), np.uint8) | rng().choice((0, 128), (E, N, K))
    weight = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = rng().integers(100, 140, (E, N, K // 32), np.uint8)
    q = jax.jit(checkpoints.from_mxfp8)(weight, jnp.asarray(scale.view(dtype)))
    assert (q.format, q.layout, q.shape) == ("mxfp8", "nk", (E, N, K))
    powers = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, -1)
    np.testing.assert_array_equal(numbers(q), weight.astype(np.float64) * powers)


@pytest.mark.parametrize("name", ("weight_scale_2", "weight_global_scale"))
def test_nvfp4(name):
    codes = rng().integers(0, 16, (E, N, K), np.uint8)
    scale = rng().integers(1, 127, (E, N, K // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    whole = np.array([[0.25], [8.0]], np.float32)
    q = checkpoints.from_nvfp4(codes[..., 0::2] | codes[..., 1::2] << 4, scale, **{name: whole})
    factor = whole if name == "weight_scale_2" else 1 / whole
    want = E2M1[codes] * np.repeat(scale.astype(np.float32), 16, -1) * factor[:, :, None]
    np.testing.assert_array_equal(numbers(q), want)


@pytest.mark.parametrize("name", ("weight_scale_2", "weight_global_scale"))
@pytest.mark.parametrize("number", (0, -1, np.inf, np.nan, 1e-39, 3e38))
def test_global_scales_of_nvfp4_that_are_none(name, number):
    weight, scale = U8, E4M3
    whole = np.array([[1], [number]], np.float32)
    with pytest.raises(ValueError, match=rf"{name}\[1,0\]=.* must be positive and finite"):
        checkpoints.from_nvfp4(weight, scale, **{name: whole})
    read = lambda whole: checkpoints.from_nvfp4(weight, scale, **{name: whole})  # noqa: E731
    assert jax.eval_shape(read, whole).format == "nvfp4"
    assert jax.jit(lambda: read(np.ones(E, np.float32)))().format == "nvfp4"


def scales_of(group, dtype):
    return rng().uniform(0.5, 2, (E, N, K // group)).astype(dtype)


@pytest.mark.parametrize(
    ("group", "dtype"),
    ((32, ml_dtypes.bfloat16), (64, np.float16), (128, ml_dtypes.bfloat16), (K, np.float16)),
)
def test_int4(group, dtype):
    codes = rng().integers(0, 16, (E, N, K))
    scales = scales_of(group, dtype)
    q = checkpoints.from_int4(words(codes), scales)
    assert q.dtype == dtype
    step = np.repeat(scales, group, -1).astype(np.float32)
    np.testing.assert_array_equal(numbers(q), ((codes - 8) * step).astype(dtype).astype(np.float32))


def test_scales_that_a_dtype_cannot_hold_are_nan():
    codes = rng().integers(0, 16, (E, N, K))
    scales = np.full((E, N, K // 32), 0.5, ml_dtypes.bfloat16)
    scales[0, 1, :3] = 1e-9, 1e6, 0
    q = checkpoints.from_int4(words(codes), scales, dtype="float16")
    nan = np.zeros((E, N, K), bool)
    nan[0, 1, :64] = True
    np.testing.assert_array_equal(np.isnan(numbers(q)), nan)
    assert (numbers(q)[0, 1, 64:96] == 0).all()


def test_fp16_scales_in_bf16_round_twice():
    """The largest errors, and their root mean squares, that docs/numerics.md has: every scale."""
    scales = (1 + np.arange(1024) / 1024).astype(np.float16).reshape(1, 64, 16)
    codes = np.broadcast_to(np.arange(32) % 16, (1, 64, 16, 32)).reshape(1, 64, 512)
    exact = (codes - 8.0) * np.repeat(scales, 32, -1)
    some = exact != 0

    def errors(w):
        e = np.abs(np.asarray(w, np.float64) - exact)[some] / np.abs(exact[some])
        return e.max(), np.sqrt((e**2).mean())

    halves = numbers(checkpoints.from_int4(words(codes), scales))
    twice = numbers(checkpoints.from_int4(words(codes), scales, dtype="bfloat16"))
    once = exact.astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(errors(halves), (4.9e-4, 1.6e-4), rtol=0.03)
    np.testing.assert_allclose(errors(twice), (7.3e-3, 2.1e-3), rtol=0.03)
    np.testing.assert_allclose(errors(once), (3.9e-3, 1.65e-3), rtol=0.03)


def with_zeros(group):
    """Codes and zero points of [E, N, K], and the weights of fp16 scales."""
    codes = rng().integers(0, 16, (E, N, K))
    zeros = rng().integers(0, 16, (E, N, K // group))
    scales = scales_of(group, np.float16)
    spread = lambda a: np.repeat(a, group, -1).astype(np.float32)  # noqa: E731
    want = (codes - spread(zeros)) * spread(scales)
    return codes, zeros, scales, want.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("group", (32, 128, K))
def test_gptq(group):
    codes, zeros, scales, want = with_zeros(group)
    turn = lambda a: np.ascontiguousarray(a.swapaxes(1, 2))  # noqa: E731
    qweight, qzeros = turn(words(codes)), words(turn((zeros - 1) % 16))
    q = checkpoints.from_gptq(qweight, qzeros, turn(scales), np.arange(K) // group)
    np.testing.assert_array_equal(numbers(q), want)
    q = checkpoints.from_gptq(
        qweight, words(turn(zeros)), turn(scales), checkpoint_format="gptq_v2"
    )
    np.testing.assert_array_equal(numbers(q), want)
    if group < K:
        shuffled = rng().permutation(np.arange(K) // group)
        with pytest.raises(NotImplementedError, match=r"group: jaxmoe.checkpoints.dequantize_gptq"):
            checkpoints.from_gptq(qweight, qzeros, turn(scales), shuffled)


@pytest.mark.parametrize("group", (32, 64, 128, K))
def test_zero_points_of_compressed_tensors(group):
    """Signed codes and zero points, w = (q - z) * s, are stored with 8 added, z along n."""
    codes, zeros, scales, want = with_zeros(group)
    signed, signed_zeros = codes - 8, zeros - 8
    packed = words(signed + 8)
    packed_zeros = np.zeros((E, N // 8, K // group), np.uint32)
    for n in range(N):
        bits = (signed_zeros[:, n] + 8).astype(np.uint32)
        packed_zeros[:, n // 8] |= bits << np.uint32(4 * (n % 8))
    packed_zeros = packed_zeros.view(np.int32)
    q = jax.jit(checkpoints.from_int4)(packed, scales, weight_zero_point=packed_zeros)
    by = {32: "g32", 64: "g64", 128: "g128", K: "channel"}[group]
    assert (q.format, q.layout, q.dtype) == (f"int4_{by}_zp", "nk", np.float16)
    np.testing.assert_array_equal(numbers(q), want)
    middle = np.full_like(packed_zeros, 0x88888888 - 2**32)
    q = checkpoints.from_int4(packed, scales, weight_zero_point=middle)
    np.testing.assert_array_equal(numbers(q), numbers(checkpoints.from_int4(packed, scales)))


def test_scales_that_mxfp4_cannot_hold():
    weight, scale, _ = mxfp4()
    q = checkpoints.from_mxfp4(weight, scale)
    for factor, fine in ((0.25, True), (1.5, False), (0.0, False), (-1.0, False), (np.inf, False)):
        other = dataclasses.replace(q, scales=q.scales * jnp.array([1.0, factor]))
        traced = jax.jit(checkpoints.to_mxfp4)(other)
        if fine:
            back = checkpoints.from_mxfp4(*checkpoints.to_mxfp4(other))
            np.testing.assert_array_equal(numbers(back)[1], numbers(q)[1] * factor)
            continue
        with pytest.raises(ValueError, match=r"q.scales\[1\]=.* must be a power of two"):
            checkpoints.to_mxfp4(other)
        assert (traced[1][1] == 255).all() and not (traced[1][0] == 255).any()


def in_order(group, zeros=True):
    """As `with_zeros`, with groups of any inputs, other ones in each expert: their numbers, too."""
    codes, points, scales, _ = with_zeros(group)
    g_idx = np.stack([rng().permutation(np.arange(K) // group), np.arange(K)[::-1] // group])
    of = lambda a: np.take_along_axis(a, g_idx[:, None], -1).astype(np.float64)  # noqa: E731
    want = (codes - (of(points) if zeros else 8)) * of(scales)
    return codes, points, scales, g_idx.astype(np.int32), want


@pytest.mark.parametrize("dtype", (None, "bfloat16", "float32"))
@pytest.mark.parametrize("group", (32, 128, K))
def test_sorted_columns_of_gptq(group, dtype):
    """In any order, and of groups of different sizes, which `g_idx` alone tells."""
    codes, zeros, scales, g_idx, want = in_order(group)
    turn = lambda a: np.ascontiguousarray(a.swapaxes(1, 2))  # noqa: E731
    options = {"checkpoint_format": "gptq_v2", "dtype": dtype}
    args = turn(words(codes)), words(turn(zeros)), turn(scales)
    w = checkpoints.dequantize_gptq(*args, g_idx, **options)
    assert_equal(w, want.astype(dtype or np.float16))
    less = words(turn((zeros - 1) % 16))
    traced = jax.jit(lambda *a: checkpoints.dequantize_gptq(*a, dtype=dtype))
    assert_equal(traced(args[0], less, args[2], g_idx), w)
    g_idx = np.minimum(g_idx, max(K // group - 2, 0))
    of = lambda a: np.take_along_axis(a, g_idx[:, None], -1).astype(np.float64)  # noqa: E731
    want = ((codes - of(zeros)) * of(scales)).astype(dtype or np.float16)
    assert_equal(checkpoints.dequantize_gptq(*args, g_idx, **options), want)
    same = checkpoints.dequantize_gptq(*args, **options)
    assert_equal(same, checkpoints.dequantize_gptq(*args, np.arange(K) // group, **options))
    if dtype is None:
        assert_equal(same, dequantize(checkpoints.from_gptq(*args, checkpoint_format="gptq_v2")))


@pytest.mark.parametrize("zeros", (True, False))
@pytest.mark.parametrize("group", (32, 128))
def test_sorted_columns_of_compressed_tensors(group, zeros):
    codes, points, scales, g_idx, want = in_order(group, zeros)
    turn = lambda a: np.ascontiguousarray(a.swapaxes(1, 2))  # noqa: E731
    named = {"weight_zero_point": turn(words(turn(points)))} if zeros else {}
    args = words(codes), scales
    w = checkpoints.dequantize_int4(*args, g_idx, **named, dtype="float32")
    assert_equal(w, want.astype(np.float32))
    with pytest.raises(NotImplementedError, match="checkpoints.dequantize_int4 reads sorted"):
        checkpoints.from_int4(*args, g_idx, **named)
    unset = g_idx.copy()
    unset[1] = -1  # which compressed-tensors has in the place of neighbours
    w = checkpoints.dequantize_int4(*args, unset, **named)
    assert_equal(jax.jit(lambda *a: checkpoints.dequantize_int4(*a, **named))(*args, unset), w)
    assert_equal(w[0], want[0].astype(np.float16))
    q = checkpoints.from_int4(*args, np.full((E, K), -1), **named)
    assert_equal(w[1], dequantize(q)[1])


@pytest.mark.parametrize(
    ("g_idx", "error", "message"),
    [
        (np.arange(K - 1), ValueError, r"g_idx must be \[256\] or \[2, 256\]"),
        (np.full(K, 8), ValueError, "g_idx must hold numbers of 8 groups"),
        (np.full(K, -1), ValueError, "g_idx must hold numbers of 8 groups"),
        (np.zeros(K), TypeError, "g_idx.dtype=f64 must be i32 or i64"),
    ],
)
def test_numbers_that_are_no_groups(g_idx, error, message):
    scales = np.ones((E, 8, N), np.float16)
    args = WORDS.swapaxes(1, 2), np.zeros((E, 8, N // 8), np.int32), scales
    with pytest.raises(error, match=f"jaxmoe.checkpoints.dequantize_gptq: {message}"):
        checkpoints.dequantize_gptq(*args, g_idx)
    if error is ValueError and g_idx.size == K:
        w = jax.jit(checkpoints.dequantize_gptq)(*args, g_idx)
        assert np.isnan(w).all()


@pytest.mark.parametrize("group", (64, 128))
def test_awq(group):
    codes, zeros, scales, want = with_zeros(group)
    turn = lambda a: np.ascontiguousarray(a.swapaxes(1, 2))  # noqa: E731
    args = words(turn(codes), AWQ_ORDER), words(turn(zeros), AWQ_ORDER), turn(scales)
    np.testing.assert_array_equal(numbers(checkpoints.from_awq(*args)), want)


def test_a_layer_of_gpt_oss():
    """From the tensors of a file to the result of the layer, that of its weights in float32."""
    hidden, inter = 64, 64
    make = rng()
    blocks = lambda n, k: make.integers(0, 256, (E, n, k // 32, 16), np.uint8)  # noqa: E731
    scales = lambda n, k: make.integers(118, 124, (E, n, k // 32), np.uint8)  # noqa: E731
    first = checkpoints.from_mxfp4(blocks(2 * inter, hidden), scales(2 * inter, hidden))
    down = checkpoints.from_mxfp4(blocks(hidden, inter), scales(hidden, inter))
    static = {"order": "interleaved", "layout": "nk"}
    x = make.standard_normal((5, hidden)).astype(np.float32)
    routing = Routing(jnp.zeros((5, 1), jnp.int32), jnp.ones((5, 1)))
    plain = Experts(gate_up=numbers(first), down=numbers(down), **static)
    got = moe_mlp(x, routing, Experts(gate_up=first, down=down, **static), num_experts=E)
    want = moe_mlp(x, routing, plain, num_experts=E)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


U8 = np.zeros((E, N, K // 2), np.uint8)
WORDS = np.zeros((E, N, K // 8), np.int32)
BF16 = np.ones((E, N, K // 32), ml_dtypes.bfloat16)
E4M3 = np.ones((E, N, K // 16), ml_dtypes.float8_e4m3fn)
AWQ_WORDS = np.zeros((E, K, N // 8), np.int32)
AWQ_SCALES = np.ones((E, 2, N), np.float16)
ERRORS = (
    ("from_mxfp4", (U8.astype(np.int32), U8), {}, TypeError, "weight.dtype=i32 must be u8 or i8"),
    ("from_mxfp4", (U8[0], U8), {}, ValueError, "weight must have 3 axes [E,N,K/2], not 2"),
    (
        "from_mxfp4",
        (U8, U8[..., :4]),
        {},
        ValueError,
        "scale.shape=[2,128,4] must be [2,128,8] (a scale for 32 of K=256)",
    ),
    (
        "from_mxfp4",
        (U8.reshape(E, N, 16, 8), U8),
        {},
        ValueError,
        "weight.shape=[2,128,16,8] must be [2,128,16,16] ([E, N, K / 32, 16])",
    ),
    (
        "from_gptq",
        (WORDS.swapaxes(1, 2), np.zeros((E, 2, N // 8), np.int32), BF16[..., :2].swapaxes(1, 2)),
        {"g_idx": np.arange(K - 1) // 128},
        ValueError,
        "g_idx must be [256] or [2, 256] (K, or E and K)",
    ),
    (
        "from_gptq",
        (WORDS.swapaxes(1, 2), np.zeros((E, 4, N // 8), np.int32), BF16[..., :2].swapaxes(1, 2)),
        {},
        ValueError,
        "qzeros.shape=[2,4,16] must be [2,2,16] ([E, K / g, N / 8], by qweight and scales)",
    ),
    (
        "from_awq",
        (AWQ_WORDS, AWQ_WORDS[:, :2, :8], AWQ_SCALES),
        {},
        ValueError,
        "qzeros.shape=[2,2,8] must be [2,2,16] ([E, K / g, N / 8], by qweight and scales)",
    ),
    (
        "from_int4",
        (WORDS[:, :96], BF16[:, :96]),
        {},
        ValueError,
        "weight_packed must hold a positive multiple of 64 outputs (N) in int4_g32, not 96; the "
        "nearest legal: 64 and 128. Got weight_packed: i32[2,96,32].",
    ),
    (
        "from_awq",
        (AWQ_WORDS[..., :12], AWQ_WORDS[:, :2, :12], AWQ_SCALES[..., :96]),
        {},
        ValueError,
        "qweight must hold a positive multiple of 64 outputs (N) in int4_g128_zp, not 96; the ",
    ),
    (
        "from_mxfp4",
        (U8[..., :48], U8[..., :3]),
        {},
        ValueError,
        "weight must hold a positive multiple of 64 inputs (K) in mxfp4, not 96; the nearest legal"
        ": 64 and 128. Got weight: u8[2,128,48].",
    ),
    ("from_mxfp8", (U8, U8), {}, TypeError, "weight.dtype=u8 must be f8_e4m3fn"),
    (
        "from_nvfp4",
        (U8, E4M3),
        {},
        ValueError,
        "weight_scale_2 or weight_global_scale must be given, one of them",
    ),
    (
        "from_nvfp4",
        (U8, E4M3),
        {"weight_scale_2": np.ones(3, np.float32)},
        ValueError,
        "weight_scale_2.shape=[3] must be [2] (num_experts)",
    ),
    (
        "from_int4",
        (WORDS, BF16[..., :3]),
        {},
        ValueError,
        "weight_scale must hold a scale for each 32, 64, 128 or all of K=256 of [2, 128] rows",
    ),
    (
        "from_int4",
        (WORDS, BF16),
        {"weight_zero_point": np.zeros((E, N, K // 32 // 8), np.int32)},
        ValueError,
        "weight_zero_point.shape=[2,128,1] must be [2,16,8] ([E, N / 8, K / g])",
    ),
    (
        "from_int4",
        (WORDS, BF16),
        {"weight_zero_point": np.zeros((E, N // 8, K // 32), np.int8)},
        TypeError,
        "weight_zero_point.dtype=i8 must be i32",
    ),
    (
        "from_int4",
        (WORDS, BF16.astype(np.float32)),
        {},
        TypeError,
        "weight_scale.dtype=f32 must be bf16 or f16",
    ),
)


@pytest.mark.parametrize(("name", "args", "kwargs", "kind", "message"), ERRORS)
def test_errors(name, args, kwargs, kind, message):
    with pytest.raises(kind) as error:
        getattr(checkpoints, name)(*args, **kwargs)
    assert str(error.value).startswith(f"jaxmoe.checkpoints.{name}: {message}")
