"""Which reader of `jaxmoe.checkpoints` a weight has, by the names and dtypes of its tensors."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmoe import checkpoints
from jaxmoe._formats import STATIC_TOKENS
from jaxmoe._formats.quantization import BLOCK
from jaxmoe._jax.checks import FLOATS, dtype_name
from jaxmoe._load import quantization as said_of
from jaxmoe._load.files import OP
from jaxmoe._load.shards import Shards
from jaxmoe._load.stored import INPUT_DIVISOR, INPUT_SCALE, SHAPE, Stored

_GPTQ = ("gptq", "gptq_v2")
# How AutoRound packs: `auto_gptq` has zero points less 1, the others have them as they are.
_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
}


@functools.lru_cache(maxsize=64)
def _with(reader: Callable[..., Any], names: tuple[str, ...], **options: Any) -> Any:
    """A reader whose arguments after the first two have these names, with options."""

    def read(first: Any, second: Any, *others: Any) -> Any:
        return reader(first, second, **dict(zip(names, others, strict=False)), **options)

    return read


@dataclasses.dataclass(frozen=True)
class _Weight:
    """The tensors of a weight, of the first expert where each has its own."""

    shards: Shards
    stem: str
    quantization: Mapping[str, Any]
    dtype: str
    start: int

    @property
    def first(self) -> str:
        return self.stem.format(e=self.start)

    @property
    def stacked(self) -> bool:
        return "{e}" not in self.stem

    def has(self, part: str) -> bool:
        return self.first + part in self.shards

    def dtype_of(self, part: str) -> np.dtype[Any]:
        return self.shards.dtype(self.first + part)

    def shape_of(self, part: str) -> tuple[int, ...]:
        return self.shards.shape(self.first + part)

    def matrix_of(self, part: str) -> tuple[int, ...]:
        """The shape of a part of two axes or more."""
        shape = self.shape_of(part)
        if len(shape) < 2:
            raise ValueError(
                f"jaxmoe.{OP}: {self.first}{part} must have 2 axes or more, not {list(shape)}"
            )
        return shape

    def stored(
        self,
        reader: Any,
        *parts: str,
        named: tuple[str, ...] = (),
        static: str = "",
        shaped: bool = False,
        **options: Any,
    ) -> Stored:
        for part in parts:
            self.dtype_of(part)  # names the one that is missing
        kind = reader.__name__.removeprefix("from_")
        read = _with(reader, named, dtype=self.dtype, **options)
        return Stored(kind, self.stem, parts, read, static=static, shaped=shaped)

    def ordered(self, stored: Stored, decoder: Any, *, named: Any, **options: Any) -> Stored:
        """The same with another reader, of plain weights, for groups of any inputs."""
        _, unsorted = said_of.order(self.quantization)
        return dataclasses.replace(
            stored,
            checked=stored.parts[-1].endswith("g_idx"),
            unsorted=unsorted,
            decoder=_with(decoder, named, dtype=self.dtype, **options),
        )

    def check_groups(self, scale: str, k: int, count: int) -> None:
        said_of.check_groups(self.quantization, self.first + scale, k, count)

    def check_bits(self, part: str, bits: int) -> None:
        said_of.check_bits(self.quantization, self.first + part, bits)

    def refused(self, why: str) -> NotImplementedError:
        return NotImplementedError(f"jaxmoe.{OP}: {self.first}{why}")

    def missing(self, part: str, said: str) -> LookupError:
        return LookupError(
            f"jaxmoe.{OP}: quantization_config has {said}, and {self.shards.directory} has no "
            f"tensor {self.first + part!r}"
        )


def find(
    shards: Shards,
    stem: str,
    quantization: Mapping[str, Any],
    dtype: str,
    *,
    tokens: str | None = None,
    start: int = 0,
    joined: int = 0,
    **how: Any,
) -> Stored:
    """How the weight of that stem is stored.

    Args:
      stem: up to the part's name: "model.layers.0.mlp.experts.{e}.gate_proj".
      quantization: `quantization_config` of config.json, or an empty one.
      dtype: what quantized weights are dequantized to.
      tokens: the format that the layer rounds tokens to beside packed weights.
      start, joined, how: fields of `Stored`.

    Raises:
      LookupError: the first expert lacks a tensor, which the message names.
      NotImplementedError: weights that no reader knows.
    """
    weight = _Weight(shards, stem, quantization, dtype, start)
    stored = _stored(weight)
    if joined and stored.reader is not None:
        raise weight.refused(f"{stored.parts[0]} has the rows of all experts, and {stored.kind}")
    if tokens in STATIC_TOKENS and not stored.static:
        scales = filter(weight.has, (INPUT_SCALE, INPUT_DIVISOR))
        stored = dataclasses.replace(stored, static=next(scales, ""))
    return dataclasses.replace(stored, start=start, joined=joined, **how)


def _stored(weight: _Weight) -> Stored:
    shards = weight.shards
    if weight.has(".qweight"):
        return _gptq_or_awq(weight)
    if weight.has("_blocks"):
        return weight.stored(checkpoints.from_mxfp4, "_blocks", "_scales")
    if weight.has(".weight_packed"):
        return _packed(weight)
    for part in (".weight", ""):
        if weight.has(part):
            return _by_dtype(weight, part)
    raise LookupError(
        f"jaxmoe.{OP}: {shards.directory} has no tensor {weight.first + '.weight'!r}, nor one "
        "whose name ends on .weight_packed, .qweight or _blocks in its place"
    )


def _gptq_or_awq(weight: _Weight) -> Stored:
    said = weight.quantization
    if bits := said_of.other_bits(said, 4):
        raise weight.refused(f".qweight has {bits} bits, not 4")
    parts, group = (".qweight", ".qzeros", ".scales"), said_of.group_size(said)
    variant = _variant(weight)
    (*_, rows, _), (*_, count, _) = (weight.matrix_of(part) for part in (parts[0], parts[2]))
    if variant != "awq" and weight.has(".g_idx"):
        _check_bits_of_words(weight, rows)
    weight.check_groups(".scales", rows if variant == "awq" else 8 * rows, count)
    if variant == "awq":
        if str(said.get("version")).lower().startswith("gemv"):
            raise weight.refused(f".qweight is packed for version {said['version']!r}, not gemm")
        return weight.stored(checkpoints.from_awq, *parts, named=("scales",), group_size=group)
    is_sorted, _ = said_of.order(said)
    if is_sorted and not weight.has(".g_idx"):
        raise weight.missing(".g_idx", "desc_act=true, which sorts columns")
    parts += (".g_idx",) if weight.has(".g_idx") else ()
    how: dict[str, Any] = {"named": ("scales", "g_idx"), "checkpoint_format": variant}
    stored = weight.stored(checkpoints.from_gptq, *parts, group_size=group, **how)
    return weight.ordered(stored, checkpoints.dequantize_gptq, **how)


def _check_bits_of_words(weight: _Weight, words: int) -> None:
    """Refuses words of other bits than 4 along k, by what `g_idx` has of inputs."""
    *_, k = weight.shape_of(".g_idx") or (0,)
    bits, left = divmod(32 * words, k) if k else (0, 1)
    if bits != 4 and not left:
        raise weight.refused(f".qweight has {bits} bits, not 4: {words} words for K={k}")


def _variant(weight: _Weight) -> str:
    """How words are packed and zero points stored: "awq", "gptq" or "gptq_v2"."""
    said = weight.quantization
    method = str(said.get("quant_method")).lower()
    if method == "awq":
        return method
    if method == "gptq":
        variant = str(said.get("checkpoint_format") or "gptq")
        if variant not in _GPTQ:
            rule = f"checkpoint_format {variant!r}, not {' or '.join(_GPTQ)}"
            raise weight.refused(f".qweight has {rule}")
        return variant
    if method == "auto-round":
        packing = str(said.get("packing_format"))
        if packing == "auto_round" and said.get("sym") is False:
            return "gptq_v2"
        if packing not in _AUTO_ROUND:
            rule = f"packing_format {packing!r}, not {', '.join(_AUTO_ROUND)}"
            raise weight.refused(f".qweight has {rule}, or auto_round with sym=false")
        return _AUTO_ROUND[packing]
    raise weight.refused(
        f".qweight has quant_method {said.get('quant_method')!r}, not awq, gptq or auto-round"
    )


def _check_words(weight: _Weight) -> None:
    """Refuses words of other bits than 4, by what the first expert's shape says."""
    if not weight.has(SHAPE):
        return
    *rows, words = shape = weight.shape_of(".weight_packed") or (0,)
    name, kind, got = weight.first + SHAPE, weight.dtype_of(SHAPE), weight.shape_of(SHAPE)
    if kind.name not in ("int32", "int64") or got != (len(shape),):
        raise ValueError(
            f"jaxmoe.{OP}: {name} must be i32 or i64 [{len(shape)}], not {dtype_name(kind)} "
            f"{list(got)}"
        )
    *said, k = weight.shards[name].tolist()
    if k != 8 * words:
        raise weight.refused(f".weight_packed has {words} words for K={k}: not 4 bits")
    if said != rows:
        raise ValueError(f"jaxmoe.{OP}: {name}={[*said, k]} must be {[*rows, k]}, by the words")


