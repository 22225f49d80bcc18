"""Every MoE block of transformers against the calls that docs/models.md has for it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe._testing import assert_close
from tests.parity import cells, page, table

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

from tests.parity import blocks  # noqa: E402


def parameters():
    """Yields (case, variant, place of the row among those of its class), each with a name."""
    seen = []
    for case in table.CASES:
        seen.append(case.block)
        for i, variant in enumerate(case.variants):
            nth = seen.count(case.block) - 1
            yield pytest.param(case, variant, nth, id=f"{case.family}-{case.block}-{nth}{'ab'[i]}")


# With the second, logits are about 20 times as far apart, and several of a token's sigmoids are 1.
# Where a block chooses by them, its own choice among equals is no more than that of another order
# in float32, and the tolerance is as wide; one that chooses by logit has no equals.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharpness", (1.0, 20.0))
@pytest.mark.parametrize(("case", "variant", "nth"), list(parameters()))
def test_the_row_computes_what_the_block_does(case, variant, nth, sharpness):
    rows = [row for row in page.rows() if (row.family, row.block) == (case.family, case.block)]
    block = blocks.build(case, variant, sharpness)
    if sharpness != 1 and cells.router_of(blocks.arrays_of(block)) is None:
        pytest.skip("its logits are no product of one matrix")
    x = jnp.asarray(blocks.tokens().reshape(-1, blocks.HIDDEN).numpy())
    config = blocks.config_of(case, variant)
    names = cells.Names(x, blocks.arrays_of(block), config, case.inputs)
    y = cells.Layer(rows[nth], names, case.own)()
    assert_close(y, *blocks.results(case, variant, sharpness))


def test_every_block_of_transformers_has_a_row():
    """A class that a new release adds needs a row, or a reason in `WITHOUT_ROW`."""
    known = {(case.family, case.block) for case in table.CASES} | table.WITHOUT_ROW.keys()
    assert blocks.found() - known == set(), "new in transformers"
    assert known - blocks.found() == set(), "no longer in transformers"


@pytest.mark.filterwarnings("ignore")
def test_the_reference_is_float64_where_a_class_asks_for_float32():
    case = next(case for case in table.CASES if case.family == "axk1")
    with blocks.wide_floats():
        norm = blocks.build(case, {}).double().post_mlp_layernorm
        y = norm(blocks.tokens().double()).detach().numpy()
    x, weight = blocks.tokens().double().numpy(), norm.weight.detach().numpy()
    mean = np.square(x).mean(-1, keepdims=True)
    np.testing.assert_allclose(y, weight * x / np.sqrt(mean + norm.variance_epsilon), rtol=1e-13)
