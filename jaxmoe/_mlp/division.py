"""Mesh axes of every dimension of the expert layer, and of every operand."""

from typing import Any, NamedTuple

from jaxmoe._gemm.sharding import token_scale_axes, weight_scale_axes
from jaxmoe._jax.mesh import Axes
from jaxmoe._jax.sharding import Call
from jaxmoe._mlp.operands import Layer, Operands


class Division(NamedTuple):
    """Mesh axes of each dimension of the layer.

    Attributes:
      e: experts.
      i, i_in: intermediate, as the first product computes it and as w_down contracts it. The same
        unless the other axis of one of them is split over what this one is.
      h_in, h_out: H as the first product contracts it, and H of the result.
      tokens: all axes that tokens are split over.
      gather: those of them that split weights too.
      halves: i splits the columns of w_gate_up as they are stored, gates before ups or the other
        way round, so that the two of a pair are on different devices.
      pairs: w_gate_up is whole, in that order, and each device takes its pairs out of it.
      fetched: those over which weights are gathered, which split tokens alone from there on.
    """

    e: Axes
    i: Axes
    i_in: Axes
    h_in: Axes
    h_out: Axes
    tokens: Axes
    gather: Axes
    halves: bool
    pairs: bool
    fetched: Axes = ()

    @property
    def apart(self) -> bool:
        """Whether the two products are calls of their own, whose devices may exchange something."""
        return bool(self.h_in or self.h_out or self.halves or self.i != self.i_in)

    @property
    def added(self) -> Axes:
        """The axes over which results are added up."""
        return self.e + self.i_in

    @property
    def kept(self) -> Axes:
        """The axes over which tokens stay split."""
        return tuple(a for a in self.tokens if a not in self.gather)


def dims(avals: Any, *, layer: Layer) -> str:
    """Which dimensions are split alike. H of x is not tied to H of the weights, nor N to I."""
    a = Operands(*avals)
    stored = {"kn": ("h n", "i d"), "nk": ("n h", "d i")}
    first, second = stored[layer.layouts[0]][0], stored[layer.layouts[1]][1]
    same = "e" if a.w_gate_up.shape[0] == a.w_down.shape[0] else "f"
    # H of the weights is not that of the result where it is gathered.
    out = "y" if layer.gather else "d"
    joined = a.w_up is None  # or what is joined of two arrays has columns of its own
    of_first = layer.format.weight_scales.replace("q", "r")
    # Blocks of the two weights are different ones, and so are the columns of joined scales.
    of_up = of_first if joined or a.up_scales is not None else of_first.replace("n", "w")
    second_scales = (
        layer.format.weight_scales.replace("e", same)
        .replace("n", out)
        .replace("p", "s")
        .replace("q", "u")
    )
    letters = Operands(
        x="t c",
        expert_ids="t k",
        w_gate_up=f"e {first}",
        w_down=f"{same} {second.replace('d', out)}",
        x_scales=layer.format.token_scales or "",
        weights="t k",
        gate_up_scales=of_up if a.gate_up_scales is None or a.gate_up_scales.ndim > 1 else "e",
        w_up=f"e {first}",
        up_scales=of_first,
        down_scales=second_scales,
        b_gate_up="e n" if joined or a.b_up is not None else "e w",
        b_up="e n",
        b_down=f"{same} {out}",
        expert_map="m",
        residual="t d",
        x_scale="v",
        h_scale="z",
    )
    return f"{', '.join(letters)} -> {'t d' if layer.finalize else 'o d, t k'}"


