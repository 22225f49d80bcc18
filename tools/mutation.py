"""Makes one mistake at a time in the package and says which ones no test notices.

    mutation.py plan --sample 400   draws mistakes, most of them Cosmic Ray's, which it installs
    mutation.py cover               runs the tests once: which lines does each of them run?
    mutation.py run --end-s 540     tries what is left of the plan, for so many seconds
    mutation.py report              what was noticed, and the diff of each that was not

A mutant meets the tests that run its line, the shortest of each file first, until one fails; in a
line that runs while modules are imported it then meets the other tests of its module. Every process
has a copy of the tree in `build/mutation/`, where all files are; a run adds to the results of the
runs before it. `plan` asks for no test and `run` for no Cosmic Ray, so that they can be on two
machines. docs/testing.md says more.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import develop
import mutants
from mutants import ROOT, Mutant

EXPLAINED = ROOT / "tools" / "mutation_survivors.toml"
_TREE = ("jaxmoe", "tests", "benchmarks", "examples", "docs", "tools")
_FILES = ("pyproject.toml", "README.md", "CMakeLists.txt", "Makefile", "CONTRIBUTING.md")
# Tests that need a GPU, run the package in processes of their own, or none of it.
_LEFT_OUT = re.compile(r"test_(gpu|multi_gpu|multi_process|examples|docs|mutation)(_\w+)?\.py")
_START_S = 15.0  # a process with JAX, and the modules of its tests
_TIMES_SLOWER = 3.0  # many processes at once, and programs that are compiled anew

# Python runs this as it starts: an editable installation would find its own `jaxmoe` first.
_SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""


def plan(args: argparse.Namespace) -> None:
    """Draws mistakes: in each place one of each kind, then a sample of all."""
    if importlib.util.find_spec("cosmic_ray") is None:
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
        python = develop.environment(ROOT / "build" / "cosmic_ray")
        develop.pip_install(python, *groups["mutation"])
        sys.exit(subprocess.run([str(python), *sys.argv], check=False).returncode)
    config = read_config()
    if args.only:
        config |= {"module-path": args.only}
    drawn, places, count = mutants.draw(config, args.sample, args.seed)
    path = args.folder / "plan.json"
    path.write_text(json.dumps([dataclasses.asdict(mutant) for mutant in drawn], indent=1))
    print(f"{len(drawn)} mistakes, of {places} places in {count} modules: {path}")


def copy_tree(folder: Path, extension: Path | None) -> Path:
    """Copies what tests need, and gives the copy the compiled programs that all copies share."""
    shutil.rmtree(folder, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__", "results", "*.so")
    for name in _TREE:
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in _FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    if extension is not None:
        shutil.copy(extension, folder / "jaxmoe" / extension.name)
    (folder / "sitecustomize.py").write_text(_SITE)
    programs = ROOT / "build" / "jax_cache"
    programs.mkdir(parents=True, exist_ok=True)
    (folder / "build").mkdir()
    (folder / "build" / "jax_cache").symlink_to(programs)
    return folder


def in_tree(tree: Path, *more: Path, **names: str) -> dict[str, str]:
    """The environment in which a process imports the package from a copy of the tree."""
    paths = os.pathsep.join(map(str, (tree, *more)))
    return os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"} | names


def check_tree(tree: Path) -> None:
    """Ends if Python finds another package than the copy."""
    command = [sys.executable, "-P", "-c", "import jaxmoe; print(jaxmoe.__file__)"]
    found = subprocess.run(
        command, env=in_tree(tree), cwd=tree, capture_output=True, text=True, check=False
    )
    if not found.stdout.startswith(str(tree)):
        sys.exit(f"jaxmoe is {found.stdout}{found.stderr}, not the copy in {tree}")


def pytest_command(*arguments: str) -> list[str]:
    """The command that runs pytest without files that it leaves for a later run."""
    return [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]


def _tests(given: list[str]) -> list[str]:
    files = given or sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))
    return [name for name in files if not _LEFT_OUT.fullmatch(Path(name).name)]


def _unchanged(tests: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    """Leaves out tests of files that have changed: one with another name would notice anything."""
    paths = {name: ROOT / name for name in files}
    now = {n: mutants.digest(path.read_text()) for n, path in paths.items() if path.exists()}
    changed = {name for name, source in files.items() if source != now.get(name)}
    if changed:
        print("tests are left out, as they changed since `cover`:", *sorted(changed))
    return {name: test for name, test in tests.items() if name.split("::")[0] not in changed}


def cover(args: argparse.Namespace) -> None:
    """Runs the tests once and writes which lines each of them runs."""
    tree = copy_tree(args.folder / "cover", args.extension)
    parts = args.folder / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    check_tree(tree)
    env = in_tree(tree, tree / "tools", MUTATION_ROOT=str(tree), MUTATION_COVERAGE=str(parts))
    parallel = ("-n", str(args.jobs), "--dist", "worksteal") if args.jobs > 1 else ()
    command = pytest_command("-p", "mutation_coverage", *parallel, *_tests(args.tests))
    start = time.monotonic()
    done = subprocess.run(command, cwd=tree, env=env, check=False)
    tests: dict[str, Any] = {}
    imported: dict[str, list[int]] = {}
    for part in parts.glob("*.json"):
        found = json.loads(part.read_text())
        tests |= found["tests"]
        imported |= found["imported"]  # the same in each process: each collects all tests
    failed = [name for name, test in tests.items() if test.get("failed")]
    kept = {n: t for n, t in tests.items() if not t.keys() & {"failed", "skipped"} and "lines" in t}
    files = {name: mutants.digest((tree / name).read_text()) for name in _tests(args.tests)}
    found = {"tests": kept, "imported": imported, "files": files}
    (args.folder / "coverage.json").write_text(json.dumps(found))
    shutil.rmtree(tree)
    shutil.rmtree(parts)
    seconds = time.monotonic() - start
    print(f"{len(kept)} tests in {seconds:.0f} s; {len(failed)} failed and are left out", *failed)
    if done.returncode not in (0, 1) or not kept:
        sys.exit(f"pytest ended with {done.returncode}")


class Coverage:
    """Which tests run a line, how long each takes, and which lines run before all of them."""

    def __init__(self, path: Path):
        found = json.loads(path.read_text())
        tests = _unchanged(found["tests"], found["files"])
        self._imported = {m: frozenset(lines) for m, lines in found["imported"].items()}
        self._seconds = {name: test["s"] for name, test in tests.items()}
        self._by_line: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
        self._by_module: dict[str, set[str]] = collections.defaultdict(set)
        for name, test in tests.items():
            for module, lines in test["lines"].items():
                self._by_module[module].add(name)
                for line in lines:
                    self._by_line[module, line].add(name)

    def tests(self, mutant: Mutant, limit_s: float) -> tuple[list[str], float, int]:
        """Tests of a mutant, the seconds they take without it, and how many there are in all.

        The shortest test of each file comes first, then the next shortest of each, as far as the
        limit allows. What a line does at import may show wherever the module is used: behind its
        own tests come those of the whole module.
        """
        lines = range(mutant.line, mutant.last + 1)
        found = set[str]().union(*(self._by_line[mutant.module, line] for line in lines))
        wide = set[str]()
        if not self._imported.get(mutant.module, frozenset()).isdisjoint(lines):
            wide = self._by_module[mutant.module] - found
        chosen, seconds = list[str](), 0.0
        for name in self._alternating(found) + self._alternating(wide):
            if chosen and seconds + self._seconds[name] > limit_s:
                continue
            chosen.append(name)
            seconds += self._seconds[name]
        return chosen, seconds, len(found) + len(wide)

    def _alternating(self, names: set[str]) -> list[str]:
        """The shortest test of each file, then the next shortest of each."""
        files: dict[str, list[str]] = collections.defaultdict(list)
        for name in sorted(names, key=lambda name: (self._seconds[name], name)):
            files[name.split("::")[0]].append(name)
        return [n for row in itertools.zip_longest(*files.values()) for n in row if n]


def attempt(mutant: Mutant, tree: Path, tests: list[str], limit_s: float) -> dict[str, Any]:
    """Runs tests on a copy of the tree with the mistake. Returns what came of it."""
    path = tree / mutant.module
    source = path.read_text()
    names = tree / "build" / "tests.txt"
    names.write_text("\n".join(tests))
    start = time.monotonic()
    try:
        path.write_text(mutant.applied(source))
        command = pytest_command("-x", "--no-header", "-p", "no:xdist", f"@{names}")
        process = subprocess.Popen(
            command,
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=in_tree(tree),
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
            outcome = {0: "survived", 1: "noticed"}.get(process.returncode, "did not start")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            outcome = "took too long"
    finally:
        path.write_text(source)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return {
        "outcome": outcome,
        "by": failed[1] if failed else "",
        "s": round(time.monotonic() - start, 1),
        "end": "" if outcome in ("survived", "noticed") else output[-400:],
    }


def read_config() -> dict[str, Any]:
    """The table of `cosmic-ray.toml`."""
    return tomllib.loads((ROOT / "cosmic-ray.toml").read_text())["cosmic-ray"]


def read_plan(folder: Path) -> list[Mutant]:
    """The mistakes of the plan whose module is still the one they were drawn for."""
    drawn = [Mutant(**fields) for fields in json.loads((folder / "plan.json").read_text())]
    paths = {mutant.module: ROOT / mutant.module for mutant in drawn}
    now = {m: mutants.digest(path.read_text()) for m, path in paths.items() if path.exists()}
    kept = [mutant for mutant in drawn if mutant.source == now.get(mutant.module)]
    if len(kept) < len(drawn):
        print(f"{len(drawn) - len(kept)} mistakes are left out: their modules changed since")
    return kept


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The last result of each mistake."""
    out: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("results*.jsonl")):
        for line in path.read_text().splitlines():
            result = json.loads(line)
            out[result["key"]] = result
    return out


