"""`transformer_engine.jax.moe.moe`: router, experts and balance loss by its signature."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe._jax import checks as _checks
from jaxmoe.activation import Activation
from jaxmoe.expert_parallel import sharded_moe_mlp
from jaxmoe.experts import Experts
from jaxmoe.losses import load_balancing_loss
from jaxmoe.mlp import moe_mlp
from jaxmoe.routing import Routing, route
from jaxmoe.seams._activations import BY_NAME, of_function

_OP = "seams.transformer_engine.moe"
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@_checks.array_likes
def moe(
    x: jax.Array,
    gate_kernel: jax.Array,
    wi: jax.Array | tuple[jax.Array, jax.Array],
    wo: jax.Array,
    wi_0_bias: jax.Array | None = None,
    wi_1_bias: jax.Array | None = None,
    wo_bias: jax.Array | None = None,
    expert_bias: jax.Array | None = None,
    *,
    num_experts: int,
    num_experts_per_tok: int,
    activation_type: Any = "silu",
    score_function: Any = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    aux_loss_coeff: float = 0.0,
    apply_topk_weights_early: bool = False,
    quantizer_sets: Any = None,
    ep_axis: str | None = None,
    data_parallelism_axes: tuple[str, ...] = (),
    input_axes: tuple[str | None, ...] = (),
    gate_kernel_axes: tuple[str | None, ...] = (),
    wi_kernel_axes: tuple[str | None, ...] = ("exp", "embed", "mlp"),
    wo_kernel_axes: tuple[str | None, ...] = ("exp", "mlp", "embed"),
    dtype: Any = jnp.float32,
    recv_capacity_per_rank: int | None = None,
    norm_topk_prob: bool | None = None,
    apply_weight_on_input: bool = False,
    forward_format: str | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Computes a block of experts with its router, as Transformer Engine's function of this name.

    The last four arguments are jaxmoe's: they are what MaxText's block refuses, and a mesh.

    Args:
      x: [B, S, H] bfloat16, float16 or float32.
      gate_kernel: [H, E], of the router.
      wi: [E, H, 2I], gate first, or a pair of [E, H, I]. Another dtype than that of `x`: float32
        master weights.
      wo: [E, I, H].
      wi_0_bias, wi_1_bias: [E, I], of gate and up; both or neither.
      wo_bias: [E, H].
      expert_bias: [E], added to the scores for the choice; not with "softmax".
      num_experts: E.
      num_experts_per_tok: K.
      activation_type: of the gate: "silu", "swish", "gelu" (its tanh form), "relu" or "linear", or
        one of these functions of JAX.
      score_function: "softmax", "sigmoid", "sqrtsoftplus", or an enum with such a name.
      use_pre_softmax: softmax over all experts before the choice, not over the chosen ones.
      num_groups, group_topk: experts are chosen from the best groups, if both are positive. A group
        is worth the sum of its K / group_topk best scores: with "sigmoid" that must be 2, with
        "softmax" before the choice 1; no others.
      scaling_factor: of the routing weights.
      aux_loss_coeff: of the balance loss.
      apply_topk_weights_early: as there, `wo_bias` is then not weighted. Nothing else changes but
        rounding, which is that of `jaxmoe.moe_mlp` whatever it is.
      quantizer_sets: None, or sets without a quantizer; see `forward_format`.
      ep_axis: mesh axis over which experts are spread, None for none.
      data_parallelism_axes: mesh axes that split the batch too.
      input_axes, gate_kernel_axes, wi_kernel_axes, wo_kernel_axes: not read: arrays are divided as
        they lie.
      dtype: of the balance loss.
      recv_capacity_per_rank: not used for the layer: no token is dropped, whatever it is. None, or
        what the last result is at most, as MaxText takes a larger one for dropped tokens.
      norm_topk_prob: whether weights are divided by their sum; by default as there: with "sigmoid"
        and "sqrtsoftplus" if K > 1, not with `use_pre_softmax`. A softmax over the chosen ones is
        always.
      apply_weight_on_input: Llama 4: weights multiply what experts read. "sigmoid" and K = 1.
      forward_format: a quantized format for the value, see `jaxmoe.Experts`: FP8 on Hopper. Master
        weights are rounded first.
      mesh: of `ep_axis`; that of `jax.set_mesh` by default.

    Returns:
      (y [B, S, H] in the dtype of `x`, loss [] in `dtype` or None if its coefficient is 0,
      [1] int32, the choices of all tokens: all of them are received; see
      `recv_capacity_per_rank`).

    Raises:
      NotImplementedError: an argument that cannot be honoured, with what is allowed.
      TypeError, ValueError: wrong arrays or numbers, no bool, name or mesh where one is to be, a
        negative coefficient of the loss, a capacity below 1, an `ep_axis` without a
        mesh, or an axis that the mesh has not; and those of `jaxmoe.route`, `jaxmoe.Experts` and
        `jaxmoe.moe_mlp`.

    Numerics: logits are float32 sums and are not rounded to the dtype of `x`; neither are routing
      weights. All else is that of `jaxmoe.moe_mlp`. The loss is
      aux_loss_coeff * E / (K T^2) * sum over e of count[e] * (sum of scores[:, e]), with scores
      that add up to 1 and the counts of the experts chosen.
    Sharding: as `jaxmoe.moe_mlp`; over an `ep_axis` of several devices as
      `jaxmoe.expert_parallel.sharded_moe_mlp`, tokens over `(*data_parallelism_axes, ep_axis)`.
    Source: transformer_engine 2.20.2, transformer_engine/jax/moe.py; its fused router.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe.seams.transformer_engine import moe
      >>> y, loss, received = moe(
      ...     jnp.ones((1, 3, 2)), jnp.eye(2, 4), jnp.ones((4, 2, 6)), jnp.ones((4, 3, 2)),
      ...     num_experts=4, num_experts_per_tok=2, activation_type="relu")
      >>> y[0, 0].tolist(), loss, int(received[0])
      ([12.0, 12.0], None, 6)
    """
    del input_axes, gate_kernel_axes, wi_kernel_axes, wo_kernel_axes
    _check_booleans(
        use_pre_softmax=use_pre_softmax,
        apply_topk_weights_early=apply_topk_weights_early,
        apply_weight_on_input=apply_weight_on_input,
        **{} if norm_topk_prob is None else {"norm_topk_prob": norm_topk_prob},
    )
    _check_axes(mesh, ep_axis, data_parallelism_axes)
    num_experts = _checks.check_int(_OP, "num_experts", num_experts, 1)
    top_k = num_experts_per_tok
    num_experts_per_tok = _checks.check_int(_OP, "num_experts_per_tok", top_k, 1, num_experts)
    _checks.check_rank(_OP, "x", x, "B,S,H")
    _checks.check_float(_OP, "x", x)
    _checks.check_rank(_OP, "gate_kernel", gate_kernel, "H,E")
    _checks.check_float(_OP, "gate_kernel", gate_kernel)
    _checks.check_dim(_OP, "gate_kernel", gate_kernel, 1, num_experts, "num_experts")
    _checks.check_same_dim(_OP, "gate_kernel", gate_kernel, 0, "x", x, 2, "hidden")
    _check_weights(wi, wo, wi_0_bias, wi_1_bias, wo_bias)
    scale = _checks.check_number(_OP, "scaling_factor", scaling_factor)
    aux_loss_coeff = _checks.check_number(_OP, "aux_loss_coeff", aux_loss_coeff)
    if aux_loss_coeff < 0:
        rule = f"aux_loss_coeff={aux_loss_coeff} must be at least 0, where there is no loss"
        raise ValueError(_checks.message(_OP, rule))
    if expert_bias is not None:
        _checks.check_shape(_OP, "expert_bias", expert_bias, (num_experts,), "[E]")
    dtype = _checks.float_dtype(_OP, "dtype", dtype)
    groups = tuple(
        0 if value is None else _checks.check_int(_OP, name, value, -1)
        for name, value in (("num_groups", num_groups), ("group_topk", group_topk))
    )
    _check_no_quantizer(quantizer_sets)
    received = x.shape[0] * x.shape[1] * num_experts_per_tok
    if recv_capacity_per_rank is not None:
        capacity = recv_capacity_per_rank
        received = min(received, _checks.check_int(_OP, "recv_capacity_per_rank", capacity, 1))
    wide: Any = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    logits = jnp.matmul(x, gate_kernel.astype(x.dtype), **wide)
    score = _score(score_function)
    if apply_weight_on_input:
        options = _on_input(score, num_experts_per_tok, expert_bias, groups, norm_topk_prob)
    else:
        options = _method(
            *(score, num_experts_per_tok, use_pre_softmax, groups, norm_topk_prob),
            **{} if expert_bias is None else {"bias": expert_bias},
        )
    routing = route(logits, top_k=num_experts_per_tok, scale=scale, **options)
    unweighted = wo_bias if apply_topk_weights_early else None
    biases = (wi_0_bias, wi_1_bias, None if apply_topk_weights_early else wo_bias)
    experts = _experts(x, wi, wo, biases, _activation(activation_type), forward_format)
    layer: dict[str, Any] = {"apply_weight_on_input": True} if apply_weight_on_input else {}
    if unweighted is not None:
        chosen = jax.nn.one_hot(routing.expert_ids, num_experts, dtype=jnp.float32).sum(axis=-2)
        layer["residual"] = jnp.matmul(chosen, unweighted, **wide).astype(x.dtype)
    y = _by_mesh(x, routing, experts, mesh, ep_axis, tuple(data_parallelism_axes), layer)
    loss = None
    if aux_loss_coeff > 0:
        loss = load_balancing_loss(_probabilities(logits, score), routing.expert_ids)
        loss = (loss * (aux_loss_coeff / num_experts_per_tok)).astype(dtype)
    return y, loss, jnp.full((1,), received, jnp.int32)


