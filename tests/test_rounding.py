"""Rounded once: sums that bfloat16 holds at the end and not on the way.

bfloat16 has the integers up to 256 and every second one after that: 257 - 256 is 1 if it is rounded
once, and 0 if 257 is rounded first.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Experts, Routing, grouped_gemm, moe_mlp
from jaxmoe._testing import assert_equal

BF16 = np.dtype(jnp.bfloat16)
SUM_257 = np.array([[128, 64, 64, 1, 0, 0, 0, 0]], BF16)
EYE, ONES = np.eye(8, dtype=BF16)[None], np.ones((1, 8, 8), BF16)
BIAS = np.full((1, 8), -256, BF16)
FIRST = Routing(np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
SILU_1 = 1 / (1 + np.exp(-1.0))

# Experts, what every element of their result is, rounded to bfloat16.
LAYERS = {
    "bias of the first product": (
        Experts(up=ONES, down=EYE, up_bias=BIAS, activation="identity"),
        1.0,
    ),
    "biases of gate and up": (
        Experts(gate=ONES, up=ONES, down=EYE, gate_bias=BIAS, up_bias=BIAS),
        SILU_1,
    ),
    "bias of gate and up": (
        Experts(
            gate_up=np.concatenate([ONES, ONES], 2),
            down=EYE,
            gate_up_bias=np.concatenate([BIAS, BIAS], 1),
        ),
        SILU_1,
    ),
    "bias of the second product": (
        Experts(up=EYE, down=ONES, down_bias=BIAS, activation="identity"),
        1.0,
    ),
    # 257 ** 2 is nearer to 66048, 256 ** 2 is 65536. silu(257) is 257.
    "activation": (Experts(up=ONES, down=EYE, activation="relu2"), 66048.0),
    "activation of a gate": (Experts(gate_up=np.concatenate([ONES, ONES], 2), down=EYE), 66048.0),
    "activation of two arrays": (Experts(gate=ONES, up=ONES, down=EYE), 66048.0),
}


def differentiated(x, experts, **options):
    """The result as a training step computes it."""
    return jax.vjp(lambda e: moe_mlp(x, FIRST, e, **options), experts)[0]


def recomputed(x, experts):
    return differentiated(x, experts, recompute="z")


def with_masters(x, experts):
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), experts)
    return differentiated(x, dataclasses.replace(wide, dtype=BF16))


def batched(x, experts):
    return jax.vmap(lambda e: differentiated(x, e))(jax.tree.map(lambda a: a[None], experts))[0]


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer(name):
    """With the same bits where it is differentiated: z is rounded for the backward pass alone."""
    experts, value = LAYERS[name]
    want = jnp.full((1, 8), value, BF16)
    ways = (differentiated, recomputed, with_masters, batched)

    def all_ways(x, experts):
        return [moe_mlp(x, FIRST, experts), *(way(x, experts) for way in ways)]

    for got in jax.jit(all_ways)(SUM_257, experts):
        assert_equal(got, want)


def test_products_and_their_bias():
    sizes = jnp.array([1], jnp.int32)
    assert_equal(grouped_gemm(SUM_257, ONES, sizes, bias=BIAS), jnp.ones((1, 8), BF16))


def test_choices_and_the_residual_are_one_sum():
    """Experts that give 256 and 1, and a residual of -256."""
    up, down = (jnp.concatenate([EYE * 256, EYE]), jnp.concatenate([EYE, EYE]))
    routing = Routing(jnp.array([[0, 1]] * 3, jnp.int32), jnp.ones((3, 2)))
    experts = Experts(up=up, down=down, activation="identity")
    one = jnp.ones((3, 8), BF16)  # of one token jax 0.10 makes a dot that its CPU has not in bf16
    assert_equal(jax.jit(moe_mlp)(one, routing, experts, residual=one * BIAS), one)


def test_gradients():
    """Weight gradients add up in float32; routing weights are not rounded where a bias has them."""
    x = jnp.ones((3, 8), BF16)
    experts = Experts(up=EYE, down=EYE, down_bias=BIAS, activation="identity")

    def of_weights(weights):
        routing = Routing(jnp.zeros((3, 1), jnp.int32), weights)
        return lambda e: moe_mlp(x, routing, e)

    @jax.jit
    def gradients(weights):
        _, pull = jax.vjp(of_weights(weights), experts)
        return pull(jnp.ones((3, 8), BF16))[0]

    grads = gradients(jnp.array([[256.0], [1.0], [-256.0]]))
    assert_equal(grads.down, ONES)
    assert_equal(grads.down_bias, jnp.ones((1, 8), BF16))
    # 1 + 2^-8 would be 1 in bfloat16.
    grads = gradients(jnp.array([[1 + 2**-8], [-1.0], [0.0]]))
    assert_equal(grads.down_bias, jnp.full((1, 8), 2**-8, BF16))


def test_forward_mode():
    """1.5 * (1 + 2^-8) is nearer to 1.5 + 2^-7 than to 1.5, which it is of a rounded weight."""
    experts = Experts(up=EYE, down=EYE, down_bias=BIAS, activation="identity")
    routing = Routing(FIRST.expert_ids, jnp.full((1, 1), 1 + 2**-8))

    def of_bias(bias):
        return moe_mlp(SUM_257, routing, dataclasses.replace(experts, down_bias=bias))

    _, moved = jax.jit(lambda: jax.jvp(of_bias, (BIAS,), (jnp.full((1, 8), 1.5, BF16),)))()
    assert_equal(moved, jnp.full((1, 8), 1.5 + 2**-7, BF16))
