"""A whole Mixture-of-Experts layer inside jax.jit: what runs, how exact it is, how fast it is.

Run it with `make demo`. On a CPU it takes one small layer; on a GPU also layers of real models.
"""

import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxmoe
from jaxmoe import reference


class Shape(NamedTuple):
    """One layer: T tokens, each sent to K of E experts of width I."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


SMALL = Shape("small", 64, 256, 128, 16, 4)
REAL = (
    Shape("qwen3-30b-a3b", 16, 2048, 768, 128, 8),
    Shape("qwen3-30b-a3b", 4096, 2048, 768, 128, 8),
    Shape("mixtral-8x7b", 256, 4096, 14336, 8, 2),
    Shape("mixtral-8x7b", 4096, 4096, 14336, 8, 2),
)

CEILINGS = {"NVIDIA H200": (4.3e12, 780e12)}  # bytes and FLOPs per second it was seen to reach
LAYERS = 8  # in one timed program


@functools.partial(jax.jit, static_argnums=0)
def make_inputs(shape: Shape) -> tuple[jax.Array, jax.Array, jaxmoe.Experts]:
    """Draws tokens, router logits and experts on the device."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (shape.tokens, shape.hidden), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (shape.tokens, shape.experts))

    def weights(key: jax.Array, rows: int, columns: int) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            return rows**-0.5 * jax.random.normal(key, (rows, columns), jnp.bfloat16)

        return jax.lax.map(one, jax.random.split(key, shape.experts))

    gate_up = weights(keys[2], shape.hidden, 2 * shape.intermediate)
    down = weights(keys[3], shape.intermediate, shape.hidden)
    return x, logits, jaxmoe.Experts(gate_up=gate_up, down=down)


def jaxmoe_layer(x, logits, experts, residual, *, top_k):
    """Routes, runs the experts, adds the residual."""
    return jaxmoe.moe_mlp(x, jaxmoe.route(logits, top_k=top_k), experts, residual=residual)


def ragged_dot_layer(x, logits, experts, residual, *, top_k):
    """Computes the same with what JAX itself offers."""
    chosen, expert_ids = jax.lax.top_k(logits, top_k)
    weights = jax.nn.softmax(chosen, axis=-1)
    order = jnp.argsort(expert_ids.reshape(-1), stable=True)
    group_sizes = jnp.bincount(expert_ids.reshape(-1), length=experts.num_experts).astype(jnp.int32)
    h = jax.lax.ragged_dot(x[order // top_k], experts.gate_up, group_sizes)
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    rows = jax.lax.ragged_dot(h, experts.down, group_sizes)
    slots = jnp.zeros_like(rows).at[order].set(rows).reshape(*weights.shape, -1)
    y = jnp.sum(slots.astype(jnp.float32) * weights[:, :, None], axis=1)
    return (y + residual.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.jit, static_argnames="top_k")
def reference_tokens(x, logits, experts, *, top_k):
    """Computes tokens one by one in float32, each with a copy of its own K experts."""
    routing = jaxmoe.Routing(*reference.route(logits, top_k=top_k))

    def one(token):
        x, ids, weights = token
        own = jnp.arange(top_k, dtype=jnp.int32)[None]
        return reference.moe_mlp(
            x[None], own, weights[None], experts.gate_up[ids], experts.down[ids]
        )[0]

    return jax.lax.map(one, (x, routing.expert_ids, routing.weights))


def relative_error(layer, inputs, top_k: int) -> float:
    """Compares the first tokens with the reference."""
    x, logits, experts = inputs
    y = jax.jit(functools.partial(layer, top_k=top_k))(*inputs, jnp.zeros_like(x))
    expected = reference_tokens(x[:8], logits[:8], experts, top_k=top_k)
    return float(jnp.linalg.norm(y[:8] - expected) / jnp.linalg.norm(expected))


def microseconds(layer, inputs, top_k: int) -> float | None:
    """Times programs of several layers, or of one if those do not fit the memory, or nothing."""
    for layers in (LAYERS, 1):
        try:
            return time_layers(layer, inputs, top_k, layers)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
    return None


def time_layers(layer, inputs, top_k: int, layers: int) -> float:
    """Times programs of several layers, each waiting for the one before through the residual."""
    x, logits, experts = inputs

    @functools.partial(jax.jit, donate_argnums=0)
    def run(y, x, all_logits, experts):
        for logits in all_logits:
            y = layer(x, logits, experts, y, top_k=top_k)
        return y

    # Every layer routes differently: of equal layers XLA would compute one.
    all_logits = [jax.random.permutation(jax.random.key(i), logits) for i in range(layers)]
    y, count, samples = jnp.array(x, copy=True), 1, []
    for _ in range(8):  # the first compiles, two more warm up
        start = time.perf_counter()
        for _ in range(count):
            y = run(y, x, all_logits, experts)
        jax.block_until_ready(y)
        samples.append((time.perf_counter() - start) / (count * layers))
        count = max(1, min(50, int(0.02 / (layers * samples[-1]))))
    return statistics.median(samples[3:]) * 1e6


def floor_us(shape: Shape) -> float | None:
    """Returns the time that bytes or FLOPs alone would take on this device."""
    ceilings = CEILINGS.get(jax.devices()[0].device_kind)
    if ceilings is None:
        return None
    hit = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** shape.tokens)
    expert = 3 * shape.hidden * shape.intermediate
    bytes_moved = 2 * (hit * expert + 2 * shape.tokens * shape.hidden)
    flops = 2 * shape.tokens * shape.top_k * expert
    return max(bytes_moved / ceilings[0], flops / ceilings[1]) * 1e6


def show(shape: Shape) -> None:
    """Prints what runs where, the error and the times of one shape."""
    print(f"\n== {shape}", flush=True)
    inputs, top_k, floor = make_inputs(shape), shape.top_k, floor_us(shape)
    print(jaxmoe.explain(functools.partial(jaxmoe_layer, top_k=top_k), *inputs, inputs[0]))
    for name, layer in (("jaxmoe", jaxmoe_layer), ("jax.lax.ragged_dot", ragged_dot_layer)):
        error, us = relative_error(layer, inputs, top_k), microseconds(layer, inputs, top_k)
        time_us = "out of memory" if us is None else f"{us:10.1f} us"
        print(f"{name:20s} {time_us:13s}   relative error {error:.1e}", flush=True)
    print(f"{'floor':20s} " + (f"{floor:10.1f} us" if floor else "   unknown for this device"))


if __name__ == "__main__":
    print(f"jax {jax.__version__} on {len(jax.devices())} x {jax.devices()[0].device_kind}")
    for shape in (SMALL, *(REAL if jax.default_backend() == "gpu" else ())):
        show(shape)
