"""Weights and scales that are broadcast over them, as quantizers in JAX hold both."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats import elements
from jaxmoe._formats.base import repeat_blocks
from jaxmoe._formats.parts import pack
from jaxmoe._formats.quantization import BLOCK
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.known import check_numbers, known
from jaxmoe.quantize import WEIGHT_LAYOUTS, QuantizedArray

_FLOATS = ("float32", "bfloat16", "float16")
_DTYPES = (*_FLOATS, "float8_e8m0fnu", "float8_e4m3fn")
# Formats whose scales are numbers of their own kind.
SCALE_FORMATS = ("mxfp8", "mxfp4", "nvfp4")
# What there is, by the dtype of values: for messages.
_KNOWN = {
    "float8_e4m3fn": "fp8_tensor (a scale for an expert), fp8_channel (for an output, over all of "
    "K), fp8_block (for whole blocks of 128 by 128) and mxfp8 (e8m0, for 32 of K)",
    "float8_e5m2": "fp8_tensor (a scale for an expert)",
    "int8": "int8_channel (a scale for an output, over all of K)",
    "int4": "int4_g32, int4_g64, int4_g128 and int4_channel (a scale for 32, 64, 128 or all of K)",
    "float4_e2m1fn": "mxfp4 (e8m0, for 32 of K) and nvfp4 (e4m3, for 16 of K)",
}


@_checks.array_likes
def from_scales(
    values: jax.Array,
    scales: jax.Array,
    zero_points: jax.Array | None = None,
    *,
    weight_layout: str,
    scale_format: str | None = None,
    dtype: Any = None,
) -> QuantizedArray:
    """Reads weights with broadcast scales into the format that holds them exactly.

    w = (values - zero_points) * scales

    each scale spread over the neighbours along each axis that share it.

    Args:
      values: [E, K, N], or [E, N, K] with `weight_layout` "nk"; float8_e4m3fn, float8_e5m2, int8,
        int4 or float4_e2m1fn.
      scales: an array of as many axes, each of which divides that of `values`: [E, 1, N] is a scale
        for each output, [E, K / 128, N / 128] one for each block. Or [E, blocks of K, 1, N] of
        layout "kn". float32, bfloat16 or float16; float8_e8m0fnu and float8_e4m3fn in the formats
        that have such.
      zero_points: int4 beside int4 `values`, in the shape of `scales`.
      weight_layout: "kn" or "nk".
      scale_format: "mxfp8", "mxfp4" or "nvfp4" if the scales, in a wider dtype, are numbers that
        this format has.
      dtype: bfloat16, float16 or float32, which `jaxmoe.dequantize` shall return; that of `scales`
        by default, bfloat16 if they are no floats of 16 or 32 bits. int4: that of `scales`.

    Returns:
      `QuantizedArray` of layout `weight_layout`.

    Raises:
      TypeError: a dtype that is not listed.
      ValueError: shapes that do not go together, and scales that no format has: the message lists
        the formats that there are for such values. N and K of packed formats that are no multiples
        of their blocks. A scale that `scale_format` does not have: no power of two from 2^-127 to
        2^127, or no number of e4m3. Traced by `jax.jit` scales are not known, and nothing checks
        them: they are rounded to e4m3, zeros included, or cut to a power of two.

    Numerics: no number changes. In FP8 formats products quantize tokens too.
    Source: qwix' QArray, aqt's QTensor, the scales of tpu-inference.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import checkpoints
      >>> values = jnp.ones((2, 128, 64), jnp.int8)  # [E, K, N]
      >>> checkpoints.from_scales(values, jnp.ones((2, 1, 64)), weight_layout="kn").format
      'int8_channel'
    """
    op = "checkpoints.from_scales"
    if scale_format is not None:
        _check_scales_of(op, scales, scale_format)
    a = given(op, values, scales, zero_points, weight_layout, scale_format, dtype)
    _check_int4(a)
    if (read := read_as(a)) is None:
        got: dict[str, Any] = {"values": values, "scales": scales}
        got |= {} if zero_points is None else {"zero_points": zero_points}
        kind, zeros = np.dtype(values.dtype).name, "" if zero_points is None else " and zero_points"
        rule = (
            f"scales{zeros} must be those of a format. For values of {_checks.dtype_name(kind)} "
            f"there are {_KNOWN[kind]}; weight_from_scales decodes the others"
        )
        raise ValueError(_checks.message(op, rule, **got))
    return array_of(a, *read, of=("values", values))


def _check_scales_of(op: str, scales: Any, format: Any) -> None:
    """Refuses scales, if they are known, that would become others in the format."""
    _checks.check_choice(op, "scale_format", format, SCALE_FORMATS)
    _checks.check_dtype(op, "scales", scales, _DTYPES)
    numbers = known(scales)
    if numbers is None:
        return
    good = held(numbers.astype(np.float32), format)
    of = "a number of e4m3" if format == "nvfp4" else "a power of two from 2^-127 to 2^127"
    rule = f"{of} in {format}; weight_from_scales decodes weights that have others"
    check_numbers(op, "scales", numbers, good, rule)


def held(scales: np.ndarray[Any, Any], format: str) -> np.ndarray[Any, Any]:
    """Which of float32 scales are numbers of the format's own kind; NaN is."""
    if format == "nvfp4":
        with np.errstate(over="ignore", under="ignore"):
            good = scales.astype(jnp.float8_e4m3fn).astype(np.float32) == scales
    else:
        mantissa, exponent = np.frexp(scales)
        good = (mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)
    return good | np.isnan(scales)


