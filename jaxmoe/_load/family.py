"""Where the files of a model family have the parts of a layer."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxmoe._load import rules, unread
from jaxmoe._load.files import OP, naming
from jaxmoe._load.settings import Config, count, flag, num_experts
from jaxmoe.activation import Activation

_NUMBER = r"(?:0|[1-9][0-9]*)"  # of an expert; 00 is another name, which nothing would read


class Latent(NamedTuple):
    """Names of the products around experts that read and write fewer numbers than a token has.

    Attributes:
      size: what the configuration calls that number; there are no products where it has none.
      before, after: stems of the products' weights in the block.
      norm: stem of the weight of a norm before the second, which the configuration says is there
        by the name that follows.
      normed: that name.
    """

    size: str
    before: str
    after: str
    norm: str = ""
    normed: str = ""


class Norms(NamedTuple):
    """Names of what a layer has where router and experts read a norm of its tokens.

    Attributes:
      experts: stem of the weight of the experts' norm in the block.
      router: name of what the router's norm is multiplied by, which one over the root of H is as
        well.
      weights: name of a factor of each expert's weight.
    """

    experts: str
    router: str
    weights: str


class Tower(NamedTuple):
    """Which layers of a model, or which experts of its layers, a family has.

    Attributes:
      module: a module that all names of its layers have among theirs; "": any.
      sections: objects of the configuration, each in the one before, that describe it.
      part, of_parts: experts and biases of the choice are numbered with those of `of_parts` towers
        in a row, of which these are the number `part`. A list in the configuration has a value for
        each.
    """

    module: str = ""
    sections: tuple[str, ...] = ("text_config",)
    part: int = 0
    of_parts: int = 1


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of a layer's tensors and the meaning of its configuration.

    Attributes:
      block: the module of a layer that has its router and experts, as in `layers.3.<block>`; "" for
        the layer itself.
      weights: stems of gate, up and down in it, or of the first weight and down; `{e}` is an
        expert.
      layers: the module that has the layers by number.
      router: stem of the router's weight in it.
      router_weight: what follows the stem.
      router_layout: "nk" for [E, H], "kn" for [H, E].
      beside: names in it that begin as the router's do, and belong to another tower.
      selection_bias: name in it of what is added to scores for the choice, if there may be one;
        after "^" in the layer.
      table: name in it of the experts of each token, if there may be one.
      bias_flag: what the configuration calls whether there is that bias, and what it means that it
        does not say; None: there may be one.
      needed: names in it of which each layer has at least one.
      route: from the configuration to the options of `jaxmoe.route`; a `method` of pairs has the
        fields of a `jaxmoe.RoutingMethod`. `routing` has checked what else is said.
      activation: from the configuration to that of `jaxmoe.Experts`; checked as well by `acts`.
      gated: the first of two weights is gate_up, not up.
      order, layout: of plain weights, as in `jaxmoe.Experts`.
      call: options of `jaxmoe.moe_mlp`.
      joined: plain weights have the rows of all experts one after the other, [E * I, H].
      biased: experts have biases, whose names are those of their weights and `_bias`, or `.bias`
        where each has its own.
      sum_bias: name in it of what is added to the sum of experts whose weights add to 1.
      latent: the products around the experts, if there may be some.
      norms: the norms that router and experts read, if they do.
      copies: what the configuration calls the number of experts past the last, which return what
        they read.
      shared: what it calls the number of shared experts, where these have logits.
      scale: name in it of a factor of all weights.
      tower: which layers these are.
      by_layer: what the configuration may have as a list with a value for each layer.
      other: the family where files have its weights and not these.
    """

    route: Callable[[Config], dict[str, Any]]
    block: str = "mlp"
    weights: tuple[str, ...] = tuple(f"experts.{{e}}.{n}_proj" for n in ("gate", "up", "down"))
    router: str = "gate"
    selection_bias: str | None = None
    table: str | None = None
    bias_flag: tuple[str, bool | None] = ("", None)
    needed: tuple[str, ...] = ()
    activation: Callable[[Config], str | Activation] = rules.gated
    gated: bool = True
    order: str = "gate_up"
    layout: str | tuple[str, str] = "nk"
    call: tuple[tuple[str, Any], ...] = ()
    layers: str = "layers"
    router_weight: str = ".weight"
    router_layout: str = "nk"
    beside: tuple[str, ...] = ()
    joined: bool = False
    biased: bool = False
    sum_bias: str = ""
    latent: Latent | None = None
    norms: Norms | None = None
    copies: str = ""
    shared: str = ""
    scale: str = ""
    tower: Tower = Tower()
    by_layer: tuple[str, ...] = ()
    other: "Family | None" = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The field of `jaxmoe.Experts` that each weight is."""
        if len(self.weights) == 3:
            return "gate", "up", "down"
        return ("gate_up" if self.gated else "up"), "down"

    def routing(self, config: Config) -> dict[str, Any]:
        """The options of `jaxmoe.route`, by which a layer does all that the configuration says."""
        options = self.route(config)
        unread.check_routing(config, options)
        return options

    def acts(self, config: Config) -> str | Activation:
        """The activation, which is all that the configuration says of one."""
        with naming("config.json"):
            activation = self.activation(config)
        unread.check_activation(config, activation)
        return activation

    def experts(self, config: Config) -> dict[str, int | bool]:
        """How names and tensors number the experts, as fields of a weight in files."""
        experts, tower = num_experts(config), self.tower
        return {
            "start": tower.part * experts,
            "total": tower.of_parts * experts,
            "spare": self.num_copies(config),
            "joined": experts if self.joined else 0,
            "biased": self.biased,
        }

    def num_copies(self, config: Config) -> int:
        """The experts past the last, which return what they read."""
        return count(config, self.copies, default=0, least=0) if self.copies else 0

    def num_shared(self, config: Config) -> int:
        """The shared experts that have logits."""
        return count(config, self.shared) if self.shared else 0

    def has_bias(self, config: Config) -> bool | None:
        """Whether there is a bias of the choice by the configuration; None: it does not say."""
        name, default = self.bias_flag
        return default if config.get(name) is None else flag(config, name)

    def at_layer(self, config: Config, number: int) -> Config:
        """The configuration of a layer.

        Raises:
          ValueError: a list without a value for it.
        """
        lists = {name: config[name] for name in self.by_layer if isinstance(config.get(name), list)}
        for name, values in lists.items():
            if number >= len(values):
                raise ValueError(
                    f"jaxmoe.{OP}: {name} of config.json has {len(values)} values, none for layer "
                    f"{number}"
                )
        return {**config, **{name: values[number] for name, values in lists.items()}}

    def among(self, names: Iterable[str]) -> "Family":
        """This family or the other one, by the names of all tensors."""
        if self.other is None or any(self._modules(self.weights, names)):
            return self
        return self.other

    def name(self, at: str, name: str) -> str:
        """The whole name of a tensor of the block `at`; of its layer after "^"."""
        if name[:1] != "^":
            return f"{at}.{name}"
        return at.removesuffix(self.block) + name[1:]

    def of_no_weight(self, parts: Iterable[str]) -> list[str]:
        """Of what follows `<block>.experts` in names of tensors, what belongs to no weight."""
        stems = (
            re.escape(w.removeprefix("experts")).replace(r"\{e\}", _NUMBER) for w in self.weights
        )
        known = re.compile(rf"(?:{'|'.join(stems)})(?:[._].*)?")
        bias = f"{self.selection_bias}"
        return sorted(p for p in parts if f"experts{p}" != bias and not known.fullmatch(p))

    def blocks(self, names: Iterable[str]) -> dict[int, str]:
        """The module of each layer with experts, by the layer's number, among names of tensors.

        Those of other towers are left out, and modules in one that is named `mtp`: their layers are
        no layers of the model.

        Raises:
          ValueError: two modules have the same number.
        """
        out: dict[int, str] = {}
        found = self._modules((*self.weights, self.router + self.router_weight), names)
        for at, digits in dict.fromkeys(found):
            other = out.setdefault(int(digits), at)
            if other != at:
                raise ValueError(f"jaxmoe.{OP}: {other} and {at} are both layer {int(digits)}")
        return dict(sorted(out.items()))

    def _modules(self, stems: Sequence[str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """A layer's module and its number, for each name of a tensor with one of these stems."""
        stem = "|".join(map(re.escape, stems)).replace(re.escape("{e}"), "[0-9]+")
        block = re.escape(f".{self.block}" if self.block else "")
        pattern = re.compile(rf"((?:.*\.)?{self.layers}\.([0-9]+){block})\.(?:{stem})(?:[._].*)?")
        for match in filter(None, map(pattern.fullmatch, names)):
            at, digits = match.groups()
            modules, mine = at.split("."), self.tower.module
            if "mtp" not in modules and (not mine or mine in modules):
                yield at, digits
