"""The calls that a row of docs/models.md shows, evaluated with the weights of a block."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from tests.parity.page import Row

SEQUENCES, LENGTH = 2, 6  # of the tokens of every row
_ROUTERS = ("", ".wg", ".layer", ".classifier", ".gate")


class Module:
    """The arrays of a module of a block by attribute, `gate.weight` for example."""

    def __init__(self, arrays: Mapping[str, np.ndarray], prefix: str):
        self._arrays, self._prefix = arrays, prefix

    def __getattr__(self, name: str) -> Any:
        path = f"{self._prefix}.{name}".lstrip(".")
        if path in self._arrays:
            return jnp.asarray(self._arrays[path])
        if any(key.startswith(f"{path}.") for key in self._arrays):
            return Module(self._arrays, path)
        raise AttributeError(f"the block has no {path}, but {', '.join(self._arrays)}")


class Names(dict[str, Any]):
    """What names in a call stand for: x, functions, then arrays, modules and configuration."""

    def __init__(self, x: jax.Array, arrays: Mapping[str, np.ndarray], config: Any, inputs: Any):
        super().__init__(
            x=x,
            route=jaxmoe.route,
            RoutingMethod=jaxmoe.RoutingMethod,
            Experts=jaxmoe.Experts,
            Swiglu=jaxmoe.Swiglu,
            SwigluStep=jaxmoe.SwigluStep,
            SoftcapSwiglu=jaxmoe.SoftcapSwiglu,
            sigmoid=jax.nn.sigmoid,
            softmax=jax.nn.softmax,
            broadcast_to=jnp.broadcast_to,
            largest=largest,
            softcap=softcap,
            linear=self.linear,
            mlp=self.mlp,
            stack=self.stack,
            **{name: jnp.asarray(value, jnp.int32) for name, value in inputs.items()},
        )
        self._arrays, self._config = arrays, config

    def __missing__(self, name: str) -> Any:
        if name == "logits":
            return self._logits()
        if name in self._arrays or any(key.startswith(f"{name}.") for key in self._arrays):
            return getattr(Module(self._arrays, ""), name)
        ends = [key for key in self._arrays if key.endswith(f".{name}")]
        if f"experts.{name}" in ends or len(ends) == 1:
            return jnp.asarray(self._arrays[max(ends, key=f"experts.{name}".__eq__)])
        for config in (self._config, getattr(self._config, "ffn_config", None)):
            if hasattr(config, name):
                return getattr(config, name)
        raise KeyError(name)

    def _logits(self) -> jax.Array:
        if (path := router_of(self._arrays)) is None:
            raise KeyError("logits")
        return self.linear(Module(self._arrays, path))

    def linear(self, module: Module, x: jax.Array | None = None) -> jax.Array:
        """A linear layer of the block, of x if nothing else is given."""
        y = jnp.matmul(self["x"] if x is None else x, module.weight.T)
        if f"{module._prefix}.bias" in self._arrays:
            y += module.bias
        return y

    def mlp(self, module: Module | None = None, activation: Any = "swiglu") -> jax.Array:
        """A dense MLP of the block: a layer of one expert that every token takes."""
        module = module or Module(self._arrays, "")
        named = {"gate_up": "gate_up_proj", "gate": "gate_proj", "up": "up_proj"}
        present = {n: p for n, p in named.items() if _path(module, p) in self._arrays}
        weights = {n: getattr(module, p).weight[None] for n, p in present.items()}
        experts = jaxmoe.Experts(
            **weights, down=module.down_proj.weight[None], layout="nk", activation=activation
        )
        ids = jnp.zeros((self["x"].shape[0], 1), jnp.int32)
        routing = jaxmoe.Routing(ids, jnp.ones(ids.shape, jnp.float32), 1)
        return jaxmoe.moe_mlp(self["x"], routing, experts)

    def stack(self, name: str) -> jax.Array:
        """The arrays that experts have one by one, stacked."""
        paths = [p for p in self._arrays if p.startswith("experts.") and p.endswith(name)]
        return jnp.stack([jnp.asarray(self._arrays[p]) for p in paths])


def router_of(arrays: Mapping[str, Any]) -> str | None:
    """The module whose product with x is `logits`; None where a layer of its own makes them."""
    paths = (f"{router}{end}" for router in ("gate", "router") for end in _ROUTERS)
    return next((path for path in paths if f"{path}.weight" in arrays), None)


def _path(module: Module, name: str) -> str:
    return f"{module._prefix}.{name}.weight".lstrip(".")


def largest(key: jax.Array, k: int) -> jax.Array:
    return jax.lax.top_k(key, k)[1]


def softcap(z: jax.Array, cap: float) -> jax.Array:
    return jnp.tanh(z / cap) * cap


class Layer:
    """A block and its row, whose calls are evaluated when they are asked for."""

    def __init__(self, row: Row, names: Names, own: Callable[["Layer"], jax.Array] | None):
        self._row, self._own, self.names = row, own, names

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    @property
    def x(self) -> jax.Array:
        return self["x"]

    @property
    def routing(self) -> jaxmoe.Routing:
        self.names["routing"] = eval(self._row.routing, {}, self.names)
        return self.names["routing"]

    @property
    def experts(self) -> jaxmoe.Experts:
        return eval(self._row.experts, {}, self.names)

    @property
    def options(self) -> dict[str, Any]:
        return eval(f"dict({self._row.options})", {}, self.names)

    def __call__(self) -> jax.Array:
        with jax.numpy_rank_promotion("allow"):  # as a user has it
            if self._own is not None:
                return self._own(self)
            return jaxmoe.moe_mlp(self.x, self.routing, self.experts, **self.options)
