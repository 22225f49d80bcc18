"""What tokamax' ragged dot passes to an implementation, taken or left to its next one."""

import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe._testing import assert_equal
from jaxmoe.seams import tokamax as seam

SIZES = np.array((3, 0, 9, 4), np.int32)  # of 20 rows
NUMBERS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def example():
    rng = np.random.default_rng(1)
    lhs, rhs = (jnp.asarray(rng.integers(-4, 5, s)) for s in ((20, 8), (4, 8, 24)))
    return lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)


def test_arrays():
    lhs, rhs = example()
    got = seam.ragged_dot(lhs, rhs, group_sizes=SIZES, ragged_dot_dimension_numbers=NUMBERS)
    assert_equal(got, jaxmoe.grouped_gemm(lhs, rhs, SIZES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"manual_axis_type": 1}, "seams.tokamax.ragged_dot: manual_axis_type must be None"),
        ({"fuse_gateup_activation": "silu"}, "fuse_gateup_activation must be None. Got fuse_gate"),
        (
            {"rhs": types.SimpleNamespace(qvalue=1)},
            "rhs must be an array; jaxmoe.seams.qwix.weight",
        ),
        (
            {"lhs": types.SimpleNamespace(qvalue=1)},
            "lhs must be an array; jaxmoe.seams.qwix.weight",
        ),
    ],
)
def test_all_else_is_not_implemented(change, message):
    lhs, rhs = example()
    given = {"lhs": lhs, "rhs": rhs, "group_sizes": SIZES, "ragged_dot_dimension_numbers": NUMBERS}
    with pytest.raises(NotImplementedError, match=message):
        seam.ragged_dot(**given | change)


@pytest.mark.filterwarnings("default")  # of what tokamax imports
def test_tokamax_goes_on():
    """Group sizes with an example of them run here; a quantized rhs runs in XLA after it."""
    tokamax = pytest.importorskip("tokamax")
    qarray = importlib.import_module("qwix._src.core.qarray")
    lhs, rhs = example()
    taken = []

    def counted(*args, **kwargs):
        out = seam.ragged_dot(*args, **kwargs)
        taken.append(kwargs.keys())
        return out

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        sizes = tokamax.RaggedDotGroupSizes(jnp.asarray(SIZES), 16)
        product = lambda rhs, *order: tokamax.ragged_dot(lhs, rhs, sizes, implementation=order)  # noqa: E731
        want = product(rhs, "xla")
        assert_equal(product(rhs, counted, "xla"), want)
        assert len(taken) == 1
        how = qarray.HowToQuantize(qtype=jnp.int8, channelwise_axes=(2,))
        got = product(qarray.quantize(rhs, how), counted, "xla")
        assert len(taken) == 1
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=2)
