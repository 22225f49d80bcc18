"""The tile that multiplies codes of int4 weights as they are: which layers have it on CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import (
    Experts,
    GemmConfig,
    Routing,
    autotuning,
    expert_batches,
    expert_rows,
    explain,
    moe_mlp,
    quantize_tokens,
)
from jaxmoe._gemm.tiles import CODED
from jaxmoe._jax import targets as _targets

E, K, H, INTER = 4, 2, 128, 256
MANY = 400  # tokens, of which each expert usually has more than tiles that decode take
TILE = (GemmConfig(*next(iter(CODED))),) * 2


@functools.cache
def experts(format="int4_g128", token_format="e4m3", dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal(s), dtype) for s in ((E, H, 2 * INTER), (E, INTER, H))
    ]
    plain = Experts(gate_up=arrays[0], down=arrays[1])
    return jax.jit(lambda e: e.quantized(format, token_format=token_format))(plain)


def tokens(count, dtype=jnp.bfloat16):
    ids = np.stack([np.random.default_rng(i).permutation(E)[:K] for i in range(count)])
    weights = jnp.full((count, K), 0.5, jnp.float32)
    return jnp.ones((count, H), dtype), Routing(jnp.asarray(ids, jnp.int32), weights, E)


def tiles(call, *args):
    """The op and the tiles of each CUDA call, or the tile of each product that is one."""
    found = []
    with _targets.force_cuda_lowering():
        for op in explain(call, *args).ops:
            attrs = op.cuda_attrs or {}
            for name in ("gemm1", "gemm2", "config"):
                if name in attrs:
                    found.append((op.op, (attrs[name]["weight_tile"], attrs[name]["token_tile"])))
    return found


def coded(call, *args):
    """Whether each product of the one call of a layer multiplies codes."""
    found = tiles(call, *args)
    assert [op for op, _ in found] == ["jaxmoe_moe_mlp"] * 2, found
    return [tile == TILE[0].tile[:2] for _, tile in found]


def test_layers_of_many_rows_have_it():
    assert coded(moe_mlp, *tokens(MANY), experts()) == [True, True]
    assert coded(expert_rows, *tokens(MANY), experts()) == [True, True]
    assert coded(moe_mlp, *tokens(100), experts()) == [False, False]
    assert coded(functools.partial(moe_mlp, config=TILE), *tokens(5), experts()) == [True, True]
    one = functools.partial(moe_mlp, config=(GemmConfig(128, 16, gather=True), TILE[0]))
    assert coded(one, *tokens(5), experts()) == [False, True]


def test_others_decode():
    fixed = functools.partial(moe_mlp, batch_invariant=True)
    assert coded(fixed, *tokens(MANY), experts()) == [False, False]
    for other in (
        experts("int4_g128_zp"),
        experts("int4_g128", None),
        experts("mxfp4"),
        experts("int4_g64", None),
    ):
        assert coded(moe_mlp, *tokens(MANY), other) == [False, False]
        with pytest.raises(ValueError, match=r"config\[0\]: the tile \(256, 128, 1, 1\) must be"):
            moe_mlp(*tokens(MANY), other, config=TILE)
    half = experts(dtype=jnp.float16)
    assert coded(moe_mlp, *tokens(MANY, jnp.float16), half) == [False, False]


def test_refused_where_products_are_calls_of_their_own():
    x, routing = tokens(MANY)
    refuses = functools.partial(pytest.raises, ValueError, match=r"config\[0\]: the tile \(256, 12")
    with refuses():
        moe_mlp(quantize_tokens(x, "fp8_channel"), routing, experts(), config=TILE)
    own = dataclasses.replace(experts(), activation=lambda gate, up: gate * jnp.tanh(up))
    with refuses():
        moe_mlp(x, routing, own, config=TILE)
    with refuses():
        expert_batches(jnp.ones((E, 8, H), x.dtype), jnp.ones(E, jnp.int32), experts(), config=TILE)


@pytest.mark.parametrize(
    ("call", "split"),
    [
        *((moe_mlp, split) for split in ("experts and tokens", "experts", "tokens", "first")),
        (functools.partial(moe_mlp, gather_weights=()), "experts and tokens"),
        *((expert_rows, split) for split in ("experts", "first")),
    ],
)
def test_products_of_a_divided_layer(call, split):
    """Asked for, it is left to the products that are one call; those apart have another tile.

    So has one call whose tokens are sent to it quantized.
    """
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))  # noqa: E731
    x, routing = tokens(MANY)
    e = experts()
    parts = {"experts and tokens": ("a",), "experts": ("a",), "first": (None, "a")}
    with jax.set_mesh(mesh):
        first, down = (
            dataclasses.replace(w, values=place(w.values, *s), scales=place(w.scales, *s[:1]))
            for w, s in ((e.gate_up, parts.get(split, ())), (e.down, parts.get(split, ())[:1]))
        )
        e = dataclasses.replace(e, gate_up=first, down=down)
        of_tokens = ("a",) if "tokens" in split else ()
        x = place(x, *of_tokens)
        routing = jax.tree.map(lambda a: place(a, *of_tokens), routing)
        found = tiles(functools.partial(call, config=TILE), x, routing, e)
    assert found
    sends = isinstance(call, functools.partial)
    for op, tile in found:
        assert (op == "jaxmoe_moe_mlp" and not sends) or tile != TILE[0].tile[:2], found


def test_autotune_measures_it_where_it_may_be():
    x, routing = tokens(MANY)
    quantized = quantize_tokens(x, "fp8_channel")
    for given, e, there in (
        (x, experts(), True),
        (quantized, experts(), False),
        (x, experts("int4_g128", None), False),
    ):
        measured = set()

        def timer(a, layer, measured=measured):
            del a, layer
            return lambda pairs: measured.update(pairs) or dict.fromkeys(pairs, 1.0)

        with _targets.force_cuda_lowering():
            autotuning.tune(autotuning.problems(moe_mlp, given, routing, e), timer)
        for which in (0, 1):
            having = {pair for pair in measured if pair[which].tile in CODED}
            assert bool(having) == there
            assert not any(config.gather and config.tile in CODED for config, _ in having)


def test_measured_for_plain_tokens_it_is_not_for_quantized_ones():
    x, routing = tokens(MANY)
    quantized = quantize_tokens(x, "fp8_channel")
    with _targets.force_cuda_lowering():
        (problem,) = autotuning.problems(moe_mlp, x, routing, experts())
        (other,) = autotuning.problems(moe_mlp, quantized, routing, experts())
    assert other == dataclasses.replace(problem, given=True)
    result = autotuning.AutotuningResult("any", ((problem, ((TILE, 1.0),)),))
    with result:
        assert coded(moe_mlp, x, routing, experts()) == [True, True]
        assert coded(moe_mlp, quantized, routing, experts()) == [False, False]
    plain = experts("int4_g128", None)
    with _targets.force_cuda_lowering():
        (plainly,) = autotuning.problems(moe_mlp, x, routing, plain)
    assert not plainly.given
