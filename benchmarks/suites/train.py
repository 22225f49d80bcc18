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
from benchmarks.cases import Case, Routed, Weights, relative_error, tokens
from benchmarks.models import BYTES, Layer, layer_bytes
from benchmarks.suites import train_products
from benchmarks.suites.entry import Entry, Memory, chain_length
from jaxmoe import reference

KN, RECOMPUTE = "jaxmoe[kn]", "jaxmoe[recompute_z]"
DEFAULT_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
DEFAULT_TOKENS = (1024, 4096, 16384)
PASS = "forward+backward"
_MOST_LAYERS = 4  # each leaves its gradients behind, and is many XLA ops to compile
_Forward = Callable[[Layer, jax.Array, Routed, Weights], jax.Array]


def _moe_mlp(
    model: Layer, x: jax.Array, r: Routed, w: Weights, *, layout: str, recompute: str | None = None
) -> jax.Array:
    return jaxmoe.moe_mlp(
        x,
        jaxmoe.Routing(r.expert_ids, r.weights),
        w.w_gate_up,
        w.w_down,
        activation=model.activation,
        b_gate_up=w.b_gate_up,
        b_down=w.b_down,
        gate_up=model.gate_up,
        weight_layout=layout,
        recompute=recompute,
    )


def _ragged_dot(model: Layer, x: jax.Array, r: Routed, w: Weights) -> jax.Array:
    nothing = jnp.zeros_like(x)
    product = xla_ragged_dot.product
    return composed.layer(product, model, x, r.expert_ids, r.weights, w, nothing)


@functools.cache  # equal calls share executables
def _training(forward: str, model: Layer) -> Callable[..., Any]:
    layer = _FORWARD[forward]

    def call(x: jax.Array, r: Routed, w: Weights, ct: jax.Array) -> Any:
        def of(x: jax.Array, weights: jax.Array, w: Weights) -> jax.Array:
            return layer(model, x, r._replace(weights=weights), w)

        y, pull = jax.vjp(of, x, r.weights, w)
        return y, *pull(ct)

    return call


_FORWARD: dict[str, _Forward] = {
    "jaxmoe": functools.partial(_moe_mlp, layout="nk"),
    KN: functools.partial(_moe_mlp, layout="kn"),
    RECOMPUTE: functools.partial(_moe_mlp, layout="nk", recompute="z"),
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
    call = _training(impl, case.model)
    turned = impl in ("jaxmoe", RECOMPUTE)

    def sets() -> list[Weights]:
        return case.sets.nk if turned else case.sets

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
        if turned:
            turn = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
            dw = dw._replace(w_gate_up=turn(dw.w_gate_up), w_down=turn(dw.w_down))
        return _error(case, y, dx, dweights, dw)

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


def _error(case: Case, y: Any, dx: Any, dweights: Any, dw: Weights) -> float:
    """The largest relative error: of sampled tokens, and of the weights of one expert."""
    x, r = case.fresh
    ct, at, w = _cotangent(case), case.sample, case.sets[0]
    errors = [case.layer_error(y)]
    want = _token_gradients(x[at], r.expert_ids[at], r.weights[at], ct[at], w, case.model)
    errors += [relative_error(a[at], b) for a, b in zip((dx, dweights), want, strict=True)]
    ids = np.asarray(r.expert_ids)
    expert = int(ids[0, 0])
    own = np.nonzero((ids == expert).any(axis=1))[0]
    factor = jnp.where(r.expert_ids == expert, r.weights, 0.0).sum(axis=1)
    one = jax.tree.map(lambda a: a[expert], w)
    wanted = _expert_gradients(x[own], factor[own], ct[own], one, case.model)
    got = jax.tree.map(lambda a: a[expert], dw)
    errors += [
        relative_error(a, b) for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True)
    ]
    return max(errors)


@functools.partial(jax.jit, static_argnames="model")
def _token_gradients(x: Any, ids: Any, weights: Any, ct: Any, w: Weights, model: Layer) -> Any:
    # Token by token with copies of its own K experts, as `Case.layer_error` does.
    def one(token: Any) -> Any:
        x, ids, weights, ct = token
        mine = jax.tree.map(lambda a: a[ids], w)

        def of(x: jax.Array, weights: jax.Array) -> jax.Array:
            slots = jnp.arange(model.top_k, dtype=jnp.int32)[None]
            return _reference(x[None], slots, weights[None], mine, model)[0]

        return jax.vjp(of, x.astype(jnp.float32), weights)[1](ct.astype(jnp.float32))

    return jax.lax.map(one, (x, ids, weights, ct))


@functools.partial(jax.jit, static_argnames="model")
def _expert_gradients(x: Any, factor: Any, ct: Any, w: Weights, model: Layer) -> Any:
    def of(w: Weights) -> jax.Array:
        alone = jax.tree.map(lambda a: a[None], w)
        ids = jnp.zeros((x.shape[0], 1), jnp.int32)
        return _reference(x, ids, factor[:, None], alone, model)

    wide = jax.tree.map(lambda a: a.astype(jnp.float32), w)
    (dw,) = jax.vjp(of, wide)[1](ct.astype(jnp.float32))
    return dw


def _reference(x: Any, ids: Any, weights: Any, w: Weights, model: Layer) -> jax.Array:
    return reference.moe_mlp(
        x,
        ids,
        weights,
        w.w_gate_up,
        w.w_down,
        b_gate_up=w.b_gate_up,
        b_down=w.b_down,
        activation=model.activation,
        gate_up=model.gate_up,
    )
