"""Suite `ep`: the layer with its experts spread over all devices, T tokens on each of them.

`moe_mlp` is the whole layer in each dispatch mode, what one device computes of it without any
communication, one device alone with T tokens and all experts, and the formulation of JAX's own
pieces. `collectives` are the bare ones that move the same bytes.

A chain as in suite `layer` would gather the same tokens in every layer, which XLA does once. Here
the tokens of a layer are a slice of 2 T rows, whose place depends on the layer and, through a zero,
on all chunks of the result of the one before: a copy of T rows that every implementation pays. What
a device computes alone takes no part in it: its tokens lie there, all n T, and its layers wait for
each other through the routing weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines import collectives, ragged_ep
from benchmarks.baselines.collectives import AXIS, OPTIONS
from benchmarks.cases import Case, Routed, tokens
from benchmarks.models import BYTES
from benchmarks.suites.entry import Entry, chain_length
from benchmarks.suites.layer import moe_mlp
from jaxmoe import expert_parallel
from jaxmoe._ep.cost import DISPATCHES, share_per_device

LOCAL, ALONE = "jaxmoe[ep_local]", "jaxmoe[one_device]"
CHUNKS = (1, 2, 4)
DEFAULT_MODELS = ("deepseek-v3", "qwen3-30b-a3b")
DEFAULT_TOKENS = (1, 8, 64, 1024, 4096, 8192)
MOST_LAYERS = 16
# Everything, collectives too, in CUDA graphs: for few tokens, where launching takes longest.
GRAPHS = OPTIONS | chain.GRAPHS
GRAPHS["xla_gpu_enable_command_buffer"] = f"{GRAPHS['xla_gpu_enable_command_buffer']},COLLECTIVES"
IN_GRAPHS = "+graphs"
MOST_GRAPH_TOKENS = 64


class Variant(NamedTuple):
    """A way to spread a layer."""

    dispatch: str
    chunks: int
    own_apart: bool = False

    @property
    def name(self) -> str:
        """The name of the implementation: `jaxmoe[ep_all_gather+own/2]`."""
        own = "+own" if self.own_apart else ""
        return f"jaxmoe[ep_{self.dispatch}{own}{f'/{self.chunks}' if self.chunks > 1 else ''}]"


_VARIANTS = [Variant(d, c) for d in DISPATCHES for c in CHUNKS]
_VARIANTS.append(Variant("all_gather", 1, own_apart=True))
VARIANTS = {v.name: v for v in _VARIANTS}
IMPLS = (
    *(*VARIANTS, LOCAL, ALONE, ragged_ep.NAME),
    *(name + IN_GRAPHS for name in (Variant("all_gather", 1).name, LOCAL)),
    *(f"xla[{name}]" for name in collectives.NAMES),
)


_memory: list[expert_parallel.PeerMemory] = []


def close_memory() -> None:
    """Closes what the entries of the last case have opened."""
    while _memory:
        _memory.pop().close()


@functools.cache
def mesh() -> Mesh:
    """All devices along one axis."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def entries(case: Case) -> list[Entry]:
    """Returns the layer and the collectives for T tokens on each device."""
    count, experts = jax.device_count(), case.model.num_experts
    if count < 2 or experts % count:
        why = f"not run: {experts} experts on {count} device(s)"
        work = bounds.Work(0.0, 0.0, 1.0)
        return [Entry("moe_mlp", ALONE, work, None, 1, _nothing, None, refusal=why)]
    spread = Spread(case, dataclasses.replace(case, num_tokens=case.num_tokens * count), count)
    out = [_variant(spread, impl) for impl in VARIANTS if _divides(case, impl)]
    out += [_local(spread), _alone(spread), _ragged(spread)]
    out += [_collective(spread, name) for name in collectives.NAMES]
    if case.num_tokens <= MOST_GRAPH_TOKENS:
        whole = _variant(spread, Variant("all_gather", 1).name)
        out += [_in_graphs(whole), _in_graphs(_local(spread))]
    return out


def _nothing(_count: int) -> chain.Chain:
    raise ValueError("never built")


def _divides(case: Case, impl: str) -> bool:
    return case.num_tokens % VARIANTS[impl].chunks == 0


