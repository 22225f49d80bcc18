"""Trains a Mixture-of-Experts language model on bytes: Python's own library as the text.

Run it with `python examples/train_lm.py --out /tmp/lm`. On a CPU it trains a toy in less than a
minute, on a GPU a model of 0.4 billion parameters; run it again with more --steps and it goes on
where it stopped. OUT gets the state (state.npz), the losses (loss.csv) and a plot (loss.svg).
"""

import argparse
import dataclasses
import functools
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe

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
    dtype: Any
    balance: float = 1e-2  # coefficient of the load balancing loss


TOY = Config(64, 2, 4, 8, 2, 64, 64, 16, 300, 4e-3, 4, jnp.float32)
SMALL = Config(768, 12, 12, 32, 4, 384, 512, 32, 4000, 6e-4, 64, jnp.bfloat16)
WARM_UP, DECAY, CLIP, BETAS = 50, 0.1, 1.0, (0.9, 0.95)


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


def sample(text: np.ndarray, config: Config, seed: int) -> jax.Array:
    """Draws [batch, length + 1] bytes; the seed is the step, so that resuming repeats nothing."""
    starts = np.random.default_rng(seed).integers(0, text.size - config.length - 1, config.batch)
    return jnp.asarray(text[starts[:, None] + np.arange(config.length + 1)], jnp.int32)


def init(config: Config) -> Params:
    """Draws float32 parameters; those of all layers are stacked, for one `scan`."""
    c, keys = config, iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    # What ends a residual branch is smaller: 2 * layers of them add up to the size of one.
    return {
        "embed": normal(VOCABULARY, c.hidden, fan_in=c.hidden),
        "norm": jnp.ones(c.hidden),
        "layers": {
            "norm_attention": jnp.ones((c.layers, c.hidden)),
            "qkv": normal(c.layers, c.hidden, 3 * c.hidden, fan_in=c.hidden),
            "attention_out": normal(c.layers, c.hidden, c.hidden, fan_in=2 * c.layers * c.hidden),
            "norm_experts": jnp.ones((c.layers, c.hidden)),
            "router": normal(c.layers, c.hidden, c.experts, fan_in=c.hidden),
            "w_gate_up": normal(c.layers, c.experts, c.hidden, 2 * c.intermediate, fan_in=c.hidden),
            "w_down": normal(
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


def experts(x: jax.Array, w: Params, top_k: int) -> tuple[jax.Array, jax.Array]:
    """The expert layer of [B, S, H], added to x, and how unevenly it was used."""
    tokens = norm(x, w["norm_experts"]).reshape(-1, x.shape[-1])
    logits = tokens.astype(jnp.float32) @ w["router"]
    routing = jaxmoe.route(logits, top_k=top_k)
    y = jaxmoe.moe_mlp(
        tokens,
        routing,
        w["w_gate_up"].astype(x.dtype),
        w["w_down"].astype(x.dtype),
        residual=x.reshape(tokens.shape),
    )
    scores = jax.nn.softmax(logits, axis=-1)
    return y.reshape(x.shape), jaxmoe.load_balancing_loss(scores, routing.expert_ids) / top_k


def predict(params: Params, text: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns logits of the byte after each, and the mean load balancing loss, 1 if it is even."""

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, jax.Array]:
        return experts(attention(x, w, config.heads), w, config.top_k)

    x = params["embed"][text].astype(config.dtype) * config.hidden**0.5
    x, balance = jax.lax.scan(layer, x, params["layers"])
    return norm(x, params["norm"]).astype(jnp.float32) @ params["embed"].T, balance.mean()


def losses(params: Params, text: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns nats a byte, and the load balancing loss."""
    logits, balance = predict(params, text[:, :-1], config)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
    return -chosen.mean(), balance


@functools.partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))
def train_step(
    params: Params,
    moments: tuple[Params, Params],
    t: jax.Array,
    rate: jax.Array,
    text: jax.Array,
    config: Config,
) -> tuple[Params, tuple[Params, Params], jax.Array, jax.Array]:
    """Step t = 1, 2, ... of Adam with decoupled weight decay, on a clipped gradient."""

    def loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        nats, balance = losses(params, text, config)
        return nats + config.balance * balance, (nats, balance)

    grads, (nats, balance) = jax.grad(loss, has_aux=True)(params)
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, CLIP / (size + 1e-6))

    def update(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        g = g * scale
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        change = m / (1 - BETAS[0] ** t) / (jnp.sqrt(v / (1 - BETAS[1] ** t)) + 1e-8)
        return p - rate * (change + (DECAY * p if p.ndim > 2 else 0.0)), m, v

    updated = jax.tree.map(update, params, grads, *moments)
    params, *moments = (jax.tree.map(lambda _, u, i=i: u[i], params, updated) for i in range(3))
    return params, tuple(moments), nats, balance


def learning_rate(config: Config, step: int, steps: int) -> float:
    """Rises for `WARM_UP` steps, then falls to a tenth along a cosine."""
    done = max(step - WARM_UP, 0) / max(steps - WARM_UP, 1)
    return config.rate * min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * done))


