"""What a `precision` of JAX means for products of float32 factors."""

import enum
from typing import Any

import jax
import jax.numpy as jnp

TF32 = "tensorfloat32"

# NOTE: names, as `jax.lax.Precision` has one member for "tensorfloat32" and for "high".
_TF32 = {TF32, "TF32_TF32_F32"}
_HIGHEST = {
    *("HIGHEST", "highest", "float32", "F32_F32_F32", "F64_F64_F64"),
    *("BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "TF32_TF32_F32_X3"),
}


def asked(precision: Any) -> Any:
    """The precision given to a function of float32 factors, else `jax.default_matmul_precision`.

    To be called while that function is traced, as the default may be another one when it is
    lowered or differentiated. TF32 has one name, which XLA knows on every device.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    return TF32 if is_tf32(precision) else precision


def is_tf32(precision: Any) -> bool:
    """Whether it asks for TF32 of both factors."""
    return _names(precision) <= _TF32


def of_precision(precision: Any) -> int:
    """The number of bf16 parts that a factor has."""
    return 2 if _names(precision).isdisjoint(_HIGHEST) else 3


def _names(precision: Any) -> set[Any]:
    if isinstance(precision, jax.lax.DotAlgorithm):  # which is a tuple too
        return {_name_of(precision)}
    given = precision if isinstance(precision, tuple) else (precision,)
    return {p.name if isinstance(p, enum.Enum) else p for p in given}


def _name_of(algorithm: jax.lax.DotAlgorithm) -> str:
    """A name that says how exact it is. NumPy has no dtype for TF32."""
    types = {jnp.dtype(dtype).name for dtype in algorithm[:2]}
    wide = not types.isdisjoint(("float32", "float64"))
    return "highest" if wide or algorithm.num_primitive_operations > 3 else "default"
