"""Quantized arrays under JAX's transformations: jit, vmap, scan, derivatives, meshes, pickle."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe._testing import FP8

F32 = jnp.float32


def example(shape, seed=0, dtype=jnp.bfloat16):
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(drawn.astype(jnp.dtype(dtype)))


def assert_same(a, b) -> None:
    """Equal structure (formats, layouts, dtypes) and equal bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def weights(format, **options):
    return functools.partial(jaxmoe.quantize, format=format, weight_layout="kn", **options)


@pytest.mark.parametrize(
    ("format", "scale_format"),
    [*((format, "float32") for format in FP8), ("fp8_block", "e8m0")],
)
def test_jit_gives_the_bits_of_eager(format, scale_format) -> None:
    w, x = example((2, 130, 257), dtype=F32), example((33, 130), 1)
    assert_same(
        jax.jit(weights(format, scale_format=scale_format))(w),
        weights(format, scale_format=scale_format)(w),
    )
    tokens = functools.partial(jaxmoe.quantize_tokens, format=format, scale_format=scale_format)
    q = tokens(x)
    assert_same(jax.jit(tokens)(x), q)
    static = jax.jit(lambda x, s: jaxmoe.quantize_tokens(x, format, scale=s))
    assert_same(static(x, q.scales), jaxmoe.quantize_tokens(x, format, scale=q.scales))
    assert_same(jax.jit(jaxmoe.dequantize)(q), jaxmoe.dequantize(q))


@pytest.mark.parametrize("format", FP8)
def test_vmap_gives_the_bits_of_a_loop(format) -> None:
    w = example((3, 2, 130, 40))
    batch = jax.jit(jax.vmap(weights(format)))(w)
    assert batch.shape == w.shape and batch.ndim == 4 and batch.dtype == w.dtype
    one_by_one = [weights(format)(each) for each in w]
    assert_same(batch, jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one))
    back = jax.jit(jax.vmap(jaxmoe.dequantize))(batch)
    assert_same(back, jnp.stack([jaxmoe.dequantize(q) for q in one_by_one]))


def test_scan_over_layers() -> None:
    """Stacked weights are scanned layer by layer, and come out of a scan stacked."""
    w = example((3, 2, 16, 8), dtype=F32)
    _, layers = jax.lax.scan(lambda c, w: (c, weights("fp8_block")(w)), 0, w)
    assert_same(layers, jax.vmap(weights("fp8_block"))(w))

    def layer(x, q):
        assert q.shape == (2, 16, 8) and q.layout == "kn"
        return x, x @ jaxmoe.dequantize(q).sum((0, 2))

    x = jnp.ones(16)
    _, y = jax.lax.scan(layer, x, layers)
    expected = jax.vmap(jaxmoe.dequantize)(layers).sum((1, 2, 3))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("format", FP8)
def test_eval_shape(format) -> None:
    w = jax.ShapeDtypeStruct((2, 130, 257), jnp.float16)
    q = jax.eval_shape(weights(format), w)
    real = jax.jit(weights(format))(example(w.shape, dtype=w.dtype))
    assert jax.tree.structure(q) == jax.tree.structure(real)
    assert (q.shape, q.ndim, q.dtype) == ((2, 130, 257), 3, jnp.float16)
    assert q.values.shape == (2, 257, 130) and q.values.dtype == jnp.float8_e4m3fn
    assert q.scales.shape == real.scales.shape and q.scales.dtype == F32
    assert jax.eval_shape(jaxmoe.dequantize, q) == jax.ShapeDtypeStruct(w.shape, w.dtype)


def test_tree_operations() -> None:
    q = weights("fp8_channel")(example((2, 3, 4)))
    leaves, structure = jax.tree.flatten(q)
    assert leaves == [q.values, q.scales] or len(leaves) == 2
    assert_same(jax.tree.unflatten(structure, leaves), q)
    doubled = jax.tree.map(lambda a: a, dataclasses.replace(q, scales=2 * q.scales))
    assert_same(jaxmoe.dequantize(doubled), 2 * jaxmoe.dequantize(q))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".values", ".scales"]
    empty = jax.tree.map(lambda _: None, q)  # leaves need not be arrays
    assert empty.format == "fp8_channel" and empty.dtype == jnp.bfloat16


def test_pickle_and_checkpoints() -> None:
    q = weights("fp8_block")(example((2, 3, 4), dtype=jnp.float16))
    assert_same(pickle.loads(pickle.dumps(q)), q)
    # as checkpoint libraries do: leaves to disk by path, back into an abstract tree
    saved = {jax.tree_util.keystr(p): np.asarray(a) for p, a in jax.tree.leaves_with_path(q)}
    abstract = jax.eval_shape(lambda q: q, q)
    restored = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(saved[jax.tree_util.keystr(path)], leaf.dtype), abstract
    )
    assert_same(restored, q)


