"""conftest.py: what is compiled is shared whole or not at all, and importing a test is free."""

import gc
import os
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

CONFTEST = str(Path(__file__).with_name("conftest.py"))


@pytest.fixture
def conftest(pytestconfig: pytest.Config):
    return pytestconfig.pluginmanager.get_plugin(CONFTEST)


def test_programs_of_a_session_are_seen_once_they_are_linked(conftest, tmp_path) -> None:
    first, second = conftest.own_programs(tmp_path), conftest.own_programs(tmp_path)
    for session, text in ((first, "first"), (second, "second")):
        (session / "both-cache").write_text(text)
    (second / "second-cache").write_text("second")
    (second / "second-atime").write_text("")
    assert sorted(tmp_path.glob("*-cache")) == []
    conftest.link_programs(first, tmp_path)
    conftest.link_programs(second, tmp_path)
    seen = {path.name: path.read_text() for path in conftest.own_programs(tmp_path).iterdir()}
    assert seen == {"both-cache": "first", "second-cache": "second"}


def test_sessions_exchange_programs_now_and_then(conftest, tmp_path) -> None:
    sessions = [conftest.own_programs(tmp_path) for _ in range(2)]
    configs = [type("Config", (), {"stash": pytest.Stash()})() for _ in sessions]
    for config, own in zip(configs, sessions, strict=True):
        config.stash[conftest._programs] = own
    (sessions[0] / "early-cache").write_text("early")
    for config in configs:
        conftest.exchange_programs(config)
    (sessions[0] / "late-cache").write_text("late")
    for config in configs:  # again too soon
        conftest.exchange_programs(config)
    assert [path.name for path in sessions[1].iterdir()] == ["early-cache"]


def test_only_old_sessions_are_removed(conftest, tmp_path) -> None:
    old, running = conftest.own_programs(tmp_path), conftest.own_programs(tmp_path)
    (old / "half-cache").write_text("written by a session that was kil")
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    assert list(conftest.own_programs(tmp_path).iterdir()) == []
    assert running.is_dir() and not old.exists()


def test_programs_of_this_session_are_its_own(conftest, pytestconfig) -> None:
    own = pytestconfig.stash[conftest._programs]
    jnp.arange(3).block_until_ready()
    assert own.parent == pytestconfig.rootpath / "build" / "jax_cache"
    assert any(own.glob("*-cache"))


class _Collector:
    """A test module, as the hook sees it."""

    nodeid = "tests/test_planted.py"

    def __init__(self) -> None:
        self.config = type("Config", (), {"stash": pytest.Stash()})()


def test_a_module_that_computes_when_imported_is_named(conftest) -> None:
    jnp.zeros(2)  # what its import would do
    collector = _Collector()
    reports = []
    for _ in range(2):
        call = conftest.pytest_make_collect_report(collector)
        next(call)
        report = pytest.CollectReport(collector.nodeid, "passed", None, [])
        with pytest.raises(StopIteration) as ended:
            call.send(report)
        reports.append(ended.value.value)
    assert [report.outcome for report in reports] == ["failed", "passed"], "only the first one"
    assert reports[0].longrepr == ("tests/test_planted.py: computes with JAX while it is imported")


class Item:
    """What the choice of a quick run reads of a test."""

    def __init__(self, nodeid: str):
        self.nodeid = nodeid


def test_a_quick_run_takes_one_set_of_slow_tests(conftest, tmp_path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "slow.txt").write_text(
        "# head\na.py::many\nb.py::one\nb.py::no -\nc.py::gone\n"
    )
    left_out: list[Item] = []
    config = types.SimpleNamespace(
        rootpath=tmp_path,
        getoption=lambda name: name == "quick",
        hook=types.SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    names = ["a.py::many[1]", "a.py::fast[1]", "a.py::many[2]", "a.py::many[3]", "b.py::one"]
    names += ["b.py::no[1]", "b.py::no[2]"]
    items = [Item(name) for name in names]
    before = list(items)
    conftest.pytest_collection_modifyitems(config, items)
    kept = {item.nodeid.split("[")[0] for item in items}
    assert len(items) == 2 and kept == {"a.py::fast", "a.py::many"}
    assert sorted(before, key=id) == sorted(items + left_out, key=id)


def test_slow_tests_exist() -> None:
    """A name that is no test's would leave it whole in a quick run."""
    root = Path(__file__).resolve().parent.parent
    lines = (root / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    for name in (line for line in lines if not line.startswith("#")):
        path, function = name.removesuffix(" -").split("::")
        assert f"def {function}(" in (root / path).read_text(encoding="utf-8"), name


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of memory maps")
def test_programs_are_dropped_before_a_process_has_too_many(conftest) -> None:
    count = lambda: Path("/proc/self/maps").read_bytes().count(b"\n")  # noqa: E731
    gc.collect()
    before = count()
    programs = [jax.jit(lambda x, i=i: x * i + i) for i in range(20)]
    for program in programs:
        program(jnp.ones(3))
    most = count()
    assert most > before and not conftest.drop_programs(most + 1000)
    del programs, program
    # Programs of the tests before this one may have gone already.
    assert conftest.drop_programs(0) and count() < most
