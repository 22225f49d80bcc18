"""How the arguments of the expert-parallel layer lie on a mesh."""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import _checks
from jaxmoe.activation import resolve
from jaxmoe.quantize import QuantizedArray

OP = "expert_parallel.sharded_moe_mlp"
# Options that are arrays with an axis of experts, or of anything else.
ARRAYS = ("b_gate_up", "b_down", "intermediate_scale")


def names_of(axis: Any) -> tuple[str, ...]:
    """Returns mesh axes as a tuple of names; None and () are none."""
    if axis is None:
        return ()
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)


def check_mesh(mesh: Any, axes: dict[str, tuple[str, ...]]) -> None:
    """Checks that every named axis is one of the mesh, and each named once."""
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
                rule = f"{argument}={name!r} must be another axis than {used[name]}"
                raise ValueError(_checks.message(OP, rule))
            used[name] = argument


def size_of(mesh: Any, names: tuple[str, ...]) -> int:
    """Returns how many devices lie along some axes."""
    count = 1
    for name in names:
        count *= mesh.shape[name]
    return count


def check_split(x: Any, w: Any, token_devices: int, expert_devices: int, axis: str) -> None:
    """Checks that tokens and experts divide over their devices."""
    for name, array, count, meaning in (
        ("x", x, token_devices, "devices that share the tokens"),
        ("w_gate_up", w, expert_devices, f"devices of axis {axis}"),
    ):
        if not hasattr(array, "shape") or not array.shape:
            raise TypeError(_checks.message(OP, f"{name} must be an array", **{name: array}))
        if array.shape[0] % count:
            rule = f"{name}.shape[0]={array.shape[0]} must be a multiple of {count} ({meaning})"
            if name == "w_gate_up":
                rule += "; jaxmoe.expert_parallel.place_experts pads the weights"
            raise ValueError(_checks.message(OP, rule, **{name: array}))


def check_tensor_axis(mesh: Any, tensor: tuple[str, ...], w_down: Any, options: Any) -> None:
    """Checks that the intermediate axis can be split where it is."""
    if not tensor:
        return
    act = resolve(options.get("activation", "swiglu"), OP)
    order = options.get("gate_up", "gate_up")
    if act.gated and order != "interleaved":
        rule = (
            f"gate_up={order!r} must be 'interleaved' with tensor_axis={tensor[0]!r}: a slice of "
            "the other orders holds gates without their ups"
        )
        raise ValueError(_checks.message(OP, rule))
    axis = 1 if options.get("weight_layout", "kn") == "kn" else 2
    count = size_of(mesh, tensor)
    block = 128 if getattr(w_down, "format", "") == "fp8_block" else 1
    if w_down.shape[axis] % (count * block):
        rule = (
            f"w_down.shape[{axis}]={w_down.shape[axis]} must be a multiple of {count * block} "
            f"(devices of tensor_axis={tensor[0]!r}" + (", blocks of 128)" if block > 1 else ")")
        )
        raise ValueError(_checks.message(OP, rule, w_down=w_down))


def weight_specs(
    w_gate_up: Any, w_down: Any, expert: tuple[str, ...], tensor: tuple[str, ...], layout: str
) -> tuple[Any, Any]:
    """Returns where the two stacked weights lie: experts over `expert`, I over `tensor`."""
    on_i = tensor or None
    outputs, inputs = (expert, None, on_i), (expert, on_i, None)
    if layout == "nk":
        outputs, inputs = inputs, outputs
    return (
        _quantized_spec(w_gate_up, (expert, on_i, None), outputs),
        _quantized_spec(w_down, (expert, None, on_i), inputs),
    )


def _quantized_spec(w: Any, stored: tuple[Any, ...], plain: tuple[Any, ...]) -> Any:
    if not isinstance(w, QuantizedArray):
        return P(*plain)
    # Values are [E, N, K]; scales [E], [E, N] or one for each block of both.
    scales = stored[: w.scales.ndim]
    return QuantizedArray(P(*stored), P(*scales), w.format, w.layout, w.dtype)  # pyright: ignore[reportArgumentType]


def token_spec(x: Any, tokens: tuple[str, ...]) -> Any:
    """Returns where tokens lie: rows over `tokens`, and the scales of quantized ones with them."""
    spec = P(tokens or None)
    if not isinstance(x, QuantizedArray):
        return spec
    scales = spec if x.scales.ndim else P()
    return QuantizedArray(spec, scales, x.format, x.layout, x.dtype)  # pyright: ignore[reportArgumentType]


def array_specs(
    arrays: dict[str, Any], expert: tuple[str, ...], tensor: tuple[str, ...]
) -> dict[str, Any]:
    """Returns where biases and scales lie."""
    specs = {
        "b_gate_up": P(expert, tensor or None),
        "b_down": P(expert),
        "intermediate_scale": P(expert),
    }
    return {n: specs[n] if getattr(a, "ndim", 0) else P() for n, a in arrays.items()}


def placed(mesh: Any, value: Any, spec: Any) -> Any:
    """Reshards what lies otherwise on a mesh of Explicit axes, which nobody else does."""
    if AxisType.Explicit not in mesh.axis_types:
        return value

    def put(a: Any, s: P) -> Any:
        return a if a is None else jax.sharding.reshard(a, NamedSharding(mesh, s))

    if isinstance(spec, P):
        return jax.tree.map(lambda a: put(a, spec), value)
    return jax.tree.map(put, value, spec)
