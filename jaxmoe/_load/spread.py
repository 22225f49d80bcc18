"""Puts arrays of experts on the devices of a mesh."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe._experts_checks import WEIGHTS, format_of
from jaxmoe._formats.base import letters
from jaxmoe._jax import checks as _checks
from jaxmoe._jax.mesh import Axes, to_spec
from jaxmoe._load.ahead import Ahead
from jaxmoe._load.files import OP
from jaxmoe._load.stored import Stored
from jaxmoe.experts import Experts
from jaxmoe.quantize import QuantizedArray
from jaxmoe.quantize import format_of as format_of_array

AxisNames = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an array lies that is all of what is read, or one of two halves along an axis.

    Attributes:
      shape: of the array of all experts.
      sharding: over the mesh.
      first: where it begins in what is read, along each axis.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    first: tuple[int, ...]

    def own(self, read: jax.Array, device: Any) -> jax.Array:
        """The device's part of what was read, which are experts of this device."""
        _, *others = self.sharding.devices_indices_map(self.shape)[device]
        ends = [part.indices(size)[:2] for part, size in zip(others, self.shape[1:], strict=True)]
        sizes = (read.shape[0], *(end - begin for begin, end in ends))
        if sizes != read.shape:
            begins = (f + begin for f, (begin, _) in zip(self.first[1:], ends, strict=True))
            read = jax.lax.dynamic_slice(read, (0, *begins), sizes)
        return jax.device_put(read, device)

    def joined(self, *parts: jax.Array) -> jax.Array:
        """The array, of the parts of this process's devices."""
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, list(parts))

    def put(self, value: np.ndarray[Any, Any]) -> jax.Array:
        """The array, of a small one that every process has read."""
        value = value[tuple(map(slice, self.first, map(int.__add__, self.first, self.shape)))]
        return jax.make_array_from_callback(self.shape, self.sharding, lambda index: value[index])


