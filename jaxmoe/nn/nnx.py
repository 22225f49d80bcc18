"""The block as a module of Flax NNX."""

from typing import Any

import jax
from flax import nnx

from jaxmoe._jax import checks as _checks
from jaxmoe.losses import update_selection_bias
from jaxmoe.mlp import moe_mlp
from jaxmoe.nn import checks
from jaxmoe.nn.block import Aux, Layer, MoEConfig, apply, initial, parameters


class SelectionBias(nnx.Variable[jax.Array]):
    """The bias that experts are chosen with: state, and no `nnx.Param`."""


class MoE(nnx.Module):
    """A block of experts. Its parameters carry logical axes, `nnx.get_partition_spec` reads them.

    Args:
      config: what the block is.
      rngs: `rngs.params` draws the parameters.
      layer: see `jaxmoe.nn.apply`.
      eager_sharding: whether parameters are divided as they are drawn, by the mesh and
        `nnx.logical_axis_rules` that are set then.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxmoe.nn import MoEConfig
      >>> from jaxmoe.nn.nnx import MoE
      >>> block = MoE(MoEConfig(8, 16, num_experts=4, top_k=2), rngs=nnx.Rngs(0))
      >>> y, aux = block(jnp.ones((3, 5, 8)))
      >>> y.shape, int(aux.load.sum())
      ((3, 5, 8), 30)
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        layer: Layer = moe_mlp,
        eager_sharding: bool = False,
    ) -> None:
        """Draws the parameters."""
        checks.check_config(config)
        checks.check_layer(layer)
        _checks.check_type("MoE", "rngs", rngs, nnx.Rngs, "a flax.nnx.Rngs")
        self.config = config
        self.layer = layer
        for name, parameter in parameters(config).items():
            kind: Any = nnx.Param if parameter.trained else SelectionBias
            value = initial(rngs.params(), parameter)
            variable = kind(value, out_sharding=parameter.axes, eager_sharding=eager_sharding)
            setattr(self, name, variable)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, Aux]:
        """Computes the block; see `jaxmoe.nn.apply`."""
        params = {name: getattr(self, name)[...] for name in parameters(self.config)}
        return apply(self.config, params, x, mask=mask, layer=self.layer)

    def update_selection_bias(self, load: jax.Array, *, rate: float | jax.Array) -> None:
        """Moves the selection bias one step, see `jaxmoe.update_selection_bias`.

        Raises:
          ValueError: the config has no selection bias.
        """
        checks.check_has_bias(self.config)
        bias: Any = self.selection_bias  # type: ignore[attr-defined]
        bias[...] = update_selection_bias(bias[...], load, rate=rate)
