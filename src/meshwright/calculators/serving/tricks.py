"""What each trick of serving brings by itself, and all of them together: narrower caches and weights, pages, drafts."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from meshwright.calculators.serving.replica import ServingReplica
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas import serving
from meshwright.spec.model import Model

LOCAL_OF, WINDOW = 6, 1024
"""Of so many layers all but the last see a window of so many positions: as in Gemma 3."""

SHARED_BY = 2
"""Neighbouring layers that keep one cache (Brandon et al., Cross-Layer Attention, 2024)."""

PAGE_LEN = 16
"""Positions of a page, as in vLLM."""


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of ``prompt_len`` and ``output_len`` tokens, their drafts, and the dollars of a chip-hour.

    A draft is right with probability ``acceptance``, and takes ``draft_cost`` of the model's own step.
    """

    prompt_len: int
    output_len: int
    acceptance: float
    draft_cost: float
    price_usd_per_hour: float | None


class _Way(msgspec.Struct, frozen=True, kw_only=True):
    """A replica and how it keeps caches and makes tokens."""

    at: ServingReplica
    paged: bool = False
    drafts: bool = False


def tricks(at: ServingReplica, asked: Requests) -> list[dict[str, Any]]:
    """Returns a row for the model without tricks, one for each of them alone, and one for all together.

    Without tricks every head has its own keys and values, all layers see and keep all positions, weights and caches are
    in 16 bits, and a cache is as long as the longest sequence, of which every position is read. A row has the bytes of
    a token's cache, the largest batch that fits, its step, and what follows: seconds and dollars of tokens, and the
    tokens of a chip over those without tricks; None where nothing fits. Drafts are as many as pay off at that batch.
    Raises InputError without a model, or if its caches are given as a number.
    """
    model = at.model
    if model is None or at.kv_token_bytes is not None:
        raise InputError("--tricks changes a model's caches. Name a model, and leave out --kv-per-token.")
    plain = _Way(at=replace(at, model=_plain(model), weights="bf16", kv="bf16"))
    rows, every = [], plain
    for name, change in _changes(model).items():
        changed = change(plain)
        rows.append({"trick": name, **_figures(changed, asked)})
        if not name.startswith("one kv head") and name != "int8 weights":
            every = change(every)
    first = {"trick": "none of these", **_figures(plain, asked)}
    found = [first, *rows, {"trick": "all together*", **_figures(every, asked)}]
    base = first["tokens_per_s_per_chip"]
    for row in found:
        rate = row["tokens_per_s_per_chip"]
        row["times"] = rate / base if rate and base else None
    return found


def _plain(model: Model) -> Model:
    """Returns the model with as many kv heads as heads and without windows; latent attention stays."""
    heads = {} if model.latent_attention else {"num_kv_heads": model.num_heads}
    return replace(model, **heads, sliding_window=None, sliding_layers=())


def _changes(model: Model) -> Mapping[str, Any]:
    """Returns each trick by name, as a function of a `_Way`."""

    def of_model(**fields: Any) -> Any:
        return lambda way: replace(way, at=replace(way.at, model=replace(way.at.model, **fields)))

    def stored(**dtypes: str) -> Any:
        return lambda way: replace(way, at=replace(way.at, **dtypes))

    found: dict[str, Any] = {}
    if not model.latent_attention:
        own = model.num_kv_heads if model.num_kv_heads < model.num_heads else max(1, model.num_heads // 8)
        found[f"{own} kv head{'s' * (own > 1)}"] = of_model(num_kv_heads=own)
        if own > 1:
            found["one kv head"] = of_model(num_kv_heads=1)
    if model.sliding_layers and model.sliding_window:
        layers, window = model.sliding_layers, model.sliding_window
    else:
        layers = tuple(layer for layer in range(model.num_layers) if (layer + 1) % LOCAL_OF)
        window = WINDOW
    local = of_model(sliding_layers=layers, sliding_window=window)
    found[f"window {window:,}, {len(layers)} layers"] = local
    found[f"{SHARED_BY} layers a cache"] = lambda way: replace(way, at=replace(way.at, layers_per_cache=SHARED_BY))
    found["int8 caches"] = stored(kv="int8")
    found["int8 weights"] = stored(weights="int8")
    found["int4 weights"] = stored(weights="int4")
    found[f"pages of {PAGE_LEN}"] = lambda way: replace(way, paged=True)
    found["drafts"] = lambda way: replace(way, drafts=True)
    return found


def _figures(way: _Way, asked: Requests) -> dict[str, Any]:
    """Returns the figures of one row."""
    at, longest = way.at, asked.prompt_len + asked.output_len
    # in the steady state a sequence has made half of its output, and its last page is half full
    positions = asked.prompt_len + asked.output_len / 2 + PAGE_LEN / 2 if way.paged else longest
    kv_bytes = at.kv_bytes(positions)
    found: dict[str, Any] = {"kv_token_bytes": at.kv_bytes(longest) / longest, "largest_batch": 0, "drafts": 0}
    names = ("step_s", "tpot_s", "tokens_per_s_per_chip", "usd_per_million_output")
    try:
        batch = at.batch_that_fits(kv_bytes)
    except CannotRunError:
        return found | dict.fromkeys(names)
    step = at.step(batch, kv_bytes)
    seconds, drafts = step.time_s, 0
    if way.drafts:
        faster = step.speedups(asked.acceptance, draft_cost=asked.draft_cost)
        drafts = int(faster.argmax())
        seconds = step.time_s / faster[drafts]
    chips, price = at.cluster.num_chips, asked.price_usd_per_hour
    rate = batch / seconds
    cost = price and serving.usd_per_million_tokens(rate, num_chips=chips, price_usd_per_hour=price)
    return found | {
        "largest_batch": batch, "drafts": drafts, "step_s": step.time_s, "tpot_s": seconds,
        "tokens_per_s_per_chip": rate / chips, "usd_per_million_output": cost,
    }  # fmt: skip
