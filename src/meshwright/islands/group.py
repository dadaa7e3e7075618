"""The interface of a group of islands that sum arrays; `islands.exchange` implements it over TCP."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshwright.islands.codec import FP32, Codec


class IslandGroup(Protocol):
    """A group with one process of each present island. All members must call `sum` in the same order."""

    @property
    def rank(self) -> int:
        """This member's index, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of members."""
        ...

    def sum(self, arrays: Sequence[np.ndarray], *, codec: Codec = FP32) -> list[np.ndarray]:
        """Returns new float32 arrays: the sums over members, added in order of rank, so bit-equal in all members.

        With a codec, each member encodes part j for member j, which decodes and adds all, and encodes the sum for all.
        Raises an error of the transport if a member is lost; some other members may have their sums then.
        """
        ...
