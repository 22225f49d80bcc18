"""Chooses the tile of each grouped GEMM from shapes alone.

A pure function of the problem, so that every process lowers the same program. The host knows only
the mean number of rows a group gets; ragged tails and skew are absorbed on the device, where tiles
are drawn from a counter. Measurements behind the rules are in docs/notes.md#what-holds-now.
"""

import dataclasses
import math

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import sizes as _sizes

# (weight_tile, token_tile, cluster, split_k) of each kernel in csrc/gemm/sm90/kernel.cuh, with the
# CTAs that share an SM. Tiles of 128 weight rows by up to 32 tokens are for reading weights (two
# CTAs an SM); the others hold a whole SM's registers in accumulators.
TILES: dict[tuple[int, int, int, int], int] = {
    (128, 8, 1, 1): 2,
    (128, 8, 1, 2): 2,
    (128, 32, 1, 1): 2,
    (128, 192, 1, 1): 1,
    (128, 256, 1, 1): 1,
    (256, 128, 1, 1): 1,
    (256, 160, 1, 1): 1,
    (256, 160, 2, 1): 1,
}

_SMS = 132  # of an H100 or H200 SXM

# Elements of 2 bytes in a pipeline step of the k loop, twice as many of FP8: each CTA of a split
# needs one step.
STEP_K = 64

# Tiles whose accumulators leave no registers for a second set, which promoted FP8 sums need; and
# those that only promoted sums have.
NOT_PROMOTED = {(256, 160, 1, 1), (256, 160, 2, 1)}
ONLY_PROMOTED = {(128, 256, 1, 1), (256, 128, 1, 1)}

# Tiles of packed weights. Decoding binds those of few tokens and shares an SM with products in the
# others, so all of them have several CTAs an SM.
PACKED: dict[tuple[int, int, int, int], int] = {
    (128, 16, 1, 1): 3,
    (128, 16, 1, 2): 3,
    (128, 16, 1, 4): 3,
    (128, 32, 1, 1): 3,
    (128, 64, 1, 1): 2,
    (128, 128, 1, 1): 2,
    (128, 160, 1, 1): 2,
}

# The one that multiplies codes of four bits as they are, by tokens of e4m3.
CODED: dict[tuple[int, int, int, int], int] = {(256, 128, 1, 1): 1}

# Tiles of the kernels that compute both products of a gated layer, of weights as they are and of
# packed ones.
LAYER_TILES = {(128, 8, 1, 1), (128, 8, 1, 2), (128, 32, 1, 1)}
PACKED_LAYER_TILES = {(128, 16, 1, 1)}

# Those of the kernels that add what adapters of low rank add to the sums, of bf16 tokens.
ADAPTED_TILES = {(128, 32, 1, 1), (256, 160, 1, 1), (256, 160, 2, 1)}
PACKED_ADAPTED_TILES = {t for t in PACKED if t[1] != 32 and t[3] == 1}

# Tokens of a tile that fetches rows by index where no registers are left for threads that do it:
# of packed weights, and of promoted sums.
MAX_GATHER = 32

# Usual rows of a group that packed tiles fetch by index. Each row of a step is a copy to start, and
# with four bits a weight that soon takes longer than the weights: from 10 rows on by a fifth.
_MAX_PACKED_GATHER = 5

# Rows that the products plan for themselves, if they fetch them by index, which spares a launch.
MAX_PLANNED_ROWS = 32

# Tiles of a gate-up product from which on one kernel runs both products with whole k loops: twice
# as many as CTAs that run at once. A down product of fewer, so long ones, is a kernel of its own:
# mixtral-8x7b takes 4 % more in one. And the usual rows of a group up to which packed weights win.
_MIN_LAYER_TILES = 4 * _SMS
_MAX_PACKED_LAYER_ROWS = 10

# Activations of a token that such a kernel quantizes itself, by groups of 128.
# NOTE: csrc has the same: kMaxStoredGroups in gemm/args.h.
MAX_STORED_FEATURES = 24 * 128

# Usual rows of a group up to which one kernel for both products is worth tiles of 32 rows, where a
# second one of a group finds weights in L2.
_MAX_SMALL_LAYER_ROWS = 24

# Rows of a half of a gate-up weight whose blocks of scales these tiles can tell apart.
BLOCK_ROWS = 64
WHOLE_BLOCKS = {(256, 128, 1, 1), (128, 256, 1, 1)}

# Two CTAs on half of the k loop each come to an end together, and nothing is gained by that when a
# tile has few steps, when there are so many tiles that the last ones hardly count, or when a second
# round of clusters would leave most SMs without one.
_MIN_SPLIT_BYTES = 2048
_MAX_SPLIT_TILES = 12 * _SMS
# Nor, for one token, where whole tiles of short rows have so many SMs: they leave room for the
# clusters of its down product.
MAX_FINALIZED_CHOICES = 8
_MAX_WHOLE_BYTES = 4096
_MIN_WHOLE_TILES = 2 / 3 * _SMS
_MIN_WHOLE_FP8_TILES = 0.9 * _SMS  # of a gate-up product without promoted sums

