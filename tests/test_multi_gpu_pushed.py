"""dispatch="direct" whose second product stores rows on other GPUs: the bits of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Routing, expert_parallel, mlp, quantize
from jaxmoe._ep import direct, peers, pushed
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import Layer, assert_equal, expert_ids, layer_inputs, normal, poison
from tests import layers
from tests.test_multi_gpu_direct import mesh, opened

pytestmark = pytest.mark.multi_gpu

LAYER = Layer("", "divides over 2, 4 and 8 devices", 256, 128, 16, 3, bias=True)
PUSHED, COMBINE = "jaxmoe_peer_moe_mlp_v1", "jaxmoe_peer_combine_v1"


@functools.cache
def drawn(num_tokens, kind="with_invalid", format=None, dtype="bfloat16", top_k=3):
    """What a layer of so many tokens on each device takes; some choices name no expert."""
    rng, count = np.random.default_rng(num_tokens), len(jax.devices("cuda")) * num_tokens
    a = layer_inputs(LAYER, count, "uniform", rng, jnp.dtype(dtype))
    ids = expert_ids("with_invalid", rng, count, 16, 3)
    if kind == "one_device":  # the last one has all choices
        ids = np.stack([rng.permutation([14, 15, -1]) for _ in range(count)]).astype(np.int32)
    elif kind == "none_on_one":  # and here none
        ids = np.where((ids >= 8) & (ids < 16), ids - 8, ids)
    a |= {"expert_ids": jnp.asarray(ids[:, :top_k]), "weights": a["weights"][:, :top_k]}
    a["residual"] = normal(rng, a["x"].shape, jnp.dtype(dtype))
    if format is not None:
        a |= {n: quantize(a[n], format, weight_layout="kn") for n in ("w_gate_up", "w_down")}
    return jax.device_get(a)


def split(a, **options):
    a = dict(a)
    routing = Routing(a.pop("expert_ids"), a.pop("weights"))
    x, w1, w2 = (a.pop(n) for n in ("x", "w_gate_up", "w_down"))
    options = {"dispatch": "direct", "batch_invariant": True, **options}
    return layers.sharded(
        *(x, routing, w1, w2),
        mesh=mesh(),
        axis_name="expert",
        gate_up="interleaved",
        **a,
        **options,
    )


def alone(a, **options):
    """The layer on one device."""
    a = dict(a)
    routing = Routing(a.pop("expert_ids"), a.pop("weights"))
    x, w1, w2 = (a.pop(n) for n in ("x", "w_gate_up", "w_down"))
    options = {"gate_up": "interleaved", "batch_invariant": True, **options}
    return layers.moe_mlp(x, routing, w1, w2, **a, **options)


def computed(fn, a):
    return jax.device_get(jax.jit(fn)(a))


def pushes(fn, *args):
    """Whether a program has the call."""
    text = jax.jit(fn).lower(*args).as_text()
    assert text.count(PUSHED) + text.count(COMBINE) > 0
    return PUSHED in text


@pytest.fixture(autouse=True)
def scratch_is_garbage():
    poison((1 << 24,), jnp.float32)


@pytest.mark.parametrize("format", (None, "fp8_block", "fp8_channel", "mxfp4", "int4_g128"))
@pytest.mark.parametrize("num_tokens", (1, 24, 300, 2500))
def test_the_bits_are_those_of_one_device(num_tokens, format):
    """In one launch and two of finalize, also where most choices name no expert."""
    a = drawn(num_tokens, format=format)
    with opened():
        assert pushes(split, a)
        before = _targets.execute_count(PUSHED)
        first, again = computed(split, a), computed(split, a)
        assert _targets.execute_count(PUSHED) == before + 2 * len(jax.devices("cuda"))
    assert_equal(first, again)
    assert_equal(first, computed(alone, a))


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ("one_device", "none_on_one"))
@pytest.mark.parametrize("num_tokens", (5, 700))
def test_devices_with_all_choices_and_none(num_tokens, kind):
    a = drawn(num_tokens, kind)
    with opened():
        assert_equal(computed(split, a), computed(alone, a))


@pytest.mark.parametrize("top_k", (1, 2, 3))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_any_number_of_choices_without_a_residual(top_k, dtype):
    a = {n: v for n, v in drawn(40, top_k=top_k, dtype=dtype).items() if n != "residual"}
    with opened():
        assert pushes(split, a)
        assert_equal(computed(split, a), computed(alone, a))


def test_one_kernel_computes_both_products_or_not():
    """With the tiles that shapes choose; bits are those of these."""
    a = drawn(8)
    with opened():
        for num_chunks in (1, 2):
            call = functools.partial(split, num_chunks=num_chunks, batch_invariant=False)
            got = computed(call, a).astype(np.float32)
            want = computed(alone, a).astype(np.float32)
            np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-6)


def test_weights_on_the_input():
    a = drawn(33, top_k=1)
    with opened():
        call = functools.partial(split, apply_weight_on_input=True)
        assert pushes(call, a)
        want = computed(functools.partial(alone, apply_weight_on_input=True), a)
        assert_equal(computed(call, a), want)


@pytest.mark.sanitizer
def test_tokens_travel_in_fp8():
    a = drawn(64, format="fp8_block")
    with opened():
        call = functools.partial(split, dispatch_format="fp8_block")
        assert pushes(call, a)
        assert_equal(computed(call, a), computed(alone, a))


def test_without_room_for_rows_sums_travel():
    a = drawn(64)
    row = 2 * LAYER.hidden
    count = len(jax.devices("cuda"))
    enough = peers.total_bytes(peers.rows_bytes(64, 3, row))
    least = peers.needed_bytes(64, 3, count, row, 3, row, quantized=False)
    if least >= enough:
        pytest.skip("rows need more than sums where K is above n")
    with opened(least):
        assert not pushes(split, a)
        assert_equal(computed(split, a), computed(functools.partial(split, dispatch="ragged"), a))


@pytest.mark.parametrize("on_input", (False, True))
def test_a_derivative_is_of_sums(on_input):
    """Its value is theirs, to the bit, and so is every gradient nearly."""
    a = {n: jnp.asarray(v) for n, v in drawn(48, top_k=1 if on_input else 3).items()}
    ids = a.pop("expert_ids")

    def loss(a, way):
        options = {"dispatch": way, "apply_weight_on_input": on_input}
        y = split(a | {"expert_ids": ids}, **options).astype(jnp.float32)
        return jnp.sum(y**2), y

    def of(way):
        return lambda a: jax.value_and_grad(loss, has_aux=True)(a, way)

    with opened():
        assert not pushes(of("direct"), a)
        ((_, got), gradients), ((_, want), others) = (
            computed(of("direct"), a),
            computed(of("all_to_all"), a),
        )
    assert_equal(got, want)
    for name, gradient in gradients.items():
        ours, theirs = (np.asarray(g, np.float32) for g in (gradient, others[name]))
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=2**-5, atol=2**-5 * largest, err_msg=name)


def test_many_steps_of_all_kinds_by_turns():
    """Layers, and tokens that go there and back, in two programs; K = 1, where all ways agree."""
    count, steps = len(jax.devices("cuda")), 100
    a = {n: v for n, v in drawn(48, top_k=1).items() if n != "residual"}
    experts = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")

    def walk(dispatch, way, shift, x, ids, weights, experts):
        def step(x_now, i):
            chosen = jnp.where(ids >= 0, (ids + i * shift) % 16, -1)
            y = expert_parallel.moe_mlp(
                *(x_now, Routing(chosen, weights), experts),
                axis_name="expert",
                dispatch=dispatch,
                batch_invariant=True,
            )
            slots = jnp.where(ids >= 0, (ids + 5 * i) % 16, -1)
            all_slots, rows, _ = direct.send(way, slots, y, weights)
            y = direct.bring(way, slots, all_slots, rows, None).astype(jnp.float32)
            largest = jax.lax.pmax(jnp.max(jnp.abs(y)), "expert")
            x_next = y / jnp.maximum(largest, 1e-30) + x.astype(jnp.float32)
            return x_next.astype(x.dtype), None

        return jax.lax.scan(step, x, jnp.arange(steps, dtype=jnp.int32))[0]

    def program(dispatch, way, shift):
        fn = functools.partial(walk, dispatch, way, shift)
        return jax.jit(jax.shard_map(fn, mesh=mesh(), in_specs=P("expert"), out_specs=P("expert")))

    with opened() as memory:
        by_kernels = direct.way_of("expert", 16 // count, memory)
        by_collectives = by_kernels._replace(memory="")
        given = a["x"], a["expert_ids"], a["weights"], experts
        programs = [program("direct", by_kernels, shift) for shift in (1, 3)]
        results = [programs[i % 2](*given) for i in range(4)]  # all are under way
        wanted = [program("all_to_all", by_collectives, shift)(*given) for shift in (1, 3)]
        for i, got in enumerate(results):
            assert_equal(jax.device_get(got), jax.device_get(wanted[i % 2]))


def on_the_first(memory, place=0):
    """What the first GPU gives if no other has the call; it says that it is device `place`."""
    count = len(jax.devices("cuda"))
    a = {n: jnp.asarray(v) for n, v in drawn(4).items()}
    num_local = 16 // count
    experts = jaxmoe.Experts(
        gate_up=a["w_gate_up"][:num_local], down=a["w_down"][:num_local], order="interleaved"
    )
    operands, layer = mlp.prepared(
        *("moe_mlp", a["x"], Routing(a["expert_ids"], a["weights"]), experts),
        finalize=True,
        residual=None,
        window=(16, 0, None),
        gather_weights=None,
        apply_weight_on_input=False,
        batch_invariant=False,
        recompute=None,
        config=None,
    )
    way = direct.way_of("expert", num_local, memory)
    own = np.int32(place), a["expert_ids"][:4], a["weights"][:4]
    rest = {n: getattr(operands, n) for n in operands._fields}

    def call(own, rest):
        fields = pushed.peer_moe_mlp_p.operands._fields[len(own) + 1 :]
        of_layer = (rest[name] for name in fields)
        return pushed.peer_moe_mlp_p(*own, None, *of_layer, way=way, layer=layer)[0]

    first = jax.devices("cuda")[0]
    return jax.device_get(jax.jit(call)(*jax.device_put((own, rest), first)))


def test_a_device_that_does_not_come_is_named():
    a = drawn(16)
    with opened(timeout_s=0.5) as memory:
        assert np.isnan(on_the_first(memory).astype(np.float32)).all()
        message = "device 0 of expert waited 500 ms for device [1-9] in step 1"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            on_the_first(memory)
    with opened():  # as new
        assert_equal(computed(split, a), computed(alone, a))


def test_another_mesh_is_refused():
    with opened(timeout_s=1) as memory:
        assert np.isnan(on_the_first(memory, place=1).astype(np.float32)).all()
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="device 0 of expert is device 1 of the program"
        ):
            on_the_first(memory)
