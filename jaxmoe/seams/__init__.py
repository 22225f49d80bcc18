"""The places where other libraries call grouped products and layers of experts, filled.

Each module is named after the library whose signature it has, and imports nothing of it:

  megablox            `gmm` and `tgmm` of MaxText and of JAX's Pallas operations
  transformer_engine  `moe` of transformer_engine.jax, which MaxText's `te_moe_block` calls
  maxtext             that block of MaxText, as a method of its layer
  levanter            the local expert layer of levanter's grug
  qwix, aqt           quantized arrays of these libraries as `jaxmoe.QuantizedArray`

tokamax and `jax.lax` take `jaxmoe.ragged_dot_general` and `jaxmoe.grouped_gemm` as they are. See
docs/seams.md. Nothing here is imported by `import jaxmoe`.
"""
