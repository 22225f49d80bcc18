"""Load balancing: losses and a bias that keep a router from overusing some experts.

Plain jnp on every device and no primitive, so this file is its own definition.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import max_dim

from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading


@_checks.array_likes
def load_balancing_loss(
    scores: jax.Array, expert_ids: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Measures how much the tokens of a batch crowd on few experts: Switch's loss.

    loss = E * sum over e of count[e] / N * P[e]

    count[e] is the number of slots (t, k) of valid tokens with expert_ids[t, k] = e, N the number
    of valid tokens and P[e] the mean of scores[:, e] over them. This is `load_balancing_loss_func`
    of Hugging Face's Mixtral and Qwen3-MoE on one layer, so their `router_aux_loss_coef` fits. It
    is K where the slots, or scores that add up to 1, are spread evenly. With the fraction of slots
    f[e] = count[e] / (K N) it is K * (E * sum f[e] P[e]): divide it by K for the form that is 1
    there. For K = 1 both are Switch's.

    Args:
      scores: [T, E] bfloat16, float16 or float32, usually softmax(logits); `route` returns those of
        its method. T stands for one axis or several, such as [B, S, E], here and below.
      expert_ids: [T, K] int32. Ids below 0 or from E on count for no expert; N stays.
      mask: [T] bool, True for valid tokens; None if all are. Others have no influence, NaN or not.

    Returns:
      [] float32; 0 if there is no valid token. Multiply it by your coefficient.

    Raises:
      TypeError: an argument is not an array of such a dtype.
      ValueError: a wrong rank, lengths that disagree, or E or K of 0.

    Numerics: float32 sums; counts are exact integers, rounded to float32 once. The gradient is that
      of P with the counts fixed, exactly 0 for experts without a slot. A NaN of a valid token makes
      the loss NaN.
    Sharding: tokens may be split. Inside `jax.shard_map` it balances each device's tokens on their
      own: the mean over devices is not the loss of all tokens.
    Source: Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> scores = jnp.array([[0.75, 0.25], [0.75, 0.25]])
      >>> float(jaxmoe.load_balancing_loss(scores, jnp.array([[0], [0]], jnp.int32)))
      1.5
    """
    op = "load_balancing_loss"
    lead = _leading.of_tokens(op, scores)
    if lead is not None:
        scores, expert_ids = lead.flat("scores", scores), lead.flat("expert_ids", expert_ids)
        mask = lead.flat_mask(mask)
    _check_scores(op, scores, expert_ids, mask, "T", ("num_tokens",))
    return scores.shape[-1] * _load_times_score(_masked(scores, mask), expert_ids, mask)


