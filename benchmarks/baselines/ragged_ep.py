"""Expert parallelism as JAX's own pieces make it: ragged_all_to_all, ragged_dot and sorts."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from benchmarks.baselines import xla_ragged_dot
from benchmarks.cases import Routed
from benchmarks.models import Layer
from jaxmoe.activation import resolve, split_gate_up

NAME = "xla_ragged_dot[ep_ragged]"
ROOM = 1.25  # of the receive buffer, in parts of what even routing sends
_MORE_ROWS = 64  # for few tokens


def layer(x: jax.Array, r: Routed, w: jaxmoe.Experts, residual: jax.Array, axis: str) -> jax.Array:
    """Computes residual + MoE(x) inside `jax.shard_map`: each choice of a token is a row sent."""
    num_devices, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    num_local = w.num_experts
    num_tokens, top_k = r.expert_ids.shape
    num_rows, room = num_tokens * top_k, received_rows(num_tokens * top_k, num_devices)
    ids = r.expert_ids.reshape(-1)
    order = jnp.argsort(ids, stable=True)
    mine = jnp.bincount(ids, length=num_local * num_devices).astype(jnp.int32)
    counts = jax.lax.all_gather(mine, axis)  # [source, expert]
    sizes = counts.reshape(num_devices, num_devices, num_local).sum(axis=2)
    starts = jnp.cumsum(sizes, axis=1) - sizes
    places = jnp.cumsum(sizes, axis=0) - sizes

    def send(rows: jax.Array, length: int, index: Any) -> jax.Array:
        output = jax.lax.pcast(jnp.zeros((length, rows.shape[1]), rows.dtype), axis, to="varying")
        return jax.lax.ragged_all_to_all(rows, output, *index, axis_name=axis)

    there = (starts[me], sizes[me], places[me], sizes[:, me])
    back = (places[:, me], sizes[:, me], starts[:, me], sizes[me])
    rows = send(x[order // top_k], room, there)
    # The rows of a source are in the order of its experts.
    here = jax.lax.dynamic_slice_in_dim(counts, me * num_local, num_local, axis=1)
    unused = room - here.sum()
    groups = jnp.concatenate([here.reshape(-1), unused[None]])
    expert = jnp.repeat(
        jnp.append(jnp.tile(jnp.arange(num_local), num_devices), num_local),
        groups,
        total_repeat_length=room,
    )
    by_expert = jnp.argsort(expert, stable=True)
    group_sizes = here.sum(axis=0)
    h = xla_ragged_dot.product(rows[by_expert], w.gate_up, group_sizes).astype(jnp.float32)
    act = resolve(w.activation)
    h = act(*split_gate_up(h, w.order)) if act.gated else act(h)
    out = xla_ragged_dot.product(h.astype(x.dtype), w.down, group_sizes)
    out = jnp.zeros_like(out).at[by_expert].set(out, unique_indices=True)
    own = send(out, num_rows, back)
    slots = jnp.zeros_like(own).at[order].set(own, unique_indices=True)
    slots = slots.reshape(num_tokens, top_k, -1).astype(jnp.float32)
    y = jnp.sum(slots * r.weights[:, :, None], axis=1)
    return (y + residual.astype(jnp.float32)).astype(x.dtype)


def received_rows(num_rows: int, num_devices: int) -> int:
    """Rows that a device has room for, of `num_rows` that each sends.

    More would be written past the end: this is for even routing alone.
    """
    return min(int(ROOM * num_rows) + _MORE_ROWS, num_rows * num_devices)


def refusal(model: Layer, flops: float, num_rows: int, num_devices: int, skew: str) -> str | None:
    """Returns why the call is not made, None if it can be."""
    if skew != "uniform":
        return "not run: its buffers have room for even routing"
    if model.bias:
        return "not run: biases are not in it"
    if jax.default_backend() != "gpu":
        return "not run: XLA has no ragged_all_to_all here"
    num_local = model.num_experts // num_devices
    width = max(model.hidden, model.intermediate)
    return xla_ragged_dot.refusal(
        ROOM * flops, num_local, received_rows(num_rows, num_devices), width
    )
