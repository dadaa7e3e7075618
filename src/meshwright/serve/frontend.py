"""Runs an engine in a separate thread and delivers the outputs of its requests to asyncio.

A queue passes commands to the thread; the outputs of a step arrive in one wake-up of the event loop.
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
"""Maximum outputs of one `Feed.take`, about 5 ms of work, so that a slow consumer does not stall others."""
_LOGGER = logging.getLogger(__name__)


class BusyError(CannotRunError):
    """Too many requests are waiting or running; there may be room in ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(CannotRunError):
    """The server accepts no requests: it is draining or closed, or its engine failed."""


class DeadlineError(CannotRunError):
    """A request did not finish within its deadline."""


class AbandonedError(CannotRunError):
    """The client of a request has disconnected."""


Arrived = tuple[int, TokenOutput, float]
"""The index of a request in its feed, an output, and when its step ended, in seconds of `time.perf_counter`."""


class Feed:
    """The outputs of requests that were submitted together, in order of arrival. As a context manager it cancels
    unfinished requests on exit. Call its methods in the event loop's thread only."""

    def __init__(self, frontend: "Frontend", requests: Sequence[TokenRequest]) -> None:
        self.requests = requests
        self.numbers: dict[int, int] = {}  # index -> the engine's number; used by the engine's thread only
        self._frontend, self._unended = frontend, set(range(len(requests)))
        self._arrived: list[Arrived] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> list[Arrived]:
        """Waits for outputs and returns up to `MOST_TAKEN` that no call has returned yet; [] after the last output.

        Raises UnavailableError if the engine fails, DeadlineError after the deadline, AbandonedError after `abandon`.
        """
        if self._arrived:
            await asyncio.sleep(0)  # a consumer that is behind lets other tasks run first
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
        """Cancels the request at index ``place`` and drops its outputs; does nothing if it has ended."""
        if place in self._unended:
            self._ended(place)
            # by index, as the engine may not have numbered the request yet
            self._frontend.command(partial(self._frontend.cancel_in_engine, self, place))
            self._arrived = [arrival for arrival in self._arrived if arrival[0] != place]

    def fail(self, error: Exception) -> None:
        """Cancels all requests; `take` raises the error (of several, the first)."""
        self._error = self._error or error
        for place in tuple(self._unended):
            self.cancel(place)
        self._wake()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Cancels all requests; `take` raises AbandonedError."""
        self.fail(AbandonedError("the client has disconnected."))

    def expire_after(self, deadline_s: float) -> None:
        """Cancels what is unfinished in ``deadline_s`` seconds from now; `take` then raises DeadlineError."""
        late = DeadlineError(f"the request was not done in {deadline_s:g} s. Ask for fewer tokens, or try again later.")
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self.fail, late)

    def add(self, place: int, output: TokenOutput, time_s: float) -> None:
        """Queues an output of the request at index ``place``. The front end calls this for each output."""
        if place in self._unended:  # else it was cancelled while its output was in flight
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
    """Runs an engine for asyncio: at most ``max_queued`` requests wait or run, each for up to ``deadline_s`` seconds.

    ``state`` is the engine's after its last step; ``failure`` is the message of the error that ended it ("": none);
    ``num_cut`` counts the requests that were unfinished when the front end closed.
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
        self._places: dict[int, tuple[Feed, int]] = {}  # used by the engine's thread only
        self._stop = False
        self._last_end_s, self._end_gap_s = time.perf_counter(), 1.0
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def available(self) -> bool:
        """True if new requests are accepted: started, not failed and not draining."""
        return self._loop is not None and not self.failure and not self.draining

    def start(self) -> None:
        """Starts the engine's thread, which delivers outputs to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def open(self, requests: Sequence[TokenRequest]) -> Feed:
        """Submits requests to the engine; use the returned feed as a context manager.

        Raises BusyError if more than ``max_queued`` requests would wait or run, UnavailableError if no requests are
        accepted now, and InputError for a request that can never run.
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
        """Refuses new requests from now on; waiting and running requests continue."""
        self.draining = True

    def cut_off(self) -> None:
        """Refuses new requests and ends waiting and running requests with UnavailableError."""
        self.stop_taking()
        self.num_cut += self.in_system  # before they fail, which decreases `in_system`
        for feed in tuple(self._feeds):
            feed.fail(UnavailableError("the server stopped before the request was done. Ask another one."))

    async def close(self) -> None:
        """Cuts off all requests and ends the engine's thread, see `join`."""
        self.cut_off()
        await asyncio.to_thread(self.join)  # joining here would block the event loop

    def join(self) -> None:
        """Ends the engine's thread, waiting at most 10 s for a running step; needs no event loop."""
        self.stop_taking()
        self.command(self._end)
        if self._thread.is_alive():
            self._thread.join(10.0)

    def ended(self, feed: Feed, *, all_of_it: bool) -> None:
        """Counts an ended request. Its feed calls this; ``all_of_it``: the feed has no more requests."""
        now_s = time.perf_counter()
        # at most 10 s each: idle time must not count
        self._end_gap_s += 0.1 * (min(now_s - self._last_end_s, 10.0) - self._end_gap_s)
        self._last_end_s = now_s
        self.in_system -= 1
        if all_of_it:
            self._feeds.discard(feed)

    # -- the engine's thread ------------------------------------------------------------------------------------

    def command(self, function: Callable[[], None]) -> None:
        """Queues a function for the engine's thread to call between two steps."""
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
        except BaseException as error:  # whatever the error is, no client may wait for ever
            _LOGGER.exception("the engine failed")
            self._post(partial(self._fail, f"the engine failed: {as_sentence(first_line(error))}"))

    def _obey(self) -> None:
        """Runs all queued commands; blocks for one if the engine has no work."""
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
        """Schedules a function in the event loop; ends this thread if the loop is closed."""
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
