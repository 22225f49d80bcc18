"""Weights that may be quantized arrays of qwix or aqt, in formats or plain; of a layer in one."""

from typing import Any

import jax

from jaxmoe.quantize import QuantizedArray, dequantize
from jaxmoe.seams import aqt, qwix


def is_quantized(array: Any) -> bool:
    """Whether something is an array of qwix or aqt."""
    return hasattr(array, "qvalue")


def read(op: str, name: str, w: Any, layout: str, dtype: Any) -> Any:
    """A weight for tokens in `dtype`, in a format or decoded if it is of qwix or aqt."""
    if not is_quantized(w):
        return w
    module = aqt if hasattr(w, "dequant_dtype") else qwix
    try:
        return module.weight(w, weight_layout=layout, dtype=dtype)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"jaxmoe.{op}: {name}: {error}") from error


def in_one_format(op: str, weights: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Weights [E, K, N] for tokens in `dtype`: a layer takes all in one format, or all plain.

    Arrays of qwix and aqt that are read into different formats, or beside plain ones, are decoded.
    """
    done = {name: read(op, name, w, "kn", dtype) for name, w in weights.items()}
    formats = {
        (w.format, w.dtype) if isinstance(w, QuantizedArray) else None for w in done.values()
    }
    if len(formats) == 1 or not any(map(is_quantized, weights.values())):
        return done
    return {n: _plain(w, dtype) for n, w in done.items()}


def _plain(w: Any, dtype: Any) -> jax.Array:
    return dequantize(w, dtype=dtype) if isinstance(w, QuantizedArray) else w.astype(dtype)
