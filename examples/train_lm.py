"""Trains a Mixture-of-Experts language model on bytes: Python's own library as the text.

    pip install ".[examples]"  # optax and orbax-checkpoint
    python examples/train_lm.py --out /tmp/lm

On a CPU it trains a toy in about a minute, on a GPU a model of 0.4 billion parameters. OUT gets
checkpoints, the losses (loss.csv) and a plot (loss.svg). The same command goes on where it was
interrupted, and does every step as if it had not been. `--experts dense` trains the same model with
every expert multiplying every token, to compare; `compare_experts.py` does so for several seeds.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxmoe
from jaxmoe import Routing

VOCABULARY = 256  # bytes
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """A model, and how it is trained."""

    hidden: int
    layers: int
    heads: int
    experts: int
    top_k: int
    intermediate: int
    length: int  # bytes of a sequence
    batch: int
    steps: int
    rate: float
    megabytes: int  # of text
    dtype: str
    balance: float = 1e-2  # coefficient of the load balancing loss
    kind: str = "jaxmoe"  # of the expert layer, see EXPERTS


TOY = Config(64, 2, 4, 8, 2, 64, 64, 16, 300, 4e-3, 4, "float32")
SMALL = Config(768, 12, 12, 32, 4, 384, 512, 32, 4000, 6e-4, 64, "bfloat16")
WARM_UP, DECAY, CLIP, BETAS = 50, 0.1, 1.0, (0.9, 0.95)
HELD_OUT = 8  # batches
# Dense bf16 products per second, from the data sheets; for MFU.
PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}


def read_text(megabytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns bytes of Python's library to train on, and every twentieth file to test on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    own = (p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts)
    parts: tuple[list[bytes], list[bytes]] = [], []
    size = 0
    for number, path in enumerate(own):
        text = path.read_bytes()
        parts[number % 20 == 19].append(text)
        size += len(text)
        if size > megabytes * 2**20:
            break
    train, test = (np.frombuffer(b"".join(p), np.uint8) for p in parts)
    return train, test


def unigram_entropy(text: np.ndarray) -> float:
    """Nats a byte of a model that knows only how frequent each byte is."""
    p = np.bincount(text, minlength=VOCABULARY) / text.size
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def sample(text: np.ndarray, config: Config, seed: int, step: int) -> jax.Array:
    """Draws [batch, length + 1] bytes; the same for the same step, so that runs can be resumed."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, text.size - config.length - 1, config.batch)
    return jnp.asarray(text[starts[:, None] + np.arange(config.length + 1)], jnp.int32)


def init(config: Config, seed: int | jax.Array) -> Params:
    """Draws float32 parameters; those of all layers are stacked, for one `scan`."""
    c, keys = config, iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    # Weights that end a residual branch are smaller: 2 * layers of these add up to the size of one.
    return {
        "embed": normal(VOCABULARY, c.hidden, fan_in=c.hidden),
        "norm": jnp.ones(c.hidden),
        "layers": {
            "norm_attention": jnp.ones((c.layers, c.hidden)),
            "qkv": normal(c.layers, c.hidden, 3 * c.hidden, fan_in=c.hidden),
            "attention_out": normal(c.layers, c.hidden, c.hidden, fan_in=2 * c.layers * c.hidden),
            "norm_experts": jnp.ones((c.layers, c.hidden)),
            "router": normal(c.layers, c.hidden, c.experts, fan_in=c.hidden),
            "gate_up": normal(c.layers, c.experts, c.hidden, 2 * c.intermediate, fan_in=c.hidden),
            "down": normal(
                c.layers, c.experts, c.intermediate, c.hidden, fan_in=2 * c.layers * c.intermediate
            ),
        },
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * jnp.broadcast_to(scale, wide.shape)).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [B, S, heads, D]."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention(x: jax.Array, w: Params, heads: int) -> jax.Array:
    """Causal self-attention of [B, S, H], added to x."""
    batch, length, hidden = x.shape
    qkv = (norm(x, w["norm_attention"]) @ w["qkv"].astype(x.dtype)).reshape(
        batch, length, 3, heads, hidden // heads
    )
    q, k, v = (qkv[:, :, i] for i in range(3))
    out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return x + out.reshape(x.shape) @ w["attention_out"].astype(x.dtype)


