"""The expert layer: each token through its experts, results weighted and added up."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import Tokens
from jaxmoe._gemm.precision import asked
from jaxmoe._gemm.tiles import GemmConfig, odd_blocks
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe._mlp import checks
from jaxmoe._mlp.configs import of_shapes
from jaxmoe._mlp.op import layer_op
from jaxmoe._mlp.operands import Layer, Operands
from jaxmoe.activation import resolve
from jaxmoe.experts import Experts
from jaxmoe.finalize import ExpertRows
from jaxmoe.grouped_gemm import check_num_rows, whole_k
from jaxmoe.plan import check_window
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing


@_checks.array_likes
def moe_mlp(
    x: jax.Array | QuantizedArray,
    routing: Routing,
    experts: Experts,
    *,
    residual: jax.Array | None = None,
    num_experts: int | None = None,
    expert_offset: int = 0,
    expert_map: jax.Array | None = None,
    apply_weight_on_input: bool = False,
    batch_invariant: bool = False,
    recompute: str | None = None,
    gather_weights: str | tuple[str, ...] | None = None,
    config: tuple[GemmConfig | None, GemmConfig | None] | None = None,
) -> jax.Array:
    """Runs each token through its experts and adds up the results.

    y[t] = sum over k of weights[t,k] * mlp(x[t], expert_ids[t,k]) + residual[t]
    mlp(x, e) = activation(x @ gate_up[e] + gate_up_bias[e]) @ down[e] + down_bias[e]

    Choices whose expert does not exist or is not local (see `jaxmoe.plan`) contribute nothing.

    Args:
      x: [T, H] bfloat16, float16 or float32, the dtype that the experts compute in; with quantized
        experts any of these, or a `QuantizedArray` in their format. T stands for one axis or, if x
        is no `QuantizedArray`, several, such as [B, S, H] with a routing of [B, S, K].
      routing: from `jaxmoe.route`, or your own expert_ids [T, K] int32 and weights [T, K] float32.
      experts: the weights, see `jaxmoe.Experts`.
      residual: [T, H] in the dtype of `x`, added last.
      num_experts: number of global experts; by default the length of `expert_map`, or those of
        `routing`, or the local experts and those before `expert_offset`. Experts that are not those
        of a `routing` from `jaxmoe.route` need it, `expert_offset` or `expert_map`.
      expert_offset: global id of the first local expert.
      expert_map: [num_experts] int32, local id of each global expert; outside [0, E) is not local.
      apply_weight_on_input: multiply each token by its weight before its expert, not after it
        (Llama 4); for K = 1.
      batch_invariant: keep the k loop of each product whole, so that a token's bits are the same
        in every batch; up to 10 % slower with a few tokens, 30 % for one with packed weights. Under
        vmap the tiles are those of one example.
      recompute: "z" computes the first product again in the backward pass instead of keeping its
        result, [T * K, 2I] in the dtype of `x`, from the forward pass; see docs/training.md.
      gather_weights: mesh axes over which weights that are stored in parts are gathered before the
        layer runs (FSDP), in their own format; tokens are divided over them. By default those that
        `jaxmoe.fsdp.choose_gather` finds to move fewer bytes, () for none. See docs/sharding.md.
      config: tiles of the two CUDA products; chosen from the shapes by default, and for a symbolic
        T (`jax.export`) those for many tokens, which are right for any.

    Returns:
      [T, H] in the dtype of `x`.

    Raises:
      TypeError, ValueError: an argument of the wrong kind, dtype, rank or shape, an unknown name,
        or an axis that the mesh does not have or T does not divide over.
      NotImplementedError: (on CUDA) a dtype or row length without a kernel; a derivative with
        respect to what is quantized.

    Numerics: float32 accumulation in both products; the activation is computed in float32 from the
      first accumulator and rounded once, each row of the second is rounded once, and the
      float32 sum over k once. Products of float32 follow `jax.default_matmul_precision`, see
      docs/semantics.md. Bitwise repeatable. NaN stays in the tokens that hold it. With
      quantized experts x and the rounded result of the activation are quantized in their format, as
      `jaxmoe.quantize_tokens` does, unless the format is one of weights alone. Under
      differentiation the result is the same; what the backward pass reads, the derivative of the
      activation too, is the first product rounded to the dtype of `x`. Derivatives through
      quantized experts are those of the layer with the dequantized ones, in the dtype of `x`.
    Sharding: E, I, H and T may be split over Auto and Explicit mesh axes, in any combination;
      docs/sharding.md has the collectives of each. I without exchange
      needs order="interleaved", or gate and up in two arrays. Parts of a sum over devices are
      rounded to the dtype of `x`; so is the first product where H is split or gates are exchanged.
      Inside `jax.shard_map` it is one device's layer. Residuals of the gradient are named
      "jaxmoe_z" (the first product) and "jaxmoe_plan", but not where XLA divides the program.
    Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2211.15841.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> x = jnp.ones((1, 2))
      >>> routing = jaxmoe.route(jnp.array([[0.0, 1.0]]), top_k=1)
      >>> up, down = jnp.ones((2, 2, 3)), jnp.ones((2, 3, 2))
      >>> experts = jaxmoe.Experts(up=up, down=down, activation="relu")
      >>> jaxmoe.moe_mlp(x, routing, experts).tolist()
      [[6.0, 6.0]]
    """
    out = _layer(
        "moe_mlp",
        x,
        routing,
        experts,
        finalize=True,
        residual=residual,
        window=(num_experts, expert_offset, expert_map),
        apply_weight_on_input=apply_weight_on_input,
        batch_invariant=batch_invariant,
        recompute=recompute,
        gather_weights=gather_weights,
        config=config,
    )
    return out[0]


@_checks.array_likes
def expert_rows(
    x: jax.Array | QuantizedArray,
    routing: Routing,
    experts: Experts,
    *,
    num_experts: int | None = None,
    expert_offset: int = 0,
    expert_map: jax.Array | None = None,
    apply_weight_on_input: bool = False,
    batch_invariant: bool = False,
    recompute: str | None = None,
    config: tuple[GemmConfig | None, GemmConfig | None] | None = None,
) -> ExpertRows:
    """Runs each token through its experts and returns the rows before they are added up.

    For a layer that does something with what the experts give; `jaxmoe.finalize` adds up.

    Args:
      x: [T, H], as all arguments those of `jaxmoe.moe_mlp`.
      routing: see `jaxmoe.moe_mlp`.
      experts: see `jaxmoe.moe_mlp`.
      num_experts: see `jaxmoe.moe_mlp`.
      expert_offset: see `jaxmoe.moe_mlp`.
      expert_map: see `jaxmoe.moe_mlp`.
      apply_weight_on_input: see `jaxmoe.moe_mlp`; the weights of the result are ones.
      batch_invariant: see `jaxmoe.moe_mlp`.
      recompute: see `jaxmoe.moe_mlp`.
      config: see `jaxmoe.moe_mlp`.

    Returns:
      `ExpertRows`: rows [T * K, H] in the dtype of `x`, weights [T, K] and slot_to_row [T, K], of
      which `jaxmoe.finalize` makes the [T, H] of `jaxmoe.moe_mlp`, bit by bit (one token with
      packed weights: with `batch_invariant` or a `config`).

    Raises:
      TypeError, ValueError, NotImplementedError: as `jaxmoe.moe_mlp`.

    Numerics: as `jaxmoe.moe_mlp`, up to the sum over k.
    Sharding: as `jaxmoe.moe_mlp`, but T may not be split: rows are in the order of all tokens.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> routing = jaxmoe.route(jnp.array([[0.0, 1.0]]), top_k=1)
      >>> up, down = jnp.ones((2, 2, 3)), jnp.ones((2, 3, 2))
      >>> experts = jaxmoe.Experts(up=up, down=down, activation="relu")
      >>> out = jaxmoe.expert_rows(jnp.ones((1, 2)), routing, experts)
      >>> out.rows.tolist(), out.weights.tolist(), out.slot_to_row.tolist()
      ([[6.0, 6.0]], [[1.0]], [[0]])
      >>> jaxmoe.finalize(out.rows, out, out.weights).tolist()
      [[6.0, 6.0]]
    """
    rows, weights, slot_to_row = _layer(
        "expert_rows",
        x,
        routing,
        experts,
        finalize=False,
        residual=None,
        window=(num_experts, expert_offset, expert_map),
        apply_weight_on_input=apply_weight_on_input,
        batch_invariant=batch_invariant,
        recompute=recompute,
        gather_weights=None,
        config=config,
    )
    return ExpertRows(rows, weights, slot_to_row)


def _layer(
    op: str,
    x: Any,
    routing: Any,
    experts: Any,
    *,
    finalize: bool,
    residual: Any,
    recompute: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Checks the arguments of the public functions and computes y, or rows, weights and slots."""
    lead = _leading.of_tokens(op, x)
    if lead is not None:
        x, routing = lead.flat("x", x), flat_routing(lead, routing)
        residual = lead.flat("residual", residual)
    shared: dict[str, Any] = {"finalize": finalize, "residual": residual, "recompute": recompute}
    a, layer = prepared(op, x, routing, experts, **shared, **options)
    outs = bound(layer_op, a if finalize else a._replace(weights=None), layer, recompute)
    if finalize:
        return outs if lead is None else (lead.unflat(outs[0]),)
    per_slot = (a.weights, outs[1])
    return outs[0], *(per_slot if lead is None else map(lead.unflat, per_slot))


