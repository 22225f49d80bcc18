"""The part of suite `layer` with weights in FP8: each format against what else JAX offers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxmoe
from benchmarks import quantized
from benchmarks.baselines import composed, dense, xla_ragged_dot
from benchmarks.cases import Case
from benchmarks.quantized import SCHEME
from benchmarks.suites.entry import Entry, chain_length
from benchmarks.suites.layer import MOST_LAYERS, Step, even_work, layer_entry, moe_mlp, step

# Implementation: format, whether its scales are static, `Experts.accum`.
VARIANTS: dict[str, tuple[str, bool, str | None]] = {
    "jaxmoe[fp8_tensor]": ("fp8_tensor", True, "fast"),
    "jaxmoe[fp8_tensor_dynamic]": ("fp8_tensor", False, None),
    "jaxmoe[fp8_tensor_promoted]": ("fp8_tensor", True, "promoted"),
    "jaxmoe[fp8_channel]": ("fp8_channel", False, None),
    "jaxmoe[fp8_block]": ("fp8_block", False, None),
}
DEQUANTIZED = f"{xla_ragged_dot.NAME}[dequantized]"

_DEQUANTIZED_FORMAT = "fp8_block"
_DEQUANTIZING = 5  # bytes moved for each weight: read, written as bf16, read again


def entries(case: Case) -> list[Entry]:
    """Returns the implementations of the layer with FP8 weights for one case."""
    static = functools.cache(lambda: quantized.with_static_scales(case))
    out = []
    for impl, (format, is_static, accum) in VARIANTS.items():
        dynamic = functools.partial(quantized.weight_sets, case, format)
        one = step(_layer, accum=accum)  # bf16 tokens, which it quantizes itself
        out.append(
            _entry(
                case,
                impl,
                one,
                static if is_static else dynamic,
                # Scales made of the check's data are the static ones.
                expected=static if format == "fp8_tensor" else dynamic,
            )
        )
    ours = out[0]
    out.append(_dequantized_entry(case))
    if ours.work.compute_heavy(case.ceiling, SCHEME):
        make = functools.partial(dense.fp8_layers, case.model, case.num_rows, seed=case.seed)
        dense_entry = Entry("moe_mlp", dense.FP8_NAME, ours.work, None, ours.layers, make, None)
        out.append(dataclasses.replace(dense_entry, scheme=SCHEME))
    return out


def _layer(x: Any, r: Any, w: jaxmoe.Experts, residual: Any, *, accum: str | None) -> jax.Array:
    return moe_mlp(x, r, dataclasses.replace(w, accum=accum), residual)


def _entry(
    case: Case,
    impl: str,
    one: Step,
    sets: Callable[[], Sequence[jaxmoe.Experts]],
    *,
    expected: Callable[[], Sequence[jaxmoe.Experts]],
    rounds_tokens: bool = True,
) -> Entry:
    def error(y: jax.Array) -> float:
        return quantized.error(case, y, expected()[0], rounds_tokens=rounds_tokens)

    entry = layer_entry(case, "moe_mlp", impl, one, sets=sets, scheme=SCHEME, error=error)
    return dataclasses.replace(entry, weight_sets=quantized.count(case.sets, case.model))


def _dequantized_entry(case: Case) -> Entry:
    model, slow, even = case.model, xla_ragged_dot, even_work(case, SCHEME)
    sets = functools.partial(quantized.weight_sets, case, _DEQUANTIZED_FORMAT)
    one = step(composed.layer, product=slow.dequantized_product)
    entry = _entry(case, DEQUANTIZED, one, sets, expected=sets, rounds_tokens=False)
    times = slow.times_floor(even, model.num_experts)
    times += _DEQUANTIZING * model.num_experts / case.even_hit
    width = max(model.hidden, model.intermediate)
    return dataclasses.replace(
        entry,
        layers=min(chain_length(even, times_floor=times, scheme=SCHEME), MOST_LAYERS),
        refusal=slow.refusal(even.flops, model.num_experts, case.num_rows, width),
    )
