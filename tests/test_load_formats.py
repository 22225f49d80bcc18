"""Which reader of `jaxmoe.checkpoints` a weight has: what names, dtypes and config.json tell."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe import checkpoints, inspect
from jaxmoe._testing import assert_equal
from tests.test_load import (
    BF16,
    F8,
    FILES,
    GPTQ,
    QWEN,
    W123,
    WIDE,
    E,
    Files,
    H,
    I,
    T,
    assert_same,
    awq,
    compressed_tensors,
    folder,
    gpt_oss,
    gptq,
    int4_g128,
    modelopt,
    mxfp4,
    mxfp8,
    nvfp4,
    save_folder,
    stacked,
)

TALL = {"gate_proj": (192, 256), "up_proj": (192, 256), "down_proj": (256, 192)}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False}


def loaded(tmp_path, files, **changed):
    path, tensors = folder(tmp_path, files)
    config = json.loads((path / "config.json").read_text())
    return jaxmoe.load(save_folder(path, {**config, **changed}, tensors))[0], tensors


@pytest.mark.parametrize(
    ("store", "said", "read"),
    (
        (gptq, AUTO | {"packing_format": "auto_round:auto_gptq"}, "gptq"),
        (gptq, AUTO | {"packing_format": "auto_round:gptqmodel"}, "gptq_v2"),
        (gptq, AUTO | {"packing_format": "auto_round"}, "gptq_v2"),
        (awq, AUTO | {"packing_format": "auto_round:auto_awq"}, "awq"),
        (gptq, GPTQ | {"quant_method": "GPTQ", "bits": "4"}, "gptq"),
        (awq, {"quant_method": "AWQ", "group_size": 64}, "awq"),
    ),
)
def test_zero_points_are_read_as_the_tool_stores_them(store, said, read, tmp_path):
    files = Files("qwen3_moe", QWEN, store, quantization=said)
    layer, tensors = loaded(tmp_path, files)
    parts = stacked(tensors, files, "up_proj")
    args = [parts[name] for name in (".qweight", ".qzeros", ".scales")]
    if read == "awq":
        want = checkpoints.from_awq(*args, group_size=64, dtype="bfloat16")
    else:
        want = checkpoints.from_gptq(*args, checkpoint_format=read, group_size=64, dtype="bfloat16")
    assert_same(layer.experts.up, want)


def words_of_one_group(draw, n, k):
    return {".weight_packed": draw.i32(n, k // 8), ".weight_scale": np.full((n, 1), 0.1, BF16)}


@pytest.mark.parametrize(
    ("weights", "formats"),
    (
        ({"strategy": "channel", "group_size": None}, ("int4_channel", "int4_channel")),
        ({"strategy": "group", "group_size": 64}, ("int4_channel", "int4_g64")),
    ),
)
def test_a_scale_a_row_is_a_group_where_the_configuration_says_so(weights, formats, tmp_path):
    said = compressed_tensors({"num_bits": 4, "type": "int", **weights})
    shapes = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    files = Files(*("qwen3_moe", QWEN, words_of_one_group), shapes=shapes, quantization=said)
    if formats[0] == formats[1]:
        layer, _ = loaded(tmp_path, files)
        assert (layer.experts.up.format, layer.experts.down.format) == formats
    else:
        message = "gate_proj.weight_scale has a scale for 128 of K=128, and .* has group_size=64"
        with pytest.raises(ValueError, match=message):
            loaded(tmp_path, files)


@pytest.mark.parametrize("k", (64, 128, 256))
def test_a_scale_a_row_is_int4_channel(k):
    words = jnp.full((1, 64, k // 8), 0x99999999 - 2**32, jnp.int32)
    scales = jnp.ones((1, 64, 1), jnp.bfloat16)
    assert checkpoints.from_int4(words, scales).format == "int4_channel"
    by = {64: "int4_g64", 128: "int4_g128"}.get(k, "int4_channel")
    assert checkpoints.from_int4(words, scales, group_size=k).format == by


def test_a_section_that_is_null_says_nothing(tmp_path):
    """The configuration of the language model inside of one of several inputs."""
    text = {"model_type": "qwen3_moe", **QWEN, "quantization_config": None}
    config = {"model_type": "other", "text_config": text, "quantization_config": {**GPTQ}}
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path, tensors = folder(tmp_path, FILES["qwen3_gptq"])
    layer = jaxmoe.load(save_folder(path, config, tensors))[0]
    parts = stacked(tensors, FILES["qwen3_gptq"], "up_proj")
    args = [parts[name] for name in (".qweight", ".qzeros", ".scales")]
    options = {"checkpoint_format": "gptq_v2", "group_size": 64, "dtype": "bfloat16"}
    assert_same(layer.experts.up, checkpoints.from_gptq(*args, **options))


def e8m0_blocks(draw, n, k):
    """DeepSeek-V4 before its experts were quantized to 4 bits."""
    scale = draw.power(-(-n // 128), -(-k // 128)).view(ml_dtypes.float8_e8m0fnu)
    return {".weight": draw.normal(n, k).astype(F8), ".scale": scale}


def float_blocks(draw, n, k):
    """compressed-tensors of strategy "block"."""
    scale = draw.positive(-(-n // 128), -(-k // 128)).astype(BF16)
    return {".weight": draw.normal(n, k).astype(F8), ".weight_scale": scale}


@pytest.mark.parametrize(
    ("store", "part"), ((e8m0_blocks, ".scale"), (float_blocks, ".weight_scale"))
)
@pytest.mark.parametrize("shapes", (TALL, {n: (128, 128) for n in TALL}), ids=("tall", "one"))
def test_blocks_by_other_names(store, part, shapes, tmp_path):
    files = Files("qwen3_moe", QWEN, store, shapes=shapes)
    path, tensors = folder(tmp_path, files)
    hidden = shapes["up_proj"][1]
    tensors["model.layers.0.mlp.gate.weight"] = np.zeros((E, hidden), BF16)
    config = json.loads((path / "config.json").read_text())
    layer = jaxmoe.load(save_folder(path, config, tensors))[0]
    for name in ("gate", "up", "down"):
        parts = stacked(tensors, files, f"{name}_proj")
        assert_same(
            getattr(layer.experts, name), checkpoints.from_block(parts[".weight"], parts[part])
        )


def test_deepseek_v4_of_8_bits(tmp_path):
    """`expert_dtype` "fp8", in names of its own."""
    config = {**FILES["deepseek_v4"].config, "expert_dtype": "fp8"}
    at = "layers.{l}.ffn."
    files = Files("deepseek_v4", config, e8m0_blocks, at, W123, "gate.bias")
    layer, _ = loaded(tmp_path, files)
    assert layer.experts.down.format == "fp8_block"
    assert layer(jnp.ones((T, H), jnp.bfloat16)).shape == (T, H)


def quark(draw, n, k):
    """AMD Quark's MXFP4: the tensors of compressed-tensors, by names of plain weights."""
    parts = mxfp4(draw, n, k)
    return {".weight": parts[".weight_packed"], ".weight_scale": parts[".weight_scale"]}


