"""What tokamax calls an implementation of its ragged dot, with every argument that it may pass."""

from typing import Any

import jax

from jaxmoe._jax import checks as _checks
from jaxmoe.ragged_dot import ragged_dot_general

_OP = "seams.tokamax.ragged_dot"


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    manual_axis_type: Any = None,
    fuse_gateup_activation: str | None = None,
    **options: Any,
) -> jax.Array:
    """Computes `jaxmoe.ragged_dot_general`, and leaves to the next implementation what it has not.

        tokamax.ragged_dot(lhs, rhs, sizes, implementation=(ragged_dot, "xla"))

    `jaxmoe.ragged_dot_general` serves for arrays alone; tokamax passes the two options below where
    its caller does, and takes quantized arrays.

    Args:
      lhs, rhs: as `jaxmoe.ragged_dot_general` takes them. No `QArray`.
      manual_axis_type: None: results vary over mesh axes as `lhs` and `rhs` do.
      fuse_gateup_activation: None: `jaxmoe.moe_mlp` has activations with a gate.
      **options: group_sizes, also as tokamax' `RaggedDotGroupSizes`, ragged_dot_dimension_numbers,
        precision, preferred_element_type, group_offset, activation and zero_initialize, as
        `jaxmoe.ragged_dot_general` takes them.

    Returns:
      [R, N] or [E, M, N].

    Raises:
      NotImplementedError: what is not done here; tokamax goes on with its next implementation.
      TypeError, ValueError: those of `jaxmoe.ragged_dot_general`.

    Numerics, Sharding: those of `jaxmoe.ragged_dot_general`.
    Source: tokamax 0.0.17, tokamax/_src/ops/ragged_dot/api.py.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmoe.seams import tokamax
      >>> numbers = jax.lax.RaggedDotDimensionNumbers(
      ...     dot_dimension_numbers=(((1,), (1,)), ((), ())),
      ...     lhs_ragged_dimensions=[0],
      ...     rhs_group_dimensions=[0],
      ... )
      >>> tokamax.ragged_dot(
      ...     jnp.ones((2, 3)), jnp.ones((1, 3, 1)), group_sizes=jnp.array([1]),
      ...     ragged_dot_dimension_numbers=numbers).tolist()
      [[3.0], [0.0]]
    """
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if hasattr(x, "qvalue"):
            rule = (
                f"{name} must be an array; jaxmoe.seams.qwix.weight makes weights of a QArray "
                "once, which jaxmoe.grouped_gemm multiplies"
            )
            raise NotImplementedError(_checks.message(_OP, rule, **{name: x}))
    given = {
        "manual_axis_type": manual_axis_type,
        "fuse_gateup_activation": fuse_gateup_activation,
    }
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(_checks.message(_OP, f"{name} must be None", **{name: value}))
    return ragged_dot_general(lhs, rhs, **options)
