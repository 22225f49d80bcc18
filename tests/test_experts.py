"""Experts: a pytree of weights, and every message of its construction."""

import copy
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import Experts, QuantizedArray, Routing, moe_mlp, quantize
from jaxmoe._testing import assert_equal
from tests.sharding_programs import AUTO, make_mesh

E, H, INTER = 2, 8, 4
BF16 = np.dtype(jnp.bfloat16)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


DOWN = zeros(E, INTER, H)
GATE_UP, HALF = zeros(E, H, 2 * INTER), zeros(E, H, INTER)


def ones(**static):
    """Experts of one array, with biases."""
    given = {"gate_up": GATE_UP, "down": DOWN} | {
        "gate_up_bias": zeros(E, 2 * INTER),
        "down_bias": zeros(E, H),
    }
    return jax.tree.map(lambda a: jnp.ones_like(a), Experts(**given, **static))


def routed():
    return jnp.ones((3, H)), Routing(jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1)))


def test_sizes_are_those_of_down():
    for layout in ("kn", "nk", ("nk", "kn"), ("kn", "nk")):
        first, second = (layout, layout) if isinstance(layout, str) else layout
        swapped = lambda a, at: a if at == "kn" else a.swapaxes(1, 2)  # noqa: E731
        e = Experts(gate_up=swapped(GATE_UP, first), down=swapped(DOWN, second), layout=layout)
        assert (e.num_experts, e.hidden, e.intermediate) == (E, H, INTER)
        assert e.layouts == (first, second)
        assert e.first is e.gate_up
    assert Experts(gate=HALF, up=HALF + 1, down=DOWN).first is HALF
    up = Experts(up=HALF, down=DOWN, activation="relu")
    assert up.first is up.up


def test_tree_map_keeps_what_is_static_and_absent():
    e = ones(order="up_gate", layout=("kn", "kn"), activation="geglu")
    doubled = jax.tree.map(lambda a: a * 2, e)
    assert_equal(doubled.down, 2 * e.down)
    assert doubled.gate is None and doubled.x_scale is None
    assert (doubled.order, doubled.layout, doubled.activation) == ("up_gate", ("kn", "kn"), "geglu")
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(e)]
    assert names == [".gate_up", ".down", ".gate_up_bias", ".down_bias"]


def test_a_pytree_may_hold_anything_while_it_is_rebuilt():
    e = ones()
    leaves, tree = jax.tree.flatten(e)
    assert jax.tree.unflatten(tree, ["a"] * len(leaves)).down == "a"
    assert jax.tree.map(lambda a: a.ndim, e).gate_up_bias == 2
    with pytest.raises(TypeError, match="down must be given"):
        dataclasses.replace(e, down=None)  # which makes new experts, so it checks


def test_static_parts_tell_programs_apart():
    """Their tree structures are equal, with one hash, if and only if all static parts are."""
    other = {
        "activation": "geglu",
        "order": "interleaved",
        "layout": ("kn", "kn"),
        "dtype": "bfloat16",
        "forward_format": "fp8_block",
    }
    structure = jax.tree.structure(ones())
    assert jax.tree.structure(ones()) == structure
    assert hash(jax.tree.structure(ones())) == hash(structure)
    for name, value in other.items():
        assert jax.tree.structure(ones(**{name: value})) != structure, name
    sums = {jax.tree.structure(Experts(**QUANTIZED, accum=a)) for a in (None, "fast", "promoted")}
    assert len(sums) == 3
    same = [jax.tree.structure(ones(dtype=d)) for d in ("bfloat16", jnp.bfloat16, BF16)]
    assert same[0] == same[1] == same[2]


def test_an_argument_of_jit_is_traced_once():
    count = []

    @jax.jit
    def fn(e):
        count.append(1)
        return e.down + 1

    for _ in range(2):
        fn(ones())
    fn(ones(activation="geglu"))
    assert len(count) == 2


