"""A device's own experts, and its own pairs of a gate and an up column."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax.mesh import Axes, index, own, permuted
from jaxmoe._mlp.operands import Layer


def own_experts(layer: Layer, axes: Axes, count: Callable[[Axes], int]) -> Layer:
    """The parameters of a device that has its part of the experts along `axes`; see `own_map`."""
    if not axes:
        return layer
    local = layer.num_local_experts // count(axes)
    return layer.replace(num_local_experts=local, expert_offset=0)


def own_map(
    expert_map: jax.Array | None, num_weights: int, axes: Axes, count: int, layer: Layer
) -> jax.Array | None:
    """The map of global experts to those whose weights, one of `count` parts, are on this device.

    Expert g uses weight g mod num_weights, here as everywhere.
    """
    if not axes:
        return expert_map
    ids = jnp.arange(layer.num_experts, dtype=jnp.int32)
    expert = ids - layer.expert_offset if expert_map is None else expert_map
    exists = (expert >= 0) & (expert < layer.num_local_experts)
    expert = jnp.where(exists, expert, 0)
    own_weights = num_weights // count
    weight = expert % num_weights - index(axes) * own_weights
    here = exists & (weight >= 0) & (weight < own_weights)
    return jnp.where(here, expert // num_weights * own_weights + weight, -1)


def own_pairs(a: Any, dim: int, axes: Axes, count: Callable[[Axes], int]) -> Any:
    """This device's gates and its ups, of all gates before all ups or the other way round."""
    if not axes or a is None:
        return a
    shape = a.shape
    a = a.reshape(*shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :])
    a = own(a, dim + 1, axes, count(axes))
    return a.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def join_pairs(z: jax.Array, *, axes: Axes, count: int) -> jax.Array:
    """Brings gates and ups together: two blocks of columns as stored -> one of each kind.

    Device s has the blocks 2s and 2s + 1 of 2 * count; device d gets d and d + count. Both of a
    device's blocks move at once, in two permutations of the devices.
    """
    low, high = jnp.split(z, 2, axis=1)
    here = index(axes)
    if count % 2 == 0:
        lower = here < count // 2
        low, high = jnp.where(lower, low, high), jnp.where(lower, high, low)
    sends = [(2 * s + (count % 2 == 0 and 2 * s >= count)) % count for s in range(count)]
    others = [(2 * s + (count % 2 == 1 or 2 * s < count)) % count for s in range(count)]
    low = permuted(low, axes, sends)
    high = permuted(high, axes, others)
    even = here % 2 == 0
    return jnp.concatenate([jnp.where(even, low, high), jnp.where(even, high, low)], axis=1)
