"""Arrays with several axes of tokens, such as batch and sequence, as arrays with one.

Over Explicit mesh axes the tokens of each device stay together: the flat order is then that of the
devices, the same for every array of a call. So it is for ops in which each token is on its own.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import mesh as _mesh
from jaxmoe._jax import sharding as _sharding


@dataclasses.dataclass(frozen=True)
class Leading:
    """The axes of tokens that the arrays of one call have.

    Attributes:
      op: public name of the function, for messages.
      shape: their sizes.
      axes: the Explicit mesh axes over which each is split.
      mesh: the mesh of these.
    """

    op: str
    shape: tuple[int, ...]
    axes: _mesh.Dims
    mesh: Any

    @property
    def split(self) -> tuple[str, ...]:
        """The mesh axes over which tokens are split, the slowest first."""
        return tuple(axis for axes in self.axes for axis in axes)

    def flat(self, name: str, a: Any) -> Any:
        """Makes [T,n] of [...,n], where `name` is what messages call it; None stays None."""
        if a is None:
            return None
        _checks.check_array(self.op, name, a)
        if tuple(a.shape[:-1]) != self.shape:
            wanted, got = (f"[{','.join(map(str, s))}]" for s in (self.shape, a.shape[:-1]))
            rule = f"{name}.shape[:-1]={got} must be {wanted}, the axes of tokens of this call"
            raise ValueError(_checks.message(self.op, rule, **{name: a}))
        return self._reshaped(a, self.axes, (self.split,), (math.prod(self._local()),))

    def flat_mask(self, mask: Any) -> Any:
        """Makes [T] of a mask [...]; what is no array stays, for the check of its dtype."""
        if not hasattr(mask, "shape"):
            return mask
        _checks.check_shape(self.op, "mask", mask, self.shape, "the axes of tokens of this call")
        return self.flat("mask", mask[..., None])[:, 0]

    def unflat(self, a: jax.Array) -> jax.Array:
        """Makes [...,n] of [T,n], split as the arguments were.

        Where these were whole and the tokens are split now, the first axis is, if it divides.
        """
        aval = jax.typeof(a)
        rows, rest = _mesh.explicit_dims(aval)
        mesh = aval.sharding.mesh
        if not self.split and self.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
            a = jax.sharding.reshard(a, NamedSharding(mesh, _mesh.to_spec(((), rest))))
        return self._reshaped(a, (self.split,), self.axes, self._local())

    def _local(self) -> tuple[int, ...]:
        """The sizes of a device's part."""
        if not self.split:
            return self.shape
        counts = [math.prod(self.mesh.shape[axis] for axis in axes) for axes in self.axes]
        return tuple(size // count for size, count in zip(self.shape, counts, strict=True))

    def _reshaped(
        self, a: Any, given: _mesh.Dims, wanted: _mesh.Dims, local: tuple[int, ...]
    ) -> jax.Array:
        """Replaces the axes but the last by `local` ones, on each device for itself."""
        if not self.split:
            return jax.numpy.reshape(a, (*local, a.shape[-1]))
        rest = _mesh.explicit_dims(jax.typeof(a))[-1]
        rest = tuple(axis for axis in rest if axis not in self.split)
        whole = NamedSharding(self.mesh, _mesh.to_spec((*given, rest)))
        call = self.op, self.mesh, self.split, [jax.typeof(a)]
        divided = jax.shard_map(
            lambda a: a.reshape(*local, a.shape[-1]),
            mesh=None if self.mesh == jax.sharding.get_abstract_mesh() else self.mesh,
            in_specs=_mesh.to_spec(given),
            out_specs=_mesh.to_spec(wanted),
            axis_names=_sharding.nested_axes(*call, "tokens are"),
        )
        return divided(jax.sharding.reshard(a, whole))


def of_tokens(op: str, a: Any) -> Leading | None:
    """The axes of tokens of [...,n], None if there is one, or if `a` is refused anyway."""
    if not hasattr(a, "ndim") or a.ndim < 3 or _checks.is_quantized(a):
        return None
    if not isinstance(a, jax.Array) or not a.size:
        return Leading(op, tuple(a.shape[:-1]), ((),) * (a.ndim - 1), None)
    aval = jax.typeof(a)
    return Leading(op, aval.shape[:-1], _mesh.explicit_dims(aval)[:-1], _mesh.mesh_of([aval]))


def on_own_tokens(
    op: str, call: Callable[..., jax.Array], tokens: Sequence[Any], rest: Any
) -> jax.Array:
    """`call(tokens, rest)`, by each device of its own tokens where Explicit axes divide these.

    `tokens` are arrays or None; the first, [...,n], has the axes of tokens that all begin with, and
    the result has its shape. Each device gets all of `rest`, a pytree: what is split is gathered,
    and its cotangent is the sum of those of all devices.
    """
    there = [a for a in tokens if a is not None]
    count = there[0].ndim - 1
    avals = [jax.typeof(a) for a in there]
    of_axes = zip(*(_mesh.explicit_dims(aval)[:count] for aval in avals), strict=True)
    dims = tuple(next((axes for axes in given if axes), ()) for given in of_axes)
    used = {axis for axes in dims for axis in axes}
    if not used or not there[0].size:
        return call(tokens, rest)
    mesh = _mesh.mesh_of(avals)

    def placed(a: Any, *axes: _mesh.Axes) -> jax.Array:
        return jax.sharding.reshard(a, NamedSharding(mesh, _mesh.to_spec(axes)))

    mine = tuple(None if a is None else placed(a, *dims) for a in tokens)
    leaves, tree = jax.tree.flatten(rest)
    leaves = [placed(leaf) for leaf in leaves]
    whole = [jax.typeof(a) for a in (*(a for a in mine if a is not None), *leaves)]
    spec = _mesh.to_spec(dims)

    def part(tokens: Any, leaves: Any) -> jax.Array:
        return call(tokens, jax.tree.unflatten(tree, leaves))

    divided = jax.shard_map(
        _sharding.nestable(part, mesh),
        mesh=None if mesh == jax.sharding.get_abstract_mesh() else mesh,
        in_specs=(tuple(None if a is None else spec for a in mine), _mesh.to_spec(())),
        out_specs=spec,
        axis_names=_sharding.nested_axes(op, mesh, used, whole, "tokens are"),
    )
    return divided(mine, leaves)
