"""expert_parallel: every way to spread experts gives what one device gives, gradients included."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Experts, Routing, expert_parallel, moe_mlp, quantize, reference
from jaxmoe._ep import hops
from jaxmoe._ep.slots import slots_of
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import (
    INVALID_IDS,
    Layer,
    assert_equal,
    expert_ids,
    layer_inputs,
    normal,
)
from tests import layers

# f32 sums in another order, values of order 1; see test_transforms.py.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
LAYER = Layer("", "two experts on each of 8 devices", 16, 8, 16, 3, bias=True)
BIASES = ("b_gate_up", "b_down")
ROUTINGS = ("with_invalid", "empty", "one_shard")
NUM_TOKENS = 16


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)


@functools.cache
def mesh(kind=AxisType.Auto, **sizes):
    axes = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)


EIGHT = {"expert": 8}
DATA = {"data": 2, "expert": 4}
TENSOR = {"tensor": 2, "expert": 4}


@functools.cache
def biased():
    """Everything but the ids, and a residual."""
    rng = np.random.default_rng(0)
    inputs = layer_inputs(LAYER, NUM_TOKENS, "uniform", rng, jnp.float32)
    del inputs["expert_ids"]
    # On the host: dividing what is on a device takes programs.
    return jax.tree.map(np.asarray, {**inputs, "residual": normal(rng, inputs["x"].shape)})


def arrays():
    """The same without biases, whose gradients cost programs."""
    return {n: a for n, a in biased().items() if n not in BIASES}


def ids_of(kind):
    """Choices of NUM_TOKENS tokens. On 8 devices, experts 2d and 2d + 1 are on device d."""
    rng = np.random.default_rng(3)
    if kind == "one_shard":  # every choice on the last device (of 8, and of 4)
        return np.stack([rng.permutation([14, 15, -1]) for _ in range(NUM_TOKENS)]).astype(np.int32)
    ids = expert_ids("with_invalid" if kind == "empty" else kind, rng, NUM_TOKENS, 16, 3)
    if kind == "empty":  # devices 0 to 3 have nothing to do, the first tokens no expert at all
        ids = np.where((ids >= 0) & (ids < 8), ids + 8, ids)
        ids[:5] = INVALID_IDS[0]
    return ids


def split_layer(ids, a, sizes, kind=AxisType.Auto, **options):
    a = dict(a)
    x, weights, w1, w2 = (a.pop(n) for n in ("x", "weights", "w_gate_up", "w_down"))
    axes = {f"{name}_axis": name for name in sizes if name != "expert"}
    return layers.sharded(
        *(x, Routing(ids, weights), w1, w2),
        mesh=mesh(kind, **sizes),
        axis_name="expert",
        gate_up="interleaved",
        **axes,
        **a,
        **options,
    )


def with_gradients(fn):
    """Jits (ids, arrays) -> the result of `fn` and its gradient in every array."""
    seed = normal(np.random.default_rng(7), (NUM_TOKENS, LAYER.hidden))

    def run(ids, a):
        loss = lambda a: (lambda y: (jnp.sum(jnp.sin(y) * seed), y))(fn(ids, a))  # noqa: E731
        gradients, y = jax.grad(loss, has_aux=True)(a)
        return y, gradients

    return jax.jit(run)


@functools.cache
def program(gradients=True, **options):
    sizes = dict(options.pop("sizes"))
    fn = functools.partial(split_layer, sizes=sizes, **options)
    return with_gradients(fn) if gradients else jax.jit(fn)


def run(ids, sizes, a, **options):
    return program(sizes=tuple(sizes.items()), **options)(np.asarray(ids), a)


@functools.cache
def whole():
    fn = lambda ids, a: reference.moe_mlp(expert_ids=ids, gate_up="interleaved", **a)  # noqa: E731
    return with_gradients(fn)


def one_device(ids, a):
    a = dict(a)
    x, weights, w1, w2 = (a.pop(n) for n in ("x", "weights", "w_gate_up", "w_down"))
    return layers.moe_mlp(x, Routing(ids, weights), w1, w2, gate_up="interleaved", **a)


@pytest.mark.parametrize(
    "sizes, options",
    [
        (EIGHT, {"dispatch": "all_to_all", "num_chunks": 2}),
        (DATA, {"dispatch": "ragged"}),
        (TENSOR, {"dispatch": "all_gather", "own_apart": True, "num_chunks": 2}),
        (EIGHT, {"tokens": "replicated", "master_weights": True}),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_one_device(sizes, options):
    """Also where a device gets no tokens, and where one gets all of them."""
    for kind in ROUTINGS:
        ids = ids_of(kind)
        a = biased() if sizes is TENSOR else arrays()
        close(run(ids, sizes, a, **options), whole()(ids, a))


def test_inside_shard_map_without_types():
    """check_vma=False, experts over two axes, weights in checkpoint order, float32 sums."""
    a = arrays()
    a = {**a, **{n: a[n].swapaxes(1, 2) for n in ("w_gate_up", "w_down")}}
    names = [n for n in a if n not in ("x", "weights", "residual")]
    both = P(("data", "expert"))

    def local(ids, x, weights, residual, own):
        return layers.expert_parallel(
            x,
            Routing(ids, weights),
            own.pop("w_gate_up"),
            own.pop("w_down"),
            axis_name=("data", "expert"),
            dispatch="all_gather",
            gate_up="interleaved",
            sum_dtype="float32",
            weight_layout="nk",
            residual=residual,
            **own,
        )

    split = jax.shard_map(local, mesh=mesh(**DATA), in_specs=both, out_specs=both, check_vma=False)

    def call(ids, a):
        return split(ids, a["x"], a["weights"], a["residual"], {n: a[n] for n in names})

    run_all = with_gradients(call)
    for kind in ROUTINGS:
        y, gradients = run_all(ids_of(kind), a)
        turned = {n: gradients[n].swapaxes(1, 2) for n in ("w_gate_up", "w_down")}
        close((y, {**gradients, **turned}), whole()(ids_of(kind), arrays()))


def test_ways_that_add_in_the_same_order_have_the_same_bits():
    """ragged, and all_to_all in chunks; with one choice also one device."""
    ids = ids_of("with_invalid")
    got = run(ids, EIGHT, arrays(), gradients=False, dispatch="ragged")
    assert_equal(got, run(ids, EIGHT, arrays(), dispatch="all_to_all", num_chunks=2)[0])
    ids, one = ids[:, :1], {**arrays(), "weights": arrays()["weights"][:, :1]}
    want = jax.jit(one_device)(ids, one)
    for own_apart in (False, True):
        options = {"dispatch": "all_gather", "own_apart": own_apart}
        assert_equal(run(ids, EIGHT, one, gradients=False, **options), want)


def test_experts_that_do_not_divide_and_copies_of_hot_ones():
    """13 experts on 8 devices, three copies of expert 0, two of 5: each copy does a part."""
    table = expert_parallel.expert_placement(13, 8, copies={0: 3, 5: 2})
    assert table.shape == (8, 13) and (table >= 0).sum() == 16
    assert (table.max(axis=1) == 1).all()  # two experts on each, as evenly as it goes
    a = {n: v if n in ("x", "weights", "residual") else v[:13] for n, v in arrays().items()}
    rng = np.random.default_rng(5)
    ids = expert_ids("uniform", rng, NUM_TOKENS, 13, 3)
    ids[::2] = [0, 5, 15]  # nobody has 15

    def placed(ids, a):
        own = [n for n in a if n.startswith(("w_", "b_"))]
        a = a | {n: expert_parallel.place_experts(a[n], table) for n in own}
        return split_layer(ids, a, EIGHT, dispatch="all_to_all", expert_map=table)

    close(with_gradients(placed)(ids, a), whole()(ids, a))


def test_a_device_may_have_one_expert():
    table = np.array([[-1, 0], [0, -1]], np.int32)
    assert expert_parallel.place_experts(jnp.array([5.0, 6.0]), table).tolist() == [6.0, 5.0]


def test_replicated_tokens_use_one_copy_of_an_expert():
    """All devices agree on which, or they would add it up as often as there are copies."""
    table = expert_parallel.expert_placement(4, 2, copies={0: 2, 3: 2})
    a = {n: v if n in ("x", "weights") else v[:4] for n, v in arrays().items() if n != "residual"}
    ids = jnp.asarray(expert_ids("one_expert", np.random.default_rng(6), NUM_TOKENS, 4, 3))
    placed = a | {n: expert_parallel.place_experts(a[n], table) for n in ("w_gate_up", "w_down")}
    call = functools.partial(
        split_layer, sizes={"expert": 2}, tokens="replicated", expert_map=table
    )
    close(jax.jit(call)(ids, placed), jax.jit(one_device)(ids, a))


def test_each_copy_of_an_expert_is_on_a_device_of_its_own():
    for num_experts in range(1, 6):
        for num_devices in range(1, 5):
            for count in range(1, num_devices + 1):
                copies = {0: count, num_experts - 1: count}
                table = expert_parallel.expert_placement(num_experts, num_devices, copies=copies)
                held = (table >= 0).sum(axis=0)
                assert held.tolist() == [copies.get(e, 1) for e in range(num_experts)]
                for of_device in table:  # whose local ids are 0, 1, ...
                    here = sorted(of_device[of_device >= 0])
                    assert here == list(range(len(here)))


def test_parts_are_added_in_sum_dtype():
    """Of bf16 tokens: float32 parts travel where they are asked for, bf16 parts otherwise."""
    narrow = {n: a.astype(jnp.bfloat16) for n, a in arrays().items() if n != "weights"}
    narrow["weights"] = arrays()["weights"]
    ids = jnp.asarray(ids_of("with_invalid"))
    ways = (
        (EIGHT, {"dispatch": "all_gather"}, "psum_scatter of {}[16,16] over expert"),
        (EIGHT, {"tokens": "replicated"}, "psum of {}[16,16] over expert"),
        (TENSOR, {"dispatch": "all_to_all"}, "psum of {}[4,16] over tensor"),
    )
    for sizes, options, text in ways:
        for dtype, name in ((None, "bf16"), ("float32", "f32")):
            call = functools.partial(split_layer, sizes=sizes, sum_dtype=dtype, **options)
            report = jaxmoe.explain(call, ids, narrow)
            assert text.format(name) in report.collectives, (options, report.collectives)


def test_a_tie_of_two_ways_is_an_all_gather():
    """Estimates that are equal to the bit: nothing waits for boxes without a reason."""
    links = expert_parallel.Links(
        gather_us=2.0, gather_gbps=1.0, all_to_all_us=1.0, all_to_all_gbps=1.0
    )
    choice = expert_parallel.choose_dispatch(64, 128, 2, 4, links=links)
    assert choice.microseconds["all_gather"] == choice.microseconds["all_to_all"]
    assert choice.name == "all_gather"


def test_a_token_takes_its_own_devices_copy_and_the_others_in_turn():
    table = jnp.array([[0, -1, -1], [0, 1, -1], [-1, 0, -1]], jnp.int32)
    ids = jnp.array([[0, 1], [0, 1], [2, -1]], jnp.int32)
    call = jax.jit(
        lambda own_first: [
            slots_of(ids, table, device=d, num_experts=3, num_local=2, own_first=own_first)
            for d in jnp.arange(3, dtype=jnp.int32)
        ],
        static_argnums=0,
    )
    by_turns, own = call(False), call(True)
    assert all(slots.tolist() == [[0, 3], [2, 4], [-1, -1]] for slots in by_turns)
    assert own[1].tolist() == [[2, 3], [2, 3], [-1, -1]]
    assert own[2].tolist() == [[0, 4], [2, 4], [-1, -1]]  # no copy of 0: the devices' first turn


def test_experts_that_no_device_has_are_lost():
    """Of a table that is not known before: the choices are counted."""
    ids, a = jnp.asarray(ids_of("uniform")), arrays()
    table = np.where(np.arange(16) == 3, -1, expert_parallel.expert_placement(16, 8))

    def layer(table):
        call = functools.partial(split_layer, ids, a, EIGHT, dispatch="all_to_all")
        return call(expert_map=table, capacity_factor=8.0)

    y, lost = jax.jit(layer)(jnp.asarray(table, jnp.int32))
    assert int(lost) == (ids == 3).sum() > 0
    close(y, jax.jit(one_device)(jnp.where(ids == 3, -1, ids), a))


@pytest.mark.parametrize("kinds", list(itertools.permutations(("Auto", "Explicit"))), ids="-".join)
@pytest.mark.parametrize("data", (None, "data"))
def test_meshes_of_two_kinds_of_axes(kinds, data):
    types = tuple(getattr(AxisType, kind) for kind in kinds)
    of_both = jax.make_mesh((2, 4), ("data", "expert"), axis_types=types)
    ids, a = jnp.asarray(ids_of("uniform")), arrays()
    routing = Routing(ids, jnp.asarray(a["weights"]))
    experts = Experts(gate_up=a["w_gate_up"], down=a["w_down"])
    y = expert_parallel.sharded_moe_mlp(
        jnp.asarray(a["x"]), routing, experts, mesh=of_both, axis_name="expert", data_axis=data
    )
    close(y, jax.jit(moe_mlp)(jnp.asarray(a["x"]), routing, experts))
    with jax.set_mesh(of_both):
        call = functools.partial(expert_parallel.sharded_moe_mlp, data_axis=data)
        again = jax.jit(functools.partial(call, axis_name="expert"))(a["x"], routing, experts)
    close(again, y)


def test_derivatives_of_gelu_inside_of_shard_map():
    """JAX's own rule for erfc fails there."""
    one = {"gate_up": "interleaved", "activation": "geglu"}
    by_one = lambda ids, a: reference.moe_mlp(expert_ids=ids, **one, **a)  # noqa: E731
    split = functools.partial(split_layer, sizes=EIGHT, activation="geglu")
    got, want = (with_gradients(fn)(ids_of("uniform"), arrays()) for fn in (split, by_one))
    close(got, want)


