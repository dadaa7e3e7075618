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
    pieces = _frontier_text(setting.cluster, frontier)
    return Answer({"pareto": facts}, pieces, {png: lambda: _frontier_figure(setting, frontier)})


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


def _facts(plan: Plan) -> Facts:
    all_facts = plan.to_json()
    frontier_facts = {name: all_facts[name] for name in OF_FRONTIER}
    return {**frontier_facts, "cluster": plan.cluster.short_name, "usd_per_token": plan.usd_per_token}


def _frontier_text(cluster: Cluster, frontier: Frontier) -> Iterator[Piece]:
    row_number_by_id = {id(plan): row_number for row_number, plan in enumerate(listed(frontier.memory), 1)}
    columns: TableColumns = {
        "#": (lambda plan: row_number_by_id[id(plan)], None, "number"),
        **STEP,
        **MEMORY,
        **mfu_columns(frontier.memory),
        "microbatches": "strategy.num_microbatches",
        "remat": ("strategy.remat", lambda remat: remat if isinstance(remat, str) else "+".join(remat)),
        **MESH,
    }
    yield ""
    yield Table.of(listed(frontier.memory), columns, "Plans that nothing beats in both step time and memory")
    num_left_out = len(frontier.memory) - len(row_number_by_id)
    if num_left_out:
        yield f"{num_left_out} more that save less than {LEAST_SAVING:.0%} of memory are in --json and in --png"
    if not frontier.cost:
        yield f"{cluster.chip.name} has no price (--price), so step time is not weighed against cost"
        return
    yield ""
    price_text = f"${cluster.chip.price_usd_per_hour:,.2f} a chip and hour"
    columns = {
        "chips": "num_chips",
        **STEP,
        "cost of 1 B tokens": (_usd, "${:,.2f}".format, "usd_per_billion_tokens"),
        **mfu_columns(frontier.cost),
        **MESH,
    }
    yield Table.of(frontier.cost, columns, f"Step time against cost, on all chips and on parts ({price_text})")


MESH: TableColumns = {"mesh": ("strategy.mesh", mesh_words, "axes")}


def _usd(plan: Plan) -> float:
    return 1e9 * (plan.usd_per_token or 0.0)


def _frontier_figure(setting: Setting, frontier: Frontier) -> Figure:
    model, cluster, job = setting.model, setting.cluster, setting.job
    row_number_by_id = {id(plan): str(row_number) for row_number, plan in enumerate(listed(frontier.memory), 1)}
    limit_bytes = setting.memory_limit
    memory_points = [(plan.predicted, row_number_by_id.get(id(plan), "")) for plan in frontier.memory]
    return pareto_figure(
        [(estimate.step_s, estimate.hbm_bytes_per_chip, row_number) for estimate, row_number in memory_points],
        [(plan.predicted.step_s, _usd(plan), f"{counted(plan.cluster.num_chips, 'chip')}") for plan in frontier.cost],
        limit_bytes=None if limit_bytes == float("inf") else limit_bytes,
        title=f"{model.name} on {cluster.short_name}: plans that nothing beats",
        subtitle=f"{format_count(job.tokens_per_step)} tokens a step. Numbered dots are rows of the table, small ones "
        "save too little memory to be listed.",
    )


# -- the parts of a step --------------------------------------------------------------------------------


def step_answer(result: PlanResult, png: Path | None) -> Answer:
    """Returns the parts of the best plan's step, and its collectives."""
    best_plan = result.plans[0]
    breakdown = Breakdown(price_strategy(best_plan.setting, best_plan.strategy))
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