def _of_rank_three(op: str, name: str, a: Any, values: Any, layout: str) -> Any:
    """Checks `scales` or `zero_points` against `values`; makes [E, blocks, N] of four axes."""
    _checks.check_array(op, name, a)
    if a.ndim == 4 and layout == "kn" and a.shape[2] == 1:
        a = a.reshape(*a.shape[:2], a.shape[3])
    if a.ndim != 3 or any(not n or m % n for m, n in zip(values.shape, a.shape, strict=True)):
        rule = f"{name} must have axes that divide those of values, or be [E,blocks of K,1,N]"
        raise ValueError(_checks.message(op, rule, **{name: a, "values": values}))
    if a.shape[0] not in (1, values.shape[0]):
        rule = f"{name}.shape[0]={a.shape[0]} must be 1 or {values.shape[0]} (num_experts)"
        raise ValueError(_checks.message(op, rule, **{name: a, "values": values}))
    return a


def spread(a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats elements along each axis until there are as many as `shape` says."""
    for axis, size in enumerate(shape):
        a = repeat_blocks(a, axis, -(-size // a.shape[axis]), size)
    return a


class Given(NamedTuple):
    """What there is to read.

    Attributes:
      op: whose errors they are.
      values: [E, N, K], or [E, K, N] by `layout`; scales and zeros as many parts of these axes.
      kind: the kind of the scales, or the format that has it, if it is not that of floats.
      dtype: what the weights are dequantized to.
      dtype_given: whether the caller said so.
    """

    op: str
    values: Any
    scales: Any
    zeros: Any
    kind: str | None
    layout: str
    dtype: Any
    dtype_given: bool

    @property
    def turned(self) -> "Given":
        """All of it with [E, N, K] as the axes."""
        if self.layout == "nk":
            return self

        def turned(a: Any) -> Any:
            return None if a is None else jnp.swapaxes(jnp.asarray(a), 1, 2)

        arrays = {name: turned(getattr(self, name)) for name in ("values", "scales", "zeros")}
        return self._replace(**arrays)


# The name of a format and what it is made of, None if there is none.
Read = tuple[str, tuple[jax.Array, ...]] | None


def given(
    op: str,
    values: Any,
    scales: Any,
    zero_points: Any,
    weight_layout: str,
    scale_format: str | None,
    dtype: Any,
) -> Given:
    """Checks the arguments of a reader of broadcast scales."""
    _checks.check_choice(op, "weight_layout", weight_layout, WEIGHT_LAYOUTS)
    _checks.check_rank(op, "values", values, "E,K,N" if weight_layout == "kn" else "E,N,K")
    _checks.check_dtype(op, "values", values, tuple(_KNOWN))
    if scale_format is not None:
        _checks.check_choice(op, "scale_format", scale_format, SCALE_FORMATS)
    scales = _of_rank_three(op, "scales", scales, values, weight_layout)
    if zero_points is not None:
        zero_points = _of_rank_three(op, "zero_points", zero_points, values, weight_layout)
    _checks.check_dtype(op, "scales", scales, _DTYPES)
    name = np.dtype(scales.dtype).name
    kind = scale_format or {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}.get(name)
    wanted = dtype
    if dtype is None:
        wanted = scales.dtype if name in _FLOATS else jnp.bfloat16
    wanted = _checks.float_dtype(op, "dtype", wanted)
    arrays = values, scales, zero_points
    return Given(op, *arrays, kind, weight_layout, wanted, dtype is not None)


def read_as(a: Given) -> Read:
    """The format that has such values and scales whatever their numbers are, and its parts."""
    name = np.dtype(a.values.dtype).name
    return None if a.zeros is not None and name != "int4" else _READERS[name](a.turned)


def array_of(a: Given, format: str, parts: tuple[jax.Array, ...], of: Any) -> QuantizedArray:
    """The array in a format of what `read_as` returned; `of` as in `pack`."""
    if format.startswith("fp8"):
        values, scales = parts
        return QuantizedArray(values, scales, format, a.layout, a.dtype)
    dtype = np.dtype(parts[1].dtype) if format.startswith("int4") else a.dtype
    return pack(format, *parts, weight_layout=a.layout, dtype=dtype, op=a.op, of=of)


def _check_int4(a: Given) -> None:
    """Refuses int4 values beside scales or zero points of dtypes that no format has."""
    if np.dtype(a.values.dtype).name != "int4" or a.kind is not None:
        return
    if a.zeros is not None:
        _checks.check_dtype(a.op, "zero_points", a.zeros, ("int4",))
    if np.dtype(a.scales.dtype).itemsize != 2:
        rule = (
            f"scales.dtype={_checks.dtype_name(a.scales.dtype)} must be bf16 or f16 with int4 "
            "values: formats have such scales, and rounding them is yours to do"
        )
        raise TypeError(_checks.message(a.op, rule, scales=a.scales))


def _e4m3(a: Given) -> Read:
    values, scales, kind = a.values, a.scales, a.kind
    if kind in ("mxfp8", "e8m0"):
        return _micro("mxfp8", values, scales)
    wide = scales.astype(jnp.float32)
    e, n, k = values.shape
    rows, group = n // scales.shape[1], k // scales.shape[2]
    if kind is not None:
        return None
    if scales.shape[2] == 1:
        if scales.shape[1] == 1:
            return "fp8_tensor", (values, spread(wide[:, 0, 0], (e,)))
        return "fp8_channel", (values, spread(wide[:, :, 0], (e, n)))
    if group % BLOCK or (rows % BLOCK and scales.shape[1] > 1):
        return None
    return "fp8_block", (values, spread(wide, (e, -(-n // BLOCK), k // BLOCK)))


def _e5m2(a: Given) -> Read:
    return _e4m3(a) if a.kind is None and a.scales.shape[1:] == (1, 1) else None


def _int8(a: Given) -> Read:
    values, scales = a.values, a.scales
    if a.kind is not None or scales.shape[2] != 1:
        return None
    wide = scales[:, :, 0].astype(jnp.float32)
    return "int8_channel", (values, spread(wide, values.shape[:2]))


def _int4(a: Given) -> Read:
    values, scales, zeros = a.values, a.scales, a.zeros
    if a.kind is not None or np.dtype(scales.dtype).itemsize != 2:
        return None
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != jnp.int4):
        return None
    e, n, k = values.shape
    group = k // scales.shape[2]
    size = next((g for g in (128, 64, 32) if group % g == 0), 0)
    if scales.shape[2] == 1:
        name, count = "int4_channel", 1
    elif size:
        name, count = f"int4_g{size}", k // size
    else:
        return None
    codes = (values.astype(jnp.int8) + jnp.int8(8)).astype(jnp.uint8)
    parts = (codes, spread(scales, (e, n, count)))
    if zeros is None:
        return name, parts
    zeros = (zeros.astype(jnp.int8) + jnp.int8(8)).astype(jnp.uint8)
    return f"{name}_zp", (*parts, spread(zeros, (e, n, count)))


def _e2m1(a: Given) -> Read:
    format = {"e8m0": "mxfp4", "e4m3": "nvfp4"}.get(a.kind or "", a.kind)
    return None if format not in ("mxfp4", "nvfp4") else _micro(format, a.values, a.scales)


def _micro(format: str, values: jax.Array, scales: jax.Array) -> Read:
    """Elements with a scale for each 32 or 16 of K, in the bytes that files have."""
    e, n, k = values.shape
    size = 16 if format == "nvfp4" else 32
    if (k // scales.shape[2]) % size:
        return None
    scales = spread(scales, (e, n, k // size))
    if format == "mxfp8":
        codes = jax.lax.bitcast_convert_type(values, jnp.uint8)
    else:
        codes = elements.e2m1_codes(values.astype(jnp.float32))
    if format == "nvfp4":
        return format, (codes, scales.astype(jnp.float8_e4m3fn), jnp.ones((e,), jnp.float32))
    if scales.dtype == jnp.float8_e8m0fnu:
        return format, (codes, jax.lax.bitcast_convert_type(scales, jnp.uint8))
    bits = jax.lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.int32)
    return format, (codes, (bits >> 23).astype(jnp.uint8))


_READERS: dict[str, Callable[[Given], Read]] = {
    "float8_e4m3fn": _e4m3,
    "float8_e5m2": _e5m2,
    "int8": _int8,
    "int4": _int4,
    "float4_e2m1fn": _e2m1,
}
