"""dispatch="direct": what its memory is, what a program asks of it, and the bits of its results."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import expert_parallel, quantize
from jaxmoe._ep import connect, direct, peers
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal
from tests.lowered import calls, cuda_text
from tests.test_expert_parallel import (
    DATA,
    EIGHT,
    NUM_TOKENS,
    ROUTINGS,
    arrays,
    close,
    ids_of,
    mesh,
    run,
    split_layer,
    whole,
)

ENOUGH = 1 << 20


@pytest.fixture
def memory():
    """Of an axis of eight devices, and of one of four."""
    with expert_parallel.open_peer_memory(mesh(**EIGHT), "expert", num_bytes=ENOUGH) as opened:
        yield opened


@pytest.fixture
def on_gpus(monkeypatch):
    """As if it were open on eight GPUs, for programs that are not run."""
    opened = peers.PeerMemory(("expert",), 8, ENOUGH, on_gpus=True)
    monkeypatch.setitem(peers._open, ("expert",), opened)
    with _targets.force_cuda_lowering():
        yield opened


def half_precision():
    a = {n: v if n == "weights" else v.astype("bfloat16") for n, v in arrays().items()}
    return jnp.asarray(ids_of("uniform")), a


def layer(**options):
    return functools.partial(split_layer, sizes=EIGHT, **{"dispatch": "direct", **options})


@pytest.mark.parametrize("sizes, chunks", [(EIGHT, 2), (DATA, 1)], ids=str)
def test_values_and_gradients_are_those_of_one_device(sizes, chunks):
    """Also where a device gets no tokens, and where one gets all of them."""
    with expert_parallel.open_peer_memory(mesh(**sizes), "expert", num_bytes=ENOUGH):
        for kind in ROUTINGS:
            got = run(ids_of(kind), sizes, arrays(), dispatch="direct", num_chunks=chunks)
            close(got, whole()(ids_of(kind), arrays()))


@pytest.mark.usefixtures("memory")
def test_the_bits_are_those_of_ragged():
    ids = ids_of("with_invalid")
    got, want = (
        run(ids, EIGHT, arrays(), gradients=False, dispatch=way) for way in ("direct", "ragged")
    )
    assert_equal(got, want)


@pytest.mark.usefixtures("memory")
def test_under_scan_remat_and_vmap():
    ids, a = ids_of("with_invalid"), arrays()

    @jax.jit
    def both(ids, a):
        one = lambda x: split_layer(ids, a | {"x": x}, EIGHT, dispatch="direct")  # noqa: E731
        twice, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(one)(x), None), a["x"], length=2)
        mapped = jax.vmap(one)(jnp.stack([a["x"], one(a["x"])]))
        return twice, mapped[1]

    twice, mapped = both(ids, a)
    close(mapped, twice)


@pytest.mark.usefixtures("memory")
def test_tokens_travel_in_fp8():
    """As they are, without a cotangent; the routing weights beside them have one."""
    a = arrays()
    a |= {n: quantize(a[n], "fp8_block", weight_layout="kn") for n in ("w_gate_up", "w_down")}
    ids = ids_of("uniform")
    sent, plain = (jax.jit(layer(dispatch_format=format))(ids, a) for format in ("fp8_block", None))
    assert_equal(sent, plain)

    def of_weights(weights, **options):
        return jnp.sum(layer(**options)(ids, a | {"weights": weights}) ** 2)

    got, want = (
        jax.jit(jax.grad(functools.partial(of_weights, **options)))(a["weights"])
        for options in (
            {"dispatch_format": "fp8_block"},
            {"dispatch_format": "fp8_block", "dispatch": "all_gather"},
        )
    )
    close(got, want)


@pytest.mark.usefixtures("on_gpus")
def test_quantized_tokens_are_copied_by_the_call_alone():
    ids, a = half_precision()
    wide = {"w_gate_up": np.tile(a["w_gate_up"], 2), "w_down": np.tile(a["w_down"], (1, 2, 1))}
    a |= {n: quantize(w, "fp8_block", weight_layout="kn") for n, w in wide.items()}
    program = jax.jit(layer(dispatch_format="fp8_block")).trace(ids, a)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @jaxmoe_peer_dispatch_v1.*", text)
    assert "tensor<2x16xf8E4M3FN>" in call and "bitcast_convert" not in text
    jaxpr = str(jax.make_jaxpr(layer(dispatch="all_to_all", dispatch_format="fp8_block"))(ids, a))
    assert "uint32" in jaxpr or "u32" in jaxpr  # words


@pytest.mark.usefixtures("memory")
def test_it_is_linear_in_every_direction():
    """Forward mode, and a derivative of one."""
    ids, a = ids_of("with_invalid"), jax.tree.map(jnp.asarray, arrays())

    def of(fn):
        return lambda x, w: jnp.sum(jnp.sin(fn(ids, a | {"x": x, "weights": w})))

    def curved(fn):
        at, along = (a["x"], a["weights"]), (a["residual"], 1 - a["weights"])
        slope = lambda *at: jax.jvp(of(fn), at, along)[1]  # noqa: E731
        return jax.jit(lambda at: (slope(*at), jax.grad(slope, argnums=(0, 1))(*at)))(at)

    close(curved(layer()), curved(layer(dispatch="all_to_all")))


@pytest.mark.usefixtures("memory")
def test_copies_of_hot_experts():
    table = expert_parallel.expert_placement(13, 8, copies={0: 3, 5: 2})
    a = {n: v if n in ("x", "weights", "residual") else v[:13] for n, v in arrays().items()}
    ids = np.where(ids_of("with_invalid") >= 13, 0, ids_of("with_invalid"))
    own = {n: expert_parallel.place_experts(a[n], table) for n in a if n.startswith("w_")}
    close(jax.jit(layer(expert_map=table))(ids, a | own), whole()(ids, a)[0])


WIDE = {"data": 2, "tensor": 2, "expert": 2}


@pytest.mark.parametrize("check_vma", (True, False))
def test_where_arguments_vary_over_several_axes(check_vma):
    """As programs for GPUs are made: a residual that is the same along "data", a tensor axis."""
    grid, a = mesh(**WIDE), {n: v for n, v in arrays().items() if n != "residual"}
    shared = arrays()["residual"][: NUM_TOKENS // 2]
    both, experts = P(("data", "expert")), P("expert")
    specs = {"x": both, "weights": both, "w_gate_up": P("expert", None, "tensor")}
    specs |= {"w_down": P("expert", "tensor")}

    def part(way, ids, residual, a):
        x, weights = a["x"], a["weights"]
        w = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")
        return expert_parallel.moe_mlp(
            *(x, jaxmoe.Routing(ids, weights), w),
            axis_name="expert",
            tensor_axis="tensor",
            dispatch=way,
            residual=residual,
        )

    def loss(way, ids, residual, a):
        split = jax.shard_map(
            functools.partial(part, way),
            mesh=grid,
            in_specs=(both, experts, specs),
            out_specs=both,
            check_vma=check_vma,
        )
        return jnp.sum(jnp.sin(split(ids, residual, a)))

    with expert_parallel.open_peer_memory(grid, "expert", num_bytes=ENOUGH) as opened:
        peers._open["expert",] = dataclasses.replace(opened, on_gpus=True)
        run_all = jax.jit(jax.value_and_grad(loss, argnums=(2, 3)), static_argnums=0)
        ids = ids_of("with_invalid")
        found = [run_all(way, ids, shared, a) for way in ("direct", "all_to_all")]
        peers._open["expert",] = opened
    close(*found)


@pytest.mark.usefixtures("on_gpus")
def test_a_program_is_exported_for_one_platform():
    def exported(*platforms):
        checks = jaxmoe.export_checks()
        export = jax.export.export(jax.jit(layer()), platforms=platforms, disabled_checks=checks)
        return export(*half_precision()).mlir_module()

    assert "jaxmoe_peer_moe_mlp_v1" in exported("cuda")
    with pytest.raises(NotImplementedError, match="export a program for one platform"):
        exported("cpu", "cuda")


@pytest.mark.usefixtures("memory")
def test_nothing_is_lost_whatever_the_factor():
    ids = ids_of("one_shard")
    y, lost = jax.jit(layer(capacity_factor=0.1))(ids, arrays())
    assert int(lost) == 0
    close(y, whole()(ids, arrays())[0])


@pytest.mark.usefixtures("on_gpus")
def test_a_program_for_gpus_has_two_calls_and_no_collective():
    program = jax.jit(layer()).trace(*half_precision()).lower(lowering_platforms=("cuda",))
    text = program.as_text()
    assert text.count("jaxmoe_peer_dispatch_v1") == text.count("jaxmoe_peer_moe_mlp_v1") == 1
    assert not re.search(r"stablehlo\.(all_|reduce_|collective)", text)
    for attribute in ('memory = "expert"', "num_devices = 8 ", "num_local = 2 "):
        assert text.count(attribute) == 2, attribute


@pytest.mark.usefixtures("on_gpus")
def test_the_transpose_of_a_call_is_the_other():
    """Cotangents of tokens and of what travels beside them come home, those of sums go out."""

    def loss(a, ids):
        return jnp.sum(layer()(ids, a).astype(jnp.float32) ** 2)

    ids, a = half_precision()
    program = jax.jit(jax.grad(loss)).trace(a, ids).lower(lowering_platforms=("cuda",))
    text = program.as_text()
    assert text.count("jaxmoe_peer_dispatch_v1") == 2
    assert text.count("jaxmoe_peer_combine_v1") == 2


@pytest.mark.usefixtures("on_gpus")
def test_explain_names_the_calls():
    report = jaxmoe.explain(layer(), *half_precision())
    calls = {op.op: op for op in report.ops}
    call = calls["jaxmoe_peer_dispatch"]
    assert call.cuda_target == "jaxmoe_peer_dispatch_v1"
    assert call.cuda_attrs == {"memory": "expert", "num_devices": 8, "num_local": 2}
    assert "bf16[2,16]" in call.operands
    (line,) = report.dispatches
    assert f"\ndispatch: {line}" in str(report)
    assert calls["jaxmoe_peer_moe_mlp"].where.endswith("cond on cuda")
    assert calls["jaxmoe_peer_combine"].where.split("/")[2] == "cond elsewhere"


P_EIGHT = 1 - (7 / 8) ** 3  # of tokens have one of three choices on one of eight devices


def told(fn, *args):
    """The one line of a program of `layer`: (bytes, why direct, what travels and why)."""
    (line,) = jaxmoe.explain(fn, *args).dispatches
    start, bytes_, chosen, how = re.fullmatch(
        r"(direct along 'expert': )(\d+) bytes that a device sends; (.*?); (.*)", line
    ).groups()
    assert start
    return int(bytes_), chosen, how


@pytest.mark.usefixtures("on_gpus")
def test_explain_counts_the_rows_that_travel():
    """Tokens of 16 bf16 with three ids and weights go where they have a choice; rows of all."""
    bytes_, chosen, how = told(layer(), *half_precision())
    assert bytes_ == round(7 * 2 * (P_EIGHT * (2 * 16 + 8 * 3) + 3 / 8 * 2 * 16))
    assert chosen == "asked for"
    why = "an expert has fewer than 192 rows of a device's tokens in the mean; nor in the order of "
    why += "experts: a device has fewer than 8 experts"
    rows = "the second product stores rows on the devices of tokens"
    assert how == f"{rows}; the exchange is not beside the products: {why}"


SUMS = round(7 * 2 * P_EIGHT * (2 * 2 * 16 + 8 * 3))
SUMS_FLOAT32 = round(7 * 2 * P_EIGHT * (2 * 4 * 16 + 8 * 3))


@pytest.mark.usefixtures("on_gpus")
def test_explain_says_that_sums_travel_under_a_derivative():
    """Whether the function was traced before, and whatever stands beside it."""
    ids, a = half_precision()
    value = jax.jit(layer())
    pushed = told(value, ids, a)

    def loss(x):
        return jnp.sum(value(ids, a | {"x": x}).astype(jnp.float32))

    derivative = (SUMS, "asked for", "sums of devices travel: a derivative is taken")
    for fn in (jax.grad(loss), jax.jit(jax.value_and_grad(loss)), jax.grad(jax.checkpoint(loss))):
        assert told(fn, jnp.asarray(a["x"])) == derivative
    assert told(value, ids, a) == pushed
    both = jaxmoe.explain(lambda x: (loss(x), jax.grad(loss)(x)), jnp.asarray(a["x"])).dispatches
    assert [line.split(" bytes")[0] for line in both] == [
        f"direct along 'expert': {bytes_}" for bytes_ in (pushed[0], SUMS)
    ]


def test_explain_says_why_sums_travel(on_gpus, monkeypatch):
    ids, a = half_precision()
    float32 = {n: v if n == "weights" else v.astype("float32") for n, v in a.items()}
    several = "sums of devices travel: the layer is no one call: "
    assert told(layer(), ids, float32) == (
        *(SUMS_FLOAT32, "asked for"),
        f"{several}float32 products are sums of several",
    )
    own = layer(activation=lambda gate, up: jnp.sin(gate) * up)
    assert told(own, ids, a) == (SUMS, "asked for", f"{several}no kernel has its activation")
    forward = layer(forward_format="fp8_channel")
    wide = a | {n: np.tile(a[n], (1, 8)) for n in ("x", "residual")}
    wide |= {"w_gate_up": np.tile(a["w_gate_up"], (1, 8, 2))}
    wide |= {"w_down": np.tile(a["w_down"], (1, 2, 8))}
    *_, how = told(forward, ids, wide)
    assert how == f"{several}in forward_fp8_channel it is made of several"
    many = wide | {"weights": np.tile(a["weights"], (1, 5))}
    needed = peers.needed_bytes(2, 15, 8, 2 * 128, 15, 2 * 128, quantized=False)
    small = dataclasses.replace(on_gpus, num_bytes=needed)
    monkeypatch.setitem(peers._open, ("expert",), small)
    *_, how = told(layer(), np.tile(ids, (1, 5)), many)
    rows = expert_parallel.peer_memory_bytes(2, 128, 15, 8)
    assert rows > needed  # room for sums, and not for 15 rows a token
    assert how.startswith(f"sums of devices travel: rows need {rows} bytes of peer memory, and")


def test_explain_says_that_sums_travel_in_several_ways(monkeypatch):
    """With an axis that splits I, and where what arrives goes on along another axis."""
    ids, a = half_precision()
    memory = peers.PeerMemory(("expert",), 4, ENOUGH, True, ("tensor",), 2)
    monkeypatch.setitem(peers._open, ("expert",), memory)
    sizes = {"tensor": 2, "expert": 4}
    *_, how = told(functools.partial(split_layer, sizes=sizes, dispatch="direct"), ids, a)
    assert how == "sums of devices travel: tensor_axis='tensor'"
    memory = dataclasses.replace(memory, group_axes=("data",))
    monkeypatch.setitem(peers._open, ("expert",), memory)
    both = P(("data", "expert"))

    def part(ids, a):
        w = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")
        return expert_parallel.moe_mlp(
            *(a["x"], jaxmoe.Routing(ids, a["weights"]), w),
            axis_name=("data", "expert"),
            dispatch=("all_to_all", "direct"),
        )

    split = jax.shard_map(part, mesh=mesh(**DATA), in_specs=both, out_specs=both)
    plain = {n: v for n, v in a.items() if n != "residual"}
    first, second = jaxmoe.explain(split, ids, plain).dispatches
    assert first.startswith("all_to_all along 'data': ")
    assert second.startswith("direct along 'expert': ")
    assert second.endswith("; sums of devices travel: experts lie along several axes")


@pytest.mark.usefixtures("memory")
def test_explain_says_that_collectives_do_it_without_gpus():
    count, chosen, how = told(layer(), ids_of("uniform"), arrays())
    assert count == 7 * 2 * (2 * 4 * 16 + 8 * 3)  # every token goes everywhere
    assert (chosen, how) == ("asked for", "by XLA's collectives, there is no memory of GPUs")


def test_auto_takes_it_where_memory_is_large_enough(on_gpus, monkeypatch):
    def taken():
        report = str(jaxmoe.explain(layer(dispatch="auto"), *half_precision()))
        return "peer_dispatch" in report

    assert taken()
    needed = expert_parallel.peer_memory_bytes(NUM_TOKENS // 8, 16, 3, 8)
    for num_bytes, fits in ((needed, True), (needed - 1, False)):
        small = peers.PeerMemory(("expert",), 8, num_bytes, on_gpus=True)
        monkeypatch.setitem(peers._open, ("expert",), small)
        assert taken() == fits
    monkeypatch.setitem(peers._open, ("expert",), peers.PeerMemory(("expert",), 8, needed, False))
    assert not taken()  # collectives by another name
    del on_gpus


def test_a_jitted_auto_takes_what_is_open(monkeypatch):
    """Traced before, meanwhile or after, and in whatever thread; as before if opened again so."""
    monkeypatch.setattr(connect, "connect", lambda *_: None)
    monkeypatch.setattr(connect, "close", lambda _: None)
    monkeypatch.setattr(peers, "_is_of_gpus", lambda _: True)
    traced = []

    def auto(ids, a):
        traced.append(1)
        return layer(dispatch="auto")(ids, a)

    call, (ids, a) = jax.jit(auto), half_precision()

    def taken():
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            texts = [str(jax.make_jaxpr(call)(ids, a))]
            texts.append(str(thread.submit(jax.make_jaxpr(call), ids, a).result()))
        (found,) = {"peer_dispatch" in text for text in texts}
        return found

    open_it = functools.partial(expert_parallel.open_peer_memory, mesh(**EIGHT), "expert")
    assert not taken()
    for again in (False, True):
        with open_it(num_bytes=ENOUGH):
            assert taken() and taken()
        assert not taken()
        assert len(traced) == 2, again
    with open_it(num_bytes=11264):  # too little
        assert not taken()
    with open_it(num_bytes=ENOUGH):
        refused = jax.jit(layer())
        jax.make_jaxpr(refused)(ids, a)
    with pytest.raises(ValueError, match="call jaxmoe.expert_parallel.open_peer_memory"):
        jax.make_jaxpr(refused)(ids, a)


def test_direct_is_estimated_where_there_is_memory():
    choose = functools.partial(expert_parallel.choose_dispatch, 4096, 7168, 8, 8)
    assert choose().name == "all_gather" and "direct" not in choose().microseconds
    assert choose(direct=True).name == "direct" and "direct about" in choose(direct=True).reason
    slow = expert_parallel.Links(direct_gbps=10.0)
    assert choose(direct=True, links=slow).name == "all_gather"


def test_what_direct_is_estimated_by_are_tokens_and_sums():
    """Whatever travels while products go on, which were part of what was measured."""
    choice = expert_parallel.choose_dispatch(4096, 2048, 8, 2, direct=True)
    sums = round(4096 * (1 - (1 / 2) ** 8) * (2 * 2 * 2048 + 8 * 8))
    assert choice.sent_bytes["direct"] == sums
    assert choice.microseconds["direct"] == pytest.approx(100 + sums / 320e3)


def test_the_estimates_of_direct_are_what_was_measured():
    """Two H100s: what a layer of qwen3-30b-a3b takes longer than one that sends nothing."""

    def estimated(num_tokens):
        choice = expert_parallel.choose_dispatch(num_tokens, 2048, 8, 2, direct=True)
        assert choice.name == "direct"
        return choice.microseconds["direct"]

    assert 22 <= estimated(8) < estimated(64) <= 27
    assert estimated(4096) == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize(
    "num_devices, hidden, itemsize, dispatch_itemsize, most",
    [
        (2, 2048, 2, None, 1024),  # a row is one piece of 4 KiB
        (8, 2048, 2, 1, 256),  # so is the sum
        (2, 2880, 2, None, 512),  # and here it is two
        (2, 7168, 2, 1, 256),  # four
        (2, 16, 4, None, 1024),
    ],
)
def test_few_tokens_are_as_many_as_one_launch_takes(
    num_devices, hidden, itemsize, dispatch_itemsize, most
):
    links = expert_parallel.Links(direct_us=1e6, direct_few_us=0.0)

    def estimated(num_tokens):
        sizes = num_tokens, hidden, 8, num_devices
        widths = {"itemsize": itemsize, "dispatch_itemsize": dispatch_itemsize}
        choice = expert_parallel.choose_dispatch(*sizes, **widths, links=links, direct=True)
        return choice.microseconds["direct"]

    assert estimated(0) == 0.0
    assert estimated(most) < 1e6 < estimated(most + 1)


def test_without_memory_it_is_refused():
    with pytest.raises(ValueError, match="call jaxmoe.expert_parallel.open_peer_memory"):
        jax.eval_shape(layer(), ids_of("uniform"), arrays())
    with (
        expert_parallel.open_peer_memory(mesh(**DATA), "expert", num_bytes=ENOUGH),
        pytest.raises(ValueError, match="that its 8 devices reach"),  # it is open for four
    ):
        jax.eval_shape(layer(), ids_of("uniform"), arrays())


def test_memory_that_is_too_small_is_refused_with_what_is_needed():
    ids, a = ids_of("uniform"), arrays()
    rule = (
        r"needs (\d+) bytes of peer memory for 2 tokens of each of 8 devices, and num_bytes=11264"
    )
    with (
        expert_parallel.open_peer_memory(mesh(**EIGHT), "expert", num_bytes=11264),
        pytest.raises(ValueError, match=rule) as caught,
    ):
        jax.eval_shape(layer(), ids, a)
    needed = int(re.search(rule, str(caught.value))[1])
    for num_bytes, fits in ((needed, True), (needed - 1, False)):
        with expert_parallel.open_peer_memory(mesh(**EIGHT), "expert", num_bytes=num_bytes):
            try:
                jax.eval_shape(layer(), ids, a)
            except ValueError:
                assert not fits
            else:
                assert fits


def test_auto_takes_nothing_that_would_be_refused(on_gpus, monkeypatch):
    """Own tokens apart, and an axis that the jax.shard_map leaves to XLA."""
    del on_gpus
    ids, a = half_precision()
    for options, taken in (({}, "direct"), ({"own_apart": True}, "all_gather")):
        (line,) = jaxmoe.explain(layer(dispatch="auto", **options), ids, a).dispatches
        assert line.startswith(taken)
    four = peers.PeerMemory(("expert",), 4, ENOUGH, True, ("data",), 2)
    monkeypatch.setitem(peers._open, ("expert",), four)

    def part(ids, a, way):
        w = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")
        routing = jaxmoe.Routing(ids, a["weights"])
        return expert_parallel.moe_mlp(a["x"], routing, w, axis_name="expert", dispatch=way)

    def split(way):
        return jax.shard_map(
            functools.partial(part, way=way),
            mesh=mesh(**DATA),
            in_specs=P("expert"),
            out_specs=P("expert"),
            axis_names={"expert"},
        )

    (line,) = jaxmoe.explain(split("auto"), ids, a).dispatches
    assert line.startswith("all_gather")
    with pytest.raises(ValueError, match="over all axes of the mesh, and 'data' is left to XLA"):
        jax.eval_shape(split("direct"), ids, a)


def test_own_apart_is_refused(memory):
    del memory
    with pytest.raises(ValueError, match="own_apart=True needs dispatch 'all_gather'"):
        jax.eval_shape(layer(own_apart=True), ids_of("uniform"), arrays())


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"mesh": "eight"}, TypeError, "mesh must be a jax.sharding.Mesh"),
        ({"axis_name": "experts"}, ValueError, "axis_name='experts' must be one of"),
        ({"num_bytes": 11263}, ValueError, "num_bytes=11263 must be at least 11264"),
        ({"num_bytes": 1e6}, TypeError, "num_bytes"),
        ({"axis_name": ()}, ValueError, "axis_name=() must be an axis of the mesh, or several"),
        ({"axis_name": ("expert", "expert")}, ValueError, "several, each once"),
        ({"timeout_s": 0}, ValueError, "timeout_s=0 must be in (0, 1e+06]"),
        ({"timeout_s": "5"}, TypeError, "timeout_s='5' must be a number of seconds"),
        ({"timeout_s": True}, TypeError, "timeout_s=True must be a number of seconds"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s=inf"),
    ],
    ids=str,
)
def test_what_cannot_be_opened(given, error, message):
    options = {"mesh": mesh(**EIGHT), "axis_name": "expert", "num_bytes": ENOUGH, **given}
    with pytest.raises(error, match=re.escape(message)):
        expert_parallel.open_peer_memory(**options)
    assert not peers._open


def test_an_axis_has_one_memory_until_it_is_closed(memory):
    again = functools.partial(expert_parallel.open_peer_memory, mesh(**EIGHT), num_bytes=ENOUGH)
    with pytest.raises(ValueError, match="axis_name='expert' has open memory already"):
        again("expert")
    memory.close()
    with again("expert") as other:
        memory.close()  # closed before: not the other one
        assert peers.opened("expert", 8) is other
    assert peers.opened("expert", 8) is None


def test_groups_are_the_devices_along_an_axis_as_programs_count_them():
    grid = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)

    def place(names):
        split = jax.shard_map(
            lambda x: x + jax.lax.axis_index(names),
            mesh=grid,
            in_specs=P(("a", "b", "c")),
            out_specs=P(("a", "b", "c")),
        )
        return np.asarray(split(jnp.zeros(8, jnp.int32)))

    flat = list(grid.devices.flat)
    for names in (("b",), ("a", "c"), ("c", "a")):
        others = tuple(name for name in grid.axis_names if name not in names)
        groups = connect.groups_of(grid, names, others)
        assert groups.shape == (8 // 2 ** len(names), 2 ** len(names))
        index = place(names)
        for group in groups:
            assert [int(index[flat.index(device)]) for device in group] == list(range(len(group)))


def test_the_way_is_known_by_its_memory():
    on_cpu = peers.PeerMemory(("a", "b"), 4, ENOUGH, on_gpus=False)
    assert direct.way_of(("a", "b"), 2, on_cpu).memory == ""
    on_gpu = peers.PeerMemory(("a", "b"), 4, ENOUGH, on_gpus=True)
    assert direct.way_of(("a", "b"), 2, on_gpu) == (("a", "b"), 4, 2, "('a', 'b')", (), "")


def test_a_program_with_another_mesh_is_refused():
    """One that has not the devices of the other axes, or others of them."""
    with expert_parallel.open_peer_memory(mesh(**DATA), "expert", num_bytes=ENOUGH) as opened:
        assert (opened.group_axes, opened.num_groups) == (("data",), 2)
        four = functools.partial(split_layer, sizes={"expert": 4}, dispatch="direct")
        message = "needs the mesh that its memory was opened for, whose other axes ('data',) have 2"
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(four, ids_of("uniform"), arrays())


def test_an_axis_of_one_device_may_be_left_to_xla():
    grid = mesh(data=1, expert=8)
    ids, a = ids_of("uniform"), arrays()

    def part(ids, a):
        w = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")
        routing = jaxmoe.Routing(ids, a["weights"])
        return expert_parallel.moe_mlp(a["x"], routing, w, axis_name="expert", dispatch="direct")

    split = functools.partial(jax.shard_map, mesh=grid, in_specs=P("expert"))
    call = split(part, out_specs=P("expert"), axis_names={"expert"})
    with expert_parallel.open_peer_memory(grid, "expert", num_bytes=ENOUGH):
        assert jax.eval_shape(call, ids, a).shape == a["x"].shape


def test_a_dispatch_of_tokens_alone_has_nothing_beside_them(on_gpus):
    """An operand without elements stands for small numbers, and no result."""
    way = direct.way_of("expert", 2, on_gpus)
    split = jax.shard_map(
        lambda slots, x: direct.send(way, slots, x, None),
        mesh=mesh(**EIGHT),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    ids, a = half_precision()
    assert [x.shape for x in jax.eval_shape(split, ids, a["x"])] == [(128, 3), (128, 16)]
    ((_, _, operands, _),) = calls(cuda_text(split, ids, a["x"]))
    assert operands == ["i32", "2x3xi32", "2x16xbf16", "0x0xf32"]


@pytest.mark.parametrize(
    "op, names", [("send", ("tokens", "small")), ("combine", ("rows", "residual", "small"))]
)
def test_the_tangent_of_a_call_is_the_call_of_tangents(op, names):
    """Read from the program, as no CPU runs it: each in the place of what it is a tangent of."""
    call = getattr(direct, f"peer_{op}_p")
    way = direct.Way("expert", 8, 2, "expert")
    where = jnp.int32(0), jnp.zeros((2, 3), jnp.int32), jnp.zeros((16, 3), jnp.int32)
    count = {"tokens": 2, "rows": 16, "residual": 2, "small": 2 if op == "send" else 16}
    numbers = [jnp.ones((count[name], 4 + i), jnp.float32) for i, name in enumerate(names)]
    if op == "combine":
        numbers[1] = jnp.ones((2, 4))

    def along(primals, tangents):
        return jax.jvp(lambda *a: call(*where, *a, way=way), primals, tangents)

    jaxpr = jax.make_jaxpr(along)(tuple(numbers), tuple(numbers)).jaxpr
    of_values, of_tangents = [eqn for eqn in jaxpr.eqns if "peer" in str(eqn.primitive)]
    values, tangents = jaxpr.invars[: len(names)], jaxpr.invars[len(names) :]
    assert list(of_values.invars[3:]) == values
    assert list(of_tangents.invars[3:]) == tangents


def test_a_place_is_one_of_the_whole_mesh():
    """Which kernels compare with the one that the memory was opened for."""
    with expert_parallel.open_peer_memory(mesh(**DATA), "expert", num_bytes=ENOUGH) as opened:
        both = P(("data", "expert"))

        def place(x):
            return x + direct.place_of(direct.way_of("expert", 1, opened))

        split = jax.shard_map(place, mesh=mesh(**DATA), in_specs=both, out_specs=both)
        assert split(jnp.zeros(8, jnp.int32)).tolist() == list(range(8))
        groups = connect.groups_of(mesh(**DATA), ("expert",), ("data",))
        assert list(groups.flat) == list(mesh(**DATA).devices.flat)


def test_memory_has_room_for_the_backward_pass():
    """Small numbers travel beside tokens, as their cotangents do, and ids beside both."""
    sizes = {"num_tokens": 256, "top_k": 8, "num_devices": 8, "small": 16, "row_bytes": 32}
    needed = peers.needed_bytes(token_bytes=32, quantized=False, **sizes)
    assert needed == peers.HEADER_BYTES + 12 * 8 * 256 * (32 + 4 * 8 + 4 * 16)
    bytes_ = peers.needed_bytes(token_bytes=8, quantized=True, **sizes)  # of which none come home
    assert bytes_ == peers.HEADER_BYTES + 12 * 8 * 256 * (8 + 4 * 8 + 4 * 16)
    packed = peers.needed_bytes(256, 8, 1, 16, 0, 4096, quantized=True)
    assert packed == peers.HEADER_BYTES + 12 * peers.dispatch_bytes(256, 8, 1, 4096, 0)


def test_memory_is_that_of_what_takes_most():
    """Of wide tokens with their weights, quantized or not; of cotangents; of a row a choice."""
    dispatched = peers.dispatch_bytes(4096, 8, 8, 2 * 7168, 8)
    needed = expert_parallel.peer_memory_bytes(4096, 7168, 8, 8)
    assert needed == peers.total_bytes(dispatched)  # scales of quantized tokens do not come home
    chosen = peers.rows_bytes(4096, 16, 2 * 7168)
    assert expert_parallel.peer_memory_bytes(4096, 7168, 16, 2) == peers.total_bytes(chosen)


@pytest.mark.parametrize("name", ("num_tokens", "hidden", "top_k", "num_devices", "itemsize"))
def test_memory_is_of_positive_sizes(name):
    given = {"num_tokens": 2, "hidden": 16, "top_k": 2, "num_devices": 2, "itemsize": 2}
    with pytest.raises(ValueError, match=f"peer_memory_bytes: {name}=0 must be at least 1"):
        expert_parallel.peer_memory_bytes(**given | {name: 0})
    with pytest.raises(TypeError, match=f"peer_memory_bytes: {name} must be a Python int"):
        expert_parallel.peer_memory_bytes(**given | {name: 1.5})


@pytest.mark.parametrize("half", (256, 98304, 2 << 20, 3 << 20, 5 << 20, 1 << 23, 1 << 30))
def test_memory_is_divided_as_it_was_counted(half):
    """Into halves that have what was asked for, and parts for few tokens, in pairs and lines."""
    got, few, lines = peers.parts_of(peers.total_bytes(half))
    pairs = min(3 * half, peers.MOST_PAIR_BYTES)
    assert (got, few - lines, lines) == (half, pairs, min(2 * half, peers.MOST_LINE_BYTES))
    more = peers.parts_of(peers.total_bytes(half) + 1001)
    assert all(a % 256 == 0 for a in more)
    assert peers.HEADER_BYTES + 2 * sum(more[:2]) <= peers.total_bytes(half) + 1001


@pytest.mark.parametrize("num_devices", (2, 8))
@pytest.mark.parametrize("hidden, top_k", [(2048, 8), (7168, 8), (256, 2)])
def test_memory_for_few_tokens_has_room_for_their_flags(num_devices, hidden, top_k):
    """Rows, slots and small numbers of all devices, each 8 bytes in 16; and rows in lines."""
    for count in (1, 8, 64):
        needed = expert_parallel.peer_memory_bytes(count, hidden, top_k, num_devices)
        _, few, lines = peers.parts_of(needed)
        pairs = -(-count * top_k // 2) + count * (hidden // 4 + top_k + hidden // 256)
        assert min(16 * num_devices * pairs, peers.MOST_PAIR_BYTES) <= few - lines
        of_rows = 128 * num_devices * count * -(-2 * hidden // 112)
        assert min(of_rows, peers.MOST_LINE_BYTES) <= lines


def test_lines_of_the_most_that_are_few_have_room():
    """Whatever the rows are: 2048 pieces of 4 KiB, begun ones too."""
    for row_bytes in (1024, 4096, 4112, 7168, 14336, 28672):
        rows = 2048 // -(-row_bytes // 4096)
        assert 128 * rows * -(-row_bytes // 112) <= peers.MOST_LINE_BYTES


@pytest.mark.usefixtures("on_gpus")
def test_processes_that_agree_on_nothing_say_so(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = []

    def gather(mine):
        told.append(mine)
        other = mine.copy()
        other[0] ^= differs
        return np.stack([mine, other])

    monkeypatch.setattr(connect.multihost_utils, "process_allgather", gather)
    differs = 0
    connect._agree(connect.OPEN, "open", "expert", 4096)
    differs = 1
    message = "all processes must open the same memory, with the same mesh and sizes"
    with pytest.raises(ValueError, match=message):
        connect._agree(connect.OPEN, "open", "expert", 4096)
    assert (told[0] == told[1]).all() and told[0].shape == (32,)


class Extension:
    """What the CUDA extension does for memory, without any."""

    def __init__(self, fails="", links=True):
        self.calls, self.fails, self.links = [], fails, links

    def __getattr__(self, name):
        def call(*given):
            self.calls.append((name, *given))
            if name == self.fails:
                raise RuntimeError(f"{name} out of memory")
            if name == "peer_has_native_atomics":
                return self.links
            if name != "peer_allocate":
                return None
            return 4096 * given[1] + 64, bytes([given[1]]) * 64, f"0000:{given[1]:02}:00.0"

        return call


def connected(monkeypatch, extension, others, good=True):
    """Opens memory between two devices of this process and what another one tells."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(connect, "_extension", lambda: extension)
    if extension is not None:
        monkeypatch.setattr(connect, "_PLATFORM", "cpu")
        monkeypatch.setattr(connect, "_check", lambda groups: None)

    def gather(mine):
        if mine.dtype == bool:
            return np.stack([mine, np.array([good])])
        if mine.ndim == 1:
            return np.stack([mine, mine])
        return np.stack([mine, others(mine)])

    monkeypatch.setattr(connect.multihost_utils, "process_allgather", gather)
    devices = np.array([Device(0, 0), Device(1, 0), Device(0, 1), Device(1, 1)])
    connect.connect("expert", devices[None, :], (1024, 512, 256), 2.0)


