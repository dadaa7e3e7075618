"""A pipeline of four stages in which every stage runs one forward and one backward pass by turns (1F1B)."""

from beside_one_device import compare

compare(axes={"pipeline": 4, "data": 2}, schedule="1f1b", num_microbatches=8)
