"""Timers: bursts in rotated order, and sustained load (any framework: launch, then wait)."""

import dataclasses
import math
import subprocess
import time
from collections.abc import Mapping
from typing import Protocol

_CHAIN_US = 2000.0  # a chain lasts at least this long: launching it takes far less
_BURST_US = 6250.0  # a compute-heavy chain at most: the card slows down under longer load
_EXECUTIONS = 4  # of a batch, at least
_SLOW_US = 50000.0  # any chain of more than one layer at most

_LOAD = "clocks.sm,power.draw"
_PLAIN = ("--format=csv,noheader,nounits", "--id=0")


def chain_length(expected_us: float, compute_heavy: bool, fitting: int = 64) -> int:
    """Returns 8 layers; more where they are short, fewer where they are long or do not fit."""
    expected_us = max(expected_us, 1.0)
    wanted = min(64, max(8, math.ceil(_CHAIN_US / expected_us)))
    longest_us = _BURST_US if compute_heavy else _SLOW_US
    return max(1, min(wanted, round(longest_us / expected_us), fitting))


class Timed(Protocol):
    """Something that can be started many times before anyone waits for it."""

    layers: int

    def launch(self, count: int) -> None:
        """Enqueues `count` executions."""

    def wait(self) -> None:
        """Returns when all of them have finished."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Microseconds per layer over several batches, and what the card did meanwhile."""

    us: float
    us_p10: float
    us_p90: float
    dispatch_us: float = 0.0
    sm_clock_mhz: float | None = None
    power_w: float | None = None


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long and how often.

    Attributes:
      repeats: batches per row.
      idle_s: pause before each batch, so that every batch starts from the same power state.
      batch_s: wanted length of a batch, never fewer than 4 executions.
      cap_s: time one implementation may take for all its batches (never fewer than 3).
    """

    repeats: int
    idle_s: float
    batch_s: float
    cap_s: float


def percentile(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def execution_s(timed: Timed, warm_up: int = 3) -> float:
    """Warms up, then returns the seconds of one execution."""
    timed.launch(1)
    timed.wait()
    start = time.perf_counter()
    timed.launch(1)
    timed.wait()
    once = time.perf_counter() - start
    if once > 0.5:  # compiled and warm: more executions would only cost time
        return once
    timed.launch(warm_up)
    timed.wait()
    start = time.perf_counter()
    timed.launch(2)
    timed.wait()
    return (time.perf_counter() - start) / 2


def bursts(timed: Mapping[str, Timed], protocol: Pace) -> dict[str, Measured]:
    """Times every implementation in short bursts: idle, one warm-up execution, a few timed ones.

    From the time of a batch that of one half as long is subtracted, which had the same pause: what
    is left is the time of the executions in the second half, without the host's start of a batch.
    The order rotates from batch to batch, so that none always runs behind the same neighbour.
    """
    counts: dict[str, int] = {}
    repeats: dict[str, int] = {}
    for name, item in timed.items():
        once = execution_s(item)
        counts[name] = max(_EXECUTIONS, min(200, math.ceil(protocol.batch_s / once)))
        both = (1.5 * counts[name] + 2) * once + 2 * protocol.idle_s
        repeats[name] = min(protocol.repeats, max(3, int(protocol.cap_s / both)))
    names = list(timed)
    samples: dict[str, list[float]] = {name: [] for name in names}
    dispatch: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(max(repeats.values(), default=0)):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            if repeat >= repeats[name]:
                continue
            item, count = timed[name], counts[name]
            seconds = 0.0
            for executions, sign in ((count, 1), (count // 2, -1)):
                time.sleep(protocol.idle_s)
                start = time.perf_counter()
                item.launch(1)
                dispatch[name].append((time.perf_counter() - start) / item.layers * 1e6)
                item.wait()
                seconds += sign * _batch_s(item, executions)
            samples[name].append(seconds / ((count - count // 2) * item.layers) * 1e6)
    return {
        name: dataclasses.replace(
            _summary(samples[name]), dispatch_us=percentile(dispatch[name], 0.5)
        )
        for name in names
    }


def _batch_s(item: Timed, count: int) -> float:
    start = time.perf_counter()
    item.launch(count)
    item.wait()
    return time.perf_counter() - start


def sustained(timed: Timed, seconds: float = 1.0) -> Measured:
    """Times about a second of back-to-back load, in segments, and reads clock and power in it."""
    once = execution_s(timed)
    count = max(1, round(0.05 / once))
    segments = max(3, round(seconds / (once * count)))
    samples: list[float] = []
    with _Monitor() as monitor:
        for _ in range(segments):
            start = time.perf_counter()
            timed.launch(count)
            timed.wait()
            samples.append((time.perf_counter() - start) / (count * timed.layers) * 1e6)
    return dataclasses.replace(
        _summary(samples), sm_clock_mhz=monitor.clock_mhz, power_w=monitor.power_w
    )


class _Monitor:
    """Reads SM clock and power ten times a second; afterwards holds their medians."""

    clock_mhz: float | None = None
    power_w: float | None = None

    def __enter__(self) -> "_Monitor":
        command = ["nvidia-smi", f"--query-gpu={_LOAD}", *_PLAIN, "-lms", "100"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            self._process = None
        else:
            assert self._process.stdout is not None
            self._process.stdout.readline()  # it runs: what follows is read under load
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text = self._process.communicate()[0]
        readings = [[_number(v) for v in line.split(",")] for line in text.splitlines()]
        pairs = [(r[0], r[1]) for r in readings if len(r) == 2 and r[0] and r[1]]
        if pairs:
            self.clock_mhz = percentile([clock for clock, _ in pairs], 0.5)
            self.power_w = percentile([power for _, power in pairs], 0.5)


def nvidia_smi(fields: str) -> list[str] | None:
    """Returns the values of a query for the first GPU, None where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={fields}", *_PLAIN]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [value.strip() for value in out.stdout.strip().split(",")]


def clock_and_power() -> tuple[float | None, float | None]:
    """Returns SM clock in MHz and power in W right now."""
    values = nvidia_smi(_LOAD)
    if values is None or len(values) != 2:
        return None, None
    return _number(values[0]), _number(values[1])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _summary(samples: list[float]) -> Measured:
    quantiles = (percentile(samples, q) for q in (0.5, 0.1, 0.9))
    return Measured(*quantiles)
