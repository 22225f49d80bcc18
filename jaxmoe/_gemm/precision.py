"""What a `precision` of JAX means for products of float32 factors."""

import enum
from typing import Any

import jax

TF32 = "tensorfloat32"

# NOTE: names, as `jax.lax.Precision` has one member for "tensorfloat32" and for "high".
_TF32 = {TF32, "TF32_TF32_F32"}
_HIGHEST = {
    *("HIGHEST", "highest", "float32", "F32_F32_F32"),
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
    given = precision if isinstance(precision, tuple) else (precision,)
    return {p.name if isinstance(p, enum.Enum) else p for p in given}
