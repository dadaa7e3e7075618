"""`meshwright plan`: the best ways to split a training job over a cluster."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import click
import msgspec

from meshwright.cli.fields import check_tokens, parse_fields, take_axes, take_option, with_fields
from meshwright.cli.machine import rates_for
from meshwright.cli.output import (
    emit_json,
    format_energy,
    format_power,
    format_range,
    json_option,
    print_fact,
    print_table,
    print_text,
    say,
    width,
)
from meshwright.cli.verbs.plan_pictures import show_breakdown, show_frontier
from meshwright.cli.verbs.plan_questions import answer, parse_questions
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_count, format_params, format_seconds, parse_count
from meshwright.cost.formulas.training_budget import DAY_S
from meshwright.cost.setting import Setting
from meshwright.plan.planner import plan_slices
from meshwright.plan.result import PlannedStrategy, PlanResult
from meshwright.plan.run_budget import RunBudget, run_budget
from meshwright.plan.space import FULL, USUAL
from meshwright.report.tables import Cell
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.job import Job, parse_batch, require_training
from meshwright.spec.plan_file import save_plan
from meshwright.spec.slices import parse_clusters
from meshwright.spec.strategy import AS_RUN, COLLECTIVE_MATMULS, Strategy, mesh_words

NUMBERS_WIDTH = 46
"""Columns that the numbers of the table need beside the strategy."""


@click.command()
@click.argument("model")
@click.option(
    "--on", "on", required=True, help="The cluster: v5p:16x20x28, h100:8x256, cpu:8; v5p:512chips finds the best slice."
)
@click.option("--batch", required=True, help="Tokens a step (4Mi) or sequences (1024seq).")
@click.option("--seq", "seq_len", required=True, help="Tokens of a sequence.")
@click.option("--tokens", help="Tokens of the whole run, such as 15T: gives days and cost.")
@click.option("--axes", help="Mesh axes to keep fixed, such as fsdp=1024,tensor=4.")
@click.option("--top", default=5, show_default=True, help="How many strategies to list.")
@click.option(
    "--collective-matmul", type=click.Choice(COLLECTIVE_MATMULS), help="Hide collectives over tensor behind products."
)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any field: strategy.remat=block.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Rates of the cluster (TOML), or datasheet.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the best plan to this file.")
@click.option("--full", is_flag=True, help="Try every schedule, ZeRO stage, offload and attention; screen nothing out.")
@click.option("--pareto", is_flag=True, help="List the plans that nothing beats in step time and memory, or in cost.")
@click.option("--png", type=click.Path(path_type=Path), help="The same, drawn to this file.")
@click.option("--breakdown", type=click.Path(path_type=Path), help="Draw where the best plan's step goes to this file.")
@click.option("--why-not", "why_nots", multiple=True, metavar="AXIS=N,...", help="Why not tensor=16,remat=block?")
@click.option("--what-if", "what_ifs", multiple=True, metavar="WHAT=Nx,...", help="What if chip.flops=8x,chips=2x?")
@click.option("--verify", is_flag=True, help="Compile each for its hardware, and list those that run and fit.")
@click.option("--recipe", is_flag=True, help="The rules of thumb of a lecture, step by step, beside the search.")
@json_option
def command(
    model: str,
    on: str,
    batch: str,
    seq_len: str,
    tokens: str | None,
    axes: str | None,
    top: int,
    collective_matmul: str | None,
    pairs: tuple[str, ...],
    calibration: Path | None,
    out: Path | None,
    full: bool,
    pareto: bool,
    png: Path | None,
    breakdown: Path | None,
    why_nots: tuple[str, ...],
    what_ifs: tuple[str, ...],
    verify: bool,
    recipe: bool,
    as_json: bool,
) -> None:
    """Find how to split the training of MODEL (a name or a config.json) over a cluster."""
    fields = parse_fields(pairs, sections=("model", "job", "strategy", "assumptions"))
    chosen = with_fields(find_model(model), "model", fields["model"])
    clusters = parse_clusters(on)
    length = parse_count(seq_len, what="seq")
    job = Job(
        batch_seqs=parse_batch(batch, seq_len=length),
        seq_len=length,
        train_tokens=parse_count(tokens, what="tokens") if tokens else None,
    )
    job = check_tokens(with_fields(job, "job", fields["job"]))
    require_training(job, "plan")
    if collective_matmul is not None:
        take_option(fields["strategy"], "collective_matmul", collective_matmul)
    fixed, questions = take_axes(axes, fields["strategy"]), parse_questions(why_nots, what_ifs, recipe=recipe)
    rates = rates_for(clusters[0], calibration, fitted=True)
    assumed = with_fields(AS_RUN, "assumptions", fields["assumptions"])
    choices = FULL if full else USUAL
    result = plan_slices(
        [Setting(chosen, cluster, job, rates, assumptions=assumed) for cluster in clusters],
        axes=fixed,
        overrides=fields["strategy"],
        choices=msgspec.structs.replace(choices, equal_stages=verify),
        exhaustive=full,
        top=top,
    )
    more: dict[str, Any] = {}
    if verify:
        from meshwright.cli.verbs.plan_verify import verified

        proved = verified(result)
        result, more["verified"] = proved.result, list(proved.table)
    if out:
        _save(result, out)
    if not as_json:
        print_plan(result)
    if pareto or png:
        more["pareto"] = show_frontier(result, axes=fixed, overrides=fields["strategy"], png=png, as_json=as_json)
    if breakdown:
        more["breakdown"] = show_breakdown(result, breakdown, as_json=as_json)
    more |= answer(
        result,
        questions,
        axes=fixed,
        overrides=fields["strategy"],
        choices=choices,
        words=full_words,
        as_json=as_json,
    )
    if as_json:
        budget = run_budget(result.plan(), step_s=result.strategies[0].estimate.step_s)
        emit_json({**result.to_json(), "training": budget, **more})


def _save(result: PlanResult, out: Path) -> None:
    try:
        save_plan(result.plan(), out)
    except OSError as error:
        raise InputError(
            f"cannot write the plan to {out}: {error.strerror}. Name a file in a folder of yours."
        ) from None
    say(f"wrote {out}")


def print_plan(result: PlanResult) -> None:
    """The ranked strategies, what they need, and the conventions behind the numbers."""
    job, best = result.job, result.strategies[0]
    used = best.cluster
    print_text(
        f"{result.model.name} on {used.short_name} ({used.num_chips:,} chip{'s' if used.num_chips > 1 else ''}), "
        f"{format_count(job.tokens_per_step)} tokens a step = {job.batch_seqs:,} sequences of {job.seq_len:,}"
    )
    for line in result.shortfall:
        print_text(line)
    strategies = [one.strategy for one in result.strategies]
    same = [words for words in _CHOICES if len({words(s) for s in strategies}) == 1]
    varied = [words for words in _CHOICES if words not in same]
    print_table(
        ["strategy, best first", "step", _range_word(best), "MFU", "memory", "bound by"],
        [[_strategy_words(one.strategy, varied), *_numbers(one)] for one in result.strategies],
    )
    if same:
        print_fact("all of them", ", ".join(filter(None, (words(strategies[0]) for words in same))))
    print_fact("placement", f"of the best: {placement_words(best.strategy.placement)}")
    budget = run_budget(result.plan(), step_s=best.estimate.step_s)
    if budget is not None:
        print_budget(budget, best.num_chips)
    for note in result.notes:
        print_text(note)


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


def print_budget(budget: RunBudget, num_chips: int) -> None:
    """What the whole run takes, in a few lines."""
    money = "no price known" if budget.cost_usd is None else f"${budget.cost_usd:,.0f}"
    print_fact(
        "the run",
        f"{format_count(budget.train_tokens)} tokens in {budget.steps:,.0f} steps: "
        f"{format_seconds(budget.days * DAY_S)}, {money}, {format_params(budget.chip_hours)} chip-hours",
    )
    petaflop_days, years = (_three_digits(x) for x in (budget.petaflop_days, budget.one_chip_years))
    print_fact(
        "",
        f"6 N D = {budget.flops:.3g} FLOPs = {petaflop_days} petaflop-days, {budget.mfu_6nd:.1%} of the chip-hours' "
        f"peak; {years} years on one chip at peak",
    )
    if budget.power_w is not None and budget.energy_kwh is not None:
        print_fact(
            "power",
            f"{format_power(budget.power_w)} for {num_chips:,} chips alone, {format_energy(budget.energy_kwh)} in all",
        )


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def placement_words(placement: Mapping[str, str]) -> str:
    """``"fsdp on x (16) x y (16); tensor on z (4)"``; axes of one chip are left out."""
    return "; ".join(f"{axis} on {place}" for axis, place in placement.items() if place != "1 chip") or "one chip"
