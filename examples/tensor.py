"""Tensor parallel with sequences split between the blocks: heads and widths over eight devices."""

from beside_one_device import compare

compare(axes={"tensor": 8})
