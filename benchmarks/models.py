"""The MoE layers that are measured: the shapes of the tests, and the grid of a default run."""

from jaxmoe._testing import MODELS as PUBLISHED
from jaxmoe._testing import SMALL
from jaxmoe._testing import Layer as Layer

BYTES = 2  # of a bfloat16 or float16 element
# Bytes of an element of packed weights, its share of scales included.
PACKED_BYTES = {
    "mxfp4": 17 / 32,
    "nvfp4": 9 / 16,
    "int4_g32": 9 / 16,
    "int4_g64": 17 / 32,
    "int4_g128": 33 / 64,
    "mxfp8": 33 / 32,
    "int8_channel": 1,
}
_WEIGHT_BYTES = {"fp8": 1, **PACKED_BYTES}  # where it is not that of bf16

# Other published models, for whose shapes nothing was chosen.
OTHERS = {
    layer.name: layer
    for layer in (
        Layer("nemotron-3-nano", "no gate, odd blocks", 2688, 1856, 128, 6, activation="relu2"),
        Layer("deepseek-v2-lite", "64 experts, 11 blocks of I", 2048, 1408, 64, 6),
        Layer("olmoe-1b-7b", "all weights are 0.8 GB", 2048, 1024, 64, 8),
        Layer("gemma4-26b-a4b", "11 blocks of H and I", 2816, 704, 128, 8, "geglu_tanh"),
        Layer("qwen3-next-80b-a3b", "ten of 512 experts", 2048, 512, 512, 10),
        Layer("qwen3-235b-a22b", "twice qwen3-30b-a3b both ways", 4096, 1536, 128, 8),
        Layer("glm-4.5-air", "11 blocks of I", 4096, 1408, 128, 8),
        Layer("minimax-m2", "256 experts of H 3072", 3072, 1536, 256, 8),
        Layer("kimi-k2", "34 GB a layer", 7168, 2048, 384, 8),
        Layer("dbrx", "four of 16 wide experts", 6144, 10752, 16, 4),
        Layer("llama4-scout", "one expert a token", 5120, 8192, 16, 1),
    )
}
# The layer for which DeepGEMM publishes a time over four H200s, of 8192 tokens each in FP8.
SPREAD = {"e384": Layer("e384", "six of 384 experts", 7168, 3072, 384, 6)}
MODELS: dict[str, Layer] = {**PUBLISHED, **OTHERS, **SPREAD, **SMALL}
DEFAULT_MODELS = tuple(PUBLISHED)
DEFAULT_TOKENS = (1, 8, 16, 64, 256, 1024, 4096, 16384)
DEFAULT_SKEWS = ("uniform", "zipf")
SKEWS = (*DEFAULT_SKEWS, "one_expert", "unused")


def experts_used(model: Layer, skew: str) -> int:
    """How many experts, from id 0 on, a routing can choose.

    one_expert  K: every token takes experts 0 to K-1, each of which gets T rows
    unused      the first half of the experts, or K if that is more; uniform over those
    else        all
    """
    if skew == "one_expert":
        return model.top_k
    if skew == "unused":
        return max(model.top_k, model.num_experts // 2)
    return model.num_experts


def expert_bytes(model: Layer, scheme: str = "bf16") -> int:
    """Bytes of one expert's weights and biases; those of FP8 weights without their scales."""
    weights = model.hidden * model.width + model.intermediate * model.hidden
    biases = model.width + model.hidden if model.bias else 0
    return int(weights * _WEIGHT_BYTES.get(scheme, BYTES)) + biases * BYTES


def layer_bytes(model: Layer, scheme: str = "bf16") -> int:
    """Bytes of all experts' weights and biases."""
    return model.num_experts * expert_bytes(model, scheme)