class Spread:
    """Puts the experts of layers where they are to lie.

    Each weight is read whole, some of a device's experts at a time, and cut into the parts of the
    devices that have these experts.
    """

    def __init__(self, mesh: Mesh | None, num_experts: int, **axes: AxisNames) -> None:
        """`axes`: those of the mesh that split E ("axis"), I ("tensor_axis"), H ("hidden_axis")."""
        given: Any = mesh
        if given is not None and not isinstance(given, Mesh):
            rule = "mesh must be a jax.sharding.Mesh, whose devices weights are put on"
            raise TypeError(_checks.message(OP, rule, mesh=mesh))
        self._mesh, self._num_experts, self._given = mesh, num_experts, axes
        self._axes = _checked_axes(mesh, axes)
        devices = self._count("axis")
        if num_experts % devices:
            raise ValueError(
                f"jaxmoe.{OP}: {num_experts} experts must be a multiple of the {devices} devices "
                f"of axis={axes['axis']!r}"
            )

    def check(self, experts: Experts) -> None:
        """Refuses experts, which may be shapes, that the axes do not divide.

        Raises:
          ValueError: I or H is no multiple of the devices of its axis, in blocks of the format.
        """
        format = format_of(experts)
        halved = experts.gate_up is not None and self._fields("gate_up", experts) != ("gate_up",)
        for argument, name, size, cut in (
            ("tensor_axis", "I", experts.intermediate, halved),
            ("hidden_axis", "H", experts.hidden, False),
        ):
            count, unit = self._count(argument), math.lcm(*(format.unit(size, d) for d in "nk"))
            if size % (count * unit) == 0 or not (cut or count > 1):
                continue
            fit = [n for n in range(2, size // unit + 1) if size % (n * unit) == 0]
            nearest = min(fit, key=lambda n, count=count: abs(n - count), default=None)
            said = f"size {count} of {argument}={self._given[argument]!r}"
            blocks = f", blocks of {unit} of {format.name}" if unit > 1 else ""
            instead = f"size {nearest} would do" if nearest else f"{argument} must be None"
            rule = f"must be a multiple of {count * unit} ({said}{blocks}): {instead}"
            raise ValueError(f"{name}={size} {rule}")

    def everywhere(self, value: Any) -> jax.Array:
        """A small array, on every device of the mesh."""
        value = np.array(value)  # JAX may keep an array as it is, and this is a part of a file
        if self._mesh is None:
            return jnp.asarray(value)
        sharding = NamedSharding(self._mesh, PartitionSpec())
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def parts(self) -> list[range]:
        """The experts that are read, in order."""
        if self._mesh is None:
            return [range(self._num_experts)]
        return list(dict.fromkeys(self._where().values()))

    def _where(self) -> dict[Any, range]:
        """The experts of each device of this process."""
        where = self._sharding("down", "e").addressable_devices_indices_map((self._num_experts,))
        everyone = range(self._num_experts)
        return {device: everyone[index[0]] for device, index in where.items() if index}

    def weight(self, stored: Stored, files: Ahead, part: str, experts: Experts) -> dict[str, Any]:
        """Reads a weight: the fields of `jaxmoe.Experts` that it is.

        part: the field that it is in `experts`, of which that one may be a shape.
        """
        if self._mesh is None:
            return {part: stored.read(files, range(self._num_experts))}
        where = self._where()
        places = self._places(part, getattr(experts, part), experts)
        read: dict[Any, Any] = {}
        for mine in self.parts():
            devices = [device for device, has in where.items() if has == mine]
            kept = functools.partial(_cut, places, devices)
            with jax.default_device(devices[0]):
                read.update(zip(devices, stored.read(files, mine, kept), strict=True))
        return jax.tree.map(_Place.joined, places, *(read[device] for device in where))

    def experts(self, experts: Experts, weights: dict[str, Any]) -> Experts:
        """The experts with these weights, and with biases that lie as they do."""
        fields = dict.fromkeys(WEIGHTS) | weights
        for part in WEIGHTS if self._mesh is not None else ():
            bias = getattr(experts, f"{part}_bias")
            if bias is not None:
                fields[f"{part}_bias"] = None
                for name, place in self._places(part, bias, experts).items():
                    fields[f"{name}_bias"] = place.put(np.asarray(bias))
        return dataclasses.replace(experts, **fields)

    def _fields(self, part: str, experts: Experts) -> tuple[str, ...]:
        """The fields that one becomes: a part of gates before ups would be no pairs of both."""
        apart = self._axes["tensor_axis"] and experts.order != "interleaved"
        return ("gate", "up") if part == "gate_up" and apart else (part,)

    def _places(self, part: str, array: Any, experts: Experts) -> dict[str, Any]:
        """Where the fields lie that a weight or a bias becomes, for each leaf."""
        fields = self._fields(part, experts)
        dims = _dims(array, experts.layouts[1 if part == "down" else 0])

        def place(a: Any, dims: str, half: int) -> _Place:
            n = dims.find("n")
            shape = tuple(size // len(fields) if i == n else size for i, size in enumerate(a.shape))
            first = tuple(half * size if i == n else 0 for i, size in enumerate(shape))
            return _Place(shape, self._sharding(part, dims), first)

        return {
            field: jax.tree.map(functools.partial(place, half=half), array, dims)
            for half, field in enumerate(fields)
        }

    def _sharding(self, part: str, dims: str) -> NamedSharding:
        """That of dimensions of a weight: E ("e"), outputs ("n") and inputs ("k")."""
        assert self._mesh is not None
        n, k = ("hidden_axis", "tensor_axis") if part == "down" else ("tensor_axis", "hidden_axis")
        of_dims = {"e": "axis", "n": n, "k": k}
        axes = [self._axes[of_dims[dim]] for dim in dims]
        while axes and not axes[-1]:  # as it is usually written
            axes.pop()
        return NamedSharding(self._mesh, to_spec(tuple(axes)))

    def _count(self, argument: str) -> int:
        """Devices along the axes that an argument names."""
        sizes = {} if self._mesh is None else self._mesh.shape
        return math.prod(sizes[name] for name in self._axes[argument])


def _checked_axes(mesh: Mesh | None, given: dict[str, AxisNames]) -> dict[str, Axes]:
    """The names of axes by the argument, each an axis of the mesh, and in one argument alone."""
    known = None if mesh is None else mesh.axis_names
    out: dict[str, Axes] = {}
    for argument, axis in given.items():
        axes = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        if any(name not in (known or ()) for name in axes) or len(set(axes)) < len(axes):
            what = "different axes" if isinstance(axis, tuple) else "an axis"
            raise ValueError(
                f"jaxmoe.{OP}: {argument}={axis!r} must be {what} of mesh, which has {known}"
            )
        for other, names in out.items():
            if set(names) & set(axes):
                raise ValueError(
                    f"jaxmoe.{OP}: {argument}={axis!r} must name other axes than "
                    f"{other}={given[other]!r}"
                )
        out[argument] = axes
    return out


def _cut(places: dict[str, Any], devices: list[Any], weight: Any) -> list[dict[str, Any]]:
    """The parts of each device, of the weight of some experts."""

    def own(device: Any, of_field: Any) -> Any:
        return jax.tree.map(lambda place, a: place.own(a, device), of_field, weight)

    return [{name: own(device, p) for name, p in places.items()} for device in devices]


def _dims(array: Any, layout: str) -> Any:
    """The dimensions of each leaf of a weight or a bias, a letter each; see `Spread._sharding`."""
    if not isinstance(array, QuantizedArray):
        return f"e{layout}" if array.ndim == 3 else "en"
    scales = "".join(letters(format_of_array(array).weight_scales))
    blocks = str.maketrans("pq", "nk")
    return jax.tree.unflatten(jax.tree.structure(array), ("enk", scales.translate(blocks)))
