"""NVFP4: e2m1 elements, an e4m3 scale for each 16 neighbours along k, a float32 for each expert."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmoe._formats import elements, packed
from jaxmoe._formats.quantization import MIN_SCALE
from jaxmoe._formats.weight_only import Packed, stored

# A strip holds scales as exponent << 3 | mantissa, float32 bits from bit 20 on less this: there
# are no subnormal numbers then. 0 is the smallest scale, and the values are 0 where it is none.
_BIAS = 118 << 3
_NAN = 18 << 3


@dataclasses.dataclass(frozen=True)
class Nvfp4(Packed):
    """Weights v * s * g."""

    def encode_weights(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantizes weights [E, N, K]; the largest of an expert is 448 * 6 times its scale."""
        x = x.astype(jnp.float32)
        return self.pack(*self.coded(x, self._common(x)))

    def _common(self, x: jax.Array) -> jax.Array:
        """The scale of float32 [.., N, K]."""
        return elements.over(elements.largest(x, (-2, -1)), 448.0 * 6.0)

    def coded(self, x: jax.Array, common: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Codes of float32 [.., N, K], bits of the e4m3 scales of groups, and `common`."""
        groups = self.grouped(x)
        of_expert = common[..., None, None]
        most = elements.largest(groups, -1)
        scales = elements.over(elements.over(most, 6.0), jnp.where(of_expert > 0, of_expert, 1))
        scales = elements.e4m3_codes(jnp.where(jnp.isnan(groups).any(axis=-1), jnp.nan, scales))
        step = elements.e4m3(scales) * of_expert
        step = jnp.where(step == 0, 1, step)[..., None]
        codes = elements.e2m1_codes(elements.over(groups, step))
        return codes.reshape(x.shape), scales, common

    def token_codes(
        self, x: jax.Array, scale: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Codes, bits of scales and the global scale of float32 tokens, a static one if given."""
        if scale is None:  # a normal number, so that it may be the static one of a part
            scale = jnp.maximum(self._common(x), MIN_SCALE)
        codes, factors, _ = self.coded(x[:, None] if scale.ndim else x, scale)
        return codes.reshape(x.shape), factors.reshape(self.groups_shape(x.shape)), scale

    def numbers(self, codes: jax.Array, factors: jax.Array) -> jax.Array:
        """v * s, float32, of codes [.., K] and bits of scales; exact."""
        return elements.e2m1(codes) * self.over_group(elements.e4m3(factors), codes.shape[-1])

    def given(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """What `pack` takes beside codes."""
        scales = (self.groups_shape(shape), ("float8_e4m3fn", "uint8"))
        return {"scales": scales, "global_scale": (shape[:-2], ("float32",))}

    def pack(self, codes: jax.Array, *scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values and scales of uint8 codes [E, N, K], scales and global scales [E].

        The former are [E, N, K / 16], e4m3 or its bits as uint8; their signs become those of codes.
        """
        s, common = scales
        s = s if s.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(s, jnp.uint8)
        negative, s = s >> 7, s & 127
        bits = jax.lax.bitcast_convert_type(elements.e4m3(s), jnp.int32) >> 20
        kept = jnp.where(s == 127, _NAN, jnp.where(s == 0, 0, bits - _BIAS))
        k = codes.shape[-1]
        zero = self.over_group((s == 0) | (s == 127), k)
        codes = jnp.where(zero, jnp.uint8(0), codes ^ self.over_group(negative << 3, k))
        return self.joined(codes, packed.pack_strips(kept.astype(jnp.uint8), self.groups)), common

    def unpack(
        self, values: jax.Array, scales: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Codes, scales as bits of e4m3 and global scales; 0 is the scale of values that are 0."""
        codes, kept = self._parts(values)
        some = (self.grouped(codes) != 0).any(axis=-1)
        bits = elements.e4m3_codes(_scale(kept))
        return codes, jnp.where((kept == 0) & ~some, jnp.uint8(0), bits), scales

    def elements(self, values: jax.Array) -> jax.Array:
        """The weights before the scale of their expert, which float32 holds exactly."""
        codes, kept = self._parts(values)
        return elements.e2m1(codes) * self.over_group(_scale(kept), codes.shape[-1])

    def _parts(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, strips = self.blocks(values)
        return codes, packed.unpack_strips(strips, self.groups, jnp.uint8).astype(jnp.int32)


def _scale(kept: jax.Array) -> jax.Array:
    """The scale that a strip holds, float32."""
    scale = jax.lax.bitcast_convert_type((kept + _BIAS) << 20, jnp.float32)
    return jnp.where(kept >= _NAN, jnp.nan, scale)


NVFP4 = Nvfp4(
    "nvfp4",
    code=5,
    **stored("e2m1"),
    weight_scales="e",
    scattered=True,
    group=16,
    superblock=packed.ROWS,
    strips=(256,),
    token_scale=True,
)
