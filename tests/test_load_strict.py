"""What `jaxmoe.load` must not pass over: each value and tensor that would change numbers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import checkpoints, inspect
from jaxmoe._load import families
from tests import test_load as files
from tests import test_load_families as others
from tests.test_load import (
    BF16,
    FILES,
    INT4,
    QWEN,
    WIDE,
    Draw,
    E,
    Files,
    H,
    I,
    T,
    compressed_tensors,
    folder,
    gpt_oss,
    gptq,
    int4,
    save,
    save_folder,
)
from tests.test_load_nemotron import latent_folder, matrix_scale, nemotron
from tests.test_load_refusals import config_of, refuses

AT = "model.layers.0.mlp."


def of_up(tensors, part, value, experts=range(E), name="up_proj"):
    """The tensors with another part of the weights up of some experts; None: without it."""
    (at,) = {key.split("experts.")[0] for key in tensors if "experts." in key}
    names = [f"{at}experts.{e}.{name}{part}" for e in experts]
    kept = {key: a for key, a in tensors.items() if key not in names}
    return kept if value is None else kept | dict.fromkeys(names, value)


def with_head(path, change=lambda head: None):
    """Writes model.safetensors with a changed header, which ends where arrays may begin."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:size])
    change(head)
    text = json.dumps(head).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[size:])


@pytest.mark.parametrize("split", (False, True))
def test_layers_do_not_change_with_their_files(split, tmp_path):
    """Nothing of a layer is a part of a mapped file, which JAX would take as it is."""
    path, _ = folder(tmp_path, FILES["minimax_m2"])
    with_head(path)
    mesh = jax.make_mesh((4,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = jaxmoe.load(path, **({"mesh": mesh, "axis": "e"} if split else {}))[0]
    before = jax.tree.map(np.array, layer)
    file = path / "model.safetensors"
    with file.open("r+b") as changed:  # in place, as a mapping would see it
        changed.write(b"\x11" * file.stat().st_size)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, layer), before)


@pytest.mark.parametrize(
    ("name", "key"),
    (
        ("lfm2_moe", "use_expert_bias"),
        ("minimax_m3_vl", "use_routing_bias"),
        ("ernie4_5_moe", "moe_use_aux_free"),
        ("bailing_moe", "moe_router_enable_expert_bias"),
        ("bailing_hybrid", "moe_router_enable_expert_bias"),
        ("step3p5", "use_moe_router_bias"),
    ),
)
def test_a_bias_that_the_configuration_denies_is_named(name, key, tmp_path):
    path, _ = others.folder(tmp_path, name)
    config = config_of(path)
    (config.get("text_config") or config)[key] = False
    bias = others.MODELS[name].bias.replace(".", r"\.")
    if "bailing" in name:  # it has the rule of models without a bias then
        config |= {"score_function": "softmax", "n_group": 1, "topk_group": 1}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"has {key}=False, which must be true beside .*\.{bias}"):
        jaxmoe.load(path)


def test_whether_there_is_a_bias_is_a_boolean(tmp_path):
    path, tensors = folder(tmp_path, FILES["minimax_m2"])
    message = "has use_routing_bias='no', which must be a boolean"
    refuses(path, tensors, ValueError, message, {**config_of(path), "use_routing_bias": "no"})
    assert jaxmoe.load(save_folder(path, config_of(path) | {"use_routing_bias": True}, tensors))


