"""The fused expert layer: plan, gate and up, activation, down, finalize in one call."""

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jaxmoe import _checks
from jaxmoe._fp8_checks import check_accum
from jaxmoe._gmm_fp8 import promotes
from jaxmoe._heuristics import GemmConfig, mlp_configs, odd_blocks
from jaxmoe._mlp import moe_mlp_p, moe_mlp_rows_p, no_bias
from jaxmoe._mlp_checks import (
    check_batch_invariant_scales,
    check_bias,
    check_configs,
    check_forward_format,
    check_scales,
    check_tokens,
    check_weights,
)
from jaxmoe._mlp_fp8 import moe_mlp_fp8_p, moe_mlp_fp8_rows_p, no_scale
from jaxmoe._mlp_master import moe_mlp_master_p, moe_mlp_rows_master_p
from jaxmoe._mlp_mixed import moe_mlp_mixed
from jaxmoe.activation import GATE_UP_ORDERS, Activation, resolve
from jaxmoe.finalize import ExpertRows, no_residual
from jaxmoe.grouped_gemm import WEIGHT_LAYOUTS, check_num_rows, whole_k
from jaxmoe.plan import check_window, no_map
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing

_OP = "moe_mlp"


@overload
def moe_mlp(
    x: jax.Array | QuantizedArray,
    routing: Routing,
    w_gate_up: jax.Array | QuantizedArray,
    w_down: jax.Array | QuantizedArray,
    *,
    activation: str | Activation = "swiglu",
    b_gate_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    gate_up: str = "gate_up",
    weight_layout: str = "kn",
    num_experts: int | None = None,
    expert_offset: int = 0,
    expert_map: jax.Array | None = None,
    residual: jax.Array | None = None,
    apply_weight_on_input: bool = False,
    do_finalize: Literal[True] = True,
    batch_invariant: bool = False,
    x_scale: jax.Array | None = None,
    intermediate_scale: jax.Array | None = None,
    accum: str | None = None,
    config: tuple[GemmConfig | None, GemmConfig | None] | None = None,
    recompute: str | None = None,
    master_weights: bool = False,
    forward_format: str | None = None,
) -> jax.Array: ...


@overload
def moe_mlp(
    x: jax.Array | QuantizedArray,
    routing: Routing,
    w_gate_up: jax.Array | QuantizedArray,
    w_down: jax.Array | QuantizedArray,
    *,
    activation: str | Activation = "swiglu",
    b_gate_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    gate_up: str = "gate_up",
    weight_layout: str = "kn",
    num_experts: int | None = None,
    expert_offset: int = 0,
    expert_map: jax.Array | None = None,
    residual: jax.Array | None = None,
    apply_weight_on_input: bool = False,
    do_finalize: Literal[False],
    batch_invariant: bool = False,
    x_scale: jax.Array | None = None,
    intermediate_scale: jax.Array | None = None,
    accum: str | None = None,
    config: tuple[GemmConfig | None, GemmConfig | None] | None = None,
    recompute: str | None = None,
    master_weights: bool = False,
    forward_format: str | None = None,
) -> ExpertRows: ...


