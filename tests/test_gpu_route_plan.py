"""The kernels of route_and_plan: the very bits of route and plan, at every boundary."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import route, route_and_plan
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import assert_equal, poison
from jaxmoe.routing_methods import METHODS
from tests import routing_oracle as oracle
from tests.routing_oracle import VARIANTS, case
from tests.test_gpu_route import DTYPES, MAPS, SPECIAL
from tests.test_route_and_plan import OPTIONS, _map, two_calls

pytestmark = pytest.mark.gpu

TARGET = "jaxmoe_route_plan_v1"
SIZES = (1, 8, 40, 60, 128, 160, 256, 384, 512, 896)


def _check(logits, options):
    """The bits of two calls, into poisoned memory, twice."""
    logits = jnp.asarray(logits)
    columns = options["top_k"] + options.get("num_shared_experts", 0)
    fused = jax.jit(lambda x: route_and_plan(x, **options))
    want = jax.jit(lambda x: two_calls(x, **options))(logits)
    before = _targets.execute_count(TARGET)
    for _ in range(2):
        poison((logits.shape[0] * columns,), jnp.int32)
        jax.tree.map(assert_equal, fused(logits), want)
    # a command buffer may replay the second
    assert before < _targets.execute_count(TARGET) <= before + 2


def _options(method, num_experts, top_k=8, groups=True, seed=0):
    """A call with all that the method takes."""
    top_k = 1 if method == "llama4" else min(top_k, num_experts)
    options = case(method, top_k)
    if oracle.RULES[method].bias:
        rng = np.random.default_rng(seed)
        options["bias"] = jnp.asarray(0.3 * rng.standard_normal(num_experts, np.float32))
    if groups and oracle.RULES[method].groups and num_experts % 4 == 0 and num_experts >= 32:
        options |= {"num_groups": 4, "top_groups": 3}
    return options


def _logits(seed, num_tokens, num_experts, dtype=jnp.float32):
    logits = np.random.default_rng(seed).standard_normal((num_tokens, num_experts), np.float32)
    return jnp.asarray(logits, dtype)


TURNS = [
    (method, size, (7, 100, 1100)[(i + j) % 3], DTYPES[(i + 2 * j) % 3])
    for i, method in enumerate(METHODS)
    for j, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("method", "num_experts", "num_tokens", "dtype"), TURNS)
def test_methods_and_sizes(method, num_experts, num_tokens, dtype):
    _check(_logits(num_experts, num_tokens, num_experts, dtype), _options(method, num_experts))


@pytest.mark.parametrize("num_tokens", [5, 70, 2200])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, num_tokens):
    logits, options = oracle.draw(1, 40, 64, VARIANTS[name])
    rows = np.random.default_rng(num_tokens).integers(0, 40, num_tokens)
    _check(logits[rows], options)


# (T, K) with 256 experts, where the form changes.
FORMS = [
    (0, 8),
    (1, 8),
    (8, 8),  # the most of one block
    (9, 8),  # two, the second with fewer
    (16, 8),
    (17, 8),  # four
    (32, 8),
    (33, 8),  # eight, the last without any
    (64, 8),
    (128, 8),  # the most of one kernel, a warp a token
    (129, 8),  # the kernels of both; every block of plan's counts all slots
    (131, 8),
    (256, 8),
    (256, 32),
    (200, 41),  # clusters count, as above 8192 rows
    (128, 60),  # one kernel: a chunk of 960 rows, half of the warps with two slots a lane
    (1024, 8),  # the last of that form
    (1025, 8),  # clusters count: 33 chunks of 256 rows, the last with 8, and 7 with none
    (257, 32),
    (2733, 3),  # a last slot that is no quad
    (4096, 8),  # every chunk full
    (4097, 8),  # chunks of 288
    (8192, 8),  # the most with one slot a lane
    (8193, 8),  # two, half of the last warp's without any
    (16384, 8),
    (16385, 8),  # more than 512 threads
    (32768, 8),  # the most that clusters count
    (32769, 8),  # a table, and chunks of two tiles
]


@pytest.mark.parametrize("method", ["renormalize", "deepseek_v3"])
@pytest.mark.parametrize(("num_tokens", "top_k"), FORMS)
def test_every_form(num_tokens, top_k, method):
    logits = _logits(num_tokens, num_tokens, 256)
    _check(logits, _options(method, 256, top_k))


@pytest.mark.parametrize("num_tokens", [6, 200, 3000])
@pytest.mark.parametrize(("num_experts", "top_k"), MAPS)
def test_thread_maps(num_experts, top_k, num_tokens):
    for method in ("topk", "sqrtsoftplus"):
        logits = _logits(top_k, num_tokens, num_experts, jnp.bfloat16)
        _check(logits, _options(method, num_experts, top_k))


@pytest.mark.parametrize("num_tokens", [7, 250, 1000, 5000])
@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"forced"}))
def test_options(name, num_tokens):
    rng = np.random.default_rng(num_tokens)
    arrays = {
        option: jnp.asarray(rng.standard_normal(16, np.float32))
        for option in ("bias", "expert_scale")
        if OPTIONS[name].get(option)
    }
    _check(_logits(num_tokens, num_tokens, 16), OPTIONS[name] | arrays)


@pytest.mark.parametrize("num_tokens", [7, 250, 5000])
def test_mask(num_tokens):
    mask = jnp.asarray(np.random.default_rng(num_tokens).random(num_tokens) < 0.6)
    logits = _logits(num_tokens, num_tokens, 64)
    options = case("deepseek_v3", 6, num_groups=4, top_groups=2, mask=mask, return_scores=True)
    _check(logits, options)
    shared = options | {"num_shared_experts": 1}  # two calls, as what they must equal
    fused = jax.jit(lambda x: route_and_plan(x, **shared))(logits)
    jax.tree.map(assert_equal, fused, jax.jit(lambda x: two_calls(x, **shared))(logits))
    assert fused[1].expert_offsets[-1] == 7 * mask.sum()


@pytest.mark.parametrize("num_tokens", [3, 100, 300, 4000])
@pytest.mark.parametrize("num_local", [1, 511, 512, 513, 1024, 1025, 2500])
def test_local_experts(num_tokens, num_local):
    """More local experts than threads of a cluster's block, than a window, than clusters count."""
    options = case("renormalize", 6, num_local_experts=num_local)
    expert_map = np.random.default_rng(num_local).permutation(max(num_local, 512))[:512]
    options["expert_map"] = jnp.asarray(expert_map, jnp.int32)
    _check(_logits(num_local, num_tokens, 512), options)