def _packed(weight: _Weight) -> Stored:
    """compressed-tensors: int4, mxfp4 and nvfp4."""
    parts = (".weight_packed", ".weight_scale")
    words = weight.dtype_of(".weight_packed") == np.int32
    if words:
        _check_words(weight)
    weight.check_bits(".weight_packed", 4)
    (*_, width), (*_, count) = map(weight.matrix_of, parts)
    weight.check_groups(".weight_scale", (8 if words else 2) * width, count)
    if words:
        return _int4(weight, parts)
    if weight.dtype_of(".weight_scale") == np.uint8:
        return weight.stored(checkpoints.from_mxfp4, *parts)
    common = "weight_global_scale"
    return weight.stored(checkpoints.from_nvfp4, *parts, f".{common}", named=(common,))


def _int4(weight: _Weight, parts: tuple[str, ...]) -> Stored:
    said = weight.quantization
    is_sorted, _ = said_of.order(said)
    if is_sorted and not weight.has(".weight_g_idx"):
        raise weight.missing(".weight_g_idx", 'actorder="group", which sorts columns')
    if not weight.has(".weight_zero_point") and said_of.asymmetric(said):
        raise weight.missing(".weight_zero_point", "symmetric=false")
    more = {".weight_zero_point": "weight_zero_point", ".weight_g_idx": "g_idx"}
    more = {part: name for part, name in more.items() if weight.has(part)}
    named = tuple(more.values())
    stored = weight.stored(
        *(checkpoints.from_int4, *parts, *more),
        named=named,
        shaped=weight.has(SHAPE) and "{e}" in weight.stem,
        group_size=said_of.group_size(said),
    )
    return weight.ordered(stored, checkpoints.dequantize_int4, named=named)


