"""Routing: from the router's logits to the experts of each token and their weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxmoe import _saved
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe._route import completed, first_tokens, loss_scores, route_p, weights_xla, without
from jaxmoe._route_options import Options, check_options
from jaxmoe.routing_methods import RoutingMethod


@_saved.register
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
      scores: [T, E] float32 for the losses, if `route` was asked for them. Layers read none.
    """

    expert_ids: jax.Array
    weights: jax.Array
    num_experts: int | None = dataclasses.field(default=None, metadata={"static": True})
    scores: jax.Array | None = None


@_checks.array_likes
def route(
    logits: jax.Array,
    *,
    top_k: int,
    method: str | RoutingMethod = "renormalize",
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float | jax.Array = 1.0,
    norm_topk_prob: bool | None = None,
    epsilon: float | None = None,
    masked_group_value: float = -math.inf,
    expert_scale: jax.Array | None = None,
    num_shared_experts: int = 0,
    num_valid_tokens: int | jax.Array | None = None,
    mask: jax.Array | None = None,
    expert_ids: jax.Array | None = None,
    return_scores: bool = False,
) -> Routing:
    """Chooses the experts of each token and their weights.

    expert_ids[t] = the top_k experts of largest key[t], in falling order, ties to the smaller id
    weights[t,k] = normalized(score[t, expert_ids[t,k]]) * scale * expert_scale[expert_ids[t,k]]

    Scores, keys and normalization of each method are a table in docs/semantics.md, the method of
    each model family is in docs/routing.md. A NaN logit is an expert that cannot be chosen and is
    left out of every sum; a token with fewer than top_k others gets id -1 and weight 0 in the
    remaining places. -inf is the lowest logit there is.

    Args:
      logits: [T, E] bfloat16, float16 or float32. T stands for one axis or several, [B, S, E]. With
        a `RoutingMethod` whose `shared` is True [T, E + S].
      top_k: experts for each token, 1 to E; 1 for "llama4".
      method: the name of a rule, such as "renormalize" (Mixtral, Qwen3), "softmax" (OLMoE) or
        "deepseek_v3", or a `RoutingMethod`.
      bias: [E], added to the scores for the choice only ("deepseek_v3", "minimax2",
        "sqrtsoftplus").
      num_groups: groups of neighbours that the experts form ("deepseek_v3", "deepseek_v2").
      top_groups: groups that experts are chosen from, ranked by the sum of their two largest keys
        ("deepseek_v3") or by the largest ("deepseek_v2").
      scale: factor of every weight but those of shared experts (`routed_scaling_factor`): a number,
        part of the program, or a scalar bfloat16, float16 or float32 array, which may be traced.
      norm_topk_prob: divide the weights of a token by their sum; by default what the method does.
      epsilon: added to that sum, 1e-20 by default; "sigmoid_renorm" takes the larger of the two.
      masked_group_value: key of the experts of other groups; by default they cannot be chosen. 0.0,
        as in transformers 4, lets them win over negative keys.
      expert_scale: [E], a factor of each expert's weight.
      num_shared_experts: S experts that every token takes: S more columns with ids E to E + S - 1
        and weight 1, or that of their logits.
      num_valid_tokens: rows from there on are padding: id -1, weight 0. For one axis of tokens.
      mask: [T] bool, True for valid tokens; the others are padding, wherever they are, and whatever
        their logits hold. Not with num_valid_tokens.
      expert_ids: [T, top_k] int16 or int32, experts chosen elsewhere (a replay, or a table looked
        up by token id): only the weights are computed. Ids of no expert, or of one whose logit is
        NaN, become -1. To record a choice in half the bytes, keep the first top_k columns of
        `routing.expert_ids.astype(jnp.int16)`.
      return_scores: fill `routing.scores`, which `load_balancing_loss` and `sequence_balance_loss`
        take: the method's scores, without the bias, or softmax(logits) where the score is the logit
        itself. 0 for a NaN logit and in padding.

    Returns:
      `Routing` with expert_ids [T, top_k + S] int32 and weights [T, top_k + S] float32, and scores
      [T, E] float32 if they are asked for.

    Raises:
      TypeError: an array of another dtype, a number that is none or not known at trace time.
      ValueError: a wrong shape or number, no such method, or an option that the method lacks.

    Numerics: float32 throughout. Ids chosen by logit are exact; those chosen by score are as exact
      as the score, which devices round differently in the last bit. A `scale` that is an array
      gives the weights of the same number but for the last bit. Gradients flow through weights and
      scores to `logits`, `scale` and `expert_scale`, with the ids fixed, in forward and reverse
      mode and to any order; none to `bias`.
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
                "one; mask says which are valid"
            )
            raise ValueError(_checks.message("route", rule, logits=logits))
        logits, expert_ids = lead.flat("logits", logits), lead.flat("expert_ids", expert_ids)
        mask = lead.flat_mask(mask)
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
        mask=mask,
        expert_ids=expert_ids,
        return_scores=return_scores,
    )
    routing = routing_of(given)
    return routing if lead is None else jax.tree.map(lead.unflat, routing)


def routing_of(given: Options) -> Routing:
    """Computes `route` of checked arguments."""
    if given.expert_ids is None:
        ids, weights = route_p(given.logits, given.bias, top_k=given.top_k, rule=given.rule)
    else:
        ids = given.expert_ids
        weights = weights_xla(given.logits, ids, rule=given.rule)
    (num_tokens, num_experts), shared = given.logits.shape, given.num_shared_experts
    valid = given.mask if shared else None  # the logits say it of the others
    if given.num_valid is not None:
        valid = first_tokens(num_tokens, given.num_valid)
    ids, weights = completed(ids, weights, num_experts, shared, valid)
    if given.shared_logits is not None:  # in one sum with the chosen ones
        there = ~jnp.isnan(given.shared_logits)
        before = ((0, 0), (given.top_k, 0))
        ids = jnp.where(jnp.pad(there, before, constant_values=True), ids, -1)
        logits = jnp.concatenate([given.logits, given.shared_logits], axis=1)
        weights = weights_xla(logits, ids, rule=given.rule)
    return finished(given, ids, weights)


def finished(given: Options, expert_ids: jax.Array, weights: jax.Array) -> Routing:
    """Multiplies weights [T, K + S] by the factors that are arrays, and adds the scores."""
    (num_tokens, num_experts), shared = given.logits.shape, given.num_shared_experts
    if given.scale is not None or given.expert_scale is not None:
        routed = _scaled(weights[:, : given.top_k], expert_ids[:, : given.top_k], given)
        rest = [weights[:, given.top_k :]] if shared else []
        if given.shared_logits is not None and given.scale is not None:
            rest = [rest[0] * given.scale]
        weights = jnp.concatenate([routed, *rest], axis=1)
    scores = None
    if given.return_scores:
        x = given.logits
        if given.num_valid is not None:
            x = without(x, first_tokens(num_tokens, given.num_valid))
        scores = loss_scores(x, given.rule.score)
    return Routing(expert_ids, weights, num_experts + shared, scores)


def _scaled(weights: jax.Array, expert_ids: jax.Array, given: Options) -> jax.Array:
    chosen = expert_ids >= 0
    if given.scale is not None:
        weights = weights * given.scale
    if given.expert_scale is not None:
        weights = weights * given.expert_scale[jnp.where(chosen, expert_ids, 0)]
    return jnp.where(chosen, weights, 0.0)  # also where a factor is NaN
