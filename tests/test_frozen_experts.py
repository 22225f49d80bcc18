"""Derivatives through quantized experts: those of the layer with the dequantized ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Experts, QuantizedArray, Routing, expert_parallel
from jaxmoe._formats import QUANTIZED
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import PACKED, Layer, assert_equal, layer_inputs
from tests.lowered import cuda_text

SHAPE = Layer("", "one block of 128 each way, or two", 256, 128, 4, 2, bias=True)
# A format of each kind but for those of `test_layers`: programs of all of them would take long.
FORMATS = ("fp8_tensor", "fp8_block", "mxfp4", "int4_g128_zp", "int8_channel")
OF_LAYERS = {"two": ("fp8_channel", "nvfp4"), "rows": ("fp8_channel", "nvfp4")}
OF_LAYERS |= {"recompute": ("fp8_channel",), "remat": ("fp8_channel",), "residual": ("mxfp8",)}


def experts(name, dtype=jnp.float32, two=False, order="gate_up", seed=0):
    """Experts in a format, and the same dequantized."""
    rng = np.random.default_rng(seed)
    if name.startswith("int4"):
        dtype = jnp.bfloat16
    i = layer_inputs(SHAPE, 1, "uniform", rng, dtype, "nk")
    parts = {"gate_up": i["w_gate_up"], "down": i["w_down"]}
    biases = {"gate_up_bias": i["b_gate_up"], "down_bias": i["b_down"]}
    if two:
        gate, up = jnp.split(parts.pop("gate_up"), 2, axis=1)
        gate_bias, up_bias = jnp.split(biases.pop("gate_up_bias"), 2, axis=1)
        parts |= {"gate": gate, "up": up}
        biases |= {"gate_bias": gate_bias, "up_bias": up_bias}
    static = {"layout": "nk", "order": order}
    q = {n: jaxmoe.quantize(w, name, weight_layout="nk") for n, w in parts.items()}
    biases = {n: b.astype(jnp.float32) for n, b in biases.items()}
    plain = {n: jaxmoe.dequantize(w, dtype=jnp.float32) for n, w in q.items()}
    return Experts(**q, **biases, **static), Experts(**plain, **biases, **static)


def tokens(num_tokens=16, seed=1):
    rng = np.random.default_rng(seed)
    i = layer_inputs(SHAPE, num_tokens, "with_invalid", rng, jnp.float32)
    return i["x"], Routing(i["expert_ids"], i["weights"], 4)


def loss_of(layer):
    """A loss that is linear in y: its cotangent does not depend on the value."""

    def loss(moving, e, routing):
        routing = Routing(routing.expert_ids, moving["weights"], routing.num_experts)
        biases = {n: b for n, b in moving.items() if n.endswith("bias")}
        e = Experts(**{n: getattr(e, n) for n in _FIELDS if n not in biases}, **biases)
        y = layer(moving["x"], routing, e)
        return jnp.sum(y * jnp.cos(jnp.arange(y.shape[-1], dtype=y.dtype))[None])

    return loss


_FIELDS = (
    *("gate_up", "down", "gate", "up", "gate_up_bias", "gate_bias", "up_bias", "down_bias"),
    *("order", "layout"),
)


def moving_of(e, x, routing):
    biases = {n: getattr(e, n) for n in _FIELDS if n.endswith("bias")}
    return {"x": x, "weights": routing.weights} | {n: b for n, b in biases.items() if b is not None}


def close(got, want):
    def one(a, b):
        scale = float(jnp.abs(b).max()) + 1e-6
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=1e-5)

    jax.tree.map(one, got, want)


@functools.cache
def program(layer):
    """Compiled once for experts of the same types: plain ones are those of any format."""
    return jax.jit(jax.value_and_grad(loss_of(layer)))


def gradients(layer, e, x, routing):
    return program(layer)(moving_of(e, x, routing), e, routing)[1]


def kinds(names):
    """How formats of these names are computed, and what shares a scale in them."""
    formats = [QUANTIZED[name] for name in names]
    return {(type(f), f.weight_scales, f.token_scales) for f in formats}


def test_every_kind_of_format_has_its_gradients_tested():
    assert kinds([*FORMATS, *(n for names in OF_LAYERS.values() for n in names)]) == kinds(
        QUANTIZED
    )


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_dequantized_weights(name):
    q, plain = experts(name, order="interleaved")
    x, routing = tokens()
    close(gradients(jaxmoe.moe_mlp, q, x, routing), gradients(jaxmoe.moe_mlp, plain, x, routing))


def rows(x, routing, e):
    out = jaxmoe.expert_rows(x, routing, e)
    return jaxmoe.finalize(out.rows, out, out.weights)


LAYERS = {
    "recompute": functools.partial(jaxmoe.moe_mlp, recompute="z"),
    "rows": rows,
    "residual": lambda x, *rest: jaxmoe.moe_mlp(x, *rest, residual=x),
    "remat": jax.checkpoint(jaxmoe.moe_mlp),
}


def joined(e):
    """Experts of one array of gates before ups: what those of two are, on the host."""
    if e.gate is None:
        return e
    both = {"gate_up": (e.gate, e.up), "gate_up_bias": (e.gate_bias, e.up_bias)}
    both = {n: jnp.asarray(np.concatenate(pair, axis=1)) for n, pair in both.items()}
    return Experts(**both, down=e.down, down_bias=e.down_bias, order=e.order, layout=e.layout)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in OF_LAYERS.items() for name in names]
)
def test_layers(kind, name):
    """Against the plain layer of one array, whose program is compiled once for all of them."""
    q, plain = experts(name, two=kind == "two")
    x, routing = tokens()
    got = gradients(LAYERS.get(kind, jaxmoe.moe_mlp), q, x, routing)
    want = gradients(jaxmoe.moe_mlp, joined(plain), x, routing)
    if kind == "two":
        pair = np.split(np.asarray(want.pop("gate_up_bias")), 2, axis=1)
        want |= dict(zip(("gate_bias", "up_bias"), pair, strict=True))
    if kind == "residual":
        want["x"] = want["x"] + np.cos(np.arange(SHAPE.hidden, dtype=np.float32))[None]
    if kind == "rows" and name not in PACKED:  # finalize takes its derivative at the rows there are
        del got["weights"], want["weights"]
    close(got, want)


value = jax.jit(jaxmoe.moe_mlp)


@jax.jit
def derivatives(x, routing, e):
    """The value with its tangent, gradients of a batch, and a second derivative."""
    layer = lambda x: jaxmoe.moe_mlp(x, routing, e)  # noqa: E731
    first = jax.grad(lambda x: layer(x).sum())
    batch = jax.vmap(first)(jnp.stack([x, 2 * x, -x]))
    second = jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))(x)
    y, moved = jax.jvp(layer, (x,), (jnp.sin(x),))
    return y, (moved, batch, second)


@pytest.mark.parametrize("name", ("fp8_tensor", "mxfp4"))  # tokens quantized too, or not
def test_value_is_that_of_the_quantized_layer(name):
    q, plain = experts(name)
    x, routing = tokens()
    y, got = derivatives(x, routing, q)
    assert_equal(y, value(x, routing, q))
    close(got, derivatives(x, routing, plain)[1])


@pytest.mark.parametrize("name", ("fp8_block", "mxfp4"))
def test_scan_over_layers(name):
    """Leaves of a quantized array may have leading axes, those of the layers of a scan."""
    layers = [experts(name, seed=s) for s in range(3)]
    x, routing = tokens()

    def total(x, stacked):
        step = lambda x, e: (x + jaxmoe.moe_mlp(x, routing, e), None)  # noqa: E731
        return jax.lax.scan(step, x, stacked)[0].sum()

    both = [jax.tree.map(lambda *a: jnp.stack(a), *those) for those in zip(*layers, strict=True)]
    assert both[0].down.shape == (3, 4, 256, 128) and both[0].intermediate == 128
    if name in PACKED:  # which XLA multiplies as the dequantized ones, but for the order of sums
        close(*(jax.jit(jax.grad(total))(x, stacked) for stacked in both))
    assert jnp.isfinite(jax.jit(jax.grad(total))(x, both[0])).all()


def test_what_is_quantized_has_no_derivative():
    q, _ = experts("mxfp4")
    x, routing = tokens()
    loss = lambda e: jaxmoe.moe_mlp(x, routing, e).sum()  # noqa: E731
    message = r"^jaxmoe\.moe_mlp: no derivative is defined with respect to quantized weights \(here"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.grad(loss, allow_int=True), q)
    of_rows = lambda e: jaxmoe.expert_rows(x, routing, e).rows.sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match=message.replace("moe_mlp", "expert_rows")):
        jax.eval_shape(jax.grad(of_rows, allow_int=True), q)
    grads = jax.jit(jax.grad(lambda e: loss(jax.lax.stop_gradient(e)), allow_int=True))(q)
    assert grads.down.values.dtype == jax.dtypes.float0 and not grads.down.scales.any()
    fp8, _ = experts("fp8_tensor")
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.grad(loss), fp8)
    given = jaxmoe.quantize_tokens(x, "fp8_tensor")
    of_x = lambda s: QuantizedArray(given.values, s, given.format, given.layout, given.dtype)  # noqa: E731
    with pytest.raises(NotImplementedError, match="with respect to quantized x"):
        of_scales = lambda s: jaxmoe.moe_mlp(of_x(s), routing, fp8).sum()  # noqa: E731
        jax.eval_shape(jax.grad(of_scales), given.scales)
    of_weights = lambda w: jaxmoe.moe_mlp(given, Routing(routing.expert_ids, w), fp8).sum()  # noqa: E731
    assert jax.jit(jax.grad(of_weights))(routing.weights).any()


def split(e, specs):
    """Places quantized experts: the stored values of each weight, and the scales that follow."""

    def place(q, spec):
        scales = {"e": spec[:1], "e n": spec[:2], "e p q": spec}
        scales = scales[QUANTIZED[q.format].weight_scales]
        return QuantizedArray(P(*spec), P(*scales), q.format, q.layout, q.dtype)

    places = {n: place(getattr(e, n), spec) for n, spec in specs.items()}
    small = {n: P() for n in ("gate_up_bias", "down_bias", "gate_bias", "up_bias")}
    small = {n: s for n, s in small.items() if getattr(e, n) is not None}
    return Experts(**places, **small, order=e.order, layout="nk")


MESHES = {
    "E": {"gate_up": ("a", None, None), "down": ("a", None, None)},
    "I": {"gate_up": (None, "a", None), "down": (None, None, "a")},
    "H": {"gate_up": (None, None, "a"), "down": (None, "a", None)},
}


@pytest.mark.parametrize(
    ("name", "kind", "axis"),
    (
        *(("mxfp4", AxisType.Explicit, axis) for axis in MESHES),
        *(("fp8_tensor", AxisType.Auto, axis) for axis in "EH"),
        ("int8_channel", AxisType.Auto, "I"),
    ),
)
def test_on_a_mesh(name, kind, axis):
    q, plain = experts(name, order="interleaved")
    x, routing = tokens()
    moving = moving_of(q, x, routing)
    run = program(jaxmoe.moe_mlp)
    want, (_, of_plain) = (run(moving, e, routing) for e in (q, plain))
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    place = lambda s: NamedSharding(mesh, s)  # noqa: E731
    specs = split(q, MESHES[axis])
    put = jax.device_put(
        jax.tree.map(np.asarray, q), jax.tree.map(place, specs, is_leaf=lambda s: isinstance(s, P))
    )
    everywhere = jax.device_put((moving, routing), place(P()))
    with jax.set_mesh(mesh):
        got = run(everywhere[0], put, everywhere[1])
    close(got[0], want[0])
    close(got[1], of_plain)


@pytest.mark.parametrize(
    ("name", "dispatch"),
    (("fp8_tensor", "all_gather"), ("mxfp4", "all_to_all"), ("mxfp4", "ragged")),
)
def test_expert_parallel(name, dispatch):
    q, plain = experts(name, order="interleaved")
    x, routing = tokens()
    mesh = jax.make_mesh((2, 2), ("e", "i"), axis_types=(AxisType.Auto,) * 2)
    layer = functools.partial(
        expert_parallel.sharded_moe_mlp,
        mesh=mesh,
        axis_name="e",
        tensor_axis="i",
        dispatch=dispatch,
    )
    close(gradients(layer, q, x, routing), gradients(jaxmoe.moe_mlp, plain, x, routing))


def gradient_on_cuda(format):
    """The program of a gradient of bf16 tokens, and its report."""
    q, _ = experts(format, jnp.bfloat16)
    q = Experts(gate_up=q.gate_up, down=q.down, layout="nk")
    x, routing = tokens()

    def of_x(x):
        y = jaxmoe.moe_mlp(x, routing, q)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    x = x.astype(jnp.bfloat16)
    with _targets.force_cuda_lowering():
        report = jaxmoe.explain(jax.grad(of_x), x)
    assert all(op.cuda_reason is None for op in report.ops)
    dequantized = [op for op in report.ops if op.op == "jaxmoe_dequantize"]
    return cuda_text(jax.grad(of_x), x), dequantized


def test_cuda_dequantizes_into_scratch_that_explain_states():
    text, found = gradient_on_cuda("fp8_channel")
    assert text.count("custom_call @jaxmoe_moe_mlp_v1") == 1
    assert text.count("custom_call @jaxmoe_grouped_gemm_v1") >= 3
    reasons = [op.cuda_fallback for op in found]
    assert f"weights are dequantized by XLA, to {4 * 256 * 256 * 2} bytes of scratch" in reasons


@pytest.mark.parametrize("format", ("mxfp4", "int8_channel"))
def test_cuda_has_a_kernel_that_dequantizes_packed_weights(format):
    text, found = gradient_on_cuda(format)
    assert text.count("custom_call @jaxmoe_dequantize_v1") >= 2
    assert all(op.cuda_fallback is None for op in found)
    assert {op.cuda_attrs["format"].name for op in found} == {format}
    assert 4 * 256 * 256 * 2 in {op.cuda_scratch_bytes for op in found}
