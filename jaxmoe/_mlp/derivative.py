"""The layer's derivative on one device: a linear op, whose transpose is the backward pass.

moe_mlp_tangent: `Kept` -> the tangent of y [T,H], or
without finalize of the rows [R,H]. Tangents of weights and biases have their dtype or float32: then
they are those of master weights, and so are the gradients.

JAX decides what reverse mode keeps: the arguments of a linear op that are not tangents. That is why
this is an op: only what is kept outlives the forward pass, nothing else of [R,H], and the transpose
is written by hand. With s the routing weight of a row and dy its token's cotangent:

  dh  = dy @ w_down^T            h = act(z), in float32
  dz  = act'(z) * (s * dh)         ds = <dh, h> + <dy, b_down>
  dw_gate_up = x^T dz              dw_down = (s * h)^T dy
  db_gate_up = sum of dz           db_down = sum of s * dy
  dx = sum over k of dz @ w_gate_up^T

Weighting dh instead of the rows is what makes it unnecessary to keep the rows. Where gate and up
are two arrays each has its half of z. Everything else is other ops, so that higher derivatives come
from their rules.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmoe._formats import PLAIN, Format, Tokens
from jaxmoe._gemm.gate_up import activate, gate_up_p, of_moving
from jaxmoe._gemm.op import tgmm
from jaxmoe._jax import primitive as _primitive
from jaxmoe._mlp.by_row import COLUMNS, columns_of, row_weights, slot_values, to_rows
from jaxmoe._mlp.operands import Layer, Operands, halves
from jaxmoe._mlp.stages import order_of, product, result
from jaxmoe.finalize import sum_rows
from jaxmoe.permute import permute

# Operands that can have a tangent, in the order in which tangents are passed.
VARIABLES = (
    *("x", "weights", "w_gate_up", "w_up", "w_down"),
    *("b_gate_up", "b_down", "residual"),
)
_FIRST = ("x", "w_gate_up", "w_up", "b_gate_up")  # what z depends on
_OTHER_LAYOUT = {"kn": "nk", "nk": "kn"}


class Kept(NamedTuple):
    """The operands of the op: what the backward pass needs of the forward pass, then tangents.

    Attributes:
      x: [T, H].
      z: [R, N] before the activation.
      w_gate_up, w_down, w_up, b_down: as `Operands` have them.
      gate_up_scales, down_scales: likewise, of weights that products dequantize.
      row_to_token: [R] int32.
      slot_to_row: [T, K] int32.
      expert_offsets: [G + 1] int32.
      weights: [T, K] float32, None without finalize.
      t_x, ...: the tangent of each name of `VARIABLES`, None for those that do not move.
    """

    x: Any
    z: Any
    w_gate_up: Any
    w_down: Any
    row_to_token: Any
    slot_to_row: Any
    expert_offsets: Any
    weights: Any = None
    w_up: Any = None
    b_down: Any = None
    gate_up_scales: Any = None
    down_scales: Any = None
    t_x: Any = None
    t_weights: Any = None
    t_w_gate_up: Any = None
    t_w_up: Any = None
    t_w_down: Any = None
    t_b_gate_up: Any = None
    t_b_down: Any = None
    t_residual: Any = None


def linearized(
    primals: Operands, tangents: Operands, layer: Layer, config: Any
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    """Returns the results of the layer and their tangents; `config` is the first product's tile."""
    a, order = primals, order_of(primals, layer)
    index = order.row_to_token, order.slot_to_row
    groups = order.expert_offsets[:-1], jnp.diff(order.expert_offsets)
    second = (layer.config or (None, None))[1]
    if a.w_up is None and not layer.format.quantized:
        source = (a.x, *index) if config.gather else (permute(a.x, order), None, None)
        h, z = gate_up_p(
            *source,
            *(a.w_gate_up, a.b_gate_up, *groups),
            activation=layer.activation,
            gate_up=layer.gate_up,
            weight_layout=layer.layouts[0],
            precision=layer.precision,
            config=config,
        )
    else:
        h, z = _apart(a, layer, order)
    z = checkpoint_name(z, "jaxmoe_z")
    rows = _product(
        h,
        a.w_down,
        a.b_down,
        order.expert_offsets,
        layout=layer.layouts[1],
        out_dtype=layer.dtype,
        precision=layer.precision,
        config=second,
        scales=a.down_scales,
        format=layer.format,
    )
    weights = a.weights if layer.finalize else None
    kept = Kept(
        *(a.x, z, a.w_gate_up, a.w_down, *index, order.expert_offsets),
        weights=weights,
        w_up=a.w_up,
        b_down=a.b_down,
        gate_up_scales=a.gate_up_scales,
        down_scales=a.down_scales,
    )
    moving = {n: getattr(tangents, n) for n in VARIABLES}
    if not layer.finalize:
        moving["weights"] = moving["residual"] = None
    tangent = None
    if any(t is not None for t in moving.values()):
        given = {f"t_{name}": t for name, t in moving.items()}
        (tangent,) = moe_mlp_tangent_p(*kept._replace(**given), layer=_plain(layer))
    results = result(rows, order, a, layer)
    return results, (tangent, *[None] * (len(results) - 1))


