"""All rows of one device, the newest of each kind, with the run that each comes from."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import bounds
from benchmarks.models import MODELS
from benchmarks.rows import Row
from benchmarks.tune import Tuned, read

Kind = tuple[Any, ...]
Point = tuple[str, int]  # a model and a number of tokens

_BENCHMARKS = Path(__file__).resolve().parents[1]
_KIND = (
    *("suite", "op", "model", "tokens", "scheme", "pass_", "skew", "regime"),
    *("devices", "beside", "impl"),
)


@dataclasses.dataclass(frozen=True)
class Measurements:
    """The newest row of each kind.

    Attributes:
      runs: the headers of the runs that these rows come from, oldest first.
      rows: in the order of their runs.
      peers: times of other libraries, measured elsewhere or, where a row has `jaxmoe_us`, in turn
        with jaxmoe on one card; `{}` if there are none.
      run_of: place in `runs` of each row, by its kind.
      tuned: layers whose tiles were tuned.
    """

    runs: list[dict[str, Any]]
    rows: list[Row]
    peers: dict[str, Any]
    run_of: dict[Kind, int] = dataclasses.field(default_factory=dict)
    tuned: list[Tuned] = dataclasses.field(default_factory=list)

    @property
    def rates(self) -> str:
        """The device's, of which floors are made, in words."""
        ceiling = bounds.CEILINGS.get(self.runs[-1]["device"])
        if ceiling is None:
            return "what bytes and what FLOPs take"
        tflops = ceiling.flops_per_s("bf16") * 1e-12
        return f"bytes / {ceiling.bytes_per_s * 1e-12:.1f} TB/s and FLOPs / {tflops:.0f} TFLOP/s"

    def older(self, row: Row) -> bool:
        """Whether another commit has newer rows of the same suite and scheme."""
        newest = max(
            self.run_of[kind(r)]
            for r in self.rows
            if (r.suite, r.scheme) == (row.suite, row.scheme)
        )
        commits = (self.runs[i]["commit"] for i in (newest, self.run_of[kind(row)]))
        return len(set(commits)) > 1

    def origin(self, row: Row | None) -> str:
        """The number of the row's run, as `runs_text` counts; "†" behind it if the row is older."""
        if row is None or kind(row) not in self.run_of:
            return "-"
        return f"{self.run_of[kind(row)] + 1}" + ("†" if self.older(row) else "")

    def find(self, model: str, tokens: int, impl: str, **fields: Any) -> Row | None:
        """The timed row of a layer: forward, uniform, in a burst unless `fields` say otherwise."""
        wanted = {"suite": "layer", "op": "moe_mlp", "skew": "uniform", "regime": "burst"} | fields
        for row in self.rows:
            same = (row.model, row.tokens, row.impl) == (model, tokens, impl)
            if same and row.us and all(getattr(row, k) == v for k, v in wanted.items()):
                return row
        return None

    def loaded(self, model: str, tokens: int, impl: str, **fields: Any) -> Row | None:
        """The row under sustained load, or in a burst where load was not measured."""
        sustained = self.find(model, tokens, impl, regime="sustained", **fields)
        return sustained or self.find(model, tokens, impl, **fields)

    def peer(self, model: str, tokens: int, impl: str, **fields: Any) -> dict[str, Any] | None:
        """The row of another library: forward, bf16, loaded unless `fields` say otherwise."""
        wanted = {"pass": "forward", "format": "bf16", "regime": "loaded"} | fields
        for row in self.peers.get("rows", ()):
            same = (row["model"], row["tokens"], row["impl"]) == (model, tokens, impl)
            if same and all(row[k] == v for k, v in wanted.items()):
                return row
        return None

    def peer_us(self, model: str, tokens: int, impl: str, **fields: Any) -> float | None:
        """The microseconds of `peer`."""
        row = self.peer(model, tokens, impl, **fields)
        return row["us"] if row else None

    def ratio(
        self, point: Point, impl: str, peers: Iterable[str], suite: str = "layer", **fields: Any
    ) -> float | None:
        """The time of the fastest of these libraries over that of jaxmoe's implementation.

        In bursts and under load, the smaller ratio: most others were measured in one of them.
        jaxmoe's time is that of the same run where the two were measured in turn.
        """
        ours = {
            "burst": self.find(*point, impl, suite=suite),
            "loaded": self.loaded(*point, impl, suite=suite),
        }
        found = [
            theirs["us"] / us
            for regime, row in ours.items()
            for peer in peers
            if (theirs := self.peer(*point, peer, regime=regime, **fields))
            and (us := us_to_compare(theirs, row))
        ]
        return min(found, default=None)

    def points(self, impls: Iterable[str] = ("jaxmoe",), suite: str = "layer") -> list[Point]:
        """Models and tokens at which one of these implementations of a layer was timed."""
        impls = set(impls)
        same = (r for r in self.rows if (r.suite, r.op, r.skew) == (suite, "moe_mlp", "uniform"))
        return by_model({(r.model, r.tokens) for r in same if r.impl in impls and r.us})

    def floors(self) -> dict[Point, float]:
        """The floor of every measured layer in bf16, and of the peers' for even routing."""
        out: dict[Point, float] = {}
        for row in self.peers.get("rows", ()):
            model, tokens = MODELS[row["model"]], row["tokens"]
            work = bounds.layer(model, tokens, bounds.expected_hit(model, tokens))
            us = work.floor_us(bounds.CEILINGS.get(self.peers["device"]))
            if us is not None and (row["pass"], row["format"]) == ("forward", "bf16"):
                out[model.name, tokens] = us
        for name, tokens in self.points():
            row = self.find(name, tokens, "floor", regime=None)
            if row and row.us:
                out[name, tokens] = row.us
        return out


