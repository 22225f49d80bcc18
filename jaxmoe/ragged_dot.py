"""`jax.lax.ragged_dot_general` for experts: the forward product, and both of its derivative."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._gemm import dtypes as _dtypes
from jaxmoe._jax import checks as _checks
from jaxmoe.grouped_gemm import grouped_gemm
from jaxmoe.weight_grad import grouped_gemm_weight_grad

_OP = "ragged_dot_general"


@_checks.array_likes
def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: None = None,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    zero_initialize: bool = True,
) -> jax.Array:
    """Multiplies groups of rows, in the three forms that a layer of experts and its gradient take.

    lhs [R, K], rhs [E, K, N]: out[r] = lhs[r] @ rhs[e]           contracting ((1,), (1,))
    lhs [R, K], rhs [E, N, K]: out[r] = rhs[e] @ lhs[r]           contracting ((1,), (2,))
    lhs [R, M], rhs [R, N]: out[e] = lhs[rows].T @ rhs[rows]      contracting ((0,), (0,))

    with e the group of row r, the rows of a group in order, and the ragged dimension 0 of `lhs`. It
    has the arguments of `jax.lax.ragged_dot_general`, and those of a tokamax `implementation`:

        tokamax.ragged_dot(lhs, rhs, sizes, implementation=(jaxmoe.ragged_dot_general, "xla"))

    Everything else that JAX has is refused by NotImplementedError, so that a caller with a list of
    implementations takes the next one; what no implementation takes is a TypeError or ValueError.

    Args:
      lhs: [R, K] in a dtype of `jaxmoe.grouped_gemm`, integers among them; or [R, M] bfloat16,
        float16 or float32.
      rhs: [E, K, N] or [E, N, K] in another such dtype or the same; or [R, N] in the dtype of
        `lhs`.
      group_sizes: [E] integers, or more than E of them with `group_offset`. Rows past their sum are
        in no group.
      ragged_dot_dimension_numbers: one of the three above, without batch dimensions.
      precision: as in `jaxmoe.grouped_gemm`.
      preferred_element_type: dtype of the result, a floating one, or int32 of integers; by default
        that of `jax.lax.dot`.
      group_offset: [] or [1] integer, group of `rhs[0]`. Not in the third form.
      out_sharding: None.
      activation: applied to the float32 result before it is rounded. Not in the third form.
      zero_initialize: for tokamax; rows of no group are 0 whatever it is, before the activation.

    Returns:
      [R, N] or [E, M, N].

    Raises:
      NotImplementedError: another form or rank, no group, other dtypes, in the third form two, an
        `out_sharding`.
      TypeError: an argument of another kind.
      TypeError, ValueError: those of `jaxmoe.grouped_gemm` and `grouped_gemm_weight_grad`.

    Numerics: those of `jaxmoe.grouped_gemm` and `jaxmoe.grouped_gemm_weight_grad`.
    Sharding: the same.
    Source: jax.lax.ragged_dot_general.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> numbers = jax.lax.RaggedDotDimensionNumbers(
      ...     dot_dimension_numbers=(((0,), (0,)), ((), ())),
      ...     lhs_ragged_dimensions=[0],
      ...     rhs_group_dimensions=[],
      ... )
      >>> lhs, rhs = jnp.array([[1.0], [2.0], [3.0]]), jnp.ones((3, 1))
      >>> jaxmoe.ragged_dot_general(lhs, rhs, jnp.array([1, 2]), numbers).tolist()
      [[[1.0]], [[5.0]]]
    """
    del zero_initialize
    _check_kinds(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, activation)
    form = _form(ragged_dot_dimension_numbers)
    if form is None:
        rule = "ragged_dot_dimension_numbers must be one of the three forms of the docstring"
        raise _unsupported(rule, ragged_dot_dimension_numbers=ragged_dot_dimension_numbers)
    _check_dtypes(lhs, rhs, form)
    ranks = (lhs.ndim, rhs.ndim, jnp.ndim(group_sizes))
    if ranks != (2, 2 if form == "gradient" else 3, 1) or jnp.shape(group_sizes) == (0,):
        rule = "lhs, rhs and group_sizes must have the axes of one of the three forms"
        raise _unsupported(rule, lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    if form != "gradient" and rhs.shape[0] == 0:
        raise _unsupported("rhs must have one group or more", rhs=rhs)
    if preferred_element_type is not None:
        integer = {lhs.dtype.name, rhs.dtype.name} <= set(_dtypes.INTEGERS)
        _check_element_type(preferred_element_type, ("int32",) if integer else ())
    if out_sharding is not None:
        raise _unsupported("out_sharding must be None", out_sharding=out_sharding)
    given = {"group_offset": group_offset, "activation": activation}
    if form == "gradient":
        for name, value in given.items():
            if value is not None:
                rule = f"{name} must be None where rows are contracted"
                raise _unsupported(rule, **{name: value})
        return grouped_gemm_weight_grad(lhs, rhs, group_sizes, precision, preferred_element_type)
    product = (lhs, rhs, group_sizes, precision)
    if activation is None:
        return grouped_gemm(*product, preferred_element_type, group_offset, weight_layout=form)
    z = grouped_gemm(*product, jnp.float32, group_offset, weight_layout=form)
    given = lhs.dtype, rhs.dtype
    return activation(z).astype(_dtypes.of_result(_OP, given, preferred_element_type))


def _check_kinds(lhs: Any, rhs: Any, group_sizes: Any, numbers: Any, activation: Any) -> None:
    """Refuses what is no argument of JAX's function, nor an activation."""
    for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        if not hasattr(x, "dtype"):  # quantized arrays of other packages have one
            _checks.check_array(_OP, name, x)
    if not isinstance(numbers, jax.lax.RaggedDotDimensionNumbers):
        name = "ragged_dot_dimension_numbers"
        rule = f"{name} must be a jax.lax.RaggedDotDimensionNumbers"
        raise TypeError(_checks.message(_OP, rule, **{name: numbers}))
    if activation is not None and not callable(activation):
        rule = "activation must be a function of the result, or None"
        raise TypeError(_checks.message(_OP, rule, activation=activation))


