"""Suites that vary jaxmoe's own layer, on a CPU: its tiles, and how many layers there are."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind everything: `jaxmoe` stays the installed one

import jaxmoe  # noqa: E402
from benchmarks import bounds, quantized, rows, run  # noqa: E402
from benchmarks.baselines import dense  # noqa: E402
from benchmarks.cases import (  # noqa: E402
    Case,
    WeightSets,
    relative_error,
    stack_size,
    weight_sets,
)
from benchmarks.models import DEFAULT_MODELS, MODELS, Layer, layer_bytes  # noqa: E402
from benchmarks.report import every_row, measurements  # noqa: E402
from benchmarks.suites import (  # noqa: E402
    SUITES,
    ep,
    ep_exchange,
    ep_train,
    layer,
    layer_packed,
    lora,
    routing,
    stack,
    tiles,
    train,
    train_products,
)
from jaxmoe._ep import peers  # noqa: E402
from jaxmoe._ep.cost import share_per_device  # noqa: E402
from jaxmoe._gemm.tiles import mlp_configs  # noqa: E402

pytestmark = pytest.mark.usefixtures("steady_batches")


def _product(mean_rows: float, most_rows: int, gathers: bool = False) -> tiles.Product:
    chosen = jaxmoe.GemmConfig(128, 8)
    return tiles.Product("down", 64, 512, mean_rows, most_rows, gathers, chosen)


def test_tiles_worth_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        (128, 8, 1, 1): 2,
        (128, 8, 1, 2): 2,
        (128, 32, 1, 1): 2,
        (256, 160, 1, 1): 1,
        (256, 160, 2, 1): 1,
    }
    monkeypatch.setattr(tiles, "TILES", known)

    def names(product: tiles.Product) -> list[str]:
        found = [tiles.name(product.name, config) for config in tiles.candidates(product)]
        assert len(set(found)) == len(found) and found[0] == "down 128x8"
        return found[1:]

    # fewer than 4 rows an expert: no wide tile; no group of two token tiles: rasters are equal
    assert names(_product(3.9, 8)) == ["down 128x32"]
    gathered = names(_product(3.9, 8, gathers=True))
    assert gathered == ["down 128x8 gather", "down 128x32", "down 128x32 gather"]
    # 512 outputs are 4 weight tiles of 128: rasters 8 and 0 are the same, and so for 2 of 256
    assert names(_product(32.0, 40)) == [
        *("down 128x8 raster=8", "down 128x32", "down 128x32 raster=8"),
        *("down 256x160", "down 256x160 cluster=2"),
    ]
    assert names(dataclasses.replace(_product(3.9, 8), k=65)) == [
        *("down 128x8 split_k=2", "down 128x32"),  # 64 elements are one step, not to be split
    ]
    # 161 rows an expert: more than 4 token tiles of 32; the choice is timed all the same. The two
    # CTAs of a cluster hold them all.
    wide = ["down 256x160", "down 256x160 raster=8"]
    assert names(_product(161.0, 161)) == [*wide, "down 256x160 cluster=2"]
    broad = names(dataclasses.replace(_product(161.0, 161), n=4096))
    assert broad == [*wide, "down 256x160 raster=0", "down 256x160 cluster=2"]


def test_routing_suite_checks_every_formulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "routing.json"
    command = f"--suite routing --models wide --tokens 8 --skew uniform --repeats 3 --json {path}"
    assert run.main(command.split()) == 0
    found = [rows.Row.from_json(row) for row in json.loads(path.read_text())["rows"]]
    timed = {(row.op, row.impl): row for row in found if row.impl != "floor"}
    ops = [f"route+plan/{method}" for method in routing.METHODS]
    assert list(timed) == [(op, impl) for op in ops for impl in routing.CALLS]
    assert list(routing.CALLS) == ["jaxmoe", routing.TWO_CALLS, routing.XLA]
    assert all(row.us and row.rel_err is not None and row.rel_err < 1e-6 for row in timed.values())
    # without groups of experts, and a wrong order of the rows is found
    case = Case(MODELS["odd"], 8, "uniform", 1, WeightSets())
    assert [routing.groups(MODELS[name]) for name in ("wide", "odd")] == [8, 1]
    one = next(e for e in routing.entries(case) if e.op == "route+plan/deepseek_v3")
    assert one.impl == "jaxmoe" and one.check is not None and one.check() < 1e-6
    plan = jaxmoe.plan
    reverse = lambda ids, **options: plan(ids[::-1], **options)  # noqa: E731
    monkeypatch.setattr(jaxmoe, "plan", reverse)
    other = dataclasses.replace(case, num_tokens=9)  # what was compiled above has the real plan
    check = routing.entries(other)[1].check
    assert routing.entries(other)[1].impl == routing.TWO_CALLS
    assert check is not None and check() == float("inf")


def test_tiles_are_compared_with_the_choice_of_the_heuristics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[layer.Tiles | None] = set()

    def recorded(*args: Any, config: layer.Tiles | None, **options: Any) -> Any:
        used.add(config)
        return moe_mlp(*args, config=config, **options)

    moe_mlp = jaxmoe.moe_mlp
    monkeypatch.setattr(jaxmoe, "moe_mlp", recorded)
    every = tiles.candidates
    monkeypatch.setattr(tiles, "candidates", lambda product: every(product)[:2])
    path = tmp_path / "h200" / "tiles.json"
    command = "--suite tiles --models odd --tokens 1 --skew uniform --repeats 3 --impl jaxmoe"
    assert run.main([*command.split(), "--json", str(path)]) == 0
    case = Case(MODELS["odd"], 1, "uniform", 1, WeightSets())
    gate_up, down = (tiles.candidates(product) for product in tiles.products(case))
    assert used == {(c, None) for c in gate_up} | {(None, c) for c in down}
    odd = MODELS["odd"]
    chosen = mlp_configs(3, 5, 5, odd.hidden, odd.intermediate, odd.width != odd.intermediate)
    assert (gate_up[0], down[0]) == chosen
    report_rows = measurements.load(path.parent).rows
    for product, configs in (("gate_up", gate_up), ("down", down)):
        mine = {row.impl: row for row in report_rows if row.op == f"moe_mlp/{product}"}
        assert list(mine) == [tiles.name(product, config) for config in configs]
        assert [row.chosen for row in mine.values()] == [True] + [False] * (len(configs) - 1)
        times = [row.us or 0.0 for row in mine.values()]
        for row in mine.values():
            assert row.us and row.rel_err is not None and row.rel_err < 1e-2
            assert row.vs_best == pytest.approx(row.us / min(times), rel=1e-3)


def test_a_stack_adds_up_layers_of_distinct_weights() -> None:
    model = MODELS["odd"]
    case = Case(model, 2, "uniform", 0, WeightSets(weight_sets(model, 0)[:3]))
    weights = case.stack(stack.LAYERS)
    assert len(weights) == 48 and case.stack(48)[5] is weights[5]
    assert np.array_equal(weights[2].down, np.swapaxes(case.sets[2].down, 1, 2))
    firsts = np.stack([np.ravel(w.down)[:8] for w in weights])
    assert len(np.unique(firsts, axis=0)) == 48
    entry = next(e for e in SUITES["stack"](case) if e.impl == "jaxmoe")
    chained = entry.make(4)
    chained.launch(1)
    one = layer.step(layer.moe_mlp)
    y = case.x
    for r, w in zip(case.routings(4), weights, strict=False):
        y = one(case.x, r, w, y)
    summed = chained._state  # pyright: ignore[reportPrivateUsage]
    assert relative_error(summed, y) < 1e-2


def test_a_stack_fits_in_half_of_the_memory() -> None:
    class Device:
        def __init__(self, limit: int):
            self._limit = limit

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": self._limit}

    qwen3 = MODELS["qwen3-30b-a3b"]  # 1.208 GB a layer
    assert stack_size(qwen3, 48, Device(130 * 10**9)) == 48
    assert stack_size(qwen3, 48, Device(72 * 10**9)) == 29
    assert stack_size(qwen3, 48, Device(10**9)) == 1


def test_a_stack_runs_next_to_the_chain_of_suite_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "LAYERS", 6)  # not 48, which take seconds to compile
    path = tmp_path / "h200" / "stack.json"
    command = "--suite stack --models odd --tokens 8 --skew uniform --repeats 3"
    assert run.main([*command.split(), "--json", str(path)]) == 0
    loaded = measurements.load(path.parent)
    timed = {row.impl: row for row in loaded.rows if row.us}
    ours, chain = timed["jaxmoe"], timed[stack.CHAIN]
    assert (ours.layers, ours.weight_sets, chain.layers, chain.weight_sets) == (6, 6, 2, 2)
    flops = 2 * 24 * 40 * (48 + 24)  # 24 rows, H 40, 2I 48, I 24: of one layer
    assert ours.us and ours.tflops == pytest.approx(flops / ours.us * 1e-6, rel=1e-3)
    assert "| odd | 8 | uniform | 6 | 6 | " in every_row.page(loaded)
    plain = run.plan(run.parse(["--suite", "stack,layer"]))
    stacks = {(case.model, case.tokens) for case in plain if case.suite == "stack"}
    assert stacks == {("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 8)}
    assert len({case.model for case in plain}) == len(DEFAULT_MODELS)
    order = [case.model for case in plain]
    assert order == sorted(order, key=list(dict.fromkeys(order)).index)


def test_packed_layers_are_checked_with_tokens_as_they_round_them() -> None:
    model = Layer("little", "groups of every format", 256, 128, 4, 2, bias=True)
    case = Case(model, 8, "uniform", 1, weight_sets(model, 0))
    entries = {e.impl: e for e in layer_packed.entries(case)}
    assert entries.keys() == layer_packed.VARIANTS.keys()
    for impl in ("jaxmoe[mxfp4]", "jaxmoe[int4_g128 x e4m3]", "jaxmoe[mxfp4 x mxfp8]"):
        check = entries[impl].check
        assert check is not None and check() < 1e-2
    # the same rows are wrong for tokens that are not rounded
    rounding = quantized.weight_sets(case, "mxfp4")[0]
    rounding = dataclasses.replace(rounding, token_format="mxfp4")
    x, r = case.fresh
    y = jaxmoe.moe_mlp(x, jaxmoe.Routing(r.expert_ids, r.weights), rounding)
    plain = dataclasses.replace(rounding, token_format=None)
    with pytest.raises(AssertionError):
        quantized.error(case, y, plain, rounds_tokens=False)


def test_training_checks_every_gradient(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    command = f"--suite train --models all --tokens 8 --skew uniform --repeats 3 --json {path}"
    assert run.main([*command.split(), "--impl", "jaxmoe,floor"]) == 0
    found = [rows.Row.from_json(row) for row in json.loads(path.read_text())["rows"]]
    floor, ours, *others = found
    ops = [f"grouped_gemm/{name}" for name in ("gate_up", "down")]
    assert [(r.op, r.impl) for r in others] == [
        (op, impl) for op in ops for impl in ("floor", "jaxmoe")
    ]
    for row in others[1::2]:
        assert row.us and row.rel_err is not None and row.rel_err < 1e-2
    assert (floor.pass_, ours.pass_) == ("forward+backward",) * 2
    assert ours.us and ours.rel_err is not None and 0 < ours.rel_err < 1e-2
    weights_and_gradients = 2 * layer_bytes(MODELS["all"])
    assert ours.temp_bytes and ours.peak_bytes
    assert ours.peak_bytes > ours.temp_bytes + weights_and_gradients
    # 18 T K H I operations; two weights read and one written, of all four experts
    model = MODELS["all"]
    assert ours.tflops == pytest.approx(18 * 8 * 4 * 16 * 32 / ours.us * 1e-6, rel=1e-3)
    work = bounds.training(model, 8, 4.0)
    assert work.weight_bytes == 3 * layer_bytes(model) == 3 * 4 * 3 * 16 * 32 * 2
    # a wrong gradient of one argument is found
    case = Case(model, 8, "uniform", 1, weight_sets(model, 0))
    x, r = case.fresh
    ct = train._cotangent(case)  # pyright: ignore[reportPrivateUsage]
    call = train._training("jaxmoe[kn]")  # pyright: ignore[reportPrivateUsage]
    right = jax.jit(call)(x, r, case.sets[0], ct)
    assert train.error(case, right, ct) < 1e-2
    for i in range(4):
        wrong = [jax.tree.map(lambda a: 1.1 * a, v) if i == j else v for j, v in enumerate(right)]
        assert train.error(case, tuple(wrong), ct) > 0.05


def test_training_checks_both_gradients_of_a_product() -> None:
    case = Case(MODELS["all"], 8, "uniform", 1, weight_sets(MODELS["all"], 0))
    entries = [e for e in train_products.entries(case, train.PASS) if e.op == "grouped_gemm/down"]
    assert [e.impl for e in entries] == ["jaxmoe", "xla_ragged_dot"]
    slow = entries[1]
    assert slow.pass_ == train.PASS and slow.check is not None and slow.check() < 1e-2
    # 6 R K N operations; a matrix read twice and its gradient written
    assert slow.work.flops == 6 * 32 * 32 * 16
    assert slow.work.weight_bytes == 3 * 4 * 32 * 16 * 2
    sizes = np.asarray(case.group_sizes(1)[0], np.int32)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.numpy.asarray(rng.standard_normal(shape), "bfloat16")  # noqa: E731
    arguments = draw(32, 32), draw(4, 32, 16), jax.numpy.asarray(sizes), draw(32, 16)
    right = jax.jit(train_products.training("xla_ragged_dot"))(*arguments)
    at = np.array([0, 7, 31])
    assert train_products.error(at, arguments, right) < 1e-2
    for i in range(3):
        wrong = [1.1 * a if i == j else a for j, a in enumerate(right)]
        assert train_products.error(at, arguments, wrong) > 0.05


def test_dense_training_is_products_of_equal_flops() -> None:
    chained = dense.training_layers(MODELS["odd"], 24, 2, seed=0)
    chained.launch(1)
    y, dx, da, db = chained._state[1]  # pyright: ignore[reportPrivateUsage]
    x, a, b, ct = chained._inputs[1]  # pyright: ignore[reportPrivateUsage]
    flops = 2 * 24 * 40 * a.shape[1] * 2
    assert flops == bounds.layer(MODELS["odd"], 8, 5).flops
    wide = [np.asarray(v, np.float32) for v in (x, a, b, ct)]
    x, a, b, ct = wide
    for got, want in (
        (y, x @ a @ b),
        (dx, ct @ b.T @ a.T),
        (da, x.T @ ct @ b.T),
        (db, (x @ a).T @ ct),
    ):
        assert relative_error(got, want) < 1e-2


def test_experts_over_devices_are_checked_and_timed(tmp_path: Path) -> None:
    path = tmp_path / "ep.json"
    name = ep.Variant("all_gather", 1).name
    command = f"--suite ep --models wide --tokens 2 --skew uniform --repeats 3 --json {path}"
    assert run.main([*command.split(), "--impl", f"{name},xla[all_to_all]"]) == 0
    found = {r.impl: r for r in map(rows.Row.from_json, json.loads(path.read_text())["rows"])}
    assert list(found) == [name, "xla[all_to_all]"]
    assert 0.0 < (found[name].rel_err or 0.0) < 1e-2
    wide, count = MODELS["wide"], jax.device_count()
    sent = (count - 1) * 2 * 2 * wide.hidden
    us = found["xla[all_to_all]"].us or 0.0
    assert found["xla[all_to_all]"].sent_gbps == pytest.approx(sent / us * 1e-3, rel=1e-3)
    assert found[name].devices == count and "GB/s sent" in rows.line(found[name])
    case = Case(wide, 2, "uniform", 1, weight_sets(wide, 0))
    assert peers.opened(ep.AXIS, count) is None  # each case closes what it has opened
    every = {entry.impl: entry for entry in ep.entries(case)}
    ep.close_memory()
    left_out = {ep.Variant(m, 4).name for m in ep.DISPATCHES}  # two tokens in four chunks
    left_out |= {*ep.FP8_VARIANTS, ep.FP8_LOCAL, ep_exchange.DISPATCH_FP8}  # no whole blocks
    assert set(every) == set(ep.IMPLS) - left_out
    check = every[ep.LOCAL].check  # of the sum of what each device computes by itself
    assert check is not None and 0.0 < check() < 1e-2
    assert "no ragged_all_to_all here" in (every[ep.ragged_ep.NAME].refusal or "")
    refused = ep.entries(dataclasses.replace(case, model=MODELS["odd"]))
    assert [entry.refusal for entry in refused] == [f"not run: 5 experts on {count} device(s)"]


def test_what_is_sent_to_fp8_experts_is_checked_and_timed() -> None:
    model = dataclasses.replace(MODELS["wide"], hidden=256, intermediate=128)
    case = Case(model, 2, "uniform", 1, weight_sets(model, 0))
    every = {entry.impl: entry for entry in ep.entries(case)}
    chosen = (ep.FP8_LOCAL, ep.Variant("direct", 1, fp8=True).name, *ep_exchange.IMPLS)
    errors = {}
    for impl in chosen:
        check, chain = every[impl].check, every[impl].make(2)
        chain.launch(2)
        chain.wait()
        errors[impl] = check() if check else 1.0
    ep.close_memory()
    assert all(errors[impl] == 0.0 for impl in ep_exchange.IMPLS)  # both are collectives here
    assert all(0.0 < errors[impl] < 1e-2 for impl in chosen[:2])
    count, share = jax.device_count(), share_per_device(jax.device_count(), model.top_k)
    to_each = 2 * share * (256 + 2 * 4 + 8 * model.top_k)  # e4m3, two scales, ids and weights
    sent = every[ep_exchange.DISPATCH_FP8].sent_bytes
    assert sent == pytest.approx((count - 1) * to_each)


def test_training_over_devices_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(MODELS["wide"], 2, "uniform", 1, weight_sets(MODELS["wide"], 0))
    chosen = (ep.Variant("all_to_all", 1).name, ep.LOCAL)
    for entry in ep_train.entries(case):
        if entry.impl in chosen:
            chain = entry.make(2)
            chain.launch(2)
            chain.wait()
            assert entry.check is not None and 0.0 < entry.check() < 1e-2
    ep.close_memory()
    error = train.error
    monkeypatch.setattr(train, "error", lambda case, made, ct: error(case, made, 1.1 * ct))
    (wrong,) = (e for e in ep_train.entries(case) if e.impl == ep.LOCAL)
    assert wrong.check is not None and wrong.check() > 0.05
    ep.close_memory()
    refused = ep_train.entries(dataclasses.replace(case, model=MODELS["odd"]))
    assert refused[0].refusal and refused[0].refusal.startswith("not run: 5 experts")


def test_lora_suite_checks_the_adapted_layer(tmp_path: Path) -> None:
    path = tmp_path / "lora.json"
    command = f"--suite lora --models clamped --tokens 8 --skew uniform --repeats 3 --json {path}"
    assert run.main(command.split()) == 0
    found = [rows.Row.from_json(row) for row in json.loads(path.read_text())["rows"]]
    timed = {row.impl: row for row in found if row.impl != "floor"}
    assert list(timed) == ["jaxmoe", lora.ADAPTED["jaxmoe"]]  # 24 are no groups of 128 or 32
    assert all(row.us and row.rel_err is not None and row.rel_err < 0.01 for row in timed.values())
    # and adapters that are left out are found
    case = Case(MODELS["clamped"], 8, "uniform", 1, weight_sets(MODELS["clamped"], 1))
    plain, adapted = lora.entries(case)
    assert plain.check is not None and adapted.check is not None
    x, r = case.fresh
    y = layer.moe_mlp(x, r, case.sets.nk[0], x * 0)
    assert plain.check() < 0.01 and adapted.check() < 0.01
    sets = functools.partial(lora._with_adapters, case.model, lambda: case.sets.nk)
    assert lora._error(case, sets, y) > 0.1


def test_a_stack_in_other_formats() -> None:
    """Of models that the formats divide, with some distinct layers, and results that are right."""
    odd = Case(MODELS["odd"], 2, "uniform", 0, WeightSets(weight_sets(MODELS["odd"], 0)[:1]))
    assert "jaxmoe[int4_g128]" not in {e.impl for e in SUITES["stack"](odd)}
    model = dataclasses.replace(MODELS["odd"], hidden=256, intermediate=128, bias=False)
    case = Case(model, 2, "uniform", 0, WeightSets(weight_sets(model, 0)[:1]))
    others = [e for e in SUITES["stack"](case) if e.impl in stack.FORMATS]
    assert [e.impl for e in others] == list(stack.FORMATS)
    for entry in others:
        assert entry.layers == stack.LAYERS and entry.weight_sets == stack.OTHERS
        assert entry.check is not None and entry.check() < 2e-2
        entry.make(2).launch(1)