class Device:
    def __init__(self, ordinal, process):
        self.local_hardware_id, self.process_index = ordinal, process
        self.id = 2 * process + ordinal


def told_by_another(mine, host=None):
    rows = np.zeros(4, connect._ROW)
    own = mine.view(connect._ROW).reshape(-1)
    for i in (2, 3):
        host = own["host"][0] if host is None else host
        rows[i] = host, 7 + i, bytes([90 + i]) * 64, f"0000:{i:02}:00.0".encode()
    return rows.view(np.uint8).reshape(mine.shape)


def test_processes_tell_each_other_where_their_memory_is(monkeypatch):
    extension = Extension()
    connected(monkeypatch, extension, told_by_another)
    allocated, asked, opened = (extension.calls[i : i + 2] for i in (0, 2, 4))
    assert allocated == [("peer_allocate", "expert", i, 1024, 512, True) for i in (0, 1)]
    own = [(0, 64, bytes(64)), (1, 4160, bytes([1]) * 64)]
    everyone = [*own, (-1, 9, bytes([92]) * 64), (-1, 10, bytes([93]) * 64)]
    assert opened == [("peer_connect", "expert", i, i, 0, 256, 2.0, everyone) for i in (0, 1)]
    buses = [f"0000:0{i}:00.0" for i in range(4)]
    assert asked == [("peer_has_native_atomics", i, buses) for i in (0, 1)]


