"""moe_mlp(do_finalize=False) with FP8 weights: its rows, and finalize making the layer of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmoe import ExpertRows, _targets, finalize, plan, quantize_tokens
from jaxmoe._testing import Layer, assert_equal, assert_vmap_is_loop, quantized_inputs
from tests.test_fp8_mlp import local, run

LAYER = Layer("", "a block and a part of one", 144, 48, 5, 2, "geglu", "up_gate", bias=True)
OPTIONS = {"activation": LAYER.activation, "gate_up": LAYER.gate_up}
PER_TOKEN = ("x", "expert_ids", "weights")


def unfused(inputs, **kwargs):
    return run(inputs, do_finalize=False, **kwargs)


def in_two_steps(inputs, **kwargs):
    out = unfused(inputs, **kwargs)
    return finalize(out.rows, out, out.weights)


@pytest.mark.parametrize(
    ("format", "dtype", "num_tokens"),
    (("fp8_tensor", "bfloat16", 9), ("fp8_channel", "float16", 1), ("fp8_block", "bfloat16", 9)),
)
def test_rows_and_finalize(format, dtype, num_tokens):
    """Of three experts of five: slots of the others have no row."""
    rng = np.random.default_rng(num_tokens)
    inputs = quantized_inputs(LAYER, num_tokens, "with_invalid", rng, jnp.dtype(dtype), format)
    inputs["expert_ids"] = inputs["expert_ids"].at[0].set(jnp.array([4, 2]))
    inputs, ids = local(inputs, 1, 3), inputs["expert_ids"]
    kwargs = {"num_experts": 5, "expert_offset": 1} | OPTIONS

    @jax.jit
    def every(inputs):
        quantized = inputs | {"x": quantize_tokens(inputs["x"], format)}
        return unfused(inputs, **kwargs), unfused(quantized, **kwargs), run(inputs, **kwargs)

    out, of_quantized, fused = every(inputs)
    assert isinstance(out, ExpertRows)
    assert out.rows.dtype == dtype and out.rows.shape == (ids.size, LAYER.hidden)
    order = plan(ids, 5, expert_offset=1, num_local_experts=3)
    assert_equal(out.slot_to_row, order.slot_to_row)
    assert_equal(out.weights, inputs["weights"])
    jax.tree.map(assert_equal, of_quantized, out)
    assert_equal(finalize(out.rows, out, out.weights), fused)
    for k in range(LAYER.top_k):  # a layer of this choice alone: its row, as it is
        alone = jnp.zeros_like(out.weights).at[:, k].set(1.0)
        y, row = every(inputs | {"weights": alone})[2], out.slot_to_row[:, k]
        assert jnp.array_equal(y, jnp.where(row[:, None] >= 0, out.rows[row], 0))
        assert y.any() == (row >= 0).any()
    used = int((out.slot_to_row >= 0).sum())
    assert 0 < used < ids.size and not out.rows[used:].any()


def test_static_scales_and_weight_on_input():
    layer = Layer("", "", 48, 32, 3, 1)
    rng = np.random.default_rng(2)
    inputs = quantized_inputs(layer, 9, "with_invalid", rng, jnp.bfloat16, "fp8_tensor")
    inputs["x_scale"], inputs["intermediate_scale"] = jnp.float32(0.01), jnp.full(3, 0.02)
    kwargs = {"apply_weight_on_input": True, "batch_invariant": True}
    out, fused = jax.jit(lambda i: (unfused(i, **kwargs), run(i, **kwargs)))(inputs)
    assert_equal(out.weights, jnp.ones((9, 1), jnp.float32))
    assert_equal(finalize(out.rows, out, out.weights), fused)
    assert fused.any()


def test_vmap_is_a_loop():
    """One layer, whose rows are sorted by example."""
    rng = np.random.default_rng(3)
    layer = Layer("", "", 32, 16, 4, 2, bias=True)
    examples = [
        quantized_inputs(layer, 5, "with_invalid", rng, jnp.bfloat16, "fp8_block") for _ in range(3)
    ]
    tokens = [jnp.stack([e[n] for e in examples]) for n in PER_TOKEN]

    @jax.jit
    def fn(*tokens):
        return unfused(examples[0] | dict(zip(PER_TOKEN, tokens, strict=True)))

    assert_vmap_is_loop(fn, tuple(tokens), (0, 0, 0))


@pytest.mark.parametrize("check_vma", (True, False))
def test_a_device_of_shard_map_makes_one_call(check_vma):
    layer = Layer("", "", 32, 16, 4, 2)
    rng = np.random.default_rng(4)
    inputs = quantized_inputs(layer, 6, "uniform", rng, jnp.bfloat16, "fp8_channel")

    def part(inputs):
        expert_map = jnp.arange(4, dtype=jnp.int32) - jax.lax.axis_index("expert") * 2
        return jax.lax.psum(in_two_steps(inputs | {"expert_map": expert_map}), "expert")

    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    specs = {n: P("expert") if n.startswith("w_") else P() for n in inputs}
    fn = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma)
    with _targets.force_cuda_lowering():
        text = jax.jit(fn).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    names = ("jaxmoe_moe_mlp_fp8_rows_v1", "jaxmoe_finalize_v1", "jaxmoe_")
    assert [text.count(f"custom_call @{n}") for n in names] == [1, 1, 2]
    assert "tensor<2x32x32xf8E4M3FN>" in text
