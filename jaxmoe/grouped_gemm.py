"""Grouped matrix product: each group's rows by that group's matrix, and its transpose."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxmoe._formats import PLAIN, QUANTIZED, Format, Tokens, with_token_array
from jaxmoe._formats.checks import (
    check_accum,
    check_token_array,
    check_tokens,
    check_tokens_are_plain,
    check_weight,
)
from jaxmoe._gemm import dtypes as _dtypes
from jaxmoe._gemm.cuda import MAX_ROWS
from jaxmoe._gemm.gate_up import of_moving
from jaxmoe._gemm.multiply import multiply
from jaxmoe._gemm.tiles import (
    CODED,
    NOT_PROMOTED,
    ONLY_PROMOTED,
    PACKED,
    STEP_K,
    TILES,
    GemmConfig,
    gmm_config,
)
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import sizes as _sizes
from jaxmoe._jax.checks import check_float
from jaxmoe.quantize import WEIGHT_LAYOUTS, QuantizedArray, format_of, quantize_tokens


@_checks.array_likes
def grouped_gemm(
    lhs: jax.Array | QuantizedArray,
    rhs: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: None = None,
    *,
    bias: jax.Array | None = None,
    weight_layout: str = "kn",
    batch_invariant: bool = False,
    accum: str | None = None,
    config: GemmConfig | None = None,
) -> jax.Array:
    """Multiplies each group's rows by that group's matrix.

    out[r] = lhs[r] @ rhs[e] + bias[e]  for group_offsets[e] <= r < group_offsets[e + 1]
    out[r] = 0                          for the rows of no group

    where group_offsets is the exclusive cumulative sum of group_sizes. Takes the place of
    `jax.lax.ragged_dot`, whose positional arguments it has.

    Args:
      lhs: [R, K] bfloat16, float16, float32, or int8, uint8, int4, uint4, bool, int16, int32 (the
        last two beside integers not on CUDA). Rows already in group order.
      rhs: [E, K, N] (or [E, N, K], see `weight_layout`) in one of these dtypes. Or a
        `QuantizedArray` of that layout; `lhs` is then quantized by `jaxmoe.quantize_tokens` in its
        format, unless it is a `QuantizedArray` already.
      group_sizes: [E] integers, or more of them than E with `group_offset`. Rows past the sum are
        in no group; negative sizes count as 0 and rows past R as absent.
      precision: of float32 factors, as in `jax.lax.dot`; `jax.default_matmul_precision` by default.
        On CUDA three products of their bf16 parts, unless it is "highest", which is six, or
        "tensorfloat32" (or its `jax.lax.DotAlgorithmPreset`), which is TF32 with layout "nk".
      preferred_element_type: dtype of the result: a floating one, int32 if both factors are
        integers, or the default, which is what `jax.lax.dot` has: that of both factors if it is
        one, the floating one of two, float32 of float32 and a narrower one, int8 of int8 and uint8.
      group_offset: scalar or [1] integer, the group that rhs[0] belongs to; 0 by default. Rows of
        groups outside [group_offset, group_offset + E) are in no group.
      out_sharding: only None: use `jax.shard_map`.
      bias: [E, N], the dtype that is multiplied in. Added in the accumulator's dtype. Not with
        integers.
      weight_layout: "kn" for rhs [E, K, N], "nk" for rhs [E, N, K].
      batch_invariant: the k loop is not split, so that a row's bits are the same in every batch; up
        to 10 % slower with few rows. Under vmap the tile is that of one example.
      accum: "fast" or "promoted" sums with a quantized `rhs`, as in `jaxmoe.Experts`.
      config: tile of the CUDA kernel; chosen from the shapes by default, and for a symbolic R
        (`jax.export`) that for many rows, which is right for any.

    Returns:
      [R, N].

    Raises:
      TypeError: a dtype that is not listed.
      ValueError: shapes disagree, or no such layout.
      NotImplementedError: out_sharding, FP8 without scales, (on CUDA) a dtype or row length without
        a kernel, or a derivative with respect to what is quantized.

    Numerics: float32 accumulation, one rounding to the result's dtype. Bitwise repeatable. Factors
      of two dtypes are converted to one that holds both exactly: integers to the floating one,
      which is what CUDA's kernels multiply too, bfloat16 or float16 to float32, to which int16 and
      int32 beside a float are converted as well (int32 is rounded). Sums of integers are int32,
      exact modulo 2^32, and are converted once; CUDA multiplies those of 8 bits in bf16. The
      gradient of `rhs` for a group without rows is exactly 0. With a quantized `rhs` derivatives
      are those of the product with `jaxmoe.dequantize` of it, in the dtype of `lhs`.
    Sharding: N, E and K may be split over Auto and Explicit mesh axes; for E and K, devices add up
      parts rounded to the dtype of the result. R may not: a list of groups is one device's.
    Source: jax.lax.ragged_dot; MegaBlocks, https://arxiv.org/abs/2211.15841.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> lhs, rhs = jnp.ones((3, 2)), jnp.array([[[1.0], [1.0]], [[10.0], [10.0]]])
      >>> jaxmoe.grouped_gemm(lhs, rhs, jnp.array([1, 1])).tolist()
      [[2.0], [20.0], [0.0]]
    """
    op = "grouped_gemm"
    if out_sharding is not None:
        rule = "out_sharding must be None; shard with jax.shard_map around the call"
        raise NotImplementedError(_checks.message(op, rule, out_sharding=out_sharding))
    _checks.check_choice(op, "weight_layout", weight_layout, WEIGHT_LAYOUTS)
    format = _check_factors(lhs, rhs, weight_layout)
    given = lhs.dtype, lhs.dtype
    if not isinstance(rhs, QuantizedArray):
        given = lhs.dtype, rhs.dtype
        lhs, rhs = _dtypes.factors(op, lhs, rhs)
    if rhs.shape[0] == 0:
        rule = "rhs.shape[0]=0 must be at least 1 (num_groups)"
        raise ValueError(_checks.message(op, rule, rhs=rhs))
    k_axis = 1 if weight_layout == "kn" else 2
    _checks.check_same_dim(op, "rhs", rhs, k_axis, "lhs", lhs, 1, "K, the contracted axis")
    check_accum(op, accum, format)
    promoted = format.sums(accum, lhs.shape[1])
    out_dtype = _dtypes.of_result(op, given, preferred_element_type)
    check_config(
        op,
        "config",
        config,
        lhs.shape[1],
        promoted=promoted,
        packed=format.packed,
    )
    refuse_one_kernel(op, "config", config)
    if type(batch_invariant) is not bool:
        rule = "batch_invariant must be a bool"
        raise TypeError(_checks.message(op, rule, batch_invariant=batch_invariant))
    if batch_invariant:
        if format.one_token_scale and not isinstance(lhs, QuantizedArray):
            rule = (
                f"batch_invariant=True needs a quantized lhs with rhs in {format.name}: its scale "
                f"is made of all rows; give jaxmoe.quantize_tokens(lhs, {format.name!r}, scale=...)"
            )
            raise ValueError(_checks.message(op, rule, lhs=lhs, rhs=rhs))
        chosen = gmm_config(
            *(lhs.shape[0], rhs.shape[0], lhs.shape[1], rhs.shape[3 - k_axis]),
            promoted=promoted,
            packed=format.packed,
        )
        config = whole_k(op, "config", config, chosen)
    precision = _dtypes.check_precision(op, precision, lhs.dtype, format)
    check_num_rows(op, lhs.shape[0], lhs=lhs)
    if bias is not None:
        _checks.check_rank(op, "bias", bias, "E,N")
        _dtypes.check_bias(op, bias, lhs)
        _checks.check_same_dim(op, "bias", bias, 0, "rhs", rhs, 0, "num_groups")
        _checks.check_same_dim(op, "bias", bias, 1, "rhs", rhs, 3 - k_axis, "N")
    starts, sizes = _groups(lhs, rhs, group_sizes, group_offset)
    w: Any = rhs
    dtype, scales = lhs.dtype, None
    if isinstance(rhs, QuantizedArray):
        w, scales, weight_layout = rhs.values, rhs.scales, "nk"
    params: dict[str, Any] = {
        "weight_layout": weight_layout,
        "dtype": dtype,
        "out_dtype": out_dtype,
        "precision": precision,
        "promoted": promoted,
        "config": config,
    }
    rest = (w, scales, bias, starts, sizes)
    if isinstance(lhs, QuantizedArray):
        tokens = format.given_tokens(lhs.values, lhs.scales, dtype)
        return multiply(tokens, *rest, format=format, **params)
    if format.quantizes_tokens:
        return _quantizing(lhs, *rest, format=format, **params)
    return multiply(Tokens(lhs, None), *rest, format=format, **params)


def _quantizing(*arrays: Any, format: Format, **params: Any) -> jax.Array:
    """The product of rows that are quantized here; its derivative is that of the rows given."""

    def of_rows(lhs: jax.Array, *rest: Any) -> jax.Array:
        plain = params | {"promoted": None, "config": None}
        return multiply(Tokens(lhs, None), *rest, format=format.dequantizing(), **plain)

    @jax.custom_jvp
    def value(lhs: jax.Array, *rest: Any) -> jax.Array:
        q = quantize_tokens(lhs, format.name)
        return multiply(Tokens(q.values, q.scales), *rest, format=format, **params)

    def value_and_tangent(primals: Any, tangents: Any) -> Any:
        moving = [None if t is None or isinstance(t, SymbolicZero) else t for t in tangents]
        _, moved = jax.jvp(*of_moving(of_rows, primals, moving))
        return value(*primals), moved

    value.defjvp(value_and_tangent, symbolic_zeros=True)
    return value(*arrays)


def _check_factors(lhs: Any, rhs: Any, layout: str) -> Format:
    """Checks kind, rank and dtype of the factors. Returns the format of `rhs`."""
    op = "grouped_gemm"
    if isinstance(lhs, QuantizedArray):
        check_tokens(op, "lhs", lhs)
    else:
        _checks.check_rank(op, "lhs", lhs, "R,K")
    if isinstance(rhs, QuantizedArray):
        check_weight(op, "rhs", rhs, layout)
        if not isinstance(lhs, QuantizedArray):
            check_float(op, "lhs", lhs)
            return format_of(rhs)
        format = with_token_array(format_of(rhs), lhs.format)
        check_token_array(op, "lhs", lhs, "rhs", rhs, format)
        if refused := format.refused_input(lhs.dtype):
            raise NotImplementedError(_checks.message(op, f"lhs.{refused}", lhs=lhs))
        return format
    check_tokens_are_plain(op, "lhs", lhs, "rhs")
    _checks.check_rank(op, "rhs", rhs, "E,K,N" if layout == "kn" else "E,N,K")
    return PLAIN


def _groups(
    lhs: Any, rhs: Any, group_sizes: jax.Array, group_offset: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the first row and the number of rows of each group of `rhs`."""
    op = "grouped_gemm"
    check_group_sizes(op, group_sizes)
    num_groups = rhs.shape[0]
    if group_offset is None:
        _checks.check_same_dim(
            op, "group_sizes", group_sizes, 0, "rhs", rhs, 0, "num_groups, without group_offset"
        )
    elif group_sizes.shape[0] < num_groups:
        rule = (
            f"group_sizes.shape[0]={group_sizes.shape[0]} must be at least "
            f"rhs.shape[0]={num_groups} (num_groups)"
        )
        raise ValueError(_checks.message(op, rule, group_sizes=group_sizes, rhs=rhs))
    return window(op, group_sizes, lhs.shape[0], num_groups, group_offset)


