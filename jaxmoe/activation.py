"""Activations of the expert MLP: names, formulas, and constants for the kernels."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._codes import CODES, Choice
from jaxmoe._jax import checks as _checks

# Formulas. A kernel has a branch for each; all other differences are constants.
SIGMOID, ERF, RELU, RELU2, IDENTITY = range(len(CODES["activation"]))

GATE_UP_ORDERS = CODES["gate_up"]


@dataclasses.dataclass(frozen=True)
class Activation:
    """The function between the two matrix products of an expert.

    gated:     y = f(min(g, limit)) * (clip(u, -limit, limit) + beta)
    not gated: y = f(g)

    limit and beta only with a gated SIGMOID, as the kernels have them,

    with f by `kind`: SIGMOID g * sigmoid(g * (c1 + c3 * g^2)); ERF g * Phi(g); RELU max(g, 0);
    RELU2 max(g, 0)^2; IDENTITY g. NaN stays NaN.

    Attributes:
      name: what the user wrote.
      gated: whether the first product has two halves, gate and up.
      kind: which formula f is.
      c1, c3: constants of SIGMOID. SiLU is (1, 0); GELU's tanh form is (2a, 2a * 0.044715) with
        a = sqrt(2 / pi), because (1 + tanh(z)) / 2 = sigmoid(2z).
      limit: clamp of gate (from above) and up (both sides); infinity for none.
      beta: added to up.

    Raises:
      ValueError: no such kind, or constants that are not finite.
      NotImplementedError: limit or beta for anything but a gated SIGMOID.

    Example:
      >>> from jaxmoe.activation import resolve
      >>> resolve("relu2").gated
      False
    """

    fused: ClassVar[bool] = True  # there is a kernel's epilogue for it

    name: str
    gated: bool
    kind: int
    c1: float = 0.0
    c3: float = 0.0
    limit: float = math.inf
    beta: float = 0.0

    def __post_init__(self) -> None:
        """Checks that every device computes this formula."""
        _checks.check_int("Activation", "kind", self.kind, 0, IDENTITY)
        if not (math.isfinite(self.c1) and math.isfinite(self.c3) and math.isfinite(self.beta)):
            rule = f"c1={self.c1}, c3={self.c3}, beta={self.beta} must be finite"
            raise ValueError(_checks.message("Activation", rule))
        clamped = self.limit != math.inf or self.beta != 0
        if clamped and not (self.gated and self.kind == SIGMOID):
            rule = (
                f"limit={self.limit} and beta={self.beta} are there for gated SIGMOID only; "
                "the others take limit=inf and beta=0"
            )
            raise NotImplementedError(_checks.message("Activation", rule))

    def __call__(self, gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
        """Applies the formula in the dtype given; callers pass float32.

        Args:
          gate: [..., I], the only input of an activation that is not gated.
          up: [..., I] for a gated activation, None otherwise.

        Returns:
          [..., I] in the dtype of `gate`.

        Raises:
          TypeError: `up` is missing, or given to an activation that is not gated.
        """
        if self.gated != (up is not None):
            wanted = "needs" if self.gated else "does not take"
            raise TypeError(_checks.message("activation", f"{self.name} {wanted} up", up=up))
        if math.isfinite(self.limit):
            gate = jnp.minimum(gate, jnp.asarray(self.limit, gate.dtype))
        y = self._f(gate)
        if up is None:
            return y
        if math.isfinite(self.limit):
            limit = jnp.asarray(self.limit, up.dtype)
            up = jnp.clip(up, -limit, limit)
        return y * (up + jnp.asarray(self.beta, up.dtype) if self.beta else up)

    def _f(self, g: jax.Array) -> jax.Array:
        if self.kind == SIGMOID:
            slope = jnp.asarray(self.c1, g.dtype)
            # NOTE: not `c1 + c3 * g * g` for c3 = 0: beyond |g| = 1.8e19 that is 0 * inf = NaN.
            if self.c3:
                slope = slope + jnp.asarray(self.c3, g.dtype) * g * g
            return g * jax.nn.sigmoid(g * slope)
        return _OTHER_FORMULAS[self.kind](g)

    def kernel_params(self) -> dict[str, Any]:
        """Returns the constants as a kernel reads them: `kind` an int, the others float32."""
        constants = {f: np.float32(getattr(self, f)) for f in ("c1", "c3", "limit", "beta")}
        return {"kind": Choice(self.kind, CODES["activation"][self.kind]), **constants}


class Swiglu(Activation):
    """SwiGLU with a slope, an offset and a clamp.

    g = min(gate, limit);  u = clip(up, -limit, limit);  y = g * sigmoid(alpha * g) * (u + beta)

    Args:
      alpha: slope inside the sigmoid.
      beta: added to up after the clamp.
      limit: clamp, positive; infinity for none.

    Raises:
      TypeError, ValueError: an argument is not a Python number, or out of range.

    Source: gpt-oss uses Swiglu(1.702, 1, 7); Swiglu() is the plain SwiGLU of
      https://arxiv.org/abs/2002.05202.

    Example:
      >>> import jaxmoe
      >>> jaxmoe.Swiglu(alpha=1.702, beta=1.0, limit=7.0).beta
      1.0
    """

    def __init__(self, alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf):
        """Checks the constants: they are part of the compiled program."""
        values: dict[str, Any] = {"alpha": alpha, "beta": beta, "limit": limit}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                rule = f"{name} must be a Python number known at trace time"
                raise TypeError(_checks.message("Swiglu", rule, **{name: value}))
            if math.isnan(value) or (name != "limit" and math.isinf(value)):
                raise ValueError(_checks.message("Swiglu", f"{name}={value} must be finite"))
        if not limit > 0:
            raise ValueError(_checks.message("Swiglu", f"limit={limit} must be positive"))
        alpha, beta, limit = float(alpha), float(beta), float(limit)  # 7 and 7.0 are one activation
        super().__init__(
            name=f"Swiglu(alpha={alpha}, beta={beta}, limit={limit})",
            gated=True,
            kind=SIGMOID,
            c1=alpha,
            beta=beta,
            limit=limit,
        )


@dataclasses.dataclass(frozen=True)
class Custom(Activation):
    """A function of the user's between the two products: XLA computes it, kernels the products.

    Attributes:
      fn: of gate and up [..., I], or of the one first product, float32 -> [..., I].
    """

    fused: ClassVar[bool] = False

    fn: Callable[..., jax.Array] = jnp.abs

    def __call__(self, gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
        """Calls the function.

        Raises:
          TypeError: it returns no array of floats.
          ValueError: it returns an array of another shape.
        """
        y = self.fn(gate) if up is None else self.fn(gate, up)
        name = f"activation {self.name}"
        _checks.check_float("Experts", f"{name}: its result", y)
        if y.shape != gate.shape:
            rule = f"{name} must return the shape of what it is given, {list(gate.shape)}"
            raise ValueError(_checks.message("Experts", rule, result=y))
        return y.astype(gate.dtype)

    def kernel_params(self) -> dict[str, Any]:
        """No kernel has the function."""
        raise NotImplementedError(f"{self.name} is no activation of a kernel")


def _custom(fn: Callable[..., jax.Array], op: str) -> Custom:
    """The activation that calls `fn`, gated if that takes two arguments."""
    name = getattr(fn, "__name__", None) or type(fn).__name__
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fn).parameters.values()
        count = sum(p.kind in kinds and p.default is p.empty for p in parameters)
    except (TypeError, ValueError):  # of builtins that tell nothing
        count = 0
    if count not in (1, 2):
        rule = (
            f"activation={name} must be a function of (gate, up), or of one argument without gate, "
            "and of nothing else"
        )
        raise TypeError(_checks.message(op, rule, activation=fn))
    try:
        hash(fn)
    except TypeError as error:
        rule = f"activation={name} must be hashable: it is part of the compiled program"
        raise TypeError(_checks.message(op, rule, activation=fn)) from error
    return Custom(name, count == 2, IDENTITY, fn=fn)


_OTHER_FORMULAS: dict[int, Callable[[jax.Array], jax.Array]] = {
    ERF: lambda g: jax.nn.gelu(g, approximate=False),
    RELU: jax.nn.relu,
    RELU2: lambda g: jnp.square(jax.nn.relu(g)),
    IDENTITY: lambda g: g,
}

_TANH_C1 = 2.0 * math.sqrt(2.0 / math.pi)
_TANH = {"c1": _TANH_C1, "c3": _TANH_C1 * 0.044715}

ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("swiglu", True, SIGMOID, c1=1.0),
        Activation("geglu", True, ERF),
        Activation("geglu_tanh", True, SIGMOID, **_TANH),
        Activation("gelu", False, ERF),
        Activation("gelu_tanh", False, SIGMOID, **_TANH),
        Activation("silu", False, SIGMOID, c1=1.0),
        Activation("relu", False, RELU),
        Activation("relu2", False, RELU2),
        Activation("identity", False, IDENTITY),
    )
}


def resolve(activation: str | Callable[..., Any], op: str = "moe_mlp") -> Activation:
    """Returns the activation of that name, or the one given.

    Args:
      activation: a key of `ACTIVATIONS`, an `Activation`, or a function of (gate, up), or of one
        array for an activation without gate.
      op: public name used in the message.

    Raises:
      TypeError, ValueError: none of these; the message lists the names.

    Example:
      >>> from jaxmoe.activation import resolve
      >>> resolve("swiglu").gated
      True
    """
    if isinstance(activation, Activation):
        return activation
    if callable(activation):
        return _custom(activation, op)
    _checks.check_choice(op, "activation", activation, (*ACTIVATIONS, "Swiglu(alpha, beta, limit)"))
    if activation not in ACTIVATIONS:
        rule = "activation='Swiglu(alpha, beta, limit)' must be an instance, not a string"
        raise ValueError(_checks.message(op, rule))
    return ACTIVATIONS[activation]


def split_gate_up(h: jax.Array, gate_up: str) -> tuple[jax.Array, jax.Array]:
    """Splits the last axis of the first product into gate and up.

    Args:
      h: [..., 2I].
      gate_up: "gate_up" (gate first), "up_gate" (up first) or "interleaved" (gate even, up odd).

    Returns:
      gate [..., I] and up [..., I].

    Raises:
      ValueError: an unknown order.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe.activation import split_gate_up
      >>> gate, up = split_gate_up(jnp.arange(4), "interleaved")
      >>> gate.tolist(), up.tolist()
      ([0, 2], [1, 3])
    """
    _checks.check_choice("moe_mlp", "gate_up", gate_up, GATE_UP_ORDERS)
    if gate_up == "interleaved":
        return h[..., 0::2], h[..., 1::2]
    first, second = jnp.split(h, 2, axis=-1)
    return (first, second) if gate_up == "gate_up" else (second, first)
