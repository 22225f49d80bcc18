"""Routing with its plan in one call: `route`, then `plan` of its choices."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sharding as _sharding
from jaxmoe._route import (
    MAX_CUDA_EXPERTS,
    completed,
    first_tokens,
    group_attrs,
    route_xla,
    rule_attrs,
    weights_tangent,
)
from jaxmoe._route_options import check_options
from jaxmoe.plan import (
    Plan,
    check_rows,
    check_window,
    plan_of,
    plan_scratch_size,
    plan_xla,
)
from jaxmoe.routing import Routing, finished, routing_of
from jaxmoe.routing_methods import RoutingMethod

_OP = "route_and_plan"


@_checks.array_likes
def route_and_plan(
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
    expert_offset: int = 0,
    num_local_experts: int | None = None,
    expert_map: jax.Array | None = None,
) -> tuple[Routing, Plan]:
    """Chooses the experts of each token, and orders the choices by expert.

    The bits of `routing = route(logits, ...)` and `plan(routing.expert_ids, E + S, ...)`, E experts
    of the logits and S = num_shared_experts; on CUDA by one call, which is a kernel for few tokens
    and two for more, except for the very largest plans.

    Args:
      logits: [T, E] bfloat16, float16 or float32.
      top_k: experts for each token.
      method: as all options down to return_scores that of `route`.
      bias: [E], see `route`.
      num_groups: see `route`.
      top_groups: see `route`.
      scale: see `route`.
      norm_topk_prob: see `route`.
      epsilon: see `route`.
      masked_group_value: see `route`.
      expert_scale: [E], see `route`.
      num_shared_experts: S, see `route`. Shared experts are experts E to E + S - 1 of the plan.
      num_valid_tokens: see `route`. Padding is in no group of the plan.
      mask: [T] bool, see `route`. Invalid tokens are in no group either; with shared experts it is
        two calls.
      expert_ids: [T, top_k], see `route`. There is nothing to choose then: one call for the plan.
      return_scores: see `route`.
      expert_offset: global id of the first local expert, see `plan`.
      num_local_experts: number of local experts; by default every one from `expert_offset` on, or
        E + S if a map is given.
      expert_map: [E + S] int32, local id of each global expert, see `plan`.

    Returns:
      `Routing` with arrays [T, top_k + S] and its `Plan`.

    Raises:
      TypeError, ValueError: as `route` and `plan`.

    Numerics: as `route`, gradients included; the plan is integers and has none.
    Sharding: as `plan`.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> logits = jnp.array([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 3.0, 0.0]])
      >>> routing, plan = jaxmoe.route_and_plan(logits, top_k=2)
      >>> routing.expert_ids.tolist(), plan.slot_to_row.tolist(), plan.expert_offsets.tolist()
      ([[1, 2], [0, 2]], [[1, 2], [0, 3]], [0, 1, 2, 4, 4])
    """
    given = check_options(
        _OP,
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
    num_tokens, num_experts = given.logits.shape
    shared = given.num_shared_experts
    total, offset, local = check_window(
        _OP, num_experts + shared, expert_offset, num_local_experts, expert_map
    )
    check_rows(_OP, num_tokens * (given.top_k + shared), logits=logits)
    window = {"expert_offset": offset, "num_local_experts": local}
    shared_of_some = shared > 0 and (given.mask is not None or given.shared_logits is not None)
    if given.expert_ids is not None or num_experts > MAX_CUDA_EXPERTS or shared_of_some:
        # XLA chooses, takes shared experts from some tokens or weighs them: the plan comes after.
        routing = routing_of(given)
        return routing, plan_of(routing.expert_ids, expert_map, num_experts=total, **window)
    ids, weights, *arrays = _route_plan(
        given.logits[None],
        given.bias,
        expert_map,
        None if given.num_valid is None else given.num_valid[None],
        top_k=given.top_k,
        rule=given.rule,
        num_shared_experts=shared,
        **window,
    )
    return finished(given, ids[0], weights[0]), Plan(*(a[0] for a in arrays))


def _xla(
    logits: jax.Array,
    bias: jax.Array | None,
    expert_map: jax.Array | None,
    num_valid: jax.Array | None,
    *,
    top_k: int,
    rule: Any,
    num_shared_experts: int,
    **window: int,
) -> tuple[jax.Array, ...]:
    """Computes the primitive in plain jnp."""
    num_tokens, num_experts = logits.shape[1:]

    def of_entry(x: jax.Array, count: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        ids, weights = route_xla(x, bias, top_k=top_k, rule=rule)
        valid = None if count is None else first_tokens(num_tokens, count)
        return completed(ids, weights, num_experts, num_shared_experts, valid)

    axes = (0, None if num_valid is None else 0)
    ids, weights = jax.vmap(of_entry, axes)(logits, num_valid)
    total = num_experts + num_shared_experts
    return ids, weights, *plan_xla(ids, expert_map, num_experts=total, **window)


def _out(
    logits: Any,
    *_others: Any,
    top_k: int,
    num_shared_experts: int,
    num_local_experts: int,
    **_params: Any,
) -> list[_primitive.Spec]:
    batch, num_tokens, _ = logits.shape
    columns = top_k + num_shared_experts
    choices = (batch, num_tokens, columns)
    return [
        (choices, jnp.int32),
        (choices, jnp.float32),
        ((batch, num_local_experts + 1), jnp.int32),
        ((batch, num_tokens * columns), jnp.int32),
        (choices, jnp.int32),
    ]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    if (
        dims.bias is not None or dims.expert_map is not None
    ):  # the kernel takes one bias and one map
        return _primitive.one_by_one(_route_plan, args, dims, **params)
    size = _primitive.batch_size(args, dims)
    logits = _primitive.move_batch_to_front(args.logits, dims.logits, size)
    batch, num_valid = logits.shape[1], args.num_valid
    if num_valid is not None:
        num_valid = _primitive.move_batch_to_front(num_valid, dims.num_valid, size)
        num_valid = num_valid.reshape(size * batch)
    logits = logits.reshape(size * batch, *logits.shape[2:])
    outs = _route_plan(logits, args.bias, args.expert_map, num_valid, **params)
    return tuple(o.reshape(size, batch, *o.shape[1:]) for o in outs), (0,) * len(outs)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outs = _route_plan(*primals, **params)
    if tangents.logits is None:  # the bias has no part in the weights
        return outs, (None,) * len(outs)
    top_k, shared = params["top_k"], params["num_shared_experts"]

    def of_entry(x: jax.Array, tangent: jax.Array, expert_ids: jax.Array) -> jax.Array:
        return weights_tangent(x, tangent, expert_ids, params["rule"])

    tangent = jax.vmap(of_entry)(primals.logits, tangents.logits, outs[0][..., :top_k])
    tangent = jnp.pad(tangent, ((0, 0), (0, 0), (0, shared)))
    return outs, (None, tangent, *[None] * (len(outs) - 2))


def _attrs(
    _avals: Any, *, rule: Any, num_shared_experts: int, expert_offset: int, **_params: Any
) -> dict[str, Any]:
    return {
        "num_shared_experts": num_shared_experts,
        "expert_offset": expert_offset,
        "rule": rule_attrs(rule),
        "groups": group_attrs(rule),
    }


def _scratch(
    avals: Any, *, top_k: int, num_shared_experts: int, num_local_experts: int, **_params: Any
) -> list[_primitive.Spec]:
    batch, num_tokens, _ = avals.logits.shape
    rows = num_tokens * (top_k + num_shared_experts)
    size = plan_scratch_size(batch, rows, num_local_experts)
    return [((size,), jnp.int32)]


_route_plan = _primitive.define(
    "jaxmoe_route_plan",
    out=_out,
    xla=_xla,
    batch=_batch,
    jvp=_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_route_plan_v1",
        attrs=_attrs,
        scratch=_scratch,
        absent={
            "bias": (1, jnp.float32),
            "expert_map": (1, jnp.int32),
            "num_valid": (1, jnp.int32),
        },
    ),
    rule=_sharding.independent(
        lambda *arrays, **params: _route_plan(*arrays, **params),
        (_OP, "logits", "bias", "expert_map", "num_valid_tokens"),
        "b t e, e, m, b -> b t k, b t k, b f, b r, b t k",
        free="b",
        tokens="t",
    ),
)
