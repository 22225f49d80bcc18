"""route: value, order, special values, derivatives, vmap, refusals."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxmoe import reference
from jaxmoe._testing import assert_equal, assert_vmap_is_loop, normal
from jaxmoe.routing import Routing, route

NAN, INF = np.nan, np.inf
METHODS = ("softmax", "renormalize")  # those of the CUDA kernel; test_routing_rules.py has all
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


@functools.partial(jax.jit, static_argnames=("top_k", "method"))
def _reference(logits, top_k, method):
    return reference.route(logits, top_k=top_k, method=method)


_route = jax.jit(route, static_argnames=("top_k", "method"))


def _check(logits, top_k, method):
    """Ids exactly, weights within float32's rounding of a softmax; the same bits a second time."""
    got = _route(logits, top_k=top_k, method=method)
    # The reference compares every expert with every other: the first tokens and some more are
    # enough, a token's choice does not depend on the others.
    at = np.unique(np.r_[:16, np.linspace(0, max(len(logits) - 1, 0), 64, dtype=int)])
    at = at[at < len(logits)]
    expert_ids, weights = _reference(logits[at], top_k, method)
    assert_equal(got.expert_ids[at], expert_ids)
    assert got.weights.dtype == jnp.float32
    # a sum of E terms in another order, and an exp of a few ulp
    np.testing.assert_allclose(got.weights[at], weights, rtol=2e-6, atol=1e-37)
    jax.tree.map(assert_equal, got, _route(logits, top_k=top_k, method=method))
    return got


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "dtype"),
    [
        (0, 4, 2, jnp.float32),  # no tokens
        (1, 1, 1, jnp.bfloat16),  # every count is 1
        (5, 8, 1, jnp.float16),  # K = 1: "renormalize" weighs 1
        (7, 13, 13, jnp.float32),  # K = E, an odd number
        (33, 40, 22, jnp.bfloat16),  # many ties
        (64, 512, 8, jnp.float32),  # the most experts
    ],
)
@EVERY_METHOD
def test_matches_reference(num_tokens, num_experts, top_k, dtype, method):
    rng = np.random.default_rng([num_tokens, num_experts, top_k])
    got = _check(normal(rng, (num_tokens, num_experts), dtype), top_k, method)
    assert got.expert_ids.shape == got.weights.shape == (num_tokens, top_k)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=st.data(), method=st.sampled_from(sorted(METHODS)))
def test_random_logits_with_ties_and_special_values(data, method):
    shape, top_k = data.draw(st.sampled_from([((3, 5), 3), ((2, 16), 16), ((4, 1), 1)]))
    values = st.sampled_from([-INF, -1e30, -1.0, -0.0, 0.0, 1e-30, 1.0, 1.5, 80.0, INF, NAN])
    count = shape[0] * shape[1]
    logits = data.draw(st.lists(values, min_size=count, max_size=count))
    _check(jnp.asarray(np.reshape(logits, shape), jnp.float32), top_k, method)


@EVERY_METHOD
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_ties_go_to_the_smaller_id(method, dtype):
    # 1 + 2^-9 and 1 + 2^-10 differ in float32 and not in bfloat16
    logits = jnp.array([[1.0, 1.0 + 2**-9, 2.0, 1.0 + 2**-10, 2.0]], jnp.float32).astype(dtype)
    order = [2, 4, 0, 1, 3] if dtype == jnp.bfloat16 else [2, 4, 1, 3, 0]
    got = route(logits, top_k=5, method=method)
    np.testing.assert_array_equal(got.expert_ids, [order])
    assert got.weights[0, 0] == got.weights[0, 1]


def test_softmax_chooses_by_logit_where_probabilities_underflow():
    got = route(jnp.array([[-300.0, 0.0, -200.0]]), top_k=3, method="softmax")
    np.testing.assert_array_equal(got.expert_ids, [[1, 2, 0]])
    np.testing.assert_array_equal(got.weights, [[1, 0, 0]])


