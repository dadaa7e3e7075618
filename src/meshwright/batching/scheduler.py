"""The scheduler, a state machine without a clock, which decides what the next step of an engine runs.

    step = scheduler.plan()                          the engine runs it, up to `step.repeats` times
    prefilled, ended = scheduler.commit(step, n)     after n of them

A simulation commits all repeats in one call, a server one by one. Both end in the same state.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import islice

import msgspec

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.pages import PagePool
from meshwright.batching.request import ActiveRequest, GenerationRequest
from meshwright.core.errors import InputError


class EngineStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The content of a step, and for how many steps it stays the same.

    ``decode``: requests that get a token each; they read ``cached_tokens`` in total from the KV cache, and one more per
    request in each repeat. ``prefill``: (request, its tokens to prefill); ``prefill_past`` is the mean number of
    tokens that precede a prefilled token in its text, in this step or cached: ``prefill_tokens * (prefill_past + 1)``
    counts the pairs of causal attention. ``repeats``: steps from this one on with the same requests and enough pages,
    if no request arrives; 0 if there is nothing to run. ``admitted`` and ``preempted`` are the requests that got or
    lost their pages before the step; ``sources`` are the lengths of the sources to encode for admitted requests.
    """

    decode: tuple[ActiveRequest, ...]
    cached_tokens: int
    prefill: tuple[tuple[ActiveRequest, int], ...]
    prefill_tokens: int
    prefill_past: float
    repeats: int
    admitted: tuple[ActiveRequest, ...]
    preempted: tuple[ActiveRequest, ...]
    sources: tuple[int, ...] = ()


