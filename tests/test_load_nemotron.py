"""Nemotron-3: experts without gate in each format of its files, and products around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import inspect
from tests.test_load import (
    BF16,
    F8,
    READERS,
    Draw,
    assert_same,
    channel,
    modelopt,
    plain,
    save_folder,
)
from tests.test_load_families import NEMOTRON, V3_BIAS, E, T, changed


def matrix_scale(draw, n, k):
    """ModelOpt's FP8: one scale a matrix and one of its inputs."""
    scales = {f".{name}_scale": np.float32(1 + draw.u8() / 64) for name in ("weight", "input")}
    return {".weight": draw.normal(n, k).astype(F8)} | scales


def nemotron(tmp_path, store, more=()):
    """A folder of Nemotron-3, 128 wide, and the stacked tensors of up and of down."""
    draw, at = Draw(2), "backbone.layers.1.mixer."
    stacked = {}
    tensors = {f"{at}gate.weight": draw.normal(E, 128).astype(BF16)}
    tensors[f"{at}{V3_BIAS}"] = draw.normal(E).astype(np.float32)
    for name, shape in (("up", (64, 128)), ("down", (128, 64))):
        experts = [store(draw, *shape) for _ in range(E)]
        stacked[name] = {part: np.stack([e[part] for e in experts]) for part in experts[0]}
        for e, parts in enumerate(experts):
            tensors |= {f"{at}experts.{e}.{name}_proj{part}": a for part, a in parts.items()}
    config = {**NEMOTRON.config, "model_type": "nemotron_h", "num_hidden_layers": 3}
    return save_folder(tmp_path / "model", config, tensors | dict(more)), stacked


@pytest.mark.parametrize("store", (plain, channel, modelopt, matrix_scale))
def test_nemotron_keeps_the_format_of_its_files(store, tmp_path, capsys):
    # Layers of other kinds have no experts, and modules for further tokens are no layers.
    names = ("backbone.layers.0.mixer.in_proj", "backbone.layers.2.mixer.up_proj")
    names += ("mtp.layers.1.mixer.gate", "mtp.layers.1.mixer.experts.0.up_proj")
    path, stacked = nemotron(tmp_path, store, {f"{n}.weight": np.ones((2, 2), BF16) for n in names})
    ((number, layer),) = jaxmoe.load(path).items()
    read = READERS.get(store, READERS[channel])
    want = {name: read(parts) for name, parts in stacked.items()}
    if store is matrix_scale:
        scales = (np.max(stacked[name][".input_scale"]) for name in ("up", "down"))
        want |= dict(zip(("x_scale", "h_scale"), map(jnp.float32, scales), strict=True))
    assert_same(layer.experts, jaxmoe.Experts(**want, layout="nk", activation="relu2"))
    assert number == 1 and layer.experts.gate is None and layer.experts.activation == "relu2"
    y = layer(jnp.ones((T, 128), jnp.bfloat16))
    assert bool(jnp.isfinite(y.astype(jnp.float32)).all())
    assert inspect.main([str(path)]) == 0
    assert "nemotron_h: 1 layers with experts, 8 experts" in capsys.readouterr().out


def test_a_tensor_of_a_gate_is_no_part_of_nemotron(tmp_path):
    gates = {f"backbone.layers.1.mixer.experts.{e}.gate_proj.weight": 1 for e in range(E)}
    path, _ = nemotron(tmp_path, plain, {k: np.ones((64, 128), BF16) for k in gates})
    with pytest.raises(NotImplementedError, match=r"experts.0.gate_proj.weight has no reader"):
        jaxmoe.load(path)


def latent_folder(tmp_path, **more):
    """The tensors of Nemotron's products around experts, with others in their place."""
    draw, at = Draw(3), "backbone.layers.1.mixer."
    products = {"fc1_latent_proj.weight": draw.normal(128, 256).astype(F8)}
    products["fc1_latent_proj.weight_scale"] = np.float32(0.25)
    products["fc1_latent_proj.input_scale"] = np.float32(2.0)
    products["fc2_latent_proj.weight"] = draw.normal(256, 128).astype(BF16)
    products["gate.weight"] = draw.normal(E, 256).astype(BF16)
    products |= {name.replace("__", "."): array for name, array in more.items()}
    tensors = {at + name: array for name, array in products.items() if array is not None}
    path, _ = nemotron(tmp_path, plain, tensors)
    return changed(path, moe_latent_size=128), products


def test_products_around_experts_may_be_fp8(tmp_path):
    path, products = latent_folder(tmp_path)
    mesh = jax.make_mesh((4,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    for options in ({}, {"mesh": mesh, "axis": "e"}):
        layer = jaxmoe.load(path, **options)[1]
        eight = products["fc1_latent_proj.weight"].astype(np.float32)
        want = jaxmoe.loading.LatentSpace(
            jnp.asarray(eight / 4, jnp.bfloat16), jnp.asarray(products["fc2_latent_proj.weight"])
        )
        assert_same(layer.latent, want)
        assert layer.latent.before.sharding.is_fully_replicated
    assert layer(jnp.ones((2, T, 256), jnp.bfloat16)).shape == (2, T, 256)
    assert inspect.main([str(path)]) == 0


@pytest.mark.parametrize(
    ("more", "error", "message"),
    (
        ({"fc2_latent_proj__weight": None}, LookupError, "no tensor '.*fc2_latent_proj.weight'"),
        ({"fc1_latent_proj__weight_scale": None}, LookupError, "fc1_latent_proj.weight_scale'"),
        (
            {"fc2_latent_proj__weight": np.ones((256, 64), BF16)},
            *(ValueError, r"fc2_latent_proj.weight must be .* \[256, 128\], not bf16 \[256, 64\]"),
        ),
        (
            {"fc1_latent_proj__weight_scale": np.ones(128, np.float32)},
            *(ValueError, r"must be \[128, 256\] with one .weight_scale, not .* with \[128\]"),
        ),
        (
            {"fc2_latent_proj__bias": np.ones(256, BF16)},
            *(NotImplementedError, "fc2_latent_proj.bias has no reader, beside"),
        ),
    ),
)
def test_products_around_experts_that_do_not_fit_are_named(more, error, message, tmp_path):
    path, _ = latent_folder(tmp_path, **more)
    with pytest.raises(error, match=message):
        jaxmoe.load(path)
