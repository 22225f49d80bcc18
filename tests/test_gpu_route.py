"""The route kernels: every rule, option and thread map against the float64 oracle."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import plan, route
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal, poison
from jaxmoe.routing_methods import METHODS
from tests import routing_oracle as oracle
from tests.routing_oracle import VARIANTS, case
from tests.test_routing_rules import GOLDEN, MODELS, STATIC

pytestmark = pytest.mark.gpu

NAN, INF = math.nan, math.inf
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
TARGET = "jaxmoe_route_v2"
_route = jax.jit(route, static_argnames=STATIC)


def _check(logits, options):
    """Ids exactly; weights to a few ulp of exp, log and a sum, or flushed to 0; repeats bitwise."""
    shape = (len(logits), options["top_k"])
    poison(shape, jnp.int32)
    poison(shape, jnp.float32)
    got, want = _route(logits, **options), oracle.route(logits, **options)
    np.testing.assert_array_equal(got.expert_ids, want.expert_ids)
    np.testing.assert_allclose(got.weights, want.weights, rtol=2e-6, atol=1e-37)
    jax.tree.map(assert_equal, got, _route(logits, **options))


SIZES = (1, 8, 40, 60, 128, 160, 256, 384, 512, 896)
TURNS = [
    (method, size, DTYPES[(i + j) % 3])
    for i, method in enumerate(METHODS)
    for j, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("method", "num_experts", "dtype"), TURNS)
def test_methods_and_sizes(method, num_experts, dtype):
    bias = True if oracle.RULES[method].bias else None
    options = case(method, 1 if method == "llama4" else min(8, num_experts), bias=bias)
    _check(*oracle.draw(num_experts, 7, num_experts, options, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, dtype):
    _check(*oracle.draw(1, 40, 64, VARIANTS[name], dtype))


# Every thread map: (E, K) where the experts of a lane, the sorted lists or the rounds change.
MAPS = [
    (1, 1),
    (8, 8),
    (32, 5),  # one expert a lane
    (33, 33),  # two, most lanes without any
    (64, 8),
    (65, 1),  # three of four
    (128, 32),
    (128, 128),  # several rounds of weights
    (129, 8),  # five of eight; two lists of keys
    (160, 9),
    (256, 1),
    (256, 8),  # the most choices whose keys are dealt again
    (256, 9),
    (256, 32),
    (256, 256),
    (257, 16),
    (384, 16),
    (384, 17),
    (500, 3),  # rows of whole quads, the last lane not full
    (510, 10),  # rows of no whole quads
    (512, 16),
    (512, 22),
    (512, 512),
    (513, 8),  # 32 a lane, most lanes not full
    (896, 16),  # the most choices whose keys are dealt again
    (896, 17),
    (1022, 10),
    (1024, 1),
    (1024, 32),
    (1024, 1024),
]
RULES = {
    "logit": case("topk", 1),
    "score": case("sqrtsoftplus", 1, bias=True, scale=1.5),
    "softmax": case("softmax", 1, norm_topk_prob=True),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_experts", "top_k"), MAPS)
def test_thread_maps(num_experts, top_k, rule, dtype):
    options = RULES[rule] | {"top_k": top_k}
    # with 512 keys in order, few draws keep them all apart
    clear = oracle.CLEAR if top_k <= 64 else 2.0**-20
    _check(*oracle.draw(top_k, 3, num_experts, options, dtype, clear))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 131, 133, 529, 4099])
def test_token_counts(num_tokens):
    logits, options = oracle.draw(2, 16, 128, VARIANTS["deepseek_v3_groups"])
    rows = np.random.default_rng(num_tokens).integers(0, 16, num_tokens)
    got, want = _route(logits[rows], **options), oracle.route(logits, **options)
    np.testing.assert_array_equal(got.expert_ids, want.expert_ids[rows])
    np.testing.assert_allclose(got.weights, want.weights[rows], rtol=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    num_experts, options = MODELS[name]
    _check(*oracle.draw(len(name), 9, num_experts, options))


@pytest.mark.parametrize("masked", [-INF, 0.0])
@pytest.mark.parametrize("method", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "top_groups", "top_k"),
    [
        (32, 32, 9, 8),  # a group a lane, the smallest
        (256, 8, 4, 8),
        (256, 4, 2, 8),
        (256, 2, 1, 40),
        (512, 16, 5, 20),
        (1024, 8, 3, 16),
        (896, 7, 2, 16),
        (64, 32, 32, 7),  # every group is kept
        (60, 4, 2, 6),  # groups that are no whole lanes
        (96, 3, 1, 4),
        (256, 64, 9, 8),  # several groups a lane
        (296, 8, 3, 10),
        (500, 100, 30, 12),
        (40, 40, 11, 11),  # groups of one expert
    ],
)
def test_groups(num_experts, num_groups, top_groups, top_k, method, masked):
    groups = {"num_groups": num_groups, "top_groups": top_groups, "masked_group_value": masked}
    bias = True if method == "deepseek_v3" else None
    options = case(method, top_k, bias=bias, **groups)
    _check(*oracle.draw(num_groups, 5, num_experts, options))


@pytest.mark.parametrize("method", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize(
    ("num_groups", "top_groups"), [(2, 1), (4, 3), (8, 4), (8, 8), (16, 5), (32, 7)]
)
def test_tied_groups(num_groups, top_groups, method):
    """Of equal groups the first ones, and those without a number last."""
    logits = np.random.default_rng(num_groups).integers(0, 2, (60, 64)).astype(np.float32)
    logits[::3] = 0.0
    logits[1::3, : 64 // num_groups] = NAN
    logits[2::6, 64 // num_groups :] = NAN
    _check(logits, case(method, 4, num_groups=num_groups, top_groups=top_groups))


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - {n for n in GOLDEN if "forced" in n}))
def test_golden(name):
    logits, options, expert_ids, weights = GOLDEN[name]
    given = options.keys() & {"bias", "expert_scale"}
    arrays = {n: jnp.asarray(options[n], jnp.float32) for n in given}
    got = _route(jnp.asarray([logits], jnp.float32), **options | arrays)
    np.testing.assert_array_equal(got.expert_ids, [expert_ids])
    np.testing.assert_allclose(got.weights, [weights], rtol=2e-6, atol=1e-37)


SPECIAL = [-INF, -1e30, -1.0, -0.0, 0.0, 1.0, 1.5, 80.0, INF, NAN]


@pytest.mark.parametrize("num_experts", [16, 256, 512, 896])
@pytest.mark.parametrize("name", VARIANTS)
def test_ties_and_special_values(name, num_experts):
    _, options = oracle.draw(0, 1, num_experts, VARIANTS[name])
    rng = np.random.default_rng(num_experts)
    logits = rng.choice(np.array(SPECIAL, np.float32), (24, num_experts))
    logits[:4] = rng.choice(np.array([-1.0, 0.0, -0.0], np.float32), (4, num_experts))
    logits[4], logits[5], logits[6], logits[7] = NAN, -INF, INF, 0.0
    logits[8, 1:] = NAN  # fewer scores than choices
    logits[9, :-1] = -INF
    _check(logits, options)


@pytest.mark.parametrize(("num_experts", "top_k"), [(40, 8), (128, 8), (256, 8), (256, 30)])
def test_many_ties(num_experts, top_k):
    """Few values among many: the smaller ids, in order."""
    rng = np.random.default_rng(num_experts)
    logits = rng.integers(0, 4, (500, num_experts)).astype(np.float32)
    got = _route(jnp.asarray(logits, jnp.bfloat16), top_k=top_k, method="topk")
    want = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(got.expert_ids, want)
    np.testing.assert_array_equal(got.weights, np.take_along_axis(logits, want, axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_of_the_bias(dtype):
    _check(*oracle.draw(3, 9, 256, case("deepseek_v3", 8, bias=dtype), jnp.bfloat16))
    _check(*oracle.draw(3, 9, 60, case("minimax2", 5, bias=dtype), jnp.float32))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_rule_runs_the_kernel(name):
    logits, options = oracle.draw(4, 3, 32, VARIANTS[name])
    before = _targets.execute_count(TARGET)
    jax.block_until_ready(jax.jit(lambda x: route(x, **options))(logits))
    assert _targets.execute_count(TARGET) == before + 1


def test_vmap_is_one_call():
    drawn = [oracle.draw(seed, 5, 64, VARIANTS["deepseek_v3_groups"]) for seed in range(3)]
    options = drawn[0][1]
    logits = [x for x, o in drawn if (o["bias"] == options["bias"]).all()] or [drawn[0][0]]
    mapped = jax.jit(jax.vmap(lambda x: route(x, **options)))
    before = _targets.execute_count(TARGET)
    got = jax.block_until_ready(mapped(np.stack(logits)))
    assert _targets.execute_count(TARGET) == before + 1
    for b, one in enumerate(logits):
        np.testing.assert_array_equal(got.expert_ids[b], oracle.route(one, **options).expert_ids)


def test_command_buffers_capture_routing_and_plan():
    """The handler runs while a graph is recorded and not when it is replayed."""
    drawn = [oracle.draw(seed, 5, 64, VARIANTS["deepseek_v3_groups"]) for seed in range(8)]
    options = drawn[0][1]

    def fn(inputs):
        routings = [route(x, **options) for x in inputs]
        return jnp.stack([plan(r.expert_ids, num_experts=64).slot_to_row for r in routings])

    inputs = [jnp.asarray(x) for x, _ in drawn]
    graph = {
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
        "xla_gpu_graph_min_graph_size": 1,
    }
    captured = jax.jit(fn).lower(inputs).compile(graph)
    want = jax.jit(fn).lower(inputs).compile({"xla_gpu_enable_command_buffer": ""})(inputs)
    for _ in range(3):
        assert_equal(captured(inputs), want)
    before = _targets.execute_count(TARGET)
    for _ in range(10):
        assert_equal(captured(inputs), want)
    replayed = 80 - (_targets.execute_count(TARGET) - before)
    assert replayed >= 40, f"{replayed} of 80 layers replayed without running the handler"


# Under the sanitizer: every thread map once, with groups where they divide the experts.


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [
        (5, 5),
        (64, 5),
        (100, 7),
        (256, 5),
        (256, 20),
        (300, 5),
        (512, 16),
        (510, 40),
        (896, 16),
        (1022, 20),
    ],
)
@pytest.mark.parametrize("method", ["renormalize", "deepseek_v3"])
def test_sanitize_route(method, num_experts, top_k, dtype):
    grouped = method == "deepseek_v3" and num_experts % 4 == 0
    groups = {"num_groups": 4, "top_groups": 2} if grouped else {}
    bias = True if method == "deepseek_v3" else None
    logits, options = oracle.draw(
        num_experts, 7, num_experts, case(method, top_k, bias=bias, **groups), dtype
    )
    logits[3] = NAN
    _check(logits, options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(VARIANTS)[::2])
def test_mask_and_traced_scale(name, dtype):
    """Whatever invalid tokens hold; the weights of a number, to the last bit or the one before."""
    logits, options = oracle.draw(1, 40, 64, VARIANTS[name], dtype)
    mask = np.random.default_rng(0).random(40) < 0.5
    logits[np.flatnonzero(~mask)[:3]] = np.array([[NAN], [INF], [-INF]], dtype)
    options |= {"mask": mask, "scale": 2.827}
    number = jax.jit(lambda x: route(x, **options))(logits)
    traced = jax.jit(lambda x, s: route(x, **options | {"scale": s}))(logits, jnp.float32(2.827))
    want = oracle.route(logits, **options)
    np.testing.assert_array_equal(traced.expert_ids, want.expert_ids)
    np.testing.assert_allclose(traced.weights, want.weights, rtol=2e-6, atol=1e-37)
    assert_equal(number.expert_ids, traced.expert_ids)
    np.testing.assert_array_max_ulp(np.asarray(number.weights), np.asarray(traced.weights), 1)
    gradient = jax.jit(jax.grad(lambda x: (route(x, **options).weights ** 2).sum()))(logits)
    assert np.isfinite(np.asarray(gradient, np.float32)).all() and not gradient[~mask].any()
