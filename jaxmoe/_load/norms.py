"""Root mean square norms of tokens, which are a part of some layers."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmoe import _saved


def rms_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """Tokens [.., H] over the root of their mean square, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + epsilon)


def weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Float32 tokens [.., H] times a weight [H]."""
    return x * weight.astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), -1)


@_saved.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputNorm:
    """The norm of what a layer reads; a pytree.

    Experts read norm(x) * weight, and the router norm(x), as its own weight has what it has beside.

    Attributes:
      weight: [H].
      epsilon: added to the mean square.
    """

    weight: jax.Array
    epsilon: float = dataclasses.field(default=0.0, metadata={"static": True})

    def of_router(self, x: jax.Array) -> jax.Array:
        """What the router reads, in float32."""
        return rms_norm(x, self.epsilon)

    def of_experts(self, x: jax.Array) -> jax.Array:
        """What experts read, rounded once to the dtype of x."""
        return weighted(rms_norm(x, self.epsilon), self.weight).astype(x.dtype)
