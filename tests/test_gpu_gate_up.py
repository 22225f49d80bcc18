"""The first product of a training step on a GPU: every tile, activation and order, against XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import GemmConfig, Swiglu, _gemm
from jaxmoe._gemm.gate_up import gate_up_p
from jaxmoe._gemm.tiles import ONLY_PROMOTED, TILES
from jaxmoe._testing import RARE, assert_close, assert_equal, normal, poison
from jaxmoe.activation import ACTIVATIONS, GATE_UP_ORDERS

pytestmark = pytest.mark.gpu

FORMS = Swiglu(1.702, 1.0, 1.5), *RARE
ACTS = (*ACTIVATIONS.values(), *FORMS)
ORDERED = [(a, o) for a in ACTS for o in (GATE_UP_ORDERS if a.gated else GATE_UP_ORDERS[:1])]
HIDDEN, INTER, E = 136, 200, 5  # columns that end inside every tile
SIZES = np.array([0, 37, 1, 300, 141], np.int32)  # one expert without rows; rows of no expert


def groups(sizes, rows):
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
    assert sizes.sum() < rows
    return jnp.asarray(starts), jnp.asarray(sizes)


def weight(rng, k, n, layout, dtype):
    return normal(rng, (E, k, n) if layout == "kn" else (E, n, k), dtype) * k**-0.5


def on_cpu(fn, args, dtype):
    """`fn` of the arguments on the CPU, those of two bytes in `dtype`."""
    host = jax.device_put(args, jax.devices("cpu")[0])
    cast = lambda a: a.astype(dtype) if a.dtype.itemsize == 2 else a  # noqa: E731
    return jax.jit(fn)(*jax.tree.map(cast, host))


def check(op, fn, args, **params):
    """Runs twice over poisoned memory, compares with the pure JAX function in float32."""
    run = jax.jit(functools.partial(op, **params))
    poison((2048, 1024), jnp.float32)
    ours = run(*args)
    poison((2048, 1024), jnp.float32)
    jax.tree.map(assert_equal, run(*args), ours)
    fn = functools.partial(fn, **params)
    naive = on_cpu(fn, args, args[0].dtype)
    jax.tree.map(assert_close, ours, on_cpu(fn, args, jnp.float32), naive)
    covered = int(SIZES.sum())
    assert not any(np.asarray(a[covered:], np.float32).any() for a in ours)
    return ours


def gate_up_args(rng, act, layout, dtype, gather, rows=520):
    n = 2 * INTER if act.gated else INTER
    w, bias = weight(rng, HIDDEN, n, layout, dtype), normal(rng, (E, n), dtype)
    starts, sizes = groups(SIZES, rows)
    if not gather:
        return normal(rng, (rows, HIDDEN), dtype), None, None, w, bias, starts, sizes
    # 260 tokens of two slots, in a random order; the rows past the groups are of no slot
    order = rng.permutation(rows).astype(np.int32)
    slots = np.full(rows, -1, np.int32)
    slots[order] = np.where(np.arange(rows) < SIZES.sum(), np.arange(rows), -1)
    token = np.where(np.arange(rows) < SIZES.sum(), order // 2, -1).astype(np.int32)
    x = normal(rng, (rows // 2, HIDDEN), dtype)
    return x, jnp.asarray(token), jnp.asarray(slots.reshape(-1, 2)), w, bias, starts, sizes


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout, dtype", (("kn", jnp.bfloat16), ("nk", jnp.float16)))
@pytest.mark.parametrize("tile", sorted(set(TILES) - ONLY_PROMOTED), ids=str)
def test_every_tile(tile, layout, dtype):
    rng = np.random.default_rng(1)
    act, given = (
        ACTIVATIONS["swiglu"],
        {"gate_up": "gate_up", "weight_layout": layout, "precision": None},
    )
    config = GemmConfig(*tile, gather=True)
    for gather in (True, False):
        args = gate_up_args(rng, act, layout, dtype, gather)
        config = dataclasses.replace(config, gather=gather)
        check(gate_up_p, _gemm.gate_up._gate_up, args, activation=act, config=config, **given)


@pytest.mark.parametrize("act, order", ORDERED, ids=lambda p: getattr(p, "name", p))
def test_every_activation_and_order(act, order):
    rng = np.random.default_rng(2)
    given = {"activation": act, "gate_up": order, "weight_layout": "kn", "precision": None}
    config = GemmConfig(256, 160, gather=True)
    args = gate_up_args(rng, act, "kn", jnp.bfloat16, gather=True)
    check(gate_up_p, _gemm.gate_up._gate_up, args, config=config, **given)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tile", ((128, 8), (128, 32), (256, 160), (256, 160, 2)), ids=str)
def test_garbage_groups_and_indices_stay_in_bounds(tile):
    """Starts, sizes and indices of any value: other rows are 0, a row of no token has z = bias."""
    rng = np.random.default_rng(3)
    act = ACTIVATIONS["swiglu"]
    given = {"activation": act, "gate_up": "interleaved", "weight_layout": "nk", "precision": None}
    big = np.iinfo(np.int32).max
    bad = [(0, 37), (-5, 1), (500, big), (big, big), (-big, 141)]
    starts, sizes = (jnp.asarray([b[i] for b in bad], jnp.int32) for i in (0, 1))
    x, token, slots, w, bias, *_ = gate_up_args(rng, act, "nk", jnp.bfloat16, gather=True)
    no_token = jnp.asarray([-1, len(x), -big - 1, big], jnp.int32)
    good = jnp.maximum(token, 0)
    config = GemmConfig(*tile, gather=True)
    run = jax.jit(functools.partial(gate_up_p, config=config, **given))
    clean = run(x, good, slots, w, bias, starts, sizes)
    dirty = run(x, good.at[8:12].set(no_token), slots, w, bias, starts, sizes)
    assert_equal(dirty[1][8:12], jnp.broadcast_to(bias[0], (4, bias.shape[1])))
    for a, b in zip(dirty, clean, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(a).all() and a[500:].any() and not a[37:500].any()
        assert_equal(np.delete(a, np.s_[8:12], 0), np.delete(b, np.s_[8:12], 0))


INF = np.inf
VALUES = (0.0, 1e-30, -1e-6, 0.01, -0.3, 0.6, -2.0, 5.0, -30.0, 3e38, -3e38, INF, -INF, np.nan)


@pytest.mark.parametrize("order", GATE_UP_ORDERS)
@pytest.mark.parametrize("act", FORMS, ids=str)
@pytest.mark.parametrize("tile", ((128, 8), (256, 160)), ids=str)
def test_numbers_of_every_size(tile, act, order):
    """Gates and ups are biases: products of weights that are 0 leave them as they are."""
    gate, up = (np.resize(v, INTER).astype(np.float32) for v in np.meshgrid(VALUES, VALUES))
    parts = (up, gate) if order == "up_gate" else (gate, up)
    bias = np.stack(parts, axis=1 if order == "interleaved" else 0).reshape(-1)
    bias = jnp.asarray(np.stack([bias] * E), jnp.bfloat16)
    starts, sizes = groups(SIZES, 520)
    x, w = jnp.zeros((520, HIDDEN), jnp.bfloat16), jnp.zeros((E, HIDDEN, 2 * INTER), jnp.bfloat16)
    given = {"activation": act, "gate_up": order, "weight_layout": "kn", "precision": None}
    run = jax.jit(functools.partial(gate_up_p, config=GemmConfig(*tile), **given))
    h, z = run(x, None, None, w, bias, starts, sizes)
    rounded = (jnp.asarray(a, jnp.bfloat16).astype(jnp.float32) for a in (gate, up))
    want = np.asarray(on_cpu(act, tuple(rounded), jnp.float32))
    assert_equal(z[: SIZES.sum()], jnp.broadcast_to(bias[0], (SIZES.sum(), 2 * INTER)))
    for row in np.asarray(h[: SIZES.sum()], np.float32)[[0, -1]]:
        np.testing.assert_allclose(row, want, rtol=2.0**-8, atol=1e-36)


def test_nan_stays_in_its_row():
    rng = np.random.default_rng(4)
    given = {
        "activation": ACTIVATIONS["geglu"],
        "gate_up": "up_gate",
        "weight_layout": "kn",
        "precision": None,
    }
    run = jax.jit(functools.partial(gate_up_p, config=GemmConfig(256, 160), **given))
    x, *rest = gate_up_args(rng, ACTIVATIONS["geglu"], "kn", jnp.bfloat16, gather=False)
    clean, dirty = run(x, *rest), run(x.at[50, 5].set(jnp.nan), *rest)
    others = np.arange(len(x)) != 50
    for a, b in zip(dirty, clean, strict=True):
        assert_equal(a[others], b[others])
        assert np.isnan(np.asarray(a[50], np.float32)).all()