def prepared(
    op: str,
    x: Any,
    routing: Any,
    experts: Any,
    *,
    finalize: bool,
    residual: Any,
    window: tuple[Any, Any, Any],
    apply_weight_on_input: Any,
    batch_invariant: Any,
    recompute: Any,
    gather_weights: Any,
    config: Any,
) -> tuple[Operands, Layer]:
    """Checks the arguments of a layer of flat tokens. Returns what its primitive takes."""
    checks.check_tokens(op, x, routing, residual)
    flags = {"apply_weight_on_input": apply_weight_on_input, "batch_invariant": batch_invariant}
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(_checks.message(op, f"{name} must be a bool", **{name: value}))
    format = checks.check_experts(op, x, experts)
    local = _window(op, routing, experts, *window)
    check_num_rows(op, routing.expert_ids.size, **{"routing.expert_ids": routing.expert_ids})
    alone = {
        "expert_rows": not finalize,
        "batch_invariant=True": batch_invariant,
        "config": config is not None,
    }
    checks.check_alone(op, format, alone)
    if recompute is not None:
        _checks.check_choice(op, "recompute", recompute, ("z",), "or None")
        if format.gradient.refused is not None:
            rule = f"recompute must be None with weights in {format.name}, which has no gradient"
            raise ValueError(_checks.message(op, rule, recompute=recompute))
    layer = static_of(op, x, experts, format, local, config, finalize)
    layer = layer.replace(gather=checks.check_gather_weights(op, gather_weights, x, experts))
    scales = checks.check_scales(op, x, format, experts, experts.num_experts)
    if batch_invariant:
        checks.check_batch_invariant_scales(op, x, format, scales)
        layer = whole_k_of(op, layer, routing.expert_ids.size, experts)
    weights = routing.weights
    if apply_weight_on_input:
        x = _weighed(op, x, routing)
        weights = jnp.ones_like(weights)
    a = operands_of(x, routing.expert_ids, experts, window[2], layer)
    return a._replace(weights=weights, residual=residual, **scales), layer


