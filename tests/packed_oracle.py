"""Packed weights in NumPy with plain loops: where values and scales lie, what they stand for."""

import dataclasses

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)

# Bits (s, e1, e0, m) of value (j, h = 0) of a word of e2m1 codes; of the last value, with the word
# of the two of a thread's half in which each lies, for those of the first word and of the second.
E2M1_BITS = ((15, 8, 7, 6), (9, 2, 1, 0), (3, 28, 27, 26))
E2M1_LAST = (((0, 13), (1, 4), (0, 5), (0, 4)), ((1, 21), (1, 14), (1, 13), (0, 14)))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What differs between formats.

    Attributes:
      bits, e2m1: of a value, and whether its bits lie apart.
      blocks: blocks of a superblock, 0 for all of K.
      groups: groups of a strip.
      scale_bytes, zeros: of one scale in the strip, and whether zero points follow.
    """

    bits: int
    e2m1: bool = False
    blocks: int = 0
    groups: int = 1
    scale_bytes: int = 1
    zeros: bool = False


FORMATS = {
    "mxfp4": Shape(4, True, 1, 2),
    "mxfp8": Shape(8, False, 1, 2),
    "nvfp4": Shape(4, True, 1, 4),
    "int8_channel": Shape(8, scale_bytes=0),
}
for _group, _blocks, _groups in (("g32", 1, 2), ("g64", 1, 1), ("g128", 2, 1), ("channel", 0, 1)):
    for _suffix in ("", "_zp"):
        FORMATS[f"int4_{_group}{_suffix}"] = Shape(4, False, _blocks, _groups, 2, bool(_suffix))


def values_of(name, codes, scales=None, zeros=None):
    """The bytes [E, N / 64, ..] of codes [E, N, K], and of scales and zeros [E, N, groups]."""
    shape = FORMATS[name]
    num_experts, n, k = codes.shape
    per_superblock = shape.blocks or k // 64
    out = []
    for e in range(num_experts):
        for first_row in range(0, n, 64):
            for superblock in range(k // 64 // per_superblock):
                for block in range(per_superblock):
                    first_k = 64 * (superblock * per_superblock + block)
                    part = codes[e, first_row : first_row + 64, first_k : first_k + 64]
                    out.append(block_of(part, shape))
                groups = slice(superblock * shape.groups, (superblock + 1) * shape.groups)
                if scales is not None:
                    out.append(strip_of(scales[e, first_row : first_row + 64, groups]))
                if zeros is not None:
                    out.append(zeros_of(zeros[e, first_row : first_row + 64, groups]))
    return np.concatenate(out).reshape(num_experts, n // 64, -1)


def block_of(codes, shape):
    """The bytes of codes [64, 64]."""
    data = np.zeros(512 * shape.bits, np.uint8)
    for t in range(128):
        w, lane = divmod(t, 32)
        row0, c = 16 * w + lane // 4, lane % 4
        words = np.zeros(4, np.uint64)
        for b in range(4):
            for j in range(4):
                for h in range(2):
                    code = int(codes[row0 + 8 * (j % 2), 16 * b + 2 * c + 8 * (j // 2) + h])
                    if shape.bits == 8:
                        byte = 2 * h + j % 2
                        place = (((b // 2) * 128 + t) * 2 + b % 2) * 2 + j // 2
                        data[4 * place + byte] = code
                    elif shape.e2m1:
                        own = E2M1_LAST[b % 2] if j == 3 else [(b % 2, p) for p in E2M1_BITS[j]]
                        for bit, (word, place) in zip((3, 2, 1, 0), own, strict=True):
                            word += b // 2 * 2
                            words[word] |= np.uint64((code >> bit & 1) << (place + 16 * h) % 32)
                    else:
                        words[b] |= np.uint64(code << 4 * j + 16 * h)
        if shape.bits == 4:
            for b in range(4):
                place = 4 * (((b // 2) * 128 + t) * 2 + b % 2)
                data[place : place + 4] = words[b : b + 1].astype("<u4").view(np.uint8)
    return data


def strip_of(scales):
    """The bytes of scales [64, groups]."""
    size, groups = scales.dtype.itemsize, scales.shape[1]
    data = np.zeros(scales.size * size, np.uint8)
    for row in range(64):
        w, i, u = row // 16, row % 8, row // 8 % 2
        for g in range(groups):
            at = ((8 * w + i) * groups + g) * 2 + u
            if size == 1 and groups % 2 == 0:  # two groups of a row are neighbours
                at = (((8 * w + i) * groups // 2 + g // 2) * 2 + u) * 2 + g % 2
            data[at * size : (at + 1) * size] = scales[row : row + 1, g].view(np.uint8)
    return data


def zeros_of(zeros):
    """The bytes of zero points [64, groups]."""
    groups = zeros.shape[1]
    words = np.zeros(8 * groups, np.uint32)
    for row in range(64):
        w, i, u = row // 16, row % 8, row // 8 % 2
        for g in range(groups):
            word, place = divmod((8 * w + i) * groups + g, 4)
            words[word] |= np.uint32(int(zeros[row, g]) << 16 * u + 4 * place)
    return words.astype("<u4").view(np.uint8)


def codes_and_exponents(name, count):
    """Codes [16, 256, 256] and exponents [16, 256, 8] of an mx format, these below `count`.

    An expert has each code beside each exponent, and in 16 experts each place has each e2m1 code.
    """
    e, n, k, g = np.arange(16)[:, None, None], np.arange(256)[:, None], np.arange(256), np.arange(8)
    codes = np.broadcast_to((k + e) % (1 << FORMATS[name].bits), (16, 256, 256))
    exponents = np.broadcast_to((n + g) % count, (16, 256, 8))
    pairs = 256 * spread(exponents[0], 256) + codes[0]
    assert np.unique(pairs).size == count << FORMATS[name].bits
    return codes.astype(np.uint8), exponents.astype(np.uint8)


def e2m1(codes):
    return np.where(codes & 8, -1, 1) * E2M1[codes & 7]


def spread(scales, k):
    return np.repeat(scales, k // scales.shape[-1], axis=-1)