def run(args: argparse.Namespace) -> None:
    """Tries the mistakes that have no result yet, for as long as it may."""
    begin = time.monotonic()
    coverage = Coverage(args.folder / "coverage.json")
    part, parts = args.shard
    done = read_results(args.folder)
    if args.again:
        missed = ("survived", "no test")
        done = {key: result for key, result in done.items() if result["outcome"] not in missed}
    left = [m for m in read_plan(args.folder)[part::parts] if m.key not in done]
    left = left[: args.most]
    print(f"{len(left)} mistakes to try, {args.jobs} at a time", flush=True)
    limit_s = args.limit_s or read_config()["timeout"]
    trees: list[Path] = []
    own = threading.local()
    lock = threading.Lock()
    counts: collections.Counter[str] = collections.Counter()

    def one(mutant: Mutant) -> None:
        if time.monotonic() - begin > args.end_s:
            return
        if not hasattr(own, "tree"):
            with lock:
                name = args.folder / f"tree-{part}-{len(trees)}"
                trees.append(name)
            own.tree = copy_tree(name, args.extension)
            if name == trees[0]:
                check_tree(own.tree)
        tests, seconds, covering = coverage.tests(mutant, limit_s)
        result: dict[str, Any] = {"key": mutant.key, "tests": len(tests), "covering": covering}
        if tests:
            wait = min(
                _START_S + _TIMES_SLOWER * seconds, args.end_s + 60 - time.monotonic() + begin
            )
            late = wait < _START_S + seconds
            result |= attempt(mutant, own.tree, tests, wait)
            if late and result["outcome"] == "took too long":
                return  # the run ended, not the test
        else:
            result["outcome"] = "no test"
        with lock, (args.folder / f"results-{part}.jsonl").open("a") as file:
            counts[result["outcome"]] += 1
            file.write(json.dumps(result) + "\n")
            seconds = time.monotonic() - begin
            print(
                f"[{seconds:5.0f} s {sum(counts.values()):4}/{len(left)}] {result['outcome']:13} ",
                end="",
            )
            print(
                f"{mutant.module}:{mutant.line} {mutant.operator} {result.get('by', '')}",
                flush=True,
            )

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(one, mutant) for mutant in left]:
            future.result()
    for tree in trees:
        shutil.rmtree(tree)
    minutes = (time.monotonic() - begin) / 60
    print(f"{dict(counts)}: {sum(counts.values()) / minutes:.1f} a minute")