def _plain(layer: Layer) -> Layer:
    """The static parameters that the derivative depends on."""
    format = layer.format if layer.format.quantized else PLAIN
    return layer.replace(format=format, config=None, promoted=None, num_experts=1, expert_offset=0)


def _apart(a: Operands, layer: Layer, order: Any) -> tuple[jax.Array, jax.Array]:
    """h and z of a gate and an up that are two arrays, or of weights to be dequantized."""
    rows, (config, _) = permute(a.x, order), layer.config or (None, None)
    parts = [
        _product(
            rows,
            w,
            bias,
            order.expert_offsets,
            layout=layer.layouts[0],
            out_dtype=jnp.float32,
            precision=layer.precision,
            config=config,
            scales=scales,
            format=layer.format,
        )
        for w, scales, bias in halves(a, layer)
    ]
    z = jnp.concatenate(parts, axis=1)
    return activate(z, layer.activation, layer.gate_up).astype(layer.dtype), z.astype(layer.dtype)


def _product(
    rows: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    expert_offsets: jax.Array,
    *,
    scales: jax.Array | None = None,
    format: Format = PLAIN,
    **params: Any,
) -> jax.Array:
    arrays = Tokens(rows, None), w, scales, bias, expert_offsets
    return product(*arrays, format=format, dtype=rows.dtype, **params)


def _contract(
    r: Any, x: jax.Array, dy: jax.Array, count: int, dtype: Any, precision: Any = None
) -> jax.Array:
    """Sums the outer products of the rows of each expert; of experts that share weights, as one."""
    (dw,) = tgmm(
        x[None],
        dy[None],
        r.expert_offsets[None, :-1],
        jnp.diff(r.expert_offsets)[None],
        None,
        weight_shape=(1, count),
        out_dtype=jnp.dtype(dtype),
        precision=precision,
    )
    return dw[0]


def _times_bias(r: Any, values: jax.Array, bias: Any) -> jax.Array:
    """Returns values[row] * bias[expert of the row] as a product, so 0 in rows of no expert."""
    repeated = jnp.broadcast_to(bias[:, None, :], (bias.shape[0], COLUMNS, bias.shape[1]))
    columns = columns_of(values, bias.dtype)
    return _product(columns, repeated, None, r.expert_offsets, layout="kn", out_dtype=jnp.float32)


