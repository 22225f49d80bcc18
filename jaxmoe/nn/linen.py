"""The block as a module of Flax Linen."""

from typing import Any

import flax.linen as nn
import jax

from jaxmoe.losses import update_selection_bias
from jaxmoe.mlp import moe_mlp
from jaxmoe.nn import checks
from jaxmoe.nn.block import Aux, Layer, MoEConfig, Parameter, apply, initial, parameters

STATE = "moe_state"  # collection of what is not trained


class MoE(nn.Module):
    """A block of experts.

    Parameters carry logical axes, `flax.linen.get_partition_spec` reads them. A selection bias is a
    variable `selection_bias` of the collection `STATE`; with that collection mutable, a call
    that is given `rate` leaves the moved bias there. Its load is that of the call: inside
    `jax.shard_map` move the bias outside, with `jaxmoe.update_selection_bias`.

    Attributes:
      config: what the block is.
      layer: see `jaxmoe.nn.apply`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmoe.nn import MoEConfig
      >>> from jaxmoe.nn.linen import MoE
      >>> block, x = MoE(MoEConfig(8, 16, num_experts=4, top_k=2)), jnp.ones((3, 5, 8))
      >>> y, aux = block.apply(block.init(jax.random.key(0), x), x)
      >>> y.shape, int(aux.load.sum())
      ((3, 5, 8), 30)
    """

    config: MoEConfig
    layer: Layer = moe_mlp

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, rate: float | jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """Computes the block; see `jaxmoe.nn.apply`.

        Raises:
          ValueError: a `rate`, but no selection bias.
        """
        if rate is not None:
            checks.check_has_bias(self.config)
        named, layer = parameters(self.config), self.layer
        if self.is_initializing():  # outside of any mesh: all experts, by the plain layer
            layer = moe_mlp
        params = {n: _parameter(self, n, p) for n, p in named.items() if p.trained}
        state = {n: _variable(self, n, p) for n, p in named.items() if not p.trained}
        params |= {n: variable.value for n, variable in state.items()}
        y, aux = apply(self.config, params, x, mask=mask, layer=layer)
        if rate is not None and not self.is_initializing():
            for variable in state.values():
                variable.value = update_selection_bias(variable.value, aux.load, rate=rate)
        return y, aux


def _parameter(module: nn.Module, name: str, parameter: Parameter) -> Any:
    """Reads an array as it is, which inside `jax.shard_map` has a device's experts, or draws it."""
    if module.has_variable("params", name):
        return nn.unbox(module.get_variable("params", name))
    draw = nn.with_logical_partitioning(lambda key: initial(key, parameter), parameter.axes)
    return module.param(name, draw)


def _variable(module: nn.Module, name: str, parameter: Parameter) -> Any:
    return module.variable(STATE, name, lambda: initial(jax.random.key(0), parameter))
