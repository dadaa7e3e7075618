"""The routes of the server, their handlers, and the app that serves them."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from meshwright import __version__
from meshwright.core.errors import UserError
from meshwright.serve.frontend import Frontend
from meshwright.serve.http import asked
from meshwright.serve.http.answers import ChatAnswer, ChatWriter, CompletionAnswer, CompletionWriter
from meshwright.serve.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from meshwright.serve.http.border import Border
from meshwright.serve.http.errors import RequestError, error_response
from meshwright.serve.http.exchange import Exchange
from meshwright.serve.http.metrics import ServerMetrics
from meshwright.serve.http.openapi import Operation, Schema, openapi
from meshwright.serve.http.served import ServedModel

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model; ``max_model_len`` is its number of positions, ``parent`` is the base model of an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "meshwright"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelCards(msgspec.Struct, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class TokenizerAnswer(msgspec.Struct, kw_only=True):
    """The kind and size of the server's tokenizer."""

    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    has_chat_template: bool


class VersionAnswer(msgspec.Struct):
    """The server's version."""

    version: str


class HealthAnswer(msgspec.Struct):
    """The server accepts requests."""

    status: Literal["ok"] = "ok"


OPERATIONS = (
    Operation("/v1/completions", "completions", "Text after prompts", CompletionBody, CompletionAnswer),
    Operation("/v1/chat/completions", "chat", "The next message of a chat", ChatBody, ChatAnswer),
    Operation("/tokenize", "tokenize", "Tokens of a text or a chat", TokenizeBody, TokenizeAnswer),
    Operation("/detokenize", "detokenize", "Text of tokens", DetokenizeBody, DetokenizeAnswer),
    Operation("/v1/models", "models", "The models that are served", None, ModelCards),
    Operation("/v1/models/{model}", "model", "One model", None, ModelCard),
    Operation("/tokenizer_info", "tokenizer_info", "The tokenizer's kind and size", None, TokenizerAnswer),
    Operation("/health", "health", "Whether requests are accepted", None, HealthAnswer),
    Operation("/version", "version", "The server's version", None, VersionAnswer),
    Operation("/metrics", "figures", "Figures for Prometheus", None, None),
    Operation("/openapi.json", "document", "This document", None, dict),
)
"""All routes; the second field names the method of `Handlers` that serves each."""


