"""expert_parallel on two GPUs or more: every way to spread experts, in bf16, gradients and FP8."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxmoe import Routing, expert_parallel, quantize, reference
from jaxmoe._testing import (
    Layer,
    assert_close,
    assert_equal,
    expert_ids,
    layer_inputs,
    normal,
    poison,
    relative_error,
)
from tests import layers
from tests.layers import moe_mlp

pytestmark = pytest.mark.multi_gpu

LAYER = Layer(
    "", "divides over 2, 4 and 8 devices, with and without a tensor axis", 256, 128, 16, 3
)
PER_DEVICE = 24


@functools.cache
def mesh(*shape):
    names = ("data", "tensor", "expert")
    count = len(jax.devices("cuda"))
    sizes = {"data": 1, "tensor": 1, "expert": count, **dict(shape)}
    if sizes["data"] * sizes["tensor"] > 1:
        sizes["expert"] = count // (sizes["data"] * sizes["tensor"])
    used = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes[n] for n in names),
        names,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices("cuda")[:used],
    )


@functools.cache
def inputs(kind):
    num_tokens = PER_DEVICE * len(jax.devices("cuda"))
    rng = np.random.default_rng(1)
    drawn = layer_inputs(LAYER, num_tokens, "uniform", rng, jnp.bfloat16)
    if kind == "one_shard":
        drawn["expert_ids"] = jnp.asarray(
            np.stack([rng.permutation([14, 15, -1]) for _ in range(num_tokens)]).astype(np.int32)
        )
    elif kind != "uniform":
        drawn["expert_ids"] = jnp.asarray(expert_ids(kind, rng, num_tokens, 16, 3))
    drawn["residual"] = normal(rng, drawn["x"].shape, jnp.bfloat16)
    return drawn, normal(rng, drawn["x"].shape, jnp.bfloat16)


def split(a, shape=(), **options):
    a = dict(a)
    routing = Routing(a.pop("expert_ids"), a.pop("weights"))
    x, w1, w2 = (a.pop(n) for n in ("x", "w_gate_up", "w_down"))
    axes = {f"{name}_axis": name for name, _ in shape}
    return layers.sharded(
        *(x, routing, w1, w2),
        mesh=mesh(*shape),
        axis_name="expert",
        gate_up="interleaved",
        **axes,
        **a,
        **options,
    )


def value_and_gradients(fn, a, ct):
    ids = a["expert_ids"]
    arrays = {n: v for n, v in a.items() if n != "expert_ids"}
    y, pull = jax.vjp(lambda v: fn(v | {"expert_ids": ids}), arrays)
    return y, pull(ct.astype(y.dtype))[0]


@functools.cache
def expected(kind):
    """The reference at the very values in float32, and in bf16 after every step, on the CPU."""
    host = jax.device_put(inputs(kind), jax.devices("cpu")[0])

    def of(dtype):
        fn = functools.partial(_reference, dtype=dtype)
        return jax.jit(lambda a, ct: value_and_gradients(fn, a, ct))

    naive = of(jnp.bfloat16)(*host)
    wide = {n: v if n == "expert_ids" else v.astype(jnp.float32) for n, v in host[0].items()}
    return of(jnp.float32)(wide, host[1]), naive


def _reference(a, dtype):
    return reference.moe_mlp(**a, gate_up="interleaved", dtype=dtype)


@pytest.fixture(autouse=True, scope="module")
def memory():
    """Of the axis of all devices."""
    options = {"num_bytes": 1 << 25, "timeout_s": 30}
    with expert_parallel.open_peer_memory(mesh(), "expert", **options):
        yield


WAYS = [
    ((), {"dispatch": "all_gather"}),
    ((), {"dispatch": "all_gather", "sum_dtype": "float32", "num_chunks": 2}),
    ((), {"dispatch": "all_gather", "own_apart": True, "num_chunks": 2}),
    ((), {"dispatch": "all_to_all"}),
    ((), {"dispatch": "all_to_all", "num_chunks": 3}),
    ((), {"dispatch": "ragged"}),
    ((), {"dispatch": "direct"}),
    ((), {"dispatch": "direct", "num_chunks": 3}),
    ((), {"tokens": "replicated"}),
    ((("data", 2),), {"dispatch": "all_to_all"}),
    ((("tensor", 2),), {"dispatch": "all_gather"}),
]


@pytest.mark.parametrize("kind", ("uniform", "with_invalid", "one_shard"))
@pytest.mark.parametrize("shape, options", WAYS, ids=str)
def test_values_and_gradients(shape, options, kind):
    a, ct = inputs(kind)
    layer = functools.partial(split, shape=shape, **options)
    run = jax.jit(lambda a, ct: value_and_gradients(layer, a, ct))
    poison(a["w_gate_up"].shape, jnp.float32)
    got = jax.device_get(run(a, ct))
    want, naive = expected(kind)
    jax.tree.map(assert_close, got, want, naive)


def test_sums_of_chunks_are_sent_apart():
    """One collective for all of them would wait for the last chunk."""
    call = functools.partial(split, dispatch="all_gather", num_chunks=2)
    program = jax.jit(call).lower(inputs("uniform")[0]).compile().as_text()
    assert len(re.findall(r" reduce-scatter(-start)?\(", program)) == 2


def test_the_bits_are_those_of_all_to_all():
    """Of "direct" in test_multi_gpu_pushed.py: those of sums, or of one device."""
    a, _ = inputs("with_invalid")
    values = [
        jax.device_get(jax.jit(functools.partial(split, dispatch=way))(a))
        for way in ("ragged", "all_to_all")
    ]
    assert_equal(*values)


@pytest.mark.parametrize("mode", ("all_to_all", "ragged"))
def test_lost_choices_are_counted(mode):
    a, _ = inputs("one_shard")
    devices = len(jax.devices("cuda"))
    call = functools.partial(split, dispatch=mode, capacity_factor=0.5)
    y, lost = jax.jit(call)(a)
    choice = expert_parallel.choose_dispatch(
        PER_DEVICE, LAYER.hidden, 3, devices, capacity_factor=0.5
    )
    # every token has two choices on the last device
    assert int(lost) == 2 * devices * (PER_DEVICE - choice.capacity) > 0
    kept = np.zeros(a["expert_ids"].shape[0], bool)
    if mode == "all_to_all":
        for first in range(0, kept.size, PER_DEVICE):
            kept[first : first + choice.capacity] = True
    else:
        kept[: devices * choice.capacity] = True
    ids = jnp.where(kept[:, None], a["expert_ids"], -1)
    host = jax.device_put(a | {"expert_ids": ids}, jax.devices("cpu")[0])
    assert_close(jax.device_get(y), _reference(host, jnp.float32), _reference(host, jnp.bfloat16))


@pytest.mark.parametrize("format", ("fp8_tensor", "fp8_channel", "fp8_block"))
@pytest.mark.parametrize("mode", ("all_gather", "all_to_all", "ragged", "direct"))
def test_tokens_travel_in_fp8(format, mode):
    """Quantized before or after they are sent: the same bits, and near those of one device."""
    a = dict(inputs("uniform")[0])
    a |= {n: quantize(a[n], format, weight_layout="kn") for n in ("w_gate_up", "w_down")}
    if format == "fp8_tensor":
        a["intermediate_scale"] = jnp.full((16,), 0.02)
    sent, plain = (
        jax.device_get(jax.jit(functools.partial(split, dispatch=mode, dispatch_format=f))(a))
        for f in (format, None)
    )
    if mode == "all_gather":
        assert relative_error(sent, plain) < 2**-7  # the order of its sums is XLA's
    else:
        assert_equal(sent, plain)
    one = dict(a)
    routing = Routing(one.pop("expert_ids"), one.pop("weights"))
    x, w1, w2 = (one.pop(n) for n in ("x", "w_gate_up", "w_down"))
    want = jax.jit(functools.partial(moe_mlp, gate_up="interleaved"))(x, routing, w1, w2, **one)
    assert relative_error(sent, jax.device_get(want)) < 2**-6
