"""Blocks of jaxmoe.nn against the classes of transformers that docs/frameworks.md says they are."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Swiglu, nn
from jaxmoe._testing import assert_close
from tests.parity import table

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

from tests.parity import blocks  # noqa: E402

V3 = {
    "method": "deepseek_v3",
    "selection_bias": True,
    "num_groups": 4,
    "top_groups": 2,
    "scale": 2.5,
    "shared_intermediate": 32,
}
# Fields of `MoEConfig` by family, beside the sizes.
FIELDS = {
    "mixtral": {},
    "qwen3_moe": {},
    "olmoe": {"method": "softmax"},
    "qwen2_moe": {"method": "softmax", "shared_intermediate": 24, "shared_router": True},
    "deepseek_v3": V3,
    "glm4_moe": V3,
    "axk2": {**V3, "masked_group_value": 0.0},
    "lfm2_moe": {
        "method": "deepseek_v3",
        "selection_bias": True,
        "epsilon": 1e-6,
        "scale": 2.5,
    },
    "gpt_oss": {
        "activation": Swiglu(1.702, 1.0, 1.0),
        "router_bias": True,
        "expert_bias": True,
    },
    "llama4": {"method": "llama4", "shared_intermediate": 16},
    "minimax_m2": {"method": "minimax2", "selection_bias": True},
}
UNNORMALIZED = ("olmoe", "qwen2_moe")  # `norm_topk_prob` is False in their checkpoints
KN = ("gpt_oss", "llama4")  # [E, H, 2I] and [E, I, H]


def parameters(family, arrays):
    """The arrays of a block of transformers by the names that `nn.apply` has for them."""
    router = "gate" if "gate.weight" in arrays else "router"
    params = {"router": arrays[f"{router}.weight"].T}
    gate_up, down = arrays["experts.gate_up_proj"], arrays["experts.down_proj"]
    if family not in KN:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    params["gate"], params["up"] = np.split(gate_up, 2, axis=-1)
    params["down"] = down
    if family == "gpt_oss":
        bias = arrays["experts.gate_up_proj_bias"]
        for i, name in enumerate(("gate", "up")):  # interleaved
            params[name], params[f"{name}_bias"] = gate_up[..., i::2], bias[..., i::2]
        params["down_bias"] = arrays["experts.down_proj_bias"]
        params["router_bias"] = arrays["router.bias"]
    for key, value in arrays.items():
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            params["selection_bias"] = value
        if key.startswith("shared_") and "_proj" in key:
            params[f"shared_{key.split('.')[1].removesuffix('_proj')}"] = value.T
        if key == "shared_expert_gate.weight":
            params["shared_router"] = value[0]
    return {name: jnp.asarray(value) for name, value in params.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FIELDS)
def test_a_block_is_that_of_the_family(family):
    case = next(case for case in table.CASES if case.family == family)
    variant = case.variants[-1 if family in UNNORMALIZED else 0]
    params = parameters(family, blocks.arrays_of(blocks.build(case, variant)))
    experts, hidden, intermediate = params["up"].shape
    config = nn.MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts,
        top_k=1 if family == "llama4" else 3,
        **FIELDS[family],
    )
    assert params.keys() == nn.parameters(config).keys()
    y, _ = nn.apply(config, params, jnp.asarray(blocks.tokens().numpy()))
    assert_close(y.reshape(-1, hidden), *blocks.results(case, variant))