@pytest.mark.parametrize("num_tokens", [24, 240, 2400])
@pytest.mark.parametrize("num_experts", [16, 256, 512])
@pytest.mark.parametrize("method", ["renormalize", "deepseek_v3", "deepseek_v2", "softmax"])
def test_ties_and_special_values(method, num_experts, num_tokens):
    rng = np.random.default_rng(num_experts)
    logits = rng.choice(np.array(SPECIAL, np.float32), (num_tokens, num_experts))
    logits[::6] = rng.choice(np.array([0.0, -0.0], np.float32), logits[::6].shape)
    logits[1::6] = rng.integers(0, 3, logits[1::6].shape)
    logits[4], logits[5], logits[6], logits[7] = np.nan, -np.inf, np.inf, 0.0
    logits[8, 1:] = np.nan
    logits[9, :-1] = -np.inf
    _check(logits, _options(method, num_experts))


@pytest.mark.parametrize("num_tokens", [20, 1000])
def test_one_expert_for_all(num_tokens):
    logits = jnp.zeros((num_tokens, 128)).at[:, 5].set(1.0)
    _check(logits, case("renormalize", 1))


@pytest.mark.parametrize("num_tokens", [5, 40, 400, 1500])
def test_vmap_is_one_call(num_tokens):
    logits = _logits(0, 3 * num_tokens, 64).reshape(3, num_tokens, 64)
    valid = jnp.array([num_tokens, 3, 0], jnp.int32)
    bias = 0.1 * _logits(1, 1, 64)[0]
    options = case("deepseek_v3", 6, bias=bias, num_shared_experts=1)
    options |= {"expert_map": _map(65, 40), "num_local_experts": 40}

    def fn(x, v):
        return route_and_plan(x, num_valid_tokens=v, **options)

    before = _targets.execute_count(TARGET)
    got = jax.block_until_ready(jax.jit(jax.vmap(fn))(logits, valid))
    assert _targets.execute_count(TARGET) == before + 1
    for b in range(3):
        want = two_calls(logits[b], num_valid_tokens=valid[b], **options)
        jax.tree.map(lambda g, w, b=b: assert_equal(g[b], w), got, want)


