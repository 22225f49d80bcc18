"""From a folder with a model's config.json and safetensors files to its layers of experts."""

import contextlib
import dataclasses
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe._jax import checks as _checks
from jaxmoe._load import families, find, latent, quantization, router, settings
from jaxmoe._load.ahead import Ahead
from jaxmoe._load.chosen import chosen
from jaxmoe._load.files import OP, naming, other, parsed
from jaxmoe._load.latent import LatentSpace
from jaxmoe._load.layer import LoadedLayer as LoadedLayer
from jaxmoe._load.norms import InputNorm
from jaxmoe._load.shards import Shards
from jaxmoe._load.spread import AxisNames, Spread
from jaxmoe._load.stored import Stored
from jaxmoe.activation import Activation
from jaxmoe.experts import Experts
from jaxmoe.quantize import QuantizedArray

Progress = Callable[[int, int, str], None]


def load(
    directory: str | Path,
    *,
    layers: Sequence[int] | None = None,
    dtype: Any = "bfloat16",
    mesh: Mesh | None = None,
    axis: AxisNames = None,
    tensor_axis: AxisNames = None,
    hidden_axis: AxisNames = None,
    tower: str | None = None,
    token_format: str | None = None,
    progress: Progress | None = None,
) -> dict[int, LoadedLayer]:
    """Reads the layers of experts of a model, as the files store them.

    Weights keep their format: bf16, FP8 and every format of 4 bits that `jaxmoe.checkpoints` reads,
    known by the names and dtypes of the tensors. int4 weights whose columns were sorted, so that a
    group is any of the inputs, are in no format: their layer has plain weights in `dtype`. FP8
    weights with one scale a matrix keep the static scales of their inputs, if the files have some:
    `x_scale` and `h_scale` are the largest of all experts. So do packed weights with
    `token_format`. Scales of inputs beside other weights are not used. Files are read by threads,
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
      mesh: None: weights lie on JAX's default device. Else they and their biases lie on the mesh,
        split over `axis` by experts, and each process reads those of its own devices alone.
      axis: name of the axis of `mesh` that experts are split over, or a tuple of names, the first
        of which splits them into the largest parts; None: every device has all.
      tensor_axis: the same of the axis that I is split over (tensor parallelism). Gates and ups in
        one array become `gate` and `up`, unless they are interleaved, so that a gate and its up
        are on one device.
      hidden_axis: the same of the axis that H of all weights is split over, which FSDP names as
        `gather_weights` of `jaxmoe.moe_mlp`. For both, experts are read whole, some at a time, and
        cut on one of the devices that have them.
      tower: which layers to read of a model with several stacks of them, "encoder" or "decoder" and
        the like, or with several kinds of experts in a layer, "text" or "vision"; the error that
        there is without it names them.
      token_format: how the layers round tokens beside packed weights, as in `jaxmoe.Experts`. In
        "nvfp4" and "e4m3" by the static scales of the files, if these have some.
      progress: called with bytes read, bytes to read and the name of the weight, after each.

    Returns:
      The layers by number.

    Raises:
      FileNotFoundError: no config.json or no files, or one that the index names is missing, or one
        of a set that is numbered.
      LookupError: a tensor, bias or scale is missing, which the message names; no such layer.
      TypeError: `layers`, `dtype`, `mesh` or `progress` of another kind.
      ValueError: a file that is cut off or broken, a configuration without a number that is needed,
        tensors that do not go together or with the configuration (bits and groups of weights, too),
        a tensor that is in two files, experts that `axis` does not divide, I or H that
        `tensor_axis` or `hidden_axis` does not divide between blocks of the format, an axis that
        two of these name, another `dtype`, or no tower of that name.
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
    model = Model(directory, dtype, tower, token_format)
    numbers = list(model.blocks) if layers is None else _numbers(layers)
    axes = {"axis": axis, "tensor_axis": tensor_axis, "hidden_axis": hidden_axis}
    spread = Spread(mesh, model.num_experts, **axes)
    blocks = {number: model.block(number) for number in numbers}
    out: dict[int, LoadedLayer] = {}  # of weights that are shapes, until these are read
    for number, block in blocks.items():
        shapes = [weight.shape(model.shards, model.num_experts) for weight in block.weights]
        out[number] = model.layer(block, shapes, spread.everywhere)
        with naming(block.at):
            spread.check(out[number].experts)
    everyone = range(model.num_experts)
    weights = [weight for block in blocks.values() for weight in block.weights]
    total = sum(weight.nbytes(model.shards, everyone) for weight in weights)
    pieces = (
        piece
        for weight in weights
        for part in spread.parts()
        for piece in weight.pieces(model.shards, part)
    )
    done = 0
    with Ahead(model.shards, pieces) as files:
        for number, block in blocks.items():
            experts, read = out[number].experts, dict[str, Any]()
            for part, weight in zip(model.family.parts, block.weights, strict=True):
                jax.block_until_ready(read)  # until then its bytes are on the host as well
                read |= spread.weight(weight, files, part, experts)
                done += weight.nbytes(model.shards, everyone)
                if progress is not None:
                    progress(done, total, f"{weight.stem}{weight.parts[0]}")
            out[number] = dataclasses.replace(out[number], experts=spread.experts(experts, read))
    return out


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

    def __init__(
        self,
        directory: str | Path,
        dtype: Any,
        tower: str | None = None,
        token_format: str | None = None,
    ) -> None:
        """Reads the configuration and the headers of the files."""
        if not isinstance(dtype, str | None):  # NumPy takes None for float64
            with contextlib.suppress(TypeError):  # what is no dtype is refused as what it is
                dtype = np.dtype(dtype).name
        _checks.check_choice(OP, "dtype", dtype, _checks.FLOATS)
        _checks.check_type(OP, "directory", directory, str | os.PathLike, "a path")
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"jaxmoe.{OP}: {directory} has no config.json{other(path)}")
        family, self.config = families.of(parsed(path, path.read_bytes()), tower)
        self.quantization = settings.section(self.config, "quantization_config")
        self.shards = Shards(directory)
        self.family = family.among(self.shards.names)
        self.num_experts = settings.num_experts(self.config)
        self.dtype, self.token_format = str(dtype), token_format
        # Modules that predict further tokens lie behind the layers; `blocks` leaves out those that
        # are modules of their own, whose layers count from 0 again.
        count = settings.count(self.config, "num_hidden_layers", default=1 << 30)
        found = self.family.blocks(self.shards.names)
        self.blocks = {number: at for number, at in found.items() if number < count}
        if not self.blocks:
            family, module = self.family, self.family.tower.module
            places = module, f"{family.layers}.N", family.block, family.weights[-1]
            stem = ".".join(filter(None, places))
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
        how: Any = {"tokens": self.token_format, **self.family.experts(self.config)}
        for stem in self.family.weights:
            stem = f"{at}.{stem}"
            weight = find.find(self.shards, stem, self.quantization, self.dtype, **how)
            said = settings.name_of(self.config, settings.EXPERTS)
            weight.check(self.shards, self.num_experts, said)
            weights.append(weight)
        # A layer has one format: without one for a weight there is none for the others.
        if any(weight.is_sorted(self.shards, self.num_experts) for weight in weights):
            weights = [weight.as_decoded() for weight in weights]
        config = self.family.at_layer(self.config, number)
        options, activation = self.family.routing(config), self.family.acts(config)
        found = router.find(self.shards, at, self.family, config)
        if (factor := found.read_scale(self.shards)) != 1:
            options["scale"] = factor * options.get("scale", 1.0)
        self._check_options(found, options)
        return Block(at, weights, found, config, options, activation)

    def _check_options(self, names: router.Router, options: dict[str, Any]) -> None:
        """Refuses now what `jaxmoe.route` would refuse when the layer is called."""
        logits = jax.ShapeDtypeStruct((1, names.rows), np.float32)
        bias = None
        if names.selection_bias is not None and names.table is None:
            choices = names.rows - self.family.num_shared(self.config)
            bias = jax.ShapeDtypeStruct((choices,), np.float32)
        with naming("config.json"):
            jax.eval_shape(lambda logits, bias: chosen(logits, options, bias=bias), logits, bias)

    def layer(
        self, block: Block, weights: Sequence[Any], place: Callable[[Any], Any]
    ) -> LoadedLayer:
        """The layer of a module, of weights that have been read or their shapes."""

        def tensor(name: str | None) -> Any:
            return None if name is None else place(self.shards[name])

        family, names = self.family, block.router
        quantized = block.weights[0].reader is not None  # or it was, and is in `dtype`
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
                token_format=self.token_format,
            )
        around = self._latent(block, experts.hidden)
        hidden = experts.hidden if around is None else around.after.shape[0]
        names.check(self.shards, hidden)
        table = None if names.table is None else self.shards[names.table]
        choice = names.read_choice(self.shards)
        more = names.rows - self.num_experts  # logits of experts that have no weights
        return LoadedLayer(
            experts,
            place(names.read_weight(self.shards)),
            tensor(names.bias),
            None if choice is None else place(choice),
            None if table is None else place(table.astype(np.int32)),  # int64 in the files
            tuple(sorted(block.options.items())),
            (*family.call, *((("num_experts", names.rows),) if more else ())),
            jax.tree.map(place, around),
            self._norm(block, place, hidden),
            tensor(names.expert_scale),
            family.num_copies(block.config),
        )

    def _norm(self, block: Block, place: Callable[[Any], Any], hidden: int) -> InputNorm | None:
        """The norm of what router and experts read."""
        if self.family.norms is None:
            return None
        name = f"{block.at}.{self.family.norms.experts}.weight"
        self.shards.check_float(name, hidden)
        return InputNorm(place(self.shards[name]), settings.real(block.config, "rms_norm_eps"))

    def _check_formats(self, at: str, weights: Mapping[str, Any]) -> None:
        """Refuses rows with one scale of which only `group_size` says how they are stored."""
        said = {k: w.format for k, w in weights.items() if isinstance(w, QuantizedArray)}
        unknown = quantization.group_size(self.quantization) is None
        if unknown and len(set(said.values())) > 1 and "channel" in str(said):
            raise ValueError(
                f"jaxmoe.{OP}: {at} has weights in {said}: group_size of quantization_config of "
                "config.json must say whether a row with one scale is a group or has no groups"
            )

    def _latent(self, block: Block, inner: int) -> LatentSpace | None:
        hidden = block.router.hidden(self.shards)
        args = self.shards, block.at, self.family, block.config, self.dtype, hidden, inner
        return latent.find(*args)

    def _biases(self, block: Block, place: Callable[[Any], Any], quantized: bool) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for part, weight in zip(self.family.parts, block.weights, strict=True):
            names = weight.bias_names(range(self.num_experts))
            if self.family.biased or (weight.stacked and names[0] in self.shards):
                for name in names:
                    self.shards.check_float(name, *self.shards.shape(names[0]))
                biases = [self.shards[name] for name in names]
                out[f"{part}_bias"] = biases[0] if weight.stacked else np.stack(biases)
        if self.family.sum_bias:
            name = f"{block.at}.{self.family.sum_bias}"
            self.shards.check_float(name, block.router.hidden(self.shards))
            bias = self.shards[name]
            # The weights of a token add to 1, so that each expert may have it.
            out["down_bias"] = np.broadcast_to(bias, (self.num_experts, *bias.shape))
        return {k: place(v.astype(self.dtype) if quantized else v) for k, v in out.items()}

    def _input_scales(self, block: Block, place: Callable[[Any], Any]) -> dict[str, Any]:
        """The static scales of x and of the activation's result, of all experts the largest."""
        if not any(weight.static for weight in block.weights):
            return {}
        largest = (w.largest_input_scale(self.shards, self.num_experts) for w in block.weights)
        *first, last = largest
        return {"x_scale": place(max(first)), "h_scale": place(last)}
