"""Says, for every jaxmoe op in a function, what runs where and why not."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmoe._codes import Choice
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import targets as _targets
from jaxmoe._jax import told

# Operands of products that hold weights and their scales.
_WEIGHTS = (
    *("w", "w_scales", "w_gate_up", "gate_up_scales", "w_up", "up_scales"),
    *("w_down", "down_scales"),
)

_DEQUANTIZE = "jaxmoe_dequantize"

# Names of JAX's collectives, by those of their primitives in programs.
_COLLECTIVES = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "pmax": "pmax",
    "ppermute": "ppermute",
    "psum": "psum",
    "psum2": "psum",
    "psum_invariant": "psum",
    "ragged_all_to_all": "ragged_all_to_all",
    "reduce_scatter": "psum_scatter",
}


@dataclasses.dataclass(frozen=True)
class Scratch:
    """One buffer that an op needs on CUDA beyond its arguments and results.

    Attributes:
      shape, dtype: as XLA allocates it.
      bytes: its size.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class OpReport:
    """One op: its CUDA call, or why it has none, and what runs here.

    Attributes:
      op: name of the primitive, such as "jaxmoe_moe_mlp".
      where: the transformations around it, such as "jit/scan"; "" at the top. What CUDA alone runs
        is in "cond on cuda", and what other platforms run in its place in "cond elsewhere".
      operands: its arguments, such as "bf16[16,2048]".
      why_no_cuda: why CUDA would run pure XLA, None if the kernels are loaded. The fields below
        say what the kernels do where they are.
      cuda_target: FFI target that CUDA calls, None if it cannot.
      cuda_reason: why CUDA refuses these arguments, None if it does not.
      cuda_fallback: why CUDA runs pure XLA for these arguments, None if it does not.
      cuda_attrs: attributes of the call, the tiles of the matrix products among them.
      cuda_scratch: buffers of the call beyond arguments and results.
      runs: what runs on the default device of this process.
      weight_bytes: bytes of the weights of a product and of their scales, as they are stored; of
        weights that are dequantized first, at the op that does so, and 0 at the product.
    """

    op: str
    where: str
    operands: tuple[str, ...]
    why_no_cuda: str | None
    cuda_target: str | None
    cuda_reason: str | None
    cuda_fallback: str | None
    cuda_attrs: dict[str, Any]
    cuda_scratch: tuple[Scratch, ...]
    runs: str
    weight_bytes: int

    @property
    def cuda_scratch_bytes(self) -> int:
        """Bytes of all the scratch."""
        return sum(s.bytes for s in self.cuda_scratch)

    def __str__(self) -> str:
        lines = [f"{self.op} ({', '.join(self.operands)})" + (self.where and f" in {self.where}")]
        lines.append(f"  here: {self.runs}")
        if self.weight_bytes:
            lines.append(f"  weights: {self.weight_bytes} bytes")
        if self.why_no_cuda is not None:
            lines.append(f"  CUDA: pure XLA, the kernels are not loaded: {self.why_no_cuda}")
            if self.cuda_reason is not None:
                lines.append(f"    the kernels would refuse it: {self.cuda_reason}")
            return "\n".join(lines)
        if self.cuda_reason is not None:
            lines.append(f"  CUDA: refused: {self.cuda_reason}")
            return "\n".join(lines)
        if self.cuda_fallback is not None:
            lines.append(f"  CUDA: pure XLA: {self.cuda_fallback}")
            return "\n".join(lines)
        lines.append(f"  CUDA: FFI call {self.cuda_target}")
        lines += (f"    {name}: {_text(value)}" for name, value in self.cuda_attrs.items())
        buffers = ", ".join(f"{s.dtype}[{','.join(map(str, s.shape))}]" for s in self.cuda_scratch)
        lines.append(
            f"    scratch: {self.cuda_scratch_bytes} bytes" + (buffers and f" ({buffers})")
        )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of every jaxmoe op of a function; print it.

    Attributes:
      platform: of the default device of this process, such as "cpu" or "gpu".
      why_no_cuda: why the CUDA kernels are not loaded, None if they are.
      ops: one report for each op, in program order.
      collectives: those that the function itself asks for, inside `shard_map`: what each device
        gives to it, over which mesh axes, such as "all_gather of bf16[8,2048] over expert". XLA may
        add others where it divides the work.
      dispatches: how tokens reach experts on other devices (`expert_parallel`): the way, along
        which axis, the bytes that a device sends there and back for each chunk, if choices are
        even, and why this way; of "direct" also whether rows, sums or all tokens travel, and why;
        layers that do the same in one line.
    """

    platform: str
    why_no_cuda: str | None
    ops: tuple[OpReport, ...]
    collectives: tuple[str, ...] = ()
    dispatches: tuple[str, ...] = ()

    def __str__(self) -> str:
        loaded = "loaded" if self.why_no_cuda is None else f"not loaded: {self.why_no_cuda}"
        head = f"default platform: {self.platform}; CUDA kernels {loaded}"
        lines = [head, *(map(str, self.ops) if self.ops else ["no jaxmoe op found"])]
        lines += [f"dispatch: {text}" for text in self.dispatches]
        return "\n".join(lines + [f"collective: {text}" for text in self.collectives])


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Traces a function and reports what every jaxmoe op in it becomes.

    Nothing is compiled or run. Ops inside `jit`, `scan`, `while_loop`, `cond`, `vmap`, `grad`,
    `shard_map` and the like are found; an op in a loop is reported once.

    Args:
      fn: any function of arrays that JAX can trace.
      *args, **kwargs: its arguments; `jax.ShapeDtypeStruct` will do for arrays.

    Returns:
      `Report`: for each op the CUDA call with its tiles and the bytes of its scratch, or the reason
      why CUDA refuses it or runs pure XLA, and what runs on the default device of this process.

    Raises:
      TypeError: `fn` is no function. And whatever tracing it raises.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> x = jax.ShapeDtypeStruct((4, 12), jnp.bfloat16)
      >>> w = jax.ShapeDtypeStruct((2, 12, 16), jnp.bfloat16)
      >>> sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
      >>> report = jaxmoe.explain(jaxmoe.grouped_gemm, x, w, sizes)
      >>> "the nearest legal: 8 and 16" in report.ops[0].cuda_reason
      True
    """
    _checks.check_type("explain", "fn", fn, Callable, "a function")
    platform = jax.default_backend()
    with told.listening() as dispatches:
        jaxpr = jax.make_jaxpr(fn)(*args, **kwargs).jaxpr
    found = list(_find_ops(jaxpr, ()))
    ops = tuple(_explain_op(*of, platform) for of in found)
    collectives = tuple(_find_collectives(jaxpr))
    said = (_said(eqn) for _, eqn, where, *_ in found if "cond elsewhere" not in where)
    dispatches = tuple(dict.fromkeys([*dispatches, *filter(None, said)]))
    return Report(platform, _targets.why_not(), ops, collectives, dispatches)


