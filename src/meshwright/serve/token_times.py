"""The latencies of a request, for metrics and logs. All times are seconds of `time.perf_counter`."""

import msgspec


class TokenTimes(msgspec.Struct):
    """The start of a request and the times of its tokens.

    ``start_s`` is when the server read the request's headers. A token's time is the end of the engine's step that drew
    it, so slow clients do not change it.
    """

    start_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0

    def token(self, at_s: float) -> float | None:
        """Adds a token at time ``at_s``. Returns the seconds since the previous token; None for the first."""
        self.num_tokens += 1
        if self.first_s is None:
            self.first_s = self.last_s = at_s
            return None
        gap_s, self.last_s = at_s - self.last_s, at_s
        return gap_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None before it."""
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: mean over the tokens after the first; None without one."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)
