"""route_and_plan: the bits of route and plan, its transformations, and its one call on CUDA."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import plan, route, route_and_plan
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal, assert_vmap_is_loop
from tests import routing_oracle as oracle
from tests.lowered import calls, cuda_text
from tests.routing_oracle import VARIANTS, case
from tests.test_lowering import struct

WINDOW = ("expert_offset", "num_local_experts", "expert_map")


def two_calls(logits, **options):
    """What the one call must equal."""
    window = {name: options.pop(name) for name in WINDOW if name in options}
    routing = route(logits, **options)
    total = logits.shape[1] + options.get("num_shared_experts", 0)
    return routing, plan(routing.expert_ids, total, **window)


def _check(logits, options):
    logits = jnp.asarray(logits)
    both = jax.jit(lambda x: (route_and_plan(x, **options), two_calls(x, **options)))
    got, want = both(logits)
    jax.tree.map(assert_equal, got, want)


def _map(num_experts, num_local, seed=0):
    """A map with every second expert elsewhere, garbage among it."""
    ids = np.random.default_rng(seed).integers(-3, num_local + 2, num_experts, np.int32)
    ids[:2] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return ids


def test_signature_is_that_of_route_and_plan():
    parameters = {
        **inspect.signature(route).parameters,
        **{name: inspect.signature(plan).parameters[name] for name in WINDOW},
    }
    assert list(inspect.signature(route_and_plan).parameters.values()) == list(parameters.values())


@pytest.mark.parametrize("name", sorted(VARIANTS)[::4])  # all of them are tested in route
def test_variants(name):
    logits, options = oracle.draw(1, 9, 16, VARIANTS[name])
    logits[2, 3:] = np.nan
    _check(logits, options)


SHARED = case("deepseek_v3", 3, bias=True, num_shared_experts=2)
OPTIONS = {
    "window": case("softmax", 3, expert_offset=4, num_local_experts=5),
    "rest": case("softmax", 3, expert_offset=4),
    "map": case("softmax", 3, expert_map=_map(16, 6), num_local_experts=6),
    "shared": SHARED,
    "shared in the window": SHARED | {"expert_offset": 15},
    "shared in the map": SHARED | {"expert_map": _map(18, 7), "num_local_experts": 7},
    "scaled": SHARED | {"expert_scale": True},
    "padding": SHARED | {"num_valid_tokens": 4},
    "padding by array": SHARED | {"num_valid_tokens": np.array(4, np.int32)},
    "all padding": SHARED | {"num_valid_tokens": 0},
    "scale": SHARED | {"scale": np.float32([2.5])[0, ...], "expert_scale": True},
    "everything": SHARED
    | {
        "expert_scale": True,
        "num_valid_tokens": 5,
        "expert_map": _map(18, 30),
        "num_local_experts": 30,
    },
    "forced": case("softmax", 2, expert_ids=np.int16([[3, 1], [-1, 99]] * 3 + [[0, 0]])),
}


MASKS = {
    "mask": case("softmax", 3, mask=np.arange(7) % 3 > 0, return_scores=True),
    "mask and shared": SHARED | {"mask": np.arange(7) % 3 > 0, "expert_offset": 15},
    "mask of nothing": SHARED | {"mask": np.zeros(7, bool)},
    "mask and forced": case("softmax", 1, mask=np.arange(7) > 2, expert_ids=np.zeros((7, 1), "i4")),
}


@pytest.mark.parametrize("name", OPTIONS | MASKS)
def test_options(name):
    given = (OPTIONS | MASKS)[name]
    rng = np.random.default_rng(len(name))
    logits = rng.standard_normal((7, 16), np.float32)
    arrays = {
        option: jnp.asarray(rng.standard_normal(16, np.float32))
        for option in ("bias", "expert_scale")
        if given.get(option)
    }
    _check(logits, given | arrays)


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_token_counts(num_tokens):
    logits = np.random.default_rng(num_tokens).standard_normal((num_tokens, 12), np.float32)
    _check(logits, case("sigmoid", 5))


def test_more_experts_than_the_kernel_takes():
    logits = np.random.default_rng(0).standard_normal((3, 1025), np.float32)
    _check(logits, case("softmax", 4))
    text = cuda_text(lambda x: route_and_plan(x, top_k=4), jnp.asarray(logits))
    assert [call[0] for call in calls(text)] == ["jaxmoe_plan_v1"]


def test_vmap_is_a_loop():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((3, 5, 8), np.float32))
    bias = jnp.asarray(rng.standard_normal((3, 8), np.float32))
    valid = jnp.array([4, 0, 5], jnp.int32)
    maps = jnp.stack([_map(10, 6, seed) for seed in range(3)])

    def fn(x, b, v, m):
        options = SHARED | {"bias": b, "num_valid_tokens": v, "expert_map": m}
        return route_and_plan(x, num_local_experts=6, **options)

    assert_vmap_is_loop(fn, (logits, bias[0], valid[0], maps[0]), (0, None, None, None))
    assert_vmap_is_loop(fn, (logits, bias[0], valid, maps[0]), (0, None, 0, None))
    assert_vmap_is_loop(fn, (logits[0], bias[0], valid, maps[0]), (None, None, 0, None))
    assert_vmap_is_loop(fn, (logits, bias, valid, maps), (0, 0, 0, 0))
    twice = jax.vmap(jax.vmap(lambda x: fn(x, bias[0], valid[0], maps[0])))(logits[None])
    once = jax.vmap(lambda x: fn(x, bias[0], valid[0], maps[0]))(logits)
    jax.tree.map(lambda a, b: assert_equal(a[0], b), twice, once)


def test_vmap_is_one_call():
    def fn(x, valid):
        return route_and_plan(x, top_k=2, num_valid_tokens=valid)

    for axes, shapes in (((0, None), ((3, 5, 8), ())), ((0, 0), ((3, 5, 8), (3,)))):
        args = struct(*shapes[0]), struct(*shapes[1], dtype=jnp.int32)
        ((target, _, operands, results),) = calls(cuda_text(jax.vmap(fn, axes), *args))
        assert target == "jaxmoe_route_plan_v1"
        assert operands == ["3x5x8xbf16", "0xf32", "0xi32", "3xi32"]
        assert results[:5] == ["3x5x2xi32", "3x5x2xf32", "3x9xi32", "3x10xi32", "3x5x2xi32"]


@pytest.mark.parametrize("name", ["softmax_sum", "renormalize"])
def test_derivatives_are_those_of_route(name):
    logits, options = oracle.draw(1, 9, 16, VARIANTS[name])
    options["num_valid_tokens"] = 7
    logits[2, 3:] = np.nan
    rng = np.random.default_rng(0)
    tangent = jnp.asarray(rng.standard_normal(logits.shape, np.float32))

    cotangent = jnp.asarray(rng.standard_normal((9, options["top_k"]), np.float32))

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(fn, logits):
        weights = lambda x: fn(x, **options)[0].weights  # noqa: E731
        tangents = jax.jvp(weights, (logits,), (tangent,))[1]
        return tangents, jax.vjp(weights, logits)[1](cotangent)[0]

    got, want = (derivatives(fn, logits) for fn in (route_and_plan, two_calls))
    # equal formulas, fused in two ways
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, got, want)
    assert np.abs(np.asarray(got[1])[[0, 1, 3, 4, 5, 6]]).max() > 0


def test_gradient_of_the_scale():
    logits = np.random.default_rng(0).standard_normal((4, 6), np.float32)

    def loss(fn):
        options = case("softmax", 2, num_shared_experts=1)
        return lambda s: (fn(logits, expert_scale=s, **options)[0].weights ** 2).sum()

    fns = (route_and_plan, two_calls)
    got, want = (jax.jit(jax.grad(loss(fn)))(jnp.arange(1.0, 7.0)) for fn in fns)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.asarray(got).any()


def test_gradient_on_cuda_is_one_call_and_xla():
    def loss(x):
        return route_and_plan(x, top_k=2)[0].weights.sum()

    assert [c[0] for c in calls(cuda_text(jax.grad(loss), struct(5, 8)))] == [
        "jaxmoe_route_plan_v1"
    ]


def test_forced_choices_are_one_call_for_the_plan():
    def fn(x, ids):
        return route_and_plan(x, top_k=2, expert_ids=ids)

    text = cuda_text(fn, struct(5, 8), struct(5, 2, dtype=jnp.int32))
    assert [c[0] for c in calls(text)] == ["jaxmoe_plan_v1"]


REFUSED = [
    ({"top_k": 9}, "top_k=9 must"),
    ({"method": "topk", "bias": np.zeros(8, np.float32)}, "bias=f32"),
    ({"scale": "2"}, "scale must be a number"),
    ({"mask": np.ones(4, bool)}, r"mask.shape\[0\]=4 must"),
    ({"return_scores": None}, "return_scores must be a bool"),
    ({"num_groups": 2}, "num_groups=2 must be left out"),
    ({"epsilon": 1.0}, "epsilon=1.0 must be None"),
    ({"num_valid_tokens": 4}, "num_valid_tokens=4 must"),
    ({"expert_ids": np.zeros((3, 1), np.int32)}, r"expert_ids.shape\[1\]=1 must"),
    ({"expert_offset": 8}, "expert_offset=8 must"),
    ({"num_local_experts": 9}, "num_local_experts=9 must"),
    (
        {"num_shared_experts": 1, "expert_map": np.zeros(8, np.int32)},
        r"expert_map.shape\[0\]=8 must be 9",
    ),
]


@pytest.mark.parametrize(("options", "rule"), REFUSED)
def test_errors_name_the_op(options, rule):
    with pytest.raises((TypeError, ValueError), match=rf"^jaxmoe\.route_and_plan: {rule}"):
        route_and_plan(jnp.zeros((3, 8)), **{"top_k": 2, **options})


def test_too_many_rows():
    logits = jax.ShapeDtypeStruct((2**22, 512), jnp.bfloat16)
    rule = r"^jaxmoe\.route_and_plan: T \* K = 2147483648 must be at most 2147483647 "
    with pytest.raises(ValueError, match=rule):
        jax.eval_shape(lambda x: route_and_plan(x, top_k=512), logits)


def test_without_the_extension_cuda_runs_pure_xla(monkeypatch):
    monkeypatch.setattr(_targets, "cuda_available", lambda: False)
    text = cuda_text(lambda x: route_and_plan(x, top_k=2), struct(5, 8), forced=False)
    assert "jaxmoe_" not in text
