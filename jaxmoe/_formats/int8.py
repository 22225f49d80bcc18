"""Eight-bit integers with a float32 scale for each output, which is all that packing leaves."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmoe._formats import elements
from jaxmoe._formats.weight_only import Packed, stored


@dataclasses.dataclass(frozen=True)
class Int8(Packed):
    """Weights q * scale, q in two's complement."""

    def encode_weights(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantizes weights [E, N, K]; the largest of an output is 127 times its scale."""
        x = x.astype(jnp.float32)
        nan = jnp.isnan(x)
        scales = elements.over(elements.largest(x, -1), 127.0)
        scales = elements.finite_scales(scales, 127.0, jnp.float32)
        scales = jnp.where(nan.any(axis=-1), jnp.nan, scales)
        step = jnp.where(scales > 0, scales, jnp.inf)[..., None]
        q = jnp.where(nan, 0, jnp.clip(jnp.round(elements.over(x, step)), -127, 127))
        return self.pack(q.astype(jnp.int8), scales)

    def given(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """What `pack` takes beside codes."""
        return {"scales": (shape[:-1], ("float32",))}

    def pack(self, codes: jax.Array, *scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values and scales of int8 codes [E, N, K] and float32 scales [E, N]."""
        (of_output,) = scales
        return self.joined(jax.lax.bitcast_convert_type(codes, jnp.uint8)), of_output

    def unpack(self, values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `pack` was given."""
        (codes,) = self.blocks(values)
        return jax.lax.bitcast_convert_type(codes, jnp.int8), scales

    def elements(self, values: jax.Array) -> jax.Array:
        """The integers."""
        codes, _ = self.unpack(values, values)
        return codes.astype(jnp.float32)


INT8_CHANNEL = Int8(
    "int8_channel", code=14, **stored("int8"), weight_scales="e n", bits=8, codes="int8"
)
