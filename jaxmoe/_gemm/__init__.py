"""Grouped products and their weight gradients: ops, XLA versions, sharding rules, tiles."""
