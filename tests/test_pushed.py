"""dispatch="direct" whose second product stores rows at their source: when it does, and what else.

On CPUs, where memory is said to be that of GPUs, programs are made with both ways and run the one
of collectives.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import GemmConfig, expert_parallel, quantize
from jaxmoe._ep import direct, peers, pushed
from jaxmoe._gemm.scratch import mlp_index_size
from jaxmoe._mlp import tuned
from jaxmoe._testing import assert_equal
from tests.lowered import calls, cuda_text
from tests.test_direct import ENOUGH, OF_TOKENS, half_precision, layer, layer_of_tokens
from tests.test_expert_parallel import EIGHT, NUM_TOKENS, ids_of, mesh, split_layer

PUSHED, COMBINE, DISPATCH, LAYER = (
    f"jaxmoe_{name}_v1" for name in ("peer_moe_mlp", "peer_combine", "peer_dispatch", "moe_mlp")
)
TILES = {"w_gate_up": (1, 8, 16), "w_down": (1, 16, 8)}  # to H = 128 and I = 128
RESULTS = ("y", "targets", "rows", "act", "xq", "hq", "floats", "index")


@pytest.fixture
def on_gpus(monkeypatch):
    """As if memory were open on eight GPUs; a function that says how large it is."""

    def opened(num_bytes=ENOUGH):
        memory = peers.PeerMemory(("expert",), 8, num_bytes, on_gpus=True)
        monkeypatch.setitem(peers._open, ("expert",), memory)

    opened()
    return opened


@pytest.fixture
def both():
    """Runs a function with memory of no GPUs, then with one that is said to be of GPUs."""
    with expert_parallel.open_peer_memory(mesh(**EIGHT), "expert", num_bytes=ENOUGH) as opened:

        def results(fn, *args):
            found = []
            for on_gpus in (False, True):
                peers._open["expert",] = dataclasses.replace(opened, on_gpus=on_gpus)
                found.append(jax.jit(lambda *a: fn(*a))(*args))
            peers._open["expert",] = opened
            return found

        yield results


@dataclasses.dataclass(frozen=True)
class Asked:
    """A table of tiles that has the same for every layer."""

    first: GemmConfig
    second: GemmConfig

    def find(self, *_):
        return self.first, self.second


def called(fn, *args):
    """Targets of the calls of a program for CUDA, in order."""
    return [target for target, *_ in calls(cuda_text(fn, *args))]


def quantized(format):
    ids, a = half_precision()
    wide = {n: np.tile(a[n], tiles) for n, tiles in TILES.items()}
    a |= {n: quantize(w, format, weight_layout="kn") for n, w in wide.items()}
    a |= {n: jnp.tile(a[n], 8) for n in ("x", "residual")}
    return ids, a


@pytest.mark.usefixtures("on_gpus")
def test_the_call_takes_what_the_layer_takes():
    """And its own tokens' slots, weights and residual; no rows lie here."""
    found = calls(cuda_text(layer(), *half_precision()))
    assert [target for target, *_ in found] == [DISPATCH, PUSHED]
    _, attrs, operands, results = found[1]
    assert attrs["peers"] == {"memory": "expert", "num_devices": "8:i64", "num_local": "2:i64"}
    assert attrs["layer"]["num_local_experts"] == "2:i64" and attrs["layer"]["finalize"] == "1:i64"
    assert operands[:7] == [
        *("i32", "2x3xi32", "2x3xf32", "2x16xbf16"),  # of this device
        *("16x16xbf16", "0xf32", "16x3xi32"),
    ]
    named = dict(zip(RESULTS, results, strict=True))
    assert (named["y"], named["targets"], named["act"]) == ("2x16xbf16", "48x2xi32", "48x8xbf16")
    assert named["rows"] == "0x16xbf16"


