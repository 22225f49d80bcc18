"""How the arguments of the expert-parallel layer lie on a mesh."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Generator
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe._experts_checks import format_of
from jaxmoe._jax import checks as _checks
from jaxmoe.activation import resolve
from jaxmoe.experts import Experts
from jaxmoe.quantize import QuantizedArray

OP = "expert_parallel.sharded_moe_mlp"


def names_of(axis: Any) -> tuple[str, ...]:
    """Returns mesh axes as a tuple of names; None and () are none."""
    if axis is None:
        return ()
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)


@contextlib.contextmanager
def of_one_device(devices: int) -> Generator[None]:
    """Says of errors that name arrays that these are a device's parts of what the caller gave."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if devices == 1 or not re.search(r" Got .*: \w+\[", str(error)):
            raise
        raise type(error)(f"{error} These are on one of {devices} devices.") from error


def check_mesh(mesh: Any, axes: dict[str, tuple[str, ...]]) -> Any:
    """The mesh, or that of `jax.set_mesh` for None; every named axis is in it, and named once."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            rule = "mesh must be given where jax.set_mesh has set none"
            raise ValueError(_checks.message(OP, rule, mesh=None))
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(_checks.message(OP, "mesh must be a jax.sharding.Mesh", mesh=mesh))
    used: dict[str, str] = {}
    for argument, names in axes.items():
        for name in names:
            if name not in mesh.axis_names:
                known = ", ".join(map(repr, mesh.axis_names))
                rule = f"{argument}={name!r} must be an axis of the mesh ({known})"
                raise ValueError(_checks.message(OP, rule))
            if name in used:
                twice = used[name] == argument
                other = "named once" if twice else f"another axis than {used[name]}"
                rule = f"{argument}={name!r} must be {other}"
                raise ValueError(_checks.message(OP, rule))
            used[name] = argument
    return mesh


def size_of(mesh: Any, names: tuple[str, ...]) -> int:
    """Returns how many devices lie along some axes."""
    count = 1
    for name in names:
        count *= mesh.shape[name]
    return count


def check_split(x: Any, experts: Any, token_devices: int, expert_devices: int, axis: str) -> None:
    """Checks that tokens and experts divide over their devices."""
    if x.shape[0] % token_devices:
        rule = (
            f"x.shape[0]={x.shape[0]} must be a multiple of {token_devices} "
            "(devices that share the tokens)"
        )
        raise ValueError(_checks.message(OP, rule, x=x))
    if not isinstance(experts, Experts):
        rule = "experts must be a jaxmoe.Experts: jaxmoe.Experts(gate_up=..., down=...)"
        raise TypeError(_checks.message(OP, rule, experts=experts))
    if len(experts.down.shape) != 3:
        rule = "experts must be those of one layer, whose weights have 3 axes"
        raise ValueError(_checks.message(OP, rule, **{"experts.down": experts.down}))
    if experts.num_experts % expert_devices:
        rule = (
            f"experts.num_experts={experts.num_experts} must be a multiple of {expert_devices} "
            f"(devices of axis {axis}); jaxmoe.expert_parallel.place_experts pads the weights"
        )
        raise ValueError(_checks.message(OP, rule, **{"experts.down": experts.down}))


def check_tensor_axis(mesh: Any, tensor: tuple[str, ...], experts: Experts) -> None:
    """Checks that the intermediate axis can be split where it is."""
    if not tensor:
        return
    act = resolve(experts.activation, OP)
    if act.gated and experts.gate is None and experts.order != "interleaved":
        rule = (
            f"experts.order={experts.order!r} must be 'interleaved' with "
            f"tensor_axis={tensor[0]!r}, or gate and up two arrays: a slice of the other orders "
            "holds gates without their ups"
        )
        raise ValueError(_checks.message(OP, rule))
    count, format, size = size_of(mesh, tensor), format_of(experts), experts.intermediate
    unit = math.lcm(*(format.unit(size, axis) for axis in "nk"))
    if size % (count * unit) == 0:
        return
    named = tensor[0] if len(tensor) == 1 else tensor
    rule = (
        f"experts.intermediate={size} must be a multiple of {count * unit} "
        f"(devices of tensor_axis={named!r}" + (f", blocks of {unit})" if unit > 1 else ")")
    )
    if unit == size > 1:
        rule = (
            f"tensor_axis={tensor[0]!r} must be None in {format.name}, whose scales are those of "
            "all of the contracted axis"
        )
    raise ValueError(_checks.message(OP, rule, **{"experts.down": experts.down}))


def expert_specs(experts: Experts, expert: tuple[str, ...], tensor: tuple[str, ...]) -> Experts:
    """Returns where experts lie: the experts over `expert`, I over `tensor`."""
    on_i = tensor or None

    def weight(w: Any, layout: str, k: Any, n: Any) -> Any:
        if w is None:
            return None
        if isinstance(w, QuantizedArray):
            # Values are [E, N, K]; scales [E], [E, N] or one for each block of both.
            stored = (expert, n, k)
            scales = P(*stored[: w.scales.ndim])
            return QuantizedArray(P(*stored), scales, w.format, w.layout, w.dtype)  # pyright: ignore[reportArgumentType]
        return P(expert, k, n) if layout == "kn" else P(expert, n, k)

    def small(a: Any, *axes: Any) -> Any:
        return None if a is None else P(*axes) if getattr(a, "ndim", 0) else P()

    first, second = experts.layouts
    return dataclasses.replace(
        experts,
        gate_up=weight(experts.gate_up, first, None, on_i),
        gate=weight(experts.gate, first, None, on_i),
        up=weight(experts.up, first, None, on_i),
        down=weight(experts.down, second, on_i, None),
        gate_up_bias=small(experts.gate_up_bias, expert, on_i),
        gate_bias=small(experts.gate_bias, expert, on_i),
        up_bias=small(experts.up_bias, expert, on_i),
        down_bias=small(experts.down_bias, expert),
        x_scale=small(experts.x_scale),
        h_scale=small(experts.h_scale, expert),
    )


def token_spec(x: Any, tokens: tuple[str, ...]) -> Any:
    """Returns where tokens lie: rows over `tokens`, and the scales of quantized ones with them."""
    spec = P(tokens or None)
    if not isinstance(x, QuantizedArray):
        return spec
    scales = spec if x.scales.ndim else P()
    return QuantizedArray(spec, scales, x.format, x.layout, x.dtype)  # pyright: ignore[reportArgumentType]


def placed(mesh: Any, value: Any, spec: Any) -> Any:
    """Reshards what lies otherwise along Explicit axes of a mesh, which nobody else does."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
    if not explicit:
        return value

    def along(axes: Any) -> Any:
        return tuple(name for name in names_of(axes) if name in explicit) or None

    def put(a: Any, s: P) -> Any:
        sharding = NamedSharding(mesh, P(*map(along, s)))
        return a if a is None else jax.sharding.reshard(a, sharding)

    if isinstance(spec, P):
        return jax.tree.map(lambda a: put(a, spec), value)
    return jax.tree.map(put, value, spec)
