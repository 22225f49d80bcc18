"""Adapters on experts over Explicit mesh axes: each device runs the layer of its own tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe import Experts, Routing, lora, quantize
from tests.sharding_programs import EXPLICIT, close, entered, make_mesh, place

E, H, WIDTH, RANK, TOKENS = 4, 64, 64, 8, (4, 8)


@functools.cache
def example(kind):
    """What is of tokens, experts and adapters."""
    rng = np.random.default_rng(7)

    def normal(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    w = {"gate_up": normal(E, 2 * WIDTH, H), "down": normal(E, H, WIDTH)}
    if kind == "mxfp4":
        w = {name: jax.jit(quantized)(a) for name, a in w.items()}
    of_adapter = () if kind != "several" else (3,)
    sizes = (H, RANK), (RANK, 2 * WIDTH), (WIDTH, RANK), (RANK, H)
    adapters = lora.Adapters(*(normal(*of_adapter, E, *size) for size in sizes), scale=0.5)
    tokens = {
        "x": 3 * normal(*TOKENS, H),
        "expert_ids": rng.integers(-1, E + 1, (*TOKENS, 2)).astype(np.int32),
        "weights": rng.random((*TOKENS, 2)).astype(np.float32),
        "residual": normal(*TOKENS, H),
    }
    if of_adapter:
        tokens["adapter_ids"] = rng.integers(-1, 4, TOKENS).astype(np.int32)
    return tokens, Experts(**w, layout="nk"), adapters


def quantized(w):
    return quantize(w, "mxfp4", weight_layout="nk")


@jax.jit
def value_and_gradients(moving, ids, experts):
    def loss(moving):
        x, weights, residual, adapters = moving
        routing = Routing(ids["expert_ids"], weights)
        options = {"residual": residual, "adapter_ids": ids.get("adapter_ids")}
        y = lora.moe_mlp(x, routing, experts, adapters, **options)
        return jnp.sum(jnp.sin(y)), y

    return jax.value_and_grad(loss, has_aux=True)(moving)


def results(kind, put=lambda a, tokens: a):
    tokens, experts, adapters = example(kind)
    tokens = {name: put(a, True) for name, a in tokens.items()}
    experts, adapters = jax.tree.map(lambda a: put(a, False), (experts, adapters))
    moving = tuple(tokens.pop(name) for name in ("x", "weights", "residual")) + (adapters,)
    return value_and_gradients(moving, tokens, experts)


@pytest.mark.parametrize("spec", (P("a"), P("a", "b"), P(None, "b")), ids=str)
@pytest.mark.parametrize("kind", ("one", "several", "mxfp4"))
def test_tokens_stay_where_they_are(kind, spec):
    """The values and gradients of one device; y and those of tokens are split as x is."""
    mesh = make_mesh(EXPLICIT, "a", "b")

    def put(a, tokens):
        of_experts = P("a") if a.shape[0] == E and a.ndim == 3 else P()
        return place(a, mesh, spec if tokens else of_experts)

    with entered(mesh):
        (value, y), gradients = results(kind, put)
    (want, y_there), gradients_there = results(kind)
    close((value / y.size, y, gradients), (want / y.size, y_there, gradients_there))
    for a in (y, *gradients[:3]):
        assert a.sharding.spec[:2] == (*spec, None)[:2]
    assert all(np.asarray(g).any() for g in jax.tree.leaves(gradients))


def test_only_what_is_split_is_gathered():
    """Nothing of tokens, and one sum for the gradients of adapters."""
    mesh = make_mesh(EXPLICIT, "a", "b")
    tokens, experts, adapters = example("one")

    def forward(x, ids, weights, experts, adapters):
        return lora.moe_mlp(x, Routing(ids, weights), experts, adapters)

    with entered(mesh):
        of_tokens = [place(tokens[n], mesh, P("a", "b")) for n in ("x", "expert_ids", "weights")]
        whole = jax.tree.map(lambda a: place(a, mesh, P()), (experts, adapters))
        text = jax.jit(forward).lower(*of_tokens, *whole).compile().as_text()
        assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all"))
        split = dataclasses.replace(whole[0], down=place(experts.down, mesh, P("a")))
        text = jax.jit(forward).lower(*of_tokens, split, whole[1]).compile().as_text()
        assert text.count(" all-gather(") == 1


def test_routing_that_is_split_alone():
    mesh = make_mesh(EXPLICIT, "a", "b")
    tokens, experts, adapters = example("one")
    want = results("one")[0][1] - tokens["residual"]
    with entered(mesh):
        ids, weights = (place(tokens[n], mesh, P("a")) for n in ("expert_ids", "weights"))
        y = jax.jit(lora.moe_mlp)(tokens["x"], Routing(ids, weights), experts, adapters)
    close(y, want)
