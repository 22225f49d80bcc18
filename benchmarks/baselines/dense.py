"""A dense MLP of the same FLOPs through `jnp.matmul`: the card's library, without experts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import chain
from benchmarks.cases import DTYPE
from benchmarks.models import Layer

NAME = "dense"
FP8_NAME = "dense[fp8]"

_FP8 = jnp.float8_e4m3fn


def layers(model: Layer, num_rows: int, count: int, seed: int) -> chain.Chain:
    """Builds `count` layers y = (y @ A) @ B with A [H, 1.5 I] (gated): the FLOPs of the experts.

    Layers feed each other within one execution; each execution starts again from the same rows,
    so that values neither grow nor die out.
    """
    width = (model.width + model.intermediate) // 2
    keys = jax.random.split(jax.random.key(seed), 2 * count + 1)

    def draw(key: jax.Array, rows: int, columns: int) -> jax.Array:
        return (jax.random.normal(key, (rows, columns)) * rows**-0.5).astype(DTYPE)

    pairs = tuple(
        (draw(keys[2 * i], model.hidden, width), draw(keys[2 * i + 1], width, model.hidden))
        for i in range(count)
    )
    rows = jax.random.normal(keys[-1], (num_rows, model.hidden), jnp.float32).astype(DTYPE)
    return chain.Chain(_compiled(), jnp.zeros_like(rows), (rows, pairs), count)


def training_layers(model: Layer, num_rows: int, count: int, seed: int) -> chain.Chain:
    """Builds `count` layers of those FLOPs, forward and backward, each with all its gradients."""
    width = (model.width + model.intermediate) // 2
    keys = jax.random.split(jax.random.key(seed), 2 * count + 2)

    def draw(key: jax.Array, rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(key, (rows, columns)) * scale).astype(DTYPE)

    x, ct = (draw(key, num_rows, model.hidden) for key in keys[-2:])
    arguments = [
        (
            x,
            draw(keys[2 * i], model.hidden, width, model.hidden**-0.5),
            draw(keys[2 * i + 1], width, model.hidden, width**-0.5),
            ct,
        )
        for i in range(count)
    ]
    return chain.independent(_with_gradients, arguments)


def _with_gradients(x: jax.Array, a: jax.Array, b: jax.Array, ct: jax.Array) -> Any:
    y, pull = jax.vjp(lambda x, a, b: (x @ a) @ b, x, a, b)
    return y, *pull(ct)


@functools.cache
def _compiled() -> Callable[[Any, Any], Any]:
    def run(_: jax.Array, inputs: Any) -> jax.Array:
        y, pairs = inputs
        for a, b in pairs:
            y = (y @ a) @ b
        return y

    return chain.compiled(run)


def fp8_layers(model: Layer, num_rows: int, count: int, seed: int) -> chain.Chain:
    """Builds `count` pairs of products of those FLOPs, e4m3 by e4m3 to bf16, for cuBLASLt.

    Weights have the contraction last, the only order that the tensor cores read FP8 in: with any
    other XLA would transpose them first. Both products read rows that are FP8 already: with the
    first feeding the second, a kernel that converts would be timed as well.
    """
    width = (model.width + model.intermediate) // 2
    keys = jax.random.split(jax.random.key(seed), 2 * count + 2)

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, DTYPE).astype(_FP8)

    rows = draw(keys[-1], num_rows, model.hidden), draw(keys[-2], num_rows, width)
    arguments = [
        (*rows, draw(keys[2 * i], width, model.hidden), draw(keys[2 * i + 1], model.hidden, width))
        for i in range(count)
    ]
    return chain.independent(fp8_pair, arguments)


def fp8_pair(x: jax.Array, h: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiplies x [R, H] by a [N, H], and h [R, N] by b [H, N], scales being 1."""

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        contracted = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(lhs, rhs, contracted, preferred_element_type=DTYPE)

    return product(x, a), product(h, b)


def products(lhs: jax.Array, k: int, n: int, count: int, seed: int) -> chain.Chain:
    """Builds `count` separate products [R, K] @ [K, N]."""
    keys = jax.random.split(jax.random.key(seed), count)
    weights = [(jax.random.normal(key, (k, n)) * k**-0.5).astype(DTYPE) for key in keys]
    return chain.independent(jnp.matmul, [(lhs, w) for w in weights])
