"""Turns one op description into a JAX primitive; no other module makes primitives.

An op is a per-device function of arrays with hashable static parameters. `define` gives it

* a shape rule (`out`), aware of `jax.shard_map` types: operands are cast to vary over the union
  of their manual axes before they are bound, so every result varies over that union;
* a lowering: the FFI call described by `cuda` on CUDA, the pure JAX function `xla` elsewhere, and
  `xla` on CUDA too when the extension is not loaded (decided while lowering);
* batching (`batch`), forward mode (`jvp`) and transposition (`transpose`) rules;
* a rule (`rule`, see _jax/sharding.py) by which it is divided over a mesh. On Explicit axes
  that happens when the op is called. On Auto axes XLA asks while it partitions the program; a
  program for one device does not know of it. Inside `jax.shard_map` an op is one device's.

```
double = define(
    "jaxmoe_double",
    out=lambda x: [(x.shape, x.dtype)],                      # avals -> [(shape, dtype), ...]
    xla=lambda x: (x + x,),                                  # arrays -> tuple of arrays
    batch=lambda args, dims: (double(args.x), dims),         # -> (results, their batch dims)
    jvp=lambda primals, tangents: (double(primals.x), double(tangents.x)),
    transpose=lambda cts, args: double(*cts),
    cuda=CudaTarget("jaxmoe_double_v1"),
)
(y,) = double(x)
```

The operands of an op have names: those of a NamedTuple, or of the positional parameters of `xla`.
Rules get them as that tuple. An operand that is not given is None in every rule, and is no operand
of the primitive; the lowering makes of it the array without elements that a CUDA handler expects.

Rules are called as follows; static parameters always come as keywords:

  out(*avals, **params) -> list of (shape, dtype); errors about shapes may be raised here.
  xla(*arrays, **params) -> tuple of arrays, as many as `out` lists.
  batch(args, dims, **params) -> (tuple of results, tuple of their batch dims). A dim is the batched
    dimension of an argument, or None; at least one is not None. `move_batch_to_front` helps.
  jvp(primals, tangents, **params) -> (tuple of results, tuple of tangents). A tangent that is
    symbolically zero is None on the way in and may be None on the way out. Without `jvp`, an op
    whose results are all integers has zero tangents and any other op is not differentiable.
  transpose(cts, args, **params) -> tuple with one entry for each operand: the cotangent of the
    operands for which `is_linear(arg)` (they are placeholders with `.aval`), None for the others.
    `cts[i]` is None for a symbolically zero cotangent; never all of them.

The rules call other defined ops (or jnp) and never bind a primitive themselves.
"""

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from jaxmoe._jax import lowering as _lowering
from jaxmoe._jax import mesh as _mesh
from jaxmoe._jax import sharding as _sharding
from jaxmoe._jax.lowering import CudaTarget as CudaTarget
from jaxmoe._jax.lowering import Spec as Spec
from jaxmoe._jax.lowering import lowers_to_cuda as lowers_to_cuda
from jaxmoe._jax.lowering import scratch_bytes as scratch_bytes


