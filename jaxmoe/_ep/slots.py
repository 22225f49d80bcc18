"""Where each choice of each token goes: a slot, device * experts per device + local id, or -1."""

import jax
import jax.numpy as jnp


def slots_of(
    expert_ids: jax.Array,
    expert_map: jax.Array | None,
    *,
    num_experts: int,
    num_local: int,
    device: jax.Array,
    own_first: bool,
) -> jax.Array:
    """Turns expert ids into slots.

    Args:
      expert_ids: [T, K] int32.
      expert_map: [n, num_experts] int32, the local id of each expert on each device; outside
        [0, num_local) not there. None for experts in order, num_local to a device.
      num_experts: ids from here on name no expert.
      num_local: experts that each device holds.
      device: [] int32, this one.
      own_first: whether this device's own copy of an expert comes before the others'.

    Returns:
      [T, K] int32, -1 for a choice without an expert. An expert on several devices: the own copy if
      `own_first` and there is one, else the copies in turn, token by token.
    """
    exists = (expert_ids >= 0) & (expert_ids < num_experts)
    if expert_map is None:
        return jnp.where(exists, expert_ids, -1)
    ids = jnp.where(exists, expert_ids, 0)
    here = (expert_map >= 0) & (expert_map < num_local)
    copies = here.sum(axis=0, dtype=jnp.int32)
    # holders[j, e] is the device of the copy j of e: those that have one come first.
    holders = jnp.argsort(~here, axis=0, stable=True).astype(jnp.int32)
    turn = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    if own_first:  # devices start at different copies
        turn = turn + device
    holder = holders[turn % jnp.maximum(copies[ids], 1), ids]
    if own_first:
        holder = jnp.where(here[device][ids], device, holder)
    slots = holder * num_local + expert_map[holder, ids]
    return jnp.where(exists & (copies[ids] > 0), slots, -1)


def local_ids(slots: jax.Array, num_local: int, device: jax.Array) -> jax.Array:
    """Turns slots into local ids of `device`, -1 for those of other devices."""
    local = slots - device * num_local
    return jnp.where((slots >= 0) & (local >= 0) & (local < num_local), local, -1)
