"""A layout for each weight: the layer whose weights both lie as "kn", however they are stored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import Routing, expert_rows, moe_mlp, quantize
from jaxmoe._testing import assert_equal
from tests.sharding_programs import AUTO, EXPLICIT, check_spec, entered, make_mesh
from tests.test_two_arrays import PLAIN, apart, close, draw, expected, step

PAIRS = (("nk", "kn"), ("kn", "nk"))
pairs = pytest.mark.parametrize("layout", PAIRS, ids=" ".join)


@jax.jit
def in_formats(x, routing, e):
    first, second = e.layouts
    gate_up = quantize(e.gate_up, "fp8_block", weight_layout=first)
    down = quantize(e.down, "fp8_block", weight_layout=second)
    quantized = dataclasses.replace(e, gate_up=gate_up, down=down)
    ways = (quantized, dataclasses.replace(e, forward_format="fp8_channel"))
    return [moe_mlp(x, routing, e) for e in ways]


@pairs
def test_formats(layout):
    """Quantized weights are stored alike in every layout; plain ones become so."""
    x, routing, want = draw(PLAIN, jnp.bfloat16)
    _, _, experts = draw(PLAIN, jnp.bfloat16, layout)
    jax.tree.map(assert_equal, in_formats(x, routing, experts), in_formats(x, routing, want))


run = jax.jit(step(moe_mlp))


@pairs
def test_masters(layout):
    (x, routing, want), (_, _, experts) = draw(PLAIN), draw(PLAIN, layout=layout)
    x = x.astype(jnp.bfloat16)
    masters = [dataclasses.replace(e, dtype=jnp.bfloat16) for e in (experts, want)]
    (y, (dx, _, grads)), (want_y, (want_dx, _, want_grads)) = (run(x, routing, e) for e in masters)
    assert_equal(y, want_y)
    assert_equal(dx, want_dx)
    for name, at in zip(("gate_up", "down"), layout, strict=True):
        gradient = getattr(grads, name)
        assert gradient.dtype == jnp.float32
        close(gradient if at == "kn" else gradient.swapaxes(1, 2), getattr(want_grads, name))


@pytest.mark.parametrize(
    "layout, kind, i, h", ((PAIRS[0], AUTO, "a", "b"), (PAIRS[1], EXPLICIT, None, "b"))
)
def test_divided_over_a_mesh(layout, kind, i, h):
    """I and H, whichever axis of an array they are; gradients lie as their arrays."""
    x, routing, experts = draw(layout=layout)
    experts = apart(experts)
    first, second = ((None, None, i), (None, i, h))
    stored = lambda spec, at: P(*spec) if at == "kn" else P(spec[0], spec[2], spec[1])  # noqa: E731
    specs = dataclasses.replace(
        experts,
        gate=stored(first, layout[0]),
        up=stored(first, layout[0]),
        down=stored(second, layout[1]),
        gate_bias=P(None, i),
        up_bias=P(None, i),
        down_bias=P(None, h),
    )
    mesh = make_mesh(kind, "a", "b")
    with entered(mesh):
        place = lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s))  # noqa: E731
        put = jax.tree.map(place, experts, specs)
        y, (_, _, grads) = jax.jit(step(moe_mlp))(place(x, P()), routing, put)
    close(y, expected()[0])
    for name, at in (("gate", layout[0]), ("up", layout[0]), ("down", layout[1])):
        gradient = getattr(grads, name)
        check_spec(gradient, getattr(specs, name))
        want = getattr(expected()[1][2], name)
        close(gradient if at == "kn" else gradient.swapaxes(1, 2), want)


@pairs
def test_examples(layout):
    """Under vmap the experts of all examples are groups of one call."""
    (x, routing, want), (_, _, experts) = draw(PLAIN), draw(PLAIN, layout=layout)
    xs, ids, weights = (a.reshape(2, 4, -1) for a in (x, routing.expert_ids, routing.weights))
    two = lambda e: jax.tree.map(lambda a: jnp.stack([a, -a]), e)  # noqa: E731

    @jax.jit
    def run(e):
        one = lambda x, ids, weights, e: expert_rows(x, Routing(ids, weights), e).rows  # noqa: E731
        return jax.vmap(one)(xs, ids, weights, two(e))

    assert_equal(run(experts), run(want))
