"""permute: exact copies, zero rows, derivatives, vmap, refusals."""

import functools

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
)
from jaxmoe.finalize import finalize
from jaxmoe.permute import permute
from jaxmoe.plan import Plan, plan

_permute = jax.jit(permute)
_reference = jax.jit(reference.permute)
_jitted_plan = jax.jit(plan, static_argnames=("num_experts", "expert_offset", "num_local_experts"))
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]


def _plan(routing, seed, num_tokens, num_experts, top_k, **options):
    ids = expert_ids(routing, np.random.default_rng(seed), num_tokens, num_experts, top_k)
    return _jitted_plan(jnp.asarray(ids), num_experts=num_experts, **options)


def _garbage_plan(seed, num_tokens, top_k):
    """A plan whose rows point anywhere: half of them at real tokens."""
    rng = np.random.default_rng(seed)
    size = num_tokens * top_k
    anywhere = rng.choice(np.array([*INVALID_IDS, num_tokens], np.int32), size)
    row_to_token = np.where(rng.random(size) < 0.5, rng.integers(0, num_tokens, size), anywhere)
    slots = rng.choice(np.array([*INVALID_IDS, size, 0, size - 1], np.int32), (num_tokens, top_k))
    arrays = (np.array([0, size]), row_to_token, slots)
    return Plan(*(jnp.asarray(a, jnp.int32) for a in arrays))


def _check(x, p):
    got = _permute(x, p)
    assert_equal(got, _reference(x, p.row_to_token))
    assert_equal(got, _permute(x, p))
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden"),
    [
        (0, 3, 2, 8),  # no tokens
        (1, 1, 1, 1),  # every count is 1
        (5, 4, 4, 7),  # K = E, rows of no round size
        (37, 11, 3, 24),
    ],
)
def test_matches_reference(dtype, num_tokens, num_experts, top_k, hidden):
    x = normal(np.random.default_rng(0), (num_tokens, hidden), dtype)
    got = _check(x, _plan("with_invalid", 1, num_tokens, num_experts, top_k))
    assert got.shape == (num_tokens * top_k, hidden)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_finalize_undoes_permute(routing):
    p = _plan(routing, 2, 19, 8, 3)
    x = normal(np.random.default_rng(3), (19, 6))
    found = np.asarray(p.slot_to_row >= 0)
    alone = jnp.asarray(found & (np.cumsum(found, axis=1) == 1), jnp.float32)  # the first choice
    got = finalize(permute(x, p), p, alone)
    np.testing.assert_array_equal(got, np.where(found.any(1)[:, None], x, 0))


def test_rows_of_no_group_are_zero_even_beside_nan():
    p = _plan("uniform", 4, 12, 6, 2, expert_offset=2, num_local_experts=2)
    used = int(p.expert_offsets[-1])
    assert 0 < used < 24
    got = _permute(jnp.full((12, 5), jnp.nan), p)
    assert np.isnan(got[:used]).all()
    assert_equal(got[used:], jnp.zeros((24 - used, 5)))


def test_garbage_indices_give_zero_rows():
    p = _garbage_plan(5, 9, 3)
    got = _check(normal(np.random.default_rng(6), (9, 4)), p)
    exists = (p.row_to_token >= 0) & (p.row_to_token < 9)
    assert 0 < int(exists.sum()) < 27
    assert_equal(got[~exists], jnp.zeros((27 - int(exists.sum()), 4)))


def test_keeps_every_bit():
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    p = _plan("uniform", 7, 256, 4, 1)
    got = jax.lax.bitcast_convert_type(_permute(x, p), jnp.uint16)
    np.testing.assert_array_equal(got, bits[np.asarray(p.row_to_token)])


def test_nan_stays_in_its_token():
    p = _plan("uniform", 8, 10, 5, 2)
    x = normal(np.random.default_rng(9), (10, 4))
    clean, dirty = _permute(x, p), _permute(x.at[3].set(jnp.nan), p)
    other = np.asarray(p.row_to_token) != 3
    assert_equal(dirty[other], clean[other])
    assert np.isnan(dirty[~other]).all()


@jax.jit
def _sine(x, p):
    return jnp.sin(permute(x, p))


