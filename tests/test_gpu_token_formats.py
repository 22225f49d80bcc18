"""Tokens quantized beside packed weights on a GPU: one call against XLA's rounding, and NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import (
    Experts,
    GemmConfig,
    Routing,
    _formats,
    dequantize,
    explain,
    finalize,
    quantize,
    quantize_tokens,
)
from jaxmoe._formats.tokens import TokenRule
from jaxmoe._testing import GPT_OSS, Layer, assert_close, assert_equal, layer_inputs, poison
from tests import token_oracle

pytestmark = pytest.mark.gpu

PAIRS = [(w, t) for w in _formats.QUANTIZED for t in _formats.token_formats(w)]
TOKENS = (1, 5, 64, 300)
TARGET = "jaxmoe_moe_mlp_v1"
# Both products, by index or in expert order; kernels that multiply by warps and by wgmma, scales
# before and after the k loop, the k loop whole and in parts.
TILES = (
    (128, 16, 1, 1, True),
    (128, 16, 1, 2, True),
    (128, 32, 1, 1, True),
    (128, 32, 1, 1, False),
    (128, 64, 1, 1, False),
    (128, 128, 1, 1, False),
    (128, 160, 1, 1, False),
)

# That which multiplies codes as they are, and what has it.
CODED = (256, 128, 1, 1, False)
CODED_PAIR = ("int4_g128", "e4m3")

# Those of a test that compiles XLA's layer too.
TILES_OF = {1: TILES[:1], 5: TILES[1:4:2], 64: TILES[2:5:2], 300: TILES[5:]}

# Jitted: made of hundreds of small operations, each of which would be compiled by itself.
quantized = jax.jit(
    lambda w, format: quantize(w, format, weight_layout="nk"), static_argnames="format"
)
dequantized = jax.jit(lambda q: dequantize(q, dtype=jnp.float32))


def static_scales(tokens, num_experts, of_each):
    """Static scales: those that a format must have to be one call, or if asked for."""
    if tokens != "nvfp4" and not of_each:
        return {}
    scale = {"nvfp4": 0.002, "e4m3": 0.01}[tokens]
    h_scale = np.float32(scale)
    if of_each:
        h_scale = np.linspace(scale / 2, 2 * scale, num_experts, dtype=np.float32)
    return {"x_scale": jnp.float32(scale), "h_scale": jnp.asarray(h_scale)}


def case(weights, tokens, layer, num_tokens, *, dtype=jnp.bfloat16, of_each=False, seed=0):
    """Tokens, choices, and experts in one array."""
    rng = np.random.default_rng([seed, num_tokens])
    i = layer_inputs(layer, num_tokens, "with_invalid", rng, dtype, "nk")
    experts = Experts(
        gate_up=quantized(i["w_gate_up"], weights),
        down=quantized(i["w_down"], weights),
        gate_up_bias=i.get("b_gate_up"),
        down_bias=i.get("b_down"),
        **static_scales(tokens, layer.num_experts, of_each),
        layout="nk",
        activation=layer.activation,
        order=layer.gate_up,
        token_format=tokens,
    )
    return i["x"], Routing(i["expert_ids"], i["weights"], layer.num_experts), experts


def config(tile):
    *tile, gather = tile
    return GemmConfig(*tile, gather=gather), GemmConfig(*tile)


def compiled(x, routing, experts, fn=jaxmoe.moe_mlp, **kwargs):
    """Runs the layer as one call, into memory that holds NaN, twice: the same bits."""
    layer = functools.partial(fn, **kwargs)
    (op,) = explain(layer, x, routing, experts).ops
    assert op.runs == f"FFI call {TARGET}" and op.cuda_attrs["tokens"] > 0
    fn = jax.jit(layer)
    poison(x.shape, jnp.float32)
    out = fn(x, routing, experts)
    jax.tree.map(assert_equal, fn(x, routing, experts), out)
    return out


def by_xla(monkeypatch, x, routing, experts, **kwargs):
    """The same layer of separate calls, whose tokens XLA rounds."""
    with monkeypatch.context() as m:
        m.setattr(TokenRule, "in_call", lambda rule, absent: False)
        layer = lambda *a: jaxmoe.moe_mlp(*a, **kwargs)  # noqa: E731
        assert not any(op.cuda_target == TARGET for op in explain(layer, x, routing, experts).ops)
        return jax.block_until_ready(jax.jit(layer)(x, routing, experts))


def not_rounded(q):
    """Weights of four bits as the kernels have them that multiply codes as they are."""
    codes, scales = _formats.QUANTIZED[q.format].of(q.dtype).unpack(q.values, q.scales)
    return (np.asarray(codes, np.float64) - 8) * np.asarray(scales, np.float64).repeat(128, axis=2)


def oracle(x, routing, experts, act, w_gate_up=None, weights=dequantized):
    """The layer in float64, and with z and rows rounded; of this gate and up if they are apart."""
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    e = experts
    biases = [
        np.zeros(q.shape[:2]) if b is None else f64(b)
        for q, b in ((e.gate_up, e.gate_up_bias), (e.down, e.down_bias))
    ]
    h_scale = None if e.h_scale is None else np.broadcast_to(e.h_scale, e.num_experts)
    layer = functools.partial(
        token_oracle.layer,
        *map(np.asarray, (x, routing.expert_ids, routing.weights)),
        *(
            f64(weights(e.gate_up) if w_gate_up is None else w_gate_up),
            biases[0],
            f64(weights(e.down)),
            biases[1],
        ),
        name=e.token_format,
        act=act,
        order=e.order,
        dtype=np.dtype(x.dtype),
        scales=(None if e.x_scale is None else np.asarray(e.x_scale), h_scale),
    )
    return layer(low=False), layer(low=True)


def wild(shape, smallest, seed=4):
    """Numbers of all sizes from `smallest` on, zeros, groups of zeros, infinities and a few NaN."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    size = np.exp2(rng.uniform(np.log2(smallest), 8, (rows, columns // 16))).repeat(16, axis=1)
    x = rng.standard_normal(shape) * size
    x[:, :3] = 0, -0.0, np.exp2(5)
    x[rows // 2, 32:64] = 0
    if rows > 3:
        x[1] = 0
        x[2, 40], x[2, 41] = np.inf, -np.inf
        x[3, 70] = np.nan
    return jnp.asarray(x.astype(np.float32), jnp.bfloat16)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("weights", "tokens"), PAIRS)
