"""Writes tests/slow.txt, the tests of which a quick run takes one set of parameters or none.

rm -rf build/jax_cache; make test-all ARGS=--junitxml=build/tests.xml
python tools/slow_tests.py build/tests.xml
"""

import collections
import sys
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 2.0  # of all sets of parameters of a function, with an empty cache of programs
HEAD = """\
# Tests that take more than two seconds with an empty cache of programs, all sets of parameters
# together. `make test` runs one set of each, and none of those that have one; `make test-all` runs
# all. Written by tools/slow_tests.py.
"""


def slow(report: Path) -> list[str]:
    """Names of the slow functions, as pytest has them, in order."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        path = str(case.get("classname")).replace(".", "/")
        name = f"{path}.py::{str(case.get('name')).split('[')[0]}"
        seconds[name] += float(case.get("time") or 0)
    return sorted(name for name, time in seconds.items() if time > SLOW_S)


if __name__ == "__main__":
    names = slow(Path(sys.argv[1]))
    (ROOT / "tests" / "slow.txt").write_text(HEAD + "".join(f"{n}\n" for n in names), "utf-8")
    print(f"{len(names)} slow tests")
