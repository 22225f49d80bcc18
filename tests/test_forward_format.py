"""moe_mlp with FP8 products forward and plain gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe import Experts, explain, quantize
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal
from tests.layers import moe_mlp
from tests.lowered import cuda_text
from tests.sharding_programs import EXPLICIT, check_spec, close, compiled, make_mesh
from tests.test_lowering import layer_structs
from tests.test_mlp import run
from tests.test_training import FEW, draw

FORMAT = "fp8_block"


def fp8_layer(inputs, layout):
    names = ("w_gate_up", "w_down")
    return run(
        inputs | {n: quantize(inputs[n], FORMAT, weight_layout=layout) for n in names},
        weight_layout=layout,
    )


@pytest.mark.parametrize("recompute", (None, "z"))
def test_value_of_the_fp8_layer_gradients_of_the_plain_one(recompute):
    layout = "nk" if recompute else "kn"
    inputs = draw(FEW, 9, "with_invalid", "bfloat16", layout, residual=True)
    given = {"weight_layout": layout, "recompute": recompute}
    ct = jnp.ones((), jnp.bfloat16)

    def of_loss(fn):  # a loss that is linear in y: its cotangent does not depend on the value
        arrays = {n: a for n, a in inputs.items() if n != "expert_ids"}
        loss = lambda a: jnp.sum(fn(a | {"expert_ids": inputs["expert_ids"]}) * ct)  # noqa: E731
        return jax.grad(loss)(arrays)

    mixed = lambda a: run(a, forward_format=FORMAT, **given)  # noqa: E731
    plain = lambda a: run(a, **given)  # noqa: E731
    y, fp8, got, want = jax.jit(
        lambda: (mixed(inputs), fp8_layer(inputs, layout), of_loss(mixed), of_loss(plain))
    )()
    assert_equal(y, fp8)
    for name, gradient in want.items():
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (got[name], gradient)), rtol=2e-2, atol=1e-3
        )


def test_on_explicit_axes():
    """Tokens over one axis and H of w_down over the other: as on one device."""
    inputs = draw(FEW, 8, "uniform", "float32")
    wave = jnp.sin(jnp.arange(8.0))[:, None]  # a cotangent that does not depend on the value

    def fn(arrays):
        def loss(w_down):
            y = run(arrays | {"w_down": w_down}, forward_format="fp8_tensor")
            return jnp.sum(y * wave), y

        return jax.grad(loss, has_aux=True)(arrays["w_down"])

    specs = dict.fromkeys(inputs, P("a")) | {"w_gate_up": P(), "w_down": P(None, None, "b")}
    (gradient, y), text = compiled(fn, make_mesh(EXPLICIT, "a", "b"), inputs, specs)
    close((gradient, y), jax.jit(fn)(inputs))
    check_spec(y, P("a", "b"))
    check_spec(gradient, specs["w_down"])
    assert "f8e4m3fn" in text


def test_cuda_runs_both_passes_on_the_kernels():
    def loss(x, w1, w2, routing):
        y = moe_mlp(x, routing, w1, w2, forward_format=FORMAT)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    x, routing, w1, w2 = layer_structs()
    text = cuda_text(jax.grad(loss, (0, 1, 2)), x, w1, w2, routing)
    names = re.findall(r"custom_call @(jaxmoe_\w+)", text)
    assert names.count("jaxmoe_moe_mlp_v1") == 1 and names.count("jaxmoe_weight_grad_v1") == 2
    with _targets.force_cuda_lowering():
        report = explain(lambda *a: moe_mlp(*a, forward_format=FORMAT), *layer_structs())
    inside = [op.cuda_target for op in report.ops if op.where.endswith("jaxmoe_moe_mlp")]
    assert inside == ["jaxmoe_quantize_v1"] * 2 + ["jaxmoe_moe_mlp_v1"]


@pytest.mark.parametrize(
    "change, kind, message",
    (
        ({"forward_format": "fp4"}, ValueError, "forward_format='fp4' must be one of fp8_tensor"),
        ({"forward_format": True}, TypeError, "forward_format must be one of fp8_tensor"),
        (
            {"do_finalize": False},
            NotImplementedError,
            "expert_rows is not supported with experts",
        ),
        ({"batch_invariant": True}, NotImplementedError, "batch_invariant=True is not supported"),
        (
            {"forward_format": "int4_g128", "dtype": jnp.float32},
            NotImplementedError,
            "x.dtype=float32 must be bf16 or f16 in int4_g128: scales have it .experts.forward_fo",
        ),
    ),
)
def test_errors(change, kind, message):
    given = {"forward_format": FORMAT, **change}
    structs = layer_structs(dtype=given.pop("dtype", jnp.bfloat16))
    with pytest.raises(kind, match=message):
        jax.eval_shape(lambda *a: moe_mlp(*a, **given), *structs)


def test_quantized_weights_have_their_own_format():
    def layer(x, routing, *weights):
        weights = (quantize(w, FORMAT, weight_layout="kn") for w in weights)
        return moe_mlp(x, routing, *weights, forward_format=FORMAT)

    with pytest.raises(ValueError, match="forward_format must be None with weights that are"):
        jax.eval_shape(layer, *layer_structs())


def test_master_weights_have_no_forward_format():
    wide = jnp.zeros((2, 8, 16)), jnp.zeros((2, 8, 8))
    with pytest.raises(NotImplementedError, match="forward_format is not supported with float32"):
        Experts(gate_up=wide[0], down=wide[1], dtype="bfloat16", forward_format=FORMAT)
