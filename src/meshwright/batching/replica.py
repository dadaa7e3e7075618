"""Simulates one replica: a scheduler whose steps take the seconds of a clock."""

from math import inf, isnan

import numpy as np

from meshwright.batching.clock import Clock
from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.record import Floats, RequestTimes, StepsLog
from meshwright.batching.request import GenerationRequest
from meshwright.batching.scheduler import EngineStep, Scheduler
from meshwright.batching.spans import SlotRecorder
from meshwright.core.errors import InputError


class Replica:
    """Runs a scheduler against a clock.

    Runs up to ``most_jump`` consecutive steps of the same requests at once; a request that arrives meanwhile ends the
    run of steps after the step in which it arrives. One that arrives exactly at a step's end can join the next step.
    """

    def __init__(
        self, limits: SchedulerLimits, clock: Clock, times: RequestTimes, log: StepsLog, most_jump: int
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.end_s = inf  # end of the run of steps in progress; inf without one
        self.recorder: SlotRecorder | None = None
        self._clock = clock
        self._times = times
        self._log = log
        self._most_jump = most_jump
        self._step: EngineStep | None = None
        self._start_s = 0.0
        self._ends_s: Floats = np.empty(0)
        self._decoded_s = 0.0  # end of the last step that decoded
        # Last token times, if not `_decoded_s`: of requests about to decode, and of requests not running.
        self._joined: dict[int, float] = {}
        self._away: dict[int, float] = {}

    def submit(self, request: GenerationRequest, at_s: float) -> None:
        """Queues a request at ``at_s``; shortens the run of steps in progress if the request may be admitted."""
        scheduler = self.scheduler
        was_blocked = bool(scheduler.waiting)  # the head of the queue has no room until a request ends
        scheduler.submit(request)
        if request.prefilled:
            self._away[request.number] = self._times.first_token_s[request.number]
        if len(self._ends_s) > 1 and not was_blocked and len(scheduler.running) < scheduler.limits.max_requests:
            num_steps = int(np.searchsorted(self._ends_s, at_s)) + 1
            self._ends_s = self._ends_s[:num_steps]
            self.end_s = float(self._ends_s[-1])

    def begin(self, now_s: float) -> bool:
        """Starts the next run of steps; False if there is none. Raises InputError if it takes no positive time."""
        step = self.scheduler.plan()
        self._start_s = now_s
        if not step.repeats:
            return False
        for active in step.admitted:
            request_id = active.request.number
            if active.is_ready:
                self._joined[request_id] = self._away.pop(request_id)
            elif isnan(self._times.admitted_s[request_id]):
                self._times.admitted_s[request_id] = now_s
        for active in step.preempted:
            request_id = active.request.number
            self._times.num_preempted[request_id] += 1
            if active.produced and request_id not in self._away:
                self._away[request_id] = self._joined.pop(request_id, self._decoded_s)
        self._step = step
        num_repeats = min(step.repeats, self._most_jump)
        decode_load = len(step.decode), step.cached_tokens
        if num_repeats == 1:
            ends_s = np.array([self._clock.step_s(*decode_load, step.prefill_tokens, step.prefill_past)], float)
        else:
            ends_s = np.array(self._clock.steps_s(num_repeats, *decode_load))
        # Summed in sequence, so that the end of a run is bit-equal to single steps.
        ends_s[0] += now_s
        self._ends_s = np.add.accumulate(ends_s)
        self.end_s = float(self._ends_s[-1])
        if not now_s < self.end_s < inf:
            phrase = f"{len(step.decode):,} requests that decode and {step.prefill_tokens:,} tokens of prefill"
            raise InputError(f"a step with {phrase} lasts {self.end_s - now_s:g} s. Give a clock with positive times.")
        return True

    def end(self) -> list[GenerationRequest]:
        """Ends the run of steps at `end_s`: records its tokens, and returns the requests that finish."""
        step, now_s = self._step, self.end_s
        scheduler, ends_s, log, times = self.scheduler, self._ends_s, self._log, self._times
        assert step
        self._step, self.end_s, self._ends_s = None, inf, np.empty(0)
        num_steps, num_live = len(ends_s), scheduler.num_live
        log.add_run(self._start_s, now_s, len(scheduler.running), num_live if step.decode else 0)
        if step.decode:
            first_end_s = float(ends_s[0])
            if num_live > len(self._joined):
                log.add_gap(first_end_s - self._decoded_s, first_end_s, num_live - len(self._joined))
            for token_s in self._joined.values():
                log.add_gap(first_end_s - token_s, first_end_s, 1)
            self._joined.clear()
            if num_steps > 1:
                log.add_ends(ends_s, num_live)
            self._decoded_s = now_s
        prefilled_requests, ended_requests = scheduler.commit(step, num_steps)
        for active in prefilled_requests:
            request_id = active.request.number
            if request_id in self._away:
                log.add_gap(now_s - self._away.pop(request_id), now_s, 1)
            else:
                times.first_token_s[request_id] = now_s
            if not step.decode and active.produced < active.request.output:
                self._joined[request_id] = now_s
        for active in ended_requests:
            times.ended_s[active.request.number] = now_s
        if self.recorder:
            self.recorder.step(step, self._start_s, now_s)
            self.recorder.leave(ended_requests, scheduler.running.values())
        return [active.request for active in ended_requests]
