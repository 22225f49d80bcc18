"""grouped_gemm and moe_mlp inside jax.shard_map, with check_vma on and off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import Routing, grouped_gemm, reference
from jaxmoe._testing import Layer, layer_inputs, normal
from tests.layers import moe_mlp

# f32 sums in another order, values of order 1; see test_transforms.py.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
LAYER = Layer("", "experts divide over 4 devices", 16, 8, 8, 3, bias=True)
NUM_TOKENS = 12

both_checks = pytest.mark.parametrize("check_vma", (True, False))


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)


def mesh(*sizes, kind=AxisType.Auto):
    names = ("data", "expert")[-len(sizes) :]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    inputs = layer_inputs(LAYER, NUM_TOKENS, "with_invalid", rng, jnp.float32)
    return inputs.pop("expert_ids"), inputs


def layer(ids, arrays, **options):
    a = dict(arrays)
    x, weights, w1, w2 = (a.pop(n) for n in ("x", "weights", "w_gate_up", "w_down"))
    return moe_mlp(x, Routing(ids, weights), w1, w2, **a, **options)


def whole_layer(ids, arrays):
    return reference.moe_mlp(**arrays, expert_ids=ids)


def specs(tokens, experts):
    arrays = {n: tokens if n in ("x", "weights") else experts for n in arguments()[1]}
    return (tokens, arrays)


def value_and_gradients(fn, ids, arrays):
    """The result and the gradient of every floating argument."""
    seed = normal(np.random.default_rng(7), arrays["x"].shape)
    loss = lambda a: jnp.sum(jnp.sin(fn(ids, a)) * seed)  # noqa: E731
    return jax.jit(lambda a: (fn(ids, a), jax.grad(loss)(a)))(arrays)


@functools.cache
def expected():
    """The result and the gradients of the reference for `arguments()`."""
    return value_and_gradients(whole_layer, *arguments())


@both_checks
def test_tokens_split_weights_replicated(check_vma):
    """The gradient of a replicated weight is summed over the devices, once."""
    split = jax.shard_map(
        layer,
        mesh=mesh(4),
        in_specs=specs(P("expert"), P()),
        out_specs=P("expert"),
        check_vma=check_vma,
    )
    close(value_and_gradients(split, *arguments()), expected())


def local_experts(ids, arrays):
    """One device's experts for all tokens, then a sum over devices: a map that is device data."""
    first = jax.lax.axis_index("expert") * 2
    expert = jnp.arange(LAYER.num_experts, dtype=jnp.int32)
    y = layer(ids, arrays, expert_map=expert - first)
    return jax.lax.psum(y, "expert")


def test_experts_split_tokens_replicated():
    split = jax.shard_map(
        local_experts,
        mesh=mesh(4),
        in_specs=specs(P(), P("expert")),
        out_specs=P(),
    )
    close(value_and_gradients(split, *arguments()), expected())


def test_tokens_and_experts_split():
    split = jax.shard_map(
        local_experts,
        mesh=mesh(2, 4),
        in_specs=specs(P("data"), P("expert")),
        out_specs=P("data"),
    )
    close(value_and_gradients(split, *arguments()), expected())


@pytest.mark.parametrize(("check_vma", "layout"), ((True, "kn"), (False, "nk")))
def test_intermediate_axis_split(check_vma, layout):
    """Pairs of gate and up stay on one device; what is added once is zero on all but the first."""

    def part(ids, arrays):
        first = jax.lax.axis_index("expert") == 0
        once = {n: jnp.where(first, arrays[n], 0) for n in ("b_down", "residual")}
        y = layer(ids, {**arrays, **once}, gate_up="interleaved", weight_layout=layout)
        return jax.lax.psum(y, "expert")

    ids, arrays = arguments()
    arrays["residual"] = normal(np.random.default_rng(5), arrays["x"].shape)
    whole = functools.partial(
        reference.moe_mlp, expert_ids=ids, gate_up="interleaved", weight_layout=layout
    )
    columns, rows = P(None, None, "expert"), P(None, "expert")
    if layout == "nk":
        arrays |= {n: arrays[n].swapaxes(1, 2) for n in ("w_gate_up", "w_down")}
        columns, rows = rows, columns
    split_on = {"w_gate_up": columns, "w_down": rows, "b_gate_up": P(None, "expert")}
    split = jax.shard_map(
        part,
        mesh=mesh(4),
        in_specs=(P(), {n: split_on.get(n, P()) for n in arrays}),
        out_specs=P(),
        check_vma=check_vma,
    )
    want = value_and_gradients(lambda _, a: whole(**a), ids, arrays)
    close(value_and_gradients(split, ids, arrays), want)


def test_the_program_holds_only_the_collective_it_asks_for():
    split = jax.shard_map(
        local_experts, mesh=mesh(4), in_specs=specs(P(), P("expert")), out_specs=P()
    )
    text = jax.jit(split).lower(*arguments()).compile().as_text()
    names = ("all-reduce(", "all-gather(", "all-to-all(", "collective-permute(", "reduce-scatter(")
    assert [text.count(n) for n in names] == [1, 0, 0, 0, 0]


