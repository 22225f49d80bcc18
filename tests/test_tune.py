"""benchmarks.tune: what it measures, what a file keeps, and what becomes a table."""

import json

import pytest

import jaxmoe
from benchmarks import tune
from jaxmoe import AutotuningResult, autotuning
from jaxmoe._jax import targets as _targets


class Fake:
    """A timer by which each choice takes 100 us, but for those with tiles of 128 x 32."""

    fast = 96.0

    def __init__(self, a, layer):
        del a, layer

    def __call__(self, pairs):
        return {p: self.fast if p[1].token_tile == 32 else 100.0 for p in pairs}


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Runs the command line with a fake timer; returns the layers of the file it wrote."""

    def autotune(fn, *args):
        result = autotuning.tune(autotuning.problems(fn, *args), Fake)
        return AutotuningResult("Some GPU", result.data)

    def run(*cases):
        monkeypatch.setattr(jaxmoe, "autotune", autotune)
        path = tmp_path / "tuned.json"
        with _targets.force_cuda_lowering():
            assert tune.main([*cases, "--json", str(path), "--commit", "abc"]) == 0
        return path

    return run


def test_cases_are_measured_and_kept(measure, capsys):
    content = json.loads(measure("odd:bf16:8,512").read_text())
    assert content["commit"] == "abc"
    names = [layer["layer"] for layer in content["layers"]]
    assert names == ["odd bf16 T=8", "odd bf16 T=512"]
    few, many = content["layers"]
    # 8 tokens already have the fastest tiles.
    assert few["rule"] < 6 and many["result"]["data"][0][1][many["rule"]][1] == 100.0
    assert len(few["result"]["data"][0][1]) == 6 and len(many["result"]["data"][0][1]) == 7
    printed = capsys.readouterr().out.splitlines()
    assert "odd bf16 T=512: rule 256x160 gather + 256x160 100.0 us, best " in printed[1]
    assert "96.0, 1.042; then " in printed[1]


@pytest.mark.parametrize(("fast", "wins"), ((96.0, 1), (98.0, 0)))
def test_a_table_has_what_wins(measure, monkeypatch, tmp_path, fast, wins):
    monkeypatch.setattr(Fake, "fast", fast)
    path = measure("odd:bf16:8,512")
    assert tune.main(["--package", str(path), "--to", str(tmp_path / "tables")]) == 0
    (table,) = (tmp_path / "tables").iterdir()
    assert table.name == "some_gpu.json"
    result = AutotuningResult.loads(table.read_text())
    assert [problem.num_tokens for problem, _ in result.data] == [512] * wins
    for _, times in result.data:
        assert [us for _, us in times] == [96.0, 100.0]


def test_a_later_file_counts(measure, monkeypatch, tmp_path):
    first = measure("odd:bf16:512").rename(tmp_path / "first.json")
    monkeypatch.setattr(Fake, "fast", 98.0)
    layers = [tune.read(files) for files in ([first], [measure("odd:bf16:512")])]
    assert [layer.wins for found in layers for layer in found] == [True, False]
    assert tune.read([first, tmp_path / "tuned.json"]) == layers[1]


def test_time_that_is_over(capsys, monkeypatch):
    monkeypatch.setattr(tune.time, "monotonic", iter((0.0, 1e9)).__next__)
    with _targets.force_cuda_lowering():
        assert tune.main(["odd:bf16:8", "--budget-s", "5"]) == 0
    assert capsys.readouterr().out == "odd bf16 T=8: not run, 5.0 s were over\n"


@pytest.mark.parametrize("case", ("none:bf16:8", "odd:int5:8", "odd:bf16:x", "odd:bf16"))
def test_wrong_cases(case):
    with pytest.raises(SystemExit):
        tune.parse([case])
