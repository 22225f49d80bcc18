"""Routing rules as values: what `route` takes as `method`, by name or itself."""

import dataclasses
from typing import Any

from jaxmoe._jax import checks as _checks

_SCORES = ("logits", "softmax", "sigmoid", "sqrtsoftplus")
_NORMALIZE = ("none", "softmax", "sum", "clamped_sum")
_GROUP_VALUES = ("", "top2", "max")


@dataclasses.dataclass(frozen=True)
class RoutingMethod:
    """A routing rule: the names that `route` takes as `method` are instances of it.

    s[e] = score(logits[e]); key[e] = s[e] if by_score, else logits[e], plus bias[e]

    Any combination is one kernel on CUDA. For example, Ernie 4.5 chooses by softmax plus a bias and
    divides by the sum: `RoutingMethod("softmax", True, "clamped_sum", True, bias=True)`.

    Attributes:
      score: s, "logits" (the logit itself), "softmax" over all experts, "sigmoid" or
        "sqrtsoftplus" (the root of log(1 + exp(x))).
      by_score: experts are chosen by score, not by logit.
      normalize: weights of the chosen scores: "none" as they are, "softmax" of them, "sum" divided
        by (their sum + epsilon), "clamped_sum" divided by max(their sum, epsilon).
      norm_topk_prob: whether they are divided by their sum if `route` is not told; None: it cannot
        be told.
      bias: whether there may be a selection bias, added to what experts are chosen by.
      group_value: what a group of experts is worth: "top2", the sum of its two largest keys, or
        "max", its largest key. "": no groups.
      top_k: the only number of experts the rule is for, 0 for any.
      shared: whether shared experts have logits, the last `num_shared_experts` of them, and so
        weights as the chosen ones have, in the same sum (Inkling). Not with score "softmax".

    Raises:
      TypeError, ValueError: a field of another type, an unknown name, or a `norm_topk_prob` where
        nothing is divided.
    """

    score: str
    by_score: bool = False
    normalize: str = "none"
    norm_topk_prob: bool | None = None
    bias: bool = False
    group_value: str = ""
    top_k: int = 0
    shared: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        op = "RoutingMethod"
        choices = (("score", _SCORES), ("normalize", _NORMALIZE), ("group_value", _GROUP_VALUES))
        for name, allowed in choices:
            _checks.check_choice(op, name, getattr(self, name), allowed)
        for name in ("by_score", "bias", "shared"):
            if type(getattr(self, name)) is not bool:
                rule = f"{name} must be a bool"
                raise TypeError(_checks.message(op, rule, **{name: getattr(self, name)}))
        if self.norm_topk_prob is not None and type(self.norm_topk_prob) is not bool:
            rule = "norm_topk_prob must be a bool or None"
            raise TypeError(_checks.message(op, rule, norm_topk_prob=self.norm_topk_prob))
        _checks.check_int(op, "top_k", self.top_k, 0)
        if self.shared and self.score == "softmax":
            rule = "shared must be False with score='softmax', a softmax of routed experts alone"
            raise ValueError(_checks.message(op, rule))
        if self.norm_topk_prob is not None and not self.divides:
            rule = f"norm_topk_prob must be None with normalize={self.normalize!r}"
            raise ValueError(_checks.message(op, rule, norm_topk_prob=self.norm_topk_prob))

    @property
    def divides(self) -> bool:
        """Whether weights are, or can be, divided by their sum."""
        return self.normalize in ("sum", "clamped_sum")


METHODS: dict[str, RoutingMethod] = {
    "softmax": RoutingMethod("softmax", normalize="sum", norm_topk_prob=False),
    "renormalize": RoutingMethod("logits", normalize="softmax"),
    "renormalize_naive": RoutingMethod("logits", normalize="softmax"),
    "deepseek_v3": RoutingMethod("sigmoid", True, "sum", True, bias=True, group_value="top2"),
    "deepseek_v2": RoutingMethod("softmax", True, "sum", False, group_value="max"),
    "llama4": RoutingMethod("sigmoid", top_k=1),
    "topk": RoutingMethod("logits"),
    "sigmoid_renorm": RoutingMethod("sigmoid", True, "clamped_sum", True),
    "minimax2": RoutingMethod("sigmoid", True, "sum", bias=True),
    "sigmoid": RoutingMethod("sigmoid", True),
    "topk_sigmoid": RoutingMethod("sigmoid"),
    "sqrtsoftplus": RoutingMethod("sqrtsoftplus", True, "sum", True, bias=True),
}


def method_of(op: str, method: Any) -> RoutingMethod:
    """The rule that a name stands for, or a rule itself."""
    if isinstance(method, RoutingMethod):
        return method
    if isinstance(method, str):
        _checks.check_choice(op, "method", method, tuple(METHODS))
        return METHODS[method]
    rule = "method must be a name or a jaxmoe.RoutingMethod"
    raise TypeError(_checks.message(op, rule, method=method))
