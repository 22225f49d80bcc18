"""Models that transformers saves, read by jaxmoe.load: their names, configuration and numbers."""

import importlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe._load import families
from tests.parity import table

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from tests.parity import blocks  # noqa: E402

SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "first_k_dense_replace": 0}
SPARSE = {"mlp_layer_types": ["sparse"] * 2}
# What a model needs so that its layers have experts, beside the settings of its block.
MORE = {
    **dict.fromkeys(("hy_v4", "hy_v4_vl", "axk1", "axk2", "mistral_large4", "cohere2_moe"), SPARSE),
    "flint": {"mlp_only_layers": []},
    "inkling2": {"vocab_size": 200064},
    "inkling2_loop": {"vocab_size": 200064, "n_layers_per_attn_res_block": 1}
    | {"loop_layer_index_start": 1, "loop_layer_index_end": 2},
    "dbrx": {"n_layers": 2, "n_heads": 4},
    "gemma4": {"hidden_size_per_layer_input": 0},
    "jetmoe": {"kv_channels": 8},
    "longcat_flash": {"num_hidden_layers": 4},  # two in each layer of the model's files
    "dots3_note": {"num_key_value_heads": 4, "layer_types": ["full_attention"] * 2},
}
FAMILIES = (
    *("aria", "axk1", "axk2", "cohere2_moe", "dbrx", "deepseek_v3", "deepseek_v32"),
    *(
        "dots1",
        "dots3_note",
        "gemma4",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "glm4_moe",
        "glm_moe_dsa",
        "gpt_oss",
    ),
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe"),
    *("hy_v4", "hy_v4_vl", "inkling", "inkling2", "inkling2_loop", "jetmoe", "longcat_flash"),
    *("kimi_linear", "kolibri1", "lara_mini", "mellum"),
    *("minimax", "mistral4", "mistral_large4", "mixtral", "olmoe", "openai_privacy_filter"),
    *("qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen4_exp", "solar_open"),
    "unlimited_ocr",
)
# Blocks of these families that are no layers of `jaxmoe.load`.
OTHER_BLOCKS = ("JetMoeMoA", "Dots3NoteVisionMoE")
# Those whose result has nothing else in it, and which give the logits beside it or do not.
WHOLE = ("DbrxFFN", "JetMoeMoE")
ROUTERS = re.compile(r"(^|\.)(gate|router)\.([a-z]+\.)?weight$")


def cases():
    for case in table.CASES:
        if case.family in FAMILIES and case.block not in OTHER_BLOCKS:
            for i, variant in enumerate(case.variants):
                yield pytest.param(case, variant, id=f"{case.family}-{len(case.settings)}{'ab'[i]}")


def draw(model):
    """Random weights, of routers so large that no experts are close to be chosen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dtype.is_floating_point and tensor.numel():
                scale = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.1
                scale *= 4 if ROUTERS.search(name) else 1
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)


def routed(block, x):
    """What the routed experts of a block give for tokens."""
    with torch.no_grad():
        _, weights, ids, *_ = (block.gate if hasattr(block, "gate") else block.router)(x)
        return block.experts(x, ids, weights).numpy()


def made(case, variant):
    """The smallest model of the family that has the block, with random weights."""
    name = f"transformers.models.{case.family}"
    models = importlib.import_module(f"{name}.modeling_{case.family}")
    configs = importlib.import_module(f"{name}.configuration_{case.family}")
    values = blocks.SIZES | SMALL | case.settings | variant | MORE.get(case.family, {})
    name = case.config or f"{case.block.removesuffix('MoE')}Config"
    config, stem = getattr(configs, name)(**values), name.removesuffix("Config")
    if case.family == "dbrx":
        config.attn_config.rope_theta = 10000.0  # which its class lacks in 5.24
    named = (f"{stem.removesuffix('Text')}ForCausalLM", f"{stem}ForCausalLM", f"{stem}Model")
    model = next(getattr(models, n) for n in named if hasattr(models, n))(config).eval()
    draw(model)
    return model, getattr(models, case.block)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "variant"), list(cases()))
def test_a_saved_model_is_read(case, variant, tmp_path):
    model, kind = made(case, variant)
    model.save_pretrained(tmp_path)
    layer = jaxmoe.load(tmp_path)[1]
    block = [module for module in model.modules() if isinstance(module, kind)][1]
    x = blocks.tokens().reshape(-1, blocks.HIDDEN)
    if case.forward or case.block in WHOLE:
        with torch.no_grad():
            y = (case.forward or type(block).__call__)(block, x[None])
        want = (y[0] if isinstance(y, tuple) else y).reshape(x.shape).numpy()
    else:
        want = routed(block, x)
    if case.family == "openai_privacy_filter":  # whose block does it
        want *= block.router.top_k
    got = layer(jnp.asarray(x.numpy()))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_the_families_are_known():
    assert set(FAMILIES) <= families.FAMILIES.keys()
