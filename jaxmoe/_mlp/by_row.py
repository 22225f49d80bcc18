"""What belongs to rows and slots in the layer's derivative, moved between the orders of the two.

`r` has row_to_token [R] and slot_to_row [T,K], as `Kept` of derivative.py.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax import sizes as _sizes
from jaxmoe.permute import permute_p

COLUMNS = 8  # the shortest row that the kernels multiply


def to_rows(r: Any, tokens: jax.Array) -> jax.Array:
    """[T,..] -> [R,..], 0 in the rows of no slot."""
    (rows,) = permute_p(tokens, r.row_to_token, r.slot_to_row)
    return rows


def row_weights(r: Any, weights: jax.Array | None) -> jax.Array:
    """[T,K] -> [R], 0 in the rows of no slot; without weights ones."""
    if weights is None:
        return jnp.ones(r.row_to_token.shape, jnp.float32)
    slots, values = r.slot_to_row.reshape(-1), weights.reshape(-1)
    past_the_end = slots.size + jnp.arange(slots.size, dtype=slots.dtype)
    place = jnp.where(slots < 0, past_the_end, slots)  # distinct, as unique_indices promises
    return jnp.zeros_like(values).at[place].set(values, mode="drop", unique_indices=True)


def slot_values(r: Any, values: jax.Array) -> jax.Array:
    """[R] -> [T,K], 0 where a slot has no row."""
    exists = r.slot_to_row >= 0
    values = _sizes.with_a_row(values)
    return jnp.where(exists, values[jnp.where(exists, r.slot_to_row, 0)], 0.0)


def columns_of(values: jax.Array, dtype: Any) -> jax.Array:
    """[R] float32 -> [R,8] whose rows add up to it: a factor that keeps more bits than `dtype`."""
    info, parts = jnp.finfo(dtype), []
    for _ in range(3):
        # NOTE: not astype and back, which XLA may leave out.
        parts.append(jax.lax.reduce_precision(values, info.nexp, info.nmant))
        values = values - parts[-1]
    columns = jnp.stack(parts, axis=1).astype(dtype)
    return jnp.pad(columns, ((0, 0), (0, COLUMNS - 3)))
