"""Low-rank adapters on experts: what is trained beside frozen weights, bf16, FP8 or packed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import _saved
from jaxmoe._experts_checks import format_of
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe._mlp.adapted import composed, is_call, layer_op
from jaxmoe._mlp.checks import check_experts
from jaxmoe._mlp.operands import Layer, Operands, join
from jaxmoe.activation import resolve
from jaxmoe.experts import Experts
from jaxmoe.mlp import operands_of, static_of
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing

_OP = "lora.moe_mlp"


@_saved.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters of one layer of experts, one or several. A pytree: what is trained.

    A weight W [K, N] of an expert becomes W + scale * A @ B, of rank r. The arrays are bfloat16,
    float16 or float32.

    Attributes:
      gate_up_a: [E, H, r], or [S, E, H, r] of S adapters; so below.
      gate_up_b: [E, r, N1], with the columns of `experts.gate_up`, or those of gate and then up.
      down_a: [E, I, r].
      down_b: [E, r, H].
      scale: alpha / r. Static.

    The rank of the two products may differ. Adapters that are separate for gate and up, of rank r
    each, are one of rank 2r: [A_gate, A_up], and B of two blocks.
    """

    gate_up_a: jax.Array
    gate_up_b: jax.Array
    down_a: jax.Array
    down_b: jax.Array
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})


def init(
    key: jax.Array,
    experts: Experts,
    rank: int,
    *,
    scale: float = 1.0,
    num_adapters: int | None = None,
    dtype: Any = jnp.float32,
) -> Adapters:
    """Draws adapters of `experts` that change nothing yet: A normal / sqrt(K), B zero.

    Args:
      key: for A.
      experts: the layer, arrays or `jax.ShapeDtypeStruct`.
      rank: r; on CUDA a multiple of 8.
      scale: see `Adapters`.
      num_adapters: S, for arrays with that axis in front; None for one adapter.
      dtype: of the arrays, bfloat16, float16 or float32. They are rounded to that of the layer
        where they multiply.

    Returns:
      `Adapters`.

    Raises:
      TypeError: no `Experts`, a scale that is no number, or another dtype.
      ValueError: a rank or number below 1, or experts of several layers.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import lora
      >>> experts = jaxmoe.Experts(gate_up=jnp.ones((2, 4, 6)), down=jnp.ones((2, 3, 4)))
      >>> lora.init(jax.random.key(0), experts, rank=8).gate_up_b.shape
      (2, 8, 6)
    """
    op = "lora.init"
    _checks.check_type(op, "key", key, jax.Array | np.ndarray, "that of jax.random.key")
    _checks.check_int(op, "rank", rank, 1)
    _checks.check_type(op, "experts", experts, Experts, "a jaxmoe.Experts")
    _checks.check_number(op, "scale", scale)
    _checks.float_dtype(op, "dtype", dtype)
    if len(experts.down.shape) != 3:
        rule = "experts must be those of one layer; jax.vmap draws those of several"
        raise ValueError(_checks.message(op, rule, down=experts.down))
    lead: tuple[int, ...] = (experts.num_experts,)
    if num_adapters is not None:
        lead = (_checks.check_int(op, "num_adapters", num_adapters, 1), *lead)
    width = experts.intermediate * (2 if resolve(experts.activation).gated else 1)
    keys = jax.random.split(key)

    def drawn(key: jax.Array, k: int) -> jax.Array:
        return (jax.random.normal(key, (*lead, k, rank), jnp.float32) * k**-0.5).astype(dtype)

    return Adapters(
        gate_up_a=drawn(keys[0], experts.hidden),
        gate_up_b=jnp.zeros((*lead, rank, width), dtype),
        down_a=drawn(keys[1], experts.intermediate),
        down_b=jnp.zeros((*lead, rank, experts.hidden), dtype),
        scale=scale,
    )


