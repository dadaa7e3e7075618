"""Runs one HTTP request: submits it to the engine and sends the outputs as an answer, whole or streamed."""

import asyncio
import time
from collections.abc import Awaitable

import msgspec
from starlette.types import Receive, Scope, Send

from meshwright.serve.frontend import AbandonedError, Arrived, Feed, Frontend
from meshwright.serve.http.answers import CachedTokens, Usage, Writer
from meshwright.serve.http.asked import AskedText
from meshwright.serve.http.bodies import JsonObject, StreamOptions
from meshwright.serve.http.errors import error_of
from meshwright.serve.http.growing import GrowingText
from meshwright.serve.http.metrics import ServerMetrics

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class Exchange:
    """A request with a valid body, as a Starlette response: runs it in the engine and sends the answer; cancels it as
    soon as the client disconnects."""

    def __init__(
        self, asked: AskedText, writer: Writer, frontend: Frontend, metrics: ServerMetrics, log: JsonObject
    ) -> None:
        self.asked, self.writer, self.frontend, self.metrics, self.log = asked, writer, frontend, metrics, log
        self.choices = [GrowingText(asked, index) for index in range(len(asked.requests))]
        self.prompt_tokens = sum(len(request.prompt) for request in asked.requests[:: asked.n])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for choice in self.choices:
            choice.times.start_s = scope["state"]["start_s"]  # from the headers on, so encoding counts
        with self.frontend.open(self.asked.requests) as feed:
            watch_task = asyncio.create_task(_abandon_when_gone(receive, feed))
            try:
                await (self._stream(feed, send) if self.asked.body.stream else self._whole(feed, send))
            except AbandonedError:
                self.log["error"] = "the client disconnected"
            finally:
                watch_task.cancel()
                self._note_end()

    async def _whole(self, feed: Feed, send: Send) -> None:
        while arrivals := await feed.take():
            self._absorb(feed, arrivals)
        body = self.writer.answer(self.choices, self.usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, feed: Feed, send: Send) -> None:
        writer, stream_options = self.writer, self.asked.body.stream_options or StreamOptions()
        if stream_options.include_usage:
            writer.usage_null = b',"usage":null'
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        events = b"".join(map(writer.first, self.choices))
        try:
            if events:
                await _send(send, events)
            while arrivals := await feed.take():
                changed_choices = self._absorb(feed, arrivals)
                usage = self.usage() if stream_options.continuous_usage_stats else None
                events = b"".join([writer.event(choice, usage) for choice in changed_choices])
                if events:
                    await _send(send, events)
            last_event = writer.last(self.usage()) if stream_options.include_usage else b""
        except AbandonedError:
            raise  # the client is gone
        except Exception as error:  # the status is already sent, so the stream has the error
            status, error_answer, _ = error_of(error)
            self.log["error"] = error_answer.error.message
            last_event = b"data: " + msgspec.json.encode(error_answer) + b"\n\n"
            if status == 500:
                await send({"type": "http.response.body", "body": last_event + DONE, "more_body": False})
                raise
        await send({"type": "http.response.body", "body": last_event + DONE, "more_body": False})

    def _absorb(self, feed: Feed, arrivals: list[Arrived]) -> list[GrowingText]:
        """Adds outputs to their choices and the metrics, and returns the choices that changed."""
        choice_by_place: dict[int, GrowingText] = {}
        choices, metrics = self.choices, self.metrics
        for place, output, arrival_s in arrivals:
            choice = choices[place]
            if choice.finish:  # outputs made before the engine cancelled it at a stop string
                continue
            if not choice.started:
                metrics.prompt_tokens += len(choice.prompt)
                metrics.admitted(choice.times, output.admitted_s)
            if output.token is not None:
                metrics.generation_tokens += 1
                gap_s = choice.times.token(arrival_s)
                if gap_s is None:
                    metrics.started(choice.times)
                else:
                    metrics.inter_token.add(gap_s)
            if choice.push(output):
                feed.cancel(place)  # the engine knows stop tokens, not strings
            if choice.finish:
                metrics.ended(choice.times, choice.finish, arrival_s)
            choice_by_place[place] = choice
        return list(choice_by_place.values())

    def usage(self) -> Usage:
        """Returns the numbers of tokens so far."""
        drawn = sum(choice.num_tokens for choice in self.choices)
        # the n sequences of a prompt share it: the cached tokens of the first are counted
        num_cached = sum(choice.cached for choice in self.choices[:: self.asked.n])
        details = CachedTokens(num_cached) if num_cached else None
        total = self.prompt_tokens + drawn
        return Usage(
            prompt_tokens=self.prompt_tokens, completion_tokens=drawn, total_tokens=total, prompt_tokens_details=details
        )

    def _note_end(self) -> None:
        """Counts unfinished sequences as aborted, and adds tokens and latencies to the fields of the log line."""
        now_s = time.perf_counter()
        for choice in self.choices:
            if not choice.finish:
                self.metrics.ended(choice.times, "abort", now_s)
        ttfts_s = [choice.times.ttft_s for choice in self.choices if choice.times.ttft_s is not None]
        tpots_s = [choice.times.tpot_s for choice in self.choices if choice.times.tpot_s is not None]
        self.log |= {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(choice.num_tokens for choice in self.choices),
            "finish_reasons": [choice.finish or "abort" for choice in self.choices],
            "ttft_s": min(ttfts_s) if ttfts_s else None,
            "tpot_s": sum(tpots_s) / len(tpots_s) if tpots_s else None,
        }


def _send(send: Send, events: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": events, "more_body": True})


async def _abandon_when_gone(receive: Receive, feed: Feed) -> None:
    """Abandons the feed when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    feed.abandon()
