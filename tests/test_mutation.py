"""The tool of deliberate mistakes: what it changes, which tests it runs, what it reports."""

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"

SOURCE = '''"""Toy."""

LIMIT: int = 3


def larger(a: int, b: int) -> bool:
    """Whether a is larger."""
    check_int("larger", a)
    return compare(
        a,
        b,
        strict=True,
    )
'''


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("mutants")


@pytest.fixture
def mutation(mutants: Any) -> Any:  # whose folder is on the path
    del mutants
    return importlib.import_module("mutation")


def _mutant(mutants: Any, old: str, new: str, source: str = SOURCE, module: str = "m.py") -> Any:
    start = source.index(old)
    places = mutants.Places(source)
    lines = places.statement(start)
    values = (places.definition(start), *lines, start, start + len(old), new)
    return mutants.Mutant(module, "toy/Toy", *values, mutants.digest(source))


def test_places_of_a_module(mutants: Any) -> None:
    places = mutants.Places(SOURCE)
    assert places.statement(SOURCE.index("b,\n")) == (9, 13)
    assert places.statement(SOURCE.index("larger(")) == (6, 6)  # not its body
    assert places.definition(SOURCE.index("strict")) == "larger"
    assert places.definition(SOURCE.index("LIMIT")) == ""
    silent = [places.silent(SOURCE.index(text)) for text in ("int = 3", "Whether", "3\n", "True")]
    assert silent == [True, True, False, False]


def test_a_decorator_is_of_its_function(mutants: Any) -> None:
    source = "@cache\n@wraps(f)\ndef run():\n    return 1\n"
    places, at = mutants.Places(source), source.index("f)")
    assert (places.definition(at), places.statement(at)) == ("run", (1, 3))


def test_mistakes_in_calls(mutants: Any) -> None:
    changes = mutants._call_changes(SOURCE, mutants.Places(SOURCE))
    found = [mutants.made("m.py", SOURCE, change) for _, _, change in changes]
    assert [(m.operator, m.definition, m.line, m.last) for m in found] == [
        ("call/SwapArguments", "larger", 9, 13),
        ("call/DropKeyword", "larger", 9, 13),
    ]
    swapped, dropped = (m.applied(SOURCE) for m in found)
    assert "        b,\n        a,\n" in swapped and "strict" not in dropped
    assert [line for line in found[1].diff(SOURCE).splitlines() if line[0] in "+-"][2:] == [
        "-        strict=True,",
        "+        ",
    ]


def test_what_means_the_same_is_no_mistake(mutants: Any) -> None:
    def mistakes(source: str) -> list[str | None]:
        changes = mutants._call_changes(source, mutants.Places(source))
        found = [mutants.made("m.py", source, change) for _, _, change in changes]
        return [mutant and mutant.applied(source) for mutant in found]

    assert mistakes("zip(a, b, strict=True)") == ["zip(b, a, strict=True)", None]
    assert mistakes("max(a, 2 * b, key=c)") == [None, "max(a, 2 * b, )"]


