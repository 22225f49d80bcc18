"""Weight gradients on a GPU: every kernel variant, boundaries of its tiles, garbage, repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import _gemm, grouped_gemm, grouped_gemm_weight_grad, reference
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_close, assert_equal, normal, poison

pytestmark = pytest.mark.gpu

INT_MAX, INT_MIN = np.iinfo(np.int32).max, np.iinfo(np.int32).min

# Around slices of 16 rows, steps of 64 and all the stages, with empty groups at both ends.
SIZES = (0, 1, 7, 16, 17, 0, 0, 31, 64, 65, 100, 127, 128, 129, 257, 400, 0)
DTYPES = (jnp.bfloat16, jnp.float16)


def on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])


def groups_of(sizes):
    """The starts and sizes of one batch. Made on the host: initcheck does not see XLA's copies."""
    starts = np.cumsum((0, *sizes[:-1]))
    return tuple(jnp.asarray(np.asarray(a, np.int32)[None]) for a in (starts, sizes))


def check(x, dy, starts, sizes, out_dtype=None, weight_shape=None):
    """Runs the kernel over poisoned memory and compares it with XLA on the CPU."""
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    params = {"weight_shape": weight_shape or (1, starts.shape[1]), "precision": None}
    kernel = jax.jit(lambda *a: _gemm.op.tgmm(*a, out_dtype=out_dtype, **params)[0])
    poison((*params["weight_shape"], x.shape[2], dy.shape[2]), out_dtype)
    before = _targets.execute_count("jaxmoe_weight_grad_v1")
    out = kernel(x, dy, starts, sizes, None)
    assert _targets.execute_count("jaxmoe_weight_grad_v1") > before
    assert out.dtype == out_dtype
    assert_equal(out, kernel(x, dy, starts, sizes, None))
    x, dy, starts, sizes = on_cpu((x, dy, starts, sizes))
    (naive,) = _gemm.xla.tgmm_xla(x, dy, starts, sizes, out_dtype=out_dtype, **params)
    with jax.enable_x64(True):
        a, b = (jnp.asarray(np.asarray(v, np.float64)) for v in (x, dy))
        want = sum_of_groups(a, b, np.asarray(starts), np.asarray(sizes), params["weight_shape"])
        size = sum_of_groups(
            abs(a), abs(b), np.asarray(starts), np.asarray(sizes), params["weight_shape"]
        )
    assert_close_sums(out, want, naive, size)
    return out


def assert_close_sums(out, want, naive, size):
    """The rule of all tests, but for float32: tensor cores cut off what is below a sum's last bit.

    `size` is the sum of the magnitudes.
    """
    if out.dtype != jnp.float32:
        assert_close(out, want, naive)
        return
    error = np.abs(np.asarray(out, np.float64) - np.asarray(want))
    assert (error <= 2.0**-21 * size).all(), (error / np.maximum(size, 1e-30)).max()


def sum_of_groups(x, dy, starts, sizes, weight_shape):
    """The definition, in float64; ranges are cut to the rows that exist."""
    batch, rows, k = x.shape
    x, dy = np.asarray(x), np.asarray(dy)
    weights = weight_shape[0] * weight_shape[1]
    dw = np.zeros((weights, k, dy.shape[2]))
    for b in range(batch):
        for g in range(starts.shape[1]):
            first = int(np.clip(int(starts[b, g]), 0, rows))
            end = int(np.clip(int(starts[b, g]) + max(int(sizes[b, g]), 0), 0, rows))
            weight = (b * starts.shape[1] + g) % weights
            dw[weight] += x[b, first:end].T @ dy[b, first:end]
    return dw.reshape(*weight_shape, *dw.shape[1:])


def operands(rng, num_rows, k, n, dtype, batch=1):
    return normal(rng, (batch, num_rows, k), dtype), normal(rng, (batch, num_rows, n), dtype)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("k", (120, 328), ids=("alone", "pairs"))
def test_every_variant(k, dtype):
    rng = np.random.default_rng(k)
    sizes = tuple(int(s) for s in rng.permutation(SIZES))
    x, dy = operands(rng, sum(SIZES) + 21, k, 520, dtype)  # K and N end inside boxes and tiles
    for out_dtype in (dtype, jnp.float32):
        out = check(x, dy, *groups_of(sizes), out_dtype)
        assert not np.asarray(out[0, [i for i, s in enumerate(sizes) if s == 0]]).any()


