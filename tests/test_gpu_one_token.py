"""A token by itself with packed weights on a GPU: the kernels that run by slices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import GemmConfig, Routing, SoftcapSwiglu, SwigluStep, reference
from jaxmoe._gemm import slices
from jaxmoe._testing import GPT_OSS, Layer, assert_close, assert_equal, layer_inputs, normal, poison
from tests.test_gpu_packed import PACKED, dequantized, legal, on_cpu, quantized

pytestmark = pytest.mark.gpu

# Every order, beside silu and beside another activation; H with an odd number of blocks; one round
# of slices and two, of which some CTAs have one; one choice, as many as a warp has lanes, and
# numbers between powers of two.
CASES = (
    Layer("swiglu", "", 512, 512, 9, 8),
    Layer("clamped", "", 576, 640, 9, 8, GPT_OSS, "interleaved", True),
    Layer("up_gate", "", 1344, 1024, 17, 16, "geglu", "up_gate", True),
    Layer("one", "", 640, 4608, 3, 1, "geglu_tanh"),
    Layer("all", "", 832, 256, 33, 32, bias=True),
    Layer("six", "", 704, 896, 7, 6, SoftcapSwiglu(4.0, 25.0), "interleaved"),
    Layer("ten", "", 1024, 512, 11, 10, SwigluStep(1.0), bias=True),
)
ROUTINGS = ("uniform", "repeated", "with_invalid")


def inputs_of(layer, format, routing, dtype):
    """Arrays of one token with packed weights."""
    rng = np.random.default_rng([layer.hidden, layer.top_k, len(routing), len(format)])
    kind = "one_expert" if routing == "repeated" else routing
    inputs = layer_inputs(layer, 1, kind, rng, dtype, "nk")
    if routing == "repeated":
        inputs["expert_ids"] //= 3
    for name in ("w_gate_up", "w_down"):
        inputs[name] = quantized(inputs[name], format)
    return inputs | {"residual": normal(rng, (1, layer.hidden), dtype)}


def experts_of(inputs, layer):
    return jaxmoe.Experts(
        gate_up=inputs["w_gate_up"],
        down=inputs["w_down"],
        gate_up_bias=inputs.get("b_gate_up"),
        down_bias=inputs.get("b_down"),
        activation=layer.activation,
        order=layer.gate_up,
        layout="nk",
    )


def by_slices(inputs, experts, sums, **kwargs):
    """The layer's result into memory that holds NaN, twice: the same bits."""
    fn = jax.jit(functools.partial(jaxmoe.moe_mlp, residual=inputs["residual"], **kwargs))
    given = inputs["x"], Routing(inputs["expert_ids"], inputs["weights"]), experts
    assert f"tensor<{sums}xf32>" in fn.lower(*given).as_text()
    out = []
    for _ in range(2):
        poison((sums,), jnp.float32)
        out.append(fn(*given))
    assert_equal(*out)
    return out[0]


def wanted(inputs, layer, dtype, **window):
    """The reference with the weights as they are decoded."""
    host = on_cpu(inputs)
    for name in ("w_gate_up", "w_down"):
        host[name] = on_cpu(dequantized(inputs[name]))
    options = {"activation": layer.activation, "gate_up": layer.gate_up, "weight_layout": "nk"}
    return [reference.moe_mlp(**host, **options, **window, dtype=d) for d in (jnp.float32, dtype)]


@pytest.mark.sanitizer
@pytest.mark.parametrize("format", PACKED)
def test_every_form(format):
    for index, layer in enumerate(CASES):
        layer = legal(layer, format)
        dtype = (jnp.bfloat16, jnp.float16)[(index + len(format)) % 2]
        sums = slices.slice_sums(layer.top_k, layer.hidden, layer.intermediate)
        for routing in ROUTINGS:
            inputs = inputs_of(layer, format, routing, dtype)
            out = by_slices(inputs, experts_of(inputs, layer), sums)
            assert_close(out, *wanted(inputs, layer, dtype))


