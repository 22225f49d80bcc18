"""tools/sanitize.sh: which tests it gives to which tool of compute-sanitizer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def given(tmp_path):
    """Runs the script with a compute-sanitizer that says what it was given: (tool, marks, file)."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "given: $*"\n', encoding="ascii")
    tool.chmod(0o755)

    def run(*files, tools="memcheck"):
        command = [ROOT / "tools" / "sanitize.sh", python, *files]
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOOLS": tools}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        pattern = r"given: --tool (\w+) .* -m (.*) (\S+)\n"
        return re.findall(pattern, done.stdout)

    python = tmp_path / "python"  # has no tool of its own
    python.write_text(f'#!/bin/sh\nexec env -i {sys.executable} -S "$@"\n', encoding="ascii")
    python.chmod(0o755)
    return run


def test_all_files_are_those_of_one_gpu(given):
    found = given(tools="memcheck racecheck")
    assert {tool for tool, _, _ in found} == {"memcheck", "racecheck"}
    assert {marks for _, marks, _ in found} == {"gpu and sanitizer"}
    files = {file for _, _, file in found}
    assert "tests/test_gpu_gemm.py" in files and not any("multi_gpu" in file for file in files)


def test_files_of_several_gpus_are_run_if_named(given):
    files = "tests/test_multi_gpu_direct.py", "tests/test_gpu_gemm.py"
    marks = "multi_gpu and sanitizer", "gpu and sanitizer"
    assert given(*files) == [("memcheck", *pair) for pair in zip(marks, files, strict=True)]
