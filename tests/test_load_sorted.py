"""Folders of int4 weights whose columns were sorted (`desc_act`, `actorder`), to plain layers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import inspect
from jaxmoe._load import stored
from jaxmoe._testing import assert_equal
from tests.test_load import (
    BF16,
    GPTQ,
    INT4,
    QWEN,
    WIDE,
    E,
    Files,
    H,
    T,
    compressed_tensors,
    folder,
    gptq,
    int4,
    int4_zeros,
    save_folder,
)

SORTED = GPTQ | {"desc_act": True}
ACTORDER = {**INT4, "group_size": 32, "actorder": "group"}
NAMES = ("gate_proj", "up_proj", "down_proj")
AT = "model.layers.0.mlp.experts."


def nibbles(words):
    """Eight codes a word, the first in the lowest bits, along the last axis."""
    bits = words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    return bits.reshape(*words.shape[:-1], -1).astype(np.float64)


def decoded(tensors, stem):
    """The weight [N, K] that a matrix's tensors stand for."""
    part = lambda name: tensors[f"{stem}.{name}"]  # noqa: E731
    if f"{stem}.qweight" in tensors:
        codes, scales, g = nibbles(part("qweight").T.copy()), part("scales").T, part("g_idx")
        zeros = (nibbles(part("qzeros")).T + 1) % 16
    else:
        codes, scales = nibbles(part("weight_packed")), part("weight_scale")
        g = tensors.get(f"{stem}.weight_g_idx", np.full(codes.shape[1], -1))
        g = np.arange(g.size) // (g.size // scales.shape[1]) if -1 in g else g
        zeros = np.full(scales.shape, 8)
        if f"{stem}.weight_zero_point" in tensors:
            zeros = nibbles(part("weight_zero_point").T.copy()).T
    return (codes - zeros[:, g]) * scales.astype(np.float64)[:, g]


def shuffled(store, experts=range(E), names=NAMES):
    """Weights of which these have groups of any inputs."""
    part, size = (".g_idx", 64) if store is gptq else (".weight_g_idx", 32)

    def tensors(path, files):
        path, tensors = folder(path, files)
        rng = np.random.default_rng(0)
        for e in range(E):
            for name, (_, k) in files.shapes.items():
                order = np.arange(k, dtype=np.int32) // size
                mine = e in experts and name in names
                tensors[f"{AT}{e}.{name}{part}"] = rng.permutation(order) if mine else order
        config = json.loads((path / "config.json").read_text())
        return save_folder(path, config, tensors), tensors

    return tensors


def files_of(store, quantization):
    return Files("qwen3_moe", QWEN, store, shapes=WIDE, quantization=quantization)


def weights(experts):
    return dict(zip(NAMES, (experts.gate, experts.up, experts.down), strict=True))


def check(experts, tensors, dtype):
    for name, got in weights(experts).items():
        want = np.stack([decoded(tensors, f"{AT}{e}.{name}") for e in range(E)])
        assert_equal(got, want.astype(dtype))


KINDS = {
    "gptq": (gptq, SORTED),
    "said nothing": (gptq, GPTQ),
    "actorder": (int4, compressed_tensors(ACTORDER)),
    "dynamic": (int4, compressed_tensors({**ACTORDER, "actorder": "dynamic"})),
    "zero points": (int4_zeros, compressed_tensors({**ACTORDER, "symmetric": False})),
    "without a configuration": (int4, {}),
}


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("kind", KINDS)
def test_sorted_columns_are_decoded(kind, dtype, tmp_path):
    store, said = KINDS[kind]
    path, tensors = shuffled(store)(tmp_path, files_of(store, said))
    layer = jaxmoe.load(path, dtype=dtype)[0]
    check(layer.experts, tensors, dtype)
    assert layer.experts.layout == "nk"
    x = jnp.ones((T, H), dtype)
    plain = [jnp.asarray(np.asarray(w)) for w in weights(layer.experts).values()]
    experts = jaxmoe.Experts(gate=plain[0], up=plain[1], down=plain[2], layout="nk")
    assert_equal(layer(x), jaxmoe.moe_mlp(x, layer.route(x), experts))


@pytest.mark.parametrize(
    ("experts", "names"), (((2,), NAMES), (range(E), ("down_proj",)), ((3,), ("gate_proj",)))
)
def test_one_sorted_weight_decodes_its_layer(experts, names, tmp_path):
    """An expert that was never chosen has its columns in order; a layer has one format."""
    path, tensors = shuffled(gptq, experts, names)(tmp_path, files_of(gptq, SORTED))
    check(jaxmoe.load(path)[0].experts, tensors, BF16)


@pytest.mark.parametrize(("store", "said"), ((gptq, SORTED), (int4, compressed_tensors(ACTORDER))))
def test_columns_in_order_stay_packed(store, said, tmp_path):
    path, tensors = shuffled(store, ())(tmp_path, files_of(store, said))
    packed = jaxmoe.load(path)[0].experts
    assert packed.down.format == ("int4_g64_zp" if store is gptq else "int4_g32")
    if store is int4:
        unset = {k: np.full_like(a, -1) for k, a in tensors.items() if k.endswith("g_idx")}
        config = json.loads((path / "config.json").read_text())
        same = jaxmoe.load(save_folder(path, config, tensors | unset))[0].experts
        jax.tree.map(assert_equal, same, packed)