@pytest.mark.parametrize("k", (8, 128, 136, 256, 1416))
@pytest.mark.parametrize("n", (8, 256, 264))
def test_row_lengths(k, n):
    rng = np.random.default_rng([k, n])
    sizes = (3, 0, 70, 11, 150)
    x, dy = operands(rng, 240, k, n, jnp.bfloat16)
    check(x, dy, *groups_of(sizes))


@pytest.mark.parametrize("num_rows", (1, 15, 63, 64, 1024, 3000))
def test_one_expert(num_rows):
    rng = np.random.default_rng(num_rows)
    x, dy = operands(rng, num_rows, 256, 512, jnp.bfloat16)
    check(x, dy, jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), num_rows, jnp.int32))


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "starts, sizes",
    (
        ((INT_MAX, 3, INT_MIN), (INT_MAX, 3, INT_MIN)),
        ((5, -9, 30), (INT_MAX, 20, -4)),
        ((INT_MIN, 0, 36), (INT_MAX, 37, 1)),
        ((-7, 20, 37), (50, -1, 5)),
        ((0, 0, 0), (0, 0, 0)),
    ),
)
def test_garbage_groups_stay_in_bounds(starts, sizes):
    rng = np.random.default_rng(3)
    x, dy = operands(rng, 37, 264, 64, jnp.bfloat16)
    check(x, dy, *(jnp.asarray(np.asarray(a, np.int32)[None]) for a in (starts, sizes)))


def test_no_rows_and_no_groups():
    x, dy = operands(np.random.default_rng(0), 0, 64, 64, jnp.bfloat16)
    check(x, dy, jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), jnp.int32))


@pytest.mark.sanitizer
def test_nan_stays_in_its_group():
    rng = np.random.default_rng(7)
    sizes = (100, 9, 170)
    groups = groups_of(sizes)
    x, dy = operands(rng, 300, 264, 264, jnp.bfloat16)
    rows = np.r_[100:109, 279:300]  # the group in the middle, and the rows of none
    bad = (a.at[:, rows].set(jnp.nan) for a in (x, dy))
    run = jax.jit(
        lambda a, b: _gemm.op.tgmm(
            a, b, *groups, None, weight_shape=(1, 3), out_dtype=jnp.dtype(a.dtype), precision=None
        )[0]
    )
    clean, dirty = run(x, dy), run(*bad)
    assert np.isnan(np.asarray(dirty[0, 1], np.float32)).all()
    assert_equal(dirty[0, ::2], clean[0, ::2])


@pytest.mark.parametrize("weight_shape", ((1, 3), (2, 3), (6, 3)))
def test_batches(weight_shape):
    """Six batches of three groups: shared weights, shared by three each, and their own."""
    rng = np.random.default_rng(weight_shape[0])
    sizes = rng.integers(0, 90, (6, 3)).astype(np.int32)
    starts = np.concatenate([np.zeros((6, 1), np.int32), np.cumsum(sizes, 1)[:, :-1]], 1)
    x, dy = operands(rng, 270, 136, 72, jnp.bfloat16, batch=6)
    groups = jnp.asarray(starts, jnp.int32), jnp.asarray(sizes)
    check(x, dy, *groups, weight_shape=weight_shape)
    check(x, dy, *groups, jnp.float32, weight_shape)


def test_several_groups_a_weight():
    rng = np.random.default_rng(12)
    sizes = (3, 70, 0, 129, 0, 0, 64, 20, 1, 5, 0, 90)
    x, dy = operands(rng, sum(sizes), 136, 264, jnp.bfloat16)
    groups = groups_of(sizes)
    check(x, dy, *groups, weight_shape=(1, 4))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("out_f32", (False, True), ids=("16", "f32"))
