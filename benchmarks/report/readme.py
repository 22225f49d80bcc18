"""The README's ratios and its table: whole layers next to the fastest of the other libraries."""

import dataclasses

from benchmarks.models import OTHERS
from benchmarks.report import fp8, packed, train
from benchmarks.report.measurements import Measurements, Point, by_model
from benchmarks.report.tables import filled, geometric_mean, table, time_of, where
from benchmarks.rows import Row

_PEERS = ("FlashInfer", "FlashInfer CuTe DSL", "SonicMoE")
_FIRST = ["one layer", "against", "ratio", "slower at"]
_FIRST_NOTE = (
    "Their time over jaxmoe's on one NVIDIA H200, the geometric mean of models and numbers of "
    "tokens: above 1 jaxmoe is faster. [All ratios, where jaxmoe loses, and how the others were "
    "measured](#numbers)."
)
_RATIOS = ["one layer", "against", "points", "mean", "least", "most", "slower at"]
_RATIOS_NOTE = (
    "Their time over jaxmoe's on one NVIDIA H200, so above 1 jaxmoe is faster; *mean* is the "
    "geometric one, and *slower at* names every model and number of tokens where jaxmoe loses. "
    "\\* measured on another day (2026-11-20 to 22) and another card of the kind, under load or in "
    "bursts: compared with jaxmoe in the same regime, where it was measured in both by the smaller "
    "ratio. Where a library was timed [in turn with jaxmoe on one card]"
    "(benchmarks/results/h200/README.md#the-layer-in-bf16-in-turn-with-others-on-one-card), that "
    "ratio counts. SonicMoE's times have its router in them, and its tiles were not tuned. Two "
    "runs of jaxmoe give the same bits in every configuration; those of CuTe DSL, as it was timed, "
    "do not."
)
_NOTE = (
    "Microseconds of one layer with uniform routing, in bursts. *ratio\\**: what the fastest "
    "other library takes over what jaxmoe does in the same regime, which may be load. *of floor*: "
    "the larger of bytes / 4.3 TB/s and FLOPs / 780 TFLOP/s, over the time. *FP8 tensor*: a scale "
    "for each expert's matrix, static scales of tokens; *FP8 block*: a scale for each 128 x 128 "
    "weights; *MXFP4*, *int4*: weights of 4 bits (groups of 128) beside bf16 tokens; *W4A8*: the "
    "latter beside tokens quantized to e4m3. *training*: forward and backward in bf16."
)


@dataclasses.dataclass(frozen=True)
class Column:
    """One way to run the layer, and who else was timed at it.

    Attributes:
      title: what it is, in words.
      impl, suite: of jaxmoe's rows.
      peers: other libraries.
      peer_fields: what their rows have besides, see `Measurements.peer_us`.
    """

    title: str
    impl: str
    peers: tuple[str, ...]
    suite: str = "layer"
    peer_fields: tuple[tuple[str, str], ...] = ()

    def row(self, found: Measurements, point: Point) -> Row | None:
        """jaxmoe's row in bursts."""
        return found.find(*point, self.impl, suite=self.suite)

    def ratio(self, found: Measurements, point: Point) -> float | None:
        """The time of the fastest other library over jaxmoe's."""
        fields = dict(self.peer_fields)
        return found.ratio(point, self.impl, self.peers, self.suite, **fields)


COLUMNS = (
    Column("bf16", "jaxmoe", _PEERS),
    *(
        Column(f"FP8 {name}", f"jaxmoe[{format}]", ("FlashInfer",), "layer", (("format", format),))
        for name, format in fp8.COMPARED
    ),
    *(
        Column(name, f"jaxmoe[{format}]", peers, "layer", (("format", format),))
        for name, format, peers in packed.COMPARED
    ),
    Column("training", "jaxmoe", ("SonicMoE",), "train", train.PEER_FIELDS),
)
_IN_WORDS = (
    "forward, bf16",
    "forward, FP8 with a scale for each expert",
    "forward, FP8 with a scale for each 128 x 128",
    "forward, MXFP4 weights and bf16 tokens",
    "forward, int4 weights in groups of 128 and bf16 tokens",
    "forward, int4 weights in groups of 128 and e4m3 tokens",
    "forward and backward, bf16",
)