def test_an_expert_without_groups_beside_sorted_ones(tmp_path):
    """compressed-tensors begins with -1 for all columns, and leaves it where they are in order."""
    store = shuffled(int4, (1,))
    path, tensors = store(tmp_path, files_of(int4, compressed_tensors(ACTORDER)))
    unset = {k: np.full_like(a, -1) for k, a in tensors.items() if k.endswith("g_idx")}
    tensors |= {k: a for k, a in unset.items() if ".experts.1." not in k}
    config = json.loads((path / "config.json").read_text())
    check(jaxmoe.load(save_folder(path, config, tensors))[0].experts, tensors, BF16)


def test_some_experts_at_a_time(tmp_path, monkeypatch):
    path, tensors = shuffled(gptq)(tmp_path, files_of(gptq, SORTED))
    monkeypatch.setattr(stored, "_CHUNK_BYTES", 1)
    check(jaxmoe.load(path)[0].experts, tensors, BF16)


def test_sorted_columns_on_a_mesh(tmp_path):
    path, tensors = shuffled(gptq)(tmp_path, files_of(gptq, SORTED))
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("e", "t"), axis_types=auto)
    experts = jaxmoe.load(path, mesh=mesh, axis="e", tensor_axis="t")[0].experts
    assert experts.down.sharding.spec == jax.P("e", None, "t")
    check(experts, tensors, BF16)


def test_inspect_says_what_sorted_columns_become(tmp_path, capsys):
    path, tensors = shuffled(gptq)(tmp_path, files_of(gptq, SORTED))
    assert inspect.main([str(path)]) == 0
    nbytes = sum(a.nbytes for name, a in tensors.items() if "experts" in name)
    wide = sum(2 * E * n * k for n, k in WIDE.values())
    text = capsys.readouterr().out
    line = f"layer 0: bfloat16, {nbytes / 1e3:.4g} kB; sorted columns (g_idx), decoded to "
    assert f"{line}{wide / 1e3:.4g} kB\n" in text
    assert "layer 0: bfloat16, 128 x 128, 16 tokens:" in text and "jaxmoe_moe_mlp" in text


@pytest.mark.parametrize(
    ("store", "said", "message"),
    [
        (gptq, GPTQ | {"desc_act": False}, r"1.gate_proj.g_idx has sorted .* has desc_act=false"),
        (
            int4,
            compressed_tensors({**ACTORDER, "actorder": None}),
            "gate_proj.weight_g_idx has sorted columns, .* quantization_config has actorder=null",
        ),
        (
            int4,
            compressed_tensors({**ACTORDER, "actorder": "weight"}),
            "quantization_config has actorder='weight'",
        ),
    ],
)
def test_a_configuration_that_denies_sorted_columns_is_refused(store, said, message, tmp_path):
    path, _ = shuffled(store, (1,))(tmp_path, files_of(store, said))
    with pytest.raises(ValueError, match=message):
        jaxmoe.load(path)


def test_sorted_columns_without_their_groups_are_refused(tmp_path):
    path, _ = folder(tmp_path, files_of(int4, compressed_tensors(ACTORDER)))
    message = "actorder=\"group\", which sorts columns, .* no tensor '.*gate_proj.weight_g_idx'"
    with pytest.raises(LookupError, match=message):
        jaxmoe.load(path)


def test_a_number_of_no_group_is_refused(tmp_path):
    path, tensors = shuffled(gptq)(tmp_path, files_of(gptq, SORTED))
    name = f"{AT}2.up_proj.g_idx"
    tensors[name] = tensors[name] + 1
    config = json.loads((path / "config.json").read_text())
    message = r"up_proj: jaxmoe.checkpoints.dequantize_gptq: g_idx must hold numbers of 2 groups"
    with pytest.raises(ValueError, match=message):
        jaxmoe.load(save_folder(path, config, tensors))


def test_tokens_are_not_quantized_beside_decoded_weights(tmp_path):
    path, _ = shuffled(gptq)(tmp_path, files_of(gptq, SORTED))
    with pytest.raises(ValueError, match="token_format='e4m3' must be None with weights that are"):
        jaxmoe.load(path, token_format="e4m3")


def test_the_oracle_decodes_what_readers_do(tmp_path):
    """Of columns in order, by the reader that packs."""
    path, tensors = shuffled(gptq, ())(tmp_path, files_of(gptq, SORTED))
    packed = jaxmoe.load(path, dtype="float16")[0].experts
    for name, q in weights(packed).items():
        want = np.stack([decoded(tensors, f"{AT}{e}.{name}") for e in range(E)])
        assert_equal(jaxmoe.dequantize(q), want.astype(np.float16))
