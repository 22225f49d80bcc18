"""Tokens as quantized arrays of packed formats: their bytes, and the products that take them."""

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
    checkpoints,
    dequantize,
    expert_parallel,
    grouped_gemm,
    moe_mlp,
    quantize_tokens,
    reference,
)
from jaxmoe._formats import QUANTIZED
from jaxmoe._testing import assert_close, assert_equal
from tests import packed_oracle, token_oracle
from tests.test_token_formats import STATIC, case, close, jitted

FORMATS = ("mxfp4", "mxfp8", "nvfp4")
GROUPS = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
tokens_in = jax.jit(quantize_tokens, static_argnames="format")


def test_formats():
    assert tuple(n for n, f in QUANTIZED.items() if f.token_arrays and f.packed) == FORMATS


def bytes_of(format, rows, k, seed=0):
    """Codes and factors as libraries hold them, and the numbers [rows, k] they stand for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, k), np.uint8)
    factors = rng.integers(90, 120, (rows, k // GROUPS[format]), np.uint8)
    powers = packed_oracle.spread(np.exp2(factors - 127.0), k)
    if format == "mxfp8":
        codes = rng.integers(0, 126, (rows, k), np.uint8)
        return codes, factors, packed_oracle.E4M3[codes] * powers
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if format == "mxfp4":
        return packed, factors, packed_oracle.e2m1(codes) * powers
    scales = packed_oracle.spread(packed_oracle.E4M3[factors], k)
    return packed, factors, packed_oracle.e2m1(codes) * scales


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_of_libraries(format):
    values, factors, numbers = bytes_of(format, 5, 96)
    factor = np.float32(0.5) if format == "nvfp4" else None
    q = checkpoints.from_tokens(values, factors, factor, format=format)
    assert q.shape == (5, 96) and q.layout == "tokens" and q.dtype == jnp.bfloat16
    want = numbers * (1 if factor is None else 0.5)
    np.testing.assert_array_equal(np.asarray(dequantize(q, dtype=jnp.float32), np.float64), want)
    same, scales, total = checkpoints.to_tokens(q)
    np.testing.assert_array_equal(np.asarray(same).view(np.uint8), values)
    np.testing.assert_array_equal(np.asarray(scales).view(np.uint8), factors)
    assert total == (1 if factor is None else factor)
    *parts, _ = checkpoints.to_tokens(q, swizzled=True)
    again = checkpoints.from_tokens(*parts, factor, format=format, swizzled=True)
    assert_equal(again.values, q.values)


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_tokens_is_its_formula(format):
    x = np.random.default_rng(2).standard_normal((6, 64)).astype(jnp.bfloat16)
    static = np.float32(0.002) if format == "nvfp4" else None
    for scale in {None, static}:
        q = tokens_in(x, format=format, scale=scale)
        numbers, total = token_oracle.rounded(x, format, scale)
        got = np.asarray(dequantize(q, dtype=jnp.float32))
        np.testing.assert_array_equal(got, (numbers * total).astype(np.float32))


def swizzled(scales):
    """By plain loops over rows and groups."""
    rows, groups = scales.shape
    tiles, blocks = -(-rows // 128), -(-groups // 4)
    out = np.zeros(tiles * blocks * 512, scales.dtype)
    for r in range(rows):
        for g in range(groups):
            tile = (r // 128) * blocks + g // 4
            out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4] = scales[r, g]
    return out.reshape(tiles * 128, blocks * 4)


def test_swizzled_factors():
    rng = np.random.default_rng(3)
    for rows, groups in ((1, 1), (130, 6), (128, 8)):
        factors = rng.integers(0, 256, (2, rows, groups), np.uint8)
        tiles = np.asarray(checkpoints.swizzle_scales(factors))
        np.testing.assert_array_equal(tiles, np.stack([swizzled(f) for f in factors]))
        words = np.ascontiguousarray(tiles).view(np.int32)
        e4m3 = tiles.view(jnp.float8_e4m3fn)
        for given in (tiles, tiles.reshape(2, -1), words, e4m3):
            back = np.asarray(checkpoints.unswizzle_scales(given, rows, groups))
            np.testing.assert_array_equal(back.view(np.uint8), factors)
        alone = checkpoints.unswizzle_scales(tiles[1].reshape(-1), rows, groups)
        np.testing.assert_array_equal(np.asarray(alone), factors[1])


@pytest.mark.parametrize(
    ("weights", "token_format", "array"),
    (
        ("nvfp4", "nvfp4", "nvfp4"),
        ("mxfp4", "mxfp8", "mxfp8"),
        ("int4_g128", "e4m3", "fp8_channel"),
    ),
)
def test_products_of_given_tokens(weights, token_format, array):
    """The layer of tokens quantized before has the bits of the layer that quantizes them."""
    x, routing, e = case(weights, token_format)
    q = tokens_in(x, format=array)
    assert_equal(jitted(q, routing, e), jitted(x, routing, e))
    sizes = jnp.array([3, 0, 4, 1], jnp.int32)
    product = jax.jit(functools.partial(grouped_gemm, weight_layout="nk"))
    got = product(q, e.gate_up, sizes, bias=e.gate_up_bias)
    expert = np.repeat(np.arange(4), sizes)
    numbers = np.asarray(dequantize(q, dtype=jnp.float32), np.float64)
    w = np.asarray(dequantize(e.gate_up, dtype=jnp.float32), np.float64)
    want = token_oracle.product(numbers, expert, w, np.asarray(e.gate_up_bias, np.float64))
    assert_close(got, want, want.astype(jnp.bfloat16).astype(np.float64))


def test_reference_has_them_too():
    x, routing, e = case("nvfp4", "nvfp4", **STATIC)
    run = jax.jit(functools.partial(reference.moe_mlp, weight_layout="nk", token_array="nvfp4"),
                  static_argnames="dtype")  # fmt: skip
    given = x, routing.expert_ids, routing.weights, e.gate_up, e.down
    static = {"b_gate_up": e.gate_up_bias, "b_down": e.down_bias, "x_scale": e.x_scale}
    static["intermediate_scale"] = e.h_scale
    wanted = (run(*given, **static, dtype=d) for d in (jnp.float32, jnp.bfloat16))
    assert_close(jitted(x, routing, e), *wanted)


def test_given_tokens_of_a_batch_and_of_a_mesh():
    x, routing, e = case("mxfp4", "mxfp8")
    both = jax.jit(jax.vmap(lambda x: quantize_tokens(x, "mxfp8")))(jnp.stack([x, 3 * x]))
    mapped = jax.jit(jax.vmap(lambda q: moe_mlp(q, routing, e)))(both)
    for i in range(2):
        assert_equal(mapped[i], jitted(jax.tree.map(lambda a, i=i: a[i], both), routing, e))
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        q = jax.tree.map(lambda a: a[0], both)
        want = jitted(q, routing, e)
        place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))  # noqa: E731
        q = dataclasses.replace(q, values=place(q.values, "a"), scales=place(q.scales))
        routing, e = jax.tree.map(lambda a: place(a, "a"), (routing, e))
        close(jitted(q, routing, e), want)


@pytest.mark.parametrize("token_format", ("nvfp4", "e4m3"))
def test_tokens_are_sent_quantized(token_format):
    weights, array = {"nvfp4": ("nvfp4", "nvfp4"), "e4m3": ("int4_g128", "fp8_channel")}[
        token_format
    ]
    static = STATIC if token_format == "nvfp4" else {}
    x, routing, e = case(weights, token_format, **static)
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = {"mesh": mesh, "axis_name": "e", "dispatch_format": array}
    call = functools.partial(expert_parallel.sharded_moe_mlp, **options)
    close(jax.jit(call)(x, routing, e), jitted(x, routing, e))
    with pytest.raises(ValueError, match="dispatch_format='mxfp4' must be None or"):
        call(x, routing, e, dispatch_format="mxfp4")


@pytest.mark.parametrize(
    "weights, sent, token_format",
    [
        ("mxfp8", "mxfp8", "mxfp8"),
        ("mxfp4", "mxfp4", "mxfp4"),
        ("mxfp4", "mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("int4_g128", "fp8_channel", "e4m3"),
    ],
)
def test_a_format_of_tokens_is_sent_where_it_is_that_of_the_layer(weights, sent, token_format):
    x, routing, e = case(weights, None)
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def call(e):
        options = {"axis_name": "e", "dispatch_format": sent}
        return expert_parallel.sharded_moe_mlp(x, routing, e, mesh=mesh, **options)

    step = f"tokens are in {sent} with experts.token_format={token_format!r}"
    with pytest.raises(ValueError, match=rf"dispatch_format={sent!r} must be None: .*{step}"):
        jax.eval_shape(call, e)
    allowed = dataclasses.replace(e, token_format=token_format)
    assert jax.eval_shape(call, allowed).shape == x.shape  # as the message says


def test_refusals():
    x, routing, e = case("nvfp4", "nvfp4", **STATIC)
    q = tokens_in(x, format="nvfp4")
    plain = dataclasses.replace(e, token_format=None, x_scale=None, h_scale=None)
    values, scales, total = checkpoints.to_tokens(q)
    make = functools.partial(checkpoints.from_tokens, format="nvfp4")
    half = jnp.zeros((3, 24), jnp.bfloat16)
    e4m3 = tokens_in(x, format="fp8_channel")
    w4 = case("int4_g128", "e4m3")[2]
    for call, kind, message in (
        (lambda: moe_mlp(q, routing, plain), ValueError,
         "x must be a JAX or NumPy array: without a token_format tokens beside experts.down in nv"),
        (lambda: moe_mlp(q, routing, e), ValueError, "experts.x_scale must be None because x is"),
        (lambda: moe_mlp(tokens_in(x, format="mxfp8"), routing, e), ValueError,
         "x.format='mxfp8' must equal experts.down.format='nvfp4'"),
        (lambda: moe_mlp(q, routing, w4), ValueError, "x.format='nvfp4' must be 'fp8_channel', in"),
        (lambda: grouped_gemm(q, w4.down, jnp.ones(4, jnp.int32), weight_layout="nk"), ValueError,
         "lhs must be a JAX or NumPy array: without"),
        (lambda: grouped_gemm(dataclasses.replace(tokens_in(x, format="mxfp8"), dtype=np.float16),
                              case("mxfp8", "mxfp8")[2].down, jnp.ones(4, jnp.int32),
                              weight_layout="nk"),
         NotImplementedError, "lhs.dtype=f16 must be bf16 or f32 with token_format='mxfp8'"),
        (lambda: jax.grad(lambda s: grouped_gemm(
            dataclasses.replace(e4m3, scales=s), w4.down, jnp.ones(4, jnp.int32),
            weight_layout="nk").sum())(e4m3.scales),
         NotImplementedError, "with respect to quantized lhs"),
        (lambda: quantize_tokens(half, "nvfp4"), ValueError,
         "x.shape[1]=24 (K) must be a multiple of 16 in nvfp4; the nearest legal: 16 and 32"),
        (lambda: quantize_tokens(x, "mxfp4", scale=jnp.float32(1)), ValueError,
         "scale must be None in mxfp4"),
        (lambda: quantize_tokens(x, "int4_g32"), ValueError, "is for weights"),
        (lambda: dequantize(dataclasses.replace(q, values=q.values[:, 1:])), ValueError,
         "q.values.shape=[8,71] must be [8,63]"),
        (lambda: make(values, scales), ValueError, "global_scale must be given in nvfp4"),
        (lambda: make(values, scales, total, format="mxfp4"), TypeError, "scales.dtype=f8_e4m3fn"),
        (lambda: make(values, scales[:1], total), ValueError, "a factor for 16 of K=128"),
        (lambda: make(values[:, :12], scales, total), ValueError,
         "values must hold a multiple of 16 numbers a row in nvfp4, not 24; the nearest legal: 16"),
        (lambda: make(values, scales, total, swizzled=True), ValueError,
         "scales must hold 1024 bytes after leading axes: 1 x 2 tiles of 128 x 4"),
        (lambda: make(values, scales, total, format="fp8_block"), ValueError,
         "format='fp8_block' must be one of mxfp4, mxfp8, nvfp4"),
        (lambda: checkpoints.to_tokens(w4.down), ValueError, "q.layout='nk' must be 'tokens'"),
        (lambda: checkpoints.swizzle_scales(values[0]), ValueError, "scales must have the axes"),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(message)):
            call()
