"""Quantization against an oracle written from the formulas, value by value."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe._testing import FP8

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TINY = np.float32(2.0**-126)


def fp8_table(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> np.ndarray:
    """The non-negative finite numbers in the order of their codes, from the definition."""
    codes = np.arange(count)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    assert exponent.max() < 1 << exponent_bits
    fraction = mantissa / (1 << mantissa_bits)
    normal = 2.0 ** (exponent - bias) * (1 + fraction)
    return np.where(exponent == 0, 2.0 ** (1 - bias) * fraction, normal)


# e4m3fn has no infinity, its last code is NaN; e5m2's last four are infinity and NaN.
TABLES = {"e4m3": fp8_table(4, 3, 7, 127), "e5m2": fp8_table(5, 2, 15, 124)}
LIMITS = {name: table[-1] for name, table in TABLES.items()}


def to_fp8(y: np.ndarray, element_type: str) -> np.ndarray:
    """Rounds to the nearest number of the table, ties to the even code; saturates; keeps NaN."""
    table = TABLES[element_type]
    size = np.minimum(np.abs(y).astype(np.float64), table[-1])
    above = np.clip(np.searchsorted(table, np.where(np.isnan(y), 0, size)), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    rounded = np.where(up, high, low)
    return np.where(np.isnan(y), np.nan, np.copysign(rounded, y))


def shared(shape: tuple[int, ...], format: str, tokens: bool):
    """Yields (index of a scale, slices of the elements that share it) of stored values."""
    *first, k = shape
    if format == "fp8_tensor":
        yield from [((), ...)] if tokens else (((e,), e) for e in range(shape[0]))
    elif format == "fp8_channel":
        yield from ((index, index) for index in np.ndindex(*first))
    elif tokens:
        for r, g in np.ndindex(shape[0], -(-k // 128)):
            yield (r, g), (r, slice(g * 128, g * 128 + 128))
    else:
        for e, n, g in np.ndindex(shape[0], -(-shape[1] // 128), -(-k // 128)):
            block = (slice(n * 128, n * 128 + 128), slice(g * 128, g * 128 + 128))
            yield (e, n, g), (e, *block)


def oracle(x, format, layout, element_type="e4m3", scale=None, scale_format="float32"):
    """(values, scales, dequantized in float64) of the array, loops and NumPy alone."""
    x = np.asarray(x).astype(np.float32)
    stored = x.swapaxes(1, 2) if layout == "kn" else x
    spread, scales = np.ones(stored.shape, np.float32), {}
    limit = np.float32(LIMITS[element_type])
    for index, where in shared(stored.shape, format, layout == "tokens"):
        part = stored[where]
        finite = np.abs(part[np.isfinite(part)])
        if scale is None:
            s = np.maximum(finite.max(initial=0) / limit, TINY)
            if scale_format == "e8m0":
                fraction, exponent = np.frexp(s)
                s = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        else:
            s = scale[index]
        spread[where], scales[index] = s, s
    scaled = stored * (np.float32(1) / spread)
    values = to_fp8(np.clip(scaled, -limit, limit), element_type)
    ends = np.max(list(scales), axis=0) + 1 if scales and () not in scales else ()
    out = np.zeros(np.asarray(ends, int), np.float32)
    for index, s in scales.items():
        out[index] = s
    dequantized = values * spread
    return values, out, dequantized.swapaxes(1, 2) if layout == "kn" else dequantized


@functools.cache
def compiled(format, layout, **options):
    """Quantizes under jit, which compiles once what plain calls compile op by op."""
    if layout == "tokens":
        return jax.jit(lambda x, s: jaxmoe.quantize_tokens(x, format, scale=s, **options))
    named = {"weight_layout": layout} | options
    return jax.jit(lambda x, s: jaxmoe.quantize(x, format, scale=s, **named))


def quantize(x, format, layout, scale=None, **options):
    return compiled(format, layout, **options)(x, scale)


dequantize = jax.jit(jaxmoe.dequantize, static_argnames="dtype")


def with_outliers(shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
    return jax.device_put(x.astype(np.float32).astype(jnp.dtype(dtype)))


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_oracle(x, format, layout, **options):
    values, scales, dequantized = oracle(x, format, layout, **options)
    q = quantize(x, format, layout, **options)
    e5m2 = options.get("element_type") == "e5m2"
    assert q.values.dtype == (ml_dtypes.float8_e5m2 if e5m2 else ml_dtypes.float8_e4m3fn)
    assert q.scales.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(q.scales), scales)
    np.testing.assert_array_equal(np.asarray(q.values).astype(np.float64), values)
    assert q.shape == x.shape and q.ndim == x.ndim and q.dtype == x.dtype
    assert (q.format, q.layout) == (format, layout)
    back, out = dequantize(q, dtype=F32), dequantize(q)
    np.testing.assert_array_equal(np.asarray(back), dequantized.astype(np.float32))
    assert same_bits(out, dequantized.astype(np.float32).astype(np.dtype(x.dtype)))
    return q


@pytest.mark.parametrize(("layout", "dtype"), [("kn", BF16), ("nk", F16), ("tokens", F32)])
@pytest.mark.parametrize("format", FP8)
def test_matches_the_formulas(format, layout, dtype) -> None:
    shape = (130, 257) if layout == "tokens" else (2, 130, 257)
    assert_oracle(with_outliers(shape, dtype=dtype), format, layout)


# Below, at and above one block; gpt-oss's width, which has a partial block; nothing at all.
EDGES = ((1, 1), (127, 129), (128, 128), (129, 1), (3, 2880), (0, 5), (5, 0))


@pytest.mark.parametrize("shape", EDGES)
def test_edge_shapes(shape) -> None:
    for format in FP8 if 0 in shape else ("fp8_block",):
        assert_oracle(with_outliers((1, *shape), 1), format, "nk")
        assert_oracle(with_outliers(shape, 2), format, "tokens")
    q = quantize(with_outliers((1, *shape), 1), "fp8_block", "kn")
    assert q.scales.shape == (1, -(-shape[1] // 128), -(-shape[0] // 128))


@pytest.mark.parametrize(
    ("format", "layout"),
    [("fp8_tensor", "kn"), ("fp8_channel", "tokens"), ("fp8_block", "kn"), ("fp8_block", "tokens")],
)
def test_power_of_two_scales(format, layout) -> None:
    x = with_outliers((4, 130) if layout == "tokens" else (2, 4, 130), 3)
    q = assert_oracle(x, format, layout, scale_format="e8m0")
    exact = quantize(x, format, layout).scales
    assert (np.frexp(np.asarray(q.scales))[0] == 0.5).all()
    assert ((q.scales >= exact) & (q.scales < 2 * exact)).all()


def test_a_power_of_two_is_not_rounded_up() -> None:
    x = jnp.array([[448.0, 1.0], [3.5, -1.0], [3.5000002, 1.0]])
    q = jaxmoe.quantize_tokens(x, "fp8_channel", scale_format="e8m0")
    assert q.scales.tolist() == [1.0, 2.0**-7, 2.0**-6]


@pytest.mark.parametrize("layout", ["nk", "tokens"])
def test_e5m2(layout) -> None:
    x = with_outliers((40, 33) if layout == "tokens" else (2, 40, 33), 4)
    assert_oracle(x, "fp8_tensor", layout, element_type="e5m2")


@pytest.mark.parametrize("layout", ["kn", "tokens"])
@pytest.mark.parametrize("format", FP8)
def test_static_scale(format, layout) -> None:
    """A caller's scale is used as it is; numbers beyond its range saturate."""
    x = with_outliers((130, 5) if layout == "tokens" else (2, 130, 5), 5)
    scales = np.asarray(quantize(x, format, layout).scales) * np.float32(0.6)
    q = assert_oracle(x, format, layout, scale=scales)
    assert same_bits(q.scales, scales)
    assert np.abs(np.asarray(q.values).astype(np.float32)).max() == 448
    assert np.isfinite(np.asarray(dequantize(q))).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan, 2.0**-127, 2.0**127])
