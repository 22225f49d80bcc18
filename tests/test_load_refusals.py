"""What `jaxmoe.load` refuses: each message names the file, the tensor or the key."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe import inspect
from jaxmoe._load import families, shards
from tests.test_load import (
    BF16,
    FILES,
    V3,
    E,
    Files,
    H,
    I,
    folder,
    gpt_oss,
    save,
    save_folder,
)

AT = "model.layers.0.mlp."
F8, F16 = ml_dtypes.float8_e4m3fn, np.float16
UP = f"{AT}experts.3.up_proj"


def config_of(path):
    return json.loads((path / "config.json").read_text())


@pytest.fixture
def qwen(tmp_path):
    """A folder of plain weights, and its tensors."""
    return folder(tmp_path, FILES["qwen3"])


def refuses(path, tensors, error, message, config=None, **options):
    save_folder(path, config_of(path) if config is None else config, tensors)
    with pytest.raises(error, match=message) as caught:
        jaxmoe.load(path, **options)
    assert str(caught.value).startswith("jaxmoe.load: ")


@pytest.mark.parametrize("prefix", ("mtp", "model.mtp"))
def test_modules_that_predict_further_tokens_are_no_layers(prefix, qwen):
    path, tensors = qwen
    want = jaxmoe.load(path)[0]
    other = {f"{prefix}.{k.removeprefix('model.')}": np.zeros_like(a) for k, a in tensors.items()}
    layers = jaxmoe.load(save_folder(path, config_of(path), tensors | other))
    assert list(layers) == [0]
    np.testing.assert_array_equal(layers[0].router, want.router)
    np.testing.assert_array_equal(layers[0].experts.down, want.experts.down)


def test_two_modules_of_one_number_are_named(qwen):
    path, tensors = qwen
    other = {f"draft.{k.removeprefix('model.')}": a for k, a in tensors.items()}
    message = r"draft.layers.0.mlp and model.layers.0.mlp are both layer 0"
    refuses(path, tensors | other, ValueError, message)


def test_a_quantized_router_is_refused(qwen):
    path, tensors = qwen
    gate = f"{AT}gate.weight"
    eight = tensors | {gate: tensors[gate].astype(F8)}
    refuses(path, eight, ValueError, r"gate.weight must be bf16, f16 or f32, .* not f8_e4m3fn")
    scaled = eight | {f"{gate}_scale": np.ones(1, np.float32)}
    message = r"gate.weight_scale has no reader, beside .*gate.weight"
    refuses(path, scaled, NotImplementedError, message)
    bias = tensors | {f"{AT}gate.bias": np.zeros(E, np.int8)}
    refuses(path, bias, ValueError, r"gate.bias must be bf16, f16 or f32, \[4\], not i8 \[4\]")


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            {f"{AT}gate.weight": (E, H // 2)},
            r"gate.weight must be .* \[4, 128\], not bf16 \[4, 64\]",
        ),
        ({f"{AT}gate.weight": (H, E)}, r"gate.weight must be .* \[4, -1\], not bf16 \[128, 4\]"),
        ({f"{AT}gate.bias": (E - 1,)}, r"gate.bias must be .* \[4\], not bf16 \[3\]"),
    ),
)
def test_a_router_of_another_shape_is_refused(change, message, qwen):
    path, tensors = qwen
    change = {name: np.zeros(shape, BF16) for name, shape in change.items()}
    refuses(path, tensors | change, ValueError, message)


@pytest.mark.parametrize("kind", ("deepseek_v3", "kimi_k2", "glm4_moe", "glm_moe_dsa", "dots1"))
def test_the_bias_of_the_choice_is_needed(kind, tmp_path):
    path, tensors = folder(tmp_path, Files(kind, V3))
    message = f"has no tensor '{AT}gate.e_score_correction_bias'"
    refuses(path, tensors, LookupError, message)
    refuses(path, tensors, LookupError, message, {**config_of(path), "topk_method": "noaux_tc"})
    other = {**config_of(path), "topk_method": "greedy"}  # of a predecessor, without a bias
    message = f"topk_method='greedy', which must be noaux_tc for model_type='{kind}'"
    refuses(path, tensors, NotImplementedError, message, other)


def test_the_bias_of_the_choice_is_needed_where_the_configuration_says_so(tmp_path):
    name = "model.layers.0.block_sparse_moe.e_score_correction_bias"
    path, tensors = folder(tmp_path, FILES["minimax_m2"], without=[name])
    del tensors[name]
    assert jaxmoe.load(path)[0].selection_bias is None
    said = {**config_of(path), "use_routing_bias": True}
    refuses(path, tensors, LookupError, f"has no tensor '{name}'", said)


def test_deepseek_v4_needs_a_bias_or_a_table(tmp_path):
    path, tensors = folder(tmp_path, FILES["deepseek_v4"])
    del tensors["layers.0.ffn.gate.bias"]
    message = "no tensor 'layers.0.ffn.gate.bias' or 'layers.0.ffn.gate.tid2eid'"
    refuses(path, tensors, LookupError, message)


def test_gpt_oss_needs_the_bias_of_its_router(tmp_path):
    path, tensors, at = gpt_oss(tmp_path, quantized=True)
    del tensors[f"{at}router.bias"]
    refuses(path, tensors, LookupError, f"has no tensor '{at}router.bias'")


@pytest.mark.parametrize("shape", ((2, H, 2), (3, H, 2), (8, H, 2), ()))
def test_a_part_of_another_number_of_experts_is_refused(shape, tmp_path):
    """The bytes behind its end are those of another tensor."""
    path, tensors, at = gpt_oss(tmp_path, quantized=True)
    tensors[f"{at}experts.down_proj_scales"] = np.full(shape, 127, np.uint8)
    message = rf"says 4 experts, .*down_proj_scales has the shape \[{', '.join(map(str, shape))}\]"
    refuses(path, tensors, ValueError, message)


@pytest.mark.parametrize("dtype", (F16, F8))
def test_experts_have_one_dtype(dtype, qwen):
    path, tensors = qwen
    name = f"{UP}.weight"
    changed = tensors | {name: tensors[name].astype(dtype)}
    message = rf"{name} is F(16|8_E4M3) \[64, 128\] and .*experts.0.up_proj.weight BF16"
    refuses(path, changed, ValueError, message)


@pytest.mark.parametrize("left", ("gate_proj", "up_proj", "down_proj", "none"))
def test_a_layer_without_some_weight_is_no_dense_one(left, tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"], layers=(0, 1))
    kept = {k: a for k, a in tensors.items() if "layers.1" not in k or left in k or "gate.w" in k}
    refuses(path, kept, LookupError, r"no tensor 'model.layers.1.mlp.experts.0.\w+_proj.weight'")


def test_a_set_of_files_without_index_is_whole(qwen):
    path, tensors = qwen
    (path / "model.safetensors").unlink()
    save(path / "model-00002-of-00004.safetensors", tensors)
    names = [f"model-0000{i}-of-00004.safetensors" for i in (1, 3, 4)]
    with pytest.raises(FileNotFoundError, match=f"has no {', '.join(names)}$"):
        jaxmoe.load(path)
    for name in names:
        save(path / name, {f"of.{name}": np.zeros(1, BF16)})
    assert list(jaxmoe.load(path)) == [0]


@pytest.mark.parametrize("part", (".weight_scale", ".weight_zero_point", ".pre_quant_scale"))
def test_tensors_of_other_experts_than_the_first(part, qwen):
    path, tensors = qwen
    message = rf"there is a tensor {UP}{part} and no {AT}experts.0.up_proj{part}"
    refuses(path, tensors | {UP + part: np.ones((I, 1), BF16)}, ValueError, message)


def test_biases_are_zero_in_all_experts(qwen):
    path, tensors = qwen
    biases = {f"{AT}experts.{e}.up_proj.bias": np.zeros(I, BF16) for e in range(E)}
    assert list(jaxmoe.load(save_folder(path, config_of(path), tensors | biases))) == [0]
    one = biases | {f"{UP}.bias": np.ones(I, BF16)}
    refuses(path, tensors | one, NotImplementedError, "up_proj.bias has no reader")
    some = {k: a for k, a in biases.items() if ".3." not in k}
    refuses(path, tensors | some, ValueError, rf"0.up_proj.bias and no {UP}.bias")


def test_the_index_says_which_file_has_a_tensor(qwen):
    path, tensors = qwen
    (path / "model.safetensors").unlink()
    name = f"{UP}.weight"
    save(path / "a.safetensors", tensors)
    save(path / "b.safetensors", {name: np.zeros((I, H), BF16), "x": np.zeros(1, BF16)})
    index = path / "model.safetensors.index.json"
    places = dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    np.testing.assert_array_equal(jaxmoe.load(path)[0].experts.up[3], tensors[name])
    index.write_text(json.dumps({"weight_map": places | {f"{UP}.scale": "b.safetensors"}}))
    with pytest.raises(ValueError, match=rf"there is a tensor {UP}.scale"):
        jaxmoe.load(path)
    save(path / "a.safetensors", {k: a for k, a in tensors.items() if k != name})
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(LookupError, match=f"a.safetensors has no tensor '{name}'"):
        jaxmoe.load(path)
    index.unlink()
    save(path / "a.safetensors", tensors)
    with pytest.raises(ValueError, match=f"{name} is in .*a.safetensors and in .*b.safetensors"):
        jaxmoe.load(path)
    save(path / "model.safetensors", tensors)  # alone it is the model
    np.testing.assert_array_equal(jaxmoe.load(path)[0].experts.up[3], tensors[name])


def head(text):
    return len(text).to_bytes(8, "little") + text + b"\0" * 9


BROKEN = {
    "no JSON": ("model.safetensors", head(b"x" * 40), "model.safetensors is no JSON"),
    "a list": ("model.safetensors", head(b"[]"), "model.safetensors must be a JSON object, not"),
    "no place": ("model.safetensors", head(b'{"a": 3}'), "a in .*model.safetensors must have a d"),
    "no shape": (
        *("model.safetensors", head(b'{"a": {"dtype": "U8", "data_offsets": [0, 1]}}')),
        "a in .*model.safetensors must have a dtype, a shape and two data_offsets",
    ),
    "negative offsets": (
        "model.safetensors",
        head(b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [-1, 1]}}'),
        "a in .*model.safetensors must have a dtype, a shape and two data_offsets",
    ),
    "config cut off": ("config.json", b"{", "config.json is no JSON"),
    "config a list": ("config.json", b"[]", r"config.json must be a JSON object, not \[\]"),
    "index cut off": ("model.safetensors.index.json", b"{", "index.json is no JSON"),
    "no weight_map": ("model.safetensors.index.json", b"{}", "weight_map of .*index.json must be"),
    "no file": (
        *("model.safetensors.index.json", b'{"weight_map": {"a": 3}}'),
        "index.json has 3 as the file of a",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_named(what, qwen, capsys):
    path, _ = qwen
    name, data, message = BROKEN[what]
    (path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"^jaxmoe.load: .*{message}"):
        jaxmoe.load(path)
    assert inspect.main([str(path)]) == 1
    assert "jaxmoe.load: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    (
        {"num_experts": -4},
        {"num_experts": "four"},
        {"num_experts": True},
        {"num_hidden_layers": "x"},
        {"num_hidden_layers": 0},
        {"num_experts_per_tok": 2.5},
        {"quantization_config": 3},
        {"text_config": []},
        {"hidden_act": []},
        {"norm_topk_prob": "false"},
        {"norm_topk_prob": 0},
    ),
)
def test_a_value_of_the_configuration_is_named(change, qwen):
    path, tensors = qwen
    (key,) = change
    refuses(path, tensors, ValueError, key, {**config_of(path), **change})


def test_a_rule_of_another_family_is_named():
    other = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    base = {"num_experts": 4, "num_experts_per_tok": 2} | other
    right = families.of(base | {"model_type": "deepseek_v3", "scoring_func": "sigmoid"})
    assert right[0].routing(right[1])["method"] == "deepseek_v3"
    for kind, change in (
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("qwen3_moe", {"scoring_func": "sigmoid"}),
        ("olmoe", {"scoring_func": "sigmoid"}),
    ):
        family, config = families.of(base | {"model_type": kind} | change)
        ((name, value),) = change.items()
        with pytest.raises(NotImplementedError, match=f"{name}='{value}', which must be .*{kind}"):
            family.routing(config)


def test_experts_past_the_last_are_named(qwen):
    path, tensors = qwen
    for part in ("gate", "up", "down"):
        tensors[f"{AT}experts.{E + 3}.{part}_proj.weight"] = tensors[
            f"{AT}experts.0.{part}_proj.weight"
        ]
    refuses(path, tensors, ValueError, f"the files have more: {AT}experts.{E + 3}.gate_proj.we")


@pytest.mark.parametrize("name", ("2.norm.weight", "0.foo", "shared.up_proj.weight", "up_projs"))
def test_tensors_of_experts_that_no_weight_has_are_named(name, qwen):
    path, tensors = qwen
    more = {f"{AT}experts.{name}": np.ones(4, np.float32)}
    refuses(path, tensors | more, NotImplementedError, f"{AT}experts.{name} has no reader: it bel")


def test_a_tensor_of_an_unknown_dtype_may_be_of_no_use(qwen):
    path, tensors = qwen
    want = jaxmoe.load(path)[0].experts.up
    file = path / "model.safetensors"
    save(file, tensors | {"x": np.zeros(2, np.uint64)})
    file.write_bytes(file.read_bytes().replace(b"U64", b"C64"))
    np.testing.assert_array_equal(jaxmoe.load(path)[0].experts.up, want)
    with pytest.raises(ValueError, match="x in .*model.safetensors has the unknown dtype C64"):
        shards.Shards(path)["x"]


def test_what_does_not_go_together_is_named_with_its_layer(qwen, capsys):
    path, tensors = qwen
    for e in range(E):
        tensors[f"{AT}experts.{e}.down_proj.weight"] = np.ones((H, I), F8)
        tensors[f"{AT}experts.{e}.down_proj.weight_scale"] = np.ones((H, 1), BF16)
    message = "jaxmoe.load: model.layers.0.mlp: jaxmoe.Experts: gate and up and down must all be"
    refuses(path, tensors, TypeError, message)
    assert inspect.main([str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "error"), ((None, TypeError), ("nonsense", ValueError), ("bf16", ValueError))
)
def test_dtype_is_checked_beside_plain_weights_too(dtype, error, qwen):
    message = "jaxmoe.load: dtype.* must be one of bfloat16, float16, float32"
    with pytest.raises(error, match=message):
        jaxmoe.load(qwen[0], dtype=dtype)


def test_arguments_of_another_kind_are_refused(qwen, capsys):
    path, _ = qwen
    mesh = jax.make_mesh((2,), ("e",))
    for other in (mesh.abstract_mesh, 8):
        with pytest.raises(TypeError, match=r"jaxmoe.load: mesh must be a jax.sharding.Mesh"):
            jaxmoe.load(path, mesh=other)
    for layers in (3, ["0"]):
        with pytest.raises(TypeError, match=r"layers=.* must be a sequence of integers or None"):
            jaxmoe.load(path, layers=layers)
    with pytest.raises(TypeError, match="jaxmoe.load: directory must be a path. Got directory: 3"):
        jaxmoe.load(3)
    assert inspect.main([str(path), "--tokens", "-5"]) == 1
    assert "jaxmoe.inspect: --tokens=-5 must be at least 1" in capsys.readouterr().err


def test_tensors_that_the_files_have_are_named(qwen):
    path, _ = qwen
    message = r"no layer with tensors .*; it has 2 tensors: a.weight, b.weight, .."
    refuses(path, {f"{n}.weight": np.zeros(1, BF16) for n in "ab"}, LookupError, message)


@pytest.mark.parametrize(
    ("said", "message"),
    (
        ({"quant_method": "hqq"}, "quant_method 'hqq', not awq, gptq or auto-round"),
        ({}, "quant_method None, not awq"),
        ({"quant_method": "auto-round"}, "packing_format 'None', not auto_round:auto_gptq"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round", "sym": True},
            "packing_format 'auto_round', not .* or auto_round with sym=false",
        ),
    ),
)
def test_packed_words_of_other_tools_are_refused(said, message, tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3_gptq"])
    config = {**config_of(path), "quantization_config": said}
    refuses(path, tensors, NotImplementedError, f"gate_proj.qweight has {message}", config)
