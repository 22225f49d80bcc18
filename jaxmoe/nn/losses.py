"""The losses of a block's router, with the coefficients of its config."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import max_dim

from jaxmoe._route import scores_of
from jaxmoe.losses import load_balancing_loss, router_z_loss, sequence_balance_loss
from jaxmoe.routing import Routing
from jaxmoe.routing_methods import method_of


def of_router(
    config: Any, logits: jax.Array, routing: Routing, mask: jax.Array | None
) -> jax.Array:
    """The losses with their coefficients."""
    loss = jnp.zeros((), jnp.float32)
    if config.balance_loss or config.sequence_balance_loss:
        scores = _scores(config, logits[..., : config.num_experts])
        ids = routing.expert_ids[..., : config.top_k]
        if config.balance_loss:
            loss += config.balance_loss * load_balancing_loss(scores, ids, mask)
        if config.sequence_balance_loss:
            if config.selection_bias:  # which the paper's loss leaves out of the counts
                ids = jax.lax.top_k(jax.lax.stop_gradient(scores), config.top_k)[1]
            each = sequence_balance_loss(scores, ids, mask)
            loss += config.sequence_balance_loss * jnp.sum(each) / max_dim(each.shape[0], 1)
    if config.z_loss:
        loss += config.z_loss * router_z_loss(logits, mask)
    return loss


def _scores(config: Any, logits: jax.Array) -> jax.Array:
    """Scores of the balance loss, probabilities: those of the rule by their sum, else softmax."""
    score = method_of("MoEConfig", config.method).score
    if score in ("logits", "softmax"):
        return jax.nn.softmax(logits, axis=-1)
    scores = scores_of(logits, score)
    total = jnp.sum(scores, axis=-1, keepdims=True)
    return scores / jnp.where(total == 0, 1.0, total)
