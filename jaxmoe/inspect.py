"""`python -m jaxmoe.inspect DIR`: the layers of experts of a model's files, and their kernels."""

import argparse
import functools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxmoe._explain import explain
from jaxmoe._jax import targets
from jaxmoe._load.ahead import Ahead
from jaxmoe._load.stored import Stored
from jaxmoe.experts import Experts
from jaxmoe.loading import Block, Model
from jaxmoe.mlp import moe_mlp
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing


def _shapes(model: Model, block: Block) -> Experts:
    """The experts of a module as shapes: the smallest number of them is read."""
    grown = lambda a: jax.ShapeDtypeStruct((model.num_experts, *a.shape[1:]), a.dtype)  # noqa: E731
    with Ahead(model.shards) as files:
        read = [weight.read(files, range(1)) for weight in block.weights]
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)  # noqa: E731
    return model.layer(block, jax.tree.map(grown, read), shape).experts


def _formats(experts: Experts) -> str:
    """The formats of the weights, or their dtypes, each once."""
    weights = (experts.gate_up, experts.gate, experts.up, experts.down)
    names = (
        w.format if isinstance(w, QuantizedArray) else str(w.dtype)
        for w in weights
        if w is not None
    )
    return ", ".join(dict.fromkeys(names))


def _kind(model: Model, weight: Stored) -> tuple[object, ...]:
    """What layers of one report have in common."""
    return weight.kind, *map(model.shards.kind, weight.names(range(1)))


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers of layers in rising order, neighbours as a range."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    runs = [
        f"{first}" if first == last else f"{first} to {last}"
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"


def _size(nbytes: int) -> str:
    power = max((i for i in range(4) if nbytes >= 1000**i), default=0)
    return f"{nbytes / 1000**power:.4g} {('bytes', 'kB', 'MB', 'GB')[power]}"


def describe(
    directory: str, tokens: int, tower: str | None = None, token_format: str | None = None
) -> str:
    """A line for each layer, and what its products of so many tokens run as on CUDA."""
    if tokens < 1:
        raise ValueError(f"jaxmoe.inspect: --tokens={tokens} must be at least 1")
    model = Model(directory, "bfloat16", tower, token_format)
    first = model.family.at_layer(model.config, min(model.blocks))
    lines = [
        f"{model.config.get('model_type')}: {len(model.blocks)} layers with experts, "
        f"{model.num_experts} experts, {model.family.routing(first)}"
    ]
    seen: dict[object, tuple[str, str, list[int]]] = {}
    total = 0
    for number in model.blocks:
        block = model.block(number)
        nbytes = sum(w.nbytes(model.shards, range(model.num_experts)) for w in block.weights)
        total += nbytes
        key = tuple(map(functools.partial(_kind, model), block.weights)), block.activation
        if key not in seen:
            experts = _shapes(model, block)
            first = experts.first
            dtype = jnp.bfloat16 if isinstance(first, QuantizedArray) else first.dtype
            x = jax.ShapeDtypeStruct((tokens, experts.hidden), dtype)
            k = block.options["top_k"]
            routing = Routing(
                jax.ShapeDtypeStruct((tokens, k), jnp.int32),  # type: ignore[arg-type]
                jax.ShapeDtypeStruct((tokens, k), jnp.float32),  # type: ignore[arg-type]
            )
            with targets.force_cuda_lowering():
                found = explain(moe_mlp, x, routing, experts, **dict(model.family.call))
            found = f"{experts.hidden} x {experts.intermediate}, {tokens} tokens:\n{found}"
            seen[key] = _formats(experts), found, []
        seen[key][2].append(number)
        lines.append(f"layer {number}: {seen[key][0]}, {_size(nbytes)}")
    lines.append(f"experts: {_size(total)}")
    for formats, found, numbers in seen.values():
        lines.append(f"{_numbers(numbers)}: {formats}, {found}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.inspect", description=__doc__)
    parser.add_argument("directory", help="with config.json and safetensors files")
    parser.add_argument("--tokens", type=int, default=16, help="of a call whose kernels are named")
    parser.add_argument("--tower", help="which layers of a model with several stacks of them")
    parser.add_argument("--token-format", help="how layers round tokens beside packed weights")
    options = parser.parse_args(argv)
    try:
        given = options.directory, options.tokens, options.tower, options.token_format
        print(describe(*given))
    except (LookupError, OSError, TypeError, ValueError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
