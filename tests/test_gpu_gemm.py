"""grouped_gemm on a GPU: every kernel variant, boundaries of its tiles, garbage, repeats."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import GemmConfig, _gemm, grouped_gemm, reference
from jaxmoe._testing import assert_close, assert_equal, normal, poison

pytestmark = pytest.mark.gpu

INT_MAX, INT_MIN = np.iinfo(np.int32).max, np.iinfo(np.int32).min

# Around every tile and every wgmma width, with empty groups at both ends and in between.
SIZES = (0, 1, 7, 8, 9, 0, 0, 17, 33, 64, 65, 95, 113, 128, 129, 161, 200, 270, 289, 321, 0)
TILES = [tile for tile in _gemm.tiles.TILES if tile not in _gemm.tiles.ONLY_PROMOTED]


def on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])


def check(lhs, rhs, sizes, out_dtype=None, **kwargs):
    """Runs the kernel over poisoned memory and compares it with the reference on the CPU."""
    config = kwargs.pop("config", None)

    @jax.jit
    def kernel(lhs, rhs, sizes, arrays):
        return grouped_gemm(
            lhs, rhs, sizes, preferred_element_type=out_dtype, config=config, **kwargs, **arrays
        )

    arrays = {"bias": kwargs.pop("bias")} if "bias" in kwargs else {}
    poison((lhs.shape[0], 512), jnp.float32)
    out = kernel(lhs, rhs, sizes, arrays)
    assert out.dtype == (out_dtype or lhs.dtype)
    # What counts of garbage sizes: no negative group, no row past the last.
    counted = jnp.clip(sizes, 0, lhs.shape[0])
    args = on_cpu((lhs, rhs, counted, arrays))
    want = reference.grouped_gemm(*args[:3], **kwargs, **args[3])
    naive = reference.grouped_gemm(*args[:3], **kwargs, **args[3], dtype=lhs.dtype)
    assert_close(out, want, naive)
    assert_equal(out, kernel(lhs, rhs, sizes, arrays))
    return out


def operands(rng, num_rows, num_groups, k, n, dtype, layout="kn"):
    lhs = normal(rng, (num_rows, k), dtype)
    shape = (num_groups, k, n) if layout == "kn" else (num_groups, n, k)
    return lhs, normal(rng, shape, dtype, k**-0.5)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_variant(tile, layout, dtype):
    rng = np.random.default_rng([*map(int, tile), layout == "kn"])
    sizes = jnp.asarray(rng.permutation(SIZES), jnp.int32)
    num_rows = sum(SIZES) + 21  # the last rows are in no group
    # K and N end inside a step and inside a tile.
    lhs, rhs = operands(rng, num_rows, len(SIZES), 200, 328, dtype, layout)
    bias = normal(rng, (len(SIZES), 328), dtype)
    for raster in (0, 1, 2):
        config = GemmConfig(*tile, raster=raster)
        out = check(lhs, rhs, sizes, weight_layout=layout, config=config)
        assert not np.asarray(out[sum(SIZES) :]).any()
    check(lhs, rhs, sizes, jnp.float32, bias=bias, weight_layout=layout, config=config)


@pytest.mark.parametrize("k", (8, 64, 72, 704, 1408, 2880))
@pytest.mark.parametrize("n", (8, 120, 512))
def test_row_lengths(k, n):
    rng = np.random.default_rng([k, n])
    sizes = jnp.asarray((3, 0, 70, 11, 150), jnp.int32)
    check(*operands(rng, 240, 5, k, n, jnp.bfloat16), sizes)


@pytest.mark.parametrize("num_groups", (1, 8, 31, 32, 33, 160, 512))
def test_numbers_of_groups(num_groups):
    rng = np.random.default_rng(num_groups)
    sizes = jnp.asarray(rng.multinomial(300, np.ones(num_groups) / num_groups), jnp.int32)
    check(*operands(rng, 300, num_groups, 64, 48, jnp.bfloat16), sizes)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "sizes",
    (
        (INT_MAX, 3, INT_MIN),
        (5, INT_MAX, INT_MAX),
        (INT_MIN, 0, 50),
        (-7, 20, -1),
        (0, 0, 0),
    ),
)
@pytest.mark.parametrize("tile", ((128, 8, 1), (256, 160, 1), (256, 160, 2)), ids=str)
def test_garbage_group_sizes_stay_in_bounds(sizes, tile):
    rng = np.random.default_rng(3)
    lhs, rhs = operands(rng, 37, 3, 64, 64, jnp.bfloat16)
    check(lhs, rhs, jnp.asarray(sizes, jnp.int32), config=GemmConfig(*tile))


@pytest.mark.parametrize("rows", (1, 16, 17, 40))
def test_groups_too_small_for_both_ctas_of_a_cluster(rows):
    rng = np.random.default_rng(rows)
    lhs, rhs = operands(rng, 64 * rows, 64, 1024, 512, jnp.bfloat16)
    sizes = jnp.full((64,), rows, jnp.int32)
    run = jax.jit(lambda: grouped_gemm(lhs, rhs, sizes, config=GemmConfig(256, 160, cluster=2)))
    first = check(lhs, rhs, sizes, config=GemmConfig(256, 160, cluster=2))
    for out in [run() for _ in range(50)]:  # back to back, to meet every order of the warps
        assert_equal(out, first)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tile", ((256, 160), (128, 192)), ids=str)
def test_weights_that_are_brought_into_l2(tile):
    """Of groups of 32 rows and more and rows of more than 2048 bytes, of an odd number of steps."""
    lhs, rhs = operands(np.random.default_rng(7), 320, 8, 1112, 328, jnp.bfloat16, "nk")
    sizes = jnp.asarray((40, 0, 81, 39, 7, 73, 60, 20), jnp.int32)
    check(lhs, rhs, sizes, weight_layout="nk", config=GemmConfig(*tile))


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize(("k", "n"), ((1112, 328), (64, 256), (2048, 640)))
def test_one_stage_more_where_no_group_has_many_rows(k, n, layout):
    """The bits of a group are the same beside one of 75 rows, for which stages are wide."""
    few, many = (64, 0, 1, 33, 8, 63, 0, 17, 64, 5), (64, 0, 1, 33, 8, 63, 0, 17, 64, 75)
    lhs, rhs = operands(np.random.default_rng(8), sum(many), 10, k, n, jnp.bfloat16, layout)

    def product(*sizes):
        options = {"weight_layout": layout, "config": GemmConfig(256, 160)}
        return check(lhs[: sum(sizes)], rhs, jnp.asarray(sizes, jnp.int32), **options)

    narrow, wide = product(*few), product(*many)
    assert_equal(narrow, wide[: sum(few)])


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("cluster", (1, 2))
def test_rows_of_few_tiles_come_out_even(cluster, layout):
    """How many rows a tile has depends on all groups, the bits of a row on none."""
    sizes = (1030, 0, 257, 1, 640, 1601, 320)
    lhs, rhs = operands(np.random.default_rng(9), sum(sizes), 7, 200, 2056, jnp.bfloat16, layout)
    options = {"weight_layout": layout, "config": GemmConfig(256, 160, cluster=cluster)}
    together = check(lhs, rhs, jnp.asarray(sizes, jnp.int32), **options)
    for g, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        rows = slice(end - size, end)
        alone = grouped_gemm(lhs[rows], rhs[g : g + 1], jnp.asarray([size], jnp.int32), **options)
        assert_equal(alone, together[rows])


def test_a_tile_that_is_gone(monkeypatch):
    """Exported programs and saved tunings that ask for it get the one that has its bits."""
    monkeypatch.setattr(importlib.import_module("jaxmoe.grouped_gemm"), "ONLY_PROMOTED", set())
    lhs, rhs = operands(np.random.default_rng(4), 700, 5, 328, 264, jnp.bfloat16)
    sizes = jnp.asarray((300, 0, 129, 7, 200), jnp.int32)
    old = check(lhs, rhs, sizes, config=GemmConfig(256, 128))
    assert_equal(old, check(lhs, rhs, sizes, config=GemmConfig(256, 160)))


def test_group_offset_skips_rows_of_other_groups():
    rng = np.random.default_rng(5)
    lhs, rhs = operands(rng, 90, 3, 64, 64, jnp.bfloat16)
    sizes = jnp.asarray((10, 20, 30, 5, 15), jnp.int32)
    for offset in (0, 1, 2, 4, -1, INT_MAX):
        check(lhs, rhs, sizes, group_offset=jnp.asarray([offset], jnp.int32))


@pytest.mark.sanitizer
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_nan_stays_in_its_row(tile):
    rng = np.random.default_rng(7)
    lhs, rhs = operands(rng, 300, 3, 128, 128, jnp.bfloat16)
    sizes = jnp.asarray((100, 9, 170), jnp.int32)
    run = jax.jit(lambda a: grouped_gemm(a, rhs, sizes, config=GemmConfig(*tile)))
    clean = run(lhs)
    rows = np.array([0, 99, 105, 278])
    bad = run(lhs.at[rows, 5].set(jnp.nan).at[290].set(jnp.nan))
    assert np.isnan(np.asarray(bad[rows], np.float32)).all()
    others = np.setdiff1d(np.arange(300), rows)
    assert_equal(bad[others], clean[others])


def test_vmap_folds_into_groups():
    rng = np.random.default_rng(11)
    lhs = normal(rng, (4, 50, 64), jnp.bfloat16)
    rhs = normal(rng, (3, 64, 32), jnp.bfloat16, 0.125)
    rhs_batched = normal(rng, (4, 3, 64, 32), jnp.bfloat16, 0.125)
    sizes = jnp.asarray(rng.integers(0, 17, (4, 3)), jnp.int32)
    for axes, weights in (((0, None, 0), rhs), ((0, 0, 0), rhs_batched), ((0, 0, None), None)):
        weights = rhs_batched if weights is None else weights
        group_sizes = sizes if axes[2] == 0 else sizes[0]
        out = jax.jit(jax.vmap(grouped_gemm, axes))(lhs, weights, group_sizes)
        for b in range(4):
            one = grouped_gemm(
                lhs[b],
                weights[b] if axes[1] == 0 else weights,
                group_sizes[b] if axes[2] == 0 else group_sizes,
            )
            assert_equal(out[b], one)
