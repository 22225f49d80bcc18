"""What CUDA would be asked to run: the custom calls of a program's StableHLO, on any machine."""

import re

import jax

from jaxmoe._jax import targets as _targets
from jaxmoe._mlp.op import moe_mlp_p

# The results of the layer's call; those before `act` are public.
RESULTS = ("y", "rows", "slot_to_row", "act", "xq", "hq", "floats", "index")

# The attribute of a product that is not activated.
NO_ACTIVATION = {
    "kind": "4:i64",
    "gated": "0:i64",
    "c1": "0.000000e+00:f32",
    "c3": "0.000000e+00:f32",
    "limit": "0x7F800000:f32",
    "beta": "0.000000e+00:f32",
}


def cuda_text(fn, *args, forced=True):
    """StableHLO of `fn` for CUDA; without `forced` as if the kernels were not there."""
    fresh = jax.jit(lambda *a: fn(*a))
    if not forced:
        return fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    with _targets.force_cuda_lowering():
        return fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """(target, attributes, operand types, result types) of every custom call of ours."""
    pattern = re.compile(
        r"stablehlo\.custom_call @(jaxmoe_\w+)\(.*?mhlo\.backend_config = \{(.*?)\}, "
        r"operand_layouts = \[(.*?)\], result_layouts = \[(.*?)\]\} : \((.*?)\) -> (.*)"
    )
    found = []
    for target, attrs, in_layouts, out_layouts, ins, outs in pattern.findall(text):
        for layout in re.findall(r"dense<(.*?)> : tensor<(\d+)xindex>", in_layouts + out_layouts):
            order, rank = layout
            assert order in (str(list(range(int(rank)))[::-1]), "0", ""), "not row-major"
        types = [re.findall(r"tensor<(.*?)>", t) for t in (ins, outs)]
        found.append((target, attributes(attrs), *types))
    return found


def attributes(text):
    """Parses `a = 1 : i64, b = {c = 2.0 : f32}, d = "e"` into a dict, numbers as typed strings."""
    text = re.sub(r"(\w+) = (-?[\w.+-]+) : (i64|f32)", r'"\1": "\2:\3"', text)
    text = re.sub(r'(\w+) = (")', r'"\1": \2', text)
    return eval("{" + re.sub(r"(\w+) = \{", r'"\1": {', text) + "}")  # our own text, no input


def layer_call(call):
    """(attributes, operands, results) of a call of the layer, arrays with elements by name."""
    target, attrs, *sides = call
    assert target == "jaxmoe_moe_mlp_v1"
    named = (
        {n: t for n, t in zip(names, types, strict=True) if "0" not in t.split("x")[:-1]}
        for names, types in zip((moe_mlp_p.cuda.operands, RESULTS), sides, strict=True)
    )
    return attrs, *named
