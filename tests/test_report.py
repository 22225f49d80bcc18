"""The report: tables and plots of known rows, and published pages that match committed results."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind everything: `jaxmoe` stays the installed one

from benchmarks import bounds, rows, timing  # noqa: E402
from benchmarks.models import DEFAULT_MODELS, DEFAULT_TOKENS, MODELS  # noqa: E402
from benchmarks.report import __main__ as report  # noqa: E402
from benchmarks.report import ep as report_ep  # noqa: E402
from benchmarks.report import (  # noqa: E402
    ep_parts,
    every_row,
    fp8,
    layer,
    measurements,
    packed,
    readme,
    tables,
    train,
)
from benchmarks.suites import ep, ep_exchange  # noqa: E402
from benchmarks.suites import train as train_suite  # noqa: E402

H200 = bounds.CEILINGS["NVIDIA H200"]
PEERS = ROOT / "benchmarks" / "peers_h200.json"
HEADER = dict.fromkeys("device driver cuda jax commit command".split(), "x")
PAGES = {
    "README.md": ("first", "ratios", "numbers"),
    "docs/performance.md": ("other models", "fp8", "packed"),
    "docs/expert_parallel.md": ("devices",),
}


def pages(root: Path) -> dict[str, Path]:
    """Writes pages that have markers with nothing between."""
    out = {}
    for page, names in PAGES.items():
        out[page] = root / page
        out[page].parent.mkdir(exist_ok=True)
        places = (f"{tables.BEGIN.format(n)}\nstale\n{tables.END.format(n)}" for n in names)
        out[page].write_text("\n".join(["before", *places, "after\n"]))
    return out


def wrote(root: Path, results: Path) -> dict[str, str]:
    """Runs the report; returns the text of every page."""
    found = pages(root)
    assert report.main(["--results", str(results), "--root", str(root)]) == 0
    return {page: path.read_text() for page, path in found.items()}


def _results(
    date: str, slower: float, models: tuple[str, ...] = DEFAULT_MODELS[:2]
) -> dict[str, object]:
    """A results file in which jaxmoe takes `slower` times the floor."""
    out = []
    for name in models:
        for tokens in DEFAULT_TOKENS:
            model = MODELS[name]
            work = bounds.layer(model, tokens, bounds.expected_hit(model, tokens))
            base = rows.Row("layer", "moe_mlp", name, tokens, "bf16", "forward", "floor")
            us = work.floor_us(H200) or 0.0
            out.append(rows.with_time(base, work, H200, timing.Measured(us, us, us)))
            for impl, regime, factor in (
                ("jaxmoe", "burst", slower),
                ("jaxmoe", "sustained", slower + 0.1),
                ("torch_grouped_mm", "burst", 1.3),
            ):
                row = dataclasses.replace(base, impl=impl, regime=regime)
                time = timing.Measured(us * factor, us * factor, us * factor)
                out.append(rows.with_time(row, work, H200, time))
    header = HEADER | {"date": date, "device": "NVIDIA H200", "commit": date}
    return {"header": header, "rows": [row.to_json() for row in out]}


def test_report_of_known_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "old.json").write_text(json.dumps(_results("2026-01-01", slower=1.5)))
    (folder / "new.json").write_text(json.dumps(_results("2026-02-01", slower=1.25)))
    text = wrote(tmp_path, folder)["README.md"]
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    # of the floor, and CuTe DSL's 29.1 under load over 17.56 * 1.35, less than 29.2 over 21.9
    assert "| qwen3-30b-a3b | 1 | 21.9 | 80% | 1.23 |" in text
    # 640 us at 16 tokens of mixtral-8x7b are less than 649 * 1.35
    lost = "| forward, bf16 | FlashInfer* or FlashInfer CuTe DSL* or SonicMoE* | 15 | **"
    assert lost in text and "| mixtral-8x7b at 1, 16," in text
    text = (folder / "README.md").read_text()
    # the newer run counts, and only its origin is named
    assert "1. 2026-02-01" in text and "2026-01-01" not in text
    # floor 17.56 * 1.25, 80 % of the floor, sustained 17.56 * 1.35, torch 17.56 * 1.3, FlashInfer
    row = "| qwen3-30b-a3b | 1 | 17.6 | **21.9** | 80% | 23.7 | 22.8 | 41.5 | 29.2 | 29.1 | - | 1 |"
    assert row in text
    # FlashInfer's 640 us at 16 tokens against 649 * 1.35 (it ran under load); CuTe DSL's 656 at 64
    # against 652 * 1.25 in bursts
    assert "FlashInfer* is faster than jaxmoe here: mixtral-8x7b at 16," in text
    assert (
        "FlashInfer CuTe DSL* in bursts is faster than jaxmoe here: mixtral-8x7b at 1, 64" in text
    )
    assert "tokamax" not in text  # a column without a number is left out
    assert "| qwen3-30b-a3b | 1 | uniform | jaxmoe | sustained |" in text
    image = tmp_path / "docs" / "img" / "layer.svg"
    first = image.read_bytes()
    wrote(tmp_path, folder)
    assert image.read_bytes() == first
    assert b"qwen3-30b-a3b" in first and b"FlashInfer*" in first


def test_who_was_measured_in_turn_is_compared_with_that_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "h200"
    (folder / "beside").mkdir(parents=True)
    (folder / "new.json").write_text(json.dumps(_results("2026-02-01", slower=1.25)))
    place = {"impl": "FlashInfer CuTe DSL", "model": "qwen3-30b-a3b", "tokens": 4096}
    both = [
        place | {"regime": "burst", "us": 490.0, "jaxmoe_us": 500.0},
        place | {"regime": "loaded", "us": 530.0, "jaxmoe_us": 520.0},
    ]
    header = {"date": "2026-02-02", "peer": "CuTe DSL 9", "how": "One card."}
    (folder / "beside" / "cute.json").write_text(json.dumps({"header": header, "rows": both}))
    text = wrote(tmp_path, folder)["README.md"]
    # 490 / 500, where jaxmoe's 496 and 535 of the table would make 0.99
    assert "| qwen3-30b-a3b | 4096 | 496 | 80% | 0.98 |" in text
    text = (folder / "README.md").read_text()
    row = "| qwen3-30b-a3b | 4096 | FlashInfer CuTe DSL | 500 | 490 | 0.98 | 520 | 530 | 1.02 |"
    assert row in text and "2026-02-02, CuTe DSL 9. One card." in text
    # faster in bursts; under load it is slower than jaxmoe was beside it
    lost = [line for line in text.splitlines() if line.startswith("FlashInfer CuTe DSL* ")]
    assert ["4096" in line.rsplit("qwen3", 1)[1] for line in lost] == [True, False]
    assert "| 707 |" not in text  # what it took elsewhere


def test_other_models_have_a_table_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "h200"
    folder.mkdir()
    usual = _results("2026-01-01", slower=1.25)
    # at 64 tokens 222.4 experts of 28.3 MB each at 4.3 TB/s, times 1.25
    other = _results("2026-01-02", slower=1.25, models=("minimax-m2",))
    (folder / "usual.json").write_text(json.dumps(usual))
    (folder / "other.json").write_text(json.dumps(other))
    texts = wrote(tmp_path, folder)
    row = "| minimax-m2 | 3072, 1536, 256, 8 | 1831 (80%) | 2107 (80%) | 2111 (80%) |"
    assert row in texts["docs/performance.md"]
    assert "minimax" not in texts["README.md"]
    assert b"minimax" not in (tmp_path / "docs" / "img" / "layer.svg").read_bytes()


def test_rows_of_an_older_commit_are_marked(tmp_path: Path) -> None:
    old, new = _results("2026-01-01", slower=1.5), _results("2026-02-01", slower=1.25)
    new["rows"] = [row for row in new["rows"] if row["tokens"] != 16]  # type: ignore[attr-defined]
    (tmp_path / "a.json").write_text(json.dumps(new))
    (tmp_path / "b.json").write_text(json.dumps(old))
    text = every_row.page(measurements.load(tmp_path))
    lines = layer.summary(measurements.load(tmp_path)).splitlines()
    marked = [line.split(" | ")[1] for line in lines if line.startswith("|") and "| 1† |" in line]
    assert marked == ["16", "16"]  # of both models
    assert "| 2 |" in lines[2] and "† behind it says that another commit has newer" in text


def test_report_says_how_fast_the_card_of_each_run_was(tmp_path: Path) -> None:
    old, new = _results("2026-01-01", slower=1.5), _results("2026-02-01", slower=1.25)
    new["rows"] = new["rows"][:4]  # type: ignore[index]
    new["header"] |= {"copy_tbps": 4.018, "dense_tflops": 781.3}  # type: ignore[operator]
    (tmp_path / "a.json").write_text(json.dumps(old))
    (tmp_path / "b.json").write_text(json.dumps(new))
    loaded = measurements.load(tmp_path)
    text = every_row.page(loaded)
    lines = [line.split(", driver")[0] for line in text.splitlines() if ", driver" in line]
    card_of_new = "NVIDIA H200 (copy 4.02 TB/s, dense 781 TFLOP/s)"
    assert lines == ["1. 2026-01-01, NVIDIA H200", f"2. 2026-02-01, {card_of_new}"]
    loaded.runs[1].update(copy_tbps=None, dense_tflops=None)  # as without a GPU
    assert every_row.page(loaded).count("NVIDIA H200, driver") == 2


def test_plotted_points_are_times_over_floors(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.report import plot_layer

    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps(_results("2026-01-01", slower=1.5)))
    loaded = measurements.load(folder, PEERS)
    floors = loaded.floors()
    ours = plot_layer.series(loaded, floors, "mixtral-8x7b", "jaxmoe")
    assert [tokens for tokens, _ in ours] == list(DEFAULT_TOKENS)
    assert [ratio for _, ratio in ours] == pytest.approx([1.5] * len(ours), rel=1e-3)
    peer = dict(plot_layer.series(loaded, floors, "qwen3-30b-a3b", "FlashInfer"))
    assert peer[1] == pytest.approx(41.5 / 17.56, rel=1e-3)


def test_report_needs_markers() -> None:
    with pytest.raises(ValueError, match="no <!-- ratios: begin -->"):
        tables.replace_section("no markers", "ratios", "table")


def test_published_numbers_come_from_committed_results() -> None:
    loaded = measurements.load(ROOT / "benchmarks" / "results" / "h200")
    sections = report.sections(loaded)
    assert {page: tuple(texts) for page, texts in sections.items()} == PAGES
    for page, texts in sections.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, section in texts.items():
            assert tables.replace_section(text, name, section) == text, page
    for folder in sorted((ROOT / "benchmarks" / "results").iterdir()):
        page = every_row.page(measurements.load(folder))
        assert (folder / "README.md").read_text(encoding="utf-8") == page, folder.name


def _fp8(tmp_path: Path, jaxmoe_us: dict[tuple[str, str], float]) -> measurements.Measurements:
    """A report of bf16 rows and of FP8 rows at two points of qwen3-30b-a3b."""
    out = []
    for tokens, floor in ((1, 8.8), (4096, 229.0)):
        base = rows.Row("layer", "moe_mlp", "qwen3-30b-a3b", tokens, "fp8", "forward", "floor[fp8]")
        out.append(dataclasses.replace(base, us=floor))
        out.append(dataclasses.replace(base, impl="floor", us=2 * floor, scheme="bf16"))
        plain = dataclasses.replace(base, impl="jaxmoe", us=30.0, scheme="bf16", regime="burst")
        out.append(plain)
        for (impl, regime), us in jaxmoe_us.items():
            row = dataclasses.replace(base, impl=f"jaxmoe[{impl}]", us=us, regime=regime)
            out.append(dataclasses.replace(row, floor_fraction=floor / us, vs_dense=0.5))
    folder = tmp_path / "h200"
    folder.mkdir()
    content = {"header": HEADER | {"date": "2026-01-01"}, "rows": [row.to_json() for row in out]}
    (folder / "fp8-qwen3-30b-a3b.json").write_text(json.dumps(content))
    return measurements.load(folder, PEERS)


def test_report_compares_fp8_with_flashinfer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times = {("fp8_tensor", "burst"): 20.0, ("fp8_tensor", "sustained"): 17.0}
    loaded = _fp8(tmp_path, times | {("fp8_block", "burst"): 200.0})
    text = fp8.summary(loaded)
    head = "| model | tokens | floor | tensor | sustained | FlashInfer* | ratio | block |"
    assert head in text
    # FlashInfer 35.7 over the sustained 17; 54.4 over the burst of 200: no sustained block row
    row = "| qwen3-30b-a3b | 1 | 8.8 | **20.0** | 17.0 | 35.7 | 2.10 | **200** | 54.4 | 0.27 | 1 |"
    assert row in text
    # the roots of 2.10 * 522 / 17 and of 0.272 * 1129 / 200
    assert "FP8 tensor: geometric mean of the ratios 8.03 (2 points)." in text
    assert "FP8 block: geometric mean of the ratios 1.24 (2 points). FlashInfer*" in text
    # 362 us of DeepGEMM's products at 4096 are more than 200, and there are none at 1
    assert "alone of DeepGEMM*, in" not in text
    (tmp_path / "slower").mkdir()
    slower = fp8.summary(_fp8(tmp_path / "slower", {("fp8_block", "burst"): 400.0}))
    assert "The two products alone of DeepGEMM*, in the format of *block*, take less" in slower
    assert "than jaxmoe's whole layer here: qwen3-30b-a3b at 4096." in slower
    assert "is faster than jaxmoe here: qwen3-30b-a3b at 1." in text
    found = wrote(tmp_path, tmp_path / "h200")
    assert head in (tmp_path / "h200" / "README.md").read_text()
    lost = "| 2 | **1.24** | 0.27 | 5.64 | qwen3-30b-a3b at 1 |"
    assert lost in found["README.md"] and "| 30.0 | 0.97 | 20.0 | 2.10 |" in found["README.md"]
    # of floor 8.8 / 20, bf16 over tensor 30 / 20
    row = "| qwen3-30b-a3b | 1 | 8.8 | 20.0 | 200 | 44% | 0.50 | 30.0 | 1.50 |"
    page = found["docs/performance.md"]
    assert row in page and page.endswith("after\n")


def test_report_compares_packed_weights_with_the_fastest_other(tmp_path: Path) -> None:
    base = rows.Row("layer", "moe_mlp", "gpt-oss-120b", 64, "mxfp4", "forward", "floor[mxfp4]")
    ours = dataclasses.replace(base, impl="jaxmoe[mxfp4]", us=400.0, regime="burst")
    out = [dataclasses.replace(base, us=370.0), dataclasses.replace(ours, floor_fraction=0.925)]
    out += [dataclasses.replace(ours, us=500.0, regime="sustained")]
    out += [dataclasses.replace(ours, impl="jaxmoe", scheme="bf16", us=1300.0)]
    folder = tmp_path / "h200"
    folder.mkdir()
    content = {"header": HEADER | {"date": "2026-01-01"}, "rows": [row.to_json() for row in out]}
    (folder / "packed.json").write_text(json.dumps(content))
    loaded = measurements.load(folder, PEERS)
    # 586 of triton_kernels, the least of three, over the sustained 500
    row = (
        "| gpt-oss-120b | mxfp4 | 64 | 370 | **400** | 92% | 500 | 1300 | 586 | 670 | 636 | 1.17 |"
    )
    assert row in packed.details(loaded)
    assert "| gpt-oss-120b | 64 | 1300 | 400 | 1.17 |" in readme.numbers(loaded)
    title = "forward, MXFP4 weights and bf16 tokens | triton_kernels* or FlashInfer* or Marlin*"
    assert f"| {title} | 1 | **1.17** | 1.17 | 1.17 | - |" in readme.ratios(loaded)
    of_three = "triton_kernels or FlashInfer or Marlin | **1.17** | none |"
    assert f"| forward, MXFP4 weights and bf16 tokens | {of_three}" in readme.first(loaded)


def test_report_without_fp8_rows_says_nothing_of_fp8(tmp_path: Path) -> None:
    loaded = _fp8(tmp_path, {})
    assert fp8.summary(loaded) == fp8.details(loaded) == ""
    assert loaded.points() and "FP8" not in every_row.page(loaded)
    assert "FP8" not in readme.ratios(loaded) + readme.first(
        loaded
    ) and "| FP8" not in readme.numbers(loaded)


def test_fp8_rows_of_a_newer_commit_do_not_make_the_others_old(tmp_path: Path) -> None:
    loaded = _fp8(tmp_path, {("fp8_block", "burst"): 200.0})
    loaded.runs.append(loaded.runs[0] | {"commit": "new"})
    for kind in loaded.run_of:
        loaded.run_of[kind] = int("fp8" in kind)
    assert "†" not in layer.summary(loaded) + fp8.summary(loaded)
    newest = next(row for row in loaded.rows if row.scheme == "fp8")
    loaded.run_of[measurements.kind(newest)] = 0
    assert loaded.origin(newest) == "1†"


def test_report_says_how_far_the_heuristics_are_from_the_best_tile(tmp_path: Path) -> None:
    def write(date: str, times: dict[str, float]) -> None:
        base = rows.Row("tiles", "moe_mlp/down", "odd", 8, "bf16", "forward", "", regime="burst")
        found = [
            dataclasses.replace(
                base,
                impl=f"down {tile}",
                us=us,
                vs_best=us / min(times.values()),
                chosen=tile == "128x8",
            ).to_json()
            for tile, us in times.items()
        ]
        content = {"header": HEADER | {"date": date}, "rows": found}
        (tmp_path / f"{date}.json").write_text(json.dumps(content))

    write("2026-01-01", {"128x8": 10.0, "128x32": 9.0, "old": 5.0})
    write("2026-02-01", {"128x8": 12.0, "128x32": 11.0})
    text = every_row.page(measurements.load(tmp_path))
    assert "| odd | 8 | uniform | down | 128x8 | 12.0 | 128x32 | 11.0 | 9.1 % |" in text
    assert "the heuristics' choice; 9.1 % over the best tile |" in text and "old" not in text


def test_report_has_a_table_of_training() -> None:
    base = rows.Row("train", "moe_mlp", "qwen3-30b-a3b", 4096, "bf16", train_suite.PASS, "floor")
    base.us = 1190.0
    ours = {"us": 1900.0, "tflops": 488.0, "vs_dense": 0.7, "temp_bytes": 10**9, "regime": "burst"}
    found = [base, dataclasses.replace(base, impl="jaxmoe", **ours)]
    peer = {"impl": "SonicMoE", "model": base.model, "tokens": 4096, "us": 2853.0}
    more = {"pass": train_suite.PASS, "format": "bf16", "regime": "loaded"}
    peers = {"rows": [peer | more]}
    text = train.summary(measurements.Measurements([], found, peers))
    assert "| qwen3-30b-a3b | 4096 | 1190 | 1900 | 488 | 0.70 | 1000 | 2853 |" in text
    assert train.summary(measurements.Measurements([], found[:1], peers)) == ""
    assert "recompute z MB" not in text and "peak" not in text  # columns with nothing in them
    product = dataclasses.replace(base, op="grouped_gemm/down", us=100.0)
    slow = {"us": 15000.0, "regime": "burst"}
    found += [product, dataclasses.replace(product, impl="jaxmoe", us=150.0, regime="burst")]
    found += [dataclasses.replace(product, impl="xla_ragged_dot", **slow)]
    found[1].peak_bytes = 3 * 10**9
    text = train.summary(measurements.Measurements([], found, peers))
    assert "| 488 | 0.70 | 1000 | 3000 | 2853 |" in text and "*peak*" in text
    assert "| qwen3-30b-a3b | 4096 | down | 100 | 150 | 15000 | 100.0 |" in text


def _spread() -> list[rows.Row]:
    """Rows of suite `ep`, as if on two and on four devices."""
    base = rows.Row("ep", "moe_mlp", "qwen3-30b-a3b", 4096, "bf16", "forward", "", regime="burst")

    def row(impl: str, us: float, devices: int | None = 4, **fields: Any) -> rows.Row:
        return dataclasses.replace(base, impl=impl, us=us, devices=devices, **fields)

    limit: dict[str, Any] = {"tokens": 1, "reason": "upper limit: launching takes as long"}
    return [
        row(ep.ALONE, 600.0, None, beside=4),
        row(ep.ALONE, 675.0, None, beside=2),  # another run
        row(ep.LOCAL, 640.0),
        row(ep.Variant("all_gather", 1).name, 1000.0, sent_gbps=100.0),
        row(ep.Variant("all_gather", 2).name, 900.0, sent_gbps=110.0),
        row(ep.Variant("all_to_all", 1).name, 1200.0),
        row(ep.Variant("all_to_all", 1).name, 540.0, 2),
        row("xla[all_gather+psum_scatter]", 350.0, op="collectives", sent_gbps=290.0),
        row(ep.ALONE, 30.0, None, tokens=1, beside=4),
        row(ep.Variant("all_gather", 1).name, 120.0, **limit),
    ]


def test_report_has_a_table_of_experts_over_devices() -> None:
    text = report_ep.summary(measurements.Measurements([], _spread(), {}))
    four = "| qwen3-30b-a3b | 4 | 4096 | 600 | 640 | 900 | 1200 | all_gather/2 | 1.50 | 260 | 110 |"
    assert f"{four} 290 |" in text
    two = "| qwen3-30b-a3b | 2 | 4096 | 675 | - | - | 540 | all_to_all | 0.80 | - | - | - |"
    assert two in text
    empty = measurements.Measurements([], [], {})
    assert "ragged_dot" not in text and report_ep.summary(empty) == report_ep.page(empty) == ""


def test_report_has_tables_of_fp8_of_training_and_of_what_is_sent() -> None:
    base = _spread()[2]

    def row(impl: str, us: float, **fields: Any) -> rows.Row:
        return dataclasses.replace(base, impl=impl, us=us, **fields)

    direct = ep.Variant("direct", 1).name
    found = [
        row(ep.FP8_LOCAL, 400.0, scheme="fp8"),
        row(ep.Variant("direct", 1, fp8=True).name, 500.0, scheme="fp8"),
        row(ep.LOCAL, 2000.0, suite="ep_train"),
        row(direct, 2300.0, suite="ep_train"),
        row(direct, 2200.0, suite="ep_train"),  # of another run
        row(ep_exchange.DISPATCH, 100.0, op="exchange", sent_gbps=320.0),
        row(ep_exchange.COMBINE, 120.0, op="exchange", sent_gbps=300.0),
    ]
    text = ep_parts.summary(measurements.Measurements([], found, {}))
    at = "| qwen3-30b-a3b | 4 | 4096 |"
    assert f"{at} 400 | 500 | 1.25 |" in text and f"{at} 2000 | 2200 | 1.10 |" in text
    assert f"{at} 100 | 320 | 120 | 300 |" in text
    assert ep_parts.summary(measurements.Measurements([], [], {})) == ""


def test_report_says_and_draws_where_spreading_pays(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.report import plot_ep

    alone = dataclasses.replace(_spread()[0], suite="layer", impl="jaxmoe")
    found = [row.to_json() for row in (alone, *_spread())]
    results = tmp_path / "odd"
    results.mkdir()
    content = {"header": HEADER | {"date": "2026-01-01"}, "rows": found}
    (results / "ep.json").write_text(json.dumps(content))
    made = wrote(tmp_path, results)
    text = made["docs/expert_parallel.md"]
    assert "| tokens | one GPU | 2 GPUs | to one | 4 GPUs | part | bare | to one |" in text
    assert "| qwen3-30b-a3b | 1 | 30.0 | - | - | 120† | - | - | 4.00 |" in text
    assert "| qwen3-30b-a3b | 4096 | 675 | 540 | 0.80 | 900 | 640 | 350 | 1.50 |" in text
    assert "as many tokens: qwen3-30b-a3b on 4 GPUs at 1, 4096.\n" in text  # not on 2
    assert "stale" in made["docs/performance.md"]  # no FP8 was measured
    points = report_ep.points(measurements.load(results))
    four = [point for point in points if point.devices == 4]
    assert plot_ep.series(four, lambda p: p.best) == [(1, 4.0), (4096, 1.5)]
    assert plot_ep.series(four, lambda p: p.local) == [(4096, pytest.approx(640 / 600))]
    drawn = (tmp_path / "docs" / "img" / "expert_parallel.svg").read_bytes()
    labels = (b"2 GPUs", b"4 GPUs, without communication", b"an upper limit")
    assert all(label in drawn for label in labels)
    assert b"2 GPUs, without communication" not in drawn
    plot_ep.write(points, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn
