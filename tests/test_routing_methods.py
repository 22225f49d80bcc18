"""Routing rules of one's own: every combination is the reference's, in the same kernel on CUDA."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import RoutingMethod, explain, reference, route, route_and_plan
from jaxmoe._jax import targets as _targets
from jaxmoe.routing_methods import METHODS
from tests.lowered import calls, cuda_text

SCORES = ("logits", "softmax", "sigmoid", "sqrtsoftplus")
NORMALIZE = ("none", "softmax", "sum", "clamped_sum")
# Each score with each normalization; keys, biases and groups take turns.
TURNS = (
    (True, True, "top2"),
    (False, False, "max"),
    (False, True, ""),
    (True, True, "max"),
    (False, True, "top2"),
)
COMBINED = [
    RoutingMethod(score, by_score, normalize, bias=bias, group_value=value)
    for i, (score, normalize) in enumerate(itertools.product(SCORES, NORMALIZE))
    for by_score, bias, value in [TURNS[i % len(TURNS)]]
]
ERNIE = RoutingMethod("softmax", True, "clamped_sum", True, bias=True)


def draw(num_experts=12, num_tokens=9):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(rng.standard_normal(num_experts).astype(np.float32))


def options_of(method, bias):
    groups = {"num_groups": 4, "top_groups": 2} if method.group_value else {}
    return {"top_k": 3, "method": method, **groups, **({"bias": bias} if method.bias else {})}


@pytest.mark.parametrize("method", COMBINED, ids=lambda m: f"{m.score}-{m.normalize}")
def test_every_score_with_every_normalization(method):
    logits, bias = draw()
    options = options_of(method, bias)
    ids, weights = reference.route(logits, **options)
    got = route(logits, **options)
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=5e-6, atol=1e-7)
    both, _ = route_and_plan(logits, **options)
    np.testing.assert_array_equal(both.expert_ids, ids)


@pytest.mark.parametrize("name", METHODS)
def test_names_are_instances(name):
    """A name and its rule are one program."""
    method = METHODS[name]
    logits, bias = draw()
    options = options_of(method, bias) | {"top_k": method.top_k or 3}
    texts = {
        cuda_text(lambda x: route(x, **{**options, "method": m}), logits)  # noqa: B023
        for m in (name, method)
    }
    assert len(texts) == 1


def test_ernie_is_one_call():
    """transformers' router: top_k of softmax + bias, the softmax of those by their sum."""
    logits, bias = draw(16, 20)
    prob = np.asarray(jax.nn.softmax(logits, axis=1))
    ids = np.argsort(-(prob + np.asarray(bias)), axis=1, kind="stable")[:, :4]
    picked = np.take_along_axis(prob, ids, axis=1)
    got = route(logits, top_k=4, method=ERNIE, bias=bias, epsilon=1e-12)
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, picked / picked.sum(1, keepdims=True), rtol=1e-5)
    (call,) = calls(cuda_text(lambda x, b: route(x, top_k=4, method=ERNIE, bias=b), logits, bias))
    assert call[0] == "jaxmoe_route_v2" and call[1]["by_score"] == "1:i64"


INKLING = RoutingMethod("sigmoid", True, "sum", True, bias=True, shared=True)


def test_shared_experts_in_the_sum():
    """Inkling: sigmoids of the chosen and of the shared ones, all divided by their sum."""
    logits, bias = draw(22, 16)
    routed, shared, bias = np.asarray(logits)[:, :20], np.asarray(logits)[:, 20:], bias[:20]
    score = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    ids = np.argsort(-(score(routed) + np.asarray(bias)), axis=1, kind="stable")[:, :4]
    weights = [np.take_along_axis(score(routed), ids, 1), score(shared)]
    weights = np.concatenate(weights, axis=1)
    want = 2.5 * weights / weights.sum(1, keepdims=True)
    options = {"top_k": 4, "method": INKLING, "bias": bias, "num_shared_experts": 2}
    got = route(logits, scale=2.5, **options)
    np.testing.assert_array_equal(got.expert_ids[:, :4], ids)
    assert (np.asarray(got.expert_ids)[:, 4:] == [20, 21]).all() and got.num_experts == 22
    np.testing.assert_allclose(got.weights, want, rtol=1e-5)
    traced = jax.jit(lambda s: route(logits, scale=s, **options))(jnp.float32(2.5))
    np.testing.assert_allclose(traced.weights, want, rtol=1e-5)
    calls_of = calls(cuda_text(lambda x, b: route(x, **options | {"bias": b}), logits, bias))
    assert [call[0] for call in calls_of] == ["jaxmoe_route_v2"]