@dataclasses.dataclass(frozen=True)
class Op:
    """A defined op: what `explain` reads and what calling it binds.

    Attributes:
      primitive: what is bound where XLA may partition the program, or there is one device.
      local: the same where each device has its own call; lowering it needs no devices.
      operands: the NamedTuple of its operands.
      xla: the pure JAX function.
      composed: (absent, **params) -> whether that function is made of other ops, which are CUDA's
        too; `absent` names the operands that are None.
      expands: (absent, **params) -> whether those ops are divided over a mesh, and not this one.
      untyped: operands that may vary over more axes than results do.
    """

    name: str
    primitive: Primitive
    local: Primitive
    operands: Callable[..., Any]
    out: Callable[..., list[Spec]]
    xla: Callable[..., tuple[Any, ...]]
    cuda: CudaTarget | None
    rule: _sharding.Rule | None
    composed: Callable[..., bool]
    expands: Callable[..., bool]
    untyped: tuple[str, ...] = ()

    def __call__(self, *arrays: Any, **params: Any) -> tuple[jax.Array, ...]:
        """Binds a primitive to `arrays`, cast to a common set of varying manual axes.

        None stands for an operand that is absent.
        """
        given = self.operands(*arrays)
        typed = [n for n in given._fields if n not in self.untyped]
        cast = match_varying([a for n in typed if (a := getattr(given, n)) is not None])
        rest = iter(cast)
        matched = [
            next(rest) if n in typed else a
            for n, a in zip(given._fields, given, strict=True)
            if a is not None
        ]
        avals = [jax.typeof(a) for a in matched]
        mesh = _mesh.mesh_of(avals)
        absent = tuple(n for n, a in zip(given._fields, given, strict=True) if a is None)
        if self.rule is not None and any(_mesh.explicit_axes(a) for a in avals):
            return _sharding.on_explicit_axes(self.rule, mesh, self.named(matched, absent), params)
        primitive = self.primitive if _mesh.is_auto(mesh) else self.local
        return tuple(primitive.bind(*matched, absent=absent, **params))

    def alone(self, *arrays: Any, **params: Any) -> tuple[jax.Array, ...]:
        """Binds the primitive of one device."""
        given = self.operands(*arrays)
        absent = tuple(n for n, a in zip(given._fields, given, strict=True) if a is None)
        there = [a for a in given if a is not None]
        return tuple(self.local.bind(*there, absent=absent, **params))

    @property
    def public_name(self) -> str:
        """Name of the op in messages: that of the public function, if one binds it."""
        return self.name.removeprefix("jaxmoe_") if self.rule is None else self.rule.names[0]

    def named(self, values: Sequence[Any], absent: tuple[str, ...]) -> Any:
        """The NamedTuple of operands: `values` by name in order, None for those that are absent."""
        rest = iter(values)
        fields = self.operands._fields  # pyright: ignore[reportFunctionMemberAccess]
        return self.operands(*(None if name in absent else next(rest) for name in fields))

    def binds(self, primitive: Any) -> bool:
        """Whether `primitive` is this op's."""
        return primitive is self.primitive or primitive is self.local


OPS: dict[str, Op] = {}


def define(
    name: str,
    *,
    out: Callable[..., list[Spec]],
    xla: Callable[..., tuple[Any, ...]],
    batch: Callable[..., tuple[Sequence[Any], Sequence[int | None]]],
    jvp: Callable[..., tuple[Sequence[Any], Sequence[Any]]] | None = None,
    transpose: Callable[..., Sequence[Any]] | None = None,
    cuda: CudaTarget | None = None,
    rule: _sharding.Rule | None = None,
    composed: bool | Callable[..., bool] = False,
    expands: Callable[..., bool] = lambda **_params: False,
    operands: Callable[..., Any] | None = None,
    untyped: tuple[str, ...] = (),
) -> Op:
    """Makes the primitives `name` and registers them in `OPS`. See the module docstring.

    `composed` says that `xla` calls other ops, which are CUDA's calls too, so `cuda` is not asked;
    it may depend on the static parameters, and so may `expands`. Without `rule` CUDA runs `xla` too
    in a program of several devices that XLA divides. `operands` is the NamedTuple of the operands,
    if they are not the positional parameters of `xla`. What is `untyped` says where a device is:
    results do not vary over an axis because it does.
    """
    named = operands or _operands_of(xla)
    is_composed = composed if callable(composed) else lambda **_params: composed
    primitives = Primitive(name), Primitive(name)
    op = Op(name, *primitives, named, out, xla, cuda, rule, is_composed, expands, untyped)

    def of_named(*there: Any, absent: tuple[str, ...], **params: Any) -> tuple[Any, ...]:
        return xla(*op.named(there, absent), **params)

    xla_rule = functools.partial(_lowering.lower_xla, mlir.lower_fun(of_named))
    cuda_rule = functools.partial(_lowering.lower_cuda, op, xla_rule)
    for primitive in (op.primitive, op.local):
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(apply_primitive, primitive))
        primitive.def_abstract_eval(functools.partial(_abstract_eval, op))
        batching.primitive_batchers[primitive] = functools.partial(_batch, op, batch)
        ad.primitive_jvps[primitive] = functools.partial(_jvp, op, jvp)
        if transpose is not None:
            ad.primitive_transposes[primitive] = functools.partial(_transpose, op, transpose)
    for lower, platform in ((xla_rule, None), (cuda_rule, "cuda")):
        local = functools.partial(_lowering.lower_local, op, lower)
        mlir.register_lowering(op.local, local, platform=platform)
        divided = functools.partial(_lowering.lower_divided, op, xla_rule, lower)
        mlir.register_lowering(op.primitive, divided, platform=platform)
    if rule is not None or composed is not False:
        prim_requires_devices_during_lowering.add(op.primitive)
    OPS[name] = op
    return op


