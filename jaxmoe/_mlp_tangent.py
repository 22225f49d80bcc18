"""The primitive of the layer's derivative: linear in its tangents, its transpose is the backward.

moe_mlp_tangent: the residuals x [T,H], z [R,N] before the activation, weights [T,K] f32,
w_gate_up [E1,...], w_down [E2,...], b_down [E2,H] or [0,0], row_to_token [R], slot_to_row [T,K],
expert_offsets [G+1] int32, then one tangent for each name of `wrt` -> the tangent of y [T,H], or
with finalized=False of the rows [R,H]. Tangents of weights and biases have their dtype or float32:
then they are those of master weights (`_mlp_master.py`), and so are the gradients.

JAX decides what reverse mode keeps: the arguments of a linear op that are not tangents. That is why
this is an op: only the residuals above outlive the forward pass, none of [R,H], and the transpose
is written by hand. With s the routing weight of a row and dy its token's cotangent:

  dh  = dy @ w_down^T            h = act(z), in float32
  dz  = act'(z) * (s * dh)         ds = <dh, h> + <dy, b_down>
  dw_gate_up = x^T dz              dw_down = (s * h)^T dy
  db_gate_up = sum of dz           db_down = sum of s * dy
  dx = sum over k of dz @ w_gate_up^T

Weighting dh instead of the rows is what makes it unnecessary to keep the rows. Everything else is
other ops, so that higher derivatives come from their rules.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe import _gmm, _primitive
from jaxmoe._gate_up import activate, multiply, of_moving
from jaxmoe.finalize import sum_rows
from jaxmoe.permute import permute_p

# What can have a tangent, in the order in which tangents are passed.
VARIABLES = ("x", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down", "residual")
_OF_Z = ("x", "w_gate_up", "b_gate_up")
_OTHER_LAYOUT = {"kn": "nk", "nk": "kn"}
_COLUMNS = 8  # the shortest row that the kernels multiply


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass, see the top of this file."""

    x: jax.Array
    z: jax.Array
    weights: jax.Array
    w_gate_up: jax.Array
    w_down: jax.Array
    b_down: jax.Array
    row_to_token: jax.Array
    slot_to_row: jax.Array
    expert_offsets: jax.Array


def product(
    rows: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    expert_offsets: jax.Array,
    *,
    own: Callable[[jax.Array], jax.Array] = jnp.asarray,
    **params: Any,
) -> jax.Array:
    """Multiplies rows in expert order by the weights of their experts, see `multiply`.

    `own` takes from [1,G] the groups of the experts in `w`, if those are not all.
    """
    starts, sizes = expert_offsets[None, :-1], jnp.diff(expert_offsets)[None]
    return multiply(rows, w, bias, own(starts)[0], own(sizes)[0], **params)


def _contract(r: Residuals, x: jax.Array, dy: jax.Array, count: int, dtype: Any) -> jax.Array:
    """Sums the outer products of the rows of each expert; of experts that share weights, as one."""
    (dw,) = _gmm.tgmm(
        x[None],
        dy[None],
        r.expert_offsets[None, :-1],
        jnp.diff(r.expert_offsets)[None],
        weight_shape=(1, count),
        out_dtype=jnp.dtype(dtype),
        precision=None,
    )
    return dw[0]


def _to_rows(r: Residuals, tokens: jax.Array) -> jax.Array:
    (rows,) = permute_p(tokens, r.row_to_token, r.slot_to_row)
    return rows


def _row_weights(r: Residuals, weights: jax.Array) -> jax.Array:
    """[T,K] -> [R], 0 in the rows of no slot."""
    slots, values = r.slot_to_row.reshape(-1), weights.reshape(-1)
    past_the_end = slots.size + jnp.arange(slots.size, dtype=slots.dtype)
    place = jnp.where(slots < 0, past_the_end, slots)  # distinct, as unique_indices promises
    return jnp.zeros_like(values).at[place].set(values, mode="drop", unique_indices=True)


