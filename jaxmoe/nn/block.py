"""What the modules of all frameworks have in common: parameters by name, and the block itself."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe.activation import Activation, resolve
from jaxmoe.experts import Experts
from jaxmoe.losses import expert_load
from jaxmoe.mlp import moe_mlp
from jaxmoe.nn import checks, losses
from jaxmoe.routing import Routing, route
from jaxmoe.routing_methods import METHODS, RoutingMethod, method_of

_OP = "MoEConfig"
Layer = Callable[..., jax.Array]
_WEIGHS_INPUTS = METHODS["llama4"]  # models of it weigh what experts read, not what they say


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A block of experts. Static: two equal ones are one program.

    y = sum over k of weights[k] * mlp(x, expert_ids[k]) + g * mlp_shared(x)
    with weights, expert_ids = route(x @ router + router_bias), g = sigmoid(x @ shared_router) or 1

    Attributes:
      hidden: H, the width of a token.
      intermediate: I, the width of an expert.
      num_experts: E, of which the router chooses.
      top_k: K, experts of each token.
      activation: of experts and of the shared expert, see `jaxmoe.Experts`.
      method, num_groups, top_groups, scale, norm_topk_prob, epsilon, masked_group_value: of
        `jaxmoe.route`.
      num_shared_experts: S further experts that every token takes, the last ones of the arrays,
        with weight 1 or, if `method` is a rule with `shared`, that of their logits (Inkling).
      expert_scale: whether each expert has a factor of its weights, trained (Gemma 4).
      selection_bias: whether experts are chosen with a bias that is state and not trained, for
        methods that have one; `jaxmoe.update_selection_bias` moves it.
      router_bias: whether logits have a bias (gpt-oss).
      expert_bias: whether both products of an expert have one.
      shared_intermediate: width of the shared expert; 0: there is none.
      shared_router: whether the shared expert has a gate of its own (Qwen2-MoE).
      balance_loss: coefficient of `jaxmoe.load_balancing_loss`, at least 0.
      sequence_balance_loss: coefficient of the mean of `jaxmoe.sequence_balance_loss`, at least 0,
        for tokens [B, S, H].
      z_loss: coefficient of `jaxmoe.router_z_loss`, at least 0.
      param_dtype: of the weights of experts, shared ones too. The router is float32.
      dtype: of products; None for `param_dtype`. If it is narrower, weights are float32 masters.
      forward_format: see `jaxmoe.Experts`; not beside master weights.

    Raises:
      TypeError, ValueError: a number out of range, an unknown name, or fields that do not go
        together.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: str | Activation | Callable[..., jax.Array] = "swiglu"
    method: str | RoutingMethod = "renormalize"
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    norm_topk_prob: bool | None = None
    epsilon: float | None = None
    masked_group_value: float = -math.inf
    num_shared_experts: int = 0
    expert_scale: bool = False
    selection_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_intermediate: int = 0
    shared_router: bool = False
    balance_loss: float = 0.0
    sequence_balance_loss: float = 0.0
    z_loss: float = 0.0
    param_dtype: Any = jnp.float32
    dtype: Any = None
    forward_format: str | None = None

    def __post_init__(self) -> None:
        """Checks what no other function would name as a field of the config."""
        checks.check_fields(self)
        for name in ("param_dtype", "dtype"):  # equal configs are one program
            if name == "param_dtype" or self.dtype is not None:
                object.__setattr__(self, name, _checks.float_dtype(_OP, name, getattr(self, name)))
        checks.check_dtypes(self)
        logits = jax.ShapeDtypeStruct((1, self.num_logits), jnp.float32)
        jax.eval_shape(lambda logits: _routed(self, logits), logits)

    @property
    def product_dtype(self) -> Any:
        """The dtype of the products."""
        return jnp.dtype(self.param_dtype if self.dtype is None else self.dtype)

    @property
    def num_logits(self) -> int:
        """The logits of a token."""
        shared = self.num_shared_experts if method_of(_OP, self.method).shared else 0
        return self.num_experts + shared

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate."""
        return resolve(self.activation).gated


