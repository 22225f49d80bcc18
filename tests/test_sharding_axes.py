"""Layers whose H is split over several axes, of which only some split tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Experts, Routing, fsdp
from jaxmoe._ep import cost
from jaxmoe._testing import normal

E, H, I, T = 4, 32, 16, 8  # noqa: E741
# Axes of tokens, and of H of the first weight.
AXES = (
    ("a", ("a", "b")),
    ("b", ("b", "a")),
    ("a", ("b", "a")),
    (("a", "c"), ("a", "b")),
    (("a", "c"), ("a", "b", "c")),
    ("c", ("a", "b")),
)


def apart(experts):
    gate, up = jnp.split(experts.gate_up, 2, axis=-1)
    return Experts(gate=gate, up=up, down=experts.down)


KINDS = {
    "one array": lambda e: e,
    "apart": apart,
    "fp8_channel": lambda e: e.quantized("fp8_channel"),
}


def split(mesh, experts, axes):
    """The experts with H of the first weight over these axes."""

    def over(w):
        if isinstance(w, jaxmoe.QuantizedArray):  # whose scales have no H
            return dataclasses.replace(w, values=over(w.values))
        return jax.device_put(w, NamedSharding(mesh, P(None, axes)))

    first = ("gate_up",) if experts.gate is None else ("gate", "up")
    return dataclasses.replace(experts, **{n: over(getattr(experts, n)) for n in first})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "hidden"), AXES)
def test_the_gradient_of_x_has_all_columns(tokens, hidden, kind):
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x, logits, weights, down = (
        normal(rng, shape, jnp.float32) for shape in ((T, H), (T, E), (E, H, 2 * I), (E, I, H))
    )
    experts = KINDS[kind](Experts(gate_up=weights, down=down))

    def loss(x, experts):
        y = jaxmoe.moe_mlp(x, jaxmoe.route(logits, top_k=2), experts, gather_weights=())
        return jnp.sum(y * jnp.cos(jnp.arange(H, dtype=jnp.float32))[None])

    want = jax.grad(loss)(x, experts)
    over = jax.device_put(x, NamedSharding(mesh, P(tokens)))
    got = jax.jit(jax.grad(loss))(over, split(mesh, experts, hidden))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def test_what_is_compared_has_one_axis_of_tokens_of_floats():
    experts = Experts(gate_up=jnp.ones((E, H, 2 * I)), down=jnp.ones((E, I, H)))
    ids, weights = jnp.zeros((2, 4, 1), jnp.int32), jnp.ones((2, 4, 1))
    with pytest.raises(ValueError, match=r"x must have 2 axes \[T,H\], one of tokens, not 3"):
        fsdp.choose_gather(jnp.ones((2, 4, H)), Routing(ids, weights), experts)
    with pytest.raises(TypeError, match="x.dtype=i32 must be bf16, f16 or f32"):
        fsdp.choose_gather(jnp.ones((2, H), jnp.int32), Routing(ids[0], weights[0]), experts)


def test_a_very_large_capacity_is_room_for_all():
    assert cost.capacity_of("op", 1e308, 16, 4, 2) == 16
    assert cost.capacity_of("op", 1e308, 0, 4, 2) == 0
