"""Attention on one device or over a ring of devices: fused kernels of each platform, and two portable kernels."""
