"""The exchange beside products on two GPUs or more: the bits of all_to_all, among other steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe._ep import beside, direct
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal, poison
from tests.test_multi_gpu_direct import LOCAL, mesh, opened
from tests.test_multi_gpu_direct import drawn as drawn_slots
from tests.test_multi_gpu_pushed import drawn, split

pytestmark = pytest.mark.multi_gpu

BESIDE = "jaxmoe_peer_beside_moe_mlp_v1"
# Tiles are those of many rows; weights are read for each device whatever that takes.
call = functools.partial(split, batch_invariant=False)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(beside, "why_not", beside.no_call)
    poison((1 << 24,), jnp.float32)


def computed(fn, a):
    return jax.device_get(jax.jit(fn)(a))


def all_to_all(a, **options):
    return call(a, dispatch="all_to_all", **options)


def is_beside(fn, a):
    return BESIDE in jax.jit(fn).lower(a).as_text()


@pytest.mark.parametrize("format", (None, "fp8_block", "fp8_channel", "mxfp4", "int4_g128"))
@pytest.mark.parametrize("num_tokens", (997, 2500))
def test_the_bits_are_those_of_all_to_all(num_tokens, format):
    """With products that wait for the rows they fetch, and those for each device."""
    a = drawn(num_tokens, format=format)
    options = {"dispatch_format": format} if format in ("fp8_block", "fp8_channel") else {}
    ours, theirs = (functools.partial(fn, **options) for fn in (call, all_to_all))
    with opened():
        assert is_beside(ours, a)
        before = _targets.execute_count(BESIDE)
        first, again = computed(ours, a), computed(ours, a)
        assert _targets.execute_count(BESIDE) == before + 2 * len(jax.devices("cuda"))
    assert_equal(first, again)
    assert_equal(first, computed(theirs, a))


@pytest.mark.parametrize("kind", ("one_device", "none_on_one"))
def test_devices_with_all_choices_and_none(kind):
    a = drawn(1400, kind)
    with opened():
        assert is_beside(call, a)
        assert_equal(computed(call, a), computed(all_to_all, a))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_without_a_residual(dtype):
    a = {n: v for n, v in drawn(1300, dtype=dtype, top_k=2).items() if n != "residual"}
    with opened():
        assert is_beside(call, a)
        assert_equal(computed(call, a), computed(all_to_all, a))


def test_weights_on_the_input_in_chunks():
    a = drawn(2200, top_k=1)
    options = {"apply_weight_on_input": True, "num_chunks": 2}
    ours, theirs = (functools.partial(fn, **options) for fn in (call, all_to_all))
    with opened():
        assert is_beside(ours, a)
        assert_equal(computed(ours, a), computed(theirs, a))


def test_gradients_are_those_of_sums():
    a = {n: jnp.asarray(v) for n, v in drawn(1024).items()}
    floats = {n: v for n, v in a.items() if n != "expert_ids"}

    def loss(fn, floats):
        return jnp.sum(jnp.sin(fn({**floats, "expert_ids": a["expert_ids"]}).astype(jnp.float32)))

    with opened():
        ours = jax.jit(jax.grad(functools.partial(loss, call)))(floats)
        theirs = jax.jit(jax.grad(functools.partial(loss, all_to_all)))(floats)
    for name, got in jax.device_get(ours).items():
        want = np.asarray(theirs[name], np.float32)
        limit = 2**-6 * max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=limit, rtol=2**-6)


def test_among_steps_of_every_kind_and_number():
    """Rows of few tokens, rows that a product stores, and a dispatch that nothing comes home of.

    After one of those the next step is an even one, and tokens take an odd one.
    """
    many, few = drawn(1100), drawn(24)
    slots, tokens, small = drawn_slots(700, 512, 3, "float32")

    def sent(way, slots, tokens, small):
        return direct.send(way, slots, tokens, small)[1]

    with opened(1 << 28) as memory:
        ways = [direct.way_of("expert", LOCAL, memory)]
        ways.append(ways[0]._replace(memory=""))
        send, gather = (
            jax.jit(
                jax.shard_map(
                    functools.partial(sent, way),
                    mesh=mesh(),
                    in_specs=P("expert"),
                    out_specs=P("expert"),
                )
            )
            for way in ways
        )
        ours, theirs = jax.jit(call), jax.jit(all_to_all)
        want = [theirs(many), theirs(few), gather(slots, tokens, small)]
        rng = np.random.default_rng(0)
        found = []
        for kind in rng.integers(0, 3, 150):
            given = ((many,), (few,), (slots, tokens, small))[kind]
            found.append((kind, (ours, ours, send)[kind](*given)))
        for kind, got in found:
            if kind == 1:  # of one device, as rows go home
                got, wanted = (np.asarray(x, np.float32) for x in (got, want[1]))
                np.testing.assert_allclose(got, wanted, atol=2**-5, rtol=2**-5)
            else:
                assert_equal(jax.device_get(got), jax.device_get(want[kind]))


def test_layers_in_a_row_with_other_choices_each():
    """300 in programs of a hundred, of which none is a CUDA graph's; memory is opened again."""
    a = {n: jnp.asarray(v) for n, v in drawn(1024).items()}
    ids = a.pop("expert_ids")
    orders = jnp.asarray(
        np.random.default_rng(1).permuted(np.tile(np.arange(16), (100, 1)), axis=1)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def layers(fn, a, ids, orders):
        def layer(x, order):
            given = {**a, "x": x, "expert_ids": jnp.where(ids >= 0, order[ids], -1)}
            y = fn(given)
            return (y / jnp.maximum(jnp.abs(y).max(), 1)).astype(y.dtype), None

        return jax.lax.scan(layer, a["x"], orders.astype(jnp.int32))[0]

    want = jax.device_get(layers(all_to_all, a, ids, orders))
    for _ in range(3):
        with opened():
            assert_equal(jax.device_get(layers(call, a, ids, orders)), want)
