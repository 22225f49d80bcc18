"""moe_mlp and grouped_gemm with FP8 weights on a GPU: every kernel, format and epilogue."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import (
    GemmConfig,
    Routing,
    _gemm,
    finalize,
    grouped_gemm,
    plan,
    quantize,
    quantize_tokens,
    reference,
)
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import FP8 as FORMATS
from jaxmoe._testing import (
    GPT_OSS,
    RARE,
    Layer,
    assert_close,
    assert_equal,
    normal,
    poison,
    quantized_inputs,
)
from tests.layers import moe_mlp

pytestmark = pytest.mark.gpu

TARGET = "jaxmoe_moe_mlp_v1"
# Tile, format and sums of every kernel.
KERNELS = [
    pytest.param(tile, format, accum, id=f"{tile}-{format}-{accum}")
    for tile in _gemm.tiles.TILES
    for format in FORMATS
    for accum in ("fast", "promoted")
    if not (accum == "fast" and format == "fp8_block")
    and not (accum == "promoted" and tile in _gemm.tiles.NOT_PROMOTED)
    and not (accum == "fast" and tile in _gemm.tiles.ONLY_PROMOTED)
]
# Each epilogue of the gate-up product, with H and I that end inside a block of 128 and inside a
# tile, with a number of tokens of its own; halves of a multiple of 64, as blocks of scales and
# tiles of 256 need.
CASES = (
    (1, Layer("swiglu", "", 272, 192, 9, 2)),
    (3, Layer("clamped", "", 144, 144, 9, 2, GPT_OSS, "interleaved", True)),
    (16, Layer("up_gate", "", 400, 320, 9, 3, "geglu", "up_gate", True)),
    (100, Layer("ungated", "", 272, 336, 9, 2, "relu2", bias=True)),
    (700, Layer("many", "", 256, 192, 9, 2)),
    (60, Layer("other", "", 272, 336, 9, 2, "gelu", bias=True)),
    (40, Layer("pairs", "", 272, 192, 9, 2, "geglu", "interleaved", True)),
)


def on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])


def run(inputs, **kwargs):
    rest = dict(inputs)
    routing = Routing(rest.pop("expert_ids"), rest.pop("weights"))
    x, w1, w2 = (rest.pop(name) for name in ("x", "w_gate_up", "w_down"))
    return moe_mlp(x, routing, w1, w2, **rest, **kwargs)


def expected(inputs, **kwargs):
    """The reference in float32 and in the dtype of the layer, on the CPU."""
    host, dtype = on_cpu(inputs), inputs["x"].dtype
    return tuple(reference.moe_mlp(**host, **kwargs, dtype=d) for d in (jnp.float32, dtype))


def compiled(inputs, **kwargs):
    """Runs the layer into memory that holds NaN, twice: the same bits."""
    fn = jax.jit(functools.partial(run, **kwargs))
    poison(inputs["x"].shape, jnp.float32)
    out = fn(inputs)
    assert_equal(fn(inputs), out)
    return out


def check(inputs, config=None, accum=None, **kwargs):
    out = compiled(inputs, config=config, accum=accum, **kwargs)
    assert_close(out, *expected(inputs, **kwargs))
    return out


def options(layer):
    return {"activation": layer.activation, "gate_up": layer.gate_up}


@functools.cache
def case(index, format, dtype):
    num_tokens, layer = CASES[index]
    rng = np.random.default_rng([index, len(format)])
    inputs = quantized_inputs(layer, num_tokens, "zipf", rng, dtype, format)
    return inputs, options(layer), expected(inputs, **options(layer))


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tile", "format", "accum"), KERNELS)
def test_every_kernel(tile, format, accum):
    """Fetched by index or copied in expert order, rows of x are the same: so are the results."""
    for index in range(len(CASES)):
        dtype = (jnp.bfloat16, jnp.float16)[index % 2]
        inputs, kwargs, wanted = case(index, format, dtype)
        outs = []
        by_index = tile[1] <= _gemm.tiles.MAX_GATHER or accum == "fast"
        for gather in (True, False) if by_index else (False,):
            config = GemmConfig(*tile, gather=gather), GemmConfig(*tile)
            outs.append(compiled(inputs, config=config, accum=accum, **kwargs))
        assert_close(outs[0], *wanted)
        assert_equal(outs[0], outs[-1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "num_experts", "top_k", "num_tokens"),
    (
        (2880, 704, 8, 1, 40),
        (704, 2880, 24, 4, 9),  # the second product alone is promoted
        (2880, 2880, 4, 2, 1),
        (1408, 512, 32, 6, 64),
        (512, 768, 64, 8, 130),
        (1024, 256, 16, 16, 65),
        (2112, 400, 3, 2, 520),
    ),
)
def test_shapes_of_models(hidden, intermediate, num_experts, top_k, num_tokens, format):
    layer = Layer("", "", hidden, intermediate, num_experts, top_k)
    rng = np.random.default_rng(3)
    inputs = quantized_inputs(layer, num_tokens, "zipf", rng, jnp.bfloat16, format, "nk")
    check(inputs, weight_layout="nk")


@pytest.mark.parametrize("num_tokens", (1, 3, 16, 100, 700))
def test_e5m2_weights(num_tokens):
    layer = Layer("", "", 272, 208, 8, 2, bias=True)
    rng = np.random.default_rng(num_tokens)
    inputs = quantized_inputs(
        layer, num_tokens, "uniform", rng, jnp.bfloat16, "fp8_tensor", element_type="e5m2"
    )
    check(inputs, accum="fast")
    check(inputs, accum="promoted")


@pytest.mark.parametrize("shape", ((), (8,)), ids=("one", "of_each_expert"))
@pytest.mark.parametrize("num_tokens", (1, 3, 16, 100, 700))
def test_static_scales(num_tokens, shape):
    layer = Layer("", "", 272, 208, 8, 2)
    rng = np.random.default_rng(num_tokens)
    inputs = quantized_inputs(layer, num_tokens, "uniform", rng, jnp.bfloat16, "fp8_tensor")
    # small enough for some numbers to saturate
    scale = jnp.asarray(rng.uniform(0.002, 0.01, shape), jnp.float32)
    check(inputs, x_scale=jnp.float32(0.005), intermediate_scale=scale)
    check(inputs, intermediate_scale=scale)
    check(inputs, x_scale=jnp.float32(0.005))
    wide = GemmConfig(128, 256), None
    for config in (None, wide) if num_tokens > 16 else ():
        check(inputs, config, "promoted", x_scale=jnp.float32(0.005), intermediate_scale=scale)


@pytest.mark.parametrize("gate_up", ("gate_up", "up_gate", "interleaved"))
@pytest.mark.parametrize("activation", ("swiglu", "geglu", "geglu_tanh", GPT_OSS, *RARE), ids=str)
def test_gated_activations(activation, gate_up):
    layer = Layer("", "", 64, 80, 4, 2, activation, gate_up, True)
    for format in FORMATS:
        rng = np.random.default_rng(1)
        inputs = quantized_inputs(layer, 33, "uniform", rng, jnp.bfloat16, format)
        check(inputs, **options(layer))


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu", "relu", "relu2", "identity"))
def test_ungated_activations(activation):
    layer = Layer("", "", 64, 80, 4, 2, activation)
    for format in FORMATS:
        rng = np.random.default_rng(2)
        inputs = quantized_inputs(layer, 33, "uniform", rng, jnp.float16, format)
        check(inputs, activation=activation)


@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", (0, 1, 2, 5, 70, 300))
@pytest.mark.parametrize("format", FORMATS)
def test_routings(format, num_tokens):
    layer = Layer("", "", 48, 32, 12, 3, bias=True)
    for routing in ("uniform", "one_expert", "with_empty", "with_invalid"):
        rng = np.random.default_rng([num_tokens, len(routing)])
        inputs = quantized_inputs(layer, num_tokens, routing, rng, jnp.bfloat16, format)
        inputs["residual"] = normal(rng, inputs["x"].shape, jnp.bfloat16)
        check(inputs)


@pytest.mark.parametrize("num_tokens", (1, 4, 60))
@pytest.mark.parametrize("format", FORMATS)
def test_windows_and_maps(format, num_tokens):
    """Rows of experts elsewhere count in no scale of the intermediate."""
    layer = Layer("", "", 144, 80, 12, 4)
    rng = np.random.default_rng(num_tokens)
    inputs = quantized_inputs(layer, num_tokens, "with_invalid", rng, jnp.bfloat16, format)
    few = jax.tree.map(lambda a: a[:5], (inputs["w_gate_up"], inputs["w_down"]))
    part = dict(inputs, w_gate_up=few[0], w_down=few[1])
    check(part, num_experts=12, expert_offset=3)
    garbage = jnp.asarray(rng.integers(-(2**31), 2**31, 12), jnp.int32)
    check(dict(part, expert_map=jnp.asarray(rng.permutation(12) - 4, jnp.int32)))
    check(dict(part, expert_map=garbage))
    if format == "fp8_tensor":
        scale = jnp.asarray(rng.uniform(0.002, 0.01, 5), jnp.float32)
        check(part, num_experts=12, expert_offset=3, intermediate_scale=scale)


@pytest.mark.parametrize("num_tokens", (1, 3, 16, 100, 700))
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_tokens_give_the_bits_of_plain_ones(format, num_tokens):
    """The layer quantizes x to the bits that quantize_tokens gives, here on the CPU."""
    layer = Layer("", "", 272, 208, 8, 2)
    rng = np.random.default_rng(num_tokens)
    inputs = quantized_inputs(layer, num_tokens, "uniform", rng, jnp.bfloat16, format)
    quantized = jax.device_put(quantize_tokens(on_cpu(inputs["x"]), format), jax.devices()[0])
    out = check(inputs)
    assert_equal(compiled(dict(inputs, x=quantized)), out)
    tiles = ((128, 32), (128, 8) if format == "fp8_block" else (256, 160))
    for tile, gather in itertools.product(tiles, (True, False)):
        config = GemmConfig(*tile, gather=gather), None
        assert_equal(
            compiled(dict(inputs, x=quantized), config=config), compiled(inputs, config=config)
        )


OF_TENSORS = [k for k in KERNELS if k.values[1] == "fp8_tensor"]


@pytest.mark.sanitizer
@pytest.mark.parametrize("activation", ("relu2", "relu"))
@pytest.mark.parametrize(("tile", "format", "accum"), OF_TENSORS)
def test_the_scale_of_the_intermediate_is_that_of_its_bits(tile, format, accum, activation):
    """Both activations are exact in float32, so ops apart give the same intermediate to the bit."""
    layer = Layer("", "", 272, 336, 9, 2, activation)
    for num_tokens, dtype in ((3, jnp.float16), (100, jnp.bfloat16), (1500, jnp.bfloat16)):
        rng = np.random.default_rng(num_tokens)
        inputs = quantized_inputs(layer, num_tokens, "uniform", rng, dtype, format)
        if num_tokens == 100:  # what is not finite has no part in a scale
            inputs["x"] = inputs["x"].at[7, 5].set(jnp.inf)
        x, ids, weights = (inputs[name] for name in ("x", "expert_ids", "weights"))
        order = plan(ids, layer.num_experts)

        def product(rows, w, dtype, sizes=order.group_sizes):
            options = {"accum": accum, "preferred_element_type": dtype}
            tokens = quantize_tokens(rows, format)
            return grouped_gemm(tokens, w, sizes, config=GemmConfig(*tile), **options)

        z = jnp.maximum(product(x[order.row_to_token], inputs["w_gate_up"], jnp.float32), 0.0)
        act = (z * z if activation == "relu2" else z).astype(dtype)
        rows = product(act, inputs["w_down"], dtype)
        config = GemmConfig(*tile), GemmConfig(*tile)
        out = compiled(inputs, config=config, accum=accum, activation=activation)
        assert_equal(out, finalize(rows, order, weights))


@pytest.mark.sanitizer
@pytest.mark.parametrize("intermediate", (208, 320))  # of blocks: quantized after, in the product
@pytest.mark.parametrize("format", FORMATS)
def test_zeros_nan_and_infinity(format, intermediate):
    layer = Layer("", "", 272, intermediate, 8, 2)
    rng = np.random.default_rng(6)
    inputs = quantized_inputs(layer, 100, "uniform", rng, jnp.bfloat16, format)
    x = inputs["x"].at[:, 3].set(0).at[:, 128:256].set(0).at[9].set(0)
    clean = check(dict(inputs, x=x))
    assert not clean[9].any()
    dirty = check(dict(inputs, x=x.at[17, 3].set(jnp.nan)))
    assert np.isnan(np.asarray(dirty[17], np.float32)).all()
    others = np.delete(np.arange(100), 17)
    if format != "fp8_tensor":  # where the other tokens share a scale of the intermediate
        assert_equal(dirty[others], clean[others])
    infinite = check(dict(inputs, x=x.at[17, 3].set(jnp.inf)))
    assert np.isfinite(np.asarray(infinite, np.float32)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_does_not_depend_on_its_batch(format):
    layer = Layer("", "", 2176, 256, 8, 2)
    rng = np.random.default_rng(8)
    inputs = quantized_inputs(layer, 700, "uniform", rng, jnp.bfloat16, format)
    one = jnp.float32(0.01)
    static = {"x_scale": one, "intermediate_scale": one} if format == "fp8_tensor" else {}
    invariant = jax.jit(functools.partial(run, batch_invariant=True, **static))
    whole = invariant(inputs)
    for count in (1, 2, 15, 30, 200, 500):
        per_token = ("x", "expert_ids", "weights")
        part = {n: a[:count] if n in per_token else a for n, a in inputs.items()}
        assert_equal(invariant(part), whole[:count])


@pytest.mark.parametrize("num_tokens", (1, 4, 256, 2048))
@pytest.mark.parametrize("format", FORMATS)
def test_hundred_runs_have_the_same_bits(format, num_tokens):
    layer = Layer("", "", 1024, 512, 64, 8)
    rng = np.random.default_rng(9)
    inputs = quantized_inputs(layer, num_tokens, "zipf", rng, jnp.bfloat16, format)
    first = jax.jit(run)(inputs)

    @jax.jit
    def differences(inputs, first):
        def body(i, count):
            # Keeps the call in the loop: the compiler cannot know that i is never negative.
            x = jnp.where(i < 0, jnp.zeros_like(inputs["x"]), inputs["x"])
            same = (run(dict(inputs, x=x)) == first).all()
            return count + (1 - same.astype(jnp.int32))

        return jax.lax.fori_loop(0, 100, body, jnp.int32(0))

    assert differences(inputs, first) == 0


# Up to 4 tokens the down product begins before the intermediate is quantized.
@pytest.mark.parametrize("num_tokens", (1, 4, 5))
@pytest.mark.parametrize("format", FORMATS)
def test_layers_in_a_row_read_their_own_intermediates(format, num_tokens):
    """Buffers hold those of the layer before: of other tokens where the order is another."""
    rng = np.random.default_rng(11)
    layer = Layer("", "", 1024, 512, 64, 8)
    inputs = quantized_inputs(layer, num_tokens, "uniform", rng, jnp.bfloat16, format)
    xs = normal(rng, (40, num_tokens, layer.hidden), jnp.bfloat16)
    in_a_row = jax.jit(lambda xs: jax.lax.map(lambda x: run(dict(inputs, x=x)), xs))
    assert_equal(in_a_row(xs), in_a_row(xs[::-1])[::-1])


@pytest.mark.parametrize("format", FORMATS)
def test_command_buffers_capture_the_layer(format):
    """The handler runs while a graph is recorded and not when it is replayed."""
    layer = Layer("", "", 128, 128, 8, 2)
    rng = np.random.default_rng(10)
    inputs = quantized_inputs(layer, 16, "uniform", rng, jnp.bfloat16, format)

    def fn(inputs):
        y = run(inputs)
        for _ in range(7):
            y = run(dict(inputs, residual=y))
        return y

    graph = {
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
        "xla_gpu_graph_min_graph_size": 1,
    }
    captured = jax.jit(fn).lower(inputs).compile(graph)
    plain = jax.jit(fn).lower(inputs).compile({"xla_gpu_enable_command_buffer": ""})
    for seed in range(12):
        fresh = dict(inputs, x=normal(np.random.default_rng(seed), (16, 128), jnp.bfloat16))
        before = _targets.execute_count(TARGET)
        out = jax.block_until_ready(captured(fresh))
        if seed == 0:
            calls = _targets.execute_count(TARGET) - before
            assert calls >= 8, "the first run calls or records all eight layers"
        assert_equal(out, plain(fresh))
    jax.block_until_ready(captured(inputs))
    before = _targets.execute_count(TARGET)
    for _ in range(10):
        jax.block_until_ready(captured(inputs))
    replayed = 80 - (_targets.execute_count(TARGET) - before)
    assert replayed >= 40, f"{replayed} of 80 layers replayed without running the handler"


@pytest.mark.parametrize("num_tokens", (20, 3000))
@pytest.mark.parametrize("format", FORMATS)
def test_scan_and_vmap(format, num_tokens):
    """Each step quantizes, beside its plan, what the step before has just written."""
    layer = Layer("", "", 144, 80, 4, 2)
    rng = np.random.default_rng(11)
    inputs = [
        quantized_inputs(layer, num_tokens, "with_invalid", rng, jnp.bfloat16, format)
        for _ in range(3)
    ]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *inputs)
    step = lambda y, i: (run(dict(i, x=y)), None)  # noqa: E731
    scanned, _ = jax.jit(functools.partial(jax.lax.scan, step))(inputs[0]["x"], stacked)
    want = inputs[0]["x"]
    for i in inputs:
        want = jax.jit(run)(dict(i, x=want))
    assert_equal(scanned, want)
    mapped = jax.jit(jax.vmap(run))(stacked)
    shared = {n: 0 if n in ("x", "expert_ids", "weights") else None for n in stacked}
    mixed = {n: stacked[n] if d == 0 else inputs[0][n] for n, d in shared.items()}
    folded = jax.jit(jax.vmap(run, (shared,)))(mixed)
    for b, i in enumerate(inputs):
        assert_equal(mapped[b], jax.jit(run)(i))
        one = {n: a[b] if shared[n] == 0 else a for n, a in mixed.items()}
        assert_equal(folded[b], jax.jit(run)(one))


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tile", "format", "accum"), KERNELS)
def test_grouped_gemm(tile, format, accum):
    rng = np.random.default_rng(12)
    sizes = jnp.array([0, 3, 1, 150, 40, 300], jnp.int32)  # rows are left over
    for k, n, dtype, out_dtype in (
        (272, 264, jnp.bfloat16, None),
        (400, 72, jnp.float16, jnp.float32),
    ):
        lhs = normal(rng, (530, k), dtype)
        w = normal(rng, (6, n, k), dtype, k**-0.5)
        rhs, bias = quantize(w, format, weight_layout="nk"), normal(rng, (6, n), dtype)
        options = {"weight_layout": "nk", "bias": bias}
        fn = jax.jit(
            functools.partial(
                grouped_gemm,
                **options,
                accum=accum,
                config=GemmConfig(*tile),
                preferred_element_type=out_dtype,
            )
        )
        poison((530, n), jnp.float32)
        out = fn(lhs, rhs, sizes)
        host, host_options = on_cpu((lhs, rhs, sizes)), on_cpu({"bias": bias})
        want, naive = (
            reference.grouped_gemm(*host, **host_options, weight_layout="nk", dtype=d)
            for d in (jnp.float32, dtype)
        )
        assert_close(out, want, naive)
        assert_equal(out[494:], jnp.zeros_like(out[494:]))
        assert_equal(fn(quantize_tokens(lhs, format), rhs, sizes), out)
