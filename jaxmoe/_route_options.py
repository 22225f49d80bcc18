"""The arguments of `route`: what they must be, and what the computation takes of them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import sizes as _sizes
from jaxmoe._route import Rule, constant_padding, without
from jaxmoe.routing_methods import RoutingMethod, method_of

_EPSILON = 1e-20
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `route`, checked.

    Attributes:
      logits, top_k, rule: of the primitive; logits are NaN where `mask` is False.
      bias: [E], or None.
      scale: float32 scalar, or None if it is in the rule.
      expert_scale: [E] float32, or None.
      num_shared_experts: S.
      shared_logits: [T, S], or None where shared experts have weight 1.
      num_valid: int32 scalar, the number of rows that are no padding, or None for all.
      mask: [T] bool, False for padding, or None.
      expert_ids: [T, K] int32, -1 where it names no expert with a score, or None to choose.
      return_scores: whether to return scores.
    """

    logits: jax.Array
    top_k: int
    rule: Rule
    bias: jax.Array | None
    scale: jax.Array | None
    expert_scale: jax.Array | None
    num_shared_experts: int
    shared_logits: jax.Array | None
    num_valid: jax.Array | None
    mask: jax.Array | None
    expert_ids: jax.Array | None
    return_scores: bool


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
    mask: Any,
    expert_ids: Any,
    return_scores: Any,
) -> Options:
    """Checks the arguments of `route` in the name of `op`."""
    _checks.check_rank(op, "logits", logits, "T,E")
    _checks.check_dtype(op, "logits", logits, _checks.FLOATS)
    row = method_of(op, method)
    num_shared_experts = _checks.check_int(op, "num_shared_experts", num_shared_experts, 0)
    logits, shared_logits = _apart(op, logits, row, num_shared_experts)
    num_experts = logits.shape[1]
    top_k = _checks.check_int(op, "top_k", top_k, 1, num_experts, "the last axis is E")
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
    factor, scale = _check_scale(op, scale)
    rule = Rule(
        score=row.score,
        by_score=row.by_score,
        normalize=normalize,
        epsilon=epsilon,
        scale=factor,
        group_value=row.group_value if num_groups > 1 else "",
        num_groups=num_groups,
        top_groups=top_groups,
        masked_value=masked_value,
    )
    if mask is not None:
        _check_mask(op, logits, mask, num_valid_tokens)
        mask = jnp.asarray(mask)
        logits = without(logits, mask)
    num_valid = _num_valid(op, logits, num_valid_tokens)
    if num_valid is not None:
        logits = constant_padding(logits, num_valid)
    if type(return_scores) is not bool:
        rule = "return_scores must be a bool"
        raise TypeError(_checks.message(op, rule, return_scores=return_scores))
    return Options(
        logits=logits,
        top_k=top_k,
        rule=rule,
        bias=bias,
        scale=scale,
        expert_scale=None if expert_scale is None else jnp.asarray(expert_scale, jnp.float32),
        num_shared_experts=num_shared_experts,
        shared_logits=shared_logits,
        num_valid=num_valid,
        mask=mask,
        expert_ids=None if expert_ids is None else _forced_ids(op, logits, top_k, expert_ids),
        return_scores=return_scores,
    )


def _apart(
    op: str, logits: Any, row: RoutingMethod, num_shared: int
) -> tuple[Any, jax.Array | None]:
    """The logits of routed experts, and those of shared ones if these have some."""
    if row.shared and num_shared == 0:
        rule = "num_shared_experts=0 must be at least 1: shared experts have logits in this rule"
        raise ValueError(_checks.message(op, rule))
    least = 1 + (num_shared if row.shared else 0)
    if logits.shape[1] < least:
        rule = f"logits.shape[1]={logits.shape[1]} must be at least {least} (num_experts)"
        raise ValueError(_checks.message(op, rule, logits=logits))
    if not row.shared:
        return logits, None
    logits = jnp.asarray(logits)
    return logits[:, :-num_shared], logits[:, -num_shared:]


def _named(method: str | RoutingMethod) -> str:
    return f"method {method!r}" if isinstance(method, str) else "this RoutingMethod"


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


def _check_float(
    op: str,
    name: str,
    value: Any,
    finite: bool = True,
    kinds: str = "a Python float known at trace time",
) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(_checks.message(op, f"{name} must be {kinds}", **{name: value}))
    if not (abs(value) <= _LARGEST or (value == -math.inf and not finite)):
        rule = f"{name}={value!s:.40} must be {'finite' if finite else 'finite or -inf'} in float32"
        raise ValueError(_checks.message(op, rule))
    return float(value)


def _check_scale(op: str, scale: Any) -> tuple[float, jax.Array | None]:
    """The scale that is part of the rule, and the one that is an array."""
    if not isinstance(scale, jax.Array | np.ndarray):
        kinds = "a number or a scalar array of bf16, f16 or f32"
        return _check_float(op, "scale", scale, kinds=kinds), None
    _checks.check_rank(op, "scale", scale, "")
    _checks.check_dtype(op, "scale", scale, _checks.FLOATS)
    return 1.0, jnp.asarray(scale, jnp.float32)


def _check_mask(op: str, logits: Any, mask: Any, num_valid_tokens: Any) -> None:
    if num_valid_tokens is not None:
        rule = "num_valid_tokens must be None with a mask, which says it of every token"
        raise ValueError(_checks.message(op, rule, num_valid_tokens=num_valid_tokens, mask=mask))
    _checks.check_rank(op, "mask", mask, "T")
    _checks.check_dtype(op, "mask", mask, ("bool",))
    _checks.check_same_dim(op, "mask", mask, 0, "logits", logits, 0, "num_tokens")


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
