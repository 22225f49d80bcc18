"""Every way to shard gives the results of one device for the collectives of docs/sharding.md."""

import contextlib
import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Routing, _targets, grouped_gemm, moe_mlp
from jaxmoe._testing import Layer, layer_inputs, normal

DOCS = Path(__file__).resolve().parent.parent / "docs" / "sharding.md"
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

LAYER = Layer("", "every axis divides over 4 devices", 16, 8, 8, 2, bias=True)
NUM_TOKENS = 24
# f32 sums in another order, values of order 1; see test_transforms.py.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}

TOKENS = ("x", "expert_ids", "weights", "residual")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: what is split, and what that costs.

    `experts`, `i`, `h_in`, `h_out` and `tokens` are the mesh axes of those dimensions.
    """

    title: str
    forward: str
    with_gradients: str | None = None
    out: P = P()
    experts: str | None = None
    i: str | None = None
    h_in: str | None = None
    h_out: str | None = None
    tokens: str | None = None
    gate_up: str = "interleaved"

    def specs(self) -> dict[str, P]:
        e, i, tokens = self.experts, self.i, self.tokens
        return {name: P(tokens) for name in TOKENS} | {
            "w_gate_up": P(e, self.h_in, i),
            "w_down": P(e, i, self.h_out),
            "b_gate_up": P(e, i),
            "b_down": P(e, self.h_out),
        }

    def line(self) -> str:
        names = ("w_gate_up", "w_down", "x")
        specs = (_text(self.specs()[name]) for name in names)
        cells = [self.title, *specs, _text(self.out), self.forward]
        if self.with_gradients is not None:
            cells.append(self.with_gradients)
        return f"| {' | '.join(cells)} |"


def _text(spec):
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return f"`P({', '.join('None' if p is None else p for p in parts)})`"


ROWS = [
    Row("experts", "1 all-reduce", "2 all-reduce", experts="a"),
    Row("I, interleaved", "1 all-reduce", "2 all-reduce", i="a"),
    Row(
        "I, gates before ups",
        "1 all-reduce, 2 collective-permute",
        "2 all-reduce, 6 collective-permute",
        i="a",
        gate_up="gate_up",
    ),
    Row("H of `w_gate_up`", "1 all-reduce", "1 all-gather, 2 all-reduce", h_in="a"),
    Row("H of `w_down`", "none", "1 all-reduce", P(None, "a"), h_out="a"),
    Row("tokens", "none", "1 all-reduce", P("a"), tokens="a"),
    Row("tokens, experts", "1 all-reduce", "3 all-reduce", P("a"), tokens="a", experts="b"),
    Row(
        "tokens with experts",
        "3 all-gather, 1 reduce-scatter",
        "7 all-gather, 3 reduce-scatter",
        P("a"),
        tokens="a",
        experts="a",
    ),
    Row(
        "tokens with experts, H",
        "3 all-gather, 1 all-reduce, 1 reduce-scatter",
        "8 all-gather, 3 all-reduce, 3 reduce-scatter",
        P("a", "b"),
        tokens="a",
        experts="a",
        h_in="b",
        h_out="b",
    ),
    Row("experts, I", "1 all-reduce", experts="a", i="b"),
    Row(
        "tokens with H",
        "2 all-gather, 1 all-reduce, 2 all-to-all",
        None,
        P(None, "a"),
        tokens="a",
        h_in="a",
        h_out="a",
    ),
]
titles = pytest.mark.parametrize("row", ROWS, ids=[row.title for row in ROWS])


def make_mesh(kind, *names):
    sizes = (4,) if len(names) == 1 else (2, 4)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def entered(mesh):
    explicit = EXPLICIT in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


@functools.cache
def arguments():
    rng = np.random.default_rng(0)
    inputs = layer_inputs(LAYER, NUM_TOKENS, "with_invalid", rng, jnp.float32)
    return inputs | {"residual": normal(rng, inputs["x"].shape)}


def layer(arrays, gate_up):
    a = dict(arrays)
    x, ids, weights, w1, w2 = (
        a.pop(n) for n in ("x", "expert_ids", "weights", "w_gate_up", "w_down")
    )
    return moe_mlp(x, Routing(ids, weights), w1, w2, gate_up=gate_up, **a)


def gradients(arrays, gate_up, fixed=()):
    """The result, and the gradient of every floating argument but those `fixed`."""
    fixed = {n: arrays[n] for n in ("expert_ids", *fixed)}

    def loss(floats):
        y = layer(floats | fixed, gate_up)
        return jnp.sum(jnp.sin(y)), y

    floats = {n: a for n, a in arrays.items() if n not in fixed}
    (_, y), grads = jax.value_and_grad(loss, has_aux=True)(floats)
    return y, grads


@functools.cache
def expected():
    """The result and gradients on one device, gates and ups interleaved."""
    return jax.jit(gradients, static_argnums=1)(arguments(), "interleaved")


def ordered(arrays, gate_up):
    """Arguments or gradients whose gates and ups are interleaved, in another order."""
    if gate_up == "interleaved":
        return arrays
    pairs = {n: a for n, a in arrays.items() if n.endswith("gate_up")}
    parts = {n: jnp.concatenate([a[..., 0::2], a[..., 1::2]], -1) for n, a in pairs.items()}
    return arrays | parts


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)


def compiled(fn, mesh, arrays, specs, *static):
    """Runs `fn` on sharded arrays. Returns its result and the text of the program."""
    with entered(mesh):
        put = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()}
        jitted = jax.jit(fn, static_argnums=tuple(range(1, 1 + len(static))))
        program = jitted.lower(put, *static).compile()
        return program(put), program.as_text()


def collectives(text):
    found = {k: len(re.findall(rf" {k}(?:-start)?\(", text)) for k in COLLECTIVES}
    return ", ".join(f"{n} {k}" for k, n in found.items() if n) or "none"


def check_no_weights_are_gathered(text):
    """The largest thing gathered is x; a matrix of weights over any axis is larger."""
    for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text):
        assert math.prod(map(int, shape.split(","))) <= NUM_TOKENS * LAYER.hidden


def row_mesh(row, kind):
    used = {row.experts, row.i, row.h_in, row.h_out, row.tokens} - {None}
    return make_mesh(kind, *(("a", "b") if "b" in used else ("a",)))


def check_spec(a, spec):
    assert a.sharding.is_equivalent_to(NamedSharding(a.sharding.mesh, spec), a.ndim), a.sharding


@titles
def test_layer(row):
    mesh = row_mesh(row, AUTO)
    arrays = ordered(arguments(), row.gate_up)
    y, text = compiled(layer, mesh, arrays, row.specs(), row.gate_up)
    close(y, expected()[0])
    assert collectives(text) == row.forward
    check_spec(y, row.out)
    check_no_weights_are_gathered(text)
    assert row.line() in DOCS.read_text(encoding="utf-8").splitlines()


DERIVED = [row for row in ROWS if row.with_gradients is not None]


@pytest.mark.parametrize("row", DERIVED, ids=[row.title for row in DERIVED])
def test_gradients_of_the_layer(row):
    """Gradients of weights are split as the weights are, and gather none."""
    fixed = () if row.i or row.h_in else ("b_gate_up", "b_down")  # that are added once
    static = (row.gate_up, fixed)
    arrays = ordered(arguments(), row.gate_up)
    (y, grads), text = compiled(gradients, row_mesh(row, AUTO), arrays, row.specs(), *static)
    want = ordered(expected()[1], row.gate_up)
    close((y, grads), (expected()[0], {n: want[n] for n in grads}))
    assert collectives(text) == row.with_gradients
    for name in ("w_gate_up", "w_down", "x", "weights"):
        check_spec(grads[name], row.specs()[name])
    check_no_weights_are_gathered(text)


def test_derivatives_of_the_derivative():
    """Its ops are made of those of one device, however often they are differentiated."""
    (row,) = (row for row in ROWS if row.title == "experts")
    mesh = row_mesh(row, AUTO)
    put = {
        n: jax.device_put(a, NamedSharding(mesh, row.specs()[n])) for n, a in arguments().items()
    }

    def second(x):
        loss = lambda x: jnp.sum(jnp.sin(layer(put | {"x": x}, row.gate_up)))  # noqa: E731
        return jax.jvp(jax.grad(loss), (x,), (x,))

    first = str(
        jax.make_jaxpr(jax.grad(lambda x: layer(put | {"x": x}, row.gate_up).sum()))(put["x"])
    )
    assert "jaxmoe_moe_mlp_backward" in first and "jaxmoe_gmm" not in first
    both = str(jax.make_jaxpr(second)(put["x"]))
    assert "jaxmoe_moe_mlp_linear" in both and "jaxmoe_gmm" in both


def test_gradients_on_explicit_axes():
    (row,) = (row for row in ROWS if row.title == "tokens with experts")
    types = []

    def fn(arrays, gate_up):
        y, grads = gradients(arrays, gate_up)
        types.extend(tuple(jax.typeof(a).sharding.spec) for a in (y, grads["w_down"]))
        return y, grads

    got, text = compiled(fn, row_mesh(row, EXPLICIT), arguments(), row.specs(), row.gate_up)
    close(got, expected())
    assert types == [("a", None), ("a", None, None)]
    check_no_weights_are_gathered(text)


def test_a_data_axis_under_vmap():
    """Examples over one axis and experts over another: each device folds its own examples."""
    arrays = {n: arguments()[n] for n in ("x", "expert_ids", "weights", "w_gate_up", "w_down")}
    per_example = {n: (4, 6, a.shape[1]) for n, a in arrays.items() if n[0] != "w" or "_" not in n}
    batched = arrays | {n: arrays[n].reshape(shape) for n, shape in per_example.items()}

    def mapped(a):
        axes = {n: 0 if n in per_example else None for n in a}
        return jax.vmap(lambda one: layer(one, "gate_up"), (axes,))(a)

    specs = {n: P("a") if n in per_example else P("b") for n in arrays}
    want = layer(arrays, "gate_up").reshape(4, 6, LAYER.hidden)
    y, text = compiled(mapped, make_mesh(EXPLICIT, "a", "b"), batched, specs)
    close(y, want)
    assert collectives(text) == "1 all-reduce"
    check_spec(y, P("a"))


def test_rows_of_the_layer():
    """With do_finalize=False every device has the order of all rows."""

    def rows(a):
        ids, weights = a["expert_ids"], a["weights"]
        w = a["w_gate_up"], a["w_down"]
        return moe_mlp(a["x"], Routing(ids, weights), *w, do_finalize=False)

    arrays = {n: arguments()[n] for n in ("x", "expert_ids", "weights", "w_gate_up", "w_down")}
    specs = {n: P("a") if n.startswith("w_") else P() for n in arrays}
    got, text = compiled(rows, make_mesh(EXPLICIT, "a"), arrays, specs)
    close(got, rows(arrays))
    assert collectives(text) == "1 all-reduce"


# w of [E,K,N], then lhs of [R,K] -> collectives, and how the result is split.
PRODUCTS = {
    "N": (P(None, None, "a"), P(), "none", P(None, "a")),
    "E": (P("a"), P(), "1 all-reduce", P()),
    "K": (P(None, "a"), P(None, "a"), "1 all-reduce", P()),
    "E, N": (P("a", None, "b"), P(), "1 all-reduce", P(None, "b")),
}


def product_arguments():
    rng = np.random.default_rng(1)
    arrays = {"lhs": normal(rng, (24, 8)), "rhs": normal(rng, (8, 8, 16))}
    return arrays | {"bias": normal(rng, (8, 16)), "sizes": jnp.array([3, 0, 5, 2, 4, 1, 6, 2])}


def product(a):
    return grouped_gemm(a["lhs"], a["rhs"], a["sizes"], bias=a["bias"])


@pytest.mark.parametrize(
    ("kind", "name"), [*((AUTO, name) for name in PRODUCTS), (EXPLICIT, "E, N"), (EXPLICIT, "K")]
)
def test_grouped_gemm(kind, name):
    rhs, lhs, wanted, out = PRODUCTS[name]
    specs = {"lhs": lhs, "rhs": rhs, "bias": P(rhs[0], *rhs[2:]), "sizes": P()}
    mesh = make_mesh(kind, *(("a", "b") if "b" in rhs else ("a",)))
    y, text = compiled(product, mesh, product_arguments(), specs)
    close(y, product(product_arguments()))
    assert collectives(text) == wanted
    check_spec(y, out)
    cells = (name, _text(rhs), _text(lhs), _text(out), wanted)
    assert f"| {' | '.join(cells)} |" in DOCS.read_text(encoding="utf-8").splitlines()


def test_a_step_of_training_of_grouped_gemm():
    """The gradient of weights split over experts is computed where they are."""

    def step(a):
        loss = lambda w, x: jnp.sum(product(a | {"rhs": w, "lhs": x}) ** 2)  # noqa: E731
        dw, dx = jax.grad(loss, (0, 1))(a["rhs"], a["lhs"])
        return a["rhs"] - 0.1 * dw, dx

    specs = {"lhs": P(), "rhs": P("a"), "bias": P(), "sizes": P()}
    (w, dx), text = compiled(step, make_mesh(AUTO, "a"), product_arguments(), specs)
    close((w, dx), step(product_arguments()))
    assert collectives(text) == "2 all-reduce"
    check_spec(w, P("a"))


def test_other_ops():
    """Tokens of `route`, and H of `permute` and `finalize`, are split for nothing."""

    def fn(a):
        routing = jaxmoe.route(a["logits"], top_k=2)
        plan = jaxmoe.plan(a["ids"], 8)
        rows = jaxmoe.permute(a["x"], plan)
        return routing, jaxmoe.finalize(rows, plan, a["weights"], residual=a["x"])

    rng = np.random.default_rng(2)
    routing = jaxmoe.route(normal(rng, (24, 8)), top_k=2)
    arrays = {"logits": normal(rng, (24, 8)), "x": normal(rng, (24, 16))}
    arrays |= {"ids": routing.expert_ids, "weights": routing.weights}
    specs = {"logits": P("a"), "x": P(None, "a"), "ids": P(), "weights": P()}
    (chosen, y), text = compiled(fn, make_mesh(AUTO, "a"), arrays, specs)
    close((chosen, y), fn(arrays))
    assert collectives(text) == "none"
    check_spec(chosen.expert_ids, P("a"))
    check_spec(y, P(None, "a"))


FP8 = [
    ("fp8_tensor", AUTO, Row("", "2 all-reduce", i="a")),
    (
        "fp8_block",
        EXPLICIT,
        Row("", "4 all-gather, 1 all-reduce, 1 reduce-scatter", experts="a", tokens="a", h_in="b"),
    ),
]


@pytest.mark.parametrize(("format", "kind", "row"), FP8, ids=[case[0] for case in FP8])
def test_fp8(format, kind, row):
    """Scales are split with their values, and made of the numbers of all devices."""
    rng = np.random.default_rng(3)
    shape = Layer("", "two blocks of H", 256, 16, 4, 2)
    inputs = layer_inputs(shape, 8, "uniform", rng, jnp.bfloat16, "nk")
    specs = {n: P(row.tokens) for n in ("x", "expert_ids", "weights")}
    stored = {"w_gate_up": P(row.experts, row.i, row.h_in), "w_down": P(row.experts, None, row.i)}
    for name, spec in stored.items():  # [E,N,K]
        q = inputs[name] = jaxmoe.quantize(inputs[name], format, weight_layout="nk")
        specs[name] = dataclasses.replace(q, values=spec, scales=P(*spec[: q.scales.ndim]))
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    with entered(mesh):
        put = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), inputs, specs)
        program = jax.jit(fp8_layer).lower(put).compile()
    got, want = (np.asarray(y, np.float32) for y in (program(put), jax.jit(fp8_layer)(inputs)))
    # Parts of sums rounded to bf16, and sums in another order that round to another FP8 number.
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-6)
    assert collectives(program.as_text()) == row.forward


def fp8_layer(a):
    routing, w = Routing(a["expert_ids"], a["weights"]), (a["w_gate_up"], a["w_down"])
    return moe_mlp(a["x"], routing, *w, weight_layout="nk", gate_up="interleaved")


def test_what_explicit_axes_must_not_split():
    """Rows that one order is made of, and weights that do not go together."""
    mesh = make_mesh(EXPLICIT, "a", "b")
    rows = (
        "jaxmoe.plan: expert_ids must not be split along its rows over Explicit mesh axes (a), "
        "because their groups are those of all. Call it inside jax.shard_map over those axes, "
        "where each device has groups of its own, or replicate the argument with "
        "jax.sharding.reshard. Got expert_ids: i32[24,2]."
    )
    weights = (
        "jaxmoe.moe_mlp: w_down is split as P(b, None, None) over Explicit mesh axes, which does "
        "not go with the other arguments or does not divide: it would have to be P(a, None, None), "
        "and weights are not gathered. Use jax.sharding.reshard, or split the other weights like "
        "it. Got w_down: f32[8,8,16]."
    )
    put = lambda n, spec: jax.device_put(arguments()[n], NamedSharding(mesh, spec))  # noqa: E731
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match=re.escape(rows)):
            jaxmoe.plan(put("expert_ids", P("a")), 8)
        specs = dict.fromkeys(arguments(), P()) | {"w_gate_up": P("a"), "w_down": P("b")}
        with pytest.raises(NotImplementedError, match=re.escape(weights)):
            layer({n: put(n, spec) for n, spec in specs.items()}, "gate_up")


@pytest.mark.parametrize(("split", "local"), [("experts", 2), ("tokens", 8)])
def test_a_device_makes_the_fused_call(split, local):
    """On CUDA, of its own experts for all tokens, or of all experts for its own tokens."""
    row = Row("", "", **{split: "a"})
    mesh = row_mesh(row, EXPLICIT)
    with jax.set_mesh(mesh), _targets.force_cuda_lowering():
        floats = {n: a.astype(jnp.bfloat16) for n, a in arguments().items() if n != "expert_ids"}
        floats["weights"] = arguments()["weights"]
        arrays = floats | {"expert_ids": arguments()["expert_ids"]}
        put = {n: jax.device_put(a, NamedSharding(mesh, row.specs()[n])) for n, a in arrays.items()}
        traced = jax.jit(layer, static_argnums=1).trace(put, "gate_up")
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"@jaxmoe_\w+\(.*", text)
    assert "@jaxmoe_moe_mlp_v1" in call and f"num_local_experts = {local} : i64" in call
    tokens = NUM_TOKENS if split == "experts" else NUM_TOKENS // 4
    assert f"(tensor<{tokens}x16xbf16>" in call


def test_only_programs_for_several_devices_are_partitioned():
    """On one device, and inside shard_map, a program is the op alone."""
    marker = "CustomSPMDPartitioning"
    arrays, fn = product_arguments(), jax.jit(product)
    assert marker not in fn.lower(arrays).as_text()
    mesh = make_mesh(AUTO, "a")
    rows = {"lhs": P("a"), "rhs": P(), "bias": P(), "sizes": P()}
    specs = {n: NamedSharding(mesh, spec) for n, spec in rows.items()}
    assert marker in jax.jit(product, in_shardings=(specs,)).lower(arrays).as_text()
    mapped = jax.shard_map(product, mesh=mesh, in_specs=(rows,), out_specs=P("a"))
    assert marker not in jax.jit(mapped).lower(arrays).as_text()