def test_mxfp4_of_quark(tmp_path):
    files = Files("qwen3_moe", QWEN, quark, quantization={"quant_method": "quark"})
    layer, tensors = loaded(tmp_path, files)
    parts = stacked(tensors, files, "down_proj")
    want = checkpoints.from_mxfp4(parts[".weight"], parts[".weight_scale"])
    assert_same(layer.experts.down, want)


def matrix_scale(draw, n, k, shape=()):
    """FP8 with one scale a matrix, and one of its inputs."""
    return {
        ".weight": draw.normal(n, k).astype(F8),
        ".weight_scale": np.float32(1 + draw.u8(*shape)).reshape(shape),
        ".input_scale": np.float32(1 + draw.u8(*shape) / 8).reshape(shape),
    }


def matrix_scale_1(draw, n, k):
    return matrix_scale(draw, n, k, (1,))


def rows_scale(draw, n, k):
    return matrix_scale(draw, n, k) | {".weight_scale": draw.positive(n, 1).astype(BF16)}


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def largest(tensors, *parts):
    return max(float(a.max()) for n, a in tensors.items() if n.endswith(parts))


@pytest.mark.parametrize("store", (matrix_scale, matrix_scale_1))
@pytest.mark.parametrize("over", (False, True), ids=("one device", "mesh"))
def test_static_scales_of_inputs(store, over, tmp_path):
    path, tensors = folder(tmp_path, Files("qwen3_moe", QWEN, store, quantization=STATIC))
    mesh = jax.make_mesh((4,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    experts = jaxmoe.load(path, **({"mesh": mesh, "axis": "e"} if over else {}))[0].experts
    assert experts.down.format == "fp8_tensor"
    x_scale = largest(tensors, "gate_proj.input_scale", "up_proj.input_scale")
    assert_equal(experts.x_scale, jnp.float32(x_scale))
    assert_equal(experts.h_scale, jnp.float32(largest(tensors, "down_proj.input_scale")))
    if not over:
        x = jnp.ones((T, H), jnp.bfloat16)
        assert jaxmoe.load(path)[0](x).dtype == jnp.bfloat16
        assert inspect.main([str(path)]) == 0


@pytest.mark.parametrize(
    ("store", "said"),
    ((rows_scale, STATIC), (matrix_scale, STATIC | {"activation_scheme": "dynamic"})),
)
def test_scales_of_inputs_that_are_not_used(store, said, tmp_path):
    layer, _ = loaded(tmp_path, Files("qwen3_moe", QWEN, store, quantization=said))
    assert layer.experts.x_scale is None and layer.experts.h_scale is None


def tokens_too(store, part):
    """Weights, and a scale of their inputs."""

    def scaled(draw, n, k):
        return {**store(draw, n, k), part: np.float32([1 + draw.u8() / 8])}

    return scaled


W4A8 = compressed_tensors({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128})
STATIC_TOKENS = {
    "ModelOpt": (modelopt, ".input_scale", "nvfp4", {}),
    "compressed-tensors": (nvfp4, ".input_global_scale", "nvfp4", {}),
    "W4A8": (int4_g128, ".input_scale", "e4m3", W4A8),
}


@pytest.mark.parametrize("kind", STATIC_TOKENS)
def test_static_scales_of_tokens_in_a_format_of_their_own(kind, tmp_path, capsys):
    store, part, token_format, said = STATIC_TOKENS[kind]
    files = Files("qwen3_moe", QWEN, tokens_too(store, part), shapes=WIDE, quantization=said)
    path, tensors = folder(tmp_path, files)
    plain = jaxmoe.load(path)[0]
    assert plain.experts.x_scale is None and plain.experts.token_format is None
    layer = jaxmoe.load(path, token_format=token_format)[0]

    def static(*names):
        scales = [a for n, a in tensors.items() if n.endswith(tuple(f"{m}{part}" for m in names))]
        assert len(scales) == E * len(names) and len({float(s[0]) for s in scales}) > 1
        return jnp.float32(max(scales)[0] if part == ".input_scale" else 1 / min(scales)[0])

    scales = {"x_scale": static("gate_proj", "up_proj"), "h_scale": static("down_proj")}
    want = dataclasses.replace(plain.experts, token_format=token_format, **scales)
    assert_same(layer.experts, want)
    assert layer(jnp.ones((T, H), jnp.bfloat16)).dtype == jnp.bfloat16
    assert inspect.main([str(path), "--token-format", token_format]) == 0
    assert f"tokens: {token_format}" in capsys.readouterr().out


def test_tokens_without_static_scales_have_dynamic_ones(tmp_path):
    path, _ = folder(tmp_path, Files("qwen3_moe", QWEN, tokens_too(mxfp8, ".input_scale")))
    experts = jaxmoe.load(path, token_format="mxfp8")[0].experts
    assert experts.token_format == "mxfp8" and experts.x_scale is None
    path, _ = folder(tmp_path, Files("qwen3_moe", QWEN, modelopt))
    experts = jaxmoe.load(path, token_format="nvfp4")[0].experts
    assert experts.token_format == "nvfp4" and experts.x_scale is None


def test_a_static_scale_of_tokens_that_one_expert_lacks_is_named(tmp_path):
    store = tokens_too(modelopt, ".input_scale")
    path, tensors = folder(tmp_path, Files("qwen3_moe", QWEN, store))
    name = "model.layers.0.mlp.experts.2.up_proj.input_scale"
    del tensors[name]
    save_folder(path, json.loads((path / "config.json").read_text()), tensors)
    jaxmoe.load(path)
    with pytest.raises(LookupError, match=f"has no tensor '{name}'"):
        jaxmoe.load(path, token_format="nvfp4")


def test_a_format_of_tokens_that_weights_do_not_have_is_refused(tmp_path):
    path, _ = folder(tmp_path, Files("qwen3_moe", QWEN, modelopt))
    with pytest.raises(ValueError, match=r"layers.0.mlp: jaxmoe.Experts: token_format.*mxfp8"):
        jaxmoe.load(path, token_format="mxfp8")


@pytest.mark.parametrize("value", (0, np.nan, np.inf, (1, 1), None))
def test_a_static_scale_of_no_use_is_named(value, tmp_path):
    path, tensors = folder(tmp_path, Files("qwen3_moe", QWEN, matrix_scale, quantization=STATIC))
    name = "model.layers.0.mlp.experts.2.down_proj.input_scale"
    for e in range(E) if isinstance(value, tuple) else (2,):
        at = name.replace("experts.2", f"experts.{e}")
        tensors[at] = np.array(value or 0, np.float32)
    message = r"down_proj.input_scale=.* must be one number, positive and finite"
    if value is None:
        del tensors[name]
        message = f"has no tensor '{name}'"
    config = json.loads((path / "config.json").read_text())
    with pytest.raises((ValueError, LookupError), match=message):
        jaxmoe.load(save_folder(path, config, tensors))


@pytest.mark.parametrize("dtype", ("bfloat16", jnp.float16, np.dtype("float32")))
def test_biases_have_the_dtype_beside_quantized_weights(dtype, tmp_path):
    path, tensors, at = gpt_oss(tmp_path, quantized=True)
    layer = jaxmoe.load(path, dtype=dtype)[0]
    want = jnp.asarray(tensors[f"{at}experts.down_proj_bias"].astype(dtype))
    assert_equal(layer.experts.down_bias, want)
    assert layer(jnp.ones((T, H), dtype)).dtype == dtype


@pytest.mark.parametrize("name", ("kimi", "qwen3_gptq", "qwen3_awq"))
def test_weights_whose_scales_have_16_bits_refuse_float32(name, tmp_path):
    path, _ = folder(tmp_path, FILES[name])
    with pytest.raises(TypeError, match="jaxmoe.load: .*dtype=float32 must be bf16 or f16"):
        jaxmoe.load(path, dtype="float32")


@pytest.mark.parametrize("quantized", (True, False))
def test_inspect_of_gpt_oss(quantized, tmp_path, capsys):
    """Its biases are those of all experts, of its weights one is read."""
    path, *_ = gpt_oss(tmp_path, quantized)
    assert inspect.main([str(path)]) == 0
    assert f"{H} x {I}, 16 tokens:" in capsys.readouterr().out