def test_an_impossible_scale_gives_nan_and_no_number(bad) -> None:
    scale = jnp.array([1.0, bad], F32)
    q = jaxmoe.quantize_tokens(jnp.array([[0.0, 1.0], [0.0, 1.0]]), "fp8_channel", scale=scale)
    out = np.asarray(dequantize(q))
    assert out[0].tolist() == [0.0, 1.0] and np.isnan(out[1]).all()


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
def test_the_first_and_the_last_possible_scale(scale) -> None:
    x = jnp.array([[0.0, scale, -448 * scale if scale < 1 else -2 * scale]], F32)
    given = jnp.array([scale], F32)
    q = jaxmoe.quantize_tokens(x, "fp8_channel", scale=given)
    assert same_bits(q.scales, np.asarray(given))
    assert same_bits(dequantize(q), np.asarray(x))
    above = np.nextafter(np.asarray(given), np.float32(np.inf))
    q = jaxmoe.quantize_tokens(x, "fp8_channel", scale=jnp.asarray(above))
    assert np.isnan(np.asarray(q.scales)).all() == (scale > 1)


@pytest.mark.parametrize("scale_format", ["float32", "e8m0"])
@pytest.mark.parametrize("format", FP8)
def test_zeros_stay_zeros(format, scale_format) -> None:
    for layout, shape in (("kn", (2, 3, 4)), ("tokens", (3, 4))):
        q = assert_oracle(-jnp.zeros(shape, BF16), format, layout, scale_format=scale_format)
        assert (np.asarray(q.scales) == TINY).all()
        assert not np.asarray(q.values).astype(np.float32).any()


