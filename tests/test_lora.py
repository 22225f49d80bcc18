"""Adapters on experts: the layer of merged weights, several adapters, and that they train."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Experts, GemmConfig, Routing, lora, quantize
from jaxmoe._gemm.tiles import ADAPTED_TILES, PACKED_ADAPTED_TILES, with_adapters
from jaxmoe._mlp import adapted
from jaxmoe._testing import assert_equal
from tests.lowered import calls, cuda_text

E, H, WIDTH, T, RANK = 4, 64, 64, 10, 8
CALL = "jaxmoe_adapted_moe_mlp_v1"
FIRST_AND_DOWN = ("gate_up", "down")


def normal(rng, *shape):
    return (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)


@functools.cache
def example(kind="joined"):
    """Tokens, routing with an id of no expert, experts and an adapter that changes them."""
    rng = np.random.default_rng(5)
    gate_up, down = normal(rng, E, H, 2 * WIDTH), normal(rng, E, WIDTH, H)
    biases = {"down_bias": normal(rng, 1, E, H)[0]}
    if kind == "two":
        gate, up = np.split(gate_up, 2, axis=2)
        turned = {"gate": gate.swapaxes(1, 2), "up": up.swapaxes(1, 2), "down": down.swapaxes(1, 2)}
        experts = Experts(**{n: w.copy() for n, w in turned.items()}, layout="nk", **biases)
    elif kind == "ungated":
        experts = Experts(up=gate_up[..., :WIDTH].copy(), down=down, activation="relu2", **biases)
    else:
        experts = Experts(gate_up=gate_up, down=down, order="interleaved", **biases)
    width = WIDTH if kind == "ungated" else 2 * WIDTH
    adapters = lora.Adapters(
        *(normal(rng, E, *s) for s in ((H, RANK), (RANK, width), (WIDTH, RANK), (RANK, H))),
        scale=0.5,
    )
    ids = np.stack([rng.permutation(E)[:2] for _ in range(T)]).astype(np.int32)
    ids[3, 1] = -1
    weights = rng.random((T, 2)).astype(np.float32)
    return normal(rng, 1, T, H)[0] * 3, Routing(ids, weights), experts, adapters


def narrow(kind="joined", format=None, dtype=jnp.bfloat16):
    """The same in 16 bits, weights in a format."""
    x, routing, experts, adapters = example(kind)
    arrays = {
        f.name: jnp.asarray(value, dtype)
        for f in dataclasses.fields(experts)
        if isinstance(value := getattr(experts, f.name), np.ndarray)
    }
    if format is not None:
        for name in ("gate_up", "gate", "up", "down"):
            if name in arrays:
                layout = experts.layouts[name == "down"]
                arrays[name] = quantize(arrays[name], format, weight_layout=layout)
    return jnp.asarray(x, dtype), routing, dataclasses.replace(experts, **arrays), adapters


layer = jax.jit(lora.moe_mlp)
merged = jax.jit(lora.merged)
plain = jax.jit(functools.partial(jaxmoe.moe_mlp, num_experts=E))


@pytest.mark.parametrize("kind", ("joined", "two", "ungated"))
def test_the_layer_is_that_of_merged_weights(kind):
    x, routing, experts, adapters = example(kind)
    residual = x[::-1].copy()
    got = layer(x, routing, experts, adapters, residual=residual)
    want = plain(x, routing, merged(experts, adapters), residual=residual)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert np.abs(want - plain(x, routing, experts, residual=residual)).max() > 0.1
    leading = Routing(*(a.reshape(2, 5, 2) for a in (routing.expert_ids, routing.weights)))
    again = layer(
        x.reshape(2, 5, H), leading, experts, adapters, residual=residual.reshape(2, 5, H)
    )
    assert_equal(again, got.reshape(2, 5, H))


def test_fresh_adapters_change_nothing():
    x, routing, experts, _ = example()
    adapters = lora.init(jax.random.key(0), experts, RANK, scale=2.0)
    np.testing.assert_allclose(
        layer(x, routing, experts, adapters), plain(x, routing, experts), rtol=1e-5, atol=1e-5
    )
    assert np.asarray(adapters.gate_up_a).std() == pytest.approx(H**-0.5, rel=0.1)
    several = lora.init(jax.random.key(0), experts, RANK, num_adapters=3)
    assert several.down_b.shape == (3, E, RANK, H) and several.down_a.shape == (3, E, WIDTH, RANK)


def test_each_token_has_the_adapter_it_names():
    x, routing, experts, one = example()
    several = jax.tree.map(lambda a: np.stack([a, -a[::-1], 2 * a]), one)
    chosen = np.array([0, 1, 2, 0, -1, 2, 1, 7, 0, 2], np.int32)
    got = layer(x, routing, experts, several, adapter_ids=chosen)
    for i in range(3):
        alone = layer(x, routing, experts, jax.tree.map(lambda a, i=i: a[i], several))
        np.testing.assert_allclose(got[chosen == i], alone[chosen == i], rtol=1e-5, atol=1e-5)
    none = (chosen < 0) | (chosen > 2)
    np.testing.assert_allclose(got[none], plain(x, routing, experts)[none], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ("fp8_channel", "mxfp4", "int4_g64"))
def test_through_frozen_quantized_experts(format):
    """Gradients of adapters and tokens are those beside the dequantized weights."""
    x, routing, experts, adapters = example()
    turned = {n: np.swapaxes(getattr(experts, n), 1, 2) for n in ("gate_up", "down")}
    narrow = jnp.float32 if format == "fp8_channel" else jnp.bfloat16
    frozen = {n: quantize(w.astype(narrow), format, weight_layout="nk") for n, w in turned.items()}
    x = x.astype(narrow)
    biases = {"down_bias": experts.down_bias.astype(narrow)}
    held = Experts(**frozen, layout="nk", order="interleaved", **biases)
    wide = {n: jaxmoe.dequantize(q, dtype=narrow) for n, q in frozen.items()}
    beside = Experts(**wide, layout="nk", order="interleaved", **biases)

    def loss(adapters, x, experts):
        return (lora.moe_mlp(x, routing, experts, adapters).astype(jnp.float32) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    got, want = gradient(adapters, x, held), gradient(adapters, x, beside)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert a.any() and np.abs(a - b).max() < 0.1 * np.abs(b).max()


def test_rows_of_no_expert_are_in_no_scale():
    """Also where the activation makes something of their zeros."""
    x, routing, experts, _ = example()
    ids = np.where(np.arange(T)[:, None] < 1, routing.expert_ids, -1)
    routing = dataclasses.replace(routing, expert_ids=ids)
    q = {n: quantize(getattr(experts, n), "fp8_tensor", weight_layout="kn") for n in FIRST_AND_DOWN}
    q |= {"gate_up_bias": None}

    def far(gate, up):
        return jnp.where((gate == 0) & (up == 0), 50.0, gate * up)

    def layer(activation):
        e = dataclasses.replace(experts, **q, activation=activation)
        return lora.moe_mlp(x, routing, e, lora.init(jax.random.key(1), e, 4))

    assert_equal(layer(far), layer(lambda gate, up: gate * up))


def test_adapters_train_and_experts_stay():
    x, routing, experts, target = example()
    y = layer(x, routing, experts, target)
    adapters = lora.init(jax.random.key(1), experts, RANK, scale=0.5)

    def loss(adapters):
        return jnp.mean((lora.moe_mlp(x, routing, experts, adapters) - y) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    values = []
    for _ in range(60):
        value, grads = step(adapters)
        values.append(float(value))
        adapters = jax.tree.map(lambda a, g: a - 3.0 * g, adapters, grads)
    assert values[-1] < 0.2 * values[0]


ROUTING_DTYPES = (("expert_ids", np.int32), ("weights", np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapters": {"down_a": np.ones((E, WIDTH, 4), np.float32)}}, "adapters.down_a must be"),
        (
            {"adapters": {"gate_up_b": np.ones((E, RANK, WIDTH), np.float32)}},
            "adapters.gate_up_b must",
        ),
        ({"adapter_ids": np.zeros(T, np.int32)}, "adapter_ids must be given with several"),
        ({"experts": {"forward_format": "fp8_tensor"}}, "experts.forward_format must be None"),
        ({"routing": {"num_experts": 8}}, "experts must be all 8 of the routing"),
        ({"x": np.ones((T + 1, H), np.float32)}, "routing.expert_ids must have the axes of tok"),
        ({"routing": {"weights": np.ones((2, T), np.float32)}}, "routing.weights must have the ax"),
        (
            {"routing": {n: np.ones((T, 0), d) for n, d in ROUTING_DTYPES}},
            r"top_k=0 \(routing.expert_ids.shape\[-1\]\) must be in \[1, ",
        ),
        (
            {"routing": {n: np.zeros((T, E + 1), d) for n, d in ROUTING_DTYPES}},
            rf"top_k={E + 1} \(routing.expert_ids.shape\[-1\]\) must be in \[1, {E}\]",
        ),
        ({"residual": np.ones((H, T), np.float32)}, "residual must have the axes of tokens"),
        (
            {"x": np.ones((T, H // 2), np.float32)},
            r"lora.moe_mlp: experts.gate_up.shape\[1\]=64 must equal x.shape\[1\]=32 \(hidden\)",
        ),
        ({"x": np.ones(H, np.float32)}, "x must have axes of tokens and of H"),
        (
            {"adapters": {"down_b": np.ones(RANK, np.float32)}},
            "adapters.down_b must have 3 axes, or 4 of several adapters, not 1",
        ),
        (
            {"adapters": {"gate_up_a": np.ones((1,) * 5, np.float32)}},
            "adapters.gate_up_a must have 3",
        ),
    ],
)
def test_refused(change, message):
    names = ("x", "routing", "experts", "adapters")
    given = dict(zip(names, example(), strict=True))
    for name, value in change.items():
        replace = isinstance(value, dict)
        given[name] = dataclasses.replace(given[name], **value) if replace else value
    with pytest.raises(ValueError, match=message):
        lora.moe_mlp(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((T, H), np.float16)}, "x.dtype=f16 must equal that of the experts, f32"),
        ({"routing": 3}, "lora.moe_mlp: routing must be a jaxmoe.Routing. Got routing: 3"),
        ({"experts": None}, "lora.moe_mlp: experts must be a jaxmoe.Experts. Got experts: None"),
        (
            {"adapters": None},
            "lora.moe_mlp: adapters must be a jaxmoe.lora.Adapters. Got adapters: N",
        ),
        ({"adapter_ids": np.zeros(T, np.int64)}, "adapter_ids"),
        ({"residual": np.ones((T, H), np.float16)}, "residual"),
    ],
)
def test_refused_dtypes(change, message):
    x, routing, experts, one = example()
    several = jax.tree.map(lambda a: a[None], one)
    given = {"x": x, "routing": routing, "experts": experts, "adapters": several}
    with pytest.raises(TypeError, match=message):
        lora.moe_mlp(**given | {"adapter_ids": np.zeros(T, np.int32)} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_a": np.ones((E, WIDTH, RANK), np.int32)}, "adapters.down_a.dtype=i32 must be bf16"),
        ({"gate_up_b": None}, "adapters.gate_up_b must be a JAX or NumPy array"),
        ({"scale": "a"}, "adapters.scale must be a number, which is static"),
    ],
)
def test_refused_fields_of_adapters(change, message):
    x, routing, experts, adapters = example()
    adapters = dataclasses.replace(adapters, **change)
    with pytest.raises(TypeError, match=f"lora.moe_mlp: {message}"):
        lora.moe_mlp(x, routing, experts, adapters)
    with pytest.raises(TypeError, match=f"lora.merged: {message}"):
        lora.merged(experts, adapters)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.int32}, "dtype=int32 must be bfloat16, float16 or float32"),
        ({"dtype": "foo"}, "dtype='foo' must be bfloat16"),
        ({"dtype": None}, "dtype=None must be bfloat16"),
        ({"scale": "a"}, "scale must be a number, which is static. Got scale: 'a'"),
        ({"scale": np.ones((), np.float32)}, "scale must be a number"),
        ({"key": 0}, "key must be that of jax.random.key. Got key: 0"),
        (
            {"experts": np.ones((2, 2))},
            r"experts must be a jaxmoe.Experts. Got experts: f64\[2,2\]",
        ),
    ],
)
def test_refused_draws(change, message):
    given = {"key": jax.random.key(0), "experts": example()[2], "rank": RANK} | change
    with pytest.raises(TypeError, match=f"lora.init: {message}"):
        lora.init(**given)


def test_static_scales_are_refused():
    x, routing, experts, adapters = example()
    q = {n: quantize(getattr(experts, n), "fp8_tensor", weight_layout="kn") for n in FIRST_AND_DOWN}
    scaled = dataclasses.replace(experts, **q, h_scale=np.float32(1))
    with pytest.raises(ValueError, match="experts.h_scale must be None"):
        lora.moe_mlp(x, routing, scaled, adapters)


def test_no_tokens_and_master_weights():
    x, routing, experts, adapters = example()
    none = Routing(routing.expert_ids[:0], routing.weights[:0])
    assert layer(x[:0], none, experts, adapters).shape == (0, H)
    several = jax.tree.map(lambda a: a[None], adapters)
    empty = np.zeros(0, np.int32)
    assert layer(x[:0], none, experts, several, adapter_ids=empty).shape == (0, H)
    master = dataclasses.replace(experts, dtype=jnp.bfloat16)
    narrow = layer(x.astype(jnp.bfloat16), routing, master, adapters).astype(jnp.float32)
    wide = layer(x, routing, experts, adapters)
    assert 0 < np.abs(narrow - wide).max() < 0.05 * np.abs(wide).max()


def test_several_or_quantized_are_not_merged():
    _, _, experts, adapters = example()
    with pytest.raises(ValueError, match="adapters must be one"):
        lora.merged(experts, jax.tree.map(lambda a: a[None], adapters))
    with pytest.raises(ValueError, match="adapters.gate_up_a must be"):
        lora.merged(experts, jax.tree.map(lambda a: a[:1], adapters))
    layers = jax.tree.map(lambda a: np.stack([a, a]), experts)
    with pytest.raises(ValueError, match="experts must be those of one layer"):
        lora.init(jax.random.key(0), layers, RANK)
    q = {
        n: quantize(getattr(experts, n), "fp8_channel", weight_layout="kn") for n in FIRST_AND_DOWN
    }
    with pytest.raises(TypeError, match="experts must be plain"):
        lora.merged(dataclasses.replace(experts, **q), adapters)


@pytest.mark.parametrize(
    ("kind", "format"),
    (
        ("joined", None),
        ("two", None),
        ("ungated", None),
        ("joined", "mxfp4"),
        ("joined", "int4_g64"),
    ),
)
def test_one_call_on_cuda(kind, format):
    """Which elsewhere is the ops that it stands for, of the experts that it was given."""
    x, routing, experts, adapters = narrow(kind, format)
    residual = x[::-1]
    text = cuda_text(lambda x: lora.moe_mlp(x, routing, experts, adapters, residual=residual), x)
    assert [call[0] for call in calls(text)] == [CALL]
    assert "scale = 5.000000e-01 : f32" in text
    got = layer(x, routing, experts, adapters, residual=residual)
    matrices = tuple(jax.tree.leaves(adapters))
    of_routing = routing.expert_ids, routing.weights
    fn = jax.jit(functools.partial(adapted.composed, scale=adapters.scale))
    assert_equal(got, fn(x, *of_routing, residual, experts, matrices))


def test_no_call_where_the_kernels_have_none():
    cases = {
        "fp16": narrow(dtype=jnp.float16),
        "quantized tokens": narrow(format="fp8_channel"),
        "a scale for each row": narrow(format="int8_channel"),
        "a scale for gate and up each": narrow("two", "mxfp4"),
        "several adapters": narrow(),
    }
    for why, (x, routing, experts, adapters) in cases.items():
        ids = None
        if why == "several adapters":
            adapters = jax.tree.map(lambda a: a[None], adapters)
            ids = np.zeros(T, np.int32)

        def run(x, routing=routing, experts=experts, adapters=adapters, ids=ids):
            return lora.moe_mlp(x, routing, experts, adapters, adapter_ids=ids)

        text = cuda_text(run, x)
        assert CALL not in text and "jaxmoe_grouped_gemm_v1" in text, why


def test_tiles_with_adapters():
    def tile(*given, packed=False, **options):
        config = with_adapters(GemmConfig(*given, **options), packed)
        assert config.tile in (PACKED_ADAPTED_TILES if packed else ADAPTED_TILES)
        assert not config.one_kernel
        return (*config.tile, config.gather)

    assert tile(128, 8, split_k=2, gather=True, one_kernel=True) == (128, 32, 1, 1, True)
    assert tile(256, 160, cluster=2, gather=True) == (256, 160, 2, 1, True)
    assert tile(128, 192) == (256, 160, 2, 1, False)
    assert tile(128, 16, split_k=4, gather=True, packed=True) == (128, 16, 1, 1, False)
    assert tile(128, 32, packed=True) == (128, 64, 1, 1, False)
    assert tile(128, 128, packed=True) == (128, 128, 1, 1, False)


def test_derivatives_of_the_call_are_those_of_the_ops():
    x, routing, experts, adapters = narrow(format="mxfp4")
    of_routing = routing.expert_ids, routing.weights

    def loss(adapters, x):
        return (lora.moe_mlp(x, routing, experts, adapters).astype(jnp.float32) ** 2).sum()

    def apart(adapters, x):
        matrices = tuple(jax.tree.leaves(adapters))
        y = adapted.composed(x, *of_routing, None, experts, matrices, adapters.scale)
        return (y.astype(jnp.float32) ** 2).sum()

    got, want = (jax.jit(jax.grad(f, (0, 1)))(adapters, x) for f in (loss, apart))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(b, np.float32).any()
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0.02, atol=0.02
        )
    batch = jax.vmap(lambda x: lora.moe_mlp(x, routing, experts, adapters))(jnp.stack([x, 2 * x]))
    assert_equal(batch[0], layer(x, routing, experts, adapters))


def test_no_adapters_at_all_are_refused():
    x, routing, experts, adapters = example()
    none = jax.tree.map(lambda a: jnp.asarray(a)[None][:0], adapters)
    with pytest.raises(ValueError, match="adapters must be one, or at least one of several, not 0"):
        lora.moe_mlp(x, routing, experts, none, adapter_ids=jnp.zeros(len(x), jnp.int32))
