"""The islands that exchange arrays at a time, as those who need sums see them; `islands.exchange` has them over TCP."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshwright.islands.codec import FP32, Codec


class IslandGroup(Protocol):
    """One process of each island that is there. All members call `sum` in the same order."""

    @property
    def rank(self) -> int:
        """This member, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of members."""
        ...

    def sum(self, arrays: Sequence[np.ndarray], *, codec: Codec = FP32) -> list[np.ndarray]:
        """Returns new float32 arrays, the sums over the members in the order of their ranks: the same bits in each.

        With a codec, each member encodes chunk j for member j, who decodes and adds all, and encodes the sum for all.
        Raises an error of the transport if a member is lost; some of the others may have their sums then.
        """
        ...
