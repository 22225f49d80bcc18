"""moe_mlp(do_finalize=False) on a GPU: rows of every tile, transforms, one call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import GemmConfig, finalize, quantize_tokens
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import FP8 as FORMATS
from jaxmoe._testing import (
    SMALL,
    Layer,
    assert_equal,
    layer_inputs,
    normal,
    poison,
    quantized_inputs,
)
from tests.test_fp8_mlp import local
from tests.test_mlp import options, run
from tests.test_mlp_rows import TARGET, check_rows, trees, unfused


def check_on_gpu(inputs, window=None, **kwargs):
    poison((inputs["expert_ids"].size, inputs["x"].shape[1]), inputs["x"].dtype)
    fn = jax.jit(functools.partial(unfused, **(window or {}), **kwargs))
    out = fn(inputs)
    kwargs.pop("config", None)
    check_rows(out, inputs, window, **kwargs)
    jax.tree.map(assert_equal, fn(inputs), out)
    return out


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", (0, 1, 2, 9, 70, 700))
@pytest.mark.parametrize("name", SMALL)
def test_rows_on_gpu(name, num_tokens):
    """Both plan paths of the fused call give the bits of the one here."""
    layer = SMALL[name]
    for routing in ("uniform", "one_expert", "with_invalid"):
        rng = np.random.default_rng([num_tokens, len(routing)])
        inputs = layer_inputs(layer, num_tokens, routing, rng, jnp.bfloat16)
        kwargs = options(layer)
        out = check_on_gpu(inputs, **kwargs)
        fused = jax.jit(functools.partial(run, **kwargs))(inputs)
        assert_equal(jax.jit(finalize)(out.rows, out, out.weights), fused)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", (1, 300))
@pytest.mark.parametrize("gather", (False, True))
@pytest.mark.parametrize("tile", ((128, 8, 1, 2), (128, 32), (256, 160, 2)), ids=str)
def test_tiles_on_gpu(tile, gather, num_tokens):
    """Without gather the tokens lie in the result first: nothing of them may stay."""
    layer = Layer("", "", 72, 136, 9, 2, bias=True)
    rng = np.random.default_rng([*tile, gather])
    inputs = layer_inputs(layer, num_tokens, "with_invalid", rng, jnp.float16)
    local = {n: a[2:6] if n.startswith(("w_", "b_")) else a for n, a in inputs.items()}
    window = {"num_experts": 9, "expert_offset": 2}
    config = GemmConfig(*tile, gather=gather), GemmConfig(*tile)
    out = check_on_gpu(local, window, config=config)
    fused = jax.jit(functools.partial(run, config=config, **window))(local)
    assert_equal(jax.jit(finalize)(out.rows, out, out.weights), fused)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("top_k", (2, 3, 5, 8, 9))
@pytest.mark.parametrize("format", (None, *FORMATS))
def test_one_token_is_finalized_by_its_down_product(format, top_k):
    """A cluster adds up the rows of its CTAs: absent, of one expert, of all; past H nothing."""
    dtype = DTYPES[format] if format else (jnp.bfloat16, jnp.float16)[top_k % 2]
    tile = GemmConfig(128, 8)
    by_kernel = dict(config=(dataclasses.replace(tile, gather=True), tile))
    window = {"num_experts": 40, "expert_offset": 30}
    for hidden in (48, 1040):
        layer = Layer("", "", hidden, 144, 40, top_k, bias=True)
        for routing in ("uniform", "one_expert", "with_invalid"):
            rng = np.random.default_rng([hidden, top_k, len(routing)])
            if format is None:
                inputs = layer_inputs(layer, 1, routing, rng, dtype)
            else:
                inputs = quantized_inputs(layer, 1, routing, rng, dtype, format)
            residual = normal(rng, (1, hidden), dtype)
            for arrays, some in ((inputs, {}), (local(inputs, 30, 9), window)):
                rows = jax.jit(functools.partial(unfused, **by_kernel, **some))(arrays)
                for added in (None, residual):
                    poison((8, hidden), jnp.float32)
                    fn = jax.jit(functools.partial(run, **by_kernel, **some))
                    fused = fn(arrays | {"residual": added})
                    sums = jax.jit(finalize)(rows.rows, rows, rows.weights, residual=added)
                    assert_equal(fused, sums)
                weights = jnp.where(rows.slot_to_row < 0, jnp.nan, arrays["weights"])
                assert_equal(fn(arrays | {"residual": residual, "weights": weights}), fused)


@pytest.mark.gpu
def test_vmap_and_scan_on_gpu():
    layer = Layer("", "", 64, 64, 4, 2)
    inputs = trees(layer, 3, num_tokens=20, dtype=jnp.bfloat16)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *inputs)
    mapped = jax.jit(jax.vmap(unfused))(stacked)
    _, scanned = jax.jit(lambda s: jax.lax.scan(lambda c, i: (c, unfused(i)), 0, s))(stacked)
    for v, one in enumerate(inputs):
        want = unfused(one)
        for got in (mapped, scanned):
            jax.tree.map(lambda g, w, v=v: assert_equal(g[v], w), got, want)


@pytest.mark.gpu
def test_call_is_counted_on_gpu():
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, 7, "uniform", np.random.default_rng(8), jnp.bfloat16)
    before = _targets.execute_count(TARGET)
    jax.block_until_ready(unfused(inputs, **options(layer)))
    assert _targets.execute_count(TARGET) == before + 1


FP8_TARGET = "jaxmoe_moe_mlp_v1"
# Each with a dtype of its own; the others are the kernels' business, in test_gpu_fp8_mlp.py.
DTYPES = dict(zip(FORMATS, (jnp.bfloat16, jnp.float16, jnp.bfloat16), strict=True))


def check_fused(out, inputs, **kwargs):
    """`finalize` of the rows has the bits of the layer, which plans another way for few tokens."""
    fused = jax.jit(functools.partial(run, **kwargs))(inputs)
    assert_equal(jax.jit(finalize)(out.rows, out, out.weights), fused)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", (0, 1, 2, 9, 70, 700))
@pytest.mark.parametrize("format", FORMATS)
def test_fp8_rows_on_gpu(format, num_tokens):
    """All experts, and a device's: the other slots have no row, and nothing stays in their rows."""
    layer = Layer("", "", 144, 80, 9, 3, "geglu", "up_gate", bias=True)
    window = {"num_experts": 9, "expert_offset": 2}
    for routing in ("uniform", "one_expert", "with_invalid"):
        rng = np.random.default_rng([num_tokens, len(routing)])
        inputs = quantized_inputs(layer, num_tokens, routing, rng, DTYPES[format], format)
        kwargs = options(layer)
        for arrays, some in ((inputs, {}), (local(inputs, 2, 4), window)):
            out = check_on_gpu(arrays, some, **kwargs)
            check_fused(out, arrays, **some, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", (1, 300))
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tile", ((128, 8, 1, 2), (128, 32), (256, 160)), ids=str)
def test_fp8_tiles_on_gpu(tile, format, num_tokens):
    """Plain and quantized tokens, fetched by index or copied in expert order: the same rows."""
    if format == "fp8_block" and tile[0] == 256:
        tile = (256, 128)  # of sums that are promoted
    layer = Layer("", "", 272, 192, 9, 2, bias=True)
    rng = np.random.default_rng([*tile, num_tokens])
    inputs = quantized_inputs(layer, num_tokens, "with_invalid", rng, DTYPES[format], format)
    inputs = local(inputs, 2, 4)
    on_cpu = jax.device_put(inputs["x"], jax.devices("cpu")[0])
    q = jax.device_put(quantize_tokens(on_cpu, format), jax.devices()[0])
    window = {"num_experts": 9, "expert_offset": 2}
    outs = []
    for gather in (False, True) if tile != (256, 128) else (False,):
        config = GemmConfig(*tile, gather=gather), GemmConfig(*tile)
        outs.append(check_on_gpu(inputs, window, config=config))
        check_fused(outs[-1], inputs, config=config, **window)
        of_q = jax.jit(functools.partial(unfused, config=config, **window))(inputs | {"x": q})
        jax.tree.map(assert_equal, of_q, outs[-1])
    jax.tree.map(assert_equal, outs[0], outs[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", (1, 40))
def test_fp8_static_scales_and_weight_on_input_on_gpu(num_tokens):
    layer = Layer("", "", 144, 80, 6, 1)
    rng = np.random.default_rng(num_tokens)
    inputs = quantized_inputs(layer, num_tokens, "uniform", rng, jnp.bfloat16, "fp8_tensor")
    scale = jnp.asarray(rng.uniform(0.002, 0.01, 6), jnp.float32)
    kwargs = {"x_scale": jnp.float32(0.005), "intermediate_scale": scale}
    check_fused(check_on_gpu(inputs, **kwargs), inputs, **kwargs)
    kwargs |= {"apply_weight_on_input": True, "batch_invariant": True}
    out = jax.jit(functools.partial(unfused, **kwargs))(inputs)
    assert_equal(out.weights, jnp.ones_like(out.weights))
    check_fused(out, inputs, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS[1:])
def test_fp8_rows_of_a_token_do_not_depend_on_its_batch(format):
    layer = Layer("", "", 2176, 256, 8, 2)
    rng = np.random.default_rng(9)
    inputs = quantized_inputs(layer, 700, "with_invalid", rng, DTYPES[format], format)
    invariant = jax.jit(functools.partial(unfused, batch_invariant=True))
    of_slots = lambda out, count: out.rows[out.slot_to_row[:count]]  # noqa: E731
    whole = invariant(inputs)
    for count in (1, 2, 15, 200):
        per_token = ("x", "expert_ids", "weights")
        part = invariant({n: a[:count] if n in per_token else a for n, a in inputs.items()})
        there = part.slot_to_row >= 0
        assert_equal(of_slots(part, count)[there], of_slots(whole, count)[there])


@pytest.mark.gpu
@pytest.mark.parametrize("format", ("fp8_tensor", "fp8_block"))
def test_fp8_vmap_and_scan_on_gpu(format):
    """Examples in one call, or in a loop where each has a scale of its own."""
    layer = Layer("", "", 144, 80, 4, 2, bias=True)
    rng = np.random.default_rng(10)
    inputs = quantized_inputs(layer, 20, "with_invalid", rng, jnp.bfloat16, format)
    per_token = {n: inputs[n] for n in ("x", "expert_ids", "weights")}
    stacked = jax.tree.map(lambda a: jnp.stack([a, a[::-1], jnp.roll(a, 3, 0)]), per_token)
    fn = lambda tokens: unfused(inputs | tokens)  # noqa: E731
    mapped = jax.jit(jax.vmap(fn))(stacked)
    _, scanned = jax.jit(lambda s: jax.lax.scan(lambda c, t: (c, fn(t)), 0, s))(stacked)
    for v in range(3):
        want = jax.jit(fn)(jax.tree.map(lambda a, v=v: a[v], stacked))
        for got in (mapped, scanned):
            jax.tree.map(lambda g, w, v=v: assert_equal(g[v], w), got, want)


@pytest.mark.gpu
def test_fp8_call_is_counted_on_gpu():
    layer = Layer("", "", 144, 80, 4, 2)
    rng = np.random.default_rng(11)
    inputs = quantized_inputs(layer, 7, "uniform", rng, jnp.bfloat16, "fp8_block")
    before = _targets.execute_count(FP8_TARGET)
    jax.block_until_ready(unfused(inputs))
    assert _targets.execute_count(FP8_TARGET) == before + 1