def window(
    op: str, group_sizes: Any, num_rows: Any, num_groups: int, group_offset: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns first row and number of rows of the groups from `group_offset` on, None for all."""
    starts, sizes = ranges(group_sizes, num_rows)
    if group_offset is None:
        return starts, sizes
    group = _first_group(op, group_offset, num_groups, sizes.shape[0])
    group = group + jnp.arange(num_groups, dtype=jnp.int32)
    exists = (group >= 0) & (group < sizes.shape[0])
    group = jnp.where(exists, group, 0)
    return starts[group], jnp.where(exists, sizes[group], 0)


def check_group_sizes(op: str, group_sizes: Any) -> None:
    """Refuses anything but a list of integers."""
    _checks.check_rank(op, "group_sizes", group_sizes, "E")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        rule = f"group_sizes.dtype={_checks.dtype_name(group_sizes.dtype)} must be an integer type"
        raise TypeError(_checks.message(op, rule, group_sizes=group_sizes))


def ranges(group_sizes: Any, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns start and size, int32, of ranges of [0, num_rows) that follow each other.

    Exact for any integers: negative sizes count as 0, and rows past `num_rows` as absent.
    """
    sizes = clip_sizes(group_sizes, 0, num_rows)
    rows = jnp.asarray(num_rows, jnp.int32)
    if _sizes.is_known(num_rows) and sizes.size * num_rows <= np.iinfo(np.int32).max:
        ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    else:  # the sum may not fit: a + b without a step past num_rows, which is associative too
        ends = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, rows - a), sizes)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    return starts, ends - starts


