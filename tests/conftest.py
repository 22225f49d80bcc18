"""Test session setup: strict JAX promotion, 8 CPU devices, and the `gpu` tiers."""

import contextlib
import gc
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmoe._jax import targets as _targets


def _wants_gpu(config: pytest.Config) -> bool:
    """Whether the marker expression selects a test that carries a GPU marker."""
    expression = config.getoption("markexpr") or ""
    return "gpu" in expression.replace("not gpu", "").replace("not multi_gpu", "")


_CPU_DEVICES = 8
_STALE_S = 24 * 3600.0  # age of a session that was killed, not one that still runs
_EXCHANGE_S = 2.0  # a few milliseconds each time
_MOST_MAPS = 30_000  # of a process, whose programs have several each; Linux allows 65530
_LOOK_EVERY = 20  # tests
_MAPS = Path("/proc/self/maps")
_programs = pytest.StashKey[Path]()
_exchanged = pytest.StashKey[float]()
_imports_compute = pytest.StashKey[bool]()


def link_programs(source: Path, target: Path) -> None:
    """Makes the compiled programs of directory `source` appear in `target`, each in one step."""
    known = set(os.listdir(target))
    for name in os.listdir(source):
        if name.endswith("-cache") and name not in known:
            with contextlib.suppress(FileExistsError):
                os.link(source / name, target / name)


def own_programs(shared: Path) -> Path:
    """Returns a new directory that links to the compiled programs of directory `shared`.

    JAX writes an entry of its compilation cache in place. Another process may read the entry half
    written, and every later one does if the writer is killed. Each process therefore writes to a
    directory of its own, whose entries are linked into `shared` between its tests, when none is
    being written, and those of other processes out of it.
    """
    shared.mkdir(parents=True, exist_ok=True)
    for session in shared.glob("session-*"):
        with contextlib.suppress(FileNotFoundError):  # that session ends now
            if time.time() - session.stat().st_mtime > _STALE_S:
                shutil.rmtree(session)
    own = Path(tempfile.mkdtemp(prefix="session-", dir=shared))
    link_programs(shared, own)
    return own


def pytest_addoption(parser: pytest.Parser) -> None:
    rule = "run one set of parameters of the tests that tests/slow.txt names, or none"
    parser.addoption("--quick", action="store_true", help=rule)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves most of the slow tests out of a quick run."""
    if not config.getoption("quick"):
        return
    lines = (config.rootpath / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    slow = {line.split(" ")[0]: line.endswith(" -") for line in lines if line[:1] != "#"}
    sets: dict[str, list[pytest.Item]] = {name: [] for name in slow}
    for item in items:
        sets.get(item.nodeid.split("[")[0], []).append(item)
    kept = {one_of(sets[name]) for name, none in slow.items() if not none}
    left_out = [item for of_one in sets.values() for item in of_one if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    unwanted = set(left_out)
    items[:] = [item for item in items if item not in unwanted]


def one_of(sets: list[pytest.Item]) -> pytest.Item | None:
    """One of several sets of parameters: tests that share a list of them take different ones."""
    if len(sets) < 2:
        return None
    return sets[zlib.crc32(sets[0].nodeid.split("[")[0].encode()) % len(sets)]


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if not _wants_gpu(config):
        jax.config.update("jax_platforms", "cpu")
        # Most of the time goes into LLVM's passes over programs that run once.
        flags = os.environ.get("XLA_FLAGS", "")
        quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        os.environ["XLA_FLAGS"] = f"{flags} {quick}".strip()
        # Programs that did not change are not compiled again by the next session.
        own = config.stash[_programs] = own_programs(config.rootpath / "build" / "jax_cache")
        jax.config.update("jax_compilation_cache_dir", str(own))
        # No cache of XLA below `own`, whose name jax 0.10 would make part of each key.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        # Nobody reads where in the tests an op of a program comes from.
        jax.config.update("jax_include_full_tracebacks_in_locations", False)
        # A tenth goes into looking for cycles among the many objects that tracing makes.
        gc.freeze()
        gc.set_threshold(200_000, 10, 20)


@pytest.fixture
def steady_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the benchmarks' batches run, and take 0.1 ms a layer, the next program's a tenth more.

    Where other processes take the processor, one of two batches whose difference is a row's time
    may be delayed by more than both take.
    """
    seen: dict[int, Any] = {}

    def batch_s(item: Any, count: int) -> float:
        item.launch(count)
        item.wait()
        seen.setdefault(id(item), item)  # kept, so that no other has its number
        return count * item.layers * 1e-4 * (1 + 0.1 * list(seen).index(id(item)))

    monkeypatch.setattr("benchmarks.timing._batch_s", batch_s)


def exchange_programs(config: pytest.Config) -> None:
    """Gives what this process compiled to the others, and takes what they did, now and then."""
    own, now = config.stash.get(_programs, None), time.monotonic()
    if own and now - config.stash.get(_exchanged, 0.0) > _EXCHANGE_S:
        config.stash[_exchanged] = now
        link_programs(own, own.parent)
        link_programs(own.parent, own)


def drop_programs(most_maps: int) -> bool:
    """Lets go of all compiled programs if this process has more memory maps than that.

    Where a process may have no more of them, XLA ends it by a segmentation fault.
    """
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") <= most_maps:
        return False
    jax.clear_caches()
    gc.collect()
    return True


_tests_run = 0


def pytest_runtest_teardown() -> None:
    global _tests_run
    _tests_run += 1
    if _tests_run % _LOOK_EVERY == 0:
        drop_programs(_MOST_MAPS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # xdist ends a worker only after this hook has returned.
    if own := session.config.stash.get(_programs, None):
        link_programs(own, own.parent)
        shutil.rmtree(own)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fails the first module that computes with JAX while it is imported.

    Every worker and every selection of tests would pay for that computation, and its failure would
    be no test's. JAX refuses to change the number of devices once a computation has made them.
    """
    report = yield
    try:
        jax.config.update("jax_num_cpu_devices", 1)
    except RuntimeError:
        if report.passed and not collector.config.stash.get(_imports_compute, False):
            collector.config.stash[_imports_compute] = True
            report.outcome = "failed"
            report.longrepr = f"{collector.nodeid}: computes with JAX while it is imported"
    else:
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)
    return report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the files alone in which every test needs a GPU, where none is asked for."""
    name = collection_path.name
    return name.startswith(("test_gpu_", "test_multi_gpu")) and not _wants_gpu(config) or None


def _gpu_count() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    exchange_programs(item.config)
    needed = 2 if item.get_closest_marker("multi_gpu") else 1
    if not (item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")):
        return
    if _gpu_count() < needed:
        pytest.fail(f"needs {needed} CUDA GPU(s), JAX finds {_gpu_count()}", pytrace=False)
    if not _targets.cuda_available():
        pytest.fail(f"needs the CUDA kernels: {_targets.why_not()}", pytrace=False)
