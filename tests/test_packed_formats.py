"""Packed weights: their bytes against plain loops, what they stand for, and what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import (
    Experts,
    GemmConfig,
    Routing,
    dequantize,
    expert_parallel,
    export_checks,
    grouped_gemm,
    moe_mlp,
    quantize,
)
from jaxmoe._formats import QUANTIZED
from jaxmoe._formats.parts import pack, unpack
from jaxmoe._gemm import cuda, tiles
from jaxmoe._testing import PACKED, Layer, assert_equal, layer_inputs
from tests import packed_oracle as oracle
from tests.arguments import zeros_of
from tests.lowered import calls, cuda_text, layer_call
from tests.sharding_programs import collectives


def test_every_format_has_an_oracle():
    assert set(PACKED) == oracle.FORMATS.keys()


# One of each class, for what does not depend on the groups: each program takes a second to compile.
CLASSES = ("mxfp4", "nvfp4", "int4_g128", "int4_channel_zp", "int8_channel")


@pytest.fixture(params=PACKED)
def name(request):
    return request.param


@pytest.fixture(params=CLASSES)
def one_of_each(request):
    return request.param


E, N = 2, 128


def draw(name, seed=0, num_experts=E, dtype=jnp.bfloat16):
    """Codes and everything else that a format is made of, and how that lies in strips."""
    rng = np.random.default_rng(seed)
    shape = oracle.FORMATS[name]
    k = 256 if shape.blocks != 1 else 192
    codes = rng.integers(0, 1 << shape.bits, (num_experts, N, k), np.uint8)
    groups = (num_experts, N, k // 64 // (shape.blocks or k // 64) * shape.groups)
    if name.startswith("mx"):
        exponents = rng.integers(40, 240, groups, np.uint8)
        strips = exponents - exponents.max(axis=(1, 2), keepdims=True) + np.uint8(253)
        return codes, (exponents,), (strips,)
    if name == "nvfp4":
        scales = rng.integers(1, 127, groups, np.uint8)
        bits = oracle.E4M3[scales].astype(np.float32).view(np.uint32) >> 20
        strips = (bits - 944).astype(np.uint8)
        codes |= 1  # no group of zeros, whose scale is not kept
        return codes, (scales, rng.uniform(0.5, 2, num_experts).astype(np.float32)), (strips,)
    if name == "int8_channel":
        return codes.view(np.int8), (rng.uniform(0.5, 2, (num_experts, N)).astype(np.float32),), ()
    scales = rng.uniform(0.01, 2, groups).astype(jnp.dtype(dtype))
    zeros = (rng.integers(0, 16, groups, np.uint8),) if shape.zeros else ()
    return codes, (scales, *zeros), (scales, *zeros)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("weight_layout", "dtype"))
def packed(name, *parts, **options):
    """`pack` as one program: op by op it is dozens."""
    return pack(name, *parts, **options)


unpacked = jax.jit(unpack)


def meaning(name, codes, parts):
    """The weights in float64, before the rounding of int4."""
    k = codes.shape[-1]
    if name.startswith("mx"):
        values = oracle.e2m1(codes) if name == "mxfp4" else oracle.E4M3[codes]
        return values * np.ldexp(1.0, oracle.spread(parts[0], k).astype(np.int32) - 127)
    if name == "nvfp4":
        scales, common = oracle.spread(oracle.E4M3[parts[0]], k), parts[1].astype(np.float64)
        return oracle.e2m1(codes) * scales * common[:, None, None]
    if name == "int8_channel":
        return codes * parts[0].astype(np.float64)[..., None]
    zeros = oracle.spread(parts[1], k).astype(np.int32) if len(parts) > 1 else 8
    return (codes.astype(np.int32) - zeros) * oracle.spread(parts[0].astype(np.float64), k)


def test_bytes_are_those_of_plain_loops_and_come_back(name):
    codes, parts, strips = draw(name)
    q = packed(name, codes, *parts, weight_layout="kn")
    want = oracle.values_of(name, codes.view(np.uint8), *strips)
    np.testing.assert_array_equal(np.asarray(q.values), want, strict=True)
    assert q.shape == (E, codes.shape[2], N) and q.dtype == jnp.bfloat16
    for got, given in zip(unpacked(q), (codes, *parts), strict=True):
        np.testing.assert_array_equal(np.asarray(got), given, strict=True)
    assert QUANTIZED[name].stored_shape(codes.shape) == q.values.shape
    assert QUANTIZED[name].weight_shape(q.values.shape) == codes.shape


def test_packing_adds_at_most_a_hundredth(name):
    codes, parts, _ = draw(name)
    values = jax.eval_shape(functools.partial(pack, name, weight_layout="nk"), codes, *parts).values
    scales, zeros = (parts[:-1], parts[-1:]) if name.endswith("_zp") else (parts, ())
    given = codes.size * oracle.FORMATS[name].bits / 8
    given += sum(a.nbytes for a in scales) + sum(a.size / 2 for a in zeros)
    assert values.size <= 1.01 * given


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_what_they_stand_for(name, dtype):
    codes, parts, _ = draw(name, 1, dtype=dtype)
    q = packed(name, codes, *parts, weight_layout="nk", dtype=dtype)
    want = meaning(name, codes, parts)
    if name.startswith("int4"):  # rounded once, to the dtype of the array
        want = want.astype(jnp.dtype(dtype))
    got = jax.jit(lambda q: dequantize(q, dtype=jnp.float32))(q)
    np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32), strict=True)


def nearest_e2m1(x):
    """The nearest e2m1, ties to the even code; in float64."""
    distance = np.abs(np.abs(x)[..., None] - oracle.E2M1)
    closest = distance == distance.min(axis=-1, keepdims=True)
    even = closest & (np.arange(8) % 2 == 0)
    code = np.where(even.any(axis=-1), even.argmax(axis=-1), closest.argmax(axis=-1))
    return np.copysign(oracle.E2M1[code], x)


def expected(name, w, dtype):
    """What is left of w [E, N, K] after quantization, float64, by the formulas of the docs."""
    shape, f32 = oracle.FORMATS[name], np.float32
    k = w.shape[-1]
    count = k // 64 // (shape.blocks or k // 64) * shape.groups
    groups = w.astype(f32).reshape(*w.shape[:2], count, -1)
    most = np.abs(groups).max(axis=-1)
    divided = lambda scale: np.where(scale > 0, groups / np.where(scale > 0, scale, 1), 0)  # noqa: E731
    if name.startswith("mx"):
        top = 2 if name == "mxfp4" else 8
        scale = np.where(most > 0, 2.0 ** (np.floor(np.log2(np.maximum(most, 1e-30))) - top), 1)
        scaled = groups / scale[..., None]
        if name == "mxfp4":
            return (nearest_e2m1(scaled) * scale[..., None]).reshape(w.shape)
        values = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return (values * scale[..., None]).reshape(w.shape)
    if name == "nvfp4":
        common = most.max(axis=(1, 2), keepdims=True) / f32(2688)
        scale = (most / f32(6) / common).astype(ml_dtypes.float8_e4m3fn).astype(f32)
        values = nearest_e2m1(divided((scale * common)[..., None]))
        return (values * scale[..., None] * common[..., None]).astype(f32).reshape(w.shape)
    if name == "int8_channel":
        scale = most[:, :, 0] / f32(127)
        q = np.round(divided(scale[:, :, None, None]))
        return (q.reshape(w.shape) * scale[..., None]).astype(f32)
    low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    scale = (high - low) / f32(15) if shape.zeros else most / f32(7)
    scale = scale.astype(dtype).astype(f32)[..., None]
    zero = np.round(-low[..., None] / np.where(scale > 0, scale, 1)) if shape.zeros else 8
    code = np.clip(np.round(divided(scale)) + zero, 0, 15)
    return ((code - zero) * scale).astype(dtype).reshape(w.shape)


@pytest.mark.parametrize(
    ("name", "layout"), (*((n, "nk") for n in PACKED), *((n, "kn") for n in CLASSES))
)
def test_quantize_is_its_formula(name, layout):
    rng = np.random.default_rng(3)
    dtype = jnp.dtype(jnp.bfloat16 if layout == "nk" else jnp.float16)
    w = (rng.standard_normal((2, 64, 256)) * rng.uniform(0.1, 4, (2, 64, 1))).astype(dtype)
    w[0, :, :128] = 0  # groups of zeros
    w[0, 0, 128:] = 0
    given = jnp.asarray(w.swapaxes(1, 2) if layout == "kn" else w)
    run = lambda w: quantize(w, name, weight_layout=layout)  # noqa: E731
    q = (jax.jit(run) if layout == "kn" else run)(given)
    assert q.shape == given.shape and q.dtype == dtype
    got = np.asarray(dequantize(q, dtype=jnp.float32))
    got = got.swapaxes(1, 2) if layout == "kn" else got
    np.testing.assert_array_equal(got, expected(name, w, dtype).astype(np.float32))


@pytest.mark.parametrize("name", ("mxfp4", "mxfp8"))
def test_every_code_times_every_exponent(name):
    """Strips have each byte there is: 0 and 1 are too far below 254, and 255 is NaN."""
    codes, exponents = oracle.codes_and_exponents(name, 256)
    q = packed(name, codes, exponents, weight_layout="nk")
    strips = np.asarray(q.values).reshape(16, 4, 4, -1)[..., -128:]
    np.testing.assert_array_equal(np.unique(strips), [*range(254), 255])
    far = exponents <= 1
    dead = oracle.spread(far | (exponents == 255), 256)
    same_codes, same = map(np.asarray, unpacked(q))
    np.testing.assert_array_equal(same_codes, np.where(dead, 0, codes))
    np.testing.assert_array_equal(same, np.where(far, 0, exponents))
    with np.errstate(over="ignore"):  # the largest are none of float32
        want = meaning(name, codes, (exponents,)).astype(np.float32)
    want[dead] = np.where(oracle.spread(far, 256), 0, np.nan)[dead]
    got = np.asarray(dequantize(q, dtype=jnp.float32))
    tiny = np.abs(want) < 2.0**-126  # which a device may make zeros
    np.testing.assert_array_equal(np.where(tiny, 0, got), np.where(tiny, 0, want))
    assert (np.abs(got[tiny]) < 2.0**-126).all()


def test_exponents_far_below_the_largest_are_zeros():
    exponents = np.zeros((1, 64, 2), np.uint8)
    exponents[..., 1] = 254
    q = packed("mxfp4", np.full((1, 64, 64), 7, np.uint8), exponents, weight_layout="nk")
    got = np.asarray(dequantize(q, dtype=jnp.float32))[0, 0]
    assert (got[:32] == 0).all() and np.isinf(got[32:]).all()  # 6 * 2^127
    no_scale = packed("mxfp4", np.full((1, 64, 64), 2, np.uint8), exponents * 0, weight_layout="nk")
    assert float(no_scale.scales[0]) == 2.0**-126


def test_every_scale_of_nvfp4():
    """Subnormal numbers, zero and NaN among them; a sign becomes that of the values."""
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8), (1, 64, 256))
    codes = np.resize(np.arange(16, dtype=np.uint8), (1, 64, 256 * 16))
    q = packed("nvfp4", codes, scales, np.float32([1.5]), weight_layout="nk")
    got = np.asarray(dequantize(q, dtype=jnp.float32))
    want = meaning("nvfp4", codes, (scales, np.float32([1.5])))
    np.testing.assert_array_equal(got, want.astype(np.float32))
    again = packed("nvfp4", *unpacked(q), weight_layout="nk")
    np.testing.assert_array_equal(np.asarray(again.values), np.asarray(q.values))


def test_nan_and_infinity_stay_in_their_group(name):
    w = np.random.default_rng(0).standard_normal((2, 64, 256)).astype(jnp.bfloat16)
    w[0, 3, 70] = np.nan
    w[0, 5, 70] = np.inf
    q = quantize(jnp.asarray(w), name, weight_layout="nk")
    got = np.asarray(dequantize(q, dtype=jnp.float32))
    nan = np.isnan(got)
    assert nan[0, 3, 70] and nan.sum() == nan[0, 3].sum()
    assert np.isfinite(got[0, 5]).all() and got[0, 5, 70] > 1


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_largest_numbers_stay_finite(name, dtype):
    most = float(jnp.finfo(dtype).max)
    w = np.zeros((1, 64, 128), np.float32)
    w[0, 0, 0], w[0, 1, 1] = most, -most
    w[0, 2, :2] = most, -most
    got = np.asarray(dequantize(quantize(jnp.asarray(w, dtype), name, weight_layout="nk")))
    got = got.astype(np.float64) / most
    assert (np.sign(got) == np.sign(w)).all()
    assert (np.abs(got[w != 0]) >= 0.75).all() and (np.abs(got) <= 1).all()


LAYER = Layer("", "one superblock of each format, or more", 256, 128, 4, 2, bias=True)


def experts(name, dtype=jnp.bfloat16, two=False, **options):
    """Experts in a format, the same dequantized, tokens and choices."""
    layer = dataclasses.replace(LAYER, **options)
    i = layer_inputs(layer, 24, "with_invalid", np.random.default_rng(5), dtype, "nk")
    parts = {"gate_up": i["w_gate_up"], "down": i["w_down"]}
    biases = {"gate_up_bias": i["b_gate_up"], "down_bias": i["b_down"]}
    if two:
        gate_up, bias = parts.pop("gate_up"), biases.pop("gate_up_bias")
        parts |= dict(zip(("gate", "up"), jnp.split(gate_up, 2, axis=1), strict=True))
        biases |= dict(zip(("gate_bias", "up_bias"), jnp.split(bias, 2, axis=1), strict=True))
    quantized = {n: quantize(w, name, weight_layout="nk") for n, w in parts.items()}
    static = {"layout": "nk", "activation": layer.activation, "order": layer.gate_up}
    q = Experts(**quantized, **biases, **static)
    plain = {n: dequantize(w) for n, w in quantized.items()}
    routing = Routing(i["expert_ids"], i["weights"], layer.num_experts)
    return q, Experts(**plain, **biases, **static), i["x"], routing


def close(got, want):
    """The products are of the same numbers, but for scales that multiply sums."""
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())


# Each class, each dtype of tokens and each order of gates and ups, which are one thing to XLA.
@pytest.mark.parametrize(
    ("name", "order", "dtype"),
    (
        ("mxfp4", "gate_up", jnp.float16),
        ("mxfp4", "interleaved", jnp.bfloat16),
        ("mxfp4", "two", jnp.bfloat16),
        ("mxfp4", "relu2", jnp.float32),
        ("nvfp4", "two", jnp.float32),
        ("int4_g128", "two", jnp.float16),
        ("int4_channel_zp", "two", jnp.float32),
        ("int8_channel", "two", jnp.float16),
    ),
)
def test_layer(name, order, dtype):
    """Weights of bf16, also beside other tokens: what is rounded to bf16 stays so."""
    options = {"activation": order} if order == "relu2" else {"gate_up": order}
    options = {} if order == "two" else options
    q, plain, x, routing = experts(name, two=order == "two", **options)
    x, q, plain = jax.tree.map(
        lambda a: jnp.asarray(np.asarray(a).astype(dtype)) if a.dtype == jnp.bfloat16 else a,
        (x, q, plain),
    )
    layer = jax.jit(moe_mlp)
    y = layer(x, routing, q)
    assert y.dtype == dtype
    close(y, layer(x, routing, plain))


def test_vmap():
    q, _, x, routing = experts("mxfp4", two=True)
    layer, batch = jax.jit(moe_mlp), jnp.stack([x, -x])
    mapped = jax.jit(jax.vmap(lambda x: moe_mlp(x, routing, q)))(batch)
    for i in range(2):
        assert_equal(mapped[i], layer(batch[i], routing, q))


def test_exported_for_any_number_of_tokens():
    q, _, x, routing = experts("int4_channel_zp")
    (t,) = jax.export.symbolic_shape("t")
    struct = lambda a: jax.ShapeDtypeStruct((t, *a.shape[1:]), a.dtype)  # noqa: E731

    def layer(x, ids, weights):
        return moe_mlp(x, Routing(ids, weights), q)

    args = x, routing.expert_ids, routing.weights
    program = jax.export.export(jax.jit(layer), disabled_checks=export_checks())(*map(struct, args))
    assert_equal(program.call(*args), jax.jit(layer)(*args))


DIVIDED = {
    "E": ("a", None, None, "a", None, None),
    "I": (None, "a", None, None, None, "a"),
    "I of the first": (None, "a", None, None, None, None),
    "H": (None, None, "a", None, "a", None),
}


@pytest.mark.parametrize(
    ("format", "order", "kind", "axis"),
    (
        *(("nvfp4", "interleaved", AxisType.Explicit, axis) for axis in ("E", "I", "H")),
        *(("int4_g128", "gate_up", AxisType.Auto, axis) for axis in ("I of the first", "H")),
        *(("int8_channel", "gate_up", AxisType.Explicit, axis) for axis in ("E", "I")),
    ),
)
def test_on_a_mesh(format, order, kind, axis):
    """K is divided by superblocks: 256 of K are two of 128."""
    q, plain, x, routing = experts(format, intermediate=256, gate_up=order)
    want = jax.jit(moe_mlp)(x, routing, plain)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    specs = DIVIDED[axis]

    def put(w, spec):
        of_scales = spec[: w.scales.ndim]
        place = lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, P(*s)))  # noqa: E731
        return dataclasses.replace(
            w, values=place(w.values, spec), scales=place(w.scales, of_scales)
        )

    weights = {"gate_up": put(q.gate_up, specs[:3]), "down": put(q.down, specs[3:])}
    with jax.set_mesh(mesh):
        everywhere = jax.device_put((x, routing, q), NamedSharding(mesh, P()))
        divided = dataclasses.replace(everywhere[2], **weights)
        close(jax.jit(moe_mlp)(*everywhere[:2], divided), want)


def test_divided_products_do_not_gather_weights():
    """What is split over E, N or K stays so: the only exchange is a sum."""
    q, _, x, _ = experts("mxfp4")
    sizes = jnp.array([7, 3, 9, 5], jnp.int32)
    product = lambda x, w: grouped_gemm(x, w, sizes, weight_layout="nk")  # noqa: E731
    want = product(x, q.gate_up)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    put = lambda a, *s: jax.device_put(np.asarray(a), NamedSharding(mesh, P(*s)))  # noqa: E731
    for spec, found in (
        (("a",), "1 all-reduce"),
        ((None, "a"), "none"),
        ((None, None, "a"), "1 all-reduce"),
    ):
        values, scales = put(q.gate_up.values, *spec), put(q.gate_up.scales, *spec[:1])
        w = dataclasses.replace(q.gate_up, values=values, scales=scales)
        program = jax.jit(product).lower(put(x), w).compile()
        close(program(put(x), w), want)
        assert collectives(program.as_text()) == found


@pytest.mark.parametrize(
    ("format", "dispatch"),
    (("nvfp4", "all_gather"), ("int8_channel", "all_to_all"), ("nvfp4", "ragged")),
)
def test_expert_parallel(format, dispatch):
    q, plain, x, routing = experts(format, gate_up="interleaved")
    want = jax.jit(moe_mlp)(x, routing, plain)
    mesh = jax.make_mesh((4, 2), ("e", "i"), axis_types=(AxisType.Auto,) * 2)
    options = {"mesh": mesh, "axis_name": "e", "tensor_axis": "i", "dispatch": dispatch}
    layer = functools.partial(expert_parallel.sharded_moe_mlp, **options)
    if dispatch == "all_gather":
        close(jax.jit(layer)(x, routing, q), want)
        return
    y, lost = jax.jit(functools.partial(layer, capacity_factor=4.0))(x, routing, q)
    close(y, want)
    assert lost == 0


def test_place_experts_keeps_them(one_of_each):
    q, _, x, routing = experts(one_of_each, gate_up="interleaved")
    table = expert_parallel.expert_placement(4, 3, copies={1: 2})
    placed = expert_parallel.place_experts(q, table)
    local = np.array([0, 1, 2, 4], np.int32)
    assert placed.num_experts == 6
    for of_placed, given in zip(jax.tree.leaves(placed), jax.tree.leaves(q), strict=True):
        assert_equal(np.asarray(of_placed)[:5], np.asarray(given)[[0, 1, 2, 1, 3]])
    if one_of_each != "mxfp4":
        return
    layer = jax.jit(moe_mlp)
    assert_equal(layer(x, routing, placed, expert_map=jnp.asarray(local)), layer(x, routing, q))


W = np.zeros((2, 128, 256), jnp.bfloat16)


@pytest.mark.parametrize(
    ("format", "shape", "message"),
    [
        ("mxfp4", (2, 100, 64), "w.shape[1]=100 (N) must be a positive multiple of 64 in mxfp4; "
         "the nearest legal: 64 and 128"),
        ("mxfp4", (2, 32, 64), "must be a positive multiple of 64 in mxfp4; the nearest legal: 64"),
        ("int4_g128", (2, 64, 192), "w.shape[2]=192 (K) must be a positive multiple of 128 in "
         "int4_g128; the nearest legal: 128 and 256"),
        ("int4_channel", (2, 64, 96), "(K) must be a positive multiple of 64 in int4_channel"),
    ],
)  # fmt: skip
def test_shapes_are_refused_with_the_nearest_legal(format, shape, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(jnp.zeros(shape, jnp.bfloat16), format, weight_layout="nk")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"scale": np.ones(2, np.float32)}, ValueError, "scale must be None in mxfp4, whose"),
        ({"scale_format": "e8m0"}, ValueError, "scale_format='e8m0' must be 'float32' in mxfp4"),
        ({"element_type": "e4m3"}, NotImplementedError, "mxfp4 has e2m1"),
        ({"format": "int4_g64", "w": W.astype(np.float32)}, TypeError, "w.dtype=float32 must be"),
    ],
)  # fmt: skip
def test_options_are_refused(arguments, kind, message):
    arguments = {"w": W, "format": "mxfp4", "weight_layout": "nk"} | arguments
    with pytest.raises(kind, match=re.escape(message)):
        quantize(**arguments)


def test_arrays_that_do_not_fit_are_refused():
    q = zeros_of(quantize, W, format="mxfp4", weight_layout="nk")
    replace = dataclasses.replace
    for wrong, message in (
        (replace(q, values=q.values[..., :-1]), "q.values.shape=[2,2,8703] must be [2,2,6528]"),
        (replace(q, values=q.values.astype(jnp.int8)), "q.values.dtype=i8 must be u8"),
        (replace(q, scales=q.scales[:1]), "q.scales.shape=[1] must be [2]"),
        (
            replace(q, layout="tokens", format="int4_g64"),
            "is for weights: its tokens are not quantized",
        ),
        (replace(q, format="int4_g32", dtype=np.dtype(np.float32)), "q.dtype=float32 must be bf16"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            dequantize(wrong)
    int4 = {"format": "int4_g64", "weight_layout": "nk"}
    half = zeros_of(quantize, W.astype(np.float16), **int4)
    both = zeros_of(quantize, W, **int4)
    down = zeros_of(quantize, W.swapaxes(1, 2)[:, :, :64], **int4)
    with pytest.raises(ValueError, match="gate_up.dtype=f16 must equal down.dtype=bf16"):
        Experts(gate_up=half, down=down, layout="nk")
    with pytest.raises(
        ValueError, match="gate_up.format='int4_g64' must equal down.format='mxfp4'"
    ):
        down = zeros_of(quantize, W[:, :, :64].repeat(2, 1), format="mxfp4", weight_layout="nk")
        Experts(gate_up=both, down=down, layout="nk")
    with pytest.raises(TypeError, match="nvfp4 is made of codes, scales, global_scale, not of 2"):
        pack("nvfp4", W.astype(np.uint8), W.astype(np.uint8), weight_layout="nk")


def test_kernels_need_tokens_in_the_dtype_of_the_scales():
    known = dataclasses.replace(QUANTIZED["int4_g64"].of(np.dtype(np.float16)), code=9)
    x = jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)
    reason = cuda.kernel_reason("moe_mlp", known, x.dtype, x=x)
    assert reason is not None and "x.dtype=bfloat16 must be that of the weights, float16" in reason
    assert cuda.kernel_reason("moe_mlp", known, np.dtype(np.float16), x=x) is None


def test_i_that_no_device_can_have_a_part_of_is_refused():
    q, _, x, routing = jax.eval_shape(lambda: experts("int4_channel", gate_up="interleaved"))
    call = lambda *args, **options: jax.eval_shape(  # noqa: E731
        functools.partial(expert_parallel.sharded_moe_mlp, **options), *args
    )
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="tensor_axis='i' must be None in int4_channel"):
        call(x, routing, q, mesh=mesh, axis_name=(), tensor_axis="i")
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="int4_channel is a format of weights alone"):
        call(x, routing, q, mesh=mesh, axis_name="e", dispatch_format="int4_channel")


def test_cuda_makes_one_call(name):
    """The kernels get the bytes as they are stored, and a tile that they have."""
    q, _, x, routing = jax.eval_shape(lambda: experts(name))
    (call,) = calls(cuda_text(moe_mlp, x, routing, q))
    attrs, ins, _ = layer_call(call)
    assert attrs["format"] == f"{QUANTIZED[name].code}:i64" and attrs["layout1"] == "1:i64"
    for array, operand in ((q.gate_up, "w_gate_up"), (q.down, "w_down")):
        assert ins[operand] == "x".join(map(str, array.values.shape)) + "xui8"
    for gemm in ("gemm1", "gemm2"):
        tile = (attrs[gemm][n] for n in ("weight_tile", "token_tile", "cluster", "split_k"))
        assert tuple(int(value.split(":")[0]) for value in tile) in tiles.PACKED


def test_tiles_without_a_kernel_are_refused(name):
    q, _, x, routing = jax.eval_shape(lambda: experts(name))
    config = GemmConfig(256, 160, cluster=2)
    with pytest.raises(
        ValueError, match=r"config\[0\]: the tile \(256, 160, 2, 1\) must be one of"
    ):
        jax.eval_shape(functools.partial(moe_mlp, config=(config, config)), x, routing, q)


def test_sums_are_not_a_choice(name):
    q = jax.eval_shape(lambda: experts(name))[0]
    with pytest.raises(ValueError, match=f"accum='fast' must be None with {name} weights"):
        dataclasses.replace(q, accum="fast")


def test_tiles_of_packed_weights_are_theirs_alone():
    x, sizes = jnp.ones((4, 128), jnp.bfloat16), jnp.array([2, 2], jnp.int32)
    w = jnp.ones((2, 128, 128), jnp.bfloat16)
    rule = r"config: the tile \(128, 16, 1, 1\) is for packed weights"
    with pytest.raises(ValueError, match=rule):
        grouped_gemm(x, w, sizes, config=GemmConfig(128, 16))


def test_forward_format():
    """The value of the layer with quantized weights, and the gradients of that with plain ones."""
    # of numbers that rounding to mxfp4 again leaves as they are
    q, plain, x, routing = experts("mxfp4", gate_up="interleaved")
    forward = dataclasses.replace(plain, forward_format="mxfp4")
    layer = jax.jit(moe_mlp)
    assert_equal(layer(x, routing, forward), layer(x, routing, q))

    @jax.jit
    def gradients(*pair):
        loss = lambda e: jnp.sum(moe_mlp(x, routing, e).astype(jnp.float32))  # noqa: E731
        return [jax.grad(loss)(e).down for e in pair]

    close(*gradients(forward, plain))


@pytest.mark.parametrize(
    ("one_of_each", "kind"),
    (*((n, AxisType.Explicit) for n in CLASSES if n != "int4_g128"), ("int4_g128", AxisType.Auto)),
)
def test_quantize_where_experts_are(one_of_each, kind):
    w = np.random.default_rng(6).standard_normal((2, 256, 64)).astype(np.float16)
    want = dequantize(jax.jit(lambda w: quantize(w, one_of_each, weight_layout="kn"))(w))
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        split = jax.device_put(w, NamedSharding(mesh, P("a")))
        q = jax.jit(lambda w: quantize(w, one_of_each, weight_layout="kn"))(split)
        out = jax.jit(dequantize)(q)
    for a in (q.values, out, *((q.scales,) if kind == AxisType.Explicit else ())):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, P("a")), a.ndim)
    assert_equal(out, want)
