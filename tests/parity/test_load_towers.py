"""Models with several stacks of layers, or several kinds of experts, read by jaxmoe.load."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from tests.parity import blocks, table, test_load  # noqa: E402

SMALL = {"vocab_size": 64, "num_experts": blocks.EXPERTS}
TEXT = blocks.SIZES | SMALL
TALKER = {"num_local_experts": 8, "num_experts": 8, "shared_expert_intermediate_size": 24}
# Of the decoder another width than of the encoder.
NLLB = {"d_model": 32, "encoder_ffn_dim": 16, "decoder_ffn_dim": 24, "max_position_embeddings": 64}
NLLB |= {f"{part}_layers": 2 for part in ("encoder", "decoder")}
NLLB |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
NLLB |= {f"{part}_sparse_step": 1 for part in ("encoder", "decoder")}
SWITCH = {"d_model": 32, "d_ff": 16, "d_kv": 8, "num_heads": 4, "expert_capacity": 1}
SWITCH |= {
    f"num_{name}layers": 2 for name in ("", "decoder_", "sparse_encoder_", "sparse_decoder_")
}
ERNIE = {"moe_num_experts": 16, "moe_k": 3, "moe_intermediate_size": [16, 8], "head_dim": 8}
ERNIE |= {"mlp_layer_types": ["sparse"] * 2}
ERNIE |= {
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 1, 2]}
}
VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}


def of_ernie():
    text = {k: v for k, v in (TEXT | ERNIE).items() if k != "num_experts"}
    config = transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=VISION)
    return transformers.Ernie4_5_VLMoeForConditionalGeneration(config)


def of_omni():
    layers = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    vision = {**layers, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    audio = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    audio |= {"d_model": 16, "output_dim": 32, "downsample_hidden_size": 8}
    rope = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}
    text = {k: v for k, v in TEXT.items() if k != "n_routed_experts"}
    text |= {"rope_parameters": rope, "norm_topk_prob": True}
    code = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 16}
    code |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    wave = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "decoder_dim": 32}
    wave |= {"num_attention_heads": 2, "num_key_value_heads": 2, "codebook_size": 64}
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config={"text_config": text, "vision_config": vision, "audio_config": audio},
        talker_config={
            "text_config": text | TALKER | {"norm_topk_prob": False},
            "code_predictor_config": code,
            "thinker_hidden_size": 32,
            "spatial_merge_size": 2,
        },
        code2wav_config=wave,
    )
    return transformers.Qwen3OmniMoeForConditionalGeneration(config)


def of_nllb(block: Any, x: Any) -> Any:
    """Router and experts of a block, which runs two of its experts only if it is called."""
    _, weights, _ = block.router(x)
    results = (weights[:, [e]] * block.experts[f"expert_{e}"](x) for e in range(block.num_experts))
    return (sum(results) * (1 - block.experts.moe_token_dropout)).numpy()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and by tower where the block of its layer 1 is."""

    model: Callable[[], Any]
    towers: dict[str, str]
    forward: Callable[[Any, Any], Any] = test_load.routed


def of_switch(block: Any, x: Any) -> Any:
    return block(x.reshape(2, -1, x.shape[1])).reshape(x.shape).numpy()


CASES = {
    "ernie4_5_vl_moe": Case(
        of_ernie,
        {n: f"model.language_model.layers.1.mlp.{n}_moe" for n in ("text", "vision")},
    ),
    "nllb-moe": Case(
        lambda: transformers.NllbMoeForConditionalGeneration(
            transformers.NllbMoeConfig(**SMALL, **NLLB)
        ),
        {n: f"model.{n}.layers.1.ffn" for n in ("encoder", "decoder")},
        of_nllb,
    ),
    "qwen3_omni_moe": Case(
        of_omni,
        {
            "thinker": "thinker.model.language_model.layers.1.mlp",
            "talker": "talker.model.layers.1.mlp",
        },
    ),
    "switch_transformers": Case(
        lambda: transformers.SwitchTransformersForConditionalGeneration(
            transformers.SwitchTransformersConfig(**SMALL, **SWITCH)
        ),
        {"encoder": "encoder.block.1.layer.1.mlp", "decoder": "decoder.block.1.layer.2.mlp"},
        of_switch,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_each_tower_of_a_saved_model_is_read(name, tmp_path):
    case = CASES[name]
    model = case.model().eval()
    test_load.draw(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tower=None must be '.*' or '.*' for model_type="):
        jaxmoe.load(tmp_path)
    for tower, at in case.towers.items():
        same(jaxmoe.load(tmp_path, tower=tower)[1], model.get_submodule(at), case.forward)


def same(layer, block, forward):
    x = blocks.tokens()
    with torch.no_grad():
        want = forward(block, x.reshape(-1, blocks.HIDDEN))
    got = layer(jnp.asarray(x.numpy())).reshape(-1, blocks.HIDDEN)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tower", CASES["qwen3_omni_moe"].towers)
def test_a_tower_saved_alone_needs_no_name(tower, tmp_path):
    model, at = of_omni().eval(), CASES["qwen3_omni_moe"].towers[tower]
    test_load.draw(model)
    getattr(model, tower).save_pretrained(tmp_path)
    same(jaxmoe.load(tmp_path)[1], model.get_submodule(at), test_load.routed)


@pytest.mark.filterwarnings("ignore")
def test_towers_with_the_same_weights_are_one(tmp_path):
    text = {**TEXT, "top_k_experts": 3, "n_routed_experts": None, "num_local_experts": None}
    layers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "model_type": "gemma4_vision"}
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=layers | heads)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    test_load.draw(model)
    model.save_pretrained(tmp_path)
    (case, _) = (case for case in table.CASES if case.family == "diffusion_gemma")
    same(
        jaxmoe.load(tmp_path)[1],
        model.get_submodule("model.decoder.layers.1"),
        lambda block, x: case.forward(block, x).numpy(),
    )
