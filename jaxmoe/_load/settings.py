"""Values of a model's config.json: present, of their kind, and in their range."""

from collections.abc import Mapping
from typing import Any

from jaxmoe._load.files import OP, mapping

Config = Mapping[str, Any]
# What families call the experts of a token, and those that they are chosen from.
TOP_K = (
    *("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "moe_top_k"),
    "top_k_experts",
)
EXPERTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"


def needed(config: Config, *names: str) -> Any:
    """The value of the first of these names that the configuration has."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"jaxmoe.{OP}: config.json has no {' or '.join(names)}")


def count(config: Config, *names: str, default: int | None = None, least: int = 1) -> int:
    """The first of these numbers, an integer of at least `least`; by default one must be there."""
    return int(_number(config, names, int, least, default))


def real(config: Config, name: str, default: float | None = None) -> float:
    """A number of at least 0; without a default it must be there."""
    return float(_number(config, (name,), (int, float), 0, default))


def _number(config: Config, names: tuple[str, ...], kinds: Any, least: int, default: Any) -> Any:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
            what = "an integer" if kinds is int else "a number"
            raise ValueError(
                f"jaxmoe.{OP}: config.json has {name}={value!r}, which must be {what} of at least "
                f"{least}"
            )
        for other in names:
            if type(said := config.get(other)) is int and said != value:
                raise ValueError(
                    f"jaxmoe.{OP}: config.json has {name}={value!r} and {other}={said!r}, which "
                    "must be one number"
                )
        return value
    return needed(config, *names) if default is None else default


def flag(config: Config, name: str, default: bool | None = None) -> bool:
    """A boolean; without a default it must be there."""
    value = config.get(name)
    if value is None:
        return bool(needed(config, name) if default is None else default)
    if not isinstance(value, bool):
        raise ValueError(f"jaxmoe.{OP}: config.json has {name}={value!r}, which must be a boolean")
    return value


def one_of(config: Config, name: str, *allowed: str | float) -> None:
    """Refuses another rule than those by which the layer is computed; it need not be there."""
    if (value := config.get(name)) is not None and value not in allowed:
        these = " or ".join(map(str, allowed))
        raise NotImplementedError(
            f"jaxmoe.{OP}: config.json has {name}={value!r}, which must be {these} "
            f"for model_type={config.get('model_type')!r}"
        )


def section(config: Config, name: str) -> dict[str, Any]:
    """An object in the configuration, empty where there is none."""
    value = config.get(name)
    return {} if value is None else mapping(f"{name} of config.json", value)


def name_of(config: Config, names: tuple[str, ...]) -> str:
    """The first of these names that the configuration has."""
    return next((name for name in names if config.get(name) is not None), names[0])


def top_k(config: Config) -> int:
    """The experts of a token."""
    k, most = count(config, *TOP_K), num_experts(config)
    if k > most:
        raise ValueError(
            f"jaxmoe.{OP}: config.json has {name_of(config, TOP_K)}={k}, which must be at most "
            f"{most}, the number of experts"
        )
    return k


def num_experts(config: Config) -> int:
    """The experts that a token's are chosen from."""
    return count(config, *EXPERTS)
