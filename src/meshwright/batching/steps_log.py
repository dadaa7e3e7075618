"""What the steps of a pool of replicas were, a few bytes for each: gaps between tokens, and who ran."""

from array import array

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class TokenGaps(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between consecutive tokens of a request, when the later one came, and how many requests had this gap."""

    gap_s: Floats
    end_s: Floats
    num: NDArray[np.int32]


class StepsLog:
    """The steps of all replicas of a pool, a run of equal steps at a time."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._runs = array("d")
        self._ends = array("d")  # ends of all steps of runs that decode
        self._lengths = array("q")  # number of those ends in each run
        self._live = array("i")  # and requests that got a token at each of them
        self._single = array("d")

    def add_run(self, start_s: float, end_s: float, running: int, decoding: int) -> None:
        """Counts a run of steps with ``running`` requests, of which ``decoding`` got a token in each."""
        self._runs.extend((start_s, end_s, running, decoding))

    def add_ends(self, ends_s: Floats, num_live: int) -> None:
        """Adds the gaps between the ends of consecutive steps, in each of which ``num_live`` requests got a token."""
        self._ends.frombytes(ends_s.tobytes())
        self._lengths.append(len(ends_s))
        self._live.append(num_live)

    def add_gap(self, gap_s: float, end_s: float, num: int) -> None:
        """Adds one gap of a number of requests."""
        self._single.extend((gap_s, end_s, num))

    def gaps(self) -> TokenGaps:
        """Returns all gaps, in no order."""
        ends_s, run_lengths = np.array(self._ends), np.array(self._lengths)
        is_in_run = np.ones(len(ends_s), dtype=bool)
        is_in_run[np.cumsum(run_lengths) - run_lengths] = False
        gap_s, end_s, num = np.array(self._single).reshape(-1, 3).T
        return TokenGaps(
            gap_s=np.concatenate([gap_s, np.diff(ends_s, prepend=0.0)[is_in_run]]),
            end_s=np.concatenate([end_s, ends_s[is_in_run]]),
            num=np.concatenate([num.astype(np.int32), np.repeat(np.array(self._live), run_lengths - 1)]),
        )

    def runs(self) -> Floats:
        """Returns a row for each run, see `add_run`."""
        return np.array(self._runs).reshape(-1, 4)