def sparse_experts(tokens: jax.Array, routing: Routing, w: Params, x: jax.Array) -> jax.Array:
    """The experts of each token, added to x; the float32 weights get float32 gradients."""
    experts = jaxmoe.Experts(gate_up=w["gate_up"], down=w["down"], dtype=tokens.dtype)
    return jaxmoe.moe_mlp(tokens, routing, experts, residual=x)


def dense_experts(tokens: jax.Array, routing: Routing, w: Params, x: jax.Array) -> jax.Array:
    """The layer by einsum: every expert on every token, those not chosen with weight 0."""
    gate_up, down = (w[name].astype(tokens.dtype) for name in ("gate_up", "down"))
    chosen = jax.nn.one_hot(routing.expert_ids, down.shape[0])
    weights = jnp.einsum("tk,tke->et", routing.weights, chosen)
    gate, up = jnp.split(jnp.einsum("th,ehn->etn", tokens, gate_up), 2, axis=-1)
    h = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32) * weights[:, :, None]
    return x + jnp.einsum("eti,eih->th", h.astype(tokens.dtype), down)


EXPERTS = {"jaxmoe": sparse_experts, "dense": dense_experts}


def experts(x: jax.Array, w: Params, config: Config) -> tuple[jax.Array, jax.Array]:
    """The expert layer of [B, S, H], added to x, and how unevenly it was used."""
    tokens = norm(x, w["norm_experts"]).reshape(-1, x.shape[-1])
    logits = tokens.astype(jnp.float32) @ w["router"]
    routing = jaxmoe.route(logits, top_k=config.top_k, return_scores=True)
    y = EXPERTS[config.kind](tokens, routing, w, x.reshape(tokens.shape))
    balance = jaxmoe.load_balancing_loss(routing.scores, routing.expert_ids)
    return y.reshape(x.shape), balance / config.top_k


def predict(params: Params, text: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns logits of the byte after each, and the mean load balancing loss, 1 if it is even."""

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, jax.Array]:
        return experts(attention(x, w, config.heads), w, config)

    x = params["embed"][text].astype(config.dtype) * config.hidden**0.5
    x, balance = jax.lax.scan(layer, x, params["layers"])
    return norm(x, params["norm"]).astype(jnp.float32) @ params["embed"].T, balance.mean()


def losses(params: Params, text: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns nats a byte, and the load balancing loss."""
    logits, balance = predict(params, text[:, :-1], config)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
    return -chosen.mean(), balance


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW on a clipped gradient; the rate warms up, then falls to a tenth along a cosine."""
    peak, steps = config.rate, max(config.steps, WARM_UP + 1)
    rate = optax.warmup_cosine_decay_schedule(peak / WARM_UP, peak, WARM_UP, steps, peak / 10)
    matrices = functools.partial(jax.tree.map, lambda p: p.ndim > 2)
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(rate, *BETAS, weight_decay=DECAY, mask=matrices),
    )


@functools.partial(jax.jit, static_argnames="config")
def new_state(config: Config, seed: int | jax.Array) -> Any:
    """Returns the parameters and the optimizer's state before the first step."""
    params = init(config, seed)
    return params, optimizer(config).init(params)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def train_step(state: Any, text: jax.Array, config: Config) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the parameters and the optimizer's state after a step, and the losses before it."""

    def loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        nats, balance = losses(params, text, config)
        return nats + config.balance * balance, (nats, balance)

    params, moments = state
    grads, (nats, balance) = jax.grad(loss, has_aux=True)(params)
    updates, moments = optimizer(config).update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), nats, balance


evaluate = jax.jit(losses, static_argnames="config")