def _slot_values(r: Residuals, values: jax.Array) -> jax.Array:
    """[R] -> [T,K], 0 where a slot has no row."""
    exists = r.slot_to_row >= 0
    return jnp.where(exists, values[jnp.where(exists, r.slot_to_row, 0)], 0.0)


def _columns(values: jax.Array, dtype: Any) -> jax.Array:
    """[R] float32 -> [R,8] whose rows add up to it: a factor that keeps more bits than `dtype`."""
    info, parts = jnp.finfo(dtype), []
    for _ in range(3):
        # NOTE: not astype and back, which XLA may leave out.
        parts.append(jax.lax.reduce_precision(values, info.nexp, info.nmant))
        values = values - parts[-1]
    columns = jnp.stack(parts, axis=1).astype(dtype)
    return jnp.pad(columns, ((0, 0), (0, _COLUMNS - 3)))


def _times_bias(r: Residuals, values: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns values[row] * bias[expert of the row] as a product, so 0 in rows of no expert."""
    repeated = jnp.broadcast_to(bias[:, None, :], (bias.shape[0], _COLUMNS, bias.shape[1]))
    columns = _columns(values, bias.dtype)
    return product(columns, repeated, None, r.expert_offsets, weight_layout="kn", dtype=jnp.float32)


def _tangent(*args: jax.Array, wrt: tuple[str, ...], **params: Any) -> tuple[jax.Array]:
    r, t = _split(args, wrt)
    layout, dtype = params["weight_layout"], r.x.dtype
    t = {name: a if name == "weights" else a.astype(dtype) for name, a in t.items()}
    multiply = functools.partial(
        product, expert_offsets=r.expert_offsets, weight_layout=layout, dtype=jnp.float32
    )
    ones = jnp.ones(r.row_to_token.shape, jnp.float32)
    s = _row_weights(r, r.weights) if params["finalized"] else ones
    act = functools.partial(activate, activation=params["activation"], gate_up=params["gate_up"])
    z_terms: list[jax.Array] = []
    if "x" in t:
        z_terms.append(multiply(_to_rows(r, t["x"]), r.w_gate_up, None))
    if "w_gate_up" in t:
        z_terms.append(multiply(_to_rows(r, r.x), t["w_gate_up"], None))
    if "b_gate_up" in t:
        z_terms.append(_times_bias(r, ones, t["b_gate_up"]))
    h_terms: list[jax.Array] = []
    if z_terms:
        h, dh = jax.jvp(act, (r.z.astype(jnp.float32),), (_sum(z_terms),))
        h_terms.append(s[:, None] * dh)
    else:
        h = act(r.z)
    terms: list[jax.Array] = []
    if "weights" in t:
        ds = _row_weights(r, t["weights"])
        h_terms.append(ds[:, None] * h)
        if r.b_down.size:
            terms.append(_times_bias(r, ds, r.b_down))
    if h_terms:
        terms.append(multiply(_sum(h_terms).astype(dtype), r.w_down, None))
    if "w_down" in t:
        terms.append(multiply((s[:, None] * h).astype(dtype), t["w_down"], None))
    if "b_down" in t:
        terms.append(_times_bias(r, s, t["b_down"]))
    if not params["finalized"]:
        return (_sum(terms).astype(dtype),)
    if not terms:
        return (t["residual"],)
    return (sum_rows(_sum(terms).astype(dtype), r.slot_to_row, t.get("residual")),)


def _transpose(cts: Any, args: Any, *, wrt: tuple[str, ...], **params: Any) -> list[Any]:
    r, t = _split(args, wrt)
    wanted = {name for name, value in t.items() if _primitive.is_linear(value)}
    dtypes = {name: t[name].aval.dtype for name in wanted}
    layout, finalized, dtype = params["weight_layout"], params["finalized"], r.x.dtype
    # NOTE: or XLA, which takes equal expressions for one, keeps the rows of x and float32 parts of
    # the activation from the forward pass until here, where they are computed again.
    x, z, dy = jax.lax.optimization_barrier((r.x, r.z, cts[0]))
    r = r._replace(x=x, z=z)
    grads: dict[str, jax.Array] = {"residual": dy}
    multiply = functools.partial(product, expert_offsets=r.expert_offsets, bias=None)
    contract = functools.partial(_contract, r)
    s = jnp.ones(r.row_to_token.shape, jnp.float32)
    if finalized:
        s = _row_weights(r, r.weights)
    rows = _to_rows(r, dy) if finalized else dy
    act = functools.partial(activate, activation=params["activation"], gate_up=params["gate_up"])
    h, pull = jax.vjp(act, r.z)
    dz: Any = None
    if wanted & {"weights", *_OF_Z}:
        dh = multiply(rows, r.w_down, weight_layout=_OTHER_LAYOUT[layout], dtype=dtype)
        dh = dh.astype(jnp.float32)
        (dz,) = pull(s[:, None] * dh)
        if "weights" in wanted:
            ds = jnp.sum(dh * h, axis=-1)
            if r.b_down.size:
                pad = ((0, 0), (0, 0), (0, _COLUMNS - 1))
                column = jnp.pad(r.b_down[:, :, None], pad)
                ds += multiply(rows, column, weight_layout="kn", dtype=jnp.float32)[:, 0]
            grads["weights"] = _slot_values(r, ds)
    if "x" in wanted:
        dx = multiply(dz, r.w_gate_up, weight_layout=_OTHER_LAYOUT[layout], dtype=dtype)
        grads["x"] = sum_rows(dx, r.slot_to_row)
    if "w_gate_up" in wanted:
        # NOTE: copied, as fetching them by index takes the product twice as long.
        pair = (_to_rows(r, r.x), dz) if layout == "kn" else (dz, _to_rows(r, r.x))
        grads["w_gate_up"] = contract(*pair, r.w_gate_up.shape[0], dtypes["w_gate_up"])
    if "b_gate_up" in wanted:
        ones, count = _columns(jnp.ones_like(s), dtype), t["b_gate_up"].aval.shape[0]
        sums = contract(ones, dz, count, jnp.float32).sum(1)
        grads["b_gate_up"] = sums.astype(dtypes["b_gate_up"])
    if "w_down" in wanted:
        weighted = (s[:, None] * h).astype(dtype)
        pair = (weighted, rows) if layout == "kn" else (rows, weighted)
        grads["w_down"] = contract(*pair, r.w_down.shape[0], dtypes["w_down"])
    if "b_down" in wanted:
        ones, count = _columns(s, dtype), r.b_down.shape[0]
        sums = contract(ones, rows, count, jnp.float32).sum(1)
        grads["b_down"] = sums.astype(dtypes["b_down"])
    return [None] * len(r) + [grads.get(name) for name in wrt]


def _sum(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _split(args: Any, wrt: tuple[str, ...]) -> tuple[Residuals, dict[str, Any]]:
    count = len(Residuals._fields)
    return Residuals(*args[:count]), dict(zip(wrt, args[count:], strict=True))


def _out(*avals: Any, finalized: bool, **_params: Any) -> list[_primitive.Spec]:
    r, _ = _split(avals, _params["wrt"])
    rows = r.x.shape[0] if finalized else r.row_to_token.shape[0]
    return [((rows, r.x.shape[1]), r.x.dtype)]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    """As the ops that it is made of: batches of tangents, as in a Jacobian."""
    return jax.vmap(functools.partial(_tangent, **params), dims)(*args), (0,)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    fn, moving, tangents = of_moving(functools.partial(_tangent, **params), primals, tangents)
    return jax.jvp(fn, moving, tangents)


def tangent_of(r: Residuals, tangents: dict[str, Any], **params: Any) -> jax.Array | None:
    """Returns the tangent of the layer for those tangents that are there; None if none is."""
    present = {n: tangents[n] for n in VARIABLES if tangents.get(n) is not None}
    present = {n: t for n, t in present.items() if t.size}
    if not present:
        return None
    (out,) = moe_mlp_tangent_p(*r, *present.values(), wrt=tuple(present), **params)
    return out


moe_mlp_tangent_p = _primitive.define(
    "jaxmoe_moe_mlp_tangent",
    out=_out,
    xla=_tangent,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    composed=True,
)
