"""The tiles of a layer's two products: asked for, measured, or chosen from its shapes."""

from typing import Any

from jaxmoe._gemm.tiles import MAX_STORED_FEATURES, GemmConfig, mlp_configs, odd_blocks
from jaxmoe._jax import sizes as _sizes
from jaxmoe._mlp import tuned
from jaxmoe._mlp.operands import Layer, Operands


def of_shapes(
    layer: Layer,
    num_rows: int,
    hidden: int,
    intermediate: int,
    coded: bool = False,
    static: bool = False,
    one_token: bool = False,
) -> tuple[GemmConfig, GemmConfig]:
    """The tiles that the shapes choose; where one is asked for, of a kernel for each product.

    `coded`: those that multiply codes as they are may be among them, which not all numbers of rows
    have. `static`: whether the activations' scales are given. `one_token`: whether all rows are
    those of one.
    """
    no_one = no_layer_kernel(layer, intermediate, static)
    gated = layer.activation.gated
    return mlp_configs(
        num_rows=num_rows,
        num_experts=layer.num_experts,
        num_local_experts=layer.num_local_experts,
        hidden=hidden,
        intermediate=intermediate,
        gated=gated,
        promoted=layer.promoted,
        packed=layer.format.packed,
        odd_blocks=odd_blocks(layer.format.block > 1, gated, layer.gate_up, intermediate),
        one_kernel=layer.config is None and no_one is None,
        coded=coded,
        one_token=one_token,
    )


def no_layer_kernel(layer: Layer, intermediate: int, static: bool) -> str | None:
    """Why one kernel cannot run both products, whatever its tile; None if it can.

    `static`: whether the activations' scales are given.
    """
    format = layer.format
    blocks = format.block > 1
    if not layer.activation.gated:
        return "with an activation that is not gated"
    if not layer.activation.fused:
        return "with a function as activation, which no kernel has"
    if format.composed and not format.master:
        return "if tokens are quantized"
    if format.quantizes_tokens and not blocks and not static:
        return "if scales of activations follow from all features of a token"
    if blocks and intermediate > MAX_STORED_FEATURES:
        return f"with scales of blocks and more than {MAX_STORED_FEATURES} activations a token"
    if layer.promoted is not None and layer.promoted[0] != layer.promoted[1]:
        return "if one product promotes its sums and the other does not"
    if layer.layouts[0] != layer.layouts[1]:
        return f"with weights of two layouts, {' and '.join(layer.layouts)}"
    return None


def rule_configs(a: Operands, layer: Layer) -> tuple[Any, Any]:
    """The tiles of the two products: the ones asked for, else chosen from the shapes."""
    first, second = layer.config or (None, None)
    sizes = a.expert_ids.size, a.x.shape[1], layer.intermediate(a.w_down)
    chosen = of_shapes(
        layer,
        *sizes,
        coded=layer.multiplies_codes(a.absent),
        static=a.h_scale is not None,
        one_token=_sizes.is_known(a.expert_ids.size) and a.expert_ids.shape[0] == 1,
    )
    return first or chosen[0], second or chosen[1]


def configs_of(a: Operands, layer: Layer) -> tuple[Any, Any]:
    """The tiles of the two products: asked for, else measured, else chosen from the shapes.

    Tiles that multiply codes need tokens that the call quantizes itself. A device of a mesh may get
    them quantized, whatever the caller gave and asked for: it chooses others.
    """
    if not layer.multiplies_codes(a.absent):
        layer = layer.replace(config=layer.config and layer.configs_apart)
    measured = tuned.find(a, layer) if layer.config is None else None
    return measured or rule_configs(a, layer)
