"""`jax.lax.ragged_dot`, which XLA turns into a dense masked product on GPUs."""

import jax

import jaxmoe
from benchmarks import bounds
from benchmarks.models import BYTES

NAME = "xla_ragged_dot"

_DENSE_FLOPS = 700e12  # what XLA's dense product of all experts was seen to reach on an H200
_MEMORY_BYTES = 40 * 2**30
_SECONDS = 2.0


def product(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each group of rows by its matrix."""
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)


def dequantized_product(
    lhs: jax.Array, rhs: jaxmoe.QuantizedArray, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies by weights of layout "nk" that the program itself turns into bf16."""
    return product(lhs, jaxmoe.dequantize(rhs).swapaxes(1, 2), group_sizes)


def times_floor(work: bounds.Work, num_experts: int) -> float:
    """Returns about how many times the floor it takes: it multiplies every row by every expert."""
    floor_us = work.floor_us(bounds.CEILINGS["NVIDIA H200"]) or 1.0
    return max(1.0, num_experts * work.flops / _DENSE_FLOPS * 1e6 / floor_us)


def refusal(flops: float, num_experts: int, num_rows: int, width: int) -> str | None:
    """Returns why the call is not made, None if it can be."""
    needed = num_experts * num_rows * width * BYTES
    if needed > _MEMORY_BYTES:
        return f"not run: its masked copies of the rows would take {needed / 2**30:.0f} GiB"
    seconds = num_experts * flops / _DENSE_FLOPS
    if seconds > _SECONDS:
        return f"not run: about {seconds:.1f} s per call"
    return None
