"""Decodes with a Mixture-of-Experts language model, and says how many tokens a second.

    python examples/serve.py                         # a toy, anywhere
    python examples/serve.py --preset qwen3-30b-a3b  # its shapes, random weights, on one GPU
    python examples/serve.py --checkpoint DIR --prompt 9707,11  # its weights; prints what follows

The whole loop is one program under `jax.jit`: embedding, attention with a cache of keys and values,
experts, and the choice of the next token. `--format` is that of the experts' weights;
`jax.lax.ragged_dot`, to compare with, has them in bf16 alone. `--layer none` leaves the experts
out, so that what they take can be told from the rest. A checkpoint is a folder of Qwen3-MoE with
config.json and safetensors files; all but its experts have 16 or 32 bits. Tokens are numbers here,
those of its tokenizer.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from decoder import DTYPE, LAYERS, PRESETS, Config, Params, decode, empty_cache, follow, init

import jaxmoe
from jaxmoe import Experts
from jaxmoe.quantize import FORMATS


def load(directory: Path, format: str) -> tuple[Config, Params]:
    """Reads a checkpoint of Qwen3-MoE; plain experts are quantized to another format.

    Raises:
      ValueError: another model, layers without experts, or other weights that are quantized.
    """
    settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") != "qwen3_moe":
        raise ValueError(f"model_type={settings.get('model_type')!r} must be 'qwen3_moe'")
    moe = jaxmoe.load(directory)
    if dense := sorted(set(range(settings["num_hidden_layers"])) - set(moe)):
        raise ValueError(f"layers {dense} have no experts")
    config = Config(
        hidden=settings["hidden_size"],
        layers=settings["num_hidden_layers"],
        heads=settings["num_attention_heads"],
        kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        experts=moe[0].experts.num_experts,
        top_k=settings["num_experts_per_tok"],
        intermediate=settings["moe_intermediate_size"],
        vocabulary=settings["vocab_size"],
        epsilon=settings["rms_norm_eps"],
        theta=settings.get("rope_parameters", settings)["rope_theta"],
        norm_topk_prob=settings["norm_topk_prob"],
    )
    read = tensors(directory)
    embed = read("model.embed_tokens.weight")
    params: Params = {"embed": embed, "norm": read("model.norm.weight"), "layers": []}
    params["head"] = embed if settings["tie_word_embeddings"] else read("lm_head.weight")
    for i in range(config.layers):
        name, layer = f"model.layers.{i}", moe.pop(i)
        attention = {n: read(f"{name}.self_attn.{n}_proj.weight") for n in "qkvo"}
        norms = [read(f"{name}.{n}_layernorm.weight") for n in ("input", "post_attention")]
        head_norms = [read(f"{name}.self_attn.{n}_norm.weight") for n in "qk"]
        params["layers"].append(
            {
                "experts": in_format(layer.experts, format),
                "router": layer.router.astype(jnp.float32),
                "qkv": jnp.concatenate([attention[n] for n in "qkv"]),
                "out": attention["o"],
                "norms": jnp.stack(norms),
                "head_norms": jnp.stack(head_norms),
            }
        )
    return config, params


def in_format(experts: Experts, format: str) -> Experts:
    """Quantizes experts that are bf16, if asked to; others stay as the files have them."""
    weights = {n: getattr(experts, n) for n in ("gate_up", "gate", "up", "down")}
    given = {n: w for n, w in weights.items() if isinstance(w, jax.Array)}
    if format == "bf16" or not given:
        return experts
    names = {n: experts.layouts[n == "down"] for n in given}
    new = {n: jaxmoe.quantize(w, format, weight_layout=names[n]) for n, w in given.items()}
    return dataclasses.replace(experts, **new, layout="nk")


def tensors(directory: Path) -> Callable[[str], jax.Array]:
    """What reads a tensor of a checkpoint by its name, in bf16."""
    from safetensors import safe_open  # noqa: PLC0415 - of checkpoints alone

    index, one = directory / "model.safetensors.index.json", "model.safetensors"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.exists() else {}

    @functools.cache
    def opened(file: str) -> Any:
        return safe_open(directory / file, framework="flax")

    def read(name: str) -> jax.Array:
        file = opened(places.get(name, one))
        if (kind := file.get_slice(name).get_dtype()) not in {"BF16", "F16", "F32"}:
            raise ValueError(f"{name} is {kind}; only experts may be quantized")
        return file.get_tensor(name).astype(DTYPE)

    return read


def continued(params: Params, config: Config, prompt: list[int], steps: int) -> list[int]:
    """What follows a prompt, greedily."""
    cache = empty_cache(config, 1, len(prompt) + steps)
    tokens = jnp.asarray(prompt, jnp.int32)[:, None]
    logits, cache = follow(params, cache, tokens, config, "jaxmoe")
    first, at = jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.int32(len(prompt))
    rest, _ = decode(params, cache, first, at, config, steps, "jaxmoe")
    return [int(first[0]), *(int(token) for token in rest[: steps - 1, 0])]


def tokens_per_second(params: Params, config: Config, batch: int, steps: int, layer: str) -> float:
    """Decodes twice as many tokens as are timed, the first half to compile and warm up."""
    token = jnp.arange(batch, dtype=jnp.int32) % config.vocabulary
    cache = empty_cache(config, batch, 2 * steps)
    tokens, cache = decode(params, cache, token, jnp.int32(0), config, steps, layer)
    # Made before the clock starts, as ops outside of the program are compiled at their first use.
    token, position = jax.block_until_ready((tokens[-1], jnp.int32(steps)))
    jax.block_until_ready(cache)
    start = time.perf_counter()
    tokens, cache = decode(params, cache, token, position, config, steps, layer)
    jax.block_until_ready((tokens, cache))
    return batch * steps / (time.perf_counter() - start)


def positive(text: str) -> int:
    """Reads a number of the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def numbers(text: str) -> list[int]:
    """Reads numbers of the command line, by commas."""
    return [positive(part) for part in text.split(",")]


