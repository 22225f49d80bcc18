"""plan: exact order, windows, maps, garbage ids, vmap, refusals."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxmoe import reference
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import (
    INVALID_IDS,
    MODELS,
    ROUTINGS,
    assert_equal,
    assert_vmap_is_loop,
    expert_ids,
    poison,
)
from jaxmoe.plan import Plan, plan, plan_scratch_size

STATIC = ("num_experts", "expert_offset", "num_local_experts")
_plan = jax.jit(plan, static_argnames=STATIC)
_reference = jax.jit(reference.plan, static_argnames=STATIC)


def _i32(values):
    return jnp.asarray(values, jnp.int32)


def _arrays(p):
    return p.expert_offsets, p.row_to_token, p.slot_to_row


def _check(ids, num_experts, **options):
    got = _plan(ids, num_experts=num_experts, **options)
    names = {"expert_offset": "offset", "num_local_experts": "local"}
    want = _stable_sort(ids, num_experts, **{names.get(n, n): v for n, v in options.items()})
    jax.tree.map(assert_equal, _arrays(got), want)
    jax.tree.map(assert_equal, got, _plan(ids, num_experts=num_experts, **options))
    return got


def _stable_sort(ids, num_experts, offset=0, local=None, expert_map=None):
    """The plan by Python's own stable sort: an oracle of any size, with nothing to compile."""
    ids = np.asarray(ids, np.int64)
    local = num_experts - offset if local is None else local
    flat, top_k = ids.reshape(-1), ids.shape[1]
    exists = (flat >= 0) & (flat < num_experts)
    known = np.where(exists, flat, 0)
    group = known - offset if expert_map is None else np.asarray(expert_map)[known]
    here = exists & (group >= 0) & (group < local)
    slots = [s for s in np.argsort(np.where(here, group, local), kind="stable") if here[s]]
    row_to_token, slot_to_row = np.full(flat.size, -1), np.full(flat.size, -1)
    row_to_token[: len(slots)] = np.array(slots, int) // max(top_k, 1)
    slot_to_row[slots] = np.arange(len(slots))
    sizes = np.bincount(group[here], minlength=local)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return tuple(
        a.astype(np.int32) for a in (offsets, row_to_token, slot_to_row.reshape(ids.shape))
    )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [
        (0, 3, 2),  # no tokens
        (1, 1, 1),  # every count is 1
        (5, 4, 4),  # K = E
        (37, 11, 3),  # nothing is a power of two
        (3, 64, 2),  # more experts than rows
    ],
)
def test_matches_reference(routing, num_tokens, num_experts, top_k):
    ids = _i32(expert_ids(routing, np.random.default_rng(7), num_tokens, num_experts, top_k))
    got = _check(ids, num_experts)
    jax.tree.map(assert_equal, _arrays(got), _reference(ids, num_experts=num_experts))


@pytest.mark.parametrize(
    "options",
    [
        {"expert_offset": 2},
        {"expert_offset": 7},
        {"num_local_experts": 1},
        {"expert_offset": 3, "num_local_experts": 4},
        {"expert_map": [3, -1, 0, 9, 1, -(2**31), 2, 2**31 - 1], "num_local_experts": 4},
        {"expert_map": [-1] * 8, "num_local_experts": 2},
        {"expert_map": [0, 0, 1, 1, 2, 2, 3, 3]},  # two experts may share a local one
    ],
)
def test_local_experts(options):
    ids = _i32(expert_ids("with_invalid", np.random.default_rng(8), 19, 8, 3))
    if "expert_map" in options:
        options = options | {"expert_map": _i32(options["expert_map"])}
    _check(ids, 8, **options)


def test_windows_of_all_devices_cover_every_row():
    ids = _i32(expert_ids("uniform", np.random.default_rng(9), 21, 12, 3))
    whole = _check(ids, 12)
    windows = [_plan(ids, num_experts=12, expert_offset=o, num_local_experts=4) for o in (0, 4, 8)]
    assert_equal(jnp.concatenate([w.group_sizes for w in windows]), whole.group_sizes)
    rows = [w.row_to_token[: int(w.expert_offsets[-1])] for w in windows]
    assert_equal(jnp.concatenate(rows), whole.row_to_token)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=st.data())
def test_random_ids_and_maps(data):
    num_tokens, top_k, num_experts = data.draw(st.sampled_from([(4, 2, 3), (1, 5, 2), (6, 1, 9)]))
    any_id = st.one_of(st.integers(-2, num_experts + 1), st.sampled_from(INVALID_IDS))
    count = num_tokens * top_k
    ids = np.reshape(
        data.draw(st.lists(any_id, min_size=count, max_size=count)), (num_tokens, top_k)
    )
    expert_map = data.draw(st.lists(any_id, min_size=num_experts, max_size=num_experts))
    _check(_i32(ids), num_experts, expert_map=_i32(expert_map), num_local_experts=2)
    _check(_i32(ids), num_experts, expert_offset=1, num_local_experts=1)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_properties(routing):
    ids = _i32(expert_ids(routing, np.random.default_rng(10), 33, 10, 4))
    p = _plan(ids, num_experts=10)
    used = int(p.expert_offsets[-1])
    assert used == int(((ids >= 0) & (ids < 10)).sum()) == int(p.group_sizes.sum())
    slot_to_row, row_to_token = np.asarray(p.slot_to_row), np.asarray(p.row_to_token)
    assert sorted(slot_to_row[slot_to_row >= 0]) == list(range(used))
    tokens, ks = np.nonzero(slot_to_row >= 0)
    np.testing.assert_array_equal(row_to_token[slot_to_row[tokens, ks]], tokens)
    group_of_row = np.repeat(np.arange(10), np.asarray(p.group_sizes))
    np.testing.assert_array_equal(group_of_row[slot_to_row[tokens, ks]], ids[tokens, ks])
    np.testing.assert_array_equal(row_to_token[used:], -1)


