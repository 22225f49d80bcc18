"""The derivative of the layer in programs that XLA divides over Auto axes.

moe_mlp_linear: the operands of the layer, then one tangent for each that moves -> the tangent of y
moe_mlp_backward: the operands of the layer, dy [T,H] -> the cotangent of each name of `wrt`, its
  transpose

The derivative of _mlp/derivative.py keeps z and the plan, whose rows are in the order of one
device's tokens, so XLA could not divide the tokens. Here nothing is kept but the operands: the
backward pass is one op, divided as the forward pass is, which computes the first product again.
The residual is no operand: it moves the result by itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._gemm.gate_up import of_moving
from jaxmoe._jax import mesh as _mesh
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sharding as _sharding
from jaxmoe._mlp import fetch, sharding
from jaxmoe._mlp.operands import Layer, Operands

VARIABLES = ("x", "weights", "w_gate_up", "w_up", "w_down", "b_gate_up", "b_up", "b_down")
_TANGENTS = tuple(f"t_{name}" for name in VARIABLES)
_Moving = _primitive.named_operands((*Operands._fields, *_TANGENTS))
_WithCotangent = _primitive.named_operands((*Operands._fields, "dy"))
_COUNT = len(Operands._fields)

LayerOp = Callable[[Operands, Layer], tuple[jax.Array, ...]]


def _backward_out(*avals: Any, wrt: Any, layer: Layer) -> list[_primitive.Spec]:
    del layer
    return [(a.shape, a.dtype) for a in _values(_WithCotangent(*avals), wrt)]


def derivative(name: str, op: LayerOp) -> Callable[..., jax.Array | None]:
    """Defines the two ops for the primitive `name`, which `op` binds.

    Returns a function of primals and tangents that returns the tangent of y.
    """

    def linear_xla(*args: Any, layer: Layer) -> tuple[jax.Array]:
        given = _Moving(*args)
        wrt = tuple(n for n in VARIABLES if getattr(given, f"t_{n}") is not None)
        a = Operands(*args[:_COUNT])
        tangents = [getattr(given, f"t_{n}") for n in wrt]
        with _mesh.one_device():
            _, tangent = jax.jvp(_of_names(op, a, wrt, layer), _values(a, wrt), tuple(tangents))
        return (tangent,)

    def backward_xla(*args: Any, wrt: tuple[str, ...], layer: Layer) -> tuple[Any, ...]:
        a, dy = Operands(*args[:_COUNT]), args[_COUNT]
        with _mesh.one_device():
            _, pull = jax.vjp(_of_names(op, a, wrt, layer), *_values(a, wrt))
            return pull(dy)

    def transpose(cts: Any, args: Any, *, layer: Layer) -> Any:
        moving = {n: getattr(args, f"t_{n}") for n in VARIABLES}
        asked = tuple(n for n, t in moving.items() if _primitive.is_linear(t))
        grads = backward(*args[:_COUNT], cts[0], wrt=asked, layer=layer)
        nothing = _Moving(*[None] * len(_Moving._fields))
        return nothing._replace(**{f"t_{n}": g for n, g in zip(asked, grads, strict=True)})

    linear = _primitive.define(
        f"{name}_linear",
        operands=_Moving,
        out=lambda x, *_, layer: [(x.shape, layer.dtype)],
        xla=linear_xla,
        batch=functools.partial(_primitive.as_its_ops, linear_xla),
        jvp=functools.partial(_jvp, linear_xla),
        transpose=transpose,
        composed=True,
    )
    backward = _primitive.define(
        f"{name}_backward",
        operands=_WithCotangent,
        out=_backward_out,
        xla=backward_xla,
        batch=functools.partial(_primitive.as_its_ops, backward_xla),
        jvp=functools.partial(_jvp, backward_xla),
        rule=_rule(op),
        composed=True,
    )

    def tangent_of(primals: Operands, tangents: Operands, *, layer: Layer) -> jax.Array | None:
        moving = {f"t_{n}": getattr(tangents, n) for n in VARIABLES}
        terms = [] if tangents.residual is None else [tangents.residual]
        if any(t is not None for t in moving.values()):
            a = primals._replace(residual=None)
            terms += linear(*a, *(moving[f"t_{n}"] for n in VARIABLES), layer=layer)
        return functools.reduce(jnp.add, terms) if terms else None

    return tangent_of


def _rule(op: LayerOp) -> _sharding.Rule:
    def dims(avals: Any, *, wrt: tuple[str, ...], layer: Layer) -> str:
        a = Operands(*avals[:_COUNT])
        arguments, y = sharding.dims(a, layer=layer).split("->")
        of_operand = Operands(*arguments.split(","))
        return f"{arguments},{y}->{','.join(_values(of_operand, wrt))}"

    def split(call: _sharding.Call, *, wrt: tuple[str, ...], layer: Layer) -> _sharding.Split:
        whole = sharding.of_operands(call)
        division = fetch.divided(whole, layer)
        ins = fetch.places_of(whole, division, layer)
        part = sharding.layer_part(whole, division, op, layer)

        def backward(*args: Any) -> tuple[Any, ...]:
            a, dy = Operands(*args[:_COUNT]), args[_COUNT]
            # NOTE: or XLA may keep gathered weights from the forward pass, taking equal gathers for
            # one. It may start these before dy is there.
            stored = {n: getattr(a, n) for n in fetch.stored(whole, division, layer)}
            a = a._replace(**jax.lax.optimization_barrier(stored))
            of_names = _of_names(lambda a, _: part(*a), a, wrt, layer)
            _, pull = jax.vjp(of_names, *_values(a, wrt))
            return pull(dy)

        of_y = (division.tokens, division.h_out)
        return _sharding.Split((*ins, of_y), tuple(_values(ins, wrt)), backward)

    return _sharding.Rule(dims, split, ("moe_mlp",))


def _values(a: Operands, wrt: tuple[str, ...]) -> tuple[Any, ...]:
    """Takes the operands of those names."""
    return tuple(getattr(a, name) for name in wrt)


def _of_names(op: LayerOp, a: Operands, wrt: tuple[str, ...], layer: Layer) -> Callable[..., Any]:
    """Makes y a function of the operands of those names."""

    def of_names(*values: jax.Array) -> jax.Array:
        return op(a._replace(**dict(zip(wrt, values, strict=True))), layer)[0]

    return of_names


def _jvp(xla: Callable[..., Any], primals: Any, tangents: Any, **params: Any) -> Any:
    return jax.jvp(*of_moving(functools.partial(xla, **params), primals, tangents))
