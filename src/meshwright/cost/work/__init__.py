"""FLOPs, bytes and kernels of one derived step."""
