"""What expert_parallel says of arguments that cannot work: argument, value and what is allowed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Routing, expert_parallel
from tests import layers
from tests.arguments import zeros

T, H, WIDTH, E, K = 8, 8, 8, 8, 2
SPLIT = P("expert")


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def arrays(t=T, e=E, k=K):
    w = zeros((e, H, 2 * WIDTH)), zeros((e, WIDTH, H))
    return zeros((t, H)), Routing(zeros((t, k), np.int32), zeros((t, k))), *w


def inside(args, specs=SPLIT, **options):
    """Traces `moe_mlp` on 4 devices of the axis "expert"."""
    options = {"axis_name": "expert", **options}
    call = functools.partial(layers.expert_parallel, **options)
    split = jax.shard_map(call, mesh=mesh(), in_specs=specs, out_specs=SPLIT)
    return jax.eval_shape(split, *args)


def around(args, **options):
    options = {"mesh": mesh(), "axis_name": "expert", **options}
    return jax.eval_shape(functools.partial(layers.sharded, **options), *args)


INSIDE = [
    ({"axis_name": "experts"}, ValueError, "axis_name='experts' must be an axis of the jax.sha"),
    ({"axis_name": "experts"}, ValueError, "('data', 'expert')"),
    ({"axis_name": 3}, TypeError, "axis_name must be the name of a mesh axis"),
    ({"axis_name": ()}, TypeError, "or a tuple of them"),
    ({"tensor_axis": "tp"}, ValueError, "tensor_axis='tp' must be an axis of the jax.shard_map"),
    ({"tensor_axis": "expert"}, ValueError, "must be another mesh axis than axis_name"),
    ({"dispatch": "nccl"}, ValueError, "must be one of auto, all_gather, all_to_all, ragged"),
    ({"tokens": "split"}, ValueError, "tokens='split' must be one of sharded, replicated"),
    ({"tokens": "replicated"}, ValueError, "x must be the same on every device along 'expert'"),
    ({"capacity_factor": 0.0}, ValueError, "capacity_factor=0.0 must be above 0 and finite"),
    ({"capacity_factor": -1}, ValueError, "or None for room for every token"),
    ({"capacity_factor": float("inf")}, ValueError, "capacity_factor=inf"),
    ({"capacity_factor": "all"}, TypeError, "capacity_factor must be a Python float"),
    ({"num_chunks": 0}, ValueError, "num_chunks=0 must be at least 1"),
    (
        {"own_apart": True, "dispatch": "all_to_all"},
        ValueError,
        "own_apart=True needs dispatch 'all_gather', and this is 'all_to_all'",
    ),
    ({"num_chunks": 3}, ValueError, "x.shape[0]=2 must be a multiple of num_chunks=3"),
    ({"num_experts": 9}, ValueError, "num_experts=9 must be in [1, 8]; the 4 devices of axis"),
    ({"num_experts": 1}, ValueError, "top_k=2 (routing.expert_ids.shape[1]) must be in [1, 1]"),
    ({"dispatch_format": "fp8_block"}, ValueError, "the weights, which are not quantized"),
    ({"dispatch_format": "bf16"}, ValueError, "must be one of fp8_tensor, fp8_channel, fp8_block"),
    ({"sum_dtype": "bfloat16"}, ValueError, "sum_dtype='bfloat16' must be 'float32'"),
    ({"do_finalize": False}, TypeError, "do_finalize is no argument; those of jaxmoe.moe_mlp"),
    ({"weight_layout": "xy"}, ValueError, "layout='xy' must be one of kn, nk"),
    (
        {"expert_map": np.zeros((2, E), np.int32)},
        ValueError,
        "expert_map.shape[0]=2 must be 4 (the devices of axis 'expert')",
    ),
    (
        {"expert_map": np.full((4, E), 2, np.int32)},
        ValueError,
        "expert_map holds the local id 2, which must be below 2",
    ),
    (
        {"expert_map": np.zeros((4, 0), np.int32)},
        ValueError,
        "expert_map.shape[1]=0 must be at least 1",
    ),
    ({"expert_map": np.zeros((4, E))}, TypeError, "expert_map.dtype=f64 must be i32"),
    (
        {"expert_map": np.zeros((4, E), np.int32), "num_experts": 7},
        ValueError,
        "expert_map.shape[1]=8 must be 7 (num_experts)",
    ),
    (
        {"expert_map": np.tile(np.int32([0, 1, 1, -1, -1, -1, -1, -1]), (4, 1))},
        ValueError,
        "expert_map must have each expert on some device, and none has expert 3",
    ),
    (
        {"expert_map": np.kron(np.eye(4, dtype=np.int32), np.int32([1, 1])) - 1},
        ValueError,
        "expert_map[0] must have a local id for each expert, and experts 0 and 1 have the same, 0",
    ),
]


@pytest.mark.parametrize("options, error, text", INSIDE, ids=lambda v: str(v)[:40])
def test_inside_shard_map(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        inside(arrays(), **options)


def test_replicated_tokens_are_not_dispatched():
    specs = (P(), P(), P("expert"), P("expert"))
    with pytest.raises(ValueError, match="dispatch='ragged' must be 'auto' or 'all_gather'"):
        inside(arrays(), specs, tokens="replicated", dispatch="ragged")


def test_what_replicated_tokens_have_beside_them_is_the_same_everywhere():
    x, routing, w1, w2 = arrays()
    of_one = (P(), Routing(P("expert"), P()), P("expert"), P("expert"))
    text = r"routing.expert_ids must be the same on every device along 'expert' with tokens='repl"
    with pytest.raises(ValueError, match=text):
        few = Routing(routing.expert_ids, routing.weights[:2])
        inside((x[:2], few, w1, w2), of_one, tokens="replicated")

    def with_own_map(*args):
        table = jnp.zeros((4, E), jnp.int32) + jax.lax.axis_index("expert")
        return layers.expert_parallel(*args, axis_name="expert", expert_map=table)

    split = jax.shard_map(with_own_map, mesh=mesh(), in_specs=SPLIT, out_specs=SPLIT)
    with pytest.raises(ValueError, match="expert_map must be the same on every device along 'exp"):
        jax.eval_shape(split, *arrays())


def test_no_tokens_are_no_error():
    """XLA's collectives refuse arrays without rows."""
    x, routing, *w = arrays(t=0)
    call = functools.partial(layers.sharded, mesh=mesh(), axis_name="expert")
    y, lost = jax.jit(functools.partial(call, capacity_factor=1.0))(x, routing, *w)
    assert y.shape == (0, H) and int(lost) == 0


