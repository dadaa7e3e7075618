"""ZeRO-3 (FSDP): weights are split too, and gathered layer by layer, the next while one computes."""

from beside_one_device import compare

compare(axes={"fsdp": 8}, prefetch=True)
