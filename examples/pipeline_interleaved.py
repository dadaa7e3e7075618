"""A pipeline whose devices hold two chunks of layers each, for half the bubble (interleaved 1F1B)."""

from beside_one_device import compare

compare(axes={"pipeline": 2, "data": 4}, schedule="interleaved", chunks=2, num_microbatches=4)
