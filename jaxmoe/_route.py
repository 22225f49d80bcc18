"""The primitive behind `route`: selection by key, groups, and weights; its rules are plain jnp."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._codes import choice
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sharding as _sharding
from jaxmoe._jax import sizes as _sizes


@dataclasses.dataclass(frozen=True)
class Rule:
    """A routing rule with its options, as the primitive takes it. See `route` for the formulas.

    Attributes:
      score: "logits", "softmax", "sigmoid" or "sqrtsoftplus".
      by_score: experts are chosen by score, not by logit, plus a bias.
      normalize: "none", "softmax" of the chosen logits, "sum" (divided by sum + epsilon) or
        "clamped_sum" (divided by max(sum, epsilon)).
      epsilon: of the two sums.
      scale: factor of every weight.
      group_value: "top2", "max", or "" without groups.
      num_groups, top_groups: groups there are and groups kept.
      masked_value: key of the experts of the other groups; -inf: they cannot be chosen.
    """

    score: str
    by_score: bool = False
    normalize: str = "none"
    epsilon: float = 0.0
    scale: float = 1.0
    group_value: str = ""
    num_groups: int = 1
    top_groups: int = 1
    masked_value: float = -math.inf


MAX_CUDA_EXPERTS = 1024  # kRouteMaxExperts of csrc/kernels/route.h


def route_xla(
    logits: jax.Array, bias: jax.Array | None, *, top_k: int, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Computes the primitive in plain jnp, binding none."""
    x = logits.astype(jnp.float32)
    key = x
    if rule.by_score:
        key = jnp.where(jnp.isnan(x), jnp.nan, scores_of(x, rule.score))
    if bias is not None:
        key = key + bias.astype(jnp.float32)[None, :]
    order = _order_key(key)
    if rule.num_groups > 1:
        order = _keep_groups(key, order, rule)
    best, expert_ids = jax.lax.top_k(order, top_k)
    expert_ids = jnp.where(best == _UNSCORED, -1, expert_ids)
    return expert_ids, weights_xla(logits, expert_ids, rule=rule)


def weights_xla(logits: jax.Array, expert_ids: jax.Array, *, rule: Rule) -> jax.Array:
    """Computes the weights of chosen experts (-1: none); differentiable in `logits`."""
    x = logits.astype(jnp.float32)
    chosen = expert_ids >= 0
    at = jnp.where(chosen, expert_ids, 0)
    if rule.score == "softmax":
        s = _picked(_softmax(x, ~jnp.isnan(x)), at)
    else:  # of the chosen alone: whatever the others are, NaN too, stays out of the gradient
        picked = jnp.where(chosen, _picked(x, at), 0.0)
        s = scores_of(picked, rule.score)
    s = jnp.where(chosen, s, 0.0)
    if rule.normalize == "softmax":
        s = _softmax(s, chosen)
    elif rule.normalize != "none":
        total = s.sum(axis=1, keepdims=True)
        if rule.normalize == "sum":
            total = total + rule.epsilon
        else:
            total = jnp.maximum(total, rule.epsilon)
        total = jnp.where(total == 0, 1.0, total)
        # The slope of s / total has the square of the total, which underflows long before it does.
        near = jax.lax.stop_gradient(1.0 / jnp.clip(jnp.abs(total), 1e-37, 1.0))
        s = (s * near) / (total * near)
    if rule.scale != 1.0:
        s = s * rule.scale
    return jnp.where(chosen, s, 0.0)  # also where the token's sum is NaN


def _picked(x: jax.Array, at: jax.Array) -> jax.Array:
    """Takes x[t, at[t, k]] of each token."""
    rows = jnp.take_along_axis(_sizes.with_a_row(x), _sizes.with_a_row(at), axis=1)
    return rows[: x.shape[0]]


