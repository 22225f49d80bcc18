"""How pytrees of jaxmoe are written into a program that `jax.export` saves."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from jaxmoe import activation as _activation
from jaxmoe._codes import Choice

_ACTIVATIONS = ("Activation", "Swiglu", "SwigluStep", "SoftcapSwiglu")


def register[T](cls: type[T]) -> type[T]:
    """Lets programs be saved whose arguments or results hold a `cls`, a registered pytree."""
    return jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jaxmoe.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(_encoded(static)).encode(),
        deserialize_auxdata=lambda text: _decoded(json.loads(bytes(text))),
    )


def _encoded(value: Any) -> Any:
    """Static fields as JSON: what JSON has as it is, the others as {kind: ...}."""
    if isinstance(value, Choice):
        return {"choice": [int(value), value.name]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encoded(v) for v in value]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    kind = type(value).__name__
    if isinstance(value, _activation.Activation) and kind in _ACTIVATIONS:
        fields = {f.name: _encoded(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {kind: fields}
    raise ValueError(
        f"jax.export: a program whose arguments or results hold {value!r} cannot be saved: an "
        "activation must be one that has a name, or an instance of a class of jaxmoe"
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tuple":
        return tuple(map(_decoded, inside))
    if kind == "dtype":
        return np.dtype(inside)
    if kind == "choice":
        return Choice(*inside)
    out = object.__new__(getattr(_activation, kind))
    for name, field in inside.items():
        object.__setattr__(out, name, _decoded(field))
    return out
