"""Every message of grouped_gemm and of the machinery around the ops, word for word."""

import contextlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxmoe import GemmConfig, explain, grouped_gemm
from jaxmoe._jax import primitive as _primitive

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
R, K, N, E = 6, 8, 16, 3


def zeros(*shape, dtype=BF16):
    return np.zeros(shape, dtype)


GEMM = {"lhs": zeros(R, K), "rhs": zeros(E, K, N), "group_sizes": zeros(E, dtype=I32)}

PRECISION_RULE = (
    "jaxmoe.grouped_gemm: precision must be None or a precision of jax.lax.dot: a "
    "jax.lax.Precision or its name, a tuple of two, or a hashable dot algorithm."
)

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
        {"rhs": zeros(E, K, N, dtype=jnp.uint32)},
        TypeError,
        "jaxmoe.grouped_gemm: rhs.dtype=u32 must be bf16 or f16 or f32 or i8 or u8 or i4 or "
        "u4 or bool or i16 or i32. Got rhs: u32[3,8,16].",
    ),
    (
        {"lhs": zeros(R, K, dtype=jnp.uint16)},
        TypeError,
        "jaxmoe.grouped_gemm: lhs.dtype=u16 must be bf16 or f16 or f32 or i8 or u8 or i4 or "
        "u4 or bool or i16 or i32. Got lhs: u16[6,8].",
    ),
    (
        {
            "lhs": zeros(R, K, dtype=jnp.int8),
            "rhs": zeros(E, K, N, dtype=jnp.int8),
            "preferred_element_type": jnp.int16,
        },
        TypeError,
        "jaxmoe.grouped_gemm: preferred_element_type=int16 must be int8, int32, bfloat16, "
        "float16 or float32.",
    ),
    (
        {
            "lhs": zeros(R, K, dtype=jnp.int8),
            "rhs": zeros(E, K, N, dtype=jnp.int8),
            "bias": zeros(E, N, dtype=jnp.int8),
        },
        TypeError,
        "jaxmoe.grouped_gemm: bias must be None if lhs and rhs are integers; add it to the result."
        " Got bias: i8[3,16], lhs: i8[6,8].",
    ),
    (
        {"rhs": np.zeros((E, K, N), ml_dtypes.float8_e4m3fn)},
        NotImplementedError,
        "jaxmoe.grouped_gemm: rhs.dtype=f8_e4m3fn must be bf16 or f16 or f32 or i8 or u8 or i4 "
        "or u4 or bool or i16 or i32; quantized weights and tokens come with their scales as a "
        "jaxmoe.QuantizedArray. Got rhs: f8_e4m3fn[3,8,16].",
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
        "jaxmoe.grouped_gemm: preferred_element_type=int32 must be bfloat16, float16 or float32.",
    ),
    (
        {"preferred_element_type": "foo"},
        TypeError,
        "jaxmoe.grouped_gemm: preferred_element_type='foo' must be bfloat16, float16 or float32.",
    ),
    (
        {"precision": "foo"},
        ValueError,
        f"{PRECISION_RULE} Got precision: 'foo'.",
    ),
    (
        {"precision": ["high", "high"]},
        TypeError,
        f"{PRECISION_RULE} Got precision: a list.",
    ),
    (
        {"precision": 3.5},
        TypeError,
        f"{PRECISION_RULE} Got precision: 3.5.",
    ),
    (
        {"group_offset": "a"},
        TypeError,
        "jaxmoe.grouped_gemm: group_offset must be one integer (a scalar or an array of shape [1])."
        " Got group_offset: 'a'.",
    ),
    (
        {"group_offset": object()},
        TypeError,
        "jaxmoe.grouped_gemm: group_offset must be one integer (a scalar or an array of shape [1])."
        " Got group_offset: a object.",
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
        {"out_sharding": jax.NamedSharding(AbstractMesh((1,), ("d",)), jax.P("d"))},
        NotImplementedError,
        "jaxmoe.grouped_gemm: out_sharding must be None; shard with jax.shard_map around the call. "
        "Got out_sharding: a NamedSharding.",
    ),
    (
        {"config": (128, 8)},
        TypeError,
        "jaxmoe.grouped_gemm: config must be a GemmConfig. Got config: a tuple.",
    ),
    (
        {"config": GemmConfig(128, 8, one_kernel=True)},
        ValueError,
        "jaxmoe.grouped_gemm: config.one_kernel must be False: it is for moe_mlp and expert_rows. "
        "Got config: a GemmConfig.",
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


def test_arguments_that_the_table_changes_are_right():
    assert grouped_gemm(**GEMM).shape == (R, N)


def test_more_rows_than_int32_counts_are_refused():
    lhs = jax.ShapeDtypeStruct((2**31, K), BF16)
    message = (
        "jaxmoe.grouped_gemm: 2147483648 rows must be at most 2147483647. "
        "Got lhs: bf16[2147483648,8]."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(grouped_gemm, lhs, GEMM["rhs"], GEMM["group_sizes"])


def test_more_rows_than_int32_counts_after_vmap_are_refused_on_cuda():
    lhs = jax.ShapeDtypeStruct((4, 2**29, K), BF16)
    batched = jax.vmap(grouped_gemm, (0, None, None))
    reason = explain(batched, lhs, GEMM["rhs"], GEMM["group_sizes"]).ops[0].cuda_reason
    assert reason == (
        "jaxmoe.grouped_gemm: 2147483648 rows (of all examples of a vmap) must be at most "
        "2147483647 on CUDA. Got lhs: bf16[536870912,8]."
    )


def test_more_columns_than_bytes_are_counted_of_are_refused_on_cuda():
    wide = 2**26
    lhs, rhs = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((R, K), (E, K, wide)))
    reason = explain(grouped_gemm, lhs, rhs, GEMM["group_sizes"]).ops[0].cuda_reason
    assert reason == (
        f"jaxmoe.grouped_gemm: rhs.shape[2]={wide} must be at most {wide - 1} on CUDA. Got rhs: "
        f"bf16[{E},{K},{wide}]."
    )


@contextlib.contextmanager
def op_without_rules(dtype=None):
    """One that halves its argument, and rounds it to `dtype`."""
    halve = _primitive.define(
        "jaxmoe_test_halve",
        out=lambda x: [(x.shape, dtype or x.dtype)],
        xla=lambda x: ((x / 2).astype(dtype or x.dtype),),
        batch=lambda args, dims: (halve(*args), dims),
    )
    try:
        yield halve
    finally:
        del _primitive.OPS["jaxmoe_test_halve"]


def test_explicitly_sharded_arguments_are_refused():
    """By an op without a rule; for those with one see test_sharding.py."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(GEMM["lhs"], jax.NamedSharding(mesh, jax.P("d")))
    message = (
        "jaxmoe_test_halve: argument x is sharded over the Explicit mesh axes (d). Got "
        "bfloat16[6@d,8]. Call it inside jax.shard_map over those axes, or replicate the argument "
        "with jax.sharding.reshard."
    )
    with op_without_rules() as halve, jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            halve(x)


def test_an_op_without_a_rule_is_not_differentiable():
    with op_without_rules() as halve:
        np.testing.assert_array_equal(halve(jnp.ones(2))[0], [0.5, 0.5])
        with pytest.raises(
            NotImplementedError, match="jaxmoe_test_halve: no differentiation rule."
        ):
            jax.grad(lambda x: jnp.sum(halve(x)[0]))(jnp.ones(2))


def test_integers_need_no_rule():
    with op_without_rules(jnp.int32) as halve:
        fn = lambda x: x * halve(x)[0].astype(jnp.float32)  # noqa: E731
        y, tangent = jax.jvp(fn, (jnp.array([4.0]),), (jnp.ones(1),))
    assert (y.tolist(), tangent.tolist()) == ([8], [2])
