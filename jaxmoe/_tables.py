"""Tables that the package and its CUDA extension both have, compared at import."""

from typing import Any

from jaxmoe import _formats
from jaxmoe._codes import CODES
from jaxmoe._ep import connect, peers
from jaxmoe._formats import quantization
from jaxmoe._formats.quantization import scratch_floats
from jaxmoe._gemm import cuda, scratch, slices, tiles
from jaxmoe._jax import targets as _targets
from jaxmoe._route import MAX_CUDA_EXPERTS
from jaxmoe.plan import plan_scratch_size


def own(theirs: dict[str, Any]) -> dict[str, Any]:
    """The package's tables under the names that the extension gives them.

    Sizes of scratch are those of the arguments for which `theirs` has them.
    """
    format_of = {f.code: f for f in _formats.kernels()}

    def sizes(table: str, size: Any) -> dict[Any, Any]:
        return {args: size(*args) for args in theirs.get(table, ())}

    def peer_bytes(tokens: int, top_k: int, devices: int, row: int, small: int) -> tuple[int, ...]:
        sent = peers.dispatch_bytes(tokens, top_k, devices, row, small)
        back = peers.combine_bytes(tokens, devices, row, small)
        return sent, back, peers.rows_bytes(tokens, top_k, row)

    def floats(code: int, rule: int, tokens: int, rows: int, hidden: int, inner: int) -> int:
        format = _formats.beside_code(format_of[code], rule)
        return scratch_floats(format, rule > 0, (tokens, hidden), (rows, inner))

    return {
        **{kind: {name: code for code, name in enumerate(names)} for kind, names in CODES.items()},
        "format": _formats.codes(),
        "tokens": _formats.token_codes(),
        "tiles": {t: n for t, n in tiles.TILES.items() if t not in tiles.ONLY_PROMOTED},
        "promoted_tiles": {t: n for t, n in tiles.TILES.items() if t not in tiles.NOT_PROMOTED},
        "packed_tiles": tiles.PACKED,
        "coded_tiles": tiles.CODED,
        "layer_tiles": {t: tiles.TILES[t] for t in tiles.LAYER_TILES},
        "packed_layer_tiles": {t: tiles.PACKED[t] for t in tiles.PACKED_LAYER_TILES},
        "adapted_tiles": {t: tiles.TILES[t] for t in tiles.ADAPTED_TILES},
        "packed_adapted_tiles": {t: tiles.PACKED[t] for t in tiles.PACKED_ADAPTED_TILES},
        "max_columns": cuda.MAX_COLUMNS,
        "max_planned_slots": tiles.MAX_PLANNED_ROWS,
        "max_finalized_choices": tiles.MAX_FINALIZED_CHOICES,
        "max_route_experts": MAX_CUDA_EXPERTS,
        "quant_block": quantization.BLOCK,
        "max_quant_partials": quantization.MAX_PARTIALS,
        "gemm_scratch": scratch.gmm_scratch_size(),
        "slice_sums": sizes("slice_sums", slices.slice_sums),
        "sliced_hidden": slices.HIDDEN,
        "plan_scratch": sizes("plan_scratch", plan_scratch_size),
        "mlp_index": sizes("mlp_index", scratch.mlp_index_size),
        "mlp_floats": sizes("mlp_floats", floats),
        "peer_bytes": sizes("peer_bytes", peer_bytes),
        "peer_header": peers.HEADER_BYTES,
        "max_peers": connect.MAX_PEERS,
    }


def check(theirs: dict[str, Any]) -> None:
    """Raises ImportError unless the extension's tables are the package's."""
    ours = own(theirs)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ImportError(
                f"jaxmoe: the CUDA extension is not of this version of the package: its table "
                f"{name!r} is {theirs.get(name)}, not {ours.get(name)}. Rebuild jaxmoe"
            )


if _targets.cuda_available():
    check(_targets.tables())
