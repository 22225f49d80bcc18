"""Suite `tiles`: the whole layer with every tile worth trying, against the heuristics' choice.

The tile of one product varies while the other keeps the heuristics' choice: op `moe_mlp/gate_up`,
then op `moe_mlp/down`. Candidates are all that bf16 has of `TILES`, with rasters 1, 8 and 0 (all)
and, for the gate-up product, with and without gather. Left out, by arithmetic on the routings that
are run:

- token tiles of up to 32 rows where the experts hit have more than 4 times as many rows in the
  mean: they would read each weight more than 4 times;
- the wide tiles where the experts hit have fewer than 4 rows in the mean: they multiply 128 or more
  columns for those, with half of the CTAs that read weights;
- rasters that draw the same tiles in the same order: all where no group has more rows than the
  token tile, and those of at least as many weight tiles as there are.

What the heuristics choose is timed whatever these rules say.
"""

import dataclasses
from collections.abc import Callable

import jaxmoe
from benchmarks.cases import Case
from benchmarks.suites import layer
from benchmarks.suites.entry import Entry, chain_length
from jaxmoe._gemm.tiles import ONLY_PROMOTED, STEP_K, TILES, mlp_configs

RASTERS = (1, 8, 0)
_NARROW = 32  # widest token tile of the kernels that only read weights
_MOST_READS = 4.0
_FEWEST_ROWS = 4.0


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of the layer, and what decides which tiles are worth trying for it.

    Attributes:
      name: "gate_up" or "down".
      k: elements of each row, which the product sums over.
      n: rows of each weight matrix in checkpoint order.
      mean_rows, most_rows: rows of the experts hit, over all layers of the chain.
      gathers: whether the kernel can fetch its rows by index.
      chosen: what the heuristics choose.
    """

    name: str
    k: int
    n: int
    mean_rows: float
    most_rows: int
    gathers: bool
    chosen: jaxmoe.GemmConfig


def products(case: Case) -> tuple[Product, Product]:
    """Returns the gate-up and the down product of a case."""
    model = case.model
    sizes = case.group_sizes(chain_length(layer.even_work(case)))
    mean, most = float(sizes[sizes > 0].mean()), int(sizes.max())
    gate_up, down = mlp_configs(
        num_rows=case.num_rows,
        num_experts=model.num_experts,
        num_local_experts=model.num_experts,
        hidden=model.hidden,
        intermediate=model.intermediate,
        gated=model.width == 2 * model.intermediate,
        one_token=case.num_tokens == 1,
    )
    return (
        Product("gate_up", model.hidden, model.width, mean, most, True, gate_up),
        Product("down", model.intermediate, model.hidden, mean, most, False, down),
    )


def candidates(product: Product) -> list[jaxmoe.GemmConfig]:
    """Returns the tiles to time, the heuristics' choice first."""
    found = {_kernel(product, product.chosen): product.chosen}
    for tile in (tile for tile in TILES if tile not in ONLY_PROMOTED):
        for gather in (False, True) if product.gathers else (False,):
            for raster in RASTERS:
                config = jaxmoe.GemmConfig(*tile, raster=raster, gather=gather)
                if not _hopeless(product, config):
                    found.setdefault(_kernel(product, config), config)
    return list(found.values())


def _hopeless(product: Product, config: jaxmoe.GemmConfig) -> bool:
    if product.k <= STEP_K * (config.split_k - 1):
        return True  # refused
    if config.token_tile <= _NARROW:
        return product.mean_rows > _MOST_READS * config.token_tile
    return product.mean_rows < _FEWEST_ROWS


def _kernel(product: Product, config: jaxmoe.GemmConfig) -> jaxmoe.GemmConfig:
    """Returns the same for configurations that make the device do the same."""
    weight_tiles = -(-product.n // config.weight_tile)
    raster = min(config.raster or weight_tiles, weight_tiles)
    # A group's only token tile meets each weight tile once, in whatever order.
    if product.most_rows <= config.token_tile * config.cluster:
        raster = 0
    return dataclasses.replace(config, raster=raster)


def name(product: str, config: jaxmoe.GemmConfig) -> str:
    """Names a tile, as in "gate_up 256x128 raster=8 gather"; defaults go without saying."""
    words = [product, f"{config.weight_tile}x{config.token_tile}"]
    for field in dataclasses.fields(config)[2:]:
        value = getattr(config, field.name)
        if value != field.default:
            words.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(words)


def entries(case: Case) -> list[Entry]:
    """Returns the layer with each candidate for the gate-up product, then for the down product."""
    gate_up, down = products(case)
    return [
        *_entries(case, gate_up, lambda config: (config, None)),
        *_entries(case, down, lambda config: (None, config)),
    ]


def _entries(
    case: Case, product: Product, tiles: Callable[[jaxmoe.GemmConfig], layer.Tiles]
) -> list[Entry]:
    out = []
    for config in candidates(product):
        one = layer.step(layer.moe_mlp, config=tiles(config))
        impl = name(product.name, config)
        entry = layer.layer_entry(case, f"moe_mlp/{product.name}", impl, one)
        out.append(dataclasses.replace(entry, chosen=config == product.chosen))
    return out
