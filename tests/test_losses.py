"""Losses and bias updates that balance experts: value, gradient, masks, ids, sharding, refusals."""

# pyright: basic, reportArgumentType=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxmoe
from jaxmoe._testing import INVALID_IDS, assert_equal, assert_vmap_is_loop, expert_ids, normal
from jaxmoe.losses import (
    expert_load,
    load_balancing_loss,
    router_z_loss,
    sequence_balance_loss,
    update_selection_bias,
)

_switch, _sequence, _z = map(jax.jit, (load_balancing_loss, sequence_balance_loss, router_z_loss))
_load = jax.jit(expert_load, static_argnums=1)
_update = jax.jit(update_selection_bias)
NAN, INF = np.nan, np.inf
I32_MIN, I32_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max
# Sums of T or E positive float32 numbers against float64.
RTOL = 3e-6


def _i32(values):
    return jax.device_put(np.asarray(values, np.int32))


def _softmax(logits):
    x = np.asarray(logits, np.float32)
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return jax.device_put((exp / exp.sum(axis=-1, keepdims=True)).astype(logits.dtype))


# The definitions as loops over Python floats.


def _oracle_load(ids, num_experts):
    load = [0] * num_experts
    for row in np.asarray(ids).tolist():
        for e in row:
            if 0 <= e < num_experts:
                load[e] += 1
    return load


def _oracle_switch(scores, ids, mask=None):
    scores, ids = np.asarray(scores, np.float64), np.asarray(ids)
    if mask is not None:
        scores, ids = scores[np.asarray(mask)], ids[np.asarray(mask)]
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return 0.0
    load = _oracle_load(ids, num_experts)
    total = 0.0
    for e in range(num_experts):
        total += load[e] / num_tokens * (sum(scores[:, e]) / num_tokens)
    return num_experts * total


def _oracle_sequence(scores, ids, mask=None):
    scores, ids = np.asarray(scores, np.float64), np.asarray(ids)
    losses = []
    for b in range(len(scores)):
        valid = np.full(scores.shape[1], True) if mask is None else np.asarray(mask)[b]
        x, num_tokens = scores[b][valid], int(valid.sum())
        load = _oracle_load(ids[b][valid], x.shape[1])
        loss = 0.0
        for e in range(x.shape[1]):
            f = x.shape[1] / (ids.shape[2] * max(num_tokens, 1)) * load[e]
            loss += f * sum(row[e] / (sum(row) or 1.0) for row in x) / max(num_tokens, 1)
        losses.append(loss)
    return losses


def _oracle_z(logits, mask=None):
    logits = np.asarray(logits, np.float64)
    if mask is not None:
        logits = logits[np.asarray(mask)]
    squares = [np.log(np.exp(row - row.max()).sum()) + row.max() for row in logits]
    return sum(z * z for z in squares) / max(len(squares), 1)


CASES = pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "routing", "dtype"),
    [
        (1, 1, 1, "uniform", jnp.bfloat16),  # every count is 1
        (7, 5, 1, "uniform", jnp.float32),  # Switch's own K
        (33, 13, 13, "uniform", jnp.float16),  # K = E
        (64, 40, 22, "zipf", jnp.float32),  # many choices, skewed
        (50, 8, 2, "one_expert", jnp.bfloat16),  # collapsed
        (50, 8, 3, "with_empty", jnp.float16),  # experts of no slot
        (50, 9, 4, "with_invalid", jnp.float32),  # ids that are no expert
    ],
)


def _case(num_tokens, num_experts, top_k, routing, dtype, batch=()):
    rng = np.random.default_rng([num_tokens, num_experts, top_k])
    count = num_tokens * int(np.prod(batch))
    logits = np.asarray(normal(rng, (count, num_experts), dtype, 2.0))
    ids = expert_ids(routing, rng, count, num_experts, top_k)
    mask = rng.random(count) < 0.6
    shape = (*batch, num_tokens)
    case = logits.reshape(*shape, -1), ids.reshape(*shape, -1), mask.reshape(shape)
    return jax.device_put(case)


