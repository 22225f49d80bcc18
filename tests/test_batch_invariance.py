"""batch_invariant=True: the tiles that are lowered, what is refused, the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Experts, GemmConfig, Routing, expert_rows, explain, grouped_gemm
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import Layer, assert_equal, layer_inputs
from tests.layers import moe_mlp
from tests.lowered import calls, cuda_text
from tests.test_lowering import struct

WIDE = (
    struct(1, 2048),
    Routing(struct(1, 2, dtype=jnp.int32), struct(1, 2, dtype=jnp.float32)),
    struct(8, 2048, 2 * 1024),
    struct(8, 1024, 2048),
)
SPLIT = GemmConfig(128, 8, split_k=2)
ROWS = struct(4, 2048), struct(8, 2048, 64), struct(8, dtype=jnp.int32)


def lowered_splits(**options):
    ((_, attrs, _, _),) = calls(cuda_text(lambda *a: moe_mlp(*a, **options), *WIDE))
    return attrs["gemm1"]["split_k"], attrs["gemm2"]["split_k"]


def test_no_product_of_the_layer_splits_its_k_loop():
    assert lowered_splits() == ("2:i64", "2:i64")
    assert lowered_splits(batch_invariant=True) == ("1:i64", "1:i64")
    only_first = (GemmConfig(128, 32, gather=True), None)
    assert lowered_splits(batch_invariant=True, config=only_first) == ("1:i64", "1:i64")
    assert lowered_splits(config=only_first) == ("1:i64", "2:i64")


@pytest.mark.parametrize("call", (jaxmoe.moe_mlp, expert_rows))
@pytest.mark.parametrize("what", ("I", "H of the first product"))
def test_nor_does_a_device_with_a_part_of_the_contraction(call, what):
    """Each device's part is still long enough to be split."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    specs = {"I": (P(None, None, "a"), P(None, "a", None))}.get(what, (P(None, "a", None), P()))

    def placed(shape, spec=None, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or P()))

    ids, weights = WIDE[1].expert_ids, WIDE[1].weights
    routing = Routing(placed(ids.shape, None, ids.dtype), placed(weights.shape, None, jnp.float32))
    arrays = (
        placed((8, 2 * 2048, 2048), specs[0]),
        placed((8, 2 * 2048, 2048), specs[0]),
        placed((8, 2048, 2 * 2048), specs[1]),
    )

    def splits(**options):
        def fn(x, routing, gate, up, down):
            return call(x, routing, Experts(gate=gate, up=up, down=down), **options)

        with jax.set_mesh(mesh), _targets.force_cuda_lowering():
            ops = explain(fn, placed((1, 2 * 2048)), routing, *arrays).ops
        attrs = [op.cuda_attrs or {} for op in ops]
        return {a[n]["split_k"] for a in attrs for n in ("gemm1", "gemm2", "config") if n in a}

    assert 2 in splits()
    assert splits(batch_invariant=True) == {1}


def test_grouped_gemm_does_not_split_its_k_loop():
    for options, split in (({}, "2:i64"), ({"batch_invariant": True}, "1:i64")):
        ((_, attrs, _, _),) = calls(cuda_text(lambda *a, o=options: grouped_gemm(*a, **o), *ROWS))
        assert attrs["config"]["split_k"] == split


def test_values_are_the_same():
    layer = Layer("", "", 32, 16, 4, 2)
    inputs = layer_inputs(layer, 9, "uniform", np.random.default_rng(0), jnp.float32)
    routing = Routing(inputs["expert_ids"], inputs["weights"])
    arguments = inputs["x"], routing, inputs["w_gate_up"], inputs["w_down"]
    assert_equal(moe_mlp(*arguments, batch_invariant=True), moe_mlp(*arguments))
    product = inputs["x"], inputs["w_gate_up"], jnp.array([3, 0, 4, 1])
    assert_equal(grouped_gemm(*product, batch_invariant=True), grouped_gemm(*product))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (
            lambda: jax.eval_shape(lambda *a: moe_mlp(*a, batch_invariant=1), *WIDE),
            TypeError,
            r"^jaxmoe\.moe_mlp: batch_invariant must be a bool\. Got batch_invariant: 1\.",
        ),
        (
            lambda: jax.eval_shape(lambda *a: grouped_gemm(*a, batch_invariant=None), *ROWS),
            TypeError,
            r"^jaxmoe\.grouped_gemm: batch_invariant must be a bool\. Got batch_invariant: None\.",
        ),
        (
            lambda: jax.eval_shape(
                lambda *a: moe_mlp(*a, batch_invariant=True, config=(None, SPLIT)), *WIDE
            ),
            ValueError,
            r"^jaxmoe\.moe_mlp: config\[1\]\.split_k=2 must be 1 if batch_invariant=True\. Got",
        ),
        (
            lambda: jax.eval_shape(
                lambda *a: grouped_gemm(*a, batch_invariant=True, config=SPLIT), *ROWS
            ),
            ValueError,
            r"^jaxmoe\.grouped_gemm: config\.split_k=2 must be 1 if batch_invariant=True\. Got",
        ),
        (
            lambda: grouped_gemm(
                jnp.ones((4, 64)), jnp.ones((2, 64, 8)), jnp.array([2, 2]), config=SPLIT
            ),
            ValueError,
            r"^jaxmoe\.grouped_gemm: config\.split_k=2 needs a product over more than 64 elements, "
            r"not 64\. Got",
        ),
    ),
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