def points(found: Measurements) -> list[Point]:
    """Models and tokens of every column, without models that have a table of their own."""
    all_points = {p for c in COLUMNS for p in found.points((c.impl,), c.suite)}
    return by_model(p for p in all_points if p[0] not in OTHERS)


def first(found: Measurements) -> str:
    """The ratios to the fastest other libraries, in a few words, "" without others."""
    body = []
    for column, title in zip(COLUMNS, _IN_WORDS, strict=True):
        body += _first_row(title, " or ".join(column.peers), _of_column(found, column))
        if column.impl == fp8.OF_PRODUCTS:
            pairs = {point: fp8.over_products(found, point) for point in points(found)}
            body += _first_row(title, f"{fp8.PRODUCTS}, its two products alone", pairs)
    return f"{table(_FIRST, body)}\n\n{_FIRST_NOTE}" if body else ""


def _first_row(title: str, names: str, found: dict[Point, float | None]) -> list[list[str]]:
    known = _known(found)
    if not known:
        return []
    lost = sum(ratio < 1 for ratio in known.values())
    places = f"{lost} of {len(known)} points" if lost else "none"
    return [[title, names, f"**{geometric_mean(known.values()):.2f}**", places]]


def ratios(found: Measurements) -> str:
    """The table of what others take over what jaxmoe takes, "" without others."""
    body = []
    for column, title in zip(COLUMNS, _IN_WORDS, strict=True):
        names = " or ".join(f"{peer}*" for peer in column.peers)
        body += _ratio_row(title, names, _of_column(found, column))
        if column.impl == fp8.OF_PRODUCTS:
            pairs = {point: fp8.over_products(found, point) for point in points(found)}
            body += _ratio_row(title, f"the two products alone of {fp8.PRODUCTS}*", pairs)
    body += _ratio_row(_IN_WORDS[0], "`jax.lax.ragged_dot`", _to_ragged_dot(found))
    return f"{table(_RATIOS, body)}\n\n{_RATIOS_NOTE}" if body else ""


def _of_column(found: Measurements, column: Column) -> dict[Point, float | None]:
    return {point: column.ratio(found, point) for point in points(found)}


def _known(ratios: dict[Point, float | None]) -> dict[Point, float]:
    return {point: ratio for point, ratio in ratios.items() if ratio}


def _to_ragged_dot(found: Measurements) -> dict[Point, float | None]:
    def ratio(point: Point) -> float | None:
        ours, other = found.find(*point, "jaxmoe"), found.find(*point, "xla_ragged_dot")
        return other.us / ours.us if ours and other and ours.us and other.us else None

    return {point: ratio(point) for point in found.points()}


def _ratio_row(title: str, names: str, found: dict[Point, float | None]) -> list[list[str]]:
    known = _known(found)
    if not known:
        return []
    lost = where(point for point, ratio in known.items() if ratio < 1) or "-"
    least, most = (f"{pick(known.values()):.2f}" for pick in (min, max))
    mean = f"**{geometric_mean(known.values()):.2f}**"
    return [[title, names, str(len(known)), mean, least, most, lost]]


def numbers(found: Measurements) -> str:
    """The table of whole layers."""
    head, body = ["model", "tokens"], []
    for column in COLUMNS:
        head += [column.title, *(["of floor"] if column is COLUMNS[0] else []), "ratio*"]
    for point in points(found):
        cells = [point[0], str(point[1])]
        for column in COLUMNS:
            row, ratio = column.row(found, point), column.ratio(found, point)
            cells.append(time_of(row))
            if column is COLUMNS[0]:
                part = row and row.floor_fraction
                cells.append(f"{part:.0%}" if part else "-")
            cells.append(f"{ratio:.2f}" if ratio else "-")
        body.append(cells)
    return f"{filled(head, body)}\n\n{_NOTE}"
