"""Model families: where their files have the parts of a layer, and how they route."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxmoe._load.files import OP, mapping
from jaxmoe.activation import Activation, Swiglu

Config = Mapping[str, Any]


def needed(config: Config, *names: str) -> Any:
    """The value of the first of these names that the configuration has."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"jaxmoe.{OP}: config.json has no {' or '.join(names)}")


def count(config: Config, *names: str, default: int | None = None) -> int:
    """The first of these numbers, an integer of at least 1; by default one must be there."""
    return int(_number(config, names, int, 1, default))


def _real(config: Config, name: str, default: float | None = None) -> float:
    return float(_number(config, (name,), (int, float), 0, default))


def _number(config: Config, names: tuple[str, ...], kinds: Any, least: int, default: Any) -> Any:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
            what = "an integer" if kinds is int else "a number"
            raise ValueError(
                f"jaxmoe.{OP}: config.json has {name}={value!r}, which must be {what} of at least "
                f"{least}"
            )
        return value
    return needed(config, *names) if default is None else default


def _flag(config: Config, name: str, default: bool | None = None) -> bool:
    value = config.get(name)
    if value is None:
        return bool(needed(config, name) if default is None else default)
    if not isinstance(value, bool):
        raise ValueError(f"jaxmoe.{OP}: config.json has {name}={value!r}, which must be a boolean")
    return value


def _one_of(config: Config, name: str, *allowed: str) -> None:
    """Refuses another rule than those by which the layer is computed; it need not be there."""
    if (value := config.get(name)) is not None and value not in allowed:
        raise NotImplementedError(
            f"jaxmoe.{OP}: config.json has {name}={value!r}, which must be {' or '.join(allowed)} "
            f"for model_type={config.get('model_type')!r}"
        )


def section(config: Config, name: str) -> dict[str, Any]:
    """An object in the configuration, empty where there is none."""
    value = config.get(name)
    return {} if value is None else mapping(f"{name} of config.json", value)


def top_k(config: Config) -> int:
    names = "num_experts_per_tok", "moe_topk"
    k, most = count(config, *names), num_experts(config)
    if k > most:
        name = next(name for name in names if config.get(name) is not None)
        raise ValueError(
            f"jaxmoe.{OP}: config.json has {name}={k}, which must be at most {most}, the number "
            "of experts"
        )
    return k


def num_experts(config: Config) -> int:
    return count(config, "n_routed_experts", "num_experts", "num_local_experts")


def _renormalize(config: Config) -> dict[str, Any]:
    _one_of(config, "scoring_func", "softmax")
    return {"top_k": top_k(config)}


def _softmax(config: Config) -> dict[str, Any]:
    _one_of(config, "scoring_func", "softmax")
    norm = _flag(config, "norm_topk_prob", default=False)
    return {"top_k": top_k(config), "method": "softmax", "norm_topk_prob": norm}


def _qwen3(config: Config) -> dict[str, Any]:
    return (_renormalize if _flag(config, "norm_topk_prob", default=False) else _softmax)(config)


def _qwen3_next(config: Config) -> dict[str, Any]:
    return _renormalize(config) if config.get("norm_topk_prob") is None else _qwen3(config)


def _deepseek_v2(config: Config) -> dict[str, Any]:
    scale = {"scale": _real(config, "routed_scaling_factor", 1.0)}
    _one_of(config, "topk_method", "greedy", "group_limited_greedy")
    if needed(config, "topk_method") == "greedy":
        return _softmax(config) | scale
    groups = {"num_groups": count(config, "n_group"), "top_groups": count(config, "topk_group")}
    return {"top_k": top_k(config), "method": "deepseek_v2"} | groups | scale


def _deepseek_v3(config: Config) -> dict[str, Any]:
    if config.get("scoring_func") == "softmax":  # other names are taken for the family's
        _one_of(config, "scoring_func", "sigmoid")
    return {
        "top_k": top_k(config),
        "method": "deepseek_v3",
        "num_groups": count(config, "n_group"),
        "top_groups": count(config, "topk_group"),
        "scale": _real(config, "routed_scaling_factor"),
        "norm_topk_prob": _flag(config, "norm_topk_prob"),
    }


def _deepseek_v4(config: Config) -> dict[str, Any]:
    scale = _real(config, "routed_scaling_factor")
    return {"top_k": top_k(config), "method": "sqrtsoftplus", "scale": scale}


def _minimax2(config: Config) -> dict[str, Any]:
    return {"top_k": top_k(config), "method": "minimax2"}


def _llama4(config: Config) -> dict[str, Any]:
    return {"top_k": top_k(config), "method": "llama4"}


_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


