"""Argument checks of `expert_parallel.moe_mlp`, and the setup that follows from them."""

import dataclasses
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._ep import hops as _hops
from jaxmoe._ep.cost import TOKENS
from jaxmoe._ep.direct import OP
from jaxmoe._ep.exchange import Axis
from jaxmoe._formats import Format, token_format_of
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import sizes as _sizes
from jaxmoe._mlp.checks import check_experts, check_tokens
from jaxmoe.experts import Experts
from jaxmoe.quantize import FORMATS, QuantizedArray

# Options that are passed on to `jaxmoe.moe_mlp` as they are, and what they are by default.
OPTIONS = {
    "apply_weight_on_input": False,
    "batch_invariant": False,
    "config": None,
    "recompute": None,
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that `moe_mlp` knows before it computes anything.

    Attributes:
      num_experts: global experts.
      num_local: experts that each device holds.
      hops: the exchanges that tokens take, of a chunk, in order.
      format: of the weights.
      quantizes: whether tokens are quantized before they are sent.
      tensor_axis: the mesh axis that splits I, "" for none.
      own_apart: whether a device's own tokens are computed apart from the others'.
    """

    axis: Axis
    num_experts: int
    num_local: int
    hops: tuple[_hops.Hop, ...]
    format: Format
    quantizes: bool
    tensor_axis: str
    own_apart: bool

    @property
    def dispatch(self) -> str:
        """The names of the ways."""
        return "+".join(hop.dispatch for hop in self.hops)


def check_all(
    x: Any,
    routing: Any,
    experts: Any,
    *,
    axis_name: Any,
    tokens: Any,
    dispatch: Any,
    capacity_factor: Any,
    num_chunks: Any,
    own_apart: Any,
    num_experts: Any,
    expert_map: Any,
    dispatch_format: Any,
    sum_dtype: Any,
    tensor_axis: Any,
    residual: Any,
    options: dict[str, Any],
) -> Setup:
    """Checks the arguments of `moe_mlp`."""
    _check_options(options)
    check_tokens(OP, x, routing, residual)
    format = check_experts(OP, x, experts)
    size = _axis_size("axis_name", axis_name)
    if tensor_axis is not None:
        _axis_size("tensor_axis", tensor_axis)
        if tensor_axis in _names(axis_name):
            rule = f"tensor_axis={tensor_axis!r} must be another mesh axis than axis_name"
            raise ValueError(_checks.message(OP, rule))
    routed = routing.num_experts if num_experts is None else None
    num_experts = _check_experts(num_experts, expert_map, experts.down, size, f"axis {axis_name!r}")
    if routed not in (None, num_experts):
        _refuse_routed(routed, num_experts, experts, size, expert_map)
    num_tokens, top_k = routing.expert_ids.shape
    if not 1 <= top_k <= num_experts:
        rule = f"top_k={top_k} (routing.expert_ids.shape[1]) must be in [1, {num_experts}]"
        raise ValueError(_checks.message(OP, rule, expert_ids=routing.expert_ids))
    _check_tokens_axis(x, routing, residual, tokens, axis_name)
    if expert_map is not None:
        _refuse_varying("expert_map", expert_map, axis_name)
    _check_weights_axes(experts, axis_name, tensor_axis, expert_map)
    if not _sizes.is_known(num_tokens):  # JAX cannot compile a jax.shard_map of a symbol
        rule = (
            f"x.shape[0]={num_tokens} must be known at trace time: export a program for each "
            "number of tokens"
        )
        raise ValueError(_checks.message(OP, rule, x=x))
    num_chunks = _checks.check_int(OP, "num_chunks", num_chunks, 1)
    if num_tokens % num_chunks:
        rule = f"x.shape[0]={num_tokens} must be a multiple of num_chunks={num_chunks}"
        raise ValueError(_checks.message(OP, rule, x=x))
    quantizes = _check_dispatch_format(dispatch_format, format, x, experts.down)
    if sum_dtype is not None and sum_dtype not in ("float32", jnp.float32):
        rule = f"sum_dtype={sum_dtype!r} must be 'float32', or None for the dtype of x"
        raise ValueError(_checks.message(OP, rule))
    per_chunk = num_tokens // num_chunks
    one_byte = quantizes or isinstance(x, QuantizedArray)
    ways = _hops.names_of(dispatch, axis_name, tokens, own_apart is True)
    sent = _hops.Tokens(x, per_chunk, top_k, 1 if one_byte else None, own_apart is True)
    dtype = x.dtype if sum_dtype is None else sum_dtype
    hops = _hops.hops_of(ways, sent, experts.num_experts, capacity_factor, dtype)
    name = "+".join(hop.dispatch for hop in hops)
    if type(own_apart) is not bool:
        rule = "own_apart must be a bool"
        raise TypeError(_checks.message(OP, rule, own_apart=own_apart))
    if own_apart and name != "all_gather":
        rule = f"own_apart=True needs dispatch 'all_gather', and this is {name!r}"
        raise ValueError(_checks.message(OP, rule, x=x))
    return Setup(
        Axis(axis_name, size, jax.lax.axis_index(axis_name), np.dtype(dtype)),
        num_experts,
        experts.num_experts,
        hops,
        format,
        quantizes,
        tensor_axis or "",
        own_apart,
    )


def _check_experts(num_experts: Any, expert_map: Any, w: Any, num_devices: int, axis: str) -> int:
    """Checks the experts against the devices that share them. Returns the number of experts."""
    num_local = w.shape[0]
    held = num_local * num_devices
    if expert_map is None:
        if num_experts is None:
            return held
        why = (
            f"the {num_devices} devices of {axis} hold {num_local} experts each; "
            "give expert_map for another order or for copies"
        )
        return _checks.check_int(OP, "num_experts", num_experts, 1, held, why)
    _checks.check_rank(OP, "expert_map", expert_map, "n,E")
    _checks.check_dtype(OP, "expert_map", expert_map, ("int32",))
    _checks.check_dim(OP, "expert_map", expert_map, 0, num_devices, f"the devices of {axis}")
    if num_experts is not None:
        num_experts = _checks.check_int(OP, "num_experts", num_experts, 1)
        _checks.check_dim(OP, "expert_map", expert_map, 1, num_experts, "num_experts")
    check_table(OP, expert_map, num_local)
    return expert_map.shape[1]


def _refuse_routed(
    routed: int, num_experts: int, experts: Experts, num_devices: int, expert_map: Any
) -> NoReturn:
    """Raises because tokens are routed over another number of experts than the devices hold."""
    if expert_map is not None:
        rule = (
            f"expert_map.shape[1]={num_experts} must equal routing.num_experts={routed}; give "
            f"num_experts={num_experts} if ids past it name no expert"
        )
        raise ValueError(_checks.message(OP, rule, expert_map=expert_map))
    next_step = (
        f"give num_experts={routed} if the last of them are padding, and expert_map if some are "
        "copies"
        if routed < num_experts
        else "give all of them to the jax.shard_map around the call, split over the axis"
    )
    rule = (
        f"{num_devices} devices with experts.num_experts={experts.num_experts} hold "
        f"{num_experts} experts, which must equal routing.num_experts={routed}; {next_step}"
    )
    raise ValueError(_checks.message(OP, rule, **{"experts.down": experts.down}))


def check_table(op: str, expert_map: Any, num_local: int | None) -> None:
    """Refuses a table, known at trace time, that no weights of `num_local` experts can be."""
    if not expert_map.shape[1]:
        rule = "expert_map.shape[1]=0 must be at least 1, the number of experts"
        raise ValueError(_checks.message(op, rule, expert_map=expert_map))
    if not isinstance(expert_map, np.ndarray):
        return
    largest = int(expert_map.max(initial=-1))
    if num_local is not None and largest >= num_local:
        rule = (
            f"expert_map holds the local id {largest}, which must be below {num_local} "
            "(experts that each device holds)"
        )
        raise ValueError(_checks.message(op, rule, expert_map=expert_map))
    if (nowhere := np.flatnonzero((expert_map < 0).all(axis=0))).size:
        rule = f"expert_map must have each expert on some device, and none has expert {nowhere[0]}"
        raise ValueError(_checks.message(op, rule, expert_map=expert_map))
    for device, ids in enumerate(expert_map):
        found, count = np.unique(ids[ids >= 0], return_counts=True)
        if (twice := found[count > 1]).size:
            both = np.flatnonzero(ids == twice[0])
            rule = (
                f"expert_map[{device}] must have a local id for each expert, and experts {both[0]} "
                f"and {both[1]} have the same, {twice[0]}"
            )
            raise ValueError(_checks.message(op, rule, expert_map=expert_map))


def _names(axis_name: Any) -> tuple[Any, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _axis_size(argument: str, axis_name: Any) -> int:
    """Returns the number of devices along a mesh axis, or several."""
    names = _names(axis_name)
    if not names or not all(isinstance(name, str) for name in names):
        what = "the name of a mesh axis, or a tuple of them"
        raise TypeError(_checks.message(OP, f"{argument} must be {what}", **{argument: axis_name}))
    sizes: list[int] = []
    for name in names:
        try:
            sizes.append(jax.lax.axis_size(name))
        except NameError:
            known = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
            rule = (
                f"{argument}={axis_name!r} must be an axis of the jax.shard_map around the call "
                f"({known or 'there is none; expert_parallel.sharded_moe_mlp wraps itself'})"
            )
            raise ValueError(_checks.message(OP, rule)) from None
    return math.prod(sizes)


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            rule = f"{name} is no argument; those of jaxmoe.moe_mlp it takes: {', '.join(OPTIONS)}"
            raise TypeError(_checks.message(OP, rule))


def _varying(value: Any) -> frozenset[str]:
    """The manual axes along which devices may have different values."""
    values = value.values if isinstance(value, QuantizedArray) else value
    return frozenset(jax.typeof(values).manual_axis_type.varying)


def _tracked(axes: Any) -> list[str]:
    """Mesh axes among `axes` whose varying values JAX tracks in types (check_vma=True)."""
    several = (name for name in _names(axes) if jax.lax.axis_size(name) > 1)
    return [name for name in several if name in _varying(jax.lax.axis_index(name))]


def _refuse_varying(name: str, value: Any, axis_name: Any, where: str = "") -> None:
    if split := [axis for axis in _names(axis_name) if axis in _varying(value)]:
        rule = f"{name} must be the same on every device along {split[0]!r}{where}"
        raise ValueError(_checks.message(OP, rule, **{name: value}))


def _check_tokens_axis(x: Any, routing: Any, residual: Any, tokens: Any, axis_name: Any) -> None:
    _checks.check_choice(OP, "tokens", tokens, TOKENS)
    varies = _varying(x)
    if tokens == "replicated":
        given = {"x": x, "residual": residual}
        given |= {f"routing.{n}": getattr(routing, n) for n in ("expert_ids", "weights")}
        for name, value in given.items():
            if value is not None:
                _refuse_varying(name, value, axis_name, " with tokens='replicated'")
        return
    if same := [name for name in _tracked(axis_name) if name not in varies]:
        rule = (
            f"x must differ along {same[0]!r} with tokens='sharded', and every device has the same "
            "tokens, which would be computed as often; split x, routing and residual with "
            f"in_specs=P({axis_name!r}), or give tokens='replicated'"
        )
        raise ValueError(_checks.message(OP, rule, x=x))


def _check_weights_axes(
    experts: Experts, axis_name: Any, tensor_axis: Any, expert_map: Any
) -> None:
    """Refuses weights that are the same on devices that are taken to hold different ones."""
    axes = _tracked(axis_name) if expert_map is None else []
    axes += [] if tensor_axis is None else _tracked(tensor_axis)
    for name in ("gate_up", "gate", "up", "down"):
        w = getattr(experts, name)
        varies = frozenset(axes) if w is None else _varying(w)
        if same := [axis for axis in axes if axis not in varies]:
            part = "its part of I" if same[0] == tensor_axis else "experts of its own"
            rule = (
                f"experts.{name} must differ along {same[0]!r}, where each device has {part}, and "
                f"every device has the same; split it with {same[0]!r} in its in_specs"
            )
            raise ValueError(_checks.message(OP, rule, **{f"experts.{name}": w}))


def _check_dispatch_format(wanted: Any, format: Format, x: Any, w: Any) -> bool:
    if wanted is None:
        return False
    _checks.check_choice(OP, "dispatch_format", wanted, FORMATS)
    if format.token_array not in (None, format.name, wanted):
        rule = (
            f"dispatch_format={wanted!r} must be None or {format.token_array!r}, in which the "
            "layer has its tokens"
        )
        raise ValueError(_checks.message(OP, rule, **{"experts.down": w}))
    beside = token_format_of(format.name, wanted)
    if format.token_array is None and beside is not None:
        rule = (
            f"dispatch_format={wanted!r} must be None: beside weights in {format.name} tokens are "
            f"in {wanted} with experts.token_format={beside!r}"
        )
        raise ValueError(_checks.message(OP, rule, **{"experts.down": w}))
    if wanted not in (format.name, format.token_array):
        what = f"in {format.name}" if format.quantized else "not quantized"
        rule = (
            f"dispatch_format={wanted!r} must be None or the format of the weights, which are "
            f"{what}: experts multiply tokens as they arrive"
        )
        raise ValueError(_checks.message(OP, rule, **{"experts.down": w}))
    if not format.quantizes_tokens:
        rule = f"dispatch_format={wanted!r} must be None: {wanted} is a format of weights alone"
        raise ValueError(_checks.message(OP, rule, **{"experts.down": w}))
    return not isinstance(x, QuantizedArray)
