"""Data parallel: every device has all weights and its own sequences; gradients are summed, as DDP does.

The sums that are printed one by one are sent together, in buckets of 100 kB.
"""

from beside_one_device import compare

compare(axes={"data": 8}, zero=0, gradient_sync="bucketed", bucket_bytes=100_000)
