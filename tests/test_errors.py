"""Every message of grouped_gemm, moe_mlp and the machinery around them, word for word."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import GemmConfig, Routing, _primitive, grouped_gemm, moe_mlp

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
R, K, N, E = 6, 8, 16, 3
T, TOP_K, H, INTER = 5, 2, 8, 4


def zeros(*shape, dtype=BF16):
    return jnp.zeros(shape, dtype)


GEMM = {"lhs": zeros(R, K), "rhs": zeros(E, K, N), "group_sizes": zeros(E, dtype=I32)}

GEMM_ERRORS = (
    (
        {"lhs": [[1.0]]},
        TypeError,
        "jaxmoe.grouped_gemm: lhs must be a JAX or NumPy array. Got lhs: a list.",
    ),
    (
        {"lhs": zeros(2, R, K)},
        ValueError,
        "jaxmoe.grouped_gemm: lhs must have 2 axes [R,K], not 3. Got lhs: bf16[2,6,8].",
    ),
    (
        {"rhs": zeros(K, N)},
        ValueError,
        "jaxmoe.grouped_gemm: rhs must have 3 axes [E,K,N], not 2. Got rhs: bf16[8,16].",
    ),
    (
        {"rhs": zeros(E, N), "weight_layout": "nk"},
        ValueError,
        "jaxmoe.grouped_gemm: rhs must have 3 axes [E,N,K], not 2. Got rhs: bf16[3,16].",
    ),
    (
        {"rhs": zeros(E, N, K)},
        ValueError,
        "jaxmoe.grouped_gemm: rhs.shape[1]=16 must equal lhs.shape[1]=8 (K, the contracted axis). "
        "Got rhs: bf16[3,16,8], lhs: bf16[6,8].",
    ),
    (
        {"weight_layout": "nk"},
        ValueError,
        "jaxmoe.grouped_gemm: rhs.shape[2]=16 must equal lhs.shape[1]=8 (K, the contracted axis). "
        "Got rhs: bf16[3,8,16], lhs: bf16[6,8].",
    ),
    (
        {"rhs": zeros(0, K, N), "group_sizes": zeros(0, dtype=I32)},
        ValueError,
        "jaxmoe.grouped_gemm: rhs.shape[0]=0 must be at least 1 (num_groups). "
        "Got rhs: bf16[0,8,16].",
    ),
    (
        {"rhs": zeros(E, K, N, dtype=F32)},
        TypeError,
        "jaxmoe.grouped_gemm: rhs.dtype=f32 must equal lhs.dtype=bf16. "
        "Got rhs: f32[3,8,16], lhs: bf16[6,8].",
    ),
    (
        {"lhs": zeros(R, K, dtype=I32)},
        TypeError,
        "jaxmoe.grouped_gemm: lhs.dtype=i32 must be bf16 or f16 or f32. Got lhs: i32[6,8].",
    ),
    (
        {"rhs": zeros(E, K, N, dtype=jnp.int8)},
        NotImplementedError,
        "jaxmoe.grouped_gemm: rhs.dtype=i8: quantized arrays are not supported yet, only bf16, f16 "
        "and f32. Got rhs: i8[3,8,16].",
    ),
    (
        {"rhs": np.zeros((E, K, N), ml_dtypes.float8_e4m3fn)},
        NotImplementedError,
        "jaxmoe.grouped_gemm: rhs.dtype=f8_e4m3fn: quantized arrays are not supported yet, only "
        "bf16, f16 and f32. Got rhs: f8_e4m3fn[3,8,16].",
    ),
    (
        {"weight_layout": "NK"},
        ValueError,
        "jaxmoe.grouped_gemm: weight_layout='NK' must be one of kn, nk.",
    ),
    (
        {"weight_layout": 1},
        TypeError,
        "jaxmoe.grouped_gemm: weight_layout must be one of kn, nk. Got weight_layout: 1.",
    ),
    (
        {"preferred_element_type": jnp.int32},
        TypeError,
        "jaxmoe.grouped_gemm: preferred_element_type=i32 must be bf16 or f16 or f32. "
        "Got lhs: bf16[6,8].",
    ),
    (
        {"bias": zeros(N)},
        ValueError,
        "jaxmoe.grouped_gemm: bias must have 2 axes [E,N], not 1. Got bias: bf16[16].",
    ),
    (
        {"bias": zeros(E, N, dtype=F32)},
        TypeError,
        "jaxmoe.grouped_gemm: bias.dtype=f32 must equal lhs.dtype=bf16. "
        "Got bias: f32[3,16], lhs: bf16[6,8].",
    ),
    (
        {"bias": zeros(4, N)},
        ValueError,
        "jaxmoe.grouped_gemm: bias.shape[0]=4 must equal rhs.shape[0]=3 (num_groups). "
        "Got bias: bf16[4,16], rhs: bf16[3,8,16].",
    ),
    (
        {"bias": zeros(E, K)},
        ValueError,
        "jaxmoe.grouped_gemm: bias.shape[1]=8 must equal rhs.shape[2]=16 (N). "
        "Got bias: bf16[3,8], rhs: bf16[3,8,16].",
    ),
    (
        {"group_sizes": zeros(E)},
        TypeError,
        "jaxmoe.grouped_gemm: group_sizes.dtype=bf16 must be an integer type. "
        "Got group_sizes: bf16[3].",
    ),
    (
        {"group_sizes": zeros(1, E, dtype=I32)},
        ValueError,
        "jaxmoe.grouped_gemm: group_sizes must have 1 axis [E], not 2. Got group_sizes: i32[1,3].",
    ),
    (
        {"group_sizes": zeros(4, dtype=I32)},
        ValueError,
        "jaxmoe.grouped_gemm: group_sizes.shape[0]=4 must equal rhs.shape[0]=3 (num_groups, "
        "without group_offset). Got group_sizes: i32[4], rhs: bf16[3,8,16].",
    ),
    (
        {"group_sizes": zeros(2, dtype=I32), "group_offset": 0},
        ValueError,
        "jaxmoe.grouped_gemm: group_sizes.shape[0]=2 must be at least rhs.shape[0]=3 (num_groups). "
        "Got group_sizes: i32[2], rhs: bf16[3,8,16].",
    ),
    (
        {"group_offset": 0.0},
        TypeError,
        "jaxmoe.grouped_gemm: group_offset must be one integer (a scalar or an array of shape [1])."
        " Got group_offset: 0.0.",
    ),
    (
        {"group_offset": zeros(2, dtype=I32)},
        TypeError,
        "jaxmoe.grouped_gemm: group_offset must be one integer (a scalar or an array of shape [1])."
        " Got group_offset: i32[2].",
    ),
    (
        {"config": (128, 8)},
        TypeError,
        "jaxmoe.grouped_gemm: config must be a GemmConfig. Got config: a tuple.",
    ),
)


@pytest.mark.parametrize("change, kind, message", GEMM_ERRORS)
@pytest.mark.parametrize("jit", (False, True))
def test_grouped_gemm(change, kind, message, jit):
    arguments = {**GEMM, **change}
    call = (
        (lambda: grouped_gemm(**arguments))
        if not jit
        else jax.jit(lambda: grouped_gemm(**arguments))
    )
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def routing(num_tokens=T, top_k=TOP_K, ids=I32, weights=F32):
    return Routing(zeros(num_tokens, top_k, dtype=ids), zeros(num_tokens, top_k, dtype=weights))


LAYER = {
    "x": zeros(T, H),
    "routing": routing(),
    "w_gate_up": zeros(E, H, 2 * INTER),
    "w_down": zeros(E, INTER, H),
}
MAP = zeros(7, dtype=I32)
WINDOW_HINT = "give expert_map if it depends on the device"

LAYER_ERRORS = (
    ({"x": zeros(H)}, ValueError, "x must have 2 axes [T,H], not 1. Got x: bf16[8]."),
    (
        {"x": zeros(T, H, dtype=jnp.int8)},
        NotImplementedError,
        "x.dtype=i8: quantized arrays are not supported yet, only bf16, f16 and f32. "
        "Got x: i8[5,8].",
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
        "weights hold only some of the experts). Got expert_ids: i32[5,4], w_gate_up: bf16[3,8,8].",
    ),
    (
        {"routing": routing(top_k=0)},
        ValueError,
        "top_k=0 (routing.expert_ids.shape[1]) must be in [1, 3] (num_experts; give it if the "
        "weights hold only some of the experts). Got expert_ids: i32[5,0], w_gate_up: bf16[3,8,8].",
    ),
    (
        {"w_gate_up": zeros(H, 2 * INTER)},
        ValueError,
        "w_gate_up must have 3 axes [E,H,2I], not 2. Got w_gate_up: bf16[8,8].",
    ),
    (
        {"w_down": zeros(INTER, H), "weight_layout": "nk", "activation": "relu"},
        ValueError,
        "w_down must have 3 axes [E,H,I], not 2. Got w_down: bf16[4,8].",
    ),
    (
        {"w_gate_up": np.zeros((E, H, 2 * INTER), ml_dtypes.float8_e4m3fn)},
        NotImplementedError,
        "w_gate_up.dtype=f8_e4m3fn: quantized arrays are not supported yet, only bf16, f16 and "
        "f32. Got w_gate_up: f8_e4m3fn[3,8,8].",
    ),
    (
        {"w_down": zeros(E, INTER, H, dtype=jnp.uint8)},
        NotImplementedError,
        "w_down.dtype=u8: quantized arrays are not supported yet, only bf16, f16 and f32. "
        "Got w_down: u8[3,4,8].",
    ),
    (
        {"w_down": zeros(E, INTER, H, dtype=F32)},
        TypeError,
        "w_down.dtype=f32 must equal x.dtype=bf16. Got w_down: f32[3,4,8], x: bf16[5,8].",
    ),
    (
        {"w_down": zeros(4, INTER, H)},
        ValueError,
        "w_down.shape[0]=4 must equal w_gate_up.shape[0]=3 (num_experts of this device). "
        "Got w_down: bf16[4,4,8], w_gate_up: bf16[3,8,8].",
    ),
    (
        {"w_gate_up": zeros(E, 16, 2 * INTER)},
        ValueError,
        "w_gate_up.shape[1]=16 must equal x.shape[1]=8 (hidden). "
        "Got w_gate_up: bf16[3,16,8], x: bf16[5,8].",
    ),
    (
        {"w_down": zeros(E, INTER, 16)},
        ValueError,
        "w_down.shape[2]=16 must equal x.shape[1]=8 (hidden). "
        "Got w_down: bf16[3,4,16], x: bf16[5,8].",
    ),
    (
        {"activation": "relu"},
        ValueError,
        "w_gate_up.shape[2]=8 must be 1 * w_down.shape[1]=4, because relu is not gated. "
        "Got w_gate_up: bf16[3,8,8], w_down: bf16[3,4,8].",
    ),
    (
        {"w_gate_up": zeros(E, H, INTER)},
        ValueError,
        "w_gate_up.shape[2]=4 must be 2 * w_down.shape[1]=8, because swiglu is gated. "
        "Got w_gate_up: bf16[3,8,4], w_down: bf16[3,4,8].",
    ),
    (
        {"b_gate_up": zeros(E, INTER)},
        ValueError,
        "b_gate_up.shape[1]=4 must equal w_gate_up.shape[2]=8 (its outputs). "
        "Got b_gate_up: bf16[3,4], w_gate_up: bf16[3,8,8].",
    ),
    (
        {"b_down": zeros(E, H, dtype=F32)},
        TypeError,
        "b_down.dtype=f32 must equal x.dtype=bf16. Got b_down: f32[3,8], x: bf16[5,8].",
    ),
    (
        {"b_down": zeros(2, H)},
        ValueError,
        "b_down.shape[0]=2 must equal w_down.shape[0]=3 (num_experts of this device). "
        "Got b_down: bf16[2,8], w_down: bf16[3,4,8].",
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
        "gate_up='up' must be one of gate_up, up_gate, interleaved.",
    ),
    ({"weight_layout": "ke"}, ValueError, "weight_layout='ke' must be one of kn, nk."),
    (
        {"activation": "swish"},
        ValueError,
        "activation='swish' must be one of swiglu, geglu, geglu_tanh, gelu, gelu_tanh, silu, relu, "
        "relu2, identity, Swiglu(alpha, beta, limit).",
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
        "num_local_experts=3 must be in [1, 2]; num_experts=4, expert_offset=2.",
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
        {"config": GemmConfig(128, 8)},
        TypeError,
        "config must be a pair of GemmConfig, one for each product. Got config: a GemmConfig.",
    ),
    (
        {"config": (None, "fast")},
        TypeError,
        "config[1] must be a GemmConfig. Got config[1]: 'fast'.",
    ),
)


@pytest.mark.parametrize("change, kind, message", LAYER_ERRORS)
def test_moe_mlp(change, kind, message):
    arguments = {**LAYER, **change}
    with pytest.raises(kind) as error:
        jax.jit(lambda: moe_mlp(**arguments))()
    assert str(error.value) == "jaxmoe.moe_mlp: " + message


def test_moe_mlp_with_an_offset_that_is_data():
    message = f"expert_offset must be a Python int known at trace time; {WINDOW_HINT}."
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.jit(lambda i: moe_mlp(**LAYER, expert_offset=i))(1)


def test_arguments_that_the_tables_change_are_right():
    assert grouped_gemm(**GEMM).shape == (R, N)
    assert moe_mlp(**LAYER).shape == (T, H)


def test_explicitly_sharded_arguments_are_refused():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    lhs = jax.device_put(GEMM["lhs"], jax.NamedSharding(mesh, jax.P("d")))
    message = (
        "jaxmoe_gmm: argument 0 is sharded over the Explicit mesh axes (d). Got bfloat16[1,6@d,8]. "
        "Call it inside jax.shard_map over those axes, or replicate the argument with "
        "jax.sharding.reshard."
    )
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=re.escape(message)):
        jax.jit(grouped_gemm)(**{**GEMM, "lhs": lhs})


def test_an_op_without_a_rule_is_not_differentiable():
    halve = _primitive.define(
        "jaxmoe_test_halve",
        out=lambda x: [(x.shape, x.dtype)],
        xla=lambda x: (x / 2,),
        batch=lambda args, dims: (halve(*args), dims),
    )
    try:
        np.testing.assert_array_equal(halve(jnp.ones(2))[0], [0.5, 0.5])
        with pytest.raises(
            NotImplementedError, match="jaxmoe_test_halve: no differentiation rule."
        ):
            jax.grad(lambda x: jnp.sum(halve(x)[0]))(jnp.ones(2))
    finally:
        del _primitive.OPS["jaxmoe_test_halve"]
