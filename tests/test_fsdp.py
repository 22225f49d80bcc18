"""Weights stored over the devices that share the tokens: gathered in their format, dW scattered."""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Experts, Routing, fsdp
from tests.sharding_programs import (
    AUTO,
    EXPLICIT,
    check_replicas,
    check_spec,
    close,
    collectives,
    documented,
    entered,
    make_mesh,
    place,
    spec_text,
)

T, H, E, K = 32, 16, 8, 2
WIDTH = 8  # I
KINDS = pytest.mark.parametrize("kind", (AUTO, EXPLICIT), ids=str)
POLICY = jax.checkpoint_policies.save_only_these_names("jaxmoe_z", "jaxmoe_plan")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: how weights lie, over which axes they are gathered, what that costs."""

    title: str
    gate_up: P
    down: P
    forward: str
    with_gradients: str
    x: P = P("a")
    axes: str | tuple[str, ...] = "a"


ROWS = (
    Row(
        "H",
        P(None, "a"),
        P(None, None, "a"),
        "2 all-gather",
        "4 all-gather, 2 reduce-scatter",
    ),
    Row("experts", P("a"), P("a"), "2 all-gather", "4 all-gather, 2 reduce-scatter"),
    Row(
        "I",
        P(None, None, "a"),
        P(None, "a"),
        "2 all-gather",
        "4 all-gather, 2 reduce-scatter",
    ),
    Row(
        "H, experts over `b`",
        P("b", "a"),
        P("b", None, "a"),
        "2 all-gather, 1 all-reduce",
        "4 all-gather, 2 all-reduce, 2 reduce-scatter",
    ),
)
rows = pytest.mark.parametrize("row", ROWS, ids=[row.title for row in ROWS])
FSDP_H = ROWS[0]


@functools.cache
def _drawn():
    rng = np.random.default_rng(11)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32)
    tokens = {"x": draw(T, H), "weights": rng.random((T, K), np.float32), "residual": draw(T, H)}
    return tokens | {"ids": ids}, {
        "gate_up": draw(E, H, 2 * WIDTH) / 4,
        "down": draw(E, WIDTH, H) / 3,
    }


def layer(tokens, experts, axes=None, **options):
    a = tokens
    routing = Routing(a["ids"], a["weights"])
    options = {"residual": a["residual"], "gather_weights": axes} | options
    return jaxmoe.moe_mlp(a["x"], routing, experts, **options)


def gradients(tokens, experts, axes=None, **options):
    """y, and the gradients of x, routing weights, residual and experts."""
    floats = {n: a for n, a in tokens.items() if n != "ids"}

    def loss(floats, experts):
        y = layer(floats | {"ids": tokens["ids"]}, experts, axes, **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(floats, experts)
    return y, *grads


@functools.cache
def expected(order="gate_up"):
    tokens, weights = jax.device_put(_drawn())
    return jax.jit(gradients)(tokens, Experts(**weights, order=order))


def put(row, mesh, order="gate_up"):
    tokens, weights = _drawn()
    tokens = {n: place(a, mesh, row.x) for n, a in tokens.items()}
    specs = {"gate_up": row.gate_up, "down": row.down}
    weights = {n: place(w, mesh, specs[n]) for n, w in weights.items()}
    return tokens, Experts(**weights, order=order)


def mesh_of(row, kind):
    return make_mesh(kind, *(("a", "b") if "b" in (*row.gate_up, *row.x) else ("a",)))


def run(fn, mesh, *args, **options):
    """The result of a jitted function and the text of its program."""
    with entered(mesh):
        program = jax.jit(functools.partial(fn, **options)).lower(*args).compile()
        result = program(*args)
    check_replicas(result)
    return result, program.as_text()


def moved(text, kind):
    """Element type and number of elements of each result of a collective."""
    lines = re.findall(rf" = (.*?) {kind}(?:-start)?\(", text)
    found = (shape for line in lines for shape in re.findall(r"(\w+)\[([\d,]*)\]", line))
    return sorted((dtype, math.prod(map(int, dims.split(",")))) for dtype, dims in found if dims)


@rows
def test_layer(row):
    """Weights are gathered once, and only they; nothing moves tokens."""
    mesh = mesh_of(row, AUTO)
    order = "interleaved" if row.title == "I" else "gate_up"
    y, text = run(layer, mesh, *put(row, mesh, order), axes=row.axes)
    close(y, expected(order)[0])
    check_spec(y, row.x)
    assert collectives(text) == row.forward
    specs = (spec_text(spec) for spec in (row.gate_up, row.down, row.x))
    assert documented(row.title, *specs, spec_text(row.x), row.forward, row.with_gradients)


@rows
def test_gradients(row):
    """Weights are gathered once more, and gradients are scattered: none is all-reduced."""
    mesh = mesh_of(row, AUTO)
    tokens, experts = put(row, mesh)
    got, text = run(gradients, mesh, tokens, experts, axes=row.axes)
    close(got, expected())
    assert collectives(text) == row.with_gradients
    assert all(size <= T * H for _, size in moved(text, "all-reduce"))
    check_spec(got[2].gate_up, row.gate_up)
    check_spec(got[2].down, row.down)
    check_spec(got[1]["x"], row.x)
    check_spec(got[1]["residual"], row.x)


@rows
def test_explicit_axes(row):
    """Types say that y lies as x and gradients as weights; gathered weights are kept."""
    mesh = mesh_of(row, EXPLICIT)
    tokens, experts = put(row, mesh)
    types = []

    def fn(tokens, experts):
        y, of_tokens, of_experts = gradients(tokens, experts, row.axes)
        types.extend(map(jax.typeof, (y, of_tokens["x"], of_experts.gate_up, of_experts.down)))
        return y, of_tokens, of_experts

    got, text = run(fn, mesh, tokens, experts)
    close(got, expected())
    wanted = (tokens["x"], tokens["x"], experts.gate_up, experts.down)
    assert [a.sharding.spec for a in types] == [jax.typeof(a).sharding.spec for a in wanted]
    counts = collectives(text)
    assert "2 all-gather" in counts and "2 reduce-scatter" in counts and "all-to-all" not in counts


@KINDS
def test_biases_are_gathered_with_their_weights(kind):
    rng = np.random.default_rng(1)
    mesh = make_mesh(kind, "a")
    tokens, experts = put(ROWS[1], mesh)
    draw = lambda n: rng.normal(size=(E, n)).astype(np.float32)  # noqa: E731
    biases = {"gate_up_bias": draw(2 * WIDTH), "down_bias": draw(H)}
    split = {n: place(b, mesh, P("a")) for n, b in biases.items()}
    got, text = run(gradients, mesh, tokens, dataclasses.replace(experts, **split), axes="a")
    tokens, weights = jax.device_put(_drawn())
    close(got, jax.jit(gradients)(tokens, Experts(**weights, **biases)))
    assert "4 reduce-scatter" in collectives(text) and "all-reduce" not in collectives(text)


def two_layers(x, ids, weights, stacked, unroll=1, policy=POLICY):
    """Loss of two layers under scan and remat, whose weights are stored in parts."""

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=unroll > 1)
    def one(x, experts):
        tokens = {"x": x, "ids": ids, "weights": weights, "residual": x}
        return layer(tokens, experts, "a"), None

    return jnp.sum(jnp.sin(jax.lax.scan(one, x, stacked, unroll=unroll)[0]))


def stacked(mesh=None, row=FSDP_H):
    tokens, weights = _drawn()
    specs = {"gate_up": P(None, *row.gate_up), "down": P(None, *row.down)}
    both = {n: np.stack([w, w[::-1] / 2]) for n, w in weights.items()}
    lie = (lambda a, spec: place(a, mesh, spec)) if mesh else lambda a, _: jnp.asarray(a)
    given = (lie(tokens[n], P("a")) for n in ("x", "ids", "weights"))
    return *given, Experts(**{n: lie(w, specs[n]) for n, w in both.items()})


@functools.cache
def expected_of_two():
    return jax.jit(jax.value_and_grad(two_layers, (0, 2, 3)))(*stacked())


@KINDS
@pytest.mark.parametrize("row", ROWS[:2], ids=("H", "experts"))
def test_scan_and_remat(kind, row):
    """Each pass over a layer gathers its weights; those of all layers are never there."""
    mesh = make_mesh(kind, "a")
    fn = jax.value_and_grad(two_layers, (0, 2, 3))
    (value, grads), text = run(fn, mesh, *stacked(mesh, row))
    close((value, grads), expected_of_two())
    gathered = moved(text, "all-gather")
    assert gathered == sorted([("f32", E * H * 2 * WIDTH), ("f32", E * WIDTH * H)] * 2)
    assert len(moved(text, "reduce-scatter")) == 2
    assert all(size == 1 for _, size in moved(text, "all-reduce")), "the loss alone"
    check_spec(grads[2].gate_up, P(None, *row.gate_up))


def test_without_remat_explicit_axes_keep_what_they_gathered():
    mesh = make_mesh(EXPLICIT, "a")
    everything = jax.checkpoint_policies.everything_saveable
    fn = functools.partial(two_layers, policy=everything)
    _, text = run(jax.grad(fn, 3), mesh, *stacked(mesh))
    assert len(moved(text, "all-gather")) == 2


def _needs(text, wanted):
    """Ops that the operands of each `wanted` op are made of, from the text of a program."""
    entry = text[text.index("\nENTRY") :]
    ops = {}
    for name, op, operands in re.findall(r"%(\S+) = .*? ([\w-]+)\((.*)$", entry, re.M):
        ops[name] = op, re.findall(r"%([\w.-]+)", operands.split("), ")[0])

    def above(name, seen):
        for operand in ops[name][1]:
            if operand in ops and operand not in seen:
                seen.add(operand)
                above(operand, seen)
        return seen

    return [{ops[n][0] for n in above(name, set())} for name in ops if ops[name][0] == wanted]


@pytest.mark.parametrize(("kind", "count"), ((AUTO, 8), (EXPLICIT, 4)), ids=str)
def test_a_layer_is_gathered_without_waiting_for_the_one_before(kind, count):
    """Which lets XLA overlap them: Auto axes in both passes, Explicit ones in the forward pass."""
    mesh = make_mesh(kind, "a")
    fn = functools.partial(two_layers, unroll=2)
    _, text = run(jax.grad(fn, 3) if kind == AUTO else fn, mesh, *stacked(mesh))
    needs = _needs(text, "all-gather")
    stored = {"parameter", "slice", "bitcast", "copy", "fusion", "transpose", "reshape"}
    assert len(needs) == count
    assert all(ops <= stored for ops in needs)


BYTES = {"fp8_block": 1.0, "fp8_tensor": 1.0, "mxfp4": 17 / 32, "int4_g128": 0.5 + 2 / 128}


@KINDS
@pytest.mark.parametrize("format", BYTES)
def test_quantized_weights_are_gathered_as_they_are(kind, format):
    """In bytes; and frozen ones gather for the gradients of tokens as well."""
    h, i, e, t = 256, 128, 4, 8
    rng = np.random.default_rng(5)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    tokens = {"x": rng.normal(size=(t, h)), "residual": rng.normal(size=(t, h))}
    tokens = {n: np.asarray(a, jnp.bfloat16) for n, a in tokens.items()}
    tokens["ids"] = rng.integers(0, e, (t, K)).astype(np.int32)
    tokens["weights"] = rng.random((t, K), np.float32)
    split = {n: place(a, mesh, P("a")) for n, a in tokens.items()}
    parts, whole = {}, {}
    for name, shape, spec in (
        ("gate_up", (e, 2 * i, h), P(None, None, "a")),
        ("down", (e, h, i), P(None, "a")),
    ):
        w = jnp.asarray(rng.normal(size=shape) / 16, jnp.bfloat16)
        whole[name] = q = jaxmoe.quantize(w, format, weight_layout="nk")
        scales = P(*spec[: q.scales.ndim])
        parts[name] = dataclasses.replace(
            q, values=place(q.values, mesh, spec), scales=place(q.scales, mesh, scales)
        )

    def fn(tokens, experts, axes=None):
        floats = {n: a for n, a in tokens.items() if n != "ids"}
        loss = lambda f: layer(f | {"ids": tokens["ids"]}, experts, axes).astype(jnp.float32).sum()  # noqa: E731
        return layer(tokens, experts, axes), jax.grad(loss)(floats)

    got, text = run(fn, mesh, split, Experts(**parts, layout="nk"), axes="a")
    want = jax.jit(fn)(jax.device_put(tokens), Experts(**whole, layout="nk"))
    as_f32 = functools.partial(jax.tree.map, lambda a: np.asarray(a, np.float32))
    got, want = as_f32(got), as_f32(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-5), got, want)
    gathered = moved(text, "all-gather")
    assert {dtype for dtype, _ in gathered} <= {"u8", "f32"}
    sizes = {size for dtype, size in gathered if dtype == "u8"}
    assert sizes == {q.values.size for q in whole.values()}
    assert max(sizes) <= BYTES[format] * e * 2 * i * h * 1.07, "with their blocks' headers"
    assert all(size <= e * 8 for dtype, size in gathered if dtype == "f32"), "scales"
    assert all(size == 1 for _, size in moved(text, "all-reduce"))


def test_master_weights_are_rounded_before_they_move():
    """And their gradients are float32 sums over the devices."""
    mesh = make_mesh(EXPLICIT, "a")
    tokens, experts = put(FSDP_H, mesh)
    narrow = lambda tokens: {  # noqa: E731
        n: a.astype(jnp.bfloat16) if n in ("x", "residual") else a for n, a in tokens.items()
    }
    tokens, experts = narrow(tokens), dataclasses.replace(experts, dtype=jnp.bfloat16)
    with entered(mesh):
        lowered = jax.jit(functools.partial(gradients, axes="a")).lower(tokens, experts)
        got = lowered.compile()(tokens, experts)
    text = lowered.as_text()
    dtypes = lambda op: re.findall(rf'"stablehlo.{op}".*?-> tensor<[\dx]+x(\w+)>', text, re.S)  # noqa: E731
    assert dtypes("all_gather") == ["bf16"] * 2
    assert dtypes("reduce_scatter") == ["f32"] * 2
    tokens, weights = jax.device_put(_drawn())
    want = jax.jit(gradients)(narrow(tokens), Experts(**weights, dtype=jnp.bfloat16))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=2**-6)


def received(text, n):
    """Bytes that each of n devices receives in the collectives of a program."""
    width = {"f32": 4, "s32": 4}
    ways = {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}
    return sum(
        width[dtype] * size * share
        for kind, share in ways.items()
        for dtype, size in moved(text, kind)
    )


def _repeated(tokens, times):
    return {n: np.tile(a, (times, 1)) for n, a in tokens.items()}


@KINDS
@pytest.mark.parametrize(("times", "gathers"), ((1, False), (16, True)))
def test_fewer_bytes_are_chosen(kind, times, gathers):
    """Experts over the axis of the tokens: the choice says what the program moves, both ways."""
    mesh = make_mesh(kind, "a")
    _, experts = put(ROWS[1], mesh)
    tokens = {n: place(a, mesh, P("a")) for n, a in _repeated(_drawn()[0], times).items()}
    choice = fsdp.choose_gather(tokens["x"], Routing(tokens["ids"], tokens["weights"]), experts)
    assert choice.axes == (("a",) if gathers else ())
    assert set(choice.bytes) == {(), ("a",)} and choice.bytes[choice.axes] == min(
        choice.bytes.values()
    )
    texts = {}
    for axes in (None, (), ("a",)):
        y, texts[axes] = run(layer, mesh, tokens, experts, axes=axes)
        check_spec(y, P("a"))
    assert collectives(texts[None]) == collectives(texts[choice.axes])
    for axes, size in choice.bytes.items():
        assert received(texts[axes], 4) == size
    assert f"weights gathered over 'a': {choice.bytes['a',]} bytes" in choice.reason


@pytest.mark.parametrize(("times", "gathers"), ((1, False), (64, True)))
def test_bytes_where_h_is_split(times, gathers):
    """By default many tokens gather weights over H as well, and y lies as x does."""
    mesh = make_mesh(AUTO, "a")
    _, experts = put(FSDP_H, mesh)
    tokens = {n: place(a, mesh, P("a")) for n, a in _repeated(_drawn()[0], times).items()}
    choice = fsdp.choose_gather(tokens["x"], Routing(tokens["ids"], tokens["weights"]), experts)
    assert choice.axes == (("a",) if gathers else ())
    y, text = run(layer, mesh, tokens, experts)
    assert (collectives(text) == "2 all-gather") == gathers
    want, _ = run(layer, mesh, tokens, experts, axes=())
    close(y, want)
    if gathers:
        check_spec(y, P("a"))


def test_tokens_that_are_whole_are_divided():
    """A named axis divides them, and y comes back so."""
    mesh = make_mesh(EXPLICIT, "a")
    _, experts = put(FSDP_H, mesh)
    tokens = {n: place(a, mesh, P()) for n, a in _drawn()[0].items()}
    y, text = run(layer, mesh, tokens, experts, axes="a")
    close(y, expected()[0])
    check_spec(y, P("a"))
    assert collectives(text) == "2 all-gather"


def test_choice_for_quantized_tokens_is_that_for_plain_ones_but_for_what_is_sent():
    """Results are bf16 either way, and were counted as if they were bytes."""
    mesh = make_mesh(EXPLICIT, "a")
    experts = _of_two_bytes().quantized("fp8_channel")
    first = experts.gate_up
    parts = (first.values, P(None, "a")), (first.scales, P(None, "a"))
    values, scales = (place(a, mesh, spec) for a, spec in parts)
    first = dataclasses.replace(first, values=values, scales=scales)
    experts = dataclasses.replace(experts, gate_up=first)

    def sizes(x):
        x = jax.tree.map(lambda a: place(a, mesh, P("a")), x)
        ids, weights = jnp.zeros((64, 1), jnp.int32), jnp.ones((64, 1))
        routing = Routing(*(place(a, mesh, P("a")) for a in (ids, weights)))
        return fsdp.choose_gather(x, routing, experts).bytes

    plain = jnp.ones((64, 256), jnp.bfloat16)
    given, made = sizes(jaxmoe.quantize_tokens(plain, "fp8_channel")), sizes(plain)
    assert given == made


def _of_two_bytes():
    first, down = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 512, 256), (4, 256, 256)))
    return Experts(gate_up=first, down=down, layout="nk", order="interleaved")


def test_one_device_has_nothing_to_gather():
    tokens, weights = jax.device_put(_drawn())
    close(layer(tokens, Experts(**weights), "a"), expected()[0])
    choice = fsdp.choose_gather(
        tokens["x"], Routing(tokens["ids"], tokens["weights"]), Experts(**weights)
    )
    assert choice == fsdp.GatherChoice((), "no mesh axis splits tokens and weights", {})


REFUSED = (
    ("c", ValueError, "gather_weights='c' must name an axis of the mesh ('a'). Got x: f32[32,16]."),
    (
        ("a", "a"),
        ValueError,
        "gather_weights=('a', 'a') must name an axis once.",
    ),
    (
        True,
        TypeError,
        "gather_weights must be the name of a mesh axis, a tuple of names, or None. Got "
        "gather_weights: True.",
    ),
)


@KINDS
@pytest.mark.parametrize(
    "row, count",
    [
        (Row("", P("b"), P("b", None, "a"), "", "", P(("a", "b")), "b"), T),
        (Row("", P("b"), P("b"), "", "", P("a"), "b"), 4),
        (Row("", P(None, "a", "b"), P(None, "b", "a"), "", "", P(("a", "b")), "b"), T),
    ],
    ids=("beside H of the result", "more devices than tokens", "H and I"),
)
def test_axes_that_are_named_split_the_tokens(row, count, kind):
    """Or all devices along them had the same ones, whose gradients were added up."""
    mesh = mesh_of(row, kind)
    _, experts = put(row, mesh, "interleaved")
    few = {n: place(a[:count], mesh, row.x) for n, a in _drawn()[0].items()}
    got, _ = run(gradients, mesh, few, experts, axes=row.axes)
    whole, weights = _drawn()
    one = {n: a[:count] for n, a in whole.items()}
    close(got, jax.jit(gradients)(one, Experts(**weights, order="interleaved")))


def test_an_auto_axis_beside_explicit_ones_is_refused():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AUTO, EXPLICIT))
    tokens, experts = put(Row("", P(None, "a"), P("a"), "", "", P("b")), mesh)
    text = "gather_weights='a' must name an Explicit axis of the mesh ('b')"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(text)):
        jax.jit(lambda tokens, experts: layer(tokens, experts, "a"))(tokens, experts)


@KINDS
@pytest.mark.parametrize(("axes", "error", "text"), REFUSED, ids=lambda value: str(value)[:12])
def test_what_is_refused(kind, axes, error, text):
    mesh = make_mesh(kind, "a")
    with (
        entered(mesh) if kind == EXPLICIT else contextlib.nullcontext(),
        pytest.raises(error, match=re.escape(f"jaxmoe.moe_mlp: {text}")),
    ):
        layer(*put(FSDP_H, mesh), axes)


@pytest.mark.parametrize("tokens", (P("a"), P(("a", "b"))), ids=str)
def test_axes_that_gather_all_of_a_weight_are_named(tokens):
    """H over two axes, one of which is named: the message says what the call may say."""
    mesh = make_mesh(EXPLICIT, "a", "b")
    row = Row("", P(None, ("a", "b")), P(None, None, ("a", "b")), "", "", tokens)
    text = "weights are not gathered; gather_weights=('a', 'b') gathers all of it. Use jax.sharding"
    with jax.set_mesh(mesh):
        arguments = put(row, mesh)
        with pytest.raises(NotImplementedError, match=re.escape(text)):
            layer(*arguments, "a")
        y = jax.jit(lambda *a: layer(*a, ("a", "b")))(*arguments)
    close(y, layer(_drawn()[0], Experts(**_drawn()[1]), None))


def test_tokens_that_do_not_divide_are_refused():
    mesh = make_mesh(AUTO, "a")
    _, experts = put(FSDP_H, mesh)
    tokens = {n: place(a[:6], mesh, P()) for n, a in _drawn()[0].items()}
    text = (
        "jaxmoe.moe_mlp: gather_weights='a' divides the tokens, so x.shape[0]=6 must be a multiple "
        "of 4 (devices along it). Got x: f32[6,16]."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        jax.jit(lambda tokens: layer(tokens, experts, "a"))(tokens)


def test_manual_axes_are_refused():
    mesh = make_mesh(AUTO, "a")
    tokens, experts = jax.device_put(_drawn())
    text = (
        "jaxmoe.moe_mlp: gather_weights='a' must be an Auto or Explicit axis, and inside this "
        "jax.shard_map it is Manual: jax.lax.all_gather the weights before the call."
    )
    inside = lambda tokens: layer(tokens, Experts(**experts), "a")  # noqa: E731
    with pytest.raises(ValueError, match=re.escape(text)):
        jax.shard_map(inside, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(tokens)


@pytest.mark.parametrize("axes", (None, (), "a"), ids=str)
def test_without_tokens_nothing_is_gathered(axes):
    """Of arrays without rows XLA has no collective."""
    mesh = make_mesh(EXPLICIT, "a")
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P("a")))  # noqa: E731
    tokens, weights = _drawn()
    experts = Experts(**{n: put(w) for n, w in weights.items()})
    x, ids, of_ids = (put(tokens[n][:0]) for n in ("x", "ids", "weights"))

    def loss(x, of_ids, experts):
        y = jaxmoe.moe_mlp(x, Routing(ids, of_ids), experts, gather_weights=axes)
        return y.sum()

    dx, dweights, dexperts = jax.jit(jax.grad(loss, (0, 1, 2)))(x, of_ids, experts)
    assert (dx.shape, dweights.shape) == (x.shape, of_ids.shape)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(dexperts))


def test_without_tokens_a_residual_is_of_no_use():
    mesh = make_mesh(EXPLICIT, "a")
    tokens, weights = _drawn()
    experts = Experts(
        gate_up=place(weights["gate_up"], mesh, P()),
        down=place(weights["down"], mesh, P(None, None, "a")),
    )
    none = {n: place(a[:0], mesh, P()) for n, a in tokens.items()}
    y, *of = jax.jit(gradients)(none, experts)
    assert y.shape == (0, H) and not any(np.asarray(a).any() for a in jax.tree.leaves(of))


@pytest.mark.parametrize("wrong", ("routing", "experts"))
def test_the_choice_names_what_is_no_argument(wrong):
    tokens, weights = _drawn()
    args = {"routing": Routing(tokens["ids"], tokens["weights"]), "experts": Experts(**weights)}
    text = f"jaxmoe.fsdp.choose_gather: {wrong} must be a jaxmoe."
    with pytest.raises(TypeError, match=re.escape(text)):
        fsdp.choose_gather(tokens["x"], **args | {wrong: 3})
    with pytest.raises(TypeError, match=re.escape("jaxmoe.fsdp.choose_gather: x must be")):
        fsdp.choose_gather([1], **args)
    with pytest.raises(ValueError, match="x.shape.0.=8 must equal routing.expert_ids.shape.0.="):
        fsdp.choose_gather(tokens["x"][:8], **args)


def test_axes_of_a_mesh_that_is_not_known_while_tracing():
    """Where shardings are given to jit alone: checked when XLA divides the program."""
    mesh = make_mesh(AUTO, "a")
    tokens, weights = _drawn()
    lie = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    experts = Experts(gate_up=lie(FSDP_H.gate_up), down=lie(FSDP_H.down))
    shardings = (dict.fromkeys(tokens, lie(P("a"))), experts)
    y = jax.jit(functools.partial(layer, axes="a"), in_shardings=shardings)(
        tokens, Experts(**weights)
    )
    close(y, expected()[0])
    with pytest.raises(Exception, match=r"gather_weights='c' must name an axis of the mesh \('a'"):
        jax.jit(functools.partial(layer, axes="c"), in_shardings=shardings)(
            tokens, Experts(**weights)
        )
