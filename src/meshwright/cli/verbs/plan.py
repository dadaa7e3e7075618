"""`meshwright plan`: the best ways to split a training job over a cluster."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import click
import msgspec

from meshwright.cli.asked import with_rates
from meshwright.cli.fields import PLANNED, job_of, parse_fields, parse_why_not, take_axes, with_fields
from meshwright.cli.output import format_range, save_to, say, width
from meshwright.cli.verb import BATCH, SEQ_NEEDED, Count, argument, option, verb
from meshwright.cli.verbs import plan_words
from meshwright.cli.verbs.plan_parts import frontier_answer, recipe_answer, step_answer, what_if_answer, why_not_answer
from meshwright.core.dims import LETTERS
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.progress import tracked
from meshwright.core.units import counted, format_bytes, format_count
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate
from meshwright.plan.islands import result_of_island
from meshwright.plan.plan_file import Plan, save_plan
from meshwright.plan.planner import rank_slices
from meshwright.plan.result import PlanResult
from meshwright.plan.run_budget import run_budget
from meshwright.plan.space import FULL, USUAL
from meshwright.plan.why.setup_changes import parse_what_if
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Symbols, Table, TableColumns, tables_of
from meshwright.spec.assumptions import AS_RUN
from meshwright.spec.catalogue import load_model, weights_of
from meshwright.spec.cluster import parse_clusters
from meshwright.spec.job import require_training
from meshwright.spec.strategy import COLLECTIVE_MATMULS, Strategy, mesh_words

MFU_LETTERS = ("B", "T", "N", "H", "Hv", "Hf", "L")
"""Letters of the formula of MFU."""
NUMBERS_WIDTH = 46
"""Columns that the numbers of the table need beside the strategy."""


class Given(plan_words.PlannerOptions):
    model: str = argument()
    on: str = option("The cluster: v5p:16x20x28, h100:8x256, cpu:8; v5p:512chips finds the best slice.")
    batch: str = BATCH
    seq_len: Count = SEQ_NEEDED
    tokens: Count | None = option("Tokens of the whole run, such as 15T: gives days and cost.")
    collective_matmul: str | None = option(
        "Hide collectives over tensor behind products.", type=click.Choice(COLLECTIVE_MATMULS)
    )
    full: bool = option("Try every schedule, ZeRO stage, offload and attention; screen nothing out.")
    breakdown: bool = option("Where the communication of the best plan's step goes; --png draws it.", group="Questions")
    verify: bool = option(
        "Compile each for its hardware, and list those that run and fit.", extra="run", group="Questions"
    )
    recipe: bool = option("The rules of thumb of a lecture, step by step, beside the search.", group="Questions")
    serve: bool = option(
        "services have a verb of their own. Write: meshwright service MODEL --on CLUSTER --prompt 8192 --output 512.",
        hidden=True,
    )


@verb(Given)
def command(given: Given) -> Answer:
    """Find how to split the training of MODEL (a name or a config.json) over a cluster. `service` plans to serve it."""
    fields = parse_fields(given.pairs, sections=PLANNED)
    model = with_fields(load_model(given.model), "model", fields["model"])
    clusters = parse_clusters(given.on)
    if given.price is not None:
        chip = clusters[0].chip.priced(given.price)
        clusters = tuple(msgspec.structs.replace(cluster, chip=chip) for cluster in clusters)
    job_fields = {"weights": weights_of(given.model), **fields["job"]}
    job = job_of(given.batch, given.seq_len, job_fields, given.tokens)
    require_training(job, "plan")
    if given.collective_matmul is not None:
        if "collective_matmul" in fields["strategy"]:
            raise InputError("strategy.collective_matmul is given in --collective-matmul and in --set. Leave one out.")
        fields["strategy"]["collective_matmul"] = given.collective_matmul
    size_by_axis = take_axes(given.axes, fields["strategy"])
    why_nots = [parse_why_not(text) for text in given.why_nots]
    what_ifs = [parse_what_if(text) for text in given.what_ifs]
    assumptions = with_fields(AS_RUN, "assumptions", fields["assumptions"])
    setting = Setting(model, clusters[0], job, assumptions=assumptions)
    setting = with_rates(setting, given.calibration, size_by_axis, fields["strategy"])
    result = rank_slices(
        [setting.on(cluster) for cluster in clusters],
        axes=size_by_axis,
        overrides=fields["strategy"],
        choices=FULL if given.full else USUAL,
        exhaustive=given.full,
        top=given.top,
    )
    answers: list[Answer] = []
    if given.verify:
        result, verdicts = _verified(result)
        answers.append(Answer({"verified": verdicts}, []))
    if given.out:
        save_to(given.out, lambda path: save_plan(result.plans[0], path))
    if given.pareto or (given.png and not given.breakdown):
        answers.append(frontier_answer(result_of_island(result), png=None if given.breakdown else given.png))
    if given.breakdown:
        answers.append(step_answer(result, given.png))
    if why_nots:
        answers.append(why_not_answer(result, why_nots))
    if what_ifs:
        answers.append(what_if_answer(result, what_ifs))
    if given.recipe:
        answers.append(recipe_answer(result_of_island(result)))
    best_plan = result.plans[0]
    facts = {**result.to_json(), "training": run_budget(best_plan, step_s=best_plan.predicted.step_s)}
    if given.price is not None:
        facts["usd_per_token"] = best_plan.usd_per_token or 0.0
    pictures: dict[Path | None, Any] = {}
    for answer in answers:
        facts |= answer.facts
        pictures |= answer.pictures
    pieces = [piece for answer in answers for piece in answer.pieces]
    rows = [{**row["axes"], **row} for row in facts["strategies"]]
    flat_rows = [{name: value for name, value in row.items() if not isinstance(value, dict)} for row in rows]
    return Answer(facts, [*plan_text(result), *pieces], pictures, [flat_rows, *tables_of(pieces)])


def _verified(result: PlanResult) -> tuple[PlanResult, list[Facts]]:
    """Returns the plan with the strategies that the compiler accepts, and its verdict on each, after some seconds each.

    Raises CannotRunError if it accepts none.
    """
    from meshwright.api.proving import prove_strategy
    from meshwright.verify.targets import usable_target

    accepted_plans: list[Plan] = []
    verdicts: list[Facts] = []
    for rank, plan in enumerate(tracked(result.plans, "compiling plans"), 1):
        proof = prove_strategy(msgspec.structs.replace(plan.setting, calibration=result.setting.rates), plan.strategy)
        num_bytes = None if proof.memory is None else proof.memory.needed
        verdicts.append({"strategy": rank, "runs": proof.runs, "refusal": proof.refusal, "hbm_bytes_needed": num_bytes})
        fit_text = "compiles" if num_bytes is None else f"compiles and fits, {format_bytes(num_bytes)} a chip"
        say(f"verified {rank} of {len(result.plans)}: {fit_text if proof.runs else proof.refusal}")
        accepted_plans += [plan] if proof.runs else []
    if not accepted_plans:
        raise CannotRunError(
            f"the compiler accepts none of the {len(verdicts)} best strategies. Of the first: {verdicts[0]['refusal']}"
        )
    how_text = f"compile for {result.setting.cluster.chip.full_name or result.setting.cluster.chip.name} and fit"
    if usable_target(result.plans[0].cluster).platform == "cpu":
        how_text = "compile for emulated CPU devices, which shows nothing of their memory"
    note_text = f"{len(accepted_plans)} of {len(verdicts)} strategies {how_text}"
    return msgspec.structs.replace(result, plans=tuple(accepted_plans), notes=(*result.notes, note_text)), verdicts


def plan_text(result: PlanResult) -> Iterator[Piece]:
    """Yields the ranked strategies, the best one's placement and run, and the conventions behind the numbers."""
    job, best_plan = result.setting.job, result.plans[0]
    used = best_plan.cluster
    yield (
        f"{best_plan.model.name} on {used.short_name} ({counted(used.num_chips, 'chip')}), "
        f"{format_count(job.tokens_per_step)} tokens a step = {counted(job.batch_seqs, 'sequence')} of {job.seq_len:,}"
    )
    yield from result.shortfall
    strategies = [plan.strategy for plan in result.plans]
    shared_choices = [words_of for words_of in plan_words.CHOICES if len({words_of(s) for s in strategies}) == 1]
    varied_choices = [words_of for words_of in plan_words.CHOICES if words_of not in shared_choices]
    # The range beside a step time is an interval that measurements fall into, or bounds of the overlap.
    range_heading = "bounds" if best_plan.predicted.step_s_p10 is None else "P10-P90"
    columns: TableColumns = {
        "strategy, best first": lambda plan: _strategy_words(plan.strategy, varied_choices),
        **plan_words.STEP,
        range_heading: ("predicted", _range_words),
        **plan_words.cost_columns(result.plans),
    }
    yield Table.of(result.plans, columns)
    if shared_texts := [*filter(None, (words_of(strategies[0]) for words_of in shared_choices))]:
        yield Fact("every plan", ", ".join(shared_texts))
    yield Fact("the best", f"{plan_words.placement_words(best_plan.strategy.placement)}{_rest_words(best_plan)}")
    if overlap_text := plan_words.overlap_words(result.overlap, best_plan.setting, best_plan.strategy):
        yield Fact("its overlap", overlap_text)
    budget = run_budget(result.plans[0], step_s=best_plan.predicted.step_s)
    if budget is not None:
        yield from plan_words.budget_text(budget, best_plan.num_chips)
    yield Symbols({letter: LETTERS[letter] for letter in ("B", "T", *best_plan.model.dims) if letter in MFU_LETTERS})
    yield from map(Condition, result.notes)
    if "unmasked" in columns:
        yield Condition("unmasked: MFU without the scores that the mask leaves out; MFU counts them")


