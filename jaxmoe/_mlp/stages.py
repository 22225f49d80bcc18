"""The layer as its stages, made of the other ops: what every device but a Hopper GPU runs.

Devices that share a layer run the same stages and exchange something between them (`Exchange`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmoe._formats import Format, Tokens
from jaxmoe._gemm.gate_up import activate
from jaxmoe._gemm.multiply import multiply
from jaxmoe._jax import sizes as _sizes
from jaxmoe._mlp.operands import Layer, Operands, halves
from jaxmoe.finalize import finalize
from jaxmoe.permute import permute
from jaxmoe.plan import Plan, plan


def _same(a: Any) -> Any:
    return a


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives between the stages, for devices that share a layer.

    Attributes:
      between: completes a device's first product: all columns that its activations need.
      after: turns its activations into those that its part of w_down contracts.
      tokens: quantizes the activations; None: as the format does, for one device.
      own: takes from [G] the groups of the experts whose weights are here.
    """

    between: Callable[[jax.Array], jax.Array] = _same
    after: Callable[[jax.Array], jax.Array] = _same
    tokens: Callable[[jax.Array], Tokens] | None = None
    own: Callable[[jax.Array], jax.Array] = _same


ALONE = Exchange()


def order_of(a: Operands, layer: Layer) -> Plan:
    """The plan of the layer's choices, under the name that rematerialization knows it by."""
    order = plan(a.expert_ids, expert_map=a.expert_map, **layer.window)
    return jax.tree.map(lambda index: checkpoint_name(index, "jaxmoe_plan"), order)


def product(
    tokens: Tokens,
    w: jax.Array,
    scales: jax.Array | None,
    bias: jax.Array | None,
    expert_offsets: jax.Array,
    *,
    format: Format,
    layout: str,
    dtype: Any,
    out_dtype: Any,
    own: Callable[[jax.Array], jax.Array] = _same,
    precision: Any = None,
    promoted: bool | None = None,
    config: Any = None,
) -> jax.Array:
    """Multiplies rows in expert order by the weights of their experts, float32 masters rounded."""
    starts, sizes = own(expert_offsets[:-1]), own(jnp.diff(expert_offsets))
    return multiply(
        *(tokens, w, scales, bias, starts, sizes),
        format=format,
        weight_layout=layout,
        dtype=dtype,
        out_dtype=out_dtype,
        precision=precision,
        promoted=promoted if format.quantized else None,
        config=config,
    )


def rows_of(
    a: Operands, layer: Layer, *, exchange: Exchange = ALONE, z_dtype: Any = jnp.float32
) -> tuple[jax.Array, Plan]:
    """Computes the layer up to finalize; its operands are joined."""
    format, order = layer.format, order_of(a, layer)
    configs = layer.configs_apart
    promoted = layer.promoted or (None, None)
    in_order = functools.partial(
        product,
        expert_offsets=order.expert_offsets,
        dtype=layer.dtype,
        own=exchange.own,
        precision=layer.precision,
    )
    rows = _gathered(a, layer, order)
    first = functools.partial(
        in_order,
        rows,
        format=format,
        layout=layer.layouts[0],
        out_dtype=z_dtype,
        promoted=promoted[0],
        config=configs[0],
    )
    parts = [first(*of_half) for of_half in halves(a, layer)]
    z = exchange.between(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1))
    h = activate(z, layer.activation, layer.gate_up).astype(layer.dtype)
    if format.quantizes_tokens and not layer.activation.fused:  # which may not be 0 at 0
        used = jnp.arange(h.shape[0], dtype=jnp.int32) < order.expert_offsets[-1]
        h = jnp.where(used[:, None], h, 0)
    down_format, w_scales = format, a.down_scales
    if not format.quantizes_tokens:
        tokens = Tokens(exchange.after(h), None)
    elif a.h_scale is not None:
        # A static scale of each expert is one of each row of its group.
        of_expert = jnp.broadcast_to(a.h_scale, (layer.num_local_experts,))
        sizes = order.group_sizes
        of_row = jnp.repeat(of_expert, sizes, total_repeat_length=h.shape[0])
        of_weight = a.h_scale if a.h_scale.shape[0] == 1 else exchange.own(of_expert)
        down_format, w_scales = format.by_expert(a.w_down, w_scales, of_weight)
        tokens = down_format.tokens(exchange.after(h), of_row)
    else:
        # h is 0 in rows of no group: they are no maximum.
        tokens = (exchange.tokens or format.tokens)(h)
    rows = in_order(
        tokens,
        a.w_down,
        w_scales,
        a.b_down,
        format=down_format,
        layout=layer.layouts[1],
        out_dtype=layer.dtype,
        promoted=promoted[1],
        config=configs[1],
    )
    return rows, order


def result(rows: jax.Array, order: Plan, a: Operands, layer: Layer) -> tuple[jax.Array, ...]:
    """The results of the layer, made of its rows."""
    if not layer.finalize:
        return rows, order.slot_to_row
    return (finalize(rows, order, a.weights, residual=a.residual),)


def in_parts(a: Operands, layer: Layer, exchange: Exchange) -> tuple[jax.Array, ...]:
    """The layer in parts. Plain products are rounded before devices exchange them."""
    z_dtype = jnp.float32 if layer.format.quantized else layer.dtype
    rows, order = rows_of(a, layer, exchange=exchange, z_dtype=z_dtype)
    return result(rows, order, a, layer)


def _gathered(a: Operands, layer: Layer, order: Plan) -> Tokens:
    """The tokens in expert order, as the first product reads them."""
    format = layer.format
    if not format.quantizes_tokens:
        return Tokens(permute(a.x, order), None)
    tokens = Tokens(a.x, a.x_scales)
    if a.x_scales is None:
        tokens = format.tokens(a.x, None if a.x_scale is None else a.x_scale.reshape(()))
    token = jnp.maximum(order.row_to_token, 0)  # rows of no group are in no product
    scales = tokens.scales
    assert scales is not None
    values = _sizes.with_a_row(tokens.values)
    return Tokens(values[token], _sizes.with_a_row(scales)[token] if scales.ndim else scales)