class Parameter(NamedTuple):
    """An array of a block.

    Attributes:
      shape: its shape.
      axes: a logical name for each dimension: "expert", "embed" (H), "mlp" (I) or None.
      fan_in: inputs of a sum that the array weighs; 0 for what begins at `start`.
      dtype: its dtype.
      trained: whether it has gradients; a selection bias is state.
      start: 0 for biases, 1 for factors.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int
    dtype: Any
    trained: bool = True
    start: float = 0.0


class Aux(NamedTuple):
    """What a block says beside its result.

    Attributes:
      loss: [] float32, the losses with their coefficients, to be added to that of the model.
      load: [E] int32, slots of each expert, for `jaxmoe.update_selection_bias`.
    """

    loss: jax.Array
    load: jax.Array


def parameters(config: MoEConfig) -> dict[str, Parameter]:
    """The arrays of a block by name, in a fixed order.

    Gate and up are two arrays, so that their last axis may be split over devices.

    Args:
      config: what the block is.

    Returns:
      Shape, dtype, logical axes and scale of each array.

    Example:
      >>> from jaxmoe.nn import MoEConfig, parameters
      >>> found = parameters(MoEConfig(8, 16, num_experts=4, top_k=2))
      >>> {name: p.shape for name, p in found.items()}
      {'router': (8, 4), 'gate': (4, 8, 16), 'up': (4, 8, 16), 'down': (4, 16, 8)}
    """
    checks.check_config(config)
    c, stored, wide = config, jnp.dtype(config.param_dtype), jnp.dtype(jnp.float32)
    found = {"router": Parameter((c.hidden, c.num_logits), ("embed", None), c.hidden, wide)}
    if c.router_bias:
        found["router_bias"] = Parameter((c.num_logits,), (None,), 0, wide)
    if c.expert_scale:
        found["expert_scale"] = Parameter((c.num_experts,), (None,), 0, wide, start=1.0)
    if c.selection_bias:
        found["selection_bias"] = Parameter((c.num_experts,), (None,), 0, wide, trained=False)

    def mlp(prefix: str, experts: tuple[int, ...], width: int, biases: bool) -> None:
        outer = ("expert",) * len(experts)
        for name in ("gate", "up") if c.gated else ("up",):
            shape, axes = (*experts, c.hidden, width), (*outer, "embed", "mlp")
            found[prefix + name] = Parameter(shape, axes, c.hidden, stored)
            if biases:
                shape, axes = (*experts, width), (*outer, "mlp")
                found[f"{prefix}{name}_bias"] = Parameter(shape, axes, 0, stored)
        shape, axes = (*experts, width, c.hidden), (*outer, "mlp", "embed")
        found[prefix + "down"] = Parameter(shape, axes, width, stored)
        if biases:
            shape, axes = (*experts, c.hidden), (*outer, "embed")
            found[prefix + "down_bias"] = Parameter(shape, axes, 0, stored)

    mlp("", (c.num_experts + c.num_shared_experts,), c.intermediate, c.expert_bias)
    if c.shared_intermediate:
        mlp("shared_", (), c.shared_intermediate, biases=False)
    if c.shared_router:
        found["shared_router"] = Parameter((c.hidden,), ("embed",), c.hidden, wide)
    return found


def initial(key: jax.Array, parameter: Parameter) -> jax.Array:
    """Draws one array: normal with variance 1 / fan_in; zeros for biases, ones for factors."""
    if parameter.fan_in == 0:
        return jnp.full(parameter.shape, parameter.start, parameter.dtype)
    drawn = jax.random.normal(key, parameter.shape, jnp.float32) * parameter.fan_in**-0.5
    return drawn.astype(parameter.dtype)


def init(config: MoEConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Draws all arrays of a block: normal with variance 1 / fan_in, biases zero, factors one.

    Args:
      config: what the block is.
      key: of `jax.random.key`.

    Returns:
      The arrays by the names of `parameters`, for `apply`.

    Example:
      >>> import jax
      >>> from jaxmoe.nn import MoEConfig, init
      >>> params = init(MoEConfig(8, 16, num_experts=4, top_k=2), jax.random.key(0))
      >>> params["down"].shape
      (4, 16, 8)
    """
    named = parameters(config)
    _checks.check_type("MoE", "key", key, jax.Array | np.ndarray, "that of jax.random.key")
    keys = jax.random.split(key, len(named))
    return {name: initial(k, p) for k, (name, p) in zip(keys, named.items(), strict=True)}


