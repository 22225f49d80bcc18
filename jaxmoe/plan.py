"""Plan: which row of the expert-ordered arrays belongs to which token and choice."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import max_dim, min_dim

from jaxmoe import _saved
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sharding as _sharding
from jaxmoe._jax import sizes as _sizes

_MOST_EXPERTS = 2**31 - 2  # int32 counts them and one more


@_saved.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """The order of rows by expert. A pytree of index arrays; R = T * K, E local experts.

    Attributes:
      expert_offsets: [E + 1] int32. Expert e owns rows expert_offsets[e] up to, not including,
        expert_offsets[e + 1]; the last entry is the number of rows in use.
      row_to_token: [R] int32, the token of each row; -1 for rows past the last expert.
      slot_to_row: [T, K] int32, the row of each choice of each token; -1 if not local.
    """

    expert_offsets: jax.Array
    row_to_token: jax.Array
    slot_to_row: jax.Array

    @property
    def group_sizes(self) -> jax.Array:
        """[E] int32, the number of rows of each expert."""
        return self.expert_offsets[..., 1:] - self.expert_offsets[..., :-1]


@_checks.array_likes
def plan(
    expert_ids: jax.Array,
    num_experts: int,
    *,
    expert_offset: int = 0,
    num_local_experts: int | None = None,
    expert_map: jax.Array | None = None,
) -> Plan:
    """Orders the T * K choices by expert.

    Rows of one expert are in (token, k) order. The local id of expert i is expert_map[i] if a map
    is given and i - expert_offset otherwise. Choices whose id is below 0 or at least num_experts,
    or whose local id is outside [0, num_local_experts), are in no group.

    Args:
      expert_ids: [T, K] int32, global ids; any value is safe.
      num_experts: number of global experts, at least 1.
      expert_offset: global id of the first local expert. A Python int: under `jax.shard_map`, where
        it depends on the device, give `expert_map`.
      num_local_experts: number of local experts; by default every one from `expert_offset` on, or
        `num_experts` if a map is given.
      expert_map: [num_experts] int32, local id of each global expert; anything outside
        [0, num_local_experts) means "not here".

    Returns:
      `Plan` for num_local_experts experts.

    Raises:
      TypeError: an array is not int32, or a number not a Python int.
      ValueError: a wrong rank or length, a window that does not fit in num_experts, or both an
        offset and a map.

    Numerics: integers, exact; the order is stable and the same in every run and on every device.
    Sharding: tokens of one plan belong to one device: XLA gathers them over Auto axes, Explicit
      axes are refused. Experts are split by the window or the map, examples of `vmap` freely.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> plan = jaxmoe.plan(jnp.array([[1, 0], [1, -1]], jnp.int32), num_experts=3)
      >>> plan.expert_offsets.tolist(), plan.row_to_token.tolist(), plan.slot_to_row.tolist()
      ([0, 1, 3, 3], [0, 0, 1, -1], [[1, 0], [2, -1]])
    """
    _checks.check_rank("plan", "expert_ids", expert_ids, "T,K")
    _checks.check_dtype("plan", "expert_ids", expert_ids, ("int32",))
    num_experts, expert_offset, num_local_experts = check_window(
        "plan", num_experts, expert_offset, num_local_experts, expert_map
    )
    check_rows("plan", expert_ids.size, expert_ids=expert_ids)
    return plan_of(
        expert_ids,
        expert_map,
        num_experts=num_experts,
        expert_offset=expert_offset,
        num_local_experts=num_local_experts,
    )


def plan_of(expert_ids: jax.Array, expert_map: jax.Array | None, **window: int) -> Plan:
    """Computes `plan` of checked arguments."""
    return Plan(*(a[0] for a in _plan(expert_ids[None], expert_map, **window)))


_MAX_ROWS = 2**31 - 1


def check_rows(op: str, rows: int, **got: Any) -> None:
    """Checks that `rows` choices can be counted."""
    if _sizes.exceeds(rows, _MAX_ROWS):
        rule = f"T * K = {rows} must be at most {_MAX_ROWS} (rows are counted in int32)"
        raise ValueError(_checks.message(op, rule, **got))


def check_window(
    op: str,
    num_experts: Any,
    expert_offset: Any,
    num_local_experts: Any,
    expert_map: Any,
    local_name: str = "num_local_experts",
) -> tuple[int, int, int]:
    """Checks which experts are local. Returns (num_experts, expert_offset, num_local_experts)."""
    num_experts = _checks.check_int(op, "num_experts", num_experts, 1, _MOST_EXPERTS)
    hint = "give expert_map if it depends on the device"
    expert_offset = _checks.check_int(op, "expert_offset", expert_offset, 0, num_experts - 1, hint)
    if expert_map is None:
        most = num_experts - expert_offset
    else:
        most = _MOST_EXPERTS
        _checks.check_rank(op, "expert_map", expert_map, "E")
        _checks.check_dtype(op, "expert_map", expert_map, ("int32",))
        _checks.check_dim(op, "expert_map", expert_map, 0, num_experts, "num_experts")
        if expert_offset:
            rule = f"expert_offset={expert_offset} must be 0 if expert_map is given"
            raise ValueError(_checks.message(op, rule, expert_map=expert_map))
    if num_local_experts is None:
        return num_experts, expert_offset, most if expert_map is None else num_experts
    whole = f"num_experts={num_experts}, expert_offset={expert_offset}"
    why = "" if expert_map is not None else whole
    local = _checks.check_int(op, local_name, num_local_experts, 1, most, why)
    return num_experts, expert_offset, local


def plan_scratch_size(batch: int, num_rows: int, num_local_experts: int) -> int:
    """Returns how many int32 of scratch the CUDA kernel needs: `PlanScratchInts` of plan.h.

    Most problems take one kernel and none; larger ones count every expert in every chunk of rows.
    """
    # In terms that hold for a symbolic number of rows too.
    most = 2**18 if num_local_experts <= 1024 else 8192
    has_table = min_dim(max_dim(num_rows - most, 0), 1)
    of_64 = 512 * -(-num_rows // (512 * 64))
    of_128 = 2048 * -(-num_rows // (2048 * 128))
    chunks = -(-num_rows // max_dim(min_dim(of_64, of_128), 1))
    return 1 + has_table * (batch * chunks * num_local_experts - 1)


def plan_xla(
    expert_ids: jax.Array,
    expert_map: jax.Array | None,
    *,
    num_experts: int,
    expert_offset: int,
    num_local_experts: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `plan` of [B,T,K] ids in plain jnp, binding no primitive; one sort of the rows."""
    local = local_ids_xla(
        expert_ids,
        expert_map,
        num_experts=num_experts,
        expert_offset=expert_offset,
        num_local_experts=num_local_experts,
    )
    return jax.vmap(lambda ids: _plan_of_local_ids(ids, num_local_experts))(local)


