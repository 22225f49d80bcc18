"""Microscaling formats: e2m1 or e4m3 elements, a power of two for each 32 neighbours along k."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmoe._formats import elements, packed
from jaxmoe._formats.base import dot
from jaxmoe._formats.weight_only import Packed, stored

GROUP = 32
NAN = 255  # of a shared exponent: all of its group is NaN
# What a strip holds is at most this, so that exponents as far below the largest can be told.
_TOP = 253


@dataclasses.dataclass(frozen=True)
class Mx(Packed):
    """Weights v * 2^(x - 127), x a byte that 32 neighbours along k share.

    A strip holds x less the largest of the expert, whose power of two is in `scales`: kernels apply
    that once to a sum, and what they multiply by has a narrow range of exponents.

    Attributes:
      largest_exponent: of an element.
    """

    largest_exponent: int = 2

    def encode_weights(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantizes weights [E, N, K] by the rule of the OCP specification."""
        return self.pack(*self.coded(x.astype(jnp.float32)))

    def coded(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Codes of float32 [.., K], and the exponents of groups, both uint8."""
        groups = self.grouped(x)
        exponents = elements.exponent_of(elements.largest(groups, -1)) + 127
        exponents = jnp.clip(exponents - self.largest_exponent, 0, 254)
        y = elements.times_power(groups, 127 - exponents[..., None])
        codes = elements.e2m1_codes(y) if self.bits == 4 else elements.e4m3_codes(y)
        # e2m1 has no NaN, and kernels decode that of e4m3 as a number.
        exponents = jnp.where(jnp.isnan(groups).any(axis=-1), NAN, exponents)
        return codes.reshape(x.shape), exponents.astype(jnp.uint8)

    def token_codes(
        self, x: jax.Array, scale: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Codes and exponents of float32 tokens, which nothing else multiplies."""
        del scale
        return *self.coded(x), jnp.ones((), jnp.float32)

    def numbers(self, codes: jax.Array, factors: jax.Array) -> jax.Array:
        """v * 2^(x - 127), float32, of codes [.., K] and exponents; exact if they are normal."""
        power = self.over_group(factors.astype(jnp.int32), codes.shape[-1])
        numbers = elements.times_power(self._elements(codes), power - 127)
        return jnp.where(power == NAN, jnp.nan, numbers)

    def _elements(self, codes: jax.Array) -> jax.Array:
        return elements.e2m1(codes) if self.bits == 4 else elements.e4m3(codes)

    def given(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """What `pack` takes beside codes."""
        return {"exponents": (self.groups_shape(shape), ("uint8",))}

    def pack(self, codes: jax.Array, *scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values and scales of uint8 codes [E, N, K] and exponents [E, N, K / 32].

        Groups whose exponent is 253 or more below the largest of the expert are zeros.
        """
        (exponents,) = scales
        dead, x = exponents == NAN, exponents.astype(jnp.int32)
        # At least 1, so that the power of two is a normal number.
        top = jnp.max(jnp.where(dead, 0, x), axis=(-2, -1), initial=1)
        kept = jnp.clip(x - top[..., None, None] + _TOP, 0, _TOP)
        zero = self.over_group(dead | (kept == 0), codes.shape[-1])
        kept = jnp.where(dead, NAN, kept).astype(jnp.uint8)
        strips = packed.pack_strips(kept, self.groups)
        codes = jnp.where(zero, jnp.uint8(0), codes)
        return self.joined(codes, strips), elements.power_of_two(top - 127)

    def unpack(self, values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Codes and exponents, those of `pack` as far as they are not of zeros or NaN.

        Of other scales than those of `pack` exponents may be beyond a byte: the next that it has.
        """
        codes, kept = self._parts(values)
        top = elements.exponent_of(scales)[..., None, None] + 127
        special = (kept == 0) | (kept == NAN)
        exponents = jnp.where(special, kept, jnp.clip(kept + top - _TOP, 0, NAN - 1))
        return codes, exponents.astype(jnp.uint8)

    def decode_weights(self, values: jax.Array, scales: jax.Array) -> jax.Array:
        """The numbers that values and scales stand for, float32; exact if they are normal.

        The two powers of two may be out of range where their product is not.
        """
        codes, kept = self._parts(values)
        exponent = jnp.clip(elements.exponent_of(jax.lax.stop_gradient(scales)), -126, 127)
        factor = elements.times_power(scales, -exponent)[..., None, None]
        power = jnp.clip(kept - _TOP + exponent[..., None, None], -252, 254)
        power = self.over_group(power, codes.shape[-1])
        numbers = elements.times_power(self._elements(codes) * factor, power)
        kept = self.over_group(kept, codes.shape[-1])
        return jnp.where(kept == NAN, jnp.nan, jnp.where(kept == 0, 0.0, numbers))

    def multiply(
        self, x: jax.Array, x_scales: jax.Array | None, w: jax.Array, w_scales: jax.Array
    ) -> jax.Array:
        """The product with the weights themselves: all of their scales are powers of two."""
        del x_scales
        return dot(x, self.decode_weights(w, w_scales))

    def _parts(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Codes, and what the strips hold of each group, int32."""
        codes, strips = self.blocks(values)
        return codes, packed.unpack_strips(strips, self.groups, jnp.uint8).astype(jnp.int32)


_GROUPS = {
    **{"group": GROUP, "superblock": packed.ROWS, "strips": (128,)},
    **{"weight_scales": "e", "token_scale": False},
}

MXFP4 = Mx("mxfp4", code=4, **_GROUPS, **stored("e2m1"), bits=4, scattered=True, largest_exponent=2)
MXFP8 = Mx("mxfp8", code=15, **_GROUPS, **stored("e4m3"), bits=8, largest_exponent=8)
