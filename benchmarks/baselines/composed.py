"""The layer a JAX user writes today: sort, two grouped products, weighted sum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Weights
from benchmarks.models import Layer
from benchmarks.quantized import Quantized
from jaxmoe.activation import resolve, split_gate_up

# (lhs [R, K], rhs [E, K, N] or what stands for it, group_sizes [E]) -> [R, N]
GroupedProduct = Callable[[jax.Array, Any, jax.Array], jax.Array]


def layer(
    product: GroupedProduct,
    model: Layer,
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w: Weights | Quantized,
    residual: jax.Array,
) -> jax.Array:
    """Computes residual + MoE(x) around a given grouped product."""
    num_tokens, top_k = expert_ids.shape
    expert = expert_ids.reshape(-1)
    row_to_slot = jnp.argsort(expert, stable=True)
    row_expert = expert[row_to_slot]
    group_sizes = jnp.bincount(expert, length=model.num_experts).astype(jnp.int32)
    h = product(x[row_to_slot // top_k], w.w_gate_up, group_sizes)
    if w.b_gate_up is not None:
        h = h + w.b_gate_up[row_expert]
    h = h.astype(jnp.float32)
    act = resolve(model.activation)
    h = act(*split_gate_up(h, model.gate_up)) if act.gated else act(h)
    rows = product(h.astype(x.dtype), w.w_down, group_sizes)
    if w.b_down is not None:
        rows = rows + w.b_down[row_expert]
    slots = jnp.zeros_like(rows).at[row_to_slot].set(rows, unique_indices=True)
    slots = slots.reshape(num_tokens, top_k, -1).astype(jnp.float32)
    y = jnp.sum(slots * weights[:, :, None], axis=1)
    return (y + residual.astype(jnp.float32)).astype(x.dtype)
