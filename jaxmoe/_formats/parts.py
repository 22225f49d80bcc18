"""Packed weights from codes and scales in the order of their axes, as importers have them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import QUANTIZED
from jaxmoe._formats.weight_only import Packed
from jaxmoe._jax import checks as _checks
from jaxmoe.quantize import QuantizedArray, check_quantized, format_of


def pack(
    format: str,
    *parts: Any,
    weight_layout: str,
    dtype: Any = jnp.bfloat16,
    op: str = "pack",
    of: tuple[str, Any] | None = None,
) -> QuantizedArray:
    """Makes a quantized array of codes and scales, of which it keeps every bit that has a meaning.

    Args:
      format: the name of a packed format.
      *parts: codes [E, N, K], then what the `pack` of the format takes: exponents, or scales, or
        these and global scales or zero points; [E, N, groups] or [E, N] or [E].
      weight_layout: of the array that the result stands for; codes are [E, N, K] in any case.
      dtype: of that array.
      op: whose errors they are.
      of: the argument that codes were read from, for messages: its name, and what was given.

    Raises:
      TypeError, ValueError: another dtype of codes, or shapes that no block has.
    """
    dtype = _checks.float_dtype(op, "dtype", dtype)
    known = QUANTIZED[format].of(dtype)
    assert isinstance(known, Packed)
    codes, *rest = map(jnp.asarray, parts)
    _checks.check_rank(op, "codes", codes, "E,N,K")
    _checks.check_dtype(op, "codes", codes, (known.codes,))
    if refused := known.refused_dtype(dtype):
        raise TypeError(_checks.message(op, refused))
    check_steps_of(op, *(of or ("codes", codes)), codes.shape, format)
    given = known.given(codes.shape)
    if len(rest) != len(given):
        rule = f"{format} is made of codes, {', '.join(given)}, not of {len(parts)} arrays"
        raise TypeError(_checks.message(op, rule))
    for (name, (shape, allowed)), part in zip(given.items(), rest, strict=True):
        _checks.check_dtype(op, name, part, allowed)
        _checks.check_shape(op, name, part, shape, format)
    values, scales = known.pack(codes, *rest)
    return QuantizedArray(values, scales, format, weight_layout, dtype)


def check_steps_of(op: str, name: str, given: Any, shape: tuple[int, ...], format: str) -> None:
    """Refuses what was given for codes [E, N, K] that blocks of a format do not divide."""
    axes = zip(("outputs (N)", "inputs (K)"), shape[1:], QUANTIZED[format].steps, strict=True)
    for what, size, step in axes:
        _checks.check_multiple(op, name, given, size, step, f"{what} in {format}")


def unpack(q: QuantizedArray) -> tuple[jax.Array, ...]:
    """The codes [E, N, K] and what else `pack` takes, of a quantized array in a packed format."""
    check_quantized("unpack", "q", q)
    format = format_of(q)
    assert isinstance(format, Packed)
    return format.unpack(jnp.asarray(q.values), jnp.asarray(q.scales))
