"""Cases and the tolerance rule of the tests; never imported by the package.

A test takes a `Layer` (shapes with a reason to exist), a routing kind (who gets which expert) and a
seed, and judges the result with `assert_close`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats import QUANTIZED
from jaxmoe.activation import Activation, SoftcapSwiglu, Swiglu, SwigluStep, resolve
from jaxmoe.quantize import quantize

# Formats that tokens are quantized in too, and those of weights alone.
FP8 = tuple(name for name, format in QUANTIZED.items() if format.quantizes_tokens)
PACKED = tuple(name for name in QUANTIZED if name not in FP8)

GPT_OSS = Swiglu(alpha=1.702, beta=1.0, limit=7.0)
RARE = SwigluStep(0.5), SoftcapSwiglu(0.5, 1.5)  # bounds that numbers of order 1 reach


@dataclasses.dataclass(frozen=True)
class Layer:
    """The shape of one MoE layer.

    Attributes:
      why: what this shape has that no other has.
      hidden, intermediate, num_experts, top_k: H, I, E, K.
      activation, gate_up, bias: as `moe_mlp` takes them; `bias` for both products.
    """

    name: str
    why: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: str | Activation = "swiglu"
    gate_up: str = "gate_up"
    bias: bool = False

    @property
    def width(self) -> int:
        """Columns of the first product: 2I if gated, I otherwise."""
        return self.intermediate * (2 if resolve(self.activation).gated else 1)


def _by_name(*layers: Layer) -> dict[str, Layer]:
    return {layer.name: layer for layer in layers}


# Layers of published models.
MODELS = _by_name(
    Layer("mixtral-8x7b", "few wide experts", 4096, 14336, 8, 2),
    Layer("qwen3-30b-a3b", "many narrow experts", 2048, 768, 128, 8),
    Layer("deepseek-v3", "the most weights", 7168, 2048, 256, 8),
    Layer("gpt-oss-120b", "H no multiple of 128", 2880, 2880, 128, 4, GPT_OSS, "interleaved", True),
)

# Layers that a CPU computes at once. Rows are multiples of 16 bytes in a 2-byte type.
SMALL = _by_name(
    Layer("one", "every count is 1", 8, 8, 1, 1),
    Layer("odd", "nothing is a power of two", 40, 24, 5, 3, bias=True),
    Layer("all", "every token goes to every expert", 16, 32, 4, 4),
    Layer("wide", "more experts than rows", 32, 16, 40, 2, "geglu_tanh", "up_gate"),
    Layer("clamped", "gpt-oss in small", 24, 16, 6, 2, GPT_OSS, "interleaved", True),
    Layer("k22", "as many choices as Nemotron", 16, 16, 48, 22, "relu2"),
)

ROUTINGS = ("uniform", "zipf", "one_expert", "with_empty", "with_invalid")

# Ids that must select nothing and must never be used as an address.
INVALID_IDS = (-1, -2, np.iinfo(np.int32).min, np.iinfo(np.int32).max)


def expert_ids(
    kind: str, rng: np.random.Generator, num_tokens: int, num_experts: int, top_k: int
) -> np.ndarray:
    """Draws the experts of each token: [T, K] int32, the ids of one token distinct.

    uniform       every expert as likely as any other
    zipf          the expert of rank r with probability proportional to 1 / r
    one_expert    every token chooses expert 0 first (and the same others after it)
    with_empty    every second expert is never chosen (as far as K leaves a choice)
    with_invalid  uniform, but about a third of the ids name no expert
    """
    if kind not in ROUTINGS:
        raise ValueError(f"no routing kind {kind!r}; there are {', '.join(ROUTINGS)}")
    if kind == "one_expert":
        return np.tile(np.arange(top_k, dtype=np.int32), (num_tokens, 1))
    log_p = np.zeros(num_experts)
    if kind == "zipf":
        log_p = -np.log(rng.permutation(num_experts) + 1.0)
    elif kind == "with_empty":
        log_p[1::2] = -1e6
    # Gumbel noise on log-probabilities, then the K largest: a draw without replacement.
    noisy = log_p[None, :] + rng.gumbel(size=(num_tokens, num_experts))
    ids = np.argsort(-noisy, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    if kind == "with_invalid":
        invalid = rng.choice(np.array([*INVALID_IDS, num_experts], np.int32), ids.shape)
        ids = np.where(rng.random(ids.shape) < 1 / 3, invalid, ids).astype(np.int32)
    return ids


def routing_weights(rng: np.random.Generator, num_tokens: int, top_k: int) -> np.ndarray:
    """Draws routing weights: [T, K] float32, positive, adding up to 1 for each token."""
    return rng.dirichlet(np.ones(top_k), num_tokens).astype(np.float32).reshape(-1, top_k)


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = jnp.float32, scale: float = 1.0
) -> jax.Array:
    """Draws a normal array. Fresh for every call: a kernel must not pass on a lucky input."""
    return jax.device_put(_normal(rng, shape, dtype, scale))


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float
) -> np.ndarray:
    """Draws by NumPy, as everything here: nothing to compile."""
    return (scale * rng.standard_normal(shape, np.float32)).astype(jnp.dtype(dtype))


def layer_inputs(
    layer: Layer,
    num_tokens: int,
    routing: str,
    rng: np.random.Generator,
    dtype: Any,
    weight_layout: str = "kn",
) -> dict[str, Any]:
    """Draws the arrays of one layer, named as `reference.moe_mlp` names them, biases if it has any.

    Weights are scaled by 1 / sqrt(contraction), so that every intermediate is of order 1 and no
    activation saturates.
    """
    hidden, inter, experts = layer.hidden, layer.intermediate, layer.num_experts
    w_gate_up = _normal(rng, (experts, hidden, layer.width), dtype, hidden**-0.5)
    w_down = _normal(rng, (experts, inter, hidden), dtype, inter**-0.5)
    if weight_layout == "nk":
        w_gate_up, w_down = w_gate_up.swapaxes(1, 2), w_down.swapaxes(1, 2)
    inputs: dict[str, Any] = {
        "x": _normal(rng, (num_tokens, hidden), dtype, 1.0),
        "expert_ids": expert_ids(routing, rng, num_tokens, experts, layer.top_k),
        "weights": routing_weights(rng, num_tokens, layer.top_k),
        "w_gate_up": w_gate_up,
        "w_down": w_down,
    }
    if layer.bias:
        inputs["b_gate_up"] = _normal(rng, (experts, layer.width), dtype, 1.0)
        inputs["b_down"] = _normal(rng, (experts, hidden), dtype, 1.0)
    return jax.device_put(inputs)


def quantized_inputs(
    layer: Layer,
    num_tokens: int,
    routing: str,
    rng: np.random.Generator,
    dtype: Any,
    format: str,
    weight_layout: str = "kn",
    element_type: str | None = None,
) -> dict[str, Any]:
    """Draws the arrays of one layer as `layer_inputs` does, the weights quantized in `format`."""
    inputs = layer_inputs(layer, num_tokens, routing, rng, dtype, weight_layout)
    for name in ("w_gate_up", "w_down"):
        inputs[name] = quantize(
            inputs[name], format, weight_layout=weight_layout, element_type=element_type
        )
    return inputs


def ulp(x: float, dtype: Any) -> float:
    """Returns the distance from |x| to the next larger number of `dtype`."""
    info = jnp.finfo(dtype)
    smallest = float(info.smallest_normal)
    exponent = math.floor(math.log2(max(abs(x), smallest)))
    return float(info.eps) * 2.0**exponent


def assert_close(out: Any, ref32: Any, naive_lowp: Any) -> None:
    """Checks `out` by the one tolerance rule of the project:

        max|out - ref32| <= 2 * max|naive_lowp - ref32| + 2 ulp

    `ref32` is the reference in float32 on the very values that `out` was computed from;
    `naive_lowp` is the same formula computed in the low precision, rounding after every step; an
    ulp is taken at max|ref32| in the dtype of `out`.

    Why: how far a right answer may be from the reference depends on shapes, scales and formula, and
    a number picked by hand is either too tight (fails on another seed) or so loose that it tests
    nothing. The naive formula has the errors that the dtype itself causes, so twice its error
    adapts to every case, and a missing expert, a swapped half or a lost term is far outside. The
    ulps are for results of which the naive formula happens to be exact.

    Values that are not finite must be the reference's: NaN where it has NaN, infinity of the same
    sign where it, rounded to the dtype of `out`, is infinite. They are then left out of the maxima.

    For float32 results take the reference in float64 (`with jax.enable_x64(True)`), or
    `naive_lowp` is the reference itself and nothing but the ulps remains.

    Raises:
      AssertionError: with the largest error, its place and the tolerance.
    """
    dtype = out.dtype
    got, want, naive = (np.asarray(a, np.float64) for a in (out, ref32, naive_lowp))
    if not got.shape == want.shape == naive.shape:
        raise AssertionError(f"shapes differ: {got.shape}, {want.shape}, {naive.shape}")
    with np.errstate(over="ignore"):
        rounded = np.asarray(want.astype(dtype), np.float64)
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(
        np.where(special, got, 0.0), np.where(special, rounded, 0.0), "values that are not finite"
    )
    stray = np.argwhere(~np.isfinite(got) & ~special)
    if stray.size:
        at = tuple(map(int, stray[0]))
        raise AssertionError(f"{len(stray)} values not finite, first {got[at]} at {at}")
    want, got = np.where(special, 0.0, want), np.where(special, 0.0, got)
    if want.size == 0:
        return
    naive_error = np.where(special | ~np.isfinite(naive), 0.0, np.abs(naive - want)).max()
    tolerance = 2.0 * naive_error + 2.0 * ulp(np.abs(want).max(), dtype)
    error = np.abs(got - want)
    if error.max() > tolerance:
        at = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
        raise AssertionError(
            f"error {error.max():.3g} at {at} (got {got[at]:.6g}, want {want[at]:.6g}) is more "
            f"than {tolerance:.3g} = 2 * naive error {naive_error:.3g} + 2 ulp; "
            f"relative error {relative_error(got, want):.3g}"
        )


def relative_error(out: Any, ref: Any) -> float:
    """Returns |out - ref| / |ref| in the Frobenius norm, 0 for two zeros: one number for a table.

    It averages over all values, so a wrong row among many right ones hardly shows: report it, and
    judge with `assert_close`.
    """
    a, b = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    norm, difference = np.linalg.norm(b), np.linalg.norm(a - b)
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return float(difference / norm)


def assert_equal(out: Any, expected: Any) -> None:
    """Checks that two arrays have one dtype, one shape and the same bits (every NaN alike)."""
    out, expected = np.asarray(out), np.asarray(expected)
    if out.dtype != expected.dtype:
        raise AssertionError(f"dtypes differ: {out.dtype}, {expected.dtype}")
    if np.issubdtype(out.dtype, np.integer):
        np.testing.assert_array_equal(out, expected, strict=True)
        return
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected), strict=True)
    bits = np.dtype(f"u{out.dtype.itemsize}")
    there = ~np.isnan(out)
    np.testing.assert_array_equal(out.view(bits)[there], expected.view(bits)[there], strict=True)


def assert_vmap_is_loop(fn: Any, args: tuple[jax.Array, ...], in_axes: tuple[int | None, ...]):
    """Checks that `jax.vmap(fn, in_axes)` has the bits of a Python loop over the examples."""
    size = next(a.shape[d] for a, d in zip(args, in_axes, strict=True) if d is not None)
    mapped = jax.vmap(fn, in_axes)(*args)
    for i in range(size):
        one = (
            a if d is None else jax.device_put(np.take(np.asarray(a), i, axis=d))
            for a, d in zip(args, in_axes, strict=True)
        )
        jax.tree.map(lambda m, o, i=i: assert_equal(np.asarray(m)[i], o), mapped, fn(*one))


def poison(shape: tuple[int, ...], dtype: Any) -> None:
    """Leaves a freed buffer of NaN (or of ones bits) on the device for the next result to land in.

    XLA does not clear results, so a kernel that leaves an element unwritten shows it.
    """
    count = math.prod(shape) * jnp.dtype(dtype).itemsize
    jax.block_until_ready([jnp.full((count,), 0xFF, jnp.uint8) for _ in range(4)])