UNREAD = {
    "deepseek_v4": (
        *({"scoring_func": "softmax"}, {"scoring_func": "sigmoid"}, {"norm_topk_prob": False}),
        *({"n_group": 2}, {"topk_method": "greedy"}, {"hidden_act": "gelu"}, {"swiglu_alpha": 2.0}),
    ),
    "minimax_m2": (
        *({"scoring_func": "softmax"}, {"norm_topk_prob": False}, {"n_group": 2}),
        *({"routed_scaling_factor": 2.5}, {"topk_group": 2}, {"swiglu_limit": 7.0}),
    ),
    "deepseek_v3": (
        *({"scoring_func": "sqrtsoftplus"}, {"topk_method": "group_limited_greedy"}),
        *({"topk_method": "greedy"}, {"route_scale": 3.0}, {"moe_router_logit_softcapping": 30.0}),
    ),
    "qwen3": (
        *({"n_group": 2}, {"topk_group": 2}, {"routed_scaling_factor": 2.5}),
        *({"topk_method": "noaux_tc"}, {"score_function": "sigmoid"}, {"swiglu_alpha": 1.702}),
    ),
    "mixtral": ({"norm_topk_prob": False}, {"routed_scaling_factor": 0}),
    "deepseek_v2": ({"norm_topk_prob": True}, {"scoring_func": "sigmoid"}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_rule_that_nothing_reads_is_named(name):
    base = {"model_type": FILES[name].kind, **FILES[name].config}
    for ((key, value),) in map(dict.items, UNREAD[name]):
        family, config = families.of(base | {key: value})
        with pytest.raises(NotImplementedError, match=f"has {key}={value!r}, which must be .* for"):
            family.acts(config), family.routing(config)


def test_load_names_a_rule_that_nothing_reads(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"])
    message, other = "n_group=8, which must be 1 or 0 for", {**config_of(path), "n_group": 8}
    refuses(path, tensors, NotImplementedError, message, other)


# What released files have, which says what their models do.
RELEASED = {
    "deepseek_v4": {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc"}
    | {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "hidden_act": "silu"}
    | {"swiglu_limit": 10.0},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8}
    | {"topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "dots1": {"scoring_func": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.5},
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "group_limited_greedy"}
    | {"n_group": 8, "topk_group": 3, "norm_topk_prob": False, "routed_scaling_factor": 16.0},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "hidden_act": "silu"},
    "hunyuan_v1_moe": {"norm_topk_prob": True, "n_group": False, "topk_group": False}
    | {"routed_scaling_factor": False},
    "mixtral": {"n_group": None, "routed_scaling_factor": 1.0, "scoring_func": None},
    "gpt_oss": {"hidden_act": "silu", "swiglu_limit": 7.0},
}


@pytest.mark.parametrize("kind", RELEASED)
def test_what_released_files_say_is_no_other_rule(kind):
    counts = {"num_experts": 160, "num_experts_per_tok": 6}
    family, config = families.of({"model_type": kind, **counts, **RELEASED[kind]})
    assert family.routing(config)["top_k"] == 6 and family.acts(config)


def test_the_slope_of_gpt_oss_is_that_of_the_configuration(tmp_path):
    path, tensors, _ = gpt_oss(tmp_path, quantized=False)
    save_folder(path, {**config_of(path), "swiglu_alpha": 1.5}, tensors)
    assert jaxmoe.load(path)[0].experts.activation == jaxmoe.Swiglu(1.5, 1.0, 7.0)


def said(path, **quantization):
    return {**config_of(path), "quantization_config": quantization}


def test_what_the_quantization_needs_is_named(tmp_path):
    path, tensors = folder(tmp_path / "a", FILES["qwen3_gptq"])
    config = said(path, quant_method="gptq", bits=4, group_size=64, desc_act=True)
    without = of_up(tensors, ".g_idx", None)
    refuses(path, without, LookupError, r"desc_act=true.* no tensor '.*up_proj.g_idx'", config)
    assert jaxmoe.load(save_folder(path, config, tensors))
    path, tensors = folder(tmp_path / "b", FILES["qwen3_int4_zeros"])
    without = of_up(tensors, ".weight_zero_point", None)
    message = r"has symmetric=false, and .* no tensor '.*0.up_proj.weight_zero_point'"
    refuses(path, without, LookupError, message)
    groups = {"a": {"weights": {"symmetric": False}}, "b": {"weights": {"symmetric": True}}}
    mixed = said(path, quant_method="compressed-tensors", config_groups=groups)
    even = {name: a for name, a in tensors.items() if "zero_point" not in name}
    assert jaxmoe.load(save_folder(path, mixed, even))[0].experts.up.format == "int4_g32"
    path, _ = nemotron(tmp_path / "c", matrix_scale)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b".input_scale", b".other_scale"))
    (path / "config.json").write_text(json.dumps(said(path, activation_scheme="static")))
    message = r'activation_scheme="static", and .* no tensor \'.*0.up_proj.input_scale'
    with pytest.raises(LookupError, match=message):
        jaxmoe.load(path)


def packed(**weights):
    return {"quantization_config": compressed_tensors({**INT4, **weights})}


def by_bits(bits, kind="float", **more):
    weights = {"num_bits": bits, "type": kind, **more}
    return {"quantization_config": compressed_tensors(weights)}


