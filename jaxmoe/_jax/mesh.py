"""Meshes: their axes, those over which arrays are split, and this device's part of an array."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import get_axis_env
from jax.sharding import AxisType, PartitionSpec

_one_device = jax.make_user_context(False)  # part of JAX's trace context

Axes = tuple[str, ...]  # mesh axes over which one dimension is split, the slowest first
Dims = tuple[Axes, ...]  # those of each dimension of an array


def index(axes: Axes) -> jax.Array:
    """Index of this device's part of an array that is split over `axes`."""
    return jax.lax.axis_index(axes)


def own(a: jax.Array, dim: int, axes: Axes, count: int) -> jax.Array:
    """This device's part of `a` along `dim`, of `count` parts."""
    if not axes:
        return a
    size = a.shape[dim] // count
    return jax.lax.dynamic_slice_in_dim(a, index(axes) * size, size, dim)


def once(a: Any, axes: Axes) -> Any:
    """`a` on the first device along `axes` and 0 on the others, so that their sum has it once."""
    return jnp.where(index(axes) == 0, a, jnp.zeros_like(a)) if axes and a is not None else a


def total(a: jax.Array, axes: Axes) -> jax.Array:
    """The sum of `a` over the devices along `axes`."""
    return jax.lax.psum(a, axes) if axes else a


def permuted(a: jax.Array, axes: Axes, to: Sequence[int]) -> jax.Array:
    """Sends `a` of the device with index i along `axes` to that with index to[i].

    NOTE: `jax.lax.ppermute` takes axes in the order of the mesh alone.
    """
    names = list(get_axis_env().axis_sizes)
    ordered = sorted(axes, key=names.index)
    places = np.arange(len(to)).reshape([jax.lax.axis_size(axis) for axis in axes])
    # place[i]: where the device with index i along `axes` is along the axes in order.
    place = np.argsort(places.transpose([axes.index(axis) for axis in ordered]).reshape(-1))
    pairs = [(int(place[i]), int(place[j])) for i, j in enumerate(to)]
    return jax.lax.ppermute(a, tuple(ordered), pairs)


def axes_of(spec: Any, ndim: int) -> Dims:
    """Mesh axes of each dimension of a PartitionSpec."""
    parts = (*spec, *(None,) * (ndim - len(spec)))
    return tuple(() if p is None else p if isinstance(p, tuple) else (p,) for p in parts)


def to_spec(dims: Dims) -> PartitionSpec:
    """The PartitionSpec of the mesh axes of each dimension."""
    return PartitionSpec(*((axes[0] if len(axes) == 1 else axes or None) for axes in dims))


def explicit_axes(aval: Any) -> frozenset[str]:
    """The Explicit mesh axes over which an array is split."""
    explicit = explicit_of(aval.sharding.mesh)
    used = axes_of(aval.sharding.spec, aval.ndim)
    return frozenset(axis for axes in used for axis in axes if axis in explicit)


def explicit_dims(aval: Any) -> Dims:
    """The Explicit mesh axes over which each dimension of an array is split."""
    explicit = explicit_of(aval.sharding.mesh)
    of_aval = axes_of(aval.sharding.spec, aval.ndim)
    return tuple(tuple(axis for axis in axes if axis in explicit) for axes in of_aval)


def is_auto(mesh: Any) -> bool:
    """Whether XLA alone divides work among the devices of `mesh` (or of none that is known)."""
    return mesh.empty or all(kind == AxisType.Auto for kind in mesh.axis_types)


def mesh_of(avals: Sequence[Any]) -> Any:
    """The mesh that a call is traced for: the context's, or the one its arguments' types name."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = next((a.sharding.mesh for a in avals if not a.sharding.mesh.empty), mesh)
    return mesh


def divided_by_xla(arrays: Sequence[jax.Array]) -> bool:
    """Whether a call is traced for several devices of a mesh among which XLA divides the work."""
    mesh = mesh_of([jax.typeof(a) for a in arrays])
    return not _one_device.value and not mesh.empty and mesh.size > 1 and is_auto(mesh)


@contextlib.contextmanager
def one_device() -> Generator[None]:
    """Traces for one device inside, whatever mesh the context and types of arguments name."""
    nowhere = jax.sharding.AbstractMesh((), ())
    with _one_device(True), jax.sharding.use_abstract_mesh(nowhere):
        yield


def explicit_of(mesh: Any) -> frozenset[str]:
    """The Explicit axes of a mesh."""
    return frozenset(of_kind(mesh, AxisType.Explicit))


def of_kind(mesh: Any, wanted: Any) -> tuple[str, ...]:
    """The axes of a mesh that are of one kind, in its order."""
    kinds = () if mesh.empty else zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind == wanted)
