"""grouped_gemm under every JAX transformation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import grouped_gemm, reference
from jaxmoe._testing import normal
from tests.test_transforms import V, close, equations, ops

E, K, N, R = 3, 8, 16, 20


def gemm_arguments(seed=0):
    rng = np.random.default_rng(seed)
    sizes = jnp.array([7, 0, 9], jnp.int32)
    return normal(rng, (R, K)), normal(rng, (E, K, N), scale=0.4), sizes, normal(rng, (E, N))


def gemm(lhs, rhs, sizes, bias):
    return grouped_gemm(lhs, rhs, sizes, bias=bias)


def gemm_reference(lhs, rhs, sizes, bias):
    return reference.grouped_gemm(lhs, rhs, sizes, bias=bias)


def test_jvp_linearize_and_transpose():
    args = gemm_arguments()
    lhs, rhs, sizes, bias = args
    tangents = (normal(np.random.default_rng(1), a.shape) for a in (lhs, rhs, bias))
    tangents = tuple(tangents)

    def along(fn):
        return lambda lhs, rhs, bias: jnp.sin(fn(lhs, rhs, sizes, bias))

    ct = normal(np.random.default_rng(2), (R, N))

    @jax.jit
    def ours(*args):
        fn = along(gemm)
        value, linear = jax.linearize(fn, *args)
        transposed = jax.linear_transpose(linear, *args)(ct)
        return jax.jvp(fn, args, tangents), (value, linear(*tangents)), transposed

    @jax.jit
    def references(*args):
        fn = along(gemm_reference)
        return jax.jvp(fn, args, tangents), jax.vjp(fn, *args)[1](ct)

    along_tangents, linearized, transposed = ours(lhs, rhs, bias)
    want, want_transposed = references(lhs, rhs, bias)
    close(along_tangents, want)
    close(linearized, want)
    close(transposed, want_transposed)


@pytest.mark.parametrize("outer", ("grad", "jvp"))
def test_second_order(outer):
    """Reverse over reverse and forward over reverse: gmm and tgmm are each other's transpose."""
    lhs, rhs, sizes, bias = gemm_arguments()

    def second(fn):
        def loss(args):
            return jnp.sum(jnp.sin(fn(args[0], args[1], sizes, args[2])))

        args = (lhs, rhs, bias)
        if outer == "jvp":
            return jax.jit(lambda a: jax.jvp(jax.grad(loss), (a,), (a,))[1])(args)
        total = lambda a: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss)(a))  # noqa: E731
        return jax.jit(jax.grad(total))(args)

    close(second(gemm), second(gemm_reference))


def stacked(arguments, mask):
    """V examples of the arguments in `mask`, the others shared, and their in_axes."""
    examples = [arguments(seed) for seed in range(V)]
    args = [
        jnp.stack([e[i] for e in examples]) if m else examples[0][i] for i, m in enumerate(mask)
    ]
    return args, [0 if m else None for m in mask]


def loop(fn, args, axes):
    """What vmap means."""
    outs = []
    for v in range(V):
        outs.append(fn(*(a if d is None else a[v] for a, d in zip(args, axes, strict=True))))
    return jax.tree.map(lambda *a: jnp.stack(a), *outs)


# Any subset of lhs, rhs, group sizes and bias may be batched: each alone, all but each, all.
@pytest.mark.parametrize(
    "mask", [m for m in itertools.product((0, 1), repeat=4) if sum(m) in (1, 3, 4)]
)
def test_vmap_of_any_operand(mask):
    args, axes = stacked(gemm_arguments, mask)
    close(jax.jit(jax.vmap(gemm, axes))(*args), loop(gemm_reference, args, axes))


@pytest.mark.parametrize("mask", ((1, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)))
def test_vmap_of_gradient_is_one_for_each_example(mask):
    args, axes = stacked(gemm_arguments, mask)

    def gradient(fn):
        loss = lambda lhs, rhs, sizes, bias: jnp.sum(jnp.sin(fn(lhs, rhs, sizes, bias)))  # noqa: E731
        return jax.grad(loss, (0, 1, 3))

    got = jax.jit(jax.vmap(gradient(gemm), axes))(*args)
    close(got, loop(gradient(gemm_reference), args, axes))


def test_vmap_of_vmap_and_of_another_axis():
    lhs, rhs, sizes, _ = gemm_arguments()
    inner = jax.vmap(grouped_gemm, (1, None, None))
    outer = jax.jit(jax.vmap(inner, (None, 0, 0)))
    lhs2, rhs2 = jnp.stack([lhs, 2 * lhs], axis=1), jnp.stack([rhs, -rhs, rhs**2])
    sizes3 = jnp.array([[7, 0, 9], [0, 0, 0], [1, 2, 3]], jnp.int32)
    got = outer(lhs2, rhs2, sizes3)
    want = [
        [reference.grouped_gemm(lhs2[:, j], rhs2[i], sizes3[i]) for j in range(2)] for i in range(3)
    ]
    close(got, jnp.array(want))


def test_vmap_is_one_call_and_copies_no_weights():
    (lhs, rhs, sizes, bias), axes = stacked(gemm_arguments, (1, 0, 1, 0))
    program = jax.make_jaxpr(jax.vmap(gemm, axes))(lhs, rhs, sizes, bias)
    calls = [e for e in equations(program.jaxpr) if e.primitive.name == "jaxmoe_gmm"]
    assert [[v.aval.shape for v in c.invars[:3]] for c in calls] == [
        [(V, R, K), (1, E, K, N), (V, E)]
    ]


def test_gradient_of_vmap_is_one_sum_over_examples():
    """dW never exists for each example: one tgmm whose result is a single dW."""
    (lhs, rhs, sizes, bias), axes = stacked(gemm_arguments, (1, 0, 1, 0))

    def gradient(fn):
        return jax.grad(
            lambda lhs, rhs: jnp.sum(jax.vmap(fn, axes)(lhs, rhs, sizes, bias) ** 2), (0, 1)
        )

    close(jax.jit(gradient(gemm))(lhs, rhs), jax.jit(gradient(gemm_reference))(lhs, rhs))
    program = jax.make_jaxpr(gradient(gemm))(lhs, rhs)
    calls = [e for e in equations(program.jaxpr) if e.primitive.name == "jaxmoe_tgmm"]
    assert [c.outvars[0].aval.shape for c in calls] == [(1, E, K, N)]
    assert ops(gradient(gemm), lhs, rhs) == {"jaxmoe_gmm": 2, "jaxmoe_tgmm": 1}


def test_vmap_without_rows():
    sizes = jnp.zeros((V, E), jnp.int32)
    got = jax.vmap(grouped_gemm, (0, None, 0))(jnp.zeros((V, 0, K)), jnp.ones((E, K, N)), sizes)
    assert got.shape == (V, 0, N)


def test_pmap():
    (lhs, rhs, sizes, bias), axes = stacked(gemm_arguments, (1, 0, 1, 0))
    got = jax.pmap(gemm, in_axes=tuple(axes))(lhs, rhs, sizes, bias)
    close(got, loop(gemm_reference, (lhs, rhs, sizes, bias), axes))