def bound(bind: Any, a: Operands, layer: Layer, recompute: str | None) -> tuple[Any, ...]:
    """Calls `bind` with what `prepared` returned, so that the gradient keeps what is asked for."""
    run = functools.partial(bind, layer=layer)
    if recompute == "z":
        policy = jax.checkpoint_policies.save_only_these_names("jaxmoe_plan")
        run = jax.checkpoint(run, policy=policy)
    return run(a)


def flat_routing(lead: Any, routing: Any) -> Any:
    """The routing of flat tokens; what is no routing is refused later."""
    if not isinstance(routing, Routing):
        return routing
    ids = lead.flat("routing.expert_ids", routing.expert_ids)
    weights = lead.flat("routing.weights", routing.weights)
    return Routing(ids, weights, routing.num_experts)


def _window(
    op: str, routing: Any, experts: Experts, num_experts: Any, expert_offset: Any, expert_map: Any
) -> tuple[int, int, int]:
    """Checks which experts are local: num_experts, expert_offset, num_local_experts."""
    num_local = experts.num_experts
    if num_experts is None:
        num_experts = checks.num_experts(op, routing, experts, expert_offset, expert_map)
    name = "experts.num_experts"
    local = check_window(op, num_experts, expert_offset, num_local, expert_map, name)
    top_k = routing.expert_ids.shape[1]
    if not 1 <= top_k <= local[0]:
        rule = (
            f"top_k={top_k} (routing.expert_ids.shape[1]) must be in [1, {local[0]}] "
            "(num_experts; give it if the weights hold only some of the experts)"
        )
        got = {"expert_ids": routing.expert_ids, "experts.down": experts.down}
        raise ValueError(_checks.message(op, rule, **got))
    return local


