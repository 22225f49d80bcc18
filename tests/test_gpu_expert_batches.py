"""expert_batches on a GPU: every format, kind of weights and gradient against the CPU's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import GemmConfig, expert_batches
from jaxmoe._gemm.tiles import ONLY_PROMOTED, PACKED, TILES
from jaxmoe._testing import assert_equal, poison
from tests.test_expert_batches import (
    COUNTS,
    FORMATS,
    INTER,
    KINDS,
    USED,
    E,
    H,
    M,
    by_rows,
    example,
    gradients,
    jitted,
    quantized_example,
)

pytestmark = pytest.mark.gpu


def on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])


def close(got, want):
    """Sums of two bytes in another order, and tokens that round to their neighbours for it."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


def check(x, experts, **options):
    run = jax.jit(functools.partial(expert_batches, **options))
    poison((E * M, 2 * INTER), jnp.bfloat16)
    y = run(x, COUNTS, experts)
    poison((E * M, 2 * INTER), jnp.bfloat16)
    assert_equal(run(x, COUNTS, experts), y)
    assert not np.asarray(y, np.float32)[~USED].any()
    close(y, jitted(*on_cpu((x, COUNTS, experts))))
    return y


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", KINDS)
def test_rows(name):
    kind, dtype, options = KINDS[name]
    check(*example(kind, dtype, **options))


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    check(*quantized_example(name))


@pytest.mark.parametrize("tile", sorted(set(TILES) - ONLY_PROMOTED), ids=str)
def test_every_tile_gives_the_bits_of_expert_rows(tile):
    config = GemmConfig(*tile), GemmConfig(*tile)
    if tile[3] > 1:  # a split needs a second step of k
        assert min(H, INTER) > 64
    x, experts = example("plain", jnp.bfloat16, layout="kn")
    y = check(x, experts, config=config)
    of_rows = jax.jit(functools.partial(by_rows, config=config))
    assert_equal(y, of_rows(x, COUNTS, experts))


@pytest.mark.parametrize("tile", sorted(t for t in PACKED if t[3] == 1), ids=str)
def test_packed_tiles(tile):
    check(*quantized_example("mxfp4"), config=(GemmConfig(*tile), GemmConfig(*tile)))


@pytest.mark.parametrize("kind", ("plain", "two"))
def test_gradients(kind):
    x, experts = example(kind, jnp.bfloat16)
    of = lambda x, e: expert_batches(x, COUNTS, e)  # noqa: E731
    close(gradients(of, x, experts), gradients(of, *on_cpu((x, experts))))


@pytest.mark.parametrize("name", ("fp8_block", "mxfp4"))
def test_gradients_beside_frozen_weights(name):
    x, experts = quantized_example(name)
    of = lambda e: lambda x: expert_batches(x, COUNTS, e)  # noqa: E731
    close(gradients(of(experts), x), gradients(of(on_cpu(experts)), on_cpu(x)))
