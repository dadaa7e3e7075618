"""Attention on one device or over a ring of devices: fused kernels of platforms, and two of this package."""
