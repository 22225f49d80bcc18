"""moe_mlp on a GPU: every kernel variant with every epilogue, real shapes, capture, transforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import GemmConfig, Routing, _gemm, reference, route
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import (
    GPT_OSS,
    MODELS,
    RARE,
    SMALL,
    Layer,
    assert_close,
    assert_equal,
    expert_ids,
    layer_inputs,
    normal,
    poison,
)
from tests.layers import moe_mlp

pytestmark = pytest.mark.gpu

TILES = [tile for tile in _gemm.tiles.TILES if tile not in _gemm.tiles.ONLY_PROMOTED]


def on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])


def run(inputs, **kwargs):
    rest = dict(inputs)
    routing = Routing(rest.pop("expert_ids"), rest.pop("weights"))
    x, w1, w2 = (rest.pop(name) for name in ("x", "w_gate_up", "w_down"))
    return moe_mlp(x, routing, w1, w2, **rest, **kwargs)


def check(inputs, config=None, **kwargs):
    fn = jax.jit(functools.partial(run, config=config, **kwargs))
    poison(inputs["x"].shape, jnp.float32)
    out = fn(inputs)
    host = on_cpu(inputs)
    want = reference.moe_mlp(**host, **kwargs)
    naive = reference.moe_mlp(**host, **kwargs, dtype=inputs["x"].dtype)
    assert_close(out, want, naive)
    assert_equal(out, fn(inputs))
    return out


# Each epilogue of the gate-up product: both halves' orders, interleaved, ungated, and activations
# without code of their own.
EPILOGUES = (
    Layer("swiglu", "", 72, 200, 9, 2),
    Layer("clamped", "", 72, 136, 9, 2, GPT_OSS, "interleaved", True),
    Layer("up_gate", "", 72, 72, 9, 2, "geglu", "up_gate", True),
    Layer("ungated", "", 72, 136, 9, 2, "relu2", bias=True),
    Layer("other", "", 72, 136, 9, 2, "gelu", bias=True),
)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_variant(tile, layout, dtype):
    rng = np.random.default_rng([*map(int, tile), layout == "kn"])
    for i, layer in enumerate(EPILOGUES):
        inputs = layer_inputs(layer, 300, "zipf", rng, dtype, layout)
        config = GemmConfig(*tile, gather=i % 2 == 0), GemmConfig(*tile)
        check(
            inputs,
            config,
            activation=layer.activation,
            gate_up=layer.gate_up,
            weight_layout=layout,
        )


@pytest.mark.parametrize("gather", (False, True))
def test_paired_tiles_of_few_rows(gather):
    """Both products start under the end of the kernel before, most second CTAs have no rows."""
    layer = Layer("", "", 512, 256, 64, 2)
    tile = GemmConfig(256, 160, cluster=2)
    config = dataclasses.replace(tile, gather=gather), tile
    for num_tokens in (1, 64, 400):
        inputs = layer_inputs(layer, num_tokens, "zipf", np.random.default_rng(1), jnp.bfloat16)
        check(inputs, config)


@pytest.mark.sanitizer
@pytest.mark.parametrize("gate_up", ("gate_up", "up_gate", "interleaved"))
@pytest.mark.parametrize("activation", ("swiglu", "geglu", "geglu_tanh", GPT_OSS, *RARE), ids=str)
def test_gated_activations(activation, gate_up):
    layer = Layer("", "", 64, 64, 4, 2, activation, gate_up, True)
    inputs = layer_inputs(layer, 33, "uniform", np.random.default_rng(1), jnp.bfloat16)
    check(inputs, activation=activation, gate_up=gate_up)


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu", "relu", "relu2", "identity"))
def test_ungated_activations(activation):
    layer = Layer("", "", 64, 64, 4, 2, activation)
    inputs = layer_inputs(layer, 33, "uniform", np.random.default_rng(2), jnp.float16)
    check(inputs, activation=activation)


@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", (0, 1, 2, 9, 70, 700))
@pytest.mark.parametrize("name", SMALL)
def test_small_layers(name, num_tokens):
    layer = SMALL[name]
    for routing in ("uniform", "one_expert", "with_empty", "with_invalid"):
        rng = np.random.default_rng([num_tokens, len(routing)])
        inputs = layer_inputs(layer, num_tokens, routing, rng, jnp.bfloat16)
        check(inputs, activation=layer.activation, gate_up=layer.gate_up)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "num_experts", "top_k", "num_tokens"),
    (
        (2880, 704, 8, 1, 40),
        (704, 2880, 40, 4, 9),
        (1408, 512, 160, 6, 64),
        (512, 768, 384, 8, 130),
        (768, 1408, 256, 22, 17),
        (512, 128, 512, 10, 300),
        (1024, 256, 16, 16, 65),
    ),
)
def test_shapes_of_models(hidden, intermediate, num_experts, top_k, num_tokens):
    layer = Layer("", "", hidden, intermediate, num_experts, top_k)
    inputs = layer_inputs(layer, num_tokens, "zipf", np.random.default_rng(3), jnp.bfloat16, "nk")
    check(inputs, weight_layout="nk")


@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", (1, 2, 4))
@pytest.mark.parametrize("top_k", (1, 3, 8, 16))
def test_products_plan_few_slots(num_tokens, top_k):
    """Up to 32 slots; the same bits as with rows that are planned and copied beforehand."""
    layer = Layer("", "", 136, 72, 40, top_k)
    tile = GemmConfig(128, 8, split_k=2)
    fetched, copied = (dataclasses.replace(tile, gather=gather) for gather in (True, False))
    for routing in ("uniform", "one_expert", "with_invalid"):
        rng = np.random.default_rng([num_tokens, top_k, len(routing)])
        inputs = layer_inputs(layer, num_tokens, routing, rng, jnp.bfloat16)
        some = dict(inputs, w_gate_up=inputs["w_gate_up"][:9], w_down=inputs["w_down"][:9])
        mapped = dict(some, expert_map=jnp.asarray(rng.permutation(40) - 20, jnp.int32))
        for case, options in ((inputs, {}), (some, {"expert_offset": 30}), (mapped, {})):
            options = options | ({"num_experts": 40} if case is not mapped else {})
            out = check(case, (fetched, tile), **options)
            assert_equal(out, run(case, config=(copied, tile), **options))


def test_window_map_and_residual():
    layer = Layer("", "", 64, 72, 12, 4)
    rng = np.random.default_rng(4)
    inputs = layer_inputs(layer, 50, "with_invalid", rng, jnp.bfloat16)
    local = dict(inputs, w_gate_up=inputs["w_gate_up"][:5], w_down=inputs["w_down"][:5])
    local["residual"] = normal(rng, inputs["x"].shape, jnp.bfloat16)
    check(local, expert_offset=3)
    permutation = rng.permutation(12).astype(np.int32)
    local["expert_map"] = jnp.asarray(np.where(permutation < 5, permutation, -1))
    check(local)
    garbage = jnp.asarray(rng.integers(-(2**31), 2**31, 12), jnp.int32)
    check(dict(local, expert_map=garbage))


@pytest.mark.parametrize("name", ("qwen3-30b-a3b", "gpt-oss-120b"))
@pytest.mark.parametrize("num_tokens", (1, 64, 1024))
def test_real_layers(name, num_tokens):
    layer = MODELS[name]
    keys = jax.random.split(jax.random.key(num_tokens), 6)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    shape = (layer.num_experts, layer.width, layer.hidden)
    w_gate_up = draw(keys[0], shape) * jnp.bfloat16(layer.hidden**-0.5)
    shape = (layer.num_experts, layer.hidden, layer.intermediate)
    w_down = draw(keys[1], shape) * jnp.bfloat16(layer.intermediate**-0.5)
    x = draw(keys[2], (num_tokens, layer.hidden))
    logits = jax.random.normal(keys[3], (num_tokens, layer.num_experts))
    bias = {}
    if layer.bias:
        bias["b_gate_up"] = draw(keys[4], w_gate_up.shape[:2])
        bias["b_down"] = draw(keys[5], w_down.shape[:2])
    options = {"activation": layer.activation, "gate_up": layer.gate_up, "weight_layout": "nk"}

    @jax.jit
    def fn(x, logits, w_gate_up, w_down, bias):
        routing = route(logits, top_k=layer.top_k)
        return moe_mlp(x, routing, w_gate_up, w_down, **bias, **options), routing

    out, routing = fn(x, logits, w_gate_up, w_down, bias)
    for t in np.random.default_rng(0).integers(0, num_tokens, 4):
        ids = np.asarray(routing.expert_ids[t])
        here = on_cpu(
            {
                "x": x[t : t + 1],
                "expert_ids": jnp.arange(layer.top_k, dtype=jnp.int32)[None],
                "weights": routing.weights[t : t + 1],
                "w_gate_up": w_gate_up[ids],
                "w_down": w_down[ids],
            }
            | {name: b[ids] for name, b in bias.items()}
        )
        want = reference.moe_mlp(**here, **options)
        naive = reference.moe_mlp(**here, **options, dtype=jnp.bfloat16)
        assert_close(out[t : t + 1], want, naive)


@pytest.mark.sanitizer
def test_nan_stays_in_its_token():
    layer = Layer("", "", 128, 128, 8, 2)
    inputs = layer_inputs(layer, 100, "uniform", np.random.default_rng(6), jnp.bfloat16)
    fn = jax.jit(run)
    clean = fn(inputs)
    bad = fn(dict(inputs, x=inputs["x"].at[17, 3].set(jnp.nan)))
    assert np.isnan(np.asarray(bad[17], np.float32)).all()
    others = np.delete(np.arange(100), 17)
    assert_equal(bad[others], clean[others])


@pytest.mark.parametrize("size", (256, 1280))
def test_a_token_does_not_depend_on_its_batch(size):
    layer = Layer("", "", size, size, 8, 2)
    inputs = layer_inputs(layer, 700, "uniform", np.random.default_rng(8), jnp.bfloat16)
    invariant = jax.jit(functools.partial(run, batch_invariant=True))
    whole = invariant(inputs)
    for count in (1, 2, 15, 30, 200):
        per_token = ("x", "expert_ids", "weights")
        part = {n: a[:count] if n in per_token else a for n, a in inputs.items()}
        assert_equal(invariant(part), whole[:count])


@pytest.mark.parametrize("num_tokens", (1, 4, 8, 256, 2048))
def test_thousand_runs_have_the_same_bits(num_tokens):
    layer = Layer("", "", 1024, 512, 64, 8)
    inputs = layer_inputs(layer, num_tokens, "zipf", np.random.default_rng(9), jnp.bfloat16)
    first = jax.jit(run)(inputs)

    @jax.jit
    def differences(inputs, first):
        def body(i, count):
            # Keeps the call in the loop: the compiler cannot know that i is never negative.
            x = jnp.where(i < 0, jnp.zeros_like(inputs["x"]), inputs["x"])
            same = (run(dict(inputs, x=x)) == first).all()
            return count + (1 - same.astype(jnp.int32))

        return jax.lax.fori_loop(0, 1000, body, jnp.int32(0))

    assert differences(inputs, first) == 0


def test_command_buffers_capture_the_layer():
    """The handler runs while a graph is recorded and not when it is replayed."""
    layer = Layer("", "", 128, 128, 8, 2)
    rng = np.random.default_rng(10)
    inputs = layer_inputs(layer, 16, "uniform", rng, jnp.bfloat16)

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
    counts = []
    for seed in range(12):
        fresh = dict(inputs, x=normal(np.random.default_rng(seed), (16, 128), jnp.bfloat16))
        before = _targets.execute_count("jaxmoe_moe_mlp_v1")
        out = jax.block_until_ready(captured(fresh))
        counts.append(_targets.execute_count("jaxmoe_moe_mlp_v1") - before)
        assert_equal(out, plain(fresh))
    assert counts[0] >= 8, "the first run calls or records all eight layers"
    same = dict(inputs)
    jax.block_until_ready(captured(same))
    before = _targets.execute_count("jaxmoe_moe_mlp_v1")
    for _ in range(10):
        jax.block_until_ready(captured(same))
    replayed = 80 - (_targets.execute_count("jaxmoe_moe_mlp_v1") - before)
    assert replayed >= 40, f"{replayed} of 80 layers replayed without running the handler"


def test_scan_over_layers():
    layer = Layer("", "", 64, 64, 4, 2)
    rng = np.random.default_rng(11)
    inputs = [layer_inputs(layer, 20, "uniform", rng, jnp.bfloat16) for _ in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *inputs)
    x = inputs[0]["x"]

    @jax.jit
    def scanned(x, stacked):
        return jax.lax.scan(lambda y, i: (run(dict(i, x=y)), None), x, stacked)[0]

    want = x
    for i in inputs:
        want = run(dict(i, x=want))
    assert_equal(scanned(x, stacked), want)


def test_scan_over_layers_that_plan_for_themselves():
    """One token: each layer's ids lie where those of the layer before were."""
    layer = Layer("", "", 1024, 64, 16, 8)
    rng = np.random.default_rng(13)
    inputs = layer_inputs(layer, 1, "uniform", rng, jnp.bfloat16)
    ids = jnp.asarray(expert_ids("uniform", rng, 24, 16, 8))[:, None]

    def layer_of(inputs, ids):
        y = run(dict(inputs, expert_ids=ids))
        return dict(inputs, x=y / jnp.abs(y).max()), y

    scanned = jax.jit(functools.partial(jax.lax.scan, layer_of))
    one_by_one = jax.jit(layer_of)
    want, state = [], inputs
    for one in ids:
        state, y = one_by_one(state, one)
        want.append(y)
    for _ in range(50):
        assert_equal(scanned(inputs, ids)[1], jnp.stack(want))


