"""The experts of MaxText's `RoutedMoE` against its own method, where MaxText is installed."""

import functools
import importlib
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe._testing import normal
from jaxmoe.seams.maxtext import sparse_matmul, te_moe_block
from jaxmoe.seams.transformer_engine import moe

B, S, H, WIDTH, E = 2, 16, 64, 128, 8

# What Transformer Engine's block takes, and what MaxText refuses it: names say which.
MODELS = {
    "mixtral": {"decoder_block": "mixtral", "load_balance_loss_weight": 0.01},
    "norm_topk_prob": {"decoder_block": "qwen3_moe", "norm_topk_prob": True},
    "llama4": {"decoder_block": "llama4", "num_experts_per_tok": 1},
    "gelu": {"decoder_block": "mixtral", "mlp_activations": ["gelu", "linear"]},
    "gpt_oss": {
        "decoder_block": "gpt_oss",
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 7.0,
        "mlp_bias": True,
    },
    "bias_update": {
        "decoder_block": "deepseek",
        "model_name": "deepseek3-test",
        "override_model_config": True,
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "routed_bias_update_rate": 0.001,
        "routed_scaling_factor": 2.5,
    },
}


@pytest.fixture(scope="module")
def maxtext():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECOUPLE_GCLOUD", "TRUE")
        try:
            pyconfig = importlib.import_module("maxtext.configs.pyconfig")
            moe = importlib.import_module("maxtext.layers.moe")
            initializers = importlib.import_module("maxtext.layers.initializers")
            utils = importlib.import_module("maxtext.utils.maxtext_utils")
            nnx = importlib.import_module("flax.nnx")
        except ImportError as error:
            pytest.skip(str(error))
        base = os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")
        yield types.SimpleNamespace(
            base=base, pyconfig=pyconfig, moe=moe, init=initializers, utils=utils, nnx=nnx
        )


def module_of(maxtext, dtype="float32", **options):
    sizes = {"base_emb_dim": H, "base_mlp_dim": WIDTH, "base_moe_mlp_dim": WIDTH}
    options = {"num_experts": E, "num_experts_per_tok": 2, "weight_dtype": "float32"} | options
    fixed = {"run_name": "t", "enable_checkpointing": False, "skip_jax_distributed_system": True}
    fixed |= {"hardware": "cpu", "max_target_length": S, "per_device_batch_size": 2}
    fixed |= {"sparse_matmul": True, "megablox": False, "base_num_decoder_layers": 1}
    config = maxtext.pyconfig.initialize_pydantic(
        ["", maxtext.base], dtype=dtype, **sizes, **fixed, **options
    )
    shape = (1,) * len(config.mesh_axes)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(shape), config.mesh_axes)
    module = maxtext.moe.RoutedMoE(
        config=config,
        num_experts=E,
        num_experts_per_tok=options["num_experts_per_tok"],
        mesh=mesh,
        kernel_init=maxtext.init.nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed", "mlp"),
        rngs=maxtext.nnx.Rngs(0),
        intermediate_dim=WIDTH,
        dtype=jnp.dtype(dtype),
        weight_dtype=jnp.float32,
    )
    return module, mesh


@pytest.mark.filterwarnings("default")  # of what MaxText imports
@pytest.mark.parametrize("name", MODELS)
def test_layer_and_gradients(maxtext, monkeypatch, name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        options = dict(MODELS[name])
        module, mesh = module_of(maxtext, **options)
        if options.get("mlp_bias"):
            for bias in (module.wi_0_bias, module.wi_1_bias, module.wo_bias):
                bias.value = normal(np.random.default_rng(bias.value.size), bias.value.shape)
        x = normal(np.random.default_rng(1), (B, S, H))

        def run():
            def loss(module, x):
                y, balance, update = module(x)
                total = jnp.sum(jnp.sin(y)) + (0 if balance is None else balance)
                return total, (y, balance, update)

            with mesh:
                return maxtext.nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(module, x)

        want = run()
        called = []

        def seam(*args, **kwargs):
            called.append(name)
            return sparse_matmul(*args, **kwargs)

        monkeypatch.setattr(maxtext.moe.RoutedMoE, "sparse_matmul", seam)
        got = run()
        assert called == [name]
        close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4)
        assert jax.tree.structure(got[0]) == jax.tree.structure(want[0])
        jax.tree.map(close, got, want)


