"""Refuses what a configuration says of a layer and the layer does not do, in all families alike.

What a family reads is right by itself. What it does not read, because its models have no such
thing, must say nothing: it changes the numbers of the models that have it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmoe._load.settings import Config, one_of
from jaxmoe.activation import Activation


class _Method(NamedTuple):
    """What configurations call a method of `jaxmoe.route`, and whether its weights add to 1."""

    scores: tuple[str, ...]
    choices: tuple[str, ...]
    normalized: bool


_METHODS = {
    "renormalize": _Method(("softmax",), ("greedy",), True),
    "softmax": _Method(("softmax",), ("greedy",), False),
    "deepseek_v2": _Method(("softmax",), ("group_limited_greedy",), False),
    "deepseek_v3": _Method(("sigmoid", "noaux_tc"), ("noaux_tc",), True),  # dots1 has the second
    "sigmoid_renorm": _Method(("sigmoid",), ("greedy",), True),
    "minimax2": _Method(("sigmoid",), ("noaux_tc",), True),
    "sqrtsoftplus": _Method(("sqrtsoftplus",), ("noaux_tc",), True),
    "llama4": _Method(("sigmoid",), ("greedy",), False),
    "sparse_mixer": _Method((), (), False),
}
# What families call the same.
_SCORES = (
    *("scoring_func", "score_function", "score_func", "moe_gate_act", "expert_selection_fn"),
    *("moe_router_activation_func", "moe_router_activation", "moe_router_score_func"),
)
_NORMS = ("norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight")
_SCALES = (
    *("routed_scaling_factor", "route_scale", "router_scaling_factor"),
    *("moe_router_scaling_factor", "moe_routed_scaling_factor"),
)
_GROUPS = ("n_group", "num_expert_group")
# No family has these.
_NONE = ("moe_router_logit_softcapping", "moe_apply_router_weight_on_input")


def check_routing(config: Config, options: Mapping[str, Any]) -> None:
    """Refuses a configuration with another rule than that of the options of `jaxmoe.route`.

    Raises:
      NotImplementedError: a value that changes a layer's numbers and that nothing has read.
    """
    rule = options.get("method", "renormalize")
    if isinstance(rule, tuple):  # the fields of a rule of the family's own
        fields = dict(rule)
        method = _Method((fields["score"],), ("noaux_tc",), "normalize" in fields)
    else:
        method = _METHODS[rule]
    for name in _SCORES:
        one_of(config, name, *method.scores)
    one_of(config, "topk_method", *method.choices)
    for name in _NORMS:
        one_of(config, name, options.get("norm_topk_prob", method.normalized))
    for name in _SCALES:
        _unless_off(config, name, options.get("scale", 1.0), 1.0)
    for name in _GROUPS:
        _unless_off(config, name, options.get("num_groups", 1), 0, 1)
    _unless_off(config, "topk_group", options.get("top_groups", 1), 0, 1)
    for name in _NONE:
        one_of(config, name, 0)


def check_activation(config: Config, activation: str | Activation) -> None:
    """Refuses constants of another activation.

    Raises:
      NotImplementedError: one that is not neutral.
    """
    if isinstance(activation, str):
        _unless_off(config, "swiglu_limit", 0)
        _unless_off(config, "swiglu_alpha", 1)


def _unless_off(config: Config, name: str, *allowed: float) -> None:
    """As `one_of`, for what files of Hunyuan have as false."""
    if config.get(name) is not False:
        one_of(config, name, *dict.fromkeys(allowed))
