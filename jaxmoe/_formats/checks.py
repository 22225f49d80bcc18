"""Checks of quantized arguments that the products share."""

from typing import Any

from jaxmoe._formats.base import Format
from jaxmoe._jax import checks as _checks
from jaxmoe.quantize import QuantizedArray, check_quantized, format_of


def check_weight(op: str, name: str, w: QuantizedArray, layout: str) -> None:
    """Refuses quantized weights of another layout than `layout`, or whose leaves do not fit."""
    if w.layout != layout:
        fix = (
            f"give weight_layout={w.layout!r}"
            if w.layout != "tokens"
            else "make it with jaxmoe.quantize"
        )
        rule = f"{name}.layout={w.layout!r} must equal weight_layout={layout!r}: {fix}"
        raise ValueError(_checks.message(op, rule, **{name: w}))
    check_quantized(op, name, w)


def check_tokens(op: str, name: str, x: QuantizedArray) -> None:
    """Refuses quantized tokens of another layout than "tokens", of e5m2, or whose leaves misfit."""
    if x.layout != "tokens":
        rule = f"{name}.layout={x.layout!r} must be 'tokens': make it with jaxmoe.quantize_tokens"
        raise ValueError(_checks.message(op, rule, **{name: x}))
    check_quantized(op, name, x)
    _checks.check_dtype(op, f"{name}.values", x.values, (format_of(x).token_dtype.name,))


def check_token_array(
    op: str, name: str, x: Any, other_name: str, other: Any, format: Format
) -> None:
    """Refuses a quantized `x` in another format than `format` has beside a quantized `other`.

    Plain arrays pass.
    """
    both = isinstance(x, QuantizedArray) and isinstance(other, QuantizedArray)
    wanted = format.token_array
    if not both or x.format == wanted:
        return
    if wanted is None:
        rule = (
            f"{name} must be a JAX or NumPy array: without a token_format tokens beside "
            f"{other_name} in {other.format} are not quantized"
        )
    elif wanted == other.format:
        rule = f"{name}.format={x.format!r} must equal {other_name}.format={other.format!r}"
    else:
        rule = f"{name}.format={x.format!r} must be {wanted!r}, in which the layer has its tokens"
    raise ValueError(_checks.message(op, rule, **{name: x, other_name: other}))


def check_tokens_are_plain(op: str, name: str, x: Any, *weights: str) -> None:
    """Refuses quantized tokens where the weights are not quantized."""
    if isinstance(x, QuantizedArray):
        verb = "is no QuantizedArray" if len(weights) == 1 else "are no QuantizedArrays"
        rule = (
            f"{name} must be a JAX or NumPy array, because {' and '.join(weights)} {verb}; "
            f"jaxmoe.dequantize({name}) gives one"
        )
        raise TypeError(_checks.message(op, rule, **{name: x}))


def check_accum(op: str, accum: Any, format: Format) -> None:
    """Refuses an `accum` that products in `format` do not have."""
    if accum is not None and format.accums:
        _checks.check_choice(op, "accum", accum, format.accums)
    if refused := format.refused_accum(accum):
        raise ValueError(_checks.message(op, refused))
