"""From a model's configuration to its routing and its activation."""

from typing import Any

from jaxmoe._load.files import OP
from jaxmoe._load.settings import (
    EXPERTS,
    TOP_K,
    Config,
    count,
    flag,
    name_of,
    needed,
    num_experts,
    one_of,
    real,
    section,
    top_k,
)
from jaxmoe.activation import Activation, SoftcapSwiglu, Swiglu, SwigluStep

Options = dict[str, Any]
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


def renormalize(config: Config) -> Options:
    """The largest logits, softmax over those."""
    return {"top_k": top_k(config)}


def softmax(config: Config) -> Options:
    """Softmax, then the largest."""
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
        # transformers multiplies by the scale alone, DeepSeek's code divides by the sum instead.
        one_of(config, "norm_topk_prob", False)
        return softmax(config) | scale
    return {"top_k": top_k(config), "method": "deepseek_v2"} | _groups(config, "n_group") | scale


def deepseek_v3(config: Config) -> Options:
    """Sigmoid and bias, then groups by their two largest scores."""
    return _sigmoid_in_groups(config, "n_group", "norm_topk_prob")


def _sigmoid_in_groups(config: Config, groups: str, norm: str) -> Options:
    return {
        "top_k": top_k(config),
        "method": "deepseek_v3",
        **_groups(config, groups),
        "scale": real(config, "routed_scaling_factor"),
        "norm_topk_prob": flag(config, norm),
    }


