"""Checkpoints' FP8 layouts against NumPy: what each tensor means, there and back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe import checkpoints
from tests.arguments import ones, zeros_of

BF16, F32, F8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
E, N, K = 3, 200, 130


def fp8(shape, seed=0):
    """Random finite e4m3 numbers of every size, as a checkpoint would hold them."""
    codes = np.random.default_rng(seed).integers(0, 127, (2, *shape)).astype(np.uint8)
    return (codes[0] | (codes[1] & 1) << 7).view(ml_dtypes.float8_e4m3fn)


def positive(shape, seed=1):
    return np.exp(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def exact(q):
    return np.asarray(jaxmoe.dequantize(q, dtype=F32))


def f64(a):
    return np.asarray(a).astype(np.float64)


compiled = jax.jit(jaxmoe.quantize, static_argnums=1, static_argnames="weight_layout")


def weights(shape, format, layout="nk", seed=2, scale=1.0):
    w = np.float32(scale * np.random.default_rng(seed).standard_normal(shape))
    return compiled(w, format, weight_layout=layout)


@pytest.mark.parametrize("scale_dtype", [F32, BF16, jnp.float8_e8m0fnu])
def test_block(scale_dtype) -> None:
    weight = fp8((E, N, K))
    scale_inv = jnp.asarray(positive((E, 2, 2))).astype(scale_dtype)
    q = jax.jit(checkpoints.from_block)(weight, scale_inv)
    assert (q.format, q.layout, q.shape, q.dtype) == ("fp8_block", "nk", (E, N, K), BF16)
    expected = np.empty((E, N, K), np.float32)
    for e, n, k in np.ndindex(E, N, K):
        scale = np.float32(scale_inv[e, n // 128, k // 128]) if (n % 128, k % 128) == (0, 0) else 0
        if scale:
            block = np.s_[e, n : n + 128, k : k + 128]
            expected[block] = weight[block].astype(np.float32) * scale
    np.testing.assert_array_equal(exact(q), expected)
    back, scales = checkpoints.to_block(q)
    assert same_bits(back, weight) and same_bits(scales, scale_inv.astype(F32))
    if scale_dtype == jnp.float8_e8m0fnu:  # which some files store as bytes
        stored = np.asarray(scale_inv).view(np.uint8)
        assert same_bits(jax.jit(checkpoints.from_block)(weight, stored).scales, scales)


@pytest.mark.parametrize(
    ("shape", "format"),
    [((E, N, 1), "fp8_channel"), ((E, 1), "fp8_tensor"), ((E,), "fp8_tensor")],
)
def test_compressed_tensors(shape, format) -> None:
    weight, scale = fp8((E, N, K)), jnp.asarray(positive(shape)).astype(BF16)
    q = checkpoints.from_compressed_tensors(weight, scale, dtype=jnp.float16)
    assert (q.format, q.layout, q.dtype) == (format, "nk", jnp.float16)
    spread = np.asarray(scale).astype(np.float32).reshape(E, -1, 1)
    np.testing.assert_array_equal(exact(q), weight.astype(np.float32) * spread)
    back, scales = checkpoints.to_compressed_tensors(q)
    assert same_bits(back, weight)
    assert same_bits(scales, scale.astype(F32).reshape(E, *shape[1:] or (1,)))


def test_weights_of_either_layout_are_written_as_checkpoints_are() -> None:
    w = jnp.asarray(np.random.default_rng(0).standard_normal((2, 130, 200)), F32)
    for format, write in (
        ("fp8_block", checkpoints.to_block),
        ("fp8_channel", checkpoints.to_compressed_tensors),
    ):
        kn = write(jaxmoe.quantize(w, format, weight_layout="kn"))
        nk = write(jaxmoe.quantize(jnp.swapaxes(w, 1, 2), format, weight_layout="nk"))
        assert all(map(same_bits, kn, nk)) and kn[0].shape == (2, 200, 130)


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block"])
def test_joining_changes_no_number(format, layout) -> None:
    shape = (2, 130, 256) if layout == "kn" else (2, 256, 130)
    gate, up = (weights(shape, format, layout, seed) for seed in (0, 1))
    w = checkpoints.join_gate_up(gate, up)
    axis = 2 if layout == "kn" else 1
    assert w.shape[axis] == 512 and w.layout == layout
    assert same_bits(exact(w), np.concatenate([exact(gate), exact(up)], axis))
    joined = jnp.concatenate([jaxmoe.dequantize(q) for q in (gate, up)], axis)
    again = jaxmoe.quantize(joined, format, weight_layout=layout, scale=w.scales)
    assert same_bits(again.values, w.values)


def test_blocks_are_joined_where_none_holds_both() -> None:
    gate, up = (weights((2, 192, 130), "fp8_block", seed=seed) for seed in (0, 1))
    message = (
        "jaxmoe.checkpoints.join_gate_up: gate has halves of 192 outputs, no multiple of 128: the "
        "block between them needs two scales; jaxmoe.dequantize, join and quantize again. Got "
        "gate: a QuantizedArray (fp8_block, values f8_e4m3fn[2,192,130])."
    )
    with pytest.raises(ValueError) as error:
        checkpoints.join_gate_up(gate, up)
    assert str(error.value) == message


def test_a_common_scale() -> None:
    """Per expert the larger scale; its half keeps its bits, the other is rounded once more."""
    gate, up = fp8((E, 40, 32), 0), fp8((E, 40, 32), 1)
    s_gate, s_up = np.float32([1.0, 3.0, 0.7]), np.float32([4.0, 2.0, 0.7])
    q = jax.jit(checkpoints.join_gate_up)(
        checkpoints.from_compressed_tensors(gate, s_gate),
        checkpoints.from_compressed_tensors(up, s_up),
    )
    scale = np.maximum(s_gate, s_up)
    assert same_bits(q.scales, scale)
    for e in range(E):
        for i, (half, s) in enumerate(((gate, s_gate), (up, s_up))):
            ratio = np.float32(s[e] / scale[e])
            expected = (half[e].astype(np.float32) * ratio).astype(ml_dtypes.float8_e4m3fn)
            out = np.asarray(q.values)[e, 40 * i : 40 * i + 40]
            assert same_bits(out, expected)
            assert ratio != 1 or same_bits(out, half[e])
            w = f64(half[e]) * f64(s[e])
            bound = np.maximum(2.0**-4 * np.abs(w), 2.0**-10 * scale[e]) * (1 + 2.0**-20)
            assert (np.abs(f64(out) * f64(scale[e]) - w) <= bound).all()
    # a ratio of 1/4 loses nothing above 2^-6, the smallest normal number, times 4
    large = np.abs(gate[0].astype(np.float32)) >= 2.0**-4
    assert same_bits(exact(q)[0, :40][large], gate[0].astype(np.float32)[large])


def test_a_common_scale_of_experts_without_weights() -> None:
    zero = checkpoints.from_compressed_tensors(np.zeros((2, 4, 4), F8), np.zeros(2, np.float32))
    some = checkpoints.from_compressed_tensors(fp8((2, 4, 4)), np.float32([0, 2]))
    q = checkpoints.join_gate_up(zero, some)
    assert q.scales.tolist() == [0, 2] and same_bits(q.values[1, 4:], fp8((2, 4, 4))[1])
    assert not exact(q)[0].any() and not exact(q)[1, :4].any()


def layer_per_tensor(w, x):
    """One token through expert 0 in the terms of FlashInfer's list, float64 but for the casts."""
    fc1, fc2, (fc1_dequant, fc2_quant, fc2_dequant, x_dequant) = w
    xq = np.float32(f64(x) / f64(x_dequant)).astype(ml_dtypes.float8_e4m3fn)
    z = f64(fc1_dequant)[0] * (f64(fc1)[0] @ f64(xq))
    up, gate = np.split(z, 2)  # FlashInfer's order
    h = np.float32(gate / (1 + np.exp(-gate)) * up * f64(fc2_quant))
    return f64(fc2_dequant)[0] * (f64(fc2)[0] @ f64(h.astype(ml_dtypes.float8_e4m3fn)))


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "two arrays"])
def test_flashinfer_per_tensor(order) -> None:
    """The list means what the formulas say: its layer is that of the dequantized weights."""
    gate, up = (weights((2, 16, 32), "fp8_tensor", seed=seed, scale=0.3) for seed in (0, 1))
    down = weights((2, 32, 16), "fp8_tensor", seed=3)
    static = {"x_scale": jnp.float32(0.01), "h_scale": jnp.float32(0.03)}
    if order == "two arrays":
        experts = jaxmoe.Experts(gate=gate, up=up, down=down, layout="nk", **static)
        joined = checkpoints.join_gate_up(up, gate)
    else:
        one = checkpoints.join_gate_up(*((gate, up) if order == "gate_up" else (up, gate)))
        experts = jaxmoe.Experts(gate_up=one, down=down, order=order, layout="nk", **static)
        joined = one
    out = checkpoints.to_flashinfer(experts)
    fc1, fc2, scales = out
    assert fc1.shape == (2, 32, 32) and [s.shape for s in scales] == [(2,), (), (2,), ()]
    x = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    y = layer_per_tensor(out, x)
    z_gate, z_up = f64(exact(gate))[0] @ x, f64(exact(up))[0] @ x
    expected = f64(exact(down))[0] @ (z_gate / (1 + np.exp(-z_gate)) * z_up)
    assert np.abs(y - expected).max() < 0.15 * np.abs(expected).max()

    back = checkpoints.from_flashinfer(fc1, fc2, scales)
    assert (back.order, back.layout, back.activation) == ("up_gate", "nk", "swiglu")
    assert same_bits(back.down.values, down.values)
    first = back.gate_up.values
    first = jnp.roll(first, 16, 1) if order == "gate_up" else first
    assert same_bits(first, joined.values)
    for a, b in (
        (back.gate_up.scales, joined.scales),
        (back.down.scales, down.scales),
        (back.x_scale, static["x_scale"]),
        (back.h_scale, static["h_scale"]),
    ):
        np.testing.assert_allclose(a, b, rtol=2.0**-21)


