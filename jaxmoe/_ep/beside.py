"""The layer of `dispatch="direct"` beside its exchange, by copy engines.

peer_beside: place [], slots [T,K], weights [T,K], residual [T,H], and of `Operands` those of this
device's tokens -> y [T,H]

The first product begins with the tokens that are here, while those of the next devices come; the
second one takes the tokens of a device or two after the other, and sums of these go home while it
computes the next. So an expert's weights are read more than once: that costs nothing where each
time there are enough rows. Parts of a token are added as `direct.bring`
adds them, so the bits are those. Derivatives are those of the layer and the exchange apart.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._ep import direct, peers
from jaxmoe._ep.cost import beside_pays
from jaxmoe._ep.direct import Way
from jaxmoe._ep.pushed import several_calls
from jaxmoe._ep.slots import local_ids
from jaxmoe._gemm.tiles import TILES, GemmConfig
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._mlp import op
from jaxmoe._mlp.configs import configs_of
from jaxmoe._mlp.operands import Layer, Operands, join

# Of a layer, those that the call takes.
LAYER = (
    *("x", "x_scales", "w_gate_up", "gate_up_scales", "w_up"),
    *("w_down", "down_scales", "b_gate_up", "b_down", "x_scale", "h_scale"),
)
# Rows that an expert has of a device's tokens, in the mean, from which on products take longer than
# reading its weights for each device.
_LEAST_ROWS = 192
OWN = ("place", "slots", "weights", "residual")
OF_TOKENS = ("x", "x_scales", "expert_ids", "weights")


def why_not(a: Operands, layer: Layer, way: Way, num_bytes: int, residual: Any) -> str | None:
    """Why there is no call, or none faster than a dispatch, the layer and what brings sums home."""
    n = way.num_devices
    if n == 1:
        return "there is one device"
    if a.expert_ids.size < _LEAST_ROWS * n * layer.num_local_experts:
        return f"an expert has fewer than {_LEAST_ROWS} rows of a device's tokens in the mean"
    first = _gate_up(a, layer, way, num_bytes, residual)
    if isinstance(first, str):
        return first
    gate_up = (w.nbytes for w in (a.w_gate_up, a.w_up) if w is not None)
    pays = beside_pays(
        way.num_devices,
        a.x.shape[0],
        a.expert_ids.shape[1],
        a.x.shape[1],
        layer.intermediate(a.w_down),
        token_itemsize=a.x.dtype.itemsize,
        itemsize=layer.dtype.itemsize,
        gate_up_bytes=sum(gate_up),
        down_bytes=a.w_down.nbytes,
        fp8=a.x_scales is not None,
        gathers=first.gather,
    )
    return None if pays else "they are estimated to hide no more than that costs"


def no_call(a: Operands, layer: Layer, way: Way, num_bytes: int, residual: Any) -> str | None:
    """Why the kernels do not have this layer, or what is sent has no room in the memory."""
    first = _gate_up(a, layer, way, num_bytes, residual)
    return first if isinstance(first, str) else None


def _gate_up(
    a: Operands, layer: Layer, way: Way, num_bytes: int, residual: Any
) -> GemmConfig | str:
    """The configuration of the first product, or why there is no call.

    Products must read x as it travels, and tiles that fetch its rows have a multiprocessor each:
    only these wait for them.
    """
    wide, of_all = _of_all(a, layer, way)
    first = one_call(a, layer, way, residual, wide, of_all)
    if isinstance(first, str):
        return first
    if first.gather and not waits(first, layer):
        return "tiles of the first product cannot wait for rows of tokens that they fetch"
    if (why := no_room(a, layer, way, num_bytes, _half_bytes(a, layer, way))) is not None:
        return why
    return first


def one_call(
    a: Operands, layer: Layer, way: Way, residual: Any, wide: Operands, of_all: Layer
) -> GemmConfig | str:
    """The configuration of the first product of a layer with its exchange, or why it is no call.

    `wide`, `of_all`: of the tokens of all devices.
    """
    if not way.memory:
        return "there is no memory of GPUs"
    if a.x.shape[0] == 0 or a.expert_map is not None:
        return "no kernel has that layer"
    if residual is not None and residual.dtype != layer.dtype:
        return f"residual is {_checks.dtype_name(residual.dtype)}, not the dtype of the layer"
    apart = layer.format.quantizes_tokens and (a.x_scales is None or a.x_scales.ndim == 0)
    if apart or a.x_scale is not None or op.rounds_tokens(a, layer):
        return "products read no tokens as they travel: these are quantized where they arrive"
    if (why := several_calls(wide, of_all)) is not None:
        return f"the layer is no one call: {why}"
    return configs_of(join(wide, of_all), of_all)[0]


def waits(first: GemmConfig, layer: Layer) -> bool:
    """Whether the first product waits for rows that come while it runs, as it fetches them."""
    return first.gather and not layer.format.packed and TILES.get(first.tile) == 1


def no_room(a: Operands, layer: Layer, way: Way, num_bytes: int, half: int) -> str | None:
    """Why the memory has no room for a half of so many bytes, or for the layer's gradient."""
    (num_tokens, hidden), top_k = a.x.shape, a.expert_ids.shape[1]
    scales = 0 if a.x_scales is None else math.prod(a.x_scales.shape[1:])
    sizes = num_tokens, top_k, way.num_devices, hidden * a.x.dtype.itemsize, top_k + scales
    row, quantized = hidden * layer.dtype.itemsize, a.x_scales is not None
    needed = max(peers.total_bytes(half), peers.needed_bytes(*sizes, row, quantized=quantized))
    return None if needed <= num_bytes else f"it needs {needed} bytes, and {num_bytes} are open"


