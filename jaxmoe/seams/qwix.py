"""Weights of qwix, a `QArray`, as a `jaxmoe.QuantizedArray`, or decoded."""

from typing import Any

import jax

from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.decoded import weight_from_scales
from jaxmoe.checkpoints.scaled import SCALE_FORMATS, from_scales
from jaxmoe.quantize import QuantizedArray


def quantized_array(q: Any, *, weight_layout: str, dtype: Any = None) -> QuantizedArray:
    """Returns the weights of experts that a `qwix.QArray` holds, number for number.

    w = (q.qvalue - q.zero_point) * q.scale

    Args:
      q: a `QArray` [E, K, N], or [E, N, K] with `weight_layout` "nk". Nothing but its attributes is
        used.
      weight_layout: "kn" or "nk".
      dtype: what `jaxmoe.dequantize` shall return; that of `q.scale` by default.

    Returns:
      `QuantizedArray` in the format that holds `q` exactly: see `jaxmoe.checkpoints.from_scales`.

    Raises:
      TypeError: `q` is no `QArray`, or has elements, such as "nf4", that no format has.
      ValueError: no format has its scales; the message lists those that there are. `weight` takes
        them all.

    Numerics: exact. qwix rounds dequantized weights to the dtype of `q.scale`; products here do
      not, but for those of int4 formats, which round as qwix does.
    Source: qwix 0.1.8, qwix/_src/core/qarray.py.

    Example:
      >>> import types, jax.numpy as jnp, jaxmoe
      >>> from jaxmoe.seams import qwix
      >>> q = types.SimpleNamespace(  # as a QArray
      ...     qvalue=jnp.ones((2, 64, 128), jnp.int8), scale=jnp.full((2, 1, 128), 0.5),
      ...     zero_point=None, qtype="int8")
      >>> w = qwix.quantized_array(q, weight_layout="kn")
      >>> w.format, float(jaxmoe.dequantize(w)[0, 0, 0])
      ('int8_channel', 0.5)
    """
    arrays, options = _read("seams.qwix.quantized_array", q)
    return from_scales(*arrays, weight_layout=weight_layout, dtype=dtype, **options)


def weight(q: Any, *, weight_layout: str, dtype: Any = None) -> QuantizedArray | jax.Array:
    """Returns the weights of experts that a `qwix.QArray` holds, whatever tiles its scales have.

    As `quantized_array` where a format holds them. Else, as those of int8 with a scale for each 128
    of K, or with zero points, they are decoded: see `jaxmoe.checkpoints.weight_from_scales`, which
    says what that costs, and that inside of `jax.jit` each call pays it.

    Args:
      q: as in `quantized_array`.
      weight_layout: "kn" or "nk".
      dtype: bfloat16, float16 or float32, that of the tokens; that of `q.scale` by default.

    Returns:
      `QuantizedArray`, or an array in `dtype`.

    Raises:
      TypeError: `q` is no `QArray`, or has elements that no format has, such as "nf4".
      ValueError: shapes that do not go together.

    Numerics: exact in a format. An array has what `qwix.dequantize` gives where `dtype` is that of
      16-bit scales: one rounding.
    Source: qwix 0.1.8, qwix/_src/core/qarray.py.

    Example:
      >>> import types, jax.numpy as jnp
      >>> from jaxmoe.seams import qwix
      >>> q = types.SimpleNamespace(  # as a QArray, of tiles of 32 of K
      ...     qvalue=jnp.ones((2, 64, 128), jnp.int8),
      ...     scale=jnp.ones((2, 2, 128)).at[:, 1].set(0.5), zero_point=None, qtype="int8")
      >>> w = qwix.weight(q, weight_layout="kn")
      >>> w.shape, w[0, 30:34, 0].tolist()
      ((2, 64, 128), [1.0, 1.0, 0.5, 0.5])
    """
    arrays, options = _read("seams.qwix.weight", q)
    return weight_from_scales(*arrays, weight_layout=weight_layout, dtype=dtype, **options)


def _read(op: str, q: Any) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """The arrays of a `QArray`, and the format of its scales if they have one of their own."""
    if not all(hasattr(q, name) for name in ("qvalue", "scale", "zero_point")):
        raise TypeError(_checks.message(op, "q must be a qwix.QArray", q=q))
    kind = q.qtype if isinstance(getattr(q, "qtype", None), str) else None
    if kind == "nf4":
        rule = "q.qtype='nf4' must not be a table of values: formats have numbers and scales"
        raise TypeError(_checks.message(op, rule))
    options = {"scale_format": kind if kind in SCALE_FORMATS else None}
    return (q.qvalue, q.scale, q.zero_point), options
