"""finalize: value, order of the sum, left-out slots, derivatives, vmap, refusals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxmoe import reference
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import (
    INVALID_IDS,
    ROUTINGS,
    assert_close,
    assert_equal,
    assert_vmap_is_loop,
    expert_ids,
    normal,
    poison,
    routing_weights,
)
from jaxmoe.finalize import finalize
from jaxmoe.plan import Plan, plan

_finalize = jax.jit(finalize)
_reference = jax.jit(reference.finalize, static_argnames="dtype")
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def _plan(ids, num_experts, expert_offset=0, num_local_experts=None):
    """What `plan` makes, by NumPy: that is tested elsewhere, and here it would be compiled."""
    count = num_experts - expert_offset if num_local_experts is None else num_local_experts
    local = np.where((ids >= 0) & (ids < num_experts), ids - expert_offset, -1).reshape(-1)
    local = np.where((local >= 0) & (local < count), local, count)
    slots = np.argsort(local, kind="stable").astype(np.int32)
    offsets = np.searchsorted(local[slots], np.arange(count + 1)).astype(np.int32)
    rows = np.full(ids.size, -1, np.int32)
    rows[slots[: offsets[-1]]] = np.arange(offsets[-1])
    return jax.device_put(Plan(offsets, slots // max(ids.shape[1], 1), rows.reshape(ids.shape)))


def _inputs(routing, seed, num_tokens, num_experts, top_k, hidden, dtype, **options):
    """rows, plan, weights, residual; rows of no group are NaN, as no one has written them."""
    rng = np.random.default_rng([seed, num_tokens, top_k, hidden])
    ids = expert_ids(routing, rng, num_tokens, num_experts, top_k)
    p = _plan(ids, num_experts=num_experts, **options)
    rows = np.array(normal(rng, (num_tokens * top_k, hidden), dtype))
    rows[int(np.asarray(p.expert_offsets)[-1]) :] = np.nan
    weights = jax.device_put(routing_weights(rng, num_tokens, top_k))
    return jax.device_put(rows), p, weights, normal(rng, (num_tokens, hidden), dtype)


def _exact(rows, slots, weights, residual):
    """The formula in float64."""
    slots = np.asarray(slots)
    rows, weights = np.asarray(rows, np.float64), np.asarray(weights, np.float64)
    y = np.zeros((len(slots), rows.shape[1]))
    for t, k in np.argwhere((slots >= 0) & (slots < len(rows))):
        y[t] += weights[t, k] * rows[slots[t, k]]
    return y if residual is None else y + np.asarray(residual, np.float64)


def _check(rows, p, weights, residual):
    got = _finalize(rows, p, weights, residual=residual)
    assert got.dtype == rows.dtype
    args = rows, p.slot_to_row, weights
    naive = _reference(*args, residual=residual, dtype=rows.dtype)
    assert_close(got, _exact(*args, residual), naive)
    assert_equal(got, _finalize(rows, p, weights, residual=residual))
    return got


@pytest.mark.parametrize(
    ("dtype", "with_residual"),
    [(jnp.bfloat16, False), (jnp.bfloat16, True), (jnp.float16, False), (jnp.float32, True)],
)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden"),
    [
        (0, 3, 2, 8),  # no tokens
        (1, 1, 1, 1),  # every count is 1
        (5, 4, 4, 7),  # K = E, rows of no round size
        (37, 48, 22, 24),  # many choices
    ],
)
def test_matches_reference(dtype, with_residual, num_tokens, num_experts, top_k, hidden):
    *args, residual = _inputs("uniform", 0, num_tokens, num_experts, top_k, hidden, dtype)
    got = _check(*args, residual if with_residual else None)
    assert got.shape == (num_tokens, hidden)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing):
    _check(*_inputs(routing, 1, 23, 9, 3, 6, jnp.bfloat16))


def test_local_window_leaves_foreign_slots_out():
    rows, p, weights, residual = _inputs(
        "uniform", 2, 12, 6, 2, 5, jnp.float32, expert_offset=2, num_local_experts=2
    )
    assert np.isnan(rows).any()
    got = _check(rows, p, weights, residual)
    assert np.isfinite(got).all()
    foreign = np.asarray((p.slot_to_row < 0).all(axis=1))
    assert foreign.any()
    assert_equal(got[foreign], residual[foreign])


def _garbage_slots(seed, num_tokens, top_k, num_rows):
    rng = np.random.default_rng(seed)
    anywhere = rng.choice(np.array([*INVALID_IDS, num_rows], np.int32), (num_tokens, top_k))
    slots = rng.integers(0, num_rows, (num_tokens, top_k))
    return np.where(rng.random((num_tokens, top_k)) < 0.5, slots, anywhere).astype(np.int32)


def test_garbage_slots_are_left_out_whatever_their_weight():
    rows, p, weights, residual = _inputs("uniform", 3, 9, 4, 3, 5, jnp.float32)
    slots = jnp.asarray(_garbage_slots(4, 9, 3, 27))
    exists = (slots >= 0) & (slots < 27)
    assert 0 < int(exists.sum()) < 27
    p = Plan(p.expert_offsets, p.row_to_token, slots)
    _check(rows, p, jnp.where(exists, weights, jnp.nan), residual)


def test_sums_in_k_order_in_float32():
    # (1e8 + 1) - 1e8 is 0 in float32, (1e8 - 1e8) + 1 is 1; the residual comes last
    p = plan(jnp.array([[0, 1, 2], [0, 2, 1]], jnp.int32), 3)
    rows = jnp.array([[1e8], [1e8], [1.0], [1.0], [-1e8], [-1e8]])
    weights = jnp.ones((2, 3))
    np.testing.assert_array_equal(finalize(rows, p, weights), [[0], [1]])
    residual = jnp.array([[1.0], [2.0]])  # lost beside 1e8 if it came first
    np.testing.assert_array_equal(finalize(rows, p, weights, residual=residual), [[1], [3]])


def test_rounds_once():
    # the terms after 1 add up to 1.125 * 2^-8, over half of bfloat16's step; each alone is lost
    p = plan(jnp.array([[0, 1, 2]], jnp.int32), 3)
    rows = jnp.array([[1.0], [2**-8], [2**-8]], jnp.bfloat16)
    weights = jnp.array([[1.0, 0.5, 0.625]])
    assert finalize(rows, p, weights)[0, 0] == 1 + 2**-7


def test_nan_and_infinity_stay_in_their_tokens():
    rows, p, weights, residual = _inputs("uniform", 5, 10, 5, 2, 4, jnp.float32)
    clean = _finalize(rows, p, weights, residual=residual)
    broken = rows.at[p.slot_to_row[3, 1]].set(jnp.nan).at[p.slot_to_row[6, 0]].set(jnp.inf)
    dirty = _finalize(broken, p, weights.at[8].set(jnp.nan), residual=residual)
    others = np.array([0, 1, 2, 4, 5, 7, 9])
    assert_equal(dirty[others], clean[others])
    assert np.isnan(dirty[3]).all() and np.isinf(dirty[6]).all() and np.isnan(dirty[8]).all()


def test_identity_experts_give_a_weighted_copy():
    rng = np.random.default_rng(6)
    x = normal(rng, (7, 4))
    p = plan(jnp.asarray(expert_ids("uniform", rng, 7, 5, 3)), 5)
    weights = jnp.asarray(rng.integers(1, 4, (7, 3)), jnp.float32)
    rows = x[p.row_to_token]
    want = np.asarray(x) * np.asarray(weights.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(finalize(rows, p, weights), want, rtol=1e-6)


@jax.jit
def _sine(rows, weights, residual, p):
    return jnp.sin(finalize(rows, p, weights, residual=residual))


@jax.jit
def _reference_vjp(rows, weights, residual, p, ct):
    def sine(rows, weights, residual):
        return jnp.sin(reference.finalize(rows, p.slot_to_row, weights, residual=residual))

    return jax.vjp(sine, rows, weights, residual)[1](ct)


@pytest.mark.parametrize("routing, with_residual", [("uniform", False), ("with_invalid", True)])
def test_derivatives(routing, with_residual):
    rows, p, weights, residual = _inputs(routing, 7, 4, 5, 3, 2, jnp.float32)
    args = (jnp.nan_to_num(rows), weights, residual if with_residual else None)
    fn = functools.partial(_sine, p=p)
    order = 2 if with_residual else 1
    check_grads(fn, args, order=order, atol=2e-2, rtol=2e-2, eps=1e-2)
    ct = normal(np.random.default_rng(8), (4, 2))
    got, want = jax.vjp(fn, *args)[1](ct), _reference_vjp(*args, p, ct)
    assert (got[2] is None) == (not with_residual)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got, want)


def test_gradients_of_one_choice_a_token():
    rows, p, weights, _ = _inputs("uniform", 9, 5, 3, 1, 2, jnp.float32)
    ct = normal(np.random.default_rng(8), (5, 2))
    got = jax.vjp(lambda rows, weights: finalize(rows, p, weights), rows, weights)[1](ct)
    row = p.slot_to_row[:, 0]
    assert_equal(got[0][row], weights * ct)
    np.testing.assert_allclose(got[1][:, 0], (rows[row] * ct).sum(1), rtol=1e-5)


def test_gradients_leave_out_rows_of_no_group():
    rows, p, weights, _ = _inputs("uniform", 9, 8, 6, 2, 3, jnp.float32, num_local_experts=3)
    used = int(p.expert_offsets[-1])
    assert 0 < used < 16 and np.isnan(rows[used:]).all()
    d_rows, d_weights = jax.grad(lambda r, w: finalize(r, p, w).sum(), (0, 1))(rows, weights)
    assert_equal(d_rows[used:], jnp.zeros((16 - used, 3)))
    assert (d_rows[:used] != 0).all()
    local = p.slot_to_row >= 0
    assert_equal(d_weights[~local], jnp.zeros(int((~local).sum())))
    assert np.isfinite(d_weights).all()


def test_a_cotangent_of_nan_does_not_reach_the_weight_of_an_absent_choice():
    rows = jnp.ones((4, 4))
    p = plan(jnp.array([[0, 2], [1, 2]], jnp.int32), 2)
    slots = jnp.array([[0, -1], [1, 4]], jnp.int32)  # there is no row 4
    p = Plan(p.expert_offsets, p.row_to_token, slots)
    _, pull = jax.vjp(lambda w: finalize(rows, p, w), jnp.ones((2, 2)))
    (dw,) = pull(jnp.full((2, 4), jnp.nan))
    np.testing.assert_array_equal(np.isnan(dw), [[True, False], [True, False]])
    np.testing.assert_array_equal(dw[:, 1], 0.0)


def test_the_sum_and_the_residual_are_rounded_once():
    """256 + 1 - 256 in bfloat16, which holds 256 and 258 but no 257."""
    rows = jnp.array([[256.0] * 8, [1.0] * 8], jnp.bfloat16)
    p = plan(jnp.array([[0, 1]], jnp.int32), 2)
    residual = jnp.full((1, 8), -256.0, jnp.bfloat16)
    y = finalize(rows, p, jnp.ones((1, 2)), residual=residual)
    assert_equal(y, jnp.ones((1, 8), jnp.bfloat16))


@EVERY_DTYPE
def test_gradient_dtypes_and_rounding(dtype):
    rows, p, weights, residual = _inputs("uniform", 10, 9, 6, 4, 16, dtype)
    ct = normal(np.random.default_rng(11), (9, 16), dtype)
    fn = lambda r, w, s: finalize(r, p, w, residual=s)  # noqa: E731
    d_rows, d_weights, d_residual = jax.vjp(fn, rows, weights, residual)[1](ct)
    assert (d_rows.dtype, d_weights.dtype, d_residual.dtype) == (dtype, jnp.float32, dtype)
    assert_equal(d_residual, ct)
    r, w, c = (np.asarray(a, np.float64) for a in (rows, weights, ct))
    slots = np.asarray(p.slot_to_row)
    exact = np.zeros(r.shape)
    exact[slots] = w[:, :, None] * c[:, None, :]
    assert_close(d_rows, exact, jnp.asarray(exact, jnp.float32).astype(dtype))
    exact = np.einsum("tkh,th->tk", r[slots], c)
    naive = jnp.einsum("tkh,th->tk", rows[p.slot_to_row], ct)
    assert_close(d_weights, exact, naive)


BATCHED = [b for b in itertools.product((None, 0), repeat=4) if any(a is not None for a in b)]


def _vmap_arguments(batched):
    """rows, slot_to_row, weights, residual, each stacked over 3 examples or shared by them."""
    some = [_inputs("with_invalid", 12 + i, 4, 5, 2, 3, jnp.float32) for i in range(3)]
    each = [(jnp.nan_to_num(r), p.slot_to_row, w, s) for r, p, w, s in some]
    stacked = [jnp.stack(a) for a in zip(*each, strict=True)]
    return tuple(a if axis == 0 else a[0] for a, axis in zip(stacked, batched, strict=True))


def _as_finalize(rows, slots, weights, residual):
    p = Plan(jnp.zeros(2, jnp.int32), jnp.zeros(slots.size, jnp.int32), slots)
    return finalize(rows, p, weights, residual=residual)


_jitted = jax.jit(_as_finalize)


# Alone, all, and what may be shared by examples together: every pair of arguments in every state.
@pytest.mark.parametrize("batched", [b for b in BATCHED if b.count(0) in (1, 4) or b[0] == b[3]])
def test_vmap(batched):
    assert_vmap_is_loop(_jitted, _vmap_arguments(batched), batched)


@pytest.mark.parametrize("batched", [(0, 0, 0, 0), (None, 0, 0, None), (0, None, None, 0)])
def test_derivatives_of_vmap(batched):
    rows, slots, weights, residual = _vmap_arguments(batched)
    axes = batched[0], batched[2], batched[3]
    mapped_slots = batched[1]

    def loss(fn, rows, weights, residual):
        y = jax.vmap(fn, (axes[0], mapped_slots, *axes[1:]))(rows, slots, weights, residual)
        return (y**3).sum()

    def gradients(fn):
        grad = jax.grad(functools.partial(loss, fn), (0, 1, 2))
        return jax.jit(grad)(rows, weights, residual)

    got = gradients(_as_finalize)
    want = gradients(lambda r, s, w, x: reference.finalize(r, s, w, residual=x))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_vmap_over_other_axes_and_twice():
    rows, slots, weights, residual = _vmap_arguments((0, 0, 0, 0))
    args = jnp.moveaxis(rows, 0, 2), jnp.moveaxis(slots, 0, 1), weights, residual
    assert_vmap_is_loop(_jitted, args, (2, 1, 0, 0))
    twice = jax.tree.map(lambda a: jnp.stack([a, a]), (rows, slots, weights, residual))
    assert_vmap_is_loop(jax.jit(jax.vmap(_as_finalize)), twice, (0, 0, 0, 0))


def test_vmap_does_not_copy_shared_rows():
    args = _vmap_arguments((None, 0, None, None))
    fn = jax.jit(jax.vmap(_as_finalize, (None, 0, None, None)))
    with _targets.force_cuda_lowering():
        lowered = fn.trace(*args).lower(lowering_platforms=("cuda",))
    (call,) = (line for line in lowered.as_text().splitlines() if "@jaxmoe_finalize_v1" in line)
    assert "(tensor<8x3xf32>, tensor<12x2xi32>, tensor<12x2xf32>, tensor<12x3xf32>)" in call


def _refused(**changes):
    rows, p, weights, residual = _inputs("uniform", 13, 3, 4, 2, 5, jnp.float32)
    given = {"rows": rows, "plan": p, "weights": weights, "residual": residual}
    given |= {name: change(given[name]) for name, change in changes.items()}
    return finalize(given["rows"], given["plan"], given["weights"], residual=given["residual"])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"rows": lambda r: r[0]},
            ValueError,
            r"jaxmoe\.finalize: rows must have 2 axes \[R,H\], not 1\. Got rows: f32\[5\]\.",
        ),
        ({"rows": lambda r: r.astype(jnp.int32)}, TypeError, r"rows\.dtype=i32 must be bf16 or"),
        (
            {"rows": lambda r: r[1:]},
            ValueError,
            r"rows\.shape\[0\]=5 must equal T \* K of plan\.slot_to_row, 6\. Got .*i32\[3,2\]",
        ),
        ({"plan": lambda p: p.slot_to_row}, TypeError, r"plan must be a jaxmoe\.Plan"),
        (
            {"weights": lambda w: w.astype(jnp.bfloat16)},
            TypeError,
            r"weights\.dtype=bf16 must be f32",
        ),
        (
            {"weights": lambda w: w[:, :1]},
            ValueError,
            r"weights\.shape\[1\]=1 must equal plan\.slot_to_row\.shape\[1\]=2 \(top_k\)",
        ),
        (
            {"residual": lambda r: r.astype(jnp.bfloat16)},
            TypeError,
            r"residual\.dtype=bf16 must equal rows\.dtype=f32",
        ),
        (
            {"residual": lambda r: r[:2]},
            ValueError,
            r"residual\.shape\[0\]=2 must equal plan\.slot_to_row\.shape\[0\]=3 \(num_tokens\)",
        ),
        (
            {"residual": lambda r: r[:, :4]},
            ValueError,
            r"residual\.shape\[1\]=4 must equal rows\.shape\[1\]=5 \(hidden\)",
        ),
    ],
)
def test_refusals(changes, error, message):
    with pytest.raises(error, match=message):
        _refused(**changes)


@pytest.mark.gpu
@EVERY_DTYPE
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden"),
    [  # 16 bytes of a row at a time and one element; up to two choices and more
        (0, 8, 2, 64),
        (1, 8, 2, 4096),
        (1, 128, 8, 2048),
        (300, 256, 8, 7168),
        (37, 11, 1, 2880),
        (65, 7, 2, 37),
        (33, 9, 9, 1),
        (129, 48, 22, 333),
        (17, 64, 64, 40),
    ],
)
def test_kernel(dtype, num_tokens, num_experts, top_k, hidden):
    for routing in ("uniform", "with_invalid"):
        rows, p, weights, residual = _inputs(
            routing, 14, num_tokens, num_experts, top_k, hidden, dtype
        )
        for extra in (None, residual):
            poison((num_tokens, hidden), dtype)
            _check(rows, p, weights, extra)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("hidden", [64, 9])
def test_kernel_garbage_slots(hidden):
    rows, p, weights, residual = _inputs("uniform", 15, 50, 4, 3, hidden, jnp.bfloat16)
    slots = jnp.asarray(_garbage_slots(16, 50, 3, 150))
    p = Plan(p.expert_offsets, p.row_to_token, slots)
    poison((50, hidden), jnp.bfloat16)
    _check(rows, p, weights, residual)


@pytest.mark.gpu
@pytest.mark.parametrize("batched", BATCHED)
def test_kernel_vmap(batched):
    assert_vmap_is_loop(_jitted, _vmap_arguments(batched), batched)
