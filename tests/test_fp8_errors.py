"""Every message about quantized arguments of moe_mlp and grouped_gemm, word for word."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import (
    GemmConfig,
    QuantizedArray,
    Routing,
    dequantize,
    grouped_gemm,
    quantize,
    quantize_tokens,
)
from tests.arguments import ones, zeros, zeros_of
from tests.layers import moe_mlp, of_op

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
E, T, H, INTER = 3, 5, 16, 32


def weights(*shape, format="fp8_tensor", layout="kn", element_type="e4m3"):
    options = {"format": format, "weight_layout": layout, "element_type": element_type}
    return zeros_of(quantize, zeros(shape, BF16), **options)


def tokens(format="fp8_tensor", width=H, element_type="e4m3"):
    x = zeros((T, width), BF16)
    return zeros_of(quantize_tokens, x, format=format, element_type=element_type)


def layer(format):
    return {
        "w_gate_up": weights(E, H, 2 * INTER, format=format),
        "w_down": weights(E, INTER, H, format=format),
    }


X = zeros((T, H), BF16)
LAYER = {
    "x": X,
    "routing": Routing(zeros((T, 1), I32), zeros((T, 1))),
    **layer("fp8_tensor"),
}
PLAIN = {"w_gate_up": zeros((E, H, 2 * INTER), BF16), "w_down": zeros((E, INTER, H), BF16)}
SCALE = np.float32(0.01)
GOT_UP = "w_gate_up: a QuantizedArray (fp8_tensor, values f8_e4m3fn[3,64,16])"
GOT_DOWN = "w_down: a QuantizedArray (fp8_tensor, values f8_e4m3fn[3,16,32])"


def with_leaf(q, **leaf):
    return dataclasses.replace(q, **leaf)


DECODE = GemmConfig(128, 8)
ONE = (dataclasses.replace(DECODE, one_kernel=True), DECODE)


def one_kernel(inter, format="fp8_tensor", **rest):
    """A layer of `inter` activations a token that asks for one kernel."""
    first, second = weights(E, H, 2 * inter, format=format), weights(E, inter, H, format=format)
    return {"w_gate_up": first, "w_down": second, "config": ONE, **rest}


LAYER_ERRORS = (
    (
        one_kernel(INTER),
        ValueError,
        "config[0].one_kernel must be False if scales of activations follow from all features of "
        "a token. Got config: a tuple.",
    ),
    (
        one_kernel(3088, "fp8_block"),
        ValueError,
        "config[0].one_kernel must be False with scales of blocks and more than 3072 activations "
        "a token. Got config: a tuple.",
    ),
    (
        one_kernel(2064, intermediate_scale=SCALE),
        ValueError,
        "config[0].one_kernel must be False if one product promotes its sums and the other does "
        "not. Got config: a tuple.",
    ),
    (
        {"w_down": PLAIN["w_down"]},
        TypeError,
        "jaxmoe.Experts: gate_up and down must all be jaxmoe.QuantizedArray, or none of them. "
        "Got gate_up: a QuantizedArray (fp8_tensor, values f8_e4m3fn[3,64,16]), down: "
        "bf16[3,32,16].",
    ),
    (
        {"w_gate_up": PLAIN["w_gate_up"]},
        TypeError,
        "jaxmoe.Experts: gate_up and down must all be jaxmoe.QuantizedArray, or none of them. "
        "Got gate_up: bf16[3,16,64], down: a QuantizedArray (fp8_tensor, values "
        "f8_e4m3fn[3,16,32]).",
    ),
    (
        PLAIN | {"x": tokens()},
        TypeError,
        "x must be a JAX or NumPy array, because experts.gate_up and experts.down are no "
        "QuantizedArrays; jaxmoe.dequantize(x) gives one. Got x: a QuantizedArray (fp8_tensor, "
        "values f8_e4m3fn[5,16]).",
    ),
    (
        {"w_down": weights(E, INTER, H, format="fp8_block")},
        ValueError,
        "jaxmoe.Experts: gate_up.format='fp8_tensor' must equal down.format='fp8_block'. Got "
        "gate_up: a QuantizedArray (fp8_tensor, values f8_e4m3fn[3,64,16]), down: a "
        "QuantizedArray (fp8_block, values f8_e4m3fn[3,16,32]).",
    ),
    (
        {"x": tokens("fp8_channel")},
        ValueError,
        "x.format='fp8_channel' must equal experts.down.format='fp8_tensor'. Got x: a "
        "QuantizedArray (fp8_channel, values f8_e4m3fn[5,16]), experts.down: a QuantizedArray "
        "(fp8_tensor, values f8_e4m3fn[3,16,32]).",
    ),
    (
        {"x": tokens(element_type="e5m2")},
        TypeError,
        "x.values.dtype=f8_e5m2 must be f8_e4m3fn. Got x.values: f8_e5m2[5,16].",
    ),
    (
        {"x": weights(E, H, T)},
        ValueError,
        "x.layout='kn' must be 'tokens': make it with jaxmoe.quantize_tokens. "
        "Got x: a QuantizedArray (fp8_tensor, values f8_e4m3fn[3,5,16]).",
    ),
    (
        {"weight_layout": "nk"},
        ValueError,
        "jaxmoe.Experts: gate_up.layout='kn' must equal layout='nk': give layout='kn'. Got "
        "gate_up: a QuantizedArray (fp8_tensor, values f8_e4m3fn[3,64,16]).",
    ),
    (
        {"w_down": tokens()},
        ValueError,
        "jaxmoe.Experts: down.layout='tokens' must equal layout='kn': make it with "
        "jaxmoe.quantize. Got down: a QuantizedArray (fp8_tensor, values f8_e4m3fn[5,16]).",
    ),
    (
        {"w_down": with_leaf(LAYER["w_down"], scales=ones((E, 1)))},
        ValueError,
        "experts.down.scales.shape=[3,1] must be [3] (fp8_tensor, layout kn). Got "
        "experts.down.scales: f32[3,1].",
    ),
    (
        {"w_down": with_leaf(LAYER["w_down"], scales=ones(E, BF16))},
        TypeError,
        "experts.down.scales.dtype=bf16 must be f32. Got experts.down.scales: bf16[3].",
    ),
    (
        {"w_gate_up": with_leaf(LAYER["w_gate_up"], values=zeros((E, 64, H), jnp.int8))},
        TypeError,
        "experts.gate_up.values.dtype=i8 must be f8_e4m3fn or f8_e5m2. Got "
        "experts.gate_up.values: i8[3,64,16].",
    ),
    (
        {"w_down": weights(E, H, H)},
        ValueError,
        "jaxmoe.Experts: gate_up.shape=[3, 16, 64] must be [3, 16, 32] = [E,H,2I] with the E, "
        "H and I of down [E,I,H], because swiglu is gated. Got gate_up: a QuantizedArray "
        "(fp8_tensor, values f8_e4m3fn[3,64,16]), down: a QuantizedArray (fp8_tensor, values "
        "f8_e4m3fn[3,16,16]).",
    ),
    (
        {"w_gate_up": weights(E, 48, 64)},
        ValueError,
        "jaxmoe.Experts: gate_up.shape=[3, 48, 64] must be [3, 16, 64] = [E,H,2I] with the E, "
        "H and I of down [E,I,H], because swiglu is gated. Got gate_up: a QuantizedArray "
        "(fp8_tensor, values f8_e4m3fn[3,64,48]), down: a QuantizedArray (fp8_tensor, values "
        "f8_e4m3fn[3,16,32]).",
    ),
    (
        {"b_down": zeros((E, H))},
        TypeError,
        "experts.down_bias.dtype=f32 must equal x.dtype=bf16. Got experts.down_bias: "
        "f32[3,16], x: bf16[5,16].",
    ),
    (
        {"x": tokens(), "residual": zeros((T, H))},
        TypeError,
        "residual.dtype=f32 must equal x.dtype=bf16. Got residual: f32[5,16], "
        "x: a QuantizedArray (fp8_tensor, values f8_e4m3fn[5,16]).",
    ),
    (
        PLAIN | {"accum": "fast"},
        ValueError,
        "jaxmoe.Experts: accum='fast' must be None if no weight is quantized.",
    ),
    (
        {"accum": "slow"},
        ValueError,
        "jaxmoe.Experts: accum='slow' must be one of fast, promoted.",
    ),
    (
        {"accum": True},
        TypeError,
        "jaxmoe.Experts: accum must be one of fast, promoted. Got accum: True.",
    ),
    (
        layer("fp8_block") | {"accum": "fast"},
        ValueError,
        "jaxmoe.Experts: accum='fast' must be 'promoted' or None: fp8_block scales each 128 of k "
        "apart.",
    ),
    (
        PLAIN | {"x_scale": SCALE},
        ValueError,
        "experts.x_scale must be None because no weight is quantized: it is for fp8_tensor and "
        "token_format='e4m3' or 'nvfp4' alone. Got experts.x_scale: f32[].",
    ),
    (
        layer("fp8_channel") | {"intermediate_scale": SCALE},
        ValueError,
        "experts.h_scale must be None because the weights are fp8_channel: it is for "
        "fp8_tensor and token_format='e4m3' or 'nvfp4' alone. Got experts.h_scale: f32[].",
    ),
    (
        {"x": tokens(), "x_scale": SCALE},
        ValueError,
        "experts.x_scale must be None because x is quantized: it has its scale. Got "
        "experts.x_scale: f32[], x: a QuantizedArray (fp8_tensor, values f8_e4m3fn[5,16]).",
    ),
    (
        {"x_scale": 0.01},
        TypeError,
        "experts.x_scale must be a JAX or NumPy array. Got experts.x_scale: 0.01.",
    ),
    (
        {"x_scale": np.float16(0.01)},
        TypeError,
        "experts.x_scale.dtype=f16 must be f32. Got experts.x_scale: f16[].",
    ),
    (
        {"x_scale": ones(E)},
        ValueError,
        "experts.x_scale.shape=[3] must be []. Got experts.x_scale: f32[3].",
    ),
    (
        {"intermediate_scale": ones(E + 1), "num_experts": E + 1},
        ValueError,
        "experts.h_scale.shape=[4] must be [] or [3]. Got experts.h_scale: f32[4].",
    ),
    (
        {"x": tokens(), "apply_weight_on_input": True},
        NotImplementedError,
        "apply_weight_on_input=True needs an x that is not quantized yet. "
        "Got x: a QuantizedArray (fp8_tensor, values f8_e4m3fn[5,16]).",
    ),
    (
        {"batch_invariant": True, "intermediate_scale": SCALE},
        ValueError,
        "batch_invariant=True needs experts.x_scale with fp8_tensor weights: the scale is made "
        "of all tokens without it. Got experts.x_scale: None.",
    ),
    (
        {"batch_invariant": True, "x": tokens()},
        ValueError,
        "batch_invariant=True needs experts.h_scale with fp8_tensor weights: the scale is made "
        "of all tokens without it. Got experts.h_scale: None.",
    ),
    (
        {"config": (GemmConfig(128, 8, split_k=2), None)},
        ValueError,
        "config[0].split_k=2 needs a product over more than 128 elements, not 16. "
        "Got config[0]: a GemmConfig.",
    ),
    (
        layer("fp8_block") | {"config": (None, GemmConfig(256, 160, cluster=2))},
        ValueError,
        "config[1]: no kernel of the tile (256, 160, 2, 1) promotes its sums, as fp8_block, "
        "accum='promoted', and by default more than 2048 elements do. Got config[1]: a GemmConfig.",
    ),
    (
        layer("fp8_block") | {"config": (GemmConfig(256, 128), None)},
        ValueError,
        "config[0] must have a tile of 128 rows and up to 192 tokens with blocks of scales and "
        "an intermediate size of 32, not a multiple of 64. Got config: a tuple.",
    ),
    (
        layer("fp8_tensor") | {"config": (None, GemmConfig(128, 256)), "accum": "fast"},
        ValueError,
        "config[1]: the tile (128, 256, 1, 1) is for FP8 sums that are promoted, as those of "
        "fp8_block, with accum='promoted', and by default of more than 2048 elements are. Got "
        "config[1]: a GemmConfig.",
    ),
)


@pytest.mark.parametrize("change, kind, message", LAYER_ERRORS)
def test_moe_mlp(change, kind, message):
    arguments = {**LAYER, **change}
    for call in (lambda: moe_mlp(**arguments), jax.jit(lambda: moe_mlp(**arguments))):
        with pytest.raises(kind) as error:
            call()
        assert str(error.value) == of_op(message)


def test_arguments_that_the_table_changes_are_right():
    for format in ("fp8_tensor", "fp8_block"):
        out = moe_mlp(**LAYER | layer(format))
        assert out.shape == (T, H) and out.dtype == BF16 and not out.any()
    config = (GemmConfig(256, 160, cluster=2),) * 2
    assert not moe_mlp(**LAYER, config=config, accum="fast", batch_invariant=False).any()
    static = {"x_scale": SCALE, "intermediate_scale": SCALE}
    assert not moe_mlp(**LAYER, **static, batch_invariant=True).any()


GEMM = {
    "lhs": X,
    "rhs": weights(E, H, INTER, format="fp8_channel"),
    "group_sizes": zeros(E, I32),
}
GOT_RHS = "rhs: a QuantizedArray (fp8_channel, values f8_e4m3fn[3,32,16])"

GEMM_ERRORS = (
    (
        {"rhs": zeros((E, H, INTER), BF16), "lhs": tokens("fp8_channel")},
        TypeError,
        "lhs must be a JAX or NumPy array, because rhs is no QuantizedArray; "
        "jaxmoe.dequantize(lhs) gives one. "
        "Got lhs: a QuantizedArray (fp8_channel, values f8_e4m3fn[5,16]).",
    ),
    (
        {"lhs": tokens("fp8_block")},
        ValueError,
        "lhs.format='fp8_block' must equal rhs.format='fp8_channel'. "
        f"Got lhs: a QuantizedArray (fp8_block, values f8_e4m3fn[5,16]), {GOT_RHS}.",
    ),
    (
        {"weight_layout": "nk"},
        ValueError,
        f"rhs.layout='kn' must equal weight_layout='nk': give weight_layout='kn'. Got {GOT_RHS}.",
    ),
    (
        {"lhs": zeros((T, INTER), BF16)},
        ValueError,
        "rhs.shape[1]=16 must equal lhs.shape[1]=32 (K, the contracted axis). "
        f"Got {GOT_RHS}, lhs: bf16[5,32].",
    ),
    (
        {"bias": zeros((E, INTER))},
        TypeError,
        "bias.dtype=f32 must equal lhs.dtype=bf16. Got bias: f32[3,32], lhs: bf16[5,16].",
    ),
    (
        {"precision": "highest"},
        ValueError,
        "precision must be None if rhs is quantized: products of FP8 numbers are exact. "
        "Got precision: 'highest'.",
    ),
    (
        {"rhs": weights(E, H, INTER), "batch_invariant": True},
        ValueError,
        "batch_invariant=True needs a quantized lhs with rhs in fp8_tensor: its scale is made of "
        "all rows; give jaxmoe.quantize_tokens(lhs, 'fp8_tensor', scale=...). Got lhs: bf16[5,16], "
        "rhs: a QuantizedArray (fp8_tensor, values f8_e4m3fn[3,32,16]).",
    ),
    (
        {"rhs": zeros((E, H, INTER), BF16), "accum": "promoted"},
        ValueError,
        "accum='promoted' must be None if no weight is quantized.",
    ),
    (
        {"accum": "promoted", "config": GemmConfig(256, 160, cluster=2)},
        ValueError,
        "config: no kernel of the tile (256, 160, 2, 1) promotes its sums, as fp8_block, "
        "accum='promoted', and by default more than 2048 elements do. Got config: a GemmConfig.",
    ),
    (
        {"rhs": with_leaf(GEMM["rhs"], scales=ones((E, H)))},
        ValueError,
        "rhs.scales.shape=[3,16] must be [3,32] (fp8_channel, layout kn). "
        "Got rhs.scales: f32[3,16].",
    ),
)


@pytest.mark.parametrize("change, kind, message", GEMM_ERRORS)
def test_grouped_gemm(change, kind, message):
    arguments = {**GEMM, **change}
    for call in (lambda: grouped_gemm(**arguments), jax.jit(lambda: grouped_gemm(**arguments))):
        with pytest.raises(kind) as error:
            call()
        assert str(error.value) == "jaxmoe.grouped_gemm: " + message


NO_DERIVATIVE = "no derivative is defined with respect to quantized {} (here: {}); take "
NO_DERIVATIVE += "jax.lax.stop_gradient of these, or jaxmoe.dequantize them"


@pytest.mark.parametrize("name", ("w_gate_up", "w_down"))
def test_the_layer_has_no_derivative_of_weights(name):
    def loss(value, decode=lambda w: w):
        arguments = LAYER | {n: decode(LAYER[n]) for n in ("w_gate_up", "w_down")}
        arguments[name] = decode(with_leaf(LAYER[name], scales=value))
        return moe_mlp(**arguments).astype(F32).sum()

    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(jax.grad(loss), ones(E))
    scales = {"w_gate_up": "experts.gate_up.scales", "w_down": "experts.down.scales"}[name]
    assert str(error.value) == (
        f"jaxmoe.moe_mlp: {NO_DERIVATIVE.format('weights', scales)}. Got x: bf16[5,16]."
    )
    assert jax.eval_shape(jax.grad(lambda v: loss(v, dequantize)), ones(E)).shape == (E,)


def test_grouped_gemm_has_no_derivative_of_quantized_rows():
    q = tokens("fp8_channel")

    def loss(scales):
        lhs = QuantizedArray(q.values, scales, q.format, q.layout, q.dtype)
        return grouped_gemm(**GEMM | {"lhs": lhs}).astype(F32).sum()

    with pytest.raises(NotImplementedError) as error:
        jax.grad(loss)(q.scales)
    assert str(error.value) == (
        f"jaxmoe.grouped_gemm: {NO_DERIVATIVE.format('x', 'x_scales')}. Got x: f8_e4m3fn[5,16]."
    )
