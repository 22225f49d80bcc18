"""Weights of aqt, a `QTensor`, as a `jaxmoe.QuantizedArray`."""

from typing import Any

from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.scaled import from_scales
from jaxmoe.quantize import QuantizedArray

_OP = "seams.aqt.quantized_array"


def quantized_array(q: Any, *, weight_layout: str, dtype: Any = None) -> QuantizedArray:
    """Returns the weights of experts that an `aqt_tensor.QTensor` holds, number for number.

    w = q.qvalue * q.scale[0]

    Args:
      q: a `QTensor` [E, K, N], or [E, N, K] with `weight_layout` "nk", with one scale and without
        bias, sparsity or tiles. Nothing but its attributes is used.
      weight_layout: "kn" or "nk".
      dtype: what `jaxmoe.dequantize` shall return; `q.dequant_dtype` by default.

    Returns:
      `QuantizedArray` in the format that holds `q` exactly: see `jaxmoe.checkpoints.from_scales`.

    Raises:
      TypeError: `q` is no `QTensor`, or has no values yet.
      NotImplementedError: a bias, a sparsity mask, tiles, or not one scale.
      ValueError: no format has its scales; the message lists those that there are.

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
    if not all(hasattr(q, name) for name in ("qvalue", "scale", "bias", "dequant_dtype")):
        raise TypeError(_checks.message(_OP, "q must be an aqt QTensor", q=q))
    if q.qvalue is None:
        raise TypeError(_checks.message(_OP, "q.qvalue must be there: call q.quant(w) first"))
    count = len(q.scale or ())
    if count != 1:
        rule = f"q.scale must hold one scale, not {count}"
        raise NotImplementedError(_checks.message(_OP, rule))
    for name in ("bias", "sparsity_mask", "tiling_state"):
        value = getattr(q, name, None)
        if value is not None and not (isinstance(value, list | tuple) and not value):
            rule = f"q.{name} must be {'empty' if name == 'bias' else 'None'}: no format has any"
            raise NotImplementedError(_checks.message(_OP, rule))
    chosen = q.dequant_dtype if dtype is None else dtype
    return from_scales(q.qvalue, q.scale[0], weight_layout=weight_layout, dtype=chosen)
