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
SIGMOID, ERF, RELU, RELU2, IDENTITY, STEP, SOFTCAP = range(len(CODES["activation"]))

GATE_UP_ORDERS = CODES["gate_up"]

# Least and largest cap of SOFTCAP: quotients by those between lose no digit as float32 numbers.
_CAPS = 1e-6, 1e6


@dataclasses.dataclass(frozen=True)
class Activation:
    """The function between the two matrix products of an expert.

    gated:     y = f(min(g, limit)) * (clip(u, -limit, limit) + beta)
    not gated: y = f(g)

    limit and beta only with a gated SIGMOID, as the kernels have them,

    with f by `kind`: SIGMOID g * sigmoid(g * (c1 + c3 * g^2)); ERF g * Phi(g); RELU max(g, 0);
    RELU2 max(g, 0)^2; IDENTITY g. Two more need a gate:

    STEP       y = min(g * sigmoid(g), limit) * clip(u, -limit, limit)
    SOFTCAP    y = c1 * tanh(g / c1) * sigmoid(g) * c3 * tanh(u / c3)

    NaN stays NaN.

    Attributes:
      name: what the user wrote.
      gated: whether the first product has two halves, gate and up.
      kind: which formula f is.
      c1, c3: constants of SIGMOID, caps of SOFTCAP. SiLU is (1, 0); GELU's tanh form is
        (2a, 2a * 0.044715) with a = sqrt(2 / pi), because (1 + tanh(z)) / 2 = sigmoid(2z).
      limit: clamp of gate, or of its SiLU, (from above) and up (both sides); infinity for none.
      beta: added to up.

    Raises:
      ValueError: no such kind, or constants out of range.
      NotImplementedError: limit or beta where no kernel has them, or STEP or SOFTCAP without gate.

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
        _checks.check_int("Activation", "kind", self.kind, 0, SOFTCAP)
        if not (math.isfinite(self.c1) and math.isfinite(self.c3) and math.isfinite(self.beta)):
            rule = f"c1={self.c1}, c3={self.c3}, beta={self.beta} must be finite"
            raise ValueError(_checks.message("Activation", rule))
        if not self.limit > 0:
            raise ValueError(_checks.message("Activation", f"limit={self.limit} must be positive"))
        clamps = self.gated and self.kind in (SIGMOID, STEP)
        adds = self.gated and self.kind == SIGMOID
        if (self.limit != math.inf and not clamps) or (self.beta != 0 and not adds):
            rule = (
                f"limit={self.limit} and beta={self.beta} are there for gated SIGMOID only, limit "
                "for STEP too; the others take limit=inf and beta=0"
            )
            raise NotImplementedError(_checks.message("Activation", rule))
        if self.kind in (STEP, SOFTCAP) and not self.gated:
            rule = f"kind={CODES['activation'][self.kind]} needs gated=True"
            raise NotImplementedError(_checks.message("Activation", rule))
        low, high = _CAPS
        if self.kind == SOFTCAP and not (low <= self.c1 <= high and low <= self.c3 <= high):
            rule = f"c1={self.c1} and c3={self.c3}, the caps, must be from {low:g} to {high:g}"
            raise ValueError(_checks.message("Activation", rule))

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
        if self.kind == SOFTCAP and up is not None:
            return _softcap(gate, self.c1) * jax.nn.sigmoid(gate) * _softcap(up, self.c3)
        y = self._f(gate if self.kind == STEP else self._clamped(gate))
        if up is None:
            return y
        if self.kind == STEP:
            y = self._clamped(y)
        if math.isfinite(self.limit):
            limit = jnp.asarray(self.limit, up.dtype)
            up = jnp.clip(up, -limit, limit)
        return y * (up + jnp.asarray(self.beta, up.dtype) if self.beta else up)

    def _clamped(self, x: jax.Array) -> jax.Array:
        return jnp.minimum(x, jnp.asarray(self.limit, x.dtype)) if math.isfinite(self.limit) else x

    def _f(self, g: jax.Array) -> jax.Array:
        if self.kind == STEP:
            return jax.nn.silu(g)
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


def _softcap(x: jax.Array, cap: float) -> jax.Array:
    bound = jnp.asarray(cap, x.dtype)
    return bound * jnp.tanh(x / bound)


def _numbers(name: str, values: dict[str, Any]) -> None:
    """Checks constants of an activation: they are part of the compiled program."""
    for argument, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            rule = f"{argument} must be a Python number known at trace time"
            raise TypeError(_checks.message(name, rule, **{argument: value}))
        if math.isnan(value) or (argument != "limit" and math.isinf(value)):
            raise ValueError(_checks.message(name, f"{argument}={value} must be finite"))
        if argument not in ("alpha", "beta") and not value > 0:
            raise ValueError(_checks.message(name, f"{argument}={value} must be positive"))
        if argument.endswith("_cap") and not _CAPS[0] <= value <= _CAPS[1]:
            rule = f"{argument}={value} must be from {_CAPS[0]:g} to {_CAPS[1]:g}"
            raise ValueError(_checks.message(name, rule))


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
        _numbers("Swiglu", {"alpha": alpha, "beta": beta, "limit": limit})
        alpha, beta, limit = float(alpha), float(beta), float(limit)  # 7 and 7.0 are one activation
        super().__init__(
            name=f"Swiglu(alpha={alpha}, beta={beta}, limit={limit})",
            gated=True,
            kind=SIGMOID,
            c1=alpha,
            beta=beta,
            limit=limit,
        )


class SwigluStep(Activation):
    """SwiGLU whose clamp comes after SiLU.

    y = min(silu(gate), limit) * clip(up, -limit, limit)

    Args:
      limit: clamp, positive; infinity for none.

    Raises:
      TypeError, ValueError: the limit is not a Python number, or not positive.

    Source: Step-3.5 and 3.7 of StepFun (`swiglu_limits`): 7 for the experts of two layers, 16 for
      their shared expert. vLLM's SwigluStepAndMul and FlashInfer's SwigluStep.

    Example:
      >>> import jaxmoe
      >>> jaxmoe.SwigluStep(7).limit
      7.0
    """

    def __init__(self, limit: float):
        """Checks the limit: it is part of the compiled program."""
        _numbers("SwigluStep", {"limit": limit})
        limit = float(limit)
        super().__init__(name=f"SwigluStep(limit={limit})", gated=True, kind=STEP, limit=limit)


class SoftcapSwiglu(Activation):
    """SwiGLU whose linear factors, but not the sigmoid's argument, are bounded by tanh.

    y = gate_cap * tanh(gate / gate_cap) * sigmoid(gate) * up_cap * tanh(up / up_cap)

    Args:
      gate_cap, up_cap: bounds, from 1e-6 to 1e6.

    Raises:
      TypeError, ValueError: a bound is not a Python number, or out of range.

    Source: Inkling 2 (`mlp_gate_softcap`, `mlp_up_softcap`), and SiTU of Kimi-K3
      (`activation_situ_beta`, `activation_situ_linear_beta`), which is SoftcapSwiglu(4, 25).

    Example:
      >>> import jaxmoe
      >>> jaxmoe.SoftcapSwiglu(4, 25).name
      'SoftcapSwiglu(gate_cap=4.0, up_cap=25.0)'
    """

    def __init__(self, gate_cap: float, up_cap: float):
        """Checks the bounds: they are part of the compiled program."""
        _numbers("SoftcapSwiglu", {"gate_cap": gate_cap, "up_cap": up_cap})
        gate_cap, up_cap = float(gate_cap), float(up_cap)
        name = f"SoftcapSwiglu(gate_cap={gate_cap}, up_cap={up_cap})"
        super().__init__(name=name, gated=True, kind=SOFTCAP, c1=gate_cap, c3=up_cap)


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


@jax.custom_jvp
def _erfc(x: jax.Array) -> jax.Array:
    """JAX's, whose own derivative fails inside of `jax.shard_map`."""
    return jax.lax.erfc(x)


_erfc.defjvps(lambda t, _, x: -2.0 / math.sqrt(math.pi) * t * jnp.exp(-jnp.square(x)))

_OTHER_FORMULAS: dict[int, Callable[[jax.Array], jax.Array]] = {
    ERF: lambda g: 0.5 * g * _erfc(-math.sqrt(0.5) * g),
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


_CLASSES = ("Swiglu(alpha, beta, limit)", "SwigluStep(limit)", "SoftcapSwiglu(gate_cap, up_cap)")


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
    _checks.check_choice(op, "activation", activation, (*ACTIVATIONS, *_CLASSES))
    if activation not in ACTIVATIONS:
        rule = f"activation={activation!r} must be an instance, not a string"
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
