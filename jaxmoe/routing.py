"""Routing: from the router's logits to the experts of each token and their weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import _checks, _primitive


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts of each token. A pytree; make one from your own arrays to use another router.

    Attributes:
      expert_ids: [T, K] int32. Ids below 0 or past the last expert mean "no expert".
      weights: [T, K] float32, the factor of each expert's output.
    """

    expert_ids: jax.Array
    weights: jax.Array


@dataclasses.dataclass(frozen=True)
class Method:
    """One routing rule: a row of `METHODS`.

    Attributes:
      score: what is computed from the logits, a key of `SCORES`.
      normalize: what is computed from the scores of the chosen experts, a key of `NORMALIZATIONS`.
    """

    score: str
    normalize: str


METHODS: dict[str, Method] = {
    "softmax": Method(score="softmax", normalize="none"),
    "renormalize": Method(score="logits", normalize="softmax"),
}

# Codes of the kernel's attributes. Every score so far rises with the logit, so experts are chosen
# by logit: exact, the same on every device, and not blind where a score underflows or saturates.
SCORES = {"logits": 0, "softmax": 1}
NORMALIZATIONS = {"none": 0, "softmax": 1}

_MAX_CUDA_EXPERTS = 512  # kRouteMaxExperts of csrc/kernels/route.h


def route(logits: jax.Array, *, top_k: int, method: str = "renormalize") -> Routing:
    """Chooses the experts of each token and their weights.

    expert_ids[t] = the top_k experts of largest logits[t], in falling order, ties to the smaller id
    method "renormalize": weights[t] = softmax(logits[t, expert_ids[t]])
    method "softmax":     weights[t] = softmax(logits[t])[expert_ids[t]]

    A NaN logit is an expert that cannot be chosen and is left out of the softmax; a token with
    fewer than top_k other logits gets id -1 and weight 0 in the remaining places. -inf is the
    lowest score there is and weighs 0; +inf makes the weights of its token NaN.

    Args:
      logits: [T, E] bfloat16, float16 or float32.
      top_k: experts for each token, 1 to E.
      method: "renormalize" or "softmax".

    Returns:
      `Routing` with expert_ids [T, top_k] int32 and weights [T, top_k] float32.

    Raises:
      TypeError: `logits` is not an array of such a dtype, or `top_k` not a Python int.
      ValueError: `logits` has another rank, `top_k` is out of range, or no such method.

    Numerics: float32 throughout; ids are exact, weights within a few ulp on every device. Gradients
      flow through the weights with the ids fixed, in forward and reverse mode and to any order.
    Sharding: tokens may be split freely; experts may not.
    Source: "renormalize" is Mixtral's and Qwen3's rule, https://arxiv.org/abs/2401.04088;
      "softmax" is DeepSeek-V2-Lite's and OLMoE's, https://arxiv.org/abs/2409.02060.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> routing = jaxmoe.route(jnp.array([[0.0, 2.0, 2.0, 1.0]]), top_k=2)
      >>> routing.expert_ids.tolist(), routing.weights.tolist()
      ([[1, 2]], [[0.5, 0.5]])
    """
    _checks.check_rank("route", "logits", logits, "T,E")
    _checks.check_dtype("route", "logits", logits, _checks.FLOATS)
    num_experts = logits.shape[1]
    if num_experts == 0:
        rule = "logits.shape[1]=0 must be at least 1 (num_experts)"
        raise ValueError(_checks.message("route", rule, logits=logits))
    top_k = _checks.check_int("route", "top_k", top_k, 1, num_experts, "the last axis is E")
    _checks.check_choice("route", "method", method, tuple(METHODS))
    row = METHODS[method]
    expert_ids, weights = _route(logits, top_k=top_k, score=row.score, normalize=row.normalize)
    return Routing(expert_ids, weights)


def route_xla(
    logits: jax.Array, *, top_k: int, score: str, normalize: str
) -> tuple[jax.Array, jax.Array]:
    """Computes `route` in plain jnp, binding no primitive."""
    keys, expert_ids = jax.lax.top_k(_order_key(logits.astype(jnp.float32)), top_k)
    expert_ids = jnp.where(keys == _UNSCORED, -1, expert_ids)
    return expert_ids, weights_xla(logits, expert_ids, score=score, normalize=normalize)


def weights_xla(
    logits: jax.Array, expert_ids: jax.Array, *, score: str, normalize: str
) -> jax.Array:
    """Computes the weights of chosen experts; differentiable in `logits`."""
    x = logits.astype(jnp.float32)
    chosen = expert_ids >= 0
    if score == "softmax":
        x = _softmax(x, ~jnp.isnan(x))
    x = jnp.take_along_axis(x, jnp.where(chosen, expert_ids, 0), axis=1)
    if normalize == "softmax":
        x = _softmax(x, chosen)
    return jnp.where(chosen, x, 0.0)


_UNSCORED = jnp.iinfo(jnp.int32).min


def _order_key(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 of the same order, with -0.0 equal to 0.0 and NaN last.

    NOTE: top_k on the floats themselves would rank NaN first and -0.0 below 0.0.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    key = jnp.where(bits < 0, jnp.where(bits == _UNSCORED, 0, bits ^ 0x7FFFFFFF), bits)
    return jnp.where(jnp.isnan(x), _UNSCORED, key)


def _softmax(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax of the last axis over `mask`; 0 outside it, and everywhere if all of it is -inf."""
    x = jnp.where(mask, x, -jnp.inf)  # also keeps NaN outside the mask out of the gradient
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    exp = jnp.exp(x - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = exp.sum(axis=-1, keepdims=True)
    return exp / jnp.where(total == 0, 1.0, total)


def _out(logits: Any, *, top_k: int, **_params: Any) -> list[_primitive.Spec]:
    shape = (logits.shape[0], top_k)
    return [(shape, jnp.int32), (shape, jnp.float32)]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    logits = _primitive.move_batch_to_front(args[0], dims[0])
    size, num_tokens, num_experts = logits.shape
    outs = _route(logits.reshape(size * num_tokens, num_experts), **params)
    return tuple(o.reshape(size, num_tokens, -1) for o in outs), (0, 0)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (logits,), (tangent,) = primals, tangents
    expert_ids, weights = _route(logits, **params)
    rule = {"score": params["score"], "normalize": params["normalize"]}
    _, tangent_out = jax.jvp(lambda x: weights_xla(x, expert_ids, **rule), (logits,), (tangent,))
    return (expert_ids, weights), (None, tangent_out)


def _attrs(_avals: Any, *, score: str, normalize: str, **_params: Any) -> dict[str, Any]:
    return {"score": SCORES[score], "normalize": NORMALIZATIONS[normalize]}


def _reason(avals: Any, **_params: Any) -> str | None:
    if avals[0].shape[1] <= _MAX_CUDA_EXPERTS:
        return None
    rule = f"logits.shape[1]={avals[0].shape[1]} must be at most {_MAX_CUDA_EXPERTS} on CUDA"
    return _checks.message("route", rule, logits=avals[0])


_route = _primitive.define(
    "jaxmoe_route",
    out=_out,
    xla=route_xla,
    batch=_batch,
    jvp=_jvp,
    cuda=_primitive.CudaTarget("jaxmoe_route_v1", attrs=_attrs, reason=_reason),
)
