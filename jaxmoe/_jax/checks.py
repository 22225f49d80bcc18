"""Argument checks that speak one message format.

    jaxmoe.<op>: <argument>=<value> must <rule>. Got <argument>: <type[shape]>, ...

`ValueError` is a wrong value, `TypeError` a wrong kind of value, `NotImplementedError` a right one
that nothing here can run. Every helper takes the op's public name first and raises at trace time.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.core import ShapedArray

# (regular expression on numpy's name, short form); the first that matches is used.
_SHORT = (("^bfloat", "bf"), ("^float", "f"), ("^uint", "u"), ("^int", "i"), ("^complex", "c"))

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, ShapedArray)

FLOATS = ("bfloat16", "float16", "float32")


def dtype_name(dtype: Any) -> str:
    """Shortens a dtype's name: bfloat16 -> bf16, int32 -> i32, float8_e4m3fn -> f8_e4m3fn."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return str(dtype)
    name = np.dtype(dtype).name
    for pattern, short in _SHORT:
        if re.match(pattern, name):
            return re.sub(pattern, short, name)
    return name


def describe(x: Any) -> str:
    """Short text for `x`: `bf16[512,2048]` for an array, else its value or type."""
    if is_quantized(x):
        return f"a QuantizedArray ({x.format}, values {describe(x.values)})"
    if isinstance(x, _ARRAYS):
        return f"{dtype_name(x.dtype)}[{','.join(map(str, x.shape))}]"
    if x is None or isinstance(x, bool | int | float | str):
        return repr(x)
    if hasattr(x, "shape") and hasattr(x, "dtype"):  # an array, but of another package
        return f"a {type(x).__module__.split('.')[0]}.{type(x).__name__}"
    return f"a {type(x).__name__}"


