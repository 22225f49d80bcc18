"""From a model's configuration to its routing and its activation."""

from typing import Any

from jaxmoe._load.files import OP
from jaxmoe._load.settings import Config, count, flag, needed, one_of, real, top_k
from jaxmoe.activation import Activation, SoftcapSwiglu, Swiglu, SwigluStep

Options = dict[str, Any]
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


def renormalize(config: Config) -> Options:
    """The largest logits, softmax over those."""
    one_of(config, "scoring_func", "softmax")
    return {"top_k": top_k(config)}


def softmax(config: Config) -> Options:
    """Softmax, then the largest."""
    one_of(config, "scoring_func", "softmax")
    norm = flag(config, "norm_topk_prob", default=False)
    return {"top_k": top_k(config), "method": "softmax", "norm_topk_prob": norm}


def jamba(config: Config) -> Options:
    """Softmax, then the largest as they are."""
    return softmax({**config, "norm_topk_prob": False})


def qwen3(config: Config) -> Options:
    """Either, by `norm_topk_prob`."""
    return (renormalize if flag(config, "norm_topk_prob", default=False) else softmax)(config)


def qwen3_next(config: Config) -> Options:
    """Either, the first by default."""
    return renormalize(config) if config.get("norm_topk_prob") is None else qwen3(config)


def deepseek_v2(config: Config) -> Options:
    """Softmax, then groups by their largest score."""
    scale = {"scale": real(config, "routed_scaling_factor", 1.0)}
    one_of(config, "topk_method", "greedy", "group_limited_greedy")
    if needed(config, "topk_method") == "greedy":
        return softmax(config) | scale
    groups = {"num_groups": count(config, "n_group"), "top_groups": count(config, "topk_group")}
    return {"top_k": top_k(config), "method": "deepseek_v2"} | groups | scale


def deepseek_v3(config: Config) -> Options:
    """Sigmoid and bias, then groups by their two largest scores."""
    if config.get("scoring_func") == "softmax":  # other names are taken for the family's
        one_of(config, "scoring_func", "sigmoid")
    return {
        "top_k": top_k(config),
        "method": "deepseek_v3",
        "num_groups": count(config, "n_group"),
        "top_groups": count(config, "topk_group"),
        "scale": real(config, "routed_scaling_factor"),
        "norm_topk_prob": flag(config, "norm_topk_prob"),
    }


def mimo(config: Config) -> Options:
    """DeepSeek-V3's, whose scale is null in the files."""
    scale = real(config, "routed_scaling_factor", 1.0)
    return deepseek_v3({**config, "routed_scaling_factor": scale})


def kimi_linear(config: Config) -> Options:
    """DeepSeek-V3's by other names."""
    one_of(config, "moe_router_activation_func", "sigmoid")
    if count(config, "num_expert_group") > 1:
        one_of(config, "use_grouped_topk", True)
    names = {"n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize"}
    return deepseek_v3({**config, **{ours: config.get(name) for ours, name in names.items()}})


def bailing(config: Config) -> Options:
    """DeepSeek-V3's where experts have a bias, else softmax, then the largest."""
    biased = flag(config, "moe_router_enable_expert_bias", default=False)
    one_of(config, "score_function", "sigmoid" if biased else "softmax")
    one_of(config, "multi_gate", False)
    one_of(config, "router_type", "topN")
    one_of(config, "moe_router_enable_routed_scaling", True)
    if biased:
        return deepseek_v3(config)
    one_of(config, "n_group", 0, 1)
    return softmax(config) | {"scale": real(config, "routed_scaling_factor", 1.0)}


def bailing_hybrid(config: Config) -> Options:
    """The same, with other defaults."""
    names = "moe_router_enable_expert_bias", "norm_topk_prob"
    return bailing({**config, **{name: flag(config, name, default=True) for name in names}})


def _without_groups(config: Config, scale: float, norm: bool = True, **more: Any) -> Options:
    routing = {"top_k": top_k(config), "method": "deepseek_v3", "scale": scale}
    return routing | {"norm_topk_prob": norm} | more


def afmoe(config: Config) -> Options:
    """Sigmoid and bias."""
    one_of(config, "score_func", "sigmoid")
    # Implementations differ in these.
    one_of(config, "n_group", 1)
    one_of(config, "route_norm", True)
    return _without_groups(config, real(config, "route_scale", 1.0))


