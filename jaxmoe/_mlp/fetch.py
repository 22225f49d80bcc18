"""Weights that are stored in parts over the devices that share the tokens, gathered for the layer.

Over which mesh axes is what the caller says, or what moves the fewest bytes: the parts of the
weights, or the tokens and parts of results that move where weights stay.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from jaxmoe._jax import checks as _checks
from jaxmoe._jax.mesh import Axes, Dims
from jaxmoe._jax.sharding import Call
from jaxmoe._mlp.division import Division, divide, places
from jaxmoe._mlp.operands import Layer, Operands

# What is gathered: all that belongs to experts.
FETCHED = (
    *("w_gate_up", "w_up", "w_down", "gate_up_scales", "up_scales", "down_scales"),
    *("b_gate_up", "b_up", "b_down", "h_scale"),
)
_MOST_AXES = 4  # that are compared, each with and without the others


@dataclasses.dataclass(frozen=True)
class GatherChoice:
    """The mesh axes over which weights are gathered, and why.

    Attributes:
      axes: the axes, none if weights stay where they are.
      reason: one sentence.
      bytes: what each device receives in the forward pass if weights are gathered over these axes,
        for each set of axes that was compared.
    """

    axes: Axes
    reason: str
    bytes: dict[Axes, int]


def divided(call: Call, layer: Layer) -> Division:
    """How the layer is divided: weights that are not gathered decide before the tokens do."""
    return _without(call, layer, choose(call, layer).axes)


def choose(call: Call, layer: Layer) -> GatherChoice:
    """The axes over which weights are gathered: those that `layer` names, or by bytes."""
    if layer.gather is not None:
        for name in layer.gather:
            check_axis(name, call.sizes, call.avals.x, "an Explicit" if call.explicit else "an")
        check_tokens(layer.gather, call.count(layer.gather), call.avals.x)
        why = f"gather_weights={layer.gather!r}" if layer.gather else "gather_weights=()"
        return GatherChoice(layer.gather, why, {})
    candidates = _candidates(call, layer)
    if not candidates:
        return GatherChoice((), "no mesh axis splits tokens and weights", {})
    found = {axes: _received(call, _without(call, layer, axes), layer) for axes in candidates}
    axes = min(found, key=lambda axes: (found[axes], len(axes)))
    parts = (
        f"{f'weights gathered over {_text(a)}' if a else 'weights in place'}: {size} bytes"
        for a, size in found.items()
    )
    return GatherChoice(axes, f"each device receives, {', '.join(parts)}", found)


def stored(call: Call, d: Division, layer: Layer) -> dict[str, Dims]:
    """Mesh axes of each dimension along which an operand of `FETCHED` is gathered, by its name.

    NOTE: only the last axes of a dimension, so that what is gathered is a part of the whole.
    """
    if not d.fetched:
        return {}
    needed = places(d, call.avals, layer)
    found: dict[str, Dims] = {}
    for name in FETCHED:
        aval, given = getattr(call.avals, name), getattr(call.given, name)
        if aval is None or not aval.size:
            continue
        of_dims = []
        for size, have, local in zip(aval.shape, given, getattr(needed, name), strict=True):
            parts = tuple(axis for axis in have if axis in d.fetched and axis not in local)
            there = tuple(axis for axis in have if axis in local) == have[: len(have) - len(parts)]
            fits = there and have[len(have) - len(parts) :] == parts
            of_dims.append(parts if fits and size % call.count(local + parts) == 0 else ())
        if any(of_dims):
            found[name] = tuple(of_dims)
    return found


def places_of(call: Call, d: Division, layer: Layer) -> Operands:
    """Mesh axes of every operand, before anything is gathered."""
    ins = places(d, call.avals, layer)
    parts = stored(call, d, layer)
    add = lambda local, more: tuple(a + b for a, b in zip(local, more, strict=True))  # noqa: E731
    return ins._replace(**{name: add(getattr(ins, name), more) for name, more in parts.items()})


def check_axis(name: Any, sizes: Any, x: Any, kind: str = "an") -> None:
    """Refuses the name of an axis that the mesh does not have."""
    if name not in sizes:
        known = ", ".join(map(repr, sizes)) or "there is none"
        rule = f"gather_weights={name!r} must name {kind} axis of the mesh ({known})"
        raise ValueError(_checks.message("moe_mlp", rule, x=x))


def check_tokens(axes: Axes, count: int, x: Any) -> None:
    """Refuses tokens that do not divide over the devices that gather weights."""
    if not jax.export.is_symbolic_dim(x.shape[0]) and x.shape[0] % count:
        rule = (
            f"gather_weights={_text(axes)} divides the tokens, so x.shape[0]={x.shape[0]} must be "
            f"a multiple of {count} (devices along it)"
        )
        raise ValueError(_checks.message("moe_mlp", rule, x=x))


def _without(call: Call, layer: Layer, axes: Axes) -> Division:
    """The division of the layer whose weights are not split over `axes`."""
    whole = {
        name: tuple(tuple(a for a in dim if a not in axes) for dim in getattr(call.given, name))
        for name in FETCHED
        if getattr(call.given, name) is not None
    }
    local = dataclasses.replace(call, given=call.given._replace(**whole))
    return divide(local, layer, axes)


def _candidates(call: Call, layer: Layer) -> list[Axes]:
    """Sets of axes, the empty one first, over which all weights that are split can be gathered."""
    given, x = call.given, call.avals.x
    of_tokens = (given.x[0], given.expert_ids[0], () if given.weights is None else given.weights[0])
    tokens = next((axes for axes in of_tokens if axes), ())
    dims = [dim for name in FETCHED[:3] for dim in getattr(given, name) or ()]
    split = {axis for dim in dims for axis in dim if call.sizes[axis] > 1}
    both = tuple(axis for axis in tokens if axis in split)
    if not both or len(both) > _MOST_AXES or jax.export.is_symbolic_dim(x.shape[0]):
        return []
    sets = (itertools.combinations(both, n) for n in range(len(both) + 1))
    found = []
    for axes in itertools.chain.from_iterable(sets):
        d = _without(call, layer, axes)
        parts = stored(call, d, layer)
        if set(axes) <= set(d.tokens) and all(
            {a for dim in getattr(given, name) or () for a in dim} & set(axes)
            == {a for dim in parts.get(name, ()) for a in dim}
            for name in FETCHED
        ):
            found.append(axes)
    return found


def _received(call: Call, d: Division, layer: Layer) -> int:
    """Bytes that each device receives in the forward pass: of weights, tokens, sums and parts."""
    a, format = call.avals, layer.format
    share = lambda axes: 1 - 1 / call.count(axes)  # noqa: E731
    itemsize = np.dtype(layer.dtype).itemsize
    total = 0.0
    needed = places(d, a, layer)
    for name, dims in stored(call, d, layer).items():
        aval = getattr(a, name)
        size = itemsize if format.master and name in FETCHED[:3] else aval.dtype.itemsize
        parts = math.prod(call.count(axes) for axes in getattr(needed, name))
        total += aval.size * size / parts * share(tuple(x for axes in dims for x in axes))
    quantized = format.quantizes_tokens and a.x_scales is None
    of_token = np.dtype(format.token_dtype).itemsize if quantized else a.x.dtype.itemsize
    kept, choices = call.count(d.kept), a.expert_ids.size
    x_bytes, y_bytes = a.x.size * of_token / kept, a.x.size * itemsize / kept
    total += (x_bytes + 8 * choices / kept) * share(d.gather)
    unlike = tuple(axis for axis in call.given.x[0] if axis not in d.tokens)
    total += (x_bytes + 8 * choices / kept + y_bytes / call.count(d.h_out)) * share(unlike)
    scattered = tuple(axis for axis in d.added if axis in d.gather)
    summed = tuple(axis for axis in d.added if axis not in d.gather)
    total += y_bytes / call.count(d.h_out) * (share(scattered) + 2 * share(summed))
    row = choices / kept * layer.intermediate(a.w_down) / call.count(d.i) * itemsize
    width = 2 if layer.activation.gated else 1
    total += width * row * (2 * share(d.h_in) + d.halves)
    if d.i != d.i_in:
        total += row * call.count(d.i) * share(d.i)
    return round(total)


def _text(axes: Axes) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)
