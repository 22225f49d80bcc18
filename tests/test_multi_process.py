"""The expert-parallel layer over two processes, with real sockets between them."""

import importlib.util
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
    command = "--processes 2 --cpu-devices 2 --timeout 120 --modes all_to_all+direct"
    assert load().main(command.split()) == 0
    printed = capsys.readouterr().out
    for process in (0, 1):
        assert f"process {process} of 2: 2 of 4 cpu devices" in printed
    assert printed.count("all_to_all+direct: largest error") == 2


def test_a_wrong_part_is_seen():
    got = {"y": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    assert load().largest_error(got, {"y": np.array([[1.0, 2.0], [3.0, 4.0]])}) == 0.0
    assert load().largest_error(got, {"y": np.array([[1.0, 2.0], [3.0, 8.0]])}) == 0.5
