"""ZeRO-1: only the optimizer is split. Each device updates an eighth of the weights and gathers the others."""

from beside_one_device import compare

compare(axes={"fsdp": 8}, zero=1)
