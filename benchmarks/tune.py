"""Tunes the layers of the benchmarks, and keeps what wins: `python -m benchmarks.tune --help`.

Without --package it runs `jaxmoe.autotune` on this GPU, layer by layer, prints where the rule's
tiles stand, and writes both and the next best. With --package it reads such files and writes the
tables that `AutotuningResult.packaged` returns: of each layer whose best tiles beat those of the
rule by more than 3 %, both.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from benchmarks.models import MODELS, Layer
from jaxmoe import AutotuningResult, autotuning
from jaxmoe._formats import QUANTIZED
from jaxmoe._gemm.tiles import GemmConfig
from jaxmoe._mlp.configs import rule_configs
from jaxmoe._mlp.tuned import Pair, Problem

_FORMATS = ("bf16", *QUANTIZED)
_CASES = (
    "qwen3-30b-a3b:bf16:1,8,64,256,1024,4096",
    "qwen3-30b-a3b:fp8_block:16,64,256,4096",
    "qwen3-30b-a3b:fp8_tensor:64,4096",
    "qwen3-30b-a3b:int4_g128:8,64,256,1024",
    "gpt-oss-120b:mxfp4:1,16,64,256,1024,4096",
    "gpt-oss-120b:bf16:16,256,1024",
    "mixtral-8x7b:bf16:1,16,64,256,1024,4096",
    "mixtral-8x7b:fp8_block:16,256,4096",
    "mixtral-8x7b:fp8_tensor:64,4096",
    "nemotron-3-nano:bf16:512,4096",
    "deepseek-v2-lite:bf16:512,4096",
)
_WIN = 1.03  # of the rule's time over the best, beyond what two runs differ by
_SHOWN = 6  # of the fastest, in a file


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    args = parse(arguments)
    if args.package:
        for path in package(args.package, args.to):
            print(path)
        return 0
    start = time.monotonic()
    measured: list[dict[str, Any]] = []
    for model, format, num_tokens in args.cases:
        name = f"{model} {format} T={num_tokens}"
        if time.monotonic() - start > args.budget_s:
            print(f"{name}: not run, {args.budget_s} s were over")
            continue
        case = arrays(MODELS[model], format, num_tokens)
        rules = chosen(*case)
        found = jaxmoe.autotune(jaxmoe.moe_mlp, *case)
        for problem, times in found.data:
            print(f"{name}: {described(rules[problem], times)}", flush=True)
            measured.append(kept(name, found, problem, rules[problem]))
        args.json.write_text(json.dumps({"commit": args.commit, "layers": measured}) + "\n")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)

    parser.add_argument("cases", nargs="*", help="MODEL:FORMAT:TOKENS,TOKENS; 40 by default")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--commit", help="commit measured")
    parser.add_argument("--json", type=Path, default=Path("tuned.json"))
    parser.add_argument("--package", type=Path, nargs="+", help="results to make tables of")
    parser.add_argument("--to", type=Path, default=autotuning.TABLES, help="folder of the tables")
    args = parser.parse_args(arguments)
    try:
        args.cases = [case for text in args.cases or _CASES for case in _cases(text)]
    except ValueError as error:
        parser.error(str(error))
    return args


def _cases(text: str) -> Iterator[tuple[str, str, int]]:
    model, format, tokens = text.split(":")
    for name, value, allowed in (("model", model, MODELS), ("format", format, _FORMATS)):
        if value not in allowed:
            raise ValueError(f"{name} {value}: choose from {', '.join(allowed)}")
    for num_tokens in tokens.split(","):
        yield model, format, int(num_tokens)


def arrays(
    model: Layer, format: str, num_tokens: int
) -> tuple[jax.ShapeDtypeStruct, jaxmoe.Routing, jaxmoe.Experts]:
    """Returns shapes of tokens, routing and experts in checkpoint order."""
    e, h = model.num_experts, model.hidden

    def made() -> jaxmoe.Experts:
        weights: dict[str, Any] = {
            "gate_up": jnp.zeros((e, model.width, h), jnp.bfloat16),
            "down": jnp.zeros((e, h, model.intermediate), jnp.bfloat16),
        }
        if format != "bf16":
            weights = {
                name: jaxmoe.quantize(w, format, weight_layout="nk") for name, w in weights.items()
            }
        if model.bias:
            weights["gate_up_bias"] = jnp.zeros((e, model.width), jnp.bfloat16)
            weights["down_bias"] = jnp.zeros((e, h), jnp.bfloat16)
        options = {"activation": model.activation, "order": model.gate_up}
        return jaxmoe.Experts(**weights, layout="nk", **options)

    choice = (num_tokens, model.top_k)
    routing = jaxmoe.Routing(
        jax.ShapeDtypeStruct(choice, jnp.int32), jax.ShapeDtypeStruct(choice, jnp.float32), e
    )
    return jax.ShapeDtypeStruct((num_tokens, h), jnp.bfloat16), routing, jax.eval_shape(made)


def chosen(*case: Any) -> dict[Any, Pair]:
    """Returns the rule's tiles of each problem."""
    found = autotuning.problems(jaxmoe.moe_mlp, *case)
    return {problem: rule_configs(a, layer) for problem, (a, layer) in found.items()}