@pytest.mark.usefixtures("on_gpus")
def test_weights_travel_alone_beside_tokens_and_before_scales():
    """A dispatch brings slots, so they are not sent twice, and nothing is put together for it."""
    text = cuda_text(layer(), *half_precision())
    (_, _, operands, results), _ = calls(text)
    assert operands == ["i32", "2x3xi32", "2x16xbf16", "2x3xf32"]
    assert results[:3] == ["16x3xi32", "16x16xbf16", "16x3xf32"]
    assert "stablehlo.concatenate" not in text
    slots, small = re.search(rf"@{DISPATCH}\(%\w+, (%\w+), %\w+, (%\w+)\)", text).groups()
    for given in (slots, small):  # and ids are slots as they are
        assert re.search(rf"{given} = stablehlo.slice %arg\d+ ", text)
    found = calls(cuda_text(layer(dispatch_format="fp8_block"), *quantized("fp8_block")))
    (dispatch,) = [operands for target, _, operands, _ in found if target == DISPATCH]
    assert dispatch == ["i32", "2x3xi32", "2x128xf8E4M3FN", "2x4xf32"]  # one scale


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("format", ("fp8_block", "fp8_tensor", "int4_g128", "mxfp4"))
def test_quantized_weights_are_one_call_too(format):
    assert called(layer(), *quantized(format))[-2:] == [DISPATCH, PUSHED]


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("format, token_format, sent", OF_TOKENS)
def test_tokens_that_travel_quantized_are_one_call_too(format, token_format, sent):
    over, _ = layer_of_tokens(format, token_format, 8 * 6)
    layer = functools.partial(over, mesh(**EIGHT), dispatch="direct", dispatch_format=sent)
    assert called(layer)[-2:] == [DISPATCH, PUSHED]


@pytest.mark.usefixtures("on_gpus")
def test_packed_weights_have_a_kernel_for_each_product():
    """That of both stores rows in the result alone; without peers it is chosen."""
    with tuned.within(Asked(GemmConfig(128, 8, one_kernel=True), GemmConfig(128, 8))):
        (*_, (_, attrs, _, results)) = calls(cuda_text(layer(), *half_precision()))
    assert attrs["layer"]["gemm1"]["one_kernel"] == "1:i64"
    assert results[-1] == f"{mlp_index_size(48, 2, True)}xi32"
    with tuned.within(Asked(GemmConfig(128, 16, one_kernel=True), GemmConfig(128, 16))):
        (*_, (_, attrs, _, results)) = calls(cuda_text(layer(), *quantized("int4_g128")))
    assert attrs["layer"]["gemm1"]["one_kernel"] == "0:i64"
    assert results[-1] == f"{mlp_index_size(48, 2, False)}xi32"


@pytest.mark.usefixtures("on_gpus")
def test_tiles_that_were_measured_are_asked_for():
    """As a layer of the tokens of all devices, which has weights for all of them."""

    class Notes:
        def find(self, problem, a, layer):
            assert a.weights.shape == a.expert_ids.shape and a.residual is None
            found.add((problem.num_tokens, problem.num_local_experts, layer.finalize))

    found = set()
    with tuned.within(Notes()):
        called(layer(), *half_precision())
    assert found == {(16, 2, True)}


@pytest.mark.usefixtures("on_gpus")
def test_each_chunk_is_one_call():
    assert sorted(called(layer(num_chunks=2), *half_precision())) == [DISPATCH] * 2 + [PUSHED] * 2


