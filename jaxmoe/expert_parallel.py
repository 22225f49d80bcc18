"""The expert layer with its experts spread over a mesh axis: dispatch, local experts, combine."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmoe._ep import checks as _ep_checks
from jaxmoe._ep import layer as _ep_layer
from jaxmoe._ep import mesh as _ep_mesh
from jaxmoe._ep.cost import DispatchChoice as DispatchChoice
from jaxmoe._ep.cost import Links as Links
from jaxmoe._ep.cost import choose_dispatch as choose_dispatch
from jaxmoe._ep.direct import OP as _OP
from jaxmoe._ep.peers import PeerMemory as PeerMemory
from jaxmoe._ep.peers import open_peer_memory as open_peer_memory
from jaxmoe._ep.peers import peer_memory_bytes as peer_memory_bytes
from jaxmoe._jax import checks as _checks
from jaxmoe._jax import leading as _leading
from jaxmoe._mlp import checks as _mlp_checks
from jaxmoe.experts import Experts
from jaxmoe.mlp import flat_routing as _flat_routing
from jaxmoe.quantize import QuantizedArray
from jaxmoe.routing import Routing


@_checks.array_likes
def moe_mlp(
    x: jax.Array | QuantizedArray,
    routing: Routing,
    experts: Experts,
    *,
    axis_name: str | tuple[str, ...],
    tokens: str = "sharded",
    dispatch: str | tuple[str, ...] = "auto",
    capacity_factor: float | None = None,
    num_chunks: int = 1,
    own_apart: bool = False,
    num_experts: int | None = None,
    expert_map: jax.Array | np.ndarray | None = None,
    dispatch_format: str | None = None,
    sum_dtype: Any = None,
    tensor_axis: str | None = None,
    residual: jax.Array | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Runs `jaxmoe.moe_mlp` with experts spread over a mesh axis; call it inside `jax.shard_map`.

    Each device gives its tokens and its experts and gets the results of its tokens, those of
    `jaxmoe.moe_mlp` of all tokens with all experts. A token is sent to a device at most once,
    however many of its experts are there, and one sum comes back.

      all_gather: every device gets every token and adds up the results of its own experts; a
        psum_scatter adds the parts of the devices.
      all_to_all: each device sends to each other one the tokens that have a choice there, in
        buffers of a static size, and adds up the parts that come back.
      ragged: the same without such buffers, by `jax.lax.ragged_all_to_all` on CUDA; elsewhere,
        where XLA has none, by an all_gather that gives the same result.
      direct: each device pushes its tokens into the memory of the devices that they have a choice
        on, and these the rows of their experts back, or their sums under differentiation: kernels
        over NVLink, in what `open_peer_memory` opened. With many tokens and small I copy engines do
        it, beside the products. Elsewhere than on GPUs XLA's collectives.
      auto: all_gather, all_to_all, or direct where memory is open, whichever `choose_dispatch`
        estimates to be fastest. Along several axes, of which only the last have such memory, in
        turn: along the others, to another host, then along these.

    Args:
      x: [T, H], or [..., H] as all arrays of tokens then, the tokens of this device, bfloat16,
        float16, float32, or quantized [T, H].
      routing: of these tokens, with global expert ids.
      experts: the E_local experts of this device, see `jaxmoe.Experts`.
      axis_name: the mesh axis, or axes, over which experts are spread: n devices.
      tokens: "sharded" if each device along the axis has tokens of its own, "replicated" if all of
        them have the same ones: then nothing is dispatched and a psum adds the parts.
      dispatch: "auto", "all_gather", "all_to_all", "ragged" or "direct"; or a tuple of them, one
        for each axis of `axis_name`: tokens go along the first, then from there along the second,
        and sums come back the other way. A row then crosses to each place of the first axis once:
        ("all_to_all", "direct") between hosts and within one.
      capacity_factor: None for room for every token wherever it goes (dropless). A factor c makes
        room for C = ceil(c * T * (1 - (1 - 1/n)^K)) tokens from each device to each other one (per
        chunk), c times what even routing sends. Then the result is a pair, see below. all_gather
        and direct have room for everything. Of several ways it is the first one's.
      num_chunks: tokens are split in so many parts, so that the collectives of one can run while
        another is computed. Divides T. Experts are read from memory once for each.
      own_apart: run this device's own tokens on its own experts as a separate call. It depends on
        no collective, so XLA can overlap the two. all_gather only; reads the experts once more.
      num_experts: number of global experts E; by default n * E_local, or that of `expert_map`.
        Give a smaller number if the experts do not divide: the last ones are then padding.
      expert_map: [n, E] int32, the same on every device: row d holds the local id of each expert on
        device d, anything outside [0, E_local) for those that are not there. By default device d
        holds the experts from d * E_local on. An expert may be on several devices: a token takes
        the copy on its own device if there is one, else the copies take turns, token by token. One
        on none gets no token: of a NumPy table, known at trace time, that is an error.
      dispatch_format: the format of quantized weights, to send tokens quantized; by default they
        are quantized where they arrive. Gives the same result.
      sum_dtype: float32 to add the parts of the devices in float32, which doubles the bytes of psum
        and psum_scatter; by default they add in the dtype of `x`.
      tensor_axis: another mesh axis, which splits I over m devices. A gate and its up must lie on
        one device: interleaved, or two arrays [E_local, H, I / m]; down is [E_local, I / m, H].
        Tokens are the same along this axis.
      residual: [T, H] added last; also the place for a shared expert: `residual=dense_mlp(x)`
        depends on no collective, so XLA can compute it meanwhile.
      **options: of `jaxmoe.moe_mlp`: apply_weight_on_input, batch_invariant, config, recompute.

    Returns:
      As `x`, in its dtype. With a `capacity_factor` (y, lost): lost is a [] int32, how many
      choices of this device's tokens found no room, or no device with their expert, and are left
      out of y; `jax.lax.psum` it. In all_to_all a device's first C tokens for another one are sent.
      In "ragged" the devices share n * C places, and those of the first devices are filled first.

    Raises:
      TypeError, ValueError: as `jaxmoe.moe_mlp`, an axis that is not there, experts that do not fit
        the axis, a count that does not divide, a capacity factor that is not above 0, an unknown
        name, "direct" without memory, with too little, or with another mesh than it was opened for.
      NotImplementedError: as `jaxmoe.moe_mlp`.

    Numerics: each device adds up its experts' rows of a token in float32 in k order and rounds
      once. all_to_all, ragged and direct add these parts in float32 in their order and round once,
      so they agree to the bit with each other; but where direct leaves rows with the tokens'
      devices, it has the bits of a single device (docs/expert_parallel.md says when). all_gather
      adds in `sum_dtype`, in an order that XLA chooses, and with own_apart the device's own part in
      float32 after that. With K = 1 every way has the bits of a single device. Of several ways each
      rounds what it adds. In fp8_tensor, and with tokens in nvfp4, a dynamic scale of the
      intermediate is made of the rows of one device, with num_chunks and own_apart of one part of
      them; with tensor_axis, as in fp8_channel, of a device's part of I.
    Sharding: call it where `axis_name` and `tensor_axis` are manual axes, and for "direct" all axes
      of the mesh; any other axis may split tokens (data parallelism), each part for itself.
      Differentiable in everything that `jaxmoe.moe_mlp` is, with check_vma on and off.
    Source: GShard, https://arxiv.org/abs/2006.16668; DeepSeek-V3, https://arxiv.org/abs/2412.19437,
      section 3.2 (a token goes to a device once).

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
      >>> def layer(x, ids, weights, experts):
      ...     routing = jaxmoe.Routing(ids, weights)
      ...     return jaxmoe.expert_parallel.moe_mlp(x, routing, experts, axis_name="expert")
      >>> split = jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> ids, weights = jnp.array([[1]], jnp.int32), jnp.array([[0.5]])
      >>> up, down = jnp.ones((2, 2, 3)), jnp.ones((2, 3, 2))
      >>> experts = jaxmoe.Experts(up=up, down=down, activation="relu")
      >>> jax.jit(split)(jnp.ones((1, 2)), ids, weights, experts).tolist()
      [[3.0, 3.0]]
    """
    lead = _leading.of_tokens(_OP, x)
    if lead is not None:
        x, routing = lead.flat("x", x), _flat_routing(lead, routing)
        residual = lead.flat("residual", residual)
    setup = _ep_checks.check_all(
        x,
        routing,
        experts,
        axis_name=axis_name,
        tokens=tokens,
        dispatch=dispatch,
        capacity_factor=capacity_factor,
        num_chunks=num_chunks,
        own_apart=own_apart,
        num_experts=num_experts,
        expert_map=expert_map,
        dispatch_format=dispatch_format,
        sum_dtype=sum_dtype,
        tensor_axis=tensor_axis,
        residual=residual,
        options=options,
    )
    y, lost = _ep_layer.run(
        setup,
        x,
        routing,
        experts,
        expert_map=None if expert_map is None else jnp.asarray(expert_map),
        residual=residual,
        num_chunks=num_chunks,
        options=options,
    )
    y = y if lead is None else lead.unflat(y)
    return y if capacity_factor is None else (y, lost)


