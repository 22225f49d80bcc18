"""From a folder with a model's config.json and safetensors files to its layers of experts."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe._load import families, stored
from jaxmoe._load.ahead import Ahead
from jaxmoe._load.shards import OP, Shards
from jaxmoe.experts import Experts
from jaxmoe.mlp import moe_mlp
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing, route

Progress = Callable[[int, int, str], None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoadedLayer:
    """The experts and the router of one layer; a pytree.

    y = moe_mlp(x, route(x W^T + router_bias, ...), experts)

    Shared experts and norms are not in it.

    Attributes:
      experts: the weights.
      router: [E, H], the router's weight.
      router_bias: [E] or None, added to the logits.
      selection_bias: [E] or None, the `bias` of `jaxmoe.route`.
      expert_table: [V, K] or None, the experts of each token of the vocabulary (hash routing).
      options: the other options of `jaxmoe.route`, as pairs.
      call: options of `jaxmoe.moe_mlp`, as pairs.
    """

    experts: Experts
    router: jax.Array
    router_bias: jax.Array | None = None
    selection_bias: jax.Array | None = None
    expert_table: jax.Array | None = None
    options: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})
    call: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})

    def route(self, x: jax.Array, token_ids: jax.Array | None = None) -> Routing:
        """Chooses the experts of tokens x [.., H] by float32 logits.

        token_ids: [..] integers, for a layer with an `expert_table`.

        Raises:
          ValueError: the layer has a table and there are no `token_ids`.
        """
        logits = jnp.einsum("...h,eh->...e", x.astype(jnp.float32), self.router.astype(jnp.float32))
        if self.router_bias is not None:
            lead = (1,) * (logits.ndim - 1)
            logits = logits + self.router_bias.astype(jnp.float32).reshape(*lead, -1)
        given: dict[str, Any] = dict(self.options)
        if self.expert_table is not None:
            if token_ids is None:
                raise ValueError(f"jaxmoe.{OP}: token_ids must be given to a layer with a table")
            given["expert_ids"] = self.expert_table[token_ids]
        elif self.selection_bias is not None:
            given["bias"] = self.selection_bias
        return route(logits, **given)

    def __call__(
        self, x: jax.Array, token_ids: jax.Array | None = None, **options: Any
    ) -> jax.Array:
        """The layer's result for tokens x [.., H]; `options` are those of `jaxmoe.moe_mlp`."""
        return moe_mlp(x, self.route(x, token_ids), self.experts, **dict(self.call), **options)


def load(
    directory: str | Path,
    *,
    layers: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
    axis: str | None = None,
    progress: Progress | None = None,
) -> dict[int, LoadedLayer]:
    """Reads the layers of experts of a model, as the files store them.

    Weights keep their format: bf16, FP8 and every format of 4 bits that `jaxmoe.checkpoints` reads,
    known by the names and dtypes of the tensors. Files are read by threads, in order and a gigabyte
    ahead, so the process holds two or three of its own beside what lies on the devices.

    Args:
      directory: with config.json and model.safetensors, or its shards and their index.
      layers: numbers of the layers to read; None: all that have experts.
      dtype: "bfloat16", "float16" or "float32", of the tokens that quantized weights meet. Plain
        weights stay in the dtype of the files.
      mesh: None: weights lie on JAX's default device. Else they lie on the mesh, split over
        `axis` by experts, and each process reads those of its own devices alone.
      axis: name of the axis of `mesh` that experts are split over; None: every device has all.
      progress: called with bytes read, bytes to read and the name of the weight, after each.

    Returns:
      The layers by number.

    Raises:
      FileNotFoundError: no config.json or no files, or one that the index names is missing.
      LookupError: a tensor or scale is missing, which the message names; no such layer.
      ValueError: a file that is cut off, a configuration without a number that is needed, experts
        that `axis` does not divide.
      NotImplementedError: a model or a format that is not known.

    Numerics: no number changes but where `jaxmoe.checkpoints` says so. Routing is float32.
    Source: config.json and the model code of Hugging Face transformers.

    Example:
      >>> import jaxmoe
      >>> layers = jaxmoe.load("Qwen3-30B-A3B")  # doctest: +SKIP
      >>> y = jax.jit(lambda layer, x: layer(x))(layers[0], x)  # doctest: +SKIP
    """
    model = Model(directory, dtype)
    chosen = model.blocks if layers is None else {n: model.block(n) for n in layers}
    spread = _Spread(mesh, axis, model.num_experts)
    weights = {n: model.weights(at) for n, at in chosen.items()}
    everyone = range(model.num_experts)
    total = sum(w.nbytes(model.shards, everyone) for those in weights.values() for w in those)
    pieces = (
        piece
        for those in weights.values()
        for weight in those
        for part in spread.parts()
        for piece in weight.pieces(model.shards, part)
    )
    out, done = {}, 0
    with Ahead(model.shards, pieces) as files:
        for number, at in chosen.items():
            read: list[Any] = []
            for weight in weights[number]:
                jax.block_until_ready(read[-1:])  # until then its bytes are on the host as well
                read.append(spread(lambda part, w=weight: w.read(files, part)))
                done += weight.nbytes(model.shards, everyone)
                if progress is not None:
                    progress(done, total, f"{weight.stem}{weight.parts[0]}")
            out[number] = model.layer(at, read, spread.everywhere)
    return out


