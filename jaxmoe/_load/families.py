"""Model families by `model_type`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmoe._load import rules
from jaxmoe._load.family import Family, Latent, Norms, Tower
from jaxmoe._load.files import OP
from jaxmoe._load.settings import EXPERTS, Config, section

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
_INKLING2 = _biased(
    rules.inkling2,
    "gate.bias",
    weights=("experts.w13_weight", "experts.w2_weight"),
    activation=rules.softcapped,
    order="interleaved",
)
_INKLING = _biased(
    rules.inkling,
    "gate.e_score_correction_bias",
    weights=_JOINED,
    shared="n_shared_experts",
    scale="gate.global_scale",
)
_GEMMA = Family(
    *(rules.renormalize, "", _JOINED, "router.proj"),
    activation=rules.gated_of_gemma,
    norms=Norms("pre_feedforward_layernorm_2", "router.scale", "router.per_expert_scale"),
)
# Text and images have a router each, and experts that are numbered in a row.
_ERNIE_VL = _biased(
    rules.ernie,
    "moe_statics.e_score_correction_bias",
    router_layout="kn",
    beside=("gate.weight_1",),
    tower=Tower(of_parts=2),
)
_ERNIE_IMAGES = dataclasses.replace(
    _ERNIE_VL,
    router_weight=".weight_1",
    beside=("gate.weight",),
    tower=Tower(part=1, of_parts=2),
)
_SWITCH = Family(
    rules.switch,
    "layer.1.mlp",
    ("experts.expert_{e}.wi", "experts.expert_{e}.wo"),
    "router.classifier",
    activation=rules.relu,
    gated=False,
    layers="block",
    tower=Tower("encoder"),
)
_NLLB = Family(
    rules.nllb,
    "ffn",
    ("experts.expert_{e}.fc1", "experts.expert_{e}.fc2"),
    "router.classifier",
    activation=rules.relu,
    gated=False,
    biased=True,
    tower=Tower("encoder"),
)
_DECODER = Tower("decoder")


# The parts of Qwen3-Omni, alone and where the files have both.
_THINKER, _TALKER = Family(rules.qwen3_next), Family(rules.qwen3)
_OMNI = {
    name: dataclasses.replace(part, tower=Tower(name, (f"{name}_config", "text_config")))
    for name, part in {"thinker": _THINKER, "talker": _TALKER}.items()
}

FAMILIES: dict[str, Family | dict[str, Family]] = {
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
    "dots3_note": _DEEPSEEK,
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm4v_moe", "solar_open", "beam"), _DEEPSEEK),
    "axk1": _DEEPSEEK,
    "axk2": dataclasses.replace(_DEEPSEEK, route=rules.axk2),
    "glm5_next": dataclasses.replace(_DEEPSEEK, activation=rules.clamped),
    **dict.fromkeys(
        ("hy_v4", "hy_v4_vl"),
        dataclasses.replace(_DEEPSEEK, weights=_JOINED, activation=rules.clamped),
    ),
    **dict.fromkeys(("inkling2", "inkling2_loop"), _INKLING2),
    **dict.fromkeys(
        ("inkling_mm_model", "inkling"),
        dataclasses.replace(
            _INKLING,
            weights=("experts.w13_weight", "experts.w2_weight"),
            selection_bias="gate.bias",
            needed=("gate.bias",),
            order="interleaved",
            other=_INKLING,
        ),
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
    "phimoe": Family(rules.phimoe, _SPARSE, _W123),
    "dbrx": Family(
        *(rules.dbrx, "ffn", tuple(f"experts.mlp.{n}" for n in ("w1", "v1", "w2")), "router.layer"),
        activation=rules.gated_of_dbrx,
        layout=("nk", "kn"),
        layers="blocks",
        joined=True,
        tower=Tower(sections=("ffn_config",)),
    ),
    "jetmoe": Family(
        *(rules.renormalize, "mlp", ("input_linear", "output_linear"), "router.layer"),
        activation=rules.gated_of_jetmoe,
        sum_bias="bias",
    ),
    **dict.fromkeys(("gemma4", "diffusion_gemma"), _GEMMA),
    "longcat_flash": _biased(
        rules.longcat,
        "router.e_score_correction_bias",
        router="router.classifier",
        copies="zero_expert_num",
    ),
    "qwen3_omni_moe": _OMNI,
    "qwen3_omni_moe_thinker": _THINKER,
    "qwen3_omni_moe_talker": dataclasses.replace(_TALKER, weights=_JOINED, other=_TALKER),
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "ernie4_5_moe_vl"), {"text": _ERNIE_VL, "vision": _ERNIE_IMAGES}
    ),
    "switch_transformers": {
        "encoder": _SWITCH,
        "decoder": dataclasses.replace(_SWITCH, block="layer.2.mlp", tower=_DECODER),
    },
    "nllb-moe": {"encoder": _NLLB, "decoder": dataclasses.replace(_NLLB, tower=_DECODER)},
}
# Models of transformers with layers of experts that are none of the above, and why.
_UNLIKE = {
    "doge": "its router mixes the tokens of a call, and an expert is one neuron",
    "muse_spark": "it norms what each expert returns before it is weighted",
    "zaya": "its router is an MLP, which reads what the router of the layer before gave",
    "vitpose_backbone": "it has no router: the data set of an image chooses the expert",
}


def of(config: Config, tower: str | None = None) -> tuple[Family, Config]:
    """The family of a configuration, and the part of it that is the language model's.

    Raises:
      NotImplementedError: a model that is not known, or is no model of such layers.
      ValueError: `tower` is missing, or the model has none of that name.
    """
    kinds = [
        str(part.get("model_type", "")).removesuffix("_text")
        for part in (config, section(config, "text_config"))
    ]
    for kind in kinds:
        if kind in FAMILIES:
            family = _tower(kind, FAMILIES[kind], tower)
            return family, _merged(config, family.tower)
    unlike = [f"{kind}: {_UNLIKE[kind]}" for kind in kinds if kind in _UNLIKE]
    if unlike:
        raise NotImplementedError(
            f"jaxmoe.{OP}: {unlike[0]}. docs/models.md has the calls that compute its layers, and "
            "docs/checkpoints.md how to read files"
        )
    known = ", ".join(sorted(FAMILIES))
    raise NotImplementedError(
        f"jaxmoe.{OP}: model_type={config.get('model_type')!r} must be one of {known}. Read the "
        "files of other models as docs/checkpoints.md does"
    )


def _tower(kind: str, family: Family | dict[str, Family], tower: str | None) -> Family:
    """The family of a tower, or that of all layers."""
    towers: dict[str | None, Family]
    towers = {**family} if isinstance(family, dict) else {None: family}
    if tower in [*towers]:  # which may be what no key can be
        return towers[tower]
    names = " or ".join(map(repr, towers))
    raise ValueError(f"jaxmoe.{OP}: tower={tower!r} must be {names} for model_type={kind!r}")


def _merged(config: Config, tower: Tower) -> Config:
    """A configuration with the objects in it that are the tower's, which say more of it."""
    inner: Config = config
    for name in tower.sections:
        # A model of several kinds of input keeps what its language model has apart.
        inner = section(inner, name)
        said = {k: v for k, v in inner.items() if v not in (None, "") or k not in config}
        config = {**config, **said}
    if tower.of_parts > 1:
        config = {k: v[tower.part] if _has_parts(k, v, tower) else v for k, v in config.items()}
    return config


def _has_parts(name: str, value: Any, tower: Tower) -> bool:
    return name in EXPERTS and isinstance(value, list) and len(value) == tower.of_parts
