"""grouped_gemm: values, gradients, and the work it does, against the reference."""

import dataclasses
import functools
import inspect
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import _gemm, grouped_gemm, reference
from jaxmoe._testing import assert_close, assert_equal, normal
from jaxmoe.grouped_gemm import ranges

INT_MAX, INT_MIN = np.iinfo(np.int32).max, np.iinfo(np.int32).min


@dataclasses.dataclass(frozen=True)
class Case:
    why: str
    num_rows: int
    k: int
    n: int
    sizes: tuple[int, ...]


CASES = {
    "ragged": Case("every block is cut short somewhere", 150, 24, 40, (3, 70, 17, 60)),
    "one_group": Case("a plain product", 33, 16, 8, (33,)),
    "all_on_one": Case("one group, the others empty", 40, 8, 16, (0, 40, 0)),
    "empty": Case("no group has a row", 12, 8, 8, (0, 0)),
    "short": Case("rows past the groups", 50, 16, 24, (9, 0, 11)),
    "no_rows": Case("R = 0", 0, 8, 8, (0, 0, 0)),
    "one_row": Case("R = 1", 1, 8, 8, (0, 1)),
    "more_groups_than_rows": Case("decoding", 5, 16, 8, (0, 1, 0, 0, 2, 0, 0, 1, 0)),
    "odd_rows": Case("no multiple of anything", 29, 7, 13, (5, 11, 6)),
    "negative": Case("a negative size counts as 0", 20, 8, 8, (4, -3, 5)),
    "too_many": Case("the groups are longer than the rows", 20, 8, 8, (14, 14, 14)),
}
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def draw(case, dtype, layout="kn", bias=False, seed=0):
    rng = np.random.default_rng(seed)
    lhs = normal(rng, (case.num_rows, case.k), dtype)
    rhs = normal(rng, (len(case.sizes), case.k, case.n), dtype, case.k**-0.5)
    b = normal(rng, (len(case.sizes), case.n), dtype) if bias else None
    rhs = jax.device_put(np.asarray(rhs).swapaxes(1, 2)) if layout == "nk" else rhs
    return lhs, rhs, jax.device_put(np.array(case.sizes, np.int32)), b


def widen(tree):
    """Every array in 64 bits; inside `jax.enable_x64`, where JAX's own indices are 64 bits too."""

    def one(a):
        if not isinstance(a, jax.Array):
            return a
        return jnp.asarray(np.asarray(a).astype("int64" if a.dtype == jnp.int32 else "float64"))

    return jax.tree.map(one, tree)


@functools.partial(jax.jit, static_argnames=("dtypes", "weight_layout"))
def references(lhs, rhs, sizes, bias, dtypes, weight_layout="kn", group_offset=None):
    """The reference computed in each of `dtypes`, all in one program."""
    options = {"weight_layout": weight_layout, "group_offset": group_offset, "bias": bias}
    return [reference.grouped_gemm(lhs, rhs, sizes, **options, dtype=d) for d in dtypes]


def expected(lhs, rhs, sizes, bias=None, **kwargs):
    """The reference in a higher precision, and the naive computation in the dtype of `lhs`."""
    if lhs.dtype != jnp.float32:
        return references(lhs, rhs, sizes, bias, ("float32", lhs.dtype), **kwargs)
    with jax.enable_x64(True):
        lhs, rhs, sizes, bias, kwargs = widen((lhs, rhs, sizes, bias, kwargs))
        both = references(lhs, rhs, sizes, bias, ("float64", "float32"), **kwargs)
        return [np.asarray(a) for a in both]


product = jax.jit(grouped_gemm, static_argnames="weight_layout")


@pytest.mark.parametrize("name", CASES)
def test_value(name):
    index = list(CASES).index(name)
    dtype, layout, bias = DTYPES[index % 3], ("kn", "nk")[index % 2], index % 4 < 2
    lhs, rhs, sizes, b = draw(CASES[name], dtype, layout, bias)
    out = product(lhs, rhs, sizes, bias=b, weight_layout=layout)
    assert out.dtype == dtype
    assert_close(out, *expected(lhs, rhs, sizes, b, weight_layout=layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "bias"), (("kn", True), ("nk", False)))
def test_dtype_layout_and_bias(dtype, layout, bias):
    lhs, rhs, sizes, b = draw(CASES["ragged"], dtype, layout, bias, seed=1)
    out = jax.jit(lambda *a: grouped_gemm(*a, bias=b, weight_layout=layout))(lhs, rhs, sizes)
    assert_close(out, *expected(lhs, rhs, sizes, b, weight_layout=layout))


