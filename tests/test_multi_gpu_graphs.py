"""dispatch="direct" in CUDA graphs: replays, memory that is closed and opened again, failures."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import expert_parallel
from jaxmoe._ep import direct
from jaxmoe._jax import targets
from jaxmoe._testing import assert_equal
from tests.test_multi_gpu_direct import (
    LOCAL,
    collectives_and_kernels,
    drawn,
    mesh,
    opened,
    over_devices,
)
from tests.test_multi_gpu_pushed import LAYER, PUSHED
from tests.test_multi_gpu_pushed import drawn as drawn_layer

pytestmark = pytest.mark.multi_gpu

DISPATCH, COMBINE = "jaxmoe_peer_dispatch_v1", "jaxmoe_peer_combine_v1"
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}
# The same programs, of which no part is long enough for a graph.
NO_GRAPHS = {**GRAPHS, "xla_gpu_graph_min_graph_size": 1_000_000}
LAYERS = 6
IN_A_STEP = 4  # whole layers


def chain(way, slots, tokens, small):
    """Layers without experts, each of which follows the one before."""
    x = tokens
    for i in range(LAYERS):
        mine = jnp.where(slots >= 0, (slots + i) % (way.num_devices * LOCAL), -1)
        all_slots, rows, more = direct.send(way, mine, x, small)
        rows = rows * (1.0 + jax.lax.axis_index("expert").astype(jnp.float32)) + more[:, :1]
        x = jnp.tanh(direct.bring(way, mine, all_slots, rows.astype(x.dtype), x))
    return x


def program(way):
    split = over_devices(lambda *given: chain(way, *given))
    return jax.jit(split, compiler_options=GRAPHS)


def runs():
    return [targets.execute_count(name) for name in (DISPATCH, COMBINE)]


@pytest.mark.parametrize("num_tokens", (5, 256, 700))
def test_a_graph_is_replayed_and_finds_memory_that_was_opened_again(num_tokens):
    """Rows in pairs, in lines and in chunks."""
    arrays = drawn(num_tokens, 512, 4, "float32")
    more = drawn(num_tokens, 512, 4, "float32", seed=1)
    given = [jax.device_put(a, NamedSharding(mesh(), P("expert"))) for a in arrays]
    others = [jax.device_put(a, NamedSharding(mesh(), P("expert"))) for a in more]
    with opened(1 << 28) as memory:
        by_collectives, way = collectives_and_kernels(memory)
        want, want_others = (jax.device_get(program(by_collectives)(*a)) for a in (given, others))
        run = program(way)
        for _ in range(3):
            assert_equal(jax.device_get(run(*given)), want)
        recorded = runs()
        out = None
        for _ in range(20):
            del out
            out = run(*given)
        assert_equal(jax.device_get(out), want)
        assert runs()[0] - recorded[0] < 10 * LAYERS * len(jax.devices("cuda"))
        assert_equal(jax.device_get(run(*others)), want_others)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no peer memory 'expert' is open"):
        jax.block_until_ready(run(*given))
    for num_bytes in (1 << 27, 1 << 28):
        with opened(num_bytes):
            assert_equal(jax.device_get(run(*given)), want)


@pytest.mark.parametrize("num_tokens", (5, 700))
def test_a_step_that_failed_in_a_graph_is_an_error_of_the_next_run(num_tokens):
    slots, tokens, _ = drawn(num_tokens, 64, 2, "bfloat16")
    count = len(slots) // len(jax.devices("cuda"))

    def alone(way, place, slots, tokens):
        all_slots, rows = direct.peer_dispatch_p(place, slots, tokens, None, way=way)
        return rows + all_slots[:1, :1].astype(rows.dtype)

    with opened(timeout_s=0.5) as memory:
        way = collectives_and_kernels(memory)[1]
        run = jax.jit(lambda *a: alone(way, *a), compiler_options=GRAPHS)
        given = jax.device_put((np.int32(0), slots[:count], tokens[:count]), jax.devices("cuda")[0])
        assert np.isnan(np.asarray(run(*given), np.float32)).all()
        for _ in range(2):
            message = "device 0 of expert waited 500 ms for device [1-9] in step 1"
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(run(*given))


def test_a_device_that_comes_late_is_waited_for_whatever_the_others_load():
    """One host thread sleeps; behind the step lie kernels that no GPU has loaded, and memory."""
    arrays = drawn(16, 256, 2, "float32")

    def wait(index):
        if index == 0:
            time.sleep(3)
        return np.float32(0)

    def late(way, slots, tokens, small):
        index = jax.lax.axis_index("expert")
        zero = io_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), index)

        def step(x, _):
            y = chain(way, slots, x, small)
            return jnp.linalg.qr(y @ y.T)[0] @ y, None

        return jax.lax.scan(step, tokens + zero, None, length=20)[0]

    with opened() as memory:
        _, way = collectives_and_kernels(memory)
        split = jax.shard_map(
            lambda *a: late(way, *a),
            mesh=mesh(),
            in_specs=P("expert"),
            out_specs=P("expert"),
            check_vma=False,
        )
        run = jax.jit(split, compiler_options=GRAPHS)
        outs = [jax.device_get(run(*arrays)) for _ in range(2)]
        assert_equal(*outs)
        assert np.isfinite(outs[0]).all()


def one_layer(dispatch, number, x, ids, weights, experts, **options):
    """A layer whose choices are those of its number, a [] int32."""
    chosen = jnp.where(ids >= 0, (ids + number) % LAYER.num_experts, -1)
    return expert_parallel.moe_mlp(
        *(x, jaxmoe.Routing(chosen, weights), experts),
        axis_name="expert",
        dispatch=dispatch,
        batch_invariant=True,
        **options,
    )


def walk(steps, tokens, ids, weights, experts, **of_layer):
    """Layers by `direct`, each of what the one before gave: what all of them took, and gave.

    No collective is between them, which would end a graph.
    """

    def step(x, i):
        taken, given = [], []
        for j in range(IN_A_STEP):
            number = IN_A_STEP * i + j
            y = one_layer("direct", number, x, ids, weights, experts, **of_layer)
            taken.append(x)
            given.append(y)
            y = y.astype(jnp.float32)
            largest = jnp.maximum(jnp.max(jnp.abs(y), axis=1, keepdims=True), 1e-30)
            x = (tokens.astype(jnp.float32) + y / largest).astype(x.dtype)
        return x, (jnp.stack(taken, axis=1), jnp.stack(given, axis=1))

    _, (taken, given) = jax.lax.scan(step, tokens, jnp.arange(steps, dtype=jnp.int32))
    return [a.swapaxes(0, 1) for a in (taken, given)]  # [T, steps, layers, H]


def walk_of(steps, options, **of_layer):
    split = over_devices(functools.partial(walk, steps, **of_layer))
    return jax.jit(split, compiler_options=options)


def again(dispatch, tokens, *rest):
    """What each layer gives of what it took in `walk`."""

    def step(_, numbered):
        number, x = numbered
        return None, one_layer(dispatch, number, x, *rest)

    by_layer = tokens.reshape(tokens.shape[0], -1, tokens.shape[-1]).swapaxes(0, 1)
    numbers = jnp.arange(by_layer.shape[0], dtype=jnp.int32)
    _, ys = jax.lax.scan(step, None, (numbers, by_layer))
    return ys.swapaxes(0, 1).reshape(tokens.shape)


def inputs_of_layers(num_tokens, seed=0):
    a = drawn_layer(num_tokens)
    experts = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")
    moved = (np.roll(a[name], seed, axis=0) for name in ("x", "expert_ids", "weights"))
    split = NamedSharding(mesh(), P("expert"))
    return jax.device_put((*moved, experts), split)


@pytest.mark.parametrize("num_tokens", (5, 700))
def test_whole_layers_in_graphs_have_the_bits_of_those_without(num_tokens):
    """Tokens and choices differ from replay to replay, in a loop and from call to call."""
    steps, calls = 25, 4
    with opened(1 << 28):
        given = [inputs_of_layers(num_tokens, seed) for seed in range(calls)]
        plain = walk_of(steps, NO_GRAPHS)
        assert PUSHED in plain.lower(*given[0]).as_text()
        want = [jax.device_get(plain(*a)) for a in given]
        run = walk_of(steps, GRAPHS)
        before = targets.execute_count(PUSHED)
        outs = [run(*a) for a in given]  # all are under way
        for got, wanted in zip(outs, want, strict=True):
            jax.tree.map(assert_equal, jax.device_get(got), wanted)
        layers = calls * steps * IN_A_STEP * len(jax.devices("cuda"))
        assert targets.execute_count(PUSHED) - before < layers // 2  # the others were replayed


@pytest.mark.parametrize("num_tokens", (6, 300))
def test_a_thousand_layers_in_a_row(num_tokens):
    """Each is that of collectives on what it took, and a second run has the bits of the first."""
    given = inputs_of_layers(num_tokens)
    with opened(1 << 28):
        run = walk_of(250, GRAPHS)
        outs = [run(*given) for _ in range(2)]  # both are under way
        by_collectives = functools.partial(again, "all_to_all")
        want = jax.jit(over_devices(by_collectives))(outs[0][0], *given[1:])
        first, other = jax.device_get(outs)
    jax.tree.map(assert_equal, first, other)
    got, want = (np.asarray(a, np.float32) for a in (first[1], jax.device_get(want)))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("options", (GRAPHS, NO_GRAPHS), ids=("graphs", "no graphs"))
def test_layers_in_chunks_in_a_row(options):
    """200 of two chunks, whose calls do not depend on each other: the bits of whole layers."""
    given = inputs_of_layers(48)
    with opened(1 << 28):
        taken, got = walk_of(50, options, num_chunks=2)(*given)
        want = jax.jit(over_devices(functools.partial(again, "direct")))(taken, *given[1:])
        got, want = jax.device_get((got, want))
    assert np.isfinite(got.astype(np.float32)).all()
    assert_equal(got, want)


def test_gradients_in_a_row():
    """Of 50 layers in two chunks, with other choices each; what travels either way is in graphs."""

    def steps(dispatch, tokens, ids, weights, experts):
        def loss(moving, number):
            x, weights, experts = moving
            given = dispatch, number, x, ids, weights, experts
            y = one_layer(*given, num_chunks=2, recompute="z")
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        def step(total, number):
            x, weights_of, of_experts = jax.grad(loss)((tokens, weights, experts), number)
            add = lambda a, b: a + b.astype(jnp.float32)  # noqa: E731
            return jax.tree.map(add, total, of_experts), (x, weights_of)

        zeros = jax.tree.map(lambda w: 0 * w.astype(jnp.float32), experts)
        total, per_token = jax.lax.scan(step, zeros, jnp.arange(50, dtype=jnp.int32))
        return total, [a.swapaxes(0, 1) for a in per_token]

    given = inputs_of_layers(48)
    by = lambda way: over_devices(functools.partial(steps, way))  # noqa: E731
    with opened(1 << 28):
        run = jax.jit(by("direct"), compiler_options=GRAPHS)
        outs = [run(*given) for _ in range(2)]  # both are under way
        want = jax.device_get(jax.jit(by("all_to_all"))(*given))
        first, other = jax.device_get(outs)
    jax.tree.map(assert_equal, first, other)
    for ours, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(want), strict=True):
        ours, theirs = (np.asarray(a, np.float32) for a in (ours, theirs))
        limit = 2**-5 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=2**-5, atol=limit)
