"""How grouped products are divided over the axes of a mesh, in the notation of op.py.

gmm                                                          what a device does
  w split on N (and bias)    its columns                     nothing is added up
  w split on E (and bias)    the groups of its weights       sum over devices
  w or x split on K          a part of each sum              sum over devices
  x split on B               its batches                     nothing is added up
tgmm                                                         what it adds to (init) stays in place
  x split on K, dy on N      its part of each weight         nothing is added up
  dw split on E              the groups of its weights       nothing is added up
  x, dy split on B           its batches                     sum over devices if they share weights

The rows of one batch are not split: its ranges count all of them.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxmoe._formats import Format
from jaxmoe._formats.base import letters
from jaxmoe._jax.mesh import Axes, Dims, once, own, total
from jaxmoe._jax.sharding import Call, Rule, Split, refuse_tokens


def gmm_rule(gmm: Callable[..., Any]) -> Rule:
    """The rule of `gmm`. Scales lie with their values; blocks that share one are not divided."""

    def dims(avals: Any, *, weight_layout: str, format: Format, **_params: Any) -> str:
        weight = "k n" if weight_layout == "kn" else "n k"
        u = _batch_name(avals.x.shape[0], avals.w.shape[0])
        x_scales, w_scales = (format.scales_of(tokens) for tokens in (True, False))
        if weight_layout == "kn":  # the outputs of weights are contracted
            w_scales = w_scales.replace("n", "k")
        scales = f"b {x_scales}, {u} {w_scales}"
        return f"b t k, {u} e {weight}, b g, b g, {u} e n, {scales} -> b t n"

    def split(call: Call, *, format: Format, **params: Any) -> Split:
        refuse_tokens(rule, call, 0, 1)
        x, w = call.avals.x, call.avals.w
        of_x, of_w = call.given.x, call.given.w
        k_dim = 2 if params["weight_layout"] == "kn" else 3
        n_dim = 5 - k_dim
        sizes = format.weight_shape(w.shape)
        parts = {2: format.parts(sizes[2], "n"), 3: format.parts(sizes[3], "k")}
        e = call.pick(w.shape[1], of_w[1])
        n = call.pick(parts[n_dim], of_w[n_dim], taken=e)
        k = call.pick(parts[k_dim], of_w[k_dim], of_x[2], taken=e + n)
        b, u = _batch_axes(call, x.shape[0], w.shape[0], of_x[0], of_w[0], e + n + k)
        in_w = (u, e, k, n) if k_dim == 2 else (u, e, n, k)
        added = e + k
        if k:  # tiles chosen for all of K may not fit a part
            params = params | {"config": None}

        def part(x: Any, w: Any, starts: Any, sizes: Any, bias: Any, *scales: Any) -> Any:
            groups = (own_groups(a, w.shape[1], e, call.count(e)) for a in (starts, sizes))
            (out,) = gmm(x, w, *groups, once(bias, k), *scales, format=format, **params)
            return (total(out, added),)

        groups = (b, ())
        stored = (n, k) if k_dim == 3 else (k, n)
        of_scales = weight_scale_axes(format, e, *stored)
        scales = ((b, *token_scale_axes(format, (), k)), (u, *of_scales))
        return Split(((b, (), k), in_w, groups, groups, (u, e, n), *scales), ((b, (), n),), part)

    names = ("lhs", "rhs", "group_sizes", "group_sizes", "bias", "lhs.scales", "rhs.scales")
    units = lambda aval, *, format, **_params: format.units(aval.shape)  # noqa: E731
    named = lambda **_params: {1: names[1]}  # noqa: E731
    rule = Rule(dims, split, ("grouped_gemm", *names), named, units)
    return rule


def token_scale_axes(format: Format, tokens: Axes, k: Axes) -> Dims:
    """Mesh axes of the scales of tokens [tokens, k]."""
    axes = {"t": tokens, "q": k}
    return tuple(axes[letter] for letter in letters(format.token_scales or ""))


def weight_scale_axes(format: Format, e: Axes, n: Axes, k: Axes) -> Dims:
    """Mesh axes of the scales of weights that are stored [e, n, k]."""
    axes = {"e": e, "n": n, "p": n, "q": k}
    return tuple(axes[letter] for letter in letters(format.weight_scales))


def tgmm_rule(tgmm: Callable[..., Any]) -> Rule:
    """The rule of `tgmm`."""

    def dims(avals: Any, *, weight_shape: tuple[int, int], **_params: Any) -> str:
        of_weight = _batch_name(avals.x.shape[0], weight_shape[0])
        return f"b t k, b t n, b g, b g, {of_weight} e k n -> {of_weight} e k n"

    def split(call: Call, *, weight_shape: tuple[int, int], **params: Any) -> Split:
        for i in (0, 1):
            refuse_tokens(rule, call, i, 1)
        x, dy, given = call.avals.x, call.avals.dy, call.given
        of_dw = call.wanted[0] if call.wanted else ((),) * 4
        first = given.init or ((),) * 4
        e = call.pick(weight_shape[1], first[1])
        k = call.pick(x.shape[2], first[2], given.x[2], of_dw[2], taken=e + first[3])
        n = call.pick(dy.shape[2], first[3], given.dy[2], of_dw[3], taken=e + k)
        e = e or call.pick(weight_shape[1], of_dw[1], taken=k + n)
        of_x, of_w = given.x[0] or given.dy[0], first[0] or of_dw[0]
        b, u = _batch_axes(call, x.shape[0], weight_shape[0], of_x, of_w, k + n + e)
        count = call.count(e)
        shape = weight_shape[0] // call.count(u), weight_shape[1] // count
        added = () if u else b

        def part(x: Any, dy: Any, starts: Any, sizes: Any, init: Any) -> tuple[jax.Array]:
            groups = (own_groups(a, shape[1], e, count) for a in (starts, sizes))
            (dw,) = tgmm(x, dy, *groups, once(init, added), weight_shape=shape, **params)
            return (total(dw, added),)

        groups, of_dw = (b, ()), (u, e, k, n)
        return Split(((b, (), k), (b, (), n), groups, groups, of_dw), (of_dw,), part)

    factor, groups = "lhs or dy", "group_sizes"
    names = ("grouped_gemm_weight_grad", factor, factor, groups, groups, "accumulate_into")
    rule = Rule(dims, split, names)
    return rule


def own_groups(groups: jax.Array, own_weights: int, axes: Axes, count: int) -> jax.Array:
    """Takes from [B,G] the groups of this device's weights; group g has weight g mod E."""
    if not axes:
        return groups
    by_weight = groups.reshape(groups.shape[0], -1, own_weights * count)
    return own(by_weight, 2, axes, count).reshape(groups.shape[0], -1)


def _batch_name(batches: int, weights: int) -> str:
    return "b" if batches == weights > 1 else "u"


def _batch_axes(
    call: Call, batches: int, weights: int, of_x: Axes, of_w: Axes, taken: Axes
) -> tuple[Axes, Axes]:
    """Mesh axes of the batches of x and of weights: equal, or none for one batch of weights."""
    if weights == 1:
        return call.pick(batches, of_x, taken=taken), ()
    if batches == weights:
        axes = call.pick(batches, of_w, of_x, taken=taken)
        return axes, axes
    return (), ()
