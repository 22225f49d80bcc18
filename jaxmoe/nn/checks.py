"""What the fields of a block's config, its arrays and its tokens must be."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxmoe._formats import FORWARD
from jaxmoe._jax import checks as _checks
from jaxmoe.activation import resolve
from jaxmoe.routing_methods import METHODS, method_of

_CONFIG, _BLOCK = "MoEConfig", "MoE"


def check_fields(config: Any) -> None:
    """Checks each field of a config that no other function would name so, but for dtypes."""
    for name in ("hidden", "intermediate", "num_experts", "top_k"):
        _checks.check_int(_CONFIG, name, getattr(config, name), 1)
    for name in ("shared_intermediate", "num_shared_experts"):
        _checks.check_int(_CONFIG, name, getattr(config, name), 0)
    switches = ("selection_bias", "router_bias", "expert_bias", "shared_router", "expert_scale")
    for name in switches:
        if type(getattr(config, name)) is not bool:
            rule = f"{name} must be a bool"
            raise TypeError(_checks.message(_CONFIG, rule, **{name: getattr(config, name)}))
    for name in ("scale", "balance_loss", "sequence_balance_loss", "z_loss"):
        value = _checks.check_number(_CONFIG, name, getattr(config, name))
        if name != "scale" and value < 0:
            rule = f"{name}={value} must be at least 0"
            raise ValueError(_checks.message(_CONFIG, rule))
    resolve(config.activation, _CONFIG)
    if config.forward_format is not None:
        _checks.check_choice(_CONFIG, "forward_format", config.forward_format, tuple(FORWARD))
    method = method_of(_CONFIG, config.method)
    if config.selection_bias and not method.bias:
        having = " or ".join(repr(name) for name, method in METHODS.items() if method.bias)
        rule = f"selection_bias=True needs method {having}"
        raise ValueError(_checks.message(_CONFIG, rule, method=config.method))
    if config.shared_router and not config.shared_intermediate:
        rule = "shared_router=True needs a shared expert"
        raise ValueError(_checks.message(_CONFIG, rule, shared_intermediate=0))


def check_dtypes(config: Any) -> None:
    """Checks the dtype of parameters against that of products."""
    stored, products = config.param_dtype, config.product_dtype
    if products == stored:
        return
    rule = f"param_dtype={stored.name} must be dtype={products.name}"
    if config.forward_format is not None:
        rule += f" with forward_format={config.forward_format!r}, which has no master weights"
        raise ValueError(_checks.message(_CONFIG, rule))
    if stored.name != "float32" or products.itemsize > 2:
        rule += ", or float32 beside a narrower one"
        raise ValueError(_checks.message(_CONFIG, rule))


def check_config(config: Any) -> None:
    """Refuses what is no config, before its fields are read."""
    from jaxmoe.nn.block import MoEConfig  # which imports this module

    _checks.check_type(_BLOCK, "config", config, MoEConfig, "a jaxmoe.nn.MoEConfig")


def check_layer(layer: Any) -> None:
    """Refuses a layer that cannot be called."""
    if not callable(layer):
        rule = "layer must be a function such as jaxmoe.moe_mlp"
        raise TypeError(_checks.message(_BLOCK, rule, layer=layer))


def check_tokens(config: Any, x: Any, mask: Any) -> None:
    """Checks what a block is called with."""
    _checks.check_dtype(_BLOCK, "x", x, _checks.FLOATS)
    if x.ndim < 2 or x.shape[-1] != config.hidden:
        rule = f"x must have axes of tokens and a last one of hidden={config.hidden}"
        raise ValueError(_checks.message(_BLOCK, rule, x=x))
    if config.sequence_balance_loss and x.ndim != 3:
        rule = "x must be [B, S, hidden], sequences of tokens, with a sequence_balance_loss"
        raise ValueError(_checks.message(_BLOCK, rule, x=x))
    if mask is not None:
        _checks.check_dtype(_BLOCK, "mask", mask, ("bool",))
        if mask.shape != x.shape[:-1]:
            rule = "mask must have the axes of tokens that x has"
            raise ValueError(_checks.message(_BLOCK, rule, mask=mask, x=x))


def check_params(named: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Checks the arrays of a block against its parameters by name."""
    _checks.check_type(_BLOCK, "params", params, Mapping, "a dict of arrays by name")
    missing = [f"{name} {list(p.shape)}" for name, p in named.items() if name not in params]
    if missing:
        raise KeyError(_checks.message(_BLOCK, f"params must have {', '.join(missing)}"))
    if more := sorted(set(params) - set(named)):
        rule = f"params must not have {', '.join(more)}, which the config has not"
        raise KeyError(_checks.message(_BLOCK, rule))
    # Layers count experts, which may be those of one device, or copies; I may be split there too.
    parts = {"expert", "mlp"} if jax.sharding.get_abstract_mesh().manual_axes else {"expert"}
    for name, p in named.items():
        array = _checks.as_arrays(params[name])
        if _checks.is_quantized(array):  # which the layer checks
            continue
        of = f"params[{name!r}]"
        _checks.check_rank(_BLOCK, of, array, ",".join(str(axis or "E") for axis in p.axes))
        sizes = zip(p.axes, p.shape, array.shape, strict=True)
        shape = [given if axis in parts else size for axis, size, given in sizes]
        _checks.check_shape(_BLOCK, of, array, shape, "that of the config")
        _checks.check_dtype(_BLOCK, of, array, _checks.FLOATS)


def check_has_bias(config: Any) -> None:
    """Refuses to move a bias that the block has not."""
    if not config.selection_bias:
        rule = "the block has no selection bias to move; config.selection_bias must be True"
        raise ValueError(_checks.message(_BLOCK, rule))