def _operands_of(xla: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the NamedTuple of the positional parameters of a pure JAX function."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(xla).parameters.values()
    names = [p.name.lstrip("_") for p in parameters if p.kind in kinds]
    return named_operands(names)


def named_operands(names: Sequence[str]) -> Any:
    """A NamedTuple of operands."""
    return collections.namedtuple("Operands", names)  # pyright: ignore[reportUntypedNamedTuple]


def is_linear(arg: Any) -> bool:
    """Whether `arg` of a transpose rule is a placeholder whose cotangent is asked for."""
    return ad.is_undefined_primal(arg)


def move_batch_to_front(arg: Any, dim: int | None, size: int | None = None) -> Any:
    """Moves batch dimension `dim` of `arg` to 0; with `size`, an unbatched `arg` is broadcast."""
    if dim is not None:
        return jnp.moveaxis(arg, dim, 0)
    return arg if size is None else jnp.broadcast_to(arg, (size, *arg.shape))


def batch_size(args: Sequence[Any], dims: Sequence[int | None]) -> int:
    """The size of the batched dimension of a batch rule's arguments."""
    return next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)


def as_its_ops(fn: Callable[..., Any], args: Any, dims: Any, **params: Any) -> Any:
    """A batch rule for an op made of other ops: maps `fn`, so theirs apply."""
    outs = jax.vmap(functools.partial(fn, **params), tuple(dims))(*args)
    return outs, (0,) * len(outs)


def one_by_one(op: Op, args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    """A batch rule that calls `op` for one example after the other and copies nothing."""
    batched = [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True) if d is not None]

    def one(example: list[jax.Array]) -> tuple[jax.Array, ...]:
        rest = iter(example)
        return op(
            *(a if d is None else next(rest) for a, d in zip(args, dims, strict=True)), **params
        )

    outs = jax.lax.map(one, batched)
    return outs, (0,) * len(outs)


def _varying(aval: Any) -> frozenset[str]:
    return frozenset(aval.manual_axis_type.varying)


def match_varying(arrays: Sequence[Any]) -> list[Any]:
    """Casts `arrays` to vary over the union of their manual mesh axes (check_vma=True)."""
    arrays = [jnp.asarray(a) for a in arrays]
    per_array = [_varying(jax.typeof(a)) for a in arrays]
    union = frozenset().union(*per_array)
    return [
        a if have == union else jax.lax.pcast(a, tuple(sorted(union - have)), to="varying")
        for a, have in zip(arrays, per_array, strict=True)
    ]


def _check_replicated(name: str, operand: str, aval: Any) -> None:
    """Refuses an argument sharded over Explicit mesh axes: a per-device op would be wrong."""
    if used := _mesh.explicit_axes(aval):
        axes = ", ".join(sorted(used))
        raise NotImplementedError(
            f"{name}: argument {operand} is sharded over the Explicit mesh axes ({axes}). Got "
            f"{aval}. Call it inside jax.shard_map over those axes, or replicate the argument "
            "with jax.sharding.reshard."
        )


