"""route agrees with the routers of Hugging Face transformers, where that is installed."""

import importlib
import types

import numpy as np
import pytest

from jaxmoe import route
from tests import routing_oracle as oracle
from tests.routing_oracle import case

E, K, GROUPS = 16, 4, {"num_groups": 4, "top_groups": 2}
CONFIG = {
    **dict.fromkeys(("hidden_size", "num_experts", "num_local_experts", "n_routed_experts"), E),
    "num_experts_per_tok": K,
    "n_group": GROUPS["num_groups"],
    "topk_group": GROUPS["top_groups"],
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "group_limited_greedy",
    "scoring_func": "sqrtsoftplus",
}

# (module of transformers.models, class): what differs in the configuration, the call of route.
ROUTERS = {
    ("mixtral", "MixtralTopKRouter"): ({}, case("renormalize", K)),
    ("qwen3_moe", "Qwen3MoeTopKRouter"): ({}, case("renormalize", K)),
    ("gpt_oss", "GptOssTopKRouter"): ({}, case("renormalize", K)),
    ("olmoe", "OlmoeTopKRouter"): ({"norm_topk_prob": False}, case("softmax", K)),
    ("deepseek_v2", "DeepseekV2TopkRouter"): ({}, case("deepseek_v2", K, scale=2.5, **GROUPS)),
    ("deepseek_v3", "DeepseekV3TopkRouter"): (
        {},
        case("deepseek_v3", K, bias=True, scale=2.5, **GROUPS),
    ),
    ("glm4_moe", "Glm4MoeTopkRouter"): (
        {"n_group": 1, "topk_group": 1},
        case("deepseek_v3", K, bias=True, scale=2.5),
    ),
    ("minimax_m2", "MiniMaxM2TopKRouter"): ({}, case("minimax2", K, bias=True)),
    ("deepseek_v4", "DeepseekV4TopKRouter"): (
        {},
        case("sqrtsoftplus", K, bias=True, scale=2.5),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "router"), ROUTERS)
def test_router(module, router):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    different, options = ROUTERS[module, router]
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    layer = getattr(models, router)(types.SimpleNamespace(**CONFIG | different))
    logits, options = oracle.draw(0, 32, E, options)
    extra = []
    with torch.no_grad():
        layer.weight.copy_(torch.eye(E))  # then the hidden states are the logits
        if hasattr(layer, "bias"):
            layer.bias.zero_()
        if "bias" in options:
            bias = torch.tensor(options["bias"])
            if hasattr(layer, "e_score_correction_bias"):
                layer.e_score_correction_bias.copy_(bias)
            else:
                extra = [bias]
        _, weights, expert_ids = layer(torch.tensor(logits), *extra)
    got = route(logits, **options)
    order, want_order = np.argsort(got.expert_ids, 1), np.argsort(expert_ids.numpy(), 1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(got.expert_ids), order, 1),
        np.take_along_axis(expert_ids.numpy(), want_order, 1),
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(got.weights), order, 1),
        np.take_along_axis(weights.numpy(), want_order, 1),
        rtol=2e-6,
    )
