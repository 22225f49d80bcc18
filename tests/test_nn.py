"""Expert blocks: what they compute, and that modules of every framework are the same and train."""

import dataclasses
import functools
import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import RoutingMethod, Swiglu, expert_parallel
from jaxmoe._testing import assert_equal
from jaxmoe.nn import MoEConfig, apply, init, parameters
from jaxmoe.routing_methods import METHODS

PLAIN = MoEConfig(8, 16, num_experts=4, top_k=2)
DEEPSEEK = MoEConfig(
    8,
    16,
    num_experts=8,
    top_k=3,
    method="deepseek_v3",
    num_groups=4,
    top_groups=2,
    scale=2.5,
    selection_bias=True,
    shared_intermediate=12,
    balance_loss=0.1,
)
GPT_OSS = dataclasses.replace(
    PLAIN, activation=Swiglu(1.702, 1.0, 7.0), router_bias=True, expert_bias=True, z_loss=0.01
)
QWEN2 = dataclasses.replace(
    PLAIN, method="softmax", shared_intermediate=24, shared_router=True, balance_loss=0.01
)
NEMOTRON = dataclasses.replace(PLAIN, activation="relu2", shared_intermediate=8)
INKLING = RoutingMethod("sigmoid", True, "sum", True, bias=True, shared=True)
# Options of `route` that a family has, with values that show.
OPTIONS = {
    "lfm2": {"method": "deepseek_v3", "epsilon": 0.5, "selection_bias": True},
    "gemma4": {"expert_scale": True},
    "axk2": {"method": "deepseek_v3", "num_groups": 2, "masked_group_value": 0.9},
    "inkling": {"method": INKLING, "num_shared_experts": 2, "selection_bias": True},
    "appended": {"num_shared_experts": 1, "router_bias": True},
}
OPTIONS = {name: dataclasses.replace(PLAIN, **fields) for name, fields in OPTIONS.items()}
CONFIGS = {
    **OPTIONS,
    "plain": PLAIN,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "qwen2": QWEN2,
    "nemotron": NEMOTRON,
}

applied = jax.jit(apply, static_argnames=("config", "layer"))
drawn = jax.jit(init, static_argnames="config")


@functools.cache
def example(name):
    """Parameters, biases among them not zero, and tokens [3, 5, H]."""
    config, rng = CONFIGS[name], np.random.default_rng(3)
    params = {n: np.asarray(a) for n, a in drawn(config, jax.random.key(1)).items()}
    kept = ("bias", "expert_scale")
    noisy = {
        n: rng.normal(size=a.shape).astype(a.dtype)
        for n, a in params.items()
        if any(word in n for word in kept)
    }
    return config, params | noisy, rng.normal(size=(3, 5, config.hidden)).astype(np.float32)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def mlp(config, p, prefix, x, *expert):
    """One expert on tokens [T, H], in float64."""
    w = {
        n: p[prefix + n][expert].astype(np.float64)
        for n in ("gate", "up", "down")
        if prefix + n in p
    }
    b = {n: p.get(f"{prefix}{n}_bias") for n in w}
    z = {n: x @ w[n] + (0 if b[n] is None else b[n][expert]) for n in w if n != "down"}
    if config is GPT_OSS:
        gate, up = np.minimum(z["gate"], 7), np.clip(z["up"], -7, 7)
        h = gate * sigmoid(1.702 * gate) * (up + 1)
    elif config is NEMOTRON:
        h = np.maximum(z["up"], 0) ** 2
    else:
        h = z["gate"] * sigmoid(z["gate"]) * z["up"]
    return h @ w["down"] + (0 if b["down"] is None else b["down"][expert])


