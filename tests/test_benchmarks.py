"""Benchmarks on a CPU: floors against hand numbers, a run end to end."""

import dataclasses
import gc
import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind everything: `jaxmoe` stays the installed one

from benchmarks import bounds, card, load, rows, run, runner, timing  # noqa: E402
from benchmarks.baselines import xla_ragged_dot  # noqa: E402
from benchmarks.cases import Case, WeightSets, weight_sets  # noqa: E402
from benchmarks.models import DEFAULT_MODELS, DEFAULT_TOKENS, MODELS, expert_bytes  # noqa: E402
from benchmarks.suites import SUITES  # noqa: E402

FP8 = ("jaxmoe[fp8_block]",)
H200 = bounds.CEILINGS["NVIDIA H200"]

# What DESIGN asks of a row; the runner adds fields about the measurement.
ROW = """suite op model tokens scheme pass impl us us_p10 us_p90 tflops weight_tbps floor_us
floor_fraction rel_err experts_hit skew regime vs_dense""".split()
HEADER = """device driver cuda jax jaxlib jaxmoe commit command date sm_clock_mhz power_w""".split()


@pytest.mark.parametrize(
    "model, tokens, hit, us",
    [
        # 8 experts of 3 * 2048 * 768 bf16 = 9.437 MB, and 8 KB of tokens, at 4.3 TB/s
        ("qwen3-30b-a3b", 1, 8, 17.56),
        # 6 * 8192 * 4096 * 14336 FLOP at 780 TFLOP/s
        ("mixtral-8x7b", 4096, 8, 3700.3),
        # 256 * 88.08 MB and 29.36 MB of tokens
        ("deepseek-v3", 1024, 256, 5250.7),
        # 4 * (3 * 2880^2 + 3 * 2880) * 2 bytes and 11.5 KB of tokens: biases count
        ("gpt-oss-120b", 1, 4, 46.32),
    ],
)
def test_floor_of_a_layer(model: str, tokens: int, hit: float, us: float) -> None:
    assert bounds.layer(MODELS[model], tokens, hit).floor_us(H200) == pytest.approx(us, rel=1e-3)


def test_floors_of_the_ops() -> None:
    # 10 rows of 4 in and 6 out, 3 matrices of 4 x 6, two bytes each
    work = bounds.grouped_gemm(10, 4, 6, experts_hit=3)
    assert (work.flops, work.weight_bytes, work.activation_bytes) == (480, 144, 200)
    assert work.floor_us(H200) == pytest.approx(344 / 4.3e6)
    assert bounds.route(5, 8, 2).activation_bytes == 4 * (5 * 8 + 2 * 5 * 2)
    assert bounds.plan(5, 2, 8).activation_bytes == 4 * (10 + 9 + 10 + 10)
    assert bounds.permute(5, 2, 16).activation_bytes == 2 * 16 * (5 + 10) + 4 * 10
    assert bounds.quantize(5, 16, 3).activation_bytes == 5 * 16 * (2 + 1) + 4 * 3
    assert bounds.finalize(5, 2, 16).activation_bytes == 2 * 16 * (10 + 5) + 8 * 10
    assert bounds.layer(MODELS["odd"], 1, 1).floor_us(None) is None


def test_compute_heavy_begins_at_half_the_memory_time() -> None:
    memory = bounds.Work(flops=0.49 * 780e12, weight_bytes=4.3e12, activation_bytes=0)
    assert not memory.compute_heavy(H200)
    assert dataclasses.replace(memory, flops=0.51 * 780e12).compute_heavy(H200)
    assert not dataclasses.replace(memory, flops=1e18).compute_heavy(None)


def test_expected_hit_is_the_mean_of_uniform_draws() -> None:
    case = Case(MODELS["wide"], num_tokens=12, skew="uniform", seed=3, sets=WeightSets())
    expected = bounds.expected_hit(case.model, case.num_tokens)  # 40 * (1 - 0.95^12) = 18.4
    assert expected == pytest.approx(18.386, abs=1e-3)
    assert case.hit(200) == pytest.approx(expected, abs=0.6)


def test_zipf_routing_prefers_few_experts_and_repeats_none() -> None:
    counts = {}
    for skew in ("uniform", "zipf"):
        case = Case(MODELS["wide"], num_tokens=500, skew=skew, seed=1, sets=WeightSets())
        ids = np.asarray(case.routings(1)[0].expert_ids)
        assert (np.sort(ids, axis=1)[:, 1:] != np.sort(ids, axis=1)[:, :-1]).all()
        counts[skew] = np.bincount(ids.reshape(-1), minlength=40).max()
        assert np.asarray(case.routings(1)[0].weights).sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    # Of 1000 choices, rank 1 of 40 draws about 1 in 4.3 first and more second; uniform draws 25.
    assert counts["uniform"] < 60 < 180 < counts["zipf"]


