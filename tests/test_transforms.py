"""moe_mlp under every JAX transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Routing, finalize, grouped_gemm, permute, plan, reference
from jaxmoe._testing import SMALL, assert_equal, layer_inputs, normal
from tests.layers import moe_mlp

# f32 against f32 in another order of summation, values of order 1 (products of several for second
# derivatives): a few hundred ulp, and far below the effect of any wrong term.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
V = 2  # examples of a batch


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)


def equations(jaxpr):
    """Every equation of a program, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def ops(fn, *args):
    """How often each jaxmoe op occurs in the program of `fn`."""
    names = [e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args).jaxpr)]
    return {n: names.count(n) for n in sorted(set(names)) if n.startswith("jaxmoe_")}


LAYER = SMALL["odd"]


def layer_arguments(seed=0, num_tokens=6):
    rng = np.random.default_rng(seed)
    inputs = layer_inputs(LAYER, num_tokens, "with_invalid", rng, jnp.float32)
    return inputs.pop("expert_ids"), inputs


def layer(ids, arrays):
    a = dict(arrays)
    x, weights, w1, w2 = (a.pop(n) for n in ("x", "weights", "w_gate_up", "w_down"))
    return moe_mlp(x, Routing(ids, weights), w1, w2, **a)


def layer_reference(ids, arrays):
    return reference.moe_mlp(**arrays, expert_ids=ids)


