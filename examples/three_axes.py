"""Three axes at once: replicas, split weights, and split heads, two microbatches a step."""

from beside_one_device import compare

compare(axes={"data": 2, "fsdp": 2, "tensor": 2}, num_microbatches=2)