def test_one_expert_and_unused_leave_experts_without_rows() -> None:
    def counts(name: str, skew: str) -> np.ndarray:
        model = MODELS[name]
        case = Case(model, num_tokens=200, skew=skew, seed=2, sets=WeightSets())
        ids = np.asarray(case.routings(1)[0].expert_ids)
        found = np.bincount(ids.reshape(-1), minlength=model.num_experts)
        assert case.hit(2) == pytest.approx(case.even_hit) == (found > 0).sum()
        work = next(e for e in SUITES["layer"](case) if e.op == "moe_mlp").work
        assert work.weight_bytes == (found > 0).sum() * expert_bytes(model)
        return found

    assert counts("wide", "one_expert").tolist() == [200, 200] + [0] * 38
    half = counts("wide", "unused")  # 400 choices of 20 experts
    assert (half[:20] > 0).all() and half[:20].max() < 45 and not half[20:].any()
    assert (counts("odd", "unused") > 0).tolist() == [True] * 3 + [False] * 2  # K = 3 of 5


def test_plain_runs_draw_uniform_and_zipf() -> None:
    plain = run.plan(run.parse(["--suite", "layer"]))
    assert [case.skew for case in plain[:2]] == ["uniform", "zipf"]
    assert len(set(plain)) == len(plain) == len(DEFAULT_MODELS) * len(DEFAULT_TOKENS) * 2
    chosen = run.plan(run.parse(["--suite", "layer", "--skew", "one_expert,unused"]))
    assert {case.skew for case in chosen} == {"one_expert", "unused"}


def test_lists_given_twice_are_one() -> None:
    given = ["--impl", "jaxmoe", "--impl", "floor,jaxmoe[mxfp4]"]
    assert run.parse(["--suite", "layer", *given]).impl == ["jaxmoe", "floor", "jaxmoe[mxfp4]"]


def test_chains_are_long_enough_to_hide_launches_and_short_enough_for_a_burst() -> None:
    assert timing.chain_length(17.6, compute_heavy=False) == 64
    assert timing.chain_length(113.0, compute_heavy=False) == 18
    assert timing.chain_length(5250.0, compute_heavy=False) == 8
    assert timing.chain_length(1500.0, compute_heavy=True) == 4
    assert timing.chain_length(3700.0, compute_heavy=True) == 2
    assert timing.chain_length(14800.0, compute_heavy=True) == 1
    assert timing.chain_length(17.6, compute_heavy=False, fitting=5) == 5