def wanted(config, p, x, routing):
    """The block in NumPy, given what `jaxmoe.route` chose."""
    tokens = x.reshape(-1, config.hidden).astype(np.float64)
    ids = np.asarray(routing.expert_ids).reshape(len(tokens), -1)
    weights = np.asarray(routing.weights).reshape(ids.shape)
    y = np.zeros_like(tokens)
    for e in range(config.num_experts + config.num_shared_experts):
        y += mlp(config, p, "", tokens, e) * (weights * (ids == e)).sum(axis=1, keepdims=True)
    if config.shared_intermediate:
        gate = sigmoid(tokens @ p["shared_router"])[:, None] if config.shared_router else 1
        y += gate * mlp(config, p, "shared_", tokens)
    return y.reshape(x.shape)


def routed(config, p, x):
    logits = x @ p["router"] + p.get("router_bias", np.float32(0))
    options = ("top_k", "method", "num_groups", "top_groups", "scale", "norm_topk_prob")
    options += ("epsilon", "masked_group_value", "num_shared_experts")
    chosen = {name: getattr(config, name) for name in options}
    chosen |= {"bias": p.get("selection_bias"), "expert_scale": p.get("expert_scale")}
    return logits, jaxmoe.route(jnp.asarray(logits), **chosen)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_route(name):
    config, p, x = example(name)
    y, aux = applied(config, p, x)
    _, routing = routed(config, p, x)
    np.testing.assert_allclose(y, wanted(config, p, x, routing), rtol=2e-5, atol=2e-5)
    shared = config.num_shared_experts
    assert routing.expert_ids.shape == (3, 5, 2 + shared) and p["up"].shape[0] == 4 + shared
    assert aux.load.shape == (4,) and int(aux.load.sum()) == 3 * 5 * 2  # shared ones count not
    default = dataclasses.replace(config, epsilon=None, masked_group_value=-np.inf)
    if default != config:
        assert np.abs(applied(default, p, x)[0] - y).max() > 1e-3


def test_a_factor_of_each_expert_begins_at_one_and_is_trained():
    config, _, x = example("gemma4")
    p = drawn(config, jax.random.key(0))
    assert p["expert_scale"].tolist() == [1, 1, 1, 1]
    without = {n: a for n, a in p.items() if n != "expert_scale"}
    assert_equal(applied(config, p, x)[0], applied(PLAIN, without, x)[0])
    grads = jax.jit(jax.grad(lambda p: (apply(config, p, x)[0] ** 2).sum()))(p)
    assert np.abs(grads["expert_scale"]).min() > 0


@pytest.mark.parametrize("name", ("plain", "lfm2", "inkling"))
def test_the_balance_loss_of_sequences(name):
    config, p, x = example(name)
    config = dataclasses.replace(config, sequence_balance_loss=0.25)
    mask = np.arange(15).reshape(3, 5) % 4 != 0
    _, aux = applied(config, p, x, mask=mask)
    logits = (x @ p["router"])[..., :4]
    scores = np.exp(logits) if name == "plain" else sigmoid(logits)
    scores /= scores.sum(axis=-1, keepdims=True)
    each = []
    for b in range(3):  # the experts of the largest scores, whatever the bias is
        one = scores[b][mask[b]]
        count = np.bincount(np.argsort(-one, axis=1)[:, :2].ravel(), minlength=4)
        each.append((4 / (2 * len(one)) * count * one.mean(axis=0)).sum())
    np.testing.assert_allclose(aux.loss, 0.25 * np.mean(each), rtol=1e-5)
    with pytest.raises(ValueError, match=r"x must be \[B, S, hidden\], sequences of tokens"):
        apply(config, p, x[0])
    assert apply(config, p, x[:0])[1].loss == 0


