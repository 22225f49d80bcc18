"""Replaying recorded choices: int16 ids give what int32 ids give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Routing, plan, route
from jaxmoe._testing import assert_equal, normal
from tests.layers import moe_mlp


@pytest.mark.parametrize(
    "method, top_k, options",
    (
        ("renormalize", 3, {}),
        ("softmax", 2, {"norm_topk_prob": True}),
        ("deepseek_v3", 3, {"num_groups": 3, "top_groups": 2, "scale": 2.5}),
        ("sigmoid_renorm", 2, {"num_valid_tokens": 5}),
        ("llama4", 1, {"num_shared_experts": 2}),
    ),
)
def test_recorded_ids_give_the_routing_again(method, top_k, options):
    """NaN logits, padding and shared experts included; the gradient too."""
    logits = normal(np.random.default_rng(1), (7, 12)).at[2, 1:].set(jnp.nan)
    if method == "deepseek_v3":
        options = options | {"bias": normal(np.random.default_rng(2), (12,))}
    fresh = jax.jit(lambda x: route(x, top_k=top_k, method=method, **options))(logits)
    for dtype in (jnp.int16, jnp.int32):
        record = fresh.expert_ids[:, :top_k].astype(dtype)

        def again(logits, record=record):
            return route(logits, top_k=top_k, method=method, expert_ids=record, **options)

        replay = jax.jit(again)(logits)
        assert_equal(replay.expert_ids, fresh.expert_ids)
        np.testing.assert_allclose(replay.weights, fresh.weights, rtol=1e-6, atol=0)
    assert_equal(again(logits).weights, replay.weights)


def test_int16_holds_the_largest_id_of_32768_experts():
    logits = jnp.zeros((1, 2**15)).at[0, 2**15 - 1].set(1.0)
    fresh = route(logits, top_k=1)
    record = fresh.expert_ids.astype(jnp.int16)
    assert record.tolist() == [[2**15 - 1]]
    assert_equal(route(logits, top_k=1, expert_ids=record).expert_ids, fresh.expert_ids)


def test_other_ops_take_int32_alone():
    record = jnp.zeros((3, 1), jnp.int16)
    with pytest.raises(TypeError, match=r"expert_ids\.dtype=i16 must be i32"):
        plan(record, 4)
    weights = jnp.ones((3, 1), jnp.float32)
    with pytest.raises(TypeError, match=r"routing\.expert_ids\.dtype=i16 must be i32"):
        w = jnp.zeros((4, 8, 8))
        moe_mlp(jnp.zeros((3, 8)), Routing(record, weights), w, w, activation="relu")
    with pytest.raises(TypeError, match=r"expert_ids\.dtype=u16 must be i16 or i32"):
        route(jnp.zeros((3, 4)), top_k=1, expert_ids=record.astype(jnp.uint16))
