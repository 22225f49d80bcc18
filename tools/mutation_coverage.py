"""A pytest plugin: which lines of the package each test runs, for `mutation.py`.

Lines that run before the first test, while modules are imported, are kept apart: no test runs them.
Caches hide lines from all tests but the first that reaches them, so JAX's are emptied before each.
Writes one file for each process into the folder that MUTATION_COVERAGE names.
"""

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import pytest

_TOOL = 4  # no other uses this number

_root = os.environ["MUTATION_ROOT"] + os.sep
_package = os.path.join(_root, "jaxmoe") + os.sep
_found: dict[str, Any] = {}
_lines: set[tuple[str, int]] = set()
_imported: dict[str, list[int]] = {}


def _line(code: Any, number: int) -> Any:
    name = code.co_filename
    if name.startswith(_package):
        _lines.add((name[len(_root) :], number))
    return sys.monitoring.DISABLE  # once a test is enough


def _by_file() -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for name, number in sorted(_lines):
        out.setdefault(name, []).append(number)
    return out


# Here, not in `pytest_configure`: by then conftest.py has imported the package.
sys.monitoring.use_tool_id(_TOOL, "mutation")
sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, _line)
sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)


def pytest_collection_finish() -> None:
    _imported.update(_by_file())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    jax.clear_caches()
    _lines.clear()
    sys.monitoring.restart_events()
    start = time.perf_counter()
    result = yield
    _found.setdefault(item.nodeid, {}).update(s=time.perf_counter() - start, lines=_by_file())
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    entry = _found.setdefault(report.nodeid, {})
    if report.failed:
        entry["failed"] = True
    elif report.skipped:
        entry["skipped"] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    sys.monitoring.set_events(_TOOL, 0)
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        path = Path(os.environ["MUTATION_COVERAGE"]) / f"{os.getpid()}.json"
        path.write_text(json.dumps({"tests": _found, "imported": _imported}))
