"""What `plan` adds to its table: frontiers and the parts of a step, also drawn; and the answers to its questions."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from meshwright.cli.verbs.explain import limit_words
from meshwright.cli.verbs.plan_words import MEMORY, STEP, cost_columns, full_words, mfu_columns
from meshwright.core.units import counted, format_bytes, format_count, format_seconds
from meshwright.cost.breakdown import Breakdown, term_words
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate, price_strategy
from meshwright.plan.pareto import Frontier, pareto
from meshwright.plan.plan_file import Plan
from meshwright.plan.ranking import TIE
from meshwright.plan.result import PlanResult
from meshwright.plan.why.recipe import Recipe, recipe
from meshwright.plan.why.what_if import WhatIf, what_if
from meshwright.plan.why.why_not import WhyNot, why_not
from meshwright.report.answer import Answer, Fact, Facts, Heading, Paragraph, Piece, Table, TableColumns
from meshwright.report.bars import breakdown_figure
from meshwright.report.figure import Figure
from meshwright.report.plans.pareto import pareto_figure
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import mesh_words, short_mesh

LEAST_SAVING = 0.1
"""Share of memory that a listed plan saves over the one listed before it."""


# -- frontiers ------------------------------------------------------------------------------------------


def frontier_answer(result: PlanResult, *, png: Path | None) -> Answer:
    """Returns the frontiers of the job that was planned.

    They are those of the cluster that the plans use: all of it, or the largest part that the job divides over.
    """
    setting, frontier = result.plans[0].setting, pareto(result)
    facts = {"memory": [_facts(plan) for plan in frontier.memory], "cost": [_facts(plan) for plan in frontier.cost]}
    text = _frontier_text(setting.cluster, frontier)
    return Answer({"pareto": facts}, text, {png: lambda: _frontier_figure(setting, frontier)})


def listed(frontier: Sequence[Plan]) -> list[Plan]:
    """Returns plans of a frontier, fastest first, each with at least a tenth less memory than the one before it.

    Of plans that are equally fast it takes the smallest.
    """
    plans: list[Plan] = []
    for plan in frontier:
        estimate = plan.predicted
        if plans and estimate.step_s <= (1 + TIE) * plans[-1].predicted.step_s:
            plans[-1] = plan
        elif not plans or estimate.hbm_bytes_per_chip <= (1 - LEAST_SAVING) * plans[-1].predicted.hbm_bytes_per_chip:
            plans.append(plan)
    return plans


OF_FRONTIER = (
    *("num_chips", "axes", "zero", "num_microbatches", "remat"),
    *("schedule", "step_s", "mfu", "hbm_bytes_per_chip"),
)
"""Keys of `plan --json` that a plan of a frontier has."""


def _facts(found: Plan) -> Facts:
    all_facts = found.to_json()
    frontier_facts = {name: all_facts[name] for name in OF_FRONTIER}
    return {**frontier_facts, "cluster": found.cluster.short_name, "usd_per_token": found.usd_per_token}


def _frontier_text(cluster: Cluster, found: Frontier) -> Iterator[Piece]:
    number_of_plan = {id(plan): number for number, plan in enumerate(listed(found.memory), 1)}
    columns: TableColumns = {
        "#": (lambda plan: number_of_plan[id(plan)], None, "number"),
        **STEP,
        **MEMORY,
        **mfu_columns(found.memory),
        "microbatches": "strategy.num_microbatches",
        "remat": ("strategy.remat", lambda remat: remat if isinstance(remat, str) else "+".join(remat)),
        **MESH,
    }
    yield ""
    yield Table.of(listed(found.memory), columns, "Plans that nothing beats in both step time and memory")
    num_left_out = len(found.memory) - len(number_of_plan)
    if num_left_out:
        yield f"{num_left_out} more that save less than {LEAST_SAVING:.0%} of memory are in --json and in --png"
    if not found.cost:
        yield f"{cluster.chip.name} has no price (--price), so step time is not weighed against cost"
        return
    yield ""
    price_text = f"${cluster.chip.price_usd_per_hour:,.2f} a chip and hour"
    columns = {
        "chips": "num_chips",
        **STEP,
        "cost of 1 B tokens": (_usd, "${:,.2f}".format, "usd_per_billion_tokens"),
        **mfu_columns(found.cost),
        **MESH,
    }
    yield Table.of(found.cost, columns, f"Step time against cost, on all chips and on parts ({price_text})")


MESH: TableColumns = {"mesh": ("strategy.mesh", mesh_words, "axes")}


def _usd(found: Plan) -> float:
    return 1e9 * (found.usd_per_token or 0.0)


def _frontier_figure(setting: Setting, found: Frontier) -> Figure:
    model, cluster, job = setting.model, setting.cluster, setting.job
    numbers = {id(row): str(number) for number, row in enumerate(listed(found.memory), 1)}
    limit_bytes = setting.memory_limit
    memory = [(row.predicted, numbers.get(id(row), "")) for row in found.memory]
    return pareto_figure(
        [(predicted.step_s, predicted.hbm_bytes_per_chip, number) for predicted, number in memory],
        [(row.predicted.step_s, _usd(row), f"{counted(row.cluster.num_chips, 'chip')}") for row in found.cost],
        limit_bytes=None if limit_bytes == float("inf") else limit_bytes,
        title=f"{model.name} on {cluster.short_name}: plans that nothing beats",
        subtitle=f"{format_count(job.tokens_per_step)} tokens a step. Numbered dots are rows of the table, small ones "
        "save too little memory to be listed.",
    )


# -- the parts of a step --------------------------------------------------------------------------------


def step_answer(result: PlanResult, png: Path | None) -> Answer:
    """Returns the parts of the best plan's step, and its collectives."""
    best = result.plans[0]
    breakdown = Breakdown(price_strategy(best.setting, best.strategy))
    facts = {"parts": breakdown.named(), "traffic": breakdown.traffic}
    return Answer({"breakdown": facts}, _traffic_text(breakdown), {png: lambda: _breakdown_figure(result, breakdown)})


