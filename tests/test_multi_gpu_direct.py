"""dispatch="direct" on two GPUs or more: a thousand steps, odd sizes, and a device that is late."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmoe import expert_parallel
from jaxmoe._ep import direct
from jaxmoe._testing import assert_equal, normal
from jaxmoe.finalize import sum_rows
from tests.test_direct import OF_TOKENS, layer_of_tokens

pytestmark = pytest.mark.multi_gpu

LOCAL = 4  # experts of a device


@functools.cache
def mesh():
    gpus = jax.devices("cuda")
    return jax.make_mesh((len(gpus),), ("expert",), axis_types=(AxisType.Auto,), devices=gpus)


def opened(num_bytes=1 << 26, timeout_s=30):
    return expert_parallel.open_peer_memory(
        mesh(), "expert", num_bytes=num_bytes, timeout_s=timeout_s
    )


def over_devices(fn):
    return jax.shard_map(fn, mesh=mesh(), in_specs=P("expert"), out_specs=P("expert"))


def drawn(num_tokens, hidden, top_k, dtype, seed=0):
    """Slots and tokens of all devices, and small numbers; some choices go nowhere."""
    rng, count = np.random.default_rng(seed), len(jax.devices("cuda"))
    slots = rng.integers(-1, count * LOCAL + 1, (count * num_tokens, top_k)).astype(np.int32)
    tokens = normal(rng, (count * num_tokens, hidden), jnp.float32).astype(dtype)
    return slots, tokens, rng.standard_normal((count * num_tokens, 5), np.float32)


def collectives_and_kernels(memory):
    way = direct.way_of("expert", LOCAL, memory)
    assert way.memory == "expert"
    return way._replace(memory=""), way


def there_and_back(way, slots, tokens, small):
    sent = direct.send(way, slots, tokens, small)
    return *sent, direct.bring(way, slots, sent[0], sent[1], tokens)


def by_both(memory, fn, *arrays):
    """Results of collectives, and of kernels."""
    return [
        jax.device_get(jax.jit(over_devices(functools.partial(fn, way)))(*arrays))
        for way in collectives_and_kernels(memory)
    ]


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize(
    "num_tokens, hidden, top_k",
    [
        *((1, 8, 1), (64, 7168, 8), (300, 2880, 40), (1100, 2880, 4)),
        # Few tokens and many, whose rows end at no whole piece.
        *(pytest.param(n, 257, 3, marks=pytest.mark.sanitizer) for n in (7, 1100)),
    ],
)
def test_rows_and_sums_are_those_of_collectives(num_tokens, hidden, top_k, dtype):
    with opened(1 << 28) as memory:
        arrays = drawn(num_tokens, hidden, top_k, dtype)
        jax.tree.map(assert_equal, *by_both(memory, there_and_back, *arrays))


@pytest.mark.parametrize("num_tokens", (48, 256, 1500))
def test_a_thousand_steps_with_other_choices_each(num_tokens):
    """In two programs by turns, beside a collective; rows in pairs, in lines, and in chunks."""
    count, steps = len(jax.devices("cuda")), 250
    slots, tokens, _ = drawn(num_tokens, 512, 4, "float32")

    def walk(way, shift, slots, tokens):
        def step(x, i):
            mine = jnp.where(slots >= 0, (slots + i * shift) % (count * LOCAL), -1)
            all_slots, rows, _ = direct.send(way, mine, x, x[:, :1])
            rows = rows * (1.0 + jax.lax.axis_index("expert").astype(jnp.float32))
            y = direct.bring(way, mine, all_slots, rows, None)
            largest = jax.lax.pmax(jnp.max(jnp.abs(y)), "expert")
            return y / jnp.maximum(largest, 1e-30) + tokens, None

        return jax.lax.scan(step, tokens, jnp.arange(steps, dtype=jnp.int32))[0]

    def program(way, shift):
        return jax.jit(over_devices(functools.partial(walk, way, shift)))

    with opened() as memory:
        by_collectives, by_kernels = collectives_and_kernels(memory)
        programs = [program(by_kernels, shift) for shift in (1, 3)]
        results = [programs[i % 2](slots, tokens) for i in range(4)]  # all are under way
        wanted = [program(by_collectives, shift)(slots, tokens) for shift in (1, 3)]
        for i, got in enumerate(results):
            assert_equal(jax.device_get(got), jax.device_get(wanted[i % 2]))


def test_rows_that_look_like_numbers_of_steps():
    """In pairs and in lines by turns, of many sizes, where rows of other steps have been."""
    sizes = ((64, 3584), (8, 32), (64, 2052), (3, 4096), (256, 1024), (30, 4), (100, 1792))
    rng, count = np.random.default_rng(0), len(jax.devices("cuda"))

    def rows_of(num_tokens, words):
        slots = rng.integers(-1, count * LOCAL, (count * num_tokens, 2)).astype(np.int32)
        return slots, rng.integers(0, 64, (count * num_tokens, words)).astype(np.uint32)

    def walk(way, *given):
        found = []
        for turn in range(8):
            for slots, rows in given:
                mine = jnp.where(slots >= 0, (slots + turn) % (count * LOCAL), -1)
                found.append(direct.send(way, mine, rows, None)[1])
        return found

    with opened(1 << 27) as memory:
        arrays = [rows_of(*size) for size in sizes]
        jax.tree.map(assert_equal, *by_both(memory, walk, *arrays))


def test_derivatives_are_those_of_collectives():
    slots, *arrays = drawn(32, 96, 3, "float32")

    def layer(way, slots, tokens, small):
        all_slots, rows, more = direct.send(way, slots, tokens, small)
        return direct.bring(way, slots, all_slots, jnp.sin(rows) * more[:, :1], tokens)

    def gradients(way, tokens, small):
        call = over_devices(functools.partial(layer, way))
        return jax.grad(lambda *a: jnp.sum(call(slots, *a) ** 2), argnums=(0, 1))(tokens, small)

    with opened() as memory:
        want, got = (
            jax.device_get(jax.jit(functools.partial(gradients, way))(*arrays))
            for way in collectives_and_kernels(memory)
        )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format, token_format, sent", OF_TOKENS)
@pytest.mark.parametrize("num_tokens", (6, 500))
def test_tokens_travel_in_the_format_of_tokens(num_tokens, format, token_format, sent):
    count = len(jax.devices("cuda"))
    over, by_one = layer_of_tokens(format, token_format, count * num_tokens)
    with opened():
        first, again, rounded_there, in_chunks = (
            jax.device_get(over(mesh(), dispatch="direct", dispatch_format=format, num_chunks=n))
            for format, n in ((sent, 1), (sent, 1), (None, 1), (sent, 2))
        )
    assert_equal(first, again)
    assert_equal(first, rounded_there)
    assert_equal(first, in_chunks)
    assert_equal(first, by_one())


def alone(way, place=0):
    """What the first GPU does of a dispatch, which says that it is device `place`."""
    slots, tokens, _ = drawn(4, 64, 2, "bfloat16")
    mine = jax.device_put((np.int32(place), slots[:4], tokens[:4]), jax.devices("cuda")[0])
    call = lambda *a: direct.peer_dispatch_p(*a, None, way=way)  # noqa: E731
    return jax.device_get(jax.jit(call)(*mine))


def test_a_device_that_does_not_come_is_named():
    count = len(jax.devices("cuda"))
    with opened(timeout_s=0.5) as memory:
        way = collectives_and_kernels(memory)[1]
        begin = time.monotonic()
        slots, rows = alone(way)
        # As long before it begins, for others whose operands may not be there yet.
        assert time.monotonic() - begin > 2 * 0.5
        assert rows.shape == (4 * count, 64) and np.isnan(rows.astype(np.float32)).all()
        assert (slots == -1).all()
        message = "device 0 of expert waited 500 ms for device [1-9] in step 1"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            alone(way)
    with opened() as memory:  # as new
        arrays = drawn(16, 128, 3, "bfloat16")
        jax.tree.map(assert_equal, *by_both(memory, there_and_back, *arrays))


def test_another_mesh_is_refused():
    with opened(timeout_s=1) as memory:
        way = collectives_and_kernels(memory)[1]
        assert np.isnan(alone(way, place=1)[1].astype(np.float32)).all()
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="device 0 of expert is device 1 of the program"
        ):
            alone(way)


def test_memory_that_is_closed_is_named():
    with opened() as memory:
        way = collectives_and_kernels(memory)[1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="no peer memory 'expert' is open"):
        alone(way)


def test_sums_are_in_the_order_of_devices():
    """Rows of one token that add up to other bits in another order."""
    count = len(jax.devices("cuda"))
    slots = np.tile(np.arange(count, dtype=np.int32) * LOCAL, (count, 1))
    parts = np.array([2.0**30, -(2.0**30), *[1.0] * 14], np.float32)[:count]
    rows = np.repeat(parts, count)[:, None] * np.ones((1, 4), np.float32)

    def add(way, slots, rows):
        all_slots = jax.lax.all_gather(slots, "expert", axis=0, tiled=True)
        return direct.bring(way, slots, all_slots, rows, jnp.zeros_like(rows[:1]) + 3.0)

    with opened() as memory:
        _, got = by_both(memory, add, slots, rows)
    one = np.tile(parts[:, None], (1, 4))
    want = sum_rows(jnp.asarray(one), jnp.arange(count)[None, :], jnp.full((1, 4), 3.0))
    assert_equal(got, np.tile(np.asarray(want), (count, 1)))
