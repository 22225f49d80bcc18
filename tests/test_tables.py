"""What the package and its CUDA extension both know: compared, and named where it differs."""

import re

import pytest

from jaxmoe import _tables
from jaxmoe._jax import targets as _targets

# Sizes of scratch are compared where the extension has them: here one that each formula gives.
SIZES = {
    "plan_scratch": {(3, 30, 7): 1, (1, 262145, 2): 2 * 65},
    "mlp_index": {(30, 7, False): 4 + 8 + 32 + 32 + 1, (30, 7, True): 4 + 32 + 8 + 32 + 32 + 1},
    "mlp_floats": {
        (0, 0, 6, 12, 16, 32): 0,
        (3, 0, 6, 12, 144, 272): 12 + 36 + 1024,
        (8, 1, 5, 10, 128, 256): 12 + 12,
        (4, 3, 5, 10, 128, 256): 0,
    },
    "slice_sums": {(8, 512, 768): 12 * 8 * 512, (4, 2880, 2880): 45 * 4 * 2880},
    # slots, tokens and small numbers, each from a multiple of 256 on; rows of devices; of choices
    "peer_bytes": {(24, 3, 2, 96, 6): (768 + 4608 + 1280, 4608 + 1280, 6912)},
}


@pytest.mark.skipif(not _targets.cuda_available(), reason="no CUDA extension")
def test_the_extension_has_the_same_tables():
    theirs = _targets.tables()
    assert all(len(theirs[name]) > 1 for name in SIZES)
    _tables.check(theirs)


def test_sizes_of_scratch():
    ours = _tables.own(SIZES)
    assert {name: ours[name] for name in SIZES} == SIZES


@pytest.mark.parametrize("name", sorted(_tables.own({})))
def test_a_table_that_differs_is_named(name):
    theirs = _tables.own({})
    _tables.check(theirs)
    theirs[name] = dict.fromkeys(SIZES.get(name, ["another"]), -1)
    message = f"the CUDA extension is not of this version of the package: its table {name!r} is"
    with pytest.raises(ImportError, match=re.escape(message)):
        _tables.check(theirs)


def test_an_extension_without_tables_is_refused():
    with pytest.raises(ImportError, match="is None, not"):
        _tables.check({})
