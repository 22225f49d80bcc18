"""What every public op means: plain jnp, slow, readable in a minute.

Each function takes the arguments of the public op of the same name and computes in `dtype`, float32
unless told otherwise. Tests and benchmarks compare against float32; the same formula in the low
precision gives the error that any implementation may make (see `_testing.assert_close`).
Letters: T tokens, K choices per token, E experts, H hidden, I intermediate, R = T * K rows.
"""

import jax
import jax.numpy as jnp

from jaxmoe.activation import Activation, resolve, split_gate_up


def route(
    logits: jax.Array, *, top_k: int, method: str = "renormalize"
) -> tuple[jax.Array, jax.Array]:
    """Chooses the `top_k` experts of each token. Returns expert_ids [T,K] and weights [T,K]."""
    x = logits.astype(jnp.float32)
    scored = ~jnp.isnan(x)
    experts = jnp.arange(x.shape[1])
    # better[t, e, f]: expert f stands before expert e. The larger logit, then the smaller id.
    larger = x[:, None, :] > x[:, :, None]
    tied = (x[:, None, :] == x[:, :, None]) & (experts[None, None, :] < experts[None, :, None])
    better = (larger | tied | ~scored[:, :, None]) & scored[:, None, :]
    place = jnp.where(scored, better.sum(axis=2), -1)
    chosen = place[:, None, :] == jnp.arange(top_k)[None, :, None]  # [T, K, E]
    found = chosen.any(axis=2)
    expert_ids = jnp.where(found, chosen.argmax(axis=2), -1).astype(jnp.int32)
    # softmax over every expert that has a score, or over the chosen ones only
    among = {"softmax": scored, "renormalize": chosen.any(axis=1)}[method]
    largest = jnp.max(x, axis=1, keepdims=True, where=among, initial=-jnp.inf)
    exp = jnp.where(among, jnp.exp(x - jnp.where(largest == -jnp.inf, 0.0, largest)), 0.0)
    total = exp.sum(axis=1, keepdims=True)
    p = exp / jnp.where(total == 0, 1.0, total)  # nothing but -inf: every weight is 0
    weights = jnp.where(chosen, p[:, None, :], 0.0).sum(axis=2)
    return expert_ids, weights


def local_ids(
    expert_ids: jax.Array,
    num_experts: int,
    expert_offset: int,
    num_local_experts: int,
    expert_map: jax.Array | None,
) -> jax.Array:
    """Turns global expert ids into local ones; -1 where there is no such expert here."""
    exists = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = jnp.where(exists, expert_ids, 0)
    local = ids - expert_offset if expert_map is None else expert_map[ids]
    return jnp.where(exists & (local >= 0) & (local < num_local_experts), local, -1)


