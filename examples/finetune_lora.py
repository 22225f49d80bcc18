"""Trains adapters on the experts of a language model that stays as it is, frozen in any format.

    pip install ".[examples]"  # optax and orbax-checkpoint
    python examples/finetune_lora.py --format mxfp4 --out /tmp/lora

The model is that of train_lm.py, trained first into OUT/base, or found there. Its experts are then
quantized and everything is frozen. Each task, a package of Python's library, gets an adapter of
rank r on both weights of every expert; all are trained at once, each on its own sequences of a
batch. They are written to OUT/adapters.npz, read again, and serve: a table of losses without
adapter and with each, and texts that are continued with several adapters in one batch.
"""

import argparse
import dataclasses
import functools
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import train_lm as lm

import jaxmoe
from jaxmoe import Experts, lora

FROZEN = -1  # the adapter of tokens that have none
PROMPT, MORE = 32, 64  # bytes of a text that is continued, and of what follows


def read_package(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns bytes of a package of Python's library to train on, and every fifth file to test."""
    root = Path(sysconfig.get_paths()["stdlib"]) / name
    parts: tuple[list[bytes], list[bytes]] = [], []
    for number, path in enumerate(sorted(root.rglob("*.py"))):
        parts[number % 5 == 4].append(path.read_bytes())
    if not parts[1]:
        raise SystemExit(f"{root} must have at least five files")
    train, test = (np.frombuffer(b"".join(p), np.uint8) for p in parts)
    return train, test


def trained(config: lm.Config, args: argparse.Namespace) -> lm.Params:
    """Returns the parameters of the base, which is trained first if it is not there yet."""
    out = args.out / "base"
    lm.run(config, 0, out, args.every, args.save_every)
    with ocp.CheckpointManager((out / "checkpoints").absolute()) as manager:
        _, (params, _) = lm.restore(manager, config, 0)
    return params


@functools.partial(jax.jit, static_argnames="format")
def freeze(params: lm.Params, format: str) -> lm.Params:
    """Returns the model with its experts in bf16 or in a quantized format."""
    layers = dict(params["layers"])
    weights = [layers.pop(name).astype(jnp.bfloat16) for name in ("gate_up", "down")]
    if format != "bf16":
        quantize = functools.partial(jaxmoe.quantize, format=format, weight_layout="kn")
        weights = [jax.vmap(quantize)(w) for w in weights]
    layers["experts"] = Experts(gate_up=weights[0], down=weights[1])
    return params | {"layers": layers}


def new_adapters(model: lm.Params, rank: int, count: int, seed: int) -> lora.Adapters:
    """Draws `count` adapters for every layer, which change nothing yet: [L, count, E, ..]."""
    stacked = model["layers"]["experts"]
    layers = stacked.down.shape[0]
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
    draw = functools.partial(lora.init, experts=one, rank=rank, num_adapters=count, scale=2.0)
    keys: Any = jax.random.split(jax.random.key(seed), layers)
    return jax.vmap(draw)(keys)


def predict(
    model: lm.Params, adapters: lora.Adapters, text: jax.Array, ids: jax.Array, config: lm.Config
) -> jax.Array:
    """Returns logits of the byte after each of text [B, S]; ids [B], the adapter of each text."""
    of_token = jnp.broadcast_to(ids[:, None], text.shape)

    def layer(x: jax.Array, wa: Any) -> tuple[jax.Array, None]:
        w, adapters = wa
        x = lm.attention(x, w, config.heads)
        tokens = lm.norm(x, w["norm_experts"])
        routing = jaxmoe.route(tokens.astype(jnp.float32) @ w["router"], top_k=config.top_k)
        options = {"adapter_ids": of_token, "residual": x}
        return lora.moe_mlp(tokens, routing, w["experts"], adapters, **options), None

    x = (model["embed"][text] * config.hidden**0.5).astype(jnp.bfloat16)
    x, _ = jax.lax.scan(layer, x, (model["layers"], adapters))
    return lm.norm(x, model["norm"]).astype(jnp.float32) @ model["embed"].T


def losses(
    model: lm.Params, adapters: lora.Adapters, text: jax.Array, ids: jax.Array, config: lm.Config
) -> jax.Array:
    """Returns nats a byte of each text [B, S + 1]."""
    logits = predict(model, adapters, text[:, :-1], ids, config)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
    return -chosen.mean(axis=(1, 2))


@functools.partial(jax.jit, static_argnames=("config", "rate"), donate_argnums=0)
def train_step(
    state: Any, model: lm.Params, text: jax.Array, ids: jax.Array, config: lm.Config, rate: float
) -> tuple[Any, jax.Array]:
    """Returns adapters and moments after a step of Adam, and the losses before it.

    A text adds nothing to the gradients of other adapters than its own.
    """

    def loss(adapters: lora.Adapters) -> tuple[jax.Array, jax.Array]:
        nats = losses(model, adapters, text, ids, config)
        return nats.mean(), nats

    adapters, moments = state
    grads, nats = jax.grad(loss, has_aux=True)(adapters)
    updates, moments = optax.adam(rate).update(grads, moments, adapters)
    return (optax.apply_updates(adapters, updates), moments), nats


evaluate = jax.jit(losses, static_argnames="config")


def batch(texts: list[np.ndarray], config: lm.Config, step: int) -> jax.Array:
    """Draws sequences of every task, [tasks * batch, length + 1]."""
    return jnp.concatenate([lm.sample(text, config, 1, step) for text in texts])


def tune(
    model: lm.Params, texts: list[np.ndarray], config: lm.Config, args: argparse.Namespace
) -> lora.Adapters:
    """Trains an adapter for each text; prints the mean loss of each since the last report."""
    ids = jnp.repeat(jnp.arange(len(texts), dtype=jnp.int32), config.batch)
    adapters: Any = new_adapters(model, args.rank, len(texts), seed=0)
    state = adapters, optax.adam(args.rate).init(adapters)
    recent: list[jax.Array] = []
    for step in range(1, args.tune_steps + 1):
        state, nats = train_step(state, model, batch(texts, config, step), ids, config, args.rate)
        recent.append(nats)
        if step % args.every == 0 or step == args.tune_steps:
            mean = np.mean(recent, axis=0).reshape(len(texts), -1).mean(axis=1)
            shown = "  ".join(
                f"{name} {nats:.3f}" for name, nats in zip(args.tasks, mean, strict=True)
            )
            print(f"step {step}/{args.tune_steps}  {shown}", flush=True)
            recent = []
    return state[0]


def save(path: Path, adapters: lora.Adapters) -> None:
    """Writes adapters to a file."""
    np.savez(path, **{f.name: getattr(adapters, f.name) for f in dataclasses.fields(adapters)})


def load(path: Path) -> lora.Adapters:
    """Reads what `save` wrote."""
    with np.load(path) as file:
        arrays = {name: jnp.asarray(a) for name, a in file.items() if name != "scale"}
        return lora.Adapters(**arrays, scale=float(file["scale"]))


def compare(
    model: lm.Params, adapters: lora.Adapters, texts: list[np.ndarray], config: lm.Config
) -> np.ndarray:
    """Returns nats a byte of each text without adapter, then with each of them: [tasks, 1 + S]."""
    columns = []
    for chosen in range(FROZEN, len(texts)):
        ids = jnp.full(len(texts) * config.batch, chosen, jnp.int32)
        parts = [
            evaluate(model, adapters, batch(texts, config, i), ids, config)
            for i in range(lm.HELD_OUT)
        ]
        columns.append(np.mean(parts, axis=0).reshape(len(texts), -1).mean(axis=1))
    return np.stack(columns, axis=1)


@functools.partial(jax.jit, static_argnames=("config", "count"))
def complete(
    model: lm.Params,
    adapters: lora.Adapters,
    prompts: jax.Array,
    ids: jax.Array,
    config: lm.Config,
    count: int,
) -> jax.Array:
    """Continues prompts [B, P] greedily by `count` bytes, each with its adapter ids[b].

    It reads all of the text at every step; serve.py has a cache.
    """
    start = prompts.shape[1]

    def one(at: jax.Array, text: jax.Array) -> jax.Array:
        logits = jax.lax.dynamic_index_in_dim(
            predict(model, adapters, text, ids, config), at - 1, axis=1, keepdims=False
        )
        return text.at[:, at].set(jnp.argmax(logits, axis=-1).astype(text.dtype))

    text = jnp.pad(prompts, ((0, 0), (0, count)))
    return jax.lax.fori_loop(start, start + count, one, text)[:, start:]


def serve(
    model: lm.Params, adapters: lora.Adapters, texts: list[np.ndarray], config: lm.Config
) -> list[tuple[int, int, bytes]]:
    """Continues each text without adapter and with each of them, in one batch.

    Returns task, adapter and what follows.
    """
    cases = [(task, one) for task in range(len(texts)) for one in range(FROZEN, len(texts))]
    prompts = jnp.asarray(np.stack([texts[task][:PROMPT] for task, _ in cases]), jnp.int32)
    ids = jnp.array([one for _, one in cases], jnp.int32)
    after = np.asarray(complete(model, adapters, prompts, ids, config, MORE), np.uint8)
    return [(*case, bytes(text)) for case, text in zip(cases, after, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Trains and serves; returns 1 if a task is no better with its adapter than without."""
    options = lm.parser(__doc__)
    options.add_argument("--format", default="mxfp4", help="of the frozen experts, or bf16 (mxfp4)")
    options.add_argument("--tasks", nargs="+", default=["encodings", "asyncio"], help="packages")
    options.add_argument("--rank", type=lm.positive, default=8, help="of the adapters (8)")
    options.add_argument(
        "--tune-steps", type=lm.positive, default=200, help="of the adapters (200)"
    )
    options.add_argument("--rate", type=float, default=3e-3, help="of Adam (0.003)")
    args = options.parse_args(arguments)
    config = lm.chosen(args, "jaxmoe")
    texts = [read_package(name) for name in args.tasks]
    model = freeze(trained(config, args), args.format)
    experts = model["layers"]["experts"]
    held = sum(a.nbytes for a in jax.tree.leaves(experts))
    adapters = tune(model, [train for train, _ in texts], config, args)
    count = sum(a.size for a in jax.tree.leaves(adapters)) / len(texts)
    print(
        f"experts in {args.format}: {held / 1e6:.2f} MB, frozen; an adapter of rank {args.rank}: "
        f"{count / 1e6:.3f} M parameters"
    )
    save(args.out / "adapters.npz", adapters)
    adapters, held_out = load(args.out / "adapters.npz"), [test for _, test in texts]
    nats = compare(model, adapters, held_out, config)
    print(f"{'held out, nats a byte':24s}" + "".join(f"{n:>12s}" for n in ("frozen", *args.tasks)))
    for name, row in zip(args.tasks, nats, strict=True):
        print(f"{name:24s}" + "".join(f"{value:12.4f}" for value in row))
    for task, one, text in serve(model, adapters, held_out, config):
        adapter = "frozen" if one == FROZEN else args.tasks[one]
        print(f"{args.tasks[task]} by {adapter}: {text.decode('latin-1')!r}")
    own = nats[np.arange(len(texts)), 1 + np.arange(len(texts))]
    return int(not (own < nats[:, 0]).all())


if __name__ == "__main__":
    sys.exit(main())
