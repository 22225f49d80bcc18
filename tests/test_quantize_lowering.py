"""When CUDA is asked to quantize with the kernels, and when XLA's formulation stays."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe._formats import quantization
from jaxmoe._jax import targets as _targets

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def struct(*shape, dtype=BF16, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def calls(fn, *args):
    """(shared, e8m0, operand types, result types) of each call that CUDA is asked to make."""
    with _targets.force_cuda_lowering():
        traced = jax.jit(lambda *a: fn(*a)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(
        r"@jaxmoe_quantize_v1\(.*?e8m0 = (\d) : i64, shared = (\d) : i64.*? : \((.*?)\) -> (.*)",
        text,
    )
    assert text.count("custom_call @jaxmoe") == len(found)
    types = functools.partial(re.findall, r"tensor<(.*?)>")
    return [(int(s), int(e), types(ins), types(outs)) for e, s, ins, outs in found]


TOKENS = {
    "fp8_tensor": (0, "1", "1024"),
    "fp8_channel": (1, "1x40", "0"),
    "fp8_block": (2, "1x40x3", "0"),
}
WEIGHTS = {
    "fp8_tensor": (0, "4", "4096"),
    "fp8_channel": (1, "4x136", "0"),
    "fp8_block": (3, "4x2x3", "0"),
}


@pytest.mark.parametrize("scale_format", ["float32", "e8m0"])
@pytest.mark.parametrize("format", TOKENS)
def test_tokens(format, scale_format) -> None:
    fn = functools.partial(jaxmoe.quantize_tokens, format=format, scale_format=scale_format)
    shared, scales, partial = TOKENS[format]
    results = ["1x40x264xf8E4M3FN", f"{scales}xf32", f"{partial}xf32"]
    expected = (shared, int(scale_format == "e8m0"), ["1x40x264xf16", "0xf32"], results)
    assert calls(fn, struct(40, 264, dtype=F16)) == [expected]


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("format", WEIGHTS)
def test_weights(format, layout) -> None:
    fn = functools.partial(jaxmoe.quantize, format=format, weight_layout=layout)
    shared, scales, partial = WEIGHTS[format]
    results = ["4x136x264xf8E4M3FN", f"{scales}xf32", f"{partial}xf32"]
    w = struct(4, 264, 136) if layout == "kn" else struct(4, 136, 264)
    assert calls(fn, w) == [(shared, 0, ["4x136x264xbf16", "0xf32"], results)]


@pytest.mark.parametrize("format", TOKENS)
def test_a_static_scale_needs_no_scratch(format) -> None:
    scales = TOKENS[format][1]
    shape = tuple(map(int, scales.split("x")))[1:]
    fn = lambda x, s: jaxmoe.quantize_tokens(x, format, scale=s)  # noqa: E731
    ((_, _, operands, results),) = calls(fn, struct(40, 264), struct(*shape, dtype=F32))
    assert operands[1] == f"{scales}xf32" and results[2] == "0xf32"


def test_e5m2_is_the_dtype_of_the_result() -> None:
    fn = functools.partial(jaxmoe.quantize_tokens, format="fp8_tensor", element_type="e5m2")
    ((_, _, _, results),) = calls(fn, struct(40, 264))
    assert results[0] == "1x40x264xf8E5M2"


def test_vmap_is_one_call() -> None:
    fn = functools.partial(jaxmoe.quantize_tokens, format="fp8_tensor")
    ((_, _, operands, results),) = calls(jax.vmap(fn), struct(5, 40, 264))
    assert operands[0] == "5x40x264xbf16" and results[1:] == ["5xf32", "5120xf32"]
    static = lambda x, s: fn(x, scale=s)  # noqa: E731
    ((_, _, operands, _),) = calls(
        jax.vmap(static, (None, 0)), struct(40, 264), struct(5, dtype=F32)
    )
    assert operands == ["5x40x264xbf16", "5xf32"]


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("format", TOKENS)
def test_vmap_with_static_scales_is_a_loop(format, axes) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 5, 130)), F32)
    scale = jax.vmap(lambda x: jaxmoe.quantize_tokens(x, format))(x).scales
    args = [a if d is not None else a[0] for a, d in zip((x, scale), axes, strict=True)]
    one = lambda x, s: jaxmoe.quantize_tokens(x, format, scale=s)  # noqa: E731
    got = jax.vmap(one, axes)(*args)
    for i in range(3):
        want = one(*(a if d is None else a[i] for a, d in zip(args, axes, strict=True)))
        np.testing.assert_array_equal(got.values[i], want.values)
        np.testing.assert_array_equal(got.scales[i], want.scales)


@pytest.mark.parametrize(("cols", "dtype"), [(260, BF16), (7, F16), (258, F32)])
def test_rows_of_no_16_byte_multiples_stay_with_xla(cols, dtype) -> None:
    fn = functools.partial(jaxmoe.quantize_tokens, format="fp8_block")
    assert calls(fn, struct(40, cols, dtype=dtype)) == []
    (op,) = jaxmoe.explain(fn, struct(40, cols, dtype=dtype)).ops
    row_bytes = cols * jnp.dtype(dtype).itemsize
    assert op.cuda_fallback == f"rows of {row_bytes} bytes are no multiple of 16"
    assert op.cuda_reason is None


def test_more_rows_than_the_kernels_count_stay_with_xla() -> None:
    def fallback(*shape: int, shared: str, scale: Any = None) -> Any:
        operands = quantization.quantize_p.operands(struct(*shape, dtype=F32), scale)
        return quantization.quantize_p.cuda.fallback(operands, shared=shared)

    rows = "2147483648 rows of 8 elements are more than 2^31 - 1"
    assert fallback(2**16, 2**15, 8, shared="row") == rows
    many = 2**31 // quantization.MAX_PARTIALS
    tensors = f"{many} tensors with a scale each are more than {many - 1}"
    assert fallback(many, 1, 8, shared="tensor") == tensors
    for other in ({"shared": "row"}, {"shared": "tensor", "scale": struct(many, dtype=F32)}):
        assert fallback(many, 1, 8, **other) != tensors


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_over_devices_stay_with_xla(axis_type) -> None:
    """XLA would gather the operands of a call; inside of shard_map the device's part is its own."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    fn = functools.partial(jaxmoe.quantize, format="fp8_block", weight_layout="nk")
    w = struct(4, 136, 264, sharding=NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        assert calls(fn, w) == []
        mapped = jax.shard_map(fn, in_specs=P("x"), out_specs=P("x"))
        ((_, _, operands, _),) = calls(mapped, w)
    assert operands[0] == "2x136x264xbf16"


def test_other_cards_stay_with_xla(monkeypatch) -> None:
    monkeypatch.setattr(_targets, "device_reason", lambda: "not a Hopper")
    fn = functools.partial(jaxmoe.quantize_tokens, format="fp8_channel")
    assert calls(fn, struct(40, 264)) == []
