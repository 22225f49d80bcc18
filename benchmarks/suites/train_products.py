"""The grouped products of suite `train`: each with both of its gradients, for given cotangents."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines import xla_ragged_dot
from benchmarks.cases import Case, relative_error, tokens
from benchmarks.models import BYTES
from benchmarks.suites.entry import Entry, chain_length
from benchmarks.suites.ops import reference_rows

OP = "grouped_gemm"
_Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_PRODUCTS: dict[str, _Product] = {
    "jaxmoe": jaxmoe.grouped_gemm,
    xla_ragged_dot.NAME: xla_ragged_dot.product,
}


@functools.cache  # equal calls share executables
def training(impl: str) -> Callable[..., Any]:
    """Returns call(lhs, rhs, group_sizes, ct) -> the product and the gradients of lhs and rhs."""

    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, ct: jax.Array) -> Any:
        out, pull = jax.vjp(lambda lhs, rhs: _PRODUCTS[impl](lhs, rhs, sizes), lhs, rhs)
        return out, *pull(ct)

    return call


def entries(case: Case, pass_: str) -> list[Entry]:
    """Returns both products of the layer, by jaxmoe and by `jax.lax.ragged_dot`."""
    model = case.model
    out: list[Entry] = []
    for name, k, n in (
        ("gate_up", model.hidden, model.width),
        ("down", model.intermediate, model.hidden),
    ):
        out += [_entry(case, impl, name, k, n, pass_) for impl in _PRODUCTS]
    return out


def _entry(case: Case, impl: str, name: str, k: int, n: int, pass_: str) -> Entry:
    model, slow = case.model, impl == xla_ragged_dot.NAME
    outputs = BYTES * (float(case.num_rows) * (k + n) + float(model.num_experts) * k * n)
    even = bounds.grouped_gemm_training(case.num_rows, k, n, case.even_hit, model.num_experts)
    times_floor = xla_ragged_dot.times_floor(even, model.num_experts) if slow else 1.0
    layers = chain_length(even, outputs, times_floor)
    hit = case.hit(layers)
    work = bounds.grouped_gemm_training(case.num_rows, k, n, hit, model.num_experts)
    refusal = None
    if slow:
        refusal = xla_ragged_dot.refusal(work.flops, model.num_experts, case.num_rows, max(k, n))
    call = training(impl)

    @functools.cache
    def rows() -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(case.seed + k))
        return tokens(keys[0], case.num_rows, k), tokens(keys[1], case.num_rows, n)

    def arguments(count: int) -> list[tuple[jax.Array, ...]]:
        lhs, ct = rows()
        sets = [case.sets[i % len(case.sets)] for i in range(count)]
        weights = [w.gate_up if name == "gate_up" else w.down for w in sets]
        sizes = jnp.asarray(case.group_sizes(count), jnp.int32)
        return [(lhs, w, size, ct) for w, size in zip(weights, sizes, strict=True)]

    def make(count: int) -> chain.Chain:
        return chain.independent(call, arguments(count))

    def check() -> float:
        (one,) = arguments(1)
        return error(case.sample * model.top_k, one, chain.single(call)(*one))

    op = f"{OP}/{name}"
    return Entry(op, impl, work, hit, layers, make, check, refusal, len(case.sets), pass_=pass_)


def error(at: np.ndarray, arguments: tuple[jax.Array, ...], got: Any) -> float:
    """The largest relative error: of the rows `at` and their gradient, and of one matrix's."""
    lhs, rhs, sizes, ct = arguments
    ends = np.cumsum(np.asarray(sizes))
    expert = np.searchsorted(ends, at, side="right")
    largest = int(np.argmax(np.asarray(sizes)))
    own = slice(int(ends[largest] - sizes[largest]), int(ends[largest]))
    out, dlhs, drhs = got
    a, b = (rows[own].astype(jnp.float32) for rows in (lhs, ct))
    return max(
        relative_error(out[at], reference_rows(lhs[at], rhs, expert)),
        relative_error(dlhs[at], reference_rows(ct[at], rhs.swapaxes(1, 2), expert)),
        relative_error(drhs[largest], jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST)),
    )
