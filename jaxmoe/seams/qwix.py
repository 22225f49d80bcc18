"""Weights of qwix, a `QArray`, as a `jaxmoe.QuantizedArray`."""

from typing import Any

from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.scaled import SCALE_FORMATS, from_scales
from jaxmoe.quantize import QuantizedArray

_OP = "seams.qwix.quantized_array"


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
      ValueError: no format has its scales; the message lists those that there are.

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
    if not all(hasattr(q, name) for name in ("qvalue", "scale", "zero_point")):
        raise TypeError(_checks.message(_OP, "q must be a qwix.QArray", q=q))
    kind = q.qtype if isinstance(getattr(q, "qtype", None), str) else None
    if kind == "nf4":
        rule = "q.qtype='nf4' must not be a table of values: formats have numbers and scales"
        raise TypeError(_checks.message(_OP, rule))
    return from_scales(
        *(q.qvalue, q.scale, q.zero_point),
        weight_layout=weight_layout,
        scale_format=kind if kind in SCALE_FORMATS else None,
        dtype=dtype,
    )