@pytest.mark.parametrize("here, there", [(False, True), (True, False)])
def test_there_are_no_lines_where_a_link_is_not_known_to_keep_them(here, there, monkeypatch):
    """In any process, whichever of them finds it."""
    extension, said = Extension(links=here), []
    monkeypatch.setattr(connect, "_all_say", lambda good: said.append(good) or (good and there))
    monkeypatch.setattr(connect, "_exchange", lambda groups, found: found)
    monkeypatch.setattr(connect, "_extension", lambda: extension)
    monkeypatch.setattr(connect, "_check", lambda groups: None)
    monkeypatch.setattr(connect, "_drain", lambda: None)
    devices = np.array([[Device(0, 0), Device(1, 0)]])
    with contextlib.suppress(RuntimeError):  # where the other says no, it does so to all
        connect.connect("expert", devices, (1024, 512, 256), 2.0)
    opened = [call for call in extension.calls if call[0] == "peer_connect"]
    assert [call[5] for call in opened] == [0, 0] and said[0] is here


def test_without_kernels_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(_targets, "why_not", lambda: "this build has none")
    with pytest.raises(NotImplementedError, match="no kernels here: this build has none"):
        connected(monkeypatch, None, told_by_another)


def test_more_gpus_than_memory_reaches_are_refused(monkeypatch):
    """Before there is any; as many as there may be are not."""
    devices = np.array([Device(i, 0) for i in range(17)])
    monkeypatch.setattr(_targets, "why_not", lambda: None)
    connect._check(devices[None, :16])
    with pytest.raises(NotImplementedError, match="the axis has 17 GPUs, which must be at most 16"):
        connect._check(devices[None, :])


