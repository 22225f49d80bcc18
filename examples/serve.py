"""Decodes with a Mixture-of-Experts language model, and says how many tokens a second.

    python examples/serve.py                         # a toy, anywhere
    python examples/serve.py --preset qwen3-30b-a3b  # its shapes, random weights, on one GPU

The whole loop is one program under `jax.jit`: embedding, attention with a cache of keys and values,
experts, and the choice of the next token. `--format` is that of the experts' weights;
`jax.lax.ragged_dot`, to compare with, has them in bf16 alone. `--layer none` leaves the experts
out, so that what they take can be told from the rest.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from jaxmoe import Experts, Routing
from jaxmoe.quantize import FORMATS

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
    layers = [init_layer(key, config, format) for key in keys[1:]]
    return {"embed": embed * config.hidden**-0.5, "layers": layers}


def empty_cache(config: Config, batch: int, length: int) -> list[jax.Array]:
    """Keys and values of every layer, [2, B, S, kv_heads, head_dim]."""
    shape = (2, batch, length, config.kv_heads, config.head_dim)
    return [jnp.zeros(shape, DTYPE) for _ in range(config.layers)]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def rotate(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary positions of [B, heads, D]."""
    half = x.shape[-1] // 2
    angle = position * 1e6 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention(
    x: jax.Array, w: Params, cache: jax.Array, position: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array]:
    """Attention of one new token a sequence to those before it, added to x [B, H]."""
    c, batch = config, x.shape[0]
    qkv = (norm(x, w["norms"][0]) @ w["qkv"].T).reshape(batch, -1, c.head_dim)
    q, k, v = jnp.split(qkv, (c.heads, c.heads + c.kv_heads), axis=1)
    q, k = (rotate(norm(a, w["head_norms"][i]), position) for i, a in enumerate((q, k)))
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
    gate_up, down = (jnp.swapaxes(w, 1, 2) for w in (experts.gate_up, experts.down))
    gate, up = jnp.split(jax.lax.ragged_dot(rows, gate_up, sizes), 2, axis=1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
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
        tokens = norm(x, w["norms"][1])
        logits = tokens.astype(jnp.float32) @ w["router"].T
        routing = jaxmoe.route(logits, top_k=config.top_k)
        x = LAYERS[layer](tokens, routing, w["experts"], x)
    last = norm(x, jnp.ones_like(x[0]))
    return jnp.matmul(last, params["embed"].T, preferred_element_type=jnp.float32), cache


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


def tokens_per_second(params: Params, config: Config, batch: int, steps: int, layer: str) -> float:
    """Decodes twice as many tokens as are timed, the first half to compile and warm up."""
    token = jnp.arange(batch, dtype=jnp.int32) % config.vocabulary
    cache = empty_cache(config, batch, 2 * steps)
    tokens, cache = decode(params, cache, token, jnp.int32(0), config, steps, layer)
    jax.block_until_ready(cache)
    start = time.perf_counter()
    tokens, cache = decode(params, cache, tokens[-1], jnp.int32(steps), config, steps, layer)
    jax.block_until_ready((tokens, cache))
    return batch * steps / (time.perf_counter() - start)


def positive(text: str) -> int:
    """Reads a number of the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def numbers(text: str) -> list[int]:
    """Reads numbers of the command line, by commas."""
    return [positive(part) for part in text.split(",")]


def names(text: str, allowed: Sequence[str]) -> list[str]:
    """Reads names of the command line, by commas."""
    for name in (found := text.split(",")):
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(allowed)}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each format, batch and kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--preset", choices=PRESETS, default="toy")
    formats = functools.partial(names, allowed=("bf16", *FORMATS))
    layers = functools.partial(names, allowed=tuple(LAYERS))
    more = "several by commas"
    parser.add_argument("--format", type=formats, default="bf16", help=f"of the experts, {more}")
    parser.add_argument("--batch", type=numbers, default="1,8", help=f"sequences at once, {more}")
    parser.add_argument("--tokens", type=positive, default=64, help="timed of each sequence")
    parser.add_argument("--layer", type=layers, default="jaxmoe,ragged_dot", help=more)
    args = parser.parse_args(arguments)
    if args.layer == ["ragged_dot"] and "bf16" not in args.format:
        parser.error("--layer ragged_dot has experts in --format bf16 alone")
    config = PRESETS[args.preset]
    print(f"{args.preset} on {jax.devices()[0].device_kind}, {args.tokens} tokens a sequence")
    for format in args.format:
        params = init(config, format)
        for batch in args.batch:
            for layer in args.layer:
                if layer == "ragged_dot" and format != "bf16":
                    continue
                rate = tokens_per_second(params, config, batch, args.tokens, layer)
                each = f"{1e3 * batch / rate:.2f} ms a step"
                print(f"{format:12s} batch {batch:3d}  {layer:10s} {rate:9.1f} tokens/s  {each}")
        del params
    return 0


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())