def completed(
    expert_ids: jax.Array,
    weights: jax.Array,
    num_experts: int,
    num_shared_experts: int,
    valid: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Appends the shared experts to [T, K] ids and weights, and empties rows that are not valid."""
    if num_shared_experts:
        # NOTE: not a concatenation, whose parts must be split alike over Explicit axes.
        top_k, more = expert_ids.shape[1], ((0, 0), (0, num_shared_experts))
        column = jnp.arange(top_k + num_shared_experts, dtype=jnp.int32)[None, :]
        padded = jnp.pad(expert_ids, more)
        expert_ids = jnp.where(column < top_k, padded, num_experts - top_k + column)
        weights = jnp.pad(weights, more, constant_values=1.0)
    if valid is not None:
        keep = valid[:, None]
        expert_ids, weights = jnp.where(keep, expert_ids, -1), jnp.where(keep, weights, 0.0)
    return expert_ids, weights


def first_tokens(num_tokens: int, num_valid: jax.Array) -> jax.Array:
    """Whether each of T tokens is before the padding, [T] bool."""
    return jnp.arange(num_tokens, dtype=jnp.int32) < num_valid


def without(logits: jax.Array, valid: jax.Array) -> jax.Array:
    """Makes every logit of a token that is not valid NaN, which no choice, sum or gradient sees."""
    return jnp.where(valid[:, None], logits, jnp.nan)


def constant_padding(logits: jax.Array, num_valid: jax.Array) -> jax.Array:
    """Keeps derivatives out of padding, where those of an infinite logit are NaN.

    A choice between equals: XLA drops it.
    """
    valid = first_tokens(logits.shape[0], num_valid)
    return jnp.where(valid[:, None], logits, jax.lax.stop_gradient(logits))


def loss_scores(logits: jax.Array, score: str) -> jax.Array:
    """Scores [T, E] as losses take them: probabilities of logits, and 0 for a NaN logit."""
    x = logits.astype(jnp.float32)
    scored = ~jnp.isnan(x)
    if score in ("logits", "softmax"):
        return _softmax(x, scored)
    return jnp.where(scored, scores_of(jnp.where(scored, x, 0.0), score), 0.0)


def scores_of(x: jax.Array, score: str) -> jax.Array:
    """Scores of float32 logits, NaN logits left out of a softmax."""
    if score == "softmax":
        return _softmax(x, ~jnp.isnan(x))
    if score == "sigmoid":
        return jax.nn.sigmoid(x)
    if score == "sqrtsoftplus":
        # Far below 0 softplus(x) is exp(x) to the last bit, and its root has no finite slope where
        # it underflows.
        low = x < -20.0
        root = jnp.sqrt(jax.nn.softplus(jnp.where(low, 0.0, x)))
        return jnp.where(low, jnp.exp(0.5 * jnp.where(low, x, 0.0)), root)
    return x


_UNSCORED = jnp.iinfo(jnp.int32).min


def _order_key(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 of the same order, with -0.0 equal to 0.0 and NaN last.

    NOTE: top_k on the floats themselves would rank NaN first and -0.0 below 0.0.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    key = jnp.where(bits < 0, jnp.where(bits == _UNSCORED, 0, bits ^ 0x7FFFFFFF), bits)
    return jnp.where(jnp.isnan(x), _UNSCORED, key)


def _keep_groups(key: jax.Array, order: jax.Array, rule: Rule) -> jax.Array:
    """Replaces the order of the experts outside the best groups."""
    num_tokens, num_experts = key.shape
    grouped = (num_tokens, rule.num_groups, num_experts // rule.num_groups)
    scored = ~jnp.isnan(key)
    keys = jnp.where(scored, key, -jnp.inf).reshape(grouped)
    if rule.group_value == "max":
        value = keys.max(axis=2)
    else:
        best = jax.lax.top_k(keys, min(2, grouped[2]))[0]
        several = scored.reshape(grouped).sum(axis=2) > 1
        value = jnp.where(several, best.sum(axis=2), best[..., 0])
    _, kept = jax.lax.top_k(_order_key(value), rule.top_groups)
    groups = jnp.arange(rule.num_groups)[None, None, :]
    keep = (kept[:, :, None] == groups).any(axis=1)
    keep = jnp.repeat(keep, grouped[2], axis=1)
    masked = jnp.int32(_UNSCORED)
    if rule.masked_value != -math.inf:
        masked = jnp.where(scored, _order_key(jnp.float32(rule.masked_value)), _UNSCORED)
    return jnp.where(keep, order, masked)


def _softmax(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax of the last axis over `mask`; 0 outside it, and everywhere if all of it is -inf."""
    x = jnp.where(mask, x, -jnp.inf)  # also keeps NaN outside the mask out of the gradient
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    exp = jnp.exp(x - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = exp.sum(axis=-1, keepdims=True)
    return exp / jnp.where(total == 0, 1.0, total)


def _out(logits: Any, _bias: Any, *, top_k: int, **_params: Any) -> list[_primitive.Spec]:
    shape = (logits.shape[0], top_k)
    return [(shape, jnp.int32), (shape, jnp.float32)]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    if dims.bias is not None:
        return _primitive.one_by_one(route_p, args, dims, **params)
    logits = _primitive.move_batch_to_front(args.logits, dims.logits)
    size, num_tokens, num_experts = logits.shape
    outs = route_p(logits.reshape(size * num_tokens, num_experts), args.bias, **params)
    return tuple(o.reshape(size, num_tokens, o.shape[1]) for o in outs), (0, 0)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (logits, bias), (tangent, _) = primals, tangents  # the bias has no part in the weights
    expert_ids, weights = route_p(logits, bias, **params)
    if tangent is None:
        return (expert_ids, weights), (None, None)
    tangent_out = weights_tangent(logits, tangent, expert_ids, params["rule"])
    return (expert_ids, weights), (None, tangent_out)


def weights_tangent(
    logits: jax.Array, tangent: jax.Array, expert_ids: jax.Array, rule: Rule
) -> jax.Array:
    """The tangent of the weights of fixed experts."""
    return jax.jvp(lambda x: weights_xla(x, expert_ids, rule=rule), (logits,), (tangent,))[1]


def rule_attrs(rule: Rule) -> dict[str, Any]:
    """The fields of a rule without its groups: `RuleAttrs` of csrc/ffi/route_attrs.h."""
    return {
        "score": choice("score", rule.score),
        "by_score": int(rule.by_score),
        "normalize": choice("normalize", rule.normalize),
        "epsilon": np.float32(rule.epsilon),
        "scale": np.float32(rule.scale),
    }


def group_attrs(rule: Rule) -> dict[str, Any]:
    """The groups of a rule: `GroupAttrs` of csrc/ffi/route_attrs.h."""
    return {
        "value": choice("group_value", rule.group_value or "top2"),
        "count": rule.num_groups,
        "kept": rule.top_groups,
        "masked_value": np.float32(rule.masked_value),
    }


def _attrs(_avals: Any, *, rule: Rule, **_params: Any) -> dict[str, Any]:
    return {**rule_attrs(rule), "groups": group_attrs(rule)}


def _fallback(avals: Any, **_params: Any) -> str | None:
    if avals.logits.shape[1] > MAX_CUDA_EXPERTS:
        return f"the route kernel takes at most {MAX_CUDA_EXPERTS} experts"
    return None


route_p = _primitive.define(
    "jaxmoe_route",
    out=_out,
    xla=route_xla,
    batch=_batch,
    jvp=_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_route_v2", attrs=_attrs, fallback=_fallback, absent={"bias": (1, jnp.float32)}
    ),
    rule=_sharding.independent(
        lambda *arrays, **params: route_p(*arrays, **params),
        ("route", "logits", "bias"),
        "t e, e -> t k, t k",
        free="t",
    ),
)