@pytest.mark.parametrize("name", ("plain", "deepseek", "gpt_oss", "qwen2", "nemotron"))
def test_block(name):
    config, p, x = example(name)
    y, aux = applied(config, p, x)
    logits, routing = routed(config, p, x)
    np.testing.assert_allclose(y, wanted(config, p, x, routing), rtol=2e-5, atol=2e-5)
    ids = np.asarray(routing.expert_ids)
    assert_equal(aux.load, np.bincount(ids.ravel(), minlength=config.num_experts).astype(np.int32))
    scores = sigmoid(logits) if name == "deepseek" else np.exp(logits)
    scores /= scores.sum(axis=-1, keepdims=True)
    share = np.bincount(ids.ravel(), minlength=config.num_experts) / 15
    loss = config.balance_loss * config.num_experts * (share * scores.mean(axis=(0, 1))).sum()
    loss += config.z_loss * (np.log(np.exp(logits).sum(axis=-1)) ** 2).mean()
    np.testing.assert_allclose(aux.loss, loss, rtol=1e-5)
    assert (loss > 0) == (name not in ("plain", "nemotron"))


def test_masked_tokens_get_the_shared_expert_alone():
    config, p, x = example("deepseek")
    mask = np.arange(15).reshape(3, 5) % 3 != 0
    y, aux = applied(config, p, x, mask=mask)
    all_of_them, _ = applied(config, p, x)
    assert_equal(np.asarray(y)[mask], np.asarray(all_of_them)[mask])
    shared = mlp(config, p, "shared_", x[~mask].astype(np.float64))
    np.testing.assert_allclose(np.asarray(y)[~mask], shared, rtol=2e-5, atol=2e-6)
    assert aux.load.sum() == mask.sum() * config.top_k
    other, of_other = applied(config, p, np.where(mask[..., None], x, 7), mask=mask)
    assert_equal(np.asarray(other)[mask], np.asarray(y)[mask])
    assert_equal(of_other.loss, aux.loss)


