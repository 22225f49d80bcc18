"""float32 on CUDA: products of bf16 parts, what they are lowered to, and how exact they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Experts, explain, grouped_gemm
from jaxmoe._gemm import split
from jaxmoe._gemm.op import gmm, tgmm
from jaxmoe._testing import normal
from tests.lowered import calls, cuda_text

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
E, K, N, ROWS = 3, 20, 21, 17
SIZES = np.array([9, 0, 6], np.int32)  # two rows of no group
GMM, TGMM = "jaxmoe_grouped_gemm_v1", "jaxmoe_weight_grad_v1"


def struct(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def groups():
    starts = np.concatenate([[0], np.cumsum(SIZES)[:-1]]).astype(np.int32)
    return jnp.asarray(starts)[None], jnp.asarray(SIZES)[None]


def exact(x, w, bias=None):
    """The product in float64, and the sums of magnitudes that its error is measured by."""
    group = np.repeat(np.arange(E), SIZES)
    x, w = np.asarray(x[0], np.float64)[: SIZES.sum()], np.asarray(w[0], np.float64)
    bias = np.zeros((E, N)) if bias is None else np.asarray(bias[0], np.float64)
    out = np.einsum("rk,rkn->rn", x, w[group]) + bias[group]
    size = np.einsum("rk,rkn->rn", abs(x), abs(w[group])) + abs(bias[group])
    rest = ((0, ROWS - SIZES.sum()), (0, 0))
    return np.pad(out, rest), np.pad(size, rest)


@pytest.mark.parametrize("count, bits", ((2, 16), (3, 22)))
@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_products_of_parts_are_as_exact_as_promised(layout, count, bits):
    rng = np.random.default_rng(3)
    x, w, bias = (normal(rng, s, F32) for s in ((1, ROWS, K), (1, E, K, N), (1, E, N)))
    of_layout = w if layout == "kn" else w.swapaxes(2, 3)
    params = {"weight_layout": layout, "out_dtype": F32, "precision": None}
    if count == 3:
        params["precision"] = jax.lax.Precision.HIGHEST
    of_parts = split.gmm_of_parts(gmm, x, of_layout, jaxmoe._formats.PLAIN)
    (out,) = jax.jit(functools.partial(of_parts, **params))(x, of_layout, *groups(), bias)
    want, size = exact(x, w, bias)
    assert (abs(out[0] - want) <= 2.0**-bits * size).all()
    assert not out[0, SIZES.sum() :].any()
    # One part alone is what is not good enough.
    rounded, _ = exact(x.astype(BF16), w.astype(BF16), bias)
    assert (abs(rounded - want) > 2.0**-bits * size).any()


@pytest.mark.parametrize("start", (False, True))
def test_weight_gradients_of_parts(start):
    rng = np.random.default_rng(4)
    x, dy = normal(rng, (1, ROWS, K), F32), normal(rng, (1, ROWS, N), F32)
    init = normal(rng, (1, E, K, N), F32) if start else None
    params = {"weight_shape": (1, E), "out_dtype": jnp.dtype(F32), "precision": None}
    (dw,) = jax.jit(functools.partial(split.tgmm_of_parts(tgmm, x, dy), **params))(
        x, dy, *groups(), init
    )
    ends = np.cumsum(SIZES)
    for e, (first, last) in enumerate(zip(ends - SIZES, ends, strict=True)):
        a, b = (np.asarray(v[0, first:last], np.float64) for v in (x, dy))
        want = a.T @ b + (np.asarray(init[0, e]) if start else 0)
        assert (abs(dw[0, e] - want) <= 2.0**-16 * (abs(a).T @ abs(b) + 1e-6 + abs(want))).all()
    if start:
        np.testing.assert_array_equal(dw[0, 1], init[0, 1])


def test_parts_add_up_and_keep_what_is_not_finite():
    a = jnp.array([1.0, -3.1415927, 1e-30, 3.4e38, jnp.inf, -jnp.inf, jnp.nan, 0.0], F32)
    found = jax.jit(functools.partial(split.parts, count=3))(a)
    assert {p.dtype for p in found} == {jnp.dtype(BF16)}
    total = sum(np.asarray(p, np.float64) for p in found)
    np.testing.assert_array_equal(total[:3], np.asarray(a, np.float64)[:3])
    np.testing.assert_array_equal(total[4:], np.asarray(a, np.float64)[4:])
    assert total[3] == np.inf  # no bf16 is so large
    (same,) = split.parts(a.astype(BF16), 3)
    assert same.dtype == BF16


@pytest.mark.parametrize("lhs, rhs", ((F32, F32), (F32, BF16), (jnp.float16, F32)))
def test_grouped_gemm_is_one_call_of_bf16_factors(lhs, rhs):
    args = struct(10, 40, dtype=lhs), struct(E, 40, 16, dtype=rhs), struct(E, dtype=I32)
    ((name, _, operands, results),) = calls(cuda_text(grouped_gemm, *args))
    assert (name, operands[0], results[0]) == (GMM, "1x10x120xbf16", "1x10x16xf32")
    highest = functools.partial(grouped_gemm, precision=jax.lax.Precision.HIGHEST)
    ((_, _, operands, _),) = calls(cuda_text(highest, *args))
    assert operands[0] == "1x10x240xbf16"


@pytest.mark.parametrize("precision", (None, "tensorfloat32"))
@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_a_batch_invariant_product_has_whole_k_loops(layout, precision):
    """Few tiles would share theirs otherwise."""
    k, n = 2048, 128
    rhs = struct(8, *((k, n) if layout == "kn" else (n, k)), dtype=F32)
    args = struct(8, k, dtype=F32), rhs, struct(8, dtype=I32)
    for invariant in (False, True):
        product = functools.partial(grouped_gemm, weight_layout=layout, precision=precision)
        product = functools.partial(product, batch_invariant=invariant)
        ((_, attrs, _, _),) = calls(cuda_text(product, *args))
        assert attrs["config"]["split_k"] == ("1:i64" if invariant else "2:i64")

    def layer(x, experts):
        with jax.default_matmul_precision(precision):
            return jaxmoe.moe_mlp(x, routing, experts, batch_invariant=True)

    routing = jaxmoe.Routing(jnp.zeros((8, 1), I32), jnp.ones((8, 1), F32), 8)
    shapes = {"gate_up": (8, k, 2 * k), "down": (8, k, k)}
    turned = {name: (s[0], s[2], s[1]) if layout == "nk" else s for name, s in shapes.items()}
    weights = {name: struct(*s, dtype=F32) for name, s in turned.items()}
    text = cuda_text(layer, args[0], Experts(**weights, layout=layout))
    assert [c[1]["config"]["split_k"] for c in calls(text) if c[0] == GMM] == ["1:i64"] * 2


def test_gradients_of_float32_products_are_calls():
    """Also where bf16 factors have a float32 product, whose cotangent is float32."""
    for dtype in (BF16, F32):
        args = struct(10, 24, dtype=dtype), struct(E, 24, 40, dtype=dtype), struct(E, dtype=I32)

        def loss(lhs, rhs, sizes):
            return jnp.sum(grouped_gemm(lhs, rhs, sizes, preferred_element_type=F32) ** 2)

        names = [call[0] for call in calls(cuda_text(jax.grad(loss, (0, 1)), *args))]
        assert names.count(GMM) == 2 and names.count(TGMM) == (2 if dtype == BF16 else 3)


@pytest.mark.parametrize("activation", ("swiglu", "relu2"))
def test_a_float32_layer_is_the_stages_on_cuda(activation):
    t, h, inter = 6, 32, 24
    width = 2 * inter if activation == "swiglu" else inter
    experts = Experts(
        gate_up=struct(E, h, width, dtype=F32),
        down=struct(E, inter, h, dtype=F32),
        down_bias=struct(E, h, dtype=F32),
        activation=activation,
    )
    routing = jaxmoe.Routing(struct(t, 2, dtype=I32), struct(t, 2, dtype=F32), E)
    x = struct(t, h, dtype=F32)
    found = calls(cuda_text(jaxmoe.moe_mlp, x, routing, experts))
    products = [call for call in found if call[0] == GMM]
    assert [call[2][0] for call in products] == ["1x12x96xbf16", f"1x12x{3 * inter + 8}xbf16"]
    assert {call[3][0] for call in products} == {f"1x12x{width}xf32", f"1x12x{h}xf32"}
    assert {call[0] for call in found} > {GMM} and "jaxmoe_moe_mlp_v1" not in str(found)
    report = explain(jaxmoe.moe_mlp, x, routing, experts)
    assert not any(op.cuda_reason for op in report.ops)
    assert sum(op.cuda_target == GMM for op in report.ops) == 2

    def loss(x, experts):
        return jnp.sum(jaxmoe.moe_mlp(x, routing_of, experts) ** 2)

    routing_of = jaxmoe.Routing(jnp.zeros((t, 2), I32), jnp.ones((t, 2), F32), E)
    names = [call[0] for call in calls(cuda_text(jax.grad(loss, (0, 1)), x, experts))]
    assert names.count(GMM) >= 4 and names.count(TGMM) >= 6


def test_other_devices_multiply_float32_itself():
    args = struct(10, 40, dtype=F32), struct(E, 40, 16, dtype=F32), struct(E, dtype=I32)
    text = jax.jit(lambda *a: grouped_gemm(*a)).trace(*args).lower(lowering_platforms=("cpu",))
    assert "bf16" not in text.as_text()


def test_rows_of_any_length_are_filled_up_with_zeros():
    """Also those of a layer and of its gradients."""
    args = struct(9, 15, dtype=F32), struct(E, 15, 5, dtype=F32), struct(E, dtype=I32)
    ((_, _, operands, results),) = calls(cuda_text(grouped_gemm, *args))
    assert (operands[0], results[0]) == ("1x9x48xbf16", "1x9x8xf32")
    assert f"1x{E}x48x8xbf16" in operands
    x, gate_up, down = (
        struct(6, 7, dtype=F32),
        struct(E, 7, 18, dtype=F32),
        struct(E, 9, 7, dtype=F32),
    )
    routing = jaxmoe.Routing(jnp.zeros((6, 2), I32), jnp.ones((6, 2), F32), E)

    def loss(x, experts):
        return jnp.sum(jaxmoe.moe_mlp(x, routing, experts) ** 2)

    args = x, Experts(gate_up=gate_up, down=down)
    names = [call[0] for call in calls(cuda_text(jax.grad(loss, (0, 1)), *args))]
    assert names.count(GMM) >= 4 and names.count(TGMM) >= 6