@pytest.mark.filterwarnings("default")
def test_quantized_forward_pass(maxtext, monkeypatch):
    """A method with an option, in the place of MaxText's."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        module, mesh = module_of(maxtext, decoder_block="mixtral")
        x = normal(np.random.default_rng(1), (B, S, H))
        with mesh:
            want = module(x)[0]
            fp8 = functools.partialmethod(sparse_matmul, forward_format="fp8_channel")
            monkeypatch.setattr(maxtext.moe.RoutedMoE, "sparse_matmul", fp8)
            got = module(x)[0]
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 0 < error < 0.1


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("score", ("", "sigmoid"))
def test_the_block_with_its_router(maxtext, monkeypatch, score):
    """In the place of the method that calls Transformer Engine, against MaxText's own path."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        options = {"decoder_block": "deepseek" if score else "mixtral", "prefuse_moe_weights": True}
        options |= {"routed_score_func": score, "routed_scaling_factor": 2.5 if score else 1.0}
        x = normal(np.random.default_rng(1), (B, S, H))
        module, mesh = module_of(maxtext, **options)
        with mesh:
            want = module(x)[0]
        monkeypatch.setattr(maxtext.moe.RoutedMoE, "_te_moe_block", te_moe_block)
        options |= {"te_moe_block": True, "te_gmm_quantization": "te_no_quant"}
        module, mesh = module_of(maxtext, **options)
        with mesh:
            got, _, (received, capacity) = module(x)
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
        assert int(received[0]) == int(capacity) == B * S * 2


def te_stub(**change):
    """As much of a `RoutedMoE` as the block with its router reads."""
    config = {"te_gmm_quantization": "te_no_quant", "routed_bias": False, "routed_score_func": ""}
    config |= {"mlp_activations": ["silu"], "n_routing_groups": -1, "topk_routing_group": -1}
    config |= {"routed_scaling_factor": 2.5, "load_balance_loss_weight": 0.01}
    return types.SimpleNamespace(
        config=types.SimpleNamespace(**config | change),
        gate=types.SimpleNamespace(bias=np.linspace(-1, 1, E, dtype=np.float32)),
        num_experts=E,
        num_experts_per_tok=2,
        mesh=jax.make_mesh((1, 1), ("fsdp", "expert")),
        dtype=jnp.float32,
        _expert_parallelism_name="expert",
    )


@pytest.mark.parametrize("biased", (False, True))
def test_the_block_has_what_the_module_says(biased):
    x, _, _, gate, up, down, *_ = arguments()
    router = normal(np.random.default_rng(2), (H, E), jnp.float32, 0.3)
    wi = jnp.concatenate([gate, up], axis=-1)
    module = te_stub(routed_bias=biased, routed_score_func="sigmoid" if biased else "")
    given = (x, router, wi, down)
    y, loss, (received, capacity) = te_moe_block(
        module, *given, None, None, None, NamedSharding(module.mesh, P())
    )
    options = {"num_experts": E, "num_experts_per_tok": 2, "scaling_factor": 2.5}
    if biased:
        options |= {"score_function": "sigmoid", "expert_bias": module.gate.bias}
    want, of_loss, _ = moe(*given, **options, aux_loss_coeff=0.01)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, of_loss, rtol=1e-6)
    assert received.tolist() == [B * S * 2] and int(capacity) == B * S * 2
    with pytest.raises(NotImplementedError, match="te_gmm_quantization='te_mxfp8' must be"):
        te_moe_block(te_stub(te_gmm_quantization="te_mxfp8"), *given, None, None, None)


def stub(**change):
    """As much of a `RoutedMoE` as the method reads."""
    config = {"decoder_block": "mixtral", "mlp_activations": ["silu"], "mlp_activations_limit": 0.0}
    config |= {"load_balance_loss_weight": 0.0, "routed_score_func": ""}

    def get_topk(gate_logits, *_args, **_kwargs):
        weights, ids = jax.lax.top_k(gate_logits, 2)
        return jax.nn.softmax(weights, axis=-1), ids

    return types.SimpleNamespace(
        config=types.SimpleNamespace(**config | change),
        get_topk=get_topk,
        rngs=None,
        dtype=jnp.float32,
        num_experts=E,
        is_hash_routing=False,
        should_update_load_balance=lambda: False,
    )


def arguments():
    rng = np.random.default_rng(0)
    shapes = ((B, S, H), (B, S, E), (E, H, WIDTH), (E, H, WIDTH), (E, WIDTH, H))
    x, logits, gate, up, down = (normal(rng, shape, jnp.float32, 0.3) for shape in shapes)
    return (x, logits, None, gate, up, down, None, None, None)


def test_value():
    x, logits, _, gate, up, down, *_ = args = arguments()
    y, loss, update = sparse_matmul(stub(), *args)
    assert loss is None and update is None
    weights, ids = stub().get_topk(logits)
    want = np.zeros((B, S, H), np.float32)
    for b, s, k in np.ndindex(B, S, 2):
        e = int(ids[b, s, k])
        act = jax.nn.silu(x[b, s] @ gate[e]) * (x[b, s] @ up[e])
        want[b, s] += float(weights[b, s, k]) * np.asarray(act @ down[e])
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_master_weights():
    """Kernels of another dtype than the module's; a quantized format rounds them first."""
    x, *rest = arguments()
    module = stub()
    want, *_ = sparse_matmul(module, x, *rest)
    module.dtype = jnp.bfloat16
    for options in ({}, {"forward_format": "fp8_channel"}):
        y, *_ = sparse_matmul(module, x, *rest, **options)
        assert y.dtype == jnp.bfloat16
        assert np.linalg.norm(y.astype(np.float32) - want) < 0.1 * np.linalg.norm(want)


