"""Weight gradients: against a loop over the rows; the public one and its sums."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import _gemm, grouped_gemm, grouped_gemm_weight_grad, reference
from jaxmoe._testing import assert_equal, assert_vmap_is_loop, normal
from tests.lowered import cuda_text

E, T, K, N = 4, 23, 6, 5
SIZES = (7, 0, 11, 2)  # three rows are in no group


def arguments(accumulate, seed=0):
    rng = np.random.default_rng(seed)
    x, dy = normal(rng, (1, T, K)), normal(rng, (1, T, N))
    starts, sizes = (jnp.asarray(a, jnp.int32)[None] for a in (np.cumsum((0, *SIZES[:-1])), SIZES))
    return x, dy, starts, sizes, normal(rng, (1, E, K, N)) if accumulate else None


def tgmm(*args, out_dtype=jnp.float32):
    (dw,) = _gemm.op.tgmm(*args, weight_shape=(1, E), out_dtype=out_dtype, precision=None)
    return dw


def by_rows(x, dy, starts, sizes, init):
    x, dy = np.asarray(x[0], np.float64), np.asarray(dy[0], np.float64)
    dw = np.zeros((1, E, K, N)) if init is None else np.asarray(init, np.float64)
    for e in range(E):
        for t in range(int(starts[0, e]), int(starts[0, e] + sizes[0, e])):
            dw[0, e] += np.outer(x[t], dy[t])
    return dw


@pytest.mark.parametrize("accumulate", (False, True))
def test_is_a_sum_over_rows(accumulate):
    args = arguments(accumulate)
    dw = jax.jit(tgmm)(*args)
    np.testing.assert_allclose(dw, by_rows(*args), rtol=1e-5, atol=1e-5)
    assert_equal(dw[0, 1], args[4][0, 1] if accumulate else jnp.zeros((K, N)))


def test_what_there_is_is_added_before_rounding():
    x, dy, starts, sizes, _ = arguments(False)
    init = jnp.full((1, E, K, N), 256, jnp.bfloat16)  # 1 is half of its ulp
    x, dy = jnp.full_like(x, 1, jnp.bfloat16), jnp.full_like(dy, 0.0, jnp.bfloat16)
    dy = dy.at[0, :2].set(0.75)  # each rounds away by itself
    dw = tgmm(x, dy, starts, sizes, init, out_dtype=jnp.bfloat16)
    assert_equal(dw[0, 0], jnp.full((K, N), 258, jnp.bfloat16))


@pytest.mark.parametrize("mask", ((0, 0, 0), (0, None, 0), (None, 0, None)))
def test_vmap_is_a_loop(mask):
    first, second = arguments(True), arguments(True, 1)
    args = tuple(
        first[i] if m is None else jnp.stack([first[i], second[i]])
        for i, m in zip((0, 1, 4), mask, strict=True)
    )
    assert_vmap_is_loop(lambda x, dy, init: tgmm(x, dy, *first[2:4], init), args, mask)


def test_pairs_need_columns_for_both():
    assert [_gemm.tiles.tgmm_cluster(c) for c in (8, 128, 136, 2048)] == [1, 1, 2, 2]


def factors(dtype=jnp.bfloat16):
    rng = np.random.default_rng(6)
    return normal(rng, (T, 8), dtype), normal(rng, (T, 16), dtype)


@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_is_the_gradient_of_grouped_gemm(layout):
    """The same bits; added to a float32 gradient it is not rounded first."""
    lhs, dy = factors()
    sizes = jnp.array([7, -3, 11, 40], jnp.int32)  # 40 is cut to the rows that are left
    shape = (E, 8, 16) if layout == "kn" else (E, 16, 8)
    rhs = normal(np.random.default_rng(7), shape, jnp.bfloat16)
    wgrad = functools.partial(grouped_gemm_weight_grad, weight_layout=layout)

    def results(lhs, rhs, dy, into):
        product = lambda rhs: grouped_gemm(lhs, rhs, sizes, weight_layout=layout)  # noqa: E731
        expected = functools.partial(
            reference.grouped_gemm_weight_grad, lhs, dy, sizes, weight_layout=layout
        )
        pulled = jax.vjp(product, rhs)[1](dy)[0], wgrad(lhs, dy, sizes)
        return *pulled, wgrad(lhs, dy, sizes, accumulate_into=into), expected(accumulate_into=into)

    into = normal(np.random.default_rng(8), shape)
    pulled, alone, added, want = jax.jit(results)(lhs, rhs, dy, into)
    assert_equal(alone, pulled)
    np.testing.assert_allclose(added, want, rtol=1e-5, atol=1e-5)
    assert_equal(added[1], into[1])


def accumulated(into, lhs, dy, sizes):
    """Adds the gradients of all microbatches to `into`."""

    def one(into, factors):
        return grouped_gemm_weight_grad(*factors, accumulate_into=into), None

    return jax.lax.scan(one, into, (lhs, dy, sizes))[0]


def test_microbatches_add_up_in_one_buffer():
    lhs, dy = factors(jnp.float32)
    split = [a[:22].reshape(2, 11, -1) for a in (lhs, dy)]
    sizes = jnp.array([[3, 0, 5, 2], [1, 4, 0, 6]], jnp.int32)
    into = jnp.ones((E, 8, 16))
    add = jax.jit(accumulated, donate_argnums=0).lower(into, *split, sizes).compile()
    assert add.memory_analysis().alias_size_in_bytes == into.nbytes
    parts = map(reference.grouped_gemm_weight_grad, *split, sizes)
    want = 1.0 + sum(map(np.asarray, parts))
    np.testing.assert_allclose(add(into, *split, sizes), want, rtol=1e-5, atol=1e-5)
    assert into.is_deleted()


def test_cuda_adds_in_the_memory_of_the_carry():
    lhs, dy = (a[:22].reshape(2, 11, -1) for a in factors())
    sizes = jnp.ones((2, E), jnp.int32)
    text = cuda_text(accumulated, jnp.ones((E, 8, 16)), lhs, dy, sizes)
    assert text.count("@jaxmoe_weight_grad_v1") == 1
    alias = r"output_operand_alias<output_tuple_indices = \[0\],\s*operand_index = 4"
    assert re.search(alias, text)


def test_derivatives_of_a_weight_gradient():
    """Of every argument, against those of the reference."""
    lhs, dy = factors(jnp.float32)
    sizes = jnp.array(SIZES, jnp.int32)

    def gradients(fn):
        def loss(lhs, dy, into):
            return jnp.sum(jnp.sin(fn(lhs, dy, sizes, accumulate_into=into)))

        return jax.grad(loss, (0, 1, 2))

    both = lambda *a: [  # noqa: E731
        gradients(fn)(*a) for fn in (grouped_gemm_weight_grad, reference.grouped_gemm_weight_grad)
    ]
    ours, want = jax.jit(both)(lhs, dy, jnp.ones((E, 8, 16)))
    for a, b in zip(ours, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


WRONG = (
    ({"dy": (9, 16)}, "dy.shape[0]=9 must equal lhs.shape[0]=23 (R, the rows)"),
    ({"dy": (T, 16, 1)}, "dy must have 2 axes [R,N], not 3"),
    ({"group_sizes": (0,)}, "group_sizes.shape[0]=0 must be at least 1 (num_groups)"),
    ({"accumulate_into": (E, 16, 8)}, "accumulate_into.shape=[4,16,8] must be [4,8,16] ([E,K,N])"),
    ({"weight_layout": "ke"}, "weight_layout='ke' must be one of kn, nk"),
    ({"lhs": np.zeros((T, 8), np.int8)}, "lhs.dtype=i8 must be bf16 or f16 or f32"),
    (
        {"accumulate_into": (E, 8, 16), "preferred_element_type": jnp.bfloat16},
        "accumulate_into.dtype=f32 must equal preferred_element_type=bf16",
    ),
)


@pytest.mark.parametrize("change, message", WRONG)
def test_errors(change, message):
    right = {"lhs": (T, 8), "dy": (T, 16), "group_sizes": (E,)}
    dtypes = {"group_sizes": jnp.int32}
    given = {
        n: jnp.zeros(v, dtypes.get(n, jnp.float32)) if isinstance(v, tuple) else v
        for n, v in (right | change).items()
    }
    with pytest.raises((ValueError, TypeError)) as error:
        grouped_gemm_weight_grad(**given)
    assert str(error.value).startswith(f"jaxmoe.grouped_gemm_weight_grad: {message}.")


@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize(("offset", "count"), [(1, 2), (0, 4), (3, 4), (-1, 2), (9, 3)])
def test_some_of_the_groups(offset, count, layout):
    """As `rhs` of `grouped_gemm` may hold: groups that do not exist have no rows."""
    x, dy, _, _, _ = arguments(False)
    sizes, old = np.array(SIZES, np.int32), jnp.ones((count, K, N))
    turn = (lambda dw: dw.swapaxes(1, 2)) if layout == "nk" else (lambda dw: dw)
    all_of_them = np.asarray(grouped_gemm_weight_grad(x[0], dy[0], sizes))
    none, these = np.zeros((K, N)), range(offset, offset + count)
    want = np.stack([all_of_them[e] if 0 <= e < E else none for e in these])
    some = jax.jit(
        lambda offset, old: grouped_gemm_weight_grad(
            *(x[0], dy[0], sizes),
            accumulate_into=old,
            weight_layout=layout,
            group_offset=offset,
            num_groups=count,
        )
    )
    got = turn(some(np.array([offset], np.int32), turn(old)))
    np.testing.assert_allclose(got, want + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_groups": 2}, ValueError, "num_groups must be None without group_offset"),
        ({"num_groups": 0, "group_offset": 0}, ValueError, "num_groups=0 must be at least 1"),
        ({"group_offset": 1.5}, TypeError, "grouped_gemm_weight_grad: group_offset must be one"),
    ],
)
def test_groups_are_refused(change, error, message):
    x, dy, _, _, _ = arguments(False)
    with pytest.raises(error, match=message):
        grouped_gemm_weight_grad(x[0], dy[0], np.array(SIZES, np.int32), **change)
