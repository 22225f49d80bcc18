"""moe_mlp: values and gradients of the whole layer against the reference."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Routing, reference
from jaxmoe._testing import (
    GPT_OSS,
    ROUTINGS,
    SMALL,
    Layer,
    assert_close,
    assert_equal,
    layer_inputs,
    normal,
)
from jaxmoe.activation import ACTIVATIONS, resolve
from tests.layers import moe_mlp

BF16 = jnp.bfloat16


def options(layer, layout="kn"):
    return {"activation": layer.activation, "gate_up": layer.gate_up, "weight_layout": layout}


def run(inputs, **kwargs):
    """`moe_mlp` on the arrays of `layer_inputs`."""
    rest = dict(inputs)
    routing = Routing(rest.pop("expert_ids"), rest.pop("weights"))
    x, w1, w2 = (rest.pop(name) for name in ("x", "w_gate_up", "w_down"))
    return moe_mlp(x, routing, w1, w2, **rest, **kwargs)


def expected(inputs, *dtypes, **kwargs):
    """The reference computed in each of `dtypes`, all in one program."""
    return jax.jit(lambda i: tuple(reference.moe_mlp(**i, **kwargs, dtype=d) for d in dtypes))(
        inputs
    )


def check(inputs, **kwargs):
    """Compares with the reference, and with a second run bit by bit. Returns the result."""
    fn = jax.jit(lambda i: run(i, **kwargs))
    out = fn(inputs)
    dtype = inputs["x"].dtype
    assert out.dtype == dtype
    if dtype == jnp.float32:
        with jax.enable_x64(True):
            wide = {n: jnp.asarray(np.float64(a)) for n, a in inputs.items() if n != "expert_ids"}
            wide = inputs | wide
            want, naive = map(np.asarray, expected(wide, jnp.float64, jnp.float32, **kwargs))
    else:
        want, naive = expected(inputs, jnp.float32, dtype, **kwargs)
    assert_close(out, want, naive)
    assert_equal(fn(inputs), out)
    return out


# Every layer, routing, dtype, layout and activation, and the token counts that matter, each at
# least once; not all against all. Where activation and order are given, they replace the layer's.
@pytest.mark.parametrize(
    "name, routing, dtype, layout, num_tokens, activation, gate_up",
    (
        ("one", "uniform", "bfloat16", "kn", 1, "swiglu", "up_gate"),
        ("one", "with_invalid", "float32", "nk", 37, "geglu", "interleaved"),
        ("odd", "uniform", "bfloat16", "nk", 37, None, None),
        ("odd", "with_invalid", "float16", "kn", 9, "gelu", None),
        ("odd", "one_expert", "float32", "kn", 130, "silu", None),
        ("all", "zipf", "float32", "kn", 5, "geglu_tanh", "gate_up"),
        ("all", "uniform", "bfloat16", "nk", 1, "gelu_tanh", None),
        ("wide", "zipf", "bfloat16", "kn", 8, None, None),
        ("wide", "with_empty", "float16", "nk", 33, "relu", None),
        ("clamped", "with_empty", "bfloat16", "kn", 64, None, None),
        ("clamped", "one_expert", "float16", "nk", 17, None, None),
        ("k22", "uniform", "bfloat16", "kn", 3, None, None),
        ("k22", "with_invalid", "float32", "nk", 12, None, None),
    ),
)
def test_value(name, routing, dtype, layout, num_tokens, activation, gate_up):
    assert routing in ROUTINGS
    layer = SMALL[name]
    given = {"activation": activation, "gate_up": gate_up}
    layer = dataclasses.replace(layer, **{n: v for n, v in given.items() if v is not None})
    rng = np.random.default_rng(num_tokens)
    inputs = layer_inputs(layer, num_tokens, routing, rng, jnp.dtype(dtype), layout)
    check(inputs, **options(layer, layout))


def test_every_activation_is_tested():
    (cases,) = (m.args[1] for m in test_value.pytestmark if m.name == "parametrize")
    tested = {resolve(case[5] or SMALL[case[0]].activation).name for case in cases}
    assert tested == {*ACTIVATIONS, GPT_OSS.name} - {"identity"}  # which is tested below


def test_identity_of_identity_experts_weighs_the_tokens():
    """With unit matrices and no activation the layer is x times the sum of its weights."""
    x = normal(np.random.default_rng(0), (7, 8))
    eye = jnp.broadcast_to(jnp.eye(8), (3, 8, 8))
    routing = Routing(
        jnp.array([[0, 2]] * 7, jnp.int32), jnp.tile(jnp.array([[0.25, 0.5]]), (7, 1))
    )
    assert_equal(moe_mlp(x, routing, eye, eye, activation="identity"), 0.75 * x)


def test_experts_before_the_local_ones_are_counted():
    """By default the last local expert is the last one, and the first is not local."""
    inputs = layer_inputs(Layer("", "", 8, 8, 3, 2), 6, "uniform", np.random.default_rng(3), BF16)
    inputs["expert_ids"] += 2  # of the experts 2, 3 and 4, of which 3 and 4 are here
    inputs |= {n: inputs[n][1:] for n in ("w_gate_up", "w_down")}
    got, want = jax.jit(
        lambda i: [run(i, expert_offset=3), run(i, expert_offset=3, num_experts=5)]
    )(inputs)
    assert_equal(got, want)
    local = inputs | {"expert_ids": inputs["expert_ids"] - 3}
    assert_close(got, *expected(local, jnp.float32, BF16))


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32), ids=("bf16", "f32"))
def test_weight_on_input(dtype):
    layer = Layer("", "", 16, 8, 5, 1)
    rng = np.random.default_rng(6)
    inputs = layer_inputs(layer, 9, "with_invalid", rng, dtype)
    inputs["weights"] = jnp.asarray(rng.uniform(0.2, 0.8, (9, 1)), jnp.float32)
    weighed = (inputs["x"].astype(jnp.float32) * inputs["weights"]).astype(dtype)
    alone = inputs | {"x": weighed, "weights": jnp.ones_like(inputs["weights"])}

    def value_and_gradient(name, arrays, **kwargs):
        """Of the sum of squares, with respect to one of the arrays."""

        def loss(a):
            y = run(arrays | {name: a}, **kwargs)
            return (y.astype(jnp.float32) ** 2).sum(), y

        grad, y = jax.jit(jax.grad(loss, has_aux=True))(arrays[name])
        return y, grad

    # the gradient reaches the weights through the input
    out, on_input = value_and_gradient("weights", inputs, apply_weight_on_input=True)
    want, of_x = value_and_gradient("x", alone)
    assert_equal(out, want)
    assert not np.array_equal(out, run(inputs))
    want = (of_x.astype(jnp.float32) * inputs["x"].astype(jnp.float32)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(on_input, want, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5)


def test_residual():
    """`residual` is added in f32 before the one rounding; tokens without experts get it exactly."""
    layer = SMALL["odd"]
    rng = np.random.default_rng(1)
    inputs = layer_inputs(layer, 21, "with_invalid", rng, jnp.bfloat16)
    inputs["expert_ids"] = inputs["expert_ids"].at[4].set(-1)
    inputs["residual"] = normal(rng, (21, layer.hidden), jnp.bfloat16)
    out = check(inputs, **options(layer))
    assert_equal(out[4], inputs["residual"][4])


@pytest.mark.parametrize("num_tokens", (0, 1))
def test_few_tokens(num_tokens):
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, num_tokens, "uniform", np.random.default_rng(1), jnp.bfloat16)
    inputs["residual"] = inputs["x"]
    check(inputs, **options(layer))

    def loss(w_down):
        return jnp.sum(run(inputs | {"w_down": w_down}, **options(layer)).astype(jnp.float32))

    grads = jax.jit(jax.grad(loss))(inputs["w_down"])
    assert bool(jnp.any(grads != 0)) == (num_tokens > 0)


def shard(inputs, first, count):
    """The arrays of the device that holds experts first .. first + count - 1."""
    split = ("w_gate_up", "w_down", "b_gate_up", "b_down")
    return {n: a[first : first + count] if n in split else a for n, a in inputs.items()}


def test_windows_of_experts_add_up():
    """The layer is the sum over the windows; a window is that of the reference."""
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, 9, "with_invalid", np.random.default_rng(2), jnp.float32)
    parts = []
    for first, count in ((0, 2), (2, 3)):
        window = {"num_experts": 5, "expert_offset": first, **options(layer)}
        part = shard(inputs, first, count)
        parts.append(check(part, **window))
    whole = run(inputs, **options(layer))
    # Two roundings to f32 instead of one, of sums of the size of `whole`.
    np.testing.assert_allclose(sum(parts), whole, rtol=0, atol=4e-6 * np.abs(whole).max())


def test_expert_map():
    """A map may permute, leave out, and hold garbage; out of range means not here."""
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, 15, "uniform", np.random.default_rng(3), jnp.bfloat16)
    local = shard(inputs, 0, 3)
    big = np.iinfo(np.int32).max
    expert_map = jnp.array([2, -1, 0, big, 1], jnp.int32)
    check({**local, "expert_map": expert_map}, **options(layer))


def test_nan_stays_in_its_token():
    layer = SMALL["wide"]
    inputs = layer_inputs(layer, 24, "uniform", np.random.default_rng(4), jnp.bfloat16)
    clean = run(inputs, **options(layer))
    dirty = run(inputs | {"x": inputs["x"].at[5].set(jnp.nan)}, **options(layer))
    assert jnp.isnan(dirty[5]).all()
    assert_equal(dirty.at[5].set(0), clean.at[5].set(0))


def test_garbage_ids_change_nothing_else():
    """Ids of no expert contribute nothing, even with NaN as their weight."""
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, 12, "uniform", np.random.default_rng(4), jnp.bfloat16)
    big = np.iinfo(np.int32)
    ids = inputs["expert_ids"].at[3].set(jnp.array([big.max, big.min, layer.num_experts]))
    weights = inputs["weights"].at[3].set(jnp.nan)
    out = run(inputs | {"expert_ids": ids, "weights": weights}, **options(layer))
    assert_equal(out[3], jnp.zeros_like(out[3]))
    clean = run(inputs, **options(layer))
    assert_equal(out.at[3].set(0), clean.at[3].set(0))


def test_relabelling_experts_changes_nothing():
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, 12, "uniform", np.random.default_rng(6), jnp.bfloat16)
    order = np.array([3, 0, 4, 1, 2])
    moved = {n: a[order] if n.startswith(("w_", "b_")) else a for n, a in inputs.items()}
    moved["expert_ids"] = jnp.array(np.argsort(order), jnp.int32)[inputs["expert_ids"]]
    assert_equal(run(moved, **options(layer)), run(inputs, **options(layer)))


@pytest.mark.parametrize("name, layout", (("odd", "kn"), ("all", "nk")))
def test_gradient(name, layout):
    """Of every floating argument, at a layer with invalid ids and experts without rows."""
    layer = SMALL[name]
    rng = np.random.default_rng(8)
    inputs = layer_inputs(layer, 10, "with_invalid", rng, jnp.float32, layout)
    inputs["residual"] = normal(rng, (10, layer.hidden))
    ids, seed = inputs.pop("expert_ids"), normal(rng, (10, layer.hidden))

    def gradients(fn, arrays, **kwargs):
        def loss(arrays):
            y = fn({**arrays, "expert_ids": ids}, **options(layer, layout), **kwargs)
            return jnp.sum(jnp.sin(y) * seed.astype(y.dtype))

        return jax.jit(jax.grad(loss))(arrays)

    ours = gradients(run, inputs)
    naive = gradients(lambda i, **kw: reference.moe_mlp(**i, **kw), inputs)
    with jax.enable_x64(True):
        wide = {n: a.astype("float64") for n, a in inputs.items()}
        want = gradients(lambda i, **kw: reference.moe_mlp(**i, **kw), wide, dtype=jnp.float64)
        want = jax.tree.map(np.asarray, want)
    jax.tree.map(assert_close, ours, want, naive)
    unused = np.setdiff1d(np.arange(layer.num_experts), np.asarray(ids))
    assert_equal(ours["w_down"][unused], jnp.zeros_like(ours["w_down"][unused]))


# What is compiled once: tokens, hidden, intermediate, experts, choices, activation, layout.
PROGRAMS = (
    (1, 8, 16, 8, 4, "relu2", "kn"),
    (6, 24, 1, 3, 2, "swiglu", "nk"),
    (40, 8, 16, 3, 3, "geglu_tanh", "kn"),
)


@functools.cache
def compiled(program):
    """The layer of one of PROGRAMS, and jitted functions for it: the result, and `expected`."""
    num_tokens, *sizes, activation, layout = program
    layer = Layer("", "", *sizes, activation)
    kwargs, dtypes = options(layer, layout), (jnp.float32, jnp.bfloat16)
    both = jax.jit(lambda i: tuple(reference.moe_mlp(**i, **kwargs, dtype=d) for d in dtypes))
    return layer, num_tokens, layout, jax.jit(lambda i: run(i, **kwargs)), both


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    program=st.sampled_from(PROGRAMS),
    routing=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 2**31),
)
def test_random_data(program, routing, seed):
    layer, num_tokens, layout, fn, both = compiled(program)
    rng = np.random.default_rng(seed)
    inputs = layer_inputs(layer, num_tokens, routing, rng, jnp.bfloat16, layout)
    assert_close(fn(inputs), *both(inputs))
