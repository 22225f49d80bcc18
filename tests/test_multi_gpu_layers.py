"""dispatch="direct" on two GPUs or more: placements, choices, meshes, remat, frozen experts."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Experts, Routing, expert_parallel, quantize
from jaxmoe._ep import beside
from jaxmoe._testing import INVALID_IDS, assert_close, assert_equal, poison, relative_error
from tests import layers
from tests import test_multi_gpu_expert_parallel as of_sums
from tests.lowered import cuda_text
from tests.test_multi_gpu_beside import BESIDE
from tests.test_multi_gpu_direct import mesh, opened
from tests.test_multi_gpu_pushed import PUSHED, alone, computed, drawn, split

pytestmark = pytest.mark.multi_gpu

DISPATCH = "jaxmoe_peer_dispatch_v1"
PER_TOKEN = ("x", "expert_ids", "weights", "residual")


@functools.cache
def grid(*sizes, names=("host", "expert"), kinds=(AxisType.Auto,) * 2):
    gpus = jax.devices("cuda")[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=gpus)


@contextlib.contextmanager
def memory(of_mesh, *axes):
    with contextlib.ExitStack() as stack:
        for axis in axes:
            given = {"num_bytes": 1 << 25, "timeout_s": 30}
            stack.enter_context(expert_parallel.open_peer_memory(of_mesh, axis, **given))
        yield


def over(of_mesh, a, **options):
    """The layer of a dictionary of arrays over a mesh, None for the one that is set."""
    a, options = dict(a), {"axis_name": "expert", "dispatch": "direct", **options}
    routing = Routing(a.pop("expert_ids"), a.pop("weights"))
    x, w1, w2 = (a.pop(n) for n in ("x", "w_gate_up", "w_down"))
    return layers.sharded(
        *(x, routing, w1, w2), mesh=of_mesh, gate_up="interleaved", **a, **options
    )


@pytest.fixture(autouse=True)
def scratch_is_garbage():
    poison((1 << 24,), jnp.float32)


class Home(NamedTuple):
    """How results come home.

    Attributes:
      target: of the call that brings them.
      num_tokens: of a device, which are few or many.
      call: the layer.
      other: what has its bits: one device, or all_to_all.
    """

    target: str
    num_tokens: int
    call: Any
    other: Any


@pytest.fixture(params=("rows", "beside"))
def home(request, monkeypatch):
    """Rows that a product stores on their devices, or sums beside the products."""
    if request.param == "rows":
        return Home(PUSHED, 40, split, alone)
    monkeypatch.setattr(beside, "why_not", beside.no_call)
    call = functools.partial(split, batch_invariant=False)
    return Home(BESIDE, 1400, call, functools.partial(call, dispatch="all_to_all"))


# ---- where experts are --------------------------------------------------------------------------


def is_of_expert(name):
    return name.startswith(("w_", "b_"))


def placed(a, table):
    return a | {n: expert_parallel.place_experts(a[n], table) for n in a if is_of_expert(n)}


def with_copies(num_experts):
    """Expert 0 everywhere and 5 twice; a device with fewer than others has none in its first."""
    count = len(jax.devices("cuda"))
    table = expert_parallel.expert_placement(num_experts, count, copies={0: count, 5: 2})
    return np.where(table >= 0, table.max() - table, -1).astype(np.int32)


def none_on_the_first(num_experts):
    others = expert_parallel.expert_placement(num_experts, len(jax.devices("cuda")) - 1)
    return np.concatenate([np.full_like(others[:1], -1), others])


def test_experts_where_a_table_says(home):
    """13, which divide over no devices; ids from there on name none."""
    a = drawn(home.num_tokens)
    a = {n: v[:13] if is_of_expert(n) else v for n, v in a.items()}
    for table in (with_copies(13), none_on_the_first(13)):
        there = jax.device_get(placed(a, table))
        call, other = (functools.partial(fn, expert_map=table) for fn in (home.call, home.other))
        with opened(1 << 27):
            assert home.target in cuda_text(call, there)
            got = computed(call, there)
        want = computed(alone, a) if home.other is alone else computed(other, there)
        assert_equal(got, want)


def test_a_table_may_change_without_a_new_program():
    """The last one has an expert nowhere, whose choices are left out and counted."""
    a, traced = drawn(30), []
    table = expert_parallel.expert_placement(16, len(jax.devices("cuda")))
    tables = (table, table[::-1].copy(), np.where(np.arange(16) == 3, -1, table))

    @jax.jit
    def layer(a, table):
        traced.append(1)
        return split(a, expert_map=table, capacity_factor=1.0)

    one = jax.jit(alone)
    with opened():
        for given, order in zip(tables, (table, tables[1], table), strict=True):
            y, lost = jax.device_get(layer(jax.device_get(placed(a, order)), given))
            gone = (a["expert_ids"] == 3) & (given[:, 3] < 0).all()
            assert int(lost) == gone.sum()
            ids = np.where(gone, -1, a["expert_ids"])
            assert_equal(y, jax.device_get(one(a | {"expert_ids": ids})))
    assert traced == [1] and gone.any()


def test_experts_that_fill_up_the_last_device_are_none():
    """Whatever they hold."""
    a = drawn(24)
    few = {n: v[:13] if is_of_expert(n) else v for n, v in a.items()}
    nothing = {n: np.full_like(v[13:], np.nan) for n, v in a.items() if is_of_expert(n)}
    full = a | {n: np.concatenate([few[n], v]) for n, v in nothing.items()}
    with opened():
        got = computed(functools.partial(split, num_experts=13), full)
    assert_equal(got, computed(alone, few))


def value_and_gradients(layer, a, ct):
    run = jax.jit(functools.partial(of_sums.value_and_gradients, layer))
    return jax.device_get(run(a, ct))


def judge(got):
    """By the rule of tolerance; arrays of several axes of tokens as of one."""
    want, naive = of_sums.expected("with_invalid")
    got = jax.tree.map(lambda g, w: g.reshape(w.shape), got, want)
    jax.tree.map(assert_close, got, want, naive)


def test_gradients_of_copies_are_added_up():
    table = with_copies(16)

    def layer(a):
        return split(placed(a, table), expert_map=table)

    with opened():
        judge(value_and_gradients(layer, *of_sums.inputs("with_invalid")))


# ---- what is chosen -----------------------------------------------------------------------------


def ids_of(kind, num_tokens):
    """Choices of so many tokens of each device."""
    total = num_tokens * len(jax.devices("cuda"))
    rng = np.random.default_rng(4)
    ids = np.stack([rng.permutation(16)[:3] for _ in range(total)]).astype(np.int32)
    if kind == "nobody":  # is chosen
        return np.resize(np.array([*INVALID_IDS, 16], np.int32), ids.shape)
    if kind == "one_expert":
        return np.where(np.arange(3) == rng.integers(3, size=(total, 1)), 15, -1).astype(np.int32)
    first = np.arange(total)[:, None] < num_tokens  # tokens of the first device
    if kind == "one_source":
        return np.where(first, ids, -1)
    assert kind == "never_at_home"
    own = np.arange(total)[:, None] // num_tokens
    num_local = 16 // len(jax.devices("cuda"))
    return np.where(ids // num_local == own, (ids + num_local) % 16, ids)


CHOSEN = ("nobody", "one_expert", "one_source", "never_at_home")


def test_whatever_is_chosen(home):
    a = drawn(home.num_tokens)
    other = jax.jit(home.other)
    with opened(1 << 27):
        run = jax.jit(home.call)
        for kind in CHOSEN:
            given = a | {"expert_ids": ids_of(kind, home.num_tokens)}
            got = jax.device_get(run(given))
            assert_equal(got, jax.device_get(other(given)))
            if kind == "nobody":
                assert_equal(got, a["residual"])


def near(got, want):
    """Arrays whose sums are in another order, or of other parts."""
    for name, theirs in want.items():
        ours, theirs = (np.asarray(g, np.float32) for g in (got[name], theirs))
        limit = 2**-5 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=2**-5, atol=limit, err_msg=name)


def test_gradients_whatever_is_chosen():
    a, ct = jax.device_get(of_sums.inputs("uniform"))

    def of(way):
        layer = functools.partial(split, dispatch=way)
        return jax.jit(functools.partial(of_sums.value_and_gradients, layer))

    ours, theirs = of("direct"), of("all_to_all")
    with opened():
        for kind in CHOSEN:
            given = a | {"expert_ids": ids_of(kind, of_sums.PER_DEVICE)}
            (y, got), (other, want) = jax.device_get((ours(given, ct), theirs(given, ct)))
            assert_equal(y, other)
            near(got, want)
            if kind == "nobody":
                assert_equal(got.pop("residual"), ct)
                assert not any(np.any(np.asarray(g, np.float32)) for g in got.values())


# ---- meshes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ("data", "tensor"))
def test_axes_beside_that_of_experts(axis):
    """Along which each device has memory with others: some of the mesh, or itself."""
    of_mesh = of_sums.mesh((axis, 2))
    layer = functools.partial(over, of_mesh, **{f"{axis}_axis": axis})
    with memory(of_mesh, "expert"):
        judge(value_and_gradients(layer, *of_sums.inputs("with_invalid")))


def hosts(count):
    """A mesh as of so many hosts."""
    return grid(count, len(jax.devices("cuda")) // count)


@pytest.mark.parametrize(
    "count, dispatch",
    [
        (1, ("all_to_all", "direct")),
        (2, ("all_to_all", "direct")),
        (2, ("direct", "direct")),
        (2, ("direct", "all_to_all")),
    ],
    ids=str,
)
def test_two_hops(count, dispatch):
    """With two GPUs one of them is of a single device."""
    if dispatch[1] != "direct" and len(jax.devices("cuda")) < 4:
        pytest.skip("a hop of one device behind that of two: as test_values_and_gradients")
    axes = ("host", "expert")
    through = [axis for axis, way in zip(axes, dispatch, strict=True) if way == "direct"]
    with memory(hosts(count), *through):
        layer = functools.partial(over, hosts(count), axis_name=axes, dispatch=dispatch)
        judge(value_and_gradients(layer, *of_sums.inputs("with_invalid")))


def test_tokens_take_two_hops_in_fp8():
    """As if they were rounded where they arrive; "auto" goes in turn, as memory is open."""
    a = drawn(24, format="fp8_block")
    of_mesh, axes = hosts(len(jax.devices("cuda")) // 2), ("host", "expert")
    call = functools.partial(over, of_mesh, axis_name=axes, dispatch=("all_to_all", "direct"))
    with memory(of_mesh, "expert"):
        sent = computed(functools.partial(call, dispatch_format="fp8_block"), a)
        assert_equal(sent, computed(call, a))
        auto = functools.partial(over, of_mesh, axis_name=axes, dispatch="auto")
        assert DISPATCH in cuda_text(auto, a)
        for got in (sent, computed(auto, a)):
            assert relative_error(got, computed(alone, a)) < 2**-6


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=lambda kind: kind.name)
def test_batches_on_a_mesh_of_each_kind(kind):
    """Tokens along two axes of which the second one is divided, on the mesh that is set."""
    of_mesh = grid(len(jax.devices("cuda")), names=("expert",), kinds=(kind,))
    flat, ct = jax.device_get(of_sums.inputs("with_invalid"))

    def put(name, v):
        spec = P(None, "expert") if name in PER_TOKEN else P("expert")
        v = v.reshape(2, -1, v.shape[-1]) if name in PER_TOKEN else v
        return jax.device_put(v, NamedSharding(of_mesh, spec))

    call = functools.partial(over, None, batch_invariant=True)
    with jax.set_mesh(of_mesh), memory(of_mesh, "expert"):
        a, ct = {n: put(n, v) for n, v in flat.items()}, put("residual", ct)
        assert PUSHED in cuda_text(call, a)
        y = jax.jit(call)(a)
        assert y.shape == a["x"].shape
        if kind == AxisType.Explicit:
            assert y.sharding.is_equivalent_to(a["x"].sharding, 3)
        got = jax.device_get(y).reshape(flat["x"].shape)
        sums = value_and_gradients(functools.partial(over, None), a, ct)
    assert_equal(got, computed(alone, flat))
    judge(sums)


@pytest.mark.parametrize("kinds", (("Auto", "Explicit"), ("Explicit", "Auto")), ids="-".join)
def test_a_mesh_of_two_kinds_of_axes(kinds):
    a = drawn(24)
    sizes = (2, len(jax.devices("cuda")) // 2)
    types = tuple(getattr(AxisType, kind) for kind in kinds)
    of_mesh = grid(*sizes, names=("data", "expert"), kinds=types)
    call = functools.partial(over, of_mesh, data_axis="data", batch_invariant=True)
    with memory(of_mesh, "expert"):
        got = computed(call, a)
    assert_equal(got, computed(alone, a))


# ---- between the passes -------------------------------------------------------------------------

DEPTH = 3


def stack(layer, wrap, moving, ids, ct):
    """The loss of layers in a loop, each with experts and choices of its own."""
    own = {n: v for n, v in moving.items() if is_of_expert(n)}
    named = (ids >= 0) & (ids < 16)

    @wrap
    def step(x, given):
        shift, experts = given
        chosen = jnp.where(named, (ids + shift) % 16, -1)
        a = {"x": x, "expert_ids": chosen, "weights": moving["weights"], "residual": x}
        return layer(a | experts), None

    x, _ = jax.lax.scan(step, moving["x"], (jnp.arange(DEPTH, dtype=jnp.int32), own))
    return jnp.sum(x.astype(jnp.float32) * ct.astype(jnp.float32)), x


def gradients_of_stack(layer, wrap=lambda step: step):
    loss = functools.partial(stack, layer, wrap)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def stacked(a):
    deep = lambda v: np.stack([np.roll(v, i, axis=0) for i in range(DEPTH)])  # noqa: E731
    a = {n: deep(v) if is_of_expert(n) else v for n, v in a.items() if n != "residual"}
    return a, a.pop("expert_ids")


@functools.cache
def expected_of_stack():
    """The reference in float32 and in bf16, on the CPU."""
    a, ct = jax.device_get(of_sums.inputs("with_invalid"))
    moving, ids = stacked(a)
    found = []
    with jax.default_device(jax.devices("cpu")[0]):
        for dtype in (jnp.float32, jnp.bfloat16):
            layer = functools.partial(of_sums._reference, dtype=dtype)
            given = {n: v if n == "weights" else v.astype(dtype) for n, v in moving.items()}
            (_, y), grads = gradients_of_stack(layer)(given, ids, ct)
            found.append(jax.device_get((y, grads)))
    return found


KEPT = jax.checkpoint_policies.save_only_these_names("jaxmoe_z", "jaxmoe_plan")


@pytest.mark.parametrize(
    "wrap, options",
    [
        (jax.checkpoint, {}),
        (functools.partial(jax.checkpoint, policy=KEPT), {"num_chunks": 2}),
        (lambda step: step, {"recompute": "z", "num_chunks": 3}),
    ],
    ids=("all", "all but names", "z"),
)
def test_what_is_computed_again_in_a_loop_over_layers(wrap, options):
    """Steps of the memory too, which all devices take in one order."""
    a, ct = jax.device_get(of_sums.inputs("with_invalid"))
    moving, ids = stacked(a)
    run = gradients_of_stack(functools.partial(split, **options), wrap)
    with opened():
        (_, y), grads = jax.device_get(run(moving, ids, ct))
    jax.tree.map(assert_close, (y, grads), *expected_of_stack())


# ---- quantized experts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, token_format, sent",
    [
        ("fp8_block", None, "fp8_block"),
        ("mxfp4", "mxfp8", "mxfp8"),
        ("int4_g128", "e4m3", None),
    ],
)
def test_gradients_through_experts_that_are_frozen(format, token_format, sent):
    """Of routing weights, and of tokens where these are not sent quantized; in two chunks."""
    a = drawn(48)
    quantized = {n: quantize(a[n], format, weight_layout="kn") for n in ("w_gate_up", "w_down")}
    experts = Experts(
        gate_up=quantized["w_gate_up"],
        down=quantized["w_down"],
        order="interleaved",
        token_format=token_format,
    )
    moving = {n: a[n] for n in (("weights",) if sent else ("weights", "x"))}
    ct = np.cos(np.arange(a["x"].size, dtype=np.float32)).reshape(a["x"].shape)

    def loss(layer, moving, a, experts):
        routing = Routing(a["expert_ids"], moving["weights"])
        y = layer(moving.get("x", a["x"]), routing, experts, residual=a["residual"])
        return jnp.sum(y.astype(jnp.float32) * ct), y

    def run(layer):
        grad = jax.value_and_grad(functools.partial(loss, layer), has_aux=True)
        (_, y), grads = jax.jit(grad)(moving, a, experts)
        return jax.device_get((y, grads))

    spread = functools.partial(
        expert_parallel.sharded_moe_mlp,
        mesh=mesh(),
        axis_name="expert",
        num_chunks=2,
        dispatch_format=sent,
    )
    with opened():
        y, got = run(functools.partial(spread, dispatch="direct"))
    other, want = run(functools.partial(spread, dispatch="all_to_all"))
    assert_equal(y, other)
    near(got, want)
    if sent is None:  # or the derivative is at tokens that were rounded
        near(got, run(jaxmoe.moe_mlp)[1])