def test_a_result_that_varies_is_not_taken_for_replicated():
    """The type of the result says over which axes it varies; a raw FFI call gets this wrong."""
    lhs, rhs = jnp.ones((8, 4)), jnp.ones((2, 4, 4))
    sizes = jnp.array([1, 1], jnp.int32)
    wrong = jax.shard_map(
        lambda lhs: grouped_gemm(lhs, rhs, sizes), mesh=mesh(4), in_specs=P("expert"), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(wrong)(lhs)


@both_checks
def test_grouped_gemm_columns_split(check_vma):
    rng = np.random.default_rng(1)
    lhs, rhs = normal(rng, (20, 8)), normal(rng, (3, 8, 16))
    sizes = jnp.array([7, 0, 9], jnp.int32)
    split = jax.shard_map(
        grouped_gemm,
        mesh=mesh(4),
        in_specs=(P(), P(None, None, "expert"), P()),
        out_specs=P(None, "expert"),
        check_vma=check_vma,
    )

    def value_and_gradients(fn):
        def loss(a, b):
            y = fn(a, b, sizes)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(lhs, rhs)

    close(value_and_gradients(split), value_and_gradients(reference.grouped_gemm))


def test_vmap_and_scan_inside():
    """Batching and loops carry the manual axes of the types along."""
    ids, arrays = arguments()
    deep = {n: jnp.stack([a, -a]) for n, a in arrays.items() if n.startswith(("w_", "b_"))}

    def network(fn, ids, x, weights, deep):
        def one(x, w):
            y = jax.vmap(lambda s: fn(ids, {"x": s * x, "weights": weights, **w}))(
                jnp.array([1.0, 2.0])
            )
            return x + y.sum(0), None

        return jax.lax.scan(one, x, deep)[0]

    split = jax.jit(
        jax.shard_map(
            functools.partial(network, layer),
            mesh=mesh(4),
            in_specs=(P("expert"), P("expert"), P("expert"), P()),
            out_specs=P("expert"),
        )
    )
    want = ids, arrays["x"], arrays["weights"], deep
    close(split(*want), jax.jit(functools.partial(network, whole_layer))(*want))


def test_inside_an_explicit_mesh_with_inferred_specs():
    m = mesh(4, kind=AxisType.Explicit)
    ids, arrays = arguments()
    with jax.set_mesh(m):
        put = lambda a, spec: jax.device_put(a, jax.NamedSharding(m, spec))  # noqa: E731
        tokens = {n: put(arrays[n], P("expert")) for n in ("x", "weights")}
        others = {n: put(a, P()) for n, a in arrays.items() if n not in tokens}
        split = jax.jit(jax.shard_map(layer, out_specs=P("expert")))
        got = split(put(ids, P("expert")), {**others, **tokens})
    assert jax.typeof(got).sharding.spec == P("expert", None) or got.sharding.spec[0] == "expert"
    close(got, expected()[0])


def test_one_axis_manual_the_other_automatic():
    m = mesh(2, 4)
    split = jax.shard_map(
        local_experts,
        mesh=m,
        in_specs=specs(P(), P("expert")),
        out_specs=P(),
        axis_names={"expert"},
    )
    close(jax.jit(split)(*arguments()), expected()[0])


def test_replicated_arguments_on_an_explicit_mesh():
    """The default kind of mesh: replicated in, replicated out, gradient included."""
    m = mesh(4, kind=AxisType.Explicit)
    ids, arrays = arguments()
    want = expected()
    with jax.set_mesh(m):
        ids, arrays = jax.device_put((ids, arrays), jax.NamedSharding(m, P()))
        got = value_and_gradients(layer, ids, arrays)
    assert got[0].sharding.is_fully_replicated
    close(got, want)


def test_axes_that_are_left_to_xla():
    """Arguments split over these are gathered: a loop that XLA divides would wait for ever."""
    three = jax.make_mesh((2, 2, 2), ("data", "seq", "expert"), axis_types=(AxisType.Auto,) * 3)
    ids, arrays = arguments()
    split = {n: P() for n in arrays} | {"x": P("data", "expert"), "weights": P("data")}
    split |= {"w_gate_up": P(None, None, "expert"), "w_down": P(None, "expert")}
    placed = {n: jax.device_put(a, NamedSharding(three, split[n])) for n, a in arrays.items()}
    data = specs(P("data"), P())
    of_data = jax.shard_map(
        layer, mesh=three, in_specs=data, out_specs=P("data"), axis_names={"data"}
    )
    at = jax.device_put(jnp.asarray(ids), NamedSharding(three, P("data")))
    got = value_and_gradients(of_data, at, placed)
    close(got, value_and_gradients(layer, ids, arrays))
