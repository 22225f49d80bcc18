"""What CUDA would be asked to run with FP8 weights, on any machine: StableHLO, explain, export."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import GemmConfig, QuantizedArray, Routing, Swiglu, _gemm, explain, grouped_gemm
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import FP8 as FORMATS
from jaxmoe.quantize import scales_shape
from tests.layers import moe_mlp
from tests.lowered import NO_ACTIVATION, calls, cuda_text, layer_call

BF16, F16, F32, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32
F8, F8_WIDE = jnp.float8_e4m3fn, jnp.float8_e5m2
T, K, E, H, INTER = 6, 2, 4, 144, 272


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def quantized(*shape, format, layout="nk", dtype=BF16, values=F8):
    """A QuantizedArray of structs; `shape` is that of the values."""
    scales = struct(*scales_shape(format, layout, shape), dtype=F32)
    return QuantizedArray(struct(*shape, dtype=values), scales, format, layout, jnp.dtype(dtype))


def weights(format, **options):
    return (
        quantized(E, 2 * INTER, H, format=format, **options),
        quantized(E, H, INTER, format=format, **options),
    )


ROUTING = Routing(struct(T, K, dtype=I32), struct(T, K, dtype=F32))


def cuda_call(fn, *args):
    """The one custom call of ours in `fn` lowered for CUDA."""
    (call,) = calls(cuda_text(fn, *args))
    return call


def tile(weight_tile, token_tile, gather, split_k=1, raster=1, cluster=1):
    values = {
        "weight_tile": weight_tile,
        "token_tile": token_tile,
        "cluster": cluster,
        "split_k": split_k,
        "raster": raster,
        "gather": gather,
        "one_kernel": 0,
    }
    return {name: f"{value}:i64" for name, value in values.items()}


def test_the_layer_is_one_call_with_these_attributes():
    config = (GemmConfig(128, 32, raster=2, gather=True), GemmConfig(256, 128))
    options = {
        "activation": Swiglu(alpha=1.5, beta=1.0, limit=7.0),
        "gate_up": "interleaved",
        "weight_layout": "nk",
        "num_experts": 9,
        "expert_offset": 3,
        "accum": "promoted",
        "config": config,
    }
    given = {
        "b_gate_up": struct(E, 2 * INTER),
        "b_down": struct(E, H),
        "residual": struct(T, H),
        "x_scale": struct(dtype=F32),
        "intermediate_scale": struct(E, dtype=F32),
    }
    call = cuda_call(
        lambda a, o: moe_mlp(*a, **o, **options),
        (struct(T, H), ROUTING, *weights("fp8_tensor", values=F8_WIDE)),
        given,
    )
    attrs, operands, results = layer_call(call)
    assert attrs == {
        "num_experts": "9:i64",
        "num_local_experts": "4:i64",
        "expert_offset": "3:i64",
        "gate_up": "2:i64",
        "layout1": "1:i64",
        "layout2": "1:i64",
        "format": "1:i64",
        "tokens": "0:i64",
        "promoted1": "1:i64",
        "promoted2": "1:i64",
        "finalize": "1:i64",
        "activation": {
            "kind": "0:i64",
            "gated": "1:i64",
            "c1": "1.500000e+00:f32",
            "c3": "0.000000e+00:f32",
            "limit": "7.000000e+00:f32",
            "beta": "1.000000e+00:f32",
        },
        "gemm1": tile(128, 32, 1, raster=2),
        "gemm2": tile(256, 128, 0),
    }
    assert operands == {
        "x": "6x144xbf16",
        "expert_ids": "6x2xi32",
        "weights": "6x2xf32",
        "w_gate_up": "4x544x144xf8E5M2",
        "gate_up_scales": "4xf32",
        "w_down": "4x144x272xf8E5M2",
        "down_scales": "4xf32",
        "b_gate_up": "4x544xbf16",
        "b_down": "4x144xbf16",
        "residual": "6x144xbf16",
        "x_scale": "1xf32",
        "h_scale": "4xf32",
    }
    assert results == {
        "y": "6x144xbf16",
        "rows": "12x144xbf16",
        "act": "12x272xbf16",
        "xq": "6x144xf8E4M3FN",
        "hq": "12x272xf8E4M3FN",
        "floats": f"{4 + 4 + 1024}xf32",
        "index": f"{_gemm.scratch.mlp_index_size(12, 4, False)}xi32",
    }


# scales of x, of the intermediate: 6 tokens of 2 blocks, 12 rows of 3 blocks, padded to fours
SCRATCH = {"fp8_tensor": 4 + 4, "fp8_channel": 8 + 12, "fp8_block": 12 + 36}


@pytest.mark.parametrize("gather", (False, True))
@pytest.mark.parametrize("quantized_x", (False, True))
@pytest.mark.parametrize("format", FORMATS)
def test_scratch(format, quantized_x, gather):
    """Rows of x are quantized where they are fetched from, or in expert order, or not at all."""
    x = quantized(T, H, format=format, layout="tokens", dtype=F16) if quantized_x else struct(T, H)
    config = (GemmConfig(128, 8, gather=gather), None)
    call = cuda_call(
        lambda *a: moe_mlp(*a, weight_layout="nk", config=config), x, ROUTING, *weights(format)
    )
    attrs, operands, results = layer_call(call)
    dtype = "f16" if quantized_x else "bf16"
    scales = {"fp8_tensor": "f32", "fp8_channel": "6xf32", "fp8_block": "6x2xf32"}[format]
    given = ("6x144xf8E4M3FN", scales) if quantized_x else ("6x144xbf16", None)
    assert (operands["x"], operands.get("x_scales")) == given
    rows = (0 if quantized_x else T) if gather else T * K
    del results["index"]
    assert results == {
        "y": f"6x144x{dtype}",
        "rows": f"12x144x{dtype}",
        "act": f"12x272x{dtype}",
        **({"xq": f"{rows}x144xf8E4M3FN"} if rows else {}),
        "hq": "12x272xf8E4M3FN",
        "floats": f"{SCRATCH[format] + 1024}xf32",
    }
    assert attrs["format"] == f"{FORMATS.index(format) + 1}:i64"
    promoted = int(format == "fp8_block")
    assert (attrs["promoted1"], attrs["promoted2"]) == (f"{promoted}:i64",) * 2


def test_long_products_are_promoted_unless_told():
    def promoted(hidden, inter, **options):
        w1 = quantized(E, 2 * inter, hidden, format="fp8_channel")
        w2 = quantized(E, hidden, inter, format="fp8_channel")
        attrs = cuda_call(
            lambda *a: moe_mlp(*a, weight_layout="nk", **options),
            struct(T, hidden),
            ROUTING,
            w1,
            w2,
        )[1]
        return attrs["promoted1"][0] + attrs["promoted2"][0]

    assert promoted(2048, 2064) == "01"
    assert promoted(2064, 2048) == "10"
    assert promoted(2064, 2064, accum="fast") == "00"
    assert promoted(128, 128, accum="promoted") == "11"


def test_grouped_gemm_call():
    rhs = quantized(E, 40, H, format="fp8_block")
    lhs = quantized(10, H, format="fp8_block", layout="tokens")
    config = GemmConfig(256, 128, raster=0, gather=True)
    call = cuda_call(
        lambda *a: grouped_gemm(*a, weight_layout="nk", preferred_element_type=F32, config=config),
        lhs,
        rhs,
        struct(E, dtype=I32),
    )
    assert call == (
        "jaxmoe_grouped_gemm_v1",
        {
            "layout": "1:i64",
            "format": "3:i64",
            "promoted": "1:i64",
            "gate_up": "0:i64",
            "activation": NO_ACTIVATION,
            "config": tile(256, 128, 0, raster=0),
        },
        [
            "1x10x144xf8E4M3FN", "1x10x2xf32", "0xi32", "1x4x40x144xf8E4M3FN", "1x4x1x2xf32",
            "0x0xbf16", "1x4xi32", "1x4xi32",
        ],
        ["1x10x40xf32", "0x0xbf16", "4xi32"],
    )  # fmt: skip


def test_grouped_gemm_quantizes_its_rows_first():
    rhs = quantized(E, 40, H, format="fp8_channel", layout="kn")
    args = (struct(10, H, dtype=F16), rhs, struct(E, dtype=I32))
    report = explain(lambda *a: grouped_gemm(*a, bias=jnp.ones((E, 40), F16)), *args)
    op = report.ops[-1]
    assert op.cuda_target == "jaxmoe_grouped_gemm_v1" and op.cuda_attrs["promoted"] == 0
    assert op.operands == (
        "f8_e4m3fn[1,10,144]", "f8_e4m3fn[1,4,40,144]", "i32[1,4]", "i32[1,4]", "f16[1,4,40]",
        "f32[1,10]", "f32[1,4,40]",
    )  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_vmap_of_grouped_gemm_is_one_call(format):
    """Examples whose tokens have one scale each become rows that have it each."""
    rhs = quantized(E, 40, H, format=format, layout="kn")
    args = (struct(3, 10, H), rhs, struct(3, E, dtype=I32))
    text = cuda_text(jax.vmap(lambda *a: grouped_gemm(*a), (0, None, 0)), *args)
    (call,) = [c for c in calls(text) if c[0] == "jaxmoe_grouped_gemm_v1"]
    _, attrs, operands, results = call
    by_block = format == "fp8_block"
    assert attrs["format"] == ("3:i64" if by_block else "2:i64")  # a scale a channel
    assert operands[:2] == ["3x10x144xf8E4M3FN", "3x10x2xf32" if by_block else "3x10xf32"]
    assert operands[3:5] == ["1x4x40x144xf8E4M3FN", "1x4x1x2xf32" if by_block else "1x4x40xf32"]
    assert results[0] == "3x10x40xbf16" and "stablehlo.while" not in text


def test_explain_shows_the_layer_and_its_bytes():
    args = (struct(T, H), ROUTING, *weights("fp8_channel"))
    (op,) = explain(lambda *a: moe_mlp(*a, weight_layout="nk"), *args).ops
    assert op.op == "jaxmoe_moe_mlp" and op.cuda_target == "jaxmoe_moe_mlp_v1"
    assert {
        "f8_e4m3fn[4,544,144]", "f32[4,544]", "f8_e4m3fn[4,144,272]", "f32[4,144]",
    } <= set(op.operands)  # fmt: skip
    rows, act, tokens, quantized_act, floats, index = op.cuda_scratch
    assert (tokens.dtype, tokens.bytes) == ("f8_e4m3fn", 6 * 144)
    assert (quantized_act.dtype, quantized_act.bytes) == ("f8_e4m3fn", 12 * 272)
    assert (floats.dtype, floats.bytes) == ("f32", 4 * (8 + 12 + 1024))
    parts = rows.bytes + act.bytes + tokens.bytes + quantized_act.bytes
    assert op.cuda_scratch_bytes == parts + floats.bytes + index.bytes
    assert op.cuda_attrs["gemm1"]["gather"] == 1


REFUSED = (
    (
        {"hidden": 24},
        "jaxmoe.moe_mlp: experts.gate_up.values.shape[2]=24 must be a positive multiple of 16 on "
        "CUDA (rows of 16-byte multiples); the nearest legal: 16 and 32. "
        "Got experts.gate_up.values: f8_e4m3fn[4,64,24].",
    ),
    (
        {"inter": 40},
        "jaxmoe.moe_mlp: experts.down.values.shape[2]=40 must be a positive multiple of 16 on CUDA "
        "(rows of 16-byte multiples); the nearest legal: 32 and 48. "
        "Got experts.down.values: f8_e4m3fn[4,32,40].",
    ),
    (
        {"dtype": F32},
        "jaxmoe.moe_mlp: x.dtype=f32 must be bf16 or f16 on CUDA. Got x: f32[6,32].",
    ),
)


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_layers_that_cuda_refuses(change, message):
    sizes = {"hidden": 32, "inter": 32, "dtype": BF16} | change
    hidden, inter = sizes["hidden"], sizes["inter"]
    w1 = quantized(E, 2 * inter, hidden, format="fp8_tensor")
    w2 = quantized(E, hidden, inter, format="fp8_tensor")
    args = (struct(T, hidden, dtype=sizes["dtype"]), ROUTING, w1, w2)
    fn = lambda *a: moe_mlp(*a, weight_layout="nk")  # noqa: E731
    (op,) = explain(fn, *args).ops
    assert op.cuda_reason == message
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        cuda_call(fn, *args)


@pytest.mark.parametrize(
    ("lhs", "rhs", "options", "message"),
    (
        (
            struct(9, 24),
            quantized(E, 40, 24, format="fp8_tensor"),
            {},
            "rhs.values.shape[2]=24 must be a positive multiple of 16 on CUDA",
        ),
        (
            struct(9, 32),
            quantized(E, 20, 32, format="fp8_tensor"),
            {},
            "rhs.values.shape[1]=20 must be a positive multiple of 8 on CUDA",
        ),
        (
            struct(9, 32),
            quantized(E, 40, 32, format="fp8_tensor"),
            {"preferred_element_type": F16},
            "preferred_element_type=f16 must be bf16 or f32 on CUDA",
        ),
    ),
)
def test_products_that_cuda_refuses(lhs, rhs, options, message):
    fn = lambda *a: grouped_gemm(*a, weight_layout="nk", **options)  # noqa: E731
    op = explain(fn, lhs, rhs, struct(E, dtype=I32)).ops[-1]
    assert op.cuda_reason.startswith(f"jaxmoe.grouped_gemm: {message}")


def test_vmap_over_tokens_is_one_call_where_each_token_has_its_scales():
    routing = Routing(struct(3, T, K, dtype=I32), struct(3, T, K, dtype=F32))

    def operands(format, **options):
        fn = lambda *a: moe_mlp(*a, weight_layout="nk", **options)  # noqa: E731
        args = (struct(3, T, H), routing, *weights(format))
        return layer_call(cuda_call(jax.vmap(fn, (0, 0, None, None)), *args))[1]

    for format in FORMATS[1:]:
        assert operands(format)["x"] == "18x144xbf16"
        assert operands(format)["w_gate_up"] == "4x544x144xf8E4M3FN"
    assert operands("fp8_tensor")["x"] == "6x144xbf16", "a scale of each example: a loop"
    static = {"x_scale": jnp.float32(1), "intermediate_scale": jnp.float32(1)}
    assert operands("fp8_tensor", **static)["x"] == "18x144xbf16"


def test_scan_over_stacked_weights_holds_one_call():
    def network(x, routing, w1, w2):
        step = lambda x, w: (moe_mlp(x, routing, *w, weight_layout="nk"), None)  # noqa: E731
        return jax.lax.scan(step, x, (w1, w2))[0]

    stacked = jax.tree.map(lambda a: struct(5, *a.shape, dtype=a.dtype), weights("fp8_block"))
    _, operands, _ = layer_call(cuda_call(network, struct(T, H), ROUTING, *stacked))
    assert operands["w_gate_up"] == "4x544x144xf8E4M3FN"
    assert operands["gate_up_scales"] == "4x5x2xf32"


def test_export_for_cpu_and_cuda():
    """Saved on a machine without a GPU; the CPU part of the file runs here."""
    w = tuple(
        jaxmoe.quantize(jnp.ones(s, BF16) / 8, "fp8_block", weight_layout="nk")
        for s in ((2, 64, 32), (2, 32, 32))
    )
    leaves, tree = jax.tree.flatten(w)

    def fn(x, ids, weights, *leaves):
        w1, w2 = jax.tree.unflatten(tree, leaves)
        args = x, Routing(ids, weights), w1, w2
        out = moe_mlp(*args, weight_layout="nk", do_finalize=False)
        return moe_mlp(*args, weight_layout="nk") + out.rows

    args = (jnp.ones((3, 32), BF16), jnp.zeros((3, 1), I32), jnp.ones((3, 1)), *leaves)
    with _targets.force_cuda_lowering():
        exported = jax.export.export(
            jax.jit(fn), platforms=("cpu", "cuda"), disabled_checks=jaxmoe.export_checks()
        )(*args)
    assert exported.mlir_module().count("@jaxmoe_moe_mlp_v1(") == 2
    loaded = jax.export.deserialize(exported.serialize())
    assert (loaded.call(*args) == fn(*args)).all()
