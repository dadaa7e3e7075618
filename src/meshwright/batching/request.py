"""A request to generate text, and its state inside a scheduler."""

from collections.abc import Hashable

import msgspec

from meshwright.core.errors import InputError


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Lengths are in tokens.

    ``output``: tokens to generate, the first by the prefill; a server sets the maximum and calls `Scheduler.stop` when
    the text ends. ``prefix``: a key shared by requests whose prompts start with the same ``prefix_len`` tokens.
    ``prefilled``: another pool has made the first token, and the KV cache of the prompt arrives with the request.
    ``source``: a key shared by requests that read the same encoder source of ``source_len`` tokens, which has separate
    pages; None without a source.
    """

    number: int
    prompt: int
    output: int
    prefix: int | None = None
    prefix_len: int = 0
    prefilled: bool = False
    source: Hashable = None
    source_len: int = 0

    def check(self) -> None:
        """Raises InputError for lengths that are out of range."""
        if self.prompt < 1 or self.output < 1 + self.prefilled:
            min_output = 1 + self.prefilled
            raise InputError(
                f"request {self.number} has a prompt of {self.prompt:,} tokens and an output of {self.output:,}."
                f" Give at least 1 token of prompt and {min_output} of output."
            )
        if not 0 <= self.prefix_len <= self.prompt:
            raise InputError(
                f"request {self.number} shares {self.prefix_len:,} tokens of a prompt of {self.prompt:,}."
                f" Give a prefix of 0 to {self.prompt:,} tokens."
            )

    @property
    def most_cached(self) -> int:
        """Tokens in the KV cache at the end; the last token is never cached."""
        return self.prompt + self.output - 1


class ActiveRequest:
    """A request inside a scheduler: waiting, in prefill, or decoding.

    A step does not update decoding requests: ``cached`` (tokens in the KV cache) and ``produced`` (output tokens so
    far) are the values at round ``joined`` (-1: not decoding yet), and both grow by one per round after it.
    ``is_ready``: its prompt is cached and its first token is known, so it decodes as soon as it is admitted.
    ``num_read``: source tokens that the encoder must read for it, 0 if another request's source is reused.
    """

    __slots__ = ("admission", "cached", "is_ready", "joined", "num_read", "produced", "request", "shared_pages")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.is_ready = request.prefilled
        self.cached = request.prompt if request.prefilled else 0
        self.produced = int(request.prefilled)
        self.joined = -1
        self.admission = -1
        self.shared_pages = self.num_read = 0

    @property
    def num_known(self) -> int:
        """Known tokens: the prompt and, after a preemption, the tokens produced before it."""
        return self.request.prompt + self.produced

    @property
    def uncached(self) -> int:
        """Tokens that remain to prefill."""
        return 0 if self.is_ready else self.request.prompt + self.produced - self.cached

    @property
    def end_round(self) -> int:
        """The round at whose start a decoding request has all its tokens."""
        return self.joined + self.request.output - self.produced