@CASES
def test_load_balancing_loss_is_the_loop(num_tokens, num_experts, top_k, routing, dtype):
    logits, ids, mask = _case(num_tokens, num_experts, top_k, routing, dtype)
    scores = _softmax(logits)
    for m in (None, mask):
        got = _switch(scores, ids, m)
        assert (got.shape, got.dtype) == ((), jnp.float32)
        np.testing.assert_allclose(got, _oracle_switch(scores, ids, m), rtol=RTOL)


@CASES
def test_sequence_balance_loss_is_the_loop(num_tokens, num_experts, top_k, routing, dtype):
    logits, ids, mask = _case(num_tokens, num_experts, top_k, routing, dtype, (3,))
    scores = jax.nn.sigmoid(logits)
    for m in (None, mask.at[1].set(False)):  # a sequence without valid tokens
        got = _sequence(scores, ids, m)
        assert (got.shape, got.dtype) == ((3,), jnp.float32)
        np.testing.assert_allclose(got, _oracle_sequence(scores, ids, m), rtol=RTOL)
        assert m is None or got[1] == 0


@CASES
def test_router_z_loss_is_the_loop(num_tokens, num_experts, top_k, routing, dtype):
    logits, _, mask = _case(num_tokens, num_experts, top_k, routing, dtype)
    for m in (None, mask):
        got = _z(logits, m)
        assert (got.shape, got.dtype) == ((), jnp.float32)
        # a logsumexp near 0 has an absolute error
        np.testing.assert_allclose(got, _oracle_z(logits, m), rtol=RTOL, atol=1e-6)


@CASES
def test_expert_load_is_the_loop(num_tokens, num_experts, top_k, routing, dtype):
    _, ids, _ = _case(num_tokens, num_experts, top_k, routing, dtype)
    got = _load(ids, num_experts)
    assert_equal(got, _i32(_oracle_load(ids, num_experts)))
    assert_equal(got, jaxmoe.plan(ids, num_experts).group_sizes)


def test_numbers_by_hand():
    scores = jnp.array([[0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25]])
    ids = _i32([[0, 1], [1, 3]])
    # counts 1 2 0 1, means 3/8 3/8 1/8 1/8:  4 * (1/2 * 3/8 + 1 * 3/8 + 1/2 * 1/8)
    assert float(_switch(scores, ids)) == 2.5
    # f = 4 / (2 * 2) * counts, on scores that were scaled by 2 and by 8
    scaled = scores * jnp.array([[2.0], [8.0]])
    assert _sequence(scaled[None], ids[None]).tolist() == [1.25]
    # log(e^0 + e^0) = log 2, log(e^1) = 1
    z = _z(jnp.array([[0.0, 0.0], [1.0, -INF]]))
    np.testing.assert_allclose(z, (np.log(2) ** 2 + 1) / 2, rtol=RTOL)
    assert _load(ids, 4).tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (8, 2), (4, 4), (64, 8)])
def test_uniform_routing_gives_one(num_experts, top_k):
    """Even slots with any scores of sum 1, and even scores with any slots."""
    rng = np.random.default_rng(0)
    slots = np.arange(num_experts * top_k).reshape(num_experts, top_k) % num_experts
    skewed = jnp.asarray(rng.multinomial(64, [1 / num_experts] * num_experts, num_experts) / 64)
    even = jnp.full((num_experts, num_experts), 1 / num_experts)
    crowd = np.tile(np.arange(top_k), (num_experts, 1))
    for scores, ids in ((skewed.astype(jnp.float32), slots), (even, crowd), (even, slots)):
        # sums of 64ths and divisions by powers of two are exact
        assert float(_switch(scores, _i32(ids))) / top_k == 1.0
        assert _sequence(scores[None] * 4, _i32(ids)[None]).tolist() == [1.0]


def test_all_tokens_on_one_expert_is_the_worst():
    scores = jnp.zeros((6, 8)).at[:, 3].set(1.0)
    ids = jnp.full((6, 1), 3, jnp.int32)
    np.testing.assert_allclose(_switch(scores, ids), 8, rtol=RTOL)
    np.testing.assert_allclose(_sequence(scores[None], ids[None]), [8], rtol=RTOL)


