"""The layer with master weights: float32 weights, products in the narrower dtype of the tokens.

moe_mlp_master_p and moe_mlp_rows_master_p: the arguments and results of `moe_mlp_p` and
`moe_mlp_rows_p`, with w_gate_up, w_down and the biases in float32

Everywhere they are those ops of weights rounded to the dtype of x. They are ops because of their
derivative: the gradient of a rounded array has its narrow dtype, whatever is done to it, and here
the gradient of the weights is the float32 sum of the product that makes it.
"""

from typing import Any

from jaxmoe import _primitive
from jaxmoe._mlp import (
    mlp_batch,
    mlp_jvp,
    moe_mlp_p,
    moe_mlp_rows_p,
    rows_batch,
    rows_jvp,
)


def _rounded(args: Any, first: int) -> list[Any]:
    """Rounds both weights and both biases, which start at `first`, to the dtype of x."""
    dtype = args[0].dtype
    return [a.astype(dtype) if first <= i < first + 4 else a for i, a in enumerate(args)]


def _define(op: _primitive.Op, jvp: Any, batch: Any, first: int) -> _primitive.Op:
    def forward(*args: Any, **params: Any) -> Any:
        return op(*_rounded(args, first), **params)

    def tangent(primals: Any, tangents: Any, **params: Any) -> Any:
        return jvp(_rounded(primals, first), tangents, **params)

    def batched(args: Any, dims: Any, **params: Any) -> Any:
        return batch(master, args, dims, **params)

    master = _primitive.define(
        f"{op.name}_master", out=op.out, xla=forward, batch=batched, jvp=tangent, composed=True
    )
    return master


moe_mlp_master_p = _define(moe_mlp_p, mlp_jvp, mlp_batch, 3)
moe_mlp_rows_master_p = _define(moe_mlp_rows_p, rows_jvp, rows_batch, 2)
