"""The expert-parallel layer over two processes, with real sockets between them."""

import importlib.util
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

PATH = Path(__file__).resolve().parents[1] / "examples" / "multi_process.py"


def load():
    spec = importlib.util.spec_from_file_location("multi_process", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_processes_of_two_devices_agree_with_one_device(capsys):
    """In every way, one program after the other: what takes long is to start processes."""
    example = load()
    assert example.main("--processes 2 --cpu-devices 2 --timeout 120".split()) == 0
    printed = capsys.readouterr().out
    for process in (0, 1):
        assert f"process {process} of 2: 2 of 4 cpu devices" in printed
    modes = re.findall(r"^(\S+): largest error", printed, re.MULTILINE)
    assert modes == 2 * list(example.MODES)
    assert {"all_gather", "all_to_all", "ragged", "direct", "all_to_all+direct"} <= set(modes)


def test_a_wrong_part_is_seen():
    got = {"y": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    assert load().largest_error(got, {"y": np.array([[1.0, 2.0], [3.0, 4.0]])}) == 0.0
    assert load().largest_error(got, {"y": np.array([[1.0, 2.0], [3.0, 8.0]])}) == 0.5