def test_eval_shape_and_structs():
    """Structs are checked as arrays are."""
    shapes = jax.eval_shape(ones)
    assert shapes.gate_up == jax.ShapeDtypeStruct((E, H, 2 * INTER), jnp.float32)
    assert dataclasses.replace(shapes, activation="geglu").down is shapes.down
    struct = jax.ShapeDtypeStruct
    with pytest.raises(ValueError, match=r"gate_up.shape=\[2, 8, 6\] must be \[2, 8, 8\]"):
        Experts(gate_up=struct((E, H, 6), jnp.float32), down=struct((E, INTER, H), jnp.float32))
    with pytest.raises(TypeError, match="down.dtype=i32 must be bf16 or f16 or f32"):
        dataclasses.replace(shapes, down=struct((E, INTER, H), jnp.int32))
    x, routing = routed()
    out = jax.eval_shape(moe_mlp, x, routing, shapes)
    assert out.shape == x.shape


def test_a_step_of_an_optimizer():
    """The state has experts for each of its moments, and the update is applied to each array."""
    experts, (x, routing) = ones(), routed()
    optimizer = optax.adam(0.1)
    state = optimizer.init(experts)

    @jax.jit
    def step(experts, state):
        grads = jax.grad(lambda e: jnp.sum(moe_mlp(x, routing, e)))(experts)
        updates, state = optimizer.update(grads, state, experts)
        return optax.apply_updates(experts, updates), state, grads

    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        after, state, grads = step(experts, state)
    assert isinstance(grads, Experts) and isinstance(state[0].mu, Experts)
    assert jax.tree.structure(after) == jax.tree.structure(experts)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        moved = np.asarray(getattr(after, name) - getattr(experts, name))
        np.testing.assert_allclose(moved[0], -0.1, rtol=1e-4)  # expert 0 has all tokens
        np.testing.assert_array_equal(moved[1], 0.0)


