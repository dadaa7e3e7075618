"""The questions of `plan`: why not another strategy, what if the machine were different, what the recipe would do."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from meshwright.cli.verbs.explain_lead import limit_words
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.breakdown import Term, term_words
from meshwright.plan.result import PlanResult
from meshwright.plan.why.recipe import Recipe, recipe
from meshwright.plan.why.setup_changes import parse_what_if
from meshwright.plan.why.what_if import WhatIf, what_if
from meshwright.plan.why.why_not import WhyNot, why_not
from meshwright.report.answer import Answer, Fact, Paragraph, Piece, Table
from meshwright.spec.strategy import Strategy

Words = Callable[[Strategy], str]
MAX_TERMS = 3
MAX_LIMITS = 3
MISSED = 1e-3
"""Share of the best's step by which another may be shorter before it is said."""


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, parsed: ``why_nots`` name sizes and fields, ``what_ifs`` factors."""

    why_nots: tuple[dict[str, Any], ...]
    what_ifs: tuple[dict[str, float], ...]
    recipe: bool


def parse_questions(why_nots: Sequence[str], what_ifs: Sequence[str], *, recipe: bool) -> Questions:
    """The questions of the command line; InputError for one that cannot be read, before anything is planned."""
    return Questions(
        why_nots=tuple(parse_why_not(text) for text in why_nots),
        what_ifs=tuple(parse_what_if(text) for text in what_ifs),
        recipe=recipe,
    )


def parse_why_not(text: str) -> dict[str, Any]:
    """Name -> value of ``"tensor=16,remat=block"``: whole numbers, true and false, else text."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, sep, value = (piece.strip() for piece in part.partition("="))
        if not sep or not name or not value:
            raise InputError(f"--why-not {part.strip()!r} is not name=value. Write for example tensor=16,remat=block.")
        if name in found:
            raise InputError(f"--why-not {text!r} gives {name} twice. Leave one out.")
        words = {"true": True, "false": False}
        number = float(value) if re.fullmatch(r"\d*\.\d+", value) else words.get(value, value)
        found[name] = int(value) if value.isdecimal() else number
    return found


def answers(result: PlanResult, questions: Questions, *, words: Words) -> list[Answer]:
    """The answer to every question, as data under the keys why_not, what_if and recipe."""
    found = []
    if questions.why_nots:
        refused = [why_not(result, asked) for asked in questions.why_nots]
        text = [piece for one in refused for piece in why_not_text(one, result, words)]
        found.append(Answer({"why_not": [why_not_json(one, result) for one in refused]}, text))
    if questions.what_ifs:
        changed = [what_if(result, asked) for asked in questions.what_ifs]
        text = [piece for other in changed for piece in what_if_text(other, words)]
        found.append(Answer({"what_if": [what_if_json(one) for one in changed]}, text))
    if questions.recipe:
        best = result.strategies[0]
        made = recipe(result.setting, template=best.strategy)
        facts = {**msgspec.to_builtins(made), "best_step_s": best.estimate.step_s}
        facts["strategy"] |= msgspec.to_builtins(result.setting.assumptions)
        found.append(Answer({"recipe": facts}, recipe_text(made, result, words)))
    return found


# -- why not ----------------------------------------------------------------------------------------------


def why_not_json(told: WhyNot, result: PlanResult) -> dict[str, Any]:
    """The answer_text as plain data; each strategy with what is assumed for it."""
    found = {**msgspec.to_builtins(told), "slower_s": told.slower_s, "runs": told.refusal is None}
    assumed = msgspec.to_builtins(result.setting.assumptions)
    found["winner"] |= assumed
    if told.strategy is not None:
        found["strategy"] |= {name: told.asked.get(name, value) for name, value in assumed.items()}
    return found


