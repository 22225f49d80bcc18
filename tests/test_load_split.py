"""Layers that `jaxmoe.load` puts on a mesh in parts of I or H: the layer that is not split."""

import dataclasses
import functools
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import expert_parallel
from jaxmoe._load import stored
from tests import test_load as files
from tests.sharding_programs import AUTO, EXPLICIT, entered
from tests.test_load import BF16, F8, QWEN, TOP_2, Draw, assert_same, save_folder

E, H, I, T = 4, 512, 512, 6  # noqa: E741
AT = "model.layers.0.mlp."
INT4 = files.compressed_tensors({**files.INT4, "group_size": 128})
FORMATS = {
    "bf16": (files.plain, {}),
    "fp8_block": (files.block, {}),
    "fp8_channel": (files.channel, {}),
    "int4_g128": (files.int4_g128, {"quantization_config": INT4}),
    "mxfp4": (files.mxfp4, {}),
}
SPLITS = {
    "experts, I": {"axis": "e", "tensor_axis": "t"},
    "experts, H": {"axis": "e", "hidden_axis": "t"},
    "I": {"tensor_axis": "t"},
    "H": {"hidden_axis": "t"},
    "I, H": {"tensor_axis": "e", "hidden_axis": "t"},
}


def mesh_of(kind=AUTO, sizes=(2, 4)):
    return jax.make_mesh(sizes, ("e", "t"), axis_types=(kind,) * 2)


def qwen(path, store, said, inter=I, hidden=H):
    """A model whose experts have three weights each, in a format."""
    draw, tensors = Draw(7), {f"{AT}gate.weight": Draw(8).normal(E, hidden).astype(BF16)}
    shapes = {
        "gate_proj": (inter, hidden),
        "up_proj": (inter, hidden),
        "down_proj": (hidden, inter),
    }
    for e in range(E):
        for name, shape in shapes.items():
            parts = store(draw, *shape)
            tensors |= {f"{AT}experts.{e}.{name}{part}": a for part, a in parts.items()}
    return save_folder(path, {"model_type": "qwen3_moe", **QWEN, **said}, tensors)


def joined(path, kind, store, biased):
    """A model that has gates and ups in one array."""
    draw, config = Draw(9), {"num_local_experts": E, "num_experts": E, **TOP_2}
    router = "router" if "gpt_oss" in kind or "privacy" in kind else "gate"
    tensors = {f"{AT}{router}.weight": draw.normal(E, H).astype(BF16)}
    if biased:
        tensors[f"{AT}router.bias"] = draw.normal(E).astype(BF16)
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        tensors |= {f"{AT}experts.{name}{p}": a for p, a in store(draw, n, k).items()}
        if biased:
            tensors[f"{AT}experts.{name}_bias"] = draw.normal(E, n).astype(BF16)
    return save_folder(path, {"model_type": kind, **config}, tensors)


def kn(draw, n, k):
    return {"": draw.normal(E, k, n).astype(BF16)}


def nk(draw, n, k):
    return {"": draw.normal(E, n, k).astype(BF16)}