def _breakdown_figure(result: PlanResult, breakdown: Breakdown) -> Figure:
    best_plan = result.plans[0]
    # groups of mesh axes whose links are busy for more than a thousandth of the total
    seconds_by_link = {
        name if name == "latency" else f"{name.replace(',', '+')} links": seconds
        for name, seconds in breakdown.alone.items()
        if seconds > 1e-3 * sum(breakdown.alone.values())
    }
    return breakdown_figure(
        breakdown.named(),
        seconds_by_link,
        title=f"{result.setting.model.name} on {best_plan.cluster.short_name}: where a step goes",
        subtitle=f"{short_mesh(best_plan.strategy.mesh)}, {format_count(best_plan.job.tokens_per_step)} tokens a step, "
        f"remat {best_plan.strategy.remat}. Of the links' own time {format_seconds(breakdown.exposed_s)} are exposed.",
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


def _why_not_facts(answer: WhyNot, result: PlanResult) -> Facts:
    """Returns the answer as plain data; each strategy has the assumptions under which it is priced."""
    facts = {**msgspec.to_builtins(answer), "slower_s": answer.slower_s, "runs": answer.refusal is None}
    assumptions = msgspec.to_builtins(result.setting.assumptions)
    facts["winner"] |= assumptions
    if answer.strategy is not None:
        facts["strategy"] |= {name: answer.asked.get(name, value) for name, value in assumptions.items()}
    return facts


def _why_not_text(answer: WhyNot, result: PlanResult) -> Iterator[Piece]:
    yield ""
    fields = {name: str(value).lower() if isinstance(value, bool) else value for name, value in answer.asked.items()}
    yield f"Why not {', '.join(f'{name} {value}' for name, value in fields.items())}"
    if answer.refusal is not None:
        yield Fact("  refused", f"({answer.refusal.rule}) {answer.refusal.message}")
    if answer.strategy is None or answer.estimate is None or answer.slower_s is None:
        return
    best_est, own_estimate = answer.winner_estimate, answer.estimate
    label = "  best completion" if answer.refusal is None else "  least memory"
    yield Fact(label, full_words(answer.strategy))
    if answer.strategy == answer.winner and not answer.slower_s:
        yield Fact("", "that is the best of the list itself")
        return
    direction = "longer" if answer.slower_s >= 0 else "shorter"
    condition = "" if answer.refusal is None else " if it fitted"
    yield Fact(
        "  step",
        f"{format_seconds(own_estimate.step_s)}{condition}, {format_seconds(abs(answer.slower_s))} "
        f"({abs(answer.slower_s) / best_est.step_s:.1%}) {direction} than the best's {format_seconds(best_est.step_s)}",
    )
    if answer.slower_s < -MISSED * best_est.step_s and answer.refusal is None:
        yield Fact(
            "",
            "the search did not look at it: without --full it screens a large space, and tries the usual choices only",
        )
    limit_bytes = result.plans[0].setting.memory_limit
    extra_bytes = own_estimate.hbm_bytes_per_chip - best_est.hbm_bytes_per_chip
    yield Fact(
        "  memory",
        f"{format_bytes(own_estimate.hbm_bytes_per_chip)} per chip of {format_bytes(limit_bytes)}, "
        f"{format_bytes(abs(extra_bytes))} {'more' if extra_bytes >= 0 else 'less'}",
    )
    yield from _terms_text(answer)
    for limit_index, limit in enumerate(answer.limits[:MAX_LIMITS]):
        yield Fact("  beyond" if limit_index == 0 else "", limit_words(limit))


def _terms_text(told: WhyNot) -> Iterator[Piece]:
    """Yields the terms that make it slower, or faster if it is faster."""
    is_slower = (told.slower_s or 0.0) >= 0
    terms = told.terms if is_slower else tuple(reversed(told.terms))
    rows = [row for row in terms if (row.more_s > 0) == is_slower and abs(row.more_s) > 0.01 * abs(told.slower_s or 1)]
    if not rows:
        return
    yield Table.of(
        rows[:MAX_TERMS],
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


def _what_if_text(answer: WhatIf) -> Iterator[Piece]:
    yield ""
    for change_index, change in enumerate(answer.changed):
        yield Paragraph(f"{'What if' if change_index == 0 else '    and'} {change}", indent=10)
    if answer.then is None:
        yield Fact("  nothing runs", answer.note)
        return
    if answer.note:
        yield Paragraph(f"  {answer.note}", indent=4)
    yield Fact("  now", full_words(answer.now.strategy))
    yield Fact("  then", full_words(answer.then.strategy))
    table = Table.of(plans := [answer.now, answer.then], {**STEP, **cost_columns(plans)})
    term_texts = [
        ", ".join(f"{term.words} {term.share:.0%}" for term in plan_terms[:MAX_TERMS] if term.share > 0.005)
        for plan_terms in (answer.terms_now, answer.terms)
    ]
    rows = [[name, *row, text] for name, row, text in zip(("now", "then"), table.rows, term_texts, strict=True)]
    headings = [Heading("", "  {}".format, "plan"), *table.columns, Heading("what its step is made of", str, "terms")]
    yield Table(headings, rows)
    yield Fact("  in all", _in_all(answer))


def _in_all(answer: WhatIf) -> str:
    assert answer.then is not None
    ratio_text = f"{answer.speedup:.3g} times the tokens per second"
    if answer.then.strategy.mesh == answer.now.strategy.mesh:
        return f"{ratio_text}, on the same mesh"
    if answer.kept_s is not None:
        return f"{ratio_text}; the present plan, unchanged, would take {format_seconds(answer.kept_s)}"
    has_same_chips = answer.then.num_chips == answer.now.num_chips
    return f"{ratio_text}; the present plan would not run" if has_same_chips else ratio_text


# -- the recipe -------------------------------------------------------------------------------------------


def recipe_answer(result: PlanResult) -> Answer:
    """Returns the recipe step by step, then its strategy beside the search's best."""
    best_plan = result.plans[0]
    outcome = recipe(result.setting, template=best_plan.strategy)
    facts = {**msgspec.to_builtins(outcome), "best_step_s": best_plan.predicted.step_s}
    facts["strategy"] |= msgspec.to_builtins(result.setting.assumptions)
    return Answer({"recipe": facts}, _recipe_text(outcome, best_plan.predicted))


def _recipe_text(outcome: Recipe, best: Estimate) -> Iterator[Piece]:
    make_fact = partial(Fact, column=23)
    yield ""
    yield "The recipe: data parallelism, FSDP, checkpointing, hybrid sharding, then context, tensor and pipeline"
    for step in outcome.steps:
        yield make_fact(f"  {step.name}", f"{'yes' if step.applies else 'no '}  {step.reason}")
    yield make_fact("  so", full_words(outcome.strategy))
    if outcome.refusal is not None:
        yield make_fact("  refused", outcome.refusal.message)
    if outcome.estimate is None:
        return
    est = outcome.estimate
    ratio = est.step_s / best.step_s
    verdict = f"{ratio:.3g} times the best's {format_seconds(best.step_s)}" if ratio > 1.0005 else "as fast as the best"
    yield make_fact(
        "  its step",
        f"{format_seconds(est.step_s)}, MFU {est.mfu:.0%}, {format_bytes(est.hbm_bytes_per_chip)} per chip: {verdict}",
    )
