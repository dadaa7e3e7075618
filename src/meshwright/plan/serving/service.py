"""A service: the requests that a served model answers, and its targets of latency and load."""

from meshwright.core.errors import InputError
from meshwright.core.fields import Checked, shown
from meshwright.core.units import parse_seconds
from meshwright.spec.strategy import MAX_SEQUENCES

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Lengths of prompt chunks, in tokens, that are tried."""

TARGETS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "ITL": "itl_s"}
"""Name of a target -> its field in `Service`, and in the figures that are compared with it."""

MAX_DRAFTS = 16
"""Largest number of drafts per step that is tried."""


class Speculation(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: a draft is right with probability ``acceptance`` and takes ``draft_cost`` of the model's
    own decode step. A step checks ``num_drafts`` drafts; None: the number that makes tokens fastest."""

    acceptance: float
    draft_cost: float = 0.05
    num_drafts: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.acceptance <= 1:
            raise InputError(f"speculation.acceptance={shown(self.acceptance)} must be above 0 and at most 1.")
        if not self.draft_cost >= 0:
            raise InputError(f"speculation.draft_cost={shown(self.draft_cost)} must be at least 0.")
        if self.num_drafts is not None and not 0 <= self.num_drafts <= MAX_DRAFTS:
            raise InputError(f"speculation.num_drafts={self.num_drafts} must be from 0 to {MAX_DRAFTS}.")

    @property
    def tried(self) -> tuple[int, ...]:
        """Numbers of drafts per step to choose from."""
        return tuple(range(MAX_DRAFTS + 1)) if self.num_drafts is None else (self.num_drafts,)


class Service(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of ``prompt_len`` tokens that are answered with ``output_len`` tokens, in the mean.

    ``prefix_share`` is the share of a prompt whose keys and values are in a cache of earlier prompts. ``ttft_s``, the
    time to the first token, ``tpot_s``, the time per output token after it, and ``itl_s``, the longest time between two
    tokens, are targets; ``requests_per_s`` is the load. None leaves one open. Engines that do both phases cut prompts
    into chunks of ``chunk_len`` tokens; None: as ``itl_s`` needs it. ``speculation``: decode checks drafts."""

    prompt_len: int
    output_len: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    requests_per_s: float | None = None
    prefix_share: float = 0.0
    speculation: Speculation | None = None
    itl_s: float | None = None
    chunk_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt_len", "output_len"):
            if not 1 <= getattr(self, name) <= MAX_SEQUENCES:
                raise InputError(f"service.{name}={getattr(self, name)} must be from 1 to {MAX_SEQUENCES:,} tokens.")
        for name in ("ttft_s", "tpot_s", "requests_per_s", "itl_s", "chunk_len"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"service.{name}={shown(value)} must be above 0. Leave it out if it is open.")
        if not 0 <= self.prefix_share < 1:
            raise InputError(f"service.prefix_share={shown(self.prefix_share)} must be a share, from 0 to below 1.")

    @property
    def targets(self) -> dict[str, float]:
        """The targets that are not open, in seconds, by the names in `TARGETS`."""
        seconds_by_target = {name: getattr(self, field) for name, field in TARGETS.items()}
        return {name: seconds for name, seconds in seconds_by_target.items() if seconds is not None}

    @property
    def load_words(self) -> str:
        """The load to four digits, ``"20 requests/s"``; "" without a load."""
        return f"{float(f'{self.requests_per_s:.4g}'):,.10g} requests/s" if self.requests_per_s else ""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunk lengths to choose from, shorter than a prompt's new tokens; () without a chunk length or ITL target."""
        if self.chunk_len is None and self.itl_s is None:
            return ()
        lengths = CHUNKS if self.chunk_len is None else (self.chunk_len,)
        return tuple(length for length in lengths if length < self.new_prompt_tokens)

    @property
    def max_len(self) -> int:
        """Positions of a sequence when it ends: prompt and output."""
        return self.prompt_len + self.output_len

    @property
    def mean_len(self) -> int:
        """Mean number of positions of a sequence during decode: the prompt and half of the output."""
        return self.prompt_len + self.output_len // 2

    @property
    def new_prompt_tokens(self) -> int:
        """Tokens of a prompt that no cached prefix covers and prefill computes, at least one."""
        return max(1, round(self.prompt_len * (1 - self.prefix_share)))


def parse_load(text: str, *, what: str = "rate") -> float:
    """Returns the requests per second in ``"20/s"``, ``"600/min"`` or ``"5e4/h"``; a bare number is per second. Raises
    InputError for other text and for a rate of 0."""
    number_text, _, unit = text.partition("/")
    period_s = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}.get(unit.strip())
    try:
        num_requests = float(number_text)
    except ValueError:
        period_s = None
    if period_s is None or not 0 < num_requests < float("inf"):
        raise InputError(f"{what} {text!r} is not a rate of requests. Write for example 20/s, 600/min or 5000/h.")
    return num_requests / period_s


def parse_target(text: str, *, what: str = "target") -> float:
    """Returns the seconds in text such as ``"20ms"``. Raises InputError for 0, and for text without a unit of time."""
    seconds = parse_seconds(text, what=what)
    if text.strip()[-1:].isdigit() or text.strip().endswith("."):
        raise InputError(f"{what} {text!r} has no unit. Write {text.strip()}ms or {text.strip()}s.")
    if not seconds > 0:
        raise InputError(f"{what} {text!r} must be above 0. Leave it out if the target is open.")
    return seconds
