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


def _decoded(block: Block, experts: Experts) -> str:
    """What weights become that are not read as they are stored, "" if all are."""
    if not any(weight.decoded for weight in block.weights):
        return ""
    weights = [
        w for w in (experts.gate_up, experts.gate, experts.up, experts.down) if w is not None
    ]
    nbytes = sum(w.size * w.dtype.itemsize for w in weights)
    return f"; sorted columns (g_idx), decoded to {_size(nbytes)}"


def _kind(model: Model, weight: Stored) -> tuple[object, ...]:
    """What layers of one report have in common."""
    return weight.kind, *map(model.shards.kind, weight.names(range(1)))


def _by_layer(
    options: dict[int, dict[str, object]],
) -> tuple[dict[str, object], dict[int, dict[str, object]]]:
    """What all layers have, and what each has besides, None where others have something."""
    names = dict.fromkeys(name for own in options.values() for name in own)
    first = next(iter(options.values()))
    same = [n for n in names if all(n in o and o[n] == first.get(n) for o in options.values())]
    apart = {
        number: {name: own.get(name) for name in names if name not in same}
        for number, own in options.items()
    }
    return {name: first[name] for name in same}, apart


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
    blocks = {number: model.block(number) for number in model.blocks}
    common, apart = _by_layer(
        {n: {**block.options, "activation": block.activation} for n, block in blocks.items()}
    )
    lines = [
        f"{model.config.get('model_type')}: {len(model.blocks)} layers with experts, "
        f"{model.num_experts} experts, {common}"
    ]
    seen: dict[object, tuple[str, str, str, list[int]]] = {}
    total = 0
    for number, block in blocks.items():
        nbytes = sum(w.nbytes(model.shards, range(model.num_experts)) for w in block.weights)
        total += nbytes
        k = block.options["top_k"]
        key = tuple(map(functools.partial(_kind, model), block.weights)), block.activation, k
        if key not in seen:
            experts = _shapes(model, block)
            first = experts.first
            dtype = jnp.bfloat16 if isinstance(first, QuantizedArray) else first.dtype
            x = jax.ShapeDtypeStruct((tokens, experts.hidden), dtype)
            routing = Routing(
                jax.ShapeDtypeStruct((tokens, k), jnp.int32),  # type: ignore[arg-type]
                jax.ShapeDtypeStruct((tokens, k), jnp.float32),  # type: ignore[arg-type]
            )
            with targets.force_cuda_lowering():
                found = explain(moe_mlp, x, routing, experts, **dict(model.family.call))
            found = f"{experts.hidden} x {experts.intermediate}, {tokens} tokens:\n{found}"
            seen[key] = _formats(experts), found, _decoded(block, experts), []
        formats, _, decoded, numbers = seen[key]
        numbers.append(number)
        own = "".join(f", {name}={value!r}" for name, value in apart[number].items())
        lines.append(f"layer {number}: {formats}, {_size(nbytes)}{decoded}{own}")
    lines.append(f"experts: {_size(total)}")
    for formats, found, _, numbers in seen.values():
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
