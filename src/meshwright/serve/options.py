"""What an engine is asked to be, before any device is looked at."""

from pathlib import Path

from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import Policy
from meshwright.core.fields import Checked, check_figures


class EngineOptions(Checked, frozen=True, kw_only=True):
    """How a folder is served; 0 and "" stand for a value that suits the devices.

    ``max_len``: positions of a request, at most the model's. ``max_requests``: requests that run at once, by default
    256, 32 on CPUs. ``token_budget``: rows of a step, by default 2,048, 256 on CPUs, for each place with requests of
    its own. ``page_len``: positions of a page, by default 32 on CPUs, 128 on TPUs, 16 on GPUs, on each device that has
    part of it. ``cache_bytes`` of each device hold pages: by default 90% of what the weights leave of an accelerator's
    memory, or half of a machine's free memory, but no more than all requests need at their longest.
    ``host_cache_bytes`` of the host hold pages of prompts that lost their room.
    ``weights`` are stored in "int8", "fp8", "int4" or as they are (""). ``plan`` is a file of `service`, which
    says the mesh, and what is not given of these. ``mesh`` has an engine for each of ``data``; by default see
    `usual_mesh`, on the first ``num_devices`` (0: all). ``prefix_cache``: see `batching.limits.SchedulerLimits`.
    ``batch_invariant``: see `PackedStep`; up to 32 requests then run at once, in steps of 32 tokens. ``draft``:
    "ngram", or the folder of a smaller model with the same tokens, which proposes ``num_drafts`` tokens for each step
    of a request; see `drawing.drafts`. ``adapters`` of the model are the folders of their weights by the name that
    requests give.
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
        # refuses dtypes that are planned and not executed
        _ = Storage(cache_dtype=self.cache_dtype or "bf16", weights=self.weights).executed  # type: ignore[arg-type]

    @property
    def drafts(self) -> int:
        """Tokens that are drafted for each step of a request."""
        return self.num_drafts if self.draft else 0


USUAL_ENGINE = EngineOptions()