def step_flops(config: Config) -> float:
    """Operations of a training step: 6 for each parameter in use and byte, 12 H S for attention.

    https://arxiv.org/abs/2204.02311, appendix B.
    """
    c = config
    in_use = 4 * c.hidden**2 + c.hidden * c.experts + 3 * c.top_k * c.hidden * c.intermediate
    of_byte = 6 * (c.layers * in_use + VOCABULARY * c.hidden) + 12 * c.layers * c.hidden * c.length
    return float(of_byte) * c.batch * c.length


def same_model(path: Path, config: Config, seed: int) -> None:
    """Writes what is trained to `path`, or refuses a folder of something else."""
    fixed = dataclasses.asdict(config) | {"seed": seed}
    del fixed["steps"], fixed["megabytes"]  # how long, and on how much, a second run may change
    if not path.exists():
        path.write_text(json.dumps(fixed, indent=1) + "\n", encoding="utf-8")
    if json.loads(path.read_text(encoding="utf-8")) != fixed:
        raise SystemExit(f"{path} is of another model; choose another --out")


def restore(manager: ocp.CheckpointManager, config: Config, seed: int) -> tuple[int, Any]:
    """Returns the step of the newest checkpoint and its state; a new one before the first step."""
    # Placed on a device as what is read will be, or each were a program of its own.
    state = jax.device_put(new_state(config, seed), jax.devices()[0])
    step = manager.latest_step()
    if step is None:
        return 0, state
    return step, manager.restore(step, args=ocp.args.StandardRestore(state))


def plot(path: Path, points: list[tuple[float, ...]], entropy: float) -> None:
    """Draws the loss against the step, and the entropy of single bytes as a line."""
    width, height, most = 640, 320, max(y for _, y in points)
    last = max(x for x, _ in points) or 1.0
    at = [
        f"{40 + x / last * (width - 50):.1f},{height - 30 - y / most * (height - 50):.1f}"
        for x, y in points
    ]
    level = height - 30 - entropy / most * (height - 50)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<path d="M40 20V{height - 30}H{width - 10}" stroke="black" fill="none"/>'
        f'<path d="M40 {level:.1f}H{width - 10}" stroke="gray" stroke-dasharray="4"/>'
        f'<text x="{width - 12}" y="{level - 4:.1f}" text-anchor="end">single bytes '
        f"{entropy:.2f}</text>"
        f'<polyline points="{" ".join(at)}" stroke="#1f77b4" fill="none"/>'
        f'<text x="40" y="14">nats a byte, from {points[0][1]:.2f} to {points[-1][1]:.2f}</text>'
        f'<text x="{width - 10}" y="{height - 12}" text-anchor="end">step {last:.0f}'
        "</text></svg>\n",
        encoding="utf-8",
    )


