"""The primitive behind `quantize` and `quantize_tokens`, on stored values: contracted axis last."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._codes import choice
from jaxmoe._formats import elements
from jaxmoe._formats.base import Format, repeat_blocks
from jaxmoe._jax import mesh as _mesh
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import sizes as _sizes
from jaxmoe._jax import targets as _targets

BLOCK = 128  # elements of a block along each axis that has blocks
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126  # both, and what 1 / scale gives, are normal float32
ELEMENT_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
# NOTE: csrc has the same: Shared in common/types.h, kMaxQuantPartials in kernels/quantize.h.
MAX_PARTIALS = 1024

_BLOCK_AXES = {"tensor": (), "row": (), "group": (-1,), "block": (-2, -1)}
_MAX_INT = 2**31 - 1


# Elements that share a scale, a name of `CODES["shared"]`, by the dimensions of the scales.
_SHARED_BY = {
    **{"": "tensor", "t": "row", "t q": "group"},  # of tokens
    **{"e": "tensor", "e n": "row", "e p q": "block"},  # of weights
}


def sharing(scales: str) -> str:
    """Name in `CODES` of the elements that share a scale, given the dimensions of the scales."""
    return _SHARED_BY[scales]


def scales_shape(shape: tuple[int, ...], shared: str) -> tuple[int, ...]:
    """Returns the shape of the scales of values of the shape `shape`, [.., R, C]."""
    if shared == "tensor":
        return shape[:-2]
    if shared == "row":
        return shape[:-1]
    axes = _BLOCK_AXES[shared]
    return tuple(-(-n // BLOCK) if i - len(shape) in axes else n for i, n in enumerate(shape))


def spread(scales: jax.Array, shape: tuple[int, ...], shared: str) -> jax.Array:
    """Gives each element of the shape `shape` the scale that it shares."""
    if not _BLOCK_AXES[shared]:
        scales = scales.reshape(scales.shape + (1,) * (len(shape) - scales.ndim))
        return jnp.broadcast_to(scales, shape)
    for axis in _BLOCK_AXES[shared]:
        axis += len(shape)
        scales = repeat_blocks(scales, axis, BLOCK, shape[axis])
    return scales


def quantize(
    x: jax.Array, scale: jax.Array | None, *, shared: str, element_type: str, e8m0: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the values and scales of x, [B, R, C] or [R, C], on CUDA by the kernel."""
    params: dict[str, Any] = {"shared": shared, "element_type": element_type, "e8m0": e8m0}
    given = [x] if scale is None else [x, scale]
    if any(_mesh.explicit_axes(jax.typeof(a)) for a in given):
        return quantize_xla(x, scale, **params)  # XLA splits it as its arguments are
    if x.ndim == 3:
        values, scales = quantize_p(x, scale, **params)
        return values, scales
    values, scales = quantize_p(x[None], None if scale is None else scale[None], **params)
    return values[0], scales[0]


