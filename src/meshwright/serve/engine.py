"""The engine: requests in, tokens out, one packed step after the other.

A step is planned, its arrays are made and it is dispatched, before the tokens of the step before it are read: the
devices have the next step while the host looks at the last one. So a request that ends by a token has one more row in
the step that follows, whose token is dropped. What is planned depends on the requests and the order of calls alone; the
shape that a step has also on which are compiled, see `StepShapes`.

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
from meshwright.core.errors import InputError
from meshwright.nn.weights import Params
from meshwright.parallel.generation.host_pages import HostPages
from meshwright.parallel.generation.packed_step import ALIKE_ROWS, PackedShape, PackedStep, sizes_up_to
from meshwright.serve.drawing.drafts import Drafter, Drafting
from meshwright.serve.drawing.drawer import Drawn, OutputRow, TokenDrawer, adjusts
from meshwright.serve.drawing.grammar import TokenMasks
from meshwright.serve.request import (
    MOST_LOGPROBS,
    EngineState,
    RequestBounds,
    TokenEngine,
    TokenOutput,
    TokenRequest,
)
from meshwright.serve.sequences.live import Live, SequenceOwner, Tables
from meshwright.serve.sequences.prefix_tree import CacheSnapshot, tree_pages
from meshwright.serve.sequences.step_outputs import masked_rows, read_outputs
from meshwright.serve.sequences.step_rows import OutputOf, RowsOf, joined_rows, rows_of
from meshwright.serve.sequences.step_shapes import StepShapes
from meshwright.serve.step_sums import HeldStep, SummedSteps, held_step


class _Dispatched(NamedTuple):
    expected: list[OutputOf | None]
    drawn: Drawn
    held: HeldStep


class Engine(TokenEngine):
    """Runs requests on a packed step, scheduled within ``limits``, whose slots and pages are those of the step.

    If the step is batch-invariant, every row is a sequence of its own for attention, also those of a prompt. A
    ``drafter`` proposes as many tokens as the limits say. ``adapters`` are the names of those of the step, in their
    order. Pages of prompts that lose their room on the devices go to ``host_cache_bytes`` of the host's memory. Raises
    InputError if the limits are not the step's. ``packed`` is the step, ``check`` refuses what could never run, and
    ``times`` adds up the steps that are read.
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
        storage, self._drafter = step.storage, drafter or Drafter()
        if limits.num_drafts != self._drafter.num_drafts:
            raise InputError(f"the limits have num_drafts={limits.num_drafts}, not the drafter's. Give the same.")
        if len(adapters) != storage.adapters:
            raise InputError(f"the step has {storage.adapters} adapters, and {len(adapters)} names are given.")
        self._shapes = StepShapes(step, limits)
        self._adapters = {"": -1} | {name: number for number, name in enumerate(adapters)}
        self.limits, self.max_len, self.vocab_size = limits, step.max_len, step.model.vocab_size
        self.check = RequestBounds(self.vocab_size, self.max_len, adapters).check
        self.packed, self._params, self._cache = step, params, step.init_cache()
        self._host_pages = HostPages(self._cache, step.programs) if host_cache_bytes else None
        num_on_host = int(host_cache_bytes // self._host_pages.page_bytes) if self._host_pages else 0
        if self._host_pages and not (num_on_host and limits.prefix_cache):
            raise InputError(
                f"host_cache_bytes={host_cache_bytes:,.0f} is for pages of shared prompts, "
                f"{self._host_pages.page_bytes:,} bytes each. Give room for one at least, and keep the prefix cache on."
            )
        num_owners = step.num_owners
        windows = step.model.sliding_window or 0, storage.window_pages
        self._owners = [
            SequenceOwner(limits, i, num_owners, num_on_host=num_on_host, windows=windows) for i in range(num_owners)
        ]
        self._drawer = TokenDrawer(step.max_seqs, self.vocab_size, step.logits_sharding, step.programs)
        self._masks, self._live = TokenMasks(self.vocab_size), dict[int, Live]()
        empty_table = np.zeros((step.max_seqs, step.cache_sizes["Bp"]), np.int32)
        self._tables, self._idle_row = Tables(empty_table, empty_table.copy()), OutputRow(step.max_seqs, 0)
        self._dispatched: _Dispatched | None = None
        self._following: _Dispatched | None = None
        self._outputs: list[TokenOutput] = []
        self._ended: list[Live] = []
        self._number, self._counts, self.times = 0, EngineState(), SummedSteps()

    # -- what a user calls -------------------------------------------------------------------------

    def submit(self, request: TokenRequest) -> int:
        """Queues a request and returns its number. Raises InputError if it could never run."""
        self.check(request)
        number, prompt_len = self._number, len(request.prompt)
        shares_pages = self.limits.prefix_cache and not request.echo  # echo needs the logits of the whole prompt
        scheduled_request = GenerationRequest(
            number=number,
            prompt=prompt_len,
            output=max(request.max_tokens, 1),  # with echo it may be 0; the token that is drawn is dropped
            prefix=number if shares_pages else None,
            prefix_len=prompt_len if shares_pages else 0,
        )
        adapter_number = self._adapters[request.adapter]
        owner = (
            min(self._owners, key=lambda owner: owner.order(request.prompt, adapter_number))
            if self._owners[1:]
            else self._owners[0]
        )
        active = owner.scheduler.submit(scheduled_request)
        live = self._live[number] = Live(number, request, owner, active, adapter_number)
        if shares_pages:
            live.share_pages()
        self._number += 1
        return number

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
        if self.limits.num_drafts:
            self._read()  # where the rows of a step begin depends on which drafts were right
            self._close_ended()
        planned = [owner.scheduler.plan() for owner in self._owners]
        for active in (active for step in planned for active in step.preempted):
            self._counts.preemptions += 1
            live = self._live[active.request.number]
            live.vacate()
            if active.request.prefix is not None:  # what it has written so far is known when it comes back
                live.share_pages()
                active.request = replace(active.request, prefix_len=len(live.tokens))
        if self._host_pages:  # before the step that writes over the pages that go
            leaving, coming = zip(*(owner.pages.moves() for owner in self._owners), strict=True)
            self._cache = self._host_pages.move(self._cache, *(dict(ChainMap(*moves)) for moves in (leaving, coming)))
        # not `_dispatched` yet: grammars, and requests that come back, read that one in `_dispatch`
        self._following = self._dispatch(planned) if any(step.repeats for step in planned) else None

    def read(self) -> list[TokenOutput]:
        """Returns what the step before the dispatched one made."""
        self._read()  # the devices compute the step that follows meanwhile
        self._dispatched = self._following
        self._close_ended()
        outputs, self._outputs = self._outputs, []
        return outputs

    def order(self, request: TokenRequest) -> tuple[bool, int, int]:
        """Returns what is least of the engine that a request should have, see `SequenceOwner.order`."""
        adapter = self._adapters.get(request.adapter, -1)  # a group asks this before `submit` refuses an unknown one
        return min(owner.order(request.prompt, adapter) for owner in self._owners)

    @property
    def has_work(self) -> bool:
        """True while requests wait or run, or outputs are to come."""
        return bool(self._live or self._dispatched)

    def state(self) -> EngineState:
        """Returns what runs and waits, and the pages in use."""
        return replace(
            self._counts,
            running=sum(len(owner.scheduler.running) for owner in self._owners),
            waiting=sum(len(owner.scheduler.waiting) for owner in self._owners),
            pages_used=self.limits.num_pages - sum(owner.pages.room for owner in self._owners),
            num_pages=self.limits.num_pages,
            host_hits=sum(owner.pages.num_came for owner in self._owners) * self.limits.page_len,
            sums=self.times.sums,
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

    # -- shapes ------------------------------------------------------------------------------------

    def shapes(self) -> list[PackedShape]:
        """Returns every shape that steps have."""
        return self._shapes.every

    def warm_up(
        self,
        on_shape: Callable[[int, int], None] = lambda num_done, num_shapes: None,
        requests: Sequence[TokenRequest] = (),
        *,
        first_only: bool = False,
    ) -> None:
        """Compiles every shape, and what draws from it; ``on_shape`` is told how many are done of how many. May run in
        a thread of its own while the engine runs, unless it is batch-invariant.

        With ``first_only`` those are compiled that are in no file and that an engine cannot do without; of an engine
        for some ``requests`` alone the two that all its steps use."""
        if self.packed.batch_invariant:
            self._shapes.set_decode_sizes(sizes_up_to(ALIKE_ROWS, least=2, halves_from=8))
        if first_only:  # what is in files is read when a step needs it, or later
            program_names = {shape: self.packed.program_name(shape) for shape in self.shapes()}
            self._shapes.ready |= {shape for shape, name in program_names.items() if self.packed.programs.has([name])}
        # for some requests alone idle rows cost less than compiling more shapes
        shapes = self._shapes.first(requests) if first_only or requests else self.shapes()
        shapes = [shape for shape in shapes if not first_only or shape not in self._shapes.ready]
        for num_done, shape in enumerate(shapes):
            on_shape(num_done, len(shapes))
            self.packed.compiled(shape)
            # without drafts, logits of all rows are for log-probabilities, which the adjusted program has
            for is_adjusted in (False, True)[shape.outputs > shape.sequences and not self.limits.num_drafts :]:
                if not requests or is_adjusted == any(adjusts(request) for request in requests):
                    self._drawer.compiled(shape.outputs, is_adjusted)
            self._drafter.warm_up(shape)
            self._shapes.ready.add(shape)  # last: the engine may take it from now on
        if self._host_pages:
            self._host_pages.warm_up()
        if self.packed.batch_invariant:
            self._keep_alike()
        if shapes:
            on_shape(len(shapes), len(shapes))

    def _keep_alike(self) -> None:
        """Keeps the numbers of rows by which a first request has the bits that it has in a step of `ALIKE_ROWS`."""
        prompt, by_size = (self.vocab_size - 1, 0)[: self.max_len - 1], dict[int, list[TokenOutput]]()
        request = TokenRequest(prompt=prompt, max_tokens=1, echo=True, logprobs=MOST_LOGPROBS)
        for size in [shape.rows for shape in self._shapes.decode]:
            self._shapes.set_decode_sizes([size])
            (outputs,) = self.run([request])
            by_size[size] = [replace(output, number=0, admitted_s=0) for output in outputs]
        self._shapes.set_decode_sizes([size for size, outputs in by_size.items() if outputs == by_size[ALIKE_ROWS]])
        self._number, self._counts = 0, EngineState()
        self.times.sums.clear()

    @property
    def engines(self) -> tuple["Engine", ...]:
        """The engine, as those of a group."""
        return (self,)

    # -- a step ------------------------------------------------------------------------------------

    def _dispatch(self, planned: Sequence[EngineStep]) -> _Dispatched | None:
        start_s, drafted = self.times.now(), self._counts.drafted
        for active in (active for step in planned for active in step.admitted):
            self._admit(active, start_s)
        # under "static" requests that have ended keep their slots
        planned_lives = [[self._live.get(active.request.number) for active in step.decode] for step in planned]
        decoding_lives = [[live for live in lives if live is not None and not live.is_done] for lives in planned_lives]
        self._draft([live for lives in decoding_lives for live in lives])
        parts = list[list[RowsOf]]()
        for lives, step in zip(decoding_lives, planned, strict=True):
            parts.append([(live, live.computed, live.computed + 1 + len(live.drafts), live.drafts) for live in lives])
            for active, num_tokens in step.prefill:
                live = self._live[active.request.number]
                parts[-1].append((live, live.computed, live.computed + num_tokens, []))
        if not any(parts):
            self._commit(planned)
            return None
        num_decoding = sum(map(len, decoding_lives))
        own_rows = [rows_of(self.packed, self._tables, owned) for owned in parts]
        max_rows, max_outputs = max(len(rows.whose) for rows in own_rows), max(len(rows.outputs) for rows in own_rows)
        num_owners, is_decode_only = len(own_rows), num_decoding == sum(map(len, parts))
        # owners have equal shares of the rows of a shape
        shape = self._shapes.fitting(num_owners * max_rows, num_owners * max_outputs, alone=is_decode_only)
        rows, expected = joined_rows(own_rows, shape)
        decoded, num_outputs = num_decoding + self._counts.drafted - drafted, sum(row is not None for row in expected)
        held = held_step(planned, start_s, decoded=decoded, rows=len(rows.tokens), outputs=num_outputs)
        # `latest` has the tokens of the step before, which the host has not seen yet
        logits, self._cache = self.packed.step(self._params, self._cache, self._drawer.latest, rows, shape.longest)
        if any(step.prefill for step in planned):
            # steps that only decode are caught up in `propose`
            self._drafter.follow(rows, shape.longest, {live.slot: end for owned in parts for live, _, end, _ in owned})
        masks = None
        if any(row and row.live.answer for row in expected):
            self._read()  # after the step is dispatched: masks are made while it runs
            masks = self._masks.of(len(rows.last), masked_rows(expected))
        is_adjusted = masks is not None or any(
            adjusts(row.live.request) or row.live.request.logprobs is not None for row in expected if row
        )
        output_rows = [output.row if output else self._idle_row for output in expected]
        drawn_rows = self._drawer.draw(logits, output_rows, adjusted=is_adjusted, allowed=masks)
        self._counts.steps += 1
        for active in self._commit(planned):
            if ending := self._live.get(active.request.number):
                ending.is_done = True  # its tokens are counted already, though not read
                ending.vacate()
        return _Dispatched(expected, drawn_rows, held)

    def _admit(self, active: ActiveRequest, now_s: float) -> None:
        """Gives a request a slot, and the pages that the tree has of its prompt."""
        live = self._live[active.request.number]
        if live.admitted_s and (live.request.echo or live.produced > len(live.output)):
            self._read()  # what was drawn before a preemption is prefilled again
        live.prompt_logprobs = []
        # the time of the first admission counts, not that after a preemption
        live.slot, live.admitted_s = live.owner.free_slots.pop(), live.admitted_s or now_s
        live.computed = active.cached
        live.begin(self._tables)
        if active.request.prefix is not None and not live.produced:  # who comes back would find its own pages
            live.num_hit = active.cached
            self._counts.prefix_queries += len(live.request.prompt)
            self._counts.prefix_hits += active.cached
        self._drawer.enter(live.slot, live.request, live.output)
        if not adjusts(live.request):
            self._drafter.enter(live.slot, live.request, live.output)

    def _commit(self, planned: Sequence[EngineStep]) -> list[ActiveRequest]:
        """Counts a step of each owner, and returns the requests that have all their tokens."""
        commits = [owner.scheduler.commit(step) for owner, step in zip(self._owners, planned, strict=True)]
        return [active for _, ended in commits for active in ended]

    def _draft(self, decoding: Sequence[Live]) -> None:
        """Gives requests that decode the drafts of the next step, with their pages."""
        draftings = list[Drafting]()
        for live in decoding:
            live.drafts = []
            # one token comes without a draft
            limit = min(self.limits.num_drafts, live.request.max_tokens - live.produced - 1)
            if limit > 0 and not adjusts(live.request):  # adjusted logits depend on the drafts before
                # before `propose`: a draft model writes to the same pages
                live.take_pages(self._tables, live.computed + 1 + limit, self.limits.page_len)
                draftings.append(Drafting(live.number, live.slot, live.tokens, live.produced, limit))
        if draftings:
            for drafting, drafts in zip(draftings, self._drafter.propose(draftings, self._tables.pages), strict=True):
                self._live[drafting.number].drafts = drafts
                self._counts.drafted += len(drafts)

    def _read(self) -> None:
        """Reads what the last step has drawn, if that has not been done; requests that it ends are closed later."""
        if self._dispatched is None:
            return
        (expected, drawn, held), self._dispatched = self._dispatched, None
        drawn = drawn.on_host()
        self.times.read(held)
        step_outputs = read_outputs(expected, drawn)
        self._outputs += step_outputs.outputs
        self._ended += step_outputs.ended  # closed later: `Scheduler.stop` is for between two steps
        for number, num_accepted in step_outputs.accepted.items():
            self._counts.accepted += num_accepted
            live = self._live[number]
            if not live.is_closed:
                live.produced += num_accepted
                live.computed += num_accepted
                live.owner.scheduler.accept(live.active, num_accepted)

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
        live.owner.pages.leave(live.number)  # after `vacate`, which puts full pages into the tree
        self._drafter.leave(live.number)
