"""What every op needs of JAX: primitives, lowering, meshes, checks. Knows no op."""
