"""The primitive of a training step's first product, which leaves z behind for the backward pass.

gate_up: x [T,H], row_to_token [R], slot_to_row [T,K], w [E,...], bias [E,N] or None, starts and
  sizes [G] int32 -> h [R,I], z [R,N]

  z = x[row_to_token] @ w[e] + bias[e], rounded; h = act(z before it was rounded)

Without row_to_token and slot_to_row x is [R,H], in order. Group g has weights g mod E. Rows
of no group are exactly 0. Elementwise steps are in float32. On CUDA it is one kernel, whose
epilogue does what stands after the product. Derivatives and batches are those of the ops that the
pure JAX function calls.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import Tokens
from jaxmoe._gemm import cuda, split
from jaxmoe._gemm.multiply import multiply
from jaxmoe._gemm.tiles import GemmConfig
from jaxmoe._jax import primitive as _primitive
from jaxmoe.activation import Activation, split_gate_up
from jaxmoe.permute import permute_p


def activate(z: jax.Array, activation: Activation, gate_up: str) -> jax.Array:
    """Applies the activation to the first product, in float32."""
    z = z.astype(jnp.float32)
    return activation(*split_gate_up(z, gate_up)) if activation.gated else activation(z)


def of_moving(fn: Any, primals: Any, tangents: Any) -> tuple[Any, list[Any], list[Any]]:
    """Returns `fn` as a function of the moving arguments, then these and their tangents."""
    moving = [i for i, t in enumerate(tangents) if t is not None]

    def of_moving(*values: jax.Array) -> Any:
        args = list(primals)
        for i, value in zip(moving, values, strict=True):
            args[i] = value
        return fn(*args)

    return of_moving, [primals[i] for i in moving], [tangents[i] for i in moving]


def _gate_up(
    x: jax.Array,
    row_to_token: jax.Array | None,
    slot_to_row: jax.Array | None,
    w: jax.Array,
    bias: jax.Array | None,
    starts: jax.Array,
    sizes: jax.Array,
    *,
    activation: Activation,
    gate_up: str,
    weight_layout: str,
    precision: Any,
    config: GemmConfig,
) -> tuple[jax.Array, jax.Array]:
    rows = x if row_to_token is None else permute_p(x, row_to_token, slot_to_row)[0]
    z = multiply(
        Tokens(rows, None),
        *(w, None, bias, starts, sizes),
        weight_layout=weight_layout,
        out_dtype=jnp.float32,
        precision=precision,
        config=config,
    )
    return activate(z, activation, gate_up).astype(x.dtype), z.astype(x.dtype)


def _gate_up_out(
    x: Any, row_to_token: Any, _: Any, w: Any, *_rest: Any, **params: Any
) -> list[_primitive.Spec]:
    rows = x.shape[0] if row_to_token is None else row_to_token.size
    width = w.shape[2 if params["weight_layout"] == "kn" else 1]
    intermediate = width // 2 if params["activation"].gated else width
    return [((rows, intermediate), x.dtype), ((rows, width), x.dtype)]


def _gate_up_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    h, z = gate_up_p(*primals, **params)
    x, row_to_token, slot_to_row, w, bias, *groups = primals
    of_product = {name: params[name] for name in ("weight_layout", "precision")}

    def product(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        rows = x if row_to_token is None else permute_p(x, row_to_token, slot_to_row)[0]
        given = (Tokens(rows, None), w, None, bias, *groups)
        return multiply(*given, out_dtype=x.dtype, **of_product)

    moving = [tangents.x, tangents.w, tangents.bias]
    if all(t is None for t in moving):
        return (h, z), (None, None)
    _, dz = jax.jvp(*of_moving(product, (x, w, bias), moving))
    act = functools.partial(activate, activation=params["activation"], gate_up=params["gate_up"])
    _, dh = jax.jvp(act, (z.astype(jnp.float32),), (dz.astype(jnp.float32),))
    return (h, z), (dh.astype(h.dtype), dz)


def _attrs(
    avals: Any,
    *,
    activation: Activation,
    gate_up: str,
    weight_layout: str,
    config: GemmConfig,
    **_params: Any,
) -> dict[str, Any]:
    return cuda.attrs(
        config,
        layout=weight_layout,
        gather=avals.row_to_token is not None,
        gate_up=gate_up,
        activation=activation,
    )


def _reason(avals: Any, *, activation: Activation, **_params: Any) -> str | None:
    op, x, row_to_token, w = "moe_mlp", avals.x, avals.row_to_token, avals.w
    rows = x.shape[0] if row_to_token is None else row_to_token.size
    name = "experts.gate_up" if activation.gated else "experts.up"
    return (
        cuda.dtype_reason(op, **{"x": x, name: w})
        or cuda.count_reason(op, rows, x=x)
        or cuda.row_reason(op, "x", x, 1)
        or cuda.row_reason(op, name, w, 2)
        or cuda.row_reason(op, name, w, 1)
    )


gate_up_p = _primitive.define(
    "jaxmoe_gate_up",
    out=_gate_up_out,
    xla=_gate_up,
    batch=functools.partial(_primitive.as_its_ops, _gate_up),
    jvp=_gate_up_jvp,
    composed=lambda activation, **_: not activation.fused,
    cuda=cuda.target(
        "row_to_token",
        "x",
        attrs=_attrs,
        scratch=lambda _avals, **_: cuda.scratch(),
        reason=_reason,
        apart=lambda a, **_: _gate_up if split.is_split(a.x, a.w) else None,
    ),
)
