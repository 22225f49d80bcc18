"""Runs programs on sharded arrays and counts their collectives, for the tests of sharding."""

import contextlib
import re
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_DOCS = Path(__file__).resolve().parent.parent / "docs" / "sharding.md"
# f32 sums in another order, values of order 1; see test_transforms.py.
_TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def documented(*cells):
    """Whether docs/sharding.md has that row in a table."""
    return f"| {' | '.join(cells)} |" in _DOCS.read_text(encoding="utf-8").splitlines()


def spec_text(spec):
    """How the documentation writes a PartitionSpec."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return f"`P({', '.join('None' if p is None else p for p in parts)})`"


def make_mesh(kind, *names):
    sizes = (4,) if len(names) == 1 else (2, 4)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def entered(mesh):
    explicit = EXPLICIT in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **_TOLERANCE), got, want)


def place(a, mesh, spec):
    """Divides an array on the host: on a device each part is a program to compile."""
    return jax.device_put(np.asarray(a), NamedSharding(mesh, spec))


def compiled(fn, mesh, arrays, specs, *static):
    """Runs `fn` on sharded arrays. Returns its result and the text of the program."""
    with entered(mesh):
        put = {n: place(a, mesh, specs[n]) for n, a in arrays.items()}
        jitted = jax.jit(fn, static_argnums=tuple(range(1, 1 + len(static))))
        program = jitted.lower(put, *static).compile()
        result = program(put)
        check_replicas(result)
        return result, program.as_text()


def check_replicas(result):
    """Checks that devices which hold the same part of an array hold the same bits."""
    for a in jax.tree.leaves(result):
        first = {}
        for shard in a.addressable_shards:
            own = np.asarray(shard.data).tobytes()
            assert first.setdefault(str(shard.index), own) == own, (a.aval, shard.index)


def collectives(text):
    found = {k: len(re.findall(rf" {k}(?:-start)?\(", text)) for k in _COLLECTIVES}
    return ", ".join(f"{n} {k}" for k, n in found.items() if n) or "none"


def check_spec(a, spec):
    assert a.sharding.is_equivalent_to(NamedSharding(a.sharding.mesh, spec), a.ndim), a.sharding
