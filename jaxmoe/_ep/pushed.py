"""The layer of tokens that were dispatched, whose second product stores rows where tokens are from.

peer_moe_mlp: place [], slots [T,K], own_weights [T,K], own_residual [T,H], and of `Operands` those
of the tokens of all devices -> y [T,H]

Each device stores the row of choice k of token t in the memory of that token's device, while the
product goes on, and that device adds up what devices have stored there as `jaxmoe.finalize` does.
Derivatives are those of the layer and the exchange apart, `direct.bring`, whose cotangents travel
once a device and not once a choice.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._ep import direct, peers
from jaxmoe._ep.direct import Sent, Way
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._mlp import op
from jaxmoe._mlp.configs import configs_of
from jaxmoe._mlp.operands import Layer, Operands, join

# Of a layer, those that the call takes. Weights and residual are this device's own.
_LAYER = (
    *("x", "x_scales", "expert_ids", "w_gate_up", "gate_up_scales", "w_up"),
    *("w_down", "down_scales", "b_gate_up", "b_down", "expert_map", "x_scale", "h_scale"),
)
_OWN = ("place", "slots", "own_weights", "own_residual")


def why_not(a: Operands, layer: Layer, sent: Sent) -> str | None:
    """Why the layer of what was sent is not one call, or its rows have no room; None if it is."""
    if not sent.way.memory:
        return "there is no memory of GPUs"
    if (why := several_calls(a, layer)) is not None:
        return f"the layer is no one call: {why}"
    if sent.residual is not None and sent.residual.dtype != layer.dtype:
        return f"residual is {_checks.dtype_name(sent.residual.dtype)}, not the dtype of the layer"
    num_tokens, top_k = sent.slots.shape
    half = peers.rows_bytes(num_tokens, top_k, a.x.shape[1] * layer.dtype.itemsize)
    if (needed := peers.total_bytes(half)) > sent.num_bytes:
        return f"rows need {needed} bytes of peer memory, and {sent.num_bytes} are open"
    return None


def several_calls(a: Operands, layer: Layer) -> str | None:
    """Why the layer of these operands is no call of the kernels by itself; None if it is."""
    a = jax.tree.map(jax.typeof, join(a, layer))
    absent = tuple(name for name, x in zip(a._fields, a, strict=True) if x is None)
    return op.composed_reason(absent, layer) or op.call_reason(a, layer=layer)


def layer_op(
    a: Operands, layer: Layer, *, sent: Sent, weights: jax.Array, moving: str = ""
) -> tuple[jax.Array, ...]:
    """Computes the layer of tokens that were sent, and brings it home.

    Args:
      a: of the tokens of all devices; its weights are read for derivatives alone.
      layer: one that has no reason `why_not`.
      sent: the dispatch.
      weights: [T, K] of this device's own tokens.
      moving: what the way of derivatives says.

    Returns:
      ([T, H],), of these tokens.
    """
    way = sent.way
    own = [sent.slots, sent.all_slots, weights, sent.residual]
    there = [x is not None for x in (*own, *a)]
    index = jax.lax.axis_index(way.axis_name)
    _, *given = _primitive.match_varying([index, *(x for x in (*own, *a) if x is not None)])

    def named(arrays: tuple[jax.Array, ...]) -> tuple[list[Any], Operands]:
        rest = iter(arrays)
        filled = [next(rest) if is_there else None for is_there in there]
        return filled[: len(own)], Operands(*filled[len(own) :])

    def apart(_place: jax.Array, *arrays: jax.Array) -> jax.Array:
        (slots, all_slots, _, residual), a = named(arrays)
        (sums,) = op.layer_op(a, layer)
        return direct.bring(way._replace(says=moving), slots, all_slots, sums, residual)

    def kernels(place: jax.Array, *arrays: jax.Array) -> jax.Array:
        (slots, _, weights, residual), a = named(arrays)
        joined = join(a, layer)
        of_all = (getattr(joined, name) for name in _LAYER)
        return peer_moe_mlp_p(place, slots, weights, residual, *of_all, way=way, layer=layer)[0]

    return (direct.by_kernels(kernels, apart)(direct.place_of(way), *given),)


def _operands(avals: Any) -> Operands:
    """Those of the layer of the tokens of all devices, as it would be without peers."""
    weights = jax.ShapeDtypeStruct(avals.expert_ids.shape, jnp.float32)
    return Operands(weights=weights, **{name: getattr(avals, name) for name in _LAYER})


def _out(*avals: Any, way: Way, layer: Layer) -> list[_primitive.Spec]:
    del way
    named = peer_moe_mlp_p.operands(*avals)
    return [((named.slots.shape[0], named.x.shape[1]), layer.dtype)]


def _launched(a: Operands, layer: Layer) -> Layer:
    """The layer as its call runs it: no kernel of packed weights for both products has peers."""
    if not layer.format.packed:
        return layer
    first, second = configs_of(a, layer)
    return layer.replace(config=(dataclasses.replace(first, one_kernel=False), second))


def _attrs(avals: Any, *, way: Way, layer: Layer) -> dict[str, Any]:
    a = _operands(avals)
    of_layer = op.call_attrs(a, layer=_launched(a, layer))
    return {"layer": of_layer, "peers": direct.peer_attrs(way)}


def _scratch(avals: Any, *, way: Way, layer: Layer) -> list[_primitive.Spec]:
    """Addresses of rows, copies of tokens, and what the layer's call has beside rows."""
    del way
    a = _operands(avals)
    return [
        ((a.expert_ids.size, 2), jnp.dtype(jnp.int32)),
        ((op.moved_rows(a, layer=layer), a.x.shape[1]), layer.dtype),
        *op.own_scratch(a, layer=_launched(a, layer)),
    ]


def _reason(avals: Any, *, way: Way, layer: Layer) -> str | None:
    del way
    return op.call_reason(_operands(avals), layer=layer)


peer_moe_mlp_p = _primitive.define(
    "jaxmoe_peer_moe_mlp",
    out=_out,
    xla=direct.no_xla,
    batch=direct.one_by_one(lambda: peer_moe_mlp_p),
    operands=_primitive.named_operands([*_OWN, *_LAYER]),
    untyped=("place",),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_moe_mlp_v1",
        attrs=_attrs,
        scratch=_scratch,
        reason=_reason,
        absent={"own_residual": (2, "layer.dtype"), **op.ABSENT},
    ),
)
