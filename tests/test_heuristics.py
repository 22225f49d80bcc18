"""Tile choice: every choice is a kernel that exists, and the Python table is the C++ one."""

import dataclasses
import pathlib
import re

import pytest

from jaxmoe import GemmConfig, _heuristics

KERNEL_TABLE = pathlib.Path(__file__).parents[1] / "csrc" / "moe_gemm" / "moe_gemm.cuh"


def test_tiles_are_the_instantiated_ones():
    text = KERNEL_TABLE.read_text(encoding="utf-8")
    rows = re.findall(r"JAXMOE_TILE\((\d+), (\d+), \d+, k\w+, (\d), (\d)\)", text)
    built = {(int(wt), int(tt), int(cluster)): int(ctas) for wt, tt, ctas, cluster in rows}
    assert built == _heuristics.TILES


@pytest.mark.parametrize("num_experts", (0, 1, 8, 40, 128, 160, 256, 384, 512))
@pytest.mark.parametrize("top_k", (1, 2, 8, 22))
def test_every_choice_is_legal(num_experts, top_k):
    around = {2**exponent + step for exponent in range(21) for step in (-1, 0, 1)}
    for num_tokens in around:
        rows = num_tokens * top_k
        alone = _heuristics.gmm_config(rows, num_experts)
        up, down = _heuristics.mlp_configs(rows, num_experts, 768)
        for config in (alone, up, down):
            assert (config.weight_tile, config.token_tile, config.cluster) in _heuristics.TILES
            assert config.raster >= 0
        # only the gate-up product has an index to fetch rows by
        assert not alone.gather and not down.gather


def test_a_tile_holds_the_rows_most_groups_have():
    for mean in (1, 4, 16, 40, 100, 120, 150, 256):
        config = _heuristics.gmm_config(mean * 128, 128)
        assert config.token_tile * config.cluster >= mean


def test_attributes_are_integers():
    attrs = GemmConfig(256, 128, raster=8).attrs()
    assert attrs == {
        "weight_tile": 256,
        "token_tile": 128,
        "cluster": 1,
        "raster": 8,
        "gather": 0,
    }
    assert all(type(value) is int for value in attrs.values())
    assert dataclasses.fields(GemmConfig)[0].name == "weight_tile"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ((100, 8), r"\(weight_tile, token_tile, cluster\)=\(100, 8, 1\) must be one of"),
        ((128, 8, 2), r"\(128, 8, 2\) must be one of"),
        ((128, 8, 1, -1), r"raster=-1 must be at least 0"),
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
    ),
)
def test_fields_of_another_type_are_refused(arguments, got):
    (name,) = arguments
    with pytest.raises(TypeError, match=rf"^jaxmoe\.GemmConfig: {name} must be .* Got {got}\.$"):
        GemmConfig(**({"weight_tile": 128, "token_tile": 8} | arguments))


def test_index_scratch_covers_its_parts():
    # 4 counters, 5 -> 8 offsets, 2 x 20 row indices, 1 of the plan.
    assert _heuristics.mlp_index_size(18, 4) == 4 + 8 + 40 + 1