def clip_sizes(x: Any, low: int, high: int) -> jax.Array:
    """Cuts integers of any type to [low, high] before they become int32."""
    info = jnp.iinfo(x.dtype)
    xp = jnp if isinstance(x, jax.Array) else np  # jnp would first wrap NumPy's int64 around
    most = high if _sizes.is_known(high) else np.iinfo(np.int32).max
    cut = xp.clip(x, max(low, int(info.min)), min(int(most), int(info.max)))
    cut = jnp.asarray(cut.astype(jnp.int32))
    return cut if _sizes.is_known(high) else jnp.minimum(cut, jnp.asarray(high, jnp.int32))


def _first_group(op: str, group_offset: Any, num_groups: int, num_sizes: int) -> jax.Array:
    """Returns group_offset as int32 [1]; offsets that leave no group all count the same."""
    offset = group_offset
    if isinstance(offset, int) and not isinstance(offset, bool):
        offset = max(-num_groups, min(offset, num_sizes))
    offset = offset if isinstance(offset, jax.Array | np.ndarray) else np.array(offset)
    is_integer = offset.dtype.kind not in "OSU" and jnp.issubdtype(offset.dtype, jnp.integer)
    if not is_integer or offset.size != 1 or offset.ndim > 1:
        rule = "group_offset must be one integer (a scalar or an array of shape [1])"
        raise TypeError(_checks.message(op, rule, group_offset=group_offset))
    return clip_sizes(offset, -num_groups, num_sizes).reshape(1)


