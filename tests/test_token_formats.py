"""Tokens quantized beside packed weights: against NumPy, wherever a layer runs, what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import (
    Experts,
    GemmConfig,
    Routing,
    autotuning,
    dequantize,
    expert_parallel,
    expert_rows,
    explain,
    export_checks,
    finalize,
    mlp,
    moe_mlp,
    quantize,
    quantize_tokens,
)
from jaxmoe._ep.checks import OPTIONS
from jaxmoe._formats import QUANTIZED, TOKEN_FORMATS, token_codes, token_formats, with_tokens
from jaxmoe._jax import targets as _targets
from jaxmoe._mlp import op
from jaxmoe._mlp.operands import join
from jaxmoe._testing import GPT_OSS, Layer, assert_close, assert_equal, layer_inputs
from tests import packed_oracle, token_oracle
from tests.lowered import calls, cuda_text, layer_call

PAIRS = tuple((w, t) for w in QUANTIZED for t in token_formats(w))
LAYER = Layer("", "two superblocks of H, or one", 128, 128, 4, 2, bias=True)
STATIC = {"x_scale": np.float32(0.002), "h_scale": np.float32([0.002, 0.004, 0.001, 0.003])}
E4M3_STATIC = {"x_scale": np.float32(0.01), "h_scale": np.float32([0.01, 0.02, 0.005, 0.01])}
jitted = jax.jit(moe_mlp)
quantized = jax.jit(
    lambda w, format: quantize(w, format, weight_layout="nk"), static_argnames="format"
)


def test_pairs():
    assert PAIRS == (
        *(("mxfp4", "mxfp4"), ("mxfp4", "mxfp8"), ("mxfp4", "e4m3")),
        *(("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")),
        *(("int4_g128", "e4m3"), ("int4_g128_zp", "e4m3")),
    )
    assert set(TOKEN_FORMATS) == {token for _, token in PAIRS}


@functools.cache
def inputs(layer, dtype):
    return layer_inputs(layer, 8, "with_invalid", np.random.default_rng(5), dtype, "nk")


def case(weights, token_format, layer=LAYER, two=False, dtype=jnp.bfloat16, **static):
    """Experts with quantized tokens, tokens, and choices."""
    i = inputs(layer, dtype)
    parts = {"gate_up": i["w_gate_up"], "down": i["w_down"]}
    biases = {"gate_up_bias": i["b_gate_up"], "down_bias": i["b_down"]}
    if two:
        gate_up, bias = parts.pop("gate_up"), biases.pop("gate_up_bias")
        parts |= dict(zip(("gate", "up"), jnp.split(gate_up, 2, axis=1), strict=True))
        biases |= dict(zip(("gate_bias", "up_bias"), jnp.split(bias, 2, axis=1), strict=True))
    e = Experts(
        **{n: quantized(w, weights) for n, w in parts.items()},
        **biases,
        **{n: jnp.asarray(s) for n, s in static.items()},
        layout="nk",
        activation=layer.activation,
        order=layer.gate_up,
        token_format=token_format,
    )
    return i["x"], Routing(i["expert_ids"], i["weights"], layer.num_experts), e


def wanted(x, routing, e, low):
    """The oracle's layer of the same weights."""
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    plain = lambda q: f64(dequantize(q, dtype=jnp.float32))  # noqa: E731
    if e.gate is None:
        w1, b1 = plain(e.gate_up), f64(e.gate_up_bias)
    else:
        w1 = np.concatenate([plain(e.gate), plain(e.up)], axis=1)
        b1 = np.concatenate([f64(e.gate_bias), f64(e.up_bias)], axis=1)
    act = {"swiglu": "swiglu", "relu2": "relu2"}.get(e.activation, "gpt_oss")
    scales = None if e.x_scale is None else np.asarray(e.x_scale)
    scales = scales, None if e.h_scale is None else np.broadcast_to(e.h_scale, e.num_experts)
    return token_oracle.layer(
        *(np.asarray(a) for a in (x, routing.expert_ids, routing.weights)),
        *(w1, b1, plain(e.down), f64(e.down_bias)),
        name=e.token_format,
        act=act,
        order=e.order,
        dtype=x.dtype,
        scales=scales,
        low=low,
    )


