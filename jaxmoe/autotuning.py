"""Measures the tiles of a program's layers on this device, and keeps what was measured.

Names and use are those of `tokamax.autotune`. The rule of `jaxmoe` needs no tuning to be fast; this
is for shapes or cards of one's own, and for the last percents.
"""

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

import jax

from jaxmoe import __version__
from jaxmoe._gemm.tiles import CODED, MAX_GATHER, PACKED, TILES, GemmConfig, odd_blocks
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import targets as _targets
from jaxmoe._mlp import checks, tuned
from jaxmoe._mlp.configs import rule_configs
from jaxmoe._mlp.operands import Layer, Operands
from jaxmoe._mlp.timer import Timer
from jaxmoe._mlp.tuned import Pair, Problem

_OP = "autotune"
_RESULT = "AutotuningResult"
_RASTERS = (0, 1, 8)
_FINALISTS = 4
TABLES = Path(__file__).parent / "_mlp" / "tables"  # a file for each kind of device


@dataclasses.dataclass(frozen=True)
class AutotuningResult:
    """Measured tiles of layers, for one kind of device.

    Within `with result:` layers whose problem was measured, and whose caller gives no `config`, get
    the fastest tiles; all others get those of the rule. Functions are traced again where the
    results around them are others. Contexts may be nested: the innermost is asked first.

    Attributes:
      device_kind: as JAX names it, such as "NVIDIA H200".
      data: a pair for each problem: what was asked, and (tiles of both products, microseconds) of
        all that was measured, the fastest first.
      jaxmoe_version: that measured.
    """

    device_kind: str
    data: tuple[tuple[Problem, tuple[tuple[Pair, float], ...]], ...]
    jaxmoe_version: str = __version__

    def dump(self, fp: TextIO) -> None:
        """Writes the result as JSON to `fp`, a text file that is open for writing."""
        fp.write(self.dumps())

    def dumps(self) -> str:
        """The result as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def load(cls, fp: TextIO) -> Self:
        """Reads what `dump` wrote from `fp`, a text file that is open.

        Raises:
          ValueError: the text is no such result.
        """
        return cls.loads(fp.read())

    @classmethod
    def loads(cls, text: str) -> Self:
        """Reads what `dumps` gave.

        Raises:
          ValueError: the text is no such result.
        """
        try:
            read = json.loads(text)
            data = tuple((_problem(p), tuple(map(_timed, times))) for p, times in read["data"])
            for name in ("device_kind", "jaxmoe_version"):
                if not isinstance(read[name], str):
                    raise ValueError(f"{name} must be a string, not {read[name]!r}")
            return cls(read["device_kind"], data, read["jaxmoe_version"])
        except (KeyError, TypeError, ValueError) as error:
            rule = f"the text must be what dumps() gives: {error}"
            raise ValueError(_checks.message(_RESULT, rule)) from error

    @classmethod
    def packaged(cls, device_kind: str | None = None) -> Self:
        """What tuning won by more than 3 % for layers of published models, measured beforehand.

        The rule's own tiles beside it may be older than the rule.

        Nothing uses it unasked: `with AutotuningResult.packaged(): ...` does.

        Args:
          device_kind: as JAX names it, "NVIDIA H200"; by default that of this process's first GPU.

        Returns:
          A result; without data where nothing was measured, or nothing won.

        Raises:
          TypeError: `device_kind` is no string.
          ValueError: there is no GPU and no `device_kind`.
        """
        what = "a string, such as 'NVIDIA H200'"
        _checks.check_type(_RESULT, "device_kind", device_kind, str | None, what)
        kind = device_kind or _device_kind()
        if kind is None:
            rule = "packaged() needs device_kind, such as 'NVIDIA H200', where there is no GPU"
            raise ValueError(_checks.message(_RESULT, rule))
        table = TABLES / table_name(kind)
        return cls.loads(table.read_text()) if table.is_file() else cls(kind, ())

    def __or__(self, other: "AutotuningResult") -> "AutotuningResult":
        """Both results; what both have measured is taken from `other`.

        Raises:
          TypeError: `other` is no such result.
          ValueError: they are of two kinds of devices.
        """
        _checks.check_type(_RESULT, "what is merged", other, AutotuningResult, "such a result")
        if self.device_kind != other.device_kind:
            rule = (
                f"results of one kind of device can be merged, not of {self.device_kind!r} and "
                f"{other.device_kind!r}"
            )
            raise ValueError(_checks.message(_RESULT, rule))
        return dataclasses.replace(other, data=tuple((dict(self.data) | dict(other.data)).items()))

    def best(self, problem: Problem) -> Pair | None:
        """The fastest tiles of a problem, None if it was not measured."""
        return self._best.get(problem)

    def find(self, problem: Problem, a: Operands, layer: Layer) -> Pair | None:
        """What a layer within the context asks."""
        del a, layer
        return self.best(problem)

    def __hash__(self) -> int:
        """By value, computed once: JAX looks a context up by it."""
        return self._hash

    def __enter__(self) -> Self:
        """Opens the context.

        Raises:
          ValueError: the GPUs here are of another kind.
        """
        here = _device_kind()
        if here not in (None, self.device_kind):
            rule = (
                f"device_kind={self.device_kind!r} must be {here!r}, that of the GPUs here; "
                "dataclasses.replace(result, device_kind=...) uses it all the same"
            )
            raise ValueError(_checks.message(_RESULT, rule))
        context = tuned.within(self)
        context.__enter__()
        self._entered.__dict__.setdefault("contexts", []).append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        """Closes the context that this thread opened last."""
        self._entered.contexts.pop().__exit__(*error)

    @functools.cached_property
    def _best(self) -> dict[Problem, Pair]:
        return {problem: times[0][0] for problem, times in self.data if times}

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.device_kind, self.data, self.jaxmoe_version))

    @functools.cached_property
    def _entered(self) -> threading.local:
        return threading.local()


def table_name(device_kind: str) -> str:
    """The name of the file that has what was measured on this kind of device."""
    return "_".join(device_kind.lower().split()) + ".json"


def autotune(fn: Callable[..., Any], *args: Any) -> AutotuningResult:
    """Measures the tiles that the layers of a function may have, on this process's first GPU.

    Every `jaxmoe.moe_mlp` and `jaxmoe.expert_rows` whose value is one CUDA call is measured with
    random weights and tokens of its sizes, and with tokens routed uniformly: the tiles of the
    gate-up product first, those of the down product beside the fastest, then the order of tiles and
    one kernel for both. The choice of the rule is always among them. Times are medians of batches
    in turn, so a difference of 1 % may be noise. Layers that are given a `config` or
    `batch_invariant=True` are left alone, and so are products of a derivative.

    Args:
      fn: a function of arrays that JAX can trace. It is compiled, not run.
      *args: its arguments; `jax.ShapeDtypeStruct` will do for arrays.

    Returns:
      `AutotuningResult`: `with result: ...` uses it, `result.dumps()` keeps it.

    Raises:
      RuntimeError: there is no GPU that runs the kernels, with the reason.
      ValueError: no such layer is in `fn`.

    Numerics: other tiles may add up in another order: the last bits of results may differ from
      those of the rule, and repeat as those do.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> def step(x, logits, experts):
      ...     return jaxmoe.moe_mlp(x, jaxmoe.route(logits, top_k=2), experts)
      >>> def tuned(*args):
      ...     result = jaxmoe.autotune(step, *args)
      ...     with result:
      ...         return jax.jit(step)(*args)
    """
    reason = _targets.why_not() or (None if _gpus() else "JAX has no GPU in this process")
    if reason is not None:
        raise RuntimeError(f"jaxmoe.{_OP}: nothing can be measured here: {reason}")
    return tune(problems(fn, *args), Timer)


def problems(fn: Callable[..., Any], *args: Any) -> dict[Problem, tuple[Operands, Layer]]:
    """The layers of a function that CUDA runs, each with what it is called with."""
    found = _Asked()
    with tuned.within(found):
        lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
        if not found.calls and _gpus():  # programs for several devices ask while they are compiled
            lowered.compile()
    if not found.calls:
        rule = "fn must have a jaxmoe.moe_mlp or jaxmoe.expert_rows that is a CUDA call of its own"
        raise ValueError(_checks.message(_OP, f"{rule}; jaxmoe.explain says what each is"))
    return found.calls


def tune(
    calls: Mapping[Problem, tuple[Operands, Layer]], timer: Callable[[Operands, Layer], Any]
) -> AutotuningResult:
    """Measures each problem by `timer(operands, layer)`, of tiles -> microseconds of each."""
    data: list[Any] = []
    for problem, (a, layer) in calls.items():
        measure = timer(a, layer)
        times: dict[Pair, float] = {}
        rule = rule_configs(a, layer)
        for stage in (_first_tiles, _second_tiles, _orders, _one_kernel):
            best = min(times, key=times.__getitem__) if times else rule
            wanted = {best, rule, *_legal(a, layer, stage(layer, best))}
            if wanted - times.keys():
                times |= measure(sorted(wanted, key=str))
        finalists = {rule, *sorted(times, key=times.__getitem__)[:_FINALISTS]}
        times |= measure(sorted(finalists, key=str))  # side by side
        data.append((problem, tuple(sorted(times.items(), key=lambda item: item[1]))))
    return AutotuningResult(_device_kind() or "", tuple(data))


class _Asked:
    """Notes what layers ask for; they get the choice of the rule."""

    def __init__(self) -> None:
        self.calls: dict[Problem, tuple[Operands, Layer]] = {}

    def find(self, problem: Problem, a: Operands, layer: Layer) -> None:
        """Notes the call."""
        there = (None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in a)
        self.calls.setdefault(problem, (Operands(*there), layer))


def _tiles(layer: Layer) -> Iterable[tuple[int, int, int, int]]:
    return PACKED | CODED if layer.format.packed else TILES


def _first_tiles(layer: Layer, best: Pair) -> Iterator[Pair]:
    for tile in _tiles(layer):
        for gather in (False, True):
            yield GemmConfig(*tile, raster=best[0].raster, gather=gather), best[1]


def _second_tiles(layer: Layer, best: Pair) -> Iterator[Pair]:
    for tile in _tiles(layer):
        yield best[0], GemmConfig(*tile, raster=best[1].raster)


def _orders(layer: Layer, best: Pair) -> Iterator[Pair]:
    del layer
    for raster in _RASTERS:
        first, second = (dataclasses.replace(config, raster=raster) for config in best)
        yield first, second


def _one_kernel(layer: Layer, best: Pair) -> Iterator[Pair]:
    for tile in _tiles(layer):
        for gather in {best[0].gather, tile[1] <= MAX_GATHER and not layer.format.packed}:
            yield GemmConfig(*tile, gather=gather, one_kernel=True), GemmConfig(*tile)


def _legal(a: Operands, layer: Layer, pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Those that a caller may ask for."""
    size = layer.intermediate(a.w_down)
    coded = layer.multiplies_codes(a.absent)
    odd = odd_blocks(layer.format.block > 1, layer.activation.gated, layer.gate_up, size)
    sizes = a.x.shape[1], size, layer.promoted, odd, layer.format.packed
    for pair in pairs:
        try:
            checks.check_configs(_OP, pair, *sizes, coded)
            checks.check_one_kernel(_OP, layer.replace(config=pair), size, a.h_scale is not None)
        except ValueError:
            continue
        yield pair


def _gpus() -> list[Any]:
    return [d for d in jax.local_devices() if d.platform == "gpu"]


def _device_kind() -> str | None:
    gpus = _gpus()
    return gpus[0].device_kind if gpus else None


def _problem(read: Any) -> Problem:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Problem):
        known = field.name in read or field.default is dataclasses.MISSING
        value = fields[field.name] = read[field.name] if known else field.default
        if field.type in (str, int, bool) and type(value) is not field.type:
            raise ValueError(f"{field.name}={value!r} must be of type {field.type.__name__}")
    promoted = fields["promoted"]
    fields["layouts"] = tuple(fields["layouts"])
    fields["promoted"] = None if promoted is None else tuple(promoted)
    return Problem(**fields)


def _timed(read: Any) -> tuple[Pair, float]:
    (first, second), us = read
    return (GemmConfig(**first), GemmConfig(**second)), float(us)