# What is batched, and how many fused calls the program then holds; `scan` is the loop that avoids
# copying weights when examples cannot become groups.
LAYER_BATCHES = {
    "tokens": (("x", "ids", "weights"), 1, 0),
    "ids_only": (("ids",), 1, 0),
    "x_only": (("x",), 1, 0),
    "all": (("x", "ids", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down"), 1, 0),
    "gate_up": (("w_gate_up",), 1, 0),
    "gate_up_and_bias": (("w_gate_up", "b_gate_up"), 1, 0),
    "down": (("x", "w_down"), 1, 0),
    "bias_only": (("b_down",), 1, 1),
}


def batched_layer(names, arguments=layer_arguments):
    examples = [arguments(seed) for seed in range(V)]
    ids, arrays = examples[0]
    axes = {n: 0 if n in names else None for n in arrays}
    arrays = {
        n: jnp.stack([e[1][n] for e in examples]) if n in names else a for n, a in arrays.items()
    }
    if "ids" in names:
        ids = jnp.stack([e[0] for e in examples])
    return (ids, arrays), (0 if "ids" in names else None, axes)


def layer_loop(fn, args, axes):
    outs = []
    for v in range(V):
        take = lambda a, d: a if d is None else a[v]  # noqa: B023, E731
        arrays = {n: take(a, axes[1][n]) for n, a in args[1].items()}
        outs.append(fn(take(args[0], axes[0]), arrays))
    return jax.tree.map(lambda *a: jnp.stack(a), *outs)


@pytest.mark.parametrize("name", LAYER_BATCHES)
def test_vmap_of_the_layer(name):
    names, calls, scans = LAYER_BATCHES[name]
    args, axes = batched_layer(names)
    mapped = jax.vmap(layer, axes)
    close(jax.jit(mapped)(*args), layer_loop(jax.jit(layer_reference), args, axes))
    assert ops(mapped, *args) == {"jaxmoe_moe_mlp": calls}
    found = [e.primitive.name for e in equations(jax.make_jaxpr(mapped)(*args).jaxpr)]
    assert found.count("scan") == scans


def test_vmap_of_the_layer_over_maps_windows_and_residuals():
    ids, arrays = layer_arguments()
    local = {n: a[1:4] if n.startswith(("w_", "b_")) else a for n, a in arrays.items()}
    maps = jnp.array([[-1, 0, 1, 2, 7], [2, 1, 0, -1, -1]], jnp.int32)
    residuals = normal(np.random.default_rng(3), (V, *arrays["x"].shape))

    def with_map(fn):
        return lambda m, r: fn(ids, {**local, "expert_map": m, "residual": r})

    got = jax.jit(jax.vmap(with_map(layer)))(maps, residuals)
    want = jax.jit(with_map(layer_reference))
    close(got, jnp.stack([want(m, r) for m, r in zip(maps, residuals, strict=True)]))

    w_down = jnp.stack([local["w_down"], 2 * local["w_down"]])

    def with_window(fn):
        window = {"num_experts": 5, "expert_offset": 1}
        return lambda w: fn(ids, {**local, "w_down": w, **window})

    got = jax.jit(jax.vmap(with_window(layer)))(w_down)
    want = jax.jit(with_window(layer_reference))
    close(got, jnp.stack([want(w) for w in w_down]))


def test_nested_vmap_of_the_layer():
    """The inner fold repeats w_gate_up over groups, the outer one batches it: both at once."""
    ids, arrays = layer_arguments(num_tokens=3)

    def both(fn):
        return lambda w1, w2: fn(ids, {**arrays, "w_gate_up": w1, "w_down": w2})

    w1 = jnp.stack([arrays["w_gate_up"], -arrays["w_gate_up"]])
    w2 = jnp.stack([arrays["w_down"], 2 * arrays["w_down"], 3 * arrays["w_down"]])
    got = jax.jit(jax.vmap(jax.vmap(both(layer), (None, 0)), (0, None)))(w1, w2)
    one = jax.jit(both(layer_reference))
    want = [[one(a, b) for b in w2] for a in w1]
    close(got, jnp.array(want))


def loss_of(fn, ids):
    return lambda arrays: jnp.sum(jnp.sin(fn(ids, arrays)))


def test_layer_under_jvp_linearize_and_second_order():
    ids, arrays = layer_arguments()
    tangents = {n: normal(np.random.default_rng(5), a.shape) for n, a in arrays.items()}

    def results(fn):
        loss = loss_of(fn, ids)
        forward = jax.jvp(lambda a: fn(ids, a), (arrays,), (tangents,))
        hessian = jax.jvp(jax.grad(loss), (arrays,), (tangents,))[1]
        return forward, jax.linearize(loss, arrays)[1](tangents), hessian

    got = jax.jit(lambda: results(layer))()
    close(got, jax.jit(lambda: results(layer_reference))())


@pytest.mark.parametrize("name", ("tokens", "gate_up"))
def test_gradient_of_vmap_of_the_layer(name):
    args, axes = batched_layer(LAYER_BATCHES[name][0])

    def gradient(fn):
        loss = lambda arrays: jnp.sum(jnp.sin(jax.vmap(fn, axes)(args[0], arrays)))  # noqa: E731
        return jax.grad(loss)

    close(jax.jit(gradient(layer))(args[1]), jax.jit(gradient(layer_reference))(args[1]))
    if name == "tokens":  # the weights are shared, so is the sum of their gradient
        program = jax.make_jaxpr(gradient(layer))(args[1])
        shapes = [
            e.outvars[0].aval.shape
            for e in equations(program.jaxpr)
            if e.primitive.name == "jaxmoe_tgmm"
        ]
        assert {shape[:2] for shape in shapes} == {(1, LAYER.num_experts)}


def test_vmap_of_gradient_of_the_layer():
    args, axes = batched_layer(LAYER_BATCHES["tokens"][0])
    got = jax.jit(jax.vmap(lambda ids, a: jax.grad(loss_of(layer, ids))(a), axes))(*args)
    one = jax.jit(lambda ids, a: jax.grad(loss_of(layer_reference, ids))(a))
    close(got, layer_loop(one, args, axes))


def test_scan_over_layers():
    """One program for all layers, forward and backward."""
    ids, arrays = layer_arguments()
    deep = {n: jnp.stack([a, 0.5 * a, -a]) for n, a in arrays.items() if n.startswith(("w_", "b_"))}

    def network(fn, scanned):
        def loss(x, deep):
            def one(x, w):
                return x + fn(ids, {"x": x, "weights": arrays["weights"], **w}), None

            if scanned:
                return jnp.sum(jax.lax.scan(one, x, deep)[0] ** 2)
            for i in range(3):
                x, _ = one(x, {n: a[i] for n, a in deep.items()})
            return jnp.sum(x**2)

        return jax.value_and_grad(loss, (0, 1))

    got = jax.jit(network(layer, scanned=True))(arrays["x"], deep)
    close(got, jax.jit(network(layer_reference, scanned=False))(arrays["x"], deep))
    assert ops(lambda x: network(layer, True)(x, deep)[0], arrays["x"])["jaxmoe_gate_up"] == 1


@functools.cache
def plain_gradient():
    """The gradient without remat, and the ops it takes."""
    ids, arrays = layer_arguments()
    gradient = jax.grad(loss_of(layer, ids))
    return jax.jit(gradient)(arrays), ops(gradient, arrays)


@pytest.mark.parametrize(
    "names, products, plans",
    # What is not saved is computed again, and nothing else: never the second product.
    (
        (("jaxmoe_z", "jaxmoe_plan"), 0, 0),
        (("jaxmoe_z",), 0, 1),
        (("jaxmoe_plan",), 1, 0),
        ((), 1, 1),
    ),
)
def test_remat_policies_know_the_residuals(names, products, plans):
    ids, arrays = layer_arguments()
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    rematted = jax.grad(loss_of(jax.checkpoint(layer, policy=policy), ids))
    want, plain = plain_gradient()
    if not names:
        close(jax.jit(rematted)(arrays), want)
    more = {"jaxmoe_gate_up": products, "jaxmoe_plan": plans}
    assert ops(rematted, arrays) == {n: count + more.get(n, 0) for n, count in plain.items()}


def test_z_can_be_offloaded():
    """To the host and back; no product is repeated, and the gradients are the same."""
    ids, arrays = layer_arguments()
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["jaxmoe_plan"],
        names_which_can_be_offloaded=["jaxmoe_z"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    gradient = jax.grad(loss_of(jax.checkpoint(layer, policy=policy), ids))
    want, plain = plain_gradient()
    program = jax.make_jaxpr(gradient)(arrays)
    moved = [e for e in equations(program.jaxpr) if e.primitive.name == "device_put"]
    assert [e.outvars[0].aval.shape for e in moved] == [(18, 48)] * 2  # there and back
    assert ops(gradient, arrays) == plain
    close(jax.jit(gradient)(arrays), want)


def test_the_layer_is_the_composition_of_its_ops():
    ids, arrays = layer_arguments()

    def composed(ids, a):
        order = plan(ids, LAYER.num_experts)
        z = grouped_gemm(
            permute(a["x"], order), a["w_gate_up"], order.group_sizes, bias=a["b_gate_up"]
        )
        gate, up = jnp.split(z, 2, axis=-1)
        rows = grouped_gemm(
            jax.nn.silu(gate) * up, a["w_down"], order.group_sizes, bias=a["b_down"]
        )
        return finalize(rows, order, a["weights"])

    # The cotangent is a function of the value.
    close(plain_gradient()[0], jax.jit(jax.grad(loss_of(composed, ids)))(arrays))


def test_ahead_of_time_compilation_and_one_trace():
    ids, arrays = layer_arguments()
    f = jax.jit(layer)
    compiled = f.lower(ids, arrays).compile()
    close(compiled(ids, arrays), jax.jit(layer_reference)(ids, arrays))
    for seed in range(3):  # other routing, other values: the same program
        f(*layer_arguments(seed))
    assert f._cache_size() == 1


def test_eager_without_jit():
    ids, arrays = layer_arguments()
    with jax.disable_jit():
        got = layer(ids, arrays)
    close(got, jax.jit(layer_reference)(ids, arrays))


def test_vmap_without_rows():
    ids, arrays = layer_arguments(num_tokens=0)
    w_down = jnp.stack([arrays["w_down"]] * V)
    mapped = jax.vmap(lambda w: layer(ids, {**arrays, "w_down": w, "residual": arrays["x"]}))
    assert mapped(w_down).shape == (V, 0, LAYER.hidden)


def test_x64_changes_nothing_in_a_batch():
    """Indices stay int32, also those of one example in the order of all."""

    def one(x, ids, weights, w1, w2):
        order = plan(ids, LAYER.num_experts)
        y = finalize(permute(x, order), order, weights)
        return y, moe_mlp(x, Routing(ids, weights), w1, w2, do_finalize=False)

    def batch(a):
        tokens = (a[n].reshape(V, 3, -1) for n in ("x", "expert_ids", "weights"))
        return jax.vmap(one, (0, 0, 0, None, None))(*tokens, a["w_gate_up"], a["w_down"])

    ids, arrays = layer_arguments()
    inputs = jax.tree.map(np.asarray, arrays | {"expert_ids": ids})
    want = jax.jit(batch)(inputs)
    with jax.enable_x64(True):
        got = jax.jit(batch)(inputs)
    jax.tree.map(assert_equal, got, want)