def _check_dtypes(lhs: Any, rhs: Any, form: str) -> None:
    """Refuses dtypes that a product does not have."""
    floats, names = ", ".join(_checks.FLOATS), {lhs.dtype.name, rhs.dtype.name}
    if form == "gradient":
        if len(names) > 1 or not names <= set(_checks.FLOATS):
            rule = f"lhs and rhs must have one dtype of {floats} where rows are contracted"
            raise _unsupported(rule, lhs=lhs, rhs=rhs)
    elif not names <= {*_checks.FLOATS, *_dtypes.INTEGERS}:
        rule = f"lhs and rhs must have dtypes of {floats}, {', '.join(_dtypes.INTEGERS)}"
        raise _unsupported(rule, lhs=lhs, rhs=rhs)


def _check_element_type(value: Any, besides: tuple[str, ...]) -> None:
    """Refuses a `preferred_element_type` that no result has here."""
    name, allowed = "preferred_element_type", (*besides, *_checks.FLOATS)
    text = " or ".join(allowed)
    try:
        wanted = jnp.dtype(value)
    except TypeError:
        raise TypeError(_checks.message(_OP, f"{name}={value!r} must be {text}")) from None
    if wanted.name not in allowed:
        raise _unsupported(f"{name}={wanted.name} must be {text}")


def _form(numbers: jax.lax.RaggedDotDimensionNumbers) -> str | None:
    """Layout of `rhs`, "gradient" where rows are contracted, None for anything else."""
    (of_lhs, of_rhs), batch = numbers.dot_dimension_numbers
    contracted, ragged = (tuple(of_lhs), tuple(of_rhs)), tuple(numbers.lhs_ragged_dimensions)
    groups = tuple(numbers.rhs_group_dimensions)
    if any(len(b) for b in batch) or ragged != (0,):
        return None
    forms: dict[Any, str] = {
        (((1,), (1,)), (0,)): "kn",
        (((1,), (2,)), (0,)): "nk",
        (((0,), (0,)), ()): "gradient",
    }
    return forms.get((contracted, groups))


def _unsupported(rule: str, **values: Any) -> NotImplementedError:
    return NotImplementedError(_checks.message(_OP, rule, **values))
