"""The primitive `tgmm_rows`: the weight gradient of gathered rows, added to what there is.

tgmm_rows: x [T,K], dy [T,N], starts and sizes [E] int32, row_index [T] int32 or [0], init [E,K,N]
  or [0,0,0] -> [E,K,N]

  dw[e] = init[e] + sum over the rows t of group e of x[t]^T dy[t]

With gathered="x" (or "dy") that operand is [X,K] (or [Y,N]) and its row t is row row_index[t], or
zeros where that is negative or past the end. `init` is added in float32, before the one rounding,
and on CUDA dw takes its memory. For backward passes that gather inside; its own derivatives are
those of the gather and of `tgmm`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import _gmm, _gmm_sharding, _gmm_xla, _primitive
from jaxmoe._heuristics import gmm_scratch_size, tgmm_cluster

GATHERED = (None, "x", "dy")


def _out(x: Any, dy: Any, starts: Any, *_: Any, out_dtype: Any, **_params: Any) -> Any:
    return [((starts.shape[0], x.shape[1], dy.shape[1]), out_dtype)]


def _take(operand: jax.Array, index: jax.Array) -> jax.Array:
    index = jnp.where(index < 0, operand.shape[0], index)
    return jnp.take(operand, index, axis=0, mode="fill", fill_value=0)


def _present(index: jax.Array | None) -> jax.Array:
    assert index is not None
    return index


def _in_two(
    tgmm: Callable[..., Any],
    x: jax.Array,
    dy: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    row_index: jax.Array | None,
    init: jax.Array | None,
    *,
    gathered: str | None,
    out_dtype: Any,
    precision: Any,
) -> tuple[jax.Array]:
    """The gather and the sums apart, which can be transposed, batched and divided."""
    if gathered == "x":
        x = _take(x, _present(row_index))
    elif gathered == "dy":
        dy = _take(dy, _present(row_index))
    (dw,) = tgmm(
        x[None],
        dy[None],
        starts[None],
        sizes[None],
        weight_shape=(1, starts.shape[0]),
        out_dtype=out_dtype if init is None else jnp.dtype("float32"),
        precision=precision,
    )
    if init is None:
        return (dw[0],)
    return ((dw[0] + init.astype(jnp.float32)).astype(out_dtype),)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    x, dy, *index, _ = primals
    tx, tdy, _, _, _, tinit = tangents
    terms: list[jax.Array] = []
    apart = functools.partial(_in_two, _gmm.tgmm, **params)
    if tx is not None:
        terms += apart(tx, dy, *index, None)
    if tdy is not None:
        terms += apart(x, tdy, *index, None)
    if tinit is not None:
        terms.append(tinit)
    out = tgmm_rows(*primals, **params)
    return out, (functools.reduce(jnp.add, terms) if terms else None,)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    if params["gathered"] is not None:  # all rows would be copied at once
        return _primitive.one_by_one(tgmm_rows, args, dims, **params)
    return _primitive.as_its_ops(functools.partial(_in_two, _gmm.tgmm), args, dims, **params)


def _attrs(avals: Any, *, gathered: str | None, **_params: Any) -> dict[str, Any]:
    x, dy = avals.x, avals.dy
    columns = dy.shape[1] if gathered == "dy" else x.shape[1]
    return {"gathered": GATHERED.index(gathered), "cluster": tgmm_cluster(columns)}


def _scratch(_avals: Any, **_params: Any) -> list[_primitive.Spec]:
    return [((gmm_scratch_size(),), jnp.int32)]


def _reason(avals: Any, *, gathered: str | None, out_dtype: Any, **_params: Any) -> str | None:
    x, dy = avals.x, avals.dy
    rows = dy.shape[0] if gathered == "x" else x.shape[0]
    return _gmm.tgmm_reason(x, dy, rows, out_dtype)


def _aliases(avals: Any, **_params: Any) -> dict[str, int]:
    return {} if avals.init is None else {"init": 0}


tgmm_rows = _primitive.define(
    "jaxmoe_tgmm_rows",
    out=_out,
    xla=lambda x, dy, starts, sizes, row_index, init, **params: _in_two(
        _gmm_xla.tgmm_xla, x, dy, starts, sizes, row_index, init, **params
    ),
    batch=_batch,
    jvp=_jvp,
    cuda=_primitive.CudaTarget(
        "jaxmoe_tgmm_rows_v1",
        attrs=_attrs,
        scratch=_scratch,
        reason=_reason,
        aliases=_aliases,
        absent={"row_index": (1, jnp.int32), "init": (3, "out_dtype")},
    ),
    rule=_gmm_sharding.tgmm_rows_rule(lambda *arrays, **params: tgmm_rows(*arrays, **params)),
)
