"""A layer called with its weights apart, so that a test can name all it varies in one place."""

from typing import Any

import jax

import jaxmoe

# What `jaxmoe.Experts` is told, by the names that cases use.
EXPERTS = {
    "activation": "activation",
    "gate_up": "order",
    "weight_layout": "layout",
    "b_gate_up": "gate_up_bias",
    "b_down": "down_bias",
    "x_scale": "x_scale",
    "intermediate_scale": "h_scale",
    "forward_format": "forward_format",
    "accum": "accum",
}


def split_options(x: Any, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides the options of a layer into those of its experts and those of the call."""
    of_experts = {new: options.pop(old) for old, new in EXPERTS.items() if old in options}
    if options.pop("master_weights", False):
        of_experts["dtype"] = x.dtype
    return of_experts, options


def moe_mlp(x: Any, routing: Any, w_gate_up: Any, w_down: Any, **options: Any) -> Any:
    """`jaxmoe.moe_mlp`, or `jaxmoe.expert_rows` with do_finalize=False."""
    of_experts, of_call = split_options(x, options)
    experts = jaxmoe.Experts(gate_up=w_gate_up, down=w_down, **of_experts)
    call = jaxmoe.moe_mlp if of_call.pop("do_finalize", True) else jaxmoe.expert_rows
    return call(x, routing, experts, **of_call)


def expert_parallel(x: Any, routing: Any, w_gate_up: Any, w_down: Any, **options: Any) -> Any:
    """`jaxmoe.expert_parallel.moe_mlp`."""
    of_experts, of_call = split_options(x, options)
    experts = jaxmoe.Experts(gate_up=w_gate_up, down=w_down, **of_experts)
    return jaxmoe.expert_parallel.moe_mlp(x, routing, experts, **of_call)


def sharded(x: Any, routing: Any, w_gate_up: Any, w_down: Any, **options: Any) -> jax.Array:
    """`jaxmoe.expert_parallel.sharded_moe_mlp`."""
    of_experts, of_call = split_options(x, options)
    experts = jaxmoe.Experts(gate_up=w_gate_up, down=w_down, **of_experts)
    return jaxmoe.expert_parallel.sharded_moe_mlp(x, routing, experts, **of_call)


def of_op(message: str) -> str:
    """A message of the layer with the name of what refused: `jaxmoe.moe_mlp` unless it has one."""
    return message if message.startswith("jaxmoe.") else f"jaxmoe.moe_mlp: {message}"