def test_outside_of_shard_map():
    with pytest.raises(ValueError, match="there is none; expert_parallel.sharded_moe_mlp wraps"):
        layers.expert_parallel(*arrays(), axis_name="expert")


@pytest.mark.parametrize(
    "options",
    (
        *({"dispatch": "auto"}, {"dispatch": "all_gather", "capacity_factor": 1.0}),
        *({"tokens": "replicated"}, {"tokens": "replicated", "num_chunks": 2}),
    ),
    ids=str,
)
def test_a_number_of_tokens_that_is_a_symbol(options):
    (tokens,) = jax.export.symbolic_shape("4*t")
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    ids = jax.ShapeDtypeStruct((tokens, K), jnp.int32)
    x, routing = shape((tokens, H)), Routing(ids, shape((tokens, K)))
    with pytest.raises(ValueError, match=r"x.shape\[0\]=\S+ must be known at trace time"):
        specs = (P(), P(), SPLIT, SPLIT) if "tokens" in options else SPLIT
        inside((x, routing, *arrays()[2:]), specs, **options)


def test_weights_and_routing_are_checked_as_those_of_one_device():
    x, routing, w1, w2 = arrays()
    with pytest.raises(TypeError, match="routing must be a jaxmoe.Routing"):
        inside((x, routing.expert_ids, w1, w2))
    with pytest.raises(ValueError, match=r"gate_up.shape=\[2, 8, 16\] must be \[2, 4, 16\]"):
        inside((x, routing, w1, w2[:, :, :4]))


