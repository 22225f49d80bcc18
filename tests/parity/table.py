"""How each MoE block of transformers is made tiny, and run; docs/models.md has its calls."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.parity import layers

GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
ONE_GROUP = {**GROUPS, "n_group": 1, "topk_group": 1}
GREEDY = {**GROUPS, "topk_method": "greedy"}
OF_GROUPS = {**GROUPS, "topk_method": "group_limited_greedy"}
BOTH = ({"norm_topk_prob": True}, {"norm_topk_prob": False})
ERNIE = {"moe_num_experts": 16, "moe_k": 3, "moe_num_shared_experts": 2}
GEMMA = {"enable_moe_block": True, "top_k_experts": 3}
STEP = {"share_expert_dim": 24, "moe_router_scaling_factor": 2.5}
V4 = {"routed_scaling_factor": 1.5, "swiglu_limit": 0.5, "vocab_size": 64}
NEMOTRON = {**GROUPS, "moe_shared_expert_intermediate_size": 24}
DBRX = {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 16, "moe_top_k": 3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A block of transformers, and a row of docs/models.md.

    Attributes:
      family: the folder of the model in transformers.
      block: its class. Where a class has several cases, they are in the order of its rows.
      config: class of its configuration; None for a namespace with the same attributes.
      settings: of the tiny configuration, beside `blocks.SIZES`.
      variants: settings to test one by one.
      own: computes the layer where that is not one call of `moe_mlp`.
      arguments: of the class, after the configuration.
      inputs: of the block, beside the tokens: lists of integers.
      forward: runs the block, where it is not called with tokens alone.
      shift: added to the selection bias, so that some keys of kept groups are negative.
    """

    family: str
    block: str
    config: str | None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    variants: tuple[dict[str, Any], ...] = ({},)
    own: Callable[[layers.Layer], Any] | None = None
    arguments: tuple[Any, ...] = ()
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    forward: Callable[..., Any] | None = None
    shift: float = 0.0


def normalized(family: str, block: str, config: str) -> Case:
    """A block whose weights may be divided by their sum."""
    return Case(family, block, config, variants=BOTH)


def grouped(
    family: str,
    block: str,
    config: str | None,
    settings: dict[str, Any] = GROUPS,
    own: Callable[[layers.Layer], Any] | None = None,
) -> Case:
    """A block with the router of DeepSeek-V3."""
    return Case(family, block, config, settings, BOTH, own, shift=-0.65)


def _gemma4(layer: Any, x: Any) -> Any:
    """The routed part of a layer."""
    x = x.reshape(-1, x.shape[-1])
    _, weights, expert_ids = layer.router(x)
    return layer.experts(layer.pre_feedforward_layernorm_2(x), expert_ids, weights)


def _nllb(block: Any, x: Any) -> Any:
    """Router and experts of a block, which runs two of its experts only if it is called."""
    x = x.reshape(-1, x.shape[-1])
    _, weights, _ = block.router(x)
    results = (weights[:, [e]] * block.experts[f"expert_{e}"](x) for e in range(block.num_experts))
    return sum(results) * (1 - block.experts.moe_token_dropout)


def _map_and_reduce(block: Any, x: Any) -> Any:
    queries, _, where = block.map(x)
    return block.reduce(queries, where)


def _zaya(block: Any, x: Any) -> Any:
    """A block behind one whose router had a state of ones."""
    return block(x, x.new_ones((*x.shape[:-1], block.gate.router_hidden_size)))


def _of_gemma4(family: str, block: str, config: str) -> Case:
    own = layers.normed_tokens
    return Case(family, block, config, GEMMA, own=own, arguments=(0,), forward=_gemma4)


