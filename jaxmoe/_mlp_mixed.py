"""The layer with FP8 products forward and the gradients of the layer that is not quantized.

moe_mlp_mixed_p: the arguments and the result of `moe_mlp_p`. The value is that of `moe_mlp_fp8_p`
with the weights quantized here; tangents and gradients are those of `moe_mlp_p`, in which rounding
to FP8 is the identity (the straight-through estimator, https://arxiv.org/abs/1308.3432). They
come from a first product of their own, because the FP8 kernels do not leave theirs behind.
"""

import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxmoe import _primitive, _sharding
from jaxmoe._gate_up import of_moving
from jaxmoe._gmm_fp8 import promotes
from jaxmoe._mlp import mlp_jvp, moe_mlp_p
from jaxmoe._mlp_fp8 import moe_mlp_fp8_p, no_scale
from jaxmoe.quantize import quantize


def _forward(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *rest: jax.Array,
    forward_format: str,
    weight_layout: str,
    **params: Any,
) -> tuple[jax.Array, ...]:
    first, second = (
        quantize(w, forward_format, weight_layout=weight_layout) for w in (w_gate_up, w_down)
    )
    axis = 1 if weight_layout == "kn" else 2
    promoted = tuple(promotes(forward_format, None, q.shape[axis]) for q in (first, second))
    return moe_mlp_fp8_p(
        *(x, no_scale(), expert_ids, weights),
        *(first.values, first.scales, second.values, second.scales),
        *(*rest, no_scale(), no_scale()),
        format=forward_format,
        promoted=promoted,
        **params,
    )


def moe_mlp_mixed(*arrays: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
    """Calls `moe_mlp_mixed_p`, or both layers where types say how `arrays` are split."""
    if not any(_sharding.explicit_axes(jax.typeof(a)) for a in arrays):
        return moe_mlp_mixed_p(*arrays, **params)
    return _apart(*arrays, **params)


def _apart(*arrays: jax.Array, forward_format: str, **params: Any) -> tuple[jax.Array, ...]:
    """The value and the tangent as ops that are divided each by its own rule."""
    layer = functools.partial(moe_mlp_p, **params)
    value = jax.custom_jvp(functools.partial(_forward, forward_format=forward_format, **params))

    def value_and_tangent(primals: Any, tangents: Any) -> Any:
        given = [None if isinstance(t, SymbolicZero) else t for t in tangents]
        _, moved = jax.jvp(*of_moving(layer, primals, given))
        return value(*primals), moved

    value.defjvp(value_and_tangent, symbolic_zeros=True)
    return value(*arrays)


def _jvp(primals: Any, tangents: Any, *, forward_format: str, **params: Any) -> Any:
    _, moved = mlp_jvp(primals, tangents, **params)
    return moe_mlp_mixed_p(*primals, forward_format=forward_format, **params), moved


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return _primitive.one_by_one(moe_mlp_mixed_p, args, dims, **params)


def _out(*avals: Any, forward_format: str, **params: Any) -> list[_primitive.Spec]:
    del forward_format
    return moe_mlp_p.out(*avals, **params)


moe_mlp_mixed_p = _primitive.define(
    "jaxmoe_moe_mlp_mixed", out=_out, xla=_forward, batch=_batch, jvp=_jvp, composed=True
)