def test_load_balancing_loss_is_that_of_hugging_face():
    """E times the sum over K and E of the mean one-hot [K,E] times the mean probability [E]."""
    logits, _, mask = _case(40, 16, 4, "uniform", jnp.float32)
    routing = jaxmoe.route(logits, top_k=4)
    p, valid = np.asarray(_softmax(logits), np.float64), np.asarray(mask)
    chosen = np.eye(16)[np.asarray(routing.expert_ids)]  # [T,K,E]
    for m, at in ((None, slice(None)), (mask, valid)):
        want = (chosen[at].mean(0) * p[at].mean(0)).sum() * 16
        got = _switch(_softmax(logits), routing.expert_ids, m)
        np.testing.assert_allclose(got, want, rtol=RTOL)


def test_one_sequence_is_a_quarter_of_switch_for_four_choices():
    logits, ids, mask = _case(20, 12, 4, "zipf", jnp.float32)
    scores = _softmax(logits)
    got = _sequence(scores[None], ids[None], mask[None])[0]
    np.testing.assert_allclose(got * 4, _switch(scores, ids, mask), rtol=RTOL)


def test_what_is_masked_has_no_influence():
    logits, ids, mask = _case(30, 6, 2, "uniform", jnp.float32)
    at = np.asarray(mask)
    dirty = np.where(at[:, None], logits, np.where(np.arange(6) > 2, NAN, INF)).astype(np.float32)
    ids, logits = np.asarray(ids), np.asarray(logits)
    for loss in (
        lambda x, m=None, i=ids: load_balancing_loss(x, i, m),
        lambda x, m=None, i=ids: sequence_balance_loss(
            jnp.abs(x)[None], i[None], None if m is None else m[None]
        )[0],
        lambda x, m=None, i=ids: router_z_loss(x, m),
    ):
        value, grad = jax.jit(jax.value_and_grad(loss))(dirty, mask)
        some = jax.jit(jax.value_and_grad(lambda x, f=loss: f(x, i=ids[at])))
        want, want_grad = some(logits[at])
        np.testing.assert_allclose(value, want, rtol=RTOL)
        np.testing.assert_allclose(grad[at], want_grad, rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(grad[~at], 0.0)
        assert_equal(loss(logits, jnp.ones_like(mask)), loss(logits))


def test_without_tokens_the_losses_are_zero():
    scores, ids = jnp.zeros((0, 4)), jnp.zeros((0, 2), jnp.int32)
    assert float(_switch(scores, ids)) == float(_z(scores)) == 0
    assert _sequence(jnp.zeros((2, 0, 4)), _i32(np.zeros((2, 0, 2)))).tolist() == [0, 0]
    assert _sequence(scores[None][:0], ids[None][:0]).shape == (0,)
    assert _load(ids, 3).tolist() == [0, 0, 0]
    nothing, full = jnp.zeros(5, jnp.bool_), jnp.full((5, 4), NAN)
    for loss in (
        lambda x: _switch(x, jnp.ones((5, 2), jnp.int32), nothing),
        lambda x: _z(x, nothing),
    ):
        value, grad = jax.jit(jax.value_and_grad(loss))(full)
        assert float(value) == 0
        np.testing.assert_array_equal(grad, np.zeros((5, 4)))


def test_ids_that_are_no_expert_count_for_nobody():
    garbage = [*INVALID_IDS, 4, 5, I32_MIN + 4, I32_MAX]
    ids = _i32([[g, 1] for g in garbage])
    assert _load(ids, 4).tolist() == [0, len(garbage), 0, 0]
    scores = jnp.zeros((len(garbage), 4)).at[:, 1].set(0.5).at[:, 3].set(0.5)
    # half of the slots are lost and the tokens stay: 4 * 1 * 0.5, and 4 / 2 * 1 * 0.5
    assert float(_switch(scores, ids)) == 2.0
    assert _sequence(scores[None], ids[None]).tolist() == [1.0]
    assert float(_switch(scores, jnp.full_like(ids, -1))) == 0.0


def test_an_expert_named_twice_counts_twice():
    assert _load(_i32([[2, 2], [2, 0]]), 3).tolist() == [1, 0, 3]


def test_nan_of_a_valid_token_is_seen():
    scores, ids = jnp.full((2, 3), 1 / 3).at[1, 2].set(NAN), _i32([[0], [1]])
    assert np.isnan(_switch(scores, ids)) and np.isnan(_z(scores))
    both = jnp.stack([jnp.ones((2, 3)), scores])
    got = _sequence(both, jnp.stack([ids, ids]))
    np.testing.assert_array_equal(np.isnan(got), [False, True])


def test_z_loss_of_large_and_masked_logits():
    assert float(_z(jnp.array([[1024.0, -3e38, -INF]]))) == 1024.0**2
    grad = jax.jit(jax.grad(router_z_loss))(jnp.array([[2.0, -INF]]))
    np.testing.assert_array_equal(grad, [[4.0, 0.0]])
    # 12000 + log 2 in float32, although float16 ends at 65504
    half = _z(jnp.full((1, 2), 12000, jnp.float16))
    np.testing.assert_allclose(half, (12000 + np.log(2)) ** 2, rtol=RTOL)


def test_sums_are_float32_whatever_the_dtype():
    """4096 times 1 + 2^-7 has no end in bfloat16, and 4096 slots of one expert none in float16."""
    scores = jnp.full((4096, 1), 1 + 2**-7, jnp.bfloat16)
    ids = jnp.zeros((4096, 3), jnp.int32)
    assert float(_switch(scores, ids)) == 3 * (1 + 2**-7)
    wide = jnp.full((1, 4096, 2), 60000, jnp.float16)
    assert _sequence(wide, ids[None]).tolist() == [1.0]


def test_derivatives():
    logits, ids, mask = _case(6, 5, 2, "with_invalid", jnp.float32)

    @jax.jit
    def losses(x):
        sequence = _sequence(jax.nn.sigmoid(x)[None], ids[None], mask[None])[0]
        switch = _switch(jax.nn.softmax(x), ids, mask)
        return switch, sequence, _z(x, mask)

    check_grads(losses, (logits,), order=1, modes=("fwd",), atol=2e-2, rtol=2e-2, eps=1e-2)
    check_grads(losses, (logits,), order=2, modes=("rev",), atol=2e-2, rtol=2e-2, eps=1e-2)


def test_gradients_by_hand():
    rng = np.random.default_rng(5)
    ids = _i32(expert_ids("with_empty", rng, 8, 4, 2))
    scores = jax.nn.softmax(normal(rng, (8, 4)))
    load = np.asarray(_oracle_load(ids, 4))
    # d loss / d scores[t, e] = E * count[e] / N^2 for every t: counts are constants
    got = jax.jit(jax.grad(load_balancing_loss))(scores, ids)
    np.testing.assert_allclose(got, np.tile(4 * load / 64, (8, 1)), rtol=RTOL)
    assert not got[:, load == 0].any() and (load == 0).any()
    # s / sum(s) does not change with the scale of s, so the gradient is orthogonal to s
    grad = jax.jit(jax.grad(lambda x: _sequence(x[None], ids[None])[0]))(scores)
    np.testing.assert_allclose((grad * scores).sum(-1), 0, atol=1e-6)
    # d z^2 / d logits = 2 z softmax
    grad = jax.jit(jax.grad(router_z_loss))(scores)
    want = 2 * jax.nn.logsumexp(scores, -1)[:, None] * jax.nn.softmax(scores) / 8
    np.testing.assert_allclose(grad, want, rtol=1e-5)


def test_gradients_have_the_dtype_of_the_scores_and_stay_finite():
    ids = _i32([[0, 1], [1, 2]])
    scores = jnp.zeros((2, 3), jnp.bfloat16).at[0].set(0.5)  # all scores of a token underflowed
    for fn in (
        lambda x: load_balancing_loss(x, ids),
        lambda x: sequence_balance_loss(x[None], ids[None])[0],
        router_z_loss,
    ):
        grad = jax.jit(jax.grad(fn))(scores)
        assert grad.dtype == jnp.bfloat16
        assert np.isfinite(np.asarray(grad, np.float32)).all()


def test_scores_may_be_small():
    """The slope of a quotient has the square of its divisor, which is 0 long before that is."""

    def loss(logits):
        scores = jax.nn.sigmoid(logits)
        return jaxmoe.sequence_balance_loss(scores[None], ids[None]).sum()

    ids = jnp.array([[3, 2], [2, 0]], jnp.int32)
    logits = jnp.array([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 2.0, 0.5]])
    far, farther = (jax.grad(loss)(logits - low) for low in (40.0, 60.0))
    assert np.asarray(far).all()
    np.testing.assert_allclose(farther, far, rtol=1e-4)


