"""jax.export: programs saved for CPU and CUDA, with and without the allow-list."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Routing, reference
from jaxmoe._export import export_checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import SMALL, layer_inputs
from tests.layers import moe_mlp

LAYER = SMALL["all"]


def arguments(num_tokens=6):
    rng = np.random.default_rng(0)
    return layer_inputs(LAYER, num_tokens, "uniform", rng, jnp.float32)


def layer(a):
    return moe_mlp(a["x"], Routing(a["expert_ids"], a["weights"]), a["w_gate_up"], a["w_down"])


def close(got, want):
    # f32 sums in another order, values of order 1.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def test_cpu_program_survives_serialization():
    exported = jax.export.export(jax.jit(layer), platforms=["cpu"])(arguments())
    again = jax.export.deserialize(exported.serialize())
    close(again.call(arguments()), reference.moe_mlp(**arguments()))


def bf16_arguments():
    return {
        n: a.astype(jnp.bfloat16) if n in ("x", "w_gate_up", "w_down") else a
        for n, a in arguments().items()
    }


def test_cuda_calls_are_refused_without_the_list():
    with _targets.force_cuda_lowering(), pytest.raises(ValueError, match="jaxmoe_moe_mlp_v1"):
        jax.export.export(jax.jit(layer), platforms=["cuda"])(bf16_arguments())


def test_one_program_for_cpu_and_cuda():
    """On CUDA one FFI call, on CPU the pure implementation, chosen where it is loaded."""
    args = bf16_arguments()
    with _targets.force_cuda_lowering():
        exported = jax.export.export(
            jax.jit(layer), platforms=["cpu", "cuda"], disabled_checks=export_checks()
        )(args)
    assert exported.mlir_module().count("@jaxmoe_moe_mlp_v1(") == 1
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "cuda")
    got = again.call(args)
    np.testing.assert_array_equal(got, jax.jit(layer)(args))


def test_gradients_are_exported_with_the_program():
    args = arguments()
    ids = args.pop("expert_ids")
    loss = jax.jit(lambda a: jnp.sum(layer({**a, "expert_ids": ids}) ** 2))
    exported = jax.export.export(loss, platforms=["cpu"])(args)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    close(jax.grad(again.call)(args), jax.grad(loss)(args))


def test_the_list_names_every_target():
    targets = {op.cuda.target for op in _primitive.OPS.values() if op.cuda and op.cuda.target}
    assert len(export_checks()) == len(targets) >= 6
    assert set(map(str, export_checks())) == {
        str(jax.export.DisabledSafetyCheck.custom_call(t)) for t in targets
    }
