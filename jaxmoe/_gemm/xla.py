"""Grouped matrix products in plain XLA: blocks of rows against the weights of their own group.

The work is that of the rows in use, rounded up to blocks, whatever the number of groups: a loop
whose trip count is data runs over the blocks of all groups, and each step reads one weight matrix.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import PLAIN, Format
from jaxmoe._jax import sizes as _sizes

_BLOCKS = (16, 32, 64, 128)


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a block: the power of two above the mean group, in [16, 128], at most `num_rows`."""
    mean = -(-num_rows // max(num_groups, 1))
    block = next((size for size in _BLOCKS if size >= mean), _BLOCKS[-1])
    return min(block, num_rows)


def with_a_block(a: jax.Array) -> jax.Array:
    """Adds a block of rows where their number is symbolic, so that any block fits."""
    if _sizes.is_known(a.shape[0]):
        return a
    return jnp.concatenate([a, jnp.zeros((_BLOCKS[-1], *a.shape[1:]), a.dtype)])


def gmm_xla(
    x: jax.Array,
    w: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    x_scales: jax.Array | None = None,
    w_scales: jax.Array | None = None,
    *,
    weight_layout: str,
    out_dtype: Any,
    format: Format = PLAIN,
    precision: Any = None,
    **_params: Any,
) -> tuple[jax.Array]:
    """Computes `gmm` (see op.py). Where groups overlap, the one of larger index wins."""
    batch, rows_per_batch, k = x.shape
    num_rows = batch * rows_per_batch
    n = format.weight_shape(w.shape)[3 if weight_layout == "kn" else 2]
    out = jnp.zeros((num_rows, n), out_dtype)
    if out.size and starts.size:
        x, out = with_a_block(x.reshape(num_rows, k)), with_a_block(out)
        count = w.shape[0] * w.shape[1]
        w = w.reshape(count, *w.shape[2:])
        w_scales = None if w_scales is None else w_scales.reshape(count, *w_scales.shape[2:])
        bias = None if bias is None else bias.reshape(count, n)
        if x_scales is not None:
            if format.one_token_scale:
                x_scales = jnp.broadcast_to(x_scales[:, None], (batch, rows_per_batch))
            x_scales = with_a_block(x_scales.reshape(num_rows, *x_scales.shape[2:]))

        def step(out: jax.Array, first: jax.Array, mask: jax.Array, group: jax.Array) -> jax.Array:
            weight = jax.lax.rem(group, jnp.int32(w.shape[0]))
            part: Any = lambda a: jax.lax.dynamic_slice_in_dim(a, first, mask.shape[0])  # noqa: E731
            own: Any = lambda a: jax.lax.dynamic_index_in_dim(a, weight, keepdims=False)  # noqa: E731
            if format.quantized:
                scales = None if x_scales is None else part(x_scales)
                y = format.multiply(part(x), scales, own(w), own(w_scales))
            else:
                y = _dot(part(x), own(w), 1, 0 if weight_layout == "kn" else 1, precision)
            if bias is not None:
                y += own(bias)[None].astype(jnp.float32)
            new = jnp.where(mask[:, None], y.astype(out_dtype), part(out))
            return jax.lax.dynamic_update_slice_in_dim(out, new, first, 0)

        out = for_each_block(rows_per_batch, starts, sizes, step, out)[:num_rows]
    return (out.reshape(batch, rows_per_batch, n),)


def tgmm_xla(
    x: jax.Array,
    dy: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    init: jax.Array | None = None,
    *,
    weight_shape: tuple[int, int],
    out_dtype: Any,
    precision: Any,
) -> tuple[jax.Array]:
    """Computes `tgmm` (see op.py)."""
    batch, rows_per_batch, k = x.shape
    n = dy.shape[2]
    num_weights = weight_shape[0] * weight_shape[1]
    dw = jnp.zeros((num_weights, k, n), jnp.float32)
    if starts.size:
        x = with_a_block(x.reshape(batch * rows_per_batch, k))
        dy = with_a_block(dy.reshape(batch * rows_per_batch, n))

        def step(dw: jax.Array, first: jax.Array, mask: jax.Array, group: jax.Array) -> jax.Array:
            # Both are masked: 0 * NaN of another group's row would be NaN.
            rows, dy_rows = (
                jnp.where(mask[:, None], jax.lax.dynamic_slice_in_dim(a, first, mask.shape[0]), 0)
                for a in (x, dy)
            )
            part = _dot(rows, dy_rows, 0, 0, precision)
            weight = jax.lax.rem(group, jnp.int32(num_weights))
            part += jax.lax.dynamic_index_in_dim(dw, weight, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(dw, part, weight, 0)

        dw = for_each_block(rows_per_batch, starts, sizes, step, dw)
    dw = dw.reshape(*weight_shape, k, n)
    if init is not None:
        dw = dw + init.astype(jnp.float32)
    return (dw.astype(out_dtype),)


def _dot(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int, precision: Any) -> jax.Array:
    """The product of two matrices over those axes, in float32, or int32 of integers."""
    common = _common(a, b)
    sums = jnp.int32 if jnp.issubdtype(common, jnp.integer) else jnp.float32
    return jax.lax.dot_general(
        a.astype(common),
        b.astype(common),
        (((contract_a,), (contract_b,)), ((), ())),
        precision=precision,
        preferred_element_type=sums,
    )


def _common(a: jax.Array, b: jax.Array) -> Any:
    """The dtype that both factors are multiplied in."""
    return a.dtype if a.dtype == b.dtype else jnp.dtype(jnp.float32)


def for_each_block(
    rows_per_batch: int,
    starts: jax.Array,
    sizes: jax.Array,
    step: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
    init: jax.Array,
) -> jax.Array:
    """Runs carry = step(carry, first row, mask of the group's rows, group) over blocks of rows.

    `starts` and `sizes` are [B, G]; any value is safe, because ranges are cut to the batch's rows.
    Arrays that blocks are taken of are `with_a_block`.
    """
    batch, groups = starts.shape
    num_rows, num_groups = batch * rows_per_batch, batch * groups
    if _sizes.is_known(num_rows):
        block = block_rows(num_rows, num_groups)
        return _blocks_of(block, num_rows, rows_per_batch, starts, sizes, step, init)
    mean = jnp.asarray(-(-num_rows // num_groups), jnp.int32)
    chosen = sum((mean > size).astype(jnp.int32) for size in _BLOCKS[:-1])
    all_rows = num_rows + _BLOCKS[-1]

    def of_size(block: int) -> Callable[[jax.Array], jax.Array]:
        return lambda init: _blocks_of(block, all_rows, rows_per_batch, starts, sizes, step, init)

    return jax.lax.switch(chosen, [of_size(block) for block in _BLOCKS], init)


def _blocks_of(
    block: int,
    num_rows: Any,
    rows_per_batch: Any,
    starts: jax.Array,
    sizes: jax.Array,
    step: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
    init: jax.Array,
) -> jax.Array:
    """`for_each_block` in blocks of a size; `num_rows` are those of the arrays."""
    batch = starts.shape[0]
    starts = jnp.clip(starts, 0, rows_per_batch)
    sizes = jnp.clip(sizes, 0, rows_per_batch - starts).reshape(-1)
    starts = (starts + rows_per_batch * jnp.arange(batch, dtype=starts.dtype)[:, None]).reshape(-1)
    blocks = jax.lax.div(sizes + (block - 1), jnp.int32(block))
    last = jnp.cumsum(blocks)
    # Block i of all begins at row i * block + shift of its group: one look-up instead of three.
    shift, ends = starts - (last - blocks) * block, starts + sizes

    def body(i: jax.Array, carry: jax.Array) -> jax.Array:
        group = jnp.sum(last <= i, dtype=jnp.int32)
        row, end = (jax.lax.dynamic_slice(a, (group,), (1,)).reshape(()) for a in (shift, ends))
        row = row + i * block
        first = jnp.minimum(row, num_rows - block)
        rows = first + jnp.arange(block, dtype=jnp.int32)
        mask = (rows >= row) & (rows < end)
        return step(carry, first, mask, group)

    return jax.lax.fori_loop(jnp.int32(0), last[-1], body, init)