def test_where_rows_have_no_room_sums_travel(on_gpus):
    """One byte decides; what the sums need is refused, not what rows need."""
    needed = peers.total_bytes(peers.rows_bytes(NUM_TOKENS // 8, 3, 2 * 16))
    least = peers.needed_bytes(NUM_TOKENS // 8, 3, 8, 2 * 16, 3, 2 * 16, quantized=False)
    assert needed < least  # few choices
    ids, a = half_precision()
    many = np.tile(ids, (1, 5))
    a |= {"weights": np.tile(a["weights"], (1, 5))}
    needed = peers.total_bytes(peers.rows_bytes(NUM_TOKENS // 8, 15, 2 * 16))
    least = peers.needed_bytes(NUM_TOKENS // 8, 15, 8, 2 * 16, 15, 2 * 16, quantized=False)
    for num_bytes in (max(needed, least), least):
        on_gpus(num_bytes)
        fits = num_bytes >= needed
        assert called(layer(), many, a) == [DISPATCH, *([PUSHED] if fits else [LAYER, COMBINE])]


def test_room_for_rows_is_asked_for():
    few = expert_parallel.peer_memory_bytes(64, 256, 2, 8)
    many = expert_parallel.peer_memory_bytes(64, 256, 32, 8)
    assert many == peers.total_bytes(64 * 32 * 256 * 2) > 2 * few


def sent_through(memory, num_bytes=ENOUGH, residual=None):
    """What a dispatch of two tokens leaves behind."""
    slots = jnp.zeros((2, 3), jnp.int32)
    way = direct.Way("expert", 8, 2, memory)
    return direct.Sent(way, num_bytes, slots, jnp.zeros((16, 3), jnp.int32), residual)


def test_what_is_one_call():
    ids, a = half_precision()
    found = []

    def seen(operands, layer, _sent):
        found.append((operands, layer))
        return "seen"

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(pushed, "why_not", seen)
        with expert_parallel.open_peer_memory(mesh(**EIGHT), "expert", num_bytes=ENOUGH):
            jax.eval_shape(layer(), ids, a)
    a, of_layer = found[0]
    a = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), a)
    why_not = functools.partial(pushed.why_not, a, of_layer)
    assert why_not(sent_through("expert")) is None
    assert why_not(sent_through("expert", residual=jnp.zeros((2, 16), jnp.bfloat16))) is None
    other = "residual is f32, not the dtype of the layer"
    assert why_not(sent_through("expert", residual=jnp.zeros((2, 16)))) == other
    assert why_not(sent_through("")) == "there is no memory of GPUs"
    rows = peers.total_bytes(peers.rows_bytes(2, 3, 2 * 16))
    room = f"rows need {rows} bytes of peer memory, and {rows - 1} are open"
    assert why_not(sent_through("expert", num_bytes=rows)) is None
    assert why_not(sent_through("expert", num_bytes=rows - 1)) == room
    wide = of_layer.replace(dtype=jnp.dtype("float32"))
    several = "the layer is no one call: float32 products are sums of several"
    assert pushed.why_not(a, wide, sent_through("expert")) == several


@pytest.mark.usefixtures("on_gpus")
def test_other_layers_are_as_they_were():
    """Float32, an activation that no kernel has, and rows no kernel takes."""
    ids, a = half_precision()
    wide = {n: v if n == "weights" else v.astype("float32") for n, v in a.items()}
    assert PUSHED not in called(layer(), ids, wide)
    assert PUSHED not in called(layer(activation=lambda gate, up: jnp.sin(gate) * up), ids, a)
    w_gate_up, w_down = a["w_gate_up"][:, :, :8], a["w_down"][:, :4]  # 8 bytes
    narrow = a | {"w_gate_up": w_gate_up, "w_down": w_down}
    with pytest.raises(NotImplementedError, match="multiple"):
        cuda_text(layer(), ids, narrow)


@pytest.mark.usefixtures("on_gpus")
def test_a_derivative_has_the_calls_that_it_had():
    """Values of training are sums of devices, once: nothing is computed by both ways."""
    ids, a = half_precision()

    def loss(a):
        return jnp.sum(layer()(ids, a).astype(jnp.float32) ** 2)

    found = called(jax.value_and_grad(loss), a)
    assert found.count(DISPATCH) == found.count(COMBINE) == 2
    assert PUSHED not in found
    assert PUSHED in called(loss, a)


@pytest.mark.usefixtures("on_gpus")
def test_residuals_are_those_of_one_way():
    ids, a = half_precision()
    a = {n: jnp.asarray(v) for n, v in a.items()}

    def loss(a):
        return jnp.sum(layer()(ids, a).astype(jnp.float32) ** 2)

    def kept():
        shapes = jax.eval_shape(lambda a: jax.vjp(loss, a)[1], a)
        return sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(shapes))

    ours = kept()
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(pushed, "why_not", lambda *_: "not asked for")
        theirs = kept()
    floats = lambda found: [x for x in found if "float" in x[1]]  # noqa: E731
    assert floats(ours) == floats(theirs)


def test_values_and_gradients_on_a_cpu(both):
    """Those of sums, also with a derivative of a derivative and in forward mode."""
    ids, a = half_precision()
    a = {n: jnp.asarray(v) for n, v in a.items()}

    def loss(a):
        return jnp.sum(jnp.sin(layer()(ids, a).astype(jnp.float32)))

    def everything(a):
        slope = lambda a: jax.jvp(loss, (a,), (a,))[1]  # noqa: E731
        return layer()(ids, a), jax.grad(loss)(a), slope(a), jax.grad(slope)(a)["x"]

    jax.tree.map(assert_equal, *both(everything, a))


@pytest.mark.parametrize("recompute", (None, "z"))
def test_under_scan_remat_and_vmap(both, recompute):
    ids, a = half_precision()
    a = {n: jnp.asarray(v) for n, v in a.items()}
    call = layer(recompute=recompute)

    def programs(a):
        one = lambda x: call(ids, a | {"x": x})  # noqa: E731
        twice = lambda x: jax.lax.scan(  # noqa: E731
            lambda x, _: (jax.checkpoint(one)(x), None), x, length=2
        )[0]
        mapped = jax.vmap(one)(jnp.stack([a["x"], one(a["x"])]))
        return twice(a["x"]), mapped, jax.grad(lambda x: jnp.sum(twice(x)))(a["x"])

    jax.tree.map(assert_equal, *both(programs, a))


def test_weights_on_the_input_are_applied_once(both):
    ids, a = half_precision()
    a |= {"weights": a["weights"][:, :1]}
    call = layer(apply_weight_on_input=True)
    jax.tree.map(assert_equal, *both(call, ids[:, :1], a))


@pytest.mark.usefixtures("on_gpus")
def test_weights_on_the_input_are_ones_at_home():
    ids, a = half_precision()
    a |= {"weights": a["weights"][:, :1]}
    call = functools.partial(layer(apply_weight_on_input=True), ids[:, :1])
    with jaxmoe._jax.targets.force_cuda_lowering():
        jaxpr = str(jax.make_jaxpr(call)(a))
    assert "jaxmoe_peer_moe_mlp" in jaxpr


@pytest.mark.parametrize("check_vma", (True, False))
def test_where_arguments_vary_over_several_axes(check_vma):
    """Of a mesh with a further axis, along which the residual is the same."""
    grid = mesh(data=2, expert=4)
    ids, a = half_precision()
    shared = a.pop("residual")[: NUM_TOKENS // 2]
    both = P(("data", "expert"))
    specs = {"x": both, "weights": both, "w_gate_up": P("expert"), "w_down": P("expert")}

    def part(ids, residual, a):
        w = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")
        return expert_parallel.moe_mlp(
            *(a["x"], jaxmoe.Routing(ids, a["weights"]), w),
            axis_name="expert",
            dispatch="direct",
            residual=residual,
        )

    def loss(ids, residual, a):
        split = jax.shard_map(
            part,
            mesh=grid,
            in_specs=(both, P("expert"), specs),
            out_specs=both,
            check_vma=check_vma,
        )
        return jnp.sum(split(ids, residual, a).astype(jnp.float32))

    found = []
    with expert_parallel.open_peer_memory(grid, "expert", num_bytes=ENOUGH) as opened:
        for on_gpus in (False, True):
            peers._open["expert",] = dataclasses.replace(opened, on_gpus=on_gpus)
            both_of = jax.jit(lambda *a: jax.value_and_grad(loss, argnums=(1, 2))(*a))
            found.append(both_of(ids, shared, a))
        peers._open["expert",] = opened
    jax.tree.map(assert_equal, *found)


@pytest.mark.usefixtures("on_gpus")
def test_of_two_ways_the_sums_travel():
    """What arrives along one axis goes on along another, from where sums come back."""
    ids, a = half_precision()
    grid = mesh(data=2, expert=4)
    memory = peers.PeerMemory(("expert",), 4, ENOUGH, True, ("data",), 2)
    peers._open["expert",] = memory
    both = P(("data", "expert"))

    def part(ids, a):
        w = jaxmoe.Experts(gate_up=a["w_gate_up"], down=a["w_down"], order="interleaved")
        return expert_parallel.moe_mlp(
            *(a["x"], jaxmoe.Routing(ids, a["weights"]), w),
            axis_name=("data", "expert"),
            dispatch=("all_to_all", "direct"),
        )

    split = jax.shard_map(part, mesh=grid, in_specs=both, out_specs=both)
    found = called(split, ids, {n: v for n, v in a.items() if n != "residual"})
    assert found.count(COMBINE) == 1 and PUSHED not in found


def test_the_layer_as_before(both):
    """Invalid choices, and devices without tokens."""
    _, a = half_precision()
    for kind in ("with_invalid", "empty", "one_shard"):
        fn = functools.partial(split_layer, sizes=EIGHT, dispatch="direct")
        assert_equal(*both(fn, ids_of(kind), a))
