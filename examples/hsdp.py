"""Hybrid: weights split over four devices that are close, and two such groups that only sum gradients."""

from beside_one_device import compare

compare(axes={"data": 2, "fsdp": 4})