def _tangent(*args: Any, layer: Layer) -> tuple[jax.Array]:
    r: Any = Kept(*args)
    dtype = layer.dtype
    narrow: Any = lambda t: None if t is None else t.astype(dtype)  # noqa: E731
    first, second = (
        functools.partial(
            _product,
            bias=None,
            expert_offsets=r.expert_offsets,
            layout=at,
            out_dtype=jnp.float32,
            precision=layer.precision,
            format=layer.format,
        )
        for at in layer.layouts
    )
    ones = jnp.ones(r.row_to_token.shape, jnp.float32)
    s = row_weights(r, r.weights)
    act = functools.partial(activate, activation=layer.activation, gate_up=layer.gate_up)
    z_terms = _z_terms(r, layer, first, ones, narrow)
    h_terms: list[jax.Array] = []
    if z_terms:
        h, dh = jax.jvp(act, (r.z.astype(jnp.float32),), (_sum(z_terms),))
        h_terms.append(s[:, None] * dh)
    else:
        h = act(r.z)
    terms: list[jax.Array] = []
    if r.t_weights is not None:
        ds = row_weights(r, r.t_weights)
        h_terms.append(ds[:, None] * h)
        if r.b_down is not None:
            terms.append(_times_bias(r, ds, r.b_down))
    if h_terms:
        terms.append(second(_sum(h_terms).astype(dtype), r.w_down, scales=r.down_scales))
    if r.t_w_down is not None:
        terms.append(second((s[:, None] * h).astype(dtype), narrow(r.t_w_down)))
    if r.t_b_down is not None:
        terms.append(_times_bias(r, s, narrow(r.t_b_down)))
    if not layer.finalize:
        return (_sum(terms).astype(dtype),)
    residual = narrow(r.t_residual)
    if not terms:
        return (residual,)
    return (sum_rows(_sum(terms).astype(dtype), r.slot_to_row, residual),)


def _z_terms(r: Any, layer: Layer, first: Any, ones: jax.Array, narrow: Any) -> list[jax.Array]:
    """Terms of the tangent of z, from those of x, of the first weights and of their bias."""
    terms: list[jax.Array] = []
    if r.t_x is not None:
        terms.append(_both(first, to_rows(r, narrow(r.t_x)), _of_halves(r, layer)))
    if r.t_w_gate_up is not None or r.t_w_up is not None:
        rows = to_rows(r, r.x)
        moved = [
            None if w is None else jnp.zeros_like(w) if t is None else narrow(t)
            for w, t in ((r.w_gate_up, r.t_w_gate_up), (r.w_up, r.t_w_up))
        ]
        terms.append(_both(first, rows, [(w, None) for w in moved if w is not None]))
    if r.t_b_gate_up is not None:
        terms.append(_times_bias(r, ones, narrow(r.t_b_gate_up)))
    return terms


def _of_halves(r: Any, layer: Layer) -> list[tuple[jax.Array, Any]]:
    """The first weight, one array or two, and the scales of each."""
    a = Operands(None, None, r.w_gate_up, None, w_up=r.w_up, gate_up_scales=r.gate_up_scales)
    return [(w, scales) for w, scales, _ in halves(a, layer)]


def _both(first: Any, rows: jax.Array, weights: list[tuple[jax.Array, Any]]) -> jax.Array:
    """The first product with one array, or with each of the two."""
    parts = [first(rows, w, scales=scales) for w, scales in weights]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _transpose(cts: Any, args: Kept, *, layer: Layer) -> Kept:
    tangents = {name: getattr(args, f"t_{name}") for name in VARIABLES}
    wanted = {name: t.aval for name, t in tangents.items() if _primitive.is_linear(t)}
    # NOTE: or XLA, which takes equal expressions for one, keeps the rows of x and float32 parts of
    # the activation from the forward pass until here, where they are computed again.
    x, z, dy = jax.lax.optimization_barrier((args.x, args.z, cts[0]))
    args = args._replace(x=x, z=z)
    if layer.format.quantized:  # or weights that were dequantized stay until here
        names = ("w_gate_up", "w_up", "w_down")
        given = {n: w for n in names if (w := getattr(args, n)) is not None}
        args = args._replace(**jax.lax.optimization_barrier(given))
    grads = _gradients(args, dy, wanted, layer)
    nothing = Kept(*[None] * len(Kept._fields))
    return nothing._replace(**{f"t_{name}": grads[name] for name in wanted})


