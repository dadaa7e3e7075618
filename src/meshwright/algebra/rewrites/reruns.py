"""How often layers run forward again where each layer's backward pass starts from the input of its segment."""

import msgspec
import numpy as np

from meshwright.algebra.rewrites.pipeline import stage_layers
from meshwright.algebra.sizes import Number
from meshwright.algebra.transformer import spans


class Rerun(msgspec.Struct, frozen=True):
    """The layers of one block in a stack of ``layers`` (names of blocks) in segments of at most ``segment`` layers.

    The backward pass of layer i of a segment runs layers 0 to i - 1 of it forward again: C (C - 1) / 2 layers in a
    segment of C, n (C - 1) / 2 in n layers, n (n - 1) / 2 in one segment of all. With k = n / C kept inputs that is
    about n^2 / 2k.
    """

    block: str
    layers: tuple[str, ...]
    segment: int

    def times(self, repeat: int, runs: Number = 1) -> Number:
        """Returns how often layers of the block run again in one backward pass, of ``repeat`` such layers in all.
        ``runs`` is the number of pipeline chunks, each with its own segments; it may be an array."""
        distinct_runs, run_indices = np.unique(runs, return_inverse=True)
        mean_reruns = []
        for num_runs in distinct_runs:
            layer_names = stage_layers(self.layers, int(num_runs)).pattern if num_runs > 1 else self.layers
            mean_reruns.append(repeat * self._total(layer_names) / max(layer_names.count(self.block), 1))
        return np.array(mean_reruns)[run_indices].reshape(np.shape(runs)) if np.ndim(runs) else mean_reruns[0]

    def _total(self, layer_names: tuple[str, ...]) -> int:
        num_reruns = 0
        for span in spans(layer_names):
            segment_len = span.iterations(self.segment) * len(span.pattern)
            for i in (i for i in range(span.num_layers) if span.pattern[i % len(span.pattern)] == self.block):
                # the layers after it in its segment
                num_reruns += min(segment_len, span.num_layers - i // segment_len * segment_len) - i % segment_len - 1
        return num_reruns
