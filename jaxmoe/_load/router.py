"""The tensors of a layer's router: which there are, and that they fit."""

import dataclasses
from collections.abc import Iterator

from jaxmoe._load.family import Family
from jaxmoe._load.files import OP
from jaxmoe._load.settings import Config
from jaxmoe._load.shards import Shards


@dataclasses.dataclass(frozen=True)
class Router:
    """Names of a router's tensors, None where there is none.

    Attributes:
      weight: [E, H].
      bias: [E], added to the logits.
      selection_bias: [E] or [1, E], added to scores for the choice.
      table: [V, K], the experts of each token.
    """

    weight: str
    bias: str | None
    selection_bias: str | None
    table: str | None

    def names(self) -> Iterator[str]:
        """The names that are there."""
        return filter(None, (self.weight, self.bias, self.selection_bias, self.table))


def find(shards: Shards, at: str, family: Family, config: Config, num_experts: int) -> Router:
    """The router of a module.

    Raises:
      LookupError: a tensor is missing, which the message names.
      ValueError: another dtype or shape.
      NotImplementedError: a tensor that is none of these, like the scale of a quantized router.
    """

    def there(name: str | None) -> str | None:
        return f"{at}.{name}" if name and f"{at}.{name}" in shards else None

    # A name that is the choice's bias is none of the logits.
    bias = f"{family.router}.bias"
    router = Router(
        f"{at}.{family.router}.weight",
        None if bias == family.selection_bias else there(bias),
        there(family.selection_bias),
        there(family.table),
    )
    stem = f"{at}.{family.router}"
    for name in sorted(stem + part for part in shards.parts(stem) if part[0] == "."):
        if name not in router.names():
            raise NotImplementedError(f"jaxmoe.{OP}: {name} has no reader, beside {router.weight}")
    shards.check_float(router.weight, num_experts, -1)
    for name in filter(None, (router.bias, router.selection_bias)):
        row = (1,) if name == router.selection_bias and shards.shape(name)[:-1] == (1,) else ()
        shards.check_float(name, *row, num_experts)
    wanted = [f"{at}.{name}" for name in family.biases(config)]
    if wanted and not any(name in shards for name in wanted):
        raise LookupError(
            f"jaxmoe.{OP}: {shards.directory} has no tensor {' or '.join(map(repr, wanted))}"
        )
    return router
