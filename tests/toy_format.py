"""What a new format can do before it has kernels; runs with a copy of the package that has one.

Called by test_adding_a_format.py as a program: the name of the format is its argument.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe._formats import QUANTIZED
from jaxmoe._jax import targets as _targets

NAME = sys.argv[1]
E, H, INTER, T, K = 4, 16, 8, 12, 2


def close(a, b):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-1
        ),
        a,
        b,
    )


def same(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), a, b)


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.bfloat16)


def draw(seed, *shape):
    return jax.device_put(drawn(seed, *shape))


def weight(seed, *shape):
    """Weights that the format holds exactly: the largest of each expert is 1."""
    w = np.clip(np.round(drawn(seed, *shape).astype(np.float32) * 4) / 8, -1, 1)
    w[:, 0, 0] = 1
    return jax.device_put(w.astype(jnp.bfloat16))


W = {"gate": weight(0, E, H, INTER), "up": weight(1, E, H, INTER), "down": weight(2, E, INTER, H)}
X, ROUTING = draw(3, T, H), jaxmoe.route(draw(4, T, E), top_k=K)
layer = jax.jit(jaxmoe.moe_mlp)


def quantize(w):
    return jaxmoe.quantize(w, NAME, weight_layout="kn")


def joined(w):
    return jnp.concatenate([w["gate"], w["up"]], axis=2)


def experts(**options):
    return jaxmoe.Experts(gate_up=quantize(joined(W)), down=quantize(W["down"]), **options)


def plain(e):
    """The same experts, their weights dequantized."""
    weights = {n: getattr(e, n) for n in ("gate_up", "gate", "up", "down")}
    return jaxmoe.Experts(**{n: jaxmoe.dequantize(w) for n, w in weights.items() if w is not None})


def check_products():
    q = quantize(W["down"])
    assert q.format == NAME and q.shape == W["down"].shape
    close(jaxmoe.dequantize(q), W["down"])
    sizes = jnp.array([5, 0, 4, 2], jnp.int32)
    rows = draw(5, T, INTER)
    close(
        jaxmoe.grouped_gemm(rows, q, sizes),
        jaxmoe.grouped_gemm(rows, jaxmoe.dequantize(q), sizes),
    )


def check_layers():
    one, two = experts(), jaxmoe.Experts(**{n: quantize(w) for n, w in W.items()})
    want = layer(X, ROUTING, plain(one))
    for e in (one, two):
        close(layer(X, ROUTING, e), want)
    rows = jax.jit(jaxmoe.expert_rows)
    close(rows(X, ROUTING, one), rows(X, ROUTING, plain(one)))
    forward = jaxmoe.Experts(gate_up=joined(W), down=W["down"], forward_format=NAME)
    same(layer(X, ROUTING, forward), layer(X, ROUTING, one))
    grads = jax.jit(jax.grad(lambda e: layer(X, ROUTING, e).astype(jnp.float32).sum()))(forward)
    assert jnp.abs(grads.down).max() > 0


def check_transformations():
    e = experts()
    batch = draw(6, 3, T, H)
    mapped = jax.jit(jax.vmap(lambda x: layer(x, ROUTING, e)))
    same(mapped(batch), np.stack([layer(x, ROUTING, e) for x in batch]))
    assert "bf16" in mapped.lower(batch).as_text()
    try:
        jax.grad(lambda x: jaxmoe.moe_mlp(x, ROUTING, e).astype(jnp.float32).sum())(X)
    except NotImplementedError as error:
        assert "derivative" in str(error)
    else:
        raise AssertionError("a refused derivative was taken")


def check_meshes():
    e = experts()
    want = layer(X, ROUTING, e)
    whole = jax.tree.map(np.asarray, e)
    specs = jaxmoe.Experts(gate_up=_specs(e.gate_up, P("a")), down=_specs(e.down, P("a")))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
        place = lambda s: NamedSharding(mesh, s)  # noqa: B023, E731
        split = jax.device_put(
            whole, jax.tree.map(place, specs, is_leaf=lambda s: isinstance(s, P))
        )
        with jax.set_mesh(mesh):
            close(jax.jit(jaxmoe.moe_mlp)(X, ROUTING, split), want)
            if kind == AxisType.Auto:
                of_mesh = {"mesh": mesh, "axis_name": "a"}
                spread = functools.partial(jaxmoe.expert_parallel.sharded_moe_mlp, **of_mesh)
                close(jax.jit(spread)(X, ROUTING, split), want)


def _specs(q, spec):
    return jaxmoe.QuantizedArray(spec, spec, q.format, q.layout, q.dtype)


def check_cuda():
    assert QUANTIZED[NAME].code < 0
    for fn, args in (
        (jaxmoe.moe_mlp, (X, ROUTING, experts())),
        (jaxmoe.grouped_gemm, (X[:, :INTER], quantize(W["down"]), jnp.ones(E, jnp.int32))),
    ):
        (*_, op) = jaxmoe.explain(fn, *args).ops
        assert op.cuda_reason is not None and NAME in op.cuda_reason, op
        try:
            with _targets.force_cuda_lowering():
                jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
        except NotImplementedError as error:
            assert f"{NAME} has no CUDA kernel" in str(error)
        else:
            raise AssertionError("CUDA took a format that has no kernel")


for check in (check_products, check_layers, check_transformations, check_meshes, check_cuda):
    check()
print("done", NAME, jaxmoe.__file__)
