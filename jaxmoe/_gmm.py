"""The primitives `gmm` and `tgmm`: batched grouped matrix products, each the other's transpose.

gmm: x [B,T,K], w [W,E,K,N] ("kn") or [W,E,N,K] ("nk"), starts and sizes [B,G] int32,
  bias [W,E,N] or [0,0,0] -> [B,T,N]

  out[b,t] = x[b,t] @ w[i] + bias[i]  for starts[b,g] <= t < starts[b,g] + sizes[b,g],
  i = (b * G + g) mod (W * E) counting the weights of all batches; 0 for the rows of no group

tgmm: x [B,T,K], dy [B,T,N], starts, sizes, init [W,E,K,N] or None -> [W,E,K,N]

  dw[i] = init[i] + sum over the groups of weight i of x[b,t]^T dy[b,t]; exactly init[i], or 0,
  where they have no rows. `init` is added in float32, before the one rounding; on CUDA dw takes its
  memory

gmm_master: `gmm` of a float32 w and bias, rounded to the dtype of x, whose gradients are float32

Either G = E and W divides B, or W = 1 and E divides G. `vmap` folds into B, so that it becomes
more groups of one call; weights that are not batched are never copied, and the gradient of `vmap`
adds up inside one `tgmm`. Ranges are cut to [0, T). Groups of one batch must not overlap: a row of
two groups is written by one of them. Bilinear without bias and init.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import _checks, _gmm_sharding, _gmm_xla, _primitive, _sizes
from jaxmoe._codes import Choice, choice
from jaxmoe._formats import PLAIN, Format
from jaxmoe._heuristics import gmm_config, gmm_scratch_size, tgmm_cluster
from jaxmoe.activation import ACTIVATIONS, GATE_UP_ORDERS, Activation

_OTHER_LAYOUT = {"kn": "nk", "nk": "kn"}
MAX_ROWS = 2**31 - 1  # of all batches: rows are counted in int32
_ROW_BYTES = 16  # what the kernels' loads need rows to be multiples of
_NO_ACTIVATION = ACTIVATIONS["identity"]


def row_reason(op: str, name: str, x: Any, axis: int, itemsize: int | None = None) -> str | None:
    """Says why rows of `x.shape[axis]` elements cannot be moved by the CUDA kernels, or None.

    Rows of `x`, or of an array of as many elements of `itemsize` bytes.
    """
    size, step = x.shape[axis], _ROW_BYTES // (itemsize or np.dtype(x.dtype).itemsize)
    if size > 0 and size % step == 0:
        return None
    below, above = size // step * step, (size // step + 1) * step
    nearest = f"{below} and {above}" if below else f"{above}"
    rule = (
        f"{name}.shape[{axis}]={size} must be a positive multiple of {step} on CUDA "
        f"(rows of 16-byte multiples); the nearest legal: {nearest}"
    )
    return _checks.message(op, rule, **{name: x})


def count_reason(op: str, num_rows: int, **arrays: Any) -> str | None:
    """Says why the CUDA kernels cannot count so many rows, or None."""
    if not _sizes.exceeds(num_rows, MAX_ROWS):
        return None
    rule = f"{num_rows} rows (of all examples of a vmap) must be at most {MAX_ROWS} on CUDA"
    return _checks.message(op, rule, **arrays)


def dtype_reason(op: str, **arrays: Any) -> str | None:
    """Says why the CUDA kernels cannot multiply arrays of these dtypes, or None."""
    names = {np.dtype(x.dtype).name for x in arrays.values()}
    if len(names) == 1 and names <= {"bfloat16", "float16"}:
        return None
    listed = " and ".join(arrays)
    return _checks.message(op, f"{listed} must all be bf16 or all be f16 on CUDA", **arrays)


def _gmm_out(x: Any, w: Any, *_: Any, weight_layout: str, out_dtype: Any, **_params: Any) -> Any:
    return [((*x.shape[:2], w.shape[3 if weight_layout == "kn" else 2]), out_dtype)]


def _tgmm_out(x: Any, dy: Any, *_: Any, weight_shape: Any, out_dtype: Any, **_params: Any) -> Any:
    return [((*weight_shape, x.shape[2], dy.shape[2]), out_dtype)]


def _fold(a: jax.Array, dim: int | None, size: int, inner: int) -> jax.Array:
    """[V,B,...] -> [V*B,...] in the order (B / inner, V, inner)."""
    a = _primitive.move_batch_to_front(a, dim, size)
    batch, rest = a.shape[1], a.shape[2:]
    a = jnp.moveaxis(a.reshape(size, batch // inner, inner, *rest), 0, 1)
    return a.reshape(size * batch, *rest)


def _unfold(a: jax.Array, size: int, inner: int) -> jax.Array:
    batch, rest = a.shape[0] // size, a.shape[1:]
    a = jnp.moveaxis(a.reshape(batch // inner, size, inner, *rest), 1, 0)
    return a.reshape(size, batch, *rest)


def _master_xla(
    x: jax.Array, w: jax.Array, starts: jax.Array, sizes: jax.Array, bias: Any, **params: Any
) -> tuple[jax.Array, ...]:
    bias = None if bias is None else bias.astype(x.dtype)
    return gmm(x, w.astype(x.dtype), starts, sizes, bias, **params)


def _gmm_batch(op: _primitive.Op, args: Any, dims: Any, **params: Any) -> Any:
    size = _primitive.batch_size(args, dims)
    x, w, starts, sizes, bias = args
    if dims.w is None and dims.bias is None:
        inner = -1  # any w serves all examples: they are more batches
    elif dims.w is not None and _lead(starts, dims.starts)[1] == _lead(w, dims.w)[1]:
        inner = _lead(w, dims.w)[0]
        w = _merge(_primitive.move_batch_to_front(w, dims.w))
        if bias is not None:
            bias = _merge(_primitive.move_batch_to_front(bias, dims.bias, size))
    else:  # a fold would have to copy weights
        return _primitive.one_by_one(op, args, dims, **params)
    inner = _lead(starts, dims.starts)[0] if inner < 0 else inner
    (out,) = op(
        _fold(x, dims.x, size, inner),
        w,
        _fold(starts, dims.starts, size, inner),
        _fold(sizes, dims.sizes, size, inner),
        bias,
        **params,
    )
    return (_unfold(out, size, inner),), (0,)


def _tgmm_batch(args: Any, dims: Any, *, weight_shape: tuple[int, int], **params: Any) -> Any:
    size = _primitive.batch_size(args, dims)
    inner, num_experts = weight_shape
    if _lead(args.starts, dims.starts)[1] != num_experts:
        return _primitive.one_by_one(tgmm, args, dims, weight_shape=weight_shape, **params)
    *factors, init = args
    *factor_dims, init_dim = dims
    folded = (_fold(a, d, size, inner) for a, d in zip(factors, factor_dims, strict=True))
    if init is not None:
        init = _merge(_primitive.move_batch_to_front(init, init_dim, size))
    (dw,) = tgmm(*folded, init, weight_shape=(size * inner, num_experts), **params)
    return (dw.reshape(size, inner, *dw.shape[1:]),), (0,)


def _merge(a: jax.Array) -> jax.Array:
    return a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])


def _lead(a: Any, dim: int | None) -> tuple[int, int]:
    """The first two sizes of `a` without its batch dimension."""
    first, second, *_ = (s for i, s in enumerate(a.shape) if i != dim)
    return first, second


def _gmm_jvp(op: _primitive.Op, primals: Any, tangents: Any, **params: Any) -> Any:
    x, w, starts, sizes, _ = primals
    tx, tw, _, _, tb = tangents
    out = op(*primals, **params)
    plain = functools.partial(op, **params)
    terms = []
    if tx is not None:
        terms += plain(tx, w, starts, sizes, None)
    if tw is not None:
        terms += plain(x, tw, starts, sizes, None)
    if tb is not None:
        # bias[e] as a product: one K of ones, padded to a row length that the kernels take.
        k = _ROW_BYTES // x.dtype.itemsize
        ones = jnp.zeros((*x.shape[:2], k), x.dtype).at[..., 0].set(1)
        rows = jnp.pad(tb[:, :, None, :], ((0, 0), (0, 0), (0, k - 1), (0, 0)))
        bias_params = params | {"weight_layout": "kn", "config": None}
        terms += op(ones, rows, starts, sizes, None, **bias_params)
    return out, (functools.reduce(jnp.add, terms) if terms else None,)


def _gmm_transpose(
    cts: Any, args: Any, *, weight_layout: str, out_dtype: Any, precision: Any, config: Any
) -> Any:
    del out_dtype, config  # they belong to this product, not to its transpose
    x, w, starts, sizes, _ = args
    (ct,) = cts
    if _primitive.is_linear(x):
        other = _OTHER_LAYOUT[weight_layout]
        dtype = x.aval.dtype
        (dx,) = gmm(
            ct,
            w.astype(dtype),
            starts,
            sizes,
            None,
            weight_layout=other,
            out_dtype=dtype,
            precision=precision,
            config=None,
        )
        return dx, None, None, None, None
    factors = (x, ct) if weight_layout == "kn" else (ct, x)
    (dw,) = tgmm(
        *factors,
        starts,
        sizes,
        None,
        weight_shape=w.aval.shape[:2],
        out_dtype=w.aval.dtype,
        precision=precision,
    )
    return None, dw, None, None, None


def _tgmm_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    x, dy, starts, sizes, _ = primals
    terms = [] if tangents.init is None else [tangents.init]
    if tangents.x is not None:
        terms += tgmm(tangents.x, dy, starts, sizes, None, **params)
    if tangents.dy is not None:
        terms += tgmm(x, tangents.dy, starts, sizes, None, **params)
    return tgmm(*primals, **params), (functools.reduce(jnp.add, terms) if terms else None,)


def _tgmm_transpose(
    cts: Any, args: Any, *, weight_shape: Any, out_dtype: Any, precision: Any
) -> Any:
    del weight_shape, out_dtype
    x, dy, starts, sizes, _ = args
    x_is_linear = _primitive.is_linear(x)
    other, linear = (dy, x) if x_is_linear else (x, dy)
    dtype = linear.aval.dtype
    (ct,) = gmm(
        other,
        cts[0],
        starts,
        sizes,
        None,
        weight_layout="nk" if x_is_linear else "kn",
        out_dtype=dtype,
        precision=precision,
        config=None,
    )
    nothing = (None, None, None)
    return (ct, None, *nothing) if x_is_linear else (None, ct, *nothing)


def cuda_target(rows: str, bias_dtype: str, **functions: Any) -> _primitive.CudaTarget:
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


def cuda_attrs(
    config: Any,
    *,
    layout: str,
    gather: bool = False,
    format: Format = PLAIN,
    promoted: bool = False,
    gate_up: str = GATE_UP_ORDERS[0],
    activation: Activation = _NO_ACTIVATION,
) -> dict[str, Any]:
    """Attributes of that call."""
    return {
        "layout": choice("layout", layout),
        "format": Choice(format.code, format.name),
        "promoted": int(promoted),
        "gate_up": choice("gate_up", gate_up),
        "activation": {"gated": int(activation.gated), **activation.kernel_params()},
        # `gather` of the configuration is for the layer: here the operands say it.
        "config": {**config.attrs(), "gather": int(gather)},
    }


def cuda_scratch(dtype: Any = None) -> list[_primitive.Spec]:
    """Results of that call after out; z among them, and absent, if a dtype is given."""
    counter: list[_primitive.Spec] = [((gmm_scratch_size(),), jnp.int32)]
    return counter if dtype is None else [((0, 0), dtype), *counter]


def _gmm_attrs(avals: Any, *, weight_layout: str, config: Any, **_params: Any) -> dict[str, Any]:
    x, w, starts, _, _ = avals
    if config is None:
        n = w.shape[3 if weight_layout == "kn" else 2]
        config = gmm_config(x.shape[0] * x.shape[1], starts.size, x.shape[2], n)
    return cuda_attrs(config, layout=weight_layout)


def _gmm_reason(avals: Any, *, out_dtype: Any, **_params: Any) -> str | None:
    op = "grouped_gemm"
    # Messages show shapes as the caller of grouped_gemm knows them, without batch axis.
    x, w, bias = (
        None if a is None else jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        for a in (avals.x, avals.w, avals.bias)
    )
    assert x is not None and w is not None
    if x.dtype != w.dtype:  # never so in a public call, only in a transpose
        return _mixed_reason(x, w)
    reason = dtype_reason(op, **{"lhs": x, "rhs": w} | ({} if bias is None else {"bias": bias}))
    if reason is None and out_dtype not in (x.dtype, jnp.float32):
        rule = (
            f"preferred_element_type={_checks.dtype_name(out_dtype)} must be "
            f"{_checks.dtype_name(x.dtype)} or f32 on CUDA"
        )
        reason = _checks.message(op, rule, lhs=x)
    return (
        reason
        or count_reason(op, avals.x.shape[0] * x.shape[0], lhs=x)
        or row_reason(op, "lhs", x, 1)
        or row_reason(op, "rhs", w, 2)
        or row_reason(op, "rhs", w, 1)
    )


def _mixed_reason(x: Any, other: Any) -> str:
    rule = (
        "the factors of a gradient must all be bf16 or all be f16 on CUDA, not one of them f32 as "
        "where the product was float32 (preferred_element_type, or a second derivative); such "
        "gradients run on CPU, and on GPUs where the CUDA extension is not loaded"
    )
    return _checks.message("grouped_gemm", rule, lhs=x, rhs=other)


def _tgmm_reason(avals: Any, *, out_dtype: Any, **_params: Any) -> str | None:
    op = "grouped_gemm"
    # Messages show shapes as the caller of grouped_gemm knows them, without batch axis.
    x, dy = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (avals.x, avals.dy))
    if x.dtype != dy.dtype:
        return _mixed_reason(x, dy)
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


gmm = _primitive.define(
    "jaxmoe_gmm",
    out=_gmm_out,
    xla=_gmm_xla.gmm_xla,
    batch=lambda args, dims, **params: _gmm_batch(gmm, args, dims, **params),
    jvp=lambda primals, tangents, **params: _gmm_jvp(gmm, primals, tangents, **params),
    transpose=_gmm_transpose,
    cuda=cuda_target(
        "row_index",
        "x",
        attrs=_gmm_attrs,
        scratch=lambda avals, **_: cuda_scratch(avals.x.dtype),
        reason=_gmm_reason,
    ),
    rule=_gmm_sharding.gmm_rule(lambda *arrays, **params: gmm(*arrays, **params)),
)
gmm_master = _primitive.define(
    "jaxmoe_gmm_master",
    out=_gmm_out,
    xla=_master_xla,
    batch=lambda args, dims, **params: _gmm_batch(gmm_master, args, dims, **params),
    jvp=lambda primals, tangents, **params: _gmm_jvp(gmm_master, primals, tangents, **params),
    transpose=_gmm_transpose,
    composed=True,
)
tgmm = _primitive.define(
    "jaxmoe_tgmm",
    out=_tgmm_out,
    xla=_gmm_xla.tgmm_xla,
    batch=_tgmm_batch,
    jvp=_tgmm_jvp,
    transpose=_tgmm_transpose,
    cuda=_primitive.CudaTarget(
        "jaxmoe_weight_grad_v1",
        attrs=lambda avals, **_: {"cluster": tgmm_cluster(avals.x.shape[2])},
        scratch=lambda _avals, **_: cuda_scratch(),
        reason=_tgmm_reason,
        absent={"init": (4, "out_dtype")},
        aliases=lambda avals, **_: {} if avals.init is None else {"init": 0},
    ),
    rule=_gmm_sharding.tgmm_rule(lambda *arrays, **params: tgmm(*arrays, **params)),
)