def test_another_layer_has_one_axis_of_tokens():
    seen = []

    def layer(x, routing, experts):
        seen.append((x.shape, routing.expert_ids.shape, experts.num_experts))
        return x

    y, _, _ = sparse_matmul(stub(), *arguments(), layer=layer)
    assert y.shape == (B, S, H) and seen == [((B * S, H), (B * S, 2), E)]


def test_another_layer_leaves_explicit_axes_as_they_are():
    given = [jnp.concatenate([a, a]) if i < 2 else a for i, a in enumerate(arguments())]
    x, logits, *rest = given
    mesh = jax.make_mesh((2, 2), ("b", "s"), axis_types=(AxisType.Explicit,) * 2)
    layer = functools.partial(jaxmoe.moe_mlp, gather_weights="b")
    plus = jax.jit(lambda x, *rest: x + sparse_matmul(stub(), x, *rest, layer=layer)[0])
    with jax.set_mesh(mesh):
        x, logits = (jax.device_put(a, NamedSharding(mesh, P("b", "s"))) for a in (x, logits))
        rest = [None if a is None else jax.device_put(a, NamedSharding(mesh, P())) for a in rest]
        y = plus(x, logits, *rest)
    assert jax.typeof(y).sharding.spec == P("b", "s", None)
    want = given[0] + sparse_matmul(stub(), *given)[0]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def quantized(w, groups, of):
    """Weights in int8 with a scale for each so many groups of K, as an array of qwix or aqt."""
    e, k, n = w.shape
    tiles = w.reshape(e, groups, k // groups, n)
    scale = jnp.abs(tiles).max(2, keepdims=True) / 127
    rounded = jnp.round(tiles / scale)
    values, plain = rounded.astype(jnp.int8).reshape(w.shape), (rounded * scale).reshape(w.shape)
    fields = {"qvalue": values, "scale": scale[:, :, 0], "zero_point": None, "qtype": "int8"}
    if of == "aqt":
        fields = {"qvalue": values, "scale": [scale[:, :, 0]], "bias": [], "sparsity_mask": None}
        fields |= {"tiling_state": None, "dequant_dtype": jnp.float32}
    return types.SimpleNamespace(**fields), plain


@pytest.mark.parametrize("of", ("qwix", "aqt"))
@pytest.mark.parametrize("groups", ((1, 1, 1), (2, 2, 2), (1, 1, 2), (2, 1, 0)))
def test_quantized_kernels(groups, of):
    """In a format, decoded, and in two formats or beside a plain one, where all are decoded."""
    x, logits, _, *kernels, _, _, _ = arguments()
    pairs = [quantized(w, n, of) if n else (w, w) for w, n in zip(kernels, groups, strict=True)]
    seen = []

    def layer(x, routing, experts):
        seen.append(experts.down)
        return jaxmoe.moe_mlp(x, routing, experts)

    given = [w for w, _ in pairs]
    y, *_ = sparse_matmul(stub(), x, logits, None, *given, None, None, None, layer=layer)
    plain = (w for _, w in pairs)
    want, *_ = sparse_matmul(stub(), x, logits, None, *plain, None, None, None)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    assert isinstance(seen[0], jaxmoe.QuantizedArray) == (groups == (1, 1, 1))
    with pytest.raises(ValueError, match="forward_format='fp8_channel' must be None with quant"):
        args = (x, logits, None, *given, None, None, None)
        sparse_matmul(stub(), *args, forward_format="fp8_channel")


@pytest.mark.parametrize(
    ("config", "place", "message"),
    [
        ({}, 3, "matmul: w0_kernel: jaxmoe.seams.aqt.weight: q.scale must hold one scale, not 0"),
        ({"mlp_activations": ["tanh"]}, None, r"config.mlp_activations\[0\]='tanh' must be one of"),
        (
            {"mlp_activations": ["gelu"], "mlp_activations_limit": 7, "decoder_block": "deepseek"},
            None,
            r"config.mlp_activations\[0\]='gelu' must be one of",
        ),
    ],
)
def test_refused(config, place, message):
    args = list(arguments())
    if place is not None:
        args[place] = types.SimpleNamespace(qvalue=1, scale=[], bias=[], dequant_dtype=None)
    with pytest.raises(NotImplementedError, match=message):
        sparse_matmul(stub(**config), *args)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("float32", "float32"), r"module.get_topk\(...\)\[1\].dtype=f32 must be an integer type"),
        (("int32", "int32"), r"module.get_topk\(...\)\[0\].dtype=i32 must be a floating type"),
    ],
)
def test_refused_choices(dtypes, message):
    module = stub()
    weights, ids = module.get_topk(arguments()[1])
    module.get_topk = lambda *_, **__: (weights.astype(dtypes[0]), ids.astype(dtypes[1]))
    with pytest.raises(TypeError, match=message):
        sparse_matmul(module, *arguments())