def _said(eqn: Any) -> str:
    """What the way of an exchange says, which only the whole program decides."""
    return getattr(eqn.params.get("way"), "says", "")


def _find_ops(
    jaxpr: Any, where: tuple[str, ...]
) -> Iterator[tuple[_primitive.Op, Any, str, frozenset[int]]]:
    """Each op, its equation, where it is, and which arrays before it are dequantized weights."""
    dequantized = frozenset[int]()  # by identity: literals have no hash
    for eqn in jaxpr.eqns:
        op = _primitive.OPS.get(eqn.primitive.name)
        moved = eqn.primitive.name == "reshape" and id(eqn.invars[0]) in dequantized
        if moved or eqn.primitive.name == _DEQUANTIZE:
            dequantized |= {id(v) for v in eqn.outvars}
        if op is not None and op.binds(eqn.primitive):
            parts = _parts(op, eqn)
            if parts is not None:
                yield from _find_ops(parts, (*where, op.name))
                continue
            yield op, eqn, "/".join(where), dequantized
            continue
        names = _names_of_inner(eqn)
        for inner in _inner_jaxprs(eqn):
            yield from _find_ops(inner, (*where, next(names)))


def _parts(op: _primitive.Op, eqn: Any) -> Any:
    """The ops that one is made of on CUDA, None if it is a call."""
    absent, params = _split_params(eqn)
    made_of: Any = op.xla if op.composed(**eqn.params) else None
    if made_of is None and op.cuda is not None:
        made_of = op.cuda.apart(op.named([v.aval for v in eqn.invars], absent), **params)
    if made_of is None:
        return None
    parts = lambda *there: made_of(*op.named(there, absent), **params)  # noqa: E731
    avals = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    return jax.make_jaxpr(parts)(*avals).jaxpr


