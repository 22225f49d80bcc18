"""FP8 weights of a case, made from its bf16 ones, and what the layer should give with them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from benchmarks.cases import (
    DTYPE,
    WEIGHT_BYTES,
    Case,
    WeightSets,
    reference_layer,
    relative_error,
    turned,
)
from benchmarks.models import Layer, layer_bytes
from jaxmoe._testing import assert_close
from jaxmoe.activation import resolve, split_gate_up

SCHEME = "fp8"
_SHARE = 4  # of `WEIGHT_BYTES`: three formats lie next to both layouts of the bf16 weights
_LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)


def count(sets: WeightSets, model: Layer) -> int:
    """Returns how many distinct layers there are in each format, at most those of `sets`."""
    fitting = WEIGHT_BYTES // _SHARE // layer_bytes(model, SCHEME)
    return max(1, min(len(sets), fitting))


def weight_sets(case: Case, format: str) -> Sequence[jaxmoe.Experts]:
    """Returns the first layers of a case in a format; made once for all cases of a model."""
    made = case.sets.quantized
    if format not in made:
        made[format] = [_quantized(w, format) for w in case.sets[: count(case.sets, case.model)]]
    return made[format]


def of(w: jaxmoe.Experts, format: str) -> jaxmoe.Experts:
    """Returns experts in checkpoint order in a format."""
    return _quantized(turned(w), format)


@functools.partial(jax.jit, static_argnames="format")
def _quantized(w: jaxmoe.Experts, format: str) -> jaxmoe.Experts:
    # One expert at a time: a second layer of deepseek-v3 in bf16 would not fit next to the rest.
    def one(matrix: jax.Array) -> jaxmoe.QuantizedArray:
        return jaxmoe.quantize(matrix.T[None], format, weight_layout="nk")

    def stacked(matrices: jax.Array) -> jaxmoe.QuantizedArray:
        q = jax.lax.map(one, matrices)
        return jax.tree.map(lambda a: a.reshape(a.shape[0], *a.shape[2:]), q)

    return dataclasses.replace(w, gate_up=stacked(w.gate_up), down=stacked(w.down), layout="nk")


def with_static_scales(case: Case) -> Sequence[jaxmoe.Experts]:
    """Returns the layers in fp8_tensor with scales of the data's maxima.

    The data are those of the check, so that dynamic scales are the same numbers there.
    """
    sets = weight_sets(case, "fp8_tensor")
    x, r = case.fresh
    x_scale, h_scale = _scales(x, r.expert_ids, sets[0])
    return [dataclasses.replace(w, x_scale=x_scale, h_scale=h_scale) for w in sets]


@jax.jit
def _scales(x: jax.Array, expert_ids: jax.Array, w: jaxmoe.Experts) -> tuple[jax.Array, jax.Array]:
    """Returns the scales of x and of the activation's result, the latter by every row of it."""
    q, act = jaxmoe.quantize_tokens(x, "fp8_tensor"), resolve(w.activation)
    tokens = q.values.astype(DTYPE)  # exact, and products of such numbers are exact in float32

    def step(largest: jax.Array, item: Any) -> tuple[jax.Array, None]:
        expert, values, scale, bias = item
        z = jax.lax.dot_general(
            tokens,
            values.astype(DTYPE),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        z = z * (q.scales * scale)
        if bias is not None:
            z = z + bias[None, :].astype(jnp.float32)
        h = act(*split_gate_up(z, w.order)) if act.gated else act(z)
        mine = (expert_ids == expert).any(axis=1, keepdims=True)
        h = jnp.where(mine, jnp.abs(h.astype(x.dtype)), 0)
        return jnp.maximum(largest, h.max().astype(jnp.float32)), None

    experts = jnp.arange(w.num_experts, dtype=expert_ids.dtype)
    items = experts, w.gate_up.values, w.gate_up.scales, w.gate_up_bias
    largest, _ = jax.lax.scan(step, jnp.zeros((), jnp.float32), items)
    return q.scales, jnp.maximum(largest / _LARGEST, 2.0**-126)


def error(case: Case, y: jax.Array, w: jaxmoe.Experts, *, rounds_tokens: bool = True) -> float:
    """Checks sampled tokens of the output for `fresh` by the tests' rule.

    Args:
      y: what an implementation made of `case.fresh`.
      w: its weights; in fp8_tensor with the scales that are static or should come out.
      rounds_tokens: False where the weights alone are quantized, and multiplied in bf16.

    Returns:
      The relative error.

    Raises:
      AssertionError: as `jaxmoe._testing.assert_close`.
    """
    x, r = case.fresh
    at = case.sample
    inputs = x[at], r.expert_ids[at], r.weights[at], w
    exact, naive = (_reference(*inputs, dtype, rounds_tokens) for dtype in (jnp.float32, DTYPE))
    assert_close(y[at], exact, naive)
    return relative_error(y[at], exact)


@functools.partial(jax.jit, static_argnames=("dtype", "rounds_tokens"))
def _reference(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w: jaxmoe.Experts,
    dtype: Any,
    rounds_tokens: bool,
) -> jax.Array:
    scales = {"x_scale": w.x_scale, "h_scale": w.h_scale}
    stacked = dataclasses.replace(w, x_scale=None, h_scale=None)  # the rest has an expert axis

    def one(token: Any) -> jax.Array:
        x, ids, weights = token
        mine = jax.tree.map(lambda a: a[ids], stacked)
        first, down = mine.gate_up, mine.down
        if not rounds_tokens:
            first, down = jaxmoe.dequantize(first), jaxmoe.dequantize(down)
        mine = dataclasses.replace(mine, gate_up=first, down=down, token_format=None, **scales)
        if w.token_format is not None:
            return weights @ _of_rounded_tokens(x, mine, w.token_format, dtype)
        slots = jnp.arange(ids.size, dtype=jnp.int32)[None]
        return reference_layer(x[None], slots, weights[None], mine, dtype=dtype)[0]

    return jax.lax.map(one, (x, expert_ids, weights))


def _of_rounded_tokens(x: jax.Array, w: jaxmoe.Experts, token_format: str, dtype: Any) -> jax.Array:
    """Returns the rows [K, H] float32 of a token for experts with plain weights of layout "nk".

    `token_format` rounds x and the activation's results, each by itself.
    """
    name = {"e4m3": "fp8_channel"}.get(token_format, token_format)
    act = resolve(w.activation)

    def product(tokens: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
        rounded = jaxmoe.dequantize(jaxmoe.quantize_tokens(tokens, name), dtype=jnp.float32)
        spread = jnp.broadcast_to(rounded, (weights.shape[0], weights.shape[2]))
        y = jnp.einsum(
            "ek,enk->en",
            spread.astype(dtype),
            weights.astype(dtype),
            preferred_element_type=jnp.float32,
        )
        return y if bias is None else y + bias.astype(jnp.float32)

    z = product(x[None], w.gate_up, w.gate_up_bias)
    h = act(*split_gate_up(z, w.order)) if act.gated else act(z)
    return product(h.astype(x.dtype), w.down, w.down_bias)
