"""Rules of routing that are several calls of `jaxmoe.route`, or one and what follows."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.routing import Routing, route
from jaxmoe.routing_methods import RoutingMethod

SPARSE_MIXER = "sparse_mixer"


def chosen(logits: jax.Array, options: Mapping[str, Any], **traced: Any) -> Routing:
    """The experts of tokens by the options of a layer, and arrays that are options as well.

    Beside those of `jaxmoe.route` there are the method "sparse_mixer" with `jitter`, and
    `capacity`, the tokens of a sequence that an expert takes at most.
    """
    given = dict(options) | traced
    if isinstance(given.get("method"), tuple):  # a pytree has a rule as the pairs of its fields
        given["method"] = RoutingMethod(**dict(given["method"]))
    if given.get("method") == SPARSE_MIXER:
        return _sparse_mixer(logits, given["jitter"])
    capacity = given.pop("capacity", None)
    routing = route(logits, **given)
    return routing if capacity is None else _within(routing, capacity, logits.shape[-1])


def _sparse_mixer(logits: jax.Array, jitter: float) -> Routing:
    """Two experts, each weighted by softmax of the logits that are close to its own.

    Source: https://arxiv.org/abs/2409.12136.
    """

    def choice(left: jax.Array) -> Routing:
        best = left.max(-1, keepdims=True)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        return route(jnp.where(far, -jnp.inf, left), top_k=1, method="softmax")

    first = choice(logits)
    taken = jax.nn.one_hot(first.expert_ids[..., 0], logits.shape[-1], dtype=bool)
    second = choice(jnp.where(taken, -jnp.inf, logits))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-1), first, second)


def _within(routing: Routing, capacity: int, num_experts: int) -> Routing:
    """No expert for tokens that come after `capacity` others of a sequence in its one expert."""
    ids = routing.expert_ids
    before = jax.nn.one_hot(ids[..., 0], num_experts, dtype=jnp.int32).cumsum(-2)
    place = jnp.take_along_axis(before, jnp.maximum(ids, 0), axis=-1)
    there = (place <= capacity) & (ids >= 0)
    weights = jnp.where(there, routing.weights, 0.0)
    return Routing(jnp.where(there, ids, -1), weights, num_experts)
