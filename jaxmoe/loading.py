"""From a folder with a model's config.json and safetensors files to its layers of experts."""

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe import _saved
from jaxmoe._jax import checks as _checks
from jaxmoe._load import families, find, latent, router, settings
from jaxmoe._load.ahead import Ahead
from jaxmoe._load.files import OP, naming, other, parsed
from jaxmoe._load.latent import LatentSpace
from jaxmoe._load.shards import Shards
from jaxmoe._load.spread import Spread
from jaxmoe._load.stored import Stored
from jaxmoe.activation import Activation
from jaxmoe.experts import Experts
from jaxmoe.mlp import moe_mlp
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing, route
from jaxmoe.routing_methods import RoutingMethod

Progress = Callable[[int, int, str], None]
_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))


@_saved.register
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
      options: the other options of `jaxmoe.route`, as pairs; a rule of its own is the pairs of its
        fields.
      call: options of `jaxmoe.moe_mlp`, as pairs.
      latent: None, or the products around experts that read fewer numbers than a token has.
    """

    experts: Experts
    router: jax.Array
    router_bias: jax.Array | None = None
    selection_bias: jax.Array | None = None
    expert_table: jax.Array | None = None
    options: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})
    call: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})
    latent: LatentSpace | None = None

    def route(self, x: jax.Array, token_ids: jax.Array | None = None) -> Routing:
        """Chooses the experts of tokens x [.., H] by float32 logits.

        token_ids: [..] integers, for a layer with an `expert_table`. A number that is in no row of
          the table chooses no expert: ids -1 and weights 0.

        Raises:
          TypeError: x is no array of floats, or `token_ids` none of integers.
          ValueError: x has another H, `token_ids` another shape, or the layer has a table and there
            are none.
        """
        op, hidden = "LoadedLayer.route", self.router.shape[1]
        _checks.check_float(op, "x", x)
        if x.shape[-1:] != (hidden,):
            rule = f"x must have shape [.., H] with H = {hidden} of the router"
            raise ValueError(_checks.message(op, rule, x=x))
        # GPUs would round the factors of a float32 product, and other experts would be chosen.
        x, router = x.astype(jnp.float32), self.router.astype(jnp.float32)
        logits = jnp.einsum("...h,eh->...e", x, router, precision=jax.lax.Precision.HIGHEST)
        if self.router_bias is not None:
            lead = (1,) * (logits.ndim - 1)
            logits = logits + self.router_bias.astype(jnp.float32).reshape(*lead, -1)
        given = _given(self.options)
        if self.expert_table is not None:
            given["expert_ids"] = _looked_up(op, self.expert_table, token_ids, x)
        elif self.selection_bias is not None:
            given["bias"] = self.selection_bias
        return route(logits, **given)

    def __call__(
        self,
        x: jax.Array,
        token_ids: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """The layer's result for tokens x [.., H]; `options` are those of `jaxmoe.moe_mlp`."""
        routing, call = self.route(x, token_ids), dict(self.call)
        if self.latent is None:
            return moe_mlp(x, routing, self.experts, residual=residual, **call, **options)
        inner = lambda z: moe_mlp(z, routing, self.experts, **call, **options)  # noqa: E731
        return self.latent(inner, x, residual)


