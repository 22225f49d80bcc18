"""moe_mlp with master weights: float32 weights, bf16 products, gradients that are not rounded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe import Experts, QuantizedArray, explain, quantize
from jaxmoe._jax import targets as _targets
from jaxmoe._testing import Layer, assert_equal, layer_inputs
from tests.arguments import zeros_of
from tests.layers import moe_mlp
from tests.lowered import calls, cuda_text, layer_call
from tests.sharding_programs import AUTO, EXPLICIT, check_spec, compiled, make_mesh
from tests.test_errors_mlp import LAYER as RIGHT
from tests.test_errors_mlp import zeros
from tests.test_lowering import layer_structs, struct
from tests.test_mlp import run
from tests.test_shard_map import arguments, layer, mesh, specs
from tests.test_training import plain_reference
from tests.test_transforms import equations

LAYER = Layer("", "the activation adds no rounding", 16, 24, 3, 2, "identity", bias=True)
MASTERS = ("w_gate_up", "w_down", "b_gate_up", "b_down")


def draw(num_tokens):
    """Ones of either sign, so that nothing but a weight gradient has more bits than bf16."""
    rng = np.random.default_rng(2)
    inputs = layer_inputs(LAYER, num_tokens, "uniform", rng, jnp.float32)
    for name in ("x", *MASTERS):
        inputs[name] = jnp.asarray(rng.choice([-1, 1], inputs[name].shape), jnp.float32)
    inputs["weights"] = jnp.asarray(rng.choice([2**-9, 0.5], inputs["weights"].shape), jnp.float32)
    inputs["x"] = inputs["x"].astype(jnp.bfloat16)
    return inputs


def gradients(fn, inputs, ct, **kwargs):
    def loss(masters):
        y = fn(inputs | masters, activation="identity", **kwargs)
        return jnp.sum(y * ct.astype(y.dtype))

    return jax.grad(loss)({name: inputs[name] for name in MASTERS})


def test_gradients_are_not_rounded():
    """They are those in float64, which bf16 does not hold, of the weights that bf16 holds."""
    inputs = draw(150)
    ct = jnp.asarray(np.random.default_rng(1).integers(-1, 2, (150, 16)), jnp.float32)
    fine = inputs | {name: inputs[name] + 2.0**-12 for name in MASTERS}
    narrow = inputs | {name: inputs[name].astype(jnp.bfloat16) for name in MASTERS}

    def both(fine, narrow):
        return gradients(run, fine, ct, master_weights=True), gradients(run, narrow, ct)

    got, rounded = jax.jit(both)(fine, narrow)
    with jax.enable_x64(True):
        wide = {n: a if n == "expert_ids" else a.astype("float64") for n, a in inputs.items()}
        want = jax.jit(lambda i: gradients(plain_reference, i, ct, dtype=jnp.float64))(wide)
        want = {name: np.asarray(a, np.float32) for name, a in want.items()}
    for name in MASTERS:
        assert_equal(got[name], want[name])
        assert_equal(rounded[name], want[name].astype(jnp.bfloat16))
        assert (rounded[name].astype(jnp.float32) != want[name]).any()


def test_the_gradient_of_vmap_is_not_rounded_either():
    """Nor that of the rows without finalize; shared weights stay one product with float32 sums."""
    inputs = draw(6)
    tokens = {n: inputs[n].reshape(2, 3, -1) for n in ("x", "expert_ids", "weights")}

    def loss(masters, do_finalize):
        def one(tokens):
            given = {"master_weights": True, "do_finalize": do_finalize, "activation": "identity"}
            y = run(tokens | masters, **given)
            y = y if do_finalize else y.rows
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.vmap(one)(tokens).sum()

    masters = {n: inputs[n] for n in MASTERS}
    for do_finalize in (True, False):
        program = jax.make_jaxpr(jax.grad(lambda m, f=do_finalize: loss(m, f)))(masters).jaxpr
        shapes = [masters[n].shape for n in ("w_gate_up", "w_down")]
        made = [e.outvars[0].aval for e in equations(program) if e.primitive.name == "jaxmoe_tgmm"]
        made = [a for a in made if a.shape[1:] in shapes]
        assert [a.dtype for a in made] == [jnp.float32] * 2
        for equation in equations(program):  # no rounded gradient is widened
            if equation.primitive.name == "convert_element_type":
                (source,), (result,) = equation.invars, equation.outvars
                assert result.aval.shape not in shapes or source.aval.dtype == jnp.float32


def master_gradients(of_rows):
    """A function of `draw(48)`: the gradients of the layer, or of some of its rows."""
    ct = jnp.asarray(np.random.default_rng(1).integers(-1, 2, (48, 16)), jnp.float32)

    def rows(arrays, **kwargs):
        return run(arrays, do_finalize=False, **kwargs).rows[:48]

    return lambda a: gradients(rows if of_rows else run, a, ct, master_weights=True)


@functools.cache
def on_one_device(of_rows):
    return jax.jit(master_gradients(of_rows))(draw(48))


ON_MESHES = {
    "tokens, I": (AUTO, P("a"), P(None, None, "b"), P(None, "b")),
    "tokens, H": (EXPLICIT, P("a"), P(None, "b"), P(None, None, "b")),
    "I, H of the rows": (EXPLICIT, P(), P(None, None, "a"), P(None, "a", "b")),
}


@pytest.mark.parametrize("name", ON_MESHES)
def test_gradients_on_a_mesh_are_not_rounded(name):
    """To the bit those of one device, of the fused layer, of its two products or of its rows."""
    kind, tokens, w_gate_up, w_down = ON_MESHES[name]
    weights = {"w_gate_up": w_gate_up, "w_down": w_down}
    biases = {f"b_{n[2:]}": P(spec[0], *spec[2:]) for n, spec in weights.items()}
    fn = master_gradients("rows" in name)
    specs = dict.fromkeys(draw(48), tokens) | weights | biases
    got, _ = compiled(fn, make_mesh(kind, "a", "b"), draw(48), specs)
    for n, want in on_one_device("rows" in name).items():
        assert_equal(got[n], want)
        check_spec(got[n], specs[n])
        assert "rows" in name or (want.astype(jnp.bfloat16).astype(jnp.float32) != want).any()


@pytest.mark.parametrize("kind", (AUTO, EXPLICIT))
def test_products_on_a_mesh_have_the_rounded_masters(kind):
    """Where the two products are calls of their own: what bf16 does not hold counts for nothing."""
    inputs = draw(48)
    fine = inputs | {name: inputs[name] + 2.0**-12 for name in MASTERS}
    specs = dict.fromkeys(inputs, P()) | {"w_gate_up": P(None, "a"), "w_down": P(None, None, "a")}
    fn = functools.partial(run, master_weights=True, activation="identity")
    mesh = make_mesh(kind, "a")
    got, want = (compiled(fn, mesh, a, specs)[0] for a in (fine, inputs))
    assert_equal(got, want)


def masters_of(structs):
    return [*structs[:2], *(struct(*w.shape, dtype=jnp.float32) for w in structs[2:])]


@pytest.mark.parametrize("recompute", (None, "z"))
def test_cuda_writes_float32_gradients(recompute):
    x, routing, w1, w2 = masters_of(layer_structs())

    def loss(w1, w2, x, routing):
        y = moe_mlp(x, routing, w1, w2, master_weights=True, recompute=recompute)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    text = cuda_text(jax.grad(loss, (0, 1)), w1, w2, x, routing)
    results = [c[3][0] for c in calls(text) if c[0] == "jaxmoe_weight_grad_v1"]
    assert sorted(results) == ["1x4x16x32xf32", "1x4x32x32xf32"]
    assert not re.search(r"stablehlo\.(dot|dot_general|while)\b|ragged_dot", text)


def test_cuda_runs_hessian_vector_products_on_the_kernels():
    x, routing, *masters = masters_of(layer_structs())

    def along(x, routing, *masters):
        def loss(x, *masters):
            y = moe_mlp(x, routing, *masters, master_weights=True)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        moving = (x, *masters)
        return jax.jvp(jax.grad(loss, (0, 1, 2)), moving, moving)[1]

    text = cuda_text(along, x, routing, *masters)
    assert "jaxmoe_weight_grad_v1" in text and "dot_general" not in text


@pytest.mark.parametrize("check_vma", (True, False))
def test_gradients_of_split_tokens_are_summed_in_float32(check_vma):
    """Traced alone: the values are those of the layer in test_shard_map.py."""
    ids, arrays = arguments()
    split = jax.shard_map(
        functools.partial(layer, master_weights=True),
        mesh=mesh(4),
        in_specs=specs(P("expert"), P()),
        out_specs=P("expert"),
        check_vma=check_vma,
    )
    narrow = arrays | {"x": arrays["x"].astype(jnp.bfloat16)}
    gradient = jax.grad(lambda a: jnp.sum(split(ids, a).astype(jnp.float32)))
    program = jax.make_jaxpr(gradient)(narrow)
    assert jax.tree.map(jnp.shape, arrays) == {
        n: a.shape for n, a in jax.eval_shape(gradient, narrow).items()
    }
    sums = [e for e in equations(program.jaxpr) if e.primitive.name.startswith("psum")]
    summed = {v.aval.shape: v.aval.dtype for e in sums for v in e.outvars}
    for name in MASTERS:
        assert summed[arrays[name].shape] == jnp.float32


def test_without_a_gradient_it_is_one_call():
    args = masters_of(layer_structs())
    forward = lambda *a: moe_mlp(*a, master_weights=True)  # noqa: E731
    _, operands, _ = layer_call(*calls(cuda_text(forward, *args)))
    assert (operands["w_gate_up"], operands["w_down"]) == ("4x32x32xbf16", "4x16x32xbf16")
    with _targets.force_cuda_lowering():
        (op,) = explain(forward, *args).ops
    assert (op.cuda_target, op.where) == ("jaxmoe_moe_mlp_v1", "jaxmoe_moe_mlp")


def quantized(name) -> QuantizedArray:
    return zeros_of(quantize, RIGHT[name], format="fp8_channel", weight_layout="kn")


@pytest.mark.parametrize(
    "change, kind, message",
    (
        (
            {"dtype": "int8"},
            TypeError,
            "dtype=int8 must be bfloat16, float16 or float32.",
        ),
        (
            {"dtype": "float16"},
            TypeError,
            "down.dtype=bf16 must be f32 or dtype=f16: only float32 weights are rounded to "
            "another. Got gate_up: bf16[3,8,8], down: bf16[3,4,8].",
        ),
        (
            {"gate_up": RIGHT["w_gate_up"].astype(jnp.float32)},
            TypeError,
            "gate_up.dtype=f32 must equal down.dtype=bf16. "
            "Got gate_up: f32[3,8,8], down: bf16[3,4,8].",
        ),
        (
            {
                "gate_up": RIGHT["w_gate_up"].astype(jnp.float32),
                "down": RIGHT["w_down"].astype(jnp.float32),
                "down_bias": zeros(3, 8),
            },
            TypeError,
            "down_bias.dtype=bf16 must equal down.dtype=f32. "
            "Got down_bias: bf16[3,8], down: f32[3,4,8].",
        ),
        (
            {"gate_up": quantized("w_gate_up"), "down": quantized("w_down")},
            ValueError,
            "dtype=bf16 must be None with quantized weights: the layer computes in the dtype of x. "
            "Got gate_up: a QuantizedArray (fp8_channel, values f8_e4m3fn[3,8,8]), "
            "down: a QuantizedArray (fp8_channel, values f8_e4m3fn[3,8,4]).",
        ),
    ),
)
def test_errors(change, kind, message):
    right = {"gate_up": RIGHT["w_gate_up"], "down": RIGHT["w_down"], "dtype": "bfloat16"}
    with pytest.raises(kind) as error:
        Experts(**{**right, **change})
    assert str(error.value) == "jaxmoe.Experts: " + message
