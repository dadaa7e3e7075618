"""What `explain` says first: the terms that matter, the limit each is near, the cheapest change, the FSDP case."""

import math
from collections.abc import Iterator, Sequence

from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.breakdown import Term
from meshwright.cost.formulas.limit_table import Limit
from meshwright.plan.why.explain import Explanation, limit_of_term
from meshwright.report.answer import Amount, Fact, Piece

MAX_TERMS = 3
MIN_SHARE = 0.03
"""Of the step: a second or third term below this is not among those that matter."""
NEAR = 2.0
"""Times a limit, or parts of it, up to which a plan is near it."""


def lead_text(told: Explanation) -> Iterator[Piece]:
    """Three to six facts before the algorithm."""
    terms = leading_terms(told.terms)
    for number, term in enumerate(terms):
        yield Fact("what matters" if number == 0 else "", _term_words(term, told))
    near = nearest_limit(told, [limit_of_term(term, told.limits) for term in terms])
    if near is not None:
        yield Fact("near a limit", limit_words(near))
    yield Fact("what would help", change_words(told))
    if told.fsdp is not None:
        yield Fact("data parallelism", told.fsdp.words)


def nearest_limit(told: Explanation, said: Sequence[Limit | None]) -> Limit | None:
    """The limit of speed that the plan is closest to on either side, of those not said yet; None for none near."""
    of_terms = [limit_of_term(term, told.limits) for term in told.terms]
    open_ones = [one for one in of_terms if one is not None and one not in said]
    near = [one for one in open_ones if min(one.limit, one.here) > 0 and _distance(one) <= math.log(NEAR)]
    return min(near, key=_distance, default=None)


def _distance(limit: Limit) -> float:
    return abs(math.log(limit.here / limit.limit))


def leading_terms(terms: tuple[Term, ...]) -> list[Term]:
    """The two or three that add most."""
    return [one for number, one in enumerate(terms[:MAX_TERMS]) if number == 0 or one.share >= MIN_SHARE]


def _term_words(term: Term, told: Explanation) -> str:
    said = f"{term.words}: {format_seconds(term.added_s)}, {term.share:.0%} of the step"
    if term.alone_s > 1.1 * term.added_s:
        said += f" ({format_seconds(term.alone_s)} by themselves, the rest hides)"
    limit = limit_of_term(term, told.limits)
    if limit is not None:
        return f"{said}; {limit_words(limit)}"
    if term.name in ("elementwise", "optimizer"):
        return f"{said}; at the memory rate of {told.plan.cluster.chip.name}"
    if term.name in ("matmul", "attention", "loss_head"):
        again = f", {told.recomputed:.0%} of all FLOPs recomputed" if told.recomputed > 0.005 else ""
        return f"{said}; at the rates of {told.plan.cluster.chip.name}{again}"
    return said


def limit_amounts(limit: Limit) -> tuple[Amount, Amount]:
    """The bound and the plan's own figure."""
    show = {"bytes": format_bytes, "s": format_seconds, "": number_words}[limit.unit]
    return Amount(limit.limit, show), Amount(limit.here, show)


def limit_words(limit: Limit) -> str:
    """``"tokens/chip, weights hide: > 850, here 1,024: 1.2 times above"``."""
    bound, here = limit_amounts(limit)
    sign = f"{limit.formula[0]} " if limit.formula[0] in "<>" else ""
    said = f"{limit.name}: {sign}{bound}, here {here}"
    if min(limit.limit, limit.here) <= 0:
        return said
    side = "above" if limit.here > limit.limit else "below"
    times = math.exp(_distance(limit))
    return f"{said}: {times:.3g} times {side}{'' if limit.holds is not False else ', not met'}"


def change_words(told: Explanation) -> str:
    """The best single change and its gain, or that none helps."""
    tried = told.changes
    of = f"{tried.num_tried} single changes ({tried.num_legal} of them run)"
    if tried.best is None:
        return f"none of {of}"
    gain = tried.gain_s / told.estimate.step_s
    now = tried.best.estimate
    return (
        f"{tried.best.words}: {format_seconds(now.step_s)} a step, {gain:.1%} less, "
        f"{format_bytes(now.hbm_bytes_per_chip)} per chip; the best of {of}"
    )


def number_words(value: float) -> str:
    """Four digits, more where there are more before the point."""
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"
