"""moe_mlp(do_finalize=False): the rows, their map, and finalize making the fused result of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import ExpertRows, Routing, explain, finalize, reference
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import (
    SMALL,
    Layer,
    assert_close,
    assert_equal,
    layer_inputs,
    normal,
)
from tests.arguments import zeros
from tests.layers import moe_mlp
from tests.lowered import calls, cuda_text, layer_call
from tests.test_mlp import options, run

TARGET = "jaxmoe_moe_mlp_v1"
INTEGERS = ("expert_ids", "expert_map")


def unfused(inputs, **kwargs):
    return run(inputs, do_finalize=False, **kwargs)


alone = jax.jit(unfused)


def in_two_steps(inputs, **kwargs):
    out = unfused(inputs, **kwargs)
    return finalize(out.rows, out, out.weights)


def check_rows(out, inputs, window=None, **kwargs):
    """Each row against the reference of its slot alone, the map against `plan`, zeros elsewhere."""
    ids, dtype = inputs["expert_ids"], inputs["x"].dtype
    top_k = ids.shape[1]
    window = window or {"num_experts": inputs["w_down"].shape[0]}
    local = {"num_local_experts": inputs["w_down"].shape[0]}
    assert_equal(out.slot_to_row, jaxmoe.plan(ids, **window, **local).slot_to_row)
    assert out.rows.shape == (ids.size, inputs["x"].shape[1])
    assert out.rows.dtype == dtype
    slots = np.asarray(out.slot_to_row).reshape(-1)
    unnamed = np.setdiff1d(np.arange(ids.size), slots)
    assert_equal(out.rows[unnamed], jnp.zeros((len(unnamed), out.rows.shape[1]), dtype))
    tokens = np.asarray(inputs["x"]).repeat(top_k, axis=0)
    single = dict(inputs, x=tokens, expert_ids=np.asarray(ids).reshape(-1, 1))
    single["weights"] = np.ones((ids.size, 1), np.float32)
    host = jax.device_put(single, jax.devices("cpu")[0])
    given = window | kwargs
    want, naive = jax.jit(
        lambda i: [reference.moe_mlp(**i, **given, dtype=d) for d in (jnp.float32, dtype)]
    )(host)
    named = slots >= 0
    assert_close(out.rows[slots[named]], np.asarray(want)[named], np.asarray(naive)[named])


@pytest.mark.parametrize(
    "name, routing, dtype, layout, num_tokens",
    (
        ("odd", "with_invalid", "float16", "nk", 9),
        ("clamped", "with_invalid", "bfloat16", "nk", 64),
        ("k22", "with_invalid", "bfloat16", "kn", 12),
        ("odd", "uniform", "bfloat16", "kn", 0),
    ),
)
def test_rows_and_finalize(name, routing, dtype, layout, num_tokens):
    layer = SMALL[name]
    rng = np.random.default_rng(num_tokens)
    inputs = layer_inputs(layer, num_tokens, routing, rng, jnp.dtype(dtype), layout)
    kwargs = options(layer, layout)
    residual = normal(rng, inputs["x"].shape, dtype)

    @jax.jit
    def every(inputs, residual):
        outs = (fn(inputs, **kwargs) for fn in (unfused, run, in_two_steps))
        return *outs, run(inputs, residual=residual, **kwargs)

    out, fused, together, with_residual = every(inputs, residual)
    assert isinstance(out, ExpertRows)
    check_rows(out, inputs, **kwargs)
    assert_equal(out.weights, inputs["weights"])
    assert_equal(together, fused)
    in_steps = jax.jit(finalize)
    assert_equal(in_steps(out.rows, out, out.weights), fused)
    assert_equal(in_steps(out.rows, out, out.weights, residual=residual), with_residual)


def test_window_of_experts():
    """Slots of other devices' experts have no row; the rows in use come first."""
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, 21, "with_invalid", np.random.default_rng(1), jnp.bfloat16)
    local = {n: a[1:3] if n.startswith(("w_", "b_")) else a for n, a in inputs.items()}
    window = {"num_experts": layer.num_experts, "expert_offset": 1}
    out = unfused(local, **window, **options(layer))
    check_rows(out, local, window, **options(layer))
    ids = np.asarray(inputs["expert_ids"])
    here = (ids == 1) | (ids == 2)
    np.testing.assert_array_equal(np.asarray(out.slot_to_row) >= 0, here)
    assert not out.rows[here.sum() :].any()
    expert_map = jnp.array([9, 0, 1, -1, -1], jnp.int32)
    mapped = unfused(dict(local, expert_map=expert_map), **options(layer))
    jax.tree.map(assert_equal, mapped, out)


