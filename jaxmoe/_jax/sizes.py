"""Sizes that are numbers, or symbols of a program that `jax.export` makes for any of them.

What is computed of a size holds for both if it is an expression; a decision needs a number.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import max_dim


def is_known(size: Any) -> bool:
    """Whether a size is a number."""
    return isinstance(size, int)


def exceeds(size: Any, limit: int) -> bool:
    """Whether a size is above `limit`; a symbol is taken to stay below it."""
    return is_known(size) and size > limit


def with_a_row(x: jax.Array) -> jax.Array:
    """Adds a row of zeros to [T,...] where T may be 0, so that there is something to index."""
    rows = x.shape[0]
    if max_dim(rows, 1) == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((1, *x.shape[1:]), x.dtype)])
