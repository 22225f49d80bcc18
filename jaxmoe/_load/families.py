"""Model families by `model_type`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmoe._load import rules
from jaxmoe._load.family import Family, Latent
from jaxmoe._load.files import OP
from jaxmoe._load.settings import Config, section

_V3_BIAS, _M2_BIAS = "gate.e_score_correction_bias", "e_score_correction_bias"
_W123 = tuple(f"experts.{{e}}.{n}" for n in ("w1", "w3", "w2"))
_JOINED = ("experts.gate_up_proj", "experts.down_proj")
_SPARSE = "block_sparse_moe"


def _biased(route: Callable[[Config], rules.Options], bias: str, **more: Any) -> Family:
    """A family whose layers all have a bias of that name."""
    return Family(route, selection_bias=bias, needed=(bias,), **more)


_SOFTMAX, _QWEN = Family(rules.softmax), Family(rules.qwen3_next)
_DEEPSEEK = _biased(rules.deepseek_v3, _V3_BIAS)
_MIXTRAL = Family(rules.renormalize, _SPARSE, _W123)
_GRANITE = Family(
    rules.renormalize, _SPARSE, ("input_linear", "output_linear"), router="router.layer"
)
_STEP = Family(
    rules.step,
    "moe",
    ("gate_proj", "up_proj", "down_proj"),
    selection_bias="router_bias",
    bias_flag=("use_moe_router_bias", True),
    activation=rules.swiglu_of_step,
    by_layer=("swiglu_limits",),
)
_BAILING = Family(
    rules.bailing,
    selection_bias="gate.expert_bias",
    bias_flag=("moe_router_enable_expert_bias", False),
)
_KIMI = _biased(
    rules.kimi_linear,
    _V3_BIAS,
    block=_SPARSE,
    weights=_W123,
    activation=rules.swiglu_of_kimi,
    latent=Latent(
        "routed_expert_hidden_size",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
        "routed_expert_norm",
        "latent_moe_use_norm",
    ),
)
_MINIMAX = Family(
    rules.minimax_m2,
    _SPARSE,
    _W123,
    selection_bias=_M2_BIAS,
    bias_flag=("use_routing_bias", None),
)
_GPT_OSS = Family(
    *(rules.renormalize, "mlp", _JOINED, "router"),
    needed=("router.bias",),
    activation=rules.swiglu_of_gpt_oss,
    order="interleaved",
    layout="kn",
    biased=True,
)

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(rules.qwen3),
    **dict.fromkeys(("qwen3_next", "mellum"), _QWEN),
    **dict.fromkeys(
        ("qwen4_exp", "lara_mini"), dataclasses.replace(_QWEN, weights=_JOINED, other=_QWEN)
    ),
    "qwen3_5_moe": Family(rules.renormalize, weights=_JOINED, other=Family(rules.renormalize)),
    "qwen3_vl_moe": Family(
        rules.renormalize, weights=_JOINED, layout="kn", other=Family(rules.renormalize)
    ),
    **dict.fromkeys(("qwen2_moe", "olmoe", "flex_olmo"), _SOFTMAX),
    "jamba": Family(rules.jamba, "feed_forward", router="router"),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m1", "minimax_text_01"), _MIXTRAL),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), _GRANITE),
    "granitemoe_swa": Family(rules.renormalize, _SPARSE, _JOINED, "router"),
    "aria": Family(
        *(rules.renormalize, "mlp", ("experts.fc1", "experts.fc2"), "router"), layout="kn"
    ),
    "flint": Family(rules.flint),
    "cohere2_moe": Family(rules.cohere2),
    "kolibri1": _biased(rules.kolibri, "^moe.router.expert_bias"),
    "mistral4": Family(rules.mistral4, weights=_JOINED),
    "mistral_large4": Family(rules.mistral_large4, "", _W123),
    "hunyuan_v1_moe": Family(rules.renormalize, router="gate.wg", by_layer=("moe_topk",)),
    "ernie4_5_moe": Family(
        rules.ernie,
        selection_bias="moe_statics.e_score_correction_bias",
        bias_flag=("moe_use_aux_free", True),
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_ocr2", "unlimited_ocr"), Family(rules.deepseek_v2)),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "dots1"), _DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm4v_moe", "solar_open", "beam"), _DEEPSEEK),
    "axk1": _DEEPSEEK,
    "axk2": dataclasses.replace(_DEEPSEEK, route=rules.axk2),
    "glm5_next": dataclasses.replace(_DEEPSEEK, activation=rules.clamped),
    **dict.fromkeys(
        ("hy_v4", "hy_v4_vl"),
        dataclasses.replace(_DEEPSEEK, weights=_JOINED, activation=rules.clamped),
    ),
    "inkling2": _biased(
        rules.inkling2,
        "gate.bias",
        weights=("experts.w13_weight", "experts.w2_weight"),
        activation=rules.softcapped,
        order="interleaved",
    ),
    "mimo_v2_flash": dataclasses.replace(_DEEPSEEK, route=rules.mimo),
    "exaone_moe": _biased(rules.deepseek_v3, _M2_BIAS),
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), _BAILING),
    "bailing_hybrid": dataclasses.replace(
        _BAILING, route=rules.bailing_hybrid, bias_flag=("moe_router_enable_expert_bias", True)
    ),
    "afmoe": _biased(rules.afmoe, "expert_bias", router="router.gate"),
    "hy_v3": _biased(rules.hy_v3, "expert_bias", router="router.gate"),
    "lfm2_moe": Family(
        rules.lfm2,
        "feed_forward",
        _W123,
        selection_bias="expert_bias",
        bias_flag=("use_expert_bias", True),
    ),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), _KIMI),
    "nemotron_h": _biased(
        rules.deepseek_v3,
        _V3_BIAS,
        block="mixer",
        weights=("experts.{e}.up_proj", "experts.{e}.down_proj"),
        activation=rules.relu2,
        gated=False,
        latent=Latent("moe_latent_size", "fc1_latent_proj", "fc2_latent_proj"),
    ),
    "deepseek_v4": Family(
        rules.deepseek_v4,
        "ffn",
        _W123,
        selection_bias="gate.bias",
        table="gate.tid2eid",
        needed=("gate.bias", "gate.tid2eid"),
        activation=rules.clamped,
    ),
    "minimax_m2": _MINIMAX,
    "minimax_m3_vl": dataclasses.replace(
        _MINIMAX, route=rules.minimax_m3, activation=rules.swiglu_of_minimax_m3
    ),
    "laguna": _biased(rules.laguna, "experts.e_score_correction_bias"),
    **dict.fromkeys(("step3p5", "step3p7"), _STEP),
    "gpt_oss": _GPT_OSS,
    "openai_privacy_filter": dataclasses.replace(_GPT_OSS, order="gate_up"),
    "llama4": Family(
        *(rules.llama4, "feed_forward", _JOINED, "router"),
        layout="kn",
        call=(("apply_weight_on_input", True),),
    ),
}


def of(config: Config) -> tuple[Family, Config]:
    """The family of a configuration, and the part of it that is the language model's."""
    text = {k: v for k, v in section(config, "text_config").items() if v is not None}
    for part in (config, text):
        kind = str(part.get("model_type", "")).removesuffix("_text")
        if kind in FAMILIES:
            # A model of several kinds of input keeps what its language model has apart.
            return FAMILIES[kind], {**config, **text} if text else config
    known = ", ".join(sorted(FAMILIES))
    raise NotImplementedError(
        f"jaxmoe.{OP}: model_type={config.get('model_type')!r} must be one of {known}. Read the "
        "files of other models as docs/checkpoints.md does"
    )
