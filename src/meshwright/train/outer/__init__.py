"""Outer optimizer of islands that sum weight differences every H steps: DiLoCo, streaming or not, and local SGD."""
