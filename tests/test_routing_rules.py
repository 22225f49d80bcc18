"""Every routing rule and option: against the oracle, against hand numbers, properties, vmap."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxmoe import route
from jaxmoe._testing import assert_equal, assert_vmap_is_loop
from jaxmoe.routing_methods import METHODS
from tests import routing_oracle as oracle
from tests.routing_oracle import VARIANTS, case

NAN, INF = math.nan, math.inf
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
STATIC = ("top_k", "method", "num_groups", "top_groups", "scale", "norm_topk_prob", "epsilon")
STATIC += ("masked_group_value", "num_shared_experts")
_route = jax.jit(route, static_argnames=STATIC)


def _check(got, want):
    """Ids exactly; weights within a few ulp of exp, log and a sum of E terms, or flushed to 0."""
    assert (got.expert_ids.dtype, got.weights.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(got.expert_ids, want.expert_ids)
    np.testing.assert_allclose(got.weights, want.weights, rtol=2e-6, atol=1e-37)


EVERY_VARIANT = pytest.mark.parametrize("name", VARIANTS)
WITHOUT_GROUPS = sorted(name for name, v in VARIANTS.items() if "num_groups" not in v)


def test_oracle_and_variants_have_every_method():
    assert set(METHODS) == set(oracle.RULES) == {v["method"] for v in VARIANTS.values()}


# Experts and dtypes take turns, so that each method meets two of nine and of three.
SIZES = (1, 8, 40, 60, 128, 160, 256, 384, 512)
TURNS = [
    (method, SIZES[(i + 3 * j) % 9], (BF16, F16, F32)[(i + j) % 3])
    for i, method in enumerate(METHODS)
    for j in range(2)
]


@pytest.mark.parametrize(("method", "num_experts", "dtype"), TURNS)
def test_sizes(method, num_experts, dtype):
    bias = True if oracle.RULES[method].bias else None
    options = case(method, 1 if method == "llama4" else min(8, num_experts), bias=bias)
    logits, options = oracle.draw(num_experts, 7, num_experts, options, dtype)
    _check(_route(logits, **options), oracle.route(logits, **options))


MODELS = {
    "qwen3-next": (512, case("renormalize", 10)),
    "deepseek-v2": (160, case("deepseek_v2", 6, num_groups=8, top_groups=3, scale=16.0)),
    "deepseek-v3": (
        256,
        case("deepseek_v3", 8, bias=True, num_groups=8, top_groups=4, scale=2.5),
    ),
    "deepseek-v4": (256, case("sqrtsoftplus", 6, bias=True, scale=1.5, num_shared_experts=1)),
    "kimi-k2": (384, case("deepseek_v3", 8, bias=BF16, scale=2.827, num_shared_experts=1)),
    "nemotron-3-super": (512, case("deepseek_v3", 22, bias=True)),
    "most choices": (
        512,
        case("deepseek_v3", 32, bias=True, num_groups=8, top_groups=2, masked_group_value=0.0),
    ),
    "every expert": (40, case("sqrtsoftplus", 40, bias=True)),
    "every group": (60, case("deepseek_v2", 32, num_groups=4, top_groups=4)),
    "groups of one expert": (8, case("deepseek_v3", 3, bias=True, num_groups=8, top_groups=3)),
    "finite mask above keys": (
        128,
        case("deepseek_v2", 6, num_groups=4, top_groups=1, masked_group_value=0.5),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_options(name):
    num_experts, options = MODELS[name]
    logits, options = oracle.draw(len(name), 9, num_experts, options)
    _check(_route(logits, **options), oracle.route(logits, **options))


def _logit(*probabilities):
    return [math.log(p / (1 - p)) for p in probabilities]


P = [math.log(n) for n in (1, 2, 3, 4)]  # softmax .1 .2 .3 .4
S = _logit(0.5, 0.75, 0.8, 0.25)
B = [0.4, 0.0, 0.0, 0.5]  # keys S + B: .9 .75 .8 .75
Q = [math.log(math.expm1(s * s)) for s in (2.0, 0.5, 1.0, 1.5)]  # softplus is 4, .25, 1, 2.25
GROUPS = {"num_groups": 2, "top_groups": 1}
# Keys .9 -.1 | .1 .2 of scores .5 .75 | .5 .25: the first group wins with .8 against .3.
H, H_BIAS = _logit(0.5, 0.75, 0.5, 0.25), [0.4, -0.85, -0.4, -0.05]

GOLDEN = {
    "softmax": (P, case("softmax", 2), [3, 2], [0.4, 0.3]),
    # p / (p0 + p1 + epsilon): .4 and .3 of .8
    "softmax_sum": (P, case("softmax", 2, norm_topk_prob=True, epsilon=0.1), [3, 2], [0.5, 0.375]),
    "renormalize": (P, case("renormalize", 2, scale=7.0), [3, 2], [4, 3]),
    "renormalize_naive": (P, case("renormalize_naive", 2, scale=7.0), [3, 2], [4, 3]),
    # .5 / 1.3 * 2.6, .8 / 1.3 * 2.6: without the bias that chose them
    "deepseek_v3": (S, case("deepseek_v3", 2, bias=B, scale=2.6), [0, 2], [1, 1.6]),
    # groups .9 + .75 and .8 + .75; .5 / 1.25, .75 / 1.25
    "deepseek_v3_groups": (S, case("deepseek_v3", 2, bias=B, **GROUPS), [0, 1], [0.4, 0.6]),
    # the best two are spread: the group of the best expert would be the second
    "top2": ([0, 1, -9, 2], case("topk", 1), [3], [2]),
    "group_top2": (
        _logit(0.5, 0.6, 0.1, 0.8),  # 1.1 against .9
        case("deepseek_v3", 1, norm_topk_prob=False, **GROUPS),
        [1],
        [0.6],
    ),
    # 5 5 1 9 of 20: .25 against .45, by the largest
    "group_max": (np.log([5, 5, 1, 9]), case("deepseek_v2", 2, **GROUPS), [3, 2], [0.45, 0.05]),
    "deepseek_v2_sum": (
        P,
        case("deepseek_v2", 2, norm_topk_prob=True, scale=14.0, **GROUPS),
        [3, 2],
        [8, 6],
    ),
    "mask_inf": (H, case("deepseek_v3", 2, bias=H_BIAS, **GROUPS), [0, 1], [0.4, 0.6]),
    # experts 2 and 3 have key 0 > -.1; the tie goes to 2
    "mask_0": (
        H,
        case("deepseek_v3", 2, bias=H_BIAS, masked_group_value=0.0, **GROUPS),
        [0, 2],
        [0.5, 0.5],
    ),
    "llama4": (S, case("llama4", 1), [2], [0.8]),
    "topk": ([1.5, -2, 3], case("topk", 3, scale=2.0), [2, 0, 1], [6, 3, -4]),
    "sigmoid_renorm": (S, case("sigmoid_renorm", 2, scale=1.55), [2, 1], [0.8, 0.75]),
    "sigmoid_renorm_max": (S, case("sigmoid_renorm", 2, epsilon=2.0), [2, 1], [0.4, 0.375]),
    "minimax2": (S, case("minimax2", 2, bias=B, scale=2.6), [0, 2], [1, 1.6]),
    "sigmoid": (S, case("sigmoid", 4), [2, 1, 0, 3], [0.8, 0.75, 0.5, 0.25]),
    # both scores round to 1 in float32: a tie by score, none by logit
    "sigmoid_saturates": ([30, 40, 0], case("sigmoid", 3), [0, 1, 2], [1, 1, 0.5]),
    "topk_sigmoid_does_not": ([30, 40, 0], case("topk_sigmoid", 3), [1, 0, 2], [1, 1, 0.5]),
    # keys 2 2.25 1 1.5; .5 / 2.5 * 1.5, 2 / 2.5 * 1.5
    "sqrtsoftplus": (
        Q,
        case("sqrtsoftplus", 2, bias=[0, 1.75, 0, 0], scale=1.5),
        [1, 0],
        [0.3, 1.2],
    ),
    "expert_scale": (
        P,
        case("renormalize", 2, expert_scale=[9, 9, 0.7, 14]),
        [3, 2],
        [8, 0.3],
    ),
    "shared": (  # neither scale nor expert_scale reaches them
        P,
        case("softmax", 1, scale=2.0, expert_scale=[3] * 4, num_shared_experts=2),
        [3, 4, 5],
        [2.4, 1, 1],
    ),
    "forced": (P, case("softmax", 2, expert_ids=[0, 3], norm_topk_prob=True), [0, 3], [0.2, 0.8]),
    "forced_twice": (P, case("renormalize", 2, expert_ids=[1, 1]), [1, 1], [0.5, 0.5]),
    "forced_outside": (
        [*P[:3], NAN],
        case("renormalize", 4, expert_ids=[-1, 1, 4, 3], num_shared_experts=1),
        [-1, 1, -1, -1, 4],
        [0, 1, 0, 0, 1],
    ),
    # 1 3 4 of 8
    "nan": ([P[0], NAN, P[2], P[3]], case("softmax", 4), [3, 2, 0, -1], [0.5, 0.375, 0.125, 0]),
    "nan_bias": (
        [S[0], S[1], NAN, S[3]],
        case("deepseek_v3", 4, bias=[NAN, 0, 0, 0.6]),
        [3, 1, -1, -1],
        [0.25, 0.75, 0, 0],
    ),
    "nan_masked": (  # a finite mask does not bring NaN back
        [3, 2, NAN, 1],
        case("deepseek_v2", 4, masked_group_value=0.0, norm_topk_prob=True, **GROUPS),
        [0, 1, 3, -1],
        [math.e**3 / (math.e + math.e**2 + math.e**3), 1 / (1 + math.e + 1 / math.e)]
        + [1 / (1 + math.e + math.e**2), 0],
    ),
    "nan_group": (  # 1.6 of one key, 1.1 of two; the group without a key comes last
        [NAN, NAN, S[0], NAN, *_logit(0.5, 0.6)],
        case("deepseek_v3", 2, bias=[0, 0, 1.1, 0, 0, 0], num_groups=3, top_groups=1),
        [2, -1],
        [1, 0],
    ),
    "-inf": ([-INF, 0, NAN, -INF], case("renormalize", 4), [1, 0, 3, -1], [1, 0, 0, 0]),
    "inf": ([INF, -INF, 0, NAN], case("sigmoid", 4), [0, 2, 1, -1], [1, 0.5, 0, 0]),
    # every p is NaN, and p is what deepseek_v2 chooses by
    "inf_softmax": ([INF, 0], case("softmax", 2), [0, 1], [NAN, NAN]),
    "inf_deepseek_v2": ([INF, 0], case("deepseek_v2", 2), [-1, -1], [0, 0]),
    "inf_topk": ([-INF, -1, INF], case("topk", 3), [2, 1, 0], [INF, -1, -INF]),
    "inf_sum": ([INF, 0], case("sqrtsoftplus", 2), [0, 1], [NAN, 0]),
    "-inf_bias": (  # last, but before "none"
        S,
        case("minimax2", 3, bias=[-INF, NAN, 0, NAN]),
        [2, 0, -1],
        [0.8 / 1.3, 0.5 / 1.3, 0],
    ),
    "ties": ([1, 2, 2, 1], case("sigmoid_renorm", 3, scale=0), [1, 2, 0], [0, 0, 0]),
    # groups 0 | .5 | 1 | 1 | .5: the last place goes to the second, not to the fifth
    "tied_groups": (
        [-90, -90, 0, -90, 0, 0, 0, 0, 0, -90],
        case("deepseek_v3", 6, num_groups=5, top_groups=3, norm_topk_prob=False),
        [2, 4, 5, 6, 7, 3],
        [0.5, 0.5, 0.5, 0.5, 0.5, 0],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    logits, options, expert_ids, weights = GOLDEN[name]
    options = dict(options)
    for array in ("bias", "expert_scale"):
        if array in options:
            options[array] = jnp.asarray(options[array], F32)
    if "expert_ids" in options:
        options["expert_ids"] = jnp.asarray([options["expert_ids"]], jnp.int16)
    logits = jnp.asarray([logits], F32)
    got = _route(logits, **options)
    np.testing.assert_array_equal(got.expert_ids, [expert_ids])
    np.testing.assert_allclose(got.weights, [weights], rtol=1e-6, atol=1e-37)
    _check(got, oracle.route(logits, **options))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(data=st.data(), name=st.sampled_from(sorted(VARIANTS)))
def test_random_ties_and_special_values(data, name):
    _, options = oracle.draw(0, 6, 16, VARIANTS[name])
    values = st.sampled_from([-INF, -1e30, -1.0, -0.0, 0.0, 1.0, 1.5, 80.0, INF, NAN])
    logits = data.draw(st.lists(values, min_size=96, max_size=96))
    logits = np.reshape(logits, (6, 16)).astype(np.float32)
    _check(_route(logits, **options), oracle.route(logits, **options))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32), name=st.sampled_from(WITHOUT_GROUPS))
def test_renaming_experts_renames_ids_only(seed, name):
    logits, options = oracle.draw(seed, 6, 16, VARIANTS[name])
    old = np.random.default_rng(seed).permutation(16)
    renamed = options | {n: options[n][old] for n in ("bias", "expert_scale") if n in options}
    got, top_k = _route(logits, **options), options["top_k"]
    other = _route(logits[:, old], **renamed)
    np.testing.assert_array_equal(old[other.expert_ids[:, :top_k]], got.expert_ids[:, :top_k])
    np.testing.assert_allclose(other.weights, got.weights, rtol=2e-6)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32), shift=st.integers(-1000, 1000))
@pytest.mark.parametrize("name", ["softmax", "renormalize", "renormalize_naive", "deepseek_v2"])
def test_a_constant_changes_nothing(name, seed, shift):
    logits, options = oracle.draw(seed, 6, 16, VARIANTS[name])
    got, want = (_route(x, **options) for x in (logits + np.float32(shift), logits))
    np.testing.assert_array_equal(got.expert_ids, want.expert_ids)
    np.testing.assert_allclose(got.weights, want.weights, rtol=2e-6)


@EVERY_VARIANT
def test_a_token_depends_on_no_other(name):
    logits, options = oracle.draw(1, 6, 16, VARIANTS[name])
    strange = np.ascontiguousarray(logits[:, ::-1])
    strange[1], strange[2], strange[4], strange[5] = NAN, logits[2], INF, -INF
    got, want = _route(strange, **options), _route(logits, **options)
    jax.tree.map(lambda g, w: assert_equal(g[2], w[2]), got, want)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(VARIANTS)))
def test_sums_and_groups(seed, name):
    _, options = oracle.draw(0, 1, 16, VARIANTS[name])
    got = _route(np.random.default_rng(seed).standard_normal((6, 16), np.float32), **options)
    ids, weights = (np.asarray(a)[:, : options["top_k"]] for a in (got.expert_ids, got.weights))
    if name in ("renormalize", "renormalize_naive", "deepseek_v2_sum", "sigmoid_renorm") or (
        name in ("deepseek_v3", "deepseek_v3_groups", "minimax2", "sqrtsoftplus")
    ):
        np.testing.assert_allclose(weights.sum(1), options.get("scale", 1.0), rtol=1e-6)
    assert all(len(set(row)) == len(row) and min(row) >= 0 for row in ids.tolist())
    groups = [{e * options.get("num_groups", 1) // 16 for e in row} for row in ids.tolist()]
    assert all(len(row) <= options.get("top_groups", 1) for row in groups)


@pytest.mark.parametrize("kind", [int, np.int32, jnp.int32], ids=["int", "numpy", "jax"])
def test_num_valid_tokens(kind):
    logits, options = oracle.draw(2, 6, 16, VARIANTS["deepseek_v3"], BF16)
    for count in (0, 2, 6):
        padded = np.where(np.arange(6)[:, None] < count, logits, np.array(NAN, BF16))
        valid = (
            count if kind is int else kind(count) if kind is jnp.int32 else np.array(count, "i4")
        )
        got = route(padded, num_valid_tokens=valid, **options)
        _check(got, oracle.route(logits, num_valid_tokens=count, **options))
        again = _route(padded, num_valid_tokens=np.array(count, np.int32), **options)
        np.testing.assert_array_equal(again.expert_ids, got.expert_ids)
        np.testing.assert_allclose(again.weights, got.weights, rtol=1e-6)


@EVERY_VARIANT
def test_forced_experts(name):
    """Replay gives the same; of any ids the order and repetitions stay, and no expert is -1."""
    logits, options = oracle.draw(3, 6, 16, VARIANTS[name])
    chosen, top_k = _route(logits, **options), options["top_k"]
    ids = np.asarray(chosen.expert_ids[:, :top_k])
    again = _route(logits, expert_ids=ids, **options)
    assert_equal(again.expert_ids, chosen.expert_ids)
    np.testing.assert_allclose(again.weights, chosen.weights, rtol=1e-6)
    ids = np.random.default_rng(4).integers(-2, 18, (6, top_k), np.int32)
    ids[:3, 0] = np.iinfo(np.int32).max, np.iinfo(np.int32).min, 5
    logits[2, 5] = NAN
    got = _route(logits, expert_ids=ids, **options)
    _check(got, oracle.route(logits, expert_ids=ids, **options))


def test_hash_routing():
    logits, options = oracle.draw(5, 6, 16, case("sqrtsoftplus", 3, scale=1.5))
    table = np.random.default_rng(6).integers(0, 16, (32, 3), np.int32)
    token_ids = np.array([0, 31, 5, 5, 17, 2])
    got = _route(logits, expert_ids=jnp.asarray(table)[token_ids], **options)
    np.testing.assert_array_equal(got.expert_ids, table[token_ids])
    _check(got, oracle.route(logits, expert_ids=table[token_ids], **options))


@pytest.mark.parametrize(
    ("name", "axes"),
    [(method, (0, None)) for method in METHODS]
    + [("deepseek_v3_groups", (0, 0)), ("sqrtsoftplus", (None, 0)), ("deepseek_v2_sum", (1, None))],
)
def test_vmap(name, axes):
    drawn = [oracle.draw(seed, 6, 16, VARIANTS[name]) for seed in range(3)]
    options = dict(drawn[0][1])
    bias = options.pop("bias", None)
    logits = np.stack([x for x, _ in drawn], axes[0]) if axes[0] is not None else drawn[0][0]
    if bias is None:
        fn = jax.jit(lambda x: route(x, **options))
        assert_vmap_is_loop(fn, (jnp.asarray(logits),), axes[:1])
        return
    if axes[1] == 0:
        bias = np.stack([o["bias"] for _, o in drawn])
    fn = jax.jit(lambda x, b: route(x, bias=b, **options))
    assert_vmap_is_loop(fn, (jnp.asarray(logits), jnp.asarray(bias)), axes)


@pytest.mark.parametrize("axis", [0, None])
def test_vmap_of_the_other_arrays(axis):
    logits, options = oracle.draw(10, 6, 16, case("sigmoid", 4))
    rng = np.random.default_rng(11)
    ids = jnp.asarray(rng.integers(-1, 16, (3, 6, 4)), jnp.int32)
    factors = jnp.asarray(rng.uniform(0.5, 2, (3, 16)), F32)
    counts = jnp.array([0, 4, 6], jnp.int32)

    @jax.jit
    def fn(x, ids, factor, count):
        arrays = {"expert_ids": ids, "expert_scale": factor, "num_valid_tokens": count}
        return route(x, **options, **arrays)

    x = jnp.asarray(logits if axis is None else np.stack([logits] * 3))
    assert_vmap_is_loop(fn, (x, ids, factors, counts), (axis, 0, 0, 0))
    assert_vmap_is_loop(fn, (x, ids[0], factors, counts[1]), (axis, None, 0, None))
