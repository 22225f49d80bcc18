"""examples/train_lm.py learns, goes on where it stopped, and never looks ahead."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[1] / "examples" / "train_lm.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_lm", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_lm"]


def test_learns_more_than_the_frequency_of_bytes_and_resumes(
    example, tmp_path, capsys, monkeypatch
):
    few = dataclasses.replace(example.TOY, hidden=32, intermediate=32, batch=8, megabytes=1)
    monkeypatch.setattr(example, "TOY", few)
    command = ["--preset", "toy", "--every", "30", "--out", str(tmp_path)]
    assert example.main([*command, "--steps", "30"]) in (0, 1)
    assert "from step 0" in capsys.readouterr().out
    assert example.main([*command, "--steps", "90"]) == 0  # below the entropy of single bytes
    printed = capsys.readouterr().out
    assert "from step 30" in printed and "30/90" not in printed and "90/90" in printed
    lines = [line.split(",") for line in (tmp_path / "loss.csv").read_text().splitlines()]
    assert lines[0] == ["step", "loss", "balance", "bytes_per_s"]
    assert [line[0] for line in lines[1:]] == ["30", "60", "90"]
    assert float(lines[3][1]) < float(lines[1][1]) < np.log(256)
    assert "90</text></svg>" in (tmp_path / "loss.svg").read_text()
    other = example.init(dataclasses.replace(few, hidden=16))
    with pytest.raises(SystemExit, match="is of another model"):
        example.restore(tmp_path / "state.npz", (other, (other, other)))


def test_a_byte_is_predicted_from_those_before_it(example):
    small = dataclasses.replace(example.TOY, hidden=16, intermediate=8, layers=1)
    params = example.init(small)
    text = jnp.arange(7, dtype=jnp.int32)[None]
    predict = jax.jit(lambda text: example.predict(params, text, small)[0][0])
    logits, changed = predict(text), predict(text.at[0, 4].set(99))
    np.testing.assert_array_equal(logits[:4], changed[:4])
    assert (np.abs(logits[4:] - changed[4:]).max(axis=1) > 1e-4).all()
