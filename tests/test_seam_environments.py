"""What jaxmoe.seams is tested against: versions that the page names, and tests that do run."""

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "seams.md").read_text(encoding="utf-8")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("test_seams")


def test_the_page_names_what_is_installed_and_what_is_not(tool: Any) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "dependency-groups"
    ]
    pinned = [item for group in tool.GROUPS for item in groups[group] if "==" in item]
    assert len(pinned) == 5
    for version in (*(item.replace("==", " ") for item in pinned), *tool.NOT_INSTALLED):
        assert version in PAGE, version


def test_each_file_of_tests_has_an_environment(tool: Any) -> None:
    files = {path.stem.removeprefix("test_seam_") for path in ROOT.glob("tests/test_seam_*.py")}
    run = [name for names in tool.GROUPS.values() for name in names]
    assert sorted(run) == sorted(files - {"environments"})


def test_a_test_that_was_skipped_is_found(tool: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = '<testcase classname="tests.test_a" name="test_b">{}</testcase>'
    why = '<skipped message="No module named x">where</skipped>'
    report.write_text(f"<testsuite>{cases.format('')}{cases.format(why)}</testsuite>")
    assert tool.skipped(report) == ["tests.test_a.test_b: No module named x"]


def test_what_is_skipped_or_cannot_be_installed_is_a_failure(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"seams": "1 tests were skipped:\n  a: b", "seams-levanter": ""}
    monkeypatch.setattr(tool, "failure", lambda group, _arguments: found[group])
    with pytest.raises(SystemExit, match="^seams: 1 tests were skipped:\n  a: b$"):
        tool.main()
    assert "not tested against transformer-engine-jax" in capsys.readouterr().out

    def cannot(*_: Any) -> None:
        raise tool.subprocess.CalledProcessError(1, ["pip", "install", "a"])

    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(tool, "pip_install", cannot)
    monkeypatch.setattr(tool, "environment", lambda path: path)
    assert tool.failure("seams", []) == "not installed: pip install a"
