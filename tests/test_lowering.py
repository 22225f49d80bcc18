"""What CUDA would be asked to run, read from StableHLO on any machine."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
import jaxmoe.lora
from jaxmoe import GemmConfig, Plan, Routing, _gemm, grouped_gemm
from jaxmoe._ep import direct
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import targets as _targets
from jaxmoe.activation import ACTIVATIONS
from tests.layers import moe_mlp
from tests.lowered import NO_ACTIVATION, calls, cuda_text, layer_call

BF16, F16, F32, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32
T, K, E, H, INTER = 6, 2, 4, 32, 16


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def layer_structs(width=2 * INTER, dtype=BF16, layout="kn"):
    w1, w2 = (E, H, width), (E, INTER, H)
    if layout == "nk":
        w1, w2 = (E, width, H), (E, H, INTER)
    return (
        struct(T, H, dtype=dtype),
        Routing(struct(T, K, dtype=I32), struct(T, K, dtype=F32)),
        struct(*w1, dtype=dtype),
        struct(*w2, dtype=dtype),
    )


def plan_struct():
    return Plan(struct(E + 1, dtype=I32), struct(T * K, dtype=I32), struct(T, K, dtype=I32))


def test_moe_mlp_is_one_call_with_these_attributes():
    config = (GemmConfig(128, 32, raster=2, gather=True), GemmConfig(256, 160, raster=8))
    act = jaxmoe.Swiglu(alpha=1.5, beta=1.0, limit=7.0)
    options = {"activation": act, "gate_up": "interleaved", "weight_layout": "nk"}
    window = {"num_experts": 9, "expert_offset": 3}
    (call,) = calls(
        cuda_text(
            lambda *a: moe_mlp(*a, config=config, **options, **window), *layer_structs(layout="nk")
        )
    )
    attrs, operands, results = layer_call(call)
    assert attrs == {
        "num_experts": "9:i64",
        "num_local_experts": "4:i64",
        "expert_offset": "3:i64",
        "gate_up": "2:i64",
        "layout1": "1:i64",
        "layout2": "1:i64",
        "format": "0:i64",
        "tokens": "0:i64",
        "promoted1": "0:i64",
        "promoted2": "0:i64",
        "finalize": "1:i64",
        "activation": {
            "kind": "0:i64",
            "gated": "1:i64",
            "c1": "1.500000e+00:f32",
            "c3": "0.000000e+00:f32",
            "limit": "7.000000e+00:f32",
            "beta": "1.000000e+00:f32",
        },
        "gemm1": {
            "weight_tile": "128:i64",
            "token_tile": "32:i64",
            "cluster": "1:i64",
            "split_k": "1:i64",
            "raster": "2:i64",
            "gather": "1:i64",
            "one_kernel": "0:i64",
        },
        "gemm2": {
            "weight_tile": "256:i64",
            "token_tile": "160:i64",
            "cluster": "1:i64",
            "split_k": "1:i64",
            "raster": "8:i64",
            "gather": "0:i64",
            "one_kernel": "0:i64",
        },
    }
    assert operands == {
        "x": "6x32xbf16",
        "expert_ids": "6x2xi32",
        "weights": "6x2xf32",
        "w_gate_up": "4x32x32xbf16",
        "w_down": "4x32x16xbf16",
    }
    assert re.fullmatch(r"\d+xi32", results.pop("index"))
    assert results == {"y": "6x32xbf16", "rows": "12x32xbf16", "act": "12x16xbf16"}


def test_optional_operands_of_moe_mlp_are_passed():
    x, routing, w1, w2 = layer_structs(dtype=F16)
    given = {
        "b_gate_up": struct(E, 2 * INTER, dtype=F16),
        "b_down": struct(E, H, dtype=F16),
        "expert_map": struct(11, dtype=I32),
        "residual": struct(T, H, dtype=F16),
    }
    text = cuda_text(lambda a, o: moe_mlp(*a, **o), (x, routing, w1, w2), given)
    (call,) = calls(text)
    attrs, operands, _ = layer_call(call)
    optional = {n: operands[n] for n in ("b_gate_up", "b_down", "expert_map", "residual")}
    assert list(optional.values()) == ["4x32xf16", "4x32xf16", "11xi32", "6x32xf16"]
    assert len(operands) == 9
    assert (attrs["num_experts"], attrs["num_local_experts"]) == ("11:i64", "4:i64")


def test_grouped_gemm_call():
    args = (struct(10, 24), struct(E, 40, 24), struct(E, dtype=I32))
    config = GemmConfig(256, 160, cluster=2, raster=0, gather=True)
    text = cuda_text(
        lambda *a: grouped_gemm(
            *a,
            weight_layout="nk",
            preferred_element_type=F32,
            config=config,
            bias=jnp.ones((E, 40), BF16),
        ),
        *args,
    )
    (call,) = calls(text)
    assert call == (
        "jaxmoe_grouped_gemm_v1",
        {
            "layout": "1:i64",
            "format": "0:i64",
            "promoted": "0:i64",
            "gate_up": "0:i64",
            "activation": NO_ACTIVATION,
            "config": {
                "weight_tile": "256:i64",
                "token_tile": "160:i64",
                "cluster": "2:i64",
                "split_k": "1:i64",
                "raster": "0:i64",
                "gather": "0:i64",  # rows are in order already
                "one_kernel": "0:i64",
            },
        },
        [
            "1x10x24xbf16", "0xf32", "0xi32", "1x4x40x24xbf16", "0xf32", "1x4x40xbf16", "1x4xi32",
            "1x4xi32",
        ],
        ["1x10x40xf32", "0x0xbf16", "4xi32"],
    )  # fmt: skip


@pytest.mark.parametrize("layout", ("kn", "nk"))
def test_tiles_of_grouped_gemm_are_for_its_columns(layout):
    """In either layout the k loop is split where few tiles hold N, however long K is."""
    splits = []
    for k, n in ((65536, 1024), (1024, 65536)):
        w = struct(E, k, n) if layout == "kn" else struct(E, n, k)
        args = (struct(8, k), w, struct(E, dtype=I32))
        (call,) = calls(cuda_text(lambda *a: grouped_gemm(*a, weight_layout=layout), *args))
        splits.append(call[1]["config"]["split_k"])
    assert splits == ["2:i64", "1:i64"]


WAY = direct.Way("expert", 2, 3, "expert")
OTHER_OPS = {
    "peer_dispatch": (
        lambda *a: direct.peer_dispatch_p(*a, None, way=WAY),
        (struct(dtype=I32), struct(T, K, dtype=I32), struct(T, H)),
        (
            "jaxmoe_peer_dispatch_v1",
            {"memory": "expert", "num_devices": "2:i64", "num_local": "3:i64"},
        ),
        ["i32", f"{T}x{K}xi32", f"{T}x{H}xbf16", "0x0xf32"],
        [f"{2 * T}x{K}xi32", f"{2 * T}x{H}xbf16", "0x0xf32"],
    ),
    "peer_combine": (
        lambda *a: direct.peer_combine_p(*a, way=WAY),
        (
            struct(dtype=I32),
            struct(T, K, dtype=I32),
            struct(2 * T, K, dtype=I32),
            struct(2 * T, H),
            struct(T, H),
            struct(2 * T, 5, dtype=F32),
        ),
        (
            "jaxmoe_peer_combine_v1",
            {"memory": "expert", "num_devices": "2:i64", "num_local": "3:i64"},
        ),
        [
            "i32",
            f"{T}x{K}xi32",
            f"{2 * T}x{K}xi32",
            f"{2 * T}x{H}xbf16",
            f"{T}x{H}xbf16",
            f"{2 * T}x5xf32",
        ],
        [f"{T}x{H}xbf16", f"{T}x5xf32"],
    ),
    "route": (
        lambda logits, bias: jaxmoe.route(
            logits,
            top_k=K,
            method="deepseek_v3",
            bias=bias,
            num_groups=2,
            top_groups=1,
            scale=2.5,
            epsilon=0.25,
            masked_group_value=0.5,
        ),
        (struct(T, E, dtype=F32), struct(E)),
        (
            "jaxmoe_route_v2",
            {
                "score": "2:i64",
                "by_score": "1:i64",
                "normalize": "2:i64",
                "epsilon": "2.500000e-01:f32",
                "scale": "2.500000e+00:f32",
                "groups": {
                    "value": "0:i64",
                    "count": "2:i64",
                    "kept": "1:i64",
                    "masked_value": "5.000000e-01:f32",
                },
            },
        ),
        ["6x4xf32", "4xbf16"],
        ["6x2xi32", "6x2xf32"],
    ),
    "route_and_plan": (
        lambda logits, bias, expert_map: jaxmoe.route_and_plan(
            logits,
            top_k=K,
            method="deepseek_v3",
            bias=bias,
            num_groups=2,
            top_groups=1,
            scale=2.5,
            num_shared_experts=1,
            num_valid_tokens=5,
            num_local_experts=3,
            expert_map=expert_map,
        ),
        (struct(T, E, dtype=F32), struct(E), struct(E + 1, dtype=I32)),
        (
            "jaxmoe_route_plan_v1",
            {
                "num_shared_experts": "1:i64",
                "expert_offset": "0:i64",
                "rule": {
                    "score": "2:i64",
                    "by_score": "1:i64",
                    "normalize": "2:i64",
                    "epsilon": "9.99999968E-21:f32",
                    "scale": "2.500000e+00:f32",
                },
                "groups": {
                    "value": "0:i64",
                    "count": "2:i64",
                    "kept": "1:i64",
                    "masked_value": "0xFF800000:f32",
                },
            },
        ),
        ["1x6x4xf32", "4xbf16", "5xi32", "1xi32"],
        ["1x6x3xi32", "1x6x3xf32", "1x4xi32", "1x18xi32", "1x6x3xi32", "1xi32"],
    ),
    "plan": (
        lambda ids: jaxmoe.plan(ids, 9, expert_offset=2, num_local_experts=E),
        (struct(T, K, dtype=I32),),
        ("jaxmoe_plan_v1", {"num_experts": "9:i64", "expert_offset": "2:i64"}),
        ["1x6x2xi32", "0xi32"],
        ["1x5xi32", "1x12xi32", "1x6x2xi32"],
    ),
    "permute": (
        jaxmoe.permute,
        (struct(T, H), plan_struct()),
        ("jaxmoe_permute_v2", {}),
        ["6x32xbf16", "12xi32", "6x2xi32"],
        ["12x32xbf16"],
    ),
    "finalize": (
        jaxmoe.finalize,
        (struct(T * K, H), plan_struct(), struct(T, K, dtype=F32)),
        ("jaxmoe_finalize_v1", {}),
        ["12x32xbf16", "6x2xi32", "6x2xf32", "0x0xbf16"],
        ["6x32xbf16"],
    ),
    "quantize": (
        lambda x: jaxmoe.quantize_tokens(x, "fp8_tensor", scale_format="e8m0"),
        (struct(T, H),),
        ("jaxmoe_quantize_v1", {"shared": "0:i64", "e8m0": "1:i64"}),
        ["1x6x32xbf16", "0xf32"],
        ["1x6x32xf8E4M3FN", "1xf32", "1024xf32"],
    ),
    "gate_up": (
        lambda *a: _gemm.gate_up.gate_up_p(
            *a,
            activation=ACTIVATIONS["geglu"],
            gate_up="up_gate",
            weight_layout="nk",
            config=GemmConfig(256, 160, gather=True),
        ),
        (
            struct(T, H),
            struct(T * K, dtype=I32),
            struct(T, K, dtype=I32),
            struct(E, 2 * INTER, H),
            struct(E, 2 * INTER),
            struct(E, dtype=I32),
            struct(E, dtype=I32),
        ),
        (
            "jaxmoe_grouped_gemm_v1",
            {
                "layout": "1:i64",
                "format": "0:i64",
                "promoted": "0:i64",
                "gate_up": "1:i64",
                "activation": {
                    "kind": "1:i64",
                    "gated": "1:i64",
                    "c1": "0.000000e+00:f32",
                    "c3": "0.000000e+00:f32",
                    "limit": "0x7F800000:f32",
                    "beta": "0.000000e+00:f32",
                },
                "config": {
                    "weight_tile": "256:i64",
                    "token_tile": "160:i64",
                    "cluster": "1:i64",
                    "split_k": "1:i64",
                    "raster": "1:i64",
                    "gather": "1:i64",
                    "one_kernel": "0:i64",
                },
            },
        ),
        [
            "6x32xbf16",
            "0xf32",
            "12xi32",
            "4x32x32xbf16",
            "0xf32",
            "4x32xbf16",
            "4xi32",
            "4xi32",
        ],
        ["12x16xbf16", "12x32xbf16", "4xi32"],
    ),  # fmt: skip
    "tgmm": (
        lambda *a: _gemm.op.tgmm(*a, weight_shape=(1, E), out_dtype=F32, precision=None),
        (
            struct(3, T, 264),
            struct(3, T, H),
            struct(3, E, dtype=I32),
            struct(3, E, dtype=I32),
            struct(1, E, 264, H, dtype=F32),
        ),
        ("jaxmoe_weight_grad_v1", {"cluster": "2:i64"}),
        ["3x6x264xbf16", "3x6x32xbf16", "3x4xi32", "3x4xi32", "1x4x264x32xf32"],
        ["1x4x264x32xf32", "4xi32"],
    ),
}


@pytest.mark.parametrize("name", OTHER_OPS)
def test_call_of(name):
    fn, args, (target, attrs), operands, results = OTHER_OPS[name]
    text = cuda_text(fn, *args)
    if not attrs:  # a call without attributes has an empty backend_config
        assert text.count(f"custom_call @{target}(") == 1
        line = next(line for line in text.splitlines() if target in line)
        ins, outs = line.split(" : (")[-1].split(" -> ")
        assert re.findall(r"tensor<(.*?)>", ins) == operands
        assert re.findall(r"tensor<(.*?)>", outs)[: len(results)] == results
        return
    ((got, got_attrs, got_operands, got_results),) = calls(text)
    assert (got, got_attrs) == (target, attrs)
    assert got_operands == operands
    assert got_results[: len(results)] == results


def test_every_op_with_a_kernel_has_a_test_here():
    tested = {target for _, _, (target, _), _, _ in OTHER_OPS.values()}
    # in tests/test_pushed.py, tests/test_beside.py and tests/test_ordered.py
    tested |= {"jaxmoe_moe_mlp_v1", "jaxmoe_peer_moe_mlp_v1", "jaxmoe_peer_beside_moe_mlp_v1"}
    tested |= {"jaxmoe_peer_ordered_moe_mlp_v1"}
    # in tests/test_lora.py and tests/test_frozen_experts.py
    tested |= {"jaxmoe_adapted_moe_mlp_v1", "jaxmoe_dequantize_v1"}
    targets = {op.cuda.target for op in _primitive.OPS.values() if op.cuda and op.cuda.target}
    assert {t for t in targets if t.startswith("jaxmoe_")} == tested


def test_vmap_over_tokens_is_one_call_and_shares_the_weights():
    x, routing, w1, w2 = layer_structs()
    batched = jax.tree.map(lambda a: struct(3, *a.shape, dtype=a.dtype), (x, routing))
    text = cuda_text(jax.vmap(moe_mlp, (0, 0, None, None)), *batched, w1, w2)
    (call,) = calls(text)
    attrs, operands, _ = layer_call(call)
    assert operands == {
        "x": "18x32xbf16",
        "expert_ids": "18x2xi32",
        "weights": "18x2xf32",
        "w_gate_up": "4x32x32xbf16",
        "w_down": "4x16x32xbf16",
    }
    assert attrs["num_local_experts"] == "4:i64"


def test_vmap_over_some_weights_is_one_call_and_shares_the_others():
    x, routing, w1, w2 = layer_structs()
    axes = (None, None, 0, None)
    text = cuda_text(jax.vmap(moe_mlp, axes), x, routing, struct(3, *w1.shape), w2)
    (call,) = calls(text)
    attrs, operands, _ = layer_call(call)
    assert (operands["w_gate_up"], operands["w_down"]) == ("12x32x32xbf16", "4x16x32xbf16")
    assert attrs["num_local_experts"] == "12:i64"


def test_vmap_of_grouped_gemm_is_one_call():
    args = (struct(3, 10, 24), struct(E, 24, 40), struct(3, E, dtype=I32))
    text = cuda_text(jax.vmap(grouped_gemm, (0, None, 0)), *args)
    ((_, _, operands, _),) = calls(text)
    assert [o for o in operands if not o.startswith("0x")] == [
        *("3x10x24xbf16", "1x4x24x40xbf16", "3x4xi32", "3x4xi32")
    ]


def test_scan_over_layers_holds_one_call():
    x, routing, w1, w2 = layer_structs()

    def network(x, routing, w1, w2):
        return jax.lax.scan(lambda x, w: (moe_mlp(x, routing, *w), None), x, (w1, w2))[0]

    text = cuda_text(network, x, routing, *(struct(5, *w.shape) for w in (w1, w2)))
    assert [c[0] for c in calls(text)] == ["jaxmoe_moe_mlp_v1"]


def test_forward_mode_runs_on_the_kernels():
    def tangent(x, routing, w1, w2):
        return jax.jvp(lambda x: moe_mlp(x, routing, w1, w2), (x,), (x,))[1]

    names = [c[0] for c in calls(cuda_text(tangent, *layer_structs()))]
    assert names.count("jaxmoe_grouped_gemm_v1") == 3  # z, the tangents of z and of the rows


def test_without_the_extension_cuda_runs_pure_xla(monkeypatch):
    monkeypatch.setattr(_targets, "cuda_available", lambda: False)
    text = cuda_text(moe_mlp, *layer_structs(), forced=False)
    assert "jaxmoe_" not in text
    assert "stablehlo.while" in text


def test_other_platforms_run_pure_xla():
    with _targets.force_cuda_lowering():
        for platform in ("cpu", "tpu"):
            traced = jax.jit(lambda *a: moe_mlp(*a)).trace(*layer_structs())
            assert "jaxmoe_" not in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    "args, message",
    (
        (
            (struct(9, 12), struct(E, 12, 16)),
            "lhs.shape[1]=12 must be a positive multiple of 8 on CUDA (rows of 16-byte multiples); "
            "the nearest legal: 8 and 16",
        ),
        (
            (struct(9, 16), struct(E, 16, 5)),
            "rhs.shape[2]=5 must be a positive multiple of 8 on CUDA (rows of 16-byte multiples); "
            "the nearest legal: 8",
        ),
    ),
)
def test_what_cuda_refuses_in_grouped_gemm(args, message):
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        cuda_text(grouped_gemm, *args, struct(E, dtype=I32))


def test_cuda_refuses_results_without_a_kernel():
    args = (struct(9, 16), struct(E, 16, 8), struct(E, dtype=I32))
    with pytest.raises(NotImplementedError, match="preferred_element_type=f16 must be bf16 or f32"):
        cuda_text(lambda *a: grouped_gemm(*a, preferred_element_type=F16), *args)


def test_absent_operands_of_moe_mlp_have_a_rank():
    (call,) = calls(cuda_text(moe_mlp, *layer_structs()))
    absent = [operand for operand in call[2] if operand.startswith("0x")]
    weights = ["0xf32", "0x0x0xbf16", "0xf32", "0x0xbf16", "0x0xbf16"]
    assert absent == ["0xf32", *weights, "0xi32", "0x0xbf16", "0xf32", "0xf32"]


def test_the_tangent_of_a_bias_is_a_product_that_cuda_has():
    """Of ones, in rows of 16 bytes."""
    x, w, sizes = jnp.ones((10, 24), BF16), jnp.ones((E, 24, 40), BF16), jnp.ones(E, I32)
    product = lambda bias: grouped_gemm(x, w, sizes, bias=bias)  # noqa: E731
    found = calls(cuda_text(lambda b: jax.jvp(product, (b,), (b,)), struct(E, 40)))
    assert [call[2][0] for call in found] == ["1x10x8xbf16", "1x10x24xbf16"]


@pytest.mark.parametrize(
    "dtype, hidden, message",
    (
        (F16, 36, "x.shape[1]=36 must be a positive multiple of 8 on CUDA"),
        (BF16, 36, "x.shape[1]=36 must be a positive multiple of 8 on CUDA"),
    ),
)
def test_cuda_refuses_the_first_product_of_a_gradient(dtype, hidden, message):
    x, routing = struct(T, hidden, dtype=dtype), layer_structs()[1]
    w = struct(E, hidden, 2 * INTER, dtype=dtype), struct(E, INTER, hidden, dtype=dtype)
    loss = lambda x, *rest: jnp.sum(moe_mlp(x, *rest).astype(F32))  # noqa: E731
    ops = jaxmoe.explain(jax.grad(loss), x, routing, *w).ops
    (reason,) = (op.cuda_reason for op in ops if op.op == "jaxmoe_gate_up")
    assert f"jaxmoe.moe_mlp: {message}" in reason


@pytest.mark.parametrize("hidden, intermediate, name", ((36, 16, "x.shape[1]=36"), (32, 20, "=20")))
def test_cuda_refuses_unaligned_layers(hidden, intermediate, name):
    x, routing = struct(T, hidden), layer_structs()[1]
    w1, w2 = struct(E, hidden, 2 * intermediate), struct(E, intermediate, hidden)
    with pytest.raises(NotImplementedError, match=re.escape(name)) as error:
        cuda_text(moe_mlp, x, routing, w1, w2)
    assert "the nearest legal: " in str(error.value)


@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("dtype", (BF16, F16))
def test_gradient_of_grouped_gemm_is_two_calls(layout, dtype):
    def loss(lhs, rhs, sizes):
        out = grouped_gemm(lhs, rhs, sizes, weight_layout=layout)
        return jnp.sum(out.astype(F32) ** 2)

    shape = (E, 24, 40) if layout == "kn" else (E, 40, 24)
    args = struct(10, 24, dtype=dtype), struct(*shape, dtype=dtype), struct(E, dtype=I32)
    found = calls(cuda_text(jax.grad(loss, (0, 1)), *args))
    assert [c[0] for c in found].count(
        "jaxmoe_grouped_gemm_v1"
    ) == 2  # the product, and that of lhs
    (_, attrs, operands, results) = next(c for c in found if c[0] == "jaxmoe_weight_grad_v1")
    element = "bf16" if dtype == BF16 else "f16"
    rows = [f"1x10x24x{element}", f"1x10x40x{element}"]
    absent = f"0x0x0x0x{element}"
    assert operands == [*(rows if layout == "kn" else rows[::-1]), "1x4xi32", "1x4xi32", absent]
    assert attrs == {"cluster": "1:i64"}
    assert results == [f"1x{'x'.join(map(str, shape))}x{element}", "4xi32"]


def test_accumulation_takes_the_memory_of_what_there_is():
    add, args, *_ = OTHER_OPS["tgmm"]
    alias = re.compile(r"output_operand_alias<output_tuple_indices = \[0\],\s*operand_index = 4")
    assert alias.search(cuda_text(add, *args))
    text = cuda_text(lambda *a: add(*a, None), *args[:4])
    assert "jaxmoe_weight_grad_v1" in text and "output_operand_alias" not in text


@pytest.mark.parametrize(
    "k, n, dtype, out_dtype, message",
    (
        (12, 16, BF16, BF16, "x.shape[1]=12 must be a positive multiple of 8 on CUDA"),
        (16, 12, F16, F16, "dy.shape[1]=12 must be a positive multiple of 8 on CUDA"),
        (16, 16, BF16, F16, "the gradient of rhs must be bf16 or f32 on CUDA"),
    ),
)
def test_what_cuda_refuses_in_weight_gradients(k, n, dtype, out_dtype, message):
    args = (struct(1, 9, k, dtype=dtype), struct(1, 9, n, dtype=dtype))
    groups = (struct(1, E, dtype=I32),) * 2

    def fn(*a):
        return _gemm.op.tgmm(
            *a, None, weight_shape=(1, E), out_dtype=jnp.dtype(out_dtype), precision=None
        )

    with pytest.raises(NotImplementedError, match=re.escape(message)):
        cuda_text(fn, *args, *groups)


def test_vmap_that_would_copy_weights_loops_instead():
    """A bias for each example, weights shared: a loop of calls, each with the shared weights."""
    args = (struct(10, 24), struct(E, 24, 40), struct(E, dtype=I32), struct(3, E, 40))
    text = cuda_text(
        jax.vmap(lambda a, b, s, c: grouped_gemm(a, b, s, bias=c), (None, None, None, 0)), *args
    )
    ((_, _, operands, _),) = calls(text)
    assert operands[3] == "1x4x24x40xbf16"
    assert "stablehlo.while" in text


def test_cuda_refuses_an_unaligned_axis_that_is_not_contracted():
    """As stored: rows of an "nk" weight are K, but its N is the length of the result's rows."""
    args = struct(9, 16), struct(E, 12, 16), struct(E, dtype=I32)
    message = "rhs.shape[1]=12 must be a positive multiple of 8 on CUDA"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        cuda_text(lambda *a: grouped_gemm(*a, weight_layout="nk"), *args)


