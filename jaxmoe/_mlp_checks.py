"""Argument checks of `moe_mlp`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import _checks, _fp8_checks
from jaxmoe._heuristics import BLOCK_ROWS, MAX_FP8_GATHER, WHOLE_BLOCKS
from jaxmoe._mlp_fp8 import no_scale
from jaxmoe.activation import Activation
from jaxmoe.grouped_gemm import check_config, check_float
from jaxmoe.quantize import FORMATS, QuantizedArray
from jaxmoe.routing import Routing

_OP = "moe_mlp"


def check_tokens(x: Any, routing: Any, residual: Any) -> None:
    """Checks what there is of each token."""
    if isinstance(x, QuantizedArray):
        _fp8_checks.check_tokens(_OP, "x", x)
    else:
        check_float(_OP, "x", x)
        _checks.check_rank(_OP, "x", x, "T,H")
    if not isinstance(routing, Routing):
        raise TypeError(_checks.message(_OP, "routing must be a jaxmoe.Routing", routing=routing))
    ids, weights = routing.expert_ids, routing.weights
    _checks.check_rank(_OP, "routing.expert_ids", ids, "T,K")
    _checks.check_dtype(_OP, "routing.expert_ids", ids, ("int32",))
    _checks.check_rank(_OP, "routing.weights", weights, "T,K")
    _checks.check_dtype(_OP, "routing.weights", weights, ("float32",))
    _checks.check_same_dim(_OP, "routing.expert_ids", ids, 0, "x", x, 0, "num_tokens")
    for axis, meaning in ((0, "num_tokens"), (1, "top_k")):
        _checks.check_same_dim(
            _OP, "routing.weights", weights, axis, "routing.expert_ids", ids, axis, meaning
        )
    if residual is not None:
        _checks.check_rank(_OP, "residual", residual, "T,H")
        _checks.check_same_dtype(_OP, "residual", residual, "x", x)
        _checks.check_same_dim(_OP, "residual", residual, 0, "x", x, 0, "num_tokens")
        _checks.check_same_dim(_OP, "residual", residual, 1, "x", x, 1, "hidden")


def check_weights(
    x: Any, w_gate_up: Any, w_down: Any, act: Activation, layout: str, master: bool
) -> str | None:
    """Checks the weights against each other and `x`. Returns their format, None for plain ones."""
    kn, format = layout == "kn", None
    quantized = [isinstance(w, QuantizedArray) for w in (w_gate_up, w_down)]
    if any(quantized):
        if not all(quantized):
            rule = "w_gate_up and w_down must both be jaxmoe.QuantizedArray, or both be none"
            got = {"w_gate_up": w_gate_up, "w_down": w_down}
            raise TypeError(_checks.message(_OP, rule, **got))
        _fp8_checks.check_weight(_OP, "w_gate_up", w_gate_up, layout)
        _fp8_checks.check_weight(_OP, "w_down", w_down, layout)
        _fp8_checks.check_same_format(_OP, "w_down", w_down, "w_gate_up", w_gate_up)
        _fp8_checks.check_same_format(_OP, "x", x, "w_gate_up", w_gate_up)
        format = w_gate_up.format
        if master:
            rule = "master_weights must be False with quantized weights, which have no gradient"
            raise ValueError(_checks.message(_OP, rule, master_weights=master))
    else:
        width = "2I" if act.gated else "I"
        check_float(_OP, "w_gate_up", w_gate_up)
        check_float(_OP, "w_down", w_down)
        _fp8_checks.check_tokens_are_plain(_OP, "x", x, "w_gate_up", "w_down")
        _checks.check_rank(_OP, "w_gate_up", w_gate_up, f"E,H,{width}" if kn else f"E,{width},H")
        _checks.check_rank(_OP, "w_down", w_down, "E,I,H" if kn else "E,H,I")
        _check_weight_dtype("w_gate_up", w_gate_up, x, master)
        _check_weight_dtype("w_down", w_down, x, master)
    k_axis, n_axis = (1, 2) if kn else (2, 1)
    _checks.check_same_dim(
        _OP, "w_down", w_down, 0, "w_gate_up", w_gate_up, 0, "num_experts of this device"
    )
    _checks.check_same_dim(_OP, "w_gate_up", w_gate_up, k_axis, "x", x, 1, "hidden")
    _checks.check_same_dim(_OP, "w_down", w_down, n_axis, "x", x, 1, "hidden")
    intermediate = w_down.shape[k_axis]
    factor = 2 if act.gated else 1
    if w_gate_up.shape[n_axis] != factor * intermediate:
        kind = "gated" if act.gated else "not gated"
        rule = (
            f"w_gate_up.shape[{n_axis}]={w_gate_up.shape[n_axis]} must be {factor} * "
            f"w_down.shape[{k_axis}]={factor * intermediate}, because {act.name} is {kind}"
        )
        raise ValueError(_checks.message(_OP, rule, w_gate_up=w_gate_up, w_down=w_down))
    return format


def _check_weight_dtype(name: str, w: Any, x: Any, master: bool) -> None:
    if not master:
        _checks.check_same_dtype(_OP, name, w, "x", x)
    elif w.dtype != "float32":
        rule = f"{name}.dtype={_checks.dtype_name(w.dtype)} must be f32 if master_weights=True"
        raise TypeError(_checks.message(_OP, rule, **{name: w}))


def check_forward_format(
    value: Any, format: str | None, flags: dict[str, bool], config: Any
) -> None:
    """Checks `forward_format`, and that nothing is asked for beside it that it does not have."""
    _checks.check_choice(_OP, "forward_format", value, FORMATS)
    if format is not None:
        rule = "forward_format must be None with weights that are quantized already"
        raise ValueError(_checks.message(_OP, rule, forward_format=value))
    others = {
        "do_finalize=False": not flags["do_finalize"],
        "master_weights=True": flags["master_weights"],
        "batch_invariant=True": flags["batch_invariant"],
        "config": config is not None,
    }
    for name, given in others.items():
        if given:
            rule = f"{name} is not supported with a forward_format"
            raise NotImplementedError(_checks.message(_OP, rule, forward_format=value))


def check_bias(
    x: Any, name: str, bias: Any, w_name: str, w: Any, n_axis: int, master: bool
) -> None:
    """Checks a bias against the weights it belongs to."""
    if bias is None:
        return
    check_float(_OP, name, bias)
    _checks.check_rank(_OP, name, bias, "E,N")
    _check_weight_dtype(name, bias, x, master)
    _checks.check_same_dim(_OP, name, bias, 0, w_name, w, 0, "num_experts of this device")
    _checks.check_same_dim(_OP, name, bias, 1, w_name, w, n_axis, "its outputs")


def check_configs(
    config: Any,
    hidden: int,
    intermediate: int,
    promoted: tuple[bool, bool] | None,
    odd_blocks: bool,
) -> None:
    """Checks the tiles against the products they are for."""
    if config is None:
        return
    if not isinstance(config, tuple) or len(config) != 2:
        rule = "config must be a pair of GemmConfig, one for each product"
        raise TypeError(_checks.message(_OP, rule, config=config))
    for i, k in enumerate((hidden, intermediate)):
        check_config(
            _OP, f"config[{i}]", config[i], k, promoted=None if promoted is None else promoted[i]
        )
    first = config[0]
    if promoted is not None and first and first.gather and first.token_tile > MAX_FP8_GATHER:
        rule = (
            f"config[0].gather must be False with token_tile={first.token_tile} and quantized "
            f"weights: only tiles of up to {MAX_FP8_GATHER} tokens fetch FP8 rows by index"
        )
        raise ValueError(_checks.message(_OP, rule, config=config))
    if odd_blocks and first and first.tile in WHOLE_BLOCKS:
        rule = (
            f"config[0] must have a tile of 128 rows and up to 192 tokens with fp8_block and an "
            f"intermediate size of {intermediate}, not a multiple of {BLOCK_ROWS}"
        )
        raise ValueError(_checks.message(_OP, rule, config=config))


def check_scales(
    x: Any, format: str | None, x_scale: Any, intermediate_scale: Any, num_local: int
) -> tuple[jax.Array, jax.Array]:
    """Checks the static scales. Returns them as [1] or [E]; [0] for none."""
    given = {"x_scale": x_scale, "intermediate_scale": intermediate_scale}
    arrays: list[jax.Array] = []
    for name, scale in given.items():
        if scale is None:
            arrays.append(no_scale())
            continue
        if format != "fp8_tensor":
            what = "no weight is quantized" if format is None else f"the weights are {format}"
            rule = f"{name} must be None because {what}: it is for fp8_tensor alone"
            raise ValueError(_checks.message(_OP, rule, **{name: scale}))
        scale = np.asarray(scale) if isinstance(scale, np.generic) else scale
        _checks.check_dtype(_OP, name, scale, ("float32",))
        shapes = ((), (num_local,)) if name == "intermediate_scale" else ((),)
        if scale.shape not in shapes:
            wanted = " or ".join(f"[{','.join(map(str, shape))}]" for shape in shapes)
            rule = f"{name}.shape={list(scale.shape)} must be {wanted}"
            raise ValueError(_checks.message(_OP, rule, **{name: scale}))
        arrays.append(jnp.asarray(scale).reshape(-1))
    if x_scale is not None and isinstance(x, QuantizedArray):
        rule = "x_scale must be None because x is quantized: it has its scale"
        raise ValueError(_checks.message(_OP, rule, x_scale=x_scale, x=x))
    return arrays[0], arrays[1]


def check_batch_invariant_scales(x: Any, format: str | None, given: dict[str, Any]) -> None:
    """Refuses dynamic scales that all tokens of a batch make together."""
    if format != "fp8_tensor":
        return
    for name, scale in given.items():
        if scale is None and not (name == "x_scale" and isinstance(x, QuantizedArray)):
            rule = (
                f"batch_invariant=True needs {name} with fp8_tensor weights: the scale is made of "
                "all tokens without it"
            )
            raise ValueError(_checks.message(_OP, rule, **{name: scale}))
