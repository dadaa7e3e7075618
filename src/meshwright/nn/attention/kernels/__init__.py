"""Kernels of attention: in XLA for any platform, fused for TPUs and GPUs, and for caches in pages."""