def test_products_may_be_narrower_than_parameters():
    config, p, x = example("qwen2")
    narrow = dataclasses.replace(config, dtype=jnp.bfloat16)
    y, _ = applied(narrow, p, x)
    assert y.dtype == jnp.float32
    _, routing = routed(config, p, x)  # chosen in float32
    want = wanted(config, p, x, routing)
    assert 1e-4 < np.abs(y - want).max() / np.abs(want).max() < 2e-2
    grads = jax.jit(jax.grad(lambda p: applied(narrow, p, x)[0].sum()))(p)
    assert {a.dtype for a in grads.values()} == {jnp.dtype(jnp.float32)}
    stored = dataclasses.replace(config, param_dtype=jnp.bfloat16)
    of_stored = drawn(stored, jax.random.key(1))
    assert of_stored["down"].dtype == jnp.bfloat16 and of_stored["router"].dtype == jnp.float32
    assert applied(stored, of_stored, x.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_parameters_are_drawn_by_fan_in():
    config = MoEConfig(64, 256, num_experts=8, top_k=2, expert_bias=True, shared_intermediate=512)
    params, named = drawn(config, jax.random.key(0)), parameters(config)
    assert params.keys() == named.keys()
    for name, p in named.items():
        assert params[name].shape == p.shape and len(p.axes) == len(p.shape)
        wide = np.asarray(params[name], np.float64)
        if p.fan_in:
            assert wide.std() == pytest.approx(p.fan_in**-0.5, rel=0.06), name
        else:
            assert not wide.any(), name
    assert named["gate"].axes == ("expert", "embed", "mlp")
    assert named["down_bias"].axes == ("expert", "embed")
    assert named["shared_down"].fan_in == 512


@pytest.mark.parametrize(
    ("name", "parts"), [("deepseek", {"expert": 4}), ("plain", {"expert": 2, "mlp": 2})]
)
def test_experts_of_several_devices(name, parts):
    """Each has some of them, or a part of I of some."""
    config, p, x = example(name)
    mesh = jax.make_mesh(tuple(parts.values()), tuple(parts), devices=jax.devices()[:4])
    specs = {
        n: P(*(axis if axis in parts else None for axis in a.axes))
        for n, a in parameters(config).items()
    }
    options = {"axis_name": "expert"} | ({"tensor_axis": "mlp"} if "mlp" in parts else {})
    layer = functools.partial(expert_parallel.moe_mlp, **options)
    block = jax.shard_map(
        lambda p, x: apply(config, p, x, layer=layer)[0],
        mesh=mesh,
        in_specs=(specs, P("expert")),
        out_specs=P("expert"),
    )
    tokens = np.concatenate([x, x[:1]])  # [4, 5, H]: several axes
    y, _ = applied(config, p, tokens)
    place = functools.partial(jax.tree.map, lambda a, s: jax.device_put(a, NamedSharding(mesh, s)))
    got = jax.jit(block)(place(p, specs), place(tokens, P("expert")))
    np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": 0}, ValueError, "hidden"),
        ({"top_k": 5}, ValueError, r"top_k=5 must be in \[1, 4\]"),
        ({"method": "llama4"}, ValueError, "top_k=2 must be 1 for method 'llama4'"),
        ({"method": "softmax", "num_groups": 2}, ValueError, "num_groups"),
        ({"activation": "swish"}, ValueError, "activation"),
        ({"forward_format": "fp3"}, ValueError, "forward_format"),
        ({"param_dtype": jnp.int32}, TypeError, "must be bfloat16, float16 or float32"),
        ({"method": "top1"}, ValueError, "MoEConfig: method='top1' must be one of"),
        ({"scale": np.ones((), np.float32)}, TypeError, "scale must be a number"),
        ({"selection_bias": True}, ValueError, "selection_bias=True needs method 'deepseek_v3'"),
        ({"shared_router": True}, ValueError, "shared_router=True needs a shared expert"),
        (
            {"param_dtype": jnp.bfloat16, "dtype": jnp.float32},
            ValueError,
            "param_dtype=bfloat16 must be dtype=float32, or float32 beside a narrower one",
        ),
        ({"param_dtype": jnp.bfloat16, "dtype": jnp.float16}, ValueError, "must be dtype=float16"),
        (
            {"dtype": jnp.bfloat16, "forward_format": "fp8_tensor"},
            ValueError,
            "param_dtype=float32 must be dtype=bfloat16 with forward_format='fp8_tensor'",
        ),
        ({"param_dtype": None}, TypeError, "param_dtype=None must be bfloat16, float16 or float32"),
        ({"param_dtype": "foo"}, TypeError, "param_dtype='foo' must be bfloat16"),
        ({"dtype": "foo"}, TypeError, "dtype='foo' must be bfloat16"),
        ({"dtype": jnp.int8}, TypeError, "dtype=int8 must be bfloat16"),
        ({"balance_loss": "a"}, TypeError, "balance_loss must be a number.* Got balance_loss: 'a'"),
        ({"balance_loss": -1.0}, ValueError, "balance_loss=-1.0 must be at least 0"),
        ({"balance_loss": np.ones((), np.float32)}, TypeError, "balance_loss must be a number"),
        ({"z_loss": None}, TypeError, "z_loss must be a number.* Got z_loss: None"),
        ({"z_loss": float("nan")}, ValueError, "z_loss=nan must be finite"),
        ({"z_loss": float("inf")}, ValueError, "z_loss=inf must be finite"),
        ({"expert_scale": 1}, TypeError, "expert_scale must be a bool"),
        ({"num_shared_experts": -1}, ValueError, "num_shared_experts=-1 must be at least 0"),
        ({"method": INKLING}, ValueError, "num_shared_experts=0 must be at least 1"),
        ({"epsilon": 1.0}, ValueError, "epsilon=1.0 must be None: method 'renormalize' has"),
        ({"masked_group_value": 0.0}, ValueError, "masked_group_value=0.0 must be left out"),
        ({"sequence_balance_loss": -1.0}, ValueError, "sequence_balance_loss=-1.0 must be at le"),
        ({"router_bias": "yes"}, TypeError, "router_bias must be a bool. Got router_bias: 'yes'"),
        ({"expert_bias": 1}, TypeError, "expert_bias must be a bool"),
    ],
)
def test_refused_configs(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(PLAIN, **change)


def test_refused_arrays():
    config, p, x = example("plain")
    for wrong in (x[..., :4], x[0, 0]):
        with pytest.raises(ValueError, match=r"a last one of hidden=8"):
            apply(config, p, wrong)
    with pytest.raises(TypeError, match="x.dtype"):
        apply(config, p, x.astype(np.int32))
    with pytest.raises(ValueError, match="mask must have the axes of tokens"):
        apply(config, p, x, mask=np.ones(5, bool))
    with pytest.raises(TypeError, match="mask.dtype"):
        apply(config, p, x, mask=np.ones((3, 5), np.int32))


def test_what_is_no_config_key_or_layer_is_named():
    config, p, x = example("plain")
    nnx = pytest.importorskip("flax.nnx")
    blocks = [importlib.import_module(f"jaxmoe.nn.{n}") for n in ("nnx", "linen", "equinox")]
    NnxMoE, LinenMoE, EquinoxMoE = (block.MoE for block in blocks)  # noqa: N806
    key, rngs = jax.random.key(0), nnx.Rngs(0)
    for call, message in (
        (lambda: apply({"hidden": 8}, p, x), "config must be a jaxmoe.nn.MoEConfig"),
        (lambda: init(None, key), "config must be a jaxmoe.nn.MoEConfig"),
        (lambda: init(config, 3), "key must be that of jax.random.key"),
        (lambda: apply(config, None, x), "params must be a dict of arrays by name"),
        (lambda: apply(config, p, x, layer=3), "layer must be a function such as jaxmoe.moe_mlp"),
        (lambda: NnxMoE({}, rngs=rngs), "config must be a jaxmoe.nn.MoEConfig"),
        (lambda: NnxMoE(config, rngs=3), "rngs must be a flax.nnx.Rngs"),
        (lambda: NnxMoE(config, rngs=rngs, layer=3), "layer must be a function"),
        (lambda: LinenMoE({}).init(key, x), "config must be a jaxmoe.nn.MoEConfig"),
        (lambda: EquinoxMoE(None, key=key), "config must be a jaxmoe.nn.MoEConfig"),
        (lambda: EquinoxMoE(config, key=3), "key must be that of jax.random.key"),
        (lambda: EquinoxMoE(config, key=key, layer=3), "layer must be a function"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(TypeError, match=r"params\['router'\].dtype=i32 must be bf16 or"):
        apply(config, p | {"router": np.ones((8, 4), np.int32)}, x)


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("gpt_oss", ("down_bias",), r"MoE: params must have down_bias \[4, 8\]\."),
        ("gpt_oss", ("gate_bias", "up_bias"), r"gate_bias \[4, 16\], up_bias \[4, 16\]"),
        ("deepseek", ("selection_bias",), r"params must have selection_bias \[8\]"),
        ("qwen2", ("shared_gate",), r"params must have shared_gate \[8, 24\]"),
    ],
)
def test_a_missing_array_is_named(name, missing, message):
    config, p, x = example(name)
    with pytest.raises(KeyError, match=message):
        apply(config, {n: a for n, a in p.items() if n not in missing}, x)


def test_an_array_that_the_config_has_not_is_refused():
    config, p, x = example("plain")
    with pytest.raises(KeyError, match="params must not have down_bias, which the config has not"):
        apply(config, p | {"down_bias": np.ones((4, 8), np.float32)}, x)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("router", (4, 4), r"params\['router'\].shape=\[4,4\] must be \[8,4\]"),
        ("router", (8, 5), r"params\['router'\].shape=\[8,5\] must be \[8,4\]"),
        ("down", (4, 16, 9), r"params\['down'\].shape=\[4,16,9\] must be \[4,16,8\]"),
        ("gate", (4, 8, 12), r"params\['gate'\].shape=\[4,8,12\] must be \[4,8,16\]"),
        ("up", (8, 16), r"params\['up'\] must have 3 axes \[expert,embed,mlp\], not 2"),
        ("down", (3, 16, 8), r"gate.shape=\[4, 8, 16\] must be \[3, 8, 16\]"),
    ],
)
def test_arrays_of_another_shape_are_refused(name, shape, message):
    config, p, x = example("plain")
    with pytest.raises(ValueError, match=message):
        apply(config, p | {name: np.ones(shape, np.float32)}, x)