def divide(call: Call, layer: Layer, fetched: Axes = ()) -> Division:
    """Chooses the axes of each dimension; those of the weights come before those of the tokens.

    H and I are divided between the blocks of the format. Weights are not split over `fetched`; the
    tokens are.
    """
    avals, given, format = call.avals, call.given, layer.format
    w1, w2, of2 = avals.w_gate_up, avals.w_down, given.w_down
    of1 = given.w_gate_up
    if given.w_up is not None:
        of1 = tuple(a or b for a, b in zip(of1, given.w_up, strict=True))
    first, second = (
        (1, 2) if layout == "kn" else (2, 1) for layout in layer.layouts
    )  # the contracted axis of each weight and the other
    e = call.pick(w1.shape[0], of1[0], of2[0]) if w1.shape[0] == w2.shape[0] else ()
    hidden, inter = avals.x.shape[1], layer.intermediate(w2)
    rows, columns = format.parts(inter, "n"), format.parts(inter, "k")
    i = call.pick(rows, of1[first[1]], taken=e)
    i_in = call.pick(columns, of2[second[0]], taken=e)
    h_in = call.pick(format.parts(hidden, "k"), of1[first[0]], taken=e + i)
    h_out = call.pick(format.parts(hidden, "n"), of2[second[1]], taken=e + i_in)
    stored = bool(i)
    i = i or (() if set(i_in) & set(h_in) else call.pick(rows, i_in))
    i_in = i_in or (() if set(i) & set(h_out) else call.pick(columns, i))
    of_weights = () if given.weights is None else given.weights[0]
    choices = (given.x[0], given.expert_ids[0], of_weights)
    had = next((axes for axes in choices if axes), ())
    wanted = (*had, *(axis for axis in fetched if axis not in had))
    wanted = tuple(axis for axis in wanted if axis not in h_out)
    tokens = call.pick(avals.x.shape[0], wanted)
    if not set(fetched) <= set(tokens):  # or devices along them would run the same tokens
        others = tuple(axis for axis in wanted if axis not in fetched)
        tokens = call.pick(avals.x.shape[0], (*fetched, *others))
    gather = tuple(a for a in tokens if a in e + i + i_in + h_in)
    apart = call.count(i) > 1 and layer.activation.gated and layer.gate_up != "interleaved"
    apart = apart and avals.w_up is None
    halves, pairs = apart and stored, apart and not stored
    return Division(e, i, i_in, h_in, h_out, tokens, gather, halves, pairs, fetched)


def places(d: Division, avals: Any, layer: Layer) -> Operands:
    """Mesh axes of every operand."""
    a, format = Operands(*avals), layer.format
    columns = () if d.pairs else d.i
    # Biases and scales joined of two arrays are whole; each device takes its pairs out of them.
    of_bias = columns if a.w_up is None or a.b_up is not None else ()
    of_scales = columns if a.w_up is None or a.up_scales is not None else ()
    w1, w2 = (d.e, d.h_in, columns), (d.e, d.i_in, d.h_out)
    w1 = w1 if layer.layouts[0] == "kn" else (w1[0], w1[2], w1[1])
    w2 = w2 if layer.layouts[1] == "kn" else (w2[0], w2[2], w2[1])
    gathered_h = d.h_in and (format.quantizes_tokens or set(d.h_in) & set(d.gather))
    x = (d.tokens, () if gathered_h else d.h_in)
    per_slot = (d.tokens, ())
    gate_scales = weight_scale_axes(format, d.e, of_scales, d.h_in)
    if a.gate_up_scales is not None and a.gate_up_scales.ndim > len(gate_scales):
        gate_scales = (*gate_scales, ())
    ins = Operands(
        x=x,
        expert_ids=per_slot,
        w_gate_up=w1,
        w_down=w2,
        x_scales=token_scale_axes(format, d.tokens, ()),
        weights=per_slot,
        gate_up_scales=gate_scales,
        w_up=w1,
        up_scales=weight_scale_axes(format, d.e, columns, d.h_in),
        down_scales=weight_scale_axes(format, d.e, d.h_out, d.i_in),
        b_gate_up=(d.e, of_bias),
        b_up=(d.e, columns),
        b_down=(d.e, d.h_out),
        expert_map=((),),
        residual=(d.tokens, d.h_out),
        x_scale=((),),
        h_scale=(d.e,) if a.h_scale is not None and a.h_scale.shape[0] > 1 else ((),),
    )
    # Arrays of no tokens are not divided.
    empty = [v is not None and not v.size for v in a]
    return Operands(*(((),) * v.ndim if e else p for p, v, e in zip(ins, a, empty, strict=True)))
