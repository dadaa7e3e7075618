"""Closed formulas: rooflines, limits, budgets."""
