"""The quantize kernels against XLA on the CPU, bit for bit, wherever their thread maps change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal, poison

pytestmark = pytest.mark.gpu

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
FORMATS = ("fp8_tensor", "fp8_channel", "fp8_block")
TARGET = "jaxmoe_quantize_v1"


@functools.cache
def _jitted(op, **options):
    return jax.jit(functools.partial(op, **options))


def _draw(shape, dtype, seed=0):
    """Numbers of many magnitudes, a few NaN and infinities, and a row of each and of zeros.

    No subnormal float32: XLA's CPU code takes them for zeros.
    """
    rng = np.random.default_rng([seed, *shape])
    powers = 10.0 if dtype == jnp.float16 else 60.0
    x = rng.standard_normal(shape) * 2.0 ** rng.uniform(-powers / 2, powers / 4, shape)
    x = np.where(np.abs(x) < 2.0**-100, 0.0, x)
    for value in (np.nan, np.inf, -np.inf):
        if rng.random() < 0.7:
            x[rng.random(shape) < 0.01] = value
    if shape[-2] > 5:
        for row, value in ((1, np.nan), (2, np.inf), (4, 0.0)):
            x[..., row, :] = value
    return jnp.asarray(x, dtype)


def _check(op, x, scale=None, **options):
    """Runs the kernel twice into poisoned memory and XLA on the CPU once: equal bits."""
    fn = _jitted(op, **options)
    given = {} if scale is None else {"scale": scale}
    cpu = jax.devices("cpu")[0]
    want = fn(jax.device_put(x, cpu), **jax.device_put(given, cpu))
    assert want.values.devices() == {cpu}
    before = _targets.execute_count(TARGET)
    for _ in range(2):
        poison(x.shape, jnp.uint8)
        got = fn(x, **given)
        assert_equal(got.scales, want.scales)
        assert_equal(got.values, want.values)
    if x.size:  # XLA drops calls whose results are empty
        assert _targets.execute_count(TARGET) > before


TOKENS = [
    (1, 8),  # one piece (two in f32)
    (1, 7168),  # one row, seven warps
    (3, 136),  # a group of one piece
    (37, 2880),  # 22 groups and a half
    (64, 4096),  # in 2-byte types the most that a cluster holds
    (65, 4096),  # one row more: two launches
    (300, 2048),  # several rows a block, the last block not full
    (3000, 24),  # far more rows than blocks at once, lanes idle
    (33, 16384),  # the widest rows read once in f32
    (5, 16400),  # a second chunk of one warp in f32
    (5, 40000),  # three chunks in f32, two in 2-byte types
    (1, 131072),  # one row over a cluster (f32: over 32 parts)
    (0, 256),  # no row
    (7, 0),  # rows of nothing
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", TOKENS)
def test_tokens(shape, format, dtype):
    _check(jaxmoe.quantize_tokens, _draw(shape, dtype), format=format)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(
    "stored",
    [
        (1, 128, 128),  # one block
        (3, 130, 264),  # blocks of 2 rows and of 8 columns
        (2, 1, 24),  # a row
        (200, 16, 16),  # more entries than SMs
        (5, 257, 1024),  # entries beyond a cluster in f32
        (2, 700, 2880),  # beyond in any type: parts of two entries
        (3, 0, 16),  # entries of nothing
        (0, 16, 16),
    ],
)
def test_weights(stored, layout, format, dtype):
    w = _draw(stored, dtype)
    w = jnp.swapaxes(w, 1, 2) if layout == "kn" else w
    _check(jaxmoe.quantize, w, format=format, weight_layout=layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_power_of_two_scales(format, dtype):
    _check(jaxmoe.quantize_tokens, _draw((70, 2880), dtype), format=format, scale_format="e8m0")
    w = _draw((2, 300, 136), dtype)
    _check(jaxmoe.quantize, w, format=format, weight_layout="nk", scale_format="e8m0")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 136), (200, 8192), (0, 16)])
def test_e5m2(shape, dtype):
    x = _draw(shape, dtype)
    for scale_format in ("float32", "e8m0"):
        options = {"element_type": "e5m2", "scale_format": scale_format}
        _check(jaxmoe.quantize_tokens, x, format="fp8_tensor", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(37, 2880), (3, 40000), (0, 16), (4, 0)])
def test_static_scales(shape, format, dtype):
    """Scales that fit, too small and too large ones, and impossible ones."""
    x = _draw(shape, dtype)
    right = np.asarray(jaxmoe.quantize_tokens(x, format).scales)
    rng = np.random.default_rng(1)
    factors = rng.choice(np.float32([1, 0.01, 3, 0, -1, np.nan, np.inf, 2.0**-127]), right.shape)
    for scale in (right, right * factors):
        _check(jaxmoe.quantize_tokens, x, jnp.asarray(scale, jnp.float32), format=format)
    w = _draw((2, 130, 264), dtype)
    right = jaxmoe.quantize(w, format, weight_layout="nk").scales
    _check(jaxmoe.quantize, w, right * 0.25, format=format, weight_layout="nk")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_of_a_value(dtype):
    """All values of the 2-byte types (as many of float32) over a scale of 1, ties among them."""
    codes = np.arange(2**16, dtype=np.uint16)
    if dtype == jnp.float32:
        codes = (codes.astype(np.uint32) << 16 | 0x8000).view(np.float32)
        codes[np.abs(codes) < 2.0**-126] = 0
        x = jnp.asarray(codes)
    else:
        x = jax.lax.bitcast_convert_type(jnp.asarray(codes), dtype)
        if dtype == jnp.bfloat16:
            x = jnp.where(jnp.abs(x.astype(jnp.float32)) < 2.0**-126, 0, x)
    x, one = x.reshape(256, 256), jnp.float32(1)
    for element_type in ("e4m3", "e5m2"):
        options = {"format": "fp8_tensor", "element_type": element_type}
        _check(jaxmoe.quantize_tokens, x, one, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_vmap_is_one_call_with_the_bits_of_a_loop(format):
    x = _draw((5, 70, 2880), jnp.bfloat16)
    one = _jitted(jaxmoe.quantize_tokens, format=format)
    mapped = jax.jit(jax.vmap(one))
    before = _targets.execute_count(TARGET)
    got = jax.block_until_ready(mapped(x))
    assert _targets.execute_count(TARGET) == before + 1
    for i in range(5):
        want = one(x[i])
        assert_equal(got.values[i], want.values)
        assert_equal(got.scales[i], want.scales)


def test_rows_that_the_kernels_do_not_know_run_in_xla():
    x = _draw((9, 133), jnp.float32)
    before = _targets.execute_count(TARGET)
    got = jax.block_until_ready(_jitted(jaxmoe.quantize_tokens, format="fp8_block")(x))
    assert _targets.execute_count(TARGET) == before
    assert got.scales.shape == (9, 2)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(3, 136), (40, 2880), (70, 4096), (2, 33600)])
def test_sanitize_tokens(shape, format, dtype):
    _check(jaxmoe.quantize_tokens, _draw(shape, dtype), format=format)


@pytest.mark.sanitizer
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitize_weights(format, dtype):
    _check(jaxmoe.quantize, _draw((3, 130, 264), dtype), format=format, weight_layout="nk")