class Handlers:
    """The handlers of all routes. A handler takes a request (if it has a body, also the decoded body and the model that
    the body names) and returns an answer."""

    def __init__(self, frontend: Frontend, served: ServedModel, *, with_key: bool) -> None:
        self.frontend, self.served, self.with_key = frontend, served, with_key
        self.models_by_name = served.each()
        self.metrics = ServerMetrics(served.name, frontend)

    def route(self, row: Operation) -> Route:
        """Returns the route that reads an operation's body, calls its handler and encodes the answer."""
        handler, decoder = getattr(self, row.name), msgspec.json.Decoder(row.body) if row.body else None

        async def endpoint(request: Request) -> Response | Exchange:
            if decoder is None:
                answer = await handler(request)
            else:
                body = await read_body(request, decoder)
                answer = await handler(request, body, self._named(body.model))
            if isinstance(answer, Response | Exchange):
                return answer
            return Response(msgspec.json.encode(answer), media_type="application/json")

        return Route(row.path.replace("{model}", "{model:path}"), endpoint, methods=[row.method.upper()])

    async def completions(self, request: Request, body: CompletionBody, served: ServedModel) -> Exchange:
        asked_text = await asked.asked_of_completion(body, served, self.frontend)
        writer = CompletionWriter(served, request.state.request_id)
        return Exchange(asked_text, writer, self.frontend, self.metrics, request.state.known)

    async def chat(self, request: Request, body: ChatBody, served: ServedModel) -> Exchange:
        asked_text = await asked.asked_of_chat(body, served, self.frontend)
        writer = ChatWriter(served, request.state.request_id)
        return Exchange(asked_text, writer, self.frontend, self.metrics, request.state.known)

    async def tokenize(self, _: Request, body: TokenizeBody, served: ServedModel) -> TokenizeAnswer:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give a prompt or messages, one of the two.", param="prompt")
        text, adds_special = body.prompt, body.add_special_tokens is not False
        if text is None:
            text = await asked.chat_text(served, body.messages or [], body.tools, asked.template_variables(body))
            adds_special = bool(body.add_special_tokens)
        tokens = await asked.encoded(served, text, adds_special)
        token_texts = [served.piece(token)[0] for token in tokens] if body.return_token_strs else None
        max_len = self.frontend.max_len
        return TokenizeAnswer(count=len(tokens), max_model_len=max_len, tokens=tokens, token_strs=token_texts)

    async def detokenize(self, _: Request, body: DetokenizeBody, served: ServedModel) -> DetokenizeAnswer:
        asked.require_tokens(body.tokens, self.frontend.vocab_size, "tokens")
        return DetokenizeAnswer(served.whole.decode(body.tokens))

    async def models(self, _: Request) -> ModelCards:
        return ModelCards(data=list(map(self._card, self.models_by_name.values())))

    async def model(self, request: Request) -> ModelCard:
        return self._card(self._named(request.path_params["model"]))

    async def health(self, _: Request) -> HealthAnswer:
        if not self.frontend.available:
            raise RequestError(self.frontend.failure or "the server is stopping.", 503)
        return HealthAnswer()

    async def figures(self, _: Request) -> Response:
        # it predicts step times, which takes tens of milliseconds
        return Response(await asyncio.to_thread(self.metrics.text), media_type=METRICS_TYPE)

    async def tokenizer_info(self, _: Request) -> TokenizerAnswer:
        return TokenizerAnswer(
            tokenizer_class="tokenizers" if self.served.text.tokenizer else "numbers",
            vocab_size=self.frontend.vocab_size,
            max_model_len=self.frontend.max_len,
            has_chat_template=self.served.chat is not None,
        )

    async def version(self, _: Request) -> VersionAnswer:
        return VersionAnswer(__version__)

    async def document(self, _: Request) -> Schema:
        return openapi(OPERATIONS, with_key=self.with_key)

    def _card(self, served: ServedModel) -> ModelCard:
        name, parent, max_len = served.name, served.parent, self.frontend.max_len
        return ModelCard(id=name, created=served.created, root=parent or name, parent=parent, max_model_len=max_len)

    def _named(self, name: str | None) -> ServedModel:
        """Returns the model or adapter of a name (None: the base model). Raises RequestError for an unknown name."""
        served = self.models_by_name.get(self.served.name if name is None else name)
        if served is None:
            names_text = ", ".join(map(repr, self.models_by_name))
            message = f"the model {name!r} is not served here; {names_text} {'are' if self.served.adapters else 'is'}."
            raise RequestError(message, 404, param="model", code="model_not_found")
        return served


def make_app(
    frontend: Frontend, served: ServedModel, *, api_keys: Collection[str] = (), logs_requests: bool = False
) -> Starlette:
    """Returns the app that serves a model. Requests must have one of ``api_keys``, if there are any. Its lifespan
    starts and closes the front end; its ``state.metrics`` are the server's metrics."""
    handlers = Handlers(frontend, served, with_key=bool(api_keys))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        frontend.start()
        try:
            yield
        finally:
            await frontend.close()

    async def answer_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    app = Starlette(
        routes=[handlers.route(row) for row in OPERATIONS],
        lifespan=lifespan,
        middleware=[Middleware(Border, api_keys=api_keys, logs_requests=logs_requests)],
        exception_handlers=dict.fromkeys((UserError, HTTPException, ClientDisconnect, Exception), answer_error),
    )
    app.router.redirect_slashes = False
    app.state.metrics = handlers.metrics
    return app
