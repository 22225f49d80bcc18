"""Layers that are more than a router and experts, and models that have several kinds of them."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import inspect
from jaxmoe._load import families
from tests.test_load import Draw, save_folder
from tests.test_load_families import largest, sigmoid, silu, softmax

E, H, I, T, K = 8, 32, 16, 6, 3  # noqa: E741
AT = "model.layers.1."
PROJ = ("gate_proj", "up_proj", "down_proj")


def relu(up):
    return np.maximum(up, 0)


def normed(x):
    return x / np.sqrt(np.mean(x**2, 1, keepdims=True) + 1e-6)


def top(logits, k=K):
    return softmax(np.where(largest(logits, k) > 0, logits, -np.inf))


@dataclasses.dataclass
class Layer:
    """A layer's arrays, and what it computes of tokens [T, H] in NumPy."""

    seed: int = 0
    num_experts: int = E
    rows: int = E

    def __post_init__(self):
        draw = Draw(self.seed)
        small = lambda *shape: (draw.normal(*shape) / 4).astype(np.float32)  # noqa: E731
        e = self.num_experts
        self.gate, self.up, self.down = small(e, I, H), small(e, I, H), small(e, H, I)
        self.router, self.bias = 4 * small(self.rows, H), small(self.rows)
        self.vectors, self.scales = 1 + small(4, H), 1 + small(e)
        self.biases = small(e, I), small(e, H)

    def logits(self, x):
        return x @ self.router.T

    def experts(self, x, weights, act=silu, bias=False):
        y = 0
        for e in range(self.num_experts):
            first = [x @ w[e].T for w in ((self.up,) if act is relu else (self.gate, self.up))]
            h = act(*(z + self.biases[0][e] * bias for z in first))
            y = y + weights[:, e : e + 1] * (h @ self.down[e].T + self.biases[1][e] * bias)
        return y

    def each(self, at, names=PROJ, first=0):
        """The tensors of experts one by one."""
        arrays = (self.gate, self.up, self.down)[-len(names) :]
        return {
            f"{at.format(e=first + e)}{name}.weight": array[e]
            for name, array in zip(names, arrays, strict=True)
            for e in range(self.num_experts)
        }

    @property
    def gate_up(self):
        return np.concatenate([self.gate, self.up], 1)


def phimoe(_):
    layer, at = Layer(), f"{AT}block_sparse_moe."
    jitter = 0.3

    def y(x):
        logits, weights = layer.logits(x), np.zeros((T, E))
        for t, row in enumerate(logits):
            left = row.copy()
            for _ in range(2):
                e = left.argmax()
                far = (left[e] - row) / np.maximum(abs(row), left[e]) > 2 * jitter
                near = np.where(far, -np.inf, left)
                weights[t, e] = np.exp(left[e]) / np.exp(near).sum()
                left[e] = -np.inf
        return layer.experts(x, weights)

    config = {"num_local_experts": E, "num_experts_per_tok": 2, "router_jitter_noise": jitter}
    tensors = layer.each(at + "experts.{e}.", ("w1", "w3", "w2"))
    return config, {**tensors, f"{at}gate.weight": layer.router}, y


def dbrx(_):
    layer, at = Layer(), "transformer.blocks.1.ffn."
    ffn = {"moe_num_experts": E, "moe_top_k": K, "moe_normalize_expert_weights": 1.0}
    ffn |= {"ffn_act_fn": {"name": "silu"}, "model_type": ""}
    arrays = {"w1": layer.gate, "v1": layer.up, "w2": layer.down.swapaxes(1, 2)}
    tensors = {f"{at}experts.mlp.{n}": a.reshape(-1, H) for n, a in arrays.items()}
    tensors[f"{at}router.layer.weight"] = layer.router
    return {"ffn_config": ffn}, tensors, lambda x: layer.experts(x, top(layer.logits(x)))


def jetmoe(_):
    layer, at = Layer(), f"{AT}mlp."
    tensors = {"input_linear": layer.gate_up, "output_linear": layer.down}
    tensors = {f"{at}{n}.weight": a for n, a in {**tensors, "router.layer": layer.router}.items()}
    tensors[f"{at}bias"] = layer.vectors[0]
    config = {"num_local_experts": E, "num_experts_per_tok": K, "activation_function": "silu"}
    y = lambda x: layer.experts(x, top(layer.logits(x))) + layer.vectors[0]  # noqa: E731
    return config, tensors, y


