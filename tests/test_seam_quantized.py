"""Quantized weights of qwix and aqt, and broadcast scales in general, as quantized arrays."""

import importlib
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe._testing import assert_equal, normal
from jaxmoe.checkpoints import from_scales, weight_from_scales
from jaxmoe.seams import aqt, qwix

E, K, N = 3, 256, 128
F8, BF16 = jnp.float8_e4m3fn, jnp.bfloat16

# Values, shape of the scales [E, K, N], what reads it; None: no format.
CASES = [
    (F8, (E, 1, 1), "fp8_tensor"),
    (F8, (1, 1, 1), "fp8_tensor"),
    (F8, (E, 1, N), "fp8_channel"),
    (F8, (1, 1, N), "fp8_channel"),
    (F8, (E, 1, 4), "fp8_channel"),
    (F8, (E, 2, 1), "fp8_block"),
    (F8, (1, 2, 1), "fp8_block"),
    (F8, (E, 2, N), None),
    (F8, (E, 8, N), None),
    (jnp.float8_e5m2, (E, 1, 1), "fp8_tensor"),
    (jnp.float8_e5m2, (E, 1, N), None),
    (jnp.int8, (E, 1, N), "int8_channel"),
    (jnp.int8, (1, 1, N), "int8_channel"),
    (jnp.int8, (E, 1, 1), "int8_channel"),
    (jnp.int8, (E, 2, N), None),
    (jnp.int4, (E, 8, N), "int4_g32"),
    (jnp.int4, (E, 4, N), "int4_g64"),
    (jnp.int4, (E, 2, N), "int4_g128"),
    (jnp.int4, (E, 1, N), "int4_channel"),
    (jnp.int4, (1, 1, 1), "int4_channel"),
    (jnp.int4, (E, 16, N), None),
]


