"""The reference against numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import reference
from jaxmoe._testing import assert_close, relative_error

NAN, INF = np.nan, np.inf


def _i32(values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        # 1 / (1 + exp(2 - 3)) and 1 / (1 + exp(3 - 2)); two equal logits share evenly
        ("renormalize", [[0.7310586, 0.2689414], [0.5, 0.5]]),
        # exp(3) / (exp(1) + exp(3) + exp(2)), exp(2) / (same); three equal logits
        ("softmax", [[0.6652410, 0.2447285], [0.3333333, 0.3333333]]),
    ],
)
def test_route(method, weights):
    logits = jnp.array([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    expert_ids, got = reference.route(logits, top_k=2, method=method)
    np.testing.assert_array_equal(expert_ids, [[1, 2], [0, 1]])
    np.testing.assert_allclose(got, weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "expert_ids", "softmax", "renormalize"),
    [
        ([NAN, 1.0, NAN], [1, -1], [1.0, 0.0], [1.0, 0.0]),
        ([NAN, NAN, NAN], [-1, -1], [0.0, 0.0], [0.0, 0.0]),
        ([-INF, NAN, 0.0], [2, 0], [1.0, 0.0], [1.0, 0.0]),
        ([-INF, -INF, -INF], [0, 1], [0.0, 0.0], [0.0, 0.0]),
        ([0.0, INF, 0.0], [1, 0], [NAN, NAN], [NAN, NAN]),
        ([-0.0, 0.0, -0.0], [0, 1], [1 / 3, 1 / 3], [0.5, 0.5]),
    ],
)
def test_route_special_values(logits, expert_ids, softmax, renormalize):
    for method, weights in (("softmax", softmax), ("renormalize", renormalize)):
        ids, got = reference.route(jnp.array([logits]), top_k=2, method=method)
        np.testing.assert_array_equal(ids, [expert_ids])
        np.testing.assert_allclose(got, [weights], rtol=1e-6)


def test_plan():
    # slots in order: 2 1 | 0 2 | 2 -1; expert 0 gets slot 2, 1 gets slot 1, 2 gets slots 0 3 4
    offsets, row_to_token, slot_to_row = reference.plan(_i32([[2, 1], [0, 2], [2, -1]]), 3)
    np.testing.assert_array_equal(offsets, [0, 1, 2, 5])
    np.testing.assert_array_equal(row_to_token, [1, 0, 0, 1, 2, -1])
    np.testing.assert_array_equal(slot_to_row, [[2, 1], [0, 3], [4, -1]])


def test_plan_window_and_map():
    ids = _i32([[2, 1], [0, 2], [3, 7]])
    window = reference.plan(ids, 4, expert_offset=1, num_local_experts=2)
    np.testing.assert_array_equal(window[0], [0, 1, 3])
    np.testing.assert_array_equal(window[1], [0, 0, 1, -1, -1, -1])
    np.testing.assert_array_equal(window[2], [[1, 0], [-1, 2], [-1, -1]])
    # expert 2 is local 0, expert 1 is local 1: the order of the two groups is exchanged
    mapped = reference.plan(ids, 4, num_local_experts=2, expert_map=_i32([-1, 1, 0, 5]))
    np.testing.assert_array_equal(mapped[0], [0, 2, 3])
    np.testing.assert_array_equal(mapped[1], [0, 1, 0, -1, -1, -1])
    np.testing.assert_array_equal(mapped[2], [[0, 2], [-1, 1], [-1, -1]])


def test_permute():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    rows = reference.permute(x, _i32([1, 0, -1, 2, 1]))
    np.testing.assert_array_equal(rows, [[3, 4], [1, 2], [0, 0], [0, 0], [3, 4]])


LHS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], np.float32)
RHS = np.array([[[1.0], [0.0]], [[0.0], [1.0]], [[1.0], [1.0]]], np.float32)  # x, y, x + y


@pytest.mark.parametrize(
    ("sizes", "offset", "out"),
    [
        ([1, 2, 1], None, [1, 4, 6, 15]),
        ([2, 0, 1], None, [1, 3, 11, 0]),  # an empty group; the last row in no group
        ([0, 0, 4], None, [3, 7, 11, 15]),
        ([1, 1, 1, 1], [1], [0, 3, 6, 15]),  # rhs[0] belongs to group 1
        ([-3, 2, 9], None, [2, 4, 11, 15]),  # negative is 0, too large is cut
    ],
)
def test_grouped_gemm(sizes, offset, out):
    offset = None if offset is None else _i32(offset)
    for layout, rhs in (("kn", RHS), ("nk", RHS.swapaxes(1, 2))):
        got = reference.grouped_gemm(
            jnp.asarray(LHS),
            jnp.asarray(rhs),
            _i32(sizes),
            group_offset=offset,
            weight_layout=layout,
        )
        np.testing.assert_array_equal(got[:, 0], out)


def test_grouped_gemm_bias():
    bias = jnp.array([[10.0], [20.0], [30.0]])
    got = reference.grouped_gemm(jnp.asarray(LHS), jnp.asarray(RHS), _i32([1, 1, 1]), bias=bias)
    np.testing.assert_array_equal(got[:, 0], [11, 24, 41, 0])


def test_finalize():
    rows = jnp.array([[1.0], [10.0], [100.0], [NAN]])
    slots = _i32([[0, 2], [1, -1], [4, -5]])
    weights = jnp.array([[2.0, 0.5], [3.0, 7.0], [1.0, 1.0]])
    got = reference.finalize(rows, slots, weights, residual=jnp.array([[1.0], [2.0], [3.0]]))
    np.testing.assert_array_equal(got, [[53], [32], [3]])


def _two_experts():
    """Expert 0 swaps the halves of x, expert 1 doubles x; H = I = 2, not gated."""
    w1 = jnp.array([[[0.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 2.0]]])
    return w1, jnp.stack([jnp.eye(2), jnp.eye(2)])


def test_moe_mlp():
    w1, w2 = _two_experts()
    x = jnp.array([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]])
    ids, weights = _i32([[0, 1], [1, 9], [-1, 0]]), jnp.array([[1.0, 10.0], [1.0, 5.0], [5.0, 0.5]])
    got = reference.moe_mlp(x, ids, weights, w1, w2, activation="identity")
    np.testing.assert_array_equal(got, [[18, -39], [6, 8], [3, 2.5]])
    got = reference.moe_mlp(x, ids, weights, w1, w2, activation="relu2", residual=x)
    np.testing.assert_array_equal(got, [[1 + 40, -2 + 1], [3 + 36, 4 + 64], [5 + 18, 6 + 12.5]])


def test_moe_mlp_window_and_map():
    w1, w2 = _two_experts()
    x = jnp.array([[1.0, 2.0]])
    ids, weights = _i32([[3, 4]]), jnp.array([[1.0, 10.0]])
    window = {"expert_offset": 3}
    mapped = {"expert_map": _i32([-1, -1, -1, 1, 0])}
    for options, want in ((window, [22, 41]), (mapped, [22, 14])):
        got = reference.moe_mlp(x, ids, weights, w1, w2, activation="identity", **options)
        np.testing.assert_array_equal(got, [want])


@pytest.mark.parametrize(
    ("gate_up", "columns"),
    [("gate_up", [0, 1, 2, 3]), ("up_gate", [2, 3, 0, 1]), ("interleaved", [0, 2, 1, 3])],
)
def test_moe_mlp_gated(gate_up, columns):
    # one expert, x = [1]; gate = [1, 2], up = [10, 100] from weights and biases together
    gate_then_up = np.array([1.0, 1.5, 4.0, 60.0], np.float32)
    bias = np.array([0.0, 0.5, 6.0, 40.0], np.float32)
    w1 = jnp.asarray(gate_then_up[columns])[None, None, :]
    b1 = jnp.asarray(bias[columns])[None, :]
    w2 = jnp.array([[[1.0], [0.001]]])
    silu = 1.0 / (1.0 + np.exp(-1.0)), 2.0 / (1.0 + np.exp(-2.0))
    want = 2.0 * (10.0 * silu[0] + 0.1 * silu[1] + 7.0)
    for layout in ("kn", "nk"):
        if layout == "nk":
            w1, w2 = w1.swapaxes(1, 2), w2.swapaxes(1, 2)
        got = reference.moe_mlp(
            jnp.ones((1, 1)),
            _i32([[0]]),
            jnp.array([[2.0]]),
            w1,
            w2,
            b_gate_up=b1,
            b_down=jnp.array([[7.0]]),
            gate_up=gate_up,
            weight_layout=layout,
        )
        np.testing.assert_allclose(got, [[want]], rtol=1e-6)


def test_moe_mlp_keeps_nan_where_it_is():
    w1, w2 = _two_experts()
    w1 = w1.at[1].set(NAN)
    x = jnp.array([[1.0, 2.0], [NAN, 1.0], [3.0, 4.0]])
    got = reference.moe_mlp(x, _i32([[0], [0], [1]]), jnp.ones((3, 1)), w1, w2, activation="relu")
    np.testing.assert_array_equal(got, [[2, 1], [NAN, NAN], [NAN, NAN]])


def test_low_precision_is_the_naive_formula():
    x = jnp.full((1, 3), 1.0, jnp.bfloat16)
    slots, weights = _i32([[0, 1, 2]]), jnp.array([[1.0, 1 / 256, 1 / 256]])
    rows = jnp.ones((3, 1), jnp.bfloat16)
    assert reference.finalize(rows, slots, weights)[0, 0] == 1.0 + 2 / 256
    assert reference.finalize(rows, slots, weights, dtype=x.dtype)[0, 0] == 1.0  # both round down


def test_assert_close_follows_the_rule():
    ref = np.array([1.0, 2.0, -3.0])
    naive = ref + np.array([0.0, 0.1, 0.0])
    out = jnp.asarray(ref, jnp.float16)
    assert_close(out, ref, naive)
    assert_close(out + jnp.float16(0.19), ref, naive)
    with pytest.raises(AssertionError, match=r"error 0\.2.* more than 0\.204"):
        assert_close(out + jnp.float16(0.22), ref, naive)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_close(out[:2], ref, naive)


def test_assert_close_judges_values_that_are_not_finite():
    ref = np.array([NAN, 1e30, -1e30, 1.0])
    good = jnp.array([NAN, INF, -INF, 1.0], jnp.float16)
    assert_close(good, ref, ref)
    for i, wrong in enumerate((1.0, 65504.0, INF, NAN)):
        with pytest.raises(AssertionError, match="not finite"):
            assert_close(good.at[i].set(wrong), ref, ref)


def test_relative_error():
    assert relative_error(jnp.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_error(np.ones(2), np.zeros(2)) == INF


def test_reference_is_differentiable():
    w1, w2 = _two_experts()
    x, weights = jnp.array([[1.0, -2.0]]), jnp.array([[1.0, 10.0]])

    def loss(x, weights):
        return reference.moe_mlp(x, _i32([[0, 1]]), weights, w1, w2, activation="identity").sum()

    dx, dweights = jax.grad(loss, (0, 1))(x, weights)
    np.testing.assert_array_equal(dx, [[21, 21]])  # 1 * swap + 10 * double
    np.testing.assert_array_equal(dweights, [[-1, -2]])
