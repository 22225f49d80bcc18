"""The part of suite `layer` with packed weights, of 4 and 8 bits, beside bf16 or rounded tokens."""

import dataclasses

import jax

import jaxmoe
from benchmarks import quantized
from benchmarks.cases import Case
from benchmarks.models import PACKED_BYTES
from benchmarks.suites.entry import Entry
from benchmarks.suites.layer import layer_entry, moe_mlp, step
from jaxmoe import _formats

# Implementation: format, which is the scheme of its rows as well, and that of the tokens.
VARIANTS: dict[str, tuple[str, str | None]] = {
    **{f"jaxmoe[{format}]": (format, None) for format in PACKED_BYTES},
    "jaxmoe[int4_g128 x e4m3]": ("int4_g128", "e4m3"),
    "jaxmoe[mxfp4 x mxfp8]": ("mxfp4", "mxfp8"),
    "jaxmoe[mxfp8 x mxfp8]": ("mxfp8", "mxfp8"),
}


def entries(case: Case) -> list[Entry]:
    """Returns the layer in each format whose groups divide it."""
    return [
        _entry(case, impl, format, tokens)
        for impl, (format, tokens) in VARIANTS.items()
        if divides(format, case.model.hidden) and divides(format, case.model.intermediate)
    ]


def divides(format: str, size: int) -> bool:
    """Whether an axis of so many elements may be contracted, or stored, in a format."""
    return all(size % step == 0 for step in _formats.QUANTIZED[format].steps)


def _entry(case: Case, impl: str, format: str, tokens: str | None) -> Entry:
    def sets() -> list[jaxmoe.Experts]:
        made = quantized.weight_sets(case, format)
        return [dataclasses.replace(experts, token_format=tokens) for experts in made]

    def error(y: jax.Array) -> float:
        return quantized.error(case, y, sets()[0], rounds_tokens=False)

    entry = layer_entry(case, "moe_mlp", impl, step(moe_mlp), sets=sets, scheme=format, error=error)
    return dataclasses.replace(entry, weight_sets=quantized.count(case.sets, case.model))
