"""Records which request had which slot when, for drawing."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Literal

import msgspec

from meshwright.batching.request import ActiveRequest
from meshwright.batching.scheduler import EngineStep

SlotPhase = Literal["prefill", "decode", "ended"]
"""``ended``: a finished request in a slot that a static batch still keeps. Between spans a slot is idle."""


class SlotSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a request in a slot of a replica from ``start_s`` to ``end_s``."""

    replica: int
    slot: int
    request: int
    start_s: float
    end_s: float
    phase: SlotPhase


class SlotRecorder:
    """Assigns every running request the lowest free slot, and merges adjacent spans of the same phase."""

    def __init__(self, replica: int, max_requests: int) -> None:
        self.spans: list[SlotSpan] = []
        self._replica = replica
        self._free = list(range(max_requests))
        heapify(self._free)
        self._slots: dict[int, int] = {}
        self._last: dict[int, int] = {}  # slot -> index of its last span
        self._ended: set[int] = set()

    def step(self, step: EngineStep, start_s: float, end_s: float) -> None:
        """Records a run of equal steps from ``start_s`` to ``end_s``."""
        for active in step.admitted:
            self._slots[active.request.number] = heappop(self._free)
        for active, _ in step.prefill:
            self._add(active.request.number, start_s, end_s, "prefill")
        for active in step.decode:
            request_id = active.request.number
            self._add(request_id, start_s, end_s, "ended" if request_id in self._ended else "decode")

    def leave(self, ended: Iterable[ActiveRequest], running: Iterable[ActiveRequest]) -> None:
        """Frees the slots of all requests that are not in ``running``; ``ended`` are requests with all their tokens."""
        self._ended.update(active.request.number for active in ended)
        for request_id in self._slots.keys() - {active.request.number for active in running}:
            heappush(self._free, self._slots.pop(request_id))

    def _add(self, request_id: int, start_s: float, end_s: float, phase: SlotPhase) -> None:
        slot = self._slots[request_id]
        last_span = self.spans[self._last[slot]] if slot in self._last else None
        if last_span and (last_span.request, last_span.phase, last_span.end_s) == (request_id, phase, start_s):
            self.spans[self._last[slot]] = msgspec.structs.replace(last_span, end_s=end_s)
            return
        self._last[slot] = len(self.spans)
        self.spans.append(
            SlotSpan(replica=self._replica, slot=slot, request=request_id, start_s=start_s, end_s=end_s, phase=phase)
        )
