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
from jaxmoe._formats.tokens import Fp8Tokens, PackedTokens, TokenRule, beside

# Formats of `jaxmoe.QuantizedArray`, by name.
_QUANTIZED = (
    *(FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK),
    *(MXFP4, MXFP8, NVFP4),
    *(*INT4, INT8_CHANNEL),
)
QUANTIZED: dict[str, Format] = {f.name: f for f in _QUANTIZED}

# The ways of adding up products that a caller may name, of any format.
ACCUMS = tuple(dict.fromkeys(a for f in _QUANTIZED for a in f.accums))

# The same, quantized in the program from plain weights.
FORWARD: dict[str, Format] = {name: forward(f) for name, f in QUANTIZED.items()}

# Tokens that are quantized beside packed weights: what `Experts(token_format=)` may be, by the
# format of the weights. Float16 does not hold the powers of two of mx formats.
_WIDE = ("bfloat16", "float32")
_E4M3 = Fp8Tokens("e4m3", FP8_CHANNEL, "t", static=True, code=1)
_MX = tuple(
    PackedTokens(f.name, f, "", dtypes=_WIDE, code=code) for f, code in ((MXFP4, 2), (MXFP8, 3))
)
_NVFP4 = PackedTokens(NVFP4.name, NVFP4, "", common=True, static=True, code=4)
_BESIDE: dict[str, tuple[TokenRule, ...]] = {
    MXFP4.name: (*_MX, _E4M3),
    MXFP8.name: _MX[1:],
    NVFP4.name: (_NVFP4,),
    **{f.name: (_E4M3,) for f in INT4 if f.group == 128},
}
_ALL_RULES = tuple(r for rules in _BESIDE.values() for r in rules)
_RULES = {r.code: r for r in _ALL_RULES if r.code >= 0}
TOKEN_FORMATS = tuple(dict.fromkeys(r.name for r in _ALL_RULES))
STATIC_TOKENS = tuple(dict.fromkeys(r.name for r in _ALL_RULES if r.static))


def token_formats(weights: str) -> tuple[str, ...]:
    """The names of the token formats that weights of a format may have."""
    return tuple(rule.name for rule in _BESIDE.get(weights, ()))


def with_tokens(weights: Format, name: str | None) -> Format:
    """The format of a layer whose tokens are in the token format of that name, if in any."""
    rules = {rule.name: rule for rule in _BESIDE.get(weights.name, ())}
    return weights if name is None else beside(weights, rules[name])


def token_format_of(weights: str, array: str) -> str | None:
    """The token format in which such weights have tokens of a `QuantizedArray` format, if any."""
    return next((r.name for r in _BESIDE.get(weights, ()) if r.array.name == array), None)


def with_token_array(weights: Format, array: str) -> Format:
    """The format of products with tokens of a `QuantizedArray` in the format `array`."""
    rules = (r for r in _BESIDE.get(weights.name, ()) if r.array.name == array)
    return next((beside(weights, rule) for rule in rules), weights)


def static_scales() -> str:
    """Where static scales of activations are allowed, for messages."""
    names = " and ".join(f.name for f in QUANTIZED.values() if f.static_scales)
    return f"{names} and token_format={' or '.join(map(repr, STATIC_TOKENS))}"


def kernels() -> tuple[Format, ...]:
    """The formats that kernels have, by code."""
    return (PLAIN, *(f for f in QUANTIZED.values() if f.code >= 0))


def codes() -> dict[str, int]:
    """The code of each of them by its name."""
    return {f.name: f.code for f in kernels()}


def token_codes() -> dict[str, int]:
    """What kernels call the rules by which they round tokens, by the names of their formats."""
    return {"none": 0} | {_RULES[code].name: code for code in sorted(_RULES)}


def beside_code(weights: Format, code: int) -> Format:
    """The format of a layer whose tokens are rounded by the rule of that code, 0 if by none."""
    return beside(weights, _RULES[code]) if code else weights
