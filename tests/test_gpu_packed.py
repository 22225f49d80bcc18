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
from jaxmoe._formats.parts import pack
from jaxmoe._gemm.dequantized import dequantize_p
from jaxmoe._testing import GPT_OSS, Layer, assert_close, assert_equal, layer_inputs, normal, poison
from tests import packed_oracle, token_oracle

pytestmark = pytest.mark.gpu

PACKED = [name for name, f in _formats.QUANTIZED.items() if f.packed and f.code >= 0]
TOKENS = [(w, t) for w in PACKED for t in _formats.token_formats(w)]
# Each epilogue of the gate-up product; sizes that end inside a tile.
CASES = (
    (1, Layer("swiglu", "", 256, 192, 9, 2)),
    (3, Layer("clamped", "", 384, 128, 9, 2, GPT_OSS, "interleaved", True)),
    (16, Layer("up_gate", "", 128, 320, 9, 3, "geglu", "up_gate", True)),
    (100, Layer("ungated", "", 640, 384, 9, 2, "relu2", bias=True)),
    (700, Layer("many", "", 256, 128, 9, 2)),
)


# Jitted: made of hundreds of small operations, each of which would be compiled by itself.
quantized = jax.jit(
    lambda w, format: quantize(w, format, weight_layout="nk"), static_argnames="format"
)
dequantized = jax.jit(lambda q: dequantize(q, dtype=jnp.float32))


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
    first, down = (quantized(inputs[n], format) for n in ("w_gate_up", "w_down"))
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
    host["w_gate_up"], host["w_down"] = (on_cpu(dequantized(q)) for q in (first, down))
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
@pytest.mark.parametrize("format", PACKED)
def test_every_kernel(format):
    """Fetched by index or copied in expert order, rows of x are the same: so are the results."""
    for index in range(len(CASES)):
        x, routing, experts, wanted = case(index, format, (jnp.bfloat16, jnp.float16)[index % 2])
        layer = legal(CASES[index][1], format)
        for tile in sorted(_gemm.tiles.PACKED):
            if (
                tile[3] > min(layer.hidden, layer.intermediate) // 64
            ):  # a part of the k loop would be empty
                continue
            gathers = (True, False) if tile[1] <= _gemm.tiles.MAX_GATHER else (False,)
            configs = (GemmConfig(*tile, gather=gather) for gather in gathers)
            outs = [compiled(x, routing, experts, config=(c, GemmConfig(*tile))) for c in configs]
            assert_close(outs[0], *wanted)
            assert_equal(outs[0], outs[-1])


@pytest.mark.parametrize("format", PACKED)
def test_tiles_that_are_chosen(format):
    for index, (num_tokens, _) in enumerate(CASES):
        x, routing, experts, wanted = case(index, format, jnp.bfloat16)
        assert_close(compiled(x, routing, experts), *wanted)
        half = num_tokens // 2
        few = Routing(routing.expert_ids[:half], routing.weights[:half])
        all_of_them = compiled(x, routing, experts, batch_invariant=True)
        assert_equal(compiled(x[:half], few, experts, batch_invariant=True), all_of_them[:half])


@pytest.mark.parametrize("format", PACKED)
def test_two_arrays(format):
    x, routing, experts, _ = case(0, format, jnp.bfloat16)
    both = dequantized(experts.gate_up)
    gate, up = (quantized(w.astype(x.dtype), format) for w in jnp.split(both, 2, axis=1))
    two = dataclasses.replace(experts, gate_up=None, gate=gate, up=up)
    joined = jnp.concatenate([dequantized(gate), dequantized(up)], axis=1)
    host = on_cpu((x, routing.expert_ids, routing.weights, joined, dequantized(experts.down)))
    wanted = (reference.moe_mlp(*host, weight_layout="nk", dtype=d) for d in (jnp.float32, x.dtype))
    assert_close(compiled(x, routing, two), *wanted)


@pytest.mark.parametrize("format", PACKED)
def test_one_program_quantizes_and_reads(format):
    """XLA must not leave a rounding out where it sees both sides of it."""
    w = normal(np.random.default_rng(3), (2, 192, 256), jnp.bfloat16)
    at_once = jax.jit(
        lambda w: dequantize(quantize(w, format, weight_layout="nk"), dtype=jnp.float32)
    )
    assert_equal(at_once(w), dequantized(quantized(w, format)))


