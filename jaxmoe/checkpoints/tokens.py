"""Quantized tokens as serving libraries hold them: codes, factors in order or swizzled, a scale."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats import QUANTIZED
from jaxmoe._formats.weight_only import Packed
from jaxmoe._jax import checks as _checks
from jaxmoe.quantize import QuantizedArray, check_quantized

# A tile of swizzled factors: 4 times 32 rows by 4 groups.
_QUARTERS, _ROWS, _GROUPS = 4, 32, 4
_FACTORS = ("uint8", "float8_e4m3fn", "float8_e8m0fnu")
_FORMATS = tuple(n for n, f in QUANTIZED.items() if isinstance(f, Packed) and f.token_arrays)


def swizzle_scales(scales: jax.Array) -> jax.Array:
    """Puts the factors of groups into tiles of 128 rows by 4 groups, as Blackwell's kernels read.

    With row r = 128 m + 32 a + b and group g = 4 k + c the order of the result is [m, k, b, a, c].

    Args:
      scales: [.., rows, groups] uint8, float8_e4m3fn or float8_e8m0fnu, of tokens or weights.

    Returns:
      [.., 128 ceil(rows / 128), 4 ceil(groups / 4)] of that dtype: the bytes of all tiles, in the
      shape in which libraries hold them. What no row or group has is 0.

    Raises:
      TypeError, ValueError: another dtype, or fewer than two axes.

    Numerics: no bit of a factor changes.
    Source: the 128x4 layout of scale factors of cuBLAS and CUTLASS; flashinfer, `fp4_quantize`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> checkpoints.swizzle_scales(jnp.ones((3, 200, 6), jnp.uint8)).shape
      (3, 256, 8)
    """
    op = "checkpoints.swizzle_scales"
    _checks.check_dtype(op, "scales", scales, _FACTORS)
    if scales.ndim < 2:
        rule = "scales must have the axes [.., rows, groups]"
        raise ValueError(_checks.message(op, rule, scales=scales))
    data = _bytes(scales)
    *lead, rows, groups = data.shape
    tiles, blocks = _tiles(rows, groups)
    above = (tiles * _QUARTERS * _ROWS - rows, blocks * _GROUPS - groups)
    data = jnp.pad(data, (*(((0, 0),) * len(lead)), (0, above[0]), (0, above[1])))
    data = data.reshape(*lead, tiles, _QUARTERS, _ROWS, blocks, _GROUPS)
    data = _permuted(data, len(lead), (0, 3, 2, 1, 4))
    data = data.reshape(*lead, tiles * _QUARTERS * _ROWS, blocks * _GROUPS)
    return data if scales.dtype == "uint8" else jax.lax.bitcast_convert_type(data, scales.dtype)


def unswizzle_scales(scales: jax.Array, rows: int, groups: int) -> jax.Array:
    """Takes factors out of the tiles of `swizzle_scales`.

    Args:
      scales: the bytes of all tiles after any leading axes, in one axis or several, such as
        [E, 128 ceil(rows / 128), 4 ceil(groups / 4)]; uint8, float8_e4m3fn, float8_e8m0fnu, or
        int32 with four of them a word, as FlashInfer takes those of weights.
      rows, groups: of the result.

    Returns:
      [.., rows, groups] of the same dtype, uint8 of int32.

    Raises:
      TypeError, ValueError: another dtype, or a size that such factors have not.

    Numerics: no bit of a factor changes.
    Source: as `swizzle_scales`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> factors = jnp.arange(1200, dtype=jnp.uint8).reshape(200, 6)
      >>> tiles = checkpoints.swizzle_scales(factors)
      >>> bool((checkpoints.unswizzle_scales(tiles, 200, 6) == factors).all())
      True
    """
    op = "checkpoints.unswizzle_scales"
    rows = _checks.check_int(op, "rows", rows, 1)
    groups = _checks.check_int(op, "groups", groups, 1)
    return unswizzled(op, "scales", scales, rows, groups)


def unswizzled(op: str, name: str, scales: Any, rows: int, groups: int) -> jax.Array:
    """`unswizzle_scales` under the names of an importer."""
    _checks.check_dtype(op, name, scales, (*_FACTORS, "int32"))
    data, dtype = _bytes(scales), np.dtype(scales.dtype)
    tiles, blocks = _tiles(rows, groups)
    size = tiles * blocks * _QUARTERS * _ROWS * _GROUPS
    lead = next((n for n in range(data.ndim)[::-1] if math.prod(data.shape[n:]) == size), None)
    if lead is None:
        rule = (
            f"{name} must hold {size} bytes after leading axes: {tiles} x {blocks} tiles of "
            f"128 x 4 for {rows} rows and {groups} groups"
        )
        raise ValueError(_checks.message(op, rule, **{name: scales}))
    data = data.reshape(*data.shape[:lead], tiles, blocks, _ROWS, _QUARTERS, _GROUPS)
    data = _permuted(data, lead, (0, 3, 2, 1, 4))
    data = data.reshape(*data.shape[:lead], tiles * _QUARTERS * _ROWS, blocks * _GROUPS)
    data = data[..., :rows, :groups]
    as_given = dtype.name in ("uint8", "int32")
    return data if as_given else jax.lax.bitcast_convert_type(data, dtype)


def from_tokens(
    values: jax.Array,
    scales: jax.Array,
    global_scale: jax.Array | None = None,
    *,
    format: str,
    swizzled: bool = False,
    dtype: Any = "bfloat16",
) -> QuantizedArray:
    """Reads quantized tokens of a serving library: x = values * scales * global_scale.

    Args:
      values: e2m1 as uint8 [R, K / 2], two a byte, the first in the low bits; e4m3 (mxfp8) as
        float8_e4m3fn or its bits as uint8 [R, K].
      scales: factors of groups, [R, K / 32] uint8 or float8_e8m0fnu in mx formats, [R, K / 16]
        float8_e4m3fn or its bits as uint8 in nvfp4; or the same `swizzled`, in any shape.
      global_scale: nvfp4: float32 [] or [1], a multiplier. Libraries hold what quantizing
        multiplies by, 448 * 6 / max|x|: give 1 / that. Not in mx formats.
      format: "mxfp4", "mxfp8" or "nvfp4".
      swizzled: whether `scales` are in tiles, see `swizzle_scales`.
      dtype: bfloat16, float16 or float32, that of the layer they go to.

    Returns:
      `QuantizedArray` of layout "tokens", an x of `jaxmoe.moe_mlp` and of `jaxmoe.grouped_gemm`.

    Raises:
      TypeError, ValueError: a wrong dtype or shape, or a format that has no tokens.

    Numerics: no bit changes.
    Source: OCP Microscaling Formats 1.0; flashinfer, `fp4_quantize` and `mxfp8_quantize`.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> from jaxmoe import checkpoints
      >>> codes, scales = jnp.full((1, 16), 0x92, jnp.uint8), jnp.full((1, 1), 128, jnp.uint8)
      >>> q = checkpoints.from_tokens(codes, scales, format="mxfp4")
      >>> q.shape, jaxmoe.dequantize(q)[0, :3].tolist()
      ((1, 32), [2.0, -1.0, 2.0])
    """
    op = "checkpoints.from_tokens"
    dtype = _checks.float_dtype(op, "dtype", dtype)
    known = _known(op, format)
    narrow = known.bits == 4
    _checks.check_rank(op, "values", values, "R,K/2" if narrow else "R,K")
    _checks.check_dtype(op, "values", values, ("uint8",) if narrow else ("uint8", "float8_e4m3fn"))
    data = _bytes(values)
    rows, k = data.shape[0], data.shape[1] * 8 // known.bits
    if k % known.group:
        rule = f"values must hold a multiple of {known.group} numbers a row in {format}, not {k}"
        rule += f"; {_checks.nearest(k, known.group)}"
        raise ValueError(_checks.message(op, rule, values=values))
    shape = (rows, k // known.group)
    given = known.given((1, *shape[:1], k))
    (_, allowed), *left = given.values()
    other = () if left else ("float8_e8m0fnu",)
    _checks.check_dtype(op, "scales", scales, (*allowed, *other))
    if swizzled:
        scales = unswizzled(op, "scales", scales, *shape) if rows else jnp.zeros(shape, jnp.uint8)
    _checks.check_shape(op, "scales", scales, shape, f"a factor for {known.group} of K={k}")
    if (global_scale is None) == bool(left):
        rule = f"global_scale must be {'given' if left else 'None'} in {format}"
        raise ValueError(_checks.message(op, rule, global_scale=global_scale))
    total: Any = np.float32(1) if global_scale is None else global_scale
    total = np.asarray(total) if isinstance(total, np.generic) else total
    _checks.check_dtype(op, "global_scale", total, ("float32",))
    if total.shape not in ((), (1,)):
        rule = f"global_scale.shape={list(total.shape)} must be [] or [1]"
        raise ValueError(_checks.message(op, rule, global_scale=global_scale))
    rows_of_bytes = jnp.concatenate([data, _bytes(scales)], axis=1)
    return QuantizedArray(rows_of_bytes, jnp.asarray(total).reshape(()), format, "tokens", dtype)


def to_tokens(
    q: QuantizedArray, *, swizzled: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `from_tokens` takes: values, scales and global_scale.

    Args:
      q: tokens in "mxfp4", "mxfp8" or "nvfp4", such as `jaxmoe.quantize_tokens` makes.
      swizzled: whether scales are to be in tiles, see `swizzle_scales`.

    Returns:
      values, uint8, or float8_e4m3fn in mxfp8; scales, uint8 in mx formats, float8_e4m3fn in nvfp4;
      global_scale, float32 [], 1 in mx formats, where `from_tokens` takes None.

    Raises:
      TypeError, ValueError: `q` is something else.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> q = jaxmoe.quantize_tokens(jnp.ones((3, 64)), "nvfp4")
      >>> [a.shape for a in jaxmoe.checkpoints.to_tokens(q)]
      [(3, 32), (3, 4), ()]
    """
    op = "checkpoints.to_tokens"
    check_quantized(op, "q", q)
    if q.layout != "tokens":
        rule = f"q.layout={q.layout!r} must be 'tokens'"
        raise ValueError(_checks.message(op, rule, q=q))
    known = _known(op, q.format)
    values, scales = jnp.split(q.values, [q.shape[1] * known.bits // 8], axis=1)
    if known.bits == 8:
        values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    if len(known.given((1, *q.shape))) > 1:
        scales = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    return values, swizzle_scales(scales) if swizzled else scales, jnp.asarray(q.scales)


def _known(op: str, format: str) -> Packed:
    """The format of that name, whose arrays may be tokens."""
    _checks.check_choice(op, "format", format, _FORMATS)
    known = QUANTIZED[format]
    assert isinstance(known, Packed)
    return known


def _tiles(rows: int, groups: int) -> tuple[int, int]:
    return -(-rows // (_QUARTERS * _ROWS)), -(-groups // _GROUPS)


def _permuted(a: jax.Array, lead: int, order: tuple[int, ...]) -> jax.Array:
    """Reorders the axes after the first `lead`."""
    return jnp.transpose(a, (*range(lead), *(lead + axis for axis in order)))


def _bytes(a: Any) -> jax.Array:
    """The bytes of each row; those of words one after the other."""
    a = jnp.asarray(a)
    if a.dtype == jnp.uint8:
        return a
    data = jax.lax.bitcast_convert_type(a, jnp.uint8)
    return data if data.ndim == a.ndim else data.reshape(*a.shape[:-1], -1)