def tokens_of(text: str) -> list[int]:
    """Reads numbers of tokens of the command line, by commas."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{min(found)} must be at least 0")
    return found


def names(text: str, allowed: Sequence[str]) -> list[str]:
    """Reads names of the command line, by commas."""
    for name in (found := text.split(",")):
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(allowed)}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each format, batch and kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=PRESETS, default="toy")
    model.add_argument("--checkpoint", type=Path, help="folder of a Qwen3-MoE model")
    formats = functools.partial(names, allowed=("bf16", *FORMATS))
    layers = functools.partial(names, allowed=tuple(LAYERS))
    more = "several by commas"
    parser.add_argument("--format", type=formats, default="bf16", help=f"of the experts, {more}")
    parser.add_argument("--batch", type=numbers, default="1,8", help=f"sequences at once, {more}")
    parser.add_argument("--tokens", type=positive, default=64, help="timed of each sequence")
    parser.add_argument("--layer", type=layers, default="jaxmoe,ragged_dot", help=more)
    parser.add_argument("--prompt", type=tokens_of, help="numbers of tokens, by commas")
    args = parser.parse_args(arguments)
    if args.layer == ["ragged_dot"] and "bf16" not in args.format:
        parser.error("--layer ragged_dot has experts in --format bf16 alone")
    name = args.checkpoint or args.preset
    print(f"{name} on {jax.devices()[0].device_kind}, {args.tokens} tokens a sequence")
    for format in args.format:
        if args.checkpoint:
            try:
                config, params = load(args.checkpoint, format)
            except (OSError, ValueError) as error:
                parser.error(f"--checkpoint {args.checkpoint}: {error}")
        else:
            config = PRESETS[args.preset]
            params = init(config, format)
        if args.prompt:
            if max(args.prompt) >= config.vocabulary:
                parser.error(f"--prompt: tokens must be below {config.vocabulary}")
            print(f"{format:12s} continues {continued(params, config, args.prompt, args.tokens)}")
        plain = isinstance(params["layers"][0]["experts"].down, jax.Array)
        for batch in args.batch:
            for layer in args.layer:
                if layer == "ragged_dot" and not plain:
                    continue
                rate = tokens_per_second(params, config, batch, args.tokens, layer)
                each = f"{1e3 * batch / rate:.2f} ms a step"
                print(f"{format:12s} batch {batch:3d}  {layer:10s} {rate:9.1f} tokens/s  {each}")
        del params
    return 0


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())