def blocks(draw, n, k):
    return {"_blocks": draw.u8(E, n, k // 32, 16), "_scales": draw.power(E, n, k // 32)}


def scaled(draw, n, k):
    scales = 0.1 + draw.u8(E, n // 128, k // 128).astype("f4")
    return {".weight": draw.normal(E, n, k).astype(F8), ".weight_scale_inv": scales}


def of_matrix(draw, n, k):
    return {
        ".weight": draw.normal(E, n, k).astype(F8),
        ".weight_scale": draw.positive(E).astype("f4"),
    }


JOINED = {
    "interleaved": ("gpt_oss", kn, True),
    "interleaved mxfp4": ("gpt_oss", blocks, True),
    "biases": ("openai_privacy_filter", kn, True),
    "mxfp4 and biases": ("openai_privacy_filter", blocks, True),
    "nk": ("qwen3_5_moe", nk, False),
    "fp8_block": ("qwen3_5_moe", scaled, False),
    "fp8_tensor": ("qwen3_5_moe", of_matrix, False),
}


def whole(experts):
    """The experts on the host, gate and up in one array if there are biases or arrays of both."""
    host = jax.tree.map(np.asarray, experts)
    if experts.gate is None:
        return host
    n = 1 if experts.layouts[0] == "nk" else 2

    def both(gate, up):
        if gate.ndim == 1:  # scales of all of a matrix
            return np.testing.assert_array_equal(gate, up) or gate
        return np.concatenate([gate, up], axis=n if gate.ndim == 3 else 1)

    fields = {"gate_up": jax.tree.map(both, host.gate, host.up), "gate": None, "up": None}
    if experts.gate_bias is not None:
        fields |= {"gate_up_bias": both(host.gate_bias, host.up_bias)}
        fields |= {"gate_bias": None, "up_bias": None}
    return dataclasses.replace(host, **fields)


def check_places(experts, mesh, axis=None, tensor_axis=None, hidden_axis=None):
    """Each weight, its scales and its bias lie as `expert_parallel` places them, and H is split."""
    for name in ("gate_up", "gate", "up", "down"):
        n, k = (hidden_axis, tensor_axis) if name == "down" else (tensor_axis, hidden_axis)
        w, bias = getattr(experts, name), getattr(experts, f"{name}_bias")
        kn = experts.layouts[name == "down"] == "kn"
        if bias is not None:
            assert bias.sharding.is_equivalent_to(NamedSharding(mesh, P(axis, n)), 2)
        for a in jax.tree.leaves(w):
            spec = P(axis, k, n) if kn else P(*(axis, n, k)[: a.ndim])
            assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim), (
                name,
                a.sharding,
            )
            assert a.sharding.mesh == mesh


def run(layer, mesh, **options):
    """The result for tokens that every device has, and the program."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(T, H)), jnp.bfloat16)
    call = jax.jit(lambda layer, x: layer(x, **options))
    if mesh is None:
        return call(layer, x), ""
    with entered(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P()))
        program = call.lower(layer, x).compile()
        return program(layer, x), program.as_text()


def assert_near(got, want):
    """Sums in another order; a part in the wrong place is off by as much as there is."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.isfinite(want).all() and np.abs(want).max() > 0
    assert np.abs(got - want).max() <= 2e-2 * np.abs(want).max()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_in_parts_is_that_of_one_device(format, split, tmp_path):
    path, mesh, axes = qwen(tmp_path, *FORMATS[format]), mesh_of(), SPLITS[split]
    want = jaxmoe.load(path)[0]
    layer = jaxmoe.load(path, mesh=mesh, **axes)[0]
    assert_same(jax.tree.map(np.asarray, layer), jax.tree.map(np.asarray, want))
    check_places(layer.experts, mesh, **axes)
    parts = 8 if len(axes) == 2 else 4
    values = jax.tree.leaves(layer.experts.down)[0]
    assert {s.data.size for s in values.addressable_shards} == {values.size // parts}
    y, text = run(layer, mesh, gather_weights=())
    assert_near(y, run(want, None)[0])
    if "H" not in split:  # nothing moves but results, which are added up
        assert "all-reduce" in text
        assert not any(name in text for name in ("all-gather", "permute", "all-to-all"))


@pytest.mark.parametrize("split", ("experts, I", "H"))
@pytest.mark.parametrize("name", ("bf16", "mxfp4", "mxfp4 and biases"))
def test_a_layer_in_parts_on_explicit_axes(name, split, tmp_path):
    mesh, apart = mesh_of(EXPLICIT), name in FORMATS
    path = qwen(tmp_path, *FORMATS[name]) if apart else joined(tmp_path, *JOINED[name])
    layer = jaxmoe.load(path, mesh=mesh, **SPLITS[split])[0]
    check_places(layer.experts, mesh, **SPLITS[split])
    assert_near(run(layer, mesh)[0], run(jaxmoe.load(path)[0], None)[0])


@pytest.mark.parametrize("split", ("experts, I", "H"))
@pytest.mark.parametrize("name", JOINED)
def test_gates_and_ups_in_one_array(name, split, tmp_path):
    """They become two arrays where I is split, unless they are interleaved."""
    path, mesh = joined(tmp_path, *JOINED[name]), mesh_of()
    want = jaxmoe.load(path)[0]
    layer = jaxmoe.load(path, mesh=mesh, **SPLITS[split])[0]
    two = "I" in split and "interleaved" not in name
    assert (layer.experts.gate is not None) == two and (layer.experts.gate_up is None) == two
    assert_same(whole(layer.experts), jax.tree.map(np.asarray, want.experts))
    check_places(layer.experts, mesh, **SPLITS[split])
    y, text = run(layer, mesh, gather_weights=())
    assert_near(y, run(want, None)[0])
    assert "permute" not in text


def test_biases_lie_as_experts_do(tmp_path):
    path, mesh = joined(tmp_path, *JOINED["interleaved"]), mesh_of()
    experts = jaxmoe.load(path, mesh=mesh, axis="e")[0].experts
    assert_same(whole(experts), jax.tree.map(np.asarray, jaxmoe.load(path)[0].experts))
    check_places(experts, mesh, axis="e")


def test_several_axes_split_a_dimension(tmp_path):
    path, mesh = qwen(tmp_path, *FORMATS["bf16"]), mesh_of()
    for axes in (("e", "t"), ("t", "e")):
        layer = jaxmoe.load(path, mesh=mesh, tensor_axis=axes)[0]
        check_places(layer.experts, mesh, tensor_axis=axes)
        assert_same(whole(layer.experts), whole(jaxmoe.load(path)[0].experts))


def test_tensor_axis_is_that_of_expert_parallel(tmp_path):
    """Whose layer refuses gates before ups: also where one device has all of I."""
    path = joined(tmp_path, *JOINED["mxfp4 and biases"])
    want = jaxmoe.load(path)[0]
    for sizes in ((2, 4), (4, 1)):
        mesh = mesh_of(sizes=sizes)
        layer = jaxmoe.load(path, mesh=mesh, axis="e", tensor_axis="t")[0]
        named = {"mesh": mesh, "axis_name": "e", "tensor_axis": "t"}
        call = functools.partial(expert_parallel.sharded_moe_mlp, **named)
        x = jnp.ones((8, H), jnp.bfloat16)
        y = jax.jit(lambda layer, x, call=call: call(x, layer.route(x), layer.experts))(layer, x)
        assert_near(y, want(x))


def test_hidden_axis_is_that_of_gathered_weights(tmp_path):
    """FSDP: weights in parts of H over the axis that splits tokens."""
    path, mesh = qwen(tmp_path, *FORMATS["fp8_block"]), mesh_of()
    layer = jaxmoe.load(path, mesh=mesh, hidden_axis="t")[0]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, H)), jnp.bfloat16)
    placed = jax.device_put(x, NamedSharding(mesh, P("t")))
    y = jax.jit(lambda layer, x: layer(x, gather_weights="t"))(layer, placed)
    assert y.sharding.is_equivalent_to(placed.sharding, 2)
    assert_near(y, jaxmoe.load(path)[0](x))


