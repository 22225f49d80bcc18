"""The table of the layer in bf16: every number of tokens, next to what others take."""

from benchmarks.report.measurements import Measurements, Point, by_model, us_to_compare
from benchmarks.report.tables import filled, number, time_of, us, where

# heading, implementation
_MEASURED = (
    ("ragged_dot", "xla_ragged_dot"),
    ("tokamax", "tokamax"),
    ("torch", "torch_grouped_mm"),
)
# heading, implementation, regime
_PEERS = (
    ("FlashInfer*", "FlashInfer", "loaded"),
    ("CuTe DSL*, burst", "FlashInfer CuTe DSL", "burst"),
    ("loaded", "FlashInfer CuTe DSL", "loaded"),
    ("SonicMoE*", "SonicMoE", "loaded"),
)
_NOTE = (
    "Microseconds per whole layer, bf16, routing given, uniform; weights in checkpoint order "
    '(layout "nk"), *[E,K,N]* with the contraction first. *floor*: the larger of {rates}. '
    "*sustained*: under a second of load, for compute-heavy rows. *vs "
    "dense*: TFLOP/s over those of `jnp.matmul` with equal FLOPs."
)
_IN_TURN_NOTE = (
    "Microseconds of a whole layer in bf16, uniform routing, both on one card in turn, in bursts "
    "and under load; *ratio*: the other's time over jaxmoe's."
)


def summary(found: Measurements) -> str:
    """The table, what it says, and under which conditions others were measured."""
    head = ["model", "tokens", "floor", "jaxmoe", "of floor", "[E,K,N]", "sustained", "vs dense"]
    head += [heading for heading, _ in _MEASURED] + [heading for heading, *_ in _PEERS] + ["run"]
    parts = [
        filled(head, [_cells(found, point) for point in found.points()]),
        _NOTE.format(rates=found.rates),
    ]
    for heading, points in _losses(found).items():
        parts.append(f"{heading} is faster than jaxmoe here: {where(points)}.")
    if found.peers:
        names = "; ".join(f"{name} {how}" for name, how in found.peers["impls"].items())
        parts.append(f"\\* Not measured in these runs. {names}. {found.peers['conditions']}")
    return "\n\n".join(parts)


def in_turn(found: Measurements) -> str:
    """The table of others that were measured in turn with jaxmoe on one card, "" without any."""
    head = ["model", "tokens", "impl", "jaxmoe", "other", "ratio", "loaded", "other", "ratio"]
    rows = {
        (row["model"], row["tokens"], row["impl"], row["regime"]): row
        for row in found.peers.get("rows", ())
        if "jaxmoe_us" in row
    }
    body = []
    for model, tokens, impl in by_model(dict.fromkeys(key[:3] for key in rows)):
        cells = [model, str(tokens), impl]
        for regime in ("burst", "loaded"):
            row = rows.get((model, tokens, impl, regime))
            times = (row["jaxmoe_us"], row["us"]) if row else (None, None)
            cells += [us(time) for time in times]
            cells.append(number(row and row["us"] / row["jaxmoe_us"], ".2f"))
        body.append(cells)
    if not body:
        return ""
    how = " ".join(f"{run['date']}, {run['peer']}. {run['how']}" for run in found.peers["beside"])
    return f"{filled(head, body)}\n\n{_IN_TURN_NOTE} {how}"


def _cells(found: Measurements, point: Point) -> list[str]:
    ours = found.find(*point, "jaxmoe")
    return [
        point[0],
        str(point[1]),
        time_of(found.find(*point, "floor", regime=None)),
        f"**{time_of(ours)}**",
        number(ours and ours.floor_fraction, ".0%"),
        time_of(found.find(*point, "jaxmoe[kn]")),
        time_of(found.find(*point, "jaxmoe", regime="sustained")),
        number(ours and ours.vs_dense, ".2f"),
        *(time_of(found.find(*point, impl)) for _, impl in _MEASURED),
        *(us(found.peer_us(*point, name, regime=regime)) for _, name, regime in _PEERS),
        found.origin(ours),
    ]


def _losses(found: Measurements) -> dict[str, list[Point]]:
    """Who is faster where."""
    out: dict[str, list[Point]] = {}
    for point in found.points():
        ours, loaded = found.find(*point, "jaxmoe"), found.loaded(*point, "jaxmoe")
        others = {name: found.find(*point, impl) for name, impl in _MEASURED}
        pairs = [(name, row and row.us, ours and ours.us) for name, row in others.items()]
        for _, name, regime in _PEERS:
            theirs = found.peer(*point, name, regime=regime)
            where_ours = " in bursts" if regime == "burst" else ""
            row = ours if regime == "burst" else loaded
            if theirs:
                pairs += [(f"{name}*{where_ours}", theirs["us"], us_to_compare(theirs, row))]
        for name, theirs_us, ours_us in pairs:
            if theirs_us and ours_us and theirs_us < ours_us:
                out.setdefault(name, []).append(point)
    return out