def _abstract_eval(
    op: Op, /, *avals: Any, absent: tuple[str, ...], **params: Any
) -> list[ShapedArray]:
    named = op.named(avals, absent)
    for name, aval in zip(named._fields, named, strict=True):
        if aval is not None:
            _check_replicated(op.name, name, aval)
    specs = op.out(*named, **params)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return [ShapedArray(shape, dtype) for shape, dtype in specs]
    typed = (getattr(named, n) for n in named._fields if n not in op.untyped)
    varying = frozenset().union(*(_varying(a) for a in typed if a is not None))
    return [
        ShapedArray(
            shape,
            dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(shape))),
            manual_axis_type=ManualAxisType(varying=varying),
        )
        for shape, dtype in specs
    ]


def _batch(
    op: Op,
    rule: Callable[..., Any],
    args: Any,
    dims: Any,
    /,
    absent: tuple[str, ...],
    **params: Any,
) -> Any:
    def of_named(arrays: Any, dims: Any) -> Any:
        return rule(op.named(arrays, absent), op.named(dims, absent), **params)

    if batch_size(args, dims) == 0:
        return _of_no_examples(op, args, dims, absent, **params)
    axes = _sharding.examples_axes(args, dims)
    if not axes:
        outs, out_dims = of_named(args, dims)
        return list(outs), list(out_dims)

    def of_own(*arrays: jax.Array) -> list[jax.Array]:
        outs, out_dims = of_named(arrays, fronts)
        return [move_batch_to_front(o, d) for o, d in zip(outs, out_dims, strict=True)]

    fronts = tuple(None if d is None else 0 for d in dims)
    arrays = [move_batch_to_front(a, d) for a, d in zip(args, dims, strict=True)]
    outs = _sharding.over_examples(op.public_name, of_own, arrays, fronts, axes)
    return outs, [0] * len(outs)


def _of_no_examples(op: Op, args: Any, dims: Any, absent: tuple[str, ...], **params: Any) -> Any:
    """The results of a batch without examples, whose shapes no rule has to make out of nothing."""
    avals = [
        jax.ShapeDtypeStruct(a.shape if d is None else (*a.shape[:d], *a.shape[d + 1 :]), a.dtype)
        for a, d in zip(args, dims, strict=True)
    ]
    specs = op.out(*op.named(avals, absent), **params)
    size = batch_size(args, dims)
    return [jnp.zeros((size, *shape), dtype) for shape, dtype in specs], [0] * len(specs)


def _jvp(
    op: Op, rule: Any, primals: Any, tangents: Any, /, absent: tuple[str, ...], **params: Any
) -> Any:
    named = op.named(primals, absent)
    if rule is None:
        outs = op(*named, **params)
        if any(jnp.issubdtype(o.dtype, jnp.inexact) for o in outs):
            raise NotImplementedError(f"{op.name}: no differentiation rule.")
        tangents_out = (None,) * len(outs)
    else:
        inputs = [None if isinstance(t, ad.Zero) else t for t in tangents]
        outs, tangents_out = rule(named, op.named(inputs, absent), **params)
    tangents_out = [
        ad.Zero(jax.typeof(o).to_tangent_aval()) if t is None else t
        for o, t in zip(outs, tangents_out, strict=True)
    ]
    return list(outs), tangents_out


def _transpose(
    op: Op,
    rule: Callable[..., Any],
    cts: Any,
    /,
    *args: Any,
    absent: tuple[str, ...],
    **params: Any,
) -> Any:
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [ad.Zero(a.aval) if is_linear(a) else None for a in args]
    cts = tuple(None if isinstance(ct, ad.Zero) else ct for ct in cts)
    named = op.named(args, absent)
    results = rule(cts, named, **params)
    return [
        (ad.Zero(a.aval) if r is None else r) if is_linear(a) else None
        for a, r in zip(named, results, strict=True)
        if a is not None
    ]
