"""A function of the user's as the activation: kernels for both products, XLA between."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Experts, GemmConfig, Routing, quantize, reference
from jaxmoe._testing import assert_close, assert_equal
from jaxmoe.activation import resolve
from tests.lowered import NO_ACTIVATION, calls, cuda_text

T, K, E, H, INTER = 9, 2, 4, 128, 64


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def step(gate, up):
    """SwigluStep(0.5): the clamp after silu."""
    return jnp.minimum(jax.nn.silu(gate), 0.5) * jnp.clip(up, -0.5, 0.5)


def capped(gate, up):
    """SoftcapSwiglu(3, 1): tanh caps gate and up, but not what the sigmoid reads."""
    return 3 * jnp.tanh(gate / 3) * jax.nn.sigmoid(gate) * jnp.tanh(up)


# Functions that have a name, or a class of their own.
NAMED = {swiglu: "swiglu", step: jaxmoe.SwigluStep(0.5), capped: jaxmoe.SoftcapSwiglu(3, 1)}


def shifted(g):
    """Not 0 at 0."""
    return jnp.cos(g) + 100.0


def inputs(fn, dtype=jnp.float32, seed=0):
    width = INTER if fn is shifted else 2 * INTER
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) / 8, dtype)  # noqa: E731
    ids = jnp.asarray(rng.integers(-1, E, (T, K)), jnp.int32)  # some of no expert
    routing = Routing(ids, jnp.asarray(rng.random((T, K), np.float32)), E)
    weights = {"gate_up": normal(E, width, H), "down": normal(E, H, INTER)}
    experts = Experts(**weights, gate_up_bias=normal(E, width), activation=fn, layout="nk")
    return 8 * normal(T, H), routing, experts


def by_loop(x, routing, experts, fn):
    """The definition, in float64 by NumPy around the function itself."""
    as64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    y = np.zeros(x.shape)
    for t, (ids, weights) in enumerate(zip(routing.expert_ids, routing.weights, strict=True)):
        for e, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            if e < 0:
                continue
            z = as64(experts.gate_up[e]) @ as64(x[t]) + as64(experts.gate_up_bias[e])
            z = jnp.asarray(z, jnp.float32)
            h = fn(z) if fn is shifted else fn(*jnp.split(z, 2))
            y[t] += weight * (as64(experts.down[e]) @ as64(h))
    return y


@pytest.mark.parametrize("fn", (step, capped, shifted))
def test_the_layer_is_the_definition(fn):
    x, routing, experts = inputs(fn)
    y = jaxmoe.moe_mlp(x, routing, experts)
    np.testing.assert_allclose(y, by_loop(x, routing, experts, fn), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("order", ("gate_up", "up_gate", "interleaved"))
@pytest.mark.parametrize("fn", NAMED)
def test_a_function_that_has_a_name_gives_its_results(fn, order):
    """Gradients too, in bf16, where what is rounded counts."""
    x, routing, experts = inputs(fn, jnp.bfloat16)
    named = dataclasses.replace(experts, activation=NAMED[fn], order=order)
    own = dataclasses.replace(experts, order=order)

    @jax.jit
    def value_and_grads(x, experts):
        fn = lambda x, e: jaxmoe.moe_mlp(x, routing, e).astype(jnp.float32).sum()  # noqa: E731
        return jax.value_and_grad(fn, (0, 1))(x, experts)

    got, wanted = value_and_grads(x, own), value_and_grads(x, named)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b.astype(jnp.float32), b)


@pytest.mark.parametrize("format", ("fp8_tensor", "fp8_block", "mxfp4", "int4_g32"))
@pytest.mark.parametrize("fn", (swiglu, shifted))
def test_quantized_weights(fn, format):
    x, routing, experts = inputs(fn, jnp.bfloat16)
    q = {n: quantize(getattr(experts, n), format, weight_layout="nk") for n in ("gate_up", "down")}
    quantized = dataclasses.replace(experts, **q)
    y = jax.jit(jaxmoe.moe_mlp)(x, routing, quantized)
    if fn is swiglu:
        named = dataclasses.replace(quantized, activation="swiglu")
        wanted = jaxmoe.moe_mlp(x, routing, named)
        assert_close(y, wanted.astype(jnp.float32), wanted)
        return
    # Rows of no expert are 100 after the function: no scale may be made of them.
    none = Routing(jnp.full((T, K), -1, jnp.int32), routing.weights, E)
    assert (jaxmoe.moe_mlp(x, none, quantized) == 0).all()
    wide = {n: jaxmoe.dequantize(w, dtype=jnp.float32) for n, w in q.items()}
    as_read = types.SimpleNamespace(**wide, gate_up_bias=experts.gate_up_bias)
    wanted = by_loop(x, routing, as_read, fn)
    assert abs(np.asarray(y, np.float64) - wanted).max() < 0.05 * abs(wanted).max()


def test_rows_and_batches_have_it_too():
    x, routing, experts = inputs(capped)
    out = jaxmoe.expert_rows(x, routing, experts)
    whole = jaxmoe.moe_mlp(x, routing, experts)
    assert_equal(jaxmoe.finalize(out.rows, out, out.weights), whole)
    batch = jnp.stack([x[:5]] * E)
    out = jaxmoe.expert_batches(batch, jnp.array([5, 0, 3, 1]), experts)
    one = Routing(jnp.full((5, 1), 2, jnp.int32), jnp.ones((5, 1)), E)
    wanted = jaxmoe.moe_mlp(x[:5], one, experts)
    np.testing.assert_allclose(out[2, :3], wanted[:3], rtol=1e-5, atol=1e-5)
    assert (out[2, 3:] == 0).all() and (out[1] == 0).all()


def test_the_reference_takes_functions():
    x, routing, experts = inputs(step)
    y = reference.moe_mlp(
        x,
        routing.expert_ids,
        routing.weights,
        experts.gate_up,
        experts.down,
        b_gate_up=experts.gate_up_bias,
        activation=step,
        weight_layout="nk",
    )
    np.testing.assert_allclose(y, by_loop(x, routing, experts, step), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("format", (None, "fp8_block", "int4_g32"))
def test_on_cuda_both_products_are_kernels(format):
    x, routing, experts = inputs(step, jnp.bfloat16)
    if format is not None:
        weights = {n: getattr(experts, n) for n in ("gate_up", "down")}
        weights = {n: quantize(w, format, weight_layout="nk") for n, w in weights.items()}
        experts = dataclasses.replace(experts, **weights)
    targets = [call[0] for call in calls(cuda_text(jaxmoe.moe_mlp, x, routing, experts))]
    assert targets.count("jaxmoe_grouped_gemm_v1") == 2 and "jaxmoe_moe_mlp_v1" not in targets
    assert {"jaxmoe_plan_v1", "jaxmoe_finalize_v1"} <= set(targets)


@pytest.mark.parametrize("fn", NAMED)
def test_on_cuda_kernels_compute_what_has_a_name(fn):
    """In the layer's own call, and in the first product of a training step."""
    x, routing, experts = inputs(fn, jnp.bfloat16)
    named = dataclasses.replace(experts, activation=NAMED[fn])

    def loss(x, experts):
        return jaxmoe.moe_mlp(x, routing, experts).astype(jnp.float32).sum()

    def kinds(target, fn, *args):
        found = [attrs for name, attrs, *_ in calls(cuda_text(fn, *args)) if name == target]
        return [attrs["activation"]["kind"] for attrs in found]

    train, none = jax.value_and_grad(loss, (0, 1)), NO_ACTIVATION["kind"]
    kind = f"{resolve(NAMED[fn]).kind}:i64"
    assert kinds("jaxmoe_moe_mlp_v1", jaxmoe.moe_mlp, x, routing, named) == [kind]
    assert set(kinds("jaxmoe_grouped_gemm_v1", train, x, named)) == {kind, none}
    assert kinds("jaxmoe_moe_mlp_v1", jaxmoe.moe_mlp, x, routing, experts) == []
    assert set(kinds("jaxmoe_grouped_gemm_v1", train, x, experts)) == {none}


