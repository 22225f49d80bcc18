"""Every way to shard gives the results of one device for the collectives of docs/sharding.md."""

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
from jaxmoe import Routing
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import Layer, layer_inputs, normal
from tests.layers import moe_mlp
from tests.sharding_programs import (
    AUTO,
    EXPLICIT,
    check_spec,
    close,
    collectives,
    compiled,
    documented,
    entered,
    make_mesh,
    spec_text,
)

LAYER = Layer("", "every axis divides over 4 devices", 16, 8, 8, 2, bias=True)
NUM_TOKENS = 24

TOKENS = ("x", "expert_ids", "weights", "residual")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: what is split, and what that costs.

    `experts`, `i`, `h_in`, `h_out` and `tokens` are the mesh axes of those dimensions; `i_down` is
    that of I of w_down, if it is not `i`.
    """

    title: str
    forward: str
    with_gradients: str | None = None
    out: P = P()
    experts: str | None = None
    i: str | None = None
    i_down: str | None = ""
    h_in: str | None = None
    h_out: str | None = None
    tokens: str | None = None
    gate_up: str = "interleaved"

    def specs(self) -> dict[str, P]:
        e, i, tokens = self.experts, self.i, self.tokens
        i_down = i if self.i_down == "" else self.i_down
        return {name: P(tokens) for name in TOKENS} | {
            "w_gate_up": P(e, self.h_in, i),
            "w_down": P(e, i_down, self.h_out),
            "b_gate_up": P(e, i),
            "b_down": P(e, self.h_out),
        }

    def cells(self) -> list[str]:
        names = ("w_gate_up", "w_down", "x")
        specs = (spec_text(self.specs()[name]) for name in names)
        cells = [self.title, *specs, spec_text(self.out), self.forward]
        if self.with_gradients is not None:
            cells.append(self.with_gradients)
        return cells


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
    Row("H of `gate_up`", "1 all-reduce", "1 all-gather, 2 all-reduce", h_in="a"),
    Row("H of `down`", "none", "1 all-reduce", P(None, "a"), h_out="a"),
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
    Row(
        "2I and H",
        "1 all-gather, 2 collective-permute",
        "2 all-gather, 1 all-reduce, 1 reduce-scatter, 6 collective-permute",
        P(None, "a"),
        i="a",
        i_down=None,
        h_out="a",
        gate_up="gate_up",
    ),
    Row("H and I", "2 all-reduce", h_in="a", i_down="a"),
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


@functools.cache
def _drawn():
    rng = np.random.default_rng(0)
    inputs = layer_inputs(LAYER, NUM_TOKENS, "with_invalid", rng, jnp.float32)
    return jax.tree.map(np.asarray, inputs | {"residual": normal(rng, inputs["x"].shape)})


def arguments():
    """Arrays of the mesh around the caller: those of one mesh are refused on another."""
    return jax.device_put(_drawn())


def layer(arrays, gate_up):
    a = dict(arrays)
    x, ids, weights, w1, w2 = (
        a.pop(n) for n in ("x", "expert_ids", "weights", "w_gate_up", "w_down")
    )
    return moe_mlp(x, Routing(ids, weights), w1, w2, gate_up=gate_up, gather_weights=(), **a)


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


def check_no_weights_are_gathered(text):
    """The largest thing gathered is x; a matrix of weights over any axis is larger."""
    for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text):
        assert math.prod(map(int, shape.split(","))) <= NUM_TOKENS * LAYER.hidden


def row_mesh(row, kind):
    used = {row.experts, row.i, row.h_in, row.h_out, row.tokens}
    return make_mesh(kind, *(("a", "b") if "b" in used else ("a",)))


@titles
def test_layer(row):
    mesh = row_mesh(row, AUTO)
    arrays = ordered(arguments(), row.gate_up)
    y, text = compiled(layer, mesh, arrays, row.specs(), row.gate_up)
    close(y, expected()[0])
    assert collectives(text) == row.forward
    check_spec(y, row.out)
    check_no_weights_are_gathered(text)
    assert documented(*row.cells())


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

    def batch(x, a):
        loss = lambda x: jnp.sum(jnp.sin(layer(a | {"x": x}, row.gate_up)))  # noqa: E731
        return jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x]))

    x = arguments()["x"]
    close(jax.jit(lambda x: batch(x, put))(x), jax.jit(lambda x: batch(x, arguments()))(x))


@pytest.mark.parametrize(
    ("first", "second"), ((P(None, "a"), P("a")), (P("a"), P(None, None, "a"))), ids=str
)
def test_an_axis_divides_one_dimension_of_the_layer(first, second):
    """Experts, where one weight has them on the axis that the other has H on."""
    names = ("x", "expert_ids", "weights", "w_gate_up", "w_down")
    arrays = {n: arguments()[n] for n in names}
    specs = {n: P() for n in names} | {"w_gate_up": first, "w_down": second}
    y, text = compiled(lambda a: layer(a, "interleaved"), make_mesh(AUTO, "a"), arrays, specs)
    close(y, layer(arrays, "interleaved"))
    assert "1 all-reduce" in collectives(text)


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


def test_devices_exchange_products_that_are_rounded():
    """Sums over parts of H travel in the dtype of x: half of the bytes."""
    names = ("x", "expert_ids", "weights", "w_gate_up", "w_down")
    arrays = {n: arguments()[n] for n in names}
    arrays |= {n: arrays[n].astype(jnp.bfloat16) for n in ("x", "w_gate_up", "w_down")}
    specs = {n: P() for n in names} | {"w_gate_up": P(None, "a")}
    mesh = make_mesh(EXPLICIT, "a")
    put = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()}
    with entered(mesh):
        text = jax.jit(lambda a: layer(a, "interleaved")).lower(put).as_text()
    (summed,) = re.findall(r'"stablehlo.all_reduce".*?\}\) : \((\S+)\)', text, re.DOTALL)
    assert summed == f"tensor<{2 * NUM_TOKENS}x{2 * LAYER.intermediate}xbf16>"


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


def fp8_layer(a, **options):
    a = dict(a)
    routing, x = Routing(a.pop("expert_ids"), a.pop("weights")), a.pop("x")
    w, kwargs = (a.pop("w_gate_up"), a.pop("w_down")), {"weight_layout": "nk"} | options
    return moe_mlp(x, routing, *w, gate_up="interleaved", **kwargs, **a)


def fp8_rows(a):
    return fp8_layer(a, do_finalize=False).rows


FP8 = {
    "fp8_tensor": (AUTO, fp8_layer, Row("", "2 all-reduce", i="a")),
    "fp8_block": (
        EXPLICIT,
        fp8_layer,
        Row(
            "",
            "4 all-gather, 1 all-reduce, 1 reduce-scatter",
            out=P("a"),
            experts="a",
            tokens="a",
            h_in="b",
        ),
    ),
    "fp8_tensor, rows, static": (  # the scale of each expert is gathered
        EXPLICIT,
        fp8_rows,
        Row("", "1 all-gather, 1 all-reduce", out=P(None, "b"), experts="a", h_out="b"),
    ),
    "fp8_block, rows": (
        AUTO,
        fp8_rows,
        Row("", "2 all-reduce", experts="a", h_in="b"),
    ),
}


@pytest.mark.parametrize("name", FP8)
def test_fp8(name):
    """Scales are split with their values, and made of the numbers of all devices."""
    kind, fn, row = FP8[name]
    rng = np.random.default_rng(3)
    shape = Layer("", "two blocks of H", 256, 16, 4, 2)
    inputs = layer_inputs(shape, 8, "uniform", rng, jnp.bfloat16, "nk")
    specs = {n: P(row.tokens) for n in ("x", "expert_ids", "weights")}
    stored = {
        "w_gate_up": P(row.experts, row.i, row.h_in),
        "w_down": P(row.experts, row.h_out, row.i),
    }
    for name_of, spec in stored.items():  # [E,N,K]
        q = jaxmoe.quantize(inputs[name_of], name.split(",")[0], weight_layout="nk")
        inputs[name_of] = q
        specs[name_of] = dataclasses.replace(q, values=spec, scales=P(*spec[: q.scales.ndim]))
    if "static" in name:
        inputs["intermediate_scale"] = jnp.array([0.01, 0.02, 0.03, 0.04])
        specs["intermediate_scale"] = P(row.experts)
    names = row_mesh(row, kind).axis_names
    mesh = jax.make_mesh((2,) * len(names), names, axis_types=(kind,) * len(names))
    with entered(mesh):
        put = jax.tree.map(
            lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s)), inputs, specs
        )
        program = jax.jit(fn).lower(put).compile()
    y = program(put)
    got, want = (np.asarray(a, np.float32) for a in (y, jax.jit(fn)(inputs)))
    # Parts of sums rounded to bf16, and sums in another order that round to another FP8 number.
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-6)
    assert collectives(program.as_text()) == row.forward
    check_spec(y, row.out)


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
        "jaxmoe.moe_mlp: experts.down is split as P(b, None, None) over Explicit mesh axes, which "
        "does not go with the other arguments or does not divide: it would have to be P(a, None, "
        "None), and weights are not gathered. Use jax.sharding.reshard, or split the other weights "
        "like it. Got experts.down: f32[8,8,16]."
    )
    put = lambda n, spec: jax.device_put(arguments()[n], NamedSharding(mesh, spec))  # noqa: E731
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match=re.escape(rows)):
            jaxmoe.plan(put("expert_ids", P("a")), 8)
        specs = dict.fromkeys(arguments(), P()) | {"w_gate_up": P("a"), "w_down": P("b")}
        with pytest.raises(NotImplementedError, match=re.escape(weights)):
            layer({n: put(n, spec) for n, spec in specs.items()}, "gate_up")


def test_explicit_axes_that_would_divide_a_block_of_weights_are_told_what_it_is():
    mesh = make_mesh(EXPLICIT, "a", "b")
    down = jnp.zeros((2, 2, 384 // 128 * (2 * 2048 + 128)), jnp.uint8)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
    text = (
        "experts.down.values is split as P(None, None, a) over Explicit mesh axes, which does not "
        "go with the other arguments or does not divide into whole blocks of 64 outputs by 128 "
        "inputs of int4_g128: it would have to be P(None, None, None)"
    )
    with jax.set_mesh(mesh):
        first = jaxmoe.QuantizedArray(
            jnp.zeros((2, 12, 4224), jnp.uint8), jnp.ones(2), "int4_g128", "nk", jnp.bfloat16
        )
        second = dataclasses.replace(first, values=put(down, None, None, "a"))
        experts = jaxmoe.Experts(first, second, layout="nk")
        routing = jaxmoe.Routing(jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1)))
        with pytest.raises(NotImplementedError, match=re.escape(text)):
            jaxmoe.moe_mlp(jnp.zeros((3, 128), jnp.bfloat16), routing, experts)


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


def test_a_whole_first_weight_gives_each_device_its_pairs():
    """Only w_down is split on I, gates before ups: the gradient of the first weight is one sum."""
    row = Row("", "", i_down="a", gate_up="gate_up")
    arrays = ordered(arguments(), "gate_up")
    got, text = compiled(gradients, row_mesh(row, AUTO), arrays, row.specs(), "gate_up", ())
    close(got, (expected()[0], ordered(expected()[1], "gate_up")))
    check_no_weights_are_gathered(text)


def test_pairs_of_a_whole_first_weight_in_either_layout():
    """Its gates and ups lie along axis 2, or along axis 1."""
    arrays = ordered(arguments(), "gate_up")
    weights = ("w_gate_up", "w_down")
    turned = arrays | {n: arrays[n].swapaxes(1, 2) for n in weights}
    specs = dict.fromkeys(arrays, P()) | {"w_down": P(None, None, "a")}
    run = lambda a: moe_mlp(  # noqa: E731
        a["x"],
        Routing(a["expert_ids"], a["weights"]),
        *(a[n] for n in weights),
        weight_layout="nk",
        **{n: a[n] for n in ("b_gate_up", "b_down", "residual")},
    )
    y, _ = compiled(run, make_mesh(AUTO, "a"), turned, specs)
    close(y, expected()[0])


def test_the_two_weights_may_be_divided_over_axes_of_their_own():
    """I of one over one axis, of the other over the other: activations are gathered."""
    row = Row("", "", i="a", i_down="b")
    mesh = make_mesh(AUTO, "a", "b")
    got, _ = compiled(gradients, mesh, arguments(), row.specs(), row.gate_up, ())
    close(got, expected())


def test_tokens_are_divided_whatever_their_length():
    """24 of them over 4 devices, of 18 elements each."""
    shape = dataclasses.replace(LAYER, hidden=18, bias=False)
    inputs = layer_inputs(shape, NUM_TOKENS, "uniform", np.random.default_rng(2), jnp.float32)
    row = Row("", "", tokens="a")
    specs = {n: row.specs()[n] for n in inputs}
    y, text = compiled(layer, row_mesh(row, AUTO), inputs, specs, "gate_up")
    close(y, layer(inputs, "gate_up"))
    assert collectives(text) == "none"


def test_three_devices_bring_gates_and_ups_together():
    """An odd number of them: the middle one has the last gates and the first ups."""
    narrow = dataclasses.replace(LAYER, intermediate=12, num_experts=2, bias=False)
    inputs = layer_inputs(narrow, 4, "uniform", np.random.default_rng(6), jnp.float32)
    mesh = jax.make_mesh((3,), ("a",), axis_types=(AUTO,))
    specs = dict.fromkeys(inputs, P()) | {"w_gate_up": P(None, None, "a"), "w_down": P(None, "a")}
    y, text = compiled(layer, mesh, inputs, specs, "gate_up")
    close(y, layer(inputs, "gate_up"))
    assert collectives(text) == "1 all-reduce, 2 collective-permute"


@pytest.mark.parametrize("kind", (AUTO, EXPLICIT), ids=str)
def test_gates_and_ups_come_together_over_axes_in_any_order(kind):
    """`jax.lax.ppermute` takes them in the order of the mesh alone."""
    inputs = {n: a for n, a in arguments().items() if not n.startswith("b_")}
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    both = ("b", "a")
    specs = dict.fromkeys(inputs, P()) | {"w_gate_up": P(None, None, both), "w_down": P(None, both)}
    y, _ = compiled(layer, mesh, inputs, specs, "gate_up")
    close(y, layer(inputs, "gate_up"))


# What is split, and static scales: whatever is quantized has the scale that one device gives it.
ONE_SCALE = {
    "columns of a row": ("fp8_channel", Row("", "", i="a"), ()),
    "columns of all rows": (
        "fp8_tensor",
        Row("", "", experts="b", i="a", i_down=None, h_out="a"),
        (),
    ),
    "tokens": ("fp8_tensor", Row("", "", tokens="a"), ()),
    "experts": ("fp8_tensor", Row("", "", experts="a"), ()),
    "tokens and experts": ("fp8_tensor", Row("", "", tokens="a", experts="a"), ("h_scale",)),
    "static": ("fp8_tensor", Row("", "", tokens="a", experts="b"), ("x_scale", "h_scale")),
}


@pytest.mark.parametrize("name", ONE_SCALE)
def test_devices_quantize_with_the_scales_of_one(name):
    """float32 parts of the same FP8 numbers: only the order of the sum over devices differs."""
    format, row, static = ONE_SCALE[name]
    narrow = dataclasses.replace(LAYER, bias=False)
    inputs = layer_inputs(narrow, 8, "uniform", np.random.default_rng(7), jnp.float32, "nk")
    specs = {n: P(row.tokens) for n in ("x", "expert_ids", "weights")}
    i_down = row.i if row.i_down == "" else row.i_down
    stored = {
        "w_gate_up": P(row.experts, row.i, row.h_in),
        "w_down": P(row.experts, row.h_out, i_down),
    }
    for n, spec in stored.items():  # [E,N,K]
        inputs[n] = q = jaxmoe.quantize(inputs[n], format, weight_layout="nk")
        specs[n] = dataclasses.replace(q, values=spec, scales=P(*spec[: q.scales.ndim]))
    given = {
        "x_scale": ("x_scale", jnp.float32(0.01), P()),
        "h_scale": ("intermediate_scale", jnp.linspace(0.001, 0.004, 8), P(row.experts)),
    }
    for n, value, spec in (given[n] for n in static):
        inputs[n], specs[n] = value, spec
    mesh = row_mesh(row, AUTO)
    put = jax.tree.map(
        lambda a, s: jax.device_put(np.asarray(a), NamedSharding(mesh, s)), inputs, specs
    )
    got, want = (np.asarray(jax.jit(fp8_layer)(a)) for a in (put, inputs))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_windows_and_maps_of_divided_experts():
    """Local ids are those of all devices together, whichever of them has an expert."""
    table = jnp.array([7, -1, 3, 0, 8, 5, -2, 6, 1, 2, 4, 7], jnp.int32)
    names = ("x", "expert_ids", "weights", "w_gate_up", "w_down")

    def all_ways(a):
        ids = a["expert_ids"] + 2  # 2 .. 9 and what is none

        def run(**options):
            w = a["w_gate_up"], a["w_down"]
            return moe_mlp(a["x"], Routing(ids, a["weights"]), *w, **options)

        rows = run(expert_map=table, do_finalize=False).rows
        return run(expert_offset=3, num_experts=12), run(expert_map=table), rows

    arrays = {n: arguments()[n] for n in names}
    row = Row("", "", experts="a")
    got, text = compiled(all_ways, row_mesh(row, AUTO), arrays, {n: row.specs()[n] for n in names})
    close(got, jax.jit(all_ways)(arrays))
    check_no_weights_are_gathered(text)


@pytest.mark.parametrize("finalize", [True, False])
@pytest.mark.parametrize("split, kept", [("experts", True), ("i", False), ("h_in", False)])
def test_a_part_of_k_has_tiles_of_its_own(split, kept, finalize):
    """A config is for products over all of K: devices that contract a part choose their own."""
    row = Row("", "", **{split: "a"})
    mesh = row_mesh(row, EXPLICIT)
    shape = dataclasses.replace(LAYER, hidden=2048, intermediate=2048, num_experts=4, bias=False)
    inputs = {
        "x": (4, 2048),
        "expert_ids": (4, 2),
        "weights": (4, 2),
        "w_gate_up": (4, 2048, shape.width),
        "w_down": (4, 2048, 2048),
    }
    dtypes = {"expert_ids": jnp.int32, "weights": jnp.float32}
    args = {
        n: jax.ShapeDtypeStruct(
            a, dtypes.get(n, jnp.bfloat16), sharding=NamedSharding(mesh, row.specs()[n])
        )
        for n, a in inputs.items()
    }
    asked = jaxmoe.GemmConfig(128, 32, raster=5)

    def tiled(a):
        routing = Routing(a["expert_ids"], a["weights"])
        w = a["w_gate_up"], a["w_down"]
        options = {"gate_up": "interleaved", "config": (asked, asked), "do_finalize": finalize}
        return moe_mlp(a["x"], routing, *w, **options)

    with entered(mesh):
        ops = jaxmoe.explain(tiled, args).ops
    tiles = [
        op.cuda_attrs[n] for op in ops for n in ("gemm1", "gemm2", "config") if n in op.cuda_attrs
    ]
    assert len(tiles) == 2
    assert [tile["raster"] == 5 for tile in tiles] == [kept, kept]
