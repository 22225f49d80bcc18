"""The small CUDA kernels where their thread maps change: boundaries, units, garbage, repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import reference
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import (
    assert_close,
    assert_equal,
    expert_ids,
    normal,
    poison,
    routing_weights,
)

pytestmark = pytest.mark.gpu

NAN = np.nan
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
_plan = jax.jit(jaxmoe.plan, static_argnames=("num_experts", "expert_offset", "num_local_experts"))
_permute = jax.jit(jaxmoe.permute)
_finalize = jax.jit(jaxmoe.finalize)
_route = jax.jit(jaxmoe.route, static_argnames=("top_k", "method"))


def _sorted_slots(ids, num_experts):
    """Expert offsets, row_to_token and slot_to_row by NumPy's stable sort."""
    flat = np.asarray(ids).reshape(-1)
    here = (flat >= 0) & (flat < num_experts)
    key = np.where(here, flat, num_experts)
    offsets = np.searchsorted(np.sort(key), np.arange(num_experts + 1))
    slots = np.argsort(key, kind="stable")[: here.sum()]
    row_to_token, slot_to_row = np.full((2, flat.size), -1)
    row_to_token[: slots.size] = slots // ids.shape[1]
    slot_to_row[slots] = np.arange(slots.size)
    arrays = offsets, row_to_token, slot_to_row.reshape(ids.shape)
    return tuple(a.astype(np.int32) for a in arrays)


def _with_nan(x, rows):
    """Sets rows on the host: initcheck does not see how XLA fills the indices of its scatter."""
    host = np.array(x)
    host[rows] = NAN
    return jnp.asarray(host)


def _check_plan(ids, num_experts):
    poison((ids.size,), jnp.int32)
    got = _plan(jnp.asarray(ids), num_experts=num_experts)
    arrays = got.expert_offsets, got.row_to_token, got.slot_to_row
    jax.tree.map(assert_equal, arrays, _sorted_slots(ids, num_experts))
    jax.tree.map(assert_equal, got, _plan(jnp.asarray(ids), num_experts=num_experts))


@pytest.mark.parametrize("num_experts", [1, 33, 1024])
@pytest.mark.parametrize(
    "num_rows",
    [
        31,  # less than a warp
        33,  # a second warp with one slot
        512,  # the largest problem of one block
        513,  # a second block with one slot
        5000,  # ten blocks, the last not full
        8192,  # the largest whose blocks count all
        8193,  # the smallest that clusters count, the last chunk with one slot before seven of none
        10240,  # every chunk full
        32769,  # chunks of 288
        65536,  # chunks of 512, the most with one slot a thread
        65537,  # chunks of 544: two slots a thread, the last warp without any
        131073,  # chunks of 1056: more than 512 threads
        262144,  # the largest that clusters count
        262145,  # a table, the last chunk of one slot
    ],
)
def test_plan_of_every_number_of_slots_per_thread(num_rows, num_experts):
    rng = np.random.default_rng([num_rows, num_experts])
    _check_plan(rng.integers(-1, num_experts + 1, (num_rows, 1), np.int32), num_experts)


