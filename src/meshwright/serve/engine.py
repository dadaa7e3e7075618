"""The engine: requests in, tokens out, one packed step after the other.

A step is planned, its arrays are made and it is dispatched, before the tokens of the step before it are read: the
devices have the next step while the host looks at the last one. So a request that ends by a token has one more row in
the step that follows, whose token is dropped. What is planned depends on the requests and the order of calls alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.request import ActiveRequest, GenerationRequest
from meshwright.batching.scheduler import EngineStep, Scheduler
from meshwright.core.errors import InputError
from meshwright.nn.weights import Params
from meshwright.parallel.generation.packed_step import ALIKE_ROWS, PackedRows, PackedShape, PackedStep
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.serve.drawing import Drawn, OutputRow, TokenDrawer, adjusts
from meshwright.serve.prefix_tree import PrefixTree
from meshwright.serve.request import EngineState, Finish, TokenOutput, TokenRequest

LEAST_ROWS = 2
"""Rows of a step at least: XLA's programs for CPUs multiply one row ten times more slowly than two."""


class _Live:
    """A request in the engine: its known tokens, those that are in the cache, and its place.

    ``produced`` counts tokens drawn, of which the last one or two may not have been read.
    """

    def __init__(self, number: int, request: TokenRequest, active: ActiveRequest) -> None:
        self.number, self.request, self.active = number, request, active
        self.tokens = list(request.prompt)
        self.computed = self.produced = 0
        self.slot = -1
        self.num_hit = self.num_shared = 0  # tokens that the prefix tree had; pages that it has, the first ones
        self.pages: list[int] = []
        self.prompt_logprobs: list[Any] = []
        self.is_closed = self.is_done = False  # its output is complete; the scheduler has let it go

    @property
    def output(self) -> list[int]:
        """Tokens after the prompt that have been read."""
        return self.tokens[len(self.request.prompt) :]


class _Expected(NamedTuple):
    """A row with logits of a dispatched step: whose it is; ``target`` is the next token of the prompt, for its
    log-probability, or -1 where the drawn token follows."""

    live: _Live
    target: int


class _Dispatched(NamedTuple):
    expected: list[_Expected]
    drawn: Drawn