def test_vmap_over_tokens_and_over_weights():
    layer = Layer("", "", 64, 64, 4, 2)
    rng = np.random.default_rng(12)
    inputs = [layer_inputs(layer, 20, "with_invalid", rng, jnp.bfloat16) for _ in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *inputs)
    out = jax.jit(jax.vmap(run))(stacked)
    for b, i in enumerate(inputs):
        assert_equal(out[b], run(i))
    shared = {n: 0 if n in ("x", "expert_ids", "weights") else None for n in stacked}
    mixed = {n: stacked[n] if d == 0 else inputs[0][n] for n, d in shared.items()}
    out = jax.jit(jax.vmap(run, (shared,)))(mixed)
    for b in range(3):
        one = {n: a[b] if shared[n] == 0 else a for n, a in mixed.items()}
        assert_equal(out[b], run(one))


@pytest.mark.parametrize("check_vma", (True, False))
def test_shard_map_and_ahead_of_time(check_vma):
    layer = Layer("", "", 64, 64, 4, 2)
    inputs = layer_inputs(layer, 20, "uniform", np.random.default_rng(14), jnp.bfloat16)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("d",), axis_types=auto, devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec
    per_token = ("x", "expert_ids", "weights")
    specs = {n: spec("d") if n in per_token else spec() for n in inputs}
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(specs,), out_specs=spec("d"), check_vma=check_vma
    )
    compiled = jax.jit(sharded).lower(inputs).compile()
    assert_equal(compiled(inputs), run(inputs))
