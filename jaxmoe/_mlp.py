"""The primitives of the expert layer: one CUDA call each, or the stages it is made of.

moe_mlp_p: x [T,H], expert_ids [T,K] int32, weights [T,K] f32, w_gate_up [E1,...], w_down [E2,...],
b_gate_up [E1,N] or [0,0], b_down [E2,H] or [0,0], expert_map [num_experts] int32 or [0], residual
[T,H] or [0,0] -> y [T,H]

moe_mlp_rows_p: the same without finalize, so without weights and residual -> rows [R,H] in expert
order, exactly 0 where no slot has them, slot_to_row [T,K] int32

E1 and E2 divide num_local_experts and group g uses weights g mod E1 and g mod E2, so that `vmap`
can turn examples into groups without a copy of weights that are the same for all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmoe import _gmm, _mlp_sharding, _mlp_whole, _primitive, _sharding
from jaxmoe._gate_up import activate, gate_up_p, no_index
from jaxmoe._heuristics import mlp_configs, mlp_index_size
from jaxmoe._mlp_tangent import Residuals, product, tangent_of
from jaxmoe.activation import GATE_UP_ORDERS
from jaxmoe.finalize import finalize, no_residual
from jaxmoe.permute import permute, permute_p
from jaxmoe.plan import Plan, local_ids_xla, no_map, plan


def no_bias(dtype: Any) -> jax.Array:
    """Returns the empty array that stands for "no bias"."""
    return jnp.zeros((0, 0), dtype)


def _plan(
    expert_ids: jax.Array,
    expert_map: jax.Array,
    *,
    num_experts: int,
    num_local_experts: int,
    expert_offset: int,
    **_params: Any,
) -> Plan:
    order = plan(
        expert_ids,
        num_experts,
        expert_offset=expert_offset,
        num_local_experts=num_local_experts,
        expert_map=expert_map if expert_map.size else None,
    )
    return jax.tree.map(lambda index: checkpoint_name(index, "jaxmoe_plan"), order)


def _row_stages(
    x: jax.Array,
    expert_ids: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    b_gate_up: jax.Array,
    b_down: jax.Array,
    expert_map: jax.Array,
    *,
    z_dtype: Any,
    between: Callable[[jax.Array], jax.Array] = jnp.asarray,
    after: Callable[[jax.Array], jax.Array] = jnp.asarray,
    own: Callable[[jax.Array], jax.Array] = jnp.asarray,
    **params: Any,
) -> tuple[jax.Array, Plan]:
    """Composes the layer up to finalize from the other ops.

    `between` is applied to the first product and `after` to the activations; `own` as in `product`.
    """
    order = _plan(expert_ids, expert_map, **params)
    first, second = params["config"] or (None, None)
    multiply = functools.partial(
        product, expert_offsets=order.expert_offsets, weight_layout=params["weight_layout"], own=own
    )
    z = between(multiply(permute(x, order), w_gate_up, b_gate_up, dtype=z_dtype, config=first))
    h = after(activate(z, params["activation"], params["gate_up"]).astype(x.dtype))
    return multiply(h, w_down, b_down, dtype=x.dtype, config=second), order


def _stages(*arrays: jax.Array, **params: Any) -> tuple[jax.Array]:
    rows, order = _rows_and_plan(*_without_finalize(arrays), **params)
    return (_finish(rows, order, arrays[2], arrays[8]),)


def in_parts(*arrays: jax.Array, **params: Any) -> jax.Array:
    """The layer in parts, for devices that exchange something between them."""
    x, ids, weights, *shared, residual = arrays
    rows, order = _row_stages(x, ids, *shared, z_dtype=x.dtype, **params)
    return _finish(rows, order, weights, residual)


def rows_in_parts(*arrays: jax.Array, **params: Any) -> tuple[jax.Array, jax.Array]:
    rows, order = _row_stages(*arrays, z_dtype=arrays[0].dtype, **params)
    return rows, order.slot_to_row


def _finish(rows: jax.Array, order: Plan, weights: jax.Array, residual: jax.Array) -> jax.Array:
    return finalize(rows, order, weights, residual=residual if residual.size else None)


def _rows_and_plan(*arrays: jax.Array, **params: Any) -> tuple[jax.Array, Plan]:
    """As the kernels compute it: the activation sees the first product before it is rounded."""
    return _row_stages(*arrays, z_dtype=jnp.float32, **params)


def _rows_xla(*arrays: jax.Array, **params: Any) -> tuple[jax.Array, jax.Array]:
    rows, order = _rows_and_plan(*arrays, **params)
    return rows, order.slot_to_row


def _without_finalize(args: Any) -> list[Any]:
    """Takes the arguments of `moe_mlp_rows_p` from those of `moe_mlp_p`."""
    return [*args[:2], *args[3:8]]


def _out(x: Any, *_: Any, **_params: Any) -> list[_primitive.Spec]:
    return [(x.shape, x.dtype)]


def _rows_out(x: Any, expert_ids: Any, *_: Any, **_params: Any) -> list[_primitive.Spec]:
    return [((expert_ids.size, x.shape[1]), x.dtype), (expert_ids.shape, jnp.int32)]


def mlp_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """The rule of `moe_mlp_p`; tangents of weights and biases may be float32 on one device."""
    if _sharding.divided_by_xla(primals):
        return moe_mlp_p(*primals, **params), (_tangent(primals, tangents, **params),)
    weights, residual = primals[2], primals[8]
    arrays, moving = _without_finalize(primals), _without_finalize(tangents)
    rows, order, tangent = _linearized(
        arrays, moving, weights, {"weights": tangents[2], "residual": tangents[8]}, params
    )
    return (_finish(rows, order, weights, residual),), (tangent,)


def rows_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """The rule of `moe_mlp_rows_p`; tangents of weights and biases may be float32."""
    weights = jnp.zeros(primals[1].shape, jnp.float32)  # no part of the rows
    rows, order, tangent = _linearized(primals, tangents, weights, None, params)
    return (rows, order.slot_to_row), (tangent, None)


def _linearized(
    arrays: Any, tangents: Any, weights: jax.Array, others: dict[str, Any] | None, params: Any
) -> tuple[jax.Array, Plan, jax.Array | None]:
    """Returns rows, plan, and the tangent of the layer, or of its rows if `others` is None."""
    x, expert_ids, w_gate_up, w_down, b_gate_up, b_down, expert_map = arrays
    order = _plan(expert_ids, expert_map, **params)
    index = order.row_to_token, order.slot_to_row, order.expert_offsets
    shared = {n: params[n] for n in ("activation", "gate_up", "weight_layout")}
    config, _ = _configs(arrays, params)
    if config.gather:
        source = x, *index[:2]
    else:
        source = permute(x, order), *no_index()
    groups = index[2][:-1], jnp.diff(index[2])
    h, z = gate_up_p(*source, w_gate_up, b_gate_up, *groups, config=config, **shared)
    z = checkpoint_name(z, "jaxmoe_z")
    second = (params["config"] or (None, None))[1]
    multiply = functools.partial(product, config=second, dtype=x.dtype)
    rows = multiply(h, w_down, b_down, index[2], weight_layout=params["weight_layout"])
    residuals = Residuals(x, z, weights, w_gate_up, w_down, b_down, *index)
    names = ("x", "", "w_gate_up", "w_down", "b_gate_up", "b_down", "")
    moving = dict(zip(names, tangents, strict=True)) | (others or {})
    return rows, order, tangent_of(residuals, moving, finalized=others is not None, **shared)


def mlp_batch(op: _primitive.Op, args: Any, dims: Any, **params: Any) -> Any:
    """Batches an `op` with the arguments of `moe_mlp_p`: one call where no weights are copied."""
    size = _primitive.batch_size(args, dims)
    folded = _fold(_without_finalize(args), _without_finalize(dims), size, params)
    if folded is None:
        return _primitive.one_by_one(op, args, dims, **params)
    (x, expert_ids, *rest), params = folded
    residual = args[8]
    residual = merge(residual, dims[8], size) if residual.size else no_residual(residual.dtype)
    weights = merge(args[2], dims[2], size)
    (y,) = op(x, expert_ids, weights, *rest, residual, **params)
    return (y.reshape(size, y.shape[0] // size, y.shape[1]),), (0,)


def rows_batch(op: _primitive.Op, args: Any, dims: Any, **params: Any) -> Any:
    """Batches an `op` with the arguments of `moe_mlp_rows_p`."""
    size = _primitive.batch_size(args, dims)
    folded = _fold(args, dims, size, params)
    if folded is None:
        return _primitive.one_by_one(op, args, dims, **params)
    arrays, params = folded
    rows, slot_to_row = op(*arrays, **params)
    return unfold_rows(rows, slot_to_row, size), (0, 0)


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


def _fold(
    args: Any, dims: Any, size: int, params: dict[str, Any]
) -> tuple[list[jax.Array], dict[str, Any]] | None:
    """Makes one layer of a batch: arguments of `moe_mlp_rows_p`; None if that copied weights."""
    args, dims = _drop_empty(args, dims)
    x, expert_ids, w1, w2, b1, b2, expert_map = args
    num_local = params["num_local_experts"]
    counts = [a.shape[1 if d == 0 else 0] for a, d in ((w1, dims[2]), (w2, dims[3]))]
    batched = {n for n, d in zip(counts, dims[2:4], strict=True) if d is not None}
    per_block = min(batched, default=num_local)
    if (
        len(batched) > 1
        or (batched and any(per_block % n for n in counts))
        or any(dims[i + 2] is not None and dims[i] is None for i in (2, 3))
    ):
        return None
    expert_ids = _primitive.move_batch_to_front(expert_ids, dims[1], size)
    if batched or dims[6] is not None:
        window = {k: params[k] for k in ("num_experts", "num_local_experts", "expert_offset")}
        local = jax.vmap(
            lambda ids, m: local_ids_xla(ids, m, **window), in_axes=(0, dims[6]), axis_size=size
        )(expert_ids, expert_map)
        example = jnp.arange(size, dtype=jnp.int32)[:, None, None] if batched else jnp.int32(0)
        blocks = size if batched else 1
        # Groups in the order (local // per_block, example, local % per_block).
        group = (local // per_block * blocks + example) * per_block + local % per_block
        expert_ids = jnp.where(local < num_local, group, -1)
        expert_map = no_map()
        groups = blocks * num_local
        params = params | {"num_experts": groups, "num_local_experts": groups, "expert_offset": 0}
    weights = (
        a if dims[2 + i % 2] is None or not a.size else merge(a, d, size)
        for i, (a, d) in enumerate(zip((w1, w2, b1, b2), dims[2:6], strict=True))
    )
    return [merge(x, dims[0], size), merge(expert_ids, 0, size), *weights, expert_map], params


def merge(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    """[V,A,...] -> [V*A,...], an array that is not batched being repeated."""
    a = _primitive.move_batch_to_front(a, dim, size)
    return a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])


def _drop_empty(args: Any, dims: Any) -> tuple[list[Any], list[int | None]]:
    """Moves batch dimensions to 0 and takes them from the empty arrays that stand for "none"."""
    args = [_primitive.move_batch_to_front(a, d) for a, d in zip(args, dims, strict=True)]
    dims = [None if d is None else 0 for d in dims]
    for i, rank in ((4, 2), (5, 2), (6, 1)):
        if dims[i] is not None and not args[i].size:
            args[i], dims[i] = jnp.zeros((0,) * rank, args[i].dtype), None
    return args, dims


def _configs(avals: Any, params: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the tiles of the two products: the ones asked for, else chosen from the shapes."""
    x, expert_ids, *_ = avals
    chosen = mlp_configs(
        num_rows=expert_ids.size,
        num_experts=params["num_experts"],
        num_local_experts=params["num_local_experts"],
        hidden=x.shape[1],
        intermediate=_intermediate(avals, params),
        gated=params["activation"].gated,
    )
    first, second = params["config"] or (None, None)
    return first or chosen[0], second or chosen[1]


