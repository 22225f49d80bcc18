"""A layer of experts with its router, as files have them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import _saved
from jaxmoe._jax import checks as _checks
from jaxmoe._load.chosen import chosen
from jaxmoe._load.latent import LatentSpace
from jaxmoe._load.norms import InputNorm
from jaxmoe.experts import Experts
from jaxmoe.mlp import moe_mlp
from jaxmoe.routing import Routing

_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))


@_saved.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoadedLayer:
    """The experts and the router of one layer; a pytree.

    y = moe_mlp(x, route(x W^T + router_bias, ...), experts)

    Shared experts are not in it, nor norms but those that the router or the experts have to
    themselves.

    Attributes:
      experts: the weights.
      router: [R, H], the router's weight. R is E, or more: the last of its rows are logits of
        experts that return what they read (`copies`), or of shared experts, which `route` gives the
        weights of and calling the layer leaves out.
      router_bias: [R] or None, added to the logits.
      selection_bias: [R], or [E] without shared experts, or None: the `bias` of `jaxmoe.route`.
      expert_table: [V, K] or None, the experts of each token of the vocabulary (hash routing).
      options: the other options of `jaxmoe.route`, as pairs; a rule of its own is the pairs of its
        fields. Two rules are no method of `jaxmoe.route`: the method "sparse_mixer" with `jitter`,
        and `capacity`, which tokens of a sequence an expert takes; a sequence is the last axis of
        tokens.
      call: options of `jaxmoe.moe_mlp`, as pairs.
      latent: None, or the products around experts that read fewer numbers than a token has.
      norm: None, or the norm of what router and experts read.
      expert_scale: [E] or None, a factor of each expert's weight.
      copies: experts past the last of `experts`, which return what they read.
    """

    experts: Experts
    router: jax.Array
    router_bias: jax.Array | None = None
    selection_bias: jax.Array | None = None
    expert_table: jax.Array | None = None
    options: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})
    call: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})
    latent: LatentSpace | None = None
    norm: InputNorm | None = None
    expert_scale: jax.Array | None = None
    copies: int = dataclasses.field(default=0, metadata={"static": True})

    def route(self, x: jax.Array, token_ids: jax.Array | None = None) -> Routing:
        """Chooses the experts of tokens x [.., H] by float32 logits.

        token_ids: [..] integers, for a layer with an `expert_table`; others do not look at them, so
          that all layers of a model may be called alike. A number that is in no row of the table
          chooses no expert: ids -1 and weights 0.

        Raises:
          TypeError: x is no array of floats, or `token_ids` none of integers.
          ValueError: x has another H, `token_ids` another shape, or the layer has a table and there
            are none.
        """
        op, hidden = "LoadedLayer.route", self.router.shape[1]
        _checks.check_float(op, "x", x)
        if x.shape[-1:] != (hidden,):
            rule = f"x must have shape [.., H] with H = {hidden} of the router"
            raise ValueError(_checks.message(op, rule, x=x))
        wide = x.astype(jnp.float32) if self.norm is None else self.norm.of_router(x)
        router = self.router.astype(jnp.float32)
        # GPUs would round the factors of a float32 product, and other experts would be chosen.
        logits = jnp.einsum("...h,eh->...e", wide, router, precision=jax.lax.Precision.HIGHEST)
        if self.router_bias is not None:
            lead = (1,) * (logits.ndim - 1)
            logits = logits + self.router_bias.astype(jnp.float32).reshape(*lead, -1)
        traced: dict[str, jax.Array] = {}
        if self.expert_table is not None:
            traced["expert_ids"] = _looked_up(op, self.expert_table, token_ids, x)
        elif self.selection_bias is not None:
            traced["bias"] = self.selection_bias
        if self.expert_scale is not None:
            traced["expert_scale"] = self.expert_scale
        return chosen(logits, dict(self.options), **traced)

    def __call__(
        self,
        x: jax.Array,
        token_ids: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """The layer's result for tokens x [.., H]; `options` are those of `jaxmoe.moe_mlp`."""
        routing, call = self.route(x, token_ids), dict(self.call)
        if self.copies:
            residual = self._copied(x, routing, residual)
        if self.norm is not None:
            x = self.norm.of_experts(x)
        if self.latent is None:
            return moe_mlp(x, routing, self.experts, residual=residual, **call, **options)
        inner = lambda z: moe_mlp(z, routing, self.experts, **call, **options)  # noqa: E731
        return self.latent(inner, x, residual)

    def _copied(self, x: jax.Array, routing: Routing, residual: jax.Array | None) -> jax.Array:
        """What experts give that return what they read, and `residual`."""
        copied = routing.expert_ids >= self.router.shape[0] - self.copies
        share = jnp.where(copied, routing.weights, 0.0).sum(-1, keepdims=True)
        y = share * x.astype(jnp.float32)
        return (y if residual is None else y + residual.astype(jnp.float32)).astype(x.dtype)


def _looked_up(op: str, table: jax.Array, token_ids: Any, x: jax.Array) -> jax.Array:
    """The experts of tokens, -1 for a token that the table does not have."""
    if token_ids is None:
        rule = "token_ids must be given to a layer with a table"
        raise ValueError(_checks.message(op, rule))
    _checks.check_dtype(op, "token_ids", token_ids, _INTEGERS)
    _checks.check_shape(op, "token_ids", token_ids, x.shape[:-1], "the axes of tokens of x")
    if token_ids.dtype.itemsize < 4:  # a number of rows may be none of so few bits
        token_ids = token_ids.astype(np.int32)
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    return jnp.where(known[..., None], table[jnp.where(known, token_ids, 0)], -1)
