"""Tables in Markdown, and how microseconds look in them."""

# Columns set left.
_TEXT = ("model", "skew", "impl", "regime", "note", "product", "heuristics", "best tile", "best")


def us(value: float | None) -> str:
    """Returns microseconds with three digits or more, "-" for none."""
    if not value:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def table(head: list[str], body: list[list[str]]) -> str:
    """Returns a table of cells that are text already."""
    rule = ["---" if name in _TEXT else "--:" for name in head]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *body])


def filled(head: list[str], body: list[list[str]]) -> str:
    """Returns the same without the columns that hold nothing but "-"."""
    kept = [i for i in range(len(head)) if any(cells[i] != "-" for cells in body)]
    return table([head[i] for i in kept], [[cells[i] for i in kept] for cells in body])
