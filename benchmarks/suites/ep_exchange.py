"""Rows `exchange` of suite `ep`: what dispatch="direct" sends, without experts between.

Each call follows the one before through its ids, which costs a kernel of T K integers more. GB/s
are those of what a device sends to all others, as the links count it: rows of even routing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines.collectives import AXIS
from benchmarks.cases import Routed
from benchmarks.models import BYTES
from benchmarks.suites import spread
from benchmarks.suites.entry import Entry
from benchmarks.suites.spread import FP8, Spread, put
from jaxmoe._ep import direct

DISPATCH, DISPATCH_FP8, COMBINE = "jaxmoe[dispatch]", "jaxmoe[dispatch_fp8]", "jaxmoe[combine]"
IMPLS = (DISPATCH, DISPATCH_FP8, COMBINE)
_SPECS = (P(AXIS), (P(AXIS), P()), P(AXIS), P(AXIS))
_Call = Callable[[Any, jax.Array, direct.Way], tuple[jax.Array, ...]]


def entries(whole: Spread) -> list[Entry]:
    """Returns the calls for T tokens on each device."""
    hidden, numbers = whole.case.model.hidden, 8 * whole.case.model.top_k
    sent = {
        DISPATCH: hidden * BYTES + numbers,
        DISPATCH_FP8: hidden + hidden / 32 + numbers,
        COMBINE: hidden * BYTES,
    }
    left_out = [] if hidden % 128 == 0 else [DISPATCH_FP8]
    return [_entry(whole, impl, sent[impl]) for impl in IMPLS if impl not in left_out]


def _dispatch(given: Any, slots: jax.Array, way: direct.Way) -> tuple[jax.Array, ...]:
    tokens, small = given
    return direct.send(way, slots, tokens, small)


def _combine(given: Any, slots: jax.Array, way: direct.Way) -> tuple[jax.Array, ...]:
    rows, all_slots = given
    return (direct.bring(way, slots, all_slots, rows, None),)


_CALLS: dict[str, _Call] = {DISPATCH: _dispatch, DISPATCH_FP8: _dispatch, COMBINE: _combine}


@functools.cache
def _step(impl: str, way: direct.Way) -> Callable[..., jax.Array]:
    def step(given: Any, item: Any, _: Any, y: jax.Array) -> jax.Array:
        r, _layer = item
        slots = r.expert_ids + spread.zero(y).astype(jnp.int32)
        outs = _CALLS[impl](given, slots, way)
        return sum(spread.zero(a) for a in outs)[None]  # pyright: ignore[reportIndexIssue]

    return spread.split(step, _SPECS)


def _given(whole: Spread, impl: str, r: Routed) -> Any:
    """What a call sends, beside its ids, for a routing of the tokens of all devices."""
    wide = whole.wide
    x = whole.tokens()
    if impl == COMBINE:
        rows = jnp.concatenate([x[: wide.num_tokens]] * whole.count)
        return put((rows, jnp.concatenate([r.expert_ids] * whole.count)), P(AXIS))
    tokens, small = x[: wide.num_tokens], [r.weights]
    if impl == DISPATCH_FP8:
        q = jaxmoe.quantize_tokens(tokens, FP8)
        tokens = q.values
        small.append(q.scales)
    return put((tokens, jnp.concatenate(small, axis=1)), P(AXIS))


def _entry(whole: Spread, impl: str, row_bytes: float) -> Entry:
    memory, wide = whole.memory, whole.wide
    num_local = whole.case.model.num_experts // whole.count
    sent = whole.sent("direct", row_bytes)

    def way(name: str) -> direct.Way:
        return direct.Way(AXIS, whole.count, num_local, name)

    def make(length: int) -> chain.Chain:
        routings = wide.routings(length)
        # Sums are of rows for the first routing; ids of others bring as many home.
        given = _given(whole, impl, routings[0])
        used = routings[:1] * length if impl == COMBINE else routings
        inputs = (given, spread.items(used, P(AXIS)), (put(jnp.zeros(whole.count), P(AXIS)),))
        state = put(jnp.zeros(whole.count), P(AXIS))
        assert not isinstance(memory, str)
        step = _step(impl, way(memory.name if memory.on_gpus else ""))
        return chain.Chain(spread.program(step), state, inputs, length)

    def check() -> float:
        _, r = wide.fresh
        inputs = _given(whole, impl, r), put(r.expert_ids, P(AXIS))
        assert not isinstance(memory, str)
        names = memory.name if memory.on_gpus else "", ""  # the second by collectives
        got, want = (_outputs(impl, way(name), inputs) for name in names)
        return max(_difference(a, b) for a, b in zip(got, want, strict=True))

    return Entry(
        "exchange",
        impl,
        bounds.Work(0.0, 0.0, sent),
        None,
        2 * whole.layers,
        make,
        check,
        refusal=whole.no_memory,
        sent_bytes=sent,
        devices=whole.count,
    )


def _outputs(impl: str, way: direct.Way, inputs: Any) -> tuple[jax.Array, ...]:
    call = functools.partial(_CALLS[impl], way=way)
    return jax.jit(spread.split(call, (P(AXIS), P(AXIS))))(*inputs)


def _difference(got: jax.Array, want: jax.Array) -> float:
    """Relative, of numbers; 1 for ids and quantized ones of which one is another."""
    a, b = np.asarray(got), np.asarray(want)
    if a.dtype.kind in "iu" or a.dtype.itemsize == 1:
        return float((a != b).any())
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