evaluate = jax.jit(losses, static_argnames="config")


def save(path: Path, step: int, state: Any) -> None:
    """Writes the state; a run that is killed meanwhile keeps the one before."""
    part = path.with_suffix(".part.npz")
    arrays = {f"a{i}": np.asarray(a) for i, a in enumerate(jax.tree.leaves(state))}
    np.savez(part, step=step, **arrays)
    part.replace(path)


def restore(path: Path, state: Any) -> tuple[int, Any]:
    """Reads what `save` wrote, (0, state) if there is nothing."""
    if not path.exists():
        return 0, state
    with np.load(path) as saved:
        leaves, tree = jax.tree.flatten(state)
        arrays = [saved[f"a{i}"] for i in range(len(leaves))]
        if [a.shape for a in arrays] != [a.shape for a in leaves]:
            raise SystemExit(f"{path} is of another model; choose another --out")
        return int(saved["step"]), jax.tree.unflatten(tree, map(jnp.asarray, arrays))


def plot(path: Path, points: list[tuple[float, float]], entropy: float) -> None:
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


def main(arguments: list[str] | None = None) -> int:
    """Trains; returns 1 if the model is no better than counting bytes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("lm"), help="folder of state and plot")
    parser.add_argument("--preset", choices=("toy", "small"), help="toy on a CPU, small on a GPU")
    parser.add_argument("--steps", type=int, help="to train to, all runs together")
    parser.add_argument("--every", type=int, default=50, help="steps between reports")
    args = parser.parse_args(arguments)
    preset = args.preset or ("small" if jax.default_backend() == "gpu" else "toy")
    config = {"toy": TOY, "small": SMALL}[preset]
    steps = args.steps or config.steps
    train, test = read_text(config.megabytes)
    entropy = unigram_entropy(test)
    args.out.mkdir(parents=True, exist_ok=True)
    params = init(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    first, (params, moments) = restore(
        args.out / "state.npz", (params, (zeros, jax.tree.map(jnp.copy, zeros)))
    )
    count = sum(a.size for a in jax.tree.leaves(params))
    print(
        f"{preset}: {count / 1e6:.1f} M parameters, {train.size / 1e6:.1f} MB of text, "
        f"from step {first}; single bytes have {entropy:.3f} nats"
    )
    log = args.out / "loss.csv"
    kept = log.read_text().splitlines()[1:] if first else []
    points = [(float(s), float(loss)) for s, loss, *_ in (line.split(",") for line in kept)]
    held_out = [sample(test, config, -1 - i & 0xFFFF) for i in range(4)]
    since, steps_since = time.perf_counter(), 0
    for step in range(first, steps):
        text = sample(train, config, step)
        rate = jnp.float32(learning_rate(config, step, steps))
        params, moments, nats, balance = train_step(
            params, moments, jnp.float32(step + 1), rate, text, config
        )
        steps_since += 1
        if (step + 1) % args.every and step + 1 < steps:
            continue
        loss = float(nats)
        speed = steps_since * config.batch * config.length / (time.perf_counter() - since)
        points.append((step + 1, loss))
        kept.append(f"{step + 1},{loss:.5f},{float(balance):.4f},{speed:.0f}")
        bar = "#" * (30 * (step + 1) // steps)
        print(
            f"[{bar:30s}] {step + 1}/{steps} loss {loss:.3f} balance {float(balance):.2f} "
            f"{speed / 1e3:.1f} k bytes/s",
            flush=True,
        )
        save(args.out / "state.npz", step + 1, (params, moments))
        log.write_text("\n".join(["step,loss,balance,bytes_per_s", *kept]) + "\n")
        plot(args.out / "loss.svg", points, entropy)
        since, steps_since = time.perf_counter(), 0
    final = float(np.mean([evaluate(params, text, config)[0] for text in held_out]))
    print(
        f"held out: {final:.3f} nats a byte ({final / math.log(2):.2f} bits), "
        f"single bytes {entropy:.3f}; see {args.out / 'loss.svg'}"
    )
    return int(not final < entropy)


if __name__ == "__main__":
    sys.exit(main())
