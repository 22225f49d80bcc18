"""Every message of moe_mlp, word for word."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe import GemmConfig, Routing, explain
from tests.layers import moe_mlp, of_op

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
E, T, TOP_K, H, INTER = 3, 5, 2, 8, 4


def zeros(*shape, dtype=BF16):
    return np.zeros(shape, dtype)


def routing(num_tokens=T, top_k=TOP_K, ids=I32, weights=F32):
    return Routing(zeros(num_tokens, top_k, dtype=ids), zeros(num_tokens, top_k, dtype=weights))


LAYER = {
    "x": zeros(T, H),
    "routing": routing(),
    "w_gate_up": zeros(E, H, 2 * INTER),
    "w_down": zeros(E, INTER, H),
}
MAP = zeros(7, dtype=I32)
DECODE = GemmConfig(128, 8)
ONE = dataclasses.replace(DECODE, one_kernel=True)
WINDOW_HINT = "give expert_map if it depends on the device"
NEEDS_SCALES = (
    "must be bf16 or f16 or f32; quantized weights and tokens come with their scales as a "
    "jaxmoe.QuantizedArray"
)

LAYER_ERRORS = (
    ({"x": zeros(H)}, ValueError, "x must have 2 axes [T,H], not 1. Got x: bf16[8]."),
    (
        {"x": zeros(T, H, dtype=jnp.int8)},
        NotImplementedError,
        f"x.dtype=i8 {NEEDS_SCALES}. Got x: i8[5,8].",
    ),
    (
        {"routing": (zeros(T, TOP_K), zeros(T, TOP_K))},
        TypeError,
        "routing must be a jaxmoe.Routing. Got routing: a tuple.",
    ),
    (
        {"routing": routing(ids=jnp.int16)},
        TypeError,
        "routing.expert_ids.dtype=i16 must be i32. Got routing.expert_ids: i16[5,2].",
    ),
    (
        {"routing": routing(weights=BF16)},
        TypeError,
        "routing.weights.dtype=bf16 must be f32. Got routing.weights: bf16[5,2].",
    ),
    (
        {"routing": routing(num_tokens=4)},
        ValueError,
        "routing.expert_ids.shape[0]=4 must equal x.shape[0]=5 (num_tokens). "
        "Got routing.expert_ids: i32[4,2], x: bf16[5,8].",
    ),
    (
        {"routing": Routing(zeros(T, TOP_K, dtype=I32), zeros(T, 1, dtype=F32))},
        ValueError,
        "routing.weights.shape[1]=1 must equal routing.expert_ids.shape[1]=2 (top_k). "
        "Got routing.weights: f32[5,1], routing.expert_ids: i32[5,2].",
    ),
    (
        {"routing": Routing(zeros(T, dtype=I32), zeros(T, dtype=F32))},
        ValueError,
        "routing.expert_ids must have 2 axes [T,K], not 1. Got routing.expert_ids: i32[5].",
    ),
    (
        {"routing": routing(top_k=4)},
        ValueError,
        "top_k=4 (routing.expert_ids.shape[1]) must be in [1, 3] (num_experts; give it if the "
        "weights hold only some of the experts). Got expert_ids: i32[5,4], experts.down: "
        "bf16[3,4,8].",
    ),
    (
        {"routing": routing(top_k=0)},
        ValueError,
        "top_k=0 (routing.expert_ids.shape[1]) must be in [1, 3] (num_experts; give it if the "
        "weights hold only some of the experts). Got expert_ids: i32[5,0], experts.down: "
        "bf16[3,4,8].",
    ),
    (
        {"w_gate_up": zeros(H, 2 * INTER)},
        ValueError,
        "jaxmoe.Experts: gate_up must have 3 axes [E,H,2I], not 2. Got gate_up: bf16[8,8].",
    ),
    (
        {"w_down": zeros(INTER, H), "weight_layout": "nk", "activation": "relu"},
        ValueError,
        "jaxmoe.Experts: down must have 3 axes [E,H,I], not 2. Got down: bf16[4,8].",
    ),
    (
        {"w_gate_up": np.zeros((E, H, 2 * INTER), ml_dtypes.float8_e4m3fn)},
        NotImplementedError,
        "jaxmoe.Experts: gate_up.dtype=f8_e4m3fn must be bf16 or f16 or f32; quantized weights "
        "and tokens come with their scales as a jaxmoe.QuantizedArray. Got "
        "gate_up: f8_e4m3fn[3,8,8].",
    ),
    (
        {"w_down": zeros(E, INTER, H, dtype=jnp.uint8)},
        NotImplementedError,
        "jaxmoe.Experts: down.dtype=u8 must be bf16 or f16 or f32; quantized weights and "
        "tokens come with their scales as a jaxmoe.QuantizedArray. Got down: "
        "u8[3,4,8].",
    ),
    (
        {"w_down": zeros(E, INTER, H, dtype=F32)},
        TypeError,
        "jaxmoe.Experts: gate_up.dtype=bf16 must equal down.dtype=f32. Got gate_up: "
        "bf16[3,8,8], down: f32[3,4,8].",
    ),
    (
        {"w_down": zeros(4, INTER, H)},
        ValueError,
        "jaxmoe.Experts: gate_up.shape=[3, 8, 8] must be [4, 8, 8] = [E,H,2I] with the E, H "
        "and I of down [E,I,H], because swiglu is gated. Got gate_up: bf16[3,8,8], down: "
        "bf16[4,4,8].",
    ),
    (
        {"w_gate_up": zeros(E, 16, 2 * INTER)},
        ValueError,
        "jaxmoe.Experts: gate_up.shape=[3, 16, 8] must be [3, 8, 8] = [E,H,2I] with the E, H "
        "and I of down [E,I,H], because swiglu is gated. Got gate_up: bf16[3,16,8], down: "
        "bf16[3,4,8].",
    ),
    (
        {"w_down": zeros(E, INTER, 16)},
        ValueError,
        "jaxmoe.Experts: gate_up.shape=[3, 8, 8] must be [3, 16, 8] = [E,H,2I] with the E, H "
        "and I of down [E,I,H], because swiglu is gated. Got gate_up: bf16[3,8,8], down: "
        "bf16[3,4,16].",
    ),
    (
        {"activation": "relu"},
        ValueError,
        "jaxmoe.Experts: gate_up.shape=[3, 8, 8] must be [3, 8, 4] = [E,H,I] with the E, H and "
        "I of down [E,I,H], because relu is not gated. Got gate_up: bf16[3,8,8], down: "
        "bf16[3,4,8].",
    ),
    (
        {"w_gate_up": zeros(E, H, INTER)},
        ValueError,
        "jaxmoe.Experts: gate_up.shape=[3, 8, 4] must be [3, 8, 8] = [E,H,2I] with the E, H "
        "and I of down [E,I,H], because swiglu is gated. Got gate_up: bf16[3,8,4], down: "
        "bf16[3,4,8].",
    ),
    (
        {"b_gate_up": zeros(E, INTER)},
        ValueError,
        "jaxmoe.Experts: gate_up_bias.shape=[3, 4] must be [3, 8] = [E, its outputs]. Got "
        "gate_up_bias: bf16[3,4], down: bf16[3,4,8].",
    ),
    (
        {"b_down": zeros(E, H, dtype=F32)},
        TypeError,
        "jaxmoe.Experts: down_bias.dtype=f32 must equal down.dtype=bf16. Got down_bias: "
        "f32[3,8], down: bf16[3,4,8].",
    ),
    (
        {"b_down": zeros(2, H)},
        ValueError,
        "jaxmoe.Experts: down_bias.shape=[2, 8] must be [3, 8] = [E, its outputs]. Got "
        "down_bias: bf16[2,8], down: bf16[3,4,8].",
    ),
    (
        {"residual": zeros(T, 16)},
        ValueError,
        "residual.shape[1]=16 must equal x.shape[1]=8 (hidden). "
        "Got residual: bf16[5,16], x: bf16[5,8].",
    ),
    (
        {"residual": zeros(T, H, dtype=F32)},
        TypeError,
        "residual.dtype=f32 must equal x.dtype=bf16. Got residual: f32[5,8], x: bf16[5,8].",
    ),
    (
        {"gate_up": "up"},
        ValueError,
        "jaxmoe.Experts: order='up' must be one of gate_up, up_gate, interleaved.",
    ),
    ({"weight_layout": "ke"}, ValueError, "jaxmoe.Experts: layout='ke' must be one of kn, nk."),
    (
        {"activation": "swish"},
        ValueError,
        "jaxmoe.Experts: activation='swish' must be one of swiglu, geglu, geglu_tanh, gelu, "
        "gelu_tanh, silu, relu, relu2, identity, Swiglu(alpha, beta, limit), SwigluStep(limit), "
        "SoftcapSwiglu(gate_cap, up_cap).",
    ),
    (
        {"expert_offset": -1},
        ValueError,
        f"expert_offset=-1 must be at least 0; {WINDOW_HINT}.",
    ),
    (
        {"expert_offset": 1.5},
        TypeError,
        f"expert_offset must be a Python int known at trace time; {WINDOW_HINT}. "
        "Got expert_offset: 1.5.",
    ),
    (
        {"num_experts": 4, "expert_offset": 2},
        ValueError,
        "experts.num_experts=3 must be in [1, 2]; num_experts=4, expert_offset=2.",
    ),
    (
        {"routing": dataclasses.replace(routing(), num_experts=3.0)},
        TypeError,
        "routing.num_experts must be a Python int known at trace time. Got routing.num_experts: "
        "3.0.",
    ),
    (
        {"routing": dataclasses.replace(routing(), num_experts=4), "expert_offset": 2},
        ValueError,
        "expert_offset=2 and experts.num_experts=3 must end within routing.num_experts=4; give "
        "num_experts=5 if ids past it name no expert. Got experts.down: bf16[3,4,8].",
    ),
    (
        {"expert_map": MAP, "expert_offset": 1},
        ValueError,
        "expert_offset=1 must be 0 if expert_map is given. Got expert_map: i32[7].",
    ),
    (
        {"expert_map": zeros(7, dtype=F32)},
        TypeError,
        "expert_map.dtype=f32 must be i32. Got expert_map: f32[7].",
    ),
    (
        {"expert_map": MAP, "num_experts": 6},
        ValueError,
        "expert_map.shape[0]=7 must be 6 (num_experts). Got expert_map: i32[7].",
    ),
    (
        {"apply_weight_on_input": 1},
        TypeError,
        "apply_weight_on_input must be a bool. Got apply_weight_on_input: 1.",
    ),
    (
        {"apply_weight_on_input": True},
        ValueError,
        "apply_weight_on_input=True needs top_k=1, not 2: a token has one input. Got "
        "routing.expert_ids: i32[5,2].",
    ),
    (
        {"config": GemmConfig(128, 8)},
        TypeError,
        "config must be a pair of GemmConfig, one for each product. Got config: a GemmConfig.",
    ),
    (
        {"config": (None, "fast")},
        TypeError,
        "config[1] must be a GemmConfig. Got config[1]: 'fast'.",
    ),
    (
        {"config": (ONE, dataclasses.replace(DECODE, one_kernel=True))},
        ValueError,
        "config[1].one_kernel must be False: the gate-up GEMM's kernel goes on, config[0]'s. Got "
        "config: a tuple.",
    ),
    (
        {"config": (None, dataclasses.replace(DECODE, gather=True))},
        ValueError,
        "config[1].gather must be False: the down GEMM's rows are in order already. Got config: a "
        "tuple.",
    ),
    (
        {"config": (ONE, GemmConfig(128, 32))},
        ValueError,
        "config[0].one_kernel=True needs config[1] with the same tile, (128, 8, 1, 1). Got config: "
        "a tuple.",
    ),
    (
        {"config": (ONE, None)},
        ValueError,
        "config[0].one_kernel=True needs config[1] with the same tile, (128, 8, 1, 1). Got config: "
        "a tuple.",
    ),
    (
        {"config": (GemmConfig(256, 160, one_kernel=True), GemmConfig(256, 160))},
        ValueError,
        "config[0].one_kernel=True needs a tile among (128, 8, 1, 1), (128, 8, 1, 2), "
        "(128, 32, 1, 1), not (256, 160, 1, 1). Got config: a tuple.",
    ),
    (
        {"config": (ONE, DECODE), "activation": "relu2", "w_gate_up": zeros(E, H, INTER)},
        ValueError,
        "config[0].one_kernel must be False with an activation that is not gated. Got config: a "
        "tuple.",
    ),
)


@pytest.mark.parametrize("change, kind, message", LAYER_ERRORS)
def test_moe_mlp(change, kind, message):
    arguments = {**LAYER, **change}
    with pytest.raises(kind) as error:
        jax.jit(lambda: moe_mlp(**arguments))()
    assert str(error.value) == of_op(message)


def test_the_dtype_that_master_weights_are_rounded_to_is_named():
    experts = jaxmoe.Experts(
        zeros(E, H, 2 * INTER, dtype=F32), zeros(E, INTER, H, dtype=F32), dtype=BF16
    )
    message = "x.dtype=f32 must equal that of the experts, bf16 (experts.dtype). Got"
    with pytest.raises(TypeError, match=re.escape(message)):
        jaxmoe.moe_mlp(zeros(T, H, dtype=F32), routing(), experts)


def test_a_key_of_jax_random_is_no_array_of_numbers():
    key = jax.random.key(0)
    with pytest.raises(TypeError, match=r"x must be an array of numbers. Got x: key<fry>\[\]"):
        moe_mlp(**{**LAYER, "x": key})
    with pytest.raises(TypeError, match="down must be an array of numbers"):
        moe_mlp(**{**LAYER, "w_down": key})


def test_moe_mlp_with_an_offset_that_is_data():
    message = f"expert_offset must be a Python int known at trace time; {WINDOW_HINT}."
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.jit(lambda i: moe_mlp(**LAYER, expert_offset=i))(1)


def test_arguments_that_the_table_changes_are_right():
    assert moe_mlp(**LAYER).shape == (T, H)


def many(*tokens):
    routes = [jax.ShapeDtypeStruct((*tokens, TOP_K), dtype) for dtype in (I32, F32)]
    x = jax.ShapeDtypeStruct((*tokens, H), BF16)
    return x, Routing(*routes), zeros(E, H, 16), zeros(E, 8, H)


def test_more_rows_than_int32_counts_are_refused():
    message = (
        "jaxmoe.moe_mlp: 2147483648 rows must be at most 2147483647. "
        "Got routing.expert_ids: i32[1073741824,2]."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(moe_mlp, *many(2**30))


def test_more_rows_than_int32_counts_after_vmap_are_refused_on_cuda():
    batched = jax.vmap(moe_mlp, (0, 0, None, None))
    (op,) = explain(batched, *many(2, 2**29)).ops
    assert op.cuda_reason == (
        "jaxmoe.moe_mlp: 2147483648 rows (of all examples of a vmap) must be at most 2147483647 on "
        "CUDA. Got routing.expert_ids: i32[1073741824,2]."
    )