def load(
    directory: str | Path,
    *,
    layers: Sequence[int] | None = None,
    dtype: Any = "bfloat16",
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] | None = None,
    progress: Progress | None = None,
) -> dict[int, LoadedLayer]:
    """Reads the layers of experts of a model, as the files store them.

    Weights keep their format: bf16, FP8 and every format of 4 bits that `jaxmoe.checkpoints` reads,
    known by the names and dtypes of the tensors. FP8 weights with one scale a matrix keep the
    static scales of their inputs, if the files have some: `x_scale` and `h_scale` are the largest
    of all experts. Scales of inputs beside other weights are not used. Files are read by threads,
    in order and a gigabyte ahead, so the process holds two or three of its own beside what lies on
    the devices.

    Args:
      directory: with config.json and model.safetensors, or its shards and their index. A tensor is
        read from the file that the index names.
      layers: numbers of the layers to read; None: all that have experts.
      dtype: bfloat16, float16 or float32, or such a name: of the tokens that quantized weights
        meet, of biases beside these and of FP8 products around experts. int4, GPTQ and AWQ weights,
        whose scales have 16 bits and are rounded to it, refuse float32. Plain weights stay in the
        dtype of the files.
      mesh: None: weights lie on JAX's default device. Else they lie on the mesh, split over
        `axis` by experts, and each process reads those of its own devices alone.
      axis: name of the axis of `mesh` that experts are split over, or a tuple of names, the first
        of which splits them into the largest parts; None: every device has all.
      progress: called with bytes read, bytes to read and the name of the weight, after each.

    Returns:
      The layers by number.

    Raises:
      FileNotFoundError: no config.json or no files, or one that the index names is missing, or one
        of a set that is numbered.
      LookupError: a tensor, bias or scale is missing, which the message names; no such layer.
      TypeError: `layers`, `dtype`, `mesh` or `progress` of another kind.
      ValueError: a file that is cut off or broken, a configuration without a number that is needed,
        tensors that do not go together or with the configuration, a tensor that is in two files,
        experts that `axis` does not divide, another `dtype`.
      NotImplementedError: a model or a format that is not known, a rule of routing that the model
        type does not have, or a tensor that has no reader.

    Numerics: no number changes but where `jaxmoe.checkpoints` says so. Routing is float32.
    Source: config.json and the model code of Hugging Face transformers.

    Example:
      >>> import jaxmoe
      >>> layers = jaxmoe.load("Qwen3-30B-A3B")  # doctest: +SKIP
      >>> y = jax.jit(lambda layer, x: layer(x))(layers[0], x)  # doctest: +SKIP
    """
    if progress is not None and not callable(progress):
        rule = "progress must be a function of bytes read, bytes to read and a name, or None"
        raise TypeError(_checks.message(OP, rule, progress=progress))
    model = Model(directory, dtype)
    chosen = list(model.blocks) if layers is None else _numbers(layers)
    spread = Spread(mesh, axis, model.num_experts)
    blocks = {number: model.block(number) for number in chosen}
    everyone = range(model.num_experts)
    weights = [weight for block in blocks.values() for weight in block.weights]
    total = sum(weight.nbytes(model.shards, everyone) for weight in weights)
    pieces = (
        piece
        for weight in weights
        for part in spread.parts()
        for piece in weight.pieces(model.shards, part)
    )
    out, done = {}, 0
    with Ahead(model.shards, pieces) as files:
        for number, block in blocks.items():
            read: list[Any] = []
            for weight in block.weights:
                jax.block_until_ready(read[-1:])  # until then its bytes are on the host as well
                read.append(spread(lambda part, w=weight: w.read(files, part)))
                done += weight.nbytes(model.shards, everyone)
                if progress is not None:
                    progress(done, total, f"{weight.stem}{weight.parts[0]}")
            out[number] = model.layer(block, read, spread.everywhere)
    return out


def _looked_up(op: str, table: jax.Array, token_ids: Any, x: jax.Array) -> jax.Array:
    """The experts of tokens, -1 for a token that the table does not have."""
    if token_ids is None:
        rule = "token_ids must be given to a layer with a table"
        raise ValueError(_checks.message(op, rule))
    _checks.check_dtype(op, "token_ids", token_ids, _INTEGERS)
    _checks.check_shape(op, "token_ids", token_ids, x.shape[:-1], "the axes of tokens of x")
    if token_ids.dtype.itemsize < 4:  # a number of rows may be none of so few bits
        token_ids = token_ids.astype(np.int32)
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    return jnp.where(known[..., None], table[jnp.where(known, token_ids, 0)], -1)


def _given(options: Any) -> dict[str, Any]:
    """Options of `jaxmoe.route`, which a pytree has as pairs."""
    given = dict(options)
    if isinstance(given.get("method"), tuple):
        given["method"] = RoutingMethod(**dict(given["method"]))
    return given


def _numbers(layers: Sequence[int]) -> list[int]:
    try:
        return list(map(operator.index, layers))
    except TypeError:
        rule = f"layers={layers!r} must be a sequence of integers or None"
        raise TypeError(_checks.message(OP, rule)) from None


class Block(NamedTuple):
    """Where the tensors of a layer's module are, which all are there and go together."""

    at: str
    weights: list[Stored]
    router: router.Router
    config: settings.Config
    options: dict[str, Any]  # of `jaxmoe.route`
    activation: str | Activation


