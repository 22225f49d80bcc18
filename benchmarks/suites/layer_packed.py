"""The part of suite `layer` with packed weights: formats of 4 and 8 bits beside bf16 tokens."""

import dataclasses
import functools

import jax

from benchmarks import quantized
from benchmarks.cases import Case
from benchmarks.models import PACKED_BYTES
from benchmarks.suites.entry import Entry
from benchmarks.suites.layer import layer_entry, moe_mlp, step
from jaxmoe import _formats

# Implementation: format, which is the scheme of its rows as well.
VARIANTS: dict[str, str] = {f"jaxmoe[{format}]": format for format in PACKED_BYTES}


def entries(case: Case) -> list[Entry]:
    """Returns the layer in each format whose groups divide it."""
    return [
        _entry(case, impl, format)
        for impl, format in VARIANTS.items()
        if _divides(format, case.model.hidden) and _divides(format, case.model.intermediate)
    ]


def _divides(format: str, size: int) -> bool:
    return all(size % step == 0 for step in _formats.QUANTIZED[format].steps)


def _entry(case: Case, impl: str, format: str) -> Entry:
    sets = functools.partial(quantized.weight_sets, case, format)

    def error(y: jax.Array) -> float:
        return quantized.error(case, y, sets()[0], rounds_tokens=False)

    entry = layer_entry(case, "moe_mlp", impl, step(moe_mlp), sets=sets, scheme=format, error=error)
    return dataclasses.replace(entry, weight_sets=quantized.count(case.sets, case.model))
