"""Tables in Markdown, and how numbers look in them."""

import math
from collections.abc import Iterable
from typing import Any

BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
# Columns set left.
_TEXT = (
    *("model", "skew", "impl", "regime", "note", "product", "heuristics", "best tile", "best"),
    *("one layer", "against", "slower at"),
)


def us(value: float | None) -> str:
    """Microseconds with three digits or more, "-" for none."""
    if not value:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def number(value: float | None, spec: str) -> str:
    """A number in the format `spec`, "-" for none."""
    return format(value, spec) if value else "-"


def time_of(row: Any) -> str:
    """Microseconds of a row, "-" for no row."""
    return us(row and row.us)


def table(head: list[str], body: list[list[str]]) -> str:
    """A table of cells that are text already."""
    rule = ["---" if name in _TEXT else "--:" for name in head]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *body])


def filled(head: list[str], body: list[list[str]]) -> str:
    """A table without the columns that hold nothing but "-"."""
    if any(len(cells) != len(head) for cells in body):
        raise ValueError(f"rows of {sorted(map(len, body))} cells under {len(head)} headings")
    kept = [i for i in range(len(head)) if any(cells[i] != "-" for cells in body)]
    return table([head[i] for i in kept], [[cells[i] for i in kept] for cells in body])


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of numbers above 0."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms))


def where(points: Iterable[tuple[str, int]]) -> str:
    """Points in words: "mixtral-8x7b at 16, 64; qwen3-30b-a3b at 256"."""
    by_name: dict[str, list[str]] = {}
    for name, tokens in points:
        by_name.setdefault(name, []).append(str(tokens))
    return "; ".join(f"{name} at {', '.join(tokens)}" for name, tokens in by_name.items())


def replace_section(text: str, name: str, section: str) -> str:
    """`text` with `section` between the markers of that name."""
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in text or end not in text:
        raise ValueError(f"no {begin} ... {end} in the file")
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    return f"{before}{begin}\n{section}\n{end}{after}"