def test_rows_of_no_group_are_zero():
    lhs, rhs, sizes, bias = draw(CASES["short"], jnp.bfloat16, bias=True)
    out = grouped_gemm(lhs, rhs, sizes, bias=bias)
    assert_equal(out[20:], jnp.zeros((30, 24), jnp.bfloat16))


def test_result_dtype_is_wider_than_the_factors():
    lhs, rhs, sizes, _ = draw(CASES["ragged"], jnp.bfloat16)
    out = grouped_gemm(lhs, rhs, sizes, preferred_element_type=jnp.float32)
    want = reference.grouped_gemm(lhs, rhs, sizes)
    assert_close(out, want, want)  # products of bf16 are exact in f32: only the sum's order differs


def test_repeats_bitwise():
    lhs, rhs, sizes, _ = draw(CASES["ragged"], jnp.bfloat16)
    f = jax.jit(grouped_gemm)
    assert_equal(f(lhs, rhs, sizes), f(lhs, rhs, sizes))


def test_takes_the_arguments_of_ragged_dot():
    ours = list(inspect.signature(grouped_gemm).parameters)
    theirs = list(inspect.signature(jax.lax.ragged_dot).parameters)
    assert ours[: len(theirs)] == theirs or ours[:6] == theirs  # jax < 0.11 has six
    lhs, rhs, sizes, _ = draw(CASES["short"], jnp.bfloat16)
    args = (lhs, rhs, sizes, "highest", jnp.float32)
    want = jax.lax.ragged_dot(*args)
    assert_close(grouped_gemm(*args), want, want)
    assert_equal(grouped_gemm(*args, None, None), grouped_gemm(*args, out_sharding=None))


def test_precision_reaches_the_product():
    lhs, rhs, sizes, _ = draw(CASES["short"], jnp.float32)
    text = jax.jit(grouped_gemm, static_argnums=3).lower(lhs, rhs, sizes, "highest").as_text()
    assert re.search(r"dot_general.*precision = \[HIGHEST, HIGHEST\]", text)


@pytest.mark.parametrize("offset", (0, 2, 3, 5, -1, INT_MAX, INT_MIN))
def test_group_offset(offset):
    """Only rows of groups offset .. offset + 2 have a matrix; groups that do not exist, none."""
    lhs, rhs, _, bias = draw(CASES["short"], jnp.float32, bias=True)
    sizes = jnp.array([5, 3, 0, 20, 9], jnp.int32)
    for given in (np.array([offset], np.int32), np.int32(offset)):
        out = product(lhs, rhs, sizes, group_offset=given, bias=bias)
        want = jnp.array([offset], jnp.int32)
        assert_close(out, *expected(lhs, rhs, sizes, bias, group_offset=want))


@pytest.mark.parametrize("sizes", ((INT_MAX, 3, INT_MIN), (5, INT_MAX, INT_MAX), (INT_MIN, 0, 50)))
def test_garbage_sizes_read_nothing_foreign(sizes):
    """Groups are cut at the last row, whatever their sizes say."""
    lhs, rhs, _, _ = draw(CASES["short"], jnp.float32)
    ends = np.minimum(np.cumsum(np.maximum(np.array(sizes, np.int64), 0)), 50)
    legal = jnp.array(np.diff(ends, prepend=0), jnp.int32)
    out = grouped_gemm(lhs, rhs, jnp.array(sizes, jnp.int32))
    assert_equal(out, grouped_gemm(lhs, rhs, legal))


@pytest.mark.parametrize("batch", (False, True))
def test_many_garbage_sizes_leave_the_rows_to_the_first_group(batch):
    """The sum of the sizes is beyond int32 many times over."""
    lhs, rhs = jnp.ones((10, 8)), jnp.arange(1.0, 301.0)[:, None, None] * jnp.ones((300, 8, 8))
    sizes = jnp.full((300,), INT_MAX, jnp.int32)
    out = grouped_gemm(lhs, rhs, sizes)
    if batch:
        out = jax.vmap(grouped_gemm, (0, None, 0))(lhs[None], rhs, sizes[None])[0]
    assert_equal(out, jnp.full((10, 8), 8.0))


# NumPy's sizes of 64 bits are more than a program would take.
_ranges = jax.jit(ranges, static_argnums=1)


def compiled_ranges(sizes, num_rows):
    return (_ranges if isinstance(sizes, jax.Array) else ranges)(sizes, num_rows)