def _traffic_text(parts: Breakdown) -> Iterator[Piece]:
    """Yields every collective of a step: how often it runs, bytes that a device sends, seconds alone and exposed."""
    if not parts.traffic:
        return
    yield ""
    columns: TableColumns = {
        "collective": ("op", lambda op: op.replace("_", " ")),
        "over": ("axes", ", ".join),
        "times": ("executions", round),
        "bytes": ("num_bytes", format_bytes),
        "alone": ("alone_s", format_seconds),
        "exposed": ("exposed_s", format_seconds),
    }
    title = f"Communication of one step: {format_seconds(parts.exposed_s)} exposed ({parts.exposed_share:.0%}), "
    yield Table.of(parts.traffic, columns, f"{title}{format_seconds(parts.hidden_s)} hidden; bytes that a device sends")
    yield from parts.turns


def _breakdown_figure(result: PlanResult, parts: Breakdown) -> Figure:
    best = result.plans[0]
    # groups of mesh axes whose links are busy for more than a thousandth of the total
    seconds_by_link = {
        name if name == "latency" else f"{name.replace(',', '+')} links": seconds
        for name, seconds in parts.alone.items()
        if seconds > 1e-3 * sum(parts.alone.values())
    }
    return breakdown_figure(
        parts.named(),
        seconds_by_link,
        title=f"{result.setting.model.name} on {best.cluster.short_name}: where a step goes",
        subtitle=f"{short_mesh(best.strategy.mesh)}, {format_count(best.job.tokens_per_step)} tokens a step, "
        f"remat {best.strategy.remat}. Of the links' own time {format_seconds(parts.exposed_s)} are exposed.",
    )


MAX_TERMS = 3
MAX_LIMITS = 3
MISSED = 1e-3
"""Share of the best's step; a strategy that is faster by more gets a note that the search missed it."""


# -- why not ----------------------------------------------------------------------------------------------


def why_not_answer(result: PlanResult, asked: Sequence[Facts]) -> Answer:
    """Returns for each strategy asked about the rule that refuses it, and its best completion beside the winner."""
    answers = [why_not(result, asked_fields) for asked_fields in asked]
    facts = [_why_not_facts(answer, result) for answer in answers]
    return Answer({"why_not": facts}, [piece for answer in answers for piece in _why_not_text(answer, result)])


def _why_not_facts(told: WhyNot, result: PlanResult) -> Facts:
    """Returns the answer as plain data; each strategy has the assumptions under which it is priced."""
    facts = {**msgspec.to_builtins(told), "slower_s": told.slower_s, "runs": told.refusal is None}
    assumptions = msgspec.to_builtins(result.setting.assumptions)
    facts["winner"] |= assumptions
    if told.strategy is not None:
        facts["strategy"] |= {name: told.asked.get(name, value) for name, value in assumptions.items()}
    return facts


