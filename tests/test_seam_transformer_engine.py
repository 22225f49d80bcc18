"""Transformer Engine's `moe` against its contract written out, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxmoe._testing import normal
from jaxmoe.seams.transformer_engine import moe

B, S, H, WIDTH, E = 4, 6, 16, 32, 8
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "linear": lambda x: x}


def example(bias=False, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (B, S, H), "gate_kernel": (H, E), "wi": (E, H, 2 * WIDTH), "wo": (E, WIDTH, H)}
    if bias:
        shapes |= {"wi_0_bias": (E, WIDTH), "wi_1_bias": (E, WIDTH), "wo_bias": (E, H)}
    return {name: normal(rng, shape, dtype, 0.5) for name, shape in shapes.items()}


def chosen(logits, top_k, score, pre_softmax, groups, scale, bias, norm):
    """Experts and weights of one token, as the fused router chooses and normalizes them."""
    by_score = {
        "softmax": (lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()),
        "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
        "sqrtsoftplus": lambda z: np.sqrt(np.log1p(np.exp(z))),
    }[score]
    scores = by_score(logits) if pre_softmax or score != "softmax" else logits
    key = scores + (0 if bias is None else bias)
    if groups:
        count, best = groups
        parts = np.sort(key.reshape(count, -1), axis=1)[:, ::-1]
        worth = parts[:, : top_k // best].sum(axis=1)
        kept = np.argsort(-worth, kind="stable")[:best]
        key = np.where(np.isin(np.arange(E) // (E // count), kept), key, -np.inf)
    ids = np.argsort(-key, kind="stable")[:top_k]
    weights = scores[ids]
    if score == "softmax" and not pre_softmax:
        weights = by_score(weights)
    elif norm if norm is not None else (score != "softmax" and top_k > 1):
        weights = weights / (weights.sum() + 1e-20)
    return ids, weights * scale


def literal(given, top_k, *, activation="silu", early=False, on_input=False, **routing):
    p = {name: np.asarray(a, np.float64) for name, a in given.items()}
    bias = lambda name, e: p[name][e] if name in p else 0  # noqa: E731
    y = np.zeros((B * S, H))
    defaults = {"score": "softmax", "pre_softmax": False, "groups": None, "scale": 1.0}
    routing = defaults | {"bias": None, "norm": None} | routing
    for t, x in enumerate(p["x"].reshape(-1, H)):
        for e, w in zip(*chosen(x @ p["gate_kernel"], top_k, **routing), strict=True):
            row = x * w if on_input else x
            gate, up = np.split(row @ p["wi"][e], 2)
            gate, up = gate + bias("wi_0_bias", e), up + bias("wi_1_bias", e)
            act = np.asarray(ACTIVATIONS[activation](jnp.asarray(gate, jnp.float32))) * up
            if on_input:
                y[t] += act @ p["wo"][e] + bias("wo_bias", e)
            elif early:
                y[t] += (w * act) @ p["wo"][e] + bias("wo_bias", e)
            else:
                y[t] += w * (act @ p["wo"][e] + bias("wo_bias", e))
    return y.reshape(B, S, H)


ROUTINGS = {
    "softmax": ({}, {}),
    "scaled": ({"scaling_factor": 2.5}, {"scale": 2.5}),
    "pre_softmax": ({"use_pre_softmax": True}, {"pre_softmax": True}),
    "norm_topk_prob": (
        {"use_pre_softmax": True, "norm_topk_prob": True},
        {"pre_softmax": True, "norm": True},
    ),
    "sigmoid": ({"score_function": "sigmoid"}, {"score": "sigmoid"}),
    "not_normalized": (
        {"score_function": "sigmoid", "norm_topk_prob": False},
        {"score": "sigmoid", "norm": False},
    ),
    "sqrtsoftplus": ({"score_function": "sqrtsoftplus"}, {"score": "sqrtsoftplus"}),
    "groups_of_softmax": (
        {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
        {"pre_softmax": True, "groups": (4, 2)},
    ),
    "no_groups": ({"num_groups": -1, "group_topk": -1}, {}),
    "no_number_of_groups": ({"group_topk": 1}, {}),
    "no_best_groups": ({"num_groups": 4}, {}),
}


def check(given, top_k, options, want):
    layer = functools.partial(moe, num_experts=E, num_experts_per_tok=top_k, **options)
    y, loss, received = jax.jit(lambda given: layer(**given))(given)
    np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-4)
    assert loss is None and received.tolist() == [B * S * top_k]
    return y


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name):
    given, (options, rules) = example(), ROUTINGS[name]
    check(given, 2, options, literal(given, 2, **rules))


def test_groups_of_deepseek_v3():
    given = example()
    bias = normal(np.random.default_rng(3), (E,), jnp.float32, 0.3)
    options = {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "expert_bias": bias}
    want = literal(given, 4, score="sigmoid", groups=(4, 2), bias=np.asarray(bias))
    check(given, 4, options, want)


@pytest.mark.parametrize("score", ("sigmoid", "sqrtsoftplus"))
def test_one_expert_keeps_its_score(score):
    given = example()
    check(given, 1, {"score_function": score}, literal(given, 1, score=score))


def test_llama4():
    """Weights multiply what experts read, which differs for any activation but a linear one."""
    given = example()
    options = {"score_function": "sigmoid", "apply_weight_on_input": True, "group_topk": 1}
    y = check(given, 1, options, literal(given, 1, score="sigmoid", on_input=True))
    assert np.abs(y - literal(given, 1, score="sigmoid")).max() > 0.01


@pytest.mark.parametrize("early", (False, True))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_biases(activation, early):
    given = example(bias=True)
    options = {"activation_type": activation, "apply_topk_weights_early": early}
    if activation == "gelu":
        options["activation_type"] = jax.nn.gelu
    check(given, 2, options, literal(given, 2, activation=activation, early=early))


def test_gate_and_up_apart():
    given = example(bias=True)
    want = literal(given, 2)
    given["wi"] = tuple(jnp.split(given["wi"], 2, axis=-1))
    check(given, 2, {}, want)


def test_master_weights_in_a_quantized_forward_pass():
    """FP8 in the value, gradients of plain weights."""
    given = example()
    narrow = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    given["gate_kernel"], x = narrow(given["gate_kernel"]), narrow(given.pop("x"))
    want = literal(given | {"x": x}, 2)
    layer = functools.partial(moe, num_experts=E, num_experts_per_tok=2)
    y, *_ = layer(x.astype(jnp.bfloat16), **given)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), want, rtol=0.1, atol=0.1)
    plain = jax.tree.map(lambda a: a.astype(jnp.bfloat16), given | {"x": x})
    f = lambda wo, **options: layer(**plain | {"wo": wo}, **options)[0].astype(jnp.float32)  # noqa: E731
    quantized = f(plain["wo"], forward_format="fp8_channel")
    assert 0 < np.abs(quantized - f(plain["wo"])).max() < 0.5
    masters = layer(**given | {"x": plain["x"]}, forward_format="fp8_channel")[0]
    np.testing.assert_array_equal(masters.astype(jnp.float32), quantized)
    grad = jax.grad(lambda wo: f(wo, forward_format="fp8_channel").sum())(plain["wo"])
    assert grad.dtype == jnp.bfloat16 and bool(jnp.isfinite(grad).all()) and bool(grad.any())


@pytest.mark.parametrize("score", ("softmax", "sigmoid", "sqrtsoftplus"))
def test_balance_loss(score):
    given = example()
    _, loss, _ = moe(
        **given,
        num_experts=E,
        num_experts_per_tok=2,
        score_function=score,
        aux_loss_coeff=0.25,
        dtype=jnp.float32,
    )
    logits = np.asarray(given["x"], np.float64).reshape(-1, H) @ np.asarray(given["gate_kernel"])
    scores = {
        "softmax": np.exp(logits),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(logits))),
    }[score]
    scores = scores / scores.sum(axis=1, keepdims=True)
    counts = np.bincount(np.argsort(-logits, axis=1)[:, :2].reshape(-1), minlength=E)
    want = E * 0.25 / (2 * (B * S) ** 2) * (scores.sum(axis=0) * counts).sum()
    np.testing.assert_allclose(loss, want, rtol=1e-4)
    assert loss.dtype == jnp.float32


@pytest.mark.parametrize("early", (False, True))
def test_experts_over_devices(early):
    mesh = jax.make_mesh((2, 2), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    given = example(bias=True)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, jax.P(*spec)))  # noqa: E731
    placed = {
        n: put(
            a, *((("fsdp", "expert"),) if n == "x" else () if n == "gate_kernel" else ("expert",))
        )
        for n, a in given.items()
    }
    layer = functools.partial(
        moe,
        num_experts=E,
        num_experts_per_tok=2,
        ep_axis="expert",
        data_parallelism_axes=("fsdp",),
        apply_topk_weights_early=early,
    )
    with jax.set_mesh(mesh):
        y, _, received = jax.jit(lambda given: layer(**given))(placed)
    np.testing.assert_allclose(y, literal(given, 2, early=early), rtol=2e-4, atol=2e-4)
    assert received.tolist() == [B * S * 2]
    layer = functools.partial(layer, **given, mesh=mesh)
    with pytest.raises(ValueError, match="moe: ep_axis='model' must be one of fsdp, expert"):
        layer(ep_axis="model")
    with pytest.raises(ValueError, match="moe: data_parallelism_axes='z' must be one of fsdp, exp"):
        layer(data_parallelism_axes=("z",))


@pytest.mark.parametrize("early", (False, True))
def test_experts_over_explicit_axes(early):
    """Tokens split over two axes come back split so, and add up with x."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "expert"), axis_types=(AxisType.Explicit,) * 2)
    given = example(bias=True)
    axes = {n: ("expert",) for n in given} | {"x": ("fsdp", "expert"), "gate_kernel": ()}
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, jax.P(*spec)))  # noqa: E731
    layer = functools.partial(
        moe,
        num_experts=E,
        num_experts_per_tok=2,
        ep_axis="expert",
        data_parallelism_axes=("fsdp",),
        apply_topk_weights_early=early,
        aux_loss_coeff=0.01,
    )

    @jax.jit
    def plus(given):
        y, loss, _ = layer(**given)
        return given["x"] + y, loss

    with jax.set_mesh(mesh):
        y, loss = plus({n: put(a, axes[n]) for n, a in given.items()})
    assert jax.typeof(y).sharding.spec == jax.P("fsdp", "expert", None)
    want = given["x"] + literal(given, 2, early=early)
    np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-4)
    alone = moe(**given, num_experts=E, num_experts_per_tok=2, aux_loss_coeff=0.01)[1]
    np.testing.assert_allclose(loss, alone, rtol=1e-5)


