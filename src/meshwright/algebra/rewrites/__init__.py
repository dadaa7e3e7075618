"""Rewrites of derived steps that a strategy, a pipeline or several stacks need after the plain derivation."""