def check_num_rows(op: str, num_rows: int, **arrays: Any) -> None:
    """Refuses more rows than int32 can count."""
    if _sizes.exceeds(num_rows, MAX_ROWS):
        rule = f"{num_rows} rows must be at most {MAX_ROWS}"
        raise ValueError(_checks.message(op, rule, **arrays))


def check_config(
    op: str,
    name: str,
    config: Any,
    k: int,
    *,
    promoted: bool | None = None,
    packed: bool = False,
    coded: bool = False,
) -> None:
    """Refuses anything but None or a `GemmConfig` that products over `k` elements can have.

    `promoted` says whether the sums of an FP8 product are promoted; None: elements of 2 bytes.
    `packed`: whether weights are packed, `coded` whether their codes may be multiplied as they are.
    """
    if config is None:
        return
    if not isinstance(config, GemmConfig):
        raise TypeError(_checks.message(op, f"{name} must be a GemmConfig", **{name: config}))
    least = STEP_K * (1 if promoted is None else 2) * (config.split_k - 1)
    if k <= least:
        rule = (
            f"{name}.split_k={config.split_k} needs a product over more than {least} elements, "
            f"not {k}"
        )
        raise ValueError(_checks.message(op, rule, **{name: config}))
    if packed and config.tile not in (tiles := {**PACKED, **(CODED if coded else {})}):
        allowed = ", ".join(map(str, sorted(tiles)))
        rule = f"{name}: the tile {config.tile} must be one of {allowed} with packed weights"
        raise ValueError(_checks.message(op, rule, **{name: config}))
    if not packed and config.tile not in TILES:
        rule = f"{name}: the tile {config.tile} is for packed weights"
        raise ValueError(_checks.message(op, rule, **{name: config}))
    if config.tile in ONLY_PROMOTED and not promoted and not packed:
        rule = (
            f"{name}: the tile {config.tile} is for FP8 sums that are promoted, as those of "
            f"{_always_promoted()}, with accum='promoted', and by default of more than 2048 "
            "elements are"
        )
        raise ValueError(_checks.message(op, rule, **{name: config}))
    if promoted and config.tile in NOT_PROMOTED:
        rule = (
            f"{name}: no kernel of the tile {config.tile} promotes its sums, as "
            f"{_always_promoted()}, accum='promoted', and by default more than 2048 elements do"
        )
        raise ValueError(_checks.message(op, rule, **{name: config}))


def refuse_one_kernel(op: str, name: str, config: GemmConfig | None) -> None:
    """Refuses a kernel that goes on with another product where there is none."""
    if config is not None and config.one_kernel:
        rule = f"{name}.one_kernel must be False: it is for moe_mlp and expert_rows"
        raise ValueError(_checks.message(op, rule, **{name: config}))


def _always_promoted() -> str:
    """Names the formats whose sums are promoted whatever `accum` and K are."""
    return ", ".join(name for name, format in QUANTIZED.items() if format.sums(None, 1))


def whole_k(op: str, name: str, config: GemmConfig | None, chosen: GemmConfig) -> GemmConfig:
    """Returns the tile asked for, which must not split the k loop, or the one chosen, unsplit."""
    if config is None:
        return dataclasses.replace(chosen, split_k=1)
    if config.split_k > 1:
        rule = f"{name}.split_k={config.split_k} must be 1 if batch_invariant=True"
        raise ValueError(_checks.message(op, rule, **{name: config}))
    return config
