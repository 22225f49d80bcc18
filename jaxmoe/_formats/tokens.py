"""Tokens that are quantized beside packed weights, in a format of their own.

Products multiply the numbers that tokens stand for, which the dtype of the layer holds exactly, by
the kernels of the weights. A scale that all tokens share multiplies the scales of the weights, one
of each token the float32 sums of its rows. On CUDA the layer is one call if it rounds by the rule.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._codes import Choice
from jaxmoe._formats.base import Factors, Format, Tokens
from jaxmoe._formats.fp8 import FP8_CHANNEL, FP8_TENSOR
from jaxmoe._formats.weight_only import Packed
from jaxmoe._jax.checks import dtype_name


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """How tokens are quantized.

    Attributes:
      name: what users call it.
      array: the format of a `jaxmoe.QuantizedArray` of such tokens.
      scales: dimensions of what multiplies the numbers that products read, "" or "t".
      common: whether that is one scale, made of all tokens.
      static: whether the caller may give it; rules without it have no scales beside the numbers.
      dtypes: of layers that hold the numbers exactly.
      code: what the kernels call it, -1 if none rounds so; the extension exports the same table.
      numbers: whether `given` makes numbers in the dtype of the layer, as its kernels read them.
    """

    name: str
    array: Format
    scales: str
    common: bool = False
    static: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    code: int = -1
    numbers: bool = False

    def in_call(self, absent: tuple[str, ...]) -> bool:
        """Whether kernels round the tokens of a layer without the operands `absent`.

        Not by a scale that is made of all tokens. Those of x may be quantized already.
        """
        static = {"x_scale", "h_scale"} if "x_scales" in absent else {"h_scale"}
        return self.code >= 0 and not (self.common and static & set(absent))

    def tokens(self, x: jax.Array, scale: jax.Array | None) -> Tokens:
        """Quantizes rows [R, K]: numbers that products read, and what multiplies the sums.

        A static `scale` is [] or [R].
        """
        raise NotImplementedError

    def given(self, values: jax.Array, scales: jax.Array, dtype: Any) -> Tokens:
        """The same of a `jaxmoe.QuantizedArray`."""
        del dtype
        return Tokens(values, scales)


@dataclasses.dataclass(frozen=True)
class Fp8Tokens(TokenRule):
    """e4m3, with a scale for each token, or a static one."""

    def tokens(self, x: jax.Array, scale: jax.Array | None) -> Tokens:
        """Quantizes rows as the FP8 formats do."""
        return (FP8_TENSOR if scale is not None and not scale.ndim else FP8_CHANNEL).tokens(
            x, scale
        )


@dataclasses.dataclass(frozen=True)
class PackedTokens(TokenRule):
    """Codes with factors of neighbours, as the packed weights of `array` have them."""

    numbers: bool = True

    def tokens(self, x: jax.Array, scale: jax.Array | None) -> Tokens:
        """Quantizes rows to the numbers of codes times factors."""
        codes, factors, left = self.packed.encoded_tokens(x, scale)
        return Tokens(self.packed.numbers(codes, factors).astype(x.dtype), left)

    def given(self, values: jax.Array, scales: jax.Array, dtype: Any) -> Tokens:
        """Decodes the rows of bytes of an array."""
        codes, factors = self.packed.unpacked_tokens(values)
        return Tokens(self.packed.numbers(codes, factors).astype(dtype), scales)

    @property
    def packed(self) -> Packed:
        """The format of the array."""
        assert isinstance(self.array, Packed)
        return self.array


@dataclasses.dataclass(frozen=True)
class QuantizedTokens(Format):
    """Packed weights, and the format of the tokens beside them.

    Attributes:
      weights: the format of the weights.
      rule: that of the tokens.
      applied: whether static scales of tokens are in those of the weights already.
      numbers: whether x, if it is quantized already, has the dtype of the layer.
    """

    weights: Format = Format("plain")
    rule: TokenRule = TokenRule("", Format("plain"), "")
    applied: bool = False
    numbers: bool = False

    def rounding_in_call(self, absent: tuple[str, ...]) -> Choice | None:
        """The rule, if kernels have it."""
        if self.of_numbers(absent) is not None:
            return None
        return Choice(self.rule.code, self.rule.name) if self.rule.in_call(absent) else None

    def of_numbers(self, absent: tuple[str, ...]) -> Format | None:
        """The format of the layer whose x is converted from bytes, if one call runs that."""
        given = "x_scales" not in absent and not (self.numbers or self.rule.numbers)
        if not given or not self.rule.in_call(absent):
            return None
        return dataclasses.replace(self, numbers=True)

    def multiplies_codes(self, absent: tuple[str, ...]) -> bool:
        """Whether there are kernels that round tokens and multiply codes of the weights by them."""
        rounds_all = self.rule.in_call(absent) and "x_scales" in absent
        return rounds_all and self.rule.name == self.weights.coded_by

    @property
    def of_kernels(self) -> Format:
        """The weights."""
        return self.weights

    @property
    def described(self) -> str:
        """The name, and that of the rule."""
        return f"{self.name}, tokens {self.rule.name}"

    def token_scale_count(self, rows: int, k: int) -> int:
        """Floats of scale that [rows, k] tokens have where kernels round them."""
        del k
        return rows if self.rule.static else 0

    @property
    def packed(self) -> bool:
        """As the weights."""
        return self.weights.packed

    @property
    def steps(self) -> tuple[int, int]:
        """As the weights."""
        return self.weights.steps

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As the weights."""
        return self.weights.stored_shape(shape)

    def weight_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """As the weights."""
        return self.weights.weight_shape(stored)

    def unit(self, size: int, axis: str) -> int:
        """As the weights, whose units are whole groups of tokens too."""
        return self.weights.unit(size, axis)

    def dequantizing(self) -> Format:
        """The weights alone: no token is quantized in a derivative."""
        return self.weights.dequantizing()

    @property
    def token_array(self) -> str | None:
        """The format of quantized tokens."""
        return self.rule.array.name

    @property
    def one_token_scale(self) -> bool:
        """Whether all tokens share a scale, which is made of all of them."""
        return self.rule.common

    def shared_over(self, k: bool, rows: bool) -> bool:
        """Whether one scale of tokens spans rows (or k) that lie on several devices."""
        varies = self.rule.common or self.rule.scales != ""
        return varies and super().shared_over(k, rows)

    def refused_input(self, dtype: Any) -> str | None:
        """Numbers of tokens are exact in the dtype of the layer."""
        if jnp.dtype(dtype).name in self.rule.dtypes:
            return None
        allowed = " or ".join(dtype_name(jnp.dtype(d)) for d in self.rule.dtypes)
        return (
            f"dtype={dtype_name(jnp.dtype(dtype))} must be {allowed} with "
            f"token_format={self.rule.name!r}: it does not hold the powers of two of the tokens"
        )

    def decode(self, values: jax.Array, scales: jax.Array, tokens: bool) -> jax.Array:
        """The numbers that values and scales stand for, float32; tokens as products read."""
        return (super() if tokens else self.weights).decode(values, scales, tokens)

    def tokens(self, x: jax.Array, scale: jax.Array | None = None) -> Tokens:
        """Quantizes rows, with a static scale if there is one."""
        values, scales = self.rule.tokens(x, scale)
        return Tokens(values, None if self.applied else scales)

    def given_tokens(self, values: jax.Array, scales: jax.Array, dtype: Any) -> Tokens:
        """Tokens of a `jaxmoe.QuantizedArray` as products read them."""
        return self.rule.given(values, scales, dtype)

    def by_expert(self, values: jax.Array, scales: Any, static: jax.Array) -> tuple[Format, Any]:
        """Applies the static scale of each expert to its weights."""
        del values
        return dataclasses.replace(self, applied=True), scales * static

    def factors(self, tokens: Tokens, scales: Any, dtype: Any) -> Factors:
        """The weights with what all tokens share in their scales, and the scales of rows."""
        given = Tokens(tokens.values.astype(dtype), None)
        if tokens.scales is None:
            return Factors(self.weights, given, scales)
        if tokens.scales.ndim:
            return Factors(self.weights, given, scales, tokens.scales)
        return Factors(self.weights, given, scales * tokens.scales)


def beside(weights: Format, rule: TokenRule) -> QuantizedTokens:
    """The format of a layer whose tokens are quantized by `rule` beside `weights`."""
    return QuantizedTokens(
        weights.name,
        weight_scales=weights.weight_scales,
        token_scales=rule.scales,
        block=weights.block,
        stored=weights.stored,
        static_scales=rule.static,
        composed=True,
        gradient=weights.gradient,
        weights=weights,
        rule=rule,
    )
