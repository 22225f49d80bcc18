"""Checks and times the entries of one case, and turns what was measured into rows."""

import dataclasses
from typing import Any

import jax

from benchmarks import cases, timing
from benchmarks.baselines import dense
from benchmarks.cases import Case
from benchmarks.chain import Chain
from benchmarks.models import PACKED_BYTES
from benchmarks.rows import Results, Row, with_time
from benchmarks.suites import layer_fp8, layer_packed
from benchmarks.suites.entry import Entry

# bfloat16 outputs and intermediate are off by 2e-3 to 4e-3, a wrong row by 1. A last bit of a sum
# can move an FP8 intermediate by its own last bit, 6 to 12 %.
MAX_ERROR = {"bf16": 1e-2, "fp8": 5e-2} | dict.fromkeys(PACKED_BYTES, 1e-2)
# Implementations that are timed under load too; the dense one by scheme.
_DENSE = {"bf16": dense.NAME, "fp8": dense.FP8_NAME} | dict.fromkeys(PACKED_BYTES, dense.NAME)
_SUSTAINED = ("jaxmoe", *layer_fp8.VARIANTS, *layer_packed.VARIANTS, *_DENSE.values())
FLOORS = {"bf16": "floor", **{scheme: f"floor[{scheme}]" for scheme in ("fp8", *PACKED_BYTES)}}
_SHORT_US = 100.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Choices of the command line.

    Attributes:
      repeats: bursts per row.
      impls: implementations to run; None for all.
      sustained: whether compute-heavy rows are also timed under about a second of load.
      cap_s: time one implementation may take for the bursts of one row.
    """

    repeats: int = 20
    impls: frozenset[str] | None = None
    sustained: bool = True
    cap_s: float = 2.0

    def wants(self, entry: Entry) -> bool:
        """Whether to run an entry; every tile is jaxmoe's."""
        impl = entry.impl if entry.chosen is None else "jaxmoe"
        return self.impls is None or impl in self.impls

    def pace(self, compute_heavy: bool) -> timing.Pace:
        """Returns how to time a row: compute-heavy rows need longer pauses and longer bursts."""
        if compute_heavy:
            return timing.Pace(max(3, self.repeats // 2), 0.040, 0.025, self.cap_s)
        return timing.Pace(self.repeats, 0.005, 0.010, self.cap_s)


def measure(suite: str, case: Case, entries: list[Entry], settings: Settings, out: Results) -> None:
    """Adds the rows of every op of a case: its floor, then the implementations."""
    for op in dict.fromkeys(entry.op for entry in entries):
        chosen = [e for e in entries if e.op == op]
        base = Row(
            suite=suite,
            op=op,
            model=case.model.name,
            tokens=case.num_tokens,
            scheme=cases.SCHEME,
            pass_=chosen[0].pass_,
            impl="floor",
            skew=case.skew,
        )
        firsts = {entry.scheme: entry for entry in reversed(chosen)}
        for scheme in dict.fromkeys(entry.scheme for entry in chosen):
            floor = FLOORS[scheme]
            if settings.impls is None or floor in settings.impls:
                row = dataclasses.replace(base, impl=floor, scheme=scheme)
                out.add(_floor_row(row, case, firsts[scheme]))
        _measure_op(base, case, [e for e in chosen if settings.wants(e)], settings, out)


def _max_error(entry: Entry) -> float:
    _, tokens = layer_packed.VARIANTS.get(entry.impl, (None, None))
    return MAX_ERROR[entry.scheme if tokens is None else "fp8"]


def _measure_op(
    base: Row, case: Case, entries: list[Entry], settings: Settings, out: Results
) -> None:
    ready: dict[str, Entry] = {}
    chains: dict[str, Chain] = {}
    errors: dict[str, float | None] = {}
    for entry in entries:
        row = _named(base, entry)
        if entry.refusal is not None:
            out.add(dataclasses.replace(row, reason=entry.refusal))
            continue
        # A peer that does not run here, or does not fit, must not end the others' run.
        try:
            error = entry.check() if entry.check else None
            if error is not None and not error <= _max_error(entry):
                wrong = dataclasses.replace(row, rel_err=error, reason="not timed: wrong result")
                out.add(wrong)
                continue
            chains[entry.impl] = entry.make(entry.layers)
            timing.execution_s(chains[entry.impl], warm_up=1)
        except Exception as failure:  # noqa: BLE001
            chains.pop(entry.impl, None)
            out.add(dataclasses.replace(row, reason=f"failed: {_first_line(failure)}"))
            continue
        ready[entry.impl], errors[entry.impl] = entry, error
    if not ready:
        return
    first = next(iter(ready.values()))
    compute_heavy = first.work.compute_heavy(case.ceiling, first.scheme)
    try:
        measured = timing.bursts(chains, settings.pace(compute_heavy))
    except Exception as failure:  # noqa: BLE001
        for impl in ready:
            out.add(
                dataclasses.replace(
                    _named(base, ready[impl]), reason=f"failed: {_first_line(failure)}"
                )
            )
        return
    rows = {
        impl: _row(base, case, ready[impl], measured[impl], "burst", errors[impl]) for impl in ready
    }
    _compare_with_dense(rows)
    _compare_with_best(rows)
    if case.num_tokens == 1 and "jaxmoe" in ready and 0 < measured["jaxmoe"].us < _SHORT_US:
        rows["jaxmoe"].us_half_chain = _half_chain_us(ready["jaxmoe"], settings)
    for row in rows.values():
        out.add(row)
    if compute_heavy and settings.sustained and case.skew == "uniform":
        rows = {
            impl: _row(
                base, case, ready[impl], timing.sustained(chains[impl]), "sustained", errors[impl]
            )
            for impl in _SUSTAINED
            if impl in ready
        }
        _compare_with_dense(rows)
        for row in rows.values():
            out.add(row)


def _named(base: Row, entry: Entry) -> Row:
    return dataclasses.replace(base, impl=entry.impl, chosen=entry.chosen, scheme=entry.scheme)


def _half_chain_us(entry: Entry, settings: Settings) -> float | None:
    layers = entry.layers // 2
    if layers < 1:
        return None
    half = {"half": entry.make(layers)}
    return timing.bursts(half, settings.pace(compute_heavy=False))["half"].us


def _row(
    base: Row,
    case: Case,
    entry: Entry,
    measured: timing.Measured,
    regime: str,
    error: float | None,
) -> Row:
    row = dataclasses.replace(
        _named(base, entry),
        regime=regime,
        rel_err=error,
        experts_hit=entry.experts_hit,
        layers=entry.layers,
        weight_sets=None if entry.weight_sets is None else min(entry.weight_sets, entry.layers),
        **(entry.memory()._asdict() if entry.memory else {}),
        devices=entry.devices,
    )
    if entry.sent_bytes and measured.us > 0:
        row.sent_gbps = entry.sent_bytes / measured.us * 1e-3
    if jax.default_backend() != "gpu":  # CPUs run small programs inside the launch
        measured = dataclasses.replace(measured, dispatch_us=0.0)
    return with_time(row, entry.work, case.ceiling, measured)


def _floor_row(base: Row, case: Case, entry: Entry) -> Row:
    us = entry.work.floor_us(case.ceiling, base.scheme)
    if us is None:
        return dataclasses.replace(base, reason="no measured ceilings for this device")
    row = dataclasses.replace(base, experts_hit=entry.experts_hit, devices=entry.devices)
    return with_time(row, entry.work, case.ceiling, timing.Measured(us, us, us))


def _compare_with_dense(rows: dict[str, Row]) -> None:
    for row in rows.values():
        other = rows.get(_DENSE[row.scheme])
        if other is not None and row.tflops and other.tflops:
            row.vs_dense = row.tflops / other.tflops


def _compare_with_best(rows: dict[str, Row]) -> None:
    tiles = [row for row in rows.values() if row.chosen is not None and row.us]
    least = min((row.us or 0.0 for row in tiles), default=0.0)
    for row in tiles:
        row.vs_best = (row.us or 0.0) / least


def _first_line(failure: Exception) -> str:
    text: Any = str(failure).strip() or type(failure).__name__
    return text.splitlines()[0][:160]