class Engine:
    """Runs requests on a packed step, scheduled within ``limits``, whose slots and pages are those of the step.

    If the step is batch-invariant, every row is a sequence of its own for attention, also those of a prompt. Raises
    InputError if the limits are not the step's.
    """

    def __init__(self, step: PackedStep, params: Params, limits: SchedulerLimits) -> None:
        storage = step.storage
        there = step.max_seqs, storage.page_len, step.cache_sizes["Pg"]
        if (limits.max_requests, limits.page_len, limits.num_pages) != there:
            raise InputError(f"the step has {there} slots, positions of a page and pages. Give limits with these.")
        self.limits, self.max_len, self.vocab_size = limits, step.max_len, step.model.vocab_size
        self._step, self._params, self._cache = step, params, step.init_cache()
        self._pages = PrefixTree(limits.num_pages, limits.page_len)
        self._scheduler = Scheduler(limits, self._pages)
        self._drawer = TokenDrawer(step.max_seqs, self.vocab_size, step.logits_sharding, step.programs)
        self._live: dict[int, _Live] = {}
        self._free_slots = list(range(step.max_seqs))[::-1]
        self._table = np.zeros((step.max_seqs, step.cache_sizes["Bp"]), np.int32)
        self._dispatched: _Dispatched | None = None
        self._following: _Dispatched | None = None
        self._outputs: list[TokenOutput] = []
        self._ended: list[_Live] = []
        self._number = self._num_steps = self._num_preempted = self._num_looked = self._num_hit = 0
        most = {
            "chunked": limits.token_budget,
            "interleaved": max(limits.token_budget, step.max_len),
            "static": step.max_seqs * step.max_len,
        }[limits.policy]
        batch_invariant = step.batch_invariant
        if batch_invariant and most > ALIKE_ROWS:
            raise InputError(
                f"a batch-invariant engine has steps of at most {ALIKE_ROWS} tokens, and {most:,} are asked for. Give "
                f"a token_budget and max_requests of at most {ALIKE_ROWS}, and the policy chunked."
            )
        sizes = _sizes(LEAST_ROWS, most if batch_invariant else step.max_seqs, halves_from=8)
        self._decode_sizes = _whole(sizes, step.row_parts)
        self._chunk_sizes = [] if batch_invariant else _whole(_sizes(16, most), step.row_parts)

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
        live = self._live[number] = _Live(number, request, self._scheduler.submit(counted))
        if shares:
            self._pages.enter(number, request.prompt, live.pages)
        self._number += 1
        return number

    def check(self, request: TokenRequest) -> None:
        """Raises InputError for a request that could never run."""
        longest, prompt = max(request.prompt), len(request.prompt)
        if longest >= self.vocab_size or min(request.prompt) < 0:
            raise InputError(f"the prompt has tokens outside of V={self.vocab_size}. Use the model's own tokenizer.")
        if prompt + request.max_tokens > self.max_len:
            raise InputError(
                f"a prompt of {prompt:,} tokens and {request.max_tokens:,} more need {prompt + request.max_tokens:,} "
                f"positions; this engine has {self.max_len:,}. Shorten the prompt, or ask for fewer tokens."
            )
        for token in (*request.stop_tokens, *(token for token, _ in request.sampling.logit_bias)):
            if not 0 <= token < self.vocab_size:
                raise InputError(f"token {token} is outside of V={self.vocab_size}. Use the model's own tokenizer.")

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
        planned = self._scheduler.plan()
        for active in planned.preempted:
            self._num_preempted += 1
            self._vacate(self._live[active.request.number])
        self._following = self._dispatch(planned) if planned.repeats else None

    def read(self) -> list[TokenOutput]:
        """Returns what the step before the dispatched one made."""
        self._read()
        self._dispatched = self._following
        for live in self._ended:
            self._close(live)
        self._ended.clear()
        outputs, self._outputs = self._outputs, []
        return outputs

    def num_known(self, prompt: Sequence[int]) -> int:
        """Returns the tokens of a prompt that the prefix cache has."""
        return self._pages.num_known(prompt) * self.limits.page_len

    @property
    def has_work(self) -> bool:
        """True while requests wait or run, or outputs are to come."""
        return bool(self._live or self._dispatched)

    def state(self) -> EngineState:
        """Returns what runs and waits, and the pages in use."""
        return EngineState(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_used=self.limits.num_pages - self._pages.room,
            num_pages=self.limits.num_pages,
            preemptions=self._num_preempted,
            prefix_queries=self._num_looked,
            prefix_hits=self._num_hit,
            steps=self._num_steps,
        )

    def run(self: "Engine | EngineGroup", requests: Sequence[TokenRequest]) -> list[list[TokenOutput]]:
        """Runs requests to their ends and returns the outputs of each."""
        found: dict[int, list[TokenOutput]] = {self.submit(request): [] for request in requests}
        while self.has_work:
            for output in self.step():
                found[output.number].append(output)
        return list(found.values())

    # -- shapes ------------------------------------------------------------------------------------

    def shapes(self) -> list[PackedShape]:
        """Returns every shape that steps have, the first that a request needs first; the last ones have logits of all
        rows, for log-probabilities of prompts."""
        decode = [PackedShape(size, size, size, 1) for size in self._decode_sizes]
        sequences = (min(self.limits.max_requests, rows) for rows in self._chunk_sizes)
        chunks = [PackedShape(rows, most, most, rows) for rows, most in zip(self._chunk_sizes, sequences, strict=True)]
        scoring = [shape._replace(outputs=shape.rows) for shape in chunks if shape.outputs < shape.rows]
        return [*chunks[:1], *decode, *chunks[1:], *scoring]

    def warm_up(self, on_shape: Callable[[int, int], None] = lambda done, all: None) -> None:
        """Compiles every shape, and what draws from it; ``on_shape`` is told how many are done of how many. May run in
        a thread of its own while the engine runs."""
        shapes = self.shapes()
        for number, shape in enumerate(shapes):
            on_shape(number, len(shapes))
            self._step.compiled(shape)
            for adjusted in (False, True)[shape.outputs > shape.sequences :]:
                self._drawer.compiled(shape.outputs, adjusted)
        on_shape(len(shapes), len(shapes))

    @property
    def engines(self) -> tuple["Engine", ...]:
        """The engine, as those of a group."""
        return (self,)

    @property
    def programs(self) -> ProgramStore:
        """The files of compiled programs."""
        return self._step.programs

    @property
    def is_compiled(self) -> bool:
        """True if the programs of all shapes are kept in files."""
        return self.programs.has(map(self._step.program_name, self.shapes()))

    # -- a step ------------------------------------------------------------------------------------

    def _dispatch(self, planned: EngineStep) -> _Dispatched | None:
        parts: list[tuple[_Live, int, int]] = []  # whose, the positions from here to there
        for active in planned.admitted:
            live = self._live[active.request.number]
            if live.produced > len(live.output):
                self._read()  # what was drawn before a preemption is prefilled again
            live.slot = self._free_slots.pop()
            live.computed = active.cached
            live.pages += self._pages.admitted(live.number)
            live.num_shared = len(live.pages)
            self._table[live.slot, : len(live.pages)] = live.pages
            if active.request.prefix is not None and not live.produced:
                live.num_hit = active.cached
                self._num_looked += len(live.request.prompt)
                self._num_hit += active.cached
            self._drawer.enter(live.slot, live.request, live.output)
        # under "static" requests that have ended keep their slots
        known = (self._live.get(active.request.number) for active in planned.decode)
        decoding = [live for live in known if live is not None and not live.is_done]
        parts += [(live, live.computed, live.computed + 1) for live in decoding]
        for active, count in planned.prefill:
            live = self._live[active.request.number]
            parts.append((live, live.computed, live.computed + count))
        if not parts:
            self._scheduler.commit(planned)
            return None
        rows, expected, outputs, longest = self._rows(parts, len(decoding))
        logits, self._cache = self._step.step(self._params, self._cache, self._drawer.latest, rows, longest)
        adjusted = any(adjusts(one.live.request) or one.live.request.logprobs is not None for one in expected)
        drawn = self._drawer.draw(logits, outputs, adjusted=adjusted)
        self._num_steps += 1
        prefilled, ended = self._scheduler.commit(planned)
        for active in prefilled:
            self._live[active.request.number].num_shared = self._pages.num_shared(active.request.number)
        for active in ended:
            if ending := self._live.get(active.request.number):
                ending.is_done = True
                self._vacate(ending)
        return _Dispatched(expected, drawn)

    def _rows(
        self, parts: Sequence[tuple[_Live, int, int]], num_decoding: int
    ) -> tuple[PackedRows, list[_Expected], list[OutputRow], int]:
        """Returns the arrays of a step, the rows with logits, and the longest part that its shape allows."""
        limits, page_len = self.limits, self.limits.page_len
        counts = np.array([end - start for _, start, end in parts], np.int32)
        ends = np.array([end for _, _, end in parts], np.int32)
        num_rows, num_parts = int(counts.sum()), len(parts)
        if num_decoding == num_parts or self._step.batch_invariant:
            size = length = _fitting(self._decode_sizes, num_rows)
            longest = 1
        else:
            size = longest = _fitting(self._chunk_sizes, num_rows)
            length = min(limits.max_requests, size)
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(num_parts), counts)
        positions = np.arange(num_rows) - first[owner] + (ends - counts)[owner]
        tokens, sources = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        expected, outputs = list[_Expected](), list[OutputRow]()
        last = list[int]()
        for number, (live, start, end) in enumerate(parts):
            self._take_pages(live, end)
            row = int(first[number])
            known = live.tokens[start:end]
            tokens[row : row + len(known)] = known
            if number < num_decoding:
                sources[row] = live.slot
            live.computed = end
            total = len(live.request.prompt) + live.produced
            if live.request.echo and start < len(live.request.prompt):
                for at in range(start, min(end, len(live.request.prompt) - 1)):
                    target = live.request.prompt[at + 1]
                    expected.append(_Expected(live, target))
                    outputs.append(OutputRow(limits.max_requests, 0, target))
                    last.append(row + at - start)
            if end == total:
                expected.append(_Expected(live, -1))
                outputs.append(OutputRow(live.slot, live.produced))
                last.append(row + end - start - 1)
                live.produced += 1
        tables = self._table[[live.slot for live, _, _ in parts]]
        at = tables[owner, positions // page_len] * page_len + positions % page_len
        if self._step.batch_invariant:
            first, counts, ends, tables = np.arange(num_rows), np.ones(num_rows, int), positions + 1, tables[owner]
        return (
            PackedRows(
                tokens=tokens,
                sources=sources,
                positions=_padded(positions, size),
                slots=_padded(at, size, limits.num_pages * page_len),
                first=_padded(first, length, num_rows),
                counts=_padded(counts, length),
                lengths=_padded(ends, length),
                pages=_padded(tables, length),
                last=_padded(np.array(last, np.int32), length if len(last) <= length else size),
            ),
            expected,
            outputs,
            longest,
        )

    def _take_pages(self, live: _Live, end: int) -> None:
        """Gives a request the pages of its first ``end`` positions. The scheduler has counted them."""
        while len(live.pages) * self.limits.page_len < end:
            page = self._pages.free.pop()
            self._table[live.slot, len(live.pages)] = page
            live.pages.append(page)

    def _read(self) -> None:
        """Reads what the last step has drawn, if that has not been done; requests that it ends are closed later."""
        if self._dispatched is None:
            return
        (expected, drawn), self._dispatched = self._dispatched, None
        drawn = drawn.on_host()
        for row, (live, target) in enumerate(expected):
            if live.is_closed:
                continue
            request, token = live.request, int(drawn.token[row])
            if target >= 0:
                live.prompt_logprobs.append(drawn.logprob_of(row, target, request.logprobs or 0))
                continue
            finish: Finish | None = None
            has_one = request.max_tokens > 0
            if token in request.stop_tokens and len(live.tokens) - len(request.prompt) >= request.min_tokens:
                finish, has_one = "stop", False
            if has_one:
                live.tokens.append(token)
            if finish is None and len(live.tokens) - len(request.prompt) >= request.max_tokens:
                finish = "length"
            asked = has_one and request.logprobs is not None
            self._outputs.append(
                TokenOutput(
                    number=live.number,
                    token=token if has_one else None,
                    logprob=drawn.logprob_of(row, token, request.logprobs or 0) if asked else None,
                    prompt=tuple(live.prompt_logprobs),
                    finish=finish,
                    cached=live.num_hit,
                )
            )
            live.prompt_logprobs, live.num_hit = [], 0
            if finish is not None:
                live.is_closed = True
                self._ended.append(live)

    def _close(self, live: _Live) -> None:
        """Forgets a request, and takes it from the scheduler if that still has it."""
        live.is_closed = True
        del self._live[live.number]
        if not live.is_done:
            self._scheduler.stop(live.active)
            self._vacate(live)
        self._pages.leave(live.number)

    def _vacate(self, live: _Live) -> None:
        """Frees the slot and the pages of a request. Steps that are dispatched already write there before others do."""
        if live.slot >= 0:
            self._free_slots.append(live.slot)
            self._pages.free += reversed(live.pages[live.num_shared :])
        live.pages.clear()
        live.slot, live.computed, live.num_shared = -1, 0, 0


class EngineGroup:
    """Engines of one model, each on devices of its own, as one engine.

    A request goes to the engine that has most of its prompt in pages, among those that have a slot if any has, and of
    these to the one with the fewest requests. The n engines number its requests from their own place on, n apart.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines, self.max_len, self.vocab_size = tuple(engines), engines[0].max_len, engines[0].vocab_size
        own, count = engines[0].limits, len(engines)
        self.limits = msgspec.structs.replace(
            own, max_requests=count * own.max_requests, num_pages=count * own.num_pages
        )
        self.check = engines[0].check

    def submit(self, request: TokenRequest) -> int:
        """Queues a request at an engine and returns its number. Raises InputError if it could never run."""

        def order(place: int) -> tuple[bool, int, int]:
            engine, state = self.engines[place], self.engines[place].state()
            load = state.running + state.waiting
            return load >= engine.limits.max_requests, -engine.num_known(request.prompt), load

        place = min(range(len(self.engines)), key=order)
        return self.engines[place].submit(request) * len(self.engines) + place

    def cancel(self, number: int) -> None:
        """Ends a request at once, see `Engine.cancel`."""
        own, place = divmod(number, len(self.engines))
        self.engines[place].cancel(own)

    def step(self) -> list[TokenOutput]:
        """Dispatches a step of every engine with work, and returns what the steps before these made."""
        busy = [(place, engine) for place, engine in enumerate(self.engines) if engine.has_work]
        for _, engine in busy:
            engine.dispatch()
        return [
            msgspec.structs.replace(output, number=output.number * len(self.engines) + place)
            for place, engine in busy
            for output in engine.read()
        ]

    @property
    def has_work(self) -> bool:
        """True while requests wait or run in any engine, or outputs are to come."""
        return any(engine.has_work for engine in self.engines)

    def state(self) -> EngineState:
        """Returns the sums of the engines' states."""
        states = [msgspec.structs.astuple(engine.state()) for engine in self.engines]
        return EngineState(**dict(zip(EngineState.__struct_fields__, np.sum(states, axis=0).tolist(), strict=True)))

    run = Engine.run

    def warm_up(self, on_shape: Callable[[int, int], None] = lambda done, all: None) -> None:
        """Compiles every shape of every engine, see `Engine.warm_up`."""
        for place, engine in enumerate(self.engines):
            engine.warm_up(lambda done, all, before=place: on_shape(before * all + done, len(self.engines) * all))  # type: ignore[misc]

    @property
    def is_compiled(self) -> bool:
        """True if the programs of all engines are kept in files."""
        return all(engine.is_compiled for engine in self.engines)


def _sizes(least: int, most: int, *, halves_from: int = 0) -> list[int]:
    """Returns numbers of rows up to ``most``: powers of two, and if asked also those halfway to the next one."""
    found, size = list[int](), least
    while size < most:
        found += [size, size * 3 // 2] if halves_from and size >= halves_from else [size]
        size *= 2
    return [*(one for one in found if one < most), max(least, most)]


def _whole(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns sizes that devices can share, each at least one of the given."""
    return sorted({-(-size // parts) * parts for size in sizes})


def _fitting(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)


def _padded(array: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """Returns an array with rows of ``value`` up to a size."""
    found = np.full((size, *array.shape[1:]), value, np.int32)
    found[: len(array)] = array
    return found