@pytest.mark.parametrize("format", FP8)
def test_nan_and_infinity_stay_where_they_are(format) -> None:
    """NaN stays NaN, infinity becomes the largest number, and no neighbour changes a bit."""
    x = np.asarray(with_outliers((4, 130), 6)).copy()
    x[1, 2:5] = 0  # what the bad values replace, so that the largest is the same
    bad = x.copy()
    bad[1, 2:5] = np.nan, np.inf, -np.inf
    q, clean = (jaxmoe.quantize_tokens(jnp.asarray(a), format) for a in (bad, x))
    assert same_bits(q.scales, clean.scales)
    values, kept = np.array(q.values), np.array(clean.values)
    assert str(values[1, 2:5].astype(np.float32).tolist()) == "[nan, 448.0, -448.0]"
    values[1, 2:5] = kept[1, 2:5] = 0
    assert same_bits(values, kept)
    assert_oracle(jnp.asarray(bad), format, "tokens")


def test_nothing_but_nan_and_infinity() -> None:
    x = jnp.array([[jnp.nan, jnp.inf, 0.0]], F16)
    out = dequantize(jaxmoe.quantize_tokens(x, "fp8_block"), dtype=F32)
    assert np.isnan(out[0, 0]) and out[0, 1] == 448 * 2.0**-126 and out[0, 2] == 0


@pytest.mark.parametrize("element_type", ["e4m3", "e5m2"])
def test_the_ends_of_float32(element_type) -> None:
    """No scale, reciprocal or product leaves float32's normal range on the way."""
    x = jnp.array([[3.4028235e38, -1e38, 1e-30, 2.0**-126]], F32)
    for row in (x, x[:, 2:], x[:, 3:]):
        q = assert_oracle(row, "fp8_tensor", "tokens", element_type=element_type)
        assert np.isfinite(np.asarray(dequantize(q))).all()


