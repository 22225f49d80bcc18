"""Layers that `jaxmoe.load` splits over GPUs: the layer that is on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from tests.test_load_split import FORMATS, H, assert_near, qwen

pytestmark = pytest.mark.multi_gpu


@pytest.mark.parametrize("axis", ("axis", "tensor_axis", "hidden_axis"))
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_in_parts_is_that_of_one_gpu(format, axis, tmp_path):
    gpus = jax.devices("cuda")[:2]
    mesh = jax.make_mesh((2,), ("parts",), axis_types=(AxisType.Auto,), devices=gpus)
    path = qwen(tmp_path, *FORMATS[format])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(48, H)), jnp.bfloat16)
    want = jax.jit(lambda layer, x: layer(x))(jaxmoe.load(path)[0], x)
    layer = jaxmoe.load(path, mesh=mesh, **{axis: "parts"})[0]
    values = jax.tree.leaves(layer.experts.down)[0]
    assert {s.data.size for s in values.addressable_shards} == {values.size // 2}
    got = jax.jit(lambda layer, x: layer(x))(layer, jax.device_put(x, NamedSharding(mesh, P())))
    assert_near(got, want)
