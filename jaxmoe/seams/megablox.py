"""`gmm` and `tgmm` of megablox, as MaxText and JAX's Pallas operations have them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._gemm.dtypes import element_type
from jaxmoe._jax import checks as _checks
from jaxmoe.grouped_gemm import grouped_gemm, window
from jaxmoe.quantize import QuantizedArray
from jaxmoe.seams import _weights
from jaxmoe.weight_grad import grouped_gemm_weight_grad

_QUANTIZE = "give rhs as a jaxmoe.QuantizedArray, or the layer jaxmoe.Experts(forward_format=...)"


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = (128, 128, 128, 128, 128, 128, 128, 128, 128),
    group_offset: jax.Array | None = None,
    existing_out: jax.Array | None = None,
    transpose_rhs: bool = False,
    interpret: bool | None = None,
    lhs_quantize_dtype: Any = None,
    rhs_quantize_dtype: Any = None,
    use_qwix_quantization: bool = False,
    use_tokamax_backend: bool = False,
    weight_gather_axes: Any = None,
    lhs_vma_axes: tuple[str, ...] = (),
    rhs_vma_axes: tuple[str, ...] = (),
    qwix_rule: Any = None,
    use_manual_quantization: bool = False,
    use_gmm_v2: bool = False,
    use_gmm_v2_heuristic_tiling: bool = False,
    partial_sum: jax.Array | None = None,
) -> jax.Array:
    """Multiplies each group's rows by that group's matrix: `jaxmoe.grouped_gemm` as megablox' gmm.

    out[r] = lhs[r] @ rhs[g - group_offset] + partial_sum[r]    for the rows r of a group g of rhs
    out[r] = existing_out[r], or 0                              for other rows

    Args:
      lhs: [R, K] bfloat16, float16 or float32; what `jaxmoe.grouped_gemm` takes.
      rhs: [E, K, N], or [E, N, K] with `transpose_rhs`. Also a `jaxmoe.QuantizedArray`, or an array
        of qwix or aqt beside floating `lhs`, which each call reads as `jaxmoe.seams.qwix.weight`.
      group_sizes: [G] integers, G of E or more.
      preferred_element_type: dtype of the result, float32 by default, whatever `lhs` has.
      tiling: not read: tiles are chosen from the shapes, and results do not depend on them.
      group_offset: [] or [1] integer, the group of rhs[0]; 0 by default.
      existing_out: [R, N] in the dtype of the result.
      transpose_rhs: whether rhs is [E, N, K].
      interpret: not read: there is no Pallas kernel here to interpret.
      lhs_quantize_dtype, rhs_quantize_dtype, qwix_rule: None.
      use_qwix_quantization: False.
      use_tokamax_backend, use_gmm_v2, use_gmm_v2_heuristic_tiling: not read: they choose among
        kernels of one product.
      weight_gather_axes, use_manual_quantization: not read: without quantization they do nothing.
      lhs_vma_axes, rhs_vma_axes: not read: inside `jax.shard_map` results vary as the factors do.
      partial_sum: [R, N], added to the float32 sums before they are rounded.

    Returns:
      [R, N].

    Raises:
      NotImplementedError: an argument above that must be None or False is not.
      TypeError, ValueError: `existing_out` or `partial_sum` of another dtype or shape than the
        result's; and those of `jaxmoe.grouped_gemm`.

    Numerics: those of `jaxmoe.grouped_gemm`. Derivatives are those of the formula, so that of
      `existing_out` is 0 in rows that are not taken from it; megablox passes all of it on. Reverse
      mode alone with a `partial_sum`, and then cotangents are multiplied in the result's dtype.
    Sharding: as `jaxmoe.grouped_gemm`.
    Source: MaxText 0.2.5, maxtext/kernels/megablox/ops.py.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe.seams import megablox
      >>> lhs, rhs = jnp.ones((3, 2)), jnp.array([[[1.0], [1.0]], [[10.0], [10.0]]])
      >>> old = jnp.full((3, 1), 7.0)
      >>> megablox.gmm(lhs, rhs, jnp.array([1, 1]), existing_out=old).tolist()
      [[2.0], [20.0], [7.0]]
    """
    op = "seams.megablox.gmm"
    del tiling, interpret, use_tokamax_backend, use_gmm_v2, use_gmm_v2_heuristic_tiling
    del weight_gather_axes, use_manual_quantization, lhs_vma_axes, rhs_vma_axes
    refused: dict[str, Any] = {
        "lhs_quantize_dtype": lhs_quantize_dtype,
        "rhs_quantize_dtype": rhs_quantize_dtype,
        "qwix_rule": qwix_rule,
        "use_qwix_quantization": use_qwix_quantization or None,
    }
    for name, value in refused.items():
        if value is not None:
            allowed = "False" if name.startswith("use") else "None"
            rule = f"{name} must be {allowed}: this product quantizes nothing; {_QUANTIZE}"
            raise NotImplementedError(_checks.message(op, rule))
    dtype = element_type(op, preferred_element_type)
    layout = "nk" if transpose_rhs else "kn"
    _check_factor(op, "lhs", lhs, "R,K")
    rhs = _weights.read(op, "rhs", rhs, layout, lhs.dtype)
    _check_factor(op, "rhs", rhs, "E,N,K" if transpose_rhs else "E,K,N")
    shape = (lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])
    if existing_out is not None:
        _checks.check_shape(op, "existing_out", existing_out, shape, "[R,N], as the result")
        if existing_out.dtype != dtype:
            rule = (
                f"existing_out.dtype={_checks.dtype_name(existing_out.dtype)} must equal "
                f"preferred_element_type={_checks.dtype_name(dtype)}"
            )
            raise TypeError(_checks.message(op, rule, existing_out=existing_out))
    if group_offset is None and np.shape(group_sizes) > rhs.shape[:1]:  # rhs has the first ones
        group_offset = jnp.int32(0)
    if partial_sum is None:
        product = (lhs, rhs, group_sizes, None, dtype, group_offset)
        out = grouped_gemm(*product, weight_layout=layout)
    else:
        _checks.check_shape(op, "partial_sum", partial_sum, shape, "[R,N], as the result")
        _checks.check_float(op, "partial_sum", partial_sum)
        if isinstance(rhs, QuantizedArray):
            rule = "partial_sum must be None with a quantized rhs; add it to the result"
            raise NotImplementedError(_checks.message(op, rule, rhs=rhs))
        offset = np.int32(0) if group_offset is None else group_offset
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
        out = _added(lhs, rhs, group_sizes, offset, partial_sum, layout, dtype, precision)
    if existing_out is None:
        return out
    inside = _inside(op, lhs.shape[0], rhs.shape[0], group_sizes, group_offset)
    return jnp.where(inside, out, existing_out)


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = (128, 128, 128),
    group_offset: jax.Array | None = None,
    num_actual_groups: int | None = None,
    existing_out: jax.Array | None = None,
    interpret: bool = False,
    varying_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Multiplies rows of a group with rows: `jaxmoe.grouped_gemm_weight_grad` as megablox' tgmm.

    out[e] = lhs[:, rows] @ rhs[rows] + existing_out[e]    rows of the group e + group_offset

    Args:
      lhs: [K, R] bfloat16, float16 or float32: rows are its columns.
      rhs: [R, N] in the dtype of `lhs`.
      group_sizes: [G] integers.
      preferred_element_type: dtype of the result, float32 by default.
      tiling, interpret, varying_axes: not read, as in `gmm`.
      group_offset: [] or [1] integer, the group of out[0]; 0 by default.
      num_actual_groups: E of the result, G by default.
      existing_out: [E, K, N] in the dtype of the result.

    Returns:
      [E, K, N].

    Raises:
      TypeError, ValueError: those of `jaxmoe.grouped_gemm_weight_grad`, which names `lhs` [R, K],
        `dy` for `rhs` and `accumulate_into` for `existing_out`.

    Numerics, Sharding: those of `jaxmoe.grouped_gemm_weight_grad`. Groups without rows are exactly
      `existing_out`, or 0.
    Source: MaxText 0.2.5, maxtext/kernels/megablox/backend.py.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe.seams import megablox
      >>> lhs, rhs = jnp.array([[1.0, 2.0, 3.0]]), jnp.ones((3, 1))
      >>> megablox.tgmm(lhs, rhs, jnp.array([1, 2])).tolist()
      [[[1.0]], [[5.0]]]
    """
    op = "seams.megablox.tgmm"
    del tiling, interpret, varying_axes
    _checks.check_rank(op, "lhs", lhs, "K,R")
    some = group_offset is not None or num_actual_groups is not None
    return grouped_gemm_weight_grad(
        *(jnp.swapaxes(lhs, 0, 1), rhs, group_sizes),
        preferred_element_type=preferred_element_type,
        accumulate_into=existing_out,
        group_offset=(0 if group_offset is None else group_offset) if some else None,
        num_groups=num_actual_groups,
    )


