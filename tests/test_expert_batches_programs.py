"""expert_batches as programs: what CUDA is asked to run, how a mesh divides it, what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import Experts, GemmConfig, QuantizedArray, Swiglu, expert_batches, explain, quantize
from tests.lowered import NO_ACTIVATION, calls, cuda_text
from tests.sharding_programs import (
    AUTO,
    EXPLICIT,
    check_spec,
    close,
    collectives,
    compiled,
    entered,
    make_mesh,
    place,
)
from tests.test_fp8_lowering import tile

E, M, H, INTER = 4, 256, 128, 128
TARGET = "jaxmoe_grouped_gemm_v1"


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.cache
def structs(format=None, dtype=jnp.bfloat16, **of_experts):
    """x, counts and experts without values."""

    def weights():
        w = {
            "gate_up": jnp.ones((E, 2 * INTER, H), dtype),
            "down": jnp.ones((E, H, INTER), dtype),
        }
        if format:
            w = {n: quantize(a, format, weight_layout="nk") for n, a in w.items()}
        biases = {"gate_up_bias": jnp.ones((E, 2 * INTER), dtype)}
        return Experts(**w, **biases, layout="nk", **of_experts)

    return struct(E, M, H, dtype=dtype), struct(E, dtype=jnp.int32), jax.eval_shape(weights)


def ops(text):
    """The operations of a program that are no custom calls."""
    return set(re.findall(r"(?:stablehlo|chlo)\.(\w+)", text)) - {"custom_call"}


# What looks at counts or gives an array another shape; nothing that could move a row.
NOTHING_MOVES = {
    *("constant", "broadcast_in_dim", "reshape", "convert", "maximum", "minimum", "return"),
    "clamp",
}


@pytest.mark.parametrize("format", (None, "mxfp4", "int4_g128"))
def test_two_products_of_the_rows_where_they_lie(format):
    """The second one takes what the first one gives; no other operation has rows."""
    activation = Swiglu(alpha=1.5, beta=1.0, limit=7.0)
    x, counts, experts = structs(format, activation=activation, order="interleaved")
    text = cuda_text(lambda *a: expert_batches(*a), x, counts, experts)
    first, second = calls(text)
    assert first[0] == second[0] == TARGET
    assert first[1]["activation"] == {
        **{"kind": "0:i64", "gated": "1:i64", "c1": "1.500000e+00:f32", "c3": "0.000000e+00:f32"},
        **{"limit": "7.000000e+00:f32", "beta": "1.000000e+00:f32"},
    }
    assert first[1]["gate_up"] != second[1]["gate_up"] and second[1]["activation"] == NO_ACTIVATION
    stored = "4x1x256x128xbf16" if format is None else "4x1x"
    assert first[2][0] == "4x256x128xbf16" and first[2][3].startswith(stored)
    assert first[2][5] == "4x1x256xbf16" and first[2][6:] == ["4x1xi32", "4x1xi32"]
    assert first[3] == ["4x256x128xbf16", "0x0xbf16", "4xi32"]  # no z
    assert second[2][0] == "4x256x128xbf16" and second[3][0] == "4x256x128xbf16"
    assert ops(text) <= NOTHING_MOVES
    rows = re.findall(rf"(%\w+):\w+ = stablehlo.custom_call @{TARGET}\((%[\w#]+)", text)
    (result, of_first), (_, of_second) = rows
    assert (of_first, of_second) == ("%arg0", f"{result}#0")


@pytest.mark.parametrize("format", ("fp8_channel", "fp8_block"))
def test_fp8_quantizes_rows_in_place(format):
    x, counts, experts = structs(format)
    text = cuda_text(lambda *a: expert_batches(*a), x, counts, experts)
    names = ["jaxmoe_quantize_v1", TARGET]
    found = calls(text)
    assert [call[0] for call in found] == 2 * names
    assert found[1][2][0] == found[3][2][0] == "4x256x128xf8E4M3FN"
    assert found[1][3][0] == "4x256x128xbf16" and found[1][1]["activation"]["gated"] == "1:i64"
    assert found[1][2][1] == ("4x256xf32" if format == "fp8_channel" else "4x256x1xf32")
    assert ops(text) <= NOTHING_MOVES


def test_quantized_rows_are_not_quantized_again():
    x, counts, experts = structs("fp8_block")
    rows = E * M
    q = QuantizedArray(
        struct(rows, H, dtype=jnp.float8_e4m3fn),
        struct(rows, 1, dtype=jnp.float32),
        *("fp8_block", "tokens", jnp.dtype(jnp.bfloat16)),
    )
    text = cuda_text(lambda *a: expert_batches(*a), q, counts, experts)
    assert [call[0] for call in calls(text)] == [TARGET, "jaxmoe_quantize_v1", TARGET]
    assert ops(text) <= NOTHING_MOVES


@pytest.mark.parametrize(("format", "shared"), ((None, True), (None, False), ("mxfp4", True)))
def test_vmap_is_the_same_calls_of_more_batches(format, shared):
    x, counts, experts = structs(format)
    more = lambda tree: jax.tree.map(lambda a: struct(3, *a.shape, dtype=a.dtype), tree)  # noqa: E731
    fn = jax.vmap(expert_batches, (0, 0, None if shared else 0))
    text = cuda_text(fn, more(x), more(counts), experts if shared else more(experts))
    first, second = calls(text)
    assert first[2][0] == second[2][0] == "12x256x128xbf16"
    assert first[1]["activation"]["gated"] == "1:i64" and "stablehlo.while" not in text
    if format is None:
        assert first[2][3] == ("4x1x256x128xbf16" if shared else "12x1x256x128xbf16")


def test_tiles_are_those_of_m_rows_or_of_config():
    x, counts, experts = structs()
    config = (GemmConfig(128, 32), GemmConfig(128, 8, split_k=2))

    def tiles(**options):
        text = cuda_text(lambda *a: expert_batches(*a, **options), x, counts, experts)
        return [call[1]["config"] for call in calls(text)]

    assert tiles(config=config) == [tile(128, 32, 0), tile(128, 8, 0, split_k=2)]
    assert tiles() == [tile(256, 160, 0, cluster=2)] * 2
    few = struct(E, 2, H)
    text = cuda_text(lambda *a: expert_batches(*a, batch_invariant=True), few, counts, experts)
    assert [call[1]["config"]["split_k"] for call in calls(text)] == ["1:i64"] * 2
    x, counts, odd = structs("fp8_block")
    odd = jax.eval_shape(lambda: _of_width(48))
    text = cuda_text(lambda *a: expert_batches(*a), x, counts, odd)
    assert calls(text)[1][1]["config"]["weight_tile"] == "128:i64"  # blocks end inside 256 rows


def _of_width(intermediate):
    shapes = {"gate_up": (E, 2 * intermediate, H), "down": (E, H, intermediate)}
    w = {
        n: quantize(jnp.ones(s, jnp.bfloat16), "fp8_block", weight_layout="nk")
        for n, s in shapes.items()
    }
    return Experts(**w, layout="nk")


def test_training_is_kernels_and_its_first_product_leaves_z():
    x, counts, experts = structs()

    def loss(x, counts, experts):
        return expert_batches(x, counts, experts).astype(jnp.float32).sum()

    text = cuda_text(jax.grad(loss, (0, 2), allow_int=True), x, counts, experts)
    found = [call for call in calls(text) if call[1].get("activation", {}).get("gated") == "1:i64"]
    assert [call[3][:2] for call in found] == [["4x256x128xbf16", "4x256x256xbf16"]]
    names = [call[0] for call in calls(text)]
    assert names.count(TARGET) == 3 and names.count("jaxmoe_weight_grad_v1") == 3  # with the bias'
    assert "stablehlo.gather" not in text and "stablehlo.dot" not in text


@pytest.mark.parametrize(("kept", "products"), (((), 5), (("jaxmoe_z",), 4)))
def test_z_has_the_name_of_the_layers(kept, products):
    """A checkpoint around the layer that keeps z does not make it again."""
    policy = jax.checkpoint_policies.save_only_these_names(*kept)

    def loss(x, counts, experts):
        y = jax.checkpoint(lambda x, e: expert_batches(x, counts, e), policy=policy)(x, experts)
        return jnp.square(y.astype(jnp.float32)).sum()

    names = [call[0] for call in calls(cuda_text(jax.grad(loss, (0, 2)), *structs()))]
    assert names.count(TARGET) == products


def test_explain_lists_the_calls():
    report = explain(lambda *a: expert_batches(*a), *structs("mxfp4"))
    assert [op.op for op in report.ops] == ["jaxmoe_activated_gmm", "jaxmoe_gmm"]
    assert {op.cuda_target for op in report.ops} == {TARGET}


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"hidden": 20}, "x.shape[2]=20 must be a positive multiple of 8 on CUDA"),
        ({"inter": 20}, "the activation's result.shape[2]=20 must be a positive multiple of 8 on"),
    ),
)
def test_what_cuda_refuses(change, message):
    given = {"dtype": jnp.bfloat16, "hidden": 32, "inter": 32} | change
    hidden, inter, dtype = given["hidden"], given["inter"], given["dtype"]
    experts = Experts(
        gate_up=struct(E, hidden, 2 * inter, dtype=dtype),
        down=struct(E, inter, hidden, dtype=dtype),
    )
    args = struct(E, M, hidden, dtype=dtype), struct(E, dtype=jnp.int32), experts
    with pytest.raises(NotImplementedError, match=re.escape(f"jaxmoe.expert_batches: {message}")):
        cuda_text(lambda *a: expert_batches(*a), *args)


RIGHT = {
    "x": np.ones((2, 3, 8), np.float32),
    "counts": np.ones(2, np.int32),
    "experts": Experts(gate_up=np.ones((2, 8, 8), np.float32), down=np.ones((2, 4, 8), np.float32)),
}
QUANTIZED_ROWS = QuantizedArray(
    *(struct(7, 128, dtype=jnp.float8_e4m3fn), struct(7, 1, dtype=jnp.float32)),
    *("fp8_block", "tokens", jnp.dtype(jnp.bfloat16)),
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    (
        ({"x": np.ones((6, 8), np.float32)}, ValueError, "x must have 3 axes [E,M,H], not 2"),
        ({"x": np.ones((3, 2, 8), np.float32)}, ValueError, "x.shape[0]=3 must equal experts.down"),
        (
            {"x": np.ones((2, 3, 4), np.float32)},
            ValueError,
            "experts.gate_up.shape[1]=8 must equal x.shape[2]=4",
        ),
        (
            {"x": np.ones((2, 3, 8), np.float16)},
            TypeError,
            "x.dtype=f16 must equal that of the exp",
        ),
        ({"counts": np.ones(3, np.int32)}, ValueError, "counts.shape[0]=3 must equal experts.down"),
        ({"counts": np.ones((2, 1), np.int32)}, ValueError, "counts must have 1 axis [E], not 2"),
        ({"counts": np.ones(2, np.float32)}, TypeError, "counts.dtype=f32 must be an integer type"),
        ({"experts": None}, TypeError, "experts must be a jaxmoe.Experts"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant must be a bool"),
        ({"recompute": "h"}, ValueError, "recompute='h' must be one of z"),
        ({"config": GemmConfig(128, 8)}, TypeError, "config must be a pair of GemmConfig"),
        (
            {"config": (GemmConfig(128, 8, one_kernel=True), GemmConfig(128, 8))},
            ValueError,
            "config[0].one_kernel must be False: it is for moe_mlp and expert_rows",
        ),
        (
            {"experts": dataclasses.replace(RIGHT["experts"], forward_format="fp8_tensor")},
            NotImplementedError,
            "expert_batches is not supported with experts.forward_format",
        ),
    ),
)
def test_what_is_refused(change, error, message):
    with pytest.raises(error, match=re.escape(f"jaxmoe.expert_batches: {message}")):
        expert_batches(**RIGHT | change)


def test_quantized_rows_that_are_no_batches():
    _, counts, experts = structs("fp8_block")
    message = "jaxmoe.expert_batches: x.shape[0]=7 must be a multiple of experts.down.shape[0]=4"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(expert_batches, QUANTIZED_ROWS, counts, experts)


def divided(kind, format=None):
    """Results and collectives of a layer and its gradient, experts over four devices."""
    rng = np.random.default_rng(4)
    draw = lambda *s: jnp.asarray(rng.normal(size=s) / 8, jnp.float32)  # noqa: E731
    arrays = {"x": draw(4, 6, 64), "gate_up": draw(4, 128, 64), "down": draw(4, 64, 64)}
    arrays |= {"counts": jnp.array([6, 0, 2, 9], jnp.int32), "bias": draw(4, 64)}

    def fn(a):
        def layer(x, bias):
            w = {n: a[n] for n in ("gate_up", "down")}
            if format:
                w = {n: quantize(v, format, weight_layout="nk") for n, v in w.items()}
            experts = Experts(**w, layout="nk", down_bias=bias)
            return expert_batches(x, a["counts"], experts)

        y, pull = jax.vjp(layer, a["x"], a["bias"])
        return y, pull(y)

    got, text = compiled(fn, make_mesh(kind, "a"), arrays, dict.fromkeys(arrays, P("a")))
    close(got, jax.jit(fn)(arrays))
    assert np.asarray(got[0])[2, :2].any() and not np.asarray(got[0])[2, 2:].any()
    check_spec(got[0], P("a"))
    return collectives(text)


@pytest.mark.parametrize("kind", (AUTO, EXPLICIT), ids=str)
@pytest.mark.parametrize("format", (None, "fp8_channel"))
def test_devices_have_their_experts_batches_and_exchange_nothing(kind, format):
    assert divided(kind, format) == "none"


def test_no_cuda_call_is_left_for_xla_to_gather_its_operands():
    mesh = make_mesh(AUTO, "a")
    x, counts, experts = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, P("a"))),
        structs("mxfp4"),
    )
    with entered(mesh):
        text = cuda_text(lambda *a: expert_batches(*a), x, counts, experts)
    assert "CustomSPMDPartitioning" in text and "@jaxmoe_" not in text


def test_inside_shard_map():
    mesh = make_mesh(AUTO, "a")
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(4, 6, 64)), jnp.float32)
    w = [jnp.asarray(rng.normal(size=(4, *s)) / 8, jnp.float32) for s in ((64, 128), (64, 64))]
    counts = jnp.array([6, 0, 2, 9], jnp.int32)

    def fn(x, counts, *w):
        return expert_batches(x, counts, Experts(gate_up=w[0], down=w[1]))

    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    got = mapped(*(place(a, mesh, P("a")) for a in (x, counts, *w)))
    np.testing.assert_allclose(got, jax.jit(fn)(x, counts, *w), rtol=1e-5, atol=1e-5)