def gelu(gate, up):
    return gate * sigmoid(2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)) * up


def gemma4(_):
    layer, at = Layer(), "model.language_model.layers.1."
    norm, scale, _, _ = layer.vectors
    tensors = {
        "experts.gate_up_proj": layer.gate_up,
        "experts.down_proj": layer.down,
        "router.proj.weight": layer.router,
        "router.scale": scale,
        "router.per_expert_scale": layer.scales,
        "pre_feedforward_layernorm_2.weight": norm,
    }
    text = {"model_type": "gemma4_text", "num_experts": E, "top_k_experts": K, "rms_norm_eps": 1e-6}

    def y(x):
        weights = top(layer.logits(normed(x) * scale / np.sqrt(H))) * layer.scales
        return layer.experts(normed(x) * norm, weights, gelu)

    return {"text_config": text}, {at + n: a for n, a in tensors.items()}, y


def longcat_flash(_):
    copies = 4
    layer, at = Layer(rows=E + copies), f"{AT}mlp."
    tensors = layer.each(at + "experts.{e}.")
    # transformers writes weights of those, too, that have none.
    tensors |= {f"{at}experts.{E}.{n}.weight": layer.gate[0] for n in PROJ[:2]}
    tensors |= {f"{at}router.classifier.weight": layer.router}
    tensors |= {f"{at}router.e_score_correction_bias": layer.bias}
    config = {"n_routed_experts": E, "moe_topk": K, "routed_scaling_factor": 1.5}
    config |= {"zero_expert_num": copies, "zero_expert_type": "identity"}

    def y(x):
        score = softmax(layer.logits(x))
        weights = 1.5 * score * largest(score + layer.bias, K)
        return layer.experts(x, weights) + weights[:, E:].sum(1, keepdims=True) * x

    return config, tensors, y


def inkling_mm_model(_):
    shared = 2
    layer, at = Layer(rows=E + shared), "model.llm.layers.1.mlp."
    tensors = {
        "experts.w13_weight": np.stack([layer.gate, layer.up], 2).reshape(E, 2 * I, H),
        "experts.w2_weight": layer.down,
        "gate.weight": layer.router,
        "gate.bias": layer.bias[:E],
        "gate.global_scale": np.full(1, 0.7, np.float32),
    }
    text = {"model_type": "inkling_text", "n_routed_experts": E, "num_experts_per_tok": K}
    text |= {"n_shared_experts": shared, "route_scale": 2.0}

    def y(x):
        score = sigmoid(layer.logits(x))
        routed = score[:, :E] * largest(score[:, :E] + layer.bias[:E], K)
        total = routed.sum(1, keepdims=True) + score[:, E:].sum(1, keepdims=True)
        return layer.experts(x, 1.4 * routed / total)

    return {"text_config": text}, {at + n: a for n, a in tensors.items()}, y


def qwen3_omni_moe(tower):
    made = {}
    for seed, name in enumerate(("thinker", "talker")):
        layer, at = Layer(seed), f"{name}.model.layers.1.mlp."
        tensors = layer.each(at + "experts.{e}.") | {f"{at}gate.weight": layer.router}
        made[name] = layer, tensors
    text = {"num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": True}
    config = {f"{name}_config": {"text_config": text} for name in made}
    layer = made[tower][0]
    y = lambda x: layer.experts(x, top(layer.logits(x)))  # noqa: E731
    return config, made["thinker"][1] | made["talker"][1], y


def ernie4_5_vl_moe(tower):
    layers, at = {"text": Layer(0), "vision": Layer(1)}, f"{AT}mlp."
    text, vision = layers.values()
    tensors = text.each(at + "experts.{e}.") | vision.each(at + "experts.{e}.", first=E)
    biases = np.stack([text.bias, vision.bias])
    tensors |= {f"{at}moe_statics.e_score_correction_bias": biases}
    tensors |= {f"{at}gate.weight": text.router.T, f"{at}gate.weight_1": vision.router.T}
    layer = layers[tower]

    def y(x):
        score = softmax(layer.logits(x))
        weights = score * largest(score + layer.bias, K)
        return layer.experts(x, weights / weights.sum(1, keepdims=True))

    config = {"moe_num_experts": [E, E], "moe_k": K, "moe_intermediate_size": [I, I]}
    return config, tensors, y


