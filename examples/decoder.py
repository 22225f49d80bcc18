"""A decoder of Qwen3-MoE's shape: attention with a cache of keys and values, and experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from jaxmoe import Experts, Routing

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """A model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    intermediate: int
    vocabulary: int
    epsilon: float = 1e-6  # of norms
    theta: float = 1e6  # of positions
    norm_topk_prob: bool = True


PRESETS = {
    "toy": Config(64, 2, 4, 2, 16, 8, 2, 64, 256),
    "qwen3-30b-a3b": Config(2048, 48, 32, 4, 128, 128, 8, 768, 151936),
}
DTYPE = jnp.bfloat16


@functools.partial(jax.jit, static_argnames=("config", "format"))
def init_layer(key: jax.Array, config: Config, format: str) -> Params:
    """Draws one layer, its experts in the format."""
    c, keys = config, iter(jax.random.split(key, 6))

    def normal(*shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * shape[-1] ** -0.5).astype(DTYPE)

    first = normal(c.experts, 2 * c.intermediate, c.hidden)
    down = normal(c.experts, c.hidden, c.intermediate)
    if format != "bf16":
        first, down = (jaxmoe.quantize(w, format, weight_layout="nk") for w in (first, down))
    return {
        "experts": Experts(gate_up=first, down=down, layout="nk"),
        "router": normal(c.experts, c.hidden).astype(jnp.float32),
        "qkv": normal((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
        "out": normal(c.hidden, c.heads * c.head_dim),
        "norms": jnp.ones((2, c.hidden), DTYPE),
        "head_norms": jnp.ones((2, c.head_dim), DTYPE),
    }


def init(config: Config, format: str, seed: int = 0) -> Params:
    """Draws a model. Layers are separate arrays: a scan over stacked ones would copy each."""
    keys = jax.random.split(jax.random.key(seed), config.layers + 1)
    embed = jax.random.normal(keys[0], (config.vocabulary, config.hidden), DTYPE)
    embed *= config.hidden**-0.5
    layers = [init_layer(key, config, format) for key in keys[1:]]
    return {"embed": embed, "layers": layers, "norm": jnp.ones(config.hidden, DTYPE), "head": embed}


def empty_cache(config: Config, batch: int, length: int) -> list[jax.Array]:
    """Keys and values of every layer, [2, B, S, kv_heads, head_dim]."""
    shape = (2, batch, length, config.kv_heads, config.head_dim)
    return [jnp.zeros(shape, DTYPE) for _ in range(config.layers)]


def norm(x: jax.Array, scale: jax.Array, config: Config) -> jax.Array:
    """RMSNorm in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.epsilon)
    return wide.astype(x.dtype) * scale


def rotate(x: jax.Array, position: jax.Array, config: Config) -> jax.Array:
    """Rotary positions of [B, heads, D]."""
    half = x.shape[-1] // 2
    angle = position * config.theta ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention(
    x: jax.Array, w: Params, cache: jax.Array, position: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array]:
    """Attention of one new token a sequence to those before it, added to x [B, H]."""
    c, batch = config, x.shape[0]
    qkv = (norm(x, w["norms"][0], c) @ w["qkv"].T).reshape(batch, -1, c.head_dim)
    q, k, v = jnp.split(qkv, (c.heads, c.heads + c.kv_heads), axis=1)
    q, k = (rotate(norm(a, w["head_norms"][i], c), position, c) for i, a in enumerate((q, k)))
    new = jnp.stack([k, v])[:, :, None]
    cache = jax.lax.dynamic_update_slice(cache, new, (0, 0, position, 0, 0))
    lengths = jnp.full(batch, position + 1, jnp.int32)
    out = jax.nn.dot_product_attention(
        q[:, None], cache[0], cache[1], key_value_seq_lengths=lengths
    )
    return x + out.reshape(batch, -1) @ w["out"].T, cache


def by_jaxmoe(tokens: jax.Array, routing: Routing, experts: Experts, x: jax.Array) -> jax.Array:
    """The experts of each token, added to x."""
    return jaxmoe.moe_mlp(tokens, routing, experts, residual=x)


def by_ragged_dot(tokens: jax.Array, routing: Routing, experts: Experts, x: jax.Array) -> jax.Array:
    """The same of XLA's ops."""
    top_k = routing.expert_ids.shape[1]
    order = jnp.argsort(routing.expert_ids.reshape(-1), stable=True)
    sizes = jnp.bincount(routing.expert_ids.reshape(-1), length=experts.num_experts)
    rows = tokens[order // top_k]

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, jnp.swapaxes(w, 1, 2), sizes)

    if experts.gate_up is None:
        gate, up = product(rows, experts.gate), product(rows, experts.up)
    else:
        gate, up = jnp.split(product(rows, experts.gate_up), 2, axis=1)
    y = product(jax.nn.silu(gate) * up, experts.down)
    y = y.astype(jnp.float32) * routing.weights.reshape(-1)[order][:, None]
    return x + jax.ops.segment_sum(y, order // top_k, tokens.shape[0]).astype(x.dtype)


def by_nobody(tokens: jax.Array, routing: Routing, experts: Experts, x: jax.Array) -> jax.Array:
    """No experts, but the router before them: what they take is the difference."""
    del experts
    return x + tokens * routing.weights[:, :1].astype(x.dtype)


LAYERS = {"jaxmoe": by_jaxmoe, "ragged_dot": by_ragged_dot, "none": by_nobody}


def step(
    params: Params,
    cache: list[jax.Array],
    token: jax.Array,
    position: jax.Array,
    config: Config,
    layer: str,
) -> tuple[jax.Array, list[jax.Array]]:
    """Logits [B, V] after one more token of each sequence, and the cache with it."""
    x, cache = params["embed"][token], list(cache)
    for i, w in enumerate(params["layers"]):
        x, cache[i] = attention(x, w, cache[i], position, config)
        tokens = norm(x, w["norms"][1], config)
        # A GPU would round the factors of a float32 product, and other experts would be chosen.
        exact = {"precision": jax.lax.Precision.HIGHEST}
        logits = jnp.matmul(tokens.astype(jnp.float32), w["router"].T, **exact)
        options = {"top_k": config.top_k, "norm_topk_prob": config.norm_topk_prob}
        routing = jaxmoe.route(logits, method="softmax", **options)
        x = LAYERS[layer](tokens, routing, w["experts"], x)
    last = norm(x, params["norm"], config)
    return jnp.matmul(last, params["head"].T, preferred_element_type=jnp.float32), cache


@functools.partial(jax.jit, static_argnames=("config", "steps", "layer"), donate_argnums=1)
def decode(
    params: Params,
    cache: list[jax.Array],
    token: jax.Array,
    position: jax.Array,
    config: Config,
    steps: int,
    layer: str,
) -> tuple[jax.Array, list[jax.Array]]:
    """Feeds `token` [B] and then, greedily, what follows: the tokens [steps, B], and the cache."""

    def one(carry: Any, _: None) -> tuple[Any, jax.Array]:
        cache, token, position = carry
        logits, cache = step(params, cache, token, position, config, layer)
        token = jnp.argmax(logits, axis=-1).astype(token.dtype)
        return (cache, token, position + 1), token

    carry, tokens = jax.lax.scan(one, (cache, token, position), None, length=steps)
    return tokens, carry[0]


@functools.partial(jax.jit, static_argnames=("config", "layer"), donate_argnums=1)
def follow(
    params: Params, cache: list[jax.Array], prompt: jax.Array, config: Config, layer: str
) -> tuple[jax.Array, list[jax.Array]]:
    """Feeds a prompt [P, B], token by token: the logits [B, V] after it, and the cache."""

    def one(carry: Any, token: jax.Array) -> tuple[Any, None]:
        _, cache, position = carry
        logits, cache = step(params, cache, token, position, config, layer)
        return (logits, cache, position + 1), None

    nothing = jnp.zeros((prompt.shape[1], config.vocabulary), jnp.float32)
    carry, _ = jax.lax.scan(one, (nothing, cache, jnp.int32(0)), prompt)
    return carry[0], carry[1]
