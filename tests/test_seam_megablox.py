"""megablox' `gmm` and `tgmm` against those of JAX, interpreted, and of MaxText where it is."""

import importlib
import inspect
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe._testing import assert_equal
from jaxmoe.seams import megablox
from tests.lowered import calls, cuda_text

R, K, N = 32, 16, 24  # integers, so that every order of sums has the same result
TILE = (8, 16, 8)
SIZES = (5, 0, 17, 6)  # of 32 rows; the tiles of megablox end inside groups


def integers(shape, dtype=np.float32, seed=0):
    values = np.random.default_rng(seed).integers(-4, 5, shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


def example(dtype=np.float32, transposed=False):
    rhs = integers((4, N, K) if transposed else (4, K, N), dtype, 1)
    return integers((R, K), dtype), rhs, jnp.array(SIZES, jnp.int32)


MODULES = {
    "jax": "jax.experimental.pallas.ops.tpu.megablox.gmm",
    "maxtext": "maxtext.kernels.megablox.backend",
}


@pytest.fixture
def published(request):
    """The kernels themselves, which the Pallas interpreter runs."""
    try:
        module = importlib.import_module(MODULES[request.param])
    except ImportError as error:
        pytest.skip(str(error))
    with jax.numpy_dtype_promotion("standard"):
        yield module


CASES = {
    "plain": {},
    "transposed": {"transpose_rhs": True},
    "bf16": {"preferred_element_type": jnp.bfloat16},
    "window": {"group_offset": np.int32(1)},
    "last": {"group_offset": np.int32(3)},
    "existing": {"existing_out": True},
    "existing_in_window": {"existing_out": True, "group_offset": np.int32(2)},
}


# MaxText's own call names the wrong operand as existing_out.
@pytest.mark.filterwarnings("default")  # of what the packages import
@pytest.mark.parametrize(
    ("published", "case"),
    [(m, c) for m in MODULES for c in CASES if m == "jax" or "existing_out" not in CASES[c]],
    indirect=["published"],
)
def test_gmm(published, case):
    options = dict(CASES[case])
    dtype = options.get("preferred_element_type", jnp.float32)
    lhs, rhs, sizes = example(dtype, options.get("transpose_rhs", False))
    if "existing_out" in options:
        options["existing_out"] = integers((R, N), dtype, 3)
    offset = int(options.get("group_offset", 0))
    if offset:
        rhs, options["group_offset"] = rhs[offset : offset + 2], jnp.asarray(offset)
    want = published.gmm(lhs, rhs, sizes, tiling=TILE, interpret=True, **options)
    got = jax.jit(lambda *a: megablox.gmm(*a, tiling=TILE * 3, interpret=True, **options))(
        lhs, rhs, sizes
    )
    assert got.dtype == want.dtype
    rows = slice(None)
    if "existing_out" not in options and not offset:
        rows = slice(sum(SIZES))  # what lies behind is never written there, and 0 here
        assert not got[sum(SIZES) :].any()
    assert_equal(got[rows], want[rows])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("published", "existing"),
    [("jax", False), ("jax", True), ("maxtext", False)],
    indirect=["published"],
)
@pytest.mark.parametrize(("offset", "count"), [(None, None), (1, 2), (2, 2)])
def test_tgmm(published, offset, count, existing):
    lhs, _, sizes = example()
    rhs = integers((R, N), np.float32, 4)
    options = {}
    if offset is not None:
        options = {"group_offset": jnp.asarray(offset), "num_actual_groups": count}
    if existing:
        options["existing_out"] = integers((count or 4, K, N), np.float32, 5)
    want = published.tgmm(lhs.T, rhs, sizes, tiling=(8, 8, 8), interpret=True, **options)
    got = megablox.tgmm(lhs.T, rhs, sizes, tiling=(8, 8, 8), interpret=True, **options)
    assert_equal(got, want)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("transposed", (False, True))
def test_gradients(transposed):
    """Those of JAX's own derivative rule."""
    name = "jax.experimental.pallas.ops.tpu.megablox.ops"
    published = pytest.importorskip(name, exc_type=ImportError)
    lhs, rhs, sizes = example(np.float32, transposed)
    dy = integers((R, N), np.float32, 6).at[sum(SIZES) :].set(0)

    def gradients(gmm):
        f = lambda a, b: gmm(a, b, sizes, jnp.float32, TILE, None, None, transposed, True)  # noqa: E731
        with jax.numpy_dtype_promotion("standard"):
            return jax.vjp(f, lhs, rhs)[1](dy)

    got, want = gradients(megablox.gmm), gradients(published.gmm)
    assert_equal(got[0][: sum(SIZES)], want[0][: sum(SIZES)])
    assert_equal(got[1], want[1])