def _by_dtype(weight: _Weight, part: str) -> Stored:
    kind = str(weight.dtype_of(part))
    if kind == "float8_e4m3fn":
        return _fp8(weight, part)
    if kind == "uint8":
        parts, common = (part, ".weight_scale"), "weight_scale_2"
        if not weight.has(f".{common}") and weight.dtype_of(".weight_scale") == np.uint8:
            return weight.stored(checkpoints.from_mxfp4, *parts)  # AMD Quark
        return weight.stored(checkpoints.from_nvfp4, *parts, f".{common}", named=(common,))
    if kind == "int8" and weight.has(".weight_scale"):
        raise weight.refused(
            f"{part} is int8 beside .weight_scale (int-quantized), which has no reader"
        )
    if kind == "int8":
        return weight.stored(checkpoints.from_mxfp4, part, ".scale")
    if kind not in FLOATS:
        raise weight.refused(f"{part} is {kind}, which no reader knows")
    return Stored(kind, weight.stem, (part,), None)


def _blocks(weight: _Weight, part: str, scale: str) -> Stored:
    said = weight.quantization.get("weight_block_size")
    if said is not None and said != [BLOCK, BLOCK]:
        raise weight.refused(
            f"{part} has weight_block_size {said!r} by quantization_config, not [{BLOCK}, {BLOCK}]"
        )
    return weight.stored(checkpoints.from_block, part, scale)


def _fp8(weight: _Weight, part: str) -> Stored:
    weight.check_bits(part, 8)
    for scale in (".weight_scale_inv", ".scale"):
        if weight.has(scale):
            return _blocks(weight, part, scale)
    scale = ".weight_scale"
    if weight.dtype_of(scale) == np.uint8:
        (*_, width), (*_, count) = map(weight.matrix_of, (part, scale))
        weight.check_groups(scale, width, count)
        return weight.stored(checkpoints.from_mxfp8, part, scale)
    # Of an expert.
    shape, of_scales = (weight.shape_of(p)[1 if weight.stacked else 0 :] for p in (part, scale))
    blocks = tuple(math.ceil(size / BLOCK) for size in shape)
    if of_scales == blocks and blocks != (*shape[:1], 1):
        return _blocks(weight, part, scale)
    # Beside one scale a matrix the inputs may have one as well.
    one, scheme = math.prod(of_scales) == 1, weight.quantization.get("activation_scheme")
    if one and scheme == "static" and not weight.has(INPUT_SCALE):
        raise weight.missing(INPUT_SCALE, 'activation_scheme="static"')
    used = one and scheme != "dynamic" and weight.has(INPUT_SCALE)
    static = INPUT_SCALE if used else ""
    return weight.stored(checkpoints.from_compressed_tensors, part, scale, static=static)
