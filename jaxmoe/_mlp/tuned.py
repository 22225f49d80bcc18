"""Tiles that were measured, where the layer asks for its tiles: the context of autotuning."""

import dataclasses
from typing import Any, Protocol

import jax

from jaxmoe._gemm.tiles import GemmConfig
from jaxmoe._jax import sizes as _sizes
from jaxmoe._mlp.operands import Layer, Operands

Pair = tuple[GemmConfig, GemmConfig]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the best tiles of a layer on one device depend on, apart from the device.

    Attributes:
      format: of the weights, and of tokens if they have one of their own.
      dtype: of the result.
      layouts: "kn" or "nk" for each weight, as stored.
      activation: "gated" or "ungated".
      order: of gate and up, see `jaxmoe.Experts`; "apart" if they are two arrays.
      promoted: whether each product promotes its sums; None where the format has no choice.
      num_tokens, top_k: T and K.
      num_experts, num_local_experts: those that tokens are routed over, and those here.
      hidden, intermediate: H and I.
      finalize: whether the layer ends with the sum of each token's rows.
      static: whether scales of the activations are given. Results of before do not say.
      given: whether tokens are quantized already, in a format that multiplies codes by those that
        it quantizes itself. Results of before do not say.
    """

    format: str
    dtype: str
    layouts: tuple[str, str]
    activation: str
    order: str
    promoted: tuple[bool, bool] | None
    num_tokens: int
    top_k: int
    num_experts: int
    num_local_experts: int
    hidden: int
    intermediate: int
    finalize: bool
    static: bool = False
    given: bool = False


class Table(Protocol):
    """What a context holds, hashable: measured tiles, or something that notes what is asked."""

    def find(self, problem: Problem, a: Operands, layer: Layer) -> Pair | None:
        """The tiles for the two products, or None."""


# JAX traces and lowers a function again where the value is another one.
_tables: Any = jax.make_user_context(())


def within(table: Table) -> Any:
    """A context in which layers ask `table` first, then those of the contexts around it."""
    return _tables((*_tables.value, table))


def problem_of(a: Operands, layer: Layer) -> Problem | None:
    """The problem of a call, None if its sizes are not known yet."""
    num_tokens, top_k = a.expert_ids.shape
    if not _sizes.is_known(num_tokens):
        return None
    return Problem(
        format=layer.format.described,
        dtype=jax.numpy.dtype(layer.dtype).name,
        layouts=layer.layouts,
        activation="gated" if layer.activation.gated else "ungated",
        order=layer.gate_up if a.w_up is None else "apart",
        promoted=layer.promoted,
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=layer.num_experts,
        num_local_experts=layer.num_local_experts,
        hidden=a.x.shape[1],
        intermediate=layer.intermediate(a.w_down),
        finalize=layer.finalize,
        static=a.h_scale is not None,
        given=a.x_scales is not None and layer.multiplies_codes((*a.absent, "x_scales")),
    )


def find(a: Operands, layer: Layer) -> Pair | None:
    """The tiles that the innermost table has for a layer whose caller chose none."""
    tables = _tables.value
    problem = problem_of(a, layer) if tables else None
    if problem is None:
        return None
    found = (table.find(problem, a, layer) for table in reversed(tables))
    return next((pair for pair in found if pair is not None), None)