@_checks.array_likes
def sequence_balance_loss(
    scores: jax.Array, expert_ids: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Measures how much the tokens of each sequence crowd on few experts: DeepSeek-V3's loss.

    loss[b] = sum over e of f[b, e] * P[b, e]
    f[b, e] = E / (K N[b]) * number of slots of valid tokens of b with id e
    P[b, e] = mean over the N[b] valid tokens of scores[b, s, e] / sum of scores[b, s]

    It is 1 where the slots or the scores of a sequence are spread evenly. The paper adds alpha
    times this, and counts the experts of the K largest scores, not those chosen with a selection
    bias: to do the same, pass the ids of a top-k of the scores.

    Args:
      scores: [B, S, E] bfloat16, float16 or float32, at least 0, such as sigmoid(logits). B
        sequences of S tokens; they need not add up to 1, and all-zero ones stay 0.
      expert_ids: [B, S, K] int32. Ids below 0 or from E on count for no expert; N stays.
      mask: [B, S] bool, True for valid tokens; None if all are. Others have no influence, NaN or
        not.

    Returns:
      [B] float32; 0 for a sequence without a valid token. Take the mean, times your alpha.

    Raises:
      TypeError: an argument is not an array of such a dtype.
      ValueError: a wrong rank, lengths that disagree, or E or K of 0.

    Numerics: float32 sums; counts are exact integers, rounded to float32 once. The gradient is that
      of P with the counts fixed. A NaN of a valid token makes its sequence NaN.
    Sharding: sequences may be split freely; the tokens of one may not inside `jax.shard_map`.
    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 17 to 20.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> scores = jnp.array([[[6.0, 2.0], [6.0, 2.0]]])
      >>> jaxmoe.sequence_balance_loss(scores, jnp.array([[[0], [0]]], jnp.int32)).tolist()
      [1.5]
    """
    op = "sequence_balance_loss"
    _check_scores(op, scores, expert_ids, mask, "B,S", ("sequences", "tokens of a sequence"))
    x = _masked(scores, mask)
    total = x.sum(-1, keepdims=True)
    total = jnp.where(total == 0, 1.0, total)
    # The slope of x / total has the square of the total, which underflows long before it does.
    near = jax.lax.stop_gradient(1.0 / jnp.clip(jnp.abs(total), 1e-37, 1.0))
    x = (x * near) / (total * near)
    return scores.shape[-1] / expert_ids.shape[-1] * _load_times_score(x, expert_ids, mask)


@_checks.array_likes
def router_z_loss(logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Measures how far the router's logits have grown: ST-MoE's z-loss.

    loss = mean over valid tokens t of log(sum over e of exp(logits[t, e]))^2

    Args:
      logits: [T, E] bfloat16, float16 or float32. -inf leaves an expert out. T stands for one axis
        or several.
      mask: [T] bool, True for valid tokens; None if all are. Others have no influence, NaN or not.

    Returns:
      [] float32; 0 if there is no valid token. Multiply it by your coefficient.

    Raises:
      TypeError: an argument is not an array of such a dtype.
      ValueError: a wrong rank, lengths that disagree, or E of 0.

    Numerics: float32 from the logits on; the largest logit is subtracted before exp. A NaN of a
      valid token makes the loss NaN.
    Sharding: tokens may be split; inside `jax.shard_map` take the mean over devices, which have
      equally many tokens unless there is a mask.
    Source: ST-MoE, https://arxiv.org/abs/2202.08906, equation 5.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> float(jaxmoe.router_z_loss(jnp.array([[3.0], [1.0]])))
      5.0
    """
    op = "router_z_loss"
    lead = _leading.of_tokens(op, logits)
    if lead is not None:
        logits, mask = lead.flat("logits", logits), lead.flat_mask(mask)
    _check_rows(op, "logits", logits, "T", mask, ("num_tokens",))
    z = jax.nn.logsumexp(_masked(logits, mask), axis=-1)
    squares = jnp.square(z) if mask is None else jnp.where(mask, jnp.square(z), 0.0)
    return squares.sum() / _num_valid(mask, logits.shape[0])


@_checks.array_likes
def expert_load(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    """Counts the slots of each expert.

    load[e] = number of (t, k) with expert_ids[t, k] = e

    Args:
      expert_ids: [T, K] int32, T one axis or several. Ids below 0 or from num_experts on count for
        no expert: set those of padding tokens to -1.
      num_experts: number of experts, E, at least 1.

    Returns:
      [num_experts] int32.

    Raises:
      TypeError: `expert_ids` is not an int32 array, or `num_experts` not a Python int.
      ValueError: `expert_ids` has another rank or K of 0, or `num_experts` is below 1.

    Numerics: integers, exact.
    Sharding: tokens may be split; inside `jax.shard_map`, `jax.lax.psum` adds the loads of devices.
    Source: the counts of https://arxiv.org/abs/2408.15664, algorithm 1.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> jaxmoe.expert_load(jnp.array([[1, 0], [1, -1]], jnp.int32), 3).tolist()
      [1, 2, 0]
    """
    op = "expert_load"
    lead = _leading.of_tokens(op, expert_ids)
    if lead is not None:
        expert_ids = lead.flat("expert_ids", expert_ids)
    _check_ids(op, expert_ids, "T,K")
    return _load(expert_ids, _checks.check_int(op, "num_experts", num_experts, 1))


@_checks.array_likes
def update_selection_bias(
    bias: jax.Array, load: jax.Array, *, rate: float | jax.Array
) -> jax.Array:
    """Moves the bias that experts are chosen with one step towards an even load.

    new[e] = bias[e] + rate * sign(mean(load) - load[e])

    The bias is added to the scores to choose experts and not to weigh them. It is state beside the
    parameters: update it once for each step and layer, with the load of the whole batch.

    Args:
      bias: [E] float32. A narrower type would swallow small steps.
      load: [E] int32, slots of each expert, as `expert_load` counts them.
      rate: the step, at least 0: a number, or a scalar float32 array for a schedule. The paper's
        is 0.001.

    Returns:
      [E] float32, the new bias; the argument is left as it is.

    Raises:
      TypeError: an argument is not an array of such a dtype, or `rate` neither number nor array.
      ValueError: a wrong rank, lengths that disagree, E of 0, or a negative `rate`.

    Numerics: signs are exact, from integers, so equal loads move nothing; one float32 addition.
    Sharding: experts may not be split. Inside `jax.shard_map` pass the psum of the loads, so that
      every device makes the same bias. All loads together must stay below 2^31.
    Source: auxiliary-loss-free balancing, https://arxiv.org/abs/2408.15664, algorithm 1.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> load = jnp.array([5, 1, 3], jnp.int32)
      >>> jaxmoe.update_selection_bias(jnp.zeros(3), load, rate=0.25).tolist()
      [-0.25, 0.25, 0.0]
    """
    op = "update_selection_bias"
    _checks.check_rank(op, "bias", bias, "E")
    _checks.check_dtype(op, "bias", bias, ("float32",))
    _check_not_empty(op, "bias", bias, "num_experts")
    _checks.check_rank(op, "load", load, "E")
    _checks.check_dtype(op, "load", load, ("int32",))
    _checks.check_same_dim(op, "load", load, 0, "bias", bias, 0, "num_experts")
    step = _checked_rate(op, rate)
    load = jnp.asarray(load)
    # load < mean if load < ceil(mean), load > mean if load > floor(mean)
    total = load.sum(dtype=jnp.int32)
    floor = total // load.size
    ceil = floor + (total % load.size != 0).astype(jnp.int32)
    sign = (load < ceil).astype(jnp.float32) - (load > floor).astype(jnp.float32)
    return bias + step * sign


def _load_times_score(x: jax.Array, expert_ids: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Sum over e of (slots per valid token) * (mean score), for x [.., S, E] that is 0 off mask."""
    if mask is not None:
        expert_ids = jnp.where(mask[..., None], expert_ids, -1)
    load = _load(expert_ids, x.shape[-1]).astype(jnp.float32)
    tokens = _num_valid(mask, x.shape[-2])
    # NOTE: not a dot product, which some devices round to fewer bits.
    return (load * x.sum(-2)).sum(-1) / tokens / tokens


@functools.partial(jax.jit, static_argnums=1)
def _load(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    """Counts the ids of [.., S, K] over the last two axes.

    NOTE: a scatter would need a sharding on Explicit meshes, and wraps id -1; one comparison of all
    K choices is a [.., S, K, E] array on CPU. This makes none larger than the scores.
    """
    chosen = [
        jax.nn.one_hot(expert_ids[..., k], num_experts, dtype=jnp.int32)
        for k in range(expert_ids.shape[-1])
    ]
    return functools.reduce(jnp.add, chosen).sum(-2, dtype=jnp.int32)


def _num_valid(mask: jax.Array | None, num_tokens: int) -> Any:
    """Number of valid tokens along the last axis of the mask; 1 if there is none."""
    if mask is None:
        return jnp.asarray(max_dim(num_tokens, 1), jnp.float32)
    return jnp.maximum(mask.sum(-1, dtype=jnp.int32), 1).astype(jnp.float32)


def _masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Makes x [.., E] float32, with 0 for tokens that are not valid."""
    x = jnp.asarray(x, jnp.float32)
    return x if mask is None else jnp.where(mask[..., None], x, 0.0)


def _check_not_empty(op: str, name: str, x: Any, meaning: str) -> None:
    if x.shape[-1] == 0:
        rule = f"{name}.shape[{x.ndim - 1}]=0 must be at least 1 ({meaning})"
        raise ValueError(_checks.message(op, rule, **{name: x}))


def _check_ids(op: str, expert_ids: Any, axes: str) -> None:
    _checks.check_rank(op, "expert_ids", expert_ids, axes)
    _checks.check_dtype(op, "expert_ids", expert_ids, ("int32",))
    _check_not_empty(op, "expert_ids", expert_ids, "top_k")


def _check_rows(
    op: str, name: str, x: Any, axes: str, mask: Any, meanings: tuple[str, ...]
) -> None:
    """Checks float rows x [axes, E] and mask [axes]."""
    _checks.check_rank(op, name, x, f"{axes},E")
    _checks.check_dtype(op, name, x, _checks.FLOATS)
    _check_not_empty(op, name, x, "num_experts")
    if mask is None:
        return
    _checks.check_rank(op, "mask", mask, axes)
    _checks.check_dtype(op, "mask", mask, ("bool",))
    for axis, meaning in enumerate(meanings):
        _checks.check_same_dim(op, "mask", mask, axis, name, x, axis, meaning)


def _check_scores(
    op: str, scores: Any, expert_ids: Any, mask: Any, axes: str, meanings: tuple[str, ...]
) -> None:
    """Checks scores [axes, E], expert_ids [axes, K] and mask [axes]."""
    _check_rows(op, "scores", scores, axes, mask, meanings)
    _check_ids(op, expert_ids, f"{axes},K")
    for axis, meaning in enumerate(meanings):
        _checks.check_same_dim(op, "expert_ids", expert_ids, axis, "scores", scores, axis, meaning)


def _checked_rate(op: str, rate: Any) -> Any:
    if isinstance(rate, int | float | np.floating) and not isinstance(rate, bool):
        if not 0 <= rate <= float(np.finfo(np.float32).max):
            rule = f"rate={rate!s:.40} must be at least 0 and finite in float32"
            raise ValueError(_checks.message(op, rule))
        return jnp.float32(rate)
    if not isinstance(rate, jax.Array | np.ndarray):
        rule = "rate must be a number or a scalar float32 array"
        raise TypeError(_checks.message(op, rule, rate=rate))
    _checks.check_rank(op, "rate", rate, "")
    _checks.check_dtype(op, "rate", rate, ("float32",))
    return rate
