"""Suite `train`: forward and backward of one layer, all gradients, against dense products.

And of its grouped products alone, against `jax.lax.ragged_dot` (`train_products.py`).

One call returns y and the gradients of x, the routing weights and the layer's weights, for a given
cotangent of y. TFLOP/s count three times the forward's products: 18 T K H I for a gated layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from benchmarks import bounds, chain
from benchmarks.baselines import composed, dense, xla_ragged_dot
from benchmarks.cases import Case, Routed, reference_layer, relative_error, tokens, turned
from benchmarks.models import BYTES, layer_bytes
from benchmarks.suites import train_products
from benchmarks.suites.entry import Entry, Memory, chain_length

KN, RECOMPUTE = "jaxmoe[kn]", "jaxmoe[recompute_z]"
DEFAULT_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
DEFAULT_TOKENS = (1024, 4096, 16384)
PASS = "forward+backward"
_MOST_LAYERS = 4  # each leaves its gradients behind, and is many XLA ops to compile
_Forward = Callable[[jax.Array, Routed, jaxmoe.Experts], jax.Array]


def _moe_mlp(x: jax.Array, r: Routed, w: jaxmoe.Experts, recompute: str | None = None) -> jax.Array:
    routing = jaxmoe.Routing(r.expert_ids, r.weights)
    return jaxmoe.moe_mlp(x, routing, w, recompute=recompute)


def _ragged_dot(x: jax.Array, r: Routed, w: jaxmoe.Experts) -> jax.Array:
    return composed.layer(x, r, w, jnp.zeros_like(x), product=xla_ragged_dot.product)


@functools.cache  # equal calls share executables
def _training(forward: str) -> Callable[..., Any]:
    layer = _FORWARD[forward]

    def call(x: jax.Array, r: Routed, w: jaxmoe.Experts, ct: jax.Array) -> Any:
        def of(x: jax.Array, weights: jax.Array, w: jaxmoe.Experts) -> jax.Array:
            return layer(x, r._replace(weights=weights), w)

        y, pull = jax.vjp(of, x, r.weights, w)
        return y, *pull(ct)

    return call


_FORWARD: dict[str, _Forward] = {
    "jaxmoe": _moe_mlp,
    KN: _moe_mlp,
    RECOMPUTE: functools.partial(_moe_mlp, recompute="z"),
    xla_ragged_dot.NAME: _ragged_dot,
}


def entries(case: Case) -> list[Entry]:
    """Returns the implementations of one forward and backward pass."""
    model = case.model
    even = bounds.training(model, case.num_tokens, case.even_hit)
    outputs = layer_bytes(model) + 2.0 * case.num_tokens * model.hidden * BYTES
    layers = min(chain_length(even, outputs, times_floor=1.5), _MOST_LAYERS)
    work = bounds.training(model, case.num_tokens, case.hit(layers))
    refusal = xla_ragged_dot.refusal(
        work.flops, model.num_experts, case.num_rows, max(model.hidden, model.intermediate)
    )
    out: list[Entry] = []
    for impl in _FORWARD:
        entry = _entry(case, impl, work, layers)
        if impl == xla_ragged_dot.NAME:
            entry.refusal, entry.layers = refusal, 1
        out.append(entry)
    if work.compute_heavy(case.ceiling):
        make = functools.partial(dense.training_layers, model, case.num_rows, seed=case.seed)
        out.append(Entry("moe_mlp", dense.NAME, work, None, layers, make, None, pass_=PASS))
    return out + train_products.entries(case, PASS)


def _entry(case: Case, impl: str, work: bounds.Work, layers: int) -> Entry:
    call = _training(impl)
    in_order = impl in ("jaxmoe", RECOMPUTE)

    def sets() -> list[jaxmoe.Experts]:
        return case.sets.nk if in_order else case.sets

    def arguments(x: jax.Array, r: Routed, i: int) -> tuple[Any, ...]:
        return x, r, sets()[i % len(sets())], _cotangent(case)

    @functools.cache
    def program() -> Any:
        return jax.jit(call).lower(*arguments(*case.fresh, 0)).compile()

    def make(count: int) -> chain.Chain:
        routings = enumerate(case.routings(count))
        return chain.independent(call, [arguments(case.x, r, i) for i, r in routings])

    def check() -> float:
        y, dx, dweights, dw = program()(*arguments(*case.fresh, 0))
        return error(case, (y, dx, dweights, turned(dw) if in_order else dw), _cotangent(case))

    def memory() -> Memory:
        return Memory.of(program())

    return Entry(
        "moe_mlp",
        impl,
        work,
        case.hit(layers),
        layers,
        make,
        check,
        weight_sets=len(case.sets),
        pass_=PASS,
        memory=memory,
    )


def _cotangent(case: Case) -> jax.Array:
    return tokens(jax.random.key(case.seed + 1), case.num_tokens, case.model.hidden)


def error(case: Case, made: tuple[Any, Any, Any, jaxmoe.Experts], ct: jax.Array) -> float:
    """The largest relative error: of sampled tokens, and of the weights of one expert.

    Args:
      made: y and the gradients of x, routing weights and weights, for `case.fresh` and `sets[0]`.
      ct: the cotangent of y.
    """
    x, r = case.fresh
    (y, dx, dweights, dw), at, w = made, case.sample, case.sets[0]
    errors = [case.layer_error(y)]
    want = _token_gradients(x[at], r.expert_ids[at], r.weights[at], ct[at], w)
    errors += [relative_error(a[at], b) for a, b in zip((dx, dweights), want, strict=True)]
    ids = np.asarray(r.expert_ids)
    expert = int(ids[0, 0])
    own = np.nonzero((ids == expert).any(axis=1))[0]
    factor = jnp.where(r.expert_ids == expert, r.weights, 0.0).sum(axis=1)
    one = jax.tree.map(lambda a: a[expert], w)
    wanted = _expert_gradients(x[own], factor[own], ct[own], one)
    got = jax.tree.map(lambda a: a[expert], dw)
    errors += [
        relative_error(a, b) for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True)
    ]
    return max(errors)


@jax.jit
def _token_gradients(x: Any, ids: Any, weights: Any, ct: Any, w: jaxmoe.Experts) -> Any:
    # Token by token with copies of its own K experts, as `Case.layer_error` does.
    def one(token: Any) -> Any:
        x, ids, weights, ct = token
        mine = jax.tree.map(lambda a: a[ids], w)

        def of(x: jax.Array, weights: jax.Array) -> jax.Array:
            slots = jnp.arange(ids.size, dtype=jnp.int32)[None]
            return reference_layer(x[None], slots, weights[None], mine)[0]

        return jax.vjp(of, x.astype(jnp.float32), weights)[1](ct.astype(jnp.float32))

    return jax.lax.map(one, (x, ids, weights, ct))


@jax.jit
def _expert_gradients(x: Any, factor: Any, ct: Any, w: jaxmoe.Experts) -> Any:
    def of(w: jaxmoe.Experts) -> jax.Array:
        alone = jax.tree.map(lambda a: a[None], w)
        ids = jnp.zeros((x.shape[0], 1), jnp.int32)
        return reference_layer(x, ids, factor[:, None], alone)

    wide = jax.tree.map(lambda a: a.astype(jnp.float32), w)
    (dw,) = jax.vjp(of, wide)[1](ct.astype(jnp.float32))
    return dw