def _split_params(eqn: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Which operands are absent, and the parameters that rules get."""
    params = dict(eqn.params)
    return params.pop("absent"), params


def _names_of_inner(eqn: Any) -> Iterator[str]:
    """What each of the inner programs is called; those of one platform have its name."""
    name = eqn.primitive.name
    for platforms in eqn.params.get("branches_platforms") or ():
        yield f"{name} elsewhere" if platforms is None else f"{name} on {' and '.join(platforms)}"
    yield from itertools.repeat(name)


def _inner_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def _find_collectives(jaxpr: Any, branch: str = "") -> Iterator[str]:
    for eqn in jaxpr.eqns:
        name = _COLLECTIVES.get(eqn.primitive.name)
        if name is None:
            for inner in _inner_jaxprs(eqn):
                chosen = eqn.primitive.name == "cond"
                yield from _find_collectives(inner, " in one branch" if chosen else branch)
            continue
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = ", ".join(map(str, axes)) if isinstance(axes, tuple) else str(axes)
        yield f"{name} of {_checks.describe(eqn.invars[0].aval)} over {names}{branch}"


def _explain_op(
    op: _primitive.Op, eqn: Any, where: str, dequantized: frozenset[int], platform: str
) -> OpReport:
    absent, params = _split_params(eqn)
    avals = op.named([v.aval for v in eqn.invars], absent)
    target, reason, fallback, attrs, scratch = None, None, None, {}, ()
    if op.cuda is None:
        reason = f"{op.name} has no CUDA kernel."
    else:
        fallback = op.cuda.fallback(avals, **params)
        if fallback is None:
            reason = op.cuda.reason(avals, **params) or _targets.device_reason()
    if op.cuda is not None and reason is None and fallback is None:
        target = op.cuda.target
        attrs = op.cuda.attrs(avals, **params)
        scratch = tuple(
            Scratch(shape, _checks.dtype_name(dtype), _primitive.scratch_bytes([(shape, dtype)]))
            for shape, dtype in _scratch(op, avals, params)
            if 0 not in shape
        )
    runs = "pure XLA"
    if platform == "gpu" and _primitive.lowers_to_cuda(op) and fallback is None:
        runs = f"FFI call {target}" if reason is None else "nothing: it is refused"
    operands = tuple(_checks.describe(a) for a in avals if a is not None)
    why = None if _targets.cuda_lowering_forced() else _targets.why_not()
    given = op.named(eqn.invars, absent)
    weights = (getattr(given, name, None) for name in _WEIGHTS)
    stored = [w.aval for w in weights if w is not None and id(w) not in dequantized]
    weight_bytes = sum(w.size * w.dtype.itemsize for w in stored)
    return OpReport(
        *(op.name, where, operands, why, target, reason, fallback, attrs, scratch, runs),
        weight_bytes,
    )


def _scratch(op: _primitive.Op, avals: Any, params: Any) -> list[_primitive.Spec]:
    """Buffers of a call beside what whoever binds it wants."""
    assert op.cuda is not None
    own = op.cuda.scratch(avals, **params)
    return [*op.out(*avals, **params), *own] if op.cuda.result_is_scratch else own


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, Choice):
        return value.name
    return f"{float(value):g}" if isinstance(value, np.floating) else str(value)
