"""The expert layer on batches of rows that engines have sent to their experts already."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe._formats import checks as _formats_checks
from jaxmoe._gemm.tiles import GemmConfig
from jaxmoe._jax import checks as _checks
from jaxmoe._mlp import checks
from jaxmoe._mlp.batches import batches
from jaxmoe.experts import Experts
from jaxmoe.grouped_gemm import check_num_rows, clip_sizes, refuse_one_kernel
from jaxmoe.mlp import operands_of, static_of, whole_k_of
from jaxmoe.quantize import QuantizedArray

_OP = "expert_batches"


@_checks.array_likes
def expert_batches(
    x: jax.Array | QuantizedArray,
    counts: jax.Array,
    experts: Experts,
    *,
    batch_invariant: bool = False,
    recompute: str | None = None,
    config: tuple[GemmConfig | None, GemmConfig | None] | None = None,
) -> jax.Array:
    """Runs a batch of rows through each expert, where they lie.

    rows[e,m] = mlp(x[e,m], e) for m < counts[e], exactly 0 for the others

    with the mlp of `jaxmoe.moe_mlp`. For what comes from elsewhere in one batch for each local
    expert, as from the low-latency dispatch of DeepEP, and goes back like that. No row is moved.

    Args:
      x: [E, M, H], in the dtypes of `jaxmoe.moe_mlp`. Or a `QuantizedArray` of the E * M rows, as
        [E, M, ..] values and scales reshaped to [E * M, ..].
      counts: [E] integers. Rows past them may hold anything. Negative counts are 0, those above M
        are M.
      experts: the weights of the E experts, see `jaxmoe.Experts`; not with `forward_format`.
      batch_invariant: see `jaxmoe.moe_mlp`.
      recompute: "z" keeps nothing but the arguments for the backward pass.
      config: see `jaxmoe.moe_mlp`. By default tiles are chosen for M rows of each expert.

    Returns:
      [E, M, H] in the dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `jaxmoe.moe_mlp`.

    Numerics: as `jaxmoe.moe_mlp`, up to its sum over k. A scale that all tokens share is made of
      the rows in use. Derivatives are those of `jaxmoe.expert_rows`, and 0 in the other rows.
    Sharding: E may be split over Auto and Explicit mesh axes: each device has its experts' batches,
      and nothing is exchanged, but for scales that all tokens share.
    Source: https://github.com/deepseek-ai/DeepEP (the layout); MegaBlocks,
      https://arxiv.org/abs/2211.15841 (products of groups).

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> x = jnp.ones((2, 2, 2))
      >>> up, down = jnp.ones((2, 2, 3)), jnp.ones((2, 3, 2))
      >>> experts = jaxmoe.Experts(up=up, down=down, activation="relu")
      >>> jaxmoe.expert_batches(x, jnp.array([1, 2]), experts)[..., 0].tolist()
      [[6.0, 0.0], [6.0, 6.0]]
    """
    if isinstance(x, QuantizedArray):
        _formats_checks.check_tokens(_OP, "x", x)
    else:
        _checks.check_float(_OP, "x", x)
        _checks.check_rank(_OP, "x", x, "E,M,H")
    if type(batch_invariant) is not bool:
        rule = "batch_invariant must be a bool"
        raise TypeError(_checks.message(_OP, rule, batch_invariant=batch_invariant))
    format = checks.check_experts(_OP, x, experts)
    _check_batches(x, counts, experts)
    num_experts = experts.num_experts
    most = x.shape[0] // num_experts if isinstance(x, QuantizedArray) else x.shape[1]
    num_rows = num_experts * most
    check_num_rows(_OP, num_rows, x=x)
    checks.check_alone(_OP, format, {_OP: True})
    if recompute is not None:
        _checks.check_choice(_OP, "recompute", recompute, ("z",))
    flat = jax.ShapeDtypeStruct((num_rows, x.shape[-1]), x.dtype)
    local = (num_experts, 0, num_experts)
    layer = static_of(_OP, flat, experts, format, local, config, False, one_call=False)
    refuse_one_kernel(_OP, "config[0]", (layer.config or (None,))[0])
    scales = checks.check_scales(_OP, x, format, experts, num_experts)
    if batch_invariant:
        checks.check_batch_invariant_scales(_OP, x, format, scales)
        layer = whole_k_of(_OP, layer, num_rows, experts)
    a = operands_of(x, None, experts, None, layer)._replace(**scales)
    run: Any = functools.partial(batches, layer=layer)
    if recompute == "z":
        run = jax.checkpoint(run)
    return run(a, clip_sizes(counts, 0, most))


def _check_batches(x: Any, counts: Any, experts: Experts) -> None:
    """Checks the number of batches."""
    _checks.check_rank(_OP, "counts", counts, "E")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        rule = f"counts.dtype={_checks.dtype_name(counts.dtype)} must be an integer type"
        raise TypeError(_checks.message(_OP, rule, counts=counts))
    down = experts.down
    _checks.check_same_dim(_OP, "counts", counts, 0, "experts.down", down, 0, "num_experts")
    if not isinstance(x, QuantizedArray):
        _checks.check_same_dim(_OP, "x", x, 0, "experts.down", down, 0, "num_experts")
    elif x.shape[0] % experts.num_experts:
        rule = (
            f"x.shape[0]={x.shape[0]} must be a multiple of experts.down.shape[0]="
            f"{experts.num_experts} (num_experts batches of as many rows)"
        )
        raise ValueError(_checks.message(_OP, rule, x=x))
