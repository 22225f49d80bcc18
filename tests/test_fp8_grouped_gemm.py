"""grouped_gemm with a quantized rhs: values against the reference and float64, and transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import QuantizedArray, grouped_gemm, quantize, quantize_tokens, reference
from jaxmoe._testing import FP8 as FORMATS
from jaxmoe._testing import assert_close, assert_equal, assert_vmap_is_loop, normal
from jaxmoe.quantize import dequantize

SIZES = np.array([3, 0, 150, 5], np.int32)  # 12 rows are left over


def factors(format, layout, k=144, n=136, dtype=jnp.bfloat16, element_type="e4m3"):
    rng = np.random.default_rng([k, n])
    w = normal(rng, (4, k, n) if layout == "kn" else (4, n, k), dtype, k**-0.5)
    rhs = quantize(w, format, weight_layout=layout, element_type=element_type)
    return normal(rng, (170, k), dtype), rhs, normal(rng, (4, n), dtype)


def check(lhs, rhs, sizes, **kwargs):
    out = jax.jit(lambda *a: grouped_gemm(*a, **kwargs))(lhs, rhs, sizes)
    layout = {"weight_layout": kwargs.get("weight_layout", "kn")}
    options = layout | {n: kwargs[n] for n in ("bias", "group_offset") if n in kwargs}
    dtypes = (jnp.float32, lhs.dtype)
    want, naive = jax.jit(
        lambda *a: [reference.grouped_gemm(*a, **options, dtype=dtype) for dtype in dtypes]
    )(lhs, rhs, sizes)
    assert_close(out, want, naive)
    return out


@pytest.mark.parametrize(
    ("format", "layout"), [*((format, "nk") for format in FORMATS), ("fp8_block", "kn")]
)
def test_values(format, layout):
    lhs, rhs, bias = factors(format, layout)
    out = check(lhs, rhs, SIZES, bias=bias, weight_layout=layout)
    assert_equal(out[158:], jnp.zeros_like(out[158:]))
    # the same number from the definition of a scale, in float64
    x = np.asarray(dequantize(quantize_tokens(lhs, format), dtype=jnp.float32), np.float64)
    w = np.asarray(dequantize(rhs, dtype=jnp.float32), np.float64)
    w = w if layout == "kn" else w.swapaxes(1, 2)
    want = x[3:153] @ w[2] + np.asarray(bias[2], np.float64)
    assert_close(out[3:153], want, want.astype(lhs.dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_rows_give_the_bits_of_plain_ones(format):
    lhs, rhs, _ = factors(format, "kn", dtype=jnp.float16)
    out = grouped_gemm(lhs, rhs, SIZES)
    assert out.dtype == jnp.float16
    assert_equal(grouped_gemm(quantize_tokens(lhs, format), rhs, SIZES), out)


def test_other_elements_results_and_offsets():
    lhs, rhs, bias = factors("fp8_tensor", "nk", k=48, element_type="e5m2")
    check(lhs, rhs, SIZES, weight_layout="nk")
    wide = check(lhs, rhs, SIZES, weight_layout="nk", preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32
    sizes = jnp.array([9, 20, 3, 0, 70, 10], jnp.int32)
    check(lhs, rhs, sizes, bias=bias, weight_layout="nk", group_offset=jnp.array([1]))
    assert_equal(
        grouped_gemm(lhs, rhs, SIZES, weight_layout="nk", accum="promoted"),
        grouped_gemm(lhs, rhs, SIZES, weight_layout="nk", accum="fast"),
    )


@pytest.mark.parametrize("format", ("fp8_tensor", "fp8_block"))
def test_no_rows_and_nan_rows(format):
    lhs, rhs, _ = factors(format, "kn", k=48)
    assert grouped_gemm(lhs[:0], rhs, SIZES * 0).shape == (0, 136)
    lhs = lhs.at[:, 0].set(0)
    clean, dirty = (grouped_gemm(a, rhs, SIZES) for a in (lhs, lhs.at[40, 0].set(jnp.nan)))
    assert jnp.isnan(dirty[40]).all()
    assert_equal(dirty.at[40].set(0), clean.at[40].set(0))


@pytest.mark.parametrize("format", ("fp8_tensor", "fp8_block"))
def test_vmap_is_a_loop(format):
    lhs, rhs, bias = factors(format, "kn", k=48)
    more = jnp.stack([lhs, lhs * 2, lhs - 1])
    values, scales = rhs.values, jnp.stack([rhs.scales, rhs.scales * 2, rhs.scales * 3])

    def fn(lhs, scales, sizes, bias):
        w = QuantizedArray(values, scales, rhs.format, rhs.layout, rhs.dtype)
        return grouped_gemm(lhs, w, sizes, bias=bias)

    fn = jax.jit(fn)
    sizes = jnp.stack([SIZES, SIZES * 0, SIZES[::-1]])
    assert_vmap_is_loop(fn, (more, rhs.scales, SIZES, bias), (0, None, None, None))
    assert_vmap_is_loop(fn, (lhs, scales, sizes, bias), (None, 0, 0, None))