def array_likes[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Makes `fn` take objects that stand for an array (`__jax_array__`), as parameters of flax do.

    They may be arguments, or fields of arguments that are dataclasses, such as `jaxmoe.Experts`.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        function: Callable[..., R] = fn
        return function(*map(as_arrays, args), **{n: as_arrays(a) for n, a in kwargs.items()})

    return call


def as_arrays(value: Any) -> Any:
    """Returns `value` with arrays in the place of what stands for one."""
    if isinstance(value, _ARRAYS) or jax.export.is_symbolic_dim(value):
        return value
    if hasattr(type(value), "__jax_array__"):
        return value.__jax_array__()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    arrays = {name: as_arrays(field) for name, field in fields.items()}
    if all(arrays[name] is field for name, field in fields.items()):
        return value
    same = object.__new__(type(value))  # unchecked: the function checks it
    for name, array in arrays.items():
        object.__setattr__(same, name, array)
    return same


def message(op: str, rule: str, **got: Any) -> str:
    """Text of an error: the broken rule, then the arguments `got`."""
    given = ", ".join(f"{name}: {describe(value)}" for name, value in got.items())
    return f"jaxmoe.{op}: {rule}." + (f" Got {given}." if given else "")


def is_quantized(x: Any) -> bool:
    """Whether `x` is a `jaxmoe.QuantizedArray`, whose module imports this one."""
    return hasattr(x, "values") and hasattr(x, "scales")


def check_array(op: str, name: str, x: Any) -> None:
    """Refuses anything that is not a JAX or NumPy array, such as a list."""
    if is_quantized(x):
        rule = (
            f"{name} must be a JAX or NumPy array, not a QuantizedArray; "
            f"jaxmoe.dequantize({name}) gives one"
        )
        raise TypeError(message(op, rule, **{name: x}))
    if not isinstance(x, jax.Array | np.ndarray):
        made = "; jaxmoe.seams has weight() for those of qwix and aqt" if _of_package(x) else ""
        raise TypeError(message(op, f"{name} must be a JAX or NumPy array{made}", **{name: x}))
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(message(op, f"{name} must be an array of numbers", **{name: x}))


def _of_package(x: Any) -> bool:
    """Whether `x` is a quantized array of another package."""
    return hasattr(x, "qvalue") and hasattr(x, "scale")


def check_float(op: str, name: str, x: Any, besides: Sequence[str] = ()) -> None:
    """Refuses arrays that are not of a floating type we multiply in, nor `besides`."""
    check_array(op, name, x)
    dtype, allowed = np.dtype(x.dtype), (*FLOATS, *besides)
    if dtype.name not in allowed and dtype.itemsize == 1 and dtype.kind != "b":
        rule = (
            f"{name}.dtype={dtype_name(dtype)} must be {' or '.join(map(dtype_name, allowed))}; "
            "quantized weights and tokens come with their scales as a jaxmoe.QuantizedArray"
        )
        raise NotImplementedError(message(op, rule, **{name: x}))
    check_dtype(op, name, x, allowed)


def nearest(size: int, step: int) -> str:
    """What a message says of a size that is no positive multiple of `step`."""
    below = size // step * step
    return f"the nearest legal: {f'{below} and ' if below else ''}{below + step}"


def check_multiple(op: str, name: str, x: Any, size: int, step: int, what: str) -> None:
    """Refuses an array that stands for `size` of something, no positive multiple of `step`."""
    if step > 1 and (size < 1 or size % step):
        rule = f"{name} must hold a positive multiple of {step} {what}, not {size}"
        raise ValueError(message(op, f"{rule}; {nearest(size, step)}", **{name: x}))


def check_rank(op: str, name: str, x: Any, axes: str) -> None:
    """Checks the number of axes against their names: `check_rank(op, "x", x, "T,H")`."""
    check_array(op, name, x)
    rank = len(axes.split(",")) if axes else 0
    if x.ndim != rank:
        rule = f"{name} must have {rank} {'axis' if rank == 1 else 'axes'} [{axes}], not {x.ndim}"
        raise ValueError(message(op, rule, **{name: x}))


def check_dtype(op: str, name: str, x: Any, allowed: Sequence[str]) -> None:
    """Checks `x.dtype` against NumPy names such as "float32"."""
    check_array(op, name, x)
    if np.dtype(x.dtype).name not in allowed:
        wanted = " or ".join(dtype_name(a) for a in allowed)
        rule = f"{name}.dtype={dtype_name(x.dtype)} must be {wanted}"
        raise TypeError(message(op, rule, **{name: x}))


def check_same_dtype(op: str, name: str, x: Any, other_name: str, other: Any) -> None:
    """Checks that two arrays have one dtype; nothing is promoted silently."""
    if x.dtype != other.dtype:
        rule = (
            f"{name}.dtype={dtype_name(x.dtype)} must equal "
            f"{other_name}.dtype={dtype_name(other.dtype)}"
        )
        raise TypeError(message(op, rule, **{name: x, other_name: other}))


def check_dim(op: str, name: str, x: Any, axis: int, size: int, meaning: str) -> None:
    """Checks one axis against a number known from elsewhere."""
    if x.shape[axis] != size:
        rule = f"{name}.shape[{axis}]={x.shape[axis]} must be {size} ({meaning})"
        raise ValueError(message(op, rule, **{name: x}))


def check_shape(op: str, name: str, x: Any, shape: Sequence[int], meaning: str) -> None:
    """Checks the whole shape against one that follows from other arguments."""
    check_array(op, name, x)
    if tuple(x.shape) != tuple(shape):
        given, wanted = (f"[{','.join(map(str, s))}]" for s in (x.shape, shape))
        rule = f"{name}.shape={given} must be {wanted} ({meaning})"
        raise ValueError(message(op, rule, **{name: x}))


def check_same_dim(
    op: str,
    name: str,
    x: Any,
    axis: int,
    other_name: str,
    other: Any,
    other_axis: int,
    meaning: str,
) -> None:
    """Checks that two arrays agree on an axis."""
    if x.shape[axis] != other.shape[other_axis]:
        rule = (
            f"{name}.shape[{axis}]={x.shape[axis]} must equal "
            f"{other_name}.shape[{other_axis}]={other.shape[other_axis]} ({meaning})"
        )
        raise ValueError(message(op, rule, **{name: x, other_name: other}))


def check_type(op: str, name: str, value: Any, kind: Any, what: str) -> None:
    """Checks the type of a value that is `what`: "a jaxmoe.Routing"."""
    if not isinstance(value, kind):
        raise TypeError(message(op, f"{name} must be {what}", **{name: value}))


def check_number(op: str, name: str, value: Any) -> float:
    """Returns a static number as a Python float."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(message(op, f"{name} must be a number, which is static", **{name: value}))
    if not math.isfinite(value):
        raise ValueError(message(op, f"{name}={value} must be finite"))
    return float(value)


def float_dtype(op: str, name: str, value: Any, besides: Sequence[str] = ()) -> np.dtype[Any]:
    """Returns what names a dtype of `FLOATS`, or of `besides`, as that dtype."""
    try:
        dtype = None if value is None else np.dtype(value)  # which None is not, but float64
    except TypeError:
        dtype = None
    allowed = (*besides, *FLOATS)
    if dtype is None or dtype.name not in allowed:
        shown = describe(value) if dtype is None else dtype.name
        rule = f"{name}={shown} must be {', '.join(allowed[:-1])} or {allowed[-1]}"
        raise TypeError(message(op, rule))
    return dtype


def check_choice(op: str, name: str, value: Any, allowed: Sequence[str], other: str = "") -> None:
    """Checks a named option against the names that exist; `other`: what is allowed beside them."""
    rule = " ".join(filter(None, (f"must be one of {', '.join(allowed)}", other)))
    if not isinstance(value, str):
        raise TypeError(message(op, f"{name} {rule}", **{name: value}))
    if value not in allowed:
        raise ValueError(message(op, f"{name}={value!r} {rule}"))


def check_int(
    op: str, name: str, value: Any, low: int, high: int | None = None, hint: str = ""
) -> int:
    """Returns a static integer of [low, high] as a Python int; `hint` says what to do instead."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        rule = f"{name} must be a Python int known at trace time{hint and '; ' + hint}"
        raise TypeError(message(op, rule, **{name: value})) from None
    if number < low or (high is not None and number > high):
        span = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(message(op, f"{name}={number} must be {span}{hint and '; ' + hint}"))
    return number