AROUND = [
    (arrays(t=6), {}, ValueError, "x.shape[0]=6 must be a multiple of 4 (devices that share"),
    (arrays(t=4), {"data_axis": "data"}, ValueError, "x.shape[0]=4 must be a multiple of 8"),
    (arrays(e=6), {}, ValueError, "experts.num_experts=6 must be a multiple of 4 (devices of axis"),
    (arrays(e=6), {}, ValueError, "place_experts pads the weights"),
    (arrays(), {"axis_name": "ep"}, ValueError, "axis_name='ep' must be an axis of the mesh ('dat"),
    (arrays(), {"data_axis": "expert"}, ValueError, "data_axis='expert' must be another axis than"),
    (
        *(arrays(), {"axis_name": ("expert", "expert")}, ValueError),
        "axis_name='expert' must be named once",
    ),
    (arrays(), {"mesh": 4}, TypeError, "mesh must be a jax.sharding.Mesh"),
    (arrays(), {"residual": 1.0}, TypeError, "residual must be a JAX or NumPy array"),
    (arrays(), {"own_apart": 1}, TypeError, "own_apart must be a bool. Got own_apart: 1"),
    (
        (*arrays()[:2], zeros((1, E, H, 2 * WIDTH)), zeros((1, E, WIDTH, H))),
        *({}, ValueError, "experts must be those of one layer, whose weights have 3 axes"),
    ),
    ((zeros((T,)), *arrays()[1:]), {}, ValueError, "x must have 2 axes [T,H], not 1"),
    (arrays(), {"mesh": None}, ValueError, "mesh must be given where jax.set_mesh has set none"),
    (arrays(), {"tokens": "all"}, ValueError, "tokens='all' must be one of sharded, replicated"),
    (
        arrays(),
        {"tensor_axis": "data"},
        ValueError,
        "experts.order='gate_up' must be 'interleaved' with",
    ),
    (
        (*arrays()[:2], zeros((E, H, 14)), zeros((E, 7, H))),
        {"tensor_axis": "data", "gate_up": "interleaved"},
        ValueError,
        "experts.intermediate=7 must be a multiple of 2 (devices of tensor_axis='data')",
    ),
    (
        arrays(),
        {"expert_map": np.full((4, E), 2, np.int32)},
        ValueError,
        "expert_map holds the local id 2, which must be below 2",
    ),
    (
        arrays(),
        {"expert_map": np.zeros((4, 0), np.int32)},
        ValueError,
        "expert_map.shape[1]=0 must be at least 1",
    ),
    (
        arrays(),
        {"expert_map": np.zeros((4, E), int)},
        TypeError,
        "expert_map.dtype=i64 must be i32",
    ),
    (
        arrays(),
        {"expert_map": np.zeros(4, np.int32)},
        ValueError,
        "expert_map must have 2 axes [n,E], not 1",
    ),
    (
        arrays(),
        {"expert_map": np.full((4, E), -1, np.int32)},
        ValueError,
        "sharded_moe_mlp: expert_map must have each expert on some device, and none has expert 0",
    ),
    (
        arrays(),
        {"residual": zeros((T + 1, H))},
        ValueError,
        "residual.shape[0]=9 must equal x.shape[0]=8",
    ),
    (
        (arrays()[0], arrays(t=2 * T)[1], *arrays()[2:]),
        {},
        ValueError,
        "routing.expert_ids.shape[0]=16 must equal x.shape[0]=8",
    ),
    ((arrays()[0], None, *arrays()[2:]), {}, TypeError, "routing must be a jaxmoe.Routing"),
    ((None, *arrays()[1:]), {}, TypeError, "x must be a JAX or NumPy array"),
]


