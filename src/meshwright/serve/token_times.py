"""What is measured of a request, defined once for metrics and logs. All times are seconds of `time.perf_counter`."""

import msgspec


class TokenTimes(msgspec.Struct):
    """When a sequence was asked for, and when its tokens came.

    ``start_s`` is when the head of its request was read. A token comes when the engine's step that made it ends, so
    that a client that reads slowly changes nothing.
    """

    start_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0

    def token(self, at_s: float) -> float | None:
        """Notes a token. Returns the inter-token latency, the time since the one before; None for the first."""
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