def check(y, x, routing, e):
    assert_close(y, wanted(x, routing, e, False), wanted(x, routing, e, True))


def close(got, want):
    """Another order of a sum may round an activation, and so a token, to its neighbour."""
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())


CASES = {
    "mxfp4": ("mxfp4", "mxfp4", {"activation": "relu2"}, {}),
    "mxfp4 mxfp8": ("mxfp4", "mxfp8", {"activation": GPT_OSS, "gate_up": "interleaved"}, {}),
    "mxfp4 e4m3": ("mxfp4", "e4m3", {"activation": "relu2"}, {}),
    "mxfp8 two": ("mxfp8", "mxfp8", {}, {"two": True}),
    "nvfp4": ("nvfp4", "nvfp4", {}, {}),
    "nvfp4 static": ("nvfp4", "nvfp4", {"gate_up": "up_gate"}, STATIC),
    "w4a8": ("int4_g128", "e4m3", {"gate_up": "up_gate"}, {}),
    "w4a8 static": ("int4_g128_zp", "e4m3", {}, E4M3_STATIC),
}


@pytest.mark.parametrize("name", CASES)
def test_layer(name):
    weights, token_format, options, more = CASES[name]
    x, routing, e = case(weights, token_format, dataclasses.replace(LAYER, **options), **more)
    y = jitted(x, routing, e)
    check(y, x, routing, e)
    if name == "w4a8":  # rows, and several axes of tokens
        rows = jax.jit(expert_rows)(x, routing, e)
        assert_equal(finalize(rows.rows, rows, rows.weights), y)
        per_token = (a.reshape(2, 4, -1) for a in (routing.expert_ids, routing.weights))
        lead = Routing(*per_token, routing.num_experts)
        assert_equal(jitted(x.reshape(2, 4, -1), lead, e), y.reshape(2, 4, -1))


@pytest.mark.parametrize("token_format", TOKEN_FORMATS)
def test_tokens_are_rounded_by_the_formulas(token_format):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 128)) * rng.uniform(0.01, 9, (6, 4)).repeat(32, 1)
    x[1], x[2, :64] = 0, 0
    weights = next(w for w, t in PAIRS if t == token_format)
    format = with_tokens(QUANTIZED[weights], token_format)
    static = np.float32(0.003) if format.static_scales else None
    by_row = None if static is None else np.resize(static, 6)
    given = x.astype(jnp.bfloat16)
    quantize_each = jax.jit(lambda x, *scales: [format.tokens(x, s) for s in scales])
    for scale, got in zip((None, static), quantize_each(given, None, static, by_row), strict=False):
        values, factor = token_oracle.rounded(given, token_format, scale)
        np.testing.assert_array_equal(np.asarray(got.values, np.float64), values)
        factor = np.reshape(factor, np.shape(got.scales))
        np.testing.assert_array_equal(np.asarray(got.scales, np.float64), factor)


def test_every_number_of_a_token_is_exact_in_the_dtype_of_its_layer():
    """All codes with all scales: but for overflow and numbers below 2^-126, which may be zeros."""
    factors = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 8))
    for name, group in (("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)):
        known = QUANTIZED[name]
        numbers = packed_oracle.E4M3 if name == "mxfp8" else packed_oracle.e2m1(np.arange(16))
        codes = np.resize(np.arange(len(numbers), dtype=np.uint8), (256, 8 * group))
        got = np.asarray(jax.jit(known.numbers)(codes, factors), np.float64)
        powers = np.where(factors == 255, np.nan, np.exp2(factors - 127.0))
        scales = packed_oracle.E4M3[factors] if name == "nvfp4" else powers
        want = numbers[codes] * np.repeat(scales, group, axis=1)
        tiny = np.abs(want) < 2.0**-126
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got[~tiny], want.astype(np.float32)[~tiny])
            for dtype in map(np.dtype, known_dtypes(name)):
                there = want.astype(dtype).astype(np.float64)
                np.testing.assert_array_equal(
                    np.where(tiny | np.isinf(there), 0, there),
                    np.where(tiny | np.isinf(there), 0, want),
                )
                # What is too large is in groups that no bf16 or float32 tokens make.
                assert name != "nvfp4" or np.isfinite(there[~np.isnan(want)]).all()
        assert (np.abs(got[tiny]) < 2.0**-126).all()
    for name in ("mxfp4", "mxfp8"):
        most = QUANTIZED[name].coded(jnp.full((1, 32), 3.4e38, jnp.float32))
        assert np.isfinite(np.asarray(QUANTIZED[name].numbers(*most)).astype(jnp.bfloat16)).all()


def known_dtypes(name):
    return (jnp.bfloat16, jnp.float16) if name == "nvfp4" else (jnp.bfloat16,)


def test_derivatives_are_those_of_plain_tokens():
    x, routing, e = case("int4_g128", "e4m3")
    plain = dataclasses.replace(e, token_format=None)

    def gradients(e):
        def loss(x, weights, bias):
            choices = Routing(routing.expert_ids, weights, routing.num_experts)
            y = moe_mlp(x, choices, dataclasses.replace(e, down_bias=bias))
            return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(128.0))[None])

        given = x, routing.weights, e.down_bias
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*given)

    (value, got), (other, want) = gradients(e), gradients(plain)
    assert value != other
    jax.tree.map(assert_equal, got, want)


