"""The ops outside of the layer, divided over Auto and Explicit mesh axes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import grouped_gemm, grouped_gemm_weight_grad
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import normal
from tests import layers
from tests.sharding_programs import (
    AUTO,
    EXPLICIT,
    check_spec,
    close,
    collectives,
    compiled,
    documented,
    entered,
    make_mesh,
    spec_text,
)

# w of [E,K,N], then lhs of [R,K] -> collectives, and how the result is split.
PRODUCTS = {
    "N": (P(None, None, "a"), P(), "none", P(None, "a")),
    "E": (P("a"), P(), "1 all-reduce", P()),
    "K": (P(None, "a"), P(None, "a"), "1 all-reduce", P()),
    "E, N": (P("a", None, "b"), P(), "1 all-reduce", P(None, "b")),
}


def product_arguments():
    rng = np.random.default_rng(1)
    arrays = {"lhs": normal(rng, (24, 8)), "rhs": normal(rng, (8, 8, 16))}
    return arrays | {"bias": normal(rng, (8, 16)), "sizes": jnp.array([3, 0, 5, 2, 4, 1, 6, 2])}


def product(a):
    return grouped_gemm(a["lhs"], a["rhs"], a["sizes"], bias=a["bias"])


@pytest.mark.parametrize(
    ("kind", "name"), [*((AUTO, name) for name in PRODUCTS), (EXPLICIT, "E, N"), (EXPLICIT, "K")]
)
def test_grouped_gemm(kind, name):
    rhs, lhs, wanted, out = PRODUCTS[name]
    specs = {"lhs": lhs, "rhs": rhs, "bias": P(rhs[0], *rhs[2:]), "sizes": P()}
    mesh = make_mesh(kind, *(("a", "b") if "b" in rhs else ("a",)))
    y, text = compiled(product, mesh, product_arguments(), specs)
    close(y, product(product_arguments()))
    assert collectives(text) == wanted
    check_spec(y, out)
    assert documented(name, spec_text(rhs), spec_text(lhs), spec_text(out), wanted)


# Format of both factors, kind of mesh, spec of the stored values [E,N,K] -> collectives.
QUANTIZED = (
    ("fp8_block", AUTO, P("a", None, "b"), "1 all-reduce"),
    ("fp8_channel", EXPLICIT, P("a", "b"), "1 all-reduce"),
    ("fp8_tensor", AUTO, P(None, None, "b"), "1 all-reduce"),
    ("fp8_block", AUTO, P("a", "b"), None),  # no block is divided: its values are gathered
)


@pytest.mark.parametrize("format, kind, spec, wanted", QUANTIZED)
def test_quantized_grouped_gemm(format, kind, spec, wanted):
    """Scales lie with their values, and the bias is added once."""
    rng = np.random.default_rng(9)
    x, w = normal(rng, (24, 256)), normal(rng, (8, 256, 16))
    arrays = {
        "x": jaxmoe.quantize_tokens(x, format),
        "w": jaxmoe.quantize(w, format, weight_layout="kn"),
        "bias": normal(rng, (8, 16), scale=10),
        "sizes": product_arguments()["sizes"],
    }

    def fn(a):
        return grouped_gemm(a["x"], a["w"], a["sizes"], bias=a["bias"])

    axes = (*spec, None, None)[:3]
    in_format = {
        "fp8_block": (axes[0], None, axes[2]),
        "fp8_channel": axes[:2],
        "fp8_tensor": axes[:1],
    }
    specs = {n: P() for n in arrays}
    specs["w"] = dataclasses.replace(arrays["w"], values=spec, scales=P(*in_format[format]))
    specs["x"] = dataclasses.replace(arrays["x"], values=P(), scales=P())
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    with entered(mesh):
        put = jax.tree.map(
            lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s)), arrays, specs
        )
        program = jax.jit(fn).lower(put).compile()
        y = program(put)
    close(y, jax.jit(fn)(arrays))
    assert wanted is None or collectives(program.as_text()) == wanted


def test_a_step_of_training_of_grouped_gemm():
    """The gradient of weights split over experts is computed where they are."""

    def step(a):
        loss = lambda w, x: jnp.sum(product(a | {"rhs": w, "lhs": x}) ** 2)  # noqa: E731
        dw, dx = jax.grad(loss, (0, 1))(a["rhs"], a["lhs"])
        return a["rhs"] - 0.1 * dw, dx

    specs = {"lhs": P(), "rhs": P("a"), "bias": P(), "sizes": P()}
    (w, dx), text = compiled(step, make_mesh(AUTO, "a"), product_arguments(), specs)
    close((w, dx), step(product_arguments()))
    assert collectives(text) == "2 all-reduce"
    assert "f32[8,8,16]" not in text  # all of it
    check_spec(w, P("a"))


# lhs of [R,K], dy of [R,N] and accumulate_into of [E,K,N] -> collectives; split like the last one.
WEIGHT_GRADIENTS = {
    "K": (P(None, "a"), P(), P(None, "a"), "none"),
    "N": (P(), P(None, "a"), P(None, None, "a"), "none"),
    "E": (P(), P(), P("a"), "none"),
    "E, N": (P(), P(None, "b"), P("a", None, "b"), "none"),
    "E, lhs by columns": (P(None, "a"), P(), P("a"), "1 all-gather"),
}


def gradient_arguments():
    arrays, rng = product_arguments(), np.random.default_rng(4)
    shared = {"lhs": arrays["lhs"], "into": arrays["rhs"], "sizes": arrays["sizes"]}
    return shared | {"dy": normal(rng, (24, 16))}


def weight_gradient(a):
    return grouped_gemm_weight_grad(a["lhs"], a["dy"], a["sizes"], accumulate_into=a["into"])


@functools.cache
def expected_weight_gradient():
    return weight_gradient(gradient_arguments())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (EXPLICIT, "K"),
        (AUTO, "N"),
        (AUTO, "E"),
        (EXPLICIT, "E, N"),
        (EXPLICIT, "E, lhs by columns"),
    ],
)
def test_weight_gradient(kind, name):
    """What is added to stays where it is, and so is the result."""
    lhs, dy, into, wanted = WEIGHT_GRADIENTS[name]
    mesh = make_mesh(kind, *(("a", "b") if "b" in into else ("a",)))
    specs = {"lhs": lhs, "dy": dy, "into": into, "sizes": P()}
    dw, text = compiled(weight_gradient, mesh, gradient_arguments(), specs)
    close(dw, expected_weight_gradient())
    assert collectives(text) == wanted
    check_spec(dw, into)
    assert documented(name, *map(spec_text, (lhs, dy, into)), wanted)


def test_derivatives_of_a_weight_gradient():
    """Each device has a part of the cotangents of the rows, which are added up."""

    def gradients(a):
        loss = lambda *args: jnp.sum(  # noqa: E731
            jnp.sin(weight_gradient(dict(zip(names, args, strict=True)) | {"sizes": a["sizes"]}))
        )
        return jax.grad(loss, (0, 1, 2))(*(a[n] for n in names))

    names = ("lhs", "dy", "into")
    specs = {"lhs": P(), "dy": P(), "into": P("a"), "sizes": P()}
    got, text = compiled(gradients, make_mesh(EXPLICIT, "a"), gradient_arguments(), specs)
    close(got, jax.jit(gradients)(gradient_arguments()))
    assert collectives(text) == "1 all-reduce"
    check_spec(got[2], P("a"))


def test_weight_gradients_of_examples_are_divided_as_they_are_wanted():
    """Examples of a vmap, whose factors every device has."""

    def fn(a):
        one = lambda lhs, dy: grouped_gemm_weight_grad(lhs, dy, a["sizes"])  # noqa: E731
        dw = jax.vmap(one)(a["lhs"], a["dy"])
        return jax.lax.with_sharding_constraint(dw, NamedSharding(mesh, P("a")))

    rng, mesh = np.random.default_rng(6), make_mesh(AUTO, "a")
    arrays = {"lhs": normal(rng, (4, 24, 8)), "dy": normal(rng, (4, 24, 16))}
    arrays["sizes"] = gradient_arguments()["sizes"]
    dw, text = compiled(fn, mesh, arrays, dict.fromkeys(arrays, P()))
    close(dw, fn(arrays))
    assert collectives(text) == "none"
    assert "f32[4,8,8,16]" not in text  # all of it


def test_no_rows_on_a_mesh():
    """They stay out of what XLA divides, which has what is added to alone."""
    arrays = {n: a[:0] if n in ("lhs", "dy") else a for n, a in gradient_arguments().items()}
    specs = dict.fromkeys(arrays, P()) | {"into": P("a")}
    dw, text = compiled(weight_gradient, make_mesh(AUTO, "a"), arrays, specs)
    close(dw, arrays["into"])
    assert collectives(text) == "none"


def test_rows_of_a_weight_gradient_are_of_one_device():
    message = (
        "jaxmoe.grouped_gemm_weight_grad: lhs or dy must not be split along its rows over Explicit "
        "mesh axes (a), because their groups are those of all."
    )
    mesh = make_mesh(EXPLICIT, "a")
    with jax.set_mesh(mesh):
        rows = jax.device_put(gradient_arguments()["dy"], NamedSharding(mesh, P("a")))
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            weight_gradient(gradient_arguments() | {"dy": rows})


def test_examples_over_explicit_axes():
    """Each device batches its own examples, whether they become one call or one after another."""

    def one(x, ids, weights, w):
        plan = jaxmoe.plan(ids, 8)
        rows = jaxmoe.permute(x, plan)
        y = jaxmoe.finalize(grouped_gemm(rows, w, plan.group_sizes), plan, weights)
        shared = jaxmoe.quantize(w, "fp8_tensor", weight_layout="kn")
        q = jaxmoe.quantize_tokens(x, "fp8_tensor")
        tail = grouped_gemm(q, shared, jnp.full((8,), 1), preferred_element_type=jnp.float32)
        return y, tail, grouped_gemm_weight_grad(rows, rows, plan.group_sizes)

    def fn(a):
        return jax.vmap(one, (0, 0, 0, None))(a["x"], a["ids"], a["weights"], a["w"])

    rng = np.random.default_rng(5)
    arrays = {"x": normal(rng, (4, 12, 8)), "w": normal(rng, (8, 8, 16))}
    arrays["ids"] = jnp.asarray(rng.integers(0, 8, (4, 12, 1)), jnp.int32)
    arrays["weights"] = normal(rng, (4, 12, 1))
    specs = {n: P() if n == "w" else P("a") for n in arrays}
    got, text = compiled(fn, make_mesh(EXPLICIT, "a"), arrays, specs)
    close(got, jax.jit(fn)(arrays))
    assert collectives(text) == "none"
    check_spec(got[1], P("a"))


def test_no_cuda_call_is_left_for_xla_to_gather_its_operands():
    """On Auto axes every op is divided by a rule of its own, or made of ops that are."""

    def loss(w1, w2, a):
        routing = jaxmoe.Routing(a["ids"], jnp.ones((24, 2)))
        out = layers.moe_mlp(a["x"], routing, w1, w2, do_finalize=False, master_weights=True)
        sizes, rows = jnp.full((8,), 6), jax.lax.stop_gradient(out.rows)
        added = grouped_gemm_weight_grad(rows, rows, sizes, accumulate_into=w1)
        apart = added, jaxmoe.quantize_tokens(rows, "fp8_channel")
        return jnp.sum(out.rows.astype(jnp.float32)), apart

    shapes = {"x": ((24, 16), "bfloat16", P()), "ids": ((24, 2), "int32", P())}
    weights = [((8, 16, 16), "float32", P("a")), ((8, 8, 16), "float32", P("a"))]
    mesh = make_mesh(AUTO, "a")
    struct = lambda shape, dtype, spec: jax.ShapeDtypeStruct(  # noqa: E731
        shape, dtype, sharding=NamedSharding(mesh, spec)
    )
    args = (*(struct(*w) for w in weights), {n: struct(*s) for n, s in shapes.items()})
    with entered(mesh), _targets.force_cuda_lowering():
        traced = jax.jit(jax.grad(loss, (0, 1), has_aux=True)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "CustomSPMDPartitioning" in text and "@jaxmoe_" not in text


def test_other_ops():
    """Tokens of `route`, and H of `permute` and `finalize`, are split for nothing."""

    def fn(a):
        routing = jaxmoe.route(a["logits"], top_k=2)
        plan = jaxmoe.plan(a["ids"], 8)
        rows = jaxmoe.permute(a["x"], plan)
        return routing, jaxmoe.finalize(rows, plan, a["weights"], residual=a["x"])

    rng = np.random.default_rng(2)
    routing = jaxmoe.route(normal(rng, (24, 8)), top_k=2)
    arrays = {"logits": normal(rng, (24, 8)), "x": normal(rng, (24, 16))}
    arrays |= {"ids": routing.expert_ids, "weights": routing.weights}
    specs = {"logits": P("a"), "x": P(None, "a"), "ids": P(), "weights": P()}
    (chosen, y), text = compiled(fn, make_mesh(AUTO, "a"), arrays, specs)
    close((chosen, y), fn(arrays))
    assert collectives(text) == "none"
    check_spec(chosen.expert_ids, P("a"))
    check_spec(y, P(None, "a"))


def test_shared_experts_of_tokens_over_explicit_axes():
    def fn(a):
        return jaxmoe.route(a["logits"], top_k=2, num_shared_experts=2)

    arrays = {"logits": normal(np.random.default_rng(3), (24, 8))}
    routing, text = compiled(fn, make_mesh(EXPLICIT, "a"), arrays, {"logits": P("a")})
    close(routing, fn(arrays))
    assert collectives(text) == "none"
    check_spec(routing.weights, P("a"))


def test_only_programs_for_several_devices_are_partitioned():
    """On one device, and inside shard_map, a program is the op alone."""
    marker = "CustomSPMDPartitioning"
    arrays, fn = product_arguments(), jax.jit(product)
    assert marker not in fn.lower(arrays).as_text()
    mesh = make_mesh(AUTO, "a")
    rows = {"lhs": P("a"), "rhs": P(), "bias": P(), "sizes": P()}
    specs = {n: NamedSharding(mesh, spec) for n, spec in rows.items()}
    assert marker in jax.jit(product, in_shardings=(specs,)).lower(arrays).as_text()
    mapped = jax.shard_map(product, mesh=mesh, in_specs=(rows,), out_specs=P("a"))
    assert marker not in jax.jit(mapped).lower(arrays).as_text()


def test_shared_weights_under_vmap_of_split_examples():
    """Their gradient is the sum over the devices, which have examples each."""

    def gradient(a):
        def loss(w):
            y = jax.vmap(lambda x, sizes: grouped_gemm(x, w, sizes))(a["lhs"], a["sizes"])
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(a["rhs"])

    rng = np.random.default_rng(8)
    arrays = {"lhs": normal(rng, (4, 6, 8)), "rhs": normal(rng, (2, 8, 16))}
    arrays["sizes"] = jnp.array([[1, 5], [6, 0], [2, 3], [0, 6]], jnp.int32)
    specs = {"lhs": P("a"), "sizes": P("a"), "rhs": P()}
    dw, text = compiled(gradient, make_mesh(AUTO, "a"), arrays, specs)
    close(dw, jax.jit(gradient)(arrays))
    assert collectives(text) == "1 all-reduce"


def test_products_over_a_part_of_k_have_tiles_of_their_own():
    """On each device, as the tile that was asked for is one for all of K."""
    asked = jaxmoe.GemmConfig(128, 32, raster=5)

    def rasters(lhs, rhs):
        mesh = make_mesh(EXPLICIT, "a")
        put = lambda shape, spec: jax.ShapeDtypeStruct(  # noqa: E731
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        )
        sizes = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(mesh, P()))
        with entered(mesh):
            args = put((24, 64), lhs), put((8, 64, 32), rhs), sizes
            call = functools.partial(grouped_gemm, config=asked)
            return [op.cuda_attrs["config"]["raster"] for op in jaxmoe.explain(call, *args).ops]

    assert rasters(P(), P(None, None, "a")) == [5]
    assert rasters(P(None, "a"), P(None, "a")) == [1]


def test_quantize_where_xla_divides_the_rest_of_a_mesh():
    """Inside shard_map over one of two axes: for a call XLA would gather over the other."""
    mesh = make_mesh(AUTO, "a", "b")
    split = jax.shard_map(
        lambda x: jaxmoe.quantize_tokens(x, "fp8_channel").values,
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
        axis_names={"a"},
    )
    whole = jax.shard_map(
        lambda x: jaxmoe.quantize_tokens(x, "fp8_channel").values,
        mesh=mesh,
        in_specs=P(("a", "b")),
        out_specs=P(("a", "b")),
    )
    x = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16, sharding=NamedSharding(mesh, P("a", "b")))
    with _targets.force_cuda_lowering():
        texts = [
            jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
            for f in (split, whole)
        ]
    assert ["@jaxmoe_quantize" in text for text in texts] == [False, True]
