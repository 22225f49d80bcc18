"""Tables of experts over several devices: FP8, training, the two ways of "direct" alone."""

from collections.abc import Sequence

from benchmarks.report.measurements import Measurements, by_model
from benchmarks.report.tables import filled, number, time_of
from benchmarks.rows import Row
from benchmarks.suites import ep, ep_exchange, ep_train

_WAYS = ["model", "devices", "tokens", "local", *ep.DISPATCHES, "direct over local"]
_FP8_NOTE = (
    "Microseconds of one layer with weights in fp8_block, to which tokens travel in FP8; *local*: "
    "what a device computes of it without any communication, of tokens that are quantized."
)
_TRAIN_NOTE = (
    "Microseconds of forward and backward, bf16: y and the gradients of x, routing weights and "
    "weights; *local*: what a device computes of it without any communication."
)
_SENT = ["model", "devices", "tokens"]
for _name in ("dispatch", "fp8 dispatch", "combine"):
    _SENT += [_name, f"{_name} GB/s"]
_SENT_NOTE = (
    'Microseconds of what `dispatch="direct"` sends, without experts between; GB/s of what a '
    "device sends to all others."
)


def summary(found: Measurements) -> str:
    """The tables, "" if nothing was measured."""
    fp8 = [*ep.FP8_VARIANTS], ep.FP8_LOCAL
    train = [*ep_train.VARIANTS], ep.LOCAL
    tables = (
        _table(_WAYS, _ways(found, "ep", *fp8), _FP8_NOTE),
        _table(_WAYS, _ways(found, "ep_train", *train), _TRAIN_NOTE),
        _table(_SENT, _sent(found), _SENT_NOTE),
    )
    return "\n\n".join(filter(None, tables))


def _table(head: list[str], body: list[list[str]], note: str) -> str:
    return f"{filled(head, body)}\n\n{note}" if body else ""


_Place = tuple[str, int, int]


def _cases(
    found: Measurements, suite: str, impls: Sequence[str]
) -> list[tuple[_Place, dict[str, Row]]]:
    """The fastest row of each implementation by model, devices and tokens."""
    rows: dict[_Place, dict[str, Row]] = {}
    for row in found.rows:
        if row.suite == suite and row.us and row.skew == "uniform" and row.impl in impls:
            case = rows.setdefault((row.model, row.devices or 1, row.tokens), {})
            known = case.get(row.impl)
            if known is None or row.us < (known.us or 0.0):
                case[row.impl] = row
    return [(place, rows[place]) for place in by_model(rows)]


def _ways(found: Measurements, suite: str, ways: list[str], local: str) -> list[list[str]]:
    body = []
    for (model, devices, tokens), rows in _cases(found, suite, [*ways, local]):
        alone, times = rows.get(local), [rows.get(way) for way in ways]
        direct = times[ep.DISPATCHES.index("direct")]
        ratio = direct.us / alone.us if direct and direct.us and alone and alone.us else None
        cells = *map(time_of, (alone, *times)), number(ratio, ".2f")
        body.append([model, str(devices), str(tokens), *cells])
    return body


def _sent(found: Measurements) -> list[list[str]]:
    body = []
    for (model, devices, tokens), rows in _cases(found, "ep", ep_exchange.IMPLS):
        cells = [model, str(devices), str(tokens)]
        for impl in ep_exchange.IMPLS:
            row = rows.get(impl)
            cells += [time_of(row), number(row and row.sent_gbps, ".0f")]
        body.append(cells)
    return body