def test_quantized_experts_are_taken():
    config = MoEConfig(64, 64, num_experts=4, top_k=2)
    p, x = drawn(config, jax.random.key(0)), jnp.ones((3, 64))
    quantize = functools.partial(jaxmoe.quantize, format="fp8_channel", weight_layout="kn")
    q = dict(p) | {n: quantize(p[n]) for n in ("gate", "up", "down")}
    np.testing.assert_allclose(apply(config, q, x)[0], apply(config, p, x)[0], rtol=0.2, atol=0.2)


def test_gradients_of_masters_are_not_rounded():
    """Those of the shared expert neither."""
    config, p, x = example("qwen2")
    narrow = dataclasses.replace(config, dtype=jnp.bfloat16)
    grads = jax.jit(jax.grad(lambda p: (apply(narrow, p, x)[0] ** 2).sum()))(p)
    for name in ("gate", "down", "shared_gate", "shared_up", "shared_down"):
        g = np.asarray(grads[name])
        kept = g == np.asarray(jnp.asarray(g).astype(jnp.bfloat16).astype(jnp.float32))
        assert kept[g != 0].mean() < 0.2, name


@pytest.mark.parametrize("method", ("sqrtsoftplus", "sigmoid_renorm"))
def test_losses_of_hopeless_experts_have_finite_gradients(method):
    config = dataclasses.replace(PLAIN, method=method, balance_loss=0.1, router_bias=True)
    p = dict(drawn(config, jax.random.key(0)))
    p["router_bias"] = jnp.array([-jnp.inf, 0.0, -110.0, 0.0])
    grads = jax.jit(jax.grad(lambda p: apply(config, p, jnp.ones((3, 8)))[1].loss))(p)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_nan_in_padding_reaches_no_gradient():
    config, p, x = example("plain")
    mask = np.ones((3, 5), bool)
    mask[1, 2] = False
    x = np.where(mask[..., None], x, np.nan).astype(np.float32)
    grads = jax.jit(jax.grad(lambda p: apply(config, p, x, mask=mask)[0][mask].sum()))(p)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_llama4_weighs_what_experts_read():
    config = dataclasses.replace(PLAIN, method="llama4", top_k=1)
    p, x = drawn(config, jax.random.key(0)), example("plain")[2]
    routing = jaxmoe.route(jnp.asarray(x @ np.asarray(p["router"])), top_k=1, method="llama4")
    experts = jaxmoe.Experts(**{n: p[n] for n in ("gate", "up", "down")})
    want = jaxmoe.moe_mlp(jnp.asarray(x), routing, experts, apply_weight_on_input=True)
    np.testing.assert_allclose(applied(config, p, x)[0], want, rtol=1e-5, atol=1e-6)