def scratch_floats(
    format: Format, rounds: bool, tokens: tuple[int, int], inner: tuple[int, int]
) -> int:
    """Floats of scratch of a layer's call: scales of x and of the intermediate, then maxima.

    `tokens` and `inner` are their shapes. If it `rounds` to numbers, both have scales of rows.
    """
    pad = lambda n: -(-n // 4) * 4  # noqa: E731
    if not format.quantizes_tokens:
        return 0
    of_x = (inner[0], tokens[1]) if rounds else tokens
    floats = pad(format.token_scale_count(*of_x)) + pad(format.token_scale_count(*inner))
    return floats if rounds else floats + MAX_PARTIALS


def quantize_xla(
    x: jax.Array, scale: jax.Array | None, *, shared: str, element_type: str, e8m0: bool
) -> tuple[jax.Array, jax.Array]:
    """Computes `quantize` in plain jnp, binding no primitive."""
    dtype = jnp.dtype(ELEMENT_DTYPES[element_type])
    limit = float(jnp.finfo(dtype).max)
    y = x.astype(jnp.float32)
    if scale is None:
        scales = _dynamic_scales(_largest(y, shared), limit, e8m0)
    else:
        scales = jnp.where((scale >= MIN_SCALE) & (scale <= MAX_SCALE), scale, jnp.nan)
    # NOTE: the barriers keep XLA from merging divisions, which would round differently under jit.
    scales = jax.lax.optimization_barrier(scales)
    inverse = jax.lax.optimization_barrier(1 / scales)
    y = jnp.clip(y * spread(inverse, x.shape, shared), -limit, limit)
    return elements.rounded(y, dtype).astype(dtype), scales


def _largest(x: jax.Array, shared: str) -> jax.Array:
    """Returns the largest finite |x| of each scale's elements, 0 if there is none."""
    x = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    if shared == "tensor":
        return jnp.max(x, axis=(-2, -1), initial=0)
    if shared == "row":
        return jnp.max(x, axis=-1, initial=0)
    for axis in _BLOCK_AXES[shared]:
        axis += x.ndim
        num_blocks = -(-x.shape[axis] // BLOCK)
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, num_blocks * BLOCK - x.shape[axis])
        x = jnp.pad(x, padding)
        x = x.reshape(*x.shape[:axis], num_blocks, BLOCK, *x.shape[axis + 1 :])
        x = jnp.max(x, axis=axis + 1, initial=0)
    return x


def _dynamic_scales(largest: jax.Array, limit: float, e8m0: bool) -> jax.Array:
    # NOTE: XLA turns division by a constant, even one that vmap broadcasts, into a product with its
    # rounded reciprocal. This divisor is `limit` too, but XLA cannot know.
    divisor = jax.lax.optimization_barrier(jnp.where(largest >= 0, limit, largest))
    scales = jnp.maximum(largest / divisor, MIN_SCALE)
    if e8m0:  # carry any mantissa bit into the exponent
        bits = jax.lax.bitcast_convert_type(scales, jnp.int32)
        bits = (bits + 0x007FFFFF) & 0x7F800000
        scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return scales


def _out(x: Any, _scale: Any, *, shared: str, element_type: str, e8m0: bool) -> Any:
    del e8m0
    dtype = jnp.dtype(ELEMENT_DTYPES[element_type])
    return [(x.shape, dtype), (scales_shape(x.shape, shared), jnp.float32)]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    """Folds the examples into the batch: a scale never spans two of its entries."""
    size = _primitive.batch_size(args, dims)
    x, scale = _primitive.move_batch_to_front(args.x, dims.x, size), args.scale
    fold = x.shape[0] * x.shape[1]
    if scale is not None:
        scale = _primitive.move_batch_to_front(scale, dims.scale, size)
        scale = scale.reshape(fold, *scale.shape[2:])
    values, scales = quantize_p(x.reshape(fold, *x.shape[2:]), scale, **params)
    return (values.reshape(x.shape), scales.reshape(*x.shape[:2], *scales.shape[1:])), (0, 0)


def _scratch(avals: Any, *, shared: str, **_params: Any) -> list[_primitive.Spec]:
    dynamic_tensor = shared == "tensor" and avals.scale is None
    return [((avals.x.shape[0] * MAX_PARTIALS if dynamic_tensor else 0,), jnp.float32)]


def _fallback(avals: Any, *, shared: str, **_params: Any) -> str | None:
    batch, rows, cols = avals.x.shape
    row_bytes = cols * avals.x.dtype.itemsize
    if row_bytes % 16:
        return f"rows of {row_bytes} bytes are no multiple of 16"
    if _sizes.exceeds(batch * rows, _MAX_INT) or cols > _MAX_INT:
        return f"{batch * rows} rows of {cols} elements are more than 2^31 - 1"
    ((size,), _) = _scratch(avals, shared=shared)[0]
    if _sizes.exceeds(size, _MAX_INT):
        return f"{batch} tensors with a scale each are more than {_MAX_INT // MAX_PARTIALS}"
    return _targets.device_reason()


quantize_p = _primitive.define(
    "jaxmoe_quantize",
    out=_out,
    xla=quantize_xla,
    batch=_batch,
    cuda=_primitive.CudaTarget(
        "jaxmoe_quantize_v1",
        attrs=lambda _avals, *, shared, e8m0, **_: {
            "shared": choice("shared", shared),
            "e8m0": int(e8m0),
        },
        scratch=_scratch,
        fallback=_fallback,
        absent={"scale": (1, jnp.float32)},
        xla_splits=True,
    ),
)
