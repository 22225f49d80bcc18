"""How files store the weight of experts, known by the names and dtypes of its tensors."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import checkpoints
from jaxmoe._load.ahead import Ahead
from jaxmoe._load.shards import OP, Piece, Shards

_FLOATS = ("bfloat16", "float16", "float32")
_GPTQ = ("gptq", "gptq_v2")
# Of a weight's tensors those that change nothing: scales of inputs, which are not quantized, and
# what is checked.
_OTHERS = (".input_scale", ".input_global_scale", ".weight_shape")
_CHUNK_BYTES = 1 << 29  # of host memory, for tensors that are stacked


@dataclasses.dataclass(frozen=True)
class Stored:
    """The weight of a layer's experts in files.

    Attributes:
      kind: the reader of `jaxmoe.checkpoints`, or the dtype of plain weights.
      stem: the name of its tensors up to the part's; `{e}` is an expert.
      parts: what follows the stem, in the order of the reader's arguments.
      reader: from the stacked tensors to an array or `jaxmoe.QuantizedArray`; None: as they are.
      checked: the last part does not change, and is checked against the others.
    """

    kind: str
    stem: str
    parts: tuple[str, ...]
    reader: Callable[..., Any] | None
    checked: bool = False

    @property
    def stacked(self) -> bool:
        return "{e}" not in self.stem

    def names(self, experts: range) -> list[str]:
        """The tensors of these experts."""
        stems = [self.stem] if self.stacked else [self.stem.format(e=e) for e in experts]
        return [stem + part for stem in stems for part in self.parts]

    def nbytes(self, shards: Shards, experts: range) -> int:
        """The bytes of these experts."""
        total = sum(map(shards.nbytes, self.names(experts)))
        if not self.stacked:
            return total
        return total * len(experts) // max(shards[self.stem + self.parts[0]].shape[0], 1)

    def read(self, files: Ahead, experts: range) -> Any:
        """The weight of these experts on JAX's default device, some experts at a time."""
        read: list[Any] = []
        for some in self._chunks(files.shards, experts):
            jax.block_until_ready(read[-1:])  # until then its bytes are on the host as well
            read.append(self._chunk(files, some))
        return read[0] if len(read) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *read)

    def pieces(self, shards: Shards, experts: range) -> Iterator[Piece]:
        """What `read` takes from files, in its order."""
        for some in self._chunks(shards, experts):
            for part in self.parts:
                yield self._piece(shards, part, some)

    def _chunks(self, shards: Shards, experts: range) -> list[range]:
        step = max(1, _CHUNK_BYTES // max(self.nbytes(shards, experts[:1]), 1))
        return [experts[i : i + step] for i in range(0, len(experts), step)]

    def _chunk(self, files: Ahead, experts: range) -> Any:
        taken = (self._piece(files.shards, part, experts) for part in self.parts)
        *parts, last = [files.take(piece) for piece in taken]
        if self.reader is None:
            return jax.device_put(last)
        try:
            if not self.checked:
                return _compiled(self.reader)(*parts, last)
            # By its numbers, which a compiled program would not know.
            jax.eval_shape(functools.partial(self._checked, last), *parts)
            return _compiled(self.reader)(*parts)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"jaxmoe.{OP}: {self.stem}: {error}") from error

    def _checked(self, last: Any, *parts: Any) -> Any:
        assert self.reader is not None
        return self.reader(*parts, last)

    def _piece(self, shards: Shards, part: str, experts: range) -> Piece:
        if self.stacked:
            return shards.part(self.stem + part, experts.start, experts.stop)
        names = [self.stem.format(e=e) + part for e in experts]
        shapes = set(map(shards.shape, names))
        if len(shapes) > 1:
            raise ValueError(
                f"jaxmoe.{OP}: {self.stem}{part} must have one shape, not "
                f"{', '.join(map(str, sorted(shapes)))}"
            )
        return shards.stacked(names)


@functools.lru_cache(maxsize=32)
def _compiled(reader: Callable[..., Any]) -> Callable[..., Any]:
    # What runs once for a weight, and takes milliseconds: XLA measures for seconds how to.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    return jax.jit(reader, compiler_options=options)


@functools.lru_cache(maxsize=64)
def _with(reader: Callable[..., Any], names: tuple[str, ...], **options: str) -> Any:
    """A reader whose arguments after the first two have these names, with options."""

    def read(first: Any, second: Any, *others: Any) -> Any:
        return reader(first, second, **dict(zip(names, others, strict=False)), **options)

    return read


