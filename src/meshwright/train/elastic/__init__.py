"""Training in islands, each a separate JAX runtime, that may leave and return while the rest keeps training."""
