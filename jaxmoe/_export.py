"""Names the custom calls that `jax.export` must be told to let through."""

import jax

from jaxmoe._jax import primitive as _primitive


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the safety checks to disable so that a program with jaxmoe's CUDA calls can be saved.

    JAX refuses to serialize custom calls whose meaning may change between versions. The meaning of
    a jaxmoe target never changes: its name ends in a version and a changed one gets a new name.

    The number of tokens may be symbolic (`jax.export.symbolic_shape`): the program then runs with
    any. Its CUDA products have the tile for many tokens, unless `config` says otherwise.

    Returns:
      One check for each FFI target, for `disabled_checks` of `jax.export.export`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> f = jax.jit(lambda logits: jaxmoe.route(logits, top_k=1).expert_ids)
      >>> shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
      >>> exported = jax.export.export(
      ...     f, platforms=["cpu", "cuda"], disabled_checks=jaxmoe.export_checks()
      ... )(shape)
      >>> exported.call(jnp.eye(2, 4)).tolist()
      [[0], [1]]
    """
    calls = (op.cuda for op in _primitive.OPS.values() if op.cuda is not None)
    targets = sorted({call.target for call in calls} - {""})  # several ops have the same call
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