def test_flashinfer_scale_of_each_expert() -> None:
    w1, w2 = weights((2, 8, 4), "fp8_tensor"), weights((2, 4, 8), "fp8_tensor")
    h_scale = np.float32([0.5, 0.25])
    experts = jaxmoe.Experts(
        up=w1, down=w2, layout="nk", activation="relu2", x_scale=jnp.float32(2), h_scale=h_scale
    )
    fc1, fc2, scales = checkpoints.to_flashinfer(experts)
    assert same_bits(scales[0], 2 * w1.scales) and scales[1].tolist() == [2.0, 4.0]
    assert same_bits(scales[2], w2.scales * h_scale) and scales[3].tolist() == 2.0
    scales[3] = scales[3].reshape(1)
    back = checkpoints.from_flashinfer(fc1, fc2, scales, activation="relu2", dtype=F32)
    assert same_bits(back.h_scale, h_scale) and back.down.dtype == F32 and back.x_scale.shape == ()
    assert same_bits(back.down.scales, w2.scales) and same_bits(back.gate_up.values, w1.values)


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_flashinfer_blocks(order) -> None:
    w1, w2 = weights((2, 256, 130), "fp8_block"), weights((2, 130, 128), "fp8_block")
    experts = jaxmoe.Experts(gate_up=w1, down=w2, order=order, layout="nk")
    fc1, fc2, scales = checkpoints.to_flashinfer(experts)
    w = checkpoints.from_flashinfer(fc1, fc2, scales)
    assert w.x_scale is None and w.h_scale is None and len(scales) == 2
    halves = np.split(exact(w1), 2, axis=1)
    up_first = np.concatenate(halves[::-1] if order == "gate_up" else halves, 1)
    assert same_bits(exact(w.gate_up), up_first) and same_bits(exact(w.down), exact(w2))