def test_vmap():
    scores, ids, mask = _case(6, 5, 2, "with_invalid", jnp.float32, (3,))
    scores = jax.nn.sigmoid(scores)
    by_sequence = lambda x, i, m: sequence_balance_loss(x[None], i[None], m[None])[0]  # noqa: E731
    for loss in (load_balancing_loss, by_sequence, lambda x, _, m: router_z_loss(x, m)):
        value_and_grad = jax.jit(jax.value_and_grad(loss))
        got = jax.jit(jax.vmap(value_and_grad))(scores, ids, mask)
        want = [value_and_grad(*one) for one in zip(scores, ids, mask, strict=True)]
        # sums in another order
        close = functools.partial(np.testing.assert_allclose, rtol=RTOL, atol=1e-8)
        jax.tree.map(close, got, jax.tree.map(lambda *a: jnp.stack(a), *want))
    shared = jax.jit(jax.vmap(load_balancing_loss, (0, None)))(scores, ids[0])
    np.testing.assert_allclose(shared[2], _switch(scores[2], ids[0]), rtol=RTOL)
    assert_vmap_is_loop(jax.jit(functools.partial(expert_load, num_experts=5)), (ids,), (0,))
    update = jax.jit(functools.partial(update_selection_bias, rate=0.5))
    assert_vmap_is_loop(update, (scores[:, 0], ids.reshape(3, 12)[:, :5]), (0, 0))


