"""A choice of experts made elsewhere, in dtypes of its own, as a `jaxmoe.Routing`."""

from typing import Any

import jax.numpy as jnp

from jaxmoe._jax import checks as _checks
from jaxmoe.routing import Routing


def routing_of(
    op: str, names: tuple[str, str], ids: Any, weights: Any, num_experts: int
) -> Routing:
    """The routing of integer ids and floating weights, by the names that `op` has for them."""
    kinds = ((ids, jnp.integer, "an integer"), (weights, jnp.floating, "a floating"))
    for name, (x, kind, word) in zip(names, kinds, strict=True):
        _checks.check_array(op, name, x)
        if not jnp.issubdtype(x.dtype, kind):
            rule = f"{name}.dtype={_checks.dtype_name(x.dtype)} must be {word} type"
            raise TypeError(_checks.message(op, rule, **{name: x}))
    return Routing(ids.astype(jnp.int32), weights.astype(jnp.float32), num_experts=num_experts)