@pytest.mark.parametrize(
    "fails, others, good, error, message",
    [
        ("peer_allocate", told_by_another, True, RuntimeError, "peer_allocate out of memory"),
        ("peer_connect", told_by_another, True, RuntimeError, "peer_connect out of memory"),
        ("", np.zeros_like, True, RuntimeError, "another process has no memory"),
        ("", told_by_another, False, RuntimeError, "another process could not open the memory"),
        (
            "",
            functools.partial(told_by_another, host=b"elsewhere"),
            True,
            NotImplementedError,
            "the axis has GPUs of 2 hosts",
        ),
    ],
    ids=("no memory", "no access", "none there", "failed there", "hosts"),
)
def test_what_fails_in_one_process_is_undone_in_all(
    fails, others, good, error, message, monkeypatch
):
    extension = Extension(fails)
    with pytest.raises(error, match=message) as caught:
        connected(monkeypatch, extension, others, good)
    assert type(caught.value) is error
    assert [call[0] for call in extension.calls[-2:]] == ["peer_disconnect", "peer_free"]


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
def test_memory_goes_whatever_mesh_is_in_use(kind, monkeypatch):
    extension = Extension()
    monkeypatch.setattr(connect, "_extension", lambda: extension)
    monkeypatch.setattr(connect, "_PLATFORM", "cpu")
    types = (getattr(jax.sharding.AxisType, kind),)
    with jax.set_mesh(jax.make_mesh((8,), ("expert",), axis_types=types)):
        connect.close("expert")
    assert extension.calls == [("peer_disconnect", "expert"), ("peer_free", "expert")]