def plan(
    expert_ids: jax.Array,
    num_experts: int,
    *,
    expert_offset: int = 0,
    num_local_experts: int | None = None,
    expert_map: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts slots by expert. Returns expert_offsets [E+1], row_to_token [R], slot_to_row [T,K]."""
    num_tokens, top_k = expert_ids.shape
    if num_local_experts is None:
        num_local_experts = num_experts - expert_offset
    local = local_ids(expert_ids, num_experts, expert_offset, num_local_experts, expert_map)
    key = jnp.where(local < 0, num_local_experts, local).reshape(-1)
    slot = jnp.arange(num_tokens * top_k)
    before = (key[None, :] < key[:, None]) | (
        (key[None, :] == key[:, None]) & (slot[None, :] < slot[:, None])
    )
    row = before.sum(axis=1)
    expert_offsets = (key[None, :] < jnp.arange(num_local_experts + 1)[:, None]).sum(axis=1)
    here = key < num_local_experts
    row_to_token = jnp.full(slot.shape, -1).at[row].set(jnp.where(here, slot // max(top_k, 1), -1))
    slot_to_row = jnp.where(here, row, -1).reshape(num_tokens, top_k)
    as_i32 = (a.astype(jnp.int32) for a in (expert_offsets, row_to_token, slot_to_row))
    return tuple(as_i32)  # pyright: ignore[reportReturnType]


def permute(x: jax.Array, row_to_token: jax.Array) -> jax.Array:
    """Copies tokens into rows: rows[r] = x[row_to_token[r]], 0 where there is no such token."""
    exists = (row_to_token >= 0) & (row_to_token < x.shape[0])
    padded = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])
    return padded[jnp.where(exists, row_to_token, x.shape[0])]


def grouped_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    bias: jax.Array | None = None,
    weight_layout: str = "kn",
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Multiplies the rows of each group by its matrix: lhs [R,K], rhs [G,K,N] -> [R,N].

    Rows come in groups of `group_sizes`; matrix g belongs to group `group_offset + g`.
    A negative size counts as 0. Rows of no group, or of a group without a matrix, are 0.
    """
    if weight_layout == "nk":
        rhs = rhs.swapaxes(1, 2)
    ends = jnp.cumsum(jnp.maximum(group_sizes, 0))
    starts = ends - jnp.maximum(group_sizes, 0)
    first = 0 if group_offset is None else group_offset.reshape(())
    row = jnp.arange(lhs.shape[0])
    out = jnp.zeros((lhs.shape[0], rhs.shape[2]), dtype)
    for g in range(rhs.shape[0]):
        exists = (first + g >= 0) & (first + g < group_sizes.shape[0])
        group = jnp.where(exists, first + g, 0)
        mine = exists & (row >= starts[group]) & (row < ends[group])
        y = matmul(lhs, rhs[g], dtype)
        if bias is not None:
            y = y + bias[g][None, :].astype(dtype)
        out = jnp.where(mine[:, None], y, out)
    return out


def finalize(
    rows: jax.Array,
    slot_to_row: jax.Array,
    weights: jax.Array,
    *,
    residual: jax.Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Adds rows up: y[t] = sum_k weights[t,k] * rows[slot_to_row[t,k]] + residual[t]."""
    exists = (slot_to_row >= 0) & (slot_to_row < rows.shape[0])
    y = jnp.zeros((slot_to_row.shape[0], rows.shape[1]), dtype)
    for k in range(slot_to_row.shape[1]):
        row = permute(rows, jnp.where(exists[:, k], slot_to_row[:, k], -1)).astype(dtype)
        y = y + jnp.where(exists[:, k, None], weights[:, k, None].astype(dtype) * row, 0)
    return y if residual is None else y + residual.astype(dtype)


def moe_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    num_experts: int | None = None,
    activation: str | Activation = "swiglu",
    b_gate_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    gate_up: str = "gate_up",
    weight_layout: str = "kn",
    expert_offset: int = 0,
    expert_map: jax.Array | None = None,
    residual: jax.Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Runs every expert on every token and keeps what was routed: [T,H] -> [T,H].

    y[t] = sum_k weights[t,k] * mlp(x[t], expert_ids[t,k]) + residual[t]
    mlp(x, e) = activation(x @ w_gate_up[e] + b_gate_up[e]) @ w_down[e] + b_down[e]

    Experts that are not here (see `local_ids`) contribute 0. `num_experts` is the number of global
    experts: by default those of the map, or the local ones behind the offset.
    """
    act = resolve(activation)
    num_local = w_gate_up.shape[0]
    if num_experts is None:
        num_experts = expert_offset + num_local if expert_map is None else expert_map.shape[0]
    local = local_ids(expert_ids, num_experts, expert_offset, num_local, expert_map)
    y = jnp.zeros(x.shape, dtype)
    for e in range(num_local):
        w1, w2 = w_gate_up[e], w_down[e]
        if weight_layout == "nk":
            w1, w2 = w1.T, w2.T
        h = matmul(x, w1, dtype)
        if b_gate_up is not None:
            h = h + b_gate_up[e][None, :].astype(dtype)
        h = act(*split_gate_up(h, gate_up)) if act.gated else act(h)
        rows = matmul(h, w2, dtype)
        if b_down is not None:
            rows = rows + b_down[e][None, :].astype(dtype)
        routed = local == e  # [T, K]
        weight = jnp.where(routed, weights.astype(dtype), 0).sum(axis=1)
        y = y + jnp.where(routed.any(axis=1)[:, None], weight[:, None] * rows, 0)
    return y if residual is None else y + residual.astype(dtype)


def matmul(a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Multiplies in `dtype`, with nothing faster and less exact (no TF32)."""
    return jnp.matmul(a.astype(dtype), b.astype(dtype), precision=jax.lax.Precision.HIGHEST)
