"""The exchange beside products: when it is taken, what its call is given, and its results on a CPU.

On CPUs, where memory is said to be that of GPUs, programs are made with both ways and run the one
of collectives.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import GemmConfig, expert_parallel, quantize
from jaxmoe._ep import beside, connect, peers
from jaxmoe._ep.cost import beside_pays
from jaxmoe._testing import assert_equal
from tests.lowered import calls, cuda_text
from tests.test_direct import half_precision, layer
from tests.test_expert_parallel import mesh

BESIDE, DISPATCH, PUSHED, ORDERED = (
    f"jaxmoe_{name}_v1"
    for name in ("peer_beside_moe_mlp", "peer_dispatch", "peer_moe_mlp", "peer_ordered_moe_mlp")
)
RESULTS = ("y", "sums", "all_ids", "all_weights", "all_x", "all_scales", "words", "rows", "act")
NUM_DEVICES = 4
# Tiles that wait for rows, which few rows do not have.
WIDE = GemmConfig(256, 160, gather=True), GemmConfig(256, 160)
PAIRS = GemmConfig(128, 32, gather=True), GemmConfig(128, 32)  # two CTAs of a multiprocessor
QWEN3 = {"hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8}
DEEPSEEK = {"hidden": 7168, "intermediate": 2048, "num_experts": 256, "top_k": 8}


@pytest.fixture
def on_gpus(monkeypatch):
    """As if memory were open on four GPUs; a function that says how large it is."""

    def opened(num_bytes=1 << 33):
        memory = peers.PeerMemory(("expert",), NUM_DEVICES, num_bytes, on_gpus=True)
        monkeypatch.setitem(peers._open, ("expert",), memory)

    opened()
    return opened


def program(
    num_tokens,
    *,
    hidden,
    intermediate,
    num_experts,
    top_k,
    format=None,
    dispatch_format=None,
    **options,
):
    """A layer of so many tokens on each of four devices, and shapes of its arguments."""
    bf16, count = jnp.bfloat16, NUM_DEVICES * num_tokens
    shape = jax.ShapeDtypeStruct
    weights = {
        "gate_up": shape((num_experts, 2 * intermediate, hidden), bf16),
        "down": shape((num_experts, hidden, intermediate), bf16),
    }
    if format is not None:
        made = functools.partial(quantize, format=format, weight_layout="nk")
        weights = {name: jax.eval_shape(made, w) for name, w in weights.items()}
    residual = options.pop("residual", None)
    arrays = {
        "x": shape((count, hidden), bf16),
        "ids": shape((count, top_k), jnp.int32),
        "weights": shape((count, top_k), jnp.float32),
        "residual": None if residual is None else shape((count, hidden), residual),
    }

    def one(a, experts):
        return expert_parallel.moe_mlp(
            *(a["x"], jaxmoe.Routing(a["ids"], a["weights"]), experts),
            axis_name="expert",
            residual=a["residual"],
            dispatch_format=dispatch_format,
            **{"dispatch": "direct", **options},
        )

    split = jax.shard_map(
        one, mesh=mesh(expert=NUM_DEVICES), in_specs=P("expert"), out_specs=P("expert")
    )
    return split, arrays, jaxmoe.Experts(**weights, layout="nk")


def found_calls(*args, **options):
    """The calls of that layer; nothing is computed."""
    return calls(cuda_text(*program(*args, **options)))


def targets(*args, **options):
    return [target for target, *_ in found_calls(*args, **options)]


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    "num_tokens, model, options, taken",
    [
        (4096, QWEN3, {}, True),
        (2048, QWEN3, {}, False),  # weights take longer than what is hidden
        (4096, QWEN3, {"dispatch": "auto"}, True),
        (8192, DEEPSEEK, {}, False),  # whose rows go home while the second product computes
        (16384, DEEPSEEK, {"format": "fp8_block", "dispatch_format": "fp8_block"}, False),
        (4096, QWEN3, {"format": "fp8_block", "dispatch_format": "fp8_block"}, True),
        (2048, QWEN3, {"format": "fp8_block", "dispatch_format": "fp8_block"}, False),
        (4096, QWEN3, {"format": "fp8_block"}, False),  # tokens are quantized where they arrive
        (4096, QWEN3, {"format": "int4_g128"}, True),
        (4096, QWEN3, {"residual": "bfloat16"}, True),
        (8192, QWEN3, {"num_chunks": 8}, False),
    ],
    ids=str,
)
def test_where_it_is_taken(num_tokens, model, options, taken):
    found = targets(num_tokens, **model, **options)
    assert (BESIDE in found) == taken
    assert (DISPATCH in found or ORDERED in found) != taken


FEW = "an expert has fewer than 192 rows of a device's tokens in the mean"
SLOWER = "they are estimated to hide no more than that costs"
APART = "products read no tokens as they travel: these are quantized where they arrive"
ROWS = "the second product stores rows on the devices of tokens"
REACH = "copy engines do not reach"
AROUND = f"{ROWS}; the exchange is not beside the products"
INORDER = (
    "tokens come in the order of experts while the first product runs, the second stores rows on "
    "the devices of tokens; the exchange is not beside the products"
)


def said(fn, *args):
    """What `explain` says of the one layer: bytes, and how results come back."""
    (line,) = jaxmoe.explain(fn, *args).dispatches
    bytes_, how = re.fullmatch(
        r"direct along 'expert': (\d+) bytes that a device sends; asked for; (.*)", line
    ).groups()
    return int(bytes_), how


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    "num_tokens, model, options, why",
    [
        (64, QWEN3, {}, f"{AROUND}: {FEW}"),
        (4096, QWEN3, {"format": "fp8_block"}, f"{AROUND}: {APART}"),
        (8192, DEEPSEEK, {}, f"{INORDER}: {SLOWER}"),
        (
            *(4096, QWEN3, {"config": PAIRS}),
            f"{AROUND}: tiles of the first product cannot wait for rows of tokens that they fetch; "
            "nor in the order of experts: the first product cannot wait for rows of tokens",
        ),
    ],
    ids=str,
)
def test_explain_says_why_not(num_tokens, model, options, why):
    bytes_, how = said(*program(num_tokens, **model, **options))
    token, row, top_k = 2 * model["hidden"] + 64, 2 * model["hidden"], 8
    p = 1 - (3 / 4) ** top_k
    assert bytes_ == round(3 * num_tokens * (p * token + top_k / 4 * row))
    assert how.startswith(why)


@pytest.mark.usefixtures("on_gpus")
def test_explain_says_that_all_tokens_travel_beside_and_fewer_under_a_derivative():
    split, a, experts = program(4096, **QWEN3)

    def loss(x, a, experts):
        return jnp.sum(split(a | {"x": x}, experts).astype(jnp.float32))

    rows, p = 2 * 2048 + 64 + 2 * 2048, 1 - (3 / 4) ** 8
    beside_products = "tokens come and sums go beside the products"
    faster = f"{beside_products}, which is estimated to be faster"
    assert said(split, a, experts) == (3 * 4096 * rows, faster)
    moved = "sums of devices travel: a derivative is taken"
    assert said(jax.grad(loss), a["x"], a, experts) == (round(3 * 4096 * p * rows), moved)


def test_between_gpus_of_one_process_in_shared_memory_it_is_not(on_gpus, monkeypatch):
    """A process for all GPUs, or for each one: then memory is no obstacle to copies."""

    def groups(*processes):
        return np.array([[SimpleNamespace(process_index=p) for p in group] for group in processes])

    assert connect.can_copy(groups((0, 0, 0, 0))) and connect.can_copy(groups((0, 0), (1, 1)))
    assert connect.can_copy(groups((0, 1, 2, 3)))
    assert not connect.can_copy(groups((0, 0, 1, 1))) and not connect.can_copy(groups((0, 1, 1)))
    on_gpus()
    memory = dataclasses.replace(peers._open["expert",], copies=False)
    monkeypatch.setitem(peers._open, ("expert",), memory)
    assert targets(4096, **QWEN3) == [ORDERED]
    _, how = said(*program(4096, **QWEN3))
    assert how == f"{INORDER}: its processes have several GPUs each, whose memory {REACH}"


def test_without_room_in_the_memory_it_is_not(on_gpus):
    """A half holds sums of all devices, which is what any dispatch needs."""
    needed = expert_parallel.peer_memory_bytes(4096, 2048, 8, NUM_DEVICES)
    on_gpus(needed)
    assert BESIDE in targets(4096, **QWEN3)
    half = peers.combine_bytes(4096, NUM_DEVICES, 4096, 0)
    assert peers.total_bytes(half) <= needed


@pytest.mark.usefixtures("on_gpus")
def test_the_call_has_a_group_for_each_expert_and_device():
    (_, (target, attrs, operands, results)) = found_calls(
        4096, **QWEN3, format="fp8_block", dispatch_format="fp8_block"
    )
    assert target == BESIDE
    assert attrs["peers"] == {"memory": "expert", "num_devices": "4:i64", "num_local": "32:i64"}
    of_layer = attrs["layer"]
    assert of_layer["num_local_experts"] == "128:i64" and of_layer["num_experts"] == "512:i64"
    assert of_layer["expert_offset"] == "0:i64" and of_layer["finalize"] == "1:i64"
    assert operands[:6] == [
        *("i32", "4096x8xi32", "4096x8xf32", "0x0xbf16"),
        *("4096x2048xf8E4M3FN", "4096x16xf32"),
    ]
    named = dict(zip(RESULTS, results, strict=False))
    assert named == {
        "y": "4096x2048xbf16",
        "sums": "16384x2048xbf16",
        "all_ids": "16384x8xi32",
        "all_weights": "16384x8xf32",
        "all_x": "16384x2048xf8E4M3FN",
        "all_scales": "16384x16xf32",
        "words": "524xi32",
        "rows": "131072x2048xbf16",
        "act": "131072x768xbf16",
    }


def test_more_bytes_on_the_links_pay_and_more_weights_do_not():
    def pays(num_tokens=4096, num_devices=4, intermediate=768, **other):
        given = {"token_itemsize": 2, "itemsize": 2, "gate_up_bytes": 2e8, "down_bytes": 1e8}
        given |= {"fp8": False, "gathers": True} | other
        return beside_pays(num_devices, num_tokens, 8, 2048, intermediate, **given)

    assert pays() and not pays(num_tokens=2048)
    assert not pays(gate_up_bytes=6e8) and not pays(down_bytes=5e8)
    eight = {"num_devices": 8, "num_tokens": 2048}  # a product that does not wait reads less often
    assert not pays(**eight) and pays(**eight, gathers=False)
    assert not pays(num_tokens=2048, gathers=False)  # but launches take longer
    assert not pays(intermediate=1000) and pays(intermediate=1000, fp8=True)


def without_and_with_memory(monkeypatch, primitive, fn, *args):
    """Results without memory of GPUs, then with it, by a primitive for CUDA."""
    found = []
    for on in (False, True):
        memory = peers.PeerMemory(("expert",), 8, 1 << 22, on_gpus=on)
        monkeypatch.setitem(peers._open, ("expert",), memory)
        found.append(jax.jit(lambda *a: fn(*a))(*args))
    assert primitive in str(jax.make_jaxpr(fn)(*args))
    return found


def everything_of_a_layer(recompute):
    """A function and its argument: gradients, scan, remat, vmap, a derivative of a derivative."""
    ids, a = half_precision()
    call = layer(recompute=recompute, config=WIDE)

    def everything(a):
        def loss(a):
            return jnp.sum(jnp.sin(call(ids, a).astype(jnp.float32)))

        slope = lambda a: jax.jvp(loss, (a,), (a,))[1]  # noqa: E731
        one = lambda x: call(ids, a | {"x": x})  # noqa: E731
        twice, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(one)(x), None), a["x"], length=2)
        mapped = jax.vmap(one)(jnp.stack([a["x"], one(a["x"])]))
        return call(ids, a), jax.grad(loss)(a), jax.grad(slope)(a)["x"], twice, mapped

    return everything, {n: jnp.asarray(v) for n, v in a.items()}


def a_layer_of_quantized_tokens():
    """A function and its arguments."""
    ids, a = half_precision()
    wide = {"w_gate_up": (1, 8, 16), "w_down": (1, 16, 8)}
    tiled = {n: jnp.tile(jnp.asarray(a[n]), tiles) for n, tiles in wide.items()}
    a |= {n: quantize(w, "fp8_channel", weight_layout="kn") for n, w in tiled.items()}
    a |= {n: jnp.tile(a[n], 8) for n in ("x", "residual")}
    return layer(dispatch_format="fp8_channel", config=WIDE), ids, a


@pytest.fixture
def both(monkeypatch):
    monkeypatch.setattr(beside, "why_not", beside.no_call)
    return functools.partial(without_and_with_memory, monkeypatch, "jaxmoe_peer_beside_moe_mlp")


@pytest.mark.parametrize("recompute", (None, "z"))
def test_values_and_gradients_on_a_cpu(both, recompute):
    """Those of sums."""
    jax.tree.map(assert_equal, *both(*everything_of_a_layer(recompute)))


def test_quantized_tokens_and_their_scales_on_a_cpu(both):
    jax.tree.map(assert_equal, *both(*a_layer_of_quantized_tokens()))