@pytest.mark.parametrize("kind", ["uniform", "one_expert", "with_invalid"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [
        (16384, 256, 8),  # chunks of 1024 rows, two slots a thread
        (2, 1025, 7),  # few rows, a window of one expert
        (700, 3000, 3),  # three windows, the last not full
        (4000, 3000, 3),  # the same with a table
        (36000, 16, 8),  # chunks of two tiles, the last chunk not full
        (33000, 1100, 8),  # tiles and windows
    ],
)
def test_plan_in_chunks_and_windows(kind, num_tokens, num_experts, top_k):
    rng = np.random.default_rng([num_tokens, num_experts])
    _check_plan(expert_ids(kind, rng, num_tokens, num_experts, top_k), num_experts)


@pytest.mark.parametrize("num_experts", [300, 1024, 1025])  # the last map stays outside
@pytest.mark.parametrize("num_tokens", [5, 700, 4203, 70000])
def test_plan_with_a_map(num_tokens, num_experts):
    _check_plan_with_a_map(num_tokens, num_experts)


def _check_plan_with_a_map(num_tokens, num_experts, num_local=40):
    rng = np.random.default_rng([num_tokens, num_experts])
    ids = _garbage_indices(rng, (num_tokens, 2), num_experts)
    table = _garbage_indices(rng, (num_experts,), num_local)
    known = (ids >= 0) & (ids < num_experts)
    local = np.where(known, table[np.where(known, ids, 0)], -1)
    poison((ids.size,), jnp.int32)
    sizes = {"num_experts": num_experts, "num_local_experts": num_local}
    got = _plan(jnp.asarray(ids), **sizes, expert_map=jnp.asarray(table))
    arrays = got.expert_offsets, got.row_to_token, got.slot_to_row
    jax.tree.map(assert_equal, arrays, _sorted_slots(local, num_local))


@pytest.mark.parametrize("num_tokens", [40, 1400, 3000, 3001])
def test_vmapped_plan_is_one_call(num_tokens):
    rng = np.random.default_rng(num_tokens)
    ids = np.stack([expert_ids("with_invalid", rng, num_tokens, 12, 3) for _ in range(5)])
    mapped = jax.jit(jax.vmap(lambda i: jaxmoe.plan(i, 12)))
    before = _targets.execute_count("jaxmoe_plan_v1")
    got = jax.block_until_ready(mapped(jnp.asarray(ids)))
    assert _targets.execute_count("jaxmoe_plan_v1") == before + 1
    for b in range(5):
        arrays = got.expert_offsets[b], got.row_to_token[b], got.slot_to_row[b]
        jax.tree.map(assert_equal, arrays, _sorted_slots(ids[b], 12))


def _garbage_indices(rng, shape, size):
    """Indices of which about a third lie outside [0, size), the edges of int32 among them."""
    info = np.iinfo(np.int32)
    outside = rng.choice(np.array([-1, info.min, info.max, size, size + 1], np.int32), shape)
    inside = rng.integers(0, max(size, 1), shape, np.int32)
    return np.where((rng.random(shape) < 1 / 3) | (size == 0), outside, inside).astype(np.int32)


def _plan_of(row_to_token, slot_to_row):
    """A plan of arrays that no `jaxmoe.plan` would return."""
    return jaxmoe.Plan(
        jnp.zeros((2,), jnp.int32), jnp.asarray(row_to_token), jnp.asarray(slot_to_row)
    )


def _check_permute(num_tokens, top_k, hidden, dtype):
    rng = np.random.default_rng([num_tokens, top_k, hidden])
    index = _garbage_indices(rng, (num_tokens * top_k,), num_tokens)
    # Slots that name their row, and others: what comes out depends on the index alone.
    slots = _garbage_indices(rng, (num_tokens, top_k), index.size)
    named = np.flatnonzero((index >= 0) & (index < num_tokens) & (rng.random(index.size) < 0.7))
    slots[index[named], rng.integers(0, top_k, named.size)] = named
    plan = _plan_of(index, slots)
    x = normal(rng, (num_tokens, hidden), dtype)
    x = _with_nan(x, num_tokens // 2)
    poison((index.size, hidden), dtype)
    got = _permute(x, plan)
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")  # NaN is copied like anything else
    rows = np.zeros((index.size, hidden), bits)
    valid = (index >= 0) & (index < num_tokens)
    rows[valid] = np.asarray(x).view(bits)[index[valid]]
    np.testing.assert_array_equal(np.asarray(got).view(bits), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden"),
    [
        (1, 1, 8),  # one unit
        (1, 8, 7168),  # more SMs than rows
        (37, 3, 2880),  # rows that are no multiple of a block of threads
        (4096, 2, 1024),  # several rounds of the grid
        (300, 4, 8),  # rows of one or two units: several rows a warp
        (65, 2, 12),  # 8-byte units in 2-byte types
        (65, 2, 6),  # 4-byte
        (65, 2, 5),  # 2-byte
        (3, 2, 1),  # rows of one element
    ],
)
def test_permute(num_tokens, top_k, hidden, dtype):
    _check_permute(num_tokens, top_k, hidden, dtype)


def test_permute_of_nothing():
    empty = _plan_of(np.zeros((0,), np.int32), np.zeros((0, 2), np.int32))
    assert _permute(jnp.zeros((0, 16), jnp.bfloat16), empty).shape == (0, 16)


def _check_finalize(num_tokens, top_k, hidden, dtype, residual):
    """Values by the tolerance rule; rows and weights that belong to no slot are NaN."""
    rng = np.random.default_rng([num_tokens, top_k, hidden])
    num_rows = num_tokens * top_k
    slots = _garbage_indices(rng, (num_tokens, top_k), num_rows)
    valid = (slots >= 0) & (slots < num_rows)
    weights = np.where(valid, routing_weights(rng, num_tokens, top_k), NAN).astype(np.float32)
    unused = np.setdiff1d(np.arange(num_rows), slots[valid])
    rows = _with_nan(normal(rng, (num_rows, hidden), dtype), unused)
    extra = normal(rng, (num_tokens, hidden), dtype) if residual else None
    plan = _plan_of(np.zeros((num_rows,), np.int32), slots)
    poison((num_tokens, hidden), dtype)
    got = _finalize(rows, plan, jnp.asarray(weights), residual=extra)
    naive = reference.finalize(
        rows, jnp.asarray(slots), jnp.asarray(weights), residual=extra, dtype=dtype
    )
    # in float64, because the kernel's own precision is that of the usual reference
    want = np.zeros((num_tokens, hidden))
    wide = np.asarray(rows, np.float64)
    for k in range(top_k):
        here = valid[:, k]
        want[here] += weights[here, k, None].astype(np.float64) * wide[slots[here, k]]
    assert_close(got, want if extra is None else want + np.asarray(extra, np.float64), naive)
    again = _finalize(rows, plan, jnp.asarray(weights), residual=extra)
    assert_equal(got, again)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden"),
    [
        (1, 8, 7168),  # one token over many SMs
        (1, 1, 8),  # one piece
        (64, 1, 2048),  # two loads in flight
        (200, 2, 4096),
        (33, 3, 2880),  # four loads in flight, one of them of no row
        (33, 5, 2880),  # eight loads in flight, three of them of no row
        (500, 8, 512),  # a block of threads covers several tokens
        (900, 9, 1024),  # more threads than run at once with eight loads: four, four and one
        (50, 9, 72),  # a second round of one load
        (40, 22, 96),
        (21, 4, 7),  # rows that are no multiple of 16 bytes
    ],
)
def test_finalize(num_tokens, top_k, hidden, dtype, residual):
    _check_finalize(num_tokens, top_k, hidden, dtype, residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finalize_keeps_nan_in_its_token(dtype):
    rng = np.random.default_rng(1)
    ids = jnp.asarray(expert_ids("uniform", rng, 40, 8, 4))
    plan = _plan(ids, num_experts=8)
    weights = jnp.asarray(routing_weights(rng, 40, 4))
    clean = normal(rng, (160, 64), dtype)
    dirty = clean.at[plan.slot_to_row[7, 2]].set(NAN)
    got, want = (np.asarray(_finalize(rows, plan, weights)) for rows in (dirty, clean))
    assert np.isnan(got[7]).all()
    others = np.arange(40) != 7
    assert_equal(got[others], want[others])


def test_finalize_rounds_once():
    # 1 + 3 * 2^-9 in bfloat16 (8 bits): every partial sum rounded would stay at 1
    rows = jnp.array([[1.0], [2.0**-9], [2.0**-9], [2.0**-9]], jnp.bfloat16) * jnp.ones(
        (1, 8), jnp.bfloat16
    )
    plan = _plan_of(np.zeros((4,), np.int32), np.arange(4, dtype=np.int32)[None])
    got = _finalize(rows, plan, jnp.ones((1, 4)))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.full((1, 8), 1 + 2.0**-7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden"), [(7, 1, 24), (33, 2, 2880), (300, 6, 40)]
)
def test_finalize_undoes_permute(num_tokens, top_k, hidden, dtype):
    rng = np.random.default_rng([num_tokens, hidden])
    ids = jnp.asarray(expert_ids("zipf", rng, num_tokens, 16, top_k))
    plan = _plan(ids, num_experts=16)
    x = normal(rng, (num_tokens, hidden), dtype)
    # one choice weighs 1, the others 0: a copy, bit for bit
    one = jnp.zeros((num_tokens, top_k)).at[:, top_k - 1].set(1.0)
    assert_equal(_finalize(_permute(x, plan), plan, one), x)


def test_every_op_runs_its_kernel():
    rng = np.random.default_rng(2)
    calls = {
        "jaxmoe_route_v2": lambda x, _: _route(x, top_k=2),
        "jaxmoe_plan_v1": lambda _, plan: _plan(plan.slot_to_row, num_experts=4),
        "jaxmoe_permute_v2": _permute,
        "jaxmoe_finalize_v1": lambda x, plan: _finalize(
            jnp.repeat(x, 2, 0), plan, jnp.ones((6, 2), jnp.float32)
        ),
        "jaxmoe_quantize_v1": lambda x, _: jaxmoe.quantize_tokens(x, "fp8_channel"),
    }
    x = normal(rng, (6, 16), jnp.bfloat16)
    plan = _plan(jnp.asarray(expert_ids("uniform", rng, 6, 4, 2)), num_experts=4)
    for target, call in calls.items():
        before = _targets.execute_count(target)
        jax.block_until_ready(call(x, plan))
        assert _targets.execute_count(target) > before, target


# Under the sanitizer: every kernel once, with garbage where the API takes data.


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(11, 5), (700, 9), (3, 1030), (4203, 9), (4200, 1030)]
)
def test_sanitize_plan(num_tokens, num_experts):
    rng = np.random.default_rng(num_tokens)
    _check_plan(_garbage_indices(rng, (num_tokens, 2), num_experts), num_experts)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(11, 50), (4203, 300), (4203, 1025)])
def test_sanitize_plan_with_a_map(num_tokens, num_experts):
    _check_plan_with_a_map(num_tokens, num_experts)


@pytest.mark.sanitizer
@pytest.mark.parametrize("hidden", [24, 12, 6, 5])
def test_sanitize_permute(hidden):
    _check_permute(9, 3, hidden, jnp.bfloat16)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("top_k", "hidden"), [(2, 40), (3, 40), (5, 40), (3, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitize_finalize(top_k, hidden, dtype):
    _check_finalize(9, top_k, hidden, dtype, residual=True)
