"""What each trick of serving brings by itself, and all together: caches that are smaller, narrower or paged, drafts."""

from msgspec.structs import asdict, replace

from meshwright.calculators.serving.replica import ServingReplica
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted
from meshwright.report.answer import Facts
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

    def changed(self, of_model: Facts, own: Facts) -> "_Way":
        """Returns a copy with fields of the model replaced by ``of_model``, and fields of the replica by ``own``."""
        return replace(self, model=self.model and replace(self.model, **of_model), **own)


def tricks(
    at: ServingReplica, *, prompt_len: int, output_len: int, acceptance: float, draft_cost: float
) -> list[Facts]:
    """Returns a row for the model without tricks, one for each trick by itself, and one for all tricks together.

    Without tricks every head has its own keys and values, all layers attend to and keep all positions, weights and
    caches are in 16 bits, and a cache is as long as the longest sequence and read whole. A row has the bytes of a
    token's cache, the largest batch that fits and its step: TPOT, dollars, tokens/s per chip, also over the first
    row's; None where nothing fits. The number of drafts is the best at that batch; each is right with probability
    ``acceptance`` and takes ``draft_cost`` of a step. Raises InputError without a model, or if the cache of a token is
    given as a number.
    """
    model = at.model
    if model is None or at.kv_token_bytes is not None:
        raise InputError("--tricks changes a model's caches. Name a model, and leave out --kv-per-token.")
    # as many kv heads as heads, no windows; latent attention stays
    head_fields = {} if model.latent_attention else {"num_kv_heads": model.num_heads}
    dense_model = replace(model, **head_fields, sliding_window=None, sliding_layers=())
    plain_way = combined_way = _Way(**asdict(at) | {"model": dense_model, "weights": "bf16", "kv": "bf16"})
    way_by_trick = {"none of these": plain_way}
    for name, change in _changes(model).items():
        way_by_trick[name] = plain_way.changed(*change)
        if not name.startswith("one kv head") and name != "int8 weights":
            combined_way = combined_way.changed(*change)
    way_by_trick["all together*"] = combined_way
    base_tokens_per_s, rows = None, []
    for name, trick_way in way_by_trick.items():
        row = {"trick": name, **_figures(trick_way, prompt_len, output_len, acceptance, draft_cost)}
        tokens_per_s = row["tokens_per_s_per_chip"]
        base_tokens_per_s = tokens_per_s if name == "none of these" else base_tokens_per_s
        rows.append({**row, "times": tokens_per_s / base_tokens_per_s if tokens_per_s and base_tokens_per_s else None})
    return rows


def _changes(model: Model) -> dict[str, tuple[Facts, Facts]]:
    """Returns what each trick changes: fields of the model, and of a `_Way`."""
    changes: dict[str, tuple[Facts, Facts]] = {}
    if not model.latent_attention:
        num_kv_heads = model.num_kv_heads if model.num_kv_heads < model.num_heads else max(1, model.num_heads // 8)
        changes[counted(num_kv_heads, "kv head")] = {"num_kv_heads": num_kv_heads}, {}
        if num_kv_heads > 1:
            changes["one kv head"] = {"num_kv_heads": 1}, {}
    sliding, window = model.sliding_layers, model.sliding_window
    if not sliding or not window:
        sliding, window = tuple(layer for layer in range(model.num_layers) if (layer + 1) % LOCAL_OF), WINDOW
    changes[f"window {window:,}, {len(sliding)} layers"] = {"sliding_layers": sliding, "sliding_window": window}, {}
    return changes | {
        f"{SHARED_BY} layers a cache": ({}, {"layers_per_cache": SHARED_BY}),
        "int8 caches": ({}, {"kv": "int8"}),
        "int8 weights": ({}, {"weights": "int8"}),
        "int4 weights": ({}, {"weights": "int4"}),
        f"pages of {PAGE_LEN}": ({}, {"paged": True}),
        "drafts": ({}, {"drafts": True}),
    }


def _figures(way: _Way, prompt_len: int, output_len: int, acceptance: float, draft_cost: float) -> Facts:
    """Returns a row of `tricks` for one replica: bytes of a token's cache, largest batch, drafts, and `FIGURES`."""
    max_positions = prompt_len + output_len
    # in the steady state a sequence has made half of its output, and its last page is half full
    kv_bytes = way.kv_bytes(prompt_len + output_len / 2 + PAGE_LEN / 2 if way.paged else max_positions)
    row: Facts = {"kv_token_bytes": way.kv_bytes(max_positions) / max_positions, "largest_batch": 0, "drafts": 0}
    try:
        batch = way.batch_that_fits(kv_bytes)
    except CannotRunError:
        return row | dict.fromkeys(FIGURES)
    step = way.step(batch, kv_bytes)
    token_s, num_drafts = step.time_s, 0
    if way.drafts:
        speedups = step.speedups(acceptance, draft_cost=draft_cost)
        num_drafts = int(speedups.argmax())
        token_s = step.time_s / speedups[num_drafts]
    tokens_per_s = batch / token_s
    figures = (step.time_s, token_s, tokens_per_s / way.cluster.num_chips, way.usd_per_million_tokens(tokens_per_s))
    return row | {"largest_batch": batch, "drafts": num_drafts} | dict(zip(FIGURES, figures, strict=True))