def test_a_method_by_name_is_the_method():
    named = dataclasses.replace(PLAIN, method="llama4", top_k=1)
    itself = dataclasses.replace(named, method=METHODS["llama4"])
    p, x = drawn(named, jax.random.key(0)), example("plain")[2]
    assert_equal(applied(itself, p, x)[0], applied(named, p, x)[0])


def test_explicit_axes():
    config, p, x = example("qwen2")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    rules = {"expert": "a", "mlp": "b", "embed": None, None: None}
    specs = {n: P(*(rules[axis] for axis in q.axes)) for n, q in parameters(config).items()}
    place = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))  # noqa: E731
    tokens = np.concatenate([x, x[:1]])
    with jax.set_mesh(mesh):
        got, _ = applied(config, jax.tree.map(place, p, specs), place(tokens, P("a")))
    np.testing.assert_allclose(got, applied(config, p, tokens)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ("plain", "nemotron"))
def test_another_layer_leaves_explicit_axes_as_they_are(name):
    """Tokens split over two axes come back split so, and add up with x."""
    config, p, x = example(name)
    mesh = jax.make_mesh((2, 2), ("b", "s"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = np.concatenate([x, x[:1]])[:, :4]
    layer = functools.partial(jaxmoe.moe_mlp, gather_weights="b")
    specs = dict.fromkeys(parameters(config), P()) | {"up": P("b"), "down": P("b")}
    if "gate" in p:
        specs["gate"] = P("b")
    place = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))  # noqa: E731
    plus = jax.jit(lambda p, x: x + apply(config, p, x, layer=layer)[0])
    with jax.set_mesh(mesh):
        y = plus({n: place(p[n], specs[n]) for n in p}, place(x, P("b", "s")))
    assert jax.typeof(y).sharding.spec == P("b", "s", None)
    np.testing.assert_allclose(y, x + applied(config, p, x)[0], rtol=1e-4, atol=1e-4)


