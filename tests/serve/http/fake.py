"""An engine without a model: the token after ``t`` is ``t + 1``. Tests count what it holds."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import msgspec
from starlette.applications import Starlette
from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.nn.hf.chat_template import ChatTemplates, _compiled
from meshwright.serve.frontend import Frontend
from meshwright.serve.http.app import make_app
from meshwright.serve.http.run import DrainingServer, Listening
from meshwright.serve.http.served import ServedModel
from meshwright.serve.model_folder import Text
from meshwright.serve.request import EngineState, RequestBounds, TokenLogprob, TokenOutput, TokenRequest
from tests.serve.test_model_folder import byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].role == 'bad' %}{{ raise_exception('roles must be good') }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass
class FakeEngine:
    """Runs up to ``slots`` requests at once, in order of arrival; token ``wraps`` is 0 again. ``says`` are the tokens
    of every request, if there are any; ``fails`` is raised by the next step."""

    slots: int = 32
    max_len: int = 512
    vocab_size: int = 258
    wraps: int = 258
    delay_s: float = 0.0
    says: list[int] = field(default_factory=list)
    fails: Exception | None = None
    steps: int = 0
    cancelled: list[int] = field(default_factory=list)
    live: dict[int, tuple[TokenRequest, list[int]]] = field(default_factory=dict)
    seen: list[TokenRequest] = field(default_factory=list)

    @property
    def bounds(self) -> RequestBounds:
        return RequestBounds(self.vocab_size, self.max_len)

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def check(self, request: TokenRequest) -> None:
        if len(request.prompt) + request.max_tokens > self.max_len:
            raise InputError("too long for the engine.")

    def submit(self, request: TokenRequest) -> int:
        self.seen.append(request)
        self.live[len(self.seen)] = (request, [])
        return len(self.seen)

    def cancel(self, number: int) -> None:
        del self.live[number]
        self.cancelled.append(number)

    def step(self) -> list[TokenOutput]:
        if self.fails is not None:
            raise self.fails
        if self.delay_s:
            time.sleep(self.delay_s)
        self.steps += 1
        return [self._next(number) for number in list(self.live)[: self.slots]]

    def state(self) -> EngineState:
        running = min(len(self.live), self.slots)
        return EngineState(
            running=running,
            waiting=len(self.live) - running,
            pages_used=running,
            num_pages=self.slots,
            steps=self.steps,
        )

    def _next(self, number: int) -> TokenOutput:
        request, made = self.live[number]
        token = self.says[len(made)] if self.says else ((made or request.prompt)[-1] + 1) % self.wraps
        prompt = tuple(map(self._logprob, request.prompt[1:])) if request.echo and not made else ()
        if request.max_tokens == 0 or (token in request.stop_tokens and len(made) >= request.min_tokens):
            del self.live[number]
            return TokenOutput(number=number, finish="stop" if request.max_tokens else "length", prompt=prompt)
        made.append(token)
        done = len(made) == request.max_tokens
        if done:
            del self.live[number]
        logprob = None if request.logprobs is None else self._logprob(token, request.logprobs)
        return TokenOutput(
            number=number, token=token, logprob=logprob, prompt=prompt, finish="length" if done else None
        )

    def _logprob(self, token: int, most: int = 1) -> TokenLogprob:
        top = tuple(((token + step) % self.vocab_size, -0.5 - step) for step in range(most))
        return TokenLogprob(token=token, logprob=-0.5, top=top)


def letters() -> Tokenizer:
    """A token for each byte; the tokens of letters follow each other as the letters do."""
    return byte_tokenizer("<pad>", "</s>")


def served() -> ServedModel:
    chat = ChatTemplates({"default": _compiled(TEMPLATE)}, {"default": TEMPLATE}, {})
    return ServedModel(name="toy", text=Text(letters()), vocab_size=258, end_tokens=frozenset({1}), chat=chat)


class Bench:
    """An app with its engine, and a client that calls it without a socket."""

    def __init__(self, engine: FakeEngine, frontend: Frontend, app: Starlette, client: httpx.AsyncClient) -> None:
        self.engine, self.frontend, self.app, self.client = engine, frontend, app, client

    async def post(self, path: str, **body) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, prompt="a", **body) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **body)

    async def rest(self, most_s: float = 2.0) -> None:
        """Waits until the engine holds nothing and the front end neither."""
        until = time.perf_counter() + most_s
        front = self.frontend
        while (self.engine.live or front.in_system or front.state.running) and time.perf_counter() < until:
            await asyncio.sleep(0.002)
        assert not self.engine.live
        assert not self.frontend.in_system
        assert not self.frontend._feeds


@asynccontextmanager
async def bench(engine: FakeEngine | None = None, options: dict | None = None, **front) -> AsyncIterator[Bench]:
    """The app in this event loop."""
    engine = engine or FakeEngine()
    frontend = Frontend(engine, **front)
    app = make_app(frontend, served(), **options or {})
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as client,
    ):
        yield Bench(engine, frontend, app, client)


@asynccontextmanager
async def listening(
    engine: FakeEngine | None = None, options: dict | None = None, **front
) -> AsyncIterator[tuple[Bench, int]]:
    """The app behind a real server on a free port of the loopback."""
    engine = engine or FakeEngine()
    frontend = Frontend(engine, **front)
    app = make_app(frontend, served(), **options or {})
    where = Listening(port=0, drain_s=5)
    bound = where.bind()
    port = bound.getsockname()[1]
    server = DrainingServer(app, frontend, where)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        try:
            yield Bench(engine, frontend, app, client), port
        finally:
            await client.aclose()
            server.should_exit = True
            await task


def in_loop(test):
    """Makes a test of a coroutine function."""

    @functools.wraps(test)
    def run(*given, **named):
        asyncio.run(asyncio.wait_for(test(*given, **named), 30))

    return run


def events(text: str) -> list[dict]:
    """The objects of a stream, which ends as OpenAI's do."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]


def streamed_text(text: str, index: int = 0) -> str:
    """What a stream says, of one choice."""
    choices = [one for event in events(text) for one in event["choices"] if one["index"] == index]
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)
