"""MaxText's layer of experts: methods of its `RoutedMoE`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe.activation import Activation, Swiglu
from jaxmoe.experts import Experts
from jaxmoe.losses import expert_load, update_selection_bias
from jaxmoe.mlp import moe_mlp
from jaxmoe.seams import _weights
from jaxmoe.seams._activations import BY_NAME
from jaxmoe.seams._routing import routing_of
from jaxmoe.seams.transformer_engine import moe

_OP = "seams.maxtext.sparse_matmul"
_CHOSEN = ("module.get_topk(...)[1]", "module.get_topk(...)[0]")


def sparse_matmul(
    module: Any,
    inputs: jax.Array,
    gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None,
    w0_kernel: jax.Array,
    w1_kernel: jax.Array,
    wo_kernel: jax.Array,
    w0_bias: jax.Array | None,
    w1_bias: jax.Array | None,
    wo_bias: jax.Array | None,
    input_ids: jax.Array | None = None,
    forced_routed_experts: jax.Array | None = None,
    *,
    forward_format: str | None = None,
    layer: Callable[..., Any] = moe_mlp,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Computes the experts of a `RoutedMoE` of MaxText, routed by its own rules.

        RoutedMoE.sparse_matmul = jaxmoe.seams.maxtext.sparse_matmul

    Args:
      module: the `RoutedMoE`: its `get_topk` routes, its `load_balance_loss` is the loss.
      inputs: [B, S, H].
      gate_logits, pre_bias_logits: [B, S, E], of its gate.
      w0_kernel, w1_kernel: [E, H, I], gate and up, which are never joined.
      wo_kernel: [E, I, H]. Or all of these as qwix' `QArray` or aqt's `QTensor`, in any tiles: see
        `jaxmoe.seams.qwix.weight`. Weights that are in different formats are decoded.
      w0_bias, w1_bias: [E, I].
      wo_bias: [E, H].
      input_ids: [B, S], for routing by a table.
      forced_routed_experts: [B, S, K], experts chosen elsewhere.
      forward_format: a quantized format for the value, see `jaxmoe.Experts`: FP8 on Hopper.
      layer: `jaxmoe.moe_mlp`, or a function with its arguments, of one axis of tokens, such as
        `functools.partial(jaxmoe.expert_parallel.sharded_moe_mlp, mesh=mesh, axis_name="expert")`.

    Returns:
      ([B, S, H] in the dtype of the module, its balance loss or None, its bias update or None).

    Raises:
      NotImplementedError: an activation that no kernel has, or what `jaxmoe.seams.aqt` refuses.
      TypeError, ValueError: `get_topk` returns experts that are no integers or weights that are not
        floating; and those of `jaxmoe.Experts` and `jaxmoe.moe_mlp`.

    Numerics: those of `jaxmoe.moe_mlp`; no token is dropped. Kernels of another dtype than the
      module's are float32 master weights, whose gradients are not rounded; with a `forward_format`
      they are rounded first. With quantized kernels no gradient of these; in FP8 formats tokens are
      quantized too.
    Sharding: that of `layer`: in a jitted program `jaxmoe.moe_mlp` is divided as its weights are.
    Source: MaxText 0.2.5, maxtext/layers/moe.py.

    Example:
      >>> import functools
      >>> from jaxmoe.seams import maxtext
      >>> fp8 = functools.partialmethod(maxtext.sparse_matmul, forward_format="fp8_channel")
      >>> class RoutedMoE:  # MaxText's
      ...     sparse_matmul = fp8
    """
    config = module.config
    kernels: dict[str, Any]
    kernels = {"w0_kernel": w0_kernel, "w1_kernel": w1_kernel, "wo_kernel": wo_kernel}
    if any(map(_weights.is_quantized, kernels.values())):
        if forward_format is not None:
            rule = f"forward_format={forward_format!r} must be None with quantized kernels"
            raise ValueError(_checks.message(_OP, rule, **kernels))
        kernels = _weights.in_one_format(_OP, kernels, module.dtype)
        w0_kernel, w1_kernel, wo_kernel = kernels.values()
    weights, ids = module.get_topk(
        gate_logits,
        pre_bias_logits,
        module.rngs,
        input_ids=input_ids,
        forced_routed_experts=forced_routed_experts,
    )
    on_input = _named(config.decoder_block) == "llama4"
    routing = routing_of(_OP, _CHOSEN, ids, weights, module.num_experts)
    if on_input:
        routing = dataclasses.replace(routing, weights=jax.nn.sigmoid(routing.weights))
    x = inputs.astype(module.dtype)
    if forward_format is not None:  # which has no master weights
        w0_kernel, w1_kernel, wo_kernel = (w.astype(x.dtype) for w in kernels.values())
    biases: dict[str, Any] = {"gate_bias": w0_bias, "up_bias": w1_bias, "down_bias": wo_bias}
    biases = {n: None if b is None else b.astype(wo_kernel.dtype) for n, b in biases.items()}
    experts = Experts(
        gate=w0_kernel,
        up=w1_kernel,
        down=wo_kernel,
        **biases,
        activation=_activation(config),
        dtype=None if wo_kernel.dtype == x.dtype else x.dtype,
        forward_format=forward_format,
    )
    options: dict[str, Any] = {"apply_weight_on_input": True} if on_input else {}
    lead = None if layer is moe_mlp else _leading.of_tokens(_OP, x)
    if lead is None:
        y = layer(x, routing, experts, **options)
    else:
        arrays = {"expert_ids": routing.expert_ids, "weights": routing.weights}
        flat = {name: lead.flat(f"routing.{name}", a) for name, a in arrays.items()}
        routing = dataclasses.replace(routing, **flat)
        y = lead.unflat(layer(lead.flat("inputs", x), routing, experts, **options))
    before = gate_logits if pre_bias_logits is None else pre_bias_logits
    return y, _loss(module, before, ids), _bias_update(module, ids)


