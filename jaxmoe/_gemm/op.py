"""The primitives `gmm` and `tgmm`: batched grouped matrix products, each the other's transpose.

gmm: `Product` -> [B,T,N], for x [B,T,K] and w [W,E,K,N] ("kn") or [W,E,N,K] ("nk")

  out[b,t] = x[b,t] @ w[i] + bias[i]  for starts[b,g] <= t < starts[b,g] + sizes[b,g],
  i = (b * G + g) mod (W * E) counting the weights of all batches; 0 for the rows of no group

where x and w stand for values times scales if the format has any, as it stores them. With master
weights w and bias are float32, rounded to the dtype of x, and their gradients are float32.

tgmm: x [B,T,K], dy [B,T,N], starts, sizes, init [W,E,K,N] or None -> [W,E,K,N]

  dw[i] = init[i] + sum over the groups of weight i of x[b,t]^T dy[b,t]; exactly init[i], or 0,
  where they have no rows. `init` is added in float32, before the one rounding; on CUDA dw takes its
  memory

Either G = E and W divides B, or W = 1 and E divides G. `vmap` folds into B, so that it becomes
more groups of one call; weights that are not batched are never copied, and the gradient of `vmap`
adds up inside one `tgmm`. Ranges are cut to [0, T). Groups of one batch must not overlap: a row of
two groups is written by one of them. Bilinear without bias and init.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe._formats import PLAIN, Format
from jaxmoe._gemm import cuda, sharding, split, tf32, xla
from jaxmoe._gemm.dequantized import dequantized
from jaxmoe._gemm.tiles import gmm_config, tgmm_cluster
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive

_OTHER_LAYOUT = {"kn": "nk", "nk": "kn"}


class Product(NamedTuple):
    """The operands of `gmm`; None for those that are absent.

    Attributes:
      x: [B, T, K].
      w: [W, E, K, N], or [W, E, N, K]; values of that shape as the format stores them.
      starts, sizes: [B, G] int32.
      bias: [W, E, N].
      x_scales: [B, ...], for each batch those of tokens [T, K].
      w_scales: [W, E, ...], those of weights [E, N, K].
    """

    x: Any
    w: Any
    starts: Any
    sizes: Any
    bias: Any = None
    x_scales: Any = None
    w_scales: Any = None


def gmm(
    *operands: Any,
    weight_layout: str,
    out_dtype: Any,
    dtype: Any = None,
    format: Format = PLAIN,
    precision: Any = None,
    promoted: bool | None = None,
    config: Any = None,
) -> tuple[jax.Array]:
    """Binds the primitive to the operands of a `Product`.

    `dtype` is that of the bias, and of the result unless it is float32; by default that of x.
    """
    a = Product(*operands)
    (out,) = gmm_p(
        *a,
        weight_layout=weight_layout,
        out_dtype=jnp.dtype(out_dtype),
        dtype=jnp.dtype(a.x.dtype if dtype is None else dtype),
        format=format,
        precision=precision,
        promoted=promoted,
        config=config,
    )
    return (out,)


def bias_of_rows(bias: jax.Array, a: Product, *, dtype: Any, **params: Any) -> jax.Array:
    """bias[e] of each row, 0 in those of no group, as a product: one K of ones, padded.

    K is a row length that the kernels take.
    """
    k = cuda.ROW_BYTES // jnp.dtype(dtype).itemsize
    ones = jnp.zeros((*a.x.shape[:2], k), dtype).at[..., 0].set(1)
    rows = jnp.pad(bias[:, :, None, :], ((0, 0), (0, 0), (0, k - 1), (0, 0)))
    params = {"format": PLAIN, **params, "weight_layout": "kn"}
    (out,) = gmm(ones, rows, a.starts, a.sizes, dtype=dtype, **params)
    return out


def refuse_derivative(op: str, format: Format, **arrays: Any) -> Any:
    """Raises: products in this format have no derivative."""
    raise NotImplementedError(_checks.message(op, format.gradient.refused or "", **arrays))


def refuse_moving(
    op: str, x: Any, tangents: Any, names: tuple[str, ...], called: Mapping[str, str] | None = None
) -> None:
    """Raises if a derivative is taken with respect to what is quantized.

    `called`: what the caller calls the operands.
    """
    for name in names:
        if getattr(tangents, name) is not None:
            what = {"x": "x", "x_scales": "x"} | dict.fromkeys(("x_scale", "h_scale"), "tokens")
            here = (called or {}).get(name, name)
            rule = (
                f"no derivative is defined with respect to quantized {what.get(name, 'weights')} "
                f"(here: {here}); take jax.lax.stop_gradient of these, or jaxmoe.dequantize them"
            )
            raise NotImplementedError(_checks.message(op, rule, x=x))


def _gmm_out(
    x: Any, w: Any, *_: Any, weight_layout: str, out_dtype: Any, format: Format, **_params: Any
) -> Any:
    n = format.weight_shape(w.shape)[3 if weight_layout == "kn" else 2]
    return [((*x.shape[:2], n), out_dtype)]


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


def _gmm_xla(*operands: Any, format: Format, **params: Any) -> tuple[jax.Array]:
    a = Product(*operands)
    if format.master:
        bias = None if a.bias is None else a.bias.astype(a.x.dtype)
        return gmm(*a._replace(w=a.w.astype(a.x.dtype), bias=bias), **params)
    if format.dequantizes:
        w = dequantized(a.w, a.w_scales, format, params["dtype"])
        return gmm(*a._replace(w=w, w_scales=None), **params)
    return xla.gmm_xla(*a, format=format, **params)


def fold_batch(
    op: _primitive.Op, args: Product, dims: Product, *, format: Format, **params: Any
) -> Any:
    """The batch rule of an op of `Product`, whose results are [B,T,..]: examples are batches."""
    size = _primitive.batch_size(args, dims)
    front = _primitive.move_batch_to_front
    scales_too = args.w_scales is None or (dims.w_scales is None) == (dims.w is None)
    if dims.w is None and dims.bias is None and scales_too:
        inner = _lead(args.starts, dims.starts)[0]  # any w serves all: examples are more batches
        w, bias, w_scales = args.w, args.bias, args.w_scales
    elif (
        dims.w is not None
        and scales_too
        and _lead(args.starts, dims.starts)[1] == _lead(args.w, dims.w)[1]
    ):
        inner = _lead(args.w, dims.w)[0]
        w = _merge(front(args.w, dims.w))
        bias, w_scales = (
            None if a is None else _merge(front(a, d, size))
            for a, d in ((args.bias, dims.bias), (args.w_scales, dims.w_scales))
        )
    else:  # a fold would have to copy weights
        return _primitive.one_by_one(op, args, dims, format=format, **params)
    folded = {
        name: _fold(getattr(args, name), getattr(dims, name), size, inner)
        for name in ("x", "starts", "sizes", "x_scales")
        if getattr(args, name) is not None
    }
    a = args._replace(w=w, bias=bias, w_scales=w_scales, **folded)
    outs = op(*_by_row(a, format), format=_of_rows(a, format), **params)
    return tuple(_unfold(out, size, inner) for out in outs), (0,) * len(outs)


def _by_row(a: Product, format: Format) -> Product:
    """The product in the format of `_of_rows`: batches may differ in the one scale of each."""
    if not format.one_token_scale:
        return a
    values = a.w.reshape(-1, *a.w.shape[2:])
    _, scales = format.by_row(values, a.w_scales.reshape(-1))
    return a._replace(
        x_scales=jnp.broadcast_to(a.x_scales[:, None], a.x.shape[:2]),
        w_scales=scales.reshape(*a.w.shape[:2], *scales.shape[1:]),
    )


def _of_rows(a: Product, format: Format) -> Format:
    if not format.one_token_scale:
        return format
    return format.by_row(a.w[0], a.w_scales[0])[0]


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


def _gmm_jvp(primals: Product, tangents: Product, *, format: Format, **params: Any) -> Any:
    if format.gradient.refused is not None:
        # The public function has no batches.
        x, w = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (primals.x, primals.w))
        refuse_derivative("grouped_gemm", format, lhs=x, rhs=w)
    x, w, starts, sizes, *_ = primals
    product = functools.partial(gmm, format=format, **params)
    terms: list[jax.Array] = []
    if format.gradient.frozen:
        shown = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        quantized = ("x", "x_scales") if primals.x_scales is not None else ()
        refuse_moving("grouped_gemm", shown, tangents, (*quantized, "w", "w_scales"))
        if tangents.x is not None:
            of_x: dict[str, Any] = params | {"promoted": None, "config": None}
            given = (tangents.x, w, starts, sizes, None, None, primals.w_scales)
            terms += gmm(*given, format=format.dequantizing(), **of_x)
    elif tangents.x is not None:
        terms += product(tangents.x, w, starts, sizes)
    if tangents.w is not None:
        terms += product(x, tangents.w, starts, sizes)
    if tangents.bias is not None:
        of_bias: dict[str, Any] = params | {"config": None, "promoted": None}
        plain = PLAIN if format.quantized else format
        terms.append(bias_of_rows(tangents.bias, primals, format=plain, **of_bias))
    return product(*primals), (functools.reduce(jnp.add, terms) if terms else None,)


def _gmm_transpose(
    cts: Any, args: Product, *, weight_layout: str, precision: Any, format: Format, **_of_this: Any
) -> Any:
    x, w, starts, sizes, *_ = args
    (ct,) = cts
    nothing = Product(*[None] * len(args))
    if _primitive.is_linear(x):
        dtype = x.aval.dtype
        of_x: dict[str, Any] = {"dtype": dtype, "format": format} if format.quantized else {}
        (dx,) = gmm(
            *(ct, w if format.quantized else w.astype(dtype), starts, sizes, None, None),
            args.w_scales,
            weight_layout=_OTHER_LAYOUT[weight_layout],
            out_dtype=dtype,
            precision=precision,
            **of_x,
        )
        return nothing._replace(x=dx)
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
    return nothing._replace(w=dw)


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
        *(other, cts[0], starts, sizes),
        weight_layout="nk" if x_is_linear else "kn",
        out_dtype=dtype,
        precision=precision,
    )
    nothing = (None, None, None)
    return (ct, None, *nothing) if x_is_linear else (None, ct, *nothing)


def _gmm_attrs(
    a: Product,
    *,
    weight_layout: str,
    format: Format,
    promoted: bool | None,
    config: Any,
    **_params: Any,
) -> dict[str, Any]:
    if config is None:
        config = gmm_config(
            *(a.x.shape[0] * a.x.shape[1], a.starts.size, a.x.shape[2]),
            format.weight_shape(a.w.shape)[3 if weight_layout == "kn" else 2],
            promoted=promoted,
            packed=format.packed,
        )
    return cuda.attrs(config, layout=weight_layout, format=format, promoted=promoted)


def _gmm_apart(a: Product, *, format: Format, out_dtype: Any, **params: Any) -> Any:
    if tf32.multiplies(a, format=format, **params):
        return tf32.gmm_of_whole_rows(gmm, a, out_dtype)
    return split.gmm_of_parts(gmm, a.x, a.w, format)


gmm_p = _primitive.define(
    "jaxmoe_gmm",
    operands=Product,
    out=_gmm_out,
    xla=_gmm_xla,
    batch=lambda args, dims, **params: fold_batch(gmm_p, args, dims, **params),
    jvp=_gmm_jvp,
    transpose=_gmm_transpose,
    cuda=cuda.target(
        "row_index",
        "dtype",
        attrs=_gmm_attrs,
        scratch=lambda _a, *, dtype, **_: cuda.scratch(dtype),
        reason=cuda.gmm_reason,
        apart=_gmm_apart,
    ),
    rule=sharding.gmm_rule(lambda *arrays, **params: gmm_p(*arrays, **params)),
    composed=lambda *, format, **_: format.composed,
    expands=lambda *, format, **_: format.master,
)
tgmm = _primitive.define(
    "jaxmoe_tgmm",
    out=_tgmm_out,
    xla=xla.tgmm_xla,
    batch=_tgmm_batch,
    jvp=_tgmm_jvp,
    transpose=_tgmm_transpose,
    cuda=_primitive.CudaTarget(
        "jaxmoe_weight_grad_v1",
        attrs=lambda avals, **_: {"cluster": tgmm_cluster(avals.x.shape[2])},
        scratch=lambda _avals, **_: cuda.scratch(),
        reason=cuda.tgmm_reason,
        apart=lambda a, **_: split.tgmm_of_parts(tgmm, a.x, a.dy),
        absent={"init": (4, "out_dtype")},
        aliases=lambda avals, **_: {} if avals.init is None else {"init": 0},
    ),
    rule=sharding.tgmm_rule(lambda *arrays, **params: tgmm(*arrays, **params)),
)
