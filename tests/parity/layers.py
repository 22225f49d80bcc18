"""Layers that need more than one call, each a function of its row and weights.

docs/models.md names them. `b.x` are the tokens [T, H]; `b.routing`, `b.experts` and `b.options` are
what the row says; `b["name"]` is an array, module or number of the configuration.
"""

import jax
import jax.numpy as jnp

import jaxmoe
from tests.parity.cells import LENGTH, SEQUENCES, Layer, largest


def rms_norm(x: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)


def normed_result(b: Layer) -> jax.Array:
    """A.X K1: a norm of the sum of routed and shared experts."""
    y = jaxmoe.moe_mlp(b.x, b.routing, b.experts, **b.options)
    norm = b["post_mlp_layernorm"]
    return rms_norm(y, b["rms_norm_eps"]) * norm.weight


def normed_tokens(b: Layer) -> jax.Array:
    """Gemma 4: router and experts have norms of their own."""
    x = rms_norm(b.x, b["rms_norm_eps"])
    scale = b["router"].scale * b["hidden_size"] ** -0.5
    b.names["logits"] = b.names.linear(b["router"].proj, x * scale)
    x = x * b["pre_feedforward_layernorm_2"].weight
    return jaxmoe.moe_mlp(x, b.routing, b.experts)


def zero_experts(b: Layer) -> jax.Array:
    """LongCat: experts past the last one return what they read."""
    routing = b.routing
    zero = routing.expert_ids >= b["n_routed_experts"]
    share = jnp.where(zero, routing.weights, 0.0).sum(1, keepdims=True)
    return jaxmoe.moe_mlp(b.x, routing, b.experts, residual=share * b.x, **b.options)


def deep_router(b: Layer) -> jax.Array:
    """Zaya: the router is an MLP with a state, here of ones; the last of its experts is none."""
    router, mlp = b["gate"], b["gate"].router_mlp
    h = b.names.linear(router.down_proj) + router.router_states_scale
    h = rms_norm(h, b["rms_norm_eps"]) * mlp.norm.weight
    for product in (mlp.fc1, mlp.fc2):
        h = jax.nn.gelu(b.names.linear(product, h), approximate=False)
    b.names["logits"] = b.names.linear(mlp.out_proj, h)
    return jaxmoe.moe_mlp(b.x, b.routing, b.experts, **b.options)


