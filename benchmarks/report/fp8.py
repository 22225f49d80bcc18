"""The tables of the layer with FP8 weights; empty where no such row was measured."""

from benchmarks.report.measurements import Measurements, Point
from benchmarks.report.tables import filled, geometric_mean, number, time_of, us, where

# Formats that a peer has too: heading, format.
COMPARED = (("tensor", "fp8_tensor"), ("block", "fp8_block"))

# Who has these products alone, and the layer that they are compared with.
PRODUCTS, OF_PRODUCTS = "DeepGEMM", "jaxmoe[fp8_block]"

_FLOOR = "floor[fp8]"
# All ways to run the layer: heading, implementation.
_ALL = (
    ("tensor", "jaxmoe[fp8_tensor]"),
    ("dynamic", "jaxmoe[fp8_tensor_dynamic]"),
    ("promoted", "jaxmoe[fp8_tensor_promoted]"),
    ("channel", "jaxmoe[fp8_channel]"),
    ("block", "jaxmoe[fp8_block]"),
)
_TENSOR = _ALL[0][1]
_DEQUANTIZED = "xla_ragged_dot[dequantized]"
_NOTE = (
    "The same layer with FP8 weights (e4m3): bf16 tokens in and out, quantized inside the "
    "measurement. *tensor*: a scale for each expert's matrix, static scales of tokens and "
    'activations, `accum="fast"`. *block*: a scale for 128 x 128 weights and for 128 neighbours of '
    "a token. *floor*: with one byte for each weight and 1350 TFLOP/s. *ratio*: FlashInfer's time "
    "over jaxmoe's, sustained where there is one."
)
_DETAILS_NOTE = (
    "Microseconds per whole layer in bursts, uniform routing. *tensor*: static scales and "
    '`accum="fast"`; *promoted*: the same with `accum="promoted"`; *dynamic*: scales made of all '
    "tokens and rows, default `accum`, as in *channel*. *of floor* is that of *tensor*. "
    "*ragged_dot*: `jax.lax.ragged_dot` on weights that the program dequantizes to bf16."
)
_DENSE_NOTE = (
    " *vs dense*: the TFLOP/s of *tensor* over those of two FP8 products of equal FLOPs through "
    "cuBLASLt."
)


def points(found: Measurements) -> list[Point]:
    """Models and tokens of every layer with FP8 weights."""
    return found.points(impl for _, impl in _ALL)


def summary(found: Measurements) -> str:
    """The table of the formats that FlashInfer has too, and how they compare."""
    if not points(found):
        return ""
    head = ["model", "tokens", "floor"]
    for heading, _ in COMPARED:
        head += [heading, "sustained", "FlashInfer*", "ratio"]
    parts = [filled([*head, "run"], [_cells(found, point) for point in points(found)]), _NOTE]
    for heading, format in COMPARED:
        ratios = {point: _ratio(found, point, format) for point in points(found)}
        known = {point: ratio for point, ratio in ratios.items() if ratio}
        if not known:
            continue
        mean = geometric_mean(known.values())
        text = f"FP8 {heading}: geometric mean of the ratios {mean:.2f} ({len(known)} points)."
        if lost := where(point for point, ratio in known.items() if ratio < 1):
            text += f" FlashInfer* is faster than jaxmoe here: {lost}."
        parts.append(text)
    products = {point: over_products(found, point) for point in points(found)}
    if longer := where(point for point, ratio in products.items() if ratio and ratio < 1):
        parts.append(
            f"The two products alone of {PRODUCTS}*, in the format of *block*, take less than "
            f"jaxmoe's whole layer here: {longer}."
        )
    if note := found.peers.get("fp8", {}).get("conditions"):
        parts.append(f"\\* FP8: {note}")
    return "\n\n".join(parts)


def details(found: Measurements) -> str:
    """The table of every format, next to a dense product and to bf16."""
    if not points(found):
        return ""
    head = ["model", "tokens", "floor", *(heading for heading, _ in _ALL)]
    head += ["of floor", "vs dense", "ragged_dot", "bf16", "bf16 / tensor"]
    body = [_detail_cells(found, point) for point in points(found)]
    text = filled(head, body)
    return f"{text}\n\n{_DETAILS_NOTE}{_DENSE_NOTE if 'vs dense' in text else ''}"


def _cells(found: Measurements, point: Point) -> list[str]:
    cells = [point[0], str(point[1]), time_of(found.find(*point, _FLOOR, regime=None))]
    ours = [found.find(*point, f"jaxmoe[{format}]") for _, format in COMPARED]
    for row, (_, format) in zip(ours, COMPARED, strict=True):
        cells += [
            f"**{us(row.us)}**" if row else "-",
            time_of(found.find(*point, f"jaxmoe[{format}]", regime="sustained")),
            us(found.peer_us(*point, "FlashInfer", format=format)),
            number(_ratio(found, point, format), ".2f"),
        ]
    runs = dict.fromkeys(found.origin(row) for row in ours if row)
    return [*cells, ", ".join(runs) or "-"]


def _detail_cells(found: Measurements, point: Point) -> list[str]:
    rows = [found.find(*point, impl) for _, impl in _ALL]
    tensor, plain = found.find(*point, _TENSOR), found.find(*point, "jaxmoe")
    gain = plain.us / tensor.us if tensor and plain and tensor.us and plain.us else None
    return [
        point[0],
        str(point[1]),
        time_of(found.find(*point, _FLOOR, regime=None)),
        *map(time_of, rows),
        number(tensor and tensor.floor_fraction, ".0%"),
        number(tensor and tensor.vs_dense, ".2f"),
        time_of(found.find(*point, _DEQUANTIZED)),
        time_of(plain),
        number(gain, ".2f"),
    ]


def over_products(found: Measurements, point: Point) -> float | None:
    """The time of another library's two products over that of jaxmoe's layer."""
    return found.ratio(point, OF_PRODUCTS, (PRODUCTS,), format="fp8_block")


def _ratio(found: Measurements, point: Point, format: str) -> float | None:
    return found.ratio(point, f"jaxmoe[{format}]", ("FlashInfer",), format=format)