@_checks.array_likes
def sharded_moe_mlp(
    x: jax.Array | QuantizedArray,
    routing: Routing,
    experts: Experts,
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    axis_name: str | tuple[str, ...],
    data_axis: str | tuple[str, ...] | None = None,
    tensor_axis: str | None = None,
    tokens: str = "sharded",
    capacity_factor: float | None = None,
    expert_map: jax.Array | np.ndarray | None = None,
    residual: jax.Array | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Runs `moe_mlp` of this module on whole arrays: the same with its `jax.shard_map` around it.

    Args:
      x: [T, H] all tokens, split over `data_axis` and, if tokens="sharded", over `axis_name`; or
        [..., H], as all arrays of tokens then. On Explicit axes the tokens of a device stay there,
        whichever axes of x are split, in the order of the axes named here.
      routing: of all tokens, split in the same way.
      experts: all n * E_local experts in the order of the devices, split over `axis_name`, and I
        over `tensor_axis`.
      mesh: the mesh, of any kind of axes; on Explicit ones arguments are resharded as needed. None
        for the one that `jax.set_mesh` has set.
      axis_name: the axis, or axes, of experts.
      data_axis: further axes that split the tokens; experts are the same along them.
      tensor_axis: a further axis that splits I; if gated it needs order="interleaved", or gate and
        up as two arrays.
      tokens: "sharded" or "replicated" along `axis_name`.
      capacity_factor: as `moe_mlp` takes it.
      expert_map: as `moe_mlp` takes it.
      residual: [T, H], split as `x`.
      **options: of `moe_mlp` of this module and of `jaxmoe.moe_mlp`.

    Returns:
      As `x`, in its dtype and split as it is, on Auto axes along one axis of tokens. With a
      `capacity_factor` (y, lost): lost is a [] int32 for all devices together.

    Raises:
      TypeError, ValueError, NotImplementedError: as `moe_mlp`; an axis that the mesh does not have
        or that is named twice, tokens or experts that do not divide over their devices.

    Numerics: as `moe_mlp`.
    Sharding: as said above. In a jitted function give arguments that lie so already, or XLA moves
      them first.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> mesh = jax.make_mesh((1,), ("expert",))
      >>> routing = jaxmoe.Routing(jnp.array([[1]], jnp.int32), jnp.array([[0.5]]))
      >>> up, down = jnp.ones((2, 2, 3)), jnp.ones((2, 3, 2))
      >>> experts = jaxmoe.Experts(up=up, down=down, activation="relu")
      >>> @jax.jit
      ... def layer(x, routing, experts):
      ...     return jaxmoe.expert_parallel.sharded_moe_mlp(
      ...         x, routing, experts, mesh=mesh, axis_name="expert"
      ...     )
      >>> layer(jnp.ones((1, 2)), routing, experts).tolist()
      [[3.0, 3.0]]
    """
    _checks.check_choice(_ep_mesh.OP, "tokens", tokens, ("sharded", "replicated"))
    lead = _leading.of_tokens(_ep_mesh.OP, x)
    if lead is not None:
        x, routing = lead.flat("x", x), _flat_routing(lead, routing)
        residual = lead.flat("residual", residual)
    expert_axes, data, tensor = map(_ep_mesh.names_of, (axis_name, data_axis, tensor_axis))
    axes = {"axis_name": expert_axes, "data_axis": data, "tensor_axis": tensor}
    mesh = _ep_mesh.check_mesh(mesh, axes)
    on_tokens = data + (expert_axes if tokens == "sharded" else ())
    token_devices, num_devices = (_ep_mesh.size_of(mesh, a) for a in (on_tokens, expert_axes))
    _mlp_checks.check_tokens(_ep_mesh.OP, x, routing, residual)
    _ep_mesh.check_split(x, experts, token_devices, num_devices, repr(axis_name))
    if expert_map is not None:  # inside of the jax.shard_map it is not known any more
        _checks.check_rank(_ep_mesh.OP, "expert_map", expert_map, "n,E")
        _checks.check_dtype(_ep_mesh.OP, "expert_map", expert_map, ("int32",))
        _ep_checks.check_table(_ep_mesh.OP, expert_map, experts.num_experts // num_devices)
    _ep_mesh.check_tensor_axis(mesh, tensor, experts)

    def local(x: Any, routing: Any, experts: Any, residual: Any, table: Any) -> Any:
        with _ep_mesh.of_one_device(max(token_devices, num_devices)):
            out = moe_mlp(
                x,
                routing,
                experts,
                axis_name=axis_name,
                tensor_axis=tensor_axis,
                tokens=tokens,
                capacity_factor=capacity_factor,
                expert_map=table,
                residual=residual,
                **options,
            )
        if capacity_factor is None:
            return out
        y, lost = out
        return y, jax.lax.psum(lost, on_tokens) if on_tokens else lost

    per_token, everywhere = PartitionSpec(on_tokens or None), PartitionSpec()
    specs = (
        _ep_mesh.token_spec(x, on_tokens),
        per_token,
        _ep_mesh.expert_specs(experts, expert_axes, tensor),
        per_token,
        everywhere,
    )
    args = (x, routing, experts, residual, expert_map)
    args = tuple(_ep_mesh.placed(mesh, *pair) for pair in zip(args, specs, strict=True))
    out_specs = per_token if capacity_factor is None else (per_token, everywhere)
    out = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs)(*args)
    if lead is None:
        return out
    return lead.unflat(out) if capacity_factor is None else (lead.unflat(out[0]), out[1])


def expert_placement(
    num_experts: int, num_devices: int, *, copies: Mapping[int, int] | None = None
) -> np.ndarray:
    """Makes an `expert_map`: each expert on one device, or on several if it is much in demand.

    Experts are laid out in order, as evenly as they divide; then each further copy goes to the
    device with the fewest experts that does not have it yet, the first of these.

    Args:
      num_experts: E.
      num_devices: n.
      copies: how many devices hold an expert, in [1, n], for those of which there is more than one.

    Returns:
      [n, E] int32, the local id of each expert on each device, -1 where it is not.

    Raises:
      TypeError, ValueError: a count out of its range, or an expert that does not exist.

    Example:
      >>> from jaxmoe import expert_parallel
      >>> expert_parallel.expert_placement(3, 2, copies={0: 2}).tolist()
      [[0, 1, -1], [1, -1, 0]]
    """
    op = "expert_parallel.expert_placement"
    num_experts = _checks.check_int(op, "num_experts", num_experts, 1)
    num_devices = _checks.check_int(op, "num_devices", num_devices, 1)
    what = "a mapping of experts to how many devices hold them"
    _checks.check_type(op, "copies", copies, Mapping | None, what)
    table = np.full((num_devices, num_experts), -1, np.int32)
    for device, mine in enumerate(np.array_split(np.arange(num_experts), num_devices)):
        table[device, mine] = np.arange(mine.size)
    for expert, count in (copies or {}).items():
        _checks.check_int(op, "copies' expert", expert, 0, num_experts - 1)
        _checks.check_int(op, f"copies[{expert}]", count, 1, num_devices)
        for _ in range(count - 1):
            held = (table >= 0).sum(axis=1)
            device = np.argmin(np.where(table[:, expert] < 0, held, num_experts + 1))
            table[device, expert] = held[device]
    return table


def place_experts(w: Any, expert_map: Any) -> Any:
    """Puts stacked experts in the order of the devices that hold them, as `sharded_moe_mlp` takes.

    Args:
      w: experts in order: a `jaxmoe.Experts`, or [E, ...] arrays and quantized arrays, or a pytree
        of such.
      expert_map: [n, E] int32, known at trace time, as `expert_placement` makes it.

    Returns:
      The same with n * E_local experts, E_local being the most that a device holds: those of the
      first device by their local ids, then those of the next; zeros where a device has fewer.
      Differentiable: the gradient of an expert is the sum over its copies.

    Raises:
      TypeError: `expert_map` is no NumPy array of int32.
      ValueError: a wrong rank, another number of experts, an expert that no device has, or two with
        the same place.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe import expert_parallel
      >>> table = expert_parallel.expert_placement(3, 2, copies={0: 2})
      >>> expert_parallel.place_experts(jnp.array([5.0, 6.0, 7.0]), table).tolist()
      [5.0, 6.0, 7.0, 5.0]
    """
    op = "expert_parallel.place_experts"
    if not isinstance(expert_map, np.ndarray):
        rule = "expert_map must be a NumPy array: the shape of the result depends on it"
        raise TypeError(_checks.message(op, rule, expert_map=expert_map))
    _checks.check_rank(op, "expert_map", expert_map, "n,E")
    _checks.check_dtype(op, "expert_map", expert_map, ("int32",))
    _ep_checks.check_table(op, expert_map, None)
    num_devices, num_experts = expert_map.shape
    num_local = max(int(expert_map.max(initial=-1)) + 1, 1)
    order = np.full((num_devices, num_local), -1, np.int32)
    device, expert = np.nonzero(expert_map >= 0)
    order[device, expert_map[device, expert]] = expert
    order = order.reshape(-1)

    def place(a: jax.Array) -> jax.Array:
        if not getattr(a, "ndim", 0) or a.shape[0] != num_experts:
            rule = f"w must have {num_experts} experts (expert_map.shape[1]) along its first axis"
            raise ValueError(_checks.message(op, rule, w=a, expert_map=expert_map))
        rows = jnp.asarray(a)[np.maximum(order, 0)]
        there = (order >= 0).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(there, rows, jnp.zeros((), rows.dtype))

    if isinstance(w, Experts):  # whose scales may be one for all experts
        return jax.tree.map(lambda a: place(a) if jnp.ndim(a) else a, w)
    return jax.tree.map(place, w)
