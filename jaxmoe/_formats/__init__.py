"""Weight formats: one file each, one row each in the tables below. See docs/adding_a_format.md."""

from jaxmoe._formats.base import Format as Format
from jaxmoe._formats.base import Tokens as Tokens
from jaxmoe._formats.forward import Forward as Forward
from jaxmoe._formats.forward import forward
from jaxmoe._formats.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR
from jaxmoe._formats.int4 import INT4
from jaxmoe._formats.int8 import INT8_CHANNEL
from jaxmoe._formats.mx import MXFP4, MXFP8
from jaxmoe._formats.nvfp4 import NVFP4
from jaxmoe._formats.plain import MASTER as MASTER
from jaxmoe._formats.plain import PLAIN as PLAIN

# Formats of `jaxmoe.QuantizedArray`, by name.
_QUANTIZED = (
    *(FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK),
    *(MXFP4, MXFP8, NVFP4),
    *(*INT4, INT8_CHANNEL),
)
QUANTIZED: dict[str, Format] = {f.name: f for f in _QUANTIZED}

# The same, quantized in the program from plain weights.
FORWARD: dict[str, Format] = {name: forward(f) for name, f in QUANTIZED.items()}


def kernels() -> tuple[Format, ...]:
    """The formats that kernels have, by code."""
    return (PLAIN, *(f for f in QUANTIZED.values() if f.code >= 0))


def codes() -> dict[str, int]:
    """The code of each of them by its name."""
    return {f.name: f.code for f in kernels()}
