"""Activations of other libraries, names or functions of a gate, as jaxmoe's gated ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmoe.activation import IDENTITY, RELU, Activation, resolve

# What a gate's function is called in flax and JAX, and y = f(gate) * up.
BY_NAME: dict[str, Activation] = {
    "silu": resolve("swiglu"),
    "swish": resolve("swiglu"),
    "gelu": resolve("geglu_tanh"),
    "relu": Activation("reglu", True, RELU),
    "linear": Activation("glu", True, IDENTITY),
}


def of_function(function: Callable[..., Any]) -> Activation | None:
    """The activation whose function of the gate is `function`, None if there is none."""
    known: dict[Any, str] = {
        jax.nn.silu: "swiglu",
        jax.nn.swish: "swiglu",
        jax.nn.gelu: "geglu_tanh",
    }
    if function is jax.nn.relu:
        return BY_NAME["relu"]
    if isinstance(function, functools.partial) and function.func is jax.nn.gelu:
        if function.args or set(function.keywords) - {"approximate"}:
            return None
        return resolve("geglu_tanh" if function.keywords.get("approximate", True) else "geglu")
    return resolve(known[function]) if function in known else None