def static_of(
    op: str,
    x: Any,
    experts: Experts,
    format: Any,
    local: tuple[int, int, int],
    config: Any,
    finalize: bool,
    *,
    one_call: bool = True,
) -> Layer:
    """The static parameters of a layer, which may be one call on CUDA, its tiles checked."""
    act = resolve(experts.activation, op)
    checks.check_known(op, act)
    hidden, intermediate = x.shape[1], experts.intermediate
    sums = tuple(format.sums(experts.accum, k) for k in (hidden, intermediate))
    promoted = None if sums[0] is None else sums
    odd = odd_blocks(format.block > 1, act.gated, experts.order, intermediate)
    layer = Layer(
        format=format,
        dtype=jnp.dtype(x.dtype),
        activation=act,
        gate_up=experts.order,
        layouts=("nk", "nk") if format.quantized else experts.layouts,
        num_experts=local[0],
        num_local_experts=local[2],
        expert_offset=local[1],
        precision=asked(None) if x.dtype == jnp.float32 else None,
        promoted=promoted,
        config=config,
        finalize=finalize,
        first=next(n for n in ("gate_up", "gate", "up") if getattr(experts, n) is not None),
    )
    absent = () if isinstance(x, QuantizedArray) else ("x_scales",)
    coded = one_call and layer.multiplies_codes(absent)
    checks.check_configs(op, config, hidden, intermediate, promoted, odd, format.packed, coded)
    checks.check_one_kernel(op, layer, intermediate, experts.h_scale is not None)
    return layer


def whole_k_of(op: str, layer: Layer, num_rows: int, experts: Experts) -> Layer:
    """The layer with tiles that do not split the k loop."""
    sizes = num_rows, experts.hidden, experts.intermediate
    chosen = of_shapes(layer, *sizes, static=experts.h_scale is not None)
    asked = layer.config or (None, None)
    first, second = (whole_k(op, f"config[{i}]", asked[i], chosen[i]) for i in (0, 1))
    return layer.replace(config=(first, second))


def operands_of(x: Any, expert_ids: Any, e: Experts, expert_map: Any, layer: Layer) -> Operands:
    """The arrays of a layer by the names of its primitive."""
    tokens = Tokens(x, None)
    if isinstance(x, QuantizedArray):
        tokens = layer.format.given_tokens(x.values, x.scales, layer.dtype)
    values = lambda w: w.values if isinstance(w, QuantizedArray) else w  # noqa: E731
    scales = lambda w: w.scales if isinstance(w, QuantizedArray) else None  # noqa: E731
    first, second = (e.first, None) if e.gate is None else (e.gate, e.up)
    bias, up_bias = (e.gate_up_bias, None) if e.gate is None else (e.gate_bias, e.up_bias)
    if e.gate is None and e.up is not None:
        bias = e.up_bias
    return Operands(
        x=tokens.values,
        expert_ids=expert_ids,
        w_gate_up=values(first),
        w_down=values(e.down),
        x_scales=tokens.scales,
        gate_up_scales=scales(first),
        w_up=values(second),
        up_scales=scales(second),
        down_scales=scales(e.down),
        b_gate_up=bias,
        b_up=up_bias,
        b_down=e.down_bias,
        expert_map=expert_map,
    )


def _weighed(op: str, x: Any, routing: Any) -> jax.Array:
    """Each token multiplied by its weight."""
    top_k = routing.expert_ids.shape[1]
    if top_k != 1:
        rule = f"apply_weight_on_input=True needs top_k=1, not {top_k}: a token has one input"
        got = {"routing.expert_ids": routing.expert_ids}
        raise ValueError(_checks.message(op, rule, **got))
    if isinstance(x, QuantizedArray):
        rule = "apply_weight_on_input=True needs an x that is not quantized yet"
        raise NotImplementedError(_checks.message(op, rule, x=x))
    return _times_weight(x, routing.weights)


@jax.checkpoint  # or the backward pass would keep x in float32
def _times_weight(x: jax.Array, weights: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * weights).astype(x.dtype)
