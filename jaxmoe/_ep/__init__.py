"""Experts over devices: what `jaxmoe.expert_parallel` is made of."""