@dataclasses.dataclass(frozen=True)
class Spread:
    """One case: T tokens of one device, and the same draw for all devices together."""

    case: Case
    wide: Case
    count: int

    @property
    def work(self) -> bounds.Work:
        """The least work of one device: its part of the experts for all tokens."""
        work = bounds.layer(self.wide.model, self.wide.num_tokens, self.wide.even_hit)
        parts = (work.flops, work.weight_bytes, work.activation_bytes)
        return bounds.Work(*(part / self.count for part in parts))

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

    def tokens(self) -> jax.Array:
        """[2 n T, H]."""
        key = jax.random.key(self.case.seed)
        return tokens(key, 2 * self.wide.num_tokens, self.case.model.hidden)

    @functools.cached_property
    def no_memory(self) -> str | None:
        """Opens the memory of "direct" for these tokens. Returns why there is none."""
        model, num_tokens = self.case.model, self.case.num_tokens
        sizes = num_tokens, model.hidden, model.top_k, self.count
        needed = expert_parallel.peer_memory_bytes(*sizes, itemsize=BYTES)
        close_memory()
        try:
            _memory.append(expert_parallel.open_peer_memory(mesh(), AXIS, num_bytes=needed))
        except RuntimeError as error:  # NotImplementedError too
            return f"not run: {error}"
        return None

    def sent(self, mode: str) -> float:
        """Bytes that a device sends in one layer: tokens, what goes with them, and sums."""
        model, num_tokens = self.case.model, float(self.case.num_tokens)
        if mode in ("ragged", "direct"):
            num_tokens *= share_per_device(self.count, model.top_k)
        row = 2 * model.hidden * BYTES + 8 * model.top_k
        return (self.count - 1) * num_tokens * row


def put(value: Any, spec: P) -> Any:
    """Lays arrays out on the mesh."""
    return jax.device_put(value, NamedSharding(mesh(), spec))


