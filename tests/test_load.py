"""Folders in the layouts of released models, to layers: the numbers that the importers give."""

import concurrent.futures
import dataclasses
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmoe
from jaxmoe import Experts, checkpoints, inspect
from jaxmoe._load import ahead, stored
from jaxmoe._load.files import DTYPES
from jaxmoe._load.shards import Shards
from jaxmoe._testing import assert_equal

E, H, I, T = 4, 128, 64, 5  # noqa: E741
NAMES = {np.dtype(d): name for name, d in DTYPES.items()}
BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
PROJ = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
W123 = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
JOINED = {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}


def save(path, tensors):
    ends = np.cumsum([a.nbytes for a in tensors.values()]).tolist()
    header = {
        name: {"dtype": NAMES[a.dtype], "shape": a.shape, "data_offsets": [end - a.nbytes, end]}
        for (name, a), end in zip(tensors.items(), ends, strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    data = b"".join(a.tobytes() for a in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_folder(folder, config, tensors, shards=1):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save(folder / "model.safetensors", tensors)
        return folder
    names, places = list(tensors), {}
    for i in range(shards):
        file = f"model-{i}.safetensors"
        save(folder / file, {n: tensors[n] for n in names[i::shards]})
        places |= dict.fromkeys(names[i::shards], file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


class Draw:
    """Random numbers of files."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def u8(self, *shape):
        return self._rng.integers(0, 256, shape, np.uint8)

    def i32(self, *shape):
        return self._rng.integers(-(2**31), 2**31, shape, np.int32)

    def normal(self, *shape):
        return self._rng.normal(size=shape)

    def positive(self, *shape):
        return np.abs(self.normal(*shape))

    def power(self, *shape):
        return self.u8(*shape) // 16 + 112


def assert_same(out, expected):
    """The same tree of arrays of the same bits."""
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert_equal(a, b)


# How a weight [N, K] is stored: its tensors by what follows the stem, of random numbers.
def plain(draw, n, k):
    return {".weight": draw.normal(n, k).astype(BF16)}


def block(draw, n, k):
    scales = 0.1 + draw.u8(math.ceil(n / 128), math.ceil(k / 128)).astype("f4")
    return {".weight": draw.normal(n, k).astype(F8), ".weight_scale_inv": scales}


def channel(draw, n, k):
    scales = draw.positive(n, 1).astype(BF16)
    return {".weight": draw.normal(n, k).astype(F8), ".weight_scale": scales}


def deepseek_v4(draw, n, k):
    scale = draw.power(n, k // 32).view(ml_dtypes.float8_e8m0fnu)
    return {".weight": draw.u8(n, k // 2).view(np.int8), ".scale": scale}


def mxfp4(draw, n, k):
    return {".weight_packed": draw.u8(n, k // 2), ".weight_scale": draw.power(n, k // 32)}


def mxfp8(draw, n, k):
    return {".weight": draw.normal(n, k).astype(F8), ".weight_scale": draw.power(n, k // 32)}


def int4(draw, n, k, group=32):
    scales = draw.positive(n, k // group).astype(BF16)
    shape = np.array([n, k], np.int32)
    return {".weight_packed": draw.i32(n, k // 8), ".weight_scale": scales, ".weight_shape": shape}


def int4_g128(draw, n, k):
    return int4(draw, n, k, 128)


def int4_zeros(draw, n, k):
    return {**int4(draw, n, k), ".weight_zero_point": draw.i32(n // 8, k // 32)}


def nvfp4(draw, n, k):
    scales = draw.positive(n, k // 16).astype(F8)
    scale = np.array([3.0], np.float32)
    return {
        ".weight_packed": draw.u8(n, k // 2),
        ".weight_scale": scales,
        ".weight_global_scale": scale,
    }


def modelopt(draw, n, k):
    scales = draw.positive(n, k // 16).astype(F8)
    scale = np.array(0.25, np.float32).reshape(1)
    return {".weight": draw.u8(n, k // 2), ".weight_scale": scales, ".weight_scale_2": scale}


def gptq(draw, n, k):
    scales = draw.positive(k // 64, n).astype(np.float16)
    g_idx = np.arange(k, dtype=np.int32) // 64
    return {
        ".qweight": draw.i32(k // 8, n),
        ".qzeros": draw.i32(k // 64, n // 8),
        ".scales": scales,
        ".g_idx": g_idx,
    }


def awq(draw, n, k):
    scales = draw.positive(k // 64, n).astype(np.float16)
    return {
        ".qweight": draw.i32(k, n // 8),
        ".qzeros": draw.i32(k // 64, n // 8),
        ".scales": scales,
    }


def reads(importer, *parts, **named):
    """The importer's call with the tensors of these parts."""

    def read(tensors):
        args = [tensors[part] for part in parts]
        return importer(*args, **{name: tensors[part] for name, part in named.items()})

    return read


READERS = {
    plain: lambda tensors: jnp.asarray(tensors[".weight"]),
    block: reads(checkpoints.from_block, ".weight", ".weight_scale_inv"),
    channel: reads(checkpoints.from_compressed_tensors, ".weight", ".weight_scale"),
    deepseek_v4: reads(checkpoints.from_mxfp4, ".weight", ".scale"),
    mxfp4: reads(checkpoints.from_mxfp4, ".weight_packed", ".weight_scale"),
    mxfp8: reads(checkpoints.from_mxfp8, ".weight", ".weight_scale"),
    int4: reads(checkpoints.from_int4, ".weight_packed", ".weight_scale"),
    int4_g128: lambda t: checkpoints.from_int4(
        t[".weight_packed"], t[".weight_scale"], group_size=128
    ),
    int4_zeros: reads(
        checkpoints.from_int4,
        *(".weight_packed", ".weight_scale"),
        weight_zero_point=".weight_zero_point",
    ),
    nvfp4: reads(
        checkpoints.from_nvfp4,
        *(".weight_packed", ".weight_scale"),
        weight_global_scale=".weight_global_scale",
    ),
    modelopt: reads(
        checkpoints.from_nvfp4, ".weight", ".weight_scale", weight_scale_2=".weight_scale_2"
    ),
    gptq: lambda t: checkpoints.from_gptq(
        t[".qweight"], t[".qzeros"], t[".scales"], t[".g_idx"], group_size=64, dtype="bfloat16"
    ),
    awq: lambda t: checkpoints.from_awq(
        t[".qweight"], t[".qzeros"], t[".scales"], group_size=64, dtype="bfloat16"
    ),
}

TOP_2 = {"num_experts_per_tok": 2}
GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
V3 = {"n_routed_experts": E, **TOP_2, **GROUPS}
V3_CALL = {"method": "deepseek_v3", "num_groups": 2, "top_groups": 1, "scale": 2.5}
QWEN = {"num_experts": E, **TOP_2, "norm_topk_prob": True, "hidden_act": "silu"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AT = "model.layers.{l}.mlp."
WIDE = {"gate_proj": (128, H), "up_proj": (128, H), "down_proj": (H, 128)}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "dynamic": False}
E4M3_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed_tensors(weights, tokens=None):
    """The `quantization_config` of packed weights."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
    parts = {"format": "pack-quantized", "config_groups": {"group_0": group}}
    return {"quant_method": "compressed-tensors", **parts}


@dataclasses.dataclass(frozen=True)
class Files:
    """A folder: model type, configuration, storage, names, and the routing that is wanted."""

    kind: str
    config: dict
    store: object = plain
    at: str = AT
    shapes: dict = dataclasses.field(default_factory=lambda: PROJ)
    bias: str | None = None
    route: dict = dataclasses.field(default_factory=dict)
    quantization: dict = dataclasses.field(default_factory=dict)
    activation: object = "swiglu"


FILES = {
    "qwen3": Files("qwen3_moe", QWEN),
    "qwen3_fp8": Files("qwen3_moe", QWEN, block),
    "qwen3_not_normalized": Files(
        "qwen3_moe",
        {**QWEN, "norm_topk_prob": False},
        route={"method": "softmax", "norm_topk_prob": False},
    ),
    "qwen3_without_a_word": Files(
        "qwen3_moe",
        {"num_experts": E, **TOP_2},
        route={"method": "softmax", "norm_topk_prob": False},
    ),
    "qwen3_next_without_a_word": Files("qwen3_next", {"num_experts": E, **TOP_2}),
    "qwen3_gptq": Files("qwen3_moe", QWEN, gptq, quantization=GPTQ),
    "qwen3_awq": Files(
        "qwen3_moe", QWEN, awq, quantization={"quant_method": "awq", "group_size": 64}
    ),
    "qwen3_int4_zeros": Files(
        *("qwen3_moe", QWEN, int4_zeros),
        quantization=compressed_tensors({**INT4, "group_size": 32, "symmetric": False}),
    ),
    "qwen3_w4a8": Files(
        *("qwen3_moe", QWEN, int4_g128),
        shapes=WIDE,
        quantization=compressed_tensors({**INT4, "group_size": 128}, E4M3_TOKENS),
    ),
    "qwen3_nvfp4": Files("qwen3_moe", QWEN, nvfp4),
    "qwen3_modelopt": Files("qwen3_moe", QWEN, modelopt),
    "qwen3_mxfp4": Files("qwen3_moe", QWEN, mxfp4),
    "qwen3_mxfp8": Files("qwen3_moe", QWEN, mxfp8),
    "olmoe": Files(
        "olmoe",
        {"num_experts": E, **TOP_2, "norm_topk_prob": False},
        route={"method": "softmax", "norm_topk_prob": False},
    ),
    "mixtral": Files(
        "mixtral",
        {"num_local_experts": E, **TOP_2},
        channel,
        "model.layers.{l}.block_sparse_moe.",
        W123,
    ),
    "deepseek_v2": Files(
        "deepseek_v2",
        {**V3, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
        route={**V3_CALL, "method": "deepseek_v2"},
    ),
    "deepseek_v2_lite": Files(
        "deepseek_v2",
        {"n_routed_experts": E, **TOP_2, "topk_method": "greedy", "routed_scaling_factor": 1.0},
        route={"method": "softmax", "norm_topk_prob": False},
    ),
    "deepseek_v3": Files(
        *("deepseek_v3", V3, block), bias="gate.e_score_correction_bias", route=V3_CALL
    ),
    "kimi": Files(*("kimi_k2", V3, int4), bias="gate.e_score_correction_bias", route=V3_CALL),
    "deepseek_v4": Files(
        "deepseek_v4",
        {"n_routed_experts": E, **TOP_2, "routed_scaling_factor": 1.5, "swiglu_limit": 10},
        *(deepseek_v4, "layers.{l}.ffn.", W123, "gate.bias"),
        route={"method": "sqrtsoftplus", "scale": 1.5},
        activation=jaxmoe.Swiglu(limit=10.0),
    ),
    "minimax_m2": Files(
        "minimax_m2",
        {"num_local_experts": E, **TOP_2},
        *(plain, "model.layers.{l}.block_sparse_moe.", W123, "e_score_correction_bias"),
        route={"method": "minimax2"},
    ),
}


def folder(tmp_path, files, layers=(0,), shards=1, without=()):
    """Writes it; returns the folder and its tensors."""
    draw = Draw(len(files.kind))
    tensors = {}
    for number in layers:
        at = files.at.format(l=number)
        for e in range(E):
            for name, (n, k) in files.shapes.items():
                for part, array in files.store(draw, n, k).items():
                    tensors[f"{at}experts.{e}.{name}{part}"] = array
        tensors[f"{at}gate.weight"] = draw.normal(E, H).astype(BF16)
        if files.bias:
            tensors[at + files.bias] = draw.normal(E).astype(np.float32)
    config = {"model_type": files.kind, "num_hidden_layers": max(layers) + 1, **files.config}
    if files.quantization:
        config["quantization_config"] = files.quantization
    kept = {name: a for name, a in tensors.items() if name not in without}
    return save_folder(tmp_path / "model", config, kept, shards), tensors


def stacked(tensors, files, name, number=0):
    at = files.at.format(l=number)
    first = f"{at}experts.0.{name}"
    parts = [n.removeprefix(first) for n in tensors if n.startswith(first + ".")]
    return {p: np.stack([tensors[f"{at}experts.{e}.{name}{p}"] for e in range(E)]) for p in parts}


def wanted(tensors, files, number=0):
    read = READERS[files.store]
    weights = (read(stacked(tensors, files, name, number)) for name in files.shapes)
    names = ("gate", "up", "down")
    return Experts(
        **dict(zip(names, weights, strict=True)), layout="nk", activation=files.activation
    )


@pytest.mark.parametrize("name", FILES)
def test_a_folder_becomes_the_layer_of_its_importer(name, tmp_path):
    files = FILES[name]
    path, tensors = folder(tmp_path, files)
    (layer,) = jaxmoe.load(path).values()
    assert_same(layer.experts, wanted(tensors, files))
    assert layer.experts.activation == files.activation
    x = jnp.asarray(np.random.default_rng(0).normal(size=(T, H)), jnp.bfloat16)
    at = files.at.format(l=0)
    logits = np.asarray(x, np.float32) @ tensors[f"{at}gate.weight"].astype(np.float32).T
    bias = {"bias": jnp.asarray(tensors[at + files.bias])} if files.bias else {}
    routing = jaxmoe.route(jnp.asarray(logits), top_k=2, **files.route, **bias)
    mine = layer.route(x)
    assert_equal(mine.expert_ids, routing.expert_ids)
    np.testing.assert_allclose(mine.weights, routing.weights, rtol=1e-4)
    y = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert y.shape == x.shape and bool(jnp.isfinite(y.astype(jnp.float32)).all())


def gpt_oss(tmp_path, quantized):
    draw = Draw(3)
    at = "model.layers.0.mlp."
    tensors = {f"{at}router.weight": draw.normal(E, H).astype(BF16)}
    tensors[f"{at}router.bias"] = draw.normal(E).astype(BF16)
    for name, (n, k) in JOINED.items():
        stem = f"{at}experts.{name}"
        if quantized:
            tensors[f"{stem}_blocks"] = draw.u8(E, n, k // 32, 16)
            tensors[f"{stem}_scales"] = draw.power(E, n, k // 32)
        else:
            tensors[stem] = draw.normal(E, k, n).astype(BF16)
        tensors[f"{stem}_bias"] = draw.normal(E, n).astype(BF16)
    config = {"model_type": "gpt_oss", "num_local_experts": E, **TOP_2, "swiglu_limit": 7.0}
    return save_folder(tmp_path, config, tensors), tensors, at


@pytest.mark.parametrize("quantized", (True, False))
def test_gpt_oss(tmp_path, quantized):
    path, tensors, at = gpt_oss(tmp_path, quantized)
    layer = jaxmoe.load(path)[0]
    parts = {}
    for name in JOINED:
        stem = f"{at}experts.{name}"
        if quantized:
            blocks = tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"]
            parts[name] = checkpoints.from_mxfp4(*blocks)
        else:
            parts[name] = jnp.asarray(tensors[stem])
    want = Experts(
        gate_up=parts["gate_up_proj"],
        down=parts["down_proj"],
        gate_up_bias=jnp.asarray(tensors[f"{at}experts.gate_up_proj_bias"]),
        down_bias=jnp.asarray(tensors[f"{at}experts.down_proj_bias"]),
        order="interleaved",
        layout="nk" if quantized else "kn",
        activation=jaxmoe.Swiglu(1.702, 1.0, 7.0),
    )
    assert_same(layer.experts, want)
    x = jnp.zeros((T, H), jnp.bfloat16)
    logits = jnp.tile(jnp.asarray(tensors[f"{at}router.bias"], jnp.float32), (T, 1))
    assert_same(layer.route(x), jaxmoe.route(logits, top_k=2))


def test_llama4_inside_of_a_model_of_several_inputs(tmp_path):
    draw = Draw(4)
    at = "language_model.model.layers.1.feed_forward."
    tensors = {
        f"{at}experts.gate_up_proj": draw.normal(E, H, 2 * I).astype(BF16),
        f"{at}experts.down_proj": draw.normal(E, I, H).astype(BF16),
        f"{at}router.weight": draw.normal(E, H).astype(BF16),
        f"{at}shared_expert.gate_proj.weight": draw.normal(I, H).astype(BF16),
    }
    text = {"model_type": "llama4_text", "num_local_experts": E, "num_experts_per_tok": 1}
    path = save_folder(tmp_path, {"model_type": "llama4", "text_config": text}, tensors)
    ((number, layer),) = jaxmoe.load(path).items()
    assert number == 1
    experts = Experts(gate_up=layer.experts.gate_up, down=layer.experts.down)
    x = jnp.asarray(draw.normal(T, H), jnp.bfloat16)
    want = jaxmoe.moe_mlp(x, layer.route(x), experts, apply_weight_on_input=True)
    assert_equal(layer(x), want)
    assert_equal(layer.experts.gate_up, tensors[f"{at}experts.gate_up_proj"])


def test_hash_routing_takes_the_experts_of_the_token(tmp_path):
    files = FILES["deepseek_v4"]
    path, tensors = folder(tmp_path, files, layers=(0, 1))
    table = np.random.default_rng(5).integers(0, E, (10, 2))
    del tensors["layers.0.ffn.gate.bias"]
    tensors["layers.0.ffn.gate.tid2eid"] = table
    config = json.loads((path / "config.json").read_text())
    first, second = jaxmoe.load(save_folder(path, config, tensors)).values()
    ids = jnp.array([3, 9, 0, 0, 1])
    x = jnp.ones((T, H), jnp.bfloat16)
    assert_equal(first.route(x, ids).expert_ids, jnp.asarray(table[np.asarray(ids)], jnp.int32))
    with pytest.raises(ValueError, match="token_ids must be given"):
        first.route(x)
    assert first.selection_bias is None and second.selection_bias is not None
    mesh = jax.make_mesh((4,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jaxmoe.load(path, layers=[0], mesh=mesh, axis="experts")[0]
    assert_equal(split.expert_table, first.expert_table)


def test_shards_layers_and_progress(tmp_path):
    files = FILES["qwen3_fp8"]
    path, tensors = folder(tmp_path, files, layers=(0, 2, 3), shards=3)
    # a module that predicts further tokens lies behind the last layer
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (path / "config.json").write_text(json.dumps(config))
    seen = []
    layers = jaxmoe.load(path, progress=lambda *step: seen.append(step))
    assert list(layers) == [0, 2]
    for number, layer in layers.items():
        assert_same(layer.experts, wanted(tensors, files, number))
    nbytes = sum(a.nbytes for n, a in tensors.items() if "experts" in n and ".3." not in n[:16])
    assert seen[-1][:2] == (nbytes, nbytes) and len(seen) == 6
    assert [done for done, *_ in seen] == sorted({done for done, *_ in seen})
    assert list(jaxmoe.load(path, layers=[2])) == [2]
    with pytest.raises(LookupError, match="layer 1 has no experts, layers 0, 2 have"):
        jaxmoe.load(path, layers=[1])
    (path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no model-1.safetensors"):
        jaxmoe.load(path)


@pytest.mark.parametrize("name", ("qwen3", "kimi", "qwen3_nvfp4"))
def test_experts_over_a_mesh_are_read_by_their_devices(name, tmp_path, monkeypatch):
    files = FILES[name]
    path, tensors = folder(tmp_path, files)
    mesh = jax.make_mesh((2, 2), ("other", "experts"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ranges = []
    read = stored.Stored.read
    monkeypatch.setattr(
        *(stored.Stored, "read"),
        lambda self, s, part, kept: ranges.append(part) or read(self, s, part, kept),
    )
    (layer,) = jaxmoe.load(path, mesh=mesh, axis="experts").values()
    assert ranges == [range(2), range(2, 4)] * 3
    assert_same(layer.experts, wanted(tensors, files))
    for leaf in jax.tree.leaves(layer.experts):
        assert leaf.sharding.spec == jax.P("experts") and leaf.sharding.mesh == mesh
    assert layer.router.sharding.is_fully_replicated
    with pytest.raises(ValueError, match="4 experts must be a multiple of the 8 devices"):
        jaxmoe.load(path, mesh=jax.make_mesh((8,), ("e",)), axis="e")
    with pytest.raises(ValueError, match="axis='x' must be an axis of mesh"):
        jaxmoe.load(path, mesh=mesh, axis="x")


@pytest.mark.parametrize("axis", (("hosts", "experts"), ("experts", "hosts"), ("hosts",)), ids=str)
def test_experts_over_two_axes(axis, tmp_path):
    """As a layer divides them whose exchange takes an axis at a time."""
    path, tensors = folder(tmp_path, FILES["qwen3"])
    mesh = jax.make_mesh((2, 2), ("hosts", "experts"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    (layer,) = jaxmoe.load(path, mesh=mesh, axis=axis).values()
    assert_same(layer.experts, wanted(tensors, FILES["qwen3"]))
    for leaf in jax.tree.leaves(layer.experts):
        where = jax.NamedSharding(mesh, jax.P(axis))
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    for wrong in (("hosts", "x"), ("hosts", "hosts"), ["hosts"]):
        with pytest.raises(ValueError, match=r"axis=.* must be .* of mesh, which has \('hosts'"):
            jaxmoe.load(path, mesh=mesh, axis=wrong)
    wide = jax.make_mesh((2, 4), ("hosts", "experts"))
    with pytest.raises(ValueError, match="4 experts must be a multiple of the 8 devices of axis="):
        jaxmoe.load(path, mesh=wide, axis=("hosts", "experts"))


def test_experts_are_stacked_some_at_a_time(tmp_path, monkeypatch):
    files = FILES["kimi"]
    path, tensors = folder(tmp_path, files)
    largest = []
    chunk = stored.Stored._chunk
    monkeypatch.setattr(stored, "_CHUNK_BYTES", 3 * I * H // 2)
    monkeypatch.setattr(
        stored.Stored, "_chunk", lambda self, s, e: largest.append(len(e)) or chunk(self, s, e)
    )
    (layer,) = jaxmoe.load(path).values()
    assert set(largest) == {2}
    assert_same(layer.experts, wanted(tensors, files))


@pytest.mark.parametrize("name", ("kimi", "qwen3"))
def test_files_are_read_in_parts(name, tmp_path, monkeypatch):
    files = FILES[name]
    path, tensors = folder(tmp_path, files)
    for limit, value in (("_READ_BYTES", 7), ("_AHEAD_BYTES", 1), ("_BATCH_BYTES", 1)):
        monkeypatch.setattr(ahead, limit, value)
    (layer,) = jaxmoe.load(path).values()
    assert_same(layer.experts, wanted(tensors, files))


def test_pieces_are_read_before_they_are_asked_for(tmp_path, monkeypatch):
    tensors = {f"t{i}": np.arange(6 * i, 6 * i + 6, dtype=np.int32).reshape(3, 2) for i in range(5)}
    path = save_folder(tmp_path, {}, tensors)
    shards = Shards(path)
    pieces = [shards.stacked([f"t{i}"]) for i in range(4)]
    monkeypatch.setattr(ahead, "_AHEAD_BYTES", 2 * tensors["t0"].nbytes)
    monkeypatch.setattr(ahead, "_BATCH_BYTES", 1)
    with ahead.Ahead(shards, pieces) as files:
        np.testing.assert_array_equal(files.take(pieces[0])[0], tensors["t0"])
        begun = [read for reading in files._begun for read in reading.reads]
        concurrent.futures.wait(begun)
        assert len(begun) == 2
        (path / "model.safetensors").write_bytes(b"")
        for i in (1, 2):
            np.testing.assert_array_equal(files.take(pieces[i])[0], tensors[f"t{i}"])
        with pytest.raises(ValueError, match="was cut off while it was read"):
            files.take(pieces[3])


def test_what_is_next_to_each_other_in_a_file_is_read_at_once(tmp_path, monkeypatch):
    """Tensors of experts in turn, as files have them, of which pieces are every second one."""
    tensors = {}
    for e in range(6):
        tensors |= {f"{e}.w": np.full((5, 3), e, np.int32), f"{e}.s": np.full(3, -e, np.int16)}
    shards = Shards(save_folder(tmp_path, {}, tensors))
    pieces = [shards.stacked([f"{e}.{name}" for e in range(6)]) for name in "ws"]
    read, asked = ahead._read, []
    monkeypatch.setattr(
        ahead, "_read", lambda file, first, to: asked.append(len(to)) or read(file, first, to)
    )
    most = 3 * (60 + 6)  # a read may have so many bytes, or parts
    for bytes_of_read, parts_of_read, wanted in (
        (1 << 20, 512, [12]),
        (most, 512, [6, 6]),
        (1 << 20, 4, [4, 4, 4]),
        (60, 512, [1] * 12),
    ):
        monkeypatch.setattr(ahead, "_READ_BYTES", bytes_of_read)
        monkeypatch.setattr(ahead, "_READ_PARTS", parts_of_read)
        with ahead.Ahead(shards, pieces) as files:
            for piece, name in zip(pieces, "ws", strict=True):
                for e, got in enumerate(files.take(piece)):
                    np.testing.assert_array_equal(got, tensors[f"{e}.{name}"])
        assert sorted(asked) == sorted(wanted)
        asked.clear()


def test_a_read_that_brings_less_goes_on(tmp_path, monkeypatch):
    tensors = {"a": np.arange(40, dtype=np.int32), "b": np.arange(9, dtype=np.int16)}
    shards = Shards(save_folder(tmp_path, {}, tensors))
    whole = os.preadv

    def some(file, to, at):
        return whole(file, [to[0][:13]], at)

    monkeypatch.setattr(os, "preadv", some)
    pieces = [shards.stacked(["a"]), shards.stacked(["b"])]
    with ahead.Ahead(shards, pieces) as files:
        for piece, name in zip(pieces, "ab", strict=True):
            np.testing.assert_array_equal(files.take(piece)[0], tensors[name])


def test_pieces_that_are_not_the_next(tmp_path):
    tensors = {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.ones((4, 3), BF16)}
    shards = Shards(save_folder(tmp_path, {}, tensors))
    with ahead.Ahead(shards, [shards.stacked(["a"])]) as files:
        np.testing.assert_array_equal(files.take(shards.part("a", 1, 3)), tensors["a"][1:3])
        np.testing.assert_array_equal(files.take(shards.stacked(["a", "a"]))[1], tensors["a"])
        got = files.take(shards.stacked(["b"]))
        np.testing.assert_array_equal(got[0].view(np.uint16), tensors["b"].view(np.uint16))
        np.testing.assert_array_equal(files.take(shards.stacked(["a"]))[0], tensors["a"])


MISSING = (
    (
        "qwen3",
        "experts.3.up_proj.weight",
        "no tensor 'model.layers.0.mlp.experts.3.up_proj.weight'",
    ),
    ("qwen3_fp8", "experts.0.gate_proj.weight_scale_inv", "experts.0.gate_proj.weight_scale'"),
    ("qwen3_fp8", "experts.2.down_proj.weight_scale_inv", "experts.2.down_proj.weight_scale_inv'"),
    ("kimi", "experts.0.up_proj.weight_scale", "no tensor .*experts.0.up_proj.weight_scale'"),
    ("qwen3_nvfp4", "experts.0.up_proj.weight_global_scale", "up_proj.weight_global_scale'"),
    ("qwen3", "gate.weight", "no tensor 'model.layers.0.mlp.gate.weight'"),
)


def test_what_is_routed_is_checked():
    experts = jaxmoe.Experts(np.ones((E, H, 2 * I), BF16), np.ones((E, I, H), BF16))
    layer = jaxmoe.loading.LoadedLayer(experts, np.ones((E, H), BF16), options=(("top_k", 1),))
    with pytest.raises(ValueError, match=rf"x must have shape \[.., H\] with H = {H} of the rout"):
        layer(np.ones((T, H + 1), BF16))
    with pytest.raises(TypeError, match="LoadedLayer.route: x must be a JAX or NumPy array"):
        layer([1.0])
    assert layer(np.ones((2, T, H), BF16)).shape == (2, T, H)


@pytest.mark.parametrize("name", GROUPS)
def test_a_number_of_the_routing_that_is_missing_is_named(name, tmp_path):
    files = FILES["deepseek_v3"]
    config = {k: v for k, v in files.config.items() if k != name}
    path, _ = folder(tmp_path, dataclasses.replace(files, config=config))
    with pytest.raises(ValueError, match=f"config.json has no {name}"):
        jaxmoe.load(path)


@pytest.mark.parametrize(("name", "tensor", "message"), MISSING)
def test_what_is_missing_is_named(name, tensor, message, tmp_path):
    path, _ = folder(tmp_path, FILES[name], without=[f"model.layers.0.mlp.{tensor}"])
    with pytest.raises(LookupError, match=message):
        jaxmoe.load(path)


def test_what_cannot_be_read_is_refused(tmp_path):
    files = FILES["qwen3"]
    path, tensors = folder(tmp_path, files)
    config = json.loads((path / "config.json").read_text())

    def refuses(error, message, tensors=tensors, **changed):
        new = {k: v for k, v in {**config, **changed}.items() if v is not None}
        with pytest.raises(error, match=message):
            jaxmoe.load(save_folder(path, new, tensors))

    refuses(NotImplementedError, "model_type='bert' must be one of .*qwen3_moe", model_type="bert")
    refuses(ValueError, "config.json has no num_experts_per_tok", num_experts_per_tok=None)
    refuses(ValueError, "num_experts_per_tok=5, which must be at most 4", num_experts_per_tok=5)
    once = r"^jaxmoe.load: (?!.*jaxmoe.load).*hidden_act='relu' must be one of"
    refuses(ValueError, once, hidden_act="relu")
    of_other_name = {"num_experts_per_tok": None, "moe_topk": 5}
    refuses(ValueError, "moe_topk=5, which must be at most 4", **of_other_name)
    refuses(LookupError, "no layer with tensors layers.N.mlp.experts", {"x": tensors.popitem()[1]})
    stem = "model.layers.0.mlp.experts.{e}.up_proj"
    of_words = {f"{stem.format(e=e)}.weight": np.zeros((I, H), np.int32) for e in range(E)}
    refuses(NotImplementedError, "up_proj.weight is int32", {**tensors, **of_words})
    eight = {f"{stem.format(e=e)}.weight": np.zeros((I, H), np.int8) for e in range(E)}
    scales = {f"{stem.format(e=e)}.weight_scale": np.ones((I, 1), BF16) for e in range(E)}
    refuses(NotImplementedError, "is int8 beside .weight_scale", tensors | eight | scales)
    odd = {f"{stem.format(e=3)}.weight": np.zeros((I + 8, H), BF16)}
    refuses(
        ValueError,
        r"up_proj.weight is BF16 \[72, 128\] and .*0.up_proj.weight BF16 \[64",
        {**tensors, **odd},
    )
    eight = {f"{stem.format(e=0)}.qweight": np.zeros(1, np.int32)}
    refuses(
        *(NotImplementedError, "has 8 bits, not 4", {**tensors, **eight}),
        quantization_config={"quant_method": "gptq", "bits": 8},
    )
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="has bytes .* for"):
        Shards(path)
    file.write_bytes(b"\xff" * 16)
    with pytest.raises(ValueError, match="cut off"):
        Shards(path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*.safetensors"):
        Shards(path)
    (path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        jaxmoe.load(path)


def test_the_number_of_experts_is_that_of_the_files(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3"])
    config = json.loads((path / "config.json").read_text())
    with pytest.raises(
        ValueError, match="says 3 experts, the files have more: .*experts.3.gate_proj.weight"
    ):
        jaxmoe.load(save_folder(path, {**config, "num_experts": 3}, tensors))
    with pytest.raises(LookupError, match="no tensor .*experts.4.gate_proj.weight"):
        jaxmoe.load(save_folder(path, {**config, "num_experts": 5}, tensors))
    path, tensors, _ = gpt_oss(tmp_path / "joined", quantized=True)
    config = json.loads((path / "config.json").read_text())
    with pytest.raises(
        ValueError, match=r"says 5 experts, .*_blocks has the shape \[4, 128, 4, 16\]"
    ):
        jaxmoe.load(save_folder(path, {**config, "num_local_experts": 5}, tensors))


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    (
        ("qwen3", {".bias": np.ones(I, BF16)}, "up_proj.bias has no reader, beside .* bfloat16"),
        ("qwen3", {"_bias": np.ones(I, BF16)}, "up_proj_bias has no reader"),
        ("qwen3_nvfp4", {".pre_quant_scale": np.ones(H, BF16)}, "up_proj.pre_quant_scale has no"),
        ("qwen3_mxfp4", {".weight_zero_point": np.ones(1, np.int32)}, "zero_point has no reader"),
        ("kimi", {".weight_shape": np.array([I, H // 2])}, "has 16 words for K=64: not 4 bits"),
    ),
)
def test_no_tensor_of_a_weight_is_passed_over(name, parts, message, tmp_path):
    path, tensors = folder(tmp_path, FILES[name])
    config = json.loads((path / "config.json").read_text())
    (at,) = {key.split("experts.")[0] for key in tensors if "experts." in key}
    more = {f"{at}experts.{e}.up_proj{p}": a for e in range(E) for p, a in parts.items()}
    with pytest.raises(NotImplementedError, match=message):
        jaxmoe.load(save_folder(path, config, tensors | more))


@pytest.mark.parametrize("name", ("kimi", "qwen3_int4_zeros"))
def test_parts_that_change_nothing(name, tmp_path):
    files = FILES[name]
    path, tensors = folder(tmp_path, files)
    config = json.loads((path / "config.json").read_text())
    (at,) = {key.split("experts.")[0] for key in tensors if "experts." in key}
    order = np.arange(H, dtype=np.int32) // 32
    parts = {".bias": np.zeros(I, BF16), ".input_scale": np.ones(1, BF16), ".weight_g_idx": order}
    more = {f"{at}experts.{e}.up_proj{p}": a for e in range(E) for p, a in parts.items()}
    layer = jaxmoe.load(save_folder(path, config, tensors | more))
    assert_same(next(iter(layer.values())).experts, wanted(tensors, files, min(layer)))


def test_zero_points_of_compressed_tensors_are_along_n(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3_int4_zeros"])
    experts = jaxmoe.load(path)[0].experts
    assert experts.down.format == "int4_g32_zp"
    nibbles = lambda words: (words[..., None] >> np.arange(0, 32, 4)) & 15  # noqa: E731
    for e in range(E):
        at = f"model.layers.0.mlp.experts.{e}.down_proj.weight"
        codes = nibbles(tensors[f"{at}_packed"]).reshape(H, I)
        zeros = nibbles(tensors[f"{at}_zero_point"]).transpose(0, 2, 1).reshape(H, I // 32)
        scales = tensors[f"{at}_scale"].astype(np.float32)
        of_groups = lambda a: np.repeat(a, 32, axis=1)  # noqa: E731
        want = ((codes - of_groups(zeros)) * of_groups(scales)).astype(BF16)
        assert_equal(jaxmoe.dequantize(experts.down)[e], want)


def test_zero_points_of_gptq_v2_are_as_they_are(tmp_path):
    path, tensors = folder(tmp_path, FILES["qwen3_gptq"])
    config = json.loads((path / "config.json").read_text())
    zeros = [key for key in tensors if key.endswith(".qzeros")]
    v1 = tensors | {key: tensors[key] & np.int32(0x77777777) for key in zeros}
    v2 = v1 | {key: v1[key] + np.int32(0x11111111) for key in zeros}
    was = jaxmoe.load(save_folder(path, config, v1))[0].experts
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    assert_same(jaxmoe.load(save_folder(path, config, v2))[0].experts, was)
    config["quantization_config"]["checkpoint_format"] = "marlin"
    with pytest.raises(NotImplementedError, match="checkpoint_format 'marlin', not gptq or"):
        jaxmoe.load(save_folder(path, config, v2))


def test_biases_of_gpt_oss_are_not_passed_over(tmp_path):
    path, tensors, at = gpt_oss(tmp_path, quantized=True)
    name = f"{at}experts.down_proj_bias"
    config = json.loads((path / "config.json").read_text())
    del tensors[name]
    with pytest.raises(LookupError, match=f"has no tensor '{name}'"):
        jaxmoe.load(save_folder(path, config, tensors))


def test_inspect(tmp_path, capsys):
    path, tensors = folder(tmp_path, FILES["kimi"], layers=(1, 2))
    assert inspect.main([str(path), "--tokens", "8"]) == 0
    text = capsys.readouterr().out
    assert "kimi_k2: 2 layers with experts, 4 experts" in text and "'top_k': 2" in text
    nbytes = sum(a.nbytes for n, a in tensors.items() if "experts" in n and "shape" not in n)
    assert f"layer 1: int4_g32, {nbytes / 2e3:.4g} kB\n" in text
    assert f"experts: {nbytes / 1e3:.4g} kB\n" in text
    assert f"{H} x {I}, 8 tokens:" in text and "int4_g32" in text and "jaxmoe_moe_mlp" in text
    assert inspect.main([str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err


def test_inspect_says_what_differs_by_layer(tmp_path, capsys):
    """Hunyuan's files have the experts of a token for each layer."""
    config = {"num_experts": E, "moe_topk": [2, 1, 2], "num_experts_per_tok": None}
    files = Files("hunyuan_v1_moe", config)
    path, tensors = folder(tmp_path, files, layers=(0, 1, 2))
    named = {n.replace("gate.weight", "gate.wg.weight"): a for n, a in tensors.items()}
    save_folder(path, json.loads((path / "config.json").read_text()), named)
    assert inspect.main([str(path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "3 layers with experts, 4 experts, " in head and "top_k" not in head
    for number, k in enumerate((2, 1, 2)):
        assert lines[number].startswith(f"layer {number}: bfloat16, ")
        assert lines[number].endswith(f" kB, top_k={k}")
    assert [line for line in lines if ", 16 tokens:" in line] == [
        f"layers 0, 2: bfloat16, {H} x {I}, 16 tokens:",
        f"layer 1: bfloat16, {H} x {I}, 16 tokens:",
    ]


def test_reading_is_imported_when_it_is_used():
    there = "print('jaxmoe.loading' in sys.modules)"
    code = f"import sys, jaxmoe; {there}; jaxmoe.load; {there}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'loads'"):
        jaxmoe.loads  # noqa: B018


def test_errors_of_readers_name_the_weight(tmp_path):
    files = FILES["kimi"]
    path, tensors = folder(tmp_path, files)
    config = json.loads((path / "config.json").read_text())
    stem = "experts.{e}.up_proj"
    odd = {k: a[:40] for k, a in tensors.items() if "up_proj.weight_packed" in k}
    odd |= {k: a[:40] for k, a in tensors.items() if "up_proj.weight_scale" in k}
    odd |= {k: np.array([40, H]) for k in tensors if "up_proj.weight_shape" in k}
    message = rf"jaxmoe.load: .*{stem}: jaxmoe.checkpoints.from_int4: weight_packed must .*, not 40"
    with pytest.raises(ValueError, match=message):
        jaxmoe.load(save_folder(path, config, tensors | odd))
    (at,) = {key.split("experts.")[0] for key in tensors if "experts." in key}
    zeros = {f"{at}{stem.format(e=e)}.weight_zero_point": np.zeros((I, 4), "i4") for e in range(E)}
    with pytest.raises(ValueError, match=rf"{stem}: .*weight_zero_point.shape=\[4,64,4\] must be"):
        jaxmoe.load(save_folder(path, config, tensors | zeros))
