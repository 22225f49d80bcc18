"""Memory layout of packed weights: blocks of values and strips of scales, as kernels read them.

A block is 64 weight rows by 64 of k. Its bytes are in the order in which the 128 threads of a
warpgroup read them, each the values of its own rows of a tensor core's operand:

  row = 16 w + 8 u + i    k = 32 d + 16 b + 8 p + 2 c + h    thread = 32 w + 4 i + c

with w, c < 4, i < 8 and d, b, p, u, h < 2. All threads read half d at once. A superblock
is 64 rows by the elements of k that a strip has the scales of: its blocks in order of k, then the
strip. Weights are [E, N / 64, superblocks].
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 64  # rows of a block, and its elements of k
_ROW_AXES = (4, 2, 8)  # w, u, i
_K_AXES = (2, 2, 2, 4, 2)  # d, b, p, c, h
# Where the bits of e2m1 codes lie, from the lowest of a code to its sign, so that few instructions
# make two bf16 at a time, which lie 16 bits apart: of values [p, u] but the last in their own word,
# of the last ones of both words (b) in either, with the word.
_E2M1_OWN = ((6, 7, 8, 15), (0, 1, 2, 9), (26, 27, 28, 3))
_E2M1_LAST = (((0, 4), (0, 5), (1, 4), (0, 13)), ((0, 14), (1, 13), (1, 14), (1, 21)))


def _e2m1_places() -> tuple[np.ndarray, np.ndarray]:
    """Word and shift of each bit of a code, [bit, b, p, u, h]."""
    own = [[[(b, bit) for bit in bits] for bits in _E2M1_OWN] for b in range(2)]
    places = np.array([[*own[b], _E2M1_LAST[b]] for b in range(2)], np.uint32)  # [b, pu, bit, 2]
    words, shifts = np.moveaxis(places.reshape(2, 2, 2, 4, 2), (4, 3), (0, 1))[..., None]
    return np.concatenate([words, words], -1), np.concatenate([shifts, (shifts + 16) % 32], -1)


_E2M1_WORDS, _E2M1_SHIFTS = _e2m1_places()
_LAST_AXES = {3: (-3, -2, -1), 5: (-5, -4, -3, -2, -1)}
_INT4_SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32).reshape(2, 2, 2)


def block_bytes(bits: int) -> int:
    """Bytes of a block of values."""
    return ROWS * ROWS * bits // 8


@functools.partial(jax.jit, static_argnames=("bits", "scattered"))
def pack_values(codes: jax.Array, *, bits: int, scattered: bool) -> jax.Array:
    """Makes blocks [.., N / 64, K / 64, bytes] of uint8 codes [.., N, K].

    `scattered`: the bits of a code of 4 lie where e2m1 has them, not side by side.
    """
    codes = _split(_split(codes, -1, -1, *_K_AXES), -2 - len(_K_AXES), -1, *_ROW_AXES)
    if bits == 8:
        return _merged(_transposed(codes, "NwuiKdbpch", "NKdwicbphu"), -8, 8)
    codes = _transposed(codes, "NwuiKdbpch", "NKdwicbpuh").astype(jnp.uint32)
    rank = codes.ndim + 1 if scattered else codes.ndim
    if scattered:
        set_bits = jnp.expand_dims(codes, -5) >> _like(np.arange(4, dtype=np.uint32), rank, -5)
        moved = (set_bits & jnp.uint32(1)) << _of_rank(_E2M1_SHIFTS, rank)
        own = (_of_rank(_E2M1_WORDS == word, rank) for word in range(2))
        parts = (jnp.where(mine, moved, jnp.uint32(0)) for mine in own)
        words = jnp.stack(
            [jnp.sum(a, axis=_LAST_AXES[5], dtype=jnp.uint32) for a in parts], axis=-1
        )
    else:
        moved = codes << _of_rank(_INT4_SHIFTS, rank)
        words = jnp.sum(moved, axis=_LAST_AXES[3], dtype=jnp.uint32)
    return _merged(jax.lax.bitcast_convert_type(words, jnp.uint8), -6, 6)


@functools.partial(jax.jit, static_argnames=("bits", "scattered"))
def unpack_values(data: jax.Array, *, bits: int, scattered: bool) -> jax.Array:
    """The codes [.., N, K] of blocks [.., N / 64, K / 64, bytes]."""
    if bits == 8:
        data = _split(data, -1, 2, 4, 8, 4, 2, 2, 2, 2)
        return _matrix(_transposed(data, "NKdwicbphu", "NwuiKdbpch"), 6)
    data = _split(data, -1, 2, 4, 8, 4, 2, 4)
    words = jax.lax.bitcast_convert_type(data, jnp.uint32)
    if scattered:
        both = (jnp.expand_dims(words[..., word], _LAST_AXES[5]) for word in range(2))
        rank = words.ndim + 4
        words = jnp.where(_of_rank(_E2M1_WORDS == 0, rank), *both)
        bit = _like(np.arange(4, dtype=np.uint32), rank, -5)
        codes = ((words >> _of_rank(_E2M1_SHIFTS, rank)) & jnp.uint32(1)) << bit
        codes = jnp.sum(codes, axis=-5, dtype=jnp.uint32)
    else:
        words = jnp.expand_dims(words, _LAST_AXES[3])
        codes = (words >> _of_rank(_INT4_SHIFTS, words.ndim)) & jnp.uint32(15)
    codes = _transposed(codes.astype(jnp.uint8), "NKdwicbpuh", "NwuiKdbpch")
    return _matrix(codes, 6)


def pack_strips(scales: jax.Array, groups: int) -> jax.Array:
    """Makes strips [.., N / 64, superblocks, bytes] of [.., N, superblocks * groups] scales.

    A strip has the scales of its rows i and i + 8 of each 16 side by side, group by group; of
    bytes, two groups of a row are neighbours.
    """
    pair = _pair(groups, scales.dtype)
    scales = _split(_split(scales, -1, -1, groups // pair, pair), -4, -1, *_ROW_AXES)
    scales = _transposed(scales, "NwuiKgp", "NKwigup")
    if scales.dtype.itemsize == 1:
        return _merged(scales, -5, 5)
    return _merged(jax.lax.bitcast_convert_type(scales, jnp.uint8), -6, 6)


def unpack_strips(data: jax.Array, groups: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The scales [.., N, superblocks * groups] of strips."""
    size, pair = jnp.dtype(dtype).itemsize, _pair(groups, dtype)
    data = _split(data, -1, 4, 8, groups // pair, 2, pair, *(() if size == 1 else (size,)))
    scales = data if size == 1 else jax.lax.bitcast_convert_type(data, dtype)
    return _matrix(_transposed(scales, "NKwigup", "NwuiKgp"), 3)


def pack_zeros(zeros: jax.Array, groups: int) -> jax.Array:
    """Makes strips [.., N / 64, superblocks, bytes] of uint8 zero points in [0, 15], as of scales.

    32 bits have those of four scales of row i in the lower half, and of row i + 8 in the upper.
    """
    zeros = _split(_split(zeros, -1, -1, groups), -3, -1, 4, 2, 2 * groups, 4 // groups)
    zeros = _merged(_transposed(zeros, "NwuijKg", "NKwiujg"), -5, 5)
    zeros = _split(zeros, -1, -1, 2) << _like(np.array([0, 4], np.uint8), zeros.ndim + 1, -1)
    return zeros[..., 0] | zeros[..., 1]


def unpack_zeros(data: jax.Array, groups: int) -> jax.Array:
    """The zero points [.., N, superblocks * groups] of strips."""
    data = jnp.stack([data & jnp.uint8(15), data >> jnp.uint8(4)], axis=-1)
    data = _split(_merged(data, -2, 2), -1, 4, 2 * groups, 2, 4 // groups, groups)
    return _matrix(_merged(_transposed(data, "NKwiujg", "NwuijKg"), -4, 2), 2)


def _pair(groups: int, dtype: jax.typing.DTypeLike) -> int:
    """Groups whose scales of a row are neighbours."""
    return 2 if groups % 2 == 0 and jnp.dtype(dtype).itemsize == 1 else 1


def join(blocks: jax.Array, strips: list[jax.Array], per_superblock: int) -> jax.Array:
    """Makes superblocks [.., N / 64, bytes] of blocks and of the parts of their strips."""
    blocks = _merged(_split(blocks, -2, -1, per_superblock), -2, 2)
    return _merged(jnp.concatenate([blocks, *strips], axis=-1) if strips else blocks, -2, 2)


def split(values: jax.Array, per_superblock: int, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The blocks of superblocks, and the parts of their strips, which have the `sizes` in bytes.

    `sizes` begins with the bytes of a block.
    """
    block, *strips = sizes
    values = _split(values, -1, -1, per_superblock * block + sum(strips))
    ends = [int(end) for end in np.cumsum([per_superblock * block, *strips])]
    first, *rest = jnp.split(values, ends[:-1], axis=-1)
    return _merged(_split(first, -1, per_superblock, block), -3, 2), *rest


def _matrix(a: jax.Array, k_axes: int) -> jax.Array:
    """[.., N, w, u, i, K, ..] with `k_axes` axes from K on -> [.., N, K]."""
    return _merged(_merged(a, -k_axes, k_axes), -5, 4)


# NOTE: one axis at a time, which is what arrays that are split over Explicit mesh axes can do.
def _split(a: jax.Array, axis: int, *sizes: int) -> jax.Array:
    """Makes of one axis several."""
    axis += a.ndim
    return a.reshape(*a.shape[:axis], *_known(a.shape[axis], sizes), *a.shape[axis + 1 :])


def _merged(a: jax.Array, axis: int, count: int) -> jax.Array:
    """Makes of `count` axes from `axis` on one."""
    axis += a.ndim
    size = math.prod(a.shape[axis : axis + count])
    return a.reshape(*a.shape[:axis], size, *a.shape[axis + count :])


def _known(size: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes, -1 being what the others leave of `size`."""
    rest = math.prod(s for s in sizes if s >= 0)
    return tuple(size // rest if s < 0 else s for s in sizes)


def _transposed(a: jax.Array, names: str, wanted: str) -> jax.Array:
    """`a` with its last axes, which are `names`, in another order."""
    lead = a.ndim - len(names)
    return jnp.transpose(a, (*range(lead), *(lead + names.index(name) for name in wanted)))


def _like(a: np.ndarray, rank: int, axis: int) -> jax.Array:
    """`a` along `axis`, a negative number, of an array of that rank."""
    return jnp.asarray(a.reshape(tuple(-1 if i == rank + axis else 1 for i in range(rank))))


def _of_rank(a: np.ndarray, rank: int) -> jax.Array:
    """`a` along the last axes of an array of that rank."""
    return jnp.asarray(a.reshape((1,) * (rank - a.ndim) + a.shape))
