"""The op kinds as JAX functions."""
