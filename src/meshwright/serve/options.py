"""The options of an engine, independent of the devices that it will run on."""

from pathlib import Path

from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import Policy
from meshwright.core.fields import Checked, check_figures


class EngineOptions(Checked, frozen=True, kw_only=True):
    """How to serve a folder; 0 and "" mean: choose a value that suits the devices.

    ``max_len``: maximum positions of a request, at most the model's. ``max_requests``: requests that run at once, by
    default 256 (32 on CPUs). ``token_budget``: rows of a step, by default 2,048 (256 on CPUs) for each shard of
    sequences. ``page_len``: positions of a page, by default 32 on CPUs, 128 on TPUs, 16 on GPUs, times the devices that
    split a page. ``cache_bytes``: bytes of pages on each device, by default 90% of an accelerator's memory less the
    weights, or half of a CPU machine's free memory, and no more than all requests need at their longest.
    ``host_cache_bytes``: host memory for evicted pages of prompts. ``weights`` are stored in "int8", "fp8", "int4" or
    as they are (""). ``plan``: a file of `service`, which sets the mesh and options not given here. ``mesh``: an engine
    for each index of ``data``; by default see `engine_layout`. ``num_devices``: use the first ones (0: all).
    ``prefix_cache``: see `batching.limits.SchedulerLimits`. ``batch_invariant``: see `PackedStep`; by default 32
    requests then run at once, in steps of 32 tokens. ``draft``: "ngram", or the folder of a smaller model with the same
    vocabulary, which proposes ``num_drafts`` tokens a step and request, see `drawing.drafts`. ``adapters``: name in
    requests -> adapter folder.
    """

    max_len: int = 0
    max_requests: int = 0
    token_budget: int = 0
    page_len: int = 0
    cache_bytes: float = 0
    host_cache_bytes: float = 0
    cache_dtype: str = ""
    weights: str = ""
    policy: Policy = "chunked"
    prefix_cache: bool = True
    batch_invariant: bool = False
    mesh: dict[str, int] | None = None
    adapters: dict[str, Path] | None = None
    num_devices: int = 0
    plan: Path | None = None
    draft: str = ""
    num_drafts: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = "max_len", "max_requests", "token_budget", "cache_bytes", "host_cache_bytes", "page_len", "num_devices"
        check_figures(self, type(self).__name__, may_be_zero=(*fields, "max_tokens"))
        # raises InputError for dtypes that can be planned but not run
        _ = Storage(cache_dtype=self.cache_dtype or "bf16", weights=self.weights).executed  # type: ignore[arg-type]

    @property
    def drafts(self) -> int:
        """Tokens drafted for each step of a request: ``num_drafts``, or 0 without ``draft``."""
        return self.num_drafts if self.draft else 0


USUAL_ENGINE = EngineOptions()