def hy_v3(config: Config) -> Options:
    """Sigmoid and bias."""
    one_of(config, "route_norm", True)  # implementations differ
    return _without_groups(config, real(config, "router_scaling_factor"))


def lfm2(config: Config) -> Options:
    """Sigmoid and bias; a millionth is added to the sum."""
    norm = flag(config, "norm_topk_prob", default=True)
    more = {"epsilon": 1e-6} if norm else {}
    return _without_groups(config, real(config, "routed_scaling_factor", 1.0), norm, **more)


def ernie(config: Config) -> Options:
    """Softmax and bias, a rule of its own: the fields of `jaxmoe.RoutingMethod` as pairs."""
    one_of(config, "moe_gate_act", "softmax")
    rule = {"score": "softmax", "by_score": True, "normalize": "clamped_sum", "bias": True}
    method = (*rule.items(), ("norm_topk_prob", True))
    return {
        "top_k": top_k(config),
        "method": method,
        "epsilon": real(config, "moe_norm_min", 1e-12),
    }


def deepseek_v4(config: Config) -> Options:
    """The root of softplus, and a bias or a table."""
    scale = real(config, "routed_scaling_factor")
    return {"top_k": top_k(config), "method": "sqrtsoftplus", "scale": scale}


def minimax_m2(config: Config) -> Options:
    """Sigmoid and bias."""
    return {"top_k": top_k(config), "method": "minimax2"}


def minimax_m3(config: Config) -> Options:
    """MiniMax-M2's, scaled."""
    return minimax_m2(config) | {"scale": real(config, "routed_scaling_factor")}


def step(config: Config) -> Options:
    """MiniMax-M2's, scaled."""
    one_of(config, "moe_router_activation", "sigmoid")
    one_of(config, "norm_expert_weight", True)
    return minimax_m2(config) | {"scale": real(config, "moe_router_scaling_factor")}


def laguna(config: Config) -> Options:
    """MiniMax-M2's, scaled."""
    one_of(config, "moe_router_score_func", "sigmoid")
    one_of(config, "moe_router_logit_softcapping", 0)
    one_of(config, "moe_apply_router_weight_on_input", False)
    return minimax_m2(config) | {"scale": real(config, "moe_routed_scaling_factor")}


def llama4(config: Config) -> Options:
    """The largest logit, and its sigmoid."""
    return {"top_k": top_k(config), "method": "llama4"}


def gated(config: Config) -> str:
    """The activation of most models."""
    name = str(config.get("hidden_act", "silu"))
    if name not in _GATED:
        raise ValueError(f"jaxmoe.{OP}: hidden_act={name!r} must be one of {', '.join(_GATED)}")
    return _GATED[name]


def relu2(config: Config) -> str:
    """The activation of Nemotron, which has no gate."""
    one_of(config, "mlp_hidden_act", "relu2")
    return "relu2"


def swiglu_of_gpt_oss(config: Config) -> Activation:
    """With the limit of the configuration."""
    return Swiglu(1.702, 1.0, real(config, "swiglu_limit", 7.0))


def swiglu_of_minimax_m3(config: Config) -> Activation:
    """That of gpt-oss with its constants."""
    one_of(config, "hidden_act", "swigluoai", "silu")
    return Swiglu(real(config, "swiglu_alpha"), 1.0, real(config, "swiglu_limit"))


def clamped(config: Config) -> Activation:
    """Gate and up are clamped."""
    return Swiglu(limit=real(config, "swiglu_limit"))


def swiglu_of_step(config: Config) -> str | Activation:
    """Clamped in the layers that have a limit."""
    one_of(config, "hidden_act", "silu")
    limit = real(config, "swiglu_limits", 0.0)
    return SwigluStep(limit) if limit else "swiglu"


def swiglu_of_kimi(config: Config) -> str | Activation:
    """Bounded by tanh in Kimi-K3."""
    if config.get("hidden_act") != "situ":
        return gated(config)
    caps = "activation_situ_beta", "activation_situ_linear_beta"
    return SoftcapSwiglu(*(real(config, name) for name in caps))
