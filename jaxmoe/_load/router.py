"""The tensors of a layer's router: which there are, and that they fit."""

import dataclasses
from collections.abc import Iterator

from jaxmoe._jax.checks import dtype_name
from jaxmoe._load.family import Family
from jaxmoe._load.files import OP
from jaxmoe._load.settings import Config, top_k
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
        return full if name and (full := family.name(at, name)) in shards else None

    # A name that is the choice's bias is none of the logits.
    bias = f"{family.router}.bias"
    router = Router(
        f"{at}.{family.router}.weight",
        None if bias == family.selection_bias else there(bias),
        there(family.selection_bias),
        there(family.table),
    )
    stem = f"{at}.{family.router}"
    for name in sorted(stem + part for part in shards.parts(stem) if part[:1] != "_"):
        if name not in router.names():
            raise NotImplementedError(f"jaxmoe.{OP}: {name} has no reader, beside {router.weight}")
    shards.check_float(router.weight, num_experts, -1)
    for name in filter(None, (router.bias, router.selection_bias)):
        row = (1,) if name == router.selection_bias and shards.shape(name)[:-1] == (1,) else ()
        shards.check_float(name, *row, num_experts)
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
        _check_table(shards, router.table, top_k(config), num_experts)
    wanted = [family.name(at, name) for name in needed]
    if wanted and not any(name in shards for name in wanted):
        raise LookupError(
            f"jaxmoe.{OP}: {shards.directory} has no tensor {' or '.join(map(repr, wanted))}"
        )
    return router


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
