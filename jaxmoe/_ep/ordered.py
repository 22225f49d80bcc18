"""The layer of `dispatch="direct"` whose tokens come in the order of experts while it runs.

peer_ordered: place [], slots [T,K], weights [T,K], residual [T,H], and of `Operands` those of this
device's tokens -> y [T,H]

A token goes to a device with the first of its experts there, so the first product begins with the
first experts while the tokens of the others are on the way. Weights are read once, as after a
dispatch; results go home as `pushed` has them, so the bits are those. Derivatives are those of the
layer and the exchange apart.
"""

from typing import Any

import jax.numpy as jnp

from jaxmoe._ep import beside, direct, peers
from jaxmoe._ep.beside import LAYER, OWN
from jaxmoe._ep.cost import ordered_pays
from jaxmoe._ep.direct import Way
from jaxmoe._jax import primitive as _primitive
from jaxmoe._mlp import op
from jaxmoe._mlp.operands import Layer, Operands

# As csrc/peers/ordered.h has it.
_MOST_PARTS = 4
# Of fewer the first part is most of the tokens, and nothing is hidden.
_LEAST_EXPERTS = 8


def why_not(a: Operands, layer: Layer, way: Way, num_bytes: int, residual: Any) -> str | None:
    """Why there is no call, or none faster than a dispatch and what stores rows."""
    if way.num_devices == 1:
        return "there is one device"
    if way.num_local < _LEAST_EXPERTS:
        return f"a device has fewer than {_LEAST_EXPERTS} experts"
    if (why := no_call(a, layer, way, num_bytes, residual)) is not None:
        return why
    pays = ordered_pays(
        way.num_devices,
        a.x.shape[0],
        a.expert_ids.shape[1],
        a.x.shape[1],
        token_itemsize=a.x.dtype.itemsize,
    )
    return None if pays else "they are estimated to hide no more than that costs"


def no_call(a: Operands, layer: Layer, way: Way, num_bytes: int, residual: Any) -> str | None:
    """Why the kernels do not have this layer, or what is sent has no room in the memory."""
    wide = beside.of_all_tokens(a, way.num_devices)
    first = beside.one_call(a, layer, way, residual, wide, layer)
    if isinstance(first, str):
        return first
    if not beside.waits(first, layer):
        return "the first product cannot wait for rows of tokens"
    return beside.no_room(a, layer, way, num_bytes, _half_bytes(a, layer, way))


def _half_bytes(a: Operands, layer: Layer, way: Way) -> int:
    (num_tokens, hidden), top_k = a.x.shape, a.expert_ids.shape[1]
    arrays = [x for x in (a.expert_ids, a.x, a.x_scales) if x is not None]
    come = sum(peers.aligned(way.num_devices * x.size * x.dtype.itemsize) for x in arrays)
    return max(come, peers.rows_bytes(num_tokens, top_k, hidden * layer.dtype.itemsize))


def _of_all(avals: Any, way: Way) -> Operands:
    """The layer's operands of those of the call, of the tokens of all devices."""
    return beside.of_all_tokens(beside.operands_of(avals), way.num_devices)


def _out(*avals: Any, way: Way, layer: Layer) -> list[_primitive.Spec]:
    del way
    named = peer_ordered_p.operands(*avals)
    return [(named.x.shape, layer.dtype)]


def _attrs(avals: Any, *, way: Way, layer: Layer) -> dict[str, Any]:
    of_layer = op.call_attrs(_of_all(avals, way), layer=layer)
    return {"layer": of_layer, "peers": direct.peer_attrs(way)}


def _scratch(avals: Any, *, way: Way, layer: Layer) -> list[_primitive.Spec]:
    """Choices of all, where rows go and when, what came, addresses, and those of the layer."""
    a = _of_all(avals, way)
    ints = jnp.dtype(jnp.int32)
    return [
        (a.expert_ids.shape, a.expert_ids.dtype),
        ((avals.x.shape[0], _MOST_PARTS // 2), ints),
        ((_MOST_PARTS + way.num_local,), ints),
        ((a.expert_ids.size, 2), ints),
        ((op.moved_rows(a, layer=layer), a.x.shape[1]), layer.dtype),
        *op.own_scratch(a, layer=layer),
    ]


def _reason(avals: Any, *, way: Way, layer: Layer) -> str | None:
    return op.call_reason(_of_all(avals, way), layer=layer)


peer_ordered_p = _primitive.define(
    "jaxmoe_peer_ordered_moe_mlp",
    out=_out,
    xla=direct.no_xla,
    batch=direct.one_by_one(lambda: peer_ordered_p),
    operands=_primitive.named_operands([*OWN, *LAYER]),
    untyped=("place",),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_ordered_moe_mlp_v1",
        attrs=_attrs,
        scratch=_scratch,
        reason=_reason,
        absent={"residual": (2, "layer.dtype"), **op.ABSENT},
    ),
)