class Model:
    """A folder's configuration, and where its layers are."""

    def __init__(self, directory: str | Path, dtype: str) -> None:
        """Reads the configuration and the headers of the files."""
        path = Path(directory) / "config.json"
        if not path.exists():
            raise FileNotFoundError(f"jaxmoe.{OP}: {directory} has no config.json")
        whole = json.loads(path.read_text(encoding="utf-8"))
        self.family, self.config = families.of(whole)
        self.quantization = self.config.get("quantization_config") or {}
        self.shards = Shards(directory)
        self.num_experts = families.num_experts(self.config)
        self.dtype = dtype
        # Modules that predict further tokens lie behind the layers.
        count = int(self.config.get("num_hidden_layers") or 1 << 30)
        found = self.family.blocks(self.shards.names)
        self.blocks = {number: at for number, at in found.items() if number < count}
        if not self.blocks:
            stem = f"layers.N.{self.family.block}.{self.family.weights[-1]}"
            raise LookupError(f"jaxmoe.{OP}: {directory} has no layer with tensors {stem}")

    def block(self, number: int) -> str:
        """The module of a layer."""
        if number not in self.blocks:
            known = ", ".join(map(str, self.blocks))
            raise LookupError(f"jaxmoe.{OP}: layer {number} has no experts, layers {known} have")
        return self.blocks[number]

    def weights(self, at: str) -> list[stored.Stored]:
        """How the weights of a layer's module are stored; all tensors are there."""
        out = []
        for stem in self.family.weights:
            weight = stored.find(self.shards, f"{at}.{stem}", self.quantization, self.dtype)
            for name in weight.names(range(self.num_experts)):
                self.shards.dtype(name)  # names the one that is missing
            self._check_count(weight)
            out.append(weight)
        return out

    def _check_count(self, weight: stored.Stored) -> None:
        if weight.stacked:
            count = self.shards[weight.stem + weight.parts[0]].shape[0]
        else:
            next_one = weight.stem.format(e=self.num_experts) + weight.parts[0]
            count = self.num_experts + (next_one in self.shards)
        if count != self.num_experts:
            raise ValueError(
                f"jaxmoe.{OP}: config.json says {self.num_experts} experts, the files have {count} "
                f"or more: {weight.stem}{weight.parts[0]}"
            )

    def layer(
        self, at: str, weights: Sequence[Any], place: Callable[[Any], jax.Array]
    ) -> LoadedLayer:
        """The layer of a module, of weights that have been read."""

        def tensor(name: str) -> jax.Array:
            return place(self.shards[f"{at}.{name}"])

        def optional(name: str | None) -> jax.Array | None:
            return tensor(name) if name and f"{at}.{name}" in self.shards else None

        family = self.family
        names = ("gate", "up", "down") if len(weights) == 3 else ("gate_up", "down")
        biases = {}
        for name, stem in zip(names, family.weights, strict=True):
            if family.biased or (family.stacked and f"{at}.{stem}_bias" in self.shards):
                biases[f"{name}_bias"] = tensor(f"{stem}_bias")
        quantized = isinstance(weights[0], QuantizedArray)
        experts = Experts(
            **dict(zip(names, weights, strict=True)),
            **biases,
            activation=family.activation(self.config),
            order=family.order,
            layout="nk" if quantized else family.layout,
        )
        table = f"{at}.{family.router}.tid2eid"  # int64 in the files
        return LoadedLayer(
            experts,
            tensor(f"{family.router}.weight"),
            # A name that is the choice's bias is none of the logits.
            None
            if family.selection_bias == f"{family.router}.bias"
            else optional(f"{family.router}.bias"),
            optional(family.selection_bias),
            place(self.shards[table].astype(np.int32)) if table in self.shards else None,
            tuple(sorted(family.route(self.config).items())),
            family.call,
        )


class _Spread:
    """Puts arrays of experts where they are to lie."""

    def __init__(self, mesh: Mesh | None, axis: str | None, num_experts: int) -> None:
        if axis is not None and (mesh is None or axis not in mesh.axis_names):
            names = None if mesh is None else mesh.axis_names
            raise ValueError(
                f"jaxmoe.{OP}: axis={axis!r} must be an axis of mesh, which has {names}"
            )
        if mesh is not None and axis is not None and num_experts % mesh.shape[axis]:
            raise ValueError(
                f"jaxmoe.{OP}: {num_experts} experts must be a multiple of the {mesh.shape[axis]} "
                f"devices of axis={axis!r}"
            )
        self._mesh, self._axis, self._num_experts = mesh, axis, num_experts

    def everywhere(self, value: Any) -> jax.Array:
        """A small array, on every device of the mesh."""
        if self._mesh is None:
            return jnp.asarray(value)
        sharding = NamedSharding(self._mesh, PartitionSpec())
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def parts(self) -> list[range]:
        """The experts that are read, in order."""
        if self._mesh is None:
            return [range(self._num_experts)]
        return list(dict.fromkeys(self._where().values()))

    def _where(self) -> dict[Any, range]:
        """The experts of each device of this process."""
        assert self._mesh is not None
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axis))
        where = sharding.addressable_devices_indices_map((self._num_experts,))
        everyone = range(self._num_experts)
        return {device: everyone[index[0]] for device, index in where.items() if index}

    def __call__(self, read: Callable[[range], Any]) -> Any:
        """The weight of all experts, of what `read` gives for some."""
        if self._mesh is None:
            return read(range(self._num_experts))
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axis))
        parts: dict[range, Any] = {}
        pieces = []
        for device, mine in self._where().items():
            if mine not in parts:
                with jax.default_device(device):
                    parts[mine] = read(mine)
            pieces.append(jax.device_put(parts[mine], device))

        def joined(*leaves: jax.Array) -> jax.Array:
            shape = (self._num_experts, *leaves[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

        return jax.tree.map(joined, *pieces)
