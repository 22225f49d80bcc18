"""XLA's collectives alone, moving the bytes that expert parallelism moves."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import chain
from benchmarks.cases import tokens

AXIS = "expert"
# XLA starts collectives early and waits late for what depends on them.
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}


def ways(name: str) -> int:
    """How many times the rows are sent."""
    return 2 if name == "all_gather+psum_scatter" else 1


def refusal(name: str) -> str | None:
    """Returns why it is not run, None if it is."""
    if name == "ragged" and jax.default_backend() != "gpu":
        return "not run: XLA has no ragged_all_to_all here"
    return None


def calls(name: str, mesh: Mesh, rows: int, hidden: int, seed: int, length: int) -> chain.Chain:
    """Chains `length` collectives of so many rows from each device to each other one."""
    count = mesh.devices.size
    start, call = _CALLS[name]
    held = rows * (1 if start == "own" else count)
    drawn = tokens(jax.random.key(seed), count * held, hidden)
    state = jax.device_put(drawn, NamedSharding(mesh, P(AXIS)))
    return chain.Chain(_program(_step(call, mesh), length), state, (), length)


@functools.cache
def _step(call: Callable[[jax.Array], jax.Array], mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.shard_map(call, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


@functools.cache
def _program(step: Callable[..., jax.Array], length: int) -> Callable[[Any, Any], Any]:
    def run(y: jax.Array, _: Any) -> jax.Array:
        for _i in range(length):
            y = step(y)
        return y

    return chain.compiled(run, OPTIONS)


def _gather(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(jax.lax.all_gather(x, AXIS, tiled=True))


def _scatter(x: jax.Array) -> jax.Array:
    y = jax.lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)
    return jax.lax.optimization_barrier(y)


def _own(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, 0, x.shape[0] // jax.lax.axis_size(AXIS))


def _swap(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True))


def _swap_ragged(x: jax.Array) -> jax.Array:
    count = jax.lax.axis_size(AXIS)
    size = x.shape[0] // count
    sizes = jnp.full((count,), size, jnp.int32)
    starts = jnp.arange(count, dtype=jnp.int32) * size
    places = jnp.full((count,), jax.lax.axis_index(AXIS) * size, jnp.int32)
    y = jax.lax.ragged_all_to_all(
        x, jnp.zeros_like(x), starts, sizes, places, sizes, axis_name=AXIS
    )
    return jax.lax.optimization_barrier(y)


# By name: the rows a device starts with, those of its tokens ("own") or of all devices ("all"), and
# a call that returns as many. Single collectives slice or copy to get there.
_CALLS: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {
    "all_gather": ("own", lambda x: _own(_gather(x))),
    "psum_scatter": ("all", lambda x: jnp.tile(_scatter(x), (jax.lax.axis_size(AXIS), 1))),
    "all_gather+psum_scatter": ("own", lambda x: _scatter(_gather(x))),
    "all_to_all": ("all", _swap),
    "ragged": ("all", _swap_ragged),
}

NAMES = tuple(_CALLS)
