"""Gate and up, which many checkpoints keep apart, as one array."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats.elements import exponent_of, times_power
from jaxmoe._formats.parts import pack, unpack
from jaxmoe._jax import checks as _checks
from jaxmoe.checkpoints.fp8 import check_weights, check_whole_blocks
from jaxmoe.checkpoints.known import known
from jaxmoe.quantize import FORMATS, QuantizedArray


def join_gate_up(gate: QuantizedArray, up: QuantizedArray) -> QuantizedArray:
    """Joins the gate and up matrices of checkpoints that keep them apart.

    fp8_channel, fp8_block, int8_channel: values and scales one after the other.
    fp8_tensor: one scale for both, s = max(s_gate, s_up), and values = fp8(values * (s_gate / s)).
    Other packed formats: values one after the other. An array has one number of each expert in
    `scales`: that of both must be the same, or in mx formats the same times a power of two, which
    goes into the exponents of groups.

    Args:
      gate: [E, I, H] ("nk") or [E, H, I] ("kn") weights in any format.
      up: the same.

    Returns:
      [E, 2I, H] or [E, H, 2I] with the gate first: `gate_up="gate_up"`. For the other order swap
      the arguments.

    Raises:
      TypeError: one is no `QuantizedArray`.
      ValueError: they differ in format, layout, dtype or shape; I is no multiple of 128 in
        fp8_block: the block in the middle would need two scales; or `scales` of an expert are not
        the same in nvfp4 and int4. `jaxmoe.dequantize` both, join and quantize again, or keep two
        arrays. Where `scales` are not known, traced by `jax.jit`, such an expert is NaN instead.

    Numerics: no number changes but in fp8_tensor, and in mx formats those of groups whose exponent
      is 253 or more below the largest of both, which are zeros.
      In fp8_tensor the matrix with the larger scale keeps its bits, and so does the other
      where the ratio is a power of two and no value gets below 2^-6; otherwise its values are
      rounded once more, by at most 2^-4 of themselves or 2^-10 s (e5m2: 2^-3 or 2^-17 s).
    Source: the common scale is what vLLM's FP8 experts are loaded with.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> gate = jaxmoe.quantize(jnp.ones((1, 1, 4)), "fp8_tensor", weight_layout="nk")
      >>> up = jaxmoe.quantize(jnp.full((1, 1, 4), 2.0), "fp8_tensor", weight_layout="nk")
      >>> w = jaxmoe.checkpoints.join_gate_up(gate, up)
      >>> w.values[0, :, 0].tolist(), jaxmoe.dequantize(w)[0, :, 0].tolist()
      ([224.0, 448.0], [1.0, 2.0])
    """
    return joined("checkpoints.join_gate_up", gate=gate, up=up)


def joined(op: str, **halves: QuantizedArray) -> QuantizedArray:
    """`join_gate_up` of two halves in their order, by the names that the caller gives them."""
    for name, q in halves.items():
        check_weights(op, name, q, FORMATS)
    name, other = halves
    first = halves[name]
    for field in ("format", "layout", "dtype", "values.dtype", "shape"):
        a, b = (q.values.dtype if "." in field else getattr(q, field) for q in halves.values())
        if a != b:
            rule = f"{other}.{field}={b} must equal {name}.{field}={a}"
            raise ValueError(_checks.message(op, rule, **halves))
    values = tuple(jnp.asarray(q.values) for q in halves.values())
    scales = tuple(jnp.asarray(q.scales) for q in halves.values())
    if first.format.startswith("mx"):
        return _joined_mx(op, halves)
    if first.format == "fp8_tensor":
        common = jnp.maximum(*scales)
        values = tuple(_rescale(v, s, common) for v, s in zip(values, scales, strict=True))
    elif scales[0].ndim > 1:
        if first.format == "fp8_block":
            check_whole_blocks(op, name, first, first.values.shape[1])
        common = jnp.concatenate(scales, 1)
    else:
        _check_same(op, halves, scales, f"must be the same in {first.format}")
        common = jnp.where(scales[0] == scales[1], scales[0], jnp.nan)
    return QuantizedArray(
        jnp.concatenate(values, 1), common, first.format, first.layout, first.dtype
    )


def _joined_mx(op: str, halves: dict[str, QuantizedArray]) -> QuantizedArray:
    """Exponents of groups are those of both halves; what is no power of two stays in `scales`."""
    first, second = halves.values()
    left = [times_power(q.scales, -exponent_of(q.scales)) for q in (first, second)]
    _check_same(op, halves, left, f"must be the same times a power of two in {first.format}")
    parts = zip(unpack(first), unpack(second), strict=True)
    q = pack(
        first.format,
        *(jnp.concatenate(pair, axis=1) for pair in parts),
        weight_layout=first.layout,
        dtype=first.dtype,
        op=op,
    )
    scales = q.scales * jnp.where(left[0] == left[1], left[0], jnp.nan)
    return QuantizedArray(q.values, scales, q.format, q.layout, q.dtype)


def _check_same(op: str, halves: dict[str, Any], numbers: Any, rule: str) -> None:
    """Refuses `scales` of halves whose `numbers`, if they are known, are not the same."""
    first, second = map(known, numbers)
    if first is None or second is None or (first == second).all():
        return
    expert = int(np.argmax(first != second))
    given = (f"{name}.scales[{expert}]={float(q.scales[expert])}" for name, q in halves.items())
    rule = (
        f"{' and '.join(given)} {rule}, which has one number for each expert in an array; keep two "
        "arrays, or jaxmoe.dequantize, join and quantize again"
    )
    raise ValueError(_checks.message(op, rule, **halves))


def _rescale(values: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Rounds values * (old / new), new >= old, to their own dtype; equal scales change nothing."""
    ratio = jax.lax.optimization_barrier(jnp.where(old == new, 1, old / new))
    return (values.astype(jnp.float32) * ratio[:, None, None]).astype(values.dtype)
