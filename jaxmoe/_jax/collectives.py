"""Collectives of one device's part of an op, with the derivative that the part has as a whole.

`TYPED` is for `jax.shard_map`, whose types know which values differ between devices: JAX's own
rules are right there. `PLAIN` is for the parts that XLA's partitioner asks for, where there are no
such types: what is the same on all devices says so by the op it goes through.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax.mesh import Axes, Dims, own


def _gather(a: jax.Array, axes: Axes, dim: int) -> jax.Array:
    # XLA refuses an array without elements, of which all parts are as large as one.
    return jax.lax.all_gather(a, axes, axis=dim, tiled=True) if axes and a.shape[dim] else a


class _Collectives:
    """Functions of an array and mesh axes; without axes they return the array."""

    def gather(self, a: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
        """All parts along `dim`. In the backward pass the devices' cotangents are added up."""
        return _gather(a, axes, dim)

    def fetch(self, a: jax.Array, dims: Dims, narrow: Any = None) -> jax.Array:
        """All parts along each dimension, rounded to the dtype `narrow` before they move.

        In the backward pass cotangents, which are not rounded, are added up and scattered.

        NOTE: FP8 numbers, which have no derivative, move as bytes: not every backend has
        collectives of them, and XLA then moves them in a wider dtype.
        """
        if not any(dims):
            return a

        def whole(a: jax.Array) -> jax.Array:
            return functools.reduce(lambda a, of: _gather(a, of[1], of[0]), enumerate(dims), a)

        if a.dtype.itemsize == 1:
            moved = whole(jax.lax.bitcast_convert_type(a, jnp.uint8))
            return jax.lax.bitcast_convert_type(moved, a.dtype)
        if narrow is None or narrow == a.dtype:
            return whole(a)
        rounded = jax.custom_jvp(lambda a: whole(a.astype(narrow)).astype(a.dtype))
        rounded.defjvp(lambda primals, tangents: (rounded(*primals), whole(*tangents)))
        return rounded(a)

    def scatter(self, a: jax.Array, axes: Axes) -> jax.Array:
        """This device's rows of the sum."""
        return jax.lax.psum_scatter(a, axes, tiled=True) if axes and a.shape[0] else a

    def total(self, a: jax.Array, axes: Axes) -> jax.Array:
        """The sum, which is the same on all devices from there on."""
        return jax.lax.psum(a, axes) if axes else a

    def spread(self, a: jax.Array, axes: Axes) -> jax.Array:
        """`a`, the same on all devices, each of which has a part of the cotangent from here on."""
        del axes
        return a

    def gather_same(self, a: jax.Array, axes: Axes, count: int, dim: int = 0) -> jax.Array:
        """All parts along `dim`. In the backward pass all devices have the same cotangent."""
        del count
        if not axes:
            return a
        if not a.shape[dim]:
            return jnp.zeros(a.shape, a.dtype)
        return jax.lax.all_gather(a, axes, axis=dim, tiled=True, to="invarying")

    def own_same(self, a: jax.Array, axes: Axes, count: int) -> jax.Array:
        """This device's rows of an array that is the same on all devices."""
        return own(a, 0, axes, count)


class _Plain(_Collectives):
    def total(self, a: jax.Array, axes: Axes) -> jax.Array:
        return _total(a, axes) if axes else a

    def spread(self, a: jax.Array, axes: Axes) -> jax.Array:
        return _spread(a, axes) if axes and a.size else a

    def gather_same(self, a: jax.Array, axes: Axes, count: int, dim: int = 0) -> jax.Array:
        return _gather_same(a, axes, count, dim) if axes else a

    def own_same(self, a: jax.Array, axes: Axes, count: int) -> jax.Array:
        return _own_same(a, axes, count, 0) if axes else a


def _linear(forward: Any, backward: Any) -> Any:
    """`forward(a, *static)` as a function whose derivative goes back through `backward`."""
    fn = jax.custom_vjp(forward, nondiff_argnums=tuple(range(1, forward.__code__.co_argcount)))

    def backward_of(*operands: Any) -> tuple[Any]:
        *static, _, ct = operands
        return (backward(ct, *static),)

    fn.defvjp(lambda a, *static: (forward(a, *static), None), backward_of)
    return fn


def _psum(a: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(a, axes)


def _same(a: jax.Array, axes: Axes) -> jax.Array:
    del axes
    return a


def _all(a: jax.Array, axes: Axes, count: int, dim: int) -> jax.Array:
    del count
    return _gather(a, axes, dim)


def _part(a: jax.Array, axes: Axes, count: int, dim: int) -> jax.Array:
    return own(a, dim, axes, count)


_total, _spread = _linear(_psum, _same), _linear(_same, _psum)
_gather_same, _own_same = _linear(_all, _part), _linear(_part, _all)

PLAIN, TYPED = _Plain(), _Collectives()
