"""Tokens along several axes: the results of the flat call, wherever the axes are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import expert_parallel
from tests.sharding_programs import AUTO, EXPLICIT, check_spec, close, entered

B, S, H, WIDTH, E, K = 4, 6, 16, 8, 4, 2


def drawn(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


ARRAYS = {
    "x": drawn((B, S, H), 0),
    "logits": drawn((B, S, E), 1),
    "residual": drawn((B, S, H), 2),
    "gate_up": drawn((E, H, 2 * WIDTH), 3) / 4,
    "down": drawn((E, WIDTH, H), 4) / 3,
}
TOKENS = ("x", "logits", "residual")


def layer(a):
    routing = jaxmoe.route(a["logits"], top_k=K)
    experts = jaxmoe.Experts(gate_up=a["gate_up"], down=a["down"])
    return jaxmoe.moe_mlp(a["x"], routing, experts, residual=a["residual"])


def with_gradients(a, layer=layer):
    def loss(a):
        y = layer(a)
        return jnp.sum(jnp.sin(y)), y

    (_, y), grads = jax.value_and_grad(loss, has_aux=True)(a)
    return y, grads


def flat(arrays):
    return {n: a.reshape(-1, a.shape[-1]) if n in TOKENS else a for n, a in arrays.items()}


@functools.cache
def on_one_device():
    return jax.jit(with_gradients)(flat(ARRAYS))


def test_one_device():
    y, grads = jax.jit(with_gradients)(ARRAYS)
    want_y, want = on_one_device()
    np.testing.assert_array_equal(y, want_y.reshape(B, S, H))
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, want[name].reshape(grad.shape))
    more = {n: a.reshape(2, 2, *a.shape[1:]) if n in TOKENS else a for n, a in ARRAYS.items()}
    np.testing.assert_array_equal(layer(more), layer(flat(ARRAYS)).reshape(2, 2, S, H))


def test_no_tokens():
    none = {n: a[:0] if n in TOKENS else a for n, a in ARRAYS.items()}
    assert layer(none).shape == (0, S, H)


# Where B, S and the experts lie.
SPLITS = [("b", "s", "e"), (("b", "e"), "s", None), (None, "s", "e")]
SPLITS += [("b", "s", "b"), ("s", "b", "e"), ("b", None, "s")]


@pytest.mark.parametrize(
    ("split", "kind"),
    [*((split, EXPLICIT) for split in SPLITS), *((split, AUTO) for split in SPLITS[:2])],
    ids=str,
)
def test_split_axes(split, kind):
    batch, sequence, experts = split
    mesh = jax.make_mesh((2, 2, 2), ("b", "s", "e"), axis_types=(kind,) * 3)
    specs = {n: P(batch, sequence) if n in TOKENS else P(experts) for n in ARRAYS}
    with entered(mesh):
        put = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in ARRAYS.items()}
        y, grads = jax.jit(with_gradients)(put)
    want_y, want = on_one_device()
    close(y, want_y.reshape(B, S, H))
    close(grads, {n: a.reshape(ARRAYS[n].shape) for n, a in want.items()})
    if kind == EXPLICIT:
        check_spec(y, P(batch, sequence))
        check_spec(grads["x"], P(batch, sequence))


def test_route_of_a_choice_made_elsewhere():
    ids = jaxmoe.route(ARRAYS["logits"], top_k=K).expert_ids
    again = jaxmoe.route(ARRAYS["logits"], top_k=K, expert_ids=ids)
    assert again.expert_ids.shape == again.weights.shape == (B, S, K)
    np.testing.assert_array_equal(again.expert_ids, ids)


def test_rows():
    routing = jaxmoe.route(ARRAYS["logits"], top_k=K)
    experts = jaxmoe.Experts(gate_up=ARRAYS["gate_up"], down=ARRAYS["down"])
    out = jaxmoe.expert_rows(ARRAYS["x"], routing, experts)
    assert out.rows.shape == (B * S * K, H)
    assert out.weights.shape == out.slot_to_row.shape == (B, S, K)
    y = jaxmoe.finalize(out.rows, out, out.weights, residual=ARRAYS["residual"])
    np.testing.assert_array_equal(y, layer(ARRAYS))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_losses(kind):
    mesh = jax.make_mesh((2, 2), ("b", "s"), axis_types=(kind,) * 2)

    def losses(logits, mask):
        ids = jaxmoe.route(logits, top_k=K).expert_ids
        scores = jax.nn.softmax(logits)
        return {
            "balance": jaxmoe.load_balancing_loss(scores, ids, mask),
            "z": jaxmoe.router_z_loss(logits, mask),
            "load": jaxmoe.expert_load(ids, E),
        }

    logits, mask = ARRAYS["logits"], drawn((B, S), 5) > 0
    with entered(mesh):
        put = [jax.device_put(a, NamedSharding(mesh, P("b", "s"))) for a in (logits, mask)]
        got = jax.jit(losses)(*put)
    close(got, losses(logits.reshape(-1, E), mask.reshape(-1)))


def test_arguments_that_disagree():
    routing = jaxmoe.route(ARRAYS["logits"].reshape(-1, E), top_k=K)
    experts = jaxmoe.Experts(gate_up=ARRAYS["gate_up"], down=ARRAYS["down"])
    with pytest.raises(ValueError) as error:
        jaxmoe.moe_mlp(ARRAYS["x"], routing, experts)
    assert str(error.value) == (
        "jaxmoe.moe_mlp: routing.expert_ids.shape[:-1]=[24] must be [4,6], the axes of tokens of "
        "this call. Got routing.expert_ids: i32[24,2]."
    )


def test_a_mask_has_the_axes_of_tokens():
    with pytest.raises(ValueError) as error:
        jaxmoe.route(ARRAYS["logits"], top_k=K, mask=np.ones(B * S, bool))
    assert str(error.value) == (
        "jaxmoe.route: mask.shape=[24] must be [4,6] (the axes of tokens of this call). "
        "Got mask: bool[24]."
    )
    with pytest.raises(TypeError, match=r"^jaxmoe\.route: mask\.dtype=f32 must be bool"):
        jaxmoe.route(ARRAYS["logits"], top_k=K, mask=np.ones((B, S), np.float32))
    with pytest.raises(TypeError, match=r"^jaxmoe\.route: mask must be a JAX or NumPy array"):
        jaxmoe.route(ARRAYS["logits"], top_k=K, mask=[True])


def test_padding_has_one_axis():
    with pytest.raises(ValueError, match="num_valid_tokens must be None with several axes"):
        jaxmoe.route(ARRAYS["logits"], top_k=K, num_valid_tokens=3)


def spread(a, mesh, **options):
    """The layer with its experts over `e`, tokens over `b` and `e`."""
    routing = jaxmoe.route(a["logits"], top_k=K)
    experts = jaxmoe.Experts(gate_up=a["gate_up"], down=a["down"])
    axes = {"mesh": mesh, "axis_name": "e", "data_axis": "b"}
    call = functools.partial(expert_parallel.sharded_moe_mlp, a["x"], routing, experts)
    return call(residual=a["residual"], **axes, **options)


@pytest.mark.parametrize("dispatch", ("all_gather", "all_to_all"))
@pytest.mark.parametrize("split", (P("b", "e"), P(("b", "e")), P(None, "e"), P()), ids=str)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_experts_over_devices(kind, split, dispatch):
    mesh = jax.make_mesh((2, 2), ("b", "e"), axis_types=(kind,) * 2)
    specs = {n: split if n in TOKENS else P("e") for n in ARRAYS}
    spreads = functools.partial(spread, mesh=mesh, dispatch=dispatch)
    with entered(mesh):
        put = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in ARRAYS.items()}
        y, grads = jax.jit(functools.partial(with_gradients, layer=spreads))(put)
    want_y, want = on_one_device()
    close(y, want_y.reshape(B, S, H))
    close(grads, {n: a.reshape(ARRAYS[n].shape) for n, a in want.items()})
    if kind == EXPLICIT:
        check_spec(y, split if split != P() else P(("b", "e")))  # as the flat call leaves it
        check_spec(grads["x"], split)


def test_tokens_that_lie_whole_and_whose_first_axis_does_not_divide():
    """Results of tokens that are split by the call are put together again."""
    mesh = jax.make_mesh((8,), ("e",), axis_types=(EXPLICIT,))
    rng = np.random.default_rng(5)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    x, routing = draw(2, 16, 8), jaxmoe.route(draw(2, 16, 8), top_k=2)
    experts = jaxmoe.Experts(gate_up=draw(8, 8, 8), down=draw(8, 4, 8))
    want = jaxmoe.moe_mlp(x, routing, experts)
    with jax.set_mesh(mesh):
        whole = jax.device_put((x, routing, experts), NamedSharding(mesh, P()))
        by_devices = functools.partial(expert_parallel.sharded_moe_mlp, axis_name="e")
        gathered = functools.partial(jaxmoe.moe_mlp, gather_weights="e")
        for fn in (by_devices, gathered):
            y = jax.jit(fn)(*whole)
            close(y, want)
            check_spec(y, P())


def test_experts_over_devices_in_a_shard_map():
    mesh = jax.make_mesh((2, 2), ("b", "e"), axis_types=(AUTO,) * 2)

    def local(a):
        routing = jaxmoe.route(a["logits"], top_k=K)
        experts = jaxmoe.Experts(gate_up=a["gate_up"], down=a["down"])
        call = functools.partial(expert_parallel.moe_mlp, a["x"], routing, experts)
        y, lost = call(
            axis_name="e", residual=a["residual"], dispatch="all_to_all", capacity_factor=2.0
        )
        return y, jax.lax.psum(lost, ("b", "e"))

    specs = {n: P("b", "e") if n in TOKENS else P("e") for n in ARRAYS}
    call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(P("b", "e"), P()))
    y, lost = jax.jit(call)(ARRAYS)
    close(y, on_one_device()[0].reshape(B, S, H))
    assert int(lost) == 0
    whole = jax.jit(lambda a: spread(a, mesh, dispatch="all_to_all", capacity_factor=2.0))
    y, lost = whole(ARRAYS)
    close(y, on_one_device()[0].reshape(B, S, H))
    assert y.shape == (B, S, H) and lost.shape == ()


def test_experts_over_devices_name_what_disagrees():
    mesh = jax.make_mesh((2, 2), ("b", "e"), axis_types=(AUTO,) * 2)
    wrong = dict(ARRAYS, residual=ARRAYS["residual"].reshape(B * S, H))
    with pytest.raises(ValueError, match=r"sharded_moe_mlp: residual.shape\[:-1\]=\[24\] must be"):
        spread(wrong, mesh)
