"""float32 layers and products on a GPU, in parts of bf16 and in TF32, against the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import (
    Experts,
    GemmConfig,
    Routing,
    SwigluStep,
    expert_batches,
    grouped_gemm,
    moe_mlp,
)
from jaxmoe._gemm.tiles import ONLY_PROMOTED, TILES
from jaxmoe._testing import assert_equal, normal, poison

pytestmark = pytest.mark.gpu

F32 = jnp.float32
TF32 = "tensorfloat32"
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


def of_groups(x, w, sizes, bias):
    """The product in float64, 0 in rows of no group, and the sums of magnitudes of its terms."""
    x, w, bias = (np.asarray(a, np.float64) for a in (x, w, bias))
    out = np.zeros((2, len(x), w.shape[1]))
    ends = np.cumsum(sizes)
    for e, (first, last) in enumerate(zip(ends - sizes, ends, strict=True)):
        out[0, first:last] = x[first:last] @ w[e].T + bias[e]
        out[1, first:last] = abs(x[first:last]) @ abs(w[e]).T + abs(bias[e])
    return out


def tf32(a):
    return jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=10)


@pytest.mark.parametrize("tile", (None, *sorted(set(TILES) - ONLY_PROMOTED)), ids=str)
@pytest.mark.parametrize("k, n", ((72, 40), (67, 71), (100, 264), (1000, 136)))
def test_tf32(k, n, tile):
    """Groups without rows, of one row, of a few tiles; rows of no group."""
    rng = np.random.default_rng(7)
    sizes = np.array([30, 0, 1, 17, 350, 8], np.int32)
    rows, count = sizes.sum() + 11, len(sizes)
    x, w, bias = (normal(rng, s, F32) for s in ((rows, k), (count, n, k), (count, n)))
    config = None if tile is None else GemmConfig(*tile)
    product = functools.partial(grouped_gemm, weight_layout="nk", precision=TF32, config=config)
    product = jax.jit(product)
    poison((512, 1024), F32)
    got = product(x, w, sizes, bias=bias)
    assert_equal(product(x, w, sizes, bias=bias), got)
    assert got.dtype == F32 and not got[sizes.sum() :].any()
    want, size = of_groups(x, w, sizes, bias)
    assert (abs(np.asarray(got, np.float64) - want) <= (2.0**-10 + 2.0**-16) * size).all()
    # The factors were rounded to nearest: cut off they would be twice as far away. Not in parts.
    near, _ = of_groups(tf32(x), tf32(w), sizes, bias)
    assert error(got, near) < 3e-5 < 1e-4 < error(got, want)


@pytest.mark.parametrize("rows", (1, 40, 700, 5000))
def test_tf32_of_many_groups(rows):
    """By the tiles that the shapes choose."""
    rng = np.random.default_rng(8)
    count, k, n = 16, 1024, 384
    sizes = rng.multinomial(rows, rng.dirichlet(np.ones(count))).astype(np.int32)
    x, w, bias = (normal(rng, s, F32) for s in ((rows, k), (count, n, k), (count, n)))
    product = jax.jit(functools.partial(grouped_gemm, weight_layout="nk", precision=TF32))
    got = product(x, w, sizes, bias=bias)
    assert_equal(product(x, w, sizes, bias=bias), got)
    near, _ = of_groups(tf32(x), tf32(w), sizes, bias)
    assert error(got, near) < 3e-5


def test_tf32_of_what_is_not_finite():
    """It stays in its row and in its column."""
    rng = np.random.default_rng(9)
    x, w = normal(rng, (40, 64), F32), normal(rng, (2, 24, 64), F32)
    sizes = jnp.array([25, 15], jnp.int32)
    product = jax.jit(functools.partial(grouped_gemm, weight_layout="nk", precision=TF32))
    plain = product(x, w, sizes)
    for value in (np.inf, -np.inf, np.nan):
        got = np.array(product(x.at[3, 5].set(value), w.at[1, 7, 9].set(value), sizes))
        assert not np.isfinite(got[3]).any() and not np.isfinite(got[25:, 7]).any()
        assert np.isnan(got[3]).all() == np.isnan(value)
        got[3], got[25:, 7] = plain[3], plain[25:, 7]
        assert_equal(got, plain)


def test_tf32_of_batches():
    rng = np.random.default_rng(10)
    sizes = jnp.array([[30, 0, 17], [3, 9, 40]], jnp.int32)
    x, w = normal(rng, (2, 60, 72), F32), normal(rng, (2, 3, 40, 72), F32)
    product = functools.partial(grouped_gemm, weight_layout="nk", precision=TF32)
    got = jax.jit(jax.vmap(product))(x, w, sizes)
    for i in range(2):
        near, _ = of_groups(tf32(x[i]), tf32(w[i]), sizes[i], np.zeros((3, 40)))
        assert error(got[i], near) < 3e-5


@pytest.mark.parametrize("layout, activation", (("kn", "swiglu"), ("nk", SwigluStep(0.5))))
def test_a_layer_in_tf32(layout, activation):
    x, routing, experts = case(layout, activation)

    def loss(x, experts):
        with jax.default_matmul_precision(TF32):
            y = moe_mlp(x, routing, experts, residual=x)
        return jnp.sum(jnp.sin(y)), y

    grad = jax.grad(loss, (0, 1), has_aux=True)
    poison((512, 1024), F32)
    ours = jax.jit(grad)(x, experts)
    jax.tree.map(assert_equal, jax.jit(grad)(x, experts), ours)
    wide = on_cpu(grad, x, experts)
    jax.tree.map(lambda a, b: np.testing.assert_array_less(error(a, b), 2e-3), ours, wide)
    # Forward where weights are [E, N, K], backward where they are not: see numerics.md.
    in_tf32 = {"nk": ours[1], "kn": ours[0][0]}[layout]
    assert error(in_tf32, {"nk": wide[1], "kn": wide[0][0]}[layout]) > 3e-5
    assert {a.dtype for a in jax.tree.leaves(ours)} == {jnp.dtype(F32)}


def test_batches_of_experts_in_tf32():
    _, _, experts = case("nk")
    x = normal(np.random.default_rng(6), (E, 24, H), F32)
    counts = jnp.array([24, 0, 5, 1, 8], jnp.int32)
    with jax.default_matmul_precision(TF32):
        ours = jax.jit(expert_batches)(x, counts, experts)
    wide = on_cpu(expert_batches, x, counts, experts)
    assert 5e-5 < error(ours, wide) < 2e-3
    assert not ours[1].any() and not ours[3, 1:].any()