@pytest.mark.parametrize("format", ("mxfp4", "int4_g128_zp", "int8_channel"))
def test_two_arrays(format):
    layer = CASES[0]
    inputs = inputs_of(layer, format, "uniform", jnp.bfloat16)
    both = dequantized(inputs["w_gate_up"])
    gate, up = (quantized(w.astype(jnp.bfloat16), format) for w in jnp.split(both, 2, axis=1))
    experts = dataclasses.replace(experts_of(inputs, layer), gate_up=None, gate=gate, up=up)
    sums = slices.slice_sums(layer.top_k, layer.hidden, layer.intermediate)
    out = by_slices(inputs, experts, sums)
    joined = jnp.concatenate([dequantized(gate), dequantized(up)], axis=1)
    host = on_cpu(inputs | {"w_gate_up": joined, "w_down": dequantized(inputs["w_down"])})
    assert_close(
        out,
        *(
            reference.moe_mlp(**host, weight_layout="nk", dtype=d)
            for d in (jnp.float32, jnp.bfloat16)
        ),
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("format", ("mxfp4", "int4_g128"))
def test_some_experts_are_here(format):
    """Choices of others have no part in the sum, whatever their weights are."""
    layer = legal(CASES[2], format)
    inputs = inputs_of(layer, format, "with_invalid", jnp.bfloat16)
    first, count = 4, 7
    local = lambda a: jax.tree.map(lambda w: w[first : first + count], a)  # noqa: E731
    parts = {n: local(a) if n[:2] in ("w_", "b_") else a for n, a in inputs.items()}
    window = {"num_experts": layer.num_experts, "expert_offset": first}
    sums = slices.slice_sums(layer.top_k, layer.hidden, layer.intermediate)
    out = by_slices(parts, experts_of(parts, layer), sums, **window)
    ids = inputs["expert_ids"]
    here = (ids >= first) & (ids < first + count)
    assert here.any() and not here.all()
    masked = inputs | {"expert_ids": jnp.where(here, ids, -1)}
    assert_close(out, *wanted(masked, layer, jnp.bfloat16))
    strange = parts | {"weights": jnp.where(here, inputs["weights"], jnp.nan)}
    assert_equal(by_slices(strange, experts_of(parts, layer), sums, **window), out)
    # a map that gives two experts of the layer the same weights
    table = jnp.where(jnp.arange(layer.num_experts) < 9, jnp.arange(layer.num_experts) % 3, -1)
    mapped = {"num_experts": layer.num_experts, "expert_map": table.astype(jnp.int32)}
    out = by_slices(parts, experts_of(parts, layer), sums, **mapped)
    ids = jnp.where((ids >= 0) & (ids < 9), first + ids % 3, -1)
    assert_close(out, *wanted(inputs | {"expert_ids": ids}, layer, jnp.bfloat16))


def test_no_expert_is_here():
    layer = CASES[0]
    inputs = inputs_of(layer, "int4_g64", "uniform", jnp.bfloat16)
    inputs["expert_ids"] = jnp.full_like(inputs["expert_ids"], 1 << 30)
    sums = slices.slice_sums(layer.top_k, layer.hidden, layer.intermediate)
    assert_equal(by_slices(inputs, experts_of(inputs, layer), sums), inputs["residual"])


def test_values_that_are_not_finite():
    layer = CASES[0]
    inputs = inputs_of(layer, "mxfp8", "uniform", jnp.bfloat16)
    inputs["x"] = inputs["x"].at[0, 7].set(jnp.nan)
    sums = slices.slice_sums(layer.top_k, layer.hidden, layer.intermediate)
    assert np.isnan(by_slices(inputs, experts_of(inputs, layer), sums)).all()


def test_tiles_that_are_asked_for_are_two_kernels():
    layer = CASES[0]
    inputs = inputs_of(layer, "int4_g128", "uniform", jnp.bfloat16)
    experts = experts_of(inputs, layer)
    given = inputs["x"], Routing(inputs["expert_ids"], inputs["weights"]), experts
    tile = GemmConfig(128, 16)
    options = [
        {"config": (dataclasses.replace(tile, gather=True), tile)},
        {"batch_invariant": True},
    ]
    two = [jax.jit(functools.partial(jaxmoe.moe_mlp, **o))(*given) for o in options]
    assert_equal(*two)
    ask = wanted({n: a for n, a in inputs.items() if n != "residual"}, layer, jnp.bfloat16)
    assert_close(two[0], *ask)
    assert_close(jax.jit(jaxmoe.moe_mlp)(*given), *ask)


def test_many_layers_in_a_row():
    """Each reads what the one before has written; command buffers replay them."""
    layer = CASES[0]
    inputs = inputs_of(layer, "mxfp4", "uniform", jnp.bfloat16)
    experts = experts_of(inputs, layer)
    routing = Routing(inputs["expert_ids"], inputs["weights"])

    def chain(x):
        return jax.lax.scan(
            lambda x, _: ((y := jaxmoe.moe_mlp(x, routing, experts, residual=x)), y), x, length=200
        )[1]

    one = jax.jit(lambda x: jaxmoe.moe_mlp(x, routing, experts, residual=x))
    got, x = jax.jit(chain)(inputs["x"]), inputs["x"]
    for i in range(200):
        x = one(x)
        assert_equal(got[i], x)
