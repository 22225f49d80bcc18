"""The layer with FP8 weights in NumPy: products and sums in float64, quantization in float32."""

import math

import ml_dtypes
import numpy as np

from jaxmoe import QuantizedArray
from jaxmoe._testing import GPT_OSS
from jaxmoe.activation import Swiglu, resolve

F8 = ml_dtypes.float8_e4m3fn


def scales_of(x, format, static):
    """Scale of every element of x [R,K]."""
    finite = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float32)
    if static is not None:
        return np.broadcast_to(np.asarray(static, np.float32), x.shape)
    if format == "fp8_tensor":
        largest = np.full(x.shape, finite.max(initial=0))
    elif format == "fp8_channel":
        largest = np.broadcast_to(finite.max(axis=1, keepdims=True), x.shape)
    else:
        starts = np.arange(0, x.shape[1], 128)
        largest = np.maximum.reduceat(finite, starts, axis=1)
        largest = np.repeat(largest, 128, axis=1)[:, : x.shape[1]]
    return np.maximum(largest.astype(np.float32) / np.float32(448), np.float32(2**-126))


def requantized(x, format, static=None):
    """What is left of x [R,K] after quantization, float64."""
    x = np.asarray(x, np.float32)
    scales = scales_of(x, format, static)
    with np.errstate(invalid="ignore"):
        values = np.clip(x * (np.float32(1) / scales), -448, 448).astype(F8)
    return values.astype(np.float64) * scales


def dequantized(q: QuantizedArray):
    """Weights [E,N,K], float64."""
    values, scales = np.asarray(q.values).astype(np.float64), np.asarray(q.scales, np.float64)
    if q.format == "fp8_block":
        scales = scales.repeat(128, axis=1)[:, : values.shape[1]]
        return values * scales.repeat(128, axis=2)[:, :, : values.shape[2]]
    return values * scales.reshape(*scales.shape, *[1] * (3 - scales.ndim))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


PHI = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))
GELU_TANH = lambda g: g * sigmoid(math.sqrt(8 / math.pi) * (g + 0.044715 * g**3))  # noqa: E731
ACTIVATIONS = {
    "swiglu": lambda g, u: g * sigmoid(g) * u,
    "geglu": lambda g, u: g * PHI(g) * u,
    "geglu_tanh": lambda g, u: GELU_TANH(g) * u,
    "gelu": lambda g: g * PHI(g),
    "gelu_tanh": GELU_TANH,
    "silu": lambda g: g * sigmoid(g),
    "relu": lambda g: np.maximum(g, 0),
    "relu2": lambda g: np.maximum(g, 0) ** 2,
    "identity": lambda g: g,
    GPT_OSS: lambda g, u: np.minimum(g, 7) * sigmoid(1.702 * np.minimum(g, 7))
    * (np.clip(u, -7, 7) + 1),
    Swiglu(limit=0.5): lambda g, u: np.minimum(g, 0.5) * sigmoid(np.minimum(g, 0.5))
    * np.clip(u, -0.5, 0.5),
}  # fmt: skip


def oracle(inputs, format, activation="swiglu", gate_up="gate_up", **static):
    """y in float64. Every expert is local."""
    dtype = inputs["x"].dtype
    ids, weights = np.asarray(inputs["expert_ids"]), np.asarray(inputs["weights"], np.float64)
    w1, w2 = dequantized(inputs["w_gate_up"]), dequantized(inputs["w_down"])
    x = requantized(inputs["x"], format, static.get("x_scale"))
    slots = [(t, k) for t, k in np.ndindex(ids.shape) if 0 <= ids[t, k] < len(w1)]
    h = np.zeros((len(slots), w2.shape[2]))
    for r, (t, k) in enumerate(slots):
        e = ids[t, k]
        z = w1[e] @ x[t]
        if "b_gate_up" in inputs:
            z = z + np.asarray(inputs["b_gate_up"][e], np.float64)
        if not resolve(activation).gated:
            h[r] = ACTIVATIONS[activation](z)
            continue
        halves = (z[0::2], z[1::2]) if gate_up == "interleaved" else np.split(z, 2)
        gate, up = halves[::-1] if gate_up == "up_gate" else halves
        h[r] = ACTIVATIONS[activation](gate, up)
    scale = static.get("intermediate_scale")
    if scale is not None:
        scale = np.broadcast_to(scale, len(w1))[[ids[slot] for slot in slots]][:, None]
    h = requantized(h.astype(dtype), format, scale)
    y = np.zeros(x.shape)
    for r, (t, k) in enumerate(slots):
        row = w2[ids[t, k]] @ h[r]
        if "b_down" in inputs:
            row = row + np.asarray(inputs["b_down"][ids[t, k]], np.float64)
        y[t] += weights[t, k] * row
    return y
