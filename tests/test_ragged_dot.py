"""`ragged_dot_general` against XLA's, and as an implementation that tokamax calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import RaggedDotDimensionNumbers

import jaxmoe
from jaxmoe._testing import assert_equal

SIZES = (3, 0, 9, 4)  # of 20 rows
FORMS = {
    "kn": (((1,), (1,)), [0]),
    "nk": (((1,), (2,)), [0]),
    "gradient": (((0,), (0,)), []),
}


def numbers(contracting, groups, ragged=(0,), batch=((), ())):
    return RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, batch),
        lhs_ragged_dimensions=list(ragged),
        rhs_group_dimensions=groups,
    )


def example(form, dtype=np.float32):
    rng = np.random.default_rng(1)
    shape = {"kn": (4, 8, 24), "nk": (4, 24, 8), "gradient": (20, 24)}[form]
    lhs, rhs = (rng.integers(-4, 5, s).astype(dtype) for s in ((20, 8), shape))
    return lhs, rhs, np.array(SIZES, np.int32)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("form", FORMS)
def test_value(form, dtype):
    operands, n = example(form, dtype), numbers(*FORMS[form])
    want = jax.lax.ragged_dot_general(*operands, n, preferred_element_type=jnp.float32)
    got = jax.jit(lambda *a: jaxmoe.ragged_dot_general(*a, n, None, jnp.float32))(*operands)
    assert_equal(got, want)  # integers: every order of sums has the same
    assert jaxmoe.ragged_dot_general(*operands, n).dtype == dtype


def test_layer_and_its_gradient():
    """The transposes of the product are the other two forms."""
    lhs, rhs, sizes = example("kn")
    dy = example("gradient")[1]
    _, pull = jax.vjp(
        lambda a, b: jaxmoe.ragged_dot_general(a, b, sizes, numbers(*FORMS["kn"])), lhs, rhs
    )
    dlhs, drhs = pull(dy)
    assert_equal(jaxmoe.ragged_dot_general(dy, rhs, sizes, numbers(*FORMS["nk"])), dlhs)
    assert_equal(jaxmoe.ragged_dot_general(lhs, dy, sizes, numbers(*FORMS["gradient"])), drhs)


@pytest.mark.parametrize("offset", (np.int32(2), np.array([2], np.int32)))
def test_group_offset(offset):
    lhs, rhs, sizes = example("kn")
    n = numbers(*FORMS["kn"])
    got = jaxmoe.ragged_dot_general(lhs, rhs[2:], sizes, n, group_offset=offset)
    want = np.asarray(jaxmoe.ragged_dot_general(lhs, rhs, sizes, n)).copy()
    want[: sum(SIZES[:2])] = 0
    assert_equal(got, want)


@pytest.mark.parametrize("form", ("kn", "nk"))
@pytest.mark.parametrize(
    ("of_lhs", "of_rhs", "preferred"),
    [
        ("int8", "int8", "int32"),
        ("int8", "int8", None),
        ("uint8", "int8", "float32"),
        ("bfloat16", "int8", None),
        ("float32", "bfloat16", None),
    ],
)
def test_dtypes_are_those_of_grouped_gemm(form, of_lhs, of_rhs, preferred):
    lhs, rhs, sizes = example(form)
    lhs, rhs = jnp.abs(lhs).astype(of_lhs), jnp.asarray(rhs).astype(of_rhs)
    n, options = numbers(*FORMS[form]), {"preferred_element_type": preferred}
    got = jaxmoe.ragged_dot_general(lhs, rhs, sizes, n, **options)
    want = jaxmoe.grouped_gemm(lhs, rhs, sizes, weight_layout=form, **options)
    assert got.dtype == want.dtype
    assert_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    same = jaxmoe.ragged_dot_general(lhs, rhs, sizes, n, **options, activation=lambda z: z)
    assert same.dtype == want.dtype


def test_activation_is_applied_before_rounding():
    lhs, rhs, sizes = example("nk", jnp.bfloat16)
    n = numbers(*FORMS["nk"])
    third = lambda z: z / 3  # noqa: E731
    z = jaxmoe.ragged_dot_general(lhs, rhs, sizes, n, preferred_element_type=jnp.float32)
    got = jaxmoe.ragged_dot_general(lhs, rhs, sizes, n, activation=third)
    assert_equal(got, third(z).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("kn", {"ragged_dot_dimension_numbers": numbers(((0,), (1,)), [0], (1,))}, "three forms"),
        ("kn", {"ragged_dot_dimension_numbers": numbers(((1,), (1,)), [0], (1,))}, "three forms"),
        ("kn", {"ragged_dot_dimension_numbers": numbers(((1,), (0,)), [2])}, "three forms"),
        (
            "kn",
            {"ragged_dot_dimension_numbers": numbers(((), ()), [0], batch=((0,), (0,)))},
            "three forms",
        ),
        ("kn", {"lhs": np.ones((5, 4, 8), np.float32)}, "must have the axes of one of the"),
        ("gradient", {"rhs": np.ones((20, 3, 2), np.float32)}, "must have the axes of one of the"),
        ("kn", {"rhs": np.ones((0, 8, 24), np.float32)}, "rhs must have one group or more"),
        ("kn", {"preferred_element_type": np.int32}, "preferred_element_type=int32 must be"),
        ("kn", {"lhs": np.ones((20, 8), np.uint16)}, "lhs and rhs must have dtypes of bfloat16, "),
        ("gradient", {"lhs": np.ones((20, 8), np.float16)}, "lhs and rhs must have one dtype of"),
        ("gradient", {"lhs": np.ones((20, 8), np.int8)}, "lhs and rhs must have one dtype of"),
        ("kn", {"out_sharding": jax.P()}, "out_sharding must be None"),
        ("gradient", {"group_offset": 1}, "group_offset must be None where rows are contracted"),
        ("gradient", {"activation": jnp.tanh}, "activation must be None where rows"),
    ],
)
def test_everything_else_is_not_implemented(form, change, message):
    """By this error, and no other, tokamax goes on to the next implementation."""
    lhs, rhs, sizes = example(form)
    given = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes}
    given |= {"ragged_dot_dimension_numbers": numbers(*FORMS[form])}
    with pytest.raises(NotImplementedError, match=message):
        jaxmoe.ragged_dot_general(**(given | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_offset": np.array([1, 2])}, "group_offset must be one integer.* i64\\[2\\]"),
        ({"group_offset": "a"}, "group_offset must be one integer.* 'a'"),
        (
            {"ragged_dot_dimension_numbers": None},
            "ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers.*None",
        ),
        (
            {"preferred_element_type": "foo"},
            "general: preferred_element_type='foo' must be bfloat16",
        ),
        ({"activation": "silu"}, "activation must be a function of the result, or None.*'silu'"),
        ({"lhs": [[1.0]]}, "general: lhs must be a JAX or NumPy array. Got lhs: a list"),
        ({"rhs": None}, "general: rhs must be a JAX or NumPy array. Got rhs: None"),
        ({"group_sizes": [3, 0, 9, 4]}, "group_sizes must be a JAX or NumPy array"),
    ],
)
def test_what_no_implementation_takes(change, message):
    lhs, rhs, sizes = example("kn")
    given = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes}
    given |= {"ragged_dot_dimension_numbers": numbers(*FORMS["kn"])}
    with pytest.raises(TypeError, match=message):
        jaxmoe.ragged_dot_general(**(given | change))


@pytest.mark.filterwarnings("default")  # of what tokamax imports
def test_tokamax_calls_it():
    tokamax = pytest.importorskip("tokamax")
    lhs, rhs, sizes = example("kn", jnp.bfloat16)
    called = []

    def implementation(*args, **kwargs):
        called.append(kwargs["ragged_dot_dimension_numbers"])
        return jaxmoe.ragged_dot_general(*args, **kwargs)

    def product(lhs, rhs, *order):
        return tokamax.ragged_dot(lhs, rhs, sizes, implementation=order)

    with jax.numpy_dtype_promotion("standard"):
        assert_equal(product(lhs, rhs, implementation, "xla"), product(lhs, rhs, "xla"))
        assert len(called) == 1
        loss = lambda *order: lambda *w: product(*w, *order).astype(jnp.float32).sum()  # noqa: E731
        got = jax.grad(loss(implementation), (0, 1))(lhs, rhs)
        jax.tree.map(assert_equal, got, jax.grad(loss("xla"), (0, 1))(lhs, rhs))
        # What is refused goes to the next one.
        mixed = product(lhs.astype(np.float32), rhs, implementation, "xla")
        assert mixed.shape == (20, 24) and len(called) == 3