def kind(row: Row) -> Kind:
    """The fields that say what a row measures; the implementation is the last."""
    return tuple(getattr(row, name) for name in _KIND)


def us_to_compare(theirs: dict[str, Any], ours: Row | None) -> float | None:
    """jaxmoe's microseconds to compare another library's row with."""
    return theirs.get("jaxmoe_us") or (ours and ours.us)


def by_model(points: Iterable[Any]) -> list[Any]:
    """Sorts tuples whose first entry is a model: in the order of `MODELS`, then by the rest."""
    order = list(MODELS)
    return sorted(points, key=lambda point: (order.index(point[0]), *point[1:]))


def load(folder: Path, peers: Path | None = None) -> Measurements:
    """Reads the results files of one device; where two measured the same, the newer run counts."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    files.sort(key=lambda content: content["header"]["date"])
    newest: dict[Kind, tuple[int, Row]] = {}
    compared: dict[Kind, int] = {}  # the run that compared tiles last
    for number, content in enumerate(files):
        most = max((values.get("devices") or 0 for values in content["rows"]), default=0)
        for values in content["rows"]:
            row = Row.from_json(values)
            if row.devices is None and row.beside is None and most:
                row.beside = most
            newest[kind(row)] = (number, row)
            if row.chosen is not None:
                compared[kind(row)[:-1]] = number
    # An older run had tiles that a newer one left out: they do not count.
    newest = {
        key: (number, row)
        for key, (number, row) in newest.items()
        if row.chosen is None or compared[key[:-1]] == number
    }
    used = sorted({number for number, _ in newest.values()})
    peer_file = peers or _BENCHMARKS / f"peers_{folder.name}.json"
    return Measurements(
        runs=[files[number]["header"] for number in used],
        rows=[row for _, row in sorted(newest.values(), key=lambda pair: pair[0])],
        peers=_peers(peer_file, folder) if peer_file.is_file() else {},
        run_of={key: used.index(number) for key, (number, _) in newest.items()},
        tuned=read(sorted(folder.glob("tuned/*.json"))),
    )


def _peers(path: Path, folder: Path) -> dict[str, Any]:
    """The file of other libraries' times, its lists as one, each row with pass, format, regime.

    Rows of files under `beside` in the folder of results, of libraries that were measured in turn
    with jaxmoe, stand for those of the same implementation, model and number of tokens.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    plain, forward = {"pass": "forward", "format": "bf16"}, {"pass": "forward"}
    paths = sorted(folder.glob("beside/*.json"))
    files = [json.loads(file.read_text(encoding="utf-8")) for file in paths]
    in_turn = [row | plain for file in files for row in file["rows"]]
    known = {_place(row) for row in in_turn}
    rows = [row | plain for row in content["rows"] if _place(row) not in known]
    rows += [row | plain | {"pass": "forward+backward"} for row in content["training"]]
    rows += [row | forward for part in ("fp8", "packed") for row in content[part]["rows"]]
    bursts = [r | {"regime": "burst", "us": r["burst_us"]} for r in rows if "burst_us" in r]
    loaded = [row | {"regime": "loaded"} for row in rows]
    return content | {"rows": in_turn + loaded + bursts, "beside": [f["header"] for f in files]}


def _place(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["impl"], row["model"], row["tokens"]
