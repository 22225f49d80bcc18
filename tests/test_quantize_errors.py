"""Every message of quantize, quantize_tokens, dequantize and QuantizedArray, word for word."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe._formats import PLAIN, QUANTIZED
from tests import layers
from tests.arguments import ones, zeros, zeros_of

BF16, F32 = jnp.bfloat16, jnp.float32
E, N, K, R = 2, 130, 257, 5
W, X = zeros((E, N, K), BF16), zeros((R, K), BF16)
WEIGHTS = {"w": W, "format": "fp8_block", "weight_layout": "nk"}
TOKENS = {"x": X, "format": "fp8_block"}


def unknown(*names: str) -> tuple:
    there = ", ".join(names)
    return (
        ({"format": "e4m3"}, ValueError, f"format='e4m3' must be one of {there}."),
        ({"format": None}, TypeError, f"format must be one of {there}. Got format: None."),
        ({"format": X}, TypeError, f"format must be one of {there}. Got format: bf16[5,257]."),
    )


SHARED = (
    (
        {"element_type": "e3m4"},
        ValueError,
        "element_type='e3m4' must be one of e4m3, e5m2, e2m1, int4, int8.",
    ),
    (
        {"element_type": "e5m2"},
        NotImplementedError,
        "element_type='e5m2' is only for format='fp8_tensor'; fp8_block has e4m3.",
    ),
    (
        {"element_type": "e5m2", "format": "fp8_channel"},
        NotImplementedError,
        "element_type='e5m2' is only for format='fp8_tensor'; fp8_channel has e4m3.",
    ),
    (
        {"scale_format": "ue8m0"},
        ValueError,
        "scale_format='ue8m0' must be one of float32, e8m0.",
    ),
    (
        {"scale": ones(3), "scale_format": "e8m0"},
        ValueError,
        "scale_format='e8m0' must be 'float32' if scale is given: it is not rounded. "
        "Got scale: f32[3].",
    ),
    (
        {"scale": 0.5},
        TypeError,
        "scale must be a JAX or NumPy array. Got scale: 0.5.",
    ),
    (
        {"scale": ones(3, BF16)},
        TypeError,
        "scale.dtype=bf16 must be f32. Got scale: bf16[3].",
    ),
)

WEIGHT_ERRORS = (
    *unknown(*QUANTIZED),
    (
        {"w": [[[1.0]]]},
        TypeError,
        "w must be a JAX or NumPy array. Got w: a list.",
    ),
    (
        {"w": X},
        ValueError,
        "w must have 3 axes [E,N,K], not 2. Got w: bf16[5,257].",
    ),
    (
        {"w": X[0], "weight_layout": "kn"},
        ValueError,
        "w must have 3 axes [E,K,N], not 1. Got w: bf16[257].",
    ),
    (
        {"w": W.astype(jnp.int8)},
        TypeError,
        "w.dtype=i8 must be bf16 or f16 or f32. Got w: i8[2,130,257].",
    ),
    (
        {"w": np.zeros((1, 1, 1))},
        TypeError,
        "w.dtype=f64 must be bf16 or f16 or f32. Got w: f64[1,1,1].",
    ),
    (
        {"w": W.astype(jnp.float8_e4m3fn)},
        TypeError,
        "w.dtype=f8_e4m3fn must be bf16 or f16 or f32. Got w: f8_e4m3fn[2,130,257].",
    ),
    (
        {"w": zeros_of(jaxmoe.quantize, W, format="fp8_block", weight_layout="nk")},
        TypeError,
        "w must be a JAX or NumPy array, not a QuantizedArray; jaxmoe.dequantize(w) gives one. "
        "Got w: a QuantizedArray (fp8_block, values f8_e4m3fn[2,130,257]).",
    ),
    (
        {"weight_layout": "tokens"},
        ValueError,
        "weight_layout='tokens' must be one of kn, nk.",
    ),
    (
        {"scale": ones((E, 1, 3))},
        ValueError,
        "scale.shape=[2,1,3] must be [2,2,3] (fp8_block, layout nk). Got scale: f32[2,1,3].",
    ),
    (
        {"scale": ones((E, N, 1)), "format": "fp8_channel"},
        ValueError,
        "scale.shape=[2,130,1] must be [2,130] (fp8_channel, layout nk). Got scale: f32[2,130,1].",
    ),
    (
        {"scale": ones((E, N)), "format": "fp8_channel", "weight_layout": "kn"},
        ValueError,
        "scale.shape=[2,130] must be [2,257] (fp8_channel, layout kn). Got scale: f32[2,130].",
    ),
    (
        {"scale": ones(()), "format": "fp8_tensor"},
        ValueError,
        "scale.shape=[] must be [2] (fp8_tensor, layout nk). Got scale: f32[].",
    ),
)

TOKEN_ERRORS = (
    *unknown("fp8_tensor", "fp8_channel", "fp8_block", "mxfp4", "mxfp8", "nvfp4"),
    (
        {"x": X[0]},
        ValueError,
        "x must have 2 axes [R,K], not 1. Got x: bf16[257].",
    ),
    (
        {"x": X.astype(jnp.int32)},
        TypeError,
        "x.dtype=i32 must be bf16 or f16 or f32. Got x: i32[5,257].",
    ),
    (
        {"scale": ones((R, 2))},
        ValueError,
        "scale.shape=[5,2] must be [5,3] (fp8_block, layout tokens). Got scale: f32[5,2].",
    ),
    (
        {"scale": ones((1,)), "format": "fp8_tensor"},
        ValueError,
        "scale.shape=[1] must be [] (fp8_tensor, layout tokens). Got scale: f32[1].",
    ),
)


def assert_raises(kind, message, fn, *args, **kwargs) -> None:
    with pytest.raises(kind) as error:
        fn(*args, **kwargs)
    assert str(error.value) == message


def assert_message(fn, args, kind, message) -> None:
    """The message comes while tracing, too: from shapes and dtypes, never from values."""
    assert_raises(kind, message, fn, **args)
    arrays = {name: value for name, value in args.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in args.items() if name not in arrays}
    assert_raises(kind, message, jax.eval_shape, lambda arrays: fn(**arrays, **static), arrays)


@pytest.mark.parametrize(("change", "kind", "message"), SHARED + WEIGHT_ERRORS)
def test_quantize(change, kind, message) -> None:
    assert_message(jaxmoe.quantize, WEIGHTS | change, kind, f"jaxmoe.quantize: {message}")


@pytest.mark.parametrize(("change", "kind", "message"), SHARED + TOKEN_ERRORS)
def test_quantize_tokens(change, kind, message) -> None:
    message = f"jaxmoe.quantize_tokens: {message}"
    assert_message(jaxmoe.quantize_tokens, TOKENS | change, kind, message)


def test_the_layout_of_weights_has_no_default() -> None:
    with pytest.raises(TypeError, match="weight_layout"):
        jaxmoe.quantize(W, "fp8_block")


FIELDS = {
    "values": W.astype(jnp.float8_e4m3fn),
    "scales": ones((E, N)),
    "format": "fp8_channel",
    "layout": "nk",
    "dtype": BF16,
}
FIELD_ERRORS = (
    ({"format": "int4"}, ValueError, "format='int4' must be one of fp8_tensor, fp8_channel, "),
    ({"layout": "rows"}, ValueError, "layout='rows' must be one of kn, nk, tokens."),
    ({"dtype": "float64"}, TypeError, "dtype=float64 must be bfloat16, float16 or float32."),
    ({"dtype": "float7"}, TypeError, "dtype='float7' must be bfloat16, float16 or float32."),
    ({"dtype": None}, TypeError, "dtype=None must be bfloat16, float16 or float32."),
)


@pytest.mark.parametrize(("change", "kind", "message"), FIELD_ERRORS)
def test_fields(change, kind, message) -> None:
    with pytest.raises(kind, match=re.escape(f"jaxmoe.QuantizedArray: {message}")):
        jaxmoe.QuantizedArray(**FIELDS | change)


LEAF_ERRORS = (
    (
        {"scales": ones((E, K))},
        ValueError,
        "q.scales.shape=[2,257] must be [2,130] (fp8_channel, layout nk). "
        "Got q.scales: f32[2,257].",
    ),
    (
        {"scales": ones((E, N), BF16)},
        TypeError,
        "q.scales.dtype=bf16 must be f32. Got q.scales: bf16[2,130].",
    ),
    (
        {"values": W},
        TypeError,
        "q.values.dtype=bf16 must be f8_e4m3fn. Got q.values: bf16[2,130,257].",
    ),
    (
        {"values": W, "format": "fp8_tensor"},
        TypeError,
        "q.values.dtype=bf16 must be f8_e4m3fn or f8_e5m2. Got q.values: bf16[2,130,257].",
    ),
    (
        {"values": FIELDS["values"][0]},
        ValueError,
        "q.values must have 3 axes [E,N,K], not 2. Got q.values: f8_e4m3fn[130,257].",
    ),
    (
        {"layout": "tokens"},
        ValueError,
        "q.values must have 2 axes [R,K], not 3. Got q.values: f8_e4m3fn[2,130,257].",
    ),
)


@pytest.mark.parametrize(("change", "kind", "message"), LEAF_ERRORS)
def test_dequantize(change, kind, message) -> None:
    q = jaxmoe.QuantizedArray(**FIELDS | change)
    assert_raises(kind, f"jaxmoe.dequantize: {message}", jax.eval_shape, jaxmoe.dequantize, q)


def test_dequantize_takes_quantized_arrays_to_floats() -> None:
    message = "jaxmoe.dequantize: q must be a jaxmoe.QuantizedArray. Got q: bf16[2,130,257]."
    assert_raises(TypeError, message, jaxmoe.dequantize, W)
    q = jaxmoe.QuantizedArray(**FIELDS)
    message = "jaxmoe.dequantize: dtype=int8 must be bfloat16, float16 or float32."
    assert_raises(TypeError, message, jaxmoe.dequantize, q, dtype=jnp.int8)


def test_ops_of_plain_arrays_refuse_quantized_ones() -> None:
    routing = jaxmoe.Routing(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
    x, w_gate_up, w_down = jnp.zeros((4, 8)), jnp.zeros((2, 8, 12)), jnp.zeros((2, 6, 8))
    q = jaxmoe.quantize_tokens(jnp.zeros((2, 12)), "fp8_channel")
    message = (
        "jaxmoe.{}: {} must be a JAX or NumPy array, not a QuantizedArray; jaxmoe.dequantize({}) "
        "gives one. Got {}: a QuantizedArray (fp8_channel, values f8_e4m3fn[2,12])."
    )
    for op, name, fn in (
        (
            "Experts",
            "gate_up_bias",
            lambda: jaxmoe.Experts(gate_up=w_gate_up, down=w_down, gate_up_bias=q),
        ),
        ("moe_mlp", "residual", lambda: layers.moe_mlp(x, routing, w_gate_up, w_down, residual=q)),
        ("permute", "x", lambda: jaxmoe.permute(q, jaxmoe.plan(routing.expert_ids, 2))),
    ):
        assert_raises(TypeError, message.format(op, name, name, name), fn)
        assert_raises(TypeError, message.format(op, name, name, name), jax.jit(fn))


def test_a_format_without_values_makes_none():
    """Which no public function asks for: what a new format that lacks `encode` says."""
    with pytest.raises(TypeError, match=f"^{PLAIN.name} has no quantized values$"):
        PLAIN.encode(X, None, element_type="e4m3", e8m0=False, tokens=True)
