"""Suite `layer`: the whole MoE layer, with and without the router, against what else JAX offers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines import composed, dense, tokamax_gmm, xla_ragged_dot
from benchmarks.cases import Case, Routed, Weights
from benchmarks.models import Layer
from benchmarks.suites.entry import Entry, chain_length

KN = "jaxmoe[kn]"
_MOST_LAYERS = 16  # of a layer made of many XLA ops, whose compilation takes long


def moe_mlp(model: Layer, x: Any, r: Routed, w: Weights, residual: Any) -> jax.Array:
    """Runs jaxmoe's layer with the routing given as data, weights in checkpoint order."""
    return _call(model, x, jaxmoe.Routing(r.expert_ids, r.weights), w, residual, "nk")


def moe_mlp_kn(model: Layer, x: Any, r: Routed, w: Weights, residual: Any) -> jax.Array:
    """Runs the same with the contraction first in the weights, as `ragged_dot` has it."""
    return _call(model, x, jaxmoe.Routing(r.expert_ids, r.weights), w, residual, "kn")


def routed_moe_mlp(model: Layer, x: Any, r: Routed, w: Weights, residual: Any) -> jax.Array:
    """Runs jaxmoe's router on given logits, then its layer."""
    routing = jaxmoe.route(r.logits, top_k=model.top_k)
    return _call(model, x, routing, w, residual, "nk")


def _call(
    model: Layer, x: Any, routing: Any, w: Weights, residual: Any, weight_layout: str
) -> jax.Array:
    return jaxmoe.moe_mlp(
        x,
        routing,
        w.w_gate_up,
        w.w_down,
        activation=model.activation,
        b_gate_up=w.b_gate_up,
        b_down=w.b_down,
        gate_up=model.gate_up,
        weight_layout=weight_layout,
        residual=residual,
    )


def _ragged_dot(model: Layer, x: Any, r: Routed, w: Weights, y: Any) -> jax.Array:
    return composed.layer(xla_ragged_dot.product, model, x, r.expert_ids, r.weights, w, y)


def _tokamax(model: Layer, x: Any, r: Routed, w: Weights, y: Any) -> jax.Array:
    return composed.layer(tokamax_gmm.product, model, x, r.expert_ids, r.weights, w, y)


@functools.cache
def _step(layer: Callable[..., jax.Array], model: Layer) -> Callable[..., jax.Array]:
    return functools.partial(layer, model)


def entries(case: Case) -> list[Entry]:
    """Returns the implementations of the layer for one case."""
    model, num_rows = case.model, case.num_rows
    # Experts hit vary from layer to layer; the mean over the longest chain stands for all.
    even = bounds.layer(model, case.num_tokens, case.even_hit)
    hit = case.hit(chain_length(even))
    work = bounds.layer(model, case.num_tokens, hit)

    def entry(
        op: str, impl: str, layer: Any, times_floor: float = 1.0, refusal: str | None = None
    ) -> Entry:
        step = _step(layer, model)

        def sets() -> list[Weights]:
            return case.sets.nk if impl == "jaxmoe" else case.sets

        def make(count: int) -> chain.Chain:
            residual = jnp.array(case.x, copy=True)
            return chain.dependent(step, residual, case.x, case.routings(count), sets())

        def check() -> float:
            x, r = case.fresh
            y = chain.single(step)(x, r, sets()[0], jnp.zeros_like(x))
            return case.layer_error(y)

        layers = chain_length(even, times_floor=times_floor)
        if not impl.startswith("jaxmoe"):
            layers = min(layers, _MOST_LAYERS)
        return Entry(op, impl, work, hit, layers, make, check, refusal, len(case.sets))

    slow, width = xla_ragged_dot, max(model.hidden, model.intermediate)
    slower = slow.times_floor(even, model.num_experts)
    too_slow = slow.refusal(work.flops, model.num_experts, num_rows, width)
    out = [
        entry("moe_mlp", "jaxmoe", moe_mlp),
        entry("moe_mlp", KN, moe_mlp_kn),
        entry("route+moe_mlp", "jaxmoe", routed_moe_mlp),
        entry("moe_mlp", slow.NAME, _ragged_dot, slower, too_slow),
        entry("moe_mlp", tokamax_gmm.NAME, _tokamax, 2.0, tokamax_gmm.refusal()),
    ]
    if work.compute_heavy(case.ceiling):
        make = functools.partial(dense.layers, model, num_rows, seed=case.seed)
        out.append(Entry("moe_mlp", dense.NAME, work, None, chain_length(even), make, None))
    return out