def local_ids_xla(
    expert_ids: jax.Array,
    expert_map: jax.Array | None,
    *,
    num_experts: int,
    expert_offset: int,
    num_local_experts: int,
) -> jax.Array:
    """Turns global ids into local ones; those of no local expert become num_local_experts."""
    exists = (expert_ids >= 0) & (expert_ids < num_experts)
    # NOTE: select before the arithmetic: an offset subtracted from int32's minimum wraps around.
    ids = jnp.where(exists, expert_ids, 0)
    local = ids - expert_offset if expert_map is None else expert_map[ids]
    here = exists & (local >= 0) & (local < num_local_experts)
    return jnp.where(here, local, num_local_experts)


def _plan_of_local_ids(
    local: jax.Array, num_local_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_tokens, top_k = local.shape
    row = jnp.arange(num_tokens * top_k, dtype=jnp.int32)
    key, slot = jax.lax.sort((local.reshape(-1), row), num_keys=1, is_stable=True)
    experts = jnp.arange(num_local_experts + 1, dtype=jnp.int32)
    if _sizes.is_known(num_tokens):
        expert_offsets = jnp.searchsorted(key, experts).astype(jnp.int32)
    else:  # the steps of a bisection follow from the number of rows
        expert_offsets = jnp.sum(key[None, :] < experts[:, None], axis=1, dtype=jnp.int32)
    here = key < num_local_experts
    row_to_token = jnp.where(here, slot // max(top_k, 1), -1)
    slot_to_row = (
        jnp.zeros_like(row)
        .at[slot]
        .set(jnp.where(here, row, -1), unique_indices=True, mode="promise_in_bounds")
    )
    return expert_offsets, row_to_token, slot_to_row.reshape(num_tokens, top_k)


def _out(
    expert_ids: Any, _expert_map: Any, *, num_local_experts: int, **_params: Any
) -> list[_primitive.Spec]:
    batch, num_tokens, top_k = expert_ids.shape
    return [
        ((batch, num_local_experts + 1), jnp.int32),
        ((batch, num_tokens * top_k), jnp.int32),
        ((batch, num_tokens, top_k), jnp.int32),
    ]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    size = _primitive.batch_size(args, dims)
    expert_ids = _primitive.move_batch_to_front(args.expert_ids, dims.expert_ids, size)
    expert_map = args.expert_map
    if (
        dims.expert_map is not None
    ):  # a map for each example: apply it here, the kernel takes only one
        of_example = functools.partial(local_ids_xla, **params)
        expert_ids = jax.vmap(of_example, (0, dims.expert_map))(expert_ids, expert_map)
        expert_map = None
        params |= {"num_experts": params["num_local_experts"], "expert_offset": 0}
    batch = expert_ids.shape[1]
    expert_ids = expert_ids.reshape(size * batch, *expert_ids.shape[2:])
    outs = _plan(expert_ids, expert_map, **params)
    return tuple(o.reshape(size, batch, *o.shape[1:]) for o in outs), (0, 0, 0)


def _attrs(_avals: Any, *, num_experts: int, expert_offset: int, **_params: Any) -> dict[str, Any]:
    return {"num_experts": num_experts, "expert_offset": expert_offset}


def _scratch(avals: Any, *, num_local_experts: int, **_params: Any) -> list[_primitive.Spec]:
    batch, num_tokens, top_k = avals.expert_ids.shape
    size = plan_scratch_size(batch, num_tokens * top_k, num_local_experts)
    return [((size,), jnp.int32)]


_plan = _primitive.define(
    "jaxmoe_plan",
    out=_out,
    xla=plan_xla,
    batch=_batch,
    cuda=_primitive.CudaTarget(
        "jaxmoe_plan_v1", attrs=_attrs, scratch=_scratch, absent={"expert_map": (1, jnp.int32)}
    ),
    rule=_sharding.independent(
        lambda *arrays, **params: _plan(*arrays, **params),
        ("plan", "expert_ids", "expert_map"),
        "b t k, m -> b f, b r, b t k",
        free="b",
        tokens="t",
    ),
)