class Model:
    """A folder's configuration, and where its layers are."""

    def __init__(self, directory: str | Path, dtype: Any) -> None:
        """Reads the configuration and the headers of the files."""
        if not isinstance(dtype, str | None):  # NumPy takes None for float64
            with contextlib.suppress(TypeError):  # what is no dtype is refused as what it is
                dtype = np.dtype(dtype).name
        _checks.check_choice(OP, "dtype", dtype, _checks.FLOATS)
        _checks.check_type(OP, "directory", directory, str | os.PathLike, "a path")
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"jaxmoe.{OP}: {directory} has no config.json{other(path)}")
        family, self.config = families.of(parsed(path, path.read_bytes()))
        self.quantization = settings.section(self.config, "quantization_config")
        self.shards = Shards(directory)
        self.family = family.among(self.shards.names)
        self.num_experts = settings.num_experts(self.config)
        self.dtype = str(dtype)
        # Modules that predict further tokens lie behind the layers; `blocks` leaves out those that
        # are modules of their own, whose layers count from 0 again.
        count = settings.count(self.config, "num_hidden_layers", default=1 << 30)
        found = self.family.blocks(self.shards.names)
        self.blocks = {number: at for number, at in found.items() if number < count}
        if not self.blocks:
            places = filter(None, ("layers.N", self.family.block, self.family.weights[-1]))
            stem = ".".join(places)
            have = ", ".join(self.shards.names[:3]) or "none"
            raise LookupError(
                f"jaxmoe.{OP}: {directory} has no layer with tensors {stem}; it has "
                f"{len(self.shards.names)} tensors: {have}, .."
            )

    def block(self, number: int) -> Block:
        """The tensors of a layer's module."""
        if number not in self.blocks:
            known = ", ".join(map(str, self.blocks))
            raise LookupError(f"jaxmoe.{OP}: layer {number} has no experts, layers {known} have")
        at = self.blocks[number]
        if others := self.family.of_no_weight(self.shards.parts(f"{at}.experts")):
            named = ", ".join(f"{at}.{stem}" for stem in self.family.weights)
            raise NotImplementedError(
                f"jaxmoe.{OP}: {at}.experts{others[0]} has no reader: it belongs to none of {named}"
            )
        weights: list[Stored] = []
        for stem in self.family.weights:
            weight = find.find(self.shards, f"{at}.{stem}", self.quantization, self.dtype)
            said = settings.name_of(self.config, settings.EXPERTS)
            weight.check(self.shards, self.num_experts, said)
            weights.append(weight)
        config = self.family.at_layer(self.config, number)
        options, activation = self.family.routing(config), self.family.acts(config)
        found = router.find(self.shards, at, self.family, config, self.num_experts)
        self._check_options(found, options)
        return Block(at, weights, found, config, options, activation)

    def _check_options(self, names: router.Router, options: dict[str, Any]) -> None:
        """Refuses now what `jaxmoe.route` would refuse when the layer is called."""
        rows: dict[str, tuple[int, ...]] = {"logits": (1, self.num_experts)}
        if names.selection_bias is not None and names.table is None:
            rows["bias"] = (self.num_experts,)
        shapes = {name: jax.ShapeDtypeStruct(row, np.float32) for name, row in rows.items()}
        with naming("config.json"):
            jax.eval_shape(functools.partial(route, **_given(options)), **shapes)

    def layer(
        self, block: Block, weights: Sequence[Any], place: Callable[[Any], Any]
    ) -> LoadedLayer:
        """The layer of a module, of weights that have been read or their shapes."""

        def tensor(name: str | None) -> Any:
            return None if name is None else place(self.shards[name])

        family, names = self.family, block.router
        quantized = isinstance(weights[0], QuantizedArray)
        fields = dict(zip(family.parts, weights, strict=True))
        fields |= self._biases(block, place, quantized)
        fields |= self._input_scales(block, place)
        self._check_formats(block.at, dict(zip(family.parts, weights, strict=True)))
        with naming(block.at):
            experts = Experts(
                **fields,
                activation=block.activation,
                order=family.order,
                layout="nk" if quantized else family.layout,
            )
        around = self._latent(block, experts.hidden)
        hidden = experts.hidden if around is None else around.after.shape[0]
        self.shards.check_float(names.weight, self.num_experts, hidden)
        table = None if names.table is None else self.shards[names.table]
        choice = names.selection_bias
        return LoadedLayer(
            experts,
            tensor(names.weight),
            tensor(names.bias),
            None if choice is None else place(self.shards[choice].reshape(-1)),
            None if table is None else place(table.astype(np.int32)),  # int64 in the files
            tuple(sorted(block.options.items())),
            family.call,
            jax.tree.map(place, around),
        )

    def _check_formats(self, at: str, weights: Mapping[str, Any]) -> None:
        """Refuses rows with one scale of which only `group_size` says how they are stored."""
        said = {k: w.format for k, w in weights.items() if isinstance(w, QuantizedArray)}
        unknown = find.group_size(self.quantization) is None
        if unknown and len(set(said.values())) > 1 and "channel" in str(said):
            raise ValueError(
                f"jaxmoe.{OP}: {at} has weights in {said}: group_size of quantization_config of "
                "config.json must say whether a row with one scale is a group or has no groups"
            )

    def _latent(self, block: Block, inner: int) -> LatentSpace | None:
        hidden = self.shards.shape(block.router.weight)[1]
        args = self.shards, block.at, self.family, block.config, self.dtype, hidden, inner
        return latent.find(*args)

    def _biases(self, block: Block, place: Callable[[Any], Any], quantized: bool) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for part, weight in zip(self.family.parts, block.weights, strict=True):
            name = f"{weight.stem}_bias"
            if self.family.biased or (weight.stacked and name in self.shards):
                self.shards.check_float(name)
                bias = self.shards[name]
                out[f"{part}_bias"] = place(bias.astype(self.dtype) if quantized else bias)
        return out

    def _input_scales(self, block: Block, place: Callable[[Any], Any]) -> dict[str, Any]:
        """The static scales of x and of the activation's result, of all experts the largest."""
        if not any(weight.static for weight in block.weights):
            return {}
        *first, last = (
            weight.largest_input_scale(self.shards, self.num_experts) for weight in block.weights
        )
        return {"x_scale": place(max(first)), "h_scale": place(last)}
