"""What each trick of serving brings by itself, and all of them together: narrower caches and weights, pages, drafts."""

from typing import Any

from msgspec.structs import asdict, replace

from meshwright.calculators.serving.replica import ServingReplica
from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.model import Model

LOCAL_OF, WINDOW = 6, 1024
"""Of so many layers all but the last see a window of so many positions: as in Gemma 3."""
SHARED_BY = 2
"""Neighbouring layers that keep one cache (Brandon et al., Cross-Layer Attention, 2024)."""
PAGE_LEN = 16
"""Positions of a page, as in vLLM."""
FIGURES = ("step_s", "tpot_s", "tokens_per_s_per_chip", "usd_per_million_output")


class _Way(ServingReplica, frozen=True, kw_only=True):
    """A replica and how it keeps caches and makes tokens."""

    paged: bool = False
    drafts: bool = False

    def changed(self, of_model: dict[str, Any], own: dict[str, Any]) -> "_Way":
        """Returns it with other fields of the model, and other fields of its own."""
        return replace(self, model=self.model and replace(self.model, **of_model), **own)


def tricks(
    at: ServingReplica, *, prompt_len: int, output_len: int, acceptance: float, draft_cost: float
) -> list[dict[str, Any]]:
    """Returns a row for the model without tricks, one for each of them alone, and one for all together.

    Without tricks every head has its own keys and values, all layers see and keep all positions, weights and caches are
    in 16 bits, and a cache is as long as the longest sequence, of which every position is read. A row has the bytes of
    a token's cache, the largest batch that fits, its step, and what follows: seconds and dollars of tokens, and the
    tokens of a chip over those without tricks; None where nothing fits. Drafts are as many as pay off at that batch;
    one is right with probability ``acceptance``, and takes ``draft_cost`` of the model's own step.
    Raises InputError without a model, or if its caches are given as a number.
    """
    model = at.model
    if model is None or at.kv_token_bytes is not None:
        raise InputError("--tricks changes a model's caches. Name a model, and leave out --kv-per-token.")
    # as many kv heads as heads, no windows; latent attention stays
    heads = {} if model.latent_attention else {"num_kv_heads": model.num_heads}
    dense = replace(model, **heads, sliding_window=None, sliding_layers=())
    plain = every = _Way(**asdict(at) | {"model": dense, "weights": "bf16", "kv": "bf16"})
    ways = {"none of these": plain}
    for name, change in _changes(model).items():
        ways[name] = plain.changed(*change)
        if not name.startswith("one kv head") and name != "int8 weights":
            every = every.changed(*change)
    ways["all together*"] = every
    base, found = None, []
    for name, way in ways.items():
        row = {"trick": name, **_figures(way, prompt_len, output_len, acceptance, draft_cost)}
        rate = row["tokens_per_s_per_chip"]
        base = rate if name == "none of these" else base
        found.append({**row, "times": rate / base if rate and base else None})
    return found


def _changes(model: Model) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns what each trick changes: fields of the model, and of a `_Way`."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    if not model.latent_attention:
        own = model.num_kv_heads if model.num_kv_heads < model.num_heads else max(1, model.num_heads // 8)
        found[f"{own} kv head{'s' * (own > 1)}"] = {"num_kv_heads": own}, {}
        if own > 1:
            found["one kv head"] = {"num_kv_heads": 1}, {}
    layers, window = model.sliding_layers, model.sliding_window
    if not layers or not window:
        layers, window = tuple(layer for layer in range(model.num_layers) if (layer + 1) % LOCAL_OF), WINDOW
    found[f"window {window:,}, {len(layers)} layers"] = {"sliding_layers": layers, "sliding_window": window}, {}
    return found | {
        f"{SHARED_BY} layers a cache": ({}, {"layers_per_cache": SHARED_BY}),
        "int8 caches": ({}, {"kv": "int8"}),
        "int8 weights": ({}, {"weights": "int8"}),
        "int4 weights": ({}, {"weights": "int4"}),
        f"pages of {PAGE_LEN}": ({}, {"paged": True}),
        "drafts": ({}, {"drafts": True}),
    }


def _figures(at: _Way, prompt_len: int, output_len: int, acceptance: float, draft_cost: float) -> dict[str, Any]:
    """Returns the figures of one row."""
    longest = prompt_len + output_len
    # in the steady state a sequence has made half of its output, and its last page is half full
    kv_bytes = at.kv_bytes(prompt_len + output_len / 2 + PAGE_LEN / 2 if at.paged else longest)
    found: dict[str, Any] = {"kv_token_bytes": at.kv_bytes(longest) / longest, "largest_batch": 0, "drafts": 0}
    try:
        batch = at.batch_that_fits(kv_bytes)
    except CannotRunError:
        return found | dict.fromkeys(FIGURES)
    step = at.step(batch, kv_bytes)
    seconds, drafts = step.time_s, 0
    if at.drafts:
        faster = step.speedups(acceptance, draft_cost=draft_cost)
        drafts = int(faster.argmax())
        seconds = step.time_s / faster[drafts]
    rate = batch / seconds
    figures = (step.time_s, seconds, rate / at.cluster.num_chips, at.usd_per_million_tokens(rate))
    return found | {"largest_batch": batch, "drafts": drafts} | dict(zip(FIGURES, figures, strict=True))
