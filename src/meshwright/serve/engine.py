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
from meshwright.core.fields import fitted
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
from meshwright.serve.sequences.step_rows import OutputOf, RowsOf, joined_rows, rows_of, rows_of_sources
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
        limits = fitted(limits, SchedulerLimits, "Engine: limits")
        storage, self._drafter = step.storage, drafter or Drafter()
        if limits.num_drafts != self._drafter.num_drafts:
            raise InputError(f"the limits have num_drafts={limits.num_drafts}, not the drafter's. Give the same.")
        if len(adapters) != storage.adapters:
            raise InputError(f"the step has {storage.adapters} adapters, and {len(adapters)} names are given.")
        self._shapes = StepShapes(step, limits)
        self._adapters = {"": -1} | {name: adapter_index for adapter_index, name in enumerate(adapters)}
        self.limits, self.max_len, self.vocab_size = limits, step.max_len, step.model.vocab_size
        self.bounds = RequestBounds.of(step.model, self.max_len, adapters)
        self.check = self.bounds.check
        self.packed, self._params, self._cache = step, params, step.init_cache()
        self._host_pages = HostPages(self._cache, step.programs) if host_cache_bytes else None
        num_host_pages = int(host_cache_bytes // self._host_pages.page_bytes) if self._host_pages else 0
        if self._host_pages and not (num_host_pages and limits.prefix_cache):
            raise InputError(
                f"host_cache_bytes={host_cache_bytes:,.0f} is for pages of shared prompts, "
                f"{self._host_pages.page_bytes:,} bytes each. Give room for one at least, and keep the prefix cache on."
            )
        num_owners = step.num_owners
        windows = step.model.sliding_window or 0, storage.window_pages, step.model.chunked_windows
        self._owners = [
            SequenceOwner(limits, i, num_owners, num_on_host=num_host_pages, windows=windows) for i in range(num_owners)
        ]
        self._drawer = TokenDrawer(step.max_seqs, self.vocab_size, step.logits_sharding, step.programs)
        self._masks, self._live = TokenMasks(self.vocab_size), dict[int, Live]()
        table_widths = (step.cache_sizes[dim] for dim in ("Bp", "Bp", "Bx"))
        self._tables = Tables(*(np.zeros((step.max_seqs, width), np.int32) for width in table_widths))
        self._idle_row = OutputRow(step.max_seqs, 0)
        self._dispatched: _Dispatched | None = None
        self._following: _Dispatched | None = None
        self._outputs: list[TokenOutput] = []
        self._ended: list[Live] = []
        self._number, self._counts, self.times = 0, EngineState(), SummedSteps()

    # -- what a user calls -------------------------------------------------------------------------

    def submit(self, request: TokenRequest) -> int:
        """Queues a request and returns its number. Raises InputError if it could never run."""
        self.check(request)
        request = self.bounds.resolved(request)
        request_number, prompt_len = self._number, len(request.prompt)
        # echo needs the logits of the whole prompt, and keys of a decoder depend on its source
        shares_pages = self.limits.prefix_cache and not request.echo and not request.source
        scheduled_request = GenerationRequest(
            number=request_number,
            prompt=prompt_len,
            output=max(request.max_tokens, 1),  # with echo it may be 0; the token that is drawn is dropped
            prefix=request_number if shares_pages else None,
            prefix_len=prompt_len if shares_pages else 0,
            source=request.source or None,
            source_len=len(request.source),
        )
        adapter_id = self._adapters[request.adapter]
        owner = (
            min(self._owners, key=lambda owner: owner.order(request, adapter_id))
            if self._owners[1:]
            else self._owners[0]
        )
        active_request = owner.scheduler.submit(scheduled_request)
        seq = self._live[request_number] = Live(request_number, request, owner, active_request, adapter_id)
        if shares_pages:
            seq.share_pages()
        self._number += 1
        return request_number

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
        planned_steps = [owner.scheduler.plan() for owner in self._owners]
        for active_request in (active_request for step in planned_steps for active_request in step.preempted):
            self._counts.preemptions += 1
            seq = self._live[active_request.request.number]
            seq.vacate()
            if active_request.request.prefix is not None:  # what it has written so far is known when it comes back
                seq.share_pages()
                active_request.request = replace(active_request.request, prefix_len=len(seq.tokens))
        if self._host_pages:  # before the step that writes over the pages that go
            evictions, restores = zip(*(owner.pages.moves() for owner in self._owners), strict=True)
            self._cache = self._host_pages.move(self._cache, *(dict(ChainMap(*maps)) for maps in (evictions, restores)))
        # not `_dispatched` yet: grammars, and requests that come back, read that one in `_dispatch`
        self._following = self._dispatch(planned_steps) if any(step.repeats for step in planned_steps) else None

    def read(self) -> list[TokenOutput]:
        """Returns what the step before the dispatched one made."""
        self._read()  # the devices compute the step that follows meanwhile
        self._dispatched = self._following
        self._close_ended()
        outputs, self._outputs = self._outputs, []
        return outputs

    def order(self, request: TokenRequest) -> tuple[bool, int, int]:
        """Returns what is least of the engine that a request should have, see `SequenceOwner.order`."""
        adapter_id = self._adapters.get(request.adapter, -1)  # a group asks this before `submit` refuses an unknown one
        request = self.bounds.resolved(request)
        return min(owner.order(request, adapter_id) for owner in self._owners)

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
        running_seqs = [seq for seq in self._live.values() if seq.pages]
        return CacheSnapshot(
            num_pages=self.limits.num_pages,
            page_len=self.limits.page_len,
            requests={seq.number: tuple(seq.pages) for seq in running_seqs},
            lengths={seq.number: seq.computed for seq in running_seqs},
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
        """Compiles every shape, and what draws from it; ``on_shape`` is told how many are done of how many that are in
        no file. May run in a thread of its own while the engine runs, unless it is batch-invariant.

        With ``first_only`` those are compiled that are in no file and that an engine cannot do without; of an engine
        for some ``requests`` alone the two that all its steps use."""
        if self.packed.batch_invariant:
            self._shapes.set_decode_sizes(sizes_up_to(ALIKE_ROWS, least=2, halves_from=8))
        programs, name_of = self.packed.programs, self.packed.program_name
        kept_shapes = {shape for shape in self.shapes() if programs.has([name_of(shape)])}
        if first_only:  # what is in files is read when a step needs it, or later
            self._shapes.ready |= kept_shapes
        # for some requests alone idle rows cost less than compiling more shapes
        shapes = self._shapes.first(requests) if first_only or requests else self.shapes()
        shapes = [shape for shape in shapes if not first_only or shape not in self._shapes.ready]
        # those in files first: how long they take says nothing of the others
        shapes = sorted(shapes, key=lambda shape: shape not in kept_shapes)
        num_kept = sum(shape in kept_shapes for shape in shapes)
        for num_done, shape in enumerate(shapes, start=-num_kept):
            on_shape(max(num_done, 0), len(shapes) - num_kept)
            self.packed.compiled(shape)
            # without drafts, logits of all rows are for log-probabilities, which the adjusted program has
            for is_adjusted in (False, True)[shape.outputs > shape.sequences and not self.limits.num_drafts :]:
                if not requests or is_adjusted == any(adjusts(request) for request in requests):
                    self._drawer.compiled(shape.outputs, is_adjusted)
            self._drafter.warm_up(shape)
            self._shapes.ready.add(shape)  # last: the engine may take it from now on
        for shape_of_sources in self._shapes.sources.every(requests) if self._shapes.sources and not first_only else []:
            self.packed.compiled_sources(*shape_of_sources)
        if self._host_pages:
            self._host_pages.warm_up()
        if self.packed.batch_invariant:
            self._keep_alike()
        if shapes:
            on_shape(len(shapes) - num_kept, len(shapes) - num_kept)

    def _keep_alike(self) -> None:
        """Keeps the numbers of rows by which a first request has the bits that it has in a step of `ALIKE_ROWS`."""
        prompt, outs_by_rows = (self.vocab_size - 1, 0)[: self.max_len - 1], dict[int, list[TokenOutput]]()
        source = prompt[:1] * (self.bounds.source_len > 0)
        request = TokenRequest(prompt=prompt, max_tokens=1, echo=True, logprobs=MOST_LOGPROBS, source=source)
        for num_rows in [shape.rows for shape in self._shapes.decode]:
            self._shapes.set_decode_sizes([num_rows])
            (outputs,) = self.run([request])
            outs_by_rows[num_rows] = [replace(output, number=0, admitted_s=0) for output in outputs]
        self._shapes.set_decode_sizes([n for n, outs in outs_by_rows.items() if outs == outs_by_rows[ALIKE_ROWS]])
        self._number, self._counts = 0, EngineState()
        self.times.sums.clear()

    @property
    def engines(self) -> tuple["Engine", ...]:
        """The engine, as those of a group."""
        return (self,)

    # -- a step ------------------------------------------------------------------------------------

    def _dispatch(self, steps: Sequence[EngineStep]) -> _Dispatched | None:
        start_s, num_drafted = self.times.now(), self._counts.drafted
        for active_req in (active_req for step in steps for active_req in step.admitted):
            self._admit(active_req, start_s)
        admitted_seqs = [[self._live[active_req.request.number] for active_req in step.admitted] for step in steps]
        for source_rows in rows_of_sources(self.packed, admitted_seqs, self._shapes.sources):
            self._cache = self.packed.encode(self._params, self._cache, source_rows)
        # under "static" requests that have ended keep their slots
        planned_seqs = [[self._live.get(active_req.request.number) for active_req in step.decode] for step in steps]
        decoding_seqs = [[seq for seq in seqs if seq is not None and not seq.is_done] for seqs in planned_seqs]
        self._draft([seq for seqs in decoding_seqs for seq in seqs])
        own_parts = list[list[RowsOf]]()
        for seqs, step in zip(decoding_seqs, steps, strict=True):
            own_parts.append([(seq, seq.computed, seq.computed + 1 + len(seq.drafts), seq.drafts) for seq in seqs])
            for active_req, num_tokens in step.prefill:
                seq = self._live[active_req.request.number]
                own_parts[-1].append((seq, seq.computed, seq.computed + num_tokens, []))
        if not any(own_parts):
            self._commit(steps)
            return None
        num_seqs = sum(map(len, decoding_seqs))
        own_rows = [rows_of(self.packed, self._tables, parts) for parts in own_parts]
        max_rows, max_outputs = max(len(rows.whose) for rows in own_rows), max(len(rows.outputs) for rows in own_rows)
        num_owners, is_decode_only = len(own_rows), num_seqs == sum(map(len, own_parts))
        # owners have equal shares of the rows of a shape
        shape = self._shapes.fitting(num_owners * max_rows, num_owners * max_outputs, alone=is_decode_only)
        rows, outputs = joined_rows(own_rows, shape)
        decode_rows, num_drawn = num_seqs + self._counts.drafted - num_drafted, sum(out is not None for out in outputs)
        step_record = held_step(steps, start_s, decoded=decode_rows, rows=len(rows.tokens), outputs=num_drawn)
        # `latest` has the tokens of the step before, which the host has not seen yet
        logits, self._cache = self.packed.step(self._params, self._cache, self._drawer.latest, rows, shape.longest)
        if any(step.prefill for step in steps):
            # steps that only decode are caught up in `propose`
            self._drafter.follow(rows, shape.longest, {seq.slot: end for own in own_parts for seq, _, end, _ in own})
        masks = None
        if any(output and output.live.answer for output in outputs):
            self._read()  # after the step is dispatched: masks are made while it runs
            masks = self._masks.of(len(rows.last), masked_rows(outputs))
        is_adjusted = masks is not None or any(
            adjusts(output.live.request) or output.live.request.logprobs is not None for output in outputs if output
        )
        output_rows = [output.row if output else self._idle_row for output in outputs]
        drawn_rows = self._drawer.draw(logits, output_rows, adjusted=is_adjusted, allowed=masks)
        self._counts.steps += 1
        for active_req in self._commit(steps):
            if ending_seq := self._live.get(active_req.request.number):
                ending_seq.is_done = True  # its tokens are counted already, though not read
                ending_seq.vacate()
        return _Dispatched(outputs, drawn_rows, step_record)

    def _admit(self, active_request: ActiveRequest, now_s: float) -> None:
        """Gives a request a slot, and the pages that the tree has of its prompt."""
        seq = self._live[active_request.request.number]
        if seq.admitted_s and (seq.request.echo or seq.produced > len(seq.output)):
            self._read()  # what was drawn before a preemption is prefilled again
        seq.prompt_logprobs = []
        # the time of the first admission counts, not that after a preemption
        seq.slot, seq.admitted_s = seq.owner.free_slots.pop(), seq.admitted_s or now_s
        seq.computed = active_request.cached
        seq.begin(self._tables)
        if active_request.request.prefix is not None and not seq.produced:  # who comes back would find its own pages
            seq.num_hit = active_request.cached
            self._counts.prefix_queries += len(seq.request.prompt)
            self._counts.prefix_hits += active_request.cached
        self._drawer.enter(seq.slot, seq.request, seq.output)
        if not adjusts(seq.request):
            self._drafter.enter(seq.slot, seq.request, seq.output)

    def _commit(self, steps: Sequence[EngineStep]) -> list[ActiveRequest]:
        """Counts a step of each owner, and returns the requests that have all their tokens."""
        commits = [owner.scheduler.commit(step) for owner, step in zip(self._owners, steps, strict=True)]
        return [active_request for _, ended_requests in commits for active_request in ended_requests]

    def _draft(self, decoding_seqs: Sequence[Live]) -> None:
        """Gives requests that decode the drafts of the next step, with their pages."""
        draftings = list[Drafting]()
        for seq in decoding_seqs:
            seq.drafts = []
            # one token comes without a draft
            max_drafts = min(self.limits.num_drafts, seq.request.max_tokens - seq.produced - 1)
            if max_drafts > 0 and not adjusts(seq.request):  # adjusted logits depend on the drafts before
                # before `propose`: a draft model writes to the same pages
                seq.take_pages(self._tables, seq.computed + 1 + max_drafts, self.limits.page_len)
                draftings.append(Drafting(seq.number, seq.slot, seq.tokens, seq.produced, max_drafts))
        if draftings:
            for drafting, drafts in zip(draftings, self._drafter.propose(draftings, self._tables.pages), strict=True):
                self._live[drafting.number].drafts = drafts
                self._counts.drafted += len(drafts)

    def _read(self) -> None:
        """Reads what the last step has drawn, if that has not been done; requests that it ends are closed later."""
        if self._dispatched is None:
            return
        (expected_outputs, drawn_rows, step_record), self._dispatched = self._dispatched, None
        drawn_rows = drawn_rows.on_host()
        self.times.read(step_record)
        step_outputs = read_outputs(expected_outputs, drawn_rows)
        self._outputs += step_outputs.outputs
        self._ended += step_outputs.ended  # closed later: `Scheduler.stop` is for between two steps
        for request_number, num_accepted in step_outputs.accepted.items():
            self._counts.accepted += num_accepted
            seq = self._live[request_number]
            if not seq.is_closed:
                seq.produced += num_accepted
                seq.computed += num_accepted
                seq.owner.scheduler.accept(seq.active, num_accepted)

    def _close_ended(self) -> None:
        for seq in self._ended:
            self._close(seq)
        self._ended.clear()

    def _close(self, seq: Live) -> None:
        """Forgets a request, and takes it from the scheduler if that still has it."""
        seq.is_closed = True
        del self._live[seq.number]
        if not seq.is_done:
            seq.owner.scheduler.stop(seq.active)
            seq.vacate()
        seq.owner.pages.leave(seq.number)  # after `vacate`, which puts full pages into the tree
        self._drafter.leave(seq.number)
