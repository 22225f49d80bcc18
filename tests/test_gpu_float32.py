"""float32 layers and products on a GPU, in parts of bf16, against float32 on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Experts, Routing, SwigluStep, expert_batches, grouped_gemm, moe_mlp
from jaxmoe._testing import assert_equal, normal, poison

pytestmark = pytest.mark.gpu

F32 = jnp.float32
T, E, K, H, INTER = 70, 5, 2, 72, 40


def error(got, want):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def on_cpu(fn, *args):
    host = jax.device_put(args, jax.devices("cpu")[0])
    return jax.tree.map(np.asarray, jax.jit(fn)(*host))


def case(layout="kn", activation="swiglu", dtype=F32, hidden=H, inter=INTER):
    rng = np.random.default_rng(5)
    shapes = {"gate_up": (E, hidden, 2 * inter), "down": (E, inter, hidden)}
    weights = {n: normal(rng, s, F32) * s[1] ** -0.5 for n, s in shapes.items()}
    if layout == "nk":
        weights = {n: w.swapaxes(1, 2) for n, w in weights.items()}
    biases = {
        "gate_up_bias": normal(rng, (E, 2 * inter), F32),
        "down_bias": normal(rng, (E, hidden), F32),
    }
    experts = Experts(**weights, **biases, layout=layout, activation=activation)
    ids = np.stack([rng.permutation(E - 1)[:K] for _ in range(T)]).astype(np.int32)  # one unused
    routing = Routing(jnp.asarray(ids), jnp.asarray(rng.random((T, K)), F32), E)
    experts = jax.tree.map(lambda a: a.astype(dtype), experts)
    return normal(rng, (T, hidden), dtype), routing, experts


@pytest.mark.parametrize("layout, activation", (("kn", "swiglu"), ("nk", SwigluStep(0.5))))
def test_layer_and_gradients(layout, activation):
    x, routing, experts = case(layout, activation)

    def loss(x, weights, experts):
        y = moe_mlp(x, Routing(routing.expert_ids, weights, E), experts, residual=x)
        return jnp.sum(jnp.sin(y)), y

    grad = jax.grad(loss, (0, 1, 2), has_aux=True)
    poison((512, 1024), F32)
    ours = jax.jit(grad)(x, routing.weights, experts)
    jax.tree.map(assert_equal, jax.jit(grad)(x, routing.weights, experts), ours)
    wide = on_cpu(grad, x, routing.weights, experts)
    jax.tree.map(lambda a, b: np.testing.assert_array_less(error(a, b), 3e-5), ours, wide)
    assert {a.dtype for a in jax.tree.leaves(ours)} == {jnp.dtype(F32)}
    # bf16 is a hundred times as far away.
    y = jax.jit(moe_mlp)(*case(layout, activation, jnp.bfloat16))
    assert error(y.astype(F32) + x, wide[1]) > 1e-3


@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_rows_of_any_length(layout):
    """They are filled up with zeros to what the kernels move."""
    x, routing, experts = case(layout, hidden=71, inter=37)

    def loss(x, experts):
        y = moe_mlp(x, routing, experts, residual=x)
        return jnp.sum(jnp.sin(y)), y

    grad = jax.grad(loss, (0, 1), has_aux=True)
    poison((512, 1024), F32)
    ours, wide = jax.jit(grad)(x, experts), on_cpu(grad, x, experts)
    jax.tree.map(lambda a, b: np.testing.assert_array_less(error(a, b), 3e-5), ours, wide)


@pytest.mark.parametrize("precision, most", ((None, 2e-5), (jax.lax.Precision.HIGHEST, 1e-6)))
@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_products(layout, precision, most):
    x, _, experts = case()
    w = experts.gate_up if layout == "kn" else experts.gate_up.swapaxes(1, 2)
    sizes = jnp.array([30, 0, 17, 3, 9], jnp.int32)  # 11 rows of no group
    product = functools.partial(grouped_gemm, weight_layout=layout)
    out = jax.jit(functools.partial(product, precision=precision))(x, w, sizes)
    assert error(out, on_cpu(product, x, w, sizes)) < most
    assert not out[59:].any()


def test_batches_of_experts():
    _, _, experts = case()
    x = normal(np.random.default_rng(6), (E, 24, H), F32)
    counts = jnp.array([24, 0, 5, 1, 8], jnp.int32)
    ours = jax.jit(expert_batches)(x, counts, experts)
    assert error(ours, on_cpu(expert_batches, x, counts, experts)) < 2e-5


@pytest.mark.parametrize("lhs, rhs", (("int8", "int8"), ("uint8", "uint8"), ("int8", "uint8")))
def test_sums_of_integers_are_exact(lhs, rhs):
    """Of the largest factors: the partial sums reach 2^24, where float32 still has each integer."""
    rng = np.random.default_rng(6)
    rows, k, n = 300, 2500, 72
    edges = {"int8": (-128, 127), "uint8": (0, 255)}
    x, w = (rng.choice(edges[t], s).astype(t) for t, s in ((lhs, (rows, k)), (rhs, (E, k, n))))
    x[:20], w[0] = edges[lhs][lhs == "uint8"], edges[rhs][rhs == "uint8"]
    sizes = np.array([20, 1, 0, 200, 60], np.int32)
    got = jax.jit(functools.partial(grouped_gemm, preferred_element_type=jnp.int32))(x, w, sizes)
    group = np.repeat(np.arange(E), sizes)
    want = np.zeros((rows, n), np.int64)
    for e in range(E):
        own = np.flatnonzero(group == e)
        want[own] = x[own].astype(np.int64) @ w[e].astype(np.int64)
    np.testing.assert_array_equal(got, want)
