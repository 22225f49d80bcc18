"""Tokens that come in the order of experts, on two GPUs or more: bits of a dispatch before them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe import GemmConfig, Routing
from jaxmoe._ep import beside, direct, ordered
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal, expert_ids, poison
from tests import layers
from tests.test_multi_gpu_direct import LOCAL, mesh, opened
from tests.test_multi_gpu_direct import drawn as drawn_slots
from tests.test_multi_gpu_pushed import drawn, split

pytestmark = pytest.mark.multi_gpu

ORDERED, PUSHED = "jaxmoe_peer_ordered_moe_mlp_v1", "jaxmoe_peer_moe_mlp_v1"
NO = "not asked for"
# Tiles that wait for rows, which few rows do not have.
WIDE = GemmConfig(256, 160, gather=True), GemmConfig(256, 160)
call = functools.partial(split, batch_invariant=False, config=WIDE)


@pytest.fixture(autouse=True)
def way(monkeypatch):
    """Takes the order of experts wherever it can be, or not at all."""

    def take(taken):
        monkeypatch.setattr(ordered, "why_not", ordered.no_call if taken else lambda *_: NO)

    monkeypatch.setattr(beside, "why_not", lambda *_: NO)
    take(True)
    poison((1 << 24,), jnp.float32)
    return take


def computed(fn, a):
    return jax.device_get(jax.jit(lambda a: fn(a))(a))


def is_ordered(fn, a):
    text = jax.jit(lambda a: fn(a)).lower(a).as_text()
    assert (ORDERED in text) != (PUSHED in text)
    return ORDERED in text


def same_bits(way, fn, a):
    """Runs it twice in the order of experts, and behind a dispatch."""
    with opened():
        assert is_ordered(fn, a)
        before = _targets.execute_count(ORDERED)
        first, again = computed(fn, a), computed(fn, a)
        assert _targets.execute_count(ORDERED) == before + 2 * len(jax.devices("cuda"))
        way(False)
        assert not is_ordered(fn, a)
        want = computed(fn, a)
        way(True)
    assert_equal(first, again)
    assert_equal(first, want)


@pytest.mark.parametrize("num_tokens", (30, 997, 2500))
def test_the_bits_are_those_of_a_dispatch(way, num_tokens):
    same_bits(way, call, drawn(num_tokens))


@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", (31, 2500))
def test_tokens_travel_in_fp8_with_scales(way, num_tokens):
    a = drawn(num_tokens, format="fp8_channel")
    same_bits(way, functools.partial(call, dispatch_format="fp8_channel"), a)


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ("one_device", "none_on_one"))
def test_devices_with_all_choices_and_none(way, kind):
    same_bits(way, call, drawn(700, kind))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_without_a_residual(way, dtype):
    a = {n: v for n, v in drawn(300, dtype=dtype, top_k=2).items() if n != "residual"}
    same_bits(way, call, a)


def test_weights_on_the_input_in_chunks(way):
    fn = functools.partial(call, apply_weight_on_input=True, num_chunks=2)
    a = drawn(600, top_k=1)
    with opened():
        got = computed(fn, a)
        way(False)
        assert_equal(got, computed(fn, a))


@pytest.mark.parametrize("num_experts", (48, 128))
def test_many_experts_in_three_parts(way, num_experts):
    """Of which some have all choices, as where routing is skewed."""
    rng = np.random.default_rng(num_experts)
    devices = len(jax.devices("cuda"))
    count, hidden, inner, top_k = devices * 1100, 256, 128, 6

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / 8, jnp.bfloat16)

    a = {
        "x": normal(count, hidden),
        "w1": normal(num_experts, hidden, 2 * inner),
        "w2": normal(num_experts, inner, hidden),
        "weights": jnp.asarray(rng.random((count, top_k), np.float32)),
    }

    def fn(a):
        routing = Routing(a["expert_ids"], a["weights"])
        options = {"mesh": mesh(), "axis_name": "expert", "gate_up": "interleaved"}
        given = a["x"], routing, a["w1"], a["w2"]
        return layers.sharded(*given, dispatch="direct", config=WIDE, **options)

    for kind in ("uniform", "zipf"):
        a["expert_ids"] = jnp.asarray(expert_ids(kind, rng, count, num_experts, top_k))
        same_bits(way, fn, a)


def test_gradients_are_those_of_sums(way):
    a = {n: jnp.asarray(v) for n, v in drawn(1024).items()}
    floats = {n: v for n, v in a.items() if n != "expert_ids"}

    def loss(floats):
        return jnp.sum(jnp.sin(call({**floats, "expert_ids": a["expert_ids"]}).astype("float32")))

    with opened():
        ours = jax.jit(jax.grad(lambda a: loss(a)))(floats)
        way(False)
        theirs = jax.jit(jax.grad(lambda a: loss(a)))(floats)
    for name, got in jax.device_get(ours).items():
        want = np.asarray(theirs[name], np.float32)
        limit = 2**-6 * max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=limit, rtol=2**-6)


def test_among_steps_of_every_kind_and_number(way):
    """Rows of a dispatch, and a dispatch that nothing comes home of.

    After one of those the next step is an even one, and tokens take an odd one.
    """
    many, few = drawn(1100), drawn(24)
    slots, tokens, small = drawn_slots(700, 512, 3, "float32")

    def sent(way, slots, tokens, small):
        return direct.send(way, slots, tokens, small)[1]

    with opened(1 << 28) as memory:
        send = jax.jit(
            jax.shard_map(
                functools.partial(sent, direct.way_of("expert", LOCAL, memory)),
                mesh=mesh(),
                in_specs=P("expert"),
                out_specs=P("expert"),
            )
        )
        ours = jax.jit(lambda a: call(a))
        way(True)
        assert is_ordered(call, many)
        first = ours(many)
        way(False)
        theirs = jax.jit(lambda a: call(a))
        want = [theirs(many), theirs(few), send(slots, tokens, small)]
        assert_equal(jax.device_get(first), jax.device_get(want[0]))
        rng = np.random.default_rng(0)
        found = []
        for kind in rng.integers(0, 3, 150):
            given = ((many,), (few,), (slots, tokens, small))[kind]
            found.append((kind, (ours, theirs, send)[kind](*given)))
        for kind, got in found:
            assert_equal(jax.device_get(got), jax.device_get(want[kind]))


def test_layers_in_a_row_with_other_choices_each(way):
    """300 in programs of a hundred, of which none is a CUDA graph's; memory is opened again."""
    a = {n: jnp.asarray(v) for n, v in drawn(1024).items()}
    ids = a.pop("expert_ids")
    orders = jnp.asarray(
        np.random.default_rng(1).permuted(np.tile(np.arange(16), (100, 1)), axis=1)
    )

    def layers_of(a, ids, orders):
        def layer(x, order):
            given = {**a, "x": x, "expert_ids": jnp.where(ids >= 0, order[ids], -1)}
            y = call(given)
            return (y / jnp.maximum(jnp.abs(y).max(), 1)).astype(y.dtype), None

        return jax.lax.scan(layer, a["x"], orders.astype(jnp.int32))[0]

    with opened():
        way(False)
        want = jax.device_get(jax.jit(lambda *a: layers_of(*a))(a, ids, orders))
    way(True)
    for _ in range(3):
        with opened():
            got = jax.device_get(jax.jit(lambda *a: layers_of(*a))(a, ids, orders))
            assert_equal(got, want)
