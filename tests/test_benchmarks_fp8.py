"""Benchmarks of the layer with FP8 weights, on a CPU: data, checks, comparisons."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind everything: `jaxmoe` stays the installed one

import jaxmoe  # noqa: E402
from benchmarks import bounds, quantized, rows, runner, timing  # noqa: E402
from benchmarks.baselines import dense  # noqa: E402
from benchmarks.cases import Case, WeightSets, weight_sets  # noqa: E402
from benchmarks.models import MODELS, layer_bytes  # noqa: E402
from benchmarks.suites import layer_fp8  # noqa: E402
from jaxmoe._testing import FP8 as FORMATS  # noqa: E402
from jaxmoe.activation import resolve, split_gate_up  # noqa: E402

H200 = bounds.CEILINGS["NVIDIA H200"]
PEERS = json.loads((ROOT / "benchmarks" / "peers_h200.json").read_text())

pytestmark = pytest.mark.usefixtures("steady_batches")


def small_case(name: str = "odd", num_tokens: int = 5, sets: int = 2) -> Case:
    model = MODELS[name]
    drawn = WeightSets(weight_sets(model, 0)[:sets])
    return Case(model, num_tokens, "uniform", 3, drawn)


@pytest.mark.parametrize(
    "model, tokens, hit, us",
    [
        # 8 experts of 3 * 2048 * 768 bytes, and 8 KB of tokens, at 4.3 TB/s
        ("qwen3-30b-a3b", 1, 8, 8.781),
        # 6 * 8192 * 4096 * 14336 FLOP at 1350 TFLOP/s
        ("mixtral-8x7b", 4096, 8, 2137.9),
        # 4 * (3 * 2880^2 bytes and 3 * 2880 biases of 2) and 11.5 KB of tokens
        ("gpt-oss-120b", 1, 4, 23.166),
    ],
)
def test_floor_with_fp8_weights(model: str, tokens: int, hit: float, us: float) -> None:
    work = bounds.layer(MODELS[model], tokens, hit, "fp8")
    assert work.floor_us(H200, "fp8") == pytest.approx(us, rel=1e-3)


def test_fp8_weights_are_those_of_the_case() -> None:
    case = small_case()
    for format in FORMATS:
        made = quantized.weight_sets(case, format)
        assert made is quantized.weight_sets(case, format) and len(made) == 2
        for w, plain in zip(made, case.sets.nk, strict=True):
            for q, bf16 in ((w.gate_up, plain.gate_up), (w.down, plain.down)):
                expected = jaxmoe.quantize(bf16, format, weight_layout="nk")
                assert np.array_equal(q.values, expected.values)
                assert np.array_equal(q.scales, expected.scales) and q.shape == bf16.shape


def test_fp8_layers_fit_in_a_quarter_of_the_memory() -> None:
    eight = WeightSets([None] * 8)  # type: ignore[list-item]
    counts = {name: quantized.count(eight, MODELS[name]) for name in ("qwen3-30b-a3b", "odd")}
    assert counts == {"qwen3-30b-a3b": 8, "odd": 8}
    assert quantized.count(eight, MODELS["gpt-oss-120b"]) == 2  # 3.2 GB each, of 8.6
    assert quantized.count(eight, MODELS["deepseek-v3"]) == 1  # one does not fit: 11.3 GB
    assert layer_bytes(MODELS["deepseek-v3"], "fp8") == layer_bytes(MODELS["deepseek-v3"]) // 2


@pytest.mark.parametrize("name", ("odd", "wide"))
def test_static_scales_are_the_maxima_of_the_data(name: str) -> None:
    case = small_case(name)
    w, (x, r), model = quantized.with_static_scales(case)[0], case.fresh, case.model
    assert float(w.x_scale) == pytest.approx(float(jnp.abs(x).max()) / 448)  # type: ignore[arg-type]
    tokens = np.asarray(jaxmoe.dequantize(jaxmoe.quantize_tokens(x, "fp8_tensor")), np.float32)
    w1, act = jaxmoe.dequantize(w.gate_up, dtype=jnp.float32), resolve(model.activation)
    largest = 0.0
    for t, ids in enumerate(np.asarray(r.expert_ids)):
        for e in ids:
            z = tokens[t] @ np.asarray(w1[e]).T
            if w.gate_up_bias is not None:
                z = z + np.asarray(w.gate_up_bias[e], np.float32)
            h = act(*split_gate_up(jnp.asarray(z)[None], model.gate_up))
            largest = max(largest, float(jnp.abs(h).max()))
    # bf16 rounds the tokens after dequantizing here, and the activation there
    assert float(w.h_scale) == pytest.approx(largest / 448, rel=1e-2)  # type: ignore[arg-type]


def test_outputs_of_wrong_weights_or_routings_are_found() -> None:
    case = small_case()
    (x, r), w = case.fresh, quantized.weight_sets(case, "fp8_channel")[0]
    zero = jnp.zeros_like(x)
    y = layer_fp8.moe_mlp(x, r, w, zero)
    assert quantized.error(case, y, w) < 5e-2
    others = jax.tree.map(lambda a: jnp.roll(a, 1, axis=0), w)
    swapped = r._replace(weights=r.weights[:, ::-1])
    for wrong in (
        layer_fp8.moe_mlp(x, r, others, zero),
        layer_fp8.moe_mlp(x, swapped, w, zero),
        y.at[0].set(0),
    ):
        with pytest.raises(AssertionError, match="is more than"):
            quantized.error(case, wrong, w)


def test_a_wrong_result_is_not_timed() -> None:
    case = small_case()
    good = layer_fp8.entries(case)[0]
    wrong = dataclasses.replace(good, impl="wrong", check=lambda: 6e-2)
    out = rows.Results({}, None)
    runner.measure("layer", case, [wrong, good], runner.Settings(repeats=3), out)
    by_impl = {row.impl: row for row in out.rows}
    assert list(by_impl) == ["floor[fp8]", "wrong", "jaxmoe[fp8_tensor]"]
    assert {row.scheme for row in out.rows} == {"fp8"}
    assert by_impl["wrong"].reason == "not timed: wrong result" and not by_impl["wrong"].us
    assert by_impl["jaxmoe[fp8_tensor]"].us and by_impl["jaxmoe[fp8_tensor]"].weight_sets == 2


def test_rows_have_the_floor_and_the_dense_product_of_their_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Case, "ceiling", property(lambda _: H200))
    timed: dict[str, int] = {}

    def bursts(chains: dict[str, timing.Timed], _: timing.Pace) -> dict[str, timing.Measured]:
        return {name: timing.Measured(us, us, us) for name, us in timed.items() if name in chains}

    monkeypatch.setattr(timing, "bursts", bursts)
    monkeypatch.setattr(timing, "sustained", lambda _: timing.Measured(50.0, 50.0, 50.0))
    case = small_case("one", 5)
    first = layer_fp8.entries(case)[0]
    work = bounds.Work(flops=1e9, weight_bytes=4.3e3, activation_bytes=0.0)
    entries = []
    for impl, us, scheme in (
        ("jaxmoe", 8, "bf16"),
        ("dense", 4, "bf16"),
        ("jaxmoe[fp8_tensor]", 5, "fp8"),
        ("jaxmoe[fp8_block]", 10, "fp8"),
        ("xla_ragged_dot[dequantized]", 100, "fp8"),
        ("dense[fp8]", 1, "fp8"),
    ):
        timed[impl] = us
        entries.append(dataclasses.replace(first, impl=impl, scheme=scheme, work=work, check=None))
    out = rows.Results({}, None)
    runner.measure("layer", case, entries, runner.Settings(), out)
    burst = {row.impl: row for row in out.rows if row.regime == "burst"}
    assert {name: row.vs_dense for name, row in burst.items()} == pytest.approx(
        {"jaxmoe": 0.5, "dense": 1.0, "jaxmoe[fp8_tensor]": 0.2, "jaxmoe[fp8_block]": 0.1}
        | {"xla_ragged_dot[dequantized]": 0.01, "dense[fp8]": 1.0}
    )
    floors = {row.impl: row.us for row in out.rows if row.impl.startswith("floor")}
    assert floors == pytest.approx({"floor": 1e9 / 780e6, "floor[fp8]": 1e9 / 1350e6})
    assert burst["jaxmoe[fp8_tensor]"].floor_fraction == pytest.approx(1e9 / 1350e6 / 5)
    assert burst["jaxmoe"].floor_fraction == pytest.approx(1e9 / 780e6 / 8)
    loaded = {row.impl for row in out.rows if row.regime == "sustained"}
    assert loaded == set(burst) - {"xla_ragged_dot[dequantized]"}


def test_dense_fp8_multiplies_the_experts_flops() -> None:
    model = dataclasses.replace(MODELS["odd"], hidden=48, intermediate=32)
    chained = dense.fp8_layers(model, 16, 2, seed=1)
    chained.launch(1)
    chained.wait()
    inputs = chained._inputs  # pyright: ignore[reportPrivateUsage]
    assert chained.layers == len(inputs) == 2
    state = chained._state  # pyright: ignore[reportPrivateUsage]
    for (x, h, a, b), (y, z) in zip(inputs, state, strict=True):
        assert {v.dtype for v in (x, h, a, b)} == {jnp.dtype(jnp.float8_e4m3fn)}
        assert (
            2 * (x.size * a.shape[0] + h.size * b.shape[0])
            == bounds.layer(dataclasses.replace(model, top_k=1), 16, 1).flops
        )
        for got, lhs, rhs in ((y, x, a), (z, h, b)):
            expected = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32).T
            np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=1e-2, atol=0.1)
    assert not np.array_equal(inputs[0][2], inputs[1][2])


@pytest.mark.gpu
def test_dense_fp8_is_a_product_of_cublaslt() -> None:
    x, h, a, b = (
        jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
        for shape in ((1024, 512), (1024, 768), (768, 512), (512, 768))
    )
    options = {"xla_gpu_enable_triton_gemm": False}
    text = jax.jit(dense.fp8_pair).lower(x, h, a, b).compile(options).as_text()
    assert text is not None and text.count('custom_call_target="__cublas$lt$matmul$f8"') == 2
    assert " transpose(" not in text


def test_committed_fp8_peers_are_above_the_floor() -> None:
    found = PEERS["fp8"]["rows"]
    points = {(row["impl"], row["format"], row["model"], row["tokens"]) for row in found}
    assert len(points) == len(found) == 34 + 9
    for row in found:
        model, tokens = MODELS[row["model"]], row["tokens"]
        work = bounds.layer(model, tokens, bounds.expected_hit(model, tokens), "fp8")
        assert row["us"] > 0.98 * (work.floor_us(H200, "fp8") or 0.0)
