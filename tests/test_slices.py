"""When a token by itself runs by slices, and what its call has for them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import Experts, GemmConfig, Routing, expert_rows, moe_mlp
from jaxmoe._gemm import slices
from jaxmoe._jax import targets as _targets
from jaxmoe._mlp import tuned
from jaxmoe._mlp.configs import rule_configs
from tests.lowered import calls, cuda_text, layer_call

H, INTER, E, K = 512, 512, 12, 8
TILE = GemmConfig(128, 16)


@pytest.mark.parametrize(
    ("choices", "share", "hidden", "intermediate", "chosen"),
    [
        (8, 1.0, 2048, 768, True),  # qwen3-30b-a3b: 96 units
        (6, 1.0, 2048, 1408, True),  # deepseek-v2-lite: 132, one for each SM
        (8, 1.0, 7168, 2048, True),  # deepseek-v3: 256, two rounds of 132
        (8, 0.5, 7168, 2048, True),  # half of its experts
        (8, 0.5, 2048, 768, False),  # half of qwen3's: 48 would leave most SMs idle
        (8, 0.25, 7168, 2048, True),
        (8, 0.125, 7168, 2048, False),
        (4, 1.0, 2880, 2880, False),  # gpt-oss-120b: 180 are 1.4 rounds
        (2, 1.0, 4096, 14336, False),  # mixtral-8x7b: 448, more than two rounds
        (1, 1.0, 512, 4096, True),
        (32, 1.0, 512, 128, True),
        (33, 1.0, 512, 128, False),  # more choices than a warp has lanes
        (8, 1.0, 448, 768, False),
        (8, 1.0, 32768, 768, True),
        (8, 1.0, 32832, 768, False),
        (8, 1.0, 2048, 800, False),  # no whole slices
        (0, 1.0, 2048, 768, False),
    ],
)
def test_where_slices_pay(choices, share, hidden, intermediate, chosen):
    assert slices.pays(choices, share, hidden, intermediate) == chosen


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def experts_of(format="int4_g128", **rest):
    packed = lambda *shape: jax.eval_shape(  # noqa: E731
        lambda w: jaxmoe.quantize(w, format, weight_layout="nk"), struct(*shape)
    )
    width = INTER if rest.get("activation") == "relu2" else 2 * INTER
    return Experts(gate_up=packed(E, width, H), down=packed(E, H, INTER), layout="nk", **rest)


def floats_of(fn=moe_mlp, experts=None, tokens=1, **kwargs):
    """The floats that the layer's call has."""
    routing = Routing(struct(tokens, K, dtype=jnp.int32), struct(tokens, K, dtype=jnp.float32))
    experts = experts or experts_of()
    text = cuda_text(lambda *a: fn(*a, **kwargs), struct(tokens, H), routing, experts)
    (call,) = (c for c in calls(text) if c[0] == "jaxmoe_moe_mlp_v1")
    return layer_call(call)[2].get("floats")


@pytest.mark.parametrize("format", ("mxfp4", "nvfp4", "int4_g128", "int4_g32_zp", "mxfp8"))
def test_one_token_has_room_for_its_sums(format):
    assert floats_of(experts=experts_of(format)) == f"{8 * K * H}xf32"


def test_layers_that_do_not_run_by_slices():
    assert floats_of(tokens=2) is None
    assert floats_of(batch_invariant=True) is None
    assert floats_of(config=(TILE, TILE)) is None
    assert floats_of(fn=expert_rows) is None
    assert floats_of(num_experts=2 * E) is None  # half of the choices are expected elsewhere
    assert floats_of(experts=experts_of(activation="relu2")) is None


@dataclasses.dataclass(frozen=True)
class Measured:
    """A table of tiles that has the same for every layer, or the rule's."""

    pair: Any

    def find(self, problem, a, layer):
        del problem
        return self.pair or rule_configs(a, layer)


def test_tiles_that_are_faster_than_the_rules_are_two_kernels():
    with tuned.within(Measured(None)):
        assert floats_of() is not None
    with tuned.within(Measured((TILE, TILE))):
        assert floats_of() is None
    with jaxmoe.AutotuningResult("", ()):
        assert floats_of() is not None


def test_a_function_as_activation_is_stages():
    routing = Routing(struct(1, K, dtype=jnp.int32), struct(1, K, dtype=jnp.float32))
    experts = experts_of(activation=lambda gate, up: jnp.tanh(gate) * up)
    text = cuda_text(moe_mlp, struct(1, H), routing, experts)
    assert all(c[0] != "jaxmoe_moe_mlp_v1" for c in calls(text))


def test_any_number_of_tokens_has_none():
    (tokens,) = jax.export.symbolic_shape("t")
    routing = Routing(struct(tokens, K, dtype=jnp.int32), struct(tokens, K, dtype=jnp.float32))
    with _targets.force_cuda_lowering():
        check = jax.export.DisabledSafetyCheck.custom_call("jaxmoe_moe_mlp_v1")
        export = jax.export.export(jax.jit(moe_mlp), platforms=("cuda",), disabled_checks=[check])
        exported = export(struct(tokens, H), routing, experts_of())
    assert "@jaxmoe_moe_mlp_v1" in exported.mlir_module()
    # the last results of the call: floats and index
    assert "tensor<0xf32>, tensor<?xi32>)" in exported.mlir_module()
