"""Attention on one device or over a ring of devices: fused kernels of each platform, and XLA's for any platform."""