def test_numbers_are_those_of_xla(weights, tokens, num_tokens, monkeypatch):
    """The bits of the layer that XLA rounds tokens for, whatever tokens are.

    Powers of two and one scale of all weights leave nothing else to round: the activation is exact,
    there are no biases. NVFP4's static scales are short: its quotients in the middle are exact.
    """
    layer = Layer("", "", 256, 384, 4, 2, "relu2")
    x, routing, experts = case(weights, tokens, layer, num_tokens)
    if tokens == "nvfp4":
        experts = dataclasses.replace(
            experts, x_scale=jnp.float32(2**-9), h_scale=jnp.float32(2**-9)
        )
    x = wild(x.shape, 2.0**-40)
    for tile in TILES_OF[num_tokens]:
        got = compiled(x, routing, experts, config=config(tile))
        want = by_xla(monkeypatch, x, routing, experts, config=config(tile))
        finite = np.isfinite(np.asarray(want, np.float32)).all(axis=1)
        np.testing.assert_array_equal(
            np.isfinite(np.asarray(got, np.float32)).all(axis=1), finite, err_msg=str(tile)
        )
        np.testing.assert_array_equal(
            np.asarray(got, np.float32), np.asarray(want, np.float32), err_msg=str(tile)
        )


@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("weights", "tokens"), PAIRS)
def test_tokens_that_are_quantized_already(weights, tokens, num_tokens):
    """One call too, with the bits of the layer that rounds them itself."""
    layer = Layer("", "", 256, 384, 4, 2, "relu2")
    x, routing, experts = case(weights, tokens, layer, num_tokens)
    x, scale, given = wild(x.shape, 2.0**-40), None, experts
    if tokens == "nvfp4":
        scale = jnp.float32(2**-9)
        experts = dataclasses.replace(experts, x_scale=scale, h_scale=scale)
        given = dataclasses.replace(experts, x_scale=None)
    array = {"e4m3": "fp8_channel"}.get(tokens, tokens)
    q = jax.jit(functools.partial(quantize_tokens, format=array))(x, scale=scale)
    for tile in TILES_OF[num_tokens]:
        got = compiled(q, routing, given, config=config(tile))
        assert_equal(got, compiled(x, routing, experts, config=config(tile)))