def test_renaming_experts_moves_groups_only():
    rng = np.random.default_rng(11)
    ids, new = expert_ids("zipf", rng, 17, 6, 2), rng.permutation(6)
    p, q = _plan(_i32(ids), num_experts=6), _plan(_i32(new[ids]), num_experts=6)
    for e in range(6):
        rows = (
            np.asarray(a.row_to_token)[int(a.expert_offsets[i]) : int(a.expert_offsets[i + 1])]
            for a, i in ((p, e), (q, new[e]))
        )
        np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize(
    ("ids_axis", "map_axis"),
    [(0, None), (1, None), (2, None), (None, 0), (None, 1), (1, 1), (2, 0)],
)
def test_vmap(ids_axis, map_axis):
    rng = np.random.default_rng(12)
    ids = np.stack([expert_ids("with_invalid", rng, 6, 5, 2) for _ in range(3)])
    maps = rng.integers(-2, 5, (3, 5))
    args = tuple(
        _i32(a[0] if axis is None else np.moveaxis(a, 0, axis))
        for a, axis in ((ids, ids_axis), (maps, map_axis))
    )
    fn = jax.jit(lambda i, m: plan(i, 5, num_local_experts=3, expert_map=m))
    assert_vmap_is_loop(fn, args, (ids_axis, map_axis))


def test_vmap_of_vmap():
    rng = np.random.default_rng(13)
    ids = _i32(
        np.stack([expert_ids("uniform", rng, 4, 6, 2) for _ in range(6)]).reshape(2, 3, 4, 2)
    )
    fn = functools.partial(plan, num_experts=6, expert_offset=2)
    assert_vmap_is_loop(jax.vmap(fn), (ids,), (0,))


def test_is_a_pytree_without_derivative():
    ids = _i32([[0, 1]])
    p, tangent = jax.jvp(
        lambda x: (plan(ids + x.astype(jnp.int32), 3), x), (jnp.ones(()),), (jnp.ones(()),)
    )
    assert isinstance(p[0], Plan)
    np.testing.assert_array_equal(p[0].expert_offsets, [0, 0, 1, 2])
    assert tangent[1] == 1 and tangent[0].expert_offsets.dtype == jax.dtypes.float0


def test_no_work_for_each_expert():
    """Needs no memory for T * K * E numbers: neither time nor space may grow with E."""
    compiled = _plan.lower(jax.ShapeDtypeStruct((4096, 8), jnp.int32), num_experts=512).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 4096 * 8


def test_scratch_size():
    assert plan_scratch_size(3, 8192, 3000) == 1
    assert plan_scratch_size(3, 8193, 1024) == 1
    assert plan_scratch_size(2, 8193, 1025) == 2 * 17 * 1025  # chunks of 512 rows
    assert plan_scratch_size(1, 32768, 1025) == 64 * 1025
    assert plan_scratch_size(1, 32769, 1025) == 33 * 1025  # of 1024
    assert plan_scratch_size(1, 131072, 1025) == 64 * 1025  # of 2048
    assert plan_scratch_size(1, 131073, 1025) == 65 * 1025
    assert plan_scratch_size(1, 2**18, 1024) == 1
    assert plan_scratch_size(1, 2**18, 1025) == 128 * 1025
    assert plan_scratch_size(1, 2**18 + 1, 4) == 65 * 4  # of 4096
    assert plan_scratch_size(1, 2**31 - 1, 4) == 128 * 4


