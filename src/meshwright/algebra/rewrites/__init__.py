"""Rewrites of derived steps."""