def test_threads_whose_calls_want_other_shared_memory():
    """A kernel's limit is the process's: a small launch takes nothing from a large one's."""
    options = case("renormalize", 20)
    draws = [_logits(n, n, 512) for n in (8, 64)]
    many = jax.jit(lambda x: [route_and_plan(x + i, **options)[1] for i in range(64)])
    want = [jax.block_until_ready(many(x)) for x in draws]

    def run(index):
        return [jax.block_until_ready(many(draws[index])) for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        for index, got in enumerate(pool.map(run, range(2))):
            for plans in got:
                jax.tree.map(assert_equal, plans, want[index])


def test_gradient_is_that_of_route():
    logits = _logits(0, 50, 64)
    options = case("softmax", 4, norm_topk_prob=True)

    def gradient(fn):
        weights = lambda x: fn(x, **options)[0].weights  # noqa: E731
        return jax.jit(lambda x: jax.vjp(weights, x)[1](jnp.sin(weights(x))))(logits)[0]

    # the same formula, but a batch of one may be reduced in another order
    got, want = gradient(route_and_plan), gradient(two_calls)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert np.asarray(want).any()


@pytest.mark.parametrize("num_tokens", [5, 100, 500, 2000])
def test_command_buffers_capture_it(num_tokens):
    """Every form is recorded once and replayed, with other logits each time."""

    def fn(inputs):
        return [route_and_plan(x, top_k=6)[1].slot_to_row for x in inputs]

    graph = {
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
        "xla_gpu_graph_min_graph_size": 1,
    }
    draws = [[_logits([s, i], num_tokens, 64) for i in range(8)] for s in range(2)]
    captured = jax.jit(fn).lower(draws[0]).compile(graph)
    want = [
        [two_calls(x, top_k=6, method="renormalize")[1].slot_to_row for x in draw] for draw in draws
    ]
    for turn in range(6):
        jax.tree.map(assert_equal, captured(draws[turn % 2]), want[turn % 2])
    jax.block_until_ready(captured(draws[0]))
    before = _targets.execute_count(TARGET)
    for _ in range(10):  # operands elsewhere than before would be recorded again
        jax.tree.map(assert_equal, captured(draws[0]), want[0])
    replayed = 80 - (_targets.execute_count(TARGET) - before)
    assert replayed >= 40, f"{replayed} of 80 calls replayed without running the handler"


# Under the sanitizer: every form with each kind of thread map.


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [
        (3, 5, 5),
        (12, 256, 5),
        (33, 64, 5),
        (130, 256, 8),
        (40, 256, 20),
        (40, 510, 40),
        (300, 100, 7),
        (1030, 256, 8),
        (400, 512, 22),
        (40, 896, 16),
        (500, 33, 20),
    ],
)
@pytest.mark.parametrize("method", ["renormalize", "deepseek_v3"])
def test_sanitize_route_and_plan(method, num_tokens, num_experts, top_k):
    options = _options(method, num_experts, top_k) | {"num_shared_experts": 1}
    options |= {"expert_map": _map(num_experts + 1, 9), "num_local_experts": 9}
    logits = np.array(_logits(num_experts, num_tokens, num_experts))
    logits[2] = np.nan
    _check(logits, options | {"num_valid_tokens": num_tokens - 1})


@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", [9, 700])
def test_sanitize_the_route_kernel_behind_the_same_api(num_tokens):
    """route itself writes through the code that route_and_plan added: no padding, no columns."""
    logits = _logits(0, num_tokens, 64)
    got = jax.jit(lambda x: route(x, top_k=6))(logits)
    want = oracle.route(logits, top_k=6)
    np.testing.assert_array_equal(got.expert_ids, want.expert_ids)
