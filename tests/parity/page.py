"""The rows of docs/models.md: calls by family and class."""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_ROW = re.compile(r"^\| `(\w+)`<br>`(\w+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)
_SAME = re.compile(r"as `(\w+)`")


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      family, block: what it is of.
      routing: a call of `jaxmoe.route`, or empty.
      experts: a call of `jaxmoe.Experts`, or empty.
      options: keyword arguments of `jaxmoe.moe_mlp`, or empty.
      remark: text.
    """

    family: str
    block: str
    routing: str
    experts: str
    options: str
    remark: str


def rows() -> list[Row]:
    """Returns the rows; a routing "as `family`" is that of the first row of the family."""
    found: list[Row] = []
    for cells in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        family, block, routing, *others = cells
        experts, options, remark = ("" if cell == "-" else cell for cell in others)
        if same := _SAME.fullmatch(routing):
            routing = next(row.routing for row in found if row.family == same[1])
        code = [cell.removeprefix("-").strip("`") for cell in (routing, experts, options)]
        found.append(Row(family, block, *code, remark))
    return found