@_checks.array_likes
def moe_mlp(
    x: jax.Array,
    routing: Routing,
    experts: Experts,
    adapters: Adapters,
    *,
    adapter_ids: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """`jaxmoe.moe_mlp` of experts whose weights are W + scale * A @ B.

    Args:
      x: [T, H] bfloat16, float16 or float32. T stands for one axis or several.
      routing: as in `jaxmoe.moe_mlp`.
      experts: all experts of the routing, plain, master or quantized; not with `token_format`,
        `forward_format` or static scales.
      adapters: of these experts.
      adapter_ids: [T] int32, the adapter of each token among several; other ids have none. None
        with one adapter, which all tokens have.
      residual: [T, H] in the dtype of x, added last.

    Returns:
      [T, H] in the dtype of x.

    Raises:
      TypeError, ValueError: arrays that do not go together, or those of the ops it is made of.

    Numerics: x @ A, its product with B, and the frozen product are each rounded to the dtype of x;
      their sum and the activation are float32, rounded once. With one adapter on CUDA, bfloat16 and
      ranks that are multiples of 8, and weights that are plain or packed with one scale an expert,
      it is one call without z in memory, which rounds scale * x @ A alone before the activation.
      Experts of several adapters are multiplied once: rows are in the order of experts, and of
      adapters within each.
    Sharding: tokens that Explicit mesh axes divide, along any of their axes, stay where they are,
      and so does y; experts and adapters that are split are gathered whole, in their own format,
      and gradients of adapters summed over the devices. Over Auto axes XLA gathers all tokens: call
      it inside `jax.shard_map` there. Experts are not divided among devices.
    Source: LoRA, https://arxiv.org/abs/2106.09685; several adapters, https://arxiv.org/abs/2310.18547

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import lora
      >>> experts = jaxmoe.Experts(gate_up=jnp.ones((2, 4, 6)), down=jnp.ones((2, 3, 4)))
      >>> adapters = lora.init(jax.random.key(0), experts, rank=8)
      >>> routing = jaxmoe.route(jnp.ones((5, 2)), top_k=1)
      >>> lora.moe_mlp(jnp.ones((5, 4)), routing, experts, adapters).shape
      (5, 4)
    """
    _check(x, routing, experts, adapters, adapter_ids, residual)
    tokens = x, routing.expert_ids, routing.weights, adapter_ids, residual
    return _leading.on_own_tokens(_OP, _layer, tokens, (experts, adapters))


@_checks.array_likes
def merged(experts: Experts, adapters: Adapters) -> Experts:
    """Adds one adapter to the weights of plain experts.

    Args:
      experts: of one layer.
      adapters: one, of these experts.

    Returns:
      `Experts` with weights W + scale * A @ B in their own dtypes and layouts, all else as it was.

    Raises:
      TypeError: quantized experts: dequantize them first; or arrays that are not floating.
      ValueError: several adapters, or such of other experts.

    Numerics: float32 products and sums, each weight rounded once.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import lora
      >>> experts = jaxmoe.Experts(gate_up=jnp.ones((2, 4, 6)), down=jnp.ones((2, 3, 4)))
      >>> adapters = lora.init(jax.random.key(0), experts, rank=8)  # changes nothing yet
      >>> bool((lora.merged(experts, adapters).down == experts.down).all())
      True
    """
    op = "lora.merged"
    _checks.check_type(op, "experts", experts, Experts, "a jaxmoe.Experts")
    if isinstance(experts.down, QuantizedArray):
        raise TypeError(_checks.message(op, "experts must be plain", down=experts.down))
    several = _check_adapters(op, experts, adapters)
    if several:
        rule = "adapters must be one: take one of them with jax.tree.map(lambda a: a[i], adapters)"
        raise ValueError(_checks.message(op, rule, down_b=adapters.down_b))

    def added(w: jax.Array, layout: str, a: jax.Array, b: jax.Array) -> jax.Array:
        wide = (m.astype(jnp.float32) for m in (a, b))
        change = jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST) * adapters.scale
        if layout == "nk":
            change = change.swapaxes(-1, -2)
        return (w.astype(jnp.float32) + change).astype(w.dtype)

    first, second = experts.layouts
    a, b = adapters.gate_up_a, adapters.gate_up_b
    down = added(experts.down, second, adapters.down_a, adapters.down_b)
    if experts.gate is not None:
        halves = zip(("gate", "up"), jnp.split(b, 2, axis=-1), strict=True)
        new = {n: added(getattr(experts, n), first, a, half) for n, half in halves}
    else:
        name = "up" if experts.gate_up is None else "gate_up"
        new = {name: added(getattr(experts, name), first, a, b)}
    return dataclasses.replace(experts, down=down, **new)


def _layer(of_tokens: tuple[Any, ...], rest: tuple[Experts, Adapters]) -> jax.Array:
    """The layer of one device's tokens, all that they have."""
    x, ids, weights, chosen, residual = of_tokens
    experts, adapters = rest
    tokens = x.reshape(-1, x.shape[-1])
    ids, weights = (a.reshape(-1, a.shape[-1]) for a in (ids, weights))
    if residual is not None:
        residual = residual.reshape(tokens.shape)
    matrices = tuple(getattr(adapters, f.name) for f in dataclasses.fields(adapters)[:-1])
    a, layer = _operands(tokens, ids, weights, residual, experts)
    if is_call(a, layer, matrices):
        y = layer_op(a, layer, matrices, adapters.scale)
    else:
        chosen = None if chosen is None else chosen.reshape(-1)
        y = composed(
            tokens, ids, weights, residual, experts, matrices, adapters.scale, adapter_ids=chosen
        )
    return y.reshape(x.shape)