def test_specs_are_experts_too():
    mesh = make_mesh(AUTO, "a")
    experts = jax.tree.map(lambda a: jnp.concatenate([a, a]), ones())
    specs = jax.tree.map(lambda a: P("a", *[None] * (a.ndim - 1)), experts)
    assert specs.gate_up_bias == P("a", None) and specs.gate is None
    by_hand = Experts(gate_up=P("a"), down=P("a"), gate_up_bias=P("a"), down_bias=P("a"))
    put = jax.tree.map(
        lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s)), experts, by_hand
    )
    assert put.down.sharding.spec == P("a")
    call = jax.shard_map(
        lambda e: jax.tree.map(lambda a: a * 2, e), mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    assert_equal(jax.jit(call)(put).down, 2 * experts.down)


def test_layers_are_stacked():
    """Leading axes are those of scans and vmaps; the layer itself takes experts without them."""
    e = ones()
    deep = jax.tree.map(lambda a: jnp.stack([a] * 3), e)
    again = dataclasses.replace(deep, activation="geglu")
    assert (again.num_experts, again.hidden, again.intermediate) == (E, H, INTER)
    sums, _ = jax.lax.scan(lambda total, e: (total + e.down, None), jnp.zeros_like(e.down), deep)
    assert_equal(sums, 3 * e.down)
    x, routing = routed()
    with pytest.raises(ValueError, match=r"experts.gate_up must have 3 axes \[E,K,N\], not 4"):
        moe_mlp(x, routing, deep)


def test_copies_and_pickles():
    e = jax.tree.map(np.asarray, ones(order="up_gate", dtype="bfloat16"))
    for again in (copy.copy(e), copy.deepcopy(e), pickle.loads(pickle.dumps(e))):
        assert jax.tree.structure(again) == jax.tree.structure(e)
        jax.tree.map(assert_equal, again, e)
    with pytest.raises(dataclasses.FrozenInstanceError):
        e.down = None


def test_quantized_arrays_are_leaves_of_leaves():
    def fp8(e):
        gate_up, down = (
            quantize(w, "fp8_channel", weight_layout="kn") for w in (e.gate_up, e.down)
        )
        return dataclasses.replace(e, gate_up=gate_up, down=down)

    e = jax.jit(fp8)(ones())
    assert isinstance(e.down, QuantizedArray) and e.intermediate == INTER
    assert len(jax.tree.leaves(e)) == 6
    assert jax.tree.map(lambda a: a.shape, e).down.scales == (E, H)


def quantized(shape, format="fp8_tensor", layout="kn"):
    """A quantized array of shape [E, K, N] or [E, N, K]."""
    values = zeros(*shape if layout == "nk" else (shape[0], shape[2], shape[1]))
    values = values.astype(jnp.float8_e4m3fn)
    scales = {"fp8_tensor": shape[:1], "fp8_channel": values.shape[:2]}[format]
    return QuantizedArray(values, zeros(*scales), format, layout, BF16)


QUANTIZED = {"gate_up": quantized((E, H, 2 * INTER)), "down": quantized((E, INTER, H))}
PAIR = {"gate_up": None, "gate": HALF, "up": HALF}

ERRORS = {
    "activation": (
        {"activation": "tanh"},
        ValueError,
        "activation='tanh' must be one of swiglu, ",
    ),
    "order": ({"order": "down"}, ValueError, "order='down' must be one of gate_up, up_gate, "),
    "layout": ({"layout": "mn"}, ValueError, "layout='mn' must be one of kn, nk"),
    "half of a layout": ({"layout": ("kn", "mn")}, ValueError, "layout='mn' must be one of kn, nk"),
    "three layouts": (
        {"layout": ("kn",) * 3},
        ValueError,
        "layout=('kn', 'kn', 'kn') must be one of 'kn' or 'nk', or a pair of these",
    ),
    "forward_format": (
        {"forward_format": "fp4"},
        ValueError,
        "forward_format='fp4' must be one of fp8_tensor, ",
    ),
    "accum": ({"accum": "slow"}, ValueError, "accum='slow' must be one of fast, promoted"),
    "accum of plain weights": (
        {"accum": "fast"},
        ValueError,
        "accum='fast' must be None if no weight is quantized",
    ),
    "dtype": ({"dtype": "wide"}, TypeError, "dtype='wide' must be bfloat16, float16 or float32"),
    "integer dtype": (
        {"dtype": "int32"},
        TypeError,
        "dtype=int32 must be bfloat16, float16 or float32",
    ),
    "no down": ({"down": None}, TypeError, "down must be given"),
    "nothing first": (
        {"gate_up": None},
        TypeError,
        "the first weight must be 'gate_up', or 'gate' and 'up', because swiglu is gated",
    ),
    "gate alone": (
        {"gate_up": None, "gate": HALF},
        TypeError,
        "the first weight must be 'gate_up', or 'gate' and 'up', because swiglu is gated. Got "
        "gate: f32[2,8,4]",
    ),
    "both forms": (
        {"gate": HALF, "up": HALF},
        TypeError,
        "the first weight must be 'gate_up', or 'gate' and 'up', because swiglu is gated",
    ),
    "a gate without use": (
        {**PAIR, "activation": "relu"},
        TypeError,
        "the first weight must be 'gate_up' or 'up', one array, because relu is not gated",
    ),
    "bias of another weight": (
        {"gate_bias": zeros(E, INTER)},
        ValueError,
        "gate_bias must be None, because there is no gate",
    ),
    "one bias of two": (
        {**PAIR, "up_bias": zeros(E, INTER)},
        ValueError,
        "gate_bias and up_bias must both be given, or neither",
    ),
    "order of two": (
        {**PAIR, "order": "interleaved"},
        ValueError,
        "order='interleaved' must be 'gate_up' if gate and up are two arrays",
    ),
    "one quantized": (
        {"down": QUANTIZED["down"]},
        TypeError,
        "gate_up and down must all be jaxmoe.QuantizedArray, or none of them",
    ),
    "integers": (
        {"gate_up": GATE_UP.astype(np.int32)},
        TypeError,
        "gate_up.dtype=i32 must be bf16 or f16 or f32",
    ),
    "two dtypes": (
        {"gate_up": GATE_UP.astype(BF16)},
        TypeError,
        "gate_up.dtype=bf16 must equal down.dtype=f32",
    ),
    "masters of two bytes": (
        {"gate_up": GATE_UP.astype(BF16), "down": DOWN.astype(BF16), "dtype": "float16"},
        TypeError,
        "down.dtype=bf16 must be f32 or dtype=f16: only float32 weights are rounded to another",
    ),
    "masters in a format": (
        {"forward_format": "fp8_block", "dtype": "bfloat16"},
        NotImplementedError,
        "forward_format is not supported with float32 master weights (dtype)",
    ),
    "rank": ({"down": DOWN[0]}, ValueError, "down must have 3 axes [E,I,H], not 2"),
    "other leading axes": (
        {"gate_up": GATE_UP[None]},
        ValueError,
        "gate_up must have as many axes before [E,H,2I] as down has",
    ),
    "shape": (
        {"gate_up": zeros(E, H, 6)},
        ValueError,
        "gate_up.shape=[2, 8, 6] must be [2, 8, 8] = [E,H,2I] with the E, H and I of down [E,I,H], "
        "because swiglu is gated",
    ),
    "shape of up": (
        {**PAIR, "up": zeros(E, H, 6)},
        ValueError,
        "up.shape=[2, 8, 6] must be [2, 8, 4] = [E,H,I] with the E, H and I of down [E,I,H]",
    ),
    "bias of plain experts": (
        {"down_bias": zeros(E, H).astype(BF16)},
        TypeError,
        "down_bias.dtype=bf16 must equal down.dtype=f32",
    ),
    "shape of a bias": (
        {"gate_up_bias": zeros(E, INTER)},
        ValueError,
        "gate_up_bias.shape=[2, 4] must be [2, 8] = [E, its outputs]",
    ),
    "rank of a bias": (
        {"down_bias": zeros(1, E, H)},
        ValueError,
        "down_bias.shape=[1, 2, 8] must be [2, 8] = [E, its outputs]",
    ),
    "quantized twice": (
        {**QUANTIZED, "forward_format": "fp8_block"},
        ValueError,
        "forward_format must be None with weights that are quantized already",
    ),
    "dtype of quantized": (
        {**QUANTIZED, "dtype": "bfloat16"},
        ValueError,
        "dtype=bf16 must be None with quantized weights: the layer computes in the dtype of x",
    ),
    "layout of quantized": (
        {**QUANTIZED, "layout": "nk"},
        ValueError,
        "gate_up.layout='kn' must equal layout='nk': give layout='kn'",
    ),
    "tokens": (
        {**QUANTIZED, "down": dataclasses.replace(QUANTIZED["down"], layout="tokens")},
        ValueError,
        "down.layout='tokens' must equal layout='kn': make it with jaxmoe.quantize",
    ),
    "two formats": (
        {**QUANTIZED, "gate_up": quantized((E, H, 2 * INTER), "fp8_channel")},
        ValueError,
        "gate_up.format='fp8_channel' must equal down.format='fp8_tensor'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    """Each in the one form: the op, the rule, what was given."""
    changes, kind, message = ERRORS[name]
    with pytest.raises(kind, match=rf"^jaxmoe\.Experts: {re.escape(message)}"):
        Experts(**{"gate_up": GATE_UP, "down": DOWN} | changes)


def test_transposed_weights_name_their_layout():
    """The layout that the message names is one that these arrays are taken with."""
    kn, nk = (E, 6, 2 * INTER), (E, 2 * INTER, 6)
    for gate_up, down, given, layout in (
        (nk, (E, INTER, 6), "kn", ("nk", "kn")),
        (kn, (E, INTER, 6), ("nk", "kn"), "kn"),
        (nk, (E, 6, INTER), "kn", "nk"),
    ):
        weights = {"gate_up": zeros(*gate_up), "down": zeros(*down)}
        with pytest.raises(ValueError, match=re.escape(f"these shapes fit layout={layout!r}")):
            Experts(**weights, layout=given)
        assert Experts(**weights, layout=layout).hidden == 6


def test_the_constants_of_an_activation_are_named_where_they_belong():
    w = jnp.ones((2, 4, 8))
    with pytest.raises(TypeError, match=r"limit is one of the activation: .*Swiglu\(limit=...\)"):
        Experts(gate_up=w, down=w, limit=7.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        Experts(gate_up=w, down=w, size=7)


FORMATS = ("fp8_tensor", "fp8_block", "mxfp4", "nvfp4", "int4_g128", "int8_channel")
PARTS = {
    "one, kn": (("gate_up", "down"), "kn"),
    "one, nk": (("gate_up", "down"), "nk"),
    "two, a layout each": (("gate", "up", "down"), ("nk", "kn")),
}


def normal(parts, layout, *lead, dtype=jnp.bfloat16):
    """Experts of H = 128 and I = 256 with biases, after leading axes."""
    layouts = (layout, layout) if isinstance(layout, str) else layout
    rng = np.random.default_rng(0)
    fields = {}
    for name in parts:
        k, n = {"gate_up": (128, 512), "down": (256, 128)}.get(name, (128, 256))
        at = layouts[1 if name == "down" else 0]
        shape = (*lead, E, k, n) if at == "kn" else (*lead, E, n, k)
        fields[name] = jnp.asarray(rng.standard_normal(shape), dtype)
        if name != "down" or lead:
            fields[f"{name}_bias"] = jnp.asarray(rng.standard_normal((*lead, E, n)), dtype)
    return Experts(**fields, layout=layout, activation="geglu")


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_weights_are_those_of_quantize(format, parts):
    names, layout = PARTS[parts]
    e = normal(names, layout)
    q = e.quantized(format)
    for name in names:
        at = e.layouts[1 if name == "down" else 0]
        jax.tree.map(
            assert_equal, getattr(q, name), quantize(getattr(e, name), format, weight_layout=at)
        )
        if name != "down":
            assert getattr(q, f"{name}_bias") is getattr(e, f"{name}_bias")
    assert (q.activation, q.layout, q.token_format) == ("geglu", e.layout, None)


def test_quantized_takes_layers_and_makes_what_a_scan_reads():
    e = normal(("gate_up", "down"), "kn", 3)
    q = jax.jit(lambda e: e.quantized("mxfp4", token_format="mxfp8"))(e)
    assert q.token_format == "mxfp8" and (q.hidden, q.intermediate) == (128, 256)
    for i in range(3):
        one = jax.tree.map(lambda a: a[i], e)  # noqa: B023
        want = one.quantized("mxfp4", token_format="mxfp8")
        jax.tree.map(assert_equal, jax.tree.map(lambda a: a[i], q), want)  # noqa: B023


def test_master_weights_are_rounded_before_they_are_quantized():
    e = normal(("gate_up", "down"), "nk", dtype=jnp.float32)
    master = dataclasses.replace(e, gate_up_bias=None, dtype="bfloat16")
    q = master.quantized("int4_g128")
    assert q.dtype is None and q.down.dtype == BF16
    rounded = e.down.astype(jnp.bfloat16)
    jax.tree.map(assert_equal, q.down, quantize(rounded, "int4_g128", weight_layout="nk"))
    biased = dataclasses.replace(e, dtype="bfloat16").quantized("mxfp4")
    assert_equal(biased.gate_up_bias, e.gate_up_bias.astype(jnp.bfloat16))
    ids, weights = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    x = jnp.ones((3, e.hidden), jnp.bfloat16)
    moe_mlp(x, Routing(ids, weights, e.num_experts), biased)  # tokens in the dtype of the layer
    value = dataclasses.replace(e, forward_format="fp8_block").quantized("fp8_block")
    assert value.forward_format is None and value.down.format == "fp8_block"


def test_quantized_names_the_weight_that_it_refuses():
    e = normal(("gate_up", "down"), "kn")

    def refuses(error, message, *args, of=e, **options):
        with pytest.raises(error, match=re.escape(message)) as caught:
            of.quantized(*args, **options)
        assert str(caught.value).count("jaxmoe.") == 1

    refuses(ValueError, "jaxmoe.Experts.quantized: gate_up: format='fp4' must be", "fp4")
    refuses(ValueError, "gate_up: scale_format=", "fp8_block", scale_format="int8")
    odd = Experts(gate_up=zeros(E, 128, 128), down=zeros(E, 64, 128))
    refuses(
        ValueError,
        "down: w.shape[1]=64 (K) must be",
        "int4_g128",
        of=jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), odd),
    )
    refuses(ValueError, "token_format='nvfp4' must be None", "fp8_block", token_format="nvfp4")
    with pytest.raises(TypeError, match=r"quantized: gate_up is quantized already: make it an"):
        e.quantized("mxfp4").quantized("mxfp4")


def test_an_activation_without_gate_names_the_one_with():
    for name, gated in (("silu", "swiglu"), ("gelu", "geglu"), ("gelu_tanh", "geglu_tanh")):
        with pytest.raises(ValueError, match=rf"{name} is not gated \(with a gate it is '{gated}'"):
            Experts(gate_up=GATE_UP, down=DOWN, activation=name)
        with pytest.raises(TypeError, match=rf"{name} is not gated \(with a gate it is '{gated}'"):
            Experts(gate=HALF, up=HALF, down=DOWN, activation=name)
