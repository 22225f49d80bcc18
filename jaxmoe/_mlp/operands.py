"""The operands of the layer by name, and its static parameters."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe._formats import Format
from jaxmoe._gemm.tiles import CODED
from jaxmoe.activation import Activation


class Operands(NamedTuple):
    """The arrays of a layer; None for those that are absent.

    Attributes:
      x: [T, H] in the dtype of the layer, or quantized tokens.
      expert_ids: [T, K] int32.
      w_gate_up: [E1, ...] both halves, or the gate's alone, as the format stores it.
      w_down: [E2, ...].
      x_scales: of quantized tokens.
      weights: [T, K] float32, absent without finalize.
      gate_up_scales: of quantized w_gate_up; with `w_up` and without `up_scales` of both halves.
      w_up: [E1, ...], the other half.
      up_scales: of quantized w_up.
      down_scales: of quantized w_down.
      b_gate_up: [E1, N], or the gate's half if `b_up` is there.
      b_up: [E1, I].
      b_down: [E2, H].
      expert_map: [num_experts] int32.
      residual: [T, H].
      x_scale: [1] float32, static scale of x.
      h_scale: [1] or [E] float32, static scale of the activations.

    E1 and E2 divide the number of local experts, and group g uses weights g mod E1 and g mod E2, so
    that `vmap` can turn examples into groups without a copy of weights that all of them share.
    """

    x: Any
    expert_ids: Any
    w_gate_up: Any
    w_down: Any
    x_scales: Any = None
    weights: Any = None
    gate_up_scales: Any = None
    w_up: Any = None
    up_scales: Any = None
    down_scales: Any = None
    b_gate_up: Any = None
    b_up: Any = None
    b_down: Any = None
    expert_map: Any = None
    residual: Any = None
    x_scale: Any = None
    h_scale: Any = None

    @property
    def absent(self) -> tuple[str, ...]:
        """The names of those that are."""
        return tuple(name for name, x in zip(self._fields, self, strict=True) if x is None)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The static parameters of a layer.

    Attributes:
      format: of the weights.
      dtype: of the result, of biases and residual, and of x unless it is quantized.
      activation: see `jaxmoe.Activation`.
      gate_up: order of the outputs of w_gate_up; "gate_up" with `w_up`.
      layouts: "kn" or "nk" for each weight, as stored.
      num_experts, num_local_experts, expert_offset: see `jaxmoe.plan`.
      precision: of float32 products, see `jaxmoe.grouped_gemm`; None in other dtypes.
      promoted: whether each product promotes its sums, None where the format has no choice.
      config: tiles of the two CUDA products, None for those that the shapes choose.
      gather: mesh axes over which weights are gathered, None to choose by bytes.
      finalize: whether the result is y [T, H], or rows [R, H] and slot_to_row [T, K].
      first: the field of `jaxmoe.Experts` that w_gate_up was given as, for messages.
    """

    format: Format
    dtype: Any
    activation: Activation
    gate_up: str
    layouts: tuple[str, str]
    num_experts: int
    num_local_experts: int
    expert_offset: int
    precision: Any = None
    promoted: tuple[bool, bool] | None = None
    config: tuple[Any, Any] | None = None
    gather: tuple[str, ...] | None = None
    finalize: bool = True
    first: str = "gate_up"

    def replace(self, **changes: Any) -> "Layer":
        """The layer with other values."""
        return dataclasses.replace(self, **changes)

    @property
    def op(self) -> str:
        """The public function that it is, for messages."""
        return "moe_mlp" if self.finalize else "expert_rows"

    def multiplies_codes(self, absent: tuple[str, ...]) -> bool:
        """Whether it may do so, if it is one call, without the operands `absent`."""
        return self.activation.fused and self.format.multiplies_codes(absent)

    @property
    def configs_apart(self) -> tuple[Any, Any]:
        """The tiles asked for, where each product is a call, of which none multiplies codes."""
        first, second = self.config or (None, None)
        gone = tuple(CODED) if self.format.packed else ()
        decodes = lambda c: None if c is None or c.tile in gone else c  # noqa: E731
        return decodes(first), decodes(second)

    @property
    def weight_names(self) -> dict[str, str]:
        """What the caller calls each weight, by its name in `Operands`."""
        fields = {"w_gate_up": self.first, "w_up": "up", "w_down": "down"}
        values = ".values" if self.format.quantized else ""
        return {name: f"experts.{field}{values}" for name, field in fields.items()}

    @property
    def called(self) -> dict[str, str]:
        """What the caller calls everything that is quantized, and its scales."""
        fields = {"gate_up": self.first, "up": "up", "down": "down"}
        scales = {f"{name}_scales": f"experts.{field}.scales" for name, field in fields.items()}
        static = {name: f"experts.{name}" for name in ("x_scale", "h_scale")}
        return {"x": "x.values", "x_scales": "x.scales", **self.weight_names, **scales, **static}

    @property
    def window(self) -> dict[str, int]:
        """Which experts are local."""
        return {
            "num_experts": self.num_experts,
            "num_local_experts": self.num_local_experts,
            "expert_offset": self.expert_offset,
        }

    def intermediate(self, w_down: Any) -> int:
        """I, the length of what the second product contracts."""
        return self.format.weight_shape(w_down.shape)[1 if self.layouts[1] == "kn" else 2]


def is_joined(a: Operands) -> bool:
    """Whether what belongs to both halves of the first weight is in one array."""
    return a.b_up is None and a.up_scales is None


def join(a: Operands, layer: Layer) -> Operands:
    """Joins biases and scales of the halves, which are small; the weights stay two arrays.

    Scales [E] of a tensor become [E, 2].
    """
    b, s = a.b_gate_up, a.gate_up_scales
    if a.b_up is not None:
        b = jnp.concatenate([b, a.b_up], axis=1)
    if a.up_scales is not None:
        if layer.format.weight_scales == "e":
            s = jnp.stack([s, a.up_scales], axis=1)
        else:
            s = jnp.concatenate([s, a.up_scales], axis=1)
    return a._replace(b_gate_up=b, b_up=None, gate_up_scales=s, up_scales=None)


def halves(a: Operands, layer: Layer) -> list[tuple[jax.Array, Any, Any]]:
    """Weight, scales and bias of each array that holds outputs of the first product."""
    if a.w_up is None:
        return [(a.w_gate_up, a.gate_up_scales, a.b_gate_up)]
    biases = (None, None) if a.b_gate_up is None else jnp.split(a.b_gate_up, 2, axis=1)
    if a.gate_up_scales is None:
        scales: Any = (None, None)
    elif layer.format.weight_scales == "e":
        scales = (a.gate_up_scales[:, 0], a.gate_up_scales[:, 1])
    else:
        scales = jnp.split(a.gate_up_scales, 2, axis=1)
    return [(a.w_gate_up, scales[0], biases[0]), (a.w_up, scales[1], biases[1])]