class Scheduler:
    """Schedules requests first come, first served, within the slots, pages and token budget of one replica.

    Admission takes the pages of all tokens to prefill. A decoding request takes a page when its last page is full; if
    none is free, the request admitted last loses all its pages, returns to the head of the queue and is prefilled
    again, with the tokens that it has produced (vLLM's preemption by recomputation).

    `round` counts steps that decoded. Values that grow by one in every round are stored relative to it, so that
    committing n steps costs the same for every n.
    """

    def __init__(self, limits: SchedulerLimits, pages: PagePool | None = None) -> None:
        limits.check()
        self.limits = limits
        self.pages = pages or PagePool(limits.num_pages)
        self.round = 0
        self.waiting: deque[ActiveRequest] = deque()
        self.running: dict[int, ActiveRequest] = {}  # by admission number; the last is the newest
        self.num_live = 0  # decoding requests that still produce; under "static" finished ones keep their slots
        self._decoding: dict[int, ActiveRequest] = {}
        self._prefilling: list[ActiveRequest] = []
        self._cached = 0  # cached tokens of all decoding requests at the present round
        self._ends: list[tuple[int, int]] = []  # heap of (round, admission); entries of requests that left are stale
        # Numbers of decoding requests by the round, modulo page_len, in which they start a page.
        self._crossings = [0] * limits.page_len
        self._owed: dict[int, int] = {}  # admission -> pages of accepted drafts that are still to be taken
        self._num_admitted = 0
        self._looked = 0  # value of `round` after the last step that prefilled

    @property
    def load(self) -> int:
        """Number of requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def submit(self, request: GenerationRequest) -> ActiveRequest:
        """Appends a request to the queue. Raises InputError if it could never run."""
        request.check()
        limits = self.limits
        needed_pages = limits.pages(request.most_cached) + limits.source_pages(request.source_len)
        if needed_pages > limits.num_pages:
            source_text = f", source {request.source_len:,}" * (request.source is not None)
            raise InputError(
                f"request {request.number} (prompt {request.prompt:,}, output {request.output:,}{source_text} tokens)"
                f" needs {needed_pages:,} pages of {limits.page_len} tokens, of {limits.num_pages:,} in all."
                " Give more pages, or shorter requests."
            )
        if request.prefilled and limits.policy == "static":
            raise InputError("a static batch prefills its own prompts. Give a decode pool the policy 'chunked'.")
        active = ActiveRequest(request)
        self.waiting.append(active)
        return active

    def stop(self, active: ActiveRequest) -> None:
        """Ends a request before its last token (text complete, or cancelled); does nothing if it has ended.

        Call it between `commit` and `plan`.
        """
        if active.admission in self.running:
            self._leave(active, ended=active.end_round <= self.round)
            self._end_static_batch()
        elif active in self.waiting:
            self.waiting.remove(active)

    def accept(self, active: ActiveRequest, num_tokens: int) -> None:
        """Adds accepted drafts to a decoding request; they must not end its output.

        Call it between `commit` and `plan`, which takes the pages.
        """
        if not num_tokens or active.admission not in self._decoding:
            return
        num_cached = active.cached + self.round - active.joined
        new_pages = self.limits.pages(num_cached + num_tokens) - self.limits.pages(num_cached)
        self._owed[active.admission] = self._owed.get(active.admission, 0) + new_pages
        self._crossings[self._crossing(active)] -= 1
        active.cached += num_tokens
        active.produced += num_tokens
        self._cached += num_tokens
        self._crossings[self._crossing(active)] += 1
        heappush(self._ends, (active.end_round, active.admission))

    def plan(self) -> EngineStep:
        """Admits and preempts requests, takes the pages of the next step, and returns that step."""
        policy = self.limits.policy
        admitted: list[ActiveRequest] = []
        preempted: list[ActiveRequest] = []
        chunks: list[tuple[ActiveRequest, int]] = []
        rounds_to_look = (self._looked - self.round) % self.limits.look_every if self._decoding else 0
        if policy == "chunked":
            preempted = self._take_decode_pages()
            chunks = self._chunks(admitted, may_admit=not rounds_to_look and (not preempted or not self.running))
        else:
            admit = self._whole_prompts if policy == "interleaved" else self._static_batch
            chunks = [] if rounds_to_look else admit(admitted)
            if not chunks:
                preempted = self._take_decode_pages()
                if preempted and not self.running:
                    chunks = admit(admitted)
        decoding_requests = () if chunks and policy != "chunked" else tuple(self._decoding.values())
        num_prefill_tokens, twice_past_tokens = 0, 0
        for active, num_tokens in chunks:
            num_prefill_tokens += num_tokens
            twice_past_tokens += num_tokens * (2 * active.cached + num_tokens - 1)
        return EngineStep(
            decode=decoding_requests,
            cached_tokens=self._cached if decoding_requests else 0,
            prefill=tuple(chunks),
            prefill_tokens=num_prefill_tokens,
            prefill_past=twice_past_tokens / (2 * num_prefill_tokens) if num_prefill_tokens else 0.0,
            # After a preemption there may be room again for the next request in the queue.
            repeats=1 if chunks or preempted else self._quiet_rounds(rounds_to_look) if decoding_requests else 0,
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            sources=tuple(active.num_read for active in admitted if active.num_read),
        )

    def commit(self, step: EngineStep, num_steps: int = 1) -> tuple[list[ActiveRequest], list[ActiveRequest]]:
        """Commits a step that ran ``num_steps`` times, at most its ``repeats``.

        Returns the requests whose prefill ended, which adds a token to each, and the requests with all their tokens.
        """
        prefilled: list[ActiveRequest] = []
        ended: list[ActiveRequest] = []
        if step.decode:
            if num_steps > 1:
                # pages that rounds after the next one start
                pages_each, rest_rounds = divmod(num_steps - 1, self.limits.page_len)
                rounds = range(self.round + 1, self.round + 1 + rest_rounds)
                num_crossing = sum(self._crossings[round_number % self.limits.page_len] for round_number in rounds)
                self.pages.take(pages_each * len(self._decoding) + num_crossing)
            self.round += num_steps
            self._cached += num_steps * len(step.decode)
        self._looked = self.round if step.prefill else self._looked
        for active, num_tokens in step.prefill:
            active.cached += num_tokens
            self._keep_prefix(active)
            if not active.uncached:
                self._prefilling.remove(active)
                active.produced += 1
                self._join(active)
                prefilled.append(active)
        while self._ends and self._ends[0][0] <= self.round:
            end_round, admission = heappop(self._ends)
            ending_request = self._decoding.get(admission)
            if ending_request and ending_request.end_round == end_round:
                ended.append(ending_request)
                self.num_live -= 1
                if self.limits.policy != "static":
                    self._leave(ending_request, ended=True)
        if ended:
            self._end_static_batch()
        return prefilled, ended

    def _end_static_batch(self) -> None:
        if self.limits.policy == "static" and not self.num_live and not self._prefilling:
            for active in list(self.running.values()):
                self._leave(active, ended=True)

    def _take_decode_pages(self) -> list[ActiveRequest]:
        """Takes the pages that the next round starts; returns the requests that were preempted for them."""
        page_offset = self.round % self.limits.page_len
        needed_pages = self._crossings[page_offset] + sum(self._owed.values())
        preempted = []
        while needed_pages > self.pages.room:
            victim = self.running[next(reversed(self.running))]
            needed_pages -= victim.joined >= 0 and self._crossing(victim) == page_offset
            needed_pages -= self._owed.get(victim.admission, 0)
            preempted.append(victim)
            num_produced = victim.produced + (self.round - victim.joined if victim.joined >= 0 else 0)
            self._leave(victim)
            victim.cached, victim.produced, victim.joined, victim.shared_pages = 0, num_produced, -1, 0
            victim.is_ready = False
            self.waiting.appendleft(victim)
        self.pages.take(needed_pages)
        self._owed.clear()
        return preempted

    def _chunks(self, admitted: list[ActiveRequest], *, may_admit: bool) -> list[tuple[ActiveRequest, int]]:
        """Spends the token budget that decoding leaves on prompts: partly prefilled ones first, then new ones."""
        tokens_left = self.limits.token_budget - len(self._decoding) * (1 + self.limits.num_drafts)
        chunks = []
        for prefilling in self._prefilling:
            num_tokens = min(tokens_left, prefilling.uncached)
            if num_tokens:
                chunks.append((prefilling, num_tokens))
                tokens_left -= num_tokens
        while may_admit and tokens_left > 0 and (active := self._admit_next()):
            admitted.append(active)
            num_tokens = min(tokens_left, active.uncached)
            if num_tokens:
                chunks.append((active, num_tokens))
            elif self._crossing(active) == self.round % self.limits.page_len:
                self.pages.take(1)  # it decodes in this step, whose pages were taken already
            tokens_left -= (num_tokens or 1 + self.limits.num_drafts) + active.num_read
        return chunks

    def _whole_prompts(self, admitted: list[ActiveRequest]) -> list[tuple[ActiveRequest, int]]:
        tokens_left, chunks = self.limits.token_budget, list[tuple[ActiveRequest, int]]()
        while active := self._admit_next(tokens_left if chunks else None):
            admitted.append(active)
            if active.uncached:
                chunks.append((active, active.uncached))
                tokens_left -= active.uncached + active.num_read
        return chunks

    def _static_batch(self, admitted: list[ActiveRequest]) -> list[tuple[ActiveRequest, int]]:
        """Admits the next requests that fit together until the longest of their outputs ends."""
        if self.running:
            return []
        limits, batch_requests = self.limits, list[GenerationRequest]()
        max_output_len = num_pages = 0
        for active in islice(self.waiting, limits.max_requests):
            request = active.request
            if request.output > max_output_len:
                max_output_len = request.output
                num_pages = sum(limits.pages(earlier.prompt + max_output_len - 1) for earlier in batch_requests)
                num_pages += sum(limits.source_pages(earlier.source_len) for earlier in batch_requests)
            num_pages += limits.pages(request.prompt + max_output_len - 1) + limits.source_pages(request.source_len)
            if num_pages > limits.num_pages:
                break
            batch_requests.append(request)
        for _ in batch_requests:
            active = self.waiting.popleft()
            self.pages.take(limits.pages(active.num_known))
            self._enter(active)
            admitted.append(active)
        return [(active, active.uncached) for active in admitted]

    def _hit_pages(self, active: ActiveRequest) -> int:
        """Returns the reusable cached pages of a prompt; leaves at least one token to compute."""
        if not self.limits.prefix_cache or active.is_ready:
            return 0
        max_pages = min(active.request.prefix_len, active.num_known - 1) // self.limits.page_len
        return self.pages.usable(active.request.prefix, max_pages)

    def _admit_next(self, max_tokens: int | None = None) -> ActiveRequest | None:
        """Admits and returns the head of the queue if slot and pages suffice and it prefills at most ``max_tokens``."""
        if not self.waiting or len(self.running) >= self.limits.max_requests:
            return None
        active, page_pool, page_len = self.waiting[0], self.pages, self.limits.page_len
        prefix_key, hit_pages = active.request.prefix, self._hit_pages(active)
        num_unread = 0 if active.request.source in page_pool.sources else active.request.source_len
        if max_tokens is not None and active.uncached - hit_pages * page_len + num_unread > max_tokens:
            return None
        needed_pages = self.limits.pages(active.num_known) + self.limits.source_pages(num_unread)
        spare_pages = int(self.limits.watermark * page_pool.num_pages) if self.running else 0
        if needed_pages - hit_pages + spare_pages > page_pool.room_beside(prefix_key if hit_pages else None):
            if needed_pages + spare_pages > page_pool.room:
                return None
            hit_pages = 0  # fits if the prefix, which is longer than the part that this request shares, is evicted
        if hit_pages and prefix_key is not None:
            page_pool.pin(prefix_key, hit_pages)
            active.cached, active.shared_pages = hit_pages * page_len, hit_pages
        # For a request that decodes at once, `_take_decode_pages` or `_chunks` takes the page of its next token.
        num_tokens = active.cached if active.is_ready else active.num_known
        page_pool.take(self.limits.pages(num_tokens) - hit_pages)
        self.waiting.popleft()
        self._enter(active)
        return active

    def _enter(self, active: ActiveRequest) -> None:
        active.admission = self._num_admitted
        self._num_admitted += 1
        self.running[active.admission] = active
        if (request := active.request).source is not None:
            is_new = self.pages.hold_source(request.source, self.limits.source_pages(request.source_len))
            active.num_read = request.source_len * is_new
        if active.uncached:
            self._prefilling.append(active)
        else:
            self._join(active)

    def _join(self, active: ActiveRequest) -> None:
        """Makes a request decode from the present round on."""
        active.joined = self.round
        self._decoding[active.admission] = active
        self.num_live += 1
        self._cached += active.cached
        self._crossings[self._crossing(active)] += 1
        heappush(self._ends, (active.end_round, active.admission))

    def _crossing(self, active: ActiveRequest) -> int:
        """Returns the round, modulo page_len, in which a decoding request starts a page."""
        return (active.joined - active.cached - self.limits.num_drafts) % self.limits.page_len

    def _leave(self, active: ActiveRequest, *, ended: bool = False) -> None:
        """Removes a request from its slot and frees its pages."""
        limits = self.limits
        del self.running[active.admission]
        if active.joined < 0:
            self._prefilling.remove(active)
            num_tokens = active.num_known
        else:
            del self._decoding[active.admission]
            self.num_live -= not ended
            num_tokens = active.cached + self.round - active.joined
            self._cached -= num_tokens
            self._crossings[self._crossing(active)] -= 1
        self.pages.give(limits.pages(num_tokens) - active.shared_pages - self._owed.pop(active.admission, 0))
        if active.shared_pages and active.request.prefix is not None:
            self.pages.unpin(active.request.prefix)
        if active.request.source is not None:
            self.pages.drop_source(active.request.source)

    def _keep_prefix(self, active: ActiveRequest) -> None:
        """Adds the just computed full pages of a prefix to the prefix cache, unless another request did so first."""
        prefix_key, kept_pages = active.request.prefix, self.pages.kept(active.request.prefix)
        new_pages = min(active.request.prefix_len, active.cached) // self.limits.page_len - kept_pages
        if self.limits.prefix_cache and prefix_key is not None and new_pages > 0 and active.shared_pages == kept_pages:
            self.pages.keep(prefix_key, new_pages)
            active.shared_pages += new_pages

    def _quiet_rounds(self, rest_rounds: int) -> int:
        """Returns for how many rounds no request ends before the last round and the free pages suffice; at most
        ``rest_rounds`` if requests wait."""
        while (active := self._decoding.get(self._ends[0][1])) is None or active.end_round != self._ends[0][0]:
            heappop(self._ends)
        max_rounds, page_len, free_pages = self._ends[0][0] - self.round - 1, self.limits.page_len, self.pages.room
        num_rounds = free_pages // len(self._decoding) * page_len
        free_pages %= len(self._decoding)
        while num_rounds < max_rounds:
            free_pages -= self._crossings[(self.round + 1 + num_rounds) % page_len]
            if free_pages < 0:
                break
            num_rounds += 1
        quiet_rounds = min(num_rounds, max_rounds) + 1
        return min(quiet_rounds, rest_rounds) if rest_rounds and self.waiting else quiet_rounds
