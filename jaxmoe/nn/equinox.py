"""The block as a module of Equinox."""

import equinox as eqx
import jax

from jaxmoe.losses import update_selection_bias
from jaxmoe.mlp import moe_mlp
from jaxmoe.nn import checks
from jaxmoe.nn.block import Aux, Layer, MoEConfig, apply, init, parameters


class MoE(eqx.Module):
    """A block of experts.

    Args:
      config: what the block is.
      key: draws the parameters.
      layer: see `jaxmoe.nn.apply`.

    Attributes:
      params: trained arrays by the names of `jaxmoe.nn.parameters`, which has their logical axes.
      state: arrays that are not trained: a selection bias, if there is one. No gradient flows to
        them, but a weight decay of all arrays would move them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmoe.nn import MoEConfig
      >>> from jaxmoe.nn.equinox import MoE
      >>> block = MoE(MoEConfig(8, 16, num_experts=4, top_k=2), key=jax.random.key(0))
      >>> y, aux = block(jnp.ones((3, 5, 8)))
      >>> y.shape, int(aux.load.sum())
      ((3, 5, 8), 30)
    """

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    config: MoEConfig = eqx.field(static=True)
    layer: Layer = eqx.field(static=True)

    def __init__(self, config: MoEConfig, *, key: jax.Array, layer: Layer = moe_mlp) -> None:
        """Draws the parameters."""
        checks.check_layer(layer)
        drawn, named = init(config, key), parameters(config)
        self.params = {name: a for name, a in drawn.items() if named[name].trained}
        self.state = {name: a for name, a in drawn.items() if not named[name].trained}
        self.config = config
        self.layer = layer

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, Aux]:
        """Computes the block; see `jaxmoe.nn.apply`."""
        return apply(self.config, self.params | self.state, x, mask=mask, layer=self.layer)

    def with_selection_bias(self, load: jax.Array, *, rate: float | jax.Array) -> "MoE":
        """Returns the block with its bias moved one step, see `jaxmoe.update_selection_bias`.

        Raises:
          ValueError: the config has no selection bias.
        """
        checks.check_has_bias(self.config)
        moved = {n: update_selection_bias(b, load, rate=rate) for n, b in self.state.items()}
        return eqx.tree_at(lambda block: block.state, self, moved)