def test_garbage_weights_are_returned_and_harmless():
    layer = SMALL["odd"]
    inputs = layer_inputs(layer, 8, "uniform", np.random.default_rng(2), jnp.bfloat16)
    inputs["expert_ids"] = inputs["expert_ids"].at[3].set(-1)
    inputs["weights"] = inputs["weights"].at[3].set(jnp.nan)
    out = unfused(inputs, **options(layer))
    assert jnp.isnan(out.weights[3]).all()
    y = finalize(out.rows, out, out.weights)
    assert_equal(y[3], jnp.zeros_like(y[3]))


def test_weight_on_input_leaves_ones():
    layer = Layer("", "", 16, 8, 5, 1)
    inputs = layer_inputs(layer, 9, "with_invalid", np.random.default_rng(3), jnp.bfloat16)
    inputs["weights"] = 0.5 * inputs["weights"]
    out = unfused(inputs, apply_weight_on_input=True)
    assert_equal(out.weights, jnp.ones((9, 1), jnp.float32))
    fused = run(inputs, apply_weight_on_input=True)
    assert_equal(finalize(out.rows, out, out.weights), fused)


def trees(layer, count, num_tokens=10, dtype=jnp.float32):
    rngs = [np.random.default_rng([4, v]) for v in range(count)]
    return [layer_inputs(layer, num_tokens, "with_invalid", rng, dtype) for rng in rngs]


# Which arguments have an example axis.
BATCHES = {
    "tokens": ("x", "expert_ids", "weights"),
    "gate_up": ("w_gate_up", "b_gate_up"),
    "all": ("x", "expert_ids", "weights", "w_gate_up", "b_gate_up", "w_down", "b_down"),
    "bias": ("b_down",),  # a loop: a fold would copy w_down
}


def batch(names, layer=SMALL["odd"]):
    examples = trees(layer, 3)
    axes = {n: 0 if n in names else None for n in examples[0]}
    stacked = {
        n: np.stack([e[n] for e in examples]) if n in names else np.asarray(examples[0][n])
        for n in axes
    }
    singles = [
        {n: a if axes[n] is None else a[v] for n, a in stacked.items()}
        for v in range(len(examples))
    ]
    return stacked, axes, singles


@pytest.mark.parametrize("name", BATCHES)
def test_vmap(name):
    stacked, axes, singles = batch(BATCHES[name])
    fns = (unfused, run, in_two_steps)
    mapped, fused, together = jax.jit(lambda s: [jax.vmap(f, (axes,))(s) for f in fns])(stacked)
    for v, single in enumerate(singles):
        want = alone(single)
        got = jax.tree.map(lambda a, v=v: a[v], mapped)
        assert_equal(got.slot_to_row, want.slot_to_row)
        np.testing.assert_allclose(got.rows, want.rows, rtol=2e-4, atol=2e-5)
        assert_equal(got.rows == 0, want.rows == 0)
        assert_equal(got.weights, want.weights)
    assert_equal(together, fused)
    in_steps = jax.jit(jax.vmap(lambda out: finalize(out.rows, out, out.weights)))
    assert_equal(in_steps(mapped), fused)


