"""Training over several runtimes (islands): membership, and sums of arrays over TCP. Does not import JAX."""