@pytest.mark.filterwarnings("default")
def test_signatures_are_those_of_maxtext():
    backend = pytest.importorskip("maxtext.kernels.megablox.backend", exc_type=ImportError)
    ops = importlib.import_module("maxtext.kernels.megablox.ops")
    for ours, theirs in ((megablox.gmm, ops.gmm), (megablox.tgmm, backend.tgmm)):
        of_theirs = inspect.signature(inspect.unwrap(theirs)).parameters
        assert list(inspect.signature(ours).parameters) == list(of_theirs)
        for name, parameter in inspect.signature(ours).parameters.items():
            assert parameter.default == of_theirs[name].default, name


def test_gradient_of_existing_out_is_where_it_is_read():
    lhs, rhs, sizes = example()
    old, dy = integers((R, N), np.float32, 3), integers((R, N), np.float32, 6)
    f = lambda old: megablox.gmm(lhs, rhs, sizes, existing_out=old)  # noqa: E731
    (got,) = jax.vjp(f, old)[1](dy)
    assert_equal(got, dy.at[: sum(SIZES)].set(0))


@pytest.mark.parametrize("dtype", (np.float32, jnp.bfloat16))
@pytest.mark.parametrize("transposed", (False, True))
def test_partial_sum(dtype, transposed):
    """Added before the one rounding, and differentiable."""
    lhs, rhs, sizes = example(dtype, transposed)
    partial, dy = integers((R, N), dtype, 3) / 8, integers((R, N), dtype, 6)

    def plain(lhs, rhs, partial):
        product = megablox.gmm(
            lhs, rhs, sizes, jnp.float32, group_offset=1, transpose_rhs=transposed
        )
        used = (jnp.arange(R) >= SIZES[0]) & (jnp.arange(R) < sum(SIZES))
        return jnp.where(used[:, None], product + partial.astype(jnp.float32), 0).astype(dtype)

    def seam(lhs, rhs, partial):
        options = {"group_offset": 1, "transpose_rhs": transposed, "partial_sum": partial}
        return megablox.gmm(lhs, rhs, sizes, dtype, **options)

    args = (lhs, rhs[1:], partial)
    assert_equal(jax.jit(seam)(*args), plain(*args))
    got, want = (jax.vjp(f, *args)[1](dy) for f in (seam, plain))
    jax.tree.map(assert_equal, got, want)


def test_quantized_weights():
    lhs, rhs = integers((R, 64)), integers((2, 64, 64), np.float32, 1)
    sizes = jnp.array([3, 20])
    q = jaxmoe.quantize(rhs, "int8_channel", weight_layout="kn")
    assert_equal(megablox.gmm(lhs, q, sizes), jaxmoe.grouped_gemm(lhs, q, sizes))