def draw(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    limit = {"int8": 128, "int4": 8}.get(np.dtype(dtype).name)
    if limit is None:
        return jnp.asarray(rng.standard_normal(shape) * 8).astype(dtype)
    return jnp.asarray(rng.integers(-limit, limit, shape)).astype(dtype)


def spread(a, shape):
    for axis, size in enumerate(shape):
        a = np.repeat(np.asarray(a, np.float32), size // a.shape[axis], axis)
    return a


def numbers(values, scales, zeros=None):
    wide = np.asarray(values).astype(np.float32)
    if zeros is not None:
        wide = wide - spread(np.asarray(zeros).astype(np.float32), values.shape)
    return wide * spread(np.asarray(scales).astype(np.float32), values.shape)


@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize(("dtype", "shape", "format"), CASES)
def test_formats_hold_scales_exactly(dtype, shape, format, layout):
    values = draw(dtype, (E, K, N))
    scales = jnp.exp2(normal(np.random.default_rng(1), shape, jnp.float32)).astype(BF16)
    if layout == "nk":
        values, scales = values.swapaxes(1, 2), scales.swapaxes(1, 2)
    read = jax.jit(lambda *a: from_scales(*a, weight_layout=layout))
    if format is None:
        listed = "|".join(("there are fp8_tensor", "there are int8_channel", "there are int4_g32"))
        with pytest.raises(ValueError, match=rf"from_scales: scales must be .* ({listed})"):
            read(values, scales)
        return
    q = read(values, scales)
    assert (q.format, q.layout, q.shape, q.dtype) == (format, layout, values.shape, BF16)
    got = jaxmoe.dequantize(q, dtype=jnp.float32)
    want = numbers(values, scales)
    if format.startswith("int4"):  # which has one rounding
        want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_equal(got, want)


@pytest.mark.parametrize("blocks", (1, 2, 4))
def test_scales_of_four_axes(blocks):
    """As tpu-inference and MaxText's serving have them: [E, blocks of K, 1, N]."""
    values = draw(jnp.int4, (E, K, N))
    scales = jnp.exp2(normal(np.random.default_rng(1), (E, blocks, 1, N), jnp.float32)).astype(BF16)
    q = from_scales(values, scales, weight_layout="kn")
    assert_equal(q.values, from_scales(values, scales[:, :, 0], weight_layout="kn").values)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(F8, None), (F8, "mxfp8"), (jnp.float4_e2m1fn, None), (jnp.float4_e2m1fn, "mxfp4")],
)
def test_microscaling(dtype, kind):
    """Powers of two as bytes, or as numbers where the caller says that they are."""
    values = draw(dtype, (E, K, N))
    exponents = np.random.default_rng(1).integers(-6, 7, (E, K // 32, N))
    scales = jnp.exp2(jnp.asarray(exponents, jnp.float32))
    scales = scales.astype(jnp.float8_e8m0fnu if kind is None else BF16)
    q = from_scales(values, scales, weight_layout="kn", scale_format=kind)
    assert q.format == ("mxfp8" if dtype == F8 else "mxfp4")
    assert_equal(jaxmoe.dequantize(q, dtype=jnp.float32), numbers(values, scales))


@pytest.mark.parametrize("given", ("nvfp4", None))
def test_nvfp4(given):
    values = draw(jnp.float4_e2m1fn, (E, K, N))
    scales = jnp.abs(draw(F8, (E, K // 16, N), 1))
    scales = scales if given is None else scales.astype(BF16)
    q = from_scales(values, scales, weight_layout="kn", scale_format=given)
    assert q.format == "nvfp4"
    got = jaxmoe.dequantize(q, dtype=jnp.float32)
    np.testing.assert_array_equal(got, numbers(values, scales))  # a zero loses its sign


@pytest.mark.parametrize("groups", (8, 2, 1))
def test_zero_points(groups):
    values, zeros = draw(jnp.int4, (E, K, N)), draw(jnp.int4, (E, groups, N), 2)
    scales = jnp.exp2(normal(np.random.default_rng(1), (E, groups, N), jnp.float32)).astype(BF16)
    q = from_scales(values, scales, zeros, weight_layout="kn")
    assert q.format.endswith("_zp")
    want = numbers(values, scales, zeros).astype(ml_dtypes.bfloat16)
    assert_equal(jaxmoe.dequantize(q), want)


@pytest.mark.parametrize(
    ("format", "number", "message"),
    [
        ("nvfp4", 1e-4, r"scales\[1,2,3\]=.* must be a number of e4m3 in nvfp4"),  # it would be 0
        ("nvfp4", 1.0625, "must be a number of e4m3"),
        ("nvfp4", 480, "must be a number of e4m3"),
        ("mxfp4", 3, r"scales\[1,2,3\]=3.0 must be a power of two from 2\^-127 to 2\^127 in mxfp4"),
        ("mxfp4", 0, "must be a power of two"),
        ("mxfp8", -1, "must be a power of two"),
        ("mxfp8", np.inf, "must be a power of two"),
        ("mxfp8", 2.0**-128, "must be a power of two"),
    ],
)
def test_scales_of_other_formats(format, number, message):
    values = draw(F8 if format == "mxfp8" else jnp.float4_e2m1fn, (E, K, N))
    scales = np.ones((E, K // (16 if format == "nvfp4" else 32), N), ml_dtypes.bfloat16)
    e4m3, powers = (0, 2.0**-9, 448, -1.5, np.nan), (2.0**-127, 2.0**127, np.nan, 1, 1)
    scales[0, 0, :5] = e4m3 if format == "nvfp4" else powers
    read = lambda scales: from_scales(values, scales, weight_layout="kn", scale_format=format)  # noqa: E731
    assert read(scales).format == format
    scales[1, 2, 3] = number
    with pytest.raises(ValueError, match=message):
        read(scales)
    assert jax.jit(read)(jnp.asarray(scales)).format == format  # where nobody knows them


def small(dtype, *shape):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": small(np.int16, E, K, N)}, TypeError, "values.dtype=i16 must be f8_e4m3fn or"),
        ({"scales": small(np.int32, E, 1, N)}, TypeError, "scales.dtype=i32 must be f32 or bf16"),
        ({"scales": small(np.float32, E, 3, N)}, ValueError, "scales must have axes that divide"),
        ({"scales": small(np.float32, E, 2, 2, N)}, ValueError, "scales must have axes that div"),
        ({"scales": small(np.float32, E, N)}, ValueError, "scales must have axes that divide"),
        (
            {"values": small(np.int8, 4, K, N), "scales": small(np.float32, 2, 1, N)},
            ValueError,
            r"scales.shape\[0\]=2 must be 1 or 4 \(num_experts\)",
        ),
        (
            {"values": small(ml_dtypes.int4, E, K, N)},
            TypeError,
            "scales.dtype=f32 must be bf16 or f16 with int4 values",
        ),
        (
            {"zero_points": small(np.int8, E, 1, N)},
            ValueError,
            "scales and zero_points must be those of a format. For values of i8 there are int8_ch",
        ),
        (
            {
                "values": small(ml_dtypes.int4, E, K, N),
                "scales": small(ml_dtypes.bfloat16, E, 1, N),
                "zero_points": small(np.int8, E, 1, N),
            },
            TypeError,
            "zero_points.dtype=i8 must be i4",
        ),
        (
            {"values": small(np.int8, E, 96, N)},
            ValueError,
            "64 inputs .K. in int8_channel, not 96; the n",
        ),
        ({"scale_format": "e8m0"}, ValueError, "scale_format='e8m0' must be one of mxfp8, mxfp4"),
        ({"weight_layout": "tokens"}, ValueError, "weight_layout='tokens' must be one of kn, nk"),
    ],
)
def test_refused(change, error, message):
    given = {"values": small(np.int8, E, K, N), "scales": small(np.float32, E, 1, N)}
    with pytest.raises(error, match=message):
        from_scales(**given | {"weight_layout": "kn"} | change)


def format_of(w):
    """The name of a weight's format, None for an array, which has one of another kind."""
    return w.format if isinstance(w, jaxmoe.QuantizedArray) else None


BLOCK_SCALES = {  # powers of two, as quantizers may make them, or any; equal ones
    "any": lambda rng, *shape: 0.5 + rng.random(shape),
    "powers": lambda rng, *shape: np.exp2(rng.integers(-6, 7, shape)),
    "one a row": lambda rng, e, k, n: np.repeat(0.5 + rng.random((e, 1, n)), k, 1),
    "one a block": lambda rng, e, k, n: np.repeat(0.5 + rng.random((e, k, 1)), n, 2),
    "pairs": lambda rng, e, k, n: np.repeat(0.5 + rng.random((e, k // 2, n)), 2, 1),
}
# Values, blocks along K, scales, and what holds them; None: they are decoded.
BY_NUMBERS = [
    (F8, 2, "any", None),
    (F8, 2, "one a block", "fp8_block"),
    (F8, 4, "one a block", None),
    (F8, 2, "powers", "mxfp8"),
    (F8, 8, "powers", "mxfp8"),
    (F8, 16, "powers", None),
    (F8, 8, "one a row", "fp8_channel"),
    (jnp.float8_e5m2, 1, "any", None),
    (jnp.float8_e5m2, 2, "powers", None),
    (jnp.int8, 2, "any", None),
    (jnp.int8, 2, "powers", None),
    (jnp.int8, 4, "one a row", "int8_channel"),
    (jnp.int4, 8, "any", "int4_g32"),
    (jnp.int4, 16, "any", None),
    (jnp.int4, 16, "pairs", "int4_g32"),
    (jnp.int4, 32, "one a row", "int4_channel"),
    (jnp.float4_e2m1fn, 8, "powers", "mxfp4"),
    (jnp.float4_e2m1fn, 16, "any", None),
    (jnp.float4_e2m1fn, 16, "powers", "nvfp4"),
]


@pytest.mark.parametrize("layout", ("kn", "nk", "blocks"))
@pytest.mark.parametrize(("dtype", "blocks", "kind", "format"), BY_NUMBERS)
def test_any_blocks_along_k_are_read(dtype, blocks, kind, format, layout):
    """In a format where numbers allow it, else decoded; traced, by what is known."""
    values = draw(dtype, (E, K, N))
    scales = BLOCK_SCALES[kind](np.random.default_rng(1), E, blocks, N).astype(BF16)
    want = numbers(values, scales).astype(ml_dtypes.bfloat16)
    if layout == "blocks":  # [E, blocks of K, 1, N]
        layout, scales = "kn", scales[:, :, None]
    elif layout == "nk":
        values, scales, want = values.swapaxes(1, 2), scales.swapaxes(1, 2), want.swapaxes(1, 2)
    read = lambda *a: weight_from_scales(*a, weight_layout=layout)  # noqa: E731
    w = read(values, scales)
    if format is None:
        assert isinstance(w, jax.Array)
        assert_equal(w, want)
    else:
        assert (w.format, w.layout, w.shape, w.dtype) == (format, layout, values.shape, BF16)
        np.testing.assert_array_equal(jaxmoe.dequantize(w), want)  # e2m1 may lose the sign of 0
    traced = jax.jit(read)(values, jnp.asarray(scales))
    if not isinstance(traced, jax.Array):
        assert format is not None
        traced = jaxmoe.dequantize(traced)
    np.testing.assert_array_equal(traced, want)


@pytest.mark.parametrize(("n", "format"), ((192, "fp8_block"), (64, "fp8_block")))
def test_the_last_block_of_outputs_may_be_cut_off(n, format):
    values = draw(F8, (E, K, n))
    scales = (0.5 + np.random.default_rng(1).random((E, 2, 2))).repeat(128, 2)[:, :, :n]
    w = weight_from_scales(values, scales.astype(np.float32), weight_layout="kn")
    assert w.format == format
    want = numbers(values, scales)
    np.testing.assert_array_equal(jaxmoe.dequantize(w), want)
    scales[0, 0, n - 1] *= 2
    w = weight_from_scales(values, scales.astype(np.float32), weight_layout="kn")
    np.testing.assert_array_equal(w, numbers(values, scales))


@pytest.mark.parametrize(
    ("dtype", "scale", "given", "format"),
    [
        (jnp.int4, 0.5, None, None),  # float32 tokens: formats of int4 have 16 bits
        (jnp.int4, 0.5, BF16, "int4_g32"),
        (jnp.int4, 0.3, BF16, None),  # the scale would be rounded
        (jnp.int8, 0.3, BF16, None),
    ],
)
def test_scales_of_float32(dtype, scale, given, format):
    values = draw(dtype, (E, K, N))
    scales = scale * (1 + np.arange(8, dtype=np.float32)[None, :, None] * np.ones((E, 1, N), "f4"))
    w = weight_from_scales(values, scales, weight_layout="kn", dtype=given)
    assert format_of(w) == format
    want = numbers(values, scales).astype(given or np.float32)
    assert_equal(w if format is None else jaxmoe.dequantize(w), want)


@pytest.mark.parametrize("dtype", (jnp.int8, jnp.int4))
@pytest.mark.parametrize(("shape", "of"), (((E, 8, N), "int8"), ((E, 1, N), "int32")))
def test_zero_points_of_any_kind(dtype, shape, of):
    """Those of int8 are in no format; all of int4 are, where they have the shape of scales."""
    values, zeros = draw(dtype, (E, K, N)), draw(dtype, shape, 2).astype(of)
    scales = (0.5 + np.random.default_rng(1).random((E, 8, N))).astype(BF16)
    want = numbers(values, scales, zeros).astype(ml_dtypes.bfloat16)
    w = weight_from_scales(values, scales, zeros, weight_layout="kn")
    assert format_of(w) == (None if dtype == jnp.int8 else "int4_g32_zp")
    assert_equal(w if dtype == jnp.int8 else jaxmoe.dequantize(w), want)
    none = weight_from_scales(values, scales[:, :1], 0 * zeros, weight_layout="kn")
    assert none.format == ("int8_channel" if dtype == jnp.int8 else "int4_channel")
    traced = jax.jit(lambda *a: weight_from_scales(*a, weight_layout="kn"))
    assert_equal(traced(values, scales, zeros), want)


@pytest.mark.parametrize(
    ("dtype", "kind", "number"),
    [
        (jnp.float4_e2m1fn, "nvfp4", 1e-4),
        (jnp.float4_e2m1fn, "mxfp4", 3),
        (F8, "mxfp8", 0),
        (F8, "mxfp8", 2.0**-126),  # 253 below the largest: it would be 0
    ],
)
def test_scales_that_a_format_does_not_have_are_decoded(dtype, kind, number):
    values = draw(dtype, (E, K, N))
    scales = np.ones((E, K // 16 if kind == "nvfp4" else K // 32, N), np.float32)
    scales[0, 1, 2] = number
    scales[0, 0, 0] = 1 if kind == "nvfp4" else 2.0**127
    w = weight_from_scales(values, scales, weight_layout="kn", scale_format=kind, dtype="float32")
    with np.errstate(over="ignore"):
        want = numbers(values, scales)
    assert_equal(w + 0, np.where(np.abs(want) < 2.0**-126, 0, want) + 0)  # no subnormal numbers


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_gradients_of_scales_that_are_decoded(dtype):
    values, scales = draw(jnp.int8, (E, K, N)), np.full((E, 8, N), 0.5, dtype)

    def total(scales):
        w = weight_from_scales(values, scales, weight_layout="kn", dtype=dtype)
        return (w.astype(jnp.float32)).sum()

    want = np.asarray(values, np.float32).reshape(E, 8, K // 8, N).sum(2)
    assert_equal(jax.grad(total)(scales), want.astype(dtype))


def test_sizes_that_a_format_does_not_divide_are_decoded():
    values, scales = draw(jnp.int8, (E, 96, 80)), np.full((E, 1, 80), 0.5, np.float32)
    w = weight_from_scales(values, scales, weight_layout="kn")
    assert_equal(w, numbers(values, scales))


def test_a_layer_of_decoded_weights():
    """Inside of a program whose weights are arguments, beside the layer of plain weights."""
    rng = np.random.default_rng(0)
    shapes = ((E, 64, 128), (E, 64, 128), (E, 128, 64))
    values = tuple(draw(jnp.int8, shape, i) for i, shape in enumerate(shapes))
    scales = tuple((rng.random((e, k // 32, 1, n)) / 99).astype(BF16) for e, k, n in shapes)
    x, ids = normal(rng, (6, 64), BF16), jnp.array([[0], [1], [2], [0], [0], [1]])
    routing = jaxmoe.Routing(ids, jnp.ones((6, 1)), E)

    def layer(x, values, scales):
        pairs = zip(values, scales, strict=True)
        gate, up, down = (weight_from_scales(*a, weight_layout="kn") for a in pairs)
        return jaxmoe.moe_mlp(x, routing, jaxmoe.Experts(gate=gate, up=up, down=down))

    pairs = zip(values, scales, strict=True)
    plain = [numbers(v, s[:, :, 0]).astype(ml_dtypes.bfloat16) for v, s in pairs]
    gate, up, down = map(jnp.asarray, plain)
    want = jaxmoe.moe_mlp(x, routing, jaxmoe.Experts(gate=gate, up=up, down=down))
    assert_equal(jax.jit(layer)(x, values, scales), want)


@pytest.fixture
def packages():
    """qwix and the tensors of aqt, under the promotion that they need."""

    def load(name):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(str(error))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield load


QWIX = [
    (jnp.int8, {"channelwise_axes": (0, 2)}, "int8_channel"),
    (jnp.int8, {"channelwise_axes": (2,)}, "int8_channel"),
    ("int6", {"channelwise_axes": (0, 2)}, "int8_channel"),
    (jnp.int4, {"channelwise_axes": (0, 2), "tiled_axes": {1: 128}}, "int4_g128"),
    (jnp.int4, {"channelwise_axes": (0, 2), "tiled_axes": {1: 64}}, "int4_g64"),
    (
        jnp.int4,
        {"channelwise_axes": (0, 2), "tiled_axes": {1: 32}, "calibration_method": "minmax"},
        "int4_g32_zp",
    ),
    (F8, {"channelwise_axes": (0,)}, "fp8_tensor"),
    (F8, {"channelwise_axes": (0, 2)}, "fp8_channel"),
    (F8, {"channelwise_axes": (0,), "tiled_axes": {1: 128, 2: 128}}, "fp8_block"),
    (jnp.float8_e5m2, {"channelwise_axes": (0,)}, "fp8_tensor"),
    ("mxfp8", {"channelwise_axes": (0, 2), "tiled_axes": {1: 32}}, "mxfp8"),
    ("mxfp4", {"channelwise_axes": (0, 2), "tiled_axes": {1: 32}}, "mxfp4"),
    ("nvfp4", {"channelwise_axes": (0, 2), "tiled_axes": {1: 16}}, "nvfp4"),
]


@pytest.mark.filterwarnings("default")  # of what the package imports
@pytest.mark.parametrize(("qtype", "how", "format"), QWIX)
def test_qwix(packages, qtype, how, format):
    """What qwix makes of weights, and a product with it."""
    theirs = packages("qwix._src.core.qarray")
    w = normal(np.random.default_rng(0), (E, K, N), BF16, 0.1)
    given = theirs.quantize(w, theirs.HowToQuantize(qtype=qtype, **how))
    q = qwix.quantized_array(given, weight_layout="kn")
    assert (q.format, q.shape, q.dtype) == (format, w.shape, BF16)
    # qwix rounds to bfloat16 what stands here exactly.
    assert_equal(jaxmoe.dequantize(q), theirs.dequantize(given))
    x = normal(np.random.default_rng(1), (16, K), BF16)
    sizes = jnp.array([5, 0, 9])
    got = jaxmoe.grouped_gemm(x, q, sizes).astype(np.float32)
    want = jaxmoe.grouped_gemm(x, theirs.dequantize(given), sizes).astype(np.float32)
    # FP8 formats round the rows too.
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


@pytest.mark.filterwarnings("default")
def test_qwix_has_more_than_there_are_formats(packages):
    theirs = packages("qwix._src.core.qarray")
    w = normal(np.random.default_rng(0), (E, K, N), BF16, 0.1)
    table = theirs.quantize(w, theirs.HowToQuantize(qtype="nf4", channelwise_axes=(0, 2)))
    for read in (qwix.quantized_array, qwix.weight):
        with pytest.raises(TypeError, match="q.qtype='nf4' must not be a table of values"):
            read(table, weight_layout="kn")
    how = theirs.HowToQuantize(qtype=F8, channelwise_axes=(0, 2), tiled_axes={1: 128})
    with pytest.raises(ValueError, match="For values of f8_e4m3fn there are fp8_tensor"):
        qwix.quantized_array(theirs.quantize(w, how), weight_layout="kn")


OF_K = {"channelwise_axes": (0, 2), "tiled_axes": {1: 128}}
DECODED = [
    (jnp.int8, OF_K),
    (jnp.int8, {"channelwise_axes": (0,), "tiled_axes": {1: 64, 2: 32}}),
    (jnp.int8, {**OF_K, "calibration_method": "minmax"}),
    (jnp.int8, {"channelwise_axes": (0, 2), "calibration_method": "minmax"}),
    (jnp.int4, {**OF_K, "tiled_axes": {1: 16}}),
    (F8, OF_K),
    (F8, {**OF_K, "tiled_axes": {1: 32}}),
    (jnp.float8_e5m2, {"channelwise_axes": (0, 2)}),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", (BF16, jnp.float32))
@pytest.mark.parametrize(("qtype", "how"), DECODED)
def test_qwix_in_any_tiles(packages, qtype, how, dtype):
    """What no format has is what qwix dequantizes it to, in a program as well."""
    theirs = packages("qwix._src.core.qarray")
    w = normal(np.random.default_rng(0), (E, K, N), dtype, 0.1)
    given = theirs.quantize(w, theirs.HowToQuantize(qtype=qtype, **how))
    want = theirs.dequantize(given)
    assert_equal(qwix.weight(given, weight_layout="kn"), want)
    assert_equal(qwix.weight(given.swapaxes(1, 2), weight_layout="nk"), want.swapaxes(1, 2))
    x, sizes = normal(np.random.default_rng(1), (16, K), dtype), jnp.array([5, 0, 9])
    product = jax.jit(
        lambda x, q: jaxmoe.grouped_gemm(x, qwix.weight(q, weight_layout="kn"), sizes)
    )
    assert_equal(product(x, given), jaxmoe.grouped_gemm(x, want, sizes))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("qtype", "how", "format"), QWIX)
def test_qwix_in_a_format_where_there_is_one(packages, qtype, how, format):
    theirs = packages("qwix._src.core.qarray")
    w = normal(np.random.default_rng(0), (E, K, N), BF16, 0.1)
    given = theirs.quantize(w, theirs.HowToQuantize(qtype=qtype, **how))
    q, weight = (read(given, weight_layout="kn") for read in (qwix.quantized_array, qwix.weight))
    assert weight.format == format
    jax.tree.map(assert_equal, weight, q)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("size", (K, 128, 32, 16))
def test_aqt_in_tiles(packages, size, bits):
    tiled = packages("aqt.jax.v2.tiled_dot_general")
    quantizer = packages("aqt.jax.v2.aqt_quantizer")
    w = normal(np.random.default_rng(0), (E, K, N), BF16, 0.1)
    tiles = tiled.generate_tiling_state(
        w, [tiled.AxisTiling(1, tile_size=size, tile_count=K // size)]
    )
    given, _ = quantizer.quantizer_make(bits).quant(w, calibration_axes=[1], tiling_state=tiles)
    given = given.qvalue_astype(jnp.int8 if bits == 8 else jnp.int4)
    assert given.qvalue.ndim == 4
    weight = aqt.weight(given, weight_layout="kn")
    by = {K: "channel", 128: "g128", 32: "g32"}
    format = (f"int4_{by[size]}" if size in by else None) if bits == 4 else None
    format = "int8_channel" if (bits, size) == (8, K) else format
    assert format_of(weight) == format
    assert_equal(weight if format is None else jaxmoe.dequantize(weight), given.dequant())
    if format is not None:
        strict = aqt.quantized_array(given, weight_layout="kn")
        jax.tree.map(assert_equal, strict, weight)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bits", (8, 4))
def test_aqt(packages, bits):
    """Weights that aqt quantizes along K, as MaxText's layers of experts do."""
    quantizer = packages("aqt.jax.v2.aqt_quantizer")
    w = normal(np.random.default_rng(0), (E, K, N), BF16, 0.1)
    make = quantizer.quantizer_make(bits)
    given, _ = make.quant(w, calibration_axes=[1])
    given = given.qvalue_astype(jnp.int8 if bits == 8 else jnp.int4)
    q = aqt.quantized_array(given, weight_layout="kn")
    assert q.format == ("int8_channel" if bits == 8 else "int4_channel")
    assert_equal(jaxmoe.dequantize(q), given.dequant())


def tensor(**change):
    fields = {"qvalue": jnp.ones((E, 64, 64), jnp.int8), "scale": [jnp.ones((E, 1, 64))]}
    fields |= {"bias": [], "sparsity_mask": None, "tiling_state": None, "dequant_dtype": BF16}
    return types.SimpleNamespace(**fields | change)


def tiling(repeated=False):
    """As a TilingState: K in four tiles."""
    tiles = {0: [0], 1: [1, 2], 2: [3]} | ({"broadcast_0": [4]} if repeated else {})
    return types.SimpleNamespace(tile_map=tiles, untiled_shape=(E, 64, 64))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qvalue": None}, TypeError, r"q.qvalue must be there: call q.quant\(w\) first"),
        ({"scale": []}, NotImplementedError, "q.scale must hold one scale, not 0"),
        ({"scale": [1, 1]}, NotImplementedError, "q.scale must hold one scale, not 2"),
        ({"bias": [1]}, NotImplementedError, "q.bias must be empty"),
        ({"sparsity_mask": 1}, NotImplementedError, "q.sparsity_mask must be None"),
        ({"tiling_state": 1}, NotImplementedError, "q.tiling_state must be None"),
        ({"tiling_state": tiling(repeated=True)}, NotImplementedError, "q.tiling_state must be"),
    ],
)
@pytest.mark.parametrize("read", (aqt.quantized_array, aqt.weight))
def test_aqt_refuses(change, error, message, read):
    assert read(tensor(), weight_layout="kn").dtype == BF16
    with pytest.raises(error, match=message):
        read(tensor(**change), weight_layout="kn")


@pytest.mark.parametrize(("shape", "blocks"), (((E, 4, 1, 64), 4), ((E, 1, 1, 64), 1)))
def test_tiles_of_aqt(shape, blocks):
    scale = jnp.exp2(normal(np.random.default_rng(0), shape, jnp.float32))
    values = draw(jnp.int8, (E, 64, 64))
    change = {"qvalue": values.reshape(E, 4, 16, 64), "scale": [scale], "tiling_state": tiling()}
    w = aqt.weight(tensor(**change), weight_layout="kn", dtype="float32")
    w = w if blocks > 1 else jaxmoe.dequantize(w)
    assert_equal(w, numbers(values, scale.reshape(E, blocks, 64)))


@pytest.mark.parametrize("module", (aqt, qwix))
def test_other_things_are_refused(module):
    for read in (module.quantized_array, module.weight):
        with pytest.raises(TypeError, match="q must be a"):
            read(np.ones(3), weight_layout="kn")
