"""moe_mlp(do_finalize=False) with FP8 weights: its rows, and finalize making the layer of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmoe import ExpertRows, GemmConfig, Routing, explain, finalize, plan, quantize_tokens
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import FP8 as FORMATS
from jaxmoe._testing import Layer, assert_equal, assert_vmap_is_loop, quantized_inputs
from tests.layers import moe_mlp
from tests.lowered import layer_call
from tests.test_fp8_lowering import (
    F16,
    F32,
    I32,
    ROUTING,
    E,
    H,
    K,
    T,
    cuda_call,
    quantized,
    struct,
    weights,
)
from tests.test_fp8_mlp import local, run

LAYER = Layer("", "a block and a part of one", 144, 48, 5, 2, "geglu", "up_gate", bias=True)
TARGET = "jaxmoe_moe_mlp_v1"
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
        order = plan(inputs["expert_ids"], 5, expert_offset=1, num_local_experts=3)
        outs = unfused(inputs, **kwargs), unfused(quantized, **kwargs), run(inputs, **kwargs)
        return *outs, finalize(outs[0].rows, outs[0], outs[0].weights), order.slot_to_row

    out, of_quantized, fused, together, slot_to_row = every(inputs)
    assert isinstance(out, ExpertRows)
    assert out.rows.dtype == dtype and out.rows.shape == (ids.size, LAYER.hidden)
    jax.tree.map(assert_equal, out, ExpertRows(out.rows, inputs["weights"], slot_to_row))
    jax.tree.map(assert_equal, of_quantized, out)
    assert_equal(together, fused)
    rows, slots = np.asarray(out.rows), np.asarray(slot_to_row)
    for k in range(LAYER.top_k):  # a layer of this choice alone: its row, as it is
        alone = np.float32(np.arange(LAYER.top_k) == k) * np.ones_like(out.weights)
        y = np.asarray(every(inputs | {"weights": alone})[2])
        np.testing.assert_array_equal(y, np.where(slots[:, k, None] >= 0, rows[slots[:, k]], 0))
        np.testing.assert_array_equal(y.any(axis=1), slots[:, k] >= 0)
    used = (slots >= 0).sum()
    assert 0 < used < ids.size and not rows[used:].any()


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
    names = (TARGET, "jaxmoe_finalize_v1", "jaxmoe_")
    assert [text.count(f"custom_call @{n}") for n in names] == [1, 1, 2]
    assert "tensor<2x32x32xf8E4M3FN>" in text


def test_rows_and_their_sum_have_derivatives():
    def loss(x, weights, ids, experts):
        out = moe_mlp(x, Routing(ids, weights), *experts, weight_layout="nk", do_finalize=False)
        return finalize(out.rows, out, out.weights).astype(F32).sum()

    args = struct(T, H), ROUTING.weights, ROUTING.expert_ids, weights("fp8_channel")
    assert jax.eval_shape(jax.grad(loss), *args) == args[0]
    assert jax.eval_shape(jax.grad(loss, 1), *args) == args[1]


@pytest.mark.parametrize("quantized_x", (False, True))
@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_the_call_of_the_layer_without_its_last_step(format, quantized_x):
    x = quantized(T, H, format=format, layout="tokens", dtype=F16) if quantized_x else struct(T, H)
    static = {"intermediate_scale": struct(E, dtype=F32)} if format == "fp8_tensor" else {}
    options = {"weight_layout": "nk", "num_experts": 9, "expert_offset": 3}

    def fn(args, static, do_finalize):
        return moe_mlp(*args, do_finalize=do_finalize, **static, **options)

    args = (x, ROUTING, *weights(format))
    attrs, operands, results = layer_call(cuda_call(lambda *a: fn(*a, True), args, static))
    assert operands.pop("weights") == "6x2xf32"
    assert results.pop("y") == ("6x144xf16" if quantized_x else "6x144xbf16")
    call = cuda_call(lambda *a: fn(*a, False), args, static)
    alone = attrs | {"finalize": "0:i64"}, operands, results | {"slot_to_row": "6x2xi32"}
    assert layer_call(call) == alone
    (op,) = explain(lambda a, s: fn(a, s, False), args, static).ops
    assert (op.op, op.cuda_target) == ("jaxmoe_moe_mlp", TARGET)
    scratch = 5 if results.get("xq") else 4
    assert [len(op.operands), len(op.cuda_scratch)] == [len(operands), scratch]


def test_rows_refuse_what_the_layer_does():
    args = (
        struct(T, 24),
        ROUTING,
        *(quantized(E, *s, format="fp8_tensor") for s in ((64, 24), (24, 32))),
    )
    (op,) = explain(lambda *a: moe_mlp(*a, weight_layout="nk", do_finalize=False), *args).ops
    assert "experts.gate_up.values.shape[2]=24 must be a positive multiple of 16" in op.cuda_reason


def test_rows_that_do_not_depend_on_the_batch():
    """Nor do their products split k, with one token."""
    args = (
        struct(1, 2048),
        Routing(struct(1, 2, dtype=I32), struct(1, 2, dtype=F32)),
        quantized(8, 2048, 2048, format="fp8_channel"),
        quantized(8, 2048, 1024, format="fp8_channel"),
    )
    splits = []
    for batch_invariant in (False, True):
        given = {"do_finalize": False, "batch_invariant": batch_invariant}
        attrs = cuda_call(lambda *a, o=given: moe_mlp(*a, weight_layout="nk", **o), *args)[1]
        splits.append([attrs[name]["split_k"] for name in ("gemm1", "gemm2")])
    assert "2:i64" in splits[0] and splits[1] == ["1:i64", "1:i64"]


def test_vmap_of_rows_is_one_call_or_a_loop_of_calls():
    routing = Routing(struct(3, T, K, dtype=I32), struct(3, T, K, dtype=F32))

    def fn(*a):
        return moe_mlp(*a, weight_layout="nk", do_finalize=False)

    for format, tokens in (("fp8_channel", "18x144xbf16"), ("fp8_tensor", "6x144xbf16")):
        args = (struct(3, T, H), routing, *weights(format))
        with _targets.force_cuda_lowering():
            mapped = jax.jit(jax.vmap(fn, (0, 0, None, None))).trace(*args)
            text = mapped.lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in text.splitlines() if f"@{TARGET}(" in line)
        assert f"(tensor<{tokens}>" in line and "tensor<4x544x144xf8E4M3FN>" in line


def test_parts_on_a_mesh_have_the_tile_that_was_asked_for():
    """The first product of a device's part is in float32."""
    mesh = jax.make_mesh((2,), ("e",), (AxisType.Explicit,), devices=jax.devices()[:2])

    def split(array):
        names = P("e", *(None,) * (array.ndim - 1))
        at = jax.sharding.NamedSharding(mesh, names)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=at)

    shapes = (4, 64, 32), (4, 32, 32)
    w = jax.tree.map(split, tuple(quantized(*s, format="fp8_channel") for s in shapes))
    config = GemmConfig(256, 160, cluster=2), None

    def fn(x, ids, weights, *w):
        args = x, Routing(ids, weights), *w
        return moe_mlp(*args, weight_layout="nk", do_finalize=False, config=config).rows

    args = struct(8, 32), struct(8, 1, dtype=I32), struct(8, 1, dtype=F32), *w
    with jax.set_mesh(mesh), _targets.force_cuda_lowering():
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    tiles = re.findall(r"@jaxmoe_grouped_gemm_v1.*?token_tile = (\d+)", text)
    assert len(tiles) == 2 and tiles[0] == "160"
