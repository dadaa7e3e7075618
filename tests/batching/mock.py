"""A clock whose times are worked out by hand, and the requests and bounds that tests draw."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from meshwright.batching.clock import Clock
from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.scheduler import EngineStep
from meshwright.batching.traffic import RequestTraffic, traffic_of


class AffineClock(Clock):
    """Seconds that are a constant plus multiples of each load."""

    def __init__(self, base: float, per_decode: float = 0.0, per_cached: float = 0.0, per_prefill: float = 0.0) -> None:
        self.base, self.per_decode, self.per_cached, self.per_prefill = base, per_decode, per_cached, per_prefill

    def step_s(self, num_decode: Any, cached_tokens: Any, prefill_tokens: Any, prefill_past: Any) -> Any:
        return (
            self.base
            + self.per_decode * num_decode
            + self.per_cached * cached_tokens
            + self.per_prefill * prefill_tokens * (prefill_past + 1)
        )


MOST_TOKENS = 53
"""In the cache, of the longest request that is drawn."""


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    """Small bounds of any policy, with few pages, so that requests wait and are preempted."""
    max_requests, page_len = draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 4, 16]))
    least_pages = -(-MOST_TOKENS // page_len)
    return SchedulerLimits(
        policy=draw(st.sampled_from(["static", "interleaved", "chunked"])),
        max_requests=max_requests,
        token_budget=max_requests + draw(st.integers(0, 20)),
        page_len=page_len,
        num_pages=draw(st.integers(least_pages, 2 * least_pages)),
        watermark=draw(st.sampled_from([0.0, 0.05])),
        prefix_cache=draw(st.booleans()),
        look_every=draw(st.sampled_from([1, 1, 4, 30])),
    )


@st.composite
def traffic(draw: st.DrawFn) -> RequestTraffic:
    """Up to 30 requests, many at the same time or just as a step ends."""
    count = draw(st.sampled_from([1, 4, 12, 30]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    span = draw(st.sampled_from([0, 20, 400]))
    arrival_s = generator.integers(0, span, count, endpoint=True) * draw(st.sampled_from([1.0, 0.37]))
    prompt = generator.integers(1, 30, count)
    prefix_len = np.minimum(prompt, generator.integers(0, 20, count))
    return traffic_of(arrival_s, prompt, generator.integers(1, 25, count), generator.integers(-1, 3, count), prefix_len)


CLOCKS = st.sampled_from([AffineClock(1.0), AffineClock(0.9, 0.013, 0.0007, 0.011)])


class MockEngine:
    """Writes texts whose next token is a sum over the tokens in its cache, so that a wrong cache shows in the text."""

    def __init__(self, traffic: RequestTraffic) -> None:
        self.prompts = {}
        for _, request in traffic.requests():
            shared = [(request.prefix or 0) + at for at in range(request.prefix_len)]
            own = [1000 * request.number + at for at in range(request.prompt - request.prefix_len)]
            self.prompts[request.number] = shared + own
        self.texts = {number: list(prompt) for number, prompt in self.prompts.items()}
        self.caches: dict[int, list[int]] = {}
        self.prefix_caches: dict[int, list[int]] = {}

    @staticmethod
    def next_token(cache: list[int]) -> int:
        return sum((at + 1) * token for at, token in enumerate(cache)) % 97

    def alone(self, number: int, output: int) -> list[int]:
        """What a request gets that no other one disturbs."""
        text = list(self.prompts[number])
        for _ in range(output):
            text.append(self.next_token(text))
        return text

    def run(self, step: EngineStep) -> None:
        for active in step.preempted:
            del self.caches[active.request.number]
        for active in step.admitted:
            found = self.prefix_caches[active.request.prefix][: active.cached] if active.cached else []
            assert len(found) == active.cached
            self.caches[active.request.number] = list(found)
        assert sum(len(self.caches[active.request.number]) for active in step.decode) == step.cached_tokens
        for active, num in (*((active, 1) for active in step.decode), *step.prefill):
            number, request = active.request.number, active.request
            text, cache = self.texts[number], self.caches[number]
            cache += text[len(cache) : len(cache) + num]
            if len(cache) == len(text):
                text.append(self.next_token(cache))
            if request.prefix is not None:
                known = self.prefix_caches.get(request.prefix, [])
                self.prefix_caches[request.prefix] = max(known, cache[: request.prefix_len], key=len)
