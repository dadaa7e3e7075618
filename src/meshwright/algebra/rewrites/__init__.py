"""Rewrites of derived steps: what a strategy, a pipeline or several stacks ask for beside the plain derivation."""
