"""Suite `lora`: a layer with adapters of rank 16 beside the same without, frozen in each format."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from benchmarks import quantized
from benchmarks.cases import DTYPE, SCHEME, Case, Routed, reference_layer, relative_error
from benchmarks.models import Layer
from benchmarks.suites.entry import Entry
from benchmarks.suites.layer import layer_entry, moe_mlp, step
from benchmarks.suites.layer_packed import divides
from jaxmoe import lora

DEFAULT_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b")
DEFAULT_TOKENS = (256, 1024, 4096)
RANK = 16
_ARRAYS = ("gate_up", "down", "gate_up_bias", "down_bias")
# Implementation: format of the frozen weights.
FORMATS = {"jaxmoe": "bf16", "jaxmoe[int4_g128]": "int4_g128", "jaxmoe[mxfp4]": "mxfp4"}
ADAPTED = {impl: f"{impl}+lora" for impl in FORMATS}
Adapted = tuple[jaxmoe.Experts, lora.Adapters]


def adapted_moe_mlp(x: Any, r: Routed, w: Adapted, residual: Any) -> jax.Array:
    """Runs the layer with adapters."""
    routing = jaxmoe.Routing(r.expert_ids, r.weights)
    return lora.moe_mlp(x, routing, w[0], w[1], residual=residual)


def entries(case: Case) -> list[Entry]:
    """Returns the layer in each format that divides it, without adapters and with."""
    out: list[Entry] = []
    for impl, format in FORMATS.items():
        if format == SCHEME:
            frozen = functools.partial(getattr, case.sets, "nk")
            plain = layer_entry(case, "moe_mlp", impl, step(moe_mlp))
        elif divides(format, case.model.hidden) and divides(format, case.model.intermediate):
            frozen = functools.partial(quantized.weight_sets, case, format)
            of_weights = functools.partial(_without, case, frozen)
            plain = layer_entry(
                *(case, "moe_mlp", impl, step(moe_mlp)),
                sets=frozen,
                scheme=format,
                error=of_weights,
            )
        else:
            continue
        sets = functools.partial(_with_adapters, case.model, frozen)
        error = functools.partial(_error, case, sets)
        adapted = layer_entry(
            *(case, "moe_mlp", ADAPTED[impl], step(adapted_moe_mlp)),
            sets=sets,
            scheme=format,
            error=error,
        )
        out += [plain, adapted]
    return out


def _with_adapters(model: Layer, frozen: Callable[[], Any]) -> list[Adapted]:
    weights = frozen()
    return list(zip(weights, _adapters(model, len(weights)), strict=True))


@functools.cache
def _adapters(model: Layer, count: int) -> list[lora.Adapters]:
    """Adapters whose products are about as large as those of the weights."""
    shapes = (
        (model.hidden, RANK),
        (RANK, model.width),
        (model.intermediate, RANK),
        (RANK, model.hidden),
    )

    @jax.jit
    def drawn(key: jax.Array) -> lora.Adapters:
        keys = jax.random.split(key, len(shapes))
        return lora.Adapters(
            *(
                jax.random.normal(k, (model.num_experts, *shape), DTYPE) * shape[0] ** -0.5
                for k, shape in zip(keys, shapes, strict=True)
            )
        )

    return [drawn(key) for key in jax.random.split(jax.random.key(7), count)]


def _without(case: Case, frozen: Callable[[], Any], y: jax.Array) -> float:
    return quantized.error(case, y, frozen()[0], rounds_tokens=False)


def _error(case: Case, sets: Callable[[], list[Adapted]], y: jax.Array) -> float:
    """The relative error of sampled tokens for `case.fresh`."""
    x, r = case.fresh
    at = case.sample
    expected = _by_token(x[at], r.expert_ids[at], r.weights[at], *sets()[0])
    return relative_error(y[at], expected)


@jax.jit
def _by_token(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, w: jaxmoe.Experts, a: lora.Adapters
) -> jax.Array:
    def one(token: Any) -> jax.Array:
        x, ids, weights = token
        mine, adapters = (jax.tree.map(lambda leaf: leaf[ids], tree) for tree in (w, a))
        names = [n for n in _ARRAYS if getattr(mine, n) is not None]
        plain = {n: _plain(getattr(mine, n)) for n in names}
        wide = lora.merged(dataclasses.replace(mine, **plain), adapters)
        slots = jnp.arange(ids.size, dtype=jnp.int32)[None]
        return reference_layer(x[None], slots, weights[None], wide)[0]

    return jax.lax.map(one, (x, expert_ids, weights))


def _plain(w: Any) -> jax.Array:
    held = jaxmoe.dequantize(w) if isinstance(w, jaxmoe.QuantizedArray) else w
    return held.astype(jnp.float32)