GROUPS_64 = {"quant_method": "gptq", "bits": 4, "group_size": 64}
CONTRADICTIONS = (  # what files have and what the configuration says of it, both in the message
    ("qwen3_gptq", GROUPS_64 | {"group_size": 32}, r"0.gate_proj.scales has .* 64 of K=128.*=32"),
    ("qwen3_gptq", GROUPS_64 | {"group_size": -1}, r"scale for 64 of K=128.*group_size=-1"),
    ("qwen3_awq", {"quant_method": "awq", "q_group_size": 128}, r"64 of K=128.*q_group_size=128"),
    ("kimi", packed(group_size=64), r"gate_proj.weight_scale has .* 32 of K=128.*group_size=64"),
    ("kimi", packed(strategy="channel"), r"weight_scale has .* 32 of K=128.*strategy='channel'"),
    ("kimi", packed(num_bits=8, group_size=32), r"weight_packed has .* 4 bits, .* num_bits=8"),
    ("qwen3_nvfp4", by_bits(4, group_size=32), r"weight_scale has .* 16 of K=128.*group_size=32"),
    ("qwen3_nvfp4", by_bits(8), r"gate_proj.weight_packed has .* of 4 bits, .* num_bits=8"),
    ("qwen3_mxfp4", by_bits(4, group_size=16), r"weight_scale has .* 32 of K=128.*group_size=16"),
    ("qwen3_mxfp8", by_bits(8, group_size=16), r"weight_scale has .* 32 of K=128.*group_size=16"),
    ("mixtral", by_bits(4, strategy="channel"), r"w1.weight has .* of 8 bits, .* num_bits=4"),
)


@pytest.mark.parametrize(("name", "said", "message"), CONTRADICTIONS)
def test_a_configuration_of_other_tensors_is_refused(name, said, message, tmp_path):
    path, tensors = folder(tmp_path, FILES[name])
    said = said if "quantization_config" in said else {"quantization_config": said}
    refuses(path, tensors, ValueError, f"jaxmoe.load: .*{message}", {**config_of(path), **said})


AGREEING = (
    ("qwen3_gptq", GROUPS_64 | {"group_size": 32, "dynamic": {"+:.*": {"group_size": 64}}}),
    ("qwen3_gptq", GROUPS_64 | {"group_size": 128, "extra_config": {"a": {"group_size": 64}}}),
    ("qwen3_gptq", GROUPS_64 | {"bits": 8, "dynamic": {"+:.*experts.*": {"bits": 4}}}),
    ("qwen3_gptq", GROUPS_64 | {"bits": 2, "extra_config": {".*experts.*": {"bits": 4}}}),
    ("kimi", {"config_groups": {"a": {"weights": INT4}, "b": {"weights": None}}}),
    (
        "kimi",
        {
            "config_groups": {
                "attention": {"weights": {"num_bits": 8, "strategy": "channel"}},
                "experts": {"weights": {"num_bits": 4, "group_size": 32}},
            }
        },
    ),
    ("qwen3_nvfp4", by_bits(4, group_size=16)["quantization_config"]),
    ("mixtral", by_bits(8, strategy="channel")["quantization_config"]),
    ("mixtral", by_bits(8, strategy="block", block_structure=[128, 128])["quantization_config"]),
)


def shapes_of(name):
    return WIDE if name == "qwen3_gptq" else FILES[name].shapes  # of two groups of 64


@pytest.mark.parametrize(("name", "said"), AGREEING)
def test_a_configuration_of_several_kinds_of_weights_says_no_more_than_that(name, said, tmp_path):
    path, tensors = folder(tmp_path, dataclasses.replace(FILES[name], shapes=shapes_of(name)))
    assert jaxmoe.load(save_folder(path, {**config_of(path), "quantization_config": said}, tensors))


