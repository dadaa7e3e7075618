"""The engine turns requests into tokens, one packed step after another.

The engine plans and dispatches a step before it reads the tokens of the previous step, so that devices are busy while
the host works. A request that ends by a stop token therefore has one more row in the next step, whose token is dropped.
Plans depend only on the requests and the order of calls; the shape of a step also depends on which shapes are compiled,
see `StepShapes`.

If a step has requests with a grammar, the engine dispatches it, reads the previous step, makes the masks and then draws
its tokens. An engine that drafts reads a step before it plans the next one.
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
    """Runs requests on a packed step, scheduled within ``limits``, which must have the step's slots and pages.

    In a batch-invariant step attention treats every row, prompt rows too, as a separate sequence. ``drafter`` proposes
    ``limits.num_drafts`` tokens. ``adapters`` names the step's adapters in order. Pages of prompts that are evicted
    from the devices move to ``host_cache_bytes`` of host memory. Raises InputError if these arguments contradict the
    step. ``packed`` is the step, ``check`` raises InputError for requests that could never run, and ``times`` sums the
    steps that were read.
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
            raise InputError(f"limits.num_drafts={limits.num_drafts} must be the drafter's {self._drafter.num_drafts}.")
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
        """Queues a request and returns its number. Raises InputError if the request could never run."""
        self.check(request)
        request = self.bounds.resolved(request)
        request_number, prompt_len = self._number, len(request.prompt)
        # echo needs the logits of the whole prompt; the decoder's keys depend on the source
        shares_pages = self.limits.prefix_cache and not request.echo and not request.source
        scheduled_request = GenerationRequest(
            number=request_number,
            prompt=prompt_len,
            output=max(request.max_tokens, 1),  # 0 with echo alone; its drawn token is dropped
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
        """Ends a request at once: frees its slot and pages, no output follows. Does nothing if it has ended."""
        if number in self._live:
            self._close(self._live[number])

    def step(self) -> list[TokenOutput]:
        """Dispatches a step if there is work, and returns the outputs of the previous step."""
        self.dispatch()
        return self.read()

    def dispatch(self) -> None:
        """Plans and dispatches a step if there is work; call `read` next."""
        if self.limits.num_drafts:
            self._read()  # the first position of rows depends on the accepted drafts
            self._close_ended()
        planned_steps = [owner.scheduler.plan() for owner in self._owners]
        for active_request in (active_request for step in planned_steps for active_request in step.preempted):
            self._counts.preemptions += 1
            seq = self._live[active_request.request.number]
            seq.vacate()
            if active_request.request.prefix is not None:  # its drawn tokens are known when it is admitted again
                seq.share_pages()
                active_request.request = replace(active_request.request, prefix_len=len(seq.tokens))
        if self._host_pages:  # before the step that overwrites evicted pages
            evictions, restores = zip(*(owner.pages.moves() for owner in self._owners), strict=True)
            self._cache = self._host_pages.move(self._cache, *(dict(ChainMap(*maps)) for maps in (evictions, restores)))
        # not `_dispatched` yet: grammars, and requests admitted again, read the previous step in `_dispatch`
        self._following = self._dispatch(planned_steps) if any(step.repeats for step in planned_steps) else None

    def read(self) -> list[TokenOutput]:
        """Returns the outputs of the step before the one that `dispatch` has just dispatched."""
        self._read()  # the devices compute the next step meanwhile
        self._dispatched = self._following
        self._close_ended()
        outputs, self._outputs = self._outputs, []
        return outputs

    def order(self, request: TokenRequest) -> tuple[bool, int, int]:
        """Returns a key, least for the engine that should run a request, see `SequenceOwner.order`."""
        adapter_id = self._adapters.get(request.adapter, -1)  # a group calls this before `submit` refuses unknown names
        request = self.bounds.resolved(request)
        return min(owner.order(request, adapter_id) for owner in self._owners)

    @property
    def has_work(self) -> bool:
        """True while requests wait or run, or a dispatched step is not read yet."""
        return bool(self._live or self._dispatched)

    def state(self) -> EngineState:
        """Returns the numbers of running and waiting requests and of pages in use, and the counts so far."""
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
        """Bytes of weights on one device."""
        return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(self._params))

    def snapshot(self) -> CacheSnapshot:
        """Returns which request or tree node has each page of the cache, for `report.machine.cache_pages`."""
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
        """Returns every shape that steps may have."""
        return self._shapes.every

    def warm_up(
        self,
        on_shape: Callable[[int, int], None] = lambda num_done, num_shapes: None,
        requests: Sequence[TokenRequest] = (),
        *,
        first_only: bool = False,
    ) -> None:
        """Compiles every shape with its drawing program, or loads them from files of compiled programs; calls
        ``on_shape`` with (shapes done, shapes in no file). May run in a thread while the engine runs, unless the engine
        is batch-invariant. ``first_only`` compiles only the shapes that fit every step and are in no file. With
        ``requests``, compiles just the two shapes that these need."""
        if self.packed.batch_invariant:
            self._shapes.set_decode_sizes(sizes_up_to(ALIKE_ROWS, least=2, halves_from=8))
        programs, name_of = self.packed.programs, self.packed.program_name
        kept_shapes = {shape for shape in self.shapes() if programs.has([name_of(shape)])}
        if first_only:  # programs in files are loaded when a step needs them, or later
            self._shapes.ready |= kept_shapes
        # for a few requests, idle rows cost less than compiling more shapes
        shapes = self._shapes.first(requests) if first_only or requests else self.shapes()
        shapes = [shape for shape in shapes if not first_only or shape not in self._shapes.ready]
        # shapes in files first: their time does not predict the time to compile others
        shapes = sorted(shapes, key=lambda shape: shape not in kept_shapes)
        num_kept = sum(shape in kept_shapes for shape in shapes)
        for num_done, shape in enumerate(shapes, start=-num_kept):
            on_shape(max(num_done, 0), len(shapes) - num_kept)
            self.packed.compiled(shape)
            # without drafts, logits of all rows are for log-probabilities, of the adjusted program
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
        """Keeps the decode sizes that give a test request the same bits as `ALIKE_ROWS` rows; resets the counts."""
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
        """The engine as a tuple of one, like `EngineGroup.engines`."""
        return (self,)

    # -- a step ------------------------------------------------------------------------------------

    def _dispatch(self, steps: Sequence[EngineStep]) -> _Dispatched | None:
        start_s, num_drafted = self.times.now(), self._counts.drafted
        for active_req in (active_req for step in steps for active_req in step.admitted):
            self._admit(active_req, start_s)
        admitted_seqs = [[self._live[active_req.request.number] for active_req in step.admitted] for step in steps]
        for source_rows in rows_of_sources(self.packed, admitted_seqs, self._shapes.sources):
            self._cache = self.packed.encode(self._params, self._cache, source_rows)
        # with the policy "static", finished requests keep their slots
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
        # each owner has an equal share of a shape's rows
        shape = self._shapes.fitting(num_owners * max_rows, num_owners * max_outputs, alone=is_decode_only)
        rows, outputs = joined_rows(own_rows, shape)
        decode_rows, num_drawn = num_seqs + self._counts.drafted - num_drafted, sum(out is not None for out in outputs)
        step_record = held_step(steps, start_s, decoded=decode_rows, rows=len(rows.tokens), outputs=num_drawn)
        # `latest` has the tokens of the previous step, which the host has not read yet
        logits, self._cache = self.packed.step(self._params, self._cache, self._drawer.latest, rows, shape.longest)
        if any(step.prefill for step in steps):
            # `propose` catches up on steps that only decode
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
                ending_seq.is_done = True  # all its tokens are drawn, though not read
                ending_seq.vacate()
        return _Dispatched(outputs, drawn_rows, step_record)

    def _admit(self, active_request: ActiveRequest, now_s: float) -> None:
        """Assigns a request a slot, and the pages of its prompt that are in the prefix tree."""
        seq = self._live[active_request.request.number]
        if seq.admitted_s and (seq.request.echo or seq.produced > len(seq.output)):
            self._read()  # tokens drawn before a preemption are prefilled again
        seq.prompt_logprobs = []
        # the first admission counts, not one after a preemption
        seq.slot, seq.admitted_s = seq.owner.free_slots.pop(), seq.admitted_s or now_s
        seq.computed = active_request.cached
        seq.begin(self._tables)
        if active_request.request.prefix is not None and not seq.produced:  # a preempted one would find its own pages
            seq.num_hit = active_request.cached
            self._counts.prefix_queries += len(seq.request.prompt)
            self._counts.prefix_hits += active_request.cached
        self._drawer.enter(seq.slot, seq.request, seq.output)
        if not adjusts(seq.request):
            self._drafter.enter(seq.slot, seq.request, seq.output)

    def _commit(self, steps: Sequence[EngineStep]) -> list[ActiveRequest]:
        """Commits each owner's step to its scheduler, and returns the requests that have all their tokens."""
        commits = [owner.scheduler.commit(step) for owner, step in zip(self._owners, steps, strict=True)]
        return [active_request for _, ended_requests in commits for active_request in ended_requests]

    def _draft(self, decoding_seqs: Sequence[Live]) -> None:
        """Sets the drafts of decoding requests for the next step, and takes pages for them."""
        draftings = list[Drafting]()
        for seq in decoding_seqs:
            seq.drafts = []
            # a step draws one token without a draft
            max_drafts = min(self.limits.num_drafts, seq.request.max_tokens - seq.produced - 1)
            if max_drafts > 0 and not adjusts(seq.request):  # adjusted logits depend on earlier drafts
                # before `propose`: a draft model writes to the same pages
                seq.take_pages(self._tables, seq.computed + 1 + max_drafts, self.limits.page_len)
                draftings.append(Drafting(seq.number, seq.slot, seq.tokens, seq.produced, max_drafts))
        if draftings:
            for drafting, drafts in zip(draftings, self._drafter.propose(draftings, self._tables.pages), strict=True):
                self._live[drafting.number].drafts = drafts
                self._counts.drafted += len(drafts)

    def _read(self) -> None:
        """Reads the tokens of the last step, unless that is done; `_close_ended` closes the requests that it ends."""
        if self._dispatched is None:
            return
        (expected_outputs, drawn_rows, step_record), self._dispatched = self._dispatched, None
        drawn_rows = drawn_rows.on_host()
        self.times.read(step_record)
        step_outputs = read_outputs(expected_outputs, drawn_rows)
        self._outputs += step_outputs.outputs
        self._ended += step_outputs.ended  # closed later: `Scheduler.stop` may only run between two steps
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
        """Removes a request, from the scheduler too if it is still there."""
        seq.is_closed = True
        del self._live[seq.number]
        if not seq.is_done:
            seq.owner.scheduler.stop(seq.active)
            seq.vacate()
        seq.owner.pages.leave(seq.number)  # after `vacate`, which puts full pages into the tree
        self._drafter.leave(seq.number)