def report(step: int, config: Config, loss: float, balance: float, seconds: float) -> float:
    """Prints progress, losses, throughput and MFU, given seconds a step. Returns bytes a second."""
    speed = config.batch * config.length / seconds
    flops = step_flops(config) / seconds
    kind = jax.devices()[0].device_kind
    peak = next((v for name, v in PEAK_FLOPS.items() if kind.startswith(name)), None)
    mfu = f"{flops / peak:.1%}" if peak else "-"
    bar = "#" * (30 * step // config.steps)
    left = (config.steps - step) * seconds
    print(
        f"[{bar:30s}] {step}/{config.steps} loss {loss:.3f} balance {balance:.2f} "
        f"{speed / 1e3:.1f} k bytes/s {flops / 1e12:.3g} TFLOP/s MFU {mfu} {left:.0f} s left",
        flush=True,
    )
    return speed


def train(
    config: Config,
    seed: int,
    out: Path,
    every: int,
    save_every: int,
    text: np.ndarray,
    entropy: float,
) -> Params:
    """Trains from the newest checkpoint to `config.steps`; writes losses, plot and checkpoints."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((out / "checkpoints").absolute(), options=options) as manager:
        first, state = restore(manager, config, seed)
        print(f"{config.kind} experts, seed {seed}, from step {first}")
        log = out / "loss.csv"
        kept = log.read_text(encoding="utf-8").splitlines()[1:] if first else []
        kept = [line for line in kept if int(line.partition(",")[0]) <= first]
        since, done = time.perf_counter(), first
        for step in range(first + 1, config.steps + 1):
            state, nats, balance = train_step(state, sample(text, config, seed, step), config)
            last = step == config.steps
            if step % every == 0 or last:
                losses = float(nats), float(balance)
                seconds = (time.perf_counter() - since) / (step - done)
                speed = report(step, config, *losses, seconds)
                kept.append(f"{step},{losses[0]:.6f},{losses[1]:.4f},{speed:.0f}")
                log.write_text("\n".join(["step,loss,balance,bytes_per_s", *kept]) + "\n")
                points = [tuple(map(float, line.split(",")[:2])) for line in kept]
                plot(out / "loss.svg", points, entropy)
                since, done = time.perf_counter(), step
            elif step == first + 1:  # which was compiled first
                jax.block_until_ready(nats)
                since, done = time.perf_counter(), step
            if save_every and (step % save_every == 0 or last):
                manager.save(step, args=ocp.args.StandardSave(state))
    return state[0]


def run(config: Config, seed: int, out: Path, every: int, save_every: int) -> tuple[float, float]:
    """Trains and plots; returns the held-out loss and the entropy of single bytes, in nats."""
    out.mkdir(parents=True, exist_ok=True)
    same_model(out / "model.json", config, seed)
    train_text, test = read_text(config.megabytes)
    entropy = unigram_entropy(test)
    count = sum(a.size for a in jax.tree.leaves(jax.eval_shape(lambda: init(config, seed))))
    print(
        f"{count / 1e6:.1f} M parameters, {train_text.size / 1e6:.1f} MB of text; "
        f"single bytes have {entropy:.3f} nats"
    )
    params = train(config, seed, out, every, save_every, train_text, entropy)
    held_out = (sample(test, config, 0, i) for i in range(HELD_OUT))  # the same for every seed
    final = float(np.mean([evaluate(params, text, config)[0] for text in held_out]))
    print(
        f"held out: {final:.4f} nats a byte ({final / math.log(2):.2f} bits), "
        f"single bytes {entropy:.3f}; see {out / 'loss.svg'}"
    )
    return final, entropy


def positive(text: str) -> int:
    """Reads a number of the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that say what to train."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--out", type=Path, default=Path("lm"), help="folder of what is written (lm)")
    made.add_argument("--preset", choices=("toy", "small"), help="toy on a CPU, small on a GPU")
    made.add_argument("--steps", type=positive, help="to train to, all runs together")
    made.add_argument("--every", type=positive, default=50, help="steps between reports (50)")
    made.add_argument(
        "--save-every", type=int, default=200, help="steps between checkpoints, 0 for none (200)"
    )
    return made


def chosen(args: argparse.Namespace, kind: str) -> Config:
    """Returns what the command line says to train."""
    preset = args.preset or ("small" if jax.default_backend() == "gpu" else "toy")
    config = {"toy": TOY, "small": SMALL}[preset]
    return dataclasses.replace(config, steps=args.steps or config.steps, kind=kind)


def main(arguments: list[str] | None = None) -> int:
    """Trains; returns 1 if the model is no better than counting bytes."""
    options = parser(__doc__)
    options.add_argument("--seed", type=int, default=0, help="of parameters and text order (0)")
    options.add_argument(
        "--experts", choices=EXPERTS, default="jaxmoe", help="dense: every expert on every token"
    )
    args = options.parse_args(arguments)
    config = chosen(args, args.experts)
    final, entropy = run(config, args.seed, args.out, args.every, args.save_every)
    return int(not final < entropy)


if __name__ == "__main__":
    sys.exit(main())
