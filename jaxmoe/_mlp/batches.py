"""The layer on batches of rows that are with their experts already: no plan, and no row is moved.

batches: `Operands` with x [E,M,H] (quantized tokens: of E * M rows) and sizes [E] -> [E,M,H]

Expert e has the first sizes[e] rows of batch e, so that a product is one of E batches with a group
and a weight each. Rows past these are exactly 0, and nothing depends on what they hold.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxmoe._formats import PLAIN, Format, Tokens
from jaxmoe._gemm.activated import activated
from jaxmoe._gemm.gate_up import activate, of_moving
from jaxmoe._gemm.multiply import scaled_by_row
from jaxmoe._gemm.op import Product, gmm, refuse_moving
from jaxmoe._mlp.op import NEVER_MOVING, rounded, without_tokens
from jaxmoe._mlp.operands import Layer, Operands, halves, join

_FIRST = ("x", "w_gate_up", "w_up", "b_gate_up", "b_up")  # what z depends on
_SECOND = ("w_down", "b_down")  # beside z, what the rows depend on


def batches(a: Operands, sizes: jax.Array, layer: Layer) -> jax.Array:
    """Computes the rows; the derivative is of the form of `jaxmoe.expert_rows`."""
    absent = [x is None for x in a]

    def named(there: Any) -> Operands:
        rest = iter(there)
        return Operands(*(None if missing else next(rest) for missing in absent))

    @jax.custom_jvp
    def rows(sizes: jax.Array, *there: jax.Array) -> jax.Array:
        return _value(named(there), sizes, layer)[0]

    def rows_and_tangent(primals: Any, tangents: Any) -> Any:
        sizes, *there = primals
        _, *moving = (None if isinstance(t, SymbolicZero) else t for t in tangents)
        a, moved = named(there), named(moving)
        if not layer.format.gradient.frozen:
            y, z = _value(a, sizes, layer, keeps_z=True)
            return y, _tangent(a, moved, z, sizes, layer)
        names = NEVER_MOVING if a.x_scales is None else ("x", *NEVER_MOVING)
        refuse_moving("expert_batches", a.x, moved, names, layer.called)
        y = rows(*primals)
        given, plain = without_tokens(a, layer)
        given = given._replace(x=given.x.reshape(y.shape))
        z = _z(join(given, plain), sizes, plain, Tokens(given.x, None), layer.dtype)
        return y, _tangent(given, moved, z, sizes, plain)

    rows.defjvp(rows_and_tangent, symbolic_zeros=True)
    return rows(sizes, *(x for x in a if x is not None))


def _value(
    a: Operands, sizes: jax.Array, layer: Layer, keeps_z: bool = False
) -> tuple[jax.Array, Any]:
    """The rows, and if asked for z, rounded, of weights that are not quantized."""
    a = join(a, layer)
    if layer.format.master:
        a, layer = rounded(a, layer), layer.replace(format=PLAIN)
    tokens = _tokens(a, sizes, layer)
    first = tokens, a.w_gate_up, a.gate_up_scales, a.b_gate_up
    factors = _factors(*first, sizes, layer) if a.w_up is None else None
    if factors is not None and factors[2] is None:
        product, format, _ = factors
        h, *rest = activated(
            *product,
            weight_layout=layer.layouts[0],
            dtype=layer.dtype,
            format=format,
            precision=layer.precision,
            promoted=(layer.promoted or (None, None))[0],
            config=layer.configs_apart[0],
            activation=layer.activation,
            gate_up=layer.gate_up,
            keeps_z=keeps_z,
        )
        z = rest[0] if rest else None
    else:
        z = _z(a, sizes, layer, tokens, jnp.float32)
        h, z = _activated(z, layer), z.astype(layer.dtype)
    if layer.format.quantizes_tokens and not layer.activation.fused:  # which may not be 0 at 0
        h = jnp.where(_in_use(h, sizes), h, jnp.zeros((), h.dtype))
    return _second(h, a, sizes, layer), z


def _tangent(a: Operands, moved: Operands, z: jax.Array, sizes: jax.Array, layer: Layer) -> Any:
    """The tangent of the rows. Reverse mode keeps x, z and the weights."""
    z = checkpoint_name(z, "jaxmoe_z")

    @jax.checkpoint  # or it would keep the weights in the shape of batches beside them
    def first(*arrays: Any) -> jax.Array:
        a = Operands(*arrays)
        return _z(join(a, layer), sizes, layer, Tokens(a.x, None), layer.dtype)

    @jax.checkpoint  # or the backward pass would keep the activation's parts in float32
    def second(z: jax.Array, w_down: jax.Array, b_down: Any) -> jax.Array:
        return _second(_activated(z, layer), a._replace(w_down=w_down, b_down=b_down), sizes, layer)

    dz = None
    of_first = _only(moved, _FIRST)
    if any(t is not None for t in of_first):
        _, dz = jax.jvp(*of_moving(first, a, of_first))
    moving = (dz, moved.w_down, moved.b_down)
    _, dy = jax.jvp(*of_moving(second, (z, a.w_down, a.b_down), moving))
    return dy


def _only(a: Operands, names: tuple[str, ...]) -> Operands:
    """The operands of those names."""
    return Operands(*(x if n in names else None for n, x in zip(a._fields, a, strict=True)))


def _tokens(a: Operands, sizes: jax.Array, layer: Layer) -> Tokens:
    """Tokens as the first product reads them."""
    format = layer.format
    if not format.quantizes_tokens:
        return Tokens(a.x, None)
    if a.x_scales is not None:
        return Tokens(a.x, a.x_scales)
    x, scale = a.x, None if a.x_scale is None else a.x_scale.reshape(())
    if format.one_token_scale and scale is None:  # of all rows in use, whatever the others hold
        x = jnp.where(_in_use(x, sizes), x, jnp.zeros((), x.dtype))
    return format.tokens(_flat(x), scale)


def _in_use(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """[E,M,1] bool: which rows [E,M,K] belong to their expert."""
    row = jax.lax.broadcasted_iota(jnp.int32, (*rows.shape[:2], 1), 1)
    return row < sizes[:, None, None]


def _z(a: Operands, sizes: jax.Array, layer: Layer, tokens: Tokens, out_dtype: Any) -> jax.Array:
    """The first product [E,M,N] of joined operands."""
    of_first = _params(layer, 0, out_dtype)
    parts = [
        _product(tokens, w, scales, bias, sizes, layer, **of_first)
        for w, scales, bias in halves(a, layer)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)


def _activated(z: jax.Array, layer: Layer) -> jax.Array:
    return activate(z, layer.activation, layer.gate_up).astype(layer.dtype)


def _second(h: jax.Array, a: Operands, sizes: jax.Array, layer: Layer) -> jax.Array:
    """The rows [E,M,H] of activations [E,M,I], which are 0 in rows of no expert."""
    format, scales, tokens = layer.format, a.down_scales, Tokens(h, None)
    if format.quantizes_tokens and a.h_scale is None:
        tokens = format.tokens(_flat(h))
    elif format.quantizes_tokens:
        of_expert = jnp.broadcast_to(a.h_scale, h.shape[:1])
        of_row = jnp.broadcast_to(of_expert[:, None], h.shape[:2]).reshape(-1)
        of_weight = a.h_scale if a.h_scale.shape[0] == 1 else of_expert
        format, scales = format.by_expert(a.w_down, scales, of_weight)
        tokens = format.tokens(_flat(h), of_row)
    second = layer.replace(format=format)
    return _product(
        *(tokens, a.w_down, scales, a.b_down, sizes, second), **_params(layer, 1, layer.dtype)
    )


def _params(layer: Layer, which: int, out_dtype: Any) -> dict[str, Any]:
    """The parameters of one of the two products."""
    promoted: Any = (layer.promoted or (None, None))[which]
    config = layer.configs_apart[which]
    layout = layer.layouts[which]
    return {
        "weight_layout": layout,
        "out_dtype": out_dtype,
        "dtype": layer.dtype,
        "precision": layer.precision,
        "promoted": promoted,
        "config": config,
    }


def _product(
    tokens: Tokens,
    w: jax.Array,
    scales: Any,
    bias: Any,
    sizes: jax.Array,
    layer: Layer,
    **params: Any,
) -> jax.Array:
    """Multiplies the rows of each batch by the weights of its expert."""
    product, format, of_rows = _factors(tokens, w, scales, bias, sizes, layer)
    if of_rows is not None:
        return scaled_by_row(product, of_rows, format, **params)
    (out,) = gmm(*product, format=format, **params)
    return out


def _factors(
    tokens: Tokens, w: jax.Array, scales: Any, bias: Any, sizes: jax.Array, layer: Layer
) -> tuple[Product, Format, Any]:
    """The product of E batches of one group, its format, and what multiplies the sums of rows."""
    f = layer.format.factors(tokens, scales, layer.dtype)
    values, (x_scales, scales), format = f.tokens.values, (f.tokens.scales, f.scales), f.format
    num_experts = sizes.shape[0]
    if values.ndim == 2:
        values = values.reshape(num_experts, values.shape[0] // num_experts, values.shape[1])
    by_batch = lambda a: a.reshape(*values.shape[:2], *a.shape[1:])  # noqa: E731
    if x_scales is not None and x_scales.ndim == 0:  # a batch has a scale for each of its rows
        x_scales = jnp.broadcast_to(x_scales, (num_experts * values.shape[1],))
        format, scales = format.by_row(w, scales)
    product = Product(
        x=values,
        w=w[:, None],
        starts=jnp.zeros_like(sizes)[:, None],
        sizes=sizes[:, None],
        bias=None if bias is None else bias[:, None],
        x_scales=None if x_scales is None else by_batch(x_scales),
        w_scales=None if scales is None else scales[:, None],
    )
    return product, format, None if f.of_rows is None else by_batch(f.of_rows)


def _flat(x: jax.Array) -> jax.Array:
    """[E,M,K] -> [E * M,K]."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])
