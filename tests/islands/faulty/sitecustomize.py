"""On the path of islands that a test starts: SIGUSR1 flips one bit of the state before the island's next step, SIGUSR2
makes NaN of a gradient of that step."""

import os
import signal
import sys
from types import FrameType
from typing import Any


def damage_next(number: int, frame: FrameType | None) -> None:
    """Makes the next step begin with one weight changed, or end with a gradient that is not finite."""
    work = sys.modules["meshwright.train.elastic.work"].GradientWork
    compute = work.compute

    def damaged(self: Any, *arguments: Any) -> Any:
        import jax
        import numpy as np

        work.compute = compute
        if number == signal.SIGUSR2:
            arrays, said = compute(self, *arguments)
            return [np.full_like(arrays[0], np.nan), *arrays[1:]], said
        name = min(self.state.params)
        leaf = self.state.params[name]
        bits = np.array(leaf)
        bits.reshape(-1).view(np.uint32)[7] ^= 1 << 20
        params = {**self.state.params, name: jax.device_put(bits, leaf.sharding)}
        self.state = self.state._replace(params=params)
        return compute(self, *arguments)

    work.compute = damaged


if "MESHWRIGHT_ISLAND" in os.environ:
    signal.signal(signal.SIGUSR1, damage_next)
    signal.signal(signal.SIGUSR2, damage_next)
