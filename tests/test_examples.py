"""examples/: models learn, go on where they stopped, never look ahead, and serve."""

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("train_lm")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(autouse=True)
def usual_promotion():
    """Examples run with JAX's defaults, not with the stricter ones of the tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def small(example):
    """One model for all tests that train it, so that its programs are compiled once."""
    sizes = {"hidden": 32, "intermediate": 16, "layers": 1, "length": 32, "batch": 8}
    return dataclasses.replace(example.TOY, **sizes, megabytes=1, rate=1e-2)


def test_learns_and_an_interruption_changes_nothing(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "TOY", small(example))
    options = ["--preset", "toy", "--steps", "60", "--every", "10", "--save-every", "20"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert example.main([*options, "--out", str(whole)]) == 0  # below the entropy of single bytes
    printed = capsys.readouterr().out
    assert "from step 0" in printed and "60/60" in printed and "TFLOP/s MFU - 0 s left" in printed
    step = example.train_step

    def until_35(state, text, config):
        if int(state[1][1][0].count) == 35:
            raise KeyboardInterrupt
        return step(state, text, config)

    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(example, "train_step", until_35)
        example.main([*options, "--out", str(parts)])
    assert "30/60" in capsys.readouterr().out
    assert example.main([*options, "--out", str(parts)]) == 0
    printed = capsys.readouterr().out
    assert "from step 20" in printed and "20/60" not in printed and "30/60" in printed
    losses = [
        [line.split(",")[:3] for line in (out / "loss.csv").read_text().splitlines()]
        for out in (whole, parts)
    ]
    assert losses[0] == losses[1] and losses[0][0] == ["step", "loss", "balance"]
    assert [line[0] for line in losses[0][1:]] == ["10", "20", "30", "40", "50", "60"]
    assert float(losses[0][-1][1]) < float(losses[0][1][1]) - 2.0
    assert "60</text></svg>" in (parts / "loss.svg").read_text()
    with pytest.raises(SystemExit, match="is of another model"):
        example.main([*options, "--out", str(parts), "--seed", "1"])


def test_both_kinds_of_experts_are_one_model_that_looks_only_back(example):
    small = dataclasses.replace(example.TOY, hidden=16, intermediate=8, layers=1)
    params = example.init(small, 0)
    text = jnp.arange(7, dtype=jnp.int32)[None]

    @jax.jit
    def predict(text):
        kinds = [dataclasses.replace(small, kind=kind) for kind in example.EXPERTS]
        return [example.predict(params, text, config)[0][0] for config in kinds]

    (logits, dense), (changed, _) = predict(text), predict(text.at[0, 4].set(99))
    np.testing.assert_allclose(logits, dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(logits[:4], changed[:4])
    assert (np.abs(logits[4:] - changed[4:]).max(axis=1) > 1e-4).all()


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("train_lm", "--steps 0", "argument --steps: 0 must be at least 1"),
        ("train_lm", "--every 0", "argument --every: 0 must be at least 1"),
        ("train_lm", "--every a", "argument --every: invalid positive value: 'a'"),
        ("finetune_lora", "--tune-steps 0", "argument --tune-steps: 0 must be at least 1"),
        ("finetune_lora", "--rank 0", "argument --rank: 0 must be at least 1"),
        ("serve", "--tokens 0", "argument --tokens: 0 must be at least 1"),
        ("serve", "--batch 1,0", "argument --batch: 0 must be at least 1"),
        ("serve", "--layer foo", "argument --layer: 'foo' must be one of jaxmoe, ragged_dot"),
        ("serve", "--format bf16,foo", "argument --format: 'foo' must be one of bf16, fp8_tensor"),
        (
            "serve",
            "--format mxfp4 --layer ragged_dot",
            "--layer ragged_dot has experts in --format bf16 alone",
        ),
        ("multi_process", "--processes 0 --cpu-devices 1", "argument --processes: 0 must be at l"),
        ("multi_process", "--cpu-devices -1", "argument --cpu-devices: -1 must be at least 1"),
    ],
)
def test_refused_command_lines(monkeypatch, capsys, module, options, message):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(module).main(options.split())
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_kinds_are_compared_with_the_spread_over_seeds(example):
    del example  # the folder of examples is on the path with it
    compare = importlib.import_module("compare_experts")
    losses = {"jaxmoe": {0: 1.0, 1: 1.2}, "dense": {0: 1.1, 1: 1.3}}
    assert compare.table(losses).splitlines() == [
        *("| seed | jaxmoe | dense |", "|---|--:|--:|"),
        *("| 0 | 1.0000 | 1.1000 |", "| 1 | 1.2000 | 1.3000 |"),
        *("| mean | 1.1000 | 1.2000 |", "| standard deviation | 0.1414 | 0.1414 |"),
    ]
    assert compare.within_noise(losses)
    losses["dense"] = {seed: loss + 0.1 for seed, loss in losses["dense"].items()}
    assert not compare.within_noise(losses)


def test_adapters_learn_beside_frozen_experts_and_serve_together(
    example, tmp_path, capsys, monkeypatch
):
    tune = importlib.import_module("finetune_lora")
    monkeypatch.setattr(example, "TOY", small(example))
    monkeypatch.setattr(example, "HELD_OUT", 2)
    monkeypatch.setattr(tune, "MORE", 4)
    options = ["--preset", "toy", "--steps", "60", "--out", str(tmp_path), "--format", "fp8_block"]
    tuning = ["--tune-steps", "30", "--rate", "1e-2", "--every", "20"]
    assert tune.main([*options, *tuning]) == 0  # each task is below the frozen model
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line[:5] == "step "] == ["20/30", "30/30"]
    start = next(i for i, line in enumerate(lines) if line.startswith("held out, nats"))
    table = np.array([line.split()[1:] for line in lines[start + 1 : start + 3]], float)
    own, other = np.diag(table[:, 1:]), np.diag(table[:, :0:-1])
    assert (own < table[:, 0] - 0.02).all() and (own < other - 0.02).all()
    assert sum(" by " in line for line in lines[start + 3 :]) == 6

    config = small(example)
    model = tune.freeze(example.init(config, 0), "fp8_block")
    assert model["layers"]["experts"].down.format == "fp8_block"
    adapters = tune.load(tmp_path / "adapters.npz")
    predict = jax.jit(functools.partial(tune.predict, model, config=config))
    text = jnp.broadcast_to(jnp.arange(40, 56, dtype=jnp.int32), (3, 16))
    ids = jnp.array([tune.FROZEN, 0, 1], jnp.int32)
    a, b = predict(adapters, text, ids), predict(adapters, text, ids[::-1])[::-1]
    np.testing.assert_allclose(a, b, atol=0.05)  # whatever the adapters of other texts are
    assert min(np.abs(a[i] - a[i - 1]).max() for i in range(3)) > 0.2
    new = predict(tune.new_adapters(model, 8, 2, seed=0), text, ids)
    np.testing.assert_array_equal(new[1:], new[:1].repeat(2, axis=0))  # it changes nothing yet


def test_serving_goes_on_from_its_cache(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    serve = importlib.import_module("serve")
    config = dataclasses.replace(serve.PRESETS["toy"], layers=1, vocabulary=64)
    params, first = serve.init(config, "bf16"), jnp.array([3, 7], jnp.int32)
    decode = functools.partial(serve.decode, params, config=config)

    def tokens(steps):
        cache, token, parts = serve.empty_cache(config, 2, 8), first, []
        for start in range(0, 8, steps):
            part, cache = decode(cache, token, jnp.int32(start), steps=steps, layer="jaxmoe")
            parts, token = [*parts, part], part[-1]
        return np.concatenate(parts)

    np.testing.assert_array_equal(tokens(4), tokens(8))
    cache = serve.empty_cache(config, 2, 8)
    step = functools.partial(
        importlib.import_module("decoder").step, params, cache, first, jnp.int32(0), config
    )
    logits = {name: np.asarray(step(name)[0]) for name in serve.LAYERS}
    np.testing.assert_allclose(logits["jaxmoe"], logits["ragged_dot"], atol=0.05)
    assert np.abs(logits["jaxmoe"] - logits["none"]).max() > 0.1  # without experts
    monkeypatch.setitem(serve.PRESETS, "toy", config)
    assert serve.main(["--format", "bf16,int4_g64", "--batch", "2", "--tokens", "4"]) == 0
    lines = [line.split()[:4:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [["bf16", "jaxmoe"], ["bf16", "ragged_dot"], ["int4_g64", "jaxmoe"]]


def written(folder, config, params, **settings):
    """Writes a model as Qwen3-MoE's checkpoints are: a folder of two shards."""
    flax = importlib.import_module("safetensors.flax")
    heads, kv, size = config.heads, config.kv_heads, config.head_dim
    arrays = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for i, w in enumerate(params["layers"]):
        name, e = f"model.layers.{i}", w["experts"]
        qkv = jnp.split(w["qkv"], (heads * size, (heads + kv) * size))
        of_heads = dict(zip("qkvo", (*qkv, w["out"]), strict=True))
        arrays |= {f"{name}.self_attn.{n}_proj.weight": a for n, a in of_heads.items()}
        norms = zip(("input", "post_attention"), w["norms"], strict=True)
        arrays |= {f"{name}.{n}_layernorm.weight": a for n, a in norms}
        head_norms = zip("qk", w["head_norms"], strict=True)
        arrays |= {f"{name}.self_attn.{n}_norm.weight": a for n, a in head_norms}
        arrays[f"{name}.mlp.gate.weight"] = w["router"]
        gate, up = jnp.split(e.gate_up, 2, axis=1)
        for n, stack in {"gate": gate, "up": up, "down": e.down}.items():
            of_experts = {f"{name}.mlp.experts.{j}.{n}_proj.weight": a for j, a in enumerate(stack)}
            arrays |= of_experts
    files = {n: f"model-{1 + i % 2}.safetensors" for i, n in enumerate(arrays)}
    for file in set(files.values()):
        flax.save_file({n: a for n, a in arrays.items() if files[n] == file}, folder / file)
    index = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index)
    settings = {
        "model_type": "qwen3_moe",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": size,
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.intermediate,
        "vocab_size": config.vocabulary,
        "rms_norm_eps": config.epsilon,
        "rope_theta": config.theta,
        "norm_topk_prob": config.norm_topk_prob,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(settings))


