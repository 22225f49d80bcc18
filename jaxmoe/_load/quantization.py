"""What `quantization_config` says of weights, and whether their tensors agree."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxmoe._load.files import OP, mapping
from jaxmoe._load.settings import flag, section

# Of compressed-tensors: groups of any inputs.
_SORTED = ("group", "dynamic")


def _weights(quantization: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What each group of modules has of its weights."""
    for name, group in section(quantization, "config_groups").items():
        weights = section(mapping(f"{name} of config_groups", group), "weights")
        if weights:
            yield weights


def _overrides(quantization: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What AutoRound and GPTQModel have of some modules, in the place of what all others have."""
    for name in ("extra_config", "dynamic"):
        modules = quantization.get(name)
        if isinstance(modules, dict):
            yield from (one for one in modules.values() if isinstance(one, dict))


def group_size(quantization: Mapping[str, Any]) -> int | None:
    """The group of k that has a scale, if the configuration says one and no other."""
    said = (quantization, *_weights(quantization))
    sizes = {size for one in said if isinstance(size := one.get("group_size"), int)}
    return max(sizes) if len(sizes) == 1 and max(sizes) > 0 else None  # -1: all of K


def asymmetric(quantization: Mapping[str, Any]) -> bool:
    """Whether all weights have zero points."""
    said = [not flag(one, "symmetric", default=True) for one in _weights(quantization)]
    return bool(said) and all(said)


def order(quantization: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether all weights have groups of any inputs, and what says that none has, "" if nothing.

    Both are false where the configuration says nothing, or has both.
    """
    if quantization.get("desc_act") is not None:
        by_module = [one["desc_act"] for one in _overrides(quantization) if "desc_act" in one]
        flags = [flag(quantization, "desc_act"), *map(bool, by_module)]
        return all(flags), "" if any(flags) else "desc_act=false"
    said = [one.get("actorder") for one in _weights(quantization)]
    if not said:
        return False, ""
    anywhere = [one is True or str(one).lower() in _SORTED for one in said]
    shown = " and ".join(dict.fromkeys(f"actorder={one!r}" for one in said))
    return all(anywhere), "" if any(anywhere) else shown.replace("None", "null")


def other_bits(quantization: Mapping[str, Any], bits: int) -> str:
    """The bits of GPTQ's or AWQ's configuration, "" if some modules may have these."""
    top = [str(quantization[n]) for n in ("bits", "w_bit") if quantization.get(n) is not None]
    by_module = [str(one["bits"]) for one in _overrides(quantization) if "bits" in one]
    return "" if not top or str(bits) in (*top, *by_module) else " and ".join(dict.fromkeys(top))


def check_bits(quantization: Mapping[str, Any], name: str, bits: int) -> None:
    """Refuses weights of other bits than those of all modules in the configuration.

    name: that of the tensor, in which weights have so many bits.
    """
    said = [one["num_bits"] for one in _weights(quantization) if one.get("num_bits") is not None]
    if said and bits not in said:
        these = " and ".join(dict.fromkeys(f"num_bits={one!r}" for one in said))
        raise ValueError(
            f"jaxmoe.{OP}: {name} has weights of {bits} bits, and quantization_config has {these}"
        )


def check_groups(quantization: Mapping[str, Any], name: str, k: int, count: int) -> None:
    """Refuses other groups along k than those of the configuration.

    name: that of the tensor of scales, of which there are `count` along k.
    """
    said: dict[str, int] = {}
    for one in (quantization, *_overrides(quantization), *_weights(quantization)):
        for key in ("group_size", "q_group_size"):
            size = one.get(key)
            if isinstance(size, int) and not isinstance(size, bool):
                said[f"{key}={size}"] = size if 0 < size < k else k
        if one.get("group_size") is None and (strategy := one.get("strategy")) is not None:
            if strategy not in ("channel", "tensor"):
                return  # which says no size
            said[f"strategy={strategy!r}"] = k
    sizes = {*said.values()}
    if sizes and not any(count == -(-k // size) for size in sizes):
        group = f"{k // count}" if count and k % count == 0 else f"1/{count}"
        raise ValueError(
            f"jaxmoe.{OP}: {name} has a scale for {group} of K={k}, and quantization_config has "
            f"{' and '.join(said)}"
        )
