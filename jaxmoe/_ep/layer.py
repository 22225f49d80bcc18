"""One device's part of the expert-parallel layer: dispatch, its own experts, combine."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxmoe import mlp
from jaxmoe._ep import beside as _beside
from jaxmoe._ep import direct as _direct
from jaxmoe._ep import exchange as _ep_exchange
from jaxmoe._ep import hops as _hops
from jaxmoe._ep import ordered as _ordered
from jaxmoe._ep import pushed as _pushed
from jaxmoe._ep.checks import OPTIONS, Setup
from jaxmoe._ep.direct import OP, Sent
from jaxmoe._ep.slots import local_ids, slots_of
from jaxmoe._jax import checks as _checks
from jaxmoe._mlp import op
from jaxmoe._mlp.operands import Layer, Operands
from jaxmoe.experts import Experts
from jaxmoe.quantize import QuantizedArray, quantize_tokens, scales_shape
from jaxmoe.routing import Routing

_DERIVATIVE = "a derivative is taken"
_WORD = 4  # FP8 values travel as uint32, which every collective and every device knows


def run(
    s: Setup,
    x: jax.Array | QuantizedArray,
    routing: Routing,
    experts: Experts,
    *,
    expert_map: jax.Array | None,
    residual: jax.Array | None,
    num_chunks: int,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Computes the layer of checked arguments. Returns (y, choices that are left out)."""
    if x.shape[0] == 0:  # which XLA's collectives refuse
        return jnp.zeros(x.shape, x.dtype), jnp.int32(0)
    as_they_are = _only_direct(s) and expert_map is None
    if as_they_are and s.num_experts == s.num_local * s.axis.size:
        slots = routing.expert_ids  # others go nowhere: not a kernel between route and dispatch
    else:
        slots = slots_of(
            routing.expert_ids,
            expert_map,
            num_experts=s.num_experts,
            num_local=s.num_local,
            device=s.axis.index,
            own_first=s.dispatch != "replicated",
        )
    exists = (routing.expert_ids >= 0) & (routing.expert_ids < s.num_experts)
    lost = jnp.sum(exists & (slots < 0), dtype=jnp.int32)
    x_scale = experts.x_scale
    if s.format.one_token_scale and x_scale is None and not isinstance(x, QuantizedArray):
        x_scale = _common_scale(x, s)
    if s.quantizes and not isinstance(x, QuantizedArray):
        x, x_scale = _quantized(x, x_scale, s.format.token_array), None
    experts = dataclasses.replace(experts, x_scale=x_scale)
    if s.tensor_axis:
        experts = _bias_once(experts, s.tensor_axis)
    local = functools.partial(_local, s, experts=experts, options=options)
    own = None
    if s.own_apart:
        with jax.named_scope("own_tokens"):
            # A device has about 1/n of its own tokens' choices.
            own = local((x, slots, routing.weights), slots.shape[0] // s.axis.size)
        slots = jnp.where(slots // s.num_local == s.axis.index, -1, slots)
    ys: list[jax.Array] = []
    size = slots.shape[0] // num_chunks
    for first in range(0, num_chunks * size, size):
        part = functools.partial(_rows, first=first, size=size)
        own_part = None if own is None else part(own)
        added = None if residual is None else part(residual)
        sent = _part(x, part), part(slots), part(routing.weights)
        y, dropped = _chunk(s, local, *sent, own_part, added, ys)
        ys.append(y)
        lost += dropped
    return ys[0] if len(ys) == 1 else jnp.concatenate(ys), lost


def _chunk(
    s: Setup,
    local: Any,
    x: Any,
    slots: jax.Array,
    weights: jax.Array,
    own: jax.Array | None,
    residual: jax.Array | None,
    before: list[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Computes one chunk. `own`: this device's part of it; `before`: results of earlier chunks."""
    sums = f"tensor_axis={s.tensor_axis!r}" if s.tensor_axis else "experts lie along several axes"
    around = ""
    if _only_direct(s) and len(s.hops) == 1 and not s.tensor_axis:
        y = _beside_products(s, x, Routing(slots, weights), residual, **local.keywords)
        if not isinstance(y, str):
            return y, jnp.int32(0)
        around = y
    payload = _pack(x, weights, words=not _only_direct(s))
    added = None if s.tensor_axis else residual
    if own is not None:
        added = own if added is None else _ep_exchange.plus(own, added, jnp.float32)
    row = x.shape[1] * jnp.dtype(x.dtype).itemsize
    with jax.named_scope(f"dispatch_{s.dispatch}"):
        out = _hops.travel(s.hops, payload, added, slots, row, sums=sums)
    tokens, arrived_weights = _unpack(out.rows, x, slots.shape[1])
    assert out.slots is not None
    received = tokens, out.slots, arrived_weights
    combine = out.combine
    if out.sent is not None and not s.tensor_axis:
        y = local(received, slots.shape[0], home=_Home(out.sent, weights, around))
        if not isinstance(y, str):
            return y, out.lost
        says = s.hops[0].says("sums", _hops.sums_travel(y))
        combine = functools.partial(combine, says=says)
    y = local(received, slots.shape[0])
    if before:
        # Or XLA makes one collective of the sums of all chunks, which then waits for the last.
        y, held = jax.lax.optimization_barrier((y, before[-1]))
        if jax.typeof(held) == jax.typeof(before[-1]):  # older JAX: varies over the axes of y too
            before[-1] = held
    with jax.named_scope(f"combine_{s.dispatch}"):
        y = combine(y)
        if s.tensor_axis:
            whole = jax.lax.psum(y.astype(s.axis.sum_dtype), s.tensor_axis)
            y = _ep_exchange.plus(whole, residual, y.dtype)
    return y, out.lost


def _only_direct(s: Setup) -> bool:
    return all(hop.dispatch == "direct" for hop in s.hops)


class _Home(NamedTuple):
    """Where rows go that are not added up here.

    Attributes:
      sent: what was dispatched.
      weights: [T, K] of this device's own tokens.
      around: why the exchange does not run beside the products.
    """

    sent: Sent
    weights: jax.Array
    around: str


def _beside_products(
    s: Setup,
    x: Any,
    routing: Routing,
    residual: jax.Array | None,
    *,
    experts: Experts,
    options: dict[str, Any],
) -> jax.Array | str:
    """The layer of tokens that come while it runs, or why that is no call, or slower.

    `routing`: to slots.
    """
    (hop,) = s.hops
    assert hop.memory is not None
    way = _direct.way_of(hop.axis.name, s.num_local, hop.memory)
    a, layer, recompute = _prepared(x, routing, experts, options, s.num_local * s.axis.size)
    given = a, layer, way, hop.memory.num_bytes, residual
    around = "its processes have several GPUs each, whose memory copy engines do not reach"
    call, says = None, ""
    if hop.memory.copies:
        around = _beside.why_not(*given)
    if around is None:
        how = "tokens come and sums go beside the products, which is estimated to be faster"
        call, says = _beside.peer_beside_p, hop.says("all", how)
    elif (why := _ordered.why_not(*given)) is None:
        how = "tokens come in the order of experts while the first product runs, the second stores"
        apart = "the exchange is not beside the products"
        says = hop.says("rows", f"{how} rows on the devices of tokens; {apart}: {around}")
        call = _ordered.peer_ordered_p
    else:
        return f"{around}; nor in the order of experts: {why}"
    way = way._replace(says=says)
    moving = hop.says("sums", _hops.sums_travel(_DERIVATIVE))
    bind = functools.partial(_beside.layer_op, way=way, residual=residual, moving=moving, call=call)
    with jax.named_scope("dispatch_direct"):
        return mlp.bound(bind, a, layer, recompute)[0]


def _prepared(
    x: Any,
    routing: Routing,
    experts: Experts,
    options: dict[str, Any],
    num_experts: int,
) -> tuple[Operands, Layer, str | None]:
    """Operands and layer of a call of its own, and what its gradient computes again."""
    rest = {"window": (num_experts, 0, None), "residual": None, "gather_weights": None}
    asked = {name: options.get(name, default) for name, default in OPTIONS.items()}
    a, layer = mlp.prepared("moe_mlp", x, routing, experts, finalize=True, **rest, **asked)
    return a, layer, asked["recompute"]


def _local(
    s: Setup,
    received: tuple[Any, jax.Array, jax.Array],
    num_tokens: int,
    *,
    experts: Experts,
    options: dict[str, Any],
    home: _Home | None = None,
) -> Any:
    """Runs this device's experts on what it received. Returns the sums of their rows.

    With `home` the results of this device's own tokens, or why that is no one call.
    """
    x, slots, weights = received
    ids = local_ids(slots, s.num_local, s.axis.index)
    # The tiles are chosen for R / num_experts rows an expert, R = M * K, most of which stay empty:
    # this device's experts together get about T * K, or their part of those if all have the same.
    sharing = s.axis.size if s.dispatch == "replicated" else 1
    num_experts = -(-x.shape[0] * s.num_local * sharing // max(num_tokens, 1))
    num_experts = max(num_experts, s.num_local, ids.shape[1])
    given = x, Routing(ids, weights), experts
    if home is None:
        return mlp.moe_mlp(*given, num_experts=num_experts, **options)
    a, layer, recompute = _prepared(*given, options, num_experts)
    a, layer = op.in_numbers(a, layer)
    if (why := _pushed.why_not(a, layer, home.sent)) is not None:
        return why
    own = home.weights
    if options.get("apply_weight_on_input"):  # tokens were multiplied by them
        own = jnp.ones_like(own)
    (hop,) = s.hops
    stored = "the second product stores rows on the devices of tokens"
    says = hop.says("rows", f"{stored}; the exchange is not beside the products: {home.around}")
    moving = hop.says("sums", _hops.sums_travel(_DERIVATIVE))
    sent = home.sent._replace(way=home.sent.way._replace(says=says))
    bind = functools.partial(_pushed.layer_op, sent=sent, weights=own, moving=moving)
    with jax.named_scope(f"combine_{s.dispatch}"):
        return mlp.bound(bind, a, layer, recompute)[0]


def _pack(x: Any, weights: jax.Array, *, words: bool) -> tuple[jax.Array, jax.Array]:
    """Makes two arrays of each token: itself, and the small float32 numbers beside it.

    These are weights, and of quantized tokens their scales. Such go as `words`, which every
    collective takes, at the price of a copy before and after it; and wherever their bytes are no
    whole number of these.
    """
    if not isinstance(x, QuantizedArray):
        return x, weights
    small = weights
    if x.scales.ndim:  # beside weights, which have derivatives
        scales = jax.lax.stop_gradient(x.scales.reshape(x.scales.shape[0], -1))
        small = jnp.concatenate([weights, scales], axis=1)
    if not words and x.values.shape[1] % _WORD == 0:
        return jax.lax.stop_gradient(x.values), small
    values = jax.lax.bitcast_convert_type(x.values, jnp.uint8)
    values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % _WORD)))
    values = values.reshape(values.shape[0], values.shape[1] // _WORD, _WORD)
    return jax.lax.bitcast_convert_type(values, jnp.uint32), small


def _unpack(rows: tuple[jax.Array, ...], x: Any, top_k: int) -> tuple[Any, jax.Array]:
    """Returns (tokens, weights) of the arrays of `_pack`."""
    tokens, small = rows
    if not isinstance(x, QuantizedArray):
        return tokens, small
    count = tokens.shape[0]
    values = tokens
    if tokens.dtype != x.values.dtype:
        values = jax.lax.bitcast_convert_type(tokens, jnp.uint8).reshape(count, -1)
        values = jax.lax.bitcast_convert_type(values[:, : x.values.shape[1]], x.values.dtype)
    scales = x.scales
    if scales.ndim:
        scales = jax.lax.stop_gradient(small[:, top_k:])
        scales = scales.reshape(count, *x.scales.shape[1:])
    quantized = QuantizedArray(values, scales, x.format, x.layout, x.dtype)
    return quantized, small[:, :top_k]


def _part(x: Any, part: Any) -> Any:
    if not isinstance(x, QuantizedArray):
        return part(x)
    scales = part(x.scales) if x.scales.ndim else x.scales
    return QuantizedArray(part(x.values), scales, x.format, x.layout, x.dtype)


def _rows(a: jax.Array, first: int, size: int) -> jax.Array:
    return jax.lax.slice_in_dim(a, first, first + size, axis=0)


def _quantized(x: jax.Array, scale: Any, format: str | None) -> QuantizedArray:
    """Tokens in the format in which they are sent; a static scale may be one of each."""
    assert format is not None
    if scale is not None:
        scale = jnp.broadcast_to(scale, scales_shape(format, "tokens", x.shape))

    @jax.custom_jvp
    def quantized(x: jax.Array) -> QuantizedArray:
        return quantize_tokens(x, format, scale=scale)

    def refuse(primals: Any, tangents: Any) -> Any:
        (t,) = tangents
        if not isinstance(t, SymbolicZero):
            rule = f"dispatch_format={format!r} must be None for gradients of x"
            raise NotImplementedError(_checks.message(OP, rule, x=x))
        q = quantized(*primals)
        return q, jax.tree.map(jnp.zeros_like, q)

    quantized.defjvp(refuse, symbolic_zeros=True)
    return jax.lax.stop_gradient(quantized(x))


def _common_scale(x: jax.Array, s: Setup) -> jax.Array:
    """The one scale of all tokens of the axis, as a single device would make it of them."""
    scale = s.format.tokens(jax.lax.stop_gradient(x)).scales
    assert scale is not None
    return scale if s.dispatch == "replicated" else jax.lax.pmax(scale, s.axis.name)


def _bias_once(experts: Experts, axis: str) -> Experts:
    """Keeps the bias of the result on the first device of those that hold parts of one expert."""
    bias = experts.down_bias
    if bias is None:
        return experts
    first = jax.lax.axis_index(axis) == 0
    bias = jnp.where(first, bias, jnp.zeros((), bias.dtype))
    return dataclasses.replace(experts, down_bias=bias)