def quantized(shape, format):
    return zeros_of(jaxmoe.quantize, ones(shape), format=format, weight_layout="nk")


def experts(gate_up, down, **fields):
    return jaxmoe.Experts(gate_up=gate_up, down=down, layout="nk", **fields)


FC1, FC2 = np.zeros((2, 8, 4), F8), np.zeros((2, 4, 4), F8)
TENSOR, CHANNEL = quantized((2, 8, 4), "fp8_tensor"), quantized((2, 8, 4), "fp8_channel")
BLOCK = quantized((2, 8, 4), "fp8_block")
TENSOR_DOWN, CHANNEL_DOWN, BLOCK_DOWN = (
    quantized((2, 4, 4), format) for format in ("fp8_tensor", "fp8_channel", "fp8_block")
)
TOKENS = zeros_of(jaxmoe.quantize_tokens, ones((2, 4)), format="fp8_tensor")
ONES = ones(2)
S = np.float32(1)
ERRORS = (
    ("from_block", (FC1.astype(BF16), ONES), {}, TypeError, "weight.dtype=bf16 must be f8_e4m3fn."),
    ("from_block", (FC1[0], ONES), {}, ValueError, "weight must have 3 axes [E,N,K], not 2."),
    (
        "from_block",
        (FC1, ones((2, 1, 2))),
        {},
        ValueError,
        "weight_scale_inv.shape=[2,1,2] must be [2,1,1] (fp8_block, layout nk).",
    ),
    (
        "from_block",
        (FC1, ones((2, 1, 1), jnp.int32)),
        {},
        TypeError,
        "weight_scale_inv.dtype=i32 must be f32 or bf16 or f16 or f8_e8m0fnu.",
    ),
    (
        "from_compressed_tensors",
        (FC1, ones((2, 8))),
        {},
        ValueError,
        "weight_scale.shape=[2,8] must be [2,8,1] (per channel) or [2,1] or [2] (per tensor).",
    ),
    ("to_block", (FC1,), {}, TypeError, "q must be a jaxmoe.QuantizedArray."),
    (
        "to_block",
        (TENSOR,),
        {},
        ValueError,
        "q must be weights in fp8_block, not fp8_tensor of layout nk.",
    ),
    (
        "to_compressed_tensors",
        (TOKENS,),
        {},
        ValueError,
        "q must be weights in fp8_channel or fp8_tensor, not fp8_tensor of layout tokens.",
    ),
    (
        "join_gate_up",
        (TENSOR, CHANNEL),
        {},
        ValueError,
        "up.format=fp8_channel must equal gate.format=fp8_tensor.",
    ),
    (
        "join_gate_up",
        (TENSOR, quantized((2, 4, 4), "fp8_tensor")),
        {},
        ValueError,
        "up.shape=(2, 4, 4) must equal gate.shape=(2, 8, 4).",
    ),
    (
        "from_flashinfer",
        (FC1, FC2, [S] * 3),
        {},
        ValueError,
        "quant_scales must hold 2 arrays (fp8_block), 4 (fp8_tensor, mx), 6 (nvfp4) or 8 (int4), "
        "not 3.",
    ),
    (
        "from_flashinfer",
        (FC1, FC2, [S] * 4),
        {},
        ValueError,
        "quant_scales[0].shape=[] must be [2] (num_experts).",
    ),
    ("to_flashinfer", (TENSOR,), {}, TypeError, "experts must be a jaxmoe.Experts."),
    (
        "to_flashinfer",
        (experts(CHANNEL, CHANNEL_DOWN),),
        {},
        ValueError,
        "gate_up must be weights in fp8_tensor or fp8_block or nvfp4 or mxfp4 or mxfp8 or "
        "int4_g128, not fp8_channel of layout nk.",
    ),
    (
        "to_flashinfer",
        (experts(TENSOR, TENSOR_DOWN, x_scale=S),),
        {},
        ValueError,
        "h_scale must be given for fp8_tensor.",
    ),
    (
        "to_flashinfer",
        (experts(BLOCK, BLOCK_DOWN, order="up_gate", h_scale=S),),
        {},
        ValueError,
        "h_scale must be None for fp8_block.",
    ),
    (
        "to_flashinfer",
        (experts(BLOCK, BLOCK_DOWN),),
        {},
        ValueError,
        "gate_up has halves of 4 outputs, no multiple of 128: the block between them needs",
    ),
    (
        "to_flashinfer",
        (experts(TENSOR, TENSOR_DOWN, order="interleaved", x_scale=S, h_scale=S),),
        {},
        ValueError,
        "order='interleaved' must be 'up_gate' or 'gate_up': FlashInfer has halves.",
    ),
    (
        "to_flashinfer",
        (experts(TENSOR, TENSOR_DOWN, down_bias=ones((2, 4), BF16)),),
        {},
        ValueError,
        "down_bias must be None: FlashInfer takes biases apart from the weights.",
    ),
)


@pytest.mark.parametrize(("name", "args", "options", "kind", "message"), ERRORS)
def test_errors(name, args, options, kind, message) -> None:
    with pytest.raises(kind) as error:
        getattr(checkpoints, name)(*args, **options)
    assert str(error.value).startswith(f"jaxmoe.checkpoints.{name}: {message}")