def _why_not_text(told: WhyNot, result: PlanResult) -> Iterator[Piece]:
    yield ""
    fields = {name: str(value).lower() if isinstance(value, bool) else value for name, value in told.asked.items()}
    yield f"Why not {', '.join(f'{name} {value}' for name, value in fields.items())}"
    if told.refusal is not None:
        yield Fact("  refused", f"({told.refusal.rule}) {told.refusal.message}")
    if told.strategy is None or told.estimate is None or told.slower_s is None:
        return
    best, completion = told.winner_estimate, told.estimate
    label = "  best completion" if told.refusal is None else "  least memory"
    yield Fact(label, full_words(told.strategy))
    if told.strategy == told.winner and not told.slower_s:
        yield Fact("", "that is the best of the list itself")
        return
    direction = "longer" if told.slower_s >= 0 else "shorter"
    condition = "" if told.refusal is None else " if it fitted"
    yield Fact(
        "  step",
        f"{format_seconds(completion.step_s)}{condition}, {format_seconds(abs(told.slower_s))} "
        f"({abs(told.slower_s) / best.step_s:.1%}) {direction} than the best's {format_seconds(best.step_s)}",
    )
    if told.slower_s < -MISSED * best.step_s and told.refusal is None:
        yield Fact(
            "",
            "the search did not look at it: without --full it screens a large space, and tries the usual choices only",
        )
    limit_bytes = result.plans[0].setting.memory_limit
    extra_bytes = completion.hbm_bytes_per_chip - best.hbm_bytes_per_chip
    yield Fact(
        "  memory",
        f"{format_bytes(completion.hbm_bytes_per_chip)} per chip of {format_bytes(limit_bytes)}, "
        f"{format_bytes(abs(extra_bytes))} {'more' if extra_bytes >= 0 else 'less'}",
    )
    yield from _terms_text(told)
    for number, limit in enumerate(told.limits[:MAX_LIMITS]):
        yield Fact("  beyond" if number == 0 else "", limit_words(limit))


def _terms_text(told: WhyNot) -> Iterator[Piece]:
    """Yields the terms that make it slower, or faster if it is faster."""
    is_slower = (told.slower_s or 0.0) >= 0
    terms = told.terms if is_slower else tuple(reversed(told.terms))
    shown = [row for row in terms if (row.more_s > 0) == is_slower and abs(row.more_s) > 0.01 * abs(told.slower_s or 1)]
    if not shown:
        return
    yield Table.of(
        shown[:MAX_TERMS],
        {
            f"  what makes it {'slower' if is_slower else 'faster'}": ("name", lambda name: f"  {term_words(name)}"),
            "best": ("winner_s", lambda s: format_seconds(max(0.0, s))),
            "here": ("other_s", lambda s: format_seconds(max(0.0, s))),
            "more": ("more_s", lambda s: f"{'+' if s > 0 else '-'}{format_seconds(abs(s))}"),
            "part": ("share", "{:.0%}".format),
        },
    )


# -- what if ----------------------------------------------------------------------------------------------


def what_if_answer(result: PlanResult, asked: Sequence[dict[str, float]]) -> Answer:
    """Returns the changes, then both plans side by side; ``then`` has the keys of a strategy of `plan --json`."""
    answers = [what_if(result, factors) for factors in asked]
    facts = [
        {**asdict(case), "now": case.now.to_json(), "then": case.then and case.then.to_json(), "speedup": case.speedup}
        for case in answers
    ]
    return Answer({"what_if": facts}, [piece for answer in answers for piece in _what_if_text(answer)])


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
    measures = Table.of(plans := [told.now, told.then], {**STEP, **cost_columns(plans)})
    terms = [
        ", ".join(f"{term.words} {term.share:.0%}" for term in plan_terms[:MAX_TERMS] if term.share > 0.005)
        for plan_terms in (told.terms_now, told.terms)
    ]
    rows = [[name, *row, words] for name, row, words in zip(("now", "then"), measures.rows, terms, strict=True)]
    heads = [Heading("", "  {}".format, "plan"), *measures.columns, Heading("what its step is made of", str, "terms")]
    yield Table(heads, rows)
    yield Fact("  in all", _in_all(told))


def _in_all(told: WhatIf) -> str:
    assert told.then is not None
    words = f"{told.speedup:.3g} times the tokens per second"
    if told.then.strategy.mesh == told.now.strategy.mesh:
        return f"{words}, on the same mesh"
    if told.kept_s is not None:
        return f"{words}; the present plan, unchanged, would take {format_seconds(told.kept_s)}"
    same_chips = told.then.num_chips == told.now.num_chips
    return f"{words}; the present plan would not run" if same_chips else words


# -- the recipe -------------------------------------------------------------------------------------------


def recipe_answer(result: PlanResult) -> Answer:
    """Returns the recipe step by step, then its strategy beside the search's best."""
    best = result.plans[0]
    outcome = recipe(result.setting, template=best.strategy)
    facts = {**msgspec.to_builtins(outcome), "best_step_s": best.predicted.step_s}
    facts["strategy"] |= msgspec.to_builtins(result.setting.assumptions)
    return Answer({"recipe": facts}, _recipe_text(outcome, best.predicted))


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