@pytest.mark.parametrize("weights", ("gate_up", "gate and up"))
def test_a_training_step_has_the_tiles_that_were_asked_for(weights):
    """Those of the forward pass: products of the backward pass have other shapes."""
    config = GemmConfig(256, 160, raster=3), GemmConfig(128, 192, raster=5)
    x, routing = struct(T, H), layer_structs()[1]
    down, first = struct(E, INTER, H), ("gate_up",) if weights == "gate_up" else ("gate", "up")
    given = {n: struct(E, H, 2 * INTER // len(first)) for n in first}

    def loss(x, routing, experts):
        return jnp.sum(jaxmoe.moe_mlp(x, routing, experts, config=config).astype(F32))

    step = jax.value_and_grad(loss, (0, 2))
    found = calls(cuda_text(step, x, routing, jaxmoe.Experts(down=down, **given)))
    tiles = [attrs["config"] for _, attrs, *_ in found if "config" in attrs]
    rasters = [tile["raster"] for tile in tiles if tile["raster"] != "1:i64"]
    assert rasters == ["3:i64"] * len(first) + ["5:i64"]


def test_one_kernel_for_both_products():
    """The gate-up product is asked to go on; rows are counted in the scratch."""
    tile = GemmConfig(128, 32)
    one = GemmConfig(128, 32, gather=True, one_kernel=True)
    attrs, _, results = layer_call(
        calls(cuda_text(lambda *a: moe_mlp(*a, config=(one, tile)), *layer_structs()))[0]
    )
    assert (attrs["gemm1"]["one_kernel"], attrs["gemm2"]["one_kernel"]) == ("1:i64", "0:i64")
    assert results["index"] == f"{_gemm.scratch.mlp_index_size(T * K, E, True)}xi32"