def test_nested_vmap():
    stacked, axes, singles = batch(BATCHES["tokens"])
    twice = {n: a if axes[n] is None else jnp.stack([a, a[::-1]]) for n, a in stacked.items()}
    mapped = jax.jit(jax.vmap(jax.vmap(unfused, (axes,)), (axes,)))(twice)
    for v, single in enumerate(singles):
        want = alone(single)
        assert_equal(mapped.slot_to_row[0, v], want.slot_to_row)
        assert_equal(mapped.slot_to_row[1, 2 - v], want.slot_to_row)
        np.testing.assert_allclose(mapped.rows[1, 2 - v], want.rows, rtol=2e-4, atol=2e-5)


def gradients(fns, inputs, seed):
    """Of several functions, in one program."""
    ids = inputs["expert_ids"]

    def loss(arrays, fn):
        return jnp.sum(jnp.sin(fn({**arrays, "expert_ids": ids})) * seed)

    arrays = {n: a for n, a in inputs.items() if n not in INTEGERS}
    return jax.jit(lambda a: [jax.grad(loss)(a, fn) for fn in fns])(arrays)


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def test_gradient_is_that_of_the_fused_layer():
    layer = SMALL["clamped"]
    (inputs,) = trees(layer, 1)
    seed = normal(np.random.default_rng(5), inputs["x"].shape)
    fns = [functools.partial(f, **options(layer)) for f in (in_two_steps, run)]
    grads = gradients(fns, inputs, seed)
    close(*grads)
    assert grads[0]["w_gate_up"].any() and grads[0]["weights"].any()


@pytest.mark.parametrize("name", ("tokens", "bias"))
def test_gradient_of_vmap(name):
    stacked, axes, _ = batch(BATCHES[name])
    seed = normal(np.random.default_rng(6), (3, *stacked["x"].shape[-2:]))
    close(*gradients([jax.vmap(f, (axes,)) for f in (in_two_steps, run)], stacked, seed))


def test_forward_mode():
    (inputs,) = trees(SMALL["odd"], 1)
    fn = lambda x, w: in_two_steps(dict(inputs, x=x, w_down=w))  # noqa: E731
    fused = lambda x, w: run(dict(inputs, x=x, w_down=w))  # noqa: E731
    point = inputs["x"], inputs["w_down"]
    close(*jax.jit(lambda *a: [jax.jvp(f, a, a) for f in (fn, fused)])(*point))
    out, tangent = jax.jvp(lambda x: unfused(dict(inputs, x=x)), point[:1], point[:1])
    assert tangent.rows.dtype == jnp.float32 and tangent.rows.any()
    assert tangent.slot_to_row.dtype == jax.dtypes.float0
    assert not tangent.rows[np.asarray(out.rows == 0).all(axis=1)].any()


def test_scan_over_layers():
    layer = Layer("", "", 16, 16, 4, 2)
    inputs = trees(layer, 3)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *inputs)

    def network(step):
        body = lambda y, i: (step(dict(i, x=y)), None)  # noqa: E731
        return jax.jit(lambda x: jax.lax.scan(body, x, stacked)[0])(inputs[0]["x"])

    assert_equal(network(in_two_steps), network(run))


DEVICES = Layer("", "experts divide over 4 devices", 16, 8, 8, 3, bias=True)


def value_and_gradients(fn, inputs):
    ids, seed = inputs["expert_ids"], normal(np.random.default_rng(7), inputs["x"].shape)

    def loss(arrays):
        y = fn({**arrays, "expert_ids": ids})
        return jnp.sum(jnp.sin(y) * seed), y

    arrays = {n: a for n, a in inputs.items() if n not in INTEGERS}
    return jax.jit(jax.grad(loss, has_aux=True))(arrays)


@functools.cache
def whole_layer():
    """On one device."""
    return value_and_gradients(run, *trees(DEVICES, 1, num_tokens=12))


