"""Products around experts that read and write fewer numbers than a token has."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import _saved
from jaxmoe._load.family import Family
from jaxmoe._load.files import OP
from jaxmoe._load.norms import rms_norm, weighted
from jaxmoe._load.settings import Config, count, flag, real
from jaxmoe._load.shards import Shards
from jaxmoe._load.stored import INPUT_SCALE

_SCALE = ".weight_scale"


@_saved.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentSpace:
    """Products around the experts of a layer; a pytree.

    y = norm(experts(x before^T)) after^T

    Attributes:
      before: [L, H].
      after: [H, L].
      norm: [L] or None, the weight of a root mean square norm.
      epsilon: of the norm.
    """

    before: jax.Array
    after: jax.Array
    norm: jax.Array | None = None
    epsilon: float = dataclasses.field(default=0.0, metadata={"static": True})

    def __call__(
        self, experts: Callable[[jax.Array], jax.Array], x: jax.Array, residual: jax.Array | None
    ) -> jax.Array:
        """The result for tokens x [.., H], with `residual` added last; each array is rounded."""
        z = experts(_product(x, self.before).astype(x.dtype))
        if self.norm is not None:
            z = weighted(rms_norm(z, self.epsilon), self.norm).astype(x.dtype)
        y = _product(z, self.after)
        return (y if residual is None else y + residual.astype(jnp.float32)).astype(x.dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST  # of float32 factors, which GPUs would round
    w, wide = w.astype(x.dtype), jnp.float32
    return jnp.einsum("...k,nk->...n", x, w, precision=exact, preferred_element_type=wide)


def find(
    shards: Shards, at: str, family: Family, config: Config, dtype: str, hidden: int, inner: int
) -> LatentSpace | None:
    """The products of a module, on the host; None where experts read tokens as they are.

    Args:
      dtype: what FP8 weights are dequantized to.
      hidden: H of the router.
      inner: H of the experts.

    Raises:
      LookupError: a tensor is missing, which the message names.
      ValueError: another dtype or shape.
      NotImplementedError: a tensor that is not read.
    """
    names = family.latent
    if names is None or config.get(names.size) is None:
        return None
    if (said := count(config, names.size)) != inner:
        raise ValueError(
            f"jaxmoe.{OP}: config.json has {names.size}={said}, and experts of {at} read {inner} "
            "numbers of a token"
        )
    norm: Any = None
    if names.norm and flag(config, names.normed, default=False):
        norm = _weight(shards, f"{at}.{names.norm}", dtype, inner)
    return LatentSpace(
        _weight(shards, f"{at}.{names.before}", dtype, inner, hidden),
        _weight(shards, f"{at}.{names.after}", dtype, hidden, inner),
        norm,
        0.0 if norm is None else real(config, "rms_norm_eps"),
    )


def _weight(shards: Shards, stem: str, dtype: str, *shape: int) -> Any:
    """A plain weight, or one of FP8 with one scale, whose input's scale is not used."""
    name, scale = f"{stem}.weight", f"{stem}{_SCALE}"
    eight = shards.dtype(name).name == "float8_e4m3fn"
    known = {".weight", _SCALE, INPUT_SCALE} if eight else {".weight"}
    for part in sorted(part for part in shards.parts(stem) if part[:1] != "_"):
        if part not in known:
            raise NotImplementedError(f"jaxmoe.{OP}: {stem}{part} has no reader, beside {name}")
    if not eight:
        shards.check_float(name, *shape)
        return shards[name]
    if shards.shape(name) != shape or shards[scale].size != 1:
        raise ValueError(
            f"jaxmoe.{OP}: {name} must be {list(shape)} with one {_SCALE}, not "
            f"{list(shards.shape(name))} with {list(shards.shape(scale))}"
        )
    shards.check_float(scale)
    factor = shards[scale].astype(np.float32).reshape(())
    if not 0 < factor < np.inf:
        rule = "must be one number, positive and finite"
        raise ValueError(f"jaxmoe.{OP}: {scale}={float(factor)} {rule}")
    return (shards[name].astype(np.float32) * factor).astype(np.dtype(dtype))
