"""Batches of layers: examples become groups of one call, where no weights would be copied."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax import primitive as _primitive
from jaxmoe._mlp.operands import Layer, Operands, is_joined, join
from jaxmoe.permute import permute_p
from jaxmoe.plan import local_ids_xla

_FIRST = ("w_gate_up", "gate_up_scales", "w_up", "b_gate_up")  # what belongs to E1 experts
_SECOND = ("w_down", "down_scales", "b_down")  # and to E2


def batch(op: _primitive.Op, args: Operands, dims: Operands, layer: Layer) -> Any:
    """The batch rule of the layer: one call, or one for each example."""
    size = _primitive.batch_size(args, dims)
    if not is_joined(args):
        args, dims = _joined(args, dims, layer)
    folded = _fold(args, dims, size, layer)
    if folded is None:
        return _primitive.one_by_one(op, args, dims, layer=layer)
    a, wide = folded
    outs = op(*a, layer=wide)
    if layer.finalize:
        (y,) = outs
        return (y.reshape(size, y.shape[0] // size, y.shape[1]),), (0,)
    rows, slot_to_row = outs
    return unfold_rows(rows, slot_to_row, size), (0, 0)


def _joined(args: Operands, dims: Operands, layer: Layer) -> tuple[Operands, Operands]:
    """Joins what belongs to both halves of the first weight, batched if any part of it is."""
    small = ("b_gate_up", "b_up", "gate_up_scales", "up_scales")
    given = {n: getattr(args, n) for n in small if getattr(args, n) is not None}
    axes = {n: getattr(dims, n) for n in given}

    def of_given(given: dict[str, jax.Array]) -> Any:
        a = join(Operands(None, None, None, None)._replace(**given), layer)
        return {n: getattr(a, n) for n in given if getattr(a, n) is not None}

    if all(axis is None for axis in axes.values()):
        out, axis = of_given(given), None
    else:
        out, axis = jax.vmap(of_given, (axes,))(given), 0
    nothing = dict.fromkeys(small)
    return (
        args._replace(**nothing | out),
        dims._replace(**nothing | dict.fromkeys(out, axis)),
    )


def _fold(args: Operands, dims: Operands, size: int, layer: Layer) -> tuple[Operands, Layer] | None:
    """Makes one layer of a batch; None if that copied weights or shared a scale of an example."""
    if layer.format.gradient.straight_through or not _scales_fold(args, dims, layer):
        return None
    a = Operands(*(_primitive.move_batch_to_front(x, d) for x, d in zip(args, dims, strict=True)))
    moves = {n for n, d in zip(Operands._fields, dims, strict=True) if d is not None}
    num_local = layer.num_local_experts
    counts = {n: getattr(a, n).shape[1 if n in moves else 0] for n in ("w_gate_up", "w_down")}
    batched = {counts[n] for n in counts if n in moves}
    per_block = min(batched, default=num_local)
    if len(batched) > 1 or (batched and any(per_block % n for n in counts.values())):
        return None
    for names in (_FIRST, _SECOND):
        if names[0] not in moves and any(n in moves for n in names):
            return None
    if a.w_up is not None and ("w_up" in moves) != ("w_gate_up" in moves):
        return None
    if batched and a.h_scale is not None and a.h_scale.size > 1:
        return None
    ids = _primitive.move_batch_to_front(a.expert_ids, 0 if "expert_ids" in moves else None, size)
    if batched or "expert_map" in moves:
        of_map = 0 if "expert_map" in moves else None
        local = jax.vmap(
            lambda ids, m: local_ids_xla(ids, m, **layer.window),
            in_axes=(0, of_map),
            axis_size=size,
        )(ids, a.expert_map)
        example = jnp.arange(size, dtype=jnp.int32)[:, None, None] if batched else jnp.int32(0)
        blocks = size if batched else 1
        # Groups in the order (local // per_block, example, local % per_block).
        group = (local // per_block * blocks + example) * per_block + local % per_block
        ids = jnp.where(local < num_local, group, -1)
        a = a._replace(expert_map=None)
        groups = blocks * num_local
        layer = layer.replace(num_experts=groups, num_local_experts=groups, expert_offset=0)
    of_token = {"x", "weights", "residual"} | ({"x_scales"} if layer.format.token_scales else set())

    def merged(name: str, x: Any) -> Any:
        if x is None:
            return None
        if name == "expert_ids":
            return merge(ids, 0, size)
        owner = "w_gate_up" if name in _FIRST else "w_down" if name in _SECOND else ""
        if name in of_token or owner in moves:
            return merge(x, 0 if name in moves else None, size)
        return x

    return Operands(*map(merged, Operands._fields, a)), layer


def _scales_fold(args: Operands, dims: Operands, layer: Layer) -> bool:
    """Whether all examples together have the scales that each has by itself."""
    format = layer.format
    if dims.x_scale is not None or dims.h_scale is not None:
        return False
    if dims.x_scales is not None and format.token_scales == "":
        return False
    if not format.one_token_scale:
        return True
    of_x = args.x_scales is not None or args.x_scale is not None
    return args.h_scale is not None and of_x and bool(args.x.size)


def merge(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    """[V,A,...] -> [V*A,...], an array that is not batched being repeated."""
    a = _primitive.move_batch_to_front(a, dim, size)
    return a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])


def unfold_rows(rows: jax.Array, slot_to_row: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Gives each example its own of the rows [V*R,H] in the order of all: [V,R,H], [V,T,K].

    The slots of one example stand in the order of all as they do in its own.
    """
    num_rows, top_k = slot_to_row.size // size, slot_to_row.shape[1]
    nowhere = jnp.iinfo(jnp.int32).max
    place = jnp.where(slot_to_row < 0, nowhere, slot_to_row).reshape(size, num_rows)
    example, row = (jax.lax.broadcasted_iota(jnp.int32, place.shape, axis) for axis in (0, 1))
    place, slot = jax.lax.sort((place, row), dimension=1, num_keys=1, is_stable=True)
    named = place < nowhere
    own = jnp.zeros_like(row).at[example, slot].set(jnp.where(named, row, -1), unique_indices=True)
    source = jnp.where(named, place, -1).reshape(-1)
    # For the transpose of permute: the row of each example's own that a row of all becomes.
    becomes = jnp.full_like(source, -1).at[place.reshape(-1)]
    becomes = becomes.set(jnp.arange(source.size, dtype=jnp.int32), mode="drop")
    (rows,) = permute_p(rows, source, becomes[:, None])
    shape = (size, num_rows // max(top_k, 1), top_k)
    return rows.reshape(size, num_rows, rows.shape[1]), own.reshape(shape)
