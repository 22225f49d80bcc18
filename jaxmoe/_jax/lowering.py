"""Lowers an op: to the FFI call of its kernel on CUDA, to its pure JAX function elsewhere."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe._jax import mesh as _mesh
from jaxmoe._jax import sharding as _sharding
from jaxmoe._jax import targets as _targets

if TYPE_CHECKING:
    from jaxmoe._jax.primitive import Op

Spec = tuple[tuple[int, ...], Any]


def _no_attrs(_avals: Sequence[Any], **_params: Any) -> dict[str, Any]:
    return {}


def _no_scratch(_avals: Sequence[Any], **_params: Any) -> list[Spec]:
    return []


def _no_aliases(_avals: Any, **_params: Any) -> dict[str, int]:
    return {}


def _not_apart(_avals: Sequence[Any], **_params: Any) -> Callable[..., Any] | None:
    return None


def _no_reason(_avals: Sequence[Any], **_params: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class CudaTarget:
    """The FFI call that computes an op on CUDA.

    Args:
      target: Versioned name of the FFI target, "" when the op has no kernel (then `reason` must
        always give one).
      attrs: (avals, **params) -> attributes; Python ints become i64, np.float32 f32, dicts structs.
      scratch: (avals, **params) -> (shape, dtype) of results appended after the public ones.
      reason: (avals, **params) -> why these arguments cannot run, or None. Raised while lowering
        as NotImplementedError.
      fallback: (avals, **params) -> why CUDA runs the pure JAX function for these arguments, or
        None. For what the kernel does not know and XLA does well enough.
      apart: (avals, **params) -> a function of other ops that CUDA runs in place of a call for
        these arguments, with the operands of the pure JAX one; or None.
      operands: names of the operands that the call takes, in order; None for all. A name that the
        op does not have is an operand that is always absent.
      absent: operand that may be None: rank and dtype of the empty array that stands for it, the
        dtype itself, or the name of the operand that has it or of the parameter that is it
        ("layer.dtype": of an attribute of that parameter).
      public: (**params) -> place of each public result among those of the call, scratch having the
        others in order; None: the public ones come first.
      aliases: (avals, **params) -> name of an operand: the public result that takes its memory. XLA
        copies an operand that is used elsewhere.
      xla_splits: whether CUDA runs the pure JAX function wherever XLA partitions the program over
        some axes of a mesh. XLA would gather the operands of the call, and splits the function as
        its arguments are. Known while lowering only, so not to `explain`.
      result_is_scratch: whether results are scratch to whoever binds the op, as `explain` says.
    """

    target: str
    attrs: Callable[..., dict[str, Any]] = _no_attrs
    scratch: Callable[..., list[Spec]] = _no_scratch
    reason: Callable[..., str | None] = _no_reason
    fallback: Callable[..., str | None] = _no_reason
    apart: Callable[..., Callable[..., Any] | None] = _not_apart
    operands: tuple[str, ...] | None = None
    absent: Mapping[str, tuple[int, Any]] = dataclasses.field(default_factory=dict)
    public: Callable[..., tuple[int, ...]] | None = None
    aliases: Callable[..., dict[str, int]] = _no_aliases
    xla_splits: bool = False
    result_is_scratch: bool = False


def lowers_to_cuda(op: "Op") -> bool:
    """Whether `op` becomes its FFI call on CUDA: the handlers are loaded, or a test says so."""
    usable = _targets.cuda_available() or _targets.cuda_lowering_forced()
    return op.cuda is not None and usable


def scratch_bytes(specs: Sequence[Spec]) -> int:
    """Bytes of the scratch results `specs`."""
    total = 0
    for shape, dtype in specs:
        count = 1
        for size in shape:
            count *= size
        total += count * jnp.dtype(dtype).itemsize
    return total


def lower_xla(rule: Any, ctx: Any, /, *operands: Any, **params: Any) -> Any:
    """Lowers the pure JAX function on plain per-device types: no mesh, nothing varying."""
    plain = ctx.replace(
        avals_in=[ShapedArray(a.shape, a.dtype) for a in ctx.avals_in],
        avals_out=[ShapedArray(a.shape, a.dtype) for a in ctx.avals_out],
    )
    return rule(plain, *operands, **params)


def _partitioned(ctx: Any) -> bool:
    """Whether the program being lowered is for several devices, divided by XLA."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        manual = axes.manual_axes | set(axes.mesh.manual_axes)
        return not manual.issuperset(axes.mesh.axis_names)
    return axes.num_devices != 1


def lower_local(op: "Op", lower: Any, ctx: Any, /, *operands: Any, **params: Any) -> Any:
    """Lowers what each device does for itself, of whole arrays along the axes left to XLA.

    NOTE: XLA would divide the loops of products, which take as many turns as there are rows: on
    CPUs their collectives wait for the devices that are elsewhere along the axes of the
    `jax.shard_map`, and these take other turns.
    """
    if op.rule is None or op.expands(**params) or not _leaves_axes_to_xla(ctx):
        return lower(ctx, *operands, **params)
    outs = lower(ctx, *_whole(ctx, ctx.avals_in, operands), **params)
    return _whole(ctx, ctx.avals_out, outs)


