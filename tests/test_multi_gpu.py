"""The layer on two GPUs or more: experts split over devices, tokens split over devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxmoe import Experts, Routing, lora, reference
from jaxmoe._testing import Layer, assert_close, assert_equal, layer_inputs
from tests.layers import moe_mlp

pytestmark = pytest.mark.multi_gpu

LAYER = Layer("", "", 128, 64, 8, 2)
SPLIT = PartitionSpec("d")
PER_TOKEN = ("x", "expert_ids", "weights")


def run(inputs, **kwargs):
    routing = Routing(inputs["expert_ids"], inputs["weights"])
    return moe_mlp(inputs["x"], routing, inputs["w_gate_up"], inputs["w_down"], **kwargs)


def inputs_and_mesh():
    inputs = layer_inputs(LAYER, 48, "with_invalid", np.random.default_rng(1), jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return inputs, mesh


@pytest.mark.parametrize("check_vma", (True, False))
def test_experts_split_over_devices(check_vma):
    inputs, mesh = inputs_and_mesh()
    specs = {n: PartitionSpec() if n in PER_TOKEN else SPLIT for n in inputs}

    def local(inputs):
        first = jax.lax.axis_index("d") * inputs["w_down"].shape[0]
        expert_map = jnp.arange(LAYER.num_experts, dtype=jnp.int32) - first
        return jax.lax.psum(run(inputs, expert_map=expert_map).astype(jnp.float32), "d")

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=check_vma
    )
    out = jax.jit(sharded)(inputs)
    host = jax.device_put(inputs, jax.devices("cpu")[0])
    naive = reference.moe_mlp(**host, dtype=jnp.bfloat16)
    assert_close(out.astype(jnp.bfloat16), reference.moe_mlp(**host), naive)


@pytest.mark.parametrize("check_vma", (True, False))
def test_tokens_split_over_devices(check_vma):
    inputs, mesh = inputs_and_mesh()
    specs = {n: SPLIT if n in PER_TOKEN else PartitionSpec() for n in inputs}
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=SPLIT, check_vma=check_vma)
    assert_equal(jax.jit(sharded)(inputs), jax.jit(run)(inputs))


COLUMNS, ROWS = PartitionSpec(None, None, "d"), PartitionSpec(None, "d")
DIVIDED = {
    "experts": {"w_gate_up": SPLIT, "w_down": SPLIT},
    "tokens": dict.fromkeys(PER_TOKEN, SPLIT),
    "tokens with experts": dict.fromkeys((*PER_TOKEN, "w_gate_up", "w_down"), SPLIT),
    "intermediate": {"w_gate_up": COLUMNS, "w_down": ROWS},
    "hidden": {"w_gate_up": ROWS, "w_down": COLUMNS},
}


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("split", DIVIDED)
def test_a_layer_divided_without_shard_map(split, kind):
    """The rules of _mlp/sharding.py with the kernels, forward and backward."""
    inputs, _ = inputs_and_mesh()
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
    floats = ("x", "w_gate_up", "w_down")

    def gradients(fn, inputs):
        def loss(of):
            y = fn(inputs | of)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)({n: inputs[n] for n in floats})
        return y, grads

    with jax.set_mesh(mesh):
        spec = lambda n: DIVIDED[split].get(n, PartitionSpec())  # noqa: E731
        put = {n: jax.device_put(a, jax.NamedSharding(mesh, spec(n))) for n, a in inputs.items()}
        y, grads = jax.jit(lambda a: gradients(run, a))(put)
    for name in ("w_gate_up", "w_down"):
        assert grads[name].sharding.is_equivalent_to(put[name].sharding, 3)
    host = jax.device_put(inputs, jax.devices("cpu")[0])
    of_reference = lambda dtype: gradients(  # noqa: E731
        lambda a: reference.moe_mlp(**a, dtype=dtype), host
    )
    want, naive = of_reference(jnp.float32), of_reference(jnp.bfloat16)
    for got, ref32, low in zip(*map(jax.tree.leaves, ((y, grads), want, naive)), strict=True):
        assert_close(jax.device_get(got), ref32, low)


def test_adapters_of_tokens_over_explicit_axes():
    """One call a device: the bits of all tokens on one, of one choice of tiles."""
    inputs, _ = inputs_and_mesh()
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    experts = Experts(gate_up=inputs["w_gate_up"], down=inputs["w_down"], layout="kn")
    adapters = lora.init(jax.random.key(0), experts, 16, scale=2.0)
    b = jax.random.normal(jax.random.key(1), adapters.down_b.shape) * 0.1
    adapters = dataclasses.replace(adapters, down_b=b)

    @jax.jit
    def layer(x, ids, weights, experts, adapters):
        return lora.moe_mlp(x, Routing(ids, weights), experts, adapters)

    tokens = [inputs[n] for n in PER_TOKEN]
    alone = jax.device_get(layer(*tokens, experts, adapters))
    with jax.set_mesh(mesh):
        whole = jax.device_put((experts, adapters), jax.NamedSharding(mesh, PartitionSpec()))
        y = layer(*(jax.device_put(a, jax.NamedSharding(mesh, SPLIT)) for a in tokens), *whole)
    assert_equal(jax.device_get(y), alone)