def moe_mlp(
    x: jax.Array | QuantizedArray,
    routing: Routing,
    w_gate_up: jax.Array | QuantizedArray,
    w_down: jax.Array | QuantizedArray,
    *,
    activation: str | Activation = "swiglu",
    b_gate_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    gate_up: str = "gate_up",
    weight_layout: str = "kn",
    num_experts: int | None = None,
    expert_offset: int = 0,
    expert_map: jax.Array | None = None,
    residual: jax.Array | None = None,
    apply_weight_on_input: bool = False,
    do_finalize: bool = True,
    batch_invariant: bool = False,
    x_scale: jax.Array | None = None,
    intermediate_scale: jax.Array | None = None,
    accum: str | None = None,
    config: tuple[GemmConfig | None, GemmConfig | None] | None = None,
    recompute: str | None = None,
    master_weights: bool = False,
    forward_format: str | None = None,
) -> jax.Array | ExpertRows:
    """Runs each token through its experts and adds up the results.

    y[t] = sum over k of weights[t,k] * mlp(x[t], expert_ids[t,k]) + residual[t]
    mlp(x, e) = activation(x @ w_gate_up[e] + b_gate_up[e]) @ w_down[e] + b_down[e]

    Choices whose expert does not exist or is not local (see `jaxmoe.plan`) contribute nothing.

    Args:
      x: [T, H] bfloat16, float16 or float32. Every other floating array but the routing weights has
        this dtype, but for `master_weights`. With quantized weights also a `QuantizedArray` in
        their format.
      routing: from `jaxmoe.route`, or your own expert_ids [T, K] int32 and weights [T, K] float32.
      w_gate_up: [E, H, 2I], or [E, H, I] for an activation without gate. E local experts. An array,
        or a `QuantizedArray` of layout `weight_layout`.
      w_down: [E, I, H]. Quantized if `w_gate_up` is, in the same format.
      activation: a name ("swiglu", "geglu", "relu2", ...) or a `jaxmoe.Swiglu`.
      b_gate_up: [E, 2I] or [E, I].
      b_down: [E, H].
      gate_up: the order of the 2I outputs: "gate_up" (gate first), "up_gate" or "interleaved" (gate
        even, up odd).
      weight_layout: "kn" for the shapes above; "nk" for w_gate_up [E, 2I, H] and w_down [E, H, I].
      num_experts: number of global experts; by default the length of `expert_map`, or the local
        experts and those before `expert_offset`.
      expert_offset: global id of the first local expert.
      expert_map: [num_experts] int32, local id of each global expert; outside [0, E) is not local.
      residual: [T, H], added last.
      apply_weight_on_input: each token is multiplied by its weight before its expert, and not after
        it (Llama 4); for K = 1.
      do_finalize: False returns the rows of the experts before the sum over k, for a layer that
        does something with them; then `residual` must be None, give it to `jaxmoe.finalize`.
      batch_invariant: no product splits its k loop, so that a token's bits are the same in every
        batch; up to 10 % slower with one or a few tokens. Under vmap the tiles are those of one
        example.
      x_scale: [] float32, static scale of x for weights in fp8_tensor; by default the scale is made
        of all of x.
      intermediate_scale: [] or [E] float32, static scale of the activations' result for weights in
        fp8_tensor; by default one is made of all its rows.
      accum: for quantized weights, "fast" to add up all of k inside the tensor core, which keeps
        about 14 bits, or "promoted" to add parts of 128 up in float32; by default "promoted" for
        products over more than 2048 elements. fp8_block is always promoted.
      config: tiles of the two CUDA products; chosen from the shapes by default.
      recompute: "z" computes the first product again in the backward pass instead of keeping its
        result, [T * K, 2I] in the dtype of `x`, from the forward pass; see docs/training.md.
      master_weights: w_gate_up, w_down and the biases are float32 and are rounded to the dtype of
        `x` for the products. Their gradients are float32 sums that are never rounded.
      forward_format: "fp8_tensor", "fp8_channel" or "fp8_block" quantizes weights and tokens in the
        program, for the value only: gradients are those of the layer without it.

    Returns:
      [T, H] in the dtype of `x`. With do_finalize=False `ExpertRows`: rows [T * K, H] in the dtype
      of `x`, weights [T, K] (those of `routing`, ones with apply_weight_on_input) and slot_to_row
      [T, K], of which `jaxmoe.finalize` makes the same [T, H], bit by bit.

    Raises:
      TypeError, ValueError: an argument of the wrong kind, dtype, rank or shape, or an unknown
        name.
      NotImplementedError: (on CUDA) a dtype or row length without a kernel; with quantized weights
        any gradient.

    Numerics: float32 accumulation in both products; the activation is computed in float32 from the
      first accumulator and rounded once, each row of the second is rounded once, and the
      float32 sum over k once. Bitwise repeatable. NaN stays in the tokens that hold it. With
      quantized weights x and the rounded result of the activation are quantized in their format, as
      `jaxmoe.quantize_tokens` does. Under differentiation the first product is rounded to the dtype
      of `x` before the activation.
    Sharding: E, I, H and T may be split over Auto and Explicit mesh axes, in any combination;
      weights are never gathered. docs/sharding.md has the collectives of each. I without exchange
      needs gate_up="interleaved". T not with do_finalize=False. Parts of a sum over devices are
      rounded to the dtype of `x`. Inside `jax.shard_map` it is one device's layer. Residuals of
      the gradient are named "jaxmoe_z" (the first product) and "jaxmoe_plan", but not where XLA
      divides the program.
    Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2211.15841.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> x = jnp.ones((1, 2))
      >>> routing = jaxmoe.route(jnp.array([[0.0, 1.0]]), top_k=1)
      >>> w_up, w_down = jnp.ones((2, 2, 3)), jnp.ones((2, 3, 2))
      >>> jaxmoe.moe_mlp(x, routing, w_up, w_down, activation="relu").tolist()
      [[6.0, 6.0]]
      >>> out = jaxmoe.moe_mlp(x, routing, w_up, w_down, activation="relu", do_finalize=False)
      >>> out.rows.tolist(), out.weights.tolist(), out.slot_to_row.tolist()
      ([[6.0, 6.0]], [[1.0]], [[0]])
      >>> jaxmoe.finalize(out.rows, out, out.weights).tolist()
      [[6.0, 6.0]]
    """
    act = resolve(activation, _OP)
    _checks.check_choice(_OP, "gate_up", gate_up, GATE_UP_ORDERS)
    _checks.check_choice(_OP, "weight_layout", weight_layout, WEIGHT_LAYOUTS)
    check_tokens(x, routing, residual)
    flags = {
        "apply_weight_on_input": apply_weight_on_input,
        "do_finalize": do_finalize,
        "batch_invariant": batch_invariant,
        "master_weights": master_weights,
    }
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(_checks.message(_OP, f"{name} must be a bool", **{name: value}))
    format = check_weights(x, w_gate_up, w_down, act, weight_layout, master_weights)
    n_axis = 2 if weight_layout == "kn" else 1
    check_bias(x, "b_gate_up", b_gate_up, "w_gate_up", w_gate_up, n_axis, master_weights)
    check_bias(x, "b_down", b_down, "w_down", w_down, n_axis, master_weights)
    num_local = w_gate_up.shape[0]
    if num_experts is None:
        if expert_map is None:
            hint = "give expert_map if it depends on the device"
            offset = _checks.check_int(_OP, "expert_offset", expert_offset, 0, hint=hint)
            num_experts = offset + num_local
        else:
            _checks.check_rank(_OP, "expert_map", expert_map, "E")
            num_experts = expert_map.shape[0]
    num_experts, expert_offset, num_local = check_window(
        _OP, num_experts, expert_offset, num_local, expert_map
    )
    top_k = routing.expert_ids.shape[1]
    if not 1 <= top_k <= num_experts:
        rule = (
            f"top_k={top_k} (routing.expert_ids.shape[1]) must be in [1, {num_experts}] "
            "(num_experts; give it if the weights hold only some of the experts)"
        )
        got = {"expert_ids": routing.expert_ids, "w_gate_up": w_gate_up}
        raise ValueError(_checks.message(_OP, rule, **got))
    check_num_rows(_OP, routing.expert_ids.size, **{"routing.expert_ids": routing.expert_ids})
    hidden, intermediate = x.shape[1], w_down.shape[1 if weight_layout == "kn" else 2]
    check_accum(_OP, accum, format)
    if forward_format is not None:
        check_forward_format(forward_format, format, flags, config)
    if recompute is not None:
        _checks.check_choice(_OP, "recompute", recompute, ("z",))
        if format is not None:
            rule = "recompute must be None with quantized weights, which have no gradient"
            raise ValueError(_checks.message(_OP, rule, recompute=recompute))
    promoted = None
    if format is not None:
        promoted = promotes(format, accum, hidden), promotes(format, accum, intermediate)
    odd = odd_blocks(format, act.gated, gate_up, intermediate)
    check_configs(config, hidden, intermediate, promoted, odd)
    scales = check_scales(x, format, x_scale, intermediate_scale, num_local)
    weights = routing.weights
    if batch_invariant:
        given = {"x_scale": x_scale, "intermediate_scale": intermediate_scale}
        check_batch_invariant_scales(x, format, given)
        chosen = mlp_configs(
            num_rows=routing.expert_ids.size,
            num_experts=num_experts,
            num_local_experts=num_local,
            hidden=hidden,
            intermediate=intermediate,
            gated=act.gated,
            promoted=promoted,
            odd_blocks=odd,
        )
        first, second = config or (None, None)
        config = (
            whole_k(_OP, "config[0]", first, chosen[0]),
            whole_k(_OP, "config[1]", second, chosen[1]),
        )
    if residual is not None and not do_finalize:
        rule = "residual must be None if do_finalize=False: give it to jaxmoe.finalize"
        raise ValueError(_checks.message(_OP, rule, residual=residual))
    if apply_weight_on_input:
        if top_k != 1:
            rule = f"apply_weight_on_input=True needs top_k=1, not {top_k}: a token has one input"
            got = {"routing.expert_ids": routing.expert_ids}
            raise ValueError(_checks.message(_OP, rule, **got))
        if isinstance(x, QuantizedArray):
            rule = "apply_weight_on_input=True needs an x that is not quantized yet"
            raise NotImplementedError(_checks.message(_OP, rule, x=x))
        x = _weigh(x, weights)
        weights = jnp.ones_like(weights)
    biases = (
        no_bias(x.dtype) if b_gate_up is None else b_gate_up,
        no_bias(x.dtype) if b_down is None else b_down,
    )
    expert_map = no_map() if expert_map is None else expert_map
    residual_array = no_residual(x.dtype) if residual is None else residual
    params: dict[str, Any] = {
        "activation": act,
        "gate_up": gate_up,
        "num_experts": num_experts,
        "num_local_experts": num_local,
        "expert_offset": expert_offset,
        "config": config,
    }
    ids = routing.expert_ids
    if isinstance(w_gate_up, QuantizedArray) and isinstance(w_down, QuantizedArray):
        tokens = (x.values, x.scales) if isinstance(x, QuantizedArray) else (x, no_scale())
        first, second = w_gate_up, w_down
        experts = (first.values, first.scales, second.values, second.scales, *biases, expert_map)
        params |= {"format": format, "promoted": promoted}
        if not do_finalize:
            rows, slot_to_row = moe_mlp_fp8_rows_p(*tokens, ids, *experts, *scales, **params)
            return ExpertRows(rows, weights, slot_to_row)
        arrays = (*tokens, ids, weights, *experts, residual_array, *scales)
        (y,) = moe_mlp_fp8_p(*arrays, **params)
        return y
    shared = (w_gate_up, w_down, *biases, expert_map)
    if forward_format is not None:
        op = functools.partial(moe_mlp_mixed, forward_format=forward_format)
    elif master_weights:
        op = moe_mlp_master_p if do_finalize else moe_mlp_rows_master_p
    else:
        op = moe_mlp_p if do_finalize else moe_mlp_rows_p
    op = functools.partial(op, weight_layout=weight_layout, **params)
    if recompute == "z":
        policy = jax.checkpoint_policies.save_only_these_names("jaxmoe_plan")
        op = jax.checkpoint(op, policy=policy)
    if not do_finalize:
        rows, slot_to_row = op(x, ids, *shared)
        return ExpertRows(rows, weights, slot_to_row)
    (y,) = op(x, ids, weights, *shared, residual_array)
    return y


@jax.checkpoint  # or the backward pass would keep x in float32
def _weigh(x: jax.Array, weights: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * weights).astype(x.dtype)
