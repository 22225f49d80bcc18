"""Base of the weight formats: the questions that the rest of the package asks, plain answers.

A format is a frozen object without arrays, so it is a static parameter of every op that multiplies
by weights. Nothing outside this package compares the name of a format.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe._codes import Choice


class Tokens(NamedTuple):
    """Tokens as a product reads them.

    Attributes:
      values: [R, K].
      scales: as the format shares them, None if they have none.
    """

    values: jax.Array
    scales: jax.Array | None


class Factors(NamedTuple):
    """What a product of quantized tokens multiplies.

    Attributes:
      format: of the weights, for rows as they are in `tokens`.
      tokens: [R, K].
      scales: those of the weights.
      of_rows: [R] float32 that multiplies the float32 sums of a row before the bias, or None.
    """

    format: "Format"
    tokens: Tokens
    scales: Any
    of_rows: jax.Array | None = None


class Gradient(NamedTuple):
    """How a layer with weights in a format is differentiated.

    Attributes:
      refused: why it is not, None if it is.
      straight_through: whether the derivative is that of the layer with plain weights.
      frozen: whether it is that of the layer with dequantized weights, with respect to everything
        but these.
    """

    refused: str | None = None
    straight_through: bool = False
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Format:
    """A weight format. The defaults are plain arrays; other formats say what differs.

    Attributes:
      name: what users call it.
      code: what the kernels call it, -1 if there are none; the extension exports the same table.
      weight_scales: dimensions of the scales of weights [E, N, K], as einsum letters: "" without
        scales, "e", "e n", or "e p q" for blocks of `block` along N and K.
      token_scales: the same of tokens [R, K]: "", "t", "t q"; None if tokens are not quantized.
      block: elements of an axis that share a scale, where blocks do; no axis is divided inside one.
      stored: what values may be stored as, names and dtypes, the usual one first; none for plain
        arrays.
      static_scales: whether checkpoints may bring scales of the activations.
      composed: whether its products are made of other ops, which are CUDA's too; and so is the
        layer, unless `rounding_in_call` says otherwise.
      dequantizes: whether products dequantize the weights first.
      expands: whether those ops are divided over a mesh each by itself, not the layer as a whole.
      master: whether weights are float32 beside tokens of a narrower dtype.
      gradient: how the layer is differentiated.
    """

    name: str
    code: int = -1
    weight_scales: str = ""
    token_scales: str | None = None
    block: int = 1
    stored: tuple[tuple[str, Any], ...] = ()
    static_scales: bool = False
    composed: bool = False
    dequantizes: bool = False
    expands: bool = False
    master: bool = False
    gradient: Gradient = Gradient()

    @property
    def quantized(self) -> bool:
        """Whether weights are a `jaxmoe.QuantizedArray`: values with scales."""
        return bool(self.stored)

    @property
    def element_types(self) -> dict[str, Any]:
        """The dtypes that values may have, by name."""
        return dict(self.stored)

    @property
    def quantizes_tokens(self) -> bool:
        """Whether products read quantized tokens."""
        return self.token_scales is not None

    @property
    def token_arrays(self) -> bool:
        """Whether a `jaxmoe.QuantizedArray` of tokens may be in the format."""
        return self.quantizes_tokens

    @property
    def token_step(self) -> int:
        """What K of such tokens must be a multiple of."""
        return 1

    def stored_token_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which values of tokens [R, K] are stored."""
        return tuple(shape)

    def token_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [R, K] of tokens whose values have the shape `stored`."""
        return tuple(stored)

    def rounding_in_call(self, absent: tuple[str, ...]) -> Choice | None:
        """How the one CUDA call of a layer rounds tokens to numbers, or None if there is no call.

        `absent` names the operands of the layer that are not given.
        """
        del absent
        return None if self.composed else Choice(0, "none")

    @property
    def coded_by(self) -> str:
        """The format of tokens by which kernels multiply codes as they are, "" if there is none."""
        return ""

    def of_numbers(self, absent: tuple[str, ...]) -> "Format | None":
        """The format of the same layer with quantized x in the dtype of the layer, if need be."""
        del absent
        return None

    def multiplies_codes(self, absent: tuple[str, ...]) -> bool:
        """Whether kernels of that call may multiply codes as they are, by quantized tokens."""
        del absent
        return False

    @property
    def of_kernels(self) -> "Format":
        """The format of the weights that the kernels of that call multiply."""
        return self

    @property
    def described(self) -> str:
        """The name, and that of the format of tokens if it is another one."""
        return self.name

    @property
    def packed(self) -> bool:
        """Whether kernels decode weights in registers, which not all tiles leave."""
        return False

    @property
    def steps(self) -> tuple[int, int]:
        """What N and K of weights must be multiples of."""
        return 1, 1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which values of weights [.., N, K] are stored."""
        return tuple(shape)

    def weight_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [.., N, K] of weights whose values have the shape `stored`."""
        return tuple(stored)

    def unit(self, size: int, axis: str) -> int:
        """Elements of N ("n") or K ("k"), `size` of them, that are not divided."""
        del size, axis
        return self.block

    def units(self, stored: tuple[int, ...]) -> str:
        """What of weights whose values have the shape `stored` is not divided, "" if all is."""
        n, k = self.weight_shape(stored)[-2:]
        n, k = self.unit(n, "n"), self.unit(k, "k")
        return f"blocks of {n} outputs by {k} inputs of {self.name}" if max(n, k) > 1 else ""

    def parts(self, size: int, axis: str) -> int:
        """Into how many parts N ("n") or K ("k") of weights can be divided at most."""
        unit = self.unit(size, axis)
        return size // unit if unit and size % unit == 0 else 1

    def of(self, dtype: Any) -> "Format":
        """The format of an array that stands for numbers in `dtype`, if that makes a difference."""
        del dtype
        return self

    def refused_dtype(self, dtype: Any) -> str | None:
        """Why no array of this dtype is in the format, None if it can be."""
        del dtype
        return None

    def refused_tokens(self, dtype: Any) -> str | None:
        """Why no kernel multiplies tokens of a 16-bit dtype by an array in the format; or None."""
        del dtype
        return None

    def refused_option(self, scale: bool, e8m0: bool, tokens: bool) -> str | None:
        """Why the caller gives no scales, or does not round them to powers of two; or None."""
        del scale, e8m0, tokens
        return None

    def dequantizing(self) -> "Format":
        """The same weights, which each product dequantizes to multiply plain arrays.

        Tokens are not quantized. A derivative is made of such products.
        """
        return dataclasses.replace(
            self, code=-1, token_scales=None, composed=True, dequantizes=True
        )

    @property
    def token_array(self) -> str | None:
        """The format of a `jaxmoe.QuantizedArray` of tokens beside these weights, if one may be."""
        return self.name if self.quantizes_tokens else None

    def refused_input(self, dtype: Any) -> str | None:
        """Why no layer in the format computes in this dtype, on any device; or None."""
        del dtype
        return None

    @property
    def one_token_scale(self) -> bool:
        """Whether all tokens share a scale, which is made of all of them."""
        return self.token_scales == ""

    def scales_of(self, tokens: bool) -> str:
        """The dimensions of the scales of tokens, or of weights."""
        return (self.token_scales if tokens else self.weight_scales) or ""

    def scales_shape(self, shape: tuple[int, ...], tokens: bool) -> tuple[int, ...]:
        """The shape of the scales of values of the shape `shape`, [R, K] or [E, N, K]."""
        names = ("t", "q") if tokens else ("e", "n", "q")
        sizes = dict(zip(names, shape, strict=True))
        sizes |= {"q": -(-shape[-1] // self.block), "p": -(-shape[-2] // self.block)}
        return tuple(sizes[letter] for letter in letters(self.scales_of(tokens)))

    def spread(self, scales: jax.Array, shape: tuple[int, ...], tokens: bool) -> jax.Array:
        """Gives each element of values of the shape `shape` the scale that it shares."""
        names = letters(self.scales_of(tokens))
        for letter, axis in (("p", len(shape) - 2), ("q", len(shape) - 1)):
            if letter in names:
                scales = repeat_blocks(scales, axis, self.block, shape[axis])
        scales = scales.reshape(scales.shape + (1,) * (len(shape) - scales.ndim))
        return jnp.broadcast_to(scales, shape)

    def encode(
        self, x: jax.Array, scale: jax.Array | None, *, element_type: str, e8m0: bool, tokens: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Quantizes tokens [R, K] or weights [E, N, K]: their values and scales.

        `scale` holds the scales if the caller gives them; `e8m0` asks for powers of two.
        """
        del x, scale, element_type, e8m0, tokens
        raise TypeError(f"{self.name} has no quantized values")

    def decode(self, values: jax.Array, scales: jax.Array, tokens: bool) -> jax.Array:
        """The numbers that values and scales stand for, float32."""
        return values.astype(jnp.float32) * self.spread(scales, values.shape, tokens)

    def multiply(
        self, x: jax.Array, x_scales: jax.Array | None, w: jax.Array, w_scales: jax.Array
    ) -> jax.Array:
        """The product of rows [B, K] and the weights [N, K] of one expert, [B, N] float32.

        Scales of a tensor or of a row multiply the sum; others are in the weights it is made of.
        """
        if "q" in self.weight_scales:
            w, w_scales = self.decode(w[None], w_scales[None], tokens=False)[0], jnp.float32(1)
        out = dot(x, w) * w_scales.reshape(-1)[None, :]
        return out if x_scales is None else out * x_scales.reshape(-1, 1)

    def tokens(self, x: jax.Array, scale: jax.Array | None = None) -> Tokens:
        """Returns rows [R, K] as products read them, with a static scale if there is one."""
        del scale
        return Tokens(x, None)

    def given_tokens(self, values: jax.Array, scales: jax.Array, dtype: Any) -> Tokens:
        """Tokens of a `jaxmoe.QuantizedArray` for a layer that computes in `dtype`."""
        del dtype
        return Tokens(values, scales)

    def by_row(self, values: jax.Array, scales: Any) -> tuple["Format", Any]:
        """The format, and the scales of weights, in which each token has a scale of its own."""
        del values
        return self, scales

    def by_expert(self, values: jax.Array, scales: Any, static: jax.Array) -> tuple["Format", Any]:
        """The same where each row has the static scale, [E] or [1], of its expert's weights."""
        del static
        return self.by_row(values, scales)

    def factors(self, tokens: Tokens, scales: Any, dtype: Any) -> Factors:
        """What the product of `tokens` multiplies in a layer that computes in `dtype`."""
        del dtype
        return Factors(self, tokens, scales)

    def token_scale_count(self, rows: int, k: int) -> int:
        """Floats of scale that [rows, k] tokens have."""
        del rows, k
        return 0

    @property
    def token_dtype(self) -> Any:
        """The dtype of quantized tokens, None if they are not quantized."""
        return None

    def sums(self, accum: str | None, k: int) -> bool | None:
        """Whether a product over `k` adds its parts up outside of the tensor core; None: no choice.

        `accum` is what the caller asked for.
        """
        del accum, k
        return None

    @property
    def accums(self) -> tuple[str, ...]:
        """The ways of adding up that a caller may name."""
        return ()

    def refused_accum(self, accum: str | None) -> str | None:
        """Why the format does not have these sums, None if it does."""
        if accum is None:
            return None
        which = f"with {self.name} weights" if self.quantized else "if no weight is quantized"
        return f"accum={accum!r} must be None {which}"

    def shared_over(self, k: bool, rows: bool) -> bool:
        """Whether one scale of tokens spans rows (or k) that lie on several devices."""
        letters = self.token_scales
        if letters is None:
            return False
        return (k and "q" not in letters) or (rows and "t" not in letters)


def repeat_blocks(scales: jax.Array, axis: int, block: int, size: int) -> jax.Array:
    """Repeats each element along `axis` for its block, of `size` elements together."""
    first, rest = scales.shape[:axis], scales.shape[axis + 1 :]
    num_blocks = scales.shape[axis]
    # not jnp.repeat, which refuses axes that are split over an Explicit mesh
    scales = jnp.expand_dims(scales, axis + 1)
    scales = jnp.broadcast_to(scales, (*first, num_blocks, block, *rest))
    scales = scales.reshape(*first, num_blocks * block, *rest)
    return jax.lax.slice_in_dim(scales, 0, size, axis=axis) if size % block else scales


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [..., M, K] times b [..., N, K] in float32, which holds every narrow value exactly."""
    batch = tuple(range(a.ndim - 2))
    return jax.lax.dot_general(
        a.astype(jnp.float32),
        b.astype(jnp.float32),
        (((a.ndim - 1,), (b.ndim - 1,)), (batch, batch)),
        preferred_element_type=jnp.float32,
    )


def letters(text: str) -> tuple[str, ...]:
    """The dimensions of an einsum operand."""
    return tuple(text.split())
