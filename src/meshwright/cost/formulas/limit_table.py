"""The table of limits: bounds on a plan, or on a model on a cluster, in the letters of "How to Scale Your Model".

A row applies if its letters are known. `explain`, `plan --why-not` and the verb `limits` read the same rows.
"""

import math
import operator
from collections.abc import Callable
from typing import Literal

import msgspec

from meshwright.core.units import format_count, format_seconds
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.training_budget import (
    DAY_S,
    min_chips,
    num_microbatches,
    rescaled_days,
    train_seconds,
    training_flops,
)
from meshwright.spec.model import Model


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A bound, ``limit``, beside the plan's number, ``here``. ``holds`` is None for a hint, and if ``here`` is unknown.

    ``kind`` says what happens if it does not hold: "speed" (communication no longer hides behind compute) or
    "size" (the plan cannot run). ``unit`` is that of ``limit`` and ``here``: bytes, s, or "" for a plain number.
    """

    name: str
    formula: str
    limit: float
    here: float
    holds: bool | None
    kind: Literal["speed", "size"] = "speed"
    unit: Literal["", "bytes", "s"] = ""
    note: str = ""


class Letters(msgspec.Struct, frozen=True, kw_only=True):
    """The letters of the formulas, for one slice and stage; None means not known, or without meaning there.

    B is ``batch_tokens`` of one microbatch: weights are gathered anew for each, so its tokens have to hide them. N is
    ``num_chips``, X is ``data_ways`` = data x fsdp x expert x context, Y is ``tensor``, F is ``d_ff``, C is
    ``peak_flops``, alpha is C / W in FLOPs per byte with W of one torus axis, which ``width`` describes, and
    ``sheet_alpha`` by the data sheet. M_X and M_Y are the torus axes of X and Y, each at least one; beside rings a line
    counts as a half. ``sparsity`` is E / k: hiding the same weights takes that many times the tokens. ``num_slices``
    counts slices that divide the batch.
    """

    batch_tokens: float
    num_microbatches: int = 1
    num_chips: int
    num_stages: int = 1
    num_slices: int = 1
    d_ff: int
    data_ways: float | None = None
    peak_flops: float
    alpha: float | None = None
    sheet_alpha: float | None = None
    width: str = ""
    num_axes: float
    fsdp_axes: float = 1
    tensor_axes: float = 1
    tensor: int | None = None
    sparsity: float = 1.0

    # links of a switched cluster: C / W of the domain or node, C / W of a domain, and the slowest link of a chip
    link: str = ""
    link_alpha: float | None = None
    domain_alpha: float | None = None
    domain: int | None = None
    flat_bytes_per_s: float | None = None
    num_params: float | None = None
    num_active_params: float | None = None

    # the data-centre network; its gradients cross once per step, whatever the microbatches
    slice_tokens: float | None = None
    dcn_bytes_per_s_per_host: float | None = None
    chips_per_host: int | None = None
    pod_chips: int | None = None

    # from the priced steps of a plan, for the pass that needs the most tokens
    chip_tokens: float | None = None
    weights_s: float | None = None
    weights_layer_s: float | None = None
    gradients_s: float | None = None
    gradients_layer_s: float | None = None
    schedule: str = ""
    bubble_s: float | None = None
    microbatch_s: float | None = None
    ring_bytes_per_s: float | None = None
    ring_positions: float | None = None
    num_heads: int = 1
    num_kv_heads: int = 1
    causal: bool = True
    num_experts: int = 0
    experts_per_token: int = 1
    copy_tokens: float | None = None
    hbm_tokens: float | None = None
    expert_width: int | None = None
    exchange_s: float | None = None
    experts_s: float | None = None

    # sizes, of the whole cluster
    all_chips: int
    step_tokens: float
    seq_len: int
    context: int | None = None
    batch_seqs: int | None = None
    replicas: int | None = None
    memory_bytes: float | None = None
    needed_bytes: float | None = None
    shared_bytes: float | None = None
    state_bytes: float | None = None
    train_tokens: int | None = None
    run_days: float | None = None

    @property
    def fsdp_alpha(self) -> float | None:
        """C / W of the links that FSDP uses; None for one torus chip, and where it is not known."""
        return self.link_alpha if self.alpha is None else self.alpha if self.num_chips > 1 else None

    @property
    def tensor_most(self) -> float | None:
        """The size of ``tensor`` up to which its collectives hide; None where no form of it is known."""
        if self.alpha is not None:
            most = limits.tensor_max_size(self.d_ff, self.alpha, self.tensor_axes)
            return None if self.mixed_alpha is None else most
        return None if self.domain_alpha is None else limits.tensor_max_size(self.d_ff, self.domain_alpha)

    @property
    def tokens_per_chip(self) -> float:
        return self.batch_tokens / self.num_chips

    @property
    def mixed_alpha(self) -> float | None:
        """C / W for mixed FSDP and tensor parallelism of a dense model on several torus chips; None elsewhere."""
        return self.alpha if self.sparsity == 1 and self.num_chips > 1 else None

    @property
    def mixed_most_chips(self) -> float:
        """Chips up to which some mixture is compute-bound; like `mixture`, for dense models on tori."""
        axes = {"fsdp_axes": self.fsdp_axes, "tensor_axes": self.tensor_axes}
        return self.batch_tokens / limits.mixed_min_tokens_per_chip(self.mixed_alpha, self.d_ff, **axes)

    @property
    def fsdp_most_chips(self) -> float:
        """Chips up to which FSDP alone is compute-bound, where `fsdp_alpha` is known."""
        links = 1 if self.alpha is None else self.num_axes  # that FSDP alone uses at once
        return limits.fsdp_max_chips(self.batch_tokens / self.sparsity, self.fsdp_alpha, links)

    @property
    def mixture(self) -> limits.Mixture:
        """Mixed FSDP and tensor parallelism with these letters."""
        return limits.Mixture(
            self.batch_tokens, self.d_ff, self.num_chips, self.mixed_alpha, self.fsdp_axes, self.tensor_axes
        )

    @property
    def roots(self) -> limits.Roots | None:
        """The sizes X between which the mixture is compute-bound; None where there are none."""
        if self.mixed_alpha is None:
            return None
        found = self.mixture.roots
        return None if math.isnan(found.lower) else found


def feed_forward_width(model: Model) -> int:
    """Returns F of a dense block, or the sum over all experts that one token uses, shared ones included."""
    return model.experts_per_token * model.d_ff_expert + model.d_ff_shared if model.num_experts else model.d_ff


def sparsity(model: Model) -> float:
    """Returns E / k, experts over experts per token: weights need that many times the tokens to hide. 1 without."""
    return model.num_experts / model.experts_per_token if model.num_experts else 1.0


LetterForm = str | Callable[..., float]
"""The name of a letter, whose value is NaN if it is not known, or a function of several letters."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, which applies if no letter of ``needs`` and all of ``if_not`` are None; a hint if it has no relation."""

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
        """Returns the limit with the letters' numbers; None if it does not apply."""
        known = all(getattr(at, name) is not None for name in self.needs)
        if not known or any(getattr(at, name) is not None for name in self.if_not):
            return None
        limit, here = _value(self.limit, at), _value(self.here, at)
        return Limit(
            name=self.name,
            formula=self.formula if isinstance(self.formula, str) else self.formula(at),
            limit=limit,
            here=here,
            holds=None if not self.relation or math.isnan(here) else _HOLDS[self.relation](here, limit),
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
    """Returns every limit that applies: those of single axes, then of the whole mesh, then of size."""
    return tuple(found for row in LIMITS if (found := row.at(at)) is not None)


def _open(value: float | None) -> float:
    """Returns the value of a letter: NaN if it is not known."""
    return math.nan if value is None else value


def _value(form: LetterForm, at: Letters) -> float:
    return form(at) if callable(form) else _open(getattr(at, form))


def _split_words(at: Letters) -> str:
    fsdp, tensor = limits.round_split(at.mixture.best_size, at.num_chips)
    return f"in powers of two: {fsdp:,} x tensor {tensor:,}"


_NO_TENSOR = "the closed forms with tensor are for dense layers and left out for experts"


def _pods_words(at: Letters, chips: float) -> str:
    """Says how many whole pods are within a bound on chips of one slice; "" where not even one is."""
    whole = int(chips / at.pod_chips) if at.pod_chips else 0
    return f"{whole} whole pod{'s' * (whole > 1)} of {at.pod_chips:,} chips" if whole else ""


def _bubble_words(at: Letters) -> str:
    idle = at.bubble_s / (at.bubble_s + at.num_microbatches * at.microbatch_s)  # type: ignore[operator]
    return f"the {at.schedule} bubble is {idle:.1%} of its passes"


def _fewest_words(at: Letters) -> str:
    """Says how long the run would take on the fewest chips; "" if its length is not known."""
    if at.run_days is None or at.train_tokens is None:
        return ""
    fewest = min_chips(_open(at.shared_bytes), _open(at.memory_bytes))
    slow_s = rescaled_days(at.run_days, chips_from=at.all_chips, chips_to=fewest) * DAY_S
    tokens = format_count(at.train_tokens)
    return f"there {tokens} tokens would take {format_seconds(slow_s)} at this utilisation"


def _tensor_words(at: Letters) -> str:
    """Says that groups of ``tensor`` leave their domain, or leave chips over."""
    if at.tensor is None:
        return ""
    leaves = f"groups of {at.tensor} leave a domain of {at.domain}: the slower network binds, not W_nvlink"
    over = f"{at.tensor} does not divide {at.num_chips:,} chips: X is no whole number"
    crosses = at.domain is not None and at.all_chips > at.domain and at.domain % at.tensor > 0
    return "; ".join([leaves] * crosses + [over] * (at.num_chips % at.tensor > 0))


def _fsdp_words(at: Letters) -> str:
    bound = f"C / W_{at.link}" if at.alpha is None else f"alpha / {at.num_axes:g}"
    return f"> {bound}{' x E/k' if at.sparsity > 1 else ''}"


def _fsdp_chips_words(at: Letters) -> str:
    most = f"B W_{at.link} / C" if at.alpha is None else f"{at.num_axes:g} B / alpha"
    return f"< {most}{' x k/E' if at.sparsity > 1 else ''}"


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
    # FSDP alone, on a torus or on switches
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
    # size, before there is a plan
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
