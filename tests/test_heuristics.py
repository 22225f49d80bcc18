"""Tile choice: every choice is a kernel that exists."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import pytest

from jaxmoe import GemmConfig, Routing, _gemm
from tests.layers import moe_mlp
from tests.lowered import calls, cuda_text
from tests.test_lowering import struct


def _mlp_configs(rows, num_experts, hidden, intermediate, local=None):
    return _gemm.tiles.mlp_configs(
        num_rows=rows,
        num_experts=num_experts,
        num_local_experts=num_experts if local is None else local,
        hidden=hidden,
        intermediate=intermediate,
        gated=True,
    )


@pytest.mark.parametrize("num_experts", (0, 1, 8, 40, 128, 160, 256, 384, 512))
@pytest.mark.parametrize("top_k", (1, 2, 8, 22))
def test_every_choice_is_legal(num_experts, top_k):
    around = {2**exponent + step for exponent in range(21) for step in (-1, 0, 1)}
    for num_tokens in around:
        rows = num_tokens * top_k
        alone = _gemm.tiles.gmm_config(rows, num_experts, 2048, 1536)
        up, down = _mlp_configs(rows, num_experts, 2048, 768)
        for config in (alone, up, down):
            assert dataclasses.astuple(config)[:4] in _gemm.tiles.TILES
            assert config.raster >= 0
        # only the gate-up product has an index to fetch rows by
        assert not alone.gather and not down.gather


def test_a_tile_holds_the_rows_most_groups_have():
    for mean in (1, 4, 16, 40, 100, 120, 150, 256):
        config = _gemm.tiles.gmm_config(mean * 128, 128, 2048, 1536)
        assert config.token_tile * config.cluster >= mean


def test_the_k_loop_is_split_while_few_tiles_have_many_steps():
    def split(num_tokens, num_experts, top_k, hidden, intermediate, local=None):
        rows = num_tokens * top_k
        configs = _mlp_configs(rows, num_experts, hidden, intermediate, local)
        return tuple(config.split_k for config in configs)

    # qwen3-30b-a3b, rows of one token or of eight: 8 experts of 12 tiles of 32 steps, of 16 of 12
    assert split(1, 128, 8, 2048, 768) == split(8, 128, 1, 2048, 768) == (2, 1)
    # gpt-oss-120b: 4 of 45 tiles would leave most SMs without a cluster in the second round
    assert split(1, 128, 4, 2880, 2880) == (1, 2)
    assert split(1, 8, 2, 4096, 14336) == (2, 2)
    # with half of the experts here, half of the tiles: gate-up 448 -> 224, down 64 -> 32
    assert split(1, 8, 2, 4096, 14336, local=4) == (2, 2)
    # deepseek-v3, 64 tokens: tens of thousands of tiles
    assert split(64, 256, 8, 7168, 2048) == (1, 1)
    # more than 8 rows an expert: another tile
    assert split(8 * 64, 128, 8, 2048, 768) == (1, 1)


@pytest.mark.parametrize("promoted", ((False, False), (True, True), (False, True)))
def test_tiles_of_fp8_products(promoted):
    """They exist, promote where they must, and fetch rows where registers are left for that."""
    for exponent in range(19):
        rows = 2**exponent
        configs = _gemm.tiles.mlp_configs(rows, 64, 64, 2048, 768, True, promoted)
        for config, promotes in zip(configs, promoted, strict=True):
            assert config.tile in _gemm.tiles.TILES
            assert not (promotes and config.tile in _gemm.tiles.NOT_PROMOTED)
        assert configs[0].gather == (configs[0].token_tile <= 32 or not promoted[0])
        assert not configs[1].gather
    assert (configs[0].token_tile, configs[1].token_tile) == tuple(
        128 if promotes else 160 for promotes in promoted
    )


def test_promoted_sums_of_long_rows_have_a_group_in_one_tile():
    def tile(mean, k):
        return _gemm.tiles.gmm_config(mean * 64, 64, k, 4096, promoted=True).tile

    assert tile(128, 2880) == tile(160, 7168) == (128, 256, 1, 1)
    assert tile(128, 2048) == tile(96, 7168) == tile(200, 7168) == (256, 128, 1, 1)
    assert _gemm.tiles.gmm_config(128 * 64, 64, 7168, 4096, promoted=False).tile == (256, 160, 1, 1)


def test_blocks_that_end_inside_a_half():
    odd = _gemm.tiles.odd_blocks
    assert odd(True, True, "gate_up", 400) and odd(True, True, "up_gate", 16)
    assert not odd(True, True, "interleaved", 400)
    assert not odd(True, False, "gate_up", 400)
    assert not odd(True, True, "gate_up", 192)
    assert not odd(False, True, "gate_up", 400)
    for exponent in range(19):
        args = 2**exponent, 64, 64, 2048, 400, True, (True, True)
        even, chosen = (_gemm.tiles.mlp_configs(*args, odd_blocks=value) for value in (False, True))
        assert chosen[0].tile not in _gemm.tiles.WHOLE_BLOCKS
        assert chosen[1] == even[1]
        assert chosen[0] == even[0] or even[0].tile in _gemm.tiles.WHOLE_BLOCKS


def test_one_token_leaves_room_for_the_clusters_that_finalize_it():
    def split(experts, top_k, hidden, intermediate, promoted=None):
        fp8 = None if promoted is None else (promoted, promoted)
        sizes = (top_k, experts, experts, hidden, intermediate)
        configs = _gemm.tiles.mlp_configs(*sizes, True, fp8, one_token=True)
        return tuple(config.split_k for config in configs)

    # 8 of 128 experts, 12 tiles each: 93 of 132 SMs
    assert split(128, 8, 2048, 768) == (1, 1)
    assert split(128, 8, 2048, 768, True) == (1, 1)
    assert split(128, 8, 2048, 768, False) == (2, 1)
    # 8 of 64, 16 tiles: 121 of 132; 6 of 64, 22 and 16 tiles
    assert {split(64, 8, 2048, 1024, fp8) for fp8 in (None, True, False)} == {(1, 1)}
    assert {split(64, 6, 2048, 1408, fp8) for fp8 in (None, True, False)} == {(1, 1)}
    # gpt-oss-120b: 91 tiles of the down product, which is split where rows are longer, as in bf16
    assert {split(128, 4, 2880, 2880, fp8) for fp8 in (True, False)} == {(1, 1)}
    assert split(128, 4, 2880, 2880) == (1, 2)
    # 86 tiles are too few; rows of 2052 elements too long, but not in FP8; 9 choices no cluster
    assert split(128, 8, 2816, 704) == (2, 1)
    assert split(128, 8, 2056, 768)[0] == 2
    assert split(128, 8, 2056, 768, True)[0] == 1
    assert split(128, 9, 2048, 640)[0] == 2


@pytest.mark.parametrize(("num_tokens", "top_k", "split"), ((1, 8, 1), (8, 1, 2), (2, 4, 2)))
def test_the_layer_says_whether_all_rows_are_of_one_token(num_tokens, top_k, split):
    choices = num_tokens, top_k
    routing = Routing(struct(*choices, dtype=jnp.int32), struct(*choices, dtype=jnp.float32))
    arrays = struct(num_tokens, 2048), routing, struct(128, 2048, 1536), struct(128, 768, 2048)
    ((_, attrs, _, _),) = calls(cuda_text(moe_mlp, *arrays))
    assert attrs["gemm1"]["split_k"] == f"{split}:i64"


def test_fp8_products_are_split_from_twice_as_many_elements_on():
    def split(k, promoted):
        return _gemm.tiles.gmm_config(8, 128, k, 1536, promoted=promoted).split_k

    assert (split(1024, None), split(1008, None)) == (2, 1)
    assert (split(2048, False), split(2032, False)) == (2, 1)
    assert split(2048, True) == 2


def test_where_tiles_change():
    """The last size of each tile and the first of the next, rows of 64 groups."""

    def tile(rows, **options):
        config = _gemm.tiles.gmm_config(rows, 64, 2048, 1536, **options)
        return config.tile[:3]

    def first(wanted, **options):
        rows = next(r for r in range(64 * 256) if tile(r, **options) == wanted)
        assert rows == 0 or tile(rows - 1, **options) != wanted
        return rows

    # n rows a group have at most n + 2 sqrt(n) rows as a rule: (1 + sqrt(n))^2 - 1.
    assert first((128, 32, 1)) == math.ceil(64 * (math.sqrt(9) - 1) ** 2)
    assert first((256, 160, 1)) == math.floor(64 * (math.sqrt(17) - 1) ** 2) + 1
    assert first((128, 192, 1)) == math.floor(64 * (math.sqrt(161) - 1) ** 2) + 1
    assert first((256, 160, 2)) == math.floor(64 * (math.sqrt(193) - 1) ** 2) + 1
    # A step of FP8 rows has twice the elements, and promoted sums have wider small tiles.
    assert first((128, 32, 1), promoted=False) == math.ceil(64 * (math.sqrt(10) - 1) ** 2)
    wide = math.floor(64 * (math.sqrt(33) - 1) ** 2) + 1
    assert first((256, 128, 1), promoted=True) == wide
    assert tile(64 * 512, promoted=True) == (256, 128, 1)


def test_pairs_unless_one_tile_less_has_a_group():
    """400 rows are three tiles of 144 columns, or two pairs of 112; 300 one pair, 500 two."""

    def tile(usual, k=2048):
        mean = (math.sqrt(usual + 1) - 1) ** 2
        return _gemm.tiles.gmm_config(math.floor(mean * 64), 64, k, 1536).tile

    pair, alone = (256, 160, 2, 1), (256, 160, 1, 1)
    assert [tile(n) for n in (200, 319, 322, 479, 482, 639, 642, 799, 802, 1100)] == [
        *(pair, pair, alone, alone, pair, pair, alone, alone, pair, pair)
    ]
    assert tile(400, k=2056) == pair  # three tiles would read long rows three times


def test_panels_of_weight_tiles_begin_at_many_rows_a_group():
    def raster(rows, **options):
        return _gemm.tiles.gmm_config(rows, 8, 2048, 1536, **options).raster

    assert (raster(8 * 2048 - 1), raster(8 * 2048)) == (1, 8)
    assert (raster(8 * 2048 - 1, promoted=True), raster(8 * 2048, promoted=True)) == (1, 8)


def test_wide_experts_of_192_tokens_copy_their_rows_first():
    def gather(mean, intermediate):
        return _mlp_configs(mean * 64, 64, 2048, intermediate)[0].gather

    assert gather(150, 1024) and not gather(150, 1025)  # tiles of 192 tokens
    assert gather(120, 4096) and gather(256, 4096)  # the others fetch half as often


def test_pairs_in_fp8_of_wide_experts_copy_their_rows_first():
    def gather(mean, intermediate, fast=(False, False)):
        return _gemm.tiles.mlp_configs(mean * 8, 8, 8, 4096, intermediate, True, fast)[0].gather

    assert gather(256, 4096) and not gather(256, 4112)
    assert gather(100, 14336)  # one CTA
    assert gather(256, 14336, None)  # bf16


def test_a_second_round_of_clusters_is_not_split():
    """Of two CTAs each: more tiles than SMs, and fewer than one and a half times as many."""

    def split(tiles):  # one group, so that every row hits it
        return _gemm.tiles.gmm_config(1, 1, 2048, 128 * tiles).split_k

    assert [split(tiles) for tiles in (132, 133, 197, 198)] == [2, 1, 1, 2]
    assert [split(tiles) for tiles in (12 * 132, 12 * 132 + 1)] == [2, 1]


def test_attributes_are_integers():
    attrs = GemmConfig(256, 128, raster=8).attrs()
    assert attrs == {
        "weight_tile": 256,
        "token_tile": 128,
        "cluster": 1,
        "split_k": 1,
        "raster": 8,
        "gather": 0,
        "one_kernel": 0,
    }
    assert all(type(value) is int for value in attrs.values())
    assert dataclasses.fields(GemmConfig)[0].name == "weight_tile"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (
            (100, 8),
            r"\(weight_tile, token_tile, cluster, split_k\)=\(100, 8, 1, 1\) must be one of",
        ),
        ((128, 8, 2), r"\(128, 8, 2, 1\) must be one of"),
        ((256, 128, 1, 2), r"\(256, 128, 1, 2\) must be one of"),
        ((128, 8, 1, 1, -1), r"raster=-1 must be at least 0"),
    ),
)
def test_unknown_tiles_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GemmConfig(*arguments)


@pytest.mark.parametrize(
    ("arguments", "got"),
    (
        ({"weight_tile": 128.0}, "weight_tile: 128.0"),
        ({"token_tile": "8"}, "token_tile: '8'"),
        ({"raster": "a"}, "raster: 'a'"),
        ({"raster": True}, "raster: True"),
        ({"cluster": 2.0}, "cluster: 2.0"),
        ({"gather": "yes"}, "gather: 'yes'"),
        ({"one_kernel": 1}, "one_kernel: 1"),
    ),
)
def test_fields_of_another_type_are_refused(arguments, got):
    (name,) = arguments
    with pytest.raises(TypeError, match=rf"^jaxmoe\.GemmConfig: {name} must be .* Got {got}\.$"):
        GemmConfig(**({"weight_tile": 128, "token_tile": 8} | arguments))


def test_index_scratch_covers_its_parts():
    # 4 counters, 5 -> 8 offsets, 2 x 20 row indices, 1 of the plan.
    assert _gemm.scratch.mlp_index_size(18, 4, False) == 4 + 8 + 40 + 1
    # One kernel counts, for each row, the tiles that are stored.
    assert _gemm.scratch.mlp_index_size(18, 4, True) == 4 + 8 + 60 + 1
    # A plan of so many rows counts 8 experts in each of 65 chunks.
    assert _gemm.scratch.mlp_index_size(2**18 + 1, 8, False) == 4 + 12 + 2 * (2**18 + 4) + 65 * 8


@pytest.mark.parametrize("mean", (1 / 64, 1, 3, 8, 20, 60, 100, 150, 300, 3000))
def test_packed_weights_have_tiles_of_their_own(mean):
    rows = max(int(mean * 64), 1)
    for config in _gemm.tiles.mlp_configs(rows, 64, 64, 2880, 2880, True, packed=True):
        assert config.tile in _gemm.tiles.PACKED


@pytest.mark.parametrize("mean", (1, 40, 56, 57, 150, 3000))
def test_codes_are_multiplied_as_they_are_from_some_rows_on(mean):
    """In both products, of rows that fit the registers of a block."""
    choose = functools.partial(_gemm.tiles.mlp_configs, mean * 64, 64, 64, 2048, gated=True)
    coded = choose(1024, packed=True, coded=True)
    decoded = choose(1024, packed=True)
    if mean + 2 * mean**0.5 <= 72:
        assert coded == decoded
    else:
        assert [c.tile for c in coded] == [(256, 128, 1, 1)] * 2 and not coded[0].gather
    long = choose(33280, packed=True, coded=True)
    assert all(c.tile in _gemm.tiles.PACKED for c in (*long, *decoded))


def test_packed_groups_of_more_rows_have_wider_tiles():
    def tile(mean):
        return _gemm.tiles.gmm_config(mean * 128, 128, 2880, 5760, packed=True).tile

    assert [tile(mean)[1] for mean in (1, 9, 10, 15, 16, 56, 57, 107)] == [
        *(16, 16, 32, 32, 64, 64, 128, 128)
    ]
    # The widest where it spares one.
    assert [tile(mean)[1] for mean in (108, 136, 138, 225, 227, 286, 288, 345, 347, 400)] == [
        *(160, 160, 128, 128, 160, 160, 128, 128, 160, 160)
    ]


def test_packed_products_split_the_k_loop_while_sms_have_room():
    def split(num_groups, k, weight_rows):
        return _gemm.tiles.gmm_config(num_groups, num_groups, k, weight_rows, packed=True).split_k

    # every group is hit by one row or more with probability 0.63 or so
    assert split(4, 2880, 5760) == 2
    assert split(2, 2880, 5760) == 4
    assert split(2, 2816, 5760) == 2  # of four, each would have few steps
    assert split(4, 448, 5760) == 1
    assert split(10, 2880, 5760) == 1  # 293 of 396 CTAs, so more tiles than half


def test_packed_products_split_the_k_loop_where_a_second_round_would_have_few_tiles():
    def split(tiles, k):
        return _gemm.tiles.gmm_config(1, 1, k, 128 * tiles, packed=True).split_k

    assert [split(tiles, 2048) for tiles in (198, 199, 396, 397, 594, 595)] == [2, 1, 1, 2, 2, 1]
    assert split(397, 1984) == 1


def test_packed_products_fetch_rows_in_tiles_that_can():
    for num_experts in (1, 2, 8, 128):
        for rows in range(1, 200):
            sizes = (rows, num_experts, num_experts, 2880, 2880)
            first, _ = _gemm.tiles.mlp_configs(*sizes, True, packed=True)
            assert not first.gather or first.token_tile <= _gemm.tiles.MAX_GATHER


def test_packed_products_fetch_few_rows_by_index():
    def gathers(num_tokens, top_k, num_experts):
        sizes = (num_tokens * top_k, num_experts, num_experts, 2048, 768)
        return _gemm.tiles.mlp_configs(*sizes, True, packed=True)[0].gather

    assert [gathers(t, 8, 128) for t in (1, 32, 64, 1024)] == [True, True, False, False]
    # So few rows that the products plan for themselves.
    assert [gathers(t, 2, 4) for t in (16, 17)] == [True, False]


@pytest.mark.parametrize("packed", (False, True))
def test_one_kernel_runs_both_products_where_groups_have_few_rows(packed):
    def pair(num_tokens, num_local=128, one_kernel=True):
        sizes = (num_tokens * 8, 128, num_local, 2048, 768)
        return _gemm.tiles.mlp_configs(*sizes, True, packed=packed, one_kernel=one_kernel)

    # Up to 4 tokens plan for themselves; many rows have tiles without such a kernel, or lose.
    tokens = (1, 4, 8, 16, 64, 128, 256, 320, 4096)
    chosen = [pair(t)[0].one_kernel for t in tokens]
    assert chosen == [False, False, *[True] * 3, not packed, not packed, False, False]
    for num_tokens in tokens:
        first, second = pair(num_tokens)
        two = pair(num_tokens, one_kernel=False)
        assert not second.one_kernel
        assert not two[0].one_kernel
        if first.one_kernel:
            assert first.tile == second.tile
            assert first.gather == two[0].gather
            assert first.split_k == 1
            # Past 16 usual rows an expert, two kernels have wide tiles.
            assert (two[0].tile == (256, 160, 1, 1)) == (num_tokens == 256)
        else:
            assert (first, second) == two
    # A device with few of the experts has so few tiles that their k loops are split.
    first, second = pair(8, num_local=8)
    assert max(first.split_k, second.split_k) > 1
    assert not first.one_kernel or first.tile == second.tile


@pytest.mark.parametrize("promoted", ((False, False), (True, True)))
def test_one_kernel_runs_both_products_of_fp8(promoted):
    def first(num_tokens):
        sizes = (num_tokens * 8, 128, 128, 2048, 768)
        return _gemm.tiles.mlp_configs(*sizes, True, promoted, one_kernel=True)[0]

    # Promoted sums keep tiles of 32 tokens for longer.
    tokens = (4, 8, 64, 128, 256, 320, 512)
    chosen = [first(t).one_kernel for t in tokens]
    assert chosen == [False, True, True, True, True, promoted[0], False]
    assert all(first(t).gather and first(t).split_k == 1 for t in tokens[1:5])


def test_few_long_tiles_have_a_kernel_of_their_own():
    def one(num_tokens, num_experts, top_k, hidden, intermediate):
        sizes = (num_tokens * top_k, num_experts, num_experts, hidden, intermediate)
        return _gemm.tiles.mlp_configs(*sizes, True, one_kernel=True)[0].one_kernel

    # mixtral-8x7b: 8 experts of 32 down tiles, and in an imagined one of twice the experts and H
    assert not one(32, 8, 2, 4096, 14336)
    assert one(64, 16, 2, 8192, 14336)
    # deepseek-v3 has K past what token tiles of a group share in L2: no such tile at 24 usual rows
    assert one(256, 256, 8, 7168, 2048) and not one(512, 256, 8, 7168, 2048)


@pytest.mark.parametrize("num_experts", (1, 2, 8, 32, 64, 128))
@pytest.mark.parametrize(("hidden", "intermediate"), ((2048, 768), (1024, 2048), (2048, 2048)))
def test_two_kernels_keep_their_tiles(num_experts, hidden, intermediate):
    """Of groups of 16 to 24 usual rows, for which one kernel has others."""
    for rows in range(10 * num_experts, 20 * num_experts, 2):
        sizes = rows, num_experts, num_experts, hidden, intermediate
        one, two = (
            _gemm.tiles.mlp_configs(*sizes, True, one_kernel=allowed) for allowed in (True, False)
        )
        assert one[0].one_kernel or one == two
        assert one[0].gather == two[0].gather