def test_numpy_arrays_are_taken():
    scores, ids = np.full((4, 2), 0.5, np.float32), np.zeros((4, 1), np.int32)
    mask = np.array([True, True, False, False])
    assert float(load_balancing_loss(scores, ids, mask)) == 1.0
    assert sequence_balance_loss(scores[None], ids[None], mask[None]).tolist() == [1.0]
    np.testing.assert_allclose(router_z_loss(scores, mask), (0.5 + np.log(2)) ** 2, rtol=RTOL)
    load = np.asarray(expert_load(ids, 2))
    bias = np.zeros(2, np.float32)
    new = update_selection_bias(bias, load, rate=np.float32(0.5))
    assert new.tolist() == [-0.5, 0.5] and not bias.any()


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """Loads add up by psum; means of equally many tokens average."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    logits, ids, _ = _case(24, 8, 3, "with_invalid", jnp.float32)
    bias = jnp.zeros(8)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P()),
        out_specs=(P(), P(), P("data"), P()),
        check_vma=check_vma,
    )
    def step(logits, ids, bias):
        load = jax.lax.psum(expert_load(ids, 8), "data")
        z = jax.lax.pmean(router_z_loss(logits), "data")
        local = sequence_balance_loss(jax.nn.sigmoid(logits)[None], ids[None])
        return load, z, local, update_selection_bias(bias, load, rate=0.25)

    load, z, local, new = step(np.asarray(logits), np.asarray(ids), np.asarray(bias))
    assert_equal(load, _load(ids, 8))
    np.testing.assert_allclose(z, _z(logits), rtol=RTOL)
    scores, choices = jax.nn.sigmoid(logits).reshape(4, 6, 8), np.asarray(ids).reshape(4, 6, 3)
    np.testing.assert_allclose(local, _sequence(scores, choices), rtol=RTOL)
    assert_equal(new, _update(bias, np.asarray(load), rate=0.25))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_tokens_are_one_batch_outside_shard_map(kind):
    logits, ids, mask = _case(24, 8, 3, "uniform", jnp.float32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))

    def every(logits, ids, mask):
        scores = jax.nn.softmax(logits)
        loss = load_balancing_loss(scores, ids, mask) + load_balancing_loss(scores, ids)
        by_sequence = sequence_balance_loss(scores[:, None], ids[:, None], mask[:, None])
        return loss + router_z_loss(logits, mask) + by_sequence.sum(), expert_load(ids, 8)

    value_and_grad = jax.jit(jax.value_and_grad(every, has_aux=True))
    (want, want_load), want_grad = value_and_grad(logits, ids, mask)
    with jax.set_mesh(mesh):
        args = jax.device_put((logits, ids, mask), NamedSharding(mesh, P("data")))
        compiled = value_and_grad.lower(*args).compile()
        (got, load), grad = compiled(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-7)
    assert_equal(load, want_load)
    assert "all-gather" not in (compiled.as_text() or "all-gather")


@pytest.mark.parametrize(
    ("load", "sign"),
    [
        ([5, 1, 3], [-1, 1, 0]),  # the mean is one of them
        ([2, 2, 2], [0, 0, 0]),
        ([0, 0, 0], [0, 0, 0]),
        ([3, 3, 4], [1, 1, -1]),  # the mean is no integer
        ([0, 0, 1], [1, 1, -1]),
        # neighbours that float32 cannot tell from their mean
        ([2**28 + 1, 2**28, 2**28], [-1, 1, 1]),
        ([2**28 + 1, 2**28 - 1, 2**28], [-1, 1, 0]),
        ([I32_MAX, 0, 0], [-1, 1, 1]),
    ],
)
def test_update_moves_by_the_exact_sign(load, sign):
    bias = jnp.array([0.5, -0.25, 0.0])
    got = jax.jit(update_selection_bias)(bias, _i32(load), rate=0.125)
    assert_equal(got, bias + 0.125 * jnp.array(sign, jnp.float32))


def test_update_takes_a_scheduled_rate():
    bias, load = jnp.zeros(2), _i32([3, 1])
    for rate in (0.5, np.float32(0.5), np.float64(0.5), jnp.float32(0.5)):
        assert update_selection_bias(bias, load, rate=rate).tolist() == [-0.5, 0.5]
    assert update_selection_bias(bias, load, rate=0).tolist() == [0, 0]
    scheduled = jax.jit(lambda r: update_selection_bias(bias, load, rate=r * 2))(jnp.float32(0.25))
    assert scheduled.tolist() == [-0.5, 0.5]


def test_updates_even_out_a_skewed_router():
    """Top 2 of 8 for scores that favour the first experts: the largest load falls to the mean's."""
    scores = jax.nn.sigmoid(
        normal(np.random.default_rng(7), (512, 8)) + jnp.linspace(1, -1, 8)[None]
    )

    @jax.jit
    def step(bias, _):
        load = expert_load(jax.lax.top_k(scores + bias[None], 2)[1], 8)
        return update_selection_bias(bias, load, rate=0.01), load

    _, loads = jax.lax.scan(step, jnp.zeros(8), length=200)
    assert (loads.sum(1) == 1024).all()
    assert loads[0].max() > 256  # twice the mean of 128
    assert loads[-20:].max() < 150 and loads[-20:].min() > 106


