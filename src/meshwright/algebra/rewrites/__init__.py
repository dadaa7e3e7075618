"""Rewrites of derived steps that a strategy, a pipeline or several stacks need besides the plain derivation."""
