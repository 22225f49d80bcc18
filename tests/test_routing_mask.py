"""route with a mask: what an invalid token gets, wherever it is and whatever its logits hold."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import route, route_and_plan
from jaxmoe._testing import assert_equal, assert_vmap_is_loop
from tests import routing_oracle as oracle
from tests.lowered import calls, cuda_text
from tests.routing_oracle import VARIANTS, case
from tests.sharding_programs import (
    AUTO,
    EXPLICIT,
    check_spec,
    close,
    collectives,
    compiled,
    make_mesh,
)
from tests.test_lowering import struct

T, E = 8, 16
MASK = np.array([1, 0, 0, 1, 1, 0, 0, 1], bool)
SHARED = case("deepseek_v3", 4, bias=True, num_shared_experts=2, expert_scale=True)
MASKED = {
    "groups": case("deepseek_v3", 4, num_groups=4, top_groups=2, masked_group_value=0.0),
    "shared": SHARED,
    **{name: VARIANTS[name] for name in ("softmax_sum", "renormalize", "topk", "sqrtsoftplus")},
}


def drawn(options):
    """Logits, those of invalid tokens as bad as can be, and the options with their arrays."""
    logits, options = oracle.draw(1, T, E, options)
    logits[1], logits[2], logits[5], logits[6] = math.inf, math.nan, -math.inf, 3e38
    logits[3, 2:] = math.nan  # a valid token with fewer experts than choices
    return logits, options


@pytest.mark.parametrize("name", MASKED)
def test_value(name):
    logits, options = drawn(MASKED[name])
    got = jax.jit(lambda x, m: route(x, mask=m, **options))(logits, MASK)
    want = oracle.route(logits, mask=MASK, **options)
    assert_equal(got.expert_ids, jnp.asarray(want.expert_ids))
    np.testing.assert_allclose(got.weights, want.weights, rtol=2e-6, atol=1e-37)
    assert (got.expert_ids[~MASK] == -1).all() and not got.weights[~MASK].any()
    assert (np.asarray(got.expert_ids)[MASK, -1] >= 0).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_mask_of_the_last_tokens_is_a_number_of_valid_ones(dtype):
    logits, options = oracle.draw(2, T, E, SHARED, dtype)
    by_mask = route(logits, mask=np.arange(T) < 5, **options)
    jax.tree.map(assert_equal, by_mask, route(logits, num_valid_tokens=5, **options))
    jax.tree.map(
        assert_equal, route(logits, mask=np.ones(T, bool), **options), route(logits, **options)
    )


def test_given_experts():
    logits, options = drawn(SHARED)
    ids = np.random.default_rng(0).integers(-1, E + 1, (T, 4), np.int32)
    got = route(logits, mask=MASK, expert_ids=ids, **options)
    want = oracle.route(logits, mask=MASK, expert_ids=ids, **options)
    assert_equal(got.expert_ids, jnp.asarray(want.expert_ids))
    np.testing.assert_allclose(got.weights, want.weights, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize(
    ("name", "fused"), [("shared", False), ("softmax_sum", True), ("renormalize", False)]
)
def test_gradients(name, fused):
    """They are those of the valid tokens on their own, and exactly 0 for the others."""
    logits, options = drawn(MASKED[name])
    options.pop("bias", None)
    scale = options.pop("expert_scale", np.ones(E, np.float32))
    width = options["top_k"] + options.get("num_shared_experts", 0)
    factor = np.random.default_rng(3).standard_normal((T, width), np.float32)

    def weights(logits, scale, mask):
        options_now = options | {"expert_scale": scale, "mask": mask}
        one = route_and_plan(logits, **options_now)[0] if fused else route(logits, **options_now)
        return one.weights

    @jax.jit
    def derivatives(logits, scale, factor, mask=None):
        loss = lambda x, s: (weights(x, s, mask) ** 2 * factor).sum()  # noqa: E731
        gradient = jax.grad(loss, (0, 1))
        tangents = (jnp.ones_like(logits), jnp.ones_like(scale))
        _, twice = jax.jvp(gradient, (logits, scale), tangents)
        return gradient(logits, scale), twice, jax.jvp(loss, (logits, scale), tangents)[1]

    got = derivatives(logits, scale, factor, MASK)
    want = derivatives(logits[MASK], scale, factor[MASK])
    for part in got[:2]:
        assert not np.asarray(part[0])[~MASK].any() and np.asarray(part[0])[MASK].any()
    got = jax.tree.map(lambda a: a[MASK] if a.shape == (T, E) else a, got)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)


def test_vmap():
    rng = np.random.default_rng(4)
    logits = jnp.asarray(rng.standard_normal((3, T, E), np.float32))
    masks = jnp.asarray(rng.random((3, T)) < 0.6)
    for options in ({"num_shared_experts": 1}, {}):
        for fn in (route, route_and_plan):
            call = lambda x, m, fn=fn, options=options: fn(x, top_k=2, mask=m, **options)  # noqa: E731
            assert_vmap_is_loop(call, (logits, masks), (0, 0))
    assert_vmap_is_loop(call, (logits[0], masks), (None, 0))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_split_tokens(kind):
    """Along one axis and along two; a whole mask beside split logits too."""

    def fn(a):
        one = route(a["logits"], top_k=2, mask=a["mask"], num_shared_experts=1)
        whole = route(a["logits"], top_k=2, mask=a["whole"])
        options = {"num_shared_experts": 1, "return_scores": True}
        two = route(a["batches"], top_k=2, mask=a["masks"], **options)
        gradient = jax.grad(lambda x: (route(x, top_k=2, mask=a["mask"]).weights ** 2).sum())
        return one, whole, two, gradient(a["logits"])

    rng = np.random.default_rng(5)
    arrays = {
        "logits": rng.standard_normal((T, E), np.float32),
        "mask": MASK,
        "whole": MASK,
        "batches": rng.standard_normal((2, T, E), np.float32),
        "masks": np.stack([MASK, ~MASK]),
    }
    specs = {"logits": P("b"), "mask": P("b"), "whole": P(), "batches": P("a", "b")}
    specs["masks"] = P("a", "b")
    got, text = compiled(fn, make_mesh(kind, "a", "b"), arrays, specs)
    close(got, fn(arrays))
    assert collectives(text) == "none"
    for split in (got[0].weights, got[1].weights, got[3]):
        check_spec(split, P("b"))
    check_spec(got[2].scores, P("a", "b"))


def test_several_axes_of_tokens():
    logits, options = drawn(SHARED)
    mask = MASK.reshape(2, 2, 2)
    got = route(logits.reshape(2, 2, 2, E), mask=mask, **options)
    want = route(logits, mask=MASK, **options)
    assert_equal(got.expert_ids, want.expert_ids.reshape(2, 2, 2, -1))
    assert_equal(got.weights, want.weights.reshape(2, 2, 2, -1))


def test_no_tokens():
    got = route(np.zeros((0, E), np.float32), top_k=2, mask=np.zeros(0, bool), num_shared_experts=1)
    assert got.weights.shape == (0, 3)


def test_a_masked_token_is_the_residual_alone():
    """No expert has a row of it, and NaN of its own stays out of all gradients."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((T, 4), np.float32)
    experts = jaxmoe.Experts(
        up=rng.standard_normal((E, 4, 4), np.float32),
        down=rng.standard_normal((E, 4, 4), np.float32),
        activation="relu2",
    )
    logits = np.where(MASK[:, None], rng.standard_normal((T, E), np.float32), np.float32(math.nan))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(logits, experts):
        routing = route(logits, top_k=2, mask=MASK)
        y = jaxmoe.moe_mlp(x, routing, experts, residual=x)
        return (y**2).sum(), y

    (_, y), gradients = run(logits, experts)
    assert_equal(y[~MASK], jnp.asarray(x[~MASK]))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_cuda_calls():
    """The kernels have no mask; only shared experts need the two calls."""
    mask = struct(6, dtype=jnp.bool_)

    def of(fn, **options):
        text = cuda_text(lambda x, m: fn(x, top_k=2, mask=m, **options), struct(6, 4), mask)
        return [call[0] for call in calls(text)]

    assert of(route, num_shared_experts=1) == ["jaxmoe_route_v2"]
    assert of(route_and_plan) == ["jaxmoe_route_plan_v1"]
    assert of(route_and_plan, num_shared_experts=1) == ["jaxmoe_route_v2", "jaxmoe_plan_v1"]
