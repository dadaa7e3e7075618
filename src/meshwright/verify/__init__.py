"""Compiles a step for its target, and compares its HLO with the derived steps."""
