"""Objects that stand for an array, and those of other packages that do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe

E, T, K, H, WIDTH = 4, 6, 2, 8, 4


class Parameter:
    """What parameters of flax.nnx are to JAX: an array on demand, with its attributes."""

    def __init__(self, value):
        self.value = jnp.asarray(value)

    def __jax_array__(self):
        return self.value

    def __getattr__(self, name):
        return getattr(self.__dict__["value"], name)


class Bare:
    """Nothing but an array on demand."""

    def __init__(self, value):
        self._value = value

    def __jax_array__(self):
        return self._value


class Foreign:
    """An array of another package, with a dtype that NumPy does not know."""

    def __init__(self, value):
        self.shape, self.ndim, self.dtype = value.shape, value.ndim, "other.float32"


def drawn(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def mesh():
    return jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))


def of_one_device(call):
    """Calls it inside of a jax.shard_map over one device."""
    run = lambda _: call()  # noqa: E731
    specs = {"in_specs": P(), "out_specs": P()}
    return jax.jit(jax.shard_map(run, mesh=mesh(), check_vma=False, **specs))(jnp.zeros(()))


def call_all(wrap):
    """Every public function, with each array as `wrap` makes it."""
    x, logits = wrap(drawn((T, H), 0)), wrap(drawn((T, E), 1))
    up, down = drawn((E, H, WIDTH), 2), drawn((E, WIDTH, H), 3)
    bias = drawn((E, WIDTH), 4)
    routing = jaxmoe.route(logits, top_k=K, expert_scale=wrap(jnp.ones(E)))
    routing = jaxmoe.Routing(wrap(routing.expert_ids), wrap(routing.weights))
    experts = jaxmoe.Experts(up=wrap(up), down=wrap(down), up_bias=wrap(bias), activation="relu")
    q = jaxmoe.quantize(wrap(up), "fp8_channel", weight_layout="kn")
    q = jaxmoe.QuantizedArray(wrap(q.values), wrap(q.scales), q.format, q.layout, q.dtype)
    order = jaxmoe.plan(routing.expert_ids, E)
    order = jax.tree.map(lambda a: a, order)
    sizes = wrap(order.group_sizes)
    rows = jaxmoe.permute(x, order)
    ids = routing.expert_ids
    return {
        "layer": jaxmoe.moe_mlp(x, routing, experts, residual=x),
        "rows": jaxmoe.expert_rows(x, routing, experts).rows,
        "both": jaxmoe.route_and_plan(logits, top_k=K)[0].weights,
        "finalize": jaxmoe.finalize(wrap(rows), order, routing.weights),
        "product": jaxmoe.grouped_gemm(wrap(rows), wrap(up), sizes),
        "quantized": jaxmoe.grouped_gemm(wrap(rows), q, sizes),
        "gradient": jaxmoe.grouped_gemm_weight_grad(wrap(rows), wrap(rows), sizes),
        "tokens": jaxmoe.quantize_tokens(x, "fp8_channel").scales,
        "dequantized": jaxmoe.dequantize(q),
        "balance": jaxmoe.load_balancing_loss(logits, ids),
        "z": jaxmoe.router_z_loss(logits),
        "load": jaxmoe.expert_load(ids, E),
        "sharded": jaxmoe.expert_parallel.sharded_moe_mlp(
            x, routing, experts, mesh=mesh(), axis_name="expert"
        ),
        "inside": of_one_device(
            lambda: jaxmoe.expert_parallel.moe_mlp(x, routing, experts, axis_name="expert")
        ),
    }


@functools.cache
def of_arrays():
    return call_all(lambda a: a)


@pytest.mark.parametrize("kind", [Parameter, Bare])
def test_what_stands_for_an_array_is_one(kind):
    if kind is Bare:  # the attributes of an array that experts have are those of its arrays
        experts = jaxmoe.Experts(
            up=Bare(drawn((E, H, WIDTH), 2)), down=drawn((E, WIDTH, H), 3), activation="relu"
        )
        assert experts.num_experts == E
    got, want = call_all(kind), of_arrays()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def test_inside_jit_and_grad():
    experts = jaxmoe.Experts(
        up=drawn((E, H, WIDTH), 2), down=drawn((E, WIDTH, H), 3), activation="relu"
    )
    routing = jaxmoe.route(drawn((T, E), 1), top_k=K)
    plain = jax.grad(lambda x: jaxmoe.moe_mlp(x, routing, experts).sum())
    wrapped = jax.grad(lambda x: jaxmoe.moe_mlp(Parameter(x), routing, experts).sum())
    x = drawn((T, H), 0)
    np.testing.assert_array_equal(jax.jit(wrapped)(x), jax.jit(plain)(x))


def test_an_array_of_another_package():
    x, w = drawn((T, H), 0), drawn((E, H, WIDTH), 2)
    package = Foreign.__module__.split(".")[0]
    with pytest.raises(TypeError) as error:
        jaxmoe.grouped_gemm(x, Foreign(w), jnp.ones(E, jnp.int32))
    assert str(error.value) == (
        f"jaxmoe.grouped_gemm: rhs must be a JAX or NumPy array. Got rhs: a {package}.Foreign."
    )
    with pytest.raises(TypeError, match=f"up must be a JAX or NumPy array. Got up: a {package}"):
        jaxmoe.Experts(up=Foreign(w), down=drawn((E, WIDTH, H), 3), activation="relu")
    with pytest.raises(TypeError, match=f"x must be a JAX or NumPy array. Got x: a {package}.For"):
        jaxmoe.quantize_tokens(Foreign(x), "fp8_channel")
