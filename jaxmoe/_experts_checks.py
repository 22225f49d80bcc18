"""Checks of the parts of `jaxmoe.Experts` against each other, and the format that they make."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxmoe import _formats
from jaxmoe._jax import checks as _checks
from jaxmoe.activation import GATE_UP_ORDERS, resolve
from jaxmoe.quantize import WEIGHT_LAYOUTS, QuantizedArray
from jaxmoe.quantize import format_of as format_of_array

if TYPE_CHECKING:
    from jaxmoe.experts import Experts

_OP = "Experts"
WEIGHTS = ("gate_up", "gate", "up", "down")
BIASES = ("gate_up_bias", "gate_bias", "up_bias", "down_bias")
# Activations that have a gate, by the ones that the first half goes through.
_WITH_GATE = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}


def format_of(experts: "Experts") -> _formats.Format:
    """The format of the experts' weights."""
    if isinstance(experts.down, QuantizedArray):
        return _formats.with_tokens(format_of_array(experts.down), experts.token_format)
    if experts.forward_format is not None:
        return _formats.FORWARD[experts.forward_format]
    if experts.dtype is not None and experts.dtype != experts.down.dtype:
        return _formats.MASTER
    return _formats.PLAIN


def check_static(e: "Experts") -> None:
    resolve(e.activation, _OP)
    _checks.check_choice(_OP, "order", e.order, GATE_UP_ORDERS)
    layouts = e.layout if isinstance(e.layout, tuple) else (e.layout,)
    if isinstance(e.layout, tuple) and len(layouts) != 2:
        rule = f"layout={e.layout!r} must be one of {_names(WEIGHT_LAYOUTS)}, or a pair of these"
        raise ValueError(_checks.message(_OP, rule))
    for layout in layouts:
        _checks.check_choice(_OP, "layout", layout, WEIGHT_LAYOUTS)
    choices = tuple(_formats.FORWARD), _formats.TOKEN_FORMATS, _formats.ACCUMS
    for name, allowed in zip(("forward_format", "token_format", "accum"), choices, strict=True):
        if getattr(e, name) is not None:
            _checks.check_choice(_OP, name, getattr(e, name), allowed)
    if e.dtype is not None:
        object.__setattr__(e, "dtype", _checks.float_dtype(_OP, "dtype", e.dtype))


def _names(choices: tuple[str, ...]) -> str:
    return " or ".join(map(repr, choices))


def check_parts(e: "Experts") -> None:
    """Checks which arrays are given, and these against each other."""
    _check_which(e)
    _check_token_format(e)
    _check_shapes(e)


def _check_which(e: "Experts") -> None:
    if e.down is None:
        raise TypeError(_checks.message(_OP, "down must be given"))
    gated = resolve(e.activation, _OP).gated
    given = tuple(n for n in ("gate_up", "gate", "up") if getattr(e, n) is not None)
    allowed = (("gate_up",), ("gate", "up")) if gated else (("gate_up",), ("up",))
    if given not in allowed:
        what = "'gate_up', or 'gate' and 'up'" if gated else "'gate_up' or 'up', one array"
        rule = f"the first weight must be {what}, because {_kind(e)}"
        raise TypeError(_checks.message(_OP, rule, **{n: getattr(e, n) for n in given}))
    for bias in ("gate_up_bias", "gate_bias", "up_bias"):
        weight = bias.removesuffix("_bias")
        if getattr(e, bias) is not None and weight not in given:
            rule = f"{bias} must be None, because there is no {weight}"
            raise ValueError(_checks.message(_OP, rule, **{bias: getattr(e, bias)}))
    if (e.gate_bias is None) != (e.up_bias is None) and gated:
        rule = "gate_bias and up_bias must both be given, or neither"
        raise ValueError(_checks.message(_OP, rule, gate_bias=e.gate_bias, up_bias=e.up_bias))
    if "gate" in given and e.order != "gate_up":
        rule = f"order={e.order!r} must be 'gate_up' if gate and up are two arrays"
        raise ValueError(_checks.message(_OP, rule))


