"""The questions of `plan`: why not another strategy, what if the machine were different, what the recipe would do."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict

from meshwright.cli.fields import field_value, split_pairs
from meshwright.cli.verbs.explain import limit_words
from meshwright.cli.verbs.plan_words import BOUND_BY, MEMORY, STEP, full_words, mfu_columns
from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.breakdown import term_words
from meshwright.cost.train_step import Estimate
from meshwright.plan.result import PlanResult
from meshwright.plan.why.recipe import Recipe, recipe
from meshwright.plan.why.what_if import WhatIf
from meshwright.plan.why.why_not import WhyNot
from meshwright.report.answer import Answer, Fact, Heading, Paragraph, Piece, Table

MAX_TERMS = 3
MAX_LIMITS = 3
MISSED = 1e-3
"""Share of the best's step; a strategy that is faster by more gets a note that the search missed it."""


def parse_why_not(text: str) -> dict[str, Any]:
    """Returns name -> value of ``"tensor=16,remat=block"``; values are TOML or else text."""
    pairs = split_pairs(text, "name=value. Write for example tensor=16,remat=block", what="--why-not")
    return {name: field_value(value) for name, value in pairs.items()}


# -- why not ----------------------------------------------------------------------------------------------


def why_not_answer(result: PlanResult, told: Sequence[WhyNot]) -> Answer:
    """Returns for each strategy asked about the rule that refuses it, and its best completion beside the winner."""
    facts = [_why_not_facts(one, result) for one in told]
    return Answer({"why_not": facts}, [piece for one in told for piece in _why_not_text(one, result)])


def _why_not_facts(told: WhyNot, result: PlanResult) -> dict[str, Any]:
    """Returns the answer as plain data; each strategy has the assumptions under which it is priced."""
    found = {**msgspec.to_builtins(told), "slower_s": told.slower_s, "runs": told.refusal is None}
    assumed = msgspec.to_builtins(result.setting.assumptions)
    found["winner"] |= assumed
    if told.strategy is not None:
        found["strategy"] |= {name: told.asked.get(name, value) for name, value in assumed.items()}
    return found


def _why_not_text(told: WhyNot, result: PlanResult) -> Iterator[Piece]:
    yield ""
    asked = {name: str(value).lower() if isinstance(value, bool) else value for name, value in told.asked.items()}
    yield f"Why not {', '.join(f'{name} {value}' for name, value in asked.items())}"
    if told.refusal is not None:
        yield Fact("  refused", f"({told.refusal.rule}) {told.refusal.message}")
    if told.strategy is None or told.estimate is None or told.slower_s is None:
        return
    best, other = told.winner_estimate, told.estimate
    label = "  best completion" if told.refusal is None else "  least memory"
    yield Fact(label, full_words(told.strategy))
    if told.strategy == told.winner and not told.slower_s:
        yield Fact("", "that is the best of the list itself")
        return
    side = "longer" if told.slower_s >= 0 else "shorter"
    if_it_fitted = "" if told.refusal is None else " if it fitted"
    yield Fact(
        "  step",
        f"{format_seconds(other.step_s)}{if_it_fitted}, {format_seconds(abs(told.slower_s))} "
        f"({abs(told.slower_s) / best.step_s:.1%}) {side} than the best's {format_seconds(best.step_s)}",
    )
    if told.slower_s < -MISSED * best.step_s and told.refusal is None:
        yield Fact(
            "",
            "the search did not look at it: without --full it screens a large space, and tries the usual choices only",
        )
    room = result.strategies[0].setting.memory_limit
    more = other.hbm_bytes_per_chip - best.hbm_bytes_per_chip
    yield Fact(
        "  memory",
        f"{format_bytes(other.hbm_bytes_per_chip)} per chip of {format_bytes(room)}, "
        f"{format_bytes(abs(more))} {'more' if more >= 0 else 'less'}",
    )
    yield from _terms_text(told)
    for number, limit in enumerate(told.limits[:MAX_LIMITS]):
        yield Fact("  beyond" if number == 0 else "", limit_words(limit))


