"""The ops outside of the layer, divided over Auto and Explicit mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import grouped_gemm
from jaxmoe._testing import normal
from tests.sharding_programs import (
    AUTO,
    EXPLICIT,
    check_spec,
    close,
    collectives,
    compiled,
    documented,
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
    check_spec(w, P("a"))


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
