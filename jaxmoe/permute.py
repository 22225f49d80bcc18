"""Permute: tokens into rows in expert order."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sharding as _sharding
from jaxmoe._jax import sizes as _sizes
from jaxmoe.plan import Plan


@_checks.array_likes
def permute(x: jax.Array, plan: Plan) -> jax.Array:
    """Copies each token into the rows of its experts.

    rows[r] = x[row_to_token[r]], exactly 0 where row_to_token[r] is outside [0, T)

    Args:
      x: [T, H] bfloat16, float16 or float32.
      plan: the order, from `jaxmoe.plan` of the same T tokens.

    Returns:
      [R, H] in the dtype of `x`, R = T * K.

    Raises:
      TypeError: another dtype, or `plan` is not a `Plan`.
      ValueError: another rank, or a plan of another number of tokens.

    Numerics: copies bits. The gradient adds the rows of a token in float32 in k order and
      rounds once, bitwise repeatable.
    Sharding: H may be split; T may not, see `plan`.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> plan = jaxmoe.plan(jnp.array([[1], [0]], jnp.int32), num_experts=2)
      >>> jaxmoe.permute(jnp.array([[1.0], [2.0]]), plan).tolist()
      [[2.0], [1.0]]
    """
    _checks.check_rank("permute", "x", x, "T,H")
    _checks.check_dtype("permute", "x", x, _checks.FLOATS)
    check_plan("permute", plan)
    slots = plan.slot_to_row
    _checks.check_same_dim("permute", "plan.slot_to_row", slots, 0, "x", x, 0, "num_tokens")
    (rows,) = permute_p(x, plan.row_to_token, slots)
    return rows


def check_plan(op: str, plan: Any) -> None:
    """Checks that `plan` is a `Plan` of one set of tokens."""
    if not isinstance(plan, Plan):
        raise TypeError(_checks.message(op, "plan must be a jaxmoe.Plan", plan=plan))
    for name, axes in (("row_to_token", "R"), ("slot_to_row", "T,K")):
        _checks.check_rank(op, f"plan.{name}", getattr(plan, name), axes)
        _checks.check_dtype(op, f"plan.{name}", getattr(plan, name), ("int32",))
    if plan.row_to_token.size != plan.slot_to_row.size:
        rule = (
            f"plan.row_to_token.shape[0]={plan.row_to_token.size} must equal T * K of slot_to_row"
        )
        got = {"row_to_token": plan.row_to_token, "slot_to_row": plan.slot_to_row}
        raise ValueError(_checks.message(op, rule, **got))


def permute_xla(x: jax.Array, row_to_token: jax.Array) -> jax.Array:
    """Computes `permute` in plain jnp, binding no primitive."""
    if x.shape[0] == 0:  # nothing to read, whatever the indices say
        return jnp.zeros((row_to_token.shape[0], x.shape[1]), x.dtype)
    exists = (row_to_token >= 0) & (row_to_token < x.shape[0])
    rows = _sizes.with_a_row(x).at[jnp.where(exists, row_to_token, 0)].get(mode="promise_in_bounds")
    return jnp.where(exists[:, None], rows, jnp.zeros((), x.dtype))


def shift_indices(index: jax.Array, size: int) -> jax.Array:
    """Turns [V, ...] indices into `size` things each into indices into the V * size of them all.

    Indices outside [0, size) become -1: they must not reach into another example's things.
    """
    example = jnp.arange(index.shape[0], dtype=index.dtype)
    example = example.reshape(-1, *[1] * (index.ndim - 1))
    return jnp.where((index >= 0) & (index < size), index + example * size, -1)


def _copy_bits(x: jax.Array, row_to_token: jax.Array, _slot_to_row: Any) -> tuple[jax.Array]:
    # NOTE: as integers, because XLA's CPU compiler selects bfloat16 by way of float32, which costs
    # time and changes the payload of a NaN.
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"u{x.dtype.itemsize}"))
    return (jax.lax.bitcast_convert_type(permute_xla(bits, row_to_token), x.dtype),)


def _out(x: Any, row_to_token: Any, _slot_to_row: Any) -> list[_primitive.Spec]:
    return [((row_to_token.shape[0], x.shape[1]), x.dtype)]


def _batch(args: Any, dims: Any) -> Any:
    size = _primitive.batch_size(args, dims)
    x = _primitive.move_batch_to_front(args.x, dims.x)
    row_to_token = _primitive.move_batch_to_front(args.row_to_token, dims.row_to_token, size)
    slot_to_row = _primitive.move_batch_to_front(args.slot_to_row, dims.slot_to_row, size)
    num_tokens, hidden = x.shape[-2:]
    num_rows, top_k = row_to_token.shape[1], slot_to_row.shape[2]
    slot_to_row = shift_indices(slot_to_row, num_rows)
    if dims.x is not None:
        row_to_token = shift_indices(row_to_token, num_tokens)
        x = x.reshape(size * num_tokens, hidden)
        slot_to_row = slot_to_row.reshape(size * num_tokens, top_k)
    else:  # one x for all: a token has the rows of every example, as if K were V times as large
        slot_to_row = jnp.moveaxis(slot_to_row, 0, 1).reshape(num_tokens, size * top_k)
    (rows,) = permute_p(x, row_to_token.reshape(size * num_rows), slot_to_row)
    return (rows.reshape(size, num_rows, hidden),), (0,)


def _jvp(primals: Any, tangents: Any) -> Any:
    x, *index = primals
    return permute_p(x, *index), permute_p(tangents.x, *index)


def _transpose(cts: Any, args: Any) -> Any:
    # NOTE: imported late because finalize is the transpose of permute and permute that of finalize.
    from jaxmoe.finalize import sum_rows

    return sum_rows(cts[0], args.slot_to_row), None, None


permute_p = _primitive.define(
    "jaxmoe_permute",
    out=_out,
    xla=_copy_bits,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    cuda=_primitive.CudaTarget("jaxmoe_permute_v2"),
    rule=_sharding.independent(
        lambda *arrays: permute_p(*arrays),
        ("permute", "x", "plan.row_to_token", "plan.slot_to_row"),
        "t h, r, t k -> r h",
        free="h",
        tokens="t",
    ),
)
