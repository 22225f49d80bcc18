"""Folders in the layouts of further families, against a dense layer in NumPy."""

import dataclasses
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import inspect
from jaxmoe._load import families
from tests.test_load import Draw, save_folder

E, H, I, T, K = 8, 32, 16, 5, 3  # noqa: E741
PROJ = ("experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj")
W123 = ("experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2")
JOINED = ("experts.gate_up_proj", "experts.down_proj")
SPARSE = "model.layers.{l}.block_sparse_moe."
V3_BIAS, M2_BIAS = "gate.e_score_correction_bias", "e_score_correction_bias"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


def largest(key, k):
    """1 for the k largest of each row, the first of equals, else 0."""
    out = np.zeros_like(key)
    np.put_along_axis(out, np.argsort(-key, axis=1, kind="stable")[:, :k], 1.0, axis=1)
    return out


# Routing rules: from logits and bias to the weight [T, E] of each expert, 0 where it is not chosen.
def by_sigmoid(groups=1, top=1, scale=1.0, norm=True, eps=1e-20, masked=-np.inf):
    def rule(logits, bias):
        score = sigmoid(logits)
        key = (score + bias).reshape(T, groups, -1)
        worth = np.sort(key, axis=2)[:, :, -2:].sum(2)
        key = np.where(largest(worth, top)[:, :, None] > 0, key, masked).reshape(T, E)
        weights = score * largest(key, K)
        return scale * (weights / (weights.sum(1, keepdims=True) + eps) if norm else weights)

    return rule


def by_softmax(norm=True, scale=1.0, groups=1, top=1):
    def rule(logits, bias):
        key = (softmax(logits) + bias).reshape(T, groups, -1)
        worth = np.sort(key, axis=2)[:, :, -2:].sum(2)
        key = np.where(largest(worth, top)[:, :, None] > 0, key, -np.inf).reshape(T, E)
        weights = softmax(logits) * largest(key, K)
        return scale * (weights / weights.sum(1, keepdims=True) if norm else weights)

    return rule


def by_logit(norm=True):
    """Chosen by logit, weighted by sigmoid. Logits are large, so sigmoids of several would tie."""

    def rule(logits, bias):
        weights = sigmoid(logits) * largest(logits + bias, K)
        return weights / weights.sum(1, keepdims=True) if norm else weights

    return rule


# Activations of gate and up; None: of up alone.
def silu(gate, up):
    return gate * sigmoid(gate) * up


def step(gate, up):
    return np.minimum(gate * sigmoid(gate), 0.5) * np.clip(up, -0.5, 0.5)


def clamped(gate, up):
    return silu(np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7))


def swiglu_oai(gate, up):
    gate, up = np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7)
    return gate * sigmoid(1.7 * gate) * (up + 1)


def situ(gate, up):
    return 4 * np.tanh(gate / 4) * sigmoid(gate) * 25 * np.tanh(up / 25)


def relu2(up):
    return np.maximum(up, 0) ** 2


@dataclasses.dataclass(frozen=True)
class Model:
    """A family: configuration, rule and activation, and the names that its files have."""

    config: dict
    rule: Callable
    act: Callable = silu
    at: str = "model.layers.{l}.mlp."
    weights: tuple = PROJ
    router: str = "gate"
    bias: str = ""
    bias_shape: tuple = (E,)
    shift: float = 0.0
    layout: str = "nk"
    inner: int = H
    latent: tuple = ()
    order: str = "gate_up"
    biased: bool = False
    kind: str = ""
    number: int = 1