CASES = (
    # The families that most people use; the others follow by name.
    Case("mixtral", "MixtralSparseMoeBlock", "MixtralConfig"),
    normalized("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig"),
    normalized("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig"),
    normalized("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig"),
    Case("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", OF_GROUPS),
    Case("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", GREEDY),
    grouped("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config"),
    grouped("deepseek_v32", "DeepseekV32MoE", "DeepseekV32Config"),
    Case(
        "deepseek_v4",
        "DeepseekV4SparseMoeBlock",
        "DeepseekV4Config",
        {**V4, "mlp_layer_types": ["moe"] * 2},
        arguments=(0,),
    ),
    Case(
        "deepseek_v4",
        "DeepseekV4SparseMoeBlock",
        "DeepseekV4Config",
        {**V4, "mlp_layer_types": ["hash_moe"] * 2},
        arguments=(0,),
        inputs={"input_ids": [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 63]]},
    ),
    Case("gpt_oss", "GptOssMLP", "GptOssConfig", {"swiglu_limit": 1.0}),
    Case("llama4", "Llama4TextMoe", "Llama4TextConfig", {"num_experts_per_tok": 1}),
    normalized("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig"),
    Case("granitemoe", "GraniteMoeMoE", "GraniteMoeConfig"),
    grouped("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig"),
    Case("jamba", "JambaSparseMoeBlock", "JambaConfig"),
    Case(
        "phimoe",
        "PhimoeSparseMoeBlock",
        "PhimoeConfig",
        {"num_experts_per_tok": 2, "router_jitter_noise": 0.3},
        own=layers.sparse_mixer,
    ),
    Case("dbrx", "DbrxFFN", "DbrxConfig", {"d_model": 32, "ffn_config": DBRX}),
    Case("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig", ERNIE),
    Case("minimax", "MiniMaxSparseMoeBlock", "MiniMaxConfig"),
    Case("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config"),
    Case("hunyuan_v1_moe", "HunYuanMoEV1Moe", "HunYuanMoEV1Config", {"moe_topk": 3}),
    grouped("dots1", "Dots1MoE", "Dots1Config"),
    grouped("kimi_linear", "KimiLinearMoE", "KimiLinearConfig"),
    Case("afmoe", "AfmoeSparseMoeBlock", "AfmoeConfig", {"route_scale": 2.5}),
    Case("aria", "AriaTextMoELayer", "AriaTextConfig", {"moe_num_experts": 16, "moe_topk": 3}),
    grouped("axk1", "AXK1MoE", "AXK1Config", own=layers.normed_result),
    grouped("axk2", "AXK2MoE", "AXK2Config"),
    grouped("bailing_hybrid", "BailingHybridMoE", "BailingHybridConfig"),
    grouped("beam", "BeamMoE", "BeamConfig"),
    Case("cohere2_moe", "Cohere2MoeSparseMoeBlock", "Cohere2MoeConfig", {"num_shared_experts": 0}),
    Case(
        "cohere2_moe",
        "Cohere2MoeSparseMoeBlock",
        "Cohere2MoeConfig",
        {"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"},
        BOTH,
    ),
    Case("deepseek_ocr2", "DeepseekOcr2TextMoe", "DeepseekOcr2TextConfig", OF_GROUPS),
    _of_gemma4("diffusion_gemma", "DiffusionGemmaEncoderTextLayer", "DiffusionGemmaTextConfig"),
    _of_gemma4("diffusion_gemma", "DiffusionGemmaDecoderTextLayer", "DiffusionGemmaTextConfig"),
    Case("doge", "DogeCDMoE", "DogeConfig", own=layers.product_keys),
    grouped(
        "dots3_note",
        "Dots3NoteTextMoE",
        None,
        {**GROUPS, "hidden_act": "silu", "shared_experts_intermediate_size": 16},
    ),
    Case(
        "dots3_note",
        "Dots3NoteVisionMoE",
        None,
        {"hidden_act": "silu", "router_scaling_factor": 2.5},
        arguments=(0,),
    ),
    Case(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeMoeBlock",
        "Ernie4_5_VLMoeTextConfig",
        {**ERNIE, "moe_intermediate_size": [16, 8]},
        own=layers.two_modalities,
        inputs={"moe_mm_token_type_ids": [[0, 1, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0]]},
    ),
    grouped("exaone_moe", "ExaoneMoeSparseMoEBlock", "ExaoneMoeConfig"),
    normalized("flex_olmo", "FlexOlmoSparseMoeBlock", "FlexOlmoConfig"),
    normalized("flint", "FlintSparseMoeBlock", "FlintConfig"),
    _of_gemma4("gemma4", "Gemma4TextDecoderLayer", "Gemma4TextConfig"),
    grouped("glm4_moe_lite", "Glm4MoeLiteMoE", "Glm4MoeLiteConfig"),
    grouped("glm4v_moe", "Glm4vMoeTextMoE", "Glm4vMoeTextConfig"),
    grouped(
        "glm5_next",
        "Glm5NextTextMoE",
        "Glm5NextTextConfig",
        {**GROUPS, "swiglu_limit": 0.5, "num_key_value_heads": 4},
    ),
    grouped("glm_moe_dsa", "GlmMoeDsaMoE", "GlmMoeDsaConfig"),
    Case("granitemoe_swa", "GraniteMoeSWAMoE", "GraniteMoeSWAConfig"),
    Case("granitemoehybrid", "GraniteMoeHybridMoE", "GraniteMoeHybridConfig", {"mamba_n_heads": 8}),
    Case("granitemoeshared", "GraniteMoeSharedMoE", "GraniteMoeSharedConfig"),
    Case("hy_v3", "HYV3MoE", "HYV3Config", {"router_scaling_factor": 2.5}),
    grouped("hy_v4", "HYV4MoE", "HYV4Config", {**GROUPS, "swiglu_limit": 0.5}),
    grouped("hy_v4_vl", "HYV4VLMoE", "HYV4VLTextConfig", {**GROUPS, "swiglu_limit": 0.5}),
    Case("inkling", "InklingMoE", "InklingTextConfig", own=layers.appended_experts),
    Case(
        "inkling2",
        "Inkling2SparseMoeBlock",
        "Inkling2TextConfig",
        {"mlp_gate_softcap": 1.0, "mlp_up_softcap": 1.5},
    ),
    Case(
        "inkling2_loop",
        "Inkling2LoopSparseMoeBlock",
        "Inkling2LoopTextConfig",
        {"mlp_gate_softcap": 1.0, "mlp_up_softcap": 1.5},
    ),
    Case("jetmoe", "JetMoeMoE", "JetMoeConfig"),
    Case(
        "jetmoe",
        "JetMoeMoA",
        "JetMoeConfig",
        {"kv_channels": 8},
        own=layers.experts_of_attention,
        forward=_map_and_reduce,
    ),
    normalized("kolibri1", "Kolibri1SparseMoeBlock", "Kolibri1Config"),
    Case(
        "laguna",
        "LagunaSparseMoeBlock",
        "LagunaConfig",
        {"moe_router_logit_softcapping": 1.5, "moe_routed_scaling_factor": 2.5},
    ),
    normalized("lara_mini", "LaraMiniSparseMoeBlock", "LaraMiniConfig"),
    Case(
        "lfm2_moe",
        "Lfm2MoeSparseMoeBlock",
        "Lfm2MoeConfig",
        {"use_expert_bias": True, "routed_scaling_factor": 2.5},
    ),
    Case(
        "longcat_flash",
        "LongcatFlashMoE",
        "LongcatFlashConfig",
        {"moe_topk": 3, "zero_expert_num": 8, "expert_ffn_hidden_size": 16},
        own=layers.zero_experts,
    ),
    normalized("mellum", "MellumSparseMoeBlock", "MellumConfig"),
    grouped("mimo_v2_flash", "MiMoV2FlashMoE", "MiMoV2FlashConfig"),
    Case(
        "minimax_m3_vl",
        "MiniMaxM3VLSparseMoeBlock",
        "MiniMaxM3VLTextConfig",
        {"swiglu_limit": 1.0, "shared_intermediate_size": 24},
    ),
    Case("mistral4", "Mistral4MoE", "Mistral4Config", ONE_GROUP, BOTH),
    Case("mistral4", "Mistral4MoE", "Mistral4Config", GROUPS, BOTH),
    Case("mistral_large4", "MistralLarge4TextMoE", "MistralLarge4TextConfig", ONE_GROUP),
    Case(
        "muse_spark",
        "MuseSparkMoE",
        "MuseSparkTextConfig",
        {"moe_hidden_size": 24, "routed_scaling_factor": 2.5},
        own=layers.normed_rows,
    ),
    grouped("nemotron_h", "NemotronHMoE", "NemotronHConfig", NEMOTRON),
    grouped(
        "nemotron_h",
        "NemotronHMoE",
        "NemotronHConfig",
        {**NEMOTRON, "moe_latent_size": 24},
        layers.latent,
    ),
    Case(
        "nllb_moe",
        "NllbMoeSparseMLP",
        "NllbMoeConfig",
        {"d_model": 32},
        arguments=(16,),
        forward=_nllb,
    ),
    Case(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterMLP",
        "OpenAIPrivacyFilterConfig",
        {"swiglu_limit": 1.0},
    ),
    Case("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeTextConfig"),
    normalized("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextSparseMoeBlock", "Qwen3OmniMoeTextConfig"),
    normalized(
        "qwen3_omni_moe", "Qwen3OmniMoeTalkerTextSparseMoeBlock", "Qwen3OmniMoeTalkerTextConfig"
    ),
    Case("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock", "Qwen3VLMoeTextConfig"),
    normalized("qwen4_exp", "Qwen4ExpTextSparseMoeBlock", "Qwen4ExpTextConfig"),
    grouped("solar_open", "SolarOpenMoE", "SolarOpenConfig"),
    Case(
        "step3p7",
        "Step3p7SparseMoeBlock",
        "Step3p7TextConfig",
        {**STEP, "swiglu_limits": [0.0], "swiglu_limits_shared": [0.0]},
        arguments=(0,),
    ),
    Case(
        "step3p7",
        "Step3p7SparseMoeBlock",
        "Step3p7TextConfig",
        {**STEP, "swiglu_limits": [0.2], "swiglu_limits_shared": [0.3]},
        arguments=(0,),
    ),
    Case(
        "switch_transformers",
        "SwitchTransformersSparseMLP",
        "SwitchTransformersConfig",
        {"d_model": 32, "d_ff": 16, "expert_capacity": 1},
        own=layers.capacity,
    ),
    Case("unlimited_ocr", "UnlimitedOcrTextMoe", "UnlimitedOcrTextConfig", OF_GROUPS),
    Case(
        "vitpose_backbone",
        "VitPoseBackboneMoeMLP",
        "VitPoseBackboneConfig",
        {"num_experts": 4, "part_features": 8, "mlp_ratio": 2},
        own=layers.experts_by_data_set,
        inputs={"indices": [3, 1]},
    ),
    Case(
        "zaya",
        "ZayaSparseMoeBlock",
        "ZayaConfig",
        {"num_experts_per_tok": 1},
        own=layers.deep_router,
        arguments=(1,),
        forward=_zaya,
    ),
)

# Classes that look like a block and have no row, by (family, class), and why.
WITHOUT_ROW = {
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeSparseMoeBlock"): "one half of Ernie4_5_VLMoeMoeBlock",
    ("jetmoe", "JetMoeAttention"): "the attention around JetMoeMoA",
    ("vitpose_backbone", "VitPoseNaiveMoe"): "the experts of VitPoseBackboneMoeMLP",
}