@pytest.mark.parametrize("routing", ["uniform", "with_invalid"])
def test_derivatives(routing):
    p = _plan(routing, 10, 5, 4, 3)
    x = normal(np.random.default_rng(11), (5, 3))
    check_grads(functools.partial(_sine, p=p), (x,), order=2, atol=2e-2, rtol=2e-2, eps=1e-2)
    ct = normal(np.random.default_rng(12), (15, 3))
    got, want = (
        jax.vjp(f, x)[1](ct)[0]
        for f in (lambda x: permute(x, p), lambda x: reference.permute(x, p.row_to_token))
    )
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_gradient_is_summed_in_float32_and_rounded_once():
    p = _plan("one_expert", 13, 4, 8, 8)
    ct = normal(np.random.default_rng(14), (32, 16), jnp.bfloat16)
    (got,) = jax.vjp(lambda x: permute(x, p), jnp.zeros((4, 16), jnp.bfloat16))[1](ct)
    assert got.dtype == jnp.bfloat16
    exact = np.asarray(ct, np.float64)[np.asarray(p.slot_to_row)].sum(axis=1)
    one_rounding = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    assert_close(got, exact, one_rounding)


def test_gradient_leaves_out_poisoned_rows():
    p = _plan("uniform", 15, 8, 6, 2, num_local_experts=3)
    used = int(p.expert_offsets[-1])
    assert used < 16
    ct = jnp.ones((16, 2)).at[used:].set(jnp.nan)
    (got,) = jax.vjp(lambda x: permute(x, p), jnp.zeros((8, 2)))[1](ct)
    count = (np.asarray(p.slot_to_row) >= 0).sum(axis=1)
    np.testing.assert_array_equal(got, np.stack([count, count], axis=1))


def _stacked_plans(count):
    plans = [_plan("with_invalid", 20 + i, 4, 5, 2) for i in range(count)]
    return jax.tree.map(lambda *a: jnp.stack(a), *plans)


AXES = [(0, None), (2, None), (None, 0), (0, 0), (1, 1)]


def _vmap_arguments(x_axis, plan_axis):
    rng = np.random.default_rng(16)
    p = _stacked_plans(3)
    x = normal(rng, (3, 4, 5))
    x = x[0] if x_axis is None else jnp.moveaxis(x, 0, x_axis)
    if plan_axis is None:
        p = jax.tree.map(lambda a: a[0], p)
    elif plan_axis:
        p = jax.tree.map(lambda a: jnp.moveaxis(a, 0, plan_axis), p)
    axes = (x_axis, plan_axis, plan_axis, plan_axis)
    return (x, p.expert_offsets, p.row_to_token, p.slot_to_row), axes


@pytest.mark.parametrize(("x_axis", "plan_axis"), AXES)
def test_vmap(x_axis, plan_axis):
    args, axes = _vmap_arguments(x_axis, plan_axis)
    assert_vmap_is_loop(jax.jit(lambda x, *p: permute(x, Plan(*p))), args, axes)


@pytest.mark.parametrize(("x_axis", "plan_axis"), AXES)
def test_vmap_of_gradient(x_axis, plan_axis):
    args, axes = _vmap_arguments(x_axis, plan_axis)
    grad = jax.jit(jax.grad(lambda x, *p: (permute(x, Plan(*p)) ** 3).sum()))
    assert_vmap_is_loop(grad, args, axes)


@pytest.mark.parametrize(("x_axis", "plan_axis"), AXES)
def test_gradient_of_vmap(x_axis, plan_axis):
    (x, *p), axes = _vmap_arguments(x_axis, plan_axis)

    def loss(fn, x):
        return (jax.vmap(fn, axes)(x, *p) ** 3).sum()

    got = jax.jit(jax.grad(lambda x: loss(lambda x, *p: permute(x, Plan(*p)), x)))(x)
    want = jax.jit(jax.grad(lambda x: loss(lambda x, _, r, __: reference.permute(x, r), x)))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_vmap_does_not_copy_a_shared_x():
    p = _stacked_plans(3)
    fn = jax.vmap(permute, (None, 0))
    with _targets.force_cuda_lowering():
        lowered = jax.jit(fn).trace(jnp.zeros((4, 5)), p).lower(lowering_platforms=("cuda",))
    (call,) = (line for line in lowered.as_text().splitlines() if "@jaxmoe_permute_v2" in line)
    assert "(tensor<4x5xf32>, tensor<24xi32>, tensor<4x6xi32>) -> tensor<24x5xf32>" in call