def test_a_mistake_belongs_to_one_state_of_its_module(
    mutants: Any, mutation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text(SOURCE)
    mutant = _mutant(mutants, "strict=True,", "")
    (tmp_path / "plan.json").write_text(json.dumps([dataclasses.asdict(mutant)]))
    assert mutation.read_plan(tmp_path) == [mutant]
    (tmp_path / "m.py").write_text(SOURCE + "\n")
    assert mutation.read_plan(tmp_path) == []
    (tmp_path / "m.py").unlink()
    assert mutation.read_plan(tmp_path) == []


def test_tests_that_run_a_line(
    mutants: Any, mutation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def entry(seconds: float, *lines: int) -> dict[str, Any]:
        return {"s": seconds, "lines": {"m.py": list(lines)}}

    tests = {
        "tests/a.py::slow": entry(9.0, 9),
        "tests/a.py::quick": entry(1.0, 10, 11),
        "tests/b.py::one": entry(2.0, 9),
        "tests/b.py::other": entry(1.0, 8),
    }
    for name in ("a.py", "b.py"):
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / name).touch()
    files = dict.fromkeys(("tests/a.py", "tests/b.py"), mutants.digest(""))
    imported = {"m.py": [3, 8]}
    path = tmp_path / "coverage.json"
    path.write_text(json.dumps({"tests": tests, "imported": imported, "files": files}))
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    coverage = mutation.Coverage(path)
    inside = _mutant(mutants, "strict=True,", "")
    order = ["tests/a.py::quick", "tests/b.py::one", "tests/a.py::slow"]
    assert coverage.tests(inside, 60.0) == (order, 12.0, 3)
    assert coverage.tests(inside, 3.0) == (order[:2], 3.0, 3)
    # what runs while the module is imported: whatever reaches the module, after its own tests
    assert coverage.tests(_mutant(mutants, "= 3", "= 4"), 60.0)[2] == 4
    check = _mutant(mutants, '"larger", a', "a")
    assert coverage.tests(check, 60.0)[0] == ["tests/b.py::other", *order]
    assert coverage.tests(_mutant(mutants, "larger(a", "larger(b"), 60.0) == ([], 0.0, 0)
    # another name than that of the test would be an error whatever the mistake
    (tmp_path / "tests" / "b.py").write_text("# edited")
    assert mutation.Coverage(path).tests(inside, 60.0)[0] == order[::2]


def test_a_mistake_is_noticed_or_survives(mutants: Any, mutation: Any, tmp_path: Path) -> None:
    source = "def double(x):\n    return 2 * x\n"
    (tmp_path / "toy.py").write_text(source)
    (tmp_path / "test_toy.py").write_text(
        "import toy\ndef test_two():\n    assert toy.double(2) == 4\n"
        "def test_three():\n    assert toy.double(3) == 6\n"
    )
    (tmp_path / "build").mkdir()
    power = _mutant(mutants, "2 * x", "x ** 2", source, "toy.py")
    tests = [f"test_toy.py::test_{name}" for name in ("two", "three")]
    first = mutation.attempt(power, tmp_path, tests[:1], 60.0)
    both = mutation.attempt(power, tmp_path, tests, 60.0)
    assert (first["outcome"], first["by"]) == ("survived", "")
    assert (both["outcome"], both["by"]) == ("noticed", tests[1])
    endless = _mutant(mutants, "return 2 * x", "while True: pass", source, "toy.py")
    assert mutation.attempt(endless, tmp_path, tests, 3.0)["outcome"] == "took too long"
    assert (tmp_path / "toy.py").read_text() == source


def test_report_shows_survivors_that_nobody_explained(
    mutants: Any,
    mutation: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    drawn = [_mutant(mutants, *pair) for pair in (("b,", "a,"), ("= 3", "= 4"), ("True", "False"))]
    (tmp_path / "plan.json").write_text(json.dumps([dataclasses.asdict(m) for m in drawn]))
    outcomes = zip(drawn, ("noticed", "survived", "survived"), strict=True)
    results = [{"key": m.key, "outcome": o, "tests": 1, "covering": 2} for m, o in outcomes]
    (tmp_path / "results-0.jsonl").write_text("\n".join(map(json.dumps, results)))
    known = tmp_path / "known.toml"
    known.write_text(
        '[[survivor]]\nmodule = "m.py"\ndefinition = ""\nfrom = "= 3"\nto = "= 4"\nwhy = "unused"\n'
    )
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "EXPLAINED", known)
    mutation.report(argparse.Namespace(folder=tmp_path))
    text = capsys.readouterr().out
    assert "| m.py | 1 | 1 | 0 | 1 |" in text and "1 of 2 noticed (50%)" in text
    assert "larger: survived, 1 of 2 tests that run the line" in text
    assert "-        strict=True," in text and "LIMIT" not in text


def test_modules_that_are_named_exist(mutants: Any, mutation: Any) -> None:
    found = mutants.modules(mutation.read_config())
    root = TOOLS.parent
    assert len(found) > 20 and all((root / name).is_file() for name in found)
    assert "mutants" in sys.modules  # not of another folder
    assert Path(sys.modules["mutants"].__file__ or "").parent == TOOLS
