"""Every message of route's options."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import route
from jaxmoe.routing_methods import METHODS

F32, I32 = jnp.float32, jnp.int32
T, E = 3, 8


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


WITHOUT = {  # options that a method lacks, each with a value that others take
    "bias": (zeros(E), set(METHODS) - {"deepseek_v3", "minimax2", "sqrtsoftplus"}),
    "num_groups": (2, set(METHODS) - {"deepseek_v3", "deepseek_v2"}),
    "top_groups": (2, set(METHODS) - {"deepseek_v3", "deepseek_v2"}),
    "masked_group_value": (0.0, set(METHODS) - {"deepseek_v3", "deepseek_v2"}),
    "norm_topk_prob": (
        True,
        set(METHODS) - {"softmax", "deepseek_v3", "deepseek_v2", "sigmoid_renorm", "sqrtsoftplus"},
    ),
    "epsilon": (  # nothing is divided, at least not by default
        1e-6,
        set(METHODS) - {"deepseek_v3", "sigmoid_renorm", "minimax2", "sqrtsoftplus"},
    ),
}
LACKS = [(name, method) for name, (_, methods) in WITHOUT.items() for method in sorted(methods)]


def _refused(error, rule, **options):
    """The rule is a regular expression, behind the name of the op."""
    with pytest.raises(error, match=rf"^jaxmoe\.route: {rule}"):
        route(zeros(T, E), **{"top_k": 1, **options})


@pytest.mark.parametrize(("name", "method"), LACKS)
def test_an_option_that_the_method_lacks(name, method):
    value = WITHOUT[name][0]
    shown = r"f32\[8\]" if name == "bias" else re.escape(str(value))
    _refused(ValueError, f"{name}={shown} must ", method=method, **{name: value})


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("method", ["renormalize", "llama4", "topk", "minimax2", "sigmoid"])
def test_norm_topk_prob_is_refused_either_way(method, norm_topk_prob):
    rule = f"norm_topk_prob={norm_topk_prob} must be None: method '{method}' "
    _refused(ValueError, rule, method=method, norm_topk_prob=norm_topk_prob)


@pytest.mark.parametrize("method", ["deepseek_v3", "sigmoid_renorm", "sqrtsoftplus", "softmax"])
def test_epsilon_without_a_sum(method):
    options = {"method": method, "norm_topk_prob": False, "epsilon": 1e-6}
    _refused(ValueError, f"epsilon=1e-06 must be None: method '{method}' ", **options)


GROUPS = {"method": "deepseek_v3", "num_groups": 4, "top_groups": 2}
BIASED = {"method": "deepseek_v3"}
IDS = zeros(T, 2, dtype=I32)

ERRORS = [
    (ValueError, r"top_k=2 must be 1 for method 'llama4'", {"method": "llama4", "top_k": 2}),
    (
        ValueError,
        r"num_groups=3 must divide logits\.shape\[1\]=8\. Got logits: f32\[3,8\]\.",
        GROUPS | {"num_groups": 3},
    ),
    (ValueError, r"num_groups=0 must be at least 1", GROUPS | {"num_groups": 0}),
    (TypeError, r"num_groups must be a Python int", GROUPS | {"num_groups": 2.0}),
    (ValueError, r"top_groups=0 must be in \[1, 4\]", GROUPS | {"top_groups": 0}),
    (ValueError, r"top_groups=5 must be in \[1, 4\]", GROUPS | {"top_groups": 5}),
    (
        ValueError,
        r"top_k=5 must be at most 4, .*top_groups=2.*num_groups=4.* Got logits: f32\[3,8\]\.",
        GROUPS | {"top_k": 5},
    ),
    (
        ValueError,
        r"top_k=9 must be in \[1, 8\]",
        GROUPS | {"top_k": 9, "masked_group_value": 0.0},
    ),
    (
        ValueError,
        r"masked_group_value=inf must be finite or -inf",
        GROUPS | {"masked_group_value": float("inf")},
    ),
    (ValueError, r"masked_group_value=nan must ", GROUPS | {"masked_group_value": float("nan")}),
    (TypeError, r"masked_group_value must be ", GROUPS | {"masked_group_value": "0"}),
    (
        ValueError,
        r"bias\.shape\[0\]=7 must equal logits\.shape\[1\]=8 \(num_experts\)\. "
        r"Got bias: f32\[7\], logits: f32\[3,8\]\.",
        BIASED | {"bias": zeros(7)},
    ),
    (ValueError, r"bias must have 1 axis \[E\], not 2", BIASED | {"bias": zeros(T, E)}),
    (
        TypeError,
        r"bias\.dtype=i32 must be bf16 or f16 or f32\. Got bias: i32\[8\]\.",
        BIASED | {"bias": zeros(E, dtype=I32)},
    ),
    (TypeError, r"bias must be a JAX or NumPy array", BIASED | {"bias": [0.0] * E}),
    (
        ValueError,
        r"expert_scale\.shape\[0\]=7 must equal logits\.shape\[1\]=8",
        {"expert_scale": zeros(7)},
    ),
    (ValueError, r"expert_scale must have 1 axis \[E\], not 0", {"expert_scale": zeros()}),
    (
        TypeError,
        r"expert_scale\.dtype=i32 must be bf16 or f16 or f32",
        {"expert_scale": zeros(E, dtype=I32)},
    ),
    (TypeError, r"expert_scale must be a JAX or NumPy array", {"expert_scale": 1.0}),
    (
        TypeError,
        r"scale must be a number or a scalar array of bf16, f16 or f32\. Got scale: None\.",
        {"scale": None},
    ),
    (TypeError, r"scale must be a number .* Got scale: True\.", {"scale": True}),
    (ValueError, r"scale=nan must be finite", {"scale": float("nan")}),
    (ValueError, r"scale=1e\+300 must be finite in float32", {"scale": 1e300}),
    (ValueError, r"scale=10{39} must be finite in float32", {"scale": 10**400}),
    (
        ValueError,
        r"scale must have 0 axes \[\], not 1\. Got scale: f32\[1\]\.",
        {"scale": zeros(1)},
    ),
    (
        TypeError,
        r"scale\.dtype=i32 must be bf16 or f16 or f32\. Got scale: i32\[\]\.",
        {"scale": zeros(dtype=I32)},
    ),
    (TypeError, r"norm_topk_prob must be a bool", BIASED | {"norm_topk_prob": 1}),
    (TypeError, r"epsilon must be a Python float", BIASED | {"epsilon": "1e-20"}),
    (ValueError, r"epsilon=-1\.0 must be at least 0", BIASED | {"epsilon": -1.0}),
    (ValueError, r"num_shared_experts=-1 must be at least 0", {"num_shared_experts": -1}),
    (TypeError, r"num_shared_experts must be a Python int", {"num_shared_experts": 1.5}),
    (ValueError, r"num_valid_tokens=-1 must be in \[0, 3\]", {"num_valid_tokens": -1}),
    (TypeError, r"num_valid_tokens must be ", {"num_valid_tokens": 2.0}),
    (
        TypeError,
        r"num_valid_tokens\.dtype=f32 must be i32\. Got num_valid_tokens: f32\[\]\.",
        {"num_valid_tokens": zeros()},
    ),
    (
        ValueError,
        r"num_valid_tokens must have 0 axes \[\], not 1",
        {"num_valid_tokens": zeros(1, dtype=I32)},
    ),
    (
        ValueError,
        r"num_valid_tokens must be None with a mask, which says it of every token\. "
        r"Got num_valid_tokens: 2, mask: bool\[3\]\.",
        {"num_valid_tokens": 2, "mask": zeros(T, dtype=bool)},
    ),
    (
        ValueError,
        r"mask\.shape\[0\]=4 must equal logits\.shape\[0\]=3 \(num_tokens\)\. "
        r"Got mask: bool\[4\], logits: f32\[3,8\]\.",
        {"mask": zeros(4, dtype=bool)},
    ),
    (
        ValueError,
        r"mask must have 1 axis \[T\], not 2\. Got mask: bool\[3,1\]\.",
        {"mask": zeros(T, 1, dtype=bool)},
    ),
    (
        TypeError,
        r"mask\.dtype=i32 must be bool\. Got mask: i32\[3\]\.",
        {"mask": zeros(T, dtype=I32)},
    ),
    (
        TypeError,
        r"mask must be a JAX or NumPy array\. Got mask: a list\.",
        {"mask": [True] * T},
    ),
    (
        TypeError,
        r"return_scores must be a bool\. Got return_scores: 1\.",
        {"return_scores": 1},
    ),
    (
        ValueError,
        r"expert_ids\.shape\[0\]=4 must equal logits\.shape\[0\]=3 \(num_tokens\)",
        {"top_k": 2, "expert_ids": zeros(4, 2, dtype=I32)},
    ),
    (ValueError, r"expert_ids\.shape\[1\]=2 must be 3 \(top_k\)", {"top_k": 3, "expert_ids": IDS}),
    (ValueError, r"expert_ids must have 2 axes \[T,K\], not 1", {"expert_ids": IDS[0]}),
    (
        TypeError,
        r"expert_ids\.dtype=u32 must be i16 or i32\. Got expert_ids: u32\[3,2\]\.",
        {"top_k": 2, "expert_ids": IDS.astype(jnp.uint32)},
    ),
    (TypeError, r"expert_ids must be a JAX or NumPy array", {"expert_ids": [[0]] * T}),
]


@pytest.mark.parametrize(("error", "rule", "options"), ERRORS, ids=[e[1][:40] for e in ERRORS])
def test_message(error, rule, options):
    _refused(error, rule, **options)


@pytest.mark.parametrize(
    "name", ["num_groups", "top_groups", "epsilon", "top_k", "masked_group_value"]
)
def test_traced_numbers_are_refused(name):
    def fn(value):
        return route(zeros(T, E), **{"top_k": 1, **GROUPS, name: value})

    with pytest.raises(TypeError, match=rf"^jaxmoe\.route: {name} must be a Python .* trace time"):
        jax.jit(fn)(1)


def test_arrays_are_refused_while_tracing():
    for options, rule in (
        ({"scale": I32(1)}, r"scale\.dtype=i32 must be "),
        ({"mask": zeros(2, dtype=bool)}, r"mask\.shape\[0\]=2 must equal "),
    ):
        fn = jax.jit(lambda options: route(zeros(T, E), top_k=1, **options))
        with pytest.raises((TypeError, ValueError), match=rf"^jaxmoe\.route: {rule}"):
            fn(options)


def test_what_is_not_refused():
    """Groups that a finite mask leaves open, and options at their defaults change nothing."""
    logits = np.tile(-np.arange(E, dtype=F32) / 4, (T, 1))  # groups 0 and 1 are chosen
    for top_k, options in ((8, {"masked_group_value": 0.0}), (4, {})):
        chosen = route(logits, top_k=top_k, **GROUPS, **options).expert_ids
        assert chosen.tolist() == [list(range(top_k))] * T
    for method in METHODS:
        plain = route(logits, top_k=1, method=method)
        for options in (
            {"num_groups": 1, "top_groups": 1},
            {"scale": 2, "num_shared_experts": 0},
            {"masked_group_value": -float("inf")},
        ):
            same = route(logits, top_k=1, method=method, **options)
            assert same.expert_ids.tolist() == plain.expert_ids.tolist()
            factor = options.get("scale", 1)
            np.testing.assert_array_equal(same.weights, factor * plain.weights)
