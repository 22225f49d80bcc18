"""The primitive of a layer's first product on batches, activated before it is rounded.

activated: `Product` -> h [B,T,I], and z [B,T,N] if `keeps_z`

  z = x @ w[i] + bias[i] as `gmm` has it; h = act(z before it was rounded), in float32, rounded once

Both are exactly 0 in the rows of no group. On CUDA it is one kernel, whose epilogue activates;
only products without scales leave z. `vmap` folds as in `gmm`. Derivatives, and the division over a
mesh, are those of the ops that the pure JAX function calls.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import Format
from jaxmoe._gemm import cuda, split
from jaxmoe._gemm.gate_up import activate, of_moving
from jaxmoe._gemm.op import Product, fold_batch, gmm
from jaxmoe._gemm.tiles import WHOLE_BLOCKS, GemmConfig, gmm_config, odd_blocks
from jaxmoe._jax import mesh as _mesh
from jaxmoe._jax import primitive as _primitive
from jaxmoe.activation import Activation


def activated(*operands: Any, **params: Any) -> tuple[jax.Array, ...]:
    """Binds the primitive, or on Explicit axes the ops that it is made of."""
    a = Product(*operands)
    if any(_mesh.explicit_axes(jax.typeof(x)) for x in a if x is not None):
        return _activated(*a, **params)
    return activated_p(*a, **params)


def _activated(
    x: jax.Array,
    w: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    x_scales: jax.Array | None = None,
    w_scales: jax.Array | None = None,
    *,
    activation: Activation,
    gate_up: str,
    dtype: Any,
    promoted: bool | None,
    config: GemmConfig | None,
    keeps_z: bool,
    **params: Any,
) -> tuple[jax.Array, ...]:
    (z,) = gmm(
        *(x, w, starts, sizes, bias, x_scales, w_scales),
        dtype=dtype,
        out_dtype=jnp.float32,
        promoted=promoted,
        config=config,
        **params,
    )
    h = activate(z, activation, gate_up).astype(dtype)
    return (h, z.astype(dtype)) if keeps_z else (h,)


def _out(
    x: Any,
    w: Any,
    *_: Any,
    activation: Activation,
    weight_layout: str,
    dtype: Any,
    format: Format,
    keeps_z: bool,
    **_params: Any,
) -> list[_primitive.Spec]:
    width = format.weight_shape(w.shape)[3 if weight_layout == "kn" else 2]
    widths = [width // 2 if activation.gated else width, *([width] if keeps_z else [])]
    return [((*x.shape[:2], n), dtype) for n in widths]


def _jvp(primals: Product, tangents: Product, **params: Any) -> Any:
    fn = functools.partial(_activated, **params)
    return jax.jvp(*of_moving(fn, primals, tangents))


def _attrs(
    a: Product,
    *,
    activation: Activation,
    gate_up: str,
    weight_layout: str,
    format: Format,
    promoted: bool | None,
    config: GemmConfig | None,
    **_params: Any,
) -> dict[str, Any]:
    width = format.weight_shape(a.w.shape)[3 if weight_layout == "kn" else 2]
    if config is None:
        rows = a.x.shape[0] * a.x.shape[1]
        shape = rows, a.starts.size, a.x.shape[2], width
        config = gmm_config(*shape, promoted=promoted, packed=format.packed)
        odd = odd_blocks(format.block > 1, activation.gated, gate_up, width // 2)
        if odd and config.tile in WHOLE_BLOCKS:
            config = GemmConfig(128, 192)
    return cuda.attrs(
        config,
        layout=weight_layout,
        format=format,
        promoted=promoted,
        gate_up=gate_up,
        activation=activation,
    )


def _reason(a: Product, *, activation: Activation, **params: Any) -> str | None:
    """Why the kernel cannot run this product, or None."""
    format, dtype = params["format"], params["dtype"]
    op, name = "expert_batches", "experts.gate_up" if activation.gated else "experts.up"
    w = jax.ShapeDtypeStruct(
        format.weight_shape(a.w.shape)[:1] + format.weight_shape(a.w.shape)[2:], a.w.dtype
    )
    if format.quantized:
        reason, name = cuda.kernel_reason(op, format, dtype, x=a.x), f"{name}.values"
    else:
        reason = cuda.dtype_reason(op, **{"x": a.x, name: w}) or cuda.row_reason(op, "x", a.x, 2)
    (h, *_) = _out(*a, activation=activation, **params)
    return (
        reason
        or cuda.count_reason(op, a.x.shape[0] * a.x.shape[1], x=a.x)
        or cuda.row_reason(op, name, w, 2)
        or cuda.row_reason(op, name, w, 1, itemsize=jnp.dtype(dtype).itemsize)
        or cuda.row_reason(op, "the activation's result", jax.ShapeDtypeStruct(*h), 2)
    )


def _apart(a: Product, *, format: Format, **_params: Any) -> Any:
    return _activated if not format.quantized and split.is_split(a.x, a.w) else None


activated_p = _primitive.define(
    "jaxmoe_activated_gmm",
    operands=Product,
    out=_out,
    xla=_activated,
    batch=lambda args, dims, **params: fold_batch(activated_p, args, dims, **params),
    jvp=_jvp,
    composed=lambda activation, **_: not activation.fused,
    cuda=cuda.target(
        "row_index",
        "dtype",
        attrs=_attrs,
        scratch=lambda _a, *, dtype, keeps_z, **_: cuda.scratch(None if keeps_z else dtype),
        reason=_reason,
        apart=_apart,
    ),
)