@pytest.mark.parametrize("name", ("nvfp4 static", "w4a8"))
def test_vmap_is_a_loop(name):
    weights, token_format, _, more = CASES[name]
    x, routing, e = case(weights, token_format, **more)
    batch = jnp.stack([x, -2 * x])
    mapped = jax.jit(jax.vmap(lambda x: moe_mlp(x, routing, e)))(batch)
    for i in range(2):
        assert_equal(mapped[i], jitted(batch[i], routing, e))


DIVIDED = {
    "E": ("a", None, None, "a", None, None),
    "I of the first": (None, "a", None, None, None, None),
    "H": (None, None, "a", None, "a", None),
}


@pytest.mark.parametrize(
    ("name", "axis", "kind"),
    (
        ("nvfp4", "E", AxisType.Auto),
        ("nvfp4 static", "E", AxisType.Explicit),
        ("mxfp4 mxfp8", "H", AxisType.Auto),
        ("w4a8", "I of the first", AxisType.Explicit),
    ),
)
def test_on_a_mesh(name, axis, kind):
    weights, token_format, options, more = CASES[name]
    x, routing, e = case(weights, token_format, dataclasses.replace(LAYER, **options), **more)
    want = jitted(x, routing, e)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    specs = DIVIDED[axis]
    place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))  # noqa: E731
    put = lambda w, spec: dataclasses.replace(  # noqa: E731
        w, values=place(w.values, *spec), scales=place(w.scales, spec[0])
    )
    with jax.set_mesh(mesh):
        x, routing, everywhere = jax.tree.map(place, (x, routing, e))
        divided = dataclasses.replace(
            everywhere, gate_up=put(e.gate_up, specs[:3]), down=put(e.down, specs[3:])
        )
        if name == "nvfp4 static":  # each device has the scales of its own experts
            rows = jax.jit(expert_rows)(x, routing, divided)
            return close(finalize(rows.rows, rows, rows.weights), want)
        tokens = place(x, "a") if axis == "E" else x
        return close(jitted(tokens, routing, divided), want)


@pytest.mark.parametrize("split", (False, True), ids=("whole tokens", "split tokens"))
def test_devices_with_experts_of_their_own_round_tokens_in_their_calls(split):
    """Tokens that are gathered are quantized before: bytes of e4m3, which are numbers then."""
    x, routing, e = case("int4_g128", "e4m3", x_scale=np.float32(0.01))
    want = jitted(x, routing, e)
    kinds = {"axis_types": (AxisType.Explicit,), "devices": jax.devices()[:2]}
    mesh = jax.make_mesh((2,), ("a",), **kinds)
    with jax.set_mesh(mesh):
        place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))  # noqa: E731
        x, routing, whole = jax.tree.map(place, (x, routing, e))
        tokens = place(x, "a") if split else x
        down, first = (
            dataclasses.replace(w, values=place(w.values, "a"), scales=place(w.scales, "a"))
            for w in (e.down, e.gate_up)
        )
        divided = dataclasses.replace(whole, gate_up=first, down=down)
        with _targets.force_cuda_lowering():
            ops = explain(moe_mlp, tokens, routing, divided).ops
        layers = [op for op in ops if op.op == "jaxmoe_moe_mlp"]
        assert [op.cuda_attrs["tokens"] for op in layers] == [1]
        given, made = ("f32[]" in layers[0].operands, "f32[1]" in layers[0].operands)
        assert (given, made) == (split, not split)  # the static scale of x, beside bytes or not
        close(jitted(tokens, routing, divided), want)