@pytest.mark.parametrize("format", [f for f in PACKED if f not in ("nvfp4", "int8_channel")])
def test_weights_are_rounded_as_on_a_cpu(format):
    """Float32 scales, of the others, differ by the last bit of XLA's division on a GPU."""
    w = normal(np.random.default_rng(3), (2, 192, 256), jnp.bfloat16)
    jax.tree.map(assert_equal, quantized(w, format), quantized(on_cpu(w), format))


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("format", PACKED)
def test_weights_are_decoded_exactly(format, dtype):
    """Rows of an identity give the weights that `dequantize` gives, but for the sign of a zero."""
    k = 256
    q = quantized(normal(np.random.default_rng(1), (2, 192, k), dtype), format)
    lhs = jnp.tile(jnp.eye(k, dtype=dtype), (2, 1))
    sizes = jnp.array([k, k], jnp.int32)
    w = dequantized(q).swapaxes(1, 2)
    for tile in sorted(_gemm.tiles.PACKED):
        config = GemmConfig(*tile)
        y = grouped_gemm(
            lhs, q, sizes, weight_layout="nk", preferred_element_type=jnp.float32, config=config
        )
        assert_equal(y.reshape(2, k, 192), jnp.where(w == 0, 0, w))


@pytest.mark.parametrize("format", ("mxfp4", "mxfp8", "nvfp4"))
def test_every_code_times_every_scale(format):
    """An expert for each scale that is a number has each code, and results are exact."""
    n = k = 64
    codes = (np.arange(n * k) % (256 if format == "mxfp8" else 16)).reshape(n, k)
    values = packed_oracle.E4M3[codes] if format == "mxfp8" else packed_oracle.e2m1(codes)
    codes, values = np.where(np.isnan(values), 0, codes), np.nan_to_num(values)
    if format == "nvfp4":
        scales = np.arange(1, 127)
        factors, parts = packed_oracle.E4M3[scales], (np.ones(scales.size, np.float32),)
    else:
        scales = np.arange(255)
        factors, parts = np.ldexp(1.0, scales - 127), ()
    of_groups = np.broadcast_to(
        scales[:, None, None], (scales.size, n, k // (32 - 16 * len(parts)))
    )
    all_codes = np.broadcast_to(codes, (scales.size, n, k))
    q = jax.jit(lambda *parts: pack(format, *parts, weight_layout="nk"))(
        *(all_codes.astype(np.uint8), of_groups.astype(np.uint8), *parts)
    )
    with np.errstate(over="ignore"):  # the largest numbers of mx formats are none of float32
        wanted = (values.T * factors[:, None, None]).astype(np.float32)
    lhs = jnp.tile(jnp.eye(k, dtype=jnp.bfloat16), (scales.size, 1))
    for tile in ((128, 16), (128, 32), (128, 64), (128, 128)):
        y = grouped_gemm(
            *(lhs, q, jnp.full(scales.size, k, jnp.int32)),
            weight_layout="nk",
            preferred_element_type=jnp.float32,
            config=GemmConfig(*tile),
        )
        assert_equal(y.reshape(wanted.shape), np.where(wanted == 0, 0, wanted))


@pytest.mark.parametrize(
    ("dtype", "reach", "smallest"), ((jnp.bfloat16, 125, -126), (jnp.float16, 22, -14))
)
@pytest.mark.parametrize("format", ("mxfp4", "mxfp8"))
def test_every_code_times_every_byte_of_a_strip(format, dtype, reach, smallest):
    """Results are exact up to 2^reach below the largest exponent.

    Further below, decoded numbers that are not normal may lose bits or be zero.
    """
    codes, exponents = packed_oracle.codes_and_exponents(format, 255)
    values = packed_oracle.E4M3[codes] if format == "mxfp8" else packed_oracle.e2m1(codes)
    codes, values = np.where(np.isnan(values), 0, codes), np.nan_to_num(values)
    experts, n, k = codes.shape
    with np.errstate(over="ignore"):  # the largest numbers are none of float32
        powers = packed_oracle.spread(exponents.astype(int) - 127, k)
        wanted = np.ldexp(values, powers).astype(np.float32).swapaxes(1, 2)
    exponents[0, 5, 3] = 255  # a NaN, which all sums of its row have
    wanted[0, :, 5] = np.nan
    q = jax.jit(lambda *parts: pack(format, *parts, weight_layout="nk", dtype=dtype))(
        codes, exponents
    )
    near = packed_oracle.spread(exponents >= 254 - reach, k).swapaxes(1, 2)
    # Of the largest exponent, whose power is the expert's scale; e4m3 is decoded 2^6 or 2^7 larger.
    lost = 2.0 ** (127 + smallest - (6 if format == "mxfp8" else 0))
    lhs = jnp.tile(jnp.eye(k, dtype=dtype), (experts, 1))
    for tile in ((128, 16), (128, 32), (128, 64), (128, 128)):
        y = grouped_gemm(
            *(lhs, q, jnp.full(experts, k, jnp.int32)),
            weight_layout="nk",
            preferred_element_type=jnp.float32,
            config=GemmConfig(*tile),
        )
        y = np.asarray(y).reshape(wanted.shape)
        np.testing.assert_array_equal(y[near], wanted[near])
        far = ~near & ~np.isnan(wanted)
        assert (np.abs(y[far] - wanted[far]) <= lost).all()


@pytest.mark.parametrize("format", [f for f in PACKED if f.startswith(("int", "mxfp"))])
def test_scales_of_the_whole_range_are_decoded_exactly(format):
    """Scales of int4 reach from 2^-89 to 2^32; those of mx formats 2^126 below the largest."""
    k, n = 256, 192
    rng = np.random.default_rng(4)
    exponents = np.linspace(-84, 33, n).round()[:, None]  # a row has one scale, or more
    w = np.ldexp(rng.choice((-1.0, -0.5, 0.5, 0.75, 1.0), (2, n, k)), exponents.astype(int))
    q = quantized(jnp.asarray(w, jnp.bfloat16), format)
    lhs = jnp.tile(jnp.eye(k, dtype=jnp.bfloat16), (2, 1))
    w = dequantized(q).swapaxes(1, 2)
    assert np.isfinite(np.asarray(w)).all()
    for tile in ((128, 16), (128, 32), (128, 64), (128, 128)):
        y = grouped_gemm(
            *(lhs, q, jnp.array([k, k], jnp.int32)),
            weight_layout="nk",
            preferred_element_type=jnp.float32,
            config=GemmConfig(*tile),
        )
        assert_equal(y.reshape(2, k, n), jnp.where(w == 0, 0, w))


@pytest.mark.sanitizer
@pytest.mark.parametrize("format", PACKED)
def test_any_group_sizes_stay_in_bounds(format):
    rng = np.random.default_rng(2)
    q = quantized(normal(rng, (3, 192, 256), jnp.bfloat16), format)
    lhs = normal(rng, (40, 256), jnp.bfloat16)
    for sizes in ([2**31 - 1, -5, 7], [-(2**31), 2**30, 2**30], [0, 0, 0]):
        out = grouped_gemm(lhs, q, jnp.array(sizes, jnp.int32), weight_layout="nk")
        assert out.shape == (40, 192)


@pytest.mark.parametrize(("weights", "tokens"), TOKENS)
def test_quantized_tokens(weights, tokens):
    """The kernels multiply what tokens stand for: the layer is that of NumPy."""
    for index in (0, 2, 4):
        num_tokens, layer = CASES[index]
        layer = dataclasses.replace(legal(layer, weights), activation="swiglu", gate_up="gate_up")
        rng = np.random.default_rng([7, index])
        i = layer_inputs(
            dataclasses.replace(layer, bias=True), num_tokens, "zipf", rng, jnp.bfloat16, "nk"
        )
        first, down = (quantized(i[n], weights) for n in ("w_gate_up", "w_down"))
        biases = {"gate_up_bias": i["b_gate_up"], "down_bias": i["b_down"]}
        experts = jaxmoe.Experts(
            gate_up=first, down=down, **biases, layout="nk", token_format=tokens
        )
        out = compiled(i["x"], Routing(i["expert_ids"], i["weights"]), experts)
        of_tokens = (np.asarray(i[n]) for n in ("x", "expert_ids", "weights"))
        f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
        parts = (dequantized(first), i["b_gate_up"], dequantized(down), i["b_down"])
        wanted = functools.partial(
            token_oracle.layer,
            *of_tokens,
            *map(f64, parts),
            name=tokens,
            act="swiglu",
            order="gate_up",
            dtype=np.dtype(jnp.bfloat16),
        )
        assert_close(out, wanted(low=False), wanted(low=True))


@pytest.mark.sanitizer
@pytest.mark.parametrize("format", PACKED)
def test_dequantized_by_the_kernel(format):
    """To the bit what XLA gives, all codes and scales from small to large, zeros and NaN."""
    rng = np.random.default_rng(3)
    for shape in ((3, 64, 128), (2, 192, 384), (1, 128, 1024)):
        w = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, (*shape[:2], 1))
        w[0, 5], w[-1, 7, 3] = 0.0, np.nan
        q = quantize(jnp.asarray(w, jnp.bfloat16), format, weight_layout="nk")
        decode = functools.partial(
            dequantize_p,
            format=_formats.QUANTIZED[format].of(jnp.bfloat16),
            dtype=jnp.dtype(jnp.bfloat16),
        )
        run = jax.jit(lambda q, decode=decode: decode(q.values, q.scales)[0])
        assert "jaxmoe_dequantize_v1" in run.lower(q).as_text()
        poison(shape, jnp.bfloat16)
        got, want = run(q), jax.jit(functools.partial(dequantize, dtype=jnp.bfloat16))(q)
        assert_equal(*(jnp.where(w == 0, 0, w) for w in (got, want)))
