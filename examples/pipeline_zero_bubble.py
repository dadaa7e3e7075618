"""A pipeline that keeps weight gradients for the time in which it would wait (zero bubble, ZB-H1)."""

from beside_one_device import compare

compare(axes={"pipeline": 4, "data": 2}, schedule="zb-h1", num_microbatches=8)
