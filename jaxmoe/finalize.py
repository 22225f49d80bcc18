"""Finalize: rows in expert order back to tokens, weighted and added up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import _saved
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sharding as _sharding
from jaxmoe.permute import check_plan, permute_p, permute_xla, shift_indices
from jaxmoe.plan import Plan


@_saved.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Rows of `jaxmoe.expert_rows`, for `finalize` to add up. A pytree; R = T * K.

    `jaxmoe.finalize(out.rows, out, out.weights)` is the result of `jaxmoe.moe_mlp`, bit by bit (of
    one token with packed weights: where both have `batch_invariant` or a `config`).

    Attributes:
      rows: [R, H], the experts' outputs in expert order, bias added, not weighted; exactly 0 where
        no slot has its row.
      weights: [T, K] float32, the factor of each slot.
      slot_to_row: [T, K] int32, the row of each choice of each token; -1 if not local.
    """

    rows: jax.Array
    weights: jax.Array
    slot_to_row: jax.Array


@_checks.array_likes
def finalize(
    rows: jax.Array,
    plan: Plan | ExpertRows,
    weights: jax.Array,
    *,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Adds up the weighted rows of each token.

    y[t] = sum over k of weights[t,k] * rows[slot_to_row[t,k]], plus residual[t]

    Choices without a row (slot_to_row outside [0, R)) are left out, whatever their weight.

    Args:
      rows: [R, H] bfloat16, float16 or float32, in expert order.
      plan: the order, from `jaxmoe.plan`, or the `ExpertRows` that `rows` are from; R = T * K.
      weights: [T, K] float32. T stands for one axis of tokens or, as in `ExpertRows`, several.
      residual: [T, H] in the dtype of `rows`, added last; None for nothing.

    Returns:
      [T, H] in the dtype of `rows`.

    Raises:
      TypeError: another dtype, or `plan` is neither a `Plan` nor `ExpertRows`.
      ValueError: shapes disagree.

    Numerics: float32 sum in k order, k = 0 first and the residual last, one rounding. Bitwise
      repeatable. NaN and infinity stay in the tokens whose rows hold them.
    Sharding: H may be split, and T of the slots, weights and result; R may not.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> plan = jaxmoe.plan(jnp.array([[1, 0]], jnp.int32), num_experts=2)
      >>> rows = jnp.array([[1.0], [10.0]])  # of expert 0 and of expert 1
      >>> jaxmoe.finalize(rows, plan, jnp.array([[0.5, 2.0]])).tolist()
      [[7.0]]
    """
    _checks.check_rank("finalize", "rows", rows, "R,H")
    _checks.check_dtype("finalize", "rows", rows, _checks.FLOATS)
    if not isinstance(plan, ExpertRows):
        check_plan("finalize", plan)
    slots = plan.slot_to_row
    lead = _leading.of_tokens("finalize", weights)
    if lead is not None:
        slots, weights = lead.flat("plan.slot_to_row", slots), lead.flat("weights", weights)
        residual = lead.flat("residual", residual)
    _checks.check_rank("finalize", "plan.slot_to_row", slots, "T,K")
    _checks.check_dtype("finalize", "plan.slot_to_row", slots, ("int32",))
    if rows.shape[0] != slots.size:
        rule = f"rows.shape[0]={rows.shape[0]} must equal T * K of plan.slot_to_row, {slots.size}"
        raise ValueError(_checks.message("finalize", rule, rows=rows, slot_to_row=slots))
    _checks.check_rank("finalize", "weights", weights, "T,K")
    _checks.check_dtype("finalize", "weights", weights, ("float32",))
    for axis, meaning in ((0, "num_tokens"), (1, "top_k")):
        _checks.check_same_dim(
            "finalize", "weights", weights, axis, "plan.slot_to_row", slots, axis, meaning
        )
    if residual is not None:
        _checks.check_rank("finalize", "residual", residual, "T,H")
        _checks.check_same_dtype("finalize", "residual", residual, "rows", rows)
        _checks.check_same_dim(
            "finalize", "residual", residual, 0, "plan.slot_to_row", slots, 0, "num_tokens"
        )
        _checks.check_same_dim("finalize", "residual", residual, 1, "rows", rows, 1, "hidden")
    (y,) = _finalize(rows, slots, weights, residual, shared=False)
    return y if lead is None else lead.unflat(y)


def sum_rows(
    rows: jax.Array, slot_to_row: jax.Array, residual: jax.Array | None = None
) -> jax.Array:
    """Adds up the rows of each token unweighted: the transpose of permute."""
    weights = jnp.ones_like(slot_to_row, jnp.float32)
    (y,) = _finalize(rows, slot_to_row, weights, residual, shared=False)
    return y


def finalize_xla(
    rows: jax.Array, slot_to_row: jax.Array, weights: jax.Array, residual: jax.Array | None = None
) -> jax.Array:
    """Computes `finalize` in plain jnp, binding no primitive."""
    num_tokens, top_k = slot_to_row.shape

    def term(slots: jax.Array, weight: jax.Array) -> jax.Array:
        exists = (slots >= 0) & (slots < rows.shape[0])
        row = permute_xla(rows, slots).astype(jnp.float32)
        return jnp.where(exists, weight, 0.0)[:, None] * row

    if top_k:
        y = term(slot_to_row[:, 0], weights[:, 0])
        later = (slot_to_row[:, 1:].T, weights[:, 1:].T)
        y, _ = jax.lax.scan(lambda y, kth: (y + term(*kth), None), y, later, unroll=8)
    else:
        y = jnp.zeros((num_tokens, rows.shape[1]), jnp.float32)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return y.astype(rows.dtype)


def _out(
    rows: Any, slot_to_row: Any, _weights: Any, _residual: Any, **_params: Any
) -> list[_primitive.Spec]:
    return [((slot_to_row.shape[0], rows.shape[1]), rows.dtype)]


def _batch(args: Any, dims: Any, *, shared: bool) -> Any:
    size = _primitive.batch_size(args, dims)
    rows = _primitive.move_batch_to_front(args.rows, dims.rows)
    slot_to_row = _primitive.move_batch_to_front(args.slot_to_row, dims.slot_to_row, size)
    weights = _primitive.move_batch_to_front(args.weights, dims.weights, size)
    num_rows, hidden = rows.shape[-2:]
    num_tokens, top_k = slot_to_row.shape[1:]
    if dims.rows is not None:
        slot_to_row = shift_indices(slot_to_row, num_rows)
        rows = rows.reshape(size * num_rows, hidden)
    else:
        shared = True
    residual = args.residual
    if residual is not None:
        residual = _primitive.move_batch_to_front(residual, dims.residual, size)
        residual = residual.reshape(size * num_tokens, hidden)
    (y,) = _finalize(
        rows,
        slot_to_row.reshape(size * num_tokens, top_k),
        weights.reshape(size * num_tokens, top_k),
        residual,
        shared=shared,
    )
    return (y.reshape(size, num_tokens, hidden),), (0,)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    rows, slot_to_row, weights, _ = primals
    d_rows, _, d_weights, d_residual = tangents
    outs = _finalize(*primals, **params)
    parts: list[jax.Array] = []
    if d_rows is not None:
        parts += _finalize(d_rows, slot_to_row, weights, d_residual, **params)
    elif d_residual is not None:
        parts.append(d_residual)
    if d_weights is not None:
        parts += _finalize(rows, slot_to_row, d_weights, None, **params)
    return outs, (sum(parts[1:], start=parts[0]) if parts else None,)


def _transpose(cts: Any, args: Any, *, shared: bool) -> Any:
    (ct,) = cts
    rows, slot_to_row, weights, residual = args
    d_rows, d_weights = None, None
    if _primitive.is_linear(rows):
        to_rows = _add_to_shared_rows if shared else _spread_to_rows
        d_rows = to_rows(ct, slot_to_row, weights, rows.aval.shape[0])
    if _primitive.is_linear(weights):
        exists = (slot_to_row >= 0) & (slot_to_row < rows.shape[0])
        row = permute_xla(rows, slot_to_row.reshape(-1)).reshape(*slot_to_row.shape, rows.shape[1])
        dots = jnp.einsum("tkh,th->tk", row, ct, preferred_element_type=jnp.float32)
        # NOTE: select again: NaN in a token's cotangent must not reach a choice without a row.
        d_weights = jnp.where(exists, dots, 0.0)
    return d_rows, None, d_weights, ct if _primitive.is_linear(residual) else None


def _spread_to_rows(
    ct: jax.Array, slot_to_row: jax.Array, weights: jax.Array, num_rows: int
) -> jax.Array:
    """Transposes finalize in `rows` when each row belongs to one slot at most."""
    num_tokens, top_k = slot_to_row.shape
    slot = jnp.arange(num_tokens * top_k, dtype=jnp.int32)
    exists = (slot_to_row >= 0) & (slot_to_row < num_rows)
    target = jnp.where(exists, slot_to_row, num_rows).reshape(-1)
    row_to_slot = jnp.full((num_rows,), -1, jnp.int32).at[target].set(slot, mode="drop")
    used = row_to_slot >= 0
    row_to_token = jnp.where(used, row_to_slot // max(top_k, 1), -1)
    weight = jnp.where(used, weights.reshape(-1)[jnp.where(used, row_to_slot, 0)], 0.0)
    (spread,) = permute_p(ct, row_to_token, slot_to_row)
    return (weight[:, None] * spread.astype(jnp.float32)).astype(ct.dtype)


def _add_to_shared_rows(
    ct: jax.Array, slot_to_row: jax.Array, weights: jax.Array, num_rows: int
) -> jax.Array:
    """Transposes finalize in `rows` when vmap lets several examples share a row."""
    exists = (slot_to_row >= 0) & (slot_to_row < num_rows)
    terms = weights[:, :, None] * ct.astype(jnp.float32)[:, None, :]
    target = jnp.where(exists, slot_to_row, num_rows)
    grad = jnp.zeros((num_rows, ct.shape[1]), jnp.float32).at[target].add(terms, mode="drop")
    return grad.astype(ct.dtype)


_finalize = _primitive.define(
    "jaxmoe_finalize",
    out=_out,
    xla=lambda rows, slot_to_row, weights, residual, **_params: (
        finalize_xla(rows, slot_to_row, weights, residual),
    ),
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    cuda=_primitive.CudaTarget("jaxmoe_finalize_v1", absent={"residual": (2, "rows")}),
    rule=_sharding.independent(
        lambda *arrays, **params: _finalize(*arrays, **params),
        ("finalize", "rows", "plan.slot_to_row", "weights", "residual"),
        "r h, t k, t k, t h -> t h",
        free="th",
        tokens="r",
    ),
)
