"""The suites by name. A suite turns a case into entries; `benchmarks.runner` times any entry."""

from collections.abc import Callable

from benchmarks.cases import Case
from benchmarks.suites import (
    ep,
    ep_train,
    layer,
    layer_fp8,
    layer_packed,
    lora,
    ops,
    routing,
    stack,
    tiles,
    train,
)
from benchmarks.suites.entry import Entry


def _layer(case: Case) -> list[Entry]:
    return [*layer.entries(case), *layer_fp8.entries(case), *layer_packed.entries(case)]


SUITES: dict[str, Callable[[Case], list[Entry]]] = {
    "layer": _layer,
    "ops": ops.entries,
    "tiles": tiles.entries,
    "stack": stack.entries,
    "routing": routing.entries,
    "train": train.entries,
    "ep": ep.entries,
    "ep_train": ep_train.entries,
    "lora": lora.entries,
}

# Models and numbers of tokens of a plain run, where a suite is not about all of them.
GRIDS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "stack": (stack.DEFAULT_MODELS, stack.DEFAULT_TOKENS),
    "routing": (routing.DEFAULT_MODELS, routing.DEFAULT_TOKENS),
    "train": (train.DEFAULT_MODELS, train.DEFAULT_TOKENS),
    "ep": (ep.DEFAULT_MODELS, ep.DEFAULT_TOKENS),
    "ep_train": (ep_train.DEFAULT_MODELS, ep_train.DEFAULT_TOKENS),
    "lora": (lora.DEFAULT_MODELS, lora.DEFAULT_TOKENS),
}