def _intermediate(avals: Any, params: dict[str, Any]) -> int:
    return avals[3].shape[1 if params["weight_layout"] == "kn" else 2]


def _rows_attrs(avals: Any, **params: Any) -> dict[str, Any]:
    activation = params["activation"]
    first, second = _configs(avals, params)
    return {
        "num_experts": params["num_experts"],
        "num_local_experts": params["num_local_experts"],
        "expert_offset": params["expert_offset"],
        "gate_up": GATE_UP_ORDERS.index(params["gate_up"]),
        "weight_layout": _gmm.WEIGHT_LAYOUTS.index(params["weight_layout"]),
        "activation": {"gated": int(activation.gated), **activation.kernel_params()},
        "gemm1": first.attrs(),
        "gemm2": {**second.attrs(), "gather": 0},
    }


def _attrs(avals: Any, **params: Any) -> dict[str, Any]:
    return _rows_attrs(_without_finalize(avals), **params)


def _rows_scratch(avals: Any, **params: Any) -> list[_primitive.Spec]:
    x, expert_ids, *_ = avals
    size = mlp_index_size(expert_ids.size, params["num_local_experts"])
    return [((expert_ids.size, _intermediate(avals, params)), x.dtype), ((size,), jnp.int32)]


def _scratch(avals: Any, **params: Any) -> list[_primitive.Spec]:
    avals = _without_finalize(avals)
    return [_rows_out(*avals)[0], *_rows_scratch(avals, **params)]


