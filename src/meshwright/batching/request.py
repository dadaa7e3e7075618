"""A request to generate text, and its state inside a scheduler."""

from collections.abc import Hashable

import msgspec

from meshwright.core.errors import InputError


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Lengths are in tokens.

    ``output``: tokens to generate, the first by the prefill; a server gives the most that it allows and calls
    `Scheduler.stop` when the text ends. ``prefix``: a key that requests share whose prompts start with the same
    ``prefix_len`` tokens. ``prefilled``: another pool has made the first token, and the KV cache of the prompt
    arrives with the request. ``source``: a key that requests share whose decoders read the same source, of
    ``source_len`` tokens, which has pages of its own; None without one.
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
        """Raises InputError if a length is not possible."""
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
        """Tokens in the KV cache when the last token is out, which itself is never cached."""
        return self.prompt + self.output - 1


class ActiveRequest:
    """A request inside a scheduler: waiting, in prefill, or decoding.

    A decoding request is not touched in a step. ``cached`` (tokens in the KV cache) and ``produced`` (output tokens so
    far) are those at round ``joined``, since when both have grown by one in each round; ``joined`` is -1 before that.
    ``is_ready``: its prompt is in the cache and its first token is known, so that it decodes when it is admitted.
    ``num_read`` are the tokens of its source that are to be read for it, 0 if another request has had it read.
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
        """Tokens of the prompt, and after a preemption those produced before it."""
        return self.request.prompt + self.produced

    @property
    def uncached(self) -> int:
        """Tokens to prefill."""
        return 0 if self.is_ready else self.request.prompt + self.produced - self.cached

    @property
    def end_round(self) -> int:
        """The round before which a decoding request has produced its last token."""
        return self.joined + self.request.output - self.produced
