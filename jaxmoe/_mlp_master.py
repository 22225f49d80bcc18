"""The layer with master weights: float32 weights, products in the narrower dtype of the tokens.

moe_mlp_master_p and moe_mlp_rows_master_p: the arguments and results of `moe_mlp_p` and
`moe_mlp_rows_p`, with w_gate_up, w_down and the biases in float32

Everywhere they are those ops of weights rounded to the dtype of x. They are ops because of their
derivative: the gradient of a rounded array has its narrow dtype, whatever is done to it, and here
the gradient of the weights is the float32 sum of the product that makes it.
"""

from collections.abc import Callable
from typing import Any

from jaxmoe import _mlp_sharding, _mlp_whole, _primitive, _sharding
from jaxmoe._mlp import (
    in_parts,
    mlp_batch,
    mlp_jvp,
    moe_mlp_p,
    moe_mlp_rows_p,
    rows_batch,
    rows_in_parts,
    rows_jvp,
)


def _rounded(args: Any, first: int) -> list[Any]:
    """Rounds both weights and both biases, which start at `first`, to the dtype of x."""
    dtype = args[0].dtype
    return [a.astype(dtype) if first <= i < first + 4 else a for i, a in enumerate(args)]


def _define(
    op: _primitive.Op, jvp: Callable[..., Any], batch: Any, rule: _sharding.Rule, first: int
) -> _primitive.Op:
    def forward(*args: Any, **params: Any) -> Any:
        return op(*_rounded(args, first), **params)

    def batched(args: Any, dims: Any, **params: Any) -> Any:
        return batch(master, args, dims, **params)

    master = _primitive.define(
        f"{op.name}_master",
        out=op.out,
        xla=forward,
        batch=batched,
        jvp=jvp,
        rule=rule,
        composed=True,
    )
    return master


def _layer(*arrays: Any, **params: Any) -> Any:
    return moe_mlp_master_p(*arrays, **params)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    if _sharding.divided_by_xla(primals):
        return _layer(*primals, **params), (_tangent(primals, tangents, **params),)
    return mlp_jvp(_rounded(primals, 3), tangents, **params)


def _rows_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return rows_jvp(_rounded(primals, 2), tangents, **params)


_rule = _mlp_sharding.layer_rule(_layer, in_parts)
moe_mlp_master_p = _define(moe_mlp_p, _jvp, mlp_batch, _rule, 3)
_tangent = _mlp_whole.derivative(moe_mlp_master_p.name, _layer, in_parts)

_rows_rule = _mlp_sharding.rows_rule(rows_in_parts)
moe_mlp_rows_master_p = _define(moe_mlp_rows_p, _rows_jvp, rows_batch, _rows_rule, 2)