def _gated(config: Config) -> str:
    name = str(config.get("hidden_act", "silu"))
    if name not in _GATED:
        raise ValueError(f"jaxmoe.{OP}: hidden_act={name!r} must be one of {', '.join(_GATED)}")
    return _GATED[name]


def _gpt_oss(config: Config) -> Activation:
    return Swiglu(1.702, 1.0, _real(config, "swiglu_limit", 7.0))


def _clamped(config: Config) -> Activation:
    return Swiglu(limit=_real(config, "swiglu_limit"))


def _always(*names: str) -> Callable[[Config], tuple[str, ...]]:
    return lambda _: names


def _bias_of_v3(config: Config) -> tuple[str, ...]:
    # A rule of its predecessors, which choose without one, is named.
    return (_V3_BIAS,) if config.get("topk_method") in (None, "noaux_tc") else ()


def _bias_of_minimax(config: Config) -> tuple[str, ...]:
    return (_M2_BIAS,) if config.get("use_routing_bias") else ()


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of a layer's tensors and the meaning of its configuration.

    Attributes:
      block: the module of a layer that has its router and experts, as in `layers.3.<block>`.
      weights: stems of gate, up and down in it, or of gate_up and down; `{e}` is an expert.
      router: stem of the router's weight in it.
      selection_bias: name in it of what is added to scores for the choice, if there may be one.
      table: name in it of the experts of each token, if there may be one.
      biases: from the configuration to names of which each layer has at least one.
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
    table: str | None = None
    biases: Callable[[Config], tuple[str, ...]] = _always()
    activation: Callable[[Config], str | Activation] = _gated
    order: str = "gate_up"
    layout: str = "nk"
    call: tuple[tuple[str, Any], ...] = ()
    biased: bool = False

    @property
    def stacked(self) -> bool:
        """Whether one tensor has a weight of all experts."""
        return "{e}" not in self.weights[0]

    def of_no_weight(self, parts: Iterable[str]) -> list[str]:
        """Of what follows `<block>.experts` in names of tensors, what belongs to no weight."""
        stems = (
            re.escape(w.removeprefix("experts")).replace(r"\{e\}", r"\d+") for w in self.weights
        )
        known = re.compile(rf"(?:{'|'.join(stems)})(?:[._].*)?")
        return sorted(part for part in parts if not known.fullmatch(part))

    def blocks(self, names: Iterable[str]) -> dict[int, str]:
        """The module of each layer with experts, by the layer's number, among names of tensors.

        Modules in one that is named `mtp` are left out: their layers are no layers of the model.

        Raises:
          ValueError: two modules have the same number.
        """
        stems = "|".join(map(re.escape, (*self.weights, f"{self.router}.weight")))
        stem = stems.replace(re.escape("{e}"), r"\d+")
        pattern = re.compile(
            rf"((?:.*\.)?layers\.(\d+)\.{re.escape(self.block)})\.(?:{stem})(?:[._].*)?"
        )
        out: dict[int, str] = {}
        for at, digits in dict.fromkeys(m.groups() for m in map(pattern.fullmatch, names) if m):
            if "mtp" in at.split("."):
                continue
            other = out.setdefault(int(digits), at)
            if other != at:
                raise ValueError(f"jaxmoe.{OP}: {other} and {at} are both layer {int(digits)}")
        return dict(sorted(out.items()))


_V3_BIAS, _M2_BIAS = "gate.e_score_correction_bias", "e_score_correction_bias"
_DEEPSEEK = Family(_deepseek_v3, selection_bias=_V3_BIAS, biases=_bias_of_v3)
_W123 = tuple(f"experts.{{e}}.{n}" for n in ("w1", "w3", "w2"))
_JOINED = ("experts.gate_up_proj", "experts.down_proj")

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(_qwen3),
    "qwen3_next": Family(_qwen3_next),
    **dict.fromkeys(("qwen2_moe", "olmoe"), Family(_softmax)),
    **dict.fromkeys(("mixtral",), Family(_renormalize, "block_sparse_moe", _W123)),
    "deepseek_v2": Family(_deepseek_v2),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe", "glm_moe_dsa", "dots1"), _DEEPSEEK),
    "deepseek_v4": Family(
        *(_deepseek_v4, "ffn", _W123),
        selection_bias="gate.bias",
        table="gate.tid2eid",
        biases=_always("gate.bias", "gate.tid2eid"),
        activation=_clamped,
    ),
    "minimax_m2": Family(
        *(_minimax2, "block_sparse_moe", _W123), selection_bias=_M2_BIAS, biases=_bias_of_minimax
    ),
    "gpt_oss": Family(
        *(_renormalize, "mlp", _JOINED, "router"),
        biases=_always("router.bias"),
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