def test_one_function_is_one_program():
    x, routing, experts = inputs(step)
    traced = []

    def counted(gate, up):
        traced.append(1)
        return step(gate, up)

    run = jax.jit(jaxmoe.moe_mlp)
    own = dataclasses.replace(experts, activation=counted)
    run(x, routing, own)
    count = len(traced)
    run(x, routing, jax.tree.map(lambda a: a + 0, own))
    assert count and len(traced) == count


@pytest.mark.parametrize(
    "wrap",
    (lambda fn: fn, functools.partial, lambda fn: lambda gate, up: fn(gate, up)),
    ids=("itself", "partial", "in another"),
)
@pytest.mark.parametrize("call", (jaxmoe.moe_mlp, jaxmoe.expert_rows))
def test_a_function_of_a_traced_value_is_refused(call, wrap):
    x, routing, experts = inputs(step)

    def layer(slope):
        fn = wrap(lambda gate, up: slope * gate * up)
        return call(x, routing, dataclasses.replace(experts, activation=fn))

    message = "must not close over a traced value: the function is part of the compiled program"
    with pytest.raises(TypeError, match=message):
        jax.jit(layer)(2.0)
    jax.block_until_ready(layer(jnp.float32(2.0)))  # known, it is a constant


def with_default(gate, up, slope=1.0):
    return slope * gate * up


def test_arguments_with_defaults_are_constants():
    x, routing, experts = inputs(with_default)
    y = jaxmoe.moe_mlp(x, routing, experts)
    np.testing.assert_allclose(y, by_loop(x, routing, experts, with_default), rtol=2e-5, atol=2e-4)


class Unhashable:
    __hash__ = None

    def __call__(self, gate, up):
        return gate * up


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    (
        (lambda: 1, TypeError, "activation=<lambda> must be a function of (gate, up), or of one "),
        (lambda a, b, c: a, TypeError, "activation=<lambda> must be a function of (gate, up), or "),
        (Unhashable(), TypeError, "activation=Unhashable must be hashable: it is part of the "),
    ),
)
def test_functions_that_are_refused(fn, kind, message):
    with pytest.raises(kind) as error:
        inputs(fn)
    assert str(error.value).startswith(f"jaxmoe.Experts: {message}")


def sums(gate, up):
    return (gate * up).sum(axis=-1)


def integers(gate, up):
    return (gate > up).astype(jnp.int32)


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    (
        (sums, ValueError, "activation sums must return the shape of what it is given, ["),
        (integers, TypeError, "activation integers: its result.dtype=i32 must be"),
    ),
)
def test_results_that_are_refused(fn, kind, message):
    with pytest.raises(kind) as error:
        jaxmoe.moe_mlp(*inputs(fn))
    assert str(error.value).startswith(f"jaxmoe.Experts: {message}")


def test_one_kernel_is_refused():
    tile = GemmConfig(128, 8)
    one = dataclasses.replace(tile, one_kernel=True), tile
    layer = functools.partial(jaxmoe.moe_mlp, config=one)
    rule = r"config\[0\]\.one_kernel must be False with a function as activation"
    with pytest.raises(ValueError, match=rule):
        layer(*inputs(step, jnp.bfloat16))
