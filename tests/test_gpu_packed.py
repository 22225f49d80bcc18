"""moe_mlp and grouped_gemm with packed weights on a GPU: every kernel, format and epilogue."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import (
    GemmConfig,
    Routing,
    _formats,
    _gemm,
    dequantize,
    grouped_gemm,
    quantize,
    reference,
)
from jaxmoe._testing import GPT_OSS, Layer, assert_close, assert_equal, layer_inputs, normal, poison

pytestmark = pytest.mark.gpu

PACKED = [name for name, f in _formats.QUANTIZED.items() if f.packed and f.code >= 0]
KERNELS = [
    pytest.param(tile, format, id=f"{tile}-{format}")
    for tile in sorted(_gemm.tiles.PACKED)
    for format in PACKED
]
# Each epilogue of the gate-up product; sizes that end inside a tile.
CASES = (
    (1, Layer("swiglu", "", 256, 192, 9, 2)),
    (3, Layer("clamped", "", 384, 128, 9, 2, GPT_OSS, "interleaved", True)),
    (16, Layer("up_gate", "", 128, 320, 9, 3, "geglu", "up_gate", True)),
    (100, Layer("ungated", "", 640, 384, 9, 2, "relu2", bias=True)),
    (700, Layer("many", "", 256, 128, 9, 2)),
)


def on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])


def legal(layer, format):
    """The layer with H and I that the format's groups divide."""
    unit = 128 if "g128" in format else 64
    up = lambda n: -(-n // unit) * unit  # noqa: E731
    return dataclasses.replace(layer, hidden=up(layer.hidden), intermediate=up(layer.intermediate))


@functools.cache
def case(index, format, dtype):
    """Experts, tokens and routing of a case, and the reference with the dequantized weights."""
    num_tokens, layer = CASES[index]
    layer = legal(layer, format)
    rng = np.random.default_rng([index, len(format)])
    inputs = layer_inputs(layer, num_tokens, "zipf", rng, dtype, "nk")
    first, down = (quantize(inputs[n], format, weight_layout="nk") for n in ("w_gate_up", "w_down"))
    experts = jaxmoe.Experts(
        gate_up=first,
        down=down,
        gate_up_bias=inputs.get("b_gate_up"),
        down_bias=inputs.get("b_down"),
        activation=layer.activation,
        order=layer.gate_up,
        layout="nk",
    )
    host = on_cpu(inputs)
    host["w_gate_up"], host["w_down"] = (
        dequantize(on_cpu(q), dtype=jnp.float32) for q in (first, down)
    )
    options = {
        "activation": layer.activation,
        "gate_up": layer.gate_up,
        "weight_layout": "nk",
    }
    wanted = tuple(reference.moe_mlp(**host, **options, dtype=d) for d in (jnp.float32, dtype))
    return inputs["x"], Routing(inputs["expert_ids"], inputs["weights"]), experts, wanted


def compiled(x, routing, experts, **kwargs):
    """Runs the layer into memory that holds NaN, twice: the same bits."""
    fn = jax.jit(functools.partial(jaxmoe.moe_mlp, **kwargs))
    poison(x.shape, jnp.float32)
    out = fn(x, routing, experts)
    assert_equal(fn(x, routing, experts), out)
    return out


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tile", "format"), KERNELS)
def test_every_kernel(tile, format):
    """Fetched by index or copied in expert order, rows of x are the same: so are the results."""
    for index in range(len(CASES)):
        x, routing, experts, wanted = case(index, format, (jnp.bfloat16, jnp.float16)[index % 2])
        outs = []
        for gather in (True, False):
            config = GemmConfig(*tile, gather=gather), GemmConfig(*tile)
            outs.append(compiled(x, routing, experts, config=config))
        assert_close(outs[0], *wanted)
        assert_equal(outs[0], outs[-1])


@pytest.mark.parametrize("format", PACKED)
def test_tiles_that_are_chosen(format):
    for index, (num_tokens, _) in enumerate(CASES):
        x, routing, experts, wanted = case(index, format, jnp.bfloat16)
        out = compiled(x, routing, experts)
        assert_close(out, *wanted)
        assert_equal(
            compiled(x, routing, experts, batch_invariant=True)[: num_tokens // 2],
            compiled(
                x[: num_tokens // 2],
                Routing(routing.expert_ids[: num_tokens // 2], routing.weights[: num_tokens // 2]),
                experts,
                batch_invariant=True,
            ),
        )


@pytest.mark.parametrize("format", PACKED)
def test_two_arrays(format):
    x, routing, experts, _ = case(0, format, jnp.bfloat16)
    half = legal(CASES[0][1], format).intermediate
    dense = dequantize(experts.gate_up, dtype=jnp.float32)
    gate, up = (
        quantize(w.astype(jnp.bfloat16), format, weight_layout="nk")
        for w in (dense[:, :half], dense[:, half:])
    )
    two = dataclasses.replace(experts, gate_up=None, gate=gate, up=up)
    joined = jnp.concatenate([dequantize(q, dtype=jnp.float32) for q in (gate, up)], axis=1)
    inputs = on_cpu((x, routing, joined, dequantize(experts.down, dtype=jnp.float32)))
    refs = tuple(
        reference.moe_mlp(
            inputs[0],
            inputs[1].expert_ids,
            inputs[1].weights,
            *inputs[2:],
            weight_layout="nk",
            dtype=d,
        )
        for d in (jnp.float32, jnp.bfloat16)
    )
    assert_close(compiled(x, routing, two), *refs)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("format", PACKED)
def test_weights_are_decoded_exactly(format, dtype):
    """Rows of an identity give the decoded weights: those that `dequantize` gives."""
    k = 256
    w = normal(np.random.default_rng(1), (2, k, 192), dtype)
    q = quantize(w, format, weight_layout="kn")
    lhs = jnp.tile(jnp.eye(k, dtype=dtype), (2, 1))
    sizes = jnp.array([k, k], jnp.int32)
    for tile in sorted(_gemm.tiles.PACKED):
        out = grouped_gemm(
            lhs, q, sizes, preferred_element_type=jnp.float32, config=GemmConfig(*tile)
        )
        assert_equal(out.reshape(2, k, 192), dequantize(q, dtype=jnp.float32))


@pytest.mark.sanitizer
@pytest.mark.parametrize("format", PACKED)
def test_any_group_sizes_stay_in_bounds(format):
    rng = np.random.default_rng(2)
    q = quantize(normal(rng, (3, 256, 192), jnp.bfloat16), format, weight_layout="kn")
    lhs = normal(rng, (40, 256), jnp.bfloat16)
    for sizes in ([2**31 - 1, -5, 7], [-(2**31), 2**30, 2**30], [0, 0, 0]):
        out = grouped_gemm(lhs, q, jnp.array(sizes, jnp.int32))
        assert out.shape == (40, 192)
