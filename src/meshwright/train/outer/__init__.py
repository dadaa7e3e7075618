"""The outer optimizer of islands that train apart: DiLoCo, streaming or whole, and local SGD."""