def sparse_mixer(b: Layer) -> jax.Array:
    """Phi-3.5-MoE: two choices, each weighted by a softmax of the logits close to it."""

    def choice(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        best = logits.max(-1, keepdims=True)
        distance = (best - b["logits"]) / jnp.maximum(jnp.abs(b["logits"]), best)
        close = jnp.where(distance > 2 * b["router_jitter_noise"], -jnp.inf, logits)
        ids = largest(logits, 1)
        return ids, jnp.take_along_axis(jax.nn.softmax(close, -1), ids, 1)

    first, weight = choice(b["logits"])
    taken = jax.nn.one_hot(first[:, 0], b["num_local_experts"], dtype=bool)
    second, other = choice(jnp.where(taken, -jnp.inf, b["logits"]))
    ids, weights = jnp.concatenate([first, second], 1), jnp.concatenate([weight, other], 1)
    return jaxmoe.moe_mlp(b.x, jaxmoe.Routing(ids, weights, b["num_local_experts"]), b.experts)


def capacity(b: Layer) -> jax.Array:
    """Switch: an expert takes the first tokens of a sequence, up to its capacity."""
    routing = b.routing
    ids = routing.expert_ids.reshape(SEQUENCES, LENGTH)
    taken = jax.nn.one_hot(ids, b["num_experts"], dtype=jnp.int32).cumsum(1)
    place = jnp.take_along_axis(taken, ids[..., None], 2)[..., 0]
    ids = jnp.where(place <= b["expert_capacity"], ids, -1).reshape(-1, 1)
    return jaxmoe.moe_mlp(b.x, jaxmoe.Routing(ids, routing.weights, routing.num_experts), b.experts)


def latent(b: Layer) -> jax.Array:
    """Nemotron-3: experts read and write fewer numbers than a token has."""
    x = b.names.linear(b["fc1_latent_proj"])
    y = jaxmoe.moe_mlp(x, b.routing, b.experts)
    return b.names.linear(b["fc2_latent_proj"], y) + b.options["residual"]


def normed_rows(b: Layer) -> jax.Array:
    """Muse Spark: as `latent`, and a norm of what each expert returns, before it is weighted."""
    eps, post_eps = b["rms_norm_eps"], b["post_norm_eps"]
    x = rms_norm(b.names.linear(b["pre_expert_proj"]), eps)
    x = x * (1 + b["pre_expert_norm"].weight)
    out = jaxmoe.expert_rows(x, b.routing, b.experts)
    rows = rms_norm(out.rows * (1 + b["experts"].post_expert_norm.weight), post_eps)
    return b.names.linear(b["post_expert_proj"], jaxmoe.finalize(rows, out, out.weights))


def appended_experts(b: Layer) -> jax.Array:
    """Inkling: shared experts, which have logits, are further experts of the one call."""
    w = b["shared_experts"]
    gate_up = jnp.concatenate([b["gate_up_proj"], jnp.concatenate([w.gate_proj, w.up_proj], 1)])
    experts = jaxmoe.Experts(
        gate_up=gate_up, down=jnp.concatenate([b["down_proj"], w.down_proj]), layout="nk"
    )
    return jaxmoe.moe_mlp(b.x, b.routing, experts)


def two_modalities(b: Layer) -> jax.Array:
    """Ernie 4.5 VL: text and images have a router and experts each, and share one expert."""
    y = b.options["residual"]
    for modality, name in enumerate(("text_moe", "vision_moe")):
        block = b[name]
        b.names["logits"] = b.names.linear(block.gate)
        b.names["e_score_correction_bias"] = block.gate.moe_statics.e_score_correction_bias
        mine = b["moe_mm_token_type_ids"].reshape(-1, 1) == modality
        ids = jnp.where(mine, b.routing.expert_ids, -1)
        routing = jaxmoe.Routing(ids, b.routing.weights, b.routing.num_experts)
        for array in ("gate_up_proj", "down_proj"):
            b.names[array] = getattr(block.experts, array)
        y = jaxmoe.moe_mlp(b.x, routing, b.experts, residual=y)
    return y


def experts_of_attention(b: Layer) -> jax.Array:
    """JetMoE: experts make the queries and read what attention gives, here the queries."""
    routing = b.routing
    plan = jaxmoe.plan(routing.expert_ids, b["num_local_experts"])
    product = lambda rows, name: jaxmoe.grouped_gemm(  # noqa: E731
        rows, b[name].weight, plan.group_sizes, weight_layout="nk"
    )
    rows = product(jaxmoe.permute(b.x, plan), "input_linear")
    queries = rows[plan.slot_to_row]  # [T, K, width], what attention has
    back = jnp.zeros_like(rows).at[plan.slot_to_row].set(queries)
    bias = jnp.broadcast_to(b["bias"], b.x.shape)
    return jaxmoe.finalize(product(back, "output_linear"), plan, routing.weights, residual=bias)


def product_keys(b: Layer) -> jax.Array:
    """Doge: an expert is one neuron, its logit the sum of two; a dense MLP beside them."""
    a, c = b.names.linear(b["router_gate"]).reshape(2, b.x.shape[0], -1)
    b.names["logits"] = (a[:, :, None] + c[:, None, :]).reshape(b.x.shape[0], -1)
    return jaxmoe.moe_mlp(b.x, b.routing, b.experts, **b.options)


def experts_by_data_set(b: Layer) -> jax.Array:
    """ViTPose: the data set of an image chooses the second product of a part of each token."""
    h = jax.nn.gelu(b.names.linear(b["fc1"]), approximate=False)
    ids = jnp.repeat(b["indices"], LENGTH)[:, None]
    plan = jaxmoe.plan(ids, b["num_experts"])
    part = jaxmoe.grouped_gemm(
        jaxmoe.permute(h, plan),
        b.names.stack("weight"),
        plan.group_sizes,
        weight_layout="nk",
        bias=b.names.stack("bias"),
    )
    part = jaxmoe.finalize(part, plan, jnp.ones(ids.shape, jnp.float32))
    return jnp.concatenate([b.names.linear(b["fc2"], h), part], axis=-1)
