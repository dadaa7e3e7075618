"""Experts: eight of them, one on each device; tokens go to their two experts and come back."""

from beside_one_device import MIXTURE, compare

compare(model=MIXTURE, axes={"expert": 8})
