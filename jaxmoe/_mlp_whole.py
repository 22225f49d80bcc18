"""The derivative of the layer in programs that XLA divides over Auto axes.

NAME_linear: the arguments of `moe_mlp_p` but the residual, then one tangent for each name
  of `wrt` -> the tangent of y [T,H]
NAME_backward: those arguments, dy [T,H] -> the cotangent of each name of `wrt`, its
  transpose

NAME is that of `moe_mlp_p`, or of the same with master weights (_mlp_master.py).

The derivative of _mlp_tangent.py keeps z and the plan, whose rows are in the order of one device's
tokens, so XLA could not divide the tokens. Here nothing is kept but the arguments: the backward
pass is one op, divided as the forward pass is, which computes the first product again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import _mlp_sharding, _primitive, _sharding
from jaxmoe._mlp_tangent import of_moving

ARGUMENTS = ("x", "", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down", "")
_COUNT = len(ARGUMENTS)


def derivative(
    name: str, layer: Callable[..., Any], stages: Callable[..., Any]
) -> Callable[..., Any]:
    """Defines the ops for the op `name`, which is `layer`; `stages` as `layer_rule` takes it.

    Returns a function of primals and tangents of `layer` that returns the tangent of its y.
    """

    def without_residual(*arrays: jax.Array, **params: Any) -> jax.Array:
        (y,) = layer(*arrays, jnp.zeros((0, 0), arrays[0].dtype), **params)
        return y

    def linear_xla(*args: jax.Array, wrt: tuple[str, ...], **params: Any) -> tuple[jax.Array]:
        arrays = args[:_COUNT]
        of_names = _of_names(without_residual, arrays, wrt, params)
        with _sharding.one_device():
            _, tangent = jax.jvp(of_names, tuple(_named(arrays, wrt)), args[_COUNT:])
        return (tangent,)

    def backward_xla(*args: jax.Array, wrt: tuple[str, ...], **params: Any) -> tuple[Any, ...]:
        *arrays, dy = args
        of_names = _of_names(without_residual, arrays, wrt, params)
        with _sharding.one_device():
            _, pull = jax.vjp(of_names, *_named(arrays, wrt))
            return pull(dy)

    def transpose(cts: Any, args: Any, *, wrt: tuple[str, ...], **params: Any) -> list[Any]:
        tangents = args[_COUNT:]
        asked = [_primitive.is_linear(t) for t in tangents]
        names = tuple(name for name, is_asked in zip(wrt, asked, strict=True) if is_asked)
        grads = iter(backward(*args[:_COUNT], cts[0], wrt=names, **params))
        return [None] * _COUNT + [next(grads) if is_asked else None for is_asked in asked]

    linear = _primitive.define(
        f"{name}_linear",
        out=lambda x, *_, **_params: [(x.shape, x.dtype)],
        xla=linear_xla,
        batch=functools.partial(_batch, linear_xla),
        jvp=functools.partial(_jvp, linear_xla),
        transpose=transpose,
        composed=True,
    )
    backward = _primitive.define(
        f"{name}_backward",
        out=lambda *avals, wrt, **_params: [(a.shape, a.dtype) for a in _named(avals, wrt)],
        xla=backward_xla,
        batch=functools.partial(_batch, backward_xla),
        jvp=functools.partial(_jvp, backward_xla),
        rule=_rule(layer, stages),
        composed=True,
    )

    def tangent_of(primals: Any, tangents: Any, **params: Any) -> jax.Array | None:
        given = dict(zip(ARGUMENTS, tangents[:_COUNT], strict=True))
        there = {n: t for n, t in given.items() if n and t is not None and t.size}
        terms = [] if tangents[_COUNT] is None or not primals[_COUNT].size else [tangents[_COUNT]]
        if there:
            terms += linear(*primals[:_COUNT], *there.values(), wrt=tuple(there), **params)
        return functools.reduce(jnp.add, terms) if terms else None

    return tangent_of


def _rule(layer: Callable[..., Any], stages: Callable[..., Any]) -> _sharding.Rule:
    def dims(avals: Any, *, wrt: tuple[str, ...], **params: Any) -> str:
        arguments, result = _mlp_sharding.dims(avals, **params).split("->")
        names = arguments.split(",")[:_COUNT]
        return f"{','.join(names)},{result}->{','.join(_named(names, wrt))}"

    def split(call: _sharding.Call, *, wrt: tuple[str, ...], **params: Any) -> _sharding.Split:
        d, ins = _mlp_sharding.division(call, params)
        part = _mlp_sharding.layer_part(call, d, layer, stages, params)

        def backward(*args: jax.Array) -> tuple[Any, ...]:
            *arrays, dy = args
            nothing = jnp.zeros((0, 0), dy.dtype)
            of_names = _of_names(lambda *a: part(*a, nothing)[0], arrays, wrt, {})
            _, pull = jax.vjp(of_names, *_named(arrays, wrt))
            return pull(dy)

        return _sharding.Split(ins, tuple(_named(ins, wrt)), backward)

    return _sharding.Rule(dims, split, ("moe_mlp", *_mlp_sharding.NAMES[:_COUNT], "the cotangent"))


def _named(values: Any, wrt: tuple[str, ...]) -> list[Any]:
    """Takes the values of those names out of those of all arguments."""
    return [values[ARGUMENTS.index(name)] for name in wrt]


def _of_names(fn: Any, arrays: Any, wrt: tuple[str, ...], params: dict[str, Any]) -> Any:
    """Makes `fn` a function of the arguments of those names."""

    def of_names(*values: jax.Array) -> Any:
        args = list(arrays)
        for name, value in zip(wrt, values, strict=True):
            args[ARGUMENTS.index(name)] = value
        return fn(*args, **params)

    return of_names


def _batch(xla: Any, args: Any, dims: Any, **params: Any) -> Any:
    outs = jax.vmap(functools.partial(xla, **params), dims)(*args)
    return outs, (0,) * len(outs)


def _jvp(xla: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    return jax.jvp(*of_moving(functools.partial(xla, **params), primals, tangents))
