"""route: derivatives of every rule against the oracle's slopes and against numerical ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxmoe import route, route_and_plan
from tests import routing_oracle as oracle
from tests.routing_oracle import VARIANTS, case

STATIC = ("top_k", "method", "num_groups", "top_groups", "scale", "norm_topk_prob", "epsilon")
STATIC += ("masked_group_value", "num_shared_experts")


def _loss(arrays, factor, **options):
    return (route(**arrays, **options).weights * factor).sum()


@functools.partial(jax.jit, static_argnames=STATIC)
def _derivatives(arrays, tangents, factor, **options):
    """Returns the gradient, and the derivative along the tangents in forward mode."""
    loss = functools.partial(_loss, factor=factor, **options)
    return jax.grad(loss)(arrays), jax.jvp(loss, (arrays,), (tangents,))[1]


def _setting(logits, options):
    """Splits arrays from options, and draws a cotangent for the weights."""
    options = dict(options)
    arrays = {n: options.pop(n) for n in ("bias", "expert_scale") if n in options}
    width = options["top_k"] + options.get("num_shared_experts", 0)
    factor = np.random.default_rng(8).standard_normal((len(logits), width), np.float32)
    return {"logits": logits, **arrays}, options, factor


def _slopes(arrays, options, factor, name):
    """The oracle's, in float64, ids fixed, with respect to one array; [T, E]."""
    fixed = oracle.route(**arrays, **options).expert_ids[:, : options["top_k"]]
    step = 1e-5
    columns = []
    for e in range(arrays["logits"].shape[1]):
        ends = []
        for sign in (1, -1):
            moved = np.array(arrays[name], np.float64)
            moved[..., e] += sign * step
            answer = oracle.route(**arrays | {name: moved}, expert_ids=fixed, **options)
            ends.append((answer.weights * factor).sum(1))
        columns.append((ends[0] - ends[1]) / (2 * step))
    return np.stack(columns, 1)


def _check_gradient(logits, options, arrays_to_check=("logits", "expert_scale")):
    arrays, options, factor = _setting(logits, options)
    tangents = jax.tree.map(np.ones_like, arrays)
    grads, along = _derivatives(arrays, tangents, factor, **options)
    for name in arrays_to_check:
        if name in arrays:
            want = _slopes(arrays, options, factor, name)
            want = want if name == "logits" else want.sum(0)
            np.testing.assert_allclose(grads[name], want, rtol=2e-5, atol=2e-6)
    if "bias" in arrays:
        np.testing.assert_array_equal(grads["bias"], np.zeros_like(arrays["bias"]))
    want = sum(g.sum() for g in grads.values())
    np.testing.assert_allclose(along, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradient_is_the_slope_of_the_oracle(name):
    _check_gradient(*oracle.draw(7, 6, 16, VARIANTS[name]))


@pytest.mark.parametrize("name", ["deepseek_v3_groups", "minimax2", "sqrtsoftplus"])
@pytest.mark.parametrize("shift", [-40, -46, -60, -100])
def test_gradient_where_scores_are_as_small_as_epsilon(name, shift):
    """A sigmoid of -46 is 1e-20: the square of the sum it is divided by underflows."""
    options = VARIANTS[name]
    logits, options = oracle.draw(7, 6, 16, options)
    if name == "sqrtsoftplus":
        shift *= 2
    _check_gradient(logits + np.float32(shift), options, ("logits",))


@pytest.mark.parametrize("method", ["softmax", "deepseek_v3", "llama4"])
def test_numerical(method):
    # Keys further apart than the steps move them.
    logits, options = oracle.draw(7, 2, 16, VARIANTS[method], clear=2e-3)
    arrays, options, factor = _setting(logits, options)
    bias = {"bias": arrays.pop("bias")} if "bias" in arrays else {}
    loss = jax.jit(lambda a: _loss(a | bias, factor, **options))
    check_grads(loss, (arrays,), order=1, atol=2e-2, rtol=2e-2, eps=2e-3)


@pytest.mark.parametrize("name", ["sqrtsoftplus"])
def test_second_derivatives(name):
    logits, options = oracle.draw(9, 1, 8, VARIANTS[name] | {"top_k": 3}, clear=0.02)
    loss = jax.jit(lambda x: (route(x, **options).weights ** 2).sum())
    check_grads(loss, (logits,), order=2, modes=("rev",), atol=3e-2, rtol=3e-2, eps=1e-2)


@pytest.mark.parametrize("name", VARIANTS)
def test_special_values_have_finite_gradients(name):
    row = np.linspace(-2, 2, 16, dtype=np.float32)
    logits = np.stack([row, row, row, -200 + row, 80 + row, np.full(16, np.nan, np.float32)])
    logits[0, ::3], logits[1, 5:], logits[2, :14] = np.nan, np.nan, -1e30
    _, options = oracle.draw(7, 6, 16, VARIANTS[name])
    arrays, options, factor = _setting(logits, options)
    grads, along = _derivatives(arrays, jax.tree.map(np.ones_like, arrays), factor, **options)
    assert all(np.isfinite(g).all() for g in grads.values()) and np.isfinite(along)
    assert not grads["logits"][np.isnan(logits)].any()


def test_padding_and_invalid_experts_have_no_gradient():
    logits, options = oracle.draw(3, 6, 16, case("deepseek_v3", 4, num_shared_experts=1))
    logits[4:] = np.nan
    ids = np.random.default_rng(4).integers(-2, 18, (6, 4), np.int32)

    @jax.jit
    def loss(x, ids, count):
        return (route(x, expert_ids=ids, num_valid_tokens=count, **options).weights ** 2).sum()

    grad = np.asarray(jax.grad(loss)(logits, ids, jnp.int32(3)))
    assert np.isfinite(grad).all() and not grad[3:].any()
    touched = {(t, e) for t in range(3) for e in ids[t] if 0 <= e < 16}
    assert {tuple(map(int, at)) for at in np.argwhere(grad)} == touched


@pytest.mark.parametrize("op", [route, route_and_plan], ids=lambda op: op.__name__)
@pytest.mark.parametrize("name", ["softmax", "softmax_sum", "renormalize", "deepseek_v2"])
def test_infinities_in_padding_have_no_gradient(name, op):
    """Buffers of serving programs hold anything there: 0 times an infinite logit's slope is NaN."""
    logits, options = oracle.draw(5, 6, 16, VARIANTS[name])
    logits[4], logits[5, :3] = np.inf, np.inf
    arrays, options, factor = _setting(logits, options)

    @jax.jit
    def grad(x):
        def loss(x):
            routing = op(**arrays | {"logits": x}, num_valid_tokens=4, **options)
            weights = (routing if op is route else routing[0]).weights
            return (weights * factor).sum()

        return jax.grad(loss)(x)

    got = grad(logits)
    assert np.isfinite(got).all() and not got[4:].any()
    np.testing.assert_array_equal(got[:4], grad(np.where(np.isinf(logits), 0, logits))[:4])