@pytest.mark.parametrize(("weights", "tokens"), [p for p in PAIRS if p[1].startswith("mx")])
def test_tiny_numbers_are_those_of_xla(weights, tokens, monkeypatch):
    """Tokens below the smallest normal number, with weights that make normal ones of them."""
    layer = Layer("", "", 128, 128, 2, 1, "identity")
    x, routing, experts = case(weights, tokens, layer, 64)
    i = layer_inputs(layer, 64, "uniform", np.random.default_rng(0), jnp.bfloat16, "nk")
    large = quantized(i["w_gate_up"] * jnp.bfloat16(2.0**100), weights)
    experts = dataclasses.replace(experts, gate_up=large)
    x = (wild(x.shape, 2.0**-6, 5).astype(jnp.float32) * 2.0**-126).astype(jnp.bfloat16)
    tile = config((128, 64, 1, 1, False))
    got = compiled(x, routing, experts, config=tile)
    assert_equal(got, by_xla(monkeypatch, x, routing, experts, config=tile))


LAYERS = {
    "swiglu": (Layer("", "", 256, 128, 9, 2), "swiglu"),
    "clamped": (Layer("", "", 384, 256, 9, 3, GPT_OSS, "interleaved", True), "gpt_oss"),
    "up_gate": (Layer("", "", 128, 384, 9, 3, "swiglu", "up_gate", True), "swiglu"),
    "ungated": (Layer("", "", 640, 256, 9, 2, "relu2", bias=True), "relu2"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("weights", "tokens"), PAIRS)
def test_layer(weights, tokens, name):
    layer, act = LAYERS[name]
    for num_tokens in TOKENS:
        x, routing, experts = case(weights, tokens, layer, num_tokens, seed=1)
        wanted = oracle(x, routing, experts, act)
        outs = {None: compiled(x, routing, experts)}
        tiles = TILES + ((CODED,) if (weights, tokens) == CODED_PAIR else ())
        for tile in tiles if num_tokens == 64 else ():
            # A part of the k loop would be empty, or nothing differs from a wider tile.
            if tile[3] <= min(layer.hidden, layer.intermediate) // 64:
                outs[tile] = compiled(x, routing, experts, config=config(tile))
        for tile, out in outs.items():
            try:
                assert_close(out, *wanted)
            except AssertionError as error:
                raise AssertionError(f"{num_tokens} tokens, {tile}: {error}") from error
        if num_tokens == 64:  # fetched by index or copied in expert order, rows of x are the same
            assert_equal(outs[128, 32, 1, 1, True], outs[128, 32, 1, 1, False])


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("weights", "tokens"), [p for p in PAIRS if p[1] in ("e4m3", "nvfp4")], ids="-".join
)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_static_scales_of_each_expert(weights, tokens, num_tokens):
    layer, act = LAYERS["clamped"]
    x, routing, experts = case(weights, tokens, layer, num_tokens, of_each=True)
    assert_close(compiled(x, routing, experts), *oracle(x, routing, experts, act))
    one = dataclasses.replace(experts, h_scale=experts.h_scale[3])
    assert_close(compiled(x, routing, one), *oracle(x, routing, one, act))
    if tokens == "e4m3":  # one of them and a dynamic one
        for name in ("x_scale", "h_scale"):
            other = dataclasses.replace(one, **{name: None})
            assert_close(compiled(x, routing, other), *oracle(x, routing, other, act))


@pytest.mark.parametrize("weights", ("mxfp4", "int4_g128"))
def test_scales_out_of_range_are_nan(weights):
    layer, _ = LAYERS["swiglu"]
    x, routing, experts = case(weights, "e4m3", layer, 5, of_each=True)
    ids = np.asarray(routing.expert_ids)
    used = (ids >= 0) & (ids < layer.num_experts)
    for bad in (0.0, -1.0, np.inf, np.nan):
        wrong = dataclasses.replace(experts, x_scale=jnp.float32(bad))
        y = np.asarray(compiled(x, routing, wrong), np.float32)
        np.testing.assert_array_equal(np.isnan(y).all(axis=1), used.any(axis=1), err_msg=str(bad))
        expert = ids[used][0]
        of_one = experts.h_scale.at[expert].set(bad)
        y = compiled(x, routing, dataclasses.replace(experts, h_scale=of_one))
        np.testing.assert_array_equal(
            np.isnan(np.asarray(y, np.float32)).all(axis=1), (ids == expert).any(axis=1)
        )