def _terms_text(told: WhyNot) -> Iterator[Piece]:
    """Yields the terms that make it slower, or faster if it is faster."""
    slower = (told.slower_s or 0.0) >= 0
    ordered = told.terms if slower else tuple(reversed(told.terms))
    chosen = [one for one in ordered if (one.more_s > 0) == slower and abs(one.more_s) > 0.01 * abs(told.slower_s or 1)]
    if not chosen:
        return
    yield Table.of(
        chosen[:MAX_TERMS],
        {
            f"  what makes it {'slower' if slower else 'faster'}": ("name", lambda name: f"  {term_words(name)}"),
            "best": ("winner_s", lambda s: format_seconds(max(0.0, s))),
            "here": ("other_s", lambda s: format_seconds(max(0.0, s))),
            "more": ("more_s", lambda s: f"{'+' if s > 0 else '-'}{format_seconds(abs(s))}"),
            "part": ("share", "{:.0%}".format),
        },
    )


# -- what if ----------------------------------------------------------------------------------------------


def what_if_answer(told: Sequence[WhatIf]) -> Answer:
    """Returns the changes, then both plans side by side; ``then`` has the keys of a strategy of `plan --json`."""
    facts = [
        {**asdict(one), "now": one.now.to_json(), "then": one.then and one.then.to_json(), "speedup": one.speedup}
        for one in told
    ]
    return Answer({"what_if": facts}, [piece for one in told for piece in _what_if_text(one)])


def _what_if_text(told: WhatIf) -> Iterator[Piece]:
    yield ""
    for number, change in enumerate(told.changed):
        yield Paragraph(f"{'What if' if number == 0 else '    and'} {change}", indent=10)
    if told.then is None:
        yield Fact("  nothing runs", told.note)
        return
    if told.note:
        yield Paragraph(f"  {told.note}", indent=4)
    yield Fact("  now", full_words(told.now.strategy))
    yield Fact("  then", full_words(told.then.strategy))
    measures = Table.of(both := [told.now, told.then], {**STEP, **mfu_columns(both), **MEMORY, **BOUND_BY})
    terms = [
        ", ".join(f"{one.words} {one.share:.0%}" for one in made[:MAX_TERMS] if one.share > 0.005)
        for made in (told.terms_now, told.terms)
    ]
    rows = [[name, *row, made] for name, row, made in zip(("now", "then"), measures.rows, terms, strict=True)]
    heads = [Heading("", "  {}".format, "plan"), *measures.columns, Heading("what its step is made of", str, "terms")]
    yield Table(heads, rows)
    yield Fact("  in all", _in_all(told))


def _in_all(told: WhatIf) -> str:
    assert told.then is not None
    said = f"{told.speedup:.3g} times the tokens per second"
    if told.then.strategy.mesh == told.now.strategy.mesh:
        return f"{said}, on the same mesh"
    if told.kept_s is not None:
        return f"{said}; the present plan, unchanged, would take {format_seconds(told.kept_s)}"
    same_chips = told.then.num_chips == told.now.num_chips
    return f"{said}; the present plan would not run" if same_chips else said


# -- the recipe -------------------------------------------------------------------------------------------


def recipe_answer(result: PlanResult) -> Answer:
    """Returns the recipe step by step, then its strategy beside the search's best."""
    best = result.strategies[0]
    made = recipe(result.setting, template=best.strategy)
    facts = {**msgspec.to_builtins(made), "best_step_s": best.estimate.step_s}
    facts["strategy"] |= msgspec.to_builtins(result.setting.assumptions)
    return Answer({"recipe": facts}, _recipe_text(made, best.estimate))


def _recipe_text(made: Recipe, best: Estimate) -> Iterator[Piece]:
    fact = partial(Fact, column=23)
    yield ""
    yield "The recipe: data parallelism, FSDP, checkpointing, hybrid sharding, then context, tensor and pipeline"
    for step in made.steps:
        yield fact(f"  {step.name}", f"{'yes' if step.applies else 'no '}  {step.reason}")
    yield fact("  so", full_words(made.strategy))
    if made.refusal is not None:
        yield fact("  refused", made.refusal.message)
    if made.estimate is None:
        return
    its = made.estimate
    ratio = its.step_s / best.step_s
    verdict = f"{ratio:.3g} times the best's {format_seconds(best.step_s)}" if ratio > 1.0005 else "as fast as the best"
    yield fact(
        "  its step",
        f"{format_seconds(its.step_s)}, MFU {its.mfu:.0%}, {format_bytes(its.hbm_bytes_per_chip)} per chip: {verdict}",
    )
