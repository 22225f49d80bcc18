"""Quantized arrays: values of few bits with the scales that give the numbers back."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import _formats, _saved
from jaxmoe._codes import CODES
from jaxmoe._jax import checks as _checks
from jaxmoe._jax.frozen import frozen

FORMATS = tuple(_formats.QUANTIZED)
TOKEN_FORMATS = tuple(n for n, f in _formats.QUANTIZED.items() if f.token_arrays)
WEIGHT_LAYOUTS = CODES["layout"]
LAYOUTS = (*WEIGHT_LAYOUTS, "tokens")
SCALE_FORMATS = ("float32", "e8m0")
_NO_DERIVATIVE = (
    "no derivative is defined; quantize jax.lax.stop_gradient of the array, and add a "
    "straight-through estimator where one is wanted"
)


@_saved.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """An array w ~ values * scales. A pytree whose leaves are `values` and `scales`.

    Made by `jaxmoe.quantize`, `jaxmoe.quantize_tokens` and `jaxmoe.checkpoints`. `shape`, `ndim`
    and `dtype` are those of the array it stands for. Values are stored with the contracted axis K
    last: [E, N, K] for weights whatever their layout, [R, K] for tokens. Packed formats store them
    in blocks, with the scales of groups among them: see docs/semantics.md.

    Attributes:
      values: float8_e4m3fn or float8_e5m2, [E, N, K] or [R, K]; packed: uint8 [E, N / 64, bytes],
        and tokens, in the mx formats and nvfp4, [R, bytes].
      scales: float32, dequantization multipliers. Weights: [E] (fp8_tensor), [E, N] (fp8_channel)
        or [E, ceil(N / 128), ceil(K / 128)] (fp8_block). Tokens: [], [R] or [R, ceil(K / 128)].
        Packed: what is left, [E], or [E, N] (int8_channel), and [] of tokens.
      format: "fp8_tensor", "fp8_channel" or "fp8_block"; packed: "mxfp4", "mxfp8", "nvfp4",
        "int4_g32", "int4_g64", "int4_g128", "int4_channel", these with "_zp", or "int8_channel".
        Static.
      layout: what the array stands for: weights [E, K, N] ("kn") or [E, N, K] ("nk"), or "tokens"
        [R, K]. Static.
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` returns. Static.
    """

    values: jax.Array
    scales: jax.Array
    format: str = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        """Checks the static fields; leaves may be anything while a pytree is rebuilt."""
        op = "QuantizedArray"
        _checks.check_choice(op, "format", self.format, FORMATS)
        _checks.check_choice(op, "layout", self.layout, LAYOUTS)
        object.__setattr__(self, "dtype", _checks.float_dtype(op, "dtype", self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized array."""
        shape = stored_shape(self)
        return (*shape[:-2], shape[-1], shape[-2]) if self.layout == "kn" else shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


@_checks.array_likes
def quantize(
    w: jax.Array,
    format: str,
    *,
    weight_layout: str,
    element_type: str | None = None,
    scale: jax.Array | None = None,
    scale_format: str = "float32",
) -> QuantizedArray:
    """Quantizes the weights of experts.

    scale  = max(max|w| / M, 2^-126)        max over the elements that share the scale
    values = fp8(clip(w * (1 / scale), -M, M))     M = 448 (e4m3) or 57344 (e5m2)

    fp8_tensor shares a scale over an expert, fp8_channel over the K inputs of an output, fp8_block
    over a block of 128 outputs by 128 inputs, blocks at the ends being smaller. The formulas of the
    packed formats are in docs/semantics.md.

    Args:
      w: [E, K, N] or [E, N, K] bfloat16, float16 or float32; K is the axis a product contracts.
        int4 has no float32. Packed: N and K are multiples of 64, in int4_g128 K of 128.
      format: a name that `QuantizedArray` lists.
      weight_layout: "kn" or "nk", which of the two shapes `w` has. No default: the wrong axis would
        give a good array that no product can use.
      element_type: the usual one of the format by default: "e4m3" (float8_e4m3fn) in FP8, where
        "fp8_tensor" has "e5m2" too.
      scale: float32, [E], [E, N] or [E, ceil(N / 128), ceil(K / 128)], used instead of the formula;
        dequantization multipliers. One outside [2^-126, 2^126] becomes NaN, with its values.
      scale_format: "float32", or "e8m0" to round each scale up to a power of two (still float32).

    Returns:
      `QuantizedArray` with layout `weight_layout` and the dtype of `w`.

    Raises:
      TypeError: `w` is no array or has another dtype, or `scale` has.
      ValueError: a wrong rank or shape, an unknown name, "e8m0" with `scale`, or these in a packed
        format.
      NotImplementedError: "e5m2" in another format; a derivative is taken. Quantize
        `jax.lax.stop_gradient(w)`; a straight-through estimator is yours to add.

    Numerics: float32; the reciprocal, the product and the cast round to nearest even. What lies
      beyond M, infinities too, becomes M. NaN and infinities do not count in the maximum; NaN stays
      NaN. Zeros stay zeros, with scale 2^-126 where there is nothing else. Same bits under jit.
    Sharding: any axis may be split whose scales are split with it: E always.
    Source: https://arxiv.org/abs/2209.05433 (FP8); DeepSeek-V3, https://arxiv.org/abs/2412.19437,
      section 3.3 (blocks).

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> w = jnp.array([[[1.0, 2.0], [0.0, 448.0]]])  # one expert, two outputs
      >>> q = jaxmoe.quantize(w, "fp8_channel", weight_layout="nk")
      >>> q.values.tolist(), (q.scales * 448).tolist()
      ([[[224.0, 448.0], [0.0, 448.0]]], [[2.0, 448.0]])
      >>> jaxmoe.dequantize(q).tolist()
      [[[1.0, 2.0], [0.0, 448.0]]]
    """
    op = "quantize"
    _checks.check_choice(op, "weight_layout", weight_layout, WEIGHT_LAYOUTS)
    _checks.check_rank(op, "w", w, "E,K,N" if weight_layout == "kn" else "E,N,K")
    options = element_type, scale, scale_format
    element_type = _check_options(op, "w", w, format, *options)
    stored = jnp.swapaxes(w, 1, 2) if weight_layout == "kn" else jnp.asarray(w)
    known = _formats.QUANTIZED[format]
    if refused := known.refused_dtype(w.dtype):
        raise TypeError(_checks.message(op, f"w.{refused}", w=w))
    check_steps(op, "w", w, known, weight_layout)
    return _quantized(op, stored, format, weight_layout, element_type, scale, scale_format)


@_checks.array_likes
def quantize_tokens(
    x: jax.Array,
    format: str,
    *,
    element_type: str | None = None,
    scale: jax.Array | None = None,
    scale_format: str = "float32",
) -> QuantizedArray:
    """Quantizes activations, one row for each token.

    The formulas are those of `jaxmoe.quantize`. fp8_tensor shares one scale over all of `x`,
    fp8_channel over a row, fp8_block over 128 neighbours of a row, the last group being smaller. In
    packed formats 32 (mx) or 16 (nvfp4) neighbours share a scale, and nvfp4 has one of all of `x`
    besides. So but for "fp8_tensor" and "nvfp4" a token's bits do not depend on its batch.

    Args:
      x: [R, K] bfloat16, float16 or float32. Packed: K is a multiple of 32, in nvfp4 of 16.
      format: "fp8_tensor", "fp8_channel" or "fp8_block"; packed: "mxfp4", "mxfp8" or "nvfp4".
      element_type: the usual one of the format by default: "e4m3" (float8_e4m3fn) in FP8, where
        "fp8_tensor" has "e5m2" too.
      scale: float32, [], [R] or [R, ceil(K / 128)], a static scale used instead of the formula; in
        nvfp4 that of all tokens, none in mx. One outside [2^-126, 2^126] becomes NaN.
      scale_format: "float32", or "e8m0" to round each scale up to a power of two (still float32).

    Returns:
      `QuantizedArray` with layout "tokens" and the dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `jaxmoe.quantize`.

    Numerics: as `jaxmoe.quantize`.
    Sharding: R may be split, and K with its groups.
    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3 (groups of 128).

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> q = jaxmoe.quantize_tokens(jnp.array([[1.0, -2.0], [7.0, 3.5]]), "fp8_channel")
      >>> q.values.tolist(), (q.scales * 448).tolist()
      ([[224.0, -448.0], [448.0, 224.0]], [2.0, 7.0])
    """
    op = "quantize_tokens"
    _checks.check_rank(op, "x", x, "R,K")
    options = element_type, scale, scale_format
    element_type = _check_options(op, "x", x, format, *options, tokens=True)
    known = _formats.QUANTIZED[format]
    if not known.token_arrays:
        raise ValueError(_checks.message(op, _for_weights(format), x=x))
    size, step = x.shape[1], known.token_step
    if size % step:
        rule = f"x.shape[1]={size} (K) must be a multiple of {step} in {format}"
        rule += f"; {_checks.nearest(size, step)}"
        raise ValueError(_checks.message(op, rule, x=x))
    return _quantized(op, jnp.asarray(x), format, "tokens", element_type, scale, scale_format)


@_checks.array_likes
def dequantize(q: QuantizedArray, *, dtype: Any = None) -> jax.Array:
    """Returns the array that a quantized array stands for.

    w = values * scales, each scale spread over the elements that share it

    Args:
      q: from `jaxmoe.quantize`, `jaxmoe.quantize_tokens` or `jaxmoe.checkpoints`.
      dtype: bfloat16, float16 or float32; that of `q` by default.

    Returns:
      An array of the shape of `q`: [E, K, N], [E, N, K] or [R, K].

    Raises:
      TypeError: `q` is no `QuantizedArray`, or a dtype is wrong.
      ValueError: `q.values` and `q.scales` do not fit.

    Numerics: float32 product, then one rounding to `dtype`; what lies beyond its range is infinite.
      Linear in `q.scales`, whose gradient is that of the formula.
    Sharding: as `q` is.
    Source: none; it is the definition of a scale here.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> x = jnp.array([[1.0, 0.5, 0.3]], jnp.bfloat16)
      >>> jaxmoe.dequantize(jaxmoe.quantize_tokens(x, "fp8_block"), dtype=jnp.float32).tolist()
      [[1.0, 0.5, 0.2857142984867096]]
    """
    op = "dequantize"
    check_quantized(op, "q", q)
    out_dtype = _checks.float_dtype(op, "dtype", q.dtype if dtype is None else dtype)
    values, scales = jnp.asarray(q.values), jnp.asarray(q.scales)
    format, tokens = format_of(q), q.layout == "tokens"
    decode = _decode_packed if format.packed else _decode
    out = decode(values, scales, format=format, tokens=tokens)
    return (jnp.swapaxes(out, 1, 2) if q.layout == "kn" else out).astype(out_dtype)


def format_of(q: QuantizedArray) -> _formats.Format:
    """The format of a quantized array."""
    return _formats.QUANTIZED[q.format].of(q.dtype)


def stored_shape(q: QuantizedArray) -> tuple[int, ...]:
    """The shape of what `q.values` stand for as they are stored: K last."""
    format = format_of(q)
    return (format.token_shape if q.layout == "tokens" else format.weight_shape)(q.values.shape)


def scales_shape(format: str, layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales of what has the shape `shape` ([E, N, K] or [R, K])."""
    return _formats.QUANTIZED[format].scales_shape(shape, layout == "tokens")


def check_quantized(op: str, name: str, q: Any) -> None:
    """Refuses anything but a `QuantizedArray` whose leaves fit each other and its format."""
    if not isinstance(q, QuantizedArray):
        raise TypeError(_checks.message(op, f"{name} must be a jaxmoe.QuantizedArray", **{name: q}))
    format, tokens = format_of(q), q.layout == "tokens"
    if tokens and not format.token_arrays:
        raise ValueError(_checks.message(op, _for_weights(q.format), **{name: q}))
    _checks.check_rank(op, f"{name}.values", q.values, "R,K" if tokens else "E,N,K")
    if refused := format.refused_dtype(q.dtype):
        raise TypeError(_checks.message(op, f"{name}.{refused}", **{name: q}))
    allowed = [np.dtype(d).name for d in format.element_types.values()]
    _checks.check_dtype(op, f"{name}.values", q.values, allowed)
    shape = stored_shape(q)
    wanted = (format.stored_token_shape if tokens else format.stored_shape)(shape)
    _checks.check_shape(op, f"{name}.values", q.values, wanted, f"{q.format}, whole blocks")
    check_scales(op, f"{name}.scales", q.scales, q.format, q.layout, shape)


def check_scales(
    op: str, name: str, scales: Any, format: str, layout: str, shape: tuple[int, ...]
) -> None:
    """Refuses scales that do not have the dtype and shape of values of the shape `shape`."""
    _checks.check_dtype(op, name, scales, ("float32",))
    _checks.check_shape(
        op, name, scales, scales_shape(format, layout, shape), f"{format}, layout {layout}"
    )


def _element_types() -> tuple[str, ...]:
    """The names of all element types, each once."""
    return tuple(dict.fromkeys(n for f in _formats.QUANTIZED.values() for n in f.element_types))


def _check_options(
    op: str,
    name: str,
    x: Any,
    format: Any,
    element_type: Any,
    scale: Any,
    scale_format: Any,
    tokens: bool = False,
) -> str:
    """Checks the options. Returns the element type, by default the usual one of the format."""
    of_weights = isinstance(format, str) and format in FORMATS  # which says why it is refused
    known = TOKEN_FORMATS if tokens and not of_weights else FORMATS
    _checks.check_choice(op, "format", format, known)
    allowed = _formats.QUANTIZED[format].element_types
    _checks.check_dtype(op, name, x, _checks.FLOATS)
    if element_type is None:
        element_type = next(iter(allowed))
    _checks.check_choice(op, "element_type", element_type, _element_types())
    _checks.check_choice(op, "scale_format", scale_format, SCALE_FORMATS)
    if element_type not in allowed:
        those = [f.name for f in _formats.QUANTIZED.values() if element_type in f.element_types]
        rule = (
            f"element_type={element_type!r} is only for format={' or '.join(map(repr, those))}; "
            f"{format} has {' and '.join(allowed)}"
        )
        raise NotImplementedError(_checks.message(op, rule))
    if scale is not None and scale_format != "float32":
        rule = (
            f"scale_format={scale_format!r} must be 'float32' if scale is given: it is not rounded"
        )
        raise ValueError(_checks.message(op, rule, scale=scale))
    asked = scale is not None, scale_format == "e8m0", tokens
    if refused := _formats.QUANTIZED[format].refused_option(*asked):
        given = {} if scale is None else {"scale": scale}
        raise ValueError(_checks.message(op, refused, **{name: x}, **given))
    return element_type


def check_steps(op: str, name: str, w: Any, format: _formats.Format, layout: str) -> None:
    """Refuses weights whose N or K the blocks of the format do not divide."""
    for letter, step in zip("NK", format.steps, strict=True):
        axis = 1 + ((letter == "K") == (layout == "nk"))
        size = w.shape[axis]
        if step > 1 and (size < 1 or size % step):
            rule = (
                f"{name}.shape[{axis}]={size} ({letter}) must be a positive multiple of {step} in "
                f"{format.name}; {_checks.nearest(size, step)}"
            )
            raise ValueError(_checks.message(op, rule, **{name: w}))


def _for_weights(format: str) -> str:
    return f"format={format!r} is for weights: its tokens are not quantized"


def _quantized(
    op: str,
    x: jax.Array,
    format: str,
    layout: str,
    element_type: str,
    scale: Any,
    scale_format: str,
) -> QuantizedArray:
    """Quantizes x, [E, N, K] or [R, K]."""
    if scale is not None:
        scale = np.asarray(scale) if isinstance(scale, np.generic) else scale
        check_scales(op, "scale", scale, format, layout, x.shape)
        scale = frozen(jnp.asarray(scale), op, "input", _NO_DERIVATIVE)
    in_dtype = _formats.QUANTIZED[format].of(np.dtype(x.dtype))
    x = frozen(x, op, "input", _NO_DERIVATIVE)
    if in_dtype.packed:
        values, scales = _encode_packed(x, scale, format=in_dtype, tokens=layout == "tokens")
    else:
        values, scales = in_dtype.encode(
            x,
            scale,
            element_type=element_type,
            e8m0=scale_format == "e8m0",
            tokens=layout == "tokens",
        )
    return QuantizedArray(values, scales, format, layout, np.dtype(x.dtype))


# Programs of their own: packing is a hundred small operations, each with a temporary as large as
# the weights.
@functools.partial(jax.jit, static_argnames=("format", "tokens"))
def _encode_packed(
    x: jax.Array, scale: jax.Array | None, *, format: _formats.Format, tokens: bool
) -> tuple[jax.Array, jax.Array]:
    return format.encode(x, scale, element_type="", e8m0=False, tokens=tokens)


def _decode(
    values: jax.Array, scales: jax.Array, *, format: _formats.Format, tokens: bool
) -> jax.Array:
    return format.decode(values, scales, tokens)


_decode_packed = jax.jit(_decode, static_argnames=("format", "tokens"))
