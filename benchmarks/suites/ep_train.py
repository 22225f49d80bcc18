"""Suite `ep_train`: forward and backward of the layer over all devices, T tokens on each of them.

Each way to spread it, and what a device computes of it without any communication. One call gives y
and the gradients of x, the routing weights and the layer's weights for a given cotangent of y, as
in suite `train`; layers follow each other as in suite `ep`, through a zero made of all of these.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines.collectives import AXIS
from benchmarks.cases import Case, Routed, tokens, turned
from benchmarks.suites import ep, spread, train
from benchmarks.suites.entry import Entry, chain_length
from benchmarks.suites.spread import Spread, put
from jaxmoe import expert_parallel
from jaxmoe._ep.cost import DISPATCHES

DEFAULT_MODELS = ep.DEFAULT_MODELS
DEFAULT_TOKENS = (1024, 4096)
VARIANTS = {v.name: v for d in DISPATCHES for v in [ep.Variant(d, 1)]}
_MOST_LAYERS = 4


def entries(case: Case) -> list[Entry]:
    """Returns the ways to spread one forward and backward pass."""
    if why := spread.refused(case, "moe_mlp", ep.LOCAL):
        return why
    whole = Spread.of(case)
    return [_entry(whole, impl) for impl in (*VARIANTS, ep.LOCAL)]


@functools.cache
def _layer(impl: str) -> Any:
    if impl == ep.LOCAL:

        def local(x: jax.Array, routing: jaxmoe.Routing, w: jaxmoe.Experts) -> Any:
            return jaxmoe.moe_mlp(x, routing, w, expert_map=spread.own_map(w))

        return local
    dispatch = VARIANTS[impl].dispatch
    return functools.partial(expert_parallel.moe_mlp, axis_name=AXIS, dispatch=dispatch)


@functools.cache
def _training(impl: str) -> Any:
    layer = _layer(impl)

    def call(x: jax.Array, r: Routed, w: jaxmoe.Experts, ct: jax.Array) -> Any:
        def of(x: jax.Array, weights: jax.Array, w: jaxmoe.Experts) -> jax.Array:
            return layer(x, jaxmoe.Routing(r.expert_ids, weights), w)

        y, pull = jax.vjp(of, x, r.weights, w)
        return y, *pull(ct)

    return call


def _specs(impl: str) -> Any:
    """Of tokens and what belongs to them: a device alone has those of all."""
    return P() if impl == ep.LOCAL else P(AXIS)


@functools.cache
def _step(impl: str) -> Any:
    def step(given: Any, item: Any, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
        (many, ct), (r, layer) = given, item
        if impl == ep.LOCAL:
            x, r = many, r._replace(weights=r.weights + spread.zero(y))
        else:
            x = spread.half(many, layer, y)
        made = _training(impl)(x, r, w, ct)
        return sum(spread.zero(a) for a in jax.tree.leaves(made))[None]  # pyright: ignore[reportIndexIssue]

    per_token = _specs(impl)
    return spread.split(step, (per_token, (per_token, P()), P(AXIS), P(AXIS)))


def _cotangent(whole: Spread) -> jax.Array:
    return tokens(jax.random.key(whole.case.seed + 1), *whole.wide.fresh[0].shape)


def _entry(whole: Spread, impl: str) -> Entry:
    case, wide, per_token = whole.case, whole.wide, _specs(impl)
    work = whole.part(bounds.training(case.model, wide.num_tokens, wide.even_hit))
    layers = min(chain_length(work, times_floor=1.5), _MOST_LAYERS)
    dispatch = VARIANTS[impl].dispatch if impl in VARIANTS else None

    def make(count: int) -> chain.Chain:
        many = whole.tokens()
        many = many[: wide.num_tokens] if impl == ep.LOCAL else many
        given = put((many, _cotangent(whole)), per_token)
        inputs = given, spread.items(wide.routings(count), per_token), tuple(whole.nk)
        state = put(jnp.zeros(whole.count), P(AXIS))
        return chain.Chain(spread.program(_step(impl)), state, inputs, count)

    def check() -> float:
        x, r = wide.fresh
        given = put((x, r, _cotangent(whole)), per_token)
        call = jax.jit(_whole_results(impl))
        y, dx, dweights, dw = call(given[0], given[1], whole.nk[0], given[2])
        if impl == ep.LOCAL:  # each device's part of every token
            parts = [a.reshape(whole.count, wide.num_tokens, -1) for a in (y, dx, dweights)]
            y, dx, dweights = (a.astype(jnp.float32).sum(0).astype(a.dtype) for a in parts)
        y, dx, dweights, dw = jax.device_put((y, dx, dweights, dw), jax.devices()[0])
        return train.error(wide, (y, dx, dweights, turned(dw)), _cotangent(whole))

    return Entry(
        "moe_mlp",
        impl,
        work,
        wide.hit(layers),
        layers,
        make,
        check,
        refusal=whole.no_memory if dispatch == "direct" else None,
        weight_sets=len(case.sets),
        pass_=train.PASS,
        sent_bytes=2.0 * whole.sent(dispatch) if dispatch else None,
        devices=whole.count,
    )


def _whole_results(impl: str) -> Any:
    per_token = _specs(impl)
    return spread.split(_training(impl), (per_token, per_token, P(AXIS), per_token))