# --- frameworks: (config, arrays) -> module, and what a step of training is ---


class Linen:
    def __init__(self, config, params, layer=jaxmoe.moe_mlp):
        from jaxmoe.nn import linen

        self.block = linen.MoE(config, layer)
        trained = {n: a for n, a in params.items() if parameters(config)[n].trained}
        state = {n: a for n, a in params.items() if n not in trained}
        self.variables = {"params": trained} | ({linen.STATE: state} if state else {})

    def call(self, variables, x):
        return self.block.apply(variables, x)

    def bias(self, x, rate):
        _, moved = self.block.apply(self.variables, x, rate=rate, mutable=["moe_state"])
        return moved["moe_state"]["selection_bias"]

    def arrays(self, variables):
        return {n: a for group in variables.values() for n, a in group.items()}

    @staticmethod
    def specs(config):
        import flax.linen as nn

        from jaxmoe.nn.linen import MoE

        x = jax.ShapeDtypeStruct((2, config.hidden), jnp.float32)
        boxed = jax.eval_shape(MoE(config).init, jax.random.key(0), x)
        return nn.get_partition_spec(boxed)["params"]


class Nnx:
    def __init__(self, config, params, layer=jaxmoe.moe_mlp):
        from flax import nnx

        from jaxmoe.nn.nnx import MoE

        block = MoE(config, rngs=nnx.Rngs(0), layer=layer)
        for name, a in params.items():
            getattr(block, name)[...] = a
        self.graph, self.variables = nnx.split(block)

    def call(self, variables, x):
        from flax import nnx

        return nnx.merge(self.graph, variables)(x)

    def bias(self, x, rate):
        from flax import nnx

        block = nnx.merge(self.graph, self.variables)
        block.update_selection_bias(block(x)[1].load, rate=rate)
        return block.selection_bias[...]

    def arrays(self, variables):
        from flax import nnx

        return {path[-1]: variable[...] for path, variable in nnx.to_flat_state(variables)}

    @staticmethod
    def specs(config):
        from flax import nnx

        from jaxmoe.nn.nnx import MoE

        state = nnx.state(nnx.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0))))
        specs = nnx.to_flat_state(nnx.get_partition_spec(state))
        return {path[-1]: v.get_value() for path, v in specs}


class Equinox:
    def __init__(self, config, params, layer=jaxmoe.moe_mlp):
        import equinox as eqx

        from jaxmoe.nn.equinox import MoE

        block = MoE(config, key=jax.random.key(0), layer=layer)
        given = [{n: params[n] for n in part} for part in (block.params, block.state)]
        block = eqx.tree_at(lambda b: (b.params, b.state), block, tuple(given))
        self.variables, self.rest = eqx.partition(block, eqx.is_array_like)

    def call(self, variables, x):
        import equinox as eqx

        return eqx.combine(variables, self.rest)(x)

    def bias(self, x, rate):
        import equinox as eqx

        block = eqx.combine(self.variables, self.rest)
        return block.with_selection_bias(block(x)[1].load, rate=rate).state["selection_bias"]

    def arrays(self, variables):
        return variables.params | variables.state

    @staticmethod
    def specs(config):
        return {n: P(*p.axes) for n, p in parameters(config).items()}


