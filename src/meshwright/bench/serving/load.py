"""Load generator: sends requests to a server with OpenAI's routes, and records when their tokens arrive. The result is
a `ServingRecord`, as of a simulation, so that measured and simulated figures have one definition.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.batching.record import RequestTimes, ServingRecord, StepsLog
from meshwright.batching.traffic import RequestTraffic
from meshwright.core.errors import CannotRunError, InputError

_EVENT, _DONE, _ERROR = b"data: ", b"data: [DONE]", b'data: {"error"'
_FIRST_TOKEN = 10
"""Smallest token id in random prompts: lower ids are often special tokens."""
_USUAL_VOCAB = 1_000
"""Vocabulary size that is assumed where the server does not report one."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a server reports: model name, most positions of a request (None: unknown), size of the vocabulary."""

    name: str
    max_len: int | None = None
    vocab_size: int = _USUAL_VOCAB


class MeasuredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the answered requests, in seconds since `LoadClient.send` began, and a reason for each failed one."""

    record: ServingRecord
    failures: tuple[str, ...] = ()


class _Connection(asyncio.Protocol):
    """A connection for one request at a time; records the arrival time of each event of a streamed answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_open, self._streams = True, False
        self._done: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._partial = b""
        self.body = bytearray()
        self.events_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.transport.close()
            self.connection_lost(ConnectionError(f"the answer is not HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200 or not self._streams:
            self.body += body
            return
        lines = (self._partial + body).split(b"\n")
        self._partial = lines.pop()
        now_s = self._clock()
        for line in lines:
            if line.startswith(_ERROR):
                self.body += line
            elif line.startswith(_EVENT) and not line.startswith(_DONE):
                self.events_s.append(now_s)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
            self.transport.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def exchange(self, request: bytes, *, streams: bool = False) -> int:
        """Sends a request, waits for its whole answer, and returns the HTTP status."""
        self._streams, self._done = streams, asyncio.get_running_loop().create_future()
        self._begin()
        self.transport.write(request)
        await self._done
        return int(self._parser.get_status_code())


class LoadClient:
    """Sends requests to the server at ``url``. Requests in flight have separate connections, which later ones reuse.

    Raises InputError for a URL that is not http or https.
    """

    def __init__(self, url: str, *, api_key: str = "") -> None:
        url_parts = urlsplit(url)
        if url_parts.scheme not in ("http", "https") or not url_parts.hostname:
            raise InputError(f"{url!r} is not the URL of a server. Give one such as http://127.0.0.1:8000.")
        self.url, self._key, self._path = url, api_key, url_parts.path.rstrip("/").removesuffix("/v1")
        self._host, self._is_tls = url_parts.hostname, url_parts.scheme == "https"
        self._port = url_parts.port or (443 if self._is_tls else 80)
        self._idle: list[_Connection] = []
        self._zero_s = time.perf_counter()

    async def facts(self) -> ServerFacts:
        """Reads the server's model, positions and vocabulary. Raises CannotRunError if it lists no model."""
        try:
            model_card = msgspec.json.decode(await self._get("/v1/models"))["data"][0]
            name, max_len, vocab_size = model_card["id"], model_card.get("max_model_len"), _USUAL_VOCAB
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise CannotRunError(f"{self.url}/v1/models lists no models. Name a server with OpenAI's routes.") from None
        with suppress(CannotRunError, msgspec.DecodeError, KeyError, TypeError):
            vocab_size = msgspec.json.decode(await self._get("/tokenizer_info"))["vocab_size"]
        return ServerFacts(name=name, max_len=max_len, vocab_size=vocab_size)

    async def send(self, traffic: RequestTraffic, facts: ServerFacts, *, concurrency: float = np.inf) -> MeasuredLoad:
        """Sends every request at its arrival time, with at most ``concurrency`` in flight; decoding is greedy and
        ignores end tokens.

        Prompts are random tokens, equal where requests share a prefix. ITL counts events of the stream, which are
        tokens unless the server delays or joins some. Raises CannotRunError if no request is answered."""
        body = {"model": facts.name, "temperature": 0, "stream": True, "ignore_eos": True}
        body["skip_special_tokens"] = False  # a special token without text would make no event
        prompts_and_lens = zip(_prompts(traffic, facts), traffic.output.tolist(), strict=True)
        bodies = [msgspec.json.encode(body | {"prompt": p, "max_tokens": n}) for p, n in prompts_and_lens]
        http_heads = [self._head("POST", "/v1/completions", body) for body in bodies]
        sent_s, events_s = traffic.arrival_s.copy(), list[list[float]]([] for _ in bodies)
        failures, free_slots = dict[int, str](), asyncio.Semaphore(int(min(concurrency, len(bodies))))
        self._zero_s = time.perf_counter()

        async def one(number: int) -> None:
            try:
                connection = await self._connection()
                sent_s[number] = self._now()
                status = await connection.exchange(http_heads[number] + bodies[number], streams=True)
                self._keep(connection)
                if status != 200 or connection.body or not connection.events_s:
                    failures[number] = f"status {status}: {bytes(connection.body[:200]).decode(errors='replace')}"
                events_s[number] = connection.events_s
            except OSError as error:
                failures[number] = str(error)
            finally:
                free_slots.release()

        tasks = []
        for request_index, arrival_s in enumerate(traffic.arrival_s.tolist()):
            if (wait_s := arrival_s - self._now()) > 0:
                await asyncio.sleep(wait_s)
            await free_slots.acquire()
            tasks.append(asyncio.create_task(one(request_index)))
        await asyncio.gather(*tasks)
        self.close()
        return _measured(replace(traffic, arrival_s=sent_s), events_s, failures)

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().transport.close()

    def _now(self) -> float:
        return time.perf_counter() - self._zero_s

    async def _connection(self) -> _Connection:
        while self._idle:
            if (idle_connection := self._idle.pop()).is_open:
                return idle_connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._now), self._host, self._port, ssl=self._is_tls or None
        )
        return connection

    def _keep(self, connection: _Connection) -> None:
        if connection.is_open:
            self._idle.append(connection)

    def _head(self, method: str, path: str, body: bytes = b"") -> bytes:
        auth_header = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        return (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{auth_header}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()

    async def _get(self, path: str) -> bytes:
        try:
            connection = await self._connection()
            status = await connection.exchange(self._head("GET", path))
        except OSError as error:
            raise CannotRunError(f"{self.url} does not answer: {error}. Start a server there.") from None
        self._keep(connection)
        if status != 200:
            raise CannotRunError(f"{self.url}{path} answers with status {status}. Name a server with OpenAI's routes.")
        return bytes(connection.body)


def _prompts(traffic: RequestTraffic, facts: ServerFacts) -> list[list[int]]:
    """Returns random tokens for every request, different in every call, so that no prefix cache has them; requests that
    share a prefix begin with the same tokens."""
    rng = np.random.default_rng()
    prefix_seed = int(rng.integers(2**32))
    min_token = min(_FIRST_TOKEN, facts.vocab_size - 1)
    prompts = []
    for _, request in traffic.requests():
        prompt_tokens = rng.integers(min_token, facts.vocab_size, request.prompt)
        if request.prefix is not None:
            prefix_rng = np.random.default_rng([prefix_seed, request.prefix])
            prompt_tokens[: request.prefix_len] = prefix_rng.integers(min_token, facts.vocab_size, request.prefix_len)
        prompts.append(prompt_tokens.tolist())
    return prompts


def _measured(traffic: RequestTraffic, events_s: list[list[float]], failure_by_index: dict[int, str]) -> MeasuredLoad:
    """Returns the record of the requests without a failure. Raises CannotRunError if all failed."""
    answered_indices = [index for index in range(len(traffic)) if index not in failure_by_index]
    if not answered_indices:
        raise CannotRunError(f"no request was answered: {next(iter(failure_by_index.values()))}")
    answered_indices.sort(key=lambda index: traffic.arrival_s[index])
    traffic_fields = ("arrival_s", "prompt", "output", "prefix", "prefix_len")
    answered_traffic = RequestTraffic(**{field: getattr(traffic, field)[answered_indices] for field in traffic_fields})
    record = token_record(answered_traffic, [events_s[index] for index in answered_indices])
    return MeasuredLoad(record=record, failures=tuple(failure_by_index.values()))


def token_record(
    traffic: RequestTraffic,
    token_s: Sequence[Sequence[float]],
    *,
    times: RequestTimes | None = None,
    log: StepsLog | None = None,
    page_len: int = 1,
) -> ServingRecord:
    """Returns the serving record for the seconds at which each request got its tokens. ``times`` and ``log``, which may
    already have admissions and runs of steps, are extended in place."""
    times, log = times or RequestTimes(len(traffic)), log or StepsLog(1)
    for request_index, request_token_s in enumerate(token_s):
        times.first_token_s[request_index], times.ended_s[request_index] = request_token_s[0], request_token_s[-1]
        for before_s, at_s in pairwise(request_token_s):
            log.add_gap(at_s - before_s, at_s, 1)
    return ServingRecord(traffic=traffic, times=times, page_len=page_len, logs=(log,), spans=())