def test_x64_changes_nothing():
    logits, ids, mask = _case(9, 4, 2, "uniform", jnp.float32)

    def every(logits, ids, mask):
        scores = jax.nn.softmax(logits)
        load = expert_load(ids, 4)
        return (
            load_balancing_loss(scores, ids, mask),
            sequence_balance_loss(scores[None], ids[None], mask[None]),
            router_z_loss(logits, mask),
            load,
            update_selection_bias(jnp.zeros(4, jnp.float32), load, rate=0.1),
        )

    want = jax.jit(every)(logits, ids, mask)
    with jax.enable_x64(True):
        got = jax.jit(every)(logits, ids, mask)
    jax.tree.map(assert_equal, got, want)


SCORES, IDS, MASK = np.zeros((3, 4), np.float32), np.zeros((3, 2), np.int32), np.ones(3, np.bool_)
BIAS, LOAD = np.zeros(4, np.float32), np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: load_balancing_loss([[1.0]], IDS),
            TypeError,
            "load_balancing_loss: scores must be a JAX or NumPy array. Got scores: a list.",
        ),
        (
            lambda: load_balancing_loss(SCORES[0], IDS),
            ValueError,
            "load_balancing_loss: scores must have 2 axes [T,E], not 1. Got scores: f32[4].",
        ),
        (
            lambda: load_balancing_loss(IDS, IDS),
            TypeError,
            "load_balancing_loss: scores.dtype=i32 must be bf16 or f16 or f32. "
            "Got scores: i32[3,2].",
        ),
        (
            lambda: load_balancing_loss(SCORES[:, :0], IDS),
            ValueError,
            "load_balancing_loss: scores.shape[1]=0 must be at least 1 (num_experts). "
            "Got scores: f32[3,0].",
        ),
        (
            lambda: load_balancing_loss(SCORES, SCORES),
            TypeError,
            "load_balancing_loss: expert_ids.dtype=f32 must be i32. Got expert_ids: f32[3,4].",
        ),
        (
            lambda: load_balancing_loss(SCORES, IDS[0]),
            ValueError,
            "load_balancing_loss: expert_ids must have 2 axes [T,K], not 1. "
            "Got expert_ids: i32[2].",
        ),
        (
            lambda: load_balancing_loss(SCORES, IDS[:, :0]),
            ValueError,
            "load_balancing_loss: expert_ids.shape[1]=0 must be at least 1 (top_k). "
            "Got expert_ids: i32[3,0].",
        ),
        (
            lambda: load_balancing_loss(SCORES, IDS[:2]),
            ValueError,
            "load_balancing_loss: expert_ids.shape[0]=2 must equal scores.shape[0]=3 (num_tokens). "
            "Got expert_ids: i32[2,2], scores: f32[3,4].",
        ),
        (
            lambda: load_balancing_loss(SCORES, IDS, MASK[:2]),
            ValueError,
            "load_balancing_loss: mask.shape[0]=2 must equal scores.shape[0]=3 (num_tokens). "
            "Got mask: bool[2], scores: f32[3,4].",
        ),
        (
            lambda: load_balancing_loss(SCORES, IDS, jnp.ones(3, jnp.int32)),
            TypeError,
            "load_balancing_loss: mask.dtype=i32 must be bool. Got mask: i32[3].",
        ),
        (
            lambda: jax.jit(load_balancing_loss)(SCORES, IDS, MASK[:, None]),  # while tracing
            ValueError,
            "load_balancing_loss: mask must have 1 axis [T], not 2. Got mask: bool[3,1].",
        ),
        (
            lambda: sequence_balance_loss(SCORES, IDS),
            ValueError,
            "sequence_balance_loss: scores must have 3 axes [B,S,E], not 2. Got scores: f32[3,4].",
        ),
        (
            lambda: sequence_balance_loss(SCORES[None], IDS),
            ValueError,
            "sequence_balance_loss: expert_ids must have 3 axes [B,S,K], not 2. "
            "Got expert_ids: i32[3,2].",
        ),
        (
            lambda: sequence_balance_loss(SCORES[None], jnp.stack([IDS, IDS])),
            ValueError,
            "sequence_balance_loss: expert_ids.shape[0]=2 must equal scores.shape[0]=1 "
            "(sequences). Got expert_ids: i32[2,3,2], scores: f32[1,3,4].",
        ),
        (
            lambda: sequence_balance_loss(SCORES[None], IDS[None], MASK[None, :2]),
            ValueError,
            "sequence_balance_loss: mask.shape[1]=2 must equal scores.shape[1]=3 "
            "(tokens of a sequence). Got mask: bool[1,2], scores: f32[1,3,4].",
        ),
        (
            lambda: sequence_balance_loss(SCORES[None], IDS[None, :, :0]),
            ValueError,
            "sequence_balance_loss: expert_ids.shape[2]=0 must be at least 1 (top_k). "
            "Got expert_ids: i32[1,3,0].",
        ),
        (
            lambda: router_z_loss(SCORES[0]),
            ValueError,
            "router_z_loss: logits must have 2 axes [T,E], not 1. Got logits: f32[4].",
        ),
        (
            lambda: router_z_loss(SCORES, MASK[:1]),
            ValueError,
            "router_z_loss: mask.shape[0]=1 must equal logits.shape[0]=3 (num_tokens). "
            "Got mask: bool[1], logits: f32[3,4].",
        ),
        (
            lambda: expert_load(IDS, 0),
            ValueError,
            "expert_load: num_experts=0 must be at least 1.",
        ),
        (
            lambda: jax.jit(expert_load)(IDS, 4),
            TypeError,
            "expert_load: num_experts must be a Python int known at trace time. "
            "Got num_experts: i32[].",
        ),
        (
            lambda: expert_load(SCORES, 4),
            TypeError,
            "expert_load: expert_ids.dtype=f32 must be i32. Got expert_ids: f32[3,4].",
        ),
        (
            lambda: update_selection_bias(BIAS.astype(jnp.bfloat16), LOAD, rate=0.1),
            TypeError,
            "update_selection_bias: bias.dtype=bf16 must be f32. Got bias: bf16[4].",
        ),
        (
            lambda: update_selection_bias(BIAS[None], LOAD, rate=0.1),
            ValueError,
            "update_selection_bias: bias must have 1 axis [E], not 2. Got bias: f32[1,4].",
        ),
        (
            lambda: update_selection_bias(BIAS[:0], LOAD, rate=0.1),
            ValueError,
            "update_selection_bias: bias.shape[0]=0 must be at least 1 (num_experts). "
            "Got bias: f32[0].",
        ),
        (
            lambda: update_selection_bias(BIAS, BIAS, rate=0.1),
            TypeError,
            "update_selection_bias: load.dtype=f32 must be i32. Got load: f32[4].",
        ),
        (
            lambda: update_selection_bias(BIAS, LOAD[:3], rate=0.1),
            ValueError,
            "update_selection_bias: load.shape[0]=3 must equal bias.shape[0]=4 (num_experts). "
            "Got load: i32[3], bias: f32[4].",
        ),
        (
            lambda: update_selection_bias(BIAS, LOAD, rate=-0.1),
            ValueError,
            "update_selection_bias: rate=-0.1 must be at least 0 and finite in float32.",
        ),
        (
            lambda: update_selection_bias(BIAS, LOAD, rate=NAN),
            ValueError,
            "update_selection_bias: rate=nan must be at least 0 and finite in float32.",
        ),
        (
            lambda: update_selection_bias(BIAS, LOAD, rate="fast"),
            TypeError,
            "update_selection_bias: rate must be a number or a scalar float32 array. "
            "Got rate: 'fast'.",
        ),
        (
            lambda: update_selection_bias(BIAS, LOAD, rate=True),
            TypeError,
            "update_selection_bias: rate must be a number or a scalar float32 array. "
            "Got rate: True.",
        ),
        (
            lambda: update_selection_bias(BIAS, LOAD, rate=BIAS),
            ValueError,
            "update_selection_bias: rate must have 0 axes [], not 1. Got rate: f32[4].",
        ),
        (
            lambda: update_selection_bias(BIAS, LOAD, rate=jnp.int32(1)),
            TypeError,
            "update_selection_bias: rate.dtype=i32 must be f32. Got rate: i32[].",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == f"jaxmoe.{message}"