@EVERY_METHOD
def test_large_logits_do_not_overflow(method):
    got = route(jnp.array([[3e38, -3e38, 2e38]]), top_k=2, method=method)
    np.testing.assert_array_equal(got.expert_ids, [[0, 2]])
    np.testing.assert_array_equal(got.weights, [[1, 0]])


@EVERY_METHOD
def test_nan_stays_in_its_token(method):
    rng = np.random.default_rng(0)
    clean = normal(rng, (6, 9))
    dirty = clean.at[2].set(NAN).at[4, ::2].set(NAN).at[5].set(INF)
    got, want = (route(x, top_k=6, method=method) for x in (dirty, clean))
    others = np.array([0, 1, 3])
    assert_equal(got.expert_ids[others], want.expert_ids[others])
    assert_equal(got.weights[others], want.weights[others])
    np.testing.assert_array_equal(got.expert_ids[2], [-1] * 6)
    np.testing.assert_array_equal(got.weights[2], [0] * 6)
    assert sorted(np.asarray(got.expert_ids[4]).tolist()) == [-1, -1, 1, 3, 5, 7]
    np.testing.assert_allclose(got.weights[4].sum(), 1.0, rtol=1e-6)


@EVERY_METHOD
def test_renaming_experts_renames_ids_only(method):
    rng = np.random.default_rng(1)
    logits, new = normal(rng, (5, 12)), rng.permutation(12)
    got = route(logits, top_k=4, method=method)
    renamed = route(jnp.zeros_like(logits).at[:, new].set(logits), top_k=4, method=method)
    np.testing.assert_array_equal(renamed.expert_ids, new[np.asarray(got.expert_ids)])
    np.testing.assert_allclose(renamed.weights, got.weights, rtol=2e-6)


def test_weights_add_up():
    logits = normal(np.random.default_rng(2), (9, 10))
    np.testing.assert_allclose(route(logits, top_k=3).weights.sum(1), np.ones(9), rtol=1e-6)
    every = route(logits, top_k=10, method="softmax").weights
    np.testing.assert_allclose(every.sum(1), np.ones(9), rtol=1e-6)


@EVERY_METHOD
def test_derivatives(method):
    # distinct logits, further apart than the steps of the numerical derivative
    logits = jnp.asarray(np.random.default_rng(3).permutation(24).reshape(4, 6) / 8.0, jnp.float32)
    factor = normal(np.random.default_rng(4), (4, 3))
    loss = jax.jit(lambda x: (route(x, top_k=3, method=method).weights * factor).sum())
    order = 2 if method == "renormalize" else 1
    check_grads(loss, (logits,), order=order, atol=2e-2, rtol=2e-2, eps=1e-2)
    want = jax.jit(jax.grad(lambda x: (_reference(x, 3, method)[1] * factor).sum()))(logits)
    got = jax.jit(jax.grad(loss))(logits)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    if method == "renormalize":  # experts that were not chosen have no influence
        chosen = np.sort(_route(logits, top_k=3).expert_ids, axis=1)
        np.testing.assert_array_equal(np.nonzero(got)[1].reshape(4, 3), chosen)


@EVERY_METHOD
def test_gradient_of_special_values_is_finite(method):
    logits = jnp.array([[NAN, 1.0, 2.0], [-INF, 0.0, -INF], [NAN] * 3, [-INF] * 3])
    loss = jax.jit(lambda x: (route(x, top_k=2, method=method).weights ** 2).sum())
    grad = jax.grad(loss)(logits)
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grad[1:], np.zeros((3, 3)))
    # two weights p and 1 - p with p = sigmoid(-1): the slope of the sum of their squares
    slope = 0.2689414 * 0.7310586 * (2 * 0.7310586 - 2 * 0.2689414)
    np.testing.assert_allclose(grad[0], [0, -slope, slope], rtol=1e-5)


