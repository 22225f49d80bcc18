"""Mixture-of-Experts layers inside `jax.jit`, with CUDA kernels for NVIDIA GPUs."""