def why_not_text(told: WhyNot, result: PlanResult, words: Words) -> Iterator[Piece]:
    """The rule that refuses it; its best completion beside the winner."""
    yield ""
    yield f"Why not {', '.join(f'{name} {_value(value)}' for name, value in told.asked.items())}"
    if told.refusal is not None:
        yield Fact("  refused", f"({told.refusal.rule}) {told.refusal.message}")
    if told.strategy is None or told.estimate is None or told.slower_s is None:
        return
    best, other = told.winner_estimate, told.estimate
    label = "  best completion" if told.refusal is None else "  least memory"
    yield Fact(label, words(told.strategy))
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


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _terms_text(told: WhyNot) -> Iterator[Piece]:
    """What makes it slower, or what makes it faster where it is."""
    slower = (told.slower_s or 0.0) >= 0
    ordered = told.terms if slower else tuple(reversed(told.terms))
    chosen = [one for one in ordered if (one.more_s > 0) == slower and abs(one.more_s) > 0.01 * abs(told.slower_s or 1)]
    if not chosen:
        return
    yield Table(
        ["  what makes it " + ("slower" if slower else "faster"), "best", "here", "more", "part"],
        [
            [
                f"  {term_words(one.name)}",
                format_seconds(max(0.0, one.winner_s)),
                format_seconds(max(0.0, one.other_s)),
                f"{'+' if one.more_s > 0 else '-'}{format_seconds(abs(one.more_s))}",
                f"{one.share:.0%}",
            ]
            for one in chosen[:MAX_TERMS]
        ],
    )


# -- what if ----------------------------------------------------------------------------------------------


def what_if_json(told: WhatIf) -> dict[str, Any]:
    """The answer_text as plain data; ``then`` has the keys of a strategy of `plan --json`."""
    return {
        "asked": told.asked,
        "changed": list(told.changed),
        "now": told.now.to_json(),
        "then": None if told.then is None else told.then.to_json(),
        "terms_now": msgspec.to_builtins(told.terms_now),
        "terms": msgspec.to_builtins(told.terms),
        "kept_s": told.kept_s,
        "speedup": told.speedup,
        "note": told.note,
    }


def what_if_text(told: WhatIf, words: Words) -> Iterator[Piece]:
    """What is changed, then both plans side by side."""
    yield ""
    for number, change in enumerate(told.changed):
        yield Paragraph(f"{'What if' if number == 0 else '    and'} {change}", indent=10)
    if told.then is None:
        yield Fact("  nothing runs", told.note)
        return
    if told.note:
        yield Paragraph(f"  {told.note}", indent=4)
    now, then = told.now.estimate, told.then.estimate
    yield Fact("  now", words(told.now.strategy))
    yield Fact("  then", words(told.then.strategy))
    yield Table(
        ["", "step", "MFU", "memory", "bound by", "what its step is made of"],
        [
            ["  now", *_measures(now), _terms(told.terms_now)],
            ["  then", *_measures(then), _terms(told.terms)],
        ],
    )
    yield Fact("  in all", _in_all(told))


def _measures(estimate: Any) -> list[str]:
    return [
        format_seconds(estimate.step_s),
        f"{estimate.mfu:.0%}",
        format_bytes(estimate.hbm_bytes_per_chip),
        estimate.bound_by,
    ]


def _terms(terms: Sequence[Term]) -> str:
    return ", ".join(f"{one.words} {one.share:.0%}" for one in terms[:MAX_TERMS] if one.share > 0.005)


def _in_all(told: WhatIf) -> str:
    assert told.then is not None
    said = f"{told.speedup:.3g} times the tokens per second"
    if told.then.strategy.mesh == told.now.strategy.mesh:
        return f"{said}, on the same mesh"
    if told.kept_s is not None:
        return f"{said}; kept as it is, the plan of now would take {format_seconds(told.kept_s)}"
    same_chips = told.then.num_chips == told.now.num_chips
    return f"{said}; the plan of now would not run" if same_chips else said


# -- the recipe -------------------------------------------------------------------------------------------


def recipe_text(made: Recipe, result: PlanResult, words: Words) -> Iterator[Piece]:
    """The recipe step by step, then its strategy beside the search's best."""
    yield ""
    yield "The recipe: data parallelism, FSDP, checkpointing, hybrid sharding, then context, tensor and pipeline"
    for step in made.steps:
        yield Fact(f"  {step.name}", f"{'yes' if step.applies else 'no '}  {step.reason}", column=23)
    yield Fact("  so", words(made.strategy), column=23)
    if made.refusal is not None:
        yield Fact("  refused", made.refusal.message, column=23)
    if made.estimate is None:
        return
    best, its = result.strategies[0].estimate, made.estimate
    ratio = its.step_s / best.step_s
    verdict = f"{ratio:.3g} times the best's {format_seconds(best.step_s)}" if ratio > 1.0005 else "as fast as the best"
    yield Fact(
        "  its step",
        f"{format_seconds(its.step_s)}, MFU {its.mfu:.0%}, {format_bytes(its.hbm_bytes_per_chip)} per chip: {verdict}",
        column=23,
    )
