"""The table of docs/models.md and that of the tests are of the same blocks, in the same order."""

import inspect
import re

from tests.parity import layers, page, table


def test_the_page_has_the_rows_of_the_table():
    rows = [(row.family, row.block) for row in page.rows()]
    assert rows == [(case.family, case.block) for case in table.CASES]


def test_the_page_has_no_row_that_is_not_read():
    lines = page.PAGE.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| `") and "<br>" in line for line in lines) == len(page.rows())


def test_a_row_of_more_than_one_call_names_its_function():
    functions = inspect.getmembers(layers, inspect.isfunction)
    own = {name for name, function in functions if function.__module__ == layers.__name__}
    for row, case in zip(page.rows(), table.CASES, strict=True):
        named = [name for name in re.findall(r"`(\w+)`", row.remark) if name in own]
        assert named == ([case.own.__name__] if case.own else []), row
