"""Gate and up as two arrays: the layer of one array, whatever is done with it.

Tokens and weights are small integers, so that sums of the first product are exact in any order and
everything up to the rows has the same bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Experts, Routing, expert_parallel, expert_rows, moe_mlp, quantize
from jaxmoe._testing import Layer, assert_equal, layer_inputs
from tests.lowered import calls, cuda_text, layer_call
from tests.sharding_programs import AUTO, EXPLICIT, check_spec, collectives, entered, make_mesh

LAYER = Layer("", "every axis divides over 4 devices", 16, 8, 8, 2, bias=True)
PLAIN = dataclasses.replace(LAYER, bias=False)
NUM_TOKENS = 8


def draw(layer=LAYER, dtype=jnp.float32, layout="kn", **options):
    """Tokens, their routing and experts of one array."""
    rng = np.random.default_rng(0)
    a = layer_inputs(layer, NUM_TOKENS, "with_invalid", rng, dtype)
    whole = {
        n: jnp.asarray(rng.integers(-2, 3, a[n].shape), dtype)
        for n in a
        if n not in ("expert_ids", "weights")
    }
    layouts = (layout, layout) if isinstance(layout, str) else layout
    w = [whole["w_gate_up"], whole["w_down"]]
    w = [a.swapaxes(1, 2) / 4 if at == "nk" else a / 4 for a, at in zip(w, layouts, strict=True)]
    biases = {"gate_up_bias": whole.get("b_gate_up"), "down_bias": whole.get("b_down")}
    experts = Experts(gate_up=w[0], down=w[1], layout=layout, **biases, **options)
    return whole["x"], Routing(a["expert_ids"], a["weights"]), experts


def apart(e):
    """The same experts with gate and up in two arrays."""
    axis = e.gate_up.ndim - (1 if e.layouts[0] == "kn" else 2)
    gate, up = jnp.split(e.gate_up, 2, axis)
    biases = (None, None) if e.gate_up_bias is None else jnp.split(e.gate_up_bias, 2, -1)
    nothing = {"gate_up": None, "gate_up_bias": None}
    parts = {"gate": gate, "up": up, "gate_bias": biases[0], "up_bias": biases[1]}
    return dataclasses.replace(e, **nothing, **parts)


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def seeded_loss(y):
    """A loss whose cotangent is different in every element."""
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def step(fn):
    """x, routing, experts -> the result, and gradients of all that floats."""

    def run(x, routing, experts):
        def loss(x, weights, experts):
            y = fn(x, Routing(routing.expert_ids, weights), experts)
            return seeded_loss(y), y

        grad = jax.grad(loss, (0, 1, 2), has_aux=True)
        grads, y = grad(x, routing.weights, experts)
        return y, grads

    return run


@functools.cache
def expected():
    """The result and gradients of one array on one device, taken apart."""
    y, (dx, dw, grads) = jax.jit(step(moe_mlp))(*draw())
    return y, (dx, dw, apart(grads))


@pytest.mark.parametrize("options", ({}, {"recompute": "z"}), ids=str)
def test_values_and_gradients(options):
    """A layout for each weight; the gradient is an Experts with the same two arrays."""
    layout = ("nk", "kn") if options else "kn"
    x, routing, joined = draw(layout=layout)
    experts = apart(joined)
    y, (dx, dw, grads) = jax.jit(step(functools.partial(moe_mlp, **options)))(x, routing, experts)
    want, (want_dx, want_dw, want_grads) = expected()
    assert_equal(y, want)
    assert jax.tree.structure(grads) == jax.tree.structure(experts)
    if options:
        stored = {n: getattr(want_grads, n).swapaxes(1, 2) for n in ("gate", "up")}
        want_grads = dataclasses.replace(want_grads, layout=layout, **stored)
    close((dx, dw, grads), (want_dx, want_dw, want_grads))


def test_one_of_two_biases_may_move():
    x, routing, joined = draw()
    experts = apart(joined)

    @jax.jit
    def moved(bias):
        return jax.grad(
            lambda b: seeded_loss(moe_mlp(x, routing, dataclasses.replace(experts, up_bias=b)))
        )(bias)

    close(moved(experts.up_bias), expected()[1][2].up_bias)


def test_a_refusal_names_the_array():
    x, routing, experts = draw(PLAIN)
    experts = apart(experts)
    with jax.set_mesh(make_mesh(EXPLICIT, "a", "b")):
        axes = {"gate": P("a"), "up": P("b")}
        split = {n: jax.sharding.reshard(getattr(experts, n), spec) for n, spec in axes.items()}
        with pytest.raises(NotImplementedError, match="experts.up is split as P.b, None, None."):
            moe_mlp(x, routing, dataclasses.replace(experts, **split))


def test_forward_mode():
    x, routing, joined = draw()
    moved = jax.tree.map(lambda a: jnp.sin(a + 1.0), (x, joined))

    @jax.jit
    def tangents(x, joined, dx, djoined):
        pairs = ((joined, djoined), (apart(joined), apart(djoined)))
        return [jax.jvp(lambda x, e: moe_mlp(x, routing, e), (x, e), (dx, de)) for e, de in pairs]

    one, two = tangents(x, joined, *moved)
    close(two, one)


def test_gradients_of_masters():
    x, routing, experts = draw(dtype=jnp.float32)
    x = x.astype(jnp.bfloat16)
    experts = dataclasses.replace(experts, dtype=jnp.bfloat16)
    run = jax.jit(step(moe_mlp))
    y, (dx, dw, grads) = run(x, routing, apart(experts))
    want, (want_dx, want_dw, joined) = run(x, routing, experts)
    assert_equal(y, want)
    assert grads.gate.dtype == grads.up_bias.dtype == jnp.float32
    close((dw, grads), (want_dw, apart(joined)))
    # Which is added up for each array, and rounded on the way.
    dx, want_dx = (np.asarray(a, np.float32) for a in (dx, want_dx))
    np.testing.assert_allclose(dx, want_dx, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    "layout, options, call",
    (
        ("nk", {"activation": "geglu"}, {"batch_invariant": True}),
        (("kn", "nk"), {"activation": jaxmoe.Swiglu(1.702, 1.0, 7.0)}, {}),
        (("nk", "kn"), {}, None),
    ),
    ids=("nk", "kn nk", "rows"),
)
def test_values(layout, options, call):
    x, routing, experts = draw(dtype=jnp.bfloat16, layout=layout, **options)

    @jax.jit
    def both(x, *pair):
        if call is None:
            return [expert_rows(x, routing, e).rows for e in pair]
        return [moe_mlp(x, routing, e, **call) for e in pair]

    assert_equal(*both(x, apart(experts), experts))


@pytest.mark.parametrize(
    ("format", "forward"), (("fp8_tensor", False), ("fp8_block", False), ("fp8_channel", True))
)
def test_quantized(format, forward):
    """Each array has scales of its own: those of its columns, or one for all of it."""
    wide = Layer("", "a block of a half is one of both", 16, 128, 2, 2)
    x, routing, joined = draw(wide, jnp.bfloat16)
    # The largest of both is the largest of each, so that fp8_tensor has one scale in either form.
    joined = dataclasses.replace(joined, gate_up=joined.gate_up.at[:, 0, ::128].set(1.0))
    experts = apart(joined)

    def in_format(e):
        if forward:
            return dataclasses.replace(e, forward_format=format)
        names = [n for n in ("gate_up", "gate", "up", "down") if getattr(e, n) is not None]
        new = {n: quantize(getattr(e, n), format, weight_layout="kn") for n in names}
        return dataclasses.replace(e, **new)

    def twice(e):  # the scales of up alone: the layer is linear in it
        up = e.up * 2 if forward else dataclasses.replace(e.up, scales=e.up.scales * 2)
        return dataclasses.replace(e, up=up)

    @jax.jit
    def run(x, joined, experts):
        one, two = in_format(joined), in_format(experts)
        double = twice(in_format(experts) if not forward else two)
        return [moe_mlp(x, routing, e) for e in (one, two, double)]

    one, two, double = run(x, joined, experts)
    assert_equal(two, one)
    assert_equal(double, 2 * one)


def test_static_scales():
    """fp8_tensor with scales of tokens and, for each expert, of the activations."""
    x, routing, joined = draw(PLAIN, jnp.bfloat16)
    joined = dataclasses.replace(joined, gate_up=joined.gate_up.at[:, 0, ::8].set(1.0))
    scales = {
        "x_scale": jnp.float32(0.0625),
        "h_scale": jnp.linspace(0.01, 0.02, LAYER.num_experts, dtype=jnp.float32),
    }

    def run(e):
        names = [n for n in ("gate_up", "gate", "up", "down") if getattr(e, n) is not None]
        new = {n: quantize(getattr(e, n), "fp8_tensor", weight_layout="kn") for n in names}
        return moe_mlp(x, routing, dataclasses.replace(e, **new, **scales))

    assert_equal(jax.jit(run)(apart(joined)), jax.jit(run)(joined))


MAPPED = {
    "tokens": (),
    "experts": ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
    "gate": ("gate", "gate_bias"),
    "biases": ("gate_bias", "up_bias"),
}


@functools.cache
def single():
    """One example of four tokens, the same program for all of them."""
    return jax.jit(step(moe_mlp))


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name):
    """Of what is mapped over there is one for each example, the rest is shared."""
    x, routing, experts = draw()
    experts = apart(experts)
    xs, ids, weights = (a.reshape(2, 4, -1) for a in (x, routing.expert_ids, routing.weights))
    mapped = {f: getattr(experts, f) for f in MAPPED[name]}
    mapped = {f: jnp.stack([a, -a]) for f, a in mapped.items()}

    def loss(shared, mapped):
        def one(x, ids, weights, own):
            return moe_mlp(x, Routing(ids, weights), dataclasses.replace(shared, **own))

        y = jax.vmap(one)(xs, ids, weights, mapped)
        return seeded_loss(y), y

    (shared, own), ys = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(experts, mapped)
    total = jax.tree.map(jnp.zeros_like, experts)
    for i in range(2):
        of_example = dataclasses.replace(experts, **{f: a[i] for f, a in mapped.items()})
        y, (_, _, grads) = single()(xs[i], Routing(ids[i], weights[i]), of_example)
        close((ys[i], {f: a[i] for f, a in own.items()}), (y, {f: getattr(grads, f) for f in own}))
        total = jax.tree.map(jnp.add, total, grads)
    for field in set(MAPPED["experts"]) - set(mapped):
        close(getattr(shared, field), getattr(total, field))


def test_scan_over_layers():
    x, routing, experts = draw(PLAIN)
    deep = jax.tree.map(lambda a: jnp.stack([a, a / 2]), apart(experts))

    def scanned(x, deep):
        return jax.lax.scan(lambda x, e: (x / 8 + moe_mlp(x, routing, e), None), x, deep)[0]

    def one_by_one(x, deep):
        for i in range(2):
            x = x / 8 + moe_mlp(x, routing, jax.tree.map(lambda a, i=i: a[i], deep))
        return x

    got, want = (
        jax.jit(jax.grad(lambda x, e, fn=fn: seeded_loss(fn(x, e)), (0, 1)))(x / 8, deep)
        for fn in (scanned, one_by_one)
    )
    close(got, want)
    assert isinstance(got[1], Experts)


@dataclasses.dataclass(frozen=True)
class Split:
    """Mesh axes of what is divided."""

    kind: object = AUTO
    e: str | None = None
    i: str | None = None
    h_in: str | None = None
    h_out: str | None = None
    tokens: str | None = None

    def specs(self):
        first, bias = P(self.e, self.h_in, self.i), P(self.e, self.i)
        tokens = P(self.tokens)
        experts = Experts(
            gate=first,
            up=first,
            down=P(self.e, self.i, self.h_out),
            gate_bias=bias,
            up_bias=bias,
            down_bias=P(self.e, self.h_out),
        )
        return tokens, Routing(tokens, tokens), experts


SPLITS = {
    "tokens and I": Split(tokens="a", i="b"),
    "I, explicit": Split(EXPLICIT, i="a"),
    "E and H": Split(e="a", h_in="b"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_divided_over_a_mesh(name):
    """Values and gradients of one device; gates and ups that lie together need no exchange."""
    split = SPLITS[name]
    used = (split.e, split.i, split.h_in, split.h_out, split.tokens)
    mesh = make_mesh(split.kind, *(("a", "b") if "b" in used else ("a",)))
    x, routing, experts = draw()
    args, specs = (x, routing, apart(experts)), split.specs()
    with entered(mesh):
        put = jax.tree.map(
            lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s)), args, specs
        )
        program = jax.jit(step(moe_mlp)).lower(*put).compile()
        y, grads = program(*put)
    close((y, grads), expected())
    for field in ("gate", "up", "down"):
        check_spec(getattr(grads[2], field), getattr(specs[2], field))
    exchanged = collectives(program.as_text())
    assert "permute" not in exchanged and "all-to-all" not in exchanged


def test_examples_share_experts_that_are_divided():
    """Under vmap biases are joined: each device takes those of its gates and ups out of them."""
    x, routing, experts = draw()
    examples = [a.reshape(2, 4, -1) for a in (x, routing.expert_ids, routing.weights)]
    mesh, (_, _, specs) = make_mesh(AUTO, "a"), Split(i="a").specs()
    place = lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s))  # noqa: E731
    put = jax.tree.map(place, apart(experts), specs)

    @jax.jit
    def mapped(x, ids, weights, experts):
        return jax.vmap(lambda *e: moe_mlp(e[0], Routing(*e[1:]), experts))(x, ids, weights)

    y = mapped(*(place(a, P()) for a in examples), put)
    close(y.reshape(x.shape), expected()[0])


@pytest.mark.parametrize("format, kind", (("fp8_channel", AUTO), ("fp8_tensor", EXPLICIT)))
def test_quantized_and_divided(format, kind):
    """I over one axis, experts over the other: scales lie with their columns, joined or not."""
    x, routing, experts = draw(PLAIN)
    experts = apart(experts)
    names = ("gate", "up", "down")
    scaled = {n: getattr(experts, n) * jnp.arange(1.0, 9.0)[:, None, None] for n in names}
    scaled["up"] *= jnp.arange(2.0, 10.0)[None, None]
    new = {n: quantize(a, format, weight_layout="kn") for n, a in scaled.items()}
    stored = {"gate": P("a", "b"), "up": P("a", "b"), "down": P("a", None, "b")}  # [E, N, K]
    specs = {
        n: dataclasses.replace(new[n], values=s, scales=P(*s[: new[n].scales.ndim]))
        for n, s in stored.items()
    }
    experts = dataclasses.replace(experts, **new)
    mesh = make_mesh(kind, "a", "b")

    def run(x, experts):
        layer = lambda x, ids, weights: moe_mlp(x, Routing(ids, weights), experts)  # noqa: E731
        tokens = x, routing.expert_ids, routing.weights
        if kind == EXPLICIT:
            return layer(*tokens)
        return jax.vmap(layer)(*(a.reshape(2, 4, -1) for a in tokens))

    want = jax.jit(run)(x, experts)
    with entered(mesh):
        place = lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s))  # noqa: E731
        put = jax.tree.map(place, experts, dataclasses.replace(experts, **specs))
        got = jax.jit(run)(place(x, P()), put)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_expert_parallel():
    """Experts over one axis, I over another, copies of an expert: experts are placed as one."""
    table = expert_parallel.expert_placement(8, 4, copies={3: 2})
    mesh = jax.make_mesh((2, 4), ("tensor", "expert"), axis_types=(AUTO, AUTO))
    x, routing, experts = draw()

    def spread(x, routing, e):
        e = expert_parallel.place_experts(e, table)
        assert e.num_experts == 12
        axes = {"axis_name": "expert", "tensor_axis": "tensor"}
        return expert_parallel.sharded_moe_mlp(
            x, routing, e, mesh=mesh, expert_map=table, dispatch="all_gather", **axes
        )

    close(jax.jit(step(spread))(x, routing, apart(experts)), expected())


def test_placed_experts_of_two_arrays_are_those_of_one():
    table = expert_parallel.expert_placement(8, 3, copies={3: 2})
    experts = draw()[2]
    placed = expert_parallel.place_experts(apart(experts), table)
    jax.tree.map(assert_equal, placed, apart(expert_parallel.place_experts(experts, table)))


@pytest.mark.parametrize("layout", ("kn", ("nk", "kn"), ("kn", "nk")), ids=str)
def test_cuda_makes_one_call(layout):
    """With gate and up as two operands, and a layout for each product."""
    x, routing, experts = jax.eval_shape(lambda: draw(dtype=jnp.bfloat16, layout=layout))
    attrs, operands, _ = layer_call(
        *calls(cuda_text(moe_mlp, x, routing, jax.eval_shape(apart, experts)))
    )
    first = "8x16x8xbf16" if experts.layouts[0] == "kn" else "8x8x16xbf16"
    assert (operands["w_gate_up"], operands["w_up"]) == (first, first)
    assert operands["b_gate_up"] == "8x16xbf16"
    codes = {"kn": "0:i64", "nk": "1:i64"}
    assert [attrs["layout1"], attrs["layout2"]] == [codes[at] for at in experts.layouts]


def test_cuda_has_as_many_gates_as_ups():
    """Examples with gates of their own and shared ups are one call after another."""
    x, routing, joined = jax.eval_shape(lambda: draw(PLAIN, dtype=jnp.bfloat16))
    experts = jax.eval_shape(apart, joined)
    gates = jax.ShapeDtypeStruct((2, *experts.gate.shape), jnp.bfloat16)

    def one(gate, x, routing, experts):
        return moe_mlp(x, routing, dataclasses.replace(experts, gate=gate))

    mapped = jax.vmap(one, (0, None, None, None))
    text = cuda_text(mapped, gates, x, routing, experts)
    _, operands, _ = layer_call(*calls(text))
    assert operands["w_gate_up"] == operands["w_up"] and "stablehlo.while" in text


def test_checkpoint(tmp_path):
    """Written and read back by orbax, into experts of structs: nothing is joined on the way."""
    import orbax.checkpoint as ocp

    experts = apart(draw(layout=("nk", "kn"), activation="geglu")[2])
    target = jax.eval_shape(lambda e: e, experts)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "experts", experts)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "experts", target)
    assert isinstance(restored, Experts) and restored.layout == ("nk", "kn")
    jax.tree.map(assert_equal, restored, experts)