@pytest.mark.parametrize("num_rows", (10, 2**30, INT_MAX))
@pytest.mark.parametrize(
    "sizes",
    (
        np.full(40, INT_MAX, np.int32),
        np.array([4_000_000_000, 2], np.uint32),
        np.array([3, 4_000_000_000, 2], np.uint32),
        np.array([2, 2**32 + 1, -(2**63), 2**63 - 1, 4], np.int64),
        np.array([1, 2**64 - 1, 5], np.uint64),
        np.array([127, -128, 5] * 3, np.int8),
        np.array([2**30 - 1, 2**30, 1, 2**30, 7], np.int32),
    ),
)
def test_ranges_are_exact_for_any_integers(num_rows, sizes):
    """The running sum stops at the last row: groups never overlap, whatever their type."""
    ends, total = [], 0
    for size in sizes.tolist():
        total = min(total + max(size, 0), num_rows)
        ends.append(total)
    given = [sizes] + [jnp.asarray(sizes)] * (sizes.dtype.itemsize < 8)
    for group_sizes in given:
        starts, counts = compiled_ranges(group_sizes, num_rows)
        assert starts.dtype == counts.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(starts, np.int64) + counts, ends)
        np.testing.assert_array_equal(starts, [0, *ends[:-1]])


@pytest.mark.parametrize(
    "offset",
    (2**31 + 1, 2**32, 2**64, -(2**70), np.uint32(2**32 - 1), np.int64(2**32), np.uint64(2**63)),
)
def test_group_offset_of_any_integer_type(offset):
    """An offset beyond int32 leaves no group; it does not come back as a small one."""
    lhs, rhs, sizes, _ = draw(CASES["short"], jnp.float32)
    assert_equal(grouped_gemm(lhs, rhs, sizes, group_offset=offset), jnp.zeros((50, 24)))


@pytest.mark.parametrize("dtype", (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32))
def test_narrow_group_offset_and_sizes(dtype):
    """Types that hold neither the number of rows nor that of groups."""
    lhs, rhs = jnp.ones((400, 8)), jnp.ones((200, 8, 8))
    sizes = jnp.ones((400,), dtype)
    out = grouped_gemm(lhs, rhs, sizes, group_offset=jnp.array(100, dtype))
    assert_equal(out[:, 0], jnp.zeros(400).at[100:300].set(8.0))


def test_garbage_starts_are_cut_to_the_batch():
    """The primitive's ranges may say anything; a range cut to nothing leaves zeros."""
    rng = np.random.default_rng(3)
    x, w = normal(rng, (2, 6, 8)), normal(rng, (1, 3, 8, 8))
    starts = jnp.array([[-5, 4, INT_MAX], [INT_MIN, 6, 1]], jnp.int32)
    sizes = jnp.array([[2, INT_MAX, 5], [-7, 3, INT_MIN]], jnp.int32)
    params = {"weight_layout": "kn", "out_dtype": jnp.dtype("float32"), "precision": None}
    (out,) = _gemm.op.gmm(x, w, starts, sizes, None, config=None, **params)
    want = jnp.zeros((2, 6, 8)).at[0, :2].set(x[0, :2] @ w[0, 0]).at[0, 4:].set(x[0, 4:] @ w[0, 1])
    assert_close(out, want, want)


def test_nan_stays_in_its_row():
    lhs, rhs, sizes, _ = draw(CASES["ragged"], jnp.bfloat16)
    clean = grouped_gemm(lhs, rhs, sizes)
    dirty = grouped_gemm(lhs.at[50].set(jnp.nan), rhs, sizes)
    assert jnp.isnan(dirty[50]).all()
    assert_equal(dirty.at[50].set(0), clean.at[50].set(0))


def test_nan_in_weights_without_rows_and_rows_without_group_has_no_effect():
    lhs, rhs, sizes, _ = draw(CASES["short"], jnp.float32)
    poisoned = lhs.at[20:].set(jnp.nan), rhs.at[1].set(jnp.nan)
    assert_equal(grouped_gemm(*poisoned, sizes), grouped_gemm(lhs, rhs, sizes))

    def loss(lhs, rhs):
        return jnp.sum(grouped_gemm(lhs, rhs, sizes) ** 2)

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    clean, dirty = (gradients(*a) for a in ((lhs, rhs), poisoned))
    assert_equal(dirty[0], clean[0])
    assert_equal(dirty[1], clean[1])
    assert_equal(clean[1][1], jnp.zeros_like(clean[1][1]))  # the gradient of an unused matrix


