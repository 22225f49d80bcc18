"""Experts: the weights of one layer as a value, with everything that says how to read them."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmoe import _formats, _saved
from jaxmoe._jax import checks as _checks
from jaxmoe.activation import GATE_UP_ORDERS, Activation, resolve
from jaxmoe.quantize import WEIGHT_LAYOUTS, QuantizedArray
from jaxmoe.quantize import format_of as format_of_array

_OP = "Experts"
_STATIC = ("activation", "order", "layout", "dtype", "forward_format", "token_format", "accum")
_WEIGHTS = ("gate_up", "gate", "up", "down")
_BIASES = ("gate_up_bias", "gate_bias", "up_bias", "down_bias")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The weights of the experts of one layer. A pytree: arrays are leaves, the rest is static.

    mlp(x, e) = activation(x @ gate_up[e] + gate_up_bias[e]) @ down[e] + down_bias[e]

    The first weight is one array, `gate_up`, or two, `gate` and `up`, which are never joined. An
    activation without gate has one array, as `gate_up` or as `up`. E is the number of experts here,
    which may be those of one device; H is hidden, I intermediate. All arrays may have leading axes,
    such as the layers of a scan; `jaxmoe.moe_mlp` takes experts without them.

    Gradients with respect to experts are experts. `jax.tree.map`, optimizers, sharding specs, scan
    and checkpoints work on experts as on any pytree; `dataclasses.replace` makes a changed copy.

    Attributes:
      gate_up: [E, H, 2I], or [E, H, I] for an activation without gate. An array, or a
        `QuantizedArray` whose layout is `layout`.
      down: [E, I, H].
      gate: [E, H, I], in place of half of `gate_up`.
      up: [E, H, I].
      gate_up_bias: [E, 2I], or [E, I] without gate.
      gate_bias: [E, I], with `gate`.
      up_bias: [E, I], with `up`.
      down_bias: [E, H].
      x_scale: [] float32, static scale of x, for fp8_tensor weights and for token_format "nvfp4" or
        "e4m3". By default each call makes the scale of all of x, or of each token in "e4m3".
      h_scale: [] or [E] float32, static scale of the activation's result.
      activation: a name ("swiglu", "geglu", "relu2", ...), a `jaxmoe.Swiglu`, `jaxmoe.SwigluStep`
        or `jaxmoe.SoftcapSwiglu`, or a function of your own: fn(gate, up), or fn(z) without gate,
        float32 [..., I] -> [..., I], each element for itself. Kernels run both products then, and
        XLA the function between them. Static: the same function is the same program, a new lambda
        each time is not.
      order: order of the outputs of `gate_up`: "gate_up" (gate first), "up_gate" or "interleaved"
        (gate even, up odd). Static.
      layout: "kn" for the shapes above, "nk" with the last two axes swapped, or a pair of these for
        the first weight and for `down`. Static.
      dtype: dtype of the products, None for that of the arrays. If it is narrower, the arrays are
        float32 master weights: products round them, and their gradients are float32 sums that are
        never rounded. Static.
      forward_format: None, or the name of a quantized format. The program quantizes weights and
        tokens for the value of the layer; gradients are those of plain weights. Static.
      token_format: None, or how tokens and the activation's results are quantized beside packed
        weights: "nvfp4" with nvfp4, "mxfp4", "mxfp8" or "e4m3" with mxfp4, "mxfp8" with mxfp8,
        "e4m3" with int4_g128 and int4_g128_zp. FP8 weights have FP8 tokens without it. Static.
      accum: for FP8 weights: "fast" adds up all of k inside the tensor core, which keeps about 14
        bits; "promoted" adds up parts of 128 in float32. By default "promoted" for products over
        more than 2048 elements, and always where blocks of k have scales. Static.

    Raises:
      TypeError, ValueError: a field of the wrong kind, dtype, rank or shape, an unknown name, or
        arrays (or `jax.ShapeDtypeStruct`) that do not go together. Leaves that are no arrays
        (specs, None) are not checked, nor is anything while JAX rebuilds the pytree.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> experts = jaxmoe.Experts(gate_up=jnp.ones((2, 2, 6)), down=jnp.ones((2, 3, 2)))
      >>> experts.num_experts, experts.hidden, experts.intermediate
      (2, 2, 3)
      >>> jax.tree.map(lambda a: a.sum().item(), experts).down
      12.0
    """

    gate_up: Any = None
    down: Any = None
    gate: Any = None
    up: Any = None
    gate_up_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    x_scale: Any = None
    h_scale: Any = None
    activation: str | Activation | Callable[..., jax.Array] = "swiglu"
    order: str = "gate_up"
    layout: str | tuple[str, str] = "kn"
    dtype: Any = None
    forward_format: str | None = None
    token_format: str | None = None
    accum: str | None = None

    def __new__(cls, *_args: Any, **fields: Any) -> "Experts":
        """Names the place of an activation's constants, which are no fields."""
        for name in ("alpha", "beta", "limit"):
            if name in fields:
                rule = f"{name} is one of the activation: activation=jaxmoe.Swiglu({name}=...)"
                raise TypeError(_checks.message(_OP, rule, **{name: fields[name]}))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks the static fields, and shapes where they are known."""
        _check_static(self)
        check_parts(_checks.as_arrays(self))

    @property
    def num_experts(self) -> int:
        """E, the number of experts in the arrays."""
        return self.down.shape[-3]

    @property
    def hidden(self) -> int:
        """H, the width of a token."""
        return self.down.shape[-1 if self.layouts[1] == "kn" else -2]

    @property
    def intermediate(self) -> int:
        """I, the width of the activation's result."""
        return self.down.shape[-2 if self.layouts[1] == "kn" else -1]

    @property
    def layouts(self) -> tuple[str, str]:
        """The layout of the first weight and of `down`."""
        return (self.layout, self.layout) if isinstance(self.layout, str) else self.layout

    @property
    def first(self) -> Any:
        """The array of the first weight, or its gate if there are two arrays."""
        return next((w for w in (self.gate_up, self.gate, self.up) if w is not None), None)


