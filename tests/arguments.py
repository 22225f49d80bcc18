"""Arguments of refused calls, made without computing: a table of them costs no import time."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def ones(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def zeros(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def zeros_of(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what `make(*args, **kwargs)` does, with NumPy arrays of zeros in the place of JAX's.

    `make` is traced only. Its strings and other hashable options must be keywords.
    """
    shapes = jax.eval_shape(lambda *arrays: make(*arrays, **kwargs), *args)
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
