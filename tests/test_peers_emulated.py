"""The kernels of csrc/peers on a CPU: what many devices say to each other, and what goes wrong."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EMULATED = ROOT / "tests" / "emulated"
COMPILER = shutil.which("g++")
NONE, TIMEOUT, OTHER_MESH, GAVE_UP, OTHER_STEP = range(5)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("emulated") / "peers", ROOT)


def compiled(path, sources):
    """The program, with the kernels of a tree of sources."""
    flags = ["-std=c++20", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
    folders = [f"-I{folder}" for folder in (EMULATED, sources, ROOT)]
    command = [COMPILER, *flags, "-pthread", *folders, str(EMULATED / "peers.cc"), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def run(program, *arguments):
    """Whether all results were right, and (code, device, step) of why each device failed."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = re.findall(r"device \d+: code (\d+) device (\d+) step (\d+)", done.stdout)
    return done.returncode == 0, [tuple(map(int, words)) for words in found]


@pytest.mark.parametrize("devices, steps, seed", [(1, 6, 1), (2, 30, 2), (3, 20, 3), (8, 6, 4)])
def test_steps_of_any_kind_and_size_in_a_row(program, devices, steps, seed):
    """Dispatches and combines, of few tokens and of many, garbage among the slots."""
    assert run(program, devices, steps, seed) == (True, [(NONE, 0, 0)] * devices)


@pytest.mark.parametrize("devices, steps, seed", [(1, 9, 1), (2, 30, 2), (3, 24, 3), (4, 18, 4)])
def test_exchanges_beside_products_among_them(program, devices, steps, seed):
    """Steps of tokens are odd ones whatever was before; copies are late at times."""
    assert run(program, devices, steps, seed, "beside") == (True, [(NONE, 0, 0)] * devices)


@pytest.mark.parametrize("devices, steps, seed", [(1, 9, 1), (2, 30, 2), (3, 24, 3), (4, 18, 4)])
def test_dispatches_in_the_order_of_experts_among_them(program, devices, steps, seed):
    """Rows are there when their part is said to be, and stay."""
    assert run(program, devices, steps, seed, "ordered") == (True, [(NONE, 0, 0)] * devices)


def test_a_device_that_leaves_stops_those_that_wait_for_its_tokens(program):
    """They end: nothing waits for words that nobody writes."""
    for seed in (3, 4):
        right, failures = run(program, 3, 20, seed, "orderless", 6)
        assert right and failures[1] == (NONE, 0, 0)
        assert all(code in (TIMEOUT, GAVE_UP) for code, _, _ in (failures[0], failures[2]))


# Steps after which a device that adds sums of an exchange beside products may read others.
SPOILT = [(2, 1), (10, 9), (11, 5), (12, 1), (12, 5), (12, 9)]


def test_sums_that_others_may_have_spoilt_are_nan(program):
    """A device that gives up cannot stop its copies of the exchange after."""
    for steps, seed in SPOILT:
        assert run(program, 3, steps, seed, "spoils")[0]


def test_a_device_that_leaves_stops_the_others(program):
    """Each gives nothing but NaN from there on, and knows of a device that left or gave up."""
    right, failures = run(program, 4, 8, 3, "leaves", 4)
    assert right and failures[1] == (NONE, 0, 0)
    others = [failures[i] for i in (0, 2, 3)]
    assert (TIMEOUT, 1, 5) in others
    assert all(step == 5 and code in (TIMEOUT, GAVE_UP) for code, _, step in others)


def test_a_device_that_takes_another_step_is_seen(program):
    right, failures = run(program, 3, 6, 5, "differs", 2)
    assert right and all(code in (OTHER_STEP, GAVE_UP) for code, _, _ in failures)
    assert failures[1][0] == OTHER_STEP or (OTHER_STEP, 1, 3) in failures


def test_a_program_with_another_mesh_is_seen(program):
    right, failures = run(program, 3, 6, 6, "moved", 2)
    assert right and failures == [(GAVE_UP, 1, 3), (OTHER_MESH, 102, 3), (GAVE_UP, 1, 3)]


@pytest.mark.parametrize(
    "file, what, wrong",
    [
        ("step", "(step % 2) * peers.half_bytes", "0"),
        ("step", "(step % 2) * peers.few_bytes", "0"),
        ("step", "(came) != step && !failed", "(came) + 2 < step && !failed"),
        ("step", "(came >> 32) != tag", "(came >> 32) + tag == 0"),
        ("pairs", "tries = 1; pair.y != step || pair.w != step;", "tries = 1; 0;"),
        ("lines", "if (!__any_sync(0xffffffffu, missing >= 0)) break;", "break;"),
        ("lines", "  }\n  for_each(read_again);\n}", "  }\n}"),
        ("few", "slots + peers.few_bytes - peers.line_bytes", "after_slots + n * num_tokens * 80"),
        ("beside", "NextStep(peers) | 1", "NextStep(peers)"),
        ("beside", "meeting = NextStep(peers);", "meeting = step;"),
        ("beside", "WaitForStep(peers, meeting, params.size.tag);\n", "\n"),
        ("beside", "WaitForStep(peers, step, params.size.tag) || !begins", "!begins"),
        ("beside", "if (failed || !HasFailed(peers)) break;", "break;"),
        ("ordered", "NextStep(peers) | 1", "NextStep(peers)"),
        ("ordered", "begins = !WaitForStep(peers, step - 1, size.tag);", ""),
        ("ordered", "return peers.own->begun;", "return (peers.own->step + 1) | 1;"),
        ("ordered", "WaitForStep(peers, step, params.size.tag, 1 + part);\n", "\n"),
        ("ordered", "local < params.parts.ends[part]", "local < params.parts.ends[part] - 1"),
    ],
    ids=(
        *("one half", "one half of few", "a step early", "no tags", "no numbers of pairs"),
        *("no numbers of lines", "lines read once", "lines among pairs"),
        *("tokens in any half", "a number left out", "tokens too early", "sums too early"),
        "sums of the step after",
        *("ordered tokens in any half", "ordered tokens too early", "a step that has ended"),
        *("parts too early", "a part without its last expert"),
    ),
)
def test_a_mistake_is_noticed(file, what, wrong, tmp_path, monkeypatch):
    if file == "few":  # what pairs have left where lines come
        monkeypatch.setenv("JAXMOE_EMULATED_AT_ONCE", "1")
    name = Path(f"csrc/peers/{file}.cuh")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.count(what) == 1
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text.replace(what, wrong), encoding="utf-8")
    broken = compiled(tmp_path / "peers", tmp_path)
    if "!= tag" in what:
        assert not run(broken, 2, 6, 5, "differs", 2)[0]
        return
    if file == "beside" and "break" in wrong:
        assert not all(run(broken, 3, *given, "spoils")[0] for given in SPOILT)
        return
    kind = (file,) if file in ("beside", "ordered") else ("none", 99)
    assert not all(run(broken, 3, 30, seed, *kind)[0] for seed in (1, 2, 3))