def test_expert_parallel():
    """The dynamic scale of x is one of all devices; that of activations would be each one's."""
    x, routing, e = case("nvfp4", "nvfp4", h_scale=STATIC["h_scale"])
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    call = functools.partial(expert_parallel.sharded_moe_mlp, mesh=mesh, axis_name="e")
    close(jax.jit(call)(x, routing, e), jitted(x, routing, e))


def test_exported_for_any_number_of_tokens():
    x, routing, e = case("nvfp4", "nvfp4")
    (t,) = jax.export.symbolic_shape("t")
    struct = lambda a: jax.ShapeDtypeStruct((t, *a.shape[1:]), a.dtype)  # noqa: E731
    layer = lambda x, ids, weights: moe_mlp(x, Routing(ids, weights), e)  # noqa: E731
    args = x, routing.expert_ids, routing.weights
    program = jax.export.export(jax.jit(layer), disabled_checks=export_checks())(*map(struct, args))
    assert_equal(program.call(*args), jitted(x, routing, e))


# What the call of a layer is told: how it rounds tokens, and floats for the scales of 16 rows.
IN_ONE_CALL = {
    "mxfp4": (2, 0),
    "mxfp4 mxfp8": (3, 0),
    "mxfp4 e4m3": (1, 32),
    "mxfp8 two": (3, 0),
    "nvfp4 static": (4, 32),
    "w4a8": (1, 32),
    "w4a8 static": (1, 32),
}


@pytest.mark.parametrize("name", IN_ONE_CALL)
def test_the_layer_is_one_call(name):
    """With no other buffers than plain tokens need, but for the scales of rows."""
    weights, token_format, options, more = CASES[name]
    x, routing, e = case(weights, token_format, dataclasses.replace(LAYER, **options), **more)
    code, floats = IN_ONE_CALL[name]
    (call,) = calls(cuda_text(moe_mlp, x, routing, e))
    attrs, operands, results = layer_call(call)
    assert attrs["tokens"] == f"{code}:i64"
    assert attrs["format"] == f"{QUANTIZED[weights].code}:i64"
    assert attrs["gemm1"]["gather"] == "1:i64" and attrs["gemm1"]["one_kernel"] == "0:i64"
    scales = {n: operands.get(n) for n in ("x_scale", "h_scale", "x_scales")}
    of_experts = {"x_scale": "1xf32", "h_scale": "4xf32"} if more.get("x_scale") else {}
    assert {n: t for n, t in scales.items() if t is not None} == of_experts
    plain = dataclasses.replace(e, token_format=None, x_scale=None, h_scale=None)
    (other,) = calls(cuda_text(moe_mlp, x, routing, plain))
    others, _, wanted = layer_call(other)
    assert others["tokens"] == "0:i64" and "floats" not in wanted
    assert results == wanted | ({"floats": f"{floats}xf32"} if floats else {})
    (rows,) = calls(cuda_text(expert_rows, x, routing, e))
    assert layer_call(rows)[0] == {**attrs, "finalize": "0:i64"}
    with _targets.force_cuda_lowering():
        (op,) = explain(moe_mlp, x, routing, e).ops
    assert op.cuda_reason is None and f"tokens: {token_format}" in str(op)
    assert f"format: {weights}" in str(op)


def test_one_static_scale_is_enough_for_one_call():
    """But not in nvfp4, where the other is made of all tokens."""
    for scale in ({"x_scale": np.float32(0.01)}, {"h_scale": np.float32(0.01)}):
        x, routing, e = case("int4_g128", "e4m3", **scale)
        (call,) = calls(cuda_text(moe_mlp, x, routing, e))
        assert {n: layer_call(call)[1][n] for n in scale} == dict.fromkeys(scale, "1xf32")
        x, routing, e = case("nvfp4", "nvfp4", **scale)
        assert len(calls(cuda_text(moe_mlp, x, routing, e))) > 1