def _operands(
    x: jax.Array, ids: jax.Array, weights: jax.Array, residual: Any, experts: Experts
) -> tuple[Operands, Layer]:
    """The layer without adapters, as its primitive takes it."""
    local = (experts.num_experts, 0, experts.num_experts)
    layer = static_of(_OP, x, experts, format_of(experts), local, None, True)
    a = operands_of(x, ids, experts, None, layer)
    a = a._replace(weights=weights, residual=residual)
    return join(a, layer), layer


def _check(
    x: jax.Array,
    routing: Routing,
    experts: Experts,
    adapters: Adapters,
    adapter_ids: Any,
    residual: Any,
) -> None:
    e = experts
    _checks.check_type(_OP, "routing", routing, Routing, "a jaxmoe.Routing")
    _checks.check_type(_OP, "experts", experts, Experts, "a jaxmoe.Experts")
    for name in ("token_format", "forward_format", "x_scale", "h_scale"):
        if getattr(e, name) is not None:
            rule = f"experts.{name} must be None beside adapters"
            raise ValueError(_checks.message(_OP, rule, **{name: getattr(e, name)}))
    if routing.num_experts not in (None, e.num_experts):
        rule = f"experts must be all {routing.num_experts} of the routing"
        raise ValueError(_checks.message(_OP, rule, num_experts=e.num_experts))
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    if x.ndim < 2:
        raise ValueError(_checks.message(_OP, "x must have axes of tokens and of H", x=x))
    check_experts(_OP, x, e)
    _checks.check_dtype(_OP, "routing.expert_ids", routing.expert_ids, ("int32",))
    _checks.check_dtype(_OP, "routing.weights", routing.weights, ("float32",))
    top_k = routing.expert_ids.shape[-1] if routing.expert_ids.ndim else 0
    if not 1 <= top_k <= e.num_experts:
        rule = f"top_k={top_k} (routing.expert_ids.shape[-1]) must be in [1, {e.num_experts}]"
        raise ValueError(_checks.message(_OP, rule, expert_ids=routing.expert_ids))
    of_tokens = {
        "routing.expert_ids": (routing.expert_ids.shape[:-1], x.shape[:-1]),
        "routing.weights": (routing.weights.shape, routing.expert_ids.shape),
    }
    if residual is not None:
        _checks.check_array(_OP, "residual", residual)
        _checks.check_same_dtype(_OP, "residual", residual, "x", x)
        of_tokens["residual"] = (residual.shape, x.shape)
    several = _check_adapters(_OP, e, adapters)
    if (adapter_ids is None) != (not several):
        rule = "adapter_ids must be given with several adapters, and with these alone"
        raise ValueError(_checks.message(_OP, rule, adapter_ids=adapter_ids))
    if adapter_ids is not None:
        _checks.check_dtype(_OP, "adapter_ids", adapter_ids, ("int32",))
        of_tokens["adapter_ids"] = (adapter_ids.shape, x.shape[:-1])
    for name, (shape, wanted) in of_tokens.items():
        if shape != wanted:
            rule = f"{name} must have the axes of tokens that x has: {list(shape)}, {list(wanted)}"
            raise ValueError(_checks.message(_OP, rule, x=x, expert_ids=routing.expert_ids))


def _check_adapters(op: str, experts: Experts, adapters: Adapters) -> tuple[int, ...]:
    """Checks adapters against the experts. Returns (S,), or () for one adapter."""
    _checks.check_type(op, "adapters", adapters, Adapters, "a jaxmoe.lora.Adapters")
    _checks.check_number(op, "adapters.scale", adapters.scale)
    e = experts
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b"):
        array = getattr(adapters, name)
        _checks.check_dtype(op, f"adapters.{name}", array, _checks.FLOATS)
        if array.ndim not in (3, 4):
            rule = f"adapters.{name} must have 3 axes, or 4 of several adapters, not {array.ndim}"
            raise ValueError(_checks.message(op, rule, **{name: array}))
    width = e.intermediate * (2 if resolve(e.activation).gated else 1)
    ranks = {"gate_up": adapters.gate_up_b.shape[-2], "down": adapters.down_b.shape[-2]}
    wanted = {
        "gate_up_a": (e.hidden, ranks["gate_up"]),
        "gate_up_b": (ranks["gate_up"], width),
        "down_a": (e.intermediate, ranks["down"]),
        "down_b": (ranks["down"], e.hidden),
    }
    several = adapters.down_b.shape[:-3]
    if several == (0,):
        rule = "adapters must be one, or at least one of several, not 0"
        raise ValueError(_checks.message(op, rule, down_b=adapters.down_b))
    for name, matrix in wanted.items():
        array = getattr(adapters, name)
        if array.shape != (*several, e.num_experts, *matrix):
            rule = f"adapters.{name} must be {[*several, e.num_experts, *matrix]}"
            raise ValueError(_checks.message(op, rule, **{name: array}))
    return several
