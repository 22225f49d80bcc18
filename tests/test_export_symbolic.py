"""jax.export of a symbolic number of tokens: one program for any, with the bits of each."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe._export import export_checks
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import FP8
from jaxmoe.plan import plan_scratch_size

E, H, WIDTH, K = 8, 16, 16, 2


def drawn(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@functools.cache
def experts(form="plain"):
    with jax.ensure_compile_time_eval():  # arrays, also if first asked for while tracing
        return made(form)


def made(form):
    w = {"gate_up": drawn((E, H, 2 * WIDTH), 1), "down": drawn((E, WIDTH, H), 2)}
    if form == "master":
        w = {n: a.astype(jnp.float32) for n, a in w.items()}
        return jaxmoe.Experts(**w, dtype=jnp.bfloat16)
    if form == "forward":
        return jaxmoe.Experts(**w, forward_format="fp8_channel")
    if form != "plain":
        w = {n: jaxmoe.quantize(a, form, weight_layout="kn") for n, a in w.items()}
    layout = "kn" if form == "plain" else w["down"].layout
    return jaxmoe.Experts(**w, layout=layout)


def route(x, **options):
    return jaxmoe.route(x[:, :E], top_k=K, **options)


def planned(x):
    return jaxmoe.plan(route(x).expert_ids, E)


def back_and_forth(x):
    order = planned(x)
    return jaxmoe.finalize(jaxmoe.permute(x, order), order, route(x).weights, residual=x)


def groups():
    return jnp.array([1, 0, 2, 0, 90, 1, 0, 1], jnp.int32)


def layer(x, form="plain", **options):
    return jaxmoe.moe_mlp(x, route(x), experts(form), **options)


def gradients(x, form="plain"):
    def loss(x, experts):
        return jnp.sum(jaxmoe.moe_mlp(x, route(x), experts).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1))(x, experts(form))


def batches(x, name="plain"):
    return jaxmoe.expert_batches(jnp.stack([x * i for i in range(E)]), groups(), experts(name))


def losses(x):
    scores, ids = jax.nn.softmax(x[:, :E].astype(jnp.float32)), route(x).expert_ids
    loss = jaxmoe.load_balancing_loss(scores, ids)
    return loss, jaxmoe.router_z_loss(x), jaxmoe.expert_load(ids, E)


def deepseek(x):
    return route(x, method="deepseek_v3", num_groups=4, top_groups=2, num_valid_tokens=jnp.int32(3))


def masked(x):
    scale = jnp.float32(2) + x[:1, 0].astype(jnp.float32).sum()
    return route(x, mask=x[:, 0] > 0, scale=scale, num_shared_experts=1, return_scores=True)


# What is exported, and the CUDA calls of the program.
PROGRAMS = {
    "route": (route, {"route"}),
    "deepseek": (deepseek, {"route"}),
    "masked": (masked, {"route"}),
    "plan": (planned, {"route", "plan"}),
    "route_and_plan": (lambda x: jaxmoe.route_and_plan(x[:, :E], top_k=K), {"route_plan"}),
    "back_and_forth": (back_and_forth, {"route", "plan", "permute", "finalize"}),
    "grouped_gemm": (
        lambda x: jaxmoe.grouped_gemm(x, experts().gate_up, groups()),
        {"grouped_gemm"},
    ),
    "weight_grad": (lambda x: jaxmoe.grouped_gemm_weight_grad(x, x, groups()), {"weight_grad"}),
    "layer": (lambda x: layer(x, residual=x), {"route", "moe_mlp"}),
    "whole_k": (lambda x: layer(x, batch_invariant=True), {"route", "moe_mlp"}),
    "rows": (lambda x: jaxmoe.expert_rows(x, route(x), experts()), {"route", "moe_mlp"}),
    "batches": (batches, {"grouped_gemm"}),
    "master": (lambda x: layer(x, "master"), {"route", "moe_mlp"}),
    "forward": (lambda x: layer(x, "forward"), {"route", "moe_mlp", "quantize"}),
    "gradients": (
        gradients,
        {"route", "plan", "permute", "finalize", "grouped_gemm", "weight_grad"},
    ),
    "losses": (losses, {"route"}),
} | {
    f"{kind}_{name}": (functools.partial(fn, name=name), calls)
    for kind, fn, names, calls in (
        ("quantize", lambda x, name: jaxmoe.quantize_tokens(x, name), FP8, {"quantize"}),
        (
            "layer",
            lambda x, name: layer(x, name),
            ("fp8_tensor", "fp8_block"),
            {"route", "moe_mlp"},
        ),
        (
            "batches",
            lambda x, name: batches(x, name),
            ("fp8_tensor",),
            {"quantize", "grouped_gemm"},
        ),
        (
            "product",
            lambda x, name: jaxmoe.grouped_gemm(x, experts(name).gate_up, groups()),
            ("fp8_channel",),
            {"quantize", "grouped_gemm"},
        ),
    )
    for name in names
}


# Whose ops are not all among the others: these are run without tokens too.
WITHOUT_TOKENS = (
    *("plan", "route_and_plan", "back_and_forth", "grouped_gemm", "weight_grad"),
    *("layer", "gradients", "losses", *(f"quantize_{name}" for name in FP8), "layer_fp8_tensor"),
)
LARGE = ("layer", "grouped_gemm", "weight_grad")  # whose blocks on the CPU are as many rows


def exported(fn, size, platforms):
    (tokens,) = jax.export.symbolic_shape(size)
    x = jax.ShapeDtypeStruct((tokens, H), jnp.bfloat16)
    checks = export_checks()
    return jax.export.export(jax.jit(fn), platforms=platforms, disabled_checks=checks)(x)


# "plan" begins with "route", and on a CPU "whole_k" is "layer".
# "layer_fp8_block" is "quantize_fp8_block" and the products of "layer_fp8_tensor".
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"route", "whole_k", "layer_fp8_block"}))
def test_bits_of_every_number_of_tokens(name):
    """Saved and loaded; a symbol alone is at least 1, so "t - 1" is what may be no token."""
    fn, _ = PROGRAMS[name]
    few = (0, 1, 7) if name == "plan" else (0, 7)
    few = few if name in WITHOUT_TOKENS else few[1:]
    sizes = {"t - 1": few} | ({"t": (300,)} if name in LARGE else {})
    sizes |= {"2*t": (8,)} if name == "layer" else {}
    for size, counts in sizes.items():
        program = exported(fn, size, ["cpu"])
        program = jax.export.deserialize(program.serialize()) if name == "layer" else program
        for count in counts:
            x = drawn((count, H), count)
            got, want = program.call(x), jax.jit(fn)(x)
            assert [a.shape for a in jax.tree.leaves(got)] == [
                a.shape for a in jax.tree.leaves(want)
            ]
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", PROGRAMS)
def test_cuda_calls(name):
    fn, calls = PROGRAMS[name]
    with _targets.force_cuda_lowering():
        platforms = ["cpu", "cuda"] if name == "layer" else ["cuda"]
        text = exported(fn, "t", platforms).mlir_module()
    assert {re.sub(r"_v\d+$", "", c) for c in re.findall(r"@jaxmoe_(\w+)\(", text)} == calls


def test_the_tile_is_one_for_any_number_of_tokens():
    with _targets.force_cuda_lowering():
        text = exported(layer, "t", ["cuda"]).mlir_module()
    tiles = re.findall(r"token_tile = (\d+) : i64, weight_tile = (\d+)", text)
    assert tiles == [("160", "256")] * 2


def test_a_symbolic_batch_of_a_vmap():
    program = exported(lambda x: jax.vmap(layer)(x.reshape(-1, 4, H)), "4*t", ["cpu"])
    x = drawn((12, H), 0)
    want = jax.vmap(layer)(x.reshape(3, 4, H))
    assert np.asarray(program.call(x)).tobytes() == np.asarray(want).tobytes()


SIZES = (0, 1, 15, 100, 8192, 8193, 32768, 262144, 262145, 2**20 + 1, 2**28)


def of_symbol(size_of):
    """What an expression of a symbolic size is, once the size is known."""
    (rows,) = jax.export.symbolic_shape("r")
    shape = jax.ShapeDtypeStruct((rows,), jnp.int8)
    with jax.enable_x64():
        program = jax.export.export(jax.jit(lambda a: jnp.asarray(size_of(a.shape[0] - 1), int)))(
            shape
        )
        return lambda size: int(program.call(np.zeros(size + 1, np.int8)))


@pytest.mark.parametrize("local_experts", [8, 2048])
def test_scratch_of_a_plan(local_experts):
    symbolic = of_symbol(lambda rows: plan_scratch_size(3, rows, local_experts))
    for rows in SIZES[:-1]:
        assert symbolic(rows) == plan_scratch_size(3, rows, local_experts)
