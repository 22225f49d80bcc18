"""Random data on the device: weights, tokens and routings of one case."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from benchmarks import bounds
from benchmarks.models import SKEWS, Layer, experts_used, layer_bytes
from jaxmoe import reference

DTYPE = jnp.bfloat16
SCHEME = "bf16"
WEIGHT_BYTES = 32 * 2**30  # device memory for all distinct layers of a model, in each layout
MAX_WEIGHT_SETS = 8
_STACK_SHARE = 0.5  # of the device's memory; another `WEIGHT_BYTES` lie there already
SAMPLED_TOKENS = 16
_NEVER = -1e6  # log-probability of an expert that is not in use; finite, as a router's logits are


class WeightSets(list[jaxmoe.Experts]):
    """Distinct layers of one model, [E, H, 2I] and [E, I, H], the contraction first."""

    @functools.cached_property
    def nk(self) -> list[jaxmoe.Experts]:
        """These layers in checkpoint order, [E, 2I, H] and [E, H, I]."""
        return [turned(w) for w in self]

    @functools.cached_property
    def quantized(self) -> dict[str, Any]:
        """The first of the layers in FP8, by format; filled by `benchmarks.quantized`."""
        return {}


class Routed(NamedTuple):
    """Routing of one layer, and the logits it comes from."""

    expert_ids: jax.Array
    weights: jax.Array
    logits: jax.Array


@jax.jit
def turned(w: jaxmoe.Experts) -> jaxmoe.Experts:
    """Returns the same experts in the other layout."""

    def turn(a: jax.Array) -> jax.Array:
        return jax.lax.map(lambda one: one.T, a)

    layout = "kn" if w.layout == "nk" else "nk"
    return dataclasses.replace(w, gate_up=turn(w.gate_up), down=turn(w.down), layout=layout)


def stack_size(model: Layer, layers: int, device: Any) -> int:
    """Returns how many distinct layers of a stack to hold, at most `layers`."""
    memory = (device.memory_stats() or {}).get("bytes_limit", WEIGHT_BYTES)
    return max(1, min(layers, int(_STACK_SHARE * memory) // layer_bytes(model)))


def weight_sets(model: Layer, seed: int) -> WeightSets:
    """Returns as many distinct layers as fit in `WEIGHT_BYTES`, at most `MAX_WEIGHT_SETS`."""
    count = max(1, min(MAX_WEIGHT_SETS, WEIGHT_BYTES // layer_bytes(model)))
    keys = jax.random.split(jax.random.key(seed), count)
    return WeightSets(_layer_weights(key, model) for key in keys)


@functools.partial(jax.jit, static_argnames="model")
def _layer_weights(key: jax.Array, model: Layer) -> jaxmoe.Experts:
    hidden, intermediate = model.hidden, model.intermediate
    keys = jax.random.split(key, 4)
    biases = {}
    if model.bias:
        biases["gate_up_bias"] = _stack(keys[2], model.num_experts, (model.width,), 0.1)
        biases["down_bias"] = _stack(keys[3], model.num_experts, (hidden,), 0.1)
    return jaxmoe.Experts(
        gate_up=_stack(keys[0], model.num_experts, (hidden, model.width), hidden**-0.5),
        down=_stack(keys[1], model.num_experts, (intermediate, hidden), intermediate**-0.5),
        activation=model.activation,
        order=model.gate_up,
        **biases,
    )


def _stack(key: jax.Array, count: int, shape: tuple[int, ...], scale: float) -> jax.Array:
    # One expert at a time: a deepseek-v3 layer drawn at once would need several times its size.
    def one(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(DTYPE)

    return jax.lax.map(one, jax.random.split(key, count))


@functools.partial(jax.jit, static_argnames=("num_tokens", "model", "skew"))
def routed(key: jax.Array, num_tokens: int, model: Layer, skew: str) -> Routed:
    """Draws K distinct experts per token: by a Zipf law over shuffled experts, else uniformly.

    Uniformly over those that the skew uses, see `experts_used`. Under `one_expert` those are K, so
    every token takes all of them, in the order of its logits.

    Adding Gumbel noise to log-probabilities and keeping the top K draws without replacement. The
    softmax of the chosen logits is the routing weight, as `route(method="renormalize")` has it.
    """
    shuffle, noise = jax.random.split(key)
    if skew == "zipf":  # probability of rank r proportional to 1 / r
        rank = jax.random.permutation(shuffle, model.num_experts) + 1
        log_p = -jnp.log(rank.astype(jnp.float32))
    else:
        used = jnp.arange(model.num_experts) < experts_used(model, skew)
        log_p = jnp.where(used, 0.0, _NEVER)
    logits = log_p[None, :] + jax.random.gumbel(noise, (num_tokens, model.num_experts))
    chosen, expert_ids = jax.lax.top_k(logits, model.top_k)
    return Routed(expert_ids.astype(jnp.int32), jax.nn.softmax(chosen, axis=-1), logits)


def tokens(key: jax.Array, num_tokens: int, hidden: int) -> jax.Array:
    """Returns standard normal tokens [T, H]."""
    return jax.random.normal(key, (num_tokens, hidden), jnp.float32).astype(DTYPE)


@dataclasses.dataclass
class Case:
    """One model, token count and skew: everything a suite needs to build its calls."""

    model: Layer
    num_tokens: int
    skew: str
    seed: int
    sets: WeightSets

    @functools.cached_property
    def x(self) -> jax.Array:
        """Tokens [T, H]; the same for every layer of a chain."""
        return tokens(self._key(0), self.num_tokens, self.model.hidden)

    @functools.cached_property
    def _routings(self) -> list[Routed]:
        return []

    @functools.cached_property
    def _group_sizes(self) -> dict[int, np.ndarray]:
        return {}

    def routings(self, layers: int) -> list[Routed]:
        """Returns distinct routings, one per layer of a chain."""
        drawn = self._routings
        for i in range(len(drawn), layers):
            drawn.append(routed(self._key(100 + i), self.num_tokens, self.model, self.skew))
        return drawn[:layers]

    def group_sizes(self, layers: int) -> np.ndarray:
        """Returns the rows of each expert in each of those layers: [layers, E]."""
        if layers not in self._group_sizes:
            self._group_sizes[layers] = np.stack(
                [
                    np.bincount(np.ravel(r.expert_ids), minlength=self.model.num_experts)
                    for r in self.routings(layers)
                ]
            )
        return self._group_sizes[layers]

    def hit(self, layers: int) -> float:
        """Returns the mean number of experts with at least one row over those layers."""
        return float((self.group_sizes(layers) > 0).sum(axis=1).mean())

    @property
    def even_hit(self) -> float:
        """The number of experts that even routing over those in use would hit."""
        return bounds.expected_hit(self.model, self.num_tokens, self.skew)

    @functools.cached_property
    def fresh(self) -> tuple[jax.Array, Routed]:
        """Tokens and routing of the correctness check, used for nothing else."""
        x = tokens(self._key(1), self.num_tokens, self.model.hidden)
        return x, routed(self._key(2), self.num_tokens, self.model, self.skew)

    @property
    def num_rows(self) -> int:
        """R = T * K."""
        return self.num_tokens * self.model.top_k

    @property
    def ceiling(self) -> bounds.Ceiling | None:
        """Rates that this device reaches, None if they were never measured."""
        return bounds.CEILINGS.get(jax.devices()[0].device_kind)

    @property
    def sample(self) -> np.ndarray:
        """First, last and some random positions of T tokens."""
        rng = np.random.default_rng(self.seed)
        some = rng.integers(0, self.num_tokens, SAMPLED_TOKENS - 2)
        return np.unique(np.concatenate([[0, self.num_tokens - 1], some]))

    def stack(self, count: int) -> list[jaxmoe.Experts]:
        """Returns distinct layers in checkpoint order, those of `sets` first."""
        if len(self._stack) != count:
            own = self.sets.nk[:count]
            keys = jax.random.split(self._key(3), count - len(own))
            self._stack[:] = own + [turned(_layer_weights(key, self.model)) for key in keys]
        return self._stack

    @functools.cached_property
    def _stack(self) -> list[jaxmoe.Experts]:
        return []

    def _key(self, stream: int) -> jax.Array:
        key = jax.random.key(self.seed)
        for part in (self.num_tokens, SKEWS.index(self.skew), stream):
            key = jax.random.fold_in(key, part)
        return key

    def layer_error(self, y: jax.Array) -> float:
        """Returns the relative error of the layer's output for `fresh` on sampled tokens."""
        x, r = self.fresh
        at = self.sample
        expected = _by_token(x[at], r.expert_ids[at], r.weights[at], self.sets[0])
        return relative_error(y[at], expected)


def reference_layer(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, w: jaxmoe.Experts, **options: Any
) -> jax.Array:
    """Returns `jaxmoe.reference.moe_mlp` of the experts `w`: every expert on every token."""
    return reference.moe_mlp(
        x,
        expert_ids,
        weights,
        w.gate_up,
        w.down,
        b_gate_up=w.gate_up_bias,
        b_down=w.down_bias,
        activation=w.activation,
        gate_up=w.order,
        weight_layout=w.layout,
        x_scale=w.x_scale,
        intermediate_scale=w.h_scale,
        **options,
    )


@jax.jit
def _by_token(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, w: jaxmoe.Experts
) -> jax.Array:
    # Token by token with copies of its own K experts: the reference computes every expert it gets.
    def one(token: Any) -> jax.Array:
        x, ids, weights = token
        mine = jax.tree.map(lambda a: a[ids], w)
        slots = jnp.arange(ids.size, dtype=jnp.int32)[None]
        return reference_layer(x[None], slots, weights[None], mine)[0]

    return jax.lax.map(one, (x, expert_ids, weights))


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """Returns |actual - expected| / |expected| in float64 (Frobenius norm)."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
