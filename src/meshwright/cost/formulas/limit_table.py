"""The table of limits: bounds on a plan, or on a model on a cluster, in the letters of "How to Scale Your Model".

A row applies if its letters are known. `explain`, `plan --why-not` and the verb `limits` read this table.
"""

import math
import operator
from collections.abc import Callable
from typing import Literal

import msgspec

from meshwright.core.units import counted, format_count, format_seconds
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.training_budget import (
    DAY_S,
    min_chips,
    num_microbatches,
    rescaled_days,
    train_seconds,
    training_flops,
)
from meshwright.cost.letters import Letters


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A bound, ``limit``, with the plan's number, ``here``. ``holds`` is None for a hint, and if ``here`` is unknown.

    ``kind`` says what happens if it does not hold: "speed" (communication is no longer hidden by compute) or "size"
    (the plan cannot run). ``unit`` is the unit of ``limit`` and ``here``: bytes, s, or "" for a plain number.
    """

    name: str
    formula: str
    limit: float
    here: float
    holds: bool | None
    kind: Literal["speed", "size"] = "speed"
    unit: Literal["", "bytes", "s"] = ""
    note: str = ""

    @property
    def distance(self) -> float:
        """How many times the plan's number is above or below the bound; infinity if one of them is not above 0."""
        if not min(self.limit, self.here) > 0:
            return math.inf
        return max(self.limit, self.here) / min(self.limit, self.here)

    @property
    def verdict(self) -> str | None:
        """``"broken"``, ``"near"`` if it holds by less than `NEAR` times, ``"holds"``; None for a hint."""
        if self.holds is None:
            return None
        return "broken" if not self.holds else "near" if self.distance < NEAR else "holds"


NEAR = 2.0
"""A limit that holds by less than this factor is near."""
LetterForm = str | Callable[..., float]
"""The name of a letter (its value is NaN if unknown), or a function from all letters to a number."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, which applies if all letters of ``needs`` and none of ``if_not`` are known; a hint without relation."""

    name: str
    needs: tuple[str, ...]
    formula: str | Callable[[Letters], str]
    limit: LetterForm
    here: LetterForm
    relation: Literal[">", "<", ">=", "<=", ""]
    kind: Literal["speed", "size"] = "speed"
    unit: Literal["", "bytes", "s"] = ""
    note: str | Callable[[Letters], str] = ""
    if_not: tuple[str, ...] = ()

    def at(self, at: Letters) -> Limit | None:
        """Returns the limit with the numbers of the letters; None if it does not apply."""
        is_known = all(getattr(at, name) is not None for name in self.needs)
        if not is_known or any(getattr(at, name) is not None for name in self.if_not):
            return None
        bound, here_value = _value(self.limit, at), _value(self.here, at)
        return Limit(
            name=self.name,
            formula=self.formula if isinstance(self.formula, str) else self.formula(at),
            limit=bound,
            here=here_value,
            holds=None if not self.relation or math.isnan(here_value) else _HOLDS[self.relation](here_value, bound),
            kind=self.kind,
            unit=self.unit,
            note=self.note if isinstance(self.note, str) else self.note(at),
        )


_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


def limits_at(at: Letters) -> tuple[Limit, ...]:
    """Returns every limit that applies: first limits of single axes, then of the whole mesh, then of size."""
    return tuple(limit for row in LIMITS if (limit := row.at(at)) is not None)


def _open(letter_value: float | None) -> float:
    """Returns the value of a letter: NaN if it is not known."""
    return math.nan if letter_value is None else letter_value


def _value(form: LetterForm, at: Letters) -> float:
    return form(at) if callable(form) else _open(getattr(at, form))


def _split_words(at: Letters) -> str:
    fsdp_size, tensor_size = limits.round_split(at.mixture.best_size, at.num_chips)
    return f"in powers of two: {fsdp_size:,} x tensor {tensor_size:,}"


_NO_TENSOR = "the closed forms with tensor are for dense layers and left out for experts"


def _pods_words(at: Letters, max_chips: float) -> str:
    """Returns how many whole pods fit a bound on chips of one slice, in words; "" if not even one does."""
    num_pods = int(max_chips / at.pod_chips) if at.pod_chips else 0
    return f"{counted(num_pods, 'whole pod')} of {at.pod_chips:,} chips" if num_pods else ""


def _bubble_words(at: Letters) -> str:
    idle_share = at.bubble_s / (at.bubble_s + at.num_microbatches * at.microbatch_s)  # type: ignore[operator]
    return f"the {at.schedule} bubble is {idle_share:.1%} of its passes"


def _fewest_words(at: Letters) -> str:
    """Returns in words how long the run would take on the fewest chips; "" if its length is not known."""
    if at.run_days is None or at.train_tokens is None:
        return ""
    fewest_chips = min_chips(_open(at.shared_bytes), _open(at.memory_bytes))
    run_s = rescaled_days(at.run_days, chips_from=at.all_chips, chips_to=fewest_chips) * DAY_S
    tokens_text = format_count(at.train_tokens)
    return f"there {tokens_text} tokens would take {format_seconds(run_s)} at this utilisation"


