"""moe_mlp's backward pass: gradients of every kind of layer, what it keeps, what CUDA runs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import explain, finalize, plan, reference
from jaxmoe._jax import targets as _targets
from jaxmoe._mlp.by_row import row_weights
from jaxmoe._testing import SMALL, Layer, assert_close, assert_equal, layer_inputs, normal
from jaxmoe.activation import (
    ACTIVATIONS,
    GATE_UP_ORDERS,
    SoftcapSwiglu,
    SwigluStep,
    split_gate_up,
)
from tests.layers import moe_mlp
from tests.lowered import cuda_text
from tests.test_lowering import layer_structs
from tests.test_mlp import options, run
from tests.test_transforms import equations, ops

INTEGERS = ("expert_ids", "expert_map")
FEW = Layer("few", "compiles quickly", 16, 8, 3, 2)
SCALED = dataclasses.replace(FEW, top_k=1)
EVERY = {**ACTIVATIONS, "step": SwigluStep(0.5), "softcap": SoftcapSwiglu(1.0, 0.5)}
CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # f32 in another order, as in test_transforms.py


def in_two_steps(inputs, **kwargs):
    out = run(inputs, do_finalize=False, **kwargs)
    return finalize(out.rows, out, out.weights)


def plain_reference(inputs, **kwargs):
    return reference.moe_mlp(**inputs, **kwargs)


def value_and_gradients(fn, inputs, seed, **kwargs):
    """Of every floating array, for the cotangent cos(y) * seed."""
    integers = {n: a for n, a in inputs.items() if n in INTEGERS}

    def loss(arrays):
        y = fn(arrays | integers, **kwargs)
        wide = y if y.dtype == jnp.float64 else y.astype(jnp.float32)
        return jnp.sum(jnp.sin(wide) * seed.astype(wide.dtype)), y

    arrays = {n: a for n, a in inputs.items() if n not in INTEGERS}
    grads, y = jax.grad(loss, has_aux=True)(arrays)
    return y, grads


def check(inputs, fn=run, given=None, **kwargs):
    """Value and gradients against float64; `given` is for `fn` alone. Returns the gradients."""
    dtype = inputs["x"].dtype
    seed = normal(np.random.default_rng(1), inputs["x"].shape)

    def expected(inputs, dtype):
        return value_and_gradients(plain_reference, inputs, seed, **kwargs, dtype=dtype)

    def both(inputs):
        ours = value_and_gradients(fn, inputs, seed, **kwargs, **(given or {}))
        return ours, expected(inputs, dtype)

    ours, naive = jax.jit(both)(inputs)
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.float64(a)) for n, a in inputs.items() if n not in INTEGERS}
        wide = inputs | wide
        want = jax.jit(lambda i: expected(i, jnp.float64))(wide)
        want = jax.tree.map(np.asarray, want)
    jax.tree.map(assert_close, ours, want, naive)
    assert all(ours[1][n].dtype == inputs[n].dtype for n in ours[1])
    return ours[1]


def draw(layer, num_tokens, routing, dtype=jnp.float32, layout="kn", residual=False):
    rng = np.random.default_rng(num_tokens)
    inputs = layer_inputs(layer, num_tokens, routing, rng, jnp.dtype(dtype), layout)
    if residual:
        inputs["residual"] = normal(rng, inputs["x"].shape, dtype)
    return inputs


def test_gradients():
    """With biases, a residual, experts without rows, clamps, interleaved and transposed weights."""
    layer = SMALL["clamped"]
    inputs = draw(layer, 17, "with_empty", "bfloat16", "nk", residual=True)
    grads = check(inputs, **options(layer, "nk"))
    used = np.isin(np.arange(layer.num_experts), inputs["expert_ids"])
    assert not used.all()
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        moved = np.asarray(grads[name]).reshape(layer.num_experts, -1).any(axis=1)
        assert_equal(moved, used)


@functools.cache
def dense_gradients():
    """Of one expert, in closed form and float64, for each activation and order."""
    rng = np.random.default_rng(3)
    x, w1, w2 = (rng.standard_normal(shape) for shape in ((4, 8), (8, 16), (8, 8)))
    weights = rng.uniform(0.2, 0.8, (4, 1))
    arrays = {"x": x, "weights": weights, "w_gate_up": w1[None] / 3, "w_down": w2[None] / 3}
    layers = [(name, "gate_up") for name in EVERY]
    layers += [("swiglu", order) for order in GATE_UP_ORDERS[1:]]

    def all_of_them(arrays):
        def loss(a, act, order):
            z = a["x"] @ a["w_gate_up"][0, :, : 16 if act.gated else 8]
            h = act(*split_gate_up(z, order)) if act.gated else act(z)
            return jnp.sum(jnp.sin(a["weights"] * (h @ a["w_down"][0])))

        return {of: jax.grad(loss)(arrays, EVERY[of[0]], of[1]) for of in layers}

    with jax.enable_x64(True):
        want = jax.jit(all_of_them)(jax.tree.map(jnp.asarray, arrays))
        return arrays, jax.tree.map(np.asarray, want)


def test_gradients_of_every_activation():
    """One expert; op by op, because then all activations share the compiled products."""
    arrays, every = dense_gradients()
    inputs = {n: jnp.asarray(a, jnp.float32) for n, a in arrays.items()}
    ids = jnp.zeros((4, 1), jnp.int32)
    for (name, order), want in every.items():
        own = 16 if EVERY[name].gated else 8

        def loss(a, name=name, order=order, own=own):
            a = a | {"w_gate_up": a["w_gate_up"][:, :, :own], "expert_ids": ids}
            return jnp.sum(jnp.sin(run(a, activation=EVERY[name], gate_up=order)))

        got = jax.grad(loss)(inputs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, want)


def test_gradients_of_a_window():
    inputs = draw(FEW, 9, "with_invalid")
    local = {n: a[1:] if n.startswith("w_") else a for n, a in inputs.items()}
    grads = check(local, num_experts=3, expert_offset=1)
    here = np.isin(inputs["expert_ids"], (1, 2))
    assert_equal(np.asarray(grads["weights"]) != 0, here)
    assert_equal(np.asarray(grads["x"]).any(axis=1), here.any(axis=1))


def test_gradients_through_the_rows_of_a_map():
    inputs = draw(FEW, 9, "with_invalid", jnp.float16)
    local = {n: a[1:] if n.startswith("w_") else a for n, a in inputs.items()}
    local["expert_map"] = jnp.array([1, 7, 0], jnp.int32)
    grads = check(local, in_two_steps, given={"recompute": "z"})
    assert_equal(np.asarray(grads["weights"]) != 0, np.isin(inputs["expert_ids"], (0, 2)))


def test_recomputing_z_costs_one_product():
    inputs = draw(FEW, 9, "uniform")
    gradients = functools.partial(value_and_gradients, run, seed=jnp.ones(()))
    more = {"jaxmoe_gate_up": 1}
    expected = {n: count + more.get(n, 0) for n, count in ops(gradients, inputs).items()}
    assert ops(functools.partial(gradients, recompute="z"), inputs) == expected


def kept_residuals(capsys, fn, inputs):
    """(shape with dtype, where it comes from) of what reverse mode keeps."""
    ids = inputs["expert_ids"]
    arrays = {n: a for n, a in inputs.items() if n not in INTEGERS}
    jax.ad_checkpoint.print_saved_residuals(lambda a: fn(a | {"expert_ids": ids}), arrays)
    lines = capsys.readouterr().out.splitlines()
    return [re.match(r"(\w+\[[\d,]*\]) (?:from )?(.*)", line).groups() for line in lines]


@pytest.mark.parametrize("recompute", (None, "z"))
def test_what_is_kept_is_z_and_the_plan(recompute, capsys):
    layer = SMALL["odd"]
    given = {"recompute": recompute, **options(layer)}
    inputs = draw(layer, 9, "uniform", jnp.bfloat16, residual=True)
    kept = kept_residuals(capsys, lambda i: run(i, **given), inputs)
    arguments = [shape for shape, source in kept if "argument" in source]
    biases = ["bf16[5,40]", *(["bf16[5,48]"] if recompute else [])]  # of z's product, to repeat it
    assert sorted(arguments) == sorted(
        [*biases, "bf16[5,24,40]", "bf16[5,40,48]", "bf16[9,40]", "f32[9,3]"]
    )
    own = sorted(shape for shape, source in kept if "argument" not in source)
    plan = ["i32[27]", "i32[6]", "i32[9,3]"]
    assert own == (plan if recompute else ["bf16[27,48]", *plan])
    # of the layer alone, without finalize, the same
    del inputs["residual"]
    kept = kept_residuals(capsys, lambda i: run(i, do_finalize=False, **given).rows, inputs)
    own = sorted(s for s, source in kept if "argument" not in source and not s.startswith("f32"))
    assert own == (plan if recompute else ["bf16[27,48]", *plan])


def test_a_weight_on_the_input_is_not_kept_in_float32(capsys):
    inputs = draw(SCALED, 7, "uniform", jnp.bfloat16)
    kept = kept_residuals(capsys, lambda i: run(i, apply_weight_on_input=True), inputs)
    assert "bf16[7,16]" in [shape for shape, _ in kept]
    assert "f32[7,16]" not in [shape for shape, _ in kept]


def test_nan_stays_in_the_gradients_of_its_token():
    inputs = draw(FEW, 12, "uniform")
    inputs["expert_ids"] = inputs["expert_ids"].at[7].set(-1)
    seed = normal(np.random.default_rng(1), inputs["x"].shape)
    fn = jax.jit(lambda i, s: value_and_gradients(run, i, s))
    _, clean = fn(inputs, seed)
    _, dirty = fn(inputs | {"x": inputs["x"].at[5].set(jnp.nan)}, seed)
    others = np.arange(12) != 5
    for name in ("x", "weights"):
        assert np.isnan(dirty[name][5]).all()
        assert_equal(dirty[name][others], clean[name][others])
    elsewhere = np.setdiff1d(np.arange(FEW.num_experts), inputs["expert_ids"][5])
    assert_equal(dirty["w_gate_up"][elsewhere], clean["w_gate_up"][elsewhere])
    # the cotangent of a token without an expert, and the weight of a choice that is none
    nan = {"weights": inputs["weights"].at[7].set(jnp.nan)}
    _, again = fn(inputs | nan, seed.at[7].set(jnp.nan))
    jax.tree.map(assert_equal, again, clean)


def test_second_derivatives_reverse_over_reverse():
    inputs = draw(FEW, 5, "with_invalid")
    ids = inputs.pop("expert_ids")
    directions = {n: normal(np.random.default_rng(4), a.shape) for n, a in inputs.items()}

    def second(fn, arrays, **kwargs):
        def along(arrays):
            _, grads = value_and_gradients(fn, arrays | {"expert_ids": ids}, jnp.ones(()), **kwargs)
            # not linear in the gradients, so that each of their cotangents depends on the others
            parts = (
                jnp.sum(jnp.sin(grads[n]) * directions[n].astype(grads[n].dtype)) for n in grads
            )
            return sum(parts)

        return jax.jit(jax.grad(along))(arrays)

    ours = second(run, inputs)
    with jax.enable_x64(True):
        wide = {n: a.astype("float64") for n, a in inputs.items()}
        want = jax.tree.map(np.asarray, second(plain_reference, wide, dtype=jnp.float64))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), ours, want)


def test_jacobian_of_the_tokens():
    """Forward mode with a batch of tangents, reverse mode with one of cotangents."""
    inputs = draw(FEW, 2, "uniform")
    fn = lambda x: run(inputs | {"x": x})  # noqa: E731
    columns, rows = jax.jit(lambda x: (jax.jacfwd(fn)(x), jax.jacrev(fn)(x)))(inputs["x"])
    np.testing.assert_allclose(columns, rows, **CLOSE)
    assert np.asarray(columns[0, :, 0]).any() and not np.asarray(columns[0, :, 1]).any()


@pytest.mark.parametrize(
    "recompute, error, message",
    (
        ("h", ValueError, "recompute='h' must be one of z"),
        (True, TypeError, "recompute must be one of z"),
    ),
)
def test_recompute_is_checked(recompute, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda *a: moe_mlp(*a, recompute=recompute), *layer_structs())


@pytest.mark.parametrize("layout", ("kn", "nk"))
@pytest.mark.parametrize("recompute", (None, "z"))
def test_cuda_runs_the_backward_pass_on_the_kernels(layout, recompute):
    def loss(x, weights, w1, w2, ids):
        routing = dataclasses.replace(layer_structs()[1], expert_ids=ids, weights=weights)
        y = moe_mlp(x, routing, w1, w2, weight_layout=layout, recompute=recompute)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    x, routing, w1, w2 = layer_structs(layout=layout)
    args = x, routing.weights, w1, w2, routing.expert_ids
    text = cuda_text(jax.grad(loss, (0, 1, 2, 3)), *args)
    names = re.findall(r"custom_call @(\w+)", text)
    again = recompute is not None
    assert {n: names.count(n) for n in set(names) if n.startswith("jaxmoe_")} == {
        "jaxmoe_plan_v1": 1,
        "jaxmoe_permute_v2": 2,  # the cotangent, and x for its weights' gradient
        "jaxmoe_grouped_gemm_v1": 1 + again + 3,  # z; the rows, dh and dx
        "jaxmoe_weight_grad_v1": 2,
        "jaxmoe_finalize_v1": 2,  # y and dx
    }
    assert re.search(r"optimization_barrier .*: tensor<6x32xbf16>, tensor<12x32xbf16>", text)
    assert not re.search(r"stablehlo\.(dot|dot_general|while)\b|ragged_dot", text)


def test_cuda_runs_hessian_vector_products_on_the_kernels():
    def along(x, routing, w1, w2):
        def loss(x, w1, w2):
            return jnp.sum(moe_mlp(x, routing, w1, w2).astype(jnp.float32) ** 2)

        gradient = jax.grad(loss, (0, 1, 2))
        return jax.jvp(gradient, (x, w1, w2), (x, w1, w2))[1]

    text = cuda_text(along, *layer_structs())
    assert "jaxmoe_weight_grad_v1" in text and "dot_general" not in text


def test_groups_that_share_weights_share_their_gradient():
    """Gate-up weights for each example, down weights for all: those are summed in one product."""
    inputs = draw(FEW, 5, "uniform")

    def loss(w1, w2):
        one = lambda w: jnp.sum(jnp.sin(run(inputs | {"w_gate_up": w, "w_down": w2})))  # noqa: E731
        return jnp.sum(jax.vmap(one)(w1))

    stack = jnp.stack([inputs["w_gate_up"]] * 4)
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(stack, inputs["w_down"])
    sums = [e for e in equations(program.jaxpr) if "tgmm" in e.primitive.name]
    assert sorted((e.primitive.name, e.outvars[0].aval.shape) for e in sums) == [
        ("jaxmoe_tgmm", (1, 3, 8, 16)),
        ("jaxmoe_tgmm", (1, 12, 16, 16)),
    ]


def test_explain_names_the_calls_of_forward_mode():
    x, *rest = layer_structs()
    tangent = lambda x, *rest: jax.jvp(lambda x: moe_mlp(x, *rest), (x,), (x,))[1]  # noqa: E731
    with _targets.force_cuda_lowering():
        report = explain(tangent, x, *rest)
    inside = [op for op in report.ops if op.where.endswith("jaxmoe_moe_mlp_tangent")]
    assert [op.cuda_target for op in inside] == [
        "jaxmoe_permute_v2",
        "jaxmoe_grouped_gemm_v1",
        "jaxmoe_grouped_gemm_v1",
        "jaxmoe_finalize_v1",
    ]


def test_rows_that_no_choice_has_weigh_nothing():
    nothing = plan(jnp.full((3, 2), -1, jnp.int32), 4)
    weights = row_weights(nothing, jnp.ones((3, 2)))
    assert_equal(weights, jnp.zeros(6))