def _half_bytes(a: Operands, layer: Layer, way: Way) -> int:
    num_tokens, hidden = a.x.shape
    there = [x for name in OF_TOKENS if (x := getattr(a, name)) is not None]
    own = sum(peers.aligned(x.size * x.dtype.itemsize) for x in there)
    row = hidden * layer.dtype.itemsize
    return max(own, peers.combine_bytes(num_tokens, way.num_devices, row, 0))


def of_all_tokens(a: Any, num_devices: int) -> Operands:
    """The shapes of the tokens of all devices."""

    def wide(name: str, x: Any) -> Any:
        if x is None or name not in OF_TOKENS or x.ndim == 0:
            return x
        return jax.ShapeDtypeStruct((num_devices * x.shape[0], *x.shape[1:]), x.dtype)

    return a._replace(**{name: wide(name, getattr(a, name)) for name in OF_TOKENS})


def _of_all(a: Any, layer: Layer, way: Way) -> tuple[Operands, Layer]:
    """The shapes of the tokens of all devices, and the layer of their groups."""
    n = way.num_devices
    groups = n * layer.num_local_experts
    shapes = of_all_tokens(a, n)
    return shapes, layer.replace(num_experts=n * groups, num_local_experts=groups)


def layer_op(
    a: Operands,
    layer: Layer,
    *,
    way: Way,
    residual: jax.Array | None,
    moving: str = "",
    call: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes the layer of the tokens of all devices, and brings this one's results home.

    Args:
      a: of this device's tokens, with slots for ids.
      layer: one that has a call, over all experts.
      way: the exchange.
      residual: [T, H] or None.
      moving: what the way of derivatives says.
      call: the primitive that does both; by default `peer_beside_p`.

    Returns:
      ([T, H],)
    """
    there = [x is not None for x in (residual, *a)]
    index = jax.lax.axis_index(way.axis_name)
    _, *given = _primitive.match_varying([index, *(x for x in (residual, *a) if x is not None)])

    def named(arrays: tuple[jax.Array, ...]) -> tuple[Any, Operands]:
        rest = iter(arrays)
        filled = [next(rest) if is_there else None for is_there in there]
        return filled[0], Operands(*filled[1:])

    def apart(_place: jax.Array, *arrays: jax.Array) -> jax.Array:
        residual, a = named(arrays)
        top_k, small, scales = a.expert_ids.shape[1], a.weights, a.x_scales
        if scales is not None and scales.ndim:
            small = jnp.concatenate([small, scales.reshape(scales.shape[0], -1)], axis=1)
        quiet = way._replace(says="")
        all_slots, tokens, small = direct.send(quiet, a.expert_ids, a.x, small)
        if scales is not None and scales.ndim:
            scales = small[:, top_k:].reshape(tokens.shape[0], *scales.shape[1:])
        ids = local_ids(all_slots, way.num_local, jax.lax.axis_index(way.axis_name))
        weights = small[:, :top_k]
        b = a._replace(x=tokens, expert_ids=ids, weights=weights, x_scales=scales)
        (sums,) = op.layer_op(b, layer)
        return direct.bring(way._replace(says=moving), a.expert_ids, all_slots, sums, residual)

    def kernels(place: jax.Array, *arrays: jax.Array) -> jax.Array:
        residual, a = named(arrays)
        joined = join(a, layer)
        rest = (getattr(joined, name) for name in LAYER)
        own = place, a.expert_ids, a.weights, residual
        return (call or peer_beside_p)(*own, *rest, way=way, layer=layer)[0]

    return (direct.by_kernels(kernels, apart)(direct.place_of(way), *given),)


def operands_of(avals: Any) -> Operands:
    """The layer's of those of the call, of this device's tokens."""
    named = {name: getattr(avals, name) for name in LAYER}
    return Operands(expert_ids=avals.slots, weights=avals.weights, **named)


def _given(avals: Any, layer: Layer, way: Way) -> tuple[Operands, Layer]:
    """What `_of_all` makes of the operands of the call."""
    return _of_all(operands_of(avals), layer, way)


def _out(*avals: Any, way: Way, layer: Layer) -> list[_primitive.Spec]:
    del way
    named = peer_beside_p.operands(*avals)
    return [(named.x.shape, layer.dtype)]


def _attrs(avals: Any, *, way: Way, layer: Layer) -> dict[str, Any]:
    a, of_all = _given(avals, layer, way)
    return {"layer": op.call_attrs(a, layer=of_all), "peers": direct.peer_attrs(way)}


def _scratch(avals: Any, *, way: Way, layer: Layer) -> list[_primitive.Spec]:
    """Sums, what there is of all tokens, words that say what came, and those of the layer."""
    a, of_all = _given(avals, layer, way)
    n = way.num_devices
    scales = ((0,), jnp.float32) if a.x_scales is None else (a.x_scales.shape, a.x_scales.dtype)
    return [
        (a.x.shape, layer.dtype),
        *((x.shape, x.dtype) for x in (a.expert_ids, a.weights, a.x)),
        scales,
        ((3 * n + 4 * n * way.num_local,), jnp.dtype(jnp.int32)),
        ((a.expert_ids.size, a.x.shape[1]), layer.dtype),
        *op.own_scratch(a, layer=of_all),
    ]


def _reason(avals: Any, *, way: Way, layer: Layer) -> str | None:
    a, of_all = _given(avals, layer, way)
    return op.call_reason(a, layer=of_all)


peer_beside_p = _primitive.define(
    "jaxmoe_peer_beside_moe_mlp",
    out=_out,
    xla=direct.no_xla,
    batch=direct.one_by_one(lambda: peer_beside_p),
    operands=_primitive.named_operands([*OWN, *LAYER]),
    untyped=("place",),
    cuda=_primitive.CudaTarget(
        "jaxmoe_peer_beside_moe_mlp_v1",
        attrs=_attrs,
        scratch=_scratch,
        reason=_reason,
        absent={"residual": (2, "layer.dtype"), **op.ABSENT},
    ),
)