def _rows_reason(avals: Any, *, weight_layout: str, **_params: Any) -> str | None:
    x, expert_ids, w_gate_up, w_down, *_ = avals
    op = "moe_mlp"
    return (
        _gmm.dtype_reason(op, x=x, w_gate_up=w_gate_up, w_down=w_down)
        or _gmm.count_reason(op, expert_ids.size, expert_ids=expert_ids)
        or _gmm.row_reason(op, "x", x, 1)
        or _gmm.row_reason(op, "w_down", w_down, 1 if weight_layout == "kn" else 2)
    )


def _reason(avals: Any, **params: Any) -> str | None:
    return _rows_reason(_without_finalize(avals), **params)


def _layer(*arrays: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
    return moe_mlp_p(*arrays, **params)


moe_mlp_p = _primitive.define(
    "jaxmoe_moe_mlp",
    out=_out,
    xla=_stages,
    batch=lambda args, dims, **params: mlp_batch(moe_mlp_p, args, dims, **params),
    jvp=mlp_jvp,
    cuda=_primitive.CudaTarget("jaxmoe_moe_mlp_v1", attrs=_attrs, scratch=_scratch, reason=_reason),
    rule=_mlp_sharding.layer_rule(_layer, in_parts),
)

_tangent = _mlp_whole.derivative("jaxmoe_moe_mlp", _layer, in_parts)

moe_mlp_rows_p = _primitive.define(
    "jaxmoe_moe_mlp_rows",
    out=_rows_out,
    xla=_rows_xla,
    batch=lambda args, dims, **params: rows_batch(moe_mlp_rows_p, args, dims, **params),
    jvp=rows_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_moe_mlp_rows_v1", attrs=_rows_attrs, scratch=_rows_scratch, reason=_rows_reason
    ),
    rule=_mlp_sharding.rows_rule(rows_in_parts),
)
