"""Divides ops over the axes of a mesh: one rule of an op for Auto and for Explicit axes.

A `Rule` says which dimensions of arguments and results belong together (`dims`), and given over
which mesh axes each dimension is split, how a device computes its part (`split`). XLA asks it
while it partitions a program, after Shardy has propagated the shardings of Auto axes; for Explicit
axes it is asked while tracing, and its answer runs in `jax.shard_map`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import get_axis_env
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmoe._jax import checks as _checks
from jaxmoe._jax.mesh import (
    Axes,
    Dims,
    axes_of,
    explicit_axes,
    explicit_dims,
    explicit_of,
    mesh_of,
    of_kind,
    one_device,
    to_spec,
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose arguments are split over a mesh.

    Attributes:
      avals: shapes and dtypes of the whole arguments, by name; None for those that are absent.
      given: mesh axes of each dimension of each argument, likewise.
      wanted: the same of each result, as what uses them is split; nothing on Explicit axes.
      sizes: devices along each mesh axis.
      explicit: whether the axes are Explicit. Then types say how everything is split, and what
        cannot stay so is an error; collectives must suit `jax.shard_map`.
    """

    avals: Any
    given: Any
    wanted: tuple[Dims, ...]
    sizes: Mapping[str, int]
    explicit: bool

    def count(self, axes: Axes) -> int:
        """Devices that `axes` divide something among."""
        return math.prod(self.sizes[a] for a in axes)

    def pick(self, size: int, *choices: Axes, taken: Axes = ()) -> Axes:
        """The first of `choices` that is not empty, less what is taken or does not divide."""
        for axes in choices:
            if axes:
                free: Axes = ()
                for axis in axes:
                    if axis in taken or size % self.count((*free, axis)):
                        break
                    free = (*free, axis)
                return free
        return ()


@dataclasses.dataclass(frozen=True)
class Split:
    """How a call is divided: mesh axes of every dimension, and what each device computes.

    `part` takes a device's parts of the arguments and returns its parts of the results. What there
    is for an absent argument does not matter.
    """

    ins: tuple[Any, ...]
    outs: tuple[Dims, ...]
    part: Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How an op may be divided.

    Args:
      dims: (avals, outs, **params) -> names of the dimensions, "t h, t k -> t h". Those of one name
        are split over the same axes, as far as nothing else decides.
      split: (call, **params) -> `Split`. On Explicit axes it may refuse.
      names: what the public function calls its op and its arguments, for messages.
      weights: (**params) -> what it calls the arguments that are never gathered, by their indices.
      units: (aval, **params) -> what of such an argument is not divided, for messages.
      advice: (axes, **params) -> what else to do with one that is split over these axes and would
        have to be whole along some, for messages; "" for nothing.
    """

    dims: Callable[..., str]
    split: Callable[..., Split]
    names: tuple[str, ...]
    weights: Callable[..., dict[int, str]] = lambda **_params: {}
    units: Callable[..., str] = lambda *_args, **_params: ""
    advice: Callable[..., str] = lambda *_args, **_params: ""


def independent(
    op: Callable[..., Any],
    names: tuple[str, ...],
    dims: str | Callable[..., str],
    free: str,
    tokens: str = "",
) -> Rule:
    """The rule of an op that has nothing to add up or to fetch.

    It may be divided along the dimensions `free`, the others whole; Explicit axes may not split
    the `tokens`, which have an order.
    """
    text = dims if callable(dims) else lambda *_args, **_params: dims

    def split(call: Call, **params: Any) -> Split:
        arguments, results = (
            [part.split() for part in side.split(",")]
            for side in text(call.avals, **params).split("->")
        )
        there = [i for i, a in enumerate(call.avals) if a is not None and a.size]
        for i, letters in enumerate(arguments):
            if tokens and tokens in letters and i in there:
                refuse_tokens(rule, call, i, letters.index(tokens))
        chosen: dict[str, Axes] = {}
        for letter in free:
            seen = [
                (aval.shape[letters.index(letter)], axes[letters.index(letter)])
                for aval, letters, axes in (
                    (call.avals[i], arguments[i], call.given[i]) for i in there
                )
                if letter in letters
            ]
            wanted = [
                axes[letters.index(letter)]
                for letters, axes in zip(results, call.wanted, strict=False)
                if letter in letters
            ]
            taken = tuple(axis for axes in chosen.values() for axis in axes)
            options = [axes for _, axes in seen] + wanted
            chosen[letter] = call.pick(seen[0][0], *options, taken=taken) if seen else ()
        place = lambda letters: tuple(chosen.get(letter, ()) for letter in letters)  # noqa: E731
        ins = (
            place(letters) if i in there else ((),) * len(letters)
            for i, letters in enumerate(arguments)
        )
        return Split(tuple(ins), tuple(map(place, results)), lambda *a: op(*a, **params))

    rule = Rule(text, split, names)
    return rule


def on_explicit_axes(
    rule: Rule, mesh: Any, arrays: Any, params: dict[str, Any]
) -> tuple[jax.Array, ...]:
    """Runs a call with arguments, a NamedTuple, that are split over Explicit axes of `mesh`."""
    make = type(arrays)
    avals = make(*(None if a is None else jax.typeof(a) for a in arrays))
    given = make(*(None if a is None else explicit_dims(a) for a in avals))
    sizes = {axis: mesh.shape[axis] for axis in of_kind(mesh, AxisType.Explicit)}
    split = rule.split(Call(avals, given, (), sizes, explicit=True), **params)
    for i, name in rule.weights(**params).items():
        if avals[i] is None:
            continue
        dims = tuple(zip(given[i], split.ins[i], strict=True))
        if axes := [axis for have, kept in dims if set(have) - set(kept) for axis in have]:
            units, advice = rule.units(avals[i], **params), rule.advice(tuple(axes), **params)
            named = {name: avals[i]}
            _refuse_weights(rule.names[0], named, units, given[i], split.ins[i], advice)
    # NOTE: XLA's simplifier takes arrays without elements out of the boundary of a shard_map, and
    # on GPUs its partitioner crashes on what is left. Those of no tokens are made inside.
    there = [i for i, a in enumerate(avals) if a is not None and (a.size or any(split.ins[i]))]

    def filled(*given: jax.Array) -> tuple[jax.Array, ...]:
        rest = iter(given)
        return split.part(
            *(
                next(rest) if i in there else None if a is None else jnp.zeros(a.shape, a.dtype)
                for i, a in enumerate(avals)
            )
        )

    parts = {
        i: arrays[i]
        if given[i] == split.ins[i]
        else jax.sharding.reshard(arrays[i], NamedSharding(mesh, to_spec(split.ins[i])))
        for i in there
    }
    # NOTE: not all Explicit axes: under vmap those of the batch are not there to be named.
    ins = [split.ins[i] for i in there]
    used = {axis for dims in (*ins, *split.outs) for axes in dims for axis in axes}
    whole = [jax.typeof(a) for a in parts.values()]
    used = nested_axes(rule.names[0], mesh, used, whole, "arguments are")
    divided = jax.shard_map(
        nestable(filled, mesh),
        mesh=None if mesh == jax.sharding.get_abstract_mesh() else mesh,
        in_specs=tuple(map(to_spec, ins)),
        out_specs=tuple(map(to_spec, split.outs)),
        axis_names=used,
    )
    return divided(*parts.values())


def examples_axes(arrays: Sequence[jax.Array], dims: Sequence[int | None]) -> Axes:
    """Explicit mesh axes that split the dimensions `dims` of a batch's examples."""
    for a, dim in zip(map(jax.typeof, arrays), dims, strict=True):
        if dim is not None and (explicit := explicit_of(a.sharding.mesh)):
            axes = axes_of(a.sharding.spec, a.ndim)[dim]
            if own := tuple(axis for axis in axes if axis in explicit):
                return own
    return ()


