"""tokamax's `ragged_dot` with its Hopper kernel, where that package is installed."""

import functools
import importlib.util

import jax

NAME = "tokamax"


def product(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each group of rows by its matrix."""
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.ragged_dot(lhs, rhs, group_sizes, implementation="mosaic")


@functools.cache
def refusal() -> str | None:
    """Returns why it is not run, None if it can be."""
    if importlib.util.find_spec("tokamax") is None:
        return "not run: tokamax is not installed"
    return None if jax.default_backend() == "gpu" else "not run: needs a GPU"
