"""The ways in which tokens reach their experts and sums come back.

Each takes what there is of a token, in arrays with a row for each, and returns what this device
received, a function that brings results home, and how many choices found no room. Rows of no token
are zeros throughout. Through collectives slots travel among the small numbers of a token, see
`with_slots`; the kernels of `direct` bring those of all tokens anyway.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe._ep import direct as _direct
from jaxmoe._ep import peers as _peers
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe.finalize import sum_rows
from jaxmoe.permute import permute_p
from jaxmoe.plan import plan

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Axis:
    """The mesh axis (or axes) over which experts are spread.

    Attributes:
      name: as collectives take it.
      size: n, number of devices.
      index: [] int32, this device.
      sum_dtype: dtype in which psum and psum_scatter add.
    """

    name: str | tuple[str, ...]
    size: int
    index: jax.Array
    sum_dtype: Any


class Exchange(NamedTuple):
    """Result of a dispatch: the rows that arrived, and the way back.

    Attributes:
      rows: the payload's arrays as received, M rows each.
      combine: ([M, H] sums of this device's experts) -> [T, H] sums of all, residual added; that
        of `direct` takes another `says`.
      lost: [] int32, choices of this device's tokens that found no room.
      slots: [M, K] int32 of these rows, counted as where they were sent from; None where they are
        among `rows`.
      sent: of `direct` alone, for a call that computes what is received and brings it home.
    """

    rows: Arrays
    combine: Callable[..., jax.Array]
    lost: jax.Array
    slots: jax.Array | None = None
    sent: _direct.Sent | None = None


def with_slots(payload: Arrays, slots: jax.Array) -> Arrays:
    """Puts slots behind the small numbers of tokens, for a collective.

    They are below 2^24, so float32 holds them; slot + 1 makes a row of zeros ask for nothing.
    """
    tokens, small = payload
    numbers = jax.lax.stop_gradient((slots + 1).astype(jnp.float32))
    return tokens, jnp.concatenate([small, numbers], axis=1)


def without_slots(way: Exchange, top_k: int) -> Exchange:
    """Takes the slots of `with_slots` out of what has arrived."""
    tokens, small = way.rows
    slots = small[:, -top_k:].astype(jnp.int32) - 1
    return way._replace(rows=(tokens, small[:, :-top_k]), slots=slots)


def all_gather(payload: Arrays, residual: jax.Array | None, axis: Axis) -> Exchange:
    """Every device receives every token."""

    def combine(y: jax.Array) -> jax.Array:
        dtype = y.dtype
        y = y.astype(axis.sum_dtype)
        y = jax.lax.psum_scatter(y, axis.name, scatter_dimension=0, tiled=True)
        return plus(y, residual, dtype)

    rows = tuple(jax.lax.all_gather(a, axis.name, axis=0, tiled=True) for a in payload)
    return Exchange(rows, combine, jnp.int32(0))


def replicated(
    payload: Arrays, residual: jax.Array | None, axis: Axis, slots: jax.Array
) -> Exchange:
    """Every device has every token already."""

    def combine(y: jax.Array) -> jax.Array:
        return plus(jax.lax.psum(y.astype(axis.sum_dtype), axis.name), residual, y.dtype)

    return Exchange(payload, combine, jnp.int32(0), slots)


def direct(
    payload: Arrays,
    residual: jax.Array | None,
    axis: Axis,
    slots: jax.Array,
    num_local: int,
    memory: _peers.PeerMemory,
    row_bytes: int,
    says: str,
) -> Exchange:
    """Each device leaves tokens with those that they have a choice on, and sums at their source.

    Args:
      row_bytes: of a sum.
      says: of the way of sums, where the caller has no other one, see `direct.Way`.
    """
    tokens, small = payload
    token_bytes = tokens.shape[1] * tokens.dtype.itemsize
    count, top_k = slots.shape
    sizes = count, top_k, axis.size, token_bytes, small.shape[1], row_bytes
    quantized = not _direct.has_tangents(tokens)
    if (needed := _peers.needed_bytes(*sizes, quantized=quantized)) > memory.num_bytes:
        rule = (
            f"dispatch='direct' needs {needed} bytes of peer memory for {count} tokens of "
            f"each of {axis.size} devices, and num_bytes={memory.num_bytes} are open along "
            f"{axis.name!r}; open more, or give num_chunks"
        )
        raise ValueError(_checks.message(_direct.OP, rule, x=tokens))
    way = _direct.way_of(axis.name, num_local, memory)
    all_slots, *rows = _direct.send(way, slots, tokens, small)

    def combine(y: jax.Array, says: str = says) -> jax.Array:
        return _direct.bring(way._replace(says=says), slots, all_slots, y, residual)

    sent = _direct.Sent(way, memory.num_bytes, slots, all_slots, residual)
    return Exchange(tuple(rows), combine, jnp.int32(0), all_slots, sent)


def all_to_all(
    payload: Arrays,
    residual: jax.Array | None,
    axis: Axis,
    slots: jax.Array,
    num_local: int,
    capacity: int,
) -> Exchange:
    """Each device sends each other one the first `capacity` tokens that have a choice there."""
    send = _by_device(slots, axis.size, num_local)
    starts, sizes = send.offsets[:-1], send.offsets[1:] - send.offsets[:-1]
    place = send.token_to_row - starts[None, :]
    kept = (send.token_to_row >= 0) & (place < capacity)
    column = jnp.arange(axis.size, dtype=jnp.int32)[None, :]
    token_to_row = jnp.where(kept, column * capacity + place, -1)
    index = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    filled = index < sizes[:, None]
    row = jnp.where(filled, starts[:, None] + index, 0)
    row_to_token = jnp.where(filled, send.row_to_token[row], -1).reshape(-1)

    def swap(a: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(a, axis.name, 0, 0, tiled=True)

    def combine(y: jax.Array) -> jax.Array:
        return sum_rows(swap(y), token_to_row, residual)

    rows = tuple(swap(_rows_of(a, row_to_token, token_to_row)) for a in payload)
    return Exchange(rows, combine, _lost(slots, num_local, kept))


def ragged(
    payload: Arrays,
    residual: jax.Array | None,
    axis: Axis,
    slots: jax.Array,
    num_local: int,
    capacity: int,
) -> Exchange:
    """Sends tokens by ragged_all_to_all; a device receives n * capacity rows at most.

    Tokens of earlier devices come first, so those of later ones may find no room.
    """
    send = _by_device(slots, axis.size, num_local)
    sizes = jax.lax.all_gather(jnp.diff(send.offsets), axis.name)  # [source, destination]
    starts = jnp.cumsum(sizes, axis=1) - sizes
    ends = jnp.minimum(jnp.cumsum(sizes, axis=0), axis.size * capacity)
    places = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    sizes = ends - places
    mine = send.token_to_row - starts[axis.index][None, :]
    kept = (send.token_to_row >= 0) & (mine < sizes[axis.index][None, :])
    token_to_row = jnp.where(kept, send.token_to_row, -1)
    # A token goes to no more devices than it has choices, so the rows in use end before this.
    held = slots.shape[0] * min(axis.size, slots.shape[1])
    row_to_token = send.row_to_token[:held]
    there = (starts, sizes, places)
    back = (places.T, sizes.T, starts.T)

    def combine(y: jax.Array) -> jax.Array:
        return sum_rows(_ragged_exchange(y, held, back, axis), token_to_row, residual)

    length = axis.size * capacity
    rows = (_rows_of(a, row_to_token, token_to_row) for a in payload)
    received = tuple(_ragged_exchange(a, length, there, axis) for a in rows)
    return Exchange(received, combine, _lost(slots, num_local, kept))


def plus(y: jax.Array, residual: jax.Array | None, dtype: Any) -> jax.Array:
    """Adds the residual in float32 and rounds to `dtype` once."""
    if residual is not None:
        y = y.astype(jnp.float32) + residual.astype(jnp.float32)
    return y.astype(dtype)


class _Send(NamedTuple):
    """Tokens in the order of the devices they go to, each once for a device.

    Attributes:
      offsets: [n + 1] int32, first row of each device.
      row_to_token: [T * n] int32, -1 past the last row.
      token_to_row: [T, n] int32, -1 where a token has no choice on a device.
    """

    offsets: jax.Array
    row_to_token: jax.Array
    token_to_row: jax.Array


def _by_device(slots: jax.Array, num_devices: int, num_local: int) -> _Send:
    device = jnp.arange(num_devices, dtype=jnp.int32)
    goes = _device_of(slots, num_local)[:, :, None] == device[None, None, :]
    order = plan(jnp.where(goes.any(axis=1), device[None, :], -1), num_devices)
    return _Send(order.expert_offsets, order.row_to_token, order.slot_to_row)


def _device_of(slots: jax.Array, num_local: int) -> jax.Array:
    return jnp.where(slots >= 0, slots // num_local, -1)


def _lost(slots: jax.Array, num_local: int, kept: jax.Array) -> jax.Array:
    device = _device_of(slots, num_local)
    arrives = jnp.take_along_axis(kept, jnp.maximum(device, 0), axis=1)
    return jnp.sum((device >= 0) & ~arrives, dtype=jnp.int32)


def _rows_of(a: jax.Array, row_to_token: jax.Array, token_to_row: jax.Array) -> jax.Array:
    """Copies the row of each token, zeros for -1; words of FP8 as if they were float32."""
    words = a.dtype == jnp.uint32
    a = jax.lax.bitcast_convert_type(a, jnp.float32) if words else a
    (rows,) = permute_p(a, row_to_token, token_to_row)
    return jax.lax.bitcast_convert_type(rows, jnp.uint32) if words else rows


def _ragged_exchange(
    rows: jax.Array, length: int, matrices: Sequence[jax.Array], axis: Axis
) -> jax.Array:
    """Sends rows[starts[i, j]:][:sizes[i, j]] of each device i to row places[i, j] of each j.

    The matrices are the same on every device. What nobody writes is 0.
    """
    starts, sizes, places = matrices
    me = axis.index
    (rows,) = ragged_rows_p(rows)
    output = jnp.zeros((length, *rows.shape[1:]), rows.dtype)
    varying = jax.typeof(rows).manual_axis_type.varying
    missing = varying - jax.typeof(output).manual_axis_type.varying
    if missing:
        output = jax.lax.pcast(output, tuple(sorted(missing)), to="varying")

    def native(rows: jax.Array, output: jax.Array) -> jax.Array:
        received = sizes[:, me]
        return jax.lax.ragged_all_to_all(
            rows, output, starts[me], sizes[me], places[me], received, axis_name=axis.name
        )

    def emulated(rows: jax.Array, output: jax.Array) -> jax.Array:
        everything = jax.lax.all_gather(rows, axis.name, axis=0, tiled=True)
        row = jnp.arange(length, dtype=jnp.int32)[None, :]
        first, count = places[:, me][:, None], sizes[:, me][:, None]
        from_source = (row >= first) & (row < first + count)
        source = jnp.argmax(from_source, axis=0).astype(jnp.int32)
        at = source * rows.shape[0] + starts[source, me] + row[0] - places[source, me]
        some = from_source.any(axis=0)
        shape = (length, *[1] * (rows.ndim - 1))
        return jnp.where(some.reshape(shape), everything[jnp.where(some, at, 0)], output)

    return jax.lax.platform_dependent(rows, output, cuda=native, default=emulated)


def _refuse_vmap(*_args: Any) -> Any:
    rule = (
        "dispatch='ragged' must be another way under jax.vmap: JAX has no rule for its collective"
    )
    raise NotImplementedError(_checks.message(_direct.OP, rule))


# Rows as they are, to say so: jax.lax.ragged_all_to_all would end in an assertion.
ragged_rows_p = _primitive.define(
    "jaxmoe_ragged_rows",
    out=lambda rows: [(rows.shape, rows.dtype)],
    xla=lambda rows: (rows,),
    batch=_refuse_vmap,
    jvp=lambda primals, tangents: (ragged_rows_p(*primals), ragged_rows_p(*tangents)),
    transpose=lambda cts, _args: ragged_rows_p(*cts),
    composed=True,
)
