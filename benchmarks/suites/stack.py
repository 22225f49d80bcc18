"""Suite `stack`: the 48 expert layers of one decoding step in one program.

The chain of suite `layer` cycles through a few sets of weights. Here every layer has its own as far
as memory allows, as in a model. Both alternate, so that their times per layer can be compared.
"""

import dataclasses

import jax

from benchmarks.cases import Case, stack_size
from benchmarks.suites import layer
from benchmarks.suites.entry import Entry

DEFAULT_MODELS = ("qwen3-30b-a3b",)
DEFAULT_TOKENS = (1, 8)
LAYERS = 48
CHAIN = "jaxmoe[chain]"  # what suite `layer` measures


def entries(case: Case) -> list[Entry]:
    """Returns the stack, and the chain of suite `layer`."""
    one = layer.step(layer.moe_mlp)
    count = stack_size(case.model, LAYERS, jax.devices()[0])
    stack = layer.layer_entry(
        case, "moe_mlp", "jaxmoe", one, layers=LAYERS, sets=lambda: case.stack(count)
    )
    return [
        dataclasses.replace(stack, weight_sets=count),
        layer.layer_entry(case, "moe_mlp", CHAIN, one),
    ]
