"""route with a scale that is an array: the weights of the number, gradients, what it may be."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import route, route_and_plan
from jaxmoe._testing import assert_equal, assert_vmap_is_loop
from tests import routing_oracle as oracle
from tests.lowered import calls, cuda_text
from tests.routing_oracle import VARIANTS, case
from tests.test_lowering import struct

SHARED = case("deepseek_v3", 3, num_shared_experts=2)


class Parameter:
    """What stands for an array, as parameters of frameworks do."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


@pytest.mark.parametrize("name", sorted(VARIANTS)[::3])
def test_the_weights_of_the_number(name):
    logits, options = oracle.draw(3, 7, 16, VARIANTS[name])
    logits[2, 2:] = math.nan
    number = 2.827
    options["scale"] = number
    options["num_valid_tokens"] = 6
    traced = jax.jit(lambda x, scale: route(x, **options | {"scale": scale}))
    got = traced(logits, jnp.float32(number))
    want = jax.jit(lambda x: route(x, **options))(logits)
    assert_equal(got.expert_ids, want.expert_ids)
    np.testing.assert_array_max_ulp(np.asarray(got.weights), np.asarray(want.weights), 1)
    exact = oracle.route(logits, **options)
    np.testing.assert_allclose(got.weights, exact.weights, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize(
    "scale",
    [
        lambda: jnp.bfloat16(1.5),
        lambda: np.array(1.5, np.float16),
        lambda: jnp.float32(1.5),
        lambda: Parameter(jnp.float32(1.5)),
    ],
    ids=["bf16", "numpy", "f32", "parameter"],
)
def test_what_it_may_be(scale):
    logits = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    for fn in (lambda **o: route(logits, **o), lambda **o: route_and_plan(logits, **o)[0]):
        got, want = fn(scale=scale(), **SHARED), fn(scale=1.5, **SHARED)
        np.testing.assert_array_max_ulp(np.asarray(got.weights), np.asarray(want.weights), 1)
        assert (got.weights[:, 3:] == 1).all() and got.weights.dtype == jnp.float32


def test_a_choice_of_no_expert_has_weight_0():
    logits = np.array([[1, math.nan, math.nan, math.nan]], np.float32)
    got = route(logits, top_k=2, method="sigmoid", scale=jnp.float32(math.inf))
    assert got.weights.tolist() == [[math.inf, 0.0]]


@pytest.mark.parametrize(
    "fn", [route, lambda *a, **o: route_and_plan(*a, **o)[0]], ids=["route", "both"]
)
def test_gradients(fn):
    """That of the scale is the sum of the weights without it; that of logits the number's."""
    logits = np.random.default_rng(1).standard_normal((5, 8), np.float32)
    logits[1, 1:], logits[4] = math.nan, math.inf
    factor = np.random.default_rng(2).standard_normal((5, 5), np.float32)
    options = SHARED | {"expert_scale": np.linspace(0.5, 2, 8, dtype=np.float32)}
    options["mask"] = np.array([1, 1, 0, 1, 0], bool)

    def loss(logits, scale):
        return (fn(logits, scale=scale, **options).weights * factor).sum()

    got = jax.jit(jax.grad(loss, (0, 1)))(logits, jnp.float32(2.5))
    by_number = jax.jit(jax.grad(functools.partial(loss, scale=2.5)))(logits)
    np.testing.assert_allclose(got[0], by_number, rtol=1e-6, atol=1e-9)
    one = np.asarray(fn(logits, scale=1.0, **options).weights)[:, :3]
    np.testing.assert_allclose(got[1], (one * factor[:, :3]).sum(), rtol=1e-5)
    forward = jax.jvp(functools.partial(loss, logits), (2.5,), (1.0,))[1]
    np.testing.assert_allclose(forward, got[1], rtol=1e-5)
    narrow = jax.grad(loss, 1)(logits, jnp.bfloat16(2.5))
    assert narrow.dtype == jnp.bfloat16 and abs(float(narrow) / float(got[1]) - 1) < 2**-8


def test_vmap():
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((3, 4, 8), np.float32))
    scales = jnp.array([0.5, 2.0, -1.0], jnp.float32)
    for fn in (route, route_and_plan):
        call = lambda x, s, fn=fn: fn(x, scale=s, **SHARED)  # noqa: E731
        assert_vmap_is_loop(call, (logits, scales), (0, 0))
        assert_vmap_is_loop(call, (logits[0], scales), (None, 0))


@pytest.mark.parametrize("fn", [route, route_and_plan])
def test_cuda_has_one_program_for_all(fn):
    """The kernel is given 1, and a number is part of the call."""
    traced = cuda_text(
        lambda x, s: fn(x, top_k=2, scale=s), struct(5, 8), struct(dtype=jnp.float32)
    )
    number = cuda_text(lambda x: fn(x, top_k=2, scale=2.5), struct(5, 8))
    scales = []
    for text in (traced, number):
        ((_, attrs, *_),) = calls(text)
        scales.append(attrs.get("rule", attrs)["scale"])
    assert scales == ["1.000000e+00:f32", "2.500000e+00:f32"]