def test_no_device_holds_more_than_its_part_and_some_experts(tmp_path, monkeypatch):
    path, mesh = qwen(tmp_path, *FORMATS["mxfp4"]), mesh_of()
    monkeypatch.setattr(stored, "_CHUNK_BYTES", 1)  # an expert at a time
    chunk, held = stored.Stored._chunk, dict.fromkeys(mesh.devices.flat, 0)

    def buffers():
        """Bytes by device and place, which arrays and their parts share."""
        shards = [shard for a in jax.live_arrays() for shard in a.addressable_shards]
        return {(s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}

    before = buffers()

    def counted(self, *args):
        weight = chunk(self, *args)
        for device in held:
            now = (n for at, n in buffers().items() if at not in before and at[0] == device)
            held[device] = max(held[device], sum(now))
        return weight

    monkeypatch.setattr(stored.Stored, "_chunk", counted)
    layer = jaxmoe.load(path, mesh=mesh, tensor_axis=("e", "t"))[0]
    weights = sum(a.nbytes for a in jax.tree.leaves(layer.experts))
    most = layer.router.nbytes + weights / 8
    first, *others = held.values()
    assert 0 < max(others) <= most
    assert weights / 12 < first <= most + 2.1 * weights / (3 * E)


WRONG = {
    "no axis": ({"tensor_axis": "x"}, "tensor_axis='x' must be an axis of mesh, which has"),
    "no axis of several": ({"hidden_axis": ("t", "x")}, "hidden_axis=.* must be different axes of"),
    "twice": (
        {"axis": "t", "tensor_axis": "t"},
        "tensor_axis='t' must name other axes than axis='t",
    ),
    "of two": (
        {"tensor_axis": ("e", "t"), "hidden_axis": "t"},
        r"hidden_axis='t' must name other axes than tensor_axis=\('e', 't'\)",
    ),
    "a number": ({"hidden_axis": 3}, "hidden_axis=3 must be an axis of mesh"),
}


@pytest.mark.parametrize("name", WRONG)
def test_axes_that_are_not_there(name, tmp_path):
    axes, message = WRONG[name]
    path = qwen(tmp_path, *FORMATS["bf16"], inter=16, hidden=16)
    with pytest.raises(ValueError, match=f"jaxmoe.load: {message}"):
        jaxmoe.load(path, mesh=mesh_of(), **axes)
    for argument in axes:
        with pytest.raises(
            ValueError, match=f"{argument}='t' must be an axis of mesh, which has None"
        ):
            jaxmoe.load(path, **{argument: "t"})


def int4_of_rows(draw, n, k):
    return files.int4(draw, n, k, k)


OF_ROWS = {"quantization_config": files.compressed_tensors({**files.INT4, "group_size": -1})}
UNDIVIDED = {
    "I": (
        files.plain,
        {},
        (18, 16),
        {"tensor_axis": "t"},
        "I=18 .* of 4 (size 4",
        "size 3 would",
    ),
    "H": (
        files.plain,
        {},
        (16, 20),
        {"hidden_axis": ("e", "t")},
        "H=20 .* of 8 (size 8",
        "size 10 w",
    ),
    "blocks of I": (
        *(files.block, {}, (384, 256), {"tensor_axis": "t"}),
        *(
            "I=384 .* of 512 (size 4 of tensor_axis='t', blocks of 128 of fp8_b",
            "size 3 w",
        ),
    ),
    "blocks of H": (
        *(*FORMATS["int4_g128"], (256, 256), {"hidden_axis": "t"}),
        *(
            "H=256 .* of 512 (size 4 of hidden_axis='t', blocks of 128 of int4_g",
            "size 2 w",
        ),
    ),
    "one block": (
        *(files.mxfp4, {}, (64, 256), {"tensor_axis": "e"}),
        *("I=64 must be a multiple of 128 (", "tensor_axis must be None"),
    ),
    "an odd block": (
        *(files.block, {}, (192, 256), {"tensor_axis": "e"}),
        *("I=192 must be a multiple of 256 (", "tensor_axis must be None"),
    ),
    "rows with one scale": (
        *(int4_of_rows, OF_ROWS, (256, 256), {"tensor_axis": "e"}),
        *("I=256 must be a multiple of 512 (", "tensor_axis must be None"),
    ),
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_blocks_that_axes_do_not_divide_are_refused_before_a_weight_is_read(
    name, tmp_path, monkeypatch
):
    store, said, sizes, axes, message, instead = UNDIVIDED[name]
    path = qwen(tmp_path, store, said, *sizes)
    monkeypatch.delattr(stored.Stored, "read")
    message = f"{message}.*: {instead}".replace("(", r"\(")
    with pytest.raises(ValueError, match=rf"jaxmoe.load: {AT[:-1]}: {message}"):
        jaxmoe.load(path, mesh=mesh_of(), **axes)


def test_halves_of_an_odd_number_of_blocks_are_refused(tmp_path):
    """Also on one device; an axis of one device divides everything else."""
    draw, mesh = Draw(3), mesh_of(sizes=(1, 1))
    shapes = {"gate_up_proj": (128, 256), "down_proj": (256, 64)}
    tensors = {f"{AT}gate.weight": draw.normal(E, 256).astype(BF16)}
    for name, (n, k) in shapes.items():
        stem = f"{AT}experts.{name}.weight"
        tensors[stem] = draw.normal(E, n, k).astype(F8)
        tensors[f"{stem}_scale_inv"] = np.ones((E, -(-n // 128), -(-k // 128)), "f4")
    config = {"model_type": "qwen3_5_moe", "num_experts": E, **TOP_2}
    path = save_folder(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"I=64 must be a multiple of 128 \(size 1 of tensor_a"):
        jaxmoe.load(path, mesh=mesh, tensor_axis="t")
    experts = jaxmoe.load(path, mesh=mesh, axis="e", hidden_axis="t")[0].experts
    assert_same(whole(experts), whole(jaxmoe.load(path)[0].experts))


PROCESS = """
import sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import jaxmoe
from jax.sharding import AxisType
mesh = jax.make_mesh((2, 2), ("t", "e"), axis_types=(AxisType.Auto,) * 2)
want = jaxmoe.load(sys.argv[1])[0]
for axes in ({"axis": "e", "tensor_axis": "t"}, {"axis": "t", "hidden_axis": "e"}):
    layer = jaxmoe.load(sys.argv[1], mesh=mesh, **axes)[0]
    for a, b in zip(jax.tree.leaves(layer), jax.tree.leaves(want), strict=True):
        for shard in a.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), np.asarray(b)[shard.index])
    values = jax.tree.leaves(layer.experts.down)[0]
    assert {shard.data.size for shard in values.addressable_shards} == {values.size // 4}
    x = np.random.default_rng(0).normal(size=(8, layer.router.shape[1])).astype(jax.numpy.bfloat16)
    x = jax.make_array_from_callback(x.shape, layer.router.sharding, lambda index: x[index])
    y = jax.jit(lambda layer, x: layer(x), out_shardings=layer.router.sharding)(layer, x)
    y, want_y = (np.asarray(a, np.float32) for a in (y, want(np.asarray(x))))
    assert np.abs(y - want_y).max() <= 2e-2 * np.abs(want_y).max() > 0
print("right")
"""


def test_two_processes(tmp_path):
    """Each has half of I of all experts with biases, then half of the experts."""
    path = joined(tmp_path, *JOINED["interleaved mxfp4"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROCESS, str(path), coordinator]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(i)], **pipes) for i in range(2)]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(text.endswith("right\n") for text in printed), printed
