"""The MoE layers that are measured: the shapes of the tests, and the grid of a default run."""

from jaxmoe._testing import MODELS as PUBLISHED
from jaxmoe._testing import SMALL
from jaxmoe._testing import Layer as Layer

BYTES = 2  # of a bfloat16 or float16 element

MODELS: dict[str, Layer] = {**PUBLISHED, **SMALL}
DEFAULT_MODELS = tuple(PUBLISHED)
DEFAULT_TOKENS = (1, 8, 16, 64, 256, 1024, 4096, 16384)
SKEWS = ("uniform", "zipf")


def expert_bytes(model: Layer) -> int:
    """Bytes of one expert's weights and biases."""
    elements = model.hidden * model.width + model.intermediate * model.hidden
    if model.bias:
        elements += model.width + model.hidden
    return elements * BYTES


def layer_bytes(model: Layer) -> int:
    """Bytes of all experts' weights and biases."""
    return model.num_experts * expert_bytes(model)
