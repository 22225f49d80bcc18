"""expert_batches: the rows of expert_rows where they lie, whatever the other rows hold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import (
    Experts,
    Routing,
    dequantize,
    expert_batches,
    expert_rows,
    quantize,
    quantize_tokens,
    reference,
)
from jaxmoe._testing import GPT_OSS, assert_close, assert_equal, assert_vmap_is_loop

E, M, H, INTER = 4, 9, 128, 128
COUNTS = np.int32([4, 0, 9, 1])
USED = np.arange(M)[None, :] < COUNTS[:, None]
jitted = jax.jit(expert_batches)


def normal(rng, *shape, dtype=np.float32):
    return jnp.asarray(rng.normal(size=shape) * (shape[-2] ** -0.5 if len(shape) > 2 else 1), dtype)


@functools.cache
def example(kind="plain", dtype=jnp.float32, format=None, **of_experts):
    """Rows, those that count for nothing being NaN, and experts."""
    rng = np.random.default_rng(3)
    x = jnp.where(USED[:, :, None], rng.normal(size=(E, M, H)), np.nan).astype(dtype)
    width = INTER if kind == "up" else 2 * INTER
    first, down = normal(rng, E, width, H, dtype=dtype), normal(rng, E, H, INTER, dtype=dtype)
    biases = {"down_bias": normal(rng, E, H, dtype=dtype)}
    bias = normal(rng, E, width, dtype=dtype)
    if kind == "two":
        weights = dict(zip(("gate", "up"), jnp.split(first, 2, axis=1), strict=True))
        biases |= dict(zip(("gate_bias", "up_bias"), jnp.split(bias, 2, axis=1), strict=True))
    else:
        name = "up" if kind == "up" else "gate_up"
        weights, biases = {name: first}, biases | {f"{name}_bias": bias}
    weights["down"] = down
    layout = of_experts.setdefault("layout", "nk")
    if layout == "kn":
        weights = {n: w.swapaxes(1, 2) for n, w in weights.items()}
    if format:
        weights = {n: quantize(w, format, weight_layout=layout) for n, w in weights.items()}
    return x, Experts(**weights, **biases, **of_experts)


def by_rows(x, counts, experts, **options):
    """The same by `expert_rows`: each row a token of one choice, and its row put where it was."""
    used = jnp.arange(M)[None, :] < counts[:, None]
    ids = jnp.where(used, jnp.arange(E)[:, None], -1).reshape(-1, 1).astype(jnp.int32)
    tokens = jnp.where(used[:, :, None], x, 0).reshape(-1, H)
    out = expert_rows(tokens, Routing(ids, jnp.ones(ids.shape, jnp.float32)), experts, **options)
    rows = jnp.where(out.slot_to_row >= 0, out.rows[out.slot_to_row[:, 0]], 0)
    return rows.reshape(E, M, H)


KINDS = {
    "joined": ("plain", jnp.bfloat16, {"layout": "kn"}),
    "interleaved": ("plain", jnp.float16, {"order": "interleaved", "activation": GPT_OSS}),
    "up first": ("plain", jnp.bfloat16, {"order": "up_gate", "activation": "geglu"}),
    "two arrays": ("two", jnp.bfloat16, {}),
    "ungated": ("up", jnp.bfloat16, {"activation": "relu2"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_rows(name):
    kind, dtype, options = KINDS[name]
    x, experts = example(kind, dtype, **options)
    y = jitted(x, COUNTS, experts)
    assert y.dtype == dtype and not np.asarray(y)[~USED].any()
    assert_equal(y, jax.jit(by_rows)(x, COUNTS, experts))
    joined = lambda a, b: a if b is None else jnp.concatenate([a, b], axis=1)  # noqa: E731
    one = experts.gate is None
    given = {
        "b_gate_up": (experts.gate_up_bias if experts.up is None else experts.up_bias)
        if one
        else joined(experts.gate_bias, experts.up_bias),
        "b_down": experts.down_bias,
        "activation": experts.activation,
        "gate_up": experts.order,
        "weight_layout": experts.layout,
    }
    first = experts.first if one else joined(experts.gate, experts.up)
    of = lambda d: reference.expert_batches(x, COUNTS, first, experts.down, dtype=d, **given)  # noqa: E731
    assert_close(y, *jax.jit(lambda: (of(jnp.float32), of(dtype)))())


STATIC = {"x_scale": np.float32(0.01), "h_scale": np.float32([0.01, 0.02, 0.005, 0.01])}
FORMATS = {
    "fp8_tensor": {},
    "fp8_tensor static": STATIC,
    "fp8_channel": {},
    "fp8_block": {},
    "mxfp4": {},
    "int4_g128_zp": {},
    "int8_channel": {},
    "nvfp4 nvfp4": {"token_format": "nvfp4"},
    "int4_g128 e4m3": {"token_format": "e4m3"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    """Scales that all rows share are made of those in use."""
    kind = "two" if name.startswith(("fp8_tensor", "fp8_block", "mxfp4")) else "plain"
    x, experts = quantized_example(name, kind)
    y = jitted(x, COUNTS, experts)
    assert_equal(y, jax.jit(by_rows)(x, COUNTS, experts))
    assert np.isfinite(np.asarray(y, np.float32)).all() and not np.asarray(y)[~USED].any()
    assert np.asarray(y)[USED].any(axis=1).all()


@pytest.mark.parametrize("name", ("fp8_tensor", "nvfp4 nvfp4"))
def test_rows_of_nobody_are_in_no_scale(name):
    """Also where the activation makes something of their zeros."""
    x, experts = quantized_example(name)
    experts = dataclasses.replace(experts, gate_up_bias=None)

    def far(gate, up):
        return jnp.where((gate == 0) & (up == 0), 50.0, gate * up)

    with_far, without = (
        jitted(x, COUNTS, dataclasses.replace(experts, activation=activation))
        for activation in (far, lambda gate, up: gate * up)
    )
    assert_equal(with_far, without)


def quantized_example(name, kind="plain"):
    x, experts = example(kind, jnp.bfloat16, name.split()[0], layout="nk")
    return x, dataclasses.replace(experts, **FORMATS[name])


def test_a_quantized_layer_is_the_reference():
    x, experts = quantized_example("fp8_block")
    given = {"b_gate_up": experts.gate_up_bias, "b_down": experts.down_bias, "weight_layout": "nk"}
    weights = experts.gate_up, experts.down
    of = lambda d: reference.expert_batches(x, COUNTS, *weights, dtype=d, **given)  # noqa: E731
    exact, naive = jax.jit(lambda: (of(jnp.float32), of(jnp.bfloat16)))()
    assert_close(jitted(x, COUNTS, experts), exact, naive)


@pytest.mark.parametrize("name", ("fp8_block", "nvfp4 nvfp4"))
def test_rows_that_are_quantized_already(name):
    x, experts = quantized_example(name)
    rows = jnp.where(USED[:, :, None], x, 0).reshape(-1, H)
    q = quantize_tokens(rows, name.split()[0])
    assert_equal(jitted(q, COUNTS, experts), jitted(x, COUNTS, experts))


@pytest.mark.parametrize("dtype", (np.int8, np.uint16, np.int64))
def test_counts_out_of_range(dtype):
    x, experts = example()
    x = jnp.nan_to_num(x)
    low = 0 if dtype == np.uint16 else np.iinfo(dtype).min
    wild = np.array([np.iinfo(dtype).max, low, M, M + 1], dtype)
    y = jax.jit(lambda x: expert_batches(x, wild, experts))(x)  # NumPy's, or JAX would wrap them
    assert_equal(y, jitted(x, np.int32([M, 0, M, M]), experts))


def test_no_rows_and_one_expert():
    x, experts = example()
    one = jax.tree.map(lambda a: a[2:3], experts)
    assert_equal(jitted(x[2:3], COUNTS[2:3], one), jitted(x, COUNTS, experts)[2:3])
    for x, experts in (example(), quantized_example("fp8_tensor"), quantized_example("mxfp4")):
        assert jitted(x[:, :0], COUNTS, experts).shape == (E, 0, H)


def gradients(fn, *arrays, **options):
    """Of a loss that weighs every row in use, with respect to all that is not quantized."""
    ct = jnp.asarray(np.random.default_rng(8).normal(size=(E, M, H)), jnp.float32)

    def loss(*arrays):
        return (jnp.nan_to_num(fn(*arrays, **options).astype(jnp.float32)) * ct).sum()

    return jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)


def close(got, want, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max())


@pytest.mark.parametrize("kind", ("plain", "two", "up"))
def test_gradients_are_those_of_expert_rows(kind):
    options = {"activation": "relu2"} if kind == "up" else {}
    x, experts = example(kind, **options)
    got = gradients(lambda x, e: expert_batches(x, COUNTS, e), x, experts)
    want = gradients(lambda x, e: by_rows(x, COUNTS, e), jnp.nan_to_num(x), experts)
    close(got, want, 1e-5)
    assert not np.asarray(got[0])[~USED].any() and not np.asarray(got[1].down)[1].any()
    if kind == "plain":
        again = gradients(lambda x, e: expert_batches(x, COUNTS, e, recompute="z"), x, experts)
        close(again, got, 1e-6)


def test_gradients_of_masters_are_not_rounded():
    x, experts = example()
    narrow = x.astype(jnp.bfloat16)
    master = dataclasses.replace(experts, dtype=jnp.bfloat16)
    (got,) = gradients(lambda e: expert_batches(narrow, COUNTS, e), master)
    (want,) = gradients(lambda e: by_rows(narrow, COUNTS, e), master)
    close(got, want, 1e-5)
    assert got.gate_up.dtype == jnp.float32
    rounded = np.asarray(got.gate_up.astype(jnp.bfloat16), np.float32)
    assert (rounded != np.asarray(got.gate_up)).mean() > 0.5


@pytest.mark.parametrize(
    "name, kind",
    [
        ("fp8_channel", "plain"),
        ("int4_g128 e4m3", "plain"),
        ("fp8_tensor", "two"),
        ("mxfp4", "two"),
    ],
)
def test_gradients_beside_frozen_weights(name, kind):
    """Those of the layer with the dequantized weights; the value stays that of the quantized."""
    x, experts = quantized_example(name, kind)
    names = ("gate_up", "down") if kind == "plain" else ("gate", "up", "down")
    wide = {n: dequantize(getattr(experts, n), dtype=jnp.bfloat16) for n in names}
    plain = dataclasses.replace(experts, **wide, token_format=None)

    def of(e):
        return lambda x, bias: expert_batches(x, COUNTS, dataclasses.replace(e, down_bias=bias))

    close(gradients(of(experts), x, experts.down_bias), gradients(of(plain), x, plain.down_bias), 0)
    value = jax.jit(lambda x: jax.vjp(lambda x: expert_batches(x, COUNTS, experts), x)[0])(x)
    assert_equal(value, jitted(x, COUNTS, experts))
    with pytest.raises(NotImplementedError, match="weights .here: experts.down.scales.; take"):
        s = experts.down.scales
        down = lambda s: dataclasses.replace(experts.down, scales=s)  # noqa: E731
        jax.grad(
            lambda s: (
                expert_batches(x, COUNTS, dataclasses.replace(experts, down=down(s)))
                .astype(jnp.float32)
                .sum()
            )
        )(s)


def test_the_value_under_differentiation_is_the_same():
    x, experts = example(dtype=jnp.bfloat16)
    value, pull = jax.vjp(lambda x: jitted(x, COUNTS, experts), x)
    assert_equal(value, jitted(x, COUNTS, experts))
    _, moved = jax.jvp(lambda x: jitted(x, COUNTS, experts), (x,), (jnp.ones_like(x),))
    (dx,) = pull(jnp.ones_like(value))
    total = lambda a: np.asarray(a, np.float64).sum()  # noqa: E731
    np.testing.assert_allclose(total(moved), total(dx), rtol=2e-2)


def test_what_the_backward_pass_keeps(capsys):
    x, experts = example(dtype=jnp.bfloat16)

    def kept(**options):
        fn = lambda x, e: expert_batches(x, COUNTS, e, **options)  # noqa: E731
        jax.ad_checkpoint.print_saved_residuals(fn, x, experts)
        lines = capsys.readouterr().out.splitlines()
        return [line.split(" ")[0] for line in lines if "argument" not in line and "bf16" in line]

    assert kept() == [f"bf16[{E},{M},{2 * INTER}]"]
    assert kept(recompute="z") == []


def test_vmap_and_hessian():
    x, experts = example()
    xs = jnp.stack([x, 2 * x])
    counts = np.stack([COUNTS, COUNTS[::-1]])
    assert_vmap_is_loop(jitted, (jnp.nan_to_num(xs), jnp.asarray(counts), experts), (0, 0, None))

    def hessian_times(fn):
        def loss(x):
            return (fn(x, COUNTS, experts) ** 2).sum()

        x0 = jnp.nan_to_num(x)
        return jax.jit(lambda t: jax.jvp(jax.grad(loss), (x0,), (t,))[1])(jnp.ones_like(x0))

    close(hessian_times(expert_batches), hessian_times(by_rows), 1e-4)