FRAMEWORKS = {"flax.linen": Linen, "flax.nnx": Nnx, "equinox": Equinox}


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param)
    return FRAMEWORKS[request.param]


def test_modules_are_the_block(framework):
    config, p, x = example("deepseek")
    module = framework(config, p)
    y, aux = jax.jit(module.call)(module.variables, x)
    want, of_want = applied(config, p, x)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    assert_equal(aux.load, of_want.load)
    moved = jaxmoe.update_selection_bias(p["selection_bias"], of_want.load, rate=0.25)
    assert_equal(module.bias(x, 0.25), moved)


def test_a_bias_that_is_not_there_is_not_moved(framework):
    config, p, x = example("plain")
    with pytest.raises(ValueError, match="MoE: the block has no selection bias to move; config.s"):
        framework(config, p).bias(x, 0.25)


def test_modules_over_devices(framework):
    config, p, x = example("qwen2")
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])
    layer = functools.partial(expert_parallel.moe_mlp, axis_name="expert")
    module = framework(config, p, layer)
    tokens = np.concatenate([x, x[:1]])
    axes = parameters(config)

    def spec(path, _):
        names = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
        name = next(n for n in names if n in axes)
        return P("expert") if axes[name].axes[0] == "expert" else P()

    specs = jax.tree_util.tree_map_with_path(spec, module.variables)
    place = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))  # noqa: E731
    block = jax.shard_map(
        lambda v, x: module.call(v, x)[0],
        mesh=mesh,
        in_specs=(specs, P("expert")),
        out_specs=P("expert"),
    )
    placed = jax.tree.map(place, module.variables, specs)
    got = jax.jit(block)(placed, place(tokens, P("expert")))
    np.testing.assert_allclose(got, applied(config, p, tokens)[0], rtol=1e-5, atol=1e-5)


def test_modules_train(framework):
    """Towards the block of other weights; what is not trained stays."""
    config, p, _ = example("deepseek")
    x = np.random.default_rng(0).normal(size=(64, config.hidden)).astype(np.float32)
    y, _ = applied(config, p, x)
    module = framework(config, p | {n: a * 0.5 for n, a in p.items() if n.endswith(("up", "down"))})
    adam = optax.adam(2e-2)

    def loss(variables):
        got, aux = module.call(variables, x)
        return jnp.mean((got - y) ** 2) + aux.loss

    @jax.jit
    def step(variables, moments):
        value, grads = jax.value_and_grad(loss)(variables)
        updates, moments = adam.update(grads, moments, variables)
        return optax.apply_updates(variables, updates), moments, value

    variables, moments, values = module.variables, adam.init(module.variables), []
    with jax.numpy_dtype_promotion("standard"):  # which optax expects
        for _ in range(30):
            variables, moments, value = step(variables, moments)
            values.append(float(value))
    assert values[-1] < 0.4 * values[0]
    before, after = module.arrays(module.variables), module.arrays(variables)
    assert before.keys() == after.keys()
    same = {n for n in before if np.array_equal(before[n], after[n])}
    assert same == {"selection_bias"}


def test_modules_name_the_axes_of_their_parameters(framework):
    specs = framework.specs(QWEN2)
    assert {n: tuple(s) for n, s in specs.items()} == {
        n: p.axes for n, p in parameters(QWEN2).items()
    }


def test_frameworks_are_not_imported():
    program = "import sys, jaxmoe; import jaxmoe.nn; print({'flax', 'equinox'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "set()"
