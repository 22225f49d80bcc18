"""The FFI call of grouped products: its operands and attributes, and why CUDA cannot run one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._codes import Choice, choice
from jaxmoe._formats import PLAIN, Format
from jaxmoe._gemm.scratch import gmm_scratch_size
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sizes as _sizes
from jaxmoe.activation import ACTIVATIONS, GATE_UP_ORDERS, Activation

MAX_ROWS = 2**31 - 1  # of all batches: rows are counted in int32
MAX_COLUMNS = MAX_ROWS // 32  # bytes of 16 rows are counted in int32
ROW_BYTES = 16  # what the kernels' loads need rows to be multiples of


def target(rows: str, bias_dtype: str, **functions: Any) -> _primitive.CudaTarget:
    """The FFI call of a grouped product.

    Its operands are x, x_scales, row_index, w, w_scales, bias, starts and sizes, its results out, z
    and scratch. `rows` is the name of row_index; `bias_dtype` says whose dtype an absent bias has.
    """
    return _primitive.CudaTarget(
        "jaxmoe_grouped_gemm_v1",
        operands=("x", "x_scales", rows, "w", "w_scales", "bias", "starts", "sizes"),
        absent={
            "x_scales": (1, jnp.float32),
            rows: (1, jnp.int32),
            "w_scales": (1, jnp.float32),
            "bias": (2, bias_dtype),
        },
        **functions,
    )


def attrs(
    config: Any,
    *,
    layout: str,
    gather: bool = False,
    format: Format = PLAIN,
    promoted: bool | None = None,
    gate_up: str = GATE_UP_ORDERS[0],
    activation: Activation = ACTIVATIONS["identity"],
) -> dict[str, Any]:
    """Attributes of that call."""
    return {
        "layout": choice("layout", layout),
        "format": Choice(format.code, format.name),
        "promoted": int(bool(promoted)),
        "gate_up": choice("gate_up", gate_up),
        "activation": {"gated": int(activation.gated), **activation.kernel_params()},
        # `gather` of the configuration is for the layer: here the operands say it.
        "config": {**config.attrs(), "gather": int(gather)},
    }


def scratch(dtype: Any = None) -> list[_primitive.Spec]:
    """Results of that call after out; z among them, and absent, if a dtype is given."""
    counter: list[_primitive.Spec] = [((gmm_scratch_size(),), jnp.int32)]
    return counter if dtype is None else [((0, 0), dtype), *counter]


def row_reason(op: str, name: str, x: Any, axis: int, itemsize: int | None = None) -> str | None:
    """Says why rows of `x.shape[axis]` elements cannot be moved by the CUDA kernels, or None.

    Rows of `x`, or of an array of as many elements of `itemsize` bytes.
    """
    size, step = x.shape[axis], ROW_BYTES // (itemsize or np.dtype(x.dtype).itemsize)
    if size > MAX_COLUMNS:
        rule = f"{name}.shape[{axis}]={size} must be at most {MAX_COLUMNS} on CUDA"
        return _checks.message(op, rule, **{name: x})
    if size > 0 and size % step == 0:
        return None
    rule = (
        f"{name}.shape[{axis}]={size} must be a positive multiple of {step} on CUDA "
        f"(rows of 16-byte multiples); {_checks.nearest(size, step)}"
    )
    return _checks.message(op, rule, **{name: x})


def count_reason(op: str, num_rows: int, **arrays: Any) -> str | None:
    """Says why the CUDA kernels cannot count so many rows, or None."""
    if not _sizes.exceeds(num_rows, MAX_ROWS):
        return None
    rule = f"{num_rows} rows (of all examples of a vmap) must be at most {MAX_ROWS} on CUDA"
    return _checks.message(op, rule, **arrays)


def dtype_reason(op: str, tf32: bool = False, /, **arrays: Any) -> str | None:
    """Says why the CUDA kernels cannot multiply arrays of these dtypes, or None.

    `tf32`: whether there is a kernel of float32 factors.
    """
    names = {np.dtype(x.dtype).name for x in arrays.values()}
    if len(names) == 1 and names <= {"bfloat16", "float16", *(("float32",) if tf32 else ())}:
        return None
    listed = " and ".join(arrays)
    return _checks.message(op, f"{listed} must all be bf16 or all be f16 on CUDA", **arrays)


def kernel_reason(op: str, format: Format, dtype: Any, **arrays: Any) -> str | None:
    """Why no kernel has this format and rounds to `dtype`, that of the one array given."""
    if format.code < 0:
        return _checks.message(op, f"{format.name} has no CUDA kernel", **arrays)
    (name,) = arrays
    if jnp.dtype(dtype).name in ("bfloat16", "float16"):
        refused = format.refused_tokens(dtype)
        return refused and _checks.message(op, f"{name}.{refused} on CUDA", **arrays)
    rule = f"{name}.dtype={_checks.dtype_name(dtype)} must be bf16 or f16 on CUDA"
    return _checks.message(op, rule, **arrays)


def result_reason(dtype: Any, out_dtype: Any, lhs: Any) -> str | None:
    """Says why a product of `dtype` cannot have results of `out_dtype` on CUDA, or None."""
    if out_dtype in (dtype, jnp.float32):
        return None
    rule = (
        f"preferred_element_type={_checks.dtype_name(out_dtype)} must be "
        f"{_checks.dtype_name(dtype)} or f32 on CUDA"
    )
    return _checks.message("grouped_gemm", rule, lhs=lhs)


def gmm_reason(a: Any, *, format: Format, dtype: Any, out_dtype: Any, **_params: Any) -> str | None:
    """Why the kernels cannot run this product, or None."""
    op = "grouped_gemm"
    # Messages show shapes as the caller of grouped_gemm knows them, without batch axis.
    one = lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype)  # noqa: E731
    x, w = one(a.x), one(a.w)
    if format.quantized:
        w = jax.ShapeDtypeStruct(format.weight_shape(w.shape), w.dtype)
        reason = kernel_reason(op, format, dtype, lhs=x)
        name, itemsize = "rhs.values", jnp.dtype(dtype).itemsize
    else:
        of_bias = {} if a.bias is None else {"bias": one(a.bias)}
        # Other products of float32 are made of several.
        reason = dtype_reason(op, True, **{"lhs": x, "rhs": w} | of_bias)
        name, itemsize = "rhs", None
    reason = (
        reason
        or result_reason(dtype, out_dtype, x)
        or count_reason(op, a.x.shape[0] * x.shape[0], lhs=x)
    )
    if not format.quantized:
        reason = reason or row_reason(op, "lhs", x, 1)
    return reason or row_reason(op, name, w, 2) or row_reason(op, name, w, 1, itemsize=itemsize)


def tgmm_reason(avals: Any, *, out_dtype: Any, **_params: Any) -> str | None:
    """Why the kernel cannot make this gradient of weights, or None."""
    op = "grouped_gemm"
    # Messages show shapes as the caller of grouped_gemm knows them, without batch axis.
    x, dy = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (avals.x, avals.dy))
    reason = dtype_reason(op, x=x, dy=dy)
    if reason is None and out_dtype not in (x.dtype, jnp.float32):
        rule = f"the gradient of rhs must be {_checks.dtype_name(x.dtype)} or f32 on CUDA"
        reason = _checks.message(op, rule, x=x, dy=dy)
    return (
        reason
        or count_reason(op, avals.x.shape[0] * x.shape[0], x=x)
        or row_reason(op, "x", x, 1)
        or row_reason(op, "dy", dy, 1)
    )