def test_lowers_for_cuda_with_scratch():
    ids = jax.ShapeDtypeStruct((40000, 8), jnp.int32)
    fn = jax.jit(lambda i: plan(i, 16, expert_offset=4, num_local_experts=8))
    with _targets.force_cuda_lowering():
        text = fn.trace(ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jaxmoe_plan_v1") == 1
    assert "num_experts = 16 : i64" in text and "expert_offset = 4 : i64" in text
    assert f"tensor<{plan_scratch_size(1, 320000, 8)}xi32>" in text


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda ids: plan(ids[0], 4),
            ValueError,
            r"jaxmoe\.plan: expert_ids must have 2 axes \[T,K\], not 1\. Got expert_ids: i32\[2\]",
        ),
        (
            lambda ids: plan(ids.astype(jnp.float32), 4),
            TypeError,
            r"expert_ids\.dtype=f32 must be i32",
        ),
        (lambda ids: plan(ids, 0), ValueError, r"num_experts=0 must be in \[1, 2147483646\]"),
        (lambda ids: plan(ids, 4.0), TypeError, r"num_experts must be a Python int"),
        (lambda ids: plan(ids, True), TypeError, r"num_experts must be a Python int"),
        (
            lambda ids: plan(ids, 4, expert_offset=4),
            ValueError,
            r"expert_offset=4 must be in \[0, 3\]; give expert_map if it depends on the device",
        ),
        (
            lambda ids: jax.jit(lambda o: plan(ids, 4, expert_offset=o))(1),
            TypeError,
            r"expert_offset must be a Python int .*; give expert_map if",
        ),
        (
            lambda ids: plan(ids, 4, expert_offset=2, num_local_experts=3),
            ValueError,
            r"num_local_experts=3 must be in \[1, 2\]; num_experts=4, expert_offset=2",
        ),
        (
            lambda ids: plan(ids, 4, expert_map=jnp.zeros(3, jnp.int32)),
            ValueError,
            r"expert_map\.shape\[0\]=3 must be 4 \(num_experts\)\. Got expert_map: i32\[3\]",
        ),
        (
            lambda ids: plan(ids, 4, expert_map=jnp.zeros(4)),
            TypeError,
            r"expert_map\.dtype=f32 must be i32",
        ),
        (
            lambda ids: plan(ids, 4, expert_offset=1, expert_map=jnp.zeros(4, jnp.int32)),
            ValueError,
            r"expert_offset=1 must be 0 if expert_map is given",
        ),
        (
            lambda _: jax.eval_shape(
                lambda i: plan(i, 4), jax.ShapeDtypeStruct((2**30, 2), jnp.int32)
            ),
            ValueError,
            r"T \* K = 2147483648 must be at most 2147483647",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(_i32([[0, 1], [2, 3]]))


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [
        (0, 8, 2),
        (1, 128, 8),
        (64, 8, 8),  # the largest problem of one thread block
        (513, 1, 1),  # the smallest of several
        (1024, 8, 8),  # the largest of one kernel
        (2731, 8, 3),  # the smallest that clusters count, in 33 chunks, of which 7 are empty
        (4096, 128, 8),
        (33, 1025, 3),  # more experts than threads of a block
        (2731, 1025, 3),  # more than clusters count: the smallest of two kernels
        (65543, 11, 1),  # chunks of 544 rows, two a lane
        (16384, 256, 8),
        (16385, 600, 8),  # blocks of more than 512 threads, for rows and for experts
        (32768, 300, 8),  # the most that clusters count
        (87382, 40, 3),  # chunks of several tiles
    ],
)
def test_kernel(routing, num_tokens, num_experts, top_k):
    ids = expert_ids(routing, np.random.default_rng(14), num_tokens, num_experts, top_k)
    half = max(1, num_experts // 2)
    new = np.random.default_rng(15).permutation(num_experts) - 1
    for args in ((0, None, None), (num_experts - half, half, None), (0, half, new)):
        offset, local, expert_map = args
        poison((num_tokens * top_k,), jnp.int32)
        got = _plan(
            _i32(ids),
            num_experts=num_experts,
            expert_offset=offset,
            num_local_experts=local,
            expert_map=None if expert_map is None else _i32(expert_map),
        )
        want = _stable_sort(ids, num_experts, offset, local, expert_map)
        jax.tree.map(assert_equal, _arrays(got), want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [5, 1500, 3001, 70000])
def test_kernel_batched(num_tokens):
    rng = np.random.default_rng(16)
    ids = np.stack([expert_ids("with_invalid", rng, num_tokens, 24, 4) for _ in range(3)])
    got = jax.jit(jax.vmap(lambda i: plan(i, 24, expert_offset=8)))(_i32(ids))
    for b in range(3):
        one = jax.tree.map(lambda a, b=b: a[b], got)
        jax.tree.map(assert_equal, _arrays(one), _stable_sort(ids[b], 24, 8))


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("num_tokens", [9, 2100])
def test_kernel_garbage_ids(num_tokens):
    rng = np.random.default_rng(17)
    ids = rng.integers(-(2**31), 2**31, (num_tokens, 2), np.int64).astype(np.int32)
    ids[::3] = rng.integers(0, 7, (len(ids[::3]), 2))
    garbage_map = rng.integers(-(2**31), 2**31, 7, np.int64).astype(np.int32)
    garbage_map[2:4] = 0, 1
    jax.tree.map(assert_equal, _arrays(_plan(_i32(ids), num_experts=7)), _stable_sort(ids, 7))
    got = _plan(_i32(ids), num_experts=7, expert_map=_i32(garbage_map), num_local_experts=2)
    jax.tree.map(assert_equal, _arrays(got), _stable_sort(ids, 7, 0, 2, garbage_map))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_kernel_on_models(model):
    layer = MODELS[model]
    ids = expert_ids("zipf", np.random.default_rng(18), 1024, layer.num_experts, layer.top_k)
    got = _plan(_i32(ids), num_experts=layer.num_experts)
    jax.tree.map(assert_equal, _arrays(got), _stable_sort(ids, layer.num_experts))
