"""The weight of a layer's experts in files: the arrays of its tensors, some experts at a time."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._jax.checks import FLOATS
from jaxmoe._load.ahead import Ahead
from jaxmoe._load.files import OP, naming
from jaxmoe._load.shards import Piece, Shards

INPUT_SCALE, INPUT_DIVISOR = ".input_scale", ".input_global_scale"  # one is 1 over the other
SHAPE = ".weight_shape"
# Of a weight's tensors those that no reader takes: scales of inputs, which are of use where all
# inputs of an expert have one, and what is checked.
_OTHERS = frozenset((INPUT_SCALE, INPUT_DIVISOR, SHAPE))
# Factors of all of a weight, where an expert has one number; those of its parts may be 0.
_FACTORS = (".weight_scale", ".weight_scale_2", ".weight_global_scale")
_CHUNK_BYTES = 1 << 29  # of host memory, for tensors that are stacked
_DECODED = 4  # bytes of a decoded weight for one of its tensors


@dataclasses.dataclass(frozen=True)
class Stored:
    """The weight of a layer's experts in files.

    Attributes:
      kind: the reader of `jaxmoe.checkpoints`, or the dtype of plain weights.
      stem: the name of its tensors up to the part's; `{e}` is an expert.
      parts: what follows the stem, in the order of the reader's arguments.
      reader: from the stacked tensors to an array or `jaxmoe.QuantizedArray`; None: as they are.
      checked: the last part is the group of each input, which is checked and not read.
      unsorted: what the configuration has if groups must be of neighbours, else "".
      decoder: in the place of `reader`, for groups of any inputs: it takes the last part too and
        returns plain weights; None: there is none.
      decoded: `reader` is this one.
      static: what of each expert is the scale of its inputs, `INPUT_SCALE` or `INPUT_DIVISOR`, if
        the layer uses it; else "".
      shaped: each expert has `SHAPE`, which is checked against words of eight codes along k.
      start: the number of the first expert in names.
      total: experts that names have; 0: those of the weight.
      spare: further ones that names may have, which are not read.
      joined: experts whose rows a plain tensor has one after the other; 0: it has an axis of them.
      biased: experts have biases, which the layer reads.
    """

    kind: str
    stem: str
    parts: tuple[str, ...]
    reader: Callable[..., Any] | None
    checked: bool = False
    static: str = ""
    shaped: bool = False
    start: int = 0
    total: int = 0
    spare: int = 0
    joined: int = 0
    biased: bool = False
    unsorted: str = ""
    decoder: Callable[..., Any] | None = None
    decoded: bool = False

    @property
    def stacked(self) -> bool:
        return "{e}" not in self.stem

    def _stems(self, experts: range) -> list[str]:
        return [self.stem] if self.stacked else list(map(self._stem, experts))

    def _stem(self, expert: int) -> str:
        return self.stem.format(e=self.start + expert)

    def names(self, experts: range) -> list[str]:
        """The tensors of these experts."""
        return [stem + part for stem in self._stems(experts) for part in self.parts]

    def bias_names(self, experts: range) -> list[str]:
        """The tensors of their biases, which the layer reads if there are some."""
        return (
            [f"{self.stem}_bias"] if self.stacked else [f"{s}.bias" for s in self._stems(experts)]
        )

    @property
    def _read_parts(self) -> tuple[str, ...]:
        return (*self.parts, SHAPE) if self.shaped else self.parts

    def check(self, shards: Shards, num_experts: int, said: str) -> None:
        """Refuses tensors that are missing, that no reader knows, or that do not go together.

        said: what the configuration calls the number of experts.

        Raises:
          LookupError: an expert lacks a tensor, which the message names.
          ValueError: experts of different tensors, dtypes or shapes, or another number of them.
          NotImplementedError: a tensor that the reader does not take, like `pre_quant_scale`.
        """
        self._check_count(shards, num_experts, f"jaxmoe.{OP}: {said} of config.json says ")
        stems = self._stems(range(num_experts))
        self._check_kinds(shards, stems)
        there = shards.parts(stems[0])
        apart = {"_bias"} if self.stacked else {".bias"} if self.biased else set[str]()
        for part in sorted(there.difference(self.parts, _OTHERS, apart)):
            if not self._is_zero(shards, stems, part):
                raise NotImplementedError(
                    f"jaxmoe.{OP}: {stems[0]}{part} has no reader, beside weights that {self.kind} "
                    "reads"
                )
        for stem in stems:
            for part in sorted((there ^ shards.parts(stem)) - _OTHERS):
                one, other = (stem, stems[0]) if part not in there else (stems[0], stem)
                raise ValueError(
                    f"jaxmoe.{OP}: there is a tensor {one}{part} and no {other}{part}: experts "
                    "must have the same"
                )

    def _check_kinds(self, shards: Shards, stems: list[str]) -> None:
        static = (self.static,) if self.static else ()
        for part in (*self._read_parts, *static):
            first = shards.kind(stems[0] + part)
            for stem in stems:
                dtype, shape = kind = shards.kind(stem + part)
                if kind != first:
                    raise ValueError(
                        f"jaxmoe.{OP}: {stem}{part} is {dtype} {list(shape)} and {stems[0]}{part} "
                        f"{first[0]} {list(first[1])}: experts must have one dtype and shape"
                    )

    def _check_count(self, shards: Shards, num_experts: int, says: str) -> None:
        says += f"{num_experts} experts, "
        if not self.stacked:
            before, after = self.stem.split("{e}")
            after += self.parts[0]
            there, total = set(map(int, shards.numbers(before, after))), self.total or num_experts
            if (last := max(there)) >= total + self.spare:
                raise ValueError(f"{says}the files have more: {before}{last}{after}")
            if len(there.intersection(range(total))) < total:
                missing = f"{before}{next(e for e in range(total) if e not in there)}{after}"
                raise LookupError(f"{says}{shards.directory} has no tensor {missing!r}")
            return
        for part in self.parts:
            shape = shards.shape(self.stem + part)
            if self.joined:
                fits = len(shape) == 2 and shape[0] % num_experts == 0
            else:
                fits = shape[:1] == (num_experts,)
            if not fits:
                raise ValueError(f"{says}{self.stem}{part} has the shape {list(shape)}")

    def _is_zero(self, shards: Shards, stems: list[str], part: str) -> bool:
        """Whether a part is a bias of zeros, which tools for GPTQ write, in all experts."""
        if part != ".bias" or self.stacked:
            return False
        names = [stem + part for stem in stems]
        return not any(shards[name].any() for name in names if name in shards)

    def is_sorted(self, shards: Shards, num_experts: int) -> bool:
        """Whether an expert has groups of others than neighbours, which no format has."""
        if not self.checked or self.unsorted:  # which is checked while it is read
            return False
        stems = self._stems(range(num_experts))
        return any(_falls(shards[stem + self.parts[-1]]) for stem in stems)

    def as_decoded(self) -> "Stored":
        """The same with the reader of groups of any inputs, if there is one."""
        if self.decoder is None:
            return self
        return dataclasses.replace(
            self, kind=f"{self.kind}, decoded", reader=self.decoder, checked=False, decoded=True
        )

    def largest_input_scale(self, shards: Shards, num_experts: int) -> np.float32:
        """The largest of the static scales of the experts' inputs, as multipliers.

        Raises:
          LookupError: there are none.
          ValueError: one that is no positive, finite number.
        """
        part = self.static or INPUT_SCALE
        names = [stem + part for stem in self._stems(range(num_experts))]
        for name in names:
            shards.check_float(name)
        scales = [np.asarray(shards[name], np.float32) for name in names]
        sizes = {1, num_experts} if self.stacked else {1}
        for name, scale in zip(names, scales, strict=True):
            if scale.size not in sizes or not ((scale > 0) & (scale < np.inf)).all():
                what = "one number, or one for each expert," if self.stacked else "one number,"
                rule = f"must be {what} positive and finite"
                raise ValueError(f"jaxmoe.{OP}: {name}={scale.tolist()} {rule}")
        if part == INPUT_DIVISOR:
            scales = [1 / scale for scale in scales]
        return np.float32(max(scale.max() for scale in scales))

    def nbytes(self, shards: Shards, experts: range) -> int:
        """The bytes of these experts."""
        total = sum(map(shards.nbytes, self.names(experts)))
        if not self.stacked:
            return total
        all_of_them = self.joined or shards.shape(self.stem + self.parts[0])[0]
        return total * len(experts) // max(all_of_them, 1)

    def shape(self, shards: Shards, num_experts: int) -> Any:
        """The weight of so many experts as shapes; nothing is read."""
        parts = self.parts[:-1] if self.checked else self.parts
        pieces = (self._piece(shards, part, range(num_experts)) for part in parts)
        first, *others = (jax.ShapeDtypeStruct(piece.shape, piece.dtype) for piece in pieces)
        if self.reader is None:
            return jax.eval_shape(functools.partial(self._apart, num_experts), first)
        with naming(self.stem):
            return jax.eval_shape(_compiled(self.reader), first, *others)

    def read(
        self, files: Ahead, experts: range, kept: Callable[[Any], Any] = lambda weight: weight
    ) -> Any:
        """What is `kept` of the weight of these experts, which is read some experts at a time.

        kept: from the weight of some experts on JAX's default device to a tree of arrays, whose
          first axis they are.
        """
        read: list[Any] = []
        for some in self._chunks(files.shards, experts):
            jax.block_until_ready(read[-1:])  # until then its bytes are on the host as well
            read.append(kept(self._chunk(files, some)))
        return read[0] if len(read) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *read)

    def pieces(self, shards: Shards, experts: range) -> Iterator[Piece]:
        """What `read` takes from files, in its order."""
        for some in self._chunks(shards, experts):
            for part in self._read_parts:
                yield self._piece(shards, part, some)

    def _chunks(self, shards: Shards, experts: range) -> list[range]:
        size = self.nbytes(shards, experts[:1]) * (_DECODED if self.decoded else 1)
        step = max(1, _CHUNK_BYTES // max(size, 1))
        return [experts[i : i + step] for i in range(0, len(experts), step)]

    def _chunk(self, files: Ahead, experts: range) -> Any:
        taken = (self._piece(files.shards, part, experts) for part in self.parts)
        arrays = [files.take(piece) for piece in taken]
        if self.shaped:
            shapes = files.take(self._piece(files.shards, SHAPE, experts))
            self._check_shapes(shapes, arrays, experts)
        self._check_factors(arrays, experts)
        *parts, last = arrays
        if self.reader is None:
            return jax.device_put(self._apart(len(experts), last))
        if self.unsorted and self.checked:
            self._check_order(last, experts)
        with naming(self.stem):
            if self.checked or self.decoded:
                # By its numbers, which a compiled program would not know.
                jax.eval_shape(functools.partial(self._checked, last), *parts)
            return _compiled(self.reader)(*parts, *(() if self.checked else (last,)))

    def _apart(self, num_experts: int, weight: Any) -> Any:
        """A plain weight with an axis of experts."""
        return weight.reshape(num_experts, -1, weight.shape[1]) if self.joined else weight

    def _check_shapes(
        self, shapes: np.ndarray[Any, Any], arrays: list[np.ndarray[Any, Any]], experts: range
    ) -> None:
        """Refuses words [E, N, K / 8] of other N and K than the files say."""
        words, *_ = arrays
        wanted = [*words.shape[1:-1], 8 * words.shape[-1]]
        for e, said in zip(experts, shapes.tolist(), strict=True):
            if said != wanted:
                raise ValueError(
                    f"jaxmoe.{OP}: {self._stem(e)}{SHAPE}={said} must be {wanted} "
                    "(N and K), by the words"
                )

    def _check_order(self, groups: np.ndarray[Any, Any], experts: range) -> None:
        """Refuses columns that are sorted where the configuration has that they are not."""
        if _falls(groups):
            e = experts[int(np.argmax((np.diff(groups) < 0).any(axis=-1)))]
            name = self._stem(e) + self.parts[-1]
            raise ValueError(
                f"jaxmoe.{OP}: {name} has sorted columns, groups of others than neighbours, and "
                f"quantization_config has {self.unsorted}"
            )

    def _check_factors(self, arrays: list[np.ndarray[Any, Any]], experts: range) -> None:
        """Refuses factors of whole weights that are no positive, finite numbers."""
        for part, array in zip(self.parts, arrays, strict=True):
            if part not in _FACTORS or array.size != len(array) or array.dtype.name not in FLOATS:
                continue
            factors = array.astype(np.float32).reshape(-1)
            for e, factor in zip(experts, factors.tolist(), strict=True):
                if not 0 < factor < np.inf:
                    name = self._stem(e) + part
                    rule = "must be one number, positive and finite"
                    raise ValueError(f"jaxmoe.{OP}: {name}={factor} {rule}")

    def _checked(self, last: Any, *parts: Any) -> Any:
        assert self.reader is not None
        return self.reader(*parts, last)

    def _piece(self, shards: Shards, part: str, experts: range) -> Piece:
        if self.stacked:
            name = self.stem + part
            rows = shards.shape(name)[0] // self.joined if self.joined else 1
            return shards.part(name, experts.start * rows, experts.stop * rows)
        return shards.stacked([stem + part for stem in self._stems(experts)])


def _falls(groups: np.ndarray[Any, Any]) -> bool:
    """Whether numbers of groups do not rise along k."""
    return bool((np.diff(groups) < 0).any())


@functools.lru_cache(maxsize=32)
def _compiled(reader: Callable[..., Any]) -> Callable[..., Any]:
    # What runs once for a weight, and takes milliseconds: XLA measures for seconds how to.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    return jax.jit(reader, compiler_options=options)
