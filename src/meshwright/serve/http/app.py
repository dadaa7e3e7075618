"""The routes of the server."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Literal

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
from meshwright.serve.http.answers import ChatWriter, CompletionWriter
from meshwright.serve.http.asked import (
    asked_of_chat,
    asked_of_completion,
    chat_text,
    encoded,
    require_tokens,
    template_variables,
)
from meshwright.serve.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from meshwright.serve.http.border import Border, log_to_stderr
from meshwright.serve.http.errors import RequestError, error_response
from meshwright.serve.http.exchange import Exchange
from meshwright.serve.http.metrics import ServerMetrics
from meshwright.serve.http.openapi import openapi
from meshwright.serve.http.served import ServedModel
from meshwright.serve.model_folder import TokenizedText

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``api_keys``: one of them must be sent, if there are any. ``most_body_bytes``: largest body that is read.
    ``log``: whether a line of JSON on standard error says of each request what it was and took."""

    api_keys: tuple[str, ...] = ()
    most_body_bytes: int = 2**24
    log: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served; ``max_model_len`` are its positions."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "meshwright"
    root: str
    parent: None = None
    max_model_len: int


class ModelCards(msgspec.Struct, kw_only=True):
    """All models that are served."""

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
    """What the server's tokenizer is."""

    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    has_chat_template: bool


class VersionAnswer(msgspec.Struct):
    """The server's version."""

    version: str


class HealthAnswer(msgspec.Struct):
    """Whether requests are taken."""

    status: Literal["ok"] = "ok"


class Handlers:
    """The functions behind the routes of one model."""

    def __init__(self, frontend: Frontend, served: ServedModel, options: HttpOptions) -> None:
        self.frontend, self.served, self.options = frontend, served, options
        self.metrics = ServerMetrics(served.name, frontend)
        self._completion, self._chat = msgspec.json.Decoder(CompletionBody), msgspec.json.Decoder(ChatBody)
        self._tokenize, self._detokenize = msgspec.json.Decoder(TokenizeBody), msgspec.json.Decoder(DetokenizeBody)

    def routes(self) -> list[Route]:
        """Returns all routes."""
        posts: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/health": self.health,
            "/metrics": self.figures,
            "/tokenizer_info": self.tokenizer_info,
            "/version": self.version,
            "/openapi.json": self.document,
        }
        return [
            *(Route(path, function, methods=["POST"]) for path, function in posts.items()),
            *(Route(path, function, methods=["GET"]) for path, function in gets.items()),
        ]

    async def completions(self, request: Request) -> Exchange:
        body = await read_body(request, self._completion, self.options.most_body_bytes)
        self._require_model(body.model)
        asked = await asked_of_completion(body, self.served, self.frontend)
        writer = CompletionWriter(self.served, f"cmpl-{request.state.request_id}", int(time.time()))
        return Exchange(asked, writer, self.frontend, self.metrics, request.state.log)

    async def chat(self, request: Request) -> Exchange:
        body = await read_body(request, self._chat, self.options.most_body_bytes)
        self._require_model(body.model)
        asked = await asked_of_chat(body, self.served, self.frontend)
        writer = ChatWriter(self.served, f"chatcmpl-{request.state.request_id}", int(time.time()))
        return Exchange(asked, writer, self.frontend, self.metrics, request.state.log)

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, self._tokenize, self.options.most_body_bytes)
        self._require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give a prompt or messages, one of the two.", param="prompt")
        special = body.add_special_tokens
        if body.prompt is not None:
            tokens = await encoded(self.served, body.prompt, special is not False)
        else:
            text = chat_text(self.served, body.messages or [], body.tools, template_variables(body))
            tokens = await encoded(self.served, text, bool(special))
        names = (
            [self.served.token_bytes(one).decode(errors="replace") for one in tokens]
            if body.return_token_strs
            else None
        )
        length = self.frontend.max_len
        return _json(TokenizeAnswer(count=len(tokens), max_model_len=length, tokens=tokens, token_strs=names))

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, self._detokenize, self.options.most_body_bytes)
        self._require_model(body.model)
        require_tokens(body.tokens, self.frontend.vocab_size, "tokens")
        return _json(DetokenizeAnswer(self.served.whole.decode(body.tokens)))

    async def models(self, _: Request) -> Response:
        return _json(ModelCards(data=[self._card]))

    async def model(self, request: Request) -> Response:
        self._require_model(request.path_params["model"])
        return _json(self._card)

    async def health(self, _: Request) -> Response:
        if not self.frontend.available:
            raise RequestError(self.frontend.failure or "the server is stopping.", 503)
        return _json(HealthAnswer())

    async def figures(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=METRICS_TYPE)

    async def tokenizer_info(self, _: Request) -> Response:
        return _json(
            TokenizerAnswer(
                tokenizer_class="tokenizers" if isinstance(self.served.text, TokenizedText) else "numbers",
                vocab_size=self.frontend.vocab_size,
                max_model_len=self.frontend.max_len,
                has_chat_template=self.served.chat is not None,
            )
        )

    async def version(self, _: Request) -> Response:
        return _json(VersionAnswer(__version__))

    async def document(self, _: Request) -> Response:
        return Response(self._document, media_type="application/json")

    @cached_property
    def _document(self) -> bytes:
        bodies = {
            "/v1/completions": CompletionBody,
            "/v1/chat/completions": ChatBody,
            "/tokenize": TokenizeBody,
            "/detokenize": DetokenizeBody,
        }
        answers = {
            "/tokenize": TokenizeAnswer,
            "/detokenize": DetokenizeAnswer,
            "/v1/models": ModelCards,
            "/v1/models/{model}": ModelCard,
            "/health": HealthAnswer,
            "/tokenizer_info": TokenizerAnswer,
            "/version": VersionAnswer,
        }
        return msgspec.json.encode(openapi(bodies, answers, with_key=bool(self.options.api_keys)))

    @property
    def _card(self) -> ModelCard:
        name, length = self.served.name, self.frontend.max_len
        return ModelCard(id=name, created=self.served.created, root=name, max_model_len=length)

    def _require_model(self, name: str | None) -> None:
        if name is not None and name != self.served.name:
            message = f"the model {name!r} is not served here; {self.served.name!r} is."
            raise RequestError(message, 404, param="model", code="model_not_found")


def make_app(frontend: Frontend, served: ServedModel, options: HttpOptions | None = None) -> Starlette:
    """Returns the app that serves a model. Its lifespan starts the front end and closes it."""
    options = options or HttpOptions()
    handlers = Handlers(frontend, served, options)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        frontend.start()
        try:
            yield
        finally:
            await frontend.close()

    async def answer_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def answer_nothing(_: Request, error: Exception) -> Response:
        return Response(status_code=400)  # the client has gone before its body was read

    app = Starlette(
        routes=handlers.routes(),
        lifespan=lifespan,
        middleware=[Middleware(Border, api_keys=options.api_keys, log=log_to_stderr if options.log else None)],
        exception_handlers={
            UserError: answer_error,
            HTTPException: answer_error,
            ClientDisconnect: answer_nothing,
            Exception: answer_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