@pytest.mark.parametrize("num_tokens", (1, 5, 300))
@pytest.mark.parametrize(("weights", "tokens"), PAIRS)
def test_some_of_the_experts(weights, tokens, num_tokens):
    """A window, a map, rows without their sum, and gate and up in two arrays."""
    layer = dataclasses.replace(LAYERS["swiglu"][0], bias=True)
    x, routing, experts = case(weights, tokens, layer, num_tokens)
    ids = jnp.where(routing.expert_ids < 0, 99, routing.expert_ids)
    whole = oracle(x, Routing(jnp.where(ids < 9, ids, -1), routing.weights), experts, "swiglu")
    shifted = Routing(ids + 4, routing.weights)
    assert_close(compiled(x, shifted, experts, num_experts=20, expert_offset=4), *whole)
    places = jnp.asarray([3, -1, 0, 8, 1, 2, 7, 4, -5, 5, 6, 9], jnp.int32)
    moved = jnp.where(ids < 12, places[jnp.minimum(ids, 11)], -1)
    moved = Routing(jnp.where((moved >= 0) & (moved < 9), moved, -1), routing.weights)
    mapped = compiled(x, Routing(ids, routing.weights), experts, num_experts=12, expert_map=places)
    assert_close(mapped, *oracle(x, moved, experts, "swiglu"))
    y = compiled(x, routing, experts)
    rows = compiled(x, routing, experts, jaxmoe.expert_rows)
    assert_equal(finalize(rows.rows, rows, rows.weights), y)
    both = dequantized(experts.gate_up)
    halves = [quantized(w.astype(x.dtype), weights) for w in jnp.split(both, 2, axis=1)]
    biases = jnp.split(experts.gate_up_bias, 2, axis=1)
    two = dataclasses.replace(
        experts,
        gate_up=None,
        gate_up_bias=None,
        **dict(zip(("gate", "up"), halves, strict=True)),
        **dict(zip(("gate_bias", "up_bias"), biases, strict=True)),
    )
    joined = jnp.concatenate([dequantized(h) for h in halves], axis=1)
    wanted = oracle(x, routing, experts, "swiglu", joined)
    assert_close(compiled(x, routing, two), *wanted)


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", LAYERS)
def test_codes_multiplied_as_they_are(name):
    """Of any number of rows, in one product or both: as weights that are not rounded."""
    layer, act = LAYERS[name]
    decodes = GemmConfig(128, 64)
    for num_tokens in (1, 37, 300, 1000):
        x, routing, experts = case(*CODED_PAIR, layer, num_tokens)
        x = jnp.abs(x) if num_tokens == 300 else x  # what is taken off is larger than what stays
        run = functools.partial(compiled, x, routing, experts)
        first, second = config(CODED)
        wanted = oracle(x, routing, experts, act, weights=not_rounded)
        pairs = [(first, second), (first, decodes), (decodes, second)]
        if num_tokens == 1:  # whose first product plans for itself
            pairs.append((GemmConfig(128, 16, gather=True), second))
        for configs in pairs:
            assert_close(run(config=configs), *wanted)


@pytest.mark.parametrize(("hidden", "intermediate"), ((2176, 1664), (4224, 1152), (5120, 2048)))
def test_codes_of_many_steps(hidden, intermediate):
    """17 and 13, 33 and 9, 40 and 16: sums come 16 at a time, whole and in part."""
    layer = Layer("", "", hidden, intermediate, 3, 2, bias=True)
    for num_tokens, positive in ((9, False), (250, True)):
        x, routing, experts = case(*CODED_PAIR, layer, num_tokens)
        x = jnp.abs(x) if positive else x
        out = compiled(x, routing, experts, config=config(CODED))
        assert_close(out, *oracle(x, routing, experts, "swiglu", weights=not_rounded))