def explanations() -> list[dict[str, str]]:
    """Mistakes that no test can notice, or that are not worth one, each with the reason."""
    return tomllib.loads(EXPLAINED.read_text())["survivor"] if EXPLAINED.exists() else []


def explained(mutant: Mutant, source: str, known: list[dict[str, str]]) -> str:
    """Why a mistake may survive, "" if nobody has said so."""
    # Words are whole, whatever of their letters differs.
    begun = re.findall(r"\w*\Z", source[: mutant.start])[0]
    ended = re.findall(r"\A\w*", source[mutant.end :])[0]
    texts = source[mutant.start : mutant.end], mutant.text
    old, new = (begun + text + ended for text in texts)
    statement = "\n".join(source.splitlines()[mutant.line - 1 : mutant.last])
    for one in known:
        same = one["module"] == mutant.module and one["definition"] == mutant.definition
        if same and (one["from"], one["to"]) == (old, new) and one.get("in", "") in statement:
            return one["why"]
    return ""


def report(args: argparse.Namespace) -> None:
    """Prints what was noticed, module by module, and the diffs of what was not."""
    results, known = read_results(args.folder), explanations()
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    survivors: list[str] = []
    drawn = read_plan(args.folder)
    sources = {mutant.module: (ROOT / mutant.module).read_text() for mutant in drawn}
    for mutant in drawn:
        result = results.get(mutant.key)
        if result is None:
            continue
        outcome = result["outcome"]
        if outcome in ("survived", "no test"):
            why = explained(mutant, sources[mutant.module], known)
            if why:
                outcome = "explained"
            else:
                run_of = f"{result['tests']} of {result['covering']} tests that run the line"
                head = f"{mutant.definition or 'the module'}: {outcome}, {run_of}"
                survivors.append(f"{head}\n{mutant.diff(sources[mutant.module])}\n")
        noticed = outcome in ("noticed", "did not start", "took too long")
        table[mutant.module]["noticed" if noticed else outcome] += 1
    names = ("noticed", "survived", "no test", "explained")
    print(*survivors, sep="\n")
    print("| module | " + " | ".join(names) + " |\n|---" * 1 + "|---:" * len(names) + "|")
    total: collections.Counter[str] = collections.Counter()
    for module in sorted(table):
        total += table[module]
        print(f"| {module} | " + " | ".join(str(table[module][n]) for n in names) + " |")
    print("| all | " + " | ".join(str(total[n]) for n in names) + " |")
    tried = sum(total.values()) - total["explained"]
    print(f"{total['noticed']} of {tried} noticed ({total['noticed'] / max(tried, 1):.0%})")