def switch_transformers(tower):
    layer, tensors = Layer(), {}
    for name, number in (("encoder", 1), ("decoder", 2)):
        layer, at = Layer(number), f"{name}.block.1.layer.{number}.mlp."
        tensors |= layer.each(at + "experts.expert_{e}.", ("wi", "wo"))
        tensors |= {f"{at}router.classifier.weight": layer.router}
    layer = Layer(1 if tower == "encoder" else 2)

    def y(x):
        score = softmax(layer.logits(x))
        chosen = largest(score, 1)
        return layer.experts(x, score * chosen * (chosen.cumsum(0) <= 1), relu)

    return {"num_experts": E, "expert_capacity": 1, "dense_act_fn": "relu"}, tensors, y


def nllb_moe(tower):
    layer, tensors = Layer(), {}
    for seed, name in enumerate(("encoder", "decoder")):
        layer, at = Layer(seed), f"model.{name}.layers.1.ffn."
        tensors |= layer.each(at + "experts.expert_{e}.", ("fc1", "fc2"))
        for part, biases in zip(("fc1", "fc2"), layer.biases, strict=True):
            tensors |= {f"{at}experts.expert_{e}.{part}.bias": biases[e] for e in range(E)}
        tensors |= {f"{at}router.classifier.weight": layer.router}
    layer = Layer(("encoder", "decoder").index(tower))
    y = lambda x: layer.experts(x, 0.8 * top(layer.logits(x), 2), relu, bias=True)  # noqa: E731
    return {"num_experts": E, "moe_token_dropout": 0.2}, tensors, y


TOWERS: dict[Any, tuple[str, ...]] = {
    qwen3_omni_moe: ("thinker", "talker"),
    ernie4_5_vl_moe: ("text", "vision"),
    switch_transformers: ("encoder", "decoder"),
    nllb_moe: ("encoder", "decoder"),
}
ALONE = (phimoe, dbrx, jetmoe, gemma4, longcat_flash, inkling_mm_model)
CASES = [*((kind, None) for kind in ALONE), *((k, t) for k, ts in TOWERS.items() for t in ts)]


def kind_of(made):
    return "nllb-moe" if made is nllb_moe else made.__name__


def folder(path, made, tower, change=None, drop=(), add=None):
    """Writes a model of one layer; returns the folder, and what the layer computes."""
    config, tensors, y = made(tower)
    config = {"model_type": kind_of(made), **config, **(change or {})}
    kept = {name: array for name, array in tensors.items() if name not in drop}
    return save_folder(path / "model", config, kept | (add or {})), y