@pytest.mark.parametrize("name", ("nvfp4", "w4a8"))
def test_other_layers_are_products_of_the_kernels(name):
    """Two packed products of bf16 tokens: a scale of all tokens, or an activation of the caller."""
    weights, token_format, _, more = CASES[name]
    x, routing, e = case(weights, token_format, **more)
    if name == "w4a8":
        e = dataclasses.replace(e, activation=lambda g, u: g * jax.nn.sigmoid(g) * u)
    layer = functools.partial(moe_mlp, config=(GemmConfig(128, 160), GemmConfig(128, 160)))
    products = [c for c in calls(cuda_text(layer, x, routing, e)) if "grouped_gemm" in c[0]]
    packed = [c for c in products if c[1]["format"] == f"{QUANTIZED[weights].code}:i64"]
    assert len(packed) == 2 and all(ins[0].endswith("xbf16") for _, _, ins, _ in packed)
    assert len(products) == 2 + 2 * (name == "w4a8")  # biases after the scales of rows
    assert [c[1]["config"]["token_tile"] for c in packed] == ["160:i64"] * 2
    with _targets.force_cuda_lowering():
        ops = [op for op in explain(moe_mlp, x, routing, e).ops if op.op == "jaxmoe_gmm"]
    assert len(ops) == len(products) and all(op.cuda_reason is None for op in ops)


@pytest.mark.parametrize(
    ("weights", "tokens"), [("mxfp4", "mxfp8"), ("int4_g128", "e4m3"), ("nvfp4", "nvfp4")]
)
def test_tokens_that_are_quantized_already_are_in_the_call(weights, tokens):
    """Their numbers, and their scales; rows between the products are rounded by the rule."""
    static = {"h_scale": np.float32(0.002)} if tokens == "nvfp4" else {}
    x, routing, e = case(weights, tokens, **static)
    q = quantize_tokens(x, "fp8_channel" if tokens == "e4m3" else tokens)
    (call,) = calls(cuda_text(moe_mlp, q, routing, e))
    attrs, operands, _ = layer_call(call)
    assert attrs["tokens"] == f"{token_codes()[tokens]}:i64"
    rows = f"{x.shape[0]}x{x.shape[1]}xbf16"
    scales = f"{x.shape[0]}xf32" if tokens == "e4m3" else "f32"
    assert (operands["x"], operands["x_scales"]) == (rows, scales)
    close(jitted(q, routing, e), jitted(x, routing, e))


@pytest.mark.parametrize("gather", (True, False))
def test_rows_of_x_that_a_call_copies(gather):
    """Numbers, of tokens or in the order of experts; those that are given in that order alone."""
    x, routing, e = case("mxfp4", "mxfp8")
    config = GemmConfig(128, 16, gather=gather), GemmConfig(128, 16)
    rows = routing.expert_ids.size
    wanted = {True: (x.shape[0], 0), False: (rows, rows)}[gather]
    options = {"window": (4, 0, None), "residual": None, "gather_weights": None}
    for tokens, want in zip((x, quantize_tokens(x, "mxfp8")), wanted, strict=True):
        asked = OPTIONS | {"config": config}
        a, layer = mlp.prepared("moe_mlp", tokens, routing, e, finalize=True, **options, **asked)
        assert op.moved_rows(join(a, layer), layer=layer) == want


def test_tiles_of_a_layer_that_rounds_tokens_between_its_products():
    """Its two products are two launches, and their times are those of this token format."""
    x, routing, e = case("int4_g128", "e4m3")
    tile = GemmConfig(128, 16)
    one = (dataclasses.replace(tile, one_kernel=True), tile)
    message = "config[0].one_kernel must be False if tokens are quantized. Got config: a tuple."
    with pytest.raises(ValueError, match=re.escape(message)):
        moe_mlp(x, routing, e, config=one)
    with _targets.force_cuda_lowering():
        formats = [
            autotuning.problems(moe_mlp, x, routing, layer)
            for layer in (e, dataclasses.replace(e, token_format=None))
        ]
    formats = [problem.format for found in formats for problem in found]
    assert formats == ["int4_g128, tokens e4m3", "int4_g128"]


