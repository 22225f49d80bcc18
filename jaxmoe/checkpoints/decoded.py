"""Weights with broadcast scales as products take them: in a format that has them, or decoded."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats import QUANTIZED, elements
from jaxmoe._formats.quantization import BLOCK
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.known import known
from jaxmoe.checkpoints.scaled import Given, Read, array_of, given, held, read_as, spread
from jaxmoe.quantize import QuantizedArray

# Exponents of groups that mx formats can tell from the largest of an expert.
_MX_RANGE = 252


@_checks.array_likes
def weight_from_scales(
    values: jax.Array,
    scales: jax.Array,
    zero_points: jax.Array | None = None,
    *,
    weight_layout: str,
    scale_format: str | None = None,
    dtype: Any = None,
) -> QuantizedArray | jax.Array:
    """Reads any weights with broadcast scales: into a format that holds them, or decoded.

    w = (values - zero_points) * scales

    As `from_scales` where that has a format, whatever the numbers are. Else by numbers, if they are
    known: zero points that are all 0 are none, equal scales of neighbours are one scale, and powers
    of two for 32 of K are mxfp8. Where no format is left, all of w is an array, which `Experts` and
    products take as plain weights.

    Args:
      values, scales, weight_layout, scale_format: as in `from_scales`.
      zero_points: integers in the shape of `scales`, or another one that divides that of `values`.
      dtype: bfloat16, float16 or float32, that of the tokens; that of `scales` by default, bfloat16
        if they are no floats of 16 or 32 bits.

    Returns:
      `QuantizedArray` of layout `weight_layout`, or an array of the shape of `values`. `Experts`
      takes weights in one format: `jaxmoe.dequantize` those that have one beside others that have
      none.

    Raises:
      TypeError: a dtype that is not listed.
      ValueError: shapes that do not go together.

    Numerics: a format changes no number. An array has (values - zero_points) * scales in float32,
      rounded to `dtype`: one rounding if `scales` have 16 bits. Numbers below 2^-126 may be zeros.
      Scales traced by `jax.jit` are not known: then shapes and dtypes alone decide, and scales for
      a `scale_format` are trusted as in `from_scales`.
    Memory: an array has 2 bytes (float32: 4) for each weight, beside the values. Called once, it
      stays; inside of `jax.jit` on traced values each call writes and reads it anew.
    Source: qwix' QArray, aqt's QTensor, the scales of tpu-inference.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> values = jnp.ones((2, 128, 64), jnp.int8)  # [E, K, N]
      >>> scales = jnp.ones((2, 4, 1, 64)).at[:, 1].set(0.5)  # of 32 of K
      >>> w = checkpoints.weight_from_scales(values, scales, weight_layout="kn", dtype="bfloat16")
      >>> w.dtype, w[0, 30:34, 0].tolist()
      (dtype(bfloat16), [1.0, 1.0, 0.5, 0.5])
    """
    op = "checkpoints.weight_from_scales"
    a = given(op, values, scales, zero_points, weight_layout, scale_format, dtype)
    if a.zeros is not None:
        _checks.check_dtype(op, "zero_points", a.zeros, ("int4", "int8", "int32"))
    for read in _reads(a):
        if read is not None and _holds(read, a):
            return array_of(a, *read, of=("values", values))
    arrays = (None if x is None else jnp.asarray(x) for x in (a.values, a.scales, a.zeros))
    return _decode(*arrays, dtype=a.dtype)


@functools.partial(jax.jit, static_argnames=("dtype",))
def _decode(values: jax.Array, scales: jax.Array, zeros: Any, *, dtype: Any) -> jax.Array:
    wide = values.astype(jnp.float32)
    if zeros is not None:
        wide = wide - spread(zeros.astype(jnp.float32), values.shape)
    wide = wide * spread(scales.astype(jnp.float32), values.shape)
    return elements.rounded(wide, dtype).astype(dtype)


def _holds(read: tuple[str, Any], a: Given) -> bool:
    """Whether blocks of the format divide the weights."""
    sizes = a.values.shape[1:] if a.layout == "nk" else a.values.shape[:0:-1]
    steps = QUANTIZED[read[0]].steps
    return all(size and size % step == 0 for size, step in zip(sizes, steps, strict=True))


def _reads(a: Given) -> Iterator[Read]:
    """What the weights may be read as, the first that is something and fits."""
    scales, zeros = known(a.scales), None if a.zeros is None else known(a.zeros)
    name = np.dtype(a.values.dtype).name
    if name == "int4" and a.kind is None and a.dtype != a.scales.dtype:
        # Formats of int4 have scales in the dtype of the tokens.
        if scales is None or a.dtype.itemsize != 2 or not _same(scales, scales.astype(a.dtype)):
            return
        scales = scales.astype(a.dtype)
        a = a._replace(scales=scales)
    if a.kind is None or scales is None or _held_in_mx(str(a.kind), scales):
        yield read_as(a)
    if scales is None or a.kind is not None or (zeros is None) != (a.zeros is None):
        return
    if zeros is not None and not zeros.astype(np.int32).any():
        zeros = None
    by_dtype = {"int4": _int4, "int8": _int8, "float4_e2m1fn": _micro}.get(name, _fp8)
    yield from by_dtype(_Known(a, *(_turned(a, x) for x in (scales, zeros))))


def _turned(a: Given, array: Any) -> Any:
    """[E, N, K] of an array in the layout of the weights, and back."""
    return array if array is None or a.layout == "nk" else np.swapaxes(array, 1, 2)


class _Known(NamedTuple):
    """Weights whose scales and zero points are arrays of NumPy, with [E, N, K] as their axes."""

    given: Given
    scales: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any] | None

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        n, k = self.given.values.shape[1:]
        return (n, k) if self.given.layout == "nk" else (k, n)

    def read(self, kind: str | None = None) -> Read:
        """What `read_as` makes of these scales."""
        arrays = {n: _turned(self.given, getattr(self, n)) for n in ("scales", "zeros")}
        return read_as(self.given._replace(**arrays, kind=kind))

    def merged(self, n: int, k: int) -> "_Known | None":
        """The same with so many scales and zero points along N and K, None if some differ."""
        changed: list[Any] = []
        for array in self[1:]:
            for axis, count in ((1, n), (2, k)):
                if array is None:
                    continue
                if count < 1 or self.sizes[axis - 1] % count:
                    return None
                whole = math.lcm(array.shape[axis], count)
                array = np.repeat(array, whole // array.shape[axis], axis)
                few = np.take(array, range(0, whole, whole // count), axis)
                if not _same(array, np.repeat(few, whole // count, axis)):
                    return None
                array = few
            changed.append(array)
        return _Known(self.given, *changed)


def _held_in_mx(kind: str, scales: np.ndarray[Any, Any]) -> bool:
    """Whether scales are numbers of a format, or of the kind of numbers of one."""
    format = {"e8m0": "mxfp8", "e4m3": "nvfp4"}.get(kind, kind)
    wide = scales.astype(np.float32)
    return bool(held(wide, format).all()) and (format == "nvfp4" or _in_range(wide))


def _in_range(scales: np.ndarray[Any, Any]) -> bool:
    """Whether no power of two of an expert is so far below its largest that it would be zero."""
    exponents = np.frexp(np.where(np.isnan(scales), 1, scales))[1].reshape(len(scales), -1)
    return bool((np.ptp(exponents, axis=1) <= _MX_RANGE).all())


def _same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    a, b = a.astype(np.float32), b.astype(np.float32)
    return bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())


def _int8(a: _Known) -> Iterator[Read]:
    if a.zeros is None and (merged := a.merged(a.sizes[0], 1)) is not None:
        yield merged.read()


def _int4(a: _Known) -> Iterator[Read]:
    n, k = a.sizes
    if a.zeros is not None and a.zeros.dtype != jnp.int4:
        wide = a.zeros.astype(np.int32)
        if ((wide < -8) | (wide > 7)).any():
            return
        a = a._replace(zeros=a.zeros.astype(jnp.int4))
    for size in (k, 128, 64, 32):
        count = k // size if size and k % size == 0 else 0
        if (merged := a.merged(n, count)) is not None:
            yield merged.read()


def _fp8(a: _Known) -> Iterator[Read]:
    if a.zeros is not None:
        return
    n, k = a.sizes
    for rows in (1, n):
        if (merged := a.merged(rows, 1)) is not None:
            yield merged.read()
    if np.dtype(a.given.values.dtype).name == "float8_e5m2":
        return
    if k % BLOCK == 0 and (merged := a.merged(n, k // BLOCK)) is not None:
        whole = merged.scales.astype(np.float32)
        few = whole[:, ::BLOCK]
        if _same(whole, np.repeat(few, BLOCK, 1)[:, :n]):
            scales = np.broadcast_to(few, (len(a.given.values), *few.shape[1:]))
            yield "fp8_block", (a.given.turned.values, jnp.asarray(scales))
    yield from _micro(a)


def _micro(a: _Known) -> Iterator[Read]:
    """Formats whose scales are powers of two or numbers of e4m3."""
    if a.zeros is not None:
        return
    small = np.dtype(a.given.values.dtype).name == "float4_e2m1fn"
    n, k = a.sizes
    for format, size in (("mxfp4", 32), ("nvfp4", 16)) if small else (("mxfp8", 32),):
        merged = a.merged(n, k // size if k % size == 0 else 0)
        if merged is not None and _held_in_mx(format, merged.scales):
            yield merged.read(format)
