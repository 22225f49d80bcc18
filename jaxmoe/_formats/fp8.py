"""FP8 weights and tokens: values of one byte, with scales per tensor, per channel or per block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import quantization
from jaxmoe._formats.base import Format, Gradient, Tokens

BLOCK = quantization.BLOCK
PROMOTED_K = 2048  # products over more elements promote their sums by default
ACCUMS = ("fast", "promoted")
_REFUSED = (
    "no derivative is defined with quantized weights: FP8 runs forward only; take "
    "jaxmoe.dequantize of them to differentiate"
)


@dataclasses.dataclass(frozen=True)
class Fp8(Format):
    """Weights and tokens in FP8.

    Attributes:
      scaled_by_step: whether each 128 elements of k have a scale: then sums are always promoted.
    """

    scaled_by_step: bool = False

    @property
    def accums(self) -> tuple[str, ...]:
        """The ways of adding up that a caller may name."""
        return ACCUMS

    @property
    def token_dtype(self) -> Any:
        """float8_e4m3fn, whatever weights are."""
        return jnp.dtype(jnp.float8_e4m3fn)

    def tokens(self, x: jax.Array, scale: jax.Array | None = None) -> Tokens:
        """Quantizes rows, with a static scale if there is one."""
        values, scales = quantization.quantize(
            x,
            scale,
            shared=quantization.sharing(self.token_scales or ""),
            element_type="e4m3",
            e8m0=False,
        )
        return Tokens(values, scales)

    def by_row(self, values: jax.Array, scales: Any) -> tuple[Format, Any]:
        """The format, and the scales of weights, in which each token has a scale of its own."""
        if self.token_scales != "":
            return self, scales
        return FP8_CHANNEL, jnp.broadcast_to(scales[:, None], values.shape[:2])

    def token_scale_count(self, rows: int, k: int) -> int:
        """Floats of scale that [rows, k] tokens have."""
        if self.token_scales == "":
            return 1
        return rows * (-(-k // BLOCK) if self.token_scales == "t q" else 1)

    def sums(self, accum: str | None, k: int) -> bool | None:
        """Whether a product over `k` promotes its sums."""
        return self.scaled_by_step or (k > PROMOTED_K if accum is None else accum == "promoted")

    def refused_accum(self, accum: str | None) -> str | None:
        """Why the format does not have these sums, None if it does."""
        if self.scaled_by_step and accum == "fast":
            return (
                f"accum='fast' must be 'promoted' or None: {self.name} scales each 128 of k apart"
            )
        return None


_FORWARD_ONLY = Gradient(refused=_REFUSED)

FP8_TENSOR = Fp8(
    "fp8_tensor",
    code=1,
    weight_scales="e",
    token_scales="",
    element_types=("e4m3", "e5m2"),
    static_scales=True,
    gradient=_FORWARD_ONLY,
)
FP8_CHANNEL = Fp8(
    "fp8_channel",
    code=2,
    weight_scales="e n",
    token_scales="t",
    element_types=("e4m3",),
    gradient=_FORWARD_ONLY,
)
FP8_BLOCK = Fp8(
    "fp8_block",
    code=3,
    weight_scales="e p q",
    token_scales="t q",
    block=BLOCK,
    element_types=("e4m3",),
    gradient=_FORWARD_ONLY,
    scaled_by_step=True,
)
