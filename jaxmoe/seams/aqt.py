"""Weights of aqt, a `QTensor`, as a `jaxmoe.QuantizedArray`, or decoded."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.decoded import weight_from_scales
from jaxmoe.checkpoints.scaled import from_scales
from jaxmoe.quantize import QuantizedArray


def quantized_array(q: Any, *, weight_layout: str, dtype: Any = None) -> QuantizedArray:
    """Returns the weights of experts that an `aqt_tensor.QTensor` holds, number for number.

    w = q.qvalue * q.scale[0]

    Args:
      q: a `QTensor` [E, K, N], or [E, N, K] with `weight_layout` "nk", with one scale and without
        bias or sparsity. Its axes may be in tiles (`tiling_state`). Nothing but its attributes is
        used.
      weight_layout: "kn" or "nk".
      dtype: what `jaxmoe.dequantize` shall return; `q.dequant_dtype` by default.

    Returns:
      `QuantizedArray` in the format that holds `q` exactly: see `jaxmoe.checkpoints.from_scales`.

    Raises:
      TypeError: `q` is no `QTensor`, or has no values yet.
      NotImplementedError: a bias, a sparsity mask, tiles that are broadcast, or not one scale.
      ValueError: no format has its scales; the message lists those that there are. `weight` takes
        them all.

    Numerics: exact. aqt rounds dequantized weights to `q.dequant_dtype`; products here do not, but
      for those of int4 formats.
    Source: aqtp 0.9.0, aqt/jax/v2/aqt_tensor.py.

    Example:
      >>> import types, jax.numpy as jnp
      >>> from jaxmoe.seams import aqt
      >>> q = types.SimpleNamespace(  # as a QTensor
      ...     qvalue=jnp.ones((2, 64, 128), jnp.int8), scale=[jnp.full((2, 1, 128), 0.5)], bias=[],
      ...     sparsity_mask=None, tiling_state=None, dequant_dtype=jnp.bfloat16)
      >>> aqt.quantized_array(q, weight_layout="kn").format
      'int8_channel'
    """
    arrays, chosen = _read("seams.aqt.quantized_array", q, dtype)
    return from_scales(*arrays, weight_layout=weight_layout, dtype=chosen)


def weight(q: Any, *, weight_layout: str, dtype: Any = None) -> QuantizedArray | jax.Array:
    """Returns the weights of experts that a `QTensor` holds, whatever tiles its scales have.

    As `quantized_array` where a format holds them. Else, as those of int8 with a scale for each 128
    of K, they are decoded: see `jaxmoe.checkpoints.weight_from_scales`, which says what that costs,
    and that inside of `jax.jit` each call pays it.

    Args:
      q: as in `quantized_array`.
      weight_layout: "kn" or "nk".
      dtype: bfloat16, float16 or float32, that of the tokens; `q.dequant_dtype` by default.

    Returns:
      `QuantizedArray`, or an array in `dtype`.

    Raises:
      TypeError: `q` is no `QTensor`, or has no values yet.
      NotImplementedError: a bias, a sparsity mask, tiles that are broadcast, or not one scale.
      ValueError: shapes that do not go together.

    Numerics: exact in a format; an array is rounded to `dtype`.
    Source: aqtp 0.9.0, aqt/jax/v2/aqt_tensor.py.

    Example:
      >>> import types, jax.numpy as jnp
      >>> from jaxmoe.seams import aqt
      >>> q = types.SimpleNamespace(  # as a QTensor, of tiles of 32 of K
      ...     qvalue=jnp.ones((2, 64, 128), jnp.int8),
      ...     scale=[jnp.ones((2, 2, 128)).at[:, 1].set(0.5)],
      ...     bias=[], sparsity_mask=None, tiling_state=None, dequant_dtype=jnp.bfloat16)
      >>> w = aqt.weight(q, weight_layout="kn")
      >>> w.dtype, w[0, 30:34, 0].tolist()
      (dtype(bfloat16), [1.0, 1.0, 0.5, 0.5])
    """
    arrays, chosen = _read("seams.aqt.weight", q, dtype)
    return weight_from_scales(*arrays, weight_layout=weight_layout, dtype=chosen)


def _read(op: str, q: Any, dtype: Any) -> tuple[tuple[Any, Any], Any]:
    """The values and the scale of a `QTensor` without tiles, and the dtype of what they stand for.

    Raises: as `quantized_array`.
    """
    if not all(hasattr(q, name) for name in ("qvalue", "scale", "bias", "dequant_dtype")):
        raise TypeError(_checks.message(op, "q must be an aqt QTensor", q=q))
    if q.qvalue is None:
        raise TypeError(_checks.message(op, "q.qvalue must be there: call q.quant(w) first"))
    count = len(q.scale or ())
    if count != 1:
        rule = f"q.scale must hold one scale, not {count}"
        raise NotImplementedError(_checks.message(op, rule))
    for name in ("bias", "sparsity_mask"):
        value = getattr(q, name, None)
        if value is not None and not (isinstance(value, list | tuple) and not value):
            rule = f"q.{name} must be {'empty' if name == 'bias' else 'None'}: no format has any"
            raise NotImplementedError(_checks.message(op, rule))
    arrays = q.qvalue, q.scale[0]
    if (tiling := getattr(q, "tiling_state", None)) is not None:
        arrays = _without_tiles(op, tiling, *arrays)
    return arrays, q.dequant_dtype if dtype is None else dtype


def _without_tiles(op: str, tiling: Any, values: Any, scale: Any) -> tuple[Any, Any]:
    """Values and scale with an axis in the place of the two, tiles and a tile's, that it became."""
    tiles: dict[Any, list[int]] = getattr(tiling, "tile_map", {})
    shape = tuple(getattr(tiling, "untiled_shape", ()))
    axes = [axis for parts in tiles.values() for axis in parts]
    whole = list(tiles) == list(range(len(shape)))
    if not whole or sorted(axes) != axes or len(axes) != values.ndim or scale.ndim != values.ndim:
        rule = "q.tiling_state must be None, or tiles of the axes of q.qvalue that nothing repeats"
        raise NotImplementedError(_checks.message(op, rule, qvalue=values, scale=scale))
    kept: list[int] = []
    for parts in tiles.values():
        *counts, inner = (scale.shape[axis] for axis in parts)
        if inner > 1:  # a scale for each element of all tiles
            counts = [values.shape[axis] for axis in parts[:-1]]
        kept += [*counts, inner]
    scale = jnp.broadcast_to(scale, kept)
    sizes = (math.prod(kept[axis] for axis in parts) for parts in tiles.values())
    return values.reshape(shape), scale.reshape(tuple(sizes))
