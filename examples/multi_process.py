"""One expert layer over several processes: each holds some experts and some tokens.

    python examples/multi_process.py --processes 2 --cpu-devices 2       # both, on this CPU
    python examples/multi_process.py --coordinator HOST:PORT --processes 2 --id 0  # on host 0
    python examples/multi_process.py --coordinator HOST:PORT --processes 2 --id 1  # on host 1
    srun python examples/multi_process.py --auto      # under SLURM or Open MPI, which JAX asks

Every process draws the same arrays, puts its part on its devices, runs the layer and its gradient
in each dispatch mode, and compares its part with what one device makes of everything.
"""

import argparse
import contextlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import expert_parallel

# "all_to_all+direct": between processes, then between the devices of one.
MODES = ("all_gather", "all_to_all", "ragged", "direct", "all_to_all+direct")
AXES = ("process", "expert")
TOKENS, HIDDEN, INTER, TOP_K = 8, 128, 64, 2  # TOKENS of each device


def draw(num_tokens, num_experts, dtype):
    """Random arrays, the same in every process."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    return {
        "x": normal(num_tokens, HIDDEN).astype(dtype),
        "logits": normal(num_tokens, num_experts),
        "gate_up": normal(num_experts, HIDDEN, 2 * INTER).astype(dtype),
        "down": normal(num_experts, INTER, HIDDEN).astype(dtype),
    }


def value_and_gradient(layer, arrays):
    """y and the gradient of its mean square in every array."""

    def loss(arrays):
        routing = jaxmoe.route(arrays["logits"], top_k=TOP_K)
        experts = jaxmoe.Experts(gate_up=arrays["gate_up"], down=arrays["down"])
        y = layer(arrays["x"], routing, experts)
        return jnp.square(y.astype(jnp.float32)).mean() * y.shape[0], y

    gradient, y = jax.grad(loss, has_aux=True)(arrays)
    return {"y": y, **gradient}


def largest_error(got, want):
    """The largest difference in what this process holds, in parts of the largest value."""
    worst = 0.0
    for name, whole in want.items():
        whole = np.asarray(whole, np.float32)
        for shard in got[name].addressable_shards:
            part = np.asarray(shard.data, np.float32)
            worst = max(worst, float(np.abs(part - whole[shard.index]).max() / np.abs(whole).max()))
    return worst


def peer_memory(mesh, mode):
    """What "direct" sends through: along both axes, or between the devices of a process."""
    if "direct" not in mode:
        return contextlib.nullcontext()
    axes = "expert" if "+" in mode else AXES
    # Along one axis a device sends what it has received along the other.
    sizes = TOKENS * mesh.size // mesh.shape["expert"], HIDDEN, TOP_K, mesh.size
    num_bytes = expert_parallel.peer_memory_bytes(*sizes, itemsize=4)
    return expert_parallel.open_peer_memory(mesh, axes, num_bytes=num_bytes)


def run(modes):
    """Runs the modes on all devices of all processes. Returns whether all were right."""
    devices, dtype = jax.devices(), jnp.bfloat16
    if devices[0].platform == "cpu":
        dtype = jnp.float32
    sizes = jax.process_count(), len(devices) // jax.process_count()
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 2)
    arrays = draw(TOKENS * len(devices), 2 * len(devices), dtype)
    want = jax.jit(lambda a: value_and_gradient(jaxmoe.moe_mlp, a))(arrays)  # on one device
    split = NamedSharding(mesh, P(AXES))
    mine = {
        name: jax.make_array_from_callback(a.shape, split, lambda index, a=a: a[index])
        for name, a in arrays.items()
    }
    limit = 1e-4 if dtype == jnp.float32 else 0.05
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of "
        f"{len(devices)} {devices[0].device_kind} devices",
        flush=True,
    )
    right = True
    for mode in modes:
        dispatch = tuple(mode.split("+")) if "+" in mode else mode

        def layer(x, routing, experts, dispatch=dispatch):
            return expert_parallel.sharded_moe_mlp(
                x, routing, experts, mesh=mesh, axis_name=AXES, dispatch=dispatch
            )

        with peer_memory(mesh, mode):
            got = jax.block_until_ready(
                jax.jit(lambda a, layer=layer: value_and_gradient(layer, a))(mine)
            )
        error = largest_error(got, want)
        right &= error <= limit
        print(f"{mode}: largest error {error:.1e} of the largest value", flush=True)
    return right


def start_all(args):
    """Starts every process on this machine, all devices of each on its CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--coordinator", coordinator]
    command += ["--processes", str(args.processes), "--cpu-devices", str(args.cpu_devices)]
    command += ["--modes", *args.modes]
    children = [
        subprocess.Popen([*command, "--id", str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(args.processes)
    ]
    try:
        for child in children:
            print(child.communicate(timeout=args.timeout)[0], end="")
    finally:
        for child in children:
            child.kill()
            child.wait()
    return all(child.returncode == 0 for child in children)


def positive(text):
    """A number of the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--id", type=int, help="of this process; by default all are started here")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument(
        "--cpu-devices", type=positive, default=0, help="run on so many CPU devices"
    )
    parser.add_argument("--auto", action="store_true", help="let JAX find the other processes")
    parser.add_argument("--timeout", type=float, default=300, help="seconds, if all start here")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args(arguments)
    if args.auto:
        jax.distributed.initialize()
        return 0 if run(args.modes) else 1
    if args.id is None:
        if not args.cpu_devices:
            parser.error("give --cpu-devices, or --id and --coordinator, or --auto")
        return 0 if start_all(args) else 1
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    jax.distributed.initialize(args.coordinator, args.processes, args.id)
    return 0 if run(args.modes) else 1


if __name__ == "__main__":
    sys.exit(main())
