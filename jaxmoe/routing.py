"""Routing: from the router's logits to the experts of each token and their weights."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe._jax import sizes as _sizes
from jaxmoe._route import Rule, completed, route_p, weights_xla
from jaxmoe.routing_methods import RoutingMethod, method_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts of each token. A pytree; make one from your own arrays to use another router.

    Attributes:
      expert_ids: [T, K] int32. Ids below 0 or past the last expert mean "no expert".
      weights: [T, K] float32, the factor of each expert's output.
      num_experts: number of experts that were chosen from, shared ones included, as `route` sets
        it; None if it is not known. Layers refuse weights of another number of experts. Static, so
        a prefix such as `P("data")` fits a routing as a spec of `jax.shard_map`.
    """

    expert_ids: jax.Array
    weights: jax.Array
    num_experts: int | None = dataclasses.field(default=None, metadata={"static": True})


_EPSILON = 1e-20


def _named(method: str | RoutingMethod) -> str:
    return f"method {method!r}" if isinstance(method, str) else "this RoutingMethod"


@_checks.array_likes
def route(
    logits: jax.Array,
    *,
    top_k: int,
    method: str | RoutingMethod = "renormalize",
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    norm_topk_prob: bool | None = None,
    epsilon: float | None = None,
    masked_group_value: float = -math.inf,
    expert_scale: jax.Array | None = None,
    num_shared_experts: int = 0,
    num_valid_tokens: int | jax.Array | None = None,
    expert_ids: jax.Array | None = None,
) -> Routing:
    """Chooses the experts of each token and their weights.

    expert_ids[t] = the top_k experts of largest key[t], in falling order, ties to the smaller id
    weights[t,k] = normalized(score[t, expert_ids[t,k]]) * scale * expert_scale[expert_ids[t,k]]

    Scores, keys and normalization of each method are a table in docs/semantics.md, the method of
    each model family is in docs/routing.md. A NaN logit is an expert that cannot be chosen and is
    left out of every sum; a token with fewer than top_k others gets id -1 and weight 0 in the
    remaining places. -inf is the lowest logit there is.

    Args:
      logits: [T, E] bfloat16, float16 or float32. T stands for one axis or several, [B, S, E].
      top_k: experts for each token, 1 to E; 1 for "llama4".
      method: the name of a rule, such as "renormalize" (Mixtral, Qwen3), "softmax" (OLMoE) or
        "deepseek_v3", or a `RoutingMethod`.
      bias: [E], added to the scores for the choice only ("deepseek_v3", "minimax2",
        "sqrtsoftplus").
      num_groups: groups of neighbours that the experts form ("deepseek_v3", "deepseek_v2").
      top_groups: groups that experts are chosen from, ranked by the sum of their two largest keys
        ("deepseek_v3") or by the largest ("deepseek_v2").
      scale: factor of every weight (`routed_scaling_factor`).
      norm_topk_prob: divide the weights of a token by their sum; by default what the method does.
      epsilon: added to that sum, 1e-20 by default; "sigmoid_renorm" takes the larger of the two.
      masked_group_value: key of the experts of other groups; by default they cannot be chosen. 0.0,
        as in transformers 4, lets them win over negative keys.
      expert_scale: [E], a factor of each expert's weight.
      num_shared_experts: S experts that every token takes: S more columns with ids E to E + S - 1
        and weight 1.
      num_valid_tokens: rows from there on are padding: id -1, weight 0. For one axis of tokens.
      expert_ids: [T, top_k] int16 or int32, experts chosen elsewhere (a replay, or a table looked
        up by token id): only the weights are computed. Ids of no expert, or of one whose logit is
        NaN, become -1. To record a choice in half the bytes, keep the first top_k columns of
        `routing.expert_ids.astype(jnp.int16)`.

    Returns:
      `Routing` with expert_ids [T, top_k + S] int32 and weights [T, top_k + S] float32.

    Raises:
      TypeError: an array of another dtype, a number that is none or not known at trace time.
      ValueError: a wrong shape or number, no such method, or an option that the method lacks.

    Numerics: float32 throughout. Ids chosen by logit are exact; those chosen by score are as exact
      as the score, which devices round differently in the last bit. Gradients flow through the
      weights to `logits` and `expert_scale`, with the ids fixed, in forward and reverse mode and to
      any order; none to `bias`.
    Sharding: tokens may be split freely; experts may not.
    Source: https://arxiv.org/abs/2401.04088 ("renormalize"), https://arxiv.org/abs/2409.02060
      ("softmax"), https://arxiv.org/abs/2412.19437 ("deepseek_v3"); docs/routing.md has the others.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> routing = jaxmoe.route(jnp.array([[0.0, 2.0, 2.0, 1.0]]), top_k=2)
      >>> routing.expert_ids.tolist(), routing.weights.tolist()
      ([[1, 2]], [[0.5, 0.5]])
    """
    lead = _leading.of_tokens("route", logits)
    if lead is not None:
        if num_valid_tokens is not None:
            rule = (
                "num_valid_tokens must be None with several axes of tokens, which have no last "
                "one; set the expert_ids of padding to -1"
            )
            raise ValueError(_checks.message("route", rule, logits=logits))
        logits, expert_ids = lead.flat("logits", logits), lead.flat("expert_ids", expert_ids)
    given = check_options(
        "route",
        logits,
        top_k=top_k,
        method=method,
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        scale=scale,
        norm_topk_prob=norm_topk_prob,
        epsilon=epsilon,
        masked_group_value=masked_group_value,
        expert_scale=expert_scale,
        num_shared_experts=num_shared_experts,
        num_valid_tokens=num_valid_tokens,
        expert_ids=expert_ids,
    )
    routing = routing_of(given)
    return routing if lead is None else jax.tree.map(lead.unflat, routing)


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `route`, checked.

    Attributes:
      logits, top_k, rule: of the primitive.
      bias: [E], or None.
      expert_scale: [E] float32, or None.
      num_shared_experts: S.
      num_valid: int32 scalar, the number of rows that are no padding, or None for all.
      expert_ids: [T, K] int32, -1 where it names no expert with a score, or None to choose.
    """

    logits: jax.Array
    top_k: int
    rule: Rule
    bias: jax.Array | None
    expert_scale: jax.Array | None
    num_shared_experts: int
    num_valid: jax.Array | None
    expert_ids: jax.Array | None


def check_options(
    op: str,
    logits: Any,
    *,
    top_k: Any,
    method: Any,
    bias: Any,
    num_groups: Any,
    top_groups: Any,
    scale: Any,
    norm_topk_prob: Any,
    epsilon: Any,
    masked_group_value: Any,
    expert_scale: Any,
    num_shared_experts: Any,
    num_valid_tokens: Any,
    expert_ids: Any,
) -> Options:
    """Checks the arguments of `route` in the name of `op`."""
    _checks.check_rank(op, "logits", logits, "T,E")
    _checks.check_dtype(op, "logits", logits, _checks.FLOATS)
    num_experts = logits.shape[1]
    if num_experts == 0:
        rule = "logits.shape[1]=0 must be at least 1 (num_experts)"
        raise ValueError(_checks.message(op, rule, logits=logits))
    top_k = _checks.check_int(op, "top_k", top_k, 1, num_experts, "the last axis is E")
    row = method_of(op, method)
    if row.top_k and top_k != row.top_k:
        rule = f"top_k={top_k} must be {row.top_k} for {_named(method)}"
        raise ValueError(_checks.message(op, rule))
    masked_value = _check_float(op, "masked_group_value", masked_group_value, finite=False)
    num_groups, top_groups = _check_groups(
        op, logits, top_k, method, num_groups, top_groups, masked_value
    )
    if bias is not None and not row.bias:
        _refuse(op, "bias", bias, method, "no selection bias")
    for name, value in (("bias", bias), ("expert_scale", expert_scale)):
        if value is not None:
            _checks.check_rank(op, name, value, "E")
            _checks.check_dtype(op, name, value, _checks.FLOATS)
            _checks.check_same_dim(op, name, value, 0, "logits", logits, 1, "num_experts")
    normalize, epsilon = _check_normalize(op, method, norm_topk_prob, epsilon)
    rule = Rule(
        score=row.score,
        by_score=row.by_score,
        normalize=normalize,
        epsilon=epsilon,
        scale=_check_float(op, "scale", scale),
        group_value=row.group_value if num_groups > 1 else "",
        num_groups=num_groups,
        top_groups=top_groups,
        masked_value=masked_value,
    )
    num_shared_experts = _checks.check_int(op, "num_shared_experts", num_shared_experts, 0)
    return Options(
        logits=logits,
        top_k=top_k,
        rule=rule,
        bias=bias,
        expert_scale=None if expert_scale is None else jnp.asarray(expert_scale, jnp.float32),
        num_shared_experts=num_shared_experts,
        num_valid=_num_valid(op, logits, num_valid_tokens),
        expert_ids=None if expert_ids is None else _forced_ids(op, logits, top_k, expert_ids),
    )


def routing_of(given: Options) -> Routing:
    """Computes `route` of checked arguments."""
    if given.expert_ids is None:
        ids, weights = route_p(given.logits, given.bias, top_k=given.top_k, rule=given.rule)
    else:
        ids = given.expert_ids
        weights = weights_xla(given.logits, ids, rule=given.rule)
    if given.expert_scale is not None:
        weights = scaled(weights, ids, given.expert_scale)
    shared, num_experts = given.num_shared_experts, given.logits.shape[1]
    arrays = completed(ids, weights, num_experts, shared, given.num_valid)
    return Routing(*arrays, num_experts=num_experts + shared)


def scaled(weights: jax.Array, expert_ids: jax.Array, expert_scale: jax.Array) -> jax.Array:
    """Multiplies each weight by its expert's scale."""
    factor = expert_scale[jnp.where(expert_ids < 0, 0, expert_ids)]
    return jnp.where(expert_ids < 0, 0.0, weights * factor)


