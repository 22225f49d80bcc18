"""jax.export saves programs whose arguments and results are jaxmoe's pytrees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Experts, loading, lora
from jaxmoe._testing import assert_equal

T, K, E, H, INTER = 6, 2, 4, 32, 16


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    gate_up = jax.random.normal(keys[0], (E, H, 2 * INTER))
    down = jax.random.normal(keys[1], (E, INTER, H))
    routing = jaxmoe.route(jax.random.normal(keys[2], (T, E)), top_k=K)
    return jax.random.normal(keys[3], (T, H)), routing, Experts(gate_up=gate_up, down=down)


def saved(fn, *args):
    """What a program gives that was saved and read again."""
    exported = jax.export.export(jax.jit(fn), disabled_checks=jaxmoe.export_checks())(*args)
    return jax.export.deserialize(exported.serialize()).call(*args)


def same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_equal(np.asarray(a), np.asarray(b))


def quantized(experts):
    weights = {
        n: jaxmoe.quantize(getattr(experts, n), "fp8_channel", weight_layout="kn")
        for n in ("gate_up", "down")
    }
    return dataclasses.replace(experts, **weights)


@pytest.mark.parametrize(
    "change",
    (
        lambda experts: experts,
        lambda experts: dataclasses.replace(experts, layout=("kn", "kn"), dtype="float32"),
        lambda experts: dataclasses.replace(experts, activation=jaxmoe.Swiglu(1.702, 1.0, 7.0)),
        lambda experts: dataclasses.replace(experts, activation=jaxmoe.SoftcapSwiglu(4, 25)),
        quantized,
    ),
    ids=("plain", "layouts and dtype", "Swiglu", "SoftcapSwiglu", "fp8_channel"),
)
def test_experts_and_routing(change):
    x, routing, experts = arrays()

    def layer(x, routing, experts):
        return jaxmoe.moe_mlp(x, routing, experts), routing, experts

    args = x, routing, change(experts)
    y, *trees = saved(layer, *args)
    same((y, *trees), jax.jit(layer)(*args))
    same(trees, list(args[1:]))


def test_plans_rows_adapters_and_loaded_layers():
    x, routing, experts = arrays()
    adapters = lora.init(jax.random.key(1), experts, rank=8)
    layer = loading.LoadedLayer(experts, jnp.ones((E, H)), options=(("top_k", 1),))

    def program(x, routing, experts, adapters, layer):
        plan = jaxmoe.plan(routing.expert_ids, E)
        return plan, jaxmoe.expert_rows(x, routing, experts), adapters, layer

    args = x, routing, experts, adapters, layer
    same(saved(program, *args), jax.jit(program)(*args))


def test_a_function_of_the_users_has_no_name_to_be_saved_by():
    x, routing, experts = arrays()
    experts = dataclasses.replace(experts, activation=lambda gate, up: gate * up)
    with pytest.raises(ValueError, match="must be one that has a name, or an instance of a class"):
        saved(jaxmoe.moe_mlp, x, routing, experts)