def test_serving_a_checkpoint(tmp_path, capsys, monkeypatch):
    """The logits of the model that the files are of; more tokens; what is refused."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    serve = importlib.import_module("serve")
    toy = serve.PRESETS["toy"]
    config = dataclasses.replace(toy, layers=1, vocabulary=64, theta=1e4, epsilon=1e-5)
    params = serve.init(config, "bf16")
    written(tmp_path, config, params)
    got_config, got = serve.load(tmp_path, "bf16")
    assert got_config == config
    prompt = jnp.array([[5], [9], [2]], jnp.int32)

    def logits(params):
        return serve.follow(params, serve.empty_cache(config, 1, 3), prompt, config, "jaxmoe")[0]

    np.testing.assert_allclose(logits(got), logits(params), atol=0.02)
    run = ["--checkpoint", str(tmp_path), "--format", "bf16,int4_g64", "--batch", "1"]
    assert serve.main([*run, "--tokens", "3", "--prompt", "5,9,2"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    first = int(jnp.argmax(logits(got)))
    assert lines[0].startswith(f"bf16         continues [{first}, ") and lines[0].count(",") == 2
    assert [line.split()[:4:3] for line in lines if "batch" in line] == [
        ["bf16", "jaxmoe"],
        ["bf16", "ragged_dot"],
        ["int4_g64", "jaxmoe"],
    ]
    for options, message in (
        (["--prompt", "5,64"], "--prompt: tokens must be below 64"),
        (["--prompt", "5,-1"], "argument --prompt: -1 must be at least 0"),
        (
            ["--preset", "qwen3-30b-a3b"],
            "argument --preset: not allowed with argument --checkpoint",
        ),
    ):
        with pytest.raises(SystemExit):
            serve.main([*run, *options])
        assert message in capsys.readouterr().err
    written(tmp_path, config, params | {"norm": params["norm"].astype(jnp.int8)})
    with pytest.raises(SystemExit):
        serve.main(run)
    assert "model.norm.weight is I8; only experts may be quantized" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_moe"}')
    with pytest.raises(SystemExit):
        serve.main(run)
    assert "model_type='qwen2_moe' must be 'qwen3_moe'" in capsys.readouterr().err