def _rest_words(plan: Plan) -> str:
    """Returns the free memory of a chip and the dollars of a million tokens, as far as memory and price are known."""
    text, limit_bytes = "", plan.setting.memory_limit
    if math.isfinite(limit_bytes):
        free_text = format_bytes(limit_bytes - plan.predicted.hbm_bytes_per_chip)
        text += f"; {free_text} of a chip's {format_bytes(limit_bytes)} free"
    if (usd_per_hour := plan.cluster.chip.price_usd_per_hour) is not None and plan.usd_per_token:
        text += f"; ${1e6 * plan.usd_per_token:.3g} a million tokens, at ${usd_per_hour:,.2f} a chip-hour"
    return text


def _range_words(estimate: Estimate) -> str:
    if estimate.step_s_p10 is None or estimate.step_s_p90 is None:
        return format_range(estimate.step_s_lower, estimate.step_s_upper)
    return format_range(estimate.step_s_p10, estimate.step_s_p90)


def _strategy_words(strategy: Strategy, varied_choices: Sequence[Callable[[Strategy], str]]) -> str:
    """Returns the mesh, broken between axes only, and below it the choices in which the listed strategies differ."""
    mesh_lines = [""]
    for part in mesh_words(strategy.mesh).split(", "):
        if mesh_lines[-1] and len(mesh_lines[-1]) + len(part) + 2 > width() - NUMBERS_WIDTH:
            mesh_lines[-1] += ","
            mesh_lines.append(part)
        else:
            mesh_lines[-1] += f", {part}" if mesh_lines[-1] else part
    choices_text = ", ".join(filter(None, (words_of(strategy) for words_of in varied_choices)))
    max_width = max(20, width() - NUMBERS_WIDTH - 2)
    return "\n".join([*mesh_lines, *(f"  {line}" for line in wrap(choices_text, max_width))])
