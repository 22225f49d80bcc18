"""Four-bit integers with a scale of 16 bits for each group along k, and zero points or none."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import elements, packed
from jaxmoe._formats.base import Format
from jaxmoe._formats.weight_only import Packed, stored

_FIRST_CODE = 6
_MIDDLE = 8  # the code of 0 without zero points


@dataclasses.dataclass(frozen=True)
class Int4(Packed):
    """Weights (code - zero) * scale, rounded once to the dtype of the array.

    Attributes:
      zeros: whether groups have zero points.
      dtype: of the array and of the scales, None until an array is known.
    """

    zeros: bool = False
    dtype: Any = None

    @property
    def coded_by(self) -> str:
        """Codes from 0 to 15 are e4m3 numbers, where 128 of them share a scale in bf16."""
        coded = self.group == 128 and not self.zeros and self.dtype == jnp.bfloat16
        return "e4m3" if coded else ""

    def of(self, dtype: Any) -> Format:
        """The format with scales in the dtype of the array."""
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def refused_dtype(self, dtype: Any) -> str | None:
        """Scales have 16 bits, and the dtype of the array."""
        if jnp.dtype(dtype).itemsize == 2:
            return None
        return f"dtype={jnp.dtype(dtype).name} must be bf16 or f16 in {self.name}: scales have it"

    def refused_tokens(self, dtype: Any) -> str | None:
        """Kernels read scales as they read tokens."""
        if jnp.dtype(dtype) == self.dtype:
            return None
        return f"dtype={jnp.dtype(dtype).name} must be that of the weights, {self.dtype.name}"

    def encode_weights(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantizes weights [E, N, K]; scales are rounded before codes are made with them."""
        groups = self.grouped(x.astype(jnp.float32))
        if self.zeros:
            finite = jnp.where(jnp.isfinite(groups), groups, 0)
            low, high = (f(finite, axis=-1, initial=0) for f in (jnp.min, jnp.max))
            # Halves: the difference may be too large.
            scales = elements.over(high * 0.5 - low * 0.5, 7.5)
            below = jnp.round(elements.over(-low, jnp.where(scales > 0, scales, 1.0)))
            steps = jnp.maximum(below, 15 - below)
        else:
            low, steps = None, 7.0
            scales = elements.over(elements.largest(groups, -1), 7.0)
        scales = jnp.where(jnp.isnan(groups).any(axis=-1), jnp.nan, scales)
        scales = elements.finite_scales(elements.rounded(scales, self.dtype), steps, self.dtype)
        step = jnp.where(scales > 0, scales, jnp.inf)
        zero = None if low is None else jnp.clip(jnp.round(elements.over(-low, step)), 0, 15)
        middle = _MIDDLE if zero is None else zero[..., None]
        quotient = elements.over(groups, step[..., None])
        quotient = jnp.where(jnp.isnan(quotient), 0, quotient)  # its group is NaN by the scale
        codes = jnp.clip(jnp.round(quotient) + middle, 0, 15)
        codes = codes.astype(jnp.uint8).reshape(x.shape)
        zeros = () if zero is None else (zero.astype(jnp.uint8),)
        return self.pack(codes, scales.astype(self.dtype), *zeros)

    def given(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """What `pack` takes beside codes."""
        groups = self.groups_shape(shape)
        given = {"scales": (groups, (jnp.dtype(self.dtype).name,))}
        return given | ({"zeros": (groups, ("uint8",))} if self.zeros else {})

    def pack(self, codes: jax.Array, *scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values and scales of codes [E, N, K] in [0, 15], symmetric ones being q + 8.

        `scales`: [E, N, K / group] in the dtype of the array; if there are, uint8 zero points in
        [0, 15].
        """
        strips = [packed.pack_strips(scales[0], self.groups)]
        strips += [packed.pack_zeros(zeros, self.groups) for zeros in scales[1:]]
        return self.joined(codes, *strips), jnp.ones_like(codes[..., 0, 0], jnp.float32)

    def unpack(self, values: jax.Array, scales: jax.Array) -> tuple[jax.Array, ...]:
        """What `pack` was given."""
        del scales
        return self._parts(values)

    def elements(self, values: jax.Array) -> jax.Array:
        """The weights, rounded to the dtype of the array."""
        codes, scales, *zeros = self._parts(values)
        k = codes.shape[-1]
        zero = self.over_group(zeros[0].astype(jnp.int32), k) if zeros else _MIDDLE
        step = self.over_group(scales.astype(jnp.float32), k)
        return elements.rounded(
            (codes.astype(jnp.int32) - zero).astype(jnp.float32) * step, self.dtype
        )

    def _parts(self, values: jax.Array) -> tuple[jax.Array, ...]:
        codes, scales, *zeros = self.blocks(values)
        scales = packed.unpack_strips(scales, self.groups, self.dtype)
        return codes, scales, *(packed.unpack_zeros(z, self.groups) for z in zeros)


def _formats() -> tuple[Int4, ...]:
    """All of them: the elements of a group, and of a superblock, by the last word of the name."""
    rows = packed.ROWS
    sizes = {"g32": (32, rows), "g64": (64, rows), "g128": (128, 2 * rows), "channel": (0, 0)}
    return tuple(
        Int4(
            f"int4_{name}{'_zp' if zeros else ''}",
            code=_FIRST_CODE + list(sizes).index(name) + len(sizes) * zeros,
            **stored("int4"),
            weight_scales="e",
            group=group,
            superblock=superblock,
            strips=_strips(2 if name == "g32" else 1, zeros),
            zeros=zeros,
        )
        for name, (group, superblock) in sizes.items()
        for zeros in (False, True)
    )


def _strips(groups: int, zeros: bool) -> tuple[int, ...]:
    """Bytes of the scales of 64 rows and so many groups, and of their zero points."""
    scales = packed.ROWS * groups * 2
    return (scales, scales // 4) if zeros else (scales,)


INT4 = _formats()
