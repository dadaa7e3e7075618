"""Long sequences again: two all-to-alls turn split positions into split heads for attention (Ulysses)."""

from beside_one_device import compare

compare(axes={"context": 8}, context_attention="ulysses")
