"""Scores that route returns for the losses: against the oracle, their derivatives, their place."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxmoe
from jaxmoe import reference, route, route_and_plan
from jaxmoe._testing import assert_equal, assert_vmap_is_loop
from jaxmoe.routing_methods import METHODS
from tests import routing_oracle as oracle

T, E, NAN, INF = 6, 16, math.nan, math.inf
MASK = np.array([1, 0, 1, 1, 0, 1], bool)


def drawn(seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((T, E)).astype(dtype) * 3


def scores(logits, method="renormalize", **options):
    return route(logits, top_k=1, method=method, return_scores=True, **options).scores


@pytest.mark.parametrize("method", METHODS)
def test_value(method):
    dtype = (jnp.bfloat16, jnp.float16, np.float32)[list(METHODS).index(method) % 3]
    logits = drawn(1, dtype)
    logits[0, 3:9], logits[2], logits[1], logits[4], logits[5, 1:] = NAN, NAN, INF, NAN, -INF
    got = jax.jit(functools.partial(scores, method=method))(logits, mask=MASK)
    assert got.dtype == jnp.float32
    want = oracle.scores(logits, method, MASK)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-37)
    assert not got[~MASK].any() and not got[2].any()
    by_reference = reference.route(
        jnp.asarray(logits), top_k=1, method=method, mask=MASK, return_scores=True
    )
    np.testing.assert_allclose(by_reference[2], want, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("method", ["softmax", "deepseek_v3"])
def test_options_that_have_no_part(method):
    """Neither bias, groups, scales nor what is chosen; padding is as masked tokens are."""
    logits, options = drawn(), {"expert_scale": np.full(E, 2, np.float32), "scale": 3.0}
    options |= {"num_shared_experts": 2, "expert_ids": np.full((T, 1), 7, np.int32)}
    if method == "deepseek_v3":
        options |= {"bias": np.ones(E, np.float32), "num_groups": 4, "top_groups": 1}
    plain = scores(logits, method)
    assert_equal(scores(logits, method, **options), plain)
    padded = logits.copy()
    padded[4:] = INF
    want = jnp.where(jnp.arange(T)[:, None] < 4, plain, 0.0)
    assert_equal(scores(padded, method, num_valid_tokens=4, **options), want)


def test_only_if_asked_for():
    routing = route(drawn(), top_k=2)
    assert routing.scores is None and len(jax.tree.leaves(routing)) == 2


def test_route_and_plan():
    options = {"top_k": 2, "return_scores": True, "mask": MASK}
    for more in ({}, {"num_shared_experts": 1}):
        routing, _ = route_and_plan(drawn(), **options, **more)
        jax.tree.map(assert_equal, routing, route(drawn(), **options, **more))


@pytest.mark.parametrize("method", ["renormalize", "sqrtsoftplus"])
def test_derivatives(method):
    logits = drawn(2)[:3]
    loss = jax.jit(lambda x: (scores(x, method) ** 2).sum())
    check_grads(loss, (logits,), order=2, atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize(
    ("method", "padding"),
    [
        ("renormalize", "mask"),
        ("softmax", "num_valid_tokens"),
        ("deepseek_v3", "mask"),
        ("sqrtsoftplus", "num_valid_tokens"),
    ],
)
def test_special_values_have_finite_gradients(method, padding):
    logits = drawn(3)
    logits[0, 1:4], logits[1], logits[2, 2:], logits[3] = NAN, -200, -INF, NAN
    logits[4], logits[5] = INF, NAN
    by_number = padding == "num_valid_tokens"
    valid = {padding: np.int32(4) if by_number else np.arange(T) < 4}
    valid = {name: jnp.asarray(value) for name, value in valid.items()}
    factor = np.random.default_rng(4).standard_normal((T, E), np.float32)
    loss = jax.jit(lambda x: (scores(x, method, **valid) * factor).sum())
    gradient = np.asarray(jax.grad(loss)(logits))
    assert np.isfinite(gradient).all() and gradient[:1].any()
    assert not gradient[4:].any() and not gradient[np.isnan(logits)].any()
    assert np.isfinite(jax.jvp(loss, (logits,), (np.ones_like(logits),))[1])


def test_losses_take_them():
    """The balance loss of Mixtral, and DeepSeek-V3's of each sequence."""
    logits, mask = drawn().reshape(2, 3, E), MASK.reshape(2, 3)

    def by_hand(logits):
        ids = route(logits, top_k=2).expert_ids
        first = jaxmoe.load_balancing_loss(jax.nn.softmax(logits), ids, mask)
        ids = route(logits, top_k=2, method="deepseek_v3").expert_ids
        second = jaxmoe.sequence_balance_loss(jax.nn.sigmoid(logits), ids, mask)
        return first + second.sum()

    def asked_for(logits):
        options = {"top_k": 2, "mask": mask, "return_scores": True}
        one, other = (route(logits, method=m, **options) for m in ("renormalize", "deepseek_v3"))
        first = jaxmoe.load_balancing_loss(one.scores, one.expert_ids, mask)
        second = jaxmoe.sequence_balance_loss(other.scores, other.expert_ids, mask)
        return first + second.sum()

    got, want = (jax.jit(jax.value_and_grad(fn))(logits) for fn in (asked_for, by_hand))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, want)


def test_vmap():
    logits = jnp.stack([drawn(5), drawn(6)])
    for fn in (route, route_and_plan):
        call = lambda x, fn=fn: fn(x, top_k=2, return_scores=True)  # noqa: E731
        assert_vmap_is_loop(call, (logits,), (0,))


def test_they_leave_a_shard_map_with_the_routing():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = functools.partial(route, top_k=2, return_scores=True)
    divided = jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    jax.tree.map(assert_equal, jax.jit(divided)(drawn()), jax.jit(fn)(drawn()))


def test_layers_read_none():
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 3, 4), np.float32)
    w = {n: rng.standard_normal((E, 4, 4), np.float32) for n in ("up", "down")}
    experts = jaxmoe.Experts(**w, activation="relu")
    logits = drawn().reshape(2, 3, E)
    plain, with_scores = (route(logits, top_k=2, return_scores=r) for r in (False, True))
    assert with_scores.scores.shape == (2, 3, E)
    assert_equal(jaxmoe.moe_mlp(x, with_scores, experts), jaxmoe.moe_mlp(x, plain, experts))
