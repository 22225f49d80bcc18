"""`grouped_gemm` with integers and with factors of two dtypes, against `jax.lax.ragged_dot`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxmoe import grouped_gemm, reference
from jaxmoe._gemm.dtypes import INTEGERS
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


def test_cuda_has_no_product_of_integers():
    message = "lhs and rhs must not both be integers on CUDA; give one of them in bf16 or f16"
    with pytest.raises(NotImplementedError, match=message):
        lower_for_cuda(jnp.int8, jnp.int8)


@pytest.mark.parametrize(("lhs", "rhs"), [("float32", "int8"), ("bfloat16", "float16")])
def test_cuda_multiplies_what_is_float32_together_in_parts(lhs, rhs):
    text = lower_for_cuda(lhs, rhs)
    assert "jaxmoe_grouped_gemm_v1" in text and "1x32x192xbf16" in text


@pytest.mark.parametrize(("lhs", "rhs"), [("bfloat16", "int8"), ("int8", "float16")])
def test_cuda_multiplies_integers_beside_floats(lhs, rhs):
    assert "jaxmoe_grouped_gemm_v1" in lower_for_cuda(lhs, rhs)
