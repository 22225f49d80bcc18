"""The weight gradient of gathered rows, in pure XLA, against a loop over its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import _heuristics, _tgmm_rows
from jaxmoe._testing import assert_equal, assert_vmap_is_loop, normal

E, T, SOURCE, K, N = 4, 23, 9, 6, 5
SIZES = (7, 0, 11, 2)  # three rows are in no group
INDICES = (-1, SOURCE, np.iinfo(np.int32).min, np.iinfo(np.int32).max)


def arguments(gathered, accumulate, seed=0):
    rng = np.random.default_rng(seed)
    index = rng.integers(0, SOURCE, T).astype(np.int32)
    index[[3, 9, 10, 18]] = INDICES
    x = normal(rng, (SOURCE if gathered == "x" else T, K))
    dy = normal(rng, (SOURCE if gathered == "dy" else T, N))
    init = normal(rng, (E, K, N)) if accumulate else _tgmm_rows.no_init(jnp.float32)
    starts = jnp.asarray(np.cumsum((0, *SIZES[:-1])), jnp.int32)
    row_index = jnp.asarray(index) if gathered else _tgmm_rows.no_index()
    return x, dy, starts, jnp.asarray(SIZES, jnp.int32), row_index, init


def tgmm_rows(*args, gathered, out_dtype=jnp.float32):
    (dw,) = _tgmm_rows.tgmm_rows(*args, gathered=gathered, out_dtype=out_dtype, precision=None)
    return dw


def by_rows(x, dy, starts, sizes, row_index, init, gathered):
    x, dy, index = np.asarray(x, np.float64), np.asarray(dy, np.float64), np.asarray(row_index)
    dw = np.asarray(init, np.float64) if init.size else np.zeros((E, K, N))
    for e in range(E):
        for t in range(int(starts[e]), int(starts[e] + sizes[e])):
            if gathered and not 0 <= index[t] < SOURCE:
                continue
            a = x[index[t]] if gathered == "x" else x[t]
            b = dy[index[t]] if gathered == "dy" else dy[t]
            dw[e] += np.outer(a, b)
    return dw


@pytest.mark.parametrize("accumulate", (False, True))
@pytest.mark.parametrize("gathered", _tgmm_rows.GATHERED)
def test_is_a_sum_over_rows(gathered, accumulate):
    args = arguments(gathered, accumulate)
    dw = jax.jit(lambda *a: tgmm_rows(*a, gathered=gathered))(*args)
    np.testing.assert_allclose(dw, by_rows(*args, gathered), rtol=1e-5, atol=1e-5)
    assert_equal(dw[1], args[5][1] if accumulate else jnp.zeros((K, N)))


def test_what_there_is_is_added_before_rounding():
    x, dy, starts, sizes, index, _ = arguments("x", False)
    init = jnp.full((E, K, N), 256, jnp.bfloat16)  # 1 is half of its ulp
    x, dy = jnp.full_like(x, 1, jnp.bfloat16), jnp.full_like(dy, 0.0, jnp.bfloat16)
    dy = dy.at[:2].set(0.75)  # each rounds away by itself
    index = jnp.arange(T, dtype=jnp.int32) % SOURCE
    dw = tgmm_rows(x, dy, starts, sizes, index, init, gathered="x", out_dtype=jnp.bfloat16)
    assert_equal(dw[0], jnp.full((K, N), 258, jnp.bfloat16))


@pytest.mark.parametrize("mask", ((0, 0), (0, None), (None, 0)))
def test_vmap_is_a_loop(mask):
    (x, *_), (x2, *_) = arguments("x", True), arguments("x", True, 1)
    _, dy, *rest = arguments("x", True)
    args = (
        jnp.stack([x, x2]) if mask[0] == 0 else x,
        jnp.stack([dy, 2 * dy]) if mask[1] == 0 else dy,
    )
    assert_vmap_is_loop(lambda x, dy: tgmm_rows(x, dy, *rest, gathered="x"), args, mask)


def test_pairs_need_columns_for_both():
    assert [_heuristics.tgmm_cluster(c) for c in (8, 128, 136, 2048)] == [1, 1, 2, 2]
