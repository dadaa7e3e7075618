"""`meshwright plan`: the best ways to split a training job over a cluster."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import click
import msgspec

from meshwright.api.rates import rates_for
from meshwright.cli.fields import check_tokens, parse_fields, take_axes, take_option, with_fields
from meshwright.cli.output import (
    format_energy,
    format_power,
    format_range,
    say,
    three_digits,
    width,
)
from meshwright.cli.shared import AXES, BATCH, CALIBRATION, SET
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.cli.verbs.plan_pictures import breakdown_answer, frontier_answer
from meshwright.cli.verbs.plan_questions import answers, parse_questions
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_count, format_params, format_seconds
from meshwright.cost.formulas.training_budget import DAY_S
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_slices
from meshwright.plan.result import PlannedStrategy, PlanResult
from meshwright.plan.run_budget import RunBudget, run_budget
from meshwright.plan.space import FULL, USUAL
from meshwright.report.answer import Answer, Fact, Piece, Table
from meshwright.report.tables import Cell
from meshwright.spec.catalogue import load_model
from meshwright.spec.job import Job, parse_batch, require_training
from meshwright.spec.plan_file import save_plan
from meshwright.spec.slices import parse_clusters
from meshwright.spec.strategy import AS_RUN, COLLECTIVE_MATMULS, Strategy, mesh_words

NUMBERS_WIDTH = 46
"""Columns that the numbers of the table need beside the strategy."""


class Given(Options):
    model: str = argument()
    on: str = option("The cluster: v5p:16x20x28, h100:8x256, cpu:8; v5p:512chips finds the best slice.")
    batch: str = BATCH
    seq_len: Count = option("Tokens of a sequence.", "--seq")
    tokens: Count | None = option("Tokens of the whole run, such as 15T: gives days and cost.")
    axes: str | None = AXES
    top: int = option("How many strategies to list.", default=5)
    collective_matmul: str | None = option(
        "Hide collectives over tensor behind products.", type=click.Choice(COLLECTIVE_MATMULS)
    )
    pairs: tuple[str, ...] = SET
    calibration: Path | None = CALIBRATION
    out: Path | None = option("Write the best plan to this file.", "-o", "--out")
    full: bool = option("Try every schedule, ZeRO stage, offload and attention; screen nothing out.")
    pareto: bool = option("List the plans that nothing beats in step time and memory, or in cost.")
    png: Path | None = option("The same, drawn to this file.")
    breakdown: Path | None = option("Draw where the best plan's step goes to this file.")
    why_nots: tuple[str, ...] = option("Why not tensor=16,remat=block?", "--why-not", metavar="AXIS=N,...")
    what_ifs: tuple[str, ...] = option("What if chip.flops=8x,chips=2x?", "--what-if", metavar="WHAT=Nx,...")
    verify: bool = option("Compile each for its hardware, and list those that run and fit.")
    recipe: bool = option("The rules of thumb of a lecture, step by step, beside the search.")


@verb(Given)
def command(given: Given) -> Answer:
    """Find how to split the training of MODEL (a name or a config.json) over a cluster."""
    fields = parse_fields(given.pairs, sections=("model", "job", "strategy", "assumptions"))
    chosen = with_fields(load_model(given.model), "model", fields["model"])
    clusters = parse_clusters(given.on)
    batch_seqs = parse_batch(given.batch, seq_len=given.seq_len)
    job = Job(batch_seqs=batch_seqs, seq_len=given.seq_len, train_tokens=given.tokens)
    job = check_tokens(with_fields(job, "job", fields["job"]))
    require_training(job, "plan")
    if given.collective_matmul is not None:
        take_option(fields["strategy"], "collective_matmul", given.collective_matmul)
    fixed = take_axes(given.axes, fields["strategy"])
    questions = parse_questions(given.why_nots, given.what_ifs, recipe=given.recipe)
    rates = rates_for(clusters[0], given.calibration, fitted=True)
    assumed = with_fields(AS_RUN, "assumptions", fields["assumptions"])
    choices = FULL if given.full else USUAL
    result = rank_slices(
        [Setting(chosen, cluster, job, rates, assumptions=assumed) for cluster in clusters],
        axes=fixed,
        overrides=fields["strategy"],
        choices=msgspec.structs.replace(choices, equal_stages=given.verify),
        exhaustive=given.full,
        top=given.top,
    )
    parts: list[Answer] = []
    if given.verify:
        from meshwright.cli.verbs.plan_verify import verified

        proved = verified(result)
        result = proved.result
        parts.append(Answer({"verified": proved.table}, []))
    if given.out:
        _save(result, given.out)
    if given.pareto or given.png:
        parts.append(frontier_answer(result, png=given.png))
    if given.breakdown:
        parts.append(breakdown_answer(result, given.breakdown))
    parts += answers(result, questions, words=full_words)
    budget = run_budget(result.plan(), step_s=result.strategies[0].estimate.step_s)
    facts = {**result.to_json(), "training": budget}
    pictures: dict[Path | None, Any] = {}
    for part in parts:
        facts |= part.facts
        pictures |= part.pictures
    text = [*plan_text(result), *(piece for part in parts for piece in part.pieces)]
    return Answer(facts, text, pictures, [_listed(result)])


def _listed(result: PlanResult) -> Table:
    """The ranked strategies with every figure as it is."""
    rows = [one.to_json() for one in result.strategies]
    shown = [{name: value for name, value in row.items() if not isinstance(value, dict)} for row in rows]
    merged = [{**row["axes"], **plain} for row, plain in zip(rows, shown, strict=True)]
    return Table.of(merged, {name: name for name in merged[0]})


def _save(result: PlanResult, out: Path) -> None:
    try:
        save_plan(result.plan(), out)
    except OSError as error:
        raise InputError(
            f"cannot write the plan to {out}: {error.strerror}. Name a file in a folder of yours."
        ) from None
    say(f"wrote {out}")


def plan_text(result: PlanResult) -> Iterator[Piece]:
    """The ranked strategies, what they need, and the conventions behind the numbers."""
    job, best = result.job, result.strategies[0]
    used = best.cluster
    yield (
        f"{result.model.name} on {used.short_name} ({used.num_chips:,} chip{'s' if used.num_chips > 1 else ''}), "
        f"{format_count(job.tokens_per_step)} tokens a step = {job.batch_seqs:,} sequences of {job.seq_len:,}"
    )
    yield from result.shortfall
    strategies = [one.strategy for one in result.strategies]
    same = [words for words in _CHOICES if len({words(s) for s in strategies}) == 1]
    varied = [words for words in _CHOICES if words not in same]
    yield Table(
        ["strategy, best first", "step", _range_word(best), "MFU", "memory", "bound by"],
        [[_strategy_words(one.strategy, varied), *_numbers(one)] for one in result.strategies],
    )
    if same:
        yield Fact("all of them", ", ".join(filter(None, (words(strategies[0]) for words in same))))
    yield Fact("placement", f"of the best: {placement_words(best.strategy.placement)}")
    budget = run_budget(result.plan(), step_s=best.estimate.step_s)
    if budget is not None:
        yield from budget_text(budget, best.num_chips)
    yield from result.notes


def _range_word(one: PlannedStrategy) -> str:
    """What the range beside a step time is: an interval that measurements fall into, or bounds by data."""
    return "bounds" if one.estimate.step_s_p10 is None else "P10-P90"


def _numbers(one: PlannedStrategy) -> list[Cell]:
    at = one.estimate
    return [
        format_seconds(at.step_s),
        format_range(at.step_s_p10, at.step_s_p90)
        if at.step_s_p10 is not None and at.step_s_p90 is not None
        else format_range(at.step_s_lower, at.step_s_upper),
        f"{at.mfu:.0%}",
        format_bytes(at.hbm_bytes_per_chip),
        at.bound_by,
    ]


def _strategy_words(strategy: Strategy, varied: Sequence[Callable[[Strategy], str]]) -> str:
    """The mesh, broken between axes only, and below it the choices in which the listed strategies differ."""
    lines = [""]
    for part in mesh_words(strategy.mesh).split(", "):
        if lines[-1] and len(lines[-1]) + len(part) + 2 > width() - NUMBERS_WIDTH:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += f", {part}" if lines[-1] else part
    choices = ", ".join(filter(None, (words(strategy) for words in varied)))
    room = max(20, width() - NUMBERS_WIDTH - 2)
    return "\n".join([*lines, *(f"  {line}" for line in wrap(choices, room))])


def microbatch_words(strategy: Strategy) -> str:
    """``"1 microbatch"``, ``"8 microbatches"``."""
    count = strategy.num_microbatches
    return f"{count:,} microbatch{'es' if count > 1 else ''}"


def remat_words(strategy: Strategy) -> str:
    """``"remat block"``, or the kept results joined by plus signs."""
    kept = strategy.remat
    return f"remat {kept if isinstance(kept, str) else '+'.join(kept) or 'keeping nothing'}"


def schedule_words(strategy: Strategy) -> str:
    """``"interleaved, 4 chunks"``; "" without a pipeline."""
    if strategy.mesh.get("pipeline", 1) == 1:
        return ""
    return strategy.schedule if strategy.chunks == 1 else f"{strategy.schedule} in {strategy.chunks} chunks"


def sharding_words(strategy: Strategy) -> str:
    """What ``fsdp`` splits, and how keys meet queries over ``context``; "" where there is only one way."""
    words = []
    if strategy.mesh.get("fsdp", 1) > 1 and strategy.zero is not None:
        words.append(f"ZeRO-{strategy.zero}")
    if strategy.mesh.get("context", 1) > 1:
        words.append({"gather": "gathered keys"}.get(strategy.context_attention, strategy.context_attention))
    return ", ".join(words)


def offload_words(strategy: Strategy) -> str:
    """``"optimizer offloaded"``, or ""."""
    return f"{' and '.join(strategy.offload)} offloaded" if strategy.offload else ""


def collective_matmul_words(strategy: Strategy) -> str:
    """``"two-way collective matmuls"``; "" without them, or without an axis that they run over."""
    found = strategy.collective_matmul
    return "" if found == "none" or strategy.mesh.get("tensor", 1) == 1 else f"{found} collective matmuls"


_CHOICES: tuple[Callable[[Strategy], str], ...] = (
    microbatch_words,
    remat_words,
    schedule_words,
    sharding_words,
    offload_words,
    collective_matmul_words,
)


def full_words(strategy: Strategy) -> str:
    """The mesh and every choice, in one line."""
    return ", ".join(filter(None, (mesh_words(strategy.mesh), *(words(strategy) for words in _CHOICES))))


def budget_text(budget: RunBudget, num_chips: int) -> Iterator[Piece]:
    """What the whole run takes, in a few lines."""
    money = "no price known" if budget.cost_usd is None else f"${budget.cost_usd:,.0f}"
    yield Fact(
        "the run",
        f"{format_count(budget.train_tokens)} tokens in {budget.steps:,.0f} steps: "
        f"{format_seconds(budget.days * DAY_S)}, {money}, {format_params(budget.chip_hours)} chip-hours",
    )
    petaflop_days, years = (three_digits(x) for x in (budget.petaflop_days, budget.one_chip_years))
    yield Fact(
        "",
        f"6 N D = {budget.flops:.3g} FLOPs = {petaflop_days} petaflop-days, {budget.mfu_6nd:.1%} of the chip-hours' "
        f"peak; {years} years on one chip at peak",
    )
    if budget.power_w is not None and budget.energy_kwh is not None:
        yield Fact(
            "power",
            f"{format_power(budget.power_w)} for {num_chips:,} chips alone, {format_energy(budget.energy_kwh)} in all",
        )


def placement_words(placement: Mapping[str, str]) -> str:
    """``"fsdp on x (16) x y (16); tensor on z (4)"``; axes of one chip are left out."""
    return "; ".join(f"{axis} on {place}" for axis, place in placement.items() if place != "1 chip") or "one chip"
