"""A limit beside a number, and the closed forms of section 5 of How to Scale Your Model as such limits.

The same rows serve a plan (`plan.why.bounds`) and a model on a cluster before there is one (the verb `limits`).
"""

import math
from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

from meshwright.cost.formulas import limits
from meshwright.spec.chip import Chip
from meshwright.spec.model import Model


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A bound beside this plan's number. ``holds`` is None where it is a hint, not a bound.

    ``kind`` says what is lost where it does not hold: "speed" (communication no longer hides behind compute) or
    "size" (the plan cannot run). ``unit`` is that of ``limit`` and ``here``: bytes, s, or a plain number.
    """

    name: str
    formula: str
    limit: float
    here: float
    holds: bool | None
    kind: Literal["speed", "size"] = "speed"
    unit: Literal["", "bytes", "s"] = ""
    note: str = ""


class Letters(Protocol):
    """What the forms are of, for one slice: B tokens on N chips, X ways of data and a size of ``tensor``, None where
    they are left open; M_X and M_Y torus axes of the two; F and E / k of the model.
    """

    @property
    def batch_tokens(self) -> float: ...
    @property
    def num_chips(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def num_axes(self) -> int: ...
    @property
    def fsdp_axes(self) -> int: ...
    @property
    def tensor_axes(self) -> int: ...
    @property
    def data_ways(self) -> float | None: ...
    @property
    def tensor(self) -> int | None: ...
    @property
    def sparsity(self) -> float: ...


def feed_forward_width(model: Model) -> int:
    """F: of a dense block, or of all the experts that a token passes."""
    return model.experts_per_token * model.d_ff_expert + model.d_ff_shared if model.num_experts else model.d_ff


def sparsity(model: Model) -> float:
    """E / k, experts over those that a token passes: so many more tokens hide the same weights. 1 without experts."""
    return model.num_experts / model.experts_per_token if model.num_experts else 1.0


def torus_limits(at: Letters, alpha: float) -> Iterator[Limit]:
    """FSDP alone and, for dense models, mixed with tensor; ``alpha`` is C / W of one axis, in FLOPs per byte."""
    axes = at.num_axes
    yield from fsdp_limits(at, alpha, num_axes=axes, bound=f"alpha / {axes}", chips=f"{axes} B / alpha")
    if at.sparsity == 1:
        yield from _mixed(at, alpha)


def fsdp_limits(at: Letters, alpha: float, *, num_axes: int, bound: str, chips: str) -> Iterator[Limit]:
    """Tokens per chip and chips at which FSDP hides; ``bound`` and ``chips`` are the two forms in words."""
    each = at.batch_tokens / at.num_chips
    more, fewer = (" x E/k", " x k/E") if at.sparsity > 1 else ("", "")
    least = limits.data_parallel_min_tokens_per_chip(alpha, num_axes) * at.sparsity
    yield Limit(name="tokens/chip, FSDP alone", formula=f"> {bound}{more}", limit=least, here=each, holds=each > least)
    most = limits.fsdp_max_chips(at.batch_tokens / at.sparsity, alpha, num_axes)
    yield Limit(
        name="chips, FSDP alone",
        formula=f"< {chips}{fewer}",
        limit=most,
        here=at.num_chips,
        holds=at.num_chips < most,
    )


def _mixed(at: Letters, alpha: float) -> Iterator[Limit]:
    """The mixture of FSDP and tensor parallelism of a dense model."""
    axes = {"fsdp_axes": at.fsdp_axes, "tensor_axes": at.tensor_axes}
    sizes = (at.batch_tokens, at.d_ff, at.num_chips)
    each = at.batch_tokens / at.num_chips
    least = limits.mixed_min_tokens_per_chip(alpha, at.d_ff, **axes)
    yield Limit(
        name="tokens/chip, with tensor", formula="> 4 alpha^2 / (Mx My F)", limit=least, here=each, holds=each > least
    )
    ratio = limits.mixed_math_over_comms(*sizes, alpha, **axes)
    yield Limit(
        name="T_math/T_comms at X_opt", formula="sqrt(BF MxMy/N)/(2 alpha)", limit=1.0, here=ratio, holds=ratio > 1
    )
    square = limits.mixed_discriminant(*sizes, alpha, **axes)
    yield Limit(name="discriminant", formula="(BF/alpha)^2 - 4FBN/MxMy", limit=0.0, here=square, holds=square > 0)
    roots, ways = limits.fsdp_roots(*sizes, alpha, **axes), math.nan if at.data_ways is None else at.data_ways
    if not math.isnan(roots.lower):
        yield _open("X, lower root", "> Mx(BF/alpha - root)/2F", roots.lower, ways, ways > roots.lower)
        yield _open("X, upper root", "< Mx(BF/alpha + root)/2F", roots.upper, ways, ways < roots.upper)
    best = limits.fsdp_best_size(*sizes, **axes)
    split = limits.round_split(best, at.num_chips)
    yield Limit(
        name="X_opt",
        formula="sqrt(B/F x Mx/My x N)",
        limit=best,
        here=ways,
        holds=None,
        note=f"in powers of two: {split.fsdp:,} x tensor {split.tensor:,}",
    )
    yield tensor_limit(at, limits.tensor_max_size(at.d_ff, alpha, at.tensor_axes), "< My F / alpha")


def tensor_limit(at: Letters, most: float, formula: str) -> Limit:
    """The size up to which tensor collectives hide."""
    size = math.nan if at.tensor is None else at.tensor
    return _open("tensor", formula, most, size, size < most)


def _open(name: str, formula: str, limit: float, here: float, holds: bool) -> Limit:
    """A limit whose own number takes a choice: a hint where none was made."""
    return Limit(name=name, formula=formula, limit=limit, here=here, holds=None if math.isnan(here) else holds)


def dcn_limit(chip: Chip, *, peak_flops: float, tokens_per_slice: float) -> Iterator[Limit]:
    """Tokens of a slice at which data parallelism over the data-centre network hides; nothing where it is not known."""
    if chip.dcn_bytes_per_s_per_host and chip.chips_per_host:
        least = limits.dcn_min_batch_per_pod(peak_flops, chip.dcn_bytes_per_s_per_host, chip.chips_per_host)
        yield Limit(
            name="tokens/slice, over DCN",
            formula="> C x host chips / W_dcn",
            limit=least,
            here=tokens_per_slice,
            holds=tokens_per_slice > least,
        )