def _shard(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise argparse.ArgumentTypeError(f"{text}: the first of two is 0/2")
    return part, parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutation")
    steps = parser.add_subparsers(required=True)
    found = next((ROOT / "jaxmoe").glob("_cuda_ffi*.so"), None)
    cores = os.cpu_count() or 1

    def step(function: Any, *flags: tuple[str, dict[str, Any]]) -> None:
        one = steps.add_parser(function.__name__, help=function.__doc__)
        for flag, options in flags:
            one.add_argument(flag, **options)
        one.set_defaults(function=function)

    jobs = ("--jobs", {"type": int, "default": cores})
    extension = ("--extension", {"type": Path, "default": found, "help": "the compiled extension"})
    step(
        plan,
        ("--sample", {"type": int, "default": 400}),
        ("--seed", {"type": int, "default": 0}),
        ("--only", {"nargs": "+", "help": "these modules instead of those in cosmic-ray.toml"}),
    )
    step(cover, jobs, extension, ("tests", {"nargs": "*", "help": "test files; all by default"}))
    step(
        run,
        *(jobs, extension),
        ("--shard", {"type": _shard, "default": (0, 1), "help": "0/2, 1/2: for two machines"}),
        ("--end-s", {"type": float, "default": 540.0, "help": "starts no mutant after that"}),
        ("--limit-s", {"type": float, "help": "seconds of tests for a mutant (cosmic-ray.toml)"}),
        ("--most", {"type": int, "help": "mutants to try"}),
        ("--again", {"action": "store_true", "help": "survivors too, as with a larger --limit-s"}),
    )
    step(report)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.function(args)


if __name__ == "__main__":
    main()
