"""examples/serve.py with a checkpoint that transformers wrote: the logits of its model."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMPT = [3, 17, 90, 2, 41, 63]


@pytest.fixture(autouse=True)
def usual_promotion():
    """Examples run with JAX's defaults, not with the stricter ones of the tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("tied", (False, True))
def test_logits_are_those_of_transformers(tied, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    serve = importlib.import_module("serve")
    settings = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=not tied,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(settings).eval()
    with torch.no_grad():  # norms that are not all ones
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
        want = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    model.save_pretrained(tmp_path)
    for module in ("decoder", "serve"):
        monkeypatch.setattr(importlib.import_module(module), "DTYPE", jnp.float32)
    config, params = serve.load(tmp_path, "bf16")
    prompt = jnp.asarray(PROMPT, jnp.int32)[:, None]
    cache = serve.empty_cache(config, 1, len(PROMPT))
    got = np.asarray(serve.follow(params, cache, prompt, config, "jaxmoe")[0][0])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    options = ["--checkpoint", str(tmp_path), "--prompt", "3,17,90,2,41,63", "--tokens", "4"]
    assert serve.main([*options, "--batch", "2"]) == 0
    assert f"continues [{got.argmax()}, " in capsys.readouterr().out
