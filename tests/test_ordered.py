"""Tokens in the order of experts: when they come so, what the call is given, results on a CPU."""

import functools

import jax
import pytest

from jaxmoe import expert_parallel
from jaxmoe._ep import beside, ordered
from jaxmoe._ep.cost import ordered_pays
from jaxmoe._testing import assert_equal
from tests.test_beside import (
    BESIDE,
    DEEPSEEK,
    DISPATCH,
    NUM_DEVICES,
    ORDERED,
    PAIRS,
    PUSHED,
    QWEN3,
    a_layer_of_quantized_tokens,
    everything_of_a_layer,
    found_calls,
    on_gpus,
    targets,
    without_and_with_memory,
)

__all__ = ["on_gpus"]  # a fixture
RESULTS = ("y", "all_ids", "devices", "words", "targets", "rows", "act")
FP8 = {"format": "fp8_block", "dispatch_format": "fp8_block"}
CHANNEL = {"format": "fp8_channel", "dispatch_format": "fp8_channel"}
MIDDLE = {"hidden": 2048, "intermediate": 2048, "num_experts": 128, "top_k": 8}
MIXTRAL = {"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2}
QUANTIZE = "jaxmoe_quantize_v1"


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    "num_tokens, model, options, taken",
    [
        (4096, DEEPSEEK, {}, [ORDERED]),
        (4096, DEEPSEEK, {"dispatch": "auto", "residual": "bfloat16"}, [ORDERED]),
        (4096, DEEPSEEK, FP8, [QUANTIZE, DISPATCH, PUSHED]),  # rows are copied before products
        (8192, MIDDLE, CHANNEL, [QUANTIZE, ORDERED]),
        (4096, DEEPSEEK, {"format": "int4_g128"}, [DISPATCH, PUSHED]),
        (2048, QWEN3, {}, [ORDERED]),
        (4096, QWEN3, {}, [BESIDE]),
        (4096, MIXTRAL, {}, [DISPATCH, PUSHED]),  # of two experts on a device, there is no order
        (4096, QWEN3, {"config": PAIRS}, [DISPATCH, PUSHED]),  # which cannot wait
        (1024, QWEN3, {}, [DISPATCH, PUSHED]),
        (2048, QWEN3, CHANNEL, [QUANTIZE, DISPATCH, PUSHED]),
        (8192, DEEPSEEK, {"num_chunks": 2}, [ORDERED, ORDERED]),
        (4096, DEEPSEEK, {"format": "fp8_block"}, [DISPATCH, PUSHED]),  # quantized where they come
    ],
    ids=str,
)
def test_where_it_is_taken(num_tokens, model, options, taken):
    assert targets(num_tokens, **model, **options) == taken


@pytest.mark.usefixtures("on_gpus")
def test_the_call_has_the_choices_of_all():
    (_, (target, attrs, operands, results)) = found_calls(8192, **MIDDLE, **CHANNEL)
    assert target == ORDERED
    assert attrs["peers"] == {"memory": "expert", "num_devices": "4:i64", "num_local": "32:i64"}
    of_layer = attrs["layer"]
    assert of_layer["num_local_experts"] == "32:i64" and of_layer["num_experts"] == "128:i64"
    assert operands[:6] == [
        *("i32", "8192x8xi32", "8192x8xf32", "0x0xbf16"),
        *("8192x2048xf8E4M3FN", "8192xf32"),
    ]
    assert dict(zip(RESULTS, results, strict=False)) == {
        "y": "8192x2048xbf16",
        "all_ids": "32768x8xi32",
        "devices": "8192x2xi32",
        "words": f"{4 + 32}xi32",
        "targets": "262144x2xi32",
        "rows": "0x2048xbf16",
        "act": "262144x2048xbf16",
    }


def test_it_needs_the_memory_that_a_dispatch_does(on_gpus):
    needed = expert_parallel.peer_memory_bytes(4096, 7168, 8, NUM_DEVICES)
    on_gpus(needed)
    assert targets(4096, **DEEPSEEK) == [ORDERED]


def test_more_bytes_on_the_links_pay():
    def pays(num_tokens, num_devices=4, **other):
        return ordered_pays(num_devices, num_tokens, 8, 2048, **{"token_itemsize": 2} | other)

    assert pays(2048) and not pays(1024)
    assert pays(1200, num_devices=8) and not pays(2048, token_itemsize=1)


@pytest.fixture
def both(monkeypatch):
    monkeypatch.setattr(beside, "why_not", lambda *_: "not asked for")
    monkeypatch.setattr(ordered, "why_not", ordered.no_call)
    return functools.partial(without_and_with_memory, monkeypatch, "jaxmoe_peer_ordered_moe_mlp")


@pytest.mark.parametrize("recompute", (None, "z"))
def test_values_and_gradients_on_a_cpu(both, recompute):
    jax.tree.map(assert_equal, *both(*everything_of_a_layer(recompute)))


def test_quantized_tokens_and_their_scales_on_a_cpu(both):
    jax.tree.map(assert_equal, *both(*a_layer_of_quantized_tokens()))