def over_examples(
    op: str,
    fn: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    dims: Sequence[int | None],
    axes: Axes,
) -> Sequence[jax.Array]:
    """Calls `fn` of a batch on each device along `axes`, for its own examples.

    Those are axis 0 of the results and of the arrays that have a dim. `op` is the public name of
    what is called.

    Raises:
      NotImplementedError: the call is divided over a later axis of the mesh already.
    """
    there = [i for i, a in enumerate(arrays) if a.size]  # see the note in on_explicit_axes
    mesh = mesh_of([jax.typeof(a) for a in arrays])
    avals = [jax.typeof(a) for a in arrays]
    manual = nested_axes(op, mesh, axes, avals, "examples of a vmap are")
    count = math.prod(mesh.shape[axis] for axis in axes)

    def empty(a: jax.Array, dim: int | None) -> jax.Array:
        shape = a.shape if dim is None else (a.shape[0] // count, *a.shape[1:])
        return jnp.zeros(shape, a.dtype)

    def filled(*given: jax.Array) -> Sequence[jax.Array]:
        rest = iter(given)
        return fn(
            *(next(rest) if a.size else empty(a, d) for a, d in zip(arrays, dims, strict=True))
        )

    place = lambda dim: PartitionSpec() if dim is None else PartitionSpec(axes)  # noqa: E731
    divided = jax.shard_map(
        nestable(filled, mesh),
        mesh=None if mesh == jax.sharding.get_abstract_mesh() else mesh,
        in_specs=tuple(place(dims[i]) for i in there),
        out_specs=place(0),
        axis_names=manual,
    )
    return divided(*(arrays[i] for i in there))


def nested_axes(op: str, mesh: Any, axes: Iterable[str], avals: Sequence[Any], what: str) -> Any:
    """The mesh axes of a `jax.shard_map` over `axes`, which may be inside another one.

    Those over which nothing is split are among them if no axis of the mesh is left then.

    NOTE: with an axis left to it, XLA ends the process ("Manual axes must be sorted by mesh axis
    index") if the inner of two nested ones has an earlier axis of the mesh than the outer one, and
    JAX cannot lower psum_scatter where that axis is Explicit.
    """
    names, axes = mesh.axis_names, set(axes)
    manual = of_kind(mesh, AxisType.Manual)
    split = {axis for aval in avals for axis in explicit_axes(aval)}
    mapped = get_axis_env().explicit_mesh_axis_names  # by a vmap around this one
    free = set(of_kind(mesh, AxisType.Explicit)) - split - mapped
    if axes | free | set(manual) >= set(names):
        return axes | free
    first = min(axes, key=names.index, default=None)
    outer = next((m for m in manual if first and names.index(m) > names.index(first)), None)
    if outer is None:
        return axes
    order = (*(name for name in names if name != first), first)
    text = (
        f"{what} split over the mesh axis {first!r}, which must come after {outer!r} in the mesh "
        f"{names}: the call is divided over {outer!r} already, and XLA nests manual axes in the "
        f"order of the mesh only. Make the mesh with the axes {order}, or call jax.shard_map over "
        f"{first!r} around the whole"
    )
    raise NotImplementedError(_checks.message(op, text))


def nestable(fn: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """Makes `fn`, the body of a `jax.shard_map`, differentiable inside another one.

    NOTE: JAX splits what such a body keeps for its backward pass over the axes of the outer one as
    well, and then fails to lower it. A body that keeps its arguments alone escapes that.
    """
    return jax.checkpoint(fn) if of_kind(mesh, AxisType.Manual) else fn


def refuse_tokens(rule: Rule, call: Call, i: int, dim: int) -> None:
    """Raises if dimension `dim` of argument `i`, tokens of one order, is split over Explicit axes.

    The dimensions before `dim` are batches, which the public function does not have.
    """
    if not call.explicit or call.given[i] is None or not call.given[i][dim]:
        return
    axes, name, aval = ", ".join(call.given[i][dim]), rule.names[i + 1], call.avals[i]
    text = (
        f"{name} must not be split along its rows over Explicit mesh axes ({axes}), because their "
        "groups are those of all. Call it inside jax.shard_map over those axes, where each device "
        "has groups of its own, or replicate the argument with jax.sharding.reshard"
    )
    shown = jax.ShapeDtypeStruct(aval.shape[dim:], aval.dtype)
    raise NotImplementedError(_checks.message(rule.names[0], text, **{name: shown}))


def _refuse_weights(
    op: str, named: dict[str, Any], units: str, given: Dims, needed: Dims, advice: str
) -> None:
    whole = f" into whole {units}" if units else ""
    text = (
        f"{next(iter(named))} is split as {_text(given)} over Explicit mesh axes, which does not "
        f"go with the other arguments or does not divide{whole}: it would have to be "
        f"{_text(needed)}, and weights are not gathered{advice and f'; {advice}'}. Use "
        "jax.sharding.reshard, or split the other weights like it"
    )
    raise NotImplementedError(_checks.message(op, text, **named))


def _text(dims: Dims) -> str:
    return f"P({', '.join(' and '.join(axes) or 'None' for axes in dims)})"


def on_auto_axes(
    rule: Rule, op: Callable[..., Any], avals: Any, params: dict[str, Any]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the call of `op` as XLA's partitioner takes it, a function of the given arguments.

    Arguments without elements, of no tokens, stay out of the partitioned call.
    """
    given_at = [i for i, a in enumerate(avals) if a is not None]
    there = [i for i in given_at if avals[i].size]
    make = type(avals)

    def fill(values: Sequence[Any], otherwise: Callable[[Any], Any]) -> Any:
        rest = iter(values)
        return make(
            *(
                next(rest) if i in there else None if a is None else otherwise(a)
                for i, a in enumerate(avals)
            )
        )

    def empty(a: Any) -> jax.Array:
        return jnp.zeros(a.shape, a.dtype)

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(op(*fill(arrays, empty), **params))

    def partition(mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
        given = fill([axes_of(a.sharding.spec, a.ndim) for a in args], lambda a: ((),) * a.ndim)
        wanted = [axes_of(r.sharding.spec, r.ndim) for r in results]
        split = rule.split(
            Call(avals, given, tuple(wanted), dict(mesh.shape), explicit=False), **params
        )

        def part(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            with one_device():
                return tuple(split.part(*fill(arrays, empty)))

        place = lambda dims: NamedSharding(mesh, to_spec(dims))  # noqa: E731
        ins = tuple(place(split.ins[i]) for i in there)
        return mesh, part, tuple(place(dims) for dims in split.outs), ins

    names, results = rule.dims(avals, **params).split("->")
    every = names.split(",")
    names = ",".join(every[i] for i in there)
    partitioned = custom_partitioning(call)
    partitioned.def_partition(partition=partition, sharding_rule=f"{names}->{results}")
    return lambda *arrays: partitioned(*(arrays[given_at.index(i)] for i in there))