class Sets:
    """A set with a quantizer of tokens."""

    x, kernel, dgrad = object(), None, None


class NoQuantizer:
    x = kernel = dgrad = None


def test_sets_without_a_quantizer_are_taken():
    given = example()
    check(given, 2, {"quantizer_sets": (NoQuantizer, NoQuantizer)}, literal(given, 2))


@pytest.mark.parametrize(("capacity", "received"), ((1, 1), (8, 8), (1000, B * S * 2)))
def test_a_capacity_drops_nothing(capacity, received):
    """MaxText always gives one, and stops where more is received."""
    given = example()
    block = functools.partial(moe, **given, num_experts=E, num_experts_per_tok=2)
    y, _, got = block(recv_capacity_per_rank=capacity)
    np.testing.assert_allclose(y, literal(given, 2), rtol=2e-4, atol=2e-4)
    assert got.dtype == jnp.int32 and got.tolist() == [received]
    for wrong, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="recv_capacity_per_rank"):
            block(recv_capacity_per_rank=wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantizer_sets": (NoQuantizer, Sets)},
            "quantizer_sets must have no quantizer; forw",
        ),
        ({"expert_bias": np.zeros(E)}, "expert_bias must be None with score_function='softmax'"),
        (
            {"activation_type": "mish"},
            "activation_type must be one of silu, swish, gelu, relu",
        ),
        ({"activation_type": jnp.tanh}, "activation_type must be one of silu"),
        (
            {"num_groups": 4, "group_topk": 2},
            "group_topk=2 with num_groups=4 must be None with softmax without use_pre_softmax",
        ),
        (
            {"num_groups": 4, "group_topk": 2, "score_function": "sigmoid"},
            "group_topk=2 with num_groups=4 must be num_experts_per_tok=2 / 2 with sigmoid",
        ),
        (
            {"num_groups": 4, "group_topk": 2, "score_function": "sqrtsoftplus"},
            "group_topk=2 with num_groups=4 must be None with sqrtsoftplus",
        ),
        ({"apply_weight_on_input": True}, "apply_weight_on_input=True needs score_function='sigm"),
    ],
)
def test_not_implemented(change, message):
    given = example()
    with pytest.raises(NotImplementedError, match=message):
        moe(**given, num_experts=E, num_experts_per_tok=2, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score_function": "tanh"}, "score_function='tanh' must be one of softmax, sigmoid"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 must be in \[1, 8\]"),
        ({"num_experts_per_tok": 0}, r"num_experts_per_tok=0 must be in \[1, 8\]"),
        ({"aux_loss_coeff": -0.1}, "aux_loss_coeff=-0.1 must be at least 0"),
        (
            {"expert_bias": np.zeros(3, np.float32), "score_function": "sigmoid"},
            r"moe: expert_bias.shape=\[3\] must be \[8\] \(\[E\]\)",
        ),
        ({"num_experts": 9}, r"gate_kernel.shape\[1\]=8 must be 9 \(num_experts\)"),
        ({"wi_0_bias": np.zeros((E, WIDTH))}, "wi_0_bias and wi_1_bias must both be given"),
        ({"x": np.zeros((3, H), np.float32)}, r"x must have 3 axes \[B,S,H\]"),
        (
            {"gate_kernel": np.zeros((H + 1, E), np.float32)},
            r"moe: gate_kernel.shape\[0\]=17 must equal x.shape\[2\]=16 \(hidden\)",
        ),
        ({"wi": (1, 2, 3)}, "wi must be an array or two, gate and up, not 3"),
        (
            {"wo_bias": np.zeros((3, H)), "apply_topk_weights_early": True},
            r"wo_bias.shape=\[3,16\] must be \[8,16\]",
        ),
        ({"num_groups": -2, "group_topk": 1}, "num_groups=-2 must be at least -1"),
        ({"scaling_factor": float("nan")}, "scaling_factor=nan must be finite"),
        ({"ep_axis": "expert"}, "ep_axis='expert' needs a mesh: give mesh=, or call it inside jax"),
    ],
)
def test_refused(change, message):
    given = example() | {"num_experts": E, "num_experts_per_tok": 2} | change
    with pytest.raises(ValueError, match=message):
        moe(**given)


