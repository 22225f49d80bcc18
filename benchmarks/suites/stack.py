"""Suite `stack`: the 48 expert layers of one decoding step in one program.

The chain of suite `layer` cycles through a few sets of weights. Here every layer has its own as far
as memory allows, as in a model. Both alternate, so that their times per layer can be compared.
"""

import dataclasses

import jax

import jaxmoe
from benchmarks import quantized
from benchmarks.cases import Case, stack_size
from benchmarks.suites import layer
from benchmarks.suites.entry import Entry
from benchmarks.suites.layer_packed import divides

DEFAULT_MODELS = ("qwen3-30b-a3b",)
DEFAULT_TOKENS = (1, 8)
LAYERS = 48
OTHERS = 16  # distinct layers in each other format, which lie in memory beside those in bf16
CHAIN = "jaxmoe[chain]"  # what suite `layer` measures
# Implementation: format of the weights, scheme of its row.
FORMATS = {
    "jaxmoe[fp8_block]": ("fp8_block", quantized.SCHEME),
    "jaxmoe[int4_g128]": ("int4_g128", "int4_g128"),
}


def entries(case: Case) -> list[Entry]:
    """Returns the stack in bf16, the chain of suite `layer`, and the stack in other formats."""
    one = layer.step(layer.moe_mlp)
    count = stack_size(case.model, LAYERS, jax.devices()[0])
    stack = layer.layer_entry(
        case, "moe_mlp", "jaxmoe", one, layers=LAYERS, sets=lambda: case.stack(count)
    )
    others = [
        _entry(case, impl, format, scheme, count)
        for impl, (format, scheme) in FORMATS.items()
        if divides(format, case.model.hidden) and divides(format, case.model.intermediate)
    ]
    return [
        dataclasses.replace(stack, weight_sets=count),
        layer.layer_entry(case, "moe_mlp", CHAIN, one),
        *others,
    ]


def _entry(case: Case, impl: str, format: str, scheme: str, count: int) -> Entry:
    def sets() -> list[jaxmoe.Experts]:
        return [quantized.of(w, format) for w in case.stack(count)[:OTHERS]]

    def error(y: jax.Array) -> float:
        first = quantized.weight_sets(case, format)[0]
        return quantized.error(case, y, first, rounds_tokens=scheme == quantized.SCHEME)

    one = layer.step(layer.moe_mlp)
    options = {"sets": sets, "scheme": scheme, "error": error}
    entry = layer.layer_entry(case, "moe_mlp", impl, one, layers=LAYERS, **options)
    return dataclasses.replace(entry, weight_sets=min(count, OTHERS))
