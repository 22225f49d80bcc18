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
from jaxmoe.checkpoints import from_scales
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
    with pytest.raises(TypeError, match="q.qtype='nf4' must not be a table of values"):
        qwix.quantized_array(table, weight_layout="kn")
    how = theirs.HowToQuantize(qtype=F8, channelwise_axes=(0, 2), tiled_axes={1: 128})
    with pytest.raises(ValueError, match="For values of f8_e4m3fn there are fp8_tensor"):
        qwix.quantized_array(theirs.quantize(w, how), weight_layout="kn")


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qvalue": None}, TypeError, r"q.qvalue must be there: call q.quant\(w\) first"),
        ({"scale": []}, NotImplementedError, "q.scale must hold one scale, not 0"),
        ({"scale": [1, 1]}, NotImplementedError, "q.scale must hold one scale, not 2"),
        ({"bias": [1]}, NotImplementedError, "q.bias must be empty"),
        ({"sparsity_mask": 1}, NotImplementedError, "q.sparsity_mask must be None"),
        ({"tiling_state": 1}, NotImplementedError, "q.tiling_state must be None"),
    ],
)
def test_aqt_refuses(change, error, message):
    assert aqt.quantized_array(tensor(), weight_layout="kn").dtype == BF16
    with pytest.raises(error, match=message):
        aqt.quantized_array(tensor(**change), weight_layout="kn")


@pytest.mark.parametrize("module", (aqt, qwix))
def test_other_things_are_refused(module):
    with pytest.raises(TypeError, match="q must be a"):
        module.quantized_array(np.ones(3), weight_layout="kn")