@pytest.mark.parametrize("normalize", ("none", "sum", "clamped_sum", "softmax"))
@pytest.mark.parametrize("score", ("logits", "sigmoid", "sqrtsoftplus"))
def test_shared_experts_with_logits_are_those_of_the_reference(score, normalize):
    """Values and gradients, NaN logits and padding, a plan, replays."""
    method = RoutingMethod(score, score != "logits", normalize, shared=True)
    logits, factor = draw(14, 9)
    logits = np.array(abs(logits))  # sums of logits are no differences
    logits[2, 3] = logits[3, 13] = logits[4] = np.nan
    options = {"top_k": 3, "method": method, "num_shared_experts": 2}
    options |= {"mask": jnp.arange(9) != 6, "expert_scale": abs(factor[:12]), "scale": 1.5}
    got = route(logits, **options)
    ids, weights = reference.route(logits, **options)
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-5)
    assert got.expert_ids[3].tolist()[3:] == [12, -1] and (got.expert_ids[6] == -1).all()
    again = route(logits, **options, expert_ids=got.expert_ids[:, :3])
    np.testing.assert_allclose(again.weights, weights, rtol=1e-5)
    routing, plan = route_and_plan(logits, **options)
    np.testing.assert_array_equal(routing.weights, got.weights)
    assert plan.group_sizes[-2:].tolist() == [7, 6]  # rows 4 and 6 have none, 3 one
    clean = jnp.where(jnp.isnan(logits), 0.25, logits)

    def loss(fn, x):
        return jnp.sum(
            jnp.sin(fn(x, **options)[1] if fn is reference.route else fn(x, **options).weights)
        )

    slopes = [jax.grad(lambda x, fn=fn: loss(fn, x))(clean) for fn in (route, reference.route)]
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-6)


def test_the_kernel_runs_them():
    logits, bias = draw()
    with _targets.force_cuda_lowering():
        report = explain(lambda x, b: route(x, top_k=2, method=ERNIE, bias=b), logits, bias)
    (op,) = report.ops
    assert op.cuda_target == "jaxmoe_route_v2"


def test_logits_may_have_a_negative_sum():
    """Weights are quotients of these, whatever their sign, and so are their slopes."""
    method = RoutingMethod("logits", normalize="sum")
    logits = jnp.array([[-40.0, -50.0], [40.0, -41.0], [28.457, -59.152], [-1.0, -2.0]])

    def quotients(logits):
        chosen = jnp.sort(logits, axis=1)[:, ::-1]
        return chosen / chosen.sum(axis=1, keepdims=True)

    def weights(logits):
        return route(logits, top_k=2, method=method).weights

    np.testing.assert_allclose(weights(logits), quotients(logits), rtol=1e-5)
    got, want = (jax.jacobian(fn)(logits) for fn in (weights, quotients))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    (
        ({"score": "tanh"}, ValueError, "score='tanh' must be one of logits, softmax, sigmoid, "),
        ({"normalize": None}, TypeError, "normalize must be one of none, softmax, sum, clamped_"),
        ({"group_value": "sum"}, ValueError, "group_value='sum' must be one of , top2, max"),
        ({"shared": 1}, TypeError, "shared must be a bool. Got shared: 1."),
        (
            {"score": "softmax", "shared": True},
            ValueError,
            "shared must be False with score='softm",
        ),
        ({"by_score": 1}, TypeError, "by_score must be a bool. Got by_score: 1."),
        ({"bias": "yes"}, TypeError, "bias must be a bool. Got bias: 'yes'."),
        ({"top_k": -1}, ValueError, "top_k=-1 must be at least 0"),
        ({"norm_topk_prob": 1}, TypeError, "norm_topk_prob must be a bool or None."),
        ({"norm_topk_prob": "no"}, TypeError, "norm_topk_prob must be a bool or None."),
        ({"norm_topk_prob": True}, ValueError, "norm_topk_prob must be None with normalize='none'"),
    ),
)
def test_fields_that_are_refused(fields, kind, message):
    with pytest.raises(kind) as error:
        RoutingMethod(**{"score": "sigmoid"} | fields)
    assert str(error.value).startswith(f"jaxmoe.RoutingMethod: {message}")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    (
        ({"method": 3}, TypeError, "method must be a name or a jaxmoe.RoutingMethod. Got method"),
        ({"method": "best"}, ValueError, "method='best' must be one of softmax, renormalize, "),
        (
            {"method": RoutingMethod("sigmoid"), "norm_topk_prob": True},
            ValueError,
            "norm_topk_prob=True must be None: this RoutingMethod has one normalization",
        ),
        (
            {"method": INKLING},
            ValueError,
            "num_shared_experts=0 must be at least 1: shared experts have logits in this rule",
        ),
        (
            {"method": INKLING, "num_shared_experts": 12},
            ValueError,
            "logits.shape[1]=12 must be at least 13 (num_experts)",
        ),
        (
            {"method": RoutingMethod("sigmoid", top_k=1)},
            ValueError,
            "top_k=2 must be 1 for this RoutingMethod",
        ),
        (
            {"method": RoutingMethod("sigmoid"), "bias": np.zeros(12, np.float32)},
            ValueError,
            "bias=f32[12] must be None: this RoutingMethod has no selection bias",
        ),
    ),
)
def test_calls_that_are_refused(options, kind, message):
    with pytest.raises(kind) as error:
        route(draw()[0], **{"top_k": 2} | options)
    assert str(error.value).startswith(f"jaxmoe.route: {message}")


@pytest.mark.gpu
@pytest.mark.parametrize("method", [*COMBINED, ERNIE], ids=lambda m: f"{m.score}-{m.normalize}")
def test_on_a_gpu(method):
    logits, bias = draw(64, 300)
    options = options_of(method, bias)
    got = jax.jit(lambda x: route(x, **options))(logits)
    host = jax.device_put((logits, bias), jax.devices("cpu")[0])
    ids, weights = reference.route(host[0], **options_of(method, host[1]))
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=5e-6, atol=1e-7)
