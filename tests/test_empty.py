"""Arrays without elements, which are ordinary, and batches of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Experts, Plan, Routing
from jaxmoe._testing import assert_equal

T, H, WIDTH, E, K = 3, 4, 2, 4, 2


def zeros(*shape):
    return np.zeros(shape, np.float32)


def ids(*shape):
    return np.zeros(shape, np.int32)


def experts(hidden=H, inter=WIDTH):
    return Experts(gate_up=zeros(E, hidden, 2 * inter), down=zeros(E, inter, hidden))


def layer(x, expert_ids, weights):
    return jaxmoe.moe_mlp(x, Routing(expert_ids, weights), experts(x.shape[-1]))


def product(rows):
    return jaxmoe.grouped_gemm(rows, jnp.ones((E, H, 3)), jnp.ones(E, jnp.int32))


def finalized(rows, slot_to_row, weights, residual):
    plan = Plan(ids(E + 1), ids(slot_to_row.size), slot_to_row)
    return jaxmoe.finalize(rows, plan, weights, residual=residual)


OF_TOKENS = {
    "plan": (functools.partial(jaxmoe.plan, num_experts=E), [ids(T, K)]),
    "route": (functools.partial(jaxmoe.route, top_k=K), [zeros(T, E)]),
    "route_and_plan": (functools.partial(jaxmoe.route_and_plan, top_k=K), [zeros(T, E)]),
    "layer": (layer, [zeros(T, H), ids(T, K), zeros(T, K)]),
    "product": (product, [zeros(T, H)]),
    "finalize": (finalized, [zeros(6, H), ids(T, K), zeros(T, K), zeros(T, H)]),
}


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.parametrize("size, tokens", [(2, 0), (0, T), (0, 0)])
def test_batches_of_nothing(name, size, tokens):
    """Without tokens, without examples, or without either."""
    fn, of_one = OF_TOKENS[name]
    of_one = [a[: tokens * (a.shape[0] // T)] for a in of_one]  # of tokens, or of their rows
    batch = [jnp.zeros((size, *a.shape), a.dtype) for a in of_one]
    one = jax.eval_shape(fn, *of_one)
    got = jax.vmap(fn)(*batch)
    wanted = jax.tree.map(lambda a: ((size, *a.shape), a.dtype), one)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == wanted


@pytest.mark.parametrize("size", (0, 2))
def test_gradients_of_batches_of_nothing(size):
    x = zeros(size, 0 if size else T, H)
    given = ids(*x.shape[:2], K), zeros(*x.shape[:2], K)
    dx = jax.grad(lambda x: jax.vmap(layer)(x, *given).sum())(x)
    assert dx.shape == x.shape


def test_a_product_over_nothing_is_its_bias():
    sizes, bias = jnp.array([1, 1]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
    of = functools.partial(jaxmoe.grouped_gemm, group_sizes=sizes, bias=bias)
    assert of(zeros(3, 0), zeros(2, 0, 2)).tolist() == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]
    mapped = jax.vmap(of)(zeros(2, 3, 0), zeros(2, 2, 0, 2))
    assert_equal(mapped[1], of(zeros(3, 0), zeros(2, 0, 2)))
    loss = lambda rhs: jaxmoe.grouped_gemm(jnp.ones((3, 2)), rhs, sizes).sum()  # noqa: E731
    assert jax.grad(loss)(zeros(2, 2, 0)).shape == (2, 2, 0)


def test_tokens_without_elements_may_have_several_axes():
    x, given = zeros(2, T, 0), (ids(2, T, K), zeros(2, T, K))
    assert layer(x, *given).shape == x.shape
    assert layer(zeros(2, 0, H), ids(2, 0, K), zeros(2, 0, K)).shape == (2, 0, H)
    assert np.asarray(jaxmoe.route(zeros(0, 5, E), top_k=K).weights).shape == (0, 5, K)