def _check_factor(op: str, name: str, x: Any, axes: str) -> None:
    """Refuses quantized arrays of other libraries, and says what takes their place."""
    if hasattr(x, "qvalue"):
        rule = (
            f"{name} must be an array or a jaxmoe.QuantizedArray: only weights (rhs) are read from "
            "arrays of qwix and aqt"
        )
        raise TypeError(_checks.message(op, rule, **{name: x}))
    if not isinstance(x, QuantizedArray):
        _checks.check_rank(op, name, x, axes)


def _inside(op: str, num_rows: int, num_groups: int, sizes: Any, offset: Any) -> jax.Array:
    """Which rows are in a group of rhs, [R, 1]; groups follow each other."""
    starts, counts = window(op, sizes, num_rows, num_groups, offset)
    first = jnp.min(jnp.where(counts > 0, starts, num_rows))
    row = jnp.arange(num_rows, dtype=jnp.int32)
    return ((row >= first) & (row < jnp.max(starts + counts)))[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _added(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    offset: Any,
    partial_sum: Any,
    layout: str,
    dtype: Any,
    precision: str | None,
) -> jax.Array:
    """The product with a partial sum, rounded once. Its derivative has no float32 cotangents.

    `precision`: JAX's default where `gmm` was called. Rules of derivatives are traced elsewhere.
    """
    with jax.default_matmul_precision(precision):
        z = grouped_gemm(lhs, rhs, sizes, None, jnp.float32, offset, weight_layout=layout)
    inside = _inside("seams.megablox.gmm", lhs.shape[0], rhs.shape[0], sizes, offset)
    return jnp.where(inside, z + partial_sum.astype(jnp.float32), 0).astype(dtype)


def _added_forward(*args: Any) -> Any:
    lhs, rhs, sizes, offset, partial_sum, *_ = args
    return _added(*args), (lhs, rhs, sizes, offset, jnp.zeros((), partial_sum.dtype))


def _added_backward(
    layout: str, dtype: Any, precision: str | None, kept: Any, ct: jax.Array
) -> Any:
    del dtype
    with jax.default_matmul_precision(precision):
        return _gradients(layout, kept, ct)


def _gradients(layout: str, kept: Any, ct: jax.Array) -> Any:
    lhs, rhs, sizes, offset, of_partial_sum = kept
    other = "nk" if layout == "kn" else "kn"
    dlhs: Any = None
    if jnp.issubdtype(lhs.dtype, jnp.floating):
        product = (ct, rhs, sizes, None, lhs.dtype, offset)
        dlhs = grouped_gemm(*product, weight_layout=other)
    drhs: Any = None  # integers have none
    if jnp.issubdtype(rhs.dtype, jnp.floating):
        common = jnp.promote_types(lhs.dtype, ct.dtype)
        drhs = grouped_gemm_weight_grad(
            *(lhs.astype(common), ct.astype(common), sizes),
            preferred_element_type=rhs.dtype,
            weight_layout=layout,
            group_offset=offset,
            num_groups=rhs.shape[0],
        )
    inside = _inside("seams.megablox.gmm", lhs.shape[0], rhs.shape[0], sizes, offset)
    dpartial = jnp.where(inside, ct, 0).astype(of_partial_sum.dtype)
    return dlhs, drhs, None, None, dpartial


_added.defvjp(_added_forward, _added_backward)