# Usual rows of a group up to which packed weights take tiles of so many tokens. wgmma is faster
# than mma.sync before 32 are full, and a second tile for some groups than a wider one for all.
_PACKED_ROWS = {16: 16, 32: 23, 64: 72}

# The longest rows of tokens that are rounded so that codes are multiplied as they are.
MAX_CODED_K = 32768

# Parts of the k loop of a packed product and the elements of k that each needs. It is split while
# all parts run at once; or in two where whole tiles would be one round of CTAs and up to half of
# another.
_PACKED_PARTS = {4: 720, 2: 256}
_MIN_LATE_HALF = 1024

# Elements of weight rows that several token tiles of a group still find in L2.
_MAX_SHARED_K = 2048

# Usual rows of a group up to which one tile less than pairs have is worth that no pair shares
# weights.
_MAX_UNPAIRED_ROWS = 800

# Largest I at which 128 x 192 fetches rows of x through the index. Fetching costs time for each
# product of a row, a copy into expert order once; this tile fetches twice as often as the larger
# ones.
_MAX_GATHER_INTERMEDIATE = 1024

# And of pairs in FP8, whose rows take half as long to multiply.
_MAX_FP8_GATHER_INTERMEDIATE = 4096


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """The tile of one grouped GEMM; an explicit choice overrides the heuristics.

    Args:
      weight_tile: Weight rows (output features, gate and up counted separately) per tile.
      token_tile: Rows of one group per tile.
      cluster: CTAs sharing one multicast load of each weight tile, each with its own `token_tile`
        rows.
      split_k: CTAs that share the k loop of a tile, whose sums the first adds up in order.
      raster: Weight tiles per panel of the tile order, 0 for all. 1 keeps the token tiles that
        share a weight tile adjacent in time; larger panels let many token tiles share X.
      gather: The gate-up GEMM fetches rows of x by index instead of reading a permuted copy.
      one_kernel: The gate-up GEMM's kernel goes on with the down GEMM, whose tile is the same. Not
        where packed weights' rows are stored in the memory of other GPUs, nor with dynamic scales
        of whole tokens or tensors.

    Raises:
      TypeError: a tile, cluster, split or raster that is no integer, a gather or one_kernel that
        is no bool.
      ValueError: no kernel has this tile, or a negative number.
    """

    weight_tile: int
    token_tile: int
    cluster: int = 1
    split_k: int = 1
    raster: int = 1
    gather: bool = False
    one_kernel: bool = False

    def __post_init__(self) -> None:
        op = "GemmConfig"
        for name in ("weight_tile", "token_tile", "cluster", "split_k", "raster"):
            _checks.check_int(op, name, getattr(self, name), 0)
        for name in ("gather", "one_kernel"):
            given = getattr(self, name)
            if type(given) is not bool:
                raise TypeError(_checks.message(op, f"{name} must be a bool", **{name: given}))
        if self.tile not in (tiles := {**TILES, **PACKED, **CODED}):
            allowed = ", ".join(map(str, tiles))
            raise ValueError(
                f"jaxmoe.GemmConfig: (weight_tile, token_tile, cluster, split_k)={self.tile} must "
                f"be one of {allowed}."
            )

    @property
    def tile(self) -> tuple[int, int, int, int]:
        """The key of this tile in `TILES`, `PACKED` or `CODED`."""
        return self.weight_tile, self.token_tile, self.cluster, self.split_k

    def attrs(self) -> dict[str, int]:
        """FFI attributes, see csrc/ffi/gemm_attrs.h."""
        return {name: int(value) for name, value in dataclasses.asdict(self).items()}


