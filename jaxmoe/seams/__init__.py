"""The places where other libraries call grouped products and layers of experts, filled.

Each module is named after the library whose signature it has, and imports nothing of it:

  megablox            `gmm` and `tgmm` of MaxText and of JAX's Pallas operations
  maxtext             `sparse_matmul` of MaxText's layer of experts
  transformer_engine  `moe` of transformer_engine.jax, which MaxText's `te_moe_block` calls
  levanter            the local expert layer of levanter's grug
  tokamax             an implementation of its ragged dot
  qwix, aqt           quantized arrays of these libraries as `jaxmoe.QuantizedArray`, or decoded

`jaxmoe.grouped_gemm` and `jaxmoe.ragged_dot_general` have the signatures of `jax.lax` as they are.
See docs/seams.md. Nothing here is imported by `import jaxmoe`.
"""
