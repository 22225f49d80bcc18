"""Writes tests/slow.txt, the tests of which a quick run takes one set of parameters or none.

    rm -rf build/jax_cache; make test ARGS="--quick --junitxml=build/quick.xml"
    rm -rf build/jax_cache; make test-all ARGS=--junitxml=build/all.xml
    python tools/slow_tests.py build/quick.xml build/all.xml

Without the report of a whole run, which takes long, tests are only added: by what a quick run has
become slow since.

A program that one test compiled is free for the next, so the times of a quick run say more of what
is left in it: what takes long there is left out whole. What was left out of that run stays out, if
it is slow yet.
"""

import collections
import sys
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 1.0  # of all sets of parameters of a function, with an empty cache of programs
TOO_SLOW_S = 2.0  # of what a quick run took of them
HEAD = """\
# Tests that take more than a second with an empty cache of programs, all sets of parameters
# together. `make test` runs one set of each, and none of those that have one or that end with a
# minus; `make test-all` runs all. Written by tools/slow_tests.py.
"""


def seconds_of(report: Path) -> dict[str, float]:
    """Seconds of each function by its name, as pytest has it."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        path = str(case.get("classname")).replace(".", "/")
        name = f"{path}.py::{str(case.get('name')).split('[')[0]}"
        seconds[name] += float(case.get("time") or 0)
    return seconds


def main(quick: Path, whole: Path | None = None) -> None:
    """Writes the file from the reports of a quick run and, if there is one, of a whole one."""
    of_few = seconds_of(quick)
    path = ROOT / "tests" / "slow.txt"
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    names = {name for name, time in of_few.items() if time > SLOW_S}
    if whole is None:
        names |= {line.removesuffix(" -") for line in lines}
    else:
        names |= {name for name, time in seconds_of(whole).items() if time > SLOW_S}
    out = {line.removesuffix(" -") for line in lines if line.endswith(" -")} - of_few.keys()
    out |= {name for name, time in of_few.items() if time > TOO_SLOW_S}
    lines = [f"{name} -\n" if name in out else f"{name}\n" for name in sorted(names)]
    path.write_text(HEAD + "".join(lines), "utf-8")
    print(f"{len(lines)} slow tests, {sum(name in out for name in names)} left out")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