@pytest.mark.parametrize(
    "name, layout",
    (("ragged", "nk"), ("short", "kn"), ("odd_rows", "nk"), ("empty", "kn"), ("no_rows", "nk")),
)
def test_gradient(name, layout):
    lhs, rhs, sizes, bias = draw(CASES[name], jnp.float32, layout, bias=True)
    seed = normal(np.random.default_rng(9), (CASES[name].num_rows, CASES[name].n))

    def gradients(fn, args, **kwargs):
        def loss(lhs, rhs, bias, sizes, seed):
            out = fn(lhs, rhs, sizes, bias=bias, weight_layout=layout, **kwargs)
            return jnp.sum(jnp.sin(out) * seed)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*args)

    args = (lhs, rhs, bias, sizes, seed)
    ours, naive = gradients(grouped_gemm, args), gradients(reference.grouped_gemm, args)
    with jax.enable_x64(True):
        want = gradients(reference.grouped_gemm, widen(args), dtype=jnp.float64)
        want = jax.tree.map(np.asarray, want)
    jax.tree.map(assert_close, ours, want, naive)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_gradient_dtype_is_that_of_the_argument(dtype):
    """bf16 gradients of an f32 result: computed in f32, rounded once."""
    lhs, rhs, sizes, _ = draw(CASES["ragged"], dtype)

    def gradients(fn, *args, **kwargs):
        loss = lambda a, b: jnp.sum(fn(a, b, sizes, **kwargs) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(*args)

    ours = gradients(grouped_gemm, lhs, rhs, preferred_element_type=jnp.float32)
    wide = gradients(reference.grouped_gemm, *(a.astype(jnp.float32) for a in (lhs, rhs)))
    naive = gradients(reference.grouped_gemm, lhs, rhs, dtype=dtype)
    assert [g.dtype for g in ours] == [dtype, dtype]
    jax.tree.map(assert_close, ours, wide, naive)


# What is compiled once: rows, k, n, groups, layout.
PROGRAMS = ((17, 8, 1, 1, "nk"), (64, 1, 16, 7, "kn"), (130, 20, 16, 4, "nk"))


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(program=st.sampled_from(PROGRAMS), data=st.data(), seed=st.integers(0, 2**31))
def test_random_groups(program, data, seed):
    num_rows, k, n, num_groups, layout = program
    weights = data.draw(st.lists(st.integers(0, 6), min_size=num_groups, max_size=num_groups))
    fill = data.draw(st.floats(0, 1.2))
    total = max(sum(weights), 1)
    sizes = tuple(int(w / total * fill * num_rows) for w in weights)
    lhs, rhs, sizes, _ = draw(Case("", num_rows, k, n, sizes), jnp.bfloat16, layout, seed=seed)
    out = product(lhs, rhs, sizes, weight_layout=layout)
    assert_close(out, *expected(lhs, rhs, sizes, weight_layout=layout))


def test_steps_of_the_loop_are_the_blocks_of_the_rows_in_use():
    """Groups without rows cost nothing: the trip count is sum of ceil(size / block)."""
    sizes = jnp.array([[0, 40, 0, 1, 0, 0, 17, 0]], jnp.int32)
    starts = jnp.cumsum(sizes, axis=1) - sizes
    block = _gemm.xla.block_rows(100, 8)
    assert block == 16
    steps = _gemm.xla.for_each_block(100, starts, sizes, lambda n, *_: n + 1, jnp.int32(0))
    assert int(steps) == 3 + 1 + 2


@pytest.mark.parametrize("num_rows, num_groups, block", ((5, 9, 5), (160, 10, 16), (64, 1, 64)))
def test_block_rows(num_rows, num_groups, block):
    assert _gemm.xla.block_rows(num_rows, num_groups) == block


def largest_tensor(text, pattern, separator):
    """Elements of the largest tensor type in the text of a program."""
    shapes = re.findall(pattern, text)
    assert shapes
    return max(int(np.prod([int(d) for d in s.split(separator) if d.isdigit()])) for s in shapes)


@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_no_array_is_larger_than_arguments_and_results(layout):
    """Nothing like [R, E, ...] or [R, K, N] exists, forward and backward, before and after XLA."""
    lhs, rhs, sizes, _ = draw(Case("", 96, 40, 56, (10,) * 8), jnp.float32, layout)

    def loss(lhs, rhs):
        return jnp.sum(grouped_gemm(lhs, rhs, sizes, weight_layout=layout) ** 2)

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(lhs, rhs)
    limit = max(lhs.size, rhs.size, 96 * 56)
    assert limit < 96 * 8 * 40  # the smallest array of the kind that must not be there
    assert largest_tensor(lowered.as_text(), r"tensor<((?:\d+x)+)[a-z]", "x") <= limit
    compiled = lowered.compile().as_text()
    assert largest_tensor(compiled, r"(?:f32|s32|pred)\[([\d,]+)\]", ",") <= limit
