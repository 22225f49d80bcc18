"""A case over all devices, T tokens on each: what the suites of expert parallelism share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from benchmarks import bounds, chain, quantized
from benchmarks.baselines.collectives import AXIS, OPTIONS
from benchmarks.cases import Case, Routed, tokens
from benchmarks.models import BYTES
from benchmarks.suites.entry import Entry, chain_length
from jaxmoe import expert_parallel
from jaxmoe._ep.cost import share_per_device

CHUNKS = (1, 2, 4)
MOST_LAYERS = 16
FP8 = "fp8_block"  # of quantized weights, and of tokens on their way to them

_memory: list[expert_parallel.PeerMemory] = []


def close_memory() -> None:
    """Closes what the entries of the last case have opened."""
    while _memory:
        _memory.pop().close()


@functools.cache
def mesh() -> Mesh:
    """All devices along one axis."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def refused(case: Case, op: str, impl: str) -> list[Entry]:
    """An entry that says why the case cannot be spread; empty if it can."""
    count, experts = jax.device_count(), case.model.num_experts
    if count > 1 and experts % count == 0:
        return []
    why = f"not run: {experts} experts on {count} device(s)"
    return [Entry(op, impl, bounds.Work(0.0, 0.0, 1.0), None, 1, _nothing, None, refusal=why)]


def _nothing(_count: int) -> chain.Chain:
    raise ValueError("never built")


@dataclasses.dataclass(frozen=True)
class Spread:
    """One case: T tokens of one device, and the same draw for all devices together."""

    case: Case
    wide: Case
    count: int

    @classmethod
    def of(cls, case: Case) -> "Spread":
        """Spreads a case that is not refused."""
        count = jax.device_count()
        return cls(case, dataclasses.replace(case, num_tokens=case.num_tokens * count), count)

    def part(self, work: bounds.Work) -> bounds.Work:
        """One device's part of the work for all tokens."""
        parts = (work.flops, work.weight_bytes, work.activation_bytes)
        return bounds.Work(*(part / self.count for part in parts))

    @property
    def work(self) -> bounds.Work:
        """The least work of one device: its part of the experts for all tokens."""
        return self.part(bounds.layer(self.wide.model, self.wide.num_tokens, self.wide.even_hit))

    @property
    def layers(self) -> int:
        """Length of the chains."""
        return min(MOST_LAYERS, chain_length(self.work, times_floor=1.5))

    @functools.cached_property
    def nk(self) -> list[jaxmoe.Experts]:
        """The case's weights over the devices, in checkpoint order."""
        return [put(w, P(AXIS)) for w in self.case.sets.nk]

    @functools.cached_property
    def kn(self) -> list[jaxmoe.Experts]:
        """The case's weights over the devices, with the contraction first."""
        return [put(w, P(AXIS)) for w in self.case.sets]

    @functools.cached_property
    def fp8(self) -> list[jaxmoe.Experts]:
        """The first of the case's weights over the devices, in FP8."""
        return [put(w, P(AXIS)) for w in quantized.weight_sets(self.case, FP8)]

    def tokens(self) -> jax.Array:
        """[2 n T, H]."""
        key = jax.random.key(self.case.seed)
        return tokens(key, 2 * self.wide.num_tokens, self.case.model.hidden)

    @functools.cached_property
    def memory(self) -> expert_parallel.PeerMemory | str:
        """The memory of "direct" for these tokens, opened now, or why there is none."""
        model, num_tokens = self.case.model, self.case.num_tokens
        sizes = num_tokens, model.hidden, model.top_k, self.count
        needed = expert_parallel.peer_memory_bytes(*sizes, itemsize=BYTES)
        close_memory()
        try:
            _memory.append(expert_parallel.open_peer_memory(mesh(), AXIS, num_bytes=needed))
        except RuntimeError as error:  # NotImplementedError too
            return f"not run: {error}"
        return _memory[-1]

    @property
    def no_memory(self) -> str | None:
        """Why there is no memory of "direct"."""
        return self.memory if isinstance(self.memory, str) else None

    def sent(self, mode: str, token_bytes: float = 0.0, sum_bytes: float = 0.0) -> float:
        """Bytes that a device sends in one layer.

        Args:
          mode: the dispatch mode.
          token_bytes, sum_bytes: of a token with what goes with it and of a sum; of bf16 ones, with
            ids and routing weights, if none are given.
        """
        model, num_tokens = self.case.model, float(self.case.num_tokens)
        if mode in ("ragged", "direct"):
            num_tokens *= share_per_device(self.count, model.top_k)
        row = token_bytes + sum_bytes or 2 * model.hidden * BYTES + 8 * model.top_k
        return (self.count - 1) * num_tokens * row


def put(value: Any, spec: P) -> Any:
    """Lays arrays out on the mesh."""
    return jax.device_put(value, NamedSharding(mesh(), spec))


def items(routings: Sequence[Routed], spec: P | None) -> tuple[Any, ...]:
    """(routing, number of the layer) of each layer of a chain."""
    numbers = [jnp.int32(i) for i in range(len(routings))]
    if spec is None:
        return tuple(zip(routings, numbers, strict=True))
    return tuple((put(r, spec), put(i, P())) for r, i in zip(routings, numbers, strict=True))


def zero(y: jax.Array) -> jax.Array:
    """A float32 that is not known before any chunk of `y` is."""
    rows = y[:: max(1, y.shape[0] // max(CHUNKS))]
    rows = rows.reshape(rows.shape[0], -1)[:, 0].astype(jnp.float32)
    return jax.lax.optimization_barrier(jnp.sum(jnp.nan_to_num(rows) * 0.0))


def half(tokens: jax.Array, layer: jax.Array, y: jax.Array) -> jax.Array:
    """Half of the tokens, from a place that is not known before `y` is."""
    count = tokens.shape[0] // 2
    at = layer % jnp.int32(count) + zero(y).astype(jnp.int32)
    return jax.lax.dynamic_slice_in_dim(tokens, at, count)


def own_map(w: jaxmoe.Experts) -> jax.Array:
    """The `expert_map` of a device that has its part of the experts alone."""
    count = w.num_experts * jax.lax.axis_size(AXIS)
    return jnp.arange(count, dtype=jnp.int32) - jax.lax.axis_index(AXIS) * w.num_experts


def split(fn: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """The function of what a device has, over all of them; results are split by their rows."""
    return jax.shard_map(fn, mesh=mesh(), in_specs=specs, out_specs=P(AXIS), check_vma=False)


@functools.cache
def program(step: Callable[..., Any], options: tuple[tuple[str, Any], ...] = ()) -> Any:
    """A chain of `step(tokens, item, weights, y) -> y`; `options` of XLA beside those of all."""

    def run(y: Any, inputs: Any) -> Any:
        many, items, weights = inputs
        for i, item in enumerate(items):
            y = step(many, item, weights[i % len(weights)], y)
        return y

    return chain.compiled(run, OPTIONS | dict(options))