@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("blocks", (1, 2))
def test_weights_of_qwix(blocks, layout):
    """In a format or decoded, by how many scales K has."""
    values, lhs, sizes = integers((2, 128, 64), np.int8, 1), integers((R, 128)), jnp.array([3, 20])
    scale = 2.0 ** np.arange(blocks, dtype=np.float32).reshape(1, -1, 1) * np.ones((2, 1, 64), "f4")
    plain = np.asarray(values, np.float32) * np.repeat(scale, 128 // blocks, 1)
    if layout == "nk":
        values, scale, plain = (a.swapaxes(1, 2) for a in (values, scale, plain))
    q = types.SimpleNamespace(qvalue=values, scale=scale, zero_point=None, qtype="int8")
    turned = {"transpose_rhs": layout == "nk"}
    got = jax.jit(lambda lhs: megablox.gmm(lhs, q, sizes, **turned))(lhs)
    assert_equal(got, megablox.gmm(lhs, plain, sizes, **turned))


class QArray:
    """As those of qwix."""

    qvalue = scale = shape = None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"rhs_quantize_dtype": jnp.int8},
            NotImplementedError,
            "seams.megablox.gmm: rhs_quantize_dtype must be None: this product quantizes nothing; "
            "give rhs as a jaxmoe.QuantizedArray",
        ),
        ({"lhs_quantize_dtype": jnp.int8}, NotImplementedError, "lhs_quantize_dtype must be None"),
        ({"qwix_rule": object()}, NotImplementedError, "qwix_rule must be None"),
        (
            {"use_qwix_quantization": True},
            NotImplementedError,
            "use_qwix_quantization must be False",
        ),
        ({"rhs": QArray()}, TypeError, "gmm: rhs: jaxmoe.seams.qwix.weight: q must be a qwix.QAr"),
        ({"lhs": QArray()}, TypeError, "lhs must be an array or a jaxmoe.QuantizedArray"),
        (
            {"existing_out": np.ones((R, N), ml_dtypes.bfloat16)},
            TypeError,
            "existing_out.dtype=bf16 must equal preferred_element_type=f32",
        ),
        ({"existing_out": np.ones((R, K))}, ValueError, r"existing_out.shape=\[32,16\] must be"),
        ({"partial_sum": np.ones((R, K))}, ValueError, r"partial_sum.shape=\[32,16\] must be"),
        (
            {"partial_sum": np.ones((R, N), np.int32)},
            TypeError,
            "partial_sum.dtype=i32 must be bf16",
        ),
        ({"rhs": np.ones((R, N))}, ValueError, r"rhs must have 3 axes \[E,K,N\], not 2"),
        (
            {"preferred_element_type": np.int32},
            TypeError,
            "gmm: preferred_element_type=int32 must be bfloat16, float16 or float32",
        ),
    ],
)
def test_refused(change, error, message):
    lhs, rhs, sizes = example()
    with pytest.raises(error, match=message):
        megablox.gmm(**{"lhs": lhs, "rhs": rhs, "group_sizes": sizes} | change)


def test_partial_sum_of_quantized_weights_is_refused():
    rhs = jaxmoe.quantize(jnp.ones((4, 64, 64)), "int8_channel", weight_layout="kn")
    lhs, sizes = jnp.ones((R, 64)), np.array(SIZES)
    with pytest.raises(NotImplementedError, match="partial_sum must be None with a quantized rhs"):
        megablox.gmm(lhs, rhs, sizes, partial_sum=jnp.ones((R, 64)))


def test_tgmm_is_refused():
    with pytest.raises(ValueError, match=r"tgmm: lhs must have 2 axes \[K,R\], not 1"):
        megablox.tgmm(jnp.ones(3), jnp.ones((3, 2)), jnp.array([3]))


@pytest.mark.parametrize("with_partial", (False, True))
def test_more_groups_than_matrices_begin_at_the_first(with_partial):
    lhs, rhs, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([2, 3, 1])
    more = {"partial_sum": jnp.zeros((6, 3))} if with_partial else {}
    out = megablox.gmm(lhs, rhs, sizes, **more)
    np.testing.assert_array_equal(out[:, 0], [4, 4, 4, 4, 4, 0])


def test_factors_of_integers_have_no_gradients_beside_a_partial_sum():
    lhs, rhs, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 3), jnp.int8), jnp.array([2, 3])
    loss = lambda lhs, part: megablox.gmm(lhs, rhs, sizes, partial_sum=part).sum()  # noqa: E731
    of_lhs, of_part = jax.grad(loss, (0, 1))(lhs, jnp.zeros((6, 3)))
    np.testing.assert_array_equal(of_lhs[:, 0], [3, 3, 3, 3, 3, 0])
    np.testing.assert_array_equal(of_part[:, 0], [1, 1, 1, 1, 1, 0])
    of_part = jax.grad(loss, 1)(lhs.astype(jnp.int8), jnp.zeros((6, 3)))
    np.testing.assert_array_equal(of_part[:, 0], [1, 1, 1, 1, 1, 0])


@pytest.mark.parametrize("added", (False, True))
def test_gradients_are_as_exact_as_the_product(added):
    """Where the default is set in a function alone, its gradient is traced without it."""

    def loss(lhs, rhs, sizes, partial_sum):
        options = {"partial_sum": partial_sum} if added else {}
        with jax.default_matmul_precision("highest"):
            return jnp.sum(megablox.gmm(lhs, rhs, sizes, jnp.float32, **options))

    given = *example(), integers((R, N))
    found = calls(cuda_text(jax.grad(loss, (0, 1)), *given))
    columns = {ins[0] for target, _, ins, _ in found if target == "jaxmoe_grouped_gemm_v1"}
    assert columns <= {f"1x{R}x{6 * K}xbf16", f"1x{R}x{6 * N}xbf16"}
    assert f"1x{R}x{6 * N}xbf16" in columns
    assert [call[0] for call in found].count("jaxmoe_weight_grad_v1") == 6
