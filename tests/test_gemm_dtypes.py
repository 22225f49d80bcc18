"""`grouped_gemm` with integers and with factors of two dtypes, against `jax.lax.ragged_dot`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxmoe import grouped_gemm, reference
from jaxmoe._formats import PLAIN
from jaxmoe._gemm import split
from jaxmoe._gemm.dtypes import INTEGERS
from jaxmoe._gemm.op import gmm
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal

FLOATS = ("bfloat16", "float16", "float32")
SIZES = np.array((3, 0, 9, 4), np.int32)  # of 20 rows
# bfloat16 and float16 are products of float32 here, and the result is that of lax.
PAIRS = [
    (a, b) for a, b in itertools.product((*FLOATS, *INTEGERS), repeat=2) if a != b or a in INTEGERS
]


def draw(dtype, shape, seed):
    """Small integers that every dtype has, negative ones where there are any."""
    low = 0 if dtype.startswith("uint") else -7
    return jnp.asarray(np.random.default_rng(seed).integers(low, 8, shape)).astype(dtype)


def example(of_lhs, of_rhs):
    return draw(of_lhs, (20, 8), 1), draw(of_rhs, (4, 8, 24), 2), SIZES


@pytest.mark.parametrize(("of_lhs", "of_rhs"), PAIRS)
def test_result_is_that_of_ragged_dot(of_lhs, of_rhs):
    lhs, rhs, sizes = example(of_lhs, of_rhs)
    got, want = grouped_gemm(lhs, rhs, sizes), jax.lax.ragged_dot(lhs, rhs, sizes)
    assert got.dtype == want.dtype
    if of_lhs in INTEGERS and of_rhs in INTEGERS and "int4" in str(want.dtype):
        # XLA sums four-bit integers in four bits and leaves wrapping to them; so does a cast.
        want = jax.lax.ragged_dot(lhs.astype(jnp.int32), rhs.astype(jnp.int32), sizes)
        want = want.astype(got.dtype)
    assert_equal(got.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("preferred", ("int32", *FLOATS))
@pytest.mark.parametrize(("of_lhs", "of_rhs"), [("int8", "int8"), ("uint8", "int8")])
def test_sums_of_integers(of_lhs, of_rhs, preferred):
    lhs, rhs, sizes = example(of_lhs, of_rhs)
    got = jax.jit(lambda *a: grouped_gemm(*a, None, jnp.dtype(preferred)))(lhs, rhs, sizes)
    want = reference.grouped_gemm(lhs, rhs, sizes, dtype=jnp.int32).astype(preferred)
    assert got.dtype == preferred
    assert_equal(got, want)


def test_sums_are_exact_where_float32_is_not():
    """Every sum is odd and above 2^24, between the numbers of float32."""
    lhs = jnp.full((3, 2049), 127, jnp.int8)
    rhs = jnp.full((1, 2049, 2), 127, jnp.int8)
    rhs = jnp.asarray(np.asarray(rhs).copy())
    got = grouped_gemm(lhs, rhs, np.array([2]), preferred_element_type=jnp.int32)
    assert got.tolist() == [[127 * 127 * 2049] * 2] * 2 + [[0, 0]]
    assert 127 * 127 * 2049 != int(np.float32(127 * 127 * 2049))


def test_integers_of_a_weight_beside_floats():
    """As models with int8 weights call it: the scale of an output multiplies the result."""
    lhs, rhs, sizes = example("bfloat16", "int8")
    both = lambda f: lambda lhs: f(lhs, rhs, sizes).astype(jnp.float32).sum()  # noqa: E731
    assert_equal(jax.grad(both(grouped_gemm))(lhs), jax.grad(both(jax.lax.ragged_dot))(lhs))
    turned = grouped_gemm(lhs, rhs.swapaxes(1, 2), sizes, weight_layout="nk")
    assert_equal(turned, grouped_gemm(lhs, rhs, sizes))


def test_gradients_have_the_dtypes_of_the_factors():
    lhs, rhs, sizes = example("bfloat16", "float32")
    loss = lambda f: lambda *w: f(*w, sizes).sum()  # noqa: E731
    got, want = (jax.grad(loss(f), (0, 1))(lhs, rhs) for f in (grouped_gemm, jax.lax.ragged_dot))
    assert [g.dtype for g in got] == [jnp.bfloat16, jnp.float32]
    jax.tree.map(assert_equal, got, want)


def test_vmap_and_group_offset():
    lhs, rhs, sizes = example("int8", "int8")
    product = lambda lhs: grouped_gemm(lhs, rhs[1:], sizes, None, jnp.int32, 1)  # noqa: E731
    batch = jnp.stack([lhs, -lhs])
    got = jax.vmap(product)(batch)
    assert got.dtype == jnp.int32
    assert_equal(got, jnp.stack([product(lhs), -product(lhs)]))
    assert not got[:, : SIZES[0]].any()


@pytest.mark.parametrize("spec", [(None, None, "m"), ("m", None, None), (None, "m", None)])
def test_sums_over_devices(spec):
    """Parts of integer sums add up exactly, wherever the weights are split."""
    lhs, rhs, sizes = example("int8", "int8")
    mesh = jax.make_mesh((4,), ("m",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(rhs, NamedSharding(mesh, jax.P(*spec)))
    product = jax.jit(lambda *a: grouped_gemm(*a, preferred_element_type=jnp.int32))
    assert_equal(product(lhs, placed, sizes), product(lhs, rhs, sizes))


def lower_for_cuda(lhs, rhs):
    function = jax.jit(lambda *a: grouped_gemm(*a))
    shapes = (jax.ShapeDtypeStruct((32, 64), lhs), jax.ShapeDtypeStruct((4, 64, 64), rhs))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    with _targets.force_cuda_lowering():
        return function.trace(*shapes, sizes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("lhs", "rhs"), [("int8", "int4"), ("uint8", "uint8"), ("int8", "uint8")])
def test_cuda_multiplies_integers_as_bf16(lhs, rhs):
    text = lower_for_cuda(lhs, rhs)
    assert text.count("@jaxmoe_grouped_gemm_v1") == 1 and "tensor<1x32x64xbf16>" in text


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize(
    ("dtype", "least", "most", "products"),
    [("int8", -128, 127, 3), ("uint8", 0, 255, 10), ("int16", -128, 255, 10)],
)
def test_sums_of_integers_are_exact_in_parts(dtype, least, most, products, layout):
    """What CUDA computes, of the largest factors: each part has an exact sum in float32."""
    k, n, calls = 2500, 12, []
    rng = np.random.default_rng(7)
    x = rng.choice([least, most], (1, 9, k)).astype(dtype)
    w = rng.choice([least, most], (1, 3, k, n)).astype(dtype)
    x[0, :2], w[0, 0] = (least, most)[least == 0], (least, most)[least == 0]  # all of one sign
    sizes, group = np.array([[2, 0, 6]], np.int32), np.repeat([0, 1, 2], [2, 0, 6])

    def product(x, w, *groups, **params):
        calls.append((x.shape, w.shape))
        assert x.dtype == w.dtype == jnp.bfloat16
        return gmm(x, w, *groups, **params)

    of_layout = jnp.asarray(w if layout == "kn" else w.swapaxes(2, 3))
    of_parts = split.gmm_of_parts(product, jnp.asarray(x), of_layout, PLAIN)
    starts = np.cumsum(sizes, axis=1, dtype=np.int32) - sizes
    params = {"weight_layout": layout, "out_dtype": jnp.dtype("int32"), "precision": None}
    (out,) = jax.jit(functools.partial(of_parts, **params))(x, of_layout, starts, sizes)
    want = np.einsum("rk,rkn->rn", x[0, :8].astype(np.int64), w[0].astype(np.int64)[group])
    assert len(calls) == products
    assert all(size % 8 == 0 for shapes in calls for shape in shapes for size in shape[2:])
    np.testing.assert_array_equal(out[0, :8], want)
    np.testing.assert_array_equal(out[0, 8:], 0)


@pytest.mark.parametrize(("lhs", "rhs"), [("float32", "int8"), ("bfloat16", "float16")])
def test_cuda_multiplies_what_is_float32_together_in_parts(lhs, rhs):
    text = lower_for_cuda(lhs, rhs)
    assert "jaxmoe_grouped_gemm_v1" in text and "1x32x192xbf16" in text


@pytest.mark.parametrize(("lhs", "rhs"), [("bfloat16", "int8"), ("int8", "float16")])
def test_cuda_multiplies_integers_beside_floats(lhs, rhs):
    assert "jaxmoe_grouped_gemm_v1" in lower_for_cuda(lhs, rhs)


@pytest.mark.parametrize(("lhs", "rhs"), [("int32", "int8"), ("int16", "int16")])
def test_cuda_has_no_sums_of_wide_integers(lhs, rhs):
    with pytest.raises(NotImplementedError, match="Got lhs: i32"):
        lower_for_cuda(lhs, rhs)


def test_sums_of_wide_integers_wrap_around():
    lhs = jnp.array([[2**30, 3]], jnp.int32)
    rhs = jnp.array([[[4, -4], [1, 2]]], jnp.int16)
    got = grouped_gemm(lhs, rhs, np.array([1]))
    assert got.dtype == jnp.int32 and got.tolist() == [[3, 6]]
