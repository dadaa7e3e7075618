"""The requests that an engine takes, their limits, and the outputs that it returns for each step."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.core.errors import InputError, nearest
from meshwright.core.units import counted
from meshwright.serve.drawing.sampling import LIKELIEST, Sampling
from meshwright.serve.step_sums import StepKey, StepSums
from meshwright.spec.model import Model

if TYPE_CHECKING:
    from llguidance import LLMatcher

Finish = Literal["stop", "length"]

MOST_LOGPROBS = 20
"""Maximum likeliest tokens reported for each position: OpenAI's limit for chats."""


class SourceFeatures:
    """The input of an encoder that reads features: floats [features, 2 positions]. Equal arrays compare equal."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = np.ascontiguousarray(values, np.float32)
        self.digest = hashlib.sha256(self.values.tobytes()).digest()

    def __len__(self) -> int:
        return int(self.values.shape[1]) // 2

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceFeatures) and self.digest == other.digest


Prompt = Sequence[int] | SourceFeatures
"""The input to generate from: tokens, or features for an encoder."""


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue. Output ends before a token of ``stop_tokens`` (not before ``min_tokens``), or after
    ``max_tokens``. ``logprobs``: how many likeliest tokens to report at each position (0: only the drawn token's
    log-probability; None: nothing); with ``echo`` prompt tokens are reported too, and ``max_tokens`` may be 0. With a
    ``grammar`` (the matcher of an empty answer) the output is a text of it, unless ``max_tokens`` cuts it off.
    ``adapter`` names one of the engine's adapters, "" for none. With an encoder-decoder model, the encoder reads
    ``source`` and the answer continues the prompt, or the model's start tokens if the prompt is empty; without
    ``source`` the encoder reads the prompt and the answer continues the start tokens. Raises InputError for a request
    that no engine could run."""

    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    sampling: Sampling = LIKELIEST
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    echo: bool = False
    grammar: "LLMatcher | None" = None
    adapter: str = ""
    source: tuple[int, ...] | SourceFeatures = ()

    @classmethod
    def of(cls, prompt: "Prompt", **fields: Any) -> "TokenRequest":
        """Returns a request for a prompt; features become its ``source``. ``fields`` are its other fields."""
        if isinstance(prompt, SourceFeatures):
            return cls(prompt=(), source=prompt, **fields)
        return cls(prompt=tuple(prompt), **fields)

    def __post_init__(self) -> None:
        for name, kind in (("prompt", tuple), ("max_tokens", int), ("min_tokens", int), ("sampling", Sampling)):
            if not isinstance(value := getattr(self, name), kind):
                raise InputError(f"TokenRequest.{name} is {value!r:.80}. Give a {kind.__name__}.")
        if wrong_kinds := [kind.__name__ for kind in set(map(type, self.prompt)) if not issubclass(kind, Integral)]:
            raise InputError(f"TokenRequest.prompt has a {wrong_kinds[0]}. Give the numbers of its tokens.")
        if not self.prompt and not self.source:
            raise InputError("the prompt is empty. Give at least one word or token.")
        if self.max_tokens < (0 if self.echo else 1):
            raise InputError(f"max_tokens={self.max_tokens} must be at least 1, or 0 with echo.")
        if self.min_tokens < 0 or self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens={self.min_tokens} must be between 0 and max_tokens={self.max_tokens}.")
        if self.grammar and self.min_tokens > (not self.grammar.is_accepting()):  # 1 if no text of the grammar is empty
            raise InputError(f"min_tokens={self.min_tokens} and a grammar exclude each other. Give one.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InputError(f"logprobs={self.logprobs} must be between 0 and {MOST_LOGPROBS}.")


class RequestBounds(NamedTuple):
    """The limits of an engine's requests: tokens below ``vocab_size``, at most ``max_len`` positions, the names of
    adapters. An encoder reads at most ``source_len`` positions of tokens, or exactly ``source_len`` of ``features``
    (0: tokens), and its decoder starts with ``start_tokens``."""

    vocab_size: int
    max_len: int
    adapters: Collection[str] = ()
    source_len: int = 0
    start_tokens: tuple[int, ...] = ()
    features: int = 0

    @classmethod
    def of(cls, model: Model, max_len: int, adapters: Collection[str] = ()) -> "RequestBounds":
        """Returns the limits of an engine that serves a model with ``max_len`` positions and these adapters."""
        encoder = model.encoder
        if encoder is None:
            return cls(model.vocab_size, max_len, adapters)
        return cls(model.vocab_size, max_len, adapters, encoder.length, encoder.start, encoder.features)

    def room(self, prompt_len: int) -> int:
        """Returns the positions left for an answer to a prompt; with an encoder only start tokens precede it."""
        return self.max_len - (len(self.start_tokens) if self.source_len else prompt_len)

    def resolved(self, request: TokenRequest) -> TokenRequest:
        """Returns the request with prompt and source set as an encoder-decoder model reads them, see `TokenRequest`."""
        if not self.source_len or (request.source and request.prompt):
            return request
        return replace(request, source=request.source or request.prompt, prompt=self.start_tokens)

    def check(self, request: TokenRequest) -> None:
        """Raises InputError for a request that this engine could never run."""
        if request.source and not self.source_len:
            raise InputError("this model has no encoder, and a source is given. Give only a prompt.")
        if self.source_len and request.echo and not request.source:
            raise InputError("an encoder reads the prompt, which is no part of the answer. Leave echo out.")
        request = self.resolved(request)
        self._check_form(request)
        if len(request.source) > self.source_len:
            raise InputError(
                f"a source of {counted(len(request.source), 'token')} needs as many positions; the encoder has "
                f"{self.source_len:,}. Shorten it."
            )
        if request.adapter and request.adapter not in self.adapters:
            hint = nearest(request.adapter, list(self.adapters)) if self.adapters else " Give --adapters NAME=FOLDER."
            raise InputError(f"this engine has no adapter {request.adapter!r}.{hint}")
        num_in, vocab = len(request.prompt), self.vocab_size
        source_tokens = () if isinstance(request.source, SourceFeatures) else request.source
        known_tokens = *request.prompt, *source_tokens
        if wrong_tokens := [token for token in (min(known_tokens), max(known_tokens)) if not 0 <= token < vocab]:
            raise InputError(f"the prompt has token {wrong_tokens[0]}, outside of V={vocab}. Give 0 to {vocab - 1}.")
        if num_in + request.max_tokens > self.max_len:
            raise InputError(
                f"a prompt of {counted(num_in, 'token')} and {request.max_tokens:,} more need "
                f"{num_in + request.max_tokens:,} positions; this engine has {self.max_len:,}. Shorten the prompt, ask "
                f"for fewer tokens, or give a larger max_len if the model has more positions."
            )
        for token in (*request.stop_tokens, *(token for token, _ in request.sampling.logit_bias)):
            if not 0 <= token < vocab:
                raise InputError(f"token {token} is outside of V={vocab}. Use the model's own tokenizer.")

    def _check_form(self, request: TokenRequest) -> None:
        """Raises InputError if the source is not what the encoder reads: features of its shape, or tokens."""
        shape = request.source.values.shape if isinstance(request.source, SourceFeatures) else ()
        if self.features and shape != (self.features, 2 * self.source_len):
            raise InputError(
                f"the encoder reads features [{self.features}, {2 * self.source_len}], and the source is "
                f"{list(shape) or 'tokens'}. Give a NumPy file of an array of that shape."
            )
        if shape and not self.features:
            raise InputError("the encoder reads tokens, and the source is of features. Give tokens.")


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A token, its log-probability, and (token, log-probability) of the likeliest at its position, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The output of one step for a request: a token, the end, or both.

    ``token`` is None if the request ends without one: before a stop token, or with ``max_tokens`` 0. Only in a
    request's first output, ``prompt`` has the log-probabilities of its prompt from the second token on (with ``echo``)
    and ``cached`` counts prompt tokens found in the prefix cache. ``admitted_s`` is when the request was first
    scheduled, in seconds of `time.perf_counter`, 0 if not known.
    """

    number: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    cached: int = 0
    admitted_s: float = 0.0


class EngineState(msgspec.Struct, kw_only=True):
    """The requests that run and wait now, and pages in use; and counts since the start: preemptions, prompt tokens
    looked up (``prefix_queries``) and found (``prefix_hits``) in the prefix cache, tokens copied back from the host
    (``host_hits``), steps, drafted and accepted tokens. ``sums`` keeps changing while the engine runs: copy it to
    read it."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    num_pages: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    host_hits: int = 0
    sums: dict[StepKey, StepSums] = {}


class TokenEngine(Protocol):
    """Interface that runs requests step by step. Call it from one thread, except ``check``, which like `submit` raises
    InputError for a request outside ``bounds``. After `cancel` a request has no output. `step` dispatches a step and
    returns the outputs of the previous one."""

    bounds: RequestBounds
    max_len: int
    vocab_size: int
    check: Callable[[TokenRequest], None]

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: TokenRequest) -> int: ...
    def cancel(self, number: int) -> None: ...
    def step(self) -> list[TokenOutput]: ...
    def state(self) -> EngineState: ...

    def steps(
        self, requests: Sequence[TokenRequest], most: int | None = None
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Runs all requests, at most ``most`` submitted at once (None: all), and yields for each step its outputs, each
        with the index of its request."""
        waiting_requests, index_by_number = iter(enumerate(requests)), dict[int, int]()
        while True:
            for index, request in islice(waiting_requests, None if most is None else most - len(index_by_number)):
                index_by_number[self.submit(request)] = index
            if not self.has_work:
                return
            outputs = self.step()
            yield [(index_by_number[output.number], output) for output in outputs]
            for request_number in [output.number for output in outputs if output.finish is not None]:
                del index_by_number[request_number]

    def run(self, requests: Sequence[TokenRequest]) -> list[list[TokenOutput]]:
        """Runs all requests and returns the outputs of each."""
        outputs_by_request = [list[TokenOutput]() for _ in requests]
        for outputs in self.steps(requests):
            for index, output in outputs:
                outputs_by_request[index].append(output)
        return outputs_by_request
