"""explain: what it finds, what it says, and that what it says is what is lowered."""

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import Experts, GemmConfig, Routing, explain, grouped_gemm, quantize, route
from jaxmoe._jax import targets as _targets
from tests.layers import moe_mlp

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


LAYER = (struct(16, 64), struct(16, 8, dtype=F32), struct(8, 64, 96), struct(8, 48, 64))


def layer(x, logits, w_gate_up, w_down, **options):
    return moe_mlp(x, route(logits, top_k=2), w_gate_up, w_down, **options)


def test_report_of_a_layer():
    config = (GemmConfig(128, 8, gather=True), GemmConfig(128, 32))
    report = explain(lambda *a: layer(*a, config=config), *LAYER)
    assert report.platform == jax.default_backend()
    assert report.why_no_cuda == _targets.why_not()
    assert [op.op for op in report.ops] == ["jaxmoe_route", "jaxmoe_moe_mlp"]
    mlp = report.ops[1]
    assert mlp.cuda_target == "jaxmoe_moe_mlp_v1"
    assert mlp.cuda_reason is None
    assert mlp.operands[:3] == ("bf16[16,64]", "i32[16,2]", "bf16[8,64,96]")
    assert mlp.cuda_attrs["gemm1"] == config[0].attrs()
    assert mlp.cuda_attrs["gemm2"] == config[1].attrs()
    rows, act, index = mlp.cuda_scratch
    assert (rows.shape, rows.dtype, rows.bytes) == ((32, 64), "bf16", 32 * 64 * 2)
    assert (act.shape, act.dtype, act.bytes) == ((32, 48), "bf16", 32 * 48 * 2)
    assert (index.dtype, index.bytes) == ("i32", 4 * index.shape[0])
    assert mlp.cuda_scratch_bytes == rows.bytes + act.bytes + index.bytes
    assert mlp.runs == "pure XLA"
    assert mlp.weight_bytes == (8 * 64 * 96 + 8 * 48 * 64) * 2 and report.ops[0].weight_bytes == 0