@pytest.mark.parametrize("args, options, error, text", AROUND, ids=lambda v: str(v)[:40])
def test_around_shard_map(args, options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        around(args, **options)


def test_other_functions():
    choose = functools.partial(expert_parallel.choose_dispatch, hidden=8, top_k=2)
    with pytest.raises(ValueError, match="num_devices=0 must be at least 1"):
        choose(8, num_devices=0)
    with pytest.raises(TypeError, match="num_tokens must be a Python int"):
        choose(8.0, num_devices=2)
    with pytest.raises(ValueError, match="tokens='none' must be one of"):
        choose(8, num_devices=2, tokens="none")
    place = expert_parallel.expert_placement
    with pytest.raises(ValueError, match=r"copies\[1\]=3 must be in \[1, 2\]"):
        place(4, 2, copies={1: 3})
    with pytest.raises(ValueError, match=r"copies' expert=4 must be in \[0, 3\]"):
        place(4, 2, copies={4: 2})
    with pytest.raises(ValueError, match="w must have 4 experts"):
        expert_parallel.place_experts(jnp.zeros((3, 2)), place(4, 2))
    along = r"w must have 4 experts \(expert_map.shape\[1\]\) along its first axis. Got w: f32\[\]"
    with pytest.raises(ValueError, match=along):
        expert_parallel.place_experts({"scale": jnp.float32(1)}, place(4, 2))
    with pytest.raises(TypeError, match="links must be an expert_parallel.Links"):
        choose(8, num_devices=2, links=3)
    with pytest.raises(TypeError, match="direct must be True or False"):
        choose(8, num_devices=2, direct="x")
    with pytest.raises(TypeError, match="copies must be a mapping"):
        place(4, 2, copies=[1])
    twice = np.array([[0, 0, -1], [-1, -1, 0]], np.int32)
    with pytest.raises(ValueError, match="place_experts: .* experts 0 and 1 have the same, 0"):
        expert_parallel.place_experts(jnp.zeros((3, 2)), twice)
    with pytest.raises(ValueError, match=r"expert_map.shape\[1\]=0 must be at least 1"):
        expert_parallel.place_experts(jnp.zeros((0, 2)), np.zeros((2, 0), np.int32))
    with pytest.raises(TypeError, match="expert_map must be a NumPy array"):
        expert_parallel.place_experts(jnp.zeros((4, 2)), jnp.zeros((2, 4), jnp.int32))


def test_ragged_says_that_it_cannot_be_mapped():
    x, *rest = arrays()
    call = functools.partial(layers.sharded, mesh=mesh(), axis_name="expert", dispatch="ragged")
    with pytest.raises(NotImplementedError, match="dispatch='ragged' must be another way under"):
        jax.eval_shape(jax.vmap(call, (0, None, None, None)), jnp.stack([x, x]), *rest)


def test_quantized_weights_refuse_what_a_single_device_refuses():
    x, routing, *plain = arrays()
    w = [jaxmoe.quantize(a, "fp8_channel", weight_layout="kn") for a in plain]
    with pytest.raises(ValueError, match="which are in fp8_channel"):
        around((x, routing, *w), dispatch_format="fp8_block")

    def loss(x):
        call = functools.partial(layers.sharded, mesh=mesh(), axis_name="expert")
        return call(x, routing, *w, dispatch_format="fp8_channel").sum()

    text = "dispatch_format='fp8_channel' must be None for gradients of x"
    with pytest.raises(NotImplementedError, match=text):
        jax.eval_shape(jax.grad(loss), x)


def test_errors_about_a_devices_arrays_say_so():
    said = r"must be a multiple of num_chunks=3. Got x: f32\[2,8\]. These are on one of 4 devices\."
    with pytest.raises(ValueError, match=said):
        around(arrays(), num_chunks=3)
    with pytest.raises(TypeError, match=r"must be a bool. Got batch_invariant: 1\.\s"):
        around(arrays(), batch_invariant=1)
    one = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"num_chunks=3. Got x: f32\[8,8\]\.\s"):
        around(arrays(), num_chunks=3, mesh=one)
