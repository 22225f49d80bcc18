"""Suite `ep`: the layer with its experts spread over all devices, T tokens on each of them.

`moe_mlp` is the whole layer in each dispatch mode, what one device computes of it without any
communication, one device alone with T tokens and all experts, and the formulation of JAX's own
pieces; with FP8 weights again, to which tokens travel quantized. `exchange` are the two ways of
"direct" alone (`ep_exchange.py`), `collectives` the bare ones that move the same bytes.

A chain as in suite `layer` would gather the same tokens in every layer, which XLA does once. Here
the tokens of a layer are a slice of 2 T rows, whose place depends on the layer and, through a zero,
on all chunks of the result of the one before: a copy of T rows that every implementation pays. What
a device computes alone takes no part in it: its tokens lie there, all n T, and its layers wait for
each other through the routing weights.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxmoe
from benchmarks import bounds, chain, quantized
from benchmarks.baselines import collectives, ragged_ep
from benchmarks.baselines.collectives import AXIS, OPTIONS
from benchmarks.cases import Case, Routed, tokens
from benchmarks.models import BYTES
from benchmarks.suites import ep_exchange, spread
from benchmarks.suites.entry import Entry
from benchmarks.suites.layer import moe_mlp
from benchmarks.suites.spread import CHUNKS, FP8, Spread, put
from jaxmoe import expert_parallel
from jaxmoe._ep.cost import DISPATCHES, share_per_device

LOCAL, ALONE = "jaxmoe[ep_local]", "jaxmoe[one_device]"
FP8_LOCAL = "jaxmoe[ep_fp8_local]"
DEFAULT_MODELS = ("deepseek-v3", "qwen3-30b-a3b")
DEFAULT_TOKENS = (1, 8, 64, 1024, 4096, 8192)
# Everything, collectives too, in CUDA graphs: for few tokens, where launching takes longest.
GRAPHS = OPTIONS | chain.GRAPHS
GRAPHS["xla_gpu_enable_command_buffer"] = f"{GRAPHS['xla_gpu_enable_command_buffer']},COLLECTIVES"
IN_GRAPHS = "+graphs"
MOST_GRAPH_TOKENS = 64
close_memory = spread.close_memory


class Variant(NamedTuple):
    """A way to spread a layer."""

    dispatch: str
    chunks: int
    own_apart: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        """The name of the implementation: `jaxmoe[ep_all_gather+own/2]`."""
        own = "+own" if self.own_apart else ""
        chunks = f"/{self.chunks}" if self.chunks > 1 else ""
        return f"jaxmoe[ep_{'fp8_' if self.fp8 else ''}{self.dispatch}{own}{chunks}]"


_VARIANTS = [Variant(d, c) for d in DISPATCHES for c in CHUNKS]
_VARIANTS.append(Variant("all_gather", 1, own_apart=True))
VARIANTS = {v.name: v for v in _VARIANTS}
FP8_VARIANTS = {v.name: v for d in DISPATCHES for v in [Variant(d, 1, fp8=True)]}
_EVERY = VARIANTS | FP8_VARIANTS
IMPLS = (
    *(*_EVERY, LOCAL, FP8_LOCAL, ALONE, ragged_ep.NAME),
    *(name + IN_GRAPHS for name in (Variant("all_gather", 1).name, LOCAL)),
    *(*ep_exchange.IMPLS, *(f"xla[{name}]" for name in collectives.NAMES)),
)


def entries(case: Case) -> list[Entry]:
    """Returns the layer and the collectives for T tokens on each device."""
    if why := spread.refused(case, "moe_mlp", ALONE):
        return why
    whole = Spread.of(case)
    out = [_variant(whole, impl) for impl in VARIANTS if _divides(case, impl)]
    out += [_local(whole), _alone(whole), _ragged(whole)]
    if case.model.hidden % 128 == 0:  # of FP8's blocks
        out += [*(_variant(whole, impl) for impl in FP8_VARIANTS), _local(whole, fp8=True)]
    out += ep_exchange.entries(whole)
    out += [_collective(whole, name) for name in collectives.NAMES]
    if case.num_tokens <= MOST_GRAPH_TOKENS:
        gathered = _variant(whole, Variant("all_gather", 1).name)
        out += [_in_graphs(gathered), _in_graphs(_local(whole))]
    return out


def _divides(case: Case, impl: str) -> bool:
    return case.num_tokens % VARIANTS[impl].chunks == 0


Call = Callable[[Any, Routed, jaxmoe.Experts, jax.Array], jax.Array]


@functools.cache
def _ep_call(impl: str) -> Call:
    way = _EVERY[impl]

    def call(x: jax.Array, r: Routed, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
        return expert_parallel.moe_mlp(  # pyright: ignore[reportReturnType]
            x,
            jaxmoe.Routing(r.expert_ids, r.weights),
            w,
            axis_name=AXIS,
            dispatch=way.dispatch,
            num_chunks=way.chunks,
            own_apart=way.own_apart,
            dispatch_format=FP8 if way.fp8 else None,
            residual=y,
        )

    return call


def _local_call(x: Any, r: Routed, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
    routing = jaxmoe.Routing(r.expert_ids, r.weights + spread.zero(y))
    return jaxmoe.moe_mlp(x, routing, w, expert_map=spread.own_map(w))


def _ragged_call(x: jax.Array, r: Routed, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
    return ragged_ep.layer(x, r, w, y, AXIS)


@functools.cache
def _step(call: Call, specs: Any) -> Callable[..., jax.Array]:
    """Wraps a call for a chain: tokens by slice, and over the devices if there are specs."""

    def step(many: Any, item: Any, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
        r, layer = item
        return call(many if specs is _WHOLE else spread.half(many, layer, y), r, w, y)

    return spread.split(step, specs) if specs else step


# Tokens, (routing, number of the layer), weights, result of the layer before.
_SPLIT = (P(AXIS), (P(AXIS), P()), P(AXIS), P(AXIS))
_WHOLE = (P(), (P(), P()), P(AXIS), P(AXIS))


def _spread_entry(
    whole: Spread,
    impl: str,
    call: Call,
    specs: Any,
    sent: float | None,
    weights: str = "nk",
    refusal: str | None = None,
) -> Entry:
    wide, model = whole.wide, whole.case.model
    per_token, fp8 = specs[0], weights == "fp8"

    def rows() -> int:
        return wide.num_tokens * (1 if specs is _SPLIT else whole.count)

    def given(x: jax.Array) -> Any:
        # What a device computes alone begins with the tokens as they would come.
        return jaxmoe.quantize_tokens(x, FP8) if fp8 and specs is _WHOLE else x

    def make(count: int, graphs: bool = False) -> chain.Chain:
        y = put(jnp.zeros((rows(), model.hidden), jnp.bfloat16), P(AXIS))
        many = whole.tokens()
        many = given(many[: wide.num_tokens] if specs is _WHOLE else many)
        layers = spread.items(wide.routings(count), per_token)
        inputs = (put(many, per_token), layers, tuple(getattr(whole, weights)))
        options = tuple(GRAPHS.items()) if graphs else ()
        return chain.Chain(spread.program(_step(call, specs), options), y, inputs, count)

    def check() -> float:
        x, r = wide.fresh
        specs_of_call = (specs[0], specs[1][0], *specs[2:])
        y = put(jnp.zeros((rows(), model.hidden), jnp.bfloat16), P(AXIS))
        inputs = put(given(x), per_token), put(r, per_token), getattr(whole, weights)[0], y
        out = jax.jit(spread.split(call, specs_of_call))(*inputs)
        if specs is _WHOLE:  # each device's part of every token
            parts = out.reshape(whole.count, wide.num_tokens, model.hidden)
            out = parts.astype(jnp.float32).sum(axis=0).astype(jnp.bfloat16)
        out = jax.device_put(out, jax.devices()[0])
        if fp8:
            return quantized.error(wide, out, quantized.weight_sets(wide, FP8)[0])
        return wide.layer_error(out)

    return Entry(
        "moe_mlp",
        impl,
        whole.work,
        wide.hit(whole.layers),
        whole.layers,
        make,
        check,
        refusal=refusal,
        weight_sets=quantized.count(whole.case.sets, model) if fp8 else len(whole.case.sets),
        scheme=quantized.SCHEME if fp8 else "bf16",
        sent_bytes=sent,
        devices=whole.count,
    )


def _variant(whole: Spread, impl: str) -> Entry:
    call, way = _ep_call(impl), _EVERY[impl]
    why = whole.no_memory if way.dispatch == "direct" else None
    if not way.fp8:
        return _spread_entry(whole, impl, call, _SPLIT, whole.sent(way.dispatch), refusal=why)
    model = whole.case.model
    token = model.hidden + model.hidden / 32 + 8 * model.top_k  # a float32 scale for 128
    sent = whole.sent(way.dispatch, token, model.hidden * BYTES)
    return _spread_entry(whole, impl, call, _SPLIT, sent, "fp8", refusal=why)


def _local(whole: Spread, fp8: bool = False) -> Entry:
    impl, weights = (FP8_LOCAL, "fp8") if fp8 else (LOCAL, "nk")
    return _spread_entry(whole, impl, _local_call, _WHOLE, None, weights)


def _ragged(whole: Spread) -> Entry:
    case, model = whole.case, whole.case.model
    why = ragged_ep.refusal(model, whole.work.flops, case.num_rows, whole.count, case.skew)
    sent = whole.case.num_rows * 2.0 * model.hidden * BYTES * (1 - 1 / whole.count)
    return _spread_entry(whole, ragged_ep.NAME, _ragged_call, _SPLIT, sent, "kn", refusal=why)


def _alone(whole: Spread) -> Entry:
    case, model = whole.case, whole.case.model

    def make(count: int) -> chain.Chain:
        y = jnp.zeros((case.num_tokens, model.hidden), jnp.bfloat16)
        many = tokens(jax.random.key(case.seed), 2 * case.num_tokens, model.hidden)
        inputs = (many, spread.items(case.routings(count), None), tuple(case.sets.nk))
        return chain.Chain(spread.program(_step(moe_mlp, None)), y, inputs, count)

    def check() -> float:
        x, r = case.fresh
        return case.layer_error(chain.single(moe_mlp)(x, r, case.sets.nk[0], jnp.zeros_like(x)))

    hit = case.hit(whole.layers)
    work = bounds.layer(model, case.num_tokens, hit)
    sets = len(case.sets)
    layers = whole.layers
    return Entry("moe_mlp", ALONE, work, hit, layers, make, check, weight_sets=sets)


def _in_graphs(entry: Entry) -> Entry:
    """The entry with its collectives in CUDA graphs, as an op of its own.

    So the other entries have their times if XLA fails at this one.
    """
    make = functools.partial(entry.make, graphs=True)
    name = entry.impl + IN_GRAPHS
    return dataclasses.replace(entry, op=entry.op + IN_GRAPHS, impl=name, make=make)


def _collective(whole: Spread, name: str) -> Entry:
    model, num_tokens = whole.case.model, whole.case.num_tokens
    rows = num_tokens
    if name == "ragged":  # what even routing sends
        rows = max(1, round(num_tokens * share_per_device(whole.count, model.top_k)))
    sent = float(collectives.ways(name) * (whole.count - 1) * rows * model.hidden * BYTES)

    def make(length: int) -> chain.Chain:
        seed = whole.case.seed
        return collectives.calls(name, spread.mesh(), rows, model.hidden, seed, length)

    return Entry(
        "collectives",
        f"xla[{name}]",
        bounds.Work(0.0, 0.0, sent),
        None,
        2 * whole.layers,
        make,
        None,
        refusal=collectives.refusal(name),
        sent_bytes=sent,
        devices=whole.count,
    )
