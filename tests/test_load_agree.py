"""Where files and their configuration say different things, or the same in another place."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe import checkpoints
from jaxmoe._load import families
from tests.test_load import FILES, Draw, E, H, I, folder, gpt_oss, save_folder
from tests.test_load_refusals import AT, config_of, refuses

F8 = ml_dtypes.float8_e4m3fn
QWEN = {"model_type": "qwen3_5_moe", "num_experts": E, "num_experts_per_tok": 2}


def stacked(**parts):
    """Weights of all experts in one tensor, with further parts by name."""
    draw = Draw(1)
    out = {f"{AT}gate.weight": np.float32(draw.normal(E, H))}
    for name, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        out[f"{AT}experts.{name}.weight"] = draw.normal(E, n, k).astype(F8)
        out |= {f"{AT}experts.{name}.{part}": of(n, k) for part, of in parts.items()}
    return out


def ones(*shape):
    return lambda n, k: np.ones(shape, np.float32)


@pytest.mark.parametrize("shape", ((E,), (E, 1)))
def test_stacked_matrices_have_scales_of_inputs(shape, tmp_path):
    static = {**QWEN, "quantization_config": {"activation_scheme": "static"}}
    tensors = stacked(weight_scale=ones(*shape))
    message = r"no tensor '.*experts.gate_up_proj.input_scale'"
    refuses(tmp_path, tensors, LookupError, message, static)
    of_inputs = np.arange(1, E + 1, dtype=np.float32).reshape(shape)
    tensors = stacked(weight_scale=ones(*shape), input_scale=lambda n, k: of_inputs * n)
    experts = jaxmoe.load(save_folder(tmp_path, static, tensors))[0].experts
    assert experts.gate_up.format == "fp8_tensor"
    assert float(experts.x_scale) == E * 2 * I and float(experts.h_scale) == E * H
    of_inputs[1] = 0
    tensors = stacked(weight_scale=ones(*shape), input_scale=lambda n, k: of_inputs * n)
    message = r"input_scale=.* must be one number, or one for each expert, positive and finite"
    refuses(tmp_path, tensors, ValueError, message, static)


def test_stacked_blocks_may_be_called_weight_scale(tmp_path):
    scales = {
        "weight_scale": lambda n, k: np.full((E, -(-n // 128), -(-k // 128)), 0.5, np.float32)
    }
    tensors = stacked(**scales)
    down = jaxmoe.load(save_folder(tmp_path, QWEN, tensors))[0].experts.down
    assert down.format == "fp8_block"
    want = tensors[f"{AT}experts.down_proj.weight"].astype(np.float32) / 2
    np.testing.assert_array_equal(jaxmoe.dequantize(down), want)


@pytest.mark.parametrize("size", ([96, 96], [128, 64], "x"))
def test_blocks_of_another_size_are_named(size, tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3_fp8"])
    config = config_of(path)
    config["quantization_config"] = {"weight_block_size": [128, 128]}
    assert jaxmoe.load(save_folder(path, config, tensors))
    config["quantization_config"] = {"weight_block_size": size}
    refuses(path, tensors, NotImplementedError, "0.gate_proj.weight has weight_block_size", config)


def test_greedy_deepseek_v2_is_not_divided_by_the_sum():
    base = {"model_type": "deepseek_v2", "topk_method": "greedy", "routed_scaling_factor": 16.0}
    base |= {"n_routed_experts": 4, "num_experts_per_tok": 2}
    family, config = families.of(base | {"norm_topk_prob": False})
    assert family.routing(config)["scale"] == 16.0
    with pytest.raises(NotImplementedError, match="has norm_topk_prob=True, which must be False"):
        family.routing({**config, "norm_topk_prob": True})


@pytest.mark.parametrize(
    ("name", "other"), (("num_experts_per_tok", "moe_topk"), ("num_experts", "num_local_experts"))
)
def test_one_number_by_two_names_is_one(name, other, tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"])
    config = config_of(path)
    assert jaxmoe.load(save_folder(path, config | {other: config[name]}, tensors))
    two = config | {other: config[name] + 1}
    refuses(path, tensors, ValueError, f"{name}=.* and {other}=.*, which must be one number", two)


def test_more_experts_than_any_files_have_are_refused_at_once(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"])
    config = config_of(path) | {"num_experts": 10**12}
    refuses(path, tensors, LookupError, rf"{10**12} experts, .* no tensor '.*experts.{E}", config)


@pytest.mark.parametrize(
    ("said", "message"),
    (
        ({"w_bit": 8}, "has 8 bits, not 4"),
        ({"version": "GEMV"}, "is packed for version 'GEMV', not gemm"),
    ),
)
def test_awq_words_of_other_kinds_are_refused(said, message, tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3_awq"])
    config = config_of(path)
    quantization = {**config["quantization_config"], "version": "gemm", "w_bit": 4}
    config["quantization_config"] = quantization
    assert jaxmoe.load(save_folder(path, config, tensors))
    config["quantization_config"] = quantization | said
    refuses(path, tensors, NotImplementedError, f"gate_proj.qweight {message}", config)


@pytest.mark.parametrize(("key", "value"), (("swiglu_limit", 0), ("swiglu_alpha", float("inf"))))
def test_constants_of_an_activation_are_those_of_the_configuration(key, value, tmp_path):
    path, *_ = gpt_oss(tmp_path, False)
    (path / "config.json").write_text(json.dumps(config_of(path) | {key: value}))
    with pytest.raises(ValueError, match=r"^jaxmoe.load: config.json: jaxmoe.Swiglu: "):
        jaxmoe.load(path)


def test_an_activation_of_null_is_none_that_is_said(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"])
    config = config_of(path) | {"hidden_act": None}
    assert jaxmoe.load(save_folder(path, config, tensors))[0].experts.activation == "swiglu"


def test_a_tower_is_a_name(tmp_path):
    path, _ = folder(tmp_path, FILES["qwen3"])
    with pytest.raises(ValueError, match=r"tower=\['text'\] must be"):
        jaxmoe.load(path, tower=["text"])


def words(*shape, dtype=jnp.uint8):
    return jnp.ones(shape, dtype)


READERS = {
    "from_mxfp4": lambda **dtype: checkpoints.from_mxfp4(
        words(2, 64, 64), words(2, 64, 4), **dtype
    ),
    "from_int4": lambda **dtype: checkpoints.from_int4(
        words(2, 64, 16, dtype=jnp.int32), words(2, 64, 1, dtype=jnp.bfloat16), **dtype
    ),
    "from_scales": lambda **dtype: checkpoints.from_scales(
        words(2, 64, 64, dtype=jnp.int8), jnp.ones((2, 64, 1)), weight_layout="nk", **dtype
    ),
    "from_tokens": lambda **dtype: checkpoints.from_tokens(
        words(4, 64), words(4, 2), format="mxfp8", **dtype
    ),
    "from_vllm_w4a8": lambda **dtype: checkpoints.from_vllm_w4a8(
        words(1, 64, 16, dtype=jnp.int32),
        words(1, 1, 64, dtype=jnp.float8_e4m3fn),
        jnp.ones((1, 64, 1)),
        **dtype,
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_dtype_is_named(name):
    with pytest.raises(TypeError, match=rf"checkpoints.{name}: dtype='foo' must be bfloat16, "):
        READERS[name](dtype="foo")


def test_tokens_and_nothing_are_no_weights():
    tokens = jaxmoe.quantize_tokens(jnp.ones((64, 128)), "mxfp4")
    with pytest.raises(ValueError, match="q must be weights in mxfp4, not mxfp4 of layout tokens"):
        checkpoints.to_mxfp4(tokens)
    with pytest.raises(TypeError, match="quant_scales must be a list of arrays"):
        checkpoints.from_flashinfer(jnp.ones((2, 4, 4)), jnp.ones((2, 4, 4)), None)
