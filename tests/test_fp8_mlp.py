"""moe_mlp with FP8 weights: values against the reference and against the formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import QuantizedArray, Routing, Swiglu, quantize, quantize_tokens, reference
from jaxmoe._testing import FP8 as FORMATS
from jaxmoe._testing import (
    GPT_OSS,
    Layer,
    assert_close,
    assert_equal,
    assert_vmap_is_loop,
    layer_inputs,
    normal,
    quantized_inputs,
)
from tests.fp8_oracle import oracle
from tests.layers import moe_mlp

SMALL = Layer("", "less than a block of 128", 48, 32, 5, 2, bias=True)
BLOCKS = Layer("", "a block and a part of one", 144, 208, 3, 2, bias=True)


def options(layer, layout="kn"):
    return {"activation": layer.activation, "gate_up": layer.gate_up, "weight_layout": layout}


def run(inputs, **kwargs):
    rest = dict(inputs)
    routing = Routing(rest.pop("expert_ids"), rest.pop("weights"))
    x, w1, w2 = (rest.pop(name) for name in ("x", "w_gate_up", "w_down"))
    return moe_mlp(x, routing, w1, w2, **rest, **kwargs)


@functools.cache
def programs(dtype, **options):
    """The layer, and the reference in float32 and in `dtype`; compiled once for each shape."""
    dtypes = (jnp.float32, dtype)
    both = lambda i: [reference.moe_mlp(**i, **options, dtype=d) for d in dtypes]  # noqa: E731
    return jax.jit(lambda i: run(i, **options)), jax.jit(both)


def check(inputs, static=None, **options):
    """Compares with the reference. Returns the result and the naive one."""
    dtype = inputs["x"].dtype
    # static scales are constants of a program of their own, so that NumPy's stay what they are
    fresh = programs.__wrapped__(dtype, **options, **static) if static else None
    fn, both = fresh or programs(dtype, **options)
    out = fn(inputs)
    assert out.dtype == dtype
    want, naive = both(inputs)
    assert_close(out, want, naive)
    return out, naive


def check_oracle(inputs, format, layer, layout="kn", **static):
    """Compares with the reference and with the formulas in float64."""
    out, naive = check(inputs, static, **options(layer, layout))
    assert_close(out, oracle(inputs, format, layer.activation, layer.gate_up, **static), naive)


@pytest.mark.parametrize(
    ("format", "layer", "layout"),
    [*((f, BLOCKS, "nk") for f in FORMATS), ("fp8_block", SMALL, "kn")],
    ids=[*FORMATS, "fp8_block-small-kn"],
)
def test_the_formulas(format, layer, layout):
    rng = np.random.default_rng(len(format))
    inputs = quantized_inputs(layer, 9, "with_invalid", rng, jnp.bfloat16, format, layout)
    check_oracle(inputs, format, layer, layout)


# Of each kind and each order of gate and up in some format: test_mlp.py has all.
@pytest.mark.parametrize(
    ("activation", "gate_up", "format", "bias"),
    (
        (Swiglu(limit=0.5), "up_gate", "fp8_tensor", False),
        ("geglu_tanh", "interleaved", "fp8_block", True),
        (GPT_OSS, "interleaved", "fp8_channel", True),
        ("gelu", "gate_up", "fp8_block", True),
        ("relu2", "gate_up", "fp8_block", False),
    ),
    ids=str,
)
def test_activations(activation, gate_up, format, bias):
    layer = Layer("", "", 144, 80, 2, 2, activation, gate_up, bias)
    rng = np.random.default_rng(3)
    inputs = quantized_inputs(layer, 11, "uniform", rng, jnp.float16, format)
    check_oracle(inputs, format, layer)


@pytest.mark.parametrize(
    ("format", "num_tokens"), [*((f, 0) for f in FORMATS), ("fp8_tensor", 1), ("fp8_block", 150)]
)
def test_numbers_of_tokens(format, num_tokens):
    """150 tokens of one expert are two blocks of rows."""
    rng = np.random.default_rng(num_tokens)
    inputs = quantized_inputs(SMALL, num_tokens, "one_expert", rng, jnp.bfloat16, format)
    inputs["residual"] = normal(rng, inputs["x"].shape, jnp.bfloat16)
    check(inputs, **options(SMALL))


def test_e5m2_weights():
    rng = np.random.default_rng(1)
    inputs = quantized_inputs(
        BLOCKS, 9, "uniform", rng, jnp.bfloat16, "fp8_tensor", element_type="e5m2"
    )
    assert inputs["w_down"].values.dtype == jnp.float8_e5m2
    check_oracle(inputs, "fp8_tensor", BLOCKS)


@pytest.mark.parametrize("num_scales", ((), (5,)), ids=("one", "of_each_expert"))
def test_static_scales(num_scales):
    rng = np.random.default_rng(2)
    inputs = quantized_inputs(SMALL, 30, "uniform", rng, jnp.bfloat16, "fp8_tensor")
    h_scale = np.float32(rng.uniform(0.004, 0.02, num_scales))  # some saturate; NumPy's, too
    static = {"x_scale": jnp.float32(0.003), "intermediate_scale": h_scale}
    check_oracle(inputs, "fp8_tensor", SMALL, **static)


def test_a_static_scale_out_of_range_makes_its_expert_nan():
    rng = np.random.default_rng(3)
    inputs = quantized_inputs(SMALL, 20, "uniform", rng, jnp.bfloat16, "fp8_tensor")
    scale = jnp.full(5, 0.01)
    clean = run(inputs, intermediate_scale=scale)
    dirty = run(inputs, intermediate_scale=scale.at[2].set(2.0**-127))
    bad = (np.asarray(inputs["expert_ids"]) == 2).any(axis=1)
    assert bad.any() and not bad.all()
    assert np.isnan(dirty[bad]).all()
    assert_equal(dirty[~bad], clean[~bad])
    assert np.isnan(run(inputs, x_scale=jnp.float32(0))).all()


@pytest.mark.parametrize("format", ("fp8_tensor", "fp8_block"))
def test_quantized_tokens_give_the_bits_of_plain_ones(format):
    rng = np.random.default_rng(4)
    inputs = quantized_inputs(BLOCKS, 12, "zipf", rng, jnp.float16, format)
    layer = jax.jit(functools.partial(run, **options(BLOCKS)))
    out = layer(inputs)
    assert_equal(layer(inputs | {"x": quantize_tokens(inputs["x"], format)}), out)
    if format == "fp8_tensor":
        scale = jnp.float32(0.02)
        quantized = quantize_tokens(inputs["x"], format, scale=scale)
        assert_equal(layer(inputs | {"x": quantized}), layer(inputs | {"x_scale": scale}))


def test_zeros_and_blocks_of_zeros():
    rng = np.random.default_rng(5)
    inputs = layer_inputs(BLOCKS, 9, "uniform", rng, jnp.bfloat16, "nk")
    inputs["x"] = inputs["x"].at[:, :128].set(0).at[3].set(0)
    inputs["w_down"] = inputs["w_down"].at[1, :, :128].set(0)
    inputs["w_gate_up"] = inputs["w_gate_up"].at[0].set(0)
    for format in FORMATS:
        quantized = {
            n: quantize(inputs[n], format, weight_layout="nk") for n in ("w_gate_up", "w_down")
        }
        check_oracle(inputs | quantized, format, BLOCKS, "nk")


@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_stay_in_their_tokens(format):
    """NaN is in no maximum; an infinity is the largest FP8 number and no maximum either."""
    rng = np.random.default_rng(6)
    inputs = quantized_inputs(SMALL, 14, "uniform", rng, jnp.bfloat16, format)
    x = inputs["x"].at[:, 3].set(0)
    clean = run(inputs | {"x": x})
    dirty = run(inputs | {"x": x.at[5, 3].set(jnp.nan)})
    assert jnp.isnan(dirty[5]).all()
    others = np.delete(np.arange(14), 5)
    if format == "fp8_tensor":  # rows of NaN leave the intermediate's scale to the other tokens
        without = {n: a[others] if n in ("x", "expert_ids", "weights") else a
                   for n, a in (inputs | {"x": x}).items()}  # fmt: skip
        scale = quantize_tokens(x, format).scales
        assert_equal(dirty[others], run(without, x_scale=scale))
    else:
        assert_equal(dirty[others], clean[others])
    assert jnp.isfinite(run(inputs | {"x": x.at[5, 3].set(jnp.inf)})).all()


def test_a_token_does_not_depend_on_its_batch():
    rng, count = np.random.default_rng(7), 7
    inputs = quantized_inputs(BLOCKS, 40, "uniform", rng, jnp.bfloat16, "fp8_block")
    whole = run(inputs, batch_invariant=True)
    part = {n: a[:count] if n in ("x", "expert_ids", "weights") else a
            for n, a in inputs.items()}  # fmt: skip
    assert_close(run(part, batch_invariant=True), whole[:count], whole[:count])


def local(inputs, first, count):
    """The arrays of the device that holds experts first .. first + count - 1."""
    split = ("w_gate_up", "w_down", "b_gate_up", "b_down")
    cut = lambda tree: jax.tree.map(lambda a: a[first : first + count], tree)  # noqa: E731
    return {n: cut(a) if n in split else a for n, a in inputs.items()}


def test_windows_and_maps():
    """Rows of experts elsewhere are in no scale of the intermediate, tokens always in that of x."""
    rng = np.random.default_rng(8)
    inputs = quantized_inputs(SMALL, 15, "with_invalid", rng, jnp.bfloat16, "fp8_tensor")
    part = local(inputs, 0, 3)
    check(part | {"expert_map": jnp.array([2, -1, 0, 9, 1], jnp.int32)}, **options(SMALL))
    static = {"intermediate_scale": jnp.array([0.01, 0.02, 0.005])}
    check(part, static, **options(SMALL), num_experts=5, expert_offset=2)


@pytest.mark.parametrize("format", FORMATS[1:2])
def test_weight_on_input_and_residual(format):
    layer = Layer("", "", 48, 32, 5, 1)
    rng = np.random.default_rng(9)
    inputs = quantized_inputs(layer, 9, "with_invalid", rng, jnp.bfloat16, format)
    inputs["residual"] = normal(rng, (9, 48), jnp.bfloat16)
    weighed = (inputs["x"].astype(jnp.float32) * inputs["weights"]).astype(jnp.bfloat16)
    alone = inputs | {"x": weighed, "weights": jnp.ones_like(inputs["weights"])}
    out, _ = check(alone, **options(layer))
    assert_equal(run(inputs, apply_weight_on_input=True), out)


def test_accum_changes_nothing_off_cuda():
    rng = np.random.default_rng(10)
    inputs = quantized_inputs(SMALL, 9, "uniform", rng, jnp.bfloat16, "fp8_channel")
    out = run(inputs)
    for accum in ("fast", "promoted"):
        assert_equal(run(inputs, accum=accum), out)


def test_scan_over_layers_and_eager():
    layer = Layer("", "", 48, 32, 5, 2)
    rng = np.random.default_rng(11)
    draw = functools.partial(quantized_inputs, layer, 9, "uniform", rng, jnp.bfloat16)
    inputs = [draw("fp8_tensor") for _ in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *inputs)
    scanned, _ = jax.jit(
        lambda x, all: jax.lax.scan(lambda y, i: (run(i | {"x": y}), None), x, all)
    )(inputs[0]["x"], stacked)
    y = inputs[0]["x"]
    for one in inputs:
        y = run(one | {"x": y})
    assert_equal(scanned, y)


@pytest.mark.parametrize(
    ("format", "static"), (("fp8_tensor", False), ("fp8_block", False), ("fp8_tensor", True))
)
def test_vmap_is_a_loop(format, static):
    """Over tokens, over weights, over both: one scale of fp8_tensor belongs to one example."""
    layer = Layer("", "", 32, 48, 4, 2)
    rng = np.random.default_rng(12)
    inputs = [quantized_inputs(layer, 6, "uniform", rng, jnp.bfloat16, format) for _ in range(3)]
    scales = {"x_scale": jnp.float32(0.01), "intermediate_scale": jnp.float32(0.02)}

    def fn(x, ids, weights, w1_values, w1_scales):
        q = inputs[0]["w_gate_up"]
        w1 = QuantizedArray(w1_values, w1_scales, q.format, q.layout, q.dtype)
        arrays = inputs[0] | {"x": x, "expert_ids": ids, "weights": weights, "w_gate_up": w1}
        return run(arrays, **(scales if static else {}))

    names = ("x", "expert_ids", "weights")
    tokens = [jnp.stack([i[n] for i in inputs]) for n in names]
    w1 = jax.tree.leaves(inputs[0]["w_gate_up"])
    all_w1 = jax.tree.leaves(
        jax.tree.map(lambda *a: jnp.stack(a), *[i["w_gate_up"] for i in inputs])
    )
    fn = jax.jit(fn)
    assert_vmap_is_loop(fn, (*tokens, *all_w1), (0, 0, 0, 0, 0))
    if format == "fp8_block" or static:
        return
    assert_vmap_is_loop(fn, (*tokens, *w1), (0, 0, 0, None, None))
    assert_vmap_is_loop(fn, (tokens[0], *[a[0] for a in tokens[1:]], *w1), (0, *[None] * 4))


@pytest.mark.parametrize("format", ("fp8_tensor", "fp8_block"))
def test_vmap_over_quantized_tokens_and_options(format):
    layer = Layer("", "", 32, 48, 4, 2, bias=True)
    rng = np.random.default_rng(13)
    inputs = quantized_inputs(layer, 6, "uniform", rng, jnp.bfloat16, format)
    x = normal(rng, (3, 6, 32), jnp.bfloat16)
    q = jax.vmap(lambda a: quantize_tokens(a, format))(x)
    with_scale = format == "fp8_tensor"  # of the intermediate

    @jax.jit
    def fn(values, scales, residual, h_scale):
        x = QuantizedArray(values, scales, q.format, q.layout, q.dtype)
        static = {"intermediate_scale": h_scale} if with_scale else {}
        return run(inputs | {"x": x, "residual": residual}, **static)

    assert_vmap_is_loop(fn, (q.values, q.scales, x, jnp.array([0.01, 0.02, 0.03])), (0,) * 4)


def test_shard_map_over_experts():
    layer = Layer("", "", 32, 48, 4, 2)
    rng = np.random.default_rng(14)
    inputs = quantized_inputs(layer, 10, "uniform", rng, jnp.bfloat16, "fp8_channel")
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def part(inputs):
        first = jax.lax.axis_index("expert") * 2
        expert_map = jnp.arange(4, dtype=jnp.int32) - first
        y = run(inputs | {"expert_map": expert_map})
        return jax.lax.psum(y.astype(jnp.float32), "expert")

    specs = {n: spec("expert") if n.startswith("w_") else spec() for n in inputs}
    fn = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=spec())
    one = jax.jit(lambda i: run(i).astype(jnp.float32))
    halves = (
        one(local(inputs, first, 2) | {"expert_map": np.arange(4, dtype=np.int32) - first})
        for first in (0, 2)
    )
    assert_equal(jax.jit(fn)(jax.tree.map(np.asarray, inputs)), sum(map(np.asarray, halves)))
