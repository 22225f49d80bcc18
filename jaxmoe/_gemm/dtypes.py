"""The dtypes of a grouped product: what its factors are multiplied in, and that of its result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats import Format
from jaxmoe._gemm.precision import asked
from jaxmoe._jax import checks as _checks

# Products of these are integers, summed in int32. CUDA has none of the wide ones.
_WIDE = ("int16", "int32")
INTEGERS = ("int8", "uint8", "int4", "uint4", "bool", *_WIDE)


def factors(op: str, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Returns plain factors in the one dtype that holds both exactly, as `jax.lax.dot` has it.

    Integers beside floats become floats, float32 those of more than 8 bits, which rounds int32. Two
    integers become int8, uint8, int16 or int32: XLA's CPU backend does not multiply those of 4 bits
    or booleans.
    """
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        _checks.check_array(op, name, x)
        if np.dtype(x.dtype).name not in INTEGERS:
            _checks.check_float(op, name, x, besides=INTEGERS)
    common = _common(np.dtype(lhs.dtype), np.dtype(rhs.dtype))
    turned = lambda a: a if a.dtype == common else jnp.asarray(a).astype(common)  # noqa: E731
    return turned(lhs), turned(rhs)


def _common(a: np.dtype, b: np.dtype) -> np.dtype:
    """The narrowest dtype of a product that holds the values of both."""
    floats, both = {t for t in (a, b) if t.name not in INTEGERS}, {a.name, b.name}
    wide = not both.isdisjoint(_WIDE)
    if floats:  # neither of bfloat16 and float16 holds the other
        return np.dtype(np.float32) if wide or len(floats) > 1 else floats.pop()
    if wide:
        return np.dtype(np.int32)
    if "uint8" not in both:
        return np.dtype(np.int8)
    return np.dtype(np.uint8 if both <= {"uint8", "uint4", "bool"} else np.int16)


def check_bias(op: str, bias: Any, lhs: Any) -> None:
    """Refuses a bias of another dtype than the product's, and any of integers."""
    if jnp.issubdtype(lhs.dtype, jnp.integer):
        rule = "bias must be None if lhs and rhs are integers; add it to the result"
        raise TypeError(_checks.message(op, rule, bias=bias, lhs=lhs))
    _checks.check_same_dtype(op, "bias", bias, "lhs", lhs)


def of_result(op: str, given: tuple[Any, Any], preferred: Any) -> np.dtype:
    """The dtype of the result of factors of the dtypes `given`, by the rules of `jax.lax.dot`."""
    if given[0] == given[1]:
        default = np.dtype(given[0])
    else:
        a, b = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in given)
        default = np.dtype(jax.eval_shape(jax.lax.dot, a, b).dtype)
    if preferred is None:
        return default
    integer = default.name in INTEGERS
    besides = dict.fromkeys((default.name, "int32")) if integer else ()
    return element_type(op, preferred, tuple(besides))


def element_type(op: str, value: Any, besides: tuple[str, ...] = ()) -> np.dtype:
    """Returns `preferred_element_type` as a dtype, refusing any that no result has.

    `besides`: names of dtypes that are allowed beside the floating ones.
    """
    return _checks.float_dtype(op, "preferred_element_type", value, besides)


def check_precision(op: str, precision: Any, dtype: Any, format: Format) -> Any:
    """Refuses what `jax.lax.dot` does not take; asked of JAX, whose list grows.

    Returns the precision of the product, of float32 factors that of JAX's configuration if none is
    given.
    """
    plain_floats = dtype == np.float32 and not format.quantized
    if precision is None:
        return asked(None) if plain_floats else None
    if format.quantized:
        rule = "precision must be None if rhs is quantized: products of FP8 numbers are exact"
        raise ValueError(_checks.message(op, rule, precision=precision))
    square = jax.ShapeDtypeStruct((1, 1), dtype)
    try:
        hash(precision)
        jax.eval_shape(lambda a: jax.lax.dot(a, a, precision=precision), square)
        return asked(precision) if plain_floats else precision
    except (TypeError, ValueError) as error:
        rule = (
            "precision must be None or a precision of jax.lax.dot: a jax.lax.Precision or its "
            "name, a tuple of two, or a hashable dot algorithm"
        )
        kind = ValueError if isinstance(precision, str) else TypeError
        raise kind(_checks.message(op, rule, precision=precision)) from error
