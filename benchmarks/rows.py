"""Result rows: their fields, the file they go to, and the line printed for each."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import bounds, timing

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_HOST_BOUND = "upper limit: launching takes as long"
_UNSTEADY = "not timed: the machine's own delays were longer than a batch"


@dataclasses.dataclass
class Row:
    """One measurement. `us` is None where there is none, and `reason` says why.

    Attributes:
      us, us_p10, us_p90: microseconds per layer: median, 10th and 90th percentile of the batches.
      tflops: FLOPs of the matrix products over `us`.
      weight_tbps: bytes of the weights of experts hit over `us`.
      floor_us, floor_fraction: the least possible time, and that time over `us`.
      rel_err: Frobenius error against the float32 reference on sampled tokens.
      experts_hit: experts with at least one row, mean over the layers of the chain.
      vs_dense: `tflops` over that of a dense product of equal FLOPs in the same run and regime.
      chosen: in suite `tiles`, whether the heuristics choose this tile.
      vs_best: in suite `tiles`, `us` over that of the fastest tile of the op in the same run.
      layers, weight_sets: length of the chain, and how many distinct weights it cycles through.
      temp_bytes: what XLA allocates for one call beyond its arguments and results.
      peak_bytes: arguments, results and that together.
      devices: how many devices it ran on, None for one; `tokens`, `tflops` and bytes are those of
        one of them.
      beside: of a row of one device, how many devices the others of its run had, None for one too;
        `report.load` finds it.
      sent_gbps: GB/s that each device sent to others.
      dispatch_us: host time to launch, per layer; the row is host-bound where it reaches `us`.
      us_half_chain: `us` with half as many layers: equal if launching costs nothing.
      sm_clock_mhz, power_w: medians under sustained load; None where nobody looked.
      tflop_per_joule: `tflops` over `power_w`.
    """

    suite: str
    op: str
    model: str
    tokens: int
    scheme: str
    pass_: str
    impl: str
    us: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    tflops: float | None = None
    weight_tbps: float | None = None
    floor_us: float | None = None
    floor_fraction: float | None = None
    rel_err: float | None = None
    experts_hit: float | None = None
    skew: str = "uniform"
    regime: str | None = None
    vs_dense: float | None = None
    chosen: bool | None = None
    vs_best: float | None = None
    layers: int | None = None
    weight_sets: int | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    devices: int | None = None
    beside: int | None = None
    sent_gbps: float | None = None
    dispatch_us: float | None = None
    us_half_chain: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    tflop_per_joule: float | None = None
    reason: str | None = None

    @property
    def host_bound(self) -> bool:
        """Whether launching takes about as long as running, so that `us` is an upper limit."""
        return self.reason == _HOST_BOUND

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name, floats cut to five significant digits."""
        values = {name.rstrip("_"): value for name, value in dataclasses.asdict(self).items()}
        return {k: _rounded(v) for k, v in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        """Reads what `to_json` wrote, or an older version of it."""
        values = dict(values)
        if "tflop_per_joule" not in values:
            values["tflop_per_joule"] = _per_joule(values["tflops"], values["power_w"])
        return cls(pass_=values.pop("pass"), **values)


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None  # JSON has no NaN


def _per_joule(tflops: float | None, power_w: float | None) -> float | None:
    return tflops / power_w if tflops and power_w else None


def with_time(
    row: Row, work: bounds.Work, ceiling: bounds.Ceiling | None, measured: timing.Measured
) -> Row:
    """Returns the row with its times and with what follows from them and from the work.

    A time that is not positive (timing.bursts subtracts batches) is no time: the row says so.
    """
    us, floor_us = measured.us, work.floor_us(ceiling, row.scheme)
    if not us > 0:
        return dataclasses.replace(row, reason=_UNSTEADY)
    tflops = work.flops / us * 1e-6 if work.flops else None
    host_bound = measured.dispatch_us > 0.8 * us
    return dataclasses.replace(
        row,
        us=us,
        us_p10=measured.us_p10,
        us_p90=measured.us_p90,
        tflops=tflops,
        weight_tbps=work.weight_bytes / us * 1e-6 if work.weight_bytes else None,
        floor_us=floor_us,
        floor_fraction=None if floor_us is None else floor_us / us,
        dispatch_us=measured.dispatch_us or None,
        sm_clock_mhz=measured.sm_clock_mhz,
        power_w=measured.power_w,
        tflop_per_joule=_per_joule(tflops, measured.power_w),
        reason=_HOST_BOUND if host_bound else None,
    )


def header(device: str, commit: str | None) -> dict[str, Any]:
    """Returns what was run, on what, and when."""
    clock, power = timing.clock_and_power()
    smi = timing.nvidia_smi("driver_version")
    return {
        "device": device,
        "driver": smi[0] if smi else None,
        "cuda": _cuda_version(),
        **{name: _version(name) for name in ("jax", "jaxlib")},
        "jaxmoe": _version("jaxmoe") or _source_version(),
        "commit": commit or _git_commit(),
        "command": "python -m benchmarks.run " + shlex.join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "sm_clock_mhz": clock,
        "power_w": power,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_version() -> str | None:
    """The version of the source tree, where jaxmoe is imported from there."""
    try:
        text = _PROJECT.read_text(encoding="utf-8")
    except OSError:
        return None
    return tomllib.loads(text)["project"]["version"]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _git_commit() -> str | None:
    return _output("git", "describe", "--always", "--dirty", "--abbrev=12").strip() or None


def _cuda_version() -> str | None:
    found = re.search(r"CUDA Version:\s*([\d.]+)", _output("nvidia-smi"))
    return found[1] if found else None


class Results:
    """Collects rows, prints each one, and rewrites the file after each."""

    def __init__(self, head: dict[str, Any], path: Path | None, start: float | None = None):
        self.header = head
        self.rows: list[Row] = []
        self._path = path
        self._start = time.monotonic() if start is None else start
        self.progress = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def add(self, row: Row) -> None:
        """Keeps, prints and saves one row."""
        self.rows.append(row)
        if row.sm_clock_mhz:  # read under load, unlike those of the start
            self.header |= {"sm_clock_mhz": row.sm_clock_mhz, "power_w": row.power_w}
        print(f"[{self.progress} {self.elapsed_s:4.0f}s] {line(row)}", flush=True)
        self.save()

    def save(self) -> None:
        """Writes everything so far; a run that is killed keeps its rows."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        rows = ",\n".join(json.dumps(row.to_json()) for row in self.rows)
        part.write_text(f'{{"header": {json.dumps(self.header)},\n"rows": [\n{rows}\n]}}\n')
        os.replace(part, self._path)


TITLE = (
    f"{'suite':5s} {'op':22s} {'model':13s} {'tokens':>6s} {'skew':10s} {'impl':27s} {'regime':9s} "
    f"{'us':>9s} {'p10':>9s} {'p90':>9s} {'TFLOP/s':>8s} {'TB/s':>6s} {'floor':>8s} {'of it':>6s} "
    f"{'dense':>6s} {'error':>8s}"
)


def line(row: Row) -> str:
    """Returns a row of the table whose head is `TITLE`."""
    width = 27 if row.chosen is None else 40  # tiles have long names
    name = (
        f"{row.suite:5s} {row.op:22s} {row.model:13s} {row.tokens:6d} {row.skew:10s} "
        f"{row.impl:{width}s} {row.regime or '-':9s} "
    )
    if row.us is None:
        return f"{name}{'-':>9s} {row.reason}"
    numbers = (
        f"{row.us:9.1f} {_cell(row.us_p10, '9.1f')} {_cell(row.us_p90, '9.1f')} "
        f"{_cell(row.tflops, '8.1f')} {_cell(row.weight_tbps, '6.2f')} "
        f"{_cell(row.floor_us, '8.1f')} {_cell(row.floor_fraction, '6.1%')} "
        f"{_cell(row.vs_dense, '6.2f')} {_cell(row.rel_err, '8.1e')}"
    )
    return name + numbers + (f"  {text}" if (text := remark(row)) else "")


def remark(row: Row) -> str:
    """Returns what is to be said of a row in words."""
    parts = ["the heuristics' choice"] if row.chosen else []
    if row.vs_best is not None:
        percent = 100 * (row.vs_best - 1)
        parts.append(f"{percent:.1f} % over the best tile" if percent else "the best tile")
    if row.sent_gbps is not None:
        parts.append(f"{row.sent_gbps:.0f} GB/s sent")
    return "; ".join(parts + ([row.reason] if row.reason else []))


def _cell(value: float | None, spec: str) -> str:
    return format(value, spec) if value is not None else "-".rjust(int(spec.split(".")[0]))