def _check_booleans(**flags: Any) -> None:
    """Refuses what Python takes for true or false: a string "false" is true."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            more = " or None" if name == "norm_topk_prob" else ""
            raise TypeError(_checks.message(_OP, f"{name} must be a bool{more}", **{name: value}))


def _check_axes(mesh: Any, ep_axis: Any, data_axes: Any) -> None:
    """Refuses what is no mesh, and no names of axes; `_by_mesh` looks for these in the mesh."""
    if mesh is not None:
        kinds = jax.sharding.Mesh | jax.sharding.AbstractMesh
        _checks.check_type(_OP, "mesh", mesh, kinds, "a jax.sharding.Mesh or None")
    if ep_axis is not None:
        _checks.check_type(_OP, "ep_axis", ep_axis, str, "the name of an axis or None")
    names = isinstance(data_axes, tuple | list) and all(isinstance(a, str) for a in data_axes)
    if not names:  # NOTE: nor a string, which would be a tuple of its letters
        name = "data_parallelism_axes"
        rule = f"{name}={data_axes!r} must be a tuple of the names of axes"
        raise TypeError(_checks.message(_OP, rule))


def _check_weights(wi: Any, wo: Any, *biases: Any) -> None:
    """Refuses what is no array of the layer; `jaxmoe.Experts` checks sizes by other names."""
    _checks.check_rank(_OP, "wo", wo, "E,I,H")
    if isinstance(wi, tuple | list):
        if len(wi) != 2:
            rule = f"wi must be an array or two, gate and up, not {len(wi)}"
            raise ValueError(_checks.message(_OP, rule))
        for i, one in enumerate(wi):
            _checks.check_rank(_OP, f"wi[{i}]", one, "E,H,I")
    else:
        _checks.check_rank(_OP, "wi", wi, "E,H,2I")
    experts, inner, hidden = wo.shape
    for name, bias, size in zip(
        ("wi_0_bias", "wi_1_bias", "wo_bias"), biases, (inner, inner, hidden), strict=True
    ):
        if bias is not None:
            _checks.check_shape(_OP, name, bias, (experts, size), "[E, its outputs]")


def _check_no_quantizer(quantizer_sets: Any) -> None:
    """Refuses sets that would quantize."""
    if quantizer_sets is not None:
        what = "None or a tuple of sets without a quantizer"
        _checks.check_type(_OP, "quantizer_sets", quantizer_sets, tuple | list, what)
    quantizers = (
        getattr(one, name, None)
        for one in (quantizer_sets or ())
        for name in ("x", "kernel", "dgrad")
    )
    if any(quantizer is not None for quantizer in quantizers):
        rule = (
            "quantizer_sets must have no quantizer; forward_format= names a format that jaxmoe has"
        )
        raise NotImplementedError(_checks.message(_OP, rule))


def _score(score_function: Any) -> str:
    name = getattr(score_function, "name", score_function)
    name = name.lower() if isinstance(name, str) else name
    _checks.check_choice(_OP, "score_function", name, _SCORES)
    return name


def _on_input(
    score: str, top_k: int, bias: Any, groups: tuple[int, ...], normalized: Any
) -> dict[str, Any]:
    """The method of Llama 4."""
    if score != "sigmoid" or top_k != 1 or bias is not None or min(groups) > 0 or normalized:
        rule = (
            "apply_weight_on_input=True needs score_function='sigmoid' and num_experts_per_tok=1, "
            "without expert_bias, groups and norm_topk_prob"
        )
        raise NotImplementedError(_checks.message(_OP, rule))
    return {"method": "llama4"}


def _method(
    score: str,
    top_k: int,
    pre_softmax: bool,
    groups: tuple[int, ...],
    normalized: bool | None,
    **bias: jax.Array,
) -> dict[str, Any]:
    """The options of `jaxmoe.route` for these scores."""
    if bias and score == "softmax":
        rule = "expert_bias must be None with score_function='softmax'"
        raise NotImplementedError(_checks.message(_OP, rule, expert_bias=bias["bias"]))
    grouped: dict[str, Any] = {}
    if min(groups) > 0:
        _check_groups(score, pre_softmax, top_k, *groups)
        grouped = {"num_groups": groups[0], "top_groups": groups[1]}
    if score == "softmax" and not pre_softmax:
        return {"method": "renormalize"}
    norm = {"norm_topk_prob": bool(normalized)}
    if score == "softmax":
        return {"method": "deepseek_v2" if grouped else "softmax", **norm, **grouped}
    if normalized is None:
        norm = {"norm_topk_prob": top_k > 1}
    method = "deepseek_v3" if score == "sigmoid" else "sqrtsoftplus"
    return {"method": method, **norm, **grouped, **bias}


def _check_groups(score: str, pre_softmax: bool, top_k: int, num_groups: int, best: int) -> None:
    """Refuses groups whose worth no routing method has."""
    wanted = {"sigmoid": 2, "softmax": 1 if pre_softmax else 0}.get(score, 0)
    if top_k == wanted * best:
        return
    allowed = f"num_experts_per_tok={top_k} / {wanted}" if wanted else "None"
    kind = "softmax without use_pre_softmax" if score == "softmax" and not pre_softmax else score
    rule = f"group_topk={best} with num_groups={num_groups} must be {allowed} with {kind}"
    raise NotImplementedError(_checks.message(_OP, rule))


def _activation(activation_type: Any) -> Activation:
    known = BY_NAME.get(activation_type) if isinstance(activation_type, str) else None
    if callable(activation_type):
        known = of_function(activation_type)
    if known is None:
        rule = f"activation_type must be one of {', '.join(BY_NAME)}, or such a function of jax.nn"
        raise NotImplementedError(_checks.message(_OP, rule, activation_type=activation_type))
    return known


def _experts(
    x: Any, wi: Any, wo: Any, biases: tuple[Any, Any, Any], activation: Any, format: str | None
) -> Experts:
    if format is not None:  # which has no master weights
        wi, wo, biases = jax.tree.map(lambda a: a.astype(x.dtype), (wi, wo, biases))
    gate_bias, up_bias, down_bias = biases
    first: dict[str, Any]
    if isinstance(wi, tuple | list):
        gate, up = wi
        first = {"gate": gate, "up": up, "gate_bias": gate_bias, "up_bias": up_bias}
    else:
        if (gate_bias is None) != (up_bias is None):
            rule = "wi_0_bias and wi_1_bias must both be given, or neither"
            raise ValueError(_checks.message(_OP, rule, wi_0_bias=gate_bias, wi_1_bias=up_bias))
        bias = None if gate_bias is None else jnp.concatenate([gate_bias, up_bias], axis=-1)
        first = {"gate_up": wi, "gate_up_bias": bias}
    return Experts(
        **first,
        down=wo,
        down_bias=down_bias,
        activation=activation,
        dtype=None if wo.dtype == x.dtype else x.dtype,
        forward_format=format,
    )


def _by_mesh(
    x: jax.Array,
    routing: Routing,
    experts: Experts,
    mesh: Any,
    ep_axis: str | None,
    data_axes: tuple[str, ...],
    options: dict[str, Any],
) -> jax.Array:
    """The layer, over devices if there are several along the axis of experts."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    if ep_axis is not None:
        if mesh.empty:
            rule = f"ep_axis={ep_axis!r} needs a mesh: give mesh=, or call it inside jax.set_mesh"
            raise ValueError(_checks.message(_OP, rule))
        _checks.check_choice(_OP, "ep_axis", ep_axis, mesh.axis_names)
        for axis in data_axes:
            _checks.check_choice(_OP, "data_parallelism_axes", axis, mesh.axis_names)
    if ep_axis is None or mesh.shape[ep_axis] == 1:
        return moe_mlp(x, routing, experts, **options)
    y: Any = sharded_moe_mlp(
        *(x, routing, experts),
        mesh=mesh,
        axis_name=ep_axis,
        data_axis=data_axes or None,
        **options,
    )
    return y


def _probabilities(logits: jax.Array, score: str) -> jax.Array:
    """Scores of the balance loss, which add up to 1."""
    if score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    scores = jax.nn.sigmoid(logits)
    if score == "sqrtsoftplus":
        scores = jnp.sqrt(jax.nn.softplus(logits))
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
