"""FP8 weights and tokens: values of one byte, with scales per tensor, per channel or per block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import quantization
from jaxmoe._formats.base import Format, Gradient, Tokens, dot

BLOCK = quantization.BLOCK
PROMOTED_K = 2048  # products over more elements promote their sums by default


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
        return "fast", "promoted"

    @property
    def token_dtype(self) -> Any:
        """float8_e4m3fn, whatever weights are."""
        return jnp.dtype(jnp.float8_e4m3fn)

    def encode(
        self, x: jax.Array, scale: jax.Array | None, *, element_type: str, e8m0: bool, tokens: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Quantizes tokens [R, K] or weights [E, N, K]: their values and scales."""
        shared = quantization.sharing(self.scales_of(tokens))
        return quantization.quantize(x, scale, shared=shared, element_type=element_type, e8m0=e8m0)

    def tokens(self, x: jax.Array, scale: jax.Array | None = None) -> Tokens:
        """Quantizes rows, with a static scale if there is one."""
        return Tokens(*self.encode(x, scale, element_type="e4m3", e8m0=False, tokens=True))

    def multiply(
        self, x: jax.Array, x_scales: jax.Array | None, w: jax.Array, w_scales: jax.Array
    ) -> jax.Array:
        """Scales each 128 of k apart, where they have scales of their own."""
        if not self.scaled_by_step or x_scales is None:
            return super().multiply(x, x_scales, w, w_scales)
        padding = ((0, 0), (0, x_scales.shape[1] * BLOCK - x.shape[1]))
        x, w = (jnp.pad(a, padding).reshape(a.shape[0], -1, BLOCK).swapaxes(0, 1) for a in (x, w))
        w_scales = jnp.repeat(w_scales, BLOCK, axis=0)[: w.shape[1]]
        return (dot(x, w) * x_scales.T[:, :, None] * w_scales.T[:, None, :]).sum(axis=0)

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


_E4M3 = ("e4m3", jnp.float8_e4m3fn)
_FROZEN = Gradient(frozen=True)

FP8_TENSOR = Fp8(
    "fp8_tensor",
    code=1,
    weight_scales="e",
    token_scales="",
    stored=(_E4M3, ("e5m2", jnp.float8_e5m2)),
    static_scales=True,
    gradient=_FROZEN,
)
FP8_CHANNEL = Fp8(
    "fp8_channel",
    code=2,
    weight_scales="e n",
    token_scales="t",
    stored=(_E4M3,),
    gradient=_FROZEN,
)
FP8_BLOCK = Fp8(
    "fp8_block",
    code=3,
    weight_scales="e p q",
    token_scales="t q",
    block=BLOCK,
    stored=(_E4M3,),
    gradient=_FROZEN,
    scaled_by_step=True,
)