class Clock:
    """Stands for `time` in timing: nothing takes longer than it says, however busy the machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", Clock())


class Sleeper:
    """Pretends to run: an execution takes `seconds`, a batch `start` more, all of it in `wait`."""

    def __init__(self, name: str, seconds: float, log: list[str], start: float = 0.0):
        self.layers = 4
        self._start = start
        self._name, self._seconds, self._log, self._pending = name, seconds, log, 0

    def launch(self, count: int) -> None:
        self._log.append(self._name)
        self._pending += count

    def wait(self) -> None:
        timing.time.sleep(self._start + self._pending * self._seconds)
        self._pending = 0


@pytest.mark.usefixtures("clock")
def test_bursts_rotate_and_divide_by_layers() -> None:
    log: list[str] = []
    timed = {"a": Sleeper("a", 0.002, log), "b": Sleeper("b", 0.004, log)}
    measured = timing.bursts(timed, timing.Pace(4, idle_s=0.0, batch_s=0.01, cap_s=10.0))
    for name, us in (("a", 500.0), ("b", 1000.0)):  # 2 and 4 ms for 4 layers
        seen = measured[name]
        assert [seen.us_p10, seen.us, seen.us_p90] == pytest.approx([us, us, us])
    # Twice two launches: the warm-up, and the timed ones or half of them.
    batches = "".join(log)[-32:]
    assert batches == 2 * ("aaaabbbb" + "bbbbaaaa")


@pytest.mark.usefixtures("clock")
def test_bursts_leave_out_how_a_batch_starts() -> None:
    pace = timing.Pace(5, idle_s=0.0, batch_s=0.04, cap_s=10.0)
    late = {"a": Sleeper("a", 0.004, [], start=0.02)}
    assert timing.bursts(late, pace)["a"].us == pytest.approx(1000.0)


@pytest.mark.usefixtures("clock")
def test_batches_have_four_executions() -> None:
    counts: list[int] = []
    long = Sleeper("a", 0.004, [])
    launch = long.launch
    long.launch = lambda count: (counts.append(count), launch(count))[1]  # type: ignore[method-assign]
    timing.bursts({"a": long}, timing.Pace(3, idle_s=0.0, batch_s=0.001, cap_s=0.001))
    assert counts[-12:] == 3 * [1, 4, 1, 2]


def test_percentile_interpolates() -> None:
    assert timing.percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.5
    assert timing.percentile([1.0, 2.0, 3.0], 0.9) == pytest.approx(2.8)


@pytest.mark.usefixtures("steady_batches")
def test_a_run_writes_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    command = "--suite layer,ops --models one --tokens 3 --skew zipf --repeats 3 --commit abc"
    command += (
        f" --impl jaxmoe,xla_ragged_dot,tokamax,torch_grouped_mm,floor,floor[fp8],{','.join(FP8)}"
    )
    assert run.main([*command.split(), "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert set(HEADER) <= set(content["header"]) and content["header"]["commit"] == "abc"
    assert [content["header"][key] for key in ("copy_tbps", "dense_tflops")] == [None, None]  # CPU
    assert all(set(ROW) <= set(row) for row in content["rows"])
    timed = {(row["op"], row["impl"]): row for row in content["rows"] if row["us"]}
    ops = "route plan permute finalize grouped_gemm/gate_up grouped_gemm/down".split()
    ops += [f"quantize/{kind}/{of}" for kind in ("channel", "block") for of in "xh"]
    assert {(op, "jaxmoe") for op in ("moe_mlp", "route+moe_mlp", *ops)} <= set(timed)
    assert {("moe_mlp", impl) for impl in FP8} <= set(timed)
    assert {("moe_mlp", xla_ragged_dot.NAME), ("grouped_gemm/down", "xla_ragged_dot")} <= set(timed)
    for (_, impl), row in timed.items():
        assert 0 <= row["rel_err"] < 1e-2 and row["us_p10"] <= row["us"] <= row["us_p90"]
        assert (row["skew"], row["tokens"], row["scheme"], row["pass"]) == (
            ("zipf", 3, "fp8" if impl in FP8 else "bf16", "forward")
        )
    layer = timed["moe_mlp", "jaxmoe"]
    flops = 2 * 3 * 8 * (16 + 8)  # 3 rows, H 8, 2I 16, I 8
    assert layer["tflops"] == pytest.approx(flops / layer["us"] * 1e-6, rel=1e-3)
    assert layer["experts_hit"] == 1 and layer["layers"] == 2 and layer["weight_sets"] == 2
    absent = {row["impl"]: row["reason"] for row in content["rows"] if not row["us"]}
    assert absent["floor"] == absent["floor[fp8]"] == "no measured ceilings for this device"
    assert {"tokamax", "torch_grouped_mm"} <= set(absent)
    printed = capsys.readouterr().out
    assert all(f" {op} " in printed for op in ops) and "not run: tokamax" in printed


def test_card_speeds_are_bytes_and_flops_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 2.0, 4.0, 6.0, 5.0, 8.0])

    def bursts(timed: dict[str, timing.Timed], _: timing.Pace) -> dict[str, timing.Measured]:
        ((name, item),) = timed.items()
        item.launch(2)
        item.wait()
        us = next(times)
        return {name: timing.Measured(us / item.layers, us, us)}

    monkeypatch.setattr(timing, "bursts", bursts)
    gc.collect()
    before = len(jax.live_arrays())
    # the best of five, read and written; then 2 * 64^3 FLOP in 8 us
    assert card.copy_tbps(num_bytes=4096) == pytest.approx(2 * 4096 / 2.0 * 1e-6)
    assert card.dense_tflops(size=64) == pytest.approx(524288 / 8.0 * 1e-6)
    assert len(jax.live_arrays()) <= before  # the memory is the rows' again
    monkeypatch.setattr(card, "copy_tbps", lambda: 4.27181)
    monkeypatch.setattr(card, "dense_tflops", lambda: 781.26)
    assert card.speeds("gpu") == {"copy_tbps": 4.272, "dense_tflops": 781.3}


def test_the_header_names_a_version_without_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert rows.header("cpu", "abc")["jaxmoe"] == version
    monkeypatch.setattr(rows, "_PROJECT", tmp_path / "pyproject.toml")
    assert rows.header("cpu", "abc")["jaxmoe"] is None


def test_a_budget_ends_the_run_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = "--suite layer --models odd --tokens 3 --skew zipf --budget-s -1 --impl jaxmoe"
    assert run.main([*command.split(), "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["rows"] == [] and content["header"]["not_run"] == ["layer odd T=3 zipf"]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--suite", "layer", "--models", "gpt-5"])
    assert "--models gpt-5: choose from mixtral-8x7b" in capsys.readouterr().err


@pytest.mark.usefixtures("steady_batches")
def test_wrong_results_are_not_timed_and_failures_stop_nothing() -> None:
    model = MODELS["odd"]
    case = Case(model, 3, "uniform", 0, WeightSets(weight_sets(model, 0)[:1]))
    good = next(e for e in SUITES["layer"](case) if (e.op, e.impl) == ("moe_mlp", "jaxmoe"))

    def refuse() -> float:
        raise RuntimeError("RESOURCE_EXHAUSTED: too large\nand more")

    wrong = dataclasses.replace(good, impl="wrong", check=lambda: float("nan"))
    large = dataclasses.replace(good, impl="large", check=refuse)
    out = rows.Results({}, None)
    runner.measure("layer", case, [wrong, large, good], runner.Settings(repeats=3), out)
    by_impl = {row.impl: row for row in out.rows}
    assert by_impl["wrong"].reason == "not timed: wrong result" and by_impl["wrong"].us is None
    assert by_impl["large"].reason == "failed: RESOURCE_EXHAUSTED: too large"
    assert by_impl["jaxmoe"].us and by_impl["jaxmoe"].reason is None


def test_no_time_is_made_of_a_difference_that_is_not_positive() -> None:
    work = bounds.Work(flops=1e9, weight_bytes=1e6, activation_bytes=0.0)
    row = rows.Row("layer", "moe_mlp", "odd", 8, "bf16", "forward", "jaxmoe", rel_err=1e-3)
    for us in (-48.6, 0.0, float("nan")):
        made = rows.with_time(row, work, H200, timing.Measured(us, us, 5.0, dispatch_us=2.0))
        assert made.reason == "not timed: the machine's own delays were longer than a batch"
        assert dataclasses.replace(made, reason=None) == row


@pytest.mark.usefixtures("clock")
def test_a_row_without_a_time_ends_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["odd"]
    case = Case(model, 3, "uniform", 0, WeightSets(weight_sets(model, 0)[:1]))
    good = next(e for e in SUITES["layer"](case) if (e.op, e.impl) == ("moe_mlp", "jaxmoe"))
    monkeypatch.setattr(timing, "_batch_s", lambda item, count: 1.0 / count)
    monkeypatch.setattr(timing, "execution_s", lambda *_, **__: 0.01)
    out = rows.Results({}, None)
    sends = dataclasses.replace(good, sent_bytes=8)
    runner.measure("layer", case, [sends], runner.Settings(repeats=3), out)
    (row,) = (row for row in out.rows if row.impl == "jaxmoe")
    assert row.us is None and row.sent_gbps is None
    assert row.reason is not None and row.reason.startswith("not timed: the machine")
    assert row.reason in rows.line(row)


def test_ragged_dot_is_refused_where_its_masks_do_not_fit() -> None:
    model = MODELS["deepseek-v3"]
    work = bounds.layer(model, 4096, 256)
    reason = xla_ragged_dot.refusal(work.flops, 256, 4096 * 8, model.hidden)
    assert reason == "not run: its masked copies of the rows would take 112 GiB"
    assert xla_ragged_dot.refusal(1.0, 8, 16, 64) is None


def test_energy_is_flops_over_power() -> None:
    work = bounds.Work(flops=600e6, weight_bytes=0.0, activation_bytes=0.0)
    row = rows.Row("layer", "moe_mlp", "odd", 8, "bf16", "forward", "jaxmoe")
    # 600 MFLOP in 1 us are 600 TFLOP/s; at 400 W that makes 1.5 TFLOP for each joule
    drawn = rows.with_time(row, work, None, timing.Measured(1.0, 1.0, 1.0, power_w=400.0))
    assert drawn.tflop_per_joule == pytest.approx(1.5)
    unknown = rows.with_time(row, work, None, timing.Measured(1.0, 1.0, 1.0))
    assert unknown.tflop_per_joule is None
    older = {k: v for k, v in drawn.to_json().items() if k != "tflop_per_joule"}
    assert rows.Row.from_json(older).tflop_per_joule == pytest.approx(1.5)
    older["power_w"] = None
    assert rows.Row.from_json(older).tflop_per_joule is None


def test_loading_is_timed_beside_cat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.json"
    load.main(["--model", "odd", "--gb", "1e-9", "--directory", str(tmp_path), "--json", str(out)])
    row = json.loads(out.read_text())
    assert row == json.loads(capsys.readouterr().out)
    assert row["layers"] == 1 and row["load_s"] > 0 and row["cat_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["load.json"]