COUNTS = {"num_experts": E, "num_experts_per_tok": K}
LOCAL = {"num_local_experts": E, "num_experts_per_tok": K}
V3 = {"n_routed_experts": E, "num_experts_per_tok": K, "n_group": 4, "topk_group": 2}
V3 |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
V3_RULE = by_sigmoid(4, 2, 2.5)
DEEPSEEK = Model(V3, V3_RULE, bias=V3_BIAS)
KIMI = {"num_experts": E, "num_experts_per_token": K, "num_expert_group": 4, "topk_group": 2}
KIMI |= {"routed_scaling_factor": 2.5, "moe_renormalize": True, "use_grouped_topk": True}
KIMI |= {"moe_router_activation_func": "sigmoid"}
K3 = {**KIMI, "hidden_act": "situ", "activation_situ_beta": 4.0, "rms_norm_eps": 1e-5}
K3 |= {"activation_situ_linear_beta": 25.0, "routed_expert_hidden_size": 24}
LATENT = ("routed_expert_down_proj", "routed_expert_up_proj")
NEMOTRON = Model(
    *({**V3, "mlp_hidden_act": "relu2"}, V3_RULE, relu2, "backbone.layers.{l}.mixer."),
    *(PROJ[1:], "gate", V3_BIAS),
)
BAILING = {**V3, "num_experts": E, "n_routed_experts": None, "score_function": "sigmoid"}
BAILING |= {"moe_router_enable_expert_bias": True, "router_dtype": "fp32"}
STEP = {"moe_num_experts": E, "moe_top_k": K, "moe_router_activation": "sigmoid"}
STEP |= {"moe_router_scaling_factor": 3.0, "use_moe_router_bias": True, "norm_expert_weight": True}
STEP |= {"swiglu_limits": [0.0, 0.0, 0.5, None], "hidden_act": "silu"}
STACKED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
STEP_3 = Model(
    *(STEP, by_sigmoid(scale=3.0), silu, "model.layers.{l}.moe.", STACKED), bias="router_bias"
)
M3 = {**LOCAL, "routed_scaling_factor": 2.0, "hidden_act": "swigluoai", "swiglu_alpha": 1.7}
M3 |= {"swiglu_limit": 0.7, "use_routing_bias": True}
LAGUNA = {**COUNTS, "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 0.0}
ERNIE_BIAS = "moe_statics.e_score_correction_bias"
INSIDE = "model.language_model.layers.{l}.mlp."

M4 = {"n_routed_experts": E, "num_experts_per_tok": K, "routed_scaling_factor": 1.5}
COHERE = {**COUNTS, "expert_selection_fn": "sigmoid", "norm_topk_prob": True}
KOLIBRI = Model({**LOCAL, "norm_topk_prob": False}, by_logit(False), bias="^moe.router.expert_bias")
FILTER = {**LOCAL, "swiglu_alpha": 1.7, "swiglu_limit": 0.7}

MODELS = {
    "axk1": DEEPSEEK,
    # Its keys are negative, so that those of other groups, 0, win over them.
    "axk2": dataclasses.replace(DEEPSEEK, rule=by_sigmoid(4, 2, 2.5, masked=0.0), shift=-0.9),
    "axk2, light": dataclasses.replace(
        DEEPSEEK, config={**V3, "n_group": None, "topk_group": None}, rule=by_sigmoid(scale=2.5)
    ),
    "hy_v4": dataclasses.replace(
        DEEPSEEK, config={**V3, "swiglu_limit": 0.7}, act=clamped, weights=JOINED
    ),
    "flint": Model({**COUNTS, "norm_topk_prob": True}, by_sigmoid()),
    "flint, raw": Model({**COUNTS, "norm_topk_prob": False}, by_sigmoid(norm=False)),
    "cohere2_moe": Model(COHERE, by_logit()),
    "cohere2_moe, raw": Model({**COHERE, "norm_topk_prob": False}, by_logit(False)),
    "cohere2_moe, softmax": Model({**COHERE, "expert_selection_fn": "softmax"}, by_softmax()),
    "kolibri1": KOLIBRI,
    "kolibri1, normed": dataclasses.replace(
        KOLIBRI, config={**LOCAL, "norm_topk_prob": True}, rule=by_logit()
    ),
    "mistral4": Model({**M4, "n_group": 1, "topk_group": 1}, by_softmax(scale=1.5), weights=JOINED),
    "mistral4, groups": Model(
        {**M4, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        by_softmax(False, 1.5, 4, 2),
        weights=JOINED,
    ),
    "mistral_large4": Model(
        *({**M4, "n_group": 4, "topk_group": 2}, by_softmax(True, 1.5, 4, 2), silu, "layers.{l}."),
        W123,
    ),
    "inkling2": Model(
        {**M4, "route_scale": 2.0, "routed_scaling_factor": None}
        | {"mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0},
        *(by_sigmoid(scale=2.0), situ, "model.llm.layers.{l}.mlp."),
        ("experts.w13_weight", "experts.w2_weight"),
        bias="gate.bias",
        order="interleaved",
    ),
    "openai_privacy_filter": Model(
        *(FILTER, by_softmax(), swiglu_oai, "layers.{l}.mlp.", JOINED, "router"),
        layout="kn",
        biased=True,
    ),
    "aria": Model(
        {"moe_num_experts": E, "moe_topk": K},
        *(by_softmax(), silu, INSIDE, ("experts.fc1.weight", "experts.fc2.weight"), "router"),
        layout="kn",
    ),
    "qwen4_exp": Model(COUNTS, by_softmax(), at=INSIDE, weights=JOINED),
    "qwen4_exp, each": Model(COUNTS, by_softmax(), at=INSIDE),
    "granitemoe_swa": Model(LOCAL, by_softmax(), silu, SPARSE, JOINED, "router"),
    "nemotron_h": NEMOTRON,
    "nemotron_h, latent": dataclasses.replace(
        NEMOTRON,
        config={**NEMOTRON.config, "moe_latent_size": 24},
        inner=24,
        latent=("fc1_latent_proj", "fc2_latent_proj"),
    ),
    "glm4v_moe": dataclasses.replace(DEEPSEEK, at=INSIDE),
    "mimo_v2_flash": dataclasses.replace(
        DEEPSEEK, config={**V3, "routed_scaling_factor": None}, rule=by_sigmoid(4, 2)
    ),
    "glm5_next": dataclasses.replace(
        DEEPSEEK, config={**V3, "swiglu_limit": 0.7}, act=clamped, at=INSIDE
    ),
    "exaone_moe": dataclasses.replace(DEEPSEEK, bias=M2_BIAS),
    "bailing_moe": Model(BAILING, V3_RULE, bias="gate.expert_bias"),
    "bailing_hybrid": Model({**BAILING, "norm_topk_prob": None}, V3_RULE, bias="gate.expert_bias"),
    "bailing_moe, the first": Model({**COUNTS, "norm_topk_prob": True}, by_softmax()),
    "afmoe": Model(
        {**COUNTS, "route_scale": 2.8, "score_func": "sigmoid", "route_norm": True, "n_group": 1},
        *(by_sigmoid(scale=2.8), silu, "model.layers.{l}.mlp.", PROJ, "router.gate", "expert_bias"),
    ),
    "hy_v3": Model(
        {**COUNTS, "router_scaling_factor": 2.8, "route_norm": True},
        *(by_sigmoid(scale=2.8), silu, "model.layers.{l}.mlp.", PROJ, "router.gate", "expert_bias"),
    ),
    "lfm2_moe": Model(
        {**COUNTS, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.5},
        *(by_sigmoid(scale=1.5, eps=1e-6), silu, "model.layers.{l}.feed_forward.", W123),
        bias="expert_bias",
    ),
    "kimi_linear": Model(KIMI, V3_RULE, silu, SPARSE, W123, bias=V3_BIAS),
    "kimi_k3": Model(
        *(K3, V3_RULE, situ, f"language_model.{SPARSE}", W123),
        bias=V3_BIAS,
        inner=24,
        latent=LATENT,
    ),
    "kimi_k3, with a norm": Model(
        *({**K3, "latent_moe_use_norm": True}, V3_RULE, situ, f"language_model.{SPARSE}", W123),
        **{"bias": V3_BIAS, "inner": 24, "latent": (*LATENT, "routed_expert_norm")},
    ),
    "minimax_m3_vl": Model(
        *(M3, by_sigmoid(scale=2.0), swiglu_oai, f"language_model.{SPARSE}", W123), bias=M2_BIAS
    ),
    "laguna": Model(LAGUNA, by_sigmoid(scale=2.5), bias=f"experts.{M2_BIAS}"),
    "step3p5": STEP_3,
    "step3p7": dataclasses.replace(STEP_3, act=step, number=2),
    "ernie4_5_moe": Model(
        {"moe_num_experts": E, "moe_k": K, "moe_gate_act": "softmax", "moe_use_aux_free": True},
        by_softmax(),
        **{"bias": ERNIE_BIAS, "bias_shape": (1, E)},
    ),
    "hunyuan_v1_moe": Model(
        {"num_experts": E, "moe_topk": [1, K, 1]}, by_softmax(), router="gate.wg"
    ),
    "qwen3_5_moe": Model(COUNTS, by_softmax(), at=INSIDE, weights=JOINED),
    "qwen3_5_moe, each": Model(COUNTS, by_softmax(), at=INSIDE),
    "qwen3_vl_moe": Model(COUNTS, by_softmax(), at=INSIDE, weights=JOINED, layout="kn"),
    "qwen3_vl_moe, each": Model(COUNTS, by_softmax(), at=INSIDE),
    "jamba": Model(
        *(COUNTS, by_softmax(False), silu, "model.layers.{l}.feed_forward.", PROJ, "router")
    ),
    "granitemoe": Model(
        *(LOCAL, by_softmax(), silu, SPARSE, ("input_linear.weight", "output_linear.weight")),
        router="router.layer",
    ),
}
# Those that have the row of another, whose folder is above or in tests/test_load.py.
SAME = {
    "mixtral": ("minimax", "minimax_m1", "minimax_text_01"),
    "granitemoe": ("granitemoehybrid", "granitemoeshared"),
    "deepseek_v3": ("deepseek_v32", "glm4_moe_lite", "glm4v_moe", "solar_open", "beam", "axk1")
    + ("dots3_note",),
    "bailing_moe": ("bailing_moe_v2",),
    "qwen3_next": ("mellum",),
    "qwen4_exp": ("lara_mini",),
    "deepseek_v2": ("deepseek_ocr2", "unlimited_ocr"),
    "hy_v4": ("hy_v4_vl",),
    "olmoe": ("flex_olmo",),
    "step3p5": ("step3p7",),
    "kimi_linear": ("kimi_k3",),
    "inkling2": ("inkling2_loop",),
    "gemma4": ("diffusion_gemma",),
    "inkling_mm_model": ("inkling",),
    "ernie4_5_vl_moe": ("ernie4_5_moe_vl",),
}


def files_of(model, gate, up, down):
    """The tensors of the weights [E, I, L], [E, I, L] and [E, L, I], as the files have them."""
    both = np.concatenate([gate, up], 1)
    if model.order == "interleaved":
        both = np.stack([gate, up], 2).reshape(both.shape)
    arrays = [gate, up, down] if len(model.weights) == 3 else [both, down]
    if model.act is relu2:
        arrays = [up, down]
    if "{e}" in model.weights[0]:
        return {
            f"{stem.format(e=e)}.weight": array[e]
            for stem, array in zip(model.weights, arrays, strict=True)
            for e in range(E)
        }
    if model.layout == "kn":
        arrays = [array.swapaxes(1, 2) for array in arrays]
    return dict(zip(model.weights, arrays, strict=True))


def folder(tmp_path, name, seed=0):
    """Writes a model of one layer; returns the folder, and what it computes of tokens."""
    kind, model, draw = name.split(",")[0], MODELS[name], Draw(seed)
    small = lambda *shape: (draw.normal(*shape) / 4).astype(np.float32)  # noqa: E731
    gate, up, down = small(E, I, model.inner), small(E, I, model.inner), small(E, model.inner, I)
    router, bias = (
        4 * small(E, H),
        small(E) + np.float32(model.shift) if model.bias else np.zeros(E, np.float32),
    )
    around = [small(model.inner, H), small(H, model.inner), 1 + small(model.inner)]
    at = model.at.format(l=model.number)
    tensors = files_of(model, gate, up, down) | {f"{model.router}.weight": router}
    biases = np.zeros((2, E, I), np.float32), np.zeros((E, model.inner), np.float32)
    of_logits = np.zeros(E, np.float32)
    if model.biased:
        biases, of_logits = (small(2, E, I), small(E, model.inner)), small(E)
        tensors |= {
            f"{model.weights[0]}_bias": np.concatenate(biases[0], 1),
            f"{model.weights[1]}_bias": biases[1],
            f"{model.router}.bias": of_logits,
        }
    outside = {}
    if model.bias[:1] == "^":  # of the layer, not of the module
        outside[at.removesuffix("mlp.") + model.bias[1:]] = bias
    elif model.bias:
        tensors[model.bias] = bias.reshape(model.bias_shape)
    tensors |= {f"{stem}.weight": array for stem, array in zip(model.latent, around, strict=False)}
    config = {"model_type": kind, "num_hidden_layers": 4}
    text = {k: v for k, v in model.config.items() if v is not None}
    inside = "language_model" in at
    config |= {"text_config": {"model_type": f"{kind}_text", **text}} if inside else text
    tensors = outside | {at + name: array for name, array in tensors.items()}
    path = save_folder(tmp_path / "model", config, tensors)

    def layer(x):
        weights = model.rule(x @ router.T + of_logits, bias)
        z = x @ around[0].T if model.latent else x
        y = 0
        for e in range(E):
            first = [z @ w[e].T + b[e] for w, b in zip((gate, up), biases[0], strict=True)]
            h = model.act(*first[model.act is relu2 :])
            y = y + weights[:, e : e + 1] * (h @ down[e].T + biases[1][e])
        if len(model.latent) == 3:
            y = y / np.sqrt(np.mean(y**2, 1, keepdims=True) + 1e-5) * around[2]
        return weights, y @ around[1].T if model.latent else y

    return path, layer


def changed(path, **settings):
    """Writes the configuration anew."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **settings}))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_computes_what_its_family_does(name, tmp_path):
    path, oracle = folder(tmp_path, name)
    ((number, layer),) = jaxmoe.load(path).items()
    assert number == MODELS[name].number
    x = np.random.default_rng(1).normal(size=(T, H)).astype(np.float32)
    weights, y = oracle(x.astype(np.float64))
    routing = layer.route(x)
    got = np.zeros((T, E))
    np.put_along_axis(got, np.asarray(routing.expert_ids), np.asarray(routing.weights), 1)
    np.testing.assert_allclose(got, weights, rtol=1e-5, atol=1e-6)
    residual = x[:, ::-1]
    mine = layer(jnp.asarray(x), residual=jnp.asarray(residual))
    np.testing.assert_allclose(mine, y + residual, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_a_family_with_the_row_of_another():
    for one, others in SAME.items():
        for other in others:
            assert families.FAMILIES[other] is families.FAMILIES[one]


REFUSED = (
    ("nemotron_h", {"mlp_hidden_act": "silu"}),
    ("nemotron_h", {"scoring_func": "softmax"}),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}),
    ("kimi_linear", {"use_grouped_topk": False}),
    ("bailing_moe", {"score_function": "softmax"}),
    ("bailing_moe", {"router_type": "MultiRouter"}),
    ("bailing_moe, the first", {"n_group": 8}),
    ("afmoe", {"score_func": "softmax"}),
    ("afmoe", {"n_group": 2}),
    ("hy_v3", {"route_norm": False}),
    ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}),
    ("laguna", {"moe_router_score_func": "sqrtsoftplus"}),
    ("laguna", {"moe_router_logit_softcapping": 30.0}),
    ("step3p5", {"norm_expert_weight": False}),
    ("cohere2_moe", {"expert_selection_fn": "sparsemax"}),
    ("flint", {"scoring_func": "softmax"}),
    ("kolibri1", {"scoring_func": "softmax"}),
    ("mistral4", {"scoring_func": "sigmoid"}),
    ("mistral_large4", {"norm_topk_prob": False}),
    ("axk2, light", {"topk_group": 2}),
    ("inkling2", {"scoring_func": "softmax"}),
)


@pytest.mark.parametrize(("name", "change"), REFUSED)
def test_a_rule_that_a_family_does_not_have_is_named(name, change, tmp_path):
    ((setting, value),) = change.items()
    path, _ = folder(tmp_path, name)
    with pytest.raises(NotImplementedError, match=f"has {setting}={value!r}, which must be"):
        jaxmoe.load(changed(path, **change))


@pytest.mark.parametrize("name", [n for n in MODELS if MODELS[n].bias and "," not in n])
def test_the_bias_of_the_choice_is_needed(name, tmp_path):
    path, _ = folder(tmp_path, name)
    file = path / "model.safetensors"
    bias = MODELS[name].bias.removeprefix("^").encode()
    file.write_bytes(file.read_bytes().replace(bias, bias[:-1] + b"_"))
    with pytest.raises((LookupError, NotImplementedError), match=r"no tensor|has no reader"):
        jaxmoe.load(path)


def test_a_list_needs_a_value_for_each_layer(tmp_path, capsys):
    path, _ = folder(tmp_path, "hunyuan_v1_moe")
    assert dict(jaxmoe.load(path)[1].options)["top_k"] == K
    assert inspect.main([str(path)]) == 0
    message = "moe_topk of config.json has 1 values, none for layer 1"
    with pytest.raises(ValueError, match=message):
        jaxmoe.load(changed(path, moe_topk=[3]))
    assert inspect.main([str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ("ernie4_5_moe", "kimi_k3, with a norm"))
def test_programs_with_such_layers_are_saved(name, tmp_path):
    """Their rule and their products are parts of a pytree that a file can describe."""
    path, _ = folder(tmp_path, name)
    (layer,) = jaxmoe.load(path).values()
    x = jnp.ones((T, H))
    program = jax.jit(lambda layer, x: layer(x))
    saved = jax.export.export(program)(layer, x).serialize()
    got = jax.export.deserialize(saved).call(layer, x)
    np.testing.assert_array_equal(got, program(layer, x))
