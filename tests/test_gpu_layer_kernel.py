"""One kernel for both products on a GPU: the bits that two kernels of its tile give."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import GemmConfig, Routing, _formats, _gemm, quantize
from jaxmoe._mlp import checks
from jaxmoe._testing import (
    GPT_OSS,
    Layer,
    assert_equal,
    expert_ids,
    layer_inputs,
    normal,
    poison,
    quantized_inputs,
    routing_weights,
)

pytestmark = pytest.mark.gpu

PACKED = [name for name, f in _formats.QUANTIZED.items() if f.packed and f.code >= 0]
PLAIN_TILES = sorted(_gemm.tiles.LAYER_TILES)
PACKED_TILES = sorted(_gemm.tiles.PACKED_LAYER_TILES)
# Tokens, and a layer with each epilogue. The products plan the first two for themselves; the last
# has tiles for several rounds of CTAs.
CASES = (
    (1, Layer("swiglu", "", 512, 256, 40, 8)),
    (3, Layer("clamped", "", 384, 128, 9, 4, GPT_OSS, "interleaved", True)),
    (33, Layer("up_gate", "", 256, 320, 70, 3, "geglu", "up_gate", True)),
    (700, Layer("many", "", 256, 640, 24, 2)),
)


# FP8 weights, their sums and their elements.
FP8 = (
    ("fp8_block", None, "e4m3"),
    *(("fp8_tensor", sums, e) for sums in ("fast", "promoted") for e in ("e4m3", "e5m2")),
)
# Last groups of scales that are one tile, or end inside one, and as many groups as one kernel
# quantizes.
FP8_CASES = (
    *CASES,
    (50, Layer("alone", "", 400, 704, 30, 4, bias=True)),
    (60, Layer("ragged", "", 272, 336, 9, 2, "geglu", "interleaved")),
    (20, Layer("most", "", 256, 3072, 12, 3)),
)


def legal(layer, format):
    """The layer with H and I that the format's groups divide."""
    unit = 128 if "g128" in format else 64
    up = lambda n: -(-n // unit) * unit  # noqa: E731
    return dataclasses.replace(layer, hidden=up(layer.hidden), intermediate=up(layer.intermediate))


def experts_of(inputs, layer, layout, **rest):
    return jaxmoe.Experts(
        gate_up=rest.pop("gate_up", inputs["w_gate_up"]),
        down=rest.pop("down", inputs["w_down"]),
        gate_up_bias=inputs.get("b_gate_up"),
        down_bias=inputs.get("b_down"),
        activation=layer.activation,
        order=layer.gate_up,
        layout=layout,
        **rest,
    )


def check(x, routing, experts, tile, rows=False):
    """One kernel gives what two give, twice, in memory that held NaN."""
    call = jaxmoe.expert_rows if rows else jaxmoe.moe_mlp
    second = GemmConfig(*tile)
    for gather in (True, False) if tile[1] <= _gemm.tiles.MAX_GATHER else (False,):
        first = dataclasses.replace(second, gather=gather)
        one = dataclasses.replace(first, one_kernel=True)
        wanted = jax.jit(functools.partial(call, config=(first, second)))(x, routing, experts)
        fn = jax.jit(functools.partial(call, config=(one, second)))
        assert "one_kernel = 1" in fn.lower(x, routing, experts).as_text()
        for _ in range(2):
            poison(x.shape, jnp.float32)
            jax.tree.map(assert_equal, fn(x, routing, experts), wanted)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("tile", PLAIN_TILES, ids=str)
def test_plain_weights(tile, layout, dtype):
    for index, (num_tokens, layer) in enumerate(CASES):
        rng = np.random.default_rng([index, tile[1], tile[3]])
        i = layer_inputs(layer, num_tokens, "zipf", rng, dtype, layout)
        routing = Routing(i["expert_ids"], i["weights"])
        check(i["x"], routing, experts_of(i, layer, layout), tile, rows=index == 1)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tile", PACKED_TILES, ids=str)
@pytest.mark.parametrize("format", PACKED)
def test_packed_weights(format, tile):
    for index, (num_tokens, layer) in enumerate(CASES):
        layer = legal(layer, format)
        if tile[3] > min(layer.hidden, layer.intermediate) // 64:
            continue  # a part of the k loop would be empty
        rng = np.random.default_rng([index, tile[1], tile[3]])
        dtype = (jnp.bfloat16, jnp.float16)[index % 2]
        i = layer_inputs(layer, num_tokens, "zipf", rng, dtype, "nk")
        packed = jax.jit(lambda w: quantize(w, format, weight_layout="nk"))  # noqa: B023
        weights = {"gate_up": packed(i["w_gate_up"]), "down": packed(i["w_down"])}
        routing = Routing(i["expert_ids"], i["weights"])
        check(i["x"], routing, experts_of(i, layer, "nk", **weights), tile, rows=index == 2)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tile", PLAIN_TILES, ids=str)
@pytest.mark.parametrize(("format", "accum", "element"), FP8)
def test_fp8_weights(format, accum, element, tile):
    """Static scales of the activations, or those of groups that the kernel makes itself."""
    for index, (num_tokens, layer) in enumerate(FP8_CASES):
        if tile[3] > -(-min(layer.hidden, layer.intermediate) // 128):
            continue  # a part of the k loop would be empty
        rng = np.random.default_rng([index, tile[1], tile[3]])
        dtype = (jnp.bfloat16, jnp.float16)[index % 2]
        i = quantized_inputs(layer, num_tokens, "zipf", rng, dtype, format, "nk", element)
        rest = {"accum": accum}
        if format == "fp8_tensor":
            h_scale = jnp.float32(0.02) if index % 2 else normal(rng, (layer.num_experts,)) ** 2
            rest |= {"x_scale": jnp.float32(0.02), "h_scale": h_scale}
        routing = Routing(i["expert_ids"], i["weights"])
        check(i["x"], routing, experts_of(i, layer, "nk", **rest), tile, rows=index == 1)


@pytest.mark.parametrize("tile", PLAIN_TILES, ids=str)
def test_groups_of_any_values(tile):
    """Zeros, infinities and NaN in groups whose scales the kernel makes."""
    layer = Layer("", "", 256, 320, 16, 2)
    i = quantized_inputs(layer, 60, "uniform", np.random.default_rng(8), jnp.bfloat16, "fp8_block")
    x = i["x"].at[::5].set(0).at[1::10, 7].set(jnp.nan).at[2::10].multiply(1e30)
    check(x, Routing(i["expert_ids"], i["weights"]), experts_of(i, layer, "kn"), tile)


@pytest.mark.parametrize("case", (0, 2))
def test_a_tile_whose_kernel_is_gone(case, monkeypatch):
    """Exported programs and saved tunings that ask for it run as two launches."""
    tile = (128, 16, 1, 2)
    assert tile not in PACKED_TILES
    monkeypatch.setattr(checks, "PACKED_LAYER_TILES", {tile})
    num_tokens, layer = CASES[case][0], legal(CASES[case][1], "mxfp4")
    i = layer_inputs(layer, num_tokens, "zipf", np.random.default_rng(case), jnp.bfloat16, "nk")
    packed = jax.jit(lambda w: quantize(w, "mxfp4", weight_layout="nk"))
    weights = {"gate_up": packed(i["w_gate_up"]), "down": packed(i["w_down"])}
    routing = Routing(i["expert_ids"], i["weights"])
    check(i["x"], routing, experts_of(i, layer, "nk", **weights), tile)


@pytest.mark.parametrize("routed", ("one_expert", "with_empty", "with_invalid"))
@pytest.mark.parametrize("num_tokens", (2, 40, 300))
def test_routings(num_tokens, routed):
    layer = Layer("", "", 256, 128, 48, 4)
    rng = np.random.default_rng([num_tokens, len(routed)])
    i = layer_inputs(layer, num_tokens, routed, rng, jnp.bfloat16)
    routing = Routing(i["expert_ids"], i["weights"])
    check(i["x"], routing, experts_of(i, layer, "kn"), (128, 8, 1, 2))


def test_a_window_of_the_experts():
    """A plan by a map, and slots of no expert that is here."""
    layer = Layer("", "", 256, 128, 12, 4)
    i = layer_inputs(layer, 64, "uniform", np.random.default_rng(5), jnp.bfloat16)
    routing = Routing(i["expert_ids"] % 30, i["weights"])
    experts = experts_of(i, layer, "kn")
    config = GemmConfig(128, 32, gather=True), GemmConfig(128, 32)
    one = dataclasses.replace(config[0], one_kernel=True), config[1]
    fn = jax.jit(jaxmoe.moe_mlp, static_argnames=("num_experts", "expert_offset", "config"))
    window = {"num_experts": 30, "expert_offset": 7}
    wanted = fn(i["x"], routing, experts, **window, config=config)
    assert_equal(fn(i["x"], routing, experts, **window, config=one), wanted)


@pytest.mark.parametrize("format", (None, "fp8_block"))
def test_a_thousand_layers_in_a_row(format):
    """Ever new routings in one program: no wait that nobody ends, no count that is not cleared."""
    layer = Layer("", "", 256, 256, 64, 4)
    rng = np.random.default_rng(6)
    draw = functools.partial(quantized_inputs, format=format) if format else layer_inputs
    i = draw(layer, 24, "uniform", rng, jnp.bfloat16)
    experts = experts_of(i, layer, "kn")
    ids = np.stack([expert_ids("zipf", rng, 24, 64, 4) for _ in range(1000)])
    weights = routing_weights(rng, 24, 4)

    def layers(x, config):
        def one(x, ids):
            y = jaxmoe.moe_mlp(x, Routing(ids, weights), experts, config=config)
            return x + 0.01 * y, None

        return jax.lax.scan(one, x, ids)[0]

    second = GemmConfig(128, 8)
    first = dataclasses.replace(second, gather=True)
    x = normal(rng, (24, 256), jnp.bfloat16)
    run = jax.jit(layers, static_argnames="config")
    wanted = run(x, config=(first, second))
    one = dataclasses.replace(first, one_kernel=True)
    assert_equal(run(x, config=(one, second)), wanted)
