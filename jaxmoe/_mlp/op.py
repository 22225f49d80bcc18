"""The primitive of the expert layer: one CUDA call, or the stages it is made of.

moe_mlp: `Operands` -> y [T,H], or without finalize rows [R,H] in expert order, exactly 0 where no
slot has them, and slot_to_row [T,K] int32
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxmoe._codes import Choice, choice
from jaxmoe._formats import PLAIN, Forward
from jaxmoe._formats.quantization import scratch_floats
from jaxmoe._gemm import cuda, slices
from jaxmoe._gemm.gate_up import of_moving
from jaxmoe._gemm.op import refuse_derivative, refuse_moving
from jaxmoe._gemm.scratch import mlp_index_size
from jaxmoe._jax import mesh as _mesh
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sizes as _sizes
from jaxmoe._mlp import derivative, fold, sharding, tuned, whole
from jaxmoe._mlp.configs import configs_of, no_layer_kernel, rule_configs
from jaxmoe._mlp.operands import Layer, Operands, is_joined, join
from jaxmoe._mlp.stages import result, rows_of
from jaxmoe.quantize import quantize, stored_shape

_NOTHING = (0, 0)  # shape of a result that a call does not have
# Rank and dtype of the operands of the call that may be absent.
ABSENT = {
    "x_scales": (1, jnp.float32),
    "weights": (2, jnp.float32),
    "gate_up_scales": (1, jnp.float32),
    "w_up": (3, "w_gate_up"),
    "down_scales": (1, jnp.float32),
    "b_gate_up": (2, "layer.dtype"),
    "b_down": (2, "layer.dtype"),
    "expert_map": (1, jnp.int32),
    "residual": (2, "layer.dtype"),
    "x_scale": (1, jnp.float32),
    "h_scale": (1, jnp.float32),
}
# What has no derivative in frozen formats.
NEVER_MOVING = (
    *("x_scales", "w_gate_up", "gate_up_scales", "w_up", "up_scales", "w_down", "down_scales"),
    *("x_scale", "h_scale"),
)


def layer_op(a: Operands, layer: Layer) -> tuple[jax.Array, ...]:
    """Binds the primitive, or the value and the tangent apart where a format divides them so."""
    arrays = [x for x in a if x is not None]
    split = any(_mesh.explicit_axes(jax.typeof(x)) for x in arrays)
    if split and layer.format.expands:
        plain = layer.replace(format=PLAIN)
        return _value_and_tangent_apart(a, lambda a: _quantized(a, layer), lambda a: (a, plain))
    if split and layer.format.gradient.frozen and not layer.format.dequantizes:
        value = lambda a: moe_mlp_p(*a, layer=layer)  # noqa: E731
        return _value_and_tangent_apart(a, value, lambda a: without_tokens(a, layer))
    return moe_mlp_p(*a, layer=layer)


def _xla(*arrays: Any, layer: Layer) -> tuple[jax.Array, ...]:
    a = Operands(*arrays)
    if not is_joined(a):
        return moe_mlp_p(*join(a, layer), layer=layer)
    if layer.format.of_numbers(a.absent) is not None:
        a, layer = in_numbers(a, layer)
        return moe_mlp_p(*a, layer=layer)
    if isinstance(layer.format, Forward):
        return _quantized(a, layer)
    if layer.format.master:
        return moe_mlp_p(*rounded(a, layer), layer=layer.replace(format=PLAIN))
    rows, order = rows_of(a, layer)
    return result(rows, order, a, layer)


def in_numbers(a: Operands, layer: Layer) -> tuple[Operands, Layer]:
    """The same layer of x in the dtype of the layer, where one call reads no bytes of tokens."""
    numbers = layer.format.of_numbers(a.absent)
    if numbers is None:
        return a, layer
    return a._replace(x=a.x.astype(layer.dtype)), layer.replace(format=numbers)


def is_composed(*, absent: tuple[str, ...], layer: Layer) -> bool:
    """Whether the layer is made of other ops, and no call of its own."""
    return composed_reason(absent, layer) is not None


def composed_reason(absent: tuple[str, ...], layer: Layer) -> str | None:
    """Why the layer is made of other ops, None if it is a call of its own."""
    if layer.format.rounding_in_call(absent) is None:
        return f"in {layer.format.name} it is made of several"
    if "b_up" not in absent or "up_scales" not in absent:
        return "its gate and up have biases or scales of two arrays"
    if layer.dtype == jnp.float32 and not layer.format.quantized:
        return "float32 products are sums of several"
    if not layer.activation.fused:
        return "no kernel has its activation"
    return None


def _rounding(a: Operands, layer: Layer) -> Choice:
    """How the call rounds tokens; there is one."""
    rounding = layer.format.rounding_in_call(a.absent)
    assert rounding is not None
    return rounding


def rounds_tokens(a: Operands, layer: Layer) -> bool:
    """Whether the call rounds tokens to numbers of their own, beside packed weights."""
    return bool(layer.format.rounding_in_call(a.absent))


def rounded(a: Operands, layer: Layer) -> Operands:
    """Rounds float32 weights and biases to the dtype of the layer."""
    names = ("w_gate_up", "w_up", "w_down", "b_gate_up", "b_up", "b_down")
    given = {name: getattr(a, name) for name in names}
    narrow = {n: None if w is None else w.astype(layer.dtype) for n, w in given.items()}
    return a._replace(**narrow)


def _quantized(a: Operands, layer: Layer) -> tuple[jax.Array, ...]:
    """The layer of plain weights, which are quantized here, in the format of its value."""
    assert isinstance(layer.format, Forward)
    inner, (first, second) = layer.format.inner.of(layer.dtype), layer.layouts
    gate_up = quantize(a.w_gate_up, inner.name, weight_layout=first)
    down = quantize(a.w_down, inner.name, weight_layout=second)
    k = [stored_shape(q)[2] for q in (gate_up, down)]
    a = a._replace(
        w_gate_up=gate_up.values,
        gate_up_scales=gate_up.scales,
        w_down=down.values,
        down_scales=down.scales,
    )
    if a.w_up is not None:
        up = quantize(a.w_up, inner.name, weight_layout=first)
        a = a._replace(w_up=up.values, up_scales=up.scales)
    promoted = tuple(inner.sums(None, size) for size in k)
    promoted = None if promoted[0] is None else promoted
    narrow = layer.replace(format=inner, layouts=("nk", "nk"), promoted=promoted)
    return moe_mlp_p(*a, layer=narrow)


def _value_and_tangent_apart(a: Operands, value_of: Any, moving_as: Any) -> tuple[jax.Array, ...]:
    """The value and the tangent as ops that are divided each by its own rule.

    `moving_as` gives the operands and the layer whose tangent it is.
    """
    absent = [x is None for x in a]

    def given(*there: jax.Array) -> Operands:
        rest = iter(there)
        return Operands(*(None if missing else next(rest) for missing in absent))

    def plain(*there: jax.Array) -> Any:
        operands, layer = moving_as(given(*there))
        return moe_mlp_p(*operands, layer=layer)

    value = jax.custom_jvp(lambda *there: value_of(given(*there)))

    def value_and_tangent(primals: Any, tangents: Any) -> Any:
        moving = [None if isinstance(t, SymbolicZero) else t for t in tangents]
        _, moved = jax.jvp(*of_moving(plain, primals, moving))
        return value(*primals), moved

    value.defjvp(value_and_tangent, symbolic_zeros=True)
    return value(*(x for x in a if x is not None))


def without_tokens(a: Operands, layer: Layer) -> tuple[Operands, Layer]:
    """The layer whose products dequantize weights, of tokens that are not quantized."""
    format = layer.format
    x = a.x if a.x_scales is None else format.decode(a.x, a.x_scales, tokens=True)
    a = a._replace(x=x.astype(layer.dtype), x_scales=None, x_scale=None, h_scale=None)
    return a, layer.replace(format=format.dequantizing(), promoted=None, config=None)


def _out(*avals: Any, layer: Layer) -> list[_primitive.Spec]:
    a = Operands(*avals)
    if layer.finalize:
        return [(a.x.shape, layer.dtype)]
    return [((a.expert_ids.size, a.x.shape[1]), layer.dtype), (a.expert_ids.shape, jnp.int32)]


def _jvp(primals: Operands, tangents: Operands, *, layer: Layer) -> Any:
    gradient = layer.format.gradient
    if gradient.refused is not None:
        weight = {layer.weight_names["w_gate_up"]: primals.w_gate_up}
        refuse_derivative(layer.op, layer.format, x=primals.x, **weight)
    if gradient.straight_through:
        _, moved = _jvp(primals, tangents, layer=layer.replace(format=PLAIN))
        return moe_mlp_p(*primals, layer=layer), moved
    if gradient.frozen:
        names = NEVER_MOVING if primals.x_scales is None else ("x", *NEVER_MOVING)
        refuse_moving(layer.op, primals.x, tangents, names, layer.called)
        if not layer.format.dequantizes:
            given, plain = without_tokens(primals, layer)
            _, moved = _jvp(given, tangents, layer=plain)
            return moe_mlp_p(*primals, layer=layer), moved
    if layer.finalize and _mesh.divided_by_xla([x for x in primals if x is not None]):
        return moe_mlp_p(*primals, layer=layer), (_tangent(primals, tangents, layer=layer),)
    if not is_joined(primals):
        tangents = _joined_tangents(primals, tangents, layer)
        primals = join(primals, layer)
    if layer.format.master:
        primals = rounded(primals, layer)
    first, _ = rule_configs(primals, layer)
    first = dataclasses.replace(first, one_kernel=False)  # z is kept between the products
    in_format = layer if gradient.frozen else layer.replace(format=PLAIN)
    return derivative.linearized(primals, tangents, in_format, first)


def _joined_tangents(primals: Operands, tangents: Operands, layer: Layer) -> Operands:
    if tangents.b_gate_up is None and tangents.b_up is None:
        return tangents
    parts = {
        name: getattr(tangents, name)
        if getattr(tangents, name) is not None
        else jnp.zeros_like(getattr(primals, name))
        for name in ("b_gate_up", "b_up")
    }
    return join(tangents._replace(**parts), layer)


def call_attrs(a: Operands, *, layer: Layer) -> dict[str, Any]:
    """Attributes of the call."""
    activation, promoted = layer.activation, layer.promoted or (False, False)
    weights = layer.format.of_kernels
    first, second = configs_of(a, layer)
    return {
        **layer.window,
        "gate_up": choice("gate_up", layer.gate_up),
        "layout1": choice("layout", layer.layouts[0]),
        "layout2": choice("layout", layer.layouts[1]),
        "format": Choice(weights.code, weights.name),
        "tokens": _rounding(a, layer),
        "promoted1": int(promoted[0]),
        "promoted2": int(promoted[1]),
        "finalize": int(layer.finalize),
        "activation": {"gated": int(activation.gated), **activation.kernel_params()},
        "gemm1": first.attrs(),
        "gemm2": {**second.attrs(), "gather": 0},
    }


def _public(*, layer: Layer) -> tuple[int, ...]:
    return (0,) if layer.finalize else (1, 2)


def own_scratch(a: Operands, *, layer: Layer, sums: int = 0) -> list[_primitive.Spec]:
    """Results of the call that are no rows, in its order: act, xq, hq, floats, index.

    `sums` of the floats are those of slices, which a call chooses by having them.
    """
    format = layer.format
    (tokens, hidden), num_rows = a.x.shape, a.expert_ids.size
    intermediate = layer.intermediate(a.w_down)
    xq, hq, dtype = _NOTHING, _NOTHING, layer.dtype
    first, _ = configs_of(a, layer)
    rounds = _rounding(a, layer) > 0  # to numbers, where the call has arrays without them too
    floats = scratch_floats(format, rounds, (tokens, hidden), (num_rows, intermediate))
    if format.quantizes_tokens and not rounds:
        in_place = 0 if a.x_scales is not None else tokens
        xq, hq = (in_place if first.gather else num_rows, hidden), (num_rows, intermediate)
        dtype = format.token_dtype
    return [
        ((num_rows, intermediate), layer.dtype),
        (xq, dtype),
        (hq, dtype),
        ((floats + sums,), jnp.float32),
        ((mlp_index_size(num_rows, layer.num_local_experts, first.one_kernel),), jnp.int32),
    ]


def _slice_sums(a: Operands, layer: Layer) -> int:
    """Floats of the sums of slices, 0 where the call does not run by them.

    A token by itself does where the rule chooses its tiles: nobody asked for others, as
    `batch_invariant` does, and none that were measured are faster.
    """
    one_token = _sizes.is_known(a.expert_ids.size) and a.expert_ids.shape[0] == 1
    if not one_token or not layer.format.packed or layer.config is not None:
        return 0
    intermediate, num_rows = layer.intermediate(a.w_down), a.expert_ids.size
    if _rounding(a, layer) > 0 or no_layer_kernel(layer, intermediate, False) is not None:
        return 0
    if tuned.find(a, layer) not in (None, rule_configs(a, layer)):
        return 0
    share = layer.num_local_experts / max(layer.num_experts, 1)
    hidden = a.x.shape[1]
    fits = slices.pays(num_rows, share, hidden, intermediate)
    return slices.slice_sums(num_rows, hidden, intermediate) if fits else 0


def _scratch(a: Operands, *, layer: Layer) -> list[_primitive.Spec]:
    """Results of the call beside the public ones, in its order: y, rows, slot_to_row, scratch."""
    if not layer.finalize:
        return [(_NOTHING, layer.dtype), *own_scratch(a, layer=layer)]
    own = own_scratch(a, layer=layer, sums=_slice_sums(a, layer))
    rows = a.expert_ids.size, a.x.shape[1]
    return [(rows, layer.dtype), (_NOTHING, jnp.int32), *own]


def moved_rows(a: Operands, *, layer: Layer) -> int:
    """Rows of x that the call copies to where otherwise those of the second product lie."""
    first, _ = configs_of(a, layer)
    numbers = _rounding(a, layer) > 0
    if layer.format.quantizes_tokens and not numbers:
        return 0
    if first.gather and not (numbers and a.x_scales is None):
        return 0
    return a.x.shape[0] if first.gather else a.expert_ids.size


def call_reason(a: Operands, *, layer: Layer) -> str | None:
    """Why the kernels cannot run these arguments, or None."""
    format, names = layer.format, layer.weight_names
    if format.quantized:
        reason = cuda.kernel_reason(layer.op, format.of_kernels, layer.dtype, x=a.x)
        gate_up, down = (
            jax.ShapeDtypeStruct(format.weight_shape(w.shape), w.dtype)
            for w in (a.w_gate_up, a.w_down)
        )
    else:
        weights = {names[n]: getattr(a, n) for n in ("w_gate_up", "w_down")}
        reason = cuda.dtype_reason(layer.op, x=a.x, **weights)
        gate_up, down = a.w_gate_up, a.w_down
    counted = {"routing.expert_ids": a.expert_ids}
    reason = reason or cuda.count_reason(layer.op, a.expert_ids.size, **counted)
    if format.quantized:
        reason = reason or cuda.row_reason(layer.op, names["w_gate_up"], gate_up, 2)
    else:
        reason = reason or cuda.row_reason(layer.op, "x", a.x, 1)
    axis = 1 if layer.layouts[1] == "kn" else 2
    return reason or cuda.row_reason(layer.op, names["w_down"], down, axis)


moe_mlp_p = _primitive.define(
    "jaxmoe_moe_mlp",
    operands=Operands,
    out=_out,
    xla=_xla,
    batch=lambda args, dims, *, layer: fold.batch(moe_mlp_p, args, dims, layer),
    jvp=_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_moe_mlp_v1",
        attrs=call_attrs,
        scratch=_scratch,
        reason=call_reason,
        public=_public,
        operands=(
            *("x", "x_scales", "expert_ids", "weights", "w_gate_up", "gate_up_scales", "w_up"),
            *("w_down", "down_scales", "b_gate_up", "b_down", "expert_map", "residual"),
            *("x_scale", "h_scale"),
        ),
        absent=ABSENT,
    ),
    rule=sharding.rule(lambda a, layer: moe_mlp_p(*a, layer=layer)),
    composed=is_composed,
    expands=lambda layer, **_: layer.format.expands,
)

_tangent = whole.derivative("jaxmoe_moe_mlp", lambda a, layer: moe_mlp_p(*a, layer=layer))