_LEAVES = tuple(f.name for f in dataclasses.fields(Experts) if f.name not in _STATIC)
_KEYS = tuple(map(jax.tree_util.GetAttrKey, _LEAVES))
# Without a loop in Python: JAX flattens the arguments of a jitted function at every call.
_leaves_of = operator.attrgetter(*_LEAVES)
_static_of = operator.attrgetter(*_STATIC)


def _flatten_with_keys(experts: Experts) -> Any:
    return tuple(zip(_KEYS, _leaves_of(experts), strict=True)), _static_of(experts)


def _unflatten(static: Any, leaves: Any) -> Experts:
    """Rebuilds experts without a check: leaves may be anything while a pytree is rebuilt."""
    experts = object.__new__(Experts)
    experts.__dict__.update(zip(_LEAVES, leaves, strict=True))
    experts.__dict__.update(zip(_STATIC, static, strict=True))
    return experts


jax.tree_util.register_pytree_with_keys(
    Experts, _flatten_with_keys, _unflatten, lambda e: (_leaves_of(e), _static_of(e))
)
_saved.register(Experts)


def format_of(experts: Experts) -> _formats.Format:
    """The format of the experts' weights."""
    if isinstance(experts.down, QuantizedArray):
        return _formats.with_tokens(format_of_array(experts.down), experts.token_format)
    if experts.forward_format is not None:
        return _formats.FORWARD[experts.forward_format]
    if experts.dtype is not None and experts.dtype != experts.down.dtype:
        return _formats.MASTER
    return _formats.PLAIN


def _check_static(e: Experts) -> None:
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
        try:
            dtype = np.dtype(e.dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in _checks.FLOATS:
            name = repr(e.dtype) if dtype is None else _checks.dtype_name(dtype)
            raise TypeError(_checks.message(_OP, f"dtype={name} must be bf16 or f16 or f32"))
        object.__setattr__(e, "dtype", dtype)


def _names(choices: tuple[str, ...]) -> str:
    return " or ".join(map(repr, choices))


def check_parts(e: Experts) -> None:
    """Checks which arrays are given, and these against each other."""
    _check_which(e)
    _check_token_format(e)
    _check_shapes(e)


def _check_which(e: Experts) -> None:
    if e.down is None:
        raise TypeError(_checks.message(_OP, "down must be given"))
    gated = resolve(e.activation, _OP).gated
    given = tuple(n for n in ("gate_up", "gate", "up") if getattr(e, n) is not None)
    allowed = (("gate_up",), ("gate", "up")) if gated else (("gate_up",), ("up",))
    if given not in allowed:
        what = "'gate_up', or 'gate' and 'up'" if gated else "'gate_up' or 'up', one array"
        kind = "gated" if gated else "not gated"
        rule = (
            f"the first weight must be {what}, because {resolve(e.activation, _OP).name} is {kind}"
        )
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


def _check_token_format(e: Experts) -> None:
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


def _check_shapes(e: Experts) -> None:
    """Checks shapes and dtypes against each other, if every weight has both."""
    weights = {n: getattr(e, n) for n in _WEIGHTS if getattr(e, n) is not None}
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
    for name in _BIASES:
        _check_bias(e, name, lead)


def _axes(e: Experts, name: str) -> str:
    gated = resolve(e.activation, _OP).gated
    width = "2I" if name == "gate_up" and gated else "I"
    k, n = ("I", "H") if name == "down" else ("H", width)
    layout = e.layouts[1 if name == "down" else 0]
    return f"[E,{k},{n}]" if layout == "kn" else f"[E,{n},{k}]"


def _wanted_shape(e: Experts, name: str) -> tuple[int, ...]:
    gated = resolve(e.activation, _OP).gated
    width = e.intermediate * (2 if name == "gate_up" and gated else 1)
    k, n = (e.intermediate, e.hidden) if name == "down" else (e.hidden, width)
    layout = e.layouts[1 if name == "down" else 0]
    return (e.num_experts, k, n) if layout == "kn" else (e.num_experts, n, k)


def _shape_message(e: Experts, name: str, weights: dict[str, Any], wanted: Any) -> str:
    w = weights[name]
    act = resolve(e.activation, _OP)
    kind = "gated" if act.gated else "not gated"
    rule = (
        f"{name}.shape={list(w.shape)} must be {list(wanted)} = {_axes(e, name)} with the E, H and "
        f"I of down {_axes(e, 'down')}, because {act.name} is {kind}"
    )
    for layout in ("kn", "nk", ("kn", "nk"), ("nk", "kn")):
        if _fits(e, weights, layout):
            rule += f"; these shapes fit layout={layout!r}"
            break
    return _checks.message(_OP, rule, **weights)


def _fits(e: Experts, weights: dict[str, Any], layout: str | tuple[str, str]) -> bool:
    """Whether the weights are those of one layer if they are read in `layout`."""
    other = object.__new__(Experts)  # unchecked
    for field in dataclasses.fields(Experts):
        object.__setattr__(other, field.name, getattr(e, field.name))
    object.__setattr__(other, "layout", layout)
    return all(tuple(w.shape[-3:]) == _wanted_shape(other, n) for n, w in weights.items())


def _check_dtypes(e: Experts, weights: dict[str, Any]) -> None:
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


def _check_quantized(e: Experts, name: str, w: QuantizedArray, down: QuantizedArray) -> None:
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


def _check_bias(e: Experts, name: str, lead: int) -> None:
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
