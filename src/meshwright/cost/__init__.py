"""Seconds, bytes and FLOPs of derived steps on a cluster. Sizes may be NumPy arrays everywhere."""
