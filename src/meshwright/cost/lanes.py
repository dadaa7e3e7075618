"""Two lanes of a device over time: what it computes, and what its links carry meanwhile."""

from typing import Literal

import msgspec

Lane = Literal["compute", "links"]


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Something that takes time on one lane: a step, or a pass with the steps in it.

    ``what`` is its name, ``kind`` the class of its work where one is needed, ``layer`` the layer that it belongs to.
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


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Both lanes with everything on them: ``compute_s`` and ``links_s`` are the seconds that each works."""

    name: str
    boxes: tuple[Slice, ...]

    @property
    def total_s(self) -> float:
        """From the start to the end of the last slice."""
        return max(box.end_s for box in self.boxes)

    @property
    def compute_s(self) -> float:
        return self._work_s("compute")

    @property
    def links_s(self) -> float:
        return self._work_s("links")

    @property
    def exposed_s(self) -> float:
        """Seconds in which the chip waits for the links."""
        return self.total_s - self.compute_s

    def _work_s(self, lane: Lane) -> float:
        return sum(box.seconds for box in self.boxes if box.lane == lane)


class Lanes:
    """Both lanes while slices are laid down, one after the other on each."""

    def __init__(self) -> None:
        self.chip_s = self.links_s = 0.0
        self.slices: list[Slice] = []

    def compute(self, what: str, seconds: float, *, kind: str = "", layer: int = 0, when: float = 0.0) -> float:
        """Computes for so long as soon as the chip is free, not before ``when``; returns the end."""
        start = max(self.chip_s, when)
        self.chip_s = start + seconds
        self._add(Slice(lane="compute", what=what, kind=kind, layer=layer, start_s=start, end_s=self.chip_s))
        return self.chip_s

    def send(self, what: str, seconds: float, *, kind: str = "", layer: int = 0, when: float = 0.0) -> float:
        """Sends for so long as soon as the links are free, not before ``when``; returns the end."""
        start = max(self.links_s, when)
        self.links_s = start + seconds
        self._add(Slice(lane="links", what=what, kind=kind, layer=layer, start_s=start, end_s=self.links_s))
        return self.links_s

    def _add(self, one: Slice) -> None:
        if one.end_s > one.start_s:
            self.slices.append(one)


def joined(slices: list[Slice]) -> tuple[Slice, ...]:
    """The slices, with computations of one name and layer that follow each other at once as one."""
    found: list[Slice] = []
    at = -1
    for one in slices:
        last = found[at] if at >= 0 else None
        if one.lane == "links":
            found.append(one)
        elif last and (last.what, last.layer, last.end_s) == (one.what, one.layer, one.start_s):
            found[at] = msgspec.structs.replace(last, end_s=one.end_s)
        else:
            at = len(found)
            found.append(one)
    return tuple(found)
