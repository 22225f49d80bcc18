"""Times a layer with tiles of one's choice on this process's first GPU, as autotuning does."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._formats import QUANTIZED
from jaxmoe._mlp import tuned
from jaxmoe._mlp.op import moe_mlp_p
from jaxmoe._mlp.operands import Layer, Operands
from jaxmoe._mlp.tuned import Pair
from jaxmoe.quantize import quantize

_COPY_BYTES = 200e6  # of weights that a program has, at least: several times what L2 holds
_MAX_LAYERS = 16  # in a program
_PROGRAM_US = 2000  # what they take together, or starting a program takes longer
_BYTES_PER_US, _FLOPS_PER_US = 3e6, 6e8  # of a guess how long one takes
_BATCH_S = 0.006  # how long a batch takes: a card keeps its clock so long
_PAUSE_S = 0.03  # before each batch, so that all begin with a card as cool
_ROUNDS = 5
_WEIGHT = 0.02  # the size of weights: the power that a card draws depends on what it multiplies


class Timer:
    """Microseconds of a layer with given tiles, on the GPU."""

    def __init__(self, a: Operands, layer: Layer):
        """Draws operands of the shapes and dtypes of `a`, more weights than L2 holds."""
        self._layer = layer
        copies = min(math.ceil(_COPY_BYTES / max(_bytes(a), 1)), _MAX_LAYERS)
        drawn = [_random(a, layer, seed) for seed in range(copies)]
        layers = math.ceil(min(max(_PROGRAM_US / _guess_us(a, layer), copies), _MAX_LAYERS))
        # Layers that share weights differ by their routing, or XLA would compute them once.
        self._layers = [
            drawn[i % copies]._replace(expert_ids=_choices(a, layer, i)) for i in range(layers)
        ]
        # Programs write where the one before wrote, or XLA would change its CUDA graph for every
        # execution, and a layer of one token would take as long as that.
        self._outs = self._empty()

    def __call__(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """Measures pairs of tiles in turn, several times."""
        programs = self._compile(pairs)
        times: dict[Pair, list[float]] = {pair: [] for pair in programs}
        for program in programs.values():
            self._seconds(program, 1)
        for _ in range(_ROUNDS):
            for pair, program in programs.items():
                times[pair].append(self._batch(program))
        return {pair: statistics.median(of_pair) for pair, of_pair in times.items()}

    def _empty(self) -> list[Any]:
        shapes = jax.eval_shape(self._run, self._layers, [])
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def _compile(self, pairs: Iterable[Pair]) -> dict[Pair, Callable[..., Any]]:
        lowered = {pair: self._lower(pair) for pair in pairs}
        with ThreadPoolExecutor() as pool:  # XLA compiles without the interpreter's lock
            compiled = pool.map(_compile, lowered.values(), lowered)
            return dict(zip(lowered, compiled, strict=True))

    def _lower(self, pair: Pair) -> Any:
        # A function of its own for each pair, so that jit shares nothing between them.
        run = jax.jit(functools.partial(self._run), donate_argnums=1, keep_unused=True)
        with tuned.within(_Always(pair)):  # as a result of tuning will give them
            return run.lower(self._layers, self._outs)

    def _run(self, layers: list[Operands], outs: list[Any]) -> list[Any]:
        del outs  # results take their place
        return [moe_mlp_p(*a, layer=self._layer.replace(config=None)) for a in layers]

    def _batch(self, program: Callable[..., Any]) -> float:
        time.sleep(_PAUSE_S)
        # What starting costs, and the first execution after a pause, is in both.
        once = min(self._seconds(program, 1) for _ in range(2))
        count = max(3, math.ceil(_BATCH_S / max(once, 1e-6)))
        few, many = self._seconds(program, count), self._seconds(program, 3 * count)
        return (many - few) / (2 * count) / len(self._layers) * 1e6

    def _seconds(self, program: Callable[..., Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self._outs = program(self._layers, self._outs)
        jax.block_until_ready(self._outs)
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class _Always:
    """A table that has these tiles for every layer."""

    pair: Pair

    def find(self, problem: Any, a: Operands, layer: Layer) -> Pair:
        """The tiles."""
        del problem, a, layer
        return self.pair


def _compile(lowered: Any, pair: Pair) -> Any:
    with tuned.within(_Always(pair)):  # programs for several devices ask while they are compiled
        return lowered.compile()


def _random(a: Operands, layer: Layer, seed: int) -> Operands:
    """Operands of these shapes: normal weights and tokens, distinct experts for each token."""
    key = jax.random.key(seed)
    drawn: dict[str, Any] = {}
    for i, (name, x) in enumerate(zip(a._fields, a, strict=True)):
        if x is not None and name not in drawn:
            drawn |= _draw(name, x, a, layer, jax.random.fold_in(key, i))
    drawn["expert_ids"] = _choices(a, layer, seed)
    return Operands(**{name: drawn.get(name) for name in a._fields})


def _choices(a: Operands, layer: Layer, seed: int) -> jax.Array:
    """Distinct experts for each token, evenly."""
    num_tokens, top_k = a.expert_ids.shape
    order = np.random.default_rng(seed).random((num_tokens, layer.num_experts)).argsort(axis=1)
    return jnp.asarray(order[:, :top_k], jnp.int32)


def _bytes(a: Operands) -> int:
    arrays = (x for x in a if x is not None)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)


def _guess_us(a: Operands, layer: Layer) -> float:
    """About how long the layer takes, from its weights that are read and its products."""
    rows = math.prod(a.expert_ids.shape)
    read = min(rows / max(layer.num_local_experts, 1), 1.0) * _bytes(a)
    flops = 6.0 * rows * a.x.shape[1] * layer.intermediate(a.w_down)
    return max(read / _BYTES_PER_US, flops / _FLOPS_PER_US, 1.0)


def _draw(name: str, x: Any, a: Operands, layer: Layer, key: jax.Array) -> dict[str, Any]:
    scales = {"w_gate_up": "gate_up_scales", "w_up": "up_scales", "w_down": "down_scales"}
    if name == "expert_map":
        return {name: jnp.arange(x.shape[0], dtype=x.dtype)}
    if jnp.issubdtype(x.dtype, jnp.integer) and name not in scales:
        return {name: jnp.zeros(x.shape, x.dtype)}
    if name not in scales or not layer.format.quantized:
        drawn = jax.random.normal(key, x.shape, jnp.float32)
        size = _WEIGHT if name in scales else 1.0
        return {name: (abs(drawn) if "scale" in name else drawn * size).astype(x.dtype)}
    shape = layer.format.weight_shape(x.shape)
    wide = (_WEIGHT * jax.random.normal(key, shape, jnp.float32)).astype(layer.dtype)
    kind = QUANTIZED[layer.format.name]
    q = jax.jit(lambda w: quantize(w, kind.name, weight_layout="nk"))(wide)
    drawn = {name: q.values.astype(x.dtype)}
    at = scales[name]
    there = getattr(a, at)
    if there is not None:  # those of two arrays may be joined
        drawn[at] = jnp.resize(q.scales, there.shape)
    return drawn
