"""expert_parallel along two axes in turn: between hosts, then within one."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Routing, expert_parallel, quantize
from jaxmoe._ep import peers
from tests import layers
from tests.test_expert_parallel import (
    NUM_TOKENS,
    ROUTINGS,
    arrays,
    close,
    ids_of,
    mesh,
    whole,
    with_gradients,
)

GRID = {"host": 2, "expert": 4}
LEFT = {"host": 4, "expert": 2}
AXES = ("host", "expert")


def layer(ids, a, sizes=GRID, **options):
    a = dict(a)
    x, weights, w1, w2 = (a.pop(n) for n in ("x", "weights", "w_gate_up", "w_down"))
    return layers.sharded(
        *(x, Routing(ids, weights), w1, w2),
        mesh=mesh(**sizes),
        axis_name=AXES,
        gate_up="interleaved",
        **a,
        **options,
    )


@contextlib.contextmanager
def memory(dispatch, sizes):
    """Where a way is "direct"."""
    with contextlib.ExitStack() as stack:
        for way, axis in zip(dispatch, AXES, strict=True):
            if way == "direct":
                opened = expert_parallel.open_peer_memory(mesh(**sizes), axis, num_bytes=1 << 20)
                stack.enter_context(opened)
        yield


@pytest.mark.parametrize(
    "dispatch, sizes, chunks",
    [
        (("all_gather", "direct"), GRID, 2),
        (("all_to_all", "direct"), LEFT, 1),
        (("direct", "all_to_all"), GRID, 1),
        (("direct", "direct"), LEFT, 1),
        (("ragged", "all_gather"), LEFT, 1),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_one_device(dispatch, sizes, chunks):
    """Also where a host, or a device, gets no tokens, and where one gets all of them."""
    with memory(dispatch, sizes):
        run = with_gradients(
            functools.partial(layer, sizes=sizes, dispatch=dispatch, num_chunks=chunks)
        )
        for kind in ROUTINGS:
            close(run(ids_of(kind), arrays()), whole()(ids_of(kind), arrays()))


def test_experts_where_a_table_says():
    table = expert_parallel.expert_placement(13, 8, copies={0: 3, 5: 2})
    a = {n: v if n in ("x", "weights", "residual") else v[:13] for n, v in arrays().items()}
    ids = np.where(ids_of("with_invalid") >= 13, 0, ids_of("with_invalid"))

    def placed(ids, a):
        own = [n for n in a if n.startswith("w_")]
        a = a | {n: expert_parallel.place_experts(a[n], table) for n in own}
        return layer(ids, a, dispatch=("all_to_all", "all_to_all"), expert_map=table)

    close(jax.jit(placed)(ids, a), whole()(ids, a)[0])


@pytest.mark.parametrize(
    "dispatch",
    [("all_to_all", "all_gather"), ("all_to_all", "direct"), ("direct", "direct")],
    ids=str,
)
def test_tokens_travel_in_fp8(dispatch):
    """Scales beside weights, and slots beside both where a collective sends them."""
    a = arrays()
    a |= {n: quantize(a[n], "fp8_block", weight_layout="kn") for n in ("w_gate_up", "w_down")}
    call = functools.partial(layer, dispatch=dispatch)
    with memory(dispatch, GRID):
        sent, plain = (
            jax.jit(functools.partial(call, dispatch_format=format))(ids_of("uniform"), a)
            for format in ("fp8_block", None)
        )
    close(sent, plain)


def test_a_row_crosses_to_another_host_once():
    """Between hosts go the rows of one device, to its like; within a host what it has received."""
    ids = jnp.asarray(ids_of("uniform"))
    call = functools.partial(layer, dispatch=("all_to_all", "all_gather"))
    found = jaxmoe.explain(call, ids, arrays()).collectives
    tokens = [text for text in found if re.search(r"f32\[\d+,16\]", text)]
    assert tokens == [
        "all_to_all of f32[4,16] over host",  # 2 tokens, a box for each host
        "all_gather of f32[4,16] over expert",
        "psum_scatter of f32[16,16] over expert",
        "all_to_all of f32[4,16] over host",
    ]


def test_three_axes():
    sizes = {"rack": 2, "host": 2, "expert": 2}

    def call(ids, a):
        a = dict(a)
        x, weights, w1, w2 = (a.pop(n) for n in ("x", "weights", "w_gate_up", "w_down"))
        return layers.sharded(
            *(x, Routing(ids, weights), w1, w2),
            mesh=mesh(**sizes),
            axis_name=tuple(sizes),
            gate_up="interleaved",
            dispatch=("all_to_all", "all_gather", "all_to_all"),
            **a,
        )

    for kind in ROUTINGS:
        close(jax.jit(call)(ids_of(kind), arrays()), whole()(ids_of(kind), arrays())[0])


def test_boxes_of_the_first_way_make_the_second_smaller():
    call = functools.partial(layer, dispatch=("all_to_all", "all_to_all"), capacity_factor=0.5)
    found = jaxmoe.explain(call, jnp.asarray(ids_of("uniform")), arrays()).collectives
    tokens = [text for text in found if re.search(r"f32\[\d+,16\]", text)]
    assert tokens[:2] == [  # a token in place of two for each of two hosts; room for both of those
        "all_to_all of f32[2,16] over host",
        "all_to_all of f32[8,16] over expert",
    ]


def test_a_capacity_factor_is_that_of_the_first_way():
    """A device sends the first of its tokens that have a choice on a host; all are lost or none."""
    dispatch, per_device = ("all_to_all", "all_to_all"), NUM_TOKENS // 8
    ids = ids_of("one_shard")  # every token has two choices on the last host
    y, lost = jax.jit(functools.partial(layer, dispatch=dispatch, capacity_factor=0.5))(
        ids, arrays()
    )
    capacity = expert_parallel.choose_dispatch(per_device, 16, 3, 2, capacity_factor=0.5).capacity
    assert capacity == 1
    gone = np.arange(NUM_TOKENS) % per_device >= capacity
    assert int(lost) == 2 * gone.sum()
    close(y, whole()(np.where(gone[:, None], -1, ids), arrays())[0])


def test_auto_chooses_for_each_axis():
    ids = jnp.asarray(ids_of("uniform"))
    call = jax.jit(functools.partial(layer, dispatch=("auto", "auto")))
    call.trace(ids, arrays())
    for _ in range(2):  # traced before
        report = jaxmoe.explain(call, ids, arrays())
        text = str(report)
        assert text.count("all_gather of") == 4 and text.count("psum_scatter of") == 2
        row = 2 * 4 * 16 + 8 * 3  # float32
        assert [line.split(" bytes")[0] for line in report.dispatches] == [
            f"all_gather along 'host': {2 * row}",
            f"all_gather along 'expert': {3 * 4 * row}",
        ]
        assert all("; room for" in line for line in report.dispatches)


def test_auto_goes_in_turn_where_the_last_axis_has_memory():
    """As if it were of GPUs, which are not of one host then."""
    ids = jnp.asarray(ids_of("uniform"))
    flat = jaxmoe.explain(layer, ids, arrays()).dispatches
    assert [line.split(":")[0] for line in flat] == ["all_gather along ('host', 'expert')"]
    opened = expert_parallel.open_peer_memory(mesh(**GRID), "expert", num_bytes=1 << 20)
    with opened:
        peers._open["expert",] = dataclasses.replace(opened, on_gpus=True)
        report = jaxmoe.explain(layer, ids, arrays())
        assert [line.split(":")[0] for line in report.dispatches] == [
            "all_gather along 'host'",
            "direct along 'expert'",
        ]
        close(jax.jit(layer)(ids, arrays()), whole()(ids, arrays())[0])
        apart = jaxmoe.explain(functools.partial(layer, own_apart=True), ids, arrays())
        assert apart.dispatches == flat
        peers._open["expert",] = opened


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"dispatch": ("all_gather",)}, ValueError, "must have a way for each axis of axis_name"),
        ({"dispatch": ["ragged", "auto"]}, TypeError, "must be a name, or a tuple of names"),
        ({"dispatch": ("all_gather", "nccl")}, ValueError, "dispatch='nccl' must be one of auto"),
        (
            {"dispatch": ("ragged", "auto"), "tokens": "replicated"},
            ValueError,
            "must be 'auto' with tokens='replicated': nothing is sent",
        ),
        ({"capacity_factor": "all"}, TypeError, "jaxmoe.expert_parallel.moe_mlp: capacity_factor"),
        ({"dispatch": ("all_gather", "direct")}, ValueError, "along axis_name='expert' that its 4"),
        (
            {"dispatch": ("all_gather", "all_gather"), "own_apart": True},
            ValueError,
            "own_apart=True needs dispatch 'all_gather', and this is 'all_gather+all_gather'",
        ),
    ],
    ids=str,
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(functools.partial(layer, **options), ids_of("uniform"), arrays())