def test_an_index_one_past_an_example_is_not_the_next_example():
    """Token T of an example is nothing, though the next example's tokens follow in memory."""
    x = jnp.arange(12.0).reshape(2, 3, 2) + 1
    row_to_token = jnp.array([[3, 0, -1], [1, 3, -1]], jnp.int32)
    slot_to_row = jnp.array([[[0], [3], [1]], [[3], [0], [1]]], jnp.int32)

    def one(x, row_to_token, slot_to_row):
        return permute(x, Plan(jnp.zeros((2,), jnp.int32), row_to_token, slot_to_row))

    rows, pull = jax.vjp(lambda x: jax.vmap(one)(x, row_to_token, slot_to_row), x)
    assert rows[:, :, 0].tolist() == [[0, 1, 0], [9, 0, 0]]
    ct = jnp.broadcast_to(jnp.array([[5.0, 6.0, 1.0], [7.0, 8.0, 1.0]])[:, :, None], (2, 3, 2))
    (dx,) = pull(ct)
    assert dx[:, :, 0].tolist() == [[5, 0, 6], [0, 7, 8]]  # nor row R of an example


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, p: permute(x[0], p),
            ValueError,
            r"jaxmoe\.permute: x must have 2 axes \[T,H\], not 1\. Got x: f32\[4\]\.",
        ),
        (lambda x, p: permute(x.astype(jnp.int32), p), TypeError, r"x\.dtype=i32 must be bf16 or"),
        (lambda x, _: permute(x, x), TypeError, r"plan must be a jaxmoe\.Plan\. Got plan: f32\[3,"),
        (
            lambda x, p: permute(x[:2], p),
            ValueError,
            r"plan\.slot_to_row\.shape\[0\]=3 must equal x\.shape\[0\]=2 \(num_tokens\)",
        ),
        (
            lambda x, p: permute(x, Plan(p.expert_offsets, p.row_to_token[1:], p.slot_to_row)),
            ValueError,
            r"plan\.row_to_token\.shape\[0\]=5 must equal T \* K of slot_to_row.*i32\[3,2\]",
        ),
        (
            lambda x, p: permute(x, jax.tree.map(lambda a: a.astype(jnp.int16), p)),
            TypeError,
            r"plan\.row_to_token\.dtype=i16 must be i32",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.zeros((3, 4)), plan(jnp.zeros((3, 2), jnp.int32), 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden"),
    [  # rows of 16 bytes and more, and of 8, 4 and 2 bytes at a time
        (0, 8, 2, 64),
        (1, 8, 2, 4096),
        (37, 11, 3, 2880),
        (1000, 128, 8, 2048),
        (65, 7, 2, 36),
        (33, 5, 2, 14),
        (129, 4, 4, 1),
        (31, 5, 1, 777),
    ],
)
def test_kernel(dtype, num_tokens, num_experts, top_k, hidden):
    x = normal(np.random.default_rng(0), (num_tokens, hidden), dtype)
    for routing in ("zipf", "with_invalid"):
        p = _plan(routing, 1, num_tokens, num_experts, top_k)
        poison((num_tokens * top_k, hidden), dtype)
        _check(x, p)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("hidden", [64, 9])
def test_kernel_garbage_indices(hidden):
    p = _garbage_plan(5, 50, 3)
    poison((150, hidden), jnp.bfloat16)
    _check(normal(np.random.default_rng(6), (50, hidden), jnp.bfloat16), p)


@pytest.mark.gpu
@pytest.mark.parametrize(("x_axis", "plan_axis"), AXES)
def test_kernel_vmap(x_axis, plan_axis):
    args, axes = _vmap_arguments(x_axis, plan_axis)
    assert_vmap_is_loop(jax.jit(lambda x, *p: permute(x, Plan(*p))), args, axes)