@pytest.mark.parametrize(
    "change", [{"aux_loss_coeff": None}, {"scaling_factor": "a"}, {"scaling_factor": None}]
)
def test_no_numbers(change):
    name, value = next(iter(change.items()))
    with pytest.raises(TypeError, match=f"moe: {name} must be a number.* Got {name}: {value!r}"):
        moe(**example(), num_experts=E, num_experts_per_tok=2, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wo": None}, "wo must be a JAX or NumPy array. Got wo: None"),
        ({"wi": ([1.0], [1.0])}, r"wi\[0\] must be a JAX or NumPy array"),
        ({"wi_0_bias": [1.0], "wi_1_bias": [1.0]}, "wi_0_bias must be a JAX or NumPy array"),
        ({"dtype": "foo"}, "moe: dtype='foo' must be bfloat16, float16 or float32"),
        ({"dtype": jnp.int32}, "moe: dtype=int32 must be bfloat16, float16 or float32"),
        ({"num_groups": "a", "group_topk": 1}, "num_groups must be a Python int"),
        ({"mesh": 3}, "moe: mesh must be a jax.sharding.Mesh or None. Got mesh: 3"),
        ({"mesh": "data", "ep_axis": "expert"}, "mesh must be a jax.sharding.Mesh or None"),
        ({"ep_axis": 3}, "ep_axis must be the name of an axis or None. Got ep_axis: 3"),
        ({"ep_axis": ("expert",)}, "ep_axis must be the name of an axis or None"),
        ({"data_parallelism_axes": "fsdp"}, "axes='fsdp' must be a tuple of the names of axes"),
        ({"data_parallelism_axes": None}, "axes=None must be a tuple of the names of axes"),
        ({"data_parallelism_axes": (1,)}, r"axes=\(1,\) must be a tuple of the names of axes"),
        ({"use_pre_softmax": "false"}, "use_pre_softmax must be a bool. Got use_pre_sof.*'false'"),
        ({"use_pre_softmax": None}, "use_pre_softmax must be a bool"),
        ({"apply_topk_weights_early": 1}, "apply_topk_weights_early must be a bool"),
        ({"apply_weight_on_input": "no"}, "apply_weight_on_input must be a bool"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob must be a bool or None. Got norm.*'false'"),
        ({"quantizer_sets": 3}, "quantizer_sets must be None or a tuple of sets without"),
        ({"num_experts": "8"}, "num_experts must be a Python int"),
        ({"num_experts_per_tok": 2.0}, "num_experts_per_tok must be a Python int"),
        ({"gate_kernel": np.zeros((H, E), np.int32)}, "gate_kernel.dtype=i32 must be"),
    ],
)
def test_arguments_of_another_kind(change, message):
    given = example() | {"num_experts": E, "num_experts_per_tok": 2} | change
    with pytest.raises(TypeError, match=message):
        moe(**given)