@pytest.mark.parametrize(("check_vma", "mapped"), ((True, False), (True, True), (False, False)))
def test_shard_map(check_vma, mapped):
    """Each device's experts for all tokens: rows here, finalize here, a sum over devices."""
    (inputs,) = trees(DEVICES, 1, num_tokens=12)

    def local(inputs, fn=in_two_steps):
        first = jax.lax.axis_index("expert") * 2
        expert_map = jnp.arange(8, dtype=jnp.int32) - first
        one = lambda x: fn(dict(inputs, x=x, expert_map=expert_map))  # noqa: E731
        return jax.lax.psum(
            jax.vmap(one)(inputs["x"][None])[0] if mapped else one(inputs["x"]), "expert"
        )

    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    specs = {n: P("expert") if n.startswith(("w_", "b_")) else P() for n in inputs}
    split = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma)
    close(value_and_gradients(split, inputs), whole_layer())


X = zeros((5, 8), jnp.bfloat16)
LAYER = (
    X,
    Routing(zeros((5, 2), jnp.int32), zeros((5, 2))),
    zeros((3, 8, 16), jnp.bfloat16),
    zeros((3, 8, 8), jnp.bfloat16),
)


def test_finalize_checks_expert_rows():
    out = moe_mlp(*LAYER, do_finalize=False)
    wrong = ExpertRows(out.rows, out.weights, out.slot_to_row.astype(jnp.int16))
    with pytest.raises(TypeError, match=r"plan\.slot_to_row\.dtype=i16 must be i32"):
        finalize(out.rows, wrong, out.weights)
    flat = ExpertRows(out.rows, out.weights, out.slot_to_row.reshape(-1))
    with pytest.raises(ValueError, match=r"plan\.slot_to_row must have 2 axes \[T,K\], not 1"):
        finalize(out.rows, flat, out.weights)


def test_cuda_is_one_call():
    def call(**options):
        return layer_call(*calls(cuda_text(lambda *a: moe_mlp(*a, **options), *LAYER)))

    attrs, operands, results = call(do_finalize=False)
    assert operands == {
        "x": "5x8xbf16",
        "expert_ids": "5x2xi32",
        "w_gate_up": "3x8x16xbf16",
        "w_down": "3x8x8xbf16",
    }
    index = results.pop("index")
    assert results == {"rows": "10x8xbf16", "slot_to_row": "5x2xi32", "act": "10x8xbf16"}
    fused_attrs, _, fused_results = call()
    assert attrs == fused_attrs | {"finalize": "0:i64"} and index == fused_results["index"]


def test_vmap_shares_weights_on_cuda():
    stacked, axes, _ = batch(BATCHES["tokens"], Layer("", "", 8, 8, 4, 2))
    stacked = {
        n: a if n in (*INTEGERS, "weights") else a.astype("bfloat16") for n, a in stacked.items()
    }
    text = cuda_text(jax.vmap(unfused, (axes,)), stacked)
    assert [text.count(f"@{t}(") for t in (TARGET, "jaxmoe_permute_v2")] == [1, 1]
    (call,) = (call for call in calls(text) if call[0] == TARGET)
    _, operands, _ = layer_call(call)
    shared = [operands[n] for n in ("x", "expert_ids", "w_gate_up")]
    assert shared == ["30x8xbf16", "30x2xi32", "4x8x16xbf16"]


def test_explain():
    with _targets.force_cuda_lowering():
        (op,) = explain(lambda *a: moe_mlp(*a, do_finalize=False), *LAYER).ops
    assert op.op == "jaxmoe_moe_mlp"
    assert op.cuda_target == TARGET
    assert op.operands == ("bf16[5,8]", "i32[5,2]", "bf16[3,8,16]", "bf16[3,8,8]")
    assert [s.dtype for s in op.cuda_scratch] == ["bf16", "i32"]
    assert op.cuda_scratch[0].shape == (10, 8)
    assert {"gemm1", "gemm2", "activation"} <= op.cuda_attrs.keys()
    narrow = (X[:, :4], LAYER[1], LAYER[2][:, :4], LAYER[3][..., :4])
    (op,) = explain(lambda *a: moe_mlp(*a, do_finalize=False), *narrow).ops
    assert "expert_rows: x.shape[1]=4 must be a positive multiple of 8" in op.cuda_reason
