"""Runs an engine in a thread of its own, and gives asyncio the outputs of its requests as they come.

Commands go to the thread by a queue; the outputs of a step come back in one wake-up of the event loop.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from meshwright.core.errors import CannotRunError, as_sentence, first_line
from meshwright.serve.request import EngineState, TokenEngine, TokenOutput, TokenRequest

MOST_QUEUED = 1_024
LONGEST_RETRY_S = 60
MOST_TAKEN = 256
"""Outputs that a consumer gets at once, some 5 ms of work, so that one who had fallen behind stalls nobody."""
_LOGGER = logging.getLogger(__name__)


class BusyError(CannotRunError):
    """The system holds as many requests as it may; there may be room in ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(CannotRunError):
    """The server takes no requests: it drains, is closed, or its engine failed."""


class DeadlineError(CannotRunError):
    """A request was not done within its time."""


class AbandonedError(CannotRunError):
    """Nobody waits for the request any more."""


Arrived = tuple[int, TokenOutput, float]
"""The place of a request in its feed, an output, and when its step ended, in seconds of `time.perf_counter`."""


class Feed:
    """Outputs of requests that were opened together, in order of arrival. As a context, cancels on leaving it what has
    not ended. All methods are for the event loop's thread."""

    def __init__(self, frontend: "Frontend", requests: Sequence[TokenRequest]) -> None:
        self.requests = requests
        self.numbers: dict[int, int] = {}  # place -> the engine's number; the engine's thread alone uses it
        self._frontend, self._unended = frontend, set(range(len(requests)))
        self._arrived: list[Arrived] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> list[Arrived]:
        """Waits for outputs and returns those that came since the last call, up to `MOST_TAKEN`; [] after the last one.

        Raises UnavailableError if the engine fails, DeadlineError, and AbandonedError after `abandon`.
        """
        if self._arrived:
            await asyncio.sleep(0)  # whoever has fallen behind lets the others go first
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._unended:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrivals, self._arrived = self._arrived[:MOST_TAKEN], self._arrived[MOST_TAKEN:]
        return arrivals

    def cancel(self, place: int) -> None:
        """Ends one request; no output of it follows. Nothing happens if it has ended."""
        if place in self._unended:
            self._ended(place)
            # by place, as the engine may not have numbered the request yet
            self._frontend.command(partial(self._frontend.cancel_in_engine, self, place))
            self._arrived = [arrival for arrival in self._arrived if arrival[0] != place]

    def fail(self, error: Exception) -> None:
        """Cancels everything; whoever waits gets the error."""
        self._error = self._error or error
        for place in tuple(self._unended):
            self.cancel(place)
        self._wake()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Cancels everything; whoever waits gets an AbandonedError."""
        self.fail(AbandonedError("the client has gone."))

    def expire_after(self, deadline_s: float) -> None:
        """Fails with DeadlineError what has not ended in so many seconds from now."""
        late = DeadlineError(f"the request was not done in {deadline_s:g} s. Ask for fewer tokens, or try again later.")
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self.fail, late)

    def add(self, place: int, output: TokenOutput, time_s: float) -> None:
        """Called by the front end for each output."""
        if place in self._unended:  # else it was cancelled while its output was on the way
            self._arrived.append((place, output, time_s))
            if output.finish is not None:
                self._ended(place)
            self._wake()

    def _ended(self, place: int) -> None:
        self._unended.discard(place)
        if not self._unended and self._timer is not None:
            self._timer.cancel()
        self._frontend.ended(self, all_of_it=not self._unended)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():  # the outputs of one step wake it once
            self._waiter.set_result(None)


class Frontend:
    """An engine for asyncio. At most ``max_queued`` requests are in the system; each may take ``deadline_s`` seconds.

    ``state`` is the engine's after its last step, ``failure`` says why it takes no requests any more (""): it failed.
    ``num_cut`` requests were not finished when it closed.
    """

    def __init__(self, engine: TokenEngine, *, max_queued: int = MOST_QUEUED, deadline_s: float | None = None) -> None:
        self.engine, self.max_queued, self.deadline_s = engine, max_queued, deadline_s
        self.max_len, self.vocab_size, self.bounds = engine.max_len, engine.vocab_size, engine.bounds
        self.state = engine.state()
        self.failure = ""
        self.draining = False
        self.in_system = self.num_cut = 0
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._feeds: set[Feed] = set()
        self._places: dict[int, tuple[Feed, int]] = {}  # the engine's thread alone uses it
        self._stop = False
        self._last_end_s, self._end_gap_s = time.perf_counter(), 1.0
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def available(self) -> bool:
        """Whether new requests are taken."""
        return self._loop is not None and not self.failure and not self.draining

    def start(self) -> None:
        """Starts the engine's thread; its outputs come to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def open(self, requests: Sequence[TokenRequest]) -> Feed:
        """Gives requests to the engine. Use what it returns as a context.

        Raises BusyError if they are too many with those in the system, UnavailableError if none are taken now, and
        InputError for one that can never run.
        """
        if not self.available:
            raise UnavailableError(self.failure or "the server is stopping. Ask another one.")
        num_excess = self.in_system + len(requests) - self.max_queued
        if num_excess > 0:
            wait_s = min(max(1, math.ceil(num_excess * self._end_gap_s)), LONGEST_RETRY_S)
            raise BusyError(
                f"{self.in_system:,} of at most {self.max_queued:,} requests are in the system, and {len(requests):,} "
                f"more do not fit. Try again in {wait_s} s.",
                wait_s,
            )
        for request in requests:
            self.engine.check(request)
        feed = Feed(self, requests)
        self.in_system += len(requests)
        self._feeds.add(feed)
        if self.deadline_s is not None:
            feed.expire_after(self.deadline_s)
        self.command(partial(self._submit, feed))
        return feed

    def stop_taking(self) -> None:
        """Refuses new requests from now on; those in the system go on."""
        self.draining = True

    def cut_off(self) -> None:
        """Ends what runs and waits with an error."""
        self.stop_taking()
        self.num_cut += self.in_system  # before they fail, which takes them out of the system
        for feed in tuple(self._feeds):
            feed.fail(UnavailableError("the server stopped before the request was done. Ask another one."))

    async def close(self) -> None:
        """Cancels everything and ends the thread, see `join`."""
        self.cut_off()
        await asyncio.to_thread(self.join)  # joining here would stop the event loop for as long

    def join(self) -> None:
        """Ends the thread, waiting 10 s at most for a step that runs; needs no event loop."""
        self.stop_taking()
        self.command(self._end)
        if self._thread.is_alive():
            self._thread.join(10.0)

    def ended(self, feed: Feed, *, all_of_it: bool) -> None:
        """Called by a feed for each request that ended."""
        now_s = time.perf_counter()
        # at most 10 s each: an idle hour says nothing of how fast requests end
        self._end_gap_s += 0.1 * (min(now_s - self._last_end_s, 10.0) - self._end_gap_s)
        self._last_end_s = now_s
        self.in_system -= 1
        if all_of_it:
            self._feeds.discard(feed)

    # -- the engine's thread ------------------------------------------------------------------------------------

    def command(self, function: Callable[[], None]) -> None:
        """Has the engine's thread call a function between two steps."""
        self._commands.put(function)

    def cancel_in_engine(self, feed: Feed, place: int) -> None:
        request_number = feed.numbers.get(place)
        if request_number is not None and self._places.pop(request_number, None) is not None:
            self.engine.cancel(request_number)

    def _submit(self, feed: Feed) -> None:
        for place, request in enumerate(feed.requests):
            request_number = self.engine.submit(request)
            feed.numbers[place] = request_number
            self._places[request_number] = (feed, place)

    def _end(self) -> None:
        self._stop = True

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                if self._stop:
                    return
                outputs = self.engine.step() if self.engine.has_work else []
                # a token has the time of its step's end, however late a client reads it
                end_s, state = time.perf_counter(), self.engine.state()
                self._post(partial(self._deliver, self._placed(outputs), end_s, state))
        except BaseException as error:  # whatever it is, nobody may wait for ever
            _LOGGER.exception("the engine failed")
            self._post(partial(self._fail, f"the engine failed: {as_sentence(first_line(error))}"))

    def _obey(self) -> None:
        """Calls what was commanded; waits for a command if the engine has no work."""
        should_wait = not self.engine.has_work
        with suppress(Empty):
            while not self._stop:
                self._commands.get(block=should_wait)()
                should_wait = False

    def _placed(self, outputs: list[TokenOutput]) -> list[tuple[Feed, int, TokenOutput]]:
        placed_outputs = []
        for output in outputs:
            entry = self._places.get(output.number) if output.finish is None else self._places.pop(output.number, None)
            if entry is not None:
                placed_outputs.append((entry[0], entry[1], output))
        return placed_outputs

    def _post(self, function: Callable[[], None]) -> None:
        """Has the event loop call a function; ends the thread if the loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            self._stop = True

    # -- called in the event loop by the engine's thread --------------------------------------------------------

    def _deliver(self, placed_outputs: list[tuple[Feed, int, TokenOutput]], time_s: float, state: EngineState) -> None:
        self.state = state
        for feed, place, output in placed_outputs:
            feed.add(place, output, time_s)

    def _fail(self, why: str) -> None:
        self.failure = why
        for feed in tuple(self._feeds):
            feed.fail(UnavailableError(why))
