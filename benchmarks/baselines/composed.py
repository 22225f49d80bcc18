"""The layer a JAX user writes today: sort, two grouped products, weighted sum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from benchmarks.cases import Routed
from jaxmoe.activation import resolve, split_gate_up

# (lhs [R, K], rhs [E, K, N] or what stands for it, group_sizes [E]) -> [R, N]
GroupedProduct = Callable[[jax.Array, Any, jax.Array], jax.Array]


def layer(
    x: jax.Array,
    r: Routed,
    w: jaxmoe.Experts,
    residual: jax.Array,
    *,
    product: GroupedProduct,
) -> jax.Array:
    """Computes residual + MoE(x) around a given grouped product."""
    num_tokens, top_k = r.expert_ids.shape
    expert = r.expert_ids.reshape(-1)
    row_to_slot = jnp.argsort(expert, stable=True)
    row_expert = expert[row_to_slot]
    group_sizes = jnp.bincount(expert, length=w.num_experts).astype(jnp.int32)
    h = product(x[row_to_slot // top_k], w.gate_up, group_sizes)
    if w.gate_up_bias is not None:
        h = h + w.gate_up_bias[row_expert]
    h = h.astype(jnp.float32)
    act = resolve(w.activation)
    h = act(*split_gate_up(h, w.order)) if act.gated else act(h)
    rows = product(h.astype(x.dtype), w.down, group_sizes)
    if w.down_bias is not None:
        rows = rows + w.down_bias[row_expert]
    slots = jnp.zeros_like(rows).at[row_to_slot].set(rows, unique_indices=True)
    slots = slots.reshape(num_tokens, top_k, -1).astype(jnp.float32)
    y = jnp.sum(slots * r.weights[:, :, None], axis=1)
    return (y + residual.astype(jnp.float32)).astype(x.dtype)
