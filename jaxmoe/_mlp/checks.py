"""Argument checks of the layer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from jaxmoe._experts_checks import check_parts, format_of
from jaxmoe._formats import Format, static_scales
from jaxmoe._formats import checks as _formats_checks
from jaxmoe._gemm.tiles import (
    BLOCK_ROWS,
    LAYER_TILES,
    MAX_CODED_K,
    MAX_GATHER,
    PACKED_LAYER_TILES,
    WHOLE_BLOCKS,
)
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import mesh as _mesh
from jaxmoe._mlp import fetch as _fetch
from jaxmoe._mlp.configs import no_layer_kernel
from jaxmoe._mlp.operands import Layer
from jaxmoe.activation import Activation, Custom
from jaxmoe.experts import Experts
from jaxmoe.grouped_gemm import check_config
from jaxmoe.quantize import QuantizedArray, check_quantized
from jaxmoe.routing import Routing


def check_known(op: str, activation: Activation) -> None:
    """Refuses a function that closes over values of a trace, as a program is made of it later."""
    if not isinstance(activation, Custom):
        return
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    constants = jax.make_jaxpr(activation)(*[one] * (2 if activation.gated else 1)).consts
    traced = [value for value in constants if isinstance(value, Tracer)]
    if traced:
        rule = (
            f"activation={activation.name} must not close over a traced value: the function is "
            "part of the compiled program. Make the layer of jaxmoe.grouped_gemm and such a "
            "function, or put the value into weights or biases"
        )
        raise TypeError(_checks.message(op, rule, value=traced[0]))


def check_tokens(op: str, x: Any, routing: Any, residual: Any) -> None:
    """Checks what there is of each token."""
    if isinstance(x, QuantizedArray):
        _formats_checks.check_tokens(op, "x", x)
    else:
        _checks.check_float(op, "x", x)
        _checks.check_rank(op, "x", x, "T,H")
    _checks.check_type(op, "routing", routing, Routing, "a jaxmoe.Routing")
    ids, weights = routing.expert_ids, routing.weights
    _checks.check_rank(op, "routing.expert_ids", ids, "T,K")
    _checks.check_dtype(op, "routing.expert_ids", ids, ("int32",))
    _checks.check_rank(op, "routing.weights", weights, "T,K")
    _checks.check_dtype(op, "routing.weights", weights, ("float32",))
    _checks.check_same_dim(op, "routing.expert_ids", ids, 0, "x", x, 0, "num_tokens")
    for axis, meaning in ((0, "num_tokens"), (1, "top_k")):
        _checks.check_same_dim(
            op, "routing.weights", weights, axis, "routing.expert_ids", ids, axis, meaning
        )
    if residual is not None:
        _checks.check_rank(op, "residual", residual, "T,H")
        _checks.check_same_dtype(op, "residual", residual, "x", x)
        _checks.check_same_dim(op, "residual", residual, 0, "x", x, 0, "num_tokens")
        _checks.check_same_dim(op, "residual", residual, 1, "x", x, 1, "hidden")


def check_experts(op: str, x: Any, experts: Any) -> Format:
    """Checks the experts against the tokens. Returns the format of their weights."""
    what = "a jaxmoe.Experts: jaxmoe.Experts(gate_up=..., down=...)"
    _checks.check_type(op, "experts", experts, Experts, what)
    weights = {n: getattr(experts, n) for n in ("gate_up", "gate", "up", "down")}
    weights = {f"experts.{n}": w for n, w in weights.items() if w is not None}
    for name, w in weights.items():
        _check_weight(op, name, w)
    check_parts(experts)
    format = format_of(experts)
    _formats_checks.check_token_array(op, "x", x, "experts.down", experts.down, format)
    if not format.quantized:
        _formats_checks.check_tokens_are_plain(op, "x", x, *weights)
        _check_dtype(op, x, experts)
    if refused := format.refused_input(x.dtype):
        raise NotImplementedError(_checks.message(op, f"x.{refused}", x=x))
    k_axis = 1 if experts.layouts[0] == "kn" else 2
    name = next(iter(weights))
    _checks.check_same_dim(op, name, experts.first, k_axis, "x", x, len(x.shape) - 1, "hidden")
    n_axis = 2 if experts.layouts[1] == "kn" else 1
    _checks.check_same_dim(
        op, "experts.down", experts.down, n_axis, "x", x, len(x.shape) - 1, "hidden"
    )
    for name in ("gate_up_bias", "gate_bias", "up_bias", "down_bias"):
        bias = getattr(experts, name)
        if bias is not None:
            _checks.check_rank(op, f"experts.{name}", bias, "E,N")
            if format.quantized:
                _checks.check_same_dtype(op, f"experts.{name}", bias, "x", x)
    return format


def _check_weight(op: str, name: str, w: Any) -> None:
    if isinstance(w, QuantizedArray):
        check_quantized(op, name, w)
    else:
        _checks.check_rank(op, name, w, "E,K,N")


def _check_dtype(op: str, x: Any, experts: Experts) -> None:
    """Checks the dtype of plain weights, or that which they are rounded to."""
    down = experts.down
    dtype = down.dtype if experts.dtype is None else experts.dtype
    if x.dtype == dtype:
        return
    rule = (
        f"x.dtype={_checks.dtype_name(x.dtype)} must equal that of the experts, "
        f"{_checks.dtype_name(dtype)}"
    )
    if experts.dtype is not None:
        rule += " (experts.dtype)"
    if down.dtype == "float32" and experts.dtype is None:
        rule += f"; Experts(..., dtype={x.dtype.name!r}) keeps float32 master weights"
    raise TypeError(_checks.message(op, rule, **{"x": x, "experts.down": down}))


def num_experts(
    op: str, routing: Routing, experts: Experts, expert_offset: Any, expert_map: Any
) -> int:
    """The number of global experts, where the caller does not say it."""
    num_local, routed = experts.num_experts, routing.num_experts
    if routed is not None:
        routed = _checks.check_int(op, "routing.num_experts", routed, 0)
    if expert_map is not None:
        _checks.check_rank(op, "expert_map", expert_map, "E")
        (count,) = expert_map.shape
        if routed not in (None, count):
            rule = (
                f"expert_map.shape[0]={count} must equal routing.num_experts={routed}; give "
                f"num_experts={count} if ids past it name no expert"
            )
            raise ValueError(_checks.message(op, rule, expert_map=expert_map))
        return count
    hint = "give expert_map if it depends on the device"
    offset = _checks.check_int(op, "expert_offset", expert_offset, 0, hint=hint)
    if offset:
        if routed is not None and offset + num_local > routed:
            rule = (
                f"expert_offset={offset} and experts.num_experts={num_local} must end within "
                f"routing.num_experts={routed}; give num_experts={offset + num_local} if ids past "
                "it name no expert"
            )
            raise ValueError(_checks.message(op, rule, **{"experts.down": experts.down}))
        return routed or offset + num_local
    if routed not in (None, num_local):
        next_step = (
            f"if they are some of those, give num_experts={routed} for the first ones, "
            "expert_offset or expert_map for others, or call jaxmoe.expert_parallel.moe_mlp inside "
            "jax.shard_map"
            if num_local < routed
            else f"give num_experts={num_local} if the last of them are padding"
        )
        rule = (
            f"experts.num_experts={num_local} must equal routing.num_experts={routed}; {next_step}"
        )
        raise ValueError(_checks.message(op, rule, **{"experts.down": experts.down}))
    return num_local


def check_alone(op: str, format: Format, given: dict[str, bool]) -> None:
    """Refuses options that a layer has not whose value is computed in another format."""
    if not format.gradient.straight_through:
        return
    for name, there in given.items():
        if there:
            rule = f"{name} is not supported with experts.forward_format"
            raise NotImplementedError(_checks.message(op, rule))


def check_configs(
    op: str,
    config: Any,
    hidden: int,
    intermediate: int,
    promoted: tuple[bool, bool] | None,
    odd_blocks: bool,
    packed: bool,
    coded: bool = False,
) -> None:
    """Checks the tiles against the products they are for."""
    if config is None:
        return
    if not isinstance(config, tuple) or len(config) != 2:
        rule = "config must be a pair of GemmConfig, one for each product"
        raise TypeError(_checks.message(op, rule, config=config))
    for i, k in enumerate((hidden, intermediate)):
        check_config(
            op,
            f"config[{i}]",
            config[i],
            k,
            promoted=None if promoted is None else promoted[i],
            packed=packed,
            coded=coded and k <= MAX_CODED_K,
        )
    first = config[0]
    if config[1] is not None and config[1].gather:
        rule = "config[1].gather must be False: the down GEMM's rows are in order already"
        raise ValueError(_checks.message(op, rule, config=config))
    boxes = packed or (promoted is not None and promoted[0])
    if boxes and first and first.gather and first.token_tile > MAX_GATHER:
        kind = "packed weights" if packed else "promoted sums"
        rule = (
            f"config[0].gather must be False with token_tile={first.token_tile} and {kind}: only "
            f"tiles of up to {MAX_GATHER} tokens fetch rows by index then"
        )
        raise ValueError(_checks.message(op, rule, config=config))
    if odd_blocks and first and first.tile in WHOLE_BLOCKS:
        rule = (
            f"config[0] must have a tile of 128 rows and up to 192 tokens with blocks of scales "
            f"and an intermediate size of {intermediate}, not a multiple of {BLOCK_ROWS}"
        )
        raise ValueError(_checks.message(op, rule, config=config))


def check_one_kernel(op: str, layer: Layer, intermediate: int, static: bool) -> None:
    """Refuses one kernel for both products where there is none for them.

    `static`: whether the activations' scales are given.
    """
    first, second = layer.config or (None, None)
    name = "config[0].one_kernel"
    rule = None
    if second is not None and second.one_kernel:
        rule = "config[1].one_kernel must be False: the gate-up GEMM's kernel goes on, config[0]'s"
    elif first is None or not first.one_kernel:
        return
    elif (why := no_layer_kernel(layer, intermediate, static)) is not None:
        rule = f"{name} must be False {why}"
    elif first.tile not in (allowed := PACKED_LAYER_TILES if layer.format.packed else LAYER_TILES):
        tiles = ", ".join(map(str, sorted(allowed)))
        rule = f"{name}=True needs a tile among {tiles}, not {first.tile}"
    elif second is None or second.tile != first.tile:
        rule = f"{name}=True needs config[1] with the same tile, {first.tile}"
    if rule is not None:
        raise ValueError(_checks.message(op, rule, config=layer.config))


def check_scales(
    op: str, x: Any, format: Format, experts: Experts, num_local: int
) -> dict[str, jax.Array | None]:
    """Checks the static scales. Returns them as x_scale [1] and h_scale [1] or [E], or None."""
    given = {"x_scale": experts.x_scale, "h_scale": experts.h_scale}
    arrays: dict[str, jax.Array | None] = dict.fromkeys(given)
    for name, scale in given.items():
        if scale is None:
            continue
        if not format.static_scales:
            what = (
                f"the weights are {format.name}" if format.quantized else "no weight is quantized"
            )
            rule = f"experts.{name} must be None because {what}: it is for {static_scales()} alone"
            raise ValueError(_checks.message(op, rule, **{f"experts.{name}": scale}))
        scale = np.asarray(scale) if isinstance(scale, np.generic) else scale
        _checks.check_dtype(op, f"experts.{name}", scale, ("float32",))
        shapes = ((), (num_local,)) if name == "h_scale" else ((),)
        if scale.shape not in shapes:
            wanted = " or ".join(f"[{','.join(map(str, shape))}]" for shape in shapes)
            rule = f"experts.{name}.shape={list(scale.shape)} must be {wanted}"
            raise ValueError(_checks.message(op, rule, **{f"experts.{name}": scale}))
        arrays[name] = jnp.asarray(scale).reshape(-1)
    if experts.x_scale is not None and isinstance(x, QuantizedArray):
        rule = "experts.x_scale must be None because x is quantized: it has its scale"
        raise ValueError(_checks.message(op, rule, **{"experts.x_scale": experts.x_scale, "x": x}))
    return arrays


def check_batch_invariant_scales(
    op: str, x: Any, format: Format, given: dict[str, jax.Array | None]
) -> None:
    """Refuses dynamic scales that all tokens of a batch make together."""
    if not format.one_token_scale:
        return
    for name, scale in given.items():
        if scale is None and not (name == "x_scale" and isinstance(x, QuantizedArray)):
            rule = (
                f"batch_invariant=True needs experts.{name} with {format.name} weights: the scale "
                "is made of all tokens without it"
            )
            raise ValueError(_checks.message(op, rule, **{f"experts.{name}": scale}))


def check_gather_weights(op: str, axes: Any, x: Any, experts: Experts) -> tuple[str, ...] | None:
    """Checks the mesh axes over which weights are gathered, as far as the mesh is known."""
    if axes is None:
        return None
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        rule = "gather_weights must be the name of a mesh axis, a tuple of names, or None"
        raise TypeError(_checks.message(op, rule, gather_weights=axes))
    if len(set(names)) < len(names):
        raise ValueError(_checks.message(op, f"gather_weights={names!r} must name an axis once"))
    arrays = jax.tree.leaves((x, experts))
    mesh = _mesh.mesh_of([jax.typeof(a) for a in arrays])
    if mesh.empty:  # known when XLA divides the program, or there is one device
        return names
    shape, manual = dict(mesh.shape), _mesh.of_kind(mesh, AxisType.Manual)
    for name in names:
        _fetch.check_axis(name, shape, x)
        if name in manual:
            rule = (
                f"gather_weights={name!r} must be an Auto or Explicit axis, and inside this "
                "jax.shard_map it is Manual: jax.lax.all_gather the weights before the call"
            )
            raise ValueError(_checks.message(op, rule, x=x))
    _fetch.check_tokens(names, math.prod(shape[name] for name in names), x)
    return names