def test_report_of_packed_weights():
    """The bytes of the array, values with their scales, and the float32 scale of each expert."""
    q = quantize(jnp.ones((3, 64, 128), jnp.bfloat16), "mxfp4", weight_layout="nk")
    sizes = jnp.array([1, 1, 0], jnp.int32)
    x = jnp.ones((2, 128), jnp.bfloat16)
    (op,) = explain(lambda x: grouped_gemm(x, q, sizes, weight_layout="nk"), x).ops
    assert op.weight_bytes == 3 * (64 * 128 // 2 + 64 * 128 // 32 + 4)
    assert f"weights: {op.weight_bytes} bytes" in str(op)


@pytest.mark.parametrize("format", ("mxfp4", "fp8_channel"))
def test_report_of_weights_that_are_dequantized(format):
    """Of a gradient: their stored bytes once a product, and no bytes of the copy that it reads."""
    up, down = (
        quantize(jnp.ones(shape, BF16), format, weight_layout="nk")
        for shape in ((3, 64, 128), (3, 128, 64))
    )
    experts = Experts(up=up, down=down, layout="nk", activation="relu2")
    routing = Routing(jnp.zeros((4, 2), I32), jnp.ones((4, 2), F32))
    loss = lambda x: jaxmoe.moe_mlp(x, routing, experts).astype(F32).sum()  # noqa: E731
    ops = explain(jax.grad(loss), jnp.ones((4, 128), BF16)).ops
    bytes_of = lambda name: [op.weight_bytes for op in ops if op.op == name]  # noqa: E731
    stored = [q.values.nbytes + q.scales.nbytes for q in (up, down)]
    assert bytes_of("jaxmoe_dequantize") == stored + stored[::-1]
    assert bytes_of("jaxmoe_gmm") == [0] * 4 and bytes_of("jaxmoe_moe_mlp") == [sum(stored)]


def test_only_functions_are_explained():
    with pytest.raises(TypeError, match=r"jaxmoe\.explain: fn must be a function"):
        explain(None)  # pyright: ignore[reportArgumentType]


def test_printed_report():
    with _targets.force_cuda_lowering():
        text = str(explain(layer, *LAYER))
    why = _targets.why_not()
    assert text.startswith(
        "default platform: cpu; CUDA kernels " + ("loaded" if why is None else f"not loaded: {why}")
    )
    arrays = "bf16[16,64], i32[16,2], bf16[8,64,96], bf16[8,48,64], f32[16,2]"
    assert f"jaxmoe_moe_mlp ({arrays})" in text
    assert f"  here: pure XLA\n  weights: {(96 + 48) * 8 * 64 * 2} bytes\n" in text
    assert "  CUDA: FFI call jaxmoe_moe_mlp_v1\n" in text
    assert "activation: gated 1, kind sigmoid, c1 1, c3 0, limit inf, beta 0" in text
    for line in ("gate_up: gate_up", "layout1: kn", "format: plain"):
        assert f"    {line}\n" in text
    assert "scratch: " in text
    assert str(explain(lambda x: x + 1, 1.0)).endswith("no jaxmoe op found")


def test_without_kernels_cuda_runs_pure_xla(monkeypatch):
    monkeypatch.setattr(_targets, "cuda_available", lambda: False)
    monkeypatch.setattr(_targets, "why_not", lambda: "left out")
    text = str(explain(layer, *LAYER))
    line = "  CUDA: pure XLA, the kernels are not loaded: left out"
    assert text.count(line) == 2  # route and the layer
    assert "FFI call" not in text and "scratch" not in text
    refused = explain(grouped_gemm, struct(4, 12), struct(2, 12, 16), struct(2, dtype=I32))
    reason = refused.ops[0].cuda_reason
    assert "shape[1]=12 must be" in reason
    assert str(refused).endswith(f"{line}\n    the kernels would refuse it: {reason}")
    with _targets.force_cuda_lowering():
        assert "  CUDA: FFI call jaxmoe_moe_mlp_v1\n" in str(explain(layer, *LAYER))


def test_refusals_say_why():
    with _targets.force_cuda_lowering():
        report = explain(grouped_gemm, struct(4, 12), struct(2, 12, 16), struct(2, dtype=I32))
    (op,) = report.ops
    assert op.cuda_target is None
    assert op.cuda_attrs == {} and op.cuda_scratch == ()
    reason = (
        "jaxmoe.grouped_gemm: lhs.shape[1]=12 must be a positive multiple of 8 on CUDA (rows of "
        "16-byte multiples); the nearest legal: 8 and 16. Got lhs: bf16[4,12]."
    )
    assert op.cuda_reason == reason
    assert f"CUDA: refused: {reason}" in str(report)


@pytest.mark.parametrize(
    ("num_experts", "options", "why"),
    (
        (8, {}, None),
        (1024, {"method": "softmax"}, None),
        (1025, {}, "the route kernel takes at most 1024 experts"),
        (512, {"method": "deepseek_v3", "num_groups": 8, "top_groups": 4, "scale": 2.0}, None),
    ),
)
def test_routing_that_is_left_to_xla(num_experts, options, why):
    fn = lambda a: route(a, top_k=2, **options)  # noqa: E731
    logits = struct(4, num_experts, dtype=F32)
    with _targets.force_cuda_lowering():
        report = explain(fn, logits)
        text = jax.jit(fn).trace(logits).lower(lowering_platforms=("cuda",)).as_text()
    (op,) = report.ops
    assert op.cuda_reason is None
    assert ("jaxmoe_route_v2" in text) == (why is None)
    if why is None:
        assert op.cuda_fallback is None and op.cuda_target == "jaxmoe_route_v2"
    else:
        assert op.cuda_target is None and why in op.cuda_fallback
        assert f"  CUDA: pure XLA: {op.cuda_fallback}" in str(report)


@pytest.mark.parametrize(
    "wrap, where",
    (
        (jax.jit, "jit"),
        (
            lambda f: lambda x, *a: jax.lax.scan(lambda x, _: (f(x, *a), None), x, length=3)[0],
            "scan",
        ),
        (lambda f: lambda x, *a: jax.lax.fori_loop(0, x.size, lambda _, x: f(x, *a), x), "scan"),
        (lambda f: lambda x, *a: jax.lax.cond(x[0, 0] > 0, f, lambda x, *a: x, x, *a), "cond"),
    ),
)
def test_ops_inside_other_programs_are_found(wrap, where):
    (found,) = [op for op in explain(wrap(layer), *LAYER).ops if op.op == "jaxmoe_moe_mlp"]
    assert where in found.where


def test_ops_under_checkpoint_are_found():
    """JAX names this primitive differently from version to version."""
    assert [op.op for op in explain(jax.checkpoint(layer), *LAYER).ops] == [
        "jaxmoe_route",
        "jaxmoe_moe_mlp",
    ]


def test_arrays_and_structs_give_the_same_report():
    arrays = [jnp.zeros(s.shape, s.dtype) for s in LAYER]
    assert explain(layer, *arrays) == explain(layer, *LAYER)


def test_it_says_what_is_lowered():
    routing = Routing(struct(16, 2, dtype=I32), struct(16, 2, dtype=F32))
    args = (LAYER[0], routing, *LAYER[2:])
    (op,) = explain(moe_mlp, *args).ops
    with _targets.force_cuda_lowering():
        text = jax.jit(moe_mlp).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert f"@{op.cuda_target}(" in text
    results = text.split(f"@{op.cuda_target}(")[1].split(" -> ")[1]
    for scratch in op.cuda_scratch:
        assert f"tensor<{'x'.join(map(str, scratch.shape))}x{scratch.dtype}>" in results
    for name, value in op.cuda_attrs["gemm1"].items():
        assert f"{name} = {value} : i64" in text


def test_on_a_gpu_it_names_the_call(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_targets, "cuda_available", lambda: True)
    assert explain(layer, *LAYER).ops[1].runs == "FFI call jaxmoe_moe_mlp_v1"
    refused = explain(grouped_gemm, struct(4, 12), struct(2, 12, 16), struct(2, dtype=I32))
    assert refused.ops[0].runs == "nothing: it is refused"
    monkeypatch.setattr(_targets, "cuda_available", lambda: False)
    assert explain(layer, *LAYER).ops[1].runs == "pure XLA"


def test_on_a_gpu_it_names_what_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_targets, "cuda_available", lambda: True)
    runs = [
        explain(lambda a: route(a, top_k=2), struct(4, num_experts, dtype=F32)).ops[0].runs
        for num_experts in (1024, 1025)
    ]
    assert runs == ["FFI call jaxmoe_route_v2", "pure XLA"]
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert explain(layer, *LAYER).ops[1].runs == "pure XLA"