def _gradients(
    r: Kept, dy: jax.Array, wanted: dict[str, Any], layer: Layer
) -> dict[str, jax.Array]:
    """The gradients of the names in `wanted`, whose avals say in which dtype."""
    dtype, grads = layer.dtype, {"residual": dy}
    backward = functools.partial(
        _product, bias=None, expert_offsets=r.expert_offsets, precision=layer.precision
    )
    contract = functools.partial(_contract, r, precision=layer.precision)
    s = row_weights(r, r.weights)
    rows = to_rows(r, dy) if layer.finalize else dy
    act = functools.partial(activate, activation=layer.activation, gate_up=layer.gate_up)
    h, pull = jax.vjp(act, r.z)
    dz: Any = None
    if wanted.keys() & {"weights", *_FIRST}:
        dh = backward(
            rows,
            r.w_down,
            layout=_OTHER_LAYOUT[layer.layouts[1]],
            out_dtype=dtype,
            scales=r.down_scales,
            format=layer.format,
        )
        dh = dh.astype(jnp.float32)
        (dz,) = pull(s[:, None] * dh)
        if "weights" in wanted:
            ds = jnp.sum(dh * h, axis=-1)
            if r.b_down is not None:
                column = jnp.pad(r.b_down[:, :, None], ((0, 0), (0, 0), (0, COLUMNS - 1)))
                ds += backward(rows, column, layout="kn", out_dtype=jnp.float32)[:, 0]
            grads["weights"] = slot_values(r, ds)
    if wanted.keys() & {*_FIRST}:
        grads |= _of_first(r, dz, wanted, layer, backward, contract)
    if "w_down" in wanted:
        weighted = (s[:, None] * h).astype(dtype)
        pair = (weighted, rows) if layer.layouts[1] == "kn" else (rows, weighted)
        grads["w_down"] = contract(*pair, r.w_down.shape[0], wanted["w_down"].dtype)
    if "b_down" in wanted:
        grads["b_down"] = _bias_gradient(r, s, rows, wanted["b_down"], dtype)
    return grads


def _of_first(
    r: Kept, dz: jax.Array, wanted: dict[str, Any], layer: Layer, backward: Any, contract: Any
) -> dict[str, jax.Array]:
    """The gradients of what z depends on."""
    dtype, layout, grads = layer.dtype, layer.layouts[0], {}
    parts = [dz] if r.w_up is None else jnp.split(dz, 2, axis=1)
    if "x" in wanted:
        in_format = functools.partial(backward, format=layer.format, out_dtype=dtype)
        for part, (w, scales) in zip(parts, _of_halves(r, layer), strict=True):
            dx = in_format(part, w, layout=_OTHER_LAYOUT[layout], scales=scales)
            grads["x"] = sum_rows(dx, r.slot_to_row, grads.get("x"))
    for name, part in zip(("w_gate_up", "w_up"), parts, strict=False):
        if name in wanted:
            # NOTE: copied, as fetching them by index takes the product twice as long.
            rows = to_rows(r, r.x)
            pair = (rows, part) if layout == "kn" else (part, rows)
            grads[name] = contract(*pair, getattr(r, name).shape[0], wanted[name].dtype)
    if "b_gate_up" in wanted:
        ones = jnp.ones(r.row_to_token.shape, jnp.float32)
        grads["b_gate_up"] = _bias_gradient(r, ones, dz, wanted["b_gate_up"], dtype)
    return grads


def _bias_gradient(r: Kept, s: jax.Array, rows: jax.Array, aval: Any, dtype: Any) -> jax.Array:
    """Sums s * row over the rows of each expert."""
    sums = _contract(r, columns_of(s, dtype), rows, aval.shape[0], jnp.float32).sum(1)
    return sums.astype(aval.dtype)


def _sum(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _out(*avals: Any, layer: Layer) -> list[_primitive.Spec]:
    r = Kept(*avals)
    rows = r.x.shape[0] if layer.finalize else r.row_to_token.shape[0]
    return [((rows, r.x.shape[1]), layer.dtype)]


def _jvp(primals: Kept, tangents: Kept, *, layer: Layer) -> Any:
    return jax.jvp(*of_moving(functools.partial(_tangent, layer=layer), primals, tangents))


moe_mlp_tangent_p = _primitive.define(
    "jaxmoe_moe_mlp_tangent",
    operands=Kept,
    out=_out,
    xla=_tangent,
    batch=functools.partial(_primitive.as_its_ops, _tangent),
    jvp=_jvp,
    transpose=_transpose,
    composed=True,
)
