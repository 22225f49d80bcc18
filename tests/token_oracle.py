"""Layers of quantized tokens in NumPy: tokens by the formulas of the docs, products in float64."""

import ml_dtypes
import numpy as np

from tests.packed_oracle import E2M1

F32 = np.float32
E4M3 = ml_dtypes.float8_e4m3fn
ACTIVATIONS = {
    "swiglu": lambda g, u: g / (1 + np.exp(-g)) * u,
    "gpt_oss": lambda g, u: (
        (c := np.minimum(g, 7)) / (1 + np.exp(-1.702 * c)) * (np.clip(u, -7, 7) + 1)
    ),
    "relu2": lambda z: np.maximum(z, 0) ** 2,
}


def nearest(x, values):
    """The nearest of the 8 magnitudes, ties to the even index: their last bit is the mantissa's."""
    distance = np.abs(np.abs(x)[..., None] - values)
    closest = distance == distance.min(axis=-1, keepdims=True)
    even = closest & (np.arange(len(values)) % 2 == 0)
    index = np.where(even.any(axis=-1), even.argmax(axis=-1), closest.argmax(axis=-1))
    return np.copysign(values[index], x)


def e4m3(x):
    return np.clip(x, -448, 448).astype(E4M3).astype(np.float64)


def rounded(x, name, scale=None):
    """The numbers that tokens [R, K] stand for and what multiplies them, [] or [R, 1].

    float32 divisions, as the formulas say; a static `scale` is given.
    """
    x = np.asarray(x, F32)
    if name == "e4m3":
        if scale is None:
            scale = np.maximum(np.abs(x).max(axis=1, keepdims=True) / F32(448), F32(2.0**-126))
        return e4m3(x * (F32(1) / scale)), np.asarray(scale, np.float64)
    size = 16 if name == "nvfp4" else 32
    groups = x.reshape(x.shape[0], -1, size)
    most = np.abs(groups).max(axis=-1, keepdims=True)
    if name == "nvfp4":
        if scale is None:
            scale = np.maximum(np.abs(x).max() / F32(2688), F32(2.0**-126))
        factor = e4m3(most / F32(6) / scale)
        step = factor.astype(F32) * scale
        values = nearest(np.where(step > 0, groups / np.where(step > 0, step, 1), 0), E2M1)
        return (values * factor).reshape(x.shape), np.float64(scale)
    top = {"mxfp4": 2, "mxfp8": 8}[name]
    factor = 2.0 ** (np.floor(np.log2(np.maximum(most, 1e-30))) - top)
    values = nearest(groups / factor, E2M1) if name == "mxfp4" else e4m3(groups / factor)
    return (values * factor).reshape(x.shape), np.float64(1)


def product(rows, experts, w, b):
    """Rows [R, K] times the weights [E, N, K] of their experts, and biases [E, N]."""
    out = b[experts]
    for e in range(w.shape[0]):
        out[experts == e] += rows[experts == e] @ w[e].T
    return out


def layer(x, ids, weights, w1, b1, w2, b2, *, name, act, order, dtype, scales=(None, None), low):
    """The layer [T, H] in float64, or with z and rows rounded to the dtype of x (`low`).

    `w1` [E, N, H], `w2` [E, H, I] and biases are plain; `act` is a name of ACTIVATIONS; the static
    scales of x and of act are [] and [E].
    """
    narrow = (lambda a: a.astype(dtype).astype(np.float64)) if low else (lambda a: a)
    num_experts = w1.shape[0]
    values, factor = rounded(x, name, scales[0])
    tokens, slots = np.nonzero((ids >= 0) & (ids < num_experts))
    order_of_experts = np.argsort(ids[tokens, slots], kind="stable")
    tokens, slots = tokens[order_of_experts], slots[order_of_experts]
    experts = ids[tokens, slots]
    z = narrow(product((values * factor)[tokens], experts, w1, b1))
    if act == "relu2":
        h = ACTIVATIONS[act](z)
    else:
        half = z.shape[1] // 2
        gate, up = (z[:, ::2], z[:, 1::2]) if order == "interleaved" else (z[:, :half], z[:, half:])
        h = ACTIVATIONS[act](*((up, gate) if order == "up_gate" else (gate, up)))
    h = h.astype(dtype)
    static = None if scales[1] is None else scales[1][experts]
    if static is None:
        hq, factor = rounded(h, name)
        hq = hq * factor
    else:
        hq = np.concatenate(
            [np.multiply(*rounded(h[i : i + 1], name, s)) for i, s in enumerate(static)]
        )
    rows = narrow(product(hq, experts, w2, b2))
    y = np.zeros(x.shape)
    np.add.at(y, tokens, rows * weights[tokens, slots].astype(np.float64)[:, None])
    return y
