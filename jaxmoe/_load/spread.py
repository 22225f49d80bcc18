"""Puts arrays of experts on the devices of a mesh."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe._jax import checks as _checks
from jaxmoe._load.files import OP


class Spread:
    """Puts arrays of experts where they are to lie."""

    def __init__(
        self, mesh: Mesh | None, axis: str | tuple[str, ...] | None, num_experts: int
    ) -> None:
        given: Any = mesh
        if given is not None and not isinstance(given, Mesh):
            rule = "mesh must be a jax.sharding.Mesh, whose devices weights are put on"
            raise TypeError(_checks.message(OP, rule, mesh=mesh))
        axes = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        names = None if mesh is None else mesh.axis_names
        if any(name not in (names or ()) for name in axes) or len(set(axes)) < len(axes):
            what = "different axes" if isinstance(axis, tuple) else "an axis"
            raise ValueError(
                f"jaxmoe.{OP}: axis={axis!r} must be {what} of mesh, which has {names}"
            )
        devices = 1 if mesh is None else math.prod(mesh.shape[name] for name in axes)
        if num_experts % devices:
            raise ValueError(
                f"jaxmoe.{OP}: {num_experts} experts must be a multiple of the {devices} devices "
                f"of axis={axis!r}"
            )
        self._mesh, self._axis, self._num_experts = mesh, axis, num_experts

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
        assert self._mesh is not None
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axis))
        where = sharding.addressable_devices_indices_map((self._num_experts,))
        everyone = range(self._num_experts)
        return {device: everyone[index[0]] for device, index in where.items() if index}

    def __call__(self, read: Callable[[range], Any]) -> Any:
        """The weight of all experts, of what `read` gives for some."""
        if self._mesh is None:
            return read(range(self._num_experts))
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axis))
        parts: dict[range, Any] = {}
        pieces = []
        for device, mine in self._where().items():
            if mine not in parts:
                with jax.default_device(device):
                    parts[mine] = read(mine)
            pieces.append(jax.device_put(parts[mine], device))

        def joined(*leaves: jax.Array) -> jax.Array:
            shape = (self._num_experts, *leaves[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

        return jax.tree.map(joined, *pieces)