def _tensor_words(at: Letters) -> str:
    """Returns in words that groups of ``tensor`` cross their domain, or do not divide the chips; else ""."""
    if at.tensor is None:
        return ""
    leaves_text = f"groups of {at.tensor} leave a domain of {at.domain}: the slower network binds, not W_nvlink"
    left_over_text = f"{at.tensor} does not divide {at.num_chips:,} chips: X is no whole number"
    is_crossing = at.domain is not None and at.all_chips > at.domain and at.domain % at.tensor > 0
    return "; ".join([leaves_text] * is_crossing + [left_over_text] * (at.num_chips % at.tensor > 0))


def _fsdp_words(at: Letters) -> str:
    bound_text = f"C / W_{at.link}" if at.alpha is None else f"alpha / {at.num_axes:g}"
    return f"> {bound_text}{' x E/k' if at.sparsity > 1 else ''}"


def _fsdp_chips_words(at: Letters) -> str:
    max_text = f"B W_{at.link} / C" if at.alpha is None else f"{at.num_axes:g} B / alpha"
    return f"< {max_text}{' x k/E' if at.sparsity > 1 else ''}"


LIMITS: tuple[_Row, ...] = (
    # single axes, from the plan's own priced steps
    *(
        _Row(
            name=f"tokens/chip, {what} hide", needs=("chip_tokens", f"{what}_s"),
            formula=f"> tokens x T_{what} / T_layer", relation=">", here="chip_tokens",
            limit=lambda at, w=what: at.chip_tokens * getattr(at, f"{w}_s") / getattr(at, f"{w}_layer_s"),
            note="of one microbatch, from this plan's own times",
        )
        for what in ("weights", "gradients")
    ),
    _Row(
        name="microbatches, bubble < 10%", needs=("chip_tokens", "bubble_s"),
        formula="> 9 T_bubble / T_microbatch", relation=">",
        limit=lambda at: limits.min_microbatches(at.bubble_s, at.microbatch_s), here="num_microbatches",
        note=_bubble_words,
    ),
    _Row(
        name="positions/device, ring hides", needs=("chip_tokens", "ring_bytes_per_s"),
        formula=lambda at: "> 2 C/W x K/N" if at.causal else "> C/W x K/N", relation=">",
        limit=lambda at: limits.ring_min_positions(
            at.peak_flops, at.ring_bytes_per_s, num_heads=at.num_heads, num_kv_heads=at.num_kv_heads, causal=at.causal
        ),
        here="ring_positions", note="W one way between neighbours of the ring",
    ),
    _Row(
        name="tokens/copy of the experts", needs=("chip_tokens", "hbm_tokens"),
        formula="> E/k x C/W_hbm", relation=">",
        limit=lambda at: at.hbm_tokens * at.num_experts / at.experts_per_token, here="copy_tokens",
        note="fewer leave the experts' products waiting for their weights",
    ),
    _Row(
        name="expert width, AllToAll shorter", needs=("chip_tokens", "exchange_s"),
        formula="> Fe x T_AllToAll / T_experts", relation=">",
        limit=lambda at: at.expert_width * at.exchange_s / at.experts_s, here="expert_width",
        note="the AllToAlls are waited for",
    ),
    # FSDP without tensor parallelism, on a torus or on switches
    _Row(
        name="tokens/chip, FSDP alone", needs=("fsdp_alpha",), formula=_fsdp_words, relation=">",
        limit=lambda at: at.batch_tokens / at.fsdp_most_chips, here="tokens_per_chip",
        note=lambda at: _NO_TENSOR if at.sparsity > 1 and at.alpha is not None else "",
    ),
    _Row(
        name="chips, FSDP alone", needs=("fsdp_alpha",), formula=_fsdp_chips_words, relation="<",
        limit=lambda at: at.fsdp_most_chips, here="num_chips", note=lambda at: _pods_words(at, at.fsdp_most_chips),
    ),
    # the mixture of FSDP and tensor parallelism
    _Row(
        name="tokens/chip, with tensor", needs=("mixed_alpha",), formula="> 4 alpha^2 / (Mx My F)", relation=">",
        limit=lambda at: at.batch_tokens / at.mixed_most_chips, here="tokens_per_chip",
        note=lambda at: f"FSDP alone needs {at.mixed_most_chips / at.fsdp_most_chips:.3g} times as many",
    ),
    _Row(
        name="chips, with tensor", needs=("mixed_alpha",), formula="< B Mx My F / (4 alpha^2)", relation="<",
        limit=lambda at: at.mixed_most_chips, here="num_chips", note=lambda at: _pods_words(at, at.mixed_most_chips),
    ),
    _Row(
        name="T_math/T_comms at X_opt", needs=("mixed_alpha",), formula="sqrt(BF MxMy/N)/(2 alpha)", relation=">",
        limit=lambda at: 1.0, here=lambda at: at.mixture.math_over_comms,
    ),
    _Row(
        name="discriminant", needs=("mixed_alpha",), formula="(BF/alpha)^2 - 4FBN/MxMy", relation=">",
        limit=lambda at: 0.0, here=lambda at: at.mixture.discriminant,
    ),
    _Row(
        name="X, lower root", needs=("roots",), formula="> Mx(BF/alpha - root)/2F", relation=">",
        limit=lambda at: at.roots.lower, here="data_ways",
    ),
    _Row(
        name="X, upper root", needs=("roots",), formula="< Mx(BF/alpha + root)/2F", relation="<",
        limit=lambda at: at.roots.upper, here="data_ways",
    ),
    _Row(
        name="X_opt", needs=("mixed_alpha",), formula="sqrt(B/F x Mx/My x N)", relation="",
        limit=lambda at: at.mixture.best_size, here="data_ways", note=_split_words,
    ),
    # FSDP as if each chip moved all weights three times at the slowest link's rate, whatever the hierarchy
    _Row(
        name="FSDP at one chip's rate", needs=("flat_bytes_per_s",),
        formula="3 x 2 bytes x params / W < T_math", relation="<", unit="s",
        limit=lambda at: train_seconds(
            training_flops(at.num_active_params, at.batch_tokens), num_chips=at.num_chips, peak_flops=at.peak_flops
        ),
        here=lambda at: limits.flat_fsdp_comms_s(at.num_params, at.flat_bytes_per_s),
    ),
    _Row(
        name="chips, at one chip's rate", needs=("flat_bytes_per_s",), relation="<",
        formula=lambda at: "< B W / C x active / params" if at.sparsity > 1 else "< B W / C",
        limit=lambda at: limits.flat_fsdp_max_chips(
            at.batch_tokens * at.num_active_params / at.num_params, at.peak_flops, at.flat_bytes_per_s
        ),
        here="num_chips",
    ),
    _Row(
        name="tensor", needs=("tensor_most",), relation="<",
        formula=lambda at: "< F W_nvlink / C" if at.alpha is None else "< My F / alpha",
        limit=lambda at: at.tensor_most, here="tensor", note=_tensor_words,
    ),
    _Row(
        name="F, for this tensor", needs=("tensor_most", "tensor"), relation=">",
        formula=lambda at: "> tensor C / W_nvlink" if at.alpha is None else "> tensor alpha / My",
        limit=lambda at: at.tensor * at.d_ff / at.tensor_most, here="d_ff",
    ),
    _Row(
        name="tokens/slice, over DCN", needs=("slice_tokens", "dcn_bytes_per_s_per_host", "chips_per_host"),
        formula="> C x host chips / W_dcn", relation=">",
        limit=lambda at: limits.dcn_min_batch_per_pod(at.peak_flops, at.dcn_bytes_per_s_per_host, at.chips_per_host),
        here="slice_tokens",
    ),
    # size, of a plan
    _Row(
        name="chips, a sequence each", needs=("context",), kind="size", relation="<=",
        formula=lambda at: "<= sequences x context x tensor" + " x pipeline" * (at.num_stages > 1),
        limit=lambda at: at.num_stages * limits.sequence_limit_chips(
            at.step_tokens, at.seq_len, context=at.context, tensor=at.tensor
        ),
        here="all_chips",
    ),
    _Row(
        name="microbatches", needs=("batch_seqs",), kind="size", relation="<=",
        formula="<= sequences / (data x fsdp)",
        limit=lambda at: num_microbatches(at.batch_seqs, data_parallel=at.replicas, microbatch_seqs=1),
        here="num_microbatches",
    ),
    _Row(
        name="memory of a chip", needs=("memory_bytes", "needed_bytes"), kind="size", unit="bytes", relation="<=",
        formula="<= what programs may fill", limit="memory_bytes", here="needed_bytes",
    ),
    _Row(
        name="chips, by memory", needs=("memory_bytes", "shared_bytes"), kind="size", relation=">=",
        formula=">= (state + activations) / memory",
        limit=lambda at: min_chips(at.shared_bytes, at.memory_bytes), here="all_chips",
        note=_fewest_words,
    ),
    # size, without a plan
    _Row(
        name="chips, FSDP of whole sequences", needs=(), if_not=("context",), kind="size", relation="<=",
        formula="<= sequences",
        limit=lambda at: limits.sequence_limit_chips(at.step_tokens, at.seq_len), here="all_chips",
    ),
    _Row(
        name="state on each, no FSDP", needs=("memory_bytes", "state_bytes"), kind="size", unit="bytes",
        relation="<=", formula="<= memory of a chip",
        limit="memory_bytes", here="state_bytes",
    ),
    _Row(
        name="chips, by state alone", needs=("memory_bytes", "state_bytes"), kind="size", relation=">=",
        formula=">= state / memory",
        limit=lambda at: min_chips(at.state_bytes, at.memory_bytes), here="all_chips",
    ),
)  # fmt: skip
"""Every limit. Sources: How to Scale Your Model, sections 3.2, 4.4.1, 5 and 6.3; the rest follows from its rules."""