def test_local_ids_out_of_range_are_no_copies():
    table = jnp.array([[2, 3, 0], [0, -1, 9]], jnp.int32)
    options = {"num_experts": 3, "num_local": 2, "own_first": False}
    slots = slots_of(jnp.array([[0, 1, 2]], jnp.int32), table, device=jnp.int32(0), **options)
    assert slots.tolist() == [[2, -1, 0]]


def dropped_by_hand(ids, devices, capacity, pooled):
    """Which choices find no room: [T, K] bool."""
    per_device = NUM_TOKENS // devices
    num_local = LAYER.num_experts // devices
    taken = np.zeros((devices, devices), int)
    lost = np.zeros(ids.shape, bool)
    for t, mine in enumerate(ids):
        source = t // per_device
        for d in range(devices):
            here = (mine >= 0) & (mine < LAYER.num_experts) & (mine // num_local == d)
            if not here.any():
                continue
            used = taken[:, d].sum() if pooled else taken[source, d]
            if used < (devices * capacity if pooled else capacity):
                taken[source, d] += 1
            else:
                lost[t, here] = True
    return lost


@pytest.mark.parametrize("mode", ("all_to_all", "ragged"))
def test_what_finds_no_room_is_counted_and_left_out(mode):
    factor = 0.4
    choice = expert_parallel.choose_dispatch(2, LAYER.hidden, 3, 8, capacity_factor=factor)
    assert choice.capacity == 1  # ceil(0.4 * 2 * (1 - (7/8)^3) = 0.3)
    for kind in ("with_invalid", "one_shard") if mode == "all_to_all" else ("one_shard",):
        ids = ids_of(kind)
        y, lost = run(ids, EIGHT, arrays(), gradients=False, dispatch=mode, capacity_factor=factor)
        gone = dropped_by_hand(ids, 8, 1, mode == "ragged")
        assert int(lost) == gone.sum() > 0
        close(y, whole()(np.where(gone, -1, ids), arrays())[0])


@pytest.mark.parametrize(
    "format, mode, sizes",
    [
        ("fp8_block", "all_to_all", DATA),
        ("fp8_tensor", "all_gather", EIGHT),
    ],
)
def test_tokens_travel_in_fp8(format, mode, sizes):
    """The result is that of one device, which has one scale for all tokens in fp8_tensor."""
    a = arrays()
    a |= {n: quantize(a[n], format, weight_layout="kn") for n in ("w_gate_up", "w_down")}
    if format == "fp8_tensor":  # a dynamic one would be made of all rows
        a["intermediate_scale"] = jnp.full((16,), 0.01)
    ids = jnp.asarray(ids_of("uniform"))
    layer = functools.partial(split_layer, sizes=sizes, dispatch=mode)
    lowered = jax.jit(functools.partial(layer, dispatch_format=format)).lower(ids, a)
    assert "ui32" in lowered.as_text()  # four FP8 values in a word
    got = lowered.compile()(ids, a)
    close(got, jax.jit(one_device)(ids, a))


def test_fp8_tokens_need_not_fill_their_last_word():
    """One FP8 value of 17 is alone in its word."""
    rng = np.random.default_rng(4)
    a = layer_inputs(Layer("", "", 17, 8, 16, 3), NUM_TOKENS, "uniform", rng, jnp.float32)
    ids = a.pop("expert_ids")
    a |= {n: quantize(a[n], "fp8_channel", weight_layout="kn") for n in ("w_gate_up", "w_down")}
    options = {"sizes": EIGHT, "dispatch": "all_gather", "dispatch_format": "fp8_channel"}
    got = jax.jit(functools.partial(split_layer, **options))(ids, a)
    close(got, jax.jit(one_device)(ids, a))


def test_x64_changes_nothing():
    def every(ids, a):
        ways = ({"dispatch": "ragged"}, {"tokens": "replicated"})
        return [split_layer(ids, a, EIGHT, **options) for options in ways]

    ids, a = ids_of("with_invalid"), jax.tree.map(np.asarray, arrays())
    want = jax.jit(every)(ids, a)
    with jax.enable_x64(True):
        got = jax.jit(every)(ids, a)
    jax.tree.map(assert_equal, got, want)


def test_an_explicit_mesh():
    """The default kind of mesh; arguments are put where they belong."""
    ids = ids_of("with_invalid")
    m = mesh(AxisType.Explicit, **EIGHT)
    with jax.set_mesh(m):
        got = jax.jit(lambda ids, a: split_layer(ids, a, EIGHT, AxisType.Explicit))(ids, arrays())
    assert got.sharding.spec[0] in ("expert", ("expert",))
    close(got, whole()(ids, arrays())[0])


def collectives(text):
    names = ("all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all", "all_reduce")
    return {n: text.count(f"stablehlo.{n}") for n in names if f"stablehlo.{n}" in text}


def test_the_program_holds_only_the_collectives_it_needs():
    ids, a = jnp.asarray(ids_of("uniform")), arrays()

    def text(platform="cpu", **options):
        traced = jax.jit(functools.partial(split_layer, sizes=EIGHT, **options)).trace(ids, a)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert collectives(text()) == {"all_gather": 2, "reduce_scatter": 1}  # auto, dropless
    assert collectives(text(tokens="replicated")) == {"all_reduce": 1}
    assert collectives(text(dispatch="all_to_all")) == {"all_to_all": 3}
    with _targets.force_cuda_lowering():
        a = jax.tree.map(lambda v: v if v.shape == a["weights"].shape else v.astype("bfloat16"), a)
        cuda = text("cuda", dispatch="ragged")
    assert cuda.count("ragged_all_to_all") >= 3 and "jaxmoe_moe_mlp_v1" in cuda


@pytest.mark.parametrize(
    "options, num_experts",
    [
        ({"dispatch": "all_gather"}, 16),
        ({"dispatch": "all_to_all"}, 16),
        ({"dispatch": "all_to_all", "capacity_factor": 1.0}, 8),  # one token of two from each
        ({"tokens": "replicated"}, 16),
    ],
    ids=str,
)
def test_tiles_are_those_of_the_rows_that_come(options, num_experts):
    """The kernels are told of as many experts as give the mean number of rows of a real one."""
    a = jax.tree.map(lambda v: v.astype("bfloat16"), arrays())
    a["weights"] = arrays()["weights"]
    layer = functools.partial(split_layer, sizes=EIGHT, **options)
    with _targets.force_cuda_lowering():
        report = jaxmoe.explain(layer, jnp.asarray(ids_of("uniform")), a)
    way = options.get("dispatch", "psum")
    assert f"\ncollective: {way} of bf16[" in str(report)
    assert all(line.endswith(" over expert") for line in report.collectives)
    (told,) = report.dispatches
    assert told.startswith(f"{options.get('dispatch', 'replicated')} along 'expert': ")
    (call,) = (op for op in report.ops if op.op == "jaxmoe_moe_mlp")
    assert call.cuda_attrs["num_experts"] == num_experts
    assert call.cuda_attrs["num_local_experts"] == 2 and "shard_map" in call.where


def test_auto_asks_for_the_tokens_of_a_chunk(monkeypatch):
    asked, choose = [], hops.choose_dispatch
    monkeypatch.setattr(
        hops, "choose_dispatch", lambda *a, **kw: asked.append((a, kw)) or choose(*a, **kw)
    )
    a = jax.tree.map(lambda v: v.astype("bfloat16"), arrays()) | {"weights": arrays()["weights"]}
    layer = functools.partial(split_layer, sizes=EIGHT, num_chunks=2, capacity_factor=1.5)
    jax.eval_shape(layer, jnp.asarray(ids_of("uniform")), a)
    given, options = asked[0]
    assert given == (NUM_TOKENS // 8 // 2, LAYER.hidden, 3, 8)
    assert options == {
        "capacity_factor": 1.5,
        "itemsize": 2,
        "dispatch_itemsize": None,
        "direct": False,
    }


def test_auto_takes_what_the_links_make_faster():
    choose = expert_parallel.choose_dispatch
    assert choose(4096, 7168, 8, 4).name == "all_gather"
    assert choose(4096, 7168, 8, 4, capacity_factor=1.25).name == "all_gather"  # K is above n
    far = choose(4096, 7168, 8, 64, capacity_factor=1.25)
    assert far.name == "all_to_all" and far.capacity == math.ceil(
        1.25 * 4096 * (1 - (63 / 64) ** 8)
    )
    assert far.microseconds["all_to_all"] < far.microseconds["all_gather"]
    assert f"room for {far.capacity} of 4096" in far.reason and "64 devices" in far.reason
    assert choose(1, 7168, 8, 64, capacity_factor=1.25).capacity == 1
    slow = expert_parallel.Links(gather_gbps=50.0, all_to_all_gbps=50.0)
    assert choose(4096, 7168, 2, 16, capacity_factor=1.0, links=slow).name == "all_to_all"
    assert choose(4096, 7168, 2, 16, tokens="replicated").microseconds == {}
    assert choose(0, 7168, 2, 16, capacity_factor=1.0).capacity == 0
    fp8 = choose(4096, 7168, 8, 4, dispatch_itemsize=1).microseconds
    bf16 = choose(4096, 7168, 8, 4).microseconds
    assert fp8["all_gather"] - 115 == pytest.approx(0.75 * (bf16["all_gather"] - 115), rel=0.01)
    # what was measured among 4 H200: 8192 rows of 7168, 2.4 ms both ways; K large: all are sent
    measured = choose(8192, 7168, 100, 4).microseconds
    assert measured["all_gather"] == pytest.approx(2400, rel=0.1)
    assert measured["ragged"] == pytest.approx(4 * 2 * 11400, rel=0.15)
