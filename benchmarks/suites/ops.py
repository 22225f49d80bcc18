"""Suite `ops`: each stage of the layer alone, against its own floor."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines import dense, xla_ragged_dot
from benchmarks.cases import Case, relative_error, tokens
from benchmarks.models import BYTES
from benchmarks.suites.entry import Entry, chain_length

_COLD_BYTES = 256 * 2**20  # several times the L2


def entries(case: Case) -> list[Entry]:
    """Returns every stage of the layer for one case."""
    model = case.model
    products = (
        ("gate_up", model.hidden, model.width),
        ("down", model.intermediate, model.hidden),
    )
    out = [_route(case), _plan(case), _permute(case), _finalize(case)]
    for name, k, n in products:
        out += _grouped_gemm(case, name, k, n)
    for format in ("fp8_channel", "fp8_block"):
        kind = format.removeprefix("fp8_")
        out.append(_quantize(case, f"quantize/{kind}/x", format, case.num_tokens, model.hidden))
        out.append(_quantize(case, f"quantize/{kind}/h", format, case.num_rows, model.intermediate))
    return out


def _entry(
    op: str,
    work: bounds.Work,
    call: Callable[..., Any],
    arguments: Callable[[int], list[tuple[Any, ...]]],
    check: Callable[[], float],
    output_bytes: float,
) -> Entry:
    def make(count: int) -> chain.Chain:
        return chain.independent(call, arguments(count))

    return Entry(op, "jaxmoe", work, None, chain_length(work, output_bytes), make, check)


def _route(case: Case) -> Entry:
    model = case.model
    work = bounds.route(case.num_tokens, model.num_experts, model.top_k)

    call = _keyword(jaxmoe.route, "top_k", model.top_k)

    def arguments(count: int) -> list[tuple[Any, ...]]:
        return [(r.logits,) for r in case.routings(count)]

    def check() -> float:
        _, r = case.fresh
        routing = chain.single(call)(r.logits)
        if not np.array_equal(routing.expert_ids, r.expert_ids):
            return float("inf")
        return relative_error(routing.weights, r.weights)

    return _entry("route", work, call, arguments, check, work.activation_bytes)


def _plan(case: Case) -> Entry:
    model = case.model
    work = bounds.plan(case.num_tokens, model.top_k, model.num_experts)

    call = _keyword(jaxmoe.plan, "num_experts", model.num_experts)

    def arguments(count: int) -> list[tuple[Any, ...]]:
        return [(r.expert_ids,) for r in case.routings(count)]

    def check() -> float:
        _, r = case.fresh
        plan = chain.single(call)(r.expert_ids)
        ids = np.asarray(r.expert_ids).reshape(-1)
        order = np.argsort(ids, kind="stable")
        slot_to_row = np.empty_like(order)
        slot_to_row[order] = np.arange(order.size)
        offsets = np.searchsorted(ids[order], np.arange(model.num_experts + 1))
        equal = (
            np.array_equal(plan.expert_offsets, offsets)
            and np.array_equal(plan.row_to_token, order // model.top_k)
            and np.array_equal(plan.slot_to_row, slot_to_row.reshape(r.expert_ids.shape))
        )
        return 0.0 if equal else float("inf")

    return _entry("plan", work, call, arguments, check, work.activation_bytes)


@functools.cache
def _keyword(op: Callable[..., Any], name: str, value: int) -> Callable[..., Any]:
    return functools.partial(op, **{name: value})


def _plans(case: Case, count: int) -> list[jaxmoe.Plan]:
    make = chain.single(_keyword(jaxmoe.plan, "num_experts", case.model.num_experts))
    return [make(r.expert_ids) for r in case.routings(count)]


def _permute(case: Case) -> Entry:
    model = case.model
    work = bounds.permute(case.num_tokens, model.top_k, model.hidden)

    def arguments(count: int) -> list[tuple[Any, ...]]:
        x = _cold(case, case.num_tokens, model.hidden, count)
        return list(zip(x, _plans(case, count), strict=True))

    def check() -> float:
        x, _ = case.fresh
        plan = _plans(case, 1)[0]
        rows = chain.single(jaxmoe.permute)(x, plan)
        equal = np.array_equal(rows, np.asarray(x)[np.asarray(plan.row_to_token)])
        return 0.0 if equal else float("inf")

    return _entry(
        "permute", work, jaxmoe.permute, arguments, check, case.num_rows * model.hidden * BYTES
    )


def _finalize(case: Case) -> Entry:
    model = case.model
    work = bounds.finalize(case.num_tokens, model.top_k, model.hidden)

    def arguments(count: int) -> list[tuple[Any, ...]]:
        rows = _cold(case, case.num_rows, model.hidden, count)
        weights = [r.weights for r in case.routings(count)]
        return list(zip(rows, _plans(case, count), weights, strict=True))

    def check() -> float:
        rows = _cold(case, case.num_rows, model.hidden, 1)[0]
        plan, weights = _plans(case, 1)[0], case.routings(1)[0].weights
        y = chain.single(jaxmoe.finalize)(rows, plan, weights)
        at = case.sample
        mine = np.asarray(rows[plan.slot_to_row[at]], np.float32)
        expected = np.einsum("tkh,tk->th", mine, np.asarray(weights[at]))
        return relative_error(y[at], expected)

    return _entry(
        "finalize", work, jaxmoe.finalize, arguments, check, case.num_tokens * model.hidden * BYTES
    )


def _quantize(case: Case, op: str, format: str, rows: int, cols: int) -> Entry:
    """The input of the layer or the activation between its products, in FP8."""
    group = cols if format == "fp8_channel" else 128
    work = bounds.quantize(rows, cols, rows * -(-cols // group))
    call = _keyword(jaxmoe.quantize_tokens, "format", format)

    def arguments(count: int) -> list[tuple[Any, ...]]:
        return [(x,) for x in _cold(case, rows, cols, count)]

    def check() -> float:
        x = _cold(case, rows, cols, 1)[0]
        q = chain.single(call)(x)
        at = case.sample
        mine = np.asarray(x[at], np.float32)
        worst = 0.0
        for i, first in enumerate(range(0, cols, group)):
            part = mine[:, first : first + group]
            scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(448)
            values = (part * (1 / scale)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            scales = q.scales[at] if q.scales.ndim == 1 else q.scales[at, i]
            got = np.asarray(q.values[at, first : first + group], np.float32)
            worst = max(worst, relative_error(got, values), relative_error(scales, scale[:, 0]))
        return worst

    return _entry(op, work, call, arguments, check, rows * cols)


def _cold(case: Case, rows: int, width: int, count: int) -> list[jax.Array]:
    """Draws `count` inputs; equal ones come back only when they have left the cache."""
    distinct = min(count, max(1, -(-_COLD_BYTES // (rows * width * BYTES))))
    keys = jax.random.split(jax.random.key(case.seed + width), distinct)
    drawn = [tokens(key, rows, width) for key in keys]
    return [drawn[i % distinct] for i in range(count)]


def _grouped_gemm(case: Case, name: str, k: int, n: int) -> list[Entry]:
    model, op = case.model, f"grouped_gemm/{name}"
    output_bytes = case.num_rows * n * BYTES
    even = bounds.grouped_gemm(case.num_rows, k, n, case.even_hit)
    layers = chain_length(even, output_bytes)
    hit = case.hit(layers)
    work = bounds.grouped_gemm(case.num_rows, k, n, hit)

    @functools.cache
    def lhs() -> jax.Array:
        return _cold(case, case.num_rows, k, 1)[0]

    def weights(i: int) -> jax.Array:
        w = case.sets[i % len(case.sets)]
        return w.gate_up if name == "gate_up" else w.down

    def entry(impl: str, call: Any, times_floor: float = 1.0, refusal: str | None = None) -> Entry:
        def make(count: int) -> chain.Chain:
            sizes = [plan.group_sizes for plan in _plans(case, count)]
            arguments = [(lhs(), weights(i), size) for i, size in enumerate(sizes)]
            return chain.independent(call, arguments)

        def check() -> float:
            plan = _plans(case, 1)[0]
            out = chain.single(call)(lhs(), weights(0), plan.group_sizes)
            at = case.sample * model.top_k
            expert = np.searchsorted(np.asarray(plan.expert_offsets), at, side="right") - 1
            return relative_error(out[at], reference_rows(lhs()[at], weights(0), expert))

        count = chain_length(even, output_bytes, times_floor)
        return Entry(op, impl, work, hit, count, make, check, refusal, len(case.sets))

    slow = xla_ragged_dot
    slower = slow.times_floor(even, model.num_experts)
    too_slow = slow.refusal(work.flops, model.num_experts, case.num_rows, k)
    out = [
        entry("jaxmoe", jaxmoe.grouped_gemm),
        entry(slow.NAME, slow.product, slower, too_slow),
    ]
    if work.compute_heavy(case.ceiling):

        def make(count: int) -> chain.Chain:
            return dense.products(lhs(), k, n, count, case.seed)

        out.append(Entry(op, dense.NAME, work, None, layers, make, None))
    return out


@jax.jit
def reference_rows(rows: jax.Array, w: jax.Array, expert: jax.Array) -> jax.Array:
    """Multiplies each row by the matrix of its expert in float32."""

    def one(item: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, e = item
        w32 = w[e].astype(jnp.float32)
        return jnp.matmul(row.astype(jnp.float32), w32, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.map(one, (rows, jnp.asarray(expert)))
