"""Two lanes of a device over time: what it computes, and what its links carry meanwhile."""

from typing import Literal

import msgspec

Lane = Literal["compute", "links"]


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A step, or a pass with the steps in it, that takes time on one lane.

    ``what`` is its name, ``kind`` is the class of its work or "", and ``layer`` is the number of its layer.
    """

    lane: Lane
    what: str
    kind: str = ""
    layer: int = 0
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class LaneSlices(msgspec.Struct, frozen=True, kw_only=True):
    """The slices on both lanes; ``name`` is the title of their row in a picture."""

    name: str
    slices: tuple[Slice, ...]

    @property
    def total_s(self) -> float:
        """Seconds from 0 to the end of the last slice."""
        return max(piece.end_s for piece in self.slices)

    @property
    def compute_s(self) -> float:
        """Seconds in which the chip computes."""
        return self._busy_s("compute")

    @property
    def links_s(self) -> float:
        """Seconds in which the links transfer."""
        return self._busy_s("links")

    @property
    def exposed_s(self) -> float:
        """Seconds in which the chip computes nothing, until the last slice ends."""
        return self.total_s - self.compute_s

    def _busy_s(self, lane: Lane) -> float:
        return sum(piece.seconds for piece in self.slices if piece.lane == lane)


class Lanes:
    """Builds both lanes: a new slice starts after the last one on its lane, at ``compute_end_s`` or ``links_end_s``."""

    def __init__(self) -> None:
        self.compute_end_s = self.links_end_s = 0.0
        self.slices: list[Slice] = []

    def compute(self, what: str, seconds: float, *, kind: str = "", layer: int = 0, when: float = 0.0) -> float:
        """Adds a computation that starts when the chip is free, not before ``when``; returns its end."""
        start_s = max(self.compute_end_s, when)
        self.compute_end_s = end_s = start_s + seconds
        self._add(Slice(lane="compute", what=what, kind=kind, layer=layer, start_s=start_s, end_s=end_s))
        return end_s

    def send(self, what: str, seconds: float, *, kind: str = "", layer: int = 0, when: float = 0.0) -> float:
        """Adds a transfer that starts when the links are free, not before ``when``; returns its end."""
        start_s = max(self.links_end_s, when)
        self.links_end_s = end_s = start_s + seconds
        self._add(Slice(lane="links", what=what, kind=kind, layer=layer, start_s=start_s, end_s=end_s))
        return end_s

    def _add(self, piece: Slice) -> None:
        if piece.end_s > piece.start_s:
            self.slices.append(piece)


def joined(slices: list[Slice]) -> tuple[Slice, ...]:
    """Returns the slices; adjacent computations of one name and layer are merged."""
    merged_slices: list[Slice] = []
    compute_index = -1
    for piece in slices:
        last = merged_slices[compute_index] if compute_index >= 0 else None
        if piece.lane == "links":
            merged_slices.append(piece)
        elif last and (last.what, last.layer, last.end_s) == (piece.what, piece.layer, piece.start_s):
            merged_slices[compute_index] = msgspec.structs.replace(last, end_s=piece.end_s)
        else:
            compute_index = len(merged_slices)
            merged_slices.append(piece)
    return tuple(merged_slices)
