"""Suite `routing`: from logits to the plan, against what plain jax.numpy makes of it.

Logits [T, E] float32 in; weights, expert offsets and both index arrays out: all that a layer needs
to know about its routing. The formulation in jax.numpy is the usual one: `jax.lax.top_k`, then a
stable sort of the chosen ids.

A layer takes a few microseconds, and the host one or two for every array that an execution takes or
returns. So results are stacked, and of jaxmoe's only one is asked for: its kernels write all of
theirs whatever is read. XLA would leave out what nobody reads, so it returns all.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.cases import Case, relative_error
from benchmarks.models import Layer
from benchmarks.suites.entry import Entry, chain_length
from jaxmoe import reference

XLA = "xla_topk_sort"
TWO_CALLS = "jaxmoe[two_calls]"  # what a layer did before route_and_plan
METHODS = ("renormalize", "deepseek_v3")
DEFAULT_MODELS = ("qwen3-30b-a3b", "deepseek-v3")
DEFAULT_TOKENS = (1, 64, 4096, 16384)
_XLA_LAYERS = 4  # tens of kernels each, and compiling them takes longer than timing them
_EPSILON = 1e-20


def entries(case: Case) -> list[Entry]:
    """Returns the implementations of each method."""
    return [_entry(case, method, impl) for method in METHODS for impl in CALLS]


def groups(model: Layer) -> int:
    """Groups of experts, half of which are kept: 8, or 1 where they do not divide or suffice."""
    fits = model.num_experts % 8 == 0 and model.top_k <= model.num_experts // 2
    return 8 if fits else 1


def options(model: Layer, method: str) -> dict[str, Any]:
    """Options of `jaxmoe.route` for a method, without the bias."""
    if method != "deepseek_v3":
        return {}
    count = groups(model)
    return {"num_groups": count, "top_groups": max(count // 2, 1), "scale": 2.5}


def _fused(logits: jax.Array, **given: Any) -> tuple[jaxmoe.Routing, jaxmoe.Plan]:
    return jaxmoe.route_and_plan(logits, **given)


def _two_calls(logits: jax.Array, **given: Any) -> tuple[jaxmoe.Routing, jaxmoe.Plan]:
    routing = jaxmoe.route(logits, **given)
    return routing, jaxmoe.plan(routing.expert_ids, num_experts=logits.shape[1])


@functools.cache
def _jaxmoe(model: Layer, method: str, fn: Any) -> Any:
    def call(logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        extra: dict[str, Any] = {"bias": bias} if method == "deepseek_v3" else {}
        extra |= options(model, method)
        routing, plan = fn(logits, top_k=model.top_k, method=method, **extra)
        return routing.weights, plan.expert_offsets, plan.row_to_token, plan.slot_to_row

    return call


@functools.cache
def _timed(model: Layer, method: str, fn: Any) -> Any:
    call = _jaxmoe(model, method, fn)
    return lambda logits, bias: call(logits, bias)[3]


@functools.cache
def _xla(model: Layer, method: str) -> Any:
    def call(logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        if method == "renormalize":
            chosen, ids = jax.lax.top_k(logits, model.top_k)
            weights = jax.nn.softmax(chosen, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits)
            ids = _grouped_top_k(scores + bias[None, :], groups(model), model.top_k)
            weights = jnp.take_along_axis(scores, ids, axis=1)
            weights = 2.5 * weights / (weights.sum(axis=1, keepdims=True) + _EPSILON)
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
        counts = jnp.bincount(flat, length=model.num_experts)
        offsets = jnp.concatenate([jnp.zeros(1, counts.dtype), jnp.cumsum(counts)])
        return weights, offsets, order // model.top_k, row.reshape(ids.shape)

    return call


def _grouped_top_k(keys: jax.Array, count: int, top_k: int) -> jax.Array:
    if count > 1:
        grouped = keys.reshape(keys.shape[0], count, -1)
        value = jax.lax.top_k(grouped, min(2, grouped.shape[2]))[0].sum(axis=2)
        kept = jax.lax.top_k(value, count // 2)[1]
        keep = jax.nn.one_hot(kept, count, dtype=bool).any(axis=1)
        keys = jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(keys.shape)
    return jax.lax.top_k(keys, top_k)[1]


@functools.cache
def _reference(model: Layer, method: str) -> Any:
    fixed = options(model, method) | {"top_k": model.top_k, "method": method}
    return jax.jit(functools.partial(reference.route, **fixed))


# Implementations, and the function of jaxmoe that one calls; None for plain jax.numpy.
CALLS = {"jaxmoe": _fused, TWO_CALLS: _two_calls, XLA: None}


def _entry(case: Case, method: str, impl: str) -> Entry:
    model = case.model
    route = bounds.route(case.num_tokens, model.num_experts, model.top_k)
    plan = bounds.plan(case.num_tokens, model.top_k, model.num_experts)
    work = bounds.Work(0.0, 0.0, route.activation_bytes + plan.activation_bytes)
    fn = CALLS[impl]
    call = _jaxmoe(model, method, fn) if fn else _xla(model, method)
    timed = _timed(model, method, fn) if fn else call
    bias = 0.01 * jax.random.normal(jax.random.key(case.seed), (model.num_experts,))

    def make(count: int) -> chain.Chain:
        return chain.stacked(timed, [(r.logits, bias) for r in case.routings(count)])

    def check() -> float:
        logits = case.fresh[1].logits
        weights, offsets, row_to_token, slot_to_row = map(
            np.asarray, chain.single(call)(logits, bias)
        )
        at = case.sample
        extra: dict[str, Any] = {"bias": bias} if method == "deepseek_v3" else {}
        ids, expected = _reference(model, method)(logits[at], **extra)
        rows = slot_to_row[at]
        expert = np.searchsorted(offsets, rows, side="right") - 1
        tokens = np.broadcast_to(at[:, None], rows.shape)
        right = np.array_equal(expert, ids) and np.array_equal(row_to_token[rows], tokens)
        return relative_error(jnp.asarray(weights[at]), expected) if right else float("inf")

    layers = chain_length(work, work.activation_bytes, times_floor=5.0)
    layers = layers if fn else min(layers, _XLA_LAYERS)
    return Entry(f"route+plan/{method}", impl, work, None, layers, make, check)
