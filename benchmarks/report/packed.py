"""The tables of the layer with packed weights; empty where no such row was measured."""

from benchmarks.report.measurements import Measurements, Point
from benchmarks.report.tables import filled, number, time_of, us

PEERS = ("triton_kernels", "FlashInfer", "Marlin", "vLLM")
# Formats of the README's table: heading, format, who has it too.
COMPARED = (
    ("MXFP4", "mxfp4", PEERS[:3]),
    ("int4", "int4_g128", PEERS[2:3]),
    ("W4A8", "int4_g128 x e4m3", PEERS[3:]),
)

# Of weights, and of tokens behind an x where they are not bf16.
_FORMATS = (
    *("mxfp4", "mxfp4 x mxfp8", "nvfp4", "int4_g32", "int4_g64", "int4_g128", "int4_g128 x e4m3"),
    *("int8_channel", "mxfp8", "mxfp8 x mxfp8"),
)
_HEAD = ["model", "format", "tokens", "floor", "jaxmoe", "of floor", "sustained", "bf16"]
_NOTE = (
    "Microseconds per whole layer in bursts, uniform routing, bf16 tokens or the format behind an "
    "x, to which the layer rounds them. *floor*: the larger of bytes (with scales) / 4.3 TB/s and "
    "FLOPs / 780 TFLOP/s. *ratio*: the time of the fastest other library over jaxmoe's, sustained "
    "where there is one."
)


def details(found: Measurements) -> str:
    """The table of every format and its peers."""
    formats = {f: found.points((f"jaxmoe[{f}]",)) for f in _FORMATS}
    points = [(p, f) for f, measured in formats.items() for p in measured]
    if not points:
        return ""
    points.sort(key=lambda pair: (pair[0][0], _FORMATS.index(pair[1]), pair[0][1]))
    head = [*_HEAD, *(f"{peer}*" for peer in PEERS), "ratio", "run"]
    parts = [filled(head, [_cells(found, *pair) for pair in points]), _NOTE]
    if note := found.peers.get("packed", {}).get("conditions"):
        parts.append(f"\\* {note}")
    return "\n\n".join(parts)


def _cells(found: Measurements, point: Point, format: str) -> list[str]:
    impl = f"jaxmoe[{format}]"
    row, loaded = found.find(*point, impl), found.loaded(*point, impl)
    theirs = [found.peer_us(*point, peer, format=format) for peer in PEERS]
    best = min((time for time in theirs if time), default=None)
    return [
        point[0],
        format,
        str(point[1]),
        time_of(found.find(*point, f"floor[{format.split()[0]}]", regime=None)),
        f"**{time_of(row)}**",
        number(row and row.floor_fraction, ".0%"),
        time_of(found.find(*point, impl, regime="sustained")),
        time_of(found.find(*point, "jaxmoe")),
        *map(us, theirs),
        number(best / loaded.us if best and loaded and loaded.us else None, ".2f"),
        found.origin(row),
    ]