def _zero(y: jax.Array) -> jax.Array:
    """A float32 that is not known before any chunk of `y` is."""
    rows = y[:: max(1, y.shape[0] // max(CHUNKS)), 0].astype(jnp.float32)
    return jax.lax.optimization_barrier(jnp.sum(jnp.nan_to_num(rows) * 0.0))


def _slice(tokens: jax.Array, layer: jax.Array, y: jax.Array) -> jax.Array:
    """Half of the tokens, from a place that is not known before `y` is."""
    count = tokens.shape[0] // 2
    at = layer % jnp.int32(count) + _zero(y).astype(jnp.int32)
    return jax.lax.dynamic_slice_in_dim(tokens, at, count)


def _split(fn: Callable[..., jax.Array], specs: Any) -> Callable[..., jax.Array]:
    return jax.shard_map(fn, mesh=mesh(), in_specs=specs, out_specs=P(AXIS), check_vma=False)


Call = Callable[[jax.Array, Routed, jaxmoe.Experts, jax.Array], jax.Array]


@functools.cache
def _ep_call(impl: str) -> Call:
    way = VARIANTS[impl]

    def call(x: jax.Array, r: Routed, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
        return expert_parallel.moe_mlp(  # pyright: ignore[reportReturnType]
            x,
            jaxmoe.Routing(r.expert_ids, r.weights),
            w,
            axis_name=AXIS,
            dispatch=way.dispatch,
            num_chunks=way.chunks,
            own_apart=way.own_apart,
            residual=y,
        )

    return call


def _local_call(x: jax.Array, r: Routed, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
    count = w.num_experts * jax.lax.axis_size(AXIS)
    here = jnp.arange(count, dtype=jnp.int32) - jax.lax.axis_index(AXIS) * w.num_experts
    routing = jaxmoe.Routing(r.expert_ids, r.weights + _zero(y))
    return jaxmoe.moe_mlp(x, routing, w, expert_map=here)


def _ragged_call(x: jax.Array, r: Routed, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
    return ragged_ep.layer(x, r, w, y, AXIS)


@functools.cache
def _step(call: Call, specs: Any) -> Callable[..., jax.Array]:
    """Wraps a call for a chain: tokens by slice, and over the devices if there are specs."""

    def step(many: jax.Array, item: Any, w: jaxmoe.Experts, y: jax.Array) -> jax.Array:
        r, layer = item
        return call(many if specs is _WHOLE else _slice(many, layer, y), r, w, y)

    return _split(step, specs) if specs else step


@functools.cache
def _program(step: Callable[..., jax.Array], graphs: bool = False) -> Callable[[Any, Any], Any]:
    def run(y: jax.Array, inputs: Any) -> jax.Array:
        many, items, weights = inputs
        for i, item in enumerate(items):
            y = step(many, item, weights[i % len(weights)], y)
        return y

    return chain.compiled(run, GRAPHS if graphs else OPTIONS)


# Tokens, (routing, number of the layer), weights, result of the layer before.
_SPLIT = (P(AXIS), (P(AXIS), P()), P(AXIS), P(AXIS))
_WHOLE = (P(), (P(), P()), P(AXIS), P(AXIS))


def _items(routings: Sequence[Routed], spec: P | None) -> tuple[Any, ...]:
    numbers = [jnp.int32(i) for i in range(len(routings))]
    if spec is None:
        return tuple(zip(routings, numbers, strict=True))
    return tuple((put(r, spec), put(i, P())) for r, i in zip(routings, numbers, strict=True))


def _spread_entry(
    spread: Spread,
    impl: str,
    call: Call,
    specs: Any,
    sent: float | None,
    turned: bool = True,
    refusal: str | None = None,
) -> Entry:
    wide, model = spread.wide, spread.case.model
    per_token = specs[0]

    def weights() -> list[jaxmoe.Experts]:
        return spread.nk if turned else spread.kn

    def make(count: int, graphs: bool = False) -> chain.Chain:
        rows = wide.num_tokens * (1 if specs is _SPLIT else spread.count)
        y = put(jnp.zeros((rows, model.hidden), jnp.bfloat16), P(AXIS))
        items = _items(wide.routings(count), per_token)
        many = spread.tokens()
        many = many[: wide.num_tokens] if specs is _WHOLE else many
        inputs = (put(many, per_token), items, tuple(weights()))
        return chain.Chain(_program(_step(call, specs), graphs), y, inputs, count)

    def check() -> float:
        x, r = wide.fresh
        specs_of_call = (specs[0], specs[1][0], *specs[2:])
        rows = wide.num_tokens * (1 if specs is _SPLIT else spread.count)
        y = put(jnp.zeros((rows, model.hidden), jnp.bfloat16), P(AXIS))
        whole = (put(x, per_token), put(r, per_token), weights()[0], y)
        out = jax.jit(_split(call, specs_of_call))(*whole)
        if specs is _WHOLE:  # each device's part of every token
            parts = out.reshape(spread.count, wide.num_tokens, model.hidden)
            out = parts.astype(jnp.float32).sum(axis=0)
        return wide.layer_error(jax.device_put(out, jax.devices()[0]))

    return Entry(
        "moe_mlp",
        impl,
        spread.work,
        wide.hit(spread.layers),
        spread.layers,
        make,
        check,
        refusal=refusal,
        weight_sets=len(spread.case.sets),
        sent_bytes=sent,
        devices=spread.count,
    )


def _variant(spread: Spread, impl: str) -> Entry:
    call, dispatch = _ep_call(impl), VARIANTS[impl].dispatch
    why = spread.no_memory if dispatch == "direct" else None
    return _spread_entry(spread, impl, call, _SPLIT, spread.sent(dispatch), refusal=why)


def _local(spread: Spread) -> Entry:
    return _spread_entry(spread, LOCAL, _local_call, _WHOLE, None)


def _ragged(spread: Spread) -> Entry:
    case, model = spread.case, spread.case.model
    why = ragged_ep.refusal(model, spread.work.flops, case.num_rows, spread.count, case.skew)
    sent = spread.case.num_rows * 2.0 * model.hidden * BYTES * (1 - 1 / spread.count)
    return _spread_entry(
        spread, ragged_ep.NAME, _ragged_call, _SPLIT, sent, turned=False, refusal=why
    )


def _alone(spread: Spread) -> Entry:
    case, model = spread.case, spread.case.model

    def make(count: int) -> chain.Chain:
        y = jnp.zeros((case.num_tokens, model.hidden), jnp.bfloat16)
        many = tokens(jax.random.key(case.seed), 2 * case.num_tokens, model.hidden)
        inputs = (many, _items(case.routings(count), None), tuple(case.sets.nk))
        return chain.Chain(_program(_step(moe_mlp, None)), y, inputs, count)

    def check() -> float:
        x, r = case.fresh
        return case.layer_error(chain.single(moe_mlp)(x, r, case.sets.nk[0], jnp.zeros_like(x)))

    hit = case.hit(spread.layers)
    work = bounds.layer(model, case.num_tokens, hit)
    sets = len(case.sets)
    layers = spread.layers
    return Entry("moe_mlp", ALONE, work, hit, layers, make, check, weight_sets=sets)


def _in_graphs(entry: Entry) -> Entry:
    """The entry with its collectives in CUDA graphs, as an op of its own.

    So the other entries have their times if XLA fails at this one.
    """
    make = functools.partial(entry.make, graphs=True)
    name = entry.impl + IN_GRAPHS
    return dataclasses.replace(entry, op=entry.op + IN_GRAPHS, impl=name, make=make)


def _collective(spread: Spread, name: str) -> Entry:
    model, num_tokens = spread.case.model, spread.case.num_tokens
    rows = num_tokens
    if name == "ragged":  # what even routing sends
        rows = max(1, round(num_tokens * share_per_device(spread.count, model.top_k)))
    sent = float(collectives.ways(name) * (spread.count - 1) * rows * model.hidden * BYTES)

    def make(length: int) -> chain.Chain:
        return collectives.calls(name, mesh(), rows, model.hidden, spread.case.seed, length)

    return Entry(
        "collectives",
        f"xla[{name}]",
        bounds.Work(0.0, 0.0, sent),
        None,
        2 * spread.layers,
        make,
        None,
        refusal=collectives.refusal(name),
        sent_bytes=sent,
        devices=spread.count,
    )
