"""Shapes of the MoE layers that are measured (plain data: nothing here imports JAX)."""

import dataclasses

BYTES = 2  # of a bfloat16 or float16 element


@dataclasses.dataclass(frozen=True)
class Model:
    """One MoE layer of a published model.

    Attributes:
      hidden, intermediate, num_experts, top_k: H, I, E, K.
      clamp: (alpha, beta, limit) of the clamped SwiGLU; None for plain SwiGLU.
      bias: whether both products add a bias.
      gate_up: order of the two halves of the first product.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    clamp: tuple[float, float, float] | None = None
    bias: bool = False
    gate_up: str = "gate_up"

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights and biases."""
        elements = 3 * self.hidden * self.intermediate
        if self.bias:
            elements += 2 * self.intermediate + self.hidden
        return elements * BYTES

    @property
    def layer_bytes(self) -> int:
        """Bytes of all experts' weights and biases."""
        return self.num_experts * self.expert_bytes


_GPT_OSS = {"clamp": (1.702, 1.0, 7.0), "bias": True, "gate_up": "interleaved"}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("mixtral-8x7b", hidden=4096, intermediate=14336, num_experts=8, top_k=2),
        Model("qwen3-30b-a3b", hidden=2048, intermediate=768, num_experts=128, top_k=8),
        Model("deepseek-v3", hidden=7168, intermediate=2048, num_experts=256, top_k=8),
        Model("gpt-oss-120b", 2880, 2880, num_experts=128, top_k=4, **_GPT_OSS),
        # Small enough for a CPU; not part of the default run.
        Model("tiny", hidden=64, intermediate=32, num_experts=8, top_k=2),
        Model("tiny-bias", 64, 32, num_experts=8, top_k=2, **_GPT_OSS),
    )
}

DEFAULT_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b")
DEFAULT_TOKENS = (1, 8, 16, 64, 256, 1024, 4096, 16384)
SKEWS = ("uniform", "zipf")
