"""One thing to time: how to build it, how to check it, and what it must do at least."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks import bounds, timing
from benchmarks.chain import Chain

_OUTPUT_BYTES = 16 * 2**30


class Memory(NamedTuple):
    """Bytes that XLA assigns to one call.

    Attributes:
      temp_bytes: beyond arguments and results.
      peak_bytes: all three together, the most there is at any time.
    """

    temp_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """Reads it from a compiled program."""
        found = compiled.memory_analysis()
        outside = found.argument_size_in_bytes + found.output_size_in_bytes
        peak = outside - found.alias_size_in_bytes + found.temp_size_in_bytes
        return cls(found.temp_size_in_bytes, peak)


@dataclasses.dataclass
class Entry:
    """One implementation of one op on one case.

    Attributes:
      op, impl: names in the result rows.
      work: what the op must do at least.
      experts_hit: mean over the layers of a chain; None where there are no experts.
      layers: length of the chain.
      make: builds a chain of so many layers.
      check: returns the relative error of one call on fresh data; None for a bound.
      refusal: why it is not run, None if it is.
      weight_sets: distinct weights there are to cycle through.
      chosen: whether the heuristics choose this tile; None where tiles are not compared.
      scheme: what it multiplies, "bf16" or "fp8".
      pass_: "forward" or "forward+backward".
      memory: returns what one call needs of the device's memory.
      sent_bytes: what a device sends to others in one layer; None where nothing is sent.
      devices: how many devices it runs on; None for one.
    """

    op: str
    impl: str
    work: bounds.Work
    experts_hit: float | None
    layers: int
    make: Callable[[int], Chain]
    check: Callable[[], float] | None
    refusal: str | None = None
    weight_sets: int | None = None
    chosen: bool | None = None
    scheme: str = "bf16"
    pass_: str = "forward"
    memory: Callable[[], Memory] | None = None
    sent_bytes: float | None = None
    devices: int | None = None


def chain_length(
    work: bounds.Work,
    output_bytes: float = 0.0,
    times_floor: float = 1.0,
    scheme: str = "bf16",
) -> int:
    """Returns the layers of a chain on this machine.

    Args:
      work: of one layer, with the experts that even routing hits: the same for uniform and zipf, so
        that they share executables.
      output_bytes: what each layer leaves in memory while the chain runs.
      times_floor: about how much slower than its floor the implementation is.
      scheme: what it multiplies.
    """
    if jax.default_backend() != "gpu":
        return 2
    ceiling = bounds.CEILINGS["NVIDIA H200"]  # elsewhere a guess will do
    fitting = int(_OUTPUT_BYTES // max(output_bytes, 1.0))
    expected_us = (work.floor_us(ceiling, scheme) or 0.0) * times_floor
    return timing.chain_length(expected_us, work.compute_heavy(ceiling, scheme), fitting)
