"""Budgets and formulas of a whole training run."""
