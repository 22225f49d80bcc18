"""The weight gradient of a grouped product, by itself or added to a gradient that there is."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import PLAIN
from jaxmoe._gemm.dtypes import check_precision, element_type
from jaxmoe._gemm.op import tgmm
from jaxmoe._jax import checks as _checks
from jaxmoe.grouped_gemm import check_group_sizes, check_num_rows, window
from jaxmoe.quantize import WEIGHT_LAYOUTS

_OP = "grouped_gemm_weight_grad"


@_checks.array_likes
def grouped_gemm_weight_grad(
    lhs: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    accumulate_into: jax.Array | None = None,
    weight_layout: str = "kn",
    group_offset: Any = None,
    num_groups: int | None = None,
) -> jax.Array:
    """Returns the gradient of `rhs` of `jaxmoe.grouped_gemm`, added to `accumulate_into`.

    dw[e] = accumulate_into[e] + sum over group_offsets[e] <= r < group_offsets[e + 1]
            of outer(lhs[r], dy[r])

    where group_offsets is the exclusive cumulative sum of group_sizes.

    Args:
      lhs: [R, K] bfloat16, float16 or float32. Rows in group order.
      dy: [R, N], the cotangent of the product, in the dtype of `lhs`.
      group_sizes: [E] integers. Rows past the sum are in no group; negative sizes count as 0 and
        rows past R as absent.
      precision: of float32 factors, as in `jax.lax.dot`; `jax.default_matmul_precision` by default.
        On CUDA "highest" is six products of their bf16 parts, all others three.
      preferred_element_type: dtype of the result; that of `accumulate_into`, or of `lhs`, by
        default. Float32 is not rounded.
      accumulate_into: [E, K, N] (or [E, N, K]) in the dtype of the result: a gradient to add to.
        On CUDA the result takes its memory, if nothing else uses it: in a loop, a carry; as an
        argument of a jitted function, one that is donated. Not under `vmap`.
      weight_layout: "kn" for a result [E, K, N], "nk" for [E, N, K].
      group_offset: scalar or [1] integer, the group that dw[0] belongs to; 0 by default.
      num_groups: E of the result, with `group_offset`; as many as `group_sizes` by default. Groups
        that do not exist have no rows.

    Returns:
      [E, K, N], or [E, N, K].

    Raises:
      TypeError: a dtype differs or is no floating type.
      ValueError: shapes disagree, or no such layout.
      NotImplementedError: (on CUDA) a dtype or row length without a kernel.

    Numerics: float32 accumulation, `accumulate_into` included, and one rounding to the result's
      dtype. Groups without rows are exactly `accumulate_into`, or 0. Bitwise repeatable.
    Sharding: K, N or E may be split; the result is where `accumulate_into` is, which is not moved.
      Rows of one list of groups belong to one device.
    Source: MegaBlocks, https://arxiv.org/abs/2211.15841 (the product with a sparse transpose).

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> lhs, dy, sizes = jnp.ones((3, 2)), jnp.full((3, 1), 2.0), jnp.array([1, 2])
      >>> dw = jaxmoe.grouped_gemm_weight_grad(lhs, dy, sizes)
      >>> dw.tolist()
      [[[2.0], [2.0]], [[4.0], [4.0]]]
      >>> jaxmoe.grouped_gemm_weight_grad(lhs, dy, sizes, accumulate_into=dw).tolist()
      [[[4.0], [4.0]], [[8.0], [8.0]]]
    """
    _check_factors(lhs, dy, group_sizes, weight_layout)
    precision = check_precision(_OP, precision, lhs.dtype, PLAIN)
    dtype = lhs.dtype
    if accumulate_into is not None:
        _checks.check_dtype(_OP, "accumulate_into", accumulate_into, _checks.FLOATS)
        dtype = accumulate_into.dtype
    if preferred_element_type is not None:
        dtype = element_type(_OP, preferred_element_type)
    factors = (lhs, dy) if weight_layout == "kn" else (dy, lhs)
    count = _num_groups(num_groups, group_sizes, group_offset)
    if accumulate_into is not None:
        shape = (count, *(a.shape[1] for a in factors))
        _check_accumulate_into(accumulate_into, shape, dtype, weight_layout)
    starts, sizes = window(_OP, group_sizes, lhs.shape[0], count, group_offset)
    (dw,) = tgmm(
        *(a[None] for a in (*factors, starts, sizes)),
        None if accumulate_into is None else accumulate_into[None],
        weight_shape=(1, count),
        out_dtype=jnp.dtype(dtype),
        precision=precision,
    )
    return dw[0]


def _check_factors(lhs: Any, dy: Any, group_sizes: Any, weight_layout: str) -> None:
    _checks.check_choice(_OP, "weight_layout", weight_layout, WEIGHT_LAYOUTS)
    _checks.check_rank(_OP, "lhs", lhs, "R,K")
    _checks.check_rank(_OP, "dy", dy, "R,N")
    _checks.check_dtype(_OP, "lhs", lhs, _checks.FLOATS)
    _checks.check_same_dtype(_OP, "dy", dy, "lhs", lhs)
    _checks.check_same_dim(_OP, "dy", dy, 0, "lhs", lhs, 0, "R, the rows")
    check_num_rows(_OP, lhs.shape[0], lhs=lhs)
    check_group_sizes(_OP, group_sizes)
    if group_sizes.shape[0] == 0:
        rule = "group_sizes.shape[0]=0 must be at least 1 (num_groups)"
        raise ValueError(_checks.message(_OP, rule, group_sizes=group_sizes))


def _num_groups(num_groups: Any, group_sizes: Any, group_offset: Any) -> int:
    """Returns E of the result."""
    if num_groups is None:
        return group_sizes.shape[0]
    if group_offset is None:
        rule = "num_groups must be None without group_offset"
        raise ValueError(_checks.message(_OP, rule, num_groups=num_groups))
    return _checks.check_int(_OP, "num_groups", num_groups, 1)


def _check_accumulate_into(
    init: Any, shape: tuple[int, ...], dtype: Any, weight_layout: str
) -> None:
    axes = "[E,K,N]" if weight_layout == "kn" else "[E,N,K]"
    _checks.check_shape(_OP, "accumulate_into", init, shape, axes)
    if init.dtype != dtype:
        rule = (
            f"accumulate_into.dtype={_checks.dtype_name(init.dtype)} must equal "
            f"preferred_element_type={_checks.dtype_name(dtype)}"
        )
        raise TypeError(_checks.message(_OP, rule, accumulate_into=init))
