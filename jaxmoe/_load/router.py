"""The tensors of a layer's router: which there are, that they fit, and what they are."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxmoe._jax.checks import dtype_name
from jaxmoe._load.family import Family
from jaxmoe._load.files import OP
from jaxmoe._load.settings import Config, num_experts, top_k
from jaxmoe._load.shards import Shards


@dataclasses.dataclass(frozen=True)
class Router:
    """Names of a router's tensors, None where there is none.

    Attributes:
      weight: [R, H], or [H, R] if it is `transposed`.
      rows: R, the experts and the other logits there are.
      bias: [R], added to the logits.
      selection_bias: [C], [1, C] or [P, C] of P towers, added to scores for the choice. C is R
        without shared experts.
      table: [V, K], the experts of each token.
      input_scale: [H], a factor of what the router reads.
      expert_scale: [E], a factor of each expert's weight.
      scale: one number, a factor of all weights.
      transposed: whether the weight is.
      part: the row of `selection_bias` that is this tower's.
    """

    weight: str
    rows: int
    bias: str | None
    selection_bias: str | None
    table: str | None
    input_scale: str | None
    expert_scale: str | None
    scale: str | None
    transposed: bool
    part: int

    def names(self) -> Iterator[str]:
        """The names that are there."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return (name for name in fields if isinstance(name, str))

    def hidden(self, shards: Shards) -> int:
        """H."""
        return shards.shape(self.weight)[0 if self.transposed else 1]

    def check(self, shards: Shards, hidden: int) -> None:
        """Refuses a weight for tokens of another size than the experts'."""
        shape = (hidden, self.rows) if self.transposed else (self.rows, hidden)
        shards.check_float(self.weight, *shape)

    def read_weight(self, shards: Shards) -> Any:
        """The weight [R, H], with the factor of what it is multiplied by."""
        weight = shards[self.weight]
        if self.transposed:
            weight = weight.T
        if self.input_scale is None:
            return weight
        factor = shards[self.input_scale].astype(np.float32) * np.float32(weight.shape[1] ** -0.5)
        return weight.astype(np.float32) * factor

    def read_choice(self, shards: Shards) -> Any:
        """The bias of the choice [C], None where there is none."""
        if self.selection_bias is None:
            return None
        return np.atleast_2d(shards[self.selection_bias])[self.part]

    def read_scale(self, shards: Shards) -> float:
        """The factor of all weights.

        Raises:
          ValueError: it is no finite number.
        """
        if self.scale is None:
            return 1.0
        shards.check_float(self.scale)
        value = shards[self.scale].astype(np.float32)
        if value.size != 1 or not np.isfinite(value).all():
            rule = "must be one finite number"
            raise ValueError(f"jaxmoe.{OP}: {self.scale}={value.tolist()} {rule}")
        return float(value.max())


def find(shards: Shards, at: str, family: Family, config: Config) -> Router:
    """The router of a module.

    Raises:
      LookupError: a tensor is missing, which the message names.
      ValueError: another dtype or shape.
      NotImplementedError: a tensor that is none of these, like the scale of a quantized router.
    """

    def there(name: str | None) -> str | None:
        return full if name and (full := family.name(at, name)) in shards else None

    experts, norms = num_experts(config), family.norms
    choices = experts + family.num_copies(config)
    # A name that is the choice's bias is none of the logits.
    bias = f"{family.router}.bias"
    router = Router(
        f"{at}.{family.router}{family.router_weight}",
        choices + family.num_shared(config),
        None if bias == family.selection_bias else there(bias),
        there(family.selection_bias),
        there(family.table),
        None if norms is None else family.name(at, norms.router),
        None if norms is None else family.name(at, norms.weights),
        family.name(at, family.scale) if family.scale else None,
        family.router_layout == "kn",
        family.tower.part,
    )
    stem, others = f"{at}.{family.router}", {family.name(at, name) for name in family.beside}
    for name in sorted(stem + part for part in shards.parts(stem) if part[:1] != "_"):
        if name not in router.names() and name not in others:
            raise NotImplementedError(f"jaxmoe.{OP}: {name} has no reader, beside {router.weight}")
    shape = (-1, router.rows) if router.transposed else (router.rows, -1)
    shards.check_float(router.weight, *shape)
    sizes = {router.bias: router.rows, router.expert_scale: experts}
    for name, size in {**sizes, router.input_scale: router.hidden(shards)}.items():
        if name is not None:
            shards.check_float(name, size)
    if (name := router.selection_bias) is not None:
        rows = family.tower.of_parts
        alone = rows == 1 and shards.shape(name)[:-1] != (1,)
        shards.check_float(name, *(() if alone else (rows,)), choices)
    _check_needed(shards, at, family, config, router)
    return router


def _check_needed(shards: Shards, at: str, family: Family, config: Config, router: Router) -> None:
    """Refuses a bias of the choice that the configuration denies, and what is missing."""
    said, needed = family.has_bias(config), family.needed
    if said and family.selection_bias:
        needed = (family.selection_bias,)
    if said is False and router.selection_bias:
        name = family.bias_flag[0]
        raise ValueError(
            f"jaxmoe.{OP}: config.json has {name}={config.get(name)!r}, which must be true beside "
            f"the tensor {router.selection_bias}"
        )
    if router.table:
        _check_table(shards, router.table, top_k(config), num_experts(config))
    wanted = [family.name(at, name) for name in needed]
    if wanted and not any(name in shards for name in wanted):
        raise LookupError(
            f"jaxmoe.{OP}: {shards.directory} has no tensor {' or '.join(map(repr, wanted))}"
        )


def _check_table(shards: Shards, name: str, k: int, num_experts: int) -> None:
    """Refuses a table [V, K] with others than experts."""
    shape, dtype = shards.shape(name), shards.dtype(name)
    if dtype.kind not in "iu" or len(shape) != 2 or shape[1] != k:
        raise ValueError(
            f"jaxmoe.{OP}: {name} must be integers [V, {k}] (tokens of the vocabulary, and experts "
            f"of each), not {dtype_name(dtype)} {list(shape)}"
        )
    table = shards[name]
    for expert in (table.min(initial=0), table.max(initial=0)):
        if not 0 <= expert < num_experts:
            raise ValueError(
                f"jaxmoe.{OP}: {name} has {expert}, which must be an expert, 0 to {num_experts - 1}"
            )
