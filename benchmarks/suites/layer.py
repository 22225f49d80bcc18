"""Suite `layer`: the whole MoE layer, with and without the router, against what else JAX offers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines import composed, dense, tokamax_gmm, xla_ragged_dot
from benchmarks.cases import SCHEME, Case, Routed
from benchmarks.suites.entry import Entry, chain_length

KN = "jaxmoe[kn]"
Step = Callable[..., jax.Array]
Tiles = tuple[jaxmoe.GemmConfig | None, jaxmoe.GemmConfig | None]  # gate-up and down
MOST_LAYERS = 16  # of a layer made of many XLA ops, whose compilation takes long


def moe_mlp(x: Any, r: Routed, w: jaxmoe.Experts, residual: Any, **options: Any) -> jax.Array:
    """Runs jaxmoe's layer with the routing given as data."""
    routing = jaxmoe.Routing(r.expert_ids, r.weights)
    return jaxmoe.moe_mlp(x, routing, w, residual=residual, **options)


def routed_moe_mlp(x: Any, r: Routed, w: jaxmoe.Experts, residual: Any, *, top_k: int) -> jax.Array:
    """Runs jaxmoe's router on given logits, then its layer."""
    routing = jaxmoe.route(r.logits, top_k=top_k)
    return jaxmoe.moe_mlp(x, routing, w, residual=residual)


@functools.cache  # equal steps share executables
def step(layer: Step, **options: Any) -> Step:
    """Returns `layer` with its options: (x, routing, experts, residual) -> y."""
    return functools.partial(layer, **options)


def even_work(case: Case, scheme: str = SCHEME) -> bounds.Work:
    """Returns the work of a layer with the experts that even routing hits."""
    return bounds.layer(case.model, case.num_tokens, case.even_hit, scheme)


def layer_entry(
    case: Case,
    op: str,
    impl: str,
    one: Step,
    *,
    layers: int | None = None,
    sets: Callable[[], Sequence[Any]] | None = None,
    scheme: str = SCHEME,
    error: Callable[[jax.Array], float] | None = None,
) -> Entry:
    """Returns a chain of whole layers.

    Args:
      one: a layer as `step` returns it.
      layers: length of the chain; by default what `chain_length` says.
      sets: draws the weights to cycle through; by default the case's in checkpoint order.
      scheme: what the layer multiplies.
      error: of an output for `case.fresh` with the first weights; by default against the case's.
    """
    longest = chain_length(even_work(case, scheme), scheme=scheme)
    layers = longest if layers is None else layers
    # Experts hit vary from layer to layer; the mean over the longest chain stands for all.
    hit = case.hit(max(layers, longest))
    weights = sets or (lambda: case.sets.nk)

    def make(count: int) -> chain.Chain:
        residual = jnp.array(case.x, copy=True)
        return chain.dependent(one, residual, case.x, case.routings(count), weights())

    def check() -> float:
        x, r = case.fresh
        y = chain.single(one)(x, r, weights()[0], jnp.zeros_like(x))
        return (error or case.layer_error)(y)

    work = bounds.layer(case.model, case.num_tokens, hit, scheme)
    held = len(case.sets)
    return Entry(op, impl, work, hit, layers, make, check, weight_sets=held, scheme=scheme)


def entries(case: Case) -> list[Entry]:
    """Returns the implementations of the layer for one case."""
    model, even = case.model, even_work(case)

    def entry(op: str, impl: str, one: Step) -> Entry:
        kn = None if impl == "jaxmoe" else lambda: case.sets
        return layer_entry(case, op, impl, one, sets=kn)

    def peer(impl: str, product: Any, times_floor: float, refusal: str | None) -> Entry:
        layers = min(chain_length(even, times_floor=times_floor), MOST_LAYERS)
        one = step(composed.layer, product=product)
        return dataclasses.replace(entry("moe_mlp", impl, one), layers=layers, refusal=refusal)

    ours = entry("moe_mlp", "jaxmoe", step(moe_mlp))
    slow, width = xla_ragged_dot, max(model.hidden, model.intermediate)
    slower = slow.times_floor(even, model.num_experts)
    too_slow = slow.refusal(ours.work.flops, model.num_experts, case.num_rows, width)
    out = [
        ours,
        entry("moe_mlp", KN, step(moe_mlp)),
        entry("route+moe_mlp", "jaxmoe", step(routed_moe_mlp, top_k=model.top_k)),
        peer(slow.NAME, slow.product, slower, too_slow),
        peer(tokamax_gmm.NAME, tokamax_gmm.product, 2.0, tokamax_gmm.refusal()),
    ]
    if ours.work.compute_heavy(case.ceiling):
        make = functools.partial(dense.layers, model, case.num_rows, seed=case.seed)
        out.append(Entry("moe_mlp", dense.NAME, ours.work, None, ours.layers, make, None))
    return out
