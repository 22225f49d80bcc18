"""The local layer of levanter's grug, against its own where levanter is installed."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe._testing import normal
from jaxmoe.seams.levanter import moe_mlp_local

T, H, WIDTH, E, K = 24, 16, 32, 6, 2

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,  # which no kernel has
}


def example(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, w13, w2 = (normal(rng, s, dtype, 0.5) for s in ((T, H), (E, H, 2 * WIDTH), (E, WIDTH, H)))
    ids = jnp.asarray(np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32))
    weights = jax.nn.softmax(normal(rng, (T, K)), axis=-1)
    return x, ids, weights, jnp.arange(T) % 5 != 3, w13, w2


def literal(x, ids, weights, valid, w13, w2, *, activation_fn):
    """The contract, token by token."""
    out = np.zeros((T, H), np.float32)
    for t in range(T):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = np.split(np.asarray(x[t] @ w13[e]), 2)
            out[t] += weight * bool(valid[t]) * np.asarray((activation_fn(gate) * up) @ w2[e])
    return out


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value(name):
    args, function = example(), ACTIVATIONS[name]
    f = jax.jit(functools.partial(moe_mlp_local, activation_fn=function, num_experts=E))
    y, dropped = f(*args)
    np.testing.assert_allclose(y, literal(*args, activation_fn=function), rtol=2e-5, atol=2e-5)
    assert dropped.dtype == jnp.int32 and int(dropped) == 0
    assert not y[~args[3]].any()


def test_master_weights():
    x, *rest = example()
    y, _ = moe_mlp_local(x.astype(jnp.bfloat16), *rest, activation_fn=jax.nn.silu, num_experts=E)
    want = literal(x, *rest, activation_fn=jax.nn.silu)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), want, rtol=0.05, atol=0.05)


def test_experts_of_any_integer_type():
    """The last one of 256 too, which padding is not."""
    x, _, weights, valid, w13, w2 = example()
    w13, w2 = (jnp.tile(w, (43, 1, 1))[:256] for w in (w13, w2))
    ids = np.tile(np.array([3, 255], np.uint8), (T, 1))
    layer = functools.partial(moe_mlp_local, activation_fn=jax.nn.silu, num_experts=256)
    y, wide = (layer(x, i, weights, valid, w13, w2)[0] for i in (ids, ids.astype(np.int32)))
    np.testing.assert_array_equal(y, wide)


@pytest.mark.parametrize("function", (jax.nn.silu, jnp.tanh))
def test_names_of_grug_are_saved(function):
    """A policy that saves them by name finds the result, and the rows around a function."""
    layer = functools.partial(moe_mlp_local, activation_fn=function, num_experts=E)
    jaxpr = str(jax.make_jaxpr(layer)(*example()))
    assert "name=grug_moe_output" in jaxpr
    assert ("name=grug_moe_expert_hidden" in jaxpr) == (function is jnp.tanh)


@pytest.mark.filterwarnings("default")  # of what levanter imports
class TestLevanter:
    @pytest.fixture(autouse=True)
    def as_levanter_has_it(self):
        try:
            self.local = importlib.import_module("levanter.grug._moe.local")
            self.grug = importlib.import_module("levanter.grug.grug_moe")
        except ImportError as error:
            pytest.skip(str(error))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_value_and_gradients(self, name):
        x, ids, weights, valid, w13, w2 = example()

        def both(layer, **options):
            def loss(x, weights, w13, w2):
                y, dropped = layer(
                    *(x, ids, weights, valid, w13, w2),
                    activation_fn=ACTIVATIONS[name],
                    num_experts=E,
                    **options,
                )
                return jnp.sum(jnp.sin(y)), (y, dropped)

            return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, weights, w13, w2)

        want = both(self.local._moe_mlp_local, implementation="scatter")
        got = both(moe_mlp_local, implementation="scatter")
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        jax.tree.map(close, got, want)

    def test_layer_calls_it(self, monkeypatch):
        """The public layer of grug with this seam in place of a backend."""
        x, ids, weights, valid, w13, w2 = example()
        layer = functools.partial(
            self.grug.moe_mlp,
            *(x, ids, weights, w13, w2),
            token_valid=valid,
            implementation="scatter",
            mesh=None,
        )
        want, called = layer(), []

        def seam(*args, **kwargs):
            called.append(sorted(kwargs))
            return moe_mlp_local(*args, **kwargs)

        monkeypatch.setitem(self.local._MOE_LOCAL_FNS, "scatter", seam)
        np.testing.assert_allclose(layer(), want, rtol=1e-4, atol=1e-4)
        assert called == [["activation_fn", "num_experts"]]
        monkeypatch.setattr(self.grug, "_moe_mlp_local", moe_mlp_local)
        np.testing.assert_allclose(layer(), want, rtol=1e-4, atol=1e-4)
        assert len(called) == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"expert_chunks": 2}, ValueError, "moe_mlp_local: expert_chunks=2 must be 1"),
        ({"num_experts": 5}, ValueError, r"moe_w13.shape\[0\]=6 must be 5 \(num_experts\)"),
        (
            {"selected_experts": np.ones((1, K), np.int32)},
            ValueError,
            r"selected_experts.shape\[0\]=1 must equal x.shape\[0\]=24",
        ),
        ({"token_valid": np.ones(T)}, TypeError, "token_valid.dtype=f64 must be bool"),
        ({"token_valid": np.ones(3, bool)}, ValueError, r"token_valid.shape=\[3\] must be \[24\]"),
        (
            {"selected_experts": np.ones((T, K), np.float32)},
            TypeError,
            "moe_mlp_local: selected_experts.dtype=f32 must be an integer type",
        ),
        (
            {"combine_weights": np.ones((T, K), np.int32)},
            TypeError,
            "combine_weights.dtype=i32 must be a floating type",
        ),
        (
            {"activation_fn": None},
            TypeError,
            "activation_fn must be a function of the gate.*: None",
        ),
        ({"activation_fn": "silu"}, TypeError, "activation_fn must be a function.*: 'silu'"),
        (
            {"activation_fn": jnp.max},
            ValueError,
            r"activation_fn\(gate\).shape=\[\] must be \[48,32\] \(that of the gate\)",
        ),
        ({"activation_fn": lambda z: None}, TypeError, r"activation_fn\(gate\) must be a JAX or"),
        (
            {"selected_experts": np.zeros((T, 7), np.int32), "activation_fn": jnp.tanh},
            ValueError,
            r"selected_experts.shape\[1\]=7 must be in \[0, 6\]",
        ),
    ],
)
def test_refused(change, error, message):
    x, ids, weights, valid, w13, w2 = example()
    given = {"x": x, "selected_experts": ids, "combine_weights": weights, "token_valid": valid}
    given |= {"moe_w13": w13, "moe_w2": w2, "num_experts": E, "activation_fn": jax.nn.silu}
    with pytest.raises(error, match=message):
        moe_mlp_local(**given | change)


def test_results_have_the_dtype_of_tokens():
    x, ids, weights, valid, w13, w2 = example(jnp.bfloat16)
    wide = lambda z: jnp.tanh(z.astype(jnp.float32))  # noqa: E731
    y, _ = moe_mlp_local(x, ids, weights, valid, w13, w2, activation_fn=wide, num_experts=E)
    assert y.dtype == jnp.bfloat16