def test_accumulated(out_f32, dtype):
    """Added to what there is, in its memory if nothing else uses it."""
    rng = np.random.default_rng(out_f32)
    sizes = tuple(int(s) for s in rng.permutation(SIZES))
    out_dtype, params = jnp.dtype(jnp.float32 if out_f32 else dtype), {"precision": None}
    for k, n in ((120, 264), (264, 120)):  # alone and in pairs
        x, dy = operands(rng, sum(SIZES) + 21, k, n, dtype)
        shape = (1, len(sizes), k, n)
        init, groups = normal(rng, shape, out_dtype), groups_of(sizes)

        def run(*a, shape=shape, out_dtype=out_dtype):
            return _gemm.op.tgmm(*a, weight_shape=shape[:2], out_dtype=out_dtype, **params)[0]

        poison(shape, out_dtype)
        kept = np.asarray(init)
        out = jax.jit(run)(x, dy, *groups, init)
        assert_equal(init, kept)  # still used, so XLA copies it
        assert_equal(out, jax.jit(run)(x, dy, *groups, init))
        donated = jax.jit(run, donate_argnums=4)(x, dy, *groups, jnp.array(init))
        assert_equal(out, donated)
        naive = run(*on_cpu((x, dy, *groups, init)))
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, dy)]
            ranges = [np.asarray(a) for a in groups]
            old = np.asarray(init, np.float64)
            want = sum_of_groups(*wide, *ranges, shape[:2]) + old
            size = sum_of_groups(*map(abs, wide), *ranges, shape[:2]) + abs(old)
        assert_close_sums(out, want, naive, size)


@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_microbatches_add_up_in_the_memory_of_the_first(layout):
    rng = np.random.default_rng(14)
    sizes = jnp.asarray(rng.integers(0, 60, (3, 5)), jnp.int32)
    lhs, dy = normal(rng, (3, 300, 136), jnp.bfloat16), normal(rng, (3, 300, 72), jnp.bfloat16)
    shape = (5, 136, 72) if layout == "kn" else (5, 72, 136)
    into = normal(rng, shape)

    def add(into, *part):
        return grouped_gemm_weight_grad(*part, accumulate_into=into, weight_layout=layout)

    want = into
    for part in zip(lhs, dy, sizes, strict=True):
        want = jax.jit(add)(want, *part)
    scanned = jax.jit(lambda i, *a: jax.lax.scan(lambda i, p: (add(i, *p), None), i, a)[0])
    assert_equal(scanned(into, lhs, dy, sizes), want)
    donated = jnp.array(into)
    address = donated.unsafe_buffer_pointer()
    out = jax.jit(add, donate_argnums=0)(donated, lhs[0], dy[0], sizes[0])
    assert out.unsafe_buffer_pointer() == address
    assert_equal(out, jax.jit(add)(into, lhs[0], dy[0], sizes[0]))


@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
def test_gradients_of_grouped_gemm(layout, dtype):
    rng = np.random.default_rng(5)
    sizes = jnp.asarray((40, 0, 129, 64, 3), jnp.int32)
    lhs = normal(rng, (250, 200), dtype)
    rhs = normal(rng, (5, 200, 328) if layout == "kn" else (5, 328, 200), dtype, 200**-0.5)
    ct = normal(rng, (250, 328), dtype)

    def gradients(fn, **options):
        def pullback(lhs, rhs, ct):
            return jax.vjp(lambda a, b: fn(a, b, sizes, weight_layout=layout, **options), lhs, rhs)[
                1
            ](ct)

        return jax.jit(pullback)

    got = gradients(grouped_gemm)(lhs, rhs, ct)
    host = on_cpu((lhs, rhs, ct))
    with jax.default_device(jax.devices("cpu")[0]):
        sizes = on_cpu(sizes)
        naive = gradients(reference.grouped_gemm, dtype=dtype)(*host)
        want = gradients(reference.grouped_gemm)(*(a.astype(jnp.float32) for a in host))
    for a, b, c in zip(got, want, naive, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, c)
    assert not np.asarray(got[1][1]).any()


def test_gradient_of_vmap_is_one_call():
    rng = np.random.default_rng(6)
    lhs, rhs = normal(rng, (3, 60, 64), jnp.bfloat16), normal(rng, (4, 64, 72), jnp.bfloat16, 0.125)
    sizes = jnp.asarray(rng.integers(0, 16, (3, 4)), jnp.int32)

    def loss(rhs, lhs, sizes):
        out = jax.vmap(grouped_gemm, (0, None, 0))(lhs, rhs, sizes)
        return jnp.sum(out.astype(jnp.float32))

    before = _targets.execute_count("jaxmoe_weight_grad_v1")
    got = jax.jit(jax.grad(loss))(rhs, lhs, sizes)
    assert _targets.execute_count("jaxmoe_weight_grad_v1") == before + 1
    want = np.zeros(rhs.shape)
    for b in range(3):
        ends = np.cumsum(np.asarray(sizes[b]))
        for e in range(4):
            rows = np.asarray(lhs[b, ends[e] - int(sizes[b, e]) : ends[e]], np.float64)
            want[e] += rows.sum(0)[:, None]
    assert_close(got, want, jnp.asarray(want, jnp.bfloat16))