def _groups(config: Config, name: str) -> Options:
    """The groups of experts, which hold as many as a token has."""
    groups, top = count(config, name), count(config, "topk_group")
    experts, k, said = num_experts(config), top_k(config), f"{name}={groups}"
    if experts % groups:
        rule = f"{said}, which must divide {name_of(config, EXPERTS)}={experts}"
    elif top > groups:
        rule = f"topk_group={top}, which must be at most {said}"
    elif k > top * (experts // groups):
        most = f"{top * (experts // groups)}, the experts of topk_group={top} of {said} groups"
        rule = f"{name_of(config, TOP_K)}={k}, which must be at most {most}"
    else:
        return {"num_groups": groups, "top_groups": top}
    raise ValueError(f"jaxmoe.{OP}: config.json has {rule}")


def mimo(config: Config) -> Options:
    """DeepSeek-V3's, whose scale is null in the files."""
    scale = real(config, "routed_scaling_factor", 1.0)
    return deepseek_v3({**config, "routed_scaling_factor": scale})


def kimi_linear(config: Config) -> Options:
    """DeepSeek-V3's by other names."""
    if count(config, "num_expert_group") > 1:
        one_of(config, "use_grouped_topk", True)
    return _sigmoid_in_groups(config, "num_expert_group", "moe_renormalize")


def bailing(config: Config) -> Options:
    """DeepSeek-V3's where experts have a bias, else softmax, then the largest."""
    biased = flag(config, "moe_router_enable_expert_bias", default=False)
    one_of(config, "multi_gate", False)
    one_of(config, "router_type", "topN")
    one_of(config, "moe_router_enable_routed_scaling", True)
    if biased:
        return deepseek_v3(config)
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
    return _without_groups(config, real(config, "route_scale", 1.0))


def hy_v3(config: Config) -> Options:
    """Sigmoid and bias."""
    return _without_groups(config, real(config, "router_scaling_factor"))


def lfm2(config: Config) -> Options:
    """Sigmoid and bias; a millionth is added to the sum."""
    norm = flag(config, "norm_topk_prob", default=True)
    more = {"epsilon": 1e-6} if norm else {}
    return _without_groups(config, real(config, "routed_scaling_factor", 1.0), norm, **more)


def ernie(config: Config) -> Options:
    """Softmax and bias, a rule of its own: the fields of `jaxmoe.RoutingMethod` as pairs."""
    rule = {"score": "softmax", "by_score": True, "normalize": "clamped_sum", "bias": True}
    method = (*rule.items(), ("norm_topk_prob", True))
    return {
        "top_k": top_k(config),
        "method": method,
        "epsilon": real(config, "moe_norm_min", 1e-12),
    }


def _own(config: Config, norm: bool, **rule: Any) -> Options:
    """A rule of its own: the fields of `jaxmoe.RoutingMethod` as pairs."""
    method = tuple({**rule, "norm_topk_prob": True}.items())
    return {"top_k": top_k(config), "method": method, "norm_topk_prob": norm}


def flint(config: Config) -> Options:
    """Sigmoid, then the largest."""
    norm = flag(config, "norm_topk_prob", default=True)
    return {"top_k": top_k(config), "method": "sigmoid_renorm", "norm_topk_prob": norm}


def cohere2(config: Config) -> Options:
    """The largest logits, softmax or sigmoid over those."""
    one_of(config, "expert_selection_fn", "softmax", "sigmoid")
    if config.get("expert_selection_fn") != "sigmoid":
        return renormalize(config)
    norm = flag(config, "norm_topk_prob", default=True)
    return _own(config, norm, score="sigmoid", normalize="sum")


def kolibri(config: Config) -> Options:
    """The largest of logits and bias, sigmoid over those logits."""
    norm = flag(config, "norm_topk_prob", default=False)
    return _own(config, norm, score="sigmoid", normalize="clamped_sum", bias=True)


def mistral4(config: Config) -> Options:
    """Softmax, then groups by their two largest scores."""
    norm = flag(config, "norm_topk_prob", default=True)
    scale = {"scale": real(config, "routed_scaling_factor", 1.0)}
    if count(config, "n_group", default=1) == 1:
        return softmax({**config, "norm_topk_prob": norm}) | scale
    rule = {"score": "softmax", "by_score": True, "normalize": "sum", "group_value": "top2"}
    return _own(config, norm, **rule) | _groups(config, "n_group") | scale


def mistral_large4(config: Config) -> Options:
    """The same, always divided by the sum."""
    return mistral4({**config, "norm_topk_prob": True})


def axk2(config: Config) -> Options:
    """DeepSeek-V3's, in which experts of other groups have the key 0; or without groups."""
    if config.get("n_group") is None:
        norm = flag(config, "norm_topk_prob", default=True)
        return _without_groups(config, real(config, "routed_scaling_factor"), norm)
    masked = {"masked_group_value": 0.0} if count(config, "n_group") > 1 else {}
    return deepseek_v3(config) | masked


def inkling2(config: Config) -> Options:
    """Sigmoid and bias."""
    return _without_groups(config, real(config, "route_scale", 1.0))


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
    return minimax_m2(config) | {"scale": real(config, "moe_router_scaling_factor")}


def laguna(config: Config) -> Options:
    """MiniMax-M2's, scaled."""
    return minimax_m2(config) | {"scale": real(config, "moe_routed_scaling_factor")}


def llama4(config: Config) -> Options:
    """The largest logit, and its sigmoid."""
    return {"top_k": top_k(config), "method": "llama4"}


def phimoe(config: Config) -> Options:
    """Two choices, each weighted by softmax of the logits close to it (`jaxmoe._load.chosen`)."""
    one_of(config, name_of(config, TOP_K), 2)
    jitter = real(config, "router_jitter_noise", 0.01)
    return {"top_k": 2, "method": "sparse_mixer", "jitter": jitter}


def dbrx(config: Config) -> Options:
    """Softmax, then the largest, divided by their sum, which is their norm of order 1."""
    one_of(config, "moe_normalize_expert_weights", 1)
    if config.get("moe_normalize_expert_weights", 1) is None:
        return jamba(config)
    return renormalize(config)


def longcat(config: Config) -> Options:
    """Softmax and bias; some experts return what they read."""
    one_of(config, "zero_expert_type", "identity")
    one_of(config, "router_bias", False)
    method = tuple({"score": "softmax", "by_score": True, "bias": True}.items())
    return {
        "top_k": top_k(config),
        "method": method,
        "scale": real(config, "routed_scaling_factor"),
    }


def inkling(config: Config) -> Options:
    """Sigmoid and bias; one sum divides the weights of routed and of shared experts."""
    one_of(config, "shared_expert_sink", True)
    rule = {"score": "sigmoid", "by_score": True, "normalize": "sum", "bias": True, "shared": True}
    return _own(config, True, **rule) | {
        "scale": real(config, "route_scale"),
        "epsilon": 0.0,
        "num_shared_experts": count(config, "n_shared_experts"),
    }


def switch(config: Config) -> Options:
    """Softmax, then the largest; an expert takes so many tokens of a sequence."""
    capacity = count(config, "expert_capacity", default=64)
    return {"top_k": 1, "method": "softmax", "capacity": capacity}


def nllb(config: Config) -> Options:
    """The two largest logits, softmax over those; evaluation, whose capacity drops no token."""
    one_of(config, "second_expert_policy", "all")
    one_of(config, "moe_eval_capacity_token_fraction", 1)
    return {"top_k": 2, "scale": 1 - real(config, "moe_token_dropout", 0.2)}


def gated(config: Config, said: str = "hidden_act", default: str = "silu") -> str:
    """The activation of most models; `said` is what the configuration calls it."""
    name = str(default if config.get(said) is None else config[said])
    if name not in _GATED:
        raise ValueError(f"jaxmoe.{OP}: {said}={name!r} must be one of {', '.join(_GATED)}")
    return _GATED[name]


def gated_of_gemma(config: Config) -> str:
    """The same by another name."""
    return gated(config, "hidden_activation", "gelu_pytorch_tanh")


def gated_of_jetmoe(config: Config) -> str:
    """The same by another name."""
    return gated(config, "activation_function")


def gated_of_dbrx(config: Config) -> str:
    """The same, named in an object."""
    return gated(section(config, "ffn_act_fn"), "name")


def relu(config: Config) -> str:
    """The activation of Switch and NLLB, which have no gate."""
    for said in ("dense_act_fn", "activation_function"):
        one_of(config, said, "relu")
    return "relu"


def relu2(config: Config) -> str:
    """The activation of Nemotron, which has no gate."""
    one_of(config, "mlp_hidden_act", "relu2")
    return "relu2"


def softcapped(config: Config) -> Activation:
    """Gate and up are bounded by tanh."""
    return SoftcapSwiglu(*(real(config, f"mlp_{name}_softcap") for name in ("gate", "up")))


def swiglu_of_gpt_oss(config: Config) -> Activation:
    """With the constants of the configuration."""
    one_of(config, "hidden_act", "silu")
    return Swiglu(real(config, "swiglu_alpha", 1.702), 1.0, real(config, "swiglu_limit", 7.0))


def swiglu_of_minimax_m3(config: Config) -> Activation:
    """That of gpt-oss with its constants."""
    one_of(config, "hidden_act", "swigluoai", "silu")
    return Swiglu(real(config, "swiglu_alpha"), 1.0, real(config, "swiglu_limit"))


def clamped(config: Config) -> Activation:
    """Gate and up are clamped."""
    one_of(config, "hidden_act", "silu")
    one_of(config, "swiglu_alpha", 1)
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
