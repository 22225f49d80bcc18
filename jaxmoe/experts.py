"""Experts: the weights of one layer as a value, with everything that says how to read them."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

from jaxmoe import _saved
from jaxmoe._experts_checks import BIASES, WEIGHTS, check_parts, check_static
from jaxmoe._jax import checks as _checks
from jaxmoe.activation import Activation
from jaxmoe.quantize import QuantizedArray, quantize

_OP = "Experts"
_STATIC = ("activation", "order", "layout", "dtype", "forward_format", "token_format", "accum")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The weights of the experts of one layer. A pytree: arrays are leaves, the rest is static.

    mlp(x, e) = activation(x @ gate_up[e] + gate_up_bias[e]) @ down[e] + down_bias[e]

    The first weight is one array, `gate_up`, or two, `gate` and `up`, which are never joined. An
    activation without gate has one array, as `gate_up` or as `up`. E is the number of experts here,
    which may be those of one device; H is hidden, I intermediate. All arrays may have leading axes,
    such as the layers of a scan; `jaxmoe.moe_mlp` takes experts without them.

    Gradients with respect to experts are experts. `jax.tree.map`, optimizers, sharding specs, scan
    and checkpoints work on experts as on any pytree; `dataclasses.replace` makes a changed copy.

    Attributes:
      gate_up: [E, H, 2I], or [E, H, I] for an activation without gate. An array, or a
        `QuantizedArray` whose layout is `layout`.
      down: [E, I, H].
      gate: [E, H, I], in place of half of `gate_up`.
      up: [E, H, I].
      gate_up_bias: [E, 2I], or [E, I] without gate.
      gate_bias: [E, I], with `gate`.
      up_bias: [E, I], with `up`.
      down_bias: [E, H].
      x_scale: [] float32, static scale of x, for fp8_tensor weights and for token_format "nvfp4" or
        "e4m3". By default each call makes the scale of all of x, or of each token in "e4m3".
      h_scale: [] or [E] float32, static scale of the activation's result.
      activation: a name ("swiglu", "geglu", "relu2", ...), a `jaxmoe.Swiglu`, `jaxmoe.SwigluStep`
        or `jaxmoe.SoftcapSwiglu`, or a function of your own: fn(gate, up), or fn(z) without gate,
        float32 [..., I] -> [..., I], each element for itself. Kernels run both products then, and
        XLA the function between them. Static: the same function is the same program, a new lambda
        each time is not.
      order: order of the outputs of `gate_up`: "gate_up" (gate first), "up_gate" or "interleaved"
        (gate even, up odd). Static.
      layout: "kn" for the shapes above, "nk" with the last two axes swapped, or a pair of these for
        the first weight and for `down`. Static.
      dtype: dtype of the products, None for that of the arrays. If it is narrower, the arrays are
        float32 master weights: products round them, and their gradients are float32 sums that are
        never rounded. Static.
      forward_format: None, or the name of a quantized format. The program quantizes weights and
        tokens for the value of the layer; gradients are those of plain weights. Static.
      token_format: None, or how tokens and the activation's results are quantized beside packed
        weights: "nvfp4" with nvfp4, "mxfp4", "mxfp8" or "e4m3" with mxfp4, "mxfp8" with mxfp8,
        "e4m3" with int4_g128 and int4_g128_zp. FP8 weights have FP8 tokens without it. Static.
      accum: for FP8 weights: "fast" adds up all of k inside the tensor core, which keeps about 14
        bits; "promoted" adds up parts of 128 in float32. By default "promoted" for products over
        more than 2048 elements, and always where blocks of k have scales. Static.

    Raises:
      TypeError, ValueError: a field of the wrong kind, dtype, rank or shape, an unknown name, or
        arrays (or `jax.ShapeDtypeStruct`) that do not go together. Leaves that are no arrays
        (specs, None) are not checked, nor is anything while JAX rebuilds the pytree.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> experts = jaxmoe.Experts(gate_up=jnp.ones((2, 2, 6)), down=jnp.ones((2, 3, 2)))
      >>> experts.num_experts, experts.hidden, experts.intermediate
      (2, 2, 3)
      >>> jax.tree.map(lambda a: a.sum().item(), experts).down
      12.0
    """

    gate_up: Any = None
    down: Any = None
    gate: Any = None
    up: Any = None
    gate_up_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    x_scale: Any = None
    h_scale: Any = None
    activation: str | Activation | Callable[..., jax.Array] = "swiglu"
    order: str = "gate_up"
    layout: str | tuple[str, str] = "kn"
    dtype: Any = None
    forward_format: str | None = None
    token_format: str | None = None
    accum: str | None = None

    def __new__(cls, *_args: Any, **fields: Any) -> "Experts":
        """Names the place of an activation's constants, which are no fields."""
        for name in ("alpha", "beta", "limit"):
            if name in fields:
                rule = f"{name} is one of the activation: activation=jaxmoe.Swiglu({name}=...)"
                raise TypeError(_checks.message(_OP, rule, **{name: fields[name]}))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks the static fields, and shapes where they are known."""
        check_static(self)
        check_parts(_checks.as_arrays(self))

    @property
    def num_experts(self) -> int:
        """E, the number of experts in the arrays."""
        return self.down.shape[-3]

    @property
    def hidden(self) -> int:
        """H, the width of a token."""
        return self.down.shape[-1 if self.layouts[1] == "kn" else -2]

    @property
    def intermediate(self) -> int:
        """I, the width of the activation's result."""
        return self.down.shape[-2 if self.layouts[1] == "kn" else -1]

    @property
    def layouts(self) -> tuple[str, str]:
        """The layout of the first weight and of `down`."""
        return (self.layout, self.layout) if isinstance(self.layout, str) else self.layout

    @property
    def first(self) -> Any:
        """The array of the first weight, or its gate if there are two arrays."""
        return next((w for w in (self.gate_up, self.gate, self.up) if w is not None), None)

    def quantized(
        self, format: str, *, token_format: str | None = None, scale_format: str = "float32"
    ) -> "Experts":
        """The experts with every weight in a quantized format, as `jaxmoe.quantize` makes it.

        Args:
          format: see `jaxmoe.quantize`.
          token_format: of the result.
          scale_format: see `jaxmoe.quantize`.

        Returns:
          `Experts` with all else as it is, but for `dtype` and `forward_format`, which are None:
          weights and biases are rounded to `dtype` first, and weights are in the format of the
          value already.

        Raises:
          TypeError, ValueError, NotImplementedError: as `jaxmoe.quantize`; weights that are
            quantized already; formats that do not go together.

        Example:
          >>> import jax.numpy as jnp, jaxmoe
          >>> experts = jaxmoe.Experts(gate_up=jnp.ones((2, 4, 6)), down=jnp.ones((2, 3, 4)))
          >>> experts.quantized("fp8_channel").down.scales.shape
          (2, 4)
        """
        weights = {n: w for n in WEIGHTS if (w := getattr(self, n)) is not None}
        quantized = {n: self._quantized(n, w, format, scale_format) for n, w in weights.items()}
        biases = {n: b for n in BIASES if (b := getattr(self, n)) is not None}
        if self.dtype is not None:
            biases = {n: b.astype(self.dtype) for n, b in biases.items()}
        rest = {"dtype": None, "forward_format": None, "token_format": token_format}
        return dataclasses.replace(self, **quantized, **biases, **rest)

    def _quantized(self, name: str, w: Any, format: str, scale_format: str) -> QuantizedArray:
        op = f"{_OP}.quantized"
        if isinstance(w, QuantizedArray):
            rule = f"{name} is quantized already: make it an array by jaxmoe.dequantize first"
            raise TypeError(_checks.message(op, rule, **{name: w}))
        layout = self.layouts[1 if name == "down" else 0]
        one = functools.partial(
            quantize, format=format, weight_layout=layout, scale_format=scale_format
        )
        for _ in range(w.ndim - 3):
            one = jax.vmap(one)
        try:
            return one(w if self.dtype is None else w.astype(self.dtype))
        except (TypeError, ValueError, NotImplementedError) as error:
            why = str(error).removeprefix("jaxmoe.quantize: ")
            raise type(error)(f"jaxmoe.{op}: {name}: {why}") from error


_LEAVES = tuple(f.name for f in dataclasses.fields(Experts) if f.name not in _STATIC)
_KEYS = tuple(map(jax.tree_util.GetAttrKey, _LEAVES))
# Without a loop in Python: JAX flattens the arguments of a jitted function at every call.
_leaves_of = operator.attrgetter(*_LEAVES)
_static_of = operator.attrgetter(*_STATIC)


def _flatten_with_keys(experts: Experts) -> Any:
    return tuple(zip(_KEYS, _leaves_of(experts), strict=True)), _static_of(experts)


def _unflatten(static: Any, leaves: Any) -> Experts:
    """Rebuilds experts without a check: leaves may be anything while a pytree is rebuilt."""
    experts = object.__new__(Experts)
    experts.__dict__.update(zip(_LEAVES, leaves, strict=True))
    experts.__dict__.update(zip(_STATIC, static, strict=True))
    return experts


jax.tree_util.register_pytree_with_keys(
    Experts, _flatten_with_keys, _unflatten, lambda e: (_leaves_of(e), _static_of(e))
)
_saved.register(Experts)
