"""Model families: where their files have the parts of a layer, and how they route."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxmoe._load.shards import OP
from jaxmoe.activation import Activation, Swiglu

Config = Mapping[str, Any]


def needed(config: Config, *names: str) -> Any:
    """The value of the first of these names that the configuration has."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"jaxmoe.{OP}: config.json has no {' or '.join(names)}")


def top_k(config: Config) -> int:
    return int(needed(config, "num_experts_per_tok", "moe_topk"))


def num_experts(config: Config) -> int:
    return int(needed(config, "n_routed_experts", "num_experts", "num_local_experts"))


def _renormalize(config: Config) -> dict[str, Any]:
    return {"top_k": top_k(config)}


def _softmax(config: Config) -> dict[str, Any]:
    norm = bool(config.get("norm_topk_prob", False))
    return {"top_k": top_k(config), "method": "softmax", "norm_topk_prob": norm}


def _qwen3(config: Config) -> dict[str, Any]:
    return _renormalize(config) if config.get("norm_topk_prob") else _softmax(config)


def _deepseek_v2(config: Config) -> dict[str, Any]:
    scale = {"scale": float(config.get("routed_scaling_factor") or 1.0)}
    if needed(config, "topk_method") == "greedy":
        return _softmax(config) | scale
    groups = {"num_groups": needed(config, "n_group"), "top_groups": needed(config, "topk_group")}
    return {"top_k": top_k(config), "method": "deepseek_v2"} | groups | scale


def _deepseek_v3(config: Config) -> dict[str, Any]:
    return {
        "top_k": top_k(config),
        "method": "deepseek_v3",
        "num_groups": int(config.get("n_group") or 1),
        "top_groups": int(config.get("topk_group") or 1),
        "scale": float(config.get("routed_scaling_factor") or 1.0),
        "norm_topk_prob": bool(config.get("norm_topk_prob", True)),
    }


def _deepseek_v4(config: Config) -> dict[str, Any]:
    scale = float(needed(config, "routed_scaling_factor"))
    return {"top_k": top_k(config), "method": "sqrtsoftplus", "scale": scale}


def _minimax2(config: Config) -> dict[str, Any]:
    return {"top_k": top_k(config), "method": "minimax2"}


def _llama4(config: Config) -> dict[str, Any]:
    return {"top_k": top_k(config), "method": "llama4"}


_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


def _gated(config: Config) -> str:
    name = config.get("hidden_act", "silu")
    if name not in _GATED:
        raise ValueError(f"jaxmoe.{OP}: hidden_act={name!r} must be one of {', '.join(_GATED)}")
    return _GATED[name]


def _gpt_oss(config: Config) -> Activation:
    return Swiglu(1.702, 1.0, float(config.get("swiglu_limit") or 7.0))


def _clamped(config: Config) -> Activation:
    return Swiglu(limit=float(needed(config, "swiglu_limit")))


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of a layer's tensors and the meaning of its configuration.

    Attributes:
      block: the module of a layer that has its router and experts, as in `layers.3.<block>`.
      weights: stems of gate, up and down in it, or of gate_up and down; `{e}` is an expert.
      router: stem of the router's weight in it.
      selection_bias: name in it of what is added to scores for the choice, if there may be one.
      route: from the configuration to the options of `jaxmoe.route`.
      activation: from the configuration to that of `jaxmoe.Experts`.
      order, layout: of plain weights, as in `jaxmoe.Experts`.
      call: options of `jaxmoe.moe_mlp`.
      biased: experts have biases, whose names are those of their weights and `_bias`.
    """

    route: Callable[[Config], dict[str, Any]]
    block: str = "mlp"
    weights: tuple[str, ...] = tuple(f"experts.{{e}}.{n}_proj" for n in ("gate", "up", "down"))
    router: str = "gate"
    selection_bias: str | None = None
    activation: Callable[[Config], str | Activation] = _gated
    order: str = "gate_up"
    layout: str = "nk"
    call: tuple[tuple[str, Any], ...] = ()
    biased: bool = False

    @property
    def stacked(self) -> bool:
        """Whether one tensor has a weight of all experts."""
        return "{e}" not in self.weights[0]

    def blocks(self, names: tuple[str, ...]) -> dict[int, str]:
        """The module of each layer with experts, by the layer's number, among names of tensors."""
        stem = re.escape(self.weights[-1]).replace(re.escape("{e}"), r"\d+")
        pattern = re.compile(
            rf"((?:.*\.)?layers\.(\d+)\.{re.escape(self.block)})\.{stem}(?:[._].*)?"
        )
        found = (pattern.fullmatch(name) for name in names)
        return {int(m[2]): m[1] for m in sorted(filter(None, found), key=lambda m: int(m[2]))}


_DEEPSEEK = Family(_deepseek_v3, selection_bias="gate.e_score_correction_bias")
_W123 = tuple(f"experts.{{e}}.{n}" for n in ("w1", "w3", "w2"))
_JOINED = ("experts.gate_up_proj", "experts.down_proj")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("qwen3_moe", "qwen3_next"), Family(_qwen3)),
    **dict.fromkeys(("qwen2_moe", "olmoe"), Family(_softmax)),
    **dict.fromkeys(("mixtral",), Family(_renormalize, "block_sparse_moe", _W123)),
    "deepseek_v2": Family(_deepseek_v2),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe", "glm_moe_dsa", "dots1"), _DEEPSEEK),
    "deepseek_v4": Family(
        _deepseek_v4, "ffn", _W123, selection_bias="gate.bias", activation=_clamped
    ),
    "minimax_m2": Family(
        *(_minimax2, "block_sparse_moe", _W123), selection_bias="e_score_correction_bias"
    ),
    "gpt_oss": Family(
        *(_renormalize, "mlp", _JOINED, "router"),
        activation=_gpt_oss,
        order="interleaved",
        layout="kn",
        biased=True,
    ),
    "llama4": Family(
        *(_llama4, "feed_forward", _JOINED, "router"),
        layout="kn",
        call=(("apply_weight_on_input", True),),
    ),
}


def of(config: Config) -> tuple[Family, Config]:
    """The family of a configuration, and the part of it that is the language model's."""
    text = config.get("text_config") or {}
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