def gmm_config(
    num_rows: int,
    num_groups: int,
    k: int,
    weight_rows: int,
    local_share: float = 1.0,
    promoted: bool | None = None,
    packed: bool = False,
) -> GemmConfig:
    """The tile for `num_rows` rows spread over `num_groups` groups.

    Each group has `weight_rows` rows of `k` elements. `local_share` of the groups are here.
    `promoted` says whether the sums of an FP8 product are promoted; None: 2-byte elements.
    `packed`: see `PACKED`. A symbolic `num_rows`, of `jax.export`, gets the tile that loses least
    where groups have many rows, and is no pair.
    """
    if not _sizes.is_known(num_rows):
        return GemmConfig(128, 128) if packed else GemmConfig(256, 128 if promoted else 160)
    usual = _usual_rows(num_rows, num_groups)
    row_bytes = k * (2 if promoted is None else 1)
    hit = _hit(num_rows, num_groups, local_share)
    # With very many token tiles a group, panels of weight tiles share X in L2.
    raster = 8 if num_rows >= 2048 * num_groups else 1
    if packed:
        tiles = hit * math.ceil(weight_rows / 128)
        return _packed_config(usual, k, tiles, raster)
    if usual < (8 if promoted is None else 9):
        split_k = _split_k(row_bytes, hit * math.ceil(weight_rows / 128))
        return GemmConfig(128, 8, split_k=split_k)
    # Twice or four times as wide as usual groups need, which costs up to 3 % of an even routing:
    # groups past a tile read their weights again, up to 30 % of a skewed one.
    # Promoted sums multiply as many rows as a tile of this kind can have.
    if usual <= (32 if promoted else 16):
        return GemmConfig(128, 32)
    if promoted:  # blocks of 64 tokens are multiplied
        # Tiles that share a weight tile of many steps drift apart, and the later one finds the
        # weights gone from L2: here one tile has all rows of most groups.
        if 128 < usual <= 192 and k > _MAX_SHARED_K:
            return GemmConfig(128, 256)
        return GemmConfig(256, 128, raster=raster)
    if usual <= 160:
        return GemmConfig(256, 160)
    if usual <= 192:
        return GemmConfig(128, 192)
    # A group of 400 rows is three tiles of 144 columns or two pairs of 112: wgmma of fewer columns
    # reads shared memory more often. But three tiles read their weights three times.
    unpaired = math.ceil(usual / 160) < 2 * math.ceil(usual / 320)
    if unpaired and usual <= _MAX_UNPAIRED_ROWS and k <= _MAX_SHARED_K:
        return GemmConfig(256, 160)
    return GemmConfig(256, 160, cluster=2, raster=raster)


def _packed_config(usual: float, k: int, tiles: float, raster: int) -> GemmConfig:
    """The tile for packed weights and groups of `usual` rows; `tiles` are those of 128 x 16.

    Weights are decoded once for each token tile, which reads and multiplies little more than the
    rows it has: up to `_PACKED_ROWS` the narrowest tile is the best.
    """
    if usual <= _PACKED_ROWS[16]:
        return GemmConfig(128, 16, split_k=_packed_split_k(k, tiles))
    for token_tile in (32, 64):
        if usual <= _PACKED_ROWS[token_tile]:
            return GemmConfig(128, token_tile)
    spares = math.ceil(usual / 160) < math.ceil(usual / 128)
    return GemmConfig(128, 160 if spares else 128, raster=raster)


def _packed_split_k(k: int, tiles: float) -> int:
    at_once = _SMS * PACKED[128, 16, 1, 1]
    for parts, least in _PACKED_PARTS.items():
        if parts * tiles <= at_once and k >= parts * least:
            return parts
    return 2 if at_once < tiles <= 1.5 * at_once and k >= 2 * _MIN_LATE_HALF else 1


def _coded_config(config: GemmConfig) -> GemmConfig:
    """The tile for codes that may be multiplied as they are, in place of wide ones that decode."""
    return config if config.token_tile <= 64 else GemmConfig(256, 128, raster=config.raster)


def with_adapters(config: GemmConfig, packed: bool) -> GemmConfig:
    """The narrowest tile for as many rows among those of kernels that add what adapters add."""
    tiles, tile = PACKED_ADAPTED_TILES if packed else ADAPTED_TILES, config.tile
    if tile not in tiles:
        tile = min(t for t in tiles if t[1] * t[2] >= config.token_tile)
    weight_tile, token_tile, cluster, split_k = tile
    return dataclasses.replace(
        config,
        weight_tile=weight_tile,
        token_tile=token_tile,
        cluster=cluster,
        split_k=split_k,
        gather=config.gather and not packed,
        one_kernel=False,
    )


def _split_k(row_bytes: int, tiles: float) -> int:
    if row_bytes < _MIN_SPLIT_BYTES or tiles > _MAX_SPLIT_TILES or _SMS < tiles < 1.5 * _SMS:
        return 1
    return 2


def _whole(config: GemmConfig, row_bytes: int, tiles: float, least: float) -> GemmConfig:
    """The tile of a product of one token, its k loop in one piece where that is worth it."""
    if row_bytes > _MAX_WHOLE_BYTES or not least <= tiles <= _SMS:
        return config
    return dataclasses.replace(config, split_k=1)


