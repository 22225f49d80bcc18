"""Arrays that have no derivative, which says so by name."""

from typing import Any

import jax

from jaxmoe._jax import checks as _checks


def _identity(x: jax.Array, _op: str, _name: str, _rule: str) -> jax.Array:
    return x


def _refuse(op: str, name: str, rule: str, primals: Any, _tangents: Any) -> Any:
    (array,) = primals
    raise NotImplementedError(_checks.message(op, rule, **{name: array}))


# frozen(x, op, name, rule): x, whose derivative raises `rule` about `name`.
frozen: Any = jax.custom_jvp(_identity, nondiff_argnums=(1, 2, 3))
frozen.defjvp(_refuse)
