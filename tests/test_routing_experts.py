"""A routing knows over how many experts it chose, and layers refuse weights of another number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from tests.sharding_programs import AUTO, EXPLICIT, close

E, T, K, H, WIDTH = 8, 8, 2, 8, 4
LOGITS = np.random.default_rng(0).standard_normal((T, E)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((T, H)).astype(np.float32)
UP = np.random.default_rng(2).standard_normal((E, H, WIDTH)).astype(np.float32)
DOWN = np.random.default_rng(3).standard_normal((E, WIDTH, H)).astype(np.float32)


def experts(first=0, last=E):
    return jaxmoe.Experts(up=UP[first:last], down=DOWN[first:last], activation="relu")


def routed(**options):
    return jaxmoe.route(LOGITS, top_k=K, **options)


def test_route_says_how_many():
    assert routed().num_experts == E
    assert routed(num_shared_experts=2).num_experts == E + 2
    assert routed(expert_ids=np.zeros((T, K), np.int32)).num_experts == E
    assert jaxmoe.route_and_plan(LOGITS, top_k=K)[0].num_experts == E
    shared, _ = jaxmoe.route_and_plan(LOGITS, top_k=K, num_shared_experts=2)
    assert shared.num_experts == E + 2
    assert jaxmoe.Routing(np.zeros((T, K), np.int32), np.zeros((T, K))).num_experts is None


def test_transformations_keep_it():
    assert jax.tree.map(lambda a: a + 1, routed()).num_experts == E
    assert jax.jit(lambda: routed())().num_experts == E
    assert jax.vmap(lambda x: jaxmoe.route(x, top_k=K))(LOGITS[None]).num_experts == E
    last, all_of_them = jax.lax.scan(lambda r, _: (r, r), routed(), None, length=2)
    assert last.num_experts == all_of_them.num_experts == E
    assert dataclasses.replace(routed(), weights=jnp.ones((T, K))).num_experts == E


CALLS = [jaxmoe.moe_mlp, jaxmoe.expert_rows]


@pytest.mark.parametrize("call", CALLS)
def test_some_of_the_experts(call):
    with pytest.raises(ValueError) as error:
        call(X, routed(), experts(last=4))
    assert str(error.value) == (
        f"jaxmoe.{call.__name__}: experts.num_experts=4 must equal routing.num_experts=8; if they "
        "are some of those, give num_experts=8 for the first ones, expert_offset or expert_map for "
        "others, or call jaxmoe.expert_parallel.moe_mlp inside jax.shard_map. Got experts.down: "
        "f32[4,4,8]."
    )


def test_more_experts_than_were_routed_over():
    routing = jaxmoe.route(LOGITS[:, :4], top_k=K)
    with pytest.raises(ValueError, match=r"=8 must equal .*=4; give num_experts=8 if the last of"):
        jaxmoe.moe_mlp(X, routing, experts())
    close(
        jaxmoe.moe_mlp(X, routing, experts(), num_experts=E),
        jaxmoe.moe_mlp(X, routing, experts(last=4)),
    )


def test_a_map_of_another_number_of_experts():
    table = np.arange(4, dtype=np.int32)
    with pytest.raises(ValueError, match=r"expert_map.shape\[0\]=4 must equal routing.num_expe"):
        jaxmoe.moe_mlp(X, routed(), experts(last=4), expert_map=table)
    jaxmoe.moe_mlp(X, routed(), experts(last=4), expert_map=table, num_experts=4)


def test_parts_of_the_experts_add_up():
    """Each way to say which experts these are, without num_experts wherever something else does."""
    whole = jaxmoe.moe_mlp(X, routed(), experts())
    table = np.where(np.arange(E) < 4, -1, np.arange(E) - 4).astype(np.int32)
    first = jaxmoe.moe_mlp(X, routed(), experts(last=4), num_experts=E)
    for last in ({"expert_offset": 4}, {"expert_map": table}):
        close(first + jaxmoe.moe_mlp(X, routed(), experts(4), **last), whole)


def test_a_routing_of_unknown_origin_is_taken_as_it_is():
    routing = jaxmoe.Routing(routed().expert_ids, routed().weights)
    first = jaxmoe.moe_mlp(X, routing, experts(last=4))
    close(first, jaxmoe.moe_mlp(X, routed(), experts(last=4), num_experts=E))


def test_inside_a_shard_map_that_splits_experts():
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AUTO,))
    local = jax.shard_map(
        lambda routing, experts: jaxmoe.moe_mlp(X, routing, experts),
        mesh=mesh,
        in_specs=(P(), P("expert")),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=r"num_experts=2 must equal routing.num_experts=8"):
        local(routed(), experts())


OVER_DEVICES = P("expert")


def split(
    *, on=OVER_DEVICES, weights=OVER_DEVICES, check_vma=True, held=None, axes=None, **options
):
    """Runs the layer on four devices, x and routing split as `on` says, weights as `weights`."""
    names, sizes = axes or (("expert",), (4,))
    mesh = jax.make_mesh(sizes, names, axis_types=(EXPLICIT,) * len(names))
    routing = options.pop("routing", routed())
    out = P() if options.get("tokens") == "replicated" else P("expert")
    with jax.set_mesh(mesh):
        call = jax.shard_map(
            lambda x, routing, experts: jaxmoe.expert_parallel.moe_mlp(
                x, routing, experts, axis_name="expert", **options
            ),
            in_specs=(on, on, weights),
            out_specs=out,
            check_vma=check_vma,
        )
        args = ((X, on), (routing, on), (held or experts(), weights))
        put = (jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in args)
        return np.asarray(jax.jit(call)(*put))


def whole():
    return jaxmoe.moe_mlp(X, routed(), experts())


@pytest.mark.parametrize("check_vma", [True, False])
def test_right_programs_over_devices(check_vma):
    close(split(check_vma=check_vma), whole())
    close(split(check_vma=check_vma, on=P(), tokens="replicated"), whole())
    one = {"axes": (("expert", "other"), (1, 4))}  # on one device nothing differs
    close(split(check_vma=check_vma, on=P(), weights=P(), **one), whole())


def test_devices_may_hold_the_same_experts_if_a_map_says_so():
    table = np.tile(np.arange(E, dtype=np.int32), (4, 1))
    close(split(weights=P(), expert_map=table), whole())


def test_the_same_tokens_on_every_device():
    with pytest.raises(ValueError) as error:
        split(on=P())
    assert str(error.value) == (
        "jaxmoe.expert_parallel.moe_mlp: x must differ along 'expert' with tokens='sharded', and "
        "every device has the same tokens, which would be computed as often; split x, routing and "
        "residual with in_specs=P('expert'), or give tokens='replicated'. Got x: f32[8,8]."
    )


@pytest.mark.parametrize("on, tokens", [(P("expert"), "sharded"), (P(), "replicated")])
def test_the_same_experts_on_every_device(on, tokens):
    with pytest.raises(ValueError) as error:
        split(on=on, tokens=tokens, weights=P(), held=experts(last=2))
    assert str(error.value) == (
        "jaxmoe.expert_parallel.moe_mlp: experts.up must differ along 'expert', where each device "
        "has experts of its own, and every device has the same; split it with 'expert' in its "
        "in_specs. Got experts.up: f32[2,8,4]."
    )


def test_the_same_part_of_i_on_every_device():
    with pytest.raises(ValueError, match=r"experts.up must differ along 't', .* its part of I"):
        split(axes=(("expert", "t"), (2, 2)), tensor_axis="t")


def test_devices_hold_another_number_of_experts():
    """With check_vma=False this is what tells weights that are the same on every device."""
    for weights, held in ((P(), None), (P("expert"), 32)):
        with pytest.raises(ValueError) as error:
            split(check_vma=weights == P("expert"), weights=weights, held=held and _padded(held))
        assert str(error.value) == (
            "jaxmoe.expert_parallel.moe_mlp: 4 devices with experts.num_experts=8 hold 32 experts, "
            "which must equal routing.num_experts=8; give num_experts=8 if the last of them are "
            "padding, and expert_map if some are copies. Got experts.down: f32[8,4,8]."
        )
    close(split(held=_padded(32), num_experts=E), whole())
    with pytest.raises(ValueError, match=r"num_experts=8; give all of them to the jax.shard_map"):
        split(held=experts(last=4))
    with pytest.raises(
        ValueError, match=r"expert_map.shape\[1\]=4 must equal routing.num_experts=8"
    ):
        split(expert_map=np.tile(np.arange(4, dtype=np.int32), (4, 1)), held=_padded(16))


def _padded(count):
    return jax.tree.map(lambda a: np.pad(a, ((0, count - E), (0, 0), (0, 0))), experts())


def test_the_layer_that_wraps_itself():
    mesh = jax.make_mesh((4,), ("expert",))
    sharded = jaxmoe.expert_parallel.sharded_moe_mlp
    spread = jax.jit(functools.partial(sharded, mesh=mesh, axis_name="expert"))
    close(spread(X, routed(), experts()), whole())
    with pytest.raises(ValueError, match="must equal routing.num_experts=8"):
        sharded(X, routed(), experts(last=4), mesh=mesh, axis_name="expert")