def test_a_donated_and_returned_array_keeps_its_format() -> None:
    q = weights("fp8_tensor")(example((2, 3, 4)))
    out = jax.jit(lambda q: dataclasses.replace(q, scales=q.scales * 2))(q)
    assert (out.format, out.layout, out.dtype) == (q.format, q.layout, q.dtype)
    traces = []
    count = jax.jit(lambda q: traces.append(q.format))
    for same in (q, out, weights("fp8_channel")(example((2, 3, 4)))):
        count(same)
    assert traces == ["fp8_tensor", "fp8_channel"]  # a format is part of the compiled program


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("format", FP8)
def test_experts_over_devices(format, axis_type) -> None:
    """Split experts stay split, through quantize and back, without communication."""
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, P("expert"))
    w = example((8, 130, 20))
    expected = weights(format)(w)
    split = jax.device_put(w, sharding)
    quantize, back = jax.jit(weights(format)), jax.jit(jaxmoe.dequantize)
    with jax.set_mesh(mesh):
        q = quantize(split)
        out = back(q)
        assert "all-" not in quantize.lower(split).compile().as_text()
    for leaf in (q.values, q.scales, out):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert_same(q, expected)
    assert_same(out, jaxmoe.dequantize(expected))
    assert_same(jax.device_put(expected, sharding), q)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("spec", "stored"),
    [(P(None, "x"), P(None, None, "x")), (P(None, None, "x"), P(None, "x"))],
    ids=["K", "N"],
)
def test_blocks_over_devices(spec, stored, axis_type) -> None:
    """Either axis of the blocks may be split where they are."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    w = example((1, 512, 256))
    expected = weights("fp8_block")(w)
    with jax.set_mesh(mesh):
        q = jax.jit(weights("fp8_block"))(jax.device_put(w, NamedSharding(mesh, spec)))
        out = jax.jit(jaxmoe.dequantize)(q)
    for array, split in ((q.values, stored), (q.scales, stored), (out, spec)):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, split), 3)
    assert_same(q, expected)
    assert_same(out, jaxmoe.dequantize(expected))


def test_shard_map() -> None:
    mesh = jax.make_mesh((8,), ("expert",))
    w = example((8, 130, 20))
    sharded = jax.shard_map(
        weights("fp8_block"), mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    split = jax.device_put(w, NamedSharding(mesh, P("expert")))
    assert_same(jax.jit(sharded)(split), weights("fp8_block")(w))


@pytest.mark.parametrize("format", FP8)
def test_dequantize_is_linear_in_the_scales(format) -> None:
    w = example((2, 5, 130), dtype=F32)
    q = weights(format)(w)

    def out(scales):
        return jaxmoe.dequantize(dataclasses.replace(q, scales=scales))

    tangent = example(q.scales.shape, 1, F32)
    _, moved = jax.jvp(out, (q.scales,), (tangent,))
    assert_same(moved, out(tangent))
    cotangent = example(w.shape, 2, F32)
    (gradient,) = jax.vjp(out, q.scales)[1](cotangent)
    assert gradient.shape == q.scales.shape
    np.testing.assert_allclose((gradient * tangent).sum(), (moved * cotangent).sum(), rtol=1e-4)


@pytest.mark.parametrize("jit", [False, True])
def test_quantize_has_no_derivative(jit) -> None:
    def loss(x, scale=None):
        return jaxmoe.dequantize(jaxmoe.quantize_tokens(x, "fp8_tensor", scale=scale)).sum()

    x = example((2, 3), dtype=F32)
    message = (
        r"jaxmoe\.quantize_tokens: no derivative is defined; quantize jax\.lax\.stop_gradient of "
        r"the array, and add a straight-through estimator where one is wanted\. "
        r"Got input: f32\[2,3\]\."
    )
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(jax.jit(loss) if jit else loss)(x)
    with pytest.raises(NotImplementedError, match=r"Got input: f32\[\]\."):
        jax.grad(loss, argnums=1)(x, jnp.float32(1))


@pytest.mark.parametrize("jit", [False, True])
def test_straight_through(jit) -> None:
    """What the message advises works: values are quantized, the gradient passes."""

    def rounded(x):
        q = jaxmoe.quantize_tokens(jax.lax.stop_gradient(x), "fp8_channel")
        return x + jax.lax.stop_gradient(jaxmoe.dequantize(q) - x)

    x = example((2, 3), dtype=F32)
    value, gradient = jax.value_and_grad(lambda x: (jax.jit(rounded) if jit else rounded)(x).sum())(
        x
    )
    expected = jaxmoe.dequantize(jaxmoe.quantize_tokens(x, "fp8_channel")).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert (gradient == 1).all()