def _refuse(op: str, name: str, value: Any, method: str | RoutingMethod, lack: str) -> None:
    default = "None" if name in ("bias", "norm_topk_prob", "epsilon") else "left out"
    shown = _checks.describe(value)
    rule = f"{name}={shown} must be {default}: {_named(method)} has {lack}"
    raise ValueError(_checks.message(op, rule))


def _check_groups(
    op: str,
    logits: Any,
    top_k: int,
    method: str | RoutingMethod,
    num_groups: Any,
    top_groups: Any,
    masked: Any,
) -> tuple[int, int]:
    num_groups = _checks.check_int(op, "num_groups", num_groups, 1)
    top_groups = _checks.check_int(op, "top_groups", top_groups, 1, num_groups, "num_groups")
    if not method_of(op, method).group_value and num_groups != 1:
        _refuse(op, "num_groups", num_groups, method, "no groups")
    if num_groups == 1:
        if masked != -math.inf:
            _refuse(op, "masked_group_value", masked, method, "no groups (num_groups=1)")
        return num_groups, top_groups
    num_experts = logits.shape[1]
    if num_experts % num_groups:
        rule = f"num_groups={num_groups} must divide logits.shape[1]={num_experts}"
        raise ValueError(_checks.message(op, rule, logits=logits))
    choice = top_groups * (num_experts // num_groups)
    if masked == -math.inf and top_k > choice:
        rule = (
            f"top_k={top_k} must be at most {choice}, the experts of top_groups={top_groups} of "
            f"num_groups={num_groups}"
        )
        raise ValueError(_checks.message(op, rule, logits=logits))
    return num_groups, top_groups


def _check_normalize(
    op: str, method: str | RoutingMethod, norm_topk_prob: bool | None, epsilon: float | None
) -> tuple[str, float]:
    row = method_of(op, method)
    divides = row.divides
    if norm_topk_prob is not None:
        if row.norm_topk_prob is None:
            _refuse(op, "norm_topk_prob", norm_topk_prob, method, "one normalization")
        if type(norm_topk_prob) is not bool:
            rule = "norm_topk_prob must be a bool or None"
            raise TypeError(_checks.message(op, rule, norm_topk_prob=norm_topk_prob))
        divides = norm_topk_prob
    elif row.norm_topk_prob is not None:
        divides = row.norm_topk_prob
    if epsilon is not None:
        if not divides:
            _refuse(op, "epsilon", epsilon, method, "no sum to divide by")
        if _check_float(op, "epsilon", epsilon) < 0:
            raise ValueError(_checks.message(op, f"epsilon={epsilon} must be at least 0"))
    if not divides:
        return "softmax" if row.normalize == "softmax" else "none", 0.0
    return row.normalize, _EPSILON if epsilon is None else float(epsilon)


def _check_float(op: str, name: str, value: Any, finite: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        rule = f"{name} must be a Python float known at trace time"
        raise TypeError(_checks.message(op, rule, **{name: value}))
    if math.isnan(value) or (finite and math.isinf(value)) or value == math.inf:
        rule = f"{name}={value} must be {'finite' if finite else 'finite or -inf'}"
        raise ValueError(_checks.message(op, rule))
    return float(value)


def _num_valid(op: str, logits: Any, count: Any) -> jax.Array | None:
    if count is None:
        return None
    if isinstance(count, jax.Array | np.ndarray):
        _checks.check_rank(op, "num_valid_tokens", count, "")
        _checks.check_dtype(op, "num_valid_tokens", count, ("int32",))
    else:
        high = logits.shape[0] if _sizes.is_known(logits.shape[0]) else None
        count = _checks.check_int(op, "num_valid_tokens", count, 0, high, "the first axis is T")
    return jnp.asarray(count, jnp.int32)


def _forced_ids(op: str, logits: Any, top_k: int, expert_ids: Any) -> jax.Array:
    """Returns the caller's choice, -1 where it names no expert with a score."""
    _checks.check_rank(op, "expert_ids", expert_ids, "T,K")
    _checks.check_dtype(op, "expert_ids", expert_ids, ("int16", "int32"))
    _checks.check_same_dim(op, "expert_ids", expert_ids, 0, "logits", logits, 0, "num_tokens")
    _checks.check_dim(op, "expert_ids", expert_ids, 1, top_k, "top_k")
    ids = jnp.asarray(expert_ids).astype(jnp.int32)
    exists = (ids >= 0) & (ids < logits.shape[1])
    picked = jnp.take_along_axis(jnp.asarray(logits), jnp.where(exists, ids, 0), axis=1)
    return jnp.where(exists & ~jnp.isnan(picked), ids, -1)
