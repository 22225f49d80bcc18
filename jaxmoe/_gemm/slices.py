"""Whether one token runs by slices of the intermediate, see csrc/gemm/sm90/slices.cuh."""

import math

from jaxmoe._gemm.tiles import MAX_PLANNED_ROWS

# Features of the intermediate in a slice of an expert.
FEATURES = 64

# The least and the largest H that the kernels have.
HIDDEN = 512, 32768

_SMS = 132  # of an H100 or H200 SXM

# Slices are dealt out to SMs once, or twice and nearly even: 1.4 rounds (gpt-oss-120b) take 8 %
# longer than two kernels, whose tiles are smaller, and 3.4 (mixtral-8x7b) are level. Where few SMs
# have one, the tiles of two kernels are spread over more of them.
_MIN_UNITS = 64
_MAX_ROUNDS = 2
_MIN_EVEN = 0.9


def slice_sums(num_rows: int, hidden: int, intermediate: int) -> int:
    """Floats of the sums that slices leave: of each, of each row."""
    return intermediate // FEATURES * num_rows * hidden


def pays(num_rows: int, local_share: float, hidden: int, intermediate: int) -> bool:
    """Whether a token with `num_rows` choices is faster by slices than by a kernel a product.

    `local_share` of the experts are here, and of its choices.
    """
    least, most = HIDDEN
    if not least <= hidden <= most or intermediate % FEATURES or num_rows > MAX_PLANNED_ROWS:
        return False
    units = local_share * num_rows * (intermediate // FEATURES)
    rounds = math.ceil(units / _SMS)
    even = rounds == 1 or units >= _MIN_EVEN * rounds * _SMS
    return units >= _MIN_UNITS and rounds <= _MAX_ROUNDS and even