def test_gradient_has_the_dtype_of_the_logits():
    logits = normal(np.random.default_rng(5), (3, 4), jnp.bfloat16)
    grad = jax.jit(jax.grad(lambda x: route(x, top_k=2).weights[:, 0].sum()))
    assert grad(logits).dtype == jnp.bfloat16


@pytest.mark.parametrize(("method", "axis"), [(METHODS[0], 0), (METHODS[1], 1), (METHODS[0], 2)])
def test_vmap(method, axis):
    logits = normal(np.random.default_rng(axis), (3, 4, 5))
    assert_vmap_is_loop(lambda x: route(x, top_k=2, method=method), (logits,), (axis,))


def test_vmap_of_vmap_and_of_grad():
    logits = normal(np.random.default_rng(6), (2, 3, 4, 5))
    assert_vmap_is_loop(jax.vmap(lambda x: route(x, top_k=2)), (logits,), (0,))
    grad = jax.jit(jax.grad(lambda x: (route(x, top_k=2).weights ** 2).sum()))
    got = jax.vmap(grad)(logits[0])
    np.testing.assert_allclose(got, jnp.stack([grad(x) for x in logits[0]]), rtol=1e-6)


def test_routing_is_a_pytree():
    routing = jax.jit(lambda r: jax.tree.map(lambda a: a + 1, r))(
        Routing(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2)))
    )
    assert isinstance(routing, Routing)
    assert (routing.expert_ids.dtype, routing.weights.dtype) == (jnp.int32, jnp.float32)
    assert int(routing.expert_ids.sum()) == float(routing.weights.sum()) == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: route(x[0], top_k=2),
            ValueError,
            r"jaxmoe\.route: logits must have 2 axes \[T,E\], not 1\. Got logits: f32\[4\]\.",
        ),
        (
            lambda x: route(x.astype(jnp.int32), top_k=2),
            TypeError,
            r"logits\.dtype=i32 must be bf16 or f16 or f32\. Got logits: i32\[3,4\]",
        ),
        (lambda _: route([[1.0]], top_k=1), TypeError, r"logits must be a JAX or NumPy array"),
        (lambda x: route(x, top_k=5), ValueError, r"top_k=5 must be in \[1, 4\]"),
        (lambda x: route(x, top_k=0), ValueError, r"top_k=0 must be in \[1, 4\]"),
        (lambda x: route(x, top_k=2.0), TypeError, r"top_k must be a Python int .* top_k: 2\.0"),
        (
            lambda x: jax.jit(lambda k: route(x, top_k=k))(2),
            TypeError,
            r"top_k must be a Python int known at trace time.* top_k: i32\[\]",
        ),
        (
            lambda x: route(x, top_k=2, method="top"),
            ValueError,
            r"method='top' must be one of softmax, renormalize",
        ),
        (
            lambda x: route(x, top_k=2, method=1),
            TypeError,
            r"method must be a name .* method: 1",
        ),
        (
            lambda x: route(x[:, :0], top_k=1),
            ValueError,
            r"logits\.shape\[1\]=0 must be at least 1",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.zeros((3, 4)))


@pytest.mark.gpu
@EVERY_METHOD
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [  # one for each number of logits that a lane of the kernel holds, and ragged ones
        (0, 8, 2),
        (1, 8, 2),
        (9, 32, 32),
        (17, 40, 8),
        (1001, 64, 6),
        (16, 128, 8),
        (513, 160, 22),
        (4096, 256, 8),
        (7, 384, 384),
        (65, 512, 10),
        (33, 896, 16),
    ],
)
def test_kernel(num_tokens, num_experts, top_k, dtype, method):
    rng = np.random.default_rng([num_tokens, num_experts])
    logits = normal(rng, (num_tokens, num_experts), dtype)
    logits = jnp.round(logits * jnp.asarray(8, dtype)) / jnp.asarray(8, dtype)  # ties
    if num_tokens > 4:
        logits = logits.at[1].set(NAN).at[2, ::3].set(NAN).at[3].set(-INF).at[4, 1].set(INF)
    _check(logits, top_k, method)
