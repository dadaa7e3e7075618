"""The limits of a scheduler: policy, requests, tokens and pages."""

from typing import Literal, get_args

import msgspec

from meshwright.core.errors import InputError, require_known

Policy = Literal["static", "interleaved", "chunked"]
"""``static``: a batch is prefilled at once and keeps its slots until its longest output ends. ``interleaved``: whole
prompts are prefilled as soon as there is room, in steps that do not decode. ``chunked``: every step decodes all
running requests and spends the rest of its token budget on prompts, in chunks (Agrawal et al., Sarathi-Serve, 2024;
the default of vLLM V1). Source of the first two: How to Scale Your Model, section 7."""

POLICIES: tuple[Policy, ...] = get_args(Policy)


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one replica.

    ``max_requests``: requests that run at once (slots). ``token_budget``: tokens of a step, decoded ones included;
    ``interleaved`` prefills a longer prompt in a separate step, and ``static`` ignores the budget. ``num_pages`` of
    ``page_len`` tokens hold the KV cache. ``watermark``: share of the pages that stays free when a request is admitted,
    so that it is not preempted at once (vLLM: 0.01 in V0, 0 in V1). ``prefix_cache``: pages of shared prefixes stay
    cached after their requests end, until the pages are needed. ``look_every``: while requests decode, new ones are
    admitted only every so many steps, counted from the last prefill (SGLang's --scheduler-recv-interval).
    ``num_drafts``: drafts that a step may check per decoding request; pages and budget reserve room for them.
    """

    policy: Policy = "chunked"
    max_requests: int = 256
    token_budget: int = 2048
    page_len: int = 16
    num_pages: int
    watermark: float = 0.01
    prefix_cache: bool = False
    look_every: int = 1
    num_drafts: int = 0

    def check(self) -> None:
        """Raises InputError for limits that are out of range or contradict each other."""
        require_known("policy", self.policy, POLICIES)
        for name in ("max_requests", "token_budget", "page_len", "num_pages", "look_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name):,}. Give a positive number.")
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark is {self.watermark:g}. Give a share of the pages from 0 to below 1.")
        if self.num_drafts < 0:
            raise InputError(f"num_drafts is {self.num_drafts}. Give a positive number, or 0 for none.")
        if self.num_drafts and self.policy != "chunked":
            raise InputError(f"drafts need the policy chunked, not {self.policy}. Change one of the two.")
        tokens_each = 1 + self.num_drafts
        if self.policy == "chunked" and self.token_budget < self.max_requests * tokens_each:
            words, budget = "a token" if tokens_each == 1 else f"{tokens_each} tokens", self.max_requests * tokens_each
            raise InputError(
                f"token_budget={self.token_budget:,} is less than max_requests={self.max_requests:,}, each of which"
                f" decodes {words} in every step. Give a budget of {budget:,} or more, or fewer requests."
            )

    def source_pages(self, num_tokens: int) -> int:
        """Returns the number of pages for a source of ``num_tokens``."""
        return -(-num_tokens // self.page_len)

    def pages(self, num_tokens: int) -> int:
        """Returns the number of pages for ``num_tokens`` of one request and its drafts."""
        return -(-(num_tokens + self.num_drafts) // self.page_len)