@pytest.mark.parametrize(("made", "tower"), CASES)
def test_a_layer_computes_what_its_model_does(made, tower, tmp_path):
    path, y = folder(tmp_path, made, tower)
    ((number, layer),) = jaxmoe.load(path, tower=tower).items()
    assert number == 1
    x = np.random.default_rng(2).normal(size=(T, H)).astype(np.float32)
    want, residual = y(x.astype(np.float64)), x[:, ::-1]
    got = layer(jnp.asarray(x), residual=jnp.asarray(residual))
    np.testing.assert_allclose(got, want + residual, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    several = layer(jnp.asarray(x)[None])[0]
    np.testing.assert_allclose(several, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("made", "tower"), [(m, t) for m, t in CASES if t in (None, "decoder")])
def test_layers_on_a_mesh_and_in_a_saved_program(made, tower, tmp_path):
    path, _ = folder(tmp_path, made, tower)
    mesh = jax.make_mesh((4,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = jaxmoe.load(path, tower=tower)[1]
    spread = jaxmoe.load(path, tower=tower, mesh=mesh, axis="e")[1]
    jax.tree.map(np.testing.assert_array_equal, spread, layer)
    x = jnp.ones((T, H))
    program = jax.jit(lambda layer, x: layer(x))
    saved = jax.export.export(program)(layer, x).serialize()
    got = jax.export.deserialize(saved).call(layer, x)
    np.testing.assert_array_equal(got, program(layer, x))


@pytest.mark.parametrize("made", TOWERS)
def test_a_tower_is_named(made, tmp_path, capsys):
    path, _ = folder(tmp_path, made, TOWERS[made][0])
    one, other = TOWERS[made]
    for name in (None, "tower"):
        message = f"tower={name!r} must be '{one}' or '{other}' for model_type='{kind_of(made)}'"
        with pytest.raises(ValueError, match=message):
            jaxmoe.load(path, tower=name)
    assert inspect.main([str(path)]) == 1
    assert "tower=None must be" in capsys.readouterr().err
    assert inspect.main([str(path), "--tower", other]) == 0
    assert "1 layers with experts" in capsys.readouterr().out


def test_a_model_of_one_tower_has_no_name_for_it(tmp_path):
    path, _ = folder(tmp_path, phimoe, None)
    with pytest.raises(ValueError, match="tower='text' must be None for model_type='phimoe'"):
        jaxmoe.load(path, tower="text")


MISSING = (
    (jetmoe, None, f"{AT}mlp.bias"),
    (gemma4, None, "model.language_model.layers.1.router.scale"),
    (gemma4, None, "model.language_model.layers.1.router.per_expert_scale"),
    (gemma4, None, "model.language_model.layers.1.pre_feedforward_layernorm_2.weight"),
    (longcat_flash, None, f"{AT}mlp.router.e_score_correction_bias"),
    (longcat_flash, None, f"{AT}mlp.experts.7.gate_proj.weight"),
    (inkling_mm_model, None, "model.llm.layers.1.mlp.gate.global_scale"),
    (dbrx, None, "transformer.blocks.1.ffn.experts.mlp.v1"),
    (ernie4_5_vl_moe, "vision", f"{AT}mlp.gate.weight_1"),
    (ernie4_5_vl_moe, "vision", f"{AT}mlp.experts.15.up_proj.weight"),
    (ernie4_5_vl_moe, "text", f"{AT}mlp.experts.15.up_proj.weight"),
    (qwen3_omni_moe, "talker", "talker.model.layers.1.mlp.gate.weight"),
)


@pytest.mark.parametrize(("made", "tower", "name"), MISSING)
def test_a_missing_tensor_is_named(made, tower, name, tmp_path):
    path, _ = folder(tmp_path, made, tower, drop=(name,))
    with pytest.raises(LookupError, match=f"has no tensor '{name}"):
        jaxmoe.load(path, tower=tower)


def test_a_missing_bias_of_an_expert_is_named(tmp_path):
    at = "model.decoder.layers.1.ffn.experts.expert_"
    path, _ = folder(tmp_path, nllb_moe, "decoder", drop=(f"{at}3.fc1.bias",))
    with pytest.raises(ValueError, match=f"a tensor {at}0.fc1.bias and no {at}3.fc1.bias"):
        jaxmoe.load(path, tower="decoder")
    drop = [f"{at}{e}.fc2.bias" for e in range(E)]
    path, _ = folder(tmp_path, nllb_moe, "decoder", drop=drop)
    with pytest.raises(LookupError, match=f"has no tensor '{at}0.fc2.bias'"):
        jaxmoe.load(path, tower="decoder")


WRONG = (
    (jetmoe, None, f"{AT}mlp.bias", (H - 1,)),
    (gemma4, None, "model.language_model.layers.1.router.scale", (H - 1,)),
    (gemma4, None, "model.language_model.layers.1.router.per_expert_scale", (E + 1,)),
    (gemma4, None, "model.language_model.layers.1.pre_feedforward_layernorm_2.weight", (1,)),
    (longcat_flash, None, f"{AT}mlp.router.e_score_correction_bias", (E,)),
    (longcat_flash, None, f"{AT}mlp.router.classifier.weight", (E, H)),
    (longcat_flash, None, f"{AT}mlp.experts.12.up_proj.weight", (I, H)),
    (inkling_mm_model, None, "model.llm.layers.1.mlp.gate.global_scale", (2,)),
    (inkling_mm_model, None, "model.llm.layers.1.mlp.gate.weight", (E, H)),
    (dbrx, None, "transformer.blocks.1.ffn.experts.mlp.w1", (E * I + 1, H)),
    (dbrx, None, "transformer.blocks.1.ffn.experts.mlp.w1", (E, I, H)),
    (ernie4_5_vl_moe, "text", f"{AT}mlp.gate.weight", (E, H)),
    (ernie4_5_vl_moe, "text", f"{AT}mlp.moe_statics.e_score_correction_bias", (1, E)),
    (ernie4_5_vl_moe, "vision", f"{AT}mlp.experts.16.up_proj.weight", (I, H)),
    (nllb_moe, "encoder", "model.encoder.layers.1.ffn.experts.expert_2.fc1.bias", (I + 1,)),
)


@pytest.mark.parametrize(("made", "tower", "name", "shape"), WRONG)
def test_a_tensor_of_another_shape_is_named(made, tower, name, shape, tmp_path):
    path, _ = folder(tmp_path, made, tower, add={name: np.ones(shape, np.float32)})
    with pytest.raises(ValueError, match=name):
        jaxmoe.load(path, tower=tower)


def test_a_tensor_beside_a_router_is_named(tmp_path):
    name = f"{AT}mlp.gate.weight_2"
    path, _ = folder(tmp_path, ernie4_5_vl_moe, "text", add={name: np.ones((H, E), np.float32)})
    with pytest.raises(NotImplementedError, match=f"{name} has no reader"):
        jaxmoe.load(path, tower="text")


def test_joined_rows_of_codes_are_refused(tmp_path):
    at = "transformer.blocks.1.ffn.experts.mlp.w1"
    codes = {at: np.ones((E * I, H), "float8_e4m3fn"), f"{at}.weight_scale": np.ones(1, np.float32)}
    path, _ = folder(tmp_path, dbrx, None, add=codes)
    with pytest.raises(NotImplementedError, match=f"{at} has the rows of all experts, and"):
        jaxmoe.load(path)


REFUSED = (
    (phimoe, {"num_experts_per_tok": 3}),
    (phimoe, {"scoring_func": "softmax"}),
    (longcat_flash, {"zero_expert_type": "drop"}),
    (longcat_flash, {"router_bias": True}),
    (longcat_flash, {"norm_topk_prob": True}),
    (switch_transformers, {"dense_act_fn": "gelu"}),
    (nllb_moe, {"second_expert_policy": "random"}),
    (nllb_moe, {"moe_eval_capacity_token_fraction": 0.5}),
    (nllb_moe, {"activation_function": "gelu"}),
    (jetmoe, {"norm_topk_prob": False}),
)


@pytest.mark.parametrize(("made", "change"), REFUSED)
def test_a_rule_that_a_family_does_not_have_is_named(made, change, tmp_path):
    ((setting, value),) = change.items()
    tower = TOWERS.get(made, (None,))[0]
    path, _ = folder(tmp_path, made, tower, change)
    with pytest.raises(NotImplementedError, match=f"has {setting}={value!r}, which must be"):
        jaxmoe.load(path, tower=tower)


@pytest.mark.parametrize(
    ("made", "inner", "change"),
    (
        (dbrx, "ffn_config", {"moe_normalize_expert_weights": 2.0}),
        (inkling_mm_model, "text_config", {"shared_expert_sink": False}),
    ),
)
def test_so_is_one_in_an_object(made, inner, change, tmp_path):
    ((setting, value),) = change.items()
    path, _ = folder(tmp_path, made, None)
    config = json.loads((path / "config.json").read_text())
    config[inner] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match=f"has {setting}={value!r}, which must be"):
        jaxmoe.load(path)


def test_weights_of_dbrx_may_be_as_they_are(tmp_path):
    path, _ = folder(tmp_path, dbrx, None)
    config = json.loads((path / "config.json").read_text())
    config["ffn_config"]["moe_normalize_expert_weights"] = None
    (path / "config.json").write_text(json.dumps(config))
    options = dict(jaxmoe.load(path)[1].options)
    assert options == {"top_k": K, "method": "softmax", "norm_topk_prob": False}


def test_an_activation_of_another_name_is_named():
    for kind, name in (("gemma4", "hidden_activation"), ("jetmoe", "activation_function")):
        family, config = families.of({"model_type": kind, name: "tanh"})
        with pytest.raises(ValueError, match=f"{name}='tanh' must be one of silu"):
            family.acts(config)


def test_the_shared_experts_of_inkling_have_weights(tmp_path):
    path, _ = folder(tmp_path, inkling_mm_model, None)
    layer = jaxmoe.load(path)[1]
    routing = layer.route(jnp.ones((T, H)))
    assert routing.expert_ids[:, K:].tolist() == [[E, E + 1]] * T
    np.testing.assert_allclose(routing.weights.sum(1), 1.4, rtol=1e-5)


@pytest.mark.parametrize("kind", ("doge", "muse_spark", "zaya", "vitpose_backbone"))
def test_models_that_are_no_such_layers_are_refused_with_the_reason(kind, tmp_path):
    path = save_folder(tmp_path, {"model_type": kind}, {"a": np.ones(1, np.float32)})
    with pytest.raises(NotImplementedError, match=rf"{kind}: it.*docs/models\.md has the calls"):
        jaxmoe.load(path)
