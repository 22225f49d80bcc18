"""The suites by name. A suite turns a case into entries; `benchmarks.runner` times any entry."""

from collections.abc import Callable

from benchmarks.cases import Case
from benchmarks.suites import layer, ops, tiles
from benchmarks.suites.entry import Entry

SUITES: dict[str, Callable[[Case], list[Entry]]] = {
    "layer": layer.entries,
    "ops": ops.entries,
    "tiles": tiles.entries,
}
