"""Examples of a vmap over one mesh axis, what is divided among them over a later one.

XLA ends the process on a `jax.shard_map` inside one over a later axis of the mesh, if another axis
is left to it, so none of these programs may reach it in that form.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from tests.sharding_programs import close, entered

NAMES = ("data", "seq", "expert")
EXAMPLES, T, H, WIDTH, E, K = 4, 6, 16, 8, 4, 2


def make_mesh(names=NAMES, auto=()):
    kinds = tuple(AxisType.Auto if name in auto else AxisType.Explicit for name in names)
    return jax.make_mesh((2,) * len(names), names, axis_types=kinds)


def drawn(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer(x, gate_up, down):
    def one(t):
        routing = jaxmoe.route(t[:, :E], top_k=K)
        return jaxmoe.moe_mlp(t, routing, jaxmoe.Experts(gate_up=gate_up, down=down))

    return jax.vmap(one)(x)


def gradient(x, gate_up, down):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(layer(*args))), argnums=(0, 1, 2))(
        x, gate_up, down
    )


def per_example_gradient(x, gate_up, down):
    loss = lambda t: jnp.sum(jnp.sin(layer(t[None], gate_up, down)))  # noqa: E731
    return jax.vmap(jax.grad(loss))(x)


def product(x, gate_up, _down):
    sizes = jnp.array([2, 0, 3, 1], jnp.int32)
    return jax.vmap(lambda rows: jaxmoe.grouped_gemm(rows, gate_up, sizes))(x)


def quantized_product(x, gate_up, _down):
    w = jaxmoe.quantize(gate_up, "fp8_channel", weight_layout="kn")
    sizes = jnp.array([2, 0, 3, 1], jnp.int32)
    return jax.vmap(lambda rows: jaxmoe.grouped_gemm(rows, w, sizes))(x)


def back_and_forth(x, _gate_up, _down):
    def one(t):
        routing = jaxmoe.route(t[:, :E], top_k=K)
        plan = jaxmoe.plan(routing.expert_ids, E)
        return jaxmoe.finalize(jaxmoe.permute(t, plan), plan, routing.weights)

    return jax.vmap(one)(x)


PROGRAMS = {
    "layer": layer,
    "gradient": gradient,
    "per_example_gradient": per_example_gradient,
    "product": product,
    "quantized_product": quantized_product,
    "back_and_forth": back_and_forth,
}
ARRAYS = (drawn((EXAMPLES, T, H), 0), drawn((E, H, 2 * WIDTH), 1) / 4, drawn((E, WIDTH, H), 2) / 3)


def put(mesh, examples, experts, hidden=None):
    specs = (P(examples, None, hidden), P(experts), P(experts))
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(ARRAYS, specs, strict=True)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_examples_before_experts(name):
    fn = PROGRAMS[name]
    want = jax.jit(fn)(*map(jnp.asarray, ARRAYS))
    mesh = make_mesh()
    with entered(mesh):
        got = jax.jit(fn)(*put(mesh, "data", "expert"))
    close(got, want)


@pytest.mark.parametrize("axis", [1, 2])
def test_gradients_of_examples_beside_split_weights(axis):
    """Weights split over H (1) or I (2) of gate and up; what is kept for them is split as well."""
    mesh = make_mesh()
    with entered(mesh):
        x, gate_up, down = put(mesh, "data", None)
        up = P(*("expert" if d == axis else None for d in range(3)))
        gate_up = jax.device_put(gate_up, NamedSharding(mesh, up))
        down = jax.device_put(down, NamedSharding(mesh, P(None, *up[1:][::-1])))
        got = jax.jit(gradient)(x, gate_up, down)
    assert got[1].sharding.spec == up
    close(got, jax.jit(gradient)(*map(jnp.asarray, ARRAYS)))


def test_without_jit():
    """A product and its gradients, op by op."""

    def both(x, gate_up):
        y, pull = jax.vjp(lambda *args: product(*args, None), x, gate_up)
        return y, pull(jnp.sin(y))

    want = jax.jit(both)(*map(jnp.asarray, ARRAYS[:2]))
    mesh = make_mesh()
    with entered(mesh):
        close(both(*put(mesh, "data", "expert")[:2]), want)


def test_the_mesh_of_the_arrays_is_enough():
    """It need not be the one that jax.set_mesh has set."""
    want = jax.jit(layer)(*map(jnp.asarray, ARRAYS))
    close(jax.jit(layer)(*put(make_mesh(), "data", "expert")), want)


def test_examples_after_experts():
    with entered(make_mesh()):
        got = jax.jit(gradient)(*put(make_mesh(), "expert", "data"))
    close(got, jax.jit(gradient)(*map(jnp.asarray, ARRAYS)))


def test_examples_between_the_axes_of_the_layer():
    """H of x over the first axis, examples over the second, experts over the third."""
    want = jax.jit(layer)(*map(jnp.asarray, ARRAYS))
    mesh = make_mesh()
    with entered(mesh):
        x, gate_up, down = put(mesh, "seq", "expert")
        down = jax.device_put(down, NamedSharding(mesh, P("expert", None, "data")))
        got = jax.jit(layer)(x, gate_up, down)
    close(got, want)
    assert got.sharding.spec == P("seq", None, "data")


def test_an_axis_left_to_xla_is_refused():
    mesh = make_mesh(auto=("seq",))
    with entered(mesh):
        args = put(mesh, "data", "expert")
        for fn in (layer, gradient):
            with pytest.raises(NotImplementedError) as error:
                jax.jit(fn)(*args)
            assert str(error.value) == (
                "jaxmoe.moe_mlp: examples of a vmap are split over the mesh axis 'data', which "
                "must come after 'expert' in the mesh ('data', 'seq', 'expert'): the call is "
                "divided over 'expert' already, and XLA nests manual axes in the order of the mesh "
                "only. Make the mesh with the axes ('seq', 'expert', 'data'), or call "
                "jax.shard_map over 'data' around the whole."
            )


def test_the_refused_program_runs_on_the_mesh_that_the_message_names():
    mesh = make_mesh(("seq", "expert", "data"), auto=("seq",))
    with entered(mesh):
        got = jax.jit(layer)(*put(mesh, "data", "expert"))
    close(got, jax.jit(layer)(*map(jnp.asarray, ARRAYS)))


# Its axis_index names again the axes that the outer shard_map has bound.
needs_nested_places = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 cannot lower axis_index in a nested shard_map"
)


@needs_nested_places
def test_the_refused_program_runs_in_a_shard_map():
    mesh = make_mesh(auto=("seq",))
    specs = (P("data"), P(), P())
    with entered(mesh):
        split = jax.shard_map(layer, in_specs=specs, out_specs=P("data"), axis_names={"data"})
        got = jax.jit(split)(*put(mesh, "data", "expert"))
    close(got, jax.jit(layer)(*map(jnp.asarray, ARRAYS)))


@needs_nested_places
def test_a_call_inside_a_shard_map_over_a_later_axis():
    """The argument's own axes come before the manual one: nested the wrong way without a vmap."""

    def local(x, gate_up, down):
        routing = jaxmoe.route(x[:, :E], top_k=K)
        return jaxmoe.moe_mlp(x, routing, jaxmoe.Experts(gate_up=gate_up, down=down))

    x, gate_up, down = ARRAYS
    x = x.reshape(-1, H)
    for auto in ((), ("seq",)):
        mesh = make_mesh(auto=auto)
        with entered(mesh):
            tokens = jax.device_put(x, NamedSharding(mesh, P("expert")))
            weights = [jax.device_put(w, NamedSharding(mesh, P("data"))) for w in (gate_up, down)]
            split = jax.jit(
                jax.shard_map(
                    local,
                    in_specs=(P("expert"), P(), P()),
                    out_specs=P("expert"),
                    axis_names={"expert"},
                )
            )
            if auto:
                with pytest.raises(NotImplementedError, match="arguments are split .* 'data'"):
                    split(tokens, *weights)
            else:
                want = jax.jit(local)(*map(jnp.asarray, (x, gate_up, down)))
                close(split(tokens, *weights), want)