def test_memory_goes_if_a_program_before_has_failed(monkeypatch):
    extension, waited = Extension(), []

    def fails(a):
        waited.append(a)
        raise RuntimeError("a program before")

    monkeypatch.setattr(connect, "_extension", lambda: extension)
    monkeypatch.setattr(connect, "_PLATFORM", "cpu")
    monkeypatch.setattr(connect.jax, "block_until_ready", fails)
    with pytest.raises(RuntimeError, match="a program before"):
        connect.close("expert")
    assert [call[0] for call in extension.calls] == ["peer_disconnect", "peer_free"]
    assert len(waited) == jax.local_device_count()  # whichever fails, it waits for the others


# Formats of weights and of tokens beside them, and the one that these are sent in.
OF_TOKENS = (
    ("nvfp4", "nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8", "mxfp8"),
    ("mxfp4", "mxfp8", "mxfp8"),
    ("int4_g128", "e4m3", "fp8_channel"),
)


def layer_of_tokens(format, token_format, count):
    """A layer over an axis, and on one device, of `count` tokens; some choices go nowhere."""
    rng = np.random.default_rng(3)
    draw = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.bfloat16)  # noqa: E731
    weights = {"gate_up": draw(16, 128, 256) / 8, "down": draw(16, 128, 128) / 8}
    quantized = {n: quantize(w, format, weight_layout="kn") for n, w in weights.items()}
    # A scale of all rows of a device would be another one than that of all rows.
    scales = {n: jnp.float32(2**-9) for n in ("x_scale", "h_scale") if format == "nvfp4"}
    experts = jaxmoe.Experts(**quantized, **scales, token_format=token_format)
    x = draw(count, 128)
    ids = rng.integers(-1, 17, (count, 3)).astype(np.int32)
    routing = jaxmoe.Routing(jnp.asarray(ids), jnp.asarray(rng.random((count, 3)), jnp.float32))

    # One tile: some decode weights, which rounds them, and some multiply codes.
    config = (jaxmoe.GemmConfig(128, 64),) * 2

    def over(grid, **options):
        options["config"] = config
        call = functools.partial(expert_parallel.sharded_moe_mlp, mesh=grid, axis_name="expert")
        return jax.jit(functools.partial(call, **options))(x, routing, experts)

    one = dataclasses.replace(routing, num_experts=16)
    alone = jax.jit(functools.partial(jaxmoe.moe_mlp, config=config))
    return over, lambda: alone(x, one, experts)


def relative(got, want):
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("format, token_format, sent", OF_TOKENS)
def test_tokens_travel_in_the_format_of_tokens(format, token_format, sent):
    """Words of packed tokens with their scales, or bytes: as if they were rounded on arrival."""
    over, alone = layer_of_tokens(format, token_format, 8 * 6)
    got = over(mesh(**EIGHT), dispatch="direct", dispatch_format=sent)
    for dispatch, format in (("direct", None), ("all_to_all", sent), ("all_gather", None)):
        assert_equal(got, over(mesh(**EIGHT), dispatch=dispatch, dispatch_format=format))
    assert relative(got, alone()) < 2**-8
