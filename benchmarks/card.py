"""How fast the card of this run copies and multiplies: cards of one model are not alike."""

import jax
import jax.numpy as jnp

from benchmarks import chain, timing
from benchmarks.cases import DTYPE

_COPY_BYTES = 2 * 2**30  # far more than L2 holds
_SIZE = 8192
# With the executions that warm up, about 0.3 s for both. One execution takes 1 ms or more, so that
# launching a batch of ten is little of it.
_COPIES = 5
_COPY_PACE = timing.Pace(1, idle_s=0.005, batch_s=0.010, cap_s=1.0)
_DENSE_PACE = timing.Pace(3, idle_s=0.040, batch_s=0.014, cap_s=1.0)  # idle: full clock again


def speeds(platform: str) -> dict[str, float | None]:
    """Returns the header's `copy_tbps` and `dense_tflops`; None where the device is no GPU."""
    if platform != "gpu":
        return {"copy_tbps": None, "dense_tflops": None}
    return {"copy_tbps": round(copy_tbps(), 3), "dense_tflops": round(dense_tflops(), 1)}


def copy_tbps(num_bytes: int = _COPY_BYTES) -> float:
    """Returns TB/s, bytes read and written, of `x + 1` over an int32 array of `num_bytes`.

    The best of several batches: nothing makes memory faster than it is, much makes it slower.
    """
    # Counting numbers: on zeros the card would draw less power. In place, as the state is donated.
    numbers = jnp.arange(num_bytes // 4, dtype=jnp.int32)
    copy = chain.Chain(chain.compiled(lambda x, _: x + 1), numbers, (), layers=1)
    del numbers  # the chain's alone, so that it is freed with it
    us = min(timing.bursts({"copy": copy}, _COPY_PACE)["copy"].us for _ in range(_COPIES))
    return 2 * num_bytes / us * 1e-6


def dense_tflops(size: int = _SIZE) -> float:
    """Returns TFLOP/s of a bf16 product of two square matrices of normal numbers, in a burst."""
    keys = jax.random.split(jax.random.key(0))
    factors = tuple(jax.random.normal(key, (size, size), DTYPE) for key in keys)
    product = chain.compiled(lambda _, inputs: inputs[0] @ inputs[1])
    dense = chain.Chain(product, jnp.zeros_like(factors[0]), factors, layers=1)
    us = timing.bursts({"dense": dense}, _DENSE_PACE)["dense"].us
    return 2 * size**3 / us * 1e-6
