"""One thing to time: how to build it, how to check it, and what it must do at least."""

import dataclasses
from collections.abc import Callable

import jax

from benchmarks import bounds, timing
from benchmarks.chain import Chain

_OUTPUT_BYTES = 16 * 2**30


@dataclasses.dataclass
class Entry:
    """One implementation of one op on one case.

    Attributes:
      op, impl: names in the result rows.
      work: what the op must do at least.
      experts_hit: mean over the layers of a chain; None where there are no experts.
      make: builds a chain of so many layers.
      check: returns the relative error of one call on fresh data; None for a bound.
      expected_us: rough time of one layer, for the length of the chain.
      refusal: why it is not run, None if it is.
      weight_sets: distinct weights the chain cycles through.
      output_bytes: what one call leaves in memory while the chain runs.
    """

    op: str
    impl: str
    work: bounds.Work
    experts_hit: float | None
    make: Callable[[int], Chain]
    check: Callable[[], float] | None
    expected_us: float
    refusal: str | None = None
    weight_sets: int | None = None
    output_bytes: float = 0.0

    @property
    def layers(self) -> int:
        """Length of the chain."""
        return chain_length(self.expected_us, self.output_bytes)


def chain_length(expected_us: float, output_bytes: float = 0.0) -> int:
    """Returns the layers of a chain on this machine (CPUs need no long ones)."""
    if jax.default_backend() != "gpu":
        return 2
    return timing.chain_length(expected_us, int(_OUTPUT_BYTES // max(output_bytes, 1.0)))


def guessed_us(work: bounds.Work) -> float:
    """Returns a guess of the time on any device: the floor of the one we know."""
    return work.floor_us(bounds.CEILINGS["NVIDIA H200"]) or 0.0