def test_float32_tokens_have_no_kernel():
    x, routing, e = case("mxfp8", "mxfp8", dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="x.dtype=f32 must be bf16 or f16 on CUDA"):
        cuda_text(moe_mlp, x, routing, e)


def test_batch_invariant_needs_static_scales():
    x, routing, e = case("nvfp4", "nvfp4")
    with pytest.raises(ValueError, match="batch_invariant=True needs experts.x_scale with nvfp4"):
        moe_mlp(x, routing, e, batch_invariant=True)
    x, routing, e = case("nvfp4", "nvfp4", **STATIC)
    few = Routing(routing.expert_ids[:4], routing.weights[:4], 4)
    fixed = jax.jit(functools.partial(moe_mlp, batch_invariant=True))
    assert_equal(fixed(x[:4], few, e), fixed(x, routing, e)[:4])
    x, routing, e = case("mxfp4", "mxfp8")
    assert jax.eval_shape(fixed, x, routing, e).shape == x.shape


def test_nan_stays_in_its_token():
    x, routing, e = case("nvfp4", "nvfp4", **STATIC)
    for bad in (np.nan, np.inf):
        y = np.asarray(jitted(x.at[3, 7].set(bad), routing, e), np.float32)
        want = np.asarray(jitted(x, routing, e), np.float32)
        others = np.arange(8) != 3
        np.testing.assert_array_equal(y[others], want[others])
        used = (np.asarray(routing.expert_ids[3]) >= 0) & (np.asarray(routing.expert_ids[3]) < 4)
        assert np.isnan(y[3]).all() == (np.isnan(bad) and used.any())
    wrong = dataclasses.replace(e, x_scale=jnp.float32(0))
    y = np.asarray(jitted(x, routing, wrong), np.float32)
    ids = np.asarray(routing.expert_ids)
    np.testing.assert_array_equal(np.isnan(y).all(axis=1), ((ids >= 0) & (ids < 4)).any(axis=1))


def test_other_dtypes_of_tokens():
    x, routing, e = case("mxfp8", "mxfp8", dtype=jnp.float32)
    check(jitted(x, routing, e), x, routing, e)
    x, routing, e = case("int4_g128", "e4m3", dtype=jnp.float16)
    check(jitted(x, routing, e), x, routing, e)


@pytest.mark.parametrize(
    ("weights", "token_format", "message"),
    [
        ("mxfp4", "fp4", "token_format='fp4' must be one of mxfp4, mxfp8, e4m3, nvfp4"),
        ("mxfp4", "nvfp4", "token_format='nvfp4' must be None or 'mxfp4' or 'mxfp8' or 'e4m3' with "
         "weights in mxfp4"),
        ("nvfp4", "mxfp4", "must be None or 'nvfp4' with weights in nvfp4"),
        ("int4_g64", "e4m3", "token_format='e4m3' must be None with weights in int4_g64"),
        ("fp8_block", "e4m3", "token_format='e4m3' must be None with weights in fp8_block"),
    ],
)  # fmt: skip
def test_pairs_that_do_not_exist_are_refused(weights, token_format, message):
    _, _, e = case(weights, None)
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(e, token_format=token_format)


def test_refusals():
    x, routing, e = case("mxfp4", "mxfp8")
    i = inputs(LAYER, jnp.bfloat16)
    with pytest.raises(ValueError, match="must be None with weights that are not quantized"):
        Experts(gate_up=i["w_gate_up"], down=i["w_down"], layout="nk", token_format="mxfp8")
    with pytest.raises(
        NotImplementedError, match="x.dtype=f16 must be bf16 or f32 with token_form"
    ):
        small = jax.tree.map(lambda a: a.astype(jnp.float16) if a.dtype == x.dtype else a, e)
        moe_mlp(x.astype(jnp.float16), routing, small)
    with pytest.raises(ValueError, match="x_scale must be None because the weights are mxfp4"):
        moe_mlp(x, routing, dataclasses.replace(e, x_scale=jnp.float32(1)))
    with pytest.raises(NotImplementedError, match="with respect to quantized tokens"):
        x, routing, e = case("nvfp4", "nvfp4", **STATIC)
        of_scale = lambda s: moe_mlp(x, routing, dataclasses.replace(e, x_scale=s)).sum()  # noqa: E731
        jax.grad(of_scale)(e.x_scale)