SEEDS = st.integers(0, 2**31)
EXAMPLES = hypothesis.settings(max_examples=8, deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize("format", FP8)
@EXAMPLES
@hypothesis.given(seed=SEEDS, e5m2=st.booleans(), e8m0=st.booleans())
def test_round_trip_error(format, seed, e5m2, e8m0) -> None:
    """Half a unit in the last place: relative for normal numbers, absolute below them."""
    x = with_outliers((2, 130, 33), seed)
    e5m2 = e5m2 and format == "fp8_tensor"
    options = {"element_type": "e5m2"} if e5m2 else {}
    scale_format = "e8m0" if e8m0 else "float32"
    q = quantize(x, format, "nk", scale_format=scale_format, **options)
    ones = jnp.ones_like(q.values, dtype=F32).astype(q.values.dtype)
    scale = np.asarray(
        dequantize(jaxmoe.QuantizedArray(ones, q.scales, format, "nk", x.dtype)), np.float64
    )
    x = np.asarray(x, np.float64)
    relative, absolute = (2.0**-3, 2.0**-17) if e5m2 else (2.0**-4, 2.0**-10)
    bound = np.maximum(relative * np.abs(x), absolute * scale) + 2.0**-22 * np.abs(x)
    assert (np.abs(np.asarray(dequantize(q), np.float64) - x) <= bound).all()


@pytest.mark.parametrize("format", FP8)
@EXAMPLES
@hypothesis.given(seed=SEEDS, power=st.integers(-60, 60))
def test_powers_of_two_pass_through(format, seed, power) -> None:
    x = with_outliers((2, 130, 33), seed)
    a = quantize(x, format, "nk")
    b = quantize(x * 2.0**power, format, "nk")
    assert same_bits(a.values, b.values) and same_bits(a.scales * 2.0**power, b.scales)


@pytest.mark.parametrize("format", FP8)
@EXAMPLES
@hypothesis.given(seed=SEEDS)
def test_quantizing_again_changes_nothing(format, seed) -> None:
    q = quantize(with_outliers((2, 130, 33), seed), format, "nk")
    again = quantize(dequantize(q), format, "nk", scale=q.scales)
    assert same_bits(again.values, q.values)


@pytest.mark.parametrize("format", FP8)
@EXAMPLES
@hypothesis.given(order=st.permutations(range(4)), seed=SEEDS)
def test_experts_are_independent(format, order, seed) -> None:
    w = with_outliers((4, 9, 33), seed)
    order = jnp.array(order)
    a = quantize(w, format, "kn")
    b = quantize(w[order], format, "kn")
    assert same_bits(a.values[order], b.values) and same_bits(a.scales[order], b.scales)


@EXAMPLES
@hypothesis.given(seed=SEEDS, n=st.integers(0, 2), k=st.integers(0, 1))
def test_blocks_are_independent(seed, n, k) -> None:
    w = with_outliers((1, 260, 200), seed)
    a = quantize(w, "fp8_block", "nk")
    block = np.s_[0, n * 128 : n * 128 + 128, k * 128 : k * 128 + 128]
    b = quantize(w.at[block].multiply(3), "fp8_block", "nk")
    changed = np.asarray(a.scales) != np.asarray(b.scales)
    assert np.argwhere(changed).tolist() == [[0, n, k]]
    va, vb = np.array(a.values), np.array(b.values)
    va[block] = vb[block] = 0
    assert same_bits(va, vb)


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block"])
def test_a_token_does_not_depend_on_its_batch(format) -> None:
    x = with_outliers((7, 300), 7)
    whole = quantize(x, format, "tokens")
    for r in (0, 6):
        one = quantize(x[r : r + 1], format, "tokens")
        assert same_bits(one.values[0], whole.values[r])
        assert same_bits(one.scales[0], whole.scales[r])


@pytest.mark.parametrize("format", FP8)
def test_layouts_hold_the_same_numbers(format) -> None:
    """[E, K, N] and [E, N, K] store the same bits, K last, and each gives its own shape back."""
    w = with_outliers((2, 130, 40), 8)
    nk = quantize(w, format, "nk")
    kn = quantize(jnp.swapaxes(w, 1, 2), format, "kn")
    assert same_bits(nk.values, kn.values) and same_bits(nk.scales, kn.scales)
    assert nk.shape == (2, 130, 40) and kn.shape == (2, 40, 130)
    assert same_bits(dequantize(nk), jnp.swapaxes(dequantize(kn), 1, 2))


def test_numpy_arrays() -> None:
    x = np.asarray(with_outliers((4, 9), 9))
    q = jaxmoe.quantize_tokens(x, "fp8_channel", scale=np.full(4, 0.5, np.float32))
    host = jax.tree.map(np.asarray, q)
    assert isinstance(host.values, np.ndarray)
    assert same_bits(dequantize(host), dequantize(q))