@pytest.mark.parametrize("more", ({"bits": 8}, {"bits": 4, "dynamic": {"+:.*": {"bits": 8}}}))
def test_weights_of_eight_bits_by_gptq_are_named_so(more, tmp_path):
    def store(draw, n, k):
        parts = {".qweight": draw.i32(k // 4, n), ".qzeros": draw.i32(k // 64, n // 4)}
        return {**gptq(draw, n, k), **parts}

    said = GROUPS_64 | more
    path, tensors = folder(tmp_path, Files("qwen3_moe", QWEN, store, quantization=said))
    refuses(path, tensors, NotImplementedError, "0.gate_proj.qweight has 8 bits, not 4")


def test_weights_of_eight_bits_in_words_are_no_contradiction(tmp_path):
    def store(draw, n, k):
        return {**int4(draw, n, k), ".weight_packed": draw.i32(n, k // 4)}

    said = by_bits(8, "int", group_size=32)["quantization_config"]
    path, tensors = folder(tmp_path, Files("qwen3_moe", QWEN, store, quantization=said))
    message = "0.gate_proj.weight_packed has 32 words for K=128: not 4 bits"
    refuses(path, tensors, NotImplementedError, message)


def scaled(draw, n, k):
    return {**matrix_scale(draw, n, k), ".input_scale": np.int32(2)}


def test_a_scale_of_inputs_is_a_float(tmp_path):
    path, _ = nemotron(tmp_path, scaled)
    with pytest.raises(ValueError, match=r"0.up_proj.input_scale must be bf16, f16 or f32, not i"):
        jaxmoe.load(path)


TABLES = (
    (np.zeros((10, 2), np.float32), r"must be integers \[V, 2\] .*, not f32 \[10, 2\]"),
    (np.zeros((10, 3), np.int64), r"must be integers \[V, 2\] .*, not i64 \[10, 3\]"),
    (np.zeros(10, np.int64), r"not i64 \[10\]"),
    (np.full((10, 2), E), f" has {E}, which must be an expert, 0 to {E - 1}"),
    (np.full((10, 2), -1), " has -1, which must be an expert"),
)


def hashed(tmp_path, table):
    path, tensors = folder(tmp_path, FILES["deepseek_v4"])
    del tensors["layers.0.ffn.gate.bias"]
    return path, tensors | {"layers.0.ffn.gate.tid2eid": table}


@pytest.mark.parametrize(("table", "message"), TABLES)
def test_a_table_of_others_than_experts_is_named(table, message, tmp_path):
    refuses(*hashed(tmp_path, table), ValueError, rf"layers.0.ffn.gate.tid2eid.*{message}")


def test_ids_of_tokens_are_checked(tmp_path):
    path, tensors = hashed(tmp_path, np.random.default_rng(0).integers(0, E, (10, 2)))
    layer, x = jaxmoe.load(save_folder(path, config_of(path), tensors))[0], jnp.ones((T, H))
    for ids in (np.ones(T, np.float32), np.ones(T, bool), [1] * T, 3):
        with pytest.raises(TypeError, match=r"LoadedLayer.route: token_ids(\.dtype=| must)"):
            layer(x, ids)
    with pytest.raises(ValueError, match=r"token_ids.shape=\[4\] must be \[5\] \(the axes of"):
        jax.jit(layer.route)(x, jnp.zeros(4, jnp.int32))
    for dtype in (np.int8, np.uint32, np.int64):
        ids = np.array([3, 9, 10, 120, 0], dtype)
        out = layer.route(x, ids)
        want = np.asarray(layer.expert_table)[[3, 9, 0, 0, 0]]
        want[2:4] = -1
        np.testing.assert_array_equal(out.expert_ids, want)
        assert not np.asarray(out.weights[2:4]).any() and np.asarray(out.weights[:2]).all()
    assert (layer.route(x, jnp.full(T, -3)).expert_ids == -1).all()
    assert layer.route(x[None], jnp.zeros((1, T), jnp.int32)).expert_ids.shape == (1, T, 2)


def test_a_tensor_with_the_name_of_a_stem_is_named(tmp_path):
    path, tensors = folder(tmp_path / "a", FILES["qwen3"])
    for stem in ("experts.0.gate_proj", "experts.3.gate_proj", "gate", "experts"):
        more = {AT + stem: np.ones((I, H), BF16)}
        refuses(path, tensors | more, (NotImplementedError, ValueError), f"{AT}{stem} ")
    name = f"{AT}experts.00.gate_proj.weight"  # nor is one of another spelling
    more = {name: np.ones((I, H), BF16)}
    refuses(path, tensors | more, NotImplementedError, f"{name} has no reader: it belongs to none")
    path, tensors, at = gpt_oss(tmp_path / "b", quantized=True)
    more = {f"{at}experts.gate_up_proj": np.ones((E, H, 2 * I), BF16)}
    refuses(path, tensors | more, NotImplementedError, "gate_up_proj has no reader, beside")


@pytest.mark.parametrize("expert", (0, 3))
@pytest.mark.parametrize(
    ("shape", "message"),
    (
        (np.array([I + 64, H], np.int32), r"\[128, 128\]"),
        (np.array([[I, H]]), r"i64 \[1, 2\]"),
        (np.zeros(0, np.int64), r"\[0\]"),
        (np.array([I, H], np.float32), r"[fF]32 \[2\]"),
    ),
)
def test_the_shape_of_packed_words_is_checked(expert, shape, message, tmp_path):
    path, tensors = folder(tmp_path, FILES["kimi"])
    message = rf"(?i)jaxmoe.load: .*\.{expert}\.up_proj\.weight_shape.*{message}"
    refuses(path, of_up(tensors, ".weight_shape", shape, [expert]), ValueError, message)


def test_tensors_have_bytes_of_their_own(tmp_path):
    path, _ = folder(tmp_path, FILES["qwen3"])
    one, other = (f"{AT}experts.{e}.up_proj.weight" for e in (1, 2))

    def change(head):
        head[other]["data_offsets"] = head[one]["data_offsets"]

    with_head(path, change)
    with pytest.raises(ValueError, match=f"safetensors has {one} and {other} in the same bytes"):
        jaxmoe.load(path)


def test_the_width_of_latent_products_is_that_of_the_configuration(tmp_path):
    path, _ = latent_folder(tmp_path)
    for value, message in ((64, "=64, and experts of .* read 128"), ("128", "='128', which must")):
        with pytest.raises(ValueError, match=f"has moe_latent_size{message}"):
            jaxmoe.load(others.changed(path, moe_latent_size=value))


@pytest.mark.parametrize("factor", (0, -1, np.nan, np.inf))
def test_factors_of_weights_are_positive(factor, tmp_path):
    parts = {"qwen3_nvfp4": ".weight_global_scale", "qwen3_modelopt": ".weight_scale_2"}
    for name, part in parts.items():
        path, tensors = folder(tmp_path / name, FILES[name])
        some = of_up(tensors, part, np.full(1, factor, np.float32), [2])
        refuses(path, some, ValueError, f"2.up_proj{part}={np.float32(factor)}.* must be one num")
    path, _ = latent_folder(tmp_path / "latent", fc1_latent_proj__weight_scale=np.float32(factor))
    with pytest.raises(ValueError, match=r"fc1_latent_proj.weight_scale=.* must be one number"):
        jaxmoe.load(path)


def test_factors_of_fp8_matrices_are_positive_and_those_of_channels_may_be_zero(tmp_path):
    def matrix(draw, n, k):
        return {**matrix_scale(draw, n, k), ".weight_scale": np.float32(0)}

    path, _ = nemotron(tmp_path / "a", matrix)
    with pytest.raises(ValueError, match=r"0.up_proj.weight_scale=0.0 must be one number"):
        jaxmoe.load(path)
    path, tensors = folder(tmp_path / "b", FILES["mixtral"])
    zeros = of_up(tensors, ".weight_scale", np.zeros((I, 1), BF16), name="w1")
    assert jaxmoe.load(save_folder(path, config_of(path), zeros))


WITHOUT_ROWS = r"w.* must hold a positive multiple of 64 outputs \(N\) in .*, not 0; the nearest l"


@pytest.mark.parametrize(
    "store", (files.mxfp4, files.nvfp4, files.modelopt, files.int4, files.gptq, files.awq)
)
def test_packed_weights_without_rows_are_refused(store):
    parts = {part: np.stack([a, a]) for part, a in store(Draw(0), 0, H).items()}
    with pytest.raises(ValueError, match=WITHOUT_ROWS):
        files.READERS[store](parts)
    if store is files.mxfp4:
        blocks = np.zeros((2, 0, H // 32, 16), np.uint8)
        with pytest.raises(ValueError, match=WITHOUT_ROWS):
            checkpoints.from_mxfp4(blocks, blocks[..., 0])


def test_what_is_no_file_is_named(tmp_path):
    path, _ = folder(tmp_path, FILES["qwen3"])
    with pytest.raises(TypeError, match="progress must be a function of bytes read, .* Got prog"):
        jaxmoe.load(path, progress=3)
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        file, kept = path / name, path / "kept"
        if file.exists():
            file.rename(kept)
        file.symlink_to(path / "nothing")
        with pytest.raises(FileNotFoundError, match=rf"^jaxmoe.load: .* has no {name} \(a link to"):
            jaxmoe.load(path)
        file.unlink()
        file.mkdir()
        with pytest.raises(FileNotFoundError, match=rf"^jaxmoe.load: .* has no {name} \(a direc"):
            jaxmoe.load(path)
        file.rmdir()
        if kept.exists():
            kept.rename(file)
    (path / "model.safetensors").rename(path / "a.safetensors")
    (path / "b.safetensors").symlink_to(path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"has no b.safetensors \(a link to nothing\)"):
        jaxmoe.load(path)


GROUPS = (
    ("deepseek_v3", {"n_group": 3}, "n_group=3, which must divide n_routed_experts=8"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group=5, which must be at most n_group=4"),
    ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok=3, which must be at most 2, the exp"),
    ("deepseek_v2", {"n_group": 3}, "n_group=3, which must divide n_routed_experts=8"),
    ("kimi_linear", {"num_expert_group": 3}, "num_expert_group=3, which must divide num_experts=8"),
)


@pytest.mark.parametrize(("kind", "change", "message"), GROUPS)
def test_groups_that_do_not_hold_a_choice_are_named(kind, change, message):
    base = others.KIMI if kind == "kimi_linear" else others.V3
    base = {**base, "topk_method": None if kind != "deepseek_v2" else "group_limited_greedy"}
    family, config = families.of({"model_type": kind, **base, **change})
    with pytest.raises(ValueError, match=f"jaxmoe.load: config.json has {message}"):
        family.routing(config)


def test_what_a_layer_cannot_route_is_refused_at_once(tmp_path):
    draw, at = Draw(1), "model.layers.1.feed_forward."
    shapes = {"experts.gate_up_proj": (E, H, 2 * I), "experts.down_proj": (E, I, H)}
    shapes["router.weight"] = (E, H)
    tensors = {at + name: draw.normal(*shape).astype(BF16) for name, shape in shapes.items()}
    config = {"model_type": "llama4", "num_local_experts": E, "num_experts_per_tok": 2}
    refuses(tmp_path, tensors, ValueError, "config.json: jaxmoe.route: top_k=2 must be 1", config)


@pytest.mark.parametrize(("count", "error"), ((3, ValueError), (5, LookupError)))
def test_the_field_of_another_number_of_experts_is_named(count, error, tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"])
    other = {**config_of(path), "num_experts": count}
    refuses(path, tensors, error, f"num_experts of config.json says {count} experts, ", other)


def test_reports_say_which_layers_they_are_of(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"], layers=(0, 1, 2, 3, 5))
    wide = [f"layers.{number}." for number in (1, 5)]
    more = {k: a.astype(np.float32) for k, a in tensors.items() if any(w in k for w in wide)}
    text = inspect.describe(str(save_folder(path, config_of(path), tensors | more)), 8)
    assert f"\nlayers 0, 2 to 3: bfloat16, {H} x {I}, 8 tokens:\n" in text
    assert f"\nlayers 1, 5: float32, {H} x {I}, 8 tokens:\n" in text


def test_rows_with_one_scale_need_the_size_of_a_group(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3_w4a8"])
    draw = Draw(0)
    for e in range(E):  # H is 128, and down has two groups in a row
        for name, n, k in (("gate", 256, H), ("up", 256, H), ("down", H, 256)):
            parts = files.int4(draw, n, k, 128)
            tensors |= {f"{AT}experts.{e}.{name}_proj{part}": a for part, a in parts.items()}
    assert jaxmoe.load(save_folder(path, config_of(path), tensors))
    config = {k: v for k, v in config_of(path).items() if k != "quantization_config"}
    message = "int4_channel.*int4_g128.*: group_size of quantization_config of config.json must"
    refuses(path, tensors, ValueError, message, config)


def test_tensors_without_bytes_share_none(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"])
    save(path / "model.safetensors", tensors | {"empty": np.zeros(0, BF16), "e": np.zeros(0, BF16)})
    assert list(jaxmoe.load(path)) == [0]
