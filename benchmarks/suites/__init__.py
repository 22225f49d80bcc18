"""The suites by name. A suite turns a case into entries; `benchmarks.runner` times any entry."""

from collections.abc import Callable

from benchmarks.cases import Case
from benchmarks.suites import layer, ops, routing, stack, tiles
from benchmarks.suites.entry import Entry

SUITES: dict[str, Callable[[Case], list[Entry]]] = {
    "layer": layer.entries,
    "ops": ops.entries,
    "tiles": tiles.entries,
    "stack": stack.entries,
    "routing": routing.entries,
}

# Models and numbers of tokens of a plain run, where a suite is not about all of them.
GRIDS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "stack": (stack.DEFAULT_MODELS, stack.DEFAULT_TOKENS),
    "routing": (routing.DEFAULT_MODELS, routing.DEFAULT_TOKENS),
}
