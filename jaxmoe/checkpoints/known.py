"""Checks of numbers that are known, as those that jax.jit traces are not.

A scale that becomes zero or infinite on the way would be read as weights of zeros, without a word.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmoe._formats.quantization import MAX_SCALE, MIN_SCALE
from jaxmoe._jax import checks as _checks


def known(a: Any) -> Any:
    """An array as NumPy's; None if it is traced, or if other processes have parts of it."""
    # NOTE: not jnp: under a trace that gives tracers of constants too.
    there = not isinstance(a, Tracer) and getattr(a, "is_fully_addressable", True)
    return np.asarray(a) if there else None


def check_numbers(op: str, name: str, numbers: Any, good: Any, rule: str) -> None:
    """Refuses `numbers` of NumPy that are not `good`; the message has the first of them."""
    if good.all():
        return
    first = tuple(np.argwhere(~good)[0].tolist())
    at = f"[{','.join(map(str, first))}]" if first else ""
    rule = f"{name}{at}={float(numbers[first])} must be {rule}"
    raise ValueError(_checks.message(op, rule, **{name: numbers}))


def check_factors(op: str, name: str, factors: Any) -> None:
    """Refuses factors, if they are known, that are no good divisors either."""
    numbers = known(factors)
    if numbers is None:
        return
    good = (numbers >= MIN_SCALE) & (numbers <= MAX_SCALE)
    rule = "positive and finite, from 2^-126 to 2^126, so that it and 1 / it are normal numbers"
    check_numbers(op, name, numbers, good, rule)


def check_range(op: str, name: str, scales: Any, dtype: Any) -> None:
    """Refuses scales, if they are known, that would be zero or infinite in a dtype."""
    numbers = known(scales)
    if numbers is None:
        return
    with np.errstate(over="ignore", under="ignore"):
        wide = numbers.astype(np.float32)
        held = wide.astype(dtype).astype(np.float32)
    good = ((held != 0) | (wide == 0)) & (np.isfinite(held) | ~np.isfinite(wide))
    rule = f"neither zero nor infinite in dtype={jnp.dtype(dtype).name}; give a wider dtype"
    check_numbers(op, name, numbers, good, rule)
