"""The local expert layer of levanter's grug: `_moe_mlp_local` with its backends' signature."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmoe._jax import checks as _checks
from jaxmoe.activation import Activation
from jaxmoe.experts import Experts
from jaxmoe.finalize import finalize
from jaxmoe.grouped_gemm import grouped_gemm
from jaxmoe.mlp import moe_mlp
from jaxmoe.permute import permute
from jaxmoe.plan import plan
from jaxmoe.routing import Routing
from jaxmoe.seams._activations import of_function
from jaxmoe.seams._routing import routing_of

_OP = "seams.levanter.moe_mlp_local"
# What grug's rematerialisation policies save by name.
_INPUT, _HIDDEN = "grug_moe_dispatch_input", "grug_moe_expert_hidden"
_OUTPUT, _RESULT = "grug_moe_dispatch_output", "grug_moe_output"


@_checks.array_likes
def moe_mlp_local(
    x: jax.Array,
    selected_experts: jax.Array,
    combine_weights: jax.Array,
    token_valid: jax.Array,
    moe_w13: jax.Array,
    moe_w2: jax.Array,
    *,
    activation_fn: Callable[[jax.Array], jax.Array],
    num_experts: int,
    implementation: str | None = None,
    expert_chunks: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Computes the experts of the tokens of one device, all of whose experts are here.

    out[t] = sum over k of w[t, k] * (activation_fn(gate) * up) @ moe_w2[e],  e = experts[t, k]
    gate, up = halves of x[t] @ moe_w13[e]

    over the valid tokens t; the others have 0.

    Args:
      x: [T, H] bfloat16, float16 or float32.
      selected_experts: [T, K] integers.
      combine_weights: [T, K] floating; taken as float32.
      token_valid: [T] bool, False for padding.
      moe_w13: [E, H, 2I], gate first, in the dtype of `x`, or float32 master weights.
      moe_w2: [E, I, H], the same.
      activation_fn: of the gate. `jax.nn.silu`, `relu` and `gelu` (also as a partial with
        `approximate`) are `jaxmoe.moe_mlp`, one CUDA call. Others run between two products, which
        are kernels too.
      num_experts: E.
      implementation: not read: this is the implementation.
      expert_chunks: 1; more is a schedule of levanter's own, with divided weights.

    Returns:
      ([T, H] in the dtype of `x`, [] int32 choices that were dropped: 0).

    Raises:
      ValueError: `num_experts` or `token_valid` do not fit, or `expert_chunks` is not 1.
      TypeError: `token_valid` is not bool, experts are no integers, their weights not floating, or
        `activation_fn` is no function; and those of `jaxmoe.moe_mlp`.

    Numerics: those of `jaxmoe.moe_mlp`: routing weights are not rounded to the dtype of `x`, and
      the sum over k is float32.
    Sharding: call it inside `jax.shard_map`, as levanter does.
    Source: levanter 0.2.227.dev, levanter/grug/_moe/local.py.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmoe.seams.levanter import moe_mlp_local
      >>> y, dropped = moe_mlp_local(
      ...     jnp.ones((2, 1)), jnp.array([[1], [0]]), jnp.ones((2, 1)), jnp.array([True, False]),
      ...     jnp.ones((2, 1, 2)), jnp.array([[[5.0]], [[3.0]]]), activation_fn=jax.nn.relu,
      ...     num_experts=2)
      >>> y.tolist(), int(dropped)
      ([[3.0], [0.0]], 0)
    """
    op = _OP
    del implementation
    if expert_chunks != 1:
        rule = f"expert_chunks={expert_chunks} must be 1: weights are not gathered here"
        raise ValueError(_checks.message(op, rule))
    if not callable(activation_fn):
        rule = "activation_fn must be a function of the gate, such as jax.nn.silu"
        raise TypeError(_checks.message(op, rule, activation_fn=activation_fn))
    _checks.check_rank(op, "x", x, "T,H")
    _checks.check_rank(op, "moe_w13", moe_w13, "E,H,2I")
    _checks.check_dtype(op, "token_valid", token_valid, ("bool",))
    _checks.check_shape(op, "token_valid", token_valid, x.shape[:1], "[T]")
    _checks.check_dim(op, "moe_w13", moe_w13, 0, num_experts, "num_experts")
    names = ("selected_experts", "combine_weights")
    for name, array in zip(names, (selected_experts, combine_weights), strict=True):
        _checks.check_rank(op, name, array, "T,K")
        _checks.check_same_dim(op, name, array, 0, "x", x, 0, "num_tokens")
    _checks.check_int(op, "selected_experts.shape[1]", selected_experts.shape[1], 0, num_experts)
    routing = routing_of(op, names, selected_experts, combine_weights, num_experts)
    ids = jnp.where(token_valid[:, None], routing.expert_ids, -1)
    routing = dataclasses.replace(routing, expert_ids=ids)
    activation = of_function(activation_fn)
    master = x.dtype if moe_w13.dtype != x.dtype else None
    # Any gated activation checks the same shapes.
    experts = Experts(gate_up=moe_w13, down=moe_w2, activation=activation or "swiglu", dtype=master)
    y = _layer(x, routing, experts, activation, activation_fn)
    return checkpoint_name(y, _RESULT), jnp.int32(0)


def _layer(
    x: jax.Array,
    routing: Routing,
    experts: Experts,
    activation: Activation | None,
    function: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """One call, or its stages around a function that no kernel has."""
    if activation is not None:
        return moe_mlp(x, routing, experts)
    first, second = (w.astype(x.dtype) for w in (experts.gate_up, experts.down))
    order: Any = plan(routing.expert_ids, experts.num_experts)
    rows = checkpoint_name(permute(x, order), _INPUT)
    z = checkpoint_name(grouped_gemm(rows, first, order.group_sizes), _HIDDEN)
    gate, up = jnp.split(z, 2, axis=1)
    activated = function(gate)
    _checks.check_shape(_OP, "activation_fn(gate)", activated, gate.shape, "that of the gate")
    hidden = (activated * up.astype(activated.dtype)).astype(x.dtype)
    out = grouped_gemm(hidden, second, order.group_sizes)
    return finalize(checkpoint_name(out, _OUTPUT), order, routing.weights)
