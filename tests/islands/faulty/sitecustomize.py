"""On the path of islands that a test starts: SIGUSR1 flips one bit of the state before the island's next step."""

import os
import signal
import sys
from types import FrameType
from typing import Any


def flip_next(number: int, frame: FrameType | None) -> None:
    """Makes the next step begin with one weight changed."""
    work = sys.modules["meshwright.train.elastic.work"].GradientWork
    compute = work.compute

    def flipping(self: Any, *arguments: Any) -> Any:
        work.compute = compute
        name = sorted(self.state.params)[0]
        leaf = self.state.params[name]
        import jax
        import numpy as np

        bits = np.array(leaf).copy()
        bits.reshape(-1).view(np.uint32)[7] ^= 1 << 20
        params = {**self.state.params, name: jax.device_put(bits, leaf.sharding)}
        self.state = self.state._replace(params=params)
        return compute(self, *arguments)

    work.compute = flipping


if "MESHWRIGHT_ISLAND" in os.environ:
    signal.signal(signal.SIGUSR1, flip_next)
