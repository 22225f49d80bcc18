"""Weights stored in parts over the devices that share the tokens (FSDP): what the layer gathers."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxmoe._experts_checks import format_of
from jaxmoe._jax import checks as _checks
from jaxmoe._jax.mesh import axes_of
from jaxmoe._jax.sharding import Call
from jaxmoe._mlp.fetch import GatherChoice as GatherChoice
from jaxmoe._mlp.fetch import choose as _choose
from jaxmoe.experts import Experts
from jaxmoe.mlp import operands_of, static_of
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing

_OP = "fsdp.choose_gather"


def choose_gather(x: Any, routing: Any, experts: Any) -> GatherChoice:
    """Returns the mesh axes over which `jaxmoe.moe_mlp` gathers weights if none are named.

    The axes compared are those that split tokens and weights. Without gathering, each device
    receives the tokens of the others and parts of their results, or, where H is split, parts of the
    first product; with it, the parts of the weights, in the format in which they are stored. The
    layer takes what is fewer bytes in the forward pass, and leaves weights where they are if both
    are the same. The backward pass moves about twice as much in both ways.

    Args:
      x: [T, H] as `jaxmoe.moe_mlp` takes it; like all arrays here a `jax.Array` on a mesh, or a
        `jax.ShapeDtypeStruct` with a `jax.sharding.NamedSharding`.
      routing: expert_ids [T, K] and weights [T, K].
      experts: the weights.

    Returns:
      `GatherChoice`: the axes, a reason, and the bytes of every way that was compared.

    Raises:
      TypeError: x is no array of floats, `routing` no `jaxmoe.Routing`, or `experts` no
        `jaxmoe.Experts`.
      ValueError: x has other axes, other rows than `routing`, or another H than `experts`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
      >>> from jaxmoe import fsdp
      >>> mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
      >>> def like(spec, shape, dtype=jnp.bfloat16):
      ...     return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
      >>> experts = jaxmoe.Experts(  # of qwen3-30b-a3b
      ...     gate_up=like(P(None, "data"), (128, 2048, 1536)),
      ...     down=like(P(None, None, "data"), (128, 768, 2048)),
      ... )
      >>> def choice(tokens):
      ...     ids, weights = (like(P("data"), (tokens, 8), d) for d in (jnp.int32, jnp.float32))
      ...     x = like(P("data"), (tokens, 2048))
      ...     return fsdp.choose_gather(x, jaxmoe.Routing(ids, weights), experts)
      >>> choice(65536).axes, choice(8192).axes
      (('data',), ())
    """
    _checks.check_type(_OP, "routing", routing, Routing, "a jaxmoe.Routing")
    _checks.check_type(_OP, "experts", experts, Experts, "a jaxmoe.Experts")
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct | QuantizedArray
    _checks.check_type(_OP, "x", x, kinds, "an array, or what has the shape of one")
    if x.ndim != 2:
        rule = f"x must have 2 axes [T,H], one of tokens, not {x.ndim}"
        raise ValueError(_checks.message(_OP, rule, x=x))
    if not isinstance(x, QuantizedArray) and np.dtype(x.dtype).name not in _checks.FLOATS:
        rule = f"x.dtype={_checks.dtype_name(x.dtype)} must be bf16, f16 or f32"
        raise TypeError(_checks.message(_OP, rule, x=x))
    _checks.check_same_dim(_OP, "x", x, 0, "routing.expert_ids", routing.expert_ids, 0, "T")
    _checks.check_dim(_OP, "x", x, 1, experts.hidden, "experts.hidden")
    local = (experts.num_experts, 0, experts.num_experts)
    format = format_of(experts)
    layer = static_of("moe_mlp", x, experts, format, local, None, True)
    a = operands_of(x, routing.expert_ids, experts, None, layer)._replace(weights=routing.weights)
    shardings: list[Any] = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(a)]
    sizes = next((dict(s.mesh.shape) for s in shardings if isinstance(s, NamedSharding)), {})
    given = type(a)(*(None if leaf is None else _axes(leaf) for leaf in a))
    return _choose(Call(a, given, (), sizes, explicit=False), layer)


def _axes(leaf: Any) -> Any:
    """The mesh axes of each dimension of an array."""
    sharding: Any = getattr(leaf, "sharding", None)
    rank = np.ndim(leaf) if sharding is None else leaf.ndim
    return axes_of(sharding.spec if isinstance(sharding, NamedSharding) else (), rank)