def _leaves_axes_to_xla(ctx: Any) -> bool:
    """Whether an op is inside of a `jax.shard_map` over some of the axes of its mesh."""
    axes = ctx.module_context.axis_context
    return isinstance(axes, mlir.SPMDAxisContext) and bool(axes.manual_axes) and _partitioned(ctx)


def _whole(ctx: Any, avals: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
    """Arrays of which each device has all, along the axes that are left to XLA."""
    place = NamedSharding(ctx.module_context.axis_context.mesh, PartitionSpec())
    plain = [ShapedArray(a.shape, a.dtype) for a in avals]

    def replicated(*arrays: jax.Array) -> list[jax.Array]:
        return [jax.lax.with_sharding_constraint(a, place) for a in arrays]

    rule = mlir.lower_fun(replicated, multiple_results=True)
    return rule(ctx.replace(avals_in=plain, avals_out=plain), *values)


def lower_divided(
    op: "Op", xla_rule: Any, lower: Any, ctx: Any, /, *operands: Any, **params: Any
) -> Any:
    """Leaves an op to XLA's partitioner if the program is divided by it.

    An op without a rule is its pure JAX function there: XLA would gather the operands of a call.
    """
    axes = ctx.module_context.axis_context
    if (op.rule is None or op.expands(**params)) and _partitioned(ctx):
        return xla_rule(ctx, *operands, **params)
    # Without a mesh that all of the program shares, a sharding has no names to be told by.
    mesh = getattr(axes, "abstract_mesh", None)
    if op.rule is None or mesh is None or axes.num_devices == 1 or not _mesh.is_auto(mesh):
        return lower(ctx, *operands, **params)
    if any(a.size == 0 for a in ctx.avals_out):
        return lower(ctx, *operands, **params)
    absent = params.pop("absent")
    avals = op.named([ShapedArray(a.shape, a.dtype) for a in ctx.avals_in], absent)
    call = _sharding.on_auto_axes(op.rule, op.alone, avals, params)
    return lower_xla(mlir.lower_fun(call, multiple_results=True), ctx, *operands)


def lower_cuda(op: "Op", xla_rule: Any, ctx: Any, /, *operands: Any, **params: Any) -> Any:
    """Lowers to the call of the op's kernel if there is one for these operands."""
    own = {name: value for name, value in params.items() if name != "absent"}
    if op.composed(**params) or op.cuda is None or not lowers_to_cuda(op):
        return xla_rule(ctx, *operands, **params)
    if op.cuda.xla_splits and _partitioned(ctx):
        return xla_rule(ctx, *operands, **params)
    absent = params["absent"]
    avals = op.named(ctx.avals_in, absent)
    apart = op.cuda.apart(avals, **own)
    if apart is not None:
        parts = mlir.lower_fun(lambda *there: apart(*op.named(there, absent), **own))
        return lower_xla(parts, ctx, *operands)
    if op.cuda.fallback(avals, **own) is not None:
        return xla_rule(ctx, *operands, **params)
    reason = op.cuda.reason(avals, **own) or _targets.device_reason()
    if reason is not None:
        raise NotImplementedError(reason)
    return _ffi_call(op.cuda, ctx, avals, op.named(operands, absent), own)


def _ffi_call(cuda: CudaTarget, ctx: Any, avals: Any, operands: Any, params: Any) -> list[Any]:
    """Lowers to the call of a handler, whose operands and results have places of their own."""
    names = avals._fields if cuda.operands is None else cuda.operands
    call_avals, call_operands = [], []
    for name in names:
        aval, operand = getattr(avals, name, None), getattr(operands, name, None)
        if aval is None:
            rank, dtype = cuda.absent[name]
            if isinstance(dtype, str):
                first, *rest = dtype.split(".")
                dtype = params[first] if first in params else getattr(avals, first).dtype
                dtype = functools.reduce(getattr, rest, dtype)
            dtype = jnp.dtype(dtype)
            aval = ShapedArray((0,) * rank, dtype)
            operand = mlir.ir_constant(np.zeros(aval.shape, aval.dtype))
        call_avals.append(aval)
        call_operands.append(operand)
    scratch = [ShapedArray(s, d) for s, d in cuda.scratch(avals, **params)]
    total = len(ctx.avals_out) + len(scratch)
    places = tuple(range(total)) if cuda.public is None else cuda.public(**params)
    places = places[: len(ctx.avals_out)]
    rest = iter(scratch)
    results = [ctx.avals_out[places.index(i)] if i in places else next(rest) for i in range(total)]
    aliases = cuda.aliases(avals, **params)
    aliases = {names.index(name): places[result] for name, result in aliases.items()}
    rule = jax.ffi.ffi_lowering(cuda.target, operand_output_aliases=aliases or None)
    call_ctx = ctx.replace(avals_in=call_avals, avals_out=results)
    values = list(rule(call_ctx, *call_operands, **cuda.attrs(avals, **params)))
    return [values[place] for place in places]
