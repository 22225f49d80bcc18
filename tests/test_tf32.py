"""float32 products in TF32: which precisions ask for it, and what CUDA is asked to run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Experts, GemmConfig, grouped_gemm, grouped_gemm_weight_grad
from jaxmoe._gemm import cuda
from jaxmoe._gemm.op import Product
from jaxmoe._gemm.precision import is_tf32, of_precision
from jaxmoe._testing import normal
from tests.lowered import calls, cuda_text

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
E, K, N, ROWS = 3, 40, 16, 10
GMM, TGMM = "jaxmoe_grouped_gemm_v1", "jaxmoe_weight_grad_v1"
TF32 = "tensorfloat32"
Preset = jax.lax.DotAlgorithmPreset
Algorithm = jax.lax.DotAlgorithm
# Columns of x and dtype of the factors, by what the products are made of.
IN_TF32, THREE, SIX = (K, "xf32"), (3 * K, "xbf16"), (6 * K, "xbf16")


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def args(layout="nk", k=K, n=N):
    return struct(ROWS, k), struct(E, *((k, n) if layout == "kn" else (n, k))), struct(E, dtype=I32)


def products(fn, *given):
    """Operand x, operand w and the result of each call of a grouped product, and its tile."""
    found = [call for call in calls(cuda_text(fn, *given)) if call[0] == GMM]
    return [(ins[0], ins[3], outs[0], attrs["config"]) for _, attrs, ins, outs in found]


def of_x(fn, *given):
    return [call[0] for call in products(fn, *given)]


def in_context(fn, precision=TF32):
    """The function, whose products are traced with that default, but lowered without it."""

    @functools.wraps(fn)
    def traced(*given, **named):
        with jax.default_matmul_precision(precision):
            return fn(*given, **named)

    return traced


@pytest.mark.parametrize(
    "precision, want",
    (
        *((p, THREE) for p in (None, "default", "fastest", "bfloat16", "high", "bfloat16_3x")),
        *((p, THREE) for p in jax.lax.Precision if p != jax.lax.Precision.HIGHEST),
        (jax.lax.Precision(TF32), THREE),  # which is HIGH
        *((p, THREE) for p in (Preset.BF16_BF16_F32, Preset.BF16_BF16_F32_X3)),
        *((p, IN_TF32) for p in (TF32, (TF32, TF32), Preset.TF32_TF32_F32, "TF32_TF32_F32")),
        *((p, THREE) for p in ((TF32, "high"), ("default", TF32))),
        *((p, SIX) for p in ("highest", "float32", jax.lax.Precision.HIGHEST, (TF32, "highest"))),
        *((p, SIX) for p in (Preset.F32_F32_F32, Preset.TF32_TF32_F32_X3)),
        *((p, SIX) for p in (Preset.BF16_BF16_F32_X6, Preset.BF16_BF16_F32_X9)),
        *((p, SIX) for p in (Preset.F64_F64_F64, Algorithm(F32, F32, F32))),
        (Algorithm(BF16, BF16, F32, 1, 1, 6), SIX),
        *((Algorithm(BF16, BF16, F32, 1, 1, count), THREE) for count in (1, 3)),
    ),
    ids=str,
)
def test_what_a_precision_means(precision, want):
    product = functools.partial(grouped_gemm, weight_layout="nk", precision=precision)
    columns, dtype = want
    assert of_x(product, *args()) == [f"1x{ROWS}x{columns}{dtype}"]
    assert is_tf32(precision) == (want == IN_TF32)
    assert of_precision(precision) == (3 if want == SIX else 2)


@pytest.mark.parametrize(
    "default, want",
    (
        *((name, THREE) for name in ("default", "high", "bfloat16", "BF16_BF16_F32_X3")),
        *((name, IN_TF32) for name in (TF32, "TF32_TF32_F32")),
        *((name, SIX) for name in ("highest", "float32", "F32_F32_F32", "F64_F64_F64")),
    ),
)
def test_without_one_it_is_the_default_while_the_function_is_traced(default, want):
    columns, dtype = want
    product = functools.partial(grouped_gemm, weight_layout="nk")
    assert of_x(in_context(product, default), *args()) == [f"1x{ROWS}x{columns}{dtype}"]
    named = functools.partial(product, precision="high")
    assert of_x(in_context(named, default), *args()) == [f"1x{ROWS}x{3 * K}xbf16"]
    # Dimension numbers say the layout.
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    general = in_context(lambda *a: jaxmoe.ragged_dot_general(*a, numbers), default)
    assert of_x(general, *args()) == [f"1x{ROWS}x{columns}{dtype}"]


def test_a_jitted_function_has_a_program_for_each_default():
    product = jax.jit(functools.partial(grouped_gemm, weight_layout="nk"))
    given = jnp.ones((ROWS, K)), jnp.ones((E, N, K)), jnp.ones(E, I32)
    for _ in range(2):
        for default, want in ((None, None), (TF32, TF32), ("highest", "highest")):
            with jax.default_matmul_precision(default):
                (eqn,) = (
                    e for e in product.trace(*given).jaxpr.eqns if e.primitive.name == "jaxmoe_gmm"
                )
                product(*given)
            assert eqn.params["precision"] == want
    assert product._cache_size() == 3


@pytest.mark.parametrize("precision", (TF32, Preset.TF32_TF32_F32))
def test_other_devices_multiply_float32_itself(precision):
    rng = np.random.default_rng(3)
    x, w = normal(rng, (ROWS, K), F32), normal(rng, (E, N, K), F32)
    sizes = jnp.array([4, 0, 6], I32)
    product = functools.partial(grouped_gemm, weight_layout="nk")
    got = jax.jit(functools.partial(product, precision=precision))(x, w, sizes)
    np.testing.assert_array_equal(got, jax.jit(product)(x, w, sizes))


@pytest.mark.parametrize("k, n", ((39, 15), (36, 16), (40, 12), (1, 1)))
def test_rows_are_filled_up_to_what_the_kernels_move(k, n):
    product = functools.partial(grouped_gemm, weight_layout="nk", precision=TF32)
    whole_k, whole_n = -(-k // 8) * 8, -(-n // 8) * 8
    lhs, rhs, sizes = args(k=k, n=n)

    def with_bias(lhs, rhs, sizes, bias):
        return product(lhs, rhs, sizes, bias=bias)

    given = lhs, rhs, sizes, struct(E, n)
    text = cuda_text(with_bias, *given)
    ((_, _, operands, results),) = calls(text)
    assert (
        operands[0] == f"1x{ROWS}x{whole_k}xf32" and operands[3] == f"1x{E}x{whole_n}x{whole_k}xf32"
    )
    assert operands[5] == f"1x{E}x{whole_n}xf32" and results[0] == f"1x{ROWS}x{whole_n}xf32"
    assert jax.eval_shape(with_bias, *given).shape == (ROWS, n)


def test_an_algorithm_of_no_dtype_is_refused():
    product = functools.partial(grouped_gemm, precision=Algorithm("bogus", F32, F32))
    with pytest.raises(TypeError, match="precision must be None or a precision of jax.lax.dot"):
        jax.eval_shape(product, *args("kn"))


def test_results_of_another_dtype_are_converted():
    product = functools.partial(grouped_gemm, weight_layout="nk", precision=TF32)
    product = functools.partial(product, preferred_element_type=BF16)
    assert products(product, *args())[0][2] == f"1x{ROWS}x{N}xf32"
    assert jax.eval_shape(product, *args()).dtype == BF16


def test_weights_in_the_other_order_are_multiplied_in_parts():
    product = functools.partial(grouped_gemm, precision=TF32)
    assert of_x(product, *args("kn")) == [f"1x{ROWS}x{3 * K}xbf16"]


@pytest.mark.parametrize("narrow", (BF16, jnp.float16))
def test_a_narrow_factor_beside_float32_is_multiplied_as_float32(narrow):
    lhs, rhs, sizes = args()
    product = functools.partial(grouped_gemm, weight_layout="nk", precision=TF32)
    for given in ((lhs.update(dtype=narrow), rhs), (lhs, rhs.update(dtype=narrow))):
        assert of_x(product, *given, sizes) == [f"1x{ROWS}x{K}xf32"]


@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_derivatives(layout):
    """Each product as its own layout is: that with the weights of the other is the gradient."""

    def loss(lhs, rhs, sizes):
        return jnp.sum(grouped_gemm(lhs, rhs, sizes, precision=TF32, weight_layout=layout) ** 2)

    text = cuda_text(jax.grad(loss, (0, 1)), *args(layout))
    tf32, parts = {"kn": (N, 3 * K), "nk": (K, 3 * N)}[layout]
    wanted = {f"1x{ROWS}x{tf32}xf32", f"1x{ROWS}x{parts}xbf16"}
    assert {call[2][0] for call in calls(text) if call[0] == GMM} == wanted
    assert [call[0] for call in calls(text)].count(TGMM) == 3
    given = struct(ROWS, K), struct(ROWS, N), struct(E, dtype=I32)
    weight_grad = functools.partial(grouped_gemm_weight_grad, precision=TF32)
    assert [call[0] for call in calls(cuda_text(weight_grad, *given))].count(TGMM) == 3
    highest = functools.partial(in_context(grouped_gemm_weight_grad, "highest"))
    assert [call[0] for call in calls(cuda_text(highest, *given))].count(TGMM) == 6


@pytest.mark.parametrize("tile", ((128, 8, 1, 2), (256, 160, 2, 1)))
def test_a_tile_may_be_asked_for(tile):
    config = GemmConfig(*tile)
    product = functools.partial(grouped_gemm, weight_layout="nk", precision=TF32, config=config)
    ((_, _, _, attrs),) = products(product, *args(k=72))
    names = ("weight_tile", "token_tile", "cluster", "split_k")
    assert tuple(attrs[name] for name in names) == tuple(f"{size}:i64" for size in tile)


def test_what_is_no_float32_knows_no_default():
    for dtype in (BF16, jnp.float16):
        lhs, rhs, sizes = (a.update(dtype=dtype) if a.dtype == F32 else a for a in args())
        traced = jax.jit(in_context(functools.partial(grouped_gemm, weight_layout="nk")))
        (eqn,) = (
            e for e in traced.trace(lhs, rhs, sizes).jaxpr.eqns if e.primitive.name == "jaxmoe_gmm"
        )
        assert eqn.params["precision"] is None


def layer(layouts="nk", two_arrays=False):
    t, h, inter = 6, 32, 24
    shapes = {"gate": (E, h, inter), "up": (E, h, inter), "down": (E, inter, h)}
    if not two_arrays:
        shapes = {"gate_up": (E, h, 2 * inter), "down": (E, inter, h)}
    turned = {n: (*s[:1], *s[:0:-1]) if layouts == "nk" else s for n, s in shapes.items()}
    experts = Experts(**{n: struct(*s) for n, s in turned.items()}, layout=layouts)
    routing = jaxmoe.Routing(jnp.zeros((t, 2), I32), jnp.ones((t, 2), F32), E)
    return struct(t, h), experts, functools.partial(run, routing)


def run(routing, x, experts):
    return jaxmoe.moe_mlp(x, routing, experts)


@pytest.mark.parametrize("two_arrays", (False, True))
def test_a_layer_follows_the_default(two_arrays):
    x, experts, fn = layer(two_arrays=two_arrays)
    count = 2 if two_arrays else 1
    assert of_x(in_context(fn), x, experts) == ["1x12x32xf32"] * count + ["1x12x24xf32"]
    assert of_x(fn, x, experts) == ["1x12x96xbf16"] * count + ["1x12x72xbf16"]
    assert of_x(in_context(fn, "highest"), x, experts)[-1] == "1x12x144xbf16"

    def loss(x, experts):
        return jnp.sum(in_context(fn)(x, experts) ** 2)

    grad = of_x(jax.grad(loss, (0, 1)), x, experts)
    assert grad[: count + 1] == ["1x12x32xf32"] * count + ["1x12x24xf32"]
    assert all("bf16" in x for x in grad[count + 1 :])
    # Of weights in the other order the products of the gradient are those of TF32.
    x, experts, fn = layer("kn", two_arrays)
    grad = of_x(jax.grad(loss, (0, 1)), x, experts)
    assert ["bf16" in x for x in grad] == [True] * (count + 1) + [False] * (count + 1)


def test_batches_of_experts_follow_the_default():
    x, experts, _ = layer()
    given = struct(E, 24, x.shape[1]), struct(E, dtype=I32), experts
    assert of_x(in_context(jaxmoe.expert_batches), *given) == ["3x24x32xf32", "3x24x24xf32"]


def test_why_a_kernel_refuses_float32():
    """Rows that are no whole 16 bytes, though none comes here that is not filled up."""
    starts = struct(1, E, dtype=I32)
    product = Product(struct(1, ROWS, 6), struct(1, E, 16, 6), starts, starts)
    params = {"format": jaxmoe._formats.PLAIN, "dtype": F32, "out_dtype": jnp.dtype(F32)}
    reason = cuda.gmm_reason(product, **params)
    assert reason is not None and "lhs.shape[1]=6 must be a positive multiple of 4" in reason
