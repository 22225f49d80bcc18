"""moe_mlp(do_finalize=False) on a GPU: rows of every tile, transforms, one call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import GemmConfig, _targets, finalize
from jaxmoe._testing import SMALL, Layer, assert_equal, layer_inputs, poison
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
