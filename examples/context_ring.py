"""Long sequences, split over eight devices: keys and values go round a ring."""

from beside_one_device import compare

compare(axes={"context": 8}, context_attention="ring")