def _check_token_format(e: "Experts") -> None:
    """Checks the format of tokens against that of the weights, which may be specs."""
    if e.token_format is None:
        return
    quantized = isinstance(e.down, QuantizedArray)
    allowed = _formats.token_formats(e.down.format) if quantized else ()
    if e.token_format not in allowed:
        weights = f"weights in {e.down.format}" if quantized else "weights that are not quantized"
        those = " or ".join(("None", *map(repr, allowed)))
        rule = f"token_format={e.token_format!r} must be {those} with {weights}"
        raise ValueError(_checks.message(_OP, rule, down=e.down))


def _is_array(value: Any) -> bool:
    """Whether something has a shape and a dtype, as arrays have and specs have not."""
    values = value.values if isinstance(value, QuantizedArray) else value
    return hasattr(values, "shape") and hasattr(values, "dtype")


def _in_place(value: Any) -> Any:
    """Returns an array without memory in place of a `jax.ShapeDtypeStruct`, all else as it is."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return value
    return np.broadcast_to(np.empty((), value.dtype), value.shape)


def _check_shapes(e: "Experts") -> None:
    """Checks shapes and dtypes against each other, if every weight has both."""
    weights = {n: getattr(e, n) for n in WEIGHTS if getattr(e, n) is not None}
    if not all(map(_is_array, weights.values())):
        return
    quantized = {n: isinstance(w, QuantizedArray) for n, w in weights.items()}
    if any(quantized.values()) and not all(quantized.values()):
        rule = f"{' and '.join(weights)} must all be jaxmoe.QuantizedArray, or none of them"
        raise TypeError(_checks.message(_OP, rule, **weights))
    _check_dtypes(e, weights)
    for name, w in weights.items():
        if len(w.shape) < 3:
            rule = f"{name} must have 3 axes {_axes(e, name)}, not {len(w.shape)}"
            raise ValueError(_checks.message(_OP, rule, **{name: w}))
    lead = len(e.down.shape) - 3
    for name, w in weights.items():
        if len(w.shape) != lead + 3:
            rule = f"{name} must have as many axes before {_axes(e, name)} as down has"
            raise ValueError(_checks.message(_OP, rule, **{name: w, "down": e.down}))
    for name, w in weights.items():
        wanted = _wanted_shape(e, name)
        if tuple(w.shape[lead:]) != wanted:
            raise ValueError(_shape_message(e, name, weights, wanted))
    for name in BIASES:
        _check_bias(e, name, lead)


def _axes(e: "Experts", name: str) -> str:
    gated = resolve(e.activation, _OP).gated
    width = "2I" if name == "gate_up" and gated else "I"
    k, n = ("I", "H") if name == "down" else ("H", width)
    layout = e.layouts[1 if name == "down" else 0]
    return f"[E,{k},{n}]" if layout == "kn" else f"[E,{n},{k}]"


def _wanted_shape(e: "Experts", name: str) -> tuple[int, ...]:
    gated = resolve(e.activation, _OP).gated
    width = e.intermediate * (2 if name == "gate_up" and gated else 1)
    k, n = (e.intermediate, e.hidden) if name == "down" else (e.hidden, width)
    layout = e.layouts[1 if name == "down" else 0]
    return (e.num_experts, k, n) if layout == "kn" else (e.num_experts, n, k)


def _kind(e: "Experts") -> str:
    """Whether the activation has a gate, and the name of the one that does if it has not."""
    act = resolve(e.activation, _OP)
    if act.gated:
        return f"{act.name} is gated"
    gated = _WITH_GATE.get(act.name)
    return f"{act.name} is not gated" + (f" (with a gate it is {gated!r})" if gated else "")


def _shape_message(e: "Experts", name: str, weights: dict[str, Any], wanted: Any) -> str:
    w = weights[name]
    rule = (
        f"{name}.shape={list(w.shape)} must be {list(wanted)} = {_axes(e, name)} with the E, H and "
        f"I of down {_axes(e, 'down')}, because {_kind(e)}"
    )
    for layout in ("kn", "nk", ("kn", "nk"), ("nk", "kn")):
        if _fits(e, weights, layout):
            rule += f"; these shapes fit layout={layout!r}"
            break
    return _checks.message(_OP, rule, **weights)


def _fits(e: "Experts", weights: dict[str, Any], layout: str | tuple[str, str]) -> bool:
    """Whether the weights are those of one layer if they are read in `layout`."""
    other = object.__new__(type(e))  # unchecked
    for field in dataclasses.fields(type(e)):
        object.__setattr__(other, field.name, getattr(e, field.name))
    object.__setattr__(other, "layout", layout)
    return all(tuple(w.shape[-3:]) == _wanted_shape(other, n) for n, w in weights.items())


def _check_dtypes(e: "Experts", weights: dict[str, Any]) -> None:
    down = weights["down"]
    if refused := format_of(e).refused_accum(e.accum):
        raise ValueError(_checks.message(_OP, refused))
    if isinstance(down, QuantizedArray):
        if e.forward_format is not None:
            rule = "forward_format must be None with weights that are quantized already"
            raise ValueError(_checks.message(_OP, rule, forward_format=e.forward_format))
        if e.dtype is not None:
            rule = (
                f"dtype={_checks.dtype_name(e.dtype)} must be None with quantized weights: the "
                "layer computes in the dtype of x"
            )
            raise ValueError(_checks.message(_OP, rule, **weights))
        for name, w in weights.items():
            _check_quantized(e, name, w, down)
        return
    for name, w in weights.items():
        _checks.check_float(_OP, name, _in_place(w))
    for name, w in weights.items():
        _checks.check_same_dtype(_OP, name, w, "down", down)
    if e.dtype is not None and e.dtype != down.dtype and down.dtype != "float32":
        rule = (
            f"down.dtype={_checks.dtype_name(down.dtype)} must be f32 or "
            f"dtype={_checks.dtype_name(e.dtype)}: only float32 weights are rounded to another"
        )
        raise TypeError(_checks.message(_OP, rule, **weights))
    if e.forward_format is not None and e.dtype is not None and e.dtype != down.dtype:
        rule = "forward_format is not supported with float32 master weights (dtype)"
        raise NotImplementedError(_checks.message(_OP, rule, **weights))


def _check_quantized(e: "Experts", name: str, w: QuantizedArray, down: QuantizedArray) -> None:
    layout = e.layouts[1 if name == "down" else 0]
    if w.layout != layout:
        fix = (
            f"give layout={w.layout!r}" if w.layout != "tokens" else "make it with jaxmoe.quantize"
        )
        rule = f"{name}.layout={w.layout!r} must equal layout={layout!r}: {fix}"
        raise ValueError(_checks.message(_OP, rule, **{name: w}))
    if w.format != down.format:
        rule = f"{name}.format={w.format!r} must equal down.format={down.format!r}"
        raise ValueError(_checks.message(_OP, rule, **{name: w, "down": down}))
    if format_of_array(w) != format_of_array(down):
        rule = (
            f"{name}.dtype={_checks.dtype_name(w.dtype)} must equal "
            f"down.dtype={_checks.dtype_name(down.dtype)}, the dtype of scales in {w.format}"
        )
        raise ValueError(_checks.message(_OP, rule, **{name: w, "down": down}))


def _check_bias(e: "Experts", name: str, lead: int) -> None:
    bias = getattr(e, name)
    if bias is None or not _is_array(bias):
        return
    gated = resolve(e.activation, _OP).gated
    outputs = {
        "gate_up_bias": e.intermediate * (2 if gated else 1),
        "down_bias": e.hidden,
    }.get(name, e.intermediate)
    wanted = (e.num_experts, outputs)
    _checks.check_float(_OP, name, _in_place(bias))
    if not isinstance(e.down, QuantizedArray):
        _checks.check_same_dtype(_OP, name, bias, "down", e.down)
    if tuple(bias.shape[lead:]) != wanted or len(bias.shape) != lead + 2:
        rule = f"{name}.shape={list(bias.shape)} must be {list(wanted)} = [E, its outputs]"
        raise ValueError(_checks.message(_OP, rule, **{name: bias, "down": e.down}))
