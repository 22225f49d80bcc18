"""The table of other published layers, for whose shapes nothing was chosen: times and floors."""

from benchmarks.models import OTHERS
from benchmarks.report.measurements import Measurements
from benchmarks.report.tables import filled, time_of

_TOKENS = (64, 256, 1024, 4096, 16384)
_NOTE = (
    "Microseconds of one layer in bf16, uniform routing, in bursts, and in brackets the floor over "
    "that: the larger of {rates}."
)


def table(found: Measurements) -> str:
    """A row a model and a column a number of tokens, "" if none was measured."""
    measured = {model for model, tokens in found.points() if model in OTHERS and tokens in _TOKENS}
    if not measured:
        return ""
    head = ["model", "H, I, E, K", *map(str, _TOKENS)]
    body = []
    for name, layer in OTHERS.items():
        if name in measured:
            shape = f"{layer.hidden}, {layer.intermediate}, {layer.num_experts}, {layer.top_k}"
            body.append([name, shape, *(_cell(found, name, tokens) for tokens in _TOKENS)])
    return f"{filled(head, body)}\n\n{_NOTE.format(rates=found.rates)}"


def _cell(found: Measurements, name: str, tokens: int) -> str:
    row = found.find(name, tokens, "jaxmoe")
    if row is None or not row.floor_fraction:
        return time_of(row)
    return f"{time_of(row)} ({row.floor_fraction:.0%})"