def test_codes_of_rows_that_are_too_long_are_decoded():
    layer = Layer("", "", 128, 33280, 1, 1)
    x, routing, experts = case(*CODED_PAIR, layer, 200)
    assert_close(compiled(x, routing, experts), *oracle(x, routing, experts, "swiglu"))
    with pytest.raises(ValueError, match=r"config\[1\]: the tile"):
        compiled(x, routing, experts, config=(GemmConfig(128, 64), GemmConfig(256, 128)))


def test_codes_beside_float16_are_decoded():
    """Sums of FP8 products have 13 bits."""
    x, routing, experts = case(*CODED_PAIR, LAYERS["swiglu"][0], 1000, dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"config\[0\]: the tile"):
        compiled(x, routing, experts, config=config(CODED))
    out = compiled(x, routing, experts)
    assert_close(out, *oracle(x, routing, experts, "swiglu"))


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("weights", "tokens", "tile"),
    [
        *((*pair, (128, 32, 1, 1, gather)) for pair in PAIRS for gather in (True, False)),
        (*CODED_PAIR, CODED),
    ],
)
def test_what_is_not_finite_stays_in_its_token(weights, tokens, tile):
    layer, _ = LAYERS["swiglu"]
    for num_tokens in (5, 64):
        x, routing, experts = case(weights, tokens, layer, num_tokens)
        ids = np.asarray(routing.expert_ids)
        used = ((ids >= 0) & (ids < layer.num_experts)).any(axis=1)
        run = functools.partial(compiled, routing=routing, experts=experts, config=config(tile))
        want = np.asarray(run(x), np.float32)
        others = np.arange(num_tokens) != 3
        for bad in (np.nan, np.inf, -np.inf):
            y = np.asarray(run(x.at[3, 77].set(bad)), np.float32)
            np.testing.assert_array_equal(y[others], want[others], err_msg=str(bad))
            assert np.isnan(y[3]).all() == (np.isnan(bad) and used[3]), (num_tokens, bad)
        y = np.asarray(run(x.at[2].set(0)), np.float32)
        assert (y[2] == 0).all(), "nothing is made of zeros"


def test_float16_tokens():
    for weights, tokens in PAIRS:
        if tokens in ("e4m3", "nvfp4"):
            layer, act = LAYERS["up_gate"]
            for num_tokens in TOKENS:
                x, routing, experts = case(weights, tokens, layer, num_tokens, dtype=jnp.float16)
                out = compiled(x, routing, experts)
                assert_close(out, *oracle(x, routing, experts, act))


@pytest.mark.parametrize(
    ("layer", "num_tokens"),
    (
        (Layer("", "more than a block reads at once", 128, 33280, 1, 1), 3),
        (Layer("", "more places than lanes", 128, 128, 48, 40), 33),
        (Layer("", "one token, planned by the products", 2048, 768, 16, 8), 1),
        (Layer("", "four of them", 2048, 768, 16, 8), 4),
        (Layer("", "several warps a row", 2944, 2944, 4, 3), 37),
        (Layer("", "no group is whole in a tile", 256, 128, 2, 2), 700),
    ),
    ids=lambda value: value.why if isinstance(value, Layer) else str(value),
)
@pytest.mark.parametrize(("weights", "tokens"), (("int4_g128", "e4m3"), ("mxfp4", "mxfp8")))
def test_shapes(weights, tokens, layer, num_tokens):
    x, routing, experts = case(weights, tokens, layer, num_tokens)
    assert_close(compiled(x, routing, experts), *oracle(x, routing, experts, "swiglu"))


def test_no_token():
    x, routing, experts = case("int4_g128", "e4m3", LAYERS["swiglu"][0], 4)
    none = Routing(routing.expert_ids[:0], routing.weights[:0])
    assert jax.jit(jaxmoe.moe_mlp)(x[:0], none, experts).shape == (0, 256)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_a_batch_of_layers(num_tokens):
    """Examples become rows of one call."""
    x, routing, experts = case("int4_g128", "e4m3", LAYERS["swiglu"][0], num_tokens)
    batch = jnp.stack([x, -2 * x])
    mapped = jax.jit(jax.vmap(lambda x: jaxmoe.moe_mlp(x, routing, experts, batch_invariant=True)))
    alone = functools.partial(compiled, routing=routing, experts=experts, batch_invariant=True)
    for out, one in zip(mapped(batch), batch, strict=True):
        assert_equal(out, alone(one))
