"""Kernels of attention behind one signature: XLA on any platform, fused ones of TPUs and GPUs."""