def apply(
    config: MoEConfig,
    params: Mapping[str, Any],
    x: jax.Array,
    *,
    mask: jax.Array | None = None,
    layer: Layer = moe_mlp,
) -> tuple[jax.Array, Aux]:
    """Computes a block.

    Args:
      config: what the block is.
      params: its arrays by the names of `parameters`, no others.
      x: [..., H] bfloat16, float16 or float32.
      mask: [...] bool, True for valid tokens; the others get the shared expert alone, and count for
        no expert and no loss.
      layer: `jaxmoe.moe_mlp`, or a function with its arguments x, routing, experts and residual;
        inside `jax.shard_map`, where `params` has a device's experts,
        `functools.partial(jaxmoe.expert_parallel.moe_mlp, axis_name="expert")`. It is given one
        axis of tokens, and `apply_weight_on_input=True` with method "llama4", named or itself, as
        Llama 4 has it.

    Returns:
      [..., H] in the dtype of x, and `Aux`.

    Raises:
      KeyError: an array is missing, or there is one that the config has not.
      TypeError, ValueError: an x or mask of another dtype or shape, arrays of another shape, and
        those of `jaxmoe.route`, `jaxmoe.Experts` and the layer.

    Numerics: logits in float32 whatever x is, products in `config.product_dtype`; balance losses of
      methods whose scores are no probabilities are those of scores divided by their sum
      (DeepSeek-V3), and that of sequences counts the experts of the K largest scores where there is
      a selection bias. The shared expert is a layer of one expert, and rounds as that does.
    Sharding: tokens and experts may be split as in `jaxmoe.moe_mlp`; on Explicit axes H of x and
      router must be whole.
    Source: the sum of routed and shared experts as in DeepSeekMoE, https://arxiv.org/abs/2401.06066

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmoe.nn import MoEConfig, apply, init
      >>> config = MoEConfig(8, 16, num_experts=4, top_k=2)
      >>> y, aux = apply(config, init(config, jax.random.key(0)), jnp.ones((3, 8)))
      >>> y.shape, int(aux.load.sum())
      ((3, 8), 6)
    """
    checks.check_config(config)
    checks.check_layer(layer)
    checks.check_tokens(config, x, mask)
    checks.check_params(parameters(config), params)
    tokens = x.astype(config.product_dtype)
    # What is left out has no gradient either, NaN or not.
    valid = x if mask is None else jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
    logits = _product(valid, params["router"])
    if config.router_bias:
        logits += jnp.broadcast_to(params["router_bias"], logits.shape)
    bias, factors = params.get("selection_bias"), params.get("expert_scale")
    routing = _routed(config, logits, bias, factors, mask)
    y = _shared(config, params, x, tokens) if config.shared_intermediate else None
    y = _by_layer(config, layer, tokens, routing, _experts(config, params), y)
    loss = losses.of_router(config, logits, routing, mask)
    return y.astype(x.dtype), Aux(loss, expert_load(routing.expert_ids, config.num_experts))


def _routed(
    config: MoEConfig,
    logits: jax.Array,
    bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> Routing:
    return route(
        logits,
        top_k=config.top_k,
        method=config.method,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        scale=config.scale,
        norm_topk_prob=config.norm_topk_prob,
        epsilon=config.epsilon,
        masked_group_value=config.masked_group_value,
        num_shared_experts=config.num_shared_experts,
        bias=None if bias is None else jax.lax.stop_gradient(bias),
        expert_scale=expert_scale,
        mask=mask,
    )


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in float32: GPUs would round the factors, and other experts would be chosen."""
    wide = (a.astype(jnp.float32) for a in (x, w))
    return jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST)


def _by_layer(
    config: MoEConfig,
    layer: Layer,
    tokens: jax.Array,
    routing: Routing,
    experts: Experts,
    residual: jax.Array | None,
) -> jax.Array:
    """The experts by `layer`, which has one axis of tokens unless it is that of the library."""
    on_input = method_of(_OP, config.method) == _WEIGHS_INPUTS
    options = {"apply_weight_on_input": True} if on_input else {}
    lead = None if layer is moe_mlp else _leading.of_tokens("MoE", tokens)
    if lead is None:
        return layer(tokens, routing, experts, residual=residual, **options)
    ids = lead.flat("routing.expert_ids", routing.expert_ids)
    weights = lead.flat("routing.weights", routing.weights)
    flat = dataclasses.replace(routing, expert_ids=ids, weights=weights, scores=None)
    rows, residual = lead.flat("x", tokens), lead.flat("residual", residual)
    return lead.unflat(layer(rows, flat, experts, residual=residual, **options))


def _experts(config: MoEConfig, params: Mapping[str, Any]) -> Experts:
    names = (n for n in ("gate", "up", "down") if n in params)
    arrays = {n: params[n] for name in names for n in (name, f"{name}_bias") if n in params}
    return Experts(
        **arrays,
        activation=config.activation,
        dtype=None if config.product_dtype == config.param_dtype else config.product_dtype,
        forward_format=config.forward_format,
    )


def _shared(
    config: MoEConfig, params: Mapping[str, Any], x: jax.Array, tokens: jax.Array
) -> jax.Array:
    """The shared expert: a layer of one expert that every token takes."""
    arrays = {n: params[f"shared_{n}"] for n in ("gate", "up", "down") if f"shared_{n}" in params}
    one = {name: w[None] for name, w in arrays.items()}
    experts = _experts(dataclasses.replace(config, forward_format=None), one)
    ids = jnp.zeros((*x.shape[:-1], 1), jnp.int32)
    weights = jnp.ones(ids.shape, jnp.float32)
    if config.shared_router:
        weights = jax.nn.sigmoid(_product(x, params["shared_router"][:, None]))
    return moe_mlp(tokens, Routing(ids, weights, 1), experts)