def described(rule: Pair, times: Iterable[tuple[Pair, float]]) -> str:
    """Says where the rule's tiles stand among the measured ones."""
    times = list(times)
    (best, us), its = times[0], dict(times)[rule]
    others = "; ".join(f"{pair_name(pair)} {t:.1f}" for pair, t in times[1:4])
    return (
        f"rule {pair_name(rule)} {its:.1f} us, best {pair_name(best)} {us:.1f}, "
        f"{its / us:.3f}; then {others}"
    )


def pair_name(pair: Pair) -> str:
    """Names the tiles of both products, as in "256x128 gather + 128x192 raster=8"."""
    return " + ".join(map(_name, pair))


def _name(config: GemmConfig) -> str:
    words = [f"{config.weight_tile}x{config.token_tile}"]
    for field in dataclasses.fields(config)[2:]:
        value = getattr(config, field.name)
        if value != field.default:
            words.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(words)


def kept(name: str, found: AutotuningResult, problem: Problem, rule: Pair) -> dict[str, Any]:
    """Returns what a file has of a layer: the rule's tiles with their time, and the fastest."""
    times = dict(found.data)[problem]
    shown = [item for i, item in enumerate(times) if i < _SHOWN or item[0] == rule]
    result = dataclasses.replace(found, data=((problem, tuple(shown)),))
    at = [pair for pair, _ in shown].index(rule)
    return {"layer": name, "rule": at, "result": json.loads(result.dumps())}


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A measured layer: the fastest tiles and those of the rule, each with microseconds."""

    name: str
    device_kind: str
    problem: Problem
    best: tuple[Pair, float]
    rule: tuple[Pair, float]

    @property
    def wins(self) -> bool:
        """Whether tuning pays, beyond what two runs differ by."""
        return self.rule[1] > _WIN * self.best[1]


def read(files: Iterable[Path]) -> list[Tuned]:
    """Returns the layers of files, in order; where two measured the same, the later file counts."""
    found: dict[Any, Tuned] = {}
    for path in files:
        for layer in json.loads(path.read_text(encoding="utf-8"))["layers"]:
            result = AutotuningResult.loads(json.dumps(layer["result"]))
            ((problem, times),) = result.data
            kind = result.device_kind
            one = Tuned(layer["layer"], kind, problem, times[0], times[layer["rule"]])
            found[kind, problem] = one
    return list(found.values())


def package(files: Iterable[Path], folder: Path) -> Iterator[Path]:
    """Writes a table for each kind of device; yields their paths."""
    layers = read(files)
    folder.mkdir(exist_ok=True)
    for kind in dict.fromkeys(layer.device_kind for layer in layers):
        data = ((x.problem, (x.best, x.rule)) for x in layers if x.wins and x.device_kind == kind)
        path = folder / autotuning.table_name(kind)
        path.write_text(AutotuningResult(kind, tuple(data)).dumps() + "\n", encoding="utf-8")
        yield path


if __name__ == "__main__":
    sys.exit(main())
