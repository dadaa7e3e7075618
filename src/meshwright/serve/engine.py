"""The engine: requests in, tokens out, one packed step after the other.

A step is planned, its arrays are made and it is dispatched, before the tokens of the step before it are read: the
devices have the next step while the host looks at the last one. So a request that ends by a token has one more row in
the step that follows, whose token is dropped. What is planned depends on the requests and the order of calls alone.

Requests with a grammar need the masks of their next tokens: the step is dispatched, then the last one is read, then the
tokens are drawn. An engine that drafts reads a step before it plans the next one.
"""

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from msgspec.structs import replace

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.request import ActiveRequest, GenerationRequest
from meshwright.batching.scheduler import EngineStep
from meshwright.core.errors import CannotRunError, InputError
from meshwright.nn.weights import Params
from meshwright.parallel.generation.host_pages import HostPages
from meshwright.parallel.generation.packed_step import (
    ALIKE_ROWS,
    PackedRows,
    PackedShape,
    PackedStep,
    sizes_up_to,
)
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.serve.drawing.drafts import Drafter, Drafting
from meshwright.serve.drawing.drawer import Drawn, OutputRow, TokenDrawer, adjusts
from meshwright.serve.drawing.grammar import MaskedRow, TokenMasks
from meshwright.serve.request import (
    MOST_LOGPROBS,
    EngineState,
    Finish,
    RequestBounds,
    TokenEngine,
    TokenOutput,
    TokenRequest,
)
from meshwright.serve.sequences.live import Live, SequenceOwner, Tables
from meshwright.serve.sequences.prefix_tree import CacheSnapshot, tree_pages
from meshwright.serve.sequences.step_rows import OutputOf, RowsOf, rows_of
from meshwright.serve.step_sums import HeldStep, StepKey, StepSums, SummedSteps, held_step