def mlp_configs(
    num_rows: int,
    num_experts: int,
    num_local_experts: int,
    hidden: int,
    intermediate: int,
    gated: bool,
    promoted: tuple[bool, bool] | None = None,
    odd_blocks: bool = False,
    packed: bool = False,
    one_kernel: bool = False,
    coded: bool = False,
    one_token: bool = False,
) -> tuple[GemmConfig, GemmConfig]:
    """Tiles of the gate-up and down GEMMs of the fused layer.

    `num_experts` is the number of experts that the rows are routed over, local or not. `promoted`
    as in `gmm_config`, for each product. `odd_blocks`: see `odd_blocks`. `packed`: see `PACKED`.
    `one_kernel`: whether one kernel may run both products. `coded`: whether `CODED` may be chosen.
    `one_token`: whether all rows are those of one.
    """
    share = num_local_experts / max(num_experts, 1)
    weight_rows = intermediate * (2 if gated else 1)
    first, second = promoted or (None, None)
    gate_up = gmm_config(num_rows, num_experts, hidden, weight_rows, share, first, packed=packed)
    if odd_blocks and gate_up.tile in WHOLE_BLOCKS:
        gate_up = GemmConfig(128, 192)
    down = gmm_config(num_rows, num_experts, intermediate, hidden, share, second, packed=packed)
    usual = _usual_rows(num_rows, num_experts) if _sizes.is_known(num_rows) else math.inf
    if one_token and not packed and 1 < num_rows <= MAX_FINALIZED_CHOICES:
        hit, size = _hit(num_rows, num_experts, share), 2 if first is None else 1
        least = _MIN_WHOLE_FP8_TILES if first is False else _MIN_WHOLE_TILES
        gate_up = _whole(gate_up, size * hidden, hit * math.ceil(weight_rows / 128), least)
        tiles = hit * math.ceil(hidden / 128)
        down = _whole(down, size * intermediate, tiles, _MIN_WHOLE_TILES)
    if coded and max(hidden, intermediate) <= MAX_CODED_K:
        gate_up, down = _coded_config(gate_up), _coded_config(down)
    if packed:
        few = _sizes.is_known(num_rows) and (
            num_rows <= MAX_PLANNED_ROWS or usual <= _MAX_PACKED_GATHER
        )
        gather = few and gate_up.token_tile <= MAX_GATHER
    elif first:  # tokens can be quantized in the order of the experts
        gather = gate_up.token_tile <= MAX_GATHER
    elif gate_up.token_tile == 192:
        gather = intermediate <= _MAX_GATHER_INTERMEDIATE
    else:
        fp8_pair = first is not None and gate_up.cluster > 1
        gather = not fp8_pair or intermediate <= _MAX_FP8_GATHER_INTERMEDIATE
    gate_up = dataclasses.replace(gate_up, gather=gather)
    # Products that plan for themselves need no launch before them, but one kernel does.
    if not one_kernel or not _sizes.is_known(num_rows) or num_rows <= MAX_PLANNED_ROWS:
        return gate_up, down
    # No CTA waits for another product's end, so the k loop of many tiles is not split.
    hit = _hit(num_rows, num_experts, share)
    many = hit * math.ceil(weight_rows / 128) >= _MIN_LAYER_TILES
    if many and not packed and hit * math.ceil(hidden / 128) < _MIN_LAYER_TILES:
        return gate_up, down
    whole = [dataclasses.replace(c, split_k=1) if many else c for c in (gate_up, down)]
    shares = many and max(hidden, intermediate) <= _MAX_SHARED_K
    if shares and not packed and 16 < usual <= _MAX_SMALL_LAYER_ROWS:
        whole = [GemmConfig(128, 32, gather=gate_up.gather), GemmConfig(128, 32)]
    few = usual <= (_MAX_PACKED_LAYER_ROWS if packed else math.inf)
    one = whole[0].tile == whole[1].tile and few
    if not one or whole[0].tile not in (PACKED_LAYER_TILES if packed else LAYER_TILES):
        return gate_up, down
    return dataclasses.replace(whole[0], one_kernel=True), whole[1]


def _hit(num_rows: int, num_groups: int, local_share: float) -> float:
    """Groups of those here that so many rows are expected to hit."""
    return local_share * num_groups * (1.0 - (1.0 - 1.0 / max(num_groups, 1)) ** num_rows)


def odd_blocks(blocks: bool, gated: bool, gate_up: str, intermediate: int) -> bool:
    """Whether blocks of scales, if there are any, end inside the 64-row blocks of a half's rows."""
    halves = gated and gate_up != "interleaved"
    return blocks and halves and intermediate % BLOCK_ROWS != 0


def _usual_rows(num_rows: int, num_groups: int) -> float:
    """Rows that most groups do not exceed: a tile of so many reads each weight once."""
    mean = num_rows / max(num_groups, 1)
    return mean + 2.0 * math.sqrt(mean)


def tgmm_cluster(columns: int) -> int:
    """CTAs that share an operand of the weight gradient, each with 128 of the other's columns.

    Pairs read a third less from L2. `columns` are those of x.
    """
    return 2 if columns > 128 else 1
