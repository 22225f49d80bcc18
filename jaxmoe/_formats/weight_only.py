"""Base of the packed formats: values and scales of groups in one array, of weights or tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import elements, packed
from jaxmoe._formats.base import Format, Gradient, dot, repeat_blocks
from jaxmoe._formats.packed import ROWS
from jaxmoe._formats.quantization import MAX_SCALE, MIN_SCALE


@dataclasses.dataclass(frozen=True)
class Packed(Format):
    """Weights in superblocks, see packed.py. `scales` is what is left beside the strips.

    Attributes:
      bits: of a value.
      codes: the dtype of codes.
      scattered: whether the bits of a code lie apart in a word.
      group: neighbours along k that share a scale of a strip, 0 for all of K.
      superblock: elements of k of a superblock, 0 for all of K.
      strips: bytes of each part of a strip.
      token_scale: whether tokens may be in the format, and the caller may give the one scale that
        is left of them; None: they may not.
    """

    bits: int = 4
    codes: str = "uint8"
    scattered: bool = False
    group: int = 0
    superblock: int = 0
    strips: tuple[int, ...] = ()
    token_scale: bool | None = None

    @property
    def packed(self) -> bool:
        """Kernels decode weights in registers."""
        return True

    @property
    def steps(self) -> tuple[int, int]:
        """Whole superblocks."""
        return ROWS, self.superblock or ROWS

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[.., N / 64, bytes], the superblocks of 64 rows one after the other."""
        *lead, n, k = shape
        superblocks = k // (self.superblock or max(k, 1))
        size = k // ROWS * packed.block_bytes(self.bits) + superblocks * sum(self.strips)
        return (*lead, n // ROWS, size)

    def weight_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [.., N, K] of weights whose values have the shape `stored`."""
        *lead, rows, size = stored
        block, strip = packed.block_bytes(self.bits), sum(self.strips)
        if self.superblock:
            blocks = self.superblock // ROWS
            k = size // (blocks * block + strip) * self.superblock
        else:
            k = max(size - strip, 0) // block * ROWS
        return (*lead, rows * ROWS, k)

    def unit(self, size: int, axis: str) -> int:
        """64 rows, and a superblock of K, or a block if there are no strips."""
        return ROWS if axis == "n" or not self.strips else self.superblock or size

    @property
    def token_arrays(self) -> bool:
        """Whether tokens may be in the format."""
        return self.token_scale is not None

    @property
    def token_dtype(self) -> Any:
        """Bytes."""
        return jnp.dtype(jnp.uint8)

    @property
    def token_step(self) -> int:
        """Whole groups."""
        return self.group or 1

    @property
    def _token_bytes(self) -> int:
        """Bytes of a group of a token: its codes, and its factor."""
        return self.group * self.bits // 8 + 1

    def stored_token_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A token's codes, the first of two in the low bits, then the factors of its groups."""
        return (*shape[:-1], shape[-1] // self.group * self._token_bytes)

    def token_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """[R, K]."""
        return (*stored[:-1], stored[-1] // self._token_bytes * self.group)

    def packed_tokens(self, codes: jax.Array, factors: jax.Array) -> jax.Array:
        """Values of tokens from codes [R, K] and factors [R, groups], uint8."""
        data = codes if self.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
        return jnp.concatenate([data, factors], axis=1)

    def unpacked_tokens(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `packed_tokens` was given."""
        rows, k = self.token_shape(values.shape)
        data, factors = jnp.split(values, [k * self.bits // 8], axis=1)
        if self.bits == 8:
            return data, factors
        return jnp.stack([data & 15, data >> 4], axis=-1).reshape(rows, k), factors

    def encoded_tokens(
        self, x: jax.Array, scale: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`token_codes` of tokens of any dtype; a static scale that is out of range is NaN."""
        # NOTE: or XLA may leave out the rounding of an activation to the dtype of the layer.
        exact = elements.rounded(x.astype(jnp.float32), x.dtype)
        if scale is not None:
            scale = jnp.where((scale >= MIN_SCALE) & (scale <= MAX_SCALE), scale, jnp.nan)
        return self.token_codes(exact, scale)

    def encode(
        self, x: jax.Array, scale: jax.Array | None, *, element_type: str, e8m0: bool, tokens: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Quantizes tokens [R, K] or weights [E, N, K]: their values and scales."""
        del element_type, e8m0
        if not tokens:
            return self.encode_weights(x)
        codes, factors, left = self.encoded_tokens(x, scale)
        return self.packed_tokens(codes, factors), left

    def encode_weights(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantizes weights [E, N, K]: their values and scales."""
        raise NotImplementedError

    def refused_option(self, scale: bool, e8m0: bool, tokens: bool) -> str | None:
        """Scales follow from the weights of their group."""
        if scale and not (tokens and self.token_scale):
            return f"scale must be None in {self.name}, whose scales lie among its values"
        if not e8m0:
            return None
        return f"scale_format='e8m0' must be 'float32' in {self.name}, which has its own"

    def blocks(self, values: jax.Array) -> tuple[jax.Array, ...]:
        """Codes [.., N, K] of values, and the parts of their strips [.., superblocks, bytes]."""
        k = self.weight_shape(values.shape)[-1]
        sizes = (packed.block_bytes(self.bits), *self.strips)
        count = (self.superblock or max(k, 1)) // ROWS
        data, *strips = packed.split(values, count, sizes)
        return packed.unpack_values(data, bits=self.bits, scattered=self.scattered), *strips

    def joined(self, codes: jax.Array, *strips: jax.Array) -> jax.Array:
        """The values of codes [.., N, K] and of the parts of their strips."""
        data = packed.pack_values(codes, bits=self.bits, scattered=self.scattered)
        return packed.join(data, list(strips), (self.superblock or codes.shape[-1]) // ROWS)

    @property
    def groups(self) -> int:
        """Groups of a superblock."""
        return self.superblock // self.group if self.group else 1

    def grouped(self, x: jax.Array) -> jax.Array:
        """[.., N, K] -> [.., N, K / group, group]."""
        group = self.group or max(x.shape[-1], 1)
        return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)

    def over_group(self, scales: jax.Array, k: int) -> jax.Array:
        """Gives each of `k` elements what its group has: [.., N, groups] -> [.., N, k]."""
        return repeat_blocks(scales, scales.ndim - 1, self.group or k, k)

    def given(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """What `pack` makes values of, beside codes of that shape: shapes and dtypes by name."""
        raise NotImplementedError

    def pack(self, codes: jax.Array, *scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Makes values and scales of codes [E, N, K] and of what `given` names."""
        raise NotImplementedError

    def unpack(self, values: jax.Array, scales: jax.Array) -> tuple[jax.Array, ...]:
        """What `pack` made values and scales of."""
        raise NotImplementedError

    def token_codes(
        self, x: jax.Array, scale: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Codes [R, K] of float32 tokens, factors of groups [R, groups], both uint8, and the rest.

        The rest, float32 [], or [R] as a static `scale` is, multiplies all of `numbers`.
        """
        raise NotImplementedError

    def numbers(self, codes: jax.Array, factors: jax.Array) -> jax.Array:
        """What codes [.., K] and factors of groups stand for, float32."""
        raise NotImplementedError

    def groups_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of groups, [.., N, groups]."""
        return (*shape[:-1], shape[-1] // (self.group or shape[-1]))

    def elements(self, values: jax.Array) -> jax.Array:
        """The weights [.., N, K] before `scales` multiply them, float32."""
        raise NotImplementedError

    def decode(self, values: jax.Array, scales: jax.Array, tokens: bool) -> jax.Array:
        """The numbers that values and scales stand for, float32 [.., N, K] or [R, K]."""
        if tokens:
            return self.numbers(*self.unpacked_tokens(values)) * scales
        return self.decode_weights(values, scales)

    def decode_weights(self, values: jax.Array, scales: jax.Array) -> jax.Array:
        """The numbers [.., N, K] that values and scales of weights stand for, float32."""
        numbers = self.elements(values)
        return numbers * self.spread(scales, numbers.shape, tokens=False)

    def multiply(
        self, x: jax.Array, x_scales: jax.Array | None, w: jax.Array, w_scales: jax.Array
    ) -> jax.Array:
        """The product with elements, then with `scales`, which all of K shares."""
        del x_scales
        return dot(x, self.elements(w)) * w_scales.reshape(-1)[None, :]


def stored(element: str) -> dict[str, Any]:
    """The fields of a packed format whose elements are called `element`."""
    return {"stored": ((element, jnp.uint8),), "gradient": Gradient(frozen=True)}