def run_requests(engine: TokenEngine, requests: Sequence[TokenRequest]) -> list[list[TokenOutput]]:
    """Runs requests to their ends and returns the outputs of each."""
    found: dict[int, list[TokenOutput]] = {engine.submit(request): [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            found[output.number].append(output)
    return list(found.values())


class _Dispatched(NamedTuple):
    expected: list[OutputOf | None]
    drawn: Drawn
    held: HeldStep


class Engine:
    """Runs requests on a packed step, scheduled within ``limits``, whose slots and pages are those of the step.

    If the step is batch-invariant, every row is a sequence of its own for attention, also those of a prompt. A
    ``drafter`` proposes as many tokens as the limits say. ``adapters`` are the names of those of the step, in their
    order. Pages of prompts that lose their room on the devices go to ``host_cache_bytes`` of the host's memory. Raises
    InputError if the limits are not the step's.
    """

    def __init__(
        self,
        step: PackedStep,
        params: Params,
        limits: SchedulerLimits,
        *,
        drafter: Drafter | None = None,
        adapters: Sequence[str] = (),
        host_cache_bytes: float = 0,
    ) -> None:
        storage = step.storage
        there = step.max_seqs, storage.page_len, step.cache_sizes["Pg"]
        if (limits.max_requests, limits.page_len, limits.num_pages) != there:
            raise InputError(f"the step has {there} slots, positions of a page and pages. Give limits with these.")
        if limits.num_drafts != (drafter.num_drafts if drafter else 0):
            raise InputError(f"the limits have num_drafts={limits.num_drafts}, not the drafter's. Give the same.")
        if len(adapters) != storage.adapters:
            raise InputError(f"the step has {storage.adapters} adapters, and {len(adapters)} names are given.")
        if step.mask_fields and (limits.prefix_cache or limits.policy == "chunked"):
            raise InputError(
                f"attention_mask={step.model.attention_mask!r} lets positions of a prompt see later ones. Give limits "
                "with the policy interleaved, which prefills whole prompts, and no prefix cache."
            )
        if unknown := [name for name in step.mask_fields if name in ("enter", "leave")]:
            raise CannotRunError(
                f"attention_mask={step.model.attention_mask!r} reads {unknown[0]} of each sequence, which no request "
                "has. Use another mask, or give it to PackedStep.step."
            )
        self._adapters = {"": -1} | {name: number for number, name in enumerate(adapters)}
        self.limits, self.max_len, self.vocab_size = limits, step.max_len, step.model.vocab_size
        self.bounds = RequestBounds(self.vocab_size, self.max_len, adapters)
        self._step, self._params, self._cache = step, params, step.init_cache()
        self._host_pages = HostPages(self._cache, step.programs) if host_cache_bytes else None
        num_on_host = int(host_cache_bytes // self._host_pages.page_bytes) if self._host_pages else 0
        if self._host_pages and not (num_on_host and limits.prefix_cache):
            raise InputError(
                f"host_cache_bytes={host_cache_bytes:,.0f} is for pages of shared prompts, "
                f"{self._host_pages.page_bytes:,} bytes each. Give room for one at least, and keep the prefix cache on."
            )
        count = step.num_owners
        windows = step.model.sliding_window or 0, storage.window_pages
        self._owners = [
            SequenceOwner(limits, number, count, num_on_host=num_on_host, windows=windows) for number in range(count)
        ]
        self._drawer = TokenDrawer(step.max_seqs, self.vocab_size, step.logits_sharding, step.programs)
        self._drafter, self._masks = drafter, TokenMasks(self.vocab_size)
        self._live: dict[int, Live] = {}
        empty = np.zeros((step.max_seqs, step.cache_sizes["Bp"]), np.int32)
        self._tables = Tables(empty, empty.copy())
        self._dispatched: _Dispatched | None = None
        self._following: _Dispatched | None = None
        self._outputs: list[TokenOutput] = []
        self._ended: list[Live] = []
        self._clear_counts()
        self._times = SummedSteps()
        most = {
            "chunked": limits.token_budget,
            "interleaved": max(limits.token_budget, count * step.max_len),
            "static": step.max_seqs * step.max_len,
        }[limits.policy]
        batch_invariant = step.batch_invariant
        if batch_invariant and most > ALIKE_ROWS:
            raise InputError(
                f"a batch-invariant engine has steps of at most {ALIKE_ROWS} tokens, and {most:,} are asked for. Give "
                f"a token_budget and max_requests of at most {ALIKE_ROWS}, and the policy chunked."
            )
        self._decode_sizes = [ALIKE_ROWS]  # batch-invariant, until `warm_up` has found more
        if not batch_invariant:
            decoding = step.max_seqs * (1 + limits.num_drafts)
            self._decode_sizes = _whole(sizes_up_to(decoding, halves_from=8), step.row_parts(1))
        self._chunk_sizes = [] if batch_invariant else _whole(sizes_up_to(most, least=16 * count), step.row_parts(2))

    def _clear_counts(self) -> None:
        self._number = self._num_steps = self._num_preempted = self._num_looked = self._num_hit = 0
        self._num_drafted = self._num_accepted = 0

    # -- what a user calls -------------------------------------------------------------------------

    def submit(self, request: TokenRequest) -> int:
        """Queues a request and returns its number. Raises InputError if it could never run."""
        self.check(request)
        number, prompt = self._number, len(request.prompt)
        shares = self.limits.prefix_cache and not request.echo  # echo needs the logits of the whole prompt
        counted = GenerationRequest(
            number=number,
            prompt=prompt,
            output=max(request.max_tokens, 1),
            prefix=number if shares else None,
            prefix_len=prompt if shares else 0,
        )
        adapter = self._adapters[request.adapter]
        owner = (
            min(self._owners, key=lambda one: one.order(request.prompt, adapter))
            if self._owners[1:]
            else self._owners[0]
        )
        live = self._live[number] = Live(number, request, owner, owner.scheduler.submit(counted))
        if shares:
            owner.pages.enter(number, request.prompt, live.pages, adapter, live.window)
        self._number += 1
        return number

    def check(self, request: TokenRequest) -> None:
        """Raises InputError for a request that could never run."""
        self.bounds.check(request)

    def cancel(self, number: int) -> None:
        """Ends a request at once: its slot and pages are free, and no output follows. Does nothing after its end."""
        if number in self._live:
            self._close(self._live[number])

    def step(self) -> list[TokenOutput]:
        """Dispatches a step, if anything is to run, and returns what the step before it made."""
        self.dispatch()
        return self.read()

    def dispatch(self) -> None:
        """Dispatches a step, if anything is to run; `read` follows."""
        if self._drafter:
            self._read()
            self._close_ended()
        planned = [owner.scheduler.plan() for owner in self._owners]
        for active in (active for one in planned for active in one.preempted):
            self._num_preempted += 1
            live = self._live[active.request.number]
            live.vacate()
            if active.request.prefix is not None:  # what it has written so far is known when it comes back
                adapter = self._adapters[live.request.adapter]
                live.owner.pages.enter(live.number, live.tokens, live.pages, adapter, live.window)
                active.request = replace(active.request, prefix_len=len(live.tokens))
        if self._host_pages:
            out, back = zip(*(owner.pages.moves() for owner in self._owners), strict=True)
            self._cache = self._host_pages.move(self._cache, *(dict(ChainMap(*some)) for some in (out, back)))
        self._following = self._dispatch(planned) if any(one.repeats for one in planned) else None

    def read(self) -> list[TokenOutput]:
        """Returns what the step before the dispatched one made."""
        self._read()
        self._dispatched = self._following
        self._close_ended()
        outputs, self._outputs = self._outputs, []
        return outputs

    def num_known(self, request: TokenRequest) -> int:
        """Returns the tokens of a request's prompt that the prefix cache has."""
        adapter = self._adapters.get(request.adapter, -1)
        return max(owner.pages.num_known(request.prompt, adapter) for owner in self._owners) * self.limits.page_len

    @property
    def has_work(self) -> bool:
        """True while requests wait or run, or outputs are to come."""
        return bool(self._live or self._dispatched)

    def state(self) -> EngineState:
        """Returns what runs and waits, and the pages in use."""
        return EngineState(
            running=sum(len(owner.scheduler.running) for owner in self._owners),
            waiting=sum(len(owner.scheduler.waiting) for owner in self._owners),
            pages_used=self.limits.num_pages - sum(owner.pages.room for owner in self._owners),
            num_pages=self.limits.num_pages,
            preemptions=self._num_preempted,
            prefix_queries=self._num_looked,
            prefix_hits=self._num_hit,
            steps=self._num_steps,
            drafted=self._num_drafted,
            accepted=self._num_accepted,
            host_hits=sum(owner.pages.num_came for owner in self._owners) * self.limits.page_len,
            sums=self._times.sums,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device."""
        return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(self._params))

    def snapshot(self) -> CacheSnapshot:
        """Returns whose each page of the cache is, for `report.machine.cache_pages`."""
        running = [live for live in self._live.values() if live.pages]
        return CacheSnapshot(
            num_pages=self.limits.num_pages,
            page_len=self.limits.page_len,
            requests={live.number: tuple(live.pages) for live in running},
            lengths={live.number: live.computed for live in running},
            tree=tree_pages(*(owner.pages for owner in self._owners)),
        )

    def run(self, requests: Sequence[TokenRequest]) -> list[list[TokenOutput]]:
        """Runs requests to their ends and returns the outputs of each."""
        return run_requests(self, requests)

    # -- shapes ------------------------------------------------------------------------------------

    def shapes(self) -> list[PackedShape]:
        """Returns every shape that steps have, the first that a request needs first; the last ones have logits of all
        rows, for log-probabilities of prompts."""
        decode = [PackedShape(size, size, size, 1) for size in self._decode_sizes]
        sequences = (min(self.limits.max_requests, rows) for rows in self._chunk_sizes)
        each, count = zip(self._chunk_sizes, sequences, strict=True), len(self._owners)
        chunks = [PackedShape(rows, most, most, rows // count) for rows, most in each]
        scoring = [shape._replace(outputs=shape.rows) for shape in chunks if shape.outputs < shape.rows]
        return [*chunks[:1], *decode, *chunks[1:], *scoring]

    def warm_up(
        self,
        on_shape: Callable[[int, int], None] = lambda done, all: None,
        requests: Sequence[TokenRequest] = (),
    ) -> None:
        """Compiles every shape, and what draws from it; ``on_shape`` is told how many are done of how many. May run in
        a thread of its own while the engine runs, unless it is batch-invariant.

        Of an engine for some ``requests`` alone only the shapes of their first steps are compiled, which the others
        use too."""
        if self._step.batch_invariant:
            self._decode_sizes = sizes_up_to(ALIKE_ROWS, least=2, halves_from=8)
        shapes = self._first_shapes(requests) if requests and not self._step.batch_invariant else self.shapes()
        for number, shape in enumerate(shapes):
            on_shape(number, len(shapes))
            self._step.compiled(shape)
            for adjusted in (False, True)[shape.outputs > shape.sequences and not self._drafter :]:
                if not requests or adjusted == any(adjusts(one) for one in requests):
                    self._drawer.compiled(shape.outputs, adjusted)
        if self._drafter:
            self._drafter.warm_up(shapes)
        if self._host_pages:
            self._host_pages.warm_up()
        if self._step.batch_invariant:
            self._keep_alike()
        on_shape(len(shapes), len(shapes))

    def _first_shapes(self, requests: Sequence[TokenRequest]) -> list[PackedShape]:
        """Returns the shapes that steps of requests have, as those of fewer rows are left out from now on."""
        count, checked = len(self._owners), 1 + self.limits.num_drafts
        slots = count * min(-(-len(requests) // count), self.limits.max_requests // count)
        rows = slots * max(checked, *(len(one.prompt) for one in requests))
        self._decode_sizes = [size for size in self._decode_sizes if size >= slots * checked]
        self._chunk_sizes = [size for size in self._chunk_sizes if size >= min(rows, self._chunk_sizes[-1])]
        chunk, decode, *_ = self.shapes()
        return [chunk, decode]

    def _keep_alike(self) -> None:
        """Keeps the numbers of rows by which a first request has the bits that it has in a step of `ALIKE_ROWS`."""
        prompt, found = (self.vocab_size - 1, 0)[: self.max_len - 1], dict[int, list[TokenOutput]]()
        request = TokenRequest(prompt=prompt, max_tokens=1, echo=True, logprobs=MOST_LOGPROBS)
        for size in self._decode_sizes:
            self._decode_sizes = [size]
            (outputs,) = self.run([request])
            found[size] = [replace(one, number=0, admitted_s=0) for one in outputs]
        self._decode_sizes = [size for size, outputs in found.items() if outputs == found[ALIKE_ROWS]]
        self._clear_counts()
        self._times.sums.clear()

    def share_sums(self, *others: "Engine") -> dict[StepKey, StepSums]:
        """Has other engines add their steps to the sums of this one, and returns these."""
        for other in others:
            other._times.sums = self._times.sums
        return self._times.sums

    @property
    def engines(self) -> tuple["Engine", ...]:
        """The engine, as those of a group."""
        return (self,)

    @property
    def programs(self) -> ProgramStore:
        """The files of compiled programs."""
        return self._step.programs

    @property
    def packed(self) -> PackedStep:
        """The step that it runs."""
        return self._step

    @property
    def is_compiled(self) -> bool:
        """True if the programs of all shapes are kept in files; not said of an engine that drafts."""
        return self._drafter is None and self.programs.has(map(self._step.program_name, self.shapes()))

    # -- a step ------------------------------------------------------------------------------------

    def _dispatch(self, planned: Sequence[EngineStep]) -> _Dispatched | None:
        start_s, drafted = self._times.now(), self._num_drafted
        for active in (active for one in planned for active in one.admitted):
            self._admit(active, start_s)
        # under "static" requests that have ended keep their slots
        known = [[self._live.get(active.request.number) for active in one.decode] for one in planned]
        decoding = [[live for live in own if live is not None and not live.is_done] for own in known]
        self._draft([live for own in decoding for live in own])
        parts = list[list[RowsOf]]()
        for own, one in zip(decoding, planned, strict=True):
            parts.append([(live, live.computed, live.computed + 1 + len(live.drafts), live.drafts) for live in own])
            for active, count in one.prefill:
                live = self._live[active.request.number]
                parts[-1].append((live, live.computed, live.computed + count, []))
        if not any(parts):
            self._commit(planned)
            return None
        num_decoding = sum(map(len, decoding))
        rows, expected, outputs, longest = self._rows(parts, alone=num_decoding == sum(map(len, parts)))
        decoded, num_outputs = num_decoding + self._num_drafted - drafted, sum(one is not None for one in expected)
        held = held_step(planned, start_s, decoded=decoded, rows=len(rows.tokens), outputs=num_outputs)
        logits, self._cache = self._step.step(self._params, self._cache, self._drawer.latest, rows, longest)
        if self._drafter and any(one.prefill for one in planned):
            self._drafter.follow(rows, longest, {live.slot: end for own in parts for live, _, end, _ in own})
        allowed = self._allowed(expected, len(rows.last))
        adjusted = allowed is not None or any(
            adjusts(one.live.request) or one.live.request.logprobs is not None for one in expected if one
        )
        drawn = self._drawer.draw(logits, outputs, adjusted=adjusted, allowed=allowed)
        self._num_steps += 1
        for active in self._commit(planned):
            if ending := self._live.get(active.request.number):
                ending.is_done = True
                ending.vacate()
        return _Dispatched(expected, drawn, held)

    def _admit(self, active: ActiveRequest, now_s: float) -> None:
        """Gives a request a slot, and the pages that the tree has of its prompt."""
        live = self._live[active.request.number]
        if live.admitted_s and (live.request.echo or live.produced > len(live.output)):
            self._read()  # what was drawn before a preemption is prefilled again
        live.prompt_logprobs = []
        live.slot, live.admitted_s = live.owner.free_slots.pop(), live.admitted_s or now_s
        live.computed = active.cached
        live.begin(self._tables)
        if active.request.prefix is not None and not live.produced:
            live.num_hit = active.cached
            self._num_looked += len(live.request.prompt)
            self._num_hit += active.cached
        self._drawer.enter(live.slot, live.request, live.output)
        if self._drafter and not adjusts(live.request):
            self._drafter.enter(live.slot, live.request, live.output)

    def _commit(self, planned: Sequence[EngineStep]) -> list[ActiveRequest]:
        """Counts a step of each owner, and returns the requests that have all their tokens."""
        ended = list[ActiveRequest]()
        for owner, one in zip(self._owners, planned, strict=True):
            _, own = owner.scheduler.commit(one)
            for active, _ in one.prefill:
                self._live[active.request.number].num_shared = owner.pages.num_shared(active.request.number)
            ended += own
        return ended

    def _draft(self, decoding: Sequence[Live]) -> None:
        """Gives requests that decode the drafts of the next step, with their pages."""
        asked = list[Drafting]()
        for live in decoding:
            live.drafts = []
            most = min(self.limits.num_drafts, live.request.max_tokens - live.produced - 1)
            if self._drafter and most > 0 and not adjusts(live.request):
                live.take_pages(self._tables, live.computed + 1 + most, self.limits.page_len)
                asked.append(Drafting(live.number, live.slot, live.tokens, live.produced, most))
        if self._drafter and asked:
            for one, drafts in zip(asked, self._drafter.propose(asked, self._tables.pages), strict=True):
                self._live[one.number].drafts = drafts
                self._num_drafted += len(drafts)

    def _allowed(self, expected: Sequence[OutputOf | None], size: int) -> np.ndarray | None:
        """Returns the masks of ``size`` rows with logits once the step before is read, None if no row has a grammar."""
        if not any(one and one.live.answer for one in expected):
            return None
        self._read()
        masked, before = list[MaskedRow](), None
        for row, one in enumerate(expected):
            if one and one.live.answer and one.target < 0 and one.live is not before and not one.live.is_closed:
                masked.append(MaskedRow(row, one.live.answer, one.live.drafts))
            before = one and one.live
        return self._masks.of(size, masked)

    def _rows(
        self, parts: Sequence[Sequence[RowsOf]], *, alone: bool
    ) -> tuple[PackedRows, list[OutputOf | None], list[OutputRow], int]:
        """Returns the arrays of a step of each owner's parts, the rows with logits, and the longest part that its shape
        allows; ``alone`` if each row is to be a sequence of its own."""
        every, count = [rows_of(self._step, self._tables, self._adapters, own) for own in parts], len(parts)
        most = max(len(one.whose) for one in every) * count
        if alone or self._step.batch_invariant:
            size = _fitting(self._decode_sizes, most)
            shape = PackedShape(size, size, size, 1)
        else:
            size, most_outputs = _fitting(self._chunk_sizes, most), max(len(one.outputs) for one in every) * count
            most = min(self.limits.max_requests, size)
            shape = PackedShape(size, most, most if most_outputs <= most else size, size // count)
        rows = [one.rows.each_alone(one.whose) if shape.longest == 1 else one.rows for one in every]
        expected, outputs = list[OutputOf | None](), list[OutputRow]()
        for number, one in enumerate(every):
            between = shape.outputs // count * number - len(outputs)  # rows of the owner before that draw nothing
            expected += [*[None] * between, *one.expected]
            outputs += [*[OutputRow(self.limits.max_requests, 0)] * between, *one.outputs]
        return PackedRows.joined(rows, shape), expected, outputs, shape.longest

    def _read(self) -> None:
        """Reads what the last step has drawn, if that has not been done; requests that it ends are closed later."""
        if self._dispatched is None:
            return
        (expected, drawn, held), self._dispatched = self._dispatched, None
        drawn = drawn.on_host()
        self._times.read(held)
        wrong, more = set[int](), dict[int, int]()  # requests with a wrong draft, and tokens of right ones
        for row, one in enumerate(expected):
            if one is None or one.live.is_closed or one.live.number in wrong:
                continue
            live, target, draft = one
            request, token = live.request, int(drawn.token[row])
            if target >= 0:
                live.prompt_logprobs.append(drawn.logprob_of(row, target, request.logprobs or 0))
                continue
            has_one, finish = self._found(live, token)
            if has_one:
                live.tokens.append(token)
            asked = has_one and request.logprobs is not None
            self._outputs.append(
                TokenOutput(
                    number=live.number,
                    token=token if has_one else None,
                    logprob=drawn.logprob_of(row, token, request.logprobs or 0) if asked else None,
                    prompt=tuple(live.prompt_logprobs),
                    finish=finish,
                    cached=live.num_hit,
                    admitted_s=live.admitted_s,
                )
            )
            live.prompt_logprobs, live.num_hit = [], 0
            if finish is not None:
                live.is_closed = True
                self._ended.append(live)
            elif draft is not None and draft == token:
                more[live.number] = more.get(live.number, 0) + 1
            elif draft is not None:
                wrong.add(live.number)
        for number, count in more.items():
            self._num_accepted += count
            live = self._live[number]
            if not live.is_closed:
                live.produced += count
                live.computed += count
                live.owner.scheduler.accept(live.active, count)

    def _found(self, live: Live, token: int) -> tuple[bool, Finish | None]:
        """Returns whether a request's output has a token that was drawn, and whether and why it ends there."""
        request, num_before = live.request, len(live.tokens) - len(live.request.prompt)
        has_one = request.max_tokens > 0
        if live.answer is not None and live.answer.is_error():
            return False, "length"  # the limits of masks are reached: the answer is the beginning of one
        if token in request.stop_tokens and num_before >= request.min_tokens:
            return False, "stop"
        if live.answer is not None and has_one and not live.answer.consume_token(token):
            return False, "length"
        if live.answer is not None and live.answer.is_stopped():
            return has_one, "stop"
        return has_one, "length" if num_before + has_one >= request.max_tokens else None

    def _close_ended(self) -> None:
        for live in self._ended:
            self._close(live)
        self._ended.clear()

    def _close(self, live: Live) -> None:
        """Forgets a request, and takes it from the scheduler if that still has it."""
        live.is_closed = True
        del self._live[live.number]
        if not live.is_done:
            live.owner.scheduler.stop(live.active)
            live.vacate()
        live.owner.pages.leave(live.number)
        if self._drafter:
            self._drafter.leave(live.number)


def _whole(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns sizes that devices can share, each at least one of the given."""
    return sorted({-(-size // parts) * parts for size in sizes})


def _fitting(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
