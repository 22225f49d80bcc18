"""JAX programs built for timing: many layers in one execution, outputs written in place."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

# XLA captures these commands in a CUDA graph; a chain is then one graph launch and the host is
# out of the measurement.
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
    "xla_gpu_graph_min_graph_size": 1,
}
# Calls that do not depend on each other must not overlap inside the graph.
SERIAL_GRAPHS = GRAPHS | {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


class Chain:
    """A jitted `run(state, inputs) -> state` whose state is donated.

    Donation makes every execution write the buffers of the one before: no allocation, and the
    captured graph sees the same addresses each time.
    """

    def __init__(
        self,
        run: Callable[[Any, Any], Any],
        state: Any,
        inputs: Any,
        layers: int,
    ):
        self.layers = layers
        self._run = run
        self._state = state
        self._inputs = inputs

    def launch(self, count: int) -> None:
        """Enqueues `count` executions."""
        for _ in range(count):
            self._state = self._run(self._state, self._inputs)

    def wait(self) -> None:
        """Returns when the last one has finished."""
        jax.block_until_ready(self._state)


def compiled(
    run: Callable[[Any, Any], Any], options: dict[str, Any] = GRAPHS
) -> Callable[[Any, Any], Any]:
    """Returns `run` jitted as a `Chain` wants it."""
    gpu = jax.default_backend() == "gpu"
    return jax.jit(
        run, donate_argnums=0, keep_unused=True, compiler_options=options if gpu else None
    )


def dependent(
    layer: Callable[..., jax.Array],
    residual: jax.Array,
    x: jax.Array,
    per_layer: Sequence[Any],
    weights: Sequence[Any],
) -> Chain:
    """Chains layers through the residual: y[i] = y[i-1] + layer(x, per_layer[i], weights[i % W]).

    The residual makes each layer wait for the one before without a kernel of its own, while x
    stays the same, so the routing stays what the caller asked for.
    """
    inputs = (x, tuple(per_layer), tuple(weights))
    return Chain(_dependent(layer), residual, inputs, len(per_layer))


@functools.cache  # cases that differ in their data only share one executable
def _dependent(layer: Callable[..., jax.Array]) -> Callable[[Any, Any], Any]:
    def run(y: jax.Array, inputs: Any) -> jax.Array:
        x, per_layer, weights = inputs
        for i, item in enumerate(per_layer):
            y = layer(x, item, weights[i % len(weights)], y)
        return y

    return compiled(run)


def independent(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Chain:
    """Runs `call` once per entry of `arguments`, one after the other, keeping every output.

    The arguments must differ, or XLA computes equal calls once.
    """
    inputs = tuple(arguments)
    shapes = tuple(jax.eval_shape(call, *item) for item in inputs)
    state = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)
    return Chain(_independent(call), state, inputs, len(inputs))


@functools.cache
def _independent(call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def run(_: Any, inputs: Any) -> Any:
        return tuple(call(*item) for item in inputs)

    return compiled(run, SERIAL_GRAPHS)


def stacked(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Chain:
    """A chain like `independent`, with the results of all layers stacked in one array each.

    For kernels of a few microseconds: the host spends one or two on every array that an execution
    takes or returns. The copy at the end reads and writes each result once.
    """
    inputs = tuple(arguments)
    run = _stacked(call)
    shapes = jax.eval_shape(run, None, inputs)
    state = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)
    return Chain(run, state, inputs, len(inputs))


@functools.cache
def _stacked(call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    layer = jax.jit(call)  # traced once, not once a layer

    def run(_: Any, inputs: Any) -> Any:
        results = [layer(*item) for item in inputs]
        return jax.tree.map(lambda *arrays: jax.numpy.stack(arrays), *results)

    return compiled(run, SERIAL_GRAPHS)


@functools.cache
def single(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call` jitted, the same object every time."""
    return jax.jit(call)
