"""Elements of packed weights: numbers of four and eight bits, and powers of two, as their bits.

All roundings are to nearest, ties to even, and what is too large becomes the largest.
"""

from typing import Any

import jax
import jax.numpy as jnp

E2M1_MAX, E4M3_MAX = 6.0, 448.0


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Rounds float32 to e2m1: uint8 codes, sign << 3 | exponent << 1 | mantissa. NaN becomes 0."""
    a = jnp.abs(x)
    # Between neighbours; what lies in the middle goes to the one whose mantissa is 0.
    above = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5)
    magnitude = sum((b.astype(jnp.uint8) for b in above), jnp.zeros(x.shape, jnp.uint8))
    return magnitude | (jnp.signbit(x) & ~jnp.isnan(x)).astype(jnp.uint8) << 3


def e2m1(codes: jax.Array) -> jax.Array:
    """The numbers that e2m1 codes stand for, float32."""
    magnitude = (codes & 7).astype(jnp.int32)
    # Exponent and mantissa are those of float32 but for the bias; 0.5 is the one subnormal number.
    normal = jax.lax.bitcast_convert_type((magnitude + (126 << 1)) << 22, jnp.float32)
    number = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where(codes >= 8, -number, number)


def e4m3_codes(x: jax.Array) -> jax.Array:
    """Rounds float32 to e4m3: its bits as uint8. NaN stays NaN."""
    limited = rounded(jnp.clip(x, -E4M3_MAX, E4M3_MAX), jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(limited.astype(jnp.float8_e4m3fn), jnp.uint8)


def e4m3(codes: jax.Array) -> jax.Array:
    """The numbers that bits of e4m3 stand for, float32."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent, float32, for int32 in [-126, 127]."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def times_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2^exponent, float32, for int32 in [-252, 254]; exact if the result is a normal number."""
    half = exponent // 2
    return x * power_of_two(half) * power_of_two(exponent - half)


def exponent_of(x: jax.Array) -> jax.Array:
    """floor(log2(x)) of positive float32, int32; -127 for zero and subnormal numbers."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def largest(x: jax.Array, axes: Any) -> jax.Array:
    """The largest finite |x| over `axes`, 0 if there is none."""
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=axes, initial=0)


def finite_scales(scales: jax.Array, steps: jax.Array | float, dtype: Any) -> jax.Array:
    """Scales that `dtype` has, or a little less where so many steps of one would be infinite."""
    info = jnp.finfo(dtype)
    most = over(jnp.full_like(scales, float(info.max)), steps) * (1.0 - float(info.eps))
    return jnp.where(scales * steps > float(info.max), rounded(most, dtype), scales)


def over(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """x / divisor, with the same bits under jit; NaN stays NaN.

    Rounded once on a CPU. XLA's division on a GPU is within two units of the last place, but exact
    here where divisor and quotient have at most 12 bits: quotients in the middle between two codes,
    frequent where 16-bit numbers have short scales, go to the even one on every device.

    NOTE: XLA turns division by what it broadcasts into a product with a rounded reciprocal, and
    merges two divisions. It cannot know that this divisor is the same for many.
    """
    divisor = jax.lax.optimization_barrier(jnp.where(jnp.isnan(x), x, divisor))
    quotient = jax.lax.optimization_barrier(x / divisor)
    short, short_divisor = (
        jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=11) for a in (quotient, divisor)
    )
    is_quotient = (short_divisor == divisor) & (short * short_divisor == x)  # an exact product
    return jnp.where(is_quotient, short, quotient)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 to the numbers of `dtype`, and keeps it float32; what is too large, infinite.

    NOTE: not astype and back, which XLA leaves out on a GPU. Whoever converts what this returns to
    `dtype` gets the same numbers whether it does or not.
    """
    info = jnp.finfo(dtype)
    normal = jax.lax.reduce_precision(x, jnp.finfo(jnp.float32).nexp, info.nmant)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        return normal
    # reduce_precision with the exponents of `dtype` makes zeros of its subnormal numbers, and knows
    # nothing of those past 240 that e4m3 has for an infinity. Powers of two as factors are exact.
    step = float(info.smallest_subnormal)
    subnormal = jnp.round(x * (1 / step)) * step
    y = jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, normal)
    # NOTE: not y * inf, whose derivative is infinite where it is not taken, and NaN times 0.
    return jnp.where(jnp.abs(y) > float(info.max), jnp.where(y > 0, jnp.inf, -jnp.inf), y)