@_checks.array_likes
def te_moe_block(
    module: Any,
    inputs: jax.Array,
    gate_kernel: jax.Array,
    wi_kernel: jax.Array,
    wo_kernel: jax.Array,
    w0_bias: jax.Array | None,
    w1_bias: jax.Array | None,
    wo_bias: jax.Array | None,
    out_sharding: Any = None,
    *,
    forward_format: str | None = None,
) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, jax.Array]]:
    """Computes a `RoutedMoE` with its router, where MaxText would call Transformer Engine.

        RoutedMoE._te_moe_block = jaxmoe.seams.maxtext.te_moe_block

    It is `jaxmoe.seams.transformer_engine.moe` with the arguments that MaxText gives that one, and
    needs neither Transformer Engine nor its bootstrap.

    Args:
      module: the `RoutedMoE`, with `te_gmm_quantization: te_no_quant`.
      inputs: [B, S, H].
      gate_kernel: [H, E].
      wi_kernel: [E, H, 2I], gate first.
      wo_kernel: [E, I, H].
      w0_bias, w1_bias: [E, I].
      wo_bias: [E, H].
      out_sharding: constraint on the result, or None.
      forward_format: a quantized format for the value, see `jaxmoe.Experts`: FP8 on Hopper.

    Returns:
      ([B, S, H] in the dtype of the module, its balance loss or None, ([1] int32 choices of all
      tokens, [] int32 the same number, as a capacity that they do not exceed)).

    Raises:
      NotImplementedError: another quantization, and what `moe` refuses.
      TypeError, ValueError: those of `moe`.

    Numerics, Sharding: those of `moe`; tokens over "fsdp" and the module's axis of experts.
    Source: MaxText 0.2.5, maxtext/layers/moe.py.

    Example:
      >>> import functools
      >>> from jaxmoe.seams import maxtext
      >>> fp8 = functools.partialmethod(maxtext.te_moe_block, forward_format="fp8_channel")
      >>> class RoutedMoE:  # MaxText's
      ...     _te_moe_block = fp8
    """
    config, op = module.config, "seams.maxtext.te_moe_block"
    quantization = config.te_gmm_quantization
    if quantization not in ("", "te_no_quant"):
        rule = f"config.te_gmm_quantization={quantization!r} must be 'te_no_quant'; forward_format="
        raise NotImplementedError(_checks.message(op, f"{rule} names a format that jaxmoe has"))
    biased = config.routed_bias
    y, loss, received = moe(
        *(inputs, gate_kernel, wi_kernel, wo_kernel, w0_bias, w1_bias, wo_bias),
        jnp.asarray(module.gate.bias[...], jnp.float32) if biased else None,
        num_experts=module.num_experts,
        num_experts_per_tok=module.num_experts_per_tok,
        activation_type=config.mlp_activations[0],
        score_function=config.routed_score_func or "softmax",
        num_groups=config.n_routing_groups,
        group_topk=config.topk_routing_group,
        scaling_factor=config.routed_scaling_factor,
        aux_loss_coeff=config.load_balance_loss_weight,
        apply_topk_weights_early=True,
        ep_axis=module._expert_parallelism_name,
        data_parallelism_axes=("fsdp",),
        dtype=module.dtype,
        forward_format=forward_format,
        mesh=module.mesh,
    )
    y = y.astype(module.dtype)
    if out_sharding is not None:
        y = jax.lax.with_sharding_constraint(y, out_sharding)
    return y, loss, (received, received[0])


def _named(value: Any) -> str:
    """The name of a member of an enumeration, or a name itself."""
    return str(getattr(value, "value", value)).lower()


def _activation(config: Any) -> Activation:
    """The activation that MaxText's `apply_ffn_activation` has for a model."""
    decoder, limit = _named(config.decoder_block), config.mlp_activations_limit
    name = config.mlp_activations[0]
    if decoder == "gpt_oss":
        return Swiglu(1.702, 1.0, limit)
    if decoder.startswith("deepseek") and limit > 0 and name == "silu":
        return Swiglu(limit=limit)
    if name not in BY_NAME or (decoder.startswith("deepseek") and limit > 0):
        rule = f"config.mlp_activations[0]={name!r} must be one of {', '.join(BY_NAME)}"
        raise NotImplementedError(_checks.message(_OP, rule))
    return BY_NAME[name]


def _loss(module: Any, logits: jax.Array, ids: jax.Array) -> jax.Array | None:
    """The balance loss of the module's configuration, by its own functions."""
    config = module.config
    if config.load_balance_loss_weight <= 0 or module.is_hash_routing:
        return None
    if getattr(config, "moe_use_megatron_seq_aux_loss", False) and (
        config.routed_score_func == "sigmoid"
    ):
        return module.megatron_seq_aux_loss(logits)
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(module.dtype)
    return module.load_balance_loss(ids, scores)


def _bias_update(module: Any, ids: jax.Array) -> jax.Array | None:
    """What moves the bias of the gate, or the counts that it is made of after several steps."""
    if not module.should_update_load_balance():
        return None
    counts = expert_load(ids.astype(jnp.int32), module.num_experts)
    if getattr(module.config, "gradient_accumulation_steps", 1) > 1:
        return counts
    none = jnp.zeros(module.num_experts, jnp.float32)
    return update_selection_bias(none, counts, rate=module.config.routed_bias_update_rate)