def find(shards: Shards, stem: str, quantization: Mapping[str, Any], dtype: str) -> Stored:
    """How the weight of that stem is stored.

    Args:
      stem: up to the part's name: "model.layers.0.mlp.experts.{e}.gate_proj".
      quantization: `quantization_config` of config.json, or an empty one.
      dtype: what quantized weights are dequantized to.

    Raises:
      LookupError: a tensor is missing, which the message names.
      NotImplementedError: weights that no reader knows, or a tensor of theirs that it does not
        read, like `pre_quant_scale`.
    """
    first = stem.format(e=0)
    found = _find(shards, stem, quantization, dtype)
    apart = ("_bias",) if found.stacked else ()  # read by the layer
    known = {first + part for part in (*found.parts, *_OTHERS, *apart)}
    for name in (*shards.beginning(f"{first}."), *shards.beginning(f"{first}_")):
        if name not in known and not _is_zero(shards, stem, name.removeprefix(first)):
            raise NotImplementedError(
                f"jaxmoe.{OP}: {name} has no reader, beside weights that {found.kind} reads"
            )
    return found


def _is_zero(shards: Shards, stem: str, part: str) -> bool:
    """Whether a part is a bias of zeros, which tools for GPTQ write, in all experts."""
    if part != ".bias" or "{e}" not in stem:
        return False
    names = (stem.format(e=e) + part for e in itertools.count())
    return not any(shards[name].any() for name in itertools.takewhile(shards.__contains__, names))


def _find(shards: Shards, stem: str, quantization: Mapping[str, Any], dtype: str) -> Stored:
    first = stem.format(e=0)

    def has(part: str) -> bool:
        return first + part in shards

    def stored(
        reader: Any,
        *parts: str,
        named: tuple[str, ...] = (),
        checked: bool = False,
        **options: str,
    ) -> Stored:
        for part in parts:
            shards.dtype(first + part)  # names the one that is missing
        kind = reader.__name__.removeprefix("from_")
        return Stored(kind, stem, parts, _with(reader, named, dtype=dtype, **options), checked)

    def refused(why: str) -> NotImplementedError:
        return NotImplementedError(f"jaxmoe.{OP}: {first}{why}")

    if has(".qweight"):
        method = str(quantization.get("quant_method", ""))
        bits = quantization.get("bits", 4)
        if bits != 4:
            raise refused(f".qweight has {bits} bits, not 4")
        parts = (".qweight", ".qzeros", ".scales")
        if method == "awq":
            return stored(checkpoints.from_awq, *parts, named=("scales",))
        variant = str(quantization.get("checkpoint_format") or "gptq")
        if variant not in _GPTQ:
            raise refused(f".qweight has checkpoint_format {variant!r}, not {' or '.join(_GPTQ)}")
        order = (".g_idx",) if has(".g_idx") else ()
        read = functools.partial(stored, checkpoints.from_gptq, checkpoint_format=variant)
        return read(*parts, *order, named=("scales", "g_idx"), checked=bool(order))
    if has("_blocks"):
        return stored(checkpoints.from_mxfp4, "_blocks", "_scales")
    if has(".weight_packed"):
        parts = (".weight_packed", ".weight_scale")
        if shards.dtype(first + ".weight_packed") == np.int32:
            words = shards[first + ".weight_packed"].shape[-1]
            if has(".weight_shape") and shards[first + ".weight_shape"][-1] != 8 * words:
                k = shards[first + ".weight_shape"][-1]
                raise refused(f".weight_packed has {words} words for K={k}: not 4 bits")
            more = {".weight_zero_point": "weight_zero_point", ".weight_g_idx": "g_idx"}
            more = {part: name for part, name in more.items() if has(part)}
            named, checked = tuple(more.values()), ".weight_g_idx" in more
            return stored(checkpoints.from_int4, *parts, *more, named=named, checked=checked)
        if shards.dtype(first + ".weight_scale") == np.uint8:
            return stored(checkpoints.from_mxfp4, *parts)
        common = "weight_global_scale"
        return stored(checkpoints.from_nvfp4, *parts, f".{common}", named=(common,))
    if not has(".weight") and not has(""):
        raise LookupError(
            f"jaxmoe.{OP}: {shards.directory} has no tensor {first + '.weight'!r}, nor one whose "
            "name ends on .weight_packed, .qweight or _blocks in its place"
        )
    part = ".weight" if has(".weight") else ""
    kind = str(shards.dtype(first + part))
    if kind == "float8_e4m3fn":
        if has(".weight_scale_inv"):
            return stored(checkpoints.from_block, part, ".weight_scale_inv")
        if has(".weight_scale") and shards.dtype(first + ".weight_scale") == np.uint8:
            return stored(checkpoints.from_mxfp8, part, ".weight_scale")
        return stored(checkpoints.from_compressed_tensors, part, ".weight_scale")
    if kind == "uint8":
        common = "weight_scale_2"
        parts = (part, ".weight_scale", f".{common}")
        return stored(checkpoints.from_nvfp4, *parts, named=(common,))
    if kind == "int8" and has(".weight_scale"):
        raise refused(f"{part} is int8 beside .weight_scale (int-quantized), which has no reader")
    if kind == "int8":
        return stored(checkpoints.from_mxfp4, part, ".scale")
    if kind not in _FLOATS:
        raise refused(f"{part} is {kind}, which no reader knows")
    return Stored(kind, stem, (part,), None)
